"""The handle of a run: status, logs, wait, pull, cancel and the result, from nothing but the URL of its run folder.

What happened is read from three places: the platform (is it running, why did it stop it), the exit records that nodes
leave in ``live/exit`` (which rank failed first, of what) and, once the run is final, ``result.json``, which decides.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from .errors import (
    EXIT_CODES,
    CloudtrainError,
    DigestError,
    LostContactError,
    NotFoundError,
    SpecError,
    StorageError,
)
from .follow import Follower, Line, Stream, Want, attempt_key
from .job import Job, check_run_id, nearest, url_scheme
from .provider import FINAL, AttemptInfo, Provider, Status, find_provider
from .store import PULLED, Checkpoint, PullReport, Staged, Store
from .transfer import Progress, local_path, parallel

__all__ = ["Run", "list_runs", "open_run"]

PATIENCE = 600.0
"""Seconds without an answer before contact with a platform counts as lost."""
POLL = 2.0
"""Longest seconds between two looks at a platform; the first looks are FIRST_POLL seconds apart."""
FIRST_POLL = 0.1
SEGMENT_POLL = 5.0
"""Seconds between two looks at the segments while they stand in for the platform's log; nodes write one every 5 s."""

#: What the platform knows better than its nodes; of anything else the nodes know better.
PLATFORM_DECIDES = frozenset({"cancelled", "timeout", "capacity", "quota", "auth", "image", "preempted"})
#: What no further attempt would cure.
NOT_RETRIED = frozenset({"cancelled", "timeout", "quota", "auth", "image"})
FAILURE_FIELDS = ("node", "rank", "exception", "file", "line", "traceback", "process_exit_code")
#: Kept in result.json for `list_runs`, no part of the result.
LIST_FIELDS = ("name", "created")

_SEGMENT = re.compile(r"(?:.*/)?logs/([0-9]+\.[0-9]+)/node-([0-9]+)/([0-9]+)\.log")

Record = Mapping[str, Any]
Result = dict[str, Any]


class Run:
    """One run. Making the handle reads nothing; every method raises `NotFoundError` when there is no such run.

    ``provider`` is made from run.json when first needed. ``clock`` gives Unix seconds. ``staged`` is what `submit`
    uploaded for it, None on a handle that was opened later.
    """

    def __init__(
        self,
        *,
        store: Store,
        run_id: str,
        provider: Provider | None = None,
        clock: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
        staged: Staged | None = None,
    ) -> None:
        self.store, self.run_id, self.staged = store, run_id, staged
        self._provider, self._clock, self._sleep = provider, clock, sleep
        self._record: dict[str, Any] | None = None
        self._natives: dict[int, str] = {}

    def __repr__(self) -> str:
        return f"Run({self.url!r})"

    @property
    def url(self) -> str:
        """URL of the run folder: enough to find the run again from any machine."""
        return f"{self.store.url}/runs/{self.run_id}"

    @property
    def record(self) -> dict[str, Any]:
        """run.json."""
        if self._record is None:
            self._record = self.store.run(self.run_id)
        return self._record

    @property
    def job(self) -> Job:
        return Job.from_dict(self.record["job"])

    @property
    def provider_name(self) -> str:
        return str(self.record["provider"])

    @property
    def provider(self) -> Provider:
        """The provider with the settings the run was submitted with."""
        if self._provider is None:
            self._provider = find_provider(self.provider_name)(**self.record["settings"])
        return self._provider

    def _check(self) -> None:
        if not self.record:
            raise NotFoundError(f"no run at {self.url}", field="run")

    # --------------------------------------------------------------------------------------------------- how it stands

    def status(self) -> Status:
        """How the run stands now. Raises what the provider raises, `LostContactError` when it does not answer."""
        return self._current()[0]

    def checkpoint(self) -> Checkpoint | None:
        """The newest complete checkpoint."""
        return self.store.newest_checkpoint(self.run_id)

    def result(self) -> Result:
        """The object that submit, wait and status print; written as result.json once the run is final."""
        stored = self.store.result(self.run_id)
        if stored is not None:
            return _shown(stored)
        return self._conclude(*self._live())

    def _current(self) -> tuple[Status, dict[int, str]]:
        """result.json's word if there is one, else the platform's; and the native ids by attempt, oldest first."""
        result = self.store.result(self.run_id)
        if result is None:
            return self._live()
        noted = {k: self.store.submitted(self.run_id, k) for k in sorted(self.store.attempts(self.run_id))}
        return _status_of(result), {k: str(item["native_id"]) for k, item in noted.items() if item}

    def _live(self) -> tuple[Status, dict[int, str]]:
        """The platform's word on the newest attempt that was submitted, and all native ids."""
        recorded = self.store.attempts(self.run_id)
        natives = {k: native for k in sorted(recorded) if (native := self._native(k)) is not None}
        if not natives:
            return self._unsubmitted(), natives
        newest = max(natives)
        status = self._ask(newest, natives[newest])
        if status.final and newest < max(recorded) and not self.store.cancelled(self.run_id):
            reason = (
                f"attempt {max(recorded)} is recorded but not submitted yet; the last one: {status.reason or 'ended'}"
            )
            status = replace(status, state="pending", reason=reason, category="", finished=None)
        return status, natives

    def _native(self, attempt: int) -> str | None:
        """The native id of an attempt; asks the platform when a crash came between submitting and noting it down."""
        if attempt not in self._natives:
            submitted = self.store.submitted(self.run_id, attempt)
            native = str(submitted["native_id"]) if submitted else self._found(attempt)
            if native is None:
                return None
            self._natives[attempt] = native
        return self._natives[attempt]

    def _found(self, attempt: int) -> str | None:
        request = self.store.attempt_request(self.run_id, attempt)
        native = self.provider.find(request) if request is not None else None
        if native is not None:
            self.store.write_submitted(self.run_id, attempt, native)
        return native

    def _unsubmitted(self) -> Status:
        self._check()
        if self.store.cancelled(self.run_id):
            return Status(state="cancelled", category="cancelled", reason="cancelled before it was submitted")
        reason = f"recorded but never submitted; submit again with --run-id {self.run_id}"
        return Status(state="pending", reason=reason)

    def _ask(self, attempt: int, native: str) -> Status:
        """The provider's status; of a native job that it no longer knows, what the nodes left behind."""
        try:
            return self.provider.status(native)
        except NotFoundError:
            records = [r for r in self.store.exits(self.run_id) if attempt_key(str(r["attempt"]))[:1] == (attempt,)]
            root = _root(_newest(records))
            if root is None or not root.get("decided"):
                raise
            state = "succeeded" if root["outcome"] == "succeeded" else "failed"
            return Status(state=state, native="gone", reason="the platform no longer knows the job")

    # ------------------------------------------------------------------------------------------------------ the result

    def _conclude(self, status: Status, natives: Mapping[int, str]) -> Result:
        """The result that ``status`` and the exit records make, kept if nothing can follow it."""
        result = self._compute(status, natives)
        if result["state"] in FINAL and not self._may_go_on(result):
            self._keep(result)
        return result

    def _compute(self, status: Status, natives: Mapping[int, str]) -> Result:
        exits = self.store.exits(self.run_id)
        attempts = self._attempts(status, natives, exits)
        verdict = _verdict(status, _records_of(attempts[-1], exits) if attempts else ())
        return {
            "run": self.url,
            "run_id": self.run_id,
            "provider": self.provider_name,
            "native_id": natives[max(natives)] if natives else None,
            "state": verdict.state,
            "category": verdict.category or None,
            "exit_code": verdict.exit_code,
            "reason": verdict.reason,
            "failure": verdict.failure,
            "attempts": [_attempt_row(info) for info in attempts],
            "checkpoint": self._checkpoint_row(final=status.final),
            "cost": {
                "limit_usd": self.job.at(self.provider_name).max_cost,
                "estimate_usd": None,
                "priced_on": None,
            },
        }

    def _attempts(self, status: Status, natives: Mapping[int, str], exits: Sequence[Record]) -> list[AttemptInfo]:
        """Every attempt the platform or a node tells of, oldest first."""
        infos: dict[str, AttemptInfo] = {}
        told: set[str] = set()
        for k, native in sorted(natives.items(), reverse=True):
            if native in told:  # one native job may hold several attempts
                continue
            told.add(native)
            said = status if k == max(natives) else self._old_status(native)
            for info in said.attempts or (_only_attempt(k, said),):
                infos.setdefault(info.number, replace(info, native_id=info.native_id or native))
        for number in {str(record["attempt"]) for record in exits}:
            native = natives.get(attempt_key(number)[0] if attempt_key(number) else -1, "")
            info = infos.get(number, AttemptInfo(number=number, native_id=native))
            infos[number] = _with_exits(info, [r for r in exits if r["attempt"] == number])
        return sorted(infos.values(), key=lambda info: attempt_key(info.number))

    def _old_status(self, native: str) -> Status:
        """Of an earlier attempt: history, so a platform that has forgotten it or does not answer is no error."""
        try:
            return self.provider.status(native)
        except CloudtrainError:
            return Status(state="failed")

    def _checkpoint_row(self, *, final: bool) -> dict[str, Any] | None:
        newest = self.checkpoint()
        if newest is None:
            return None
        row: dict[str, Any] = {"name": newest.name, "step": newest.step, "committed": _iso(newest.committed)}
        if not final:
            row["age_s"] = round(self._clock() - newest.committed, 1)
        return row

    def _may_go_on(self, result: Result) -> bool:
        """Whether a waiting client may still start another attempt of a run that failed."""
        if result["state"] != "failed" or result["category"] in NOT_RETRIED or self.provider.retried_by != "client":
            return False
        newest = max(self.store.attempts(self.run_id), default=0)
        return newest < self.job.at(self.provider_name).retries and not self.store.cancelled(self.run_id)

    def _keep(self, result: Result) -> None:
        extra = {"name": self.job.name, "created": self.record.get("created")}
        self.store.write_result(self.run_id, {**result, **extra})

    # ---------------------------------------------------------------------------------------------------- what it says

    def logs(self, *, follow: bool = False, poll: float = POLL, patience: float = PATIENCE) -> Iterator[Line]:
        """Every line of every node, each once and in order for each node; ``follow``: until the run has ended.

        Looks at the platform every 0.1 s while lines come, at most ``poll`` seconds apart while none do. When the
        platform has not answered for ``patience`` seconds, what the store itself holds is given and then
        `LostContactError` raised; without ``follow``, the store's own copy steps in at once.
        """
        tail = _Tail(run=self, clock=self._clock, patience=patience)
        if follow:
            for event in self._events(tail=tail, poll=poll, patience=patience, deadline=None):
                if isinstance(event, Line):
                    yield event
            return
        self._check()
        natives: dict[int, str] = {}
        try:
            natives = self._current()[1]
        except LostContactError as exc:
            yield from tail.give_up(exc)
        yield from tail.end(natives)

    def wait(
        self,
        *,
        timeout: float | None = None,
        on_line: Callable[[Line], None] | None = None,
        on_status: Callable[[Status], None] | None = None,
        retry: Callable[[Result], bool] | None = None,
        poll: float = POLL,
        patience: float = PATIENCE,
    ) -> Result:
        """The result, once the run has ended. ``on_line`` gets every log line, ``on_status`` every change of status.

        ``retry`` is asked after a failure that a waiting client may follow up: True means that it has started another
        attempt. Raises `LostContactError` after ``timeout`` seconds, or when the platform has not answered for
        ``patience`` seconds: the run goes on, as it does after an interrupt.
        """
        deadline = None if timeout is None else self._clock() + timeout
        tail = _Tail(run=self, clock=self._clock, patience=patience) if on_line is not None else None
        while True:
            last: Status | None = None
            for event in self._events(tail=tail, poll=poll, patience=patience, deadline=deadline):
                if isinstance(event, Status):
                    if on_status is not None and event != last:
                        on_status(event)
                    last = event
                elif on_line is not None:
                    on_line(event)
            result = self.result() if last is None else self._ended(last)
            if retry is None or not self._may_go_on(result):
                return result
            if not retry(result):
                self._keep(result)
                return result

    def _ended(self, status: Status) -> Result:
        stored = self.store.result(self.run_id)
        return _shown(stored) if stored is not None else self._conclude(status, dict(sorted(self._natives.items())))

    def _events(
        self, *, tail: _Tail | None, poll: float, patience: float, deadline: float | None
    ) -> Iterator[Status | Line]:
        """Statuses and lines until the run has ended; the final status comes before the last lines."""
        contact = _Contact(clock=self._clock, patience=patience)
        due, every, pause = self._clock(), FIRST_POLL, FIRST_POLL
        status, natives = Status(state="pending"), dict[int, str]()
        while True:
            if self._clock() >= due:
                with self._listening(contact):
                    status, natives = self._current()
                    yield status
                    if not natives and not status.final:
                        raise LostContactError(status.reason)
                every = min(poll, every * 1.25)
                due = self._clock() + every
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
            if deadline is not None and self._clock() >= deadline:
                raise LostContactError(f"run {self.run_id} has not ended in the time given; it goes on: {self.url}")
            pause = FIRST_POLL if tail is not None and tail.flowing else min(poll, pause * 2)
            wait = 0.0 if tail is not None and tail.more else pause if tail is not None else poll
            until = min(self._clock() + wait, due, due if deadline is None else deadline)
            if until > self._clock():
                self._sleep(until - self._clock())

    @contextlib.contextmanager
    def _listening(self, contact: _Contact, *, resets: bool = True) -> Iterator[None]:
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

    def _gone(self, contact: _Contact, patience: float) -> CloudtrainError:
        kind = StorageError if isinstance(contact.error, StorageError) else LostContactError
        return kind(f"{contact.error} (for {patience:.0f} s now; what was submitted goes on: {self.url})")

    # ---------------------------------------------------------------------------------------------------- what it does

    def pull(
        self,
        folder: str | Path,
        *,
        what: Iterable[str] = PULLED,
        progress: Progress | None = None,
    ) -> PullReport:
        """Copy ``what`` of the run into ``folder``, verified; files that are there already are not copied again.

        Raises `StorageError`, `DigestError` for damaged content, and `SpecError` for an unknown word in ``what``.
        """
        return self.store.pull(self.run_id, Path(folder), what=what, progress=progress)

    def cancel(self) -> None:
        """Forbid further attempts and ask the platform to stop what runs. Idempotent; a final run stays as it is.

        Every attempt is asked to stop, then the first error, if any, is raised.
        """
        self._check()
        if self._is_over():
            return
        self.store.cancel(self.run_id)  # first of all: an attempt that starts from now on sees it
        errors: list[CloudtrainError] = []
        for k in self.store.attempts(self.run_id):
            try:
                native = self._native(k)
                if native is not None:
                    self.provider.cancel(native)
            except NotFoundError:
                continue  # what the platform does not know does not run
            except CloudtrainError as exc:
                errors.append(exc)
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


def open_run(ref: str, *, store_url: str, cwd: Path | None = None) -> Run:
    """The run ``ref``: the URL or local path of a run folder, or the id of a run in the store at ``store_url``.

    Raises `NotFoundError`, naming the nearest id, when there is none.
    """
    ref = (ref if url_scheme(ref) else ref.replace(os.sep, "/")).rstrip("/") or ref
    if url_scheme(ref) or "/" in ref:
        parent, _, run_id = ref.rpartition("/")
        place, _, runs = parent.rpartition("/")
        if runs != "runs":
            raise NotFoundError(f"{ref!r} is not the URL of a run folder, <store>/runs/<run id>", field="run")
        store = Store(place or ("." if parent == "runs" else "/"), cwd=cwd)
    else:
        store, run_id = Store(store_url, cwd=cwd), ref
    run = Run(store=store, run_id=run_id)
    try:
        check_run_id(run_id)
        run._check()
    except SpecError as exc:
        if not isinstance(exc, NotFoundError) and exc.field != "run_id":
            raise
        raise NotFoundError(f"no run {run_id!r} in {store.url}{nearest(run_id, store.runs())}", field="run") from None
    return run


def list_runs(store: Store | str) -> list[dict[str, Any]]:
    """Every run of the store, newest first: run_id, provider, state, category, reason, name, created (ISO 8601, UTC).

    A run that has a result.json costs one read; of the others the platform is asked. What cannot be read or does not
    answer has the state ``unknown``, with the reason.
    """
    store = Store(store) if isinstance(store, str) else store
    providers: dict[str, Provider] = {}
    rows = []
    for run_id, (row, record) in zip(ids := store.runs(), parallel(lambda i: _recorded(store, i), ids), strict=True):
        rows.append({**row, **_asked(store, run_id, record, providers)} if record is not None else row)
    rows.sort(key=lambda row: (row["created"] or "", row["run_id"]), reverse=True)
    return rows


def _row(run_id: str, data: Record, **said: Any) -> dict[str, Any]:
    created = data.get("created")
    row = {
        "run_id": run_id,
        "provider": data.get("provider"),
        "state": data.get("state"),
        "category": data.get("category"),
        "reason": data.get("reason", ""),
        "name": data.get("name"),
        "created": _iso(created) if isinstance(created, (int, float)) else None,
    }
    return {**row, **said}


def _recorded(store: Store, run_id: str) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """A run's row; and, when it is not final, its run.json."""
    try:
        result = store.result(run_id)
        if result is not None and "created" in result:
            return _row(run_id, result), None
        record = store.run(run_id)
        row = _row(run_id, {**record, **(result or {})}, name=Job.from_dict(record["job"]).name)
        return row, record if result is None else None
    except Exception as exc:  # noqa: BLE001 - one broken record must not hide the other runs
        return _row(run_id, {}, state="unknown", reason=_one_line(exc)), None


def _asked(store: Store, run_id: str, record: Record, providers: dict[str, Provider]) -> dict[str, Any]:
    """What the platform says of the run; runs with the same settings share one provider and so its connections."""
    try:
        key = json.dumps([record["provider"], record["settings"]], sort_keys=True)
        if key not in providers:
            providers[key] = find_provider(record["provider"])(**record["settings"])
        status = Run(store=store, run_id=run_id, provider=providers[key]).status()
    except Exception as exc:  # noqa: BLE001 - nor must one platform that fails, or whose SDK is missing
        return {"state": "unknown", "reason": _one_line(exc)}
    return {"state": status.state, "category": status.category or None, "reason": _first_line(status.reason)}


# ------------------------------------------------------------------------------------------------------- log sources


class _Contact:
    """For how long somebody has not answered."""

    def __init__(self, *, clock: Callable[[], float], patience: float) -> None:
        self._clock, self._patience = clock, patience
        self._since: float | None = None
        self.error: CloudtrainError | None = None

    def heard(self, error: CloudtrainError | None) -> None:
        """An answer (None), or what came instead."""
        self.error = error
        if error is None:
            self._since = None
        elif self._since is None:
            self._since = self._clock()

    @property
    def lost(self) -> bool:
        return self._since is not None and self._clock() - self._since >= self._patience


class _Tail:
    """Feeds a Follower from the platform's pages and from the segments in the store.

    ``more``: a page is waiting; ``flowing``: the last round brought lines.
    """

    def __init__(self, *, run: Run, clock: Callable[[], float], patience: float) -> None:
        self.more = self.flowing = False
        self._run, self._clock = run, clock
        self._contact = _Contact(clock=clock, patience=patience)
        self._follower = Follower(clock=clock)
        self._cursors: dict[str, Any] = {}
        self._given_up = False
        self._segments_due = 0.0

    def round(self, natives: Mapping[int, str]) -> Iterator[Line]:
        """The next page of the newest attempt, after all of any earlier one whose end nobody has read yet."""
        self.flowing = self.more = False
        *earlier, newest = [*dict.fromkeys(natives.values())] or [""]
        if newest and newest not in self._cursors:
            for native in earlier:
                yield from self._to_end(native)
        if newest:
            yield from self._page(newest, final=False)
        if self._given_up:
            yield from self._catch_up()
        yield from self._gaps()

    def end(self, natives: Mapping[int, str]) -> Iterator[Line]:
        """Everything else there is, of all attempts: pages first, since the segments lack the platform's own lines."""
        for native in dict.fromkeys(natives.values()):
            yield from self._to_end(native)
        yield from self.rest()

    def rest(self) -> Iterator[Line]:
        """Everything else that the segments have; lines that are nowhere become markers."""
        index = self._index()
        for want in self._follower.drain(self._run.store.exits(self._run.run_id), index):
            yield from self._read(want, index)
            yield from self._follower.finish(want.stream)

    def give_up(self, error: CloudtrainError) -> Iterator[Line]:
        """No more pages: segments stand in. Says so, once."""
        if not self._given_up:
            text = f"[… the platform's log does not answer; lines come from the store: {_first_line(str(error))}]"
            yield Line(attempt="", node="", rank=None, seq=0, text=text)
        self._given_up = True

    def _to_end(self, native: str) -> Iterator[Line]:
        while True:
            yield from self._page(native, final=True)
            if not self.more:
                return
            yield from self._gaps()

    def _page(self, native: str, *, final: bool) -> Iterator[Line]:
        """One page. ``final``: there is no later time to ask again, so any error ends the asking."""
        self.more = False
        if self._given_up:
            return
        before = self._cursors.get(native)
        try:
            page = self._run.provider.logs(native, before)
        except NotFoundError:
            return  # not there yet, or not any more
        except CloudtrainError as exc:
            self._contact.heard(exc)
            if not final and not isinstance(exc, LostContactError):
                raise
            if final or self._contact.lost:
                yield from self.give_up(exc)
            return
        self._contact.heard(None)
        self._cursors[native] = page.cursor
        self.flowing = self.flowing or bool(page.lines)
        self.more = page.more and bool(page.lines or page.cursor != before)
        yield from self._follower.page(page.lines)

    def _gaps(self) -> Iterator[Line]:
        for want in self._follower.wanted():
            yield from self._read(want, self._index(f"{want.attempt}/node-{want.node}/"))
            yield from self._follower.answered(want)

    def _catch_up(self) -> Iterator[Line]:
        if self._clock() < self._segments_due:
            return
        self._segments_due = self._clock() + SEGMENT_POLL
        index = self._index()
        for want in self._follower.drain((), index):
            yield from self._read(want, index)

    def _index(self, below: str = "") -> dict[Stream, list[tuple[int, str]]]:
        """The segments of each node: the number of the first line and the key, in order."""
        index: dict[Stream, list[tuple[int, str]]] = {}
        for key in self._run.store.files.list(f"runs/{self._run.run_id}/live/logs/{below}".rstrip("/")):
            match = _SEGMENT.fullmatch(key)
            if match:
                index.setdefault((match[1], int(match[2])), []).append((int(match[3]), key))
        return {stream: sorted(segments) for stream, segments in index.items()}

    def _read(self, want: Want, index: Mapping[Stream, Sequence[tuple[int, str]]]) -> Iterator[Line]:
        """Feed the segments that may hold what is wanted."""
        segments = index.get(want.stream, ())
        for i, (first, key) in enumerate(segments):
            after = segments[i + 1][0] if i + 1 < len(segments) else None
            if (after is not None and after <= want.first) or (want.last is not None and first > want.last):
                continue
            try:
                text = self._run.store.files.read(key).decode("utf-8", "replace")
            except FileNotFoundError:
                continue
            yield from self._follower.segment(text.split("\n"))


# ---------------------------------------------------------------------------------------------------------- verdicts


@dataclass(frozen=True, kw_only=True)
class _Verdict:
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


def _verdict(status: Status, records: Sequence[Record]) -> _Verdict:
    """What the platform and the exit records of the newest attempt say together."""
    said = _Verdict(state=status.state, category=status.category, reason=_first_line(status.reason))
    if status.state == "cancelled":
        return replace(said, category="cancelled", reason=said.reason or "cancelled")
    root = _root(records)
    told = _told(root) if root is not None else None
    if status.state == "succeeded":
        return told if told is not None and root is not None and root.get("decided") else replace(said, category="")
    if not status.final or status.category in PLATFORM_DECIDES or told is None:
        blank = status.final and not said.reason
        return replace(said, reason=f"the platform says {status.native or 'it failed'}") if blank else said
    vague = told.category in ("", "infra") and status.category
    reason = said.reason if told.reason in said.reason else told.reason
    return replace(told, category=status.category if vague else told.category, reason=reason)


def _told(root: Record) -> _Verdict | None:
    """The failure that a record tells of, None when it tells of none."""
    failure = root.get("failure")
    if root["outcome"] == "succeeded" or (root["outcome"] == "stopped" and not failure):
        return None
    public = {name: failure.get(name) for name in FAILURE_FIELDS} if failure else None
    default = "preempted" if root["outcome"] == "preempted" else "user_error" if failure else ""
    return _Verdict(
        state="failed", category=root.get("category") or default, reason=_reason(root, public), failure=public
    )


def _root(records: Sequence[Record]) -> Record | None:
    """The record that tells why the attempt ended: the decided one, else that of the node that failed first."""
    decided = [r for r in records if r.get("decided") and (r["outcome"] != "stopped" or r.get("failure"))]
    if decided:
        return decided[0]
    return min((r for r in records if r["outcome"] == "failed"), key=_failed_at, default=None)


def _failed_at(record: Record) -> float:
    stamp = (record.get("failure") or {}).get("time_ns")
    return stamp / 1e9 if stamp is not None else record.get("ended") or float("inf")


def _records_of(info: AttemptInfo, exits: Sequence[Record]) -> list[Record]:
    """The attempt's exit records. A platform may also count starts that never reached our runtime, which then numbered
    the attempt lower: so records of the same k that ended after the platform's attempt began are its records too."""
    own = [r for r in exits if r["attempt"] == info.number]
    if own or info.started is None:
        return own
    k = attempt_key(info.number)[:1]
    since = [r for r in exits if attempt_key(str(r["attempt"]))[:1] == k and (r.get("ended") or 0) >= info.started]
    return _newest(since)


def _newest(records: Sequence[Record]) -> list[Record]:
    """The records of the newest attempt among them."""
    newest = max((attempt_key(str(r["attempt"])) for r in records), default=())
    return [r for r in records if attempt_key(str(r["attempt"])) == newest]


def _reason(record: Record, failure: Record | None) -> str:
    """One line naming rank, node, exception and place; the node's own if it already does."""
    told = _first_line(str(record.get("reason") or ""))
    if failure is None or f"node {failure['node']}" in told:
        return told
    rank, code = failure["rank"], failure["process_exit_code"]
    who = f"node {failure['node']}" if rank is None else f"rank {rank} on node {failure['node']}"
    if failure["exception"]:
        name = str(failure["file"] or "").replace("\\", "/").rpartition("/")[2]
        place = f" ({name}:{failure['line']})" if name else ""
        return f"{who} raised {_first_line(str(failure['exception']))}{place}"
    if told or code is None:
        return f"{who}: {told or 'ended without a word'}"
    return f"{who} was killed by {_signal(-code)}" if code < 0 else f"{who} exited with code {code}"


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def _one_line(exc: Exception) -> str:
    text = _first_line(str(exc))
    return text if isinstance(exc, CloudtrainError) and text else f"{type(exc).__name__}: {text}"


# ------------------------------------------------------------------------------------------------------------ records


def _only_attempt(attempt: int, status: Status) -> AttemptInfo:
    """The attempt of a native job whose platform tells of none."""
    return AttemptInfo(
        number=f"{attempt}.0",
        started=status.started,
        ended=status.finished,
        reason=_first_line(status.reason) if status.final else "",
    )


def _with_exits(info: AttemptInfo, records: Sequence[Record]) -> AttemptInfo:
    """``info`` completed by the exit records of its nodes."""
    root = _root(records)
    told = _told(root) if root is not None else None
    resumed = next((r["resumed_from"] for r in records if r.get("resumed_from")), "")
    return replace(
        info,
        started=info.started or min((r["started"] for r in records if r.get("started")), default=None),
        ended=info.ended or max((r["ended"] for r in records if r.get("ended")), default=None),
        reason=(told.reason if told else "") or info.reason,
        resumed_from=info.resumed_from or resumed,
    )


def _attempt_row(info: AttemptInfo) -> dict[str, Any]:
    return {
        "number": info.number,
        "native_id": info.native_id,
        "started": _iso(info.started),
        "ended": _iso(info.ended),
        "reason": _first_line(info.reason),
        "resumed_from": info.resumed_from,
    }


def _attempt_info(row: Record) -> AttemptInfo:
    return AttemptInfo(
        number=str(row["number"]),
        native_id=row.get("native_id") or "",
        started=_unix(row.get("started")),
        ended=_unix(row.get("ended")),
        reason=row.get("reason") or "",
        resumed_from=row.get("resumed_from") or "",
    )


def _status_of(result: Record) -> Status:
    """The Status that a result.json stands for."""
    attempts = tuple(_attempt_info(row) for row in result.get("attempts") or ())
    return Status(
        state=result["state"],
        category=result.get("category") or "",
        reason=result.get("reason") or "",
        attempts=attempts,
        started=attempts[0].started if attempts else None,
        finished=attempts[-1].ended if attempts else None,
    )


def _shown(stored: Record) -> Result:
    return {key: value for key, value in stored.items() if key not in LIST_FIELDS}


def _iso(seconds: float | None) -> str | None:
    """Unix seconds as ISO 8601 in UTC, to the millisecond."""
    if seconds is None:
        return None
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _unix(text: str | None) -> float | None:
    return None if text is None else datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()
