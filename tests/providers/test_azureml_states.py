"""Provider ``azureml``: the meaning of Azure's statuses, and the errors for its refusals."""

from __future__ import annotations

from typing import Any

import pytest
from rows import for_each
from worlds.azureml.strict import STATUSES

from cloudtrain.errors import (
    AuthError,
    CapacityError,
    CloudtrainError,
    ConflictError,
    LostContactError,
    NotFoundError,
    QuotaError,
    SpecError,
)
from cloudtrain.provider_api.protocol import FINAL, Status
from cloudtrain.providers.azureml.api import error_of, quota_hint, refusal
from cloudtrain.providers.azureml.status import category_of, status_of

DP100 = (
    "The specified Azure ML Compute Instance has a Standard D Family vCPU quota of 2 and is less than the requested job"
    " node count of 2 which maps to 4 vCPUs"
)
INNER_EYE = (
    "The specified subscription has a Standard NCADSA100v4 Family Cluster Dedicated vCPU quota of 0 and cannot"
    " accomodate for at least 1 requested managed compute node which maps to 24 vCPUs"
)
CRASH = (
    "Execution failed. User process 'python' exited with status code 1. Please check log file 'user_logs/std_log.txt'"
)


def status_for(
    status: str, *, error: tuple[str, str] = ("", ""), seconds: float | None = None, **properties: Any
) -> Status:
    """Return the status of a two-node job that ran for ``seconds``."""
    times = {}
    if seconds is not None:
        times = {"startTimeUtc": "2026-11-22T00:00:00Z", "endTimeUtc": f"2026-11-22T00:{int(seconds // 60):02}:00Z"}
    resources = {"instanceType": "Standard_DS3_v2", "instanceCount": 2}
    job = {"properties": {"status": status, "resources": resources, "limits": {"timeout": "PT10M"}, **properties}}
    details = {**times, "error": {"error": {"code": error[0], "message": error[1]}}}
    return status_of(job, details, prices={"Standard_DS3_v2": 0.6})


# --------------------------------------------------------------------------------------------------------------- states


def test_every_native_state_has_a_meaning() -> None:
    found = {name: status_for(name).state for name in STATUSES}
    assert {name for name, state in found.items() if state in FINAL} == {"Completed", "Failed", "Canceled"}
    pending = {"NotStarted", "Queued", "Provisioning", "Preparing", "Starting", "Paused"}
    assert {name for name, state in found.items() if state == "pending"} == pending
    assert status_for("Waiting").state == "pending", "a status of Singularity that no model lists"
    assert found["NotResponding"] == found["CancelRequested"] == found["Finalizing"] == "running"
    assert status_for("OfNextYear").state == "running", "an unknown status is not final"
    assert (status_for("").state, status_for("").native) == ("running", "Unknown")
    assert "come back" in status_for("NotResponding").reason
    assert {name: status_for(name).native for name in STATUSES} == {name: name for name in STATUSES}


def test_a_failure_has_its_reason_and_category() -> None:
    found = status_for("Failed", error=("UserError", CRASH), seconds=120)
    assert (found.state, found.category) == ("failed", "user_error")
    assert found.reason.startswith("Execution failed")
    assert (found.started, found.finished) == (1795305600.0, 1795305720.0)
    assert found.instance_type == "Standard_DS3_v2"
    assert found.cost_usd == 0.04, "two nodes, two minutes, 0.6 USD an hour"
    assert found.billed_s is None, "Azure does not report it"
    assert status_for("Failed").reason.startswith("Azure ML gives no reason")


def test_a_job_without_machines_costs_nothing() -> None:
    assert status_for("Canceled").cost_usd == 0.0
    assert status_for("Running").cost_usd is None


@pytest.mark.parametrize("logs", [{}, {"system_logs/lifecycler.log": "https://x"}])
def test_a_start_without_a_log_does_not_count(logs: Any) -> None:
    """Check this because Azure's start may be of a job that only waited. It gives neither a time limit nor a price."""
    times = {"startTimeUtc": "2026-11-22T00:00:00Z", "endTimeUtc": "2026-11-22T00:20:00Z"}
    properties = {"resources": {"instanceType": "Standard_DS3_v2"}, "limits": {"timeout": "PT10M"}}
    job = {"properties": {"status": "Canceled", **properties}}
    found = status_of(job, {**times, "logFiles": logs}, prices={"Standard_DS3_v2": 0.6})
    assert (found.category, found.started, found.cost_usd) == ("cancelled", None, 0.0)
    log = {"user_logs/std_log_process_0.txt": "https://x"}
    ran = status_of(job, {**times, "logFiles": log}, prices={"Standard_DS3_v2": 0.6})
    assert (ran.category, ran.started) == ("timeout", 1795305600.0)
    assert ran.cost_usd == 0.2, "a job without a number of nodes has one"
    assert status_of(job, {**times, "logFiles": log}, prices={"Standard_DS3_v2": 1}).cost_usd == 0.3333
    for unknown in (times, {**times, "logFiles": None}):
        assert status_of(job, unknown).category == "timeout", "the history may lag"
    started = status_of(job, {**times, "logFiles": logs}, ran=True)
    assert (started.category, started.started) == ("timeout", 1795305600.0)
    running = {"properties": {"status": "Running", **properties}}
    assert status_of(running, {**times, "logFiles": logs}).started == 1795305600.0


def test_the_time_limit_is_not_a_users_cancel() -> None:
    """Check this because Azure ML cancels a job at its time limit, perhaps without a message."""
    assert status_for("Canceled", seconds=600).category == "timeout"
    assert status_for("Canceled", seconds=540).category == "cancelled"
    late = status_for("Canceled", error=("JobTimeout", "The job exceeded the maximum run duration"), seconds=60)
    assert (late.state, late.category) == ("failed", "timeout")
    stopped = ("UserError", "User process '/bin/sh' exited with status code 75")
    assert status_for("Failed", error=stopped, seconds=600).category == "timeout", "the node's own message on any stop"
    assert status_for("Failed", seconds=600).category == "timeout"
    assert status_for("Failed", error=stopped, seconds=540).category == "preempted"
    assert status_for("Failed", error=("UserError", CRASH), seconds=600).category == "user_error"


def test_a_cancel_is_the_users_unless_azure_gives_another_reason() -> None:
    for message in ("Node was preempted", DP100, "AllocationFailed", "not enough capacity"):
        found = status_for("Canceled", error=("x", message), seconds=60)
        assert (found.state, found.category) == ("cancelled", "cancelled"), message
    for message, category in (
        (f"canceled because {DP100}", "quota"),
        ("Cancelled by the system: evicted", "preempted"),
    ):
        found = status_for("Canceled", error=("x", message), seconds=60)
        assert (found.state, found.category) == ("failed", category), message


def test_the_status_names_the_cluster_of_a_job() -> None:
    cluster = "/subscriptions/s/resourceGroups/g/providers/x/workspaces/w/computes/gpu"
    job = {"properties": {"status": "Running", "computeId": cluster, "resources": {"instanceCount": 2}}}
    assert status_of(job, {}).instance_type == "gpu"


CATEGORIES = [
    (CRASH, "user_error"),
    ("UserError: " + CRASH.replace("code 1", "code 137"), "oom"),
    ("User process '/bin/sh' exited with status code 127", "image"),
    ("User process '/bin/sh' exited with status code 75", "preempted"),
    ("exited with status code 1: RuntimeError: quota of my own exceeded, preempted, 403 Forbidden", "user_error"),
    (DP100, "quota"),
    (INNER_EYE, "quota"),
    ("DataAccessError: the request failed with status code: 403 AuthorizationPermissionMismatch", "auth"),
    ("FailedPullingImage: unexpected status code 404 Not Found", "image"),
    ("The request was refused for lack of quota, status code 409", "quota"),
    ("Submission encountered an exception with status code 503", "infra"),
    ("Process exited with code 143", "user_error"),
    ("exit code -9", "oom"),
    ("PreemptionError: Nodes of this job got pre-empted", "preempted"),
    ("nodes got pre-empted", "preempted"),
    ("OutOfQuota: Not enough cluster CPU quota", "quota"),
    ("Operation results in exceeding quota limits of Microsoft.Batchlusters", "quota"),
    ("ClusterQuotaReached: x", "quota"),
    ("AllocationFailed: We do not have sufficient capacity", "capacity"),
    ("SkuNotAvailable: Standard_ND96asr_v4", "capacity"),
    ("The node was preempted", "preempted"),
    ("Low priority node was reclaimed", "preempted"),
    ("ImageBuildFailure: x", "image"),
    ("Failed to pull Docker image team/none:1", "image"),
    ("manifest unknown", "image"),
    ("AuthorizationPermissionMismatch: This request is not authorized to perform this operation", "auth"),
    ("UserError: Access denied to datastore", "auth"),
    ("UserError: StreamAccess(NotFound)", "user_error"),
    ("UserError: StreamAccess(NotFound) azureml://x/paths/quota/runs/quota-1/data", "user_error"),
    ("FailedPullingImage: Unable to pull docker image team/quota-app:1", "image"),
    ("ServiceError: InternalServerError", "infra"),
    ("", "infra"),
]


@for_each(("text", "category"), CATEGORIES)
def test_categories(text: str, category: str) -> None:
    assert category_of(text) == category


def test_the_exact_quota_to_ask_for() -> None:
    assert quota_hint(INNER_EYE).startswith(
        "ask for at least 24 dedicated vCPUs of Standard NCADSA100v4 Family Cluster Dedicated (there are 0)"
    )
    assert quota_hint(DP100).startswith("ask for at least 4 dedicated vCPUs of Standard D Family (there are 2)")
    assert "low-priority vCPUs of" in quota_hint(DP100.replace("Standard D Family", "Low Priority Family"))
    assert "Quota" in quota_hint("ClusterQuotaReached")
    assert status_for("Failed", error=("JobNodeCountExceedsCoreQuota", DP100)).reason.count("ask for at least 4") == 1


# ------------------------------------------------------------------------------------------------------------- refusals


REAL: list[tuple[str, str, str, str]] = [
    # From users of the service, or code of Microsoft's own: the source, the message, and its category.
    (
        "Azure/MachineLearningNotebooks#1242, MicrosoftDocs/azure-docs#66288, microsoft/MLOpsPython#346",
        "AzureMLCompute job failed. PreemptionError: Nodes of this job got pre-empted. Check if the run has failed or "
        "restarted. Reason: Received pre-emption warning signal",
        "UserError",
        "preempted",
    ),
    (
        "Azure/MachineLearningNotebooks#1360",
        "AzureMLCompute job failed. JobFailed: Submitted script failed with a non-zero exit code; see the driver log "
        "file for details. Reason: Job failed with non-zero exit Code",
        "UserError",
        "user_error",
    ),
    (
        "unsure of its form",
        "AzureMLCompute job failed. ExecutionFailed: [REDACTED] exitCode: 137",
        "UserError",
        "oom",
    ),
    (
        "Azure/MachineLearningNotebooks#1479",
        "AzureMLCompute job failed. FailedPullingImage: Unable to pull docker image imageName: x error: Run docker "
        "command to pull public image failed with error: manifest unknown",
        "UserError",
        "image",
    ),
    (
        "seen with private registries",
        "Failed to pull Docker image r.azurecr.io/x. Check the specified registry credentials",
        "UserError",
        "image",
    ),
    ("mslearn-dp100#35", DP100, "UserError", "quota"),
    ("microsoft/InnerEye-DeepLearning#253", INNER_EYE, "UserError", "quota"),
    ("azureml-examples#2614", CRASH, "UserError", "user_error"),
]
"""Real messages with their sources. Each row's id is its issue."""


@for_each(("source", "text", "code", "category"), REAL)
def test_real_texts(source: str, text: str, code: str, category: str) -> None:
    found = status_for("Failed", error=(code, text))
    assert (found.state, found.category) == ("failed", category), source


REFUSALS: list[tuple[int, str, str, type[CloudtrainError], str]] = [
    (401, "InvalidAuthenticationToken", "The access token has expired", AuthError, "sign in again"),
    (403, "AuthorizationFailed", "The client 'x' does not have authorization", AuthError, "'AzureML Data Scientist'"),
    (404, "ResourceGroupNotFound", "Resource group 'g' could not be found.", SpecError, "azureml.resource_group: "),
    (404, "SubscriptionNotFound", "The subscription 's' could not be found.", SpecError, "azureml.subscription_id: "),
    (
        404,
        "ResourceNotFound",
        "The Resource 'Microsoft.MachineLearningServices/workspaces/w' under resource group 'g' was not found.",
        SpecError,
        "azureml.workspace_name: ",
    ),
    (404, "UserError", "Job r-1 was not found", NotFoundError, "r-1"),
    (404, "NotFound", "Job r-1 is not found in workspace w.", NotFoundError, "r-1"),
    (404, "NotFound", "Job quota is not found in workspace quota.", NotFoundError, "workspace quota"),
    (409, "Conflict", "exists", ConflictError, "run_id: "),
    (409, "UserError", "A job with the name quota-6efb67b1542dbfb0 already exists", ConflictError, "run_id: "),
    (400, "UserError", "A job with this name already exists.", ConflictError, "run_id: "),
    (400, "JobPropertyImmutable", "The job cannot be changed.", ConflictError, "run_id: "),
    (400, "JobNodeCountExceedsCoreQuota", DP100, QuotaError, "at least 4 dedicated vCPUs"),
    (403, "QuotaExceeded", INNER_EYE, QuotaError, "at least 24"),
    (400, "SkuNotAvailable", "The size is not available", CapacityError, "another size"),
    (400, "UserError", "Unknown compute target 'x'.", SpecError, "azureml.compute: "),
    (400, "UserError", "Compute target x not found", SpecError, "azureml.compute: "),
    (400, "ValidationError", "no such field", SpecError, "no such field"),
    (429, "TooManyRequests", "slow down", LostContactError, "does not answer now"),
    (503, "", "", LostContactError, "503"),
    (500, "InternalServerError", "x", LostContactError, "500"),
]


@for_each(("status", "code", "message", "kind", "says"), REFUSALS)
def test_refusals(status: int, code: str, message: str, kind: type[CloudtrainError], says: str) -> None:
    found = refusal(status, code, message, what="get job")
    assert type(found) is kind, found
    assert says in found.with_hint()
    assert "\n" not in str(found)


def test_errors_of_azures_libraries() -> None:
    from azure.core import exceptions as known
    from azure.identity import CredentialUnavailableError

    chain = "DefaultAzureCredential failed to retrieve a token from the included credentials.\nAttempted:\n\tx"
    for exc in (known.ClientAuthenticationError(chain), CredentialUnavailableError(chain)):
        found = error_of(exc, what="get job")
        assert isinstance(found, AuthError)
        assert "az login" in found.hint
        assert "\n" not in str(found)
    cut = OSError("Connection broken: IncompleteRead(10 bytes read, 90 more expected)")
    broken = [known.IncompleteReadError(cut, error=cut), known.HttpResponseError(cut, error=cut)]
    for lost in (known.ServiceRequestError("no route"), known.ServiceResponseError("cut"), *broken):
        assert isinstance(error_of(lost, what="get job"), LostContactError)
    refused = known.ClientAuthenticationError("AADSTS700082: The refresh token has expired")
    refused.status_code = 400
    assert isinstance(error_of(refused, what="get job"), AuthError), "400 is how the token service refuses"
    assert error_of(KeyError("x"), what="get job") is None, "cloudtrain's own fault stays one"
