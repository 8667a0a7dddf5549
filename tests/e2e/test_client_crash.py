"""The client dies at every step between staging and submitting. There are never two runs, and every run can be found.

A wrapper of the console script ends the process, without unwinding, right before or after one call. About 1 minute on 2
cores.
"""

from __future__ import annotations

import fcntl
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from jobs import Jobs, dying

from cloudtrain.errors import NotFoundError
from cloudtrain.runs.run import Run

pytestmark = pytest.mark.slow

#: Calls of a submit, in order; each is a method of the object that makes it.
STEPS = {
    "stage": "cloudtrain.store.store:Store.stage",
    "create_run": "cloudtrain.store.store:Store.create_run",
    "write_container": "cloudtrain.store.store:Store.write_container",
    "create_attempt": "cloudtrain.store.store:Store.create_attempt",
    "submit": "cloudtrain.providers.local:Provider.submit",
    "supervise": "cloudtrain.providers.local:Provider._supervise",
    "write_submitted": "cloudtrain.store.store:Store.write_submitted",
}
#: Calls after which a run exists: before its record there is none.
RECORDED = list(STEPS)[2:]


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Jobs]:
    made = Jobs(tmp_path)
    made.write("train.py", f"open({str(tmp_path / 'starts')!r}, 'a').write('started\\n')\nprint('hello')\n")
    yield made
    made.close()


def starts(jobs: Jobs) -> int:
    path = jobs.tmp / "starts"
    return path.read_text().count("\n") if path.exists() else 0


def submit(jobs: Jobs, *flags: str) -> list[str]:
    return ["submit", "train.py", "--store", str(jobs.store), "--json", "--run-id", "the-one", *flags]


FEW = [("submit", "after")]
"""Deaths in the suite, where `test_schedules` has thousands of orders; the proof has all deaths."""


@pytest.mark.parametrize(
    ("step", "moment"),
    [
        pytest.param(step, moment, marks=[] if (step, moment) in FEW else [pytest.mark.proof])
        for step in STEPS
        for moment in ("before", "after")
    ],
)
def test_a_client_that_dies_leaves_nothing_or_a_run_that_continues(jobs: Jobs, step: str, moment: str) -> None:
    wrapper = dying(STEPS[step], moment)
    first = jobs.start(*submit(jobs, "--detach"), python=wrapper)
    first.communicate(timeout=60)
    assert first.returncode == 99, "the client did not reach the wrapped call"
    recorded = step in RECORDED or (step, moment) == ("create_run", "after")
    assert jobs.runs() in ([], ["the-one"])
    if recorded:
        run = jobs.run("the-one")
        state = run.status().state  # attach finds the run, and can report its state
        assert state in ("pending", "running", "succeeded")
        if (step in ("submit", "supervise") and moment == "after") or step == "write_submitted":
            assert run.wait(timeout=60)["state"] == "succeeded"  # submitted, so it needs no client any more
    else:
        with pytest.raises(NotFoundError):
            jobs.run("the-one")
    again = jobs.cli(*submit(jobs))
    assert again.code == 0, again.err
    assert (again.json["state"], again.json["run_id"]) == ("succeeded", "the-one")
    assert [a["number"] for a in again.json["attempts"]] == ["0.0"]
    assert jobs.runs() == ["the-one"]
    third = jobs.cli(*submit(jobs))  # again, after the end
    assert third.json["state"] == "succeeded"
    assert starts(jobs) == 1
    jobs.gone(3)


@pytest.mark.proof
@pytest.mark.docker
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_client_that_dies_leaves_no_second_run_in_containers(
    jobs: Jobs, images: Callable[[str], str], nothing_left: None, step: str, moment: str
) -> None:
    jobs.write("train.py", "print('hello')\n")
    words = [*submit(jobs), "--provider", "docker", "--image", images("py313"), "--launcher", "python"]
    first = jobs.start(*words, "--detach", python=dying(STEPS[step].replace("local", "docker"), moment))
    first.communicate(timeout=60)
    assert first.returncode == 99, "the client did not reach the wrapped call"
    for _ in range(2):
        again = jobs.cli(*words)
        assert (again.code, [a["number"] for a in again.json["attempts"]]) == (0, ["0.0"]), again.err
    assert jobs.runs() == ["the-one"]
    printed = [path.read_text() for path in jobs.store.glob("runs/the-one/supervisor/out/*/*.log")]
    assert "".join(printed).count("hello") == 1
    jobs.gone(3)


@pytest.mark.parametrize(
    "step", ["create_run", *(pytest.param(step, marks=pytest.mark.proof) for step in ("stage", "write_submitted"))]
)
def test_the_id_of_a_crashed_submit_is_not_given_to_another_job(jobs: Jobs, step: str) -> None:
    wrapper = dying(STEPS[step], "after")
    jobs.start(*submit(jobs, "--detach"), python=wrapper).communicate(timeout=60)
    other = jobs.cli(*submit(jobs, "--env", "OTHER=1"))
    if step == "stage":  # without a record the id is free
        assert other.code == 0
        return
    assert other.code == 2
    assert "already the id of another job" in other.json["error"]
    jobs.write("train.py", "print('other code')")
    assert jobs.cli(*submit(jobs)).code == 2
    assert "other code" not in "".join(p.read_text() for p in (jobs.store / "runs").rglob("*.log"))


def test_a_refused_job_does_not_change_the_other_job_s_context(jobs: Jobs) -> None:
    """Let two jobs race for one id: the loser comes after the check and before the record."""
    wrapper = [sys.executable, "-c", RACES, str(jobs.code / "go")]
    slow = jobs.start(*submit(jobs, "--env", "WHO=slow", "--detach"), python=wrapper)
    jobs.wait_for((jobs.code / "go.waiting").exists)
    assert jobs.cli(*submit(jobs, "--env", "WHO=fast", "--detach", "--", "x")).code == 0
    before = (jobs.store / "runs/the-one/container/context.json").read_text()
    (jobs.code / "go").touch()
    out, _ = slow.communicate(timeout=60)
    assert slow.returncode == 2
    assert "already the id of another job" in out
    assert (jobs.store / "runs/the-one/container/context.json").read_text() == before
    assert '"WHO": "fast"' in before or '"WHO":"fast"' in before


RACES = """
import os, sys, time
go = sys.argv.pop(1)
from cloudtrain.store.store import Store
stage = Store.stage
def waiting(*args, **kwargs):
    found = stage(*args, **kwargs)
    open(go + ".waiting", "w").close()
    while not os.path.exists(go):
        time.sleep(0.02)
    return found
Store.stage = waiting
from cloudtrain.cli import main
sys.exit(main())
"""


@pytest.mark.parametrize("clients", [2, pytest.param(5, marks=pytest.mark.proof)])
def test_equal_submits_at_once_are_one_run(jobs: Jobs, clients: int) -> None:
    """Hold all clients back until they have staged, then let them continue together."""
    jobs.write(".cloudtrainignore", "go*\n")
    wrapper = [sys.executable, "-c", RACES.replace('go + ".waiting"', 'go + f".{os.getpid()}"'), str(jobs.code / "go")]
    started = [jobs.start(*submit(jobs), python=wrapper) for _ in range(clients)]
    jobs.wait_for(lambda: len(list(jobs.code.glob("go.*"))) == clients)
    (jobs.code / "go").touch()
    for process in started:
        out, err = process.communicate(timeout=90)
        assert process.returncode == 0, err
        assert '"succeeded"' in out
    assert jobs.runs() == ["the-one"]
    assert starts(jobs) == 1
    jobs.gone(3)


def test_status_calls_do_not_keep_the_supervisor_from_starting(jobs: Jobs) -> None:
    """Hold the lock for a second: `status` tries it for a moment, and several such calls may come in turn."""
    folder = jobs.store / "runs/the-one/supervisor"
    folder.mkdir(parents=True)
    with open(folder / "lock", "ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        process = jobs.start(*submit(jobs))
        jobs.wait_for(lambda: jobs.pid_of(r"cloudtrain\.engine\.supervisor"))
        time.sleep(1)
        assert process.poll() is None
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err + out
    assert starts(jobs) == 1


COUNTS = """
import sys, time
for i in range(60):
    print("line", i, flush=True)
    time.sleep(0.1)
sys.exit({code})
"""


@pytest.mark.parametrize("code", [pytest.param(0, marks=pytest.mark.proof), 5])
def test_a_run_outlives_its_client_and_another_shell_gets_every_line_once(jobs: Jobs, code: int) -> None:
    jobs.write("train.py", COUNTS.format(code=code))
    client = jobs.start(*submit(jobs, "--nodes", "2", "--launcher", "python"))
    run: Run = jobs.wait_for(lambda: jobs.run("the-one") if jobs.runs() else None)
    jobs.printed(run, "line 10")
    os.killpg(client.pid, signal.SIGKILL)  # the terminal and all its processes
    client.communicate()
    follower = jobs.cli("logs", "-f", run.url)
    for rank in ("0", "1"):
        lines = [
            text.split()[-1]
            for text in follower.out.splitlines()
            if "line" in text and f"r{rank}" in text.split("line")[0]
        ]
        if not lines:  # a follower may name ranks differently
            lines = sorted({t.split()[-1] for t in follower.out.splitlines() if "line" in t}, key=int)
        assert lines == [str(i) for i in range(60)]
    assert sum("line" in text for text in follower.out.splitlines() if "cloudtrain: " not in text) == 120
    began = time.monotonic()
    done = jobs.cli("wait", run.url, "--json")
    assert done.code == (1 if code else 0)
    assert time.monotonic() - began < 20
    if code:
        assert done.json["failure"]["process_exit_code"] == 5
    again = jobs.cli("logs", run.url)
    assert sum("line" in text for text in again.out.splitlines() if "cloudtrain: " not in text) == 120
    jobs.gone(3)
