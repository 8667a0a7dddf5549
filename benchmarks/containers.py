"""Containers: time to a script's first line through provider docker over ``docker run``, and 8 nodes over one.

The first figure is 1 node x 2 processes of a script that imports torch, on a pseudo-terminal, in the same image. It
compares ``cloudtrain submit --provider docker`` with ``docker run … python3 -m torch.distributed.run`` by hand. Both
containers have the same user and the same /dev/shm; the code comes from this machine's disk. The one by hand uses the
engine's default bridge, which always exists, so only cloudtrain makes a network.

The second is the container engine alone, from the call of ``prepare`` until every node's own line is in its file. It
compares 8 nodes of a shell with 1, each time on a new network, without their removal. A container costs CPU time of
docker's own processes, so 8 over 1 has its target only on 8 cores. On every machine it compares 8 nodes with 8
simultaneous ``docker run`` by hand, on one network made for them.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

from common import (
    CLOUDTRAIN,
    Cost,
    Figure,
    first_line,
    median_ratio,
    options,
    pairs,
    parser,
    report,
    scratch,
    sides,
    stamps,
    steps,
)

from cloudtrain.engine.containers import ContainerEngine
from cloudtrain.provider_api.launch_spec import LaunchRules, LaunchSpec, NodeSpec

IMAGE = "cloudtrain-test:torch"
NODES = 8
FIRST_LINE_TARGET, NODES_TARGET, BY_HAND_TARGET = 1.15, 2.0, 1.1
UP_SECONDS = 120.0
SHM_GIB = 8
"""/dev/shm of a job that sets none with provider docker."""
MARK = b"first-line "
SCRIPT = """\
import os
import time

began = time.time()
import torch
import torch.distributed as dist

if os.environ["RANK"] == "0":
    print("first-line", began, time.time(), flush=True)
"""


def main() -> int:
    chosen = options(parser(__doc__, count=9, quick=2))
    if shutil.which("docker") is None:
        raise SystemExit("needs docker, its command and a daemon that answers")
    ensure_image()
    figures = [until_first_line(chosen.pairs), *in_parallel(chosen.pairs)]
    if chosen.quick:
        # Wall time alone, much of it a daemon's: a few pairs next to other jobs say nothing against a target.
        figures = [dataclasses.replace(figure, target=None) for figure in figures]
    return report(figures, as_json=chosen.json)


def ensure_image() -> None:
    """Build the image of the tests of provider docker if it is absent."""
    found = subprocess.run(["docker", "image", "inspect", IMAGE], check=False, capture_output=True)
    if found.returncode:
        build = Path(__file__).resolve().parents[1] / "tests" / "images" / "build.sh"
        subprocess.run([str(build), IMAGE.partition(":")[2]], check=True, stdout=sys.stderr)


# ---------------------------------------------------------------------------------------------------------- first line


def until_first_line(count: int) -> Figure:
    with scratch() as folder:
        code = folder / "code"
        code.mkdir()
        (code / "train.py").write_text(SCRIPT)
        watch = Watch(code, folder / "store")
        found = pairs(watch.submit, watch.docker_run, count=count)
    return Figure(
        name="time to the first line: cloudtrain submit --provider docker / docker run",
        value=median_ratio(found, "wall"),
        target=FIRST_LINE_TARGET,
        note=f"{sides(found, 'wall')}; ms of submit: {steps(watch.ours)}; of docker run: {steps(watch.by_hand)}",
        pairs=found,
    )


class Watch:
    """A runner of ``train.py`` of ``code`` in both ways; ``ours`` and ``by_hand`` have the stages of each."""

    def __init__(self, code: Path, store: Path) -> None:
        self._code, self._store = code, store
        self.ours: list[dict[str, float]] = []
        self.by_hand: list[dict[str, float]] = []

    def submit(self) -> Cost:
        run = f"r{time.time_ns()}"
        command = [CLOUDTRAIN, "submit", "train.py", "--provider", "docker", "--image", IMAGE]
        command += ["--nodes", "1", "--nproc-per-node", "2", "--max-runtime", "10m"]
        cost, stages = self._run([*command, "--store", str(self._store), "--run-id", run])
        start, *rest = stages.items()
        self.ours.append(dict([start, *stamps(self._store / "runs" / run).items(), *rest]))
        return cost

    def docker_run(self) -> Cost:
        command = ["docker", "run", "--rm", "--volume", f"{self._code}:/code:ro"]
        command += ["--user", f"{os.getuid()}:{os.getgid()}", "--shm-size", f"{SHM_GIB}g"]
        command += [IMAGE, "python3", "-m", "torch.distributed.run", "--nproc-per-node", "2", "/code/train.py"]
        cost, stages = self._run(command)
        self.by_hand.append(stages)
        return cost

    def _run(self, command: list[str]) -> tuple[Cost, dict[str, float]]:
        start = time.time()
        cost, words = first_line(command, cwd=self._code, mark=MARK)
        script, printed = map(float, words.split())
        return cost, {"start": start, "script": script, "printed": printed, "seen": start + cost.wall}


# --------------------------------------------------------------------------------------------------------- many nodes


def in_parallel(count: int) -> list[Figure]:
    with scratch() as folder:
        found = pairs(partial(start_nodes, folder, NODES), partial(start_nodes, folder, 1), count=count)
        against = pairs(partial(start_nodes, folder, NODES), by_hand, count=count)
    cores = len(os.sched_getaffinity(0))
    return [
        Figure(
            name=f"wall of starting {NODES} containers / 1",
            value=median_ratio(found, "wall"),
            target=NODES_TARGET if cores >= NODES else None,
            note=f"{sides(found, 'wall')}; on {cores} cores",
            pairs=found,
        ),
        Figure(
            name=f"wall of starting {NODES} containers / {NODES} docker run at once",
            value=median_ratio(against, "wall"),
            target=BY_HAND_TARGET,
            note=sides(against, "wall"),
            pairs=against,
        ),
    ]


def by_hand() -> Cost:
    """Start a network and as many ``docker run`` at once, until each has printed its line."""
    name = f"by-hand-{time.time_ns()}"
    run = ["docker", "run", "--rm", "--network", name, "--label", name, "--user", f"{os.getuid()}:{os.getgid()}"]
    run += ["--shm-size", f"{SHM_GIB}g", "--entrypoint", "/bin/sh", IMAGE, "-c", "echo up; exec sleep 60"]
    began = time.perf_counter()
    subprocess.run(["docker", "network", "create", name], check=True, capture_output=True)
    started = [subprocess.Popen(run, stdout=subprocess.PIPE) for _ in range(NODES)]
    try:
        for process in started:
            assert process.stdout is not None
            if process.stdout.readline() != b"up\n":
                raise RuntimeError(f"docker run ended with {process.wait()}")
        return Cost(wall=time.perf_counter() - began, cpu=0.0)
    finally:
        listed = subprocess.run(["docker", "ps", "-q", "--filter", f"label={name}"], capture_output=True, text=True)
        subprocess.run(["docker", "rm", "--force", *listed.stdout.split()], check=False, capture_output=True)
        for process in started:
            process.communicate()
        subprocess.run(["docker", "network", "rm", name], check=False, capture_output=True)


def start_nodes(folder: Path, number: int) -> Cost:
    """Start that many nodes with a separate engine, and remove them; CPU is this process's alone."""
    run = f"r{time.time_ns()}"
    engine = ContainerEngine(folder=folder / run, run=f"{folder.as_uri()}/runs/{run}", environ=os.environ)
    simulation = LaunchSpec(
        nodes=[
            NodeSpec(
                image=IMAGE,
                entrypoint=["/bin/sh", "-c"],
                command=["echo up; exec sleep 60"],
                user=f"{os.getuid()}:{os.getgid()}",
                hostname=f"node-{i}",
                shm=SHM_GIB << 30,
            )
            for i in range(number)
        ],
        rules=LaunchRules(time_limit=600),
    )
    logs = [folder / run / "out" / "0.0" / f"node-{i}.log" for i in range(number)]
    try:
        began, cpu = time.perf_counter(), time.process_time()
        engine.prepare(simulation, print, lambda: False)
        engine.start(simulation, attempt="0.0", local={}, secrets={})
        waiting = logs
        while waiting := [path for path in waiting if not path.exists() or path.read_bytes() != b"up\n"]:
            if time.perf_counter() - began > UP_SECONDS:
                raise RuntimeError(f"{waiting[0].name}: not up in {UP_SECONDS:.0f} s")
            time.sleep(0.001)
        return Cost(wall=time.perf_counter() - began, cpu=time.process_time() - cpu)
    finally:
        engine.clean()


if __name__ == "__main__":
    sys.exit(main())
