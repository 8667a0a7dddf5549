"""Turn DescribeTrainingJob's answer into a Status. Pure."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...provider_api import catalog
from ...provider_api.protocol import AttemptInfo, Status
from ...validate import unix_seconds
from .._cloud import first_match, hinted, one_line, patterns, time_of
from . import NAME
from .api import HELP, job_of

if TYPE_CHECKING:
    from .api import Account

WITH_MACHINES = frozenset({"Downloading", "DownloadingTrainingImage", "Training"})
"""The first of these ends the wait for machines."""
RESTARTED = frozenset(
    {"Starting", "Pending", "LaunchingMLInstances", "PreparingTrainingStack", "Interrupted", "Restarting"}
)
"""States between two starts of the script. Updating is none of them."""
PENDING = RESTARTED | {"Downloading", "DownloadingTrainingImage"}
"""Secondary states in which no script runs. Any other of a job in progress, also an unknown one, counts as running."""
CONSOLES = {
    "aws": "console.aws.amazon.com",
    "aws-cn": "console.amazonaws.cn",
    "aws-us-gov": "console.amazonaws-us-gov.com",
    "aws-eusc": "console.amazonaws-eusc.eu",
}
"""Host of the web console by partition, behind the region."""
LIMITS = {"MaxRuntimeExceeded": "timeout", "MaxWaitTimeExceeded": "capacity", "MaxPendingTimeExceeded": "capacity"}
HINTS = {
    "capacity": "try another instance type or region, a later time, or allow a longer max_wait",
    "quota": HELP["quota"],
    "image": "check the image, its architecture, and that the job's role may pull it from ECR",
    "auth": "check the policy of the job's role: docs/sagemaker.md has one",
    "infra": "SageMaker itself failed; submit it again",
}
_CATEGORIES = patterns(
    # The script's own output follows AlgorithmError and is not the service's word.
    (r"^AlgorithmError.*(out of memory|OutOfMemory|MemoryError|oom.?kill|exit code:? ?137\b)", "oom"),
    # 126 and 127 are the starting shell's; our own codes are 0 and 1. A job that never started has no other text.
    (r"^AlgorithmError[^,]*, exit code:? ?12[67]\b", "image"),
    (r"^AlgorithmError: *CannotStartContainer", "image"),
    (r"^AlgorithmError", "user_error"),
    (r"^InternalServerError", "infra"),
    (r"^CapacityError|insufficient.{0,20}capacity|unable to provision requested ML compute capacity", "capacity"),
    (r"requested resource \S+ is not available in this region", "capacity"),
    (r"^ResourceLimitExceeded|service limit|(?<![\w/.-])quotas?(?![\w/-])", "quota"),  # no part of a user's name
    (r"^ClientError.*(instance type with more memory|out of memory|exit code:? ?137\b)", "oom"),
    # These name permissions among other reasons, or a user's own key, so they precede the rules of both.
    (r"^ClientError.*(Cannot pull algorithm container|Cannot find repository)", "image"),
    (r"^ClientError.*No S3 objects found under S3 URL", "user_error"),
    (r"^ClientError: *Artifact upload failed.*credentials", "infra"),
    (r"^ClientError.*(AccessDenied|access denied|not authorized|assume role|permission|forbidden|\bKMS\b)", "auth"),
    (r"^ClientError: *Data download failed", "user_error"),
    (r"^ClientError.*(\bpull(ing)?\b|\bimage\b|\bECR\b|\bmanifest\b|exec format|entrypoint)", "image"),
    (r"^ClientError", "user_error"),
    (r"internal server error", "infra"),
)
"""Patterns of FailureReason, first match. The service documents only its beginning."""
_NAME = re.compile(r"-[0-9a-f]{16}(?:-(\d{1,3})(?:-\d+)?)?$")


def attempt_of(name: str) -> int:
    """Return the attempt in a job's name."""
    match = _NAME.search(name)
    return int(match[1] or 0) if match else 0


def category_of(reason: str) -> str:
    """Return the category of a job's FailureReason."""
    return first_match(_CATEGORIES, reason, "infra")


def status(account: Account, native_id: str) -> Status:
    """Return the job's status, with its cost if the account's own price and the billed time are known."""
    found = status_of(account.describe(native_id))
    price = catalog.price(NAME, found.instance_type, account.settings.prices)
    if found.billed_s == 0:
        return dataclasses.replace(found, cost_usd=0.0)
    if found.billed_s is None or price is None or not price.own:
        return found
    return dataclasses.replace(found, cost_usd=round(found.billed_s / 3600 * price.usd_per_hour, 4))


def status_of(job: Mapping[str, Any]) -> Status:
    """Return the job's status."""
    region, name = job_of(job["TrainingJobArn"])
    primary, secondary = str(job["TrainingJobStatus"]), str(job.get("SecondaryStatus") or "")
    state, category, reason = _state(job, primary, secondary)
    transitions = job.get("SecondaryStatusTransitions") or []
    resources = job.get("ResourceConfig") or {}
    count = int(resources.get("SelectedInstanceCount") or resources.get("InstanceCount") or 1)
    billed, trained = job.get("BillableTimeInSeconds"), job.get("TrainingTimeInSeconds")
    spot = bool(job.get("EnableManagedSpotTraining"))
    final = state not in ("pending", "running")
    if billed is None and final and not _had_machines(job):
        billed = 0
    finished = time_of(job.get("TrainingEndTime")) if final else None
    attempts = _attempts(attempt_of(name), job["TrainingJobArn"], transitions)
    if attempts and finished is not None:
        attempts = (*attempts[:-1], dataclasses.replace(attempts[-1], ended=attempts[-1].ended or finished))
    return Status(
        state=state,
        native=primary if secondary in ("", primary) else f"{primary}/{secondary}",
        reason=reason,
        category=category,
        attempts=attempts,
        started=time_of(job.get("TrainingStartTime")),
        finished=finished,
        url=_url(str(job["TrainingJobArn"]), region, name),
        instance_type=str(resources.get("SelectedInstanceType") or resources.get("InstanceType") or ""),
        billed_s=float(billed * count) if billed is not None else None,
        saved=round(1 - billed / trained, 4) if spot and billed is not None and trained else None,
    )


def _url(arn: str, region: str, name: str) -> str:
    """Return the page of a job; empty in a partition whose console is not public."""
    host = CONSOLES.get(arn.split(":")[1])
    return f"https://{region}.{host}/sagemaker/home?region={region}#/jobs/{name}" if host else ""


def _state(job: Mapping[str, Any], primary: str, secondary: str) -> tuple[str, str, str]:
    """Return (state, category, reason)."""
    reason = one_line(job.get("FailureReason"))
    if primary == "Completed":
        return "succeeded", "", ""
    if primary == "Failed":
        category = category_of(reason)
        if category == "infra" and _waited_out(job):
            category = "capacity"
        return "failed", category, hinted(reason or "SageMaker gives no reason", HINTS.get(category))
    if primary == "Stopped":
        limit = LIMITS.get(secondary)
        if limit is None and reason and category_of(reason) in ("capacity", "quota"):
            limit = category_of(reason)
        if limit is None and _waited_out(job):
            limit, reason = "capacity", reason or "no machines within max_wait (MaxPendingTimeInSeconds)"
        if limit is None:
            return "cancelled", "cancelled", reason or "it was stopped"
        if limit == "capacity" and job.get("TrainingStartTime") is not None:
            return "failed", "preempted", f"{secondary}: the wait for machines after an interruption took too long"
        if limit == "timeout":
            return "failed", "timeout", "MaxRuntimeExceeded: max_runtime is used up"
        return "failed", limit, hinted(reason or f"{secondary}: no machines within max_wait", HINTS.get(limit))
    if primary == "InProgress" and secondary in PENDING:
        return "pending", "", _progress(job, secondary)
    return "running", "", "stopping" if primary == "Stopping" else ""


def _waited_out(job: Mapping[str, Any]) -> bool:
    """Return True if the job ended without machines, and not before MaxPendingTimeInSeconds.

    AWS says only "can be pending before it is stopped". Its API has no name for the end state. A job that has had
    machines has not waited them out, however long its wait was.
    """
    limit = (job.get("StoppingCondition") or {}).get("MaxPendingTimeInSeconds")
    began, ended = job.get("CreationTime"), job.get("TrainingEndTime") or job.get("LastModifiedTime")
    if limit is None or began is None or ended is None or _had_machines(job):
        return False
    return unix_seconds(ended) - unix_seconds(began) >= float(limit)


def _had_machines(job: Mapping[str, Any]) -> bool:
    """Return True if the job has had machines. They may load data and images before TrainingStartTime is set."""
    seen = {item.get("Status") for item in job.get("SecondaryStatusTransitions") or ()}
    return job.get("TrainingStartTime") is not None or not seen.isdisjoint(WITH_MACHINES)


def _progress(job: Mapping[str, Any], secondary: str) -> str:
    """Return SageMaker's own words on a pending job, for people: it documents none of them."""
    transitions = job.get("SecondaryStatusTransitions") or [{}]
    message = one_line(transitions[-1].get("StatusMessage"))
    return f"{secondary}: {message}" if message else secondary


def _attempts(attempt: int, arn: str, transitions: Sequence[Mapping[str, Any]]) -> tuple[AttemptInfo, ...]:
    """Return every start of the script. SageMaker restarts it after an interruption or a failure of its own."""
    found: list[AttemptInfo] = []
    fresh = True
    for item in transitions:
        status, start = str(item.get("Status")), time_of(item.get("StartTime"))
        if status == "Training" and fresh:
            found.append(AttemptInfo(number=f"{attempt}.{len(found)}", native_id=arn, started=start))
            fresh = False
        elif found and not fresh and status in RESTARTED:
            fresh = True
            why = "its spot machines were taken back" if status == "Interrupted" else "SageMaker started it again"
            kind = "preempted" if status == "Interrupted" else "infra"
            found[-1] = dataclasses.replace(found[-1], ended=start, reason=why, category=kind)
    return tuple(found)
