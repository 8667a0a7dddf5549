"""Node half of provider ``kubernetes``: read the environment of an indexed Job's pod. Standard library alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ...errors import SpecError
from ...provider_api.node import NodeEnvironment
from .._cloud import Clock, shared_environment, shared_secret

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
    peers = {"master_addr": environ.get(HOST, "127.0.0.1"), "master_port": PORT}
    shared = shared_environment(environ, argv, names=(NODES, INDEX), what="pod of an indexed Job", grace=GRACE, **peers)
    if shared["topology"].nodes > 1 and HOST not in environ:
        raise SpecError("is not set: the nodes cannot find node 0", field=HOST)
    file, limit = shared["paths"].pop(CLOCK_PATH, ""), float(shared["paths"].pop(LIMIT_PATH, 0))
    codes = {"succeeded": 0, "failed": 1, "preempted": AGAIN, "lost": AGAIN}
    counts = file and limit and shared["topology"].node_rank == 0
    pause = shared.get("flush_seconds", WRITTEN)
    return NodeEnvironment(
        **shared,
        scratch=(SCRATCH, "/tmp"),
        exit_code=codes,
        secrets=lambda reference: secret(reference.partition(":")[2]),
        machine=environ.get(MACHINE, ""),
        notices=(Clock(Path(file), limit, codes, TIME_UP, pause),) if counts else (),
    )


def secret(name: str) -> str:
    """Return the value of the submitter's variable ``name``."""
    return shared_secret(name, Path(SECRETS) / name, bytes.decode, lacks="it is not text")
