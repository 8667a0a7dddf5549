"""One of two nodes gets a stop notice: all ranks save at one step, and the run continues with the next one.

The notice is SIGTERM to a node's first process: platforms send it 30 s before they take the machine. A run gets several
in turn; each is a separate trial.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from containers import left
from jobs import Jobs
from trials import SEED, TRIALS, Start, Survivor, settled

from cloudtrain.runtime.host_facts import handles_sigterm

pytestmark = [pytest.mark.slow, pytest.mark.docker]

PAUSE, INTERVAL, STEPS = 0.05, 25, 200
NOTICES = 5
GRACE_SECONDS = 30.0
"""Seconds of the platform's grace before the script gets a signal; the rest is for the mirror."""


@dataclass(frozen=True)
class Notice:
    """One notice. ``moment`` is a number of steps after a start, -1 during a checkpoint, or 0 before the first step."""

    node: int
    moment: int
    delay: float


@dataclass(frozen=True)
class Trial:
    provider: str
    words: tuple[str, ...]
    notices: tuple[Notice, ...]

    def __str__(self) -> str:
        return "-".join([self.provider, *(word.lstrip("-") for word in self.words)])


def trial(number: int) -> Trial:
    """Draw a trial by the seed: one in five in containers, one in three with the script's own handler and DataLoader
    workers."""
    draw = random.Random(f"{SEED}-{number}")
    kind = draw.choice(["folder", "dcp", "again", "file"])
    own = ("--handler", "--workers", "2") if number % 3 == 2 else ()
    notices = []
    for _ in range(NOTICES):
        moment = draw.choice([0, -1, draw.randint(1, 30), draw.randint(1, 30)])
        delay = draw.uniform(0, {0: 5.0, -1: 0.5}.get(moment, PAUSE))
        notices.append(Notice(draw.randrange(2), moment, delay))
    return Trial("docker" if number % 5 == 4 else "local", ("--kind", kind, *own), tuple(notices))


FEW = [
    Trial("local", ("--kind", "folder"), (Notice(0, 7, 0.01),)),
    Trial("local", ("--kind", "again", "--handler", "--workers", "2"), (Notice(0, 7, 0.01), Notice(1, 0, 3.0))),
    Trial("local", ("--kind", "folder"), (Notice(1, 12, 0.02), Notice(0, -1, 0.2), Notice(1, 0, 0.0))),
    Trial("local", ("--kind", "file"), (Notice(1, 8, 0.02), Notice(0, -1, 0.3))),
]
ALL = [pytest.param(one, id=f"{n}-{one}") for n, one in enumerate([*FEW, *map(trial, range(max(1, TRIALS // 100)))])]


@pytest.mark.proof
@pytest.mark.parametrize("one", ALL)
def test_no_step_is_lost(
    jobs: Jobs,
    one: Trial,
    uninterrupted: Callable[..., dict[int, str]],
    request: pytest.FixtureRequest,
    tmp_path: Path,
) -> None:
    wanted, engine, before, flags = uninterrupted(), None, [], ()
    if one.provider == "docker":
        engine = request.getfixturevalue("engine")
        flags = ("--provider", "docker", "--image", request.getfixturevalue("images")("torch"))
        before = left(engine, tmp_path)
    words = (*one.words, "--steps", str(STEPS), "--interval", str(INTERVAL), "--pause", str(PAUSE))
    run = Survivor(jobs, *words, flags=flags)
    for number, notice in enumerate(one.notices):
        give_notice(run, f"0.{number}", notice, engine)
    done = run.ended()
    starts = run.check(done, wanted, STEPS)
    attempts = done.json["attempts"]
    assert [attempt["number"] for attempt in attempts] == [f"0.{n}" for n in range(len(one.notices) + 1)]
    why = [(attempt["category"], attempt["node"], attempt["reason"].removesuffix(" (SIGTERM)")) for attempt in attempts]
    notices = [("preempted", notice.node, f"node {notice.node} got a stop signal") for notice in one.notices]
    assert why == [*notices, (None, None, "succeeded")]
    check_every_step_once(list(starts.values()), run.world)
    jobs.gone()
    assert engine is None or left(engine, tmp_path) == before


def check_every_step_once(starts: list[Start], world: int) -> None:
    """Check that every rank takes every step once over all starts, and that stopped ranks stop at one step."""
    step = 0
    for start in starts:
        assert set(start.first.values()) <= {step}
        assert sorted(start.steps) == list(range(step + 1, step + 1 + len(start.steps)))
        assert {len(ranks) for ranks in start.steps.values()} <= {world}
        step += len(start.steps)
        ended = {**start.stopped, **start.done}
        assert ended == ({str(rank): step for rank in range(world)} if start.first else {}), start
    assert step == STEPS


def give_notice(run: Survivor, attempt: str, notice: Notice, engine: Any) -> None:
    """Wait for the moment in ``attempt``, and give notice to one node."""
    node = at_node(run, attempt, notice.node, engine)
    if notice.moment == -1:
        run.until(attempt, "saving")
    elif notice.moment:
        run.jobs.wait_for(lambda: len(run.starts().get(attempt, Start()).steps) >= notice.moment, 120)
    time.sleep(notice.delay)
    node()


def at_node(run: Survivor, attempt: str, number: int, engine: Any) -> Callable[[], None]:
    """Wait until a node of ``attempt`` exists and handles signals. Return the function that gives it notice."""
    if engine is None:
        pid = run.jobs.wait_for(lambda: run.runtime(attempt, number))
        run.jobs.wait_for(lambda: handles_sigterm(pid))
        return lambda: os.kill(pid, signal.SIGTERM)
    labels = [f"cloudtrain.run={run.folder.as_uri()}", f"cloudtrain.node={number}"]
    run.until(attempt, "cloudtrain: ")
    (container,) = engine.containers(filters={"label": labels})
    return lambda: engine.kill(container["Id"], "SIGTERM")


@pytest.mark.proof
def test_a_script_without_a_handler_loses_an_interval_at_most(
    jobs: Jobs, uninterrupted: Callable[..., dict[int, str]]
) -> None:
    """Check that it trains for the full grace, and that its saves until then count."""
    wanted = uninterrupted()
    run = Survivor(jobs, "--deaf", "--steps", "200", "--interval", "30", "--pause", "0.2")
    run.until("0.0", "step 20 ")
    noticed_at = time.time()
    os.kill(jobs.node(1), signal.SIGTERM)
    done = run.ended()
    starts = run.check(done, wanted, 200)
    assert [attempt["reason"] for attempt in done.json["attempts"]] == ["node 1 got a stop signal", "succeeded"]
    least = settled(starts["0.0"], {"0", "1", "2", "3"}, noticed_at + GRACE_SECONDS - 1.0)
    assert starts["0.1"].first["0"] >= least >= 60
    jobs.gone()


def test_a_notice_while_requirements_are_installed(jobs: Jobs) -> None:
    """pip waits for an index that never answers. Its end would come after any platform's grace."""
    jobs.write("train.py", "print('never')")
    with socket.create_server(("127.0.0.1", 0)) as index:
        url = f"http://127.0.0.1:{index.getsockname()[1]}/simple"
        jobs.write("requirements.txt", f"--index-url {url}\nsomething\n")
        run = jobs.detach("train.py", "--requirements", "requirements.txt", "--nodes", "2")
        for number in (0, 1):
            jobs.wait_for(lambda number=number: jobs.pid_of(" -m pip install ", number))
        began = time.monotonic()
        os.kill(jobs.node(1), signal.SIGTERM)
        jobs.wait_for(lambda: run.status().attempts[0].reason)
        assert time.monotonic() - began < 20
        assert run.status().attempts[0].category == "preempted"
        jobs.wait_for(lambda: jobs.pid_of(" -m pip install "))
        run.cancel()
        jobs.gone(20)
        assert run.status().state == "cancelled"
