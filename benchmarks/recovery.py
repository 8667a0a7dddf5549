"""Seconds from the SIGKILL of a rank to the next new step, over a cold start: from ``submit`` to the first step.

One job gives a pair: 2 nodes x 2 processes of plain DistributedDataParallel with AdamW. They import torch, connect and
take their first step. Rank 0 saves 200 MB, and they train on. Once the store has that checkpoint a rank is killed, each
pair another one. The run ends that attempt, starts the next and restores the 200 MB on both nodes. All four ranks load
them and take a step.

CPU seconds are those of the run and all its processes in the same spans. The note shows where the time goes.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from common import (
    CLOUDTRAIN,
    Cost,
    Figure,
    Pair,
    adopt_orphans,
    environ,
    median_ratio,
    options,
    parser,
    reap_orphans,
    report,
    scratch,
    sides,
    steps,
)

TARGET = 1.25
PATIENCE_SECONDS = 240.0
SCRIPT = '''\
"""Plain DistributedDataParallel with AdamW: saves after its first step and trains on; resumed, it takes one step."""

import json
import os
import sys
import time
from pathlib import Path

stamps = {"pid": os.getpid(), "python": time.time()}
import torch
import torch.distributed as dist

stamps["torch"] = time.time()
dist.init_process_group("gloo")
rank, resume = dist.get_rank(), os.environ["CLOUDTRAIN_RESUME_FROM"]
width = round((int(sys.argv[1]) / 12) ** 0.5)  # a float for each weight, and two of AdamW
model = torch.nn.Linear(width, width, bias=False)
ddp = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
parts = {"model": model, "optimizer": optimizer}
if resume:
    saved = torch.load(f"{resume}/state.pt", weights_only=True)
    for name, part in parts.items():
        part.load_state_dict(saved[name])
stamps["ready"] = time.time()


def step():
    optimizer.zero_grad()
    ddp(torch.ones(8, width)).square().mean().backward()
    optimizer.step()


step()
stamps["first step"] = time.time()
folder = Path(os.environ["BENCHMARK_STAMPS"])
(folder / f".{rank}").write_text(json.dumps(stamps))
(folder / f".{rank}").rename(folder / f"{os.environ['CLOUDTRAIN_ATTEMPT']}-{rank}")
if not resume:
    if rank == 0:
        target = Path(os.environ["CLOUDTRAIN_CHECKPOINT_DIR"], "step-1")
        target.mkdir()
        torch.save({name: part.state_dict() for name, part in parts.items()}, target / "state.pt")
    while True:
        time.sleep(0.5)
        step()
del ddp
dist.destroy_process_group()
'''


def main() -> int:
    flags = parser(__doc__, count=10, quick=1)
    flags.add_argument("--megabytes", type=int, default=200, help="MB of the checkpoint (default 200)")
    chosen = options(flags)
    adopt_orphans()
    with scratch() as folder:
        (folder / "train.py").write_text(SCRIPT)
        found = [Trial(folder, chosen.megabytes * 1_000_000, rank % 4) for rank in range(-1, chosen.pairs)]
    found = found[1:]  # the first one only fills the caches
    pairs = [trial.pair for trial in found]
    figures = [
        Figure(
            name=f"{what} from SIGKILL of a rank to the first new step / submit to the first step",
            value=median_ratio(pairs, what),
            target=TARGET if what == "wall" and not chosen.quick else None,
            note=f"{sides(pairs, what)}" + (f"; {stages(found)}" if what == "wall" else ""),
            pairs=pairs if what == "wall" else (),
        )
        for what in ("wall", "cpu")
    ]
    return report(figures, as_json=chosen.json)


def stages(found: list[Trial]) -> str:
    return f"ms of recovery: {steps([t.recovery for t in found])}; of the start: {steps([t.cold for t in found])}"


class Trial:
    """One job with one kill: ``cold`` and ``recovery`` are the stages of its two starts, ``pair`` their costs."""

    def __init__(self, folder: Path, size: int, rank: int) -> None:
        self._stamps, store = folder / "stamps", folder / "store"
        self._stamps.mkdir()
        command = [CLOUDTRAIN, "submit", "train.py", "--nodes", "2", "--nproc-per-node", "2", "--retries", "1"]
        command += ["--store", str(store), "--max-runtime", "10m", "--json", "--detach", "--", str(size)]
        env = environ({"BENCHMARK_STAMPS": str(self._stamps)})
        began, spent = time.time(), cpu()
        done = subprocess.run(command, cwd=folder, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
        self._run = store / "runs" / json.loads(done.stdout)["run_id"]
        first = self._stamps_of("0.0-0")
        start_cpu = cpu() - spent
        self._until(lambda: [*self._run.glob("live/checkpoints/*/*/commit.json")])
        victim = self._stamps_of(f"0.0-{rank % 4}")["pid"]
        spent, killed = cpu(), time.time()
        os.kill(victim, signal.SIGKILL)
        again = self._stamps_of("1.0-0")
        cost = Cost(wall=again["first step"] - killed, cpu=cpu() - spent)
        self.pair = Pair(ours=cost, peer=Cost(wall=first["first step"] - began, cpu=start_cpu))
        attempts = self._attempts()
        self.cold = {"start": began, "attempt": attempts[0]["started"], **_script(first)}
        ended = {"attempt over": attempts[0]["ended"], "next attempt": attempts[1]["started"]}
        self.recovery = {"kill": killed, **ended, **_script(again)}
        for _ in reap_orphans():  # until the supervisor has gone
            pass
        shutil.rmtree(store / "runs")
        shutil.rmtree(self._stamps)

    def _until(self, what: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not (found := what()):
            if time.monotonic() > deadline:
                raise RuntimeError(f"timed out; the state of {self._run} is {self._state()}")
            time.sleep(0.005)
        return found

    def _stamps_of(self, name: str) -> dict[str, float]:
        """Return the stamps of a rank of an attempt, after its first step."""
        path = self._stamps / name
        self._until(path.exists)
        found: dict[str, float] = json.loads(path.read_text())
        return found

    def _state(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self._run / "supervisor/status.json").read_bytes())
        return found

    def _attempts(self) -> list[dict[str, float]]:
        """Wait for the end of the run. Return its attempts."""
        self._until(lambda: self._state()["finished"])
        self._until((self._run / "result.json").exists)
        state = self._state()
        if state["state"] != "succeeded" or len(state["attempts"]) != 2:
            raise RuntimeError(f"the run was not killed exactly once and then successful: {state}")
        attempts: list[dict[str, float]] = state["attempts"]
        return attempts


def _script(stamps: dict[str, float]) -> dict[str, float]:
    return {name: stamps[name] for name in ("python", "torch", "ready", "first step")}


def cpu() -> float:
    """Return the CPU seconds so far of all started processes, and of those that they left behind."""
    ticks, parents = {}, {}
    for pid, words in _processes():
        parents[pid] = int(words[1])
        ticks[pid] = sum(map(int, words[11:15]))  # its own, and those of the children that it has waited for
    family = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= more
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    alive = sum(ticks[pid] for pid in family - {os.getpid()}) / os.sysconf("SC_CLK_TCK")
    return alive + used.ru_utime + used.ru_stime


def _processes() -> Iterator[tuple[int, list[str]]]:
    """Yield every process, and its /proc/PID/stat from the state on."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            yield int(folder.name), (folder / "stat").read_text().rpartition(")")[2].split()


if __name__ == "__main__":
    sys.exit(main())
