"""Prepare a container of Vertex AI: wait for the bucket, copy inputs, then become the node.

Standard library alone. It runs from cloudtrain.pyz, before the runtime, which uses folders only.
"""

from __future__ import annotations

import http.client
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NoReturn

from ...errors import CloudtrainError, StorageError, reason_of
from . import bootstrap
from .node import AGAIN, GCS

PATIENCE = 120.0
"""Seconds for a bucket to show the client's files, written before the job was created."""
COPIES = 16
"""Files copied at once: each is its own request to Cloud Storage."""
SHM_MIB = 1024
"""Shared memory below which a node warns: NCCL and DataLoader workers fail for want of it (python-aiplatform #3434)."""


def main(pyz: str, arguments: Sequence[str]) -> NoReturn:
    """Run ``cloudtrain.pyz run`` with ``arguments``. A path ``copy.X`` or ``copyfile.X`` becomes an input here."""
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(AGAIN))  # there is nothing to save yet
    try:
        words = list(arguments)
        await_file(words[words.index("--context") + 1])
        check_shm()
        words = [
            copied(delivered(word)) if before == "--path" else word
            for before, word in zip(["", *words], words, strict=False)
        ]
    except (CloudtrainError, OSError, ValueError, http.client.HTTPException) as exc:
        sys.stderr.write(f"cloudtrain: this node cannot start: {reason_of(exc)}\n")
        sys.stderr.flush()
        os._exit(AGAIN)  # a bucket, a metadata server or a disk: no failure of the script's
    # Held back until the runtime has a handler: the kernel drops PID 1's signals without one.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    os.execv(sys.executable, [sys.executable, pyz, *words])


def await_file(path: str, patience: float = PATIENCE) -> None:
    """Wait until ``path``, which the client has written, appears. Raises `StorageError`."""
    end = time.monotonic() + patience
    while not os.path.exists(path):
        if time.monotonic() > end:
            bucket = path.removeprefix(f"{GCS}/").partition("/")[0]
            how = "make the bucket in the job's region, and let the job's service account read and write it"
            raise StorageError(f"{path} does not appear (gs://{bucket} at {GCS})", hint=how)
        time.sleep(0.5)


def check_shm(path: str = "/dev/shm") -> None:
    """Warn of little shared memory: no field of a job sets its size."""
    try:
        status = os.statvfs(path)
    except OSError:
        return
    size = status.f_frsize * status.f_blocks >> 20
    if size < SHM_MIB:
        sys.stderr.write(
            f"cloudtrain: {path} has {size} MiB; set num_workers=0, or NCCL_SHM_DISABLE=1, if it runs out\n"
        )


def delivered(pair: str, *, root: str = GCS, patience: float = bootstrap.PATIENCE) -> str:
    """Return ``code=PATH``. If the bucket lacks it for ``patience`` s, PATH is a copy from Cloud Storage's API.

    Other pairs are returned as they are. Raises `OSError`, `ValueError` or `HTTPException`.
    """
    name, _, path = pair.partition("=")
    if name != "code" or os.path.exists(path) or not path.startswith(f"{root}/"):
        return pair
    data = bootstrap.read(f"gs://{path.removeprefix(f'{root}/')}", root=root, patience=patience)
    target = os.path.join(tempfile.mkdtemp(prefix="cloudtrain-code-"), os.path.basename(path))
    with open(target, "wb") as out:
        out.write(data)
    return f"{name}={target}"


def copied(pair: str) -> str:
    """Return ``NAME=PATH``. A ``copy`` pair is copied to local disk and named an input. Raises `StorageError`."""
    name, _, path = pair.partition("=")
    kind, _, channel = name.partition(".")
    if kind not in ("copy", "copyfile"):
        return pair
    target = tempfile.mkdtemp(prefix=f"cloudtrain-{channel}-")
    one = [(path, os.path.join(target, os.path.basename(path)))]
    try:
        with ThreadPoolExecutor(COPIES) as pool:
            pairs = one if kind == "copyfile" else list(_below(path, target))
            list(pool.map(lambda both: shutil.copyfile(*both), pairs))  # raises the first error
    except OSError as exc:
        source = f"gs://{path.removeprefix(f'{GCS}/')}" if path.startswith(f"{GCS}/") else path
        raise StorageError(f"cannot copy the input {channel} from {source}: {exc.strerror or exc}") from None
    return f"input.{channel}={target}"


def _below(folder: str, target: str) -> Iterator[tuple[str, str]]:
    """Yield every file below ``folder`` and its copy's path, after making the copies' folders."""

    def fail(exc: OSError) -> None:
        raise exc

    for here, _, files in os.walk(folder, onerror=fail):
        there = os.path.join(target, os.path.relpath(here, folder))
        os.makedirs(there, exist_ok=True)
        for file in files:
            yield os.path.join(here, file), os.path.join(there, file)
