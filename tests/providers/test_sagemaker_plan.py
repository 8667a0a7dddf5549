"""Requests of provider ``sagemaker`` before it sends them."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from plans import Plans
from profiles import examples
from rows import for_each
from worlds.sagemaker.strict import broken_rules, model_errors

from cloudtrain.cli.format import plan_text
from cloudtrain.errors import SpecError, UnsupportedError
from cloudtrain.job.job import Job, job_name
from cloudtrain.job.run_id import check_run_id
from cloudtrain.provider_api import catalog
from cloudtrain.provider_api.protocol import Request
from cloudtrain.providers.sagemaker import SAMPLE, Provider
from cloudtrain.providers.sagemaker.images import images
from cloudtrain.providers.sagemaker.request import _volume
from cloudtrain.providers.sagemaker.status import attempt_of
from cloudtrain.providers.sagemaker.validate import broken, limits, translated
from cloudtrain.runs.submit import make_plan
from cloudtrain.settings.settings import Settings

ROOT = Path(__file__).parents[2]
ACCOUNT: dict[str, Any] = SAMPLE["settings"]  # type: ignore[assignment]
VPC = {"subnets": ("subnet-1",), "security_group_ids": ("sg-1",)}
ECR = "123456789012.dkr.ecr.eu-west-1.amazonaws.com"

PLANS = Plans(Provider, ACCOUNT, "s3://bucket/store")
layout, planned, refused = PLANS.layout, PLANS.planned, PLANS.refused


def channels(request: Request) -> dict[str, Any]:
    return {item["ChannelName"]: item for item in request.body["InputDataConfig"]}


# ----------------------------------------------------------------------------------------------------------- the tables


def tool(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_limits_are_those_of_the_installed_botocore() -> None:
    """Check that the table still holds: a newer botocore may allow more members and values."""
    shapes = tool("sagemaker_tables").limits()["shapes"]
    wrong = []
    for name, ours in limits()["shapes"].items():
        theirs = shapes.get(name, {})
        for key, value in ours.items():
            limit = theirs.get(key)
            subset = key in ("enum", "members", "required") and set(value) <= set(limit or ())
            if limit != value and not subset:
                wrong.append(f"{name}.{key}: {value} is now {limit}")
    assert not wrong, "run: python tools/sagemaker_tables.py limits cloudtrain/providers/sagemaker\n" + "\n".join(wrong)


def test_translated_patterns_of_java_match_the_same() -> None:
    tag = translated(r"([\p{L}\p{Z}\p{N}_.:/=+\-@]*)")
    assert tag.fullmatch("ключ Ⅷ ½ ü/:=+-@_\u00a0")
    for bad in ("a\tb", "a,b", "a\nb", "#"):
        assert not tag.fullmatch(bad)
    for shape in limits()["shapes"].values():
        if "pattern" in shape:
            translated(shape["pattern"])


# ---------------------------------------------------------------------------------------------------------------- names


@pytest.mark.slow
@given(st.from_regex(r"[a-z0-9](-?[a-z0-9]){0,39}", fullmatch=True), st.integers(0, 100), st.integers(0, 40))
def test_names_are_legal_and_contain_the_attempt(run_id: str, attempt: int, gpu_index: int) -> None:
    if len(run_id) > 40:
        return
    name = job_name(f"s3://b/runs/{check_run_id(run_id)}", attempt, gpu_index)
    assert re.fullmatch(limits()["shapes"]["TrainingJobName"]["pattern"], name)
    assert len(name) <= 63
    assert attempt_of(name) == attempt


def test_names_differ_by_store_attempt_and_choice() -> None:
    longest = "a-" + "b" * 38
    names = {job_name(f"s3://{s}/runs/{longest}", k, c) for s in "xy" for k in range(12) for c in range(12)}
    assert len(names) == 2 * 12 * 12


# ---------------------------------------------------------------------------------------------------------- the request


def test_the_request_of_a_plain_job() -> None:
    body = planned(inputs={"train": "s3://data/digits"}).body
    assert set(body) == {
        "TrainingJobName", "RoleArn", "AlgorithmSpecification", "InputDataConfig", "OutputDataConfig", "ResourceConfig",
        "StoppingCondition", "CheckpointConfig", "RetryStrategy", "Environment", "Tags",
    }  # fmt: skip
    assert body["CheckpointConfig"] == {
        "S3Uri": "s3://bucket/store/runs/r/live/",
        "LocalPath": "/opt/ml/cloudtrain/live",
    }
    assert body["OutputDataConfig"]["S3OutputPath"] == "s3://bucket/store/runs/r/native/"
    assert body["ResourceConfig"]["InstanceType"] == "ml.m5.xlarge"
    assert body["AlgorithmSpecification"]["ContainerEntrypoint"] == ["/bin/sh", "-c"]
    assert "$" not in json.dumps(body), "a compose file would replace it"
    assert {tag["Key"] for tag in body["Tags"]} >= {"cloudtrain:run", "cloudtrain:run-id"}


def test_every_prefix_of_a_folder_ends_with_a_slash() -> None:
    request = planned(
        inputs={"a": "s3://data/x", "b": "s3://data/y/", "one": "s3://data/z.csv"},
        resume_from="s3://b/runs/q/live/checkpoints",
    )
    uris = {name: item["DataSource"]["S3DataSource"]["S3Uri"] for name, item in channels(request).items()}
    assert uris.pop("one") == "s3://data/z.csv"
    assert uris["a"] == "s3://data/x/"
    assert uris["b"] == "s3://data/y/"
    assert all(uri.endswith("/") and not uri.endswith("//") for uri in uris.values())


def test_modes_and_shards_of_inputs() -> None:
    item = {"url": "s3://data/x"}
    found = channels(planned(inputs={"a": item, "b": {**item, "mode": "mount"}, "c": {**item, "shard": True}}))
    assert [found[name]["InputMode"] for name in "abc"] == ["File", "FastFile", "File"]
    kinds = [found[name]["DataSource"]["S3DataSource"]["S3DataDistributionType"] for name in "abc"]
    assert kinds == ["FullyReplicated", "FullyReplicated", "ShardedByS3Key"]


def test_one_object_is_copied_never_mounted() -> None:
    """Check this because a FastFile prefix must not be part of a folder's name, and an object's key is one."""
    one = {"url": "s3://data/x/z.csv", "mode": "mount"}
    error = refused(inputs={"a": one})
    assert str(error).endswith(
        "inputs.a.mode: not supported by provider sagemaker: FastFile mounts folders, not one object"
    )
    assert error.hint == "use mode copy, or name the folder s3://data/x/"
    assert channels(planned(inputs={"a": {**one, "mode": "copy"}}))["a"]["InputMode"] == "File"


def test_file_systems_are_mounted_in_their_vpc() -> None:
    inputs = {"a": "efs://fs-0123abcd/data/", "b": "fsx://fs-0123abcd/mount/data"}
    found = channels(planned(VPC, inputs=inputs))
    sources = [found[name]["DataSource"]["FileSystemDataSource"] for name in "ab"]
    assert [(s["FileSystemType"], s["DirectoryPath"]) for s in sources] == [
        ("EFS", "/data"),
        ("FSxLustre", "/mount/data"),
    ]
    assert refused(inputs=inputs).field == "inputs.a"
    shard = refused(VPC, inputs={"a": {"url": inputs["a"], "shard": True}})
    assert (shard.field, shard.hint) == ("inputs.a.shard", "leave shard out, and let each rank pick its files")
    assert refused(VPC, inputs={"a": {"url": inputs["a"], "mode": "copy"}}).field == "inputs.a.mode"


def test_time_limits() -> None:
    def stopping(given: Mapping[str, Any] | None = None, /, **fields: Any) -> dict[str, int]:
        return dict(planned(given, **fields).body["StoppingCondition"])

    assert stopping(max_runtime="2h") == {"MaxRuntimeInSeconds": 7200}
    spot = stopping(max_runtime="2h", max_wait="1h", spot=True)
    assert spot == {"MaxRuntimeInSeconds": 7200, "MaxWaitTimeInSeconds": 10800}
    assert stopping(spot=True)["MaxWaitTimeInSeconds"] > 86400
    assert stopping(gpu="A10G:1", max_wait="1h")["MaxPendingTimeInSeconds"] == 3600
    # 1.5 USD an hour, two nodes
    assert stopping(gpu="A10G:1", instance_count=2, max_cost=6)["MaxRuntimeInSeconds"] == 7200
    warm = stopping({"keep_alive_period": 600}, gpu="A10G:1", instance_count=2, max_cost=6)
    assert warm["MaxRuntimeInSeconds"] == 7200 - 600, "a warm pool costs money too"
    job = {"gpu": "A10G:1", "instance_count": 2, "keep_warm": "30m"}
    assert stopping({"keep_alive_period": 600}, **job, max_cost=6)["MaxRuntimeInSeconds"] == 7200 - 1800
    both = planned({"keep_alive_period": 600}, **job)
    assert both.body["ResourceConfig"]["KeepAlivePeriodInSeconds"] == 1800, "the job's own value must win"
    assert [Provider(**ACCOUNT).warm_seconds(request) for request in (both, planned())] == [1800, 0]
    assert "keep_warm: after the job its machines wait 30m for the next one, paid for: up to 1.50 USD" in both.notes
    assert "unknown" in " ".join(planned({"keep_alive_period": 600, "prices": {}}, instance_type="ml.x9.large").notes)
    assert stopping(gpu="A10G:1", max_cost=1e6)["MaxRuntimeInSeconds"] == 86400
    assert "max_cost" in " ".join(planned(gpu="A10G:1", max_cost=6).notes)


def test_an_estimate_names_its_price_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the account's own price, another service's list, and no price. max_cost uses the first alone."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # no list that this machine has read from a cloud
    (tmp_path / "train.py").write_text("")

    def made(**fields: Any) -> tuple[dict[str, Any] | None, str]:
        chosen = Settings(provider="sagemaker", store="s3://b/s", tables={"sagemaker": SAMPLE["settings"]})  # type: ignore[dict-item]
        job = Job.make(entry_point="train.py", **{"max_runtime": "2h", **fields})
        document = make_plan(job, settings=chosen, run_id="r", cwd=tmp_path).document()
        return document["resources"]["price"], plan_text(document)

    price, text = made(gpu="A10G:1", instance_count=2)
    assert price is not None
    assert (price["usd_per_hour"], price["usd_for_hard_limit"], price["own"]) == (3.0, 6.0, True)
    assert "about 3.00 USD an hour for 2 x ml.g5.xlarge, 6.00 USD until the hard limit of 2h: an estimate by" in text
    limited, _ = made(gpu="A10G:1", instance_count=2, max_cost=1.5)
    assert limited is not None
    assert limited["usd_for_hard_limit"] == 1.5
    warm, _ = made(gpu="A10G:1", instance_count=2, keep_warm="1h")
    assert warm is not None
    assert warm["usd_for_hard_limit"] == 9.0, "the question before a submit must count it"
    listed, text = made(instance_type="ml.p5.48xlarge")
    assert listed is not None
    assert (listed["usd_per_hour"], listed["own"], listed["date"]) == (55.04, False, "2026")
    assert "EC2 on demand, us-east-1" in text
    assert "not the service's own price" in text
    assert made(gpu="A10G:8")[0] is None
    assert made(gpu=["H100:8", "A10G:8"])[0] is None, "one of the choices has no price"
    assert re.search("price +unknown", made(cpus=8)[1])
    # With spot, or GPUs of different numbers, there is no list of preferences: a later attempt takes the next one.
    for later in ({"gpu": ["A10G:1", "H100:8"], "spot": True}, {"gpu": ["A10G:1", "H100:8"]}):
        price, text = made(**later)
        assert price is not None
        assert (price["usd_per_hour"], price["instance_type"], price["own"]) == (55.04, "ml.p5.48xlarge", False)
        assert "55.04 USD an hour for 1 x ml.p5.48xlarge" in text
        assert "not the service's own price" in text
        with pytest.raises(UnsupportedError, match=r"no price of ml\.p5\.48xlarge") as caught:
            made(**later, max_cost=5)
        assert caught.value.field == "max_cost"
    assert made(gpu=["A10G:1", "A10G:8"], spot=True)[0] is None, "the later choice has no price"
    priced, _ = made(gpu=["A10G:1", "NOSUCH:3"], spot=True)
    assert priced is not None, "the later choice is never used"
    assert priced["instance_type"] == "ml.g5.xlarge"
    assert "55.04 is EC2 on demand" in str(refused(max_cost=5, instance_type="ml.p5.48xlarge"))


def test_gpus_in_order_of_preference() -> None:
    """Check that SageMaker itself takes the first that it has. Where it cannot, the client chooses."""
    two = ["H100:8", "A100-80GB:8"]
    config = planned(gpu=two, instance_count=2).body["ResourceConfig"]
    assert config["InstancePreferences"] == [
        {"InstanceType": name, "InstanceCount": 2} for name in ("ml.p5.48xlarge", "ml.p4de.24xlarge")
    ]
    assert "InstanceType" not in config
    assert planned(gpu=two, gpu_index=1).body["ResourceConfig"]["InstanceType"] == "ml.p4de.24xlarge"
    assert planned(gpu=two, spot=True).body["ResourceConfig"]["InstanceType"] == "ml.p5.48xlarge"
    uneven = planned(gpu=["H100:8", "A10G:4"])
    assert uneven.body["ResourceConfig"]["InstanceType"] == "ml.p5.48xlarge", (
        "another number of ranks makes another job"
    )
    assert uneven.context["processes"] == 8


def test_a_pinned_machine_has_a_rank_for_each_gpu() -> None:
    assert planned(instance_type="ml.p4d.24xlarge").context["processes"] == 8
    assert planned(instance_type="ml.p4d.24xlarge", nproc_per_node=2).context["processes"] == 2
    assert planned(instance_type="ml.c5.xlarge").context["processes"] == 1
    assert refused(instance_type="ml.c5.xlarge", min_gpu_util="5% for 30m").field == "min_gpu_util"
    assert planned(instance_type="ml.p4d.24xlarge", min_gpu_util="5% for 30m").context["min_gpu_util"]


def test_an_unknown_machine_is_a_warning() -> None:
    with pytest.raises(SpecError, match="how many accelerators") as caught:
        planned(instance_type="ml.p9.48xlarge")
    assert caught.value.field == "resources.nproc_per_node"
    request = planned(instance_type="ml.p9.48xlarge", nproc_per_node=8)
    assert "-cu" in request.body["AlgorithmSpecification"]["TrainingImage"]
    assert request.body["ResourceConfig"]["InstanceType"] == "ml.p9.48xlarge"
    assert not any("ml.p9" in note for note in request.notes), "the plan itself warns of it for any provider"


def test_images_of_aws() -> None:
    def image(given: Mapping[str, Any] | None = None, /, **fields: Any) -> str:
        return str(planned(given, **fields).body["AlgorithmSpecification"]["TrainingImage"])

    newest = [v for v, version in images()["versions"].items() if "eu-west-1" in version["regions"]][-1]
    assert f":{newest}-cpu" in image()
    assert f":{newest}-cu" in image(gpu="A10G:1")
    assert image({"framework_version": "2.9"}).endswith("pytorch-training:2.9.0-cpu-py312")
    assert ".amazonaws.com.cn/" in image({"region": "cn-north-1"})
    assert refused({"framework_version": "1.5"}).field == "sagemaker.framework_version"
    assert refused({"region": "mars-1"}).field == "image"


# Newest image of the region whose CUDA serves the GPU: CUDA 13 dropped Volta (pytorch/pytorch#172352).
SERVING = [
    ("eu-west-1", {"gpu": "V100-16GB:8"}, "pytorch-training:2.6.0-gpu-py312"),
    ("eu-west-1", {"instance_type": "ml.p3dn.24xlarge"}, "pytorch-training:2.6.0-gpu-py312"),
    ("cn-north-1", {"gpu": "V100-16GB:1"}, "pytorch-training:2.6.0-gpu-py312"),
    ("us-gov-west-1", {"instance_type": "ml.p3.16xlarge"}, "pytorch-training:2.6.0-gpu-py312"),
    ("us-iso-east-1", {"gpu": "V100-16GB:1"}, "pytorch-training:2.3.0-gpu-py311"),
    ("eu-west-1", {"gpu": ["H100:8", "V100-16GB:8"]}, "pytorch-training:2.6.0-gpu-py312"),
    ("eu-west-1", {"gpu": "T4:4"}, "pytorch:2.14-cu133-amzn2023-sagemaker"),
    ("eu-west-1", {"gpu": "A10G:1"}, "pytorch:2.14-cu133-amzn2023-sagemaker"),
    ("eu-west-1", {"gpu": "H100:8"}, "pytorch:2.14-cu133-amzn2023-sagemaker"),
    ("eu-west-1", {"gpu": "B300:8"}, "pytorch:2.14-cu133-amzn2023-sagemaker"),
    ("cn-north-1", {"gpu": "A10G:1"}, "pytorch:2.13-cu133-amzn2023-sagemaker"),
    ("us-gov-west-1", {"gpu": "H100:8"}, "pytorch:2.13-cu133-amzn2023-sagemaker"),
]


@for_each(("region", "fields", "image"), SERVING)
def test_the_image_serves_the_gpu(region: str, fields: dict[str, Any], image: str) -> None:
    body = planned({"region": region}, **fields).body
    assert body["AlgorithmSpecification"]["TrainingImage"].rpartition("/")[2] == image


UNSERVED = [
    ({}, {"gpu": "K80:1"}, "image", "serves K80"),
    ({}, {"instance_type": "ml.p2.xlarge"}, "image", "serves K80"),
    ({}, {"gpu": ["V100-16GB:8", "B200:8"]}, "image", "serves V100-16GB and B200"),
    ({"region": "eusc-de-east-1"}, {"gpu": "V100-16GB:1"}, "image", "serves V100"),
    (
        {"framework_version": "2.14"},
        {"gpu": "V100-16GB:1"},
        "sagemaker.framework_version",
        "CUDA 13.3.* = '2.6.0",
    ),
    (
        {"framework_version": "2.5"},
        {"gpu": "B200:8"},
        "sagemaker.framework_version",
        "CUDA 12.4.* = '2.14",
    ),
]


@for_each(("given", "fields", "field", "says"), UNSERVED)
def test_no_image_serves_the_gpu(given: dict[str, Any], fields: dict[str, Any], field: str, says: str) -> None:
    error = refused(given, **fields)
    assert error.field == field
    assert re.search(says, error.with_hint())
    region = given.get("region", "eu-west-1")
    planned({"region": region}, **fields, image=f"123456789012.dkr.ecr.{region}.amazonaws.com/mine:1")


@for_each(
    ("region", "host"),
    [
        ("cn-north-1", "cn-north-1.amazonaws.com.cn"),
        ("us-gov-west-1", "us-gov-west-1.amazonaws.com"),
        ("us-iso-east-1", "us-iso-east-1.c2s.ic.gov"),
        ("eusc-de-east-1", "eusc-de-east-1.amazonaws.eu"),
    ],
)
def test_the_commands_that_copy_an_image_name_the_registry_of_the_partition(region: str, host: str) -> None:
    assert f"push $ACCOUNT.dkr.ecr.{host}/a/b:1" in refused({"region": region}, image="ghcr.io/a/b:1").hint


def test_every_gpu_of_the_catalogue_has_a_compute_capability() -> None:
    assert {machine.gpu for machine in catalog.machines("sagemaker") if machine.gpu} <= {*images()["gpus"]}


def test_every_image_has_a_cuda_version() -> None:
    """Check that a tag that names CUDA is right; the table of the tool has the other images."""
    cuda_of = tool("sagemaker_tables").cuda_of
    for number, version in images()["versions"].items():
        assert version["cuda"] == cuda_of(number, version["gpu"])


@for_each(
    ("fields", "says"),
    [
        ({"max_runtime": "6d"}, "max_runtime is above 5 days"),
        ({"instance_count": 21}, "21 nodes are above 20 a job"),
        ({"disk_gb": 2000}, "disk_gb is above 1024 GB"),
        ({"gpu": ["H100:8", "A100-80GB:8"], "instance_count": 21}, "21 nodes are above 20"),
        ({"max_runtime": "5d", "instance_count": 20, "disk_gb": 1024}, ""),
    ],
)
def test_a_plan_warns_of_missing_quotas(fields: dict[str, Any], says: str) -> None:
    notes = [note for note in planned(**fields).notes if "quota" in note]
    assert says in " ".join(notes)
    assert bool(notes) == bool(says)


def test_a_warm_pool_for_a_list_of_machines_is_a_warning() -> None:
    two = ["H100:8", "A100-80GB:8"]
    assert "warm pool:" in " ".join(planned({"keep_alive_period": 600}, gpu=two).notes)
    assert "warm pool:" not in " ".join(planned({"keep_alive_period": 600}, gpu=two[0]).notes)


def test_settings_reach_the_request() -> None:
    given = {
        **VPC, "output_kms_key": "alias/out", "volume_kms_key": "alias/disk", "keep_alive_period": 600,
        "encrypt_inter_container_traffic": True, "debug_shell": True,
    }  # fmt: skip
    body = planned(given).body
    assert body["VpcConfig"] == {"Subnets": ["subnet-1"], "SecurityGroupIds": ["sg-1"]}
    assert body["OutputDataConfig"]["KmsKeyId"] == "alias/out"
    assert body["ResourceConfig"]["VolumeKmsKeyId"] == "alias/disk"
    assert body["ResourceConfig"]["KeepAlivePeriodInSeconds"] == 600
    assert body["EnableInterContainerTrafficEncryption"]
    assert body["RemoteDebugConfig"] == {"EnableRemoteDebug": True}
    assert planned({"enable_network_isolation": True}).body["EnableNetworkIsolation"]
    private = planned(VPC, image="registry.example/team/trainer:1").body["AlgorithmSpecification"]
    assert private["TrainingImageConfig"] == {"TrainingRepositoryAccessMode": "Vpc"}


REFUSED: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("sagemaker.role", {"role": ""}, {}, "is not set"),
    ("sagemaker.role", {"role": "training"}, {}, "aws iam get-role --role-name training"),
    ("image", {}, {"image": "pytorch/pytorch:2"}, "push $ACCOUNT.dkr.ecr.eu-west-1.amazonaws.com/pytorch/pytorch:2"),
    ("image", {}, {"image": "ghcr.io/a/b:1"}, "tag ghcr.io/a/b:1 $ACCOUNT.dkr.ecr.eu-west-1.amazonaws.com/a/b:1"),
    ("image", {}, {"image": f"{ECR.replace('eu-west-1', 'us-east-1')}/a:1"}, "us-east-1"),
    ("image", {}, {"image": f"{ECR}/a:1-arm64"}, "--platform linux/amd64"),
    ("image", {}, {"gpu": "GB200:4"}, "linux/arm64"),
    ("image", {}, {"image": f"{ECR}/a:1-amd64", "gpu": "GB200:4"}, "--platform linux/arm64"),
    ("image", {}, {"image": f"{ECR}/{'a' * 300}:1"}, "at most 255"),
    ("secrets.T", {}, {"secrets": {"T": "env:TOKEN"}},
     "cannot read this machine's variables; to create the secret there, run: aws secretsmanager create-secret"),
    ("secrets.T", {}, {"secrets": {"T": "gcp:projects/x"}}, "aws:ARN"),
    ("secrets.T", {}, {"secrets": {"T": "aws:name"}}, "not the ARN"),
    ("secrets.T", {"enable_network_isolation": True}, {"secrets": {"T": SAMPLE["secret"]}}, "isolation"),
    ("resources.gpu", {}, {"gpu": "A100:2"}, "A100-80GB:8"),
    ("resources.gpu", {}, {"gpu": "A100:8", "instance_type": "ml.g5.xlarge"}, "A10G:1"),
    ("resources.gpu", {}, {"gpu": "A100:8", "instance_type": "ml.m5.xlarge"},
     "ml.m5.xlarge has no GPU, not A100:8; leave out gpu or instance_type"),
    ("resources.cpus", {}, {"cpus": 5000}, "the largest"),
    ("resources.memory_gb", {}, {"memory_gb": 50000}, "the largest"),
    ("resources.cpus", {}, {"cpus": 64, "instance_type": "ml.m5.xlarge"}, "4 cores"),
    ("resources.shm_gb", {}, {"shm_gb": 1}, "/dev/shm"),
    ("resources.disk_gb", {}, {"disk_gb": 500, "instance_type": "ml.g5.xlarge"}, "250 GB"),
    ("max_runtime", {}, {"max_runtime": "29d"}, "28 days"),
    ("max_wait", {}, {"max_wait": "1h"}, "with GPUs"),
    ("max_wait", {}, {"max_wait": "1m", "gpu": "A10G:1"}, "30 minutes"),
    ("max_cost", {}, {"max_cost": 5, "instance_type": "ml.p5.48xlarge"}, '"ml.p5.48xlarge" ='),
    ("max_cost", {}, {"max_cost": 1e-9}, "one second"),
    ("tags.cloudtrain:run", {}, {"tags": {"cloudtrain:run": "x"}}, "cloudtrain:"),
    ("tags.AWS:x", {}, {"tags": {"AWS:x": "x"}}, "aws:"),
    ("tags.a", {}, {"tags": {"a": "x" * 300}}, "at most 256"),
    ("tags.a,b", {}, {"tags": {"a,b": "x"}}, "does not match"),
    ("tags", {}, {"tags": {f"k{i}": "" for i in range(50)}}, "at most 44"),
    ("inputs.cloudtrain-code", {}, {"inputs": {"cloudtrain-code": "s3://b/x"}}, "choose another"),
    ("inputs", {}, {"inputs": {f"c{i}": "s3://b/x" for i in range(18)}}, "at most 17"),
    ("inputs.a", {}, {"inputs": {"a": "https://x/y"}}, "s3:"),
    ("inputs.a", {}, {"inputs": {"a": "s3://b/" + "x" * 1100}}, "at most 1024"),
    ("inputs.a", VPC, {"inputs": {"a": "efs://fs-not-hex-at-all/x"}}, "fs-[0-9a-f]"),
    ("inputs.a.shard", {}, {"inputs": {"a": {"url": "s3://b/x.csv", "shard": True}}}, "split between nodes"),
    ("sagemaker.keep_alive_period", {"keep_alive_period": 600}, {"spot": True}, "spot"),
    ("keep_warm", {}, {"keep_warm": "1h", "spot": True}, "spot"),
    ("keep_warm", {}, {"keep_warm": "7h"}, "at most 21600"),
    ("sagemaker.keep_alive_period", {"keep_alive_period": 30000}, {}, "at most 21600"),
    ("sagemaker.volume_kms_key", {"volume_kms_key": "alias/x"}, {"gpu": "A10G:1"}, "its own disks"),
    ("sagemaker.volume_kms_key", {"volume_kms_key": "a b"}, {}, "does not match"),
    ("sagemaker.debug_shell", {"debug_shell": True, "enable_network_isolation": True}, {},
     "no shell reaches a container under network isolation; turn enable_network_isolation off"),
    ("sagemaker.subnets", {"subnets": ("s" * 40,), "security_group_ids": ("sg-1",)}, {}, "at most 32"),
    ("options.sagemaker.contract", {}, {"options": {"sagemaker": {"contract": 1}}}, "no such field"),
    (
        "options.sagemaker.RetryStrategy.MaximumRetryAttempts",
        {},
        {"options": {"sagemaker": {"RetryStrategy": {"MaximumRetryAttempts": 99}}}},
        "at most 30",
    ),
    ("options.sagemaker.OutputDataConfig.CompressionType", {},
     {"options": {"sagemaker": {"OutputDataConfig": {"CompressionType": "GZPI"}}}}, "'GZPI' is none of "),
    ("options.sagemaker.StoppingCondition", {}, {"options": {"sagemaker": {"StoppingCondition": {}}}}, "itself"),
    (
        "options.sagemaker.Environment.LONG",
        {},
        {"options": {"sagemaker": {"Environment": {"LONG": "x" * 513}}}},
        "at most 512",
    ),
    (
        "options.sagemaker.ResourceConfig.TrainingPlanArn",
        {},
        {
            "gpu": ["H100:8", "A100-80GB:8"],
            "options": {
                "sagemaker": {
                    "ResourceConfig": {"TrainingPlanArn": "arn:aws:sagemaker:eu-west-1:123456789012:training-plan/p"}
                }
            },
        },
        "instance_type",
    ),
]  # fmt: skip


@for_each(("field", "given", "fields", "says"), REFUSED)
def test_refused(field: str, given: dict[str, Any], fields: dict[str, Any], says: str) -> None:
    error = refused(given, **fields)
    assert (error.field, getattr(error, "provider", "sagemaker")) == (field, "sagemaker")
    assert says in f"{error}; {error.hint}"
    assert "\n" not in str(error)


def test_a_store_must_be_in_s3() -> None:
    with pytest.raises(UnsupportedError) as caught:
        Provider(**ACCOUNT).plan(Job.make(entry_point="t.py"), layout(store="file:///tmp/x"))
    assert caught.value.field == "store"


@pytest.mark.parametrize(
    ("environ", "config", "profile", "region"),
    [
        ({"AWS_REGION": "a-1", "AWS_DEFAULT_REGION": "b-1"}, "[default]\nregion = c-1\n", "", "a-1"),
        ({"AWS_DEFAULT_REGION": "b-1"}, "", "", "b-1"),
        ({}, "[default]\nregion = c-1\n", "", "c-1"),
        ({"AWS_PROFILE": "work"}, "[default]\nregion = c-1\n[profile work]\nregion=d-1\n", "", "d-1"),
        ({"AWS_REGION": "a-1"}, "[profile work]\nregion=d-1\n", "work", "d-1"),
        ({"AWS_REGION": "a-1"}, "not ini", "work", "a-1"),
        ({}, "", "", ""),
    ],
)
def test_region(
    environ: dict[str, str], config: str, profile: str, region: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "config").write_text(config)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    provider = Provider(profile=profile, role=ACCOUNT["role"])
    assert provider.settings.region == region
    assert Provider(region="x-1", profile=profile).settings.region == "x-1"
    if not region:
        with pytest.raises(SpecError) as caught:
            provider.plan(Job.make(entry_point="t.py"), layout())
        assert caught.value.field == "sagemaker.region"


@pytest.mark.parametrize("missing", ["subnets", "security_group_ids"])
def test_half_a_vpc_is_refused(missing: str) -> None:
    with pytest.raises(SpecError) as caught:
        Provider(**{**ACCOUNT, **VPC, missing: ()})
    why = "is not set, and a VPC needs both subnets and security_group_ids"
    assert str(caught.value) == f"sagemaker.{missing}: {why}"


@for_each(("page", "tag"), [("https://ci.example/runs/12", "https://ci.example/runs/12"), ("https://ci/?run=12", "12")])
def test_tags_name_the_run_of_ci_by_its_page_or_by_its_number(page: str, tag: str) -> None:
    at = layout(origin={"revision": "a1b2", "ci_run": "12", "ci_url": page})
    body = Provider(**ACCOUNT).plan(Job.make(entry_point="t.py"), at).body
    tags = {item["Key"]: item["Value"] for item in body["Tags"]}
    assert (tags["cloudtrain:revision"], tags["cloudtrain:ci"]) == ("a1b2", tag)


# ----------------------------------------------------------------------------------------------- against the real rules

TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=300)
URLS = st.one_of(
    st.just("s3://data/x"),
    st.just("s3://data/x.csv"),
    st.just("efs://fs-0123abcd/x"),
    st.just("fsx://fs-0123abcd/m"),
    st.builds("s3://b/{}".format, st.text("abc/é ?#&=", max_size=1200)),
)
TYPES = st.sampled_from(["ml.m5.xlarge", "ml.g5.xlarge", "ml.g7.2xlarge", "ml.p3dn.24xlarge", "ml.zz.1", "x" * 80, "ü"])
GPUS = st.lists(
    st.sampled_from(
        ["A10G:1", "H100:8", "A100:8", "A100-80GB:8", "L4:1", "T4:1", "T4:4", "V100:8", "H200:8", "GB200:4"]
    ),
    max_size=7,
)
OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "Environment": st.dictionaries(st.text("aB_1=é", max_size=4), TEXT, max_size=3),
        "HyperParameters": st.dictionaries(TEXT, TEXT, max_size=2),
        "RetryStrategy": st.fixed_dictionaries({"MaximumRetryAttempts": st.integers(-1, 40)}),
        "ResourceConfig": st.fixed_dictionaries(
            {"TrainingPlanArn": st.just("arn:aws:sagemaker:eu-west-1:123456789012:training-plan/p")}
        ),
        "AlgorithmSpecification": st.one_of(
            st.fixed_dictionaries(
                {"MetricDefinitions": st.lists(st.fixed_dictionaries({"Name": TEXT, "Regex": TEXT}))}
            ),
            st.fixed_dictionaries({"TrainingImageConfig": st.just({"TrainingRepositoryAccessMode": "Platform"})}),
        ),
        "OutputDataConfig": st.fixed_dictionaries({"CompressionType": st.sampled_from(["GZIP", "NONE", "zip"])}),
        "ExperimentConfig": st.dictionaries(st.sampled_from(["ExperimentName", "TrialName", "x"]), TEXT, max_size=2),
        "InputDataConfig": st.fixed_dictionaries({"*": st.fixed_dictionaries({"ContentType": TEXT})}),
    },
)
JOBS = st.fixed_dictionaries(
    {},
    optional={
        "name": st.from_regex(r"[a-z0-9](-?[a-z0-9]){0,30}", fullmatch=True),
        "image": st.one_of(st.just(f"{ECR}/a:1"), st.just("ghcr.io/a:1"), st.text("ab:/@.-", min_size=1, max_size=300)),
        "instance_count": st.integers(1, 4096),
        "instance_type": TYPES,
        "gpu": GPUS,
        "cpus": st.integers(1, 500),
        "memory_gb": st.integers(1, 5000),
        "disk_gb": st.integers(1, 100_000),
        "spot": st.booleans(),
        "max_runtime": st.integers(1, 3_000_000),
        "max_wait": st.integers(1, 3_000_000),
        "max_cost": st.floats(0.0001, 1e9),
        "retries": st.integers(0, 100),
        "tags": st.dictionaries(TEXT.filter(bool), TEXT, max_size=4),
        "inputs": st.dictionaries(
            st.from_regex(r"[A-Za-z][A-Za-z0-9_-]{0,62}", fullmatch=True),
            st.fixed_dictionaries(
                {"url": URLS}, optional={"mode": st.sampled_from(["auto", "copy", "mount"]), "shard": st.booleans()}
            ),
            max_size=4,
        ),
        "env": st.dictionaries(st.from_regex(r"[A-Z]{1,8}", fullmatch=True), TEXT, max_size=2),
        "args": st.lists(TEXT, max_size=2),
        "resume_from": st.just("s3://bucket/store/runs/q/live/checkpoints"),
        "options": st.fixed_dictionaries({"sagemaker": OPTIONS}),
    },
)
SETTINGS = st.fixed_dictionaries(
    {},
    optional={
        "subnets": st.lists(st.text("subnet-09", min_size=1, max_size=40), max_size=3),
        "security_group_ids": st.lists(st.just("sg-1"), max_size=6),
        "volume_kms_key": st.text("ab:/_- ", max_size=20),
        "output_kms_key": st.text("ab:/_- ", max_size=20),
        "keep_alive_period": st.integers(0, 30_000),
        "enable_network_isolation": st.booleans(),
        "encrypt_inter_container_traffic": st.booleans(),
        "debug_shell": st.booleans(),
        "region": st.sampled_from(["eu-west-1", "us-east-1", "cn-north-1"]),
    },
)


def _planned(given: dict[str, Any], fields: dict[str, Any]) -> Request | SpecError:
    try:
        return planned(given, **fields)
    except SpecError as exc:
        return exc


@pytest.mark.slow
@settings(max_examples=examples(200), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(SETTINGS, JOBS)
def test_what_is_planned_is_what_the_service_takes(given: dict[str, Any], fields: dict[str, Any]) -> None:
    """Check against botocore's model, read strictly, and the rules of our FakePlatform that are in no model."""
    request = _planned(given, fields)
    event("refused" if isinstance(request, SpecError) else "planned")
    if isinstance(request, SpecError):
        assert request.field
        assert "\n" not in str(request)
        return
    problems = model_errors("CreateTrainingJob", request.body)
    assert list(broken(request.body)) == []
    known = limits()["shapes"]["TrainingInstanceType"]["enum"]
    unknown = [name for name in request.instance_types if name not in known]
    assert [p for p in problems if "Type' failed to satisfy constraint: Member must satisfy enum" not in p] == []
    assert len(problems) == len(unknown)
    assert broken_rules(request.body) == []
    Provider(**{**ACCOUNT, **given}).launch_spec(request)


# -------------------------------------------------------------------------------------------------------- started nodes


def test_nodes_of_a_request() -> None:
    request = planned(gpu="A10G:4", instance_count=12, inputs={"train": "s3://data/x", "one": "s3://data/y.csv"})
    simulation = Provider(**ACCOUNT).launch_spec(request)
    assert [node.hostname for node in simulation.nodes] == [f"algo-{i}" for i in range(1, 13)]
    node = simulation.nodes[1]
    assert (node.gpus, node.cpus, node.platform) == (4, 48, "linux/amd64")
    mounts = {mount.path: (mount.url, mount.kind) for mount in node.mounts}
    assert mounts["/opt/ml/cloudtrain/live"] == ("s3://bucket/store/runs/r/live", "sync")
    assert mounts["/opt/ml/input/data/train"] == ("s3://data/x", "copy")
    assert mounts["/opt/ml/input/data/one/y.csv"] == ("s3://data/y.csv", "copy")
    resources = json.loads(node.files["/opt/ml/input/config/resourceconfig.json"])
    assert resources["current_host"] == "algo-2"
    assert resources["hosts"][:3] == ["algo-1", "algo-10", "algo-11"], "the platform sorts them as text"
    assert (simulation.rules.stop_signal, simulation.rules.stop_grace) == ("SIGTERM", 120)
    assert simulation.rules.restart_on == ()


def test_the_catalogue_knows_sagemakers_machines() -> None:
    """Check that the catalogue has the SDK's machines, without Trainium and those that EC2 does not describe."""
    known = {machine.instance_type for machine in catalog.machines("sagemaker")}
    assert known <= set(limits()["shapes"]["TrainingInstanceType"]["enum"])
    assert {"ml.m5.xlarge", "ml.c5.xlarge", "ml.g5.xlarge", "ml.p5.48xlarge"} <= known


# ----------------------------------------------------------------------------------- downloads of a restart, disk space


ISOLATED = {"enable_network_isolation": True}


@for_each(
    ("settings", "job", "kept", "note"),
    [
        ({}, {}, 0, ""),
        ({}, {"spot": True}, 3, "the newest checkpoint and what pointers name,"),
        ({}, {"spot": True, "keep_checkpoints": 5}, 5, "the newest checkpoint and what pointers name,"),
        ({}, {"retries": 2}, 0, "the newest checkpoint and what pointers name,"),
        ({}, {"keep_checkpoints": 2}, 2, ""),
        (ISOLATED, {"spot": True}, 3, "3 kept checkpoints (default; keep_checkpoints)"),
        (ISOLATED, {"spot": True, "keep_checkpoints": 5}, 5, "5 kept checkpoints (keep_checkpoints)"),
        (ISOLATED, {"spot": True, "keep_checkpoints": 0}, 0, "every checkpoint so far (keep_checkpoints)"),
        (ISOLATED, {"retries": 2}, 0, "every checkpoint so far (default; keep_checkpoints)"),
    ],
)
def test_a_spot_job_keeps_few_checkpoints_and_its_plan_names_the_downloads(
    settings: dict[str, Any], job: dict[str, Any], kept: int, note: str
) -> None:
    request = planned(settings, **job)
    assert request.context["keep_checkpoints"] == kept
    notes = [text for text in request.notes if text.startswith("each restart downloads to every node: ")]
    assert len(notes) == bool(note)
    assert note in "".join(notes)


@for_each(
    ("job", "volume"),
    [
        ({}, 30 + 16),  # ml.m5.xlarge has 16 GiB
        ({"instance_type": "ml.p3.2xlarge"}, 30 + 4 * 16),
        ({"instance_type": "ml.p3.16xlarge"}, 30 + 4 * 8 * 16),
        ({"instance_type": "ml.r5.24xlarge"}, 30 + 768),
        ({"gpu": "A10G:1"}, 30),  # it has NVMe disks and no others
        ({"instance_type": "ml.p3.16xlarge", "disk_gb": 100}, 100),
        ({"instance_type": "ml.m99.large"}, 30),
    ],
)
def test_the_volume_has_room_for_the_machines_checkpoints(job: dict[str, Any], volume: int) -> None:
    assert planned(**job).body["ResourceConfig"]["VolumeSizeInGB"] == volume


def test_a_machine_of_unknown_memory_has_the_smallest_volume() -> None:
    assert _volume(catalog.Machine(instance_type="ml.new.large")) == 30
