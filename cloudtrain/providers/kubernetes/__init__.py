"""Provider ``kubernetes``: indexed Jobs of a cluster of version 1.29 or newer, which needs nothing installed.

Its Request holds the manifest that ``kubectl create -f`` takes: one Job, and a headless Service if there are several
nodes; or one JobSet, which makes both. `request`, `devices` and `validate` make and check it. `api` sends it. `node` is
the node half.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from tempfile import gettempdir
from typing import Any, ClassVar

from ...provider_api.protocol import Need
from .._cloud import ClusterProvider, shared_store

__all__ = ["DIFFERENCES", "NAME", "SAMPLE", "Provider", "Settings"]

NAME = "kubernetes"
STORE = shared_store("/mnt/training/cloudtrain", "a folder on the shared volume, below kubernetes.root")
ROOT = Need(
    example="/mnt/training",
    find="the folder where this machine has the cluster's shared volume mounted",
    stand_in="/missing/shared",
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
ALIASES = ("k8s", "kubectl", "kueue", "hami", "eks", "gke", "aks", "openshift", "volcano")
"""Other words for the platform, for the hint of an unknown provider."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The cluster's settings, in Kubernetes' own words.

    ``kubeconfig`` and ``context`` say which cluster and as whom; empty: kubectl's own, or the pod's that this runs in.
    ``claim`` is the PersistentVolumeClaim of the volume that all nodes and this machine share, ``volume`` any other
    volume of a pod in its place, ``{"nfs": {"server": …, "path": …}}``. ``root`` is its folder here and on the nodes.
    If the volume is a mounted bucket, ``bucket`` is the URL that ``root`` shows, and ``root`` is a folder of the nodes.

    ``kind`` is the object that is created: ``job``, or ``jobset`` on a cluster that has JobSet.

    ``service_account``, ``image_pull_secrets``, ``image_pull_policy``, ``node_selector``, ``tolerations``,
    ``priority_class``, ``runtime_class``, ``scheduler_name``, ``host_network``, ``labels`` and ``annotations`` are
    fields of the pods. ``queue`` is a LocalQueue of Kueue. ``user`` is the uid of the containers (0: the image's own),
    and ``security`` is empty or ``restricted``, as Pod Security calls it.

    ``exclude`` are nodes of the cluster that get no pod, by name.

    ``gpu_resource`` is the cluster's name of a GPU, ``gpu_label`` the nodes' label with its kind, and ``gpu_names``
    that label's values by the name in a job, ``{"H100": ["NVIDIA-H100-NVL"]}``. ``spot`` is the kind of spot nodes:
    gke, eks, karpenter or aks. ``hami`` shares GPUs by HAMi; see `devices`. ``ttl`` and ``pending`` are seconds: how
    long an ended Job stays, and how long a Job may wait in all for nodes and images. ``stop_grace`` is seconds from the
    stop signal to the kill. ``prices`` are US dollars an hour of a node by the job's instance_type, else ``node``.
    """

    kubeconfig: str = field(default="", metadata={"caller": True})
    context: str = field(default="", metadata={"caller": True})
    namespace: str = field(default="default", metadata={"place": True})
    kind: str = "job"
    claim: str = field(default="", metadata={"need": CLAIM})
    volume: dict[str, Any] = field(default_factory=dict)
    root: str = field(default="", metadata={"need": ROOT})
    bucket: str = ""
    service_account: str = ""
    image_pull_secrets: tuple[str, ...] = ()
    image_pull_policy: str = ""
    node_selector: dict[str, Any] = field(default_factory=dict)
    exclude: tuple[str, ...] = ()
    tolerations: tuple[dict[str, Any], ...] = ()
    priority_class: str = ""
    runtime_class: str = ""
    scheduler_name: str = ""
    queue: str = ""
    host_network: bool = False
    labels: dict[str, Any] = field(default_factory=dict)
    annotations: dict[str, Any] = field(default_factory=dict)
    user: int = 0
    security: str = ""
    gpu_resource: str = "nvidia.com/gpu"
    gpu_label: str = "nvidia.com/gpu.product"
    gpu_names: dict[str, Any] = field(default_factory=dict)
    spot: str = ""
    hami: dict[str, Any] = field(default_factory=dict)
    ttl: int = 7 * 86400
    pending: int = 7 * 86400
    stop_grace: int = 30
    prices: dict[str, Any] = field(default_factory=dict)


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
