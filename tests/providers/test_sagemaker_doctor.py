"""``cloudtrain doctor sagemaker`` and an account in which something is amiss: its line, its fix, its exit code."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from typing import Any

import pytest
from doctoring import Examiner

from cloudtrain.testing.sagemaker.plane import REGION
from cloudtrain.testing.sagemaker.wire import ACCOUNT, Fault
from cloudtrain.testing.sagemaker.world import SageMakerWorld

pytestmark = [pytest.mark.remote]

OWN = f"{ACCOUNT}.dkr.ecr.{REGION}.amazonaws.com/team/trainer:1"


@pytest.fixture(scope="module")
def account(tmp_path_factory: pytest.TempPathFactory, s3_server: str) -> Iterator[SageMakerWorld]:
    world = SageMakerWorld(tmp_path_factory.mktemp("world"), moto=s3_server, image="team/trainer:1", runs=False)
    yield world
    world.close()
    assert world.plane.wire.crashes == []


@pytest.fixture
def world(
    account: SageMakerWorld,
    examiner: Examiner,
    s3_environment: str,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[SageMakerWorld]:
    """Well, and set up in the examiner's folder; nothing is created, whatever was found."""
    for name, value in {**account.plane.environ(), **account.plane.questions.environ()}.items():
        monkeypatch.setenv(name, value)
    examiner.settings("sagemaker", account.store, settings(account))
    account.plane.questions.images = {"team/trainer:1"}
    yield account
    plane = account.plane
    plane.wire.faults.clear()
    plane.wire.expired.clear()
    plane.quotas.clear()
    for kept in (plane.questions.denied, plane.questions.unlisted):
        kept.clear()
    assert plane.jobs == {}
    assert plane.bucket.keys(account.store) == [], "something was left behind"


def settings(world: SageMakerWorld, **more: Any) -> dict[str, Any]:
    return {"region": REGION, "role": world.provider.settings.role, **more}


def test_all_is_well(world: SageMakerWorld, examiner: Examiner) -> None:
    found = examiner("--image", OWN)
    assert {name: row["status"] for name, row in found.rows.items()} == dict.fromkeys(
        ["settings", "plan", "sdk", "credentials", "bucket", "role", "permissions", "quota", "image", "store"], "ok"
    ), found.rows
    assert found.code == 0
    assert "boto3" in found.rows["sdk"]["detail"]
    assert f"account {ACCOUNT}" in found.rows["credentials"]["detail"]
    assert "ml.m5.xlarge for training job usage: 8" in found.rows["quota"]["detail"]


def test_no_sdk(world: SageMakerWorld, examiner: Examiner, monkeypatch: pytest.MonkeyPatch) -> None:
    known = importlib.metadata.version

    def version(name: str) -> str:
        if name == "s3fs":
            raise importlib.metadata.PackageNotFoundError(name)
        return known(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    found = examiner()
    found.failure("sdk", "s3fs not installed", fix="pip install 'cloudtrain[sagemaker]'", code=2)
    assert found.names == ["settings", "plan", "sdk", "store"]
    assert found.status("store") == "skipped"


def test_no_credentials(world: SageMakerWorld, examiner: Examiner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    found = examiner()
    found.failure("credentials", "no AWS credentials", fix="aws configure", code=3)
    assert found.status("store") == "skipped"


def test_credentials_that_have_expired_and_a_call_that_finds_nobody(world: SageMakerWorld, examiner: Examiner) -> None:
    world.plane.wire.expired |= set(world.plane.wire.keys)
    examiner().failure("credentials", "expired", fix="sign in again", code=3)
    world.plane.wire.expired.clear()
    world.plane.wire.faults.append(Fault("GetCallerIdentity", times=9))
    examiner().failure("credentials", "AWS does not answer", fix="try again", code=7)


def test_settings_that_are_none(world: SageMakerWorld, examiner: Examiner, monkeypatch: pytest.MonkeyPatch) -> None:
    examiner.settings("sagemaker", world.store, settings(world, regoin="eu-west-1"))
    found = examiner()
    found.failure("settings", "did you mean", fix="regoin", code=2)
    assert found.names == ["settings"]


def test_what_the_caller_may_not_look_at_is_unknown(world: SageMakerWorld, examiner: Examiner) -> None:
    for operation, action in (
        ("GetRole", "iam:GetRole"),
        ("SimulatePrincipalPolicy", "iam:SimulatePrincipalPolicy"),
        ("ListServiceQuotas", "servicequotas:ListServiceQuotas"),
        ("DescribeImages", "ecr:DescribeImages"),
    ):
        world.plane.wire.faults.append(Fault.denied(operation, action, "*"))
    found = examiner("--image", OWN)
    assert [found.status(name) for name in ("role", "permissions", "quota", "image")] == ["unknown"] * 4
    assert found.code == 0


@pytest.mark.parametrize("spot", [False, True])
def test_all_that_can_be_wrong_with_an_account(world: SageMakerWorld, examiner: Examiner, spot: bool) -> None:
    """Each has its own line, fix and code; the verb's is that of the gravest."""
    role = world.plane.make_role("for-lambda", "lambda.amazonaws.com")
    examiner.settings("sagemaker", world.store, {"region": REGION, "role": role})
    world.plane.questions.denied |= {"iam:PassRole", "sagemaker:StopTrainingJob"}
    world.plane.quotas["ml.p5.48xlarge"] = 0
    world.plane.questions.images = {"team/trainer:2"} if spot else set()
    flags = ["--instance-type", "ml.p5.48xlarge", "--nodes", "2", "--image", OWN, *(["--spot"] if spot else [])]
    found = examiner(*flags)
    found.failed("role", "cannot be assumed", fix="trust policy", code=3)
    found.failed("permissions", "sagemaker:StopTrainingJob, iam:PassRole", fix="user/tester allow", code=3)
    word = "spot training job" if spot else "training job"
    found.failed("quota", f"ml.p5.48xlarge for {word} usage: 0 at a time, 2", fix="--desired-value 2", code=4)
    assert "--quota-code L-" in found.rows["quota"]["fix"]
    found.failed("image", "ECR has no", fix="docker push", code=2)
    assert (found.code, found.status("store")) == (3, "ok")


def test_a_quota_alone(world: SageMakerWorld, examiner: Examiner) -> None:
    world.plane.quotas["ml.p5.48xlarge"] = 0
    examiner("--instance-type", "ml.p5.48xlarge").failure("quota", fix="--desired-value 1", code=4)


def test_a_bucket_in_another_region_and_a_role_that_there_is_none(world: SageMakerWorld, examiner: Examiner) -> None:
    far = world.plane.moto_client("s3", region="us-west-2")
    far.create_bucket(Bucket="far-away", CreateBucketConfiguration={"LocationConstraint": "us-west-2"})
    role = f"arn:aws:iam::{ACCOUNT}:role/nobody"
    examiner.settings("sagemaker", "s3://far-away/store", {"region": REGION, "role": role})
    found = examiner("--instance-type", "ml.c5.xlarge")
    found.failed("bucket", "is in us-west-2, the jobs are in eu-west-1", fix="sagemaker.region to us-west-2", code=2)
    found.failed("role", "no role nobody", fix="sagemaker.role", code=3)
    assert found.status("quota") == "unknown", "no list has it"
    assert found.status("image") == "unknown", "AWS's own"
    assert found.code == 3


def test_a_bucket_that_there_is_none(world: SageMakerWorld, examiner: Examiner) -> None:
    examiner.settings("sagemaker", "s3://no-such-bucket-here/store", settings(world))
    found = examiner()
    found.failed("bucket", "there is no bucket", fix="aws s3 mb s3://no-such-bucket-here", code=8)
    found.failed("store", "does not exist", fix="make the bucket", code=8)
    assert found.code == 8
