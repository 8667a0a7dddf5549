"""Mounts that answer late or slowly."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.errors import StorageError
from cloudtrain.runtime import mounts
from cloudtrain.runtime.__main__ import main
from cloudtrain.runtime.timings import TIMINGS


@pytest.fixture
def hanging() -> Iterator[threading.Event]:
    """An event that a call waits for until the end of the test."""
    healed = threading.Event()
    yield healed
    healed.set()


def test_a_mount_that_answers_just_after_its_time_is_not_taken_for_a_caller_that_must_leave(
    hanging: threading.Event, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None would start the script without its checkpoint."""
    silent = iter([True])
    monkeypatch.setattr(mounts._Look, "silent", property(lambda _: next(silent, False)))

    def until(over: Callable[[], bool]) -> None:
        while not over():
            time.sleep(0.01)

    with pytest.raises(StorageError, match="has not answered for"):
        mounts.in_thread(hanging.wait, [tmp_path], until)


def test_a_large_folder_of_a_slow_mount_answers_with_its_first_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that work of any length goes on as long as the mount answers."""
    (tmp_path / "a").write_text("")

    def all_names(folder: Path) -> list[str]:
        time.sleep(1.5)
        return ["a"]

    monkeypatch.setattr(TIMINGS, "mount", 0.8)
    monkeypatch.setattr(TIMINGS, "mount_pauses", (0.1, 0.1))
    monkeypatch.setattr(os, "listdir", all_names)
    assert mounts.in_thread(lambda: mounts.names_in(tmp_path), [tmp_path]) == ["a"]


def test_a_node_whose_context_is_on_a_silent_mount_ends(
    hanging: threading.Event, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    context = tmp_path / "mount/context.json"
    context.parent.mkdir()
    os.mkfifo(context)  # to open it hangs
    scandir = os.scandir

    def silent(folder: Path) -> Any:
        if folder == context.parent:
            hanging.wait()
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", silent)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(TIMINGS, "mount", 0.5)
    node = threading.Thread(target=lambda: main(["run", "--context", str(context)]), daemon=True)
    node.start()
    node.join(10)
    assert not node.is_alive()
    assert capsys.readouterr().err == f"cloudtrain: this node cannot start: {context.parent} has not answered for 0 s\n"
    os.close(os.open(context, os.O_WRONLY | os.O_NONBLOCK))


def test_a_time_in_which_this_process_was_stopped_is_no_silence_of_a_mount(
    hanging: threading.Event, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm suspends jobs, and Docker pauses containers."""
    monkeypatch.setattr(TIMINGS, "mount_pauses", (3600.0, 3600.0))
    ahead = iter([0.0, 0.0, 3600.0])
    clock = time.monotonic
    past = 0.0

    def monotonic() -> float:
        nonlocal past
        past += next(ahead, 0.0)
        return clock() + past

    monkeypatch.setattr(mounts.time, "monotonic", monotonic)
    look = mounts._Look(tmp_path)
    assert [look.silent for _ in range(4)] == [False] * 4
    assert past == 3600.0
    look.close()
