"""Provider ``sagemaker``: training jobs of Amazon SageMaker AI, over boto3 alone.

Its Request is the body of CreateTrainingJob, as boto3 and ``aws sagemaker create-training-job --cli-input-json`` take
it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ...provider_api.protocol import Need, Request, setting
from .._cloud import CloudProvider

__all__ = ["DIFFERENCES", "MARK", "NAME", "SAMPLE", "Provider", "Settings"]

NAME = "sagemaker"
MARK = ".sagemaker"
"""The syncing agent puts ``x.sagemaker-uploading`` and ``x.sagemaker-uploaded`` next to a file ``x``. It skips
``x.sagemaker-ignore`` (aws/sagemaker-xgboost-container, ``checkpointing.py``)."""
UPLOADING, UPLOADED, IGNORED = (f"{MARK}-{word}" for word in ("uploading", "uploaded", "ignore"))
STORE = Need(example="s3://BUCKET/PREFIX", find="aws s3 ls", stand_in="s3://missing-bucket", shown="s3://<bucket>")
REGION = Need(example="eu-west-1", find="the region of the store's bucket", stand_in="us-east-1")
ROLE = Need(
    example="arn:aws:iam::123456789012:role/ROLE",
    find="aws iam list-roles --query Roles[].Arn",
    stand_in="arn:aws:iam::000000000000:role/missing",
)
ALIASES = ("aws", "amazon", "sm", "amazonsagemaker")
"""Other words for the platform, for the hint of an unknown provider."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of the account, in SageMaker's own words."""

    region: str = setting(
        "region of jobs; default: that of profile, AWS_REGION, AWS_DEFAULT_REGION or the default profile, in order",
        place=True,
        need=REGION,
    )
    profile: str = setting(
        "profile of ~/.aws for calls, and for an S3 store of this provider's runs; not recorded; "
        "default: boto3's own search for credentials",
        caller=True,
    )
    role: str = setting("ARN of the role that jobs run under", need=ROLE)
    role_to_assume: str = setting(
        "ARN of a role that the caller assumes first (it needs sts:AssumeRole on it); not recorded", caller=True
    )
    subnets: tuple[str, ...] = setting("subnets of the VPC that nodes join; with security_group_ids", ())
    security_group_ids: tuple[str, ...] = setting("security groups of the nodes in that VPC", ())
    volume_kms_key: str = setting("key of the nodes' volumes")
    output_kms_key: str = setting("key of SageMaker's own uploads")
    keep_alive_period: int = setting("seconds for which machines stay warm for the next job, and are billed", 0)
    encrypt_inter_container_traffic: bool = setting("encrypt the traffic between nodes", False)
    enable_network_isolation: bool = setting("no network but the peers: no secrets, no pip", False)
    framework_version: str = setting(
        "PyTorch version of AWS's image, for a job without an image: 2.13; default: the newest that serves the GPU"
    )
    debug_shell: bool = setting("let aws ssm start-session into the containers", False)
    prices: dict[str, Any] = setting("US dollars an hour by instance type", dict)


class Provider(CloudProvider):
    """Provider of SageMaker training jobs; see `cloudtrain.provider_api.protocol.Provider` for the methods."""

    name: ClassVar[str] = NAME
    Settings: ClassVar[type[Any]] = Settings
    schemes: ClassVar[frozenset[str]] = frozenset({"s3", "fsx", "efs"})
    retried_by: ClassVar[str] = "client"
    max_wait_by: ClassVar[str] = "platform"
    min_poll_s: ClassVar[float] = 1.0
    max_poll_s: ClassVar[float] = 5.0
    sync_marks: ClassVar[tuple[str, ...]] = (UPLOADING, UPLOADED, IGNORED)
    needs: ClassVar[Mapping[str, Need]] = {"store": STORE}
    keeps_warm: ClassVar[bool] = True

    def warm_seconds(self, request: Request) -> int:
        return int(request.body["ResourceConfig"].get("KeepAlivePeriodInSeconds", 0))


DIFFERENCES = (
    "how late S3 has what nodes write to their checkpoint folder is a guess, of 2 s; network isolation is left out",
    "there is no role: nothing of AWS can be reached as it",
)
"""Differences that a rehearsal does not show."""
_ROLE = "arn:aws:iam::123456789012:role/training"
_ECR = "123456789012.dkr.ecr.eu-west-1.amazonaws.com"
SAMPLE = {
    "settings": {"region": "eu-west-1", "role": _ROLE, "prices": {"ml.m5.xlarge": 0.25, "ml.g5.xlarge": 1.5}},
    "store": "s3://contract-bucket/store",
    "job": {"image": f"{_ECR}/team/trainer:1"},
    "rows": {
        "image": {"image": f"{_ECR}/team/trainer:2"},
        "resources.instance_type": {"instance_type": "ml.c5.xlarge"},
        "resources.gpu": {"gpu": ("A10G:4",)},
        "resources.cpus": {"cpus": 8},
        "max_cost": {"max_cost": 0.5},
        "options": {
            "options": {
                "sagemaker": {"AlgorithmSpecification": {"MetricDefinitions": [{"Name": "loss", "Regex": "loss=(.*)"}]}}
            }
        },
    },
    "bases": {"max_wait": {"instance_type": "ml.g5.xlarge"}},
    "secret": "aws:arn:aws:secretsmanager:eu-west-1:123456789012:secret:contract-AbCdEf",
}
