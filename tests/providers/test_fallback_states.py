"""What each cloud's states and times say of a job that another place may get: whether it is over, and ever ran.

The job is on the cloud's own wire; the place that follows is a folder, which takes any. None of them runs a script.
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
from vertex_recorded import after_waiting
from worlds.azureml.life import QUOTA
from worlds.azureml.world import AzureMLWorld
from worlds.sagemaker.life import CAPACITY, TrainingJob
from worlds.sagemaker.world import SageMakerWorld
from worlds.vertex.life import RESOURCE_EXHAUSTED, STOCKOUT, CustomJob
from worlds.vertex.world import VertexWorld

from cloudtrain.estimator import Estimator
from cloudtrain.runs.fallback import FallbackPolicy
from cloudtrain.runs.run import Run
from cloudtrain.store import runtime_zip

pytestmark = [pytest.mark.remote]

HOUR = 3600.0
built = cache(runtime_zip.build)
"""What it takes is no part of these trials."""


class Waiting:
    """Runs whose jobs wait for machines in a cloud; those that are left begin in the second place."""

    def __init__(self, world: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, **table: Any) -> None:
        self.world, self.name = world, name
        foldercloud.install(folder / "site")
        (folder / "site/foldercloud.py").unlink()  # the module is that of this process
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
        """Two days ago; it may wait for an hour, and run for twenty minutes."""
        waits = {} if self.name == "sagemaker" else {"max_wait": int(HOUR)}
        given: dict[str, Any] = {"max_runtime": 1200, "on": {self.name: fields}, **waits}
        run = Estimator(entry_point="train.py", **given).fit(wait=False, run_id=run_id)
        key = f"runs/{run_id}/attempts/0/submitted.json"
        noted = json.loads(run.store.files.read(key))
        run.store.files.write(key, json.dumps({**noted, "time": noted["time"] - 48 * HOUR}).encode())
        return run

    def look(self, run: Run) -> bool:
        """What any client does that comes by; whether the run is in the second place by now."""
        run.reconcile(retry=FallbackPolicy(run))
        return f"{run.run_id}.0" in self.second.jobs()


# --------------------------------------------------------------------------------------------------------------- Azure


@pytest.fixture
def azure(tmp_path: Path, azure_server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Waiting]:
    world = AzureMLWorld(tmp_path / "world", azurite=azure_server, image="team/trainer:1", runs=False)
    world.plane.no_capacity = True
    yield Waiting(world, tmp_path, monkeypatch, "azureml", **world.workspace())
    world.close()


def on_azure(azure: Waiting, run_id: str, shown: str = "", started: bool = False) -> tuple[Run, Any]:
    """A run, and its job, which is ``shown`` in that state; Azure has stamped a start, of the time it was submitted."""
    run = azure.submit(run_id, image=azure.world.image)
    job = azure.world.job(run)
    job.started = time.time() - 2 * HOUR if started else None
    if shown:
        azure.world.plane.unknown[job.name] = shown
    return run, job


@pytest.mark.parametrize("started", [False, True])
def test_azure_s_job_that_waits_in_any_state_goes_on_once_it_is_over(azure: Waiting, started: bool) -> None:
    """Whatever the time says that Azure calls a start: no log of a script, so none has run."""
    for shown in ("Starting", "Provisioning", "Preparing", "Queued", "Paused"):
        run, job = on_azure(azure, shown.lower(), shown, started)
        assert not azure.look(run), "it was only asked to end"
        azure.world.plane.unknown[job.name] = "CancelRequested"
        assert not azure.look(run)
        assert job.wait() == "Canceled"
        del azure.world.plane.unknown[job.name]
        assert azure.look(run), shown
        (refusal,) = run.result()["refusals"]
        assert (refusal["category"], refusal["reason"]) == ("capacity", f"no machines within max_wait (1h): {shown}")


def test_azure_s_job_that_may_run_is_left_alone(azure: Waiting) -> None:
    for shown in ("Running", "Finalizing", "NotResponding", "CancelRequested", "OfNextYear"):
        run, job = on_azure(azure, shown.lower(), shown, started=True)
        assert not azure.look(run), shown
        assert job.status == "Queued", "nobody has asked it to end"
        assert run.store.expired(run.run_id, 0) is None


def test_azure_s_job_whose_script_has_a_log_stays_where_it_ran(azure: Waiting) -> None:
    """Its low-priority nodes were taken, and it waits once more."""
    run, job = on_azure(azure, "again", started=True)
    job.log(0)
    assert not azure.look(run)
    job.wait()
    assert not azure.look(run)
    assert run.result()["state"] == "failed"


def test_azure_s_job_that_was_seen_to_run_has_run_though_the_history_lists_no_log_yet(azure: Waiting) -> None:
    run, job = on_azure(azure, "behind", "Running", started=True)
    assert not azure.look(run)
    del azure.world.plane.unknown[job.name]
    job.end("Failed", "UserError", QUOTA.format(family="x", limit=0, nodes=1, wanted=4))
    native = run.store.submitted(run.run_id, 0)
    assert native is not None
    assert run.provider.status(str(native["native_id"])).started == pytest.approx(job.started, abs=1)


@pytest.mark.parametrize("ran", [False, True])
def test_azure_s_word_on_a_quota_counts_unless_the_script_ran(azure: Waiting, ran: bool) -> None:
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


def stands(job: TrainingJob, *steps: str, status: str = "InProgress", started: bool, reason: str = "") -> None:
    """From now on DescribeTrainingJob says that it went through these secondary states."""
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


def test_sagemaker_s_job_goes_on_when_it_has_failed_for_capacity_and_its_script_never_began(aws: Waiting) -> None:
    """While it is in progress, in whatever state and however long, it stays: who lets it wait is SageMaker."""
    seen: set[tuple[str, bool]] = set()
    for number, (steps, started, leaves) in enumerate(SAGEMAKER):
        run = aws.submit(f"r{number}", instance_type="ml.m5.xlarge")
        (job,) = [job for (_, name), job in aws.world.plane.jobs.items() if f"r{number}" in name]
        for word, step in enumerate(steps, 1):
            if (step, started) not in seen:
                stands(job, *steps[:word], started=started)
                assert not aws.look(run), steps[:word]
            seen.add((step, started))
        stands(job, *steps, started=started)
        assert not aws.look(run)
        assert job.record["TrainingJobStatus"] == "InProgress", "nobody has stopped it"
        stands(job, *steps, status="Stopping", started=started)
        assert not aws.look(run)
        stands(job, *steps, "Failed", status="Failed", started=started, reason=CAPACITY)
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


def is_now(job: CustomJob, state: str, *, error: str = "") -> None:
    """From now on the job is in that state. It has the startTime that every job has, of its admission."""
    while not job.record.HasField("start_time"):
        time.sleep(0.01)
    job._stop.set()
    job.wait()
    for field in ("error", "end_time"):
        job.record.ClearField(field)
    if error:
        job.record.error.code, job.record.error.message = RESOURCE_EXHAUSTED, error
    job._move(f"JOB_STATE_{state}")


def begun(run: Run) -> None:
    """Node 0 has left a start record: the job had machines, an hour ago."""
    record = {"protocol": 1, "attempt": "0.0", "started": time.time() - HOUR, "after": None, "resumed_from": ""}
    run.store.files.write(f"runs/{run.run_id}/live/attempts/0.0.json", json.dumps(record).encode())


def on_google(google: Waiting, run_id: str) -> tuple[Run, CustomJob]:
    before = set(google.world.plane.jobs)
    run = google.submit(run_id, image=google.world.image)
    (name,) = set(google.world.plane.jobs) - before
    return run, google.world.plane.jobs[name]


def test_vertex_s_job_that_waits_in_any_state_goes_on_once_it_is_over(google: Waiting) -> None:
    for state in ("QUEUED", "PENDING", "PAUSED"):
        run, job = on_google(google, state.lower())
        is_now(job, state)
        assert not google.look(run), "it was only asked to end"
        assert job.state == "JOB_STATE_CANCELLING"
        assert not google.look(run)
        is_now(job, "CANCELLED")
        assert google.look(run), state
        (refusal,) = run.result()["refusals"]
        assert refusal["category"] == "capacity"
        assert refusal["reason"].startswith(f"no machines within max_wait (1h): {state}")


def test_vertex_s_job_that_may_run_or_has_run_is_left_alone(google: Waiting) -> None:
    """PENDING is also one that has lost its machines: it has waited since then, and not since it was submitted."""
    for state in ("RUNNING", "UPDATING", "PENDING"):
        run, job = on_google(google, state.lower())
        if state == "PENDING":  # a client saw it run before
            is_now(job, "RUNNING")
            assert not google.look(run)
            assert run.store.seen_running(run.run_id, 0) == pytest.approx(time.time(), abs=60)
        is_now(job, state)
        assert not google.look(run), state
        assert job.state == f"JOB_STATE_{state}", "nobody has asked it to end"
        assert run.store.expired(run.run_id, 0) is None


@pytest.mark.parametrize(("hours", "state", "error"), [(4, "EXPIRED", (0, "")), (2, "FAILED", (8, "no capacity"))])
def test_vertex_s_job_that_only_waited_costs_nothing_and_leads_on(
    google: Waiting, hours: float, state: str, error: tuple[int, str]
) -> None:
    """In the recorded shape: a startTime of the admission, and hours until the end. It may run for 20 minutes."""
    run, job = on_google(google, state.lower())
    first = Run(store=run.store, run_id=run.run_id)
    is_now(job, state, error=error[1])
    told = after_waiting(hours, state, error)
    for field, name in (("create_time", "createTime"), ("start_time", "startTime"), ("end_time", "endTime")):
        getattr(job.record, field).FromJsonString(told[name])
    assert google.look(run), "the next place has it"
    (refusal,) = run.result()["refusals"]
    assert refusal["category"] == "capacity"
    left = first.store.result(run.run_id)
    assert left is not None
    assert (left["category"], left["exit_code"], left["cost"]["estimate_usd"]) == ("capacity", 4, 0)
    assert [row["started"] for row in left["attempts"]] == [None]


@pytest.mark.parametrize("started", [False, True])
def test_vertex_s_want_of_machines_leads_on_where_the_job_was_never_running(google: Waiting, started: bool) -> None:
    for state, error in (("FAILED", STOCKOUT.format(region="here")), ("EXPIRED", ""), ("CANCELLED", "")):
        run, job = on_google(google, state.lower())
        if state == "CANCELLED":
            run.store.expire(run.run_id, 0, "no machines within max_wait (1h)")
        if started:
            begun(run)
        is_now(job, state, error=error)
        assert google.look(run) != started, state
        assert run.result()["state"] == ("failed" if started else "pending")
