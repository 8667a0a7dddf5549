"""Runs of the entry points without a platform: under bare torchrun, as bare python, or quickly.

A quick run is the script's own main, in processes forked from one that has imported torch. It sets torchrun's variables
and turns warnings into errors. A test reaches its first step within a second.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import pytest

ROOT = Path(__file__).parents[2]


class Late:
    """A module that is imported at its first use, so that a worker that only collects tests does not pay for torch."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # pytest asks every global of a module for such names
            raise AttributeError(name)
        return getattr(importlib.import_module(self._name), name)


torch, _dcp = Late("torch"), Late("torch.distributed.checkpoint.format_utils")
DIGITS, TEXT = ROOT / "examples/data/digits.csv.gz", ROOT / "examples/data/persuasion.txt.gz"
ODD = ("--task", str(ROOT / "tests/entrypoints/odd.py"), "--epochs", "3", "--global-batch", "16")
"""The flags of the tests' own task: 6 steps an epoch."""
WARM = """
import json, os, runpy, socket, sys, traceback, warnings
import torch.distributed.checkpoint.state_dict, torch.distributed.fsdp.sharded_grad_scaler, torch.utils.data

def rank(job, number, port):
    os.setsid()
    os.chdir(job["folder"])
    for target, name in ((1, "out.txt"), (2, "err.txt")):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND), target)
    world = str(job["processes"])
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(number), LOCAL_RANK=str(number))
    os.environ.update({"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, **job["env"]})
    sys.argv = [job["script"], *job["flags"]]
    sys.path[0] = os.path.dirname(job["script"])
    warnings.simplefilter(job["warnings"])
    sys.modules.update(dict.fromkeys(job["hidden"]))
    try:
        runpy.run_path(job["script"], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = 1 if isinstance(end.code, str) else end.code or 0
        print(end.code, file=sys.stderr) if isinstance(end.code, str) else None
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    os._exit(code)

def launch(job):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [os.fork() or rank(job, number, port) for number in range(job["processes"])]
    codes = {}
    while len(codes) < len(ranks):
        pid, status = os.wait()
        codes[pid] = os.waitstatus_to_exitcode(status)
        if codes[pid]:  # as torchrun does
            for other in set(ranks) - set(codes):
                os.kill(other, 9)
    with open(os.path.join(job["folder"], "codes.tmp"), "w") as stream:
        json.dump([codes[pid] for pid in ranks], stream)
    os.rename(stream.name, os.path.join(job["folder"], "codes.json"))
    os._exit(0)

print("warm", flush=True)
for line in sys.stdin:
    if os.fork() == 0:
        launch(json.loads(line))
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass
"""


class Training:
    """One start of an entry point in ``folder``, and its files."""

    def __init__(self, folder: Path, script: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copytree(ROOT / "entrypoints", folder / "code", dirs_exist_ok=True)
        # First on sys.path: any import of cloudtrain, installed or not, ends the run.
        (folder / "code/cloudtrain.py").write_text("raise ImportError('the entry point must do without cloudtrain')\n")
        self.folder, self.script = folder, folder / "code" / script
        self.metrics_file, self.preempt_file = folder / "metrics.jsonl", folder / "preempt"
        self.code, self.out, self.err = -1, "", ""

    def environ(self, more: Mapping[str, str]) -> dict[str, str]:
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("CLOUDTRAIN_", "PYTHONPATH", "PET_"))}
        ours = {"CLOUDTRAIN_METRICS_FILE": str(self.metrics_file), "CLOUDTRAIN_PREEMPT_FILE": str(self.preempt_file)}
        return inherited | ours | {"OMP_NUM_THREADS": "1"} | dict(more)

    def metrics(self) -> list[dict[str, Any]]:
        if not self.metrics_file.exists():
            return []
        *whole, _ = self.metrics_file.read_text().split("\n")
        return [json.loads(line) for line in whole]

    def losses(self) -> dict[int, float]:
        return {line["step"]: line["loss"] for line in self.metrics()}

    def notes(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.checkpoint(name) / "train.json").read_text())
        return found

    def adam(self, name: str) -> dict[str, Any]:
        """Return AdamW's state of each parameter in a checkpoint."""
        _dcp.dcp_to_torch_save(self.checkpoint(name), self.folder / "state.pt")
        state: dict[str, Any] = torch.load(self.folder / "state.pt", weights_only=True)["optimizer"]["state"]
        return state

    def checkpoint(self, name: str) -> Path:
        return self.folder / "checkpoints" / name

    def until(self, step: int, seconds: float = 120) -> None:
        deadline = time.monotonic() + seconds
        while not any(line["step"] >= step for line in self.metrics()):
            assert time.monotonic() < deadline, f"step {step} never came"
            time.sleep(0.01)


class Launched(Training):
    """A training by torchrun; ``processes=0`` is plain python."""

    def __init__(self, folder: Path, script: str, *flags: str, processes: int = 0, env: Mapping[str, str] = {}) -> None:
        super().__init__(folder, script)
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", "--"]
        self.process = subprocess.Popen(
            [sys.executable, *(torchrun if processes else []), str(self.script), *flags],
            cwd=folder,
            env=self.environ({"PYTHONWARNINGS": "error"} | dict(env)),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def finish(self, seconds: float = 120) -> Launched:
        try:
            self.out, self.err = self.process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            self.process.terminate()  # torchrun ends its processes; SIGKILL would orphan them
            raise
        self.code = self.process.returncode
        return self


class Quick(Training):
    """A training forked from a process that has imported torch."""

    def __init__(
        self,
        warm: IO[str],
        folder: Path,
        script: str,
        flags: tuple[str, ...],
        processes: int,
        env: Mapping[str, str],
        hidden: tuple[str, ...],
    ) -> None:
        super().__init__(folder, script)
        for name in ("out.txt", "err.txt", "codes.json"):
            (folder / name).unlink(missing_ok=True)
        job = {
            "folder": str(folder),
            "script": str(self.script),
            "flags": list(flags),
            "processes": processes,
            "env": self.environ(env),
            "hidden": hidden,
            "warnings": env.get("PYTHONWARNINGS", "error"),
        }
        warm.write(json.dumps(job) + "\n")
        warm.flush()

    def finish(self, seconds: float = 120) -> Quick:
        deadline = time.monotonic() + seconds
        while not (self.folder / "codes.json").exists():
            assert time.monotonic() < deadline, (self.folder / "err.txt").read_text()
            time.sleep(0.01)
        self.codes = json.loads((self.folder / "codes.json").read_text())
        self.code = next(filter(None, self.codes), 0)
        self.out, self.err = (self.folder / "out.txt").read_text(), (self.folder / "err.txt").read_text()
        return self


class Trainings:
    """A starter of quick runs."""

    def __init__(self, warm: subprocess.Popen[str]) -> None:
        self.warm = warm

    def start(
        self,
        folder: Path,
        script: str,
        *flags: str,
        processes: int = 1,
        env: Mapping[str, str] = {},
        hidden: tuple[str, ...] = (),
    ) -> Quick:
        """Start ``processes`` processes, without the modules ``hidden``."""
        assert self.warm.stdin is not None
        return Quick(self.warm.stdin, folder, script, flags, processes, env, hidden)

    def run(self, folder: Path, script: str, *flags: str, **more: Any) -> Quick:
        """Run to the end and check that the run succeeded."""
        done = self.start(folder, script, *flags, **more).finish()
        assert (done.code, done.err) == (0, ""), done.err
        return done


@pytest.fixture(scope="session")
def trainings() -> Iterator[Trainings]:
    warm = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", WARM],
        env=os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert warm.stdin is not None
    assert warm.stdout is not None
    assert warm.stdout.readline() == "warm\n"
    yield Trainings(warm)
    warm.stdin.close()
    warm.stdout.close()
    try:
        warm.wait(10)
    except subprocess.TimeoutExpired:
        os.killpg(warm.pid, signal.SIGKILL)
        warm.wait()
