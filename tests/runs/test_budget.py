"""The budget of a team: seeded schedules of several clients with kills, its refusals, and real runs that reserve."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from cloudtrain.errors import SpecError
from cloudtrain.runs.budget import Budget, BudgetState
from cloudtrain.runs.sweeps.drive import Log
from cloudtrain.runs.sweeps.state import Entry

LIMIT, CAP, RUNS = 40.0, 10.0, 40
FEW, ALL, MUTANT = 40, 1000, 100
STEPS, DEEPEST = 400, 3


class Dead(BaseException):
    """The client was killed here."""


@dataclass
class Job:
    """A job of the platform, which costs 1 USD in each unit of time."""

    need: int
    used: float = 0.0
    state: str = "running"


class World:
    """A store, a platform and 2 to 5 clients that send 40 runs of 10 USD each into a budget of 40 USD.

    Before and after every call the seed may kill the client, let another one act, or let time pass.
    """

    def __init__(self, seed: int, *, log: type[Log] = Log, again: bool = True) -> None:
        self.random = random.Random(f"budget {seed}")
        self.kill, self.log, self.again = 0.0, log, again
        self.objects: dict[int, str] = {}
        self.recorded: set[str] = set()
        self.cancelled: set[str] = set()
        self.sending: dict[str, int] = {}
        self.results: dict[str, float] = {}
        self.jobs: dict[str, Job] = {}
        self.now, self.depth, self.acts, self.worst = 0.0, DEEPEST, 0, 0.0
        self.count: Counter[str] = Counter()
        self.busy: set[int] = set()
        self.clients = [self.client() for _ in range(self.random.randint(2, 5))]
        self.clients[0].change({"max_cost": LIMIT})
        self.kill, self.depth = 0.01, 0

    def client(self) -> Budget:
        return Budget("team", self.log(self, "budgets/team"), self, clock=lambda: self.now, doubt=2)

    # ----------------------------------------------------------------------------------------- calls, store, platform

    def moment(self) -> None:
        promised = sum(CAP if job.state == "running" else job.used for job in self.jobs.values())
        self.worst = max(self.worst, promised)
        if self.random.random() < self.kill:
            raise Dead
        if self.random.random() < 0.05:
            self.tick()
        if self.depth < DEEPEST and self.random.random() < 0.1:
            self.step()

    def call(self, act: Callable[[], Any]) -> Any:
        self.moment()
        found = act()
        self.moment()
        return found

    def log_entries(self, folder: str, start: int = 0) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        while (text := self.call(lambda: self.objects.get(start + len(found)))) is not None:
            found.append(json.loads(text))
        return found

    def add_log_entry(self, folder: str, number: int, entry: Entry) -> bool:
        return bool(self.call(lambda: self.objects.setdefault(number, text := json.dumps(entry)) is text))

    def use_of(self, run_id: str, cap: Mapping[str, float]) -> Mapping[str, float] | None:
        if self.call(lambda: run_id in self.results and (run_id in self.jobs or run_id not in self.sending)):
            return {"max_cost": self.results[run_id]}
        return None

    def is_recorded(self, run_id: str) -> bool:
        return bool(self.call(lambda: run_id in self.recorded))

    def tick(self) -> None:
        self.now += 1
        for job in self.jobs.values():
            if job.state == "running":
                job.used += 1
                job.state = "ended" if job.used >= min(job.need, CAP) else "running"

    # ------------------------------------------------------------------------------------------------------- clients

    def step(self) -> None:
        """Let a client act; a killed one is replaced by a client that has read nothing."""
        at = self.random.randrange(len(self.clients))
        if at in self.busy:
            return
        self.busy.add(at)
        self.depth += 1
        self.acts += 1
        who = self.acts
        try:
            run_id = f"r{self.random.randrange(RUNS)}"
            act = self.random.choice(["send", "send", "resend", "close", "cancel"])
            self.act(self.clients[at], run_id, act, who)
        except Dead:
            self.count["killed"] += 1
            self.clients[at] = self.client()
            self.sending = {run: sender for run, sender in self.sending.items() if sender != who}
        except SpecError:
            self.count["refused"] += 1
        finally:
            self.busy.discard(at)
            self.depth -= 1

    def act(self, budget: Budget, run_id: str, act: str, who: int) -> None:
        if act == "close":
            budget.settle()
        elif act == "cancel" and self.random.random() < 0.3:
            self.call(lambda: self.cancelled.add(run_id) if run_id in self.recorded else None)
        elif act == "send" and run_id not in self.results:
            if not self.call(lambda: run_id in self.recorded):
                budget.reserve(run_id, {"max_cost": CAP})
                self.call(lambda: self.recorded.add(run_id))
            self.send(budget, run_id, who)
        elif act == "resend" and run_id in self.recorded:
            self.send(budget, run_id, who)
        self.close(run_id)

    def send(self, budget: Budget, run_id: str, who: int) -> None:
        if self.call(lambda: run_id in self.results or run_id in self.jobs):
            return
        if self.again:
            budget.reserve(run_id, {"max_cost": CAP})
        if self.call(lambda: self.sending.setdefault(run_id, who)) == who:
            if not self.call(lambda: run_id in self.cancelled or run_id in self.results):
                self.call(lambda: self.jobs.setdefault(run_id, Job(need=self.random.randint(2, 12))))
            self.call(lambda: self.sending.pop(run_id, None))

    def close(self, run_id: str) -> None:
        """Record the result of a run that has ended or was cancelled before it was sent."""
        job = self.jobs.get(run_id)
        if job is not None and job.state == "ended":
            self.call(lambda: self.results.setdefault(run_id, job.used))
        elif job is None and run_id in self.cancelled and run_id not in self.sending:
            self.call(lambda: self.results.setdefault(run_id, 0.0) if run_id not in self.jobs else None)

    def play(self) -> list[str]:
        """Let the clients act until everything has ended. Return the errors."""
        for _ in range(STEPS):
            self.step()
        self.kill, self.depth = 0.0, DEEPEST
        found = [f"{self.worst:g} of {LIMIT:g} USD were promised"] if self.worst > LIMIT else []
        for _ in range(20):
            self.tick()
        for run_id in {*self.jobs, *self.cancelled}:
            self.sending.pop(run_id, None)
            self.close(run_id)
        client = self.client()
        client.settle()
        self.now += 5
        state = client.settle()
        waiting = {run for run in self.recorded if run not in self.results}
        found += ["a reservation is lost"] if set(state.held) - waiting else []
        spent = sum(job.used for job in self.jobs.values())
        found += [f"{state.spent('max_cost'):g} in the log, {spent:g} used"] if state.spent("max_cost") != spent else []
        return found


def played(count: int, **world: Any) -> tuple[Counter[str], list[str]]:
    happened: Counter[str] = Counter()
    problems = []
    for seed in range(count):
        one = World(seed, **world)
        problems += [f"seed {seed}: {text}" for text in one.play()]
        happened += one.count
        happened["jobs"] += len(one.jobs)
        happened["doubts"] += sum(json.loads(text)["kind"] == "doubt" for text in one.objects.values())
    return happened, problems


@pytest.mark.costly
def test_schedules() -> None:
    happened, problems = played(FEW)
    assert problems == []
    assert min(happened[name] for name in ("killed", "refused", "jobs")) > 2 * FEW
    assert happened["doubts"] > 0


@pytest.mark.proof
@pytest.mark.timeout(3600)
def test_a_thousand_schedules(capsys: pytest.CaptureFixture[str]) -> None:
    happened, problems = played(ALL)
    with capsys.disabled():
        print(f"\n{ALL} schedules: {dict(happened)}")
    assert problems == []


class Behind(Log):
    """The first mutant: it adds behind the newest entry, which it has not judged."""

    def add(self, entry: Entry) -> bool:
        self.read()
        return super().add(entry)


def breaks(**world: Any) -> bool:
    """Return True once a schedule promises more than the limit."""
    return any("promised" in text for seed in range(MUTANT) for text in World(seed, **world).play())


@pytest.mark.costly
def test_a_client_that_ignores_the_prefix_breaks_the_limit() -> None:
    assert breaks(log=Behind)


def test_a_client_that_counts_only_ended_runs_breaks_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BudgetState, "reserved", lambda self, currency: 0.0)
    assert breaks()


@pytest.mark.costly
def test_a_client_that_does_not_reserve_again_after_its_record_breaks_the_limit() -> None:
    assert breaks(again=False)
