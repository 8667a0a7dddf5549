"""Decide the next entry of a sweep's log. A pure function of the state, the metrics and the time.

What a prefix of the log proves can only become less: trials end, and use at most their caps. So an entry that is
allowed after its prefix stays allowed, however late it comes and whatever other clients do.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from .prune import Points, is_hopeless
from .samplers import propose
from .spec import MOST_TRIALS, SweepSpec
from .state import State, is_over

REFUSED = 3
"""Trials in a row without a machine after which a sweep ends."""


def next_entry(
    spec: SweepSpec,
    state: State,
    points: Mapping[int, Points],
    now: float,
    *,
    sweep_id: str,
    cap: Mapping[str, float],
) -> dict[str, Any] | None:
    """Return the entry to add after the prefix of ``state``; None: nothing to add now.

    ``points`` are the metrics of every trial that has any, ``cap`` the limits of one trial, ``now`` Unix seconds.
    """
    if state.ended:
        return None
    live, why = state.live, _limit_reached(state, cap, now)
    if live and why == "max_runtime" and not state.closing:
        return _entry(state, "stop", trial=None, why=why)
    if spec.prune is not None and not state.closing:
        for trial in live:
            others = (points[n] for n in sorted(points) if n != trial.n)
            if trial.n not in state.stops and is_hopeless(points.get(trial.n, ()), others, spec.prune):
                return _entry(state, "stop", trial=trial.n, why=spec.prune.rule)
    if not why and len(live) < state.limits.parallel:
        params = propose(spec, state)
        if params is not None:
            n = len(state.trials)
            return _entry(state, "trial", n=n, run=run_of_trial(sweep_id, n), params=params, cap=dict(cap))
        why = "space"
    return _entry(state, "end", why=why) if why and not live else None


def _limit_reached(state: State, cap: Mapping[str, float], now: float) -> str:
    """Return the limit that forbids another trial, by its name; empty if none does.

    ``max_cost`` and ``max_gpu_hours`` forbid it for as long as the running trials may use their whole caps.
    """
    limits, began = state.limits, min((trial.at for trial in state.trials), default=now)
    if state.closing:
        return state.closing
    if limits.max_runtime is not None and now - began >= limits.max_runtime:
        return "max_runtime"
    if _in_a_row(state, "refused") >= REFUSED:
        return "refused"
    if _in_a_row(state, "failed") >= limits.failures:
        return "failures"
    if len(state.trials) >= (limits.trials or MOST_TRIALS):
        return "trials"
    return "budget" if is_over(state, cap) else ""


def _in_a_row(state: State, kind: str) -> int:
    """Return how many of the newest ended trials, by number, have this state. Changed limits begin a new count."""
    count = 0
    for n in sorted(state.outcomes, reverse=True):
        if n < state.opened or state.outcomes[n].state != kind:
            break
        count += 1
    return count


def run_of_trial(sweep_id: str, n: int) -> str:
    """Return the run id of trial ``n``."""
    return f"{sweep_id}-{n:04d}"


def _entry(state: State, kind: str, **fields: Any) -> dict[str, Any]:
    """Return an entry with the outcomes that no entry has yet; unknown values are left out."""
    news = [dataclasses.asdict(outcome) for outcome in state.news]
    ended = [{key: value for key, value in row.items() if value not in (None, "")} for row in news]
    return {"kind": kind, **fields, "ended": ended}
