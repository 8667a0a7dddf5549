"""Disks and mounts that fail for a moment, for long, or never answer: ask again, and name the folder."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import TypeVar

from ..errors import StorageError
from .timings import TIMINGS

T = TypeVar("T")

ABSENT = errno.ENOENT, errno.ENOTDIR, errno.ELOOP
CLOSED = errno.EACCES, errno.EPERM


def is_fault(exc: OSError) -> bool:
    """Return whether the disk or mount fails: ``exc`` does not show whether the file is there, or closed to us."""
    return exc.errno not in (*ABSENT, *CLOSED)


def raise_fault(exc: OSError) -> None:
    """Raise ``exc`` if it `is_fault`."""
    if is_fault(exc):
        raise exc


def describe_fault(exc: OSError) -> str:
    """Return the error and its short name: ``Input/output error (EIO)``."""
    return f"{exc.strerror} ({errno.errorcode.get(exc.errno or 0, exc.errno)})"


def names_in(folder: Path) -> list[str]:
    """Return the names in ``folder``, sorted; none if there is no such folder. Raises `OSError`."""
    try:
        return sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []


def ask_again(work: Callable[[], T], patience: Callable[[T], float] = lambda _: 0.0) -> T:
    """Return ``work()``. If a disk or mount fails, call it again for `Timings.mount`. Raises `OSError`.

    ``patience`` returns the seconds for which it is called again because of its result: it may lack something.
    """
    began, pause = time.monotonic(), TIMINGS.mount_pauses[0]
    while True:
        try:
            found = work()
            if time.monotonic() - began >= patience(found):
                return found
        except OSError as exc:
            if not is_fault(exc) or time.monotonic() - began >= TIMINGS.mount:
                raise
        time.sleep(pause)
        pause = min(2 * pause, TIMINGS.mount_pauses[1])


def in_thread(
    work: Callable[[], T], folders: Sequence[Path], until: Callable[[Callable[[], bool]], None] | None = None
) -> T | None:
    """Return ``work()``, called in a thread: a call to a mount whose server is gone never returns.

    ``until`` returns once its argument is true, or sooner: then this function returns None. Raises what ``work``
    raises, and `StorageError` if one of the ``folders`` has not answered for `Timings.mount`.
    """
    called = ThreadPoolExecutor(1, thread_name_prefix="store").submit(work)
    wait([called], 0.1)
    if called.done():
        return called.result()
    with contextlib.ExitStack() as stack:
        looks = [stack.enter_context(contextlib.closing(_Look(folder))) for folder in folders]
        silent: list[Path] = []

        def is_over() -> bool:
            silent.extend(look.folder for look in looks if look.silent)
            return called.done() or bool(silent)

        (until or _until)(is_over)
        if called.done():
            return called.result()
        if silent:  # also if it has just answered: None would mean that the caller must leave
            raise StorageError(f"{silent[0]} has not answered for {TIMINGS.mount:.0f} s")
    return None


def _until(over: Callable[[], bool]) -> None:
    while not over():
        time.sleep(0.1)


class _Look:
    """A thread that looks at a folder again and again, until `close`.

    It asks for the first name: a slow mount may need minutes for all names of a large folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self._over = folder, threading.Event()
        self._silence, self._seen = 0.0, time.monotonic()
        threading.Thread(target=self._loop, name="look", daemon=True).start()

    @property
    def silent(self) -> bool:
        """Return whether the folder has not answered for `Timings.mount`. A time in which this process was stopped does
        not count. Ask often."""
        before, self._seen = self._seen, time.monotonic()
        self._silence += min(self._seen - before, TIMINGS.mount / 10)
        return self._silence >= TIMINGS.mount

    def close(self) -> None:
        self._over.set()

    def _loop(self) -> None:
        while not self._over.is_set():
            with contextlib.suppress(OSError), os.scandir(self.folder) as names:
                next(names, None)
            self._silence = 0.0
            self._over.wait(TIMINGS.mount_pauses[0])
