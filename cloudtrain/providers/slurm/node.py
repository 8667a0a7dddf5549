"""Node half of provider ``slurm``: read the environment of a task of ``srun``. Standard library alone."""

from __future__ import annotations

import ipaddress
import json
import os
from collections.abc import Mapping
from pathlib import Path

from ...errors import SpecError, StorageError
from ...provider_api.node import NodeEnvironment, Topology
from .._cloud import FLUSH_PATH, GRACE_PATH, paths_of

__all__ = ["node_environment", "secret"]

GRACE = 30
"""Default seconds from the stop signal to the kill: Slurm's own KillWait."""
AGAIN, LOST, TIME_UP = 231, 230, 124
"""Exit codes: a node that stopped at a notice, a node whose peer is lost, and a job that used up its time limit. srun
returns the highest of its tasks, and 137 is that of a killed one."""
SECRETS_PATH = "secrets"
"""The ``--path`` with the file of the secrets' values."""
ATTEMPT, PORT = "CLOUDTRAIN_SLURM_ATTEMPT", "CLOUDTRAIN_SLURM_PORT"
"""Variables that the batch script sets: the number ``k.r``, and the first of two ports that are free on node 0."""
DEFAULT_PORT = 29500
HIDDEN = (
    *("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_TASKS_PER_NODE"),
    *("SLURM_STEP", "SLURM_TASK_PID", "SLURM_GTIDS", "SLURM_SRUN", "SLURM_MPI", "PMI_", "PMIX_", "PMI2_"),
)
"""With these variables a library takes a rank for a task of srun. Lightning then requeues the job by itself (Lightning
issues 18466 and 20056)."""


def node_environment(environ: Mapping[str, str], argv: Mapping[str, str]) -> NodeEnvironment:
    """Return the facts that Slurm gave this node. Raises `SpecError` outside of a step."""
    paths = paths_of(argv)
    grace, secrets = float(paths.pop(GRACE_PATH, GRACE)), paths.pop(SECRETS_PATH, "")
    flush = float(paths.pop(FLUSH_PATH, NodeEnvironment.flush_seconds))
    try:
        nodes, rank = int(environ["SLURM_NNODES"]), int(environ["SLURM_NODEID"])
    except (KeyError, ValueError):
        raise SpecError("is not set: this is no task of srun", field="SLURM_NODEID") from None
    address = environ.get("SLURM_LAUNCH_NODE_IPADDR") or "127.0.0.1"
    cores = environ.get("SLURM_CPUS_ON_NODE", "")
    return NodeEnvironment(
        topology=Topology(
            nodes=nodes,
            node_rank=rank,
            master_addr=address,
            master_port=int(environ.get(PORT) or DEFAULT_PORT),
        ),
        paths=paths,
        scratch=tuple(filter(None, (environ.get("SLURM_TMPDIR"), environ.get("TMPDIR"), "/tmp"))),
        export_env=_interface(environ, address),
        hidden_env=HIDDEN,
        stop_grace=grace,
        flush_seconds=flush,
        exit_code={"succeeded": 0, "failed": 1, "preempted": AGAIN, "lost": LOST},
        secrets=lambda reference: secret(reference.partition(":")[2], secrets),
        cpus=int(cores) if cores.isdecimal() else None,
        attempt=environ.get(ATTEMPT, ""),
        machine=environ.get("SLURMD_NODENAME", ""),
        signals_ranks=ATTEMPT in environ,  # a rehearsal's engine signals this process alone
    )


def _interface(environ: Mapping[str, str], address: str) -> dict[str, str]:
    """Return gloo's interface if all nodes are on this machine: their names need not resolve."""
    try:
        loopback = ipaddress.ip_address(address).is_loopback
    except ValueError:
        loopback = False
    return {"GLOO_SOCKET_IFNAME": "lo"} if loopback and "GLOO_SOCKET_IFNAME" not in environ else {}


def secret(name: str, file: str) -> str:
    """Return the value of the submitter's variable ``name``. Raises `StorageError`, never with a value."""
    try:
        values = json.loads(Path(file).read_bytes())
        return str(values[name])
    except (OSError, ValueError, KeyError, TypeError) as exc:
        why = os.strerror(exc.errno) if isinstance(exc, OSError) and exc.errno else "it lacks this value"
        raise StorageError(f"secret env:{name} cannot be read from {file}: {why}") from None
