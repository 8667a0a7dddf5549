"""Mirror files that change while the script runs whole into ``live/``, in a thread of their own, one after another.

Artifacts are copied every `Timings.growing`; the small metrics file, which shows a run's progress, more often. No file
takes more than a tenth of the time: one that took long is left alone for ten times as long.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path

from .checkpoints import FileState, file_state, in_parallel, modest, replace_file
from .timings import TIMINGS

SMALL_BYTES = 1 << 20
WALK_SHARE = 20  # after a look at all files that took a second, the thread pauses for so many seconds
SHARE = 10  # a file that took a second to copy is not copied again for so many seconds


class Growing:
    """A thread that copies ``places``: folder or file to its place in ``live/``; ``small`` every ``small_seconds``.

    ``moved`` is called for every copied block, with the file and all of its bytes that ever arrived. ``complain`` is
    called for each failure. It is tried again, but the end does not wait for a file that can never arrive.
    """

    def __init__(
        self,
        places: Mapping[Path, Path],
        *,
        small: Path | None = None,
        small_seconds: float = TIMINGS.growing,
        moved: Callable[[Path, int], None],
        complain: Callable[[str], None],
        temporary: str = ".part",
    ) -> None:
        self._temporary = temporary
        self._places, self._small, self._small_seconds = places, small, small_seconds
        self._moved, self._complain = moved, complain
        self._copied: dict[Path, FileState] = {}
        self._arrived: dict[Path, int] = {}
        self._next: dict[Path, float] = {}
        self._walked = 0.0
        self._finishing, self._stopped, self._wake = False, False, threading.Event()
        self.done = threading.Event()  # set after `finish`, once all files have arrived
        self._thread = threading.Thread(target=self._loop, name="growing", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def finish(self) -> None:
        """Copy all files now: nothing changes any more."""
        self._finishing = True
        self._wake.set()

    def stop(self) -> None:
        self._stopped = True
        self._wake.set()

    def _loop(self) -> None:
        modest()
        while not self._stopped:
            self._wake.clear()
            finishing = self._finishing
            try:
                arrived = self._once(finishing)
            except Exception as exc:  # noqa: BLE001  the thread must outlive any one file's trouble
                arrived = False
                self._complain(f"{type(exc).__name__}: {exc}")
            if finishing and arrived:
                self.done.set()
                return
            self._wake.wait(max(TIMINGS.file_retry if finishing else self._pause(), WALK_SHARE * self._walked))

    def _once(self, finishing: bool) -> bool:
        """Copy the changed files that are due. Return whether all of them arrived."""
        now, due = time.monotonic(), {}
        for file, target in self._all(finishing=finishing):
            state = file_state(file)
            if state and file not in self._copied and state == file_state(target):
                self._copied[file] = state  # it was restored from there
            if state and self._copied.get(file) != state and (finishing or now >= self._next.get(file, now)):
                due[file] = target
                self._next.setdefault(file, now)
        self._walked = time.monotonic() - now
        arrived: list[bool] = []
        in_parallel(lambda file: arrived.append(self._copy(file, due[file])), due)
        return all(arrived)

    def _pause(self) -> float:
        """Return the seconds between two looks."""
        return TIMINGS.file_retry

    def _period(self, file: Path, size: int) -> float:
        """Return the seconds before a file of ``size`` bytes that was just copied is copied again."""
        return self._small_seconds if file == self._small and size <= SMALL_BYTES else TIMINGS.growing

    def _all(self, *, finishing: bool) -> Iterator[tuple[Path, Path]]:
        """Yield every file and its target."""
        for root, target in self._places.items():
            for file in self._files(root):
                yield file, target / file.relative_to(root) if file != root else target

    def _files(self, root: Path) -> Iterator[Path]:
        """Return ``root``, or all files below it, without the rests of a replacement that was cut off."""
        if not root.is_dir():
            yield root
            return
        for folder, folders, names in os.walk(root, onerror=self._not_listed):
            folders.sort()
            yield from (Path(folder, name) for name in sorted(names) if not fnmatchcase(name, ".*.part"))

    def _not_listed(self, exc: OSError) -> None:
        if exc.errno in (errno.EACCES, errno.EPERM):
            self._complain(f"cannot mirror {exc.filename}: {exc.strerror}")
        elif exc.errno not in (errno.ENOENT, errno.ENOTDIR):  # the script has removed it meanwhile
            raise exc

    def _copy(self, file: Path, place: Path) -> bool:
        began, state, before = time.monotonic(), file_state(file), self._arrived.get(file, 0)
        try:
            replace_file(
                file, place, lambda source, done: self._moved(source, before + done), temporary=self._temporary
            )
        except OSError as exc:
            if file_state(file) is None:
                return True  # the script has removed it meanwhile
            self._complain(f"cannot mirror {file.name}: {exc.strerror}")
            if not _hopeless(exc, file):
                return False
            self._next[file] = time.monotonic() + TIMINGS.growing
            return True
        if state:
            self._copied[file], self._arrived[file] = state, before + state[0]
            now = time.monotonic()
            self._next[file] = now + max(self._period(file, state[0]), SHARE * (now - began))
        return True


def _hopeless(exc: OSError, file: Path) -> bool:
    """Return whether the file itself cannot be read, or has a name that does not fit at its target."""
    unreadable = exc.errno in (errno.EACCES, errno.EPERM) and str(exc.filename) == str(file)
    return unreadable or exc.errno == errno.ENAMETOOLONG
