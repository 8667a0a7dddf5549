"""Provider ``sagemaker`` and AWS's answers. botocore is real; the tests give the answers."""

from __future__ import annotations

import json
import os
import random
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from typing import Any

import boto3
import botocore.exceptions as raised
import pytest
from boto3.session import Session
from botocore.awsrequest import AWSResponse
from rows import for_each
from worlds.sagemaker.strict import service_model

from cloudtrain.errors import (
    AuthError,
    CapacityError,
    CloudtrainError,
    ConflictError,
    LostContactError,
    NotFoundError,
    PlatformError,
    QuotaError,
    SpecError,
)
from cloudtrain.job.job import Job, run_tag
from cloudtrain.provider_api.protocol import Layout, LogLine, Request
from cloudtrain.providers.sagemaker import SAMPLE, Provider
from cloudtrain.providers.sagemaker.api import CODES, HELP, error_of
from cloudtrain.providers.sagemaker.logs import OVERLAP
from cloudtrain.providers.sagemaker.status import HINTS, category_of, status_of

ARN = "arn:aws:sagemaker:eu-west-1:123456789012:training-job/"
NOT_FOUND = (400, {"__type": "ValidationException", "message": "Requested resource not found."})
Answer = tuple[int, Mapping[str, Any]] | Exception


@dataclass
class Aws:
    """A transport behind botocore: each call goes through its real signing, serialising and parsing."""

    answer: Callable[[str, dict[str, Any]], Answer]
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)

    def send(self, request: Any) -> AWSResponse:
        operation = request.headers["X-Amz-Target"].decode().rpartition(".")[2]
        body = json.loads(request.body or b"{}")
        self.calls.append((operation, body))
        self.keys.append(request.headers["Authorization"].decode())
        answer = self.answer(operation, body)
        if isinstance(answer, Exception):
            raise answer
        status, value = answer
        raw = type("Raw", (), {"stream": lambda self: iter([json.dumps(value, default=str).encode()])})()
        return AWSResponse(request.url, status, {"Content-Type": "application/x-amz-json-1.1"}, raw)

    def names(self) -> list[str]:
        return [name for name, _ in self.calls]


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch) -> Iterator[Aws]:
    """Replace credentials and addresses by those of the test."""
    made = Aws(lambda operation, body: NOT_FOUND)
    for name in ("AWS_PROFILE", "AWS_ENDPOINT_URL", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key-1")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setattr("botocore.httpsession.URLLib3Session.send", lambda self, request: made.send(request))
    return made


def provider(**given: Any) -> Provider:
    return Provider(**{**SAMPLE["settings"], **given})  # type: ignore[dict-item]


def request() -> Request:
    layout = Layout(store="s3://bucket/store", run_id="r", code_digest="c" * 64, runtime_digest="d" * 64)
    return provider().plan(Job.make(entry_point="train.py"), layout)


def describe(name: str, primary: str = "InProgress", secondary: str = "Training", **more: Any) -> dict[str, Any]:
    return {
        "TrainingJobName": name,
        "TrainingJobArn": ARN + name,
        "TrainingJobStatus": primary,
        "SecondaryStatus": secondary,
        "ResourceConfig": {"InstanceType": "ml.m5.xlarge", "InstanceCount": 2},
        **more,
    }


# ------------------------------------------------------------------------------------------------------------- a shell


def test_the_shell_is_a_session_of_ssm(aws: Aws) -> None:
    layout = Layout(store="s3://bucket/store", run_id="r", code_digest="c" * 64, runtime_digest="d" * 64)
    planned = provider().plan(Job.make(entry_point="train.py", interactive=True, instance_count=2), layout)
    assert planned.body["RemoteDebugConfig"] == {"EnableRemoteDebug": True}
    name = planned.body["TrainingJobName"]
    start = ["aws", "ssm", "start-session", "--region", "eu-west-1"]
    start += ["--target", f"sagemaker-training-job:{name}_algo-2"]
    way = provider(profile="dev", region="us-east-1").shell(planned, ARN + name, 1, [], tty=True)
    assert (way.argv, way.env) == (start, {"AWS_PROFILE": "dev"})
    assert provider().shell(planned, name, 1, [], tty=True).argv == start, "a name alone is in the settings' region"
    way = provider().shell(planned, ARN + name, 1, ["nvidia-smi", "-L"], tty=True)
    assert way.argv[: len(start) + 3] == [*start, "--document-name", "AWS-StartInteractiveCommand", "--parameters"]
    (line,) = json.loads(way.argv[-1])["command"]
    words = ["shell", "--run-id", "r", "--node", "1", "--scratch", "", "--", "nvidia-smi", "-L"]
    assert shlex.split(line)[-11:] == ["/opt/ml/input/data/cloudtrain-runtime/cloudtrain.pyz", *words]
    assert aws.calls == []


def test_a_job_without_a_shell_gives_a_hint(aws: Aws) -> None:
    with pytest.raises(SpecError, match="lets no shell in") as caught:
        provider().shell(request(), ARN + "job", 0, [], tty=True)
    assert caught.value.field == "interactive"
    assert "update-training-job --region eu-west-1 --training-job-name job" in caught.value.hint


# ------------------------------------------------------------------------------------------------------ submit and find


def owner(tag: str) -> Callable[[str, dict[str, Any]], Answer]:
    """Return a SageMaker that has the job already, with the tag of another run or this one."""

    def answer(operation: str, body: dict[str, Any]) -> Answer:
        if operation == "CreateTrainingJob":
            return 400, {"__type": "ResourceInUse", "message": "Training job names must be unique"}
        if operation == "DescribeTrainingJob":
            return 200, describe(body["TrainingJobName"])
        assert operation == "ListTags"
        return 200, {"Tags": [{"Key": "cloudtrain:run", "Value": tag}]}

    return answer


def test_exactly_the_planned_request_is_sent(aws: Aws) -> None:
    planned = request()
    aws.answer = lambda operation, body: (200, {"TrainingJobArn": ARN + body["TrainingJobName"]})
    assert provider().submit(planned) == ARN + planned.body["TrainingJobName"]
    assert aws.calls == [("CreateTrainingJob", dict(planned.body))]


def test_a_job_with_our_tag_is_the_same_job(aws: Aws) -> None:
    planned = request()
    aws.answer = owner(run_tag(planned.run))
    native = ARN + planned.body["TrainingJobName"]
    assert provider().submit(planned) == native
    assert provider().find(planned) == native


def test_a_job_with_another_tag_is_a_conflict(aws: Aws) -> None:
    planned = request()
    aws.answer = owner("another")
    with pytest.raises(ConflictError) as caught:
        provider().submit(planned)
    assert caught.value.field == "run_id"
    assert provider().find(planned) is None


def test_find_of_nothing_creates_nothing(aws: Aws) -> None:
    assert provider().find(request()) is None
    assert aws.names() == ["DescribeTrainingJob"]


def test_the_region_of_a_job_is_that_of_its_arn(aws: Aws, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check this for a client with any settings."""
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    aws.answer = lambda operation, body: (200, describe("j"))
    Provider().status(ARN + "j")
    assert "/eu-west-1/sagemaker/" in aws.keys[-1]
    Provider().status("j")
    assert "/us-east-1/sagemaker/" in aws.keys[-1]
    monkeypatch.delenv("AWS_REGION")
    monkeypatch.delenv("AWS_DEFAULT_REGION", raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", os.devnull)
    with pytest.raises(SpecError) as caught:
        Provider().status("j")
    assert str(caught.value) == "sagemaker.region: is not set"
    assert caught.value.hint == "set sagemaker.region, or the variable AWS_REGION"


# --------------------------------------------------------------------------------------------------------------- cancel


def test_cancel(aws: Aws) -> None:
    aws.answer = lambda operation, body: (200, {})
    provider().cancel(ARN + "j")
    assert aws.calls == [("StopTrainingJob", {"TrainingJobName": "j"})]


@pytest.mark.parametrize("primary", ["Completed", "Failed", "Stopped", "Stopping"])
def test_cancel_of_an_ended_job_changes_nothing(aws: Aws, primary: str) -> None:
    refusal = {"__type": "ValidationException", "message": f"the training job is in status {primary}"}
    aws.answer = lambda op, body: (400, refusal) if op == "StopTrainingJob" else (200, describe("j", primary, primary))
    provider().cancel(ARN + "j")


def test_cancel_of_nothing_is_not_found(aws: Aws) -> None:
    with pytest.raises(NotFoundError):
        provider().cancel(ARN + "j")


# --------------------------------------------------------------------------------------------------------------- status


def states() -> list[tuple[str, str]]:
    model = service_model()
    return [
        (primary, secondary)
        for primary in model.shape_for("TrainingJobStatus").enum
        for secondary in (*model.shape_for("SecondaryStatus").enum, "SomethingNew")
        if primary != "Deleting"
    ]


@for_each(("primary", "secondary"), states())
def test_every_status_means_something(primary: str, secondary: str) -> None:
    status = status_of(describe("j", primary, secondary))
    final = primary in ("Completed", "Failed", "Stopped")
    assert status.final == final
    assert bool(status.category) == (status.state in ("failed", "cancelled"))
    assert "\n" not in status.reason


STATES = [
    ("InProgress", "Starting", "pending", "", "Starting"),
    ("InProgress", "Pending", "pending", "", "Pending"),
    ("InProgress", "Downloading", "pending", "", "Downloading"),
    ("InProgress", "Training", "running", "", ""),
    ("InProgress", "Uploading", "running", "", ""),
    ("InProgress", "Interrupted", "pending", "", "Interrupted"),
    ("InProgress", "Restarting", "pending", "", "Restarting"),
    ("InProgress", "SomethingNew", "running", "", ""),
    ("Stopping", "Stopping", "running", "", "stopping"),
    ("Completed", "Completed", "succeeded", "", ""),
    ("Stopped", "Stopped", "cancelled", "cancelled", "it was stopped"),
    ("Stopped", "MaxRuntimeExceeded", "failed", "timeout", "MaxRuntimeExceeded: max_runtime is used up"),
    (
        "Stopped",
        "MaxWaitTimeExceeded",
        "failed",
        "capacity",
        f"MaxWaitTimeExceeded: no machines within max_wait; {HINTS['capacity']}",
    ),
    ("Failed", "Failed", "failed", "infra", f"SageMaker gives no reason; {HINTS['infra']}"),
]


@for_each(("primary", "secondary", "state", "category", "reason"), STATES)
def test_status(primary: str, secondary: str, state: str, category: str, reason: str) -> None:
    status = status_of(describe("j", primary, secondary))
    assert (status.state, status.category, status.reason) == (state, category, reason)


def test_a_pending_job_has_the_words_of_its_newest_step() -> None:
    job = describe("j", "InProgress", "Pending", SecondaryStatusTransitions=transitions("Starting", "Pending"))
    assert status_of(job).reason == "Pending: pending"


@for_each(("primary", "state"), [("Stopped", "failed"), ("Failed", "failed")])
@for_each(("seconds", "waited"), [(3600, True), (3599, False)])
def test_a_wait_that_was_too_long_is_a_lack_of_capacity(primary: str, state: str, seconds: int, waited: bool) -> None:
    """Check all names that SageMaker has for that state: the job never started, and its limit is over."""
    stopping = {"MaxRuntimeInSeconds": 60, "MaxPendingTimeInSeconds": 3600}
    job = describe("j", primary, primary, StoppingCondition=stopping, CreationTime=0.0, LastModifiedTime=seconds)
    status = status_of(job)
    assert (status.category == "capacity") == waited
    if waited:
        why = {
            "Stopped": "no machines within max_wait (MaxPendingTimeInSeconds)",
            "Failed": "SageMaker gives no reason",
        }
        assert (status.state, status.reason) == (state, f"{why[primary]}; {HINTS['capacity']}")
    assert status_of({**job, "TrainingStartTime": 1.0}).category != "capacity"
    pending = transitions("Starting", "Pending", "LaunchingMLInstances", "Stopping")
    assert (status_of({**job, "SecondaryStatusTransitions": pending}).category == "capacity") == waited


@pytest.mark.parametrize("word", ["Downloading", "DownloadingTrainingImage", "Training"])
def test_a_job_that_had_machines_has_not_waited_for_them(word: str) -> None:
    """Check a job stopped by hand hours later, without a TrainingStartTime. It was paid for, so no other may follow."""
    stopping = {"MaxRuntimeInSeconds": 60, "MaxPendingTimeInSeconds": 3600}
    times = {"CreationTime": 0.0, "LastModifiedTime": 7200.0, "StoppingCondition": stopping}
    steps = transitions("Starting", "Pending", word, "Stopping", "Stopped")
    status = status_of(describe("j", "Stopped", "Stopped", SecondaryStatusTransitions=steps, **times))
    assert (status.state, status.category, status.billed_s) == ("cancelled", "cancelled", None)
    failed = status_of(describe("j", "Failed", "Failed", SecondaryStatusTransitions=steps, **times))
    assert failed.category == "infra"
    never = status_of(describe("j", "Stopped", "Stopped", SecondaryStatusTransitions=steps[:2], **times))
    assert (never.category, never.billed_s) == ("capacity", 0.0)


@for_each(
    ("reason", "category"),
    [
        ("AlgorithmError: never started: no python 3.10, exit code: 127", "image"),
        ("AlgorithmError: ValueError: no, exit code: 1", "user_error"),
        ("AlgorithmError: torch.cuda.OutOfMemoryError: CUDA out of memory., exit code: 1", "oom"),
        ("AlgorithmError: , exit code: 137", "oom"),
        ("AlgorithmError: , exit code: 127", "image"),
        ("AlgorithmError: , exit code: 1370", "user_error"),
        ("ClientError: Cannot pull the image: manifest unknown", "image"),
        ("ClientError: Data download failed: AccessDenied (403): not authorized", "auth"),
        ("ClientError: Data download failed: NoSuchBucket", "user_error"),
        ('ClientError: Data download failed:No S3 objects found under S3 URL "s3://b/imagenet/"', "user_error"),
        ('ClientError: Data download failed:No S3 objects found under S3 URL "s3://b/quota/x"', "user_error"),
        ("ClientError: Please use an instance type with more memory, exit code: 137", "oom"),
        ("AlgorithmError: ValueError: the quota, insufficient capacity, internal server error", "user_error"),
        ("CapacityError: Unable to provision requested ML compute capacity. Please retry.", "capacity"),
        ("Insufficient capacity error from EC2 while launching instances", "capacity"),
        ("InternalServerError: We encountered an internal error. Please try again.", "infra"),
        ("ResourceLimitExceeded: The account-level service limit 'x' is 0 Instances", "quota"),
        ("who knows", "infra"),
    ],
)
def test_a_failure_has_a_category_and_a_way_on(reason: str, category: str) -> None:
    assert category_of(reason) == category
    status = status_of(describe("j", "Failed", "Failed", FailureReason=reason))
    assert status.category == category
    assert status.reason.startswith(reason.rstrip("."))
    assert HINTS.get(category, "") in status.reason


# Real messages of SageMaker: S is aws/sagemaker-python-sdk, E amazon-sagemaker-examples, X the guide.
REAL_REASONS = [
    (
        "S#1968, S#57",
        "ClientError: Cannot pull algorithm container. Either the image does not exist or its permissions are "
        "incorrect.",
        "image",
    ),
    (
        "X",
        "ClientError: Cannot find repository: team/trainer in registry ID: 123456789012 Please check if your ECR "
        "repository exists and role arn:aws:iam::123456789012:role/training has proper pull permissions for SageMaker: "
        "ecr:BatchCheckLayerAvailability, ecr:BatchGetImage, ecr:GetDownloadUrlForLayer",
        "image",
    ),
    (
        "X",
        "AlgorithmError: CannotStartContainerError. Please make sure the container can be run with 'docker run <image> "
        "train'. The entrypoint is not properly defined, or missing permissions., exit code: 127",
        "image",
    ),
    (
        "X",
        'ClientError: Data download failed:No S3 objects found under S3 URL "s3://b/none/" given in input data source. '
        "Please ensure that the bucket exists in the selected region (eu-west-1), that objects exist under that S3 "
        'prefix, and that the role "arn:aws:iam::123456789012:role/training" has "s3:ListBucket" permissions on bucket '
        '"b".',
        "user_error",
    ),
    ("X", "ClientError: Artifact upload failed:Error 7: The credentials received has been expired", "infra"),
    ("X", "ClientError: Artifact upload failed:Insufficient disk space", "user_error"),
    ("X", "ClientError: Data download failed:Could not download s3://b/x: insufficient permissions", "auth"),
    ("E#1001", "The requested resource training-job/ml.p2.xlarge is not available in this region", "capacity"),
    (
        "X",
        "CapacityError: Unable to provision requested ML compute capacity. Please retry using a different ML",
        "capacity",
    ),
]


@for_each(("source", "reason", "category"), REAL_REASONS)
def test_real_texts_have_their_category(source: str, reason: str, category: str) -> None:
    status = status_of(describe("j", "Failed", "Failed", FailureReason=reason))
    assert status.category == category, source
    assert HINTS.get(category, "") in status.reason


def test_a_deleted_job_is_not_found(aws: Aws) -> None:
    aws.answer = lambda operation, body: (200, describe("j", "Deleting", "Stopped"))
    with pytest.raises(NotFoundError):
        provider().status(ARN + "j")


def transitions(*words: str) -> list[dict[str, Any]]:
    return [{"Status": word, "StartTime": 100.0 + n, "StatusMessage": word.lower()} for n, word in enumerate(words)]


def test_attempts_are_the_platforms_own_starts() -> None:
    steps = transitions(
        "Starting", "Downloading", "Training", "Interrupted", "Starting", "Downloading", "Training", "Updating",
        "Training", "Starting", "Training",
    )  # fmt: skip
    status = status_of(describe("r-0123456789abcdef-3", SecondaryStatusTransitions=steps))
    assert [(a.number, a.started, a.ended, a.category, a.reason) for a in status.attempts] == [
        ("3.0", 102.0, 103.0, "preempted", "its spot machines were taken back"),
        ("3.1", 106.0, 109.0, "infra", "SageMaker started it again"),
        ("3.2", 110.0, None, "", ""),
    ]
    assert status_of(describe("j")).attempts == ()


@for_each(
    ("partition", "region", "url"),
    [
        ("aws", "eu-west-1", "https://eu-west-1.console.aws.amazon.com/sagemaker/home?region=eu-west-1#/jobs/j"),
        ("aws-cn", "cn-north-1", "https://cn-north-1.console.amazonaws.cn/sagemaker/home?region=cn-north-1#/jobs/j"),
        (
            "aws-us-gov",
            "us-gov-west-1",
            "https://us-gov-west-1.console.amazonaws-us-gov.com/sagemaker/home?region=us-gov-west-1#/jobs/j",
        ),
        ("aws-iso", "us-iso-east-1", ""),
    ],
)
def test_the_console_of_each_partition(partition: str, region: str, url: str) -> None:
    arn = f"arn:{partition}:sagemaker:{region}:123456789012:training-job/j"
    assert status_of({**describe("j"), "TrainingJobArn": arn}).url == url


def test_billed_time() -> None:
    more = {"BillableTimeInSeconds": 900, "TrainingTimeInSeconds": 3600, "EnableManagedSpotTraining": True}
    status = status_of(describe("j", "Completed", "Completed", **more))
    assert (status.billed_s, status.saved) == (1800.0, 0.75)
    assert status_of(describe("j")).billed_s is None
    pending = status_of(describe("j", "InProgress", "Starting", TrainingEndTime=50.0))
    assert (pending.billed_s, pending.finished) == (None, None)
    ended = status_of(describe("j", "Completed", "Completed", TrainingEndTime=50.0))
    assert (ended.instance_type, ended.finished) == ("ml.m5.xlarge", 50.0)


def test_a_list_of_machines_is_billed_for_the_one_that_sagemaker_took() -> None:
    wanted = [{"InstanceType": name, "InstanceCount": 2} for name in ("ml.p5.48xlarge", "ml.p4de.24xlarge")]
    taken = {"SelectedInstanceType": "ml.p4de.24xlarge", "SelectedInstanceCount": 2}
    resources = {"InstancePreferences": wanted, **taken}
    status = status_of(describe("j", "Completed", "Completed", ResourceConfig=resources, BillableTimeInSeconds=900))
    assert (status.instance_type, status.billed_s) == ("ml.p4de.24xlarge", 1800.0)


@pytest.mark.costly
def test_an_estimate_where_a_price_is_known(aws: Aws) -> None:
    aws.answer = lambda operation, body: (200, describe("j", "Completed", "Completed", BillableTimeInSeconds=3600))
    assert provider().status(ARN + "j").cost_usd == 0.5
    assert provider(prices={}).status(ARN + "j").cost_usd is None


# ----------------------------------------------------------------------------------------------------------- exceptions


def refusal(code: str, message: str = "m", status: int = 400) -> raised.ClientError:
    answer = {"Error": {"Code": code, "Message": message}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return raised.ClientError(answer, "CreateTrainingJob")  # type: ignore[arg-type]


REFUSALS: list[tuple[Exception, type[CloudtrainError], str]] = [
    *[(refusal(code), kind, "") for code, kind in CODES.items() if code != "ValidationException"],
    (refusal("ValidationException", "Requested resource not found."), NotFoundError, ""),
    (refusal("ValidationException", "Could not assume role arn:aws:iam::1:role/x."), AuthError, "trust policy"),
    (refusal("ValidationException", "1 validation error detected"), SpecError, "1 validation error"),
    (refusal("AccessDeniedException", "not authorized to perform: iam:PassRole"), AuthError, "trust policy"),
    (refusal("InvalidClientTokenId", "The security token is invalid"), AuthError, HELP["none"]),
    (
        refusal("AccessDeniedException", "u is not authorized to perform: sagemaker:CreateTrainingJob on resource: r"),
        AuthError,
        "docs/sagemaker.md",
    ),
    (
        refusal(
            "ValidationException",
            f"Value 'ml.x' at 'resourceConfig.instanceType' failed to satisfy constraint: [{'ml.p5, ' * 30}]",
        ),
        SpecError,
        "resources.instance_type: CreateTrainingJob: Value 'ml.x' at",
    ),
    (refusal("ResourceLimitExceeded", "The account-level service limit 'ml.p5' is 0"), QuotaError, "service-quotas"),
    (
        refusal(
            "ResourceLimitExceeded",
            "The requested resource training-job/ml.p2.xlarge is not available in this region",
        ),
        CapacityError,
        "another region or type",
    ),
    (refusal("SomethingNew", status=503), LostContactError, ""),
    (refusal("SomethingNew"), PlatformError, ""),
    (raised.NoCredentialsError(), AuthError, f"no AWS credentials; {HELP['none']}"),
    (raised.PartialCredentialsError(provider="env", cred_var="x"), AuthError, ""),
    (raised.NoRegionError(), SpecError, "sagemaker.region: is not set; set sagemaker.region, or the variable AWS_REG"),
    (raised.ProfileNotFound(profile="x"), SpecError, "; to list the profiles, run: aws configure list-profiles"),
    (raised.ParamValidationError(report="Unknown parameter"), SpecError, "--upgrade boto3"),
    (raised.UnauthorizedSSOTokenError(), AuthError, HELP["expired"]),
    (raised.EndpointConnectionError(endpoint_url="https://x"), LostContactError, ""),
    (raised.ConnectTimeoutError(endpoint_url="https://x"), LostContactError, ""),
    (raised.ReadTimeoutError(endpoint_url="https://x"), LostContactError, ""),
    (raised.ConnectionClosedError(endpoint_url="https://x"), LostContactError, ""),
    (raised.BotoCoreError(), PlatformError, ""),
]


@for_each(("exc", "kind", "says"), REFUSALS)
def test_every_exception_of_boto3_becomes_a_cloudtrain_error(
    exc: Exception, kind: type[CloudtrainError], says: str
) -> None:
    ours = error_of(exc)
    assert type(ours) is kind
    assert ours is not None
    assert says in ours.with_hint()
    assert "\n" not in str(ours)


def test_no_exception_of_the_sdk_escapes() -> None:
    for name, kind in vars(raised).items():
        if isinstance(kind, type) and issubclass(kind, raised.BotoCoreError):
            assert error_of(kind.__new__(kind)) is not None, name
    assert error_of(ZeroDivisionError()) is None


@pytest.mark.costly
def test_an_expired_session_is_replaced(aws: Aws, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check this because credentials change during a long wait."""
    expired = (
        400,
        {"__type": "ExpiredTokenException", "message": "The security token is expired"},
    )
    aws.answer = lambda operation, body: (200, describe("j")) if "key-2" in aws.keys[-1] else expired
    client = provider()
    with pytest.raises(AuthError, match="sso login"):
        client.status(ARN + "j")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key-2")
    assert client.status(ARN + "j").state == "running"
    assert len(aws.calls) == 4


def test_nothing_is_tried_again_here(aws: Aws) -> None:
    aws.answer = lambda operation, body: (400, {"__type": "ThrottlingException", "message": "Rate exceeded"})
    with pytest.raises(LostContactError):
        provider().status(ARN + "j")
    aws.answer = lambda operation, body: raised.EndpointConnectionError(endpoint_url="https://x")
    with pytest.raises(LostContactError):
        provider().status(ARN + "j")
    assert len(aws.calls) == 2


def test_no_credentials_are_one_line(aws: Aws, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Session, "get_credentials", lambda self: None)
    monkeypatch.setattr("botocore.session.Session.get_credentials", lambda self: None)
    with pytest.raises(AuthError) as caught:
        provider().submit(request())
    assert caught.value.exit_code == 3
    assert aws.calls == []


def test_a_role_to_assume_is_assumed(monkeypatch: pytest.MonkeyPatch, aws: Aws) -> None:
    real, roles = boto3.Session, []

    class Recording(real):  # type: ignore[misc, valid-type]
        def client(self, name: str, *args: Any, **more: Any) -> Any:
            if name != "sts":
                return super().client(name, *args, **more)

            region = self.region_name

            class Sts:
                def assume_role(self, **arguments: Any) -> Any:
                    roles.append((arguments["RoleArn"], region))
                    keys = {"AccessKeyId": "taken", "SecretAccessKey": "s", "SessionToken": "t"}
                    return {"Credentials": {**keys, "Expiration": datetime.now(timezone.utc) + timedelta(hours=1)}}

            return Sts()

    monkeypatch.setattr(boto3, "Session", Recording)
    aws.answer = lambda operation, body: (200, describe("j"))
    provider(role_to_assume="arn:aws:iam::123456789012:role/other").status(ARN + "j")
    assert roles == [("arn:aws:iam::123456789012:role/other", "eu-west-1")]
    assert "Credential=taken/" in aws.keys[-1]


# ----------------------------------------------------------------------------------------------------------------- logs


@dataclass
class Streams:
    """CloudWatch in pages of ``size``. Events become visible when ``now`` (a count of polls) reaches them."""

    size: int = 50
    now: int = 0
    events: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    most: int = 100
    repeat: bool = False
    throttle: random.Random | None = None

    def put(self, stream: str, when: int, text: str, *, visible: int = 0) -> None:
        event = {"logStreamName": stream, "timestamp": when, "message": text, "eventId": f"{len(self.events):056d}"}
        self.events.append((visible, event))

    def answer(self, operation: str, body: dict[str, Any]) -> Answer:
        names = sorted({e["logStreamName"] for visible, e in self.events if visible <= self.now})
        if operation == "DescribeTrainingJob":
            return 200, describe(body["TrainingJobName"], CreationTime=1000.0)
        if operation == "DescribeLogStreams":
            begin = int(body.get("nextToken", 0))
            token = {"nextToken": str(begin + 50)} if begin + 50 < len(names) else {}
            return 200, {"logStreams": [{"logStreamName": name} for name in names[begin : begin + 50]], **token}
        assert operation == "FilterLogEvents"
        if len(body.get("logStreamNames", names)) > self.most:
            return 400, {"__type": "InvalidParameterException", "message": "too many log streams"}
        if self.throttle is not None and self.throttle.random() < 0.3:
            return 400, {"__type": "ThrottlingException", "message": "Rate exceeded"}
        there = [
            e
            for visible, e in self.events
            if visible <= self.now
            and e["timestamp"] >= body["startTime"]
            and e["logStreamName"] in body.get("logStreamNames", names)
        ]
        there.sort(key=lambda e: (e["timestamp"], e["eventId"]))
        begin = int(body.get("nextToken", 0))
        page = there[max(0, begin - (3 if self.repeat else 0)) : begin + self.size]
        token = {"nextToken": str(begin + self.size)} if begin + self.size < len(there) else {}
        return 200, {"events": page, **token}


def drained(provider: Provider, cursor: Any = None) -> tuple[list[LogLine], Any]:
    """Read every page that exists now. Ask again for throttled ones, as a following client does."""
    lines: list[LogLine] = []
    while True:
        try:
            page = provider.logs(ARN + "j", cursor)
        except LostContactError:
            continue
        lines += page.lines
        cursor = json.loads(json.dumps(page.cursor))
        if not page.more:
            return lines, cursor


@pytest.mark.proof
def test_ten_thousand_lines_each_once(aws: Aws) -> None:
    """Check 64 streams, half of them of a second start: late, out of order, with overlapping pages and throttling."""
    rng = random.Random(6)
    streams = Streams(size=997, repeat=True, throttle=rng)
    aws.answer = streams.answer
    clock = 1_700_000_000_000
    texts = []
    for number in range(10_000):
        node, start = rng.randrange(32), 1 if number < 5_000 else 2
        clock += rng.randrange(0, 60)
        texts.append(f"line {number}")
        late = rng.random() < 0.1
        at = clock - rng.randrange(0, OVERLAP // 2) if late else clock
        streams.put(f"j/algo-{node + 1}-{start}", at, texts[-1], visible=number // 500 + (2 if late else 0))
    found: list[LogLine] = []
    cursor: Any = None
    for streams.now in range(25):
        new, cursor = drained(provider(), cursor)
        found += new
    assert sorted(line.text for line in found) == sorted(texts)
    assert len({line.id for line in found}) == 10_000
    again, same = drained(provider(), cursor)
    assert (again, same) == ([], cursor)
    assert len(json.dumps(cursor)) < 300_000


def test_lines_are_in_order_of_time_and_named_by_node(aws: Aws) -> None:
    streams = Streams()
    aws.answer = streams.answer
    streams.put("j/algo-12-1700000000", 1_002_000, "later\r")
    streams.put("j/algo-1-1700000000", 1_001_000, "sooner\n")
    lines, _ = drained(provider())
    assert [(line.node, line.text, line.time) for line in lines] == [
        ("0", "sooner", 1001.0),
        ("11", "later", 1002.0),
    ]


def test_a_dead_node_is_reported_before_its_peers_begin(aws: Aws) -> None:
    streams = Streams()
    aws.answer = streams.answer
    streams.put("j/algo-3-1", 1_000_000, "exec: no python3")
    page = provider().logs(ARN + "j")
    assert [(line.node, line.text) for line in page.lines] == [("2", "exec: no python3")]


def test_lines_of_jobs_with_a_longer_name_are_left_out(aws: Aws) -> None:
    streams = Streams()
    aws.answer = streams.answer
    streams.put("j2/algo-1-1", 1_000_000, "no")
    streams.put("j/algo-1-1", 1_000_000, "yes")
    assert [line.text for line in drained(provider())[0]] == ["yes"]
    assert aws.calls[1][1]["logStreamNamePrefix"] == "j/"


def test_no_lines_yet_and_no_such_job(aws: Aws) -> None:
    missing = (400, {"__type": "ResourceNotFoundException", "message": "The specified log group does not exist."})
    aws.answer = lambda op, body: missing if op == "FilterLogEvents" else (200, describe("j"))
    page = provider().logs(ARN + "j")
    assert (page.lines, page.more) == ((), False)
    aws.answer = lambda op, body: missing if op == "FilterLogEvents" else NOT_FOUND
    with pytest.raises(NotFoundError):
        provider().logs(ARN + "j")


@pytest.mark.costly
def test_a_stale_token_begins_again(aws: Aws) -> None:
    streams = Streams(size=2)
    for number in range(6):
        streams.put("j/algo-1-1", 1_000_000 + number, str(number))

    def answer(operation: str, body: dict[str, Any]) -> Answer:
        if "nextToken" in body:
            return 400, {"__type": "InvalidParameterException", "message": "The specified nextToken is invalid."}
        return streams.answer(operation, body)

    aws.answer = streams.answer
    first = provider().logs(ARN + "j")
    aws.answer, streams.size = answer, 10
    rest, _ = drained(provider(), first.cursor)
    assert [line.text for line in (*first.lines, *rest)] == list("012345")


def test_a_pass_begins_at_the_job_s_creation(aws: Aws) -> None:
    streams = Streams()
    aws.answer = streams.answer
    _, cursor = drained(provider())
    streams.put("j/algo-1-1", 2_000_000, "x")
    drained(provider(), cursor)
    begins = [body["startTime"] for name, body in aws.calls if name == "FilterLogEvents"]
    assert begins == [1_000_000 - OVERLAP] * 2
    assert aws.names().count("DescribeTrainingJob") == 1


@pytest.mark.costly
def test_more_streams_than_one_call_takes(aws: Aws) -> None:
    """Check a job of 130 nodes: a hundred names at a time, each line once, also of streams that begin later."""
    streams = Streams(size=40, repeat=True)
    aws.answer = streams.answer
    clock, texts = 1_700_000_000_000, []
    for turn in range(4):
        for node in range(130):
            texts.append(f"{turn} of {node}")
            streams.put(f"j/algo-{node + 1}-{turn // 2}", clock + turn * 90_000 + node, texts[-1], visible=turn)
    found: list[LogLine] = []
    cursor: Any = None
    for streams.now in range(6):
        new, cursor = drained(provider(), cursor)
        found += new
    assert sorted(line.text for line in found) == sorted(texts)
    assert "streams" not in cursor, "the next pass must list them again"
    assert max(len(body.get("logStreamNames", ())) for _, body in aws.calls) == 100
    streams.most = 0
    with pytest.raises(SpecError):
        drained(provider(), cursor)


def test_an_empty_page_is_not_the_end(aws: Aws) -> None:
    pages: Sequence[Answer] = (
        (200, {"events": [], "nextToken": "1"}),
        (200, {"events": [{"logStreamName": "j/algo-1-1", "timestamp": 5, "message": "x", "eventId": "1"}]}),
    )
    waiting: list[Answer] = [(200, describe("j")), *pages]
    aws.answer = lambda operation, body: waiting.pop(0)
    assert [line.text for line in drained(provider())[0]] == ["x"]
