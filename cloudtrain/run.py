"""The handle of a run: status, logs, wait, pull, cancel and the result, from nothing but the URL of its run folder.

What happened is read from three places: the platform (is it running, why did it stop it), the exit records that nodes
leave in ``live/exit`` (which rank failed first, of what) and, once the run is final, ``result.json``, which decides.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from .errors import (
    CloudtrainError,
    DigestError,
    LostContactError,
    NotFoundError,
    SpecError,
    StorageError,
)
from .follow import Line, attempt_key
from .job import Job, check_run_id
from .provider import FINAL, AttemptInfo, Provider, Status, find_provider
from .pull import PULLED, PullReport, pull
from .store import Checkpoint, Staged, Store
from .tail import Contact, Tail
from .transfer import Progress, local_path, parallel
from .values import nearest, url_scheme
from .verdict import (
    attempt_row,
    first_line,
    iso_time,
    newest_of,
    one_line,
    only_attempt,
    records_of,
    root_record,
    shown,
    status_of,
    verdict_of,
    with_exits,
)

__all__ = ["Run", "list_runs", "open_run"]

PATIENCE = 600.0
"""Seconds without an answer before contact with a platform counts as lost."""
FIRST_POLL = 0.1

#: What no further attempt would cure.
NOT_RETRIED = frozenset({"cancelled", "timeout", "quota", "auth", "image"})


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
        verdict = verdict_of(status, records_of(attempts[-1], exits) if attempts else ())
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
            "attempts": [attempt_row(info) for info in attempts],
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
            for info in said.attempts or (only_attempt(k, said),):
                infos.setdefault(info.number, replace(info, native_id=info.native_id or native))
        for number in {str(record["attempt"]) for record in exits}:
            native = natives.get(attempt_key(number)[0] if attempt_key(number) else -1, "")
            info = infos.get(number, AttemptInfo(number=number, native_id=native))
            infos[number] = with_exits(info, [r for r in exits if r["attempt"] == number])
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
        row: dict[str, Any] = {"name": newest.name, "step": newest.step, "committed": iso_time(newest.committed)}
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

    def logs(self, *, follow: bool = False, poll: float | None = None, patience: float = PATIENCE) -> Iterator[Line]:
        """Every line of every node, each once and in order for each node; ``follow``: until the run has ended.

        Looks at the platform every 0.1 s while lines come, at most ``poll`` seconds apart while none do (default: what
        the provider says). When the
        platform has not answered for ``patience`` seconds, what the store itself holds is given and then
        `LostContactError` raised; without ``follow``, the store's own copy steps in at once.
        """
        tail = self._tail(patience)
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
        poll: float | None = None,
        patience: float = PATIENCE,
    ) -> Result:
        """The result, once the run has ended. ``on_line`` gets every log line, ``on_status`` every change of status.

        ``retry`` is asked after a failure that a waiting client may follow up: True means that it has started another
        attempt. Raises `LostContactError` after ``timeout`` seconds, or when the platform has not answered for
        ``patience`` seconds: the run goes on, as it does after an interrupt.
        """
        deadline = None if timeout is None else self._clock() + timeout
        tail = self._tail(patience) if on_line is not None else None
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

    def _tail(self, patience: float) -> Tail:
        return Tail(
            store=self.store,
            run_id=self.run_id,
            provider=lambda: self.provider,
            clock=self._clock,
            patience=patience,
        )

    def _ended(self, status: Status) -> Result:
        stored = self.store.result(self.run_id)
        return shown(stored) if stored is not None else self._conclude(status, dict(sorted(self._natives.items())))

    def _events(
        self, *, tail: Tail | None, poll: float | None, patience: float, deadline: float | None
    ) -> Iterator[Status | Line]:
        """Statuses and lines until the run has ended; the final status comes before the last lines."""
        longest = self.provider.poll if poll is None else poll
        contact = Contact(clock=self._clock, patience=patience)
        due, every, pause = self._clock(), FIRST_POLL, FIRST_POLL
        status, natives = Status(state="pending"), dict[int, str]()
        while True:
            if self._clock() >= due:
                with self._listening(contact):
                    status, natives = self._current()
                    yield status
                    if not natives and not status.final:
                        raise LostContactError(status.reason)
                every = min(longest, every * 1.25)
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
            pause = FIRST_POLL if tail is not None and tail.flowing else min(longest, pause * 2)
            wait = 0.0 if tail is not None and tail.more else pause if tail is not None else longest
            until = min(self._clock() + wait, due, due if deadline is None else deadline)
            if until > self._clock():
                self._sleep(until - self._clock())

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
        return pull(self.store, self.run_id, Path(folder), what=what, progress=progress)

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
        "created": iso_time(created) if isinstance(created, (int, float)) else None,
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
        return _row(run_id, {}, state="unknown", reason=one_line(exc)), None


def _asked(store: Store, run_id: str, record: Record, providers: dict[str, Provider]) -> dict[str, Any]:
    """What the platform says of the run; runs with the same settings share one provider and so its connections."""
    try:
        key = json.dumps([record["provider"], record["settings"]], sort_keys=True)
        if key not in providers:
            providers[key] = find_provider(record["provider"])(**record["settings"])
        status = Run(store=store, run_id=run_id, provider=providers[key]).status()
    except Exception as exc:  # noqa: BLE001 - nor must one platform that fails, or whose SDK is missing
        return {"state": "unknown", "reason": one_line(exc)}
    return {"state": status.state, "category": status.category or None, "reason": first_line(status.reason)}
