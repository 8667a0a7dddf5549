"""Turn ModelArts' view of a training job into a Status: `status` makes the call, the rest is pure.

Phases and records are as Huawei's SDK has them. The texts of failures are guesses, as no answer of the service was
seen.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ...provider_api.protocol import AttemptInfo, Status
from .._cloud import first_match, hinted, one_line, pairs_of, patterns
from .api import HELP, job_of
from .node import AGAIN, LIMIT_PATH, TIME_UP
from .request import auto_stop_hours, words_of

if TYPE_CHECKING:
    from .api import Account

PENDING = {"Creating": "Creating: taken in", "Pending": "Pending: waiting for machines"}
"""Phases in which no script need run. Any other phase that is not final, also an unknown one, counts as running."""
ABNORMAL_SECONDS = 900.0
"""Seconds of the phase Abnormal (secondary: Lost, Unknown) after which the job counts as failed: it may come back."""
CLOCK_SECONDS = 900.0
"""Most difference between ModelArts' clock and ours: with more, no signature counts."""
HINTS: Mapping[str, str] = {
    "image": "check the image, its architecture, and that ModelArts' agency may pull it from SWR",
    "auth": HELP["agency"],
    "quota": HELP["quota"],
    "capacity": "try another flavor, region or time",
    "infra": "ModelArts itself failed; submit it again",
}
_EXITS = {126: "image", 127: "image", TIME_UP: "timeout", AGAIN: "infra"}
"""Exit codes of our command: a shell that found no Python, the time limit, a node that only lost its peers."""
_OOM = patterns((r"oom.?killed|out of memory|memory limit", "oom"))
_FAULTS = frozenset(("chip_fault", "node_fault", "job_subhealth"))
"""Words of `recover_records` for a fault of machines."""
_CATEGORIES = patterns(
    (r"quota", "quota"),
    (r"insufficient|not enough|no (available )?(resource|capacity)|sold out", "capacity"),
    (r"image.{0,300}(not found|not exist|pull|denied|unauthorized)|(pull|manifest).{0,300}image|errimage", "image"),
    (r"agency|permission|access denied|forbidden|unauthorized", "auth"),
    (r"pre-?empt", "preempted"),
    (r"time(d)? ?out|auto.?stop|exceed.{0,40}duration", "timeout"),
)
"""Patterns of a failure's message that is no script's end, first match."""


def category_of(code: int, message: str, fault: str = "") -> str:
    """Return the category of a failure, from a task's exit code and message, and the ``fault`` that was found."""
    if first_match(_OOM, message, ""):
        return "oom"
    if fault in _FAULTS:
        return "infra"
    if code in _EXITS:
        return _EXITS[code]
    if code in (137, 143):  # killed from outside
        return first_match(_CATEGORIES, message, "infra")
    return "user_error" if code else first_match(_CATEGORIES, message, "infra")


def status(account: Account, native_id: str) -> Status:
    """Return the job's status, by one call. A job that is Abnormal for too long is stopped: it may come back."""
    job = account.describe(native_id)
    since, stopped = account.abnormal.get(native_id), _stopped(job.get("status") or {})
    lost = since is not None and (
        time.monotonic() - since > ABNORMAL_SECONDS
        or (stopped is not None and time.time() - stopped > ABNORMAL_SECONDS + CLOCK_SECONDS)
    )
    if lost:
        account.cancel(native_id)
    return status_of(job, lost=lost, url=_url(native_id))


def status_of(job: Mapping[str, Any], *, lost: bool = False, url: str = "") -> Status:
    """Return the Status of a job in JSON; ``lost``: it has been Abnormal for too long.

    Whether ``start_time`` is the moment of admission or of the run is unknown, so the status names no start. Its
    ``limit_s`` leaves the start and the timeout to the nodes' records.
    """
    own: Mapping[str, Any] = job.get("status") or {}
    phase = str(own.get("phase") or "Unknown")
    state, category, reason = _state(phase, own, job, lost=lost)
    final = state not in ("pending", "running")
    resource = (job.get("spec") or {}).get("resource") or {}
    return Status(
        state=state,
        native=phase,
        reason=reason,
        category=category,
        attempts=_attempts(job, own),
        finished=_finished(own) if final else None,
        url=url,
        instance_type=str(resource.get("flavor_id") or ""),
        limit_s=_limit(job) if final or phase == "Running" else None,
    )


def _state(phase: str, own: Mapping[str, Any], job: Mapping[str, Any], *, lost: bool) -> tuple[str, str, str]:
    """Return (state, category, reason)."""
    if phase == "Completed":
        return "succeeded", "", ""
    if phase == "Terminated":
        limit = _limit(job)
        hours = auto_stop_hours(limit) if limit else 0
        if hours and int(own.get("duration") or 0) / 1000 >= hours * 3600:  # no word tells it from a cancel
            return "failed", "timeout", f"auto_stop ended it after {hours} hours"
        return "cancelled", "cancelled", "it was stopped"
    if phase == "Failed":
        return _failure(own)
    if phase == "Abnormal" and lost:
        return "failed", "infra", hinted(f"ModelArts has lost it ({own.get('secondary_phase')})", HINTS["infra"])
    if phase in PENDING:
        return "pending", "", PENDING[phase]
    return "running", "", {"Terminating": "stopping", "Abnormal": "ModelArts has lost contact with it"}.get(phase, "")


def _failure(own: Mapping[str, Any]) -> tuple[str, str, str]:
    """Return the state of a failed job: by the first task that failed by itself, else by the last run's end."""
    record: Mapping[str, Any] = (own.get("running_records") or [{}])[-1]
    faults = [str(row.get("fault_scenario") or "") for row in record.get("recover_records") or ()]
    tasks = [task for task in own.get("task_statuses") or () if task.get("exit_code") or task.get("message")]
    blamed = sorted(tasks, key=lambda task: int(task.get("exit_code") or 0) in (0, AGAIN, 137, 143))
    task = blamed[0] if blamed else {}
    code, said = int(task.get("exit_code") or 0), one_line(task.get("message") or record.get("end_reason"))
    category = category_of(code, said, next(iter(faults), ""))
    where = f"{task['task']}: exit code {code}" if code else ""
    reason = ": ".join(filter(None, (where, said))) or "ModelArts gives no reason"
    return "failed", category, hinted(reason, HINTS.get(category))


def _attempts(job: Mapping[str, Any], own: Mapping[str, Any]) -> tuple[AttemptInfo, ...]:
    """Return a row for each of ModelArts' own starts of the job, which it records in full seconds."""
    records = own.get("running_records") or ()
    number = str((job.get("metadata") or {}).get("name") or "").split("-")[-3:-2]
    k = number[0] if number and number[0].isdecimal() else "0"
    rows = []
    for at, record in enumerate(records):
        again = at < len(records) - 1
        reason = one_line(record.get("end_reason") or record.get("end_recover")) if again else ""
        rows.append(
            AttemptInfo(
                number=f"{k}.{at}",
                started=float(record["start_at"]) if record.get("start_at") else None,
                ended=float(record["end_at"]) if record.get("end_at") else None,
                category="preempted" if again else "",
                reason=reason,
            )
        )
    return tuple(rows)


def _finished(own: Mapping[str, Any]) -> float | None:
    """Return the end: there is no field for it."""
    ends = [float(record.get("end_at") or 0) for record in own.get("running_records") or ()]
    if own.get("start_time"):
        ends.append((int(own["start_time"]) + int(own.get("duration") or 0)) / 1000)
    return max(ends, default=0.0) or None


def _stopped(own: Mapping[str, Any]) -> float | None:
    """Return a time that is no earlier than the end of the newest start's running; None if that is unknown.

    Whether ``duration`` counts earlier starts too, and whether it stands still while the phase is Abnormal, is
    unverified. In each case the time is late rather than early: a job that runs must not be stopped.
    """
    last: Mapping[str, Any] = (own.get("running_records") or [{}])[-1]
    start, end = float(last.get("start_at") or 0), float(last.get("end_at") or 0)
    seconds = int(own.get("duration") or 0) / 1000
    return end or (start + seconds if start and seconds else None)


def _limit(job: Mapping[str, Any]) -> float | None:
    """Return the run's own limit, from the command; None for a job that is not ours."""
    limit = pairs_of(words_of(job)).get(LIMIT_PATH)
    return None if limit is None else float(limit)


def _url(native_id: str) -> str:
    """Return the console's page; its form is unverified."""
    region, _, job_id = job_of(native_id)
    return f"https://console.huaweicloud.com/modelarts/?region={region}#/trainingJobs/{job_id}"
