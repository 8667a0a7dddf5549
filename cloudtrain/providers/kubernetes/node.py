"""Node half of provider ``kubernetes``: read the environment of an indexed Job's pod. Standard library alone."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

from ...errors import SpecError, StorageError
from ...provider_api.node import NodeEnvironment, Topology
from ...runtime.checkpoints import put_whole
from .._cloud import FLUSH_PATH, GRACE_PATH, paths_of

__all__ = ["AGAIN", "GRACE", "TIME_UP", "Clock", "node_environment", "secret"]

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
WRITTEN, CALLED = 2.0, 1.0
"""Seconds between two writes of the running time on a volume of files, and between two calls of a notice."""


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
    clock = Clock(Path(file), limit, codes, flush or WRITTEN) if file and limit and rank == 0 else None
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


class Clock:
    """The running time of all starts of a job, on node 0. A Job's own deadline also counts the wait for machines.

    At the limit it reports the end as a notice, so that every node saves, and changes the exit code of this node.
    ``file`` is written every ``pause`` seconds, at most a tenth of the limit. It always holds the time up to the next
    write, so that a start that ends before then is counted whole.
    """

    def __init__(self, file: Path, limit: float, codes: dict[str, int], pause: float = WRITTEN) -> None:
        self._file, self._limit, self._codes, self._pause = file, limit, codes, min(pause, limit / 10)
        self._began = time.monotonic()
        self._before: float | None = None
        self._counted = 0.0

    def __call__(self) -> str:
        """Return the reason for the node's end; empty before the limit."""
        if self._before is None:
            self._before = self._counted = self._read()
        used = self._before + time.monotonic() - self._began
        if self._counted < min(used + CALLED, self._limit):
            self._write(min(used + self._pause, self._limit))
        if used < self._limit:
            return ""
        self._codes.update(preempted=TIME_UP, lost=TIME_UP)
        return "the time limit is used up"

    def _read(self) -> float:
        try:
            return float(self._file.read_text())
        except (OSError, ValueError):
            return 0.0

    def _write(self, counted: float) -> None:
        data = f"{counted:.1f}".encode()
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            put_whole(self._file, lambda path: path.write_bytes(data), temporary=".part")
            self._counted = counted
        except OSError:  # the volume does not answer now
            return


def secret(name: str) -> str:
    """Return the value of the submitter's variable ``name``. Raises `StorageError`, never with a value."""
    path = Path(SECRETS) / name
    try:
        return path.read_text()
    except (OSError, ValueError) as exc:
        why = os.strerror(exc.errno) if isinstance(exc, OSError) and exc.errno else "it is not text"
        raise StorageError(f"secret env:{name} cannot be read from {path}: {why}") from None
