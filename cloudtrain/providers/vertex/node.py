"""Node half of provider ``vertex``: read a container's environment. Standard library alone.

The topology comes from CLUSTER_SPEC alone. RANK, WORLD_SIZE and MASTER_ADDR belonged to a service that is gone, and
have other meanings now. CLUSTER_SPEC holds the request with the job's environment, and is never printed.
"""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import SpecError, StorageError
from ...provider_api.node import NodeEnvironment, Topology
from ...runtime.http_json import ask
from .._cloud import object_of, paths_of

GCS = "/gcs"
"""Folder in which every container sees Cloud Storage, by bucket."""
NFS = "/mnt/nfs"
NODES = "CLOUDTRAIN_NODES"
"""Variable with the number of nodes. CLUSTER_SPEC gives it too, but only for several nodes."""
PORT, LINK_PORT = 2222, 3333
"""torchrun's store and the node link. The port of CLUSTER_SPEC's addresses is the first."""
FORWARDED = (2222, 3333, 6000)
"""The only ports at which the chief's name answers: it is a Kubernetes Service. Variables of real jobs name them
(``CMLE_TRAINING_WORKERPOOL0_…_SERVICE_PORT_…``). At its own address a node answers on every port."""
JOIN_TIMEOUT = 3600.0
"""Seconds that nodes wait for each other. Without FLEX_START a job's machines come one by one. Users have seen nodes
start 45 minutes apart."""
GRACE, SPOT_GRACE = 30, 15
"""Seconds between SIGTERM and SIGKILL, and on spot machines. Jobs are pods of Google Kubernetes Engine, which leaves 15
of a spot machine's 30 s to pods that are not its own. Unverified for Vertex AI."""
GRACE_PATH, FABRIC_PATH = "grace", "fabric"
"""The ``--path`` with a node's grace, and the one with its machine's transport to others. They are arguments, which
options cannot change."""
AGAIN = 134
"""Exit code (SIGABRT) of a failure that may pass: Vertex starts the whole job again, at most 3 times."""
SHUTDOWN = 5
"""Seconds before the end of the grace at which torchrun kills its ranks; its own default is 30 s after SIGTERM."""
FLUSH_SECONDS = 30.0
"""Seconds between flushes: a write below /gcs is a new object, a rename a copy and a removal. Each costs money."""
HIDDEN = ("KUBERNETES_",)
"""Jobs are pods. With these variables libraries take a script for one that Kubeflow has started: Lightning before 2.0
did so if LOCAL_RANK was missing."""
OTHER_PORT = {PORT: LINK_PORT, LINK_PORT: PORT}
"""The node link's port by that of torchrun's store: the other of a chief's two ports."""
POOLS = ("workerpool0", "workerpool1")
"""The pools with nodes; any others are servers beside them."""


def grace_of(strategy: str) -> int:
    """Return the grace of a job with this scheduling strategy."""
    return SPOT_GRACE if strategy == "SPOT" else GRACE


def node_environment(environ: Mapping[str, str], argv: Mapping[str, str]) -> NodeEnvironment:
    """Return the facts that Vertex AI gave this node."""
    paths = paths_of(argv)
    grace = int(paths.pop(GRACE_PATH, GRACE))
    topology = _topology(environ)
    fabric, notes = fabric_env(environ, paths.pop(FABRIC_PATH, ""))
    shutdown = environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(grace - SHUTDOWN))
    return NodeEnvironment(
        topology=topology,
        paths=paths,
        scratch=("/tmp",),  # on the boot disk, the only one that a job can size
        export_env={**fabric, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": shutdown},
        hidden_env=HIDDEN,
        notes=notes,
        flush_seconds=FLUSH_SECONDS,
        stop_grace=grace,
        link_port=OTHER_PORT.get(topology.master_port),
        join_timeout=JOIN_TIMEOUT,
        restarts_in_place=True,
        # A lost peer is no failure of the script's, and any node's exit code 1 ends the job for good.
        exit_code={"succeeded": 0, "failed": 1, "preempted": AGAIN, "lost": AGAIN},
        secrets=lambda reference: secret(reference.partition(":")[2], environ),
    )


def _topology(environ: Mapping[str, str]) -> Topology:
    nodes = int(environ.get(NODES) or 1)
    if nodes == 1:
        return Topology(nodes=1, node_rank=0, master_addr="127.0.0.1", master_port=PORT)
    if not environ.get("CLUSTER_SPEC"):
        raise SpecError(f"this node of {nodes} does not know its number", field="CLUSTER_SPEC")
    if (spec := object_of(environ["CLUSTER_SPEC"])) is None:
        raise SpecError("is not a JSON object", field="CLUSTER_SPEC")  # not shown: it holds the environment
    cluster = _pools(spec)
    hosts = [host for pool in POOLS for host in cluster.get(pool, ())]
    pool, index = _task(spec)
    if len(hosts) != nodes or pool not in POOLS or not 0 <= index < len(cluster.get(pool, ())):
        raise SpecError(f"lists {len(hosts)} nodes and {pool} {index}; the job has {nodes}", field="CLUSTER_SPEC")
    address, _, port = hosts[0].rpartition(":") if re.search(r":\d+$", hosts[0]) else (hosts[0], "", "")
    return Topology(
        nodes=nodes,
        node_rank=index + (len(cluster[POOLS[0]]) if pool == POOLS[1] else 0),
        master_addr=address,
        master_port=int(port) if port and 0 < int(port) < 65535 else PORT,
    )


def _task(spec: Mapping[str, Any]) -> tuple[str, int]:
    """Return the node's pool and its index there, in either shape of `_pools`. Raises `SpecError`."""
    task = spec.get("task")
    if not isinstance(task, Mapping):
        raise SpecError("has no task", field="CLUSTER_SPEC")
    pool = task.get("type") or f"workerpool{task.get('worker_pool_index')}"
    try:
        return str(pool), int(task.get("index", task.get("replica_index")) or 0)
    except (TypeError, ValueError):
        raise SpecError("has a task without a number", field="CLUSTER_SPEC") from None


def _pools(spec: Mapping[str, Any]) -> dict[str, Sequence[str]]:
    """Return addresses by pool. There are two shapes: ``cluster`` by name (Vertex AI's page on distributed training),
    and ``worker_pools`` as a list (python-aiplatform, tests/unit/aiplatform/test_training_utils.py)."""
    cluster = spec.get("cluster")
    pools = cluster.get("worker_pools") if isinstance(cluster, Mapping) else None
    pools = pools or spec.get("worker_pools")
    if isinstance(pools, list):
        return {
            f"workerpool{pool.get('index', number)}": pool.get("replicas") or pool.get("hosts") or ()
            for number, pool in enumerate(pools)
            if isinstance(pool, Mapping)
        }
    return dict(cluster) if isinstance(cluster, Mapping) else {}


# -------------------------------------------------------------------------------------------------------------- secrets


def secret(resource: str, environ: Mapping[str, str]) -> str:
    """Return the value of ``projects/P/secrets/S[/versions/V]`` of Secret Manager (default: newest).

    The node asks as the job's service account. Raises `StorageError`, never with the value.
    """
    version = resource if "/versions/" in resource else f"{resource}/versions/latest"
    # gcloud's own variable for another endpoint.
    other = environ.get("CLOUDSDK_API_ENDPOINT_OVERRIDES_SECRETMANAGER")
    service = (other or "https://secretmanager.googleapis.com").rstrip("/")
    headers = {"Authorization": f"Bearer {token(environ)}"}
    request = urllib.request.Request(f"{service}/v1/{version}:access", headers=headers)
    how = "give the job's service account the role Secret Manager Secret Accessor"
    answer = ask(lambda: request, what=f"secret {version}", how=how)
    try:
        return base64.b64decode(answer["payload"]["data"]).decode()
    except (KeyError, TypeError, ValueError):
        raise StorageError(f"secret {version}: an answer without text") from None


def token(environ: Mapping[str, str]) -> str:
    """Return a token of the job's service account, from the machine's metadata server. Raises `StorageError`."""
    host = environ.get("GCE_METADATA_HOST") or "metadata.google.internal"  # the variable of Google's own libraries
    url = f"http://{host}/computeMetadata/v1/instance/service-accounts/default/token"
    request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
    what, how = "the token of the job's service account", "set vertex.service_account"
    answer = ask(lambda: request, what=what, how=how, direct=True)
    try:
        return str(answer["access_token"])
    except (KeyError, TypeError):
        raise StorageError(f"{what}: an answer without a token") from None


# ------------------------------------------------------------------------------------------------------------ GPUDirect
# Machines with H200, B200 and GB200 have GPUDirect-RDMA, machines with H100-mega have GPUDirect-TCPXO. For RDMA Google
# asks the user to source a script before the command: Vertex AI's page on compute resources. That page names no step
# for TCPXO. Its script comes from Google Kubernetes Engine's page on GPUDirect; it is unverified in a job of Vertex AI.

RDMA, TCPXO = "GPUDirect-RDMA", "GPUDirect-TCPXO"
TRANSPORTS: Mapping[str, str] = {
    **dict.fromkeys(("NVIDIA_H200_141GB", "NVIDIA_B200", "NVIDIA_GB200"), RDMA),
    "NVIDIA_H100_MEGA_80GB": TCPXO,
}
"""Transport between nodes by accelerator; all others use TCP."""
SCRIPTS: Mapping[str, str] = {
    RDMA: "/usr/local/gib/scripts/set_nccl_env.sh",
    TCPXO: "/usr/local/nvidia/lib64/nccl-env-profile.sh",
}
TIMEOUT = 30.0
LIBRARIES = "LD_LIBRARY_PATH"
"""Google's page on NCCL/gIB wants ``/usr/local/gib/lib64`` in it. It is unverified that Vertex AI puts it there."""
OF_THE_SHELL = ("_", "SHLVL", "PWD", "OLDPWD", "LC_CTYPE")
"""Variables that the shell, or Python as it starts, sets by itself."""
_SHOW = "import json, os, sys; json.dump(dict(os.environ), sys.stdout)"


def fabric_env(environ: Mapping[str, str], transport: str) -> tuple[dict[str, str], list[str]]:
    """Return the variables that ``transport``'s script sets (of `TRANSPORTS`, else none), and the node's log lines.

    A variable of ``environ`` keeps its value, which the image or an option has set, unless the script extends it. The
    folder of the plug-in goes in front of LD_LIBRARY_PATH, if the script has not put it there. A script that fails sets
    nothing, and training continues without it.
    """
    script = SCRIPTS.get(transport, "")
    if not script:
        return {}, []
    if not os.path.exists(script):
        return {}, [f"{transport}: this node has no {script}, so NCCL may use TCP, which is slower"]
    try:
        changed = _sourced(script, transport, environ)
    except (OSError, ValueError, subprocess.SubprocessError) as exc:
        why = " ".join(str(exc).split())[:300]
        return {}, [f"{transport}: {script} cannot be sourced, so NCCL may use TCP, which is slower: {why}"]
    new = {name: text for name, text in changed.items() if _extends(text, environ.get(name, ""))}
    folder = os.path.dirname(script) if transport == TCPXO else os.path.join(os.path.dirname(script), "../lib64")
    folder = os.path.normpath(folder)
    known = new.get(LIBRARIES, environ.get(LIBRARIES, ""))
    if os.path.isdir(folder) and folder not in known.split(":"):
        new[LIBRARIES] = f"{folder}:{known}".rstrip(":")
    kept = sorted(changed.keys() - new.keys())
    has = f"; {', '.join(kept)} stays as it was set before" if kept else ""
    return new, [f"{transport}: sourced {script}, which sets {', '.join(sorted(new)) or 'nothing new'}{has}"]


def _extends(text: str, before: str) -> bool:
    """Return True if ``text`` is a list (with colons or commas) that still has all of ``before``."""
    return set(re.split("[:,]", before)) - {""} <= set(re.split("[:,]", text))


def _sourced(script: str, transport: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the changes of ``script``, less `OF_THE_SHELL`. Raises `OSError`, `ValueError` or `SubprocessError`.

    A sourced script's status is that of its last line, often a test, so it is ignored.
    """
    shell = shutil.which("bash") or "/bin/sh"
    # Google's script for TCPXO takes the folder of the plug-in from this variable.
    before = {"NCCL_LIB_DIR": os.path.dirname(script), **environ} if transport == TCPXO else dict(environ)
    done = subprocess.run(
        [shell, "-c", '. "$1" >&2; exec "$2" -S -E -c "$3"', shell, script, sys.executable, _SHOW],
        env=before,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=TIMEOUT,
        check=False,
    )
    try:
        after: dict[str, str] = json.loads(done.stdout)
    except ValueError:
        after = {}
    changed = {n: text for n, text in after.items() if n not in OF_THE_SHELL and environ.get(n) != text}
    if changed.keys() <= before.keys() - environ.keys():
        last = done.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2]
        raise ValueError(last or (f"the shell ended with {done.returncode}" if not after else "it sets nothing"))
    return changed
