"""Rows of metrics: JSON Lines as nodes write them, and the rows of all attempts as one history."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from typing import Any

from ..errors import SpecError
from ..validate import DEEPEST, json_loads, json_value

__all__ = ["json_rows", "merge_metrics"]


def merge_metrics(attempts: Iterable[Iterable[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Return the rows of all attempts, given oldest first, as one history.

    An attempt replaces the earlier rows from its own first step on; rows without a step stay in place.
    """
    merged: list[dict[str, Any]] = []
    for attempt in attempts:
        rows = [dict(row) for row in attempt]
        steps = [step for row in rows if (step := _step(row)) is not None]
        first = min(steps, default=float("inf"))
        merged = [row for row in merged if (step := _step(row)) is None or step < first] + rows
    return merged


def _step(row: Mapping[str, Any]) -> float | None:
    step = row.get("step")
    return step if isinstance(step, (int, float)) and not isinstance(step, bool) else None


def json_rows(data: bytes) -> list[dict[str, Any]]:
    """Return the JSON objects of JSON Lines, without invalid lines, such as the last one of a killed process.

    Objects that `json_value` would refuse for their depth are left out too.
    """
    rows: list[dict[str, Any]] = []
    for line in data.splitlines():
        with contextlib.suppress(ValueError, SpecError):
            row = json_loads(line)
            if line.count(b"{") + line.count(b"[") > DEEPEST:
                row = json_value(row, "")
            if isinstance(row, dict):
                rows.append(row)
    return rows
