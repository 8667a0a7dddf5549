"""Sum what runs have used, from the rows of `list_page`. Pure. US dollars and GPU hours are never added together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["COLUMNS", "spend"]

COLUMNS = ("cost", "gpu_hours", "attempts", "tag.sweep")
"""Columns of `list_page` that `spend` reads, in addition to the column that groups."""


def spend(rows: Iterable[Mapping[str, Any]], column: str = "") -> dict[str, Any]:
    """Return the ``total`` of all runs and the ``groups`` by their values of ``column``, the most expensive first.

    ``usd`` and ``gpu_hours`` are sums of known amounts. ``usd_unknown`` and ``gpu_hours_unknown`` count the runs whose
    amount is unknown. ``sweeps`` counts the sweeps of the runs.
    """
    found: dict[Any, list[Mapping[str, Any]]] = {}
    every = [row["columns"] for row in rows]
    for values in every:
        found.setdefault(values[column] if column else None, []).append(values)
    groups = [{"value": None if value is None else str(value), **_sums(some)} for value, some in found.items()]
    groups.sort(key=lambda group: (-group["usd"], -group["gpu_hours"], group["value"] or ""))
    return {"total": _sums(every), "groups": groups if column else []}


def _sums(rows: list[Mapping[str, Any]]) -> dict[str, Any]:
    usd, hours = ([row[name] for row in rows if row[name] is not None] for name in ("cost", "gpu_hours"))
    return {
        "runs": len(rows),
        "attempts": sum(row["attempts"] or 0 for row in rows),
        "sweeps": len({row["tag.sweep"] for row in rows if row["tag.sweep"] is not None}),
        "usd": round(sum(usd), 4),
        "usd_unknown": len(rows) - len(usd),
        "gpu_hours": round(sum(hours), 4),
        "gpu_hours_unknown": len(rows) - len(hours),
    }
