"""The control plane: SageMaker's operations on training jobs, an account's roles, quotas and capacity, and faults."""

from __future__ import annotations

import base64
import json
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from cloudtrain.engine.docker_api import check_image, connect
from cloudtrain.provider_api.launch_spec import LaunchSpec

from ..base import Platform
from .cloudwatch import CloudWatch
from .instances import GRACE, Bucket, reading
from .life import TrainingJob
from .questions import Questions
from .secrets import Roles
from .strict import broken_rules, model_errors
from .wire import ACCOUNT, Caller, Refusal, Wire

__all__ = ["KEY", "NEW_ACCOUNT", "REGION", "REGISTRY", "SECRET_KEY", "Plane"]

REGION = "eu-west-1"
KEY, SECRET_KEY = "AKIATESTING0TESTING0", "testing"
REGISTRY = f"{ACCOUNT}.dkr.ecr.{REGION}.amazonaws.com"
"""Registry whose repositories are the images of this machine's engine."""
PRINCIPAL = "sagemaker.amazonaws.com"
ACROSS = "Number of instances across all"
RUN_TIME, VOLUME = "Longest run time for a training job", "Size of EBS volume for a training job instance"
NEW_ACCOUNT = {
    RUN_TIME: 432_000,
    "Maximum number of instances per training job": 20,
    "Maximum number of instances per spot training job": 20,
    "Number of instances across all training jobs": 4,
    "Number of instances across all spot training jobs": 4,
    VOLUME: 1024,
}
"""Applied quotas of an account of January 2026, eu-west-1, by their names in Service Quotas. All its machines had 0."""
PLENTY = 1 << 30


class Plane(Platform):
    """An AWS account on loopback: SageMaker, CloudWatch Logs and a role's credentials here, all else at ``moto``.

    ``nodes`` reads what a request starts; the default is `instances.reading`. Faults:

    - ``wire.faults``, ``wire.expired``, `TrainingJob.interrupt` and `TrainingJob.lose`;
    - ``no_capacity``: instance types without capacity, or the regions ``crowded``: on-demand jobs fail after
      ``capacity_seconds``;
    - ``quotas``: instances by type; ``quota``: of any other type; none in the regions ``capped``;
    - ``absent``: regions without machines; ``limits`` of the account: `new_account` sets AWS's first ones;
    - ``creates_a_second``: rate above which CreateTrainingJob is throttled (0: never; AWS has 1);
    - ``unknown``: secondary statuses by job; ``sync_lag``: seconds until checkpoints sync;
    - ``stale_copies`` of peers, ``dead_sync`` of all: see `Agent`; ``grace``: seconds from SIGTERM to SIGKILL.
    """

    def __init__(
        self, folder: Path, *, moto: str, nodes: Callable[[Mapping[str, Any]], LaunchSpec] = reading, runs: bool = True
    ) -> None:
        self.folder, self.moto, self.nodes = folder, moto, nodes
        self.wire = Wire()
        self.wire.keys[KEY] = SECRET_KEY
        self.wire.services |= {"SageMaker": self._answer, "Logs_20140328": self._logs_answer}
        self.roles = Roles(self.wire)
        self.questions = Questions(self)
        self.jobs: dict[tuple[str, str], TrainingJob] = {}
        self.no_capacity: set[str] = set()
        self.crowded: set[str] = set()
        self.capped: set[str] = set()
        self.absent: set[str] = set()
        self.capacity_seconds = 1.0
        self.quotas: dict[str, int] = {}
        self.quota = PLENTY
        self.limits = dict.fromkeys(NEW_ACCOUNT, PLENTY)
        self.creates_a_second = 0.0
        self._created = 0.0
        self.unknown: dict[str, str] = {}
        self.sync_lag, self.stale_copies, self.grace = 0.0, False, GRACE
        self.dead_sync = False
        self._logs: dict[str, CloudWatch] = {}
        self._lock = threading.RLock()
        self._engine: Any = connect() if runs else None
        self.bucket = Bucket(self.moto_client("s3"))
        self.iam = self.moto_client("iam")
        self.url = self.wire.listen()

    def moto_client(self, service: str, region: str = REGION) -> Any:
        """Return a boto3 client of moto."""
        import boto3
        from botocore.config import Config

        return boto3.client(
            service,
            endpoint_url=self.moto,
            region_name=region,
            aws_access_key_id=KEY,
            aws_secret_access_key=SECRET_KEY,
            config=Config(s3={"addressing_style": "path"}, max_pool_connections=32),
        )

    def environ(self) -> dict[str, str]:
        """Return the environment in which AWS's SDKs and tools use this account."""
        return {
            "AWS_ENDPOINT_URL": self.moto,
            "AWS_ENDPOINT_URL_SAGEMAKER": self.url,
            "AWS_ENDPOINT_URL_CLOUDWATCH_LOGS": self.url,
            "AWS_ENDPOINT_URL_SECRETS_MANAGER": self.url,
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_DEFAULT_REGION": REGION,
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": str(self.folder / "no-aws-config"),
            "AWS_SHARED_CREDENTIALS_FILE": str(self.folder / "no-aws-credentials"),
        }

    def new_account(self) -> None:
        """Set the quotas of a new account: it may run no machine."""
        self.quota, self.limits = 0, dict(NEW_ACCOUNT)

    def make_role(self, name: str, principal: str = PRINCIPAL) -> str:
        """Create a role that the service may assume. Return its ARN."""
        trust = {"Effect": "Allow", "Principal": {"Service": principal}, "Action": "sts:AssumeRole"}
        policy = json.dumps({"Version": "2012-10-17", "Statement": [trust]})
        try:
            made = self.iam.create_role(RoleName=name, AssumeRolePolicyDocument=policy)
        except self.iam.exceptions.EntityAlreadyExistsException:
            made = self.iam.get_role(RoleName=name)
        return str(made["Role"]["Arn"])

    def make_bucket(self, name: str) -> str:
        """Create an empty bucket. Return its URL."""
        self.bucket.client.create_bucket(Bucket=name, CreateBucketConfiguration={"LocationConstraint": REGION})
        return f"s3://{name}"

    def logs(self, region: str = REGION) -> CloudWatch:
        """Return CloudWatch Logs of a region."""
        with self._lock:
            return self._logs.setdefault(region, CloudWatch())

    def job(self, name: str, region: str = REGION) -> TrainingJob:
        """Return the job of that name. Raises `KeyError` for an unknown name."""
        return self.jobs[region, name]

    def image(self, uri: str) -> str:
        """Return the name in this machine's engine of an image of a registry."""
        return uri.partition("/")[2] if uri.partition("/")[0].endswith(("amazonaws.com", "amazonaws.com.cn")) else uri

    # ----------------------------------------------------------------------------------------------------- operations

    def _logs_answer(self, operation: str, request: Mapping[str, Any], caller: Caller) -> Mapping[str, Any]:
        return self.logs(caller.region).answer(operation, request, caller)

    def _answer(self, operation: str, request: Mapping[str, Any], caller: Caller) -> Mapping[str, Any]:
        known: dict[str, Callable[[Mapping[str, Any], str], Mapping[str, Any]]] = {
            "CreateTrainingJob": self._create,
            "DescribeTrainingJob": self._describe,
            "ListTrainingJobs": self._list,
            "StopTrainingJob": self._stop,
            "ListTags": self._list_tags,
            "AddTags": self._add_tags,
        }
        if operation not in known or caller.service != "sagemaker":
            raise Refusal("UnknownOperationException", operation)
        if problems := model_errors(operation, request):
            raise _invalid(problems)
        with self._lock:
            if operation == "CreateTrainingJob":
                self._throttle()
            return known[operation](request, caller.region)

    def _throttle(self) -> None:
        now = time.monotonic()
        if self.creates_a_second and now < self._created + 1 / self.creates_a_second:
            raise Refusal("ThrottlingException", "Rate exceeded")
        self._created = now

    def _create(self, request: Mapping[str, Any], region: str) -> Mapping[str, Any]:
        if problems := broken_rules(request):
            raise _invalid(problems)
        name = request["TrainingJobName"]
        if (region, name) in self.jobs:
            text = "Training job names must be unique within an AWS account and region, and a training job with this"
            raise Refusal("ResourceInUse", f"{text} name already exists ({self.jobs[region, name].arn})")
        self._check_role(request["RoleArn"])
        self._check_quota(request, region)
        self._check_image(request["AlgorithmSpecification"]["TrainingImage"])
        self._check_inputs(request, region)
        self.jobs[region, name] = job = TrainingJob(self, request, region=region)
        return {"TrainingJobArn": job.arn}

    def _check_role(self, arn: str) -> None:
        refused = Refusal(
            "ValidationException",
            f"Could not assume role {arn}. Please ensure that the role exists and allows principal '{PRINCIPAL}' to "
            "assume the role.",
        )
        try:
            role = self.iam.get_role(RoleName=arn.rpartition("/")[2])["Role"]
        except self.iam.exceptions.NoSuchEntityException:
            raise refused from None
        trusted = json.dumps(role["AssumeRolePolicyDocument"])
        if role["Arn"] != arn or f'"{PRINCIPAL}"' not in trusted:
            raise refused

    def _check_quota(self, request: Mapping[str, Any], region: str) -> None:
        resources, usage = request["ResourceConfig"], _usage(request)
        for item in resources.get("InstancePreferences", [resources]):
            kind, count = item.get("InstanceType", ""), item.get("InstanceCount", 1)
            if region in self.absent:
                text = f"The requested resource training-job/{kind} is not available in this region"
                raise Refusal("ResourceLimitExceeded", text)
            limit = 0 if region in self.capped else self.quotas.get(kind, self.quota)
            _check_limit(f"{kind} for {usage} usage", limit, "Instances", asked=count)
        count = _instances(request)
        busy = sum(_instances(job.body) for job in self.jobs.values() if not job.over and _usage(job.body) == usage)
        for name, used in ((f"Maximum number of instances per {usage}", 0), (f"{ACROSS} {usage}s", busy)):
            _check_limit(name, self.limits[name], "Instances", asked=count, used=used)
        _check_limit(VOLUME, self.limits[VOLUME], "Gigabytes", asked=resources["VolumeSizeInGB"])
        seconds = request["StoppingCondition"]["MaxRuntimeInSeconds"]
        _check_limit(RUN_TIME, self.limits[RUN_TIME], "Seconds", asked=seconds)

    def _check_image(self, uri: str) -> None:
        if self._engine is not None and not check_image(self._engine, self.image(uri), None):
            raise Refusal("ValidationException", f"Requested image {uri} not found.")

    def _check_inputs(self, request: Mapping[str, Any], region: str) -> None:
        for channel in request.get("InputDataConfig", []):
            source = channel["DataSource"].get("S3DataSource")
            if source is not None and not (self.bucket.exists(source["S3Uri"]) and self.bucket.keys(source["S3Uri"])):
                raise Refusal(
                    "ValidationException",
                    f'No S3 objects found under S3 URL "{source["S3Uri"]}" given in input data source. Please ensure '
                    f"that the bucket exists in the selected region ({region}), that objects exist under that S3 "
                    f'prefix, and that the role "{request["RoleArn"]}" has "s3:ListBucket" permissions on bucket.',
                )

    def _find(self, request: Mapping[str, Any], region: str) -> TrainingJob:
        try:
            return self.job(request["TrainingJobName"], region)
        except KeyError:
            raise Refusal("ValidationException", "Requested resource not found.") from None

    def _describe(self, request: Mapping[str, Any], region: str) -> Mapping[str, Any]:
        job = self._find(request, region)
        answer = job.describe()
        if job.name in self.unknown:
            answer["SecondaryStatus"] = self.unknown[job.name]
        return answer

    def _stop(self, request: Mapping[str, Any], region: str) -> Mapping[str, Any]:
        job = self._find(request, region)
        status = job.record["TrainingJobStatus"]
        if status != "InProgress":
            text = f"The request was rejected because the training job is in status {status}."
            raise Refusal("ValidationException", text)
        job.stop()
        return {}

    def _list(self, request: Mapping[str, Any], region: str) -> Mapping[str, Any]:
        found = [job for (where, _), job in self.jobs.items() if where == region]
        if "NameContains" in request:
            found = [job for job in found if request["NameContains"].lower() in job.name.lower()]
        if "StatusEquals" in request:
            found = [job for job in found if job.record["TrainingJobStatus"] == request["StatusEquals"]]
        keys = {"Name": "TrainingJobName", "CreationTime": "CreationTime", "Status": "TrainingJobStatus"}
        key = keys[request.get("SortBy", "CreationTime")]
        found.sort(key=lambda job: job.record[key], reverse=request.get("SortOrder", "Ascending") == "Descending")
        start = int(base64.b64decode(request["NextToken"])) if "NextToken" in request else 0
        end = start + request.get("MaxResults", 10)
        members = ("TrainingJobName", "TrainingJobArn", "CreationTime", "TrainingEndTime", "LastModifiedTime")
        answer: dict[str, Any] = {
            "TrainingJobSummaries": [
                {
                    **{name: job.record[name] for name in (*members, "TrainingJobStatus") if name in job.record},
                    "SecondaryStatus": job.record["SecondaryStatus"],
                }
                for job in found[start:end]
            ]
        }
        if end < len(found):
            answer["NextToken"] = base64.b64encode(str(end).encode()).decode()
        return answer

    def _by_arn(self, arn: str) -> TrainingJob:
        found = next((job for job in self.jobs.values() if job.arn == arn), None)
        if found is None:
            raise Refusal("ValidationException", f"Requested resource not found: {arn}")
        return found

    def _list_tags(self, request: Mapping[str, Any], region: str) -> Mapping[str, Any]:
        return {"Tags": self._by_arn(request["ResourceArn"]).tags}

    def _add_tags(self, request: Mapping[str, Any], region: str) -> Mapping[str, Any]:
        job = self._by_arn(request["ResourceArn"])
        both = {tag["Key"]: tag for tag in [*job.tags, *request["Tags"]]}
        job.tags = list(both.values())
        return {"Tags": job.tags}


def _usage(request: Mapping[str, Any]) -> str:
    return "spot training job" if request.get("EnableManagedSpotTraining", False) else "training job"


def _instances(request: Mapping[str, Any]) -> int:
    resources = request["ResourceConfig"]
    return int(resources.get("InstancePreferences", [resources])[0].get("InstanceCount", 1))


def _check_limit(name: str, limit: int, unit: str, *, asked: int, used: int = 0) -> None:
    if used + asked > limit:
        raise Refusal(
            "ResourceLimitExceeded",
            f"The account-level service limit '{name}' is {limit} {unit}, with current utilization of {used} {unit} "
            f"and a request delta of {asked} {unit}. Please use AWS Service Quotas to request an increase for this "
            "quota. If AWS Service Quotas is not available, contact AWS support to request an increase for this quota.",
        )


def _invalid(problems: list[str]) -> Refusal:
    count = f"{len(problems)} validation error{'s' if len(problems) > 1 else ''} detected: "
    return Refusal("ValidationException", count + "; ".join(problems))
