"""Both entry points on 2 nodes of 2 ranks: after a kill they resume bit for bit."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from containers import left
from jobs import Jobs
from trainings import ROOT, Trainings
from trials import SEED, TRIALS

from cloudtrain.runtime.checkpoints import complete

pytestmark = [pytest.mark.slow, pytest.mark.docker, pytest.mark.proof]

SCRIPTS, PROVIDERS = ("ddp.py", "fsdp.py"), ("local", "docker")
EPOCHS, PER_EPOCH = {"ddp.py": 10, "fsdp.py": 6}, 10
FLAGS = ("--task", "odd.py", "--samples", "160", "--global-batch", "16", "--dropout", "0.2")
PAUSE = ("--pause", "0.025")
"""4 samples of a rank: a tenth of a second for a step, and more for one of fsdp.py."""
LATEST = 2.0
"""Most seconds from the first complete checkpoint to the kill. At least as much work is then left."""
KILL = """
import os, signal, sys
from pathlib import Path
for folder in Path("/proc").glob("[0-9]*"):
    words = (folder / "environ").read_bytes().split(b"\\0") if os.access(folder / "environ", os.R_OK) else []
    if f"RANK={sys.argv[1]}".encode() in words and sys.argv[2].encode() in (folder / "cmdline").read_bytes():
        os.kill(int(folder.name), signal.SIGKILL)
        sys.exit("killed")
"""
ALL = [(script, provider) for script in SCRIPTS for provider in PROVIDERS]
TRIED = [
    pytest.param(*ALL[n % len(ALL)], n, id=f"{n}-{'-'.join(ALL[n % len(ALL)])}") for n in range(max(3, TRIALS // 100))
]


@pytest.fixture(scope="module")
def uninterrupted(trainings: Trainings, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[int, float]]:
    """Return a function that gives the losses of a run without faults. It runs on one node, which must not matter."""
    known: dict[str, dict[int, float]] = {}

    def of(script: str) -> dict[int, float]:
        if script not in known:
            shutil.copy(Path(__file__).with_name("odd.py"), folder := tmp_path_factory.mktemp("uninterrupted"))
            flags = (*FLAGS, "--epochs", str(EPOCHS[script]))
            known[script] = trainings.run(folder, script, *flags, processes=4).losses()
            assert list(known[script]) == list(range(1, EPOCHS[script] * PER_EPOCH + 1))
        return known[script]

    return of


@pytest.mark.parametrize(("script", "provider", "number"), TRIED)
def test_goes_on_bit_for_bit(
    script: str,
    provider: str,
    number: int,
    jobs: Jobs,
    uninterrupted: Callable[[str], dict[int, float]],
    request: pytest.FixtureRequest,
    tmp_path: Path,
) -> None:
    wanted, draw = uninterrupted(script), random.Random(f"{SEED}-{number}")
    rank, delay = draw.randrange(4), draw.uniform(0, LATEST)
    for file in (ROOT / "entrypoints" / script, Path(__file__).with_name("odd.py")):
        shutil.copy(file, jobs.code)
    flags: tuple[str, ...] = ("--nodes", "2", "--nproc-per-node", "2", "--retries", "2", "--max-runtime", "10m")
    engine, before = None, []
    if provider == "docker":
        engine = request.getfixturevalue("engine")
        flags += ("--provider", "docker", "--image", request.getfixturevalue("images")("torch"))
        before = left(engine, tmp_path)
    run = jobs.detach(script, *flags, "--", *FLAGS, *PAUSE, "--epochs", str(EPOCHS[script]))
    live = jobs.store / "runs" / run.run_id / "live"
    jobs.wait_for(lambda: complete(live / "checkpoints"), 120)
    time.sleep(delay)
    whole = complete(live / "checkpoints")
    kill(jobs, run, engine, script, rank)
    done = jobs.cli("wait", run.url, "--json", timeout=240)
    result = done.json
    assert (done.code, result["state"]) == (0, "succeeded"), result
    assert [attempt["number"] for attempt in result["attempts"]] == ["0.0", "1.0"]
    first, second = losses(live, "0.0"), losses(live, "1.0")
    resumed = min(second) - 1
    assert result["attempts"][1]["resumed_from"] == f"step-{resumed}"
    assert resumed >= int(whole[-1].name.removeprefix("step-"))
    assert set(first) | set(second) == set(wanted)
    assert all(loss == wanted[s] for part in (first, second) for s, loss in part.items())
    jobs.gone()
    assert engine is None or left(engine, tmp_path) == before


def losses(live: Path, attempt: str) -> dict[int, float]:
    """Return the losses in the metrics of an attempt so far."""
    rows = [
        json.loads(line)
        for file in (live / "metrics").glob(f"{attempt}-node-*.jsonl")
        for line in file.read_text().splitlines()
    ]
    return {row["step"]: row["loss"] for row in rows}


def kill(jobs: Jobs, run: Any, engine: Any, script: str, rank: int) -> None:
    """Kill a rank with SIGKILL."""
    if engine is None:
        mine = [
            pid for pid, line in jobs.processes().items() if script in line and jobs.variable(pid, "RANK") == str(rank)
        ]
        os.kill(mine[0], signal.SIGKILL)
        return
    labels = [f"cloudtrain.run={(jobs.store / 'runs' / run.run_id).as_uri()}", f"cloudtrain.node={rank // 2}"]
    (container,) = engine.containers(filters={"label": labels})
    words = ["python3", "-c", KILL, str(rank), script]
    deadline = time.monotonic() + 30
    while engine.exec_start(engine.exec_create(container["Id"], words)["Id"]) != b"killed\n":
        assert time.monotonic() < deadline, "no such rank"
