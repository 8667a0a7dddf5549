"""A silent run: the messages between nodes, positions in real stacks, and the rank to blame."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rows import for_each

from cloudtrain.runtime import stall
from cloudtrain.runtime.cause import Failure, failure_line
from cloudtrain.runtime.idle import IdleGpus
from cloudtrain.runtime.launch import Ranks
from cloudtrain.runtime.logs import LogWriter
from cloudtrain.runtime.nccl import Recorder
from cloudtrain.runtime.stall import NAMED, Look, StackPosition, Stall, culprit, describe_positions, innermost_position
from cloudtrain.runtime.timings import TIMINGS

WORKER = Path(stall.__file__).parent / "worker.py"

# ---------------------------------------------------------------------------------------------------- which rank it is

LOADING, REDUCING = ("train.py", 40, "load_batch"), ("train.py", 52, "all_reduce")


def at(*where: tuple[str, int, str] | str) -> list[StackPosition]:
    """Return ranks 0, 1, … of nodes of two, each at its position; a text is the reason for no position."""
    return [
        StackPosition(rank // 2, rank, why=w) if isinstance(w, str) else StackPosition(rank // 2, rank, *w)
        for rank, w in enumerate(where)
    ]


OTHERS = [("train.py", line, "f") for line in range(1, 6)]


L, R = "at train.py:40 (load_batch)", "at train.py:52 (all_reduce)"
ONE, TWO = "rank 0 on node 0 is at train.py:1 (f)", "rank 1 on node 0 is at train.py:2 (f)"
THREE = f"{ONE}, {TWO}, rank 2 on node 1 is at train.py:3 (f)"


@for_each(
    ("places", "rank", "text"),
    [
        (at(REDUCING, REDUCING, REDUCING, LOADING), 3, f"rank 3 on node 1 is {L}, the other 3 are {R}"),
        (at(LOADING, REDUCING, REDUCING), 0, f"rank 0 on node 0 is {L}, the other 2 are {R}"),
        (at(REDUCING, "did not answer", REDUCING), 1, f"rank 1 on node 0 did not answer, the other 2 are {R}"),
        (at(REDUCING, "has not started", REDUCING), 1, f"rank 1 on node 0 has not started, the other 2 are {R}"),
        (at(LOADING, REDUCING), None, f"rank 0 on node 0 is {L}, rank 1 on node 0 is {R}"),
        (at(LOADING, LOADING, REDUCING, REDUCING), None, f"ranks 0, 1 are {L}, the other 2 are {R}"),
        (
            at(REDUCING, "did not answer", LOADING, REDUCING),
            None,
            f"rank 1 on node 0 did not answer, rank 2 on node 1 is {L}, the other 2 are {R}",
        ),
        (at(*["has not started"] * 2, *[REDUCING] * 3), None, f"ranks 0, 1 have not started, the other 3 are {R}"),
        (at(*["did not answer"] * 4, *[REDUCING] * 5), None, f"4 ranks did not answer, the other 5 are {R}"),
        (at(REDUCING, REDUCING), None, f"all 2 ranks are {R}"),
        (at(LOADING), 0, f"rank 0 on node 0 is {L}"),
        (at("did not answer"), 0, "rank 0 on node 0 did not answer"),
        (at(*OTHERS[:4], REDUCING, REDUCING), None, f"{THREE}, the other 3 are at 2 other lines"),
        (at(*OTHERS[:4]), None, f"{THREE}, rank 3 on node 1 is at train.py:4 (f)"),
        ([], None, ""),
    ],
)
def test_who_is_told_of_and_blamed(places: list[StackPosition], rank: int | None, text: str) -> None:
    blamed = culprit(places)
    assert (None if blamed is None else blamed.rank) == rank
    assert describe_positions(places) == text


where = st.sampled_from([LOADING, REDUCING, *OTHERS, "did not answer", "has not started"])
everyone = st.lists(where, min_size=1, max_size=40).map(lambda found: at(*found))


@given(everyone, st.randoms(use_true_random=False))
def test_the_culprit_is_the_one_without_whom_all_are_in_one_place(places: list[StackPosition], random: Any) -> None:
    def alone(place: StackPosition) -> bool:
        rest = [other.where for other in places if other is not place]
        return not rest or (len(rest) > 1 and len(set(rest)) == 1 and rest[0] != place.where)

    wanted = [place for place in places if alone(place)]
    random.shuffle(places)
    assert [place for place in [culprit(places)] if place is not None] == wanted


def _count(who: str) -> int:
    """Return the number of ranks in a subject of `describe_positions`."""
    if who.startswith("rank "):
        return 1
    return who.count(",") + 1 if who.startswith("ranks ") else int(re.findall(r"\d+", who)[0])


@given(everyone)
def test_every_rank_is_counted_once_and_the_rarest_places_are_named(places: list[StackPosition]) -> None:
    text = describe_positions(places)
    assert "\n" not in text
    counted = sum(map(_count, re.findall(r"(?:^|, )([^,]*?(?:\d, )*[^,]*?) (?:is|are|did|has|have) ", text)))
    assert counted == len(places), text
    sizes = sorted(Counter(place.where for place in places).items(), key=lambda item: item[1])
    if len(sizes) > NAMED + 1:
        assert f"are at {len(sizes) - NAMED} other lines" in text
        rarest = [size for _, size in sizes[:NAMED]]
        assert text.endswith(f"the other {len(places) - sum(rarest)} are at {len(sizes) - NAMED} other lines")


# ------------------------------------------------------------------------------------------------------ where a rank is

CODE = Path("/scratch/code")
TORCH = "/env/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py"
LIGHTNING = "/env/lib/python3.11/site-packages/lightning/loops.py"
STDLIB = "/usr/lib/python3.11/selectors.py"
WORKER_FRAME = ("/scratch/worker.py", 183, "_main")


TRAIN, FROZEN = "/scratch/code/train.py", "<frozen importlib._bootstrap>"


@for_each(
    ("frames", "place"),
    [
        ([(TORCH, 9, "all_reduce"), ("/scratch/code/p/a.py", 5, "step"), (TRAIN, 1, "f")], ("p/a.py", 5, "all_reduce")),
        ([(TRAIN, 7, "load")], ("train.py", 7, "load")),
        ([(STDLIB, 3, "select"), (LIGHTNING, 8, "run"), (TORCH, 1, "hook")], ("lightning/loops.py", 8, "select")),
        ([(STDLIB, 3, "select"), (LIGHTNING, 8, "run"), (TRAIN, None, "f")], ("train.py", None, "select")),
        ([(STDLIB, 3, "_shutdown")], (STDLIB, 3, "_shutdown")),
        ([(FROZEN, 3, "_load"), (TORCH, 4, "f")], (FROZEN, 3, "_load")),
        ([("/scratch/code-of-others/x.py", 3, "f")], ("/scratch/code-of-others/x.py", 3, "f")),
        ([], (None, None, "")),
    ],
)
def test_the_users_own_line_is_named(frames: list[Any], place: tuple[Any, ...]) -> None:
    for found in (frames, [*frames, WORKER_FRAME] if frames else []):
        seen = innermost_position(1, 3, found, code=CODE, bottom=WORKER_FRAME[0])
        assert (seen.node, seen.rank, seen.file, seen.line, seen.function) == (1, 3, *place)
        assert seen.why == ("" if frames else "did not answer")


# ------------------------------------------------------------------------------------------------ real ranks, looked at


class Node:
    """Real ranks of one node, without torch: worker processes with scripts of their own."""

    def __init__(self, tmp_path: Path, scripts: Sequence[str]) -> None:
        self.code = tmp_path / "code"
        self.code.mkdir()
        starts = []
        for rank, text in enumerate(scripts):
            (self.code / f"rank{rank}.py").write_text(text)
            if text:
                starts.append(f"LOCAL_RANK={rank} RANK={rank + 4} exec {sys.executable} {WORKER} rank{rank}.py &")
        self.read, self._write = os.pipe()
        os.set_blocking(self.read, False)
        log = LogWriter(node=1, out=self._write)
        log.begin("0.0", None)
        self.heard: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.ranks = Ranks(
            command=["/bin/sh", "-c", "\n".join([*starts, "wait"])], env=dict(os.environ), cwd=self.code,
            scratch=tmp_path, package=tmp_path / "p.pyz", processes=len(scripts), shim=True, log=log, first_rank=4,
            emit=self.heard.put,
        )  # fmt: skip
        self.recorder = Recorder(tmp_path / "dumps")
        self.said = ""

    def up(self, count: int) -> None:
        """Wait until ``count`` ranks have printed ``up``."""
        deadline = time.monotonic() + 60
        while self.out().count("] up") < count:
            assert time.monotonic() < deadline, self.said
            time.sleep(0.05)

    def ended(self) -> None:
        """Wait until a rank has ended."""
        while self.heard.get(timeout=60).get("event") != "eof":
            pass

    def out(self) -> str:
        with contextlib.suppress(BlockingIOError):
            self.said += os.read(self.read, 1 << 20).decode()
        return self.said

    def look(self) -> tuple[list[tuple[Any, ...]], float]:
        """Return the result of a look, and its duration."""
        began = time.monotonic()
        look = Look(self.ranks, self.recorder, node=1, code=self.code, bottom=WORKER)
        while not look.over():
            time.sleep(0.05)
        took = time.monotonic() - began
        assert all(place.node == 1 for place in look.places())
        return [(p.rank, p.why or (p.file, p.line, p.function)) for p in look.places()], took

    def close(self) -> None:
        for pid in self.ranks.pids.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.ranks.kill()
        os.close(self.read)
        os.close(self._write)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Callable[..., Node]]:
    made: list[Node] = []

    def make(*scripts: str) -> Node:
        made.append(Node(tmp_path, scripts))
        return made[-1]

    yield make
    for one in made:
        one.close()


SLEEPS = "import time\nprint('up', flush=True)\ntime.sleep(600)\n"


def test_the_main_thread_is_found_among_others_and_behind_a_progress_bar(node: Callable[..., Node]) -> None:
    threads = (
        "import threading, time\n"
        "def ожидание():\n"
        "    print('up', flush=True)\n"
        "    print('epoch 1: 30%', end='', flush=True)\n"
        "    threading.Event().wait()\n"
        "for i in range(5): threading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
        "ожидание()\n"
    )
    ranks = node(threads, SLEEPS)
    ranks.up(2)
    found, took = ranks.look()
    assert found == [(4, ("rank0.py", 5, "wait")), (5, ("rank1.py", 3, "<module>"))]
    assert took < 2
    assert ranks.out().count("(most recent call first):") == 7
    assert ranks.look()[0] == found  # a second look is a new one


@pytest.mark.slow
def test_a_stack_that_is_cut_and_a_name_that_is_escaped(node: Callable[..., Node]) -> None:
    ranks = node(
        "import time\ndef tief_größer(n):\n    if n: return tief_größer(n - 1)\n"
        "    print('up', flush=True); time.sleep(600)\ntief_größer(300)\n"
    )
    ranks.up(1)
    assert ranks.look()[0] == [(4, ("rank0.py", 4, "tief_größer"))]


@pytest.mark.slow
def test_a_main_thread_that_is_left_out_is_no_other_thread(node: Callable[..., Node]) -> None:
    ranks = node(
        "import threading, time\n"
        "for i in range(120): threading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
        "print('up', flush=True)\ntime.sleep(600)\n"
    )
    ranks.up(1)
    assert ranks.look()[0] == [(4, "did not answer")]


@pytest.mark.slow
def test_ranks_that_cannot_answer(node: Callable[..., Node]) -> None:
    stopped = "import os, signal\nprint('up', flush=True)\nos.kill(os.getpid(), signal.SIGSTOP)\n"
    ranks = node(stopped, "print('up', flush=True)", SLEEPS, "")
    ranks.up(3)
    ranks.ended()
    found, took = ranks.look()
    assert found == [(4, "did not answer"), (6, ("rank2.py", 3, "<module>")), (7, "has not started")]
    assert took < 2 * TIMINGS.stall_look


def test_a_look_waits_for_flight_recorders_too(node: Callable[..., Node], tmp_path: Path) -> None:
    (tmp_path / "dumps").mkdir()
    ranks = node(
        "import os, time\n"
        "os.mkfifo('../dumps/trigger-4.pipe')\n"
        "fd = os.open('../dumps/trigger-4.pipe', os.O_RDONLY | os.O_NONBLOCK)\n"
        "print('up', flush=True)\n"
        "while not os.read(fd, 9): time.sleep(0.1)\n"
        "time.sleep(0.8)\n"
        "open('../dumps/trace-rank-4', 'w').write('dump')\n"
        "time.sleep(600)\n"
    )
    ranks.up(1)
    assert ranks.look()[1] >= 0.8
    assert (tmp_path / "dumps" / "trace-rank-4").read_text() == "dump"


# --------------------------------------------------------------------------------------------- messages and their times

LIMIT = 0.6


class FixedLook:
    """A look that ends at once or never, with a given result."""

    def __init__(self, places: list[StackPosition] | None) -> None:
        self._places = places

    def over(self) -> bool:
        return self._places is not None

    def places(self) -> list[StackPosition]:
        return self._places or []


class Nodes:
    """The parts of several nodes, joined; messages are JSON on the way, as on the link."""

    def __init__(self, *places: list[StackPosition] | None, limit: float = LIMIT) -> None:
        self.last = [0.0] * len(places)
        self.sent: list[tuple[int, int, str]] = []
        self.parts = [
            Stall(
                node=node, processes=2, limit=limit, send=self.send(node), peers=lambda: set(range(len(places))),
                last=lambda node=node: self.last[node], look=lambda found=found: FixedLook(found),
            )  # type: ignore[misc]
            for node, found in enumerate(places)
        ]  # fmt: skip
        self.began = time.monotonic()

    def send(self, sender: int) -> Callable[[int, dict[str, Any]], None]:
        def send(node: int, message: dict[str, Any]) -> None:
            self.sent.append((sender, node, message["t"]))
            self.parts[node].take(sender, json.loads(json.dumps(message)))

        return send

    def run(self, seconds: float, *, over: bool = False, each: Callable[[float], None] = lambda t: None) -> Any:
        """Tick until node 0 has a failure, or for ``seconds``. Return the failure and its time."""
        while (now := time.monotonic() - self.began) < seconds:
            each(now)
            failures = [part.tick(over=over) for part in self.parts]
            assert not any(failures[1:])
            if failures[0] is not None:
                return failures[0], now
            time.sleep(0.02)
        return None, seconds


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TIMINGS, "alive_late", 0.1)


def test_silence_everywhere_is_a_failure_of_the_rank_that_is_elsewhere() -> None:
    places = at(REDUCING, REDUCING, REDUCING, LOADING)
    failure, when = Nodes(places[:2], places[2:]).run(5)
    assert isinstance(failure, Failure)
    assert (failure.kind, failure.category, failure.node, failure.rank) == ("stalled", "stalled", 1, 3)
    assert (failure.file, failure.line) == ("train.py", 40)
    assert (
        failure_line(failure)
        == f"no line, metric or checkpoint from any rank for {LIMIT:g} s; {describe_positions(places)}"
    )
    assert LIMIT <= when < LIMIT + TIMINGS.stacks, "it waited for a node"


def test_a_failure_without_a_culprit_names_who_saw_it() -> None:
    failure, _ = Nodes(at(REDUCING, REDUCING)).run(5)
    assert (failure.node, failure.rank, failure.file, failure.line) == (0, None, None, None)
    assert failure_line(failure).endswith("all 2 ranks are at train.py:52 (all_reduce) (seen by node 0)")


def test_a_node_that_does_not_answer_is_not_waited_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TIMINGS, "stacks", 0.5)
    failure, when = Nodes(at(REDUCING, REDUCING), None).run(9)
    assert f"ranks 0, 1 are {R}" in failure_line(failure)
    assert "the other 2 did not answer" in failure_line(failure)
    assert when >= LIMIT + 0.5


def test_a_node_without_ranks_answers_all_the_same() -> None:
    nodes = Nodes([], [])
    for part in nodes.parts:
        part._new_look = lambda: None
    failure, when = nodes.run(5)
    assert failure_line(failure) == f"no line, metric or checkpoint from any rank for {LIMIT:g} s (seen by node 0)"
    assert when < LIMIT + TIMINGS.stacks


@pytest.mark.slow
def test_signs_of_life_of_any_node_put_it_off_and_count_from_when_they_were() -> None:
    nodes = Nodes([], [], [])
    last = time.monotonic()

    def stir(now: float) -> None:
        nonlocal last
        if now < 1.5:
            last = nodes.last[2] = time.monotonic()

    failure, when = nodes.run(8, each=stir)
    assert failure is not None
    assert LIMIT <= nodes.began + when - last < LIMIT + 2
    alive = [sender for sender, node, kind in nodes.sent if kind == "alive"]
    assert set(alive) == {2}
    assert len(alive) <= 1.5 / (LIMIT / 4) + 2, "not with every line"


@pytest.mark.parametrize(("limit", "over"), [(0, False), (LIMIT, True)])
def test_no_limit_and_a_run_that_ends_for_another_cause(limit: float, over: bool) -> None:
    nodes = Nodes([], limit=limit)
    assert nodes.run(1.5, over=over)[0] is None
    assert nodes.sent == []


def test_gpus_of_ranks_that_have_ended_are_not_idle() -> None:
    """Nor does an earlier question about them get an answer."""
    [part] = Nodes(None, limit=0).parts
    part._idle = IdleGpus("5% for 1s")
    part._idle.reason = lambda now, has_metrics: "idle"  # type: ignore[method-assign]
    assert part.tick(over=False) is None
    assert part._asked is not None
    part.drop_idle()
    assert part.tick(over=False) is None
    assert part._asked is None


@pytest.mark.costly
def test_another_cause_that_comes_while_the_ranks_are_asked_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = Nodes(None)
    while (0, 0, "stacks") not in nodes.sent:
        assert nodes.parts[0].tick(over=False) is None
    monkeypatch.setattr(TIMINGS, "stacks", 0.0)
    assert nodes.parts[0].tick(over=True) is None
    assert nodes.parts[0].tick(over=False) is not None
