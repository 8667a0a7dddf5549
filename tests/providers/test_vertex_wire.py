"""Provider ``vertex``, call by call: its requests, their order, and its reading of each answer.

It runs at the wire like test_vertex_calls, but fast: one project a test, and requests without a store.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from google.oauth2.credentials import Credentials as Token
from plans import Plans
from worlds.vertex.life import CustomJob
from worlds.vertex.plane import OTHER, Plane
from worlds.vertex.wire import Answer, Fault, Refusal

from cloudtrain.errors import (
    AuthError,
    CapacityError,
    CloudtrainError,
    ConflictError,
    LostContactError,
    NotFoundError,
    PlatformError,
    QuotaError,
    SpecError,
)
from cloudtrain.estimator import Estimator
from cloudtrain.job.job import Job
from cloudtrain.provider_api.protocol import LayoutInput, Request
from cloudtrain.providers import _cloud
from cloudtrain.providers.vertex import Provider
from cloudtrain.providers.vertex import api as own

PARENT = "projects/contract/locations/europe-west4"
JOBS = f"/v1/{PARENT}/customJobs"
NOWHERE = f"{PARENT}/customJobs/1"
TRAINER = "trainer@contract.iam.gserviceaccount.com"
BUCKET = "contract-bucket"
SETTINGS = {"project": "contract", "location": "europe-west4", "service_account": TRAINER, "log_drain": 0}
PLANS = Plans(Provider, SETTINGS, f"gs://{BUCKET}/store", {"image": "team/trainer:1"})
HOUR = 3600


@pytest.fixture
def plane(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Plane]:
    """Give a project without machines: its jobs wait."""
    for name in [name for name in os.environ if name.startswith(("GOOGLE_", "GCSFS_", "CLOUDSDK_"))]:
        monkeypatch.delenv(name)
    plane = Plane(tmp_path / "google")
    for name, value in {**plane.environ(), **plane.questions.environ()}.items():
        monkeypatch.setenv(name, value)
    plane.no_capacity, plane.capacity_seconds = True, 1e9
    plane.accounts.add(TRAINER)
    plane.gcs.make(BUCKET)
    yield plane
    plane.close()


def client(**settings: Any) -> Provider:
    """Return another client of the project."""
    return Provider(**{**SETTINGS, **settings})


def operations(plane: Plane, since: int = 0) -> list[str]:
    """Return the operations called in order, without those for tokens."""
    return [call.operation for call in plane.wire.calls[since:] if call.operation != "POST token"]


def only(plane: Plane) -> CustomJob:
    (job,) = plane.jobs.values()
    return job


def changed(request: Request, /, **labels: str) -> Request:
    """Return the same job with other labels."""
    body = {**request.body, "labels": {**request.body["labels"], **{f"cloudtrain-{k}": v for k, v in labels.items()}}}
    return dataclasses.replace(request, body=body)


def after(plane: Plane, operation: str, then: Callable[[], object]) -> None:
    """Call ``then`` after such a call has been served."""
    wire, served = plane.wire, plane.wire.answer

    def answer(method: str, target: str, sent: bytes, headers: Mapping[str, str]) -> Answer | None:
        found = served(method, target, sent, headers)
        if wire.calls[-1].operation == operation:
            then()
        return found

    wire.answer = answer  # type: ignore[method-assign,assignment]


# ------------------------------------------------------------------------------------------------------------- creation


@pytest.mark.costly
def test_a_creation_is_looked_for_and_made_once(plane: Plane) -> None:
    request = PLANS.planned()
    native = client().submit(request)
    job, name = only(plane), request.body["displayName"]
    assert native == job.name
    looked = "GET customJobs"
    assert operations(plane) == ["GET bucket", looked, "POST customJobs", looked]
    bucket, before, made, first = [call for call in plane.wire.calls if call.operation != "POST token"]
    assert (bucket.path, bucket.query) == (f"/storage/v1/b/{BUCKET}", {"fields": "location,locationType"})
    assert before.path == first.path == made.path == JOBS
    assert before.query["filter"] == f'labels.cloudtrain-job="{name}"'
    assert (made.method, made.headers["content-type"]) == ("POST", "application/json")
    assert json.loads(made.body)["displayName"] == name
    answer = job.describe(numbers=False)
    assert {key: answer[key] for key in request.body} == request.body
    assert {call.account for call in plane.wire.calls} == {""}, "only handlers get the caller"
    assert all(call.token for call in (bucket, before, made, first))


def test_a_second_submit_finds_the_job(plane: Plane) -> None:
    request = PLANS.planned()
    first = client()
    native = first.submit(request)
    for again, wanted in ((client(), ["GET bucket", "GET customJobs"]), (first, ["GET customJobs"])):
        since = len(plane.wire.calls)
        assert again.submit(request) == native
        assert operations(plane, since) == wanted
    assert first.find(request) == native
    assert first.find(PLANS.planned(attempt=1)) is None
    assert client(location="us-central1").find(request) == native, "the planned location counts, not the present one"
    assert len(plane.jobs) == 1


def test_the_first_of_all_jobs_with_that_label_counts(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check over pages of a list with the newest first, and with names that contain the run's by chance."""
    monkeypatch.setattr("worlds.vertex.plane.PAGE", 1)
    request, account = PLANS.planned(), client().account
    account._prepared(changed(request, run="another-run"))()
    assert account.find(request) is None
    first, second = (account._prepared(request)() for _ in range(2))
    assert first != second
    since = len(plane.wire.calls)
    assert account.find(request) == first
    pages = [call.query["pageToken"] for call in plane.wire.calls[since:] if call.operation == "GET customJobs"]
    assert pages[0] == ""
    assert len(pages) == len(set(pages)) == 3


def test_a_job_with_that_label_of_another_request_is_a_conflict(plane: Plane) -> None:
    request, provider = PLANS.planned(), client()
    provider.account._prepared(changed(request, request="0123456789abcdef"))()
    since = len(plane.wire.calls)
    with pytest.raises(ConflictError) as caught:
        provider.submit(request)
    name = request.body["displayName"]
    why = f"Vertex AI has a job {name} of an earlier run of that id, which was another job"
    assert str(caught.value) == f"run_id: {why}"
    assert caught.value.hint == "choose another run id (--run-id)"
    assert provider.find(request) is None
    assert operations(plane, since) == ["GET bucket", "GET customJobs", "GET customJobs"]


def test_the_second_client_gives_way(plane: Plane) -> None:
    """Check a client that slept longer than its lease, while the list lacked the other client's job."""
    request = PLANS.planned()
    first = client().account._prepared(request)()
    plane.list_lag = 1e9
    after(plane, "POST customJobs", lambda: setattr(plane, "list_lag", 0.0))
    assert client().submit(request) == first
    ((second, job),) = [(name, job) for name, job in plane.jobs.items() if name != first]
    assert job.wait() == "JOB_STATE_CANCELLED"
    (cancel,) = [call for call in plane.wire.calls if call.operation == "POST cancel"]
    assert (cancel.path, cancel.json()) == (f"/v1/{second}:cancel", {})
    assert not plane.jobs[first].over


def test_a_created_job_counts_even_if_the_last_check_fails(plane: Plane) -> None:
    broken = Fault.broken("GET customJobs", 1)
    after(plane, "POST customJobs", lambda: plane.wire.faults.append(broken))
    native = client().submit(PLANS.planned())
    assert native == only(plane).name
    assert broken.times == 0


# ------------------------------------------------------------------------------------- refusals, and incomplete answers


def test_after_a_refusal_or_a_lost_answer_one_job_is_made(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own, "FIRST_HOLD", 0.0)
    provider = client()
    plane.quotas["custom_model_training_cpus"] = 0
    with pytest.raises(QuotaError, match=r"^create job: .*\nhint: ask for more of custom_model_training_cpus"):
        provider.submit(PLANS.planned())
    plane.quotas.clear()
    assert provider.submit(PLANS.planned()) == only(plane).name
    lost = PLANS.planned(attempt=1)
    plane.wire.faults.append(Fault("POST customJobs", done=True))
    with pytest.raises(LostContactError, match=r"^Google Cloud does not answer: create job: "):
        provider.submit(lost)
    assert provider.submit(lost) == max(plane.jobs.values(), key=lambda job: job.created).name
    assert len(plane.jobs) == 2


@pytest.mark.parametrize(
    ("fault", "unsure"),
    [
        (Refusal("INVALID_ARGUMENT", "no"), False),
        (Refusal("PERMISSION_DENIED", "no"), False),
        (Refusal("INVALID_ARGUMENT", "late", status=408), True),
        (Refusal("ABORTED", "Please retry."), False),
        (Refusal("INTERNAL", "oh"), True),
        (Refusal("UNAVAILABLE", "busy"), True),
        (None, True),
    ],
    ids=["400", "403", "408", "409", "500", "503", "cut"],
)
def test_only_an_uncertain_answer_makes_the_next_call_check(
    plane: Plane, monkeypatch: pytest.MonkeyPatch, fault: Refusal | None, unsure: bool
) -> None:
    """Check that the next call looks for the job of the first one for a while."""
    monkeypatch.setattr(_cloud, "SETTLE", 0.7)
    provider, request = client(), PLANS.planned()
    plane.wire.faults.append(Fault("POST customJobs", fault))
    assert not provider.may_have_sent(request)
    with pytest.raises(CloudtrainError):
        provider.submit(request)
    assert provider.may_have_sent(request) == unsure
    plane.quotas["custom_model_training_cpus"], before = 0, plane.wire.count("GET customJobs")
    with pytest.raises(QuotaError):
        provider.submit(request)
    assert (plane.wire.count("GET customJobs") - before > 1) == unsure
    assert plane.jobs == {}


def test_an_answer_without_a_job_is_a_lost_one(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_cloud, "SETTLE", 0.0)
    provider, request, bodies = client(), PLANS.planned(), dict[str, bytes]()
    served = plane.wire.answer

    def answer(*words: Any) -> Answer | None:
        found = served(*words)
        return Answer(bodies["it"]) if plane.wire.calls[-1].operation == "POST customJobs" and bodies else found

    plane.wire.answer = answer  # type: ignore[method-assign]
    for text, why in (
        (b"<html>", "Failed to load JSON: "),
        (b"{}", "no job has the name ''$"),
        (b'{"name": "projects/p/locations/l"}', "no job has the name 'projects/p/locations/l'$"),
    ):
        bodies["it"], plane.list_lag = text, 1e9
        with pytest.raises(LostContactError, match=rf"^create job: the answer names no job: {why}") as caught:
            provider.submit(request)
        assert "\n" not in str(caught.value)
    plane.list_lag = 0.0
    assert provider.submit(request) == min(plane.jobs.values(), key=lambda job: job.created).name


def test_a_job_that_no_list_has_yet_is_awaited(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that this happens only after a lost answer."""
    monkeypatch.setattr(_cloud, "SETTLE", 60.0)
    provider, request = client(), PLANS.planned()
    plane.wire.faults.append(Fault("POST customJobs", done=True))
    with pytest.raises(LostContactError):
        provider.submit(request)
    plane.list_lag = 1e9
    after(plane, "GET customJobs", lambda: setattr(plane, "list_lag", 0.0))
    assert provider.submit(request) == only(plane).name
    assert plane.wire.count("POST customJobs") == 1


@pytest.mark.parametrize(
    ("refusal", "kind", "says"),
    [
        (Refusal("INVALID_ARGUMENT", "bad"), SpecError, "get job: bad"),
        (Refusal("PERMISSION_DENIED", "no"), AuthError, "get job: no; check vertex.project, and give the caller"),
        (Refusal("NOT_FOUND", "gone"), NotFoundError, "get job: gone"),
        (Refusal("ALREADY_EXISTS", "there"), ConflictError, "run_id: get job: there"),
        (Refusal("ABORTED", "again"), LostContactError, "Google Cloud does not answer now: get job: again"),
        (Refusal("RESOURCE_EXHAUSTED", "per minute"), LostContactError, "get job: per minute (status 429)"),
        (Refusal("RESOURCE_EXHAUSTED", "Quota exceeded"), QuotaError, "get job: Quota exceeded; ask for more"),
        (Refusal("RESOURCE_EXHAUSTED", "Insufficient resources"), CapacityError, "try another machine"),
        (Refusal("INTERNAL", "oh"), LostContactError, "get job: oh (status 500)"),
        (Refusal("UNAVAILABLE", "busy"), LostContactError, "get job: busy (status 503)"),
        (Refusal("UNAUTHENTICATED", "who"), AuthError, "get job: who; sign in again"),
        (None, LostContactError, "Google Cloud does not answer: get job: "),
    ],
)
def test_every_refusal_is_a_cloudtrain_error(plane: Plane, refusal: Refusal | None, kind: type, says: str) -> None:
    plane.wire.faults.append(Fault("GET customJob", refusal, times=10))
    with pytest.raises(CloudtrainError) as caught:
        client().status(NOWHERE)
    assert type(caught.value) is kind
    assert says in caught.value.with_hint()
    assert "\n" not in str(caught.value)


def test_a_service_that_never_answers_is_given_up(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the timeout of a minute, shortened here."""
    provider, finished = client(), threading.Event()
    native = provider.submit(PLANS.planned())
    assert own.TIMEOUT == 60
    after(plane, "GET customJobs", lambda: monkeypatch.setattr(own, "TIMEOUT", 0.2))
    for operation in ("POST customJobs", "GET customJob"):
        after(plane, operation, lambda: finished.wait(20))
    for call, what in (
        (lambda: provider.submit(PLANS.planned(attempt=1)), "create job"),
        (lambda: provider.status(native), "get job"),
    ):
        with pytest.raises(LostContactError, match=rf"^Google Cloud does not answer: {what}: "):
            call()
    finished.set()


def test_each_error_names_its_call(plane: Plane) -> None:
    refused = Refusal("INVALID_ARGUMENT", "no")
    request, provider = PLANS.planned(), client()
    native = provider.submit(request)
    for operation, call, what in (
        ("GET customJobs", lambda: provider.account.find(request), "list jobs"),
        ("GET customJob", lambda: provider.status(native), "get job"),
        ("POST cancel", lambda: provider.cancel(native), "cancel job"),
        ("POST entries", lambda: provider.logs(native), "read the log"),
        ("GET bucket", lambda: client().account.place("other"), "look at gs://other"),
        ("POST customJobs", lambda: client().submit(PLANS.planned(attempt=1)), "create job"),
    ):
        plane.wire.faults[:] = [Fault(operation, refused)]
        with pytest.raises(SpecError, match=f"^{what}: no$"):
            call()


# ----------------------------------------------------------------------------------------------------- requested pauses


@pytest.mark.parametrize(
    ("code", "headers", "least", "most"),
    [
        ("RESOURCE_EXHAUSTED", {"Retry-After": "7"}, 6, 7),
        ("RESOURCE_EXHAUSTED", {"Retry-After": "2.5"}, 1.5, 2.5),
        ("RESOURCE_EXHAUSTED", {}, 4, 5),
        ("RESOURCE_EXHAUSTED", {"Retry-After": "Wed, 21 Oct 2026 07:28:00 GMT"}, 4, 5),
        ("RESOURCE_EXHAUSTED", {"Retry-After": "99999"}, 299, 300),
        ("UNAVAILABLE", {"Retry-After": "7"}, 6, 7),
        ("UNAVAILABLE", {}, -1e9, 0),
        ("INTERNAL", {"Retry-After": "7"}, -1e9, 0),
    ],
)
def test_a_service_that_asks_for_a_pause_gets_it(
    plane: Plane, code: str, headers: Mapping[str, str], least: float, most: float
) -> None:
    """Check that it lasts as long as requested, and that other services are not delayed."""
    busy = Refusal(code, "Too many requests per minute", headers=headers)
    plane.wire.faults += [Fault("GET customJob", busy), Fault("POST customJobs", busy)]
    provider = client()
    began = time.monotonic()
    with pytest.raises(LostContactError, match=r"^Google Cloud does not answer now: get job: Too many .*status"):
        provider.status(NOWHERE)
    spent = time.monotonic() - began
    assert least - spent < provider.account.backoff.left("jobs") <= most
    assert provider.account.backoff.left("storage") <= 0
    before = len(plane.wire.calls)
    with pytest.raises(CloudtrainError) as caught:
        provider.status(NOWHERE)
    waits = re.fullmatch(r"get job: Google Cloud asks for a pause of (\d+) s before the next call", str(caught.value))
    assert (waits is not None) == (most > 0)
    assert waits is None or int(waits[1]) <= most
    assert (len(plane.wire.calls) > before) == (most <= 0)
    other = client()
    with pytest.raises(LostContactError, match=r"^Google Cloud does not answer now: create job: Too many"):
        other.submit(PLANS.planned())
    assert least - 60 < other.account.backoff.left("jobs") <= most
    plane.wire.faults.append(Fault("GET bucket", busy))
    with pytest.raises(LostContactError, match=r"^Google Cloud does not answer now: look at gs://b: Too many"):
        other.account.place("b")
    assert least - 60 < other.account.backoff.left("storage") <= most


# --------------------------------------------------------------------------------------------------- status and cancel


@pytest.mark.parametrize("wrong", ["x", "projects/p/locations/l/customJobs", f"{NOWHERE}/", f" {NOWHERE}"])
def test_an_invalid_name_makes_no_call(plane: Plane, wrong: str) -> None:
    for call in (client().status, client().cancel):
        with pytest.raises(NotFoundError) as caught:
            call(wrong)
        assert str(caught.value) == f"run: {wrong!r} is not projects/P/locations/L/customJobs/ID"
    assert plane.wire.calls == []
    assert own.job_of(NOWHERE) == ("contract", "europe-west4", "1")


def test_a_status_is_one_call(plane: Plane) -> None:
    provider = client()
    native = provider.submit(PLANS.planned(instance_count=2))
    since = len(plane.wire.calls)
    found = provider.status(native)
    assert (found.state, found.instance_type, found.started, found.cost_usd) == ("pending", "n1-standard-4", None, None)
    assert found.native in ("PENDING", "QUEUED")
    (call,) = plane.wire.calls[since:]
    assert (call.method, call.path, call.query) == ("GET", f"/v1/{native}", {})
    job = only(plane)
    job.end("FAILED", 3, "The replica workerpool0-0 exited with a non-zero status of 1.")
    ended = provider.status(native)
    assert (ended.state, ended.category) == ("failed", "user_error")
    assert (ended.started, ended.limit_s) == (None, 86400), "only the nodes know the start"


def test_the_end_of_a_job_is_taken_from_the_client_s_clock(plane: Plane) -> None:
    """Check a client that saw the job alive; other clients use the service's times."""
    first, late = client(), client()
    native = first.submit(PLANS.planned())
    before = time.monotonic()
    first.status(native)
    assert before <= first.account.alive[native] <= time.monotonic()
    assert first.account.ended == {}
    job = only(plane)
    job.end("FAILED", 13, "Internal error.")
    job.record.end_time.FromSeconds(int(time.time()) - HOUR)
    moment = time.monotonic()
    assert first.status(native).final
    assert moment <= first.account.ended[native] <= time.monotonic()
    assert late.status(native).final
    assert moment - HOUR - 5 <= late.account.ended[native] <= time.monotonic() - HOUR + 5
    known = dict(late.account.ended), dict(first.account.ended)
    late.status(native)
    first.status(native)
    assert (late.account.ended, first.account.ended) == known
    assert late.account.alive == {}


def test_a_cancel_is_sent_once_and_ended_jobs_stay(plane: Plane) -> None:
    provider = client()
    native = provider.submit(PLANS.planned())
    provider.cancel(native)
    assert only(plane).wait() == "JOB_STATE_CANCELLED"
    provider.cancel(native)
    assert operations(plane)[-3:] == ["POST cancel", "POST cancel", "GET customJob"]
    with pytest.raises(NotFoundError, match=r"^cancel job: The CustomJob .* does not exist"):
        provider.cancel(NOWHERE)
    assert operations(plane)[-1] == "POST cancel"
    other = provider.submit(PLANS.planned(attempt=1))
    refused = Refusal("INVALID_ARGUMENT", "not now")
    for state, quiet in ((6, True), (7, True), (3, False)):  # JobState: CANCELLING, CANCELLED, RUNNING
        plane.unknown[other] = state
        plane.wire.faults.append(Fault("POST cancel", refused))
        if quiet:
            provider.cancel(other)
        else:
            with pytest.raises(SpecError, match=r"^cancel job: not now$"):
                provider.cancel(other)


def test_a_log_is_read_from_its_cursor(plane: Plane) -> None:
    provider = client()
    native = provider.submit(PLANS.planned())
    plane.entries.put(only(plane).id, "workerpool0-0", ["one", "two"])
    first = provider.logs(native)
    assert sorted(line.text for line in first.lines if line.node == "0") == ["one", "two"]
    plane.entries.put(only(plane).id, "workerpool0-0", ["three"])
    rest = provider.logs(native, first.cursor).lines  # the service's own lines may come late
    assert [line.text for line in rest if line.node == "0"] == ["three"]
    query = [call.json() for call in plane.wire.calls if call.operation == "POST entries"][-1]
    assert query["resourceNames"] == ["projects/contract"]
    assert f'resource.labels.job_id="{only(plane).id}"' in query["filter"]


def test_names_have_the_project_s_number_and_log_queries_its_id(plane: Plane) -> None:
    """Check this because every recorded name has the number, and Cloud Logging documents the id; the fake accepts no
    other."""
    provider = client()
    request = PLANS.planned()
    native = provider.submit(request)
    assert native == f"projects/{plane.number}/locations/europe-west4/customJobs/{only(plane).id}"
    assert (provider.find(request), client().find(request)) == (native, native)
    assert provider.status(native).state == "pending"
    assert provider.status(native.replace(plane.number, plane.project)).state == "pending"
    plane.entries.put(only(plane).id, "workerpool0-0", ["one"])
    assert [line.text for line in provider.logs(native).lines if line.node == "0"] == ["one"]
    provider.cancel(native)
    assert only(plane).wait() == "JOB_STATE_CANCELLED"


# -------------------------------------------------------------------------------------- another region, another project


@pytest.mark.costly
def test_a_region_without_the_machine_moves_a_run_to_the_next(
    plane: Plane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check this because Vertex AI's message is that of a machine that does not exist at all."""
    plane.others.add("us-central1")
    plane.lacking.add("europe-west4")
    plane.gcs.make("team-us", "US-CENTRAL1")
    other = {"store": "gs://team-us/store", "vertex": {"location": "us-central1"}}
    table = {
        "provider": "vertex",
        "store": f"gs://{BUCKET}/store",
        "fallback": ["us"],
        "vertex": SETTINGS,
        "profiles": {"us": other},
    }
    code = tmp_path / "code"
    code.mkdir()
    (code / "cloudtrain.toml").write_text(tomli_w.dumps(table))
    (code / "train.py").write_text("print('hello')\n")
    monkeypatch.chdir(code)
    run = Estimator(entry_point="train.py", image="team/trainer:1", gpu="H100:8").fit(wait=False, run_id="moved")
    assert "/locations/us-central1/" in only(plane).name
    (refusal,) = run.result()["refusals"]
    assert refusal["category"] == "capacity"
    assert "Machine type a3-highgpu-8g is not supported" in refusal["reason"]


def test_one_region_without_the_machine_is_one_line(plane: Plane) -> None:
    plane.lacking.add("europe-west4")
    with pytest.raises(CapacityError, match=r"hint: try another location or machine\nGoogle's page .*us-east4"):
        client().submit(PLANS.planned(gpu="H100:8"))


def use_user_credentials(plane: Plane, monkeypatch: pytest.MonkeyPatch, quota: str | None) -> None:
    """Use a user's credentials, as gcloud writes them, with ``quota`` as the billed project."""

    def default(scopes: Any, quota_project_id: str | None = None) -> tuple[Any, str]:
        found = Token(plane.identity.issue(plane.identity.email), quota_project_id=quota_project_id or quota)
        return found, OTHER

    monkeypatch.setattr("google.auth.default", default)


def billed_projects(plane: Plane) -> list[str | None]:
    return [call.headers.get("x-goog-user-project") for call in plane.wire.calls]


def test_calls_are_billed_to_the_project_of_the_settings(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check this because gcloud writes another project into a user's credentials, in which Vertex AI may be off."""
    use_user_credentials(plane, monkeypatch, OTHER)
    native = client().submit(PLANS.planned())
    assert client().status(native).state == "pending"
    assert set(billed_projects(plane)) == {"contract"}


def test_a_caller_that_may_not_bill_the_project_calls_without_it(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    use_user_credentials(plane, monkeypatch, None)
    plane.consumer = False
    provider = client()
    native = provider.submit(PLANS.planned())
    assert provider.status(native).state == "pending"
    assert billed_projects(plane).count("contract") == 1, "the project must be tried once"
    assert set(billed_projects(plane)[1:]) == {None}
    monkeypatch.setenv("GOOGLE_CLOUD_QUOTA_PROJECT", "contract")
    plane.consumer = True
    assert client().find(PLANS.planned()) == native


def test_another_quota_project_that_has_no_vertex_is_named(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    use_user_credentials(plane, monkeypatch, OTHER)
    plane.consumer = False
    with pytest.raises(AuthError, match=f"hint: .*services enable aiplatform.googleapis.com --project {OTHER}$"):
        client().status(NOWHERE)


def test_a_throttled_log_names_the_shared_quota(plane: Plane) -> None:
    provider = client()
    native = provider.submit(PLANS.planned())
    plane.entries.reads = 1
    first = provider.logs(native)
    for _ in range(2):  # refused by the service, then not even called
        with pytest.raises(LostContactError, match="60 reads a minute for a project") as caught:
            provider.logs(native, first.cursor)
        assert caught.value.throttled
    plane.wire.faults.append(Fault("POST entries", Refusal("UNAVAILABLE", "down")))
    with pytest.raises(LostContactError) as caught:
        client().logs(native, first.cursor)
    assert not caught.value.throttled


# ------------------------------------------------------------------------------------------------------------- buckets


@pytest.mark.parametrize(
    ("place", "says"),
    [
        (
            ("US-CENTRAL1", "region"),
            f"store: gs://{BUCKET} is in us-central1, and the jobs are in europe-west4; set vertex.location to "
            "us-central1, or run: gcloud storage buckets create gs://NAME --location=europe-west4",
        ),
        (
            ("EU", "multi-region"),
            f"store: gs://{BUCKET} is a multi-region bucket (eu), which no job can mount; run: "
            "gcloud storage buckets create gs://NAME --location=europe-west4",
        ),
    ],
)
def test_a_store_that_jobs_cannot_mount_is_refused_before_creation(
    plane: Plane, place: tuple[str, str], says: str
) -> None:
    plane.gcs.places[BUCKET] = place
    assert client().account.place(BUCKET) == (place[0].lower(), place[1])
    plane.wire.calls.clear()
    with pytest.raises(SpecError) as caught:
        client().submit(PLANS.planned())
    assert caught.value.with_hint() == says
    assert operations(plane) == ["GET bucket"]


def answer_with(plane: Plane, value: Any) -> None:
    """Serve each call, but answer all except those for tokens with this."""
    wire, served = plane.wire, plane.wire.answer

    def answer(*words: Any) -> Answer | None:
        found = served(*words)
        return found if wire.calls[-1].operation == "POST token" else Answer(value)

    wire.answer = answer  # type: ignore[method-assign]


def test_a_proxy_s_page_for_an_answer_is_one_line(plane: Plane) -> None:
    request, provider = PLANS.planned(), client()
    native = provider.submit(request)
    answer_with(plane, b"<html>")
    for call, what in (
        (lambda: provider.status(native), "get job"),
        (lambda: provider.account.find(request), "list jobs"),
        (lambda: client().account.place(BUCKET), f"look at gs://{BUCKET}"),
    ):
        with pytest.raises(PlatformError, match=rf"^{what}: the answer is not JSON$"):
            call()


def test_a_proxy_s_page_for_a_token_is_one_line(plane: Plane) -> None:
    plane.wire.answer = lambda *words: Answer(b"<html>")  # type: ignore[method-assign]
    why = r"^Google Cloud does not answer: get job: the answer to a sign-in is not JSON$"
    with pytest.raises(LostContactError, match=why):
        client().status(NOWHERE)


@pytest.mark.parametrize("wrong", [[], "x", {"expiry": 5}, {"type": "external_account", "audience": 5}])
def test_a_broken_file_of_credentials_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: Any) -> None:
    kept = {"type": "authorized_user", "client_id": "a", "client_secret": "b", "refresh_token": "c"}
    (tmp_path / "key.json").write_text(json.dumps({**kept, **wrong} if isinstance(wrong, dict) else wrong))
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "key.json"))
    with pytest.raises(AuthError, match=r"^sign in: the credentials cannot be used \(\w+Error: .*\)\nhint: sign in "):
        client().status(NOWHERE)


def test_a_bucket_without_metadata_is_accepted(plane: Plane) -> None:
    answer_with(plane, {})
    assert client().account.place(BUCKET) == ("", "region")


def test_a_store_in_a_missing_bucket(plane: Plane) -> None:
    del plane.gcs.places[BUCKET]
    with pytest.raises(SpecError) as caught:
        client().submit(PLANS.planned())
    assert str(caught.value) == f"store: there is no bucket {BUCKET}"
    assert client().account.place(BUCKET) == ("", "region"), "nothing is known of a missing bucket that a job reads"


def test_inputs_and_checkpoints_elsewhere(plane: Plane) -> None:
    """Check that one region is slow but allowed, and that a bucket of several regions is refused."""
    plane.gcs.make("wide", "EU", "multi-region")
    plane.gcs.make("far", "US-CENTRAL1")
    ours = f"gs://{BUCKET}/x"
    why = "gs://wide is a multi-region bucket (eu), which no job can mount"
    made = client()

    def planned(attempt: int, resume: str = "", **inputs: str) -> Request:
        where = PLANS.layout(inputs={name: LayoutInput(url=url) for name, url in inputs.items()}, resume=resume or None)
        job = Job.make(entry_point="train.py", image="team/trainer:1", inputs=inputs, resume_from=resume or None)
        return made.plan(job, where, attempt=attempt)

    for request, field in (
        (planned(0, here=ours, wide="gs://wide/x"), "inputs.wide"),
        (planned(0, resume="gs://wide/runs/old", far="gs://far/x"), "resume_from"),
    ):
        with pytest.raises(SpecError) as caught:
            made.submit(request)
        assert caught.value.with_hint() == f"{field}: {why}; copy the data into a bucket in europe-west4"
    assert plane.jobs == {}
    for attempt in (1, 2):
        made.submit(planned(attempt, here=ours, far="gs://far/x", nowhere="gs://no-such-bucket/x"))
    buckets = [call.path.rpartition("/")[2] for call in plane.wire.calls if call.operation == "GET bucket"]
    assert buckets == [BUCKET, "wide", "far", "no-such-bucket", "no-such-bucket"], (
        "known buckets must not be read again"
    )
    assert len(plane.jobs) == 2


def test_a_bucket_that_the_caller_may_not_read_is_accepted(plane: Plane) -> None:
    plane.gcs.places[BUCKET] = ("EU", "multi-region")
    plane.wire.faults.append(Fault("GET bucket", Refusal.denied("storage.buckets.get", BUCKET)))
    provider = client()
    provider.submit(PLANS.planned())
    assert len(plane.jobs) == 1
    assert provider.account.place(BUCKET) == ("eu", "multi-region"), "the bucket must be read again"


# ------------------------------------------------------------------------------------------------------------- a shell


def test_the_shell_is_the_page_of_its_node(plane: Plane) -> None:
    provider, request = client(), PLANS.planned(interactive=True, instance_count=3)
    native = provider.submit(request)
    pages = {"workerpool0-0": "https://first.example", "workerpool1-0": "https://second.example"}
    answer_with(plane, {"name": native, "state": "JOB_STATE_RUNNING", "webAccessUris": pages})
    assert [provider.shell(request, native, node, [], tty=True).url for node in (0, 1)] == [*pages.values()]
    no_command = "shell: not supported by provider vertex: its shell is a page, which takes no command; leave it out"
    closed = "interactive: the job was sent without it, and lets no shell in; send a job with --interactive"
    for asked, node, command, line in (
        (request, 2, [], "node: the node's shell is not ready yet; try again in a minute"),
        (request, 0, ["nvidia-smi"], no_command),
        (PLANS.planned(), 0, [], closed),
    ):
        with pytest.raises(SpecError) as caught:
            provider.shell(asked, native, node, command, tty=True)
        assert caught.value.with_hint() == line


# -------------------------------------------------------------------------------------------------- callers and regions


def test_without_credentials_one_line_gives_the_sign_in_command(
    plane: Plane, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS")
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    for call in (lambda: client().status(NOWHERE), lambda: client().storage("gs://b/x"), own.credentials):
        with pytest.raises(AuthError, match=r"^no Google Cloud credentials\nhint: sign in .*gcloud auth"):
            call()
    assert client().storage("/a/folder") == {}


def test_credentials_have_a_scope_and_the_caller_s_name(plane: Plane) -> None:
    assert own.credentials().scopes == ["https://www.googleapis.com/auth/cloud-platform"]
    assert client().principal() == plane.identity.email
    assert client().storage(f"gs://{BUCKET}/x")["token"].service_account_email == plane.identity.email


def test_refused_credentials_are_fetched_again_by_the_next_call(plane: Plane) -> None:
    provider = client()
    native = provider.submit(PLANS.planned())
    plane.identity.expire()
    plane.identity.signed_in = False
    with pytest.raises(AuthError, match=r"^get job: the credentials are refused \(.*\)\nhint: sign in again"):
        provider.status(native)
    plane.identity.signed_in = True
    assert provider.status(native).state == "pending"
    session = provider.account.session
    assert provider.account.session is session
    assert provider.account._client("europe-west4") is provider.account._client("europe-west4")
    provider.account._forget()
    assert provider.account.session is not session


def test_gcloud_s_own_variables_give_the_addresses_of_services(monkeypatch: pytest.MonkeyPatch) -> None:
    override = "CLOUDSDK_API_ENDPOINT_OVERRIDES_"
    for find, variable, public in (
        (partial(own.endpoint, "logging"), f"{override}LOGGING", "https://logging.googleapis.com"),
        (own.storage_endpoint, "STORAGE_EMULATOR_HOST", "https://storage.googleapis.com"),
        (
            partial(own.endpoint, "aiplatform", location="l"),
            f"{override}AIPLATFORM",
            "https://l-aiplatform.googleapis.com",
        ),
    ):
        monkeypatch.delenv(variable, raising=False)
        assert find() == public
        for value in ("", "https://own.example", "https://own.example/", "https://own.example/X/"):
            monkeypatch.setenv(variable, value)
            assert find() == (value.rstrip("/") or public)


def test_doctor_in_a_sound_project(plane: Plane) -> None:
    rows = {check.name: check for check in client().checks(f"gs://{BUCKET}/store", PLANS.planned())}
    assert {name: check.status for name, check in rows.items()} == {
        **dict.fromkeys(("sdk", "credentials", "api", "bucket", "permissions", "service account", "quota"), "ok"),
        "image": rows["image"].status,
    }
    bare = {check.name: check.status for check in client().checks("", None)}
    assert (bare["bucket"], bare["quota"], bare["image"]) == ("skipped",) * 3
