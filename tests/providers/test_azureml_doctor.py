"""``cloudtrain doctor azureml`` and a workspace with one fault at a time: its line, its fix, its exit code."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from doctor_runs import Examiner
from worlds.azureml.plane import SUBSCRIPTION
from worlds.azureml.wire import Fault
from worlds.azureml.world import AzureMLWorld

pytestmark = [pytest.mark.remote]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory, azure_server: str) -> Iterator[AzureMLWorld]:
    world = AzureMLWorld(tmp_path_factory.mktemp("world"), azurite=azure_server, image="team/none:1", runs=False)
    yield world
    world.close()
    assert world.plane.wire.crashes == []
    assert world.plane.wire.leaks == []


@pytest.fixture
def world(
    workspace: AzureMLWorld, examiner: Examiner, azure_environment: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[AzureMLWorld]:
    """Give a sound workspace with settings in the examiner's folder. The checks must create nothing."""
    for name, value in workspace.plane.environ().items():
        monkeypatch.setenv(name, value)
    examiner.settings("azureml", workspace.store, table(workspace))
    yield workspace
    plane = workspace.plane
    plane.wire.faults.clear()
    plane.wire.signed_in = True
    plane.quotas.clear()
    plane.computes.clear()
    plane.questions.used.clear()
    plane.questions.unlisted.clear()
    plane.questions.actions = ["*"]
    plane.questions.identity, plane.questions.about = {"type": "SystemAssigned"}, {}
    assert plane.jobs == {}
    assert not {call.method for call in plane.wire.calls} - {"GET"}
    from azure.storage.blob import ContainerClient

    with ContainerClient.from_connection_string(azure_environment, plane.container) as client:
        assert list(client.list_blob_names()) == [], "a check left objects behind"


def table(world: AzureMLWorld, **more: Any) -> dict[str, Any]:
    return {**world.workspace(), **more}


def test_all_is_well(world: AzureMLWorld, examiner: Examiner) -> None:
    world.plane.environments["train"] = {"3": "team/none:1"}
    found = examiner("--image", "azureml:train:3")
    statuses = {name: row["status"] for name, row in found.rows.items()}
    names = ["settings", "plan", "sdk", "credentials", "workspace", "datastore", "compute", "serverless", "permissions"]
    assert statuses == {**dict.fromkeys([*names, "quota", "environment", "store"], "ok"), "compute": "skipped"}, (
        found.rows
    )
    assert found.code == 0
    assert f"subscription {SUBSCRIPTION}" in found.rows["credentials"]["detail"]
    assert "DSv2 Family" in found.rows["quota"]["detail"]
    assert "4 are needed (1 x Standard_DS3_v2)" in found.rows["quota"]["detail"]


def test_without_credentials(
    world: AzureMLWorld, examiner: Examiner, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    world.plane.wire.signed_in = False
    monkeypatch.setenv("PATH", str(tmp_path))  # no az, no azd, no pwsh
    monkeypatch.setenv("HOME", str(tmp_path))
    found = examiner("--image", "team/none:1")
    found.failure("credentials", "no Azure credentials", fix="az login", code=3)
    assert found.status("store") == "skipped"


def test_a_service_that_does_not_answer(world: AzureMLWorld, examiner: Examiner) -> None:
    world.plane.wire.faults.append(Fault.broken("GET workspace", 9, status=503))
    examiner("--image", "team/none:1").failure("workspace", "does not answer", fix="try again", code=7)


def test_a_missing_workspace(world: AzureMLWorld, examiner: Examiner) -> None:
    examiner.settings("azureml", world.store, table(world, workspace_name="none"))
    examiner("--image", "team/none:1").failure("workspace", "azureml.workspace_name", fix="workspace_name", code=2)


def test_facts_that_the_caller_may_not_read_are_unknown(world: AzureMLWorld, examiner: Examiner) -> None:
    for operation in ("GET permissions", "GET vmSizes"):
        world.plane.wire.faults.append(Fault.denied(operation, "any/read", f"/subscriptions/{SUBSCRIPTION}"))
    found = examiner("--image", "team/none:1")
    assert [found.status(name) for name in ("permissions", "quota", "environment")] == ["unknown"] * 3
    assert found.code == 0


def test_every_fault_of_a_workspace(world: AzureMLWorld, examiner: Examiner) -> None:
    """Check that each fault has its own line, fix and code; the command exits with the gravest code."""
    world.plane.datastore("other", f"{world.plane.container}-2")
    examiner.settings("azureml", world.store, table(world, datastore="other", compute="none"))
    world.plane.questions.actions = ["Microsoft.MachineLearningServices/workspaces/*/read", "*/workspaces/read"]
    found = examiner("--image", "azureml:train:9")
    found.failed("datastore", "azureml.datastore: 'other' is container", fix="az ml datastore list", code=2)
    found.failed("compute", "no cluster 'none'", fix="az ml compute list", code=2)
    found.failed("permissions", "jobs/write", "jobs/cancel/action", fix="AzureML Data Scientist", code=3)
    assert "jobs/read" not in found.rows["permissions"]["detail"]
    found.failed("environment", "no environment train:9", fix="az ml environment list", code=2)
    assert (found.code, found.status("store")) == (3, "ok")


@pytest.mark.parametrize("spot", [False, True])
def test_a_used_up_quota(world: AzureMLWorld, examiner: Examiner, spot: bool) -> None:
    world.plane.quotas["Standard_NC4as_T4_v3"] = 6
    world.plane.questions.used["Standard_NC4as_T4_v3"] = 1
    flags = ["--image", "team/none:1", "--instance-type", "Standard_NC4as_T4_v3", "--nodes", "2"]
    found = examiner(*flags, *(["--spot"] if spot else []))
    name = "LowPriority" if spot else "NCASv3_T4 Family"
    found.failure("quota", name, "8 are needed (2 x Standard_NC4as_T4_v3)", fix="in Studio (Quota)", code=4)


def test_a_missing_size_and_an_unknown_quota(world: AzureMLWorld, examiner: Examiner) -> None:
    flags = ["--image", "team/none:1", "--instance-type"]
    examiner(*flags, "Standard_F4s_v2").failure("quota", "westeurope has no Standard_F4s_v2", fix="list-sizes", code=4)
    world.plane.questions.unlisted.add("Standard_DS3_v2")
    assert examiner(*flags, "Standard_DS3_v2").status("quota") == "unknown"


def test_the_size_of_a_cluster_counts(world: AzureMLWorld, examiner: Examiner) -> None:
    world.plane.computes["gpus"] = {"vmSize": "STANDARD_NC4AS_T4_V3"}
    world.plane.quotas["Standard_NC4as_T4_v3"] = 0
    examiner.settings("azureml", world.store, table(world, compute="gpus"))
    found = examiner("--image", "team/none:1")
    assert found.status("compute") == "ok"
    found.failure("quota", "0 of 0 vCPUs", fix="at least 4 vCPUs", code=4)


def test_a_cluster_of_low_priority_ends_a_job_sooner(world: AzureMLWorld, examiner: Examiner) -> None:
    world.plane.computes["cheap"] = {"vmSize": "STANDARD_DS3_V2", "vmPriority": "LowPriority"}
    examiner.settings("azureml", world.store, table(world, compute="cheap"))
    assert "low priority" in examiner("--image", "team/none:1", "--max-runtime", "7d").rows["compute"]["detail"]
    found = examiner("--image", "team/none:1", "--max-runtime", "8d")
    found.failure("compute", "ends its jobs after 7 days", fix="max_runtime to at most 7d", code=2)


def test_a_cluster_keeps_machines_warm_by_its_idle_time(world: AzureMLWorld, examiner: Examiner) -> None:
    scale = {"minNodeCount": 0, "maxNodeCount": 4, "nodeIdleTimeBeforeScaleDown": "PT20M"}
    world.plane.computes["gpus"] = {"vmSize": "STANDARD_DS3_V2", "scaleSettings": scale}
    examiner.settings("azureml", world.store, table(world, compute="gpus"))
    flags = ["--image", "team/none:1", "--keep-warm"]
    assert examiner(*flags, "20m").status("compute") == "ok"
    command = "az ml compute update -n gpus -g training -w vision --idle-time-before-scale-down 1800"
    text = "cluster gpus keeps idle machines for 20m of 30m"
    examiner(*flags, "30m").failure("compute", text, fix=command, code=2)
    scale["minNodeCount"] = 1
    assert examiner(*flags, "30m").status("compute") == "ok", "its machines stay"


def test_a_closed_workspace_needs_a_managed_network(world: AzureMLWorld, examiner: Examiner) -> None:
    world.plane.questions.about = {"publicNetworkAccess": "Disabled"}
    found = examiner("--image", "team/none:1")
    assert "managed network Disabled, public access Disabled" in found.rows["workspace"]["detail"]
    found.failure("serverless", "need a managed network", fix="az ml workspace update --managed-network", code=2)
    world.plane.questions.about["managedNetwork"] = {"isolationMode": "AllowInternetOutbound"}
    assert examiner("--image", "team/none:1").status("serverless") == "ok"


OWN = {"type": "UserAssigned", "userAssignedIdentities": {"/subscriptions/s/x": {"clientId": "c-1"}}}


@pytest.mark.parametrize(
    ("setting", "identity", "right"),
    [
        ("managed_identity", {"type": "SystemAssigned"}, True),
        ("managed_identity", OWN, False),
        ("managed_identity:c-1", OWN, True),
        ("managed_identity:C-1", OWN, True),
        ("managed_identity:c-2", OWN, False),
        ("managed_identity:c-1", {"type": "SystemAssigned"}, False),
        ("user_identity", {"type": "None"}, True),
    ],
)
def test_a_serverless_job_needs_the_workspace_s_identity(
    world: AzureMLWorld, examiner: Examiner, setting: str, identity: dict[str, Any], right: bool
) -> None:
    world.plane.questions.identity = identity
    examiner.settings("azureml", world.store, table(world, identity=setting))
    found = examiner("--image", "team/none:1")
    assert found.status("serverless") == ("ok" if right else "failed"), found.rows["serverless"]


@pytest.mark.parametrize(
    ("identity", "has"),
    [
        ({"type": "SystemAssigned"}, "own identity: managed_identity"),
        ({**OWN, "type": "SystemAssigned, UserAssigned"}, "own identity: managed_identity or managed_identity:c-1"),
        ({"type": "None"}, "own identity: the workspace has none"),
    ],
)
def test_doctor_names_the_identity_for_a_serverless_job(
    world: AzureMLWorld, examiner: Examiner, identity: dict[str, Any], has: str
) -> None:
    world.plane.questions.identity = identity
    examiner.settings("azureml", world.store, table(world, identity="managed_identity:c-9"))
    assert has in examiner("--image", "team/none:1").rows["serverless"]["detail"]


def test_an_image_needs_the_right_to_make_an_environment(world: AzureMLWorld, examiner: Examiner) -> None:
    kind = "Microsoft.MachineLearningServices/workspaces"
    world.plane.questions.actions = [f"{kind}/read", f"{kind}/jobs/*", f"{kind}/datastores/read"]
    found = examiner("--image", "team/none:1")
    found.failure("permissions", "environments/read", "environments/write", fix="AzureML Data Scientist", code=3)
    world.plane.environments["train"] = {"3": "team/none:1"}
    assert examiner("--image", "azureml:train:3").status("permissions") == "ok"


def test_a_store_by_the_name_of_its_datastore(world: AzureMLWorld, examiner: Examiner) -> None:
    """Check that doctor resolves it, which a plan alone does not, to the same store."""
    examiner.settings("azureml", "azureml://datastores/none/paths/store", table(world, datastore="none"))
    found = examiner("--image", "team/none:1")
    found.failure("store", "no datastore 'none'", fix="az ml datastore list", code=2)
    assert (found.status("plan"), found.status("datastore"), found.status("credentials")) == (
        "skipped",
        "skipped",
        "ok",
    )
