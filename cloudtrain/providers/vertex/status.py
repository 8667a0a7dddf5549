"""Turn Vertex AI's view of a custom job into a Status: `status` makes the call, the rest is pure."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ...provider_api.protocol import Status
from .._cloud import first_match, hinted, one_line, patterns, time_of
from .api import CAPACITY, HELP, PULL, QUOTA, pull_hint, quota_hint
from .machines import known_machine, priced

if TYPE_CHECKING:
    from .api import Account

PENDING = {
    "QUEUED": "QUEUED: taken in, no machine yet", "PENDING": "PENDING: waiting for machines", "PAUSED": "PAUSED",
}  # fmt: skip
"""States in which no script need run. Any other state that is not final, also an unknown one, counts as running."""
HINTS: Mapping[str, str] = {
    "capacity": HELP["capacity"],
    "image": "check the image, its architecture, and that Vertex AI's service agent may pull it",
    "auth": "check the job's service account and its roles: docs/vertex.md has them",
    "infra": "Vertex AI itself failed; submit it again",
}
_EXIT = re.compile(r"non-zero status of '?(?P<code>-?\d+)")
_OOM = re.compile(r"ran out of memory|OOMKilled|out-of-memory", re.IGNORECASE)
_REASON = re.compile(r"Termination reason: *(\w+)")
"""The kubelet's word; the text behind it may be the script's."""
_IMAGE = re.compile(
    r"ErrImage|ImagePull|failed to pull|unable to pull|pull access denied|manifest unknown|exec format error"
    r"|StartError|\bimage\b.{0,300}\b(not found|does not exist)",
    re.IGNORECASE,
)
"""The last comes with code 5 (NOT_FOUND) on the job."""
_EXITS = {126: "image", 127: "image", 134: "infra"}
"""Exit codes of our command: a shell that found no Python, and a node that only lost a peer."""
CODES = {3: "user_error", 4: "timeout", 7: "auth", 8: "capacity", 13: "infra", 14: "infra", 16: "auth"}
"""google.rpc.Code of a job's error, used if its message has no better cause."""
_CATEGORIES = (
    (CAPACITY, "capacity"),
    (QUOTA, "quota"),
    (PULL, "auth"),
    (_IMAGE, "image"),
    *patterns(
        (r"pre-?empt", "preempted"),
        (r"(exceed|reach).{0,40}(time|duration|deadline)|time(d)? ?out", "timeout"),
        (r"permission|service account|not authorized|access denied|forbidden", "auth"),
    ),
)
"""Patterns of a failure's message that is no script's end, first match."""
WEEK = 7 * 86400.0
"""Seconds of a job without a timeout: docs of Scheduling.timeout."""


def category_of(code: int, message: str) -> str:
    """Return the category of a failure from its error's code and message."""
    first = message.partition("Termination reason")[0]  # the script's own output may follow
    if _OOM.search(first):
        return "oom"
    if (script := _EXIT.search(first)) is not None:
        if (why := _REASON.search(message)) is not None and _IMAGE.search(why[1]):
            return "image"
        return _EXITS.get(int(script["code"]), "user_error")
    return first_match(_CATEGORIES, message, CODES.get(code, "infra"))


def status(account: Account, native_id: str) -> Status:
    """Return the job's status, by one call."""
    return status_of(account.describe(native_id))


def status_of(job: Mapping[str, Any]) -> Status:
    """Return the Status of a CustomJob in JSON.

    ``startTime`` is the moment when the service accepted the job, 0.13 to 0.16 s after creation in every recorded job.
    So the status names no start. Its ``limit_s`` leaves the start and the timeout to the nodes' records.
    """
    native = str(job.get("state") or "JOB_STATE_UNSPECIFIED").removeprefix("JOB_STATE_")
    state, category, reason = _state(native, job)
    final = state not in ("pending", "running")
    spec = job.get("jobSpec") or {}
    machine_spec = (spec.get("workerPoolSpecs") or [{}])[0].get("machineSpec") or {}
    machine = known_machine(machine_spec)
    # A job that is being cancelled, or whose state is unknown, may never have had a machine. RUNNING has.
    concludes = final or native == "RUNNING"
    return Status(
        state=state,
        native=native,
        reason=reason,
        category=category,
        finished=time_of(job.get("endTime")) if final else None,
        url=_url(str(job.get("name") or "")),
        instance_type=priced(machine) if machine is not None else str(machine_spec.get("machineType") or ""),
        limit_s=_seconds((spec.get("scheduling") or {}).get("timeout"), default=WEEK) if concludes else None,
    )


def _state(native: str, job: Mapping[str, Any]) -> tuple[str, str, str]:
    """Return (state, category, reason)."""
    error = job.get("error") or {}
    code, said = int(error.get("code") or 0), one_line(error.get("message"))
    if native == "SUCCEEDED":
        return "succeeded", "", ""
    if native in ("FAILED", "PARTIALLY_SUCCEEDED"):
        category = category_of(code, said)
        return "failed", category, _hinted(said or "Vertex AI gives no reason", category)
    if native == "EXPIRED":
        return "failed", "capacity", _hinted(said or "no machines within max_wait (maxWaitDuration)", "capacity")
    if native == "CANCELLED":
        category = category_of(code, said) if CAPACITY.search(said) or QUOTA.search(said) else ""
        if category:
            return "failed", category, _hinted(said, category)
        return "cancelled", "cancelled", "it was cancelled" if said in ("", "CANCELED") else said
    if native in PENDING:
        return "pending", "", PENDING[native]
    return "running", "", "stopping" if native == "CANCELLING" else ""


def _hinted(reason: str, category: str) -> str:
    hint = quota_hint(reason) if category == "quota" else HINTS.get(category)
    return hinted(reason, pull_hint(reason) if category == "auth" and PULL.search(reason) else hint)


def over_for(job: Mapping[str, Any]) -> float:
    """Return the seconds since the end of a finished job, by this machine's clock."""
    ended = time_of(job.get("endTime") or job.get("updateTime"))
    return max(0.0, time.time() - ended) if ended is not None else 0.0


def _url(name: str) -> str:
    """Return the console's page, as in Google's own SDK."""
    parts = name.split("/")
    if len(parts) != 6:
        return ""
    page = f"locations/{parts[3]}/training/{parts[5]}?project={parts[1]}"
    return f"https://console.cloud.google.com/agent-platform/{page}"


def _seconds(duration: Any, *, default: float) -> float:
    return float(str(duration)[:-1]) if re.fullmatch(r"\d+(\.\d+)?s", str(duration or "")) else default
