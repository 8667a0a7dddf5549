"""On the loopback Azure ML: a job that stays Queued, clients that reconcile it, and a store by its datastore's name.

No job runs, so no engine is needed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from clients import CALLS, PATIENCE
from jobs import Jobs, dying
from worlds.azureml.world import AzureMLWorld

from cloudtrain.errors import SpecError
from cloudtrain.runs.run import Run, open_run
from cloudtrain.settings.settings import Settings

pytestmark = [pytest.mark.remote, pytest.mark.slow]

STEPS = {
    **CALLS,
    "expire": "cloudtrain.store.store:Store.expire",
    "cancel": "cloudtrain.providers.{provider}:Provider.cancel",
}


@pytest.fixture
def idle(tmp_path: Path, azure_server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[AzureMLWorld]:
    """Give a workspace without machines."""
    world = AzureMLWorld(tmp_path / "world", azurite=azure_server, image="team/trainer:1", runs=False)
    for name, value in world.plane.environ().items():
        monkeypatch.setenv(name, value)
    world.plane.no_capacity = True
    yield world
    world.close()


@pytest.fixture
def jobs(idle: AzureMLWorld, tmp_path: Path) -> Iterator[Jobs]:
    (tmp_path / "jobs").mkdir()
    made = Jobs(tmp_path / "jobs")
    yield made
    made.close()


def waits(idle: AzureMLWorld) -> Run:
    """Return a run that has waited longer than it may, with one retry left."""
    run = idle.send(idle.plan({"max_wait": 1, "retries": 1}, run_id="waits"))
    time.sleep(1.2)
    assert run.status().state == "pending"
    return run


@pytest.mark.proof
def test_two_reconciling_clients_end_one_wait_and_start_one_attempt(idle: AzureMLWorld, jobs: Jobs) -> None:
    run = waits(idle)
    deadline = time.monotonic() + PATIENCE
    while run.store.result("waits") is None:
        assert time.monotonic() < deadline, run.result()
        started = [jobs.start("reconcile", target, "--json") for target in (run.url, run.store.url)]
        for process in started:
            out, err = process.communicate(timeout=PATIENCE)
            assert process.returncode == 0, out + err
        assert len(idle.plane.jobs) <= 2
    result = run.result()
    assert (result["state"], result["category"], result["exit_code"]) == ("failed", "capacity", 4)
    assert result["reason"] == "no machines within max_wait (1s): Queued"
    assert run.store.attempts("waits") == [0, 1]
    assert len(idle.plane.jobs) == 2


@pytest.mark.parametrize(
    ("step", "moment"),
    [
        pytest.param("expire", "after", marks=pytest.mark.proof),
        pytest.param("submit", "after", marks=pytest.mark.proof),
        pytest.param("cancel", "after", marks=pytest.mark.proof),
        pytest.param("create_attempt", "after", marks=pytest.mark.proof),
        pytest.param("write_submitted", "before", marks=pytest.mark.proof),
    ],
)
def test_a_client_that_dies_reconciling_leaves_one_job_an_attempt(
    idle: AzureMLWorld, jobs: Jobs, step: str, moment: str
) -> None:
    run = waits(idle)
    python = dying(STEPS[step].format(provider="azureml"), moment)
    for _ in range(20):  # the first client may only stop the waiting job
        client = jobs.start("reconcile", run.url, python=python)
        out, err = client.communicate(timeout=PATIENCE)
        assert client.returncode in (0, 99), out + err
        if client.returncode == 99:
            break
    assert client.returncode == 99, "the client did not reach the call"
    deadline = time.monotonic() + PATIENCE
    while run.store.result("waits") is None:
        assert time.monotonic() < deadline, run.result()
        done = jobs.here("reconcile", run.store.url, "--json")
        assert done.code == 0, done.err
    assert run.result()["category"] == "capacity"
    assert len(idle.plane.jobs) == len(run.store.attempts("waits")) == 2


def test_a_store_by_its_datastore_s_name_is_the_same_store(
    idle: AzureMLWorld, jobs: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = idle.send(idle.plan(run_id="found"))
    found = Settings(store="azureml://datastores/workspaceblobstore/paths/store", tables={"azureml": idle.settings})
    before = idle.plane.wire.count("GET datastore")
    url = found.resolved()
    assert idle.plane.wire.count("GET datastore") == before + 1
    assert url.startswith(f"abfs://{idle.plane.container}@")
    assert url.endswith("/store")
    assert open_run(f"{url}/runs/found", store_url=url).result()["native_id"] == run.result()["native_id"]
    with pytest.raises(SpecError, match="write abfs://"):
        found.resolved(ask=False)
    assert idle.plane.wire.count("GET datastore") == before + 1
    assert json.loads(run.store.files.read("runs/found/run.json"))["run_id"] == "found"
