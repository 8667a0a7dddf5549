"""Drive a sweep: read its log, look after its trials, and add the next entry.

Any number of clients may drive one sweep. Each step may end at any call: the next step of any client continues from
there, because every call may be made twice.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from ...errors import CloudtrainError, LostContactError
from .decide import next_entry
from .prune import Points
from .spec import SweepSpec
from .state import Entry, Outcome, State, Trial, fold


class EntryStore(Protocol):
    """The part of a store that holds logs: of sweeps and budgets, each in its own ``folder``."""

    def log_entries(self, folder: str, start: int = 0) -> list[dict[str, Any]]:
        """Return the entries from number ``start`` on, up to the first that is missing."""

    def add_log_entry(self, folder: str, number: int, entry: Entry) -> bool:
        """Create entry ``number``; return False if another client has."""


class Log:
    """The log in ``folder`` as far as this client has read it. Entries never change, so each is read once."""

    def __init__(self, store: EntryStore, folder: str) -> None:
        self._store, self._folder = store, folder
        self.entries: list[dict[str, Any]] = []

    def read(self) -> list[dict[str, Any]]:
        """Read what others have added; return all entries."""
        self.entries += self._store.log_entries(self._folder, len(self.entries))
        return self.entries

    def add(self, entry: Entry) -> bool:
        """Add the entry right after those that were read. Return False if another client was first: decide again."""
        return self._store.add_log_entry(self._folder, len(self.entries), entry)


class Trials(Protocol):
    """The runs of a sweep's trials. Every method may be called again by any client."""

    def advance(self, trial: Trial, stop: str) -> Outcome | None:
        """Send the trial if it was not sent, stop it if ``stop`` gives a reason, retry it if it may be retried.

        Return its outcome once it has ended for good. Raises the errors of store and platform.
        """

    def points(self, trial: Trial) -> Points:
        """Return the points of its metrics so far."""


@dataclass
class Driver:
    """A client of one sweep. ``clock`` gives Unix seconds.

    A running trial is looked at again after ``fresh`` seconds. ``errors`` are those of the last step, by trial: such a
    trial counts as running with its whole cap.
    """

    spec: SweepSpec
    sweep_id: str
    cap: Mapping[str, float]
    log: Log
    trials: Trials
    clock: Callable[[], float] = time.time
    by: str = ""
    fresh: float = 0.0
    errors: dict[int, CloudtrainError] = field(default_factory=dict)
    _outcomes: dict[int, Outcome] = field(default_factory=dict)
    _looks: dict[tuple[int, str], float] = field(default_factory=dict)

    def state(self) -> State:
        """Return the state by the log and the outcomes that this client knows."""
        self.log.read()
        return self.known

    def step(self) -> bool:
        """Look after the running trials, then add at most one entry. Return whether to step again at once.

        Raises the errors of the log; `errors` has those of trials.
        """
        state = self.state()
        self.errors = {}
        for trial in state.live:
            self._advance(trial, state.stop_of(trial.n))
        state = state.with_outcomes(self._outcomes.values())
        entry = next_entry(self.spec, state, self._points(state), self.clock(), sweep_id=self.sweep_id, cap=self.cap)
        if entry is None:
            return False
        self.add(entry)
        return True

    def _advance(self, trial: Trial, stop: str) -> None:
        now = self.clock()
        if self.fresh and now - self._looks.get((trial.n, stop), -self.fresh) < self.fresh:
            return
        try:
            outcome = self.trials.advance(trial, stop)
        except CloudtrainError as exc:
            self.errors[trial.n] = exc
            return
        self._looks[trial.n, stop] = now
        if outcome is not None:
            self._outcomes[trial.n] = outcome

    def add(self, entry: Entry) -> bool:
        """Add an entry that was decided after the prefix that this client has read. Return False if it was too late."""
        return self.log.add({**entry, "by": self.by, "at": self.clock()})

    def _points(self, state: State) -> dict[int, Points]:
        if self.spec.prune is None or state.ended:
            return {}
        found = {}
        for trial in state.trials:
            if trial.n not in self.errors:
                found[trial.n] = self.trials.points(trial)
        return found

    def raise_first(self) -> None:
        """Raise an error of the last step, if any; first one that asking again does not cure."""
        for error in sorted(self.errors.values(), key=lambda error: isinstance(error, LostContactError)):
            raise error

    @property
    def known(self) -> State:
        """The state by the entries that this client has read and the outcomes that it knows."""
        return fold(self.spec, self.log.entries).with_outcomes(self._outcomes.values())


def writer() -> str:
    """Return the name by which this client signs its entries: machine and process."""
    return f"{socket.gethostname()}/{os.getpid()}"
