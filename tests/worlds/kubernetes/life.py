"""One indexed Job: the controller's decisions about the pods of each index."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from cloudtrain.engine.containers import ContainerNode
from cloudtrain.provider_api.launch_spec import LaunchRules, LaunchSpec, Mount, NodeSpec

from ..base import POLL_SECONDS
from .pods import Kubelet, Pod, stamp

if TYPE_CHECKING:
    from .cluster import Cluster

__all__ = ["Job"]

LATE = "DeadlineExceeded", "Job was active longer than specified deadline"
MET = "CompletionsReached", "Reached expected number of succeeded pods"
QUOTA = (
    'Error creating: pods "{name}" is forbidden: exceeded quota: none, requested: pods=1, used: pods=5, limited: pods=0'
)
AGAIN = 75
PAUSE, LAG, REFUSED = 10.0, 1.0, 0.2
"""Seconds before a pod starts again, from the last pod's end to the Job's, and between two tries to create a pod."""


class Job:
    """A Job of a `Cluster` since its creation. ``made`` is its API object."""

    def __init__(self, cluster: Cluster, made: dict[str, Any]) -> None:
        self.cluster, self.made = cluster, made
        self.namespace, self.name = str(made["metadata"]["namespace"]), str(made["metadata"]["name"])
        made["status"] = {"startTime": stamp(), "conditions": []}
        self._since = time.time()
        self.folder = cluster.folder / "jobs" / f"{self.namespace}-{self.name}"
        self.pods: list[Pod] = []
        """Pods that the API has, oldest first."""
        self.failures: dict[int, int] = {}
        self.ignored: dict[int, int] = {}
        self.crash, self.over = "", False
        self._due: dict[int, float] = dict.fromkeys(range(int(made["spec"]["completions"])), 0.0)
        """Time at which each index without a pod gets one."""
        self._current: dict[int, Pod] = {}
        self._count = 0
        self._launch: LaunchSpec | None = None
        self._stop = threading.Event()
        self.kubelet = Kubelet(folder=self.folder / "engine", run=self.folder.as_uri(), environ={})
        self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
        self._thread.start()

    # ---------------------------------------------------------------------------------------------- faults and requests

    def stop(self) -> None:
        self._stop.set()

    def wait(self, seconds: float = 120.0) -> None:
        self._thread.join(seconds)
        assert not self._thread.is_alive(), f"{self.name} has not ended"

    def newest(self, index: int) -> Pod:
        return [pod for pod in self.pods if pod.index == index][-1]

    def printed(self) -> str:
        """Return the complete lines that all containers have printed, including those of deleted pods."""
        files = sorted((self.folder / "engine" / "out").glob("*.log"))
        return "\n".join(path.read_text("utf-8", "replace").rpartition("\n")[0] for path in files)

    def evict(self, index: int) -> None:
        self.newest(index).disrupt("EvictionByEvictionAPI", "Eviction API: evicting")

    def kill(self, index: int) -> None:
        self.newest(index).kill()

    def lose(self, index: int) -> None:
        """Lose the machine of a pod."""
        self.newest(index).silence()

    # ------------------------------------------------------------------------------------------------------ its life

    def _run(self) -> None:
        try:
            end = self._live()
            if end is not None:
                self._fail(*end)
        except Exception:  # noqa: BLE001  without this, a job whose thread died would never end
            self.crash = traceback.format_exc()
        finally:
            for pod in self.pods:
                if pod.node is not None:
                    pod.node.kill()
            self.kubelet.clean()
            self.over = True

    def _live(self) -> tuple[str, str] | None:
        """Start pods, also again, until all have succeeded. Return reason and message of a Job that fails."""
        while self._due or self._current:
            if self._late():
                return LATE
            if self.made["spec"].get("suspend"):
                for pod in self._current.values():
                    pod.delete()
            else:
                self._create()
            self._step()
            for pod in [pod for pod in self._current.values() if not pod.active]:
                if end := self._settle(pod):
                    return end
            time.sleep(POLL_SECONDS)
        self._condition("SuccessCriteriaMet", *MET)
        time.sleep(LAG)
        self._step()
        self.made["status"]["completionTime"] = stamp()
        self._condition("Complete", *MET)
        return None

    def _step(self) -> None:
        for pod in self.pods:
            pod.step()
        self.pods = [pod for pod in self.pods if not pod.gone]

    def _late(self) -> bool:
        """Return True after the Job's own deadline, or at the test's end. A suspended Job has no deadline."""
        limit = None if self.made["spec"].get("suspend") else self.made["spec"].get("activeDeadlineSeconds")
        return self._stop.is_set() or (limit is not None and time.time() - self._since >= limit)

    def _create(self) -> None:
        """Create the pods that are due, or an event about the quota."""
        for index in [index for index, moment in self._due.items() if moment <= time.monotonic()]:
            name = f"{self.name}-{index}-{self._count:05x}"
            if self.cluster.quota:
                self.cluster.event(self, "FailedCreate", QUOTA.format(name=name))
                self._due[index] = time.monotonic() + REFUSED
                continue
            self._count += 1
            del self._due[index]
            self._current[index] = pod = Pod(self, index, name)
            self.pods = [*self.pods, pod]
            self.cluster.event(self, "SuccessfulCreate", f"Created pod: {name}")

    def _settle(self, pod: Pod) -> tuple[str, str] | None:
        """Decide about a pod that has ended. Return reason and message if the Job fails by it."""
        del self._current[pod.index]
        if pod.phase == "Succeeded":
            return None
        if not pod.disrupted and pod.code not in (None, AGAIN):
            message = f"Container node for pod {self.namespace}/{pod.name} failed with exit code {pod.code}"
            return "PodFailurePolicy", f"{message} matching FailJob rule at index 2"
        counts = self.ignored if pod.disrupted or pod.code == AGAIN else self.failures
        counts[pod.index] = counts.get(pod.index, 0) + 1
        pause = PAUSE if pod.late else self.cluster.restart_seconds
        self._due[pod.index] = time.monotonic() + pause
        return None

    def _fail(self, reason: str, message: str) -> None:
        """End a failed Job: delete its running pods, with their grace, and their logs."""
        self._condition("FailureTarget", reason, message)
        for pod in self._current.values():
            pod.delete()
        while any(pod.deleted for pod in self.pods):
            for pod in self.pods:
                if self._stop.is_set() and pod.phase == "Running":
                    pod.kill()
            self._step()
            time.sleep(POLL_SECONDS)
        self._condition("Failed", reason, message)

    def _condition(self, kind: str, reason: str, message: str) -> None:
        found = {"type": kind, "status": "True", "reason": reason, "message": message, "lastTransitionTime": stamp()}
        self.made["status"]["conditions"] = [*self.made["status"]["conditions"], found]

    # ------------------------------------------------------------------------------------------------- its containers

    def start(self, pod: Pod, secrets: Mapping[str, str]) -> ContainerNode:
        """Start a pod's container. Raises `NodeError`."""
        if self._launch is None:
            launch = self._launch_spec(secrets)
            self.kubelet.prepare(launch, lambda text: None, self._late)
            self._launch = launch
        mounts = self._launch.nodes[pod.index].mounts
        local = {mount.url: self.cluster.local(mount.url, pod.name) for mount in mounts}
        return self.kubelet.start_one(self._launch, pod.index, pod.name, local)

    def _launch_spec(self, secrets: Mapping[str, str]) -> LaunchSpec:
        """Return the containers, as the kubelet reads the manifest."""
        spec = self.made["spec"]["template"]["spec"]
        container, volumes = spec["containers"][0], {item["name"]: item for item in spec["volumes"]}
        limits, many = container["resources"]["limits"], self.made["spec"]["completions"] > 1
        files, mounts, shm = {}, [], None
        for mount in container["volumeMounts"]:
            path, volume = mount["mountPath"], volumes[mount["name"]]
            if "secret" in volume:
                files = {f"{path}/{name}": value for name, value in secrets.items()}
            elif volume.get("emptyDir", {}).get("medium") == "Memory":
                shm = _bytes(volume["emptyDir"].get("sizeLimit")) or 256 << 20
            else:
                kind = "empty" if "emptyDir" in volume else "volume"
                mounts.append(Mount(url=f"{kind}://{mount['name']}", path=path, kind="sync"))

        def node(index: int) -> NodeSpec:
            host = f"{self.name}-{index}"
            return NodeSpec(
                image=container["image"],
                entrypoint=container["command"],
                command=container["args"],
                env={
                    **{item["name"]: item.get("value", "node-a") for item in container["env"]},
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

        nodes = [node(index) for index in range(int(self.made["spec"]["completions"]))]
        rules = LaunchRules(time_limit=1e9, stop_grace=float(spec["terminationGracePeriodSeconds"]))
        return LaunchSpec(nodes=nodes, rules=rules)


def _bytes(quantity: Any) -> int | None:
    text = str(quantity or "")
    return int(text[:-1]) * 1000**3 if text.endswith("G") else None
