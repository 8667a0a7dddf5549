"""The lost work in an attempt's record: by the checkpoint's name, else by the first row of metrics."""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from disks import FaultyDisk, faulty_disk
from rows import for_each

from cloudtrain.runtime import history
from cloudtrain.runtime.history import Start, failed_for_good, restart_of, was_direct
from cloudtrain.runtime.timings import TIMINGS


def earlier(live: Path, steps: range, *, attempt: str = "0.0", started: float = 100.0) -> None:
    """Write an attempt that made ``steps``, one a second."""
    (live / "attempts").mkdir(parents=True, exist_ok=True)
    (live / "attempts" / f"{attempt}.json").write_text(json.dumps({"protocol": 1, "started": started}))
    (live / "metrics").mkdir(exist_ok=True)
    rows = ({"step": step, "epoch": 0, "time": started + i} for i, step in enumerate(steps))
    (live / "metrics" / f"{attempt}-node-0.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def record(live: Path, attempt: str = "1.0") -> dict[str, Any]:
    found: dict[str, Any] = json.loads((live / "attempts" / f"{attempt}.json").read_text())
    return found


def begun(live: Path, resumed: str, saved: float | None = None, **rest: Any) -> Start:
    start = Start(live, "1.0", started=time.time())
    start.begin(resumed=resumed, saved=saved, **rest)
    return start


def test_the_very_first_start_has_lost_nothing(tmp_path: Path) -> None:
    assert Start(tmp_path, "0.0", started=5.0).begin(resumed="", saved=None) == ""
    assert record(tmp_path, "0.0") == {
        "protocol": 1, "attempt": "0.0", "started": 5.0, "after": None,
        "resumed_from": "", "direct": False, "lost": None,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("resumed", "steps"),
    [("step-30", 20), ("epoch=3-step=40.ckpt", 10), ("checkpoint-50", 0), ("step-0", 50)],
)
def test_the_name_tells_what_is_done_again(tmp_path: Path, resumed: str, steps: int) -> None:
    earlier(tmp_path, range(1, 51))
    begun(tmp_path, resumed, 120.0)
    assert record(tmp_path)["lost"] == {"seconds": 29.0, "steps": steps}


def test_a_fresh_start_does_all_again(tmp_path: Path) -> None:
    earlier(tmp_path, range(11, 51))
    start = Start(tmp_path, "1.0", started=time.time())
    assert start.begin(resumed="", saved=None) == "; 39 s of attempt 0.0 are lost"
    assert record(tmp_path)["lost"] == {"seconds": 39.0, "steps": 40}


@pytest.mark.parametrize("resumed", ["last.ckpt", "last-v1.ckpt", "step-51"])
def test_where_the_name_does_not_tell_the_first_row_does(tmp_path: Path, resumed: str) -> None:
    earlier(tmp_path, range(1, 51))
    start = begun(tmp_path, resumed, 120.0)
    assert record(tmp_path)["lost"] == {"seconds": 29.0, "steps": None}
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text('{"lr": 0.1}\n{"step": 41, "epoch": 0}\n{"step": 42}\n')
    start.look(metrics)
    assert record(tmp_path)["lost"] == {"seconds": 29.0, "steps": 10}


def test_no_step_done_again_leaves_the_seconds_as_they_are(tmp_path: Path) -> None:
    earlier(tmp_path, range(1, 51))
    start = begun(tmp_path, "last.ckpt", 120.0)
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text('{"step": 51}\n')
    start.look(metrics)
    assert record(tmp_path)["lost"] == {"seconds": 29.0, "steps": 0}


def test_a_clock_that_was_set_back_hides_no_lost_work(tmp_path: Path) -> None:
    """The save counts as if the clock had never been set back, so the end must, too."""
    earlier(tmp_path, range(1, 51))
    failure = {"time_ns": int((150.0 - 3600.0) * 1e9)}
    ended(tmp_path, "0.0", ended=151.0 - 3600.0, failure=failure, set_back=3600.0)
    begun(tmp_path, "step-30", 120.0)
    assert record(tmp_path)["lost"] == {"seconds": 30.0, "steps": 20}
    ended(tmp_path, "0.0", ended=151.0 - 3600.0, set_back=3600.0)
    begun(tmp_path, "step-30", 120.0)
    assert record(tmp_path)["lost"] == {"seconds": 31.0, "steps": 20}


def test_an_end_long_before_the_save_is_unknown_and_not_nothing(tmp_path: Path) -> None:
    """A killed node records nothing of its clock."""
    earlier(tmp_path, range(1, 51))
    assert begun(tmp_path, "step-30", 5000.0)._record["lost"] == {"seconds": None, "steps": 20}
    ended(tmp_path, "0.0", ended=151.0, failure={"time_ns": int(140e9)})
    begun(tmp_path, "step-50", 150.0)  # saved after the first failure
    assert record(tmp_path)["lost"] == {"seconds": 0.0, "steps": 0}


def test_an_attempt_without_a_row_says_nothing_of_steps(tmp_path: Path) -> None:
    earlier(tmp_path, range(0))
    start = begun(tmp_path, "step-5", 120.0)
    start.look(tmp_path / "none")
    assert record(tmp_path)["lost"] == {"seconds": None, "steps": None}


WILD = (
    '{"step": Infinity}', '{"step": -Infinity}', '{"step": NaN}', '{"step": 1e999}', '{"step": true}',
    '{"step": "7"}', f'{{"step": {"9" * 400}}}', f'{{"step": {"9" * 5000}}}', "[" * 30000, "7", '{"step": 4',
)  # fmt: skip


def test_what_a_script_may_write_as_its_step_harms_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "HEAD_BYTES", 1 << 20)
    monkeypatch.setattr(TIMINGS, "first_step_look", 0.0)
    earlier(tmp_path, range(1, 51))
    with open(tmp_path / "metrics/0.0-node-0.jsonl", "a") as stream:
        stream.write("".join(f"{line}\n" for line in WILD) + '{"step": 51, "time": Infinity}\n')
    start = begun(tmp_path, "last.ckpt", 120.0)
    assert record(tmp_path)["lost"]["seconds"] == 29.0
    metrics = tmp_path / "metrics.jsonl"
    for line in WILD:
        metrics.write_text(line + "\n")
        start.look(metrics)
        assert record(tmp_path)["lost"]["steps"] is None, line
    metrics.write_text("".join(f"{line}\n" for line in WILD) + '{"step": 40.0}\n')
    start.look(metrics)
    assert record(tmp_path)["lost"]["steps"] == 12


@pytest.mark.parametrize("text", ["[1]", "{", '{"started": "now", "direct": "no"}', "\x00" * 5])
def test_a_record_that_is_none_harms_nobody(tmp_path: Path, text: str) -> None:
    earlier(tmp_path, range(1, 51))
    (tmp_path / "attempts/0.0.json").write_text(text)
    (tmp_path / "exit").mkdir()
    (tmp_path / "exit/0.0-node-0.json").write_text('{"failure": 7, "ended": "late"}')
    begun(tmp_path, "step-30", 120.0)
    assert record(tmp_path)["lost"] == {"seconds": 29.0, "steps": 20}
    assert not was_direct(tmp_path)


class Counted(type(Path())):  # type: ignore[misc]
    """A path that counts how often it is opened."""

    opened = 0

    def __fspath__(self) -> str:
        type(self).opened += 1
        return str(self)


def test_the_metrics_are_read_once_a_second_and_not_at_all_once_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr(history.time, "monotonic", lambda: now[0])
    earlier(tmp_path, range(1, 51))
    start, metrics = begun(tmp_path, "last.ckpt"), Counted(tmp_path / "metrics.jsonl")
    (tmp_path / "metrics.jsonl").write_text("")
    Counted.opened = 0
    for _ in range(50):  # five seconds, at ten looks a second
        start.look(metrics)
        now[0] += 0.1
    assert 5 <= Counted.opened <= 6
    (tmp_path / "metrics.jsonl").write_text('{"step": 41}\n')
    now[0] += 1
    start.look(metrics)
    assert record(tmp_path)["lost"]["steps"] == 10
    Counted.opened = 0
    now[0] += 60
    start.look(metrics)
    assert Counted.opened == 0


@pytest.mark.parametrize(
    ("name", "first", "steps"),
    [("step-30", 31, 20), ("checkpoint-30", 40, 20), ("checkpoint-3", 31, 20), ("3", 31, 20), ("epoch=3.ckpt", 31, 20)],
)
def test_a_number_in_a_name_is_believed_when_it_can_be_the_step(
    tmp_path: Path, name: str, first: int, steps: int
) -> None:
    """Rows come every tenth step. If the name contradicts them, only the first row after the resume counts."""
    earlier(tmp_path, range(10, 51, 10))
    start = begun(tmp_path, name)
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": {first}}}\n')
    start.look(tmp_path / "metrics.jsonl")
    assert record(tmp_path)["lost"]["steps"] == steps


def test_it_is_known_whether_any_attempt_began_in_the_store(tmp_path: Path) -> None:
    assert not was_direct(tmp_path)
    earlier(tmp_path, range(1, 51))
    assert not was_direct(tmp_path)
    begun(tmp_path, "step-30", 120.0, direct=True)
    assert record(tmp_path)["direct"] is True
    assert was_direct(tmp_path)
    Start(tmp_path, "2.0", started=time.time()).begin(resumed="step-40", saved=None)
    assert was_direct(tmp_path)


def test_a_platforms_own_restart_is_counted_by_what_the_one_before_left(tmp_path: Path) -> None:
    assert [restart_of(tmp_path, 0), restart_of(tmp_path, 0), restart_of(tmp_path, 1)] == ["0.0", "0.1", "1.0"]


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyDisk]:
    """A disk for ``live``, which a node asks again for a second."""
    monkeypatch.setattr(TIMINGS, "mount", 1.0)
    monkeypatch.setattr(TIMINGS, "mount_pauses", (0.05, 0.1))
    with faulty_disk(tmp_path / "live", tmp_path / "behind") as found:
        yield found


@pytest.mark.costly
def test_a_restart_takes_no_earlier_ones_number_while_a_mount_fails(disk: FaultyDisk) -> None:
    """`Path.glob` of Python 3.13 returns nothing then."""
    assert restart_of(disk.place, 0) == "0.0"
    disk.fail(("readdir", "/logs", errno.EIO))
    with pytest.raises(OSError, match="Input/output error"):
        restart_of(disk.place, 0)
    disk.heal_after(0.3)
    assert restart_of(disk.place, 0) == "0.1"


@pytest.mark.slow
@for_each("fault", [("readdir", "/{}", errno.EIO), ("open", "/{}/*.json", errno.ESTALE)])
def test_no_record_is_forgotten_while_a_mount_fails(disk: FaultyDisk, fault: tuple[str, str, int]) -> None:
    """A failed script would run a second time, and a run begin afresh."""
    operation, path, number = fault
    Start(disk.place, "0.0", started=1.0).begin(resumed="", saved=None, direct=True)
    ended(disk.place, "0.0")
    for folder, is_there in (("attempts", was_direct), ("exit", lambda live: failed_for_good(live, 0, 1))):
        disk.fail((operation, path.format(folder), number))
        with pytest.raises(OSError, match=os.strerror(number)):
            is_there(disk.place)
        disk.heal_after(0.3)
        assert is_there(disk.place)


@for_each("folder", ["attempts", "exit", "logs", "metrics"])
def test_an_attempt_begins_all_the_same_while_a_mount_fails(disk: FaultyDisk, folder: str) -> None:
    earlier(disk.place, range(1, 51))
    ended(disk.place, "0.0")
    (disk.place / "logs" / "0.0").mkdir(parents=True, exist_ok=True)
    (disk.place / "attempts" / "1.0.json").unlink(missing_ok=True)
    whole = Start(disk.place, "1.0", started=1.0)
    disk.fail(("readdir", f"/{folder}", errno.EIO), ("open", f"/{folder}/0.0*", errno.EIO))
    for start in (whole, Start(disk.place, "1.0", started=1.0)):
        start.begin(resumed="", saved=None)
    disk.fail()
    assert record(disk.place)["attempt"] == "1.0"


def ended(live: Path, attempt: str, node: int = 0, **fields: object) -> None:
    """Write an exit record of a node."""
    record = {"attempt": attempt, "node": node, "outcome": "failed", "decided": True, "exit_code": 1, "reason": "why"}
    (live / "exit").mkdir(exist_ok=True)
    (live / "exit" / f"{attempt}-node-{node}.json").write_text(json.dumps({**record, **fields}))


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({}, True),
        ({"exit_code": 134}, False),
        ({"outcome": "preempted", "exit_code": 134}, False),
        ({"outcome": "succeeded", "exit_code": 0}, False),
        ({"decided": False, "exit_code": None}, False),
        ({"node": 1}, False),
    ],
)
def test_a_failure_that_was_decided_for_good_is_found(tmp_path: Path, fields: dict[str, Any], found: bool) -> None:
    assert failed_for_good(tmp_path, 0, 1) is None, "the very first start"
    ended(tmp_path, "0.0", **fields)
    record = failed_for_good(tmp_path, 0, 1)
    assert (record is not None) == found
    assert failed_for_good(tmp_path, 1, 1) is None, "a client began another attempt"


def test_only_the_newest_failure_counts_and_a_broken_record_is_none(tmp_path: Path) -> None:
    ended(tmp_path, "0.9", reason="old")
    ended(tmp_path, "0.10", reason="new")
    found = failed_for_good(tmp_path, 0, 1)
    assert found is not None
    assert found["reason"] == "new"
    ended(tmp_path, "0.11", outcome="preempted", exit_code=134)
    assert failed_for_good(tmp_path, 0, 1) is None
    (tmp_path / "exit" / "0.11-node-0.json").write_text("{")
    assert failed_for_good(tmp_path, 0, 1) == found
