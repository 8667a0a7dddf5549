"""What `make mutants` found that no test would have noticed: words and limits that scripts and users rely on."""

from __future__ import annotations

import datetime
import json
import os
from pathlib import Path
from typing import Any

import pytest
from plans import Plans

from cloudtrain.errors import SpecError, UnsupportedError
from cloudtrain.providers import local
from cloudtrain.providers.azureml import Provider as AzureML
from cloudtrain.providers.azureml import states as azureml
from cloudtrain.providers.azureml.plan import TAG_VALUE, _page
from cloudtrain.providers.local import Provider as Local
from cloudtrain.providers.sagemaker import Provider as SageMaker
from cloudtrain.providers.sagemaker import states as sagemaker
from cloudtrain.providers.vertex import Provider as Vertex
from cloudtrain.providers.vertex import states as vertex
from cloudtrain.providers.vertex.plan import LABEL_COUNT, _origin

ARN = "arn:aws:sagemaker:eu-west-1:123456789012:training-job/run-a0"
IN_VERTEX = Plans(Vertex, {"project": "p", "location": "europe-west4"}, "gs://b/s", {"image": "team/trainer:1"})
ROLE = "arn:aws:iam::123456789012:role/cloudtrain"
IN_SAGEMAKER = Plans(SageMaker, {"role": ROLE, "region": "eu-west-1"}, "s3://bucket/store")


# ------------------------------------------------------------------------------------------------------------ on a node


def test_a_script_that_reads_sm_variables_finds_the_network_the_machine_and_its_devices(tmp_path: Path) -> None:
    config = tmp_path / "input/config/resourceconfig.json"
    config.parent.mkdir(parents=True)
    told = {"current_host": "algo-1", "hosts": ["algo-1"], "network_interface_name": "eth7"}
    for machine in ({"current_instance_type": "ml.p4d.24xlarge"}, {}):
        config.write_text(json.dumps({**told, **machine}))
        words = SageMaker.site({"SAGEMAKER_BASE_DIR": str(tmp_path)}, {}).export_env
        assert words["SM_NETWORK_INTERFACE_NAME"] == "eth7"
        assert words["SM_CURRENT_INSTANCE_TYPE"] == machine.get("current_instance_type", "")
        assert int(words["SM_NUM_GPUS"]) >= 0
    config.write_text(json.dumps({"current_host": "algo-1", "hosts": ["algo-1"]}))
    assert SageMaker.site({"SAGEMAKER_BASE_DIR": str(tmp_path)}, {}).export_env["SM_NETWORK_INTERFACE_NAME"] == ""


@pytest.mark.parametrize(("cores", "nodes", "each"), [(8, 2, 4), (2, 4, 1)])
def test_nodes_on_one_machine_share_its_cores(
    cores: int, nodes: int, each: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "_cpus", lambda: cores)
    (tmp_path / "secrets").write_text("{}")
    prefix, fd = local.ENGINE_PREFIX, os.open(tmp_path / "secrets", os.O_RDONLY)
    told = {
        "NODES": nodes,
        "NODE": 0,
        "PORT": 5000,
        "SCRATCH": "/tmp",
        "SUPERVISOR": 1,
        "GROUPS": "g",
        "SECRETS_FD": fd,
    }
    assert Local.site({f"{prefix}{name}": str(value) for name, value in told.items()}, {}).cpus == each


def test_a_single_node_of_azureml_needs_no_word_of_ours() -> None:
    words = {"AZUREML_NODE_COUNT": "2", "NODE_RANK": "1", "MASTER_ADDR": "node-0"}
    assert (AzureML.site(words, {}).topology.nodes, AzureML.site(words, {}).topology.node_rank) == (2, 1)
    with pytest.raises(SpecError, match=r"MASTER_ADDR or .* is not set"):
        AzureML.site({"CLOUDTRAIN_NODES": "2", "NODE_RANK": "1"}, {})


# -------------------------------------------------------------------------------------------------------- how it stands


def of_sagemaker(**more: Any) -> Any:
    return sagemaker.status_of({"TrainingJobArn": ARN, "TrainingJobStatus": "InProgress", **more})


def test_sagemaker_says_since_when_it_trains_and_both_its_words() -> None:
    began = datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.timezone.utc)
    found = of_sagemaker(SecondaryStatus="Training", TrainingStartTime=began)
    assert (found.native, found.started) == ("InProgress/Training", began.timestamp())
    assert of_sagemaker(TrainingJobStatus="Completed", SecondaryStatus="Completed").native == "Completed"
    assert of_sagemaker(TrainingJobStatus="Stopped", SecondaryStatus="Stopped").reason == "it was stopped"


@pytest.mark.parametrize(
    ("native", "details", "expected"),
    [
        ("CancelRequested", {}, ("running", "", "stopping")),
        ("Canceled", {}, ("cancelled", "cancelled", "it was cancelled")),
        ("Failed", {"error": {"code": "UserError", "message": "it broke."}}, ("failed", "user_error", "it broke.")),
        ("Failed", {"error": {"error": {"code": "UserError", "message": "bad"}}}, ("failed", "user_error", "bad")),
    ],
)
def test_azureml_says_why_in_either_shape_of_its_errors(native: str, details: Any, expected: tuple[str, ...]) -> None:
    found = azureml.status_of({"properties": {"status": native}}, details)
    assert (found.state, found.category) == expected[:2]
    assert found.reason.startswith(expected[2])


def test_azureml_that_cancels_at_the_limit_has_used_up_max_runtime() -> None:
    hour = {"startTimeUtc": "2026-01-01T00:00:00Z", "endTimeUtc": "2026-01-01T01:00:00Z"}
    properties = {"status": "Canceled", "limits": {"timeout": "PT1H"}}
    found = azureml.status_of({"properties": properties}, hour)
    assert (found.state, found.category, found.reason) == ("failed", "timeout", "max_runtime is used up")


def test_vertex_without_a_reason_says_so() -> None:
    name = "projects/p/locations/europe-west4/customJobs/1"
    found = vertex.status_of({"name": name, "state": "JOB_STATE_FAILED"})
    assert found.reason == "Vertex AI gives no reason; Vertex AI itself failed; submit it again"


# ------------------------------------------------------------------------------------------------------ what is planned


def test_as_many_labels_as_vertex_takes() -> None:
    tags = {f"t{i}": "x" for i in range(LABEL_COUNT)}
    request = IN_VERTEX.planned(tags=tags)
    assert tags.items() <= request.body["labels"].items()
    assert (request.provider, request.attempt) == ("vertex", 0)
    assert IN_VERTEX.refused(tags={**tags, "more": "x"}).field == "tags"


def test_where_a_run_comes_from_in_either_alphabet() -> None:
    assert set(_origin({"ci": "GitHub", "ci_run": "12"}).values()) == {"github-12"}
    assert _page({"ci_url": "https://ci/" + "x" * TAG_VALUE, "ci_run": "12"}) == "12"
    assert _page({"ci_run": "12"}) == "12"
    assert _page({"ci_url": "https://ci/1", "ci_run": "12"}) == "https://ci/1"


def test_what_sagemaker_has_no_place_for_is_refused_by_its_field() -> None:
    ours = {"sagemaker": {"Environment": {"CLOUDTRAIN_RUN_ID": "x"}}}
    found = IN_SAGEMAKER.refused(options=ours)
    assert str(found) == "options.sagemaker.Environment.CLOUDTRAIN_RUN_ID: is set by cloudtrain itself"
    shared = IN_SAGEMAKER.refused(shm_gb=8)
    assert isinstance(shared, UnsupportedError)
    assert (shared.field, "use fewer workers" in str(shared)) == ("resources.shm_gb", True)
