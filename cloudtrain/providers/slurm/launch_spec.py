"""Predict the tasks that srun starts for a request, as data for an engine, a rehearsal and the contract suite. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...provider_api.launch_spec import LaunchSpec
from ...provider_api.protocol import Request
from .._cloud import shared_launch_spec
from .node import AGAIN, DEFAULT_PORT, PORT, SECRETS_PATH
from .request import mounts

if TYPE_CHECKING:
    from . import Settings


def launch_spec(settings: Settings, request: Request) -> LaunchSpec:
    """Return one task a node."""
    options, image = request.body["sbatch"], request.body.get("image")
    cores, memory = options.get("cpus-per-task"), str(options.get("mem", ""))
    hosts = [f"slurm-node-{number}" for number in range(int(options["nodes"]))]
    env = {"SLURM_JOB_ID": "1", "SLURM_NNODES": str(len(hosts)), PORT: str(DEFAULT_PORT)}
    return shared_launch_spec(
        settings,
        request.body["command"],
        mounts(settings),
        (SECRETS_PATH,),
        hosts=hosts,
        rank="SLURM_NODEID",
        time_limit=request.body["limit_s"],
        again=AGAIN,
        env={**env, "SLURM_LAUNCH_NODE_IPADDR": hosts[0] if len(hosts) > 1 else "127.0.0.1"},
        image=image,
        entrypoint=() if image else None,
        gpus=int(str(options.get("gpus-per-node", "0")).rpartition(":")[2]),
        cpus=int(cores) if cores else None,
        memory=int(memory[:-1]) << 30 if memory[:-1].isdecimal() and memory.endswith("G") else None,
    )
