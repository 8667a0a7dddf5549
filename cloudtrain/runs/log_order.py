"""Follow a run's logs: every line of every node exactly once, in order for each node, on any platform.

Lines leave a node as ``[a<attempt> n<node> r<rank> #<number>] text`` and are ordered, de-duplicated and completed by
(attempt, node, number) alone. A segment has the line's time after the number; segments of older runs lack it. Lines
without a number are the platform's own, de-duplicated by its id. Nothing here reads, waits or sleeps: pages and
segments are fed in, lines come out, and `LogOrderer.wanted` names the lines to look for next.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from ..provider_api.node import attempt_key
from ..provider_api.protocol import LogLine

_NUMBERED = re.compile(
    r"\[a([0-9]{1,9}\.[0-9]{1,9}) n([0-9]{1,9}) r([0-9]{1,9}|-) #([1-9][0-9]{0,17})"
    r"(?: ([0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}\.[0-9]{3})Z)?\](?: (.*))?",
    re.DOTALL,
)

Stream = tuple[str, int]
"""(attempt, node): one numbering of lines."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of a run. ``attempt`` is ``k.r``, the number of the attempt and of the platform's own restart in it.

    ``rank`` is None for a line of cloudtrain itself. ``seq`` counts the lines from 1. A line of the platform has
    ``attempt`` ``""``, ``seq`` 0 and, in ``node``, the platform's name of the node. A marker of lost lines has ``seq``
    0 too. ``time`` is in Unix seconds, by the platform's clock or else the node's, or None.
    """

    attempt: str
    node: int | str
    rank: int | None
    seq: int
    text: str
    time: float | None = None

    @property
    def stream(self) -> Stream | None:
        """The stream that numbers the line; None for the platform's own lines."""
        return (self.attempt, self.node) if isinstance(self.node, int) else None


@dataclass(frozen=True, kw_only=True)
class MissingRange:
    """Lines ``first`` to ``last`` (None: to the end) of one node, to look for in its segments."""

    attempt: str
    node: int
    first: int
    last: int | None

    @property
    def stream(self) -> Stream:
        return self.attempt, self.node


def parse_line(line: LogLine) -> Line:
    """Return the line as the runtime numbered it, or as the platform's own if it has no number."""
    match = _NUMBERED.fullmatch(line.text)
    if not match:
        return Line(attempt="", node=line.node, rank=None, seq=0, text=line.text, time=line.time)
    attempt, node, rank, seq, stamp, text = match.groups(default="")
    return Line(
        attempt=attempt,
        node=int(node),
        rank=None if rank == "-" else int(rank),
        seq=int(seq),
        text=text,
        time=_unix(stamp) if line.time is None else line.time,
    )


def _unix(stamp: str) -> float | None:
    """Return a segment's time as Unix seconds; None for no time or an invalid one."""
    try:
        return datetime.fromisoformat(f"{stamp}+00:00").timestamp() if stamp else None
    except ValueError:
        return None


def line_label(line: Line) -> str:
    """Return ``[n0 r1] `` of a rank's line, ``[n0] `` of cloudtrain's own on a node; "" if no node is known."""
    node = str(line.node)
    words = [f"n{node}" if node.isdecimal() else node] if node else []
    words += [f"r{line.rank}"] if line.rank is not None else []
    return f"[{' '.join(words)}] " if words else ""


@dataclass
class _State:
    """One stream: the next number due, and the lines that came too early, each with its arrival time."""

    next: int = 1
    held: dict[int, tuple[Line, float]] = field(default_factory=dict)
    order: list[int] = field(default_factory=list)  # heap of held's keys
    asked: float | None = None
    total: int | None = None  # the stream's last number

    def add(self, line: Line, now: float) -> None:
        if line.seq >= self.next and line.seq not in self.held:
            self.held[line.seq] = (line, now)
            heapq.heappush(self.order, line.seq)

    def ready(self) -> Iterator[Line]:
        while self.order and self.order[0] == self.next:
            yield self.held.pop(heapq.heappop(self.order))[0]
            self.next += 1

    def gap_since(self) -> float:
        """Return when the line after the first gap came; the stream must hold lines."""
        return self.held[self.order[0]][1]


class LogOrderer:
    """A de-duplicator: pages and segments, fed in any order and repeatedly, give each line once, in order.

    A gap is held back for ``gap_timeout`` seconds, then looked for in the segments (`wanted`, `segment`, `answered`). A
    segment may be late, so the gap becomes one marker line only after ``segment_timeout`` more seconds. Other nodes are
    never held back. Beyond ``max_held`` waiting lines a node's gap is looked for at once; beyond twice as many its
    oldest gap is given up. The newest ``max_ids`` of the platform's own ids are remembered.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float],
        gap_timeout: float = 10.0,
        segment_timeout: float = 20.0,
        max_held: int = 10_000,
        max_ids: int = 50_000,
    ) -> None:
        self._clock = clock
        self._gap_timeout, self._segment_timeout = gap_timeout, segment_timeout
        self._max_held, self._max_ids = max_held, max_ids
        self._states: dict[Stream, _State] = {}
        self._gapped: set[Stream] = set()
        self._ids: dict[str, None] = {}

    # ----------------------------------------------------------------------------------------------- pages and segments

    def page(self, lines: Iterable[LogLine]) -> Iterator[Line]:
        """Take lines of the platform's log; yield those that are due."""
        for raw in lines:
            line = parse_line(raw)
            if line.stream is not None:
                yield from self._numbered(line, line.stream)
            elif self._new_id(raw.id):
                yield line

    def segment(self, texts: Iterable[str]) -> Iterator[Line]:
        """Take whole lines of one of our own segments; lines without a number are skipped."""
        for text in texts:
            line = parse_line(LogLine(node="", text=text))
            if line.stream is not None:
                yield from self._numbered(line, line.stream)

    def position(self, stream: Stream) -> int:
        """Return the number of the next line due."""
        state = self._states.get(stream)
        return state.next if state else 1

    def _numbered(self, line: Line, stream: Stream) -> Iterator[Line]:
        state = self._states.setdefault(stream, _State())
        state.add(line, self._clock())
        yield from state.ready()
        while len(state.held) > 2 * self._max_held:
            yield from self._skip(stream, state)
        self._note(stream, state)

    def _new_id(self, key: str) -> bool:
        if not key:
            return True
        if key in self._ids:
            return False
        self._ids[key] = None
        if len(self._ids) > self._max_ids:
            del self._ids[next(iter(self._ids))]
        return True

    def _note(self, stream: Stream, state: _State) -> None:
        if state.held:
            self._gapped.add(stream)
        else:
            self._gapped.discard(stream)
            state.asked = None

    # ------------------------------------------------------------------------------------------------------------- gaps

    def wanted(self) -> list[MissingRange]:
        """Return the gaps to look for in the segments now, one a node. Call `answered` after each.

        The same gap is returned again every ``gap_timeout`` seconds.
        """
        out = []
        for stream in sorted(self._gapped, key=_stream_key):
            state = self._states[stream]
            if self._due(state):
                state.asked = self._clock()
                attempt, node = stream
                out.append(MissingRange(attempt=attempt, node=node, first=state.next, last=max(state.held) - 1))
        return out

    def answered(self, want: MissingRange) -> Iterator[Line]:
        """Record that the segments were read for ``want``; give up lines past their time."""
        state = self._states.get(want.stream)
        if state is None:
            return
        patience = self._gap_timeout + self._segment_timeout
        while state.held and (want.last is None or state.order[0] <= want.last + 1):
            full = len(state.held) > self._max_held
            if not full and self._clock() - state.gap_since() < patience:
                break
            yield from self._skip(want.stream, state)
        self._note(want.stream, state)

    def _due(self, state: _State) -> bool:
        if len(state.held) > self._max_held:
            return True
        now = self._clock()
        asked_lately = state.asked is not None and now - state.asked < self._gap_timeout
        return now - state.gap_since() >= self._gap_timeout and not asked_lately

    def _skip(self, stream: Stream, state: _State) -> Iterator[Line]:
        """Give up the first gap and release the lines behind it."""
        yield _lost(stream, state.order[0] - state.next)
        state.next = state.order[0]
        yield from state.ready()

    # ---------------------------------------------------------------------------------------------------------- the end

    def drain(self, exits: Iterable[Mapping[str, Any]], streams: Iterable[Stream] = ()) -> list[MissingRange]:
        """Return the lines to read from the segments after the last page, so that none is missing.

        ``exits`` are exit records, whose ``lines`` is the number of their node's last line. ``streams`` are further
        nodes known to have segments. A node without a record is wanted to its end. Then read, feed, and call `finish`.
        """
        for record in exits:
            stream = (str(record["attempt"]), int(record["node"]))
            state = self._states.setdefault(stream, _State())
            if isinstance(record.get("lines"), int):
                state.total = record["lines"]
        for stream in streams:
            self._states.setdefault(stream, _State())
        return [
            MissingRange(attempt=stream[0], node=stream[1], first=state.next, last=state.total)
            for stream, state in sorted(self._states.items(), key=lambda item: _stream_key(item[0]))
            if state.held or state.total is None or state.next <= state.total
        ]

    def finish(self, stream: Stream | None = None) -> Iterator[Line]:
        """Yield every line still held back of ``stream`` (None: all), with a marker for each gap and a lost tail."""
        for key in sorted(self._states, key=_stream_key) if stream is None else [stream]:
            state = self._states.setdefault(key, _State())
            while state.held:
                yield from self._skip(key, state)
            if state.total is not None and state.next <= state.total:
                yield _lost(key, state.total + 1 - state.next)
                state.next = state.total + 1
            self._note(key, state)


def _lost(stream: Stream, count: int) -> Line:
    text = f"[… {count} line{'s' if count > 1 else ''} lost]"
    return Line(attempt=stream[0], node=stream[1], rank=None, seq=0, text=text)


def _stream_key(stream: Stream) -> tuple[tuple[int, ...], int]:
    return attempt_key(stream[0]), stream[1]
