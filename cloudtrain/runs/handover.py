"""Hand a run over to its next fallback place. Exactly one client can record the handover.

Each place has a run of its own, with the same id, in its own store. Its run.json names the places that may follow
(``fallbacks``) and the refusals of earlier ones (``refusals``). A handover is a record, ``next.json``, created
exclusively in the folder of the run that is left. By then nothing of that run lives or can come to life:

* the run ended for lack of machines and never ran, by the platform's word; or
* the platform refused it. A client that sends an attempt first notes that it does, and then looks whether the attempt
  was refused. A client that is refused first notes the refusal, then waits for the clients that are sending, and then
  asks the platform. So the second client always sees the first client's record. A refused run is ended the same way.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cache
from typing import Any

from ..errors import AuthError, CapacityError, NotFoundError, PlatformError, QuotaError, SpecError, StorageError
from ..job.job import Job
from ..provider_api.protocol import Layout, Provider, Request, extras_of
from ..settings.settings import Settings
from ..store.store import Store, next_of, run_folder, to_json

__all__ = [
    "NOT_RETRIED",
    "NO_MACHINES",
    "REFUSALS",
    "HandoverMixin",
    "cut_off",
    "decide",
    "forget",
    "in_flight",
    "newer_attempt_exists",
    "region_of_provider",
    "sending",
    "settle_refusal",
]

REFUSALS = (CapacityError, PlatformError, QuotaError, SpecError)
"""Errors with which a provider refuses a request."""
NO_MACHINES = frozenset({"capacity", "quota"})
"""Categories that another GPU of the list, or another place, may cure."""
LEASE = 300.0
"""Seconds to wait for a client that may be sending: `patiently` asks for 60 s, and one call takes at most minutes."""
IN_FLIGHT = 1.0
"""Seconds in which a dead client's request may still arrive."""
_PAUSE = 0.2
#: Categories that no further attempt would cure.
NOT_RETRIED = frozenset({"cancelled", "timeout", "quota", "auth", "spec", "image"})

Record = Mapping[str, Any]
_MINE: set[str] = set()
"""Keys of the attempts that this process is sending."""


# --------------------------------------------------------------------------------------------- clients that are sending


@contextlib.contextmanager
def sending(store: Store, run_id: str, attempt: int) -> Iterator[None]:
    """Note that this client is sending the attempt. An answer removes the note; after any other end it stays."""
    key = f"{_folder(run_id, attempt)}/{secrets.token_hex(8)}.json"
    store.files.write(key, to_json({**_self(), "time": time.time()}))
    _MINE.add(key)
    try:
        yield
    except (AuthError, *REFUSALS):
        store.files.discard([key])
        raise
    else:
        store.files.discard([key])
    finally:
        _MINE.discard(key)


def settle_refusal(
    store: Store,
    run_id: str,
    attempt: int,
    *,
    say: Callable[[str], None] = lambda _: None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Wait until no other client can be sending the attempt; clients that come later see that it was refused.

    A dead client of this machine is waited for until its request must have arrived; any other silent client for `LEASE`
    seconds.
    """
    since, told = clock(), False
    while names := store.files.names(_folder(run_id, attempt)):
        waited, alive = clock() - since, False
        for name in names:
            key = f"{_folder(run_id, attempt)}/{name}"
            gone = _is_gone(key, store.record(key))
            if waited >= (IN_FLIGHT if gone else LEASE):
                store.files.discard([key])
            alive = alive or not gone
        if alive and not told:
            say(f"waiting: another client may be sending attempt {attempt} of {store.url}/{run_folder(run_id)}")
            told = True
        sleep(_PAUSE)


def in_flight(
    store: Store,
    run_id: str,
    attempt: int,
    *,
    clock: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Return whether a possibly live client has noted, less than `LEASE` seconds ago, that it sends the attempt.

    ``clock`` gives Unix seconds. Unlike `settle_refusal` it writes nothing, so read-only verbs may call it. It
    waits only for the requests of dead clients, until they must have arrived.
    """
    keys = [f"{_folder(run_id, attempt)}/{name}" for name in store.files.names(_folder(run_id, attempt))]
    noted = {key: record for key in keys if (record := store.record(key)) is not None}
    if any(
        abs(clock() - float(each.get("time") or 0.0)) < LEASE and not _is_gone(key, each) for key, each in noted.items()
    ):
        return True
    if noted:
        sleep(IN_FLIGHT)
    return False


def cut_off(store: Store, run_id: str, attempt: int) -> bool:
    """Return whether a client has begun to send the attempt without an answer: the platform may have it."""
    return bool(store.files.names(_folder(run_id, attempt)))


def forget(store: Store, run_id: str) -> None:
    """Remove the notes of dead clients about sending attempts of a finished run."""
    store.files.discard([key for key in store.files.list(f"{run_folder(run_id)}/attempts") if "/sending/" in key])


def _folder(run_id: str, attempt: int) -> str:
    return f"{run_folder(run_id)}/attempts/{int(attempt)}/sending"


def _is_gone(key: str, record: Record | None) -> bool:
    """Return whether the client that wrote the record is known to have ended, or to have stopped sending."""
    own = _self()
    if record is None or not own.get("machine") or record.get("machine") != own["machine"]:
        return False
    if record.get("process") == own["process"]:
        return key not in _MINE
    return _process(str(record.get("process")).partition(" ")[0]) != record.get("process")


@cache
def _machine() -> str:
    """Return an id of this machine's boot and process namespace; empty if unknown."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as stream:
            return f"{stream.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except (OSError, AttributeError, ValueError):
        return ""


def _process(pid: str) -> str:
    """Return a process id with its start time, which tells reused ids apart; empty if there is no such process."""
    try:
        with open(f"/proc/{int(pid)}/stat", encoding="utf-8", errors="replace") as stream:
            fields = stream.read().rpartition(")")[2].split()
    except (OSError, ValueError):
        return ""
    return "" if fields[0] in "ZX" else f"{pid} {fields[19]}"


def _self() -> dict[str, str]:
    return {"machine": _machine(), "process": _process(str(os.getpid()))}


# ------------------------------------------------------------------------------------------------------------ decisions


def decide(store: Store, run_id: str, following: str, result: Record) -> bool:
    """Record that the run ended with ``result`` and continues at ``following``. Return False if another place won."""
    record = {"run": following, "result": dict(result), "time": time.time()}
    if store.files.create(f"{run_folder(run_id)}/next.json", to_json(record)):
        return True
    noted = next_of(store, run_id)
    return noted is not None and noted.get("run") == following


def newer_attempt_exists(store: Store, run_id: str, newest: int, result: Record) -> bool:
    """Return whether ``result`` is of an attempt before ``newest``, which another client has recorded."""
    if not newest or store.refused(run_id, newest):
        return False
    noted = store.submitted(run_id, newest)
    return noted is None or str(noted["native_id"]) != result["native_id"]


def region_of_provider(provider: Provider) -> str:
    """Return the region in the provider's settings; empty if they name none."""
    settings = getattr(provider, "settings", None)
    specs = dataclasses.fields(settings) if dataclasses.is_dataclass(settings) else ()
    return ", ".join(str(getattr(settings, spec.name)) for spec in specs if spec.metadata.get("place"))


# ------------------------------------------------------------------------------------------------------------- handles


class HandoverMixin:
    """The part of a `Run` that handles further attempts and places."""

    store: Store
    run_id: str
    _record: dict[str, Any] | None
    _settings: Settings
    _provider: Provider | None
    _natives: dict[int, str]
    _refused: set[int]
    _unsent: int | None
    _max_wait: object | None
    _over: dict[int, float]
    _retried: dict[int, bool]
    _began: dict[int, float]
    _led: bool = False
    """True if it came here from another place, so that the run is known to continue here."""

    @property
    def record(self) -> dict[str, Any]:
        """The run's record, run.json: the job, the provider and its settings, the code."""
        if self._record is None:
            self._record = self.store.run(self.run_id, needs=("provider", "settings", "job"))
        return self._record

    @property
    def job(self) -> Job:
        """The job that was submitted."""
        return Job.from_dict(self.record["job"])

    @property
    def provider_name(self) -> str:
        """The name of the run's provider."""
        return str(self.record["provider"])

    @property
    def provider(self) -> Provider:
        """The provider, with the settings of the submission."""
        if self._provider is None:
            self._provider = self._settings.provider_of(self.record)
        return self._provider

    @property
    def _fallbacks(self) -> list[dict[str, Any]]:
        """The fallback places recorded in run.json (usually none)."""
        try:
            return list(self.record.get("fallbacks") or ())
        except NotFoundError:
            return []

    def _refusals(self, natives: Collection[int] = ()) -> list[dict[str, Any]]:
        """Return every refusal so far, oldest first: earlier places, then refused attempts here (those without a native
        id in ``natives``)."""
        found = list(self.record.get("refusals") or ())
        for k in sorted(set(self.store.attempts(self.run_id)) - set(natives)):
            refused, request = self.store.refused(self.run_id, k), self.store.attempt_request(self.run_id, k)
            if refused and request is not None:
                found.append(self._refusal(refused, choice=request.choice))
        return found

    def _refusal(self, said: Record, choice: int) -> dict[str, Any]:
        """Return this place's refusal for one GPU of the list, with category and reason from ``said``."""
        gpus = self.job.at(self.provider_name).resources.gpu
        return {
            "run": f"{self.store.url}/{run_folder(self.run_id)}",
            "provider": self.provider_name,
            "place": region_of_provider(self.provider),
            "gpu": gpus[choice] if choice < len(gpus) else None,
            "category": said["category"],
            "reason": said["reason"],
        }

    def _lead(self) -> bool:
        """Switch this handle to the run's newest place. Return True if it had moved.

        Also keeps the result of each place that was left, in case the client that left it has died.
        """
        moved = False
        while (following := self._fallbacks[:1]) and (noted := next_of(self.store, self.run_id)) is not None:
            left, (record,) = self.store, following
            self._provider = self._settings.provider_of(record)
            self.store = Store(record["layout"]["store"], storage=self._provider.storage, moving=self._settings.moving)
            self._record, self._led, moved = None, True, True
            for known in (self._natives, self._refused, self._over, self._retried, self._began):
                known.clear()
            self._unsent = self._max_wait = None  # they belong to the previous place
            if left.result(self.run_id) is None:
                self._close(left, noted["result"])
        return moved

    def _close(self, left: Store, result: Record) -> None:
        """Finish the handover from ``left`` if its client died: pass on a cancel, and keep the result."""
        run_id = self.run_id
        with contextlib.suppress(AuthError):  # a client without write access cannot start it either
            if left.cancelled(run_id):
                self.store.cancel(run_id)
        # Not earlier: a client that looks for unfinished runs in the store that was left must still find it.
        if self.store.attempts(run_id) or self.store.cancelled(run_id) or self.store.result(run_id) is not None:
            with contextlib.suppress(AuthError, StorageError):  # read-only verbs come here too
                left.write_result(run_id, result)

    def _clients_retry(self, native_id: str | None) -> bool:
        """Return whether clients start further attempts: as the provider says, or in place of a killed supervisor."""
        if self.provider.retried_by == "client":
            return True
        return native_id is not None and extras_of(self.provider).abandoned(native_id)

    def _may_retry(self, result: Record) -> bool:
        """Return whether a waiting client may start another attempt after this failure."""
        if result["state"] != "failed" or self.store.cancelled(self.run_id):
            return False
        if not self._clients_retry(result["native_id"]):
            return False
        newest = max(self.store.attempts(self.run_id), default=0)
        requests = [self.store.attempt_request(self.run_id, k) for k in range(newest + 1)]
        job, category = self.job.at(self.provider_name), result["category"]
        # Another GPU of the list is not a retry: the job has not had its machines yet.
        choices = {request.choice for request in requests if request is not None}
        last = requests[-1]
        another = category in NO_MACHINES and last is not None and self._has_another(last, category)
        more = newest - max(0, len(choices) - 1) < job.retries and category not in NOT_RETRIED
        # A refused first request is not a failed attempt: its submitter got an error.
        more = more and not (newest == 0 and self.store.refused(self.run_id, 0))
        return another or more or newer_attempt_exists(self.store, self.run_id, newest, result)

    def _may_move(self, result: Record) -> bool:
        """Return whether the run, which ended with ``result``, may move to another place: it never ran and was not
        cancelled."""
        if result["state"] != "failed" or result["category"] not in NO_MACHINES or not self._fallbacks:
            return False
        store, run_id = self.store, self.run_id
        started = any(row["started"] for row in result["attempts"])  # by the platform's word
        ran = started or result["checkpoint"] or store.starts(run_id) or store.exits(run_id)
        return not ran and not store.cancelled(run_id)

    def _follows(self, request: Request, category: str) -> bool:
        """Return whether another request may follow this one after a refusal for ``category``."""
        return category in NO_MACHINES and (bool(self._fallbacks) or self._has_another(request, category))

    def _has_another(self, request: Request, category: str) -> bool:
        """Return whether the next GPU of the list after ``request`` can be requested here."""
        job, choice = self.job.at(self.provider_name), request.next_choice(category)
        if self.provider.retried_by != "client" or choice >= len(job.resources.gpu):
            return False
        try:
            self.provider.plan(job, Layout.from_dict(self.record["layout"]), choice=choice)
        except SpecError:
            return False
        return True
