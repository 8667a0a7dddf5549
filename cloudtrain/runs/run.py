"""The handle of a run: status, logs, wait, pull, cancel and the result, from nothing but the URL of its run folder.

What happened is read from three places: the platform (is it running, why did it stop it), the exit records that nodes
leave in ``live/exit`` (which rank failed first, of what) and, once the run is final, ``result.json``, which decides.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from ..errors import AuthError, CloudtrainError, DigestError, LostContactError, NotFoundError, SpecError, StorageError
from ..job.job import check_run_id
from ..provider_api import catalog
from ..provider_api.protocol import FINAL, AttemptInfo, Provider, Request, Status
from ..settings.settings import Caller, Settings
from ..storage.files import Progress
from ..storage.local_disk import local_path
from ..store.checkpoint import Checkpoint
from ..store.store import Staged, Store
from ..validate import did_you_mean, merge_metrics, parse_since, url_scheme, whole_number
from .cost import Account, cost_of, seconds_of
from .handover import NO_MACHINES, NOT_RETRIED, Moving, forget, in_flight, overtaken
from .log_order import Line, attempt_key
from .log_sources import Contact, Tail, newest, patiently, written_since
from .max_wait import MaxWait
from .outcome import (
    CANCELLING,
    attempt_row,
    attempts_of,
    began_at,
    iso_time,
    newest_of,
    records_of,
    root_record,
    shown,
    status_of,
    verdict_of,
    with_start,
    without_machines,
)
from .pull import PATIENCE, PULLED, PullReport, pull

__all__ = ["NEXT_SECONDS", "NOT_RETRIED", "NO_MACHINES", "NO_SETTINGS", "Run", "open_run", "overtaken"]

FIRST_POLL, NO_SETTINGS = 0.1, Settings()
NEXT_SECONDS = 120.0
"""How long whoever only looks waits for the attempt that another client may begin."""
T = TypeVar("T")
Record = Mapping[str, Any]
Result = dict[str, Any]


class Run(Moving):
    """A handle of one run, from `Estimator.fit` or `Estimator.attach`.

    Every method works from any machine that can read the store. Every method raises `NotFoundError` when there is no
    such run.
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
        self._natives: dict[int, str] = {}
        self._refused: set[int] = set()  # attempts that were, and that another one has followed
        self._unsent: int | None = None  # the newest attempt, when it was last seen recorded and not submitted
        self._max_wait: MaxWait | None = None
        self._over: dict[int, float] = {}  # by attempt, when it was first seen over
        self._retried: dict[int, bool] = {}  # by attempt that was over, whether another one may follow
        self._began: dict[int, float] = {}  # by attempt of a platform that does not tell when one began to run

    def __repr__(self) -> str:
        return f"Run({self.url!r})"

    @property
    def url(self) -> str:
        """URL of the run folder: enough to find the run again from any machine."""
        return f"{self.store.url}/runs/{self.run_id}"

    def _check(self) -> None:
        if not self.record:
            raise NotFoundError(f"no run at {self.url}", field="run")

    # --------------------------------------------------------------------------------------------------- how it stands

    def status(self) -> Status:
        """Return the platform's word on the run now.

        Raises what the provider raises, `LostContactError` when the platform does not answer.
        """
        self._lead()
        return self._current()[0]

    def checkpoint(self) -> Checkpoint | None:
        """Return the newest complete checkpoint; None when there is none."""
        return self.store.newest_checkpoint(self.run_id)

    def result(self) -> Result:
        """Return the object that ``cloudtrain status --json`` prints: state, reason, attempts, checkpoint, cost.

        Once the run is over it is stored as ``result.json``, and the platform is asked no more.
        """
        self._lead()
        stored = self.store.result(self.run_id)
        if stored is not None:
            return shown(stored)
        return self._conclude(*self._live())

    def _current(self) -> tuple[Status, dict[int, str]]:
        """result.json's word if there is one, else the platform's; and the native ids by attempt, oldest first."""
        result = self.store.result(self.run_id)
        if result is None:
            return self._live()
        noted = {k: self.store.submitted(self.run_id, k) for k in sorted(self.store.attempts(self.run_id))}
        return status_of(result), {k: str(item["native_id"]) for k, item in noted.items() if item}

    def _live(self) -> tuple[Status, dict[int, str]]:
        """The platform's word on the newest attempt that was submitted, and all native ids."""
        recorded, self._unsent = self.store.attempts(self.run_id), None
        natives = {k: native for k in sorted(recorded) if (native := self._native(k)) is not None}
        last = max(recorded, default=0)
        refused = None if last in natives else self._refused_status(last)
        if refused is not None and self._native(last) is not None:
            return self._live()  # another client was sending it as we looked
        if not natives:
            return self._unsubmitted(last, refused), natives
        newest = max(natives)
        status = self._told(newest, self._ask(newest, natives[newest]))
        if status.final and newest < last and not self.store.cancelled(self.run_id):
            if refused is not None:
                finished = status.finished if refused.final else None
                return replace(refused, finished=finished, reason=f"attempt {last} was {refused.reason}"), natives
            self._unsent = last
            reason = f"attempt {last} is recorded but not submitted yet; the last one: {status.reason or 'ended'}"
            status = replace(status, state="pending", reason=reason, category="", finished=None)
        return status, natives

    def _native(self, attempt: int) -> str | None:
        """The native id of an attempt; asks the platform when a crash came between submitting and noting it down."""
        if attempt in self._refused:
            return None
        if attempt not in self._natives:
            submitted = self.store.submitted(self.run_id, attempt)
            native = str(submitted["native_id"]) if submitted else self._found(attempt)
            if native is None:
                return None
            self._natives[attempt] = native
        return self._natives[attempt]

    def _found(self, attempt: int) -> str | None:
        request = self.store.attempt_request(self.run_id, attempt)
        native = self._patiently(lambda: self.provider.find(request)) if request is not None else None
        if native is not None:
            self.store.write_submitted(self.run_id, attempt, native)
        elif self.store.refused(self.run_id, attempt) and self.store.attempt_request(self.run_id, attempt + 1):
            self._refused.add(attempt)
        return native

    def _patiently(self, call: Callable[[], T]) -> T:
        return patiently(call, clock=self._ticks, sleep=self._sleep)

    def _refused_status(self, attempt: int) -> Status | None:
        """Return how an attempt stands that was refused, None of any other: it is over, unless a client may be sending
        it still. The platform must be asked after that: what is found there now was accepted all the same."""
        refused = self.store.refused(self.run_id, attempt)
        if refused is None:
            return None
        reason = f"refused: {refused['reason']}"
        if in_flight(self.store, self.run_id, attempt, clock=self._clock, sleep=self._sleep):
            return Status(state="pending", reason=f"{reason}; another client may be sending it")
        return Status(state="failed", category=refused["category"], reason=reason)

    def _unsubmitted(self, last: int, refused: Status | None) -> Status:
        self._check()
        if self.store.cancelled(self.run_id):
            return Status(state="cancelled", category="cancelled", reason="cancelled before it was submitted")
        if refused is not None:
            return refused
        if (last or self._led) and self.provider.retried_by != "supervisor":
            self._unsent = last  # whoever waits sends it
        reason = f"recorded but never submitted; submit the same job again with --run-id {self.run_id}, or cancel it"
        return Status(state="pending", reason=reason)

    def _ask(self, attempt: int, native: str) -> Status:
        """The provider's status; of a native job that it no longer knows, what the nodes left behind."""
        try:
            return self.provider.status(native)
        except NotFoundError:
            records = [r for r in self.store.exits(self.run_id) if attempt_key(str(r["attempt"]))[:1] == (attempt,)]
            root = root_record(newest_of(records))
            if root is None or not root.get("decided"):
                raise
            state = "succeeded" if root["outcome"] == "succeeded" else "failed"
            return Status(state=state, native="gone", reason="the platform no longer knows the job")

    def _told(self, attempt: int, status: Status, exits: Sequence[Record] | None = None) -> Status:
        """The platform's word on an attempt; of one that a client, and no user, stopped for want of machines, that."""
        cancelled = status.state == "cancelled" and self.store.cancelled(self.run_id)
        by_us = status.state == "cancelled" and not cancelled
        expired = self.store.expired(self.run_id, attempt) if by_us else None
        if status.limit_s is not None and status.state != "pending":
            status = self._with_start(attempt, status, exits, stopped=cancelled or expired is not None)
        return without_machines(status, str(expired["reason"])) if expired else status

    def _with_start(self, attempt: int, status: Status, exits: Sequence[Record] | None, *, stopped: bool) -> Status:
        """Return ``status`` with the moment at which the attempt began to run, and as a timeout if it was one.

        The nodes' records say when it began. Without one it is when a client first saw the attempt running, by the
        platform's clock where it tells a time; that client notes it, unless it may only read.
        """
        store, run_id, sight = self.store, self.run_id, status.started
        if not status.final and attempt in self._began:
            return replace(status, started=self._began[attempt])
        starts = store.starts(run_id)
        exits = (store.exits(run_id) if exits is None else exits) if status.final else ()
        began = began_at(attempt, starts, exits)
        if began is not None:
            self._began[attempt] = began
        elif status.final:
            began = store.seen_running(run_id, attempt)
        else:
            began = self._clock() if sight is None else sight
            with contextlib.suppress(AuthError, StorageError):
                began = store.runs_since(run_id, attempt, began)
        ran = 0.0
        if status.final:
            rows = attempts_of({"": replace(status, started=began)}, {attempt: ""}, exits, starts)
            spans = [(row.started, row.ended) for row in rows if attempt_key(row.number)[:1] == (attempt,)]
            ran = seconds_of(spans, status.finished or self._clock())
        return with_start(status, began, ran=ran, stopped=stopped)

    def _expire(self, status: Status, natives: Mapping[int, str]) -> str:
        """Cancel an attempt that waits for machines longer than ``max_wait``, where no platform does: why, or empty."""
        if self.provider.max_wait_by != "client" or not natives:
            return ""
        if self._max_wait is None:
            limit = self.job.at(self.provider_name).max_wait
            self._max_wait = MaxWait(store=self.store, run_id=self.run_id, limit=limit, clock=self._clock)
        if reason := self._max_wait.ends(max(natives), status):
            with contextlib.suppress(NotFoundError):
                self._patiently(partial(self.provider.cancel, natives[max(natives)]))
        return reason

    # ------------------------------------------------------------------------------------------------------ the result

    def _conclude(self, status: Status, natives: Mapping[int, str]) -> Result:
        """The result that ``status`` and the exit records make, kept if nothing can follow it."""
        result = self._compute(status, natives)
        while result["state"] in FINAL and not self._may_go_on(result):
            if not self._is_late(result):
                return self._keep(result)
            result = self._compute(*self._live())
        return result

    def _is_late(self, result: Result) -> bool:
        """Whether ``result`` is of an attempt that another client has followed up since whoever computed it looked."""
        if self.provider.retried_by != "client":
            return False
        newest = max(self.store.attempts(self.run_id), default=0)
        if not self.store.cancelled(self.run_id):
            return overtaken(self.store, self.run_id, newest, result)
        # What was recorded and not sent before a cancel is sent no more.
        return (native := self._native(newest)) is not None and native != result["native_id"]

    def _compute(self, status: Status, natives: Mapping[int, str]) -> Result:
        exits = self.store.exits(self.run_id)
        newest = natives[max(natives)] if natives else ""
        last = {native: k for k, native in natives.items()}
        said = {
            native: status if native == newest else self._old_status(k, native, exits) for native, k in last.items()
        }
        starts = self.store.starts(self.run_id)
        attempts = attempts_of(said, natives, exits, starts)
        verdict = verdict_of(status, records_of(attempts[-1], exits, starts) if attempts else ())
        refusals, reason = self._refusals(natives), verdict.reason
        if not status.final and (since := self.store.cancelled_since(self.run_id)) is not None:
            reason = "; ".join(filter(None, [f"{CANCELLING} {iso_time(since)}", reason]))
        if status.state == "running":
            reason = "; ".join(filter(None, [reason, self.waiting()]))
        return {
            "run": self.url,
            "run_id": self.run_id,
            "provider": self.provider_name,
            "native_id": natives[max(natives)] if natives else None,
            "state": verdict.state,
            "category": verdict.category or None,
            "exit_code": verdict.exit_code,
            "reason": reason,
            "failure": verdict.failure,
            "attempts": [attempt_row(info) for info in attempts],
            "checkpoint": self._checkpoint_row(final=status.final),
            "cost": self._cost(said, natives, attempts),
            **({"refusals": refusals} if refusals else {}),
        }

    def _cost(
        self, said: Mapping[str, Status], natives: Mapping[int, str], attempts: Sequence[AttemptInfo]
    ) -> dict[str, Any]:
        def request_of(native: str) -> Request | None:
            first = min(k for k, known in natives.items() if known == native)
            return self.store.attempt_request(self.run_id, first)

        settings, name = getattr(self.provider, "settings", None), self.provider_name
        prices, region = getattr(settings, "prices", None), catalog.region_of(settings)
        account = Account(job=self.job.at(name), provider=name, prices=prices, region=region)
        return cost_of(account, said, attempts, request_of, self._clock())

    def _old_status(self, attempt: int, native: str, exits: Sequence[Record]) -> Status:
        """Of an earlier attempt: history, so a platform that has forgotten it or does not answer is no error."""
        try:
            return self._told(attempt, self._patiently(lambda: self.provider.status(native)), exits)
        except CloudtrainError:
            return Status(state="failed")

    def waiting(self) -> str:
        """Return which checkpoints wait to be copied to the store, and why: ``2 checkpoints wait: No space left …``.

        Empty where none waits, or the provider does not tell: only one that has its nodes' logs on this machine does.
        """
        stuck = getattr(self.provider, "stuck", None)
        said: Mapping[str, str] = stuck(self._natives[max(self._natives)]) if stuck and self._natives else {}
        if not said:
            return ""
        there = {item.name for item in self.store.checkpoints(self.run_id)}
        left = [name for name in said if name not in there]
        words = f"{len(left)} checkpoint{'s wait' if len(left) > 1 else ' waits'}"
        place = local_path(self.store.url) or self.store.url
        return f"{words}: {said[left[-1]]} on {place}" if left else ""

    def _checkpoint_row(self, *, final: bool) -> dict[str, Any] | None:
        newest = self.checkpoint()
        if newest is None:
            return None
        row: dict[str, Any] = {"name": newest.name, "step": newest.step, "committed": iso_time(newest.committed)}
        if not final:
            row["age_s"] = round(self._clock() - newest.committed, 1)
        return row

    def _may_go_on(self, result: Result) -> bool:
        """Whether a waiting client may still start another attempt of a run that failed, here or in another place."""
        return self._may_retry(result) or self._may_move(result)

    def _kept(self, result: Result) -> Result:
        """``result`` as result.json has it."""
        return {**result, "name": self.job.name, "created": self.record.get("created")}

    def _keep(self, result: Result) -> Result:
        stored = self.store.write_result(self.run_id, self._kept(result))
        with contextlib.suppress(AuthError, StorageError):
            forget(self.store, self.run_id)
        return shown(stored)

    # ---------------------------------------------------------------------------------------------------- what it says

    def metrics(self) -> list[dict[str, Any]]:
        """Return the rows that the script has written to its metrics file, of all attempts as one history.

        An attempt replaces the earlier attempts' rows from its own first step on. So each step is there once.
        """
        self._check()
        self._lead()
        from .live_data import Seen

        return merge_metrics(Seen(self.store, self.run_id).metrics().values())

    def report(self, path: str | Path = ".") -> Path:
        """Write one HTML page about the run, which opens without a network. Return its path.

        ``path`` is a file or a folder; in a folder the file is ``<run id>.html``. Raises `SpecError` when there is no
        such folder.
        """
        from ..report.report import write

        return write(self, Path(path))[0]

    def logs(
        self,
        *,
        follow: bool = False,
        n: int | None = None,
        since: str | timedelta | datetime | None = None,
        node: int | None = None,
        rank: int | None = None,
        times: bool = True,
        poll: float | None = None,
        patience: float = PATIENCE,
    ) -> Iterator[Line]:
        """Give the log lines of all nodes, each once and in order for each node.

        ``follow``
            go on until the run has ended. ``n`` then counts the lines that are there at the start.
        ``n``
            the last ``n`` lines only, by their times.
        ``since``
            lines of so long ago at most (``"10m"``, a timedelta), or since a time (ISO text, a datetime; UTC).
        ``node``, ``rank``
            lines of this node, of this global rank.
        ``times``
            fill `Line.time` from the nodes' own copy of the log, where the platform's log has no times.
        ``poll``
            look at the platform at most so many seconds apart (default: as the provider says).
        ``patience``
            when the platform has not answered for so many seconds, give the nodes' own copy and raise
            `LostContactError`. Without ``follow`` the copy is used at once.

        Raises `SpecError` for a rank, a node or a time that cannot be, `NotFoundError` when there is no such run.
        """
        count = None if n is None else whole_number(n, "n", least=0)
        moment = None if since is None else parse_since(since, self._clock(), field="since")
        self._check_part("node", node)
        self._check_part("rank", rank)
        found = self._lines(self._tail(patience), follow, times or since is not None or bool(n), poll, patience)
        lines = (
            line
            for line in found
            if line is None or ((node is None or str(line.node) == str(node)) and (rank is None or line.rank == rank))
        )
        return newest(lines if moment is None else written_since(lines, moment), count)

    def _check_part(self, kind: str, number: int | None) -> None:
        """Raise `NotFoundError` for a number that no node or rank of the run has."""
        if number is None:
            return
        wanted = self.job.at(self.provider_name)
        count = wanted.resources.instance_count
        if kind == "rank" and wanted.launcher == "torchrun":
            count *= max(wanted.resources.processes(i) for i in range(max(1, len(wanted.resources.gpu))))
        if not 0 <= number < count:
            there = f"{kind}s are 0 to {count - 1}" if count > 1 else f"the only {kind} is 0"
            raise NotFoundError(f"no {kind} {number}; {there}", hint=f"use --{kind} 0, or leave it out for all {kind}s")

    def _lines(
        self, tail: Tail, follow: bool, times: bool, poll: float | None, patience: float
    ) -> Iterator[Line | None]:
        """Yield log lines; None once what is there already has been given, if more may follow."""
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
            return
        self._check()
        natives: dict[int, str] = {}
        try:
            status, natives = self._current()
            over = status.final
        except LostContactError as exc:
            yield from tail.give_up(exc)
        for line in tail.end(natives):
            yield tail.dated(line, over=over) if times else line

    def reconcile(
        self, *, retry: Callable[[Result], bool] | None = None, say: Callable[[str], None] = lambda _: None
    ) -> Result:
        """Do once what `wait` does all the time; return the result as it is then.

        Stops what has waited longer than ``max_wait`` or was cancelled, lets ``retry`` start another attempt, keeps
        the result of a run that is over. Any number of clients may do so at once. Raises what `status` raises.
        """
        self._lead()
        stored = self.store.result(self.run_id)
        if stored is not None:
            return shown(stored)
        status, natives = self._live()
        if not status.final and self.store.cancelled(self.run_id):
            self.cancel()  # whoever wrote that down may have died before it asked
            say("asked the platform again to stop it")
            status, natives = self._live()
        elif reason := self._expire(status, natives):
            say(f"stopping attempt {max(natives)}: {reason}")
            status, natives = self._live()
        result = self._settled(self._conclude(status, natives), retry)
        while result is None:
            result = self._settled(self.result(), retry)
        if self.store.result(self.run_id) is not None:
            say(f"closed: {result['state']}")
        return result

    def _settled(self, result: Result, retry: Callable[[Result], bool] | None) -> Result | None:
        """The result, None when another attempt has begun; one that none will follow is kept."""
        if result["state"] not in FINAL:
            return result
        if self._lead():  # it was left for another place meanwhile, whoever did so
            if begin := getattr(retry, "begin", None):
                begin()
            return None
        if retry is None:
            return result
        stored = self.store.result(self.run_id)
        if stored is not None:  # whoever kept it has found that nothing follows
            return shown(stored)
        if (self._may_go_on(result) and retry(result)) or self._is_late(result):
            return None
        return self._keep(result)

    def wait(
        self,
        *,
        timeout: float | None = None,
        on_line: Callable[[Line], None] | None = None,
        on_status: Callable[[Status], None] | None = None,
        retry: Callable[[Result], bool] | None = None,
        poll: float | None = None,
        patience: float = PATIENCE,
    ) -> Result:
        """Wait until the run has ended; return its result, the object of ``result.json``.

        ``timeout``
            raise `LostContactError` after so many seconds. The run goes on, as it does after Ctrl-C.
        ``on_line``
            called with each log line, a `Line`.
        ``on_status``
            called with each change of the `Status`.
        ``retry``
            called with the result of an attempt that failed, where the platform itself does not retry. It returns True
            when it has started another attempt. `Estimator.fit` passes one; without it no attempt is started.
        ``poll``
            look at the platform at most so many seconds apart (default: as the provider says).
        ``patience``
            raise `LostContactError` when the platform has not answered for so many seconds.

        While it waits, it stops an attempt that waits for machines longer than the job's ``max_wait``, where the
        platform has no such limit. A run that failed is no exception: look at ``result["state"]``.
        """
        # An ``on_status`` with a true attribute ``every`` gets every look. ``resend`` of ``retry`` sends what a client
        # recorded that died; its ``begin`` starts the run in a place that it has come to.
        deadline = None if timeout is None else self._ticks() + timeout
        self._lead()
        tail: Tail | None = None
        while True:
            if on_line is not None and (tail is None or tail.store is not self.store):  # another place, other lines
                tail = self._tail(patience)
            last: Status | None = None
            for event in self._events(
                tail=tail, poll=poll, patience=patience, deadline=deadline, acts=True, retry=retry
            ):
                if isinstance(event, Status):
                    if on_status is not None and (event != last or getattr(on_status, "every", False)):
                        on_status(event)
                    last = event
                elif on_line is not None:
                    on_line(event)
            result = self._settled(self.result() if last is None else self._ended(last), retry)
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
        stored = self.store.result(self.run_id)
        return shown(stored) if stored is not None else self._conclude(status, dict(sorted(self._natives.items())))

    def _events(
        self,
        *,
        tail: Tail | None,
        poll: float | None,
        patience: float,
        deadline: float | None,
        acts: bool = False,
        retry: Callable[[Result], bool] | None = None,
    ) -> Iterator[Status | Line]:
        """Statuses and lines until the run has ended; the final status comes before the last lines.

        ``acts``: whoever waits also stops what has waited for machines for too long, and by ``retry`` sends what a
        client that died has recorded. For whoever does not, an attempt that may be followed is none that is over.
        """
        longest = self.provider.poll if poll is None else poll
        contact = Contact(clock=self._ticks, patience=patience)
        first = min(max(FIRST_POLL, self.provider.pace), longest)
        due, every, pause = self._ticks(), first, first
        status, natives = Status(state="pending"), dict[int, str]()
        while True:
            if self._ticks() >= due:
                with self._listening(contact):
                    found, natives = self._current()
                    status = found if acts else self._between(found, natives)
                    resend = getattr(retry, "resend", None) if self._unsent is not None else None
                    if acts:
                        self._expire(status, natives)
                        if self._unsent is not None and not status.final and resend:
                            resend(self._unsent, self._ticks())
                    yield status
                    if not status.final and resend is None and (not natives or self._unsent is not None):
                        raise LostContactError(status.reason)  # which nobody may ever send
                every = min(longest, every * 1.25)
                due = self._ticks() + every
            if status.final:
                yield from tail.end(natives) if tail is not None else ()
                return
            if tail is not None:
                with self._listening(contact, resets=False):
                    yield from tail.round(natives)
            if contact.lost:
                with contextlib.suppress(StorageError):  # the store may be what does not answer
                    yield from tail.rest() if tail is not None else ()
                raise self._gone(contact, patience)
            if deadline is not None and self._ticks() >= deadline:
                raise LostContactError(f"run {self.run_id} has not ended in the time given; it goes on: {self.url}")
            pause = first if tail is not None and tail.flowing else min(longest, pause * 2)
            wait = 0.0 if tail is not None and tail.more else pause if tail is not None else longest
            until = min(self._ticks() + wait, due, due if deadline is None else deadline)
            if until > self._ticks():
                self._sleep(until - self._ticks())

    def _between(self, status: Status, natives: Mapping[int, str]) -> Status:
        """``status`` as whoever only looks takes it: pending while another client may soon begin the next attempt."""
        if not status.final or self.provider.retried_by != "client" or self.store.result(self.run_id) is not None:
            return status
        newest, now = max(self.store.attempts(self.run_id), default=0), self._clock()
        since = self._over[newest] = min(self._over.get(newest, now), now)
        since = min(since, status.finished or now) if newest in natives else since  # else it is of the one before
        if now - since >= NEXT_SECONDS or not self._may_be_followed(newest, status, natives):
            return status
        reason = f"attempt {newest} ended: {status.reason or status.native}; another one may follow"
        return replace(status, state="pending", reason=reason, category="", finished=None)

    def _may_be_followed(self, newest: int, status: Status, natives: Mapping[int, str]) -> bool:
        """Whether a waiting client may still retry it. What takes many reads is asked once an attempt."""
        if not self.job.at(self.provider_name).retries and status.category not in NO_MACHINES:
            return False
        if newest not in self._retried:
            self._retried[newest] = self._may_retry(self._compute(status, natives))
        return self._retried[newest] and not self.store.cancelled(self.run_id)

    @contextlib.contextmanager
    def _listening(self, contact: Contact, *, resets: bool = True) -> Iterator[None]:
        """Tell ``contact`` of an answer, or of an error that may pass; others are raised."""
        try:
            yield
        except LostContactError as exc:
            contact.heard(exc)
        except StorageError as exc:
            # One cut network silences the platform and a remote store alike; a local disk does not come back.
            if isinstance(exc, DigestError) or local_path(self.store.url) is not None:
                raise
            contact.heard(exc)
        else:
            if resets:
                contact.heard(None)

    def _gone(self, contact: Contact, patience: float) -> CloudtrainError:
        kind = LostContactError if isinstance(contact.error, LostContactError) else StorageError
        return kind(f"{contact.error} (for {patience:.0f} s now; what was submitted goes on: {self.url})")

    # ---------------------------------------------------------------------------------------------------- what it does

    def pull(
        self,
        folder: str | Path,
        *,
        what: str | Iterable[str] = PULLED,
        follow: bool = False,
        on_pull: Callable[[PullReport], None] | None = None,
        progress: Progress | None = None,
    ) -> PullReport:
        """Copy the run's results into ``folder``, verified; a file that is there already is not copied again.

        ``what``
            some of ``checkpoints``, ``artifacts``, ``logs`` and ``metrics`` (default: all four). Of the checkpoints
            ``checkpoints:latest``, ``checkpoints:best`` or ``checkpoints:step=N`` names one.
        ``follow``
            bring what is new again and again, until the run has ended.
        ``on_pull``
            called with a `PullReport` each time that something came.
        ``progress``
            called with a file's key and a number of bytes, as they come.

        Raises `StorageError`, `DigestError` for damaged content, `NotFoundError` for a checkpoint that is not there,
        `SpecError` for an unknown word in ``what``, and with ``follow`` what `logs` raises.
        """
        bring = partial(pull, self.store, self.run_id, Path(folder), what=what, on_pull=on_pull, progress=progress)
        return bring(along=self._along() if follow else None, clock=self._ticks)

    def _along(self) -> Iterator[Status]:
        """Statuses until the run has ended; its result is kept then, or by whoever asks next."""
        events = self._events(tail=None, poll=None, patience=PATIENCE, deadline=None)
        for last in (event for event in events if isinstance(event, Status)):
            yield last
        with contextlib.suppress(LostContactError, StorageError):
            self._ended(last)

    def cancel(self) -> None:
        """Ask the platform to stop the run, and forbid further attempts. It does not wait for the end.

        A run that is over stays as it is, and a second call changes nothing. Every attempt is asked to stop, then the
        first error, if any, is raised.
        """
        self._check()
        self._lead()
        if self._is_over():
            return
        errors: list[CloudtrainError] = []
        try:
            self.store.cancel(self.run_id)  # first of all: an attempt that starts from now on sees it
        except StorageError as exc:  # such as a full store; a supervisor that is told to stop starts none either
            errors += [exc] if self.provider.retried_by != "supervisor" else []
        for k in self.store.attempts(self.run_id):
            try:
                native = self._native(k)
                if native is not None:
                    self._patiently(partial(self.provider.cancel, native))
            except NotFoundError:
                continue  # what the platform does not know does not run
            except CloudtrainError as exc:
                errors.append(exc)
        if self._lead():  # whoever left this place meanwhile may not have seen it
            self.cancel()
        if errors:
            raise errors[0]

    def _is_over(self) -> bool:
        """Whether nothing is left to cancel; a platform that does not answer says nothing, so no."""
        if self.store.result(self.run_id) is not None:
            return True
        try:
            status, natives = self._live()
            return status.final and not self._may_go_on(self._compute(status, natives))
        except CloudtrainError:
            return False


# ------------------------------------------------------------------------------------------------------- finding runs


def open_run(ref: str, *, store_url: str, cwd: Path | None = None, settings: Settings = NO_SETTINGS) -> Run:
    """The run ``ref``: the URL or local path of a run folder, or the id of a run in the store at ``store_url``.

    ``settings`` say as whom this machine calls. Raises `NotFoundError`, naming the nearest id, when there is none.
    """
    ref = (ref if url_scheme(ref) else ref.replace(os.sep, "/")).rstrip("/") or ref
    if url_scheme(ref) or "/" in ref:
        parent, _, run_id = ref.rpartition("/")
        place, _, runs = parent.rpartition("/")
        if runs != "runs":
            raise NotFoundError(f"{ref!r} is not the URL of a run folder, <store>/runs/<run id>", field="run")
        where = place or ("." if parent == "runs" else "/")
    else:
        where, run_id = store_url, ref

    def read(caller: Caller) -> tuple[Run, Caller]:
        run = Run(store=Store(where, cwd=cwd, storage=caller, moving=settings.moving), run_id=run_id, settings=settings)
        try:
            check_run_id(run_id)
            run._check()
        except SpecError as exc:
            if not isinstance(exc, NotFoundError) and exc.field != "run_id":
                raise
            near = did_you_mean(run_id, run.store.runs())
            raise NotFoundError(f"no run {run_id!r} in {run.store.url}", field="run", hint=near) from None
        return run, caller

    run, asked = settings.let_in(where, read)
    with contextlib.suppress(CloudtrainError):  # without its provider, too, there are files to pull
        run._lead()
        if local_path(run.store.url) is None and (own := asked.own(run.store.url, run.provider)) is not None:
            run.store = Store(run.store.url, storage=own, moving=settings.moving)
    return run
