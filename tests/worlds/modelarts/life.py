"""One training job: ModelArts' phases, with its tasks as containers of this machine.

Restarts follow Huawei's page on fault tolerance. After a machine fault the whole job is placed again, up to
``fault-tolerance/job-retry-num`` times. A script's failure is final unless ``job-unconditional-retry`` is set; no
request of cloudtrain sets it. Messages of failures and the seconds of grace are unverified.
"""

from __future__ import annotations

import dataclasses
import os
import shlex
import shutil
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloudtrain.engine import NodeError, NodeHandle
from cloudtrain.provider_api.launch_spec import LaunchRules, LaunchSpec, Mount, NodeSpec

from ..base import POLL_SECONDS, Machines, Printed, Started

if TYPE_CHECKING:
    from .plane import Plane

__all__ = ["FINAL", "TrainingJob", "differences", "reading"]

FINAL = ("Completed", "Failed", "Terminated")
GRACE = 30.0
USER = "1000:100" if os.getuid() == 0 else f"{os.getuid()}:{os.getgid()}"
"""ma-user, or this user where tests do not run as root: only root can remove another user's files."""
PREFIX = "modelarts-job-"
RETRY_NUM = "fault-tolerance/job-retry-num"


class TrainingJob:
    """A job of a `Plane`; ``history`` lists its phases, ``records`` its running_records."""

    def __init__(self, plane: Plane, id: str, body: Mapping[str, Any]) -> None:
        self.plane, self.id, self.body = plane, id, body
        self.folder = plane.folder / "jobs" / id
        self.created = time.time()
        self.history = ["Creating"]
        self.records: list[dict[str, Any]] = []
        self.statuses: list[dict[str, Any]] = []
        self.containers: Sequence[NodeHandle] = ()
        self.schedule_count = self.process_count = 1
        self.tasks = [f"worker-{n}" for n in range(int(body["spec"]["resource"].get("node_count", 1)))]
        self.crash = self.secondary = ""
        self.started = self._ended = 0.0
        self._retries = int(body["metadata"].get("annotations", {}).get(RETRY_NUM, 0))
        self._stop, self._fault = threading.Event(), threading.Event()
        self._why = ("", "", "")
        self._first = 0
        self._engine = Machines(folder=self.folder / "engine", run=self.folder.as_uri(), environ={})
        self._thread = threading.Thread(target=self._run, name=id, daemon=True)
        self._thread.start()

    # ---------------------------------------------------------------------------------------------- faults and requests

    @property
    def phase(self) -> str:
        return self.history[-1]

    @property
    def over(self) -> bool:
        return self.phase in FINAL

    def stop(self) -> None:
        """Terminate the job, as POST actions does."""
        if not self.over:
            self._move("Terminating")
        self._stop.set()

    def fault(self, number: int, why: str = "drained", recover: str = "job_reschedule") -> None:
        """Take a machine back with a notice; ``proc_restart`` restarts its processes in place."""
        self._first, self._why = number, (why, f"worker-{number}", recover)
        self._fault.set()

    def lose(self, number: int) -> None:
        """Lose a machine without a notice, after the last restart."""
        self._retries = 0
        self.containers[number].kill()
        self.fault(number, "lost")

    def wait(self, seconds: float = 120) -> str:
        """Wait for the end, and return the phase."""
        self._thread.join(seconds)
        if self._thread.is_alive():
            raise AssertionError(f"{self.id} is still {self.phase} after {seconds} s")
        return self.phase

    def printed(self, task: str) -> bytes | None:
        """Return all output of a task over its starts; None before its first."""
        files = sorted((self.folder / "engine" / "out").glob(f"*/node-{task.removeprefix('worker-')}.log"))
        return b"".join(path.read_bytes() for path in files) if files else None

    def describe(self) -> dict[str, Any]:
        """Return the job as the API answers it, with the members that the SDK's models know."""
        body, phase = self.body, "Abnormal" if self.id in self.plane.abnormal else self.phase
        end = self._ended or time.time()
        duration = int((end - self.started) * 1000) if self.started else 0
        own = {"phase": phase, "secondary_phase": self.secondary or phase, "duration": duration, "tasks": self.tasks}
        own |= {"start_time": int(self.started * 1000), "task_statuses": self.statuses}
        own |= {"running_records": [dict(record) for record in self.records]}
        algorithm = {key: value for key, value in body["algorithm"].items() if key != "environments"}
        algorithm["environments"] = [dict(body["algorithm"].get("environments") or {})]
        volumes = [volume for volume in body["spec"]["volumes"] if "nfs" in volume]
        spec = {"resource": body["spec"]["resource"], "log_export_path": body["spec"]["log_export_path"]}
        found = {
            "kind": "job",
            "metadata": {**body["metadata"], "id": self.id, "create_time": int(self.created * 1000)},
            "status": own,
            "algorithm": algorithm,
            "spec": {**spec, "volumes": volumes},
        }
        if names := (body.get("endpoints") or {}).get("ssh", {}).get("key_pair_names"):
            urls = [{"task": task, "url": f"ssh://ma-user@127.0.0.1:{22 + n}"} for n, task in enumerate(self.tasks)]
            found["endpoints"] = {"ssh": {"key_pair_names": names, "task_urls": urls}}
        return found

    # ------------------------------------------------------------------------------------------------------- its life

    def _move(self, phase: str) -> None:
        if self.phase != phase and not self.over:
            if phase in FINAL:
                self._ended = time.time()
            self.history.append(phase)

    def _run(self) -> None:
        try:
            end = self._life()
        except Exception:  # noqa: BLE001  without this, a job whose thread died would never end
            self.crash, end = traceback.format_exc(), "Failed"
        self._engine.clean()
        self._move(end)

    def _life(self) -> str:
        """Run all its starts. Return its last phase."""
        while True:
            self._move("Terminating" if self._stop.is_set() else "Pending")
            while self.plane.no_machines and not self._stop.is_set():
                time.sleep(POLL_SECONDS)
            if self._stop.is_set():
                return "Terminated"
            try:
                end = self._one_start()
            except NodeError as exc:
                if exc.category != "image":
                    raise
                self.secondary = "CreateFailed"
                text = f"Failed to pull image {self.body['algorithm']['engine']['image_url']}: {exc}"
                self.statuses = [{"task": "worker-0", "exit_code": 0, "message": text}]
                return "Failed"
            if end:
                return end

    def _one_start(self) -> str:
        """Run all tasks from their start to their end. Return the last phase, or "" for another start."""
        self._fault.clear()
        launch = reading(self.id, self.body, self.schedule_count, self.process_count)
        local = {f"obs:/{_path(volume)}": self.plane.obs.folder / _path(volume)[1:] for volume in _volumes(self.body)}
        local |= {url: _writable(path) for url, path in local.items()}
        copies = {mount.url: mount for mount in launch.nodes[0].mounts if mount.kind == "copy"}
        for url in copies:  # downloaded before the start
            target = self.folder / "copies" / url.removeprefix("obs://")
            shutil.copytree(self.plane.obs.folder / url.removeprefix("obs://"), target, dirs_exist_ok=True)
            local[url] = target
        image = self.plane.images.get(str(launch.nodes[0].image), "missing.invalid/none:1")
        nodes = [
            dataclasses.replace(
                node, image=image, mounts=[Mount(url=m.url, path=m.path, kind="sync") for m in node.mounts]
            )
            for node in launch.nodes
        ]
        launch = dataclasses.replace(launch, nodes=nodes)
        number = len(self.records)
        self._engine.prepare(launch, lambda text: None, self._stop.is_set)
        self.containers = self._engine.start(launch, attempt=f"0.{number}", local=local, secrets={})
        self.started = self.started or time.time()
        kind = "init_or_rescheduled" if self.process_count == 1 else "restarted"
        self.records.append({"start_at": int(time.time()), "start_type": kind})
        self._move("Running")
        out = self.folder / "engine" / "out" / f"0.{number}"
        started = Started(
            self.containers,
            [Printed(out / f"node-{n}.log", lambda data: None) for n in range(len(self.tasks))],
            grace=lambda: min(self.plane.grace, GRACE),
            first=lambda why: self._first if why == "drained" else None,
        )
        with started.in_step(lambda: None, self._crashed):
            end = started.watch(lambda seconds: self._why_to_stop())
        return self._conclude(end)

    def _crashed(self, text: str) -> None:
        self.crash = text

    def _why_to_stop(self) -> str:
        return "cancelled" if self._stop.is_set() else self._why[0] if self._fault.is_set() else ""

    def _conclude(self, end: str) -> str:
        record = self.records[-1]
        record["end_at"] = int(time.time())
        codes = [code if (code := node.poll() or 0) >= 0 else 128 - code for node in self.containers]
        if end == "cancelled":
            return "Terminated"
        if self._fault.is_set():
            again = self._retries > 0
            self._retries -= 1
            scenario = "chip_fault" if self._why[2] == "proc_restart" else "node_fault"
            record |= {"end_reason": f"{scenario} on {self._why[1]}", "end_related_task": self._why[1]}
            result = "success" if again else "quotaExceeded"
            record["recover_records"] = [
                {"recover": self._why[2], "fault_scenario": scenario, "recover_result": result, "reason": self._why[0]}
            ]
            if again:
                record["end_recover"] = self._why[2]
                moved = self._why[2] != "proc_restart"
                self.schedule_count += moved
                self.process_count = 1 if moved else self.process_count + 1
                return ""
        if not any(codes):
            return "Completed"
        oom = [bool(node.trouble and node.trouble[0] == "oom") for node in self.containers]
        self.statuses = [
            {"task": task, "exit_code": code, "message": "OOMKilled" if oom[n] else f"exit code {code}"}
            for n, (task, code) in enumerate(zip(self.tasks, codes, strict=True))
        ]
        return "Failed"


# ------------------------------------------------------------------------------------------------------------- reading


def _volumes(body: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [volume["obs"] for volume in body["spec"].get("volumes") or () if "obs" in volume]


def _path(volume: Mapping[str, Any]) -> str:
    return f"/{volume['obs_path'].strip('/')}"


def _writable(path: Path) -> Path:
    """Make a mounted folder writable, which may not hold an object yet."""
    path.mkdir(parents=True, exist_ok=True)
    for one in (path, *path.rglob("*")):
        if one.is_dir() and one.stat().st_uid == os.getuid():
            one.chmod(0o777)
    return path


def reading(id: str, body: Mapping[str, Any], schedules: int = 1, processes: int = 1) -> LaunchSpec:
    """Return what the platform starts for a body, read from Huawei's pages and independent of cloudtrain's provider.

    The platform splits the command and starts it without a shell. For inputs it appends words to it.
    """
    resource, algorithm = body["spec"]["resource"], body["algorithm"]
    count = int(resource.get("node_count", 1))
    words = shlex.split(algorithm["command"])
    inputs = algorithm.get("inputs") or ()
    words += [f"--{item['name']}={item['local_dir']}" for item in inputs]
    mounts = [Mount(url=f"obs:/{_path(v)}", path=v["local_path"], kind="sync") for v in _volumes(body)]
    for item in inputs:
        url = f"obs:/{item['remote']['obs']['obs_url'].rstrip('/')}"
        mounts.append(Mount(url=url, path=item["local_dir"], kind="copy"))
    job, domain = f"{PREFIX}{id[:8]}", PREFIX.rstrip("-")
    hosts = [f"{job}-worker-{number}.{domain}" for number in range(count)]
    env = {
        **(algorithm.get("environments") or {}),
        "HOME": "/home/ma-user",
        "MA_HOME": "/home/ma-user",
        "MA_JOB_DIR": "/home/ma-user/modelarts/user-job-dir",
        "MA_TASK_NAME": "worker",
        "MA_NUM_HOSTS": str(count),
        "MA_NUM_GPUS": "0",
        "MA_SCHEDULE_CNT": str(schedules),
        "MA_PROC_START_CNT": str(processes),
        "MA_VJ_NAME": job,
        "VC_WORKER_NUM": str(count),
        "VC_WORKER_HOSTS": ",".join(hosts),
    }
    private = {"HostConfig": {"Tmpfs": dict.fromkeys(("/home/ma-user", "/cache"), "mode=1777")}}
    nodes = [
        NodeSpec(
            image=algorithm["engine"]["image_url"],
            entrypoint=words[:1],
            command=words[1:],
            env={**env, "VC_TASK_INDEX": str(number)},
            mounts=mounts,
            hostname=hosts[number],
            user=USER,
            container=private,
        )
        for number in range(count)
    ]
    return LaunchSpec(nodes=nodes, rules=LaunchRules(time_limit=10**9, stop_grace=GRACE))


def differences(body: Mapping[str, Any], theirs: LaunchSpec) -> list[str]:
    """Return how ``theirs`` differs from our `reading` of a body."""
    ours = reading("0", body)
    found = [] if len(ours.nodes) == len(theirs.nodes) else ["number of nodes"]
    for number, (one, other) in enumerate(zip(ours.nodes, theirs.nodes, strict=False)):
        words = [*(one.entrypoint or ()), *one.command], [*(other.entrypoint or ()), *other.command]
        if words[0][: len(words[1])] != words[1]:
            found.append(f"node {number}: command")
        if one.image != other.image:
            found.append(f"node {number}: image")
        platform = [name for name in other.env if name.startswith(("MA_", "VC_")) and name not in one.env]
        found += [f"node {number}: {name} is no variable of the platform" for name in platform]
        where = other.env["VC_WORKER_HOSTS"].split(",")
        if where != [str(peer.hostname) for peer in theirs.nodes] or other.env["VC_TASK_INDEX"] != str(number):
            found.append(f"node {number}: hosts and number")
        copies = {mount.url: mount.path for mount in one.mounts if mount.kind == "copy"}
        for mount in other.mounts:
            views = [
                volume.path + mount.url.removeprefix(volume.url)
                for volume in one.mounts
                if f"{mount.url}/".startswith(f"{volume.url}/") and mount.kind != "copy"
            ]
            if mount.path not in [*views, copies.get(mount.url)] and not mount.url.startswith("nfs:"):
                found.append(f"node {number}: {mount.url} is not at {mount.path}")
    if theirs.rules.stop_grace != ours.rules.stop_grace or theirs.rules.restart_on:
        found.append("rules")
    return found
