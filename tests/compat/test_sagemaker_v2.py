"""The migration from SageMaker's SDK v2. Every keyword of its PyTorch is carried over, refused or without effect. The
planned request shows the keywords that are carried over."""

from __future__ import annotations

import string
from collections.abc import Mapping
from functools import reduce
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rows import for_each

from cloudtrain.compat.keywords import CARRIED, REFUSED, WITHOUT_EFFECT, inputs_of
from cloudtrain.compat.sagemaker_v2 import (
    PyTorch,
    Session,
    TrainingInput,
    get_execution_role,
)
from cloudtrain.errors import AuthError, NotFoundError, SpecError
from cloudtrain.estimator import RunFailedError
from cloudtrain.job.job import Input
from cloudtrain.runtime.launch import script_arguments

#: The keywords of PyTorch, Framework and EstimatorBase in sagemaker 2.257.7, the last v2 release. Each class passes
#: unknown keywords to the next.
V2 = [
    "entry_point", "framework_version", "py_version", "source_dir", "hyperparameters", "image_uri", "distribution",
    "compiler_config", "training_recipe", "recipe_overrides", "container_log_level", "code_location", "dependencies",
    "enable_network_isolation", "git_config", "checkpoint_s3_uri", "checkpoint_local_path", "enable_sagemaker_metrics",
    "role", "instance_count", "instance_type", "keep_alive_period_in_seconds", "volume_size", "volume_kms_key",
    "max_run", "input_mode", "output_path", "output_kms_key", "base_job_name", "sagemaker_session", "tags", "subnets",
    "security_group_ids", "model_uri", "model_channel_name", "metric_definitions", "encrypt_inter_container_traffic",
    "use_spot_instances", "max_wait", "rules", "debugger_hook_config", "tensorboard_output_config", "profiler_config",
    "disable_profiler", "environment", "max_retry_attempts", "instance_groups", "training_repository_access_mode",
    "training_repository_credentials_provider_arn", "enable_infra_check", "container_entry_point",
    "container_arguments", "disable_output_compression", "enable_remote_debug", "enable_session_tag_chaining",
    "training_plan", "instance_placement_config",
]  # fmt: skip
ROLE = "arn:aws:iam::123456789012:role/training"
ECR = "123456789012.dkr.ecr.eu-west-1.amazonaws.com/trainer:1"
KMS = "arn:aws:kms:eu-west-1:123456789012:key/11111111-2222-3333-4444-555555555555"
PLAN = "arn:aws:sagemaker:eu-west-1:123456789012:training-plan/mine"
VPC = {"subnets": ["subnet-1"], "security_group_ids": ["sg-1"]}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Enter a folder with a script, a source folder and a library. Its only setting is a region."""
    for name in ("src", "lib"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.py").write_text("x = 1\n")
    for script in (tmp_path / "train.py", tmp_path / "src/train.py"):
        script.write_text("print('hello')\n")
    (tmp_path / "notes.txt").write_text("not code")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    for name in ("AWS_PROFILE", "AWS_DEFAULT_REGION", "CLOUDTRAIN_STORE", "CLOUDTRAIN_PROVIDER"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def pytorch(**given: Any) -> PyTorch:
    return PyTorch(**{"entry_point": "train.py", "role": ROLE, "instance_type": "ml.m5.xlarge", **given})


def document(estimator: PyTorch, inputs: Any = None) -> dict[str, Any]:
    """Return the plan as JSON, with its request's body as ``body`` and the channels by name as ``channels``."""
    plan = estimator.plan(inputs).document()
    body = plan["request"]["body"]
    channels = {channel["ChannelName"]: channel for channel in body["InputDataConfig"]}
    tags = {tag["Key"]: tag["Value"] for tag in body["Tags"]}
    files = [file["path"] for file in plan["code"]["files"]]
    return {**plan, "body": body, "channels": channels, "all_tags": tags, "names": files}


def at(data: Any, path: str) -> Any:
    return reduce(lambda value, key: value.get(key) if isinstance(value, Mapping) else None, path.split("/"), data)


# ------------------------------------------------------------------------------------------------------- every keyword


def test_every_keyword_of_v2_has_one_fate() -> None:
    tables = [set(CARRIED), set(WITHOUT_EFFECT), set(REFUSED)]
    assert set.union(*tables) == set(V2)
    assert sum(map(len, tables)) == len(V2)


BOTO = SimpleNamespace(region_name="eu-central-1", profile_name="team", get_credentials=lambda: None)
SESSION = Session(BOTO, default_bucket="ours", default_bucket_prefix="vision")
#: For each keyword: its value, the key in `document`, and the expected content.
SEEN: dict[str, tuple[dict[str, Any], str, Any]] = {
    "entry_point": ({"entry_point": "src/src.py"}, "request/context/entry_point", "src.py"),
    "source_dir": ({"source_dir": "src"}, "names", ["src.py", "train.py"]),
    "dependencies": ({"dependencies": ["lib"]}, "names", ["lib/lib.py", "train.py"]),
    "hyperparameters": ({"hyperparameters": {"lr": 0.1}}, "request/context/hyperparameters", {"lr": 0.1}),
    "environment": ({"environment": {"A": "b"}}, "request/context/env", {"A": "b"}),
    "distribution": ({"distribution": {"torch_distributed": {"enabled": True}}}, "job/launcher", "torchrun"),
    "instance_count": ({"instance_count": 3}, "body/ResourceConfig/InstanceCount", 3),
    "instance_type": ({"instance_type": "ml.p4d.24xlarge"}, "body/ResourceConfig/InstanceType", "ml.p4d.24xlarge"),
    "image_uri": ({"image_uri": ECR}, "body/AlgorithmSpecification/TrainingImage", ECR),
    "framework_version": (
        {"framework_version": "2.3"},
        "body/AlgorithmSpecification/TrainingImage",
        "763104351884.dkr.ecr.eu-west-1.amazonaws.com/pytorch-training:2.3.0-cpu-py311",
    ),
    "role": ({"role": ROLE + "-2"}, "body/RoleArn", ROLE + "-2"),
    "volume_size": ({"volume_size": 77}, "body/ResourceConfig/VolumeSizeInGB", 77),
    "volume_kms_key": ({"volume_kms_key": KMS}, "body/ResourceConfig/VolumeKmsKeyId", KMS),
    "output_kms_key": ({"output_kms_key": KMS}, "body/OutputDataConfig/KmsKeyId", KMS),
    "max_run": ({"max_run": 7200}, "body/StoppingCondition/MaxRuntimeInSeconds", 7200),
    "max_wait": (
        {"use_spot_instances": True, "max_run": 3600, "max_wait": 7200},
        "body/StoppingCondition",
        {"MaxRuntimeInSeconds": 3600, "MaxWaitTimeInSeconds": 7200},
    ),
    "use_spot_instances": ({"use_spot_instances": True}, "body/EnableManagedSpotTraining", True),
    "keep_alive_period_in_seconds": (
        {"keep_alive_period_in_seconds": 600},
        "body/ResourceConfig/KeepAlivePeriodInSeconds",
        600,
    ),
    "output_path": (
        {"output_path": "s3://mine/models"},
        "body/OutputDataConfig/S3OutputPath",
        "s3://mine/models/runs/train-plan/native/",
    ),
    "disable_output_compression": (
        {"disable_output_compression": True},
        "body/OutputDataConfig/CompressionType",
        "NONE",
    ),
    "base_job_name": ({"base_job_name": "My_Job"}, "run_id", "my-job-plan"),
    "tags": ({"tags": [{"Key": "team", "Value": "vision"}]}, "all_tags/team", "vision"),
    "subnets": (VPC, "body/VpcConfig/Subnets", ["subnet-1"]),
    "security_group_ids": (VPC, "body/VpcConfig/SecurityGroupIds", ["sg-1"]),
    "encrypt_inter_container_traffic": (
        {"encrypt_inter_container_traffic": True},
        "body/EnableInterContainerTrafficEncryption",
        True,
    ),
    "enable_network_isolation": ({"enable_network_isolation": True}, "body/EnableNetworkIsolation", True),
    "enable_remote_debug": ({"enable_remote_debug": True}, "body/RemoteDebugConfig/EnableRemoteDebug", True),
    "input_mode": ({"input_mode": "FastFile"}, "channels/training/InputMode", "FastFile"),
    "model_uri": (
        {"model_uri": "s3://b/model.tar.gz"},
        "channels/model/DataSource/S3DataSource/S3Uri",
        "s3://b/model.tar.gz",
    ),
    "model_channel_name": (
        {"model_uri": "s3://b/weights/", "model_channel_name": "weights"},
        "channels/weights/DataSource/S3DataSource/S3Uri",
        "s3://b/weights/",
    ),
    "metric_definitions": (
        {"metric_definitions": [{"Name": "loss", "Regex": "loss=(.*)"}]},
        "request/context/metrics",
        {"loss": "loss=(.*)"},
    ),
    "checkpoint_s3_uri": ({"checkpoint_s3_uri": "s3://b/ckpt/"}, "all_tags/checkpoint_s3_uri", "s3://b/ckpt"),
    "sagemaker_session": ({"sagemaker_session": SESSION}, "layout/store", "s3://ours/vision/cloudtrain"),
}


def test_the_table_below_has_every_keyword_that_is_carried_over() -> None:
    assert set(SEEN) == set(CARRIED)


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    """Return the plan without the keyword, made once."""
    return {}


@pytest.mark.filterwarnings("ignore:checkpoint_s3_uri")
@pytest.mark.parametrize("name", SEEN)
def test_what_is_carried_over_is_seen_in_the_plan(name: str, plain: dict[str, Any]) -> None:
    words, path, value = SEEN[name]
    if not plain:
        plain.update(document(pytorch(), "s3://b/data"))
    if name != "model_channel_name":  # it has no effect without another keyword
        assert at(plain, path) != value
    assert at(document(pytorch(**words), "s3://b/data"), path) == value


@for_each("name", REFUSED)
def test_what_is_refused_is_refused_in_one_line_that_says_what_to_do(name: str) -> None:
    with pytest.raises(SpecError) as caught:
        pytorch(**{name: "something"})
    assert str(caught.value) == f"{name}: is not carried over: {REFUSED[name]}"
    assert pytorch(**{name: None}).job == pytorch().job


@pytest.mark.parametrize("name", WITHOUT_EFFECT)
def test_what_has_no_effect_may_have_that_value_alone(name: str) -> None:
    value = WITHOUT_EFFECT[name]
    assert pytorch(**{name: 20 if value is ... else value}).job == pytorch().job
    if value is not ...:
        with pytest.raises(SpecError, match=f"{name}: is carried over as {value!r} alone, not '/elsewhere'"):
            pytorch(**{name: "/elsewhere"})


def test_a_keyword_that_is_none_of_v2_names_the_nearest() -> None:
    with pytest.raises(SpecError, match=r"no such keyword\nhint: did you mean 'instance_count'\?") as caught:
        pytorch(instance_cuont=1)
    assert caught.value.field == "instance_cuont"


@for_each(
    ("words", "line"),
    [
        ({"role": "training"}, "output_path: is not set, and v2's default bucket"),
        ({"role": None}, "output_path: is not set, and v2's default bucket"),
        ({"entry_point": None}, "entry_point: must not be empty"),
        ({"entry_point": "trian.py"}, "source.entry_point: 'trian.py' does not exist"),
        ({"source_dir": "s3://b/code.tar.gz"}, "source.path: 's3://b/code.tar.gz' is not a folder"),
        ({"instance_type": None}, "instance_type: must be a type of machine"),
        ({"instance_type": "local_gpu"}, "instance_type: must be a type of machine"),
        ({"instance_count": 0}, "resources.instance_count: must be 1 or more"),
        ({"max_run": "soon"}, "max_runtime: 'soon' is not a duration"),
        ({"max_wait": 7200}, "max_wait: is for use_spot_instances=True"),
        (
            {"use_spot_instances": True, "max_wait": 60},
            "max_wait: is for use_spot_instances=True, and at least max_run",
        ),
        ({"environment": {"RANK": "1"}}, "env: RANK is set by torchrun"),
        ({"hyperparameters": {"lr": None}}, "hyperparameters.lr: has no value"),
        ({"hyperparameters": {"f": print}}, "hyperparameters.f: "),
        ({"image_uri": "team/trainer:1"}, "image: not supported by provider sagemaker: it pulls from Amazon ECR"),
        ({"framework_version": "1.13"}, "sagemaker.framework_version: no PyTorch 1.13 image"),
        ({"tags": [{"team": "vision"}]}, "tags: must be a list of"),
        ({"input_mode": "Pipe"}, "inputs.training: Pipe is not carried over: FastFile"),
        ({"distribution": {"mpi": {"enabled": True}}}, "distribution.mpi: is not carried over: torchrun"),
        (
            {"distribution": {"smdistributed": {"dataparallel": {"enabled": True}}}},
            "distribution.smdistributed.dataparallel: is not carried over: torchrun",
        ),
        (
            {"distribution": {"pytorchddp": {"enabled": True, "custom_mpi_options": "-x A"}}},
            "distribution.pytorchddp.custom_mpi_options: is not carried over",
        ),
        ({"sagemaker_session": "eu-west-1"}, "sagemaker_session: must be a Session of this module"),
    ],
)
def test_what_is_wrong_is_said_in_one_line_and_in_the_words_of_v2(words: dict[str, Any], line: str) -> None:
    with pytest.raises(SpecError) as caught:
        pytorch(**words).plan("s3://b/data")
    assert str(caught.value).startswith(line), str(caught.value)


@for_each(
    ("words", "line", "hint"),
    [
        ({"metric_definitions": ["loss"]}, "metric_definitions: must be a list of {'Name'", ""),
        (
            {"metric_definitions": [{"Name": "loss", "Regex": "loss"}]},
            "metrics.loss: 'loss' has no group, not one",
            "write it like 'loss ([0-9.]+)'",
        ),
        (
            {"metric_definitions": [{"Name": "loss", "Regex": "loss=([0-9]+(e[0-9]+)?)"}]},
            "metrics.loss: 'loss=([0-9]+(e[0-9]+)?)' has 2 groups, not one",
            "write (?:...) for every group except the group of the number",
        ),
        ({"checkpoint_s3_uri": "/a"}, "checkpoint_s3_uri: '/a' is not a URL of S3", "write s3://BUCKET/PREFIX"),
    ],
)
def test_what_is_wrong_comes_with_a_way_out(words: dict[str, Any], line: str, hint: str) -> None:
    with pytest.raises(SpecError) as caught:
        pytorch(**words)
    assert str(caught.value).startswith(line)
    assert caught.value.hint == hint


# -------------------------------------------------------------------------------------------------- the migrated values


@for_each(
    ("distribution", "launcher", "ranks"),
    [
        ({"torch_distributed": {"enabled": True}}, "torchrun", 16),
        ({"pytorchddp": {"enabled": True}}, "torchrun", 16),
        ({"torch_distributed": {"enabled": False}}, "python", 16),
        ({"mpi": {"enabled": False}}, "python", 16),
        (None, "python", 16),
    ],
)
def test_who_starts_the_ranks(distribution: Any, launcher: str, ranks: int) -> None:
    plan = document(pytorch(instance_type="ml.p4d.24xlarge", instance_count=2, distribution=distribution))
    assert plan["request"]["context"]["launcher"] == launcher
    assert plan["resources"]["ranks"] == ranks


def test_a_shell_script_is_a_command(here: Path) -> None:
    (here / "run.sh").write_text("echo hello\n")
    assert pytorch(entry_point="run.sh").plan().request.context["launcher"] == "command"


def test_without_a_source_folder_the_script_ships_alone(here: Path) -> None:
    (here / "odd [1].py").write_text("print(1)\n")
    for script in ("train.py", "odd [1].py"):
        plan = pytorch(entry_point=script).plan()
        assert [file.path for file in plan.upload.bundle.files] == [script]


def test_a_requirements_file_of_the_source_is_installed(here: Path) -> None:
    assert pytorch(source_dir="src").job.source.requirements is None
    (here / "src/requirements.txt").write_text("einops\n")
    assert pytorch(source_dir=here / "src").job.source.requirements == "requirements.txt"


VALUES = st.one_of(
    st.integers(-(10**9), 10**9),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(string.printable, max_size=8).filter(lambda text: "{" not in text),
    st.booleans(),
    st.lists(st.one_of(st.integers(), st.booleans(), st.text("ab'", max_size=3)), min_size=1, max_size=3),
    st.dictionaries(st.text("abc", min_size=1, max_size=2), st.integers(), min_size=1, max_size=3),
)


@given(st.dictionaries(st.text("abcdefgh_", min_size=1, max_size=4), VALUES, max_size=4))
def test_a_script_gets_the_flags_of_awss_toolkit(values: dict[str, Any]) -> None:
    """The toolkit's rule: one dash before a single letter, a table as k=v,…, all else in Python's notation."""
    flags: list[str] = []
    for key in sorted(values):
        value = values[key]
        text = ",".join(f"{k}={v}" for k, v in sorted(value.items())) if isinstance(value, dict) else str(value)
        flags += [("-" if len(key) == 1 else "--") + key, text]
    job = PyTorch("train.py", hyperparameters=values, role=ROLE, instance_type="ml.m5.xlarge").job
    context = {
        "hyperparameters": dict(sorted(job.hyperparameters.items())),
        "hyperparameter_style": job.hyperparameter_style,
        "args": job.args,
    }
    assert script_arguments(context, {"resume_from": ""}) == flags
    assert job.hyperparameters == values


def test_spot_waits_as_long_as_v2_said() -> None:
    wait = pytorch(use_spot_instances=True, max_run=3600, max_wait=3600).plan().request.body["StoppingCondition"]
    assert wait == {"MaxRuntimeInSeconds": 3600, "MaxWaitTimeInSeconds": 3601}  # a wait is at least a second here


def test_v2_s_positional_arguments() -> None:
    made = PyTorch("train.py", "2.3", "py311", "src", {"lr": 1}, role=ROLE, instance_type="ml.m5.xlarge")
    image = made.plan().request.body["AlgorithmSpecification"]["TrainingImage"]
    assert image.endswith("pytorch-training:2.3.0-cpu-py311")
    assert made.job.hyperparameters == {"lr": 1}


# -------------------------------------------------------------------------------------------------------------- a store


@pytest.mark.parametrize(
    ("words", "setting", "store"),
    [
        ({}, "", "s3://sagemaker-eu-west-1-123456789012/cloudtrain"),
        ({"role": "arn:aws-cn:iam::210987654321:role/a/b"}, "", "s3://sagemaker-eu-west-1-210987654321/cloudtrain"),
        ({"sagemaker_session": Session(SimpleNamespace(**{**vars(BOTO), "region_name": "us-east-1"}))}, "",
         "s3://sagemaker-us-east-1-123456789012/cloudtrain"),
        ({}, "s3://set/store", "s3://set/store"),
        ({"output_path": "s3://mine/models/"}, "s3://set/store", "s3://mine/models"),
    ],
)  # fmt: skip
def test_where_a_run_lies(
    words: dict[str, Any], setting: str, store: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if setting:
        (here / "cloudtrain.toml").write_text(f'store = "{setting}"\n')
    assert pytorch(**words).plan().layout.store == store


def test_without_a_region_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_REGION")
    with pytest.raises(SpecError, match="output_path: is not set"):
        pytorch().plan()


def test_a_session_s_own_keys_are_no_way_back() -> None:
    given = SimpleNamespace(**{**vars(BOTO), "get_credentials": lambda: SimpleNamespace(method="explicit")})
    with pytest.raises(SpecError, match="boto_session: holds keys that were given by hand"):
        Session(given)


# ------------------------------------------------------------------------------------------------------ session, role


def test_a_session_says_region_profile_and_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    made = pytorch(sagemaker_session=SESSION)
    assert (made.settings["region"], made.settings["profile"]) == ("eu-central-1", "team")
    assert made.plan().layout.store == "s3://ours/vision/cloudtrain"
    assert (Session().boto_region_name, SESSION.default_bucket()) == ("eu-west-1", "ours")
    monkeypatch.setattr("cloudtrain.providers.sagemaker.Provider.principal", lambda self: ROLE)
    assert Session().default_bucket() == "sagemaker-eu-west-1-123456789012"


def test_the_role_is_the_setting_or_the_notebook_s_or_the_caller_s(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    caller = "arn:aws:iam::123456789012:user/me"
    monkeypatch.setattr("cloudtrain.providers.sagemaker.Provider.principal", lambda self: caller)
    monkeypatch.setattr("cloudtrain.compat.sagemaker_v2.METADATA", here / "metadata.json")
    with pytest.raises(SpecError, match="role: arn:aws:iam::123456789012:user/me is not a role") as caught:
        get_execution_role()
    assert caught.value.hint.startswith("add to cloudtrain.toml: [sagemaker] role =")
    (here / "metadata.json").write_text('{"ExecutionRoleArn": "arn:aws:iam::123456789012:role/notebook"}')
    assert get_execution_role(Session()) == "arn:aws:iam::123456789012:role/notebook"
    (here / "cloudtrain.toml").write_text(f'[sagemaker]\nrole = "{ROLE}"\n')
    assert get_execution_role() == ROLE


@pytest.mark.parametrize("may_look", [True, False])
def test_the_role_of_a_caller_that_has_assumed_one(may_look: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def call(self: Any, service: str, operation: str, **words: Any) -> Any:
        assert (service, operation, words) == ("iam", "get_role", {"RoleName": "training"})
        if not may_look:
            raise AuthError("AccessDenied")
        return {"Role": {"Arn": "arn:aws:iam::123456789012:role/service-role/training"}}

    caller = "arn:aws:sts::123456789012:assumed-role/training/me"
    monkeypatch.setattr("cloudtrain.providers.sagemaker.Provider.principal", lambda self: caller)
    monkeypatch.setattr("cloudtrain.providers.sagemaker.api.Account.call", call)
    path = "service-role/" if may_look else ""
    assert get_execution_role() == f"arn:aws:iam::123456789012:role/{path}training"


# -------------------------------------------------------------------------------------------------------------- inputs


@for_each(
    ("given", "mode", "expected"),
    [
        ("s3://b/x", None, {"training": Input(url="s3://b/x")}),
        ("s3://b/x", "File", {"training": Input(url="s3://b/x")}),
        ("s3://b/x", "FastFile", {"training": Input(url="s3://b/x", mode="mount")}),
        ({"a": "s3://b/a", "b": "file:///b"}, None, {"a": Input(url="s3://b/a"), "b": Input(url="file:///b")}),
        (TrainingInput("s3://b/x"), None, {"training": Input(url="s3://b/x")}),
        (
            {"t": TrainingInput("s3://b/x", distribution="ShardedByS3Key", input_mode="FastFile", content_type="csv")},
            "File",
            {"t": Input(url="s3://b/x", mode="mount", shard=True)},
        ),
        (TrainingInput("s3://b/x", input_mode="File"), "FastFile", {"training": Input(url="s3://b/x")}),
        (None, "FastFile", {}),
    ],
)  # fmt: skip
def test_inputs(given: Any, mode: str | None, expected: dict[str, Input]) -> None:
    assert inputs_of(given, input_mode=mode) == expected


def test_other_inputs_that_are_none() -> None:
    with pytest.raises(SpecError, match=r"inputs\.training: must be a URL or a TrainingInput, not int"):
        inputs_of(7)
    with pytest.raises(SpecError, match=r"inputs\.training\.distribution: 'Sharded' is not"):
        inputs_of(TrainingInput("s3://b/x", distribution="Sharded"))
    with pytest.raises(TypeError, match="compression"):
        TrainingInput("s3://b/x", compression="Gzip")  # type: ignore[call-arg]


# -------------------------------------------------------------------------------------------------------------- methods


def test_before_a_job_there_is_no_model() -> None:
    with pytest.raises(SpecError, match="there is no job yet"):
        _ = pytorch().model_data


@pytest.mark.parametrize("name", ["My-Job", "a_b", "j" * 41])
def test_a_job_name_is_a_run_id(name: str) -> None:
    with pytest.raises(SpecError, match=f"run_id: '{name}' is not a run id: lower-case letters"):
        pytorch().plan(job_name=name)


# ----------------------------------------------------------------------------------------------------- on this machine


SCRIPT = """
import argparse, json, os
flags = argparse.ArgumentParser()
flags.add_argument("-e", type=int)
flags.add_argument("--model-dir", default=os.environ["SM_MODEL_DIR"])
flags.add_argument("--train", default=os.environ["SM_CHANNEL_TRAINING"])
flags.add_argument("--amp", type=lambda text: text == "True")
given = flags.parse_args()
assert json.loads(os.environ["SM_HPS"]) == {"e": 3, "amp": True}, os.environ["SM_HPS"]
assert os.environ["SM_NUM_GPUS"] == "0"
words = open(os.path.join(given.train, "words")).read()
print("trained", given.e, given.amp, words, flush=True)
assert words == "good", "THE CAUSE"
with open(os.path.join(given.model_dir, "model.txt"), "w") as model:
    model.write("weights")
"""


@pytest.fixture
def local(here: Path) -> PyTorch:
    """Return an estimator of v2's local mode. Its script reads the usual variables of SageMaker scripts."""
    (here / "train.py").write_text(SCRIPT)
    for name in ("good", "bad"):
        (here / name).mkdir()
        (here / name / "words").write_text(name)
    return pytorch(instance_type="local", hyperparameters={"e": 3, "amp": True}, max_run=60)


@pytest.mark.slow
def test_a_script_for_sagemaker_runs_here(local: PyTorch, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = local.fit(f"file://{here}/good", job_name="local-1")
    assert "trained 3 True good" in capsys.readouterr().out
    job = local.latest_training_job
    assert job is not None
    assert (job.name, job.job_name) == ("local-1", "local-1")
    run.pull("pulled")
    (model,) = (here / "pulled/artifacts").rglob("model.txt")
    assert local.model_data == f"{run.url}/live/artifacts/node-0/"
    assert model.read_text() == "weights"
    again = PyTorch.attach("local-1")
    assert (again.model_data, again.job.hyperparameters) == (local.model_data, {"e": 3, "amp": True})
    with pytest.raises(SpecError, match="whose code is not here"):
        again.fit()
    with pytest.raises(NotFoundError, match="no run 'local-2'"):
        PyTorch.attach("local-2")


SAVES = """
import os, pathlib
folder = pathlib.Path(os.environ["CLOUDTRAIN_CHECKPOINT_DIR"])
found = sorted(path.name for path in folder.iterdir())
print("found", found, flush=True)
(folder / f"step-{len(found) + 1}").write_text("weights")
"""


@pytest.mark.slow
def test_jobs_with_one_checkpoint_uri_continue_each_other(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "train.py").write_text(SAVES)
    words = {"instance_type": "local", "max_run": 60}
    with pytest.warns(UserWarning, match="checkpoint_s3_uri: checkpoints are kept in the run") as told:
        made = pytorch(checkpoint_s3_uri="s3://b/one/", **words)
    assert len(told) == 1
    first = made.fit(job_name="first")
    second = made.fit(job_name="second")
    assert capsys.readouterr().out.count("found ['step-1']") == 1
    assert second.job.resume_from == first.url
    assert made.fit(job_name="first", logs="None").url == first.url, "the same job again"
    with pytest.warns(UserWarning, match="s3://b/other"):
        other = pytorch(checkpoint_s3_uri="s3://b/other", **words)
    assert other.fit(job_name="other", logs="None").job.resume_from is None


@pytest.mark.slow
def test_a_job_that_fails_raises_and_is_still_the_latest(local: PyTorch) -> None:
    with pytest.raises(RunFailedError, match="THE CAUSE"):
        local.fit({"training": "bad"}, logs="None")
    assert local.latest_training_job is not None
    with pytest.raises(RunFailedError, match="THE CAUSE"):
        PyTorch.attach(local.latest_training_job.run.url)


def test_with_an_image_it_is_a_container_of_this_machine() -> None:
    plan = pytorch(instance_type="local", image_uri="team/trainer:1").plan()
    assert (plan.provider_name, plan.job.image) == ("docker", "team/trainer:1")
