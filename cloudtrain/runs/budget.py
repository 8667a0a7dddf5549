"""A budget that the runs of one store share: a log of numbered entries, as a sweep has. No lock and no server.

A run reserves its cap before it is recorded. A client that adds entry n has read entries 0 to n-1, so any number of
clients together never reserve more than the limits. An entry is a JSON object with its ``kind``:

- ``limits``: replace these limits;
- ``reserve``: hold ``cap`` for ``run``, until its end;
- ``doubt``: ``run`` was not recorded for long after it had reserved;
- ``release``: ``run`` has ended, and used ``used``; or it was never recorded, and has used nothing.

A client that records a run reads the log again before it sends an attempt. It reserves again after a doubt. A client
that doubts looks for the record after its entry. So one of the two sees the other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..errors import SpecError
from ..job.fields import is_slug
from ..store.store import Store
from .attempts import had_no_machines
from .handover import cut_off
from .sweeps.drive import Log, writer
from .sweeps.spec import CURRENCIES, Limits
from .sweeps.state import SLACK, Entry

DOUBT = 600.0
"""Seconds after which a reservation without a recorded run is doubted."""
DAY = 86400.0
Use = Mapping[str, float]


class Runs(Protocol):
    """The part of a store that shows how the runs of a budget stand."""

    def use_of(self, run_id: str, cap: Use) -> Use | None:
        """Return the use of a run that has ended, where an unknown use is its ``cap``; None while it may use more."""

    def is_recorded(self, run_id: str) -> bool:
        """Return whether the run has a run.json."""


@dataclass(frozen=True, kw_only=True)
class BudgetState:
    """A budget after a prefix of its log. ``held`` has the caps of running runs, ``used`` the use of the others."""

    limits: Mapping[str, float] = field(default_factory=dict)
    held: Mapping[str, Use] = field(default_factory=dict)
    used: Mapping[str, Use] = field(default_factory=dict)
    since: Mapping[str, float] = field(default_factory=dict)
    doubted: frozenset[str] = frozenset()

    def spent(self, currency: str) -> float:
        """Return the use of all ended runs."""
        return sum(use.get(currency, 0.0) for run, use in self.used.items() if run not in self.held)

    def reserved(self, currency: str) -> float:
        """Return the caps of all runs that may use more."""
        return sum(cap.get(currency, 0.0) for cap in self.held.values())

    def rest(self, currency: str) -> float:
        """Return the amount that further runs may reserve."""
        return self.limits[currency] - self.spent(currency) - self.reserved(currency)


def _fold(entries: Sequence[Entry]) -> BudgetState:
    """Return the state after ``entries``, which begin with entry 0."""
    limits: dict[str, float] = {}
    held: dict[str, Use] = {}
    used: dict[str, Use] = {}
    since: dict[str, float] = {}
    doubted: set[str] = set()
    for entry in entries:
        kind, run = entry["kind"], entry.get("run", "")
        if kind == "limits":
            limits |= entry["limits"]
        elif kind == "reserve":
            held[run], since[run] = entry["cap"], entry["at"]
            doubted.discard(run)
        elif kind == "doubt":
            doubted.add(run)
        elif kind == "release":
            held.pop(run, None)
            used[run] = entry["used"]
            doubted.discard(run)
    return BudgetState(limits=limits, held=held, used=used, since=since, doubted=frozenset(doubted))


class Budget:
    """The budget ``name`` as far as this client has read its log. ``clock`` gives Unix seconds.

    A run that is not recorded ``doubt`` seconds after it has reserved may be doubted. Any value is safe.
    """

    def __init__(
        self, name: str, log: Log, runs: Runs, *, clock: Callable[[], float] = time.time, doubt: float = DOUBT
    ) -> None:
        self.name, self._log, self._runs, self._clock, self._doubt = name, log, runs, clock, doubt

    def state(self) -> BudgetState:
        """Return the state by the whole log."""
        return _fold(self._log.read())

    def change(self, limits: Mapping[str, float]) -> None:
        """Replace these limits; the first ones make the budget. Raises `SpecError` for an invalid limit."""
        Limits.parse(dict(limits))
        while limits and not self._add("limits", limits=dict(limits)):
            self.state()

    def reserve(self, run_id: str, cap: Use) -> None:
        """Hold ``cap`` for a run, unless it holds it already. Raises `SpecError` if that could exceed a limit."""
        settled = False
        while True:
            state = self.state()
            if run_id in state.held and run_id not in state.doubted:
                return
            if run_id in state.held:  # a client may be about to release it
                state = _fold([*self._log.entries, {"kind": "release", "run": run_id, "used": {}}])
            refusal = self._refusal(state, cap)
            if refusal is None:
                if self._add("reserve", run=run_id, cap=dict(cap)):
                    return
            elif settled:
                raise refusal
            else:
                self.settle()
                settled = True

    def _refusal(self, state: BudgetState, cap: Use) -> SpecError | None:
        if not state.limits:
            hint = f"to make it, run: cloudtrain budget {self.name} --max-cost USD"
            return SpecError(f"there is no budget {self.name!r} in this store", field="budget", hint=hint)
        for currency, limit in state.limits.items():
            if currency not in cap:
                hint = f"add {'--max-cost USD' if currency == 'max_cost' else '--max-gpu-hours HOURS'}"
                return SpecError(f"a run of {self.name!r} needs its own {currency}", field="budget", hint=hint)
            if cap[currency] > state.rest(currency) + limit * SLACK:
                unit, rest = CURRENCIES[currency], max(0.0, state.rest(currency))
                why = f"{rest:.2f} of {limit:g} {unit} are left in {self.name!r}; this run may use {cap[currency]:g}"
                hint = f"to see its runs: cloudtrain budget {self.name}; to close ended ones: cloudtrain reconcile"
                return SpecError(why, field="budget", hint=hint)
        return None

    def settle(self, only: str = "") -> BudgetState:
        """Release every run that has ended, or ``only`` this one, and return the state."""
        kept: set[str] = set()
        while True:
            state = self.state()
            open_runs = [run for run in state.held if run not in kept and only in ("", run)]
            if not open_runs:
                return state
            run = open_runs[0]
            use = self._runs.use_of(run, state.held[run])
            if use is None and not self._runs.is_recorded(run):
                if run in state.doubted:
                    use = {}
                elif self._clock() - state.since[run] >= self._doubt:
                    self._add("doubt", run=run)
                    continue
            if use is None:
                kept.add(run)
            else:
                self._add("release", run=run, used=dict(use))

    def _add(self, kind: str, **fields: Any) -> bool:
        return self._log.add({"kind": kind, **fields, "by": writer(), "at": self._clock()})


class _StoredRuns:
    """The runs of a budget by their records in ``store``."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def use_of(self, run_id: str, cap: Use) -> Use | None:
        result = self._store.result(run_id)
        if result is None:
            return None
        if result.get("native_id") is None:
            may_arrive = any(cut_off(self._store, run_id, k) for k in self._store.attempts(run_id))
            # A request without an answer may still arrive; after a day it has not.
            return None if may_arrive and time.time() - (self._store.cancelled_since(run_id) or 0.0) < DAY else {}
        if had_no_machines(result):
            return {}
        cost = result.get("cost") or {}
        use = {"max_cost": cost.get("estimate_usd"), "max_gpu_hours": cost.get("gpu_hours")}
        return {**cap, **{name: float(known) for name, known in use.items() if name in cap and known is not None}}

    def is_recorded(self, run_id: str) -> bool:
        return self._store.has_run(run_id)


def open_budget(store: Store, name: str) -> Budget:
    """Return the budget ``name`` of a store. Raises `SpecError` for an invalid name."""
    if not is_slug(name):
        raise SpecError(f"{name!r} must be lower-case letters, digits and single inner dashes", field="budget")
    return Budget(name, Log(store, f"budgets/{name}"), _StoredRuns(store))
