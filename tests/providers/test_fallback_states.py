"""Runs with a fallback: from a cloud's states and times cloudtrain decides if a job is over, and if it ever ran.

The job is on the cloud's own wire; the next place is a folder that accepts any job. No script runs.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import foldercloud
import pytest
import tomli_w
from foldercloud import NAME, Provider
from store_times import date_back
from vertex_recorded import after_waiting
from worlds.azureml.life import QUOTA
from worlds.azureml.world import AzureMLWorld
from worlds.sagemaker.life import CAPACITY, TrainingJob
from worlds.sagemaker.world import SageMakerWorld
from worlds.vertex.life import RESOURCE_EXHAUSTED, STOCKOUT, CustomJob
from worlds.vertex.world import VertexWorld

from cloudtrain.estimator import Estimator
from cloudtrain.runs.retry import Retry
from cloudtrain.runs.run import Run
from cloudtrain.store import runtime_zip

pytestmark = [pytest.mark.remote]

HOUR = 3600.0
built = cache(runtime_zip.build)
"""Built once: its time is not part of these tests."""


class Waiting:
    """Runs whose jobs wait for machines in a cloud. Runs that leave it start in the second place."""

    def __init__(self, world: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, **table: Any) -> None:
        self.world, self.name, self.patch = world, name, monkeypatch
        foldercloud.install(folder / "site")
        (folder / "site/foldercloud.py").unlink()  # the tests import the module in this process
        monkeypatch.syspath_prepend(str(folder / "site"))
        monkeypatch.setattr(runtime_zip, "build", built)
        self.second = Provider(folder=str(folder / "second"))
        code = folder / "code"
        for place in (code, folder / "second"):
            place.mkdir()
        (code / "train.py").write_text("print('hello')\n")
        second = {
            "provider": NAME,
            "store": str(folder / "second-store"),
            NAME: {"folder": self.second.settings.folder},
        }
        data = {
            "provider": name,
            "store": world.store,
            "fallback": ["second"],
            name: table,
            "profiles": {"second": second},
        }
        (code / "cloudtrain.toml").write_text(tomli_w.dumps(data))
        monkeypatch.chdir(code)
        for variable, value in world.plane.environ().items():
            monkeypatch.setenv(variable, value)

    def submit(self, run_id: str, **fields: Any) -> Run:
        """Submit a run as if two days ago. It may wait for an hour, and run for twenty minutes."""
        waits = {} if self.name == "sagemaker" else {"max_wait": int(HOUR)}
        given: dict[str, Any] = {"max_runtime": 1200, "on": {self.name: fields}, **waits}
        run = Estimator(entry_point="train.py", **given).fit(wait=False, run_id=run_id)
        date_back(run.store.files, f"runs/{run_id}/attempts/0/submitted.json", 48 * HOUR, self.patch)
        return run

    def look(self, run: Run) -> bool:
        """Reconcile as any client does. Return True if the run is then in the second place."""
        run.reconcile(retry=Retry(run))
        return f"{run.run_id}.0" in self.second.jobs()


# --------------------------------------------------------------------------------------------------------------- Azure


@pytest.fixture
def azure(tmp_path: Path, azure_server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Waiting]:
    world = AzureMLWorld(tmp_path / "world", azurite=azure_server, image="team/trainer:1", runs=False)
    world.plane.no_capacity = True
    yield Waiting(world, tmp_path, monkeypatch, "azureml", **world.workspace())
    world.close()


def on_azure(azure: Waiting, run_id: str, state: str = "", started: bool = False) -> tuple[Run, Any]:
    """Return a run and its job in the native state ``state``. With ``started`` Azure gives it a start at submission."""
    run = azure.submit(run_id, image=azure.world.image)
    job = azure.world.job(run)
    job.started = time.time() - 2 * HOUR if started else None
    if state:
        azure.world.plane.unknown[job.name] = state
    return run, job


@pytest.mark.parametrize("started", [False, True])
def test_azure_s_waiting_job_moves_once_it_is_over(azure: Waiting, started: bool) -> None:
    """Check all names that Azure has for a start. Without a log of the script, no script has run."""
    for native in ("Starting", "Provisioning", "Preparing", "Queued", "Paused"):
        run, job = on_azure(azure, native.lower(), native, started)
        assert not azure.look(run), "the job is not over yet"
        azure.world.plane.unknown[job.name] = "CancelRequested"
        assert not azure.look(run)
        assert job.wait() == "Canceled"
        del azure.world.plane.unknown[job.name]
        assert azure.look(run), native
        (refusal,) = run.result()["refusals"]
        assert (refusal["category"], refusal["reason"]) == ("capacity", f"no machines within max_wait (1h): {native}")


def test_azure_s_job_that_may_run_stays(azure: Waiting) -> None:
    for native in ("Running", "Finalizing", "NotResponding", "CancelRequested", "OfNextYear"):
        run, job = on_azure(azure, native.lower(), native, started=True)
        assert not azure.look(run), native
        assert job.status == "Queued", "no client may cancel it"
        assert run.store.expired(run.run_id, 0) is None


def test_azure_s_job_whose_script_has_a_log_stays_where_it_ran(azure: Waiting) -> None:
    """Check a job whose low-priority nodes were preempted, and which waits again."""
    run, job = on_azure(azure, "again", started=True)
    job.log(0)
    assert not azure.look(run)
    job.wait()
    assert not azure.look(run)
    assert run.result()["state"] == "failed"


def test_azure_s_job_once_running_has_run_even_before_its_log_is_listed(azure: Waiting) -> None:
    run, job = on_azure(azure, "behind", "Running", started=True)
    assert not azure.look(run)
    del azure.world.plane.unknown[job.name]
    job.end("Failed", "UserError", QUOTA.format(family="x", limit=0, nodes=1, wanted=4))
    native = run.store.submitted(run.run_id, 0)
    assert native is not None
    assert run.provider.status(str(native["native_id"])).started == pytest.approx(job.started, abs=1)


@pytest.mark.parametrize("ran", [False, True])
def test_azure_s_quota_error_counts_unless_the_script_ran(azure: Waiting, ran: bool) -> None:
    run, job = on_azure(azure, "quota", "Queued", started=True)
    if ran:
        job.log(0)
    del azure.world.plane.unknown[job.name]
    job.end("Failed", "UserError", QUOTA.format(family="x", limit=0, nodes=1, wanted=4))
    assert azure.look(run) != ran


# ----------------------------------------------------------------------------------------------------------- SageMaker


@pytest.fixture
def aws(tmp_path: Path, s3_environment: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Waiting]:
    world = SageMakerWorld(tmp_path / "world", moto=s3_environment, image="team/trainer:1", runs=False)
    settings = world.provider.settings
    world.plane.capacity_seconds = 1e9
    world.plane.crowded.add(settings.region)
    yield Waiting(world, tmp_path, monkeypatch, "sagemaker", region=settings.region, role=settings.role)
    world.close()


def set_steps(job: TrainingJob, *steps: str, status: str = "InProgress", started: bool, reason: str = "") -> None:
    """Make DescribeTrainingJob report these secondary states from now on."""
    job._stop.set()
    job._thread.join()
    moves = [{"Status": step, "StartTime": 1e9 + number} for number, step in enumerate(steps)]
    job.record |= {
        "TrainingJobStatus": status, "SecondaryStatus": steps[-1] if status == "InProgress" else status,
        "SecondaryStatusTransitions": moves, "FailureReason": reason,
    }  # fmt: skip
    job.record.pop("TrainingEndTime", None)
    if started:
        job.record["TrainingStartTime"] = 1e9
    else:
        job.record.pop("TrainingStartTime", None)


WAITED = ("Starting", "Pending", "Starting", "LaunchingMLInstances")
SAGEMAKER = [
    (WAITED, False, True),
    ((*WAITED, "PreparingTrainingStack", "Downloading"), False, True),
    ((*WAITED, "Downloading", "DownloadingTrainingImage"), True, False),
    ((*WAITED, "Downloading", "Training"), False, False),
    ((*WAITED, "Downloading", "Training", "Interrupted", "Starting", "Pending"), True, False),
    ((*WAITED, "Downloading", "Training", "Restarting", "OfNextYear"), True, False),
]


def test_sagemaker_s_job_moves_when_it_failed_for_capacity_before_its_script(aws: Waiting) -> None:
    """Check that a job in progress stays in any state and for any time: SageMaker itself ends its wait."""
    tried: set[tuple[str, bool]] = set()
    for number, (steps, started, leaves) in enumerate(SAGEMAKER):
        run = aws.submit(f"r{number}", instance_type="ml.m5.xlarge")
        (job,) = [job for (_, name), job in aws.world.plane.jobs.items() if f"r{number}" in name]
        for word, step in enumerate(steps, 1):
            if (step, started) not in tried:
                set_steps(job, *steps[:word], started=started)
                assert not aws.look(run), steps[:word]
            tried.add((step, started))
        set_steps(job, *steps, started=started)
        assert not aws.look(run)
        assert job.record["TrainingJobStatus"] == "InProgress", "no client may stop it"
        set_steps(job, *steps, status="Stopping", started=started)
        assert not aws.look(run)
        set_steps(job, *steps, "Failed", status="Failed", started=started, reason=CAPACITY)
        assert aws.look(run) == leaves, (steps, started)


# -------------------------------------------------------------------------------------------------------------- Vertex


@pytest.fixture
def google(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Waiting]:
    world = VertexWorld(tmp_path / "world", image="team/none:1", log_drain=0)
    settings = world.provider.settings
    world.plane.no_capacity = True
    table = {key: getattr(settings, key) for key in ("project", "location", "service_account", "log_drain")}
    yield Waiting(world, tmp_path, monkeypatch, "vertex", **table)
    world.close()


def set_state(job: CustomJob, state: str, *, error: str = "") -> None:
    """Put the job in a state from now on. Like every job, it has the startTime of its admission."""
    while not job.record.HasField("start_time"):
        time.sleep(0.01)
    job._stop.set()
    job.wait()
    for field in ("error", "end_time"):
        job.record.ClearField(field)
    if error:
        job.record.error.code, job.record.error.message = RESOURCE_EXHAUSTED, error
    job._move(f"JOB_STATE_{state}")


def write_start_record(run: Run) -> None:
    """Write node 0's start record, of an hour ago: the job had machines."""
    record = {"protocol": 1, "attempt": "0.0", "started": time.time() - HOUR, "after": None, "resumed_from": ""}
    run.store.files.write(f"runs/{run.run_id}/live/attempts/0.0.json", json.dumps(record).encode())


def on_google(google: Waiting, run_id: str) -> tuple[Run, CustomJob]:
    before = set(google.world.plane.jobs)
    run = google.submit(run_id, image=google.world.image)
    (name,) = set(google.world.plane.jobs) - before
    return run, google.world.plane.jobs[name]


def test_vertex_s_waiting_job_moves_once_it_is_over(google: Waiting) -> None:
    for state in ("QUEUED", "PENDING", "PAUSED"):
        run, job = on_google(google, state.lower())
        set_state(job, state)
        assert not google.look(run), "the job is not over yet"
        assert job.state == "JOB_STATE_CANCELLING"
        assert not google.look(run)
        set_state(job, "CANCELLED")
        assert google.look(run), state
        (refusal,) = run.result()["refusals"]
        assert refusal["category"] == "capacity"
        assert refusal["reason"].startswith(f"no machines within max_wait (1h): {state}")


def test_vertex_s_job_that_may_run_or_has_run_stays(google: Waiting) -> None:
    """Check PENDING too after the job lost its machines: its wait counts from then, not from its submission."""
    for state in ("RUNNING", "UPDATING", "PENDING"):
        run, job = on_google(google, state.lower())
        if state == "PENDING":  # a client has seen it run
            set_state(job, "RUNNING")
            assert not google.look(run)
            assert run.store.seen_running(run.run_id, 0) == pytest.approx(time.time(), abs=60)
        set_state(job, state)
        assert not google.look(run), state
        assert job.state == f"JOB_STATE_{state}", "no client may cancel it"
        assert run.store.expired(run.run_id, 0) is None


@pytest.mark.parametrize(("hours", "state", "error"), [(4, "EXPIRED", (0, "")), (2, "FAILED", (8, "no capacity"))])
def test_vertex_s_job_that_only_waited_costs_nothing_and_moves(
    google: Waiting, hours: float, state: str, error: tuple[int, str]
) -> None:
    """Check the recorded shape: a startTime of the admission, and hours until the end. It may run for 20 minutes."""
    run, job = on_google(google, state.lower())
    first = Run(store=run.store, run_id=run.run_id)
    set_state(job, state, error=error[1])
    ended = after_waiting(hours, state, error)
    for field, name in (("create_time", "createTime"), ("start_time", "startTime"), ("end_time", "endTime")):
        getattr(job.record, field).FromJsonString(ended[name])
    assert google.look(run), "the run is not in the next place"
    (refusal,) = run.result()["refusals"]
    assert refusal["category"] == "capacity"
    result = first.store.result(run.run_id)
    assert result is not None
    assert (result["category"], result["exit_code"], result["cost"]["estimate_usd"]) == ("capacity", 4, 0)
    assert [row["started"] for row in result["attempts"]] == [None]


@pytest.mark.parametrize("started", [False, True])
def test_vertex_s_lack_of_machines_moves_a_job_that_never_ran(google: Waiting, started: bool) -> None:
    for state, error in (("FAILED", STOCKOUT.format(region="here")), ("EXPIRED", ""), ("CANCELLED", "")):
        run, job = on_google(google, state.lower())
        if state == "CANCELLED":
            run.store.expire(run.run_id, 0, "no machines within max_wait (1h)")
        if started:
            write_start_record(run)
        set_state(job, state, error=error)
        assert google.look(run) != started, state
        assert run.result()["state"] == ("failed" if started else "pending")
