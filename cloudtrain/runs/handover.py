"""From a place that has no machines to the next one of a run's list: who may, once, and how a handle gets there.

Each place is a run of its own, with the same id, in that place's store; its run.json names those that may follow it
(``fallbacks``) and what the ones before have said (``refusals``). Moving on is a record, ``next.json``, that is created
exclusively in the folder of the run that is left, and only once nothing of that run lives or can come to life:

* it ended for want of machines and never ran, by the platform's word; or
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
from ..provider_api.protocol import Layout, Provider, Request
from ..settings.settings import Settings
from ..store.store import Store, run_folder, to_json

__all__ = [
    "NOT_RETRIED",
    "NO_MACHINES",
    "REFUSALS",
    "Moving",
    "cut_off",
    "decide",
    "forget",
    "in_flight",
    "next_of",
    "overtaken",
    "place_of",
    "sending",
    "settle",
]

REFUSALS = (CapacityError, PlatformError, QuotaError, SpecError)
"""What a provider raises that will not have a request."""
NO_MACHINES = frozenset({"capacity", "quota"})
"""What another GPU of the list, or another place, may cure."""
LEASE = 300.0
"""Seconds for which a client that may be sending is waited for: `patiently` asks for 60 s, and one call takes at most
minutes."""
IN_FLIGHT = 1.0
"""Seconds that what a dead client has sent may still take to arrive."""
_PAUSE = 0.2
#: What no further attempt would cure.
NOT_RETRIED = frozenset({"cancelled", "timeout", "quota", "auth", "spec", "image"})

Record = Mapping[str, Any]
_MINE: set[str] = set()
"""What this process is sending now."""


# ------------------------------------------------------------------------------------------------------- who is sending


@contextlib.contextmanager
def sending(store: Store, run_id: str, attempt: int) -> Iterator[None]:
    """Within, this client may be sending the attempt. It is over by an answer; after any other end it may have come."""
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


def settle(
    store: Store,
    run_id: str,
    attempt: int,
    *,
    say: Callable[[str], None] = lambda _: None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Wait until no other client can be sending the attempt any more; who comes from now on sees that it was refused.

    A client of this machine that is gone is waited for until what it sent must have come, any other that does not
    answer for `LEASE` seconds.
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
    """Return whether a client that may be alive has noted, less than `LEASE` seconds ago, that it sends the attempt.

    ``clock`` gives Unix seconds. Unlike `settle` it writes nothing, so a verb that only reads may ask. It waits only
    where clients have died, until what they sent must have come.
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
    """Return whether a client has begun to send the attempt and was not answered: the platform may have it."""
    return bool(store.files.names(_folder(run_id, attempt)))


def forget(store: Store, run_id: str) -> None:
    """Remove what clients that died have noted of sending attempts of a run that is over."""
    store.files.discard([key for key in store.files.list(f"{run_folder(run_id)}/attempts") if "/sending/" in key])


def _folder(run_id: str, attempt: int) -> str:
    return f"{run_folder(run_id)}/attempts/{int(attempt)}/sending"


def _is_gone(key: str, record: Record | None) -> bool:
    """Whether the client that wrote it is known to have ended, or to send no more."""
    own = _self()
    if record is None or not own.get("machine") or record.get("machine") != own["machine"]:
        return False
    if record.get("process") == own["process"]:
        return key not in _MINE
    return _process(str(record.get("process")).partition(" ")[0]) != record.get("process")


@cache
def _machine() -> str:
    """This machine since it was started, as far as its processes can see each other; empty where nothing tells."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as stream:
            return f"{stream.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except (OSError, AttributeError, ValueError):
        return ""


def _process(pid: str) -> str:
    """A process and when it began, so that another one of the same number is another one; empty when there is none."""
    try:
        with open(f"/proc/{int(pid)}/stat", encoding="utf-8", errors="replace") as stream:
            fields = stream.read().rpartition(")")[2].split()
    except (OSError, ValueError):
        return ""
    return "" if fields[0] in "ZX" else f"{pid} {fields[19]}"


def _self() -> dict[str, str]:
    return {"machine": _machine(), "process": _process(str(os.getpid()))}


# ------------------------------------------------------------------------------------------------------------ decisions


def next_of(store: Store, run_id: str) -> dict[str, Any] | None:
    """The decision to leave the run: ``run``, the URL of the one that follows it, and its ``result``; None: none.

    `StorageError` for a file that says neither.
    """
    key = f"{run_folder(run_id)}/next.json"
    noted = store.record(key)
    if noted is not None and not (isinstance(noted.get("run"), str) and isinstance(noted.get("result"), dict)):
        raise StorageError(f"{store.url}/{key} does not say where the run went on; it is none of cloudtrain's")
    return noted


def decide(store: Store, run_id: str, following: str, result: Record) -> bool:
    """Leave the run, which ended with ``result``, for the one at ``following``; False: it is left for another one."""
    record = {"run": following, "result": dict(result), "time": time.time()}
    if store.files.create(f"{run_folder(run_id)}/next.json", to_json(record)):
        return True
    noted = next_of(store, run_id)
    return noted is not None and noted.get("run") == following


def overtaken(store: Store, run_id: str, newest: int, result: Record) -> bool:
    """Whether ``result`` is of an earlier attempt than ``newest``, which another client has recorded meanwhile."""
    if not newest or store.refused(run_id, newest):
        return False
    noted = store.submitted(run_id, newest)
    return noted is None or str(noted["native_id"]) != result["native_id"]


def place_of(provider: Provider) -> str:
    """Where the provider starts jobs, as its settings say: a region; empty where none says."""
    settings = getattr(provider, "settings", None)
    specs = dataclasses.fields(settings) if dataclasses.is_dataclass(settings) else ()
    return ", ".join(str(getattr(settings, spec.name)) for spec in specs if spec.metadata.get("place"))


# ------------------------------------------------------------------------------------------------------------- handles


class Moving:
    """The part of a `Run` that knows of further attempts and places."""

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
    """Whether it came here from another place, so that it is decided that the run goes on here."""

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
        """The name of the provider that the run is on."""
        return str(self.record["provider"])

    @property
    def provider(self) -> Provider:
        """The provider, with the settings that the run was submitted with."""
        if self._provider is None:
            self._provider = self._settings.provider_of(self.record)
        return self._provider

    @property
    def _fallbacks(self) -> list[dict[str, Any]]:
        """What may follow this run, as it is recorded; empty for most."""
        try:
            return list(self.record.get("fallbacks") or ())
        except NotFoundError:
            return []

    def _refusals(self, natives: Collection[int] = ()) -> list[dict[str, Any]]:
        """Who had no machines, in order: the places before, and of this one the requests that were refused, which are
        attempts without a native id in ``natives``."""
        found = list(self.record.get("refusals") or ())
        for k in sorted(set(self.store.attempts(self.run_id)) - set(natives)):
            refused, request = self.store.refused(self.run_id, k), self.store.attempt_request(self.run_id, k)
            if refused and request is not None:
                found.append(self._refusal(refused, choice=request.choice))
        return found

    def _refusal(self, said: Record, choice: int) -> dict[str, Any]:
        """Why this place had no machines for one GPU of the list: its category and reason as ``said``."""
        gpus = self.job.at(self.provider_name).resources.gpu
        return {
            "run": f"{self.store.url}/{run_folder(self.run_id)}",
            "provider": self.provider_name,
            "place": place_of(self.provider),
            "gpu": gpus[choice] if choice < len(gpus) else None,
            "category": said["category"],
            "reason": said["reason"],
        }

    def _lead(self) -> bool:
        """Become the handle of the newest run that this one was left for; whether there is one.

        Who does so also keeps the result of each that was left, should whoever left it have died before.
        """
        moved = False
        while (following := self._fallbacks[:1]) and (noted := next_of(self.store, self.run_id)) is not None:
            left, (record,) = self.store, following
            self._provider = self._settings.provider_of(record)
            self.store = Store(record["layout"]["store"], storage=self._provider.storage, moving=self._settings.moving)
            self._record, self._led, moved = None, True, True
            for known in (self._natives, self._refused, self._over, self._retried, self._began):
                known.clear()
            self._unsent = self._max_wait = None  # they are of the place that was left
            if left.result(self.run_id) is None:
                self._close(left, noted["result"])
        return moved

    def _close(self, left: Store, result: Record) -> None:
        """Finish what whoever left that store for this one may have died before: pass on a cancel, keep the result."""
        run_id = self.run_id
        with contextlib.suppress(AuthError):  # who may not write cannot begin it either
            if left.cancelled(run_id):
                self.store.cancel(run_id)
        # Not before: who looks at what is not over in the store that was left must find what is still to begin.
        if self.store.attempts(run_id) or self.store.cancelled(run_id) or self.store.result(run_id) is not None:
            with contextlib.suppress(AuthError, StorageError):  # verbs that only read come here too
                left.write_result(run_id, result)

    def _may_retry(self, result: Record) -> bool:
        """Whether a waiting client may still start another attempt of a run that failed so."""
        if result["state"] != "failed" or self.provider.retried_by != "client" or self.store.cancelled(self.run_id):
            return False
        newest = max(self.store.attempts(self.run_id), default=0)
        requests = [self.store.attempt_request(self.run_id, k) for k in range(newest + 1)]
        job, category = self.job.at(self.provider_name), result["category"]
        # Another GPU of the list is no retry: the job has not had its machines yet.
        choices = {request.choice for request in requests if request is not None}
        last = requests[-1]
        another = category in NO_MACHINES and last is not None and self._has_another(last, category)
        more = newest - max(0, len(choices) - 1) < job.retries and category not in NOT_RETRIED
        # A first request that was refused is no attempt that failed: the submitter was told that nothing runs.
        more = more and not (newest == 0 and self.store.refused(self.run_id, 0))
        return another or more or overtaken(self.store, self.run_id, newest, result)

    def _may_move(self, result: Record) -> bool:
        """Whether the run, which ended with ``result``, may be left for another place: it never ran, and nobody has
        cancelled it."""
        if result["state"] != "failed" or result["category"] not in NO_MACHINES or not self._fallbacks:
            return False
        store, run_id = self.store, self.run_id
        started = any(row["started"] for row in result["attempts"])  # by the platform's word
        ran = started or result["checkpoint"] or store.starts(run_id) or store.exits(run_id)
        return not ran and not store.cancelled(run_id)

    def _follows(self, request: Request, category: str) -> bool:
        """Whether another request may follow this one, once it was refused for ``category``."""
        return category in NO_MACHINES and (bool(self._fallbacks) or self._has_another(request, category))

    def _has_another(self, request: Request, category: str) -> bool:
        """Whether the GPU of the list that is next after ``request`` can be asked for here."""
        job, choice = self.job.at(self.provider_name), request.next_choice(category)
        if self.provider.retried_by != "client" or choice >= len(job.resources.gpu):
            return False
        try:
            self.provider.plan(job, Layout.from_dict(self.record["layout"]), choice=choice)
        except SpecError:
            return False
        return True
