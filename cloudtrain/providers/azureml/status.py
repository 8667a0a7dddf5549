"""Turn Azure ML's view of a job into a Status: `status` makes the calls, the rest is pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ...errors import NotFoundError
from ...provider_api.protocol import Status
from .._cloud import first_match, hinted, one_line, patterns, time_of
from .api import CAPACITY, FINAL, QUOTA, quota_hint
from .logs import FILES

if TYPE_CHECKING:
    from .api import Account

PENDING = frozenset({"NotStarted", "Queued", "Provisioning", "Preparing", "Starting", "Paused", "Waiting"})
"""States in which no script runs. Any other state that is not final, also an unknown one, counts as running."""
HINTS = {
    "capacity": "try another size or region, a later time, or a longer max_wait",
    "image": "check the image, its architecture, and that the workspace may pull it",
    "auth": "let the job's identity read and write the store: docs/azureml.md has the role",
    "infra": "Azure ML itself failed; submit it again",
    "preempted": "its low-priority machines were taken back",
}
_SCRIPT = re.compile(r"exit(?:ed with)? ?(?:status |exit )?code:? ?'?(?P<code>-?\d+)", re.IGNORECASE)
"""A bare ``status code`` is that of an HTTP answer to the service."""
_BY_SERVICE = re.compile(r"cancell?ed (because|due to|by (the )?(service|system|platform|Azure))", re.IGNORECASE)
"""Message of a cancellation by Azure ML itself; unverified."""
_EXITS = {137: "oom", -9: "oom", 126: "image", 127: "image", 75: "preempted"}
"""Exit codes of the node's command: the kernel's kill, a shell without Python, and cloudtrain's own after a notice."""
_CATEGORIES = (
    (re.compile("non-?zero exit code", re.IGNORECASE), "user_error"),  # without it: MachineLearningNotebooks #1360
    (QUOTA, "quota"),
    (CAPACITY, "capacity"),
    *patterns(
        (r"pre-?empt|evict|NodePreempted", "preempted"),
        (r"low.?priority.{0,40}(node|VM|machine).{0,40}(lost|reclaim|remov|taken)", "preempted"),
        (r"ImageBuild|(failed|unable|error).{0,40}pull|manifest unknown|pull access denied", "image"),
        (r"exec format error|environment .{0,80}(not found|could not be)|docker image|container image", "image"),
        (r"Unauthorized|Forbidden|AuthorizationFailed|AuthorizationPermissionMismatch", "auth"),
        (r"AuthenticationFailed|access ?denied|not authorized|permission|managed identity", "auth"),
        (r"OutOfMemory|out of memory|oom.?kill", "oom"),
        (
            r"(exceed|reach).{0,40}(time ?limit|run(ning)? (time|duration)|max\w* (run )?duration|timeout)",
            "timeout",
        ),
        (r"time(d)? ?out.{0,40}(job|run)|JobTimeout", "timeout"),
        (r"UserError|StreamAccess|DataAccess|InvalidInput|not found", "user_error"),
    ),
)
"""Patterns for code and message of a failure that is no script's end; the first match counts. None is documented."""


def status(account: Account, native_id: str) -> Status:
    """Return the job's status: one call while it waits or runs, one more to the history if only that has the facts."""
    job = account.describe(native_id)
    native = job["properties"].get("status")
    if native == "Running":
        account.ran.add(native_id)
    details: Mapping[str, Any] = {}
    if native not in PENDING and (native in FINAL or native_id not in account.started):
        try:
            details = account.run_details(native_id)
        except NotFoundError:
            details = {}  # the history may be behind
        if details.get("startTimeUtc"):
            account.started[native_id] = details["startTimeUtc"]
    details = {"startTimeUtc": account.started.get(native_id), **details}
    return status_of(job, details, prices=account.settings.prices, ran=native_id in account.ran)


def category_of(text: str) -> str:
    """Return the category of a failure from the code and message of its error."""
    if (script := _SCRIPT.search(text)) is not None:
        # The script's own output may follow, and is not the service's word.
        return _EXITS.get(int(script["code"]), "user_error")
    return first_match(_CATEGORIES, text, "infra")


def status_of(
    job: Mapping[str, Any],
    details: Mapping[str, Any],
    *,
    prices: Mapping[str, float] | None = None,
    ran: bool = False,
) -> Status:
    """Return the Status of the resource manager's job, with the history's ``details`` (empty if not asked).

    ``ran``: a poll saw it run, even if the history lists no log. Azure reports no bill. The cost is that of all nodes
    from start to end, at ``prices`` an hour.
    """
    properties = job["properties"]
    native = str(properties.get("status") or "Unknown")
    resources = properties.get("resources") or {}
    started, ended = time_of(details.get("startTimeUtc")), time_of(details.get("endTimeUtc"))
    final = native in FINAL
    if final and not ran and _never_ran(details):
        started = None
    span = max(0.0, ended - started) if final and started is not None and ended is not None else None
    limit = duration_seconds((properties.get("limits") or {}).get("timeout"))
    state, category, reason = _state(native, details, limit, span)
    machine = str(resources.get("instanceType") or str(properties.get("computeId") or "").rpartition("/")[2])
    hours = (span or 0.0) / 3600 * int(resources.get("instanceCount") or 1)
    priced = final and machine in (prices or {}) and (span is not None or started is None)
    return Status(
        state=state,
        native=native,
        reason=reason,
        category=category,
        started=started,
        finished=ended if final else None,
        url=str(((properties.get("services") or {}).get("Studio") or {}).get("endpoint") or ""),
        instance_type=machine,
        cost_usd=round(hours * (prices or {})[machine], 4) if priced else None,
    )


def _never_ran(details: Mapping[str, Any]) -> bool:
    """Return True if a finished job's history lists no log of its script. A history without a list proves nothing.

    Azure defines startTimeUtc only as "when the run was started". In the state Starting, "run has started", a job still
    waits for machines. So the time alone does not prove that it had any.
    """
    files = details.get("logFiles")
    return files is not None and not any(FILES.fullmatch(name) for name in files)


def _state(native: str, details: Mapping[str, Any], limit: float | None, span: float | None) -> tuple[str, str, str]:
    """Return (state, category, reason)."""
    code, message = _error(details)
    said = one_line(message)
    late = span is not None and limit is not None and span >= limit
    if native == "Completed":
        return "succeeded", "", ""
    if native == "Failed":
        category = category_of(f"{code}: {said}")
        if late and category in ("preempted", "infra"):  # our node ends with PREEMPTED after any stop
            return "failed", "timeout", "max_runtime is used up" + (f": {said}" if said else "")
        return "failed", category, _hinted(said or code or "Azure ML gives no reason", category)
    if native == "Canceled":
        if late or category_of(f"{code}: {said}") == "timeout":
            return "failed", "timeout", said or "max_runtime is used up"
        category = category_of(f"{code}: {said}") if _BY_SERVICE.search(said) else ""
        if category in ("preempted", "capacity", "quota"):
            return "failed", category, _hinted(said, category)
        return "cancelled", "cancelled", said or "it was cancelled"
    if native in PENDING:
        return "pending", "", native
    words = {"CancelRequested": "stopping", "NotResponding": "its nodes have not been heard of; they may come back"}
    return "running", "", words.get(native, "")


def _error(details: Mapping[str, Any]) -> tuple[str, str]:
    """Return (code, message) of the innermost error that has them."""
    error = (details.get("error") or {}).get("error") or details.get("error") or {}
    code, message = str(error.get("code") or ""), str(error.get("message") or "")
    inner = error.get("innerError") or error.get("innererror") or {}
    while inner:
        code = f"{code}/{inner['code']}" if inner.get("code") else code
        inner = inner.get("innerError") or inner.get("innererror") or {}
    return code, message


def _hinted(reason: str, category: str) -> str:
    return hinted(reason, quota_hint(reason) if category == "quota" else HINTS.get(category))


_DURATION = re.compile(r"P(?:(\d+)D)?(?:T(?:(\d+)H)?(?:(\d+)M)?(?:(\d+)(?:\.\d+)?S)?)?")


def duration_seconds(value: Any) -> float | None:
    """Return the seconds of an ISO 8601 duration, such as ``PT1H30M``; None for any other value."""
    match = _DURATION.fullmatch(str(value))
    if match is None:
        return None
    return float(sum(int(n or 0) * unit for n, unit in zip(match.groups(), (86400, 3600, 60, 1), strict=True)))
