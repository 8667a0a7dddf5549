"""Runs of `e2e/survivor.py` seen from outside: their output, their lost work, and that no bit differs."""

from __future__ import annotations

import os
import re
import shutil
import signal
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from jobs import Done, Jobs, Once

SCRIPT = Path(__file__).parents[1] / "e2e" / "survivor.py"
TRIALS = int(os.environ.get("CLOUDTRAIN_TRIALS") or 0)
SEED = os.environ.get("CLOUDTRAIN_SEED") or "0"
LONGEST = 300
"""Steps of the uninterrupted runs, and so the most of any other."""
SETTLE_SECONDS = 5.0
"""Seconds before a kill by which a finished checkpoint surely counts. They cover 2 s of quiet, 1 s until the last node
has looked, 0.5 s until node 0 asks again, and the copy. The rest is for a busy machine."""
FIRST_SECONDS = 10.0
"""Extra seconds for the first checkpoint of a start, if only one of several nodes writes it."""
LINE = re.compile(r"\[a([\d.]+) n(\d+) r(\S+) #\d+\] (.*)")


@dataclass(frozen=True)
class Line:
    attempt: str
    node: int
    rank: str
    text: str


@dataclass
class Start:
    """Output of the ranks of one start of all nodes, by step and then by rank."""

    first: dict[str, int] = field(default_factory=dict)
    resumed: set[str] = field(default_factory=set)
    steps: dict[int, dict[str, str]] = field(default_factory=lambda: defaultdict(dict))
    saved: dict[int, dict[str, float]] = field(default_factory=lambda: defaultdict(dict))
    stopped: dict[str, int] = field(default_factory=dict)
    done: dict[str, int] = field(default_factory=dict)

    def take(self, line: Line) -> None:
        match line.text.split():
            case ["from", step, "of", name]:
                self.first[line.rank] = int(step)
                self.resumed.add(name.strip("'"))
            case ["step", step, *words]:
                assert line.rank not in self.steps[int(step)], f"step {step} twice"
                self.steps[int(step)][line.rank] = " ".join(words)
            case ["saved", step, when]:
                self.saved[int(step)][line.rank] = float(when)
            case ["stopped", "at", step]:
                self.stopped[line.rank] = int(step)
            case ["done", "at", step]:
                self.done[line.rank] = int(step)


class Survivor:
    """One run of the script with ``words``, on 2 nodes of 2 ranks, in the background."""

    def __init__(
        self, jobs: Jobs, *words: str, flags: tuple[str, ...] = (), nodes: int = 2, processes: int = 2
    ) -> None:
        shutil.copy(SCRIPT, jobs.code)
        self.jobs, self.nodes, self.world = jobs, nodes, nodes * processes
        shape = ("--nodes", str(nodes), "--nproc-per-node", str(processes))
        self.run = jobs.detach(SCRIPT.name, *shape, *flags, "--max-runtime", "20m", "--", *words)
        self.folder = jobs.store / "runs" / self.run.run_id
        self.live = self.folder / "live"

    # ----------------------------------------------------------------------------------------------------------- output

    def lines(self) -> list[Line]:
        """Return all lines of the nodes so far, as the platform has them."""
        found = []
        for path in sorted(self.folder.glob("supervisor/out/*/node-*.log")):
            *whole, _ = path.read_text(errors="replace").split("\n")
            matches = [match for line in whole if (match := LINE.fullmatch(line))]
            found += [Line(match[1], int(match[2]), match[3], match[4]) for match in matches]
        return found

    def starts(self) -> dict[str, Start]:
        """Return the starts by attempt, in order."""
        found: dict[str, Start] = defaultdict(Start)
        for line in self.lines():
            found[line.attempt].take(line)
        return dict(sorted(found.items(), key=lambda item: [int(part) for part in item[0].split(".")]))

    def attempt(self) -> str:
        """Return the newest start with output; empty before the first."""
        return next(reversed(self.starts()), "")

    def until(self, attempt: str, text: str, seconds: float = 240) -> None:
        """Wait until a rank of ``attempt`` has printed a line that begins with ``text``."""
        self.jobs.wait_for(
            lambda: any(line.attempt == attempt and line.text.startswith(text) for line in self.lines()), seconds
        )

    def ended(self, timeout: float = 240) -> Done:
        return self.jobs.cli("wait", self.run.url, "--json", timeout=timeout)

    # ------------------------------------------------------------------------------------------------------------ kills

    def rank(self, rank: int) -> int:
        """Return the pid of a rank on this machine."""
        return self.jobs.wait_for(
            lambda: next(
                (
                    pid
                    for pid, line in sorted(self.jobs.processes().items())
                    if SCRIPT.name in line and self.jobs.variable(pid, "RANK") == str(rank)
                ),
                None,
            )
        )

    def runtime(self, attempt: str, node: int) -> int | None:
        """Return the pid of a node's first process on this machine, once ``attempt`` has one."""
        wanted = {"CLOUDTRAIN_ENGINE_ATTEMPT": attempt, "CLOUDTRAIN_ENGINE_NODE": str(node)}
        for pid, line in self.jobs.processes().items():
            if "cloudtrain.pyz run " in line and all(self.jobs.variable(pid, k) == v for k, v in wanted.items()):
                return pid
        return None

    def kill_node(self, node: int) -> None:
        """Kill a node's runtime and all its children, as if the power failed."""
        family = [self.jobs.node(node)]
        parents = {pid: _parent(pid) for pid in self.jobs.processes()}
        for pid in family:
            family += [child for child, parent in parents.items() if parent == pid]
        for pid in family:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    # ----------------------------------------------------------------------------------------------------------- checks

    def check(self, done: Done, uninterrupted: dict[int, str], steps: int) -> dict[str, Start]:
        """Check that the run succeeded from complete checkpoints only. Each step must equal the uninterrupted run's,
        bit for bit."""
        result, starts = done.json, self.starts()
        assert (done.code, result["state"]) == (0, "succeeded"), result
        assert not [line for line in self.lines() if "REFUSED" in line.text]
        assert [attempt["number"] for attempt in result["attempts"]] == list(starts)
        for attempt, start in zip(result["attempts"], starts.values(), strict=True):
            assert len(set(start.first.values())) <= 1, start.first
            assert start.resumed <= {attempt["resumed_from"]}
            for step, said in start.steps.items():
                assert set(said.values()) == {uninterrupted[step]}, f"step {step} of attempt {attempt['number']}"
        assert set().union(*(start.steps for start in starts.values())) >= set(range(1, steps + 1))
        last = starts[result["attempts"][-1]["number"]]
        assert last.done == {str(rank): steps for rank in range(self.world)}
        return starts


def _parent(pid: int) -> int:
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def settled(start: Start, ranks: set[str], killed: float) -> int:
    """Return the newest step whose checkpoint must survive a kill at Unix second ``killed``; without one, the first
    step. Every rank of ``ranks`` writes it, and must have finished its part `SETTLE_SECONDS` before the kill. If these
    ranks are not on every node, the start's first checkpoint must be that much older too."""
    sure = [max(when.values()) for _, when in sorted(start.saved.items()) if set(when) >= ranks]
    alone = FIRST_SECONDS if len(ranks) == 1 else 0.0
    if not sure or killed - sure[0] < SETTLE_SECONDS + alone:
        return max(start.first.values(), default=0)
    return max(
        s for s, when in start.saved.items() if set(when) >= ranks and max(when.values()) <= killed - SETTLE_SECONDS
    )


@pytest.fixture(scope="session")
def uninterrupted(once: Once, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[int, str]]:
    """Return loss and state of every step of a run without faults, by the number of nodes and processes."""

    def of(nodes: int = 2, processes: int = 2) -> dict[int, str]:
        def train() -> list[tuple[int, str]]:
            jobs = Jobs(tmp_path_factory.mktemp("uninterrupted"))
            words = ("--steps", str(LONGEST), "--interval", str(LONGEST), "--pause", "0")
            try:
                run = Survivor(jobs, *words, nodes=nodes, processes=processes)
                done = run.ended()
                assert done.code == 0, done.err
            finally:
                jobs.close()
            (start,) = run.starts().values()
            assert all(set(said.values()) == {said["0"]} and len(said) == run.world for said in start.steps.values())
            return [(step, said["0"]) for step, said in start.steps.items()]

        return dict(once(f"uninterrupted-{nodes}x{processes}", train))

    return of
