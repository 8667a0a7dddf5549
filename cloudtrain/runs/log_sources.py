"""Retry calls to a silent platform, and read log lines from its pages and the store's segments."""

from __future__ import annotations

import random
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from ..errors import CloudtrainError, LostContactError, NotFoundError
from ..runtime.segments import Span, distinct, span_of
from ..storage.errors import report_retry
from ..storage.files import parallel
from ..storage.timings import CLIENT_TIMINGS
from .log_order import Line, LogOrderer, MissingRange, Stream
from .outcome import first_line

if TYPE_CHECKING:
    from ..provider_api.protocol import Provider
    from ..store.store import Store

STALLS = 5
"""Empty pages with an unchanged cursor before ``more`` is ignored."""
_SEGMENT = re.compile(r"([0-9]+\.[0-9]+)/node-([0-9]+)/([^/]+)")
LOOKS = 5
"""Most listings of a node's segments while the node merges them."""

T = TypeVar("T")
_Index = Mapping[Stream, Sequence[tuple[Span, str]]]


def patiently(
    call: Callable[[], T],
    *,
    seconds: float = CLIENT_TIMINGS.platform,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> T:
    """Call ``call()``, again while the platform does not answer, for ``seconds`` at most; then raise its last error.

    Only for calls that may be made twice. Pauses grow and are random, so that many clients do not return at once.
    The first failure after a second is reported, as a user may wait.
    """
    began, pause, quiet = clock(), 0.5, True
    while True:
        try:
            return call()
        except LostContactError as exc:
            if not exc.passing or clock() + pause > began + seconds:
                raise
            if quiet and clock() >= began + 1:
                quiet = False
                report_retry(f"{exc}; trying again for up to {began + seconds - clock():.0f} s")
        sleep(pause * random.uniform(0.5, 1.0))
        pause = min(pause * 2, CLIENT_TIMINGS.platform_pause)


class Contact:
    """A timer of how long a platform or store has not answered."""

    def __init__(self, *, clock: Callable[[], float], patience: float) -> None:
        self._clock, self._patience = clock, patience
        self._since: float | None = None
        self.error: CloudtrainError | None = None

    def heard(self, error: CloudtrainError | None) -> None:
        """Record an answer (None), or an error in its place."""
        self.error = error
        if error is None:
            self._since = None
        elif self._since is None:
            self._since = self._clock()

    @property
    def lost(self) -> bool:
        return self._since is not None and self._clock() - self._since >= self._patience


class Tail:
    """A reader that feeds a `LogOrderer` from the platform's pages and the store's segments.

    ``clock`` measures waits, ``now`` gives Unix seconds. ``more``: a page is waiting; ``flowing``: the last round
    brought lines.
    """

    def __init__(
        self,
        *,
        store: Store,
        run_id: str,
        provider: Callable[[], Provider],
        clock: Callable[[], float],
        patience: float,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.store, self._run_id, self._provider, self._clock, self._now = store, run_id, provider, clock, now
        self.more = self.flowing = False
        self._contact = Contact(clock=clock, patience=patience)
        self._orderer = LogOrderer(clock=clock)
        self._cursors: dict[str, Any] = {}
        self._midway: set[str] = set()
        self._stalls = 0
        self._given_up = self._told_why_late = False
        self._segments_due = 0.0
        self._dates: dict[Stream, dict[int, float]] | None = None
        self._dates_whole = False

    def round(self, natives: Mapping[int, str]) -> Iterator[Line]:
        """Yield the next page of the newest attempt, after the rest of any earlier attempt not yet read to its end."""
        self.flowing = self.more = False
        *earlier, newest = [*dict.fromkeys(natives.values())] or [""]
        if newest and newest not in self._cursors:
            for native in earlier:
                yield from self._to_end(native)
        if newest:
            yield from self._page(newest, final=False)
        if self._given_up:
            yield from self._catch_up()
        yield from self._gaps()

    def end(self, natives: Mapping[int, str]) -> Iterator[Line]:
        """Yield all remaining lines of all attempts: pages first, since the segments lack the platform's own lines."""
        for native in dict.fromkeys(natives.values()):
            yield from self._to_end(native)
        yield from self.rest()

    def rest(self) -> Iterator[Line]:
        """Yield all remaining lines of the segments; missing lines become markers."""
        index = self._index()
        for want in self._orderer.drain(self.store.exits(self._run_id), index):
            yield from self._read(want, index)
            yield from self._orderer.finish(want.stream)

    def dated(self, line: Line, *, over: bool) -> Line:
        """Return ``line`` with a time: if its platform's log gives none, the one of the node's own segments.

        A line that its node has yet to store gets the time at which it was read here. ``over``: the run has ended.
        """
        if line.time is not None or line.stream is None or not line.seq:
            return line
        if self._dates is None or (over and not self._dates_whole):
            self._dates, self._dates_whole = self._segment_dates(), over
        known = self._dates.get(line.stream)
        at = known.get(line.seq) if known else None
        if at is None and not over and known != {}:  # {}: of a run whose segments have no times
            at = self._now()
        return replace(line, time=at)

    def _segment_dates(self) -> dict[Stream, dict[int, float]]:
        """Return the times of the stored lines by their number, for each node."""
        stored = Tail(store=self.store, run_id=self._run_id, provider=self._provider, clock=self._clock, patience=0.0)
        dates: dict[Stream, dict[int, float]] = {}
        for line in stored.rest():
            if line.stream is not None:
                dates.setdefault(line.stream, {}).update({line.seq: line.time} if line.time is not None else {})
        return dates

    def give_up(self, error: CloudtrainError) -> Iterator[Line]:
        """Switch from pages to segments, and say so once."""
        if not self._given_up:
            yield _marker(f"the platform's log does not answer; lines come from the store: {first_line(str(error))}")
        self._given_up = True

    def _to_end(self, native: str) -> Iterator[Line]:
        """Read to the end of a pass that begins now: an unfinished pass has missed lines that came late behind it."""
        passes = 2 if native in self._midway else 1
        while passes:
            yield from self._page(native, final=True)
            passes -= not self.more
            yield from self._gaps() if passes else ()

    def _page(self, native: str, *, final: bool) -> Iterator[Line]:
        """Yield one page. ``final``: there is no later call, so any error ends the reading."""
        self.more = False
        if self._given_up:
            return
        before = self._cursors.get(native)
        try:
            page = self._provider().logs(native, before)
        except NotFoundError:
            return  # not there yet, or no longer
        except CloudtrainError as exc:
            self._contact.heard(exc)
            if not final and not isinstance(exc, LostContactError):
                raise
            if final or self._contact.lost:
                yield from self.give_up(exc)
            elif isinstance(exc, LostContactError) and exc.throttled and not self._told_why_late:
                self._told_why_late = True
                yield _marker(f"the platform's log comes late: {first_line(str(exc))}")
            return
        self._contact.heard(None)
        self._cursors[native] = page.cursor
        self.flowing = self.flowing or bool(page.lines)
        self._stalls = 0 if page.lines or page.cursor != before else self._stalls + 1
        self.more = page.more and self._stalls < STALLS
        (self._midway.add if self.more else self._midway.discard)(native)
        yield from self._orderer.page(page.lines)

    def _gaps(self) -> Iterator[Line]:
        """Read a listing and a segment or two for each node that lacks lines, in parallel for hundreds of nodes."""
        wanted = self._orderer.wanted()
        indexes = parallel(lambda want: self._index(f"{want.attempt}/node-{want.node}/"), wanted)
        for want, index in zip(wanted, indexes, strict=True):
            yield from self._read(want, index)
            yield from self._orderer.answered(want)

    def _catch_up(self) -> Iterator[Line]:
        if self._clock() < self._segments_due:
            return
        self._segments_due = self._clock() + CLIENT_TIMINGS.segments
        index = self._index()
        for want in self._orderer.drain((), index):
            yield from self._read(want, index)

    def _index(self, below: str = "") -> _Index:
        """Return the segments of each node in order, with their keys."""
        root = f"runs/{self._run_id}/live/logs/"
        return index_segments((key[len(root) :], key) for key in self.store.files.list((root + below).rstrip("/")))

    def _read(self, want: MissingRange, index: _Index) -> Iterator[Line]:
        """Feed the segments that may hold the wanted lines.

        If a segment was merged into another one, list again. The orderer gives each line once.
        """
        for look in range(LOOKS):
            first, gone = max(want.first, self._orderer.position(want.stream)), False
            segments = index.get(want.stream, ())
            for i, (span, key) in enumerate(segments):
                after = segments[i + 1][0].first if i + 1 < len(segments) else None
                if (after is not None and after <= first) or (want.last is not None and span.first > want.last):
                    continue
                try:
                    text = self.store.files.read(key).decode("utf-8", "replace")
                except FileNotFoundError:
                    gone = look + 1 < LOOKS
                    if gone:
                        break
                    continue
                yield from self._orderer.segment(text.split("\n"))
            if not gone:
                return
            index = self._index(f"{want.attempt}/node-{want.node}/")


def index_segments(found: Iterable[tuple[str, T]]) -> dict[Stream, Sequence[tuple[Span, T]]]:
    """Return the segments of each node in order. ``found`` are their paths below ``live/logs``, each with a value."""
    index: dict[Stream, list[tuple[Span, T]]] = {}
    for name, value in found:
        match = _SEGMENT.fullmatch(name)
        if match and (span := span_of(match[3])):
            index.setdefault((match[1], int(match[2])), []).append((span, value))
    return {stream: distinct(segments) for stream, segments in index.items()}


def last_lines(lines: Iterable[Line | None], count: int | None) -> Iterator[Line]:
    """Yield the last ``count`` lines before the first None, which ends the existing ones; then every line.

    The last ones of all nodes are those of the latest times. ``count`` None: every line.
    """
    if count is None:
        yield from (line for line in lines if line is not None)
        return
    kept: dict[tuple[str, int | str], deque[tuple[float, int, Line]]] = {}
    coming = iter(lines)
    for number, line in enumerate(coming):
        if line is None:
            break
        own = kept.setdefault((line.attempt, line.node), deque(maxlen=max(1, count)))
        own.append((max(line.time or 0.0, own[-1][0] if own else 0.0), number, line))
    last = sorted(item for own in kept.values() for item in own)
    yield from (line for _, _, line in last[len(last) - min(count, len(last)) :])
    yield from (line for line in coming if line is not None)


def written_since(lines: Iterable[Line | None], moment: float) -> Iterator[Line | None]:
    """Yield the lines of ``moment`` (Unix seconds) or later. A line without a time goes with the line before it.

    If no line has a time, all are given.
    """
    first: list[Line | None] = []
    inside: bool | None = None
    for line in lines:
        if line is not None and line.time is not None:
            inside = line.time >= moment
        if inside is None:
            first.append(line)
            continue
        if inside:
            yield from first
        first = []
        if inside or line is None:
            yield line
    yield from first


def _marker(text: str) -> Line:
    """Return a line of cloudtrain's own about the log."""
    return Line(attempt="", node="", rank=None, seq=0, text=f"[… {text}]")
