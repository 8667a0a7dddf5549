"""A run on a platform in memory, with a real store on disk and a clock that only sleep moves."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from cloudtrain.errors import (
    CloudtrainError,
    NotFoundError,
)
from cloudtrain.job.job import Job
from cloudtrain.provider_api.launch_spec import LaunchSpec
from cloudtrain.provider_api.node import NodeEnvironment
from cloudtrain.provider_api.protocol import (
    AttemptInfo,
    Layout,
    LogLine,
    LogPage,
    ProviderExtras,
    Request,
    Status,
)
from cloudtrain.runs.log_order import Line
from cloudtrain.runs.run import Run
from cloudtrain.store.store import Store

T0 = 1_700_000_000.0

T0_ISO = "2023-11-14T22:13:20.000Z"

PENDING, RUNNING, SUCCEEDED = Status(state="pending"), Status(state="running"), Status(state="succeeded", native="Done")


class Time:
    """A clock that only sleep moves. ``at`` holds the events by their second after T0."""

    def __init__(self) -> None:
        self.now = T0
        self.naps: list[float] = []
        self.at: list[tuple[float, Callable[[], object]]] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        assert len(self.naps) < 100_000, "waits for ever"
        self.naps.append(seconds)
        self.now += seconds
        for event in [event for event in self.at if event[0] <= self.now - T0]:
            self.at.remove(event)
            event[1]()


@dataclass(frozen=True, kw_only=True)
class NoSettings:
    account: str = ""


@dataclass
class Platform(ProviderExtras):
    """A provider with a platform in memory, whose answers the test sets."""

    name: ClassVar[str] = "memory"
    Settings: ClassVar[type[Any]] = NoSettings
    schemes: ClassVar[frozenset[str]] = frozenset({"file"})
    retried_by: ClassVar[str] = "platform"
    max_wait_by: ClassVar[str] = "platform"
    min_poll_s: ClassVar[float] = 0.1
    max_poll_s: ClassVar[float] = 2.0

    settings: Any = field(default_factory=NoSettings)
    jobs: dict[str, Status] = field(default_factory=dict)
    pages: dict[str, list[LogLine]] = field(default_factory=dict)
    accepted: dict[int, str] = field(default_factory=dict)
    cancelled: list[str] = field(default_factory=list)
    status_error: CloudtrainError | None = None
    logs_error: CloudtrainError | None = None
    cancel_error: Mapping[str, CloudtrainError] = field(default_factory=dict)
    page_size: int = 2
    asked: list[str] = field(default_factory=list)

    def plan(self, job: Job, layout: Layout, attempt: int = 0, gpu_index: int = 0) -> Request:
        return request(attempt)

    def submit(self, request: Request, secrets: Mapping[str, str] | None = None) -> str:
        return self.accepted.setdefault(request.attempt, f"job-{request.attempt}")

    def find(self, request: Request) -> str | None:
        self.asked.append(f"find {request.attempt}")
        return self.accepted.get(request.attempt)

    def status(self, native_id: str) -> Status:
        self.asked.append(f"status {native_id}")
        if self.status_error:
            raise self.status_error
        if native_id not in self.jobs:
            raise NotFoundError(f"no job {native_id}")
        return self.jobs[native_id]

    def logs(self, native_id: str, cursor: Any = None) -> LogPage:
        self.asked.append(f"logs {native_id} {cursor}")
        if self.logs_error:
            raise self.logs_error
        start = cursor or 0
        lines = self.pages.get(native_id, [])
        page = tuple(lines[start : start + self.page_size])
        return LogPage(lines=page, cursor=start + len(page), more=start + len(page) < len(lines))

    def cancel(self, native_id: str) -> None:
        if native_id in self.cancel_error:
            raise self.cancel_error[native_id]
        self.cancelled.append(native_id)

    def storage(self, url: str) -> Mapping[str, Any]:
        return {}

    @staticmethod
    def node_environment(environ: Mapping[str, str], argv: Mapping[str, str]) -> NodeEnvironment:
        raise NotImplementedError

    def launch_spec(self, request: Request) -> LaunchSpec:
        raise NotImplementedError


class ClientRetried(Platform):
    retried_by: ClassVar[str] = "client"


def request(attempt: int) -> Request:
    return Request(provider="memory", operation="create", body={}, context={}, run="run", attempt=attempt)


@dataclass
class World:
    """A store in a folder, with the records that a test writes by hand."""

    root: Path
    platform: Platform = field(default_factory=Platform)
    time: Time = field(default_factory=Time)
    run_id: str = "r1"

    @property
    def folder(self) -> Path:
        return self.root / "runs" / self.run_id

    @property
    def store(self) -> Store:
        return Store(str(self.root))

    def run(self) -> Run:
        return Run(store=self.store, run_id=self.run_id, provider=self.platform, clock=self.time, sleep=self.time.sleep)

    def write(self, key: str, value: Any) -> None:
        path = self.folder / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")

    def recorded(self, *, created: float = T0 - 60, provider: str = "memory", **job: Any) -> World:
        made = Job.make(entry_point="train.py", **job)
        self.write(
            "run.json",
            {
                "protocol": 1,
                "run_id": self.run_id,
                "run": f"{self.store.url}/runs/{self.run_id}",
                "created": created,
                "provider": provider,
                "settings": {},
                "job": made.to_dict(),
                "job_digest": made.digest,
                "code": {},
                "runtime": "0" * 64,
                "version": "0",
            },
        )
        return self

    def attempt(self, number: int = 0, status: Status | None = None, *, submitted: bool = True) -> World:
        self.write(f"attempts/{number}/request.json", request(number).to_dict())
        if submitted:
            self.write(f"attempts/{number}/submitted.json", {"native_id": f"job-{number}", "time": T0})
        if status:
            self.platform.jobs[f"job-{number}"] = status
        return self

    def exit(self, node: int = 0, *, attempt: str = "0.0", outcome: str = "failed", **fields: Any) -> World:
        record = {
            "protocol": 1,
            "attempt": attempt,
            "node": node,
            "outcome": outcome,
            "category": "",
            "reason": "",
            "failure": None,
            "started": T0,
            "ended": T0 + 10,
            "lines": 0,
            "resumed_from": "",
            "decided": False,
        }
        self.write(f"live/exit/{attempt}-node-{node}.json", {**record, **fields})
        return self

    def start(self, attempt: str, *, after: str | None = None, **fields: Any) -> World:
        record = {"protocol": 1, "attempt": attempt, "started": T0, "after": after, "resumed_from": "", "lost": None}
        self.write(f"live/attempts/{attempt}.json", {**record, **fields})
        return self

    def segment(self, numbers: Sequence[int], *, node: int = 0, attempt: str = "0.0") -> World:
        text = "".join(numbered(i, node=node, attempt=attempt) + "\n" for i in numbers)
        self.write(f"live/logs/{attempt}/node-{node}/{numbers[0]:09d}.log", text)
        return self

    def says(self, *lines: str, attempt: int = 0) -> None:
        log = self.platform.pages.setdefault(f"job-{attempt}", [])
        log += [LogLine(node="host", text=text, id=f"{attempt}-{len(log) + i}") for i, text in enumerate(lines)]

    def checkpoint(
        self, name: str, *, seq: int = 1, when: float = T0 - 5, attempt: str = "0.0", size: int = 3
    ) -> World:
        folder = f"live/checkpoints/{name}/{attempt}-{seq}"
        self.write(f"{folder}/node-0/{name}/model.pt", "abc")
        files = {
            f"node-0/{name}/model.pt": {
                "size": size,
                "sha256": "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad",
            }
        }
        commit = {"protocol": 1, "name": name, "place": None, "attempt": attempt, "seq": seq, "nodes": 1, "time": when}
        self.write(f"{folder}/commit.json", {**commit, "files": files})
        return self

    def result(self) -> Any:
        path = self.folder / "result.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def numbered(seq: int, *, node: int = 0, attempt: str = "0.0") -> str:
    return f"[a{attempt} n{node} r{node} #{seq}] line {seq}"


def failure(**fields: Any) -> dict[str, Any]:
    blank = dict.fromkeys(("node", "rank", "exception", "file", "line", "traceback", "process_exit_code"))
    return {**blank, "node": 0, "rank": 0, "time_ns": 1, **fields}


ROOT_CAUSE = failure(
    node=1,
    rank=3,
    exception="ValueError: THE ROOT CAUSE\nand more",
    file="/scratch/code/t.py",
    line=3,
    traceback="Traceback …",
    process_exit_code=1,
)

REASON = "rank 3 on node 1 raised ValueError: THE ROOT CAUSE (t.py:3)"


def texts(lines: Sequence[Line]) -> list[str]:
    return [line.text for line in lines]


def failed(category: str = "", reason: str = "exit status 1", **fields: Any) -> Status:
    return Status(state="failed", category=category, reason=reason, native="Failed", **fields)


def rows(first: int, last: int, **more: Any) -> str:
    """Return lines of metrics whose loss is 1 / step, half a second apart."""
    return "".join(
        json.dumps({"step": step, "epoch": 0, "time": T0 + step / 2, "loss": 1 / step, **more}) + "\n"
        for step in range(first, last + 1)
    )


def again(world: World) -> World:
    """Return a run that was preempted after step 12 and resumed from step 8."""
    lost = {"seconds": 2.5, "steps": 4}
    preempted = Status(
        state="succeeded",
        attempts=(AttemptInfo(number="0.0", started=T0, ended=T0 + 6, category="preempted", reason="spot capacity"),
                  AttemptInfo(number="1.0", started=T0 + 10, ended=T0 + 20)),
        billed_s=16, saved=0.63, cost_usd=1.5,
    )  # fmt: skip
    world.recorded().attempt(0, preempted).start("0.0")
    world.start("1.0", after="0.0", resumed_from="step-8", lost=lost)
    world.exit(attempt="1.0", outcome="succeeded", decided=True, resumed_from="step-8")
    world.write("live/metrics/0.0-node-0.jsonl", rows(1, 12))
    world.write("live/metrics/1.0-node-0.jsonl", rows(9, 20))
    return world
