"""Provider ``modelarts``: training jobs of Huawei Cloud's ModelArts, on GPUs and on Ascend.

Its Request is the body of ``POST /v2/{project_id}/training-jobs``. `request` and `validate` make and check it, `api`
sends it with the signature of `signing`. Nodes see the store as a mounted OBS volume, so no key reaches them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ...provider_api.protocol import Need, Request
from ...validate import url_scheme
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
    """The account's settings, in ModelArts' own words.

    ``region`` and its ``project_id`` are never guessed; the store's bucket is in that region. ``workspace_id`` is of
    ModelArts. ``pool_id`` is a dedicated resource pool; empty: the public one. ``flavors`` maps a GPU of a job to a
    flavor, ``{"Ascend-910B:8": "FLAVOR_ID"}``: ModelArts lists its flavors only to an account. ``priority`` is 1 to 3,
    of jobs in a dedicated pool. ``image_repo_id`` is the SWR enterprise repository of the images. ``ssh_key_pairs`` are
    names of key pairs, which let you into nodes. ``job_retry_num`` is how often ModelArts itself starts a job again
    after a fault of its machines. ``prices`` are US dollars an hour by flavor, for ``max_cost``. ``log_drain`` is
    seconds after a job's end in which its log may grow.
    """

    region: str = field(default="", metadata={"place": True, "need": REGION})
    project_id: str = field(default="", metadata={"need": PROJECT})
    workspace_id: str = "0"
    pool_id: str = ""
    flavors: dict[str, Any] = field(default_factory=dict)
    priority: int = 0
    image_repo_id: str = ""
    ssh_key_pairs: tuple[str, ...] = ()
    job_retry_num: int = 3
    prices: dict[str, Any] = field(default_factory=dict)
    log_drain: int = 15


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
        return bool(self.account.may_have_sent(request))

    def principal(self) -> str | None:
        """Return the access key's id; None for a token."""
        return self.account.principal()  # type: ignore[no-any-return]

    def storage(self, url: str) -> Mapping[str, Any]:
        if url_scheme(url) != "obs":
            return {}
        found: Mapping[str, Any] = self.account.storage()
        return found


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
