"""Scripts and signals that a run must survive: each case once left a process, a folder or a client behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from disks import small_disk
from jobs import Jobs

from cloudtrain.errors import EXIT_CODES

pytestmark = pytest.mark.slow


DETACHES = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execvp("sleep", ["sleep", "600"])
    os._exit(0)
os.wait()
print("up", flush=True)
time.sleep(float(sys.argv[1]))
"""
REMOVES = """
import os, pathlib, shutil
checkpoints = pathlib.Path(os.environ["CLOUDTRAIN_CHECKPOINT_DIR"])
(checkpoints / "x.pt").write_bytes(b"1")
for folder in (checkpoints, os.environ["CLOUDTRAIN_ARTIFACT_DIR"], checkpoints.parent):
    shutil.rmtree(folder)
"""
SUBMITS = """
import subprocess, sys
inner = ["submit", "inner.py", "--launcher", "python", "--run-id", "inner", "--detach", "--store", sys.argv[1]]
subprocess.run([sys.executable, "-m", "cloudtrain", *inner], check=True)
"""
STANDS = """
import os, time
print("up", flush=True)
if os.environ["CLOUDTRAIN_ATTEMPT"] == "0.0":
    time.sleep(600)
"""
MANY = """
import os, pathlib, sys
for i in range(int(sys.argv[1])):
    pathlib.Path(os.environ["CLOUDTRAIN_CHECKPOINT_DIR"], f"{i}.pt").write_bytes(b"x" * 100)
"""
LARGE = """
import os, pathlib
pathlib.Path(os.environ["CLOUDTRAIN_CHECKPOINT_DIR"], "large.pt").write_bytes(os.urandom(20_000_000))
"""
STEPS_BACK = """
import sys, time
true, began = time.time, time.monotonic()
time.time = lambda: true() - 3600 * (time.monotonic() > began + 4)
from cloudtrain.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("seconds", [0, 600])
def test_detached_processes_end_with_the_run(jobs: Jobs, seconds: int) -> None:
    jobs.write("train.py", DETACHES)
    jobs.shorten(stop_grace=6)  # the script ignores the stop
    run = jobs.detach("train.py", "--launcher", "python", "--", str(seconds))
    jobs.printed(run, "up")
    if seconds:
        assert jobs.cli("cancel", run.url).code == 0
    jobs.gone(60)


def test_a_run_that_a_script_submits_outlives_the_script(jobs: Jobs) -> None:
    jobs.write("train.py", SUBMITS)
    jobs.write("inner.py", "import time\ntime.sleep(4)\nprint('inner ended', flush=True)\n")
    done = jobs.submit("train.py", "--launcher", "python", "--", str(jobs.store))
    assert done.code == 0, done.err
    assert jobs.cli("wait", "inner", "--store", str(jobs.store)).code == 0
    assert "inner ended" in jobs.cli("logs", "inner", "--store", str(jobs.store)).out


def test_detached_processes_end_where_the_temporary_folder_is_a_link(jobs: Jobs, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    jobs.write("train.py", DETACHES)
    done = jobs.submit("train.py", "--launcher", "python", "--", "0", TMPDIR=str(tmp_path / "link"))
    assert done.code == 0, done.err
    jobs.gone(3)


def test_detached_processes_end_after_a_killed_supervisor_and_no_folder_stays(jobs: Jobs) -> None:
    jobs.environ["TMPDIR"] = str(jobs.code.parent / "tmp")
    Path(jobs.environ["TMPDIR"]).mkdir()
    jobs.write("train.py", DETACHES)
    run = jobs.detach("train.py", "--launcher", "python", "--", "600")
    jobs.printed(run, "up")
    os.kill(jobs.supervisor(), signal.SIGKILL)
    jobs.gone(20)
    assert os.listdir(jobs.environ["TMPDIR"]) == []


def test_a_script_that_removes_its_own_folders_ends(jobs: Jobs) -> None:
    jobs.write("train.py", REMOVES)
    done = jobs.submit("train.py", "--launcher", "python", "--max-runtime", "1m")
    assert done.json["state"] == "succeeded", done.err
    jobs.gone(3)


def test_a_client_whose_clock_steps_back_notices_the_end(jobs: Jobs) -> None:
    jobs.write("train.py", "import time\ntime.sleep(8)\n")
    python = [sys.executable, "-c", STEPS_BACK]
    words = ("submit", "train.py", "--store", str(jobs.store), "--launcher", "python", "--json")
    process = jobs.start(*words, python=python)
    _, err = process.communicate(timeout=40)
    assert process.returncode == 0, err


def test_a_frozen_node_is_lost_and_another_attempt_begins(jobs: Jobs) -> None:
    jobs.write(
        "train.py",
        "import os, time\nprint('up', flush=True)\ntime.sleep(600 * (os.environ['CLOUDTRAIN_ATTEMPT'] == '0.0'))\n",
    )
    jobs.shorten(silence=6, ping=1, finish_lost=3)
    run = jobs.detach("train.py", "--nodes", "2", "--launcher", "python", "--retries", "1", "--max-runtime", "6m")
    jobs.printed(run, "up")
    os.kill(jobs.node(1), signal.SIGSTOP)
    stopped = time.monotonic()
    done = jobs.cli("wait", run.url, "--json", timeout=180)
    assert done.code == 0, done.err
    first, _ = done.json["attempts"]
    assert first["reason"] == "node 1 was lost: it was not heard of for 6 s"
    assert time.monotonic() - stopped < 60
    jobs.gone(3)


@pytest.mark.parametrize("count", [300])
def test_many_small_checkpoints_are_all_committed(jobs: Jobs, count: int) -> None:
    jobs.write("train.py", MANY)
    done = jobs.submit("train.py", "--launcher", "python", "--max-runtime", "90s", "--", str(count))
    assert done.json["state"] == "succeeded", done.err
    assert len(list(jobs.store.glob("runs/*/live/checkpoints/*/*/commit.json"))) == count


def test_a_run_whose_store_is_full_can_be_cancelled(jobs: Jobs, tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", "8m") as disk:
        jobs.store = disk / "store"
        jobs.write("train.py", STANDS)
        jobs.shorten(stop_grace=6)
        run = jobs.detach("train.py", "--launcher", "python")
        jobs.printed(run, "up")
        with open(disk / "filler", "wb", buffering=0) as stream, contextlib.suppress(OSError):
            while True:
                stream.write(bytes(4096))
        done = jobs.cli("cancel", run.url)
        assert done.code == 0, done.err
        jobs.gone(60)
        assert run.status().state == "cancelled"


def test_no_client_waits_beyond_max_runtime_for_a_read_only_store(jobs: Jobs) -> None:
    jobs.write("train.py", STANDS)
    jobs.shorten(stop_grace=6)
    run = jobs.detach("train.py", "--launcher", "python", "--max-runtime", "8s")
    jobs.printed(run, "up")
    found = (jobs.store, *jobs.store.rglob("*"))
    folders = [path for path in found if path.is_dir() and not path.is_symlink()]
    try:
        if subprocess.run(["chattr", "+i", *folders], check=False, capture_output=True).returncode:
            pytest.skip("needs root and a file system with immutable folders")
        began = time.monotonic()
        done = jobs.cli("wait", run.url, timeout=150)
        # The last write is tried for 10 s; the rest is for a busy machine.
        assert time.monotonic() - began < 8 + 6 + 25
        assert done.code == EXIT_CODES["storage"], done.err
        assert "Operation not permitted" in done.err
        jobs.gone(3)
    finally:
        subprocess.run(["chattr", "-i", *folders], check=False, capture_output=True)


def test_a_run_whose_store_stays_full_is_a_storage_failure(jobs: Jobs, tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", "8m") as disk:
        jobs.store = disk / "store"
        jobs.write("train.py", LARGE)
        jobs.shorten(stop_grace=6)
        done = jobs.submit("train.py", "--launcher", "python", "--max-runtime", "8s")
        assert (done.json["category"], done.code) == ("storage", 8), done.err
        assert "No space left on device" in done.json["reason"]
        jobs.gone(3)


def test_torchrun_leaves_nothing_in_the_temporary_folder(jobs: Jobs, tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    jobs.write("train.py", "print('up')\n")
    done = jobs.submit("train.py", "--nproc-per-node", "2", TMPDIR=str(tmp_path / "tmp"))
    assert done.code == 0, done.err
    jobs.gone(3)
    assert os.listdir(tmp_path / "tmp") == []
