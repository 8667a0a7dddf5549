"""Checkpoints over several attempts: history, retention, pointers, and those that a script writes to the store."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from jobs import Jobs

pytestmark = pytest.mark.slow


ALONE = ("--launcher", "python")
BOTH = ("--nodes", "2", "--launcher", "python")

#: Ten steps a second; every rank saves each SAVE steps; rank 1 dies after step DIE of the first attempt.
STEPS = """
import json, os, pathlib, signal, time
env = os.environ
folder, resume, rank = pathlib.Path(env["CLOUDTRAIN_CHECKPOINT_DIR"]), env["CLOUDTRAIN_RESUME_FROM"], env["RANK"]
save, die, last = int(env["SAVE"]), int(env["DIE"]), int(env["LAST"])
first = int(pathlib.Path(resume, "step").read_text()) + 1 if resume else 1
for step in range(first, last + 1):
    time.sleep(0.1)
    if rank == "0":
        with open(env["CLOUDTRAIN_METRICS_FILE"], "a") as metrics:
            metrics.write(json.dumps({"step": step, "epoch": 0, "time": time.time(), "loss": 1 / step}) + "\\n")
    notice = os.path.exists(env["CLOUDTRAIN_PREEMPT_FILE"])
    if step % save == 0 or notice:
        target = folder / f"step-{step}"
        target.mkdir(exist_ok=True)
        (target / f"rank-{rank}").write_text(str(step))
        if rank == "0":
            (target / "step").write_text(str(step))
    if notice:
        raise SystemExit
    if env["CLOUDTRAIN_ATTEMPT"] == "0.0" and rank == "1" and step == die:
        os.kill(os.getpid(), signal.SIGKILL)
print("all", last, "steps")
"""


def words(save: int, die: int, last: int) -> list[str]:
    return [word for pair in (f"SAVE={save}", f"DIE={die}", f"LAST={last}") for word in ("--env", pair)]


def test_the_history_has_a_killed_rank_with_its_cost(jobs: Jobs) -> None:
    jobs.write("train.py", STEPS)
    done = jobs.submit("train.py", *BOTH, *words(20, 65, 75), "--retries", "1", "--run-id", "killed")
    assert done.code == 0, done.err
    first, second = done.json["attempts"]
    assert (first["number"], first["category"], first["node"], first["rank"]) == ("0.0", "user_error", 1, 1)
    assert "rank 1 on node 1 was killed by SIGKILL" in first["reason"]
    # The checkpoint of step 20 was quiet for two seconds long before the kill; that of step 40 perhaps.
    assert second["resumed_step"] in (20, 40)
    assert second["resumed_from"] == f"step-{second['resumed_step']}"
    steps = first["lost"]["steps"]
    # Rank 0, whose steps count, may be some steps apart, and continues for half a second until its own stop.
    assert -3 <= steps - (65 - second["resumed_step"]) <= 12
    assert steps / 10 * 0.8 <= first["lost"]["seconds"] <= steps / 10 + 5
    assert second["lost"] is None
    assert f"lost {steps} steps" in done.err
    text = jobs.cli("status", "killed", "--store", str(jobs.store)).out
    assert f"lost {steps} steps" in text


def test_a_notice_costs_nothing(jobs: Jobs) -> None:
    jobs.write("train.py", STEPS)
    jobs.detach("train.py", *BOTH, *words(1000, 0, 40), "--run-id", "noticed")
    jobs.wait_for(lambda: list(jobs.store.glob("runs/noticed/live/attempts/0.0.json")))
    os.kill(jobs.node(1), signal.SIGTERM)
    done = jobs.cli("wait", "noticed", "--store", str(jobs.store), "--json")
    assert done.code == 0, done.err
    first, second = done.json["attempts"]
    assert (first["category"], first["node"], first["rank"]) == ("preempted", 1, None)
    # The nodes get the notice at the same moment, and this script agrees on no step: rank 1 may be one behind.
    assert first["lost"]["steps"] <= 1
    assert second["resumed_step"] is not None


@pytest.mark.parametrize("end", [pytest.param("sys.exit(0)", marks=pytest.mark.proof), "sys.exit(1)", "os._exit(143)"])
def test_a_checkpoint_by_a_handler_counts_with_any_exit_code(jobs: Jobs, end: str) -> None:
    jobs.write(
        "train.py",
        """
        import os, pathlib, signal, sys, time
        folder, resume = (os.environ[f"CLOUDTRAIN_{name}"] for name in ("CHECKPOINT_DIR", "RESUME_FROM"))
        step = int(pathlib.Path(resume).read_text()) if resume else 0

        def handler(*_):
            pathlib.Path(folder, f"step-{step}").write_text(str(step))
            eval(sys.argv[1])

        signal.signal(signal.SIGTERM, handler)
        print("from", step, flush=True)
        while not resume:
            step += 1
            time.sleep(0.1)
        """,
    )
    jobs.detach("train.py", *ALONE, "--run-id", "noticed", "--", end)
    jobs.wait_for(lambda: "from 0" in jobs.cli("logs", "noticed", "--store", str(jobs.store)).out)
    os.kill(jobs.node(0), signal.SIGTERM)
    done = jobs.cli("wait", "noticed", "--store", str(jobs.store), "--json")
    first, second = done.json["attempts"]
    assert (done.code, first["category"], second["reason"]) == (0, "preempted", "succeeded"), done.err
    assert second["resumed_from"].startswith("step-")


def test_a_half_checkpoint_of_a_program_that_the_users_command_stops_does_not_count(jobs: Jobs) -> None:
    jobs.write(
        "train.sh",
        """
        [ "$CLOUDTRAIN_ATTEMPT" = 0.0 ] || exit 0
        trap 'kill $!; wait $!; exit 143' TERM
        cd "$CLOUDTRAIN_CHECKPOINT_DIR"
        (echo half >step-1; echo saving; exec sleep 600 >>step-1) &
        wait $!
        """,
    )
    jobs.detach("train.sh", "--run-id", "commanded", "--retries", "0")
    jobs.wait_for(lambda: "saving" in jobs.cli("logs", "commanded", "--store", str(jobs.store)).out)
    os.kill(jobs.node(0), signal.SIGTERM)
    done = jobs.cli("wait", "commanded", "--store", str(jobs.store), "--json")
    assert done.json["attempts"][0]["category"] == "preempted"
    assert done.json["checkpoint"] is None


def test_keep_checkpoints_and_the_best_pointer(jobs: Jobs) -> None:
    jobs.shorten(quiet=0.5, scan=0.1)
    jobs.write(
        "train.py",
        """
        import os, pathlib, time
        folder = pathlib.Path(os.environ["CLOUDTRAIN_CHECKPOINT_DIR"])
        print("here", sorted(p.name for p in folder.iterdir()), flush=True)
        if os.environ["CLOUDTRAIN_RESUME_FROM"]:
            assert (folder / "best").read_text() == "step-1"
            assert (folder / "step-1/model").read_text() == "1"
            assert os.environ["CLOUDTRAIN_RESUME_FROM"] == str(folder / "step-4")
            raise SystemExit
        for step in range(1, 5):
            (folder / f"step-{step}").mkdir()
            (folder / f"step-{step}/model").write_text(str(step))
            if step == 1:
                (folder / "best").write_text("step-1")
            time.sleep(2.5)
        raise ValueError("and now again")
        """,
    )
    done = jobs.submit(
        "train.py", *ALONE, "--keep-checkpoints", "1", "--retries", "1", "--pull", str(jobs.tmp / "pulled")
    )
    assert done.code == 0, done.err
    assert "here ['best', 'step-1', 'step-4']" in done.err
    kept = sorted(p.name for p in (jobs.store / "runs" / done.json["run_id"] / "live/checkpoints").iterdir())
    assert kept == ["step-1", "step-4"]
    pulled = jobs.tmp / "pulled/checkpoints"
    assert sorted(p.name for p in pulled.iterdir()) == ["best", "step-1", "step-4"]
    assert (pulled / "best").read_text() == "step-1\n"


# ------------------------------------------------------------------------------ checkpoints that a script writes itself

DIRECT = """
import os, sys, time
sys.path[:0] = [os.environ["FSSPEC"]] if os.environ.get("FSSPEC") else []
import fsspec
url, resume = os.environ["CLOUDTRAIN_CHECKPOINT_URL"], os.environ["CLOUDTRAIN_RESUME_FROM"]
print("attempt", os.environ["CLOUDTRAIN_ATTEMPT"], "from", resume.rpartition("/")[2] or "nothing", flush=True)
if resume:
    assert resume.startswith(url), (resume, url)
    with fsspec.open(resume + "/__0_0.distcp") as stream:
        assert stream.read() == b"weights 2"
    raise SystemExit
for step in (1, 2):
    for name, text in (("__0_0.distcp", f"weights {step}"), (".metadata", "last")):
        with fsspec.open(f"{url}/step-{step}/{name}", "wb", auto_mkdir=True) as stream:
            stream.write(text.encode())
    time.sleep(1.5)
with fsspec.open(f"{url}/step-3/__0_0.distcp", "wb", auto_mkdir=True) as stream:
    stream.write(b"half")
raise ValueError("before its metadata")
"""


def test_a_checkpoint_in_the_store_is_resumed_from_by_its_url(jobs: Jobs) -> None:
    jobs.write("train.py", DIRECT)
    done = jobs.submit("train.py", *ALONE, "--retries", "1", "--run-id", "direct", "--pull", str(jobs.tmp / "pulled"))
    check_direct(done, jobs.tmp / "pulled")
    status = jobs.cli("status", "direct", "--store", str(jobs.store), "--json").json
    assert status["checkpoint"]["name"] == "step-2"


@pytest.mark.remote
@pytest.mark.proof
@pytest.mark.parametrize("store", ["s3", "gcs"])
def test_the_same_on_an_object_store(jobs: Jobs, request: pytest.FixtureRequest, store: str) -> None:
    url, of_script = request.getfixturevalue(f"{store}_url"), []
    if store == "s3":
        jobs.environ |= {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
        of_script = ["--env", f"PYTHONPATH={request.getfixturevalue('s3fs')}"]
    else:
        jobs.environ |= {"STORAGE_EMULATOR_HOST": os.environ["STORAGE_EMULATOR_HOST"]}
        jobs.environ |= {"GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false"}  # otherwise gcsfs calls the emulator by gRPC
    jobs.write("train.py", DIRECT.replace(", auto_mkdir=True", ""))
    done = jobs.cli(
        "submit", "train.py", *ALONE, "--store", url, "--set", f"state_dir={jobs.tmp / 'state'}", "--retries", "1",
        *of_script, "--pull", str(jobs.tmp / "pulled"), "--json",
    )  # fmt: skip
    check_direct(done, jobs.tmp / "pulled")


def check_direct(done: Any, pulled: Path) -> None:
    assert done.code == 0, done.err
    assert "attempt 0.0 from nothing" in done.err
    assert "attempt 1.0 from step-2" in done.err
    assert [a["resumed_from"] for a in done.json["attempts"]] == ["", "step-2"]
    found = {
        p.relative_to(pulled).as_posix(): p.read_text() for p in (pulled / "checkpoints").rglob("*") if p.is_file()
    }
    assert found == {
        f"checkpoints/step-{step}/{name}": text
        for step in (1, 2)
        for name, text in (("__0_0.distcp", f"weights {step}"), (".metadata", "last"))
    }


def test_the_newer_of_both_kinds_wins(jobs: Jobs) -> None:
    jobs.shorten(quiet=0.5, scan=0.1)
    jobs.write(
        "train.py",
        """
        import os, pathlib, time
        resume = os.environ["CLOUDTRAIN_RESUME_FROM"]
        url = pathlib.Path(os.environ["CLOUDTRAIN_CHECKPOINT_URL"].removeprefix("file://"))
        attempt = os.environ["CLOUDTRAIN_ATTEMPT"]
        print("attempt", attempt, "from", resume.rpartition("/")[2], flush=True)
        if attempt == "0.0":
            (url / "direct-1").mkdir(parents=True)
            (url / "direct-1/.metadata").write_text("x")
            time.sleep(0.5)
            pathlib.Path(os.environ["CLOUDTRAIN_CHECKPOINT_DIR"], "mirrored-2").write_text("x")
            time.sleep(2)
        if attempt == "1.0":
            assert resume.endswith("/checkpoints/mirrored-2"), resume
            (url / "direct-3").mkdir(parents=True)
            (url / "direct-3/.metadata").write_text("x")
        assert attempt == "2.0", attempt
        assert resume == f"file://{url}/direct-3"
        assert not list(pathlib.Path(os.environ["CLOUDTRAIN_CHECKPOINT_DIR"]).iterdir())
        """,
    )
    done = jobs.submit("train.py", *ALONE, "--retries", "2")
    assert done.code == 0, done.err
    assert [a["resumed_from"] for a in done.json["attempts"]] == ["", "mirrored-2", "direct-3"]


# --------------------------------------------------------------------------------------------------------------- damage


def test_checkpoints_damaged_everywhere_are_a_fresh_start_with_a_warning(jobs: Jobs) -> None:
    jobs.write(
        "train.py",
        """
        import os, pathlib, time
        folder = pathlib.Path(os.environ["CLOUDTRAIN_CHECKPOINT_DIR"])
        live = pathlib.Path(os.environ["LIVE"]) / "checkpoints"
        if os.environ["CLOUDTRAIN_ATTEMPT"] == "1.0":
            assert os.environ["CLOUDTRAIN_RESUME_FROM"] == "" and not list(folder.iterdir())
            raise SystemExit
        for step in (1, 2):
            (folder / f"step-{step}").write_text("weights")
        while len(list(live.glob("*/*/commit.json"))) < 2: time.sleep(0.1)
        for shard in live.glob("*/*/node-0/*"):
            shard.write_text("WEIGHTS")
        raise ValueError("and now again")
        """,
    )
    live = jobs.store / "runs/damaged/live"
    done = jobs.submit("train.py", *ALONE, "--retries", "1", "--run-id", "damaged", "--env", f"LIVE={live}")
    assert done.code == 0, done.err
    for step in (1, 2):
        assert done.err.count(f"checkpoint step-{step}: node-0/step-{step} is not what was committed") == 1
    assert "attempt 1.0: a fresh start" in done.err


@pytest.mark.proof
def test_a_rank_killed_while_it_saves_leaves_no_checkpoint(jobs: Jobs) -> None:
    """Check with another rank that waits until its kill, 3 s later: half a file is then unchanged for long enough."""
    jobs.write(
        "train.py",
        """
        import os, pathlib, signal, time
        folder = pathlib.Path(os.environ["CLOUDTRAIN_CHECKPOINT_DIR"])
        rank, attempt = os.environ["RANK"], os.environ["CLOUDTRAIN_ATTEMPT"]
        assert os.environ["CLOUDTRAIN_RESUME_FROM"] == "", os.environ["CLOUDTRAIN_RESUME_FROM"]
        if attempt == "1.0":
            raise SystemExit
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        (folder / "step-1").mkdir(exist_ok=True)
        with open(folder / "step-1" / rank, "w") as stream:
            stream.write("half")
            if rank == "1":
                stream.flush()
                os.kill(os.getpid(), signal.SIGKILL)
            stream.write(" and half")
        time.sleep(60)
        """,
    )
    done = jobs.submit("train.py", "--nproc-per-node", "2", "--retries", "1")
    assert done.code == 0, done.err
    assert not list((jobs.store / "runs" / done.json["run_id"] / "live/checkpoints").glob("*/*/commit.json"))
    first = done.json["attempts"][0]
    assert (first["reason"], first["rank"]) == ("rank 1 on node 0 was killed by SIGKILL", 1)
