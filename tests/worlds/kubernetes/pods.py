"""Pods of the fake cluster: the API object and the container of each, and the kubelet's actions."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloudtrain.engine import NodeError
from cloudtrain.engine.containers import ContainerNode
from cloudtrain.provider_api.launch_spec import LaunchSpec

from ..base import Machines, Printed

if TYPE_CHECKING:
    from .life import Job

__all__ = ["Kubelet", "Pod", "stamp"]

LATE = "Pod was active on the node longer than the specified deadline"
NO_NODE = (
    "0/1 nodes are available: 1 Insufficient nvidia.com/gpu. no new claims to deallocate, preemption: 0/1 nodes are"
    " available: 1 Preemption is not helpful for scheduling."
)
LINGER = 0.5
"""Seconds that the API keeps a deleted pod that has ended."""
COUNTS = "batch.kubernetes.io/job-index-failure-count", "batch.kubernetes.io/job-index-ignored-failure-count"


def stamp(seconds: float | None = None) -> str:
    """Return a time as the API writes it, in whole seconds."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() if seconds is None else seconds))


class Kubelet(Machines):
    """Engine of one Job's pods. Each starts separately, while others run."""

    def start_one(self, launch: LaunchSpec, number: int, name: str, local: Mapping[str, Path]) -> ContainerNode:
        """Start node ``number`` of ``launch`` as the pod ``name``."""
        self.out(name).parent.mkdir(parents=True, exist_ok=True)
        paths = self._stage(launch.nodes[number], number, local)

        def start(api: Any) -> ContainerNode:
            body = self._body(launch, number, name, paths, secrets=False)
            return ContainerNode(self, body, f"{self._network}-{name}", launch.nodes[number], self.out(name), {})

        node = self.patiently(start, self._given_up)
        node.follow()
        return node

    def out(self, name: str) -> Path:
        """Return the file with the output of a pod."""
        return self._folder / "out" / f"{name}.log"


class Pod:
    """One pod: its API object, its container, and the lines that it has printed, with their times."""

    def __init__(self, job: Job, index: int, name: str) -> None:
        self.job, self.index, self.name = job, index, name
        template = job.made["spec"]["template"]
        ignored = {COUNTS[1]: str(job.ignored[index])} if index in job.ignored else {}
        self.object: dict[str, Any] = {
            "metadata": {
                "name": name,
                "namespace": job.namespace,
                "labels": {
                    **template["metadata"]["labels"],
                    "batch.kubernetes.io/job-completion-index": str(index),
                    "batch.kubernetes.io/job-name": job.name,
                },
                "annotations": {
                    **(template["metadata"].get("annotations") or {}),
                    "batch.kubernetes.io/job-completion-index": str(index),
                    COUNTS[0]: str(job.failures.get(index, 0)),
                    **ignored,
                },
                "creationTimestamp": stamp(),
            },
            "spec": dict(template["spec"]),
            "status": {"phase": "Pending", "conditions": []},
        }
        self.node: ContainerNode | None = None
        self.lines: list[tuple[float, bytes]] = []
        self.gone = False
        """True once the API has deleted the object."""
        self._printed: Printed | None = None
        self._rest = b""
        self._term_at = self._silent_since = self._assigned = self._ended = 0.0
        self._no_image = False

    # ------------------------------------------------------------------------------------------------------------ state

    @property
    def phase(self) -> str:
        return str(self.object["status"]["phase"])

    @property
    def active(self) -> bool:
        return not self.gone and self.phase in ("Pending", "Running")

    @property
    def deleted(self) -> bool:
        return "deletionTimestamp" in self.object["metadata"]

    @property
    def late(self) -> bool:
        """Return True if its own deadline has ended it."""
        return bool(self.object["status"].get("reason") == "DeadlineExceeded")

    @property
    def disrupted(self) -> bool:
        return any(item["type"] == "DisruptionTarget" for item in self.object["status"]["conditions"])

    @property
    def code(self) -> int | None:
        found = self.object["status"].get("containerStatuses")
        ended = found[0]["state"].get("terminated") if found else None
        return None if ended is None else int(ended["exitCode"])

    # ---------------------------------------------------------------------------------------------------------- actions

    def delete(self) -> None:
        """Delete the object; the container gets its grace first."""
        grace = float(self.object["spec"]["terminationGracePeriodSeconds"])
        self.object["metadata"].setdefault("deletionTimestamp", stamp(time.time() + grace))

    def disrupt(self, reason: str, message: str) -> None:
        self._condition("DisruptionTarget", "True", reason, message)
        self.delete()

    def silence(self) -> None:
        """Lose the machine: for the API its pod still runs, until the machine's own object is deleted."""
        self._silent_since = time.monotonic()
        self.disrupt("DeletionByTaintManager", "Taint manager: deleting due to NoExecute taint")
        self.kill()

    def kill(self) -> None:
        assert self.node is not None
        self.node.kill()

    def step(self) -> None:
        """Act as the scheduler and the kubelet would now."""
        if self._silent_since:
            self.gone = time.monotonic() - self._silent_since > self.job.cluster.silence_seconds
        elif self.phase == "Pending":
            self._advance()
        elif self.phase == "Running":
            self._watch()
        if self.deleted and not self._silent_since and self.phase != "Running":
            self.gone = self.phase == "Pending" or time.monotonic() - self._ended > LINGER

    def _advance(self) -> None:
        if self.deleted or self._no_image:
            self._end_if_late()
            return
        if not self._assigned:
            if self.job.cluster.no_capacity:
                self._condition("PodScheduled", "False", "Unschedulable", NO_NODE)
                return
            self._assigned = time.monotonic()
            self.object["spec"]["nodeName"] = "node-a"
            self.object["status"]["startTime"] = stamp()
            self._condition("PodScheduled", "True")
            self._container({"waiting": {"reason": "ContainerCreating"}})
        if self._end_if_late() or (values := self.job.cluster.secret_of(self.job)) is None:
            return
        try:
            self.node = self.job.start(self, values)
        except NodeError as exc:
            self._fail_to_start(exc)
            return
        self._began = stamp()
        self._printed = Printed(self.job.kubelet.out(self.name), self._take)
        self.object["status"]["phase"] = "Running"
        self._container({"running": {"startedAt": self._began}})

    def _fail_to_start(self, error: NodeError) -> None:
        """Wait for an image that cannot be pulled, or fail by a command that the image lacks."""
        if error.category != "image":
            raise error
        if "cannot run" in str(error):
            ended = {"startedAt": "1970-01-01T00:00:00Z", "finishedAt": stamp(), "message": str(error)}
            self._container({"terminated": {"exitCode": 128, "reason": "StartError", **ended}})
            self.object["status"]["phase"] = "Failed"
            return
        self._no_image = True
        image = self.object["spec"]["containers"][0]["image"]
        message = f'Back-off pulling image "{image}": ErrImagePull: failed to pull and unpack image "{image}": {error}'
        self._container({"waiting": {"reason": "ImagePullBackOff", "message": message}})

    def _watch(self) -> None:
        assert self.node is not None
        assert self._printed is not None
        code = self.node.poll()
        self._printed.step()
        if code is None:
            if self.deleted or self._is_late():
                self._stop()
            return
        if self._rest:
            self._take(b"\n")
        code = 128 - code if code < 0 else code
        oom = self.node.trouble is not None and self.node.trouble[0] == "oom"
        reason = "OOMKilled" if oom else "Completed" if code == 0 else "Error"
        ended = {"exitCode": code, "reason": reason, "startedAt": self._began, "finishedAt": stamp()}
        self._container({"terminated": ended})
        self.object["status"]["phase"] = "Succeeded" if code == 0 else "Failed"
        self._end_if_late()
        self._ended = time.monotonic()
        self.node.kill()  # remove its remains

    def _is_late(self) -> bool:
        limit = self.object["spec"].get("activeDeadlineSeconds")
        return limit is not None and self._assigned > 0 and time.monotonic() - self._assigned >= limit

    def _end_if_late(self) -> bool:
        if self._is_late():
            self.object["status"] |= {"phase": "Failed", "reason": "DeadlineExceeded", "message": LATE}
        return self.late

    def _stop(self) -> None:
        """Send SIGTERM, and SIGKILL after the grace."""
        grace = float(self.object["spec"]["terminationGracePeriodSeconds"])
        if not self._term_at:
            self._term_at = time.monotonic()
            assert self.node is not None
            self.node.signal("SIGTERM")
        elif time.monotonic() - self._term_at > min(grace, self.job.cluster.grace):
            self.kill()

    def _condition(self, kind: str, status: str, reason: str = "", message: str = "") -> None:
        reasons = {"reason": reason, "message": message} if reason else {}
        found = {"type": kind, "status": status, "lastTransitionTime": stamp(), **reasons}
        kept = [item for item in self.object["status"]["conditions"] if item["type"] != kind]
        self.object["status"]["conditions"] = [*kept, found]

    def _container(self, state: Mapping[str, Any]) -> None:
        image = self.object["spec"]["containers"][0]["image"]
        self.object["status"]["containerStatuses"] = [{"name": "node", "image": image, "state": dict(state)}]

    def _take(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        self.lines += [(time.time(), line) for line in lines]
