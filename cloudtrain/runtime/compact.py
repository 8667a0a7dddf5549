"""Compaction of a node's log segments: many small files of 5 s become few large ones, so that ``live/`` stays small.

A platform may download all of ``live/`` at each start, one object at a time. Eight segments become one, eight of those
one again, and so on, up to `FULL_BYTES`: a week of logs is about 40 files. Segments of finished attempts are merged
when the next attempt starts. Each segment has one writer, its node, and only that node merges and removes it.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from .checkpoints import modest, put_whole
from .segments import Span, distinct, span_of
from .timings import TIMINGS
from .uploads import Uploads

__all__ = ["Compactor"]

FAN = 8
"""Neighbours of one age that are merged."""
FULL_BYTES = 8 << 20
"""A segment of this size is not merged again."""


class Compactor:
    """The merger of the segments of node ``node`` below ``logs``; ``attempt`` is the one that writes now.

    ``uploads`` tell whether a merged segment is in the store; the small ones stay until then, as a platform's agent may
    send removals before files. With None, a written file is in the store.
    """

    def __init__(
        self,
        logs: Path,
        *,
        attempt: str,
        node: int,
        uploads: Uploads | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._logs, self._node, self._uploads, self._clock = logs, node, uploads, clock or time.monotonic
        self._temporary = uploads.agent.temporary if uploads is not None else ".part"
        self._folder = logs / attempt / f"node-{node}"
        self._ages: dict[Path, int] = {}
        self._replaced: dict[Path, float] = {}
        """Segments that a merged one covers, and the time at which this was found."""
        self._merged: set[Path] = set()
        """Segments that this process wrote: the store need not have them yet."""
        self._changed: set[Path] = set()
        """Replaced segments that something wrote to after the merge: they stay."""
        self._past: list[Path] | None = None
        self._done: set[Path] = set()
        """Folders of past attempts whose segments are merged."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="compact", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()

    def _loop(self) -> None:
        modest()
        while not self._stop.is_set():
            with contextlib.suppress(OSError, ValueError):  # the small segments are still there, and readable
                self.step()
            self._stop.wait(TIMINGS.compact)

    def step(self) -> None:
        """Merge the segments that are due and remove the replaced ones. Raises `OSError`."""
        if self._past is None:
            self._past = [path for path in self._logs.glob(f"*/node-{self._node}") if path != self._folder]
        self._past = [folder for folder in self._past if not self._finish_past(folder)]
        if self._folder.is_dir():
            while group := self._due():
                merged = self._merge(self._folder, group)
                self._ages[merged] = self._ages.get(group[0][1], 0) + 1
            self._remove_replaced(self._folder)

    def _finish_past(self, folder: Path) -> bool:
        """Merge and remove what is due in a past attempt's folder. Return True when nothing is left to do."""
        try:
            if folder not in self._done:
                if not _is_at_rest(folder):
                    return False
                self._merge_past(folder)
                self._done.add(folder)
            return not self._remove_replaced(folder)
        except OSError:  # must not delay the other folders
            return False

    def _due(self) -> list[tuple[Span, Path]]:
        """Return `FAN` neighbours of one age, none of them full, without the newest: it may be half written."""
        run: list[tuple[Span, Path]] = []
        for span, path in _segments(self._folder)[:-1]:
            age, full = self._ages.get(path, 0), path.stat().st_size >= FULL_BYTES
            if full or (run and self._ages.get(run[0][1], 0) != age):
                run = []
            if not full:
                run.append((span, path))
            if len(run) == FAN:
                return run
        return []

    def _merge_past(self, folder: Path) -> None:
        """Merge the segments of a finished attempt, up to `FULL_BYTES` a file."""
        for path in folder.glob(".*.log.part*"):  # of a merge that was cut off
            path.unlink(missing_ok=True)
        group: list[tuple[Span, Path]] = []
        size = 0
        for item in [*_segments(folder), None]:
            more = item[1].stat().st_size if item else FULL_BYTES
            if group and size + more > FULL_BYTES:
                if len(group) > 1:
                    self._merge(folder, group)
                group, size = [], 0
            if item:
                group.append(item)
                size += more

    def _merge(self, folder: Path, group: list[tuple[Span, Path]]) -> Path:
        """Write one segment that holds the lines of ``group``; it counts as soon as it is there."""
        after = next((span.first for span, _ in _segments(folder) if span.first > group[-1][0].first), None)
        span = Span(group[0][0].first, _last_line(folder, *group[-1], after))
        target = folder / span.name
        put_whole(target, lambda path: _write(path, group), temporary=self._temporary)
        with contextlib.suppress(OSError):  # the time of the last line tells when a lost node was last alive
            changed = group[-1][1].stat().st_mtime
            os.utime(target, (changed, changed))
        self._merged.add(target)
        return target

    def _remove_replaced(self, folder: Path) -> bool:
        """Remove the segments whose lines are in stored ones. Return whether any have to wait."""
        found = sorted(_all(folder))  # once: the writer may add a segment at any moment
        kept = distinct(found)
        names = {path for _, path in kept}
        waiting, whole, text = False, Path(), b""
        for span, path in found:
            if path in names or path in self._changed:
                continue
            self._replaced.setdefault(path, self._clock())
            cover = next(other for around, other in reversed(kept) if around.first <= span.first)
            if not self._is_safe(cover, path):
                waiting = True
                continue
            if whole != cover:
                whole, text = cover, cover.read_bytes()
            if path.read_bytes() not in text:
                self._changed.add(path)
                continue
            path.unlink(missing_ok=True)
            for mark in folder.glob(f"{path.name}.*"):
                mark.unlink(missing_ok=True)
            del self._replaced[path]
            self._ages.pop(path, None)
        return waiting

    def _is_safe(self, cover: Path, path: Path) -> bool:
        """Return whether ``cover`` is in the store, so that ``path`` need not stay there.

        A busy agent may take long. The time limit is for an agent that shows nothing, and for restored files.
        """
        if self._uploads is None or self._uploads.stored(cover):
            return True
        if cover in self._merged and any(self._uploads.marks(folder) for folder in (self._folder, path.parent)):
            return False
        return self._clock() - self._replaced[path] >= TIMINGS.compact_settle


def _is_at_rest(folder: Path) -> bool:
    changed = [path.stat().st_mtime for path in folder.iterdir()]
    return time.time() - max(changed, default=0.0) >= TIMINGS.compact_rest


def _last_line(folder: Path, span: Span, path: Path, after: int | None) -> int:
    """Return the number of the last line of a segment, which is below ``after``, the next segment's first line.

    A node numbers its lines one by one. A script may print lines that look numbered, with any number. A segment without
    a line, as a killed node leaves it, ends with its first.
    """
    if span.last:
        return span.last
    head = f"[a{folder.parent.name} n{folder.name.removeprefix('node-')} r"
    numbered = re.compile(rf"^{re.escape(head)}(?:\d+|-) #(\d+)[\] ]".encode(), re.MULTILINE)
    number = span.first
    for match in numbered.finditer(path.read_bytes()):
        if int(match[1]) == number + 1:
            number += 1
    return number if after is None else min(number, after - 1)


def _all(folder: Path) -> Iterator[tuple[Span, Path]]:
    for name in os.listdir(folder):
        if span := span_of(name):
            yield span, folder / name


def _segments(folder: Path) -> list[tuple[Span, Path]]:
    return distinct(_all(folder))


def _write(target: Path, group: list[tuple[Span, Path]]) -> None:
    with open(target, "wb") as out:
        for _, path in group:
            data = path.read_bytes()
            out.write(data + b"\n" if data and not data.endswith(b"\n") else data)
