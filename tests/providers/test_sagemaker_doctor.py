"""``cloudtrain doctor sagemaker`` and an account with one fault at a time: its line, its fix, its exit code."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from doctor_runs import Examiner
from worlds.sagemaker.plane import NEW_ACCOUNT, PLENTY, REGION
from worlds.sagemaker.wire import ACCOUNT, Fault
from worlds.sagemaker.world import SageMakerWorld

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
    """Give a sound account with settings in the examiner's folder. The checks must create nothing."""
    for name, value in {**account.plane.environ(), **account.plane.questions.environ()}.items():
        monkeypatch.setenv(name, value)
    examiner.settings("sagemaker", account.store, settings(account))
    account.plane.questions.images = {"team/trainer:1"}
    yield account
    plane = account.plane
    plane.wire.faults.clear()
    plane.wire.expired.clear()
    plane.quotas.clear()
    plane.quota, plane.limits = PLENTY, dict.fromkeys(NEW_ACCOUNT, PLENTY)
    for kept in (plane.questions.denied, plane.questions.unlisted):
        kept.clear()
    assert plane.jobs == {}
    assert plane.bucket.keys(account.store) == [], "a check left objects behind"


def settings(world: SageMakerWorld, **more: Any) -> dict[str, Any]:
    return {"region": REGION, "role": world.provider.settings.role, **more}


def test_all_is_well(world: SageMakerWorld, examiner: Examiner) -> None:
    found = examiner("--image", OWN)
    assert {name: row["status"] for name, row in found.rows.items()} == dict.fromkeys(
        [
            "settings",
            "plan",
            "sdk",
            "credentials",
            "bucket",
            "role",
            "permissions",
            "quota",
            "limits",
            "image",
            "store",
        ],
        "ok",
    ), found.rows
    assert found.code == 0
    assert "boto3" in found.rows["sdk"]["detail"]
    assert f"account {ACCOUNT}" in found.rows["credentials"]["detail"]
    assert "ml.m5.xlarge for training job usage: 8" in found.rows["quota"]["detail"]
    assert found.rows["limits"]["detail"].count("asked for") == 4


def test_no_sdk(world: SageMakerWorld, examiner: Examiner, monkeypatch: pytest.MonkeyPatch) -> None:
    known = importlib.metadata.distribution

    def distribution(name: str) -> importlib.metadata.Distribution:
        if name == "obstore":
            raise importlib.metadata.PackageNotFoundError(name)
        return known(name)

    monkeypatch.setattr(importlib.metadata, "distribution", distribution)
    found = examiner()
    found.failure("sdk", "provider sagemaker needs obstore, which is not installed", fix="[sagemaker]'", code=2)
    assert found.names == ["settings", "plan", "sdk", "store"]
    assert found.status("store") == "skipped"


def test_no_credentials(world: SageMakerWorld, examiner: Examiner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    found = examiner()
    found.failure("credentials", "no AWS credentials", fix="aws configure", code=3)
    assert found.status("store") == "skipped"


def test_expired_credentials_and_a_service_that_does_not_answer(world: SageMakerWorld, examiner: Examiner) -> None:
    world.plane.wire.expired |= set(world.plane.wire.keys)
    examiner().failure("credentials", "expired", fix="sign in again", code=3)
    world.plane.wire.expired.clear()
    world.plane.wire.faults.append(Fault("GetCallerIdentity", times=9))
    examiner().failure("credentials", "AWS does not answer", fix="try again", code=7)


def test_invalid_settings(world: SageMakerWorld, examiner: Examiner, monkeypatch: pytest.MonkeyPatch) -> None:
    examiner.settings("sagemaker", world.store, settings(world, regoin="eu-west-1"))
    found = examiner()
    found.failure("settings", "regoin: no such setting", fix="did you mean 'region'?", code=2)
    assert found.names == ["settings"]


def test_facts_that_the_caller_may_not_read_are_unknown(world: SageMakerWorld, examiner: Examiner) -> None:
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
def test_every_fault_of_an_account(world: SageMakerWorld, examiner: Examiner, spot: bool) -> None:
    """Check that each fault has its own line, fix and code; the command exits with the gravest code."""
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


def test_a_new_account_may_run_nothing(world: SageMakerWorld, examiner: Examiner) -> None:
    """Check even the machine of the first job: its quota was once called ok."""
    world.plane.new_account()
    found = examiner()
    found.failure("quota", "ml.m5.xlarge for training job usage: 0 at a time, 1", fix="--desired-value 1", code=4)


@pytest.mark.parametrize("spot", [False, True])
def test_the_limits_of_an_account(world: SageMakerWorld, examiner: Examiner, spot: bool) -> None:
    world.plane.new_account()
    world.plane.quotas["ml.m5.xlarge"] = 100
    flags = ["--nodes", "32", "--max-runtime", "10d", "--disk-gb", "2000", *(["--spot"] if spot else [])]
    usage = "spot training job" if spot else "training job"
    found = examiner(*flags)
    found.failure(
        "limits",
        "Longest run time for a training job: 432000 s, 864000 asked for",
        f"Maximum number of instances per {usage}: 20 nodes, 32 asked for",
        f"Number of instances across all {usage}s: 4 at a time, 32 asked for",
        "Size of EBS volume for a training job instance: 1024 GB, 2000 asked for",
        fix="--desired-value 864000",
        code=4,
    )
    assert found.rows["limits"]["fix"].count("request-service-quota-increase") == 4
    few = examiner("--nodes", "4", "--max-runtime", "5d", "--disk-gb", "1024")
    assert (few.code, few.status("limits")) == (0, "ok")


def test_one_listing_has_all_quotas(world: SageMakerWorld, examiner: Examiner) -> None:
    before = world.plane.wire.count("ListServiceQuotas")
    examiner()
    assert world.plane.wire.count("ListServiceQuotas") - before == 2, "each of the two pages must be read once"
    world.plane.questions.unlisted |= set(NEW_ACCOUNT)
    found = examiner()
    assert (found.status("limits"), found.status("quota")) == ("unknown", "ok")


# --------------------------------------------------------------------------------------------------- keys and networks


def test_keys_that_the_role_may_not_use(world: SageMakerWorld, examiner: Examiner) -> None:
    key = f"arn:aws:kms:{REGION}:{ACCOUNT}:key/1234abcd-12ab-34cd-56ef-1234567890ab"
    examiner.settings("sagemaker", world.store, settings(world, volume_kms_key=key, output_kms_key="alias/out"))
    assert examiner().status("keys") == "ok"
    world.plane.questions.denied |= {"kms:CreateGrant", "kms:GenerateDataKey"}
    found = examiner()
    found.failure("keys", "kms:GenerateDataKey, kms:CreateGrant", fix="policy of role training", code=3)
    examiner.settings("sagemaker", world.store, settings(world, volume_kms_key=key))
    examiner().failure("keys", "the role may not: kms:CreateGrant", fix="policy", code=3)


@pytest.fixture
def vpc(world: SageMakerWorld, examiner: Examiner) -> Vpc:
    ec2 = world.plane.moto_client("ec2")
    network = ec2.create_vpc(CidrBlock="10.9.0.0/16")["Vpc"]["VpcId"]
    subnet = ec2.create_subnet(VpcId=network, CidrBlock="10.9.0.0/28")["Subnet"]["SubnetId"]
    group = ec2.create_security_group(VpcId=network, GroupName="nodes", Description="nodes")["GroupId"]
    more = settings(world, subnets=[subnet], security_group_ids=[group])
    examiner.settings("sagemaker", world.store, more)
    return Vpc(ec2, group, lambda **also: examiner.settings("sagemaker", world.store, {**more, **also}))


@dataclass
class Vpc:
    """A subnet with 11 free addresses, and a security group with all outbound and no inbound traffic."""

    ec2: Any
    group: str
    settings: Callable[..., None]

    def allow(self, *protocols: tuple[str, int | None], out: bool = False) -> None:
        """Add rules for members of the group."""
        for protocol, port in protocols:
            port = -1 if port is None else port  # moto's server fails without a port
            ports = {"FromPort": port, "ToPort": port}
            rule = {"IpProtocol": protocol, "UserIdGroupPairs": [{"GroupId": self.group}], **ports}
            add = self.ec2.authorize_security_group_egress if out else self.ec2.authorize_security_group_ingress
            add(GroupId=self.group, IpPermissions=[rule])


def test_a_subnet_with_too_few_addresses(world: SageMakerWorld, examiner: Examiner, vpc: Vpc) -> None:
    vpc.allow(("-1", None))
    assert examiner("--nodes", "5").status("network") == "ok"
    examiner("--nodes", "6").failure("network", "6 nodes need 12 free addresses", "has 11", fix="larger subnet", code=2)


def test_a_group_whose_members_cannot_connect(world: SageMakerWorld, examiner: Examiner, vpc: Vpc) -> None:
    assert examiner().status("network") == "ok", "one node needs no rule"
    examiner("--nodes", "2").failure("network", "lets no TCP in", fix="inbound self-referencing rule", code=2)
    vpc.allow(("tcp", 29500))
    assert examiner("--nodes", "2").status("network") == "failed", "NCCL uses further ports"
    vpc.allow(("-1", None))
    assert examiner("--nodes", "2").status("network") == "ok"


@pytest.mark.parametrize(
    "source",
    [
        {"IpRanges": [{"CidrIp": "10.9.0.0/16"}]},
        {"Ipv6Ranges": [{"CidrIpv6": "fd00::/8"}]},
        {"PrefixListIds": [{"PrefixListId": "pl-0123456789abcdef0"}]},
    ],
)
def test_a_rule_for_addresses_may_be_of_the_nodes(
    world: SageMakerWorld, examiner: Examiner, vpc: Vpc, source: dict[str, Any]
) -> None:
    rule = {"IpProtocol": "tcp", "FromPort": 0, "ToPort": 65535, **source}
    vpc.ec2.authorize_security_group_ingress(GroupId=vpc.group, IpPermissions=[rule])
    assert examiner("--nodes", "2").status("network") == "ok"


def test_encryption_between_containers_needs_its_own_protocols(
    world: SageMakerWorld, examiner: Examiner, vpc: Vpc
) -> None:
    vpc.settings(encrypt_inter_container_traffic=True)
    examiner("--nodes", "2").failure("network", "UDP 500", "IP protocol 50", fix="rule for UDP 500", code=2)
    vpc.allow(("udp", 500), ("50", None))
    assert examiner("--nodes", "2").status("network") == "ok"


def test_efa_needs_rules_of_the_group_itself_in_both_directions(
    world: SageMakerWorld, examiner: Examiner, vpc: Vpc
) -> None:
    world.plane.quotas["ml.p5.48xlarge"] = 8
    flags = ("--gpu", "H100:8", "--nodes", "2")
    examiner(*flags).failure("network", "all traffic in", "all traffic out", fix="outbound", code=2)
    vpc.allow(("-1", None))
    examiner(*flags).failure("network", "all traffic out", fix="outbound", code=2)
    vpc.allow(("-1", None), out=True)
    assert examiner(*flags).status("network") == "ok"
    examiner("--gpu", "H100:8", "--nodes", "3").failure("network", "3 nodes need 15 free", fix="larger", code=2)


def test_a_network_that_the_caller_may_not_read(
    world: SageMakerWorld, examiner: Examiner, vpc: Vpc, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_EC2", world.plane.url)
    found = examiner()
    assert (found.code, found.status("network")) == (0, "unknown")


def test_a_bucket_in_another_region_and_a_missing_role(world: SageMakerWorld, examiner: Examiner) -> None:
    far = world.plane.moto_client("s3", region="us-west-2")
    far.create_bucket(Bucket="far-away", CreateBucketConfiguration={"LocationConstraint": "us-west-2"})
    role = f"arn:aws:iam::{ACCOUNT}:role/nobody"
    examiner.settings("sagemaker", "s3://far-away/store", {"region": REGION, "role": role})
    found = examiner("--instance-type", "ml.c5.xlarge")
    found.failed("bucket", "is in us-west-2, the jobs are in eu-west-1", fix="sagemaker.region to us-west-2", code=2)
    found.failed("role", "no role nobody", fix="sagemaker.role", code=3)
    assert found.status("quota") == "unknown", "no list has this quota"
    assert found.status("image") == "unknown", "AWS's own images are not checked"
    assert found.code == 3


def test_a_missing_bucket(world: SageMakerWorld, examiner: Examiner) -> None:
    examiner.settings("sagemaker", "s3://no-such-bucket-here/store", settings(world))
    found = examiner()
    found.failed("bucket", "there is no bucket", fix="aws s3 mb s3://no-such-bucket-here", code=8)
    found.failed("store", "does not exist", fix="make the bucket", code=8)
    assert found.code == 8
