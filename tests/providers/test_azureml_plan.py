"""Requests of provider ``azureml`` before it sends them."""

from __future__ import annotations

import dataclasses
import io
import json
import logging
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from plans import Plans
from profiles import examples
from rows import for_each
from trials import TRIALS
from worlds.azureml.strict import JOB_NAME, broken_rules, model_errors, seconds_of

from cloudtrain.cli.format import plan_text
from cloudtrain.errors import SpecError, UnsupportedError
from cloudtrain.job.job import Job, job_name
from cloudtrain.job.run_id import check_run_id
from cloudtrain.provider_api import catalog
from cloudtrain.provider_api.protocol import Request
from cloudtrain.providers.azureml import SAMPLE, Provider
from cloudtrain.runs.submit import make_plan
from cloudtrain.settings.settings import Settings

WORKSPACE: dict[str, Any] = SAMPLE["settings"]  # type: ignore[assignment]
ACCOUNT = "contractstore.dfs.core.windows.net"
STORE = f"abfs://contract@{ACCOUNT}/store"
PATHS = "azureml://datastores/workspaceblobstore/paths"
CLUSTER = {"compute": "gpu-cluster"}
METADATA = {
    "azure_portal": "https://portal.example",
    "resource_manager": "https://management.example/",
    "active_directory": "https://login.example",
    "aml_resource_id": "https://ml.example",
    "storage_endpoint": "core.example",
    "registry_discovery_endpoint": "https://api.example/",
}

PLANS = Plans(Provider, WORKSPACE, STORE, {"image": "team/trainer:1"})
layout, planned, refused = PLANS.layout, PLANS.planned, PLANS.refused


# ---------------------------------------------------------------------------------------------------------------- names


@pytest.mark.slow
@given(st.from_regex(r"[a-z0-9](-?[a-z0-9]){0,39}", fullmatch=True), st.integers(0, 100), st.integers(0, 40))
def test_names_are_legal(run_id: str, attempt: int, gpu_index: int) -> None:
    if len(run_id) > 40:
        return
    name = job_name(f"abfs://c/runs/{check_run_id(run_id)}", attempt, gpu_index)
    assert JOB_NAME.fullmatch(name)
    assert len(name) <= 63


def test_names_differ_by_store_attempt_and_choice() -> None:
    longest = "a-" + "b" * 38
    names = {job_name(f"abfs://{s}/runs/{longest}", k, c) for s in "xy" for k in range(12) for c in range(12)}
    assert len(names) == 2 * 12 * 12


# ---------------------------------------------------------------------------------------------------------- the request


def test_the_request_of_a_plain_job() -> None:
    request = planned(inputs={"train": f"abfs://contract@{ACCOUNT}/digits"})
    body = request.body
    assert request.operation == "az ml job create"
    assert set(body) == {
        "$schema", "type", "name", "display_name", "experiment_name", "command", "environment", "environment_variables",
        "inputs", "outputs", "resources", "limits", "tags",
    }  # fmt: skip
    assert body["outputs"] == {
        "cloudtrain_live": {"type": "uri_folder", "mode": "rw_mount", "path": f"{PATHS}/store/runs/r/live/"}
    }
    own = {name: item for name, item in body["inputs"].items() if name.startswith("cloudtrain_")}
    assert {name: item["path"] for name, item in own.items()} == {
        "cloudtrain_container": f"{PATHS}/store/runs/r/container/",
        "cloudtrain_runtime": f"{PATHS}/store/runtime/{'d' * 64}/",
        "cloudtrain_code": f"{PATHS}/store/code/{'c' * 64}/",
    }
    assert {item["mode"] for item in own.values()} == {"download"}
    assert body["inputs"]["train"] == {"type": "uri_folder", "mode": "ro_mount", "path": f"{PATHS}/digits/"}
    assert body["resources"] == {"instance_type": "Standard_DS3_v2", "instance_count": 1, "shm_size": "7g"}
    assert body["limits"] == {"timeout": 86400}
    assert {name for name in body["tags"] if name.startswith("cloudtrain.")} == set(body["tags"])


def test_the_command_is_words_and_fills_in_every_path() -> None:
    url = f"abfs://contract@{ACCOUNT}/x"
    request = planned(
        attempt=3, inputs={"a-b": url, "one": f"{url}.csv"}, resume_from=f"{STORE}/runs/q/live/checkpoints"
    )
    first, *words = shlex.split(request.body["command"])
    assert [first, *words[:2]] == ["exec", "/bin/sh", "-c"], "a shell would keep the stop signal from the node"
    assert "exec `" in words[2]
    assert words[3:9] == [
        "cloudtrain", "${{inputs.cloudtrain_runtime}}/cloudtrain.pyz", "run",
        "--context", "${{inputs.cloudtrain_container}}/context.json", "--attempt",
    ]  # fmt: skip
    assert words[9] == "3"
    assert dict(word.split("=", 1) for word in words[11::2]) == {
        "code": "${{inputs.cloudtrain_code}}/code.tar.gz",
        "live": "${{outputs.cloudtrain_live}}",
        "resume": "${{inputs.cloudtrain_resume}}",
        "input.a-b": "${{inputs.a_b}}",
        "file.one": "${{inputs.one}}",
    }
    assert request.body["inputs"]["cloudtrain_resume"]["mode"] == "ro_mount"
    assert request.body["inputs"]["one"]["type"] == "uri_file"


@pytest.mark.costly
@for_each(
    ("url", "path"),
    [
        (f"abfs://contract@{ACCOUNT}/a/b/", f"{PATHS}/a/b/"),
        (f"az://contract@{ACCOUNT}/a", f"{PATHS}/a/"),
        (f"abfss://other@{ACCOUNT}/a", "wasbs://other@contractstore.blob.core.windows.net/a/"),
        ("abfs://c@acct.blob.core.chinacloudapi.cn/a", "wasbs://c@acct.blob.core.chinacloudapi.cn/a/"),
        ("azureml://datastores/images/paths/a", "azureml://datastores/images/paths/a/"),
        ("azureml:digits:3", "azureml:digits:3"),
        ("wasbs://c@acct.blob.core.windows.net/a", "wasbs://c@acct.blob.core.windows.net/a/"),
        ("https://acct.blob.core.windows.net/c/a%20b", "https://acct.blob.core.windows.net/c/a%20b/"),
    ],
)
def test_urls_are_rewritten_for_jobs(url: str, path: str) -> None:
    assert planned(inputs={"a": {"url": url, "mode": "copy"}}).body["inputs"]["a"]["path"] == path


def test_the_environment_names_the_account_of_a_store() -> None:
    store = "abfs://contract/store"
    body = planned({"store": store}, inputs={"a": "abfs://contract/x"}).body
    assert body["inputs"]["a"]["path"] == f"{PATHS}/x/"
    error = refused({"store": store}, inputs={"a": "abfs://other/x"})
    assert error.field == "inputs.a"
    assert "abfs://other@ACCOUNT.dfs.core.windows.net/x" in error.hint


def test_modes_of_inputs() -> None:
    url = f"abfs://contract@{ACCOUNT}/x"
    inputs = {"a": url, "b": {"url": url, "mode": "mount"}, "c": {"url": url, "mode": "copy"}, "d": f"{url}.csv"}
    found = planned(inputs=inputs).body["inputs"]
    assert [found[name]["mode"] for name in "abcd"] == ["ro_mount", "ro_mount", "download", "download"]


def test_images_and_environments() -> None:
    def environment(given: Mapping[str, Any] | None = None, /, **fields: Any) -> Any:
        return planned(given, **fields).body["environment"]

    curated = "azureml://registries/azureml/environments/acpt-pytorch-2.8-cuda12.6/labels/latest"
    assert environment(image="ghcr.io/a/b:1") == {"image": "ghcr.io/a/b:1"}
    for name in (curated, "azureml:mine:3", "azureml:mine@latest"):
        assert environment(image=name) == name
        assert environment({"environment": name}, image=None) == name
    assert environment({"environment": curated}, image="a:1") == {"image": "a:1"}


def test_settings_reach_the_request() -> None:
    body = planned({"identity": "managed_identity:abc-1", "priority": "high", "experiment_name": "e"}, spot=True).body
    assert body["identity"] == {"type": "managed_identity", "client_id": "abc-1"}
    assert body["environment_variables"]["AZURE_CLIENT_ID"] == "abc-1"
    assert body["queue_settings"] == {"job_tier": "spot", "priority": "high"}
    assert body["experiment_name"] == "e"
    assert planned({"identity": "user_identity"}).body["identity"] == {"type": "user_identity"}
    assert planned({"job_tier": "premium"}).body["queue_settings"] == {"job_tier": "premium"}
    assert (
        planned({"datastore": "team"})
        .body["outputs"]["cloudtrain_live"]["path"]
        .startswith("azureml://datastores/team/paths/")
    )


def test_a_cluster_decides_on_its_machines() -> None:
    request = planned(CLUSTER, gpu="H100:8", instance_count=2, shm_gb=64)
    assert request.body["compute"] == "azureml:gpu-cluster"
    assert request.body["resources"] == {"instance_count": 2, "shm_size": "64g"}
    assert request.body["distribution"] == {"type": "pytorch", "process_count_per_instance": 1}
    assert request.context["processes"] == 8
    assert request.body["tags"]["cloudtrain.gpu"] == "H100:8", "submit compares it with the cluster"
    assert "gpu-cluster decides" in " ".join(request.notes)
    assert planned(CLUSTER).body["resources"]["shm_size"] == "16g", "never the platform's own 2g"
    assert "compute" not in planned().body, "serverless is not the name of a cluster"
    assert "properties" not in request.body
    warm = planned(CLUSTER, keep_warm="30m")
    assert warm.body["properties"] == {"cloudtrain.keep_warm": "1800"}
    assert "keep_warm: cluster gpu-cluster must keep idle machines for 30m, paid for" in " ".join(warm.notes)
    with pytest.raises(UnsupportedError, match="do not wait for a job") as caught:
        planned(keep_warm="30m")
    assert "azureml.compute" in caught.value.hint


@for_each(
    ("fields", "instance_type", "processes"),
    [
        ({}, "Standard_DS3_v2", 1),
        ({"cpus": 16}, "Standard_F16s_v2", 1),
        ({"memory_gb": 300}, "Standard_E48ds_v4", 1),
        ({"gpu": "H100:8"}, "Standard_ND96isr_H100_v5", 8),
        ({"gpu": "H100-80GB:8"}, "Standard_ND96isr_H100_v5", 8),
        ({"gpu": "H100-NVL:1"}, "Standard_NC40ads_H100_v5", 1),
        ({"gpu": "H100-NVL-94GB:2"}, "Standard_NC80adis_H100_v5", 2),
        ({"gpu": "A100-40GB:8"}, "Standard_ND96asr_v4", 8),
        ({"gpu": "T4:4", "nproc_per_node": 2}, "Standard_NC64as_T4_v3", 2),
        ({"instance_type": "STANDARD_NC96ADS_A100_V4"}, "Standard_NC96ads_A100_v4", 4),
        ({"instance_type": "Standard_HB120rs_v3"}, "Standard_HB120rs_v3", 1),
        ({"instance_type": "Standard_ND999_X_v9", "nproc_per_node": 4}, "Standard_ND999_X_v9", 4),
    ],
)
def test_machines(fields: dict[str, Any], instance_type: str, processes: int) -> None:
    request = planned(**fields)
    assert request.body["resources"]["instance_type"] == instance_type
    assert request.context["processes"] == processes


@for_each(
    ("gpu", "hint"),
    [
        ("H100:1", "choose from H100:8; "),
        ("H100:2", "choose from H100:8; "),
        ("H100-94GB:1", "choose from A10, A100, GB200, GB300, H100, H100-NVL, H200, T4; "),
        ("H100-NVL:8", "--nodes 4 --gpu H100-NVL:2 has 8 GPUs; a machine has H100-NVL-94GB:1, H100-NVL-94GB:2"),
    ],
)
def test_the_two_kinds_of_h100_are_kept_apart(gpu: str, hint: str) -> None:
    """Check that a job for 80 GB boards with InfiniBand does not get a 94 GB card, and vice versa."""
    error = refused(gpu=gpu)
    assert error.field == "resources.gpu"
    assert f"no known machine has {gpu}" in str(error)
    assert error.hint.startswith(hint)


def test_the_client_tries_gpus_in_order_of_preference() -> None:
    two = ["H100:8", "T4:1"]
    assert planned(gpu=two).body["resources"]["instance_type"] == "Standard_ND96isr_H100_v5"
    second = planned(gpu=two, gpu_index=1)
    assert second.body["resources"]["instance_type"] == "Standard_NC4as_T4_v3"
    assert second.context["processes"] == 1


def test_limits() -> None:
    assert planned(max_runtime="2h").body["limits"] == {"timeout": 7200}
    assert planned(max_runtime=60).body["limits"] == {"timeout": 60}
    # 0.6 USD an hour, two nodes
    bought = planned(gpu="T4:1", instance_count=2, max_cost=2.4)
    assert bought.body["limits"] == {"timeout": 7200}
    assert "max_cost" in " ".join(bought.notes)
    assert planned(gpu="T4:1", max_cost=1e6).body["limits"] == {"timeout": 86400}
    priced = {**CLUSTER, "prices": {"gpu-cluster": 1}}
    assert planned(priced, max_cost=2, keep_warm="30m").body["limits"] == {"timeout": 2 * 3600 - 1800}
    cluster = planned(priced, max_cost=2)
    assert cluster.body["limits"] == {"timeout": 7200}


def test_an_estimate_names_its_price_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that the account's own price comes first, then Azure ML's list of a date. max_cost uses the first alone."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # no list that this machine has read from a cloud
    (tmp_path / "train.py").write_text("")

    def made(given: Mapping[str, Any], **fields: Any) -> tuple[dict[str, Any] | None, str]:
        tables = {"azureml": {**WORKSPACE, **given}}
        chosen = Settings(provider="azureml", store=STORE, tables=tables)
        job = Job.make(entry_point="train.py", image="team/trainer:1", max_runtime="2h", **fields)
        document = make_plan(job, settings=chosen, run_id="r", cwd=tmp_path).document()
        return document["resources"]["price"], plan_text(document)

    listed, text = made({"prices": {}}, gpu="T4:1")
    assert listed is not None
    assert (listed["usd_per_hour"], listed["own"], listed["of_service"]) == (0.526, False, True)
    assert "0.53 USD an hour for 1 x Standard_NC4as_T4_v3" in text
    assert "Azure ML on demand, eastus" in text
    assert "not the service's own price" not in text
    own, text = made({}, gpu="T4:1")
    assert own is not None
    assert (own["usd_per_hour"], own["own"]) == (0.6, True)
    assert "by setting azureml.prices" in text
    cluster, text = made({**CLUSTER, "prices": {"gpu-cluster": 1}})
    assert cluster is not None
    assert (cluster["usd_for_hard_limit"], cluster["instance_type"]) == (2.0, "gpu-cluster")
    assert re.search("price +unknown", made({"prices": {}}, instance_type="Standard_D4ds_v4")[1])
    later, _ = made({"prices": {}}, gpu=["T4:1", "T4:4"])
    assert later is not None
    assert later["instance_type"] == "Standard_NC64as_T4_v3"
    with pytest.raises(UnsupportedError, match="no price of Standard_NC64as_T4_v3"):
        made({}, gpu=["T4:1", "T4:4"], max_cost=5)
    with pytest.raises(UnsupportedError, match="no price of Standard_NC4as_T4_v3"):
        made({"prices": {}}, gpu="T4:1", max_cost=5)


def test_a_plan_explains_a_preemption() -> None:
    assert "set retries" in " ".join(planned(spot=True).notes)
    assert "cloudtrain reconcile" in " ".join(planned(spot=True, retries=2).notes)
    assert planned().notes == ()


def test_a_plan_warns_of_jobs_that_may_never_start() -> None:
    assert not any("nodes" in note for note in planned(instance_count=100).notes)
    assert "limits a job of several nodes to 100 nodes" in " ".join(planned(instance_count=101).notes)
    (note,) = planned(instance_type="Standard_NC6s_v3").notes
    assert note == "Standard_NC6s_v3 was retired on 2025-09-30: no machine may ever come"
    secrets = {"T": "azure:vault/t"}
    why = 'the workspace\'s own, such as identity = "managed_identity"'
    one = f"secrets: a serverless job has no managed identity unless azureml.identity names one; {why}"
    assert planned(secrets=secrets).notes == (one,)
    assert planned({"identity": "managed_identity"}, secrets=secrets).notes == ()
    assert "no managed identity" not in " ".join(planned(CLUSTER, secrets=secrets).notes)


def test_the_longest_job() -> None:
    assert planned(max_runtime="21d").body["limits"] == {"timeout": 21 * 86400}
    assert planned(max_runtime="7d", spot=True).body["limits"] == {"timeout": 7 * 86400}


@for_each(("nodes", "which"), [(1, {}), (2, {"nodes": "all"})])
def test_the_shell_of_any_node_is_azure_s_own_command(nodes: int, which: dict[str, str]) -> None:
    provider, request = Provider(**WORKSPACE), planned(interactive=True, instance_count=nodes)
    key = WORKSPACE["ssh_public_key"]
    assert request.body["services"] == {"cloudtrain_ssh": {"type": "ssh", **which, "ssh_public_keys": key}}
    found = provider.shell(request, provider.account.native_id("job-1"), nodes - 1, [], tty=True)
    workspace = [WORKSPACE[name] for name in ("subscription_id", "resource_group", "workspace_name")]
    words = f"az ml job connect-ssh --name job-1 --node-index {nodes - 1} --subscription {workspace[0]}"
    assert found.argv == [*words.split(), "--resource-group", workspace[1], "--workspace-name", workspace[2]]
    assert found.install == "install the Azure CLI, then run: az extension add --name ml"


@for_each(
    ("interactive", "command", "line"),
    [
        (False, [], "interactive: the job was sent without it, and lets no shell in; send a job with --interactive"),
        (
            True,
            ["nvidia-smi"],
            "shell: not supported by provider azureml: az ml job connect-ssh takes no command; leave it out",
        ),
    ],
)
def test_a_shell_that_azureml_cannot_open(interactive: bool, command: list[str], line: str) -> None:
    with pytest.raises(SpecError) as caught:
        Provider(**WORKSPACE).shell(planned(interactive=interactive), "job-1", 0, command, tty=False)
    assert caught.value.with_hint() == line


_NAMED = "azureml: cloudtrain itself has an input of that name; choose another name"
_SPOT = "job asks for spot machines; remove job_tier from the settings, or spot from the job"
_KEY = "interactive needs it; set it to the text of your public key: cat ~/.ssh/id_ed25519.pub"
REFUSED: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("azureml.subscription_id", {"subscription_id": ""}, {}, "az account show"),
    ("azureml.workspace_name", {"workspace_name": ""}, {}, "config.json"),
    ("azureml.resource_group", {"resource_group": "a/b"}, {}, "not a valid name"),
    ("store", {"store": "s3://bucket/x"}, {}, "abfs://CONTAINER@ACCOUNT"),
    ("store", {"store": f"{STORE}?sv=1&sig=abc"}, {}, "would show a SAS or query"),
    ("store", {"store": "https://acct.blob.core.windows.net/c?sig=abc"}, {}, "would show a SAS or query"),
    ("store", {"store": f"{STORE}/a%20b"}, {}, "rename"),
    ("azureml.cloud", {"store": STORE.replace("windows.net", "chinacloudapi.cn")}, {}, "the cloud of the store"),
    ("store", {"store": f"{STORE}/it's"}, {}, "rename"),
    ("azureml.environment", {}, {"image": None}, "az ml environment list --registry-name azureml"),
    ("image", {}, {"image": "azureml:"}, "not an environment"),
    ("resources.instance_type", CLUSTER, {"instance_type": "Standard_DS3_v2"}, "cluster gpu-cluster"),
    ("resources.spot", CLUSTER, {"spot": True}, "cluster gpu-cluster"),
    ("resources.cpus", CLUSTER, {"cpus": 4}, "cluster gpu-cluster"),
    ("resources.memory_gb", CLUSTER, {"memory_gb": 4}, "cluster gpu-cluster"),
    ("resources.gpu", CLUSTER, {"gpu": ["T4:1", "V100:1"]}, "one kind of GPU"),
    ("resources.disk_gb", {}, {"disk_gb": 100}, "disks of a fixed size"),
    ("resources.gpu", {}, {"gpu": "B200:8"}, "no known machine"),
    ("resources.gpu", {}, {"gpu": "T4:1", "instance_type": "Standard_ND96asr_v4"}, "A100-40GB:8"),
    ("resources.cpus", {}, {"cpus": 5000}, "the largest"),
    ("resources.cpus", {}, {"cpus": 64, "instance_type": "Standard_DS3_v2"}, "4 cores"),
    ("resources.nproc_per_node", {}, {"instance_type": "Standard_ND999_X_v9"}, "how many GPUs"),
    ("resources.instance_type", {}, {"instance_type": "a b"}, "not the name"),
    ("max_runtime", {}, {"max_runtime": 59}, "at least 60 s"),
    ("max_runtime", {}, {"max_runtime": 21 * 86400 + 1}, "after 21 days; add --max-runtime 21d"),
    ("max_runtime", {}, {"max_runtime": "8d", "spot": True}, "machines after 7 days; add --max-runtime 7d"),
    ("max_runtime", {"job_tier": "spot"}, {"max_runtime": "8d"}, "after 7 days"),
    ("max_cost", {}, {"max_cost": 5, "instance_type": "Standard_D4ds_v4"}, '"Standard_D4ds_v4" ='),
    ("max_cost", {}, {"max_cost": 0.001}, "60 s"),
    ("secrets.T", {}, {"secrets": {"T": "env:HF_TOKEN"}}, "az keyvault secret set --vault-name VAULT --name NAME"),
    ("secrets.T", {}, {"secrets": {"T": "aws:arn:x"}}, "azure:VAULT/NAME"),
    ("secrets.T", {}, {"secrets": {"T": "azure:vault"}}, "VAULT/NAME"),
    ("secrets.T", {}, {"secrets": {"T": "azure:vault/a_b"}}, "VAULT/NAME"),
    ("tags.cloudtrain.run", {}, {"tags": {"cloudtrain.run": "x"}}, "reserved"),
    ("tags", {}, {"tags": {f"k{i}": "" for i in range(45)}}, "at most 42"),
    ("inputs.cloudtrain-code", {}, {"inputs": {"cloudtrain-code": f"{STORE}/x"}}, _NAMED),
    ("inputs.a", {}, {"inputs": {"a": "s3://b/x"}}, "s3:"),
    ("inputs.a", {}, {"inputs": {"a": "https://acct.blob.core.windows.net/c/x.csv?sig=abc"}}, "SAS"),
    ("inputs.a", {}, {"inputs": {"a": f"{STORE}/x{{y}}"}}, "rename"),
    ("inputs.a", {}, {"inputs": {"a": f"{STORE}/x%20y"}}, "rename"),
    ("inputs.a.shard", {}, {"inputs": {"a": {"url": f"{STORE}/x", "shard": True}}}, "whole input"),
    ("resume_from", {}, {"resume_from": "s3://b/runs/x/live/checkpoints"}, "container of Azure"),
    ("azureml.job_tier", {"job_tier": "premium"}, {"spot": True}, _SPOT),
    ("azureml.ssh_public_key", {"ssh_public_key": ""}, {"interactive": True}, _KEY),
    ("options.azureml.contract", {}, {"options": {"azureml": {"contract": 1}}}, "no such field"),
    ("options.azureml.descriptio", {}, {"options": {"azureml": {"descriptio": "x"}}}, "did you mean 'description'"),
    ("options.azureml.command", {}, {"options": {"azureml": {"command": "x"}}}, "itself"),
    ("options.azureml.code", {}, {"options": {"azureml": {"code": "."}}}, "itself"),
    ("options.azureml.compute", {}, {"options": {"azureml": {"compute": "x"}}}, "itself"),
    ("options.azureml.inputs", {}, {"options": {"azureml": {"inputs": {}}}}, "itself"),
    ("options.azureml.limits", {}, {"options": {"azureml": {"limits": {"timeout": 5}}}}, "itself"),
    (
        "options.azureml.resources.shm_size",
        {},
        {"options": {"azureml": {"resources": {"shm_size": "1g"}}}},
        "itself",
    ),
    (
        "options.azureml.resources.docker_args",
        {},
        {"options": {"azureml": {"resources": {"docker_args": ["--ipc=host"]}}}},
        "must be text",
    ),
    (
        "options.azureml.resources.locations",
        CLUSTER,
        {"options": {"azureml": {"resources": {"locations": ["westeurope"]}}}},
        "serverless",
    ),
    (
        "options.azureml.environment_variables.CLOUDTRAIN_NODES",
        {},
        {"options": {"azureml": {"environment_variables": {"CLOUDTRAIN_NODES": "9"}}}},
        "itself",
    ),
    (
        "options.azureml.environment_variables.A",
        {},
        {"options": {"azureml": {"environment_variables": {"A": 1}}}},
        "must be text",
    ),
    (
        "options.azureml.services.s.type",
        {},
        {"options": {"azureml": {"services": {"s": {"type": "telnet"}}}}},
        "none of ssh",
    ),
    (
        "options.azureml.services.s.type",
        {},
        {"options": {"azureml": {"services": {"s": {"type": ["ssh"]}}}}},
        "none of ssh",
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("field", "given", "fields", "says"), REFUSED, ids=[f"{i}-{r[0]}" for i, r in enumerate(REFUSED)]
)
def test_refused(
    field: str,
    given: dict[str, Any],
    fields: dict[str, Any],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    error = refused(given, **fields)
    assert error.field == field
    assert says in f"{error}; {error.hint}"
    assert "\n" not in str(error)
    assert "sig=" not in str(error)
    assert not isinstance(error, UnsupportedError) or error.provider == "azureml"


@for_each(
    ("field", "given", "says"),
    [
        ("azureml.identity", {"identity": "manage_identity"}, "did you mean 'managed_identity'"),
        ("azureml.identity", {"identity": "user_identity:x"}, "managed_identity:CLIENT-ID"),
        ("azureml.identity", {"identity": "managed_identity:"}, "managed_identity:CLIENT-ID"),
        ("azureml.job_tier", {"job_tier": "spott"}, "did you mean 'spot'"),
        ("azureml.job_tier", {"job_tier": "spot", "compute": "c1"}, "serverless"),
        ("azureml.priority", {"priority": "urgent"}, "valid values: low, medium, high"),
        ("azureml.compute", {"compute": "azureml:c"}, "name of a cluster"),
        ("azureml.datastore", {"datastore": "a/b"}, "name of a datastore"),
        ("azureml.environment", {"environment": "pytorch:2"}, "azureml:NAME:VERSION"),
        ("azureml.prices", {"prices": {"a": -1}}, "US dollars"),
        ("azureml.cloud", {"cloud": "AzureUSGov"}, "did you mean 'AzureUSGovernment'"),
        ("azureml.cloud_metadata", {"cloud_metadata": METADATA}, "another name"),
        ("azureml.cloud_metadata", {"cloud_metadata": "x"}, "must be a table"),
        (
            "azureml.cloud_metadata.resource_manager",
            {"cloud": "Own", "cloud_metadata": {**METADATA, "resource_manager": "http://x"}},
            "https",
        ),
        (
            "azureml.cloud_metadata.portal",
            {"cloud": "Own", "cloud_metadata": {**METADATA, "portal": "x"}},
            "no such key",
        ),
    ],
)
def test_settings_are_checked(field: str, given: dict[str, Any], says: str) -> None:
    with pytest.raises(SpecError) as caught:
        Provider(**{**WORKSPACE, **given})
    assert caught.value.field == field
    assert says in f"{caught.value}; {caught.value.hint}"


@pytest.mark.parametrize("place", [".azureml/config.json", "config.json", "aml_config/project.json"])
def test_the_workspace_of_azures_own_file(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {name: f"{name}-file" for name in ("subscription_id", "resource_group", "workspace_name")}
    (tmp_path / place).parent.mkdir(exist_ok=True)
    (tmp_path / place).write_text(json.dumps(config))
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path / "below")
    assert dataclasses.asdict(Provider().settings).items() >= config.items()
    assert Provider(workspace_name="mine").settings.subscription_id == "", "settings of two workspaces must not mix"
    (tmp_path / "below" / "config.json").write_text('{"hidden_size": 768}')
    assert Provider().settings.workspace_name == "workspace_name-file", "a model's configuration is not a workspace's"
    (tmp_path / "below" / "config.json").write_text("not json")
    assert Provider().settings.workspace_name == "workspace_name-file"


def test_the_workspace_of_azures_own_file_as_a_scope(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scope = "/subscriptions/s-1/resourceGroups/g/providers/Microsoft.MachineLearningServices/workspaces/w"
    (tmp_path / "config.json").write_text(json.dumps({"Scope": scope}))
    monkeypatch.chdir(tmp_path)
    found = Provider().settings
    assert (found.subscription_id, found.resource_group, found.workspace_name) == ("s-1", "g", "w")
    (tmp_path / "config.json").write_text('{"Scope": ["x"]}')
    assert Provider().settings.subscription_id == ""


def test_a_data_asset_is_not_a_folder() -> None:
    long = "azureml://subscriptions/s/resourcegroups/g/workspaces/w"
    assets = ["azureml:digits:1", "azureml://registries/r/data/x/versions/1", f"{long}/data/x/labels/latest"]
    for url in assets:
        assert planned(inputs={"d": url}).body["inputs"]["d"]["path"] == url
    folder = f"{long}/datastores/d/paths/data/x/versions"
    assert planned(inputs={"d": folder}).body["inputs"]["d"]["path"] == f"{folder}/"


def test_a_request_has_a_digest_of_itself() -> None:
    first, again = planned(), planned()
    assert first.body["tags"]["cloudtrain.request"] == again.body["tags"]["cloudtrain.request"]
    others = [
        planned(image="team/other:1"),
        planned(max_runtime=600),
        planned(options={"azureml": {"description": "x"}}),
    ]
    assert len({request.body["tags"]["cloudtrain.request"] for request in (first, *others)}) == 4


def test_an_unknown_cluster_has_one_rank_a_node() -> None:
    silent = planned(CLUSTER)
    assert silent.context["processes"] == 1
    why = "each node of cluster gpu-cluster gets one rank, also if it has several GPUs"
    assert silent.notes == (f"{why}; say gpu, or nproc_per_node, for one a GPU",)
    for fields in ({"gpu": "H100:8"}, {"nproc_per_node": 8}):
        assert not any("one rank" in note for note in planned(CLUSTER, **fields).notes)


def test_a_store_by_its_datastore(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check a plan, which cannot ask Azure for the datastore's container. test_azureml_reconcile has the answer."""
    provider = Provider(**WORKSPACE)
    for url, field, says in (
        ("azureml://datastores/other/paths/x", "azureml.datastore", "set datastore = 'other'"),
        ("azureml://datastores/workspaceblobstore/x", "store", "azureml://datastores/NAME/paths/"),
        ("azureml://datastores/workspaceblobstore/paths/x", "store", "a plan asks no server"),
    ):
        with pytest.raises(SpecError, match=re.escape(says)) as caught:
            provider.store_url(url, ask=False)
        assert caught.value.field == field


# ---------------------------------------------------------------------------------------------- against the SDK's rules

TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=40)
URLS = st.one_of(
    st.sampled_from([
        f"abfs://contract@{ACCOUNT}/x", f"abfss://other@{ACCOUNT}/x.csv", "azureml:digits:1", "adl://a.example/x",
        "azureml://datastores/d/paths/x", "wasbs://c@acct.blob.core.windows.net/x.parquet", "abfs://nobody/x",
    ]),
    st.builds("abfs://contract@{}/{}".format, st.just(ACCOUNT), st.text("abc/é ?#&={}$%'\"\\", max_size=60)),
    st.builds("https://acct.blob.core.windows.net/c/{}".format, st.text("abc/é ?#&={}$%.", max_size=60)),
)  # fmt: skip
TYPES = st.sampled_from(
    ["Standard_DS3_v2", "standard_nc4as_t4_v3", "Standard_ND9_X", "Standard_HB120rs_v3", "a b", "x" * 90, "ü"]
)
GPUS = st.lists(
    st.sampled_from(["T4:1", "T4:4", "H100:8", "H100-NVL:1", "A100-80GB:4", "V100-32GB:8", "GB200:4", "A10:1"]),
    max_size=3,
)
OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "description": TEXT,
        "display_name": TEXT,
        "properties": st.dictionaries(TEXT, TEXT, max_size=2),
        "environment_variables": st.dictionaries(st.text("aB_1=é", max_size=4), TEXT, max_size=3),
        "resources": st.fixed_dictionaries(
            {},
            optional={
                "docker_args": st.one_of(TEXT, st.lists(TEXT, max_size=2)),
                "locations": st.lists(TEXT, max_size=2),
                "max_instance_count": st.integers(-1, 9),
                "properties": st.dictionaries(
                    TEXT, st.one_of(TEXT, st.booleans(), st.just({"a": {"b": 1}})), max_size=2
                ),
                "shm_size": st.just("1g"),
            },
        ),
        "services": st.dictionaries(
            st.text("ab-", min_size=1, max_size=3),
            st.fixed_dictionaries(
                {"type": st.sampled_from(["ssh", "jupyter_lab", "tensor_board", "vs_code", "x"])},
                optional={"nodes": st.sampled_from(["all", "1"]), "ssh_public_keys": TEXT, "log_dir": TEXT},
            ),
            max_size=2,
        ),
        "parent_job_name": TEXT,
        "queue_settings": st.just({"priority": "low"}),
        "tags": st.just({"x": "y"}),
    },
)
JOBS = st.fixed_dictionaries(
    {},
    optional={
        "name": st.from_regex(r"[a-z0-9](-?[a-z0-9]){0,30}", fullmatch=True),
        "image": st.one_of(
            st.none(),
            st.just("ghcr.io/a:1"),
            st.sampled_from(
                ["azureml:e:1", "azureml:e@latest", "azureml://registries/azureml/environments/e/versions/1"]
            ),
            st.text("ab:/@.-{}$", min_size=1, max_size=30),
        ),
        "instance_count": st.integers(1, 4096),
        "instance_type": TYPES,
        "gpu": GPUS,
        "nproc_per_node": st.integers(1, 8),
        "cpus": st.integers(1, 100),
        "memory_gb": st.integers(1, 700),
        "disk_gb": st.integers(1, 100),
        "shm_gb": st.integers(1, 2000),
        "spot": st.booleans(),
        "max_runtime": st.integers(1, 100_000_000),
        "max_wait": st.integers(1, 3_000_000),
        "max_cost": st.floats(0.0001, 1e9),
        "retries": st.integers(0, 100),
        "tags": st.dictionaries(TEXT.filter(bool), TEXT, max_size=4),
        "inputs": st.dictionaries(
            st.from_regex(r"[A-Za-z][A-Za-z0-9_-]{0,62}", fullmatch=True),
            st.fixed_dictionaries({"url": URLS}, optional={"mode": st.sampled_from(["auto", "copy", "mount"])}),
            max_size=4,
        ),
        "args": st.lists(TEXT, max_size=2),
        "resume_from": st.just(f"{STORE}/runs/q/live/checkpoints"),
        "options": st.fixed_dictionaries({"azureml": OPTIONS}),
    },
)
SETTINGS = st.fixed_dictionaries(
    {},
    optional={
        "compute": st.sampled_from(["", "c1", "gpu-cluster"]),
        "environment": st.sampled_from(["", "azureml:e:1"]),
        "experiment_name": st.text("ab-_ ü", max_size=10),
        "identity": st.sampled_from(["", "aml_token", "user_identity", "managed_identity", "managed_identity:a-1"]),
        "job_tier": st.sampled_from(["", "spot", "basic", "standard", "premium"]),
        "priority": st.sampled_from(["", "low", "medium", "high"]),
        "datastore": st.sampled_from(["workspaceblobstore", "d_1"]),
    },
)
MODES = {"download": "Download", "ro_mount": "ReadOnlyMount", "rw_mount": "ReadWriteMount"}
ID = "/subscriptions/s/resourceGroups/g/providers/Microsoft.MachineLearningServices/workspaces/w"
PRIORITIES = {"low": 1, "medium": 2, "high": 3}
KINDS = {"ssh": "SSH", "jupyter_lab": "JupyterLab", "tensor_board": "TensorBoard", "vs_code": "VSCode"}
TYPES_OF_IDENTITY = {"aml_token": "AMLToken", "user_identity": "UserIdentity", "managed_identity": "Managed"}


def on_the_wire(document: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
    """Return (properties of the body, environment) from azure-ai-ml's own loader of a document."""
    from azure.ai.ml import load_job
    from azure.ai.ml._restclient.arm_ml_service._utils.model_base import SdkJSONEncoder

    logging.getLogger("azure.ai.ml").setLevel(logging.ERROR)
    made: Any = load_job(io.StringIO(json.dumps(document)))
    made = made._to_job() if hasattr(made, "_to_job") else made
    environment = made.environment
    environment = environment if isinstance(environment, str) else {"image": environment.image}
    # Replace the SDK's calls to the workspace.
    made.environment = f"{ID}/environments/any/versions/1"
    if made.compute:
        made.compute = f"{ID}/computes/{made.compute}"
    body = json.loads(json.dumps(made._to_rest_object(), cls=SdkJSONEncoder, exclude_readonly=True))
    assert model_errors(body) == []
    resolved = json.loads(json.dumps(body))
    for item in resolved["properties"]["inputs"].values():
        if "://" not in item["uri"]:  # a data asset: the SDK asks the workspace for its id
            item["uri"] = f"{ID}/data/{item['uri'].replace(':', '/versions/')}"
    assert broken_rules(str(made.name), resolved) == []
    return body["properties"], environment


def expected(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the same by an independent reading: every field of the document, and Azure's additions to every job."""

    def items(kind: str) -> dict[str, Any]:
        word = f"job{kind[:-1].capitalize()}Type"
        return {
            name: {word: item["type"], "mode": MODES[item["mode"]], "uri": item["path"].removeprefix("azureml:")
                   if not item["path"].startswith("azureml:/") else item["path"]}
            for name, item in document[kind].items()
        }  # fmt: skip

    resources = document["resources"]
    camel = {
        "instance_type": "instanceType", "instance_count": "instanceCount", "shm_size": "shmSize",
        "docker_args": "dockerArgs", "locations": "locations",
    }  # fmt: skip
    found: dict[str, Any] = {
        "jobType": "Command",
        "isArchived": False,
        "displayName": document["display_name"],
        "experimentName": document["experiment_name"],
        "command": document["command"],
        "environmentId": f"{ID}/environments/any/versions/1",
        "environmentVariables": document["environment_variables"],
        "inputs": items("inputs"),
        "outputs": items("outputs"),
        "tags": document["tags"],
        "properties": document.get("properties", {}),
        "limits": {"jobLimitsType": "Command"},
        "resources": {
            "properties": resources.get("properties", {}),
            **{camel[key]: value for key, value in resources.items() if key != "properties"},
        },
    }
    for ours, theirs in (("description", "description"), ("parent_job_name", "parentJobName")):
        if ours in document:
            found[theirs] = document[ours]
    if "compute" in document:
        found["computeId"] = f"{ID}/computes/{document['compute'].removeprefix('azureml:')}"
    if "distribution" in document:
        found["distribution"] = {"distributionType": "PyTorch", "processCountPerInstance": 1}
    if queue := document.get("queue_settings"):
        found["queueSettings"] = {
            **({"jobTier": queue["job_tier"].capitalize()} if "job_tier" in queue else {}),
            **({"priority": PRIORITIES[queue["priority"]]} if "priority" in queue else {}),
        }
    if identity := document.get("identity"):
        client = {"clientId": identity["client_id"]} if "client_id" in identity else {}
        found["identity"] = {"identityType": TYPES_OF_IDENTITY[identity["type"]], **client}
    if (services := document.get("services")) is not None:
        found["services"] = {name: _service(item) for name, item in services.items()}
    return found


def _service(item: Mapping[str, str]) -> dict[str, Any]:
    words = {"ssh_public_keys": "sshPublicKeys", "log_dir": "logDir"}
    properties = {words[key]: value for key, value in item.items() if key in words}
    return {
        "jobServiceType": KINDS[item["type"]],
        **({"nodes": {"nodesValueType": "All"}} if "nodes" in item else {}),
        **({"properties": properties} if properties else {}),
    }


def _planned(given: dict[str, Any], fields: dict[str, Any]) -> Request | SpecError:
    try:
        return planned(given, **fields)
    except SpecError as exc:
        return exc


@pytest.mark.slow
@settings(max_examples=examples(3 * TRIALS or 300), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(SETTINGS, JOBS)
def test_what_is_planned_is_what_the_sdk_sends(given: dict[str, Any], fields: dict[str, Any]) -> None:
    """Check that the SDK sends every field of the document and nothing else, or that the plan names a refused field."""
    request = _planned(given, fields)
    event("refused" if isinstance(request, SpecError) else "planned")
    if isinstance(request, SpecError):
        assert request.field
        assert "\n" not in str(request)
        return
    document = request.body
    sent, environment = on_the_wire(document)
    timeout = sent["limits"].pop("timeout")
    assert seconds_of(timeout) == document["limits"]["timeout"]
    assert sent == expected(document)
    environment_of_plan = document["environment"]
    assert environment == (
        environment_of_plan
        if isinstance(environment_of_plan, dict) or "//" in environment_of_plan
        else environment_of_plan.removeprefix("azureml:")
    )
    Provider(**{**WORKSPACE, **given}).launch_spec(request)


# -------------------------------------------------------------------------------------------------------- started nodes


def test_nodes_of_a_request() -> None:
    url = f"abfs://contract@{ACCOUNT}"
    inputs = {"train": f"{url}/x", "one": f"{url}/y.csv", "far": "abfs://c@acct.dfs.core.windows.net/z"}
    request = planned(gpu="T4:4", instance_count=3, inputs=inputs, shm_gb=4)
    simulation = Provider(**WORKSPACE).launch_spec(request)
    assert len(simulation.nodes) == 3
    node = simulation.nodes[1]
    assert (node.gpus, node.cpus, node.platform, node.shm) == (4, 64, "linux/amd64", 4 << 30)
    assert (node.image, node.env["NODE_RANK"], node.env["MASTER_ADDR"]) == ("team/trainer:1", "1", "node-0")
    assert {(mount.url, mount.kind) for mount in node.mounts} == {
        (f"{STORE}/runs/r/container", "copy"),
        (f"{STORE}/runtime/{'d' * 64}", "copy"),
        (f"{STORE}/code/{'c' * 64}", "copy"),
        (f"{STORE}/runs/r/live", "sync"),
        (f"{url}/x", "mount"),
        (f"{url}/y.csv", "copy"),
        ("abfs://c@acct.dfs.core.windows.net/z", "mount"),
    }
    places = {mount.path for mount in node.mounts}
    pairs = dict(word.split("=", 1) for before, word in zip(node.command, node.command[1:], strict=False)
                 if before == "--path")  # fmt: skip
    assert {pairs["live"], pairs["input.train"], pairs["file.one"]} <= places
    assert "${{" not in json.dumps(simulation.to_dict())
    assert (simulation.rules.time_limit, simulation.rules.stop_signal) == (86400, "SIGTERM")
    assert simulation.rules.restart_on == ()
    alone = Provider(**WORKSPACE).launch_spec(planned()).nodes
    assert [node.env for node in alone] == [{"CLOUDTRAIN_NODES": "1", "AZUREML_RUN_ID": planned().body["name"]}]


def test_the_catalogue_knows_a_cheap_machine_and_no_part_of_a_gpu() -> None:
    known = {machine.instance_type: machine for machine in catalog.machines("azureml")}
    assert known["Standard_DS3_v2"].gpu == ""
    assert "Standard_NV6ads_A10_v5" not in known
    with pytest.raises(UnsupportedError):
        planned(gpu="A10:4")
