"""One HTML page about a sweep, which opens offline: best value over trials, parallel coordinates, every trial."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..runs.sweeps.spec import CURRENCIES
from ..runs.sweeps.sweep import Sweep
from ..runs.sweeps.view import limits_text, value_text
from ..validate import is_number, without_secrets
from . import markup
from .curves import Point
from .markup import Html, drawing, html_table, label, page, save_page, tag

BEST_LINES = 3
"""Trials whose lines stand out among the parallel coordinates."""
Row = Mapping[str, Any]


def write_sweep(sweep: Sweep, path: Path) -> Path:
    """Write the page as `save_page` does, with the sweep's id as its name. Return the file."""
    return save_page(sweep_page(sweep.result(), store=sweep.store.url), path, sweep.id)


def sweep_page(result: Row, *, store: str) -> Html:
    """Return the page of a sweep whose `Sweep.result` is ``result``. Pure."""
    sign = 1 if result["goal"] == "minimize" else -1
    known = [row for row in result["trials"] if row["value"] is not None]
    known.sort(key=lambda row: sign * row["value"])
    state, metric = str(result["state"]), str(result["metric"])
    head = tag("h1", tag("span", state, class_=f"state {state}"), str(result["sweep_id"]))
    parts = [head, tag("p", str(result["reason"]), class_="reason") if result["reason"] else None]
    parts += [tag("h2", "Summary"), html_table("Summary", ("", ""), _facts(result), hide=True)]
    if known:
        charts = [_best_chart(result["trials"], metric, sign), _coordinates(known, metric)]
        parts += [tag("h2", "Curves"), tag("div", *charts, class_="charts")]
    parts += [tag("h2", "Trials"), _trials(result, known, store)]
    return page(f"{state}: {result['sweep_id']}", tag("main", *parts))


def _facts(result: Row) -> list[tuple[str, str]]:
    best = result["best"]
    rows = [("metric", f"{result['metric']}, {result['goal']}"), ("provider", str(result["provider"]))]
    if best:
        found = ", ".join(f"{name}={value_text(value)}" for name, value in best["params"].items())
        rows.append(("best", f"{value_text(best['value'])} in {best['run_id']} with {found}"))
    counts = [f"{count} {name}" for name, count in result["counts"].items() if count]
    rows += [("trials", ", ".join(counts) or "none yet"), ("limits", limits_text(result["limits"]))]
    for name, unit in CURRENCIES.items():
        budget = result["budget"][name]
        if budget["used"] or budget["limit"] is not None:
            rows.append((unit, f"{budget['used']:.2f} used, {budget['reserved']:.2f} reserved"))
    return rows


def _trials(result: Row, known: Sequence[Row], store: str) -> Html:
    """Return the table of all trials, best first; each is a link to its run."""
    names = list(dict.fromkeys(name for row in result["trials"] for name in row["params"]))
    others = [row for row in result["trials"] if row["value"] is None]
    rows = [
        (
            tag("a", row["run_id"], href=f"{without_secrets(store)}/runs/{row['run_id']}"),
            row["state"],
            "" if row["value"] is None else value_text(row["value"]),
            *(value_text(row["params"].get(name, "")) for name in names),
            "" if row["cost_usd"] is None else f"{row['cost_usd']:.2f}",
            row["reason"],
        )
        for row in [*known, *others]
    ]
    return html_table("Trials, best first", ("run", "state", result["metric"], *names, "USD", "reason"), rows)


def _best_chart(trials: Sequence[Row], metric: str, sign: int) -> Html:
    """Return the values of the trials as dots, and the best one so far as a line."""
    known = [(float(row["trial"]), row["value"]) for row in trials if row["value"] is not None]
    across, up = markup.widths([row["trial"] for row in trials]), markup.heights(known)
    line, best = list[Point](), math.inf
    for n, value in known:
        if sign * value < best:
            line += [(n, sign * best)] if line else []
            best = sign * value
        line.append((n, sign * best))
    low, high = value_text(min(value for _, value in known)), value_text(max(value for _, value in known))
    words = f"{len(known)} values from {low} to {high}; the best is {value_text(sign * best)}."
    dots = [markup.polyline([point], across, up, "line") for point in known]
    parts = [*markup.grid("trial", across, up), markup.polyline(line, across, up, "line"), *dots]
    title = f"{metric}, the best so far"
    return drawing(title, title, words, parts)


def _coordinates(known: Sequence[Row], metric: str) -> Html:
    """Return the parallel coordinates: a line for each trial through its parameters and its value."""
    names = [*dict.fromkeys(name for row in known for name in row["params"]), metric]
    columns = [[row["value"] if name == metric else row["params"].get(name) for row in known] for name in names]
    placed = [_heights_and_ends(column) for column in columns]
    across = [*map(markup.widths(range(len(names))), range(len(names)))]
    lines = []
    for number in reversed(range(len(known))):  # the best ones last, on top
        points = " ".join(f"{x:.1f},{column[number]:.1f}" for x, (column, *_) in zip(across, placed, strict=True))
        lines.append(tag("polyline", points=points, class_="line" if number < BEST_LINES else "line band"))
    parts = [markup.upright(x) for x in across]
    for x, name, (_, low, high) in zip(across, names, placed, strict=True):
        parts += [label(name, x, markup.BOTTOM + 32, "middle"), label(low, x, markup.BOTTOM + 16, "middle")]
        parts.append(label(high, x, markup.TOP - 8, "middle"))
    words = f"Each line is a trial; the {min(BEST_LINES, len(known))} best ones are strong. The last axis is {metric}."
    return drawing("Parallel coordinates", "Parallel coordinates", words, [*parts, *lines])


def _heights_and_ends(column: Sequence[Any]) -> tuple[list[float], str, str]:
    """Return the height of each value, and the texts of both ends.

    Numbers stand by size (logarithmic for a wide range), other values by order of appearance.
    """
    numeric = all(map(is_number, column))
    kinds = list(dict.fromkeys(map(str, column)))
    values = column if numeric else [kinds.index(str(value)) for value in column]
    low, high = min(values), max(values)
    ends = (value_text(low), value_text(high)) if numeric else (kinds[0], kinds[-1])
    log = numeric and low > 0 and high / low >= 100
    first, last = (math.log10(low), math.log10(high)) if log else (low, high)
    up = markup.Scale(first, last, markup.BOTTOM, markup.TOP, log)
    return [up(value) for value in values], *ends
