"""Read metrics that a script only prints: rows of numbers in the lines of rank 0, by regular expressions."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path

LONGEST = 1000  # characters of a line that are searched: an expression may take the square of it, or worse
SLOW_SECONDS = 0.05  # an expression that takes so long for one line is used no more: it would delay the log
PLACES = ("step", "epoch")
"""Metrics that give the position of the others. A line that holds no other metric makes no row."""


class PrintedMetrics:
    """A reader of lines that appends a row to ``file`` for each one with a number. ``patterns``: name to expression.

    Each expression has one group. A row has ``time`` (Unix seconds), the numbers of its line, and the newest ``step``
    and ``epoch``, if expressions have these names. NaN and infinity become null, as in `log_metrics`.
    """

    def __init__(self, patterns: Mapping[str, str], file: Path, *, say: Callable[[str], None]) -> None:
        self._file, self._say = file, say
        self._places: dict[str, float | None] = {}
        self._searches: dict[str, Callable[[str], re.Match[str] | None]] = {}
        for name, text in patterns.items():
            try:
                pattern = re.compile(text)
            except re.error as exc:
                say(f"metric {name} is not read: this Python does not know its expression: {exc}")
            else:  # an expression that begins with .* matches from the line's first character or not at all
                self._searches[name] = pattern.match if text.startswith(".*") else pattern.search

    def read(self, line: str) -> None:
        """Read one line of the script."""
        line, found = line[:LONGEST], {}
        began = time.perf_counter()
        for name, search in self._searches.items():
            if (match := search(line)) and (number := _number(match[1])) is not None:
                found[name] = number if math.isfinite(number) else None
        if time.perf_counter() - began > SLOW_SECONDS:
            self._drop_slow(line)
        if found:
            self._places.update({name: found.pop(name) for name in PLACES if name in found})
        if found:
            self._append({**self._places, "time": time.time(), **found})

    def _drop_slow(self, line: str) -> None:
        """Drop the expressions that are slow themselves; on a busy machine any of them may take long by the clock."""
        for name, search in list(self._searches.items()):
            began = time.thread_time()
            search(line)
            if (took := time.thread_time() - began) > SLOW_SECONDS:
                self._searches.pop(name, None)
                self._say(f"metric {name} is not read any more: its expression took {took:.2f} s for one line")

    def _append(self, row: Mapping[str, float | None]) -> None:
        try:
            with open(self._file, "ab", buffering=0) as stream:
                stream.write((json.dumps(row) + "\n").encode())
        except OSError as exc:
            self._say(f"metrics cannot be written: {exc.strerror}")
            self._searches.clear()


def _number(text: str | None) -> float | None:
    """Return the number that a group has found, else None. A sentence's full stop is not part of it."""
    text = (text or "").strip().rstrip(".,")
    for kind in (int, float):
        try:
            number = kind(text)
            return float(number) if abs(number) >= 2**53 else number
        except ValueError:
            continue
        except OverflowError:
            return None
    return None
