"""The one table that turns what Google Cloud answers, or its libraries raise, into our errors."""

from __future__ import annotations

import json
import re
import traceback
from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from ... import errors
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

__all__ = ["CAPACITY", "HELP", "QUOTA", "answered", "decoded", "error_of", "quota_hint", "refusal", "translated"]

CAPACITY = re.compile(
    r"resources are insufficient|insufficient (resources|capacity)|stock.?out|RESOURCE_POOL_EXHAUSTED"
    r"|not enough (resources|capacity)|(does not|doesn't) have enough resources|no capacity",
    re.IGNORECASE,
)
"""Before `QUOTA`: a lack of machines, too, comes as RESOURCE_EXHAUSTED (openreview-expertise #401)."""
RATE = re.compile(r"per.?(minute|second|user)\b|\brate.?limit", re.IGNORECASE)
"""A quota of calls, which is full again in a minute."""
MACHINES = re.compile(r"(custom_model|restricted_image)_training_\w+", re.IGNORECASE)
"""The metrics that machines count against (Vertex AI's page of quotas): such a refusal is never of calls."""
_SPENT = r"(?-i:\b[qQ]uota(?:Exceeded|Failure)\b)"
"""What Google's older APIs, and the details of newer ones, call it."""
QUOTA = re.compile(rf"(?<![\w/.-])quotas?(?![\w/-])|(?-i:QUOTA_|_QUOTA)|{_SPENT}|{MACHINES.pattern}", re.IGNORECASE)
"""The word and Google's codes, and no part of a name that a user has given."""
READ, CLAIM, LOOK = "read the log", "claim the creation of the job", "look at"
"""Calls that need other roles than those of jobs."""
_SIGN_IN = ("google.auth.", "google.oauth2.")
_METRIC = re.compile(r"aiplatform\.googleapis\.com/(?P<metric>\w+)")
_ACT_AS = re.compile(r"act as( service_account| service account)?|actAs|iam\.serviceAccounts\.", re.IGNORECASE)
_ACCOUNT = re.compile(r"[\w.-]+@[\w.-]+\.iam\.gserviceaccount\.com")
_NO_PROJECT = re.compile(
    r"(?<![\w-])project\b.{0,60}(not found|deleted|does not exist|invalid)|CONSUMER_INVALID", re.IGNORECASE
)
_DISABLED = re.compile(r"has not been used in project|it is disabled|SERVICE_DISABLED", re.IGNORECASE)
_LOCATION = re.compile(r"(region|location)\b.{0,80}(not supported|unsupported|invalid|not available)", re.IGNORECASE)
HELP: Mapping[str, str] = {
    "none": "sign in (gcloud auth application-default login), or set GOOGLE_APPLICATION_CREDENTIALS",
    "expired": "sign in again (gcloud auth application-default login); what was submitted goes on",
    "role": "check vertex.project, and give the caller the role Vertex AI User in it (docs/vertex.md)",
    "log": "give the caller the role Logs Viewer (roles/logging.viewer) in the project (docs/vertex.md)",
    "store": "give the caller the role Storage Object Admin (roles/storage.objectAdmin) on the bucket (docs/vertex.md)",
    "act": "give the caller the role Service Account User on it: gcloud iam service-accounts add-iam-policy-binding",
    "quota": "ask for more on the console's page of quotas (IAM & Admin), or choose another machine or location",
    "capacity": "try another machine, location or time, a reservation, or a max_wait (FLEX_START)",
}


def quota_hint(text: str) -> str:
    """Which quota to ask for, as exactly as ``text`` tells it."""
    found = " and ".join(dict.fromkeys(_METRIC.findall(text)))
    if not found:
        return HELP["quota"]
    return f"ask for more of {found} on the console's page of quotas, or choose another machine or location"


def refusal(status: int, message: str, *, what: str, reason: str = "") -> CloudtrainError:
    """Our error for an answer that is none. ``reason`` is its ErrorInfo's, ``what`` was asked for."""
    said = " ".join((message or reason or str(status)).split())[:600]
    text, told = f"{what}: {said}", f"{reason} {said}"
    if CAPACITY.search(told):
        return CapacityError(f"{text}: {HELP['capacity']}")
    if status == 429 and (MACHINES.search(told) or (QUOTA.search(told) and not RATE.search(told))):
        return QuotaError(f"{text}: {quota_hint(said)}")
    if status == 403 and re.fullmatch(_SPENT, reason) and not RATE.search(said):
        return QuotaError(f"{text}: {quota_hint(said)}")
    if status in (408, 429) or status >= 500 or reason == "ABORTED":  # of two at once, one is to try again
        return LostContactError(f"Google Cloud does not answer now: {text} (status {status})")
    if status == 401:
        return AuthError(f"{text}: {HELP['expired']}")
    if _ACT_AS.search(said) and status in (400, 403, 404):
        return AuthError(f"{text}: {_allow(told, what)}")
    if _NO_PROJECT.search(told) and status in (400, 403, 404):
        return SpecError(f"{said}; gcloud projects list names those there are", field="vertex.project")
    if status == 403:
        return AuthError(f"{text}: {_allow(told, what)}")
    if status == 404:
        return NotFoundError(text)
    if status in (409, 412):
        return ConflictError(text, field="run_id")
    if _LOCATION.search(said):
        return SpecError(said, field="vertex.location")
    return SpecError(text) if 400 <= status < 500 else PlatformError(text)


def _allow(told: str, what: str) -> str:
    """What would let the caller in, who was refused ``what``."""
    if _DISABLED.search(told):
        return "switch it on: gcloud services enable aiplatform.googleapis.com logging.googleapis.com"
    if _ACT_AS.search(told):
        account = _ACCOUNT.search(told)
        return f"{HELP['act']} {account[0]}" if account else HELP["act"]
    if what == READ:
        return HELP["log"]
    return HELP["store" if what == CLAIM or what.startswith(LOOK) else "role"]


def decoded(answer: Any, *, what: str) -> dict[str, Any]:
    """The JSON object of an answer (requests' Response). Raises `PlatformError`: a proxy may answer with a page."""
    try:
        told = json.loads(answer.content)
    except ValueError:
        told = None
    if not isinstance(told, dict):
        raise PlatformError(f"{what}: the answer is not JSON")
    return told


def answered(body: bytes) -> tuple[str, str]:
    """(message, reason) of an error in the form of Google's JSON APIs."""
    try:
        error = json.loads(body).get("error") or {}
        details = error.get("details") or error.get("errors") or []
        reason = next((str(item["reason"]) for item in details if item.get("reason")), str(error.get("status") or ""))
        return str(error.get("message") or ""), reason
    except (ValueError, AttributeError, TypeError):
        return "", ""


def translated(what: str) -> AbstractContextManager[None]:
    """Errors of Google's libraries become ours, in one line; ``what`` was being done."""
    return errors.translated(partial(error_of, what=what), needs="google-cloud-aiplatform", extra="vertex")


def error_of(exc: Exception, *, what: str) -> CloudtrainError | None:
    """Our error for one of Google's libraries, or None when it is none of them."""
    import google.auth.exceptions as auth
    import requests.exceptions as http

    text = " ".join(str(exc).split())
    if isinstance(exc, auth.DefaultCredentialsError):
        return AuthError(f"no Google Cloud credentials: {HELP['none']}")
    if isinstance(exc, auth.TransportError) or (isinstance(exc, auth.RefreshError) and exc.retryable):
        return LostContactError(f"Google Cloud does not answer: {what}: {text[:300]}")
    if isinstance(exc, auth.GoogleAuthError):
        return AuthError(f"{what}: the credentials are refused ({text[:200]}): {HELP['expired']}")
    if isinstance(exc, (TypeError, AttributeError)) and (module := _raised_in(exc)).startswith(_SIGN_IN):
        if module == "google.oauth2._client":  # it looks for a token in whatever came with 200, a proxy's page too
            return LostContactError(f"Google Cloud does not answer: {what}: the answer to a sign-in is not JSON")
        return AuthError(f"{what}: the credentials cannot be used ({type(exc).__name__}: {text[:200]}): {HELP['none']}")
    if isinstance(exc, http.RequestException):
        return LostContactError(f"Google Cloud does not answer: {what}: {text[:300]}")
    # By name: a status does not import what only a creation raises.
    names = {base.__name__ for base in type(exc).__mro__}
    if "GoogleAPICallError" in names:
        return _refused(exc, what)
    if "RetryError" in names or isinstance(exc, (ConnectionError, TimeoutError)):
        return LostContactError(f"Google Cloud does not answer: {what}: {text[:300]}")
    if "ParseError" in names:
        why = f"the installed google-cloud-aiplatform does not know this request: {text}; update it"
        return SpecError(why, field="options")
    if "GoogleAPIError" in names:
        return PlatformError(f"{what}: {type(exc).__name__}: {text[:300]}")
    return None


def _raised_in(exc: Exception) -> str:
    """The module whose code raised it."""
    frames = [frame for frame, _ in traceback.walk_tb(exc.__traceback__)]
    return str(frames[-1].f_globals.get("__name__")) if frames else ""


def _refused(exc: Any, what: str) -> CloudtrainError:
    message, reason = answered(getattr(exc.response, "content", b""))
    status = exc.code if isinstance(exc.code, int) else getattr(exc.response, "status_code", 0)
    return refusal(int(status or 0), message or str(exc.message), what=what, reason=reason or str(exc.reason or ""))
