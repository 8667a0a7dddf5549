"""Numbered log lines of one node: ``[a<attempt> n<node> r<rank> #<seq>] text`` to the platform and to our own segments.

The platform may lose, repeat or reorder lines. The number alone shows the order and the gaps. The segments (files in
``live/logs``) hold the lost lines. A segment is written again, whole, with each further line, until it has
`SEGMENT_BYTES`: a platform may download all of ``live/`` at each start, one file at a time. In a segment the line's
time follows its number, ``#<seq> 2026-11-24T03:00:00.123Z]``: when the node read it, by its clock.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from .checkpoints import write_whole
from .redact import Redactor
from .timings import TIMINGS

SEGMENT_BYTES = 1 << 20
KEPT_BYTES = 16 << 20
"""Most bytes of a segment that cannot be written. The store loses older lines, the platform's own log does not."""
LINE_BYTES = 128 << 10  # longer lines are cut in pieces: CloudWatch takes 256 KiB an event


class LogWriter:
    """The log of a node, which numbers its ranks' lines. Lines wait until `begin` has given the attempt. Thread-safe.

    ``redact`` takes the secrets out of them. Segments are written every ``flush_seconds``. A slow store delays only the
    thread that writes a segment: `start` runs one for that.
    """

    def __init__(
        self,
        *,
        node: int,
        out: int = 1,
        flush_seconds: float = 5.0,
        clock: Callable[[], float] | None = None,
        now: Callable[[], float] | None = None,
    ) -> None:
        self._node, self._out, self._flush_seconds, self._clock = node, out, flush_seconds, clock or time.monotonic
        self._now = now or time.time
        self._lock = threading.Lock()
        self._disk = threading.Lock()
        """Held by the thread that writes a segment. It takes `_lock` meanwhile; no thread does the reverse."""
        self._stop = threading.Event()
        self.redact = Redactor()
        self._waiting: list[tuple[str, str, float]] | None = []
        self._folder: Path | None = None
        self._attempt = self._temporary = ""
        self._torn = b""
        """The rest of a line of which a full disk took a part."""
        self._segment: list[str] = []
        self._segment_first, self._segment_bytes, self._segment_since = 1, 0, 0.0
        self._retry_at = 0.0
        self._open: tuple[int, list[str], int] = (1, [], 0)
        """First number, lines and bytes of the segment in the store that takes further lines; for `_disk`'s holder."""
        self.lines = 0
        self.last = self._clock()

    def start(self) -> None:
        """Write segments in a thread of their own, until `stop`."""
        threading.Thread(target=self._loop, name="log", daemon=True).start()

    def stop(self) -> None:
        """End the thread, and write the last segment."""
        self._stop.set()
        self.flush()

    def _loop(self) -> None:
        while not self._stop.wait(self._flush_seconds / 5):
            self.tick()

    def begin(self, attempt: str, folder: Path | None, *, temporary: str = "") -> None:
        """Start printing as ``attempt``; segments go to ``folder`` (None: nowhere), with `write_whole`."""
        with self._lock:
            if self._waiting is None:
                return
            waiting, self._waiting = self._waiting, None
            self._attempt, self._folder, self._temporary = attempt, folder, temporary
            for rank, text, at in waiting:
                self._write(rank, text, at)

    def write(self, rank: str, text: str) -> str:
        """Print one line (no newline in it) of rank ``rank``, ``-`` for the runtime itself. Return it redacted."""
        text = self.redact(text)
        with self._lock:
            if rank != "-":
                self.last = self._clock()
            if self._waiting is not None:
                self._waiting.append((rank, text, self._now()))
            else:
                self._write(rank, text, self._now())
            full, too_full = self._segment_bytes >= SEGMENT_BYTES, self._segment_bytes >= KEPT_BYTES
        if full and rank != "-":  # the node's own thread waits for no store
            self._relieve(TIMINGS.log_room if too_full else 0.0)
        return text

    def say(self, text: str) -> None:
        """Print a line of the runtime's own."""
        self.write("-", f"cloudtrain: {text}")

    def _write(self, rank: str, text: str, at: float) -> None:
        self.lines += 1
        label = f"[a{self._attempt} n{self._node} r{rank} #{self.lines}"
        data = whole = self._torn + f"{label}] {text}\n".encode("utf-8", "replace")
        try:
            while data:
                data = data[os.write(self._out, data) :]
        except OSError:
            pass  # the reader is gone, or the disk is full; the segments still have the line
        if len(data) < len(whole):
            self._torn = data[: data.find(b"\n") + 1]
        if self._folder is None:
            return
        if not self._segment:
            self._segment_first, self._segment_since = self.lines, self._clock()
        line = f"{label} {_stamp(at)}] {text}\n"
        self._segment.append(line)
        self._segment_bytes += len(line)

    def tick(self) -> None:
        """Write the segment once it is old enough."""
        with self._lock:
            due = self._segment and self._clock() - self._segment_since >= self._flush_seconds
        if due:
            with self._disk:
                self._save()

    def flush(self) -> None:
        """Write the segment now, also after a failed try."""
        with self._disk:
            self._save(last=True)

    def _relieve(self, seconds: float) -> None:
        """Write a full segment, unless another thread writes one. One that is too full goes after ``seconds``."""
        if self._disk.acquire(timeout=seconds):
            try:
                self._save()
            finally:
                self._disk.release()
        elif seconds:
            with self._lock:
                self._segment, self._segment_bytes = [], 0

    def _save(self, *, last: bool = False) -> None:
        """Write the segment. The caller holds `_disk`."""
        with self._lock:
            if not self._segment or self._folder is None or (not last and self._clock() < self._retry_at):
                return
            lines, first, size, since = self._segment, self._segment_first, self._segment_bytes, self._segment_since
            self._segment, self._segment_bytes = [], 0
        begun, stored, stored_bytes = self._open
        if not stored or stored_bytes >= SEGMENT_BYTES or first != begun + len(stored):
            begun, stored, stored_bytes = first, [], 0
        data = "".join(stored + lines).encode("utf-8", "replace")
        try:
            write_whole(self._folder / f"{begun:09d}.log", data, temporary=self._temporary or ".part")
            self._open = begun, stored + lines, stored_bytes + size
        except OSError:
            # Keep it in memory for the next try, under the same first number, up to `KEPT_BYTES`: training goes on.
            with self._lock:
                self._retry_at = self._clock() + TIMINGS.log_retry
                if size < KEPT_BYTES:
                    self._segment, self._segment_first, self._segment_since = lines + self._segment, first, since
                    self._segment_bytes += size


def _stamp(at: float) -> str:
    """Return Unix seconds as ISO 8601 in UTC, to the millisecond."""
    second, milli = divmod(int(at * 1000), 1000)
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(second))}.{milli:03d}Z"


def lines_of(stream: BinaryIO) -> Iterator[str]:
    """Yield the lines of ``stream`` as they come. A line redrawn by carriage returns yields its state once a second."""
    rest = b""
    shown = 0.0
    while chunk := os.read(stream.fileno(), 65536):
        *whole, rest = (rest + chunk).split(b"\n")
        for line in whole:
            yield from _pieces(line.rstrip(b"\r").rpartition(b"\r")[2])
        # A return at the very end may be half of a line's "\r\n": it counts once another byte follows.
        done, redrawn, state = rest[:-1].rpartition(b"\r")
        if redrawn:
            last = done.rstrip(b"\r").rpartition(b"\r")[2]
            rest = state + rest[-1:]
            if last.strip() and time.monotonic() - shown >= TIMINGS.redraw:
                shown = time.monotonic()
                yield from _pieces(last)
        *pieces, rest = _cut(rest)
        yield from (piece.decode("utf-8", "replace") for piece in pieces)
    if rest:
        yield from _pieces(rest.rstrip(b"\r").rpartition(b"\r")[2])


def _pieces(line: bytes) -> Iterator[str]:
    return (piece.decode("utf-8", "replace") for piece in _cut(line))


def _cut(line: bytes) -> list[bytes]:
    """Return a line in pieces of `LINE_BYTES` at most, cut at characters of UTF-8."""
    pieces = []
    while len(line) > LINE_BYTES:
        ends = (LINE_BYTES - back for back in range(4) if line[LINE_BYTES - back] & 0xC0 != 0x80)
        end = next(ends, LINE_BYTES)
        pieces.append(line[:end])
        line = line[end:]
    return [*pieces, line]
