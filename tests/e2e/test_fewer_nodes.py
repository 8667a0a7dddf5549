"""A run that loses machines and resumes on fewer, with the same global batch: its loss curve matches an undisturbed
run."""

from __future__ import annotations

import importlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from jobs import Jobs
from trainings import DIGITS, ROOT, TEXT, Launched

pytestmark = [pytest.mark.docker, pytest.mark.slow, pytest.mark.usefixtures("nothing_left")]

SLOW = """
    import os, time
    from {task} import *
    from {task} import compute_loss as quick

    calls = 0

    def compute_loss(model, batch):
        global calls
        calls += 1
        if os.environ.get("CLOUDTRAIN_ATTEMPT") == "0.0" and calls > 20:
            time.sleep(1)  # the drill waits for a checkpoint in the store
        return quick(model, batch)
"""
DDP = ("ddp.py", "digits", DIGITS, ("--max-steps", "50", "--save-every", "20"))
"""Few steps: another order of sums changes a loss by more with each step, by 6e-4 after 36 and by 7e-3 after 99."""
SMALL = ("--layers", "2", "--heads", "2", "--width", "32", "--context", "32", "--global-batch", "16")
FSDP = ("fsdp.py", "gpt", TEXT, ("--max-steps", "50", "--save-every", "20", *SMALL))
Script = tuple[str, str, Path, tuple[str, ...]]
STEPS = """
    import json, os, time
    from pathlib import Path

    resumed, ranks = os.environ["CLOUDTRAIN_RESUME_FROM"], int(os.environ["WORLD_SIZE"])
    passes = int(os.environ["CLOUDTRAIN_PLANNED_WORLD_SIZE"]) // ranks
    first = int(Path(resumed, "step").read_text()) + 1 if resumed else 1
    for step in range(first, 13):
        while step == 11 and not resumed and not os.path.exists(os.environ["CLOUDTRAIN_PREEMPT_FILE"]):
            time.sleep(0.05)
        if os.path.exists(os.environ["CLOUDTRAIN_PREEMPT_FILE"]):
            break
        if os.environ["RANK"] == "0":
            with open(os.environ["CLOUDTRAIN_METRICS_FILE"], "a") as out:
                row = {"step": step, "epoch": 0, "time": time.time(), "ranks": ranks, "passes": passes}
                out.write(json.dumps(row) + "\\n")
        if os.environ["RANK"] == "0" and step == 10:
            folder = Path(os.environ["CLOUDTRAIN_CHECKPOINT_DIR"], "step-10")
            folder.mkdir()
            (folder / "step").write_text("10")
"""
"""A script without torch: its step 11 waits for the drill."""


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Jobs]:
    jobs = Jobs(tmp_path)
    shutil.copytree(ROOT / "entrypoints", jobs.code, dirs_exist_ok=True)
    yield jobs
    jobs.close()


def rehearse_spot(jobs: Jobs, image: str, script: Script, nodes: str, *drill: str) -> dict[str, Any]:
    """Return the result of a spot job on SageMaker, whose steps are slow until the drill."""
    file, task, data, flags = script
    jobs.write("tasks/slow.py", SLOW.format(task=task))
    given = ["--", "--task", "tasks/slow.py", "--train", "{inputs.train}", *flags]
    return rehearse(jobs, image, file, "--input", f"train={data}", "--nodes", nodes, *drill, *given)


def rehearse(jobs: Jobs, image: str, file: str, *more: str) -> dict[str, Any]:
    """Return the result of a spot job on SageMaker."""
    sample = importlib.import_module("cloudtrain.providers.sagemaker").SAMPLE
    words = ["--provider", "sagemaker", "--store", sample["store"], "--local-store", str(jobs.store)]
    for name, value in sample["settings"].items():
        words += ["--set", f"{name}={value if isinstance(value, str) else json.dumps(value)}"]
    words += ["--image", sample["job"]["image"], "--local-image", image, "--spot"]
    words += ["--max-runtime", "20m", "--env", "OMP_NUM_THREADS=1", "--run-id", "r", "--json"]
    done = jobs.cli("rehearse", file, *words, *more, timeout=600)
    assert done.code == 0, done.err
    found: dict[str, Any] = done.json
    return found


def metrics(jobs: Jobs, attempt: str) -> list[dict[str, Any]]:
    rows = (jobs.store / f"runs/r/live/metrics/{attempt}-node-0.jsonl").read_text().splitlines()
    return [json.loads(row) for row in rows]


def losses(jobs: Jobs, attempt: str) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in metrics(jobs, attempt)}


def undisturbed(folder: Path, script: Script, processes: int) -> dict[int, float]:
    file, _, data, flags = script
    return Launched(folder, file, "--train", str(data), *flags, processes=processes).finish().losses()


def check_curve(jobs: Jobs, script: Script, most: int, result: dict[str, Any]) -> None:
    """Check that the attempts share one curve: equal bits on all nodes, and equal up to the order of sums on fewer."""
    first, last = (losses(jobs, result["attempts"][at]["number"]) for at in (0, -1))
    expected = undisturbed(jobs.tmp / "whole", script, most)
    assert max(first) >= 10
    assert {step: expected[step] for step in first} == first
    assert min(last) == int(result["attempts"][-1]["resumed_step"]) + 1
    assert max(last) == max(expected)
    assert list(last.values()) == pytest.approx([expected[step] for step in last], rel=1e-4)


def rows_of(result: dict[str, Any]) -> list[tuple[str, str | None, int]]:
    return [(row["number"], row["category"], row["nodes"]) for row in result["attempts"]]


def check_half(jobs: Jobs, result: dict[str, Any]) -> None:
    """Check a run that lost one of its two machines, and the request for the other one."""
    assert rows_of(result) == [("0.0", "preempted", 2), ("0.1", "capacity", 2), ("1.0", None, 1)]
    assert "drill: of machines for 2 nodes, 1 are left" in result["attempts"][1]["reason"]
    request = json.loads((jobs.store / "runs/r/attempts/1/request.json").read_text())
    assert (request["context"]["nodes"], request["context"]["planned_nodes"]) == (1, 2)
    assert request["body"]["request"]["body"]["ResourceConfig"]["InstanceCount"] == 1


def test_a_run_resumes_on_half_of_its_nodes(jobs: Jobs, images: Callable[[str], str]) -> None:
    """Check that each rank then makes twice as many passes. tests/entrypoints/test_ddp.py compares the losses of an
    entry point that resumes with fewer processes."""
    jobs.write("steps.py", STEPS)
    result = rehearse(jobs, images("torch"), "steps.py", "--nodes", "1:2", "--shortage", "node=1,after=checkpoint")
    check_half(jobs, result)
    first, last = (metrics(jobs, result["attempts"][at]["number"]) for at in (0, -1))
    assert [(row["step"], row["ranks"], row["passes"]) for row in first] == [(step, 2, 1) for step in range(1, 11)]
    assert [(row["step"], row["ranks"], row["passes"]) for row in last] == [(11, 1, 2), (12, 1, 2)]


@pytest.mark.proof
def test_the_curve_goes_on_on_half_of_the_nodes(jobs: Jobs, images: Callable[[str], str]) -> None:
    result = rehearse_spot(jobs, images("torch"), DDP, "1:2", "--shortage", "node=1,after=checkpoint")
    check_half(jobs, result)
    check_curve(jobs, DDP, 2, result)


@pytest.mark.proof
@pytest.mark.timeout(900)
@pytest.mark.parametrize("script", [DDP, FSDP], ids=["ddp", "fsdp"])
def test_four_nodes_lose_capacity_and_two_continue(jobs: Jobs, images: Callable[[str], str], script: Script) -> None:
    result = rehearse_spot(jobs, images("torch"), script, "2:4", "--shortage", "node=2,after=checkpoint")
    assert rows_of(result) == [("0.0", "preempted", 4), ("0.1", "capacity", 4), ("1.0", None, 2)]
    check_curve(jobs, script, 4, result)


@pytest.mark.proof
@pytest.mark.timeout(900)
@pytest.mark.parametrize("script", [DDP, FSDP], ids=["ddp", "fsdp"])
def test_all_nodes_again_are_equal_bit_for_bit(jobs: Jobs, images: Callable[[str], str], script: Script) -> None:
    result = rehearse_spot(jobs, images("torch"), script, "2:4", "--preempt", "node=2,after=checkpoint")
    assert rows_of(result) == [("0.0", "preempted", 4), ("0.1", None, 4)]
    check_curve(jobs, script, 4, result)
    last, expected = losses(jobs, "0.1"), undisturbed(jobs.tmp / "again", script, 4)
    assert {step: expected[step] for step in last} == last
