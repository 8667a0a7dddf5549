"""How a run ended, of what the platform and the nodes' exit records say; and the rows of result.json. Pure."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from typing import Any

from .errors import EXIT_CODES, CloudtrainError
from .follow import attempt_key
from .provider import FINAL, AttemptInfo, Status

__all__ = [
    "LIST_FIELDS",
    "Verdict",
    "attempt_info",
    "attempt_row",
    "first_line",
    "iso_time",
    "newest_of",
    "one_line",
    "only_attempt",
    "records_of",
    "root_record",
    "shown",
    "status_of",
    "unix_time",
    "verdict_of",
    "with_exits",
]

#: What the platform knows better than its nodes; of anything else the nodes know better.
PLATFORM_DECIDES = frozenset({"cancelled", "timeout", "capacity", "quota", "auth", "image", "preempted"})
FAILURE_FIELDS = ("node", "rank", "exception", "file", "line", "traceback", "process_exit_code")
#: Kept in result.json for `list_runs`, no part of the result.
LIST_FIELDS = ("name", "created")

Record = Mapping[str, Any]
Result = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """How an attempt stands or ended; ``reason`` is one line."""

    state: str
    category: str = ""
    reason: str = ""
    failure: dict[str, Any] | None = None

    @property
    def exit_code(self) -> int | None:
        if self.state == "succeeded":
            return 0
        return EXIT_CODES.get(self.category, CloudtrainError.exit_code) if self.state in FINAL else None


def verdict_of(status: Status, records: Sequence[Record]) -> Verdict:
    """What the platform and the exit records of the newest attempt say together."""
    said = Verdict(state=status.state, category=status.category, reason=first_line(status.reason))
    if status.state == "cancelled":
        return replace(said, category="cancelled", reason=said.reason or "cancelled")
    root = root_record(records)
    told = _told(root) if root is not None else None
    if status.state == "succeeded":
        return told if told is not None and root is not None and root.get("decided") else replace(said, category="")
    if not status.final or status.category in PLATFORM_DECIDES or told is None:
        blank = status.final and not said.reason
        return replace(said, reason=f"the platform says {status.native or 'it failed'}") if blank else said
    vague = told.category in ("", "infra") and status.category
    reason = said.reason if told.reason in said.reason else told.reason
    return replace(told, category=status.category if vague else told.category, reason=reason)


def _told(root: Record) -> Verdict | None:
    """The failure that a record tells of, None when it tells of none."""
    failure = root.get("failure")
    if root["outcome"] == "succeeded" or (root["outcome"] == "stopped" and not failure):
        return None
    public = {name: failure.get(name) for name in FAILURE_FIELDS} if failure else None
    default = "preempted" if root["outcome"] == "preempted" else "user_error" if failure else ""
    return Verdict(
        state="failed", category=root.get("category") or default, reason=_reason(root, public), failure=public
    )


def root_record(records: Sequence[Record]) -> Record | None:
    """The record that tells why the attempt ended: the decided one, else that of the node that failed first."""
    decided = [r for r in records if r.get("decided") and (r["outcome"] != "stopped" or r.get("failure"))]
    if decided:
        return decided[0]
    return min((r for r in records if r["outcome"] == "failed"), key=_failed_at, default=None)


def _failed_at(record: Record) -> float:
    stamp = (record.get("failure") or {}).get("time_ns")
    return stamp / 1e9 if stamp is not None else record.get("ended") or float("inf")


def records_of(info: AttemptInfo, exits: Sequence[Record]) -> list[Record]:
    """The attempt's exit records. A platform may also count starts that never reached our runtime, which then numbered
    the attempt lower: so records of the same k that ended after the platform's attempt began are its records too."""
    own = [r for r in exits if r["attempt"] == info.number]
    if own or info.started is None:
        return own
    k = attempt_key(info.number)[:1]
    since = [r for r in exits if attempt_key(str(r["attempt"]))[:1] == k and (r.get("ended") or 0) >= info.started]
    return newest_of(since)


def newest_of(records: Sequence[Record]) -> list[Record]:
    """The records of the newest attempt among them."""
    newest = max((attempt_key(str(r["attempt"])) for r in records), default=())
    return [r for r in records if attempt_key(str(r["attempt"])) == newest]


def _reason(record: Record, failure: Record | None) -> str:
    """One line naming rank, node, exception and place; the node's own if it already does."""
    told = first_line(str(record.get("reason") or ""))
    if failure is None or f"node {failure['node']}" in told:
        return told
    rank, code = failure["rank"], failure["process_exit_code"]
    who = f"node {failure['node']}" if rank is None else f"rank {rank} on node {failure['node']}"
    if failure["exception"]:
        name = str(failure["file"] or "").replace("\\", "/").rpartition("/")[2]
        place = f" ({name}:{failure['line']})" if name else ""
        return f"{who} raised {first_line(str(failure['exception']))}{place}"
    if told or code is None:
        return f"{who}: {told or 'ended without a word'}"
    return f"{who} was killed by {_signal(-code)}" if code < 0 else f"{who} exited with code {code}"


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def first_line(text: str) -> str:
    """The first line with anything on it, stripped."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def one_line(exc: Exception) -> str:
    """An exception in one line; its type too, unless it is one of ours."""
    text = first_line(str(exc))
    return text if isinstance(exc, CloudtrainError) and text else f"{type(exc).__name__}: {text}"


# ------------------------------------------------------------------------------------------------------------ records


def only_attempt(attempt: int, status: Status) -> AttemptInfo:
    """The attempt of a native job whose platform tells of none."""
    return AttemptInfo(
        number=f"{attempt}.0",
        started=status.started,
        ended=status.finished,
        reason=first_line(status.reason) if status.final else "",
    )


def with_exits(info: AttemptInfo, records: Sequence[Record]) -> AttemptInfo:
    """``info`` completed by the exit records of its nodes."""
    root = root_record(records)
    told = _told(root) if root is not None else None
    resumed = next((r["resumed_from"] for r in records if r.get("resumed_from")), "")
    return replace(
        info,
        started=info.started or min((r["started"] for r in records if r.get("started")), default=None),
        ended=info.ended or max((r["ended"] for r in records if r.get("ended")), default=None),
        reason=(told.reason if told else "") or info.reason,
        resumed_from=info.resumed_from or resumed,
    )


def attempt_row(info: AttemptInfo) -> dict[str, Any]:
    """An attempt as result.json has it."""
    return {
        "number": info.number,
        "native_id": info.native_id,
        "started": iso_time(info.started),
        "ended": iso_time(info.ended),
        "reason": first_line(info.reason),
        "resumed_from": info.resumed_from,
    }


def attempt_info(row: Record) -> AttemptInfo:
    """The inverse of `attempt_row`."""
    return AttemptInfo(
        number=str(row["number"]),
        native_id=row.get("native_id") or "",
        started=unix_time(row.get("started")),
        ended=unix_time(row.get("ended")),
        reason=row.get("reason") or "",
        resumed_from=row.get("resumed_from") or "",
    )


def status_of(result: Record) -> Status:
    """The Status that a result.json stands for."""
    attempts = tuple(attempt_info(row) for row in result.get("attempts") or ())
    return Status(
        state=result["state"],
        category=result.get("category") or "",
        reason=result.get("reason") or "",
        attempts=attempts,
        started=attempts[0].started if attempts else None,
        finished=attempts[-1].ended if attempts else None,
    )


def shown(stored: Record) -> Result:
    """A stored result without what only `list` needs."""
    return {key: value for key, value in stored.items() if key not in LIST_FIELDS}


def iso_time(seconds: float | None) -> str | None:
    """Unix seconds as ISO 8601 in UTC, to the millisecond."""
    if seconds is None:
        return None
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def unix_time(text: str | None) -> float | None:
    """The inverse of `iso_time`."""
    return None if text is None else datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()
