"""One indexed Job: its pods as containers of this machine, and the controller's decisions about them."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cloudtrain.engine import NodeError, NodeHandle
from cloudtrain.provider_api.launch_spec import LaunchRules, LaunchSpec, Mount, NodeSpec

from ..base import POLL_SECONDS, Machines, Printed

if TYPE_CHECKING:
    from .cluster import Cluster

__all__ = ["Job", "stamp"]

DEADLINE = "Job was active longer than specified deadline"
NO_NODE = (
    "0/1 nodes are available: 1 Insufficient {name}. preemption: 0/1 nodes are available: 1 No preemption victims."
)
QUOTA = 'pods "{name}" is forbidden: exceeded quota: none, requested: pods=1, used: pods=0, limited: pods=0'
MEMORY = "OOMKilled"
PAUSE, LAG = 10.0, 1.0
"""Seconds before a pod starts again, and from the last pod's end to the Job's."""


def stamp(seconds: float | None = None) -> str:
    """A time as the API writes it: whole seconds."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() if seconds is None else seconds))


class Pod:
    """One pod: its API object, its container, and the lines that it has printed, each with its time."""

    def __init__(self, job: Job, index: int, number: int) -> None:
        self.job, self.index = job, index
        name = f"{job.name}-{index}-{number:05x}"
        labels = {
            **job.made["spec"]["template"]["metadata"]["labels"],
            "batch.kubernetes.io/job-completion-index": str(index),
            "batch.kubernetes.io/job-name": job.name,
        }
        self.object: dict[str, Any] = {
            "metadata": {
                "name": name,
                "namespace": job.namespace,
                "labels": labels,
                "creationTimestamp": stamp(),
                "annotations": {
                    "batch.kubernetes.io/job-index-failure-count": "0",
                    "batch.kubernetes.io/job-index-ignored-failure-count": str(job.ignored.get(index, 0)),
                },
            },
            "spec": dict(job.made["spec"]["template"]["spec"]),
            "status": {"phase": "Pending", "conditions": []},
        }
        self.node: NodeHandle | None = None
        self.lines: list[tuple[float, bytes]] = []
        self._rest = b""
        self.deleted = False
        self.told_at = 0.0

    @property
    def name(self) -> str:
        return str(self.object["metadata"]["name"])

    @property
    def phase(self) -> str:
        return str(self.object["status"]["phase"])

    @property
    def code(self) -> int | None:
        found = self.object["status"].get("containerStatuses")
        ended = found[0]["state"].get("terminated") if found else None
        return None if ended is None else int(ended["exitCode"])

    @property
    def disrupted(self) -> bool:
        return any(item["type"] == "DisruptionTarget" for item in self.object["status"]["conditions"])

    def condition(self, kind: str, status: str, reason: str = "", message: str = "") -> None:
        kept = [item for item in self.object["status"]["conditions"] if item["type"] != kind]
        found = {"type": kind, "status": status, "lastTransitionTime": stamp(), "reason": reason, "message": message}
        self.object["status"]["conditions"] = [*kept, found]

    def wait_for(self, reason: str, message: str = "") -> None:
        """The container waits for ``reason``."""
        self._container({"waiting": {"reason": reason, "message": message}})

    def _container(self, state: Mapping[str, Any]) -> None:
        image = self.object["spec"]["containers"][0]["image"]
        self.object["status"]["containerStatuses"] = [{"name": "node", "image": image, "state": dict(state)}]

    def run(self, node: NodeHandle) -> None:
        self.node, self._began = node, stamp()
        self.object["spec"]["nodeName"] = "node-a"
        self.object["status"] |= {"phase": "Running", "startTime": self._began}
        self.condition("PodScheduled", "True")
        self._container({"running": {"startedAt": self._began}})
        self.running_since = time.monotonic()

    def take(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        self.lines += [(time.time(), line) for line in lines]

    def stop(self) -> None:
        """SIGTERM, and SIGKILL after the pod's own grace."""
        grace = float(self.object["spec"]["terminationGracePeriodSeconds"])
        assert self.node is not None
        if not self.told_at:
            self.told_at = time.monotonic()
            self.node.signal("SIGTERM")
        elif time.monotonic() - self.told_at > min(grace, self.job.cluster.grace):
            self.node.kill()

    def look(self) -> None:
        """Note the end of the container."""
        code = None if self.node is None else self.node.poll()
        if self.phase != "Running" or code is None:
            return
        code = 128 - code if code < 0 else code
        trouble = self.node.trouble if self.node is not None else None
        reason = MEMORY if trouble is not None and trouble[0] == "oom" else "Completed" if code == 0 else "Error"
        if self._rest:
            self.take(b"\n")
        ended = {"exitCode": code, "reason": reason, "startedAt": self._began, "finishedAt": stamp()}
        self._container({"terminated": ended})
        self.object["status"]["phase"] = "Succeeded" if code == 0 else "Failed"
        if self.object["spec"].get("activeDeadlineSeconds") == 1:
            self.object["status"] |= {"phase": "Failed", "reason": "DeadlineExceeded"}


class Job:
    """A Job of a `Cluster`, from its creation on. ``made`` is its API object."""

    def __init__(self, cluster: Cluster, made: dict[str, Any]) -> None:
        self.cluster, self.made = cluster, made
        self.namespace, self.name = str(made["metadata"]["namespace"]), str(made["metadata"]["name"])
        made["status"] = {"startTime": stamp(), "conditions": []}
        self._since = time.time()
        self.folder = cluster.folder / "jobs" / f"{self.namespace}-{self.name}"
        self.pods: list[Pod] = []
        self.ignored: dict[int, int] = {}
        self.crash, self.over, self.starts = "", False, 0
        self._stop = threading.Event()
        self._engine = Machines(folder=self.folder / "engine", run=self.folder.as_uri(), environ={})
        self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
        self._thread.start()

    # ---------------------------------------------------------------------------------------- what is done to the job

    def stop(self) -> None:
        self._stop.set()

    def wait(self, seconds: float = 120.0) -> None:
        self._thread.join(seconds)
        assert not self._thread.is_alive(), f"{self.name} has not ended"

    def newest(self, index: int) -> Pod:
        return [pod for pod in self.pods if pod.index == index][-1]

    def printed(self) -> str:
        """What all containers have printed of whole lines, also those of pods that are gone."""
        files = sorted((self.folder / "engine" / "out").glob("*/node-*.log"))
        return "\n".join(path.read_text("utf-8", "replace").rpartition("\n")[0] for path in files)

    def evict(self, index: int) -> None:
        pod = self.newest(index)
        pod.condition("DisruptionTarget", "True", "EvictionByEvictionAPI", "Eviction API: evicting")
        pod.deleted = True

    def kill(self, index: int) -> None:
        node = self.newest(index).node
        assert node is not None
        node.kill()

    def lose(self, index: int) -> None:
        """A machine that is gone: its pod is deleted once the node object is."""
        pod = self.newest(index)
        pod.condition("DisruptionTarget", "True", "DeletionByPodGC", "PodGC: node no longer exists")
        self.kill(index)

    # ------------------------------------------------------------------------------------------------------ its life

    def _conditioned(self, kind: str, reason: str = "", message: str = "") -> None:
        found = {"type": kind, "status": "True", "reason": reason, "message": message, "lastTransitionTime": stamp()}
        self.made["status"]["conditions"].append(found)

    def _run(self) -> None:
        try:
            self._live()
        except Exception:  # noqa: BLE001  a thread that dies silently would leave the job for ever
            self.crash = traceback.format_exc()
        finally:
            for pod in self.pods:
                if pod.node is not None:
                    pod.node.kill()
            self._engine.clean()
            self.over = True

    def _live(self) -> None:
        todo = list(range(int(self.made["spec"]["completions"])))
        while todo:
            if self._late() or not self._created(todo) or not self._started(todo):
                return self._end("DeadlineExceeded", DEADLINE)
            end = self._watch(todo)
            if end is not None:
                return self._end(*end)
            todo = [index for index in todo if self.newest(index).phase != "Succeeded"]
            self.ignored |= {index: self.ignored.get(index, 0) + 1 for index in todo}
            self.pods = [pod for pod in self.pods if not pod.disrupted]  # whoever takes a pod deletes it
            began = time.monotonic()
            stopped = any(pod.object["status"].get("reason") == "DeadlineExceeded" for pod in self.pods)
            pause = PAUSE if stopped else self.cluster.restart_seconds
            while todo and time.monotonic() - began < pause:
                if self._late():
                    return self._end("DeadlineExceeded", DEADLINE)
                time.sleep(POLL_SECONDS)
        self._conditioned("SuccessCriteriaMet", "CompletionsReached")
        time.sleep(LAG)
        self.made["status"]["completionTime"] = stamp()
        self._conditioned("Complete", "CompletionsReached")
        return None

    def _late(self) -> bool:
        """Whether the Job's own deadline is over; the test's end counts as that."""
        limit = self.made["spec"].get("activeDeadlineSeconds")
        return self._stop.is_set() or (limit is not None and time.time() - self._since >= limit)

    def _end(self, reason: str, message: str) -> None:
        """The Job has failed: its running pods are stopped with their grace and deleted."""
        self._conditioned("FailureTarget", reason, message)
        for pod in self.pods:
            while pod.phase == "Running":
                if self._stop.is_set() and pod.node is not None:
                    pod.node.kill()
                pod.stop()
                self._read(pod)
                pod.look()
                time.sleep(POLL_SECONDS)
        kept = [pod for pod in self.pods if pod.phase in ("Failed", "Succeeded") and not pod.told_at]
        kept += [pod for pod in self.pods if pod.object["status"].get("reason") == "DeadlineExceeded"]
        self.pods = [pod for pod in self.pods if pod in kept]
        self._conditioned("Failed", reason, message)

    def _created(self, todo: Sequence[int]) -> bool:
        """Create the pods, or events about a quota. Return False after the deadline."""
        while self.cluster.quota:
            self.cluster.event(self, "FailedCreate", QUOTA.format(name=f"{self.name}-0-x"))
            if self._pause():
                return False
        self.pods += [Pod(self, index, self.starts) for index in todo]
        return True

    def _pause(self) -> bool:
        time.sleep(0.2)
        return self._late()

    def _started(self, todo: Sequence[int]) -> bool:
        """Start the containers. Return False after the deadline."""
        pods = [self.newest(index) for index in todo]
        while self.cluster.no_capacity:
            for pod in pods:
                pod.condition("PodScheduled", "False", "Unschedulable", NO_NODE.format(name="nvidia.com/gpu"))
            if self._pause():
                return False
        while (values := self.cluster.secret_of(self)) is None:
            for pod in pods:
                pod.wait_for("ContainerCreating")
            if self._pause():
                return False
        launch = self._launch(todo, values)
        try:
            self._engine.prepare(launch, lambda text: None, self._late)
            attempt = f"0.{self.starts}"
            local = {mount.url: self.cluster.local(mount.url) for spec in launch.nodes for mount in spec.mounts}
            nodes = self._engine.start(launch, attempt=attempt, local=local, secrets={})
        except NodeError as exc:
            if exc.category != "image":
                raise
            for pod in pods:
                pod.wait_for("ImagePullBackOff", f'Back-off pulling image "{launch.nodes[0].image}": {exc}')
            while not self._pause():
                pass
            return False
        out = self.folder / "engine" / "out" / attempt
        self._printed = {}
        for number, (pod, node) in enumerate(zip(pods, nodes, strict=True)):
            self._printed[pod.name] = Printed(out / f"node-{number}.log", pod.take)
            pod.run(node)
        self.starts += 1
        return True

    def _launch(self, todo: Sequence[int], secrets: Mapping[str, str]) -> LaunchSpec:
        """The containers of these indexes, as the kubelet reads the manifest."""
        spec = self.made["spec"]["template"]["spec"]
        container, volumes = spec["containers"][0], {item["name"]: item for item in spec["volumes"]}
        limits = container["resources"]["limits"]

        def node(index: int) -> NodeSpec:
            files, mounts, shm = {}, [], None
            for mount in container["volumeMounts"]:
                path, volume = mount["mountPath"], volumes[mount["name"]]
                if "secret" in volume:
                    files = {f"{path}/{name}": value for name, value in secrets.items()}
                elif volume.get("emptyDir", {}).get("medium") == "Memory":
                    shm = _bytes(volume["emptyDir"].get("sizeLimit")) or 256 << 20
                elif "emptyDir" in volume:
                    mounts.append(Mount(url=f"empty://{self.name}/{self.starts}-{index}", path=path, kind="sync"))
                else:
                    mounts.append(Mount(url="volume://shared", path=path, kind="sync"))
            host = f"{self.name}-{index}"
            many = self.made["spec"]["completions"] > 1
            return NodeSpec(
                image=container["image"],
                entrypoint=container["command"],
                command=container["args"],
                env={
                    **{item["name"]: item["value"] for item in container["env"]},
                    "JOB_COMPLETION_INDEX": str(index),
                    "KUBERNETES_SERVICE_HOST": "10.96.0.1",
                    "KUBERNETES_SERVICE_PORT": "443",
                },
                mounts=mounts,
                files=files,
                hostname=f"{host}.{spec['subdomain']}" if many else host,
                cpus=int(limits["cpu"]) if "cpu" in limits else None,
                memory=_bytes(limits.get("memory")),
                shm=shm,
            )

        grace = float(spec["terminationGracePeriodSeconds"])
        return LaunchSpec(nodes=[node(index) for index in todo], rules=LaunchRules(time_limit=1e9, stop_grace=grace))

    def _read(self, pod: Pod) -> None:
        if (printed := self._printed.get(pod.name)) is not None:
            printed.step()

    def _watch(self, todo: Sequence[int]) -> tuple[str, str] | None:
        """Wait for the end of the pods. Return reason and message of a Job that has failed; None: go on."""
        pods = [self.newest(index) for index in todo]
        while any(pod.phase == "Running" for pod in pods):
            for pod in pods:
                self._read(pod)
                pod.look()
                limit = pod.object["spec"].get("activeDeadlineSeconds")
                over = limit is not None and pod.phase == "Running" and time.monotonic() - pod.running_since >= limit
                if pod.phase == "Running" and (pod.deleted or over):
                    pod.stop()
                if pod.phase == "Failed" and not pod.disrupted and pod.code != 75:
                    said = f"Container node for pod {self.namespace}/{pod.name} failed with exit code {pod.code}"
                    return "PodFailurePolicy", f"{said} matching FailJob rule at index 2"
            if self._late():
                return "DeadlineExceeded", DEADLINE
            time.sleep(POLL_SECONDS)
        return None


def _bytes(quantity: Any) -> int | None:
    text = str(quantity or "")
    return int(text[:-1]) * 1000**3 if text.endswith("G") else None
