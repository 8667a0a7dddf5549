"""Read the last lines and signs of life that a run's nodes have left in its store so far.

Made for repeated looks: unchanged files are not read twice, and long logs only at their end. No platform is asked.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..provider_api.node import attempt_key
from ..provider_api.protocol import AttemptInfo, LogLine
from ..runs.log_order import Line, parse_line
from ..runs.log_sources import LOOKS, index_segments
from ..runs.metrics import MetricsReader, json_rows
from ..runs.outcome import with_records
from ..runtime.segments import Span
from ..storage.files import Entry, parallel

if TYPE_CHECKING:
    from ..store.store import Store

SEGMENTS, BYTES = 40, 4 << 20
"""Most segments to read of a node for lines of one rank, and bytes before the last of them. A merged segment has
several MiB."""
USAGE_SECONDS = 15
"""Samples of all nodes within so many seconds are one row."""
_ATTEMPT = re.compile(r"\d+\.\d+")
_NAMED = re.compile(r"(\d+\.\d+)(?:-node-\d+\.jsonl|\.json)?")
#: Terminals obey these, and people print them unintentionally: colours of a progress bar, titles, bells.
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-_])")
_CONTROLS = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")

_Segment = tuple[Span, str, Entry]


@dataclass(frozen=True, kw_only=True)
class NodeData:
    """One node of an attempt. ``seen`` is its last write (Unix seconds by the store's clock), or None.

    None means that it has written nothing yet, or that the store has no times. ``outcome`` is from its exit record.
    """

    number: int
    seen: float | None = None
    outcome: str = ""


class LiveRunReader(MetricsReader):
    """A reader of one run. Methods raise the errors of its `Store`; files deleted meanwhile count as missing."""

    def __init__(self, store: Store, run_id: str) -> None:
        super().__init__(store, run_id)
        self._segments: dict[str, tuple[str, list[Line]]] = {}
        self.begun: frozenset[str] = frozenset()
        """The attempts with a start record at the last `infos`."""

    def attempts(self) -> list[str]:
        """Return the numbers of all attempts that have left anything, oldest first."""
        found: set[str] = set()
        for folder in ("attempts", "logs", "metrics"):
            names = self._store.files.names(f"{self._live}/{folder}")
            found |= {match[1] for name in names if (match := _NAMED.fullmatch(name))}
        return sorted(found, key=attempt_key)

    def infos(self, known: Sequence[AttemptInfo] = ()) -> list[AttemptInfo]:
        """Return every attempt known to the nodes or given by the platform, oldest first, with the facts of both."""
        exits, starts = (
            [record for record in records if _ATTEMPT.fullmatch(str(record.get("attempt")))]
            for records in (self._store.exits(self._run_id), self._store.starts(self._run_id))
        )
        self.begun = frozenset(str(record["attempt"]) for record in starts)
        found = {number: AttemptInfo(number=number) for number in self.attempts()}
        return with_records(found | {info.number: info for info in known}, exits, starts)

    def usage(self) -> dict[str, list[dict[str, float]]]:
        """Return how busy the nodes of each attempt were, as the mean of all nodes in each quarter of a minute.

        A row has ``time`` and the numbers of `runtime.usage.UsageSampler`.
        """
        found: dict[str, dict[int, list[dict[str, Any]]]] = {}
        for attempt, _, key, entry in self.metric_files("usage"):
            with contextlib.suppress(FileNotFoundError):
                for row in self.read(self._rows, key, entry, json_rows):
                    if isinstance(at := row.get("time"), (int, float)):
                        found.setdefault(attempt, {}).setdefault(int(at // USAGE_SECONDS), []).append(row)
        return {attempt: [_mean(rows) for _, rows in sorted(some.items())] for attempt, some in found.items()}

    def nodes(self, attempt: str, expected: int = 0) -> list[NodeData]:
        """Return the nodes of an attempt, at least ``expected``, each with its last write of a line or metric."""
        signs: dict[int, float | None] = dict.fromkeys(range(expected))
        for node, segments in self._index(attempt).items():
            own = [entry.modified for span, _, entry in segments if not span.last]
            signs[node] = max(own or [self._merged(attempt, segments)]) or None
        for owner, node, _, entry in self.metric_files():
            if owner == attempt:
                signs[node] = max(signs.get(node) or 0.0, entry.modified) or None
        ended = {
            int(record["node"]): record for record in self._store.exits(self._run_id) if record["attempt"] == attempt
        }
        for number, record in ended.items():
            signs[number] = max(signs.get(number) or 0.0, record.get("ended") or 0.0) or None
        return [
            NodeData(number=number, seen=signs[number], outcome=str(ended.get(number, {}).get("outcome") or ""))
            for number in sorted(signs)
        ]

    def _merged(self, attempt: str, segments: Sequence[_Segment]) -> float:
        """Return when a node was last alive if all its segments are merged.

        The next attempt merges them, and an object store dates them by that. So its start is the latest time.
        """
        after = [
            float(record["started"])
            for record in self._store.starts(self._run_id)
            if record.get("started") and attempt_key(str(record.get("attempt"))) > attempt_key(attempt)
        ]
        return min([max((entry.modified for _, _, entry in segments), default=0.0), *after])

    def lines(
        self, attempt: str, count: int, *, keep: Callable[[Line], bool] = lambda line: True
    ) -> dict[int, list[Line]]:
        """Return the last ``count`` lines of each node of an attempt that ``keep`` accepts, by node."""
        index = self._index(attempt)
        here = {key for segments in index.values() for _, key, _ in _last(segments)}
        self._segments = {key: known for key, known in self._segments.items() if key in here}
        found = parallel(lambda node: self._newest(attempt, node, index[node], count, keep), [*index])
        return {node: lines for node, lines in sorted(zip(index, found, strict=True)) if lines}

    def _newest(
        self, attempt: str, node: int, segments: Sequence[_Segment], count: int, keep: Callable[[Line], bool]
    ) -> list[Line]:
        """Read the end of one node's log; list again if a segment was merged into another one."""
        for _ in range(LOOKS):
            try:
                return self._tail(segments, count, keep)
            except FileNotFoundError:
                segments = self._index(attempt, f"/node-{node}").get(node, ())
        return []

    def _tail(self, segments: Sequence[_Segment], count: int, keep: Callable[[Line], bool]) -> list[Line]:
        found: list[Line] = []
        for _, key, entry in _last(segments):
            found = [line for line in self.read(self._segments, key, entry, _parsed_lines) if keep(line)] + found
            if len(found) >= count:
                break
        return found[-count:] if count else []

    def _index(self, attempt: str, below: str = "") -> dict[int, list[_Segment]]:
        """Return the segments of each node of an attempt: their lines, key, entry."""
        root = f"{self._live}/logs/"
        files = self._store.files.entries(root + attempt + below).items()
        found = index_segments((key[len(root) :], (key, entry)) for key, entry in files)
        return {node: [(span, *item) for span, item in segments] for (_, node), segments in found.items()}


def _mean(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the mean of each number in the rows."""
    names = {name for row in rows for name, value in row.items() if isinstance(value, (int, float))}
    each = {name: [row[name] for row in rows if isinstance(row.get(name), (int, float))] for name in sorted(names)}
    return {name: sum(values) / len(values) for name, values in each.items()}


def _parsed_lines(data: bytes) -> list[Line]:
    return [parse_line(LogLine(node="", text=line)) for line in data.decode("utf-8", "replace").split("\n") if line]


def _last(segments: Sequence[_Segment]) -> Iterator[_Segment]:
    """Yield the newest segments of a node, newest first, within `SEGMENTS` and `BYTES`."""
    size = 0
    for segment in sorted(segments, reverse=True)[:SEGMENTS]:
        if size >= BYTES:
            return
        yield segment
        size += segment[2].size


def printable(text: str) -> str:
    """Return ``text`` without terminal escapes, control and bidirectional characters, for one line."""
    return _CONTROLS.sub("\N{REPLACEMENT CHARACTER}", _ESCAPES.sub("", text.expandtabs(4)))
