"""Rules that stop a trial early, as pure functions of metrics rows. The training script calls nothing.

Values are costs: smaller is better. `costs_of` turns rows into points of progress and cost.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ...validate import is_number
from .spec import Prune, SweepSpec

Points = Sequence[tuple[float, float]]
"""Progress and cost, by ascending progress."""


def costs_of(rows: Iterable[Mapping[str, Any]], spec: SweepSpec) -> list[tuple[float, float]]:
    """Return the points of a trial's metrics rows, in any order. A value that is not finite costs infinitely much."""
    by = spec.prune.by if spec.prune is not None else "step"
    points = []
    for row in rows:
        at, value = row.get(by), row.get(spec.metric)
        if is_number(at) and is_number(value) and math.isfinite(at):
            points.append((float(at), spec.sign * value if math.isfinite(value) else math.inf))
    return sorted(points)


def value_of(rows: Sequence[Mapping[str, Any]], spec: SweepSpec) -> float | None:
    """Return a trial's value: its best finite one, or the last; None without one."""
    known = [float(row[spec.metric]) for row in rows if is_number(row.get(spec.metric))]
    if spec.value == "last":
        known = known[-1:]
    finite = [value for value in known if math.isfinite(value)]
    return min(finite, key=lambda value: spec.sign * value) if finite else None


def is_hopeless(mine: Points, others: Iterable[Points], rule: Prune) -> bool:
    """Return whether ``rule`` stops the trial with the points ``mine``, beside those of the other trials."""
    known = [points for points in others if points]
    return bool(mine) and (_asha if rule.rule == "asha" else _median)(mine, known, rule)


def _asha(mine: Points, others: Sequence[Points], rule: Prune) -> bool:
    """Stop a trial that is not among the best 1/factor at a rung, of all trials that have reached the rung."""
    rung = rule.min
    while mine[-1][0] >= rung:
        peers = [_best(points, rung) for points in others if points[-1][0] >= rung]
        keep = (len(peers) + 1) // rule.factor
        own = _best(mine, rung)
        if keep and sum(peer < own for peer in peers) >= keep:
            return True
        rung *= rule.factor
    return False


def _median(mine: Points, others: Sequence[Points], rule: Prune) -> bool:
    """Stop a trial whose best value is worse than the median of the other trials' best ones by then."""
    at = mine[-1][0]
    peers = [_best(points, at) for points in others if points[-1][0] >= at]
    return at >= rule.min and len(peers) >= rule.peers and _best(mine, at) > statistics.median(peers)


def _best(points: Points, until: float) -> float:
    return min((cost for at, cost in points if at <= until), default=math.inf)
