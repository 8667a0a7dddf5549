"""Node half of provider ``slurm``: read the environment of a task of ``srun``. Standard library alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from ...provider_api.node import NodeEnvironment
from .._cloud import shared_environment, shared_secret

GRACE = 30
"""Default seconds from the stop signal to the kill: Slurm's own KillWait."""
AGAIN, LOST, SETUP_FAILED, TIME_UP = 231, 230, 229, 124
"""Exit codes: a node that stopped at a notice, a node whose peer is lost, and a job whose ``setup`` failed, or whose
time limit is used up. srun returns the highest of its tasks, and 137 is that of a killed one."""
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
    address, port = environ.get("SLURM_LAUNCH_NODE_IPADDR") or "127.0.0.1", int(environ.get(PORT) or DEFAULT_PORT)
    names, peers = ("SLURM_NNODES", "SLURM_NODEID"), {"master_addr": address, "master_port": port}
    shared = shared_environment(environ, argv, names=names, what="task of srun", grace=GRACE, **peers)
    here = address == "::1" or address.startswith("127.")  # all nodes are on one machine, whose name need not resolve
    secrets, cores = shared["paths"].pop(SECRETS_PATH, ""), environ.get("SLURM_CPUS_ON_NODE", "")
    return NodeEnvironment(
        **shared,
        scratch=tuple(filter(None, (environ.get("SLURM_TMPDIR"), environ.get("TMPDIR"), "/tmp"))),
        export_env={"GLOO_SOCKET_IFNAME": "lo"} if here and "GLOO_SOCKET_IFNAME" not in environ else {},
        hidden_env=HIDDEN,
        exit_code={"succeeded": 0, "failed": 1, "preempted": AGAIN, "lost": LOST},
        secrets=lambda reference: secret(reference.partition(":")[2], secrets),
        cpus=int(cores) if cores.isdecimal() else None,
        attempt=environ.get(ATTEMPT, ""),
        machine=environ.get("SLURMD_NODENAME", ""),
        signals_ranks=ATTEMPT in environ,  # a rehearsal's engine signals this process alone
    )


def secret(name: str, file: str) -> str:
    """Return the value of the submitter's variable ``name``."""
    return shared_secret(name, Path(file), lambda data: str(json.loads(data)[name]), lacks="it lacks this value")
