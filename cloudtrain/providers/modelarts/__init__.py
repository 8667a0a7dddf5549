"""Provider ``modelarts``: training jobs of Huawei Cloud's ModelArts, on GPUs and on Ascend.

Its Request is the body of ``POST /v2/{project_id}/training-jobs``. `request` and `validate` make and check it, `api`
sends it with the signature of `signing`. Nodes see the store as a mounted OBS volume, so no key reaches them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ...provider_api.protocol import Need, Request, setting
from .._cloud import CloudProvider

__all__ = ["DIFFERENCES", "NAME", "SAMPLE", "Provider", "Settings"]

NAME = "modelarts"
STORE = Need(
    example="obs://my-bucket/cloudtrain",
    find="console, Object Storage Service, Buckets",
    stand_in="obs://missing-bucket",
    shown="obs://<bucket>",
)
REGION = Need(example="cn-north-4", find="the region of the store's bucket", stand_in="cn-missing-1")
PROJECT = Need(
    example="0123456789abcdef0123456789abcdef",
    find="console, My Credentials, Projects: the project ID of the region",
    stand_in="0" * 32,
)
IMAGE = Need(
    example="my-organization/train:1",
    find="console, SoftWare Repository for Container, My Images",
    stand_in="missing-organization/image",
)
ALIASES = ("huawei", "huaweicloud", "huawei-cloud", "ascend", "npu")
"""Other words for the platform, for the hint of an unknown provider."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of the account, in ModelArts' own words."""

    region: str = setting("region of the jobs and of the store's bucket", place=True, need=REGION)
    project_id: str = setting("the 32 hex digits of that region's project", need=PROJECT)
    workspace_id: str = setting("workspace of ModelArts", "0")
    pool_id: str = setting("dedicated resource pool; default: the public one")
    flavors: dict[str, Any] = setting(
        'flavors by GPU or NPU that cloudtrain\'s table lacks: "Ascend-910B:8" = "FLAVOR_ID"', dict
    )
    priority: int = setting("1 to 3, in a dedicated pool", 0, least=0, most=3)
    image_repo_id: str = setting("SWR enterprise repository of the images")
    ssh_key_pairs: tuple[str, ...] = setting("names of key pairs, whose owners may enter interactive jobs", ())
    job_retry_num: int = setting("ModelArts' own restarts after a fault of machines, 0 to 128", 3, least=0, most=128)
    prices: dict[str, Any] = setting("US dollars an hour by flavor", dict)
    log_drain: int = setting("seconds after a job's end in which its log may still grow", 15, least=0, most=3600)


class Provider(CloudProvider):
    """Provider of ModelArts' training jobs; see `cloudtrain.provider_api.protocol.Provider` for the methods."""

    name: ClassVar[str] = NAME
    Settings: ClassVar[type[Any]] = Settings
    schemes: ClassVar[frozenset[str]] = frozenset({"obs", "nfs"})
    retried_by: ClassVar[str] = "client"
    max_wait_by: ClassVar[str] = "client"
    arrival_s: ClassVar[float] = 300.0  # a name does not keep a second job out
    min_poll_s: ClassVar[float] = 2.0
    max_poll_s: ClassVar[float] = 10.0
    needs: ClassVar[Mapping[str, Need]] = {"store": STORE, "image": IMAGE}
    probe_ports: ClassVar[tuple[int, ...]] = (6060, 6061, 29500)
    object_mounts: ClassVar[tuple[str, ...]] = ("/mnt/obs/",)

    def submit(self, request: Request, secrets: Mapping[str, str] | None = None) -> str:
        return str(self.account.create(request, secrets))

    def may_have_sent(self, request: Request) -> bool:
        return bool(self.account.creations.is_lost(request.body["metadata"]["name"]))


DIFFERENCES = (
    "the store is a plain folder: in a mounted bucket a change is a whole new object, and may show late on other nodes",
    "there are no NPUs and no card network, and ModelArts does not watch for faults",
)
"""Differences that a rehearsal does not show."""
SAMPLE: dict[str, Any] = {
    "settings": {
        "region": "cn-north-4",
        "project_id": "0123456789abcdef0123456789abcdef",
        "ssh_key_pairs": ("contract",),
        "prices": {"modelarts.vm.cpu.2u": 0.23},
    },
    "store": "obs://contract-bucket/store",
    "job": {"image": "team/trainer:1"},
    "rows": {
        "image": {"image": "team/trainer:2"},
        "resources.instance_type": {"instance_type": "modelarts.p3.large.public"},
        "resources.gpu": {"gpu": ("V100:8",)},
        "resources.cpus": {"cpus": 8},
        "resources.total_gpus": {"total_gpus": 16},
        "max_cost": {"max_cost": 0.5},
        "options": {"options": {"modelarts": {"spec": {"log_export_config": {"version": "v2"}}}}},
    },
    "bases": {
        "resources.total_gpus": {"gpu": ("V100:8",)},
        "max_gpu_hours": {"gpu": ("V100:1",)},
    },
}
