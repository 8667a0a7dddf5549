"""Provider ``azureml`` and an unreliable workspace: passing faults, lost answers, expired tokens, missing roles."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from azureml_client import AzureClient
from clients import PATIENCE, ids_of_a_race
from jobs import Done, Jobs
from worlds.azureml.life import PREEMPTED, CommandJob
from worlds.azureml.plane import SUBSCRIPTION
from worlds.azureml.wire import Fault, Refusal
from worlds.azureml.world import AzureMLWorld

from cloudtrain.errors import AuthError, CloudtrainError, ConflictError, QuotaError, SpecError, UnsupportedError
from cloudtrain.provider_api.registry import find_provider
from cloudtrain.runs.run import Run

pytestmark = [pytest.mark.remote]


@pytest.fixture
def idle(tmp_path: Path, azure_environment: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[AzureMLWorld]:
    """Give a workspace without machines: its jobs stay Queued until they are cancelled."""
    world = AzureMLWorld(tmp_path, azurite=azure_environment, image="team/none:1", runs=False)
    for name, value in world.plane.environ().items():
        monkeypatch.setenv(name, value)
    world.plane.no_capacity = True
    yield world
    world.close()
    assert world.plane.wire.leaks == [], "a token of the resource manager went to another service"


@pytest.fixture
def client(idle: AzureMLWorld, tmp_path: Path) -> Iterator[AzureClient]:
    (tmp_path / "jobs").mkdir()
    jobs = Jobs(tmp_path / "jobs")
    jobs.write("hold/train.py", "print('hello')\n")
    yield AzureClient(idle, jobs)
    jobs.close()


def only(world: AzureMLWorld) -> CommandJob:
    (job,) = world.plane.jobs.values()
    return job


# ------------------------------------------------------------------------------------------------------------- a shell


def test_the_shell_is_the_job_s_ssh_service(idle: AzureMLWorld) -> None:
    request = idle.plan({"interactive": True, "instance_count": 2}).request
    key = idle.provider.settings.ssh_public_key
    assert request.body["services"] == {"cloudtrain_ssh": {"type": "ssh", "nodes": "all", "ssh_public_keys": key}}
    native = idle.provider.submit(request)
    (sent,) = only(idle).body["properties"]["services"].values()
    assert (sent["jobServiceType"], sent["properties"]) == ("SSH", {"sshPublicKeys": key})
    way = idle.provider.shell(request, native, 1, [], tty=True)
    own = idle.provider.settings
    where = ["--subscription", own.subscription_id, "--resource-group", own.resource_group]
    words = ["--name", request.body["name"], "--node-index", "1", *where, "--workspace-name", own.workspace_name]
    assert way.argv == ["az", "ml", "job", "connect-ssh", *words]
    with pytest.raises(UnsupportedError, match="takes no command"):
        idle.provider.shell(request, native, 0, ["nvidia-smi"], tty=False)


def test_a_shell_needs_a_key_and_a_job_that_lets_it_in(idle: AzureMLWorld) -> None:
    request = idle.plan().request
    with pytest.raises(SpecError, match="lets no shell in"):
        idle.provider.shell(request, idle.provider.submit(request), 0, [], tty=True)
    given = {**dataclasses.asdict(idle.provider.settings), "ssh_public_key": ""}
    idle.provider = find_provider("azureml")(**given)
    with pytest.raises(SpecError, match="interactive needs it") as caught:
        idle.plan({"interactive": True})
    assert caught.value.field == "azureml.ssh_public_key"


# ------------------------------------------------------------------------------------------------------- passing faults


@pytest.mark.parametrize(
    "fault",
    [Fault.throttled("PUT job", 2), Fault.broken("PUT job", 2), Fault.broken("PUT job", 2, status=503)],
    ids=lambda fault: fault.error.status,
)
def test_passing_faults_are_retried(idle: AzureMLWorld, fault: Fault) -> None:
    idle.plane.wire.faults.append(dataclasses.replace(fault))
    run = idle.send(idle.plan(run_id="again"))
    assert run.status().state == "pending"
    assert idle.plane.wire.count("PUT job") == 3
    assert len(idle.plane.jobs) == 1


@pytest.mark.parametrize("fault", [Fault("PUT job", done=True), Fault.broken("PUT job", done=True)])
def test_a_lost_answer_makes_no_second_job(idle: AzureMLWorld, fault: Fault) -> None:
    idle.plane.wire.faults.append(dataclasses.replace(fault))
    run = idle.send(idle.plan(run_id="lost"))
    assert run.status().state == "pending"
    assert len(idle.plane.jobs) == 1


def test_many_clients_at_once_create_one_job(idle: AzureMLWorld) -> None:
    found = ids_of_a_race(idle)
    assert len(idle.plane.jobs) == 1
    assert found == {idle.provider.find(idle.plan(run_id="race").request)}


def test_a_job_that_another_client_has_just_created_is_the_same(idle: AzureMLWorld) -> None:
    plan = idle.plan(run_id="race")
    run = idle.send(plan)
    idle.plane.wire.faults.append(Fault("GET job", Refusal(404, "NotFound", "not yet")))
    assert idle.provider.submit(plan.request) == run.result()["native_id"]
    assert idle.plane.wire.count("PUT job") == 2
    assert len(idle.plane.jobs) == 1


def test_a_foreign_job_of_that_name_is_a_conflict(idle: AzureMLWorld) -> None:
    plan = idle.plan(run_id="taken")
    name, body = idle.serialised(plan.request)
    body["properties"]["tags"] = {}
    idle.plane.jobs[name] = CommandJob(idle.plane, name, body, idle.image)
    with pytest.raises(ConflictError) as caught:
        idle.send(plan)
    assert (caught.value.exit_code, caught.value.field) == (2, "run_id")
    assert idle.provider.find(plan.request) is None
    assert idle.plane.wire.count("PUT job") == 0


def test_a_job_of_an_earlier_run_of_that_id_is_not_taken_for_this_one(idle: AzureMLWorld) -> None:
    """Check after the run's folder was deleted and its id used again."""
    plan = idle.plan(run_id="twice")
    name, body = idle.serialised(plan.request)
    body["properties"]["tags"]["cloudtrain.request"] = "another"
    idle.plane.jobs[name] = CommandJob(idle.plane, name, body, idle.image)
    with pytest.raises(ConflictError, match="an earlier run of that id") as caught:
        idle.send(plan)
    assert caught.value.field == "run_id"
    assert idle.plane.wire.count("PUT job") == 0


def test_a_throttled_wait_obeys_retry_after(idle: AzureMLWorld) -> None:
    run, wire = idle.send(idle.plan(run_id="slowly")), idle.plane.wire
    wire.faults.append(Fault.throttled("GET job", 1, seconds=3))
    threading.Timer(1.0, only(idle).stop).start()
    before = wire.count("GET job")
    assert run.wait(timeout=PATIENCE, poll=0.2)["state"] == "cancelled"
    first, second, *_ = [call.at for call in wire.calls if call.operation == "GET job"][before:]
    assert second - first >= 3


# ------------------------------------------------------------------------------------------------------------- statuses


@pytest.mark.parametrize(
    ("native", "state"),
    [("NotResponding", "running"), ("Paused", "pending"), ("Quiescing", "running"), ("CancelRequested", "running")],
)
def test_a_status_that_is_not_the_end_is_not_taken_for_it(idle: AzureMLWorld, native: str, state: str) -> None:
    run = idle.send(idle.plan(run_id="odd"))
    idle.plane.unknown[only(idle).name] = native
    assert run.status().state == state
    assert run.status().native == native
    idle.plane.unknown.clear()
    assert run.status().state == "pending"


def test_cancelled_while_it_waits_for_machines(idle: AzureMLWorld) -> None:
    run = idle.send(idle.plan(run_id="waits"))
    run.cancel()
    result = run.wait(timeout=PATIENCE, poll=0.2)
    assert (result["state"], result["exit_code"]) == ("cancelled", 5)
    run.cancel()
    assert only(idle).status == "Canceled"


def test_a_wait_that_is_too_long_ends_as_a_lack_of_capacity(idle: AzureMLWorld) -> None:
    """Check a job that stays Queued without a message about a quota: the waiting client ends it."""
    run = idle.send(idle.plan({"max_wait": 1}, run_id="never"))
    result = run.wait(timeout=PATIENCE, poll=0.2)
    assert (result["state"], result["category"], result["exit_code"]) == ("failed", "capacity", 4)
    assert only(idle).status == "Canceled"


# ------------------------------------------------------------------------------------------------------ tokens and SAS


def test_a_revoked_token_is_replaced_in_a_long_wait(idle: AzureMLWorld) -> None:
    wire = idle.plane.wire
    run = idle.send(idle.plan(run_id="expires"))
    native = str(run.result()["native_id"])
    for _ in range(2):
        wire.expire()
        before = wire.count("GET token")
        assert idle.provider.status(native).state == "pending"
        assert wire.count("GET token") == before + 1
    wire.expire()
    wire.signed_in = False
    with pytest.raises(AuthError, match="az login"):
        idle.provider.status(native)
    wire.signed_in = True
    assert idle.provider.status(native).state == "pending"


def test_a_token_near_its_end_is_replaced_before_it_fails(idle: AzureMLWorld) -> None:
    idle.plane.wire.token_seconds = 200.0  # azure-core asks for a new token in the last 300 s
    run = idle.send(idle.plan(run_id="renews"))
    before = idle.plane.wire.count("GET token")
    again = type(idle.provider)(**dataclasses.asdict(idle.provider.settings))
    for _ in range(3):
        again.status(str(run.result()["native_id"]))
    assert idle.plane.wire.count("GET token") > before


def test_the_token_of_the_resource_manager_goes_nowhere_else(idle: AzureMLWorld) -> None:
    run = idle.send(idle.plan(run_id="leaks"))
    job = only(idle)
    job.log(0).take(b"a line\n")
    job.log(0).flush()
    run.cancel()
    run.wait(timeout=PATIENCE, poll=0.2)
    assert [line.text for line in run.logs()] == ["a line"]
    wire = idle.plane.wire
    open_ones = [call for call in wire.calls if call.operation in ("GET blob", "GET discovery")]
    assert {call.operation for call in open_ones} == {"GET blob", "GET discovery"}
    assert all("authorization" not in call.headers and "x-azureml-token" not in call.headers for call in open_ones)
    signed = [call for call in wire.calls if call.token is not None]
    assert {wire.audience(call.token) for call in signed} == {idle.plane.url}


# ----------------------------------------------------------------------------------------------------------------- logs


@pytest.mark.parametrize(
    ("late", "at_the_end"),
    [
        (False, 206),
        (True, 416),
        pytest.param(False, 416, marks=pytest.mark.proof),
        pytest.param(True, 206, marks=pytest.mark.proof),
    ],
)
def test_every_byte_of_every_node_comes_once(idle: AzureMLWorld, at_the_end: int, late: bool) -> None:
    """Check 8 nodes whose logs end mid-character while signatures expire. With ``late``, most bytes come after
    the end."""
    draw = random.Random(8)
    idle.plane.blobs.at_the_end, idle.plane.blobs.sas_seconds = at_the_end, 2.0
    run = idle.send(idle.plan({"instance_count": 8}, run_id="bytes"))
    job = only(idle)
    texts = [[f"node {node} line {n} {'ü☃' * draw.randrange(40)}" for n in range(400)] for node in range(8)]
    waiting = {node: "\n".join(lines).encode() + b"\n" for node, lines in enumerate(texts)}
    job.log(7)

    def grow() -> None:
        began = time.monotonic()
        while any(waiting.values()):
            node = draw.randrange(8)
            size = draw.randrange(1, 4000)
            job.log(node).take(waiting[node][:size])
            job.log(node).flush(whole=True)
            waiting[node] = waiting[node][size:]
            if late and time.monotonic() - began > 3:
                break
        if late:
            for node, rest in waiting.items():
                job.log(node).take(rest)
        job.stop()

    threading.Thread(target=grow, daemon=True).start()
    found: dict[str, list[str]] = {}
    for line in run.logs(follow=True, poll=0.1):
        found.setdefault(str(line.node), []).append(line.text)
    assert found == {str(node): lines for node, lines in enumerate(texts)}
    assert idle.plane.wire.count("GET details") > 1, "no signature had to be renewed"


def test_a_node_that_dies_before_its_peers_begin_is_reported_at_once(idle: AzureMLWorld) -> None:
    run = idle.send(idle.plan({"instance_count": 2}, run_id="alone"))
    job = only(idle)
    job.log(1).take(b"this-image-has-no-python3: not found\n")
    job.log(1).flush()
    assert [(line.node, line.text) for line in run.logs()] == [("1", "this-image-has-no-python3: not found")]


#: Program that prints the SHA-256 of each node's lines from `Run.logs`, and its peak memory in MiB.
READ = """
import hashlib, json, re, sys
from cloudtrain.runs.run import open_run
found = {}
for line in open_run(sys.argv[1], store_url=sys.argv[2]).logs():
    found.setdefault(str(line.node), hashlib.sha256()).update(line.text.encode() + b"\\n")
most = int(re.search("VmHWM:\\s*(\\d+) kB", open("/proc/self/status").read())[1]) / 1024
print(json.dumps([{node: made.hexdigest() for node, made in found.items()}, most]))
"""
MEMORY_MIB = 100


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.proof
@pytest.mark.parametrize("mib", [16, 2048])
def test_logs_of_8_ranks_are_complete_and_need_little_memory(idle: AzureMLWorld, mib: int) -> None:
    """Read numbered lines, as the runtime prints them, from the platform alone."""
    run = idle.send(idle.plan({"instance_count": 8}, run_id="much"))
    job = only(idle)
    wanted, pad = {}, "x" * 980
    for node in range(8):
        made, log, number = hashlib.sha256(), job.log(node), 0
        for _ in range(mib // 8):
            block = []
            for _ in range(1024):
                number += 1
                text = f"{number:08} {pad}"
                made.update(text.encode() + b"\n")
                block.append(f"[a0.0 n{node} r{node} #{number}] {text}\n")
            log.take("".join(block).encode())
            log.flush(whole=True)
        wanted[str(node)] = made.hexdigest()
    run.cancel()
    job.wait()
    done = subprocess.run(
        [sys.executable, "-c", READ, "much", idle.store], capture_output=True, text=True, check=False, timeout=3000
    )
    assert done.returncode == 0, done.stderr
    found, most = json.loads(done.stdout)
    assert found == wanted
    assert most <= MEMORY_MIB


# ------------------------------------------------------------------------------------------------------ refused callers


def refused(client: AzureClient, *flags: str) -> Done:
    """Submit, and check that this ends in one line and without a job."""
    done = client.submit(str(client.jobs.code / "hold/train.py"), "refused", "--detach", *flags)
    assert client.world.plane.jobs == {}
    assert "Traceback" not in done.err
    lines = [line for line in done.err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, done.err
    return done


def test_without_credentials(client: AzureClient) -> None:
    client.world.plane.wire.signed_in = False
    done = refused(client)
    assert done.code == 3
    assert "az login" in done.err


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("workspace_name", "none"),
        ("resource_group", "none"),
        ("subscription_id", "99999999-2222-3333-4444-555555555555"),
    ],
)
def test_without_such_a_workspace(client: AzureClient, setting: str, value: str) -> None:
    done = refused(client, "--set", f"{setting}={value}")
    assert done.code == 2
    assert f"azureml.{setting}" in done.err


def test_without_a_role_on_the_workspace(client: AzureClient) -> None:
    action = "Microsoft.MachineLearningServices/workspaces/jobs/write"
    client.world.plane.wire.faults.append(Fault.denied("PUT job", action, f"/subscriptions/{SUBSCRIPTION}", 100))
    done = refused(client)
    assert done.code == 3
    assert action in done.err
    assert "AzureML Data Scientist" in done.err


def test_without_such_a_compute(client: AzureClient) -> None:
    done = refused(client, "--set", "compute=nowhere")
    assert done.code == 2
    assert "azureml.compute" in done.err
    assert "nowhere" in done.err


def test_without_a_role_on_the_storage_account(client: AzureClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Deny the caller's own role, so that nothing can be staged."""
    wire = client.world.plane.wire
    account = client.world.plane.blobs.account
    text = "This request is not authorized to perform this operation using this permission."
    code = "AuthorizationPermissionMismatch"
    denied = Refusal(403, code, text, {"x-ms-error-code": code})

    def deny(call: Any) -> Any:
        raise denied

    for method in ("GET", "HEAD", "PUT", "POST"):
        wire.route(method, f"/denied/{account}.*", "blob denied", deny, open=True)
    plain = wire.listen(tls=False)
    endpoint = client.world.plane.azurite.partition("BlobEndpoint=")[0] + f"BlobEndpoint={plain}/denied/{account};"
    client.jobs.environ["AZURE_STORAGE_CONNECTION_STRING"] = endpoint
    done = refused(client)
    assert done.code == 3
    assert "no access" in done.err
    assert code in done.err
    assert "Storage Blob Data Contributor" in done.err


def test_a_job_without_a_role_on_the_storage_account(idle: AzureMLWorld) -> None:
    run = idle.send(idle.plan(run_id="role"))
    idle.plane.no_role = True
    idle.plane.no_capacity = False
    result = run.wait(timeout=PATIENCE, poll=0.2)
    assert (result["state"], result["category"], result["exit_code"]) == ("failed", "auth", 3)
    assert "docs/azureml.md" in result["reason"]


QUOTA = (
    "The specified subscription has a Standard NCADSA100v4 family vCPU quota of 24 and cannot accomodate for at least "
    "1 requested managed compute nodes which maps to 96 vCPUs. Talk to your Subscription Admin"
)


def test_a_quota_that_does_not_reach_names_the_one_to_ask_for(idle: AzureMLWorld) -> None:
    idle.plane.wire.faults.append(Fault("PUT job", Refusal(400, "UserError", QUOTA), times=100))
    with pytest.raises(QuotaError) as caught:
        idle.send(idle.plan(run_id="early"))
    assert caught.value.exit_code == 4
    assert "96 dedicated vCPUs of Standard NCADSA100v4 family" in caught.value.hint
    assert idle.plane.jobs == {}
    idle.plane.wire.faults.clear()
    run = idle.send(idle.plan(run_id="late"))
    only(idle).end("Failed", "UserError", QUOTA)
    result = run.wait(timeout=PATIENCE, poll=0.2)
    assert (result["state"], result["category"], result["exit_code"]) == ("failed", "quota", 4)
    assert "96 dedicated vCPUs of Standard NCADSA100v4 family" in result["reason"]


# ----------------------------------------------------------------------------------------------------- clients that die


def preempted(client: AzureClient) -> Run:
    """Return a run whose first job was preempted."""
    script = str(client.jobs.code / "hold/train.py")
    done = client.submit(script, "spot", "--detach", "--spot", "--retries", "1")
    assert done.code == 0, done.err
    only(client.world).end("Failed", "UserError", PREEMPTED)
    return client.run("spot")


@pytest.mark.slow
@pytest.mark.proof
def test_two_clients_that_reconcile_at_once_start_one_attempt(client: AzureClient) -> None:
    run = preempted(client)
    assert run.status().category == "preempted"
    words = ("reconcile", "spot", "--store", client.store, "--json")
    both = [client.jobs.start(*words) for _ in range(2)]
    for process in both:
        out, err = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0, (out, err)
    assert run.store.attempts("spot") == [0, 1]
    assert len(client.world.plane.jobs) == 2
    again = client.jobs.here(*words)
    assert again.code == 0, again.err
    assert len(client.world.plane.jobs) == 2
    assert client.run("spot").status().state == "pending"


def test_errors_are_ours(idle: AzureMLWorld) -> None:
    for status in (400, 401, 403, 404, 409, 418, 429, 500, 503):
        idle.plane.wire.faults[:] = [Fault("*", Refusal(status, "Odd", "something"), times=1000)]
        again = type(idle.provider)(**dataclasses.asdict(idle.provider.settings))
        for call in (again.status, again.logs, again.cancel):
            with pytest.raises(CloudtrainError) as caught:
                call(idle.nowhere)
            assert "\n" not in str(caught.value)
    idle.plane.wire.faults.clear()
