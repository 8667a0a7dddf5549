"""Failing disks and stores: training continues, or ends with a clear cause, and no complete checkpoint is lost.

2 nodes of one rank each, whose script refuses to resume from an incomplete checkpoint (see survivor.py).
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from disks import faulty_disk, small_disk
from jobs import Jobs
from trials import Survivor

from cloudtrain.runtime.checkpoint_model import Checkpoint
from cloudtrain.runtime.checkpoints import complete

pytestmark = pytest.mark.slow

SHAPE = ("--launcher", "python")
WORDS = ("--interval", "30", "--pause", "0.1")
FULL = "No space left on device"

Losses = Callable[..., dict[int, str]]


def fill(folder: Path) -> Path:
    """Write a file that fills the disk."""
    path = folder / "filler"
    with open(path, "wb", buffering=0) as stream:
        for size in (1 << 16, 1):
            while True:
                try:
                    stream.write(bytes(size))
                except OSError:
                    break
    return path


def start(jobs: Jobs, *words: str, flags: tuple[str, ...] = ()) -> Survivor:
    return Survivor(jobs, *WORDS, *words, flags=(*SHAPE, *flags), processes=1)


def complete_checkpoints(run: Survivor) -> list[Checkpoint]:
    return complete(run.live / "checkpoints")


def committed(run: Survivor, name: str, attempt: str = "0.0") -> Checkpoint:
    """Wait until that checkpoint of that attempt is complete, and return it."""
    return run.jobs.wait_for(
        lambda: next((c for c in complete_checkpoints(run) if c.name == name and c.commit["attempt"] == attempt), None),
        120,
    )


def shard(found: Checkpoint, node: int) -> Path:
    return found.folder / f"node-{node}" / found.name / f"shard-{node}.pt"


def own_lines(run: Survivor, *words: str) -> list[str]:
    """Return the runtime's own lines that contain all ``words``."""
    return [line.text for line in run.lines() if line.rank == "-" and all(word in line.text for word in words)]


# ----------------------------------------------------------------------------------------------------------- the store


@pytest.mark.proof
@pytest.mark.parametrize("seconds", [10, 30])
def test_an_unreachable_store_does_not_stop_training(jobs: Jobs, uninterrupted: Losses, seconds: int) -> None:
    run = start(jobs, "--steps", str(10 * seconds), "--pause", "0.15")
    committed(run, "step-30")
    away = run.live.with_name("away")
    run.live.rename(away)
    run.live.write_text("not a folder")
    before = max(run.starts()["0.0"].steps)
    time.sleep(seconds)
    after = max(run.starts()["0.0"].steps)
    run.live.unlink()
    away.rename(run.live)
    assert after > before + 2 * seconds  # a third of an idle machine's steps in that time
    jobs.wait_for(lambda: _step(complete_checkpoints(run)[-1]) > before, 30)
    done = run.ended()
    run.check(done, uninterrupted(2, 1), 10 * seconds)
    assert len(done.json["attempts"]) == 1
    assert complete_checkpoints(run)[-1].name == f"step-{10 * seconds}"
    assert 1 <= len(own_lines(run, "trying again")) <= 20  # reported, but not every second
    jobs.gone()


def _step(found: Checkpoint) -> int:
    return int(found.name.removeprefix("step-"))


@pytest.mark.proof
def test_a_full_store_does_not_stop_training_and_gets_all_later(jobs: Jobs, uninterrupted: Losses) -> None:
    with small_disk(jobs.store / "runs" / "full" / "live", "24m") as live:
        run = start(jobs, "--steps", "200", flags=("--run-id", "full"))
        committed(run, "step-30")
        filler = fill(live)
        run.until("0.0", "step 110 ")
        assert _step(complete_checkpoints(run)[-1]) <= 60
        filler.unlink()
        done = run.ended()
        run.check(done, uninterrupted(2, 1), 200)
        assert len(done.json["attempts"]) == 1
        assert complete_checkpoints(run)[-1].name == "step-200"
        assert own_lines(run, FULL)
        jobs.gone()


@pytest.mark.proof
def test_a_kill_while_the_store_is_full_loses_no_complete_checkpoint(jobs: Jobs, uninterrupted: Losses) -> None:
    with small_disk(jobs.store / "runs" / "full" / "live", "24m") as live:
        run = start(jobs, "--steps", "200", flags=("--run-id", "full", "--retries", "3"))
        committed(run, "step-30")
        filler = fill(live)
        run.until("0.0", "step 80 ")
        newest = complete_checkpoints(run)[-1]
        os.kill(run.rank(1), signal.SIGKILL)
        jobs.wait_for(lambda: run.attempt() != "0.0" or jobs.run("full").status().final, 60)
        filler.unlink()
        done = run.ended()
        assert newest.folder in [found.folder for found in complete_checkpoints(run)]
        if done.json["state"] == "succeeded":
            run.check(done, uninterrupted(2, 1), 200)
            assert run.starts()["1.0"].first["0"] >= _step(newest)
        else:  # its retries are used up before there is room again: then the reason names the full disk
            assert FULL in done.json["reason"], done.json
        jobs.gone()


@pytest.mark.proof
def test_a_store_that_fails_at_a_restart_costs_an_attempt_and_no_checkpoint(jobs: Jobs, uninterrupted: Losses) -> None:
    jobs.shorten(mount=3.0)
    with faulty_disk(jobs.store / "runs" / "shaky" / "live", jobs.tmp / "behind") as disk:
        run = start(jobs, "--steps", "150", flags=("--run-id", "shaky", "--retries", "3"))
        newest = committed(run, "step-60")
        disk.fail(("readdir", "/checkpoints", errno.EIO))
        os.kill(run.rank(1), signal.SIGKILL)
        why = "/checkpoints: Input/output error (EIO)"
        jobs.wait_for(lambda: own_lines(run, "failed: node 0 could not continue: cannot read ", why), 120)
        assert newest.folder.is_dir()
        disk.fail()
        done = run.ended()
        starts = run.check(done, uninterrupted(2, 1), 150)
        assert done.json["attempts"][1]["category"] == "infra"
        assert done.json["attempts"][1]["reason"].endswith(why)
        assert [max(one.first.values(), default=None) for one in starts.values()] == [0, None, 60]
        jobs.gone()


@pytest.mark.proof
def test_a_full_scratch_disk_is_named(jobs: Jobs) -> None:
    with small_disk(jobs.tmp / "scratch", "24m") as scratch:
        jobs.environ["TMPDIR"] = str(scratch)
        run = start(jobs, "--steps", "300", "--pad", str(3 << 20))
        result = run.ended().json
        assert (result["state"], result["category"]) == ("failed", "user_error")
        assert FULL in result["reason"]
        assert result["failure"]["file"] == "survivor.py"
        newest = complete_checkpoints(run)[-1]
        assert {_size(newest.folder / key) for key in newest.commit["files"]} == {
            file["size"] for file in newest.commit["files"].values()
        }
        jobs.gone()


def _size(path: Path) -> int:
    return path.stat().st_size


# -------------------------------------------------------------------------------------------------- changed checkpoints


@pytest.mark.proof
@pytest.mark.parametrize("damage", ["truncated", "altered"])
def test_a_checkpoint_damaged_after_its_commit_is_skipped_in_one_line(
    jobs: Jobs, uninterrupted: Losses, damage: str
) -> None:
    """Damage a shard first. In the next attempt's same checkpoint, put a shard of the former attempt."""
    run = start(jobs, "--steps", "150", flags=("--retries", "3"))
    first = committed(run, "step-60")
    hurt, other = shard(first, 0), shard(first, 1).read_bytes()
    data = bytearray(hurt.read_bytes())
    data[len(data) // 2] ^= 1
    hurt.write_bytes(data[:-100] if damage == "truncated" else data)
    os.kill(run.rank(1), signal.SIGKILL)
    again = committed(run, "step-60", "1.0")
    shard(again, 1).write_bytes(other)
    os.kill(run.rank(0), signal.SIGKILL)
    done = run.ended()
    run.check(done, uninterrupted(2, 1), 150)
    assert [attempt["resumed_from"] for attempt in done.json["attempts"]] == ["", "step-30", "step-30"]
    # A checkpoint that looks complete but is damaged goes with the next commit; one that is too short stays.
    for attempt, wrong in (("1.0", [first]), ("2.0", [again] if damage == "altered" else [first, again])):
        lines = [line.text for line in run.lines() if line.attempt == attempt and "checkpoint step-60" in line.text]
        assert len(lines) == len(wrong), lines
    jobs.gone()


@pytest.mark.proof
def test_restored_stale_copies_are_never_preferred(jobs: Jobs, uninterrupted: Losses, tmp_path: Path) -> None:
    """Check this because a platform that syncs a folder from several machines may restore a file that one of them
    deleted."""
    run = start(jobs, "--steps", "200", flags=("--retries", "3"))
    old = committed(run, "step-30").folder
    shutil.copytree(old, tmp_path / "old")
    committed(run, "step-60")
    shutil.rmtree(old, ignore_errors=True)
    committed(run, "step-90")
    folders = [old, old.with_name("0.0-77"), old.parent.with_name("step-180") / "0.0-78"]
    for folder in folders:
        shutil.copytree(tmp_path / "old", folder, dirs_exist_ok=True, copy_function=shutil.copyfile)
    (folders[-1] / "commit.json").unlink()
    shutil.copyfile(
        shard(complete_checkpoints(run)[0], 1), shard(complete_checkpoints(run)[-1], 1).with_name("shard-7.pt")
    )
    os.kill(run.rank(0), signal.SIGKILL)
    done = run.ended()
    starts = run.check(done, uninterrupted(2, 1), 200)
    assert starts["1.0"].first["0"] >= 90
    jobs.gone()
