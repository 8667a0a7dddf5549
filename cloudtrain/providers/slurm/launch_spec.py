"""Predict the tasks that srun starts for a request, as data for an engine, a rehearsal and the contract suite. Pure."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from ...provider_api.launch_spec import LaunchSpec, NodeSpec
from ...provider_api.protocol import Request
from .._cloud import shared_mounts, shared_rules
from .node import AGAIN, DEFAULT_PORT, PORT, SECRETS_PATH
from .request import shown_url

if TYPE_CHECKING:
    from . import Settings

__all__ = ["launch_spec"]


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
            mounts=list(shared_mounts(words[1:], partial(shown_url, settings), (SECRETS_PATH,))),
            hostname=f"slurm-node-{number}" if nodes > 1 else None,
            image=request.body.get("image"),
            entrypoint=() if request.body.get("image") else None,
            gpus=int(gpus),
            cpus=int(cores) if cores else None,
            memory=int(memory[:-1]) << 30 if memory[:-1].isdecimal() and memory.endswith("G") else None,
        )

    rules = shared_rules(time_limit=request.body["limit_s"], again=AGAIN, stop_grace=settings.stop_grace)
    return LaunchSpec(nodes=[node(number) for number in range(nodes)], rules=rules)
