"""The loopback SageMaker itself, with boto3 and requests by hand, independent of cloudtrain's provider."""

from __future__ import annotations

import copy
import json
import textwrap
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError
from botocore.validate import ParamValidator
from containers import left
from jobs import Jobs
from worlds.sagemaker.cloudwatch import CloudWatch
from worlds.sagemaker.instances import differences, reading
from worlds.sagemaker.life import LOG_GROUP
from worlds.sagemaker.plane import KEY, REGION, REGISTRY, Plane
from worlds.sagemaker.strict import broken_rules, model_errors, service_model
from worlds.sagemaker.wire import Caller, Fault, Refusal

ROLE = "arn:aws:iam::123456789012:role/TrainingRole"
IMAGE = f"{REGISTRY}/cloudtrain-test:py313"
SEE = """
import glob, json, os, signal, sys, time
config = json.load(open("/opt/ml/input/config/resourceconfig.json"))
me = config["current_host"]
word = open("/opt/ml/input/data/code/word.txt").read()
def sigterm(*_):
    open("/opt/ml/cloudtrain/live/sigterm-" + me, "w").write("sigterm")
    print("sigterm", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, sigterm)
print(json.dumps({"me": me, "hosts": config["hosts"], "word": word, "env": os.environ.get("WORD"),
                  "engine": [k for k in os.environ if k.startswith("CLOUDTRAIN_")],
                  "job": os.environ["TRAINING_JOB_NAME"],
                  "role": "AWS_CONTAINER_CREDENTIALS_FULL_URI" in os.environ,
                  "live": sorted(os.listdir("/opt/ml/cloudtrain/live"))}), flush=True)
"""
HOLD = SEE + "time.sleep(100)\n"
DONE = (
    SEE
    + """
open("/opt/ml/cloudtrain/live/checkpoint-" + me, "w").write(me)
open("/opt/ml/model/" + me + ".bin", "w").write(me)
"""
)
FAIL = (
    SEE
    + """
if me == "algo-2":
    open("/opt/ml/output/failure", "w").write("ValueError: the second host fails")
    sys.exit(3)
"""
)
ONCE = (
    SEE
    + """
if not os.path.exists("/opt/ml/cloudtrain/live/seen-" + me):
    open("/opt/ml/cloudtrain/live/seen-" + me, "w").write("x")
    time.sleep(100)
"""
)


def body(name: str, bucket: str, script: str = "", **more: Any) -> dict[str, Any]:
    """Return a request that the service accepts. ``more`` replaces members; None removes one."""
    channel = {"S3DataSource": {"S3DataType": "S3Prefix", "S3Uri": f"{bucket}/code/"}}
    made: dict[str, Any] = {
        "TrainingJobName": name,
        "RoleArn": ROLE,
        "AlgorithmSpecification": {
            "TrainingImage": IMAGE,
            "TrainingInputMode": "File",
            "ContainerEntrypoint": ["/bin/sh", "-c", 'exec python3 "$@"', "x"],
            "ContainerArguments": [f"/opt/ml/input/data/code/{script}"],
        },
        "InputDataConfig": [{"ChannelName": "code", "DataSource": channel}],
        "OutputDataConfig": {"S3OutputPath": f"{bucket}/native/"},
        "ResourceConfig": {"InstanceType": "ml.m5.xlarge", "InstanceCount": 2, "VolumeSizeInGB": 30},
        "StoppingCondition": {"MaxRuntimeInSeconds": 600},
        "CheckpointConfig": {"S3Uri": f"{bucket}/{name}/live/", "LocalPath": "/opt/ml/cloudtrain/live"},
        "Environment": {"WORD": "of the environment"},
        **more,
    }
    return {key: value for key, value in made.items() if value is not None}


def spot(seconds: int = 600) -> dict[str, Any]:
    stopping = {"MaxRuntimeInSeconds": 600, "MaxWaitTimeInSeconds": seconds}
    return {"EnableManagedSpotTraining": True, "StoppingCondition": stopping}


# ------------------------------------------------------------------------------------------------------------- refusals


def changed(path: str, value: Any) -> dict[str, Any]:
    made = copy.deepcopy(body("job", "s3://bucket", "x.py"))
    at: Any = made
    *before, last = path.split(".")
    for key in before:
        at = at[int(key)] if key.isdigit() else at.setdefault(key, {})
    at[last] = value
    return made


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("TrainingJobName", "bad_name", "'trainingJobName' failed to satisfy constraint: Member must satisfy regular"),
        ("TrainingJobName", "a" * 64, "less than or equal to 63"),
        ("TrainingJobName", "-a", "regular expression"),
        ("RoleArn", "arn:aws:iam::1:role/TrainingRole", "'roleArn'"),
        ("Environment", {"A": "x" * 513}, "'environment.A.value'"),
        ("Environment", {"1A": "x"}, "'environment.1A.key'"),
        ("HyperParameters", {"lr": "1" * 2501}, "less than or equal to 2500"),
        ("HyperParameters", {"lr": "1\n2"}, "regular expression"),
        ("AlgorithmSpecification.TrainingInputMode", "Copy", "enum value set: [Pipe, File, FastFile]"),
        ("AlgorithmSpecification.ContainerEntrypoint", [], "ContainerEntrypoint"),
        ("AlgorithmSpecification.ContainerArguments", ["x" * 257], "containerArguments.1.member"),
        ("AlgorithmSpecification.TrainingImage", "docker.io/team/image:1", "not in Amazon ECR"),
        ("AlgorithmSpecification.TrainingImageConfig", {"TrainingRepositoryAccessMode": "Vpc"}, "needs a VpcConfig"),
        ("AlgorithmSpecification.AlgorithmName", "both", "not both"),
        ("AlgorithmSpecification", None, "Invalid type for parameter AlgorithmSpecification"),
        ("ResourceConfig.InstanceType", "ml.nosuch.xlarge", "enum value set"),
        ("ResourceConfig.InstanceCount", 0, "InstanceCount must be at least 1"),
        ("ResourceConfig.VolumeSizeInGB", 0, "VolumeSizeInGB must be at least 1"),
        ("ResourceConfig.KeepAlivePeriodInSeconds", 21601, "less than or equal to 21600"),
        ("ResourceConfig.InstancePreferences", [{"InstanceType": "ml.g5.xlarge", "InstanceCount": 1}], "exactly one"),
        ("ResourceConfig.SelectedInstanceType", "ml.g5.xlarge", "read-only"),
        ("StoppingCondition.MaxRuntimeInSeconds", 28 * 86400 + 1, "MaxRuntimeInSeconds"),
        ("StoppingCondition.MaxWaitTimeInSeconds", 700, "only supported when EnableManagedSpotTraining"),
        ("StoppingCondition.MaxPendingTimeInSeconds", 60, "MaxPendingTimeInSeconds"),
        ("EnableManagedSpotTraining", True, "must be present and be greater"),
        ("InputDataConfig", [], "InputDataConfig"),
        ("InputDataConfig.0.ChannelName", "two words", "'inputDataConfig.1.member.channelName'"),
        ("CheckpointConfig.LocalPath", "/opt/ml/model/x", "cannot be in /opt/ml/model"),
        ("RetryStrategy", {"MaximumRetryAttempts": 31}, "less than or equal to 30"),
        ("Tags", [{"Key": "a", "Value": "x"}, {"Key": "a", "Value": "y"}], "Duplicate tag key"),
        ("Tags", [{"Key": "aws:a", "Value": "x"}], "reserved"),
        ("Tags", [{"Key": "a", "Value": "ä!"}], "'tags.1.member.value'"),
        ("VpcConfig", {"Subnets": [], "SecurityGroupIds": ["sg-1"]}, "Subnets"),
        ("NoSuchMember", 1, "Unknown parameter"),
    ],
)  # fmt: skip
def test_the_service_refuses(path: str, value: Any, words: str) -> None:
    request = changed(path, value)
    problems = model_errors("CreateTrainingJob", request) or broken_rules(request)
    assert words in "; ".join(problems)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"AlgorithmSpecification": None}, "AlgorithmSpecification is required"),
        ({"ResourceConfig": None}, "ResourceConfig is required"),
        ({"StoppingCondition": None}, "StoppingCondition is required"),
        (spot(599), "must be present and be greater"),
        (
            {**spot(), "ResourceConfig": {"InstancePreferences": [{"InstanceType": "ml.g5.xlarge"}]}},
            "InstancePreferences is not supported with EnableManagedSpotTraining",
        ),
        (
            {"ResourceConfig": {"InstanceType": "ml.p4d.24xlarge", "InstanceCount": 1, "VolumeKmsKeyId": "k"}},
            "VolumeKmsKeyId is not supported for ml.p4d.24xlarge",
        ),
    ],
)  # fmt: skip
def test_rules_that_are_in_no_model(more: Mapping[str, Any], words: str) -> None:
    request = body("job", "s3://bucket", "x.py", **more)
    assert model_errors("CreateTrainingJob", request) == []
    assert words in "; ".join(broken_rules(request))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("Tags", [{"Key": "ключ", "Value": "two words ü/:=+-@_"}]),
        ("AlgorithmSpecification.TrainingImage", f"{REGISTRY}/a/b@sha256:{'0' * 64}"),
        ("ResourceConfig", {"InstancePreferences": [{"InstanceType": "ml.g5.xlarge", "InstanceCount": 1}]}),
        ("ResourceConfig.InstanceType", "ml.p5.48xlarge"),
        ("Environment", {"A": "two\nlines"}),
    ],
)
def test_the_service_accepts(path: str, value: Any) -> None:
    request = changed(path, value)
    assert model_errors("CreateTrainingJob", request) + broken_rules(request) == []


def test_a_channel_has_one_name_and_one_source() -> None:
    request = body("job", "s3://bucket", "x.py")
    request["InputDataConfig"] *= 2
    files = {"FileSystemId": "fs-01234567", "FileSystemType": "EFS", "FileSystemAccessMode": "ro", "DirectoryPath": "/"}
    request["InputDataConfig"].append({"ChannelName": "files", "DataSource": {"FileSystemDataSource": files}})
    assert model_errors("CreateTrainingJob", request) == []
    assert broken_rules(request) == [
        "Duplicate channel name: code",
        "Channel files is on a file system, which needs a VpcConfig",
    ]


# ------------------------------------------------------------------------------------------------------------- readings


def test_a_reading_follows_the_pages() -> None:
    request = body("job", "s3://bucket", "x.py")
    request["ResourceConfig"]["InstanceCount"] = 11
    nodes = reading(request).nodes
    assert [node.hostname for node in nodes] == [f"algo-{n}" for n in range(1, 12)]
    config = json.loads(nodes[1].files["/opt/ml/input/config/resourceconfig.json"])
    assert config["hosts"][:4] == ["algo-1", "algo-10", "algo-11", "algo-2"]
    assert config["current_host"] == "algo-2"


def test_differences_finds_every_part() -> None:
    request = body("job", "s3://bucket", "x.py")
    ours = reading(request)
    assert differences(ours, reading(copy.deepcopy(request))) == []
    for path, value in (
        ("AlgorithmSpecification.TrainingImage", "other"),
        ("AlgorithmSpecification.ContainerEntrypoint", ["other"]),
        ("AlgorithmSpecification.ContainerArguments", ["other"]),
        ("ResourceConfig.InstanceCount", 3),
        ("ResourceConfig.InstanceType", "ml.m5.large"),
        ("StoppingCondition.MaxRuntimeInSeconds", 1),
        ("CheckpointConfig.LocalPath", "/elsewhere"),
        ("InputDataConfig.0.InputMode", "FastFile"),
        ("Environment", {}),
        ("HyperParameters", {"lr": "1"}),
    ):
        other = changed(path, value)
        assert differences(ours, reading(other)), path


# -------------------------------------------------------------------------------------------------------------- logs


def collected(logs: CloudWatch, prefix: str) -> list[str]:
    """Return event ids as a reader with a paginator gets them."""
    found: list[str] = []
    request: dict[str, Any] = {"logGroupName": LOG_GROUP, "logStreamNamePrefix": prefix}
    while True:
        page = logs.answer("FilterLogEvents", request, Caller("k", REGION, "logs"))
        found += [event["eventId"] for event in page["events"]]
        if "nextToken" not in page:
            return found
        request["nextToken"] = page["nextToken"]


def test_log_events_come_by_time_and_by_prefix_in_pages() -> None:
    logs = CloudWatch()
    for number in range(50):
        logs.put(LOG_GROUP, f"job/algo-{number % 3}-1", [(1000 - number, f"line {number}")])
        logs.put(LOG_GROUP, "job-2/algo-1-1", [(1000 - number, "another's")])
    all_ids = collected(logs, "job/")
    assert len(set(all_ids)) == 50
    assert all_ids == sorted(all_ids)
    logs.page_events = 7
    assert collected(logs, "job/") == all_ids
    logs.empty_every = 2
    assert collected(logs, "job/") == all_ids
    logs.repeats = 3
    again = collected(logs, "job/")
    assert sorted(set(again)) == all_ids
    assert len(again) > len(all_ids)


def test_log_events_come_late() -> None:
    logs = CloudWatch()
    logs.delay = lambda stream, message: 0.3 if message == "late" else 0.0
    logs.put(LOG_GROUP, "job/algo-1-1", [(1, "late"), (2, "early")])
    assert len(collected(logs, "job/")) == 1
    time.sleep(0.35)
    assert len(collected(logs, "job/")) == 2


def test_logs_refuse_like_the_service() -> None:
    logs, caller = CloudWatch(), Caller("k", REGION, "logs")
    with pytest.raises(Refusal, match="ResourceNotFoundException"):
        logs.answer("FilterLogEvents", {"logGroupName": LOG_GROUP}, caller)
    logs.put(LOG_GROUP, "job/algo-1-1", [(1, "x")])
    for wrong in (
        {"limit": 10_001},
        {"logStreamNames": ["job/algo-1-1"] * 101},
        {"logStreamNames": ["a"], "logStreamNamePrefix": "a"},
        {"nextToken": "x"},
    ):
        with pytest.raises(Refusal, match="InvalidParameterException"):
            logs.answer("FilterLogEvents", {"logGroupName": LOG_GROUP, **wrong}, caller)


# ------------------------------------------------------------------------------------------------------- over the wire


@pytest.fixture
def plane(s3_environment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Plane]:
    """Give a control plane that starts jobs only where a test uses the engine too."""
    with Plane(tmp_path / "aws", moto=s3_environment, runs=False) as made:
        for name, value in made.environ().items():
            monkeypatch.setenv(name, value)
        made.make_role("TrainingRole")
        yield made


@pytest.fixture
def bucket(plane: Plane) -> str:
    url = plane.make_bucket(f"b-{uuid.uuid4().hex[:12]}")
    for name, text in {"see": SEE, "hold": HOLD, "done": DONE, "fail": FAIL, "once": ONCE}.items():
        plane.bucket.put(f"{url}/code/{name}.py", text.encode())
    plane.bucket.put(f"{url}/code/word.txt", b"of the channel")
    return url


def client(service: str = "sagemaker", **more: Any) -> Any:
    return boto3.client(service, config=Config(retries={"total_max_attempts": 1}), **more)


def code(call: Callable[[], Any]) -> tuple[str, str]:
    """Return (code, message) of the error of a call."""
    with pytest.raises(ClientError) as caught:
        call()
    error = caught.value.response["Error"]
    return error["Code"], error["Message"]


@pytest.mark.remote
def test_unknown_jobs_and_operations(plane: Plane) -> None:
    sm = client()
    assert code(lambda: sm.describe_training_job(TrainingJobName="none")) == (
        "ValidationException",
        "Requested resource not found.",
    )
    assert code(lambda: sm.stop_training_job(TrainingJobName="none"))[0] == "ValidationException"
    assert code(lambda: sm.list_endpoints())[0] == "UnknownOperationException"
    assert sm.list_training_jobs()["TrainingJobSummaries"] == []


@pytest.mark.remote
def test_a_missing_part_of_the_account_is_refused_and_makes_no_job(plane: Plane, bucket: str) -> None:
    sm = client()
    other = plane.make_role("OtherRole", principal="ec2.amazonaws.com")
    empty = {"S3DataSource": {"S3DataType": "S3Prefix", "S3Uri": f"{bucket}/nothing/"}}
    for more, error, words in (
        ({"RoleArn": ROLE.replace("TrainingRole", "None")}, "ValidationException", "Could not assume role"),
        ({"RoleArn": other}, "ValidationException", "Could not assume role"),
        (
            {"InputDataConfig": [{"ChannelName": "x", "DataSource": empty}]},
            "ValidationException",
            "No S3 objects found under S3 URL",
        ),
        ({"TrainingJobName": "bad_name"}, "ValidationException", "1 validation error detected"),
    ):
        found = code(lambda more=more: sm.create_training_job(**{**body("job", bucket, "see.py"), **more}))  # type: ignore[misc]
        assert found[0] == error
        assert words in found[1]
    plane.quotas["ml.m5.xlarge"] = 1
    found = code(lambda: sm.create_training_job(**body("job", bucket, "see.py")))
    assert found[0] == "ResourceLimitExceeded"
    assert "'ml.m5.xlarge for training job usage' is 1 Instances" in found[1]
    assert plane.jobs == {}


@pytest.mark.remote
def test_a_new_account_has_quotas_of_its_own(plane: Plane, bucket: str) -> None:
    sm = client()
    plane.new_account()
    given = body("job", bucket, "see.py")
    assert "'ml.m5.xlarge for training job usage' is 0 Instances" in code(lambda: sm.create_training_job(**given))[1]
    plane.quotas["ml.m5.xlarge"] = 100
    for part, changed, words in (
        ("ResourceConfig", {"InstanceCount": 21}, "per training job' is 20 Instances"),
        ("ResourceConfig", {"InstanceCount": 5}, "across all training jobs' is 4 Instances"),
        ("ResourceConfig", {"VolumeSizeInGB": 1025}, "is 1024 Gigabytes"),
        ("StoppingCondition", {"MaxRuntimeInSeconds": 432_001}, "is 432000 Seconds"),
    ):
        wrong = {**given, part: {**given[part], **changed}}
        found = code(lambda wrong=wrong: sm.create_training_job(**wrong))  # type: ignore[misc]
        assert found[0] == "ResourceLimitExceeded"
        assert words in found[1]
    assert plane.jobs == {}


@pytest.mark.remote
def test_one_create_a_second(plane: Plane, bucket: str) -> None:
    plane.creates_a_second = 1.0
    sm, given = client(), {**body("job", bucket, "see.py"), "RoleArn": ROLE.replace("TrainingRole", "None")}
    assert code(lambda: sm.create_training_job(**given))[0] == "ValidationException"
    assert code(lambda: sm.create_training_job(**given)) == ("ThrottlingException", "Rate exceeded")


@pytest.mark.remote
def test_faults_are_answered_once_each(plane: Plane) -> None:
    sm = client()
    plane.wire.faults += [Fault.throttled("ListTrainingJobs", 2), Fault.broken("*")]
    plane.wire.faults.append(Fault.denied("ListTrainingJobs", "sagemaker:ListTrainingJobs", "*"))
    codes = [code(sm.list_training_jobs)[0] for _ in range(4)]
    assert codes == ["ThrottlingException", "ThrottlingException", "InternalFailure", "AccessDeniedException"]
    assert sm.list_training_jobs()["TrainingJobSummaries"] == []
    assert plane.wire.count("ListTrainingJobs") == 5


@pytest.mark.remote
def test_credentials_count_until_they_expire(plane: Plane) -> None:
    sm = client()
    sm.list_training_jobs()
    plane.wire.expired.add(KEY)
    assert code(sm.list_training_jobs) == (
        "ExpiredTokenException",
        "The security token included in the request is expired",
    )
    plane.wire.expired.clear()
    other = client(aws_access_key_id="AKIANOBODY", aws_secret_access_key="x")
    assert code(other.list_training_jobs)[0] == "UnrecognizedClientException"
    forged = client(aws_access_key_id=KEY, aws_secret_access_key="forged")
    assert code(forged.list_training_jobs)[0] == "InvalidSignatureException"


@pytest.mark.remote
def test_secrets_are_for_the_role_alone(plane: Plane) -> None:
    arn = f"arn:aws:secretsmanager:{REGION}:123456789012:secret:contract-AbCdEf"
    plane.roles.values[arn] = "s3cret"
    assert code(lambda: client("secretsmanager").get_secret_value(SecretId=arn))[0] == "AccessDeniedException"
    page = plane.wire.pages[plane.roles.offer("job", ROLE)]()
    words = {"aws_access_key_id": page["AccessKeyId"], "aws_secret_access_key": page["SecretAccessKey"]}
    role = client("secretsmanager", **words, aws_session_token=page["Token"])
    for name in (arn, "contract"):
        assert role.get_secret_value(SecretId=name)["SecretString"] == "s3cret"
    assert code(lambda: role.get_secret_value(SecretId="other"))[0] == "ResourceNotFoundException"
    plane.roles.denied.add(ROLE)
    assert code(lambda: role.get_secret_value(SecretId=arn))[0] == "AccessDeniedException"


# -------------------------------------------------------------------------------------------------------- jobs that run


class Running:
    """A client that sends jobs by boto3 to a `Plane` with an engine."""

    def __init__(self, plane: Plane, bucket: str) -> None:
        self.plane, self.bucket, self.sm, self.cw = plane, bucket, client(), client("logs")

    def send(self, name: str, script: str, **more: Any) -> None:
        self.sm.create_training_job(**body(name, self.bucket, script, **more))

    def describe(self, name: str) -> dict[str, Any]:
        answer: dict[str, Any] = self.sm.describe_training_job(TrainingJobName=name)
        return answer

    def await_end(self, name: str) -> dict[str, Any]:
        """Return boto3's description of the job after its end. Check that the answer fits the service's model."""
        raw = dict(self.plane.job(name).wait(100))
        shape = service_model().operation_model("DescribeTrainingJob").output_shape
        for known in ("CreationTime", "LastModifiedTime", "TrainingStartTime", "TrainingEndTime"):
            assert isinstance(raw.pop(known, 0.0), float)
        raw["CreationTime"] = "2026-01-01T00:00:00Z"
        raw["SecondaryStatusTransitions"] = []
        raw.setdefault("ModelArtifacts", {"S3ModelArtifacts": ""})  # only the model requires it
        assert not ParamValidator().validate(raw, shape).generate_report()
        return self.describe(name)

    def lines(self, name: str) -> dict[str, list[str]]:
        """Return messages by stream, through the paginator."""
        found: dict[str, list[str]] = {}
        pages = self.cw.get_paginator("filter_log_events").paginate(
            logGroupName=LOG_GROUP, logStreamNamePrefix=f"{name}/"
        )
        for page in pages:
            for event in page["events"]:
                found.setdefault(event["logStreamName"], []).append(event["message"])
        return found

    def await_output(self, name: str, hosts: int = 2) -> None:
        """Wait until every host has printed something."""
        Jobs.wait_for(lambda: len(self.plane.logs().streams(LOG_GROUP, f"{name}/")) == hosts)

    def keys(self, prefix: str) -> set[str]:
        return {key.removeprefix(prefix) for key in self.plane.bucket.keys(f"{self.bucket}/{prefix}")}


@pytest.fixture
def running(plane: Plane, bucket: str, engine: Any, images: Callable[[str], str], tmp_path: Path) -> Iterator[Running]:
    images("py313")
    before = left(engine, tmp_path)
    plane._engine = engine
    yield Running(plane, bucket)
    plane.close()
    assert left(engine, tmp_path) == before


def statuses(job: Mapping[str, Any]) -> list[str]:
    found: list[str] = []
    for move in job["SecondaryStatusTransitions"]:
        if move["Status"] not in found[-1:]:
            found.append(move["Status"])
    return found


@pytest.mark.docker
@pytest.mark.remote
@pytest.mark.slow
class TestJobs:
    def test_a_job_completes(self, running: Running) -> None:
        running.plane.bucket.put(f"{running.bucket}/done/live/earlier", b"x")
        running.send("done", "done.py", Tags=[{"Key": "team", "Value": "vision"}])
        job = running.await_end("done")
        assert (job["TrainingJobStatus"], job["SecondaryStatus"]) == ("Completed", "Completed")
        assert statuses(job) == ["Starting", "Downloading", "Training", "Uploading", "Completed"]
        assert "FailureReason" not in job
        streams = running.lines("done")
        assert sorted(name.rpartition("-")[0] for name in streams) == ["done/algo-1", "done/algo-2"]
        views = [json.loads(line) for lines in streams.values() for line in lines]
        assert sorted(item.pop("me") for item in views) == ["algo-1", "algo-2"]
        assert views == 2 * [
            {
                "hosts": ["algo-1", "algo-2"],
                "word": "of the channel",
                "env": "of the environment",
                "engine": [],
                "job": "done",
                "role": True,
                "live": ["earlier"],
            }
        ]
        assert running.keys("done/live/") == {"earlier", "checkpoint-algo-1", "checkpoint-algo-2"}
        assert running.keys("native/done/output/") == {"model.tar.gz", "output.tar.gz"}
        assert running.sm.list_tags(ResourceArn=job["TrainingJobArn"])["Tags"] == [{"Key": "team", "Value": "vision"}]
        again = body("done", running.bucket, "done.py")
        assert code(lambda: running.sm.create_training_job(**again))[0] == "ResourceInUse"
        assert code(lambda: running.sm.stop_training_job(TrainingJobName="done"))[0] == "ValidationException"
        summaries = running.sm.list_training_jobs(NameContains="DON", StatusEquals="Completed")["TrainingJobSummaries"]
        assert [item["TrainingJobName"] for item in summaries] == ["done"]

    def test_the_reason_is_the_first_failure_file(self, running: Running) -> None:
        running.send("fail", "fail.py")
        job = running.await_end("fail")
        assert (job["TrainingJobStatus"], job["SecondaryStatus"]) == ("Failed", "Failed")
        assert job["FailureReason"] == "AlgorithmError: ValueError: the second host fails, exit code: 3"

    def test_a_stop_reaches_every_container(self, running: Running) -> None:
        running.send("stop", "hold.py")
        running.await_output("stop")
        running.sm.stop_training_job(TrainingJobName="stop")
        assert running.describe("stop")["TrainingJobStatus"] in ("Stopping", "Stopped")
        job = running.await_end("stop")
        assert (job["TrainingJobStatus"], job["SecondaryStatus"]) == ("Stopped", "Stopped")
        assert running.keys("stop/live/") == {"sigterm-algo-1", "sigterm-algo-2"}
        assert [lines[-1] for lines in running.lines("stop").values()] == ["sigterm", "sigterm"]

    def test_the_time_limit_ends_it(self, running: Running) -> None:
        running.send("long", "hold.py", StoppingCondition={"MaxRuntimeInSeconds": 1})
        job = running.await_end("long")
        assert (job["TrainingJobStatus"], job["SecondaryStatus"]) == ("Stopped", "MaxRuntimeExceeded")
        assert running.keys("long/live/") == {"sigterm-algo-1", "sigterm-algo-2"}

    def test_an_unused_grace_ends_in_a_kill(self, running: Running) -> None:
        running.plane.grace = 1.0
        running.plane.bucket.put(
            f"{running.bucket}/code/deaf.py", b"import time\nprint(1, flush=True)\ntime.sleep(100)"
        )
        running.send("deaf", "deaf.py")
        running.await_output("deaf")
        running.sm.stop_training_job(TrainingJobName="deaf")
        assert running.await_end("deaf")["TrainingJobStatus"] == "Stopped"

    def test_spot_is_interrupted_and_starts_again_with_its_checkpoints(self, running: Running) -> None:
        running.send("spot", "once.py", **spot())
        Jobs.wait_for(lambda: running.keys("spot/live/") == {"seen-algo-1", "seen-algo-2"})
        time.sleep(1.5)  # billed by the second
        running.plane.job("spot").interrupt(1)
        job = running.await_end("spot")
        assert job["TrainingJobStatus"] == "Completed"
        middle = ["Interrupted", "Starting", "Downloading", "Training"]
        assert statuses(job) == ["Starting", "Downloading", "Training", *middle, "Uploading", "Completed"]
        assert len(running.lines("spot")) == 4
        assert job["BillableTimeInSeconds"] < job["TrainingTimeInSeconds"]

    @pytest.mark.parametrize("retries", [0, 1])
    def test_a_lost_instance_is_a_fault_of_the_service(self, running: Running, retries: int) -> None:
        running.send("lost", "once.py", **({"RetryStrategy": {"MaximumRetryAttempts": 1}} if retries else {}))
        Jobs.wait_for(lambda: len(running.keys("lost/live/")) == 2)
        running.plane.job("lost").lose(0)
        running.plane.job("lost").lose(1)
        job = running.await_end("lost")
        if retries:
            assert job["TrainingJobStatus"] == "Completed"
            assert "Restarting" in statuses(job)
        else:
            assert job["TrainingJobStatus"] == "Failed"
            assert job["FailureReason"].startswith("InternalServerError: ")

    def test_no_capacity_is_a_failure_and_the_next_preference_is_taken(self, running: Running) -> None:
        running.plane.no_capacity.add("ml.m5.xlarge")
        running.send("none", "done.py")
        kinds = [{"InstanceType": kind, "InstanceCount": 1} for kind in ("ml.m5.xlarge", "ml.g5.xlarge")]
        running.send("next", "done.py", ResourceConfig={"InstancePreferences": kinds, "VolumeSizeInGB": 30})
        job = running.await_end("none")
        assert job["FailureReason"].startswith("CapacityError: ")
        assert "Pending" in statuses(job)
        job = running.await_end("next")
        assert job["TrainingJobStatus"] == "Completed"
        assert job["ResourceConfig"]["SelectedInstanceType"] == "ml.g5.xlarge"

    def test_spot_that_never_comes_ends_when_its_wait_does(self, running: Running) -> None:
        running.plane.no_capacity.add("ml.m5.xlarge")
        stopping = {"MaxRuntimeInSeconds": 1, "MaxWaitTimeInSeconds": 1}
        running.send("wait", "done.py", EnableManagedSpotTraining=True, StoppingCondition=stopping)
        job = running.await_end("wait")
        assert (job["TrainingJobStatus"], job["SecondaryStatus"]) == ("Stopped", "MaxWaitTimeExceeded")

    def test_a_sync_that_lags_and_a_stale_copy_that_comes_back(self, running: Running) -> None:
        running.plane.sync_lag = 2.0
        running.plane.stale_copies = True
        running.plane.bucket.put(f"{running.bucket}/stale/live/old", b"x")
        running.plane.bucket.put(
            f"{running.bucket}/code/drop.py",
            SEE.encode() + b"if me == 'algo-1': os.remove('/opt/ml/cloudtrain/live/old')\n"
            b"open('/opt/ml/cloudtrain/live/new-' + me, 'w').write('x')\ntime.sleep(100)\n",
        )
        running.send("stale", "drop.py")
        running.await_output("stale")
        time.sleep(0.7)
        assert "new-algo-1" not in running.keys("stale/live/")
        Jobs.wait_for(lambda: running.keys("stale/live/") == {"old", "new-algo-1", "new-algo-2"})
        running.sm.stop_training_job(TrainingJobName="stale")
        running.await_end("stale")
        assert "old" in running.keys("stale/live/"), "the other instance still has it"

    def test_the_agent_marks_uploaded_files_and_restores_no_marks(self, running: Running) -> None:
        running.plane.bucket.put(
            f"{running.bucket}/code/marks.py",
            SEE.encode() + b"live = '/opt/ml/cloudtrain/live/'\n"
            b"open(live + 'x.part.sagemaker-ignore', 'w').write('half')\n"
            b"open(live + 'x', 'w').write('whole')\n"
            b"while not os.path.exists(live + 'x.sagemaker-uploaded'): time.sleep(0.05)\n"
            b"print('SEEN ' + json.dumps({'live': sorted(os.listdir(live))}), flush=True)\n",
        )
        running.send(
            "marks",
            "marks.py",
            ResourceConfig={"InstanceType": "ml.m5.xlarge", "InstanceCount": 1, "VolumeSizeInGB": 30},
        )
        assert running.await_end("marks")["TrainingJobStatus"] == "Completed"
        assert running.keys("marks/live/") == {"x"}

    def test_a_dead_sync_uploads_nothing_and_reports_nothing(self, running: Running) -> None:
        running.plane.dead_sync = True
        running.plane.bucket.put(
            f"{running.bucket}/code/dead.py", SEE.encode() + b"open('/opt/ml/cloudtrain/live/x', 'w').write('lost')\n"
        )
        running.send(
            "dead", "dead.py", ResourceConfig={"InstanceType": "ml.m5.xlarge", "InstanceCount": 1, "VolumeSizeInGB": 30}
        )
        assert running.await_end("dead")["TrainingJobStatus"] == "Completed"
        assert running.keys("dead/live/") == set()

    def test_channels_are_mounted_or_copied_in_full_or_in_shards(self, running: Running) -> None:
        bucket = running.plane.bucket
        for name in ("a", "b", "c"):
            bucket.put(f"{running.bucket}/data/sub/{name}.txt", name.encode())
        bucket.put(f"{running.bucket}/data-2/other.txt", b"a neighbour")
        look = """
            for name in sorted(os.listdir("/opt/ml/input/data")):
                root = "/opt/ml/input/data/" + name
                found = sorted(os.path.relpath(os.path.join(d, f), root) for d, _, fs in os.walk(root) for f in fs)
                try:
                    open(root + "/mine", "w").close()
                    may = "may write"
                except OSError:
                    may = "may not write"
                print(me, name, *found, may, flush=True)
            """
        bucket.put(f"{running.bucket}/code/look.py", (SEE + textwrap.dedent(look)).encode())

        def channel(name: str, key: str, mode: str, distribution: str = "FullyReplicated") -> dict[str, Any]:
            source = {"S3DataType": "S3Prefix", "S3Uri": f"{running.bucket}/{key}"}
            source["S3DataDistributionType"] = distribution
            return {"ChannelName": name, "InputMode": mode, "DataSource": {"S3DataSource": source}}

        channels = [
            *body("x", running.bucket)["InputDataConfig"],
            channel("copied", "data/", "File"),
            channel("mounted", "data/", "FastFile"),
            channel("open", "data", "File"),
            channel("one", "data/sub/a.txt", "File"),
            channel("parts", "data/", "File", "ShardedByS3Key"),
        ]
        running.send("look", "look.py", InputDataConfig=channels)
        assert running.await_end("look")["TrainingJobStatus"] == "Completed"
        printed = [line for lines in running.lines("look").values() for line in lines]
        for host in ("algo-1", "algo-2"):
            assert f"{host} copied sub/a.txt sub/b.txt sub/c.txt may write" in printed
            assert f"{host} mounted sub/a.txt sub/b.txt sub/c.txt may not write" in printed
            assert f"{host} open -2/other.txt sub/a.txt sub/b.txt sub/c.txt may write" in printed, (
                "a prefix is not a folder"
            )
            assert f"{host} one a.txt may write" in printed
        assert "algo-1 parts sub/a.txt sub/c.txt may write" in printed
        assert "algo-2 parts sub/b.txt may write" in printed

    @pytest.mark.parametrize("isolated", [False, True])
    def test_isolation_removes_a_container_s_network_and_role(self, running: Running, isolated: bool) -> None:
        running.send("alone", "hold.py", EnableNetworkIsolation=isolated)
        running.await_output("alone")
        label = f"cloudtrain.run={running.plane.job('alone').folder.as_uri()}"
        (network,) = running.plane._engine.networks(filters={"label": label})
        assert network["Internal"] == isolated
        running.sm.stop_training_job(TrainingJobName="alone")
        running.await_end("alone")
        for lines in running.lines("alone").values():
            assert json.loads(lines[0])["role"] != isolated

    def test_an_unknown_secondary_status_is_reported(self, running: Running) -> None:
        running.send("odd", "hold.py")
        running.plane.unknown["odd"] = "Quiescing"
        assert running.describe("odd")["SecondaryStatus"] == "Quiescing"

    def test_a_lost_answer_leaves_a_job(self, running: Running) -> None:
        running.plane.wire.faults.append(Fault("CreateTrainingJob", done=True))
        with pytest.raises(Exception, match="Connection was closed"):
            running.send("cut", "done.py")
        assert running.await_end("cut")["TrainingJobStatus"] == "Completed"

    def test_a_missing_image(self, running: Running) -> None:
        algorithm = {**body("x", "s3://b", "done.py")["AlgorithmSpecification"], "TrainingImage": f"{REGISTRY}/none:1"}
        found = code(lambda: running.send("none", "done.py", AlgorithmSpecification=algorithm))
        assert found == ("ValidationException", f"Requested image {REGISTRY}/none:1 not found.")
