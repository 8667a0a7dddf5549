"""Predict the tasks that srun starts for a request, as data for an engine, a rehearsal and the contract suite. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ...provider_api.launch_spec import LaunchRules, LaunchSpec, Mount, NodeSpec
from ...provider_api.protocol import Request
from .node import AGAIN, DEFAULT_PORT, GRACE_PATH, PORT, SECRETS_PATH

if TYPE_CHECKING:
    from . import Settings

__all__ = ["launch_spec"]

RESTARTS = 1000
"""Requeues of a job by its script: Slurm has no limit, only the time limit of the run ends them."""


def launch_spec(settings: Settings, request: Request) -> LaunchSpec:
    """Return one task a node."""
    options, words = request.body["sbatch"], request.body["command"]
    nodes = int(options["nodes"])
    cores, memory = options.get("cpus-per-task"), str(options.get("mem", ""))
    gpus = str(options.get("gpus-per-node", "0")).rpartition(":")[2]

    def node(number: int) -> NodeSpec:
        return NodeSpec(
            command=list(words),
            env={
                "SLURM_JOB_ID": "1",
                "SLURM_NNODES": str(nodes),
                "SLURM_NODEID": str(number),
                "SLURM_LAUNCH_NODE_IPADDR": "slurm-node-0" if nodes > 1 else "127.0.0.1",
                PORT: str(DEFAULT_PORT),
            },
            mounts=list(_mounts(words)),
            hostname=f"slurm-node-{number}" if nodes > 1 else None,
            image=request.body.get("image"),
            entrypoint=() if request.body.get("image") else None,
            gpus=int(gpus),
            cpus=int(cores) if cores else None,
            memory=int(memory[:-1]) << 30 if memory[:-1].isdecimal() and memory.endswith("G") else None,
        )

    rules = LaunchRules(
        time_limit=request.body["limit_s"],
        restart_on=(AGAIN,),
        max_restarts=RESTARTS,
        preemptions=RESTARTS,
        losses=RESTARTS,
        stop_grace=settings.stop_grace,
    )
    return LaunchSpec(nodes=[node(number) for number in range(nodes)], rules=rules)


def _mounts(words: list[str]) -> Iterator[Mount]:
    """Yield each file and folder of the command by itself: all are in shared folders, at the same path everywhere."""
    yield Mount(url=f"file://{words[1]}", path=words[1], kind="mount")
    context = words[words.index("--context") + 1].rpartition("/")[0]
    yield Mount(url=f"file://{context}", path=context, kind="mount")
    for before, word in itertools.pairwise(words):
        name, _, path = word.partition("=")
        if before == "--path" and name not in (GRACE_PATH, SECRETS_PATH):
            yield Mount(url=f"file://{path}", path=path, kind="sync" if name in ("live", "direct") else "mount")
