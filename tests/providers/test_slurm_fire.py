"""Submission to a real Slurm while clients die, connections are cut and answers are lost."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from slurmcluster import Cluster, running
from trials import TRIALS

from cloudtrain.errors import CloudtrainError
from cloudtrain.job.job import Job
from cloudtrain.provider_api.protocol import Layout, Request
from cloudtrain.providers.slurm import Provider
from cloudtrain.providers.slurm.api import Account

pytestmark = pytest.mark.slow

TOOLS = ("squeue", "sbatch", "scontrol", "scancel")
#: A tool of Slurm. At the call named in $PLAN, ``TOOL NUMBER WHEN HOW``, it kills the client's shell or loses its
#: answer, before or after the work of the real tool.
WRAPPER = """#!/bin/bash
tool=${{0##*/}}
count=$(($(cat "$PLAN.$tool" 2>/dev/null || echo 0) + 1)); echo $count >"$PLAN.$tool"
read -r target number when how <"$PLAN"
strike() {{
    [ "$how" = kill ] && {{ kill -9 $PPID; exit 1; }}
    echo "$tool: error: Socket timed out on send/recv operation" >&2; exit 1
}}
hit=; [ "$tool" = "$target" ] && [ $count = $number ] && hit=1
[ -z "$hit" ] || [ "$when" = after ] || strike
out=$({real} "$@"); code=$?
[ -z "$hit" ] || strike
[ -z "$out" ] || printf '%s\\n' "$out"
exit $code
"""
#: ssh to this machine that is cut after some bytes of its input: the shell gets half of a script.
CUT_SSH = """#!/bin/bash
read -r bytes <"$PLAN"
if [ "$bytes" -ge 0 ]; then head -c "$bytes" | /bin/bash -s; echo "Connection to login closed." >&2; exit 255; fi
if [ "$bytes" = -2 ]; then /bin/bash -s >/dev/null; echo "Connection to login closed." >&2; exit 255; fi
exec /bin/bash -s
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running(tmp_path_factory.mktemp("slurm"), NODES="2") as cluster:
        yield cluster


@pytest.fixture
def tools(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put tools on the path that follow the plan of the next strike. Return the plan's file."""
    folder, plan = tmp_path / "bin", tmp_path / "plan"
    folder.mkdir()
    for tool in TOOLS:
        real = shutil.which(tool)
        (folder / tool).write_text(WRAPPER.format(real=real))
        (folder / tool).chmod(0o755)
    (folder / "ssh").write_text(CUT_SSH)
    (folder / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("PLAN", str(plan))
    aim(plan, "none 0 before kill")
    return plan


def aim(plan: Path, text: str) -> None:
    plan.write_text(text + "\n")
    for tool in TOOLS:
        plan.with_name(f"plan.{tool}").unlink(missing_ok=True)


def request_of(folder: Path, number: object) -> Request:
    """Return a job that ends at once and adds a line to a file."""
    base = folder / f"run-{number}" / "slurm-0-0"
    name = f"fire-{folder.name[-12:]}-{number}".lower().replace("_", "-")
    script = (
        f"#!/bin/bash\n#SBATCH --job-name={name}\n#SBATCH --output={base}/batch.log\n#SBATCH --partition=low\n"
        f"#SBATCH --export=NONE\n#SBATCH --time=1\necho $SLURM_JOB_ID >>{folder}/ran-{number}\n"
    )
    body = {"sbatch": {"job-name": name, "output": f"{base}/batch.log"}, "script": script}
    return Request(provider="slurm", operation="sbatch", body=body, context={}, run=f"file://{folder}/run-{number}")


def jobs_of(cluster: Cluster, request: Request) -> dict[str, list[str]]:
    """Return the ids of the request's jobs, by ``live`` (released), ``held`` and ``cancelled``."""
    found: dict[str, list[str]] = {"live": [], "held": [], "cancelled": []}
    name = request.body["sbatch"]["job-name"]
    for line in cluster.call("/usr/bin/squeue", "-h", "-t", "all", "--name", name, "-o", "%A %T %r").splitlines():
        job, state, reason = line.split(maxsplit=2)
        kind = "cancelled" if state == "CANCELLED" else "held" if reason == "JobHeldUser" else "live"
        found[kind].append(job)
    return found


def submit_until_success(account: Account, request: Request, *, strikes: int = 3) -> str:
    """Submit until that succeeds, as restarted clients do."""
    for _ in range(strikes):
        with contextlib.suppress(CloudtrainError):
            return account.create(request)
    return account.create(request)


STRIKES = [
    (tool, number, when, how)
    for tool, numbers in (("squeue", (1, 2, 3)), ("sbatch", (1,)), ("scontrol", (1,)))
    for number in numbers
    for when in ("before", "after")
    for how in ("kill", "lose")
]


def _suite_param(strike: tuple[str, int, str, str]) -> Any:
    """Return the parameter. The suite strikes each call that changes Slurm, and a client's last query."""
    tool, number, _, how = strike
    asks = tool == "squeue" and (number < 3 or how == "lose")
    return pytest.param(strike, marks=[pytest.mark.proof] if asks else [])


@pytest.mark.parametrize(
    "strike", [_suite_param(strike) for strike in STRIKES], ids=lambda strike: "-".join(map(str, strike))
)
def test_a_client_that_is_struck_at_any_call_leaves_one_job(
    cluster: Cluster, tools: Path, tmp_path: Path, strike: tuple[str, int, str, str]
) -> None:
    request = request_of(tmp_path, 0)
    account = Account(Provider().settings)
    aim(tools, " ".join(map(str, strike)))
    native = submit_until_success(account, request)
    found = jobs_of(cluster, request)
    assert (found["live"], found["held"]) == ([native.partition(":")[0]], [])
    assert account.create(request) == native == account.find(request)


def test_a_held_job_of_a_dead_client_is_not_taken_for_a_submitted_one(
    cluster: Cluster, tools: Path, tmp_path: Path
) -> None:
    """Check this because a record of it would keep every later client from releasing it."""
    request = request_of(tmp_path, 0)
    account = Account(Provider().settings)
    aim(tools, "sbatch 1 after kill")
    with pytest.raises(CloudtrainError):
        account.create(request)
    assert len(jobs_of(cluster, request)["held"]) == 1
    assert account.find(request) is None
    assert account.find(request) is None
    assert account.create(request) == account.find(request)


def test_clients_at_once_with_strikes_leave_one_job(cluster: Cluster, tools: Path, tmp_path: Path) -> None:
    chance = random.Random(7)
    for trial in range(TRIALS or 4):
        request = request_of(tmp_path, trial)
        aim(tools, " ".join(map(str, chance.choice(STRIKES))))
        natives: list[str] = []

        def send(request: Request = request, natives: list[str] = natives) -> None:
            natives.append(submit_until_success(Account(Provider().settings), request, strikes=6))

        threads = [threading.Thread(target=send) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        found = jobs_of(cluster, request)
        assert len(natives) == 4, trial
        assert {native.partition(":")[0] for native in natives} == set(found["live"]), trial
        assert (len(found["live"]), found["held"]) == (1, []), trial


def test_a_second_held_job_of_a_dead_client_is_cancelled(cluster: Cluster, tools: Path, tmp_path: Path) -> None:
    """Check a client that lost the race, and died before it could cancel its own job."""
    request = request_of(tmp_path, 0)
    native = Account(Provider().settings).create(request)
    cluster.call("/usr/bin/sbatch", "--hold", text=request.body["script"])
    assert len(jobs_of(cluster, request)["held"]) == 1
    assert Account(Provider().settings).create(request) == native
    found = jobs_of(cluster, request)
    assert (found["live"], found["held"], len(found["cancelled"])) == ([native.partition(":")[0]], [], 1)


def test_ssh_that_is_cut_anywhere_leaves_one_job(cluster: Cluster, tools: Path, tmp_path: Path) -> None:
    """Check that half of a script does nothing, and that a lost answer is found again."""
    chance = random.Random(11)
    account = Account(Provider(host="login").settings)
    for trial in range(TRIALS or 8):
        request = request_of(tmp_path, trial)
        cut = -2 if trial % 3 == 0 else chance.randrange(3000)
        tools.write_text(f"{cut}\n")
        with contextlib.suppress(CloudtrainError):
            account.create(request)
        assert len(jobs_of(cluster, request)["live"]) <= 1
        tools.write_text("-1\n")
        native = account.create(request)
        found = jobs_of(cluster, request)
        assert (found["live"], found["held"]) == ([native.partition(":")[0]], []), (trial, cut)


def test_a_second_job_of_an_attempt_ends_at_once(cluster: Cluster, tmp_path: Path) -> None:
    """Check the script's own test: Slurm may have forgotten a job that another client looks for."""
    layout = Layout(store=tmp_path.as_uri(), run_id="r", code_digest="c", runtime_digest="d")
    script = Provider(partition="low").plan(Job.make(entry_point="train.py", name="x"), layout).body["script"]
    base = tmp_path / "runs/r/native/slurm-0-0"
    base.mkdir(parents=True)
    (base / "job").write_text("1\n")
    job = cluster.call("sbatch", "--parsable", "--wait", text=script).strip()
    assert cluster.field(job, "JobState") == "COMPLETED"
    assert (base / "batch.log").read_text() == f"cloudtrain: job 1 has this attempt already, so job {job} ends\n"
