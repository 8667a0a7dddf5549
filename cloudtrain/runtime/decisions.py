"""Decide what a node does next. Pure: state and message in, new state and actions out. `Node` carries the actions out.

Times are monotonic seconds; those that end in ``_ns`` are Unix nanoseconds.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from .cause import Failure, real, root_cause
from .timings import TIMINGS

GRACE_RESERVE = 0.25
"""The part of the platform's grace kept for stopping ranks and mirroring, at most `Timings.reserve`."""

Message = Mapping[str, Any]


class Action(NamedTuple):
    """One thing to do: ``tell`` node 0 or ``tell_all`` a message, ``say`` a line, ``warn`` the script, or let it
    ``train_on``."""

    do: str
    what: Any = None


@dataclass(frozen=True, kw_only=True)
class Notice:
    """All that a node has heard of its coming end. ``since`` is None without a notice; ``heard`` is its arrival.

    ``sources`` of `NodeEnvironment.notices` now say that this node is about to go. ``standing`` are the nodes that are
    about to go, and the origin: ``signal``, or ``notice`` of a source. Node 0 has all. ``passed_on`` are the origins
    that all nodes have heard of, on node 0. The last notice was taken back at ``withdrawn``.
    """

    since: float | None = None
    heard: float = 0.0
    why: str = ""
    node: int | None = None
    sources: frozenset[int] = frozenset()
    standing: frozenset[tuple[int, str]] = frozenset()
    passed_on: frozenset[str] = frozenset()
    withdrawn: float = float("-inf")

    def held(self, hold: float) -> bool:
        """Return whether this node must stay until the platform takes it: it will get no signal before that."""
        return hold > 0 and {of for _, of in self.standing} == {"notice"}

    def end(self, *, hold: float, stop_grace: float) -> float:
        """Return when this node must end: before its kill, or at the end of its ``hold``; else never."""
        if self.since is None or not self.standing:
            return float("inf")
        return self.since + (hold if self.held(hold) else stop_grace - 2.0)

    def for_newcomer(self) -> Message:
        """Return node 0's message for a node that comes after the notice."""
        of = max((of for _, of in self.standing), default="")  # a signal, if there was one
        return {"t": "preempt", "why": self.why, "node": self.node, "of": of}


Decision = tuple[Notice, list[Action]]


def hear(notice: Notice, message: Message, *, me: int, now: float, leaving: bool = False) -> Decision:
    """Decide about one message of a notice: ``signal``, ``notice``, ``preempt``, ``withdraw``, ``withdrawn``, ``left``.

    ``leaving``: ranks have left because of the notice, so that it can no longer be taken back.
    """
    kind = message["t"]
    if kind == "signal":
        name = signal.Signals(message["number"]).name
        return _announce(notice, f"node {me} got a stop signal", me, "signal", now, f" ({name})", message["at"])
    if kind == "notice":
        source, before = frozenset({message["source"]}), notice.sources
        notice = replace(notice, sources=before | source if message["why"] else before - source)
        if notice.sources and not before:
            more, at = f" ({message['why']})", message["at"]
            return _announce(notice, f"node {me} is about to go", me, "notice", now, more, at)
        return notice, [Action("tell", {"t": "withdraw", "node": me})] if before and not notice.sources else []
    if kind == "withdraw":
        notice = replace(notice, standing=notice.standing - {(message["node"], "notice")})
        if notice.standing or notice.since is None:
            return notice, []
        notice, actions = _withdraw(replace(notice, passed_on=frozenset()), me, now, leaving)
        return notice, [Action("tell_all", {"t": "withdrawn"}), *actions]
    if kind == "withdrawn":
        return _withdraw(notice, me, now, leaving)
    if kind == "left":  # a rank has ended: so soon after a withdrawal it may have got the notice
        late = notice.since is not None or now >= notice.withdrawn + TIMINGS.withdrawn
        return (notice, []) if late else _leave(notice, me, now)
    of, passed = message.get("of", "signal"), []
    if me == 0 and of not in notice.passed_on:  # a platform signals all nodes at once, and each of them reports
        notice, passed = replace(notice, passed_on=notice.passed_on | {of}), [Action("tell_all", message)]
    notice, actions = _begin(notice, message["why"], message["node"], of, now)
    return notice, [*passed, *actions]


def _begin(notice: Notice, why: str, node: int, of: str, now: float, at: float | None = None) -> Decision:
    """Begin to leave, for a notice at ``at``. With an empty ``of``, no machine is about to be taken."""
    at, first = at or now, notice.since is None
    since = min(notice.since, at) if notice.since is not None and notice.standing else at
    notice = replace(notice, since=since, standing=notice.standing | ({(node, of)} if of else set()))
    if not first:
        return notice, []
    said = Action("say", f"{why}; the script may save a checkpoint now")
    return replace(notice, heard=now, why=why, node=node), [said, Action("warn")]


def _announce(
    notice: Notice, why: str, me: int, of: str, now: float, more: str = "", at: float | None = None
) -> Decision:
    notice, actions = _begin(notice, why + more, me, of, now, at)
    return notice, [*actions, Action("tell", {"t": "preempt", "why": why, "node": me, "of": of})]


def _leave(notice: Notice, me: int, now: float) -> Decision:
    return _announce(notice, f"ranks of node {me} have left at a notice that was withdrawn", me, "", now)


def _withdraw(notice: Notice, me: int, now: float, leaving: bool) -> Decision:
    """Forget the notice and train on, unless ranks have left because of it: then all nodes leave."""
    notice = replace(notice, standing=frozenset())
    if notice.since is None:
        return notice, []
    if leaving:
        return _leave(notice, me, now)
    said = Action("say", "the notice was withdrawn; training continues")
    return replace(notice, since=None, node=None, why="", withdrawn=now), [said, Action("train_on")]


def signal_due(*, stopping: float | None, since: float | None, stop_grace: float, signalled: int, now: float) -> str:
    """Return the signal for the ranks that is due: ``term``, ``kill``, ``all`` (torchrun, too), or none.

    They come soon after a failure anywhere, at ``stopping``; after a notice, at ``since``, near the grace's end.
    ``signalled`` counts those sent so far.
    """
    term = kill = float("inf")
    if stopping is not None:
        term, kill = stopping + TIMINGS.stop_term, stopping + TIMINGS.stop_kill
    elif since is not None:
        reserve = min(TIMINGS.reserve, stop_grace * GRACE_RESERVE)
        term = since + stop_grace - reserve
        kill = term + reserve / 3
    if now >= kill + TIMINGS.launcher and signalled == 2:
        return "all"
    if now >= kill and signalled < 2:
        return "kill"
    return "term" if now >= term and signalled < 1 else ""


def with_reports(failures: Sequence[Failure], reported: Iterable[Failure]) -> list[Failure]:
    """Return the failures with those that a peer reports. A repeated one only adds an exit code that was unknown."""
    found = list(failures)
    for failure in reported:
        number = next((n for n, known in enumerate(found) if known.about == failure.about), None)
        if number is None:
            found.append(failure)
        elif found[number].code is None:
            found[number] = replace(found[number], code=failure.code)
    return found


def restore_verdict(answers: Mapping[int, Message], nodes: int) -> tuple[str, Any]:
    """Decide whether all start from a restored checkpoint: ``go``; ``late`` and the first node that has not answered;
    ``fail`` and why, as a further try may restore it; or ``pass`` it over and why, as each such node found damage."""
    if late := sorted(set(range(nodes)) - answers.keys()):
        return "late", late[0]
    bad = [answer for _, answer in sorted(answers.items()) if answer["why"]]
    if not bad:
        return "go", ""
    worst = next((answer for answer in bad if not answer["damaged"]), bad[0])
    return "pass" if worst["damaged"] else "fail", worst["why"]


def node_outcome(
    failures: Sequence[Failure],
    *,
    stopped_ns: int | None,
    noticed: bool,
    complete: bool,
    saved: bool,
    code: int | None,
    stopping: bool,
) -> str:
    """Return the outcome of one node. ``complete``: its script ended well before any notice. ``saved``: so are all its
    results. ``stopping``: a failure anywhere ended its ranks."""
    if noticed and not any(real(failure, stopped_ns) for failure in failures):
        return "succeeded" if complete and saved and not failures and not stopping else "preempted"
    if failures:
        return "failed"
    return "succeeded" if code == 0 and not stopping else "stopped"


def conclude(
    outcome: str,
    failures: Sequence[Failure],
    *,
    others: Set[int],
    outcomes: Mapping[int, str],
    stopped_ns: int | None,
    now_ns: int,
) -> tuple[str, Failure | None]:
    """Decide node 0's outcome for all, and the root cause, by the ``outcomes`` that peers have reported.

    A node of ``others`` that has reported none is lost, though the link may not know yet.
    """
    mute = others - outcomes.keys()
    if outcome == "succeeded" and (mute or "preempted" in outcomes.values()):
        outcome = "preempted"
    cause = root_cause(failures, stopped_ns=stopped_ns) if outcome == "failed" else None
    if cause is not None and cause.consequence and mute:
        why = "was lost: it has not reported how it ended"
        cause = Failure(kind="lost", node=min(mute), time_ns=now_ns, exception=why)
    return outcome, cause
