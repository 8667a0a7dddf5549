"""Provider ``azureml``, call by call: its requests, their order, and its reading of each answer.

It runs at the wire like test_azureml_calls, but fast: no emulator and no store. This module answers for the storage
account itself.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import logging
import os
import re
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from plans import Plans
from rows import for_each
from servers import AZURITE_ACCOUNT, AZURITE_KEY
from worlds.azureml.life import CommandJob
from worlds.azureml.plane import SUBSCRIPTION, Plane
from worlds.azureml.wire import Answer, Call, Fault, Refusal, Wire

from cloudtrain.errors import (
    AuthError,
    CloudtrainError,
    ConflictError,
    LostContactError,
    NotFoundError,
    PlatformError,
    QuotaError,
    SpecError,
    UnsupportedError,
)
from cloudtrain.provider_api.protocol import Request
from cloudtrain.providers.azureml import Provider
from cloudtrain.providers.azureml import api as module
from cloudtrain.providers.azureml.api import named

HOUR, SOME = 3600, 1 << 20
ACTION = "Microsoft.MachineLearningServices/workspaces/jobs/write"


class Containers:
    """A storage account with the few calls that the plane needs: create containers, and append to blobs."""

    def __init__(self, folder: Path) -> None:
        self.wire, self.blobs = Wire(folder), dict[str, bytes]()
        self.endpoint = f"{self.wire.listen(tls=False)}/{AZURITE_ACCOUNT}"
        self.wire.route("PUT", f"/{AZURITE_ACCOUNT}/[^/]+", "PUT container", lambda call: Answer(status=201), open=True)
        self.wire.route("PUT", f"/{AZURITE_ACCOUNT}/(.+)", "PUT blob", self._put, open=True)
        self.wire.route("GET", f"/{AZURITE_ACCOUNT}/(.+)", "GET blob", self._get, open=True)

    @property
    def connection(self) -> str:
        words = f"DefaultEndpointsProtocol=http;AccountName={AZURITE_ACCOUNT};AccountKey={AZURITE_KEY}"
        return f"{words};BlobEndpoint={self.endpoint};"

    def _put(self, call: Call) -> Answer:
        (name,) = call.words
        self.blobs[name] = self.blobs[name] + call.body if call.query.get("comp") == "appendblock" else b""
        return Answer(status=201)

    def _get(self, call: Call) -> Answer:
        (name,) = call.words
        begin, end = map(int, call.headers["range"].removeprefix("bytes=").split("-"))
        data = self.blobs[name]
        return Answer(data[begin : end + 1], 206, {"Content-Range": f"bytes {begin}-{end}/{len(data)}"})


@pytest.fixture
def plane(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Plane]:
    """Give a workspace without machines: its jobs stay Queued."""
    for name in [name for name in os.environ if name.startswith("AZURE")]:
        monkeypatch.delenv(name)
    account = Containers(tmp_path / "account")
    plane = Plane(tmp_path / "azure", azurite=account.connection, runs=False)
    for name, value in plane.environ().items():
        monkeypatch.setenv(name, value)
    plane.no_capacity = True
    yield plane
    plane.close()
    account.wire.close()
    assert plane.wire.leaks == [], "a token of the resource manager went to another service"


def plans(plane: Plane, **settings: Any) -> Plans:
    """Return `Plans` for a workspace's jobs."""
    subscription, group, workspace = plane.scope
    made = {
        "subscription_id": subscription,
        "resource_group": group,
        "workspace_name": workspace,
        "cloud": plane.cloud,
        "cloud_metadata": plane.metadata,
        **settings,
    }
    return Plans(Provider, made, f"abfs://{plane.container}/store", {"image": "team/trainer:1"})


def client(plane: Plane, **settings: Any) -> Provider:
    """Return another client of the workspace."""
    return Provider(**plans(plane, **settings).settings)


def operations(plane: Plane, since: int = 0) -> list[str]:
    """Return the operations called in order, without those for tokens."""
    return [call.operation for call in plane.wire.calls[since:] if call.operation != "GET token"]


def put(plane: Plane, request: Request, /, **tags: str | None) -> CommandJob:
    """Create the request's job with other tags."""
    name = str(request.body["name"])
    all_tags = {**request.body["tags"], **{f"cloudtrain.{key}": value for key, value in tags.items()}}
    properties = {"tags": {key: value for key, value in all_tags.items() if value is not None}, "environmentId": "e"}
    made = plane.jobs[name] = CommandJob(plane, name, {"properties": {**properties, "jobType": "Command"}}, "i")
    return made


def only(plane: Plane) -> CommandJob:
    (job,) = plane.jobs.values()
    return job


# ------------------------------------------------------------------------------------------------------------- creation


@pytest.mark.costly
def test_a_creation_is_looked_for_checked_and_put_once(
    plane: Plane, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Check also that this process keeps no trace: the SDK sets a variable, reads git's, prints, and shows its
    warnings."""
    monkeypatch.setenv("AZUREML_CURRENT_CLOUD", "AzureChinaCloud")
    monkeypatch.setenv("AZUREML_GIT_COMMIT", "abc")
    monkeypatch.setenv("GIT_DIR", "/somewhere")
    made, before = plans(plane), dict(os.environ)
    request = made.planned()
    provider, name = client(plane), request.body["name"]
    native = provider.submit(request)
    assert native == f"{plane.id}/jobs/{name}"
    assert dict(os.environ) == before
    assert capfd.readouterr() == ("", "")
    assert logging.getLogger("azure.ai.ml").level == logging.ERROR
    calls = operations(plane)
    assert calls[:2] == ["GET job", "GET datastore"]
    assert (calls.count("PUT job"), calls[-1]) == (1, "PUT job")
    looked, store = (call for call in plane.wire.calls if call.operation in ("GET job", "GET datastore"))
    assert (looked.method, looked.url) == ("GET", f"{native}?api-version=2025-01-01-preview")
    assert store.url == f"{plane.id}/datastores/workspaceblobstore?api-version=2025-01-01-preview"
    (sent,) = [call for call in plane.wire.calls if call.operation == "PUT job"]
    assert sent.url.partition("?")[0] == native
    job = only(plane).body["properties"]
    assert (job["tags"], job["properties"]) == (request.body["tags"], {})
    assert job["command"] == request.body["command"]
    assert {plane.wire.audience(call.token) for call in plane.wire.calls if call.token} == {plane.url}
    since = len(plane.wire.calls)
    assert client(plane).submit(request) == native
    assert operations(plane, since) == ["GET job"]
    assert provider.find(request) == native
    assert provider.find(made.planned(attempt=1)) is None


@pytest.mark.costly
def test_variables_that_were_not_there_are_not_there_afterwards(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GIT_DIR", raising=False)
    before = dict(os.environ)
    plane.wire.faults.append(Fault.broken("PUT job"))
    with pytest.raises(LostContactError, match=r"^Azure ML does not answer now: create job: An internal error"):
        client(plane).submit(plans(plane).planned())
    assert dict(os.environ) == before
    assert plane.wire.count("PUT job") == 1, "the SDK must not retry"


@pytest.mark.parametrize(
    ("tags", "says"),
    [
        ({"run": "another-run"}, "of another run"),
        ({"run": None}, "of another run"),
        ({"request": "another"}, "of an earlier run of that id, which was another job"),
        ({"request": None}, "of an earlier run of that id, which was another job"),
    ],
)
def test_another_job_of_that_name_is_a_conflict(plane: Plane, tags: dict[str, str | None], says: str) -> None:
    request, provider = plans(plane).planned(), client(plane)
    put(plane, request, **tags)
    with pytest.raises(ConflictError) as caught:
        provider.submit(request)
    assert str(caught.value) == f"run_id: Azure ML has a job {request.body['name']} {says}"
    assert caught.value.hint == "choose another run id (--run-id)"
    assert provider.find(request) is None
    assert operations(plane) == ["GET job"] * 2


@pytest.mark.costly
def test_a_job_that_another_client_has_just_put_is_the_same(plane: Plane) -> None:
    """Check that a second client learns this from the refusal alone."""
    request, provider = plans(plane).planned(), client(plane)
    put(plane, request)
    plane.wire.faults.append(Fault("GET job", Refusal(404, "NotFound", "not yet")))
    assert provider.submit(request) == f"{plane.id}/jobs/{request.body['name']}"
    assert operations(plane)[-2:] == ["PUT job", "GET job"]
    plane.wire.faults.append(Fault("GET job", Refusal(404, "NotFound", "not yet"), times=2))
    with pytest.raises(ConflictError, match=r"^run_id: create job: .* \(JobPropertyImmutable\)$"):
        client(plane).submit(request)
    assert len(plane.jobs) == 1


@pytest.mark.costly
def test_a_lost_answer_makes_no_second_job(plane: Plane) -> None:
    request, provider = plans(plane).planned(), client(plane)
    plane.wire.faults.append(Fault("PUT job", done=True))
    with pytest.raises(LostContactError, match=r"^Azure does not answer: create job: "):
        provider.submit(request)
    assert provider.submit(request) == f"{plane.id}/jobs/{only(plane).name}"
    assert plane.wire.count("PUT job") == 1


def test_a_missing_role_is_named(plane: Plane) -> None:
    plane.wire.faults.append(Fault.denied("PUT job", ACTION, f"/subscriptions/{SUBSCRIPTION}"))
    with pytest.raises(AuthError, match=rf"^create job: .*{ACTION}.*\n.*'AzureML Data Scientist' on the workspace"):
        client(plane).submit(plans(plane).planned())
    assert plane.jobs == {}


@pytest.mark.costly
def test_a_store_outside_the_datastores_container(plane: Plane) -> None:
    plane.datastore("elsewhere", "another")
    ours, store = plane.blobs.account, plane.container
    for datastore, container, says in (
        ("elsewhere", store, f"'elsewhere' is container 'another' of account {ours!r}, and the store is in {store!r}"),
        (
            "nowhere",
            store,
            "the workspace has no datastore 'nowhere'",
        ),
        (
            "elsewhere",
            "another@stranger.dfs.core.windows.net",
            f"'elsewhere' is container 'another' of account {ours!r}",
        ),
    ):
        made = plans(plane, datastore=datastore)
        with pytest.raises(SpecError) as caught:
            client(plane, datastore=datastore).submit(made.planned({"store": f"abfs://{container}/store"}))
        assert str(caught.value).startswith(f"azureml.datastore: {says}")
        assert caught.value.hint.endswith("az ml datastore list -o table")
    assert plane.jobs == {}
    made = plans(plane, datastore="elsewhere")
    client(plane, datastore="elsewhere").submit(
        made.planned({"store": f"abfs://another@{ours}.dfs.core.windows.net/store"})
    )
    assert len(plane.jobs) == 1


@pytest.mark.costly
def test_a_cluster_is_checked_before_a_job_waits_for_it(plane: Plane) -> None:
    """Check this because the service accepts a job for a missing cluster, which then waits for ever."""
    plane.computes["gpus"] = {"vmSize": "STANDARD_NC64AS_T4_V3"}
    plane.computes["odd"] = {"vmSize": "Standard_Of_Next_Year"}
    for compute, gpu, kind, says in (
        (
            "none",
            "T4:4",
            SpecError,
            "azureml.compute: the workspace has no cluster 'none'; to see the clusters, run: az ml compute list "
            "-o table or leave it out, for serverless compute",
        ),
        ("gpus", "H100:8", UnsupportedError, "resources.gpu: not supported by provider azureml: cluster gpus is of "),
        ("gpus", "T4:2", UnsupportedError, "STANDARD_NC64AS_T4_V3, which has T4:4, not T4:2"),
    ):
        provider = client(plane, compute=compute)
        with pytest.raises(SpecError) as caught:
            provider.submit(plans(plane, compute=compute).planned(gpu=gpu))
        assert type(caught.value) is kind
        assert says in caught.value.with_hint()
    assert plane.jobs == {}
    (url, *_) = [call.url for call in plane.wire.calls if call.operation == "GET compute"]
    assert url == f"{plane.id}/computes/none?api-version=2025-01-01-preview"
    for compute, gpu in (("gpus", ["T4:4"]), ("odd", ["T4:4"]), ("gpus", [])):
        since = len(plane.wire.calls)
        request = plans(plane, compute=compute).planned(
            {"store": f"abfs://{plane.container}/{compute}-{bool(gpu)}"}, gpu=gpu
        )
        client(plane, compute=compute).submit(request)
        assert plane.wire.calls[since:][-1].body["properties"]["computeId"] == f"{plane.id}/computes/{compute}"
    assert client(plane).account.compute("odd")["vmSize"] == "Standard_Of_Next_Year"
    plane.computes["gpus"]["scaleSettings"] = {"nodeIdleTimeBeforeScaleDown": "PT1H"}
    with pytest.raises(UnsupportedError, match="cluster gpus keeps idle machines for 1h of 2h") as short:
        client(plane, compute="gpus").submit(plans(plane, compute="gpus").planned(keep_warm="2h"))
    assert short.value.field == "keep_warm"


@pytest.mark.costly
def test_a_refusal_of_the_sdk_is_one_line(plane: Plane) -> None:
    """Check this because the SDK prints it in colours and over many lines."""
    request = plans(plane).planned()
    path = "azureml://datastores/workspaceblobstore/paths/a:b/"
    for change in (
        {"inputs": {**request.body["inputs"], "container": {"type": "uri_folder", "path": path}}},
        {"limits": {"timeout": "soon"}},
    ):
        with pytest.raises(SpecError, match=r"^options: the installed azure-ai-ml refuses this request: ") as caught:
            client(plane).submit(dataclasses.replace(request, body={**request.body, **change}))
        assert str(caught.value).isprintable()
    assert plane.jobs == {}


# ------------------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("refusal", "kind", "says"),
    [
        (Refusal(400, "Odd", "bad"), SpecError, "get job: bad (Odd)"),
        (
            Refusal(401, "Odd", "who"),
            AuthError,
            "get job: who (Odd); sign in again (az login); the submitted run continues",
        ),
        (Refusal(403, "Odd", "no"), AuthError, "get job: no (Odd); give the caller the role 'AzureML Data Scientist'"),
        (Refusal(403, "Odd", "over quota"), QuotaError, "get job: over quota (Odd); ask for more in Azure ML's Studio"),
        (Refusal(404, "Odd", "gone"), NotFoundError, "get job: gone (Odd)"),
        (Refusal(404, "WorkspaceNotFound", "gone"), SpecError, "azureml.workspace_name: gone; check subscription"),
        (Refusal(409, "Odd", "there"), ConflictError, "run_id: get job: there (Odd)"),
        (
            Refusal(429, "Odd", "slow"),
            LostContactError,
            "Azure ML does not answer now: get job: slow (Odd) (status 429)",
        ),
        (Refusal(500, "", "oh"), LostContactError, "Azure ML does not answer now: get job: oh (status 500)"),
        (Refusal(503, "Odd", ""), LostContactError, "Azure ML does not answer now: get job: Odd (status 503)"),
        (None, LostContactError, "Azure does not answer: get job: "),
    ],
)
def test_every_refusal_is_a_cloudtrain_error(plane: Plane, refusal: Refusal | None, kind: type, says: str) -> None:
    plane.wire.faults.append(Fault("GET job", refusal, times=10))
    with pytest.raises(CloudtrainError) as caught:
        client(plane).status(f"{plane.id}/jobs/none")
    assert type(caught.value) is kind
    assert caught.value.with_hint().startswith(says)
    assert "\n" not in str(caught.value)
    assert plane.wire.count("GET job") == (2 if refusal is not None and refusal.status == 401 else 1)


@pytest.mark.parametrize("body", [b"<html>", b"[1]", b'"text"', b'{"error": null}', b""])
def test_a_refusal_as_a_page_shows_its_status(plane: Plane, body: bytes) -> None:
    plane.wire.route("GET", "/elsewhere", "GET elsewhere", lambda call: Answer(body, 418))
    with pytest.raises(SpecError, match=r"^look: 418$"):
        client(plane).account.call(f"{plane.url}/elsewhere", what="look")


def test_an_answer_that_is_no_json_is_one_line(plane: Plane) -> None:
    bodies = [b"<html>"]
    plane.wire.route("GET", "/elsewhere", "GET elsewhere", lambda call: Answer(bodies[0]))
    account = client(plane).account
    with pytest.raises(PlatformError, match=r"^look: the answer is not JSON$"):
        account.call(f"{plane.url}/elsewhere", what="look")
    for bodies[0] in (b"", b"null"):
        assert account.call(f"{plane.url}/elsewhere", what="look") is None


@pytest.mark.costly
def test_each_error_names_its_call(plane: Plane) -> None:
    provider = client(plane)
    native = provider.submit(plans(plane).planned())
    only(plane).end("Failed", "UserError", "it broke")
    refused = Refusal(418, "", "no")
    for operation, call, what in (
        ("GET job", lambda: provider.status(native), "get job"),
        ("POST cancel", lambda: provider.cancel(native), "cancel job"),
        ("GET workspace", lambda: client(plane).status(native), "get workspace"),
        ("GET discovery", lambda: client(plane).status(native), "discover the workspace"),
        ("GET details", lambda: client(plane).status(native), "get run"),
        ("GET datastore", lambda: provider.account.datastore("any"), "get datastore"),
        ("GET compute", lambda: provider.account.compute("any"), "get compute"),
    ):
        plane.wire.faults[:] = [Fault(operation, refused)]
        plane.unknown[only(plane).name] = "Running" if operation == "POST cancel" else "Failed"
        with pytest.raises(SpecError, match=rf"^{what}: no$"):
            call()


@pytest.mark.parametrize(
    ("status", "headers", "least", "most"),
    [
        (429, {"Retry-After": "7"}, 6, 7),
        (503, {"Retry-After": "7"}, 6, 7),
        (429, {"Retry-After": "99999"}, 299, 300),
        (429, {"Retry-After": "Wed, 21 Oct 2026 07:28:00 GMT"}, 0, 0),
        (429, {}, 0, 0),
        (500, {"Retry-After": "7"}, 0, 0),
    ],
)
def test_a_host_that_asks_for_a_pause_gets_it(
    plane: Plane, status: int, headers: Mapping[str, str], least: float, most: float
) -> None:
    plane.wire.faults.append(Fault("GET job", Refusal(status, "TooManyRequests", "slowly", headers)))
    provider, native = client(plane), f"{plane.id}/jobs/none"
    began = time.monotonic()
    with pytest.raises(LostContactError, match=r"^Azure ML does not answer now: get job: slowly"):
        provider.status(native)
    spent, before = time.monotonic() - began, len(plane.wire.calls)
    with pytest.raises(CloudtrainError) as caught:
        provider.status(native)
    host = re.escape(plane.url.removeprefix("https://"))
    waits = re.fullmatch(rf"get job: {host} asks for a pause of (\d+) s before the next call", str(caught.value))
    assert (waits is not None) == (most > 0)
    assert waits is None or least - spent - 1 <= int(waits[1]) <= most
    assert (len(plane.wire.calls) == before) == (most > 0)
    provider.account.fetch(f"{plane.api}/discovery/workspaces/w-1", what="look")


# --------------------------------------------------------------------------------------- status, cancel and the history


@pytest.mark.costly
def test_a_status_asks_the_history_only_for_its_own_facts(plane: Plane) -> None:
    provider = client(plane, prices={"Standard_DS3_v2": 2.0})
    native = provider.submit(plans(plane).planned(instance_type="Standard_DS3_v2", instance_count=2))
    job, name = only(plane), only(plane).name
    since = len(plane.wire.calls)
    found = provider.status(native)
    assert (found.state, found.instance_type, found.cost_usd) == ("pending", "Standard_DS3_v2", None)
    assert found.url == f"https://ml.azure.com/runs/{name}?wsid={plane.id}"
    assert operations(plane, since) == ["GET job"]
    job.started = time.time() - HOUR
    plane.unknown[name] = "Running"
    since = len(plane.wire.calls)
    running = [provider.status(native) for _ in range(2)]
    assert [(each.state, each.started) for each in running] == [("running", pytest.approx(job.started, abs=0.01))] * 2
    first = ["GET job", "GET workspace", "GET discovery", "GET details"]
    assert operations(plane, since) == [*first, "GET job"], "the start does not change"
    plane.unknown.clear()
    job.end("Failed", "UserError", "Execution failed. User process 'sh' exited with status code 3.")
    since = len(plane.wire.calls)
    ended = provider.status(native)
    assert operations(plane, since) == ["GET job", "GET details"]
    assert (ended.state, ended.category, ended.started) == (
        "failed",
        "user_error",
        pytest.approx(job.started, abs=0.01),
    )
    assert ended.cost_usd == pytest.approx(4.0, abs=0.1)
    details = [call for call in plane.wire.calls if call.operation == "GET details"][-1]
    assert details.url == f"/history/v1.0{plane.id}/runs/{name}/details"
    assert "no-such-run" not in provider.account.details
    plane.wire.faults.append(Fault("GET details", Refusal(404, "NotFound", "not yet")))
    behind = provider.status(native)
    assert (behind.state, behind.started) == ("failed", pytest.approx(job.started, abs=0.01)), "the history may lag"


@pytest.mark.costly
def test_a_job_is_found_after_the_settings_changed(plane: Plane) -> None:
    """Check that it is found by its whole id; a bare name belongs to the present workspace."""
    native = client(plane).submit(plans(plane).planned())
    elsewhere = client(plane, workspace_name="another")
    assert elsewhere.status(native).state == "pending"
    assert client(plane).status(only(plane).name).state == "pending"
    with pytest.raises(SpecError, match=r"^azureml.workspace_name: The Resource .*another' under resource group"):
        elsewhere.status(only(plane).name)
    elsewhere.cancel(native)
    assert only(plane).wait() == "Canceled"
    assert elsewhere.status(native).state == "cancelled"
    with pytest.raises(NotFoundError, match=r"^get job: Job none is not found"):
        client(plane).status("none")


@pytest.mark.costly
def test_a_cancel_is_sent_once_and_ended_jobs_stay(plane: Plane) -> None:
    provider = client(plane)
    native = provider.submit(plans(plane).planned())
    provider.cancel(native)
    assert only(plane).wait() == "Canceled"
    provider.cancel(native)
    assert operations(plane)[-3:] == ["POST cancel", "POST cancel", "GET job"]
    cancel = next(call for call in plane.wire.calls if call.operation == "POST cancel")
    assert cancel.url == f"{native}/cancel?api-version=2025-01-01-preview"
    with pytest.raises(NotFoundError, match=r"^cancel job: Job none is not found"):
        provider.cancel("none")
    assert operations(plane)[-1] == "POST cancel"
    for status, quiet in (("CancelRequested", True), ("Failed", True), ("Running", False)):
        plane.unknown[only(plane).name] = status
        plane.wire.faults.append(Fault("POST cancel", Refusal(400, "", "not now")))
        if quiet:
            provider.cancel(native)
        else:
            with pytest.raises(SpecError, match=r"^cancel job: not now$"):
                provider.cancel(native)


@pytest.mark.costly
def test_a_log_is_read_from_its_cursor_without_a_token(plane: Plane) -> None:
    provider = client(plane)
    native = provider.submit(plans(plane).planned(instance_count=2))
    job = only(plane)
    for text in ("one\n", "two\nthr"):
        for number in range(2):
            job.log(number).take(text.encode())
            job.log(number).flush()
    first = provider.logs(native)
    assert [(line.node, line.text) for line in first.lines] == [("0", "one"), ("0", "two"), ("1", "one"), ("1", "two")]
    job.log(1).take(b"ee\n")
    job.log(1).flush()
    again = provider.logs(native, json.loads(json.dumps(first.cursor)))
    assert [(line.node, line.text) for line in again.lines] == [("1", "three")]
    read = [call for call in plane.wire.calls if call.operation == "GET blob"]
    assert all(call.token is None for call in read)
    assert {call.headers["user-agent"].split("/")[0].split(" ")[0] for call in read} == {"cloudtrain"}


def restarted(job: CommandJob, number: int, text: str) -> None:
    """Restart the log of a node, as after a preemption."""
    job.logs = []
    job.log(number).take(text.encode())
    job.log(number).flush()


@pytest.mark.costly
@pytest.mark.parametrize("at_the_end", [206, 416])
@pytest.mark.parametrize("length", [1, 39, 40, 41, 300], ids=lambda n: f"{n}-lines")
def test_a_restarted_log_is_read_from_its_start(plane: Plane, length: int, at_the_end: int) -> None:
    """Check this whether the new log is shorter than the part already read, as long, or longer."""
    plane.blobs.at_the_end = at_the_end
    provider = client(plane)
    native = provider.submit(plans(plane).planned())
    job = only(plane)
    job.log(0).take("".join(f"line {n:03}\n" for n in range(40)).encode())
    job.log(0).flush()
    first = provider.logs(native)
    restarted(job, 0, "".join(f"next {n:03}\n" for n in range(length)))
    again = provider.logs(native, json.loads(json.dumps(first.cursor)))
    assert [line.text for line in again.lines] == [f"next {n:03}" for n in range(length)]
    assert not {line.id for line in first.lines} & {line.id for line in again.lines}
    job.log(0).take(b"more\n")
    job.log(0).flush()
    last = provider.logs(native, again.cursor)
    assert [line.text for line in last.lines] == ["more"]
    assert provider.logs(native, last.cursor).lines == ()


@pytest.mark.costly
@pytest.mark.parametrize("older", [False, True], ids=["cursor", "older-cursor"])
def test_a_restarted_log_with_the_same_lines_before_the_cursor(plane: Plane, older: bool) -> None:
    """Check this when only its first bytes differ. Cursors of older versions lack them and are still valid."""
    provider = client(plane)
    native = provider.submit(plans(plane).planned())
    job = only(plane)
    same = "waiting for data\n" * 40
    job.log(0).take(f"attempt 0\n{same}".encode())
    job.log(0).flush()
    cursor = json.loads(json.dumps(provider.logs(native).cursor))
    if older:
        cursor["at"] = {name: place[:3] for name, place in cursor["at"].items()}
    restarted(job, 0, f"attempt 1\n{same}done\n")
    lines = [line.text for line in provider.logs(native, cursor).lines]
    assert lines == (["done"] if older else ["attempt 1", *same.splitlines(), "done"])


@pytest.mark.costly
def test_a_log_that_does_not_exist_yet_keeps_its_cursor(plane: Plane) -> None:
    provider = client(plane)
    native = provider.submit(plans(plane).planned())
    job = only(plane)
    job.log(0).take(b"one\n")
    job.log(0).flush()
    first = provider.logs(native)
    plane.wire.faults.append(Fault("GET blob", Refusal(404, "BlobNotFound", "none"), times=2))
    second = provider.logs(native, first.cursor)
    assert (second.lines, second.cursor["at"]) == ((), first.cursor["at"])
    job.log(0).take(b"two\n")
    job.log(0).flush()
    assert [line.text for line in provider.logs(native, second.cursor).lines] == ["two"]


@pytest.mark.costly
def test_the_files_of_a_restart_are_read_too(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    provider = client(plane)
    native = provider.submit(plans(plane).planned(instance_count=2))
    job = only(plane)
    names = ["user_logs/std_log_process_1.txt", "user_logs/retry_001/std_log_process_1.txt"]
    monkeypatch.setattr(job, "_log_name", lambda number: names[number])
    for number, text in enumerate((b"first\n", b"second\n")):
        job.log(number).take(text)
        job.log(number).flush()
    lines = provider.logs(native).lines
    assert sorted((line.node, line.text) for line in lines) == [("1", "first"), ("1", "second")]
    assert len({line.id for line in lines}) == 2


def test_a_service_that_never_answers_is_given_up(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the timeout of half a minute, shortened here."""
    finished = threading.Event()
    assert module.TIMEOUT == 30
    monkeypatch.setattr(module, "TIMEOUT", 1.0)

    def stall(call: Call) -> Answer:
        finished.wait(20)
        return Answer()

    plane.wire.route("GET", "/never", "GET never", stall, open=True)
    with pytest.raises(LostContactError, match=r"^Azure does not answer: look: "):
        client(plane).account.fetch(f"{plane.api}/never", what="look")
    finished.set()


def test_an_answer_read_in_pieces_comes_in_pieces(plane: Plane) -> None:
    """Check that the server sends the second piece only after the client has read the first."""
    read, waited = threading.Event(), list[bool]()

    def pieces() -> Iterator[bytes]:
        yield b"x" * SOME
        waited.append(read.wait(20))
        yield b"y"

    plane.wire.route("GET", "/slow", "GET slow", lambda call: Answer(pieces(), length=SOME + 1), open=True)
    answer = client(plane).account.fetch(f"{plane.api}/slow", what="read it", stream=True)
    found = answer.iter_bytes()
    size = len(next(found))
    read.set()
    assert size + sum(map(len, found)) == SOME + 1
    assert waited == [True]


def test_a_lost_connection_names_its_call(plane: Plane) -> None:
    account = client(plane).account
    for open in (True, False):
        short = Answer(iter([b"{"]), headers={"Connection": "close"}, length=9)
        plane.wire.route("GET", f"/short-{open}", "GET short", lambda call, short=short: short, open=open)
    for cut in (
        lambda: account.fetch(f"{plane.api}/short-True", what="look"),
        lambda: account.call(account.url("/short-False"), what="look"),
    ):
        with pytest.raises(LostContactError, match=r"^Azure does not answer: look: "):
            cut()
    plane.wire.faults += [Fault("GET discovery"), Fault("GET discovery")]
    for call, what in (
        (lambda url: account.fetch(url, what="look"), "look"),
        (account.discovered, "discover the workspace"),
    ):
        with pytest.raises(LostContactError, match=rf"^Azure does not answer: {what}: "):
            call(f"{plane.api}/discovery/workspaces/w-1")


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b'{"api": "http://plain.example"}', "no https service of runs: 'http://plain.example'"),
        (b"{}", "no https service of runs: ''"),
        (b"[]", "no https service of runs: ''"),
        (b"<html>", "no https service of runs: ''"),
    ],
)
def test_a_discovery_that_names_no_service_is_one_line(plane: Plane, body: bytes, says: str) -> None:
    plane.wire.route("GET", "/odd", "GET odd", lambda call: Answer(body), open=True)
    with pytest.raises(PlatformError) as caught:
        client(plane).account.discovered(f"{plane.api}/odd")
    assert str(caught.value) == f"the workspace's discovery names {says}"


def test_the_discovery_is_called_once_a_workspace(plane: Plane) -> None:
    plane.wire.route("GET", "/old", "GET old", lambda call: Answer({"history": "https://old.example/"}), open=True)
    account = client(plane).account
    assert account.discovered(f"{plane.api}/old") == "https://old.example"
    assert account._service(plane.id) == account._service(plane.id) == plane.api
    assert operations(plane)[1:] == ["GET workspace", "GET discovery"]


# -------------------------------------------------------------------------------------------------------------- callers


@pytest.mark.costly
def test_a_revoked_token_is_replaced_once(plane: Plane) -> None:
    provider = client(plane)
    native = provider.submit(plans(plane).planned())
    credential = provider.account.credential
    assert provider.account.credential is credential
    plane.wire.expire()
    before = plane.wire.count("GET token")
    assert provider.status(native).state == "pending"
    assert plane.wire.count("GET token") == before + 1
    assert provider.account.credential is not credential
    plane.wire.expire()
    plane.wire.signed_in = False
    with pytest.raises(AuthError, match=r"^no Azure credentials \(.*\)\nhint: sign in \(az login\), or set AZURE_T"):
        provider.status(native)


def jwt(claims: Any) -> str:
    return f"h.{base64.urlsafe_b64encode(json.dumps(claims).encode()).decode().rstrip('=')}.s"


@for_each(
    ("claims", "name"),
    [
        ({"upn": "a@b", "unique_name": "u", "oid": "o"}, "a@b"),
        ({"unique_name": "u", "preferred_username": "p"}, "u"),
        ({"preferred_username": "p", "appid": "i"}, "p"),
        ({"upn": "", "appid": "i", "oid": "o"}, "i"),
        ({"upn": 7, "oid": "ö>?"}, "ö>?"),
        ({"tid": "t"}, None),
        (["no", "table"], None),
    ],
)
def test_the_name_in_a_token(claims: Any, name: str | None) -> None:
    assert named(jwt(claims)) == name


@for_each("token", ["", "one", "h.%%%.s", "h.e30", "h.bm8.s"])
def test_a_token_without_a_name(token: str) -> None:
    assert named(token) is None


def test_the_caller_and_doctor_in_a_sound_workspace(plane: Plane) -> None:
    provider = client(plane)
    assert re.fullmatch(r"[0-9a-f-]{36}", provider.principal() or "")
    request = plans(plane).planned(instance_type="Standard_DS3_v2")
    rows = {check.name: check for check in provider.checks(f"abfs://{plane.container}/store", request)}
    names = ("sdk", "credentials", "workspace", "datastore", "permissions", "quota")
    assert rows["compute"].status == "skipped", "serverless machines have no cluster"
    assert {name: rows[name].status for name in names} == dict.fromkeys(names, "ok")
    assert "environment" in rows
    bare = {check.name: check.status for check in provider.checks("", None)}
    assert (bare["quota"], bare["environment"]) == ("skipped",) * 2
    assert dataclasses.asdict(provider.settings)["api_version"] == "2025-01-01-preview"


def test_the_url_of_a_datastore_is_its_containers(plane: Plane) -> None:
    url = "azureml://datastores/workspaceblobstore/paths/store"
    since = len(plane.wire.calls)
    found = client(plane).store_url(url, ask=True)
    assert plane.container in found
    assert operations(plane, since) == ["GET datastore"]
    with pytest.raises(SpecError, match="a plan asks no server"):
        client(plane).store_url(url, ask=False)
    assert operations(plane, since) == ["GET datastore"]
