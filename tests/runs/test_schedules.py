"""Thousands of orders of clients, nodes and faults on a simulated clock, with the rules for each.

- A run never has two jobs at once, and an attempt never has two.
- Nothing is sent after a result, or to a cancelled run by a client that could know.
- The result is what happened, and never changes.
- A request that was cut off before a cancel, and arrives in its time, becomes no job that runs on.
- Nor does a request without an answer, if the platform refuses the next one.
- A client that follows a cancelled run stops its job, whichever client has died.
- Limits are exceeded by at most the time that the platform takes to stop a job.

See `schedules`. `SEED` and the number of a schedule reproduce a failure.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
from schedules import Client, Schedule, Sim, View, plans, played, simulated

from cloudtrain.errors import StorageError
from cloudtrain.runs.submit import Plan
from cloudtrain.storage.lease import MARK, Lease

FEW, ALL = 60, 10_000
SEED = os.environ.get("CLOUDTRAIN_SEED") or "0"
WHAT = (
    "client killed",
    "client held up",
    "store.create after",
    "store.swap after",
    "platform.submit after",
    "platform.submit before",
    "platform.submit late",
    "refused while a request arrives",
)
"""Events that must occur in many schedules, so that they prove something."""


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Sequence[Plan]:
    return plans(tmp_path_factory.mktemp("plans"))


def check(known: Sequence[Plan], first: int, last: int, **kind: bool) -> Counter[str]:
    """Play all schedules with these numbers. Return the count of each event."""
    count: Counter[str] = Counter()
    for number in range(first, last):
        schedule = played(f"{SEED} {number}", known, **kind)
        assert not schedule.sim.problems, told(number, schedule)
        count += schedule.sim.count
    return count


def told(number: int, schedule: Schedule) -> str:
    said = "\n  ".join(schedule.sim.problems)
    return f"schedule {number} of seed {SEED}:\n  {said}\nits last calls:\n" + "\n".join(schedule.sim.history[-60:])


@pytest.mark.slow
def test_schedules(known: Sequence[Plan]) -> None:
    check(known, 0, FEW)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("last", [FEW, pytest.param(ALL // 10, marks=pytest.mark.proof)])
@pytest.mark.parametrize(
    ("kind", "event"),
    [
        ("cuts_off", "arrived after a cancel"),
        ("loses", "refused while a request arrives"),
        ("leaves", "followed after a cancel"),
    ],
    ids=["cut off before a cancel", "refused after a lost answer", "dead before it stops the job of a cancelled run"],
)
def test_schedules_with_one_fault_more_often(known: Sequence[Plan], kind: str, event: str, last: int) -> None:
    count = check(known, 0, last, **{kind: True})
    assert count[event] > last / 20, count


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


def leased(seed: str, *, swaps: bool) -> Sim:
    """Let clients take one lease in turn. They act, renew, pause for long, and die anywhere."""
    sim, data, acting = Sim(seed), dict[str, tuple[bytes, float]](), list[str]()

    def act(client: Client, lease: Lease) -> None:
        lease.check()
        acting.append(client.name)
        try:
            sim.sleep(sim.draw.choice([0.0, 10.0, 140.0]))  # less than half of the lease that `check` leaves
            if acting != [client.name]:
                sim.wrong(f"{acting} at once")
            sim.count["acted"] += 1
        finally:
            acting.remove(client.name)

    def script(client: Client) -> None:
        for _ in range(4):
            try:
                with Lease(View(sim, data, swaps=swaps), MARK, seconds=300) as lease:
                    for _ in range(sim.draw.randrange(1, 5)):
                        act(client, lease)
                        sim.sleep(sim.draw.choice([0.0, 60.0, 900.0]))
                        if sim.draw.random() < 0.5:
                            sim.count["renewed"] += lease.renew()
            except StorageError as exc:
                sim.count["stopped" if "held up" in str(exc) else "unanswered"] += 1
                sim.sleep(1.0)

    with simulated(SimpleNamespace(sim=sim)):
        for number in range(4):
            client = sim.start(f"client {number}", script, sim.draw.choice([0.0, 0.0, 1.0, 200.0]))
            client.dies_at = sim.draw.randrange(1, 60) if sim.draw.random() < 0.3 else -1
        sim.run()
    numbers = [int(key.rpartition("/")[2]) for key in data if not swaps]
    sim.count["removed"] += max(numbers, default=0) - len(numbers)
    return sim


@pytest.mark.slow
@pytest.mark.parametrize("swaps", [True, False], ids=["swaps", "only creates"])
@pytest.mark.parametrize("count", [100, pytest.param(ALL, marks=[pytest.mark.proof, pytest.mark.timeout(3600)])])
def test_no_two_clients_have_one_lease(count: int, swaps: bool) -> None:
    total: Counter[str] = Counter()
    for number in range(count):
        sim = leased(f"{SEED} lease {number}", swaps=swaps)
        assert not sim.problems, (number, sim.problems, sim.history[-60:])
        total += sim.count
    assert total["acted"] > 8 * count
    often = ("client killed", "stopped", "unanswered", "store.swap after", "renewed")
    assert all(total[what] > count / 20 for what in often), total
    assert swaps or total["removed"] > count, total
