"""Turn a Job and its pods into a Status: `status` makes the calls, the rest is pure.

Seen with Kubernetes 1.36.2; the tests hold its answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...provider_api.protocol import AttemptInfo, Status
from .._cloud import hinted, one_line, time_of
from .node import AGAIN, TIME_UP
from .request import CANCELLED, POD_INDEX

if TYPE_CHECKING:
    from .api import Account

__all__ = ["HINTS", "status", "status_of"]

HINTS: Mapping[str, str] = {
    "quota": "to see the limits, run: kubectl describe resourcequota",
    "image": "check image and kubernetes.image_pull_secrets",
    "oom": "ask for more with memory_gb",
}
_IMAGE = frozenset(
    ("ErrImagePull", "ImagePullBackOff", "ErrImageNeverPull", "InvalidImageName", "ImageInspectError", "StartError")
)
"""Reasons of a container that waits in vain, or could not start."""
_STARTING = frozenset(("ContainerCreating", "PodInitializing"))
_NO_PROGRAM = (126, 127, 128)
"""Exit codes of a command that is missing in the image."""
_TAKEN = {
    "EvictionByEvictionAPI": "it was evicted",
    "PreemptionByScheduler": "a pod of higher priority took its place",
    "DeletionByTaintManager": "its machine was tainted",
    "DeletionByPodGC": "its machine is gone",
    "TerminationByKubelet": "its machine shut down, or ran out of something",
}
"""The meaning of a pod's condition DisruptionTarget, by its reason."""
Object = Mapping[str, Any]


def status(account: Account, native_id: str) -> Status:
    """Return the Job's status. Raises `NotFoundError` for an unknown one."""
    job = account.job(native_id)
    pods = account.pods(native_id)
    found = status_of(job, pods)
    if found.state == "pending" and not pods and not job["spec"].get("suspend"):
        return _refused(found, account.refusals(native_id))
    return found


def _refused(found: Status, events: Sequence[Object]) -> Status:
    """Return the status of a Job without pods, by the events of those that the cluster refused."""
    if not events:
        return found
    why = one_line(events[-1].get("message"))
    if "exceeded quota" in why:
        return replace(
            found, state="failed", category="quota", reason=hinted(why, HINTS["quota"]), native="FailedCreate"
        )
    return replace(found, reason=why)


def status_of(job: Object, pods: Sequence[Object]) -> Status:
    """Return the Status of a Job and its pods, the oldest first."""
    conditions = {
        item["type"]: item for item in job.get("status", {}).get("conditions") or () if item["status"] == "True"
    }
    cancelled = CANCELLED in (job["metadata"].get("annotations") or {})
    attempts = _attempts(job, pods)
    began = min((row.started for row in attempts if row.started is not None), default=None)
    base = Status(state="running", started=began, attempts=attempts, instance_type=_machine(job))
    if "Complete" in conditions:
        ended = time_of(job["status"].get("completionTime")) or time_of(conditions["Complete"]["lastTransitionTime"])
        return replace(base, state="succeeded", native="Complete", finished=ended)
    if "Failed" in conditions:
        return _failed(base, conditions["Failed"], pods, cancelled=cancelled)
    newest = {_index(pod): pod for pod in pods}
    waiting, why = _waiting([pod for pod in newest.values() if pod["status"].get("phase") == "Pending"])
    if waiting in _IMAGE:
        return replace(base, state="failed", category="image", native=waiting, reason=hinted(why, HINTS["image"]))
    if job["spec"].get("suspend"):
        native = "cancelled" if cancelled else "pending"
        return replace(
            base, state=native, category=cancelled * "cancelled", native="Suspended", reason="a queue holds it"
        )
    if conditions.keys() & {"FailureTarget", "SuccessCriteriaMet"} or cancelled:
        state = "running" if began is not None or not cancelled else "pending"
        return replace(base, state=state, native="Ending", reason="stopping" if cancelled else "")
    unready = [pod for pod in newest.values() if pod["status"].get("phase") == "Pending"]
    if len(newest) < job["spec"]["completions"] or unready:
        category = "capacity" if waiting == "Unschedulable" else ""
        return replace(base, state="pending", native=waiting or "Pending", category=category, reason=why)
    if any(_begins_again(pod) for pod in newest.values()):
        return replace(
            base, state="pending", native="Restarting", reason="its nodes stopped at a notice, and start again"
        )
    return replace(base, native="Running")


def _failed(base: Status, why: Object, pods: Sequence[Object], *, cancelled: bool) -> Status:
    """Return the status of a Job with the condition Failed, ``why``."""
    base = replace(
        base, state="failed", native=f"Failed: {why.get('reason', '')}", finished=time_of(why.get("lastTransitionTime"))
    )
    if why.get("reason") == "DeadlineExceeded":
        if cancelled:
            return replace(base, state="cancelled", category="cancelled", reason="it was cancelled")
        return replace(base, category="timeout", reason="it waited and ran longer than max_runtime and pending allow")
    for pod in pods:
        for name, end in _ends(pod):
            node = f"node {_index(pod)}"
            if end.get("reason") == "OOMKilled":
                return replace(base, category="oom", reason=hinted(f"{node} ran out of memory", HINTS["oom"]))
            if end.get("exitCode") == TIME_UP:
                return replace(base, category="timeout", reason="max_runtime is used up")
            if end.get("exitCode") in _NO_PROGRAM or end.get("reason") in _IMAGE:
                said = one_line(end.get("message")) or f"exit code {end.get('exitCode')}: it may have no Python"
                return replace(base, category="image", reason=hinted(f"{node}, image {name}: {said}", HINTS["image"]))
    message = one_line(why.get("message"))
    if why.get("reason") != "PodFailurePolicy":
        return replace(base, category="infra", reason=message)
    codes = [end.get("exitCode") for pod in pods for _, end in _ends(pod)]
    killed = 137 in codes and not any(code not in (0, AGAIN, 137, 143) for code in codes)
    return replace(base, category="infra" if killed else "user_error", reason=message)


def _ends(pod: Object) -> list[tuple[str, Object]]:
    """Return (image, end) of each container that has ended."""
    found = [(item.get("image", ""), item["state"].get("terminated")) for item in _containers(pod)]
    return [(image, end) for image, end in found if end]


def _containers(pod: Object) -> list[Object]:
    return list(pod["status"].get("containerStatuses") or ())


def _index(pod: Object) -> str:
    return str((pod["metadata"].get("labels") or {}).get(POD_INDEX, ""))


def _machine(job: Object) -> str:
    selector = job["spec"]["template"]["spec"].get("nodeSelector") or {}
    return str(selector.get("node.kubernetes.io/instance-type", ""))


def _disruption(pod: Object) -> str:
    """Return the reason for which the cluster took the pod; empty if it did not."""
    for item in pod["status"].get("conditions") or ():
        if item["type"] == "DisruptionTarget" and item["status"] == "True":
            return str(item.get("reason") or "DisruptionTarget")
    return ""


def _begins_again(pod: Object) -> bool:
    """Return whether the Job starts this pod's node again."""
    if pod["status"].get("phase") != "Failed":
        return False
    return AGAIN in [end.get("exitCode") for _, end in _ends(pod)] or bool(_disruption(pod))


def _waiting(pods: Sequence[Object]) -> tuple[str, str]:
    """Return the platform's word for what pods wait for, and its message."""
    for pod in pods:
        for item in pod["status"].get("conditions") or ():
            if item["type"] == "PodScheduled" and item["status"] == "False":
                return str(item.get("reason") or "Unschedulable"), one_line(item.get("message"))
        for item in _containers(pod):
            found = item["state"].get("waiting") or {}
            if found.get("reason") and found["reason"] not in _STARTING:
                return str(found["reason"]), one_line(f"{found['reason']}: {found.get('message', '')}")
    return "", ""


def _attempts(job: Object, pods: Sequence[Object]) -> tuple[AttemptInfo, ...]:
    """Return a row for each start of the nodes. A node has one pod for each start."""
    k = str((job["metadata"].get("labels") or {}).get("cloudtrain.dev/attempt", "0"))
    by_node: dict[str, list[Object]] = {}
    for pod in pods:
        by_node.setdefault(_index(pod), []).append(pod)
    starts = max((len(found) for found in by_node.values()), default=0)
    rows = []
    for restart in range(starts):
        found = [own[restart] for own in by_node.values() if restart < len(own)]
        began = [_time(pod, "startedAt") for pod in found]
        ended = [_time(pod, "finishedAt") for pod in found]
        taken = next(filter(None, map(_disruption, found)), "")
        rows.append(
            AttemptInfo(
                number=f"{k}.{restart}",
                started=min((moment for moment in began if moment is not None), default=None),
                ended=max((moment for moment in ended if moment is not None), default=None),
                category="preempted" if taken and restart < starts - 1 else "",
                reason=_TAKEN.get(taken, taken) if restart < starts - 1 else "",
            )
        )
    return tuple(rows)


def _time(pod: Object, name: str) -> float | None:
    for item in _containers(pod):
        for state in ("running", "terminated"):
            if (found := (item["state"].get(state) or {}).get(name)) is not None:
                return time_of(found)
    return None
