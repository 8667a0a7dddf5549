"""The verbs about money: cost sums what runs have used, budget limits what the runs of a store may use."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

from cyclopts import Parameter

from ..errors import AuthError, NotFoundError
from ..runs.summary import columns
from ..store.store import Store, in_store
from .common_flags import HERE, At
from .output import Screen
from .runs import Json, Ours, Since, seconds_of

USE = ("cost", "gpu_hours", "attempts", "tag.sweep")
"""Columns of `list_page` with what a run has used, in addition to the column that groups."""


def cost(
    *,
    since: Since = None,
    by: Annotated[str | None, Parameter(metavar="TAG", help="also sum by the values of this tag")] = None,
    at: At = HERE,
    json: Json = False,
    screen: Ours[Screen],
) -> int:
    """Sum what runs have used, their attempts and the trials of sweeps included."""
    from ..runs.listing import Wanted, list_page

    age, settings, column = seconds_of(since, "since"), at.settings(), f"tag.{by}" if by else ""
    page = list_page(
        settings.resolved(),
        settings,
        limit=None,
        since=None if age is None else time.time() - age,
        wanted=Wanted(columns=list(filter(None, [*USE, column]))),
    )
    found = _spend(page.rows, column)
    screen.answer({"since_s": age, "by": by, **found, "exit_code": 0}, _spend_text(found, by or ""))
    if found["total"]["usd_unknown"]:
        listed = shlex.join(["cloudtrain", "list", "--columns", "cost", *at.flags])
        screen.hint(f"to see the runs without a known cost, run: {listed}")
    return 0


def _spend(rows: Iterable[Mapping[str, Any]], column: str = "") -> dict[str, Any]:
    """Return the ``total`` of all runs and the ``groups`` by their values of ``column``, the most expensive first.

    ``usd`` and ``gpu_hours`` are sums of known amounts. ``usd_unknown`` and ``gpu_hours_unknown`` count the runs whose
    amount is unknown. ``sweeps`` counts the sweeps of the runs. US dollars and GPU hours are never added together.
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


def _spend_text(found: Mapping[str, Any], by: str) -> str:
    head = (by, "runs", "attempts", "sweeps", "USD", "runs of unknown USD", "GPU hours", "runs of unknown GPU hours")
    names = ("runs", "attempts", "sweeps", "usd", "usd_unknown", "gpu_hours", "gpu_hours_unknown")
    groups = [(group["value"] or "-", group) for group in found["groups"]]
    rows = [
        (name, *(f"{sums[key]:.2f}" if key in ("usd", "gpu_hours") else str(sums[key]) for key in names))
        for name, sums in [*groups, ("total", found["total"])]
    ]
    return columns([head, *rows])


def budget(
    name: Annotated[str, Parameter(name="NAME", help="the budget, as in the setting budget")],
    /,
    *,
    max_cost: Annotated[float | None, Parameter(metavar="USD", help="set its limit of US dollars")] = None,
    max_gpu_hours: Annotated[float | None, Parameter(metavar="HOURS", help="set its limit of GPU hours")] = None,
    at: At = HERE,
    json: Json = False,
    screen: Ours[Screen],
) -> int:
    """Show the budget of a store's runs, or set its limits. Runs that have ended no longer reserve anything."""
    from ..runs.budget import BudgetState, open_budget
    from ..runs.sweeps.spec import CURRENCIES

    given = {"max_cost": max_cost, "max_gpu_hours": max_gpu_hours}
    limits = {key: value for key, value in given.items() if value is not None}

    def read(store: Store) -> BudgetState:
        found = open_budget(store, name)
        found.change(limits)
        try:
            return found.settle()
        except AuthError:  # a reader only looks
            return found.state()

    settings = at.settings()
    state = in_store(settings.resolved(), settings, read)
    if not state.limits:
        hint = f"to make it, run: cloudtrain budget {name} --max-cost USD"
        raise NotFoundError(f"there is no budget {name!r} in this store", field="budget", hint=hint)
    rows = {key: {"limit": most, "used": round(state.spent(key), 4), "reserved": round(state.reserved(key), 4)}
            for key, most in state.limits.items()}  # fmt: skip
    runs = [{"run_id": run, **{key: cap.get(key) for key in CURRENCIES}} for run, cap in state.held.items()]
    found = {"budget": name, "limits": {key: rows.get(key) for key in CURRENCIES}, "runs": runs, "exit_code": 0}
    lines = [
        (key, f"{row['used']:.2f} used, {row['reserved']:.2f} reserved of {row['limit']:g} {CURRENCIES[key]}")
        for key, row in rows.items()
    ]
    held = [
        (run, f"{', '.join(f'{most:g} {CURRENCIES[key]}' for key, most in cap.items())} reserved")
        for run, cap in state.held.items()
    ]
    screen.answer(found, columns([("budget", name), *lines, *held]))
    return 0
