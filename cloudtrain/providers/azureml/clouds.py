"""The clouds of Azure, by the names and words of Azure ML's own SDK. Settings can add another cloud."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...errors import SpecError
from ...validate import did_you_mean

if TYPE_CHECKING:
    from . import Settings

__all__ = ["CLOUDS", "Cloud", "cloud_of"]

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
    name, told = settings.cloud or "AzureCloud", settings.cloud_metadata
    if not isinstance(told, Mapping):
        raise SpecError(f"must be a table of {', '.join(METADATA)}, not {told!r}", field="azureml.cloud_metadata")
    if not told:
        if name not in CLOUDS:
            known = ", ".join(CLOUDS)
            near = did_you_mean(name, CLOUDS) or "for any other cloud, set azureml.cloud_metadata too"
            raise SpecError(f"{name!r} is none of {known}", field="azureml.cloud", hint=near)
        *hosts, storage = CLOUDS[name]
        manager, authority, studio = (f"https://{host}" for host in hosts)
        return Cloud(name=name, resource_manager=manager, authority=authority, studio=studio, storage=storage)
    if name in CLOUDS:
        raise SpecError(f"{name} is known; metadata are for a cloud of another name", field="azureml.cloud_metadata")
    for key in METADATA:
        value, host = told.get(key), key == "storage_endpoint"
        if not isinstance(value, str) or not (host or value.startswith("https://")):
            form = "a host name" if host else "an https:// URL"
            raise SpecError(f"must be {form}, not {value!r}", field=f"azureml.cloud_metadata.{key}")
    for key in told:
        if key not in METADATA:
            raise SpecError("no such key", field=f"azureml.cloud_metadata.{key}", hint=did_you_mean(key, METADATA))
    # The SDK keeps the first metadata of a name for the life of the process.
    digest = hashlib.sha256(json.dumps(dict(told), sort_keys=True).encode()).hexdigest()[:8]
    return Cloud(
        name=f"{name}-{digest}",
        resource_manager=told["resource_manager"].rstrip("/"),
        authority=told["active_directory"].rstrip("/"),
        studio=told["aml_resource_id"].rstrip("/"),
        storage=told["storage_endpoint"],
        metadata=dict(told),
    )
