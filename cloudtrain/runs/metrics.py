"""Rows of metrics: JSON Lines as nodes write them, and the rows of all attempts as one history."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from ..errors import SpecError
from ..provider_api.node import attempt_key
from ..storage.files import Entry
from ..store.store import Store, run_folder
from ..validate import DEEPEST, is_number, json_loads, json_value

_METRICS = re.compile(r"(\d+\.\d+)-node-(\d+)\.jsonl")
T = TypeVar("T")


class MetricsReader:
    """A reader of the metrics of one run. Made for repeated looks: unchanged files are not read twice.

    Methods raise the errors of its `Store`; files deleted meanwhile count as missing.
    """

    def __init__(self, store: Store, run_id: str) -> None:
        self._store, self._run_id = store, run_id
        self._live = f"{run_folder(run_id)}/live"
        self._rows: dict[str, tuple[str, list[dict[str, Any]]]] = {}

    def history(self) -> list[dict[str, Any]]:
        """Return the rows of all attempts as one history."""
        return merge_metrics(self.metrics().values())

    def metrics(self) -> dict[str, list[dict[str, Any]]]:
        """Return the rows of each attempt that has any, oldest first."""
        rows: dict[str, list[dict[str, Any]]] = {}
        for attempt, _, key, entry in self.metric_files():
            with contextlib.suppress(FileNotFoundError):
                some = self.read(self._rows, key, entry, json_rows)
                rows.setdefault(attempt, []).extend(some)
        return {attempt: some for attempt, some in rows.items() if some}

    def metric_files(self, kind: str = "metrics") -> list[tuple[str, int, str, Entry]]:
        """Return attempt, node, key and entry of each file of metrics, or of usage, oldest attempt first."""
        root = f"{self._live}/{kind}"
        found = [
            (match[1], int(match[2]), key, entry)
            for key, entry in self._store.files.entries(root).items()
            if (match := _METRICS.fullmatch(key[len(root) + 1 :]))
        ]
        return sorted(found, key=lambda file: (attempt_key(file[0]), *file[1:3]))

    def read(self, known: dict[str, tuple[str, T]], key: str, entry: Entry, parse: Callable[[bytes], T]) -> T:
        """Return the parsed file; one that has not changed is not read again."""
        found = known.get(key)
        if found is None or found[0] != entry.version:
            found = known[key] = entry.version, parse(self._store.files.read(key))
        return found[1]


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
    return step if is_number(step) else None


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
