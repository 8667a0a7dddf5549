"""Provider ``azureml`` sends jobs through azure-ai-ml: checks of the SDK's side effects."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from worlds.azureml.world import AzureMLWorld

from cloudtrain.errors import SpecError, UnsupportedError
from cloudtrain.provider_api.registry import find_provider

pytestmark = [pytest.mark.remote, pytest.mark.slow]


@pytest.fixture
def idle(tmp_path: Path, azure_environment: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[AzureMLWorld]:
    """Give a workspace whose jobs never start."""
    world = AzureMLWorld(tmp_path / "world", azurite=azure_environment, image="team/trainer:1", runs=False)
    for name, value in world.plane.environ().items():
        monkeypatch.setenv(name, value)
    yield world
    world.close()


def test_the_sdk_leaves_no_trace_and_sends_none(
    idle: AzureMLWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Check in a git repository with a secret in its remote's URL, and with a variable that selects another cloud."""
    folder = tmp_path / "repository"
    folder.mkdir()
    for words in (["init", "-q"], ["remote", "add", "origin", "https://git.example/private/thing"]):
        subprocess.run(["git", *words], cwd=folder, check=True)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("AZUREML_CURRENT_CLOUD", "AzureChinaCloud")
    monkeypatch.setenv("AZUREML_GIT_COMMIT", "abc")
    plan = idle.plan({"spot": True})
    before = dict(os.environ)
    idle.provider.submit(plan.request)
    assert dict(os.environ) == before
    (job,) = idle.plane.jobs.values()
    assert job.body["properties"]["properties"] == {}
    assert capfd.readouterr() == ("", "")


def test_a_datastore_of_another_container_is_refused(idle: AzureMLWorld) -> None:
    idle.plane.datastore("elsewhere", f"{idle.plane.container}-2")
    for name, says in (("elsewhere", "the store's container"), ("nowhere", "az ml datastore list")):
        provider = find_provider("azureml")(**{**idle.settings, "datastore": name})
        plan = idle.plan()
        request = provider.plan(plan.job, plan.layout)
        with pytest.raises(SpecError, match=says) as caught:
            provider.submit(request)
        assert caught.value.field == "azureml.datastore"
    assert idle.plane.jobs == {}


def test_a_cluster_with_other_gpus_is_refused(idle: AzureMLWorld) -> None:
    idle.plane.computes["gpus"] = {"vmSize": "STANDARD_NC64AS_T4_V3"}
    provider = find_provider("azureml")(**{**idle.settings, "compute": "gpus"})
    plan = idle.plan()
    wrong, right = (provider.plan(plan.job.replace(gpu=(gpu,)), plan.layout) for gpu in ("H100:8", "T4:4"))
    with pytest.raises(UnsupportedError, match="has T4:4, not H100:8") as caught:
        provider.submit(wrong)
    assert caught.value.field == "resources.gpu"
    idle.plane.computes["gpus"]["scaleSettings"] = {"nodeIdleTimeBeforeScaleDown": "PT2M"}
    warm = provider.plan(plan.job.replace(gpu=("T4:4",), keep_warm="1h"), plan.layout)
    with pytest.raises(UnsupportedError, match="cluster gpus keeps idle machines for 2m of 1h") as caught:
        provider.submit(warm)
    assert caught.value.hint.endswith("--idle-time-before-scale-down 3600")
    assert idle.plane.jobs == {}
    assert provider.submit(right) == provider.find(right)
