"""Table that turns Azure's answers and its libraries' exceptions into cloudtrain's errors."""

from __future__ import annotations

import re
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
from ...storage import extras

__all__ = ["CAPACITY", "HELP", "QUOTA", "error_of", "quota_hint", "refusal", "translated"]

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
    "expired": "sign in again (az login); what was submitted goes on",
    "role": "give the caller the role 'AzureML Data Scientist' on the workspace; docs/azureml.md has the command",
    "quota": "ask for more in Azure ML's Studio (Quota), or choose another size",
}


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


def refusal(status: int, code: str, message: str, *, what: str) -> CloudtrainError:
    """Return the error for an answer that is a refusal. ``what`` was requested."""
    said = " ".join(f"{message or code or status}".split())[:600]
    text = f"{what}: {said}" + (f" ({code})" if code and code not in said else "")
    if status in (408, 429) or status >= 500:
        return LostContactError(f"Azure ML does not answer now: {text} (status {status})")
    if status == 401:
        return AuthError(f"{text}: {HELP['expired']}")
    if status == 403 and not QUOTA.search(said):
        return AuthError(f"{text}: {HELP['role']}")
    field = "azureml.workspace_name" if status == 404 and _NO_WORKSPACE.search(said) else ""
    if field := _PLACES.get(code, field):
        return SpecError(f"{said}; check subscription, group and workspace", field=field)
    if status == 404:  # before the patterns below: the missing name may contain their words
        return NotFoundError(text)
    if QUOTA.search(f"{code} {said}"):
        return QuotaError(f"{text}: {quota_hint(said)}")
    if CAPACITY.search(f"{code} {said}"):
        return CapacityError(f"{text}: another size, region or time, or a longer max_wait")
    if status == 409 or _TAKEN.search(f"{code} {said}"):
        return ConflictError(text, field="run_id")
    if _NO_COMPUTE.search(f"{code} {said}"):
        return SpecError(text, field="azureml.compute")
    return SpecError(text) if 400 <= status < 500 else PlatformError(text)


def translated(what: str) -> AbstractContextManager[None]:
    """Translate errors of Azure's libraries into one line; ``what`` names the action."""
    return extras.translated(partial(error_of, what=what), needs="azure-ai-ml", extra="azureml")


def error_of(exc: Exception, *, what: str) -> CloudtrainError | None:
    """Return the error for an exception of Azure's libraries, or None for any other."""
    import azure.core.exceptions as known

    text = " ".join(_COLOUR.sub("", str(exc)).split())
    if isinstance(exc, known.ClientAuthenticationError) and exc.status_code in (None, 400):
        # The token service refuses a secret or a refresh token with 400 (AADSTS…). A chain lists its tries below that.
        first = next(filter(None, map(str.strip, str(exc).splitlines())), type(exc).__name__)
        return AuthError(f"no Azure credentials: {HELP['none']} ({first[:200]})")
    # A body that ended too soon: azure-core wraps the connection's error in a HttpResponseError.
    broken = getattr(exc, "response", None) is None and isinstance(getattr(exc, "inner_exception", None), OSError)
    if broken or isinstance(exc, (known.ServiceRequestError, known.ServiceResponseError)):
        return LostContactError(f"Azure does not answer: {what}: {text}")
    if isinstance(exc, known.HttpResponseError):
        status = exc.status_code or 0
        error: Any = exc.error
        code, message = str(getattr(error, "code", "") or ""), str(getattr(error, "message", "") or exc.message)
        if not status:
            return PlatformError(f"{what}: {text}")
        if "JobPropertyImmutable" in text:
            code = "JobPropertyImmutable"
        return refusal(status, code, message, what=what)
    # Before AzureError, which is a base of MlException too.
    if any(base.__name__ in ("MlException", "ValidationError") for base in type(exc).__mro__):
        return SpecError(f"the installed azure-ai-ml refuses this request: {text}"[:900], field="options")
    if isinstance(exc, known.AzureError):
        return PlatformError(f"{what}: {type(exc).__name__}: {text}")
    return None
