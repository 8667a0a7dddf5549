"""Vertex AI's view of a job's nodes, read from its pages for tests and independent of cloudtrain's provider.

`reading` returns the LaunchSpec of a CustomJob message; `differences` compares it with another one.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

from cloudtrain.provider_api.launch_spec import LaunchRules, LaunchSpec, Mount, NodeSpec

from .strict import SPOT, parsed

__all__ = ["differences", "reading", "tasks"]

GRACE, SPOT_GRACE = 30.0, 15.0
"""Seconds between SIGTERM and SIGKILL of a pod, and on a spot machine ("Spot VMs" of Google Kubernetes Engine);
unverified for jobs."""
PORT = 2222
FORWARDED = (2222, 3333, 6000)
"""Ports that the Service of the chief's name forwards: TF_PORT, TRAINING_PORT, STATUSZ of real workers."""
WEEK = 7 * 86400.0
"""Time limit of a job that sets none."""
NUMBER = "123456789012"
"""Number of the project."""
TRANSIENT = (6, 11, 134, 139)
"""Exit codes that the pages call potentially transient: the whole job starts again."""
RETRIES = 3
TASKS = {"workerpool0": "chief", "workerpool1": "worker", "workerpool2": "ps", "workerpool3": "evaluator"}
"""Names of the pools in TF_CONFIG."""
POISON = {"RANK": "7", "LOCAL_RANK": "7", "WORLD_SIZE": "77", "MASTER_ADDR": "nowhere.invalid", "MASTER_PORT": "1"}
"""Wrong values of torchrun's variables, as the retired AI Platform Training set them: a script that uses them trains
nothing."""
POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "KUBERNETES_SERVICE_PORT": "443", "KUBERNETES_PORT": "tcp://10.0.0.1:443"}
"""Variables by which a program recognises a pod of Kubernetes: a replica is one."""
PLATFORM = re.compile(r"CLUSTER_SPEC|TF_CONFIG|(CLOUD_ML|AIP)_.*|HOSTNAME|" + "|".join((*POISON, *POD)))
"""Variables that the platform adds, so a provider need not name them."""


def tasks(job: Any) -> list[tuple[int, int]]:
    """Return (pool, index) of each replica; the first is the primary one."""
    pools = job.job_spec.worker_pool_specs
    return [(number, index) for number, pool in enumerate(pools) for index in range(pool.replica_count)]


def reading(name: str, job: Any) -> LaunchSpec:
    """Return what the platform starts for a CustomJob message with that resource name, without the buckets."""
    where = {task: _host(name, *task) for task in tasks(job)}
    nodes = []
    for pool, index in where:
        spec = job.job_spec.worker_pool_specs[pool]
        container = spec.container_spec
        nodes.append(
            NodeSpec(
                image=container.image_uri,
                entrypoint=list(container.command) or None,
                command=list(container.args),
                env={**{item.name: item.value for item in container.env}, **_platform(name, job, (pool, index), where)},
                mounts=[
                    Mount(url=f"nfs://{item.server}{item.path}", path=f"/mnt/nfs/{item.mount_point}", kind="mount")
                    for item in spec.nfs_mounts
                ],
                hostname=where[pool, index],
                ports=FORWARDED if pool == 0 and len(where) > 1 else (),
            )
        )
    scheduling = job.job_spec.scheduling
    limit = scheduling.timeout.ToTimedelta().total_seconds() if scheduling.HasField("timeout") else WEEK
    again = () if scheduling.disable_retries else TRANSIENT
    grace = SPOT_GRACE if scheduling.strategy == SPOT else GRACE
    rules = LaunchRules(time_limit=limit, restart_on=again, max_restarts=RETRIES if again else 0, stop_grace=grace)
    return LaunchSpec(nodes=nodes, rules=rules)


def _host(name: str, pool: int, index: int) -> str:
    return f"cmle-training-workerpool{pool}-{hashlib.sha256(name.encode()).hexdigest()[:10]}-{index}"


def _platform(name: str, job: Any, task: tuple[int, int], where: Mapping[tuple[int, int], str]) -> dict[str, str]:
    """Return the platform's variables of one replica ("Environment variables for distributed training")."""
    from google.protobuf import json_format

    pool, index = task
    cluster: dict[str, list[str]] = {}
    for (number, _), host in where.items():
        cluster.setdefault(f"workerpool{number}", []).append(f"{host}:{PORT}")
    spec: dict[str, Any] = {
        "cluster": cluster,
        "environment": "cloud",
        "task": {"type": f"workerpool{pool}", "index": index, "trial": ""},
        "job": json_format.MessageToDict(job.job_spec),
    }
    _, _, _, location, _, id = name.split("/")
    env = {
        **POISON,
        **POD,
        "CLUSTER_SPEC": json.dumps(spec),
        "CLOUD_ML_PROJECT_ID": NUMBER,
        "CLOUD_ML_JOB_ID": id,
        "CLOUD_ML_REGION": location,
    }
    if len(where) > 1:
        named = {TASKS[key]: hosts for key, hosts in cluster.items()}
        cluster_spec = {"cluster": named, "task": {"type": TASKS[f"workerpool{pool}"], "index": index}}
        env["TF_CONFIG"] = json.dumps({**cluster_spec, "environment": "cloud"})
    if base := job.job_spec.base_output_directory.output_uri_prefix.rstrip("/"):
        env["AIP_MODEL_DIR"] = f"{base}/model/"
        env["AIP_CHECKPOINT_DIR"] = f"{base}/checkpoints/"
        env["AIP_TENSORBOARD_LOG_DIR"] = f"{base}/logs/"
    return env


# -------------------------------------------------------------------------------------------------------- comparisons


def differences(body: Mapping[str, Any], theirs: LaunchSpec) -> list[str]:
    """Return how ``theirs`` differs from our `reading` of a body.

    It may add facts of the machine (memory, GPUs), and narrow a bucket to a prefix.
    """
    ours = reading("projects/p/locations/l/customJobs/1", parsed(body))
    found = []

    def compare(where: str, first: Any, second: Any) -> None:
        if first != second:
            found.append(f"{where}: the platform has {first!r}, not {second!r}")

    compare("number of nodes", len(ours.nodes), len(theirs.nodes))
    for number, (one, other) in enumerate(zip(ours.nodes, theirs.nodes, strict=False)):
        at = f"node {number}: "
        for name in ("image", "entrypoint", "command", "user", "workdir", "files", "ports"):
            compare(at + name, _plain(getattr(one, name)), _plain(getattr(other, name)))
        compare(at + "variables", _own(one.env), _own(other.env))
        compare(at + "task", _task(one, ours), _task(other, theirs))
        named = {mount.url: mount.path for mount in one.mounts}
        for mount in other.mounts:
            path = named.get(mount.url, mount.url.replace("gs://", "/gcs/", 1))
            compare(f"{at}path of {mount.url}", path, mount.path)
    for name in ("time_limit", "stop_grace", "stop_signal", "restart_on", "max_restarts"):
        compare(name, _plain(getattr(ours.rules, name)), _plain(getattr(theirs.rules, name)))
    return found


def _own(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if not PLATFORM.fullmatch(name)}


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, (list, tuple)) else value


def _task(node: NodeSpec, launch: LaunchSpec) -> tuple[Any, ...]:
    """Return the node number that a node finds in its variables, and the address at which it finds each peer."""
    spec = json.loads(node.env.get("CLUSTER_SPEC", "{}"))
    hosts = [str(peer.hostname) for peer in launch.nodes]
    cluster = spec.get("cluster", {})
    peers = [host.partition(":")[0] for pool in sorted(cluster) for host in cluster[pool]]
    return spec.get("task", {}).get("type"), spec.get("task", {}).get("index"), peers == hosts
