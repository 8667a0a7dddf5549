"""Node half of provider ``kubernetes``: read the environment of an indexed Job's pod. Standard library alone."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from ...errors import SpecError, StorageError
from ...provider_api.node import NodeEnvironment, Topology
from .._cloud import FLUSH_PATH, GRACE_PATH, Clock, paths_of

__all__ = ["AGAIN", "GRACE", "TIME_UP", "node_environment", "secret"]

GRACE = 30
"""Default seconds from the stop signal to the kill: Kubernetes' own."""
AGAIN, TIME_UP = 75, 76
"""Exit codes: the Job starts the node again; the job has used up its time limit."""
PORT = 29500
CLOCK_PATH, LIMIT_PATH = "clock", "limit"
"""``--path`` pairs: the file with the running time of all starts, and the limit of it in seconds."""
NODES, HOST = "CLOUDTRAIN_KUBERNETES_NODES", "CLOUDTRAIN_KUBERNETES_HOST"
MACHINE = "CLOUDTRAIN_KUBERNETES_MACHINE"
"""Variable with the name of the cluster's node, which Kubernetes fills in."""
INDEX = "JOB_COMPLETION_INDEX"
SCRATCH, SECRETS = "/cloudtrain/scratch", "/cloudtrain/secrets"
WRITTEN = 2.0
"""Seconds between two writes of the running time on a volume of files."""


def node_environment(environ: Mapping[str, str], argv: Mapping[str, str]) -> NodeEnvironment:
    """Return the facts that the Job gave this pod. Raises `SpecError` outside of one."""
    paths = paths_of(argv)
    grace = float(paths.pop(GRACE_PATH, GRACE))
    file, limit = paths.pop(CLOCK_PATH, ""), float(paths.pop(LIMIT_PATH, 0))
    flush = float(paths.pop(FLUSH_PATH, 0))
    try:
        nodes, rank = int(environ[NODES]), int(environ[INDEX])
    except (KeyError, ValueError):
        raise SpecError("is not set: this is no pod of an indexed Job", field=INDEX) from None
    codes = {"succeeded": 0, "failed": 1, "preempted": AGAIN, "lost": AGAIN}
    clock = Clock(Path(file), limit, codes, TIME_UP, flush or WRITTEN) if file and limit and rank == 0 else None
    return NodeEnvironment(
        topology=Topology(
            nodes=nodes,
            node_rank=rank,
            master_addr=environ[HOST] if nodes > 1 else "127.0.0.1",
            master_port=PORT,
        ),
        paths=paths,
        scratch=(SCRATCH, "/tmp"),
        stop_grace=grace,
        flush_seconds=flush or NodeEnvironment.flush_seconds,
        exit_code=codes,
        secrets=lambda reference: secret(reference.partition(":")[2]),
        machine=environ.get(MACHINE, ""),
        notices=(clock,) if clock is not None else (),
    )


def secret(name: str) -> str:
    """Return the value of the submitter's variable ``name``. Raises `StorageError`, never with a value."""
    path = Path(SECRETS) / name
    try:
        return path.read_text()
    except (OSError, ValueError) as exc:
        why = os.strerror(exc.errno) if isinstance(exc, OSError) and exc.errno else "it is not text"
        raise StorageError(f"secret env:{name} cannot be read from {path}: {why}") from None
