"""The curves of a run's metrics, attempt by attempt. Pure: rows in, points out."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Row = Mapping[str, Any]
Rows = Mapping[str, Sequence[Row]]  # of each attempt, oldest attempt first, each in the order they were written
Point = tuple[float, float]

NO_CURVES = frozenset({"step", "epoch", "time"})
#: The kind of a curve by its name, in the order in which curves are shown.
KINDS: Mapping[str, re.Pattern[str]] = {
    "loss": re.compile(r"loss", re.IGNORECASE),
    "throughput": re.compile(r"_per_s(ec|econd)?$|throughput|/s(ec)?$", re.IGNORECASE),
    "rate": re.compile(r"(^|[_/.-])(lr|learning_rate)([_/.-]|$)", re.IGNORECASE),
    "memory": re.compile(r"memory|vram|(^|[_/.-])mem([_/.-]|$)", re.IGNORECASE),
    "wait": re.compile(r"(^|[_/.-])(data|input|io)?_?(wait|stall)", re.IGNORECASE),
    "other": re.compile(""),
}
DERIVED = "steps_per_s"
"""The throughput of a run whose rows have none: their steps by their times."""
WINDOWS = 200
"""Points of the derived throughput, at most, for each attempt: single steps of some milliseconds say little."""


@dataclass(kw_only=True)
class AttemptSeries:
    """One attempt's part of a curve: points by x, and the x at which its value was no finite number (``odd``).

    ``lost_from`` is the x from which a later attempt did it again, None when none did.
    """

    attempt: str
    points: list[Point] = field(default_factory=list)
    odd: list[float] = field(default_factory=list)
    lost_from: float | None = None

    @property
    def counted(self) -> list[Point]:
        """Return the points that no later attempt replaced."""
        return [p for p in self.points if self.lost_from is None or p[0] < self.lost_from]

    @property
    def lost(self) -> list[Point]:
        """Return the points that a later attempt replaced."""
        return [p for p in self.points if self.lost_from is not None and p[0] >= self.lost_from]


@dataclass(kw_only=True)
class Curve:
    """One number of the metrics over steps; over rows (``axis``) where no row has a step. ``kind`` as in `KINDS`."""

    name: str
    axis: str
    stretches: list[AttemptSeries]

    @property
    def kind(self) -> str:
        """Return the first of `KINDS` that the name matches."""
        return next(kind for kind, pattern in KINDS.items() if pattern.search(self.name))

    @property
    def points(self) -> list[Point]:
        """Return every point, including the lost ones."""
        return [point for stretch in self.stretches for point in stretch.points]

    @property
    def history(self) -> list[Point]:
        """Return the points that count, by x."""
        return sorted((point for stretch in self.stretches for point in stretch.counted), key=lambda point: point[0])

    @property
    def odd(self) -> list[float]:
        """Return every x at which the value was no finite number."""
        return [x for stretch in self.stretches for x in stretch.odd]


def number(value: Any) -> float | None:
    """Return a row's value as a float, which may be NaN or infinite; None for anything else than a number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _finite(value: Any) -> float | None:
    found = number(value)
    return found if found is not None and math.isfinite(found) else None


def curves(rows: Rows) -> list[Curve]:
    """Return every curve in the rows: the loss first, then throughput, learning rate, memory, waits, the others.

    A value that is null, NaN or infinite (`log_metrics` writes the latter two as null) has no point; its x is in
    `AttemptSeries.odd`. If any row has a step, a row without one is on no curve.
    """
    steps = any(_finite(row.get("step")) is not None for some in rows.values() for row in some)
    axis, found, count = "step" if steps else "row", dict[str, Curve](), itertools.count()
    starts: list[float] = []
    for index, some in enumerate(rows.values()):
        at = [_finite(row.get("step")) if steps else float(next(count)) for row in some]
        placed = [(x, row) for x, row in zip(at, some, strict=True) if x is not None]
        starts.append(min((x for x, _ in placed), default=math.inf))
        for x, row in placed:
            for name, given in row.items():
                if name in NO_CURVES or (given is not None and number(given) is None):
                    continue
                if name not in found:
                    empty = [AttemptSeries(attempt=attempt) for attempt in rows]
                    found[name] = Curve(name=name, axis=axis, stretches=empty)
                part, value = found[name].stretches[index], _finite(given)
                if value is None:
                    part.odd.append(x)
                else:
                    part.points.append((x, value))
    made = [curve for curve in found.values() if curve.points or (curve.kind == "loss" and curve.odd)]
    if steps and not any(curve.kind == "throughput" for curve in made):
        paces = [AttemptSeries(attempt=attempt, points=_paces(some)) for attempt, some in rows.items()]
        made += [Curve(name=DERIVED, axis=axis, stretches=paces)] if any(part.points for part in paces) else []
    for index, part in ((i, part) for curve in made for i, part in enumerate(curve.stretches)):
        part.points.sort(key=lambda point: point[0])
        redone = min(starts[index + 1 :], default=math.inf)  # an attempt replaces the rows from its own first step on
        part.lost_from = redone if math.isfinite(redone) else None
    order = [*KINDS]
    return sorted(made, key=lambda curve: (order.index(curve.kind), curve.name != "loss", len(curve.name), curve.name))


def _paces(rows: Sequence[Row]) -> list[Point]:
    """Return steps per second from row to row, or over several rows where there are many."""
    found = ((_finite(row.get("time")), _finite(row.get("step"))) for row in rows)
    marks = [(when, step) for when, step in found if when is not None and step is not None]
    marks = marks[:: max(1, len(marks) // WINDOWS)]
    return [
        (step, (step - before) / (when - since))
        for (since, before), (when, step) in itertools.pairwise(marks)
        if when > since and step > before
    ]


# -------------------------------------------------------------------------------------------------------------- drawing


def by_column(points: Sequence[Point], count: int, low: float, high: float) -> dict[int, list[Point]]:
    """Return ``points``, by x, as they fall into ``count`` columns from ``low`` to ``high``, without the empty ones."""
    held: dict[int, list[Point]] = {}
    width = high / 2 - low / 2  # halves: their difference is finite
    for point in points:
        at = int((point[0] / 2 - low / 2) / width * count) if width > 0 else 0
        held.setdefault(min(count - 1, at), []).append(point)
    return held


def spread(points: Sequence[Point], count: int, low: float, high: float) -> list[Point]:
    """Return ``points``, by x, as they show in ``count`` columns from ``low`` to ``high``.

    A column with more than four points keeps its first, lowest, highest and last one, so no peak is lost or made.
    """
    shown: list[Point] = []
    for some in by_column(points, count, low, high).values():
        order = sorted(range(len(some)), key=lambda i: some[i][1])
        kept = {0, order[0], order[-1], len(some) - 1} if len(some) > 4 else set(order)
        shown += [some[i] for i in sorted(kept)]
    return shown


def means(points: Sequence[Point], count: int, low: float, high: float) -> list[Point]:
    """Return one point for each column that holds any of ``points``, by x: their mean."""
    held = by_column(points, count, low, high).values()
    return [(sum(x / len(some) for x, _ in some), sum(y / len(some) for _, y in some)) for some in held]


def is_log(curve: Curve) -> bool:
    """Return True if a logarithmic axis shows more: a loss, or another number, that spans three decades above zero.

    A learning rate does so wherever it ends near zero, and would lose the shape of its schedule.
    """
    values = [y for _, y in curve.points] if curve.kind in ("loss", "other") else []
    return bool(values) and min(values) > 0 and max(values) / min(values) >= 1000


def ticks(low: float, high: float, about: int) -> list[float]:
    """Return round numbers from ``low`` to ``high``, ``about`` as many: 1, 2 or 5 times a power of ten apart."""
    if not math.isfinite(high - low) or high <= low:
        return [low] if math.isfinite(low) else []
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough)) if rough > 1e-300 else rough
    units = [power * n for n in (0.5, 1, 2, 5, 10)]
    at = next((i for i, unit in enumerate(units) if i and unit >= rough), 4)
    for unit in (units[at], units[at - 1]):
        first, last = math.ceil(low / unit - 1e-9), math.floor(high / unit + 1e-9)
        if last - first >= min(2, about):  # three marks give a scale, two hardly do
            break
    if last - first > 10 * about:  # floats of this size cannot tell values of this range apart
        return [low, high]
    return [float(f"{i * unit:.12g}") for i in range(first, last + 1)]
