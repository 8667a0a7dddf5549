"""Call Azure over azure-core alone: the resource manager, the history of runs, and the blobs of logs.

The signing pipeline calls the resource manager and the workspace's own service. The other bears no token, for addresses
with a SAS and for discovery. Only a call that an expired token cost is tried again here; `submit` and `run` do the
retries. If a host asks for a pause, no call goes to it until the pause ends.
"""

from __future__ import annotations

import base64
import json
import os
import re
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

from ... import errors
from ...job.job import run_tag
from ...provider_api.protocol import Request, Shell
from ...storage import extras
from .._cloud import ANOTHER_ID, Backoff, decoded, object_of, unless_over
from . import NAME
from .request import SSH, TAG_BODY, TAG_RUN
from .urls import cloud_of, storage

if TYPE_CHECKING:
    from . import Settings

TIMEOUT = 30
FINAL = frozenset({"Completed", "Failed", "Canceled"})
"""NotResponding and Paused are not final: by the service a job may come back from them."""
_JOB = re.compile(
    r"(?P<workspace>/subscriptions/[^/]+/resourceGroups/[^/]+/providers/[^/]+/workspaces/[^/]+)/jobs/(?P<name>[^/]+)",
    re.IGNORECASE,
)
QUOTA = re.compile(
    r"(?<![\w/.-])quotas?(?![\w/-])|(?-i:[a-z]Quota|Quota[A-Z])|exceeds? (the )?(core|vCPU) limit", re.IGNORECASE
)
"""Texts from public issues: mslearn-dp100 #35, InnerEye #253, azure-docs #121466 and #17809. They match words and
codes, not parts of a user's names for jobs, paths or images."""
CAPACITY = re.compile(
    r"(Allocation|OverconstrainedAllocation|ZonalAllocation)Failed|SkuNotAvailable|OutOfCapacity"
    r"|(not enough|insufficient|lack of|no) (available )?capacity",
    re.IGNORECASE,
)
_FAMILY = re.compile(
    r"has an? (?P<family>.{0,80}?) ?(vCPU|core) quota of (?P<has>\d+).*?maps to (?P<needs>\d+) vCPUs?", re.IGNORECASE
)
_TAKEN = re.compile(r"already exists|JobPropertyImmutable", re.IGNORECASE)
"""JobPropertyImmutable is the inner code of creating a job that exists (microsoft/ai4s-jobq, workforce.py)."""
_NO_WORKSPACE = re.compile(
    r"'?Microsoft\.MachineLearningServices/workspaces/[^/']+'?[^/]* (was |were )?not found", re.I
)
_NO_COMPUTE = re.compile(
    r"unknown compute|compute( target)?\b.{0,120}(not found|does ?n[o']t exist)|ComputeNotFound", re.IGNORECASE
)
_COLOUR = re.compile(r"\x1b\[[\d;]*m")
"""Colours that azure-ai-ml puts around the parts of a long refusal, also outside terminals."""
_PLACES: Mapping[str, str] = {
    "SubscriptionNotFound": "azureml.subscription_id",
    "InvalidSubscriptionId": "azureml.subscription_id",
    "ResourceGroupNotFound": "azureml.resource_group",
    "WorkspaceNotFound": "azureml.workspace_name",
}
HELP: Mapping[str, str] = {
    "none": "sign in (az login), or set AZURE_TENANT_ID, AZURE_CLIENT_ID and AZURE_CLIENT_SECRET",
    "expired": "sign in again (az login); the submitted run continues",
    "role": "give the caller the role 'AzureML Data Scientist' on the workspace; docs/azureml.md has the command",
    "quota": "ask for more in Azure ML's Studio (Quota), or choose another size",
}


def job_of(native_id: str) -> tuple[str, str]:
    """Return (path of the workspace, name) of a job's id; a bare name has an empty path."""
    match = _JOB.fullmatch(native_id)
    return (match["workspace"], match["name"]) if match else ("", native_id)


def claims_of(token: str) -> Mapping[str, Any]:
    """Return the claims of an Entra ID token, which are its middle part; empty if it has none."""
    try:
        middle = token.split(".")[1]
        claims = json.loads(base64.urlsafe_b64decode(middle + "=" * (-len(middle) % 4)))
    except (IndexError, ValueError):
        return {}
    return claims if isinstance(claims, dict) else {}


def named(token: str) -> str | None:
    """Return the owner of an Entra ID token: user name, else application id, else object id. None if there is none."""
    claims = claims_of(token)
    said = (claims.get(name) for name in ("upn", "unique_name", "preferred_username", "appid", "oid"))
    return next((name for name in said if name and isinstance(name, str)), None)


def quota_hint(text: str) -> str:
    """Return the hint that names the quota to request, as exactly as ``text`` does."""
    found = _FAMILY.search(text)
    if found is None:
        return HELP["quota"]
    family, spot = found["family"].strip() or "cores", re.search(r"low.?priority|spot", text, re.IGNORECASE)
    kind = "low-priority" if spot else "dedicated"
    return (
        f"ask for at least {found['needs']} {kind} vCPUs of {family} (there are {found['has']}) in Azure ML's Studio"
        " (Quota), or choose another size"
    )


def refusal(status: int, code: str, message: str, *, what: str) -> errors.CloudtrainError:
    """Return the error for an answer that is a refusal. ``what`` was requested."""
    said = " ".join(f"{message or code or status}".split())[:600]
    text = f"{what}: {said}" + (f" ({code})" if code and code not in said else "")
    if status in (408, 429) or status >= 500:
        return errors.LostContactError(f"Azure ML does not answer now: {text} (status {status})")
    if status == 401:
        return errors.AuthError(text, hint=HELP["expired"])
    if status == 403 and not QUOTA.search(said):
        return errors.AuthError(text, hint=HELP["role"])
    field = "azureml.workspace_name" if status == 404 and _NO_WORKSPACE.search(said) else ""
    if field := _PLACES.get(code, field):
        hint = "check subscription_id, resource_group and workspace_name"
        return errors.SpecError(said, field=field, hint=hint)
    if status == 404:  # before the patterns below: the missing name may contain their words
        return errors.NotFoundError(text)
    if QUOTA.search(f"{code} {said}"):
        return errors.QuotaError(text, hint=quota_hint(said))
    if CAPACITY.search(f"{code} {said}"):
        return errors.CapacityError(text, hint="try another size, region or time, or a longer max_wait")
    if status == 409 or _TAKEN.search(f"{code} {said}"):
        return errors.ConflictError(text, field="run_id")
    if _NO_COMPUTE.search(f"{code} {said}"):
        return errors.SpecError(text, field="azureml.compute")
    return errors.SpecError(text) if 400 <= status < 500 else errors.PlatformError(text)


def translated(what: str) -> AbstractContextManager[None]:
    """Translate errors of Azure's libraries into one line; ``what`` names the action."""
    return extras.translated(partial(error_of, what=what), needs="azure-ai-ml", extra="azureml")


def error_of(exc: Exception, *, what: str) -> errors.CloudtrainError | None:
    """Return the error for an exception of Azure's libraries, or None for any other."""
    import azure.core.exceptions as known

    text = " ".join(_COLOUR.sub("", str(exc)).split())
    if isinstance(exc, known.ClientAuthenticationError) and exc.status_code in (None, 400):
        # The token service refuses a secret or a refresh token with 400 (AADSTS…). A chain lists its tries below that.
        first = next(filter(None, map(str.strip, str(exc).splitlines())), type(exc).__name__)
        return errors.AuthError(f"no Azure credentials ({first[:200]})", hint=HELP["none"])
    # A body that ended too soon: azure-core wraps the connection's error in a HttpResponseError.
    broken = getattr(exc, "response", None) is None and isinstance(getattr(exc, "inner_exception", None), OSError)
    if broken or isinstance(exc, (known.ServiceRequestError, known.ServiceResponseError)):
        return errors.LostContactError(f"Azure does not answer: {what}: {text}")
    if isinstance(exc, known.HttpResponseError):
        status = exc.status_code or 0
        error: Any = exc.error
        code, message = str(getattr(error, "code", "") or ""), str(getattr(error, "message", "") or exc.message)
        if not status:
            return errors.PlatformError(f"{what}: {text}")
        if "JobPropertyImmutable" in text:
            code = "JobPropertyImmutable"
        return refusal(status, code, message, what=what)
    # Before AzureError, which is a base of MlException too.
    if any(base.__name__ in ("MlException", "ValidationError") for base in type(exc).__mro__):
        return errors.SpecError(f"the installed azure-ai-ml refuses this request: {text}"[:900], field="options")
    if isinstance(exc, known.AzureError):
        return errors.PlatformError(f"{what}: {type(exc).__name__}: {text}")
    return None


class Account:
    """One workspace. If the service rejects the credential, each call renews it once."""

    def __init__(self, settings: Settings) -> None:
        self.settings, self.cloud = settings, cloud_of(settings)
        self.workspace = (
            f"/subscriptions/{settings.subscription_id}/resourceGroups/{settings.resource_group}"
            f"/providers/Microsoft.MachineLearningServices/workspaces/{settings.workspace_name}"
        )
        self._lock = threading.RLock()
        self._credential: Any = None
        self._pipelines: dict[bool, Any] = {}
        """By whether they sign."""
        self._services: dict[str, str] = {}
        self._backoff = Backoff()
        self.details: dict[str, tuple[float, Mapping[str, Any]]] = {}
        self.started: dict[str, Any] = {}
        self.ran: set[str] = set()

    @property
    def credential(self) -> Any:
        """Return azure-identity's default chain: environment, managed identity, ``az login``, …"""
        with self._lock:
            if self._credential is None:
                import logging

                from azure.identity import DefaultAzureCredential

                logging.getLogger("azure.identity").addHandler(logging.NullHandler())
                own = self.cloud.metadata is not None
                self._credential = DefaultAzureCredential(
                    authority=self.cloud.authority, disable_instance_discovery=own
                )
            return self._credential

    def forget(self) -> None:
        """Drop the credential, so that the next call signs in again."""
        with self._lock:
            self._credential = None
            self._pipelines.pop(True, None)

    def principal(self) -> str | None:
        """Return the token's owner: a user's name, else an application's or object's id."""
        return named(self.credential.get_token(self.cloud.scope).token)

    def storage(self, url: str) -> Mapping[str, Any]:
        """Return the options of a store at ``url``; see `urls.storage`."""
        return storage(url, self.cloud, os.environ)

    def _pipeline(self, *, signed: bool) -> Any:
        from azure.core.pipeline import Pipeline
        from azure.core.pipeline.policies import BearerTokenCredentialPolicy, UserAgentPolicy
        from azure.core.pipeline.transport import RequestsTransport

        with self._lock:
            if signed not in self._pipelines:
                policies: list[Any] = [UserAgentPolicy(base_user_agent="cloudtrain")]
                if signed:
                    policies.append(BearerTokenCredentialPolicy(self.credential, self.cloud.scope))
                transport = RequestsTransport(connection_timeout=TIMEOUT, read_timeout=TIMEOUT)
                self._pipelines[signed] = Pipeline(transport, policies)
            return self._pipelines[signed]

    # --------------------------------------------------------------------------------------------------------- one call

    def call(self, url: str, *, what: str, method: str = "GET") -> Any:
        """Return the answer's JSON object, or None for no content. Raises only cloudtrain's errors."""
        for again in (False, True):
            answer = self._send(url, what=what, signed=True, headers={}, stream=False, method=method)
            if answer.status_code != 401 or again:
                break
            self.forget()
        if answer.status_code >= 400:
            raise self._refused(answer, what)
        content = answer.body()
        return decoded(content, what=what) if content not in (b"", b"null") else None

    def fetch(self, url: str, *, what: str, headers: Mapping[str, str] | None = None, stream: bool = False) -> Any:
        """Return the answer, of any status, of an address that needs no token. No token is sent."""
        return self._send(url, what=what, signed=False, headers=headers or {}, stream=stream)

    def _send(self, url: str, *, what: str, signed: bool, headers: Any, stream: bool, method: str = "GET") -> Any:
        host = urlsplit(url).netloc
        self._backoff.check(host, name=host, what=what)
        with translated(what):
            from azure.core.rest import HttpRequest

            request = HttpRequest(method, url, headers=dict(headers))
            answer = self._pipeline(signed=signed).run(request, stream=stream).http_response
        self._backoff.note(host, answer.status_code, answer.headers)
        return answer

    @staticmethod
    def _refused(answer: Any, what: str) -> errors.CloudtrainError:
        error = (object_of(answer.body()) or {}).get("error") or {}
        return refusal(answer.status_code, str(error.get("code") or ""), str(error.get("message") or ""), what=what)

    def url(self, path: str, *, version: str = "") -> str:
        """Return a resource manager URL. ``version`` of its API is by default the settings'."""
        return f"{self.cloud.resource_manager}{quote(path)}?api-version={version or self.settings.api_version}"

    # ------------------------------------------------------------------------------------------------------------- jobs

    def describe(self, native_id: str) -> dict[str, Any]:
        """Return the job as the resource manager has it. Raises `NotFoundError`."""
        job: dict[str, Any] = self.call(self.url(self.native_id(native_id)), what="get job")
        return job

    def create(self, request: Request) -> str:
        """Return the id of the request's one job; see `sdk.create`."""
        from .sdk import create

        return create(self, request)

    def find(self, request: Request) -> str | None:
        """Return the id of the request's job, if it was ever created.

        Raises `ConflictError` if the job of that name belongs to another user or request.
        """
        name = request.body["name"]
        try:
            job = self.describe(name)
        except errors.NotFoundError:
            return None
        tags = job["properties"].get("tags") or {}
        if tags.get(TAG_RUN) != run_tag(request.run):
            raise errors.ConflictError(f"Azure ML has a job {name} of another run", field="run_id", hint=ANOTHER_ID)
        if tags.get(TAG_BODY) != request.body["tags"].get(TAG_BODY):
            why = f"Azure ML has a job {name} of an earlier run of that id, which was another job"
            raise errors.ConflictError(why, field="run_id", hint=ANOTHER_ID)
        return self.native_id(name)

    def native_id(self, name: str) -> str:
        """Return the resource manager's id of a job's name or id. It stays valid if the settings change."""
        workspace, name = job_of(name)
        return f"{workspace or self.workspace}/jobs/{name}"

    def cancel(self, native_id: str) -> None:
        """Request the cancellation. A job that has ended stays as it is."""
        with unless_over(lambda: self.describe(native_id)["properties"]["status"] in (*FINAL, "CancelRequested")):
            self.call(self.url(f"{self.native_id(native_id)}/cancel"), what="cancel job", method="POST")

    def shell(self, request: Request, native_id: str, node: int, command: Sequence[str], *, tty: bool) -> Shell:
        """Return the command that opens a shell by the job's ssh service. Raises `SpecError` for a job without one."""
        if SSH not in (request.body.get("services") or {}):
            why, hint = "the job was sent without it, and lets no shell in", "send a job with --interactive"
            raise errors.SpecError(why, field="interactive", hint=hint)
        if command:
            raise errors.UnsupportedError(NAME, "shell", "az ml job connect-ssh takes no command", hint="leave it out")
        own = self.settings
        argv = ["az", "ml", "job", "connect-ssh", "--name", job_of(native_id)[1], "--node-index", str(node)]
        argv += ["--subscription", own.subscription_id, "--resource-group", own.resource_group]
        argv += ["--workspace-name", own.workspace_name]
        return Shell(argv=argv, install="install the Azure CLI, then run: az extension add --name ml")

    def compute(self, name: str) -> Mapping[str, Any]:
        """Return a cluster's properties, as ``vmSize`` and ``vmPriority``. Raises `SpecError` for an unknown name."""
        cluster = self._part("compute", name, "cluster", instead="\nor leave it out, for serverless compute")
        found: Mapping[str, Any] = (cluster.get("properties") or {}).get("properties") or {}
        return found

    def datastore(self, name: str) -> Mapping[str, Any]:
        """Return a datastore's properties: ``accountName``, ``containerName`` (``filesystem``), ``endpoint``."""
        found: Mapping[str, Any] = self._part("datastore", name, "datastore")["properties"]
        return found

    def _part(self, kind: str, name: str, noun: str, *, instead: str = "") -> Any:
        try:
            return self.call(self.url(f"{self.workspace}/{kind}s/{name}"), what=f"get {kind}")
        except errors.NotFoundError:
            how = f"to see the {noun}s, run: az ml {kind} list -o table{instead}"
            raise errors.SpecError(f"the workspace has no {noun} {name!r}", field=f"azureml.{kind}", hint=how) from None

    # ---------------------------------------------------------------------------------------------------------- history

    def run_details(self, native_id: str) -> Mapping[str, Any]:
        """Return the run's history: status, times, error, and the logs' addresses. Kept for `pages`."""
        workspace, name = job_of(self.native_id(native_id))
        url = f"{self._service(workspace)}/history/v1.0{quote(workspace)}/runs/{quote(name)}/details"
        details: Mapping[str, Any] = self.call(url, what="get run")
        self.details[native_id] = (time.monotonic(), details)
        return details

    def _service(self, workspace: str) -> str:
        """Return the workspace's own service, which its discovery URL names."""
        if workspace not in self._services:
            answer = self.call(self.url(workspace), what="get workspace")
            self._services[workspace] = self.discovered(answer["properties"]["discoveryUrl"])
        return self._services[workspace]

    def discovered(self, url: str) -> str:
        """Return the service in a discovery URL's answer, by azure-ai-ml's key. Raises `PlatformError` for none."""
        answer = self.fetch(url, what="discover the workspace")
        if answer.status_code >= 400:
            raise self._refused(answer, "discover the workspace")
        found = object_of(answer.body()) or {}
        service = str(found.get("api") or found.get("history") or "").rstrip("/")
        if not service.startswith("https://"):
            raise errors.PlatformError(f"the workspace's discovery names no https service of runs: {service!r}")
        return service
