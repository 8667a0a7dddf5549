"""Lines and their numbers: a rank's output becomes lines, each numbered once, in segments that are complete files."""

from __future__ import annotations

import os
import re
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rows import for_each

from cloudtrain.runs.log_sources import Tail
from cloudtrain.runtime import logs
from cloudtrain.runtime.checkpoints import write_whole
from cloudtrain.runtime.logs import LINE_BYTES, LogWriter, lines_of
from cloudtrain.runtime.segments import distinct, span_of
from cloudtrain.runtime.timings import TIMINGS
from cloudtrain.store.store import Store


def read(*chunks: bytes, pause: float = 0.0) -> list[str]:
    """Return the lines of a pipe into which ``chunks`` are written one by one."""
    out, into = os.pipe()

    def write() -> None:
        for number, chunk in enumerate(chunks):
            if pause and number:
                time.sleep(pause)
            while chunk:
                chunk = chunk[os.write(into, chunk) :]
        os.close(into)

    thread = threading.Thread(target=write)
    thread.start()
    with os.fdopen(out, "rb") as stream:
        found = list(lines_of(stream))
    thread.join()
    return found


# --------------------------------------------------------------------------------------------------------------- lines


@for_each(
    ("data", "lines"),
    [
        (b"", []),
        (b"a\nb\n", ["a", "b"]),
        (b"a\n\nb", ["a", "", "b"]),
        (b"a\r\nb\r\n", ["a", "b"]),
        (b" 10%\r 50%\r100%\n", ["100%"]),
        (b"\r 10%\r 50%\r100%\ndone\n", ["100%", "done"]),
        (b"10%\r100%\r\n", ["100%"]),
        (b"10%\r100%", ["10%", "100%"]),
        (b"\xff\xfe ok\n", ["\ufffd\ufffd ok"]),
        ("é 漢字 🎉\n".encode(), ["é 漢字 🎉"]),
        (b"a\x00b\x1b[31mred\n", ["a\x00b\x1b[31mred"]),
        (b"tab\tand \x0b\x0c\x85\xe2\x80\xa8 no line ends\n", ["tab\tand \x0b\x0c\ufffd\u2028 no line ends"]),
    ],
)
def test_lines(data: bytes, lines: list[str]) -> None:
    assert read(data) == lines


@given(st.lists(st.text(st.characters(exclude_characters="\n\r", exclude_categories=["Cs"])), max_size=8), st.data())
def test_however_it_is_cut_the_lines_are_the_same(texts: list[str], data: st.DataObject) -> None:
    whole = "".join(text + data.draw(st.sampled_from(["\n", "\r\n"])) for text in texts).encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=5)))
    parts = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    assert read(*parts) == texts


def test_a_line_end_that_comes_in_two_parts_is_one() -> None:
    assert read(b"a\r", b"\nb\r", b"\n", pause=0.1) == ["a", "b"]


@pytest.mark.slow
def test_a_progress_bar_shows_its_newest_state_once_a_second() -> None:
    chunks = [f"\r{i:3d}%".encode() for i in range(0, 101, 4)]
    lines = read(b"start\n", *chunks, b"\nend\n", pause=0.1)
    assert (lines[0], lines[-2], lines[-1]) == ("start", "100%", "end")
    states = [int(text.strip(" %")) for text in lines[1:-1]]
    assert states == sorted(set(states))
    assert 2 <= len(states) <= 6  # of 26, in 2.6 s


def test_a_bar_that_ends_its_states_with_a_return_too() -> None:
    chunks = [f"{i:3d}%\r".encode() for i in range(0, 101, 10)]
    lines = read(*chunks, b"\n", pause=0.12)
    assert lines[-1] == "100%"
    assert len(lines) <= 4


def test_a_storm_of_redraws_is_one_line() -> None:
    bar = b"\r" + b"#" * 200
    lines = read(bar * 5000 + b"\rlast\n")
    assert lines[-1] == "last"
    assert all("\r" not in text for text in lines)
    assert len(lines) < 6


def test_a_long_line_comes_in_pieces_with_every_character_whole() -> None:
    text = "x" + "漢" * LINE_BYTES + "é" * LINE_BYTES
    pieces = read(text.encode() + b"\nshort\n")
    assert pieces[-1] == "short"
    assert "".join(pieces[:-1]) == text
    assert max(len(p.encode()) for p in pieces) <= LINE_BYTES
    assert len(pieces) < 10


def test_a_long_line_of_bytes_that_are_no_text() -> None:
    pieces = read(b"\xbf" * (3 * LINE_BYTES))
    assert sum(len(p) for p in pieces) == 3 * LINE_BYTES


def test_a_line_is_there_as_soon_as_it_ended() -> None:
    out, into = os.pipe()
    with os.fdopen(out, "rb") as stream:
        lines = lines_of(stream)
        os.write(into, b"first\nhal")
        assert next(lines) == "first"
        os.write(into, b"f\n")
        assert next(lines) == "half"
        os.close(into)
        assert list(lines) == []


# -------------------------------------------------------------------------------------------------------------- writer


class Pipe:
    def __init__(self, tmp_path: Path) -> None:
        self.path = tmp_path / "out"
        self.fd = os.open(self.path, os.O_CREAT | os.O_RDWR)

    def lines(self) -> list[str]:
        return self.path.read_text(encoding="utf-8").splitlines()


def untimed(*segments: Path) -> list[str]:
    """Return the lines of segments as the platform got them."""
    lines = "".join(path.read_text() for path in segments).splitlines()
    timed = re.compile(r"(\[a\S+ n\d+ r\S+ #\d+) \d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z\]")
    assert all(timed.match(line) for line in lines)
    return [timed.sub(r"\1]", line) for line in lines]


@pytest.fixture
def pipe(tmp_path: Path) -> Pipe:
    return Pipe(tmp_path)


def test_lines_wait_for_the_attempt_and_then_carry_it(pipe: Pipe) -> None:
    writer = LogWriter(node=3, out=pipe.fd)
    writer.say("before")
    writer.write("7", "early")
    assert pipe.lines() == []
    writer.begin("2.1", None)
    writer.write("7", "late é")
    writer.begin("9.9", None)  # once is once
    writer.write("-", "last")
    assert pipe.lines() == [
        "[a2.1 n3 r- #1] cloudtrain: before", "[a2.1 n3 r7 #2] early", "[a2.1 n3 r7 #3] late é", "[a2.1 n3 r- #4] last",
    ]  # fmt: skip
    assert writer.lines == 4


def test_only_ranks_count_as_signs_of_life(pipe: Pipe) -> None:
    writer = LogWriter(node=0, out=pipe.fd)
    before = writer.last
    time.sleep(0.02)
    writer.say("x")
    assert writer.last == before
    writer.write("0", "x")
    assert writer.last > before


def test_numbers_are_whole_and_in_order_from_many_threads(tmp_path: Path, pipe: Pipe) -> None:
    writer = LogWriter(node=0, out=pipe.fd)
    folder = tmp_path / "segments"

    def work(rank: int) -> None:
        for i in range(300):
            writer.write(str(rank), f"{rank}:{i}")
            if i % 50 == 0:
                writer.flush()
            if rank == 3 and i == 100:
                writer.begin("0.0", folder)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    writer.flush()
    parsed = [re.fullmatch(r"\[a0\.0 n0 r(\d) #(\d+)\] (\d):(\d+)", line) for line in pipe.lines()]
    assert all(parsed)
    assert [int(m[2]) for m in parsed if m] == list(range(1, 2401))
    for rank in range(8):
        assert [int(m[4]) for m in parsed if m and m[1] == str(rank)] == list(range(300))
    assert untimed(*sorted(folder.iterdir())) == pipe.lines()
    for path in folder.iterdir():
        assert f"#{int(path.stem)} " in path.read_text().splitlines()[0]


def test_a_segment_takes_further_lines_until_it_is_full(
    tmp_path: Path, pipe: Pipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = LogWriter(node=1, out=pipe.fd)
    folder = tmp_path / "segments"
    writer.begin("0.0", folder)
    writer.write("0", "a")
    writer.tick()
    assert not folder.exists()  # not old enough
    writer._flush_seconds = 0.0
    writer.tick()
    writer.write("0", "b")
    writer.tick()
    assert [p.name for p in folder.iterdir()] == ["000000001.log"]
    assert untimed(folder / "000000001.log") == pipe.lines()
    monkeypatch.setattr(logs, "SEGMENT_BYTES", 100)
    for _ in range(3):
        writer.write("0", "y" * 40)
    writer.flush()
    assert sorted(p.name for p in folder.iterdir()) == ["000000001.log", "000000005.log"]
    assert untimed(*sorted(folder.iterdir())) == pipe.lines()


def test_a_failed_write_leaves_the_segment_as_it_was_and_loses_no_line(
    tmp_path: Path, pipe: Pipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, data: bytes, *, temporary: str) -> None:
        raise OSError(28, "No space left on device")

    writer = LogWriter(node=0, out=pipe.fd)
    writer.begin("0.0", tmp_path / "s")
    writer.write("0", "one")
    writer.flush()
    with monkeypatch.context() as patched:
        patched.setattr(logs, "write_whole", full)
        writer.write("0", "two")
        writer.flush()
    assert untimed(tmp_path / "s" / "000000001.log") == pipe.lines()[:1]
    writer.write("0", "three")
    writer.flush()
    assert untimed(*(tmp_path / "s").iterdir()) == pipe.lines()


@pytest.mark.slow
def test_a_week_of_lines_is_a_few_segments(tmp_path: Path) -> None:
    moment, out = [0.0], os.open(os.devnull, os.O_WRONLY)
    writer = LogWriter(node=0, out=out, clock=lambda: moment[0])
    writer.begin("0.0", tmp_path / "s")
    while moment[0] < 7 * 86400:
        writer.write("0", f"step {writer.lines}")
        moment[0] += 60.0
        writer.tick()
    writer.flush()
    os.close(out)
    found = sorted((tmp_path / "s").iterdir())
    assert len(found) == 1
    assert found[0].read_text().count("\n") == writer.lines


def test_segments_that_earlier_versions_merged_stay_readable(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    folder = tmp_path / "runs" / "old" / "live" / "logs" / "0.0" / "node-0"
    folder.mkdir(parents=True)
    lines = [f"[a0.0 n0 r0 #{number} 2025-11-24T16:00:00.000Z] {number}\n" for number in range(1, 10)]
    for name, text in (
        ("000000001-000000006.log", lines[:6]), ("000000005.log", lines[4:6]), ("000000007.log", lines[6:]),
    ):  # fmt: skip
        (folder / name).write_text("".join(text))
    tail = Tail(
        store=store, run_id="old", provider=lambda: pytest.fail("no platform"), clock=time.monotonic, patience=1
    )
    assert [line.seq for line in tail.rest()] == list(range(1, 10))


def test_a_name_tells_the_lines() -> None:
    assert [span_of(name) for name in ("000000007.log", "7.log", "000000001-000000009.log")] == [(7, 0), (7, 0), (1, 9)]
    assert [span_of(name) for name in ("x.log", ".7.log.part", "1.log.sagemaker-uploaded", "-7.log")] == [None] * 4


def test_what_a_merged_segment_covers_is_left_out() -> None:
    names = ["1.log", "1-40.log", "1-5.log", "6.log", "39.log", "41.log", "41-60.log", "61.log", "70.log"]
    found = distinct((span, name) for name in names if (span := span_of(name)))
    assert [name for _, name in found] == ["1-40.log", "41-60.log", "61.log", "70.log"]


@pytest.mark.slow
def test_a_segment_that_cannot_be_written_is_kept_and_tried_again(tmp_path: Path, pipe: Pipe) -> None:
    writer = LogWriter(node=0, out=pipe.fd)
    (tmp_path / "blocked").write_text("a file where the folder should be")
    writer.begin("0.0", tmp_path / "blocked" / "segments")
    writer.write("0", "one")
    writer.flush()
    writer.write("0", "two")
    (tmp_path / "blocked").unlink()
    writer.flush()
    (path,) = (tmp_path / "blocked" / "segments").iterdir()
    assert (path.name, untimed(path)) == ("000000001.log", pipe.lines())


def test_a_reader_that_is_gone_costs_only_its_own_copy(tmp_path: Path) -> None:
    out, into = os.pipe()
    os.close(out)
    writer = LogWriter(node=0, out=into)
    writer.begin("0.0", tmp_path)
    for i in range(3):
        writer.write("0", str(i))
    writer.flush()
    os.close(into)
    assert untimed(tmp_path / "000000001.log") == [f"[a0.0 n0 r0 #{i + 1}] {i}" for i in range(3)]


def test_text_that_cannot_be_encoded_is_still_a_line(tmp_path: Path, pipe: Pipe) -> None:
    writer = LogWriter(node=0, out=pipe.fd)
    writer.begin("0.0", tmp_path / "s")
    writer.write("0", "bad \udcff surrogate")
    writer.flush()
    assert pipe.lines() == ["[a0.0 n0 r0 #1] bad ? surrogate"]
    assert untimed(tmp_path / "s" / "000000001.log") == pipe.lines()


def test_a_stored_line_has_the_time_at_which_the_node_read_it(tmp_path: Path, pipe: Pipe) -> None:
    moments = iter([1764000000.1239, 1764000000.9, 1764000001.0])
    writer = LogWriter(node=2, out=pipe.fd, now=lambda: next(moments))
    writer.write("0", "before the attempt is known")
    writer.begin("0.0", tmp_path / "s")
    writer.say("two")
    writer.write("1", "three")
    writer.flush()
    assert (tmp_path / "s" / "000000001.log").read_text().splitlines() == [
        "[a0.0 n2 r0 #1 2025-11-24T16:00:00.123Z] before the attempt is known",
        "[a0.0 n2 r- #2 2025-11-24T16:00:00.900Z] cloudtrain: two",
        "[a0.0 n2 r1 #3 2025-11-24T16:00:01.000Z] three",
    ]


def test_a_slow_store_delays_no_line_and_no_other_thread(
    tmp_path: Path, pipe: Pipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    writing, go_on = threading.Event(), threading.Event()

    def slow(path: Path, data: bytes, *, temporary: str) -> None:
        writing.set()
        assert go_on.wait(30)
        write_whole(path, data, temporary=temporary)

    monkeypatch.setattr(logs, "write_whole", slow)
    monkeypatch.setattr(logs, "SEGMENT_BYTES", 100)
    writer = LogWriter(node=0, out=pipe.fd, flush_seconds=0.05)
    writer.begin("0.0", tmp_path / "s")
    writer.start()
    writer.say("first")
    assert writing.wait(30)
    began = time.monotonic()
    for number in range(20):
        writer.write("0", f"{number} {'y' * 50}")
        writer.say("from the node's own thread")
    assert time.monotonic() - began < 5
    assert len(pipe.lines()) == 41
    assert not (tmp_path / "s").exists()
    go_on.set()
    writer.stop()
    found = sorted((tmp_path / "s").iterdir())
    assert [line for path in found for line in untimed(path)] == pipe.lines()


def test_a_store_that_hangs_costs_old_lines_there_and_no_memory(
    tmp_path: Path, pipe: Pipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "SEGMENT_BYTES", 100)
    monkeypatch.setattr(logs, "KEPT_BYTES", 1000)
    monkeypatch.setattr(TIMINGS, "log_room", 0.05)
    writer = LogWriter(node=0, out=pipe.fd)
    writer.begin("0.0", tmp_path / "s")
    with writer._disk:  # as a thread holds it that writes to such a store
        for number in range(100):
            writer.write("0", f"{number} {'y' * 50}")
            assert writer._segment_bytes < 1100
    writer.flush()
    (path,) = (tmp_path / "s").iterdir()
    kept = untimed(path)
    assert kept == pipe.lines()[-len(kept) :]
    assert path.name == f"{101 - len(kept):09d}.log"


def test_a_line_of_which_a_part_could_be_written_is_completed_by_the_next() -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    log = LogWriter(node=0, out=writer)
    log.begin("0.0", None)
    for text in ("x" * 100_000, "lost", "last"):
        if text == "last":
            part = os.read(reader, 1 << 20)
        log.write("0", text)
    lines = (part + os.read(reader, 1 << 20)).decode().splitlines()
    assert len(part) < 100_000
    assert lines == [f"[a0.0 n0 r0 #1] {'x' * 100_000}", "[a0.0 n0 r0 #3] last"]
    for _ in range(50):  # a reader that is slower than the script
        log.write("0", "y" * 10_000)
        part += os.read(reader, 5000)
    assert len(log._torn) < 20_000
    os.close(reader)
    os.close(writer)
