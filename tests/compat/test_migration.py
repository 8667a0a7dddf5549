"""docs/migration.md: each sample and its counterpart mean the same. Our half is planned, v2's is sent."""

from __future__ import annotations

import ast
import itertools
import json
import re
import shlex
import tarfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from clients import at_work
from pages import Block, blocks, commands, section, table
from worlds.azureml.world import AzureMLWorld
from worlds.sagemaker.plane import Plane
from worlds.sagemaker.world import SageMakerWorld
from worlds.vertex.world import VertexWorld

from cloudtrain import Estimator, cli
from cloudtrain.compat.keywords import CARRIED, REFUSED, WITHOUT_EFFECT
from cloudtrain.compat.sagemaker_v2 import PyTorch
from cloudtrain.estimator import RunFailedError
from cloudtrain.testing.platform import FakePlatform

PAGE = "docs/migration.md"
SAMPLES = ("v3", "torchx", "sky", "gcloud", "az")
DATA = {"train": "s3://my-data/digits/"}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Enter the folder that the page makes, with only its settings."""
    for block in blocks(PAGE):
        if file := block.value("file"):
            (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / file).write_text(block.text)
    monkeypatch.chdir(tmp_path)
    for name in ("AWS_PROFILE", "CLOUDTRAIN_STORE", "CLOUDTRAIN_PROVIDER", "CLOUDTRAIN_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def sample(name: str) -> list[Block]:
    """Return the blocks of a pair, the old one first."""
    found = [block for block in blocks(PAGE) if block.value("example") == name]
    assert len(found) == 2, f"{PAGE}: {name} is no pair"
    return found


def planned(words: Sequence[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """Return the JSON that the command line ``cloudtrain plan …`` prints."""
    assert list(words[:2]) == ["cloudtrain", "plan"]
    assert cli.main(["plan", "--json", *words[2:]]) == 0, capsys.readouterr().err
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


@pytest.fixture
def ours(request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """Return the plan of the new half of the pair that the test names."""
    new = sample(request.param)[1]
    if new.language == "toml":
        return planned(["cloudtrain", "plan", str(new.value("file")), "--profile", "aws"], capsys)
    [words] = commands(new.text)
    return planned(words, capsys)


def old(name: str) -> Any:
    """Parse the old half: YAML as data, a command as its words, Python as the constants of its calls' keywords."""
    block = sample(name)[0]
    if block.language == "text":
        return yaml.safe_load(block.text)
    if block.language == "sh":
        return shlex.split(block.text.replace("\\\n", " "))
    calls = [node for node in ast.walk(ast.parse(block.text)) if isinstance(node, ast.Call)]
    return {
        word.arg: ast.literal_eval(word.value)
        for call in calls
        for word in call.keywords
        if isinstance(word.value, (ast.Constant, ast.Dict))
    }


def by(name: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("ours", [name], indirect=True)


# ----------------------------------------------------------------------------------------------------------- the pairs


def test_there_is_a_pair_for_each_section() -> None:
    found = {block.value("example") for block in blocks(PAGE)} - {None}
    assert found == {"v2-before", "v2-after", *SAMPLES}


@by("v3")
def test_sagemaker_v3(ours: dict[str, Any]) -> None:
    theirs, body = old("v3"), ours["request"]["body"]
    assert body["ResourceConfig"]["InstanceType"] == theirs["instance_type"]
    assert body["ResourceConfig"]["InstanceCount"] == theirs["instance_count"]
    assert body["EnableManagedSpotTraining"] is theirs["enable_managed_spot_training"]
    assert body["StoppingCondition"] == {
        "MaxRuntimeInSeconds": theirs["max_runtime_in_seconds"],
        "MaxWaitTimeInSeconds": theirs["max_wait_time_in_seconds"],
    }
    assert body["AlgorithmSpecification"]["TrainingImage"] == theirs["training_image"]
    assert body["RoleArn"] == theirs["role"]
    assert {name: float(value) for name, value in ours["job"]["hyperparameters"].items()} == theirs["hyperparameters"]
    assert ours["job"]["env"] == theirs["environment"]
    assert {name: item["url"] for name, item in ours["job"]["inputs"].items()} == {
        theirs["channel_name"]: theirs["data_source"]
    }


@by("torchx")
def test_torchx(ours: dict[str, Any]) -> None:
    words = old("torchx")
    flags = dict(itertools.pairwise(words))
    nodes, ranks = map(int, flags["-j"].split("x"))
    assert ours["resources"]["instance_count"] == nodes
    assert ours["request"]["context"]["processes"] == ranks
    assert ours["resources"]["instance_types"] == [flags["-h"].replace("aws_", "ml.")]
    assert ours["job"]["name"] == flags["--name"]
    assert ours["job"]["retries"] == int(flags["--max_retries"])
    assert [f"{key}={value}" for key, value in ours["job"]["env"].items()] == [flags["--env"]]
    assert ours["job"]["args"] == words[words.index("--") + 1 :]
    assert f"{ours['source']['path']}/{ours['code']['entry_point']}".endswith(flags["--script"])


@by("sky")
def test_skypilot(ours: dict[str, Any], here: Path) -> None:
    theirs = old("sky")
    assert ours["job"]["name"] == theirs["name"]
    assert ours["resources"]["instance_count"] == theirs["num_nodes"]
    gpu, count = theirs["resources"]["accelerators"].split(":")
    assert [re.sub(r"-\d+GB", "", name) for name in ours["resources"]["gpu"]] == [f"{gpu}:{count}"]
    assert ours["request"]["body"]["EnableManagedSpotTraining"] is theirs["resources"]["use_spot"]
    assert ours["job"]["retries"] == theirs["resources"]["job_recovery"]["max_restarts_on_errors"]
    assert ours["job"]["env"] == theirs["envs"]
    assert ours["code"]["root"] == str(here / theirs["workdir"])
    [(mount, data)] = theirs["file_mounts"].items()
    assert ours["inputs"]["train"]["url"].rstrip("/") == data["source"]
    assert ours["inputs"]["train"]["mode"] == data["mode"].lower()
    script = shlex.split(theirs["run"].replace("\\\n", " "))
    theirs_args = script[script.index(ours["code"]["entry_point"]) + 1 :]
    assert [arg.replace("{inputs.train}", mount) for arg in ours["job"]["args"]] == theirs_args


@pytest.mark.slow
@by("gcloud")
def test_gcloud(ours: dict[str, Any]) -> None:
    """The old spec is one for Google's client. Ours requests the same machines, image and time."""
    from google.cloud.aiplatform_v1.types import CustomJobSpec
    from google.protobuf import json_format

    spec = CustomJobSpec(json_format.ParseDict(old("gcloud"), CustomJobSpec.pb(CustomJobSpec())))
    asked = ours["request"]["body"]["jobSpec"]
    mine = CustomJobSpec(json_format.ParseDict(asked, CustomJobSpec.pb(CustomJobSpec()), ignore_unknown_fields=True))
    assert [(pool.machine_spec, pool.replica_count) for pool in mine.worker_pool_specs] == [
        (pool.machine_spec, pool.replica_count) for pool in spec.worker_pool_specs
    ]
    assert mine.scheduling.timeout == spec.scheduling.timeout
    for pool in spec.worker_pool_specs:
        container = pool.container_spec
        assert {container.image_uri} == {other.container_spec.image_uri for other in mine.worker_pool_specs}
        assert {item.name: item.value for item in container.env} == ours["job"]["env"]
        args = [arg.replace("{inputs.train}", "/gcs/my-data/digits") for arg in ours["job"]["args"]]
        assert args == list(container.args)
    assert ours["request"]["body"]["labels"]["team"] == "vision"
    assert ours["inputs"]["train"]["url"].rstrip("/") == "gs://my-data/digits"


@pytest.mark.slow
@by("az")
def test_az_ml(ours: dict[str, Any], here: Path) -> None:
    """The old job is one for Azure's client. Ours requests the same."""
    from azure.ai.ml import load_job

    (here / "job.yml").write_text(sample("az")[0].text)
    job, body = load_job(here / "job.yml"), ours["request"]["body"]
    assert body["experiment_name"] == job.experiment_name
    assert body["environment"] == job.environment
    assert body["resources"]["instance_type"] == job.resources.instance_type
    assert body["resources"]["instance_count"] == job.resources.instance_count
    assert body["limits"]["timeout"] == job.limits.timeout
    assert ours["request"]["context"]["processes"] == job.distribution.process_count_per_instance
    assert {**body["tags"], **job.tags} == body["tags"]
    assert ours["job"]["env"] == job.environment_variables
    assert body["inputs"]["train"]["path"] == job.inputs["train"].path
    assert body["inputs"]["train"]["mode"] == job.inputs["train"].mode
    args = [arg.replace("{inputs.train}", "${{inputs.train}}") for arg in ours["job"]["args"]]
    assert job.command.split() == ["python", ours["code"]["entry_point"], *args]
    assert str(here / "src") == ours["code"]["root"]


# --------------------------------------------------------------------------------------------------- SageMaker's SDK v2


def halves() -> tuple[str, str]:
    before, after = ([b.text for b in blocks(PAGE) if b.value("example") == name] for name in ("v2-before", "v2-after"))
    return before[0], after[0]


def test_only_the_import_changes() -> None:
    before, after = (text.splitlines() for text in halves())
    changed = [(a, b) for a, b in zip(before, after, strict=True) if a != b]
    assert changed == [
        ("from sagemaker.pytorch import PyTorch", "from cloudtrain.compat.sagemaker_v2 import PyTorch"),
    ]


def test_v2_and_the_native_form_plan_the_same() -> None:
    """Compare machines, limits, image and data in the same store. v2 also packs the model, and has no stall timeout."""
    role = "arn:aws:iam::123456789012:role/training"
    shared: dict[str, Any] = {"entry_point": "train.py", "source_dir": "src", "hyperparameters": {"lr": 0.1}}
    kind: dict[str, Any] = {"instance_count": 2, "instance_type": "ml.p4d.24xlarge"}
    torchrun = {"torch_distributed": {"enabled": True}}
    v2 = PyTorch(**shared, **kind, role=role, distribution=torchrun, max_run=43200).plan(DATA, job_name="same")
    native = Estimator(**shared, **kind, max_runtime="12h", profile="aws").plan(DATA, run_id="same")
    assert v2.run_url == native.run_url
    mine, theirs = dict(native.request.body), dict(v2.request.body)
    assert (mine.pop("OutputDataConfig")["CompressionType"], theirs.pop("OutputDataConfig")["CompressionType"]) == (
        "NONE",
        "GZIP",
    )
    assert theirs == mine
    context = {**v2.request.context, "stall_timeout": native.request.context["stall_timeout"]}
    assert context == dict(native.request.context)
    assert v2.request.context["stall_timeout"] == 0


def test_the_page_has_every_keyword_of_v2_as_the_code_has_it() -> None:
    shown = section(PAGE, "SageMaker SDK v2").split("| keyword | becomes |")[1]
    rows = dict(table("| keyword | becomes |" + shown.split("\n\n")[0]))
    for name, value in WITHOUT_EFFECT.items():
        only = "" if value is ... else f" as `{value!r}`, else refused"
        assert rows.pop(f"`{name}`").startswith(f"no effect{only}: ")
    for name, text in REFUSED.items():
        assert rows.pop(f"`{name}`") == f"refused: {text}"
    assert set(rows) == {f"`{name}`" for name in CARRIED}
    assert not [text for text in rows.values() if not text or text.startswith(("refused", "no effect"))]


# ------------------------------------------------------------------------------------------------------------ and sent


@pytest.fixture
def plane(tmp_path: Path, s3_environment: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Plane]:
    """Yield an AWS account at the wire, with objects that v2 leaves in one. Its machines never come, so no node
    starts."""
    plane = Plane(tmp_path / "aws", moto=s3_environment, runs=False)
    for name, value in plane.environ().items():
        monkeypatch.setenv(name, value)
    plane.make_role("training")
    plane.make_bucket("sagemaker-eu-west-1-123456789012")
    plane.bucket.put(f"{plane.make_bucket('my-data')}/digits/0.csv", b"1,2")
    plane.no_capacity.add("ml.p4d.24xlarge")
    plane.capacity_seconds = 600.0
    yield plane
    plane.close()


@pytest.mark.remote
def test_the_sample_is_sent_when_its_import_has_changed(plane: Plane, capsys: pytest.CaptureFixture[str]) -> None:
    """Send it by botocore to a service that checks AWS's model strictly, then find it by its name alone."""
    names: dict[str, Any] = {}
    exec(compile(halves()[1], PAGE, "exec"), names)
    estimator = names["estimator"]
    (job,) = plane.jobs.values()
    name, model = capsys.readouterr().out.split()
    assert name == job.name == estimator.latest_training_job.name
    assert model == f"{job.body['OutputDataConfig']['S3OutputPath']}{job.name}/output/model.tar.gz"
    assert job.body == estimator.latest_training_job.run.store.attempt_request(
        estimator.latest_training_job.run.run_id, 0
    ).body  # fmt: skip
    assert job.body["ResourceConfig"]["InstanceCount"] == 2
    estimator.fit(DATA, wait=False, job_name="tracked")
    *_, tracked = plane.jobs.values()
    assert tracked.name[:8] == "tracked-"
    assert estimator.latest_training_job.name == tracked.name
    estimator.latest_training_job.stop()
    job.stop()
    for known in (name, job.arn):
        with pytest.raises(RunFailedError, match="cancelled"):
            PyTorch.attach(known)


def sent(name: str, world: FakePlatform, settings: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> Any:
    """Return the platform's job after ``cloudtrain submit`` of a sample with its settings. The platform has no
    machines."""
    [words] = commands(sample(name)[1].text)
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in settings.items()}
    own = [flag for key, text in texts.items() for flag in ("--set", f"{key}={text}")]
    argv = ["submit", "--detach", "--json", "--store", world.store, *own, "--run-id", name, *words[2:]]
    assert cli.main(argv) == 0, capsys.readouterr().err
    run = Estimator.attach(json.loads(capsys.readouterr().out)["run"], store=world.store)
    assert run.status().state == "pending"
    (job,) = world.plane.jobs.values()  # type: ignore[attr-defined]
    return job


@pytest.mark.slow
def test_the_sample_of_gcloud_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    world = VertexWorld(tmp_path, image="team/none:1", log_drain=0)
    for name, value in world.plane.environ().items():
        monkeypatch.setenv(name, value)
    world.plane.no_capacity = True
    world.plane.gcs.make("my-data")
    job = sent("gcloud", world, world.settings, capsys)
    kinds = [(pool.machine_spec.machine_type, pool.replica_count) for pool in job.record.job_spec.worker_pool_specs]
    assert kinds == [("a2-highgpu-8g", 1)] * 2
    world.close()


@pytest.mark.slow
@pytest.mark.remote
def test_the_sample_of_az_is_sent(
    tmp_path: Path, azure_environment: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    world = AzureMLWorld(tmp_path, azurite=azure_environment, image="team/none:1", runs=False)
    for name, value in world.plane.environ().items():
        monkeypatch.setenv(name, value)
    world.plane.no_capacity = True
    job = sent("az", world, world.settings, capsys)
    assert job.body["properties"]["resources"]["instanceCount"] == 2
    world.close()


#: SageMaker's own examples read their inputs like this.
THEIRS = """
import argparse, json, os
flags = argparse.ArgumentParser()
flags.add_argument("-e", type=int)
flags.add_argument("--amp", type=lambda text: text == "True")
flags.add_argument("--hosts", type=json.loads, default=os.environ["SM_HOSTS"])
flags.add_argument("--current-host", default=os.environ["SM_CURRENT_HOST"])
flags.add_argument("--train", default=os.environ["SM_CHANNEL_TRAINING"])
flags.add_argument("--model-dir", default=os.environ["SM_MODEL_DIR"])
flags.add_argument("--num-gpus", type=int, default=os.environ["SM_NUM_GPUS"])
given = flags.parse_args()
assert (given.hosts, given.current_host) == (["algo-1"], "algo-1")
assert json.loads(os.environ["SM_HPS"]) == {"e": 3, "amp": True}
with open(os.path.join(given.train, "words")) as data, open(os.path.join(given.model_dir, "model.txt"), "w") as model:
    model.write(f"{data.read()} {given.e} {given.amp} {given.num_gpus}")
print("trained", flush=True)
"""


@pytest.mark.slow
@pytest.mark.docker
@pytest.mark.remote
def test_a_script_written_for_sagemaker_runs_there_unchanged(
    here: Path, s3_server: str, engine: Any, images: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Run it in a container with SageMaker's paths. The model is a model.tar.gz at ``model_data``."""
    (here / "src/train.py").write_text(THEIRS)
    folder = here / "world"
    folder.mkdir()
    with at_work(folder, engine, lambda: SageMakerWorld(folder, moto=s3_server, image=images("python"))) as world:
        world.plane.bucket.put(f"{world.store}/words/words", b"digits")
        estimator = PyTorch(
            entry_point="train.py",
            source_dir="src",
            role=world.provider.settings.role,
            image_uri=world.image,
            instance_count=1,
            instance_type="ml.m5.xlarge",
            hyperparameters={"e": 3, "amp": True},
            max_run=120,
            output_path=world.store,
        )
        estimator.fit(f"{world.store}/words")
        assert "trained" in capsys.readouterr().out.splitlines()
        parent, _, name = estimator.model_data.rpartition("/")
        world.plane.bucket.fetch(f"{parent}/", here / "output")
        with tarfile.open(here / "output" / name) as packed:
            model = packed.extractfile("model.txt")
            assert model is not None
            assert model.read() == b"digits 3 True 0"
