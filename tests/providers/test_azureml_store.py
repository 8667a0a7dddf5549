"""A store by the name of its datastore: the container behind it, and the refused ones."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import azure.identity
import pytest
from rows import for_each

from cloudtrain.errors import SpecError
from cloudtrain.providers.azureml import SAMPLE, Provider
from cloudtrain.providers.azureml.urls import store_url
from cloudtrain.storage.files import TransferOptions
from cloudtrain.storage.obstore_config import find_access

WORKSPACE = ("1111-2222", "training", "vision")
BLOB = {"datastoreType": "AzureBlob", "accountName": "acct", "containerName": "c", "endpoint": "core.windows.net"}
LAKE = {"datastoreType": "AzureDataLakeGen2", "accountName": "acct", "filesystem": "fs"}
CHINA = {**BLOB, "endpoint": "core.chinacloudapi.cn"}
SHORT = "azureml://datastores/team/paths/a/b"
LONG = "azureml://subscriptions/1111-2222/resource{}roups/training/{}workspaces/Vision/datastores/team/paths/a/b"


def resolved(url: str, answer: Mapping[str, Any] = BLOB, datastore: str = "team") -> str:
    return store_url(url, datastore, {"team": answer}.__getitem__, workspace=WORKSPACE)


@for_each(
    ("url", "answer", "container"),
    [
        (SHORT, BLOB, "c@acct.dfs.core.windows.net/a/b"),
        (SHORT + "/", BLOB, "c@acct.dfs.core.windows.net/a/b"),
        ("azureml://datastores/team/paths/", BLOB, "c@acct.dfs.core.windows.net"),
        (SHORT, LAKE, "fs@acct.dfs.core.windows.net/a/b"),
        (SHORT, CHINA, "c@acct.dfs.core.chinacloudapi.cn/a/b"),
        (LONG.format("g", ""), BLOB, "c@acct.dfs.core.windows.net/a/b"),
        (LONG.format("G", "providers/Microsoft.MachineLearningServices/"), BLOB, "c@acct.dfs.core.windows.net/a/b"),
    ],
)
def test_a_datastore_is_its_container(url: str, answer: Mapping[str, Any], container: str) -> None:
    assert resolved(url, answer) == f"abfs://{container}"


@for_each(
    ("url", "field", "words"),
    [
        ("azureml://team/paths/a", "store", "is not azureml://datastores/NAME/paths/"),
        ("azureml://datastores/team/a", "store", "is not azureml://datastores/NAME/paths/"),
        ("azureml://datastores/other/paths/a", "azureml.datastore", "the store is in 'other'"),
        (LONG.format("g", "").replace("Vision", "speech"), "store", "the settings name 1111-2222/training/vision"),
        (LONG.format("g", "").replace("1111", "9999"), "store", "is in the workspace 9999-2222/training/Vision"),
    ],
)
def test_urls_outside_the_workspace_are_refused(url: str, field: str, words: str) -> None:
    with pytest.raises(SpecError) as caught:
        resolved(url)
    assert caught.value.field == field
    assert words in str(caught.value)


def test_a_datastore_of_files_is_refused() -> None:
    with pytest.raises(SpecError, match=r"'team' is not a container of Azure Storage \(AzureFile\)"):
        resolved(SHORT, {"datastoreType": "AzureFile", "accountName": "acct", "fileShareName": "s"})


def test_a_plan_asks_no_server_and_gives_a_hint() -> None:
    with pytest.raises(SpecError) as caught:
        store_url(SHORT, "team", None, workspace=WORKSPACE)
    assert "abfs://CONTAINER@ACCOUNT.dfs.core.windows.net/a/b" in caught.value.hint
    assert "\n" not in str(caught.value)


# ---------------------------------------------------------------------------------------------------------- credentials


METADATA = {
    "azure_portal": "https://portal.own.example",
    "resource_manager": "https://management.own.example",
    "active_directory": "https://login.own.example",
    "aml_resource_id": "https://ml.own.example",
    "storage_endpoint": "core.own.example",
    "registry_discovery_endpoint": "https://api.own.example/",
}
OWN: dict[str, Any] = {"cloud": "Own", "cloud_metadata": METADATA}


@pytest.fixture
def signed_out(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Remove all variables of Azure's storage."""
    for word in ("ANON", "ACCOUNT_NAME", "ACCOUNT_KEY", "CONNECTION_STRING", "SAS_TOKEN", "CLIENT_ID"):
        monkeypatch.delenv(f"AZURE_STORAGE_{word}", raising=False)
    return monkeypatch


def provider(**given: Any) -> Provider:
    return Provider(**{**SAMPLE["settings"], **given})  # type: ignore[dict-item]


def opened(url: str, **given: Any) -> Any:
    """Return the access to ``url``, as a store opens it."""
    return find_access(url, provider(**given).storage(url), os.environ, moving=TransferOptions())


@pytest.mark.parametrize(
    ("given", "suffix", "authority"),
    [
        ({}, "core.windows.net", None),
        ({"cloud": "AzureUSGovernment"}, "core.usgovcloudapi.net", "https://login.microsoftonline.us"),
        ({"cloud": "AzureChinaCloud"}, "core.chinacloudapi.cn", "https://login.chinacloudapi.cn"),
        (OWN, "core.own.example", "https://login.own.example"),
    ],
)
def test_the_signed_in_user_opens_a_store(
    given: dict[str, Any], suffix: str, authority: str | None, signed_out: pytest.MonkeyPatch
) -> None:
    url = f"abfs://c@acct.dfs.{suffix}/s"
    assert provider(**given).storage(url).get("authority") == authority
    made: list[dict[str, Any]] = []
    signed_out.setattr(azure.identity, "DefaultAzureCredential", lambda **words: made.append(words))
    found = opened(url, **given)
    assert (found.config["account_name"], found.config["endpoint"]) == ("acct", f"https://acct.blob.{suffix}")
    assert (found.config["skip_signature"], made[0].get("authority")) == (False, authority)


def test_a_key_and_anonymous_access_are_the_environments(signed_out: pytest.MonkeyPatch) -> None:
    url = "abfs://c@acct.dfs.core.windows.net/s"
    signed_out.setenv("AZURE_STORAGE_ANON", "true")
    assert provider().storage(url) == {}
    assert (opened(url).keys, opened(url).config["skip_signature"]) == (None, True)
    signed_out.delenv("AZURE_STORAGE_ANON")
    signed_out.setenv("AZURE_STORAGE_ACCOUNT_KEY", "a2V5")
    assert opened(url).keys()["access_key"] == "a2V5"
    signed_out.delenv("AZURE_STORAGE_ACCOUNT_KEY")
    string = "DefaultEndpointsProtocol=http;AccountName=acct;AccountKey=a2V5;BlobEndpoint=http://127.0.0.1:1/acct;"
    signed_out.setenv("AZURE_STORAGE_CONNECTION_STRING", string)
    assert opened(url).config["endpoint"] == "http://127.0.0.1:1/acct"


def test_other_schemes_are_not_azures_to_open() -> None:
    assert provider().storage("https://h/x") == {}


def test_a_store_of_another_cloud_is_refused() -> None:
    with pytest.raises(SpecError) as caught:
        provider().storage("abfs://c@acct.dfs.core.chinacloudapi.cn/s")
    assert caught.value.field == "azureml.cloud"
    assert "core.chinacloudapi.cn" in str(caught.value)
    assert caught.value.hint == "set cloud to the cloud of the store"
