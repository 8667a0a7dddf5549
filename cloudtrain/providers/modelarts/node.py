"""Node half of provider ``modelarts``: read the environment of a training job's container. Standard library alone.

Sources: Huawei's page on environment variables of training containers, and scripts that ran there. Nothing here was
tried against the service.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path

from ...errors import SpecError, StorageError
from ...provider_api.node import NodeEnvironment, Topology
from .._cloud import Clock, paths_of

GRACE = 30
"""Seconds between SIGTERM and SIGKILL: Kubernetes' own, as nodes are pods of Volcano; unverified."""
AGAIN, TIME_UP = 75, 76
"""Exit codes of a node that was taken back or lost its peers, and of a job that has used up its time."""
MOUNT, NFS = "/mnt/obs", "/mnt/nfs"
"""Folders of the mounted buckets, and of the file systems."""
PORT = 6060
"""torchrun's store, as in Huawei's own examples; the node link has the next port. A node answers on every port."""
LIMIT_PATH, CLOCK_PATH, DEVICE_PATH, KEY_PATH = "limit", "clock", "device", "key"
"""``--path`` pairs: the seconds of running time, the file with the used ones, ``npu`` on Ascend, the run's key."""
SECRETS = "CLOUDTRAIN_SECRETS"
"""Variable of the job with the values of its secrets, sealed with the run's key, which lies in the bucket."""
JOIN_TIMEOUT = 3600.0
FLUSH_SECONDS = 30.0
"""Seconds between two writes into a mounted bucket: each is a whole new object, which costs money."""
HCCL = {"HCCL_CONNECT_TIMEOUT": "1800"}
"""Variables of Ascend's collective library, whose default for a peer that starts late is 120 s."""
BACKEND = {"CLOUDTRAIN_BACKEND_MODULES": "torch_npu torch_npu.contrib.transfer_to_npu"}
"""Modules that a rank imports before its script: Ascend's devices, and their use where a script names CUDA and NCCL."""


def node_environment(environ: Mapping[str, str], argv: Mapping[str, str]) -> NodeEnvironment:
    """Return the facts that ModelArts gave this container. Raises `SpecError` outside of one."""
    paths = paths_of(argv)
    file, limit = paths.pop(CLOCK_PATH, ""), float(paths.pop(LIMIT_PATH, 0))
    npu, key = paths.pop(DEVICE_PATH, "") == "npu", paths.pop(KEY_PATH, "")
    topology = _topology(environ)
    codes = {"succeeded": 0, "failed": 1, "preempted": AGAIN, "lost": AGAIN}
    clock = Clock(Path(file), limit, codes, TIME_UP, FLUSH_SECONDS) if file and topology.node_rank == 0 else None
    own = {name: text for name, text in HCCL.items() if name not in environ} if npu else {}
    return NodeEnvironment(
        topology=topology,
        paths=paths,
        scratch=("/cache", "/tmp"),
        export_env={**own, **(BACKEND if npu else {})},
        hidden_env=(SECRETS,),
        flush_seconds=FLUSH_SECONDS,
        stop_grace=GRACE,
        join_timeout=JOIN_TIMEOUT,
        exit_code=codes,
        restart=_starts(environ),
        restarts_in_place=True,
        secrets=lambda reference: secret(reference.partition(":")[2], environ, key),
        notices=(clock,) if clock is not None else (),
    )


def _starts(environ: Mapping[str, str]) -> int:
    """Return the number of starts before this one that ModelArts counts: placements, and starts in one container.

    A new container may count its own starts from 1 again; so this is the least number.
    """
    counts = (environ.get(name, "1") for name in ("MA_SCHEDULE_CNT", "MA_PROC_START_CNT"))
    return sum(max(int(text) - 1, 0) for text in counts if text.isdecimal())


def _topology(environ: Mapping[str, str]) -> Topology:
    try:
        nodes = int(environ.get("MA_NUM_HOSTS") or environ["VC_WORKER_NUM"])
        rank = int(environ.get("VC_TASK_INDEX") or environ.get("VK_TASK_INDEX") or ("0" if nodes == 1 else ""))
    except (KeyError, ValueError):
        raise SpecError("are not set: this is no container of a training job", field="MA_NUM_HOSTS") from None
    hosts = [host.strip() for host in environ.get("VC_WORKER_HOSTS", "").split(",") if host.strip()]
    if nodes > 1 and (len(hosts) != nodes or not 0 <= rank < nodes):
        why = f"names {len(hosts)} nodes, this is node {rank}, and the job has {nodes}"
        raise SpecError(why, field="VC_WORKER_HOSTS")
    first = hosts[0] if nodes > 1 else "127.0.0.1"
    return Topology(nodes=nodes, node_rank=rank, master_addr=first, master_port=PORT)


# -------------------------------------------------------------------------------------------------------------- secrets


def sealed(values: Mapping[str, str], key: bytes) -> str:
    """Return ``values`` as text that only ``key`` opens: who can read the job, or the bucket, alone sees nothing."""
    nonce, data = secrets.token_bytes(16), json.dumps(dict(values)).encode()
    hidden = bytes(a ^ b for a, b in zip(data, _stream(key, nonce, len(data)), strict=True))
    return base64.b64encode(nonce + hidden + _tag(key, nonce + hidden)).decode()


def secret(name: str, environ: Mapping[str, str], key_file: str) -> str:
    """Return the value of the submitter's variable ``name``. Raises `StorageError`, never with a value."""
    try:
        key, text = Path(key_file).read_bytes(), base64.b64decode(environ[SECRETS])
        nonce, hidden, tag = text[:16], text[16:-32], text[-32:]
        if not hmac.compare_digest(tag, _tag(key, nonce + hidden)):
            raise ValueError("they are sealed with another key")
        data = bytes(a ^ b for a, b in zip(hidden, _stream(key, nonce, len(hidden)), strict=True))
        return str(json.loads(data)[name])
    except (OSError, ValueError, KeyError, TypeError) as exc:
        why = os.strerror(exc.errno) if isinstance(exc, OSError) and exc.errno else "the job does not hold it"
        raise StorageError(f"secret env:{name} cannot be opened with {key_file}: {why}") from None


def _stream(key: bytes, nonce: bytes, size: int) -> bytes:
    """Return ``size`` bytes of HMAC-SHA256 in counter mode."""
    own = hmac.new(key, b"seal" + nonce, hashlib.sha256).digest()
    blocks = (hmac.new(own, at.to_bytes(8, "big"), hashlib.sha256).digest() for at in range(-(-size // 32)))
    return b"".join(blocks)[:size]


def _tag(key: bytes, data: bytes) -> bytes:
    return hmac.new(key, b"tag" + data, hashlib.sha256).digest()
