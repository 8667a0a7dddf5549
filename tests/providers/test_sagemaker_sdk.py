"""SageMaker's own SDK as an oracle: its table of images, and its local mode, which runs our exact request.

It is no dependency, because it conflicts with those of the tests: ``SAGEMAKER_PYTHON`` names a Python that has
``sagemaker-core``. Local mode also needs ``docker compose`` or ``docker-compose``.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import secrets
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import boto3
import pytest

from cloudtrain.job.job import Job
from cloudtrain.providers.sagemaker import SAMPLE
from cloudtrain.providers.sagemaker.images import images as known_images
from cloudtrain.runs.submit import make_plan
from cloudtrain.settings.settings import Settings
from cloudtrain.store import runtime_zip

pytestmark = [pytest.mark.sagemaker_local_mode, pytest.mark.slow]

REGISTRY = "123456789012.dkr.ecr.eu-west-1.amazonaws.com"
NETWORK = "sagemaker-local"
RETRIEVE = """
import functools, json, sys
from sagemaker.core import image_uris
utils = image_uris.utils
utils._botocore_resolver = functools.cache(utils._botocore_resolver)  # 0.1 s a call else
for framework, version, region, instance_type in json.load(sys.stdin):
    try:
        uri = image_uris.retrieve(
            framework, region, version=version, instance_type=instance_type, image_scope="training"
        )
    except ValueError:
        uri = None
    print(json.dumps(uri))
"""
LOCAL_MODE = """
import json, sys
import boto3
from sagemaker.core.local.local_session import LocalSession
body = json.load(sys.stdin)
client = LocalSession(boto3.Session(region_name="eu-west-1")).sagemaker_client
client.create_training_job(**body)
job = client.describe_training_job(TrainingJobName=body["TrainingJobName"])
print("STATUS", job["TrainingJobStatus"])
"""
TRAIN = """
import os
from pathlib import Path
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print("total", total.item(), sorted(os.listdir(os.environ["CLOUDTRAIN_INPUT_DATA"])), flush=True)
if dist.get_rank() == 0:
    Path(os.environ["SM_MODEL_DIR"], "model.txt").write_text(os.environ["SM_HP_WORD"])
dist.barrier()
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def sdk() -> Callable[[str, Any], str]:
    """Return a function that runs code with SageMaker's SDK and JSON on its standard input, and returns its output."""
    python = os.environ.get("SAGEMAKER_PYTHON", sys.executable)
    probe = subprocess.run([python, "-c", "import sagemaker.core.local"], capture_output=True, check=False)
    if probe.returncode:
        pytest.skip(f"{python} has no sagemaker-core; SAGEMAKER_PYTHON names one that has")

    def run(code: str, given: Any) -> str:
        done = subprocess.run(
            [python, "-W", "ignore", "-c", code],
            input=json.dumps(given),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=280,
            check=False,
        )
        assert done.returncode == 0, done.stdout
        return done.stdout

    return run


def test_images_are_those_of_sagemakers_own_table(sdk: Callable[[str, Any], str]) -> None:
    queries, ours = [], []
    for version, image in known_images()["versions"].items():
        framework = "pytorch-amzn2023" if "amzn2023" in image["cpu"] else "pytorch"
        for region, registry in known_images()["registries"].items():
            for instance_type, kind in (("ml.m5.xlarge", "cpu"), ("ml.g5.xlarge", "gpu")):
                queries.append((framework, version, region, instance_type))
                ours.append(f"{registry}/{image[kind]}" if region in image["regions"] else None)
    theirs = [json.loads(line) for line in sdk(RETRIEVE, queries).splitlines() if line[:1] in ('"', "n")]
    assert len(theirs) == len(queries)
    assert [(a, o, t) for a, o, t in zip(queries, ours, theirs, strict=True) if o != t] == []


@pytest.fixture
def tagged(engine: Any, images: Callable[[str], str]) -> Iterator[str]:
    """Tag a local image with its name in ECR. Remove it, and local mode's remains, at the end."""
    name = f"{REGISTRY}/sdk-test"
    engine.tag(images("torch"), name, "1")
    yield f"{name}:1"
    for row in engine.containers(all=True):
        if row["Image"] == f"{name}:1":
            engine.remove_container(row["Id"], force=True)
    engine.remove_image(f"{name}:1", noprune=True)
    with contextlib.suppress(Exception):  # local mode may have removed it
        engine.remove_network(NETWORK)


@pytest.mark.docker
def test_local_mode_runs_our_request(
    sdk: Callable[[str, Any], str], tagged: str, s3_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check two nodes with two ranks each. Only the instance type changes, as local mode requires."""
    for name, text in (("src/train.py", TRAIN), ("data/a.csv", "1,2")):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text)
    job = Job.make(
        entry_point="train.py",
        source_dir="src",
        image=tagged,
        instance_count=2,
        nproc_per_node=2,
        inputs={"data": "data"},
        hyperparameters={"word": 'it\'s "quoted" $HOME'},
        hyperparameter_style="none",
        max_runtime="10m",
    )
    settings = Settings(provider="sagemaker", store=s3_url, tables={"sagemaker": SAMPLE["settings"]})  # type: ignore[dict-item]
    plan = make_plan(job, settings=settings, run_id="local-mode", cwd=tmp_path)
    zipped = partial(runtime_zip.build, type(plan.provider))
    plan.store.stage(plan.layout, archive=plan.upload.bundle.archive, pyz=zipped, trees=plan.upload.trees)
    plan.store.write_container(plan.layout, plan.request.context, secrets.token_bytes(32))
    body = json.loads(json.dumps(plan.request.body))
    body["ResourceConfig"]["InstanceType"] = "local"
    output = sdk(LOCAL_MODE, body)
    assert "STATUS Completed" in output, output
    assert output.count("total 4.0 ['a.csv']") == 4, output
    bucket, _, prefix = s3_url.removeprefix("s3://").partition("/")
    key = f"{prefix}/runs/local-mode/native/{body['TrainingJobName']}/output/model.tar.gz".lstrip("/")
    data = boto3.client("s3").get_object(Bucket=bucket, Key=key)["Body"].read()
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        member = archive.extractfile("model.txt")
        assert member is not None
        assert member.read().decode() == 'it\'s "quoted" $HOME'
