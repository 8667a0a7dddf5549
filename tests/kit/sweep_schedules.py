"""A sweep on a simulated clock: a store and a platform in memory, and clients that are killed and interleaved.

The clients are the real `Driver`, `Log` and `decide`. Before and after every call to the store or the platform the seed
may kill the client, let another client make a whole step, or let time pass. Nothing sleeps.
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from cloudtrain.errors import LostContactError
from cloudtrain.runs.sweeps.drive import Driver, Log
from cloudtrain.runs.sweeps.prune import costs_of, value_of
from cloudtrain.runs.sweeps.spec import SweepSpec
from cloudtrain.runs.sweeps.state import Entry, Outcome, State, Trial, committed

CAP = {"max_cost": 10.0}
BUDGET, PARALLEL, TRIALS = 150.0, 4, 24
SPEC = SweepSpec.from_dict(
    {
        "metric": "loss",
        "space": {"lr": {"low": 1e-5, "high": 1e-1, "log": True}, "k": {"low": 1, "high": 8}},
        "limits": {"trials": TRIALS, "parallel": PARALLEL, "max_cost": BUDGET, "failures": 20},
        "prune": {"rule": "asha", "min": 3, "factor": 3},
    }
)
STEPS = 4000
"""Steps of all clients; a sweep with more does not end."""
DEEPEST = 3
"""Most clients that act within one another's calls."""


class Dead(BaseException):
    """Raised where a client is killed."""


@dataclass
class Job:
    """A job of the platform, which costs 1 USD per unit of time."""

    cap: float
    need: int
    loss: float
    created: int = 1
    used: int = 0
    state: str = "running"
    rows: list[dict[str, float]] = field(default_factory=list)


class World:
    """The store, the platform and the clients of one sweep, on the clock ``now``."""

    def __init__(self, seed: int, *, kill: float = 0.004, driver: type[Driver] = Driver, log: type[Log] = Log) -> None:
        self.random = random.Random(f"sweep {seed}")
        self.kill, self._driver, self._log = kill, driver, log
        self.objects: dict[int, str] = {}
        self.jobs: dict[str, Job] = {}
        self.runs: set[str] = set()
        self.now, self.depth, self.peak, self.worst = 0.0, 0, 0, 0.0
        self.count: Counter[str] = Counter()
        self.busy: set[int] = set()
        self.clients = [self.client() for _ in range(self.random.randint(2, 5))]

    # ------------------------------------------------------------------------------------------------------- clients

    def client(self) -> Driver:
        self.count["clients"] += 1
        return self._driver(
            spec=SPEC, sweep_id="s", cap=CAP, log=self._log(self, "s"), trials=self, clock=lambda: self.now,
            by=f"client {self.count['clients']}",
        )  # fmt: skip

    def step(self, at: int) -> None:
        """Let a client make one step; a killed one is replaced by a client that has read nothing."""
        if at in self.busy:
            return
        self.busy.add(at)
        self.depth += 1
        try:
            self.clients[at].step()
        except Dead:
            self.count["killed"] += 1
            self.clients[at] = self.client()
        finally:
            self.depth -= 1
            self.busy.discard(at)

    def moment(self) -> None:
        """Let anything happen between two instructions of a client."""
        self.check()
        if self.random.random() < self.kill:
            raise Dead
        if self.random.random() < 0.03:
            self.tick()
        if self.depth < DEEPEST and self.random.random() < 0.02:
            self.step(self.random.randrange(len(self.clients)))

    def call(self, act: Callable[[], Any]) -> Any:
        self.moment()
        found = act()
        self.moment()
        return found

    def check(self) -> None:
        promised = sum(job.cap if job.state == "running" else job.used for job in self.jobs.values())
        self.worst = max(self.worst, promised)
        self.peak = max(self.peak, sum(job.state == "running" for job in self.jobs.values()))

    # --------------------------------------------------------------------------------------------------------- store

    def log_entries(self, folder: str, start: int = 0) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        while (text := self.call(lambda: self.objects.get(start + len(found)))) is not None:
            found.append(json.loads(text))
        return found

    def add_log_entry(self, folder: str, number: int, entry: Entry) -> bool:
        def create() -> bool:
            if number in self.objects:
                self.count["lost races"] += 1
                return False
            self.objects[number] = json.dumps(entry, allow_nan=False)
            return True

        return bool(self.call(create))

    # ------------------------------------------------------------------------------------------------------ platform

    def advance(self, trial: Trial, stop: str) -> Outcome | None:
        self.call(lambda: self.runs.add(trial.run))  # run.json
        if self.random.random() < 0.01:
            raise LostContactError("no answer")
        self.call(lambda: self.submit(trial))
        if stop:
            self.call(lambda: self.cancel(trial.run))
        job = self.call(lambda: dataclasses.replace(self.jobs[trial.run]))
        if job.state == "running":
            return None
        value = value_of(job.rows, SPEC)
        kind = {"cancelled": "stopped"}.get(job.state, job.state)
        return Outcome(trial=trial.n, state=kind, value=value, at=job.used, max_cost=job.used)

    def submit(self, trial: Trial) -> None:
        """Start a job, unless the platform has one of this run."""
        if trial.run not in self.jobs:
            need = self.random.randint(4, 14)
            self.jobs[trial.run] = Job(cap=trial.cap["max_cost"], need=need, loss=self.random.random())
            self.check()

    def cancel(self, run: str) -> None:
        if self.jobs[run].state == "running":
            self.jobs[run].state = "cancelled"

    def points(self, trial: Trial) -> list[tuple[float, float]]:
        found: list[tuple[float, float]] = self.call(lambda: costs_of(self.jobs[trial.run].rows, SPEC))
        return found

    def tick(self) -> None:
        self.now += 1
        for job in self.jobs.values():
            if job.state == "running":
                job.used += 1
                job.rows.append({"step": job.used, "loss": job.loss + 3 / job.used})
                ended = "capped" if job.used >= job.cap else "failed" if self.random.random() < 0.01 else ""
                job.state = ended or ("succeeded" if job.used >= job.need else "running")

    # ------------------------------------------------------------------------------------------------------ the whole

    def play(self) -> World:
        """Let the clients act in turn until each of them sees the end."""
        for _ in range(STEPS):
            if all(client.known.ended and not client.known.live for client in self.clients):
                break
            if self.random.random() < 0.3:
                self.tick()
            self.step(self.random.randrange(len(self.clients)))
        return self

    def problems(self) -> list[str]:
        """Return the errors: over budget, over parallelism, double or lost trials, more or fewer ends than one."""
        entries = [json.loads(self.objects[number]) for number in sorted(self.objects)]
        trials = [entry for entry in entries if entry["kind"] == "trial"]
        ends = [number for number, entry in enumerate(entries) if entry["kind"] == "end"]
        state = self.clients[0].state() if not self.kill else self._state()
        found = []
        if sorted(self.objects) != list(range(len(entries))):
            found.append("the log has a gap")
        if self.worst > BUDGET:
            found.append(f"committed {self.worst:g} of {BUDGET:g} USD")
        if self.peak > PARALLEL:
            found.append(f"{self.peak} trials at once")
        if [entry["n"] for entry in trials] != list(range(len(trials))) or len({e["run"] for e in trials}) < len(
            trials
        ):
            found.append("a double trial")
        if set(self.jobs) != {entry["run"] for entry in trials}:
            found.append("a lost trial")
        if any(job.state == "running" for job in self.jobs.values()) or state.live:
            found.append("a trial has no end")
        if ends != [len(entries) - 1]:
            found.append(f"{len(ends)} ends")
        if abs(committed(state, "max_cost") - sum(job.used for job in self.jobs.values())) > 1e-6:
            found.append("the log's use differs from the platform's")
        return found

    def _state(self) -> State:
        self.kill = 0.0
        return self.client().state()
