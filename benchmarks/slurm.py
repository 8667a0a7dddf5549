"""A job on Slurm compared with a bare ``sbatch`` of the same script: time to the script's first line, and CPU of
``submit``.

A real slurmctld runs on this machine, by tests/slurm.sh. 2 nodes x 1 process; both sides start ``torchrun``. The time
counts from the command, so cloudtrain's time includes its upload and its submission.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from common import CLOUDTRAIN, Cost, Figure, cost_of, median_ratio, options, pairs, parser, report, scratch
from common import sides as both

START = Path(__file__).parents[1] / "tests" / "slurm.sh"
SCRIPT = """import os, time
T = time.time()
import torch.distributed as dist
dist.init_process_group("gloo")
if dist.get_rank() == 0:
    with open(os.environ["FIRST"] + ".new", "w") as file:
        file.write(str(T))
    os.rename(os.environ["FIRST"] + ".new", os.environ["FIRST"])
"""
PATIENCE = 120.0
"""Seconds for one job."""


def main() -> int:
    chosen = options(parser(__doc__, count=7, quick=1))
    with scratch() as folder, cluster(folder / "slurm"):
        (folder / "train.py").write_text(SCRIPT)
        sides = Sides(folder)
        found = pairs(sides.submit, sides.sbatch, count=chosen.pairs)
    cpu = statistics.median(sides.cpu)
    figures = [
        Figure(
            name="time from the command to the script's first line: cloudtrain submit / sbatch",
            value=median_ratio(found, "wall"),
            target=1.1,
            note=both(found, "wall"),
            pairs=found,
        ),
        Figure(name="CPU of cloudtrain submit --detach to Slurm", value=cpu, target=0.5, unit="s"),
    ]
    return report(figures, as_json=chosen.json)


@contextmanager
def cluster(folder: Path) -> Iterator[None]:
    """Run a cluster, which this process's tools use."""
    command = ["bash", str(START)]
    ports = {**os.environ, "NODES": "2", "PORT": "17800"}
    subprocess.run([*command, "start", str(folder)], env=ports, check=True, stdout=subprocess.DEVNULL)
    os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
    try:
        yield
    finally:
        subprocess.run([*command, "stop", str(folder)], check=True)


class Sides:
    """The two commands. Each waits until nothing runs any more, so that no job waits for another."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._number = folder, 0
        self.cpu: list[float] = []

    def submit(self) -> Cost:
        first, run = self._next()
        flags = ["--provider", "slurm", "--set", "partition=low", "--set", f"python={sys.executable}", "--detach"]
        flags += ["--nodes", "2", "--store", str(self._folder / "store"), "--run-id", run, "--max-runtime", "10m"]
        began = time.time()
        cost = cost_of([CLOUDTRAIN, "submit", "train.py", *flags, "--env", f"FIRST={first}"], cwd=self._folder)
        self.cpu.append(cost.cpu)
        return Cost(wall=self._first(first) - began, cpu=cost.cpu)

    def sbatch(self) -> Cost:
        first, run = self._next()
        port = 29000 + self._number
        torchrun = f"{sys.executable} -m torch.distributed.run --nnodes 2 --nproc-per-node 1"
        rendezvous = f"--rdzv-backend c10d --rdzv-endpoint 127.0.0.1:{port}"
        script = self._folder / f"{run}.sh"
        script.write_text(
            f"#!/bin/bash\n#SBATCH --partition=low --nodes=2 --ntasks-per-node=1 --time=5 --output={run}.log\n"
            f"export FIRST={first} GLOO_SOCKET_IFNAME=lo\nsrun {torchrun} {rendezvous} train.py\n"
        )
        began = time.time()
        cost = cost_of(["sbatch", script.name], cwd=self._folder)
        return Cost(wall=self._first(first) - began, cpu=cost.cpu)

    def _next(self) -> tuple[Path, str]:
        self._number += 1
        run = f"r{self._number}"
        return self._folder / f"first-{run}", run

    def _first(self, file: Path) -> float:
        """Return the time of the script's first line, once all jobs are over."""
        deadline = time.monotonic() + PATIENCE
        while not file.exists() or subprocess.run(["squeue", "-h"], capture_output=True, check=True).stdout:
            if time.monotonic() > deadline:
                raise RuntimeError(f"no first line within {PATIENCE:.0f} s; the files are in {self._folder}")
            time.sleep(0.2)
        return float(file.read_text())


if __name__ == "__main__":
    sys.exit(main())
