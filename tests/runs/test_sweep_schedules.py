"""Seeded schedules of a sweep: 2 to 5 clients, killed and interleaved at every call to store and platform.

In each schedule: never over budget or parallelism, no double and no lost trial, one end. A client that breaks the rule
of the prefix, or that counts only finished trials, must fail.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from sweep_schedules import World

from cloudtrain.runs.sweeps import state as states
from cloudtrain.runs.sweeps.drive import Driver, Log
from cloudtrain.runs.sweeps.state import Entry, State

FEW, ALL, MUTANT = 25, 1000, 40


def played(first: int, last: int, **world: Any) -> tuple[Counter[str], list[str]]:
    """Play these seeds; return how often each thing happened, and the problems."""
    count: Counter[str] = Counter()
    problems = []
    for seed in range(first, last):
        played = World(seed, **world).play()
        problems += [f"seed {seed}: {text}" for text in played.problems()]
        count += played.count
        count["worst"] = max(count["worst"], int(played.worst))
    return count, problems


@pytest.mark.costly
def test_schedules() -> None:
    count, problems = played(0, FEW)
    assert problems == []
    assert count["killed"] > 5 * FEW
    assert count["lost races"] > FEW


@pytest.mark.proof
@pytest.mark.timeout(7200)
def test_a_thousand_schedules(capsys: pytest.CaptureFixture[str]) -> None:
    count, problems = played(0, ALL)
    with capsys.disabled():
        print(f"\n{ALL} schedules: {dict(count)}")
    assert problems == []


class Behind(Log):
    """The first mutant: it adds behind the newest entry, which it has not judged."""

    def add(self, entry: Entry) -> bool:
        self.read()
        if entry["kind"] == "trial":
            n = sum(each["kind"] == "trial" for each in self.entries)
            entry = {**entry, "n": n, "run": f"s-{n:04d}"}
        return super().add(entry)


@pytest.mark.slow
def test_a_client_that_ignores_the_prefix_breaks_the_limits() -> None:
    _, problems = played(0, MUTANT, log=Behind)
    assert len({text.partition(":")[0] for text in problems}) > MUTANT // 4


@pytest.mark.slow
def test_a_client_that_counts_only_finished_trials_breaks_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    def finished(state: State, currency: str) -> float:
        return states.used(state, currency)

    monkeypatch.setattr(states, "committed", finished)
    _, problems = played(0, MUTANT, driver=Driver)
    assert len({text.partition(":")[0] for text in problems if "USD" in text}) > MUTANT // 4
