"""NCCL's words and its flight recorder, with files and pipes as NCCL would make them: no GPU is here."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import pytest
from rows import for_each

from cloudtrain.runtime.nccl import Recorder, words
from cloudtrain.runtime.timings import TIMINGS

DUMPS = Path("/s/flight-recorder")
ON = {
    "TORCH_FR_BUFFER_SIZE": "2000",
    "TORCH_FR_DUMP_TEMP_FILE": "/s/flight-recorder/trace-rank-",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": "/s/flight-recorder/trigger-",
}


def test_the_recorder_is_always_on_and_debugging_is_one_switch() -> None:
    assert words({}, DUMPS, debug=False) == ON
    assert words({}, DUMPS, debug=True) == {
        **ON, "NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET,GRAPH,ENV", "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
        "TORCH_CPP_LOG_LEVEL": "INFO", "TORCH_SHOW_CPP_STACKTRACES": "1",
    }  # fmt: skip


@for_each("name", [*ON, "NCCL_DEBUG", "TORCH_DISTRIBUTED_DEBUG"])
def test_what_is_set_already_stays(name: str) -> None:
    assert name not in words({name: ""}, DUMPS, debug=True)


@pytest.mark.parametrize(
    ("older", "newer"),
    [
        ("TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_FR_BUFFER_SIZE"),
        ("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "TORCH_FR_DUMP_TEMP_FILE"),
    ],
)
def test_an_older_name_of_the_same_stays_in_force(older: str, newer: str) -> None:
    assert set(words({older: "0"}, DUMPS, debug=False)) == set(ON) - {newer}


# --------------------------------------------------------------------------------------------------- dumps on demand


def pipe_of(recorder: Recorder, rank: int) -> int:
    """Return a rank's pipe, made and opened as ProcessGroupNCCL does."""
    pipe = recorder.folder / f"trigger-{rank}.pipe"
    os.mkfifo(pipe)
    return os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)


def test_who_listens_is_asked_and_waited_for(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    listening = {rank: pipe_of(recorder, rank) for rank in (0, 11)}
    os.close(pipe_of(recorder, 2))  # the pipe has no reader any more
    (tmp_path / "trace-rank-0").write_text("an earlier timeout's")
    os.utime(tmp_path / "trace-rank-0", (1, 1))
    recorder.trigger()
    assert all(os.read(fd, 128) for fd in listening.values())
    for rank in listening:
        assert not recorder.answered()
        (tmp_path / f"trace-rank-{rank}").write_text("dump")
    assert not recorder.answered(), "just written: it may grow yet"
    time.sleep(TIMINGS.dump_settled + 0.1)
    assert recorder.answered()
    for fd in listening.values():
        os.close(fd)


def test_a_full_pipe_holds_nothing_up(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    fd = pipe_of(recorder, 0)
    writer = os.open(tmp_path / "trigger-0.pipe", os.O_WRONLY | os.O_NONBLOCK)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, b"x" * 4096)
    recorder.trigger()
    assert recorder.answered()
    os.close(writer)
    os.close(fd)


def test_nothing_was_ever_there(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "none")
    recorder.trigger()
    assert recorder.answered()
    assert recorder.keep(tmp_path / "kept") == []
    assert not (tmp_path / "kept").exists()


def test_dumps_are_kept_and_pipes_are_not(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    os.close(pipe_of(recorder, 1))
    (tmp_path / "trace-rank-1").write_bytes(b"\0dump")
    assert recorder.keep(tmp_path / "kept" / "0.0") == ["trace-rank-1"]
    assert [p.name for p in (tmp_path / "kept" / "0.0").iterdir()] == ["trace-rank-1"]
    assert (tmp_path / "kept" / "0.0" / "trace-rank-1").read_bytes() == b"\0dump"
