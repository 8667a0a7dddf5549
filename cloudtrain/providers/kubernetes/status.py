"""Turn a Job and its pods into a Status: `status` makes the calls, the rest is pure.

Seen with Kubernetes 1.36.2; the tests hold its answers.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...errors import AuthError, NotFoundError
from ...provider_api.protocol import AttemptInfo, Status
from .._cloud import hinted, one_line, time_of
from . import NAME
from .api import HELP, conditions_of, is_ending
from .node import AGAIN, TIME_UP
from .request import CANCELLED, ENDED, POD_INDEX, marks_of

if TYPE_CHECKING:
    from .api import Account

HINTS: Mapping[str, str] = {
    "image": "check image and kubernetes.image_pull_secrets",
    "oom": "ask for more with memory_gb",
    "disk": "ask for more with disk_gb",
}
_IMAGE = frozenset(("ErrImageNeverPull", "InvalidImageName", "ImageInspectError", "StartError"))
"""Reasons of a container that waits in vain, or could not start."""
_PULL = frozenset(("ErrImagePull", "ImagePullBackOff"))
_NO_IMAGE = re.compile(
    r"not found|(manifest|name|repository) unknown|denied|unauthorized|forbidden|no such (image|host)", re.IGNORECASE
)
"""Words of a pull that no further try makes good. A registry that does not answer may come back."""
_DECIDED = ("Ending", "Suspended")
"""Our words for a Job that waits, and needs no pod now."""
_CREATION = ("FailedCreate", "SuccessfulCreate")
"""Reasons of a Job's events about pods that it created or could not create."""
_START = ("Pulling", "FailedMount", "FailedAttachVolume", "FailedCreatePodSandBox")
"""Reasons of a pod's events before its container starts; mounts come before the image."""
_REFUSALS = (
    ("exceeded quota", "quota", HELP["quota"]),
    ("failed quota", "quota", "set cpus and memory_gb, which the quota of the namespace limits"),
    ("violates PodSecurity", "", f'set {NAME}.security = "restricted"'),
)
"""Words of an event, and the category of a Job that can never start (empty: it waits) and a hint."""
PENDING = frozenset(("ContainerCreating", "PodInitializing"))
"""Reasons of a container that waits as every one does."""
_NO_PROGRAM = (126, 127, 128)
"""Exit codes of a command that is missing in the image."""
_KILLS = frozenset((137, 143))
"""Exit codes of a container that was killed from outside."""
_COUNTS = tuple(f"batch.kubernetes.io/job-index-{kind}-count" for kind in ("failure", "ignored-failure"))
"""Annotations of a pod with the number of its node's earlier pods."""
_TAKEN = {
    "EvictionByEvictionAPI": "it was evicted",
    "PreemptionByScheduler": "a pod of higher priority preempted it",
    "DeletionByTaintManager": "its machine was tainted",
    "DeletionByPodGC": "its machine is gone",
    "TerminationByKubelet": "its machine shut down, or ran out of something",
}
"""The meaning of a pod's condition DisruptionTarget, by its reason."""
Object = Mapping[str, Any]


def status(account: Account, native_id: str) -> Status:
    """Return the Job's status. Raises `NotFoundError` for an unknown one.

    A Job whose pods cannot start stays active, and would start them beside a later attempt. So this ends it.
    """
    job, pods = account.describe(native_id)
    found = status_of(job, pods)
    if found.state == "pending" and found.native not in _DECIDED:
        found = _explained(account, job, pods, found)
    if found.state == "failed" and not is_ending(job):
        with suppress(AuthError, NotFoundError):  # the caller may only read, or the Job is gone
            account.cancel(native_id, why=f"{found.category}: {found.reason}")
    return found


def _explained(account: Account, job: Object, pods: Sequence[Object], found: Status) -> Status:
    """Return the status of a Job that waits, with what its newest event says about its pods, or about one of them."""
    waiting = [pod for pod in pods if pod["status"].get("phase") == "Pending" and pod["spec"].get("nodeName")]
    if not (lacking := _lacks_pods(job, pods)) and (found.reason or not waiting):
        return found
    with suppress(AuthError):  # the caller may not see events
        about = ("Job", job, _CREATION) if lacking else ("Pod", waiting[-1], _START)
        if (events := account.events(*about)) and events[-1]["reason"] != "SuccessfulCreate":
            said = one_line(events[-1].get("message"))
            category, hint = next((item for words, *item in _REFUSALS if words in said), ("", ""))
            found = replace(found, reason=hinted(said, hint))
            if category and lacking:
                found = replace(found, state="failed", category=category, native="FailedCreate")
    return found


def _lacks_pods(job: Object, pods: Sequence[Object]) -> bool:
    return len({_index(pod) for pod in pods}) < int(job["spec"]["completions"])


def status_of(job: Object, pods: Sequence[Object]) -> Status:
    """Return the Status of a Job and its pods, the oldest first."""
    conditions, marks = conditions_of(job), marks_of(job)
    cancelled = CANCELLED in marks
    attempts = _attempts(job, pods)
    began = min((row.started for row in attempts if row.started is not None), default=None)
    machine = (job["spec"]["template"]["spec"].get("nodeSelector") or {}).get("node.kubernetes.io/instance-type", "")
    base = Status(state="running", started=began, attempts=attempts, instance_type=str(machine))
    if "Complete" in conditions:
        ended = time_of(job["status"].get("completionTime")) or time_of(conditions["Complete"]["lastTransitionTime"])
        return replace(base, state="succeeded", native="Complete", finished=ended)
    if ENDED in marks:
        category, _, reason = str(marks[ENDED]).partition(": ")
        over = time_of(conditions.get("Failed", {}).get("lastTransitionTime"))
        return replace(base, state="failed", category=category, native="Ended", reason=reason, finished=over)
    if "Failed" in conditions:
        found = _failed(base, conditions["Failed"], pods, cancelled=cancelled)
        if found.category == "infra" and int(job["spec"]["completions"]) == 1 and pods:
            named = replace(attempts[-1], machine=str(pods[-1]["spec"].get("nodeName") or ""))
            return replace(found, attempts=(*attempts[:-1], named))
        return found
    newest = {_index(pod): pod for pod in pods}
    waiting, why = _waiting([pod for pod in newest.values() if pod["status"].get("phase") == "Pending"])
    if (waiting in _IMAGE or (waiting in _PULL and _NO_IMAGE.search(why))) and not cancelled:
        return replace(base, state="failed", category="image", native=waiting, reason=hinted(why, HINTS["image"]))
    if job["spec"].get("suspend"):
        base = replace(base, native="Suspended")
        if cancelled:
            return replace(base, state="cancelled", category="cancelled", reason="it was cancelled")
        return replace(base, state="pending", reason="a queue holds it")
    if conditions.keys() & {"FailureTarget", "SuccessCriteriaMet"} or cancelled:
        state = "running" if began is not None or not cancelled else "pending"
        return replace(base, state=state, native="Ending", reason="stopping" if cancelled else "")
    if _lacks_pods(job, pods) or any(pod["status"].get("phase") == "Pending" for pod in newest.values()):
        category = "capacity" if waiting == "Unschedulable" else ""
        return replace(base, state="pending", native=waiting or "Pending", category=category, reason=why)
    if any(_begins_again(pod) for pod in newest.values()):
        reason = "its nodes stopped at a notice, and start again"
        return replace(base, state="pending", native="Restarting", reason=reason)
    return replace(base, native="Running")


def _failed(base: Status, why: Object, pods: Sequence[Object], *, cancelled: bool) -> Status:
    """Return the status of a Job with the condition Failed, ``why``."""
    over = time_of(why.get("lastTransitionTime"))
    base = replace(base, state="failed", native=f"Failed: {why.get('reason', '')}", finished=over)
    late = why.get("reason") == "DeadlineExceeded"
    # A pod that does not stop at the signal of a cancel is killed, and its exit code fails the Job.
    if cancelled and (late or any(pod["status"].get("reason") == "DeadlineExceeded" for pod in pods)):
        return replace(base, state="cancelled", category="cancelled", reason="it was cancelled")
    if late:
        return replace(base, category="timeout", reason="it waited and ran longer than max_runtime and pending allow")
    newest = {_index(pod): pod for pod in pods}.values()
    # The Job counts no pod that it starts again, so such a pod is not its reason.
    blamed = [pod for pod in newest if pod["status"].get("phase") == "Failed" and not _begins_again(pod)]
    for pod in blamed:
        category, said = _pod_failure(pod)
        if category:
            return replace(base, category=category, reason=said)
    message = one_line(why.get("message"))
    if why.get("reason") != "PodFailurePolicy":
        return replace(base, category="infra", reason=message)
    codes = {end.get("exitCode") for pod in blamed for _, end in _ends(pod)}
    return replace(base, category="infra" if codes & _KILLS and codes <= _KILLS else "user_error", reason=message)


def _pod_failure(pod: Object) -> tuple[str, str]:
    """Return (category, reason) of a failed pod; empty if it does not say more than its exit code."""
    node, said = f"node {_index(pod)}", one_line(pod["status"].get("message"))
    if pod["status"].get("reason") == "DeadlineExceeded":
        return "timeout", f"{node} did not stop at max_runtime"
    if "exceed" in said:  # its storage: a line of the kubelet
        return "user_error", hinted(f"{node}: {said}", HINTS["disk"])
    for image, end in _ends(pod):
        category, text = category_of(end)
        if category:
            text = f"{node}, image {image}: {text}" if category == "image" else text
            return category, hinted(text, HINTS.get(category))
    return ("infra", f"{node}: {said}") if said else ("", "")


def category_of(end: Object) -> tuple[str, str]:
    """Return (category, reason) of a container's end; empty if the end alone does not say it."""
    code, message = end.get("exitCode"), one_line(end.get("message"))
    if end.get("reason") == "OOMKilled":
        return "oom", "a node used more memory than its limit"
    if code == TIME_UP:
        return "timeout", "max_runtime is used up"
    if code in _NO_PROGRAM or end.get("reason") in _IMAGE:
        return "image", message or f"exit code {code}: it may have no Python"
    return "", ""


def _ends(pod: Object) -> list[tuple[str, Object]]:
    """Return (image, end) of each container that has ended."""
    found = [(item.get("image", ""), item["state"].get("terminated")) for item in _containers(pod)]
    return [(image, end) for image, end in found if end]


def _containers(pod: Object) -> list[Object]:
    return list(pod["status"].get("containerStatuses") or ())


def _index(pod: Object) -> str:
    return str((pod["metadata"].get("labels") or {}).get(POD_INDEX, ""))


def _disruption(pod: Object) -> str:
    """Return the reason for which the cluster took the pod; empty if it did not."""
    found = conditions_of(pod).get("DisruptionTarget")
    return str(found.get("reason") or "DisruptionTarget") if found else ""


def _begins_again(pod: Object) -> bool:
    """Return whether the Job starts this pod's node again."""
    if pod["status"].get("phase") != "Failed":
        return False
    return AGAIN in [end.get("exitCode") for _, end in _ends(pod)] or bool(_disruption(pod))


def _waiting(pods: Sequence[Object]) -> tuple[str, str]:
    """Return the platform's word for what pods wait for, and its message."""
    for pod in pods:
        if item := conditions_of(pod, "False").get("PodScheduled"):
            return str(item.get("reason") or "Unschedulable"), one_line(item.get("message"))
        for item in _containers(pod):
            found = item["state"].get("waiting") or {}
            if found.get("reason") and found["reason"] not in PENDING:
                return str(found["reason"]), one_line(f"{found['reason']}: {found.get('message', '')}")
    return "", ""


def _attempts(job: Object, pods: Sequence[Object]) -> tuple[AttemptInfo, ...]:
    """Return a row for each start of node 0, whose runtime numbers the attempts.

    Each pod starts again by itself. One that meets a node 0 that is still leaving ends, and starts once more.
    """
    k = str((job["metadata"].get("labels") or {}).get("cloudtrain.dev/attempt", "0"))
    before, pairs = Counter[str](), []
    for pod in pods:
        pairs.append((_start(pod, before[_index(pod)]), pod))
        before[_index(pod)] += 1
    newest = max((start for start, pod in pairs if _index(pod) == "0"), default=0)
    last = max((min(start, newest) for start, _ in pairs), default=-1)
    rows = []
    for number in range(last + 1):
        found = [pod for start, pod in pairs if min(start, newest) == number]
        began = [moment for pod in found if (moment := _time(pod, "startedAt")) is not None]
        ended = [moment for pod in found if (moment := _time(pod, "finishedAt")) is not None]
        over = number < last or len(ended) == len(found)
        taken = next(filter(None, map(_disruption, found)), "") if number < last else ""
        rows.append(
            AttemptInfo(
                number=f"{k}.{number}",
                started=min(began, default=None),
                ended=max(ended, default=None) if over else None,
                category="preempted" if taken else "",
                reason=_TAKEN.get(taken, taken),
            )
        )
    return tuple(rows)


def _start(pod: Object, before: int) -> int:
    """Return the number of a pod's start: a pod that was evicted is deleted, so the pods that are left do not tell it.

    ``before`` is the number of older pods of its node, for a server that does not write it.
    """
    marks = marks_of(pod)
    counts = [int(marks[key]) for key in _COUNTS if key in marks]
    return sum(counts) if counts else before


def _time(pod: Object, name: str) -> float | None:
    for item in _containers(pod):
        for state in ("running", "terminated"):
            moment = time_of((item["state"].get(state) or {}).get(name))
            if moment:  # a container that could not start has 1970
                return moment
    return None
