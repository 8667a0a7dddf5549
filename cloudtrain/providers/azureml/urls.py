"""Addresses of Azure: the hosts of its clouds, and URLs of its storage in fsspec's form and in a command job's. Pure.

The store is one container. A datastore of the workspace is that container too, so a path is the same in both.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...errors import SpecError, UnsupportedError
from ...validate import did_you_mean, url_scheme
from . import NAME

if TYPE_CHECKING:
    from . import Settings

CLOUDS: Mapping[str, tuple[str, str, str, str]] = {
    "AzureCloud": ("management.azure.com", "login.microsoftonline.com", "ml.azure.com", "core.windows.net"),
    "AzureUSGovernment": (
        *("management.usgovcloudapi.net", "login.microsoftonline.us", "ml.azure.us", "core.usgovcloudapi.net"),
    ),
    "AzureChinaCloud": (
        *("management.chinacloudapi.cn", "login.chinacloudapi.cn", "ml.azure.cn", "core.chinacloudapi.cn"),
    ),
}
"""Hosts of resource manager, authority, studio and accounts: azure-ai-ml 1.35.2, ``_azure_environments.py``."""
METADATA = (
    "azure_portal", "resource_manager", "active_directory", "aml_resource_id", "storage_endpoint",
    "registry_discovery_endpoint",
)  # fmt: skip
PUBLIC = "core.windows.net"
FSSPEC = frozenset({"abfs", "abfss", "az"})
"""The schemes of Azure Storage; Azure ML accepts only the second."""
_DATASTORE = re.compile(r"azureml://(?:subscriptions/.+/)?datastores/(?P<name>[^/]+)/paths/(?P<path>.*)")
_WORKSPACE = re.compile(
    r"azureml://subscriptions/([^/]+)/resourcegroups/([^/]+)/(?:providers/[^/]+/)?workspaces/([^/]+)/", re.I
)
_HOST = re.compile(r"(?P<account>[a-z0-9]{3,24})\.(?:dfs|blob)\.(?P<suffix>[a-z0-9.-]+)")
_AMISS = re.compile(r"[\x00-\x1f\x7f?#{}$\\\"'`<>|]")
"""Characters that a job's URI cannot hold or a shell would read. A ``?`` begins a SAS, which the records would keep."""


@dataclass(frozen=True, kw_only=True)
class Blob:
    """Place in Azure Storage. ``host`` is the account's; empty if the URL leaves it to the environment."""

    container: str
    host: str
    path: str

    @classmethod
    def parse(cls, url: str) -> Blob:
        """Parse ``abfs://container[@account.dfs.core.windows.net]/path``, and the same with other schemes."""
        authority, _, path = url.partition("://")[2].partition("/")
        container, _, host = authority.partition("@")
        return cls(container=container, host=host.lower(), path=path.strip("/"))

    def within(self, other: Blob) -> bool:
        """Return True if both are in one container."""
        return (self.container, self.host) == (other.container, other.host)

    def wasbs(self) -> str | None:
        """Return the form for a job, None without an account. It uses the blob endpoint, which every account has."""
        host = _HOST.fullmatch(self.host)
        return f"wasbs://{self.container}@{host['account']}.blob.{host['suffix']}/{self.path}" if host else None


def datastore_uri(datastore: str, path: str) -> str:
    """Return the short form, in the job's own workspace."""
    return f"azureml://datastores/{datastore}/paths/{path}"


def check_url(url: str, field: str) -> None:
    """Raise `UnsupportedError` for text that no run's URL may hold, such as a SAS. The message does not repeat it."""
    amiss = _AMISS.search(url) or (url_scheme(url) != "https" and re.search("%", url))
    if amiss:
        why, hint = f"its URL holds {amiss[0]!r}", "rename the file or folder"
        if amiss[0] == "?":
            why, hint = f"{why}: the run's records would show a SAS or query", "use a datastore or an identity"
        raise UnsupportedError(NAME, field, why, hint=hint)


def for_job(url: str, *, store: str, datastore: str, field: str) -> str:
    """Return ``url`` as an input's path, with no closing slash. Raises `UnsupportedError` for ``field``."""
    check_url(url, field)
    scheme = url_scheme(url)
    if scheme not in FSSPEC:
        return url.rstrip("/")
    blob = Blob.parse(url)
    if blob.within(Blob.parse(store)):
        return datastore_uri(datastore, blob.path)
    if (other := blob.wasbs()) is None:
        hint = f"write abfs://{blob.container}@ACCOUNT.dfs.core.windows.net/{blob.path}, or azureml://datastores/…"
        raise UnsupportedError(NAME, field, f"{url} does not name the storage account", hint=hint)
    return other


def for_fsspec(uri: str, *, run: str, datastore: str) -> str:
    """Return a job's path as an fsspec URL, with no closing slash: the inverse of `for_job`."""
    uri = uri.rstrip("/")
    match = _DATASTORE.fullmatch(uri)
    if match and match["name"] == datastore:
        scheme, _, rest = run.partition("://")
        return f"{scheme}://{rest.partition('/')[0]}/{match['path']}".rstrip("/")
    if url_scheme(uri) == "wasbs":
        return f"abfs://{uri.partition('://')[2]}".replace(".blob.", ".dfs.", 1)
    return uri


def store_url(
    url: str, datastore: str, ask: Callable[[str], Mapping[str, Any]] | None, *, workspace: tuple[str, str, str]
) -> str:
    """Return the container of ``azureml://datastores/NAME/paths/…`` by its properties from ``ask``, which may be None.

    The long form may name only the settings' ``workspace`` (subscription, resource group, name). Raises `SpecError`
    (``store``, or ``azureml.datastore`` when the jobs would write into another one).
    """
    check_url(url, "store")
    match = _DATASTORE.fullmatch(url)
    if match is None:
        raise SpecError(f"{url!r} is not azureml://datastores/NAME/paths/…", field="store")
    named = _WORKSPACE.match(url)
    if named and [word.lower() for word in named.groups()] != [word.lower() for word in workspace]:
        why = f"is in the workspace {'/'.join(named.groups())}, and the settings name {'/'.join(workspace)}"
        raise SpecError(why, field="store")
    if match["name"] != datastore:
        why = f"is {datastore!r}, and the store is in {match['name']!r}"
        raise SpecError(why, field="azureml.datastore", hint=f"set datastore = {match['name']!r}")
    if ask is None:
        how = f"write abfs://CONTAINER@ACCOUNT.dfs.core.windows.net/{match['path']}, or submit without a plan"
        how += f"\nto see the container and account, run: az ml datastore show --name {datastore}"
        raise SpecError(f"a plan asks no server, so it cannot find the account of {url}", field="store", hint=how)
    properties = ask(datastore)
    container = properties.get("containerName") or properties.get("filesystem")
    if not container or not properties.get("accountName"):
        kind = properties.get("datastoreType") or "unknown kind"
        raise SpecError(f"datastore {datastore!r} is not a container of Azure Storage ({kind})", field="store")
    host = f"{properties['accountName']}.dfs.{properties.get('endpoint') or 'core.windows.net'}"
    return f"abfs://{container}@{host}/{match['path']}".rstrip("/")


def storage(url: str, cloud: Cloud, environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the options of a store at ``url``: the environment's key if it has one, else the signed-in user.

    Other clouds than the public one need the host and the sign-in address. Raises `SpecError` for an account of
    another cloud than ``cloud``.
    """
    if url_scheme(url) not in FSSPEC:
        return {}
    options: dict[str, Any] = {} if environ.get("AZURE_STORAGE_ANON") else {"anon": False}
    host = _HOST.fullmatch(Blob.parse(url).host)
    if host is None or host["suffix"] == PUBLIC:
        return options
    if host["suffix"] != cloud.storage:
        why = f"is {cloud.name}, whose accounts are in {cloud.storage}, and the store is in {host['suffix']}"
        raise SpecError(why, field="azureml.cloud", hint="set cloud to the cloud of the store")
    options |= {"account_name": host["account"], "account_host": f"{host['account']}.blob.{host['suffix']}"}
    options["authority"] = cloud.authority
    if cloud.metadata is not None:
        options["disable_instance_discovery"] = True
    return options


# ------------------------------------------------------------------------------------------------------ hosts of clouds


@dataclass(frozen=True, kw_only=True)
class Cloud:
    """Addresses for calls and sign-in. ``storage`` is the suffix of the accounts' hosts.

    ``name`` is the SDK's cloud name, ``metadata`` the further values that the SDK needs.
    """

    name: str
    resource_manager: str
    authority: str
    studio: str
    storage: str
    metadata: Mapping[str, str] | None = None

    @property
    def scope(self) -> str:
        """Return the scope of the resource manager's token."""
        return f"{self.resource_manager}/.default"


def cloud_of(settings: Settings) -> Cloud:
    """Return the cloud of the settings. Raises `SpecError`."""
    name, metadata = settings.cloud or "AzureCloud", settings.cloud_metadata
    if not isinstance(metadata, Mapping):
        raise SpecError(f"must be a table of {', '.join(METADATA)}, not {metadata!r}", field="azureml.cloud_metadata")
    if not metadata:
        if name not in CLOUDS:
            known = ", ".join(CLOUDS)
            near = did_you_mean(name, CLOUDS) or "for any other cloud, set azureml.cloud_metadata too"
            raise SpecError(f"{name!r} is none of {known}", field="azureml.cloud", hint=near)
        *hosts, storage = CLOUDS[name]
        manager, authority, studio = (f"https://{host}" for host in hosts)
        return Cloud(name=name, resource_manager=manager, authority=authority, studio=studio, storage=storage)
    if name in CLOUDS:
        why, hint = f"is set, and {name} needs none", "remove cloud_metadata, or give your cloud another name"
        raise SpecError(why, field="azureml.cloud_metadata", hint=hint)
    for key in METADATA:
        value, host = metadata.get(key), key == "storage_endpoint"
        if not isinstance(value, str) or not (host or value.startswith("https://")):
            form = "a host name" if host else "an https:// URL"
            raise SpecError(f"must be {form}, not {value!r}", field=f"azureml.cloud_metadata.{key}")
    for key in metadata:
        if key not in METADATA:
            raise SpecError("no such key", field=f"azureml.cloud_metadata.{key}", hint=did_you_mean(key, METADATA))
    # The SDK keeps the first metadata of a name for the life of the process.
    digest = hashlib.sha256(json.dumps(dict(metadata), sort_keys=True).encode()).hexdigest()[:8]
    return Cloud(
        name=f"{name}-{digest}",
        resource_manager=metadata["resource_manager"].rstrip("/"),
        authority=metadata["active_directory"].rstrip("/"),
        studio=metadata["aml_resource_id"].rstrip("/"),
        storage=metadata["storage_endpoint"],
        metadata=dict(metadata),
    )
