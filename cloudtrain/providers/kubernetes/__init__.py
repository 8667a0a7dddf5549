"""Provider ``kubernetes``: indexed Jobs of a cluster of version 1.29 or newer, which needs nothing installed.

Its Request holds the manifest that ``kubectl create -f`` takes: one Job, and a headless Service if there are several
nodes; or one JobSet, which makes both. `request`, `devices` and `validate` make and check it. `api` sends it. `node` is
the node half.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from tempfile import gettempdir
from typing import Any, ClassVar

from ...provider_api.protocol import Need, setting
from .._cloud import ClusterProvider, shared_store

__all__ = ["DIFFERENCES", "NAME", "SAMPLE", "Provider", "Settings"]

NAME = "kubernetes"
STORE = shared_store("/mnt/training/cloudtrain", "a folder on the shared volume, below kubernetes.root")
ROOT = Need(
    example="/mnt/training",
    find="the folder where this machine has the cluster's shared volume mounted",
    stand_in="/SHARED-VOLUME",
    shown="/<shared>",
)
CLAIM = Need(
    example="training",
    find="the PersistentVolumeClaim that all nodes mount: kubectl get pvc (or set volume)",
    instead="volume",
)
IMAGE = Need(
    example="docker.io/pytorch/pytorch:latest", find="an image with Python and torch that the cluster can pull"
)
EXTRA_GRACE = 10
"""Seconds between the end of our grace and Kubernetes' kill."""
MOST = 2**31 - 1 - EXTRA_GRACE
"""Most seconds of a setting: Kubernetes' numbers have 32 bits."""
ALIASES = ("k8s", "kubectl", "kueue", "hami", "eks", "gke", "aks", "openshift", "volcano")
"""Other words for the platform, for the hint of an unknown provider."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of the cluster, in Kubernetes' own words."""

    kubeconfig: str = setting(
        "file with your clusters; not recorded; default: that of kubectl, or the pod's own identity", caller=True
    )
    context: str = setting("context of that file; not recorded; default: its current one", caller=True)
    namespace: str = setting("namespace of all objects", "default", place=True)
    kind: str = setting("job or jobset, the object that is created", "job")
    claim: str = setting("PersistentVolumeClaim of the volume that the nodes and this machine share", need=CLAIM)
    volume: dict[str, Any] = setting(
        'any other volume of a pod instead of a claim: nfs.server = "nas.example", nfs.path = "/export"', dict
    )
    root: str = setting("folder of that volume, here and on the nodes", need=ROOT)
    bucket: str = setting("URL that nodes see at root, if the volume is a mounted bucket: gs://my-bucket")
    service_account: str = setting("service account of the pods; default: none, and no token")
    image_pull_secrets: tuple[str, ...] = setting("names of Secrets with logins of registries", ())
    image_pull_policy: str = setting("pull policy of the image", choices=("Always", "IfNotPresent", "Never"))
    node_selector: dict[str, Any] = setting("labels that nodes must have", dict)
    exclude: tuple[str, ...] = setting("nodes that get no pod, by name", ())
    tolerations: tuple[dict[str, Any], ...] = setting("list of taints that the pods accept", ())
    priority_class: str = setting("priority class of the pods")
    runtime_class: str = setting("runtime class of the pods")
    scheduler_name: str = setting("scheduler of the pods")
    queue: str = setting("LocalQueue of Kueue")
    host_network: bool = setting("use the network of the machine", False)
    labels: dict[str, Any] = setting("labels of the Job and its pods", dict)
    annotations: dict[str, Any] = setting("annotations of the pods", dict)
    user: int = setting("uid of the containers; 0: the image's own", 0, least=0, most=MOST)
    security: str = setting("level of Pod Security of the namespace", choices=("restricted",))
    gpu_resource: str = setting("the cluster's name of a GPU", "nvidia.com/gpu")
    gpu_label: str = setting("label of a node with its kind of GPU; empty: any GPU", "nvidia.com/gpu.product")
    gpu_names: dict[str, Any] = setting('values of that label by the GPU\'s name: H100 = ["NVIDIA-H100-NVL"]', dict)
    spot: str = setting("kind of the spot nodes", choices=("gke", "eks", "karpenter", "aks"))
    hami: dict[str, Any] = setting("shares of a GPU by HAMi (docs/kubernetes.md)", dict)
    ttl: int = setting("seconds for which an ended Job stays; default: seven days", 7 * 86400, least=3600, most=MOST)
    pending: int = setting(
        "longest wait in seconds for machines and images, over all starts; default: seven days",
        7 * 86400,
        least=60,
        most=MOST,
    )
    stop_grace: int = setting("seconds from the stop signal to the kill", 30, least=5, most=MOST)
    prices: dict[str, Any] = setting("US dollars for an hour of a node, by instance type, else node", dict)


class Provider(ClusterProvider):
    """Provider of Kubernetes' Jobs; see `cloudtrain.provider_api.protocol.Provider` for the methods."""

    name: ClassVar[str] = NAME
    Settings: ClassVar[type[Any]] = Settings
    max_poll_s: ClassVar[float] = 5.0
    needs: ClassVar[Mapping[str, Need]] = {"store": STORE, "image": IMAGE}
    shares_gpus: ClassVar[bool] = True
    probe_ports: ClassVar[tuple[int, ...]] = (29500, 29501)


DIFFERENCES = (
    "pods restart after some seconds, not after the cluster's growing pause",
    "labels, taints, quotas, Kueue and HAMi do not act",
)
"""Differences that a rehearsal does not show."""
SAMPLE: dict[str, Any] = {
    "job": {"image": "registry.example/team/trainer:1"},
    "settings": {
        "namespace": "team",
        "claim": "training",
        "root": gettempdir(),
        "spot": "gke",
        "hami": {"gpu_scheduler_policy": "spread"},
        "prices": {"node": 2.0},
    },
    "rows": {
        "resources.instance_type": {"instance_type": "a2-highgpu-1g"},
        "resources.gpu": {"gpu": ("H100:2",)},
        "resources.gpu_memory": {"gpu": ("H100:1",), "gpu_memory": "8GB"},
        "max_cost": {"max_cost": 0.5},
        "inputs.mode": lambda place: {"inputs": {"data": {"url": str(place.data), "mode": "copy"}}},
        "options": {"options": {"kubernetes": {"items": {"0": {"spec": {"template": {"spec": {"priority": 10}}}}}}}},
    },
    "bases": {
        "resources.gpu_memory": {"gpu": ("H100:1",)},
        "max_gpu_hours": {"gpu": ("H100:1",)},
        "inputs.mode": lambda place: {"inputs": {"data": {"url": str(place.data), "mode": "mount"}}},
    },
}
