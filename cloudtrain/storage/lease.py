"""Keep clients from deleting files of a store that others are staging: each announces its files, and one deletes.

A client announces the files that it will stage in a file of its own below ``staging/``, then looks for the deleting
client's mark. The deleting client sets its mark, then looks for announcements. So one of the two sees the other: the
first waits, the second spares the announced files. The mark is a lease, renewed while its owner lives. The store's own
clock shows its expiry, if its listings have times.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from types import TracebackType
from typing import TypeVar

from ..errors import CloudtrainError, StorageError
from .files import Files

__all__ = ["FOLDER", "MARK", "SECONDS", "GcLease", "Lease", "announce", "withdraw"]

FOLDER = "staging"
MARK = f"{FOLDER}/deleting"
SECONDS = 300.0
"""Seconds for which the mark counts after its last renewal."""
DELETES = "waiting: somebody deletes from this store"
_RENEWED = 10
_PAUSES = (0.1, 2.0)
"""Seconds between two looks, growing."""

Say = Callable[[str], None]
S = TypeVar("S", bound="Lease")


def announce(
    files: Files,
    name: str,
    contents: Iterable[str],
    *,
    seconds: float = SECONDS,
    sleep: Callable[[float], None] = time.sleep,
    say: Say | None = None,
) -> str:
    """Announce that ``contents`` (digests, URLs) will be staged for ``name``, and wait while a client deletes.

    From then on no client deletes them. Returns the key for `withdraw`.
    """
    key = f"{FOLDER}/{name}-{secrets.token_hex(8)}.json"
    record = (json.dumps({"for": name, "contents": sorted(contents)}) + "\n").encode()
    _wait(files, key, record, seconds, sleep, partial(say, DELETES) if say else None)
    return key


def _wait(
    files: Files,
    key: str,
    record: bytes,
    seconds: float,
    sleep: Callable[[float], None],
    say: Callable[[], None] | None,
    mark_key: str = MARK,
) -> bytes | None:
    """Wait until no client has the mark, writing ``record`` to ``key`` before each look; return an expired mark's
    token, or None. A live holder rewrites its token. Object timestamps can shorten the wait but never skip it."""
    seen: bytes | None = None
    since, pause = time.monotonic(), _PAUSES[0]
    while True:
        files.write(key, record)
        found = files.entries(FOLDER)
        mark = found.get(mark_key)
        word = _word(files, mark_key) if mark else None
        if mark is None or word is None:
            return None
        if word != seen:
            seen, since = word, time.monotonic()
        here, watched = found[key].modified if key in found else 0.0, time.monotonic() - since
        aged = bool(here and mark.modified) and here - mark.modified >= seconds
        if watched >= seconds or (aged and watched >= 3 * seconds / _RENEWED):
            return word
        if say and pause == _PAUSES[0]:
            say()
        sleep(pause)
        pause = min(2 * pause, _PAUSES[1])


def _word(files: Files, mark: str) -> bytes | None:
    try:
        return files.read(mark)
    except FileNotFoundError:
        return None


def withdraw(files: Files, key: str) -> None:
    """Remove an announcement once a run.json names its files. If the store forbids that, it stays and does no harm."""
    with contextlib.suppress(CloudtrainError, OSError):
        files.remove(key)


class Lease:
    """A lease for the duration of the block: at most one client holds ``mark`` at a time.

    ``mark`` is its key, below `FOLDER`; ``say`` gets ``waits`` while another client holds it. Call `check` before each
    step. ``started`` is the start by the store's clock; 0 if its listings have no times.
    """

    def __init__(
        self, files: Files, mark: str, *, seconds: float = SECONDS, say: Say | None = None, waits: str = ""
    ) -> None:
        self._files, self._mark, self._seconds = files, mark, seconds
        self._say = partial(say, waits) if say else None
        self._word, self._lost, self._since = b"", False, (0.0, 0.0)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._renew, daemon=True)
        self.started = 0.0

    _late = "held up, so that another client may have taken over; start again"

    def __enter__(self: S) -> S:
        while not self._take():
            time.sleep(_PAUSES[0])
        entry = self._files.entries(FOLDER).get(self._mark)
        self.started = entry.modified if entry else 0.0
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join()
        with contextlib.suppress(CloudtrainError, OSError):
            self.check()  # else another client may hold the mark by now: it expires by itself
            if self._is_ours():
                self._files.remove(self._mark)

    def check(self) -> None:
        """Raise `StorageError` if another client may have taken over."""
        late = max(time.monotonic() - self._since[0], time.time() - self._since[1]) > self._seconds / 2
        if self._lost or late:
            raise StorageError(self._late)

    def _take(self) -> bool:
        key = f"{FOLDER}/gc-{secrets.token_hex(8)}.json"
        try:
            left = _wait(self._files, key, b"{}\n", self._seconds, time.sleep, self._say, self._mark)
        finally:
            withdraw(self._files, key)
        word = self._set_word()
        if left is None:
            self._files.create(self._mark, word)
            return self._is_ours()  # the answer may be lost, and some servers ignore the condition
        if _word(self._files, self._mark) != left:
            return False
        self._files.write(self._mark, word)
        time.sleep(min(2 * _PAUSES[1], self._seconds / 4))  # of several new holders, the last to write has it
        return self._is_ours()

    def _set_word(self) -> bytes:
        self._since = (time.monotonic(), time.time())
        self._word = secrets.token_hex(16).encode()
        return self._word

    def _is_ours(self) -> bool:
        return _word(self._files, self._mark) == self._word

    def _renew(self) -> None:
        while not self._ended.wait(self._seconds / _RENEWED):
            since, word = (time.monotonic(), time.time()), secrets.token_hex(16).encode()
            try:
                if not self._is_ours():
                    self._lost = True
                    return
                self._files.write(self._mark, word)
            except (CloudtrainError, OSError):
                continue  # `check` raises if this lasts too long
            self._since, self._word = since, word


class GcLease(Lease):
    """The lease of the one client that deletes; clients that stage wait for it."""

    _late = "held up while deleting, so that others may be staging again; start again"

    def __init__(self, files: Files, *, seconds: float = SECONDS, say: Say | None = None) -> None:
        super().__init__(files, MARK, seconds=seconds, say=say, waits=DELETES)
