"""Names of log segments: ``<first line>.log``, or ``<first line>-<last line>.log`` of earlier versions.

Those versions merged small segments into such a one and removed them later, so a reader may list both. `distinct`
leaves out what a merged one covers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple, TypeVar

T = TypeVar("T")
_NAME = re.compile(r"([0-9]+)(?:-([0-9]+))?\.log")


class Span(NamedTuple):
    """The numbers of a segment's first and last line; ``last`` is 0 if the name does not have it."""

    first: int
    last: int


def span_of(name: str) -> Span | None:
    """Return the span in the file name of a segment; None for any other file."""
    match = _NAME.fullmatch(name)
    return Span(int(match[1]), int(match[2] or 0)) if match else None


def distinct(found: Iterable[tuple[Span, T]]) -> list[tuple[Span, T]]:
    """Return the segments in the order of their lines, without those that a merged one covers."""
    kept: list[tuple[Span, T]] = []
    covered = -1
    for span, item in sorted(found, key=lambda pair: (pair[0].first, -pair[0].last)):
        if span.first > covered:
            kept.append((span, item))
            covered = max(covered, span.last)
    return kept
