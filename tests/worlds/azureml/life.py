"""One command job: the service's states, with its nodes as containers of this machine.

Messages of failures come from users' reports (preemption: azure-docs #66288; quota: mslearn-dp100 #35; images:
MachineLearningNotebooks #1479). Those of a lost node, a time limit and a role are unverified.
"""

from __future__ import annotations

import dataclasses
import threading
import time
import traceback
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloudtrain.engine import NodeError, NodeHandle
from cloudtrain.provider_api.launch_spec import LaunchSpec, Mount, NodeSpec

from ..base import POLL_SECONDS, Agent, Machines, Printed, Started
from .blobs import AppendLog, iso

if TYPE_CHECKING:
    from .plane import Plane

__all__ = ["FINAL", "PREEMPTED", "CommandJob"]

FINAL = ("Completed", "Failed", "Canceled")
TRUST = "/etc/ssl/loopback.pem"
VAULT = "contract-vault.vault.azure.net"
METADATA = "CLOUDTRAIN_METADATA_URL"
"""Variable that leads nodes to this fake's metadata service. The real service has a fixed address."""
PREEMPTED = (
    "AzureMLCompute job failed.\nPreemptionError: Nodes of this job got pre-empted. Check if the run has failed or "
    "restarted.\n\tReason: Received pre-emption warning signal"
)
QUOTA = (
    "Job submission to AzureML Compute encountered an Exception with status code JobNodeCountExceedsCoreQuota, The "
    "specified subscription has a {family} vCPU quota of {limit} and is less than the requested job node count of "
    "{nodes} which maps to {wanted} vCPUs. Talk to your Subscription Admin or refer to "
    "https://docs.microsoft.com/azure/machine-learning/how-to-manage-quotas#request-quota-increases to increase the "
    "{family} vCPU quota"
)
IMAGE = (
    "AzureMLCompute job failed.\nFailedPullingImage: Unable to pull docker image\n\timageName: {image}\n\terror: Run "
    "docker command to pull public image failed with error: {why}.\n\tReason: {why}\n\tInfo: Failed to prepare an "
    "environment for the job execution: Job environment preparation failed on 10.0.0.4 with err exit status 1."
)
LOST = "AzureMLCompute job failed.\nNodeLost: A node of this job stopped responding and was removed from the cluster."
TIMEOUT = "The job was canceled because it ran longer than its limit of {limit:g} seconds (timeout)."
NO_ROLE = (
    'Failed to start "data-capability": DataAccessError(PermissionDenied(Some(This request is not authorized to '
    "perform this operation using this permission. AuthorizationPermissionMismatch)))"
)
EXIT = (
    "Execution failed. User process 'sh' exited with status code {code}. Please check log file '{log}' for error "
    "details. Error: {tail}"
)
PEERS_SECONDS = 1.5
"""Seconds between two scans of a mounted folder for the peers' writes."""
CORES = 4
"""Cores of a machine of any size when a quota is checked."""


class _Over(Exception):
    """The end of a job before its containers end: status, code of the error and message."""

    def __init__(self, status: str, code: str = "", message: str = "") -> None:
        self.status, self.code, self.message = status, code, message
        super().__init__(status)


class CommandJob:
    """A job of a `Plane` since its acceptance. ``status`` is native; ``history`` lists all its statuses in order."""

    def __init__(self, plane: Plane, name: str, body: Mapping[str, Any], image: str) -> None:
        self.plane, self.name, self.body, self.image = plane, name, body, image
        self.folder = plane.folder / "jobs" / name
        self.created = time.time()
        self.started: float | None = None
        self.ended: float | None = None
        self.history: list[str] = []
        self.error: dict[str, Any] | None = None
        self.containers: Sequence[NodeHandle] = ()
        self.starts = 0
        self.crash = ""
        self.logs: list[AppendLog] = []
        #: Scheduled Events, as every machine of the set reports them.
        self.events: list[dict[str, Any]] = []
        self._early_end: _Over | None = None
        self._served: list[str] = []
        self._stop, self._taken = threading.Event(), threading.Event()
        self._first_taken = 0
        self._lost: set[int] = set()
        self._syncs: list[tuple[int, Agent]] = []
        self._lock = threading.RLock()
        self._engine = Machines(folder=self.folder / "engine", run=self.folder.as_uri(), environ={})
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._move("NotStarted")
        self._thread.start()

    # ---------------------------------------------------------------------------------------------- faults and requests

    @property
    def status(self) -> str:
        return self.history[-1]

    @property
    def over(self) -> bool:
        return self.status in FINAL

    @property
    def _pace(self) -> float:
        return self.plane.paces.get(self.name, 1.0)

    @property
    def count(self) -> int:
        """Return the number of its nodes."""
        return int((self.body["properties"].get("resources") or {}).get("instanceCount") or 1)

    def stop(self) -> None:
        """Cancel the job, as POST cancel does."""
        self._move("CancelRequested")
        self._stop.set()

    def preempt(self, number: int = 0) -> None:
        """Take the nodes of a low-priority job back, ``number`` first."""
        self._first_taken = number
        if self.plane.notice is None:
            self._taken.set()
            return
        with self._lock:
            self.events = [_event(self.machine(number), self.plane.notice)]
        threading.Timer(self.plane.notice, self._take, [list(self.events)]).start()

    def withdraw(self) -> None:
        """Withdraw the notice of `preempt`: the machine stays."""
        with self._lock:
            self.events = []

    def _take(self, events: Sequence[Any]) -> None:
        """Remove the machine without a signal, and all the job's other nodes, unless the notice was withdrawn."""
        with self._lock:
            if self.over or self.events != events:
                return
            self.events = []
            self.containers[self._first_taken].kill()
            self._taken.set()

    def machine(self, number: int) -> str:
        """Return the name of a node's virtual machine, in a set that other jobs use too."""
        return f"aml-{self.name[:8]}_{number}"

    def end(self, status: str, code: str = "", message: str = "") -> None:
        """End a job that still waits for machines."""
        self._early_end = _Over(status, code, message)
        self.wait()

    def lose(self, number: int) -> None:
        """Lose a node without any notice, with everything that it has not uploaded."""
        with self._lock:
            self._lost.add(number)
            self.containers[number].kill()

    def wait(self, seconds: float = 120) -> str:
        """Wait for the end, and return the status."""
        self._thread.join(seconds)
        if self._thread.is_alive():
            raise AssertionError(f"{self.name} is still {self.status} after {seconds} s")
        return self.status

    def log(self, number: int) -> AppendLog:
        """Return the log of a node; create it if it does not exist."""
        with self._lock:
            plane = self.plane
            while len(self.logs) <= number:
                path = f"ExperimentRun/dcid.{self.name}/{self._log_name(len(self.logs))}"
                client = plane.blobs.client(plane.log_container)
                made = AppendLog(client, path, lag=lambda: plane.log_lag, most=lambda: plane.log_bytes)
                self.logs.append(made)
            return self.logs[number]

    def printed(self) -> str:
        """Return the complete lines that all nodes have printed, whether or not a client has read them."""
        files = sorted((self.folder / "engine" / "out").glob("*/node-*.log"))
        return "\n".join(path.read_text("utf-8", "replace").rpartition("\n")[0] for path in files)

    def _log_name(self, number: int) -> str:
        """Return the name of a node's log; numbers are as wide as the last one. Unverified for more than ten nodes."""
        digits = len(str(self.count - 1))
        return f"user_logs/std_log_process_{number:0{digits}}.txt" if self.count > 1 else "user_logs/std_log.txt"

    # ---------------------------------------------------------------------------------------------------- reports of it

    def describe(self) -> dict[str, Any]:
        """Return the answer to GET jobs/{name}."""
        with self._lock:
            job = self.body["properties"]
            outputs = {
                key: {**item, "uri": item.get("uri") or self._default(key)}
                for key, item in (job.get("outputs") or {}).items()
            }
            studio = f"https://ml.azure.com/runs/{self.name}?wsid={self.plane.id}"
            services = {"Studio": {"jobServiceType": "Studio", "endpoint": studio}}
            kind = "Microsoft.MachineLearningServices/workspaces/jobs"
            properties = {**job, "status": self._shown(), "services": services, "outputs": outputs}
            made = {"createdAt": iso(self.created), "createdBy": "tester", "createdByType": "User"}
            id = f"{self.plane.id}/jobs/{self.name}"
            return {"id": id, "name": self.name, "type": kind, "properties": properties, "systemData": made}

    def details(self) -> dict[str, Any]:
        """Return the run history's record: the error, the times, and a signed URL for every log."""
        with self._lock:
            plane = self.plane
            files = {
                log.path.partition(f"{self.name}/")[2]: plane.blobs.signed(plane.front, plane.log_container, log.path)
                for log in self.logs
            }
            return {
                "runId": self.name,
                "target": (self.body["properties"].get("computeId") or "serverless").rpartition("/")[2],
                "status": self._shown(),
                "createdTimeUtc": iso(self.created),
                "startTimeUtc": iso(self.started) if self.started else None,
                "endTimeUtc": iso(self.ended) if self.ended else None,
                "error": self.error,
                "warnings": [],
                "tags": self.body["properties"].get("tags") or {},
                "properties": {},
                "logFiles": files,
            }

    def _shown(self) -> str:
        return self.plane.unknown.get(self.name, self.status)

    def _default(self, output: str) -> str:
        return f"azureml://datastores/workspaceblobstore/paths/azureml/{self.name}/{output}/"

    # ------------------------------------------------------------------------------------------------------- its life

    def _move(self, status: str) -> None:
        with self._lock:
            if status == "CancelRequested" and self.history and self.over:
                return
            if not self.history or self.history[-1] != status:
                self.history.append(status)

    def _go(self, status: str) -> None:
        """Enter a stage, unless the job is cancelled. Raises `_Over`."""
        with self._lock:
            if self._stop.is_set():
                raise _Over("Canceled")
            self._move(status)

    def _run(self) -> None:
        try:
            self._go("Starting")
            self._await_machines()
            while True:
                self._one_start()
                self._go("Queued")  # a restart, not a resume: as documented
        except _Over as exc:
            end = exc
        except LookupError as exc:
            end = _Over("Failed", "UserError", str(exc.args[0]))
        except Exception:  # noqa: BLE001  without this, a job whose thread died would never end
            self.crash = traceback.format_exc()
            end = _Over("Failed", "ServiceError", "AzureMLCompute job failed.\nInternalServerError: the fake failed")
        for url in self._served:
            self.plane.wire.forget(url)
        self._engine.clean()
        if not self.plane.log_late:
            self._flush()
        with self._lock:
            if end.message:
                self.error = _error(end.code, end.message)
            now = time.time()
            self.ended = self.started + (now - self.started) * self._pace if self.started else now
            self._move(end.status)
        time.sleep(self.plane.log_late)
        self._flush()

    def _flush(self) -> None:
        for log in self.logs:
            log.flush(whole=True)

    def _await_machines(self) -> None:
        """Wait for machines. Raises `_Over` for a quota that is too small."""
        resources = self.body["properties"].get("resources") or {}
        size = str(resources.get("instanceType") or "")
        if size in self.plane.quotas:
            limit, wanted = self.plane.quotas[size], CORES * self.count
            if wanted > limit:
                message = QUOTA.format(family=size, limit=limit, nodes=self.count, wanted=wanted)
                raise _Over("Failed", "UserError", message)
        self._go("Queued" if self.body["properties"].get("computeId") else "Provisioning")
        while self.plane.no_capacity:
            if self._early_end is not None:
                raise self._early_end
            self._go("Queued")
            time.sleep(POLL_SECONDS)

    def _one_start(self) -> None:
        """Run all nodes from their start to their end. Raises `_Over`, or returns for another start."""
        number, self.starts = self.starts, self.starts + 1
        self._taken.clear()
        if number and self.plane.notice is not None:
            with self._lock:
                self.logs = []  # the new start writes new files of the same names
        self._go("Preparing")
        if self.plane.no_role:
            raise _Over("Failed", "UserError", NO_ROLE)
        launch, local = self._launch_spec(self.folder / str(number))
        attempt = f"0.{number}"
        try:
            self._engine.prepare(launch, lambda text: None, self._stop.is_set)
            launch = self._wired(launch)
            self.containers = self._engine.start(launch, attempt=attempt, local=local, secrets={})
        except NodeError as exc:
            if self._stop.is_set():
                raise _Over("Canceled") from None
            if exc.category == "image":
                raise _Over("Failed", "UserError", IMAGE.format(image=self.image, why=exc)) from None
            raise
        self.started = self.started or time.time()
        self._go("Running")
        out = self.folder / "engine" / "out" / attempt
        printed = [Printed(out / f"node-{n}.log", self.log(n).take) for n in range(self.count)]
        started = Started(
            self.containers,
            printed,
            grace=lambda: -1.0 if self._unannounced() else self.plane.grace,
            first=lambda why: self._first_taken if why == "preempted" else None,
        )
        limit = launch.rules.time_limit
        with started.in_step(self._sync, self._crashed):
            end = started.watch(lambda seconds: self._why_to_stop(seconds, limit))
        self._sync(whole=True)
        self._conclude(end, limit, out)

    def _unannounced(self) -> bool:
        """Return True if the containers stop without a signal."""
        return self._taken.is_set() and self.plane.notice is not None

    def _crashed(self, text: str) -> None:
        self.crash = text

    def _why_to_stop(self, seconds: float, limit: float) -> str:
        if self._stop.is_set():
            return "canceled"
        if seconds * self._pace > limit:
            return "timeout"
        return "preempted" if self._taken.is_set() else ""

    def _sync(self, *, whole: bool = False) -> None:
        for log in self.logs:
            log.flush()
        for number, sync in self._syncs:
            if number not in self._lost:
                sync.step(whole=whole)

    def _conclude(self, end: str, limit: float, out: Path) -> None:
        """Draw the conclusion from the containers' end. Raises `_Over`, or returns for another start."""
        codes = [node.poll() or 0 for node in self.containers]
        if end == "preempted":
            if self.plane.restarts:
                return
            raise _Over("Failed", "UserError", PREEMPTED)
        if end == "timeout":
            raise _Over("Canceled", "UserError", TIMEOUT.format(limit=limit))
        if end == "canceled":
            raise _Over("Canceled")
        if self._lost:
            raise _Over("Failed", "ServiceError", LOST)
        self._go("Finalizing")
        if not any(codes):
            raise _Over("Completed")
        number = next(n for n, code in enumerate(codes) if code)
        code = codes[number] if codes[number] > 0 else 128 - codes[number]
        tail = (out / f"node-{number}.log").read_bytes()[-1000:].decode("utf-8", "replace")
        message = EXIT.format(code=code, log=self._log_name(number), tail=tail)
        raise _Over("Failed", "UserError", message)

    # -------------------------------------------------------------------------------------------------------- its nodes

    def _launch_spec(self, disks: Path) -> tuple[LaunchSpec, dict[str, Path]]:
        """Return the LaunchSpec that `Plane.nodes` reads from the request, with a disk for each node, and each disk's
        folder.
        """
        theirs = self.plane.nodes(self.name, self.body, self.image)
        local: dict[str, Path] = {}
        self._syncs = []
        nodes = []
        for number, spec in enumerate(theirs.nodes):
            binds = []
            for index, mount in enumerate(spec.mounts):
                here = self._bring(mount, disks / str(number) / str(index), number)
                local[here.as_uri()] = here
                kind = "mount" if mount.kind == "mount" else "sync"
                binds.append(Mount(url=here.as_uri(), path=mount.path, kind=kind))
            # This machine is not one of Azure's, so it has neither the cores nor the memory that the job asked for.
            nodes.append(dataclasses.replace(spec, mounts=binds, cpus=None, memory=None, gpus=0, platform=None))
        return dataclasses.replace(theirs, nodes=nodes), local

    def _bring(self, mount: Mount, folder: Path, number: int) -> Path:
        """Return the local folder of a node's mount. Raises `LookupError` for a missing input."""
        if mount.kind == "sync":
            sync = Agent(self.plane.blobs, mount.url, folder, lag=lambda: self.plane.sync_lag, peers=PEERS_SECONDS)
            sync.restore()
            self._syncs.append((number, sync))
            return folder
        folder.mkdir(parents=True)
        found = self.plane.blobs.fetch(mount.url, folder)
        if not found:
            raise LookupError(f"The input {mount.url} was not found (StreamError(NotFound)).")
        single = found == [mount.url.rstrip("/").rpartition("/")[2]] and not mount.url.endswith("/")
        return folder / found[0] if single else folder

    def _wired(self, launch: LaunchSpec) -> LaunchSpec:
        """Add the platform's own parts to each container: an identity, and the address of a vault on this server."""
        gateway, wire = self._engine.gateway(), self.plane.wire
        if not self._served:
            self._served = [wire.listen(gateway, tls=False), wire.listen(gateway, port=443)]
        identity = {
            "MSI_ENDPOINT": f"{self._served[0]}/msi",
            "MSI_SECRET": wire.secret,
            "DEFAULT_IDENTITY_CLIENT_ID": "00000000-0000-4000-8000-000000000000",
            "SSL_CERT_FILE": TRUST,
        }
        machines = f"{self._served[0]}/machines/{self.name}"
        trusted = wire.pem.read_text().partition("-----BEGIN CERTIFICATE")
        hosts = {"HostConfig": {"ExtraHosts": [f"{VAULT}:{gateway}"]}}

        def wired(number: int, spec: NodeSpec) -> NodeSpec:
            files = {**spec.files, TRUST: trusted[1] + trusted[2]}
            env = {**spec.env, **identity, METADATA: f"{machines}/{number}"}
            return dataclasses.replace(spec, env=env, files=files, container=hosts)

        return dataclasses.replace(launch, nodes=[wired(n, spec) for n, spec in enumerate(launch.nodes)])


def _event(machine: str, seconds: float) -> dict[str, Any]:
    """Return a Scheduled Event for a machine that goes in ``seconds``, in the form of Azure's page."""
    return {
        "EventId": str(uuid.uuid4()).upper(),
        "EventStatus": "Scheduled",
        "EventType": "Preempt",
        "ResourceType": "VirtualMachine",
        "Resources": [machine],
        "NotBefore": time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(time.time() + seconds)),
        "Description": "",
        "EventSource": "Platform",
        "DurationInSeconds": -1,
    }


def _error(code: str, message: str) -> dict[str, Any]:
    """Return the run history's RootError."""
    inner: dict[str, Any] = {
        "code": code,
        "severity": None,
        "message": message,
        "messageFormat": None,
        "messageParameters": {},
    }
    return {"error": {**inner, "details": [], "innerError": None}, "componentName": "CommonRuntime"}
