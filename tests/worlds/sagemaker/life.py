"""One training job: the service's states, with its instances as containers of this machine."""

from __future__ import annotations

import dataclasses
import math
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloudtrain.engine import NodeError, NodeHandle
from cloudtrain.provider_api.launch_spec import LaunchSpec, Mount, NodeSpec

from ..base import POLL_SECONDS, Machines, Printed, Started
from .instances import Instance, chosen, hosts, upload
from .strict import DEFAULT_RUNTIME
from .wire import ACCOUNT

if TYPE_CHECKING:
    from .plane import Plane

__all__ = ["FINAL", "TrainingJob"]

FINAL = ("Completed", "Failed", "Stopped")
SPOT_SHARE = 0.3
"""Billed share of a spot instance's time."""
LOG_GROUP = "/aws/sagemaker/TrainingJobs"
MEMORY = (
    "ClientError: Please use an instance type with more memory, or reduce the size of training data processed on an "
    "instance."
)
CAPACITY = (
    "CapacityError: Unable to provision requested ML compute capacity. Please retry using a different ML instance type."
)
INTERNAL = "InternalServerError: We encountered an internal error. Please try again."
MESSAGES = {
    "Starting": "Starting the training job",
    "Pending": "Training job waiting for capacity",
    "Downloading": "Downloading input data",
    "Training": "Training image download completed. Training in progress.",
    "Uploading": "Uploading generated training model",
    "Stopping": "Stopping the training job",
    "Interrupted": "Training job interrupted: the managed spot instances were reclaimed",
    "Restarting": "Restarting the training job after an internal error",
    "Stopped": "Training job stopped",
    "MaxRuntimeExceeded": "Training job runtime exceeded MaxRuntimeInSeconds provided",
    "MaxWaitTimeExceeded": "Training job exceeded MaxWaitTimeInSeconds provided",
    "Completed": "Training job completed",
}


class TrainingJob:
    """A job of a `Plane` since its acceptance. ``record`` is the answer of DescribeTrainingJob."""

    def __init__(self, plane: Plane, body: Mapping[str, Any], *, region: str) -> None:
        self.plane, self.body, self.region = plane, body, region
        self.name = str(body["TrainingJobName"])
        self.arn = f"arn:aws:sagemaker:{region}:{ACCOUNT}:training-job/{self.name}"
        self.folder = plane.folder / "jobs" / self.name
        self.tags: list[dict[str, str]] = list(body.get("Tags", []))
        now = time.time()
        self.record: dict[str, Any] = {
            **{key: value for key, value in body.items() if key != "Tags"},
            "TrainingJobArn": self.arn,
            "TrainingJobStatus": "InProgress",
            "SecondaryStatus": "Starting",
            "SecondaryStatusTransitions": [],
            "CreationTime": now,
            "LastModifiedTime": now,
        }
        self.containers: Sequence[NodeHandle] = ()
        self.starts = 0
        self.restored: list[list[dict[str, int]]] = []
        """Restored checkpoint files and their bytes, by start and instance."""
        self.crash = ""
        self._spent = 0.0
        self._stop, self._reclaimed = threading.Event(), threading.Event()
        self._first_reclaimed = 0
        self._lost: set[int] = set()
        self._for_good = False
        self._lock = threading.RLock()
        self._instances: list[Instance] = []
        self._choice = 0
        isolated = body.get("EnableNetworkIsolation", False)
        run = self.folder.as_uri()
        self._engine = Machines(folder=self.folder / "engine", run=run, environ={}, isolated=isolated)
        self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
        self._move("Starting")
        self._thread.start()

    # ---------------------------------------------------------------------------------------------- faults and requests

    @property
    def over(self) -> bool:
        return self.record["TrainingJobStatus"] in FINAL

    def stop(self) -> None:
        """Stop the job, as StopTrainingJob does."""
        with self._lock:
            self.record["TrainingJobStatus"] = "Stopping"
            self._move("Stopping")
        self._stop.set()

    def interrupt(self, number: int = 0) -> None:
        """Take the Spot instances back, ``number`` first."""
        self._first_reclaimed = number
        self._reclaimed.set()

    def lose(self, number: int, *, for_good: bool = False) -> None:
        """Lose an instance without any notice, with everything that it has not uploaded.

        With ``for_good`` the service does not try again, even if the job asked for it.
        """
        self._for_good = for_good
        with self._lock:
            self._lost.add(number)
            self.containers[number].kill()

    def wait(self, seconds: float = 120) -> Mapping[str, Any]:
        """Wait for the end, and return the answer of DescribeTrainingJob."""
        self._thread.join(seconds)
        if not self.over:
            raise AssertionError(f"{self.name} is still {self.record['SecondaryStatus']} after {seconds} s")
        return self.describe()

    def describe(self) -> dict[str, Any]:
        """Return the answer of DescribeTrainingJob."""
        with self._lock:
            return {**self.record, "SecondaryStatusTransitions": list(self.record["SecondaryStatusTransitions"])}

    def disk(self, number: int) -> Path:
        """Return the root of an instance's disk in the last start."""
        return self._instances[number].folder

    # ------------------------------------------------------------------------------------------------------- its life

    def _move(self, secondary: str, message: str = "") -> None:
        with self._lock:
            now, moves = time.time(), self.record["SecondaryStatusTransitions"]
            if moves and "EndTime" not in moves[-1]:
                moves[-1] = {**moves[-1], "EndTime": now}
            text = message or MESSAGES.get(secondary, secondary)
            moves.append({"Status": secondary, "StartTime": now, "StatusMessage": text})
            self.record.update(SecondaryStatus=secondary, LastModifiedTime=now)

    def _go(self, secondary: str, message: str = "") -> None:
        """Enter a stage, unless the job is stopped."""
        with self._lock:
            if self.record["TrainingJobStatus"] == "InProgress":
                self._move(secondary, message)

    def _run(self) -> None:
        try:
            secondary, reason = self._all_starts()
        except LookupError as exc:
            secondary, reason = "Failed", f"ClientError: Data download failed:{exc.args[0]}"
        except Exception:  # noqa: BLE001  without this, a job whose thread died would never end
            self.crash = traceback.format_exc()
            secondary, reason = "Failed", INTERNAL
        self._engine.clean()
        with self._lock:
            now = time.time()
            if reason:
                self.record["FailureReason"] = reason[:1024]
            self._move(secondary, reason[:1024])
            self.record["SecondaryStatusTransitions"][-1]["EndTime"] = now
            self.record["TrainingEndTime"] = now
            self._bill()
            self.record["TrainingJobStatus"] = secondary if secondary in ("Completed", "Failed") else "Stopped"

    def _bill(self) -> None:
        seconds = math.ceil(self._spent)
        spot = self.body.get("EnableManagedSpotTraining", False)
        if seconds:
            self.record["TrainingTimeInSeconds"] = seconds
            self.record["BillableTimeInSeconds"] = math.ceil(seconds * SPOT_SHARE) if spot else seconds

    def _all_starts(self) -> tuple[str, str]:
        """Return (secondary status, failure reason) of the whole job."""
        retries = self.body.get("RetryStrategy", {}).get("MaximumRetryAttempts", 0)
        while True:
            end = self._await_capacity() or self._one_start()
            if end == "interrupted":
                self._go("Interrupted")
            elif end == "lost":
                if retries == 0 or self._for_good:
                    return "Failed", INTERNAL
                retries -= 1
                self._go("Restarting")
            else:
                return end if isinstance(end, tuple) else (end, "")
            self._go("Starting")

    def _await_capacity(self) -> str | tuple[str, str]:
        """Wait until an instance type has capacity. Return (secondary status, failure reason) if none gets it."""
        began = time.monotonic()
        wanted = range(len(self.body["ResourceConfig"].get("InstancePreferences", [0])))
        while True:
            if self._stop.is_set():
                return "Stopped"
            for choice in wanted:
                kind, count = chosen(self.body, choice)
                if kind not in self.plane.no_capacity and self.region not in self.plane.crowded:
                    self._choice = choice
                    if "InstancePreferences" in self.body["ResourceConfig"]:
                        selected = {"SelectedInstanceType": kind, "SelectedInstanceCount": count}
                        self.record["ResourceConfig"] = {**self.body["ResourceConfig"], **selected}
                    self._go("Starting", "Launching requested ML instances")
                    return ""
            if self.record["SecondaryStatus"] != "Pending":
                self._go("Starting", "Insufficient capacity error from EC2 while launching instances, retrying!")
                self._go("Pending")
            if self._waited_too_long():
                return "MaxWaitTimeExceeded"
            if self._pended_too_long():
                return "Stopped"
            spot = self.body.get("EnableManagedSpotTraining", False)
            if not spot and time.monotonic() - began > self.plane.capacity_seconds:
                return "Failed", CAPACITY
            time.sleep(POLL_SECONDS)

    def _waited_too_long(self) -> bool:
        limit = self.body["StoppingCondition"].get("MaxWaitTimeInSeconds")
        return limit is not None and time.time() - self.record["CreationTime"] > limit

    def _pended_too_long(self) -> bool:
        """Return True if a job waited too long for its start. AWS's pages say that it stops, and name no state."""
        limit = self.body["StoppingCondition"].get("MaxPendingTimeInSeconds")
        return limit is not None and not self.starts and time.time() - self.record["CreationTime"] > limit

    def _one_start(self) -> str | tuple[str, str]:
        """Run all instances from their start to their end, and return the outcome."""
        number, self.starts = self.starts, self.starts + 1
        self._reclaimed.clear()
        self._lost.clear()
        self._go("Downloading")
        root = self.folder / str(number)
        self._instances = [
            Instance(
                root / host,
                self.body,
                host,
                self.plane.bucket,
                choice=self._choice,
                lag=lambda: self.plane.sync_lag,
                stale=lambda: self.plane.stale_copies,
                dead=lambda: self.plane.dead_sync,
            )
            for host in sorted(hosts(chosen(self.body, self._choice)[1]), key=lambda h: int(h.rpartition("-")[2]))
        ]
        for instance in self._instances:
            instance.fill()
        self.restored.append([instance.sync.restored if instance.sync else {} for instance in self._instances])
        if self._stop.is_set():
            return "Stopped"
        launch, local = self._launch_spec()
        self._go("Training", "Downloading the training image")
        attempt = f"0.{number}"
        try:
            self._engine.prepare(launch, lambda text: None, self._stop.is_set)
            launch = self._wired(launch)
            self.containers = self._engine.start(launch, attempt=attempt, local=local, secrets={})
        except NodeError as exc:
            if self._stop.is_set():
                return "Stopped"
            return "Failed", f"ClientError: {exc}" if exc.category == "image" else INTERNAL
        self._go("Training")
        self.record.setdefault("TrainingStartTime", time.time())
        out = self.folder / "engine" / "out" / attempt
        lines = [_Lines(self, item.host) for item in self._instances]
        printed = [Printed(out / f"node-{n}.log", line.take) for n, line in enumerate(lines)]
        started = Started(
            self.containers,
            printed,
            grace=lambda: self.plane.grace,
            on_stop=self._stopping,
            first=lambda why: self._first_reclaimed if why == "interrupted" else None,
        )
        with started.in_step(self._sync, self._crashed):
            end = started.watch(self._why_to_stop)
        self._spent += started.seconds
        for line in lines:
            line.end()
        return self._ended(end)

    def _crashed(self, text: str) -> None:
        self.crash = text

    def _stopping(self, why: str) -> None:
        """Record the service's reason before it stops a job itself."""
        if why in ("MaxRuntimeExceeded", "MaxWaitTimeExceeded"):
            with self._lock:
                self.record["TrainingJobStatus"] = "Stopping"
                self._move("Stopping")

    def _launch_spec(self) -> tuple[LaunchSpec, dict[str, Path]]:
        """Return the LaunchSpec that `Plane.nodes` reads from the request, with a disk for each instance, and each
        disk's folder."""
        theirs = self.plane.nodes(self.body)
        local: dict[str, Path] = {}
        nodes = []
        for instance, spec in zip(self._instances, theirs.nodes, strict=True):
            binds = []
            for here, there, read_only in instance.binds():
                local[here.as_uri()] = here
                binds.append(Mount(url=here.as_uri(), path=there, kind="mount" if read_only else "sync"))
            image = self.plane.image(str(spec.image))
            files = {path: text for path, text in spec.files.items() if not path.startswith("/opt/ml/")}
            # This machine is not one of SageMaker's, so it has neither the cores nor the memory that the job asked for.
            spec = dataclasses.replace(spec, cpus=None, memory=None, gpus=0)
            nodes.append(dataclasses.replace(spec, image=image, mounts=binds, files=files))
        return dataclasses.replace(theirs, nodes=nodes), local

    def _wired(self, launch: LaunchSpec) -> LaunchSpec:
        """Add the platform's own variables to each container."""
        env = {"TRAINING_JOB_NAME": self.name, "TRAINING_JOB_ARN": self.arn, "AWS_REGION": self.region}
        if not self.body.get("EnableNetworkIsolation", False):
            address = self.plane.wire.listen(self._engine.gateway())
            path = self.plane.roles.offer(self.name, self.body["RoleArn"])
            env["AWS_CONTAINER_CREDENTIALS_FULL_URI"] = address + path
            env["AWS_ENDPOINT_URL_SECRETS_MANAGER"] = address
            env["AWS_ENDPOINT_URL_S3"] = self.plane.wire.lead(self._engine.gateway(), self.plane.moto)

        def wired(spec: NodeSpec) -> NodeSpec:
            return dataclasses.replace(spec, env={**spec.env, **env})

        return dataclasses.replace(launch, nodes=[wired(spec) for spec in launch.nodes])

    def _why_to_stop(self, seconds: float) -> str:
        if self._stop.is_set():
            return "Stopped"
        if self._spent + seconds > self.body["StoppingCondition"].get("MaxRuntimeInSeconds", DEFAULT_RUNTIME):
            return "MaxRuntimeExceeded"
        if self._waited_too_long():
            return "MaxWaitTimeExceeded"
        return "interrupted" if self._reclaimed.is_set() else ""

    def _sync(self, *, whole: bool = False) -> None:
        for number, instance in enumerate(self._instances):
            if instance.sync is not None and number not in self._lost:
                instance.sync.step(whole=whole)

    def _ended(self, why: str) -> str | tuple[str, str]:
        """Return the outcome of the containers' end."""
        codes = [node.poll() or 0 for node in self.containers]
        lost = bool(self._lost)
        if why == "interrupted" or (lost and why in ("", "peers")):
            self._sync(whole=True)
            return "lost" if lost else "interrupted"
        self._go("Uploading")
        self._sync(whole=True)
        self.record["ModelArtifacts"] = {"S3ModelArtifacts": upload(self.plane.bucket, self._instances, self.body)}
        if why and why != "peers":
            return why
        if not any(codes):
            return "Completed"
        number = next(n for n, code in enumerate(codes) if code)
        if (trouble := self.containers[number].trouble) and trouble[0] == "oom":
            return "Failed", f"{MEMORY}, exit code: 137"
        failure = next((text for i in self._instances if (text := i.failure())), "")
        code = codes[number] if codes[number] > 0 else 128 - codes[number]
        return "Failed", f"AlgorithmError: {failure[:1000]}, exit code: {code}"


class _Lines:
    """Output of one container, split into lines for its log stream."""

    def __init__(self, job: TrainingJob, host: str) -> None:
        self._logs: Callable[..., None] = job.plane.logs(job.region).put
        self._stream = f"{job.name}/{host}-{int(time.time()) + job.starts - 1}"
        self._rest = b""

    def take(self, data: bytes) -> None:
        """Write complete lines. Keep the beginning of an incomplete one."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        now = int(time.time() * 1000)
        events = [(now, text) for line in lines if (text := line.decode("utf-8", "replace"))]
        if events:
            self._logs(LOG_GROUP, self._stream, events)

    def end(self) -> None:
        """Write the last line, even without a newline."""
        if self._rest:
            self.take(b"\n")
