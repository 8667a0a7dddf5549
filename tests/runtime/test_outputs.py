"""Outputs: files that a script writes below its working folder, found by scans and copied by a thread."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from cloudtrain.runtime import outputs as module
from cloudtrain.runtime.outputs import GrowingOutputs, Outputs
from cloudtrain.runtime.timings import TIMINGS

SHIPPED = {"train.py": "print(1)", "pkg/data.txt": "a", "notes.md": "n"}


class Folder:
    """A working folder with code, its `Outputs`, and their log lines."""

    def __init__(self, path: Path, *, limit: int = 10**9, skip: tuple[str, ...] = (), ignore: str = "") -> None:
        self.path, self.said = path, list[str]()
        for name, text in SHIPPED.items():
            self.put(name, text)
        if ignore:
            self.put(".cloudtrainignore", ignore)
        self.outputs = Outputs(path, limit=limit, skip=skip, say=self.said.append)

    def put(self, name: str, text: str = "x", *, age: float = 60.0) -> Path:
        """Write a file that changed ``age`` seconds ago."""
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        os.utime(path, (time.time() - age,) * 2)
        return path

    def found(self, *, final: bool = False) -> set[str]:
        return set(self.outputs.look(final=final))


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "code")


def test_new_and_changed_files_are_outputs_and_the_shipped_ones_are_not(folder: Folder) -> None:
    assert folder.found() == set()
    folder.put("model.pt")
    folder.put("lightning_logs/version_0/checkpoints/epoch=1-step=10.ckpt")
    folder.put("pkg/data.txt", "b", age=30)
    assert folder.found() == {"model.pt", "lightning_logs/version_0/checkpoints/epoch=1-step=10.ckpt", "pkg/data.txt"}


def test_what_python_and_git_leave_is_no_output(folder: Folder) -> None:
    for name in ("__pycache__/a.py", "pkg/__pycache__/b.cpython-311.pyc", "c.pyc", ".git/HEAD", ".x.part"):
        folder.put(name)
    folder.put("data.part")
    folder.put(".hidden/y")
    assert folder.found() == {"data.part", ".hidden/y"}


def test_only_links_to_files_inside_the_folder_are_outputs(folder: Folder, tmp_path: Path) -> None:
    (tmp_path / "input").mkdir()
    (tmp_path / "input/big.csv").write_text("data")
    folder.put("a.ckpt")
    for name, target in (
        ("last.ckpt", "a.ckpt"),
        ("data", tmp_path / "input"),
        ("one.csv", tmp_path / "input/big.csv"),
        ("gone", "nowhere"),
        ("loop", "."),
    ):
        (folder.path / name).symlink_to(target)
    os.mkfifo(folder.path / "pipe")
    assert folder.found(final=True) == {"a.ckpt", "last.ckpt"}


def test_checkpoints_that_are_kept_as_such_are_no_outputs(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "code", skip=("./out/ckpt-*", "*.pt"))
    for name in ("out/ckpt-1/weights", "out/log.txt", "a.pt", "sub/a.pt"):
        folder.put(name)
    assert folder.found() == {"out/log.txt", "sub/a.pt"}


IGNORES = """
# a comment
wandb/
*.tmp
!keep.tmp
/top.txt
logs/*.log
deep/**/x
[ab].bin
cache/**
"""


def test_the_ignore_file_decides_as_git_would(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "code", ignore=IGNORES)
    names = [
        "wandb/run.txt", "sub/wandb/run.txt", "wandb.txt", "a.tmp", "sub/b.tmp", "keep.tmp", "sub/keep.tmp", "top.txt",
        "sub/top.txt", "logs/a.log", "logs/sub/a.log", "sub/logs/a.log", "deep/x", "deep/a/b/x", "a.bin", "c.bin",
        "cache/a", "cache/b/c", "model.pt",
    ]  # fmt: skip
    for name in names:
        folder.put(name)
    subprocess.run(["git", "init", "-q"], cwd=folder.path, check=True)
    (folder.path / ".git/info").mkdir(exist_ok=True)
    (folder.path / ".git/info/exclude").write_text(IGNORES)
    asked = ["git", "check-ignore", "--stdin"]
    done = subprocess.run(asked, cwd=folder.path, input="\n".join(names), capture_output=True, text=True, check=True)
    assert folder.found() == set(names) - set(done.stdout.splitlines())


def test_an_ignore_file_in_a_folder_holds_below_it_and_nonsense_in_it_is_harmless(tmp_path: Path) -> None:
    place = tmp_path / "code"
    (place / "sub").mkdir(parents=True)
    (place / "sub/.cloudtrainignore").write_text("*.log\n[z-a]\n[\n\\\n")
    folder = Folder(place, ignore="nothing\n")
    for name in ("a.log", "sub/a.log", "sub/deep/b.log", "sub/z"):
        folder.put(name)
    assert folder.found() == {"a.log", "sub/z"}


def test_the_largest_are_left_out_above_the_limit_and_named_in_one_line(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "code", limit=1000)
    folder.put("small.txt", "x" * 400)
    folder.put("middle.txt", "x" * 500)
    assert folder.found() == {"small.txt", "middle.txt"}
    assert folder.said == []
    folder.put("large.txt", "x" * 3000)
    assert folder.found() == {"small.txt", "middle.txt"}
    assert folder.found() == {"small.txt", "middle.txt"}
    assert folder.said == ["outputs are limited to 1 kB (max_outputs); left out: large.txt (3 kB)"]
    assert not folder.outputs.present("large.txt")
    assert folder.outputs.present("small.txt")


def test_a_file_that_is_being_written_waits_for_the_second_look_but_not_at_the_end(folder: Folder) -> None:
    folder.put("growing.log", age=0)
    assert folder.found() == set()
    folder.put("growing.log", age=0)
    assert folder.found() == {"growing.log"}
    assert folder.found() == set()
    assert folder.found(final=True) == {"growing.log"}


@pytest.fixture
def mirrored(folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> GrowingOutputs:
    monkeypatch.setattr(TIMINGS, "output_look", 0.05)
    thread = GrowingOutputs(
        folder.outputs, tmp_path / "live", moved=lambda path, done: None, complain=folder.said.append
    )
    thread.start()
    return thread


def until(there: Path, names: set[str], seconds: float = 15.0) -> None:
    deadline = time.monotonic() + seconds
    while (found := {p.relative_to(there).as_posix() for p in there.rglob("*") if p.is_file()}) != names:
        assert time.monotonic() < deadline, found
        time.sleep(0.02)


def test_the_thread_copies_replaces_and_removes(folder: Folder, mirrored: GrowingOutputs, tmp_path: Path) -> None:
    live = tmp_path / "live"
    folder.put("epoch-1.ckpt", "one")
    folder.put("log.txt", "a")
    until(live, {"epoch-1.ckpt", "log.txt"})
    (folder.path / "epoch-1.ckpt").unlink()
    folder.put("epoch-2.ckpt", "two")
    until(live, {"epoch-2.ckpt", "log.txt"})
    folder.put("log.txt", "a and b", age=0)
    folder.put("train.py", "print(2)", age=0)
    mirrored.finish()
    assert mirrored.done.wait(15)
    assert (live / "log.txt").read_text() == "a and b"
    assert (live / "train.py").read_text() == "print(2)"
    assert folder.said == []


def test_the_copies_stay_when_the_node_removes_the_folder(
    folder: Folder, mirrored: GrowingOutputs, tmp_path: Path
) -> None:
    folder.put("a.txt")
    until(tmp_path / "live", {"a.txt"})
    mirrored.stop()
    (folder.path / "a.txt").unlink()
    assert list(mirrored._all(finishing=True)) == []
    until(tmp_path / "live", {"a.txt"})


def test_a_folder_that_the_script_removes_altogether_ends_nothing(
    folder: Folder, mirrored: GrowingOutputs, tmp_path: Path
) -> None:
    folder.put("a/b/c.txt")
    until(tmp_path / "live", {"a/b/c.txt"})
    for path in sorted(folder.path.rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    folder.path.rmdir()
    mirrored.finish()
    assert mirrored.done.wait(15)
    until(tmp_path / "live", set())


def test_a_pattern_across_folders_keeps_checkpoints_out(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "code", skip=("lightning_logs/**/*.ckpt", "ckpt-*"))
    for name in ("lightning_logs/version_0/a.ckpt", "lightning_logs/b.ckpt", "ckpt-1/weights", "lightning_logs/x.txt"):
        folder.put(name)
    assert folder.found() == {"lightning_logs/x.txt"}


def test_folders_with_very_many_files_are_left_out_and_named(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_FILES", 5)
    for number in range(9):
        folder.put(f"data/{number}.jpg")
    folder.put("model.pt")
    assert folder.found() == {"model.pt"}
    assert folder.found() == {"model.pt"}
    assert folder.said == ["outputs are limited to 5 files a node; left out: data (9 files)"]


def test_a_file_may_become_a_folder_and_a_folder_a_file(
    folder: Folder, mirrored: GrowingOutputs, tmp_path: Path
) -> None:
    live = tmp_path / "live"
    folder.put("model")
    folder.put("other/deep/x.txt")
    until(live, {"model", "other/deep/x.txt"})
    (folder.path / "model").unlink()
    folder.put("model/weights")
    (folder.path / "other/deep/x.txt").unlink()
    (folder.path / "other/deep").rmdir()
    (folder.path / "other").rmdir()
    folder.put("other", "now a file")
    mirrored.finish()
    assert mirrored.done.wait(15)
    until(live, {"model/weights", "other"})


def test_an_output_that_can_never_be_copied_ends_no_run(
    folder: Folder, mirrored: GrowingOutputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*given: object, **named: object) -> None:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr("cloudtrain.runtime.mirror_files.replace_file", refuse)
    monkeypatch.setattr(TIMINGS, "file_retry", 0.05)
    folder.put("odd name")
    mirrored.finish()
    assert mirrored.done.wait(15)
    assert "cannot mirror odd name: Invalid argument" in folder.said
