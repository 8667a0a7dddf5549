"""Provider ``vertex`` and an unreliable project: passing faults, lost answers, expired tokens, missing rights."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from worlds.vertex.life import CustomJob
from worlds.vertex.wire import Answer, Fault, Refusal
from worlds.vertex.world import BUCKET, VertexWorld

from cloudtrain.errors import (
    AuthError,
    CapacityError,
    CloudtrainError,
    ConflictError,
    LostContactError,
    PlatformError,
    QuotaError,
    SpecError,
    UnsupportedError,
)
from cloudtrain.provider_api.protocol import LayoutInput, LogLine, Request
from cloudtrain.provider_api.registry import find_provider
from cloudtrain.providers import _cloud
from cloudtrain.providers.vertex import api as own
from cloudtrain.providers.vertex import status as states
from cloudtrain.runs import handover
from cloudtrain.runs.run import Run
from cloudtrain.storage.timings import CLIENT_TIMINGS
from cloudtrain.testing.platform import FakePlatform

pytestmark = [pytest.mark.remote]

PATIENCE = 120
STOCKOUT = "Resources are insufficient in region: europe-west4. Please try a different region."


@pytest.fixture
def idle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[VertexWorld]:
    """Give a project without machines: its jobs wait until they are cancelled."""
    world = VertexWorld(tmp_path, image="team/none:1", log_drain=0)
    for name, value in world.plane.environ().items():
        monkeypatch.setenv(name, value)
    world.plane.no_capacity, world.plane.capacity_seconds = True, 1e9
    yield world
    world.close()


def only(world: VertexWorld) -> CustomJob:
    (job,) = world.plane.jobs.values()
    return job


def again(world: FakePlatform, **settings: Any) -> Any:
    """Return another client with the same settings."""
    return find_provider("vertex")(**{**dataclasses.asdict(world.provider.settings), **settings})


# ------------------------------------------------------------------------------------------------------------- a shell


def start(job: CustomJob, monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Make the waiting job's description one of a running job, with the pages of these replicas' shells."""
    served, pages = job.describe, {name: f"https://{name}.aiplatform-training" for name in names}
    more = {"state": "JOB_STATE_RUNNING", **({"webAccessUris": pages} if pages else {})}
    monkeypatch.setattr(job, "describe", lambda *, numbers: {**served(numbers=numbers), **more})


def test_the_shell_is_the_page_of_the_node(idle: VertexWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    run = idle.send(idle.plan({"interactive": True, "instance_count": 3}, run_id="shell"))
    with pytest.raises(SpecError, match="no nodes yet"):
        run.shell()
    start(only(idle), monkeypatch, "workerpool0-0", "workerpool1-0")
    assert [run.shell(node).url for node in (0, 1)] == [
        "https://workerpool0-0.aiplatform-training",
        "https://workerpool1-0.aiplatform-training",
    ]
    with pytest.raises(SpecError, match="not ready yet"):
        run.shell(2)
    with pytest.raises(UnsupportedError, match="takes no command"):
        run.shell(0, ["nvidia-smi"])


def test_a_job_without_a_shell_gives_a_hint(idle: VertexWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    run = idle.send(idle.plan(run_id="closed"))
    start(only(idle), monkeypatch)
    with pytest.raises(SpecError, match="lets no shell in") as caught:
        run.shell()
    assert (caught.value.field, caught.value.hint) == ("interactive", "send a job with --interactive")


# ------------------------------------------------------------------------------------------------------- passing faults


@pytest.mark.parametrize(
    "fault",
    [
        Fault.throttled("POST customJobs", 2, seconds=0),
        Fault.broken("POST customJobs", 2),
        Fault.broken("POST customJobs", 1, code="DEADLINE_EXCEEDED"),
        Fault.broken("GET customJobs", 2),
        Fault("POST customJobs"),
    ],
    ids=["throttled", "unavailable", "late", "list", "cut"],
)
def test_passing_faults_are_retried(idle: VertexWorld, fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_cloud, "SETTLE", 0.5)
    idle.plane.wire.faults.append(dataclasses.replace(fault))
    run = idle.send(idle.plan(run_id="again"))
    assert run.status().state == "pending"
    assert len(idle.plane.jobs) == 1


@pytest.mark.parametrize("lag", [0.0, 1.0])
def test_a_lost_answer_makes_no_second_job(idle: VertexWorld, lag: float) -> None:
    """Check also that no listing has the job yet."""
    idle.plane.list_lag = lag
    idle.plane.wire.faults += [
        Fault("POST customJobs", done=True),
        Fault.broken("POST customJobs", done=True),
    ]
    for run_id in ("lost", "late"):
        run = idle.send(idle.plan(run_id=run_id))
        assert run.status().state == "pending"
    assert len(idle.plane.jobs) == 2
    assert idle.plane.wire.count("POST customJobs") == 2


def page_of_a_proxy(world: VertexWorld, operation: str, *, times: int = 1, body: bytes = b"<html>") -> None:
    """Serve the call, but answer it with a page."""
    wire, remaining = world.plane.wire, [times]
    served = wire.answer

    def answer(method: str, target: str, sent: bytes, headers: Mapping[str, str]) -> Answer | None:
        found = served(method, target, sent, headers)
        if wire.calls[-1].operation != operation or remaining[0] == 0:
            return found
        remaining[0] -= 1
        return Answer(body)

    wire.answer = answer  # type: ignore[method-assign,assignment]


@pytest.mark.parametrize("body", [b"<html>", b'{"name": "proj', b"\xff", b"{}"], ids=["page", "cut", "bytes", "empty"])
def test_a_page_in_answer_to_a_creation_makes_no_second_job(
    idle: VertexWorld, body: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own, "FIRST_HOLD", 0.0)
    request, provider = idle.plan(run_id="page").request, again(idle)
    page_of_a_proxy(idle, "POST customJobs", body=body)
    with pytest.raises(LostContactError):
        provider.submit(request)
    monkeypatch.setattr(_cloud, "SETTLE", 0.0)
    idle.plane.list_lag, idle.plane.quotas["custom_model_training_cpus"] = 1e9, 0
    with pytest.raises(QuotaError, match="custom_model_training_cpus"):  # the first job uses up the quota
        provider.submit(request)
    idle.plane.list_lag = 0.0
    assert provider.submit(request) == only(idle).name


@pytest.mark.parametrize("comes", [True, False])
def test_a_refusal_after_a_lost_answer_counts_if_no_job_comes(
    idle: VertexWorld, comes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_cloud, "SETTLE", 0.0)
    monkeypatch.setattr(own, "FIRST_HOLD", 0.0)
    monkeypatch.setattr(find_provider("vertex"), "arrival_s", 2.0)
    plan, wire = idle.plan(run_id="unsure"), idle.plane.wire
    wire.faults.append(Fault("POST customJobs", done=comes))
    idle.plane.list_lag = 1.5
    served = wire.answer

    def answer(method: str, *words: Any) -> Any:
        if wire.count("POST customJobs"):
            idle.plane.quotas["custom_model_training_cpus"] = 0
        return served(method, *words)

    monkeypatch.setattr(wire, "answer", answer)
    if comes:
        assert idle.send(plan).result()["native_id"] == only(idle).name
        return
    with pytest.raises(QuotaError, match="custom_model_training_cpus"):
        idle.send(plan)
    assert plan.store.refused("unsure", 0) is not None
    assert idle.plane.jobs == {}


def test_contention_is_not_a_conflict_of_ids(idle: VertexWorld) -> None:
    idle.plane.wire.faults.append(Fault("POST customJobs", Refusal("ABORTED", "Please retry."), times=1))
    request = idle.plan(run_id="contended").request
    with pytest.raises(LostContactError):
        idle.provider.submit(request)
    assert idle.provider.submit(request) == only(idle).name


def test_a_store_that_answers_with_a_page_is_one_line(idle: VertexWorld) -> None:
    for number, operation in enumerate(("GET bucket", "POST entries")):
        request = idle.plan(run_id=f"proxied-{number}").request
        page_of_a_proxy(idle, operation)
        provider = again(idle)
        with pytest.raises(PlatformError, match="is not JSON"):
            provider.logs(provider.submit(request))


def test_a_client_that_slept_in_its_call_gives_way_to_the_first_job(idle: VertexWorld) -> None:
    request = idle.plan(run_id="slow").request
    provider, other, first = again(idle), again(idle).account, list[str]()
    prepared = provider.account._prepared

    def late(request: Request) -> Callable[[], str]:
        send = prepared(request)

        def asleep() -> str:
            idle.plane.list_lag = 0.0
            first.append(other._prepared(request)())
            return str(send())

        return asleep

    provider.account._prepared = late
    idle.plane.wire.faults.append(Fault("POST cancel", Refusal("INTERNAL", "Try again later."), times=1))
    with pytest.raises(LostContactError, match="is a second job of this request, and it cannot be stopped"):
        provider.submit(request)
    assert [provider.submit(request)] == first
    states = {job.name: job.wait() for job in idle.plane.jobs.values() if job.name not in first}
    assert list(states.values()) == ["JOB_STATE_CANCELLED"]


def test_many_clients_at_once_create_one_job(idle: VertexWorld) -> None:
    """Check this because the API takes no id: the lease in the store decides which client creates."""
    plans = [idle.plan(run_id="race") for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        runs = list(pool.map(lambda plan: idle.send(dataclasses.replace(plan, provider=again(idle))), plans))
    assert {run.result()["native_id"] for run in runs} == {only(idle).name}


def test_the_lease_of_a_dead_client_ends(idle: VertexWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check also the claim of an earlier version, which has the same name."""
    assert find_provider("vertex").arrival_s == CLIENT_TIMINGS.sending == 300
    monkeypatch.setattr(CLIENT_TIMINGS, "sending", 2.0)
    monkeypatch.setattr(find_provider("vertex"), "arrival_s", 2.0)
    for number, mark in enumerate([b'{"client": "0123456789abcdef"}', None]):
        plan = idle.plan(run_id=f"dead-{number}")
        if mark is None:
            with handover.sending(plan.store, plan.run_id, plan.request, arrival=2.0, say=print) as lease:
                lease.kept = True
        else:
            plan.store.files.write(f"runs/{plan.run_id}/attempts/0/sending-0.json", mark)
        began = time.monotonic()
        run = idle.send(plan)
        assert run.result()["native_id"] in idle.plane.jobs
        assert time.monotonic() - began >= 0.6, "the second client must wait for the end of the lease"
    assert len(idle.plane.jobs) == 2


def test_a_job_of_an_earlier_run_of_that_id_is_not_taken_for_this_one(idle: VertexWorld) -> None:
    """Check after the run's folder was deleted and its id used again."""
    first, other = idle.plan(run_id="twice").request, idle.plan({"max_runtime": 60}, run_id="twice").request
    idle.provider.submit(first)
    with pytest.raises(ConflictError, match="an earlier run of that id") as caught:
        idle.provider.submit(other)
    assert (caught.value.exit_code, caught.value.field) == (2, "run_id")
    assert idle.provider.find(other) is None
    assert len(idle.plane.jobs) == 1


def test_a_throttled_wait_obeys_retry_after(idle: VertexWorld) -> None:
    run, wire = idle.send(idle.plan(run_id="slowly")), idle.plane.wire
    wire.faults.append(Fault.throttled("GET customJob", 1, seconds=3))
    threading.Timer(1.0, only(idle).stop).start()
    before = wire.count("GET customJob")
    assert run.wait(timeout=PATIENCE, poll=0.2)["state"] == "cancelled"
    first, second, *_ = [call.at for call in wire.calls if call.operation == "GET customJob"][before:]
    assert second - first >= 3


def test_a_revoked_token_is_replaced(idle: VertexWorld) -> None:
    native = str(idle.send(idle.plan(run_id="expires")).result()["native_id"])
    wire = idle.plane.wire
    for _ in range(2):
        idle.plane.identity.expire()
        before = wire.count("POST token")
        assert idle.provider.status(native).state == "pending"
        assert wire.count("POST token") == before + 1
    idle.plane.identity.expire()
    idle.plane.identity.signed_in = False
    with pytest.raises(AuthError, match="application-default login"):
        idle.provider.status(native)
    idle.plane.identity.signed_in = True
    assert idle.provider.status(native).state == "pending"


# ------------------------------------------------------------------------------------------------------------- statuses


@pytest.mark.parametrize(("native", "state"), [(8, "pending"), (10, "running"), (99, "running"), (6, "running")])
def test_a_status_that_is_not_the_end_is_not_taken_for_it(idle: VertexWorld, native: int, state: str) -> None:
    """Check PAUSED, UPDATING, an unknown state, and CANCELLING."""
    run = idle.send(idle.plan(run_id="odd"))
    idle.plane.unknown[only(idle).name] = native
    assert run.status().state == state
    idle.plane.unknown.clear()
    assert run.status().state == "pending"


@pytest.mark.parametrize(
    ("end", "category", "code"),
    [
        (("FAILED", 8, STOCKOUT), "capacity", 4),
        (("FAILED", 13, "Internal error occurred for the current attempt."), "infra", 9),
        (("EXPIRED", 0, ""), "capacity", 4),
        (("PARTIALLY_SUCCEEDED", 0, ""), "infra", 9),
    ],
)
def test_every_end_ends_a_wait(idle: VertexWorld, end: tuple[str, int, str], category: str, code: int) -> None:
    """Check this because Google's own high-level client waits for ever for an expired job."""
    run = idle.send(idle.plan(run_id="ends"))
    threading.Thread(target=only(idle).end, args=end).start()
    result = run.wait(timeout=PATIENCE, poll=0.2)
    assert (result["state"], result["category"], result["exit_code"]) == ("failed", category, code)


def test_a_wait_that_is_too_long_ends_as_a_lack_of_capacity(idle: VertexWorld) -> None:
    run = idle.send(idle.plan({"max_wait": 1}, run_id="never"))
    result = run.wait(timeout=PATIENCE, poll=0.2)
    assert (result["state"], result["category"], result["exit_code"]) == ("failed", "capacity", 4)
    assert only(idle).state == "JOB_STATE_CANCELLED"


def test_the_platform_itself_ends_a_wait_for_flexible_machines(idle: VertexWorld) -> None:
    run = idle.send(idle.plan({"max_wait": 1, "gpu": "L4:1"}, run_id="flex"))
    assert only(idle).wait() == "JOB_STATE_EXPIRED"
    result = run.wait(timeout=PATIENCE, poll=0.2)
    assert (result["category"], result["exit_code"]) == ("capacity", 4)


def test_another_gpu_of_the_list_follows_a_stockout(idle: VertexWorld) -> None:
    """Check a stockout as a refusal, and as the end of a job."""
    from cloudtrain.runs.retry import Retry

    run = idle.send(idle.plan({"gpu": ["L4:1", "T4:1"]}, run_id="next"))
    first = only(idle)
    threading.Thread(target=first.end, args=("FAILED", 8, STOCKOUT)).start()
    first.wait()
    result = run.reconcile(retry=Retry(run))
    assert result["state"] == "pending"
    specs = [job.spec.worker_pool_specs[0].machine_spec for job in idle.plane.jobs.values()]
    assert [spec.machine_type for spec in specs] == ["g2-standard-4", "n1-standard-4"]


# ----------------------------------------------------------------------------------------------------------------- logs


def lines_of(run: Run) -> list[str]:
    return [line.text for line in run.logs()]


def test_the_end_waits_for_a_throttled_log(idle: VertexWorld) -> None:
    """Check this because no later page comes, and no segment has the platform's own lines."""
    run = idle.send(idle.plan(run_id="throttled"))
    job = only(idle)
    idle.plane.entries.put(job.id, "service", ["the platform's own line"])
    run.cancel()
    job.wait()
    assert run.status().final
    idle.plane.wire.faults.append(Fault.throttled("POST entries", 2, seconds=2))
    assert "the platform's own line" in lines_of(run)


def test_lines_are_of_their_nodes_and_come_once(idle: VertexWorld) -> None:
    """Check lines that come late, twice, in pages, and as JSON."""
    run = idle.send(idle.plan({"instance_count": 3}, run_id="lines"))
    job, entries = only(idle), idle.plane.entries
    entries.page_entries, entries.twice, entries.repeats = 3, lambda entry: True, 1
    entries.delay = lambda task, text: 2.0 if "late" in text else 0.0
    names = ["workerpool0-0", "workerpool1-0", "workerpool1-1"]
    for name in names:
        entries.put(job.id, name, ["late", *(f"{name} line {n}" for n in range(8))])
    entries.put(job.id, names[0], ['{"message": "of JSON", "severity": "INFO"}'])
    found: list[LogLine] = []
    cursor: Any = None
    deadline = time.monotonic() + 4
    while time.monotonic() < deadline:
        page = idle.provider.logs(job.name, cursor)
        cursor = json.loads(json.dumps(page.cursor))
        found += page.lines
        if not page.more:
            time.sleep(0.3)
    for number, name in enumerate(names):
        own_lines = [line.text for line in found if line.node == str(number) and line.text != "of JSON"]
        assert sorted(own_lines) == sorted(["late", *(f"{name} line {n}" for n in range(8))])
    assert [line.node for line in found if line.text == "of JSON"] == ["0"]
    run.cancel()


def test_a_log_is_drained_for_the_time_of_the_setting(idle: VertexWorld) -> None:
    provider = again(idle, log_drain=4)
    native = provider.submit(idle.plan(run_id="drained").request)
    job = only(idle)
    idle.plane.entries.delay = lambda task, text: 2.0 if "late" in text else 0.0
    idle.plane.entries.put(job.id, "workerpool0-0", ["late"])
    job.stop()
    job.wait()
    assert provider.status(native).final
    found, cursor, more = [], None, True
    while more:
        page = provider.logs(native, cursor)
        found += [line.text for line in page.lines]
        cursor, more = page.cursor, page.more
    assert "late" in found


def test_a_log_is_drained_too_after_another_client_saw_the_end(
    idle: VertexWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check also a client whose clock is fast."""
    from cloudtrain.providers.vertex import logs

    monkeypatch.setattr(logs, "LOOK", 0.2)
    provider = again(idle, log_drain=3)
    native = provider.submit(idle.plan(run_id="elsewhere").request)
    cursor = provider.logs(native).cursor
    idle.plane.entries.delay = lambda task, text: 1.0
    idle.plane.entries.put(only(idle).id, "workerpool0-0", ["late"])
    only(idle).stop()
    only(idle).wait()
    time.sleep(0.3)
    monkeypatch.setattr(states, "over_for", lambda job: 3600.0)
    found, more = [], True
    while more:
        page = provider.logs(native, cursor)
        found += [line.text for line in page.lines]
        cursor, more = page.cursor, page.more
    assert "late" in found


# ------------------------------------------------------------------------------------------------------ refused callers


def refused(world: VertexWorld, kind: type[CloudtrainError], code: int, *says: str, **settings: Any) -> None:
    """Submit, and check that this ends in one line and without a job."""
    plan = world.plan(run_id="refused")
    provider = again(world, **settings)
    request = provider.plan(plan.job, plan.layout)
    with pytest.raises(kind) as caught:
        provider.submit(request)
    assert type(caught.value) is kind, caught.value
    assert caught.value.exit_code == code
    assert "\n" not in str(caught.value)
    text = caught.value.with_hint()
    for word in says:
        assert word in text
    assert world.plane.jobs == {}


def test_without_credentials(idle: VertexWorld, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    refused(idle, AuthError, 3, "gcloud auth application-default login")
    with pytest.raises(AuthError, match="gcloud auth application-default login"):
        idle.provider.storage(idle.store)


def test_with_credentials_that_are_revoked(idle: VertexWorld) -> None:
    idle.plane.identity.signed_in = False
    refused(idle, AuthError, 3, "sign in again")


def test_with_another_project(idle: VertexWorld) -> None:
    refused(idle, AuthError, 3, "projects/elsewhere", "check vertex.project", project="elsewhere")


def test_with_the_api_switched_off(idle: VertexWorld) -> None:
    idle.plane.wire.faults.append(Fault.disabled("GET customJobs", "contract", 10))
    refused(idle, AuthError, 3, "gcloud services enable aiplatform.googleapis.com")


def test_with_a_service_account_that_the_caller_may_not_give(idle: VertexWorld) -> None:
    other = "other@contract.iam.gserviceaccount.com"
    refused(idle, AuthError, 3, f"add-iam-policy-binding {other}", service_account=other)


def test_beyond_a_quota(idle: VertexWorld) -> None:
    idle.plane.quotas["custom_model_training_cpus"] = 0
    refused(idle, QuotaError, 4, "ask for more of custom_model_training_cpus")


def test_a_stockout_may_come_as_an_exhausted_resource(idle: VertexWorld) -> None:
    """Check this because HTTP 429 is also the status of a quota, of which the user need not ask for more."""
    idle.plane.wire.faults.append(Fault("POST customJobs", Refusal("RESOURCE_EXHAUSTED", STOCKOUT), times=10))
    refused(idle, CapacityError, 4, "another machine, location or time")


@pytest.mark.parametrize(
    ("location", "kind", "says"),
    [("US-CENTRAL1", "region", "us-central1"), ("EU", "multi-region", "no job can mount")],
)
def test_with_a_bucket_elsewhere(idle: VertexWorld, location: str, kind: str, says: str) -> None:
    idle.plane.gcs.places[BUCKET] = (location, kind)
    refused(idle, SpecError, 2, "store: ", says, "gcloud storage buckets create gs://NAME --location=europe-west4")


def test_with_inputs_in_a_bucket_that_no_job_can_mount(idle: VertexWorld) -> None:
    idle.plane.gcs.make("wide", "EU", "multi-region")
    idle.plane.gcs.make("far", "US-CENTRAL1")
    plan = idle.plan(run_id="inputs")
    inputs = {name: LayoutInput(url=f"gs://{name}/x") for name in ("far", "wide")}
    with pytest.raises(SpecError, match="gs://wide is a multi-region bucket") as caught:
        idle.provider.submit(idle.provider.plan(plan.job, dataclasses.replace(plan.layout, inputs=inputs)))
    assert caught.value.field == "inputs.wide"
    idle.provider.submit(idle.provider.plan(plan.job, dataclasses.replace(plan.layout, inputs={"far": inputs["far"]})))
    assert len(idle.plane.jobs) == 1


def test_a_bucket_that_the_caller_may_not_read_is_accepted(idle: VertexWorld) -> None:
    denied = Refusal("PERMISSION_DENIED", "tester does not have storage.buckets.get access")
    idle.plane.wire.faults.append(Fault("GET bucket", denied, times=1))
    idle.provider.submit(idle.plan(run_id="trusted").request)
    assert len(idle.plane.jobs) == 1


def test_errors_are_ours(idle: VertexWorld) -> None:
    codes = ("INVALID_ARGUMENT", "UNAUTHENTICATED", "PERMISSION_DENIED", "NOT_FOUND", "ALREADY_EXISTS",
             "RESOURCE_EXHAUSTED", "INTERNAL", "UNAVAILABLE")  # fmt: skip
    for code in codes:
        idle.plane.wire.faults[:] = [Fault("*", Refusal(code, "something"), times=1000)]
        provider = again(idle)
        for call in (provider.status, provider.logs, provider.cancel):
            with pytest.raises(CloudtrainError) as caught:
                call(idle.nowhere)
            assert "\n" not in str(caught.value)
    idle.plane.wire.faults[:] = [Fault("*", times=1000)]
    with pytest.raises(LostContactError):
        again(idle).status(idle.nowhere)
    idle.plane.wire.faults.clear()


# -------------------------------------------------------------------------------------------------------------- imports


def test_a_plan_and_help_load_nothing_of_googles() -> None:
    code = (
        "import sys\nfrom cloudtrain.cli import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "print(sorted(m for m in sys.modules if m.partition('.')[0] in ('gcsfs', 'requests', 'grpc')"
        " or m.startswith(('google.auth', 'google.cloud.a', 'google.protobuf', 'google.api_core'))))"
    )
    environ = {**os.environ, "CLOUDTRAIN_PROVIDER": "vertex"}
    done = subprocess.run(
        [sys.executable, "-c", code, "--help"], capture_output=True, text=True, env=environ, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]", done.stdout
