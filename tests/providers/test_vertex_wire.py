"""Provider ``vertex``, call by call: what it sends, in what order, and what it makes of each answer.

At the wire like test_vertex_calls, and with nothing that takes time: one project a test, requests that no store holds.
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
AGAIN = "an earlier call may have created the job"


@pytest.fixture
def plane(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Plane]:
    """A project without a machine to give: its jobs wait."""
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
    """Another client of the project."""
    return Provider(**{**SETTINGS, **settings})


def operations(plane: Plane, since: int = 0) -> list[str]:
    """What was asked for but tokens, in order."""
    return [call.operation for call in plane.wire.calls[since:] if call.operation != "POST token"]


def only(plane: Plane) -> CustomJob:
    (job,) = plane.jobs.values()
    return job


def changed(request: Request, /, **labels: str) -> Request:
    """The same job with other labels."""
    body = {**request.body, "labels": {**request.body["labels"], **{f"cloudtrain-{k}": v for k, v in labels.items()}}}
    return dataclasses.replace(request, body=body)


def after(plane: Plane, operation: str, then: Callable[[], object]) -> None:
    """Call ``then`` once such a call has been served."""
    wire, served = plane.wire, plane.wire.answer

    def answer(method: str, target: str, sent: bytes, headers: Mapping[str, str]) -> Answer | None:
        found = served(method, target, sent, headers)
        if wire.calls[-1].operation == operation:
            then()
        return found

    wire.answer = answer  # type: ignore[method-assign,assignment]


# ------------------------------------------------------------------------------------------------------------- creation


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
    told = job.describe(numbers=False)
    assert {key: told[key] for key in request.body} == request.body
    assert {call.account for call in plane.wire.calls} == {""}, "who called is told to handlers alone"
    assert all(call.token for call in (bucket, before, made, first))


def test_whoever_submits_again_finds_the_job(plane: Plane) -> None:
    request = PLANS.planned()
    first = client()
    native = first.submit(request)
    for again, asked in ((client(), ["GET bucket", "GET customJobs"]), (first, ["GET customJobs"])):
        since = len(plane.wire.calls)
        assert again.submit(request) == native
        assert operations(plane, since) == asked
    assert first.find(request) == native
    assert first.find(PLANS.planned(attempt=1)) is None
    assert client(location="us-central1").find(request) == native, "where it was planned for, not where we are now"
    assert len(plane.jobs) == 1


def test_of_all_jobs_of_that_label_the_first_counts(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over pages of a list that has the newest first, and none that bears our run's name by chance."""
    monkeypatch.setattr("worlds.vertex.plane.PAGE", 1)
    request, account = PLANS.planned(), client().account
    account._prepared(changed(request, run="somebody-else"))()
    assert account.find(request) is None
    first, second = (account._prepared(request)() for _ in range(2))
    assert first != second
    since = len(plane.wire.calls)
    assert account.find(request) == account.claimed(request) == first
    pages = [call.query["pageToken"] for call in plane.wire.calls[since:] if call.operation == "GET customJobs"]
    assert pages[0] == ""
    assert len(pages) == 6
    assert len(set(pages)) == 3


def test_a_job_of_that_label_that_was_another_request_is_nobodys(plane: Plane) -> None:
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


def test_who_comes_second_gives_way(plane: Plane) -> None:
    """A client that slept for longer than its lease, while the list did not show the other's job yet."""
    request = PLANS.planned()
    first = client().account._prepared(request)()
    plane.list_lag = 1e9
    after(plane, "POST customJobs", lambda: setattr(plane, "list_lag", 0.0))
    assert client().submit(request) == first
    ((second, job),) = [(name, job) for name, job in plane.jobs.items() if name != first]
    assert job.wait() == "JOB_STATE_CANCELLED"
    (asked,) = [call for call in plane.wire.calls if call.operation == "POST cancel"]
    assert (asked.path, asked.json()) == (f"/v1/{second}:cancel", {})
    assert not plane.jobs[first].over


def test_a_job_that_was_made_is_ours_whatever_becomes_of_the_last_look(plane: Plane) -> None:
    broken = Fault.broken("GET customJobs", 1)
    after(plane, "POST customJobs", lambda: plane.wire.faults.append(broken))
    native = client().submit(PLANS.planned())
    assert native == only(plane).name
    assert broken.times == 0


# ------------------------------------------------------------------------------------- refusals, and answers that lack


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
def test_only_an_answer_that_leaves_it_open_is_followed_by_doubt(
    plane: Plane, monkeypatch: pytest.MonkeyPatch, fault: Refusal | None, unsure: bool
) -> None:
    """By the next call: a refusal of that may be the work of the first job, which has used up the quota."""
    monkeypatch.setattr(own, "SETTLE", 0.0)
    provider, request = client(), PLANS.planned()
    plane.wire.faults.append(Fault("POST customJobs", fault))
    with pytest.raises(CloudtrainError):
        provider.submit(request)
    plane.quotas["custom_model_training_cpus"] = 0
    with pytest.raises(LostContactError if unsure else QuotaError) as caught:
        provider.submit(request)
    assert str(caught.value).endswith(f"; {AGAIN}") == unsure
    assert plane.jobs == {}


def test_an_answer_that_tells_of_no_job_is_a_lost_one(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own, "SETTLE", 0.0)
    provider, request, said = client(), PLANS.planned(), dict[str, bytes]()
    served = plane.wire.answer

    def answer(*words: Any) -> Answer | None:
        found = served(*words)
        return Answer(said["it"]) if plane.wire.calls[-1].operation == "POST customJobs" and said else found

    plane.wire.answer = answer  # type: ignore[method-assign]
    for text in (b"<html>", b"{}", b'{"name": "projects/p/locations/l"}'):
        said["it"], plane.list_lag = text, 1e9
        with pytest.raises(LostContactError, match=r"^create job: the answer names no job: ") as caught:
            provider.submit(request)
        assert "\n" not in str(caught.value)
    plane.list_lag = 0.0
    assert provider.submit(request) == min(plane.jobs.values(), key=lambda job: job.created).name


def test_a_job_that_is_in_no_list_yet_is_looked_for_for_a_while(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    """After an answer that was lost, and only then."""
    monkeypatch.setattr(own, "SETTLE", 60.0)
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
def test_every_refusal_is_one_of_ours(plane: Plane, refusal: Refusal | None, kind: type, says: str) -> None:
    plane.wire.faults.append(Fault("GET customJob", refusal, times=10))
    with pytest.raises(CloudtrainError) as caught:
        client().status(NOWHERE)
    assert type(caught.value) is kind
    assert says in caught.value.with_hint()
    assert "\n" not in str(caught.value)


def test_a_service_that_never_answers_is_given_up(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a minute; here sooner."""
    provider, gone = client(), threading.Event()
    native = provider.submit(PLANS.planned())
    assert own.TIMEOUT == 60
    after(plane, "GET customJobs", lambda: monkeypatch.setattr(own, "TIMEOUT", 0.2))
    for operation in ("POST customJobs", "GET customJob"):
        after(plane, operation, lambda: gone.wait(20))
    for call, what in (
        (lambda: provider.submit(PLANS.planned(attempt=1)), "create job"),
        (lambda: provider.status(native), "get job"),
    ):
        with pytest.raises(LostContactError, match=rf"^Google Cloud does not answer: {what}: "):
            call()
    gone.set()


def test_each_call_says_what_it_was_for(plane: Plane) -> None:
    refused = Refusal("INVALID_ARGUMENT", "no")
    request, provider = PLANS.planned(), client()
    native = provider.submit(request)
    for operation, call, what in (
        ("GET customJobs", lambda: provider.account.claimed(request), "list jobs"),
        ("GET customJob", lambda: provider.status(native), "get job"),
        ("POST cancel", lambda: provider.cancel(native), "cancel job"),
        ("POST entries", lambda: provider.logs(native), "read the log"),
        ("GET bucket", lambda: client().account.place("other"), "look at gs://other"),
        ("POST customJobs", lambda: client().submit(PLANS.planned(attempt=1)), "create job"),
    ):
        plane.wire.faults[:] = [Fault(operation, refused)]
        with pytest.raises(SpecError, match=f"^{what}: no$"):
            call()


# ----------------------------------------------------------------------------------------------------- being left alone


@pytest.mark.parametrize(
    ("code", "told", "least", "most"),
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
def test_a_service_that_asks_to_be_left_alone_is(
    plane: Plane, code: str, told: Mapping[str, str], least: float, most: float
) -> None:
    """For as long as it says; the others are not kept waiting."""
    busy = Refusal(code, "Too many requests per minute", headers=told)
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


# --------------------------------------------------------------------------------------------------- status and cancel


@pytest.mark.parametrize("wrong", ["x", "projects/p/locations/l/customJobs", f"{NOWHERE}/", f" {NOWHERE}"])
def test_what_is_no_jobs_name_is_asked_of_nobody(plane: Plane, wrong: str) -> None:
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
    (asked,) = plane.wire.calls[since:]
    assert (asked.method, asked.path, asked.query) == ("GET", f"/v1/{native}", {})
    job = only(plane)
    job.end("FAILED", 3, "The replica workerpool0-0 exited with a non-zero status of 1.")
    ended = provider.status(native)
    assert (ended.state, ended.category) == ("failed", "user_error")
    assert (ended.started, ended.limit_s) == (None, 86400), "when it began its nodes know"


def test_when_a_job_ended_is_known_by_our_own_clock(plane: Plane) -> None:
    """By whoever saw it alive; by others as the service's times tell."""
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


def test_a_cancel_is_asked_for_once_and_what_is_over_stays(plane: Plane) -> None:
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


def test_a_log_is_read_on_from_its_cursor(plane: Plane) -> None:
    provider = client()
    native = provider.submit(PLANS.planned())
    plane.entries.put(only(plane).id, "workerpool0-0", ["one", "two"])
    first = provider.logs(native)
    assert sorted(line.text for line in first.lines if line.node == "0") == ["one", "two"]
    plane.entries.put(only(plane).id, "workerpool0-0", ["three"])
    rest = provider.logs(native, first.cursor).lines  # the service's own lines may come late
    assert [line.text for line in rest if line.node == "0"] == ["three"]
    asked = [call.json() for call in plane.wire.calls if call.operation == "POST entries"][-1]
    assert asked["resourceNames"] == ["projects/contract"]
    assert f'resource.labels.job_id="{only(plane).id}"' in asked["filter"]


def test_names_hold_the_projects_number_and_the_log_is_asked_for_by_its_id(plane: Plane) -> None:
    """Every recorded name has the number; Cloud Logging documents the id, and the fake's takes nothing else."""
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


def test_a_region_without_the_machine_is_left_for_the_next(
    plane: Plane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Vertex AI's text is that of a machine that does not exist at all."""
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


def users(plane: Plane, monkeypatch: pytest.MonkeyPatch, quota: str | None) -> None:
    """Credentials as gcloud leaves them: of a user, with ``quota`` as the project against which calls count."""

    def default(scopes: Any, quota_project_id: str | None = None) -> tuple[Any, str]:
        found = Token(plane.identity.issue(plane.identity.email), quota_project_id=quota_project_id or quota)
        return found, OTHER

    monkeypatch.setattr("google.auth.default", default)


def consumers(plane: Plane) -> list[str | None]:
    return [call.headers.get("x-goog-user-project") for call in plane.wire.calls]


def test_calls_count_against_our_project_whatever_the_credentials_name(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gcloud notes another project with a user's credentials, in which Vertex AI may be off."""
    users(plane, monkeypatch, OTHER)
    native = client().submit(PLANS.planned())
    assert client().status(native).state == "pending"
    assert set(consumers(plane)) == {"contract"}


def test_a_caller_that_may_not_count_calls_against_our_project_does_without(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    users(plane, monkeypatch, None)
    plane.consumer = False
    provider = client()
    native = provider.submit(PLANS.planned())
    assert provider.status(native).state == "pending"
    assert consumers(plane).count("contract") == 1, "it is tried once"
    assert set(consumers(plane)[1:]) == {None}
    monkeypatch.setenv("GOOGLE_CLOUD_QUOTA_PROJECT", "contract")
    plane.consumer = True
    assert client().find(PLANS.planned()) == native


def test_another_quota_project_that_has_no_vertex_is_named(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    users(plane, monkeypatch, OTHER)
    plane.consumer = False
    with pytest.raises(AuthError, match=f"hint: .*services enable aiplatform.googleapis.com --project {OTHER}$"):
        client().status(NOWHERE)


def test_a_log_that_others_read_as_well_says_why_it_is_refused(plane: Plane) -> None:
    provider = client()
    native = provider.submit(PLANS.planned())
    plane.entries.reads = 1
    first = provider.logs(native)
    for _ in range(2):  # refused by the service, then not even asked
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
def test_a_store_that_jobs_cannot_mount_is_refused_before_anything_is_made(
    plane: Plane, place: tuple[str, str], says: str
) -> None:
    plane.gcs.places[BUCKET] = place
    assert client().account.place(BUCKET) == (place[0].lower(), place[1])
    plane.wire.calls.clear()
    with pytest.raises(SpecError) as caught:
        client().submit(PLANS.planned())
    assert caught.value.with_hint() == says
    assert operations(plane) == ["GET bucket"]


def instead(plane: Plane, said: Any) -> None:
    """Serve each call, and answer all but those for tokens with this."""
    wire, served = plane.wire, plane.wire.answer

    def answer(*words: Any) -> Answer | None:
        found = served(*words)
        return found if wire.calls[-1].operation == "POST token" else Answer(said)

    wire.answer = answer  # type: ignore[method-assign]


def test_a_page_of_a_proxys_in_place_of_an_answer_is_one_line(plane: Plane) -> None:
    request, provider = PLANS.planned(), client()
    native = provider.submit(request)
    instead(plane, b"<html>")
    for call, what in (
        (lambda: provider.status(native), "get job"),
        (lambda: provider.account.claimed(request), "list jobs"),
        (lambda: client().account.place(BUCKET), f"look at gs://{BUCKET}"),
    ):
        with pytest.raises(PlatformError, match=rf"^{what}: the answer is not JSON$"):
            call()


def test_a_page_of_a_proxys_in_place_of_a_token_is_one_line(plane: Plane) -> None:
    plane.wire.answer = lambda *words: Answer(b"<html>")  # type: ignore[method-assign]
    why = r"^Google Cloud does not answer: get job: the answer to a sign-in is not JSON$"
    with pytest.raises(LostContactError, match=why):
        client().status(NOWHERE)


@pytest.mark.parametrize("wrong", [[], "x", {"expiry": 5}, {"type": "external_account", "audience": 5}])
def test_a_file_of_credentials_that_is_none_is_no_silent_cloud(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: Any
) -> None:
    kept = {"type": "authorized_user", "client_id": "a", "client_secret": "b", "refresh_token": "c"}
    (tmp_path / "key.json").write_text(json.dumps({**kept, **wrong} if isinstance(wrong, dict) else wrong))
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "key.json"))
    with pytest.raises(AuthError, match=r"^\S+ \S+: the credentials cannot be used \(\w+Error: .*\)\nhint: sign in "):
        client().status(NOWHERE)


def test_a_bucket_of_which_nothing_is_said_is_taken_on_trust(plane: Plane) -> None:
    instead(plane, {})
    assert client().account.place(BUCKET) == ("", "region")


def test_a_store_in_a_bucket_that_is_none(plane: Plane) -> None:
    del plane.gcs.places[BUCKET]
    with pytest.raises(SpecError) as caught:
        client().submit(PLANS.planned())
    assert str(caught.value) == f"store: there is no bucket {BUCKET}"
    assert client().account.place(BUCKET) == ("", "region"), "of what a job reads that is elsewhere nothing is known"


def test_inputs_and_checkpoints_elsewhere(plane: Plane) -> None:
    """In a single region: slow, and allowed. In several: nothing that a job can mount."""
    plane.gcs.make("wide", "EU", "multi-region")
    plane.gcs.make("far", "US-CENTRAL1")
    ours = f"gs://{BUCKET}/x"
    why = "gs://wide is a multi-region bucket (eu), which no job can mount"
    made = client()

    def planned(attempt: int, resume: str = "", **inputs: str) -> Request:
        where = PLANS.layout(inputs={name: LayoutInput(url=url) for name, url in inputs.items()}, resume=resume or None)
        asked = Job.make(entry_point="train.py", image="team/trainer:1", inputs=inputs, resume_from=resume or None)
        return made.plan(asked, where, attempt=attempt)

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
    asked = [call.path.rpartition("/")[2] for call in plane.wire.calls if call.operation == "GET bucket"]
    assert asked == [BUCKET, "wide", "far", "no-such-bucket", "no-such-bucket"], "what is known is not asked again"
    assert len(plane.jobs) == 2


def test_a_bucket_that_one_may_not_look_at_is_taken_on_trust(plane: Plane) -> None:
    plane.gcs.places[BUCKET] = ("EU", "multi-region")
    plane.wire.faults.append(Fault("GET bucket", Refusal.denied("storage.buckets.get", BUCKET)))
    provider = client()
    provider.submit(PLANS.planned())
    assert len(plane.jobs) == 1
    assert provider.account.place(BUCKET) == ("eu", "multi-region"), "and looked at again"


# ----------------------------------------------------------------------------------------------- who calls, and where


def test_without_credentials_one_line_says_how_to_sign_in(
    plane: Plane, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS")
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    for call in (lambda: client().status(NOWHERE), lambda: client().storage("gs://b/x"), own.credentials):
        with pytest.raises(AuthError, match=r"^no Google Cloud credentials\nhint: sign in .*gcloud auth"):
            call()
    assert client().storage("/a/folder") == {}


def test_credentials_are_scoped_and_name_who_calls(plane: Plane) -> None:
    assert own.credentials().scopes == ["https://www.googleapis.com/auth/cloud-platform"]
    assert client().principal() == plane.identity.email
    assert client().storage(f"gs://{BUCKET}/x")["token"].service_account_email == plane.identity.email


def test_credentials_that_are_refused_are_asked_for_anew_with_the_next_call(plane: Plane) -> None:
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


def test_services_are_where_gclouds_own_variables_say(monkeypatch: pytest.MonkeyPatch) -> None:
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
        for value in ("", "https://own.example", "https://own.example/"):
            monkeypatch.setenv(variable, value)
            assert find() == (value.rstrip("/") or public)


def test_what_doctor_finds_in_a_project_that_is_well(plane: Plane) -> None:
    rows = {check.name: check for check in client().checks(f"gs://{BUCKET}/store", PLANS.planned())}
    assert {name: check.status for name, check in rows.items()} == {
        **dict.fromkeys(("sdk", "credentials", "api", "bucket", "permissions", "service account", "quota"), "ok"),
        "image": rows["image"].status,
    }
    bare = {check.name: check.status for check in client().checks("", None)}
    assert (bare["bucket"], bare["quota"], bare["image"]) == ("skipped",) * 3
