"""Provider ``vertex``: the meaning of Vertex AI's states, and the errors for Google Cloud's refusals."""

from __future__ import annotations

import json
from typing import Any

import pytest
import requests
from rows import for_each
from vertex_recorded import CANCELED, RECORDED, after_waiting, answer

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
from cloudtrain.provider_api.protocol import FINAL, Status
from cloudtrain.providers.vertex import logs
from cloudtrain.providers.vertex.api import answered, error_of, quota_hint, refusal
from cloudtrain.providers.vertex.status import category_of, over_for, status_of
from cloudtrain.runs.outcome import with_start

BEGAN = 1795305600.0
"""2026-11-22T00:00:00Z."""
NAME = "projects/contract/locations/europe-west4/customJobs/42"
GPUS = (
    "The requested number of GPUs exceeds the quota limit:"
    " aiplatform.googleapis.com/custom_model_training_nvidia_l4_gpus, requests: 8 per user."
)
INCREASE = "The requests exceed what is left. Please submit a quota increase request. quota limit 0."
STOCKOUT = (
    "Resources are insufficient in region: europe-west4. Please try a different region or use a different accelerator."
)
QUOTA = (
    "The following quota metrics exceed quota limits:"
    " aiplatform.googleapis.com/custom_model_training_nvidia_l4_gpus,"
    "aiplatform.googleapis.com/custom_model_training_cpus"
)
READS = (
    "Quota exceeded for quota metric 'Read requests' and limit 'Read requests per minute' of service"
    " 'logging.googleapis.com' for consumer 'project_number:1'."
)
EXIT = (
    "The replica workerpool0-0 exited with a non-zero status of {}. Termination reason: Error. \n{}\nTo find out more"
)
NO_MEMORY = "The replica workerpool0-0 ran out of memory and exited with a non-zero status of 137."
PULL = (
    "The replica workerpool0-0 exited with a non-zero status of 128. Termination reason: ErrImagePull."
    ' Termination log message: Failed to pull image "a/b:1"'
)
AGENT_TEXT = (
    "Vertex AI Service Agent service-123@gcp-sa-aiplatform-cc.iam.gserviceaccount.com does not have permission to"
    " access Artifact Registry repository projects/my/locations/l/repositories/nas."
)
DENIED = (
    "Permission 'aiplatform.customJobs.create' denied on resource"
    " '//aiplatform.googleapis.com/projects/contract/locations/europe-west4' (or it may not exist)."
)
DISABLED = (
    "Vertex AI API has not been used in project contract before or it is disabled. Enable it by visiting"
    " https://console.developers.google.com/apis/api/aiplatform.googleapis.com/overview?project=contract then retry."
)
ACT_AS = (
    "You do not have permission to act as service_account: trainer@contract.iam.gserviceaccount.com."
    " (or it may not exist)."
)


def status_for(state: str, *, error: tuple[int, str] = (0, ""), seconds: float | None = None, **more: Any) -> Status:
    """Return the status of a three-node job with a limit of 600 s that ran for ``seconds``, or never (None).

    It waited for 20 minutes before.
    """
    minutes, rest = divmod(int(seconds or 0), 60)
    times = {"startTime": "2026-11-21T23:40:00Z", "endTime": f"2026-11-22T00:{minutes:02}:{rest:02}.5Z"}
    machine = {"machineType": "n1-standard-4", "acceleratorType": "NVIDIA_TESLA_T4", "acceleratorCount": 1}
    pools = [{"machineSpec": machine, "replicaCount": count} for count in ("1", "2")]
    spec = {"workerPoolSpecs": pools, "scheduling": {"timeout": "600s"}}
    job: dict[str, Any] = {"name": NAME, "state": f"JOB_STATE_{state}", "jobSpec": spec, **times, **more}
    if error[0]:
        job["error"] = {"code": error[0], "message": error[1]}
    return with_start(status_of(job), None if seconds is None else BEGAN, ran=seconds or 0.0, stopped=False)


# --------------------------------------------------------------------------------------------------------------- states


def test_every_native_state_has_a_meaning() -> None:
    from google.cloud.aiplatform_v1.types import JobState

    found = {
        state.name.removeprefix("JOB_STATE_"): status_for(state.name.removeprefix("JOB_STATE_")) for state in JobState
    }
    final = {"SUCCEEDED", "FAILED", "CANCELLED", "EXPIRED", "PARTIALLY_SUCCEEDED"}
    assert {name for name, status in found.items() if status.state in FINAL} == final
    assert {name for name, status in found.items() if status.state == "pending"} == {"QUEUED", "PENDING", "PAUSED"}
    assert (found["CANCELLING"].category, found["CANCELLING"].reason) == ("", "stopping")
    assert "no machine yet" in found["QUEUED"].reason, "every job passes this state"
    assert status_for("OF_NEXT_YEAR").state == "running", "an unknown state is not final"
    assert status_for("OF_NEXT_YEAR").native == "OF_NEXT_YEAR"


def test_a_job_without_a_state_is_not_over() -> None:
    assert (status_of({"name": NAME}).state, status_of({"name": NAME}).native) == ("running", "UNSPECIFIED")


def test_times_and_console_of_a_job() -> None:
    status = status_for("SUCCEEDED", seconds=300)
    assert status.cost_usd is None, "Vertex AI does not report it"
    assert status.instance_type == "n1-standard-4+T4:1"
    later = {"workerPoolSpecs": [{"machineSpec": {"machineType": "n9-standard-4"}, "replicaCount": "1"}]}
    assert status_for("SUCCEEDED", jobSpec=later).instance_type == "n9-standard-4", "the table lacks it"
    assert status.url.endswith("/agent-platform/locations/europe-west4/training/42?project=contract")
    assert (status.started, status.finished) == (BEGAN, BEGAN + 300.5)
    assert status_for("FAILED", error=(8, STOCKOUT)).started is None, "startTime is the admission of the job"
    for state in ("QUEUED", "PENDING", "CANCELLING", "UPDATING", "OF_NEXT_YEAR"):
        assert status_for(state).limit_s is None, f"state {state} does not mean that the job has machines"
    assert (status_for("RUNNING").limit_s, status_for("FAILED").limit_s) == (600, 600)


@for_each(
    ("state", "error", "seconds", "category"),
    [
        ("FAILED", (3, EXIT.format(1, "ValueError: no quota of resources")), 60, "user_error"),
        ("FAILED", (3, EXIT.format(137, "Killed")), 60, "user_error"),
        ("FAILED", (3, EXIT.format(134, "")), 60, "infra"),
        ("FAILED", (3, EXIT.format(134, "")), 600, "timeout"),
        ("FAILED", (3, EXIT.format(1, "")), 600, "user_error"),
        ("FAILED", (3, EXIT.format(127, "no python")), 60, "image"),
        ("FAILED", (3, NO_MEMORY), 60, "oom"),
        ("FAILED", (3, PULL), None, "image"),
        ("FAILED", (3, "Failed to pull image europe-docker.pkg.dev/p/quota/quota-app:1"), None, "image"),
        ("FAILED", (5, 'Image "us-docker.pkg.dev/p/r/train:1" not found.'), None, "image"),
        ("FAILED", (5, "Image gcr.io/p/i@sha256:0 does not exist"), None, "image"),
        ("FAILED", (5, "something"), None, "infra"),
        ("FAILED", (7, AGENT_TEXT), None, "auth"),
        ("FAILED", (3, AGENT_TEXT), None, "auth"),
        ("FAILED", (8, STOCKOUT), None, "capacity"),
        ("FAILED", (8, QUOTA), None, "quota"),
        ("FAILED", (8, "QuotaFailure: too much"), None, "quota"),
        ("FAILED", (8, "quotaExceeded"), None, "quota"),
        ("FAILED", (8, "something"), None, "capacity"),
        ("FAILED", (7, "Service account a@b does not have storage.objects.get access"), None, "auth"),
        ("FAILED", (13, "Internal error occurred for the current attempt."), 60, "infra"),
        ("FAILED", (0, ""), 60, "infra"),
        ("FAILED", (99, "an unknown cause"), 60, "infra"),
        ("PARTIALLY_SUCCEEDED", (0, ""), 60, "infra"),
        ("EXPIRED", (0, ""), None, "capacity"),
        ("EXPIRED", (0, ""), 600, "timeout"),
        ("CANCELLED", (1, "CANCELED"), 600, "timeout"),
        ("CANCELLED", (8, STOCKOUT), None, "capacity"),
    ],
)
def test_categories_of_failures(state: str, error: tuple[int, str], seconds: float | None, category: str) -> None:
    status = status_for(state, error=error, seconds=seconds)
    assert (status.state, status.category) == ("failed", category)
    assert status.reason
    assert "\n" not in status.reason


@pytest.mark.parametrize("seconds", [None, 60])
def test_cancelled_by_a_user(seconds: float | None) -> None:
    """Check also a job that waited for longer than it may run."""
    status = status_for("CANCELLED", error=(1, "CANCELED"), seconds=seconds)
    assert (status.state, status.category, status.reason) == ("cancelled", "cancelled", "it was cancelled")


@pytest.mark.parametrize(("state", "created", "started", "ended"), RECORDED)
def test_recorded_jobs_never_ran(state: str, created: str, started: str, ended: str) -> None:
    waiting, over = answer(state, created, started), answer("CANCELLED", created, started, ended, CANCELED)
    found = status_of(waiting)
    assert (found.state, found.native, found.started) == ("pending", state, None)
    found = with_start(status_of(over), None, ran=0.0, stopped=False)
    assert (found.state, found.category, found.started) == ("cancelled", "cancelled", None)


@for_each(
    ("hours", "state", "error", "wanted"),
    [
        (4, "EXPIRED", (0, ""), ("failed", "capacity")),
        (2, "FAILED", (8, STOCKOUT), ("failed", "capacity")),
        (2, "CANCELLED", CANCELED, ("cancelled", "cancelled")),
        (3, "FAILED", (13, "Internal error occurred for the current attempt."), ("failed", "infra")),
    ],
)
def test_waiting_longer_than_the_time_limit_is_not_running(
    hours: float, state: str, error: tuple[int, str], wanted: tuple[str, str]
) -> None:
    """Check a job that may run for an hour. If its wait counted, each of these would be a timeout."""
    found = with_start(status_of(after_waiting(hours, state, error)), None, ran=0.0, stopped=False)
    assert (found.state, found.category) == wanted
    assert found.started is None


def test_a_cancel_by_cloudtrain_near_the_time_limit_is_a_cancel() -> None:
    job = {"name": NAME, "state": "JOB_STATE_CANCELLED", "endTime": "2026-11-22T00:10:00Z"}
    job["jobSpec"] = {"workerPoolSpecs": [{}], "scheduling": {"timeout": "600s"}}  # type: ignore[assignment]
    assert with_start(status_of(job), BEGAN, ran=600, stopped=True).state == "cancelled"
    assert with_start(status_of(job), BEGAN, ran=600, stopped=False).category == "timeout"


@for_each(
    ("state", "error", "wanted"),
    [
        ("FAILED", (8, STOCKOUT), ("failed", "capacity")),
        ("EXPIRED", (0, ""), ("failed", "capacity")),
        ("CANCELLED", CANCELED, ("cancelled", "cancelled")),
        ("FAILED", (13, "Internal error occurred for the current attempt."), ("failed", "infra")),
    ],
)
def test_a_second_wait_for_machines_is_not_running(state: str, error: tuple[int, str], wanted: tuple[str, str]) -> None:
    """Check a job that ran for ten minutes of its hour, lost its machines, and ended four hours later."""
    found = with_start(status_of(after_waiting(4, state, error)), BEGAN, ran=600, stopped=False)
    assert (found.state, found.category) == wanted


def test_a_script_s_message_is_not_the_service_s() -> None:
    for text in ("ran out of memory", STOCKOUT, QUOTA, "permission denied", "Failed to pull image"):
        assert category_of(3, EXIT.format(1, text)) == "user_error", text


def test_a_hint_names_the_quota() -> None:
    assert "custom_model_training_nvidia_l4_gpus" in status_for("FAILED", error=(8, QUOTA)).reason
    assert "console's page of quotas" in quota_hint("some quota")
    both = "ask for more of custom_model_training_nvidia_t4_gpus and custom_model_training_cpus on"
    assert quota_hint(QUOTA.replace("l4", "t4")).startswith(both)
    metric = "restricted_image_training_nvidia_a100_80gb_gpus"
    assert isinstance(refusal(429, metric, what="create job", reason="", metadata={}), QuotaError)


def test_a_hint_names_the_agent_that_pulls_images() -> None:
    reason = status_for("FAILED", error=(7, AGENT_TEXT)).reason
    assert "jobs pull images as service-123@gcp-sa-aiplatform-cc.iam.gserviceaccount.com; let it: gcloud art" in reason
    other = "Permission artifactregistry.repositories.downloadArtifacts denied"
    assert "service-PROJECT_NUMBER@gcp-sa-aiplatform-cc" in status_for("FAILED", error=(7, other)).reason


@pytest.mark.parametrize(
    ("error", "command"),
    [
        # an ErrorInfo of google.rpc, as the services that doctor calls answer
        (
            {
                "message": "Cloud Quotas API has not been used in project 42 before or it is disabled.",
                "details": [
                    {
                        "reason": "SERVICE_DISABLED",
                        "metadata": {"service": "cloudquotas.googleapis.com", "consumer": "projects/42"},
                    }
                ],
            },
            "gcloud services enable cloudquotas.googleapis.com --project 42",
        ),
        # the older form, which names the service only in its message
        (
            {
                "message": "Cloud Resource Manager API has not been used in project 42 before or it is disabled. Enable"
                " it by visiting https://console.developers.google.com/apis/api/cloudresourcemanager.googleapis.com/overview"
                "?project=42 then retry.",
                "errors": [{"reason": "accessNotConfigured"}],
            },
            "gcloud services enable cloudresourcemanager.googleapis.com --project 42",
        ),
        ({"message": "it is disabled"}, "gcloud services enable aiplatform.googleapis.com"),
    ],
)
def test_a_disabled_service_is_named_alone(error: dict[str, Any], command: str) -> None:
    message, reason, metadata = answered(json.dumps({"error": error}).encode())
    error = refusal(403, message, what="list quotas", reason=reason, metadata=metadata)
    assert error.hint == f"switch it on: {command}"


def test_the_time_since_the_end_of_a_job() -> None:
    assert over_for({"endTime": "2026-01-01T00:00:00Z"}) > 86400
    assert over_for({"endTime": "2999-01-01T00:00:00Z"}) == 0, "the clocks may differ"
    assert over_for({}) == 0


# ------------------------------------------------------------------------------------------------------------- refusals


@for_each(
    ("status", "message", "reason", "kind", "code", "says"),
    [
        (429, QUOTA, "RESOURCE_EXHAUSTED", QuotaError, 4, "ask for more of custom_model_training_nvidia_l4_gpus"),
        (429, STOCKOUT, "RESOURCE_EXHAUSTED", CapacityError, 4, "another machine, location or time"),
        (429, READS, "RATE_LIMIT_EXCEEDED", LostContactError, 7, "status 429"),
        (429, GPUS, "RATE_LIMIT_EXCEEDED", QuotaError, 4, "quota"),
        (429, INCREASE, "RESOURCE_EXHAUSTED", QuotaError, 4, "quota"),
        (429, "slow down", "", LostContactError, 7, "status 429"),
        (429, "Too much.", "quotaExceeded", QuotaError, 4, "console's page of quotas"),
        (429, "QuotaFailure: too much", "", QuotaError, 4, "console's page of quotas"),
        (403, "Too much.", "quotaExceeded", QuotaError, 4, "console's page of quotas"),
        (403, "Too much.", "QuotaExceeded", QuotaError, 4, "console's page of quotas"),
        (403, READS, "rateLimitExceeded", AuthError, 3, "Vertex AI User"),
        (403, "This API requires a quota project.", "PERMISSION_DENIED", AuthError, 3, "serviceUsageConsumer"),
        (
            403,
            "Caller does not have required permission to use p.",
            "USER_PROJECT_DENIED",
            AuthError,
            3,
            "Usage Consumer",
        ),
        (400, AGENT_TEXT, "FAILED_PRECONDITION", AuthError, 3, "add-iam-policy-binding nas --project my --location l "),
        (400, AGENT_TEXT, "", AuthError, 3, "--member serviceAccount:service-123@gcp-sa-aiplatform-cc.iam."),
        (400, "Machine type a3-highgpu-8g is not supported.", "", CapacityError, 4, "asia-northeast1, asia-northeast3"),
        (400, "Machine type n1-standard-8 is not supported.", "", CapacityError, 4, "this region has none"),
        (400, "Machine type c3-standard-8 is not supported.", "", SpecError, 2, "resources.instance_type: "),
        (404, "Image us-docker.pkg.dev/p/r/i:1 not found.", "NOT_FOUND", SpecError, 2, "image: Image us-docker"),
        (400, "Image us-docker.pkg.dev/p/r/i:1 does not exist.", "", SpecError, 2, "image: Image us-docker"),
        (429, "no bucket myquotaExceeded", "", LostContactError, 7, "status 429"),
        (503, "The service is currently unavailable.", "UNAVAILABLE", LostContactError, 7, "status 503"),
        (401, "Request had invalid authentication credentials.", "", AuthError, 3, "application-default login"),
        (403, DENIED, "IAM_PERMISSION_DENIED", AuthError, 3, "Vertex AI User"),
        (403, DISABLED, "SERVICE_DISABLED", AuthError, 3, "gcloud services enable aiplatform.googleapis.com"),
        (403, ACT_AS, "", AuthError, 3, "add-iam-policy-binding trainer@contract.iam.gserviceaccount.com"),
        (400, ACT_AS, "", AuthError, 3, "Service Account User"),
        (403, "Project 'nowhere' not found or deleted.", "CONSUMER_INVALID", SpecError, 2, "vertex.project: "),
        (404, "Project was not found.", "", SpecError, 2, "vertex.project: "),
        (404, 'The CustomJob "x" does not exist.', "NOT_FOUND", NotFoundError, 2, "does not exist"),
        (403, 'Service account "a@my-project.iam.gserviceaccount.com" does not exist.', "", AuthError, 3, "User"),
        (400, f"Project p is invalid. {ACT_AS}", "", AuthError, 3, "Service Account User"),
        (409, "Please retry.", "ABORTED", LostContactError, 7, "Please retry."),
        (409, "already there", "", ConflictError, 2, "already there"),
        (412, "At least one of the pre-conditions", "conditionNotMet", ConflictError, 2, "pre-conditions"),
        (400, "Region mars-west1 is not supported.", "", SpecError, 2, "vertex.location: "),
        (400, "List of found errors: 1.Field: job_spec", "INVALID_ARGUMENT", SpecError, 2, "job_spec"),
        (302, "", "", PlatformError, 9, "302"),
    ],
)
def test_refusals(status: int, message: str, reason: str, kind: type[CloudtrainError], code: int, says: str) -> None:
    error = refusal(status, message, what="create job", reason=reason, metadata={})
    assert type(error) is kind, error
    assert error.exit_code == code
    assert says in error.with_hint()
    assert " ".join(message.split()).rstrip(".") in str(error)
    assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("what", "role"),
    [
        ("read the log", "roles/logging.viewer"),
        ("look at gs://my-training", "roles/storage.objectAdmin"),
        ("list jobs", "Vertex AI User"),
    ],
)
def test_the_missing_role_depends_on_the_call(what: str, role: str) -> None:
    message = "The caller does not have permission."
    error = refusal(403, message, what=what, reason="PERMISSION_DENIED", metadata={})
    assert isinstance(error, AuthError)
    assert role in error.hint


def test_exceptions_of_googles_libraries() -> None:
    import google.api_core.exceptions as api
    import google.auth.exceptions as auth
    from google.protobuf import json_format

    answer = requests.Response()
    answer.status_code, answer._content = 429, json.dumps({"error": {"message": QUOTA}}).encode()
    cases: list[tuple[Exception, type[CloudtrainError]]] = [
        (auth.DefaultCredentialsError("no"), AuthError),  # type: ignore[no-untyped-call]
        (auth.RefreshError("invalid_grant"), AuthError),  # type: ignore[no-untyped-call]
        (auth.RefreshError("later", retryable=True), LostContactError),  # type: ignore[no-untyped-call]
        (auth.TransportError("no network"), LostContactError),  # type: ignore[no-untyped-call]
        (requests.ConnectionError("aborted"), LostContactError),
        (ConnectionResetError("reset"), LostContactError),
        (requests.ReadTimeout("late"), LostContactError),
        (api.ServiceUnavailable("busy"), LostContactError),
        (api.Forbidden(DENIED), AuthError),
        (api.TooManyRequests("POST https://…", response=answer), QuotaError),
        (api.RetryError("long", cause=None), LostContactError),
        (json_format.ParseError("no field named x"), SpecError),
    ]
    for exc, kind in cases:
        ours = error_of(exc, what="create job")
        assert type(ours) is kind, (exc, ours)
        assert "\n" not in str(ours)
    assert error_of(ZeroDivisionError(), what="x") is None
    long: dict[Exception, str] = {
        auth.TransportError("…" * 400): f"Google Cloud does not answer: send: {'…' * 300}",  # type: ignore[no-untyped-call]
        auth.RefreshError("…" * 400): f"send: the credentials are refused ({'…' * 200})",  # type: ignore[no-untyped-call]
        api.GoogleAPIError("…" * 400): f"send: GoogleAPIError: {'…' * 300}",
        api.GoogleAPICallError("of no status"): "send: of no status",
    }
    assert {exc: str(error_of(exc, what="send")) for exc in long} == long


# ------------------------------------------------------------------------------------------------------------ log lines


@for_each(
    ("entry", "node", "text"),
    [
        ({"textPayload": "a\n", "resource": {"labels": {"task_name": "workerpool0-0"}}}, "0", "a"),
        ({"jsonPayload": {"message": "b"}, "resource": {"labels": {"task_name": "workerpool1-0"}}}, "1", "b"),
        ({"jsonPayload": {"x": 1}, "labels": {"ml.googleapis.com/task_name": "workerpool1-6"}}, "7", '{"x": 1}'),
        (
            {"textPayload": "Job is queued.", "resource": {"labels": {"task_name": "service"}}},
            "service",
            "Job is queued.",
        ),
        ({"protoPayload": {"status": {"message": "c"}}}, "", "c"),
    ],
)
def test_entries_become_lines(entry: dict[str, Any], node: str, text: str) -> None:
    line = logs._line(entry, "k", 1_500_000_000)
    assert (line.node, line.text, line.time, line.id) == (node, text, 1.5, "k")


def test_times_keep_their_nanoseconds() -> None:
    for text in ("2026-11-22T00:00:05.000000001Z", "2026-11-22T00:00:05.120000000Z", "2026-11-22T00:00:05.000000000Z"):
        assert logs._stamp(logs._nanos(text)) == text
    assert logs._nanos("2026-11-22T00:00:05Z") == logs._nanos("2026-11-22T00:00:05.0Z") == 1795305605 * 10**9
