"""Provider ``azureml``: command jobs of Azure Machine Learning.

Its Request is the document that ``az ml job create -f`` takes, as JSON. `sdk` sends it through azure-ai-ml. `api`
makes all other calls over azure-core.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ...provider_api.protocol import Need, setting
from .._cloud import CloudProvider

__all__ = ["DIFFERENCES", "NAME", "SAMPLE", "Provider", "Settings"]

NAME = "azureml"
KEEP_WARM = "cloudtrain.keep_warm"
"""Property of a job with its ``keep_warm`` in seconds."""
STORE = Need(
    example="abfs://CONTAINER@ACCOUNT.dfs.core.windows.net/PREFIX",
    find="az ml datastore list -o table",
    stand_in="abfs://missing-container@missingaccount.dfs.core.windows.net",
    shown="abfs://<container>@<account>.dfs.core.windows.net",
)
SUBSCRIPTION = Need(example="00000000-0000-0000-0000-000000000000", find="az account show --query id")
GROUP = Need(example="GROUP", find="az group list -o table")
WORKSPACE = Need(example="WORKSPACE", find="az ml workspace list -o table; or Studio's config.json here")
ENVIRONMENT = Need(
    example="azureml://registries/azureml/environments/acpt-pytorch-2.8-cuda12.6/labels/latest",
    find="az ml environment list --registry-name azureml; or --image",
    stand_in="azureml:missing-environment:1",
    instead="image",
)
ALIASES = ("azure", "aml", "az", "microsoft")
"""Other words for the platform, for the hint of an unknown provider."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of the workspace, in Azure ML's own words."""

    subscription_id: str = setting(
        "subscription of the workspace; default of these three: Azure ML's own config.json, in this folder or above",
        need=SUBSCRIPTION,
    )
    resource_group: str = setting("resource group of the workspace", need=GROUP)
    workspace_name: str = setting("name of the workspace", place=True, need=WORKSPACE)
    datastore: str = setting("the workspace's name of the store's container", "workspaceblobstore")
    compute: str = setting("cluster that runs the jobs; default: serverless")
    environment: str = setting(
        "for a job without an image: azureml:NAME:VERSION, azureml:NAME@latest, azureml://registries/…",
        need=ENVIRONMENT,
    )
    experiment_name: str = setting("experiment that shows the jobs in Studio; default: the job's name")
    identity: str = setting(
        "identity of a job: aml_token, user_identity, managed_identity, managed_identity:CLIENT-ID; "
        "default: the platform's"
    )
    job_tier: str = setting("tier of serverless compute", choices=("spot", "basic", "standard", "premium"))
    priority: str = setting("priority in the queue", choices=("low", "medium", "high"))
    ssh_public_key: str = setting("text of a public key, whose owner may enter interactive jobs")
    cloud: str = setting("AzureCloud, AzureUSGovernment, AzureChinaCloud, or a name of your own", "AzureCloud")
    cloud_metadata: dict[str, Any] = setting("table of addresses of a cloud of your own", dict)
    api_version: str = setting("version of calls to the resource manager", "2025-01-01-preview")
    prices: dict[str, Any] = setting("US dollars an hour by instance type or cluster", dict)


class Provider(CloudProvider):
    """Provider of Azure ML command jobs; see `cloudtrain.provider_api.protocol.Provider` for the methods."""

    name: ClassVar[str] = NAME
    Settings: ClassVar[type[Any]] = Settings
    schemes: ClassVar[frozenset[str]] = frozenset({"abfs", "abfss", "az", "azureml", "https", "wasbs", "adl"})
    retried_by: ClassVar[str] = "client"
    max_wait_by: ClassVar[str] = "client"
    min_poll_s: ClassVar[float] = 1.0
    max_poll_s: ClassVar[float] = 5.0
    needs: ClassVar[Mapping[str, Need]] = {"store": STORE}
    keeps_warm: ClassVar[bool] = True
    warm_setting: ClassVar[str] = "compute"
    warm_hint: ClassVar[str] = "set azureml.compute to a cluster: its idle time before scale-down keeps machines warm"

    def picks_machine(self) -> bool:
        return not self.settings.compute

    def store_url(self, url: str, *, ask: bool) -> str:
        """Return the container's URL of ``azureml://datastores/NAME/paths/…``; see `Settings.resolved`."""
        from .urls import store_url

        own = self.settings
        workspace = (own.subscription_id, own.resource_group, own.workspace_name)
        return store_url(url, own.datastore, self.account.datastore if ask else None, workspace=workspace)


DIFFERENCES = (
    "mounts are folders of this machine, which every node sees at once, and in which appending works",
    "a machine that is taken back fails the job, the harder of the two documented cases of Azure ML",
    "there is no identity: nothing of Azure can be reached as it",
)
"""Differences that a rehearsal does not show."""
SAMPLE = {
    "settings": {
        "subscription_id": "11111111-2222-3333-4444-555555555555",
        "resource_group": "training",
        "workspace_name": "contract",
        "ssh_public_key": "ssh-ed25519 AAAA contract",
        "prices": {"Standard_DS3_v2": 0.3, "Standard_NC4as_T4_v3": 0.6},
    },
    "store": "abfs://contract@contractstore.dfs.core.windows.net/store",
    "job": {"image": "registry.example/team/trainer:1"},
    "rows": {
        "resources.instance_type": {"instance_type": "Standard_F4s_v2"},
        "resources.gpu": {"gpu": ("T4:4",)},
        "resources.cpus": {"cpus": 8},
        "max_cost": {"max_cost": 0.5},
        "options": {"options": {"azureml": {"properties": {"team": "vision"}}}},
    },
    "secret": "azure:contract-vault/contract",
}
