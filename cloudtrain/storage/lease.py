"""Let one client at a time do a thing in a store: a lease, by conditional writes. Announce what is being staged.

A client announces the files that it will stage in a file of its own below ``staging/``, then looks for the deleting
client's lease. The deleting client takes its lease, then looks for announcements. So one of the two sees the other: the
first waits, the second spares the announced files.

A holder renews its lease. A lease that a client saw unchanged for its time, by that client's own clock, has expired,
and exactly one client replaces it. A released lease is marked so, and its file stays: a removal could come late, and
hit another client's lease. A file that an earlier version wrote counts as a lease of an unknown holder, and expires
like any other, if the store can replace it.

A store that cannot replace a file gets a new one for each change: ``<key>.versions/<number>``. The highest number
counts. To change version n, a client exclusively creates n + 1, so one client succeeds: a takeover and a renewal cannot
both succeed. A release removes versions below the highest that are older than it by more than the lease's time. A
client that creates a removed number again read its version before that time, so `Lease.check` refuses it, and other
clients read the highest.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from types import TracebackType
from typing import Any

from ..errors import CloudtrainError, StorageError
from .files import Files, Loaded
from .timings import CLIENT_TIMINGS

FOLDER = "staging"
MARK = f"{FOLDER}/deleting"
DELETES = "waiting: another client deletes from this store"
_RENEWED = 10
_VERSIONS = ".versions"
_CLIENT = secrets.token_hex(8)
"""Tells this process from others where `_machine` is unknown; a forked child has another process id."""
_HELD: set[str] = set()
"""Tokens of the leases that this process holds or is taking."""

Say = Callable[[str], None]


def announce(
    files: Files, name: str, contents: Iterable[str], *, seconds: float = CLIENT_TIMINGS.lease, say: Say | None = None
) -> str:
    """Announce that ``contents`` (digests, URLs) will be staged for ``name``, and wait while a client deletes.

    From then on no client deletes them. Returns the key for `withdraw`.
    """
    key = f"{FOLDER}/{name}-{secrets.token_hex(8)}.json"
    files.write(key, (json.dumps({"for": name, "contents": sorted(contents)}) + "\n").encode())
    Lease(files, MARK, seconds=seconds, say=say, waits=DELETES).wait()
    return key


def withdraw(files: Files, key: str) -> None:
    """Remove an announcement once a run.json names its files. If the store forbids that, it stays and does no harm."""
    with contextlib.suppress(CloudtrainError, OSError):
        files.remove(key)


class Lease:
    """A lease for the duration of the block: at most one client holds the file ``key`` at a time.

    ``say`` gets ``waits`` while another client holds it. Call `check` before each step. ``after`` is the time in
    seconds after which the lease of a process of this machine that has ended is free. Set ``kept`` in the block to
    leave the lease to its expiry. ``took_over`` is None, or the seconds for which this client saw no sign of the last
    holder, which did not release it.
    """

    def __init__(
        self,
        files: Files,
        key: str,
        *,
        seconds: float = CLIENT_TIMINGS.lease,
        after: float = CLIENT_TIMINGS.lease_ended,
        say: Say | None = None,
        waits: str = "",
    ) -> None:
        self._files, self._key, self._seconds, self._after = files, key, seconds, after
        self._say = partial(say, waits) if say else None
        self._token, self._lost, self._since = secrets.token_hex(16), False, (0.0, 0.0)
        self._seen = ("", 0.0)
        self._ended, self._renewing = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._renew, daemon=True)
        self.kept = False
        self.took_over: float | None = None

    def __enter__(self) -> Lease:
        _HELD.add(self._token)
        try:
            self._until(lambda: self._set(self._token))
        except BaseException:
            _HELD.discard(self._token)
            raise
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join()
        try:
            with contextlib.suppress(CloudtrainError, OSError):
                if not self.kept:
                    self._replace_ours("")
        finally:
            _HELD.discard(self._token)

    def wait(self) -> None:
        """Wait until no client holds the lease, without taking it. An expired one is marked as released."""
        self._until(lambda: self._set(""))

    def check(self) -> None:
        """Raise `StorageError` if another client may have taken over."""
        late = max(time.monotonic() - self._since[0], time.time() - self._since[1]) > self._seconds / 2
        if self._lost or late:
            why = "this client was held up for too long, so another client may have taken over"
            raise StorageError(why, hint="run the same command again")

    def _until(self, step: Callable[[], bool]) -> None:
        pause = CLIENT_TIMINGS.lease_pauses[0]
        while not step():
            if self._say and pause == CLIENT_TIMINGS.lease_pauses[0]:
                self._say()
            time.sleep(pause)
            pause = min(2 * pause, CLIENT_TIMINGS.lease_pauses[1])

    def _set(self, holder: str) -> bool:
        """Write ``holder``, a token or "" for none. Return False if another client holds the lease."""
        since, found = (time.monotonic(), time.time()), load_lease(self._files, self._key)
        if found is not None and not self._is_free(found):
            return False
        if not holder and (found is None or is_released(found)):
            return True
        try:
            self._swap(found, holder)
        except FileExistsError:
            return False
        self._since = since
        self.took_over = None if found is None or is_released(found) else since[0] - self._seen[1]
        return True

    def _is_free(self, found: Loaded) -> bool:
        if is_released(found):
            return True
        if found.version != self._seen[0]:
            self._seen = (found.version, time.monotonic())
        watched = time.monotonic() - self._seen[1]
        record = _content(found)
        least = min(self._after, CLIENT_TIMINGS.lease_given_up) if _is_ours(record) else self._after
        return watched >= self._seconds or (watched >= least and _has_ended(record))

    def _renew(self) -> None:
        while not self._ended.wait(self._seconds / _RENEWED):
            with contextlib.suppress(CloudtrainError, OSError):  # `check` raises if this lasts too long
                if not self.renew():
                    return

    def renew(self) -> bool:
        """Renew the lease, as its thread does. Return False if another client has it."""
        with self._renewing:
            since = (time.monotonic(), time.time())
            try:
                self._lost = not self._replace_ours(self._token)
            except FileExistsError:
                self._lost = True
            if not self._lost:
                self._since = since
            return not self._lost

    def _replace_ours(self, holder: str) -> bool:
        """Write ``holder`` over our own lease; return False if it is not ours any more."""
        found = load_lease(self._files, self._key)
        if found is None or _content(found).get("holder") != self._token:
            return False
        self._swap(found, holder)
        if not holder and not self._files.swaps:
            self._clean_up()
        return True

    def _swap(self, found: Loaded | None, holder: str) -> None:
        """Write ``holder`` over the version ``found``. Raises FileExistsError if there is another version."""
        version = found and found.version
        if self._files.swaps:
            self._files.swap(self._key, version, _record(holder))
        else:
            self._files.swap(f"{self._key}{_VERSIONS}/{int(version or 0) + 1}", None, _record(holder))

    def _clean_up(self) -> None:
        """Remove versions that no client can still count as the newest, by the store's clock."""
        found = self._files.entries(self._key + _VERSIONS)
        newest = max(found, key=_number, default="")
        dated = [key for key, entry in found.items() if key != newest and entry.modified]
        old = [key for key in dated if found[newest].modified - found[key].modified > self._seconds]
        if old:
            self._files.discard(old)


def load_lease(files: Files, key: str) -> Loaded | None:
    """Return a lease's file. Its ``version`` is a number if the store cannot replace it."""
    if files.swaps:
        return files.load(key)
    folder = key + _VERSIONS
    number = max((_number(name) for name in files.names(folder)), default=0)
    if not number:
        return None
    # A version that has been removed since then counts as one of an unknown holder until the next look.
    found = files.load(f"{folder}/{number}") or Loaded(b"", "", 0.0)
    return found._replace(version=str(number))


def _number(key: str) -> int:
    """Return the number of a version; 0 for any other file."""
    name = key.rpartition("/")[2]
    return int(name) if name.isdecimal() else 0


def held_leases(files: Files, folder: str, seen: dict[str, tuple[str, float]], now: float) -> list[str]:
    """Return the leases in ``folder`` that are not released, and that this client has not seen unchanged for their
    time. ``seen`` keeps the versions between two calls, ``now`` is in seconds of the caller's clock."""
    held = []
    for key in sorted({f"{folder}/{name.removesuffix(_VERSIONS)}" for name in files.names(folder)}):
        found = load_lease(files, key)
        if found is None or is_released(found):
            continue
        version, since = seen.get(key, ("", now))
        seen[key] = (found.version, since if found.version == version else now)
        if now - seen[key][1] < CLIENT_TIMINGS.lease:
            held.append(key)
    return held


def is_mark(key: str) -> bool:
    """Return whether a file below `FOLDER` is the deleting client's lease, and no announcement."""
    return key == MARK or key.startswith(f"{MARK}{_VERSIONS}/")


def is_released(found: Loaded) -> bool:
    """Return whether a lease's file says that no client holds it."""
    return _content(found).get("holder") == ""


def _content(found: Loaded) -> Mapping[str, Any]:
    """Return the record in a lease's file; an empty one for a file of an earlier version."""
    try:
        value = json.loads(found.data)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _record(holder: str) -> bytes:
    """Return the content of a lease's file. No two are equal, as `Files.swap` demands."""
    return (json.dumps({"holder": holder, **_self(), "number": secrets.token_hex(8)}) + "\n").encode()


def _has_ended(record: Mapping[str, Any]) -> bool:
    """Return whether the holder was a process of this machine that has ended, or has given up the lease."""
    if _is_ours(record):
        return record.get("holder") not in _HELD
    if not _machine() or record.get("machine") != _machine():
        return False
    pid = str(record.get("process")).partition(" ")[0]
    found = _process(pid)
    return found != record.get("process") and not (found == "" and _is_of_another_user(pid))


def _is_ours(record: Mapping[str, Any]) -> bool:
    """Return whether this process wrote the record."""
    return bool(record.get("client") == _self()["client"])


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


def _is_of_another_user(pid: str) -> bool:
    """Return whether another user's process has this id. A system may hide its folder (``hidepid`` of /proc)."""
    try:
        os.kill(int(pid), 0)
    except PermissionError:
        return True
    except (OSError, OverflowError, ValueError):
        pass
    return False


def _self() -> dict[str, str]:
    pid = os.getpid()
    return {"machine": _machine(), "process": _process(str(pid)), "client": f"{pid}-{_CLIENT}"}
