"""The state of a sweep, folded from the entries of its log, and what its trials have used. Pure.

An entry is a JSON object with its ``kind``, its writer ``by`` and its time ``at`` (Unix seconds):

- ``trial``: start trial ``n`` as run ``run`` with ``params`` and ``cap``;
- ``stop``: stop trial ``trial``, or every trial if that is null, because of ``why``;
- ``limits``: replace these limits; this opens an ended sweep again;
- ``end``: start no further trial, because of ``why``.

Every entry also has ``ended``: the outcomes of trials that no earlier entry has. An outcome never changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .space import Params
from .spec import CURRENCIES, Limits, SweepSpec

Entry = Mapping[str, Any]
STATES = ("succeeded", "stopped", "capped", "failed", "interrupted", "refused", "cancelled")
"""States of an ended trial: pruned is ``stopped``, over its own cap ``capped``, without a machine ``refused``.

A trial that the platform took back or lost, after its last retry, is ``interrupted``.
"""
SLACK = 1e-9
"""Relative error of sums of money that counts as equal."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A trial of the log. ``cap`` has its own limits by job field."""

    n: int
    run: str
    params: Params
    cap: Mapping[str, float]
    at: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The end of a trial. ``value`` is of the metric, ``at`` the progress there. None for a use that is unknown.

    ``max_cost`` and ``max_gpu_hours`` are the use in these currencies: US dollars and hours of GPUs.
    """

    trial: int
    state: str
    value: float | None = None
    at: float | None = None
    max_cost: float | None = None
    max_gpu_hours: float | None = None
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class State:
    """A sweep after a prefix of its log. ``stops`` has the reason by trial, ``closing`` that of stopping every trial.

    ``ended`` is the reason of the end, or empty. ``opened`` is the number of trials when limits changed last.
    """

    limits: Limits
    trials: tuple[Trial, ...] = ()
    outcomes: Mapping[int, Outcome] = field(default_factory=dict)
    stops: Mapping[int, str] = field(default_factory=dict)
    recorded: frozenset[int] = frozenset()
    closing: str = ""
    ended: str = ""
    opened: int = 0

    @property
    def live(self) -> list[Trial]:
        """The trials without an outcome."""
        return [trial for trial in self.trials if trial.n not in self.outcomes]

    @property
    def news(self) -> list[Outcome]:
        """The outcomes that no entry has yet."""
        return [outcome for n, outcome in sorted(self.outcomes.items()) if n not in self.recorded]

    def stop_of(self, n: int) -> str:
        """Return why trial ``n`` must stop, or an empty text."""
        return self.stops.get(n, "") or self.closing

    def with_outcomes(self, found: Iterable[Outcome]) -> State:
        """Return this state with outcomes that a client has found. A recorded outcome stays."""
        return replace(self, outcomes={**{outcome.trial: outcome for outcome in found}, **self.outcomes})


def fold(spec: SweepSpec, entries: Sequence[Entry]) -> State:
    """Return the state after ``entries``, which begin with entry 0."""
    limits, closing, ended, opened = spec.limits, "", "", 0
    trials: list[Trial] = []
    outcomes: dict[int, Outcome] = {}
    stops: dict[int, str] = {}
    for entry in entries:
        for row in entry.get("ended", ()):
            outcome = Outcome(**row)
            outcomes.setdefault(outcome.trial, outcome)
        kind = entry["kind"]
        if kind == "trial":
            trials.append(Trial(**{key: entry[key] for key in ("n", "run", "params", "cap", "at")}))
        elif kind == "stop" and entry["trial"] is None:
            closing = entry["why"]
        elif kind == "stop":
            stops[entry["trial"]] = entry["why"]
        elif kind == "limits":
            limits, closing, ended, opened = limits.changed(entry["limits"]), "", "", len(trials)
        elif kind == "end":
            ended = entry["why"]
    return State(
        limits=limits,
        trials=tuple(trials),
        outcomes=outcomes,
        stops=stops,
        recorded=frozenset(outcomes),
        closing=closing,
        ended=ended,
        opened=opened,
    )


def used(state: State, currency: str) -> float:
    """Return the use of all ended trials. An unknown use counts as the trial's cap."""
    return sum(_use(trial, state.outcomes[trial.n], currency) for trial in state.trials if trial.n in state.outcomes)


def committed(state: State, currency: str) -> float:
    """Return the most that the trials so far can use: the use of the ended ones, and the caps of all others."""
    return used(state, currency) + sum(trial.cap.get(currency, 0.0) for trial in state.live)


def _use(trial: Trial, outcome: Outcome, currency: str) -> float:
    known: float | None = getattr(outcome, currency)
    return trial.cap.get(currency, 0.0) if known is None else known


def is_over(state: State, cap: Mapping[str, float]) -> bool:
    """Return whether one more trial with ``cap`` could exceed a limit."""
    for currency in CURRENCIES:
        limit = getattr(state.limits, currency)
        if limit is not None and committed(state, currency) + cap[currency] > limit * (1 + SLACK):
            return True
    return False
