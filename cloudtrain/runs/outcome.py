"""Decide how a run ended, from the platform's status and the nodes' exit records; make result.json's rows. Pure."""

from __future__ import annotations

import signal
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from typing import Any

from ..errors import EXIT_CODES, CloudtrainError
from ..provider_api.node import attempt_key
from ..provider_api.protocol import ABANDONED, FINAL, AttemptInfo, Status
from ..runtime.checkpoint_names import step_of

#: Categories that the platform knows better than its nodes; the nodes know all others better.
PLATFORM_DECIDES = frozenset({"cancelled", "timeout", "capacity", "quota", "auth", "image", "preempted"})
#: Categories that a platform may give to a job whose time was up, in addition to a cancel.
ENDED_BY_LIMIT = frozenset({"capacity", "infra", "preempted", "timeout"})
#: Seconds by which a node's recorded start may be later than the platform's.
LEAST_SLACK, MOST_SLACK = 5.0, 120.0
FAILURE_FIELDS = ("node", "rank", "exception", "file", "line", "traceback", "process_exit_code")
#: Prefix of the reason of a run that was cancelled and has not ended yet.
CANCELLING = "cancelling since"
#: Fields of result.json for `list_page`, not part of the result.
LIST_FIELDS = ("name", "created")

Record = Mapping[str, Any]
Result = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The state or the end of an attempt; ``reason`` is one line."""

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
    """Return the verdict of the platform and the exit records of the newest attempt together."""
    platform = Verdict(state=status.state, category=status.category, reason=first_line(status.reason))
    if status.state == "cancelled":
        return replace(platform, category="cancelled", reason=platform.reason or "cancelled")
    root = root_record(records)
    nodes = _failure_of(root)
    if status.state == "succeeded":
        return nodes if nodes is not None and (root or {}).get("decided") else replace(platform, category="")
    only_preempted = nodes is not None and nodes.category == "preempted" and status.category not in ("", "preempted")
    consequence = status.native == ABANDONED and nodes is not None and was_lost(nodes.failure)
    if not status.final or status.category in PLATFORM_DECIDES or nodes is None or only_preempted or consequence:
        blank = status.final and not platform.reason
        return replace(platform, reason=f"the platform reports {status.native or 'it failed'}") if blank else platform
    # For user errors a platform only has an exit code.
    vague = nodes.category == "" or (nodes.category == "infra" and status.category not in ("", "user_error"))
    reason = platform.reason if platform.reason.startswith(nodes.reason) else nodes.reason
    more = "" if nodes.reason in platform.reason else platform.reason  # a platform may quote the node's whole output
    if more and was_lost(nodes.failure):
        # Its peers only know that it is lost; the platform may know why.
        same = more.split()[:2] == nodes.reason.split()[:2]
        reason = more if same else f"{nodes.reason}; the platform: {more}"
    elif more and status.category == nodes.category == "oom":  # the platform knows the limit
        reason = f"{nodes.reason}; {more}"
    return replace(nodes, category=status.category or nodes.category if vague else nodes.category, reason=reason)


def began_at(attempt: int, starts: Sequence[Record], exits: Sequence[Record]) -> float | None:
    """Return when a node of start ``attempt`` first ran, by the nodes' own records (Unix seconds), or None."""
    own = records_within(attempt, [*starts, *exits])
    return min((float(r["started"]) for r in own if r.get("started")), default=None)


def records_within(attempt: int, records: Sequence[Record]) -> list[Record]:
    """Return the records of start ``attempt`` and of the platform's restarts within it."""
    return [r for r in records if attempt_key(str(r["attempt"]))[:1] == (attempt,)]


def with_start(status: Status, began: float | None, *, ran: float, stopped: bool) -> Status:
    """Complete the status of a platform that does not report when a job began to run (`Status.limit_s` is set).

    ``began`` is Unix seconds, None if no node and no client knows of a start. ``ran`` is the running time of all starts
    of the job in seconds, without the waits between them. ``stopped``: cloudtrain asked the platform to cancel it. The
    time limit ended a job that ran for so long, under any name that the platform gives that.
    """
    if status.limit_s is None:
        return status
    status = replace(status, started=began)
    slack = max(LEAST_SLACK, min(MOST_SLACK, status.limit_s / 10)) if status.limit_s else 0.0
    ended = status.state == "cancelled" or (status.state == "failed" and status.category in ENDED_BY_LIMIT)
    if stopped or not ended or began is None or ran < (status.limit_s or 0.0) - slack:
        return status
    said = first_line(status.reason) if status.state == "failed" and status.category != "capacity" else ""
    reason = "max_runtime is used up" + (f": {said}" if said else "")
    return replace(status, state="failed", category="timeout", reason=reason)


def without_machines(status: Status, reason: str) -> Status:
    """Return ``status`` of an attempt that a client cancelled for lack of machines, with category capacity and
    ``reason``. Platforms with such a limit report the same."""
    attempts = status.attempts
    if attempts:
        attempts = (*attempts[:-1], replace(attempts[-1], reason=reason, category="capacity"))
    return replace(status, state="failed", category="capacity", reason=reason, attempts=attempts)


def _failure_of(root: Record | None) -> Verdict | None:
    """Return the failure in a record, or None."""
    if not root:
        return None
    failure = root.get("failure")
    if root["outcome"] == "succeeded" or (root["outcome"] == "stopped" and not failure):
        return None
    public = {name: failure.get(name) for name in FAILURE_FIELDS} if failure else None
    if failure and public is not None and failure.get("machine"):
        public["machine"] = failure["machine"]
    default = "preempted" if root["outcome"] == "preempted" else "user_error" if failure else ""
    return Verdict(
        state="failed", category=root.get("category") or default, reason=_reason(root, public), failure=public
    )


def root_record(records: Sequence[Record]) -> Record | None:
    """Return the record that explains the attempt's end: the decided one, else that of the node that failed first."""
    decided = [r for r in records if r.get("decided") and (r["outcome"] != "stopped" or r.get("failure"))]
    if decided:
        return decided[0]
    return min((r for r in records if r["outcome"] == "failed"), key=_failed_at, default=None)


def _failed_at(record: Record) -> float:
    stamp = (record.get("failure") or {}).get("time_ns")
    return stamp / 1e9 if stamp is not None else record.get("ended") or float("inf")


def was_lost(failure: Record | None) -> bool:
    """Return whether a failure says only that a node is gone, as its peers saw it."""
    return failure is not None and failure["rank"] is None and str(failure["exception"] or "").startswith("was lost")


def records_of(info: AttemptInfo, exits: Sequence[Record], starts: Sequence[Record] | None = None) -> list[Record]:
    """Return the attempt's exit records. ``starts`` are the nodes' start records, None if the caller has none.

    A platform may start a failed container again before it ends the job. The nodes of such an attempt leave no start
    record and decide nothing, so the failure that was decided just before it counts. A platform may also count starts
    that never reached our runtime, which then numbered the attempt lower. So records of the same k that ended after the
    platform's attempt began are its records too.
    """
    own = [r for r in exits if r["attempt"] == info.number]
    if any(r.get("decided") for r in own):
        return own
    within = records_within((attempt_key(info.number) or (-1,))[0], exits)  # a platform may have no number
    ghost = own and all(r["outcome"] == "stopped" for r in own)
    if ghost and starts is not None and not any(r["attempt"] == info.number for r in starts):
        before = newest_records([r for r in within if r.get("decided")])
        if any(r["outcome"] == "failed" and not r.get("lost") for r in before):
            return before
    if own or info.started is None:
        return own
    return newest_records([r for r in within if (r.get("ended") or 0) >= info.started])


def newest_records(records: Sequence[Record]) -> list[Record]:
    """Return the records of the newest attempt among them."""
    newest = max((attempt_key(str(r["attempt"])) for r in records), default=())
    return [r for r in records if attempt_key(str(r["attempt"])) == newest]


def _reason(record: Record, failure: Record | None) -> str:
    """Return one line naming rank, node, exception and place; the node's own if it already does."""
    own = first_line(str(record.get("reason") or ""))
    if failure is None or f"node {failure['node']}" in own:
        return own
    rank, code = failure["rank"], failure["process_exit_code"]
    subject = f"node {failure['node']}" if rank is None else f"rank {rank} on node {failure['node']}"
    if failure["exception"]:
        name = str(failure["file"] or "").replace("\\", "/").rpartition("/")[2]
        place = f" ({name}:{failure['line']})" if name else ""
        return f"{subject} raised {first_line(str(failure['exception']))}{place}"
    if own or code is None:
        return f"{subject}: {own or 'ended without a message'}"
    if code >= 0:
        return f"{subject} exited with code {code}"
    known = -code in [*signal.Signals]
    return f"{subject} was killed by {signal.Signals(-code).name if known else f'signal {-code}'}"


def first_line(text: str) -> str:
    """Return the first line with text, stripped."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def one_line(exc: Exception) -> str:
    """Return an exception in one line: one of ours with its hint, another with its type."""
    if isinstance(exc, CloudtrainError) and str(exc):
        return first_line(exc.with_hint())
    return f"{type(exc).__name__}: {first_line(str(exc))}"


# ------------------------------------------------------------------------------------------------------------ records


def attempts_of(
    statuses: Mapping[str, Status], natives: Mapping[int, str], exits: Sequence[Record], starts: Sequence[Record]
) -> list[AttemptInfo]:
    """Return every attempt known to the platform or a node, oldest first.

    ``statuses`` are by native id, ``natives`` by attempt, ``exits`` and ``starts`` the nodes' records.
    """
    known = _numbers([*starts, *exits])
    infos: dict[str, AttemptInfo] = {}
    seen: set[str] = set()
    for k, native in sorted(natives.items(), reverse=True):
        if native in seen:  # one native job may hold several attempts
            continue
        seen.add(native)
        status = statuses[native]
        for info in status.attempts or attempts_within(k, status, known, {str(r["attempt"]) for r in exits}):
            infos.setdefault(info.number, replace(info, native_id=info.native_id or native))
    for number in known - infos.keys():
        infos[number] = AttemptInfo(number=number, native_id=natives.get(attempt_key(number)[0], ""))
    return with_records(infos, exits, starts)


def with_records(
    infos: Mapping[str, AttemptInfo], exits: Sequence[Record], starts: Sequence[Record]
) -> list[AttemptInfo]:
    """Return ``infos`` by number, and the attempts that only a node knows, with the facts of both, oldest first."""
    before = {str(record["attempt"]): record for record in starts}
    after = {str(record["after"]): record for record in before.values() if record.get("after")}
    return [
        with_exits(
            infos.get(number, AttemptInfo(number=number)),
            [record for record in exits if record["attempt"] == number],
            before=before.get(number, {}),
            after=after.get(number, {}),
        )
        for number in sorted({*infos} | _numbers([*starts, *exits]), key=attempt_key)
    ]


def _numbers(records: Sequence[Record]) -> set[str]:
    """Return the numbers of the attempts in ``records``. A node that ends before node 0 has sent it the number
    records at most the number of the start."""
    return {str(record["attempt"]) for record in records if len(attempt_key(str(record["attempt"]))) > 1}


def attempts_within(
    attempt: int, status: Status, known: Iterable[str], exited: Collection[str] = ()
) -> tuple[AttemptInfo, ...]:
    """Return the attempts of a native job whose platform reports none; ``known`` are the nodes' numbers.

    The job's start is that of the first one, its end and reason those of the last. If the platform does not report when
    the job ran (`Status.limit_s`), it may have waited for machines at the end. Then the recorded end of an attempt in
    ``exited`` counts.
    """
    numbers = sorted({n for n in known if attempt_key(n)[:1] == (attempt,)} | {f"{attempt}.0"}, key=attempt_key)
    rows = [AttemptInfo(number=number) for number in numbers]
    rows[0] = replace(rows[0], started=status.started)
    if status.final:
        category = status.category if status.category in PLATFORM_DECIDES else ""
        rows[-1] = replace(rows[-1], reason=first_line(status.reason), category=category)
    if status.limit_s is None or rows[-1].number not in exited:
        rows[-1] = replace(rows[-1], ended=status.finished)
    return tuple(rows)


def with_exits(info: AttemptInfo, records: Sequence[Record], *, before: Record, after: Record) -> AttemptInfo:
    """Return ``info`` completed by its nodes' exit records and node 0's remarks.

    ``before`` is its own start record, ``after`` that of the following attempt; each may be empty.
    """
    root = root_record(records) or {}
    verdict = _failure_of(root) or Verdict(state="")
    reason = info.reason if info.reason.startswith(verdict.reason) else verdict.reason
    where = verdict.failure or {"node": root.get("told")}  # the node that got a stop signal, if that ended the attempt
    resumed = next((r["resumed_from"] for r in records if r.get("resumed_from")), "")
    begins = [r["started"] for r in [*records, before] if r.get("started")]
    lost = info.machine if not records else ""  # nothing else says what the platform's machine did
    return replace(
        info,
        started=info.started or min(begins, default=None),
        ended=info.ended or max((r["ended"] for r in records if r.get("ended")), default=after.get("started")),
        reason="; ".join(filter(None, [reason, *root.get("remarks", ())])),
        resumed_from=info.resumed_from or resumed or before.get("resumed_from") or "",
        category=info.category or verdict.category or ("infra" if lost else ""),
        node=info.node if info.node is not None else where.get("node"),
        rank=info.rank if info.rank is not None else where.get("rank"),
        machine=lost or where.get("machine") or "",
        lost=after.get("lost"),
    )


def attempt_row(info: AttemptInfo) -> dict[str, Any]:
    """Return an attempt as result.json has it."""
    return {
        "number": info.number,
        "native_id": info.native_id,
        "started": iso_time(info.started),
        "ended": iso_time(info.ended),
        "reason": first_line(info.reason),
        "category": info.category or None,
        "node": info.node,
        "rank": info.rank,
        "resumed_from": info.resumed_from,
        "resumed_step": step_of(info.resumed_from),
        "lost": dict(info.lost) if info.lost else None,
        "nodes": info.nodes,
        **({"machine": info.machine} if info.machine else {}),
    }


def attempt_info(row: Record) -> AttemptInfo:
    """Return the attempt of a row, the inverse of `attempt_row`."""
    return AttemptInfo(
        number=str(row["number"]),
        native_id=row.get("native_id") or "",
        started=unix_time(row.get("started")),
        ended=unix_time(row.get("ended")),
        reason=row.get("reason") or "",
        resumed_from=row.get("resumed_from") or "",
        category=row.get("category") or "",
        node=row.get("node"),
        rank=row.get("rank"),
        machine=row.get("machine") or "",
        lost=row.get("lost"),
        nodes=row.get("nodes"),
    )


def status_of(result: Record) -> Status:
    """Return the Status of a result.json."""
    attempts = tuple(attempt_info(row) for row in result.get("attempts") or ())
    return Status(
        state=result["state"],
        category=result.get("category") or "",
        reason=result.get("reason") or "",
        attempts=attempts,
        started=attempts[0].started if attempts else None,
        finished=attempts[-1].ended if attempts else None,
    )


def public_result(stored: Record) -> Result:
    """Return a stored result without the fields for `list`."""
    return {key: value for key, value in stored.items() if key not in LIST_FIELDS}


def iso_time(seconds: float | None) -> str | None:
    """Return Unix seconds as ISO 8601 in UTC, to the millisecond."""
    if seconds is None:
        return None
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def unix_time(text: str | None) -> float | None:
    """Return the Unix seconds of ISO 8601 text, the inverse of `iso_time`."""
    return None if text is None else datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()
