"""A run that is killed, anywhere and by anything, resumes from its newest complete checkpoint as if undisturbed.

A trial has the tests' own script, one kind of checkpoint, a provider, a victim and a moment. After each kill the run
must resume by itself. It must not resume from before the checkpoint that was surely complete then (see
`trials.settled`), nor from an incomplete one. Every step must have the loss and the state of the undisturbed run, bit
for bit.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from containers import left
from jobs import Jobs
from trials import SEED, TRIALS, Survivor, settled

from cloudtrain.runtime.checkpoint_model import Checkpoint
from cloudtrain.runtime.checkpoints import complete

pytestmark = [pytest.mark.slow, pytest.mark.docker]

PAUSE = 0.1
STEPS = {"folder": 150, "dcp": 150, "again": 300, "file": 300}
INTERVAL = {"folder": 30, "dcp": 30, "again": 60, "file": 60}
"""Steps between checkpoints. A rewritten one must stay unchanged for a while to count as finished."""
IN_PLACE = ("again", "file")
"""Kinds with two kills of a run: the second one after it has overwritten the restored checkpoint."""
MOMENTS = {"folder": (1, 120), "dcp": (1, 120), "again": (120, 180), "file": (120, 180)}
"""Range of steps of the first kill: so early that the run is not over at the last one."""
KILL_RANK = """
import os, signal, sys
from pathlib import Path
for folder in Path("/proc").glob("[0-9]*"):
    words = (folder / "environ").read_bytes().split(b"\\0") if os.access(folder / "environ", os.R_OK) else []
    if f"RANK={sys.argv[1]}".encode() in words and b"survivor.py" in (folder / "cmdline").read_bytes():
        os.kill(int(folder.name), signal.SIGKILL)
        sys.exit("killed")
"""


@dataclass(frozen=True)
class Trial:
    """One trial. ``moment`` is during step ``step``, during the write of its checkpoint, or ``start``, before the
    first."""

    provider: str
    victim: str
    number: int
    kind: str
    moment: str
    step: int
    delay: float

    @property
    def sign(self) -> str:
        """Return the line after which its moment begins."""
        return {
            "step": f"step {self.step} ", "saving": f"saving {self.step}", "start": "cloudtrain: attempt"
        }[self.moment]  # fmt: skip

    def __str__(self) -> str:
        return f"{self.provider}-{self.victim}{self.number}-{self.kind}-{self.moment}{self.step}"


def trial(number: int) -> Trial:
    """Draw a trial: every provider with every victim in turn, the rest by the seed."""
    draw = random.Random(f"{SEED}-{number}")
    provider, victim = [("local", "rank"), ("docker", "node"), ("local", "node"), ("docker", "rank")][number % 4]
    kind = draw.choice(["folder", "dcp", "again", "file"])
    moment = draw.choice(["step", "step", "step", "saving", "saving", "start"])
    steps = [s for s in range(*MOMENTS[kind]) if moment == "step" or s % INTERVAL[kind] == 0]
    return Trial(
        provider, victim, draw.randrange(4 if victim == "rank" else 2), kind, moment,
        0 if moment == "start" else draw.choice(steps),
        draw.uniform(0, {"step": PAUSE, "saving": 0.5, "start": 2.0}[moment]),
    )  # fmt: skip


FEW = [
    Trial("local", "rank", 3, "dcp", "step", 107, 0.05),
    Trial("docker", "node", 1, "folder", "step", 100, 0.02),
    Trial("local", "node", 0, "folder", "saving", 90, 0.25),
    Trial("docker", "node", 1, "file", "step", 150, 0.02),
]
ALL = [
    pytest.param(one, id=name)
    for name, one in [
        *((str(one), one) for one in FEW),
        *((f"{n}-{trial(n)}", trial(n)) for n in range(max(2, TRIALS // 50))),
    ]
]


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Jobs]:
    made = Jobs(tmp_path)
    (tmp_path / "scratch").mkdir()
    made.environ["TMPDIR"] = str(tmp_path / "scratch")
    yield made
    made.close()


@pytest.mark.proof
@pytest.mark.parametrize("one", ALL)
def test_a_killed_run_goes_on(
    jobs: Jobs,
    one: Trial,
    uninterrupted: Callable[..., dict[int, str]],
    request: pytest.FixtureRequest,
    tmp_path: Path,
) -> None:
    wanted, steps = uninterrupted(), STEPS[one.kind]
    flags: tuple[str, ...] = ("--retries", "3")
    strike, before = Strike(one), []
    if one.provider == "docker":
        strike.engine = request.getfixturevalue("engine")
        flags += ("--provider", "docker", "--image", request.getfixturevalue("images")("torch"))
        before = left(strike.engine, tmp_path)
    words = ("--kind", one.kind, "--steps", str(steps), "--interval", str(INTERVAL[one.kind]), "--pause", str(PAUSE))
    run = Survivor(jobs, *words, flags=flags)
    run.until("0.0", one.sign)
    time.sleep(one.delay)
    blows = [strike(run)]
    if one.kind in IN_PLACE:
        jobs.wait_for(
            lambda: (found := complete(run.live / "checkpoints")) and found[-1].commit["attempt"] == "1.0", 120
        )
        blows.append(strike(run))
    starts = run.check(run.ended(), wanted, steps)
    assert list(starts) == [f"{k}.0" for k in range(len(blows) + 1)]
    for blow, (start, following) in zip(blows, itertools.pairwise(starts.values()), strict=True):
        resumed = following.first["0"]
        assert resumed >= settled(start, {"0"} if one.kind == "file" else {"0", "1", "2", "3"}, blow.when)
        if blow.complete_before:  # nothing complete may be lost
            least = blow.complete_before[-1].name.removeprefix("step-")
            assert resumed >= (int(least) if least.isdigit() else INTERVAL[one.kind])
    jobs.gone()
    assert not [*(tmp_path / "scratch").glob("cloudtrain-*")]
    assert strike.engine is None or left(strike.engine, tmp_path) == before


@dataclass(frozen=True)
class Blow:
    """One kill: its time ``when`` (Unix seconds), and the checkpoints complete just before."""

    when: float
    complete_before: list[Checkpoint]


class Strike:
    """Kills the victim of a trial without warning."""

    def __init__(self, one: Trial) -> None:
        self.one, self.engine = one, None

    def __call__(self, run: Survivor) -> Blow:
        blow = Blow(complete_before=complete(run.live / "checkpoints"), when=time.time())
        if self.engine is not None:
            self.in_container(run, self.engine)
        elif self.one.victim == "rank":
            os.kill(run.rank(self.one.number), signal.SIGKILL)
        else:
            run.kill_node(self.one.number)
        return blow

    def in_container(self, run: Survivor, engine: Any) -> None:
        node = self.one.number if self.one.victim == "node" else self.one.number // 2
        labels = [f"cloudtrain.run={run.folder.as_uri()}", f"cloudtrain.node={node}"]
        (container,) = engine.containers(filters={"label": labels})
        if self.one.victim == "node":
            engine.kill(container["Id"], "SIGKILL")
            return
        words = ["python3", "-c", KILL_RANK, str(self.one.number)]
        run.jobs.wait_for(lambda: engine.exec_start(engine.exec_create(container["Id"], words)["Id"]) == b"killed\n")
