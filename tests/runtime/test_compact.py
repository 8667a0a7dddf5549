"""Compaction: few segments however long a run is, every line once, and readers that look while segments are merged."""

from __future__ import annotations

import math
import os
import re
import time
from pathlib import Path

import pytest

from cloudtrain.provider_api.node import SyncAgent
from cloudtrain.runs.live_data import LiveRunReader
from cloudtrain.runs.log_sources import Tail
from cloudtrain.runs.pull import pull
from cloudtrain.runtime import compact
from cloudtrain.runtime.compact import FAN, Compactor
from cloudtrain.runtime.history import Start
from cloudtrain.runtime.logs import LogWriter
from cloudtrain.runtime.segments import Span, distinct, span_of
from cloudtrain.runtime.timings import TIMINGS
from cloudtrain.runtime.uploads import Uploads
from cloudtrain.store.store import Store

RUN = "week"
SECONDS = 5.0
"""From one segment to the next, by default."""


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Stored(Uploads):
    """A platform's agent that has uploaded these files."""

    def __init__(self, files: set[Path]) -> None:
        agent = SyncAgent(uploading=".x-uploading", uploaded=".x-uploaded", ignored=".x-ignore")
        super().__init__(Path(), agent, say=print)
        self.files = files

    def stored(self, path: Path) -> bool:
        return path in self.files


class Logs:
    """The log folder of one run, written by the real writer on a fake clock."""

    def __init__(self, root: Path) -> None:
        self.store, self.clock, self.most = Store(str(root)), Clock(), 0
        self.folder = root / "runs" / RUN / "live" / "logs"

    def compactor(self, attempt: str = "0.0", node: int = 0, **more: object) -> Compactor:
        return Compactor(self.folder, attempt=attempt, node=node, clock=self.clock, **more)  # type: ignore[arg-type]

    def train(self, hours: float, *, attempt: str = "0.0", compactor: Compactor | None = None) -> int:
        """Print a line every 5 s for so long, as node 0; how many."""
        out = os.open(os.devnull, os.O_WRONLY)
        writer = LogWriter(node=0, out=out, clock=self.clock)
        writer.begin(attempt, self.folder / attempt / "node-0")
        end, due = self.clock.now + hours * 3600, 0.0
        while self.clock.now < end:
            writer.write("0", f"step {writer.lines}")
            self.clock.now += SECONDS
            writer.tick()
            if compactor is not None and self.clock.now >= due:
                compactor.step()
                due = self.clock.now + TIMINGS.compact
                self.most = max(self.most, len(self.names(attempt)))
        writer.flush()
        os.close(out)
        return writer.lines

    def rest(self, attempt: str = "0.0", node: int = 0) -> None:
        """Let the attempt's last write be long ago."""
        then = time.time() - TIMINGS.compact_rest - 1
        for path in (self.folder / attempt / f"node-{node}").iterdir():
            os.utime(path, (then, then))

    def names(self, attempt: str = "0.0", node: int = 0) -> list[str]:
        return sorted(os.listdir(self.folder / attempt / f"node-{node}"))

    def text(self, attempt: str = "0.0", node: int = 0) -> list[int]:
        """The numbers of the lines of all segments that a reader would read, in their order."""
        folder = self.folder / attempt / f"node-{node}"
        found = distinct((span, folder / n) for n in os.listdir(folder) if (span := span_of(n)))
        lines = "".join(path.read_text() for _, path in found).splitlines()
        return [int(re.split(r"[ \]]", line.partition("#")[2])[0]) for line in lines]


@pytest.fixture
def written(tmp_path: Path) -> Logs:
    return Logs(tmp_path)


def objects(segments: int) -> int:
    """So many there are at most of one attempt and node, with those that came since the last look."""
    return (FAN - 1) * math.ceil(math.log(segments, FAN)) + FAN


def test_a_name_tells_the_lines() -> None:
    assert [span_of(name) for name in ("000000007.log", "7.log", "000000001-000000009.log")] == [(7, 0), (7, 0), (1, 9)]
    assert [Span(1, 9).name, Span(7, 0).name] == ["000000001-000000009.log", "000000007.log"]
    assert [span_of(name) for name in ("x.log", ".7.log.part", "1.log.sagemaker-uploaded", "-7.log")] == [None] * 4


def test_what_a_merged_segment_covers_is_left_out() -> None:
    names = ["1.log", "1-40.log", "1-5.log", "6.log", "39.log", "41.log", "41-60.log", "61.log", "70.log"]
    found = distinct((span, name) for name in names if (span := span_of(name)))
    assert [name for _, name in found] == ["1-40.log", "41-60.log", "61.log", "70.log"]


@pytest.mark.slow
def test_objects_grow_with_the_logarithm_of_the_time(written: Logs) -> None:
    """7 for each power of 8: a week has 120,960 segments of 5 s, and at most 51 objects."""
    lines = written.train(12, compactor=written.compactor())
    assert written.most <= objects(lines)
    assert written.text() == list(range(1, lines + 1))
    assert 16 * objects(7 * 86400 // 5) == 800


@pytest.mark.slow
def test_a_week_with_a_restart_every_two_hours(written: Logs) -> None:
    """84 attempts of 16 nodes: one object for each, those of the last attempt, and an exit record for each."""
    for restart in range(84):
        lines = written.train(0.05, attempt=f"0.{restart}", compactor=written.compactor(f"0.{restart}"))
        written.rest(f"0.{restart}")
    assert all(len(written.names(f"0.{restart}")) == 1 for restart in range(83))
    assert all(written.text(f"0.{restart}") == list(range(1, lines + 1)) for restart in range(84))
    assert 16 * (83 + objects(2 * 3600 // 5) + 84) + 84 + 84 <= 5000  # and metrics and starts of node 0


def test_segments_stay_until_the_merged_one_is_stored(written: Logs) -> None:
    stored: set[Path] = set()
    compactor = written.compactor(uploads=Stored(stored))
    lines = written.train(0.02, compactor=None)
    assert lines > FAN
    compactor.step()
    merged = [name for name in written.names() if "-" in name]
    assert len(merged) == 1
    assert len(written.names()) == lines + 1
    assert written.text() == list(range(1, lines + 1))
    stored.add(written.folder / "0.0" / "node-0" / merged[0])
    compactor.step()
    assert len(written.names()) == lines + 1 - FAN
    assert written.text() == list(range(1, lines + 1))


def test_without_a_word_of_the_store_they_go_some_time_later(written: Logs) -> None:
    compactor = written.compactor(uploads=Stored(set()))
    lines = written.train(0.02)
    compactor.step()
    written.clock.now += TIMINGS.compact_settle
    compactor.step()
    assert len(written.names()) == lines + 1 - FAN


def test_the_newest_segment_is_left_alone(written: Logs) -> None:
    lines = written.train(FAN * 5 / 3600)
    assert lines == len(written.names()) == FAN
    written.compactor().step()
    assert len(written.names()) == FAN  # the last of them may be half written


def test_a_merge_that_was_cut_off_is_made_again_by_the_next_attempt(written: Logs) -> None:
    lines = written.train(0.05)
    folder = written.folder / "0.0" / "node-0"
    (folder / ".000000001-000000008.log.part").write_text("half of it")
    written.compactor(uploads=Stored(set())).step()  # killed before it could remove anything
    other = written.folder / "0.0" / "node-1"
    other.mkdir()
    (other / "000000001.log").write_text("[a0.0 n1 r0 #1] another node's\n")
    written.rest()
    written.compactor("0.1").step()
    assert written.names() == [Span(1, lines).name]
    assert written.text() == list(range(1, lines + 1))
    assert written.names(node=1) == ["000000001.log"]


def test_full_segments_are_not_merged_again(written: Logs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compact, "FULL_BYTES", 1000)
    lines = written.train(1, compactor=written.compactor())
    folder = written.folder / "0.0" / "node-0"
    assert max(path.stat().st_size for path in folder.iterdir()) < 1000 * FAN
    written.rest()
    written.compactor("0.1").step()
    assert written.text() == list(range(1, lines + 1))


def test_a_file_system_that_cannot_rename(written: Logs, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*names: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(compact.os, "replace", refuse)
    lines = written.train(0.02)
    written.compactor().step()
    assert written.text() == list(range(1, lines + 1))
    assert len(written.names()) == lines + 1 - FAN


def add(written: Logs, first: int, *texts: str) -> Path:
    """A segment of node 0 with these lines, the first one's number being ``first``."""
    path = written.folder / "0.0" / "node-0" / Span(first, 0).name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"[a0.0 n0 r0 #{first + n}] {text}\n" for n, text in enumerate(texts)))
    return path


@pytest.mark.parametrize("text", ["child says: [a0.0 n0 r0 #99999] hello", "#99999]", "\n[a0.0 n0 r0 #99999] hello"])
@pytest.mark.parametrize("past", [False, True])
def test_a_text_that_looks_like_a_numbered_line_loses_no_line(written: Logs, text: str, past: bool) -> None:
    for first in range(1, 21, 2):
        add(written, first, "step", text)
    if past:
        written.rest()
    written.compactor("0.1" if past else "0.0").step()
    assert sorted({*written.text()} - {99999}) == list(range(1, 21))
    assert written.names()[0] == ("000000001-000000020.log" if past else "000000001-000000016.log")


def test_a_text_that_goes_on_counting_is_cut_at_the_next_segment(written: Logs) -> None:
    for first in range(1, 10):
        add(written, first, f"step\n[a0.0 n0 r0 #{first + 1}] child\n[a0.0 n0 r0 #{first + 2}] child")
    written.compactor().step()
    assert written.names() == ["000000001-000000008.log", "000000009.log"]


@pytest.mark.parametrize("empty", [1, 4, 8])
def test_an_empty_segment_stops_no_merge(written: Logs, empty: int) -> None:
    for first in range(1, 18):
        add(written, first, *([] if first == empty else ["step"]))
    written.compactor().step()
    assert written.names() == ["000000001-000000008.log", "000000009-000000016.log", "000000017.log"]
    assert written.text() == [number for number in range(1, 18) if number != empty]


def test_one_folder_that_cannot_be_read_holds_up_no_other(written: Logs, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory in place of a segment raises `OSError` when it is read."""
    for number in range(3):
        written.train(0.02, attempt=f"0.{number}")
    broken = written.folder / "0.1" / "node-0"
    (broken / "000000001.log").unlink()
    (broken / "000000001.log").mkdir()
    for number in range(3):
        written.rest(f"0.{number}")
    compactor = written.compactor("0.3")
    compactor.step()
    assert [len(written.names(f"0.{number}")) for number in (0, 2)] == [1, 1]
    (broken / "000000001.log").rmdir()
    compactor.step()
    assert len(written.names("0.1")) == 1


@pytest.mark.parametrize("past", [False, True])
def test_a_busy_agent_is_waited_for_without_a_limit(written: Logs, past: bool) -> None:
    """It uploads a large file first: the small segments in the store must not go before the merged one is there."""
    lines = written.train(0.02)
    folder = written.folder / "0.0" / "node-0"
    if past:
        written.rest()
    (folder / f"{written.names()[0]}.x-uploaded").touch()
    if past:
        written.rest()
    stored: set[Path] = set()
    compactor = written.compactor("0.1" if past else "0.0", uploads=Stored(stored))
    compactor.step()
    written.clock.now += 10 * TIMINGS.compact_settle
    compactor.step()
    assert len([name for name in written.names() if "-" not in name]) == lines
    stored.add(next(path for path in folder.iterdir() if span_of(path.name) and "-" in path.name))
    compactor.step()
    assert len([name for name in written.names() if "-" not in name]) == (0 if past else lines - FAN)
    assert written.text() == list(range(1, lines + 1))


def test_a_past_segment_that_is_merged_is_uploaded_by_a_node_whose_agent_is_dead(written: Logs) -> None:
    """It bears the time of its last line, which is before this node began."""
    written.train(0.02)
    written.rest()
    put: list[str] = []
    live = written.folder.parent
    agent = SyncAgent(
        uploading=".x-uploading", uploaded=".x-uploaded", ignored=".x-ignore", put=lambda name, *_: put.append(name)
    )
    time.sleep(0.05)  # a file's time may be a little early
    uploads = Uploads(live, agent, say=print)
    uploads.dead = True
    time.sleep(0.05)
    compactor = written.compactor("0.1", uploads=uploads)
    compactor.step()
    uploads.finish(10)
    compactor.step()
    assert [f"logs/0.0/node-0/{name}" for name in written.names()] == put[-1:]


def test_a_past_folder_that_still_has_a_writer_is_left_alone(written: Logs) -> None:
    """The platform counts the node as lost, and it writes on: its folder is merged once it rests."""
    lines = written.train(0.02)
    folder = written.folder / "0.0" / "node-0"
    written.rest()
    (folder / ".000000001-000000008.log.part").write_text("half of it, so far")
    before = written.names()
    compactor = written.compactor("0.1")
    compactor.step()
    assert written.names() == before
    written.rest()
    compactor.step()
    assert written.names() == [Span(1, lines).name]


def test_a_segment_that_changed_after_the_merge_is_kept(written: Logs) -> None:
    written.train(0.02)
    stored: set[Path] = set()
    compactor = written.compactor(uploads=Stored(stored))
    compactor.step()
    folder = written.folder / "0.0" / "node-0"
    changed = folder / "000000003.log"
    changed.write_text("[a0.0 n0 r0 #3] something else\n")
    stored.add(folder / "000000001-000000008.log")
    compactor.step()
    assert [name for name in written.names() if name < "000000009"] == ["000000001-000000008.log", "000000003.log"]


# ------------------------------------------------------------------------------------------------------------- readers


@pytest.fixture
def merging(written: Logs, monkeypatch: pytest.MonkeyPatch) -> tuple[Logs, int]:
    """Segments that are merged as soon as the reader has read two of them."""
    lines = written.train(0.1)
    compactor, reads = written.compactor(), [0]
    files = type(written.store.files)
    read = files.read

    def merge_meanwhile(self: object, key: str) -> bytes:
        if "/logs/" in key:
            reads[0] += 1
            if reads[0] == 3:
                compactor.step()
        return read(self, key)  # type: ignore[arg-type]

    monkeypatch.setattr(files, "read", merge_meanwhile)
    return written, lines


def followed(written: Logs) -> list[int]:
    """The numbers of the lines that a follower gives from the segments alone."""
    clock = written.clock
    tail = Tail(store=written.store, run_id=RUN, provider=lambda: pytest.fail("no platform"), clock=clock, patience=1)
    return [line.seq for line in tail.rest()]


def test_a_follower_loses_and_doubles_nothing_while_segments_are_merged(merging: tuple[Logs, int]) -> None:
    written, lines = merging
    tail = Tail(
        store=written.store, run_id=RUN, provider=lambda: pytest.fail("no platform"), clock=written.clock, patience=1
    )
    assert [line.seq for line in tail.rest()] == list(range(1, lines + 1))


def test_a_look_at_the_end_finds_the_last_lines_while_segments_are_merged(merging: tuple[Logs, int]) -> None:
    written, lines = merging
    found = LiveRunReader(written.store, RUN).lines("0.0", 30)
    assert [line.seq for line in found[0]] == list(range(lines - 29, lines + 1))


def test_a_merge_does_not_bring_a_lost_node_back_to_life(written: Logs) -> None:
    """An object store dates a merged segment by its upload, which the next attempt makes."""
    written.train(0.02)
    then = time.time() - 2 * TIMINGS.compact_rest
    folder = written.folder / "0.0" / "node-0"
    for path in folder.iterdir():
        os.utime(path, (then, then))
    Start(written.folder.parent, "0.1", started=then + 60).begin(resumed="", saved=None)
    written.compactor("0.1").step()
    [merged] = folder.iterdir()
    os.utime(merged)
    [node] = LiveRunReader(written.store, RUN).nodes("0.0")
    assert node.seen == pytest.approx(then + 60)


def test_the_newest_segment_tells_when_a_node_was_last_alive(written: Logs) -> None:
    written.train(0.02)
    written.rest()
    written.compactor().step()
    folder = written.folder / "0.0" / "node-0"
    [merged] = [path for path in folder.iterdir() if "-" in path.name]
    newest = max(path for path in folder.iterdir() if path != merged)
    os.utime(merged)
    [node] = LiveRunReader(written.store, RUN).nodes("0.0")
    assert node.seen == pytest.approx(newest.stat().st_mtime)


def test_a_pull_joins_every_line_once_while_segments_are_merged(merging: tuple[Logs, int], tmp_path: Path) -> None:
    written, lines = merging
    (written.folder.parent.parent / "run.json").write_text("{}")
    for _ in range(2):
        pull(written.store, RUN, tmp_path / "out", what="logs")
        text = (tmp_path / "out" / "logs" / "0.0" / "node-0.log").read_text()
        numbers = [re.split(r"[ \]]", line.partition("#")[2])[0] for line in text.splitlines()]
        assert numbers == [str(number) for number in range(1, lines + 1)]


def test_old_segments_stay_readable(written: Logs) -> None:
    lines = written.train(0.1)
    tail = Tail(
        store=written.store, run_id=RUN, provider=lambda: pytest.fail("no platform"), clock=written.clock, patience=1
    )
    assert [line.seq for line in tail.rest()] == list(range(1, lines + 1))
