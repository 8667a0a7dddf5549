"""Table that turns Google Cloud's answers and its libraries' exceptions into cloudtrain's errors."""

from __future__ import annotations

import json
import re
import traceback
from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from ...errors import (
    AuthError,
    CapacityError,
    CloudtrainError,
    ConflictError,
    LostContactError,
    NotFoundError,
    PlatformError,
    QuotaError,
    SpecError,
)
from ...provider_api import catalog
from ...storage import extras
from .machines import REGIONS, REGIONS_DATE
from .names import NAME

CAPACITY = re.compile(
    r"resources are insufficient|insufficient (resources|capacity)|stock.?out|RESOURCE_POOL_EXHAUSTED"
    r"|not enough (resources|capacity)|(does not|doesn't) have enough resources|no capacity",
    re.IGNORECASE,
)
"""Before `QUOTA`: a lack of machines, too, comes as RESOURCE_EXHAUSTED (openreview-expertise #401)."""
RATE = re.compile(r"per.?(minute|second|user)\b|\brate.?limit", re.IGNORECASE)
"""A quota of calls, which is full again in a minute."""
MACHINES = re.compile(r"(custom_model|restricted_image)_training_\w+", re.IGNORECASE)
"""The metrics that machines count against (Vertex AI's page of quotas). Such a refusal is never of calls."""
_SPENT = r"(?-i:\b[qQ]uota(?:Exceeded|Failure)\b)"
"""The words of Google's older APIs, and of the details of newer ones."""
QUOTA = re.compile(rf"(?<![\w/.-])quotas?(?![\w/-])|(?-i:QUOTA_|_QUOTA)|{_SPENT}|{MACHINES.pattern}", re.IGNORECASE)
"""The word and Google's codes, but no part of a name from a user."""
CREATE, READ, CLAIM, LOOK = "create job", "read the log", "claim the creation of the job", "look at"
"""Calls that need roles of their own."""
_SIGN_IN = ("google.auth.", "google.oauth2.")
_METRIC = re.compile(r"aiplatform\.googleapis\.com/(?P<metric>\w+)")
_ACT_AS = re.compile(r"act as( service_account| service account)?|actAs|iam\.serviceAccounts\.", re.IGNORECASE)
_ACCOUNT = re.compile(r"[\w.-]+@[\w.-]+\.iam\.gserviceaccount\.com")
_NO_PROJECT = re.compile(
    r"(?<![\w-])project\b.{0,60}(not found|deleted|does not exist|invalid)|CONSUMER_INVALID", re.IGNORECASE
)
_DISABLED = re.compile(r"has not been used in project|it is disabled|SERVICE_DISABLED", re.IGNORECASE)
_API = re.compile(r"apis/api/(?P<service>[\w.-]+)/overview(\?project=(?P<project>[\w:.-]+))?")
"""Address in the message of a disabled API, which names it."""
DENIED = "USER_PROJECT_DENIED"
"""ErrorInfo's reason if the caller may not have its calls counted against the project it names."""
CONSUMER = re.compile(rf"{DENIED}|serviceusage\.services\.use", re.IGNORECASE)
"""The same of any service: Cloud Storage has a text of its own (java-storage-nio #61)."""
_NO_CONSUMER = re.compile(rf"{CONSUMER.pattern}|requires a quota project", re.IGNORECASE)
_MACHINE = re.compile(r"machine type ['\"]?(?P<machine>[a-z0-9-]+)['\"]? is not supported", re.IGNORECASE)
"""Text for an unknown machine, and for one not in this region, by Vertex AI's page of troubleshooting."""
AGENT = "service-{}@gcp-sa-aiplatform-cc.iam.gserviceaccount.com"
"""Account with which jobs pull images, by the project's number: Vertex AI's Custom Code Service Agent, never the job's
own service account (vertex-ai-samples #2176)."""
PULL = re.compile(
    r"does not have permission to access (the )?Artifact Registry|artifactregistry\.repositories\.downloadArtifacts",
    re.IGNORECASE,
)
_AGENT = re.compile(AGENT.replace(".", r"\.").format(r"\d+"))
_REPOSITORY = re.compile(r"projects/(?P<project>[^/\s]+)/locations/(?P<location>[^/\s]+)/repositories/(?P<name>[\w-]+)")
_NO_IMAGE = re.compile(r"(?<![\w/.-])image(?![\w/.-]).{0,300}\b(not found|does not exist)", re.IGNORECASE)
_LOCATION = re.compile(r"(region|location)\b.{0,80}(not supported|unsupported|invalid|not available)", re.IGNORECASE)
HELP: Mapping[str, str] = {
    "none": "sign in (gcloud auth application-default login), or set GOOGLE_APPLICATION_CREDENTIALS",
    "expired": "sign in again (gcloud auth application-default login); what was submitted goes on",
    "role": "check vertex.project, and give the caller the role Vertex AI User in it (docs/vertex.md)",
    "log": "give the caller the role Logs Viewer (roles/logging.viewer) in the project (docs/vertex.md)",
    "store": "give the caller the role Storage Object Admin (roles/storage.objectAdmin) on the bucket (docs/vertex.md)",
    "consumer": "give the caller roles/serviceusage.serviceUsageConsumer (Service Usage Consumer) in the project",
    "act": "give the caller the role Service Account User on it: gcloud iam service-accounts add-iam-policy-binding",
    "quota": "ask for more on the console's page of quotas (IAM & Admin), or choose another machine or location",
    "capacity": "try another machine, location or time, a reservation, or a max_wait (FLEX_START)",
}


def quota_hint(text: str) -> str:
    """Return the hint that names the quota to request, as exactly as ``text`` does."""
    found = " and ".join(dict.fromkeys(_METRIC.findall(text)))
    if not found:
        return HELP["quota"]
    return f"ask for more of {found} on the console's page of quotas, or choose another machine or location"


def pull_hint(text: str, agent: str = "") -> str:
    """Return the hint that lets Vertex AI pull an image, as exactly as ``text`` allows."""
    named = _AGENT.search(text)
    agent = agent or (named[0] if named else AGENT.format("PROJECT_NUMBER"))
    where = _REPOSITORY.search(text)
    given = f"{where['name']} --project {where['project']} --location {where['location']}" if where else "REPOSITORY"
    return (
        f"jobs pull images as {agent}; let it: gcloud artifacts repositories add-iam-policy-binding {given} "
        f"--member serviceAccount:{agent} --role roles/artifactregistry.reader"
    )


def refusal(
    status: int, message: str, *, what: str, reason: str = "", metadata: Mapping[str, Any] | None = None
) -> CloudtrainError:
    """Return the error for a refusal of ``what``. ``reason`` and ``metadata`` are its ErrorInfo's."""
    said = " ".join((message or reason or str(status)).split())[:600]
    text, told = f"{what}: {said}", f"{reason} {said}"
    if CAPACITY.search(told):
        return CapacityError(f"{text}: {HELP['capacity']}")
    if status == 429 and (MACHINES.search(told) or (QUOTA.search(told) and not RATE.search(told))):
        return QuotaError(f"{text}: {quota_hint(said)}")
    if status == 403 and re.fullmatch(_SPENT, reason) and not RATE.search(said):
        return QuotaError(f"{text}: {quota_hint(said)}")
    if status in (408, 429) or status >= 500 or reason == "ABORTED":  # of two concurrent calls, one must try again
        return LostContactError(f"Google Cloud does not answer now: {text} (status {status})")
    if status == 401:
        return AuthError(f"{text}: {HELP['expired']}")
    if PULL.search(said) and status in (400, 403, 404):
        return AuthError(f"{text.rstrip('.')}: {pull_hint(said)}")
    if status == 400 and (found := _MACHINE.search(said)):
        return _no_machine(found["machine"], text.rstrip("."))
    if _ACT_AS.search(said) and status in (400, 403, 404):
        return AuthError(f"{text}: {_allow(told, what, metadata or {})}")
    if _NO_PROJECT.search(told) and status in (400, 403, 404):
        return SpecError(f"{said}; gcloud projects list names those there are", field="vertex.project")
    if status == 403:
        return AuthError(f"{text}: {_allow(told, what, metadata or {})}")
    if status in (400, 404) and what == CREATE and _NO_IMAGE.search(said):
        return SpecError(said, field="image")
    if status == 404:
        return NotFoundError(text)
    if status in (409, 412):
        return ConflictError(text, field="run_id")
    if _LOCATION.search(said):
        return SpecError(said, field="vertex.location")
    return SpecError(text) if 400 <= status < 500 else PlatformError(text)


def _no_machine(name: str, text: str) -> CloudtrainError:
    """Return the error for a machine that Vertex AI lacks. A known machine is missing in this region alone."""
    machine = catalog.machine(NAME, name)
    if machine is None:
        return SpecError(text, field="resources.instance_type")
    same = [m for m in catalog.machines(NAME) if m.instance_type == name]
    # An N1 name may mean a machine without GPUs or with any of several.
    known = ", ".join(sorted(REGIONS.get(same[0].accelerator, ()))) if len({m.accelerator for m in same}) == 1 else ""
    listed = f"; Google's page of {REGIONS_DATE} lists its GPUs in {known}" if known else ""
    return CapacityError(f"{text}: this region has none; try another location or machine{listed}")


def _allow(told: str, what: str, metadata: Mapping[str, Any]) -> str:
    """Return the step that lets the caller in after a refusal of ``what``."""
    if _DISABLED.search(told):  # an API is off, in the project whose calls are counted
        named = _API.search(told)
        service = metadata.get("service") or (named and named["service"]) or "aiplatform.googleapis.com"
        project = str(metadata.get("consumer") or "").removeprefix("projects/") or (named and named["project"]) or ""
        return f"switch it on: gcloud services enable {service}" + (f" --project {project}" if project else "")
    if _NO_CONSUMER.search(told):
        return HELP["consumer"]
    if _ACT_AS.search(told):
        account = _ACCOUNT.search(told)
        return f"{HELP['act']} {account[0]}" if account else HELP["act"]
    if what == READ:
        return HELP["log"]
    return HELP["store" if what == CLAIM or what.startswith(LOOK) else "role"]


def decoded(answer: Any, *, what: str) -> dict[str, Any]:
    """Return an answer's JSON object (requests' Response). Raises `PlatformError`: a proxy may answer with a page."""
    try:
        found = json.loads(answer.content)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise PlatformError(f"{what}: the answer is not JSON")
    return found


def answered(body: bytes) -> tuple[str, str, Mapping[str, Any]]:
    """Return (message, reason, metadata) of an error of Google's JSON APIs; the last two are its ErrorInfo's."""
    try:
        error = json.loads(body).get("error") or {}
        details = error.get("details") or error.get("errors") or []
        info: Mapping[str, Any] = next((item for item in details if item.get("reason")), {})
        metadata = info.get("metadata")
        reason = str(info.get("reason") or error.get("status") or "")
        return str(error.get("message") or ""), reason, metadata if isinstance(metadata, dict) else {}
    except (ValueError, AttributeError, TypeError):
        return "", "", {}


def translated(what: str) -> AbstractContextManager[None]:
    """Translate errors of Google's libraries into one line; ``what`` names the action."""
    return extras.translated(partial(error_of, what=what), needs="google-cloud-aiplatform", extra="vertex")


def error_of(exc: Exception, *, what: str) -> CloudtrainError | None:
    """Return the error for an exception of Google's libraries, or None for any other."""
    import google.auth.exceptions as auth
    import requests.exceptions as http

    text = " ".join(str(exc).split())
    # By name: a status does not import the exceptions of a creation.
    names = {base.__name__ for base in type(exc).__mro__}
    if isinstance(exc, auth.DefaultCredentialsError):
        return AuthError(f"no Google Cloud credentials: {HELP['none']}")
    if (
        isinstance(exc, (auth.TransportError, http.RequestException, ConnectionError, TimeoutError))
        or (isinstance(exc, auth.RefreshError) and exc.retryable)
        or "RetryError" in names
    ):
        return LostContactError(f"Google Cloud does not answer: {what}: {text[:300]}")
    if isinstance(exc, auth.GoogleAuthError):
        return AuthError(f"{what}: the credentials are refused ({text[:200]}): {HELP['expired']}")
    if isinstance(exc, (TypeError, AttributeError)) and (module := _raised_in(exc)).startswith(_SIGN_IN):
        if module == "google.oauth2._client":  # it looks for a token in any 200, also a proxy's page
            return LostContactError(f"Google Cloud does not answer: {what}: the answer to a sign-in is not JSON")
        return AuthError(f"{what}: the credentials cannot be used ({type(exc).__name__}: {text[:200]}): {HELP['none']}")
    if "GoogleAPICallError" in names:
        return _refused(exc, what)
    if "ParseError" in names:
        why = f"the installed google-cloud-aiplatform does not know this request: {text}; update it"
        return SpecError(why, field="options")
    if "GoogleAPIError" in names:
        return PlatformError(f"{what}: {type(exc).__name__}: {text[:300]}")
    return None


def _raised_in(exc: Exception) -> str:
    """Return the module whose code raised it."""
    frames = [frame for frame, _ in traceback.walk_tb(exc.__traceback__)]
    return str(frames[-1].f_globals.get("__name__")) if frames else ""


def _refused(exc: Any, what: str) -> CloudtrainError:
    message, reason, metadata = answered(getattr(exc.response, "content", b""))
    status = exc.code if isinstance(exc.code, int) else getattr(exc.response, "status_code", 0)
    reason = reason or str(exc.reason or "")
    return refusal(int(status or 0), message or str(exc.message), what=what, reason=reason, metadata=metadata)
