"""The live view of a run: its content for each size, its requests, and the terminal afterwards."""

from __future__ import annotations

import codecs
import fcntl
import io
import json
import math
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from foldercloud import NAME, install
from hypothesis import given
from hypothesis import strategies as st
from memory_run import PENDING, RUNNING, SUCCEEDED, T0, World, again, failed, failure, numbered, rows
from pages import blocks
from rich.cells import cell_len
from rich.console import Console

from cloudtrain import cli
from cloudtrain.cli.watch import Measured, Picture, Watch, fair, follow, on_terminal, screen, sparkline
from cloudtrain.errors import LostContactError, StorageError
from cloudtrain.provider_api.protocol import AttemptInfo, Status
from cloudtrain.report.live_data import LiveRunReader, NodeData
from cloudtrain.runs.log_order import Line

CLI = [sys.executable, "-m", "cloudtrain"]


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(root=tmp_path / "store")


def watched(world: World, take: Callable[[Picture], None] = lambda picture: None) -> tuple[Picture, list[Picture]]:
    """Return the last picture, and all of them."""
    pictures: list[Picture] = []

    def draw(picture: Picture) -> None:
        pictures.append(picture)
        take(picture)

    watch = Watch(world.run(), clock=world.time, sleep=world.time.sleep, on_picture=draw)
    return watch.watch(), pictures


def drawn(
    picture: Picture, *, width: int = 80, height: int = 20, now: float = T0, ascii_only: bool = False
) -> list[str]:
    """Return the lines that the picture has on a terminal of that size."""
    out = io.StringIO()
    console = Console(file=out, width=width, height=height, color_system=None)
    console.print(screen(picture, width=width, height=height, now=now, ascii_only=ascii_only))
    return [line.rstrip() for line in out.getvalue().splitlines()]


def training(world: World) -> World:
    """Waits for 20 s, then trains for 60 s: a row and a line each second, a checkpoint after 30."""
    world.recorded(max_runtime="2h").attempt(0, PENDING)

    def starts() -> None:
        world.start("0.0", started=T0 + 20)
        world.platform.jobs["job-0"] = Status(state="running", started=T0 + 20)

    def trains(second: int) -> None:
        world.write("live/metrics/0.0-node-0.jsonl", rows(1, second))
        world.write(f"live/logs/0.0/node-0/{second:09d}.log", numbered(second) + "\n")

    def ends() -> None:
        world.exit(outcome="succeeded", decided=True, ended=T0 + 80, lines=60)
        world.platform.jobs["job-0"] = SUCCEEDED

    world.time.at.append((20, starts))
    world.time.at += [(20 + second, lambda second=second: trains(second)) for second in range(1, 61)]  # type: ignore[misc]
    world.time.at.append((50, lambda: world.checkpoint("step-30", when=T0 + 50)))
    world.time.at.append((80, ends))
    return world


# ------------------------------------------------------------------------------------------------------------- requests


def test_it_asks_the_platform_no_more_often_than_wait(world: World, tmp_path: Path) -> None:
    other = training(World(root=tmp_path / "other"))
    other.run().wait()
    watched(training(world))
    asked = [name for name in world.platform.asked if name.startswith("status")]
    assert 10 < len(asked) <= len([name for name in other.platform.asked if name.startswith("status")])
    assert {name.split()[0] for name in world.platform.asked} == {"status"}, "lines come from the store"


def test_what_is_new_shows_within_seconds_and_nothing_is_written(world: World) -> None:
    training(world)
    last, pictures = watched(world)
    for second in (10, 40, 60):
        then = [picture for picture in pictures if T0 + 20 + second <= picture.when <= T0 + 26 + second]
        assert any((picture.measured.step or 0) >= second for picture in then), second
    assert [p.status.state for p in pictures if p.when < T0 + 19][-1] == "pending"
    assert any(p.checkpoint is not None and p.when <= T0 + 57 for p in pictures)
    assert (last.status.state, last.measured.step, last.lines[0][-1].text) == ("succeeded", 60, "line 60")
    assert last.result is not None
    assert last.result["state"] == "succeeded"
    written = {path.relative_to(world.folder).parts[0] for path in world.folder.rglob("*") if path.is_file()}
    assert written == {"run.json", "attempts", "live", "result.json"}
    assert sorted(path.name for path in (world.folder / "attempts").rglob("*.json")) == [
        "request.json",
        "submitted.json",
    ]


def test_what_has_not_changed_is_not_read_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.recorded().attempt(0, RUNNING).start("0.0").segment([1, 2, 3])
    world.write("live/metrics/0.0-node-0.jsonl", rows(1, 5))
    world.time.at.append((100, lambda: world.platform.jobs.update({"job-0": SUCCEEDED})))
    kind = type(world.store.files)
    read, reads = kind.read, list[str]()
    monkeypatch.setattr(kind, "read", lambda files, key: (reads.append(key), read(files, key))[1])
    watched(world)
    assert [key for key in reads if "/metrics/" in key or "/logs/" in key] == [
        "runs/r1/live/logs/0.0/node-0/000000001.log",
        "runs/r1/live/metrics/0.0-node-0.jsonl",
    ]


def test_a_store_that_does_not_answer_is_said_and_the_watching_goes_on(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    training(world)
    kind = type(world.store.files)
    entries = kind.entries

    def broken(files: Any, prefix: str = "") -> Any:
        if "/metrics" in prefix and T0 + 30 < world.time() < T0 + 45:
            raise StorageError("the bucket is on fire\nand more")
        return entries(files, prefix)

    monkeypatch.setattr(kind, "entries", broken)
    last, pictures = watched(world)
    troubled = {picture.trouble for picture in pictures}
    assert troubled == {"", "the bucket is on fire"}
    assert last.measured.step == 60
    text = "\n".join(drawn(next(p for p in pictures if p.trouble), width=80, height=24, now=T0 + 40))
    assert "the store does not answer: the bucket is on fire" in text


def test_a_platform_that_is_silent_for_long_ends_the_watching(world: World) -> None:
    world.recorded().attempt(0, RUNNING)
    world.platform.status_error = LostContactError("no route")
    with pytest.raises(LostContactError, match="no route"):
        watched(world)


# -------------------------------------------------------------------------------------------------------------- content


def full() -> Picture:
    """Return a picture of a run with everything."""
    told = [
        AttemptInfo(
            number="0.0", started=T0, ended=T0 + 100, reason="spot capacity", lost={"steps": 4, "seconds": 2.0}
        ),
        AttemptInfo(number="1.0", started=T0 + 200, resumed_from="step-8"),
    ]
    lines = {
        node: [
            Line(attempt="1.0", node=node, rank=i % 4, seq=i, text=f"line {i} 漢字 \x1b[2Jéà" * 3)
            for i in range(node, 60, 2)
        ]
        for node in (0, 1)
    }
    return Picture(
        run_id="digits-1", provider="memory", when=T0 + 300, status=Status(state="running"), max_runtime=7200,
        attempts=told, usage={"time": T0, "cpu": 41.6, "gpu": 87.2, "data_wait": 0.0},
        nodes=[NodeData(number=0, seen=T0 + 297), NodeData(number=1)], lines=lines,
        measured=Measured(step=20, loss=("loss", 0.05), throughput=("samples_per_s", 800), name="loss",
                          points=[(step, 1 / step) for step in range(1, 21)]),
    )  # fmt: skip


def test_everything_is_there_where_there_is_room() -> None:
    text = drawn(full(), width=100, height=40, now=T0 + 300)
    assert text[:9] == [
        "digits-1  running, attempt 1.0, on memory",
        "progress     step 20, loss 0.05, 1h56m left of 2h, samples_per_s 800",
        text[2],
        "checkpoint   none complete yet",
        "nodes        0 wrote 3s ago, 1 nothing yet",
        "busy         GPU 87%, CPU 42%, data wait 0%",
        "attempt 0.0  from the beginning, spot capacity, lost 4 steps",
        "attempt 1.0  resumed from step-8",
        "last lines",
    ]
    assert re.fullmatch("loss         █[▁▂▃▄▅▆▇█]{50,}▁ 1 to 0.05, step 1 to 20", text[2])
    assert len(text[2]) == 100
    assert len(text) == 40
    assert text[-1].startswith("[n1 r3] line 59 漢字 éà")


@given(st.integers(1, 220), st.integers(1, 70), st.booleans())
def test_it_fits_into_any_terminal(width: int, height: int, ascii_only: bool) -> None:
    text = "\n".join(drawn(full(), width=width, height=height, now=T0 + 300, ascii_only=ascii_only))
    assert "\x1b" not in text
    assert len(text.split("\n")) <= height
    assert max(map(cell_len, text.split("\n"))) <= width
    assert text.startswith("digits-1  running"[: width - 1])


def test_the_newest_samples_of_all_nodes_are_shown(world: World) -> None:
    world.recorded().attempt(0, RUNNING).start("0.0", started=T0)
    for node, cpus in ((0, (10, 20)), (1, (30, 60))):
        rows = [json.dumps({"time": T0 + 15 * i + node, "cpu": cpu}) for i, cpu in enumerate(cpus)]
        world.write(f"live/usage/0.0-node-{node}.jsonl", "\n".join(rows) + "\n{broken")
    assert LiveRunReader(world.run().store, world.run().run_id).usage() == {
        "0.0": [{"time": T0 + 0.5, "cpu": 20.0}, {"time": T0 + 15.5, "cpu": 40.0}]
    }


def test_a_small_terminal_has_what_matters() -> None:
    text = drawn(full(), width=40, height=10, now=T0 + 300)
    assert len(text) == 10
    assert text[0] == "digits-1  running, attempt 1.0, on memo…"
    assert text[1] == "progress     step 20, loss 0.05, 1h56m …"
    assert text[-1].startswith("[n1 r3] line 59")


def test_a_terminal_that_knows_no_unicode_gets_ascii() -> None:
    picture = full()
    plain = Picture(**{**vars(picture), "lines": {0: [Line(attempt="1.0", node=0, rank=0, seq=1, text="plain")]}})
    text = "\n".join(drawn(plain, width=60, height=20, now=T0 + 300, ascii_only=True))
    assert text.isascii()
    assert "loss         #" in text


def test_of_many_nodes_those_that_are_silent_are_named() -> None:
    nodes = [NodeData(number=n, seen=T0 + 100 + n) for n in range(64)]
    picture = Picture(**{**vars(full()), "nodes": nodes, "attempts": full().attempts[1:]})
    text = "\n".join(drawn(picture, width=200, height=20, now=T0 + 300))
    assert "longest silent of 64 nodes: 0 wrote 3m20s ago, 1 wrote 3m19s ago" in text


def test_nodes_of_an_attempt_that_has_begun_are_alive_also_where_they_print_nothing() -> None:
    def line(**given: object) -> str:
        picture = Picture(**{**vars(full()), "begun": frozenset({"1.0"}), **given})
        return drawn(picture, width=200, height=20, now=T0 + 300)[4].removeprefix("nodes").strip()

    assert line() == "2 of 2 alive: 0 wrote 3s ago"
    assert line(nodes=[NodeData(number=0), NodeData(number=1)]) == "2 of 2 alive"
    assert line(nodes=[NodeData(number=0)]) == "1 of 1 alive"
    assert line(nodes=[NodeData(number=0, outcome="failed"), NodeData(number=1)]) == "1 of 2 alive: 0 failed"
    many = [NodeData(number=n, seen=T0 + 100 + n) for n in range(64)]
    assert line(nodes=many).startswith("64 of 64 alive, longest silent of 64 nodes: 0 wrote 3m20s ago, 1 wrote")


def test_a_run_that_is_being_cancelled_says_so(world: World) -> None:
    text = "\n".join(drawn(Picture(**{**vars(full()), "cancelling": True}), width=100, height=20, now=T0 + 300))
    assert text.startswith("digits-1  running (cancelling), attempt 1.0")
    world.recorded().attempt(0, RUNNING)
    world.run().store.cancel("r1")
    assert str(world.run().result()["reason"]).startswith("cancelling since 20")


def test_checkpoints_that_wait_for_room_are_told(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    full_store = dict.fromkeys(("step-10", "step-20"), "No space left on device")
    monkeypatch.setattr(world.platform, "stuck", lambda native: full_store, raising=False)
    world.recorded().attempt(0, RUNNING)
    said = str(world.run().result()["reason"])
    assert said.startswith("2 checkpoints wait: No space left on device on /")
    text = "\n".join(
        drawn(Picture(**{**vars(full()), "waiting": "1 checkpoint waits"}), width=80, height=20, now=T0 + 300)
    )
    assert text.split("\n")[1] == "waiting      1 checkpoint waits"


def test_of_a_finished_run_the_first_picture_is_its_end(world: World) -> None:
    world.recorded().attempt(0, Status(state="succeeded", started=T0, finished=T0 + 1))
    world.run().result()
    _, seen = watched(world)
    watch = Watch(world.run(), clock=world.time, sleep=world.time.sleep, on_picture=lambda _: None)
    assert {picture.status.state for picture in [watch.picture, *seen]} == {"succeeded"}
    assert watch.picture.result is not None


def test_each_node_has_a_fair_share_of_the_lines() -> None:
    lines = {n: [Line(attempt="0.0", node=n, rank=n, seq=i, text="") for i in range(1, 1 + count)]
             for n, count in ((0, 1), (1, 50), (2, 50), (3, 0))}  # fmt: skip
    assert [(line.node, line.seq) for line in fair(lines, 7)] == [
        (0, 1), (1, 48), (1, 49), (1, 50), (2, 48), (2, 49), (2, 50),
    ]  # fmt: skip
    assert [(line.node, line.seq) for line in fair(lines, 2)] == [(0, 1), (1, 50)]
    assert len(fair(lines, 500)) == 101
    assert fair({}, 3) == []


def test_until_an_attempt_says_something_the_last_words_of_the_one_before_stay(world: World) -> None:
    world.recorded().attempt(0, SUCCEEDED).start("0.0").start("0.1", after="0.0").segment([1, 2, 3])
    last, _ = watched(world)
    text = "\n".join(drawn(last, width=60, height=20, now=T0))
    assert "\nlast lines of attempt 0.0\n" in text
    assert text.endswith("[n0 r0] line 3")


def test_the_example_in_the_docs_is_what_it_shows(world: World) -> None:
    """It shows the training of that page, at step 46."""
    cause = failure(node=0, rank=0, process_exit_code=-9)
    world.recorded(max_runtime="5m").attempt(0, failed()).start("0.0", started=T0)
    world.start("1.0", after="0.0", started=T0 + 6, resumed_from="step-30", lost={"steps": 7, "seconds": 0.9})
    world.exit(attempt="0.0", decided=True, failure=cause, ended=T0 + 5).checkpoint("step-40", when=T0 + 10)
    for attempt, first, last in (("0.0", 1, 37), ("1.0", 31, 46)):
        steps = [(step, 2.3 * math.exp(-step / 20)) for step in range(first, last + 1)]
        made = [json.dumps({"step": step, "loss": loss, "samples_per_s": 64 / 0.12}) for step, loss in steps]
        world.write(f"live/metrics/{attempt}-node-0.jsonl", "\n".join(made) + "\n")
        said = [f"[a{attempt} n0 r0 #{i}] step {step} loss {loss:.4f}" for i, (step, loss) in enumerate(steps, 1)]
        world.write(f"live/logs/{attempt}/node-0/000000001.log", "\n".join(said) + "\n")
    for path in world.folder.rglob("1.0*/**/*"):
        os.utime(path, (T0 + 11, T0 + 11))
    os.utime(world.folder / "live/metrics/1.0-node-0.jsonl", (T0 + 11, T0 + 11))
    last, _ = watched(world)
    live = replace(last, run_id="seen-1", provider="local", status=RUNNING, result=None)
    [example] = [block.text for block in blocks("docs/watching.md") if "example=watch" in block.words]
    assert "\n".join(drawn(live, height=13, now=T0 + 13)) + "\n" == example


def test_a_loss_that_falls_by_decades_is_drawn_as_the_page_draws_it(world: World) -> None:
    """It is not a corner with a flat line after it."""
    world.recorded().attempt(0, SUCCEEDED).start("0.0")
    world.write("live/metrics/0.0-node-0.jsonl", "".join(f'{{"step": {i}, "loss": 1e-{i}}}\n' for i in range(8)))
    last, _ = watched(world)
    assert sparkline(last.measured, 8) == "█▇▆▅▄▃▂▁"
    assert any(line.endswith("1 to 1e-07, step 0 to 7, logarithmic") for line in drawn(last))


def test_where_an_attempt_goes_on_from_is_not_said_before_its_nodes_say_it(world: World) -> None:
    """The platform still reports the previous attempt: until then the new one does not count as a fresh start."""
    again(world)
    start = next((world.folder / "live" / "attempts").glob("1.0*.json"))
    text = start.read_text()
    start.unlink()
    for path in (world.folder / "live" / "exit").glob("1.0-*.json"):
        path.unlink()
    told = (AttemptInfo(number="0.0", started=T0, ended=T0 + 6), AttemptInfo(number="1.0", started=T0 + 10))
    world.attempt(0, replace(RUNNING, attempts=told))
    world.time.at.append((20, lambda: start.write_text(text)))
    world.time.at.append((40, lambda: world.platform.jobs.update({"job-0": replace(SUCCEEDED, attempts=told)})))
    messages: list[str] = []
    pictures: list[Picture] = []

    def watch(draw: Callable[[Picture], None]) -> Watch:
        def both(picture: Picture) -> None:
            pictures.append(picture)
            draw(picture)

        return Watch(world.run(), clock=world.time, sleep=world.time.sleep, on_picture=both)

    follow(watch, messages.append)
    assert [line for line in messages if line.startswith("attempt 1.0")] == ["attempt 1.0: resumed from step-8"]
    texts = ["\n".join(drawn(picture, now=picture.when)) for picture in pictures]
    assert any("attempt 1.0  starting" in text for text in texts)
    assert not any("attempt 1.0  from the beginning" in text for text in texts)


def test_of_a_run_that_is_over_a_checkpoint_has_no_age(world: World) -> None:
    world.recorded().attempt(0, SUCCEEDED).start("0.0").checkpoint("step-8", when=T0 - 3000)
    assert "\ncheckpoint   step-8\n" in "\n".join(drawn(watched(world)[0], width=80, height=20, now=T0)) + "\n"


def test_a_sparkline_draws_what_is_there() -> None:
    assert sparkline(Measured(points=[(i, i) for i in range(8)]), 8) == "▁▂▃▄▅▆▇█"
    assert sparkline(Measured(points=[(0, 1), (3, 1)]), 4) == "▁▁▁▁"
    assert sparkline(Measured(points=[(3, 3)]), 5) == "▁"
    assert sparkline(Measured(points=[(0, 0.0), (1, 1.0)]), 2, ascii_only=True) == "_#"
    spike = [(x, 100 if x == 777 else 0) for x in range(10_000)]
    assert "█" in sparkline(Measured(points=spike), 20), "no peak is lost"


@given(st.lists(st.tuples(st.floats(-1e300, 1e300), st.floats(-1e308, 1e308)), min_size=1), st.integers(1, 30))
def test_a_sparkline_takes_any_numbers(points: list[tuple[float, float]], width: int) -> None:
    assert len(sparkline(Measured(points=sorted(points)), width)) in (1, width)


# ------------------------------------------------------------------------------------------------- on and off terminals


def test_without_a_terminal_it_is_a_line_for_each_change(world: World) -> None:
    messages: list[str] = []
    training(world)
    follow(lambda draw: Watch(world.run(), clock=world.time, sleep=world.time.sleep, on_picture=draw), messages.append)
    assert messages[:2] == ["pending", "running"]
    assert messages[-3:] == ["checkpoint step-30 is complete", messages[-2], "succeeded"]
    assert messages[-2].startswith("step 60, loss 0.01667, ran ")
    steps = [line for line in messages if line.startswith("step")]
    assert len(steps) == 2, "one a minute, and the last"


def test_attempts_are_told_as_they_come(world: World) -> None:
    messages: list[str] = []
    follow(
        lambda draw: Watch(again(world).run(), clock=world.time, sleep=world.time.sleep, on_picture=draw),
        messages.append,
    )
    assert messages[0] == "attempt 0.0: from the beginning, spot capacity, lost 4 steps"
    assert messages[1] == "attempt 1.0: resumed from step-8"
    assert messages[-1] == "succeeded"


@pytest.mark.parametrize("no_color", ["", "1"])
def test_the_last_view_stays_on_the_terminal(world: World, monkeypatch: pytest.MonkeyPatch, no_color: str) -> None:
    (monkeypatch.setenv if no_color else lambda *a: monkeypatch.delenv("NO_COLOR", raising=False))("NO_COLOR", no_color)
    world.recorded().attempt(0, failed(reason="it broke"))
    world.write("live/metrics/0.0-node-0.jsonl", rows(1, 12))
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    console = Console(
        file=out, force_terminal=True, width=60, height=20, _environ=dict(os.environ, TERM="xterm-256color")
    )
    on_terminal(Watch(world.run(), clock=world.time, sleep=world.time.sleep), console)
    out.flush()
    text = out.buffer.getvalue().decode()  # type: ignore[attr-defined]
    live, _, left = text.partition("\x1b[?1049l")
    assert "\x1b[?1049h" in live
    assert "\x1b[?25h" in text, "the cursor is back"
    assert "r1  failed, attempt 0.0, on memory" in left
    assert "it broke" in left
    assert "step 12, loss 0.08333" in left
    assert bool(re.search(r"\x1b\[[0-9;]*3[0-9]", left)) is not bool(no_color)


class Terminal:
    """``cloudtrain watch`` on its own terminal, and its output."""

    def __init__(self, *argv: str, cwd: Path, columns: int = 80, lines: int = 24, **environ: str) -> None:
        self.master, inner = pty.openpty()
        self.size(columns, lines)
        env = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "COLUMNS", "LINES")}
        self.process = subprocess.Popen(
            [*CLI, *argv], cwd=cwd, stdin=inner, stdout=inner, stderr=inner, start_new_session=True,
            env={**env, "TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8", **environ},
            # A shell starts background commands with SIGINT ignored, and this suite may be one.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )  # fmt: skip
        os.close(inner)
        self.text, self.decoder = "", codecs.getincrementaldecoder("utf-8")()

    def size(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def until(self, pattern: str, seconds: float = 60) -> None:
        """Read until the text from here on matches."""
        start, deadline = len(self.text), time.monotonic() + seconds
        while not re.search(pattern, self.text[start:]):
            assert time.monotonic() < deadline, self.text[start:]
            if not self._read():
                assert re.search(pattern, self.text[start:]), self.text[start:]
                return

    def _read(self) -> bool:
        if not select.select([self.master], [], [], 1)[0]:
            return True
        try:
            data = os.read(self.master, 65536)
        except OSError:  # the other end is closed
            return False
        self.text += self.decoder.decode(data)
        return bool(data)

    def end(self) -> int:
        while self._read():
            assert self.process.poll() is None or select.select([self.master], [], [], 0)[0]
        return self.process.wait(30)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self.master)


@pytest.fixture
def cloud(tmp_path: Path) -> Iterator[tuple[World, Callable[..., Terminal]]]:
    """Yield a run on foldercloud, and a function that opens terminals to watch it."""
    world = World(root=tmp_path / "store").recorded(provider=NAME).attempt(0).start("0.0")
    record = json.loads((world.folder / "run.json").read_text())
    (tmp_path / "cloud").mkdir()
    world.write("run.json", {**record, "settings": {"folder": str(tmp_path / "cloud")}})
    (tmp_path / "cloud" / "job-0").write_text(json.dumps({"state": "running"}))
    world.write("live/metrics/0.0-node-0.jsonl", rows(1, 12))
    world.segment([1, 2, 3])
    install(tmp_path / "site")
    path = os.pathsep.join([str(tmp_path / "site"), *filter(None, sys.path)])
    made: list[Terminal] = []

    def open_(**more: Any) -> Terminal:
        made.append(Terminal("watch", "r1", "--store", str(world.root), cwd=tmp_path, PYTHONPATH=path, **more))
        return made[-1]

    yield world, open_
    for terminal in made:
        terminal.close()


@pytest.mark.slow
def test_a_window_that_shrinks_and_ctrl_c(cloud: tuple[World, Callable[..., Terminal]]) -> None:
    world, open_ = cloud
    terminal = open_(columns=100, lines=30)
    terminal.until("[▁▂▃▄▅▆▇█]{50,} 1 to 0.08333, step 1 to 12")
    terminal.size(40, 10)
    terminal.until("█[▁▂▃▄▅▆▇█]{7} 1 to 0")
    terminal.process.send_signal(signal.SIGINT)
    assert terminal.end() == 7
    *_, left = terminal.text.split("\x1b[?1049l")
    assert "no longer watching; the run continues" in left
    assert "cloudtrain wait r1" in left
    assert all(cell_len(line) <= 40 for line in re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", left).split("\r\n")[:10])
    assert "\x1b[?25h" in terminal.text
    assert json.loads((world.root.parent / "cloud" / "job-0").read_text()) == {"state": "running"}
    assert world.result() is None


@pytest.mark.slow
def test_a_dumb_terminal_gets_plain_lines_until_the_end(cloud: tuple[World, Callable[..., Terminal]]) -> None:
    world, open_ = cloud
    terminal = open_(TERM="dumb")
    terminal.until("step 12, loss 0.08333")
    (world.root.parent / "cloud" / "job-0").write_text(json.dumps({"state": "succeeded"}))
    assert terminal.end() == 0
    assert "\x1b" not in terminal.text
    lines = terminal.text.split("\r\n")
    assert lines[0] == "running"
    assert "succeeded" in lines
    assert world.result()["state"] == "succeeded"


def test_with_json_the_result_comes_at_the_end(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    again(world).run().result()
    world.write("run.json", {**json.loads((world.folder / "run.json").read_text()), "provider": "local"})
    assert cli.main(["watch", "r1", "--store", str(world.root), "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == world.run().result()
    assert "attempt 1.0: resumed from step-8\n" in err
    assert "cloudtrain report r1" in err
