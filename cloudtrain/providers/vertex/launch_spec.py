"""Predict Vertex AI's containers for a request, as data for an engine, a FakePlatform and the contract suite. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ...provider_api.launch_spec import LaunchRules, LaunchSpec, Mount, NodeSpec
from ...provider_api.protocol import Request
from .._cloud import pairs_of, size_of
from .machines import known_machine
from .node import AGAIN, FABRIC_PATH, FORWARDED, GRACE_PATH, NFS, PORT, grace_of
from .request import mounted, unmounted

if TYPE_CHECKING:
    from . import Settings

TRANSIENT = (6, 11, AGAIN, 139)
"""Exit codes of failures that may pass (SIGABRT, SIGSEGV, each twice): Vertex AI's page on its training service."""
RESTARTS = 3
"""Restarts of a job after an exit code that may pass: Vertex AI's page on its training service."""
PREEMPTIONS = 6
"""Restarts of a job on spot machines: Vertex AI's page on them."""


def launch_spec(settings: Settings, request: Request) -> LaunchSpec:
    """Return one container a replica."""
    spec = request.body["jobSpec"]
    pools = spec["workerPoolSpecs"]
    tag = hashlib.sha256(request.body["displayName"].encode()).hexdigest()[:10]
    hosts = {
        f"workerpool{number}": [f"cmle-training-workerpool{number}-{tag}-{i}" for i in range(int(pool["replicaCount"]))]
        for number, pool in enumerate(pools)
    }
    specs = [
        _node(request, pool, hosts, number, index)
        for number, pool in enumerate(pools)
        for index in range(int(pool["replicaCount"]))
    ]
    scheduling = spec["scheduling"]
    again = () if scheduling.get("disableRetries") else TRANSIENT
    rules = LaunchRules(
        time_limit=int(scheduling["timeout"].removesuffix("s")),
        restart_on=again,
        max_restarts=RESTARTS if again else 0,
        preemptions=PREEMPTIONS,
        losses=RESTARTS if scheduling.get("restartJobOnWorkerRestart") else 0,
        primary=0,
        stop_grace=grace_of(scheduling.get("strategy", "")),
    )
    return LaunchSpec(nodes=specs, rules=rules)


def _node(
    request: Request, pool: Mapping[str, Any], hosts: Mapping[str, list[str]], number: int, index: int
) -> NodeSpec:
    container, name = pool["containerSpec"], f"workerpool{number}"
    return NodeSpec(
        image=container["imageUri"],
        entrypoint=container["command"],
        command=container["args"],
        env={**_environment(request, hosts, name, index), **{item["name"]: item["value"] for item in container["env"]}},
        mounts=list(_mounts(request, pool)),
        hostname=hosts[name][index],
        ports=FORWARDED if len(hosts) > 1 and number == 0 else (),
        **size_of(known_machine(pool["machineSpec"])),
    )


def _environment(request: Request, hosts: Mapping[str, list[str]], pool: str, index: int) -> dict[str, str]:
    """Return the service's own variables: Vertex AI's pages on code requirements and on distributed training."""
    base = request.body["jobSpec"]["baseOutputDirectory"]["outputUriPrefix"]
    cluster = {
        "cluster": {name: [f"{host}:{PORT}" for host in there] for name, there in hosts.items()},
        "environment": "cloud",
        "task": {"type": pool, "index": index},
        "job": request.body["jobSpec"],
    }
    return {
        "CLUSTER_SPEC": json.dumps(cluster),
        "CLOUD_ML_JOB_ID": "0",
        "CLOUD_ML_PROJECT_ID": "0",
        "AIP_MODEL_DIR": f"{base}/model/",
        "AIP_CHECKPOINT_DIR": f"{base}/checkpoints/",
        "AIP_TENSORBOARD_LOG_DIR": f"{base}/logs/",
    }


def _mounts(request: Request, pool: Mapping[str, Any]) -> Iterator[Mount]:
    """Yield each part of a bucket that the command names, by itself. The service mounts buckets whole."""
    words = pool["containerSpec"]["args"]
    base = request.body["jobSpec"]["baseOutputDirectory"]["outputUriPrefix"]
    servers = {
        f"{NFS}/{item['mountPoint']}": f"nfs://{item['server']}{item['path']}" for item in pool.get("nfsMounts", ())
    }
    runtime = next(word for word in words if word.endswith("/cloudtrain.pyz")).rpartition("/")[0]
    context = words[words.index("--context") + 1]
    yield Mount(url=runtime, path=mounted(runtime), kind="mount")
    for path in (context, f"{context.rpartition('/')[0]}/key"):
        yield Mount(url=unmounted(path), path=path, kind="mount")
    yield Mount(url=base, path=mounted(base), kind="sync")
    for name, path in pairs_of(words).items():
        if name not in (GRACE_PATH, FABRIC_PATH):
            place = path.rpartition("/")[0] if name == "code" else path
            url = servers[place] if place in servers else unmounted(place)
            yield Mount(url=url, path=place, kind="sync" if name == "live" else "mount")
