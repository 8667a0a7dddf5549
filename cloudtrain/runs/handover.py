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
from typing import TYPE_CHECKING, Any

from ..errors import AuthError, CapacityError, NotFoundError, PlatformError, QuotaError, SpecError, StorageError
from ..provider_api.protocol import Layout, Provider, Request, extras_of
from ..store.store import Store, next_of, run_folder, to_json

if TYPE_CHECKING:
    from .run import Run

__all__ = [
    "NOT_RETRIED",
    "NO_MACHINES",
    "REFUSALS",
    "clients_retry",
    "close_left",
    "cut_off",
    "decide",
    "fallbacks_of",
    "forget",
    "has_another",
    "in_flight",
    "may_continue",
    "may_move",
    "may_retry",
    "newer_attempt_exists",
    "refusal_of",
    "refusals_of",
    "region_of_provider",
    "sending",
    "settle_refusal",
    "unsent_attempt",
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
    since, reported = clock(), False
    while notes := _notes(store, run_id, attempt):
        waited, gone = clock() - since, {key: _is_gone(key, record) for key, record in notes.items()}
        if late := [key for key in notes if waited >= (IN_FLIGHT if gone[key] else LEASE)]:
            store.files.discard(late)
        if not all(gone.values()) and not reported:
            say(f"waiting: another client may be sending attempt {attempt} of {store.url}/{run_folder(run_id)}")
            reported = True
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
    noted = {key: record for key, record in _notes(store, run_id, attempt).items() if record is not None}
    for key, record in noted.items():
        if abs(clock() - float(record.get("time") or 0.0)) < LEASE and not _is_gone(key, record):
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


def _notes(store: Store, run_id: str, attempt: int) -> dict[str, dict[str, Any] | None]:
    """Return the notes of the clients that are sending the attempt, by key; None for one that cannot be read."""
    keys = [f"{_folder(run_id, attempt)}/{name}" for name in store.files.names(_folder(run_id, attempt))]
    return {key: store.record(key) for key in keys}


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


# -------------------------------------------------------------------------------------- further attempts and places


def unsent_attempt(run: Run) -> int | None:
    """Return the newest attempt (0 if none is recorded) unless it was sent or refused or the run is over; else None."""
    store, run_id = run.store, run.run_id
    newest = max(store.attempts(run_id), default=0)
    known = any(look(run_id, newest) is not None for look in (store.submitted, store.refused))
    return None if known or store.cancelled(run_id) or store.result(run_id) is not None else newest


def fallbacks_of(run: Run) -> list[dict[str, Any]]:
    """Return the fallback places recorded in run.json (usually none)."""
    try:
        return list(run.record.get("fallbacks") or ())
    except NotFoundError:
        return []


def refusals_of(run: Run, natives: Collection[int] = ()) -> list[dict[str, Any]]:
    """Return every refusal so far, oldest first: earlier places, then refused attempts here (those without a native id
    in ``natives``)."""
    found = list(run.record.get("refusals") or ())
    for k in sorted(set(run.store.attempts(run.run_id)) - set(natives)):
        refused, request = run.store.refused(run.run_id, k), run.store.attempt_request(run.run_id, k)
        if refused and request is not None:
            found.append(refusal_of(run, refused, request.choice))
    return found


def refusal_of(run: Run, refused: Record, choice: int) -> dict[str, Any]:
    """Return this place's refusal for one GPU of the list, with category and reason from ``refused``."""
    gpus = run.job.at(run.provider_name).resources.gpu
    return {
        "run": run.url,
        "provider": run.provider_name,
        "place": region_of_provider(run.provider),
        "gpu": gpus[choice] if choice < len(gpus) else None,
        "category": refused["category"],
        "reason": refused["reason"],
    }


def close_left(left: Store, store: Store, run_id: str, result: Record) -> None:
    """Finish the handover from ``left`` to ``store`` if its client died: pass on a cancel, and keep the result."""
    if left.result(run_id) is not None:
        return
    with contextlib.suppress(AuthError):  # a client without write access cannot start it either
        if left.cancelled(run_id):
            store.cancel(run_id)
    # Not earlier: a client that looks for unfinished runs in the store that was left must still find it.
    if store.attempts(run_id) or store.cancelled(run_id) or store.result(run_id) is not None:
        with contextlib.suppress(AuthError, StorageError):  # read-only verbs come here too
            left.write_result(run_id, result)


def clients_retry(run: Run, native_id: str | None) -> bool:
    """Return whether clients start further attempts: as the provider says, or in place of a killed supervisor."""
    if run.provider.retried_by == "client":
        return True
    return native_id is not None and extras_of(run.provider).abandoned(native_id)


def may_retry(run: Run, result: Record) -> bool:
    """Return whether a waiting client may start another attempt here after this failure."""
    store, run_id = run.store, run.run_id
    if result["state"] != "failed" or store.cancelled(run_id) or not clients_retry(run, result["native_id"]):
        return False
    newest = max(store.attempts(run_id), default=0)
    requests = [store.attempt_request(run_id, k) for k in range(newest + 1)]
    category, last = result["category"], requests[-1]
    # Another GPU of the list is not a retry: the job has not had its machines yet.
    choices = {request.choice for request in requests if request is not None}
    another = category in NO_MACHINES and last is not None and has_another(run, last, category)
    retries = run.job.at(run.provider_name).retries
    more = newest - max(0, len(choices) - 1) < retries and category not in NOT_RETRIED
    # A refused first request is not a failed attempt: its submitter got an error.
    more = more and not (newest == 0 and store.refused(run_id, 0))
    return another or more or newer_attempt_exists(store, run_id, newest, result)


def may_move(run: Run, result: Record) -> bool:
    """Return whether the run, which ended with ``result``, may move to another place: it never ran and was not
    cancelled."""
    if result["state"] != "failed" or result["category"] not in NO_MACHINES or not fallbacks_of(run):
        return False
    store, run_id = run.store, run.run_id
    started = any(row["started"] for row in result["attempts"])  # by the platform's word
    ran = started or result["checkpoint"] or store.starts(run_id) or store.exits(run_id)
    return not ran and not store.cancelled(run_id)


def may_continue(run: Run, result: Record) -> bool:
    """Return whether a waiting client may start another attempt after a failure, here or in another place."""
    return may_retry(run, result) or may_move(run, result)


def has_another(run: Run, request: Request, category: str) -> bool:
    """Return whether the next GPU of the list after ``request`` can be requested here."""
    job, choice = run.job.at(run.provider_name), request.next_choice(category)
    if run.provider.retried_by != "client" or choice >= len(job.resources.gpu):
        return False
    try:
        run.provider.plan(job, Layout.from_dict(run.record["layout"]), choice=choice)
    except SpecError:
        return False
    return True
