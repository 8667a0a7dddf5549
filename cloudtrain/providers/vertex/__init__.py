"""Provider ``vertex``: custom jobs of Vertex AI.

Its Request is a CustomJob in JSON, as ``POST …/customJobs`` takes it; its ``jobSpec`` is the input of ``gcloud ai
custom-jobs create --config``. `request` and `validate` make and check it. `api` sends it. `bootstrap`,
`prepare` and `node` are the node half.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ...provider_api.protocol import Need, Request, setting
from .._cloud import CloudProvider

__all__ = ["DIFFERENCES", "NAME", "SAMPLE", "Provider", "Settings"]

NAME = "vertex"
STORE = Need(
    example="gs://my-bucket/cloudtrain",
    find="gcloud storage buckets list",
    stand_in="gs://missing-bucket",
    shown="gs://<bucket>",
)
PROJECT = Need(example="my-project", find="gcloud config get project")
LOCATION = Need(example="europe-west4", find="the region of the store's bucket", stand_in="us-central1")
IMAGE = Need(
    example="europe-west4-docker.pkg.dev/my-project/images/train:1",
    find="with CUDA and PyTorch: Google's own stopped at 2.4",
    stand_in="missing.invalid/image:latest",
)
ALIASES = ("gcp", "google", "vertexai", "vertex-ai", "gcloud")
"""Other words for the platform, for the hint of an unknown provider."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of the project, in Vertex AI's own words."""

    project: str = setting("project of jobs; never guessed", need=PROJECT)
    location: str = setting("region of jobs and of the store's bucket", place=True, need=LOCATION)
    service_account: str = setting("e-mail address of the account that jobs run under; default: Vertex AI's own")
    network: str = setting("peered VPC: projects/NUMBER/global/networks/NAME")
    tensorboard: str = setting("TensorBoard of Vertex AI: projects/P/locations/L/tensorboards/N")
    encryption_key: str = setting("key of Cloud KMS: projects/P/locations/L/keyRings/R/cryptoKeys/K")
    persistent_resource_id: str = setting("persistent resource that runs the jobs")
    strategy: str = setting(
        "way to request machines (default: STANDARD, or FLEX_START for a max_wait on a machine that has it)",
        choices=("STANDARD", "FLEX_START"),
    )
    reservation: str = setting(
        "reservation of machines: projects/P/zones/Z/reservations/R, any (a matching one, else on demand) or none"
    )
    debug_shell: bool = setting("let a shell into the containers", False)
    prices: dict[str, Any] = setting("US dollars an hour by machine: n1-standard-4+T4:1", dict)
    log_drain: int = setting("seconds after a job's end in which its log may still grow", 60, least=0)


class Provider(CloudProvider):
    """Provider of Vertex AI custom jobs; see `cloudtrain.provider_api.protocol.Provider` for the methods."""

    name: ClassVar[str] = NAME
    Settings: ClassVar[type[Any]] = Settings
    schemes: ClassVar[frozenset[str]] = frozenset({"gs", "nfs"})
    retried_by: ClassVar[str] = "client"
    max_wait_by: ClassVar[str] = "client"
    arrival_s: ClassVar[float] = 300.0  # no name tells two creations apart
    min_poll_s: ClassVar[float] = 2.0
    max_poll_s: ClassVar[float] = 10.0
    needs: ClassVar[Mapping[str, Need]] = {"store": STORE, "image": IMAGE}
    keeps_warm: ClassVar[bool] = True
    warm_setting: ClassVar[str] = "persistent_resource_id"
    warm_hint: ClassVar[str] = (
        "set vertex.persistent_resource_id to a persistent resource, whose machines wait until you delete it; "
        "to make one, run: gcloud ai persistent-resources create --persistent-resource-id=ID --region=LOCATION "
        "--resource-pool-spec=replica-count=N,machine-type=TYPE"
    )
    probe_ports: ClassVar[tuple[int, ...]] = (2222, 2223, 3333, 6000, 29500)
    """Ports that ``doctor --job`` tries: some that the chief's Service is known to forward, and two that it may not."""

    object_mounts: ClassVar[tuple[str, ...]] = (
        *("/gcs/", "AIP_MODEL_DIR", "AIP_CHECKPOINT_DIR", "AIP_TENSORBOARD_LOG_DIR"),
    )

    def may_have_sent(self, request: Request) -> bool:
        return bool(self.account.creations.is_lost(request.body["displayName"]))


DIFFERENCES = (
    "there is no service account, and no metadata server",
    "/gcs is a plain folder: on Cloud Storage, an append writes the whole object again, and a rename copies it",
)
"""Differences that a rehearsal does not show."""
SAMPLE = {
    "settings": {
        "project": "contract",
        "location": "europe-west4",
        "service_account": "trainer@contract.iam.gserviceaccount.com",
        "prices": {"n1-standard-4": 0.25, "n1-standard-4+T4:1": 0.75},
    },
    "store": "gs://contract-bucket/store",
    "job": {"image": "registry.example/team/trainer:1"},
    "rows": {
        "resources.instance_type": {"instance_type": "n1-highmem-8"},
        "resources.gpu": {"gpu": ("T4:4",)},
        "resources.cpus": {"cpus": 8},
        "max_cost": {"max_cost": 0.5},
        "options": {"options": {"vertex": {"jobSpec": {"protectedArtifactLocationId": "europe-west4"}}}},
    },
    "bases": {"max_wait": {"gpu": ("L4:1",)}},
    "secret": "gcp:projects/contract/secrets/contract/versions/1",
}
