"""The curves of a run's metrics, attempt by attempt: which numbers there are, what was done again, what is no number.

Pure: rows in, points out. What draws them is somebody else's business.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

__all__ = [
    "Curve",
    "Point",
    "Stretch",
    "curves",
    "decades",
    "is_log",
    "means",
    "number",
    "spread",
    "step_of_row",
    "ticks",
]

Row = Mapping[str, Any]
Rows = Mapping[str, Sequence[Row]]
"""The rows of each attempt, oldest attempt first, each in the order they were written."""
Point = tuple[float, float]

NO_CURVES = frozenset({"step", "epoch", "time"})
#: What a name says of its values, in the order in which curves are shown.
KINDS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("loss", re.compile(r"loss", re.IGNORECASE)),
    ("throughput", re.compile(r"_per_s(ec|econd)?$|throughput|/s(ec)?$", re.IGNORECASE)),
    ("rate", re.compile(r"(^|[_/.-])(lr|learning_rate)([_/.-]|$)", re.IGNORECASE)),
    ("memory", re.compile(r"memory|vram|(^|[_/.-])mem([_/.-]|$)", re.IGNORECASE)),
    ("wait", re.compile(r"(^|[_/.-])(data|input|io)?_?(wait|stall)", re.IGNORECASE)),
    ("other", re.compile("")),
)
DERIVED = "steps_per_s"
"""The throughput of a run whose rows tell none: their steps by their times."""
WINDOWS = 200
"""Points of the derived throughput, at most, for each attempt: single steps of some milliseconds say little."""


@dataclass(kw_only=True)
class Stretch:
    """One attempt's part of a curve: points by x, and the x at which its value was no finite number.

    ``lost_from`` is the x from which a later attempt did it again, None when none did.
    """

    attempt: str
    points: list[Point] = field(default_factory=list)
    odd: list[float] = field(default_factory=list)
    lost_from: float | None = None

    @property
    def counted(self) -> list[Point]:
        """The points that no later attempt replaced."""
        return [p for p in self.points if self.lost_from is None or p[0] < self.lost_from]

    @property
    def lost(self) -> list[Point]:
        """The points of what was done again."""
        return [p for p in self.points if self.lost_from is not None and p[0] >= self.lost_from]


@dataclass(kw_only=True)
class Curve:
    """One number of the metrics over steps; over rows (``axis``) where no row tells a step. ``kind`` as in `KINDS`."""

    name: str
    kind: str
    axis: str
    stretches: list[Stretch]
    derived: bool = False

    @property
    def points(self) -> list[Point]:
        """Every point, also of what was lost."""
        return [point for stretch in self.stretches for point in stretch.points]

    @property
    def history(self) -> list[Point]:
        """The points that count, by x."""
        return sorted((point for stretch in self.stretches for point in stretch.counted), key=lambda point: point[0])

    @property
    def odd(self) -> list[float]:
        return [x for stretch in self.stretches for x in stretch.odd]


def number(value: Any) -> float | None:
    """A value of a row as a float, which may be NaN or infinite; None for what is no number."""
    if type(value) is float:
        return value
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def step_of_row(row: Row) -> float | None:
    """The step of a row; None when it tells none that one can count with."""
    step = number(row.get("step"))
    return step if step is not None and math.isfinite(step) else None


def curves(rows: Rows) -> list[Curve]:
    """Every curve that the rows hold: the loss first, then throughput, learning rate, memory, waits, the others.

    A value that is null, NaN or infinite (`log_metrics` writes the latter two as null) has no point; where it was is
    kept in `Stretch.odd`. Where rows tell steps, one without is on no curve.
    """
    steps = any(step_of_row(row) is not None for some in rows.values() for row in some)
    names = _names(rows)
    found = {name: [Stretch(attempt=attempt) for attempt in rows] for name in names}
    starts: list[float | None] = []
    count = 0
    for index, some in enumerate(rows.values()):
        first: float | None = None
        for row in some:
            x = step_of_row(row) if steps else float(count)
            count += 1
            if x is None:
                continue
            first = x if first is None else min(first, x)
            for name in names & row.keys():
                value = number(row[name])
                if value is not None and math.isfinite(value):
                    found[name][index].points.append((x, value))
                elif value is not None or row[name] is None:
                    found[name][index].odd.append(x)
        starts.append(first)
    axis = "step" if steps else "row"
    made = [
        Curve(name=name, kind=_kind(name), axis=axis, stretches=stretches)
        for name, stretches in found.items()
        if any(part.points for part in stretches) or (_kind(name) == "loss" and any(part.odd for part in stretches))
    ]
    if steps and not any(curve.kind == "throughput" for curve in made):
        made += _derived(rows)
    for curve in made:
        _mark_lost(curve.stretches, starts)
    order = [kind for kind, _ in KINDS]
    return sorted(made, key=lambda curve: (order.index(curve.kind), curve.name != "loss", len(curve.name), curve.name))


def _names(rows: Rows) -> set[str]:
    return {
        name
        for some in rows.values()
        for row in some
        for name, value in row.items()
        if name not in NO_CURVES and (value is None or number(value) is not None)
    }


def _kind(name: str) -> str:
    return next(kind for kind, pattern in KINDS if pattern.search(name))


def _mark_lost(stretches: Sequence[Stretch], starts: Sequence[float | None]) -> None:
    """As `merge_metrics` has it: an attempt replaces the earlier rows from its own first step on."""
    since: float | None = None
    for stretch, start in zip(reversed(stretches), reversed(starts), strict=True):
        stretch.points.sort(key=lambda point: point[0])
        stretch.lost_from = since
        since = start if since is None else since if start is None else min(since, start)


def _derived(rows: Rows) -> list[Curve]:
    stretches = [Stretch(attempt=attempt, points=_paces(some)) for attempt, some in rows.items()]
    if not any(stretch.points for stretch in stretches):
        return []
    return [Curve(name=DERIVED, kind="throughput", axis="step", stretches=stretches, derived=True)]


def _paces(rows: Sequence[Row]) -> list[Point]:
    """Steps per second from row to row, or over several rows where there are many."""
    marks: list[Point] = []
    for row in rows:
        step, when = step_of_row(row), number(row.get("time"))
        if step is not None and when is not None and math.isfinite(when):
            marks.append((when, step))
    marks = marks[:: max(1, len(marks) // WINDOWS)]
    return [
        (step, (step - before) / (when - since))
        for (since, before), (when, step) in pairwise(marks)
        if when > since and step > before
    ]


# -------------------------------------------------------------------------------------------------------------- drawing


def spread(points: Sequence[Point], columns: int, low: float, high: float) -> list[Point]:
    """``points``, by x, as they show in ``columns`` columns from ``low`` to ``high``.

    Where more fall into a column than a line through it can show, its first, lowest, highest and last point are kept:
    no peak is lost, and none is made.
    """
    if len(points) <= 4 or high <= low:
        return list(points)
    shown: list[Point] = []
    column: list[Point] = []
    here = -1
    for point in points:
        at = min(columns - 1, int((point[0] - low) / (high - low) * columns))
        if at != here:
            shown += _ends(column)
            column, here = [], at
        column.append(point)
    return shown + _ends(column)


def means(points: Sequence[Point], columns: int, low: float, high: float) -> list[Point]:
    """One point for each of the columns that holds any of ``points``, by x: the mean of those in it."""
    held: dict[int, list[Point]] = {}
    for point in points:
        at = int((point[0] - low) / (high - low) * columns) if high > low else 0
        held.setdefault(min(columns - 1, at), []).append(point)
    return [
        (sum(x / len(some) for x, _ in some), sum(y / len(some) for _, y in some)) for _, some in sorted(held.items())
    ]


def _ends(points: Sequence[Point]) -> list[Point]:
    if len(points) <= 4:
        return list(points)
    kept = {0, len(points) - 1}
    kept.add(min(range(len(points)), key=lambda i: points[i][1]))
    kept.add(max(range(len(points)), key=lambda i: points[i][1]))
    return [points[i] for i in sorted(kept)]


def is_log(curve: Curve) -> bool:
    """Whether a logarithmic axis shows more: a loss, or another number, that spans three decades above zero.

    A learning rate does so wherever it ends near zero, and its schedule would not be known again.
    """
    if curve.kind not in ("loss", "other"):
        return False
    values = [y for _, y in curve.points]
    return bool(values) and min(values) > 0 and max(values) / min(values) >= 1000


def ticks(low: float, high: float, about: int) -> list[float]:
    """Round numbers from ``low`` to ``high``, ``about`` as many: 1, 2 or 5 times a power of ten apart."""
    if not (math.isfinite(low) and math.isfinite(high)) or high <= low or not math.isfinite(high - low):
        return [low] if math.isfinite(low) else []
    rough = (high - low) / max(1, about)
    power = 10.0 ** math.floor(math.log10(rough)) if rough > 1e-300 else rough
    units = [power * n for n in (0.5, 1, 2, 5, 10)]
    at = next((i for i, unit in enumerate(units) if i and unit >= rough), 4)
    for unit in (units[at], units[at - 1]):
        first = math.ceil(low / unit - 1e-9)
        last = math.floor(high / unit + 1e-9)
        if last - first >= min(2, about):  # three say where one is, two hardly
            break
    if last - first > 10 * about:  # the range is below what floats of this size can tell apart
        return [low, high]
    return [float(f"{i * unit:.12g}") for i in range(first, last + 1)]


def decades(low: float, high: float, about: int) -> list[float]:
    """The powers of ten from 10**``low`` to 10**``high``, ``about`` as many at most; those that a float can hold."""
    first, last = math.ceil(low - 1e-9), math.floor(high + 1e-9)
    every = max(1, math.ceil((last - first + 1) / max(1, about)))
    return [10.0**power for power in range(first, last + 1, every) if -308 <= power <= 308]
