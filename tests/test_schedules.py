"""Thousands of orders in which clients, nodes and faults may come, on a simulated clock: what must hold in each.

Never two jobs of a run at once, never two of one attempt; nothing is sent after a result, nor of a cancelled run by who
could have known; the result is what happened and never another one; no limit is passed by more than the platform takes
to stop a job. See `schedules`. A seed that fails is `SEED` and the number of its schedule.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence

import pytest
from schedules import Schedule, plans, played

from cloudtrain.runs.submit import Plan

FEW, ALL = 60, 10_000
SEED = os.environ.get("CLOUDTRAIN_SEED") or "0"
WHAT = ("client killed", "client held up", "store.create after", "platform.submit after", "platform.submit before")
"""What must have befallen somebody in a good many schedules, else they say nothing."""


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Sequence[Plan]:
    return plans(tmp_path_factory.mktemp("plans"))


def check(known: Sequence[Plan], first: int, last: int) -> Counter[str]:
    """All schedules with these numbers; how often what befell somebody."""
    count: Counter[str] = Counter()
    for number in range(first, last):
        schedule = played(f"{SEED} {number}", known)
        assert not schedule.sim.problems, told(number, schedule)
        count += schedule.sim.count
    return count


def told(number: int, schedule: Schedule) -> str:
    said = "\n  ".join(schedule.sim.problems)
    return f"schedule {number} of seed {SEED}:\n  {said}\nits last calls:\n" + "\n".join(schedule.sim.history[-60:])


def test_schedules(known: Sequence[Plan]) -> None:
    check(known, 0, FEW)


@pytest.mark.proof
@pytest.mark.timeout(7200)
def test_ten_thousand_schedules(known: Sequence[Plan]) -> None:
    count = check(known, 0, ALL)
    assert all(count[what] > ALL / 200 for what in WHAT), count


def test_a_seed_is_one_schedule(known: Sequence[Plan]) -> None:
    first, second = (played("again 3", known).sim for _ in range(2))
    strip = [
        [line for line in sim.history if "staging" not in line and "/sending/" not in line] for sim in (first, second)
    ]
    assert strip[0] == strip[1]
    assert len(first.history) > 30
