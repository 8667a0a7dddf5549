"""Mirroring of growing files in a thread: no error ends the thread, and the end waits only for files that can still
come."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.runtime import mirror_files
from cloudtrain.runtime.checkpoints import BLOCK
from cloudtrain.runtime.mirror_files import Growing
from cloudtrain.runtime.timings import TIMINGS


class One:
    """A `Growing` over a folder and a metrics file, with its log lines."""

    def __init__(self, tmp_path: Path) -> None:
        self.artifacts, self.live = tmp_path / "artifacts", tmp_path / "live"
        self.metrics = tmp_path / "metrics.jsonl"
        self.artifacts.mkdir()
        self.said: list[str] = []
        self.moved: list[tuple[str, int]] = []
        self.growing = Growing(
            {self.artifacts: self.live / "artifacts", self.metrics: self.live / "metrics.jsonl"},
            small=self.metrics,
            small_seconds=0.05,
            moved=lambda source, done: self.moved.append((source.name, done)),
            complain=self.said.append,
        )

    def here(self) -> dict[str, str]:
        found = {}
        for path in self.live.rglob("*"):
            with contextlib.suppress(FileNotFoundError):  # a temporary file that has its name by now
                if path.is_file():
                    found[path.relative_to(self.live).as_posix()] = path.read_text()
        return found

    def until(self, what: Callable[[], Any], seconds: float = 15) -> None:
        deadline = time.monotonic() + seconds
        while not what():
            assert time.monotonic() < deadline, (self.here(), self.said)
            time.sleep(0.02)


@pytest.fixture
def one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[One]:
    for name in ("growing", "file_retry"):
        monkeypatch.setattr(TIMINGS, name, 0.05)
    made = One(tmp_path)
    yield made
    made.growing.stop()


def failing(monkeypatch: pytest.MonkeyPatch, *errors: OSError) -> list[int]:
    """Make `replace_file` fail with ``errors``, then work. Return a list with one item for each try."""
    left, tries, whole = list(errors), [], mirror_files.replace_file

    def copy(source: Path, target: Path, moved: Callable[[Path, int], None], **more: Any) -> None:
        tries.append(1)
        if left:
            raise left.pop(0)
        whole(source, target, moved, **more)

    monkeypatch.setattr(mirror_files, "replace_file", copy)
    return tries


def test_folders_that_come_and_go_while_they_are_listed_end_nothing(one: One, monkeypatch: pytest.MonkeyPatch) -> None:
    listing, scandir = threading.Event(), os.scandir

    def late(path: Any) -> Any:
        """Let the script remove the folder just before it is listed."""
        if str(path).endswith("gone"):
            shutil.rmtree(path, ignore_errors=True)
            listing.set()
        return scandir(path)

    monkeypatch.setattr(os, "scandir", late)
    (one.artifacts / "a/gone").mkdir(parents=True)
    (one.artifacts / "a/gone/lost").write_text("x")
    (one.artifacts / "kept").write_text("1")
    one.growing.start()
    assert listing.wait(10)
    one.until(lambda: one.here() == {"artifacts/kept": "1"})
    (one.artifacts / "kept").write_text("1 2")
    one.until(lambda: one.here() == {"artifacts/kept": "1 2"})
    assert one.said == []


def test_a_whole_folder_of_artifacts_may_vanish(one: One) -> None:
    one.growing.start()
    shutil.rmtree(one.artifacts)
    one.metrics.write_text('{"step": 1}\n')
    one.until(lambda: one.here() == {"metrics.jsonl": '{"step": 1}\n'})
    one.growing.finish()
    assert one.growing.done.wait(10)


def test_nothing_that_goes_wrong_ends_the_thread(one: One, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = [RuntimeError("can't start new thread"), MemoryError()]
    once = Growing._once

    def sometimes(self: Growing, finishing: bool) -> bool:
        if broken:
            raise broken.pop(0)
        return once(self, finishing)

    monkeypatch.setattr(Growing, "_once", sometimes)
    (one.artifacts / "model.pt").write_text("weights")
    one.growing.finish()
    one.growing.start()
    assert one.growing.done.wait(10)
    assert one.here() == {"artifacts/model.pt": "weights"}
    assert one.said == ["RuntimeError: can't start new thread", "MemoryError: "]


def test_a_folder_that_cannot_be_listed_is_told_and_not_waited_for_unless_it_may_recover(
    one: One, monkeypatch: pytest.MonkeyPatch
) -> None:
    (one.artifacts / "secret").mkdir()
    (one.artifacts / "z").write_text("z")
    trouble, scandir = [errno.EIO, errno.EACCES], os.scandir

    def refuse(path: Any) -> Any:
        if str(path).endswith("secret"):
            code = trouble.pop(0) if len(trouble) > 1 else trouble[0]
            raise OSError(code, os.strerror(code), str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    one.growing.finish()
    one.growing.start()
    assert one.growing.done.wait(10)
    assert one.here() == {"artifacts/z": "z"}
    assert "Input/output error" in one.said[0]
    assert one.said[1] == f"cannot mirror {one.artifacts}/secret: Permission denied"


def test_what_a_cut_off_replacement_has_left_is_left_out(one: One) -> None:
    for name in (".model.pt.part", "sub/.x.part", "sub/x.part", ".hidden", "model.git-ignore", "data.not-uploaded"):
        (one.artifacts / name).parent.mkdir(exist_ok=True)
        (one.artifacts / name).write_text("x")
    one.growing.finish()
    one.growing.start()
    assert one.growing.done.wait(10)
    users = {"sub/x.part", ".hidden", "model.git-ignore", "data.not-uploaded"}
    assert set(one.here()) == {f"artifacts/{name}" for name in users}


def test_it_tells_how_far_each_file_is_over_all_its_copies(one: One) -> None:
    path = one.artifacts / "big"
    path.write_bytes(b"x" * (BLOCK + 1))
    one.growing.start()
    one.until(lambda: len(one.moved) == 2)
    path.write_bytes(b"y" * 5)
    one.until(lambda: len(one.moved) == 3)
    assert one.moved == [("big", BLOCK), ("big", BLOCK + 1), ("big", BLOCK + 6)]


def test_another_try_is_no_farther_than_the_one_before(one: One, monkeypatch: pytest.MonkeyPatch) -> None:
    tries, replace = [], os.replace

    def refuse(source: Any, target: Any) -> None:
        tries.append(1)
        if len(tries) < 3:
            raise OSError(errno.ENOSPC, "No space left on device", str(target))
        replace(source, target)

    monkeypatch.setattr(os, "replace", refuse)
    (one.artifacts / "a").write_text("weights")
    one.growing.finish()
    one.growing.start()
    assert one.growing.done.wait(10)
    assert one.moved == [("a", 7)] * 3
    assert one.said == ["cannot mirror a: No space left on device"] * 2


def test_a_name_that_fits_nowhere_is_told_and_not_waited_for(one: One) -> None:
    (one.artifacts / ("n" * 253)).write_text("x")
    (one.artifacts / "model.pt").write_text("weights")
    one.growing.finish()
    one.growing.start()
    assert one.growing.done.wait(10)
    assert one.here() == {"artifacts/model.pt": "weights"}
    assert one.said == [f"cannot mirror {'n' * 253}: File name too long"]


@pytest.mark.parametrize("code", [errno.EACCES, errno.EPERM])
def test_a_file_that_may_not_be_read_is_not_waited_for(one: One, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    source = one.artifacts / "private"
    source.write_text("x")
    tries = failing(monkeypatch, *[PermissionError(code, os.strerror(code), str(source))] * 1000)
    one.growing.finish()
    one.growing.start()
    assert one.growing.done.wait(10)
    assert one.said == [f"cannot mirror private: {os.strerror(code)}"]
    assert len(tries) == 1


def test_a_file_that_may_be_read_later_is_mirrored_then(one: One, monkeypatch: pytest.MonkeyPatch) -> None:
    source = one.artifacts / "private"
    source.write_text("x")
    failing(monkeypatch, *[PermissionError(errno.EACCES, "Permission denied", str(source))] * 2)
    one.growing.start()
    one.until(lambda: one.here() == {"artifacts/private": "x"})


@pytest.mark.parametrize("code", [errno.EACCES, errno.ENOSPC, errno.EIO, errno.ESTALE])
def test_what_ails_the_target_is_waited_for(one: One, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    (one.artifacts / "a").write_text("x")
    target = one.live / "artifacts/.a.part"
    tries = failing(monkeypatch, *[OSError(code, os.strerror(code), str(target))] * 3)
    one.growing.finish()
    one.growing.start()
    assert one.growing.done.wait(10)
    assert one.here() == {"artifacts/a": "x"}
    assert len(tries) == 4


def test_a_file_that_has_become_none_is_not_waited_for(one: One, monkeypatch: pytest.MonkeyPatch) -> None:
    source = one.artifacts / "a"
    source.write_text("x")
    original = mirror_files.replace_file

    def copy(file: Path, target: Path, moved: Callable[[Path, int], None], **more: Any) -> None:
        file.unlink()
        file.mkdir()
        original(file, target, moved)

    monkeypatch.setattr(mirror_files, "replace_file", copy)
    one.growing.finish()
    one.growing.start()
    assert one.growing.done.wait(10)
    assert one.said == []


def test_between_two_tries_there_is_a_pause_also_at_the_end(one: One, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TIMINGS, "file_retry", 0.2)
    (one.artifacts / "a").write_text("x")
    tries = failing(monkeypatch, *[OSError(errno.EIO, "Input/output error")] * 100_000)
    one.growing.finish()
    one.growing.start()
    time.sleep(1)
    assert 1 <= len(tries) <= 6


def test_what_was_brought_back_is_not_copied_again(tmp_path: Path) -> None:
    artifacts, target = tmp_path / "artifacts", tmp_path / "live"
    target.mkdir()
    (target / "old").write_text("old")
    shutil.copytree(target, artifacts)
    (artifacts / "new").write_text("new")
    moved: list[str] = []
    one = Growing(
        {artifacts: target},
        small=tmp_path / "none",
        small_seconds=0.05,
        moved=lambda file, _: moved.append(file.name),
        complain=print,
    )
    one.start()
    one.finish()
    assert one.done.wait(10)
    one.stop()
    assert set(moved) == {"new"}
    assert (target / "new").read_text() == "new"


@pytest.mark.slow
def test_a_file_that_takes_long_to_copy_takes_a_tenth_of_the_time(one: One, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second file is copied as often as before."""
    copies: dict[str, int] = {"big": 0, "quick": 0}
    original = mirror_files.replace_file

    def copy(source: Path, target: Path, moved: Callable[[Path, int], None], **more: Any) -> None:
        copies[source.name] += 1
        time.sleep(0.3 if source.name == "big" else 0)
        original(source, target, moved, **more)

    monkeypatch.setattr(mirror_files, "replace_file", copy)
    one.growing.start()
    number, deadline = 0, time.monotonic() + 2.5
    while time.monotonic() < deadline:
        number += 1
        for name in copies:
            (one.artifacts / name).write_text(str(number))
        time.sleep(0.02)
    assert copies["big"] == 1  # the next one is due 3 s after the first
    assert copies["quick"] >= 3
    one.growing.finish()
    assert one.growing.done.wait(10)
    assert one.here() == {f"artifacts/{name}": str(number) for name in copies}
