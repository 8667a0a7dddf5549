"""One custom job: the service's states, with its replicas as containers of this machine.

Messages of failures come from users' reports (a failed replica: vertex-ai-samples #1504, #1898; quota:
stable-diffusion-on-gcp #12; stockout: openreview-expertise #401; the service's own: t5x-on-vertex-ai #2). Unverified
are the message for a missing image, and the state after a time limit or a wait that was too long (a time limit:
"cancelled", tfx #6223).
"""

from __future__ import annotations

import dataclasses
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloudtrain.engine import NodeError, NodeHandle
from cloudtrain.provider_api.launch_spec import LaunchSpec, Mount, NodeSpec

from ..base import POLL_SECONDS, Machines, Printed, RestartedInPlace, Started
from .replicas import RETRIES, TRANSIENT, reading, tasks
from .strict import FLEX_START, SPOT

if TYPE_CHECKING:
    from .plane import Plane

__all__ = ["FINAL", "CustomJob"]

FINAL = ("JOB_STATE_SUCCEEDED", "JOB_STATE_FAILED", "JOB_STATE_CANCELLED", "JOB_STATE_EXPIRED")
PREEMPTIONS = 6
"""Restarts of a SPOT job ("Use Spot VMs with training")."""
INVALID_ARGUMENT, RESOURCE_EXHAUSTED, INTERNAL, CANCELLED = 3, 8, 13, 1
"""Codes of google/rpc/code.proto."""
STOCKOUT = (
    "Resources are insufficient in region: {region}. Please try a different region or use a different accelerator."
)
LOST = "Internal error occurred for the current attempt."
EXIT = (
    "The replica {task} exited with a non-zero status of {code}. Termination reason: {reason}. \n{tail}\nTo find out "
    "more about why your job exited please check the logs: https://console.cloud.google.com/logs/viewer?project={project}"
)
MEMORY = "The replica {task} ran out of memory and exited with a non-zero status of {code}."
KILLED = (137, 143)
"""Exit codes of a replica that the service killed because another replica was lost."""
ADMITTED_SECONDS = 0.1
"""Seconds from a job's creation to its startTime. Every recorded job had 0.13 to 0.16 s, and no machine by then
(cloud-custodian, tools/c7n_gcp/tests/data/flights/vertexai_custom_job_*)."""
TAIL = 1000
"""Last bytes of a replica's output in its failure message."""


class _Over(Exception):
    """The end of a job: state, code of the error and message."""

    def __init__(self, state: str, code: int = 0, message: str = "") -> None:
        self.state, self.code, self.message = f"JOB_STATE_{state}", code, message
        super().__init__(state)


class CustomJob:
    """A job of a `Plane` since its acceptance: ``record`` is its CustomJob message, ``history`` all its states."""

    def __init__(self, plane: Plane, name: str, record: Any) -> None:
        self.plane, self.name, self.record = plane, name, record
        self.id = name.rpartition("/")[2]
        self.folder = plane.folder / "jobs" / self.id
        self.created = time.time()
        self.history: list[str] = []
        self.containers: Sequence[NodeHandle] = ()
        self._failed_at = 0.0
        self.starts = 0
        self.crash = ""
        self.replicas = [f"workerpool{pool}-{index}" for pool, index in tasks(record)]
        self._error_at = 0.0
        self._spent = 0.0
        self._stop, self._taken = threading.Event(), threading.Event()
        self._first_taken = 0
        self._lost: set[int] = set()
        self._for_good = False
        self._failed: int | None = None
        self._served = ""
        self._early_end: _Over | None = None
        self._counts = {"taken": 0, "lost": 0, "transient": 0}
        self._lock = threading.RLock()
        self._engine = Machines(folder=self.folder / "engine", run=self.folder.as_uri(), environ={})
        self._thread = threading.Thread(target=self._run, name=self.id, daemon=True)
        record.name = name
        record.create_time.GetCurrentTime()
        self._move("JOB_STATE_PENDING")
        self._thread.start()

    # ---------------------------------------------------------------------------------------------- faults and requests

    @property
    def state(self) -> str:
        return self.history[-1]

    @property
    def over(self) -> bool:
        return self.state in FINAL

    @property
    def spec(self) -> Any:
        """Return its CustomJobSpec message."""
        return self.record.job_spec

    def stop(self) -> None:
        """Cancel the job, as POST cancel does."""
        with self._lock:
            if not self.over:
                self._move("JOB_STATE_CANCELLING")
        self._stop.set()

    def preempt(self, number: int = 0) -> None:
        """Take the SPOT machines back, ``number`` first."""
        self._first_taken = number
        self._taken.set()

    def lose(self, number: int, *, for_good: bool = False) -> None:
        """Lose a machine without any notice. With ``for_good`` the service does not start the job again."""
        with self._lock:
            self._for_good = for_good
            self._lost.add(number)
            self.containers[number].kill()

    def end(self, state: str, code: int = 0, message: str = "") -> None:
        """End a job that still waits for machines; ``state`` is without JOB_STATE_."""
        self._early_end = _Over(state, code, message)
        self.wait()

    def wait(self, seconds: float = 120) -> str:
        """Wait for the end, and return the state."""
        self._thread.join(seconds)
        if self._thread.is_alive():
            raise AssertionError(f"{self.name} is still {self.state} after {seconds} s")
        return self.state

    def printed(self) -> str:
        """Return the complete lines that all replicas have printed, whether or not a client has read them."""
        files = sorted((self.folder / "engine" / "out").glob("*/node-*.log"))
        return "\n".join(path.read_text("utf-8", "replace").rpartition("\n")[0] for path in files)

    def describe(self, *, numbers: bool) -> dict[str, Any]:
        """Return the answer to GET customJobs/{id}; with ``numbers``, enums are numbers."""
        from google.protobuf import json_format

        with self._lock:
            answer = json_format.MessageToDict(self.record, use_integers_for_enums=numbers)
        if time.monotonic() < self._error_at:
            answer.pop("error", None)
        if self.name in self.plane.unknown:
            from google.cloud.aiplatform_v1.types import JobState

            number = self.plane.unknown[self.name]
            known: dict[int, str] = {state.value: state.name for state in list[Any](JobState)}
            answer["state"] = number if numbers else known.get(number, number)
        return dict(answer)

    # ------------------------------------------------------------------------------------------------------- its life

    def _move(self, state: str) -> None:
        from google.cloud.aiplatform_v1 import JobState

        with self._lock:
            if self.history and self.history[-1] == state:
                return
            self.history.append(state)
            self.record.state = getattr(JobState, state)
            self.record.update_time.GetCurrentTime()
            if state == "JOB_STATE_QUEUED" and not self.record.HasField("start_time"):
                self.record.start_time.GetCurrentTime()
            if state in FINAL:
                self.record.end_time.GetCurrentTime()

    def _go(self, state: str) -> None:
        """Enter a stage, unless the job is cancelled. Raises `_Over`."""
        with self._lock:
            if self._stop.is_set():
                raise _Over("CANCELLED", CANCELLED, "CANCELED")
            self._move(state)

    def _say(self, text: str) -> None:
        """Write a line of the service itself to the job's log."""
        self.plane.entries.put(self.id, "service", [text])

    def _run(self) -> None:
        try:
            self._await_quota()
            while True:
                self._await_machines()
                self._one_start()
        except _Over as exc:
            end = exc
        except Exception:  # noqa: BLE001  without this, a job whose thread died would never end
            self.crash = traceback.format_exc()
            end = _Over("FAILED", INTERNAL, LOST)
        if self._served:
            self.plane.withdraw(self._served)
        self._engine.clean()
        self._say("Job completed successfully." if end.state == "JOB_STATE_SUCCEEDED" else "Job failed.")
        with self._lock:
            if end.code:
                self.record.error.code, self.record.error.message = end.code, end.message
                self._error_at = time.monotonic() + self.plane.error_late
            self._move(end.state)

    def _await_quota(self) -> None:
        """Queue the job, as all accepted jobs are. It stays queued while its quota is used up."""
        self._stop.wait(ADMITTED_SECONDS)
        self._go("JOB_STATE_QUEUED")
        while self.plane.over_quota(self):
            self._go("JOB_STATE_QUEUED")
            time.sleep(POLL_SECONDS)

    def _await_machines(self) -> None:
        """Wait for machines. Raises `_Over`."""
        self._go("JOB_STATE_PENDING")
        self._say("Waiting for job to be provisioned.")
        began, scheduling = time.monotonic(), self.spec.scheduling
        while self.plane.no_capacity or self.name.split("/")[3] in self.plane.crowded:
            self._go("JOB_STATE_PENDING")
            if self._early_end is not None:
                raise self._early_end
            waited = time.monotonic() - began
            if scheduling.strategy == FLEX_START:
                limit = scheduling.max_wait_duration.ToTimedelta().total_seconds()
                if 0 < limit < waited:
                    raise _Over(self.plane.waited_out)
            elif waited > self.plane.capacity_seconds:
                raise self._no_machines()
            time.sleep(POLL_SECONDS)

    def _no_machines(self) -> _Over:
        return _Over("FAILED", RESOURCE_EXHAUSTED, STOCKOUT.format(region=self.name.split("/")[3]))

    def _one_start(self) -> None:
        """Run all replicas from their start to their end. Raises `_Over`, or returns for another start."""
        number, self.starts = self.starts, self.starts + 1
        self._taken.clear()
        self._lost.clear()
        self._failed, self._failed_at = None, 0.0
        launch = self._start(f"0.{number}")
        self._go("JOB_STATE_RUNNING")
        self._say("Job is running.")
        out = self.folder / "engine" / "out" / f"0.{number}"
        lines = [_Lines(self, task) for task in self.replicas]
        started = Started(
            self.containers,
            [Printed(out / f"node-{n}.log", line.take) for n, line in enumerate(lines)],
            grace=lambda: min(self.plane.grace, launch.rules.stop_grace),
            first=lambda why: self._first_taken if why == "preempted" else None,
        )
        limit = launch.rules.time_limit
        with started.in_step(lambda: None, self._crashed):
            end = started.watch(lambda seconds: self._why_to_stop(seconds, limit))
        self._spent += started.seconds
        for line in lines:
            line.end()
        self._conclude(end, out)

    def _crashed(self, text: str) -> None:
        self.crash = text

    def _why_to_stop(self, seconds: float, limit: float) -> str:
        codes = [node.poll() for node in self.containers]
        if codes[0] == 0:  # the primary replica has succeeded, and so has the job: stop all others
            for node in self.containers[1:]:
                node.kill()
            return ""
        if self._stop.is_set():
            return "cancelled"
        if self._spent + seconds > limit:
            return "timeout"
        if self._taken.is_set():
            return "preempted"
        failed = [number for number, code in enumerate(self._codes(codes)) if code]
        if not failed:
            return ""
        self._failed = failed[0] if self._failed is None else self._failed
        self._failed_at = self._failed_at or time.monotonic()
        if any(codes) or time.monotonic() - self._failed_at > self.plane.restart_seconds:
            for node in self.containers:
                if isinstance(node, RestartedInPlace):
                    node.settle()
            return "failed"
        return ""

    def _codes(self, codes: Sequence[int | None]) -> list[int | None]:
        """Replace the code of a container that was restarted in place by that of its first end."""
        first = [getattr(node, "first_code", None) for node in self.containers]
        return [code if again is None else again for code, again in zip(codes, first, strict=True)]

    def _conclude(self, end: str, out: Path) -> None:
        """Draw the conclusion from the containers' end. Raises `_Over`, or returns for another start."""
        ended = self._codes([node.poll() or 0 for node in self.containers])
        codes = [128 - code if code < 0 else code for code in (code or 0 for code in ended)]
        if end == "cancelled":
            raise _Over("CANCELLED", CANCELLED, "CANCELED")
        if end == "timeout":
            raise _Over(self.plane.timed_out, CANCELLED, "CANCELED")
        if end == "preempted":
            if self.spec.scheduling.strategy == SPOT and self._again("taken", PREEMPTIONS):
                return
            raise self._no_machines()
        wrong = (n for n, code in enumerate(codes) if n not in self._lost and code not in (0, *TRANSIENT, *KILLED))
        if self._lost and (first := next(wrong, None)) is not None:
            self._failed = first  # a replica that failed because of a lost machine
        elif self._lost:
            restarts = self.spec.scheduling.restart_job_on_worker_restart and not self._for_good
            if restarts and self._again("lost", RETRIES):
                return
            raise _Over("FAILED", INTERNAL, LOST)
        if codes[0] == 0 and end != "failed":
            raise _Over("SUCCEEDED")
        number = self._failed if self._failed is not None else next(n for n, code in enumerate(codes) if code)
        code = codes[number]
        named = {"task": self.replicas[number], "code": code, "project": self.plane.number}
        if (trouble := self.containers[number].trouble) and trouble[0] == "oom":
            raise _Over("FAILED", INVALID_ARGUMENT, MEMORY.format(**named))
        retries = not self.spec.scheduling.disable_retries
        if code in TRANSIENT and retries and self._again("transient", RETRIES):
            return
        tail = (out / f"node-{number}.log").read_bytes()[-TAIL:].decode("utf-8", "replace")
        raise _Over("FAILED", INVALID_ARGUMENT, EXIT.format(**named, reason="Error", tail=tail))

    def _again(self, why: str, most: int) -> bool:
        """Return True if the job may start again for that reason."""
        self._counts[why] += 1
        if self._counts[why] <= most:
            self._say("Job will be retried.")
        return self._counts[why] <= most

    # ---------------------------------------------------------------------------------------------------- its replicas

    def _start(self, attempt: str) -> LaunchSpec:
        """Start the containers and return their LaunchSpec. Raises `_Over`."""
        launch, named = reading(self.name, self.record), {"task": self.replicas[0], "project": self.plane.number}
        reason = "ErrImagePull"
        try:
            self._engine.prepare(launch, lambda text: None, self._stop.is_set)
            launch, local = self._wired(launch)
            reason = "StartError"
            started = self._engine.start(launch, attempt=attempt, local=local, secrets={})
            self.containers = [RestartedInPlace(node, TRANSIENT) for node in started]
        except NodeError as exc:
            if self._stop.is_set():
                raise _Over("CANCELLED", CANCELLED, "CANCELED") from None
            if exc.category != "image":
                raise
            what = "Failed to pull image" if reason == "ErrImagePull" else "failed to create containerd task"
            text = EXIT.format(**named, code=128, reason=reason, tail=f" Termination log message: {what}: {exc}")
            raise _Over("FAILED", INVALID_ARGUMENT, text) from None
        return launch

    def _wired(self, launch: LaunchSpec) -> tuple[LaunchSpec, dict[str, Path]]:
        """Add the platform's own parts to each container: buckets and an identity. Return also the buckets' folders."""
        if not self._served:
            self._served = self.plane.serve(self._engine.gateway(), self.spec.service_account)
        env = self.plane.node_environ(self._served)
        local = {f"gs://{name}": self.plane.gcs.folder / name for name in self.plane.mounted()}
        binds = [Mount(url=url, path=url.replace("gs://", "/gcs/"), kind="sync") for url in local]

        def wired(spec: NodeSpec) -> NodeSpec:
            return dataclasses.replace(spec, env={**spec.env, **env}, mounts=binds)

        return dataclasses.replace(launch, nodes=[wired(spec) for spec in launch.nodes]), local


class _Lines:
    """Output of one container, split into lines for the job's log."""

    def __init__(self, job: CustomJob, task: str) -> None:
        self._job, self._task, self._rest = job, task, b""

    def take(self, data: bytes) -> None:
        """Write complete lines. Keep the beginning of an incomplete one."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        texts = [text for line in lines if (text := line.decode("utf-8", "replace"))]
        self._job.plane.entries.put(self._job.id, self._task, texts)

    def end(self) -> None:
        """Write the last line, even without a newline."""
        if self._rest:
            self.take(b"\n")
