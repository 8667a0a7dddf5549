"""Decide what follows an attempt that has ended, or that waits for machines. Pure: no store, no platform, no clock.

A waiting client and the supervisor of this machine gather the facts, and ask the same `AttemptPolicy`. So every
platform has the same rules.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..job.job import Job
from ..validate import duration
from .cost import seconds_of
from .outcome import unix_time, was_lost

NO_MACHINES = frozenset({"capacity", "quota"})
"""Categories that another GPU of the list, or another region or provider, may cure."""
NOT_RETRIED = frozenset({"cancelled", "timeout", "quota", "auth", "spec", "image"})
"""Categories that a further attempt with the same request would not cure."""
KILLED = 9
"""SIGKILL; not every client's system has the name."""

Record = Mapping[str, Any]


# ---------------------------------------------------------------------------------------------------------------- facts


@dataclass(frozen=True, kw_only=True)
class Ending:
    """The end of an attempt, to compare with the next one's.

    ``exception`` is from `exception_of`. ``checkpoint`` is the newest one of the run by then, None if there is none.
    """

    exception: str = ""
    checkpoint: Any = None

    @classmethod
    def of_record(cls, record: Record) -> Ending:
        """Return the ending in a record of the store."""
        return cls(exception=str(record.get("exception") or ""), checkpoint=record.get("checkpoint"))

    def repeats(self, before: Ending | None) -> bool:
        """Return whether it is the same failure as ``before``, and the run has made no progress between."""
        return bool(self.exception) and self == before


@dataclass(frozen=True, kw_only=True)
class Usage:
    """The use by all attempts so far, in seconds, US dollars and GPU hours; None is unknown."""

    seconds: float = 0.0
    usd: float | None = 0.0
    gpu_hours: float | None = 0.0


@dataclass(frozen=True, kw_only=True)
class History:
    """The facts about a run's attempts in one region or provider, once the newest one has ended.

    ``newest`` is its number. ``nodes`` and ``choices`` are the number of nodes and the GPU of the list in each request
    so far, oldest first. ``refused``: the platform refused the newest one. ``starts``: the caller starts further
    attempts, not the platform. ``next_gpu`` is the next GPU of the list that can be requested, if there were no
    machines. ``may_leave``: the run never ran, and another region or provider may follow. ``node_counts`` are the
    numbers of nodes that the next one may have, the most first. ``bound`` says why there are no others.
    """

    state: str
    category: str
    newest: int = 0
    choices: tuple[int, ...] = (0,)
    refused: bool = False
    cancelled: bool = False
    starts: bool = True
    next_gpu: int | None = None
    may_leave: bool = False
    nodes: tuple[int, ...] = (1,)
    node_counts: tuple[int, ...] = (1,)
    bound: str = ""


# ------------------------------------------------------------------------------------------------------------ decisions


@dataclass(frozen=True, kw_only=True)
class Next:
    """Start attempt ``number`` on ``nodes`` nodes, with GPU ``choice`` of the list (None: the same) and ``limits``."""

    number: int
    choice: int | None = None
    nodes: int = 1
    limits: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Move:
    """Go on in the next region or provider. ``reason`` is a limit that allows no further attempt here."""

    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Stop:
    """End the run, or the waiting attempt, with this category. ``reason`` is empty if no attempt was to follow."""

    category: str
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Wait:
    """Let the attempt wait for ``seconds`` more; for any time without a limit."""

    seconds: float = float("inf")


@dataclass(frozen=True, kw_only=True)
class AttemptPolicy:
    """The limits of a run over all of its attempts: seconds, US dollars, GPU hours. None is no limit."""

    max_runtime: float
    retries: int = 0
    max_cost: float | None = None
    max_gpu_hours: float | None = None
    max_wait: float | None = None

    @classmethod
    def of_job(cls, job: Job) -> AttemptPolicy:
        """Return the policy of ``job``, as its provider runs it."""
        return cls(
            max_runtime=job.max_runtime,
            retries=job.retries,
            max_cost=job.max_cost,
            max_gpu_hours=job.max_gpu_hours,
            max_wait=job.max_wait,
        )

    def retries_here(self, history: History) -> bool:
        """Return whether another attempt may follow here, if neither the limits nor the same failure forbid it."""
        if history.state != "failed" or history.cancelled or not history.starts:
            return False
        # The next GPU of the list, or fewer nodes, is not a retry: the job has not had its machines yet.
        order = [(-nodes, gpu) for nodes, gpu in zip(history.nodes, history.choices, strict=True)]
        used = history.newest - sum(earlier < later for earlier, later in itertools.pairwise(order))
        # A refused first request is not a failed attempt: its submitter got an error.
        sent = history.newest > 0 or not history.refused
        more = sent and used < self.retries and history.category not in NOT_RETRIED
        return more or self._another_request(history)

    def is_bound(self, history: History) -> bool:
        """Return whether there were no machines, and `History.bound` forbids fewer nodes, so that a user must know."""
        unserved = history.state == "failed" and history.category in NO_MACHINES
        return unserved and bool(history.bound) and history.starts and not history.cancelled

    def moves(self, history: History) -> bool:
        """Return whether the run may continue in another region or provider."""
        unserved = history.state == "failed" and history.category in NO_MACHINES
        return unserved and history.may_leave and not history.cancelled

    def decide(
        self, history: History, *, ending: Ending, before: Ending | None = None, used: Usage
    ) -> Next | Move | Stop:
        """Return what follows the newest attempt, which ended as ``ending``; the one before ended as ``before``."""
        moves, reason = self.moves(history), ""
        # If no other request is left, another attempt here would request unavailable machines again.
        if self.retries_here(history) and (self._another_request(history) or not moves):
            reason = self._forbids(history, ending, before, used)
            if not reason:
                choice = (history.next_gpu or 0) if history.category in NO_MACHINES else None
                nodes = next_nodes(history)
                return Next(number=history.newest + 1, choice=choice, nodes=nodes, limits=self._rest(used))
        elif self.is_bound(history):
            reason = history.bound
        return Move(reason=reason) if moves else Stop(category=history.category, reason=reason)

    def decide_wait(self, waited: float) -> Stop | Wait:
        """Return whether an attempt that has waited ``waited`` seconds for machines ends now."""
        if self.max_wait is None:
            return Wait()
        if waited <= self.max_wait:
            return Wait(seconds=self.max_wait - waited)
        return Stop(category="capacity", reason=f"no machines within max_wait ({duration(self.max_wait)})")

    def _another_request(self, history: History) -> bool:
        """Return whether there were no machines, and there may be for the next GPU of the list or for fewer nodes."""
        unserved = history.category in NO_MACHINES
        return unserved and (history.next_gpu is not None or next_nodes(history) < history.nodes[-1])

    def _forbids(self, history: History, ending: Ending, before: Ending | None, used: Usage) -> str:
        """Return why no attempt may follow here; empty if it may."""
        if history.category not in NO_MACHINES and ending.repeats(before):
            return "the same failure twice with no new checkpoint between"
        if self.max_runtime - used.seconds < 1:
            return "the time limit is used up"
        for name, most, spent in self._budgets(used):
            if spent is None:
                return f"the use so far is unknown, so the rest of {name} cannot be computed"
            if spent >= most:
                return f"{name} is used up"
        return ""

    def _rest(self, used: Usage) -> dict[str, Any]:
        """Return the rest of the limits as fields of a job."""
        rest = {name: most - (spent or 0.0) for name, most, spent in self._budgets(used)}
        return {"max_runtime": int(self.max_runtime - used.seconds), **rest}

    def _budgets(self, used: Usage) -> list[tuple[str, float, float | None]]:
        known = (("max_cost", self.max_cost, used.usd), ("max_gpu_hours", self.max_gpu_hours, used.gpu_hours))
        return [(name, most, spent) for name, most, spent in known if most is not None]


def next_nodes(history: History) -> int:
    """Return the number of nodes of the next attempt.

    An attempt without machines is followed by the next smaller number, once no GPU of the list is left. Any other
    attempt, and one for the smallest number, is followed by the most.
    """
    most, last = history.node_counts[0], history.nodes[-1]
    if history.category not in NO_MACHINES:
        return most
    if history.next_gpu is not None:
        return last
    return next((count for count in history.node_counts if count < last), most)


# ------------------------------------------------------------------------------------------------------- facts, as read


def exception_of(category: str, reason: str, failure: Record | None) -> str:
    """Return a text that is the same for the same failure of the script, on any rank and any machine.

    ``failure`` is that of a result or an exit record. Empty if the end says nothing of the script: a preemption, a kill
    from outside, a lost node, a bad machine.
    """
    if category == "preempted" or was_lost(failure or None) or (failure or {}).get("machine"):
        return ""
    if not failure:
        return reason
    exception, code = failure["exception"], failure["process_exit_code"]
    if exception:  # each attempt may have the code in another folder
        file = str(failure.get("file") or "").replace("\\", "/").rpartition("/")[2]
        return f"{exception} ({file}:{failure.get('line')})" if file else str(exception)
    if code in (None, -KILLED) and category != "oom":
        return ""
    # The reason may quote a line of the script, which differs each time.
    return f"exit code {code}" if code else reason


def had_no_machines(result: Record) -> bool:
    """Return whether every attempt of a run ended for lack of machines before it began, by the run's result alone."""
    attempts = result.get("attempts") or ()
    unserved = {result.get("category"), *(row.get("category") for row in attempts)} <= NO_MACHINES
    return unserved and not result.get("checkpoint") and not any(row.get("started") for row in attempts)


def usage_of(result: Record, now: float) -> Usage:
    """Return the use so far by a run's result, at ``now`` (Unix seconds)."""
    spans = [(unix_time(row.get("started")), unix_time(row.get("ended"))) for row in result["attempts"]]
    seconds = seconds_of(spans, now)
    if not result["attempts"] and not result["native_id"]:  # every request was refused
        return Usage(seconds=seconds)
    return Usage(seconds=seconds, usd=result["cost"]["estimate_usd"], gpu_hours=result["cost"]["gpu_hours"])
