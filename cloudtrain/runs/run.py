"""The handle of a run, made from the URL of its run folder: status, logs, wait, pull, cancel and the result.

It reads the platform's status and the exit records of nodes in ``live/exit`` (which rank failed first, and why). Once
the run is final, ``result.json`` decides.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

from .._version import __version__
from ..errors import (
    AuthError,
    CloudtrainError,
    DigestError,
    LostContactError,
    NotFoundError,
    SpecError,
    StorageError,
    UnsupportedError,
)
from ..job.fields import path_of
from ..job.job import Job
from ..job.run_id import check_run_id
from ..provider_api.node import attempt_key
from ..provider_api.protocol import FINAL, AttemptInfo, Provider, Request, Shell, Status, extras_of
from ..runtime.checkpoint_model import Checkpoint
from ..settings.settings import NO_SETTINGS, Settings, StoreCredentials, store_elsewhere
from ..storage.files import Progress
from ..storage.local_disk import local_path
from ..storage.timings import CLIENT_TIMINGS
from ..store.store import Staged, Store, StoreClock, cancel_record, next_of, split_ref
from ..validate import check_functions, did_you_mean, parse_seconds, parse_since, texts_of, whole_number
from . import handover, outcome
from .attempts import NO_MACHINES, AttemptPolicy
from .cost import cost_of, seconds_of
from .log_order import Line
from .log_sources import Contact, Tail, last_lines, patiently, written_since
from .machines import bad_machine_rows
from .max_wait import MaxWait
from .metrics import MetricsReader
from .pull_kinds import PULL_KINDS
from .summary import columns, nodes_text, run_rows, table_html

if TYPE_CHECKING:
    from .pull import PullReport

INTERNAL = ("store", "staged", "provider", "waiting")
"""Attributes of a Run that `dir` leaves out."""
_NEXT_CALLS = {"pending": "run.wait()", "running": "run.wait()", "succeeded": 'run.pull("results")'}
T = TypeVar("T")
Record = Mapping[str, Any]
Result = dict[str, Any]


@runtime_checkable
class AttemptStarter(Protocol):
    """The further attempts that a waiting client starts."""

    def __call__(self, result: Result) -> bool:
        """Start another attempt after a failed one with this result. Return False if none should follow."""

    def begin(self) -> None:
        """Start the run in the place to which a client has moved it."""

    def resend(self, attempt: int, now: float) -> None:
        """Send the recorded attempt of a client that died. ``now`` is in seconds of the caller's clock."""


@runtime_checkable
class StatusListener(Protocol):
    """A listener to statuses that may ask for every look at the run, also those without a change."""

    every: bool

    def __call__(self, status: Status) -> None:
        """Take a status."""


#: Called with the result of a failed attempt, returns whether another one has begun. An `AttemptStarter` does more.
Retrier = Callable[[Result], bool]


@dataclass
class _Known:
    """The facts about a run in one place that this client has learnt."""

    natives: dict[int, str] = field(default_factory=dict)
    unrecorded: dict[int, str] = field(default_factory=dict)  # the jobs among them whose record could not be written
    refused: set[int] = field(default_factory=set)  # refused attempts that another one has followed
    unsent: int | None = None  # the newest attempt, if it was last seen recorded but not submitted
    is_arriving: bool = False  # if the request of a cancelled run was cut off, and may still become a job
    has_looked: bool = False  # if this client has looked for the job of such a request for `ClientTimings.arrival`
    stopped: set[str] = field(default_factory=set)  # jobs that were found after a cancel, and were asked to stop
    clock: StoreClock | None = None
    max_wait: MaxWait | None = None
    over: dict[int, float] = field(default_factory=dict)  # when each attempt was first seen over
    retried: dict[int, bool] = field(default_factory=dict)  # for each attempt that is over, if another may follow
    began: dict[int, float] = field(default_factory=dict)  # start of each attempt, if the platform does not report it
    nodes: dict[int, int] = field(default_factory=dict)  # of each attempt, as asked for
    moving: dict[str, tuple[str, float]] = field(default_factory=dict)  # the leases of clients that move the run


class Run:
    """A handle of one run. You get it from `submit`, `attach` or `Estimator.fit`.

    Its methods work from any machine that can read the store. They raise `NotFoundError` if there is no such run.
    """

    # Making it reads nothing; ``provider`` is made from run.json when first needed. ``clock`` gives Unix seconds.
    # ``staged`` is what `submit` uploaded for it, None on a handle that was opened later.

    def __init__(
        self,
        *,
        store: Store,
        run_id: str,
        provider: Provider | None = None,
        clock: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
        staged: Staged | None = None,
        settings: Settings = NO_SETTINGS,
    ) -> None:
        self.store, self.run_id, self.staged, self._settings = store, run_id, staged, settings
        self._provider, self._clock, self._sleep = provider, clock, sleep
        self._ticks = time.monotonic if clock is time.time else clock  # of waits: a clock of the machine may step
        self._record: dict[str, Any] | None = None
        self._known = _Known()
        self._policy: Callable[[Run], Retrier] | None = None  # for `wait`, if its caller gives no ``retry``
        self._handed_over = False  # it came here from another place, so it is known to continue here

    def __repr__(self) -> str:
        return f"Run({self.url!r})"

    def __str__(self) -> str:
        return columns(self._summary())

    def _repr_html_(self) -> str:
        """Return the summary as a notebook shows it."""
        return table_html(self._summary())

    def __dir__(self) -> list[str]:
        """Return what a user needs; the rest is for cloudtrain itself."""
        return [name for name in super().__dir__() if not name.startswith("_") and name not in INTERNAL]

    def _summary(self) -> list[tuple[str, str]]:
        """Return the state of the run and the next call as rows. Asks the platform, and raises nothing."""
        try:
            result, wanted = self.result(), self._own_job.resources
        except CloudtrainError as exc:
            return [("run", self.run_id), ("state", f"unknown: {exc}"), ("url", self.url)]
        machines = " or ".join([*wanted.gpu] or filter(None, [wanted.instance_type]))
        nodes = nodes_text(wanted.node_counts) + (f" of {machines}" if machines else "")
        call = _NEXT_CALLS.get(result["state"], "run.logs(n=20)")
        return [*run_rows(result, self._clock()), ("job", f"{self.job.name}, {nodes}"), ("next", call)]

    @property
    def url(self) -> str:
        """The URL of the run folder, with which `attach` finds the run from any machine."""
        return f"{self.store.url}/runs/{self.run_id}"

    @property
    def record(self) -> dict[str, Any]:
        """The run's record, run.json, with the job, the provider, its settings and the code."""
        if self._record is None:
            self._record = self.store.run(self.run_id, needs=("provider", "settings", "job"))
        return self._record

    @property
    def job(self) -> Job:
        """The job that was submitted."""
        with self._other_version():
            return Job.from_dict(self.record["job"])

    @property
    def provider_name(self) -> str:
        """The name of the run's provider."""
        return str(self.record["provider"])

    @property
    def _own_job(self) -> Job:
        """The job as the run's provider runs it."""
        return self.job.at(self.provider_name)

    @property
    def provider(self) -> Provider:
        """The provider, with the settings of the submission."""
        if self._provider is None:
            with self._other_version():
                self._provider = self._settings.provider_of(self.record)
        return self._provider

    @contextlib.contextmanager
    def _other_version(self) -> Iterator[None]:
        """Begin the hint of a `SpecError` with the version that recorded the run, if it is another one."""
        try:
            yield
        except SpecError as exc:
            if (version := self.record.get("version", __version__)) != __version__:
                exc.hint = f"cloudtrain {version} recorded this run, and this is {__version__}\n{exc.hint}".rstrip()
                exc.__notes__ = [f"hint: {exc.hint}"]  # which a traceback shows
            raise

    def _check(self) -> None:
        """Raise `NotFoundError` if there is no such run."""
        _ = self.record

    def _follow_handover(self) -> bool:
        """Switch this handle to the run's newest place. Return True if it had moved.

        Also keeps the result of each place that was left, in case the client that left it has died.
        """
        moved = False
        while (following := handover.fallbacks_of(self)) and (noted := next_of(self.store, self.run_id)) is not None:
            left, record = self.store, following[0]
            self._provider = self._settings.provider_of(record)
            moving = self._settings.moving_of(record)
            self.store = Store(record["layout"]["store"], storage=self._provider.storage, moving=moving)
            self._record, self._known = None, _Known()
            self._handed_over = moved = True
            handover.close_left(left, self.store, self.run_id, noted["result"])
        return moved

    # ---------------------------------------------------------------------------------------------------------- status

    def status(self) -> Status:
        """Return the platform's current status of the run; pending while a waiting client may soon retry it.

        Raises `LostContactError` if the platform does not answer, and the provider's other errors.
        """
        self._follow_handover()
        return self._between(*self._current_status())

    def checkpoint(self) -> Checkpoint | None:
        """Return the newest complete checkpoint, or None."""
        return self.store.newest_checkpoint(self.run_id)

    def result(self) -> Result:
        """Return the object that ``cloudtrain status --json`` prints: state, reason, attempts, checkpoint, cost.

        After the end of the run, this object is ``result.json`` of the run folder, and no call asks the platform again.
        The run is pending while a waiting client may soon retry it.
        """
        self._follow_handover()
        if (stored := self._stored()) is not None:
            return stored
        status, natives = self._platform_status()
        return self._conclude(self._between(status, natives), natives)

    def _current_result(self) -> Result:
        """Return `result` for a client that begins the next attempt itself."""
        self._follow_handover()
        return self._stored() or self._conclude(*self._platform_status())

    def _stored(self) -> Result | None:
        """Return the result in result.json; None while there is none."""
        stored = self.store.result(self.run_id)
        return None if stored is None else outcome.public_result(stored)

    def _current_status(self) -> tuple[Status, dict[int, str]]:
        """Return the status from result.json, else from the platform; and the native ids by attempt, oldest first."""
        result = self.store.result(self.run_id)
        if result is None:
            return self._platform_status()
        noted = {k: self.store.submitted(self.run_id, k) for k in self.store.attempts(self.run_id)}
        return outcome.status_of(result), {k: str(item["native_id"]) for k, item in noted.items() if item}

    def _platform_status(self) -> tuple[Status, dict[int, str]]:
        """Return the platform's status of the newest submitted attempt, and all native ids."""
        recorded, self._known.unsent = self.store.attempts(self.run_id), None
        natives = {k: native for k in recorded if (native := self._native(k)) is not None}
        last = max(recorded, default=0)
        refused = None if last in natives else self._refused_status(last)
        cancelled = last not in natives and self.store.cancelled(self.run_id)  # once: all below goes by one answer
        left = self._arrival_left(last) if cancelled and refused is None else None
        if (refused is not None or left == 0) and self._native(last) is not None:
            return self._platform_status()  # another client was sending it meanwhile
        self._known.is_arriving = bool(left)
        if not natives and left:
            return self._arriving(Status(state="pending"), last), natives
        if not natives:
            return self._unsubmitted(last, refused, cancelled=cancelled), natives
        newest = max(natives)
        status = self._with_expiry(newest, self._query(newest, natives[newest]))
        if status.final and newest < last and left:
            status = self._arriving(status, last)
        elif status.final and newest < last and not cancelled:
            if refused is not None:
                reason = f"attempt {last} was {refused.reason}"
                return replace(refused, finished=status.finished, reason=reason), natives
            self._known.unsent = last
            reason = f"attempt {last} is recorded but not submitted yet; the attempt before: {status.reason or 'ended'}"
            status = _pending(status, reason)
        return status, natives

    def _native(self, attempt: int) -> str | None:
        """Return the native id of an attempt; if its client crashed before recording it, ask the platform."""
        if attempt in self._known.refused:
            return None
        if attempt not in self._known.natives:
            submitted = self.store.submitted(self.run_id, attempt)
            native = str(submitted["native_id"]) if submitted else self._found(attempt)
            if native is None:
                return None
            self._known.natives[attempt] = native
        return self._known.natives[attempt]

    @property
    def _longest_arrival(self) -> float:
        """The seconds after which the platform finds the job of a request that was cut off, or has none."""
        return max(0.0 if self._known.has_looked else CLIENT_TIMINGS.arrival, extras_of(self.provider).arrival_s)

    def _arrival_left(self, attempt: int) -> float | None:
        """Return the seconds for which an attempt of a cancelled run may still become a job; None if no client was cut
        off while it sent it. Until then, each client that looks at the run stops such a job. A client that is still
        sending it renews its lease."""
        lease = handover.unanswered(self.store, self.run_id, attempt)
        if lease is None:
            return None
        clock = self._store_clock
        since = clock.age(cancel_record(self.run_id)) or 0.0
        if lease.modified:
            since = min(since, clock.since(lease.modified))
        return max(0.0, self._longest_arrival - since)

    @property
    def _store_clock(self) -> StoreClock:
        if self._known.clock is None:
            self._known.clock = StoreClock(self.store, self.run_id, now=self._clock, ticks=self._ticks)
        return self._known.clock

    def _arriving(self, status: Status, attempt: int) -> Status:
        within = f"within {self._longest_arrival:.0f} s of the cancel or of its client's end"
        return _pending(status, f"attempt {attempt} has no answer yet; the platform may still start it {within}")

    def _arrival(self, attempt: int) -> str | None:
        """Return the native id of an attempt that a client was sending when it was cut off, if the request becomes a
        job in the moment after a cancel."""
        store, arrival, native = self.store, CLIENT_TIMINGS.arrival, None
        if (since := self._store_clock.age(cancel_record(self.run_id))) is None:
            return None
        until = self._ticks() + arrival - max(0.0, since)
        while native is None and self._ticks() < until and handover.cut_off(store, self.run_id, attempt):
            self._sleep(0.5)
            native = self._native(attempt)
            self._known.has_looked = True
        return native

    def _found(self, attempt: int) -> str | None:
        request = self.store.attempt_request(self.run_id, attempt)
        try:
            native = self._patiently(lambda: self.provider.find(request)) if request is not None else None
        except (AuthError, SpecError):  # a workspace that does not exist has no job: the request was refused for that
            refused = self.store.refused(self.run_id, attempt)
            if refused is None or refused["category"] not in ("auth", "spec"):
                raise
            native = None
        if native is not None:
            if self.store.cancelled(self.run_id):  # before it is recorded: then no client looks for it
                with contextlib.suppress(NotFoundError):
                    self._stop(native)
            self._known.unrecorded[attempt] = native
            with contextlib.suppress(AuthError, StorageError):  # a client that may only read
                self._record_found()
        elif self.store.refused(self.run_id, attempt) and self.store.attempt_request(self.run_id, attempt + 1):
            self._known.refused.add(attempt)
        return native

    def _record_found(self) -> None:
        for attempt, native in list(self._known.unrecorded.items()):
            self.store.write_submitted(self.run_id, attempt, native)
            del self._known.unrecorded[attempt]

    def _stop(self, native: str) -> None:
        self._patiently(partial(self.provider.cancel, native))
        self._known.stopped.add(native)

    def _stop_cancelled(self, status: Status, natives: Mapping[int, str]) -> None:
        """Stop the job of a cancelled run once more: the client that sent or cancelled it may have died before that."""
        if status.final or not natives or (newest := natives[max(natives)]) in self._known.stopped:
            return
        if self.store.cancelled(self.run_id):
            with contextlib.suppress(CloudtrainError):  # a client that may only read; the next look tries again
                self.provider.cancel(newest)
                self._known.stopped.add(newest)

    def _patiently(self, call: Callable[[], T]) -> T:
        return patiently(call, clock=self._ticks, sleep=self._sleep)

    def _refused_status(self, attempt: int) -> Status | None:
        """Return the status of a refused attempt, else None: it is over, because no client sends it any more. The
        platform must be asked afterwards: a job found then was accepted nevertheless."""
        refused = self.store.refused(self.run_id, attempt)
        if refused is None:
            return None
        return Status(state="failed", category=refused["category"], reason=f"refused: {refused['reason']}")

    def _unsubmitted(self, last: int, refused: Status | None, *, cancelled: bool) -> Status:
        self._check()
        if cancelled:
            return Status(state="cancelled", category="cancelled", reason="cancelled before it was submitted")
        if refused is not None:
            return refused
        if (last or self._handed_over) and self.provider.retried_by != "supervisor":
            self._known.unsent = last  # a waiting client sends it
        reason = f"recorded but never submitted; submit the same job again with --run-id {self.run_id}, or cancel it"
        return Status(state="pending", reason=reason)

    def _query(self, attempt: int, native: str) -> Status:
        """Return the provider's status; if it no longer knows the job, one made of the nodes' records."""
        try:
            return self.provider.status(native)
        except NotFoundError:
            records = outcome.records_within(attempt, self.store.exits(self.run_id))
            root = outcome.root_record(outcome.newest_records(records))
            if root is None or not root.get("decided"):
                raise
            state = "succeeded" if root["outcome"] == "succeeded" else "failed"
            return Status(state=state, native="gone", reason="the platform no longer knows the job")

    def _with_expiry(self, attempt: int, status: Status, exits: Sequence[Record] | None = None) -> Status:
        """Return the platform's status of an attempt, as expired if a client stopped it for lack of machines."""
        cancelled = status.state == "cancelled" and self.store.cancelled(self.run_id)
        by_us = status.state == "cancelled" and not cancelled
        expired = self.store.expired(self.run_id, attempt) if by_us else None
        if status.limit_s is not None and status.state != "pending":
            status = self._with_start(attempt, status, exits, stopped=cancelled or expired is not None)
        return outcome.without_machines(status, str(expired["reason"])) if expired else status

    def _with_start(self, attempt: int, status: Status, exits: Sequence[Record] | None, *, stopped: bool) -> Status:
        """Return ``status`` with the time at which the attempt began to run, and as a timeout if it was one.

        The nodes' records have the start. Without one, a client's first sight of the running attempt counts, by the
        platform's clock if it has times. That client records it, unless it may only read.
        """
        store, run_id, sight = self.store, self.run_id, status.started
        if not status.final and attempt in self._known.began:
            return replace(status, started=self._known.began[attempt])
        starts = store.starts(run_id)
        exits = (store.exits(run_id) if exits is None else exits) if status.final else ()
        began = outcome.began_at(attempt, starts, exits)
        if began is not None:
            self._known.began[attempt] = began
        elif status.final:
            began = store.seen_running(run_id, attempt)
        else:
            began = self._clock() if sight is None else sight
            with contextlib.suppress(AuthError, StorageError):
                began = store.runs_since(run_id, attempt, began)
        ran = 0.0
        if status.final:
            rows = outcome.attempts_of({"": replace(status, started=began)}, {attempt: ""}, exits, starts)
            spans = [(row.started, row.ended) for row in rows if attempt_key(row.number)[:1] == (attempt,)]
            ran = seconds_of(spans, status.finished or self._clock())
        return outcome.with_start(status, began, ran=ran, stopped=stopped)

    def _expire(self, status: Status, natives: Mapping[int, str]) -> str:
        """Cancel an attempt that waits beyond ``max_wait`` for machines, if no platform does; return the reason."""
        if self.provider.max_wait_by != "client" or not natives:
            return ""
        if self._known.max_wait is None:
            policy = AttemptPolicy.of_job(self._own_job)
            self._known.max_wait = MaxWait(store=self.store, run_id=self.run_id, policy=policy, clock=self._store_clock)
        if reason := self._known.max_wait.ends(max(natives), status):
            with contextlib.suppress(NotFoundError):
                self._patiently(partial(self.provider.cancel, natives[max(natives)]))
        return reason

    # ------------------------------------------------------------------------------------------------------ the result

    def _conclude(self, status: Status, natives: Mapping[int, str]) -> Result:
        """Return the result of ``status`` and the exit records, and keep it if nothing can follow it."""
        result = self._compute(status, natives)
        while result["state"] in FINAL and not handover.may_continue(self, result):
            if not self._is_late(result):
                return self._keep(result)
            result = self._compute(*self._platform_status())
        return result

    def _is_late(self, result: Result) -> bool:
        """Return whether another client has meanwhile followed up the attempt of ``result``."""
        newest = self.store.newest_attempt(self.run_id)
        if not self.store.cancelled(self.run_id):
            return handover.newer_attempt_exists(self.store, self.run_id, newest, result)
        # An attempt recorded but unsent before a cancel is never sent.
        return (native := self._native(newest)) is not None and native != result["native_id"]

    def _compute(self, status: Status, natives: Mapping[int, str]) -> Result:
        exits = self.store.exits(self.run_id)
        newest = natives[max(natives)] if natives else None
        last = {native: k for k, native in natives.items()}
        statuses = {
            native: status if native == newest else self._old_status(k, native, exits) for native, k in last.items()
        }
        starts = self.store.starts(self.run_id)
        known = outcome.attempts_of(statuses, natives, exits, starts)
        attempts = [replace(info, nodes=self._nodes_of(info.number)) for info in known]
        verdict = outcome.verdict_of(status, outcome.records_of(attempts[-1], exits, starts) if attempts else ())
        refusals, reason = handover.refusals_of(self, natives), verdict.reason
        rows = [outcome.attempt_row(info) for info in attempts]
        bad = bad_machine_rows(self.provider, rows)
        if not status.final and (since := self.store.cancelled_since(self.run_id)) is not None:
            reason = "; ".join(filter(None, [f"{outcome.CANCELLING} {outcome.iso_time(since)}", reason]))
        if status.state == "running":
            reason = "; ".join(filter(None, [reason, self.waiting()]))
        return {
            "run": self.url,
            "run_id": self.run_id,
            "provider": self.provider_name,
            "native_id": newest,
            "state": verdict.state,
            "category": verdict.category or None,
            "exit_code": verdict.exit_code,
            "reason": reason,
            "failure": verdict.failure,
            "attempts": rows,
            "checkpoint": self._checkpoint_row(final=status.final),
            "cost": self._cost(statuses, natives, attempts),
            **({"refusals": refusals} if refusals else {}),
            **({"bad_machines": bad} if bad else {}),
        }

    def _nodes_of(self, attempt: str) -> int:
        """Return the number of nodes that attempt ``k.r`` asked for, by its record; without one, the job's."""
        wanted, k = self._own_job.resources, (attempt_key(attempt) or (0,))[0]
        if not wanted.min_instance_count:
            return wanted.instance_count
        if k not in self._known.nodes:
            self._known.nodes[k] = handover.nodes_of(self.store.attempt_request(self.run_id, k), wanted)
        return self._known.nodes[k]

    def _cost(
        self, statuses: Mapping[str, Status], natives: Mapping[int, str], attempts: Sequence[AttemptInfo]
    ) -> dict[str, Any]:
        def request_of(native: str) -> Request | None:
            first = min(k for k, known in natives.items() if known == native)
            return self.store.attempt_request(self.run_id, first)

        return cost_of(self._own_job, self.provider, statuses, attempts, request_of, self._clock())

    def _old_status(self, attempt: int, native: str, exits: Sequence[Record]) -> Status:
        """Return an earlier attempt's status; a platform that forgot it or does not answer is not an error here."""
        try:
            return self._with_expiry(attempt, self._patiently(lambda: self.provider.status(native)), exits)
        except CloudtrainError:
            return Status(state="failed")

    def waiting(self) -> str:
        """Return the checkpoints that wait to be copied to the store, and why: ``2 checkpoints wait: No space left …``.

        Empty if none waits, or the provider cannot tell: only one with its nodes' logs on this machine can.
        """
        natives = self._known.natives
        reasons = extras_of(self.provider).stuck(natives[max(natives)]) if natives else {}
        if not reasons:
            return ""
        there = {item.name for item in self.store.checkpoints(self.run_id)}
        left = [name for name in reasons if name not in there]
        words = f"{len(left)} checkpoint{'s wait' if len(left) > 1 else ' waits'}"
        place = local_path(self.store.url) or self.store.url
        return f"{words}: {reasons[left[-1]]} on {place}" if left else ""

    def _checkpoint_row(self, *, final: bool) -> dict[str, Any] | None:
        newest = self.checkpoint()
        if newest is None:
            return None
        committed = newest.committed
        row = {"name": newest.name, "step": newest.step, "committed": outcome.iso_time(committed)}
        return row if final else {**row, "age_s": round(self._clock() - committed, 1)}

    def _kept(self, result: Result) -> Result:
        """Return ``result`` as result.json has it."""
        return {**result, "name": self.job.name, "created": self.record.get("created")}

    def _keep(self, result: Result) -> Result:
        self._record_found()  # after a run's end, no client looks for its jobs
        stored = self.store.write_result(self.run_id, self._kept(result))
        if budget := self.record.get("budget"):
            from .budget import open_budget

            with contextlib.suppress(AuthError, StorageError):  # the next run that needs room does it
                open_budget(self.store, budget).settle(self.run_id)
        return outcome.public_result(stored)

    # ------------------------------------------------------------------------------------------ logs, metrics, waiting

    def metrics(self) -> list[dict[str, Any]]:
        """Return the rows of the script's metrics file, with all attempts as one history.

        Each step occurs once: from its first step on, an attempt replaces the rows of earlier attempts.
        """
        self._check()
        self._follow_handover()
        return MetricsReader(self.store, self.run_id).history()

    def report(self, path: str | os.PathLike[str] = ".") -> Path:
        """Write one HTML page about the run and return its path. The page opens without a network.

        ``path`` is a file or a folder. In a folder, the file is ``<run id>.html``. Raises `SpecError` if there is no
        such folder.
        """
        # Imported by name: the page stands above the run that it shows, and only this method loads it.
        page: Path = import_module("cloudtrain.report.report").write(self, path_of(path, "path"))[0]
        return page

    def logs(
        self,
        *,
        follow: bool = False,
        n: int | None = None,
        since: str | timedelta | datetime | None = None,
        node: int | str | None = None,
        rank: int | str | None = None,
        times: bool = True,
        poll: float | None = None,
        patience: float = CLIENT_TIMINGS.pull_silence,
    ) -> Iterator[Line]:
        """Yield the log lines of all nodes. Each line comes once, in order for each node.

        ``follow``
            continue until the run has ended. ``n`` then counts the lines that exist at the start.
        ``n``
            yield only the last ``n`` lines, by their times.
        ``since``
            yield lines of at most this age (``"10m"``, a timedelta), or since a time (ISO text or datetime, in UTC).
        ``node``, ``rank``
            yield lines of this node, or of this global rank.
        ``times``
            if the platform's log has no times, take `Line.time` from the nodes' own copy of the log.
        ``poll``
            longest pause between two calls to the platform, in seconds (default: the provider's).
        ``patience``
            seconds without an answer of the platform. Then yield the nodes' own copy and raise `LostContactError`.
            Without ``follow``, the first failure is enough.

        Raises `SpecError` for an invalid time or number of lines, and `NotFoundError` for a node, rank or run that does
        not exist.
        """
        count = None if n is None else whole_number(n, "n", least=0, most=sys.maxsize)
        moment = None if since is None else parse_since(since, self._clock(), field="since")
        poll = None if poll is None else parse_seconds(poll, field="poll")
        patience = parse_seconds(patience, field="patience")
        self._follow_handover()
        node, rank = self._checked_part("node", node), self._checked_part("rank", rank)
        found = self._lines(self._tail(patience), follow, times or since is not None or bool(n), poll, patience)
        lines = (
            line
            for line in found
            if line is None or ((node is None or str(line.node) == str(node)) and (rank is None or line.rank == rank))
        )
        return last_lines(lines if moment is None else written_since(lines, moment), count)

    def _checked_part(self, kind: str, number: int | str | None, nodes: int | None = None) -> int | None:
        """Return the number. Raises `NotFoundError` if no node or rank of the run, or of its ``nodes``, has it."""
        if number is None:
            return None
        number = whole_number(int(number) if str(number).isdecimal() else number, kind, least=-sys.maxsize)
        wanted = self._own_job
        count = nodes or wanted.resources.instance_count
        if kind == "rank" and wanted.launcher == "torchrun":
            count *= max(wanted.resources.processes(i) for i in range(max(1, len(wanted.resources.gpu))))
        if not 0 <= number < count:
            there = f"{kind}s are 0 to {count - 1}" if count > 1 else f"the only {kind} is 0"
            raise NotFoundError(f"no {kind} {number}; {there}", hint=f"use --{kind} 0, or leave it out")
        return number

    def _lines(
        self, tail: Tail, follow: bool, times: bool, poll: float | None, patience: float
    ) -> Iterator[Line | None]:
        """Yield log lines; None once the existing ones have been given, if more may follow."""
        over = looked = False
        if follow:
            for event in self._events(tail=tail, poll=poll, patience=patience, deadline=None):
                if isinstance(event, Line):
                    yield tail.dated(event, over=over) if times else event
                    continue
                over = event.final
                if looked and not tail.more:
                    yield None
                looked = True
            if self._follow_handover():  # another place has other lines
                yield from self._lines(self._tail(patience), follow, times, poll, patience)
            return
        self._check()
        natives: dict[int, str] = {}
        try:
            status, natives = self._current_status()
            over = status.final
        except LostContactError as exc:
            yield from tail.give_up(exc)
        for line in tail.end(natives):
            yield tail.dated(line, over=over) if times else line

    def reconcile(self, *, retry: Retrier | None = None, say: Callable[[str], None] = lambda _: None) -> Result:
        """Do the work of `wait` once, and return the current result.

        This stops an attempt that was cancelled or has waited longer than ``max_wait``. It calls ``retry`` as `wait`
        does, and stores the result of a finished run. Any number of clients may call it at once. ``say`` is called with
        a line of text about each action. Raises the errors of `status`.
        """
        check_functions(retry=retry, say=say)
        self._follow_handover()
        if (stored := self._stored()) is not None:
            return stored
        if retry is None and self._policy is not None:
            retry = self._policy(self)
        status, natives = self._platform_status()
        if not status.final and self.store.cancelled(self.run_id):
            self.cancel()  # the cancelling client may have died before it asked
            status, natives = self._platform_status()
            say(status.reason if self._known.is_arriving else "asked the platform again to stop it")
        elif reason := self._expire(status, natives):
            say(f"stopping attempt {max(natives)}: {reason}")
            status, natives = self._platform_status()
        result = self._settled(self._conclude(status, natives), retry)
        while result is None:
            result = self._settled(self._current_result(), retry)
        if self.store.result(self.run_id) is not None:
            say(f"closed: {result['state']}")
        return result

    def _settled(self, result: Result, retry: Retrier | None) -> Result | None:
        """Return the result, and keep it if no attempt will follow; None if another attempt has begun."""
        if result["state"] not in FINAL:
            return result
        if self._follow_handover():  # a client has moved it to another place
            if isinstance(retry, AttemptStarter):
                retry.begin()
            return None
        if retry is None:
            return result
        if (stored := self._stored()) is not None:  # the client that kept it found that nothing follows
            return stored
        if (handover.may_continue(self, result) and retry(result)) or self._is_late(result):
            return None
        return self._keep(result)

    def wait(
        self,
        *,
        timeout: float | str | timedelta | None = None,
        on_line: Callable[[Line], None] | None = None,
        on_status: Callable[[Status], None] | None = None,
        retry: Retrier | None = None,
        poll: float | None = None,
        patience: float = CLIENT_TIMINGS.pull_silence,
    ) -> Result:
        """Wait until the run has ended. Return its result, the object of ``result.json``.

        ``timeout``
            raise `LostContactError` after this time, in seconds or as text (``"2h"``). The run continues, as it does
            after Ctrl-C.
        ``on_line``
            called with each log line, a `Line`.
        ``on_status``
            called with the `Status` after each change.
        ``retry``
            called with the result of a failed attempt, unless the platform itself retries. Return True if you started
            another attempt. By default, cloudtrain starts the attempts that the job allows.
        ``poll``
            longest pause between two calls to the platform, in seconds (default: the provider's).
        ``patience``
            raise `LostContactError` if the platform has not answered for so many seconds.

        On a platform without a limit for the wait for machines, this call stops an attempt after the job's
        ``max_wait``. A failed run raises nothing: look at ``result["state"]``.
        """
        check_functions(on_line=on_line, on_status=on_status, retry=retry)
        if retry is None and self._policy is not None:
            retry = self._policy(self)
        every_look = isinstance(on_status, StatusListener) and on_status.every
        poll = None if poll is None else parse_seconds(poll, field="poll")
        patience = parse_seconds(patience, field="patience")
        deadline = None if timeout is None else self._ticks() + parse_seconds(timeout, field="timeout")
        self._follow_handover()
        tail: Tail | None = None
        while True:
            if on_line is not None and (tail is None or tail.store is not self.store):  # another place has other lines
                tail = self._tail(patience)
            last: Status | None = None
            for event in self._events(
                tail=tail, poll=poll, patience=patience, deadline=deadline, acts=True, retry=retry
            ):
                if isinstance(event, Status):
                    if on_status is not None and (event != last or every_look):
                        on_status(event)
                    last = event
                elif on_line is not None:
                    on_line(event)
            result = self._settled(self._current_result() if last is None else self._ended(last), retry)
            if result is not None and result["state"] in FINAL:
                return result

    def _tail(self, patience: float) -> Tail:
        return Tail(
            store=self.store,
            run_id=self.run_id,
            provider=lambda: self.provider,
            clock=self._ticks,
            now=self._clock,
            patience=patience,
        )

    def _ended(self, status: Status) -> Result:
        return self._stored() or self._conclude(status, dict(sorted(self._known.natives.items())))

    def _events(
        self,
        *,
        tail: Tail | None,
        poll: float | None,
        patience: float,
        deadline: float | None,
        acts: bool = False,
        retry: Retrier | None = None,
    ) -> Iterator[Status | Line]:
        """Yield statuses and lines until the run has ended; the final status comes before the last lines.

        ``acts``: also stop an attempt that waits too long for machines, and send a dead client's recorded attempt by
        ``retry``. Without it, an attempt that may be followed is not over.
        """
        longest = self.provider.max_poll_s if poll is None else poll
        contact = Contact(clock=self._ticks, patience=patience)
        first = min(max(CLIENT_TIMINGS.first_poll, self.provider.min_poll_s), longest)
        due, every, pause = self._ticks(), first, first
        status, natives = Status(state="pending"), dict[int, str]()
        starter = retry if isinstance(retry, AttemptStarter) else None
        while True:
            if self._ticks() >= due:
                with self._listening(contact):
                    found, natives = self._current_status()
                    self._stop_cancelled(found, natives)
                    unsent = self._known.unsent  # sending, or a listener that looks at the run, forgets it
                    status = found if acts else self._between(found, natives)
                    if acts:
                        self._expire(status, natives)
                        if self._known.unsent is not None and not status.final and starter is not None:
                            starter.resend(self._known.unsent, self._ticks())
                    yield status
                    sends = starter is not None if unsent is not None else natives or self._known.is_arriving
                    if not status.final and not sends:
                        raise LostContactError(status.reason)  # no client may ever send it
                every = min(longest, every * 1.25)
                due = self._ticks() + every
            if status.final:
                yield from tail.end(natives) if tail is not None else ()
                return
            if tail is not None:
                with self._listening(contact, resets=False):
                    yield from tail.round(natives)
            if contact.lost:
                with contextlib.suppress(StorageError):  # the store itself may not answer
                    yield from tail.rest() if tail is not None else ()
                kind = LostContactError if isinstance(contact.error, LostContactError) else StorageError
                raise kind(f"{contact.error} (for {patience:.0f} s now; the submitted run continues: {self.url})")
            if deadline is not None and self._ticks() >= deadline:
                raise LostContactError(f"run {self.run_id} has not ended within the timeout; it continues: {self.url}")
            pause = first if tail is not None and tail.flowing else min(longest, pause * 2)
            wait = 0.0 if tail is not None and tail.more else pause if tail is not None else longest
            until = min(self._ticks() + wait, due, due if deadline is None else deadline)
            if (rest := until - self._ticks()) > 0:
                self._sleep(rest)

    def _between(self, status: Status, natives: Mapping[int, str]) -> Status:
        """Return ``status`` for a read-only client: pending while another client may soon begin the next attempt."""
        if not status.final or self.store.result(self.run_id) is not None:
            return status
        starts = handover.clients_retry(self, natives[max(natives)] if natives else None)
        places = handover.fallbacks_of(self)
        if not starts and not places:
            return status
        newest, now = self.store.newest_attempt(self.run_id), self._clock()
        since = self._known.over.get(newest) or self._end_of(newest, status, natives) or now
        since = self._known.over[newest] = min(since, now)
        late = now - since >= CLIENT_TIMINGS.next_attempt
        if late and not (places and handover.is_moving(self.store, self.run_id, self._known.moving, self._ticks())):
            return status
        if not self._may_be_followed(newest, status, natives):
            return status
        return _pending(status, f"attempt {newest} ended: {status.reason or status.native}; another attempt may follow")

    def _end_of(self, newest: int, status: Status, natives: Mapping[int, str]) -> float | None:
        """Return when the newest attempt ended or was refused; None if that is not known."""
        if newest not in natives:  # the status is of the one before
            return (self.store.refused(self.run_id, newest) or {}).get("time")
        records = [] if status.finished else outcome.records_within(newest, self.store.exits(self.run_id))
        return status.finished or max((record["ended"] for record in records), default=None)

    def _may_be_followed(self, newest: int, status: Status, natives: Mapping[int, str]) -> bool:
        """Return whether a waiting client may still retry it. The costly part is computed once an attempt."""
        if not self._own_job.retries and status.category not in NO_MACHINES:
            return False
        if newest not in self._known.retried:
            self._known.retried[newest] = handover.may_continue(self, self._compute(status, natives))
        return self._known.retried[newest] and not self.store.cancelled(self.run_id)

    @contextlib.contextmanager
    def _listening(self, contact: Contact, *, resets: bool = True) -> Iterator[None]:
        """Report an answer, or a transient error, to ``contact``; others are raised."""
        try:
            yield
        except LostContactError as exc:
            contact.heard(exc)
        except StorageError as exc:
            # A network failure silences the platform and a remote store alike; a local disk does not come back.
            if isinstance(exc, DigestError) or local_path(self.store.url) is not None:
                raise
            contact.heard(exc)
        else:
            if resets:
                contact.heard(None)

    # ------------------------------------------------------------------------------------------------- pull and cancel

    def pull(
        self,
        folder: str | os.PathLike[str],
        *,
        what: str | Iterable[str] = PULL_KINDS,
        follow: bool = False,
        on_pull: Callable[[PullReport], None] | None = None,
        progress: Progress | None = None,
    ) -> PullReport:
        """Copy the run's results into ``folder`` and check their digests. Skip files that are there already.

        ``what``
            some of ``checkpoints``, ``artifacts``, ``outputs``, ``logs`` and ``metrics`` (default: all five).
            ``checkpoints`` and ``checkpoints:all`` are the newest checkpoint of each name. A single checkpoint is
            ``checkpoints:latest``, ``checkpoints:best`` or ``checkpoints:step=N``.
        ``follow``
            copy new results repeatedly, until the run has ended.
        ``on_pull``
            called with a `PullReport` after each copy that brought something.
        ``progress``
            called with a file's key and a number of bytes, as they come.

        Raises `DigestError` for damaged content, `StorageError` for other failures of a disk or the store,
        `NotFoundError` for a missing checkpoint and `SpecError` for an unknown word in ``what``. With ``follow``, it
        also raises the errors of `logs`.
        """
        from .pull import pull  # most verbs bring nothing

        check_functions(on_pull=on_pull, progress=progress)
        place = path_of(folder, "folder")
        bring = partial(pull, run_id=self.run_id, folder=place, what=what, on_pull=on_pull, progress=progress)
        self._follow_handover()
        while True:
            along = self._statuses_until_final() if follow else None
            report = bring(self.store, along=along, clock=self._ticks)
            if not follow or not self._follow_handover():
                return report

    def shell(self, node: int | str = 0, command: Sequence[str] = (), *, tty: bool = False) -> Shell:
        """Return the way into a node: a command to run here, or the page of a shell. ``tty``: for a terminal.

        ``command`` is what runs there, in the environment of the node's first rank; default: a shell.

        Raises `SpecError` for a run that does not run now, or lets no shell in, and `UnsupportedError` for a platform
        without shells.
        """
        words = texts_of(command, "command", empty=True)
        self._follow_handover()
        status, natives = self._current_status()
        if status.final:
            hint = f"its files stay: cloudtrain pull {self.run_id}"
            raise SpecError(f"the run is over ({status.state}), and its nodes are gone", field="run", hint=hint)
        if status.state != "running" or not natives:
            hint = f"wait for its nodes: cloudtrain watch {self.run_id}"
            raise SpecError("the run has no nodes yet", field="run", hint=hint)
        newest = max(natives)
        number = self._checked_part("node", node, self._nodes_of(str(newest))) or 0
        request = self.store.attempt_request(self.run_id, newest)
        assert request is not None
        found = extras_of(self.provider).shell(request, natives[newest], number, words, tty=tty)
        if found is None:
            raise UnsupportedError(self.provider_name, "shell", "it has no way into a node")
        return found

    def _statuses_until_final(self) -> Iterator[Status]:
        """Yield statuses until the run has ended, and keep its result then, or leave that to the next client."""
        events = self._events(tail=None, poll=None, patience=CLIENT_TIMINGS.pull_silence, deadline=None)
        for last in (event for event in events if isinstance(event, Status)):
            yield last
        with contextlib.suppress(LostContactError, StorageError):
            self._ended(last)

    def cancel(self) -> None:
        """Ask the platform to stop the run, and forbid further attempts. This does not wait for the end.

        A finished run stays as it is, and a second call changes nothing. If the platform refuses to stop one attempt,
        this asks it to stop the others too, and then raises the first error.

        A request whose client was cut off may still become a job. Until that can no longer happen, the run is pending,
        and each look at the run stops such a job. A later call stops one that came even later.
        """
        self._check()
        self._follow_handover()
        store, run_id = self.store, self.run_id
        if self._is_over():
            unrecorded = [k for k in store.attempts(run_id) if store.submitted(run_id, k) is None]
            if not (store.cancelled(run_id) and any(handover.cut_off(store, run_id, k) for k in unrecorded)):
                return
        errors: list[CloudtrainError] = []
        unmarked: StorageError | None = None
        try:
            store.cancel(run_id)  # first of all: an attempt that starts from now on sees it
        except StorageError as exc:  # such as a full store
            unmarked = exc
        self._known.stopped.clear()
        for k in store.attempts(run_id):
            try:
                native = self._native(k) or self._arrival(k)
                if native is not None:
                    if native not in self._known.stopped:
                        self._stop(native)
                    if self.provider.retried_by == "supervisor":
                        unmarked = None  # a supervisor that is asked to stop starts no further attempt
            except NotFoundError:
                continue  # the platform does not know it, so it does not run
            except CloudtrainError as exc:
                errors.append(exc)
        if self._follow_handover():  # the client that moved the run may not have seen the cancel
            self.cancel()
        if unmarked is not None or errors:
            raise unmarked or errors[0]

    def _is_over(self) -> bool:
        """Return whether nothing is left to cancel; False if the platform does not answer."""
        if self.store.result(self.run_id) is not None:
            return True
        try:
            status, natives = self._platform_status()
            return status.final and not handover.may_continue(self, self._compute(status, natives))
        except CloudtrainError:
            return False


def _pending(status: Status, reason: str) -> Status:
    """Return ``status`` as pending: another attempt may follow, or the platform may still start one."""
    return replace(status, state="pending", reason=reason, category="", finished=None)


# ------------------------------------------------------------------------------------------------------- finding runs


def open_run(
    ref: str, *, store_url: str | None = None, cwd: Path | None = None, settings: Settings = NO_SETTINGS
) -> Run:
    """Return the run ``ref``: the URL or local path of a run folder, or an id in ``store_url`` (default: the setting).

    ``settings`` have this machine's identity. Raises `NotFoundError` with the nearest id if there is none.
    """
    where, run_id = split_ref(ref, "runs", store_url, settings)
    if not where:
        raise NotFoundError(f"{ref!r} is not the URL of a run folder, <store>/runs/<run id>", field="run")

    def read(caller: StoreCredentials) -> tuple[Run, StoreCredentials]:
        run = Run(store=Store(where, cwd=cwd, storage=caller, moving=settings.moving), run_id=run_id, settings=settings)
        try:
            check_run_id(run_id)
            run._check()
        except SpecError as exc:
            if not isinstance(exc, NotFoundError) and exc.field != "run_id":
                raise
            listed = f"to list the runs, run: cloudtrain list --store {run.store.url}"
            near = did_you_mean(run_id, run.store.runs()) or store_elsewhere(where, settings) or listed
            raise NotFoundError(f"no run {run_id!r} in {run.store.url}", field="run", hint=near) from None
        return run, caller

    run, asked = settings.let_in(where, read)
    with contextlib.suppress(CloudtrainError):  # files can be pulled without the provider too
        run._follow_handover()
        if local_path(run.store.url) is None and (own := asked.own(run.store.url, run.provider)) is not None:
            run.store = Store(run.store.url, storage=own, moving=settings.moving)
    return run
