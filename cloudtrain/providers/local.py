"""Provider ``local``: nodes are process groups of this machine, under a supervisor that outlives the client.

Its Request is a Simulation as JSON: the very commands, mounts and rules that the supervisor's engine starts. The node
runs this machine's Python and sees the client's environment; the script sees the contract every provider keeps.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from ..engine import ENGINE_PREFIX, boot_id, check_gpus
from ..errors import LostContactError, NotFoundError, PlatformError, SpecError, StorageError, UnsupportedError
from ..job import Gpu, Job
from ..provider import (
    AttemptInfo,
    Layout,
    LogLine,
    LogPage,
    Mount,
    NodeSpec,
    Request,
    Rules,
    Simulation,
    Site,
    Status,
    Topology,
    check_inputs,
    context_of,
    merge_options,
)
from ..values import url_scheme

__all__ = ["Provider", "Settings"]

STOP_GRACE = 30.0
"""Seconds between SIGTERM and SIGKILL, Kubernetes' and Azure's default."""
PREEMPTED = 75
"""A node's exit code after a stop it was told of (EX_TEMPFAIL): the supervisor starts the nodes again."""
MAX_RESTARTS = 10
START_SECONDS = 60.0
PAGE_BYTES = 1 << 20
OWNED = ("nodes.*.command", "nodes.*.mounts", "nodes.*.gpus", "rules.time_limit", "rules.retries", "tags")
_REFUSED = {
    "image": "it runs this machine's own Python; use --provider docker, or put the image under on.<provider>",
    "resources.instance_type": "its only machine is this one; put instance_type under on.<provider>",
    "resources.cpus": "processes share all cores of this machine",
    "resources.memory_gb": "processes share the memory of this machine",
    "resources.disk_gb": "processes share the disk of this machine",
    "resources.shm_gb": "processes share /dev/shm of this machine",
    "resources.spot": "this machine is never taken away",
    "max_wait": "processes start at once",
    "max_cost": "this machine has no price",
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """``python`` runs the ranks; ``state_dir`` holds the supervisor's files of runs whose store is elsewhere."""

    python: str = field(default_factory=lambda: sys.executable or "python3")
    state_dir: str = ""


class Provider:
    """Processes of this machine; see `cloudtrain.provider.Provider` for what each method promises."""

    name: ClassVar[str] = "local"
    Settings: ClassVar[type[Any]] = Settings
    schemes: ClassVar[frozenset[str]] = frozenset(
        {"file", "s3", "gs", "gcs", "abfs", "abfss", "az", "http", "https", "hf", "ftp", "sftp"}
    )
    retried_by: ClassVar[str] = "supervisor"
    poll: ClassVar[float] = 0.2

    def __init__(self, **settings: Any) -> None:
        self.settings = Settings(**settings)

    def plan(self, job: Job, layout: Layout, attempt: int = 0, choice: int = 0) -> Request:
        _refuse(job, layout)
        gpus = Gpu.parse(job.resources.gpu[choice]) if job.resources.gpu else None
        simulation = Simulation(
            nodes=[self._node(layout, attempt, gpus.count if gpus else 0)] * job.resources.instance_count,
            rules=Rules(
                time_limit=job.max_runtime,
                retries=job.retries,
                restart_on=(PREEMPTED,),
                max_restarts=MAX_RESTARTS,
                stop_grace=STOP_GRACE,
            ),
        )
        body = {"name": job.name, "tags": job.tags, "gpu": gpus.name if gpus else None, **simulation.to_dict()}
        body = merge_options(body, job.options.get(self.name, {}), owned=OWNED, provider=self.name)
        try:
            Simulation.from_dict({key: body[key] for key in ("nodes", "rules")})
        except SpecError as exc:
            raise SpecError(exc.message, field=f"options.{self.name}.{exc.field}") from None
        return Request(
            provider=self.name,
            operation="supervise",
            body=body,
            context=context_of(self.name, job, layout, processes=job.resources.processes(choice)),
            run=layout.run,
            attempt=attempt,
            choice=choice,
        )

    def _node(self, layout: Layout, attempt: int, gpus: int) -> NodeSpec:
        mounts = [
            Mount(url=layout.runtime, path="cloudtrain.pyz", kind="mount"),
            Mount(url=layout.code, path="code.tar.gz", kind="mount"),
            Mount(url=layout.context, path="container/context.json", kind="mount"),
            Mount(url=layout.key, path="container/key", kind="mount"),
            Mount(url=layout.live, path="live", kind="sync"),
        ]
        command = [self.settings.python, "cloudtrain.pyz", "run", "--context", "container/context.json"]
        command += ["--attempt", str(attempt), "--path", "code=code.tar.gz", "--path", "live=live"]
        for name, item in sorted(layout.inputs.items()):
            kind = item.mode if item.mode != "auto" else "mount" if url_scheme(item.url) == "file" else "copy"
            path = f"inputs/{name}/{item.file}" if item.file else f"inputs/{name}"
            mounts.append(Mount(url=item.url, path=path, kind=kind))
            command += ["--path", f"input.{name}=inputs/{name}"]
        if layout.resume:
            mounts.append(Mount(url=layout.resume, path="resume", kind="mount"))
            command += ["--path", "resume=resume"]
        return NodeSpec(command=command, mounts=mounts, gpus=gpus)

    def submit(self, request: Request, secrets: Mapping[str, str] | None = None) -> str:
        if os.name != "posix":
            raise UnsupportedError(self.name, "provider", "its supervisor needs Linux or macOS")
        nodes = self.nodes(request).nodes
        if shutil.which(nodes[0].command[0]) is None:
            raise SpecError(f"there is no {nodes[0].command[0]} to run", field="local.python")
        if wanted := sum(node.gpus for node in nodes):
            check_gpus(wanted, str(request.body["gpu"]))
        folder = self._folder(request.run)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            claimed = folder / "request.json"
            if not claimed.exists():
                _write(claimed, request.to_dict())
        except OSError as exc:
            raise StorageError(f"cannot write {folder}: {exc.strerror}") from None
        if not (folder / "status.json").exists():
            self._supervise(folder, secrets or {})
        return self._native_id(folder)

    def _supervise(self, folder: Path, secrets: Mapping[str, str]) -> None:
        """Start the supervisor, detached; of several, the one that gets the folder's lock stays."""
        code = "import sys; sys.path.append(sys.argv.pop(1)); from cloudtrain.supervisor import main; main(sys.argv[1])"
        package = Path(__file__).resolve().parents[2]
        with open(folder / "supervisor.log", "ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-c", code, str(package), str(folder)],
                cwd=folder,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        assert process.stdin is not None
        with process.stdin as pipe:
            pipe.write(json.dumps(dict(secrets)).encode())
        threading.Thread(target=process.wait, daemon=True).start()
        deadline = time.monotonic() + START_SECONDS
        while not (folder / "status.json").exists():
            if process.poll() is not None and not (folder / "status.json").exists():
                raise PlatformError(f"the supervisor did not start: {_last_line(folder / 'supervisor.log')}")
            if time.monotonic() > deadline:
                raise PlatformError(f"the supervisor has not started within {START_SECONDS:.0f} s: see {folder}")
            time.sleep(0.02)

    def find(self, request: Request) -> str | None:
        folder = self._folder(request.run)
        return self._native_id(folder) if (folder / "status.json").exists() else None

    def status(self, native_id: str) -> Status:
        folder = _existing(native_id)
        data = _read(folder / "status.json")
        status = Status(
            state=data["state"],
            native=data["state"],
            reason=data["reason"],
            category=data["category"],
            attempts=tuple(AttemptInfo(**item) for item in data["attempts"]),
            started=data["started"],
            finished=data["finished"],
            url=folder.as_uri(),
        )
        return status if status.final or _alive(folder) else _abandoned(folder, status)

    def logs(self, native_id: str, cursor: Any = None) -> LogPage:
        folder = _existing(native_id)
        offsets = dict(cursor or {})
        lines: list[LogLine] = []
        more = False
        for path in sorted((folder / "out").glob("*/node-*.log"), key=_attempt_order):
            key = f"{path.parent.name}/{path.name}"
            start = offsets.get(key, 0)
            with open(path, "rb") as stream:
                stream.seek(start)
                data = stream.read(PAGE_BYTES)
            whole = data[: data.rfind(b"\n") + 1]
            for line in whole.splitlines(keepends=True):
                text = line.decode("utf-8", "replace").rstrip("\n")
                lines.append(LogLine(node=path.stem.removeprefix("node-"), text=text, id=f"{key}:{start}"))
                start += len(line)
            offsets[key] = start
            more |= len(data) == PAGE_BYTES
        return LogPage(lines=tuple(lines), cursor=offsets, more=more)

    def cancel(self, native_id: str) -> None:
        folder = _existing(native_id)
        (folder / "cancel").touch()

    @staticmethod
    def site(environ: Mapping[str, str], argv: Mapping[str, str]) -> Site:
        nodes = int(environ[ENGINE_PREFIX + "NODES"])
        with open(int(environ[ENGINE_PREFIX + "SECRETS_FD"]), "rb") as pipe:
            secrets = json.load(pipe)
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        return Site(
            topology=Topology(
                nodes=nodes,
                node_rank=int(environ[ENGINE_PREFIX + "NODE"]),
                master_addr="127.0.0.1",
                master_port=int(environ[ENGINE_PREFIX + "PORT"]),
            ),
            paths=dict(argv),
            scratch=(environ[ENGINE_PREFIX + "SCRATCH"],),
            # Every peer is this machine: gloo need not be able to resolve its host name.
            export_env={} if "GLOO_SOCKET_IFNAME" in environ else {"GLOO_SOCKET_IFNAME": loopback},
            stop_grace=STOP_GRACE,
            exit_code={"succeeded": 0, "failed": 1, "preempted": PREEMPTED},
            secrets=lambda reference: secrets[reference.partition(":")[2]],
            supervisor=int(environ[ENGINE_PREFIX + "SUPERVISOR"]),
            groups_file=environ[ENGINE_PREFIX + "GROUPS"],
            cpus=max(1, _cpus() // nodes),
        )

    def nodes(self, request: Request) -> Simulation:
        return Simulation.from_dict({key: request.body[key] for key in ("nodes", "rules")})

    def _folder(self, run: str) -> Path:
        """The supervisor's files: in the run's own folder when that is on this machine."""
        if run.startswith("file://"):
            return Path(run.removeprefix("file://")) / "supervisor"
        root = self.settings.state_dir or os.path.join(
            os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state"), "cloudtrain"
        )
        return Path(root) / hashlib.sha256(run.encode()).hexdigest()[:16]

    def _native_id(self, folder: Path) -> str:
        return f"{socket.gethostname()}:{folder}"


def _refuse(job: Job, layout: Layout) -> None:
    """Raise `UnsupportedError` for a field that processes of this machine cannot honour."""
    for name, why in _REFUSED.items():
        owner = job.resources if name.startswith("resources.") else job
        if getattr(owner, name.rpartition(".")[2]) not in (None, False):
            raise UnsupportedError(Provider.name, name, why)
    for name, reference in job.secrets.items():
        if not reference.startswith("env:"):
            raise UnsupportedError(Provider.name, f"secrets.{name}", "only env:NAME can be read on this machine")
    check_inputs(Provider, layout.inputs)
    for name, item in layout.inputs.items():
        if item.shard:
            raise UnsupportedError(Provider.name, f"inputs.{name}.shard", "every node reads the same files")
        if item.mode == "mount" and url_scheme(item.url) != "file":
            raise UnsupportedError(
                Provider.name, f"inputs.{name}.mode", "a remote input can only be copied; use mode copy"
            )


def _cpus() -> int:
    """Cores this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # macOS
        return os.cpu_count() or 1


def _existing(native_id: str) -> Path:
    host, _, path = native_id.partition(":")
    folder = Path(path)
    if (folder / "status.json").exists():
        return folder
    if host != socket.gethostname():
        raise LostContactError(f"this run is on the machine {host}; ask there")
    raise NotFoundError(f"no supervisor has ever written {folder}")


def _alive(folder: Path) -> bool:
    """Whether a supervisor holds the folder's lock."""
    import fcntl

    with open(folder / "lock", "ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: two who look do not see each other
        except OSError:
            return True
    return False


def _abandoned(folder: Path, status: Status) -> Status:
    """What a run is whose supervisor has died: ended, with the reason, or unknown from another machine."""
    data = _read(folder / "status.json")
    if data["state"] in ("succeeded", "failed", "cancelled"):
        return Provider().status(f"{data['host']}:{folder}")  # it ended between our two looks
    if data["host"] != socket.gethostname():
        raise LostContactError(f"this run is on the machine {data['host']}; ask there")
    rebooted = data["boot"] and data["boot"] != boot_id()
    reason = "this machine was restarted while the run went on" if rebooted else "the run's supervisor was killed"
    return Status(
        state="failed",
        native="abandoned",
        reason=reason,
        category="infra",
        attempts=status.attempts,
        started=status.started,
        finished=data["seen"],
        url=status.url,
    )


def _attempt_order(path: Path) -> tuple[int, int, str]:
    k, _, r = path.parent.name.partition(".")
    return int(k), int(r), path.name


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_bytes())  # type: ignore[no-any-return]


def _write(path: Path, data: Mapping[str, Any]) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(data), encoding="utf-8")
    os.replace(temporary, path)


def _last_line(path: Path) -> str:
    lines = path.read_text(errors="replace").strip().splitlines() if path.exists() else []
    return lines[-1] if lines else "it said nothing"
