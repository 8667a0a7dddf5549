"""`entrypoints/ddp.py` under bare torchrun and bare python: a copy in a folder where cloudtrain cannot be imported."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
DIGITS = ROOT / "examples/data/digits.csv.gz"
STEPS = 12 * ((1797 - 360) // 64)


class Launch:
    """One start of the script in ``folder``; ``processes=0`` is plain python, without torchrun."""

    def __init__(self, folder: Path, *flags: str, processes: int = 0, env: Mapping[str, str] = {}) -> None:
        folder.mkdir(exist_ok=True)
        shutil.copy(ROOT / "entrypoints/ddp.py", folder)
        # First on sys.path: any import of cloudtrain, installed or not, ends the run.
        (folder / "cloudtrain.py").write_text("raise ImportError('the entry point must do without cloudtrain')\n")
        self.folder, self.metrics_file, self.preempt_file = folder, folder / "metrics.jsonl", folder / "preempt"
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", "--"]
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("CLOUDTRAIN_", "PYTHONPATH", "PET_"))}
        ours = {"CLOUDTRAIN_METRICS_FILE": str(self.metrics_file), "CLOUDTRAIN_PREEMPT_FILE": str(self.preempt_file)}
        self.process = subprocess.Popen(
            [sys.executable, *(torchrun if processes else []), "ddp.py", *flags],
            cwd=folder,
            # OMP_NUM_THREADS: without it torchrun itself warns on stderr.
            env=inherited | ours | {"OMP_NUM_THREADS": "1"} | dict(env),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def finish(self) -> Launch:
        try:
            self.out, self.err = self.process.communicate(timeout=90)
        except subprocess.TimeoutExpired:
            self.process.terminate()  # torchrun ends its processes; SIGKILL would orphan them
            raise
        return self

    @property
    def code(self) -> int:
        return self.process.returncode

    def metrics(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.metrics_file.read_text().splitlines()]

    def losses(self) -> dict[int, float]:
        return {line["step"]: line["loss"] for line in self.metrics()}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    """A whole run on two processes."""
    return Launch(tmp_path_factory.mktemp("two"), "--train", str(DIGITS), processes=2).finish()


def test_trains_under_bare_torchrun(two: Launch) -> None:
    assert (two.code, two.err) == (0, "")
    summary = json.loads((two.folder / "artifacts/summary.json").read_text())
    assert summary == {"accuracy": summary["accuracy"], "steps": STEPS, "world_size": 2}
    assert summary["accuracy"] >= 0.98
    lines = two.out.splitlines()
    assert len(lines) == 13
    assert lines[0].startswith("epoch 1 step 22 loss ")
    assert lines[-1] == f"accuracy {summary['accuracy']:.4f} on 360 held-out digits"
    weights = torch.load(two.folder / "artifacts/model.pt", weights_only=True)
    assert all(tensor.isfinite().all() for tensor in weights.values())


def test_metrics_are_one_flat_line_a_step(two: Launch) -> None:
    lines = two.metrics()
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert all({"step", "epoch", "time", "loss", "lr"} <= line.keys() for line in lines)
    assert [line["time"] for line in lines] == sorted(line["time"] for line in lines)
    epochs = [line for line in lines if "val_accuracy" in line]
    assert [line["epoch"] for line in epochs] == list(range(1, 13))
    assert all(line["samples_per_s"] > 0 for line in epochs)


def test_a_checkpoint_each_epoch_and_nothing_half_written(two: Launch) -> None:
    names = {path.name for path in (two.folder / "checkpoints").iterdir()}
    assert names == {f"step-{22 * epoch}" for epoch in range(1, 13)}
    state = torch.load(two.folder / "checkpoints/step-44/state.pt", weights_only=True)
    assert (state["step"], state["epochs_run"], state["world_size"]) == (44, 2, 2)
    assert state["contract"] == {"seed": 0, "global_batch": 64, "epochs": 12, "lr": 4e-3}


def test_one_plain_process_sees_the_same_losses(two: Launch, tmp_path: Path) -> None:
    """The global batch decides: only the order of float sums differs, and one epoch lets that grow little."""
    one = Launch(tmp_path / "one", "--train", str(DIGITS.parent)).finish()
    assert (one.code, one.err) == (0, "")
    summary = json.loads((one.folder / "artifacts/summary.json").read_text())
    assert summary["accuracy"] >= 0.98
    assert summary["world_size"] == 1
    first_epoch = range(1, 23)
    assert [one.losses()[step] for step in first_epoch] == pytest.approx(
        [two.losses()[step] for step in first_epoch], rel=1e-4
    )


def test_a_preempted_run_resumes_bit_for_bit(tmp_path: Path) -> None:
    """On three processes: on two, a sum has one order only, and DDP's reordered buckets would go unseen."""
    whole = Launch(tmp_path / "whole", "--train", str(DIGITS), "--global-batch", "63", processes=3).finish()
    assert (whole.code, whole.err) == (0, "")

    stopped = Launch(tmp_path / "stopped", "--train", str(DIGITS), "--global-batch", "63", processes=3)
    while stopped.process.poll() is None and not (
        stopped.metrics_file.exists() and stopped.metrics_file.read_text().count("\n") >= 30
    ):
        time.sleep(0.01)
    stopped.preempt_file.touch()
    stopped.finish()
    assert (stopped.code, stopped.err) == (0, "")
    last = max(stopped.losses())
    assert 30 <= last < STEPS
    assert stopped.out.splitlines()[-1] == f"preempted at step {last} of {STEPS}, saved"
    assert not (stopped.folder / "artifacts").exists()

    checkpoint = stopped.folder / f"checkpoints/step-{last}"
    env = {"CLOUDTRAIN_INPUT_TRAIN": str(DIGITS), "CLOUDTRAIN_RESUME_FROM": str(checkpoint)}
    resumed = Launch(tmp_path / "resumed", "--global-batch", "63", processes=3, env=env).finish()
    assert (resumed.code, resumed.err) == (0, "")
    assert min(resumed.losses()) == last + 1
    assert stopped.losses() | resumed.losses() == whole.losses()
    one, other = (torch.load(launch.folder / "artifacts/model.pt", weights_only=True) for launch in (whole, resumed))
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    ("flags", "env", "words"),
    [
        (lambda _: ["--train", "no/such/file.csv.gz"], {}, "No such file"),
        (lambda _: [], {}, "--train ''"),
        (lambda _: ["--train", str(DIGITS)], {"RANK": "0", "WORLD_SIZE": "3", "LOCAL_RANK": "0"}, "3 processes"),
        (lambda two: ["--train", str(DIGITS), "--resume", str(two.folder / "checkpoints/step-22"), "--lr", "1"], {},
         "'lr': 0.004"),
    ],
    ids=["no file", "no data named", "batch does not divide", "another run's checkpoint"],
)  # fmt: skip
def test_refuses_in_one_line(
    flags: Callable[[Launch], list[str]], env: dict[str, str], words: str, two: Launch, tmp_path: Path
) -> None:
    refused = Launch(tmp_path / "refused", *flags(two), env=env).finish()
    assert refused.code == 1
    assert refused.err.startswith("ddp.py: --")
    assert refused.err.count("\n") == 1
    assert words in refused.err
