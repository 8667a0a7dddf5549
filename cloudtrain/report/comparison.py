"""One HTML page that compares runs, which opens offline: a table, the curves of each metric, different job fields."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..runs.run import Run
from ..runs.submit import flat_fields
from . import markup
from .curves import Curve, curves, spread
from .live_data import LiveRunReader, printable
from .markup import Html, drawing, html_table, page, quantity, save_page, tag
from .report import shareable

COLOURS = ("#2f6fde", "#e8590c", "#2b8a3e", "#ae3ec9", "#e03131", "#1098ad", "#f59f00", "#7950f2")
CHARTS = 12
"""Metrics that are drawn, at most."""


@dataclass(frozen=True, kw_only=True)
class Compared:
    """A run of the page: its result, its job as plain JSON without secrets, and its curves."""

    result: Mapping[str, Any]
    job: Mapping[str, Any]
    curves: Sequence[Curve]

    @property
    def run_id(self) -> str:
        """The id of the run."""
        return str(self.result["run_id"])


def write_comparison(runs: Sequence[tuple[Run, Mapping[str, Any]]], folder: Path) -> Path:
    """Write ``comparison.html`` about runs and their results to ``folder``; return the file. Raises `StorageError`."""
    found = []
    for run, result in runs:
        rows = LiveRunReader(run.store, run.run_id).metrics()
        found.append(Compared(result=result, job=shareable(run.job.to_dict()), curves=curves(rows)))
    return save_page(comparison_page(found), folder / "comparison.html", "comparison")


def comparison_page(runs: Sequence[Compared]) -> Html:
    """Return the page. Pure."""
    names = list(dict.fromkeys(curve.name for run in runs for curve in run.curves))[:CHARTS]
    charts = [_chart(name, runs) for name in names]
    different = _differences(runs)
    parts = [tag("h1", f"{len(runs)} runs"), tag("h2", "Runs"), _table(runs, names)]
    parts += [tag("h2", "Curves"), tag("div", *charts, class_="charts")] if charts else []
    parts.append(tag("h2", "Different fields of the jobs"))
    parts.append(different or tag("p", "The jobs have the same fields."))
    return page(f"{len(runs)} runs", tag("main", *parts))


def _mark(number: int) -> Html:
    return tag("span", "\N{BLACK CIRCLE} ", style=f"color: {COLOURS[number % len(COLOURS)]}")


def _table(runs: Sequence[Compared], names: Sequence[str]) -> Html:
    rows = []
    for number, run in enumerate(runs):
        last = {curve.name: curve.history[-1][1] for curve in run.curves if curve.history}
        cost = run.result.get("cost") or {}
        known = [cost.get("estimate_usd"), cost.get("gpu_hours")]
        rows.append(
            [
                tag("span", _mark(number), tag("a", run.run_id, href=f"{run.run_id}.html")),
                str(run.result["state"]),
                str(len(run.result.get("attempts") or ())),
                *(quantity(last[name]) if name in last else "" for name in names),
                *("" if value is None else f"{value:.2f}" for value in known),
            ]
        )
    head = ("run", "state", "attempts", *names, "USD", "GPU hours")
    return html_table("Last values of each run", head, rows, numeric=range(2, len(head)))


def _chart(name: str, runs: Sequence[Compared]) -> Html:
    """Return one metric of all runs in one drawing, each run in its colour."""
    found = {n: curve for n, run in enumerate(runs) for curve in run.curves if curve.name == name and curve.history}
    points = [point for curve in found.values() for point in curve.history]
    across, up = markup.widths([x for x, _ in points]), markup.heights(points)
    parts = markup.grid(next((curve.axis for curve in found.values()), "step"), across, up)
    for number, curve in found.items():
        some = spread(curve.history, markup.COLUMNS, across.low, across.high)
        parts.append(markup.polyline(some, across, up, "line", COLOURS[number % len(COLOURS)]))
    ends = ", ".join(f"{runs[n].run_id} {quantity(curve.history[-1][1])}" for n, curve in found.items())
    return drawing(name, name, f"Last values: {ends}.", parts)


def _differences(runs: Sequence[Compared]) -> Html | None:
    """Return a table of the job fields that are not the same in all runs, or None if there is none."""
    fields = [flat_fields(run.job) for run in runs]
    names = sorted({name for some in fields for name in some})
    rows = []
    for name in names:
        texts = ["" if some.get(name) is None else json.dumps(some[name], ensure_ascii=False) for some in fields]
        if len(set(texts)) > 1:
            rows.append([name, *map(printable, texts)])
    return html_table("Different fields", ("field", *(run.run_id for run in runs)), rows) if rows else None
