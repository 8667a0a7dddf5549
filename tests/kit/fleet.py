"""Hundreds of nodes of one run in one process: the real `Node` of each, on simulated machines (`simulated`).

- Real: node link, node 0's decisions, workspaces, unpacking, mirrors, commits, log lines and records, on real files.
- Simulated: time, the wire between nodes, torchrun and its ranks (`Ranks`), and the platform's copy of the output.

A function of the test plays the ranks.
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from simulated import World

from cloudtrain.provider_api.node import NodeEnvironment, Topology
from cloudtrain.runtime import (
    cause,
    checkpoint_done,
    checkpoints,
    commits,
    history,
    link,
    logs,
    mirror,
    mirror_files,
    node,
    outputs,
    record,
    resume,
    stall,
    workspace,
)

MODULES = (
    *(cause, checkpoints, commits, checkpoint_done, mirror_files, history, link),
    *(logs, mirror, node, outputs, record, resume, stall),
)
PORT = 29500


class Ranks:
    """A node's `cloudtrain.runtime.launch.Ranks`; ``fleet.train(self)`` plays torchrun and its ranks."""

    def __init__(self, fleet: Fleet, **given: Any) -> None:
        self.log, self.emit, self.env, self.code_folder = given["log"], given["emit"], given["env"], given["cwd"]
        self.first_rank, self.processes, self.lone = given["first_rank"], given["processes"], False
        self.node = fleet.world.current.node or 0
        self.pid, self.pids = 0, dict.fromkeys(range(self.processes), 0)
        self.codes: dict[int, int] = {}
        self.closing_ns, self.last_line, self.unshown = 0, "", [""]
        self.stop_told_ns: int | None = None
        self.notice, self.ended = fleet.world.threading.Event(), False
        self.fleet, self.world = fleet, fleet.world
        self.stop = fleet.world.threading.Event()
        self.by = 0
        self.world.threading.Thread(target=fleet.train, args=(self,), name="ranks", daemon=True).start()

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)

    # ------------------------------------------------------------------------------------------- for the node's runtime

    def notify(self) -> bool:
        new = self.stop_told_ns is None and self.fleet.handles_notice
        if new:
            self.stop_told_ns = self.world.time.time_ns()
            self.notice.set()
        return new

    def notified(self, rank: int, time_ns: int) -> bool:
        return self.stop_told_ns is not None and self.stop_told_ns <= time_ns

    def signal(self, number: int) -> None:
        if number != signal.SIGTERM or self.stop_told_ns is None:
            self.by = self.by or number
            self.stop.set()

    def kill(self) -> None:
        self.signal(signal.SIGKILL)

    def last_line_of(self, rank: int, time_ns: int) -> str:
        return ""

    def complaint(self, code: int | None) -> tuple[str, str]:
        return f"torchrun failed: exit code {code}", "user_error"

    def dump_stacks(self) -> dict[int, list[str]]:
        return {}

    # -- for a test that plays the ranks

    def says(self, text: str, local: int = 0) -> None:
        self.log.write(str(self.first_rank + local), text)

    def tells(self, event: str, local: int = 0, **more: Any) -> None:
        self.emit({"t": "rank", "local": local, "event": event, "time_ns": self.world.time.time_ns(), **more})

    def start(self) -> None:
        for local in range(self.processes):
            self.tells("start", local, pid=0)

    def raises(self, exception: str, local: int = 0) -> None:
        """Fail a rank; torchrun then stops the others of its node."""
        self.tells("error", local, exception=exception, file="train.py", line=7, traceback="", code=1)
        self.codes[local] = 1
        for other in range(self.processes):
            self.codes.setdefault(other, -signal.SIGTERM)
        self.over(1)

    def over(self, code: int) -> None:
        """End all ranks, and torchrun with ``code``."""
        for local in range(self.processes):
            if code == 0:
                self.tells("end", local)
            self.tells("eof", local)
        self.emit({"t": "ended", "code": code})

    def stopped(self) -> None:
        """End all ranks by the signal that `stop` stands for."""
        self.codes = dict.fromkeys(range(self.processes), -self.by)
        self.over(1)

    def saves(self, name: str, data: bytes) -> None:
        """Write this node's part of a checkpoint, dated now by the simulated clock."""
        path = Path(self.env["CLOUDTRAIN_CHECKPOINT_DIR"], name, f"__{self.node}_0.distcp")
        path.parent.mkdir(exist_ok=True)
        files = {path: data, **({path.with_name(".metadata"): b"m"} if self.node == 0 else {})}
        now = self.world.clock()
        for file, content in files.items():
            file.write_bytes(content)
            os.utime(file, (now, now))

    def measures(self, step: int) -> None:
        """Write a row of metrics as rank 0."""
        with open(self.env["CLOUDTRAIN_METRICS_FILE"], "a", encoding="ascii") as stream:
            stream.write(json.dumps({"step": step, "loss": 1 / (1 + step)}) + "\n")


@dataclass
class Fleet:
    """``nodes`` nodes whose ranks run ``train``; ``live`` is the folder that the platform syncs. Their clocks differ by
    up to two seconds, and they start up to half a second apart. ``late`` gives extra seconds by node. ``stop_grace``
    and ``flush_seconds`` are those of each NodeEnvironment."""

    nodes: int
    folder: Path
    context: Mapping[str, Any]
    code: Path
    live: Path
    train: Callable[[Ranks], None]
    patch: pytest.MonkeyPatch
    seed: int = 0
    handles_notice: bool = False
    late: Mapping[int, float] = field(default_factory=dict)
    attempt: int = 0
    stop_grace: float = 120.0
    flush_seconds: float = 5.0

    def __post_init__(self) -> None:
        skews = random.Random(self.seed)
        ahead = [0.0, *(skews.uniform(-2, 2) for _ in range(self.nodes - 1))]
        self.world = World(skew=ahead.__getitem__)
        self.world.inhabit(self.patch, MODULES)
        self.said: dict[int, list[str]] = defaultdict(list)
        self.codes: dict[int, int] = {}
        self.running: dict[int, node.Node] = {}
        self.inboxes: dict[int, Any] = {}
        writer = logs.LogWriter
        self.patch.setattr(node, "LogWriter", lambda *, node, **more: writer(node=node, out=node, **more))
        self.patch.setattr(logs, "os", _Output(self.said))
        self.patch.setattr(node, "reap", lambda: None)
        self.patch.setattr(checkpoints, "open_for_writing", lambda entries: set())
        self.patch.setattr(checkpoints, "modest", lambda: None)
        self.patch.setattr(workspace, "Ranks", partial(Ranks, self))
        self.began_rss = _rss()

    def site(self, number: int) -> NodeEnvironment:
        topology = Topology(nodes=self.nodes, node_rank=number, master_addr="node-0", master_port=PORT)
        paths = {"live": str(self.live), "code": str(self.code)}
        return NodeEnvironment(
            topology=topology,
            paths=paths,
            scratch=[str(self.folder)],
            stop_grace=self.stop_grace,
            flush_seconds=self.flush_seconds,
        )

    def _node(self, number: int) -> None:
        site, inbox = self.site(number), self.world.queue.SimpleQueue()
        made = node.Node(context=self.context, site=site, attempt=self.attempt, key=b"k" * 32, inbox=inbox)
        self.running[number], self.inboxes[number] = made, inbox
        self.codes[number] = made.run()
        self.world.end(number)

    def start(self) -> None:
        order = random.Random(self.seed + 1)
        for number in order.sample(range(self.nodes), self.nodes):
            moment = self.world.now + self.late.get(number, order.uniform(0, 0.5))
            self.world.at(moment, partial(self.world.spawn, number, partial(self._node, number), f"node-{number}"))

    def until(self, condition: Callable[[], bool], seconds: float) -> None:
        """Let time pass until ``condition()`` is true; fail after ``seconds``."""
        end = self.world.now + seconds
        while not condition():
            assert self.world.now < end, f"not within {seconds} s: {sorted(self.codes)}"
            self.world.sleep(0.25)

    def run(self, seconds: float = 300.0) -> None:
        """Run all nodes until those that are alive have ended."""
        self.start()
        self.until(self.over, seconds)

    def over(self) -> bool:
        return len(self.codes.keys() | self.world.dead) == self.nodes

    def tell_to_stop(self, number: int) -> None:
        """Send the platform's stop signal."""
        self.inboxes[number].put((-1, {"t": "signal", "number": signal.SIGTERM, "at": self.world.now}))

    def exits(self) -> dict[int, dict[str, Any]]:
        """Return the exit records by node."""
        found = [json.loads(path.read_bytes()) for path in (self.live / "exit").glob("*.json")]
        return {item["node"]: item for item in found}

    def rss(self) -> float:
        """Return the rise of this process's peak memory since the start, in bytes a node."""
        return max(0.0, _rss() - self.began_rss) / self.nodes


class _Output:
    """`os`, whose ``write`` to descriptor n becomes node n's output on the platform."""

    def __init__(self, lines: dict[int, list[str]]) -> None:
        self._lines = lines

    def write(self, number: int, data: bytes) -> int:
        self._lines[number] += data.decode().splitlines()
        return len(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)


def _rss() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
