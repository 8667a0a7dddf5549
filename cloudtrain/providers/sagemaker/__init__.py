"""Provider ``sagemaker``: training jobs of Amazon SageMaker AI, over boto3 alone.

Its Request is the body of CreateTrainingJob, as boto3 and ``aws sagemaker create-training-job --cli-input-json`` take
it. `plan` and `preflight` make and check it. `account` sends it. `states` and `pages` read the answers of SageMaker and
CloudWatch. `simulation` predicts what SageMaker would start. `node` is the node half.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from ...provider_api import catalog
from ...provider_api.launch_spec import LaunchSpec
from ...provider_api.node import NodeEnvironment
from ...provider_api.protocol import Layout, LogPage, Need, ProviderExtras, Request, Status
from ...validate import url_scheme
from .names import IGNORED, UPLOADED, UPLOADING

if TYPE_CHECKING:
    from ...job.job import Job
    from ...provider_api.checks import Check
    from .api import Account

__all__ = ["DIFFERENCES", "SAMPLE", "Provider", "Settings"]

CALLER = {"caller": True}
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
    """The account's settings, in SageMaker's own words.

    ``region`` defaults to that of ``profile``, ``AWS_REGION``, ``AWS_DEFAULT_REGION`` or the default profile.
    ``profile`` holds this machine's credentials. ``role_to_assume`` is an ARN that this machine assumes first. Both
    hold for the store too, and neither is recorded. ``role`` is the ARN that jobs run as. ``framework_version`` chooses
    AWS's PyTorch image for a job without an image. ``debug_shell`` lets ``aws ssm start-session`` into the containers.
    ``prices`` are US dollars an hour by instance type, for ``max_cost`` and estimates.
    """

    region: str = field(default="", metadata={"place": True, "need": REGION})
    profile: str = field(default="", metadata=CALLER)
    role: str = field(default="", metadata={"need": ROLE})
    role_to_assume: str = field(default="", metadata=CALLER)
    subnets: tuple[str, ...] = ()
    security_group_ids: tuple[str, ...] = ()
    volume_kms_key: str = ""
    output_kms_key: str = ""
    keep_alive_period: int = 0
    encrypt_inter_container_traffic: bool = False
    enable_network_isolation: bool = False
    framework_version: str = ""
    debug_shell: bool = False
    prices: dict[str, Any] = field(default_factory=dict)


class Provider(ProviderExtras):
    """Provider of SageMaker training jobs; see `cloudtrain.provider_api.protocol.Provider` for the methods."""

    name: ClassVar[str] = "sagemaker"
    Settings: ClassVar[type[Any]] = Settings
    schemes: ClassVar[frozenset[str]] = frozenset({"s3", "fsx", "efs"})
    retried_by: ClassVar[str] = "client"
    max_wait_by: ClassVar[str] = "platform"
    min_poll_s: ClassVar[float] = 1.0
    max_poll_s: ClassVar[float] = 5.0
    sync_marks: ClassVar[tuple[str, ...]] = (UPLOADING, UPLOADED, IGNORED)
    needs: ClassVar[Mapping[str, Need]] = {"store": STORE}

    def __init__(self, **settings: Any) -> None:
        from .request import checked

        # Recorded with the run: every client that attaches asks the same region.
        self.settings: Settings = checked(Settings(**settings))
        self._account: Account | None = None

    def plan(self, job: Job, layout: Layout, attempt: int = 0, choice: int = 0) -> Request:
        from .request import plan

        return plan(self.settings, job, layout, attempt=attempt, choice=choice)

    @property
    def account(self) -> Account:
        """Return the account, created when first needed."""
        if self._account is None:
            from .api import Account

            self._account = Account(self.settings)
        return self._account

    def submit(self, request: Request, secrets: Mapping[str, str] | None = None) -> str:
        return self.account.create(request)

    def find(self, request: Request) -> str | None:
        return self.account.find(request)

    def status(self, native_id: str) -> Status:
        from .status import status_of

        status = status_of(self.account.describe(native_id))
        price = catalog.price(self.name, status.instance_type, self.settings.prices)
        if status.billed_s == 0:
            return dataclasses.replace(status, cost_usd=0.0)
        if status.billed_s is None or price is None or not price.own:
            return status
        return dataclasses.replace(status, cost_usd=round(status.billed_s / 3600 * price.usd_per_hour, 4))

    def logs(self, native_id: str, cursor: Any = None) -> LogPage:
        from .logs import page

        return page(self.account, native_id, cursor)

    def cancel(self, native_id: str) -> None:
        self.account.stop(native_id)

    def principal(self) -> str:
        """Return the ARN of the calling user or role session."""
        return str(self.account.call("sts", "get_caller_identity")["Arn"])

    def storage(self, url: str) -> Mapping[str, Any]:
        from .caller import storage

        return storage(self.settings) if url_scheme(url) == "s3" else {}

    def checks(self, store: str, request: Request | None) -> Iterator[Check]:
        """Yield the checks of `doctor`."""
        from .doctor import checks

        yield from checks(self.account, store, request)

    @staticmethod
    def node_environment(environ: Mapping[str, str], argv: Mapping[str, str]) -> NodeEnvironment:
        from .node import node_environment

        return node_environment(environ, argv)

    def launch_spec(self, request: Request) -> LaunchSpec:
        from .launch_spec import launch_spec

        return launch_spec(request, region=self.settings.region)


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
