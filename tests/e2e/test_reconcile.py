"""`cloudtrain reconcile` of runs whose nodes this machine starts: its own submissions, and the supervisor's part.

About 20 s on 2 cores.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from jobs import Jobs, dying

pytestmark = pytest.mark.slow


def words(jobs: Jobs, *flags: str) -> list[str]:
    jobs.write("train.py", f"open({str(jobs.tmp / 'starts')!r}, 'a').write('started\\n')\nprint('hello')\n")
    return ["submit", "train.py", "--store", str(jobs.store), "--run-id", "r", "--detach", *flags]


def starts(jobs: Jobs) -> int:
    path = jobs.tmp / "starts"
    return path.read_text().count("\n") if path.exists() else 0


def never_sent(jobs: Jobs, *flags: str, **environ: str) -> None:
    died = dying("cloudtrain.store.store:Store.create_attempt", "after")
    client = jobs.start(*words(jobs, *flags), python=died, **environ)
    client.communicate(timeout=60)
    assert client.returncode == 99


def test_two_clients_send_a_recorded_unsent_attempt_once(jobs: Jobs) -> None:
    never_sent(jobs)
    started = [jobs.start("reconcile", str(jobs.store), "--json") for _ in range(2)]
    for process in started:
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, out + err
        assert json.loads(out)["runs"][0]["error"] is None
    assert jobs.run("r").wait(timeout=60)["state"] == "succeeded"
    assert starts(jobs) == 1
    jobs.gone(5)


@pytest.mark.parametrize(
    ("call", "moment"),
    [
        ("Provider.submit", "after"),
        pytest.param("Provider.submit", "before", marks=pytest.mark.proof),
        pytest.param("Store.write_submitted", "before", marks=pytest.mark.proof),
        pytest.param("Store.write_submitted", "after", marks=pytest.mark.proof),
    ],
)
def test_the_next_client_continues_the_run_of_a_dead_one(jobs: Jobs, call: str, moment: str) -> None:
    never_sent(jobs)
    owner = "cloudtrain.providers.local" if call.startswith("Provider") else "cloudtrain.store.store"
    client = jobs.start("reconcile", str(jobs.store), python=dying(f"{owner}:{call}", moment))
    client.communicate(timeout=60)
    assert client.returncode == 99
    assert jobs.cli("reconcile", str(jobs.store)).code == 0
    assert jobs.run("r").wait(timeout=60)["state"] == "succeeded"
    assert jobs.cli("reconcile", str(jobs.store)).code == 0
    assert jobs.run("r").store.result("r") is not None
    assert starts(jobs) == 1
    jobs.gone(5)


def test_a_missing_secret_is_named_and_nothing_is_sent(jobs: Jobs) -> None:
    never_sent(jobs, "--secret", "TOKEN", TOKEN="t")
    done = jobs.cli("reconcile", str(jobs.store), "--json")
    (row,) = done.json["runs"]
    assert (done.code, row["state"]) == (2, "unknown")
    assert row["error"].startswith("secrets.TOKEN: its environment variable is not set here")
    done = jobs.cli("reconcile", str(jobs.store), "--json", TOKEN="t")
    assert done.code == 0, done.err
    assert jobs.run("r").wait(timeout=60)["state"] == "succeeded"
    jobs.gone(5)


def test_a_run_whose_supervisor_was_killed_is_closed(jobs: Jobs) -> None:
    jobs.write("hold.py", "import time\nprint('holding', flush=True)\ntime.sleep(60)\n")
    run = jobs.detach("hold.py", "--run-id", "r")
    jobs.printed(run, "holding")
    assert jobs.cli("reconcile", str(jobs.store), "--json").json["runs"][0]["state"] == "running"
    os.kill(jobs.supervisor(), signal.SIGKILL)
    jobs.gone(30)
    (row,) = jobs.cli("reconcile", "r", "--store", str(jobs.store), "--json").json["runs"]
    assert (row["state"], row["category"], row["done"]) == ("failed", "infra", ["closed: failed"])
    assert jobs.cli("reconcile", str(jobs.store), "--json").json["runs"] == []


def test_a_run_whose_supervisor_was_killed_starts_again_if_retries_are_left(jobs: Jobs) -> None:
    jobs.write("hold.py", "import time\nprint('holding', flush=True)\ntime.sleep(60)\n")
    jobs.shorten(stop_grace=6)  # the script ignores the stop
    run = jobs.detach("hold.py", "--run-id", "r", "--retries", "3", "--launcher", "python")
    jobs.printed(run, "holding")
    os.kill(jobs.supervisor(), signal.SIGKILL)
    jobs.gone(30)
    (row,) = jobs.cli("reconcile", "r", "--store", str(jobs.store), "--json").json["runs"]
    assert row["done"] == ["starting attempt 1"]
    jobs.wait_for(lambda: run.status().state == "running")
    (row,) = jobs.cli("reconcile", "r", "--store", str(jobs.store), "--json").json["runs"]
    assert (row["state"], row["done"]) == ("running", [])
    assert jobs.cli("cancel", run.url).code == 0
    assert jobs.cli("wait", run.url, "--json").json["state"] == "cancelled"
    assert sorted(run.store.attempts("r")) == [0, 1]


def test_another_machine_s_run_is_not_a_fault_of_the_store(jobs: Jobs) -> None:
    """Check a run whose supervisor's files are on another machine; the shared store does not have them."""
    assert jobs.cli(*words(jobs)).code == 0
    run = jobs.run("r")
    run.wait(timeout=60)
    jobs.gone(30)  # its supervisor writes the result too
    folder = Path(jobs.store, "runs/r")
    (folder / "result.json").unlink()
    record = json.loads((folder / "attempts/0/submitted.json").read_text())
    record["native_id"] = "another:/home/them/supervisor"
    (folder / "attempts/0/submitted.json").write_text(json.dumps(record))
    done = jobs.cli("reconcile", str(jobs.store), "--json")
    (row,) = done.json["runs"]
    assert (done.code, row["exit_code"]) == (0, 0)
    assert row["error"] == "this run is on the machine another; ask there"
    assert jobs.cli("reconcile", run.url).code == 7
