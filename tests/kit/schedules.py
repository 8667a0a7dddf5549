"""Clients of one run, its nodes and faults, on a simulated clock: an order of calls drawn from a seed.

The clients are the real code (submit, wait with `Retry`, reconcile, cancel, status). Each is a thread that
runs only while it has the baton. It passes the baton before every call to the store or the platform, and while it
sleeps. The seed draws the next client and the faults. So others may act, and the client may die, between any two of its
calls. Store and platform are in memory; no call really sleeps or starts anything.

The store follows the rules of the real ones. All clients see a write once it is answered, in records and listings. A
client library may report to the creator of an object that it existed. Files of nodes appear late, as platforms sync
them with a lag.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import random
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import pytest

from cloudtrain.errors import (
    AuthError,
    CapacityError,
    CloudtrainError,
    LostContactError,
    NotFoundError,
    QuotaError,
    StorageError,
)
from cloudtrain.job.job import Job
from cloudtrain.provider_api.launch_spec import LaunchRules, LaunchSpec, NodeSpec
from cloudtrain.provider_api.limits import hard_limit
from cloudtrain.provider_api.node import NodeEnvironment, Topology
from cloudtrain.provider_api.protocol import AttemptInfo, Layout, LogPage, ProviderExtras, Request, Status, context_of
from cloudtrain.runs.log_sources import patiently
from cloudtrain.runs.reconcile import reconcile_run
from cloudtrain.runs.retry import Retry
from cloudtrain.runs.run import Run
from cloudtrain.runs.submit import Plan, make_plan, send_plan
from cloudtrain.settings.settings import Settings
from cloudtrain.storage.files import Entry, Files, Loaded, TransferOptions
from cloudtrain.storage.timings import CLIENT_TIMINGS
from cloudtrain.store.store import Store

T = TypeVar("T")

NAME, RUN_ID, STORE = "simulated", "the-one", "memory://schedules/store"
BEGAN = 1.7e9
"""Unix seconds at the start of every schedule."""
HOURLY = {"H100:8": 36.0, "A100:4": 18.0, "none": 3.6}
"""US dollars an hour of the platform's machines, by their GPUs."""
ARRIVALS = (1.0, 30.0, 300.0)
"""Longest times in seconds from sending a request until it is a job, of which a schedule has one."""
GRACE = 30.0
"""Seconds that a platform takes to stop a job after its limit or a stop request."""
LOOKED = 1
"""Calls that a client may make between its check for a cancel and sending an attempt."""
MOST_LOOKS = 2
"""Looks at a job that arrived after a cancel, until it is stopped: between two calls, another client may look too."""
CALLS = 40_000
"""Most calls of all clients of a schedule; a schedule with more does not end."""
KEEPS_BATCH = {"args": ["PLANNED_WORLD_SIZE"]}
JOBS: Sequence[Mapping[str, Any]] = (
    {"max_runtime": 900},
    {"max_runtime": 900, "retries": 2},
    {"max_runtime": 1200, "retries": 3, "instance_count": 2},
    {"max_runtime": 1200, "retries": 1, "max_wait": 300},
    {"max_runtime": 1500, "retries": 1, "gpu": ["H100:8", "A100:4"], "max_wait": 200},
    {"max_runtime": 3000, "retries": 3, "max_cost": 1.5},
    {"max_runtime": 3000, "retries": 3, "max_gpu_hours": 4, "gpu": ["H100:8", "A100:4"]},
    {"max_runtime": 3000, "retries": 3, "max_gpu_hours": 4, "gpu": "H100:8", "instance_count": "1:4", **KEEPS_BATCH},
    {"max_runtime": 1500, "max_wait": 200, "gpu": ["H100:8", "A100:4"], "instance_count": "1:2", **KEEPS_BATCH},
)


class Dead(BaseException):
    """Raised where a client is killed. No further line of it has an effect, nor does the unwinding."""


# ------------------------------------------------------------------------------------------------- who runs, and when


class Actor:
    """An actor that acts at ``due`` (Unix seconds) and is ``over`` at its end."""

    due = BEGAN
    over = False


class Client(Actor):
    """A ``script`` in a thread that has the baton from one `pause` to the next."""

    def __init__(self, sim: Sim, name: str, script: Callable[[Client], None], due: float) -> None:
        self.sim, self.name, self.due, self._script = sim, name, due, script
        self.calls, self.dies_at, self.looked, self.is_cut_off = 0, -1, -1, False
        self.turn = threading.Lock()
        self.turn.acquire()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self.turn.acquire()
        self.sim.local.client = self
        try:
            self._script(self)
        except Dead:
            self.sim.count["client killed"] += 1
        except BaseException:  # noqa: BLE001 - the script lets nothing through that a client may raise
            self.sim.wrong(f"{self.name}: {traceback.format_exc()}")
        self.over = True
        self.sim.next().release()

    def pause(self, seconds: float) -> None:
        """Let others act for at least ``seconds``."""
        self.due = self.sim.now + seconds
        turn = self.sim.next()
        if turn is not self.turn:
            turn.release()
            self.turn.acquire()
        if self.sim.aborted:
            raise Dead

    def join(self) -> None:
        self._thread.join(30)
        assert not self._thread.is_alive()


class Events(Actor):
    """An actor that runs a generator. It yields the seconds until its next step."""

    def __init__(self, sim: Sim, work: Iterator[float], due: float) -> None:
        self.sim, self._work, self.due = sim, work, due

    def step(self) -> None:
        try:
            self.due = self.sim.now + next(self._work)
        except StopIteration:
            self.over = True


class Sim:
    """One schedule. ``seed`` fixes every draw, ``count`` counts the faults, and ``problems`` lists the errors."""

    def __init__(self, seed: str) -> None:
        self.draw, self.now = random.Random(seed), BEGAN
        self.at_result: Callable[[], None] = lambda: None
        self.actors: list[Actor] = []
        self.clients: list[Client] = []
        self.local = threading.local()
        self.count: Counter[str] = Counter()
        self.problems: list[str] = []
        self.calm = self.aborted = self.leaves = False
        self._all_over = threading.Lock()
        self.calls = 0
        self.history: list[str] = []
        self.faulty, self.slow = self.draw.choice([0.0, 0.02, 0.1]), self.draw.choice([0.0, 0.02, 0.1])

    def wrong(self, text: str) -> None:
        self.problems.append(f"at {self.now - BEGAN:.1f} s: {text}")

    def time(self) -> float:
        return self.now

    def start(self, name: str, script: Callable[[Client], None], due: float = 0.0) -> Client:
        client = Client(self, name, script, self.now + due)
        self.clients.append(client)
        self.actors.append(client)
        return client

    def run(self) -> None:
        """Run until all actors have ended."""
        self._all_over.acquire()
        self.next().release()
        self._all_over.acquire()
        self._all_over.release()
        for client in self.clients:
            client.join()

    def next(self) -> threading.Lock:  # type: ignore[valid-type]
        """Return the lock of the client that gets the baton next. Actors that are not clients act here at once."""
        while waiting := [actor for actor in self.actors if not actor.over]:
            self.actors = waiting
            self.now = max(self.now, min(actor.due for actor in waiting))
            chosen = self.draw.choice([actor for actor in waiting if actor.due <= self.now])
            if self.calls > CALLS and not self.aborted:
                self.wrong(f"no end after {CALLS} calls")
                self.aborted = True
            if isinstance(chosen, Client):
                return chosen.turn
            chosen.step()  # type: ignore[attr-defined]
        return self._all_over

    def sleep(self, seconds: float) -> None:
        client: Client | None = getattr(self.local, "client", None)
        if client is not None:
            client.pause(seconds)

    def call(
        self, what: str, carry_out: Callable[[], T], faults: Sequence[str] = (), rate: float = 0.0
    ) -> tuple[T | None, str]:
        """Make one call of the client with the baton. Return its result and its fault. The fault is ``before`` or
        ``after`` the call's effect, or one of ``faults``, which the caller applies. ``rate``: 0 for the schedule's."""
        client: Client | None = getattr(self.local, "client", None)
        if client is None:
            return carry_out(), ""
        self.calls += 1
        client.calls += 1
        if client.calls == client.dies_at:
            client.dies_at = 0
        if client.dies_at == 0:
            raise Dead
        held = not self.calm and self.draw.random() < self.slow
        client.pause(self.draw.choice([1.0, 20.0, 70.0, 200.0]) if held else self.draw.choice([0.0, 0.0, 0.05, 0.5]))
        self.count["client held up"] += held
        times = {"platform.cancel": 4, "store.create": 4, "platform.submit": 6}.get(what.split()[0], 1)
        rate = rate or self.faulty * times
        fault = self.draw.choice(faults) if faults and not self.calm and self.draw.random() < rate else ""
        if fault:
            self.count[f"{what.split()[0]} {fault}"] += 1
        self.history.append(f"{self.now - BEGAN:8.1f} {client.name:12} {what} {fault}".rstrip())
        return (None if fault in ("before", "late", "refused", "denied") else carry_out()), fault


# ------------------------------------------------------------------------------------------------------------ the store


class View(Files):
    """The store as a client sees it. ``data`` is key to (content, Unix seconds of its last change). Without ``swaps``,
    it can only create exclusively, like OBS."""

    url, copies, swaps = STORE, True, True

    def __init__(self, sim: Sim, data: dict[str, tuple[bytes, float]], *, swaps: bool = True) -> None:
        self.sim, self.data, self.swaps = sim, data, swaps

    def _call(self, what: str, carry_out: Callable[[], T], faults: Sequence[str] = ("before",)) -> tuple[T | None, str]:
        found, fault = self.sim.call(f"store.{what}", carry_out, faults)
        if fault in ("before", "after"):
            raise StorageError(f"memory: {what}: the service does not answer")
        return found, fault

    def _set(self, key: str, data: bytes) -> None:
        if key.endswith(f"{RUN_ID}/result.json") and key in self.data:
            old, new = json.loads(self.data[key][0]), json.loads(data)
            if (old["state"], old["native_id"]) != (new["state"], new["native_id"]):
                self.sim.wrong(f"the result was {old['state']} and becomes {new['state']}")
        self.data[key] = (data, self.sim.now)

    def _there(self, key: str) -> bool:
        """Return True if readers already see the key; files of nodes come late."""
        return key in self.data and self.data[key][1] <= self.sim.now

    def read(self, key: str) -> bytes:
        found, _ = self._call(f"read {key}", lambda: self.data[key][0] if self._there(key) else None)
        if found is None:
            raise FileNotFoundError(key)
        return found

    def write(self, key: str, data: bytes) -> None:
        self._call(f"write {key}", lambda: self._set(key, data), ("before", "after"))

    def create(self, key: str, data: bytes, *, private: bool = False) -> bool:
        def make() -> bool:
            if key in self.data:
                return False
            if key.endswith(f"{RUN_ID}/result.json"):
                self.sim.at_result()
            self.data[key] = (data, self.sim.now)
            client: Client | None = getattr(self.sim.local, "client", None)
            cancelled = f"runs/{RUN_ID}/cancelled.json" in self.data
            if self.sim.leaves and client and cancelled and key.endswith(("/cancelled.json", "/submitted.json")):
                client.dies_at = client.calls + 1
            return True

        made, fault = self._call(f"create {key}", make, ("before", "after", "told that it was there"))
        return bool(made) and not fault

    def load(self, key: str) -> Loaded | None:
        found, _ = self._call(f"load {key}", lambda: self.data[key] if self._there(key) else None)
        return Loaded(found[0], str(hash(found[0])), found[1]) if found is not None else None

    def swap(self, key: str, version: str | None, data: bytes) -> str:
        """Swap a version. After a lost answer, compare the content, as `RemoteFiles.swap` does. The client may die
        before that."""
        assert self.swaps or version is None, "it only creates"

        def replace() -> bool:
            if (str(hash(self.data[key][0])) if key in self.data else None) != version:
                return False
            self.data[key] = (data, self.sim.now)
            return True

        made, _ = self._call(f"swap {key}", replace, ("before", "after"))
        if not made:
            raise FileExistsError(key)
        return str(hash(data))

    def size(self, key: str) -> int | None:
        found, _ = self._call(f"size {key}", lambda: len(self.data[key][0]) if self._there(key) else None)
        if key.endswith("/cancelled.json") and found is None and (client := getattr(self.sim.local, "client", None)):
            client.looked = client.calls
        return found

    def entries(self, prefix: str = "") -> dict[str, Entry]:
        def those() -> dict[str, Entry]:
            below = f"{prefix}/" if prefix else ""
            return {
                key: Entry(len(data), str(when), when)
                for key, (data, when) in sorted(self.data.items())
                if key.startswith(below) and self._there(key)
            }

        return self._call(f"list {prefix}", those)[0] or {}

    def names(self, prefix: str = "") -> list[str]:
        return sorted({key[len(prefix) + 1 :].partition("/")[0] for key in self.entries(prefix)})

    def upload(self, path: Path, key: str, *, progress: Any = None) -> None:
        self.write(key, path.read_bytes())

    def download(self, key: str, path: Path, **more: Any) -> None:
        path.write_bytes(self.read(key))

    def copy(self, source: str, target: str) -> None:
        self.write(target, self.read(source))

    def remove(self, prefix: str) -> None:
        self.discard([key for key in self.data if key == prefix or key.startswith(f"{prefix}/")])

    def discard(self, keys: Sequence[str]) -> None:
        def drop() -> None:
            for key in keys:
                self.data.pop(key, None)

        self._call("remove", drop, ("before", "after"))


# --------------------------------------------------------------------------------------------------------- the platform


@dataclass
class Start:
    """One start of all nodes of a native job."""

    number: str
    began: float
    ended: float | None = None
    reason: str = ""


@dataclass
class Native:
    """A native job's true state.

    - ``ends``: the ends of its starts, as drawn.
    - ``cause``: the cause that its nodes report.
    - ``late``: the seconds beyond its limit.
    - ``late_by``: the client that sent it at the moment of a cancel.
    - ``awaited``: it arrived after a cancel, in the time for which every client looks for it.
    - ``looks``: the looks at it without a stop request.
    - ``followed``: such looks of each client that follows the cancelled run to its end.
    """

    id: str
    request: Request
    made: float
    ends: list[str]
    queue: float
    late_by: Client | None = None
    awaited: bool = False
    looks: int = 0
    followed: Counter[str] = field(default_factory=Counter)
    state: str = "pending"
    category: str = ""
    cause: str = ""
    starts: list[Start] = field(default_factory=list)
    finished: float | None = None
    stop: bool = False
    ran: float = 0.0
    late: float = 0.0

    @property
    def alive(self) -> bool:
        return self.state in ("pending", "running")


class Cloud:
    """All jobs of the platform, and the platform's kind. ``created`` counts the jobs of each attempt."""

    def __init__(self, sim: Sim, data: dict[str, tuple[bytes, float]]) -> None:
        self.sim, self.data, draw = sim, data, sim.draw
        self.jobs: dict[tuple[int, int], Native] = {}
        self.created: Counter[int] = Counter()
        self.coming: set[tuple[int, int]] = set()
        self.arrival, sim.at_result = draw.choice(ARRIVALS), self._check_over
        self.tells_starts, self.ends_waits = draw.random() < 0.5, draw.random() < 0.5
        self.restarts, self.lag, self.late = draw.random() < 0.5, draw.choice([0.0, 5.0, 40.0]), draw.random() < 0.25

    def arrive(self, request: Request, by: Client | None) -> Iterator[float]:
        """Make a job of a request whose client got no answer, after a while. It was sent by ``by`` after a cancel."""
        yield self.sim.draw.uniform(0, self.arrival)
        self.coming.discard((request.attempt, request.gpu_index))
        self.create(request, is_late=True, by=by)

    def create(self, request: Request, *, is_late: bool = False, by: Client | None = None) -> str:
        key = (request.attempt, request.gpu_index)
        if key not in self.jobs:
            late_by = self._check(request, is_late=is_late, by=by)
            awaited = is_late and by is None and self._is_awaited()
            self.sim.count["arrived after a cancel"] += awaited
            self.created[request.attempt] += 1
            draw = self.sim.draw
            kinds = ["succeeded", "succeeded", "user_error", "infra", "oom", "preempted", "lost", "runs on"]
            ends = [draw.choice(kinds) for _ in range(4)]
            none = request.body["gpu"] and draw.random() < 0.5
            queue = 1e6 if none or draw.random() < 0.1 else draw.choice([0.0, 5.0, 60.0, 250.0])
            job = Native(f"job-{request.attempt}-{request.gpu_index}", request, self.sim.now, ends, queue, late_by)
            job.awaited = awaited
            self.jobs[key] = job
            self.sim.actors.append(Events(self.sim, self._life(job), self.sim.now))
        return self.jobs[key].id

    def _is_awaited(self) -> bool:
        """Return whether the run was cancelled, and a request that was cut off may still arrive."""
        _, cancelled = self.data.get(f"runs/{RUN_ID}/cancelled.json", (b"", -1e9))
        return self.sim.now - cancelled < max(CLIENT_TIMINGS.arrival, self.arrival)

    def _check_over(self) -> None:
        """Check that no job outlives the result of a cancelled run."""
        alive = [job.id for job in self.jobs.values() if job.alive and job.awaited and not job.stop]
        if alive:
            self.sim.wrong(f"the run has ended, and {alive} arrived and was not stopped")

    def _check(self, request: Request, *, is_late: bool, by: Client | None) -> Client | None:
        """Check the rules for every job that begins. Return the client if it sent the job just after a cancel."""
        sim, client = self.sim, None if is_late else getattr(self.sim.local, "client", None)
        if alive := [job.id for job in self.jobs.values() if job.alive]:
            sim.wrong(f"attempt {request.attempt} is sent while {alive} is alive")
        if self.created[request.attempt]:
            sim.wrong(f"attempt {request.attempt} gets a second job")
        if by is not None:
            sim.count["sent after a cancel, without an answer"] += 1
            return by
        if is_late and f"runs/{RUN_ID}/result.json" in self.data:
            if self._is_awaited():
                sim.wrong(f"attempt {request.attempt} arrives after the result of the cancelled run")
            return None
        looked = client is not None and client.looked >= 0 and client.calls - client.looked <= LOOKED
        if f"runs/{RUN_ID}/cancelled.json" in self.data:
            sim.count["sent as it was cancelled"] += 1
            if not (looked or is_late):
                sim.wrong(f"{client.name} sends attempt {request.attempt} of a cancelled run")
            return client
        if f"runs/{RUN_ID}/result.json" in self.data:
            sim.wrong(f"attempt {request.attempt} is sent after the run's result")
        return None

    def _life(self, job: Native) -> Iterator[float]:
        sim, limit, wait = self.sim, float(job.request.body["seconds"]), job.request.body["wait"]
        queue, restarts = job.queue, 0
        while True:
            until = sim.now + min(queue, wait if wait and self.ends_waits else 4000.0)
            while sim.now < until and not job.stop:
                yield min(5.0, until - sim.now)
            if job.stop or queue > 1e5:
                self._end(job, "cancelled" if job.stop else "failed", "cancelled" if job.stop else "capacity")
                return
            job.state = "running"
            start = Start(f"{job.request.attempt}.{restarts}", sim.now)
            job.starts.append(start)
            self._leave(f"attempts/{start.number}.json", self._began(job, start))
            kind, planned = job.ends[restarts % 4], sim.draw.choice([1.0, 30.0, 200.0, 700.0])
            until = sim.now + min(1e9 if kind == "runs on" else planned, limit - job.ran)
            over_limit = kind == "runs on" or planned >= limit - job.ran
            while sim.now < until and not job.stop:
                yield min(10.0, until - sim.now)
            late = sim.draw.uniform(0, GRACE) if over_limit or job.stop else 0.0
            yield late
            start.ended, job.late = sim.now, job.late + late
            job.ran += sim.now - start.began
            if job.stop or over_limit:
                self._end(job, "cancelled" if job.stop else "failed", "cancelled" if job.stop else "timeout")
                return
            if kind not in ("preempted", "lost") or (kind == "preempted" and sim.draw.random() < 0.5):
                self._exit(job, start, kind)
            start.reason = kind
            if kind == "preempted" and self.restarts and restarts < 3:
                job.state, restarts, queue = "pending", restarts + 1, sim.draw.choice([1.0, 30.0, 300.0])
                continue
            yield sim.draw.choice([0.0, 2.0])
            word = {"lost": "infra", "user_error": "user_error", "oom": "oom"}.get(kind, kind)
            job.cause = word
            vague = {"oom": "", "user_error": ""}.get(word, word) if sim.draw.random() < 0.5 else word
            self._end(job, "succeeded" if kind == "succeeded" else "failed", "" if kind == "succeeded" else vague)
            return

    def _end(self, job: Native, state: str, category: str) -> None:
        job.state, job.category, job.finished = state, category, self.sim.now
        if not self.late:  # documented: all files of its nodes are there by then
            live = f"runs/{RUN_ID}/live/"
            there = {key: data for key, (data, _) in self.data.items() if key.startswith(live)}
            self.data.update({key: (data, min(self.data[key][1], self.sim.now)) for key, data in there.items()})

    # Files of nodes in the store, which a platform syncs with a lag.

    def _leave(self, name: str, record: Mapping[str, Any]) -> None:
        when = self.sim.now + (0.0 if self.sim.calm else self.sim.draw.uniform(0, self.lag))
        self.data[f"runs/{RUN_ID}/live/{name}"] = (json.dumps(record).encode(), when)

    def _began(self, job: Native, start: Start) -> dict[str, Any]:
        return {
            "protocol": 1, "attempt": start.number, "started": start.began, "after": None, "resumed_from": "",
            "direct": False, "lost": None,
        }  # fmt: skip

    def _exit(self, job: Native, start: Start, kind: str) -> None:
        """Write node 0's exit record, last."""
        failure = None
        if kind in ("user_error", "oom", "infra"):
            what = {"user_error": "ValueError: no", "oom": "OutOfMemoryError", "infra": "RuntimeError: NCCL"}[kind]
            failure = {
                "node": 0, "rank": 0, "exception": f"{what} {self.sim.draw.randrange(2)}", "file": "train.py",
                "line": 1, "traceback": what, "process_exit_code": 1, "time_ns": int(self.sim.now * 1e9),
            }  # fmt: skip
        outcome = {"succeeded": "succeeded", "preempted": "preempted"}.get(kind, "failed")
        for node in reversed(range(int(job.request.body["nodes"]))):
            self._leave(
                f"exit/{start.number}-node-{node}.json",
                {
                    "protocol": 1, "attempt": start.number, "node": node, "lines": 0, "resumed_from": "",
                    "outcome": outcome if not node or outcome != "failed" else "stopped", "remarks": [],
                    "category": kind if outcome == "failed" and not node else "", "reason": "", "told": None,
                    "failure": None if node else failure, "started": start.began, "ended": start.ended,
                    "decided": not node,
                },
            )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class NoSettings:
    """No settings."""

    prices: Mapping[str, float] = field(default_factory=lambda: dict(HOURLY))


class Provider(ProviderExtras):
    """The platform of a `Sim`, as a client reaches it; see `cloudtrain.provider_api.protocol.Provider`."""

    name: ClassVar[str] = NAME
    Settings: ClassVar[type[Any]] = NoSettings
    schemes: ClassVar[frozenset[str]] = frozenset({"memory"})
    retried_by: ClassVar[str] = "client"
    max_wait_by: ClassVar[str] = "client"
    min_poll_s: ClassVar[float] = 5.0
    max_poll_s: ClassVar[float] = 60.0
    loses = False  # the first answer of each attempt

    def __init__(self, sim: Sim | None = None, cloud: Cloud | None = None) -> None:
        self.settings = NoSettings()
        if sim is not None and cloud is not None:
            self.sim, self.cloud, self.arrival_s = sim, cloud, cloud.arrival  # type: ignore[misc]

    def plan(self, job: Job, layout: Layout, attempt: int = 0, gpu_index: int = 0) -> Request:
        gpus = [str(gpu) for gpu in job.resources.gpus] or ["none"]
        seconds, _ = hard_limit(job, NAME, lambda at: [gpus[at]], gpu_index=gpu_index, own=HOURLY)
        body = {
            "seconds": seconds, "wait": job.max_wait, "gpu": bool(job.resources.gpus), "machine": gpus[gpu_index],
            "nodes": job.resources.instance_count,
        }  # fmt: skip
        return Request(
            provider=NAME, operation="create", body=body, run=layout.run, attempt=attempt, gpu_index=gpu_index,
            context=context_of(NAME, job, layout, processes=job.resources.processes(gpu_index)),
            instance_types=(gpus[gpu_index],),
        )  # fmt: skip

    def _call(self, what: str, carry_out: Callable[[], T], faults: Sequence[str] = ("before", "denied")) -> T:
        found, fault = self.sim.call(f"platform.{what}", carry_out, faults)
        if fault in ("before", "after"):
            raise LostContactError(f"{what}: no answer")
        if fault == "denied":
            raise AuthError(f"{what}: the token has expired")
        return found  # type: ignore[return-value]

    def submit(self, request: Request, secrets: Mapping[str, str] | None = None) -> str:
        """Create the job, or find it. A request may be refused while an earlier one without an answer is on its way."""
        key, create = (request.attempt, request.gpu_index), partial(self.cloud.create, request)
        there, coming = key in self.cloud.jobs, key in self.cloud.coming
        rare = ("denied", "refused") if coming else ("denied",) if there else ("late", "denied", "refused")
        client = getattr(self.sim.local, "client", None)
        if client is not None and client.is_cut_off:
            client.dies_at = 0
        faults, rate = ("before", "after", *rare), 0.0
        if self.loses and not there:
            faults, rate = (("denied", "refused"), 0.8) if coming else (("late",), 1.0)
        try:
            native, fault = self.sim.call(f"platform.submit {request.attempt}", create, faults, rate)
        except Dead:
            if not (there or coming or self.sim.aborted):
                self._leave(request)  # it was killed while it sent the request
            raise
        self.sim.count["refused while a request arrives"] += coming and fault in ("denied", "refused")
        if fault == "late":  # the client may have been held up since its look for a cancel
            self._leave(request, client if f"runs/{RUN_ID}/cancelled.json" in self.cloud.data else None)
        if fault in ("before", "after", "late"):
            raise LostContactError("submit: no answer")
        if fault == "denied":
            raise AuthError("submit: the token has expired")
        if native is None:
            raise self.sim.draw.choice([QuotaError, CapacityError])("there is none")
        return native

    def _leave(self, request: Request, by: Client | None = None) -> None:
        """Let the request arrive later; its client, which sent it after a cancel if it is ``by``, hears nothing."""
        self.sim.count["platform.submit late"] += 1
        self.cloud.coming.add((request.attempt, request.gpu_index))
        self.sim.actors.append(Events(self.sim, self.cloud.arrive(request, by), self.sim.now))

    def find(self, request: Request) -> str | None:
        def look() -> str | None:
            job = self.cloud.jobs.get((request.attempt, request.gpu_index))
            return job.id if job else None

        return self._call(f"find {request.attempt}", look)

    def _job(self, native_id: str) -> Native:
        found = next((job for job in self.cloud.jobs.values() if job.id == native_id), None)
        if found is None:
            raise NotFoundError(f"no job {native_id}")
        return found

    def status(self, native_id: str) -> Status:
        def look() -> Status:
            job = self._job(native_id)
            job.looks += not job.stop and job.alive
            client: Client | None = getattr(self.sim.local, "client", None)
            if client is not None and f"runs/{RUN_ID}/cancelled.json" in self.cloud.data:
                follows = client.name.startswith(("sends", "waits", "reconciles", "closes"))
                job.followed[client.name] += follows and job.alive and not job.stop
            return self._said(job)

        return self._call(f"status {native_id}", look)

    def _said(self, job: Native) -> Status:
        infos = tuple(
            AttemptInfo(number=item.number, started=item.began, ended=item.ended, reason=item.reason)
            for item in job.starts
        )
        began = job.starts[0].began if job.starts else None
        running = sum((s.ended if s.ended is not None else self.sim.now) - s.began for s in job.starts)
        hours = running * int(job.request.body["nodes"]) / 3600
        return Status(
            state=job.state, native=job.state.upper(), category=job.category, started=began, finished=job.finished,
            reason=job.category, attempts=infos if self.cloud.tells_starts else (),
            billed_s=running * int(job.request.body["nodes"]), instance_type=str(job.request.body["machine"]),
            cost_usd=hours * HOURLY[str(job.request.body["machine"])],
        )  # fmt: skip

    def cancel(self, native_id: str) -> None:
        def stop() -> None:
            self._job(native_id).stop = True

        self._call(f"cancel {native_id}", stop, ("before", "after", "denied"))

    def logs(self, native_id: str, cursor: Any = None) -> LogPage:
        return LogPage(lines=(), cursor=None)

    def storage(self, url: str) -> dict[str, Any]:
        return {}

    @staticmethod
    def node_environment(environ: Mapping[str, str], argv: Mapping[str, str]) -> NodeEnvironment:
        """Return an environment without content: no node ever starts."""
        return NodeEnvironment(
            topology=Topology(nodes=1, node_rank=0, master_addr="", master_port=1), paths={}, scratch=()
        )

    def launch_spec(self, request: Request) -> LaunchSpec:
        return LaunchSpec(nodes=(NodeSpec(command=()),), rules=LaunchRules(time_limit=float(request.body["seconds"])))


class PlatformWaits(Provider):
    """A platform that itself ends jobs that wait for machines too long."""

    max_wait_by = "platform"


class PlatformRetries(Provider):
    """A platform that itself restarts nodes: a client starts no further attempt."""

    retried_by = "platform"


# ----------------------------------------------------------------------------------------------------------- a schedule


@dataclass(frozen=True, kw_only=True)
class _Given(Settings):
    made: Any

    def make_provider(self, name: str | None = None, **given: Any) -> Any:
        return self.made


def plans(folder: Path) -> list[Plan]:
    """Return the plans of `JOBS`, made once: every schedule reads the same files."""
    (folder / "train.py").write_text("print('hello')\n")
    made = Provider()
    return [
        make_plan(
            Job.make(name="sim", entry_point="train.py", source_dir=str(folder), **fields),
            settings=_Given(provider=NAME, store=STORE, made=made), run_id=RUN_ID, cwd=folder,
        )
        for fields in JOBS
    ]  # fmt: skip


class Schedule:
    """The seed's plan, clients and platform; `play` runs it and returns its problems.

    - ``cuts_off``: its first sender dies while it sends, and a client cancels the run.
    - ``loses``: the first answer of each attempt is lost. The platform may refuse the next request before the first one
      is a job.
    - ``leaves``: the client that cancels the run dies before it stops the job. A client that records a job after the
      cancel dies too. Nothing else fails.
    """

    def __init__(
        self, seed: str, known: Sequence[Plan], *, cuts_off: bool = False, loses: bool = False, leaves: bool = False
    ) -> None:
        self.sim = sim = Sim(seed)
        sim.leaves, sim.faulty = leaves, 0.0 if leaves else sim.faulty
        self.data: dict[str, tuple[bytes, float]] = {}
        self.cloud = Cloud(sim, self.data)
        kinds = [Provider, Provider, PlatformRetries, PlatformWaits if self.cloud.ends_waits else Provider]
        self.provider = sim.draw.choice(kinds)(sim, self.cloud)
        self.cloud.ends_waits &= self.provider.max_wait_by == "platform"
        plan = sim.draw.choice(known)
        for url in (plan.layout.code, plan.layout.runtime):
            self.data[url.removeprefix(f"{STORE}/")] = (b"staged", BEGAN)
        self.plan = dataclasses.replace(plan, provider=self.provider, store=self.store())
        self.cuts_off = cuts_off or sim.draw.random() < 0.2
        self.provider.loses = loses or sim.draw.random() < 0.1
        self.results: list[tuple[str, str]] = []

    def store(self) -> Store:
        store = Store(STORE, moving=TransferOptions(concurrency=1))
        store.files = View(self.sim, self.data)
        return store

    def run(self) -> Run:
        """Return a handle as another client opens it."""
        sim = self.sim
        return Run(store=self.store(), run_id=RUN_ID, provider=self.provider, clock=sim.time, sleep=sim.sleep)

    # ------------------------------------------------------------------------------------------- what the clients do

    def _client(self, what: Callable[[], None]) -> Callable[[Client], None]:
        """Return a script that calls ``what``, and repeats it after an error that a user sees."""

        def script(client: Client) -> None:
            for _ in range(3):
                with contextlib.suppress(CloudtrainError):
                    what()
                    return
                self.sim.sleep(self.sim.draw.choice([1.0, 60.0, 400.0]))

        return script

    def _send(self) -> None:
        send_plan(dataclasses.replace(self.plan, store=self.store()), environ={})
        self._wait()

    def _wait(self, timeout: float | None = 20_000) -> None:
        run, sim = self.run(), self.sim
        result = run.wait(retry=Retry(run, environ={}, clock=sim.time), timeout=timeout, patience=300)
        self.results.append((result["state"], f"who waited saw {result['state']}"))

    def _reconcile(self) -> None:
        for _ in range(self.sim.draw.randrange(1, 12)):
            row = reconcile_run(self.run(), environ={})
            if row["exit_code"] == 9:
                self.sim.wrong(f"reconcile: {row['error']}")
            self.sim.sleep(self.sim.draw.choice([0.0, 20.0, 120.0]))

    def _cancel(self) -> None:
        self.run().cancel()

    def _look(self) -> None:
        for _ in range(self.sim.draw.randrange(1, 6)):
            self.run().result()
            self.sim.sleep(self.sim.draw.choice([0.0, 30.0]))

    # ------------------------------------------------------------------------------------------------------- the play

    def play(self) -> list[str]:
        sim, draw = self.sim, self.sim.draw
        kinds = [("sends", self._send), ("waits", self._wait), ("reconciles", self._reconcile), ("looks", self._look)]
        casts = [("sends", self._send), *(draw.choice(kinds) for _ in range(draw.randrange(0, 4)))]
        if self.cuts_off or sim.leaves or draw.random() < 0.3:
            casts.append(("cancels", self._cancel))
        if self.cuts_off:
            casts += [draw.choice([*kinds[1:], ("cancels", self._cancel)]) for _ in range(2)]
        for number, (name, what) in enumerate(casts):
            due = 0.0 if not number else draw.choice([0.0, 1.0, 30.0, 300.0, 1000.0])
            due = draw.choice([2.0, 60.0, 200.0]) if self.cuts_off and number else due
            client = sim.start(f"{name} {number}", self._client(what), due)
            client.is_cut_off = self.cuts_off and not number
            dies = draw.random() < 0.5 and not client.is_cut_off
            client.dies_at = draw.randrange(1, draw.choice([30, 120])) if dies and not sim.leaves else -1
        sim.run()
        self._close()
        self._check()
        return sim.problems

    def _close(self) -> None:
        """Stop all faults. Let a last client finish the run with the commands that the messages name."""
        sim = self.sim
        sim.calm, sim.leaves, sim.now = True, False, sim.now + 3600
        reconciles = sim.draw.random() < 0.5

        def script(client: Client) -> None:
            with contextlib.suppress(AuthError, CapacityError, QuotaError):  # refused: the run is over
                send_plan(dataclasses.replace(self.plan, store=self.store()), environ={})
            for _ in range(1000):
                run = self.run()
                if run.store.result(RUN_ID) is not None:
                    return
                if reconciles:
                    row = reconcile_run(run, environ={})
                    if row["error"]:
                        sim.wrong(f"whoever closes it: {row['error']}")
                        return
                else:
                    self._wait(None)
                sim.sleep(60.0)

        sim.start("closes", script)
        sim.run()

    def _check(self) -> None:
        sim, jobs = self.sim, [self.cloud.jobs[key] for key in sorted(self.cloud.jobs)]
        stored = self.data.get(f"runs/{RUN_ID}/result.json")
        if stored is None:
            sim.wrong("there is no result")
            return
        result = json.loads(stored[0])
        for state, said in self.results:
            if state != result["state"]:
                sim.wrong(f"{said}, the result says {result['state']}")
        for job in jobs:
            if job.alive:
                sim.wrong(f"{job.id} is alive")
            if job.awaited and job.looks > MOST_LOOKS:
                sim.wrong(f"{job.id} arrived after the cancel, and was seen {job.looks} times before it was stopped")
            follower, seen = max(job.followed.items(), key=lambda item: item[1], default=("", 0))
            if seen > MOST_LOOKS + 1 and not sim.faulty:  # a reconcile of the attempt before looks once more
                sim.wrong(f"{follower} saw {job.id} of the cancelled run {seen} times, and did not stop it")
            sim.count["followed after a cancel"] += seen > 0
            if job.late_by is not None or job.awaited:
                if job.late_by and not (job.stop or job.late_by.dies_at == 0 or sim.faulty):
                    sim.wrong(f"{job.late_by.name} sent {job.id} as the run was cancelled, and leaves it")
                continue
            noted = self.data.get(f"runs/{RUN_ID}/attempts/{job.request.attempt}/submitted.json")
            if noted is None or json.loads(noted[0])["native_id"] != job.id:
                sim.wrong(f"{job.id} is not noted")
        self._check_limits(jobs)
        # A job that was sent during the cancel may be the result's job, if it was recorded before the result.
        settled = [job for job in jobs if (job.late_by is None and not job.awaited) or job.id == result["native_id"]]
        self._check_result(result, settled)

    def _check_limits(self, jobs: Sequence[Native]) -> None:
        """Check that each job runs at most `GRACE` seconds beyond its limit."""
        sim, job = self.sim, self.plan.job
        ran = sum(item.ran - item.late for item in jobs)
        if ran > job.max_runtime + 1:
            sim.wrong(f"it ran for {ran:.0f} s, which max_runtime {job.max_runtime} forbids")
        usd = sum(
            (j.ran - j.late) * j.request.body["nodes"] / 3600 * HOURLY[str(j.request.body["machine"])] for j in jobs
        )
        if job.max_cost is not None and usd > job.max_cost + 0.01:
            sim.wrong(f"it cost {usd:.2f}, which max_cost {job.max_cost} forbids")
        if job.max_gpu_hours is not None:
            hours = sum(
                (j.ran - j.late) * j.request.body["nodes"] / 3600 * int(j.request.body["machine"].split(":")[1])
                for j in jobs
            )
            if hours > job.max_gpu_hours + 0.01:
                sim.wrong(f"it took {hours:.2f} GPU hours, max_gpu_hours is {job.max_gpu_hours}")
        tried = [item for item in jobs if item.category not in ("capacity", "quota") and not item.stop]
        if len(tried) > 1 + job.retries + max(0, len(job.resources.gpu) - 1):
            sim.wrong(f"{len(tried)} attempts, and retries is {job.retries}")

    def _check_result(self, result: Mapping[str, Any], jobs: Sequence[Native]) -> None:
        sim, folder = self.sim, f"runs/{RUN_ID}"
        cancelled = f"{folder}/cancelled.json" in self.data
        if not jobs:
            refused = self._has(0, "refused.json") and result["category"] in ("auth", "quota", "capacity")
            if not cancelled and not (refused and result["state"] == "failed"):
                sim.wrong(f"nothing ran, and it is {result['state']}")
            return
        last = jobs[-1]
        refused = next((k for k in range(last.request.attempt + 1, 20) if self._has(k, "refused.json")), None)
        expired = self._has(last.request.attempt, "expired.json")
        if result["native_id"] != last.id:
            sim.wrong(f"the result is of {result['native_id']}, the last job {last.id}")
        state, categories = last.state, {last.category or None, last.cause or None, "infra"}
        if state == "cancelled" and expired and not (cancelled and result["state"] == state):
            state, categories = "failed", {"capacity"}
        elif state == "cancelled":
            categories = {"cancelled"}
        elif state == "succeeded":
            categories = {None}
        if refused is not None and state == "failed" and not cancelled:
            categories |= {"quota", "capacity"}
        if self.cloud.late and last.starts[1:] and result["category"] == "preempted":
            return  # only a start before the last one left a record
        if (result["state"], result["category"] in categories) != (state, True):
            sim.wrong(f"it {state} of {categories}, the result says {result['state']} of {result['category']}")
        rows, truth = {row["number"] for row in result["attempts"]}, {s.number for job in jobs for s in job.starts}
        first = {f"{job.request.attempt}.0" for job in jobs}
        if not first <= rows <= truth | first:
            sim.wrong(f"the result tells of {sorted(rows)}, there were {sorted(truth)}")

    def _has(self, attempt: int, name: str) -> bool:
        return f"runs/{RUN_ID}/attempts/{attempt}/{name}" in self.data


@contextlib.contextmanager
def simulated(schedule: Any) -> Iterator[None]:
    """Give all modules that read the time or sleep the schedule's clock. Replace parallel reads by serial ones, so that
    the seed alone sets the order."""
    sim = schedule.sim
    patient = partial(patiently, clock=sim.time, sleep=sim.sleep)

    class Clock:
        time = staticmethod(sim.time)
        monotonic = staticmethod(sim.time)
        sleep = staticmethod(sim.sleep)

    with pytest.MonkeyPatch.context() as patch:
        for module in ("deliver", "retry", "reconcile"):
            patch.setattr(f"cloudtrain.runs.{module}.patiently", patient)
        for module in ("runs.deliver", "runs.submit", "store.store", "storage.lease"):
            patch.setattr(f"cloudtrain.{module}.time", Clock)
        patch.setattr("cloudtrain.runs.handover.time", Clock)
        patch.setattr("cloudtrain.runs.reconcile.Retry", partial(Retry, clock=sim.time))
        patch.setattr("cloudtrain.store.store.parallel", lambda work, items, jobs=1: [work(item) for item in items])
        patch.setattr("cloudtrain.runs.log_sources.random", random.Random(0))
        yield


def played(seed: str, known: Sequence[Plan], **kind: bool) -> Schedule:
    """Play the schedule of ``seed`` to its end and return it. ``kind`` are arguments of `Schedule`."""
    schedule = Schedule(seed, known, **kind)
    with simulated(schedule):
        schedule.play()
    return schedule
