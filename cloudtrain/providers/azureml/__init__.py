"""Provider ``azureml``: command jobs of Azure Machine Learning.

Its Request is the document that ``az ml job create -f`` takes, as JSON. `plan` and `preflight` make and check it. `sdk`
sends it through azure-ai-ml. `account` makes all other calls over azure-core. `states` and `pages` read the answers.
`simulation` predicts what Azure ML would start. `node` is the node half.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from ...provider_api.launch_spec import LaunchSpec
from ...provider_api.node import NodeEnvironment
from ...provider_api.protocol import Layout, LogPage, Need, ProviderExtras, Request, Status

if TYPE_CHECKING:
    from ...job.job import Job
    from ...provider_api.checks import Check
    from .api import Account

__all__ = ["DIFFERENCES", "SAMPLE", "Provider", "Settings"]

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
    """The workspace's settings, in Azure ML's own words.

    ``subscription_id``, ``resource_group`` and ``workspace_name`` are by default those of Azure ML's ``config.json`` in
    this folder or above. ``datastore`` is the workspace's name of the store's container. ``compute`` is a cluster; none
    means serverless. ``environment`` (``azureml:NAME:VERSION``, ``azureml://registries/…``) is for jobs without an
    image. ``identity`` is the job's own: ``aml_token``, ``user_identity``, ``managed_identity`` or
    ``managed_identity:CLIENT-ID``. ``job_tier`` (spot, basic, standard, premium) and ``priority`` (low, medium, high)
    are for the queue. ``cloud`` is the SDK's name of a sovereign cloud. If the SDK does not know it, ``cloud_metadata``
    is required. ``api_version`` is for the calls to the resource manager. ``prices`` are US dollars an hour by instance
    type, or cluster, for ``max_cost``.
    """

    subscription_id: str = field(default="", metadata={"need": SUBSCRIPTION})
    resource_group: str = field(default="", metadata={"need": GROUP})
    workspace_name: str = field(default="", metadata={"place": True, "need": WORKSPACE})
    datastore: str = "workspaceblobstore"
    compute: str = ""
    environment: str = field(default="", metadata={"need": ENVIRONMENT})
    experiment_name: str = ""
    identity: str = ""
    job_tier: str = ""
    priority: str = ""
    cloud: str = "AzureCloud"
    cloud_metadata: dict[str, Any] = field(default_factory=dict)
    api_version: str = "2025-01-01-preview"
    prices: dict[str, Any] = field(default_factory=dict)


class Provider(ProviderExtras):
    """Provider of Azure ML command jobs; see `cloudtrain.provider_api.protocol.Provider` for the methods."""

    name: ClassVar[str] = "azureml"
    Settings: ClassVar[type[Any]] = Settings
    schemes: ClassVar[frozenset[str]] = frozenset({"abfs", "abfss", "az", "azureml", "https", "wasbs", "adl"})
    retried_by: ClassVar[str] = "client"
    max_wait_by: ClassVar[str] = "client"
    min_poll_s: ClassVar[float] = 1.0
    max_poll_s: ClassVar[float] = 5.0
    needs: ClassVar[Mapping[str, Need]] = {"store": STORE}

    def __init__(self, **settings: Any) -> None:
        from .request import checked

        # Recorded with the run: every client that attaches asks the same workspace.
        self.settings: Settings = checked(Settings(**settings))
        self._account: Account | None = None

    def plan(self, job: Job, layout: Layout, attempt: int = 0, choice: int = 0) -> Request:
        from .request import plan

        return plan(self.settings, job, layout, attempt=attempt, choice=choice)

    @property
    def account(self) -> Account:
        """Return the account, created when first needed."""
        if self._account is None:
            from .api import Account

            self._account = Account(self.settings)
        return self._account

    def store_url(self, url: str, *, ask: bool) -> str:
        """Return the container's URL of ``azureml://datastores/NAME/paths/…``; see `Settings.resolved`."""
        from .urls import store_url

        own = self.settings
        workspace = (own.subscription_id, own.resource_group, own.workspace_name)
        return store_url(url, own.datastore, self.account.datastore if ask else None, workspace=workspace)

    def submit(self, request: Request, secrets: Mapping[str, str] | None = None) -> str:
        from .sdk import create

        return create(self.account, request)

    def find(self, request: Request) -> str | None:
        return self.account.find(request)

    def status(self, native_id: str) -> Status:
        from .status import status

        return status(self.account, native_id)

    def logs(self, native_id: str, cursor: Any = None) -> LogPage:
        from .logs import page

        return page(self.account, native_id, cursor)

    def cancel(self, native_id: str) -> None:
        self.account.cancel(native_id)

    def principal(self) -> str | None:
        """Return the token's owner: a user's name, else an application's or object's id."""
        from .api import named

        return named(self.account.credential.get_token(self.account.cloud.scope).token)

    def storage(self, url: str) -> Mapping[str, Any]:
        import os

        from .clouds import cloud_of
        from .urls import storage

        return storage(url, cloud_of(self.settings), os.environ)

    def checks(self, store: str, request: Request | None) -> Iterator[Check]:
        """Yield the checks of `doctor`."""
        from .doctor import checks

        yield from checks(self.account, store, request)

    @staticmethod
    def node_environment(environ: Mapping[str, str], argv: Mapping[str, str]) -> NodeEnvironment:
        from .node import node_environment

        return node_environment(environ, argv)

    def launch_spec(self, request: Request) -> LaunchSpec:
        from .launch_spec import launch_spec

        return launch_spec(request, datastore=self.settings.datastore)


DIFFERENCES = (
    "mounts are folders of this machine, which every node sees at once, and in which appending works",
    "a machine that is taken back fails the job, the harder of the two things that are told of Azure ML",
    "there is no identity: nothing of Azure can be reached as it",
)
"""Differences that a rehearsal does not show."""
SAMPLE = {
    "settings": {
        "subscription_id": "11111111-2222-3333-4444-555555555555",
        "resource_group": "training",
        "workspace_name": "contract",
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
