"""Failing runs through the console script: the result names the true cause, and no process remains.

About 3 minutes on 2 cores; every test starts at least one whole run.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from datetime import datetime
from typing import Any

import pytest
from jobs import Done, Jobs

from cloudtrain.errors import EXIT_CODES
from cloudtrain.runtime.host_facts import handles_sigterm

pytestmark = pytest.mark.slow
#: Two nodes of one process each, without torch: the runtime, link and supervisor alone.
ALONE = ("--launcher", "python")
PLAIN = ("--nodes", "2", "--launcher", "python")
TORCH = ("--nodes", "2", "--nproc-per-node", "2")


def failed(done: Done, category: str = "user_error") -> dict[str, Any]:
    """Return the result object, after the checks that hold for every failure."""
    result = done.json
    assert (result["state"], result["category"]) == ("failed", category), result
    assert done.code == result["exit_code"] == EXIT_CODES[category]
    assert result["reason"]
    assert "\n" not in result["reason"]
    assert result["reason"] in done.err  # the message for people gives the same reason
    return result


# --------------------------------------------------------------------------------------- one rank fails: 2 x 2 torchrun

GROUP = "import os, signal, sys, time, torch, torch.distributed as dist\ndist.init_process_group('gloo')\nr = dist.get_rank()\ndist.barrier()\nprint('together', flush=True)\n"  # noqa: E501
BARE = "import os, time\nr = int(os.environ['RANK'])\nprint('together', flush=True)\n"
ROOT = GROUP + "if r == 3: raise ValueError('THE ROOT CAUSE')\n"


@pytest.mark.parametrize(
    ("name", "rest"),
    [
        ("without torch", "time.sleep(60)\n"),
        pytest.param("waiting", "dist.barrier()\n", marks=pytest.mark.proof),
        pytest.param(
            "consequence",
            "time.sleep(0.02); raise RuntimeError('Connection closed by peer (a consequence)')\n",
            marks=pytest.mark.proof,
        ),
        pytest.param(
            "second", "time.sleep(0.02); raise RuntimeError('something else, later')\n", marks=pytest.mark.proof
        ),
        pytest.param(
            "hang",
            "signal.signal(signal.SIGTERM, lambda *a: None)\nwhile True: time.sleep(1)\n",
            marks=pytest.mark.proof,
        ),
    ],
)
def test_a_rank_that_raises_is_the_cause_whatever_the_others_do(jobs: Jobs, name: str, rest: str) -> None:
    deaf = GROUP + "signal.signal(signal.SIGTERM, lambda *a: None)\n"
    script = ROOT.replace(GROUP, {"without torch": BARE, "hang": deaf}.get(name, GROUP))
    jobs.write("train.py", script + rest)
    run = jobs.detach("train.py", *TORCH)
    jobs.printed(run, "together")
    began = time.monotonic()
    done = jobs.cli("wait", run.url, "--json")
    took = time.monotonic() - began
    result = failed(done)
    failure = result["failure"]
    line = script[: script.index("raise ValueError")].count("\n") + 1
    assert (failure["node"], failure["rank"], failure["exception"]) == (1, 3, "ValueError: THE ROOT CAUSE")
    assert (failure["file"], failure["line"], failure["process_exit_code"]) == ("train.py", line, 1)
    assert failure["traceback"].startswith('Traceback (most recent call last):\n  File "train.py"')
    assert "worker.py" not in failure["traceback"]
    assert result["reason"] == f"rank 3 on node 1 raised ValueError: THE ROOT CAUSE (train.py:{line})"
    assert took < 12  # peers have ended within 10 s of the failure
    jobs.gone(2)
    status = jobs.cli("status", run.url)
    assert "ValueError: THE ROOT CAUSE" in status.out
    assert f"train.py:{line}" in status.out


@pytest.mark.parametrize(
    ("text", "code", "words", "shape", "rank"),
    [
        ("sys.exit(42)", 42, "exited with code 42", PLAIN, 1),
        pytest.param("sys.exit(42)", 42, "exited with code 42", TORCH, 2, marks=pytest.mark.proof),
        pytest.param("time.sleep(0.5); os._exit(42)", 42, "exited with code 42", TORCH, 2, marks=pytest.mark.proof),
        pytest.param(
            "os.kill(os.getpid(), signal.SIGKILL)", -9, "was killed by SIGKILL", TORCH, 2, marks=pytest.mark.proof
        ),
        ("os.kill(os.getpid(), signal.SIGKILL)", -9, "was killed by SIGKILL", PLAIN, 1),
        pytest.param("sys.exit('no data here')", 1, "exited with code 1", TORCH, 2, marks=pytest.mark.proof),
    ],
)
def test_a_rank_that_exits_without_raising(
    jobs: Jobs, text: str, code: int, words: str, shape: tuple[str, ...], rank: int
) -> None:
    first = f"if os.environ['RANK'] == '{rank}': {text}"
    jobs.write("train.py", f"import os, signal, sys, time\n{first}\ntime.sleep(60)\n")
    began = time.monotonic()
    result = failed(jobs.submit("train.py", *shape))
    assert time.monotonic() - began < 40
    assert (result["failure"]["node"], result["failure"]["rank"]) == (1, rank)
    assert result["failure"]["process_exit_code"] == code
    assert words in result["reason"]
    jobs.gone(3)


@pytest.mark.parametrize(("shape", "last"), [(PLAIN, 1), pytest.param(TORCH, 3, marks=pytest.mark.proof)])
def test_ranks_that_succeed_early_are_not_blamed(jobs: Jobs, shape: tuple[str, ...], last: int) -> None:
    late = f"if os.environ['RANK'] == '{last}':\n    time.sleep(1.5)\n    raise KeyError('late')"
    jobs.write("train.py", f"import os, time\n{late}\n")
    result = failed(jobs.submit("train.py", *shape))
    assert (result["failure"]["rank"], result["failure"]["exception"]) == (last, "KeyError: 'late'")


def test_the_scripts_own_processes_end_too(jobs: Jobs) -> None:
    jobs.write(
        "train.py",
        """
        import os, subprocess, sys, time
        subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(15, 1); time.sleep(90)"])
        time.sleep(1)
        if os.environ["RANK"] == "1": raise ValueError("x")
        time.sleep(90)
        """,
    )
    failed(jobs.submit("train.py", *PLAIN))
    jobs.gone(3)


# ----------------------------------------------------------------------------------------------- before the first line


def test_requirements_that_cannot_be_installed_are_the_reason(jobs: Jobs) -> None:
    jobs.write("train.py", "print('never')")
    jobs.write("requirements.txt", "this-package-does-not-exist-anywhere==99.99\n")
    done = jobs.submit("train.py", "--requirements", "requirements.txt", PIP_NO_INDEX="1")
    result = done.json
    assert result["state"] == "failed"
    assert "requirements.txt" in result["reason"]
    assert "this-package-does-not-exist-anywhere" in result["reason"]
    assert "never" not in done.err
    assert done.code == result["exit_code"]
    assert done.code in (1, 2, 9)


def test_changed_code_never_runs(jobs: Jobs) -> None:
    jobs.write("train.py", "print('SHOULD NOT RUN')")
    assert jobs.submit("train.py", "--run-id", "first").code == 0
    (archive,) = jobs.store.glob("code/*/code.tar.gz")
    data = bytearray(archive.read_bytes())
    data[len(data) // 2] ^= 0xFF
    archive.chmod(0o644)
    archive.write_bytes(data)
    done = jobs.submit("train.py", "--run-id", "second")
    result = failed(done, "infra")
    assert "code" in result["reason"]
    assert "SHOULD NOT RUN" not in done.err


def test_a_python_without_torch_is_named_as_such(jobs: Jobs) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(jobs.tmp / "bare")], check=True, timeout=60)
    jobs.write("train.py", "print('never')")
    python = str(jobs.tmp / "bare/bin/python")
    done = jobs.submit("train.py", "--nproc-per-node", "2", "--set", f"python={python}")
    assert (done.code, done.json["field"]) == (2, "local.python")
    assert done.json["error"].endswith("bare/bin/python has no torch, which starts several ranks")
    assert done.json["hint"].endswith("-m pip install torch numpy")
    assert jobs.runs() == [], "submit must record nothing"


def test_a_missing_python(jobs: Jobs) -> None:
    jobs.write("train.py", "print('never')")
    done = jobs.submit("train.py", "--set", "python=/no/such/python")
    assert (done.code, done.json["field"]) == (2, "local.python")
    assert "/no/such/python" in done.json["error"]


def test_a_missing_command(jobs: Jobs) -> None:
    jobs.write("run.sh", "no-such-program --x\n")
    result = failed(jobs.submit("run.sh"))
    assert result["failure"]["process_exit_code"] == 127


def test_an_input_that_vanished(jobs: Jobs) -> None:
    jobs.write("train.py", "print('never')")
    (jobs.tmp / "data.csv").write_text("1")
    plan = jobs.cli(
        "plan", "train.py", "--store", str(jobs.store), "--input", f"d={jobs.tmp}/data.csv", "--json", "--run-id", "p"
    )
    (jobs.tmp / "plan.json").write_text(plan.out)
    (jobs.tmp / "data.csv").unlink()
    done = jobs.cli("submit", "--plan", str(jobs.tmp / "plan.json"), "--store", str(jobs.store), "--json")
    assert done.code == 2
    assert "data.csv" in done.out + done.err


# ------------------------------------------------------------------------------------------------ nodes and supervisor

WAITS = """
import os, time
print("up", os.getpid(), flush=True)
end = time.time() + 90
while time.time() < end and not os.path.exists(os.environ["CLOUDTRAIN_PREEMPT_FILE"]):
    time.sleep(0.05)
print("leaving", flush=True)
"""


def test_a_killed_node_is_named(jobs: Jobs) -> None:
    jobs.write("train.py", "import time\nprint('up', flush=True)\ntime.sleep(90)\n")
    run = jobs.detach("train.py", *PLAIN)
    jobs.printed(run, "up")
    began = time.monotonic()
    os.killpg(jobs.node(1), signal.SIGKILL)
    result = failed(jobs.cli("wait", run.url, "--json"), "infra")
    assert time.monotonic() - began < 20
    assert "node 1" in result["reason"]
    jobs.gone(3)


def test_a_killed_node_0_is_named(jobs: Jobs) -> None:
    jobs.write("train.py", "import time\nprint('up', flush=True)\ntime.sleep(90)\n")
    run = jobs.detach("train.py", *PLAIN)
    jobs.printed(run, "up")
    os.killpg(jobs.node(0), signal.SIGKILL)
    result = failed(jobs.cli("wait", run.url, "--json"), "infra")
    assert "node 0" in result["reason"]
    jobs.gone(3)


def test_a_killed_supervisor_ends_its_nodes_and_is_the_reason(jobs: Jobs) -> None:
    jobs.write("train.py", "import time\nprint('up', flush=True)\ntime.sleep(90)\n")
    run = jobs.detach("train.py", *PLAIN)
    jobs.printed(run, "up")
    assert run.status().state == "running"
    os.kill(jobs.supervisor(), signal.SIGKILL)
    jobs.gone(12)
    result = failed(jobs.cli("wait", run.url, "--json"), "infra")
    assert result["reason"].endswith("the run's supervisor was killed")
    assert run.status().state == "failed"
    # A second submit does not start it again: its end is on record.
    assert jobs.submit("train.py", *PLAIN, "--run-id", run.run_id).json["state"] == "failed"
    jobs.gone(1)


COUNTS = """
import os, time
start = os.environ["CLOUDTRAIN_RESUME_FROM"]
part = f"/part-{os.environ['RANK']}.txt"
step = int(open(start + part).read()) if start else 0
assert os.environ["TOKEN"] == "secret-word"
print("from", step, flush=True)
while step < (60 if start else 600) and not os.path.exists(os.environ["CLOUDTRAIN_PREEMPT_FILE"]):
    step += 1
    time.sleep(0.1)
    if step % 10 == 0:
        folder = os.environ["CLOUDTRAIN_CHECKPOINT_DIR"] + f"/step-{step}"
        os.makedirs(folder)
        open(folder + part, "w").write(str(step))
        print("saved", step, flush=True)
"""
SECRET = ("--secret", "TOKEN=env:MY_TOKEN")


@pytest.mark.parametrize("remote", [False, pytest.param(True, marks=pytest.mark.proof)], ids=["folder", "s3"])
def test_a_waiting_client_continues_after_a_killed_supervisor(
    jobs: Jobs, remote: bool, request: pytest.FixtureRequest
) -> None:
    if remote:
        jobs.store = request.getfixturevalue("s3_url")
        jobs.environ |= {name: text for name, text in os.environ.items() if name.startswith("AWS_")}
        jobs.environ["XDG_STATE_HOME"] = str(jobs.tmp / "state")
    jobs.environ["MY_TOKEN"] = "secret-word"
    jobs.write("train.py", COUNTS)
    run = jobs.detach("train.py", *PLAIN, *SECRET, "--retries", "1")
    jobs.wait_for(lambda: run.checkpoint() is not None)
    os.kill(jobs.supervisor(), signal.SIGKILL)
    # A status call changes nothing; one of two waiting clients starts the next attempt.
    jobs.wait_for(lambda: run.status().native == "abandoned")
    assert run.store.result(run.run_id) is None
    shown, why = jobs.cli("status", run.url, "--json").json, "attempt 0 ended: the run's supervisor was killed"
    assert (shown["state"], shown["reason"]) == ("pending", f"{why}; another attempt may follow")
    clients = [jobs.start("wait", run.url, "--json") for _ in range(2)]
    for client in clients:
        out, err = client.communicate(timeout=120)
        assert client.returncode == 0, err
        result = json.loads(out)
        assert result["state"] == "succeeded"
        assert [row["number"] for row in result["attempts"]] == ["0.0", "1.0"]
        assert result["attempts"][0]["reason"].endswith("the run's supervisor was killed")
    assert result["attempts"][1]["resumed_step"] >= 10
    assert sorted(run.store.attempts(run.run_id)) == [0, 1]
    lines = [line.text for line in run.logs() if line.text.startswith("from")]
    assert len(lines) == 4
    assert len({line for line in lines if line != "from 0"}) == 1
    jobs.gone(12)


BEATS = """
import os, time
attempt = os.environ["CLOUDTRAIN_ATTEMPT"]
print("up", flush=True)
end = time.time() + (90 if attempt[0] < os.environ["ENOUGH"] else 1)
while time.time() < end and not os.path.exists(os.environ["CLOUDTRAIN_PREEMPT_FILE"]):
    with open(os.environ["BEATS"], "a") as stream:
        stream.write(f"{attempt} {time.time()}\\n")
    time.sleep(0.05)
"""


def _beats(jobs: Jobs) -> dict[str, list[float]]:
    """Return the times at which each attempt ran."""
    found: dict[str, list[float]] = {}
    for line in (jobs.tmp / "beats").read_text().splitlines():
        attempt, moment = line.split()
        found.setdefault(attempt, []).append(float(moment))
    return found


@pytest.mark.parametrize(
    "how", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.proof)], ids=["killed", "stopped"]
)
def test_no_rank_of_the_last_attempt_runs_next_to_the_next_one(jobs: Jobs, how: signal.Signals) -> None:
    """Check when the node's own process cannot end its rank: it was killed too, or is frozen."""
    jobs.write("train.py", BEATS)
    environ = ("--env", f"BEATS={jobs.tmp / 'beats'}", "--env", "ENOUGH=1")
    jobs.shorten(stop_grace=2, orphans=2)  # the successor waits for them
    run = jobs.detach("train.py", "--launcher", "python", "--retries", "1", *environ)
    jobs.printed(run, "up")
    supervisor, node = jobs.supervisor(), jobs.node(0)
    os.kill(node, signal.SIGSTOP)
    os.kill(supervisor, signal.SIGKILL)
    os.kill(node, how)
    assert jobs.cli("wait", run.url, timeout=180).code == 0
    beats = _beats(jobs)
    assert sorted(beats) == ["0.0", "1.0"]
    assert beats["0.0"][-1] < beats["1.0"][0]
    jobs.gone(3)


@pytest.mark.proof
def test_each_killed_supervisor_costs_one_retry(jobs: Jobs) -> None:
    jobs.write("train.py", BEATS)
    environ = ("--env", f"BEATS={jobs.tmp / 'beats'}", "--env", "ENOUGH=2")
    run = jobs.detach("train.py", "--launcher", "python", "--retries", "2", *environ)
    jobs.printed(run, "up")
    os.kill(jobs.supervisor(), signal.SIGKILL)
    for record in (jobs.store / "runs" / run.run_id / "supervisor/nodes").glob("*.started"):
        record.write_text("")  # the machine lost power during the write
    client = jobs.start("wait", run.url, "--json")
    jobs.wait_for(lambda: "1.0" in _beats(jobs), 90)
    os.kill(jobs.supervisor(), signal.SIGKILL)
    out, err = client.communicate(timeout=180)
    assert client.returncode == 0, err
    assert [row["number"] for row in json.loads(out)["attempts"]] == ["0.0", "1.0", "2.0"]
    beats = _beats(jobs)
    assert beats["0.0"][-1] < beats["1.0"][0] <= beats["1.0"][-1] < beats["2.0"][0]


@pytest.mark.proof
def test_the_time_without_a_supervisor_does_not_count(jobs: Jobs) -> None:
    jobs.write("train.py", BEATS)
    environ = ("--env", f"BEATS={jobs.tmp / 'beats'}", "--env", "ENOUGH=1")
    run = jobs.detach("train.py", "--launcher", "python", "--retries", "1", "--max-runtime", "10s", *environ)
    jobs.printed(run, "up")
    for pid in (jobs.node(0), jobs.supervisor()):  # neither leaves a record
        os.kill(pid, signal.SIGKILL)
    time.sleep(11)
    done = jobs.cli("wait", run.url, "--json")
    assert (done.code, done.json["state"]) == (0, "succeeded"), done.err


def test_a_run_whose_nodes_had_succeeded_is_not_run_again(jobs: Jobs) -> None:
    """Kill the supervisor between its nodes' end and its own last record."""
    jobs.write("train.py", "print('once', flush=True)\n")
    done = jobs.submit("train.py", *PLAIN, "--retries", "1")
    run = jobs.run(done.json["run_id"])
    folder = jobs.store / "runs" / run.run_id
    (folder / "result.json").unlink()
    status = json.loads((folder / "supervisor/status.json").read_text())
    (folder / "supervisor/status.json").write_text(json.dumps({**status, "state": "running", "finished": None}))
    assert jobs.cli("wait", run.url, "--json").json["state"] == "succeeded"
    assert sorted(run.store.attempts(run.run_id)) == [0]


@pytest.mark.proof
def test_a_client_without_the_secret_leaves_the_next_attempt_to_another(jobs: Jobs) -> None:
    jobs.environ["MY_TOKEN"] = "secret-word"
    jobs.write("train.py", COUNTS)
    run = jobs.detach("train.py", *PLAIN, *SECRET, "--retries", "1")
    jobs.wait_for(lambda: run.checkpoint() is not None)  # from here few steps remain
    os.kill(jobs.supervisor(), signal.SIGKILL)
    del jobs.environ["MY_TOKEN"]
    refused = jobs.cli("wait", run.url)
    assert refused.code == EXIT_CODES["spec"]
    assert "secrets.TOKEN: its environment variable is not set here" in refused.err
    assert sorted(run.store.attempts(run.run_id)) == [0]
    jobs.environ["MY_TOKEN"] = "secret-word"
    jobs.cli("reconcile", run.url)
    assert jobs.cli("wait", run.url, "--json").json["state"] == "succeeded"


@pytest.mark.proof
def test_the_running_time_of_a_killed_supervisor_counts(jobs: Jobs) -> None:
    jobs.write("train.py", WAITS)
    jobs.shorten(stop_grace=6)  # the script ignores the stop
    run = jobs.detach("train.py", *PLAIN, "--retries", "1", "--max-runtime", "18s")
    jobs.printed(run, "up")
    time.sleep(12)
    os.kill(jobs.supervisor(), signal.SIGKILL)
    result = failed(jobs.cli("wait", run.url, "--json"), "timeout")
    rows = result["attempts"]
    spent = [datetime.fromisoformat(row["ended"]) - datetime.fromisoformat(row["started"]) for row in rows]
    assert spent[0].total_seconds() >= 12
    assert sum(each.total_seconds() for each in spent) < 30  # of 18; 30 and more if the first 12 did not count


def test_a_restarted_machine_is_the_reason_of_a_failure(jobs: Jobs) -> None:
    jobs.write("train.py", "import time\nprint('up', flush=True)\ntime.sleep(90)\n")
    run = jobs.detach("train.py", *PLAIN)
    jobs.printed(run, "up")
    # Kill everything at once, as a power cut does, and first the process that would notice.
    everything = sorted(jobs.processes(), key=lambda pid: pid != jobs.supervisor())
    for pid in everything:
        os.kill(pid, signal.SIGSTOP)
    for pid in everything:
        os.kill(pid, signal.SIGKILL)
    path = jobs.store / "runs" / run.run_id / "supervisor" / "status.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "boot": "another-boot"}))
    done = jobs.cli("wait", run.url, "--json")
    result = failed(done, "infra")
    assert result["reason"] == "this machine was restarted during the run"
    assert [a["number"] for a in result["attempts"]] == ["0.0"]


def test_cancel(jobs: Jobs) -> None:
    jobs.write("train.py", WAITS)
    run = jobs.detach("train.py", *PLAIN, "--retries", "3")
    jobs.printed(run, "up")
    assert jobs.cli("cancel", run.url).code == 0
    done = jobs.cli("wait", run.url, "--json")
    assert (done.code, done.json["state"], done.json["category"]) == (5, "cancelled", "cancelled")
    assert len(done.json["attempts"]) == 1
    assert jobs.cli("cancel", run.url).code == 0  # again, after the end
    jobs.gone(2)


def test_the_time_limit(jobs: Jobs) -> None:
    jobs.write("train.py", WAITS)
    done = jobs.submit("train.py", *PLAIN, "--max-runtime", "3s", "--retries", "2")
    result = failed(done, "timeout")
    assert "max_runtime of 3 s" in result["reason"]
    assert len(result["attempts"]) == 1
    assert result["exit_code"] == 6
    jobs.gone(2)


# ---------------------------------------------------------------------------------------------- attempts and preemption

TRAINS = """
import glob, json, os, pathlib, sys, time
folder = pathlib.Path(os.environ["CLOUDTRAIN_CHECKPOINT_DIR"])
resume = os.environ["CLOUDTRAIN_RESUME_FROM"]
rank, attempt = os.environ["RANK"], os.environ["CLOUDTRAIN_ATTEMPT"]
first = int(pathlib.Path(resume, "step").read_text()) + 1 if resume else 0
print(f"attempt {attempt} from {first} of {resume and pathlib.Path(resume).name!r} argv {sys.argv[1:]}", flush=True)
def save(step):
    (folder / f"step-{step}").mkdir(exist_ok=True)
    if rank == "0":
        (folder / f"step-{step}" / "step").write_text(str(step))
    (folder / f"step-{step}" / f"rank-{rank}").write_text(f"state of {rank} at {step}")
"""


def test_a_further_attempt_resumes_from_the_committed_checkpoint(jobs: Jobs) -> None:
    jobs.shorten(quiet=0.5, scan=0.1)
    jobs.write(
        "train.py",
        TRAINS
        + """
if first == 0:
    save(3)
    time.sleep(2.5)  # quiet for half a second, copied, committed
    save(4)
    if rank == "1": raise ValueError("attempt 0 fails, with a half checkpoint")
    time.sleep(60)
assert sorted(p.name for p in pathlib.Path(resume).iterdir()) == ["rank-0", "rank-1", "step"]
assert pathlib.Path(resume, f"rank-{rank}").read_text() == f"state of {rank} at 3"
print("second attempt done", flush=True)
""",
    )
    done = jobs.submit("train.py", *PLAIN, "--retries", "2", "--", "--init", "{resume_from?}")
    result = done.json
    assert (done.code, result["state"]) == (0, "succeeded"), done.err
    numbers = [(a["number"], a["resumed_from"]) for a in result["attempts"]]
    assert numbers == [("0.0", ""), ("1.0", "step-3")]
    assert "ValueError: attempt 0 fails" in result["attempts"][0]["reason"]
    assert "attempt 0.0 from 0 of '' argv []" in done.err
    assert "attempt 1.0 from 4 of 'step-3' argv ['--init'" in done.err
    assert result["checkpoint"]["name"] == "step-3"
    jobs.gone(2)


def test_the_same_failure_twice_without_a_new_checkpoint_ends_the_run(jobs: Jobs) -> None:
    jobs.write("train.py", "import os\nif os.environ['RANK'] == '1': raise ValueError('always')\n")
    result = failed(jobs.submit("train.py", *PLAIN, "--retries", "5"))
    assert [a["number"] for a in result["attempts"]] == ["0.0", "1.0"]
    assert "ValueError: always" in result["reason"]


@pytest.mark.proof
def test_different_failures_use_up_the_retries(jobs: Jobs) -> None:
    jobs.write("train.py", "import os\nraise ValueError('in ' + os.environ['CLOUDTRAIN_ATTEMPT'])\n")
    result = failed(jobs.submit("train.py", *ALONE, "--retries", "2"))
    assert [a["number"] for a in result["attempts"]] == ["0.0", "1.0", "2.0"]
    assert result["failure"]["exception"] == "ValueError: in 2.0"


def test_a_stop_of_one_node_warns_all_and_the_run_continues(jobs: Jobs) -> None:
    jobs.write(
        "train.py",
        TRAINS
        + """
if attempt == "0.0":
    print("up", flush=True)
    end = time.time() + 60
    while not os.path.exists(os.environ["CLOUDTRAIN_PREEMPT_FILE"]):
        assert time.time() < end
        time.sleep(0.05)
    save(7)
    print("saved", flush=True)
    sys.exit(0)
assert first == 8
print("next attempt ran", flush=True)
""",
    )
    run = jobs.detach("train.py", *PLAIN)
    jobs.printed(run, "r1 #")
    jobs.printed(run, "r0 #")
    time.sleep(0.5)
    os.kill(jobs.node(1), signal.SIGTERM)
    done = jobs.cli("wait", run.url, "--json")
    result = done.json
    assert (done.code, result["state"]) == (0, "succeeded"), result
    assert [(a["number"], a["resumed_from"]) for a in result["attempts"]] == [("0.0", ""), ("0.1", "step-7")]
    logs = jobs.cli("logs", run.url).out
    assert logs.count("saved") == 2  # the file appeared on both nodes
    assert logs.count("next attempt ran") == 2
    jobs.gone(2)


def test_a_handler_s_exit_code_is_no_failure_if_node_0_has_none(jobs: Jobs) -> None:
    jobs.shorten(stop_term=0.1, stop_kill=1)
    jobs.write(
        "train.py",
        """
        import os, signal, sys, time
        if os.environ["CLOUDTRAIN_ATTEMPT"] != "0.0":
            print("next attempt ran", flush=True)
            sys.exit(0)
        if os.environ["RANK"] == "1":
            signal.signal(signal.SIGTERM, lambda *a: sys.exit(1))
        print("up", flush=True)
        end = time.time() + 60
        while os.environ["RANK"] == "1" or not os.path.exists(os.environ["CLOUDTRAIN_PREEMPT_FILE"]):
            assert time.time() < end
            time.sleep(0.05)
        time.sleep(2)  # as one that saves: longer than a rank has after a failure elsewhere
        print("in peace", flush=True)
        """,
    )
    run = jobs.detach("train.py", *PLAIN)
    jobs.printed(run, "r1 #")
    jobs.printed(run, "r0 #")
    os.kill(jobs.node(1), signal.SIGTERM)
    done = jobs.cli("wait", run.url, "--json")
    result = done.json
    assert (done.code, result["state"]) == (0, "succeeded"), result
    attempts = [(a["number"], a["reason"]) for a in result["attempts"]]
    assert attempts == [("0.0", "node 1 got a stop signal"), ("0.1", "succeeded")], result
    logs = jobs.cli("logs", run.url).out
    assert logs.count("in peace") == 1
    assert logs.count("next attempt ran") == 2
    jobs.gone(2)


@pytest.mark.proof
def test_a_preempted_script_without_a_handler_is_stopped_before_the_grace_ends(jobs: Jobs) -> None:
    jobs.write(
        "train.py",
        "import os, time\nprint('up', flush=True)\nif os.environ['CLOUDTRAIN_ATTEMPT'] == '0.0': time.sleep(90)\n",
    )
    jobs.shorten(stop_grace=12)
    run = jobs.detach("train.py")
    jobs.printed(run, "up")
    began = time.monotonic()
    os.kill(jobs.node(0), signal.SIGTERM)
    result = jobs.cli("wait", run.url, "--json").json
    assert result["state"] == "succeeded"
    assert [a["number"] for a in result["attempts"]] == ["0.0", "0.1"]
    assert 6 < time.monotonic() - began < 30


# --------------------------------------------------------------------------------------- checks of restored checkpoints


def test_a_damaged_checkpoint_falls_back_to_the_one_before(jobs: Jobs) -> None:
    jobs.shorten(quiet=0.5, scan=0.1)
    jobs.write(
        "train.py",
        TRAINS
        + """
if not resume:
    for step in (1, 2):
        save(step)
        while not glob.glob(f"{os.environ['LIVE']}/checkpoints/step-{step}/*/commit.json"): time.sleep(0.05)
    raise ValueError("now")
print("resumed step", first - 1, flush=True)
""",
    )
    live = ("--env", f"LIVE={jobs.store / 'runs/whole/live'}")
    run = jobs.detach("train.py", *ALONE, "--retries", "0", "--run-id", "whole", *live)
    assert jobs.cli("wait", run.url, "--json").code == 1
    folder = jobs.store / "runs/whole/live/checkpoints/step-2"
    (victim,) = folder.glob("*/node-0/step-2/rank-0")
    victim.write_text(victim.read_text().swapcase())  # the same size
    done = jobs.submit("train.py", *ALONE, "--resume-from", "whole", "--retries", "0", "--env", "X=1")
    assert "falling back to the checkpoint before" in done.err
    assert "from 2 of 'step-1'" in done.err
    victim.unlink()  # now incomplete
    done = jobs.submit("train.py", *ALONE, "--resume-from", "whole", "--retries", "0", "--env", "X=2")
    assert "is not complete" in done.err
    assert "from 2 of 'step-1'" in done.err


def test_checkpoints_in_the_scripts_own_folder_are_restored_there(jobs: Jobs) -> None:
    jobs.shorten(quiet=0.5, scan=0.1)
    jobs.write(
        "train.py",
        """
        import glob, os, pathlib, time
        path = pathlib.Path("out/checkpoint-5")
        if os.environ["CLOUDTRAIN_ATTEMPT"] == "0.0":
            path.mkdir(parents=True)
            (path / "model.bin").write_text("weights")
            while not glob.glob(f"{os.environ['LIVE']}/checkpoints/*/*/commit.json"): time.sleep(0.05)
            raise ValueError("now")
        assert (path / "model.bin").read_text() == "weights"
        assert pathlib.Path(os.environ["CLOUDTRAIN_RESUME_FROM"]).samefile(path)
        print("found again")
        """,
    )
    run = ("--run-id", "own", "--env", f"LIVE={jobs.store / 'runs/own/live'}")
    done = jobs.submit("train.py", *ALONE, "--retries", "1", "--checkpoint-paths", "out/checkpoint-*", *run)
    assert done.code == 0, done.err
    assert "found again" in done.err


def test_a_notice_that_comes_before_the_nodes_have_met_reaches_both(jobs: Jobs) -> None:
    """Check that a late node 1 finds a node 0 that waited, and that the run continues with the next attempt."""
    jobs.write("train.py", "print('trained')\n")
    run = jobs.detach("train.py", "--nodes", "2", "--launcher", "python")
    late = jobs.node(1)
    os.kill(late, signal.SIGSTOP)
    first = jobs.node(0)
    jobs.wait_for(lambda: handles_sigterm(first))
    os.kill(first, signal.SIGTERM)
    time.sleep(1)
    os.kill(late, signal.SIGCONT)
    done = jobs.cli("wait", run.url, "--json")
    assert (done.code, done.json["state"]) == (0, "succeeded"), done.json["reason"]
    assert [(a["number"], a["category"]) for a in done.json["attempts"]] == [("0.0", "preempted"), ("0.1", None)]
