"""Describe a sweep for people and programs: its summary, its table of trials, and what has changed. Pure."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from typing import Any

from ...validate import duration
from ..outcome import iso_time
from .spec import CURRENCIES, SweepSpec
from .state import STATES, Outcome, State, Trial, committed, used

ENDS = {
    "trials": "all trials have ended",
    "space": "the grid has no further point",
    "budget": "another trial could exceed the budget",
    "max_runtime": "max_runtime is over",
    "failures": "too many trials failed in a row",
    "refused": "the platform refused too many trials in a row",
    "cancelled": "cancelled",
}
"""Why a sweep ends, by the reason in its log."""


def best_of(spec: SweepSpec, state: State) -> Outcome | None:
    """Return the best outcome with a value, of trials that succeeded; the first of equal ones. None without one."""
    known = [item for _, item in sorted(state.outcomes.items()) if item.state == "succeeded" and item.value is not None]
    return min(known, key=lambda item: spec.sign * (item.value or 0.0), default=None)


def sweep_summary(spec: SweepSpec, state: State, *, url: str, sweep_id: str, provider: str) -> dict[str, Any]:
    """Return the object that ``status --json`` prints for a sweep. Money is in US dollars, times are ISO 8601."""
    best, live = best_of(spec, state), state.live
    if not state.ended:
        word, code = ("running" if state.trials else "pending"), None
    elif state.ended == "cancelled":
        word, code = "cancelled", 5
    else:
        word, code = ("succeeded", 0) if best is not None else ("failed", 1)
    reason = state.ended or state.closing
    counts = Counter(item.state for item in state.outcomes.values())
    return {
        "sweep": url,
        "sweep_id": sweep_id,
        "provider": provider,
        "state": word,
        "reason": ENDS.get(reason, reason),
        "exit_code": code,
        "metric": spec.metric,
        "goal": spec.goal,
        "best": None if best is None else _row(state, state.trials[best.trial]),
        "counts": {"running": len(live), **{name: counts[name] for name in STATES}},
        "limits": dataclasses.asdict(state.limits),
        "budget": {name: _budget(state, name) for name in CURRENCIES},
        "trials": [_row(state, trial) for trial in state.trials],
    }


def _budget(state: State, currency: str) -> dict[str, Any]:
    spent, most = used(state, currency), committed(state, currency)
    limit = getattr(state.limits, currency)
    return {"limit": limit, "used": round(spent, 4), "reserved": round(most - spent, 4)}


def _row(state: State, trial: Trial) -> dict[str, Any]:
    outcome = state.outcomes.get(trial.n) or Outcome(trial=trial.n, state="running")
    return {
        "trial": trial.n,
        "run_id": trial.run,
        "state": outcome.state,
        "value": outcome.value,
        "params": trial.params,
        "cost_usd": outcome.max_cost,
        "gpu_hours": outcome.max_gpu_hours,
        "started": iso_time(trial.at),
        "reason": outcome.reason,
    }


def value_text(value: Any) -> str:
    """Return a parameter or a metric as short text."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def change_lines(spec: SweepSpec, before: State, now: State) -> list[str]:
    """Return a line for each thing that happened between two states."""
    lines = []
    for trial in now.trials[len(before.trials) :]:
        params = " ".join(f"{name}={value_text(value)}" for name, value in trial.params.items())
        lines.append(f"trial {trial.n}: {params}")
    lines += [f"trial {n}: stopping ({why})" for n, why in now.stops.items() if n not in before.stops]
    best, champion = best_of(spec, before), best_of(spec, now)
    for n, item in now.outcomes.items():
        if n not in before.outcomes:
            value = "" if item.value is None else f", {spec.metric} {value_text(item.value)}"
            crown = " (best so far)" if champion is not None and champion.trial == n and champion != best else ""
            why = f": {item.reason}" if item.reason and item.state in ("failed", "interrupted", "refused") else ""
            if spec.prune is not None and item.state == "succeeded" and item.at is None:
                why = f": its metrics have no column {spec.prune.by}, so [prune] could not compare it"
            lines.append(f"trial {n}: {item.state}{value}{crown}{why}")
    if now.closing and not before.closing:
        lines.append(f"stopping every trial: {ENDS.get(now.closing, now.closing)}")
    if now.ended and not before.ended:
        lines.append(f"the sweep has ended: {ENDS.get(now.ended, now.ended)}")
    return lines


def limits_text(limits: Mapping[str, Any]) -> str:
    """Return limits in one line for people."""
    units = {"max_cost": "USD {:g}", "max_gpu_hours": "{:g} GPU hours"}
    words = [units[name].format(limits[name]) for name in CURRENCIES if limits.get(name) is not None]
    words += [f"{limits['trials']} trials"] if limits.get("trials") else []
    words += [duration(limits["max_runtime"])] if limits.get("max_runtime") else []
    return ", ".join([*words, f"{limits['parallel']} at once"])
