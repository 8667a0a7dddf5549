"""Base of the providers whose nodes this machine starts: a detached supervisor and its folder.

The Request of such a provider is a LaunchSpec as JSON, with the provider's other fields in `body`. The supervisor
starts it with the provider's engine. If the run's own folder is on this machine, the files are in its ``supervisor/``.
"""

from __future__ import annotations

import contextlib
import getpass
import hashlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

from .. import errors
from ..errors import LostContactError, NotFoundError, PlatformError, SpecError, StorageError, UnsupportedError
from ..job.options import merge_options
from ..provider_api.launch_spec import LaunchRules, LaunchSpec, Mount, NodeSpec
from ..provider_api.node import attempt_key
from ..provider_api.protocol import (
    ABANDONED,
    FINAL,
    AttemptInfo,
    Layout,
    LogLine,
    LogPage,
    Provider,
    ProviderExtras,
    Request,
    Status,
    check_inputs,
    context_of,
)
from ..storage.timings import CLIENT_TIMINGS
from ..validate import check_listable, did_you_mean, url_scheme
from . import boot_id, last_line

if TYPE_CHECKING:
    from ..job.job import Job

PREEMPTED = 75  # exit code of a node after a stop with notice (EX_TEMPFAIL). The supervisor starts the nodes again
STATE_DIR = (
    "folder of the supervisor's files for runs with a store elsewhere; default: cloudtrain in $XDG_STATE_HOME, else in "
    "~/.local/state"
)
"""The description of the setting ``state_dir``."""
MAX_RESTARTS = 10
OWNED = (
    *("nodes.*.command", "nodes.*.mounts", "nodes.*.gpus", "nodes.*.workdir", "rules.time_limit", "rules.retries"),
    *("rules.stop_grace", "rules.stop_signal", "rules.restart_on"),  # the node's own half knows no others
    *("rules.preemptions", "rules.losses", "rules.primary", "rules.sync_lag", "rules.sync_marks"),  # rules of clouds
)
"""Fields that `options` cannot change in any such request."""
_STUCK = re.compile(r"mirror: cannot copy checkpoint (?P<name>\S+) to .+: (?P<why>[^:\n]+); trying again")
"""The line that a node's `cloudtrain.runtime.mirror` prints."""
PAGE_BYTES = 1 << 20
SCHEMES = frozenset({"file", "s3", "obs", "gs", "gcs", "abfs", "abfss", "az", "http", "https", "hf", "ftp", "sftp"})
"""Schemes that the supervisor can fetch; ``file`` is this machine's own."""


class SupervisedProvider(ProviderExtras):
    """Base of such providers: all of the protocol but ``plan`` and ``node_environment``; see `Provider`.

    A subclass names its engine in ``engine``. `check` checks what can be known before a start. `_clear` removes the
    remains of a killed supervisor's run.
    """

    name: ClassVar[str]
    engine: ClassVar[str]
    schemes: ClassVar[frozenset[str]] = SCHEMES
    retried_by: ClassVar[str] = "supervisor"
    max_wait_by: ClassVar[str] = "platform"
    min_poll_s: ClassVar[float] = 0.05  # one poll reads a few files
    max_poll_s: ClassVar[float] = 0.05
    always_interactive: ClassVar[bool] = True
    Settings: ClassVar[type[Any]]

    def __init__(self, **settings: Any) -> None:
        from ..provider_api.limits import checked_settings

        self.settings: Any = checked_settings(self.Settings(**settings), self.name)

    def check(self, request: Request) -> None:
        """Raise if this machine cannot start the request. The supervisor calls this first."""

    def _clear(self, folder: Path) -> None:
        """Remove the remaining nodes, if any, of the run whose supervisor worked in ``folder``."""

    def principal(self) -> str:
        """Return the owner of the processes."""
        return f"{getpass.getuser()}@{socket.gethostname()}"

    def storage(self, url: str) -> Mapping[str, Any]:
        """Return no options: the supervisor, too, has only this machine's environment."""
        return {}

    # ---------------------------------------------------------------------------------------------------------- a plan

    def _refuse(self, job: Job, layout: Layout, fields: Mapping[str, str], instead: Mapping[str, str]) -> None:
        """Raise `UnsupportedError` if one of ``fields`` (dotted name: why) is set or an input cannot be read.

        ``instead`` has the hints of some of the fields. Raises `SpecError` for a reserved tag.
        """
        for name, why in fields.items():
            owner = job.resources if name.startswith("resources.") else job
            if getattr(owner, name.rpartition(".")[2]) not in (None, False):
                raise UnsupportedError(self.name, name, why, hint=instead.get(name, ""))
        for name, reference in job.secrets.items():
            if not reference.startswith("env:"):
                raise UnsupportedError(self.name, f"secrets.{name}", "only env:NAME can be read on this machine")
        check_inputs(cast("type[Provider]", type(self)), layout.inputs)
        for name, item in layout.inputs.items():
            if item.url.endswith("/"):  # else it may be a file whose name has no suffix
                check_listable(item.url, f"inputs.{name}")
            if item.shard:
                raise UnsupportedError(self.name, f"inputs.{name}.shard", "every node reads the same files")
            if item.mode == "mount" and url_scheme(item.url) != "file":
                why = "a remote input can only be copied"
                raise UnsupportedError(self.name, f"inputs.{name}.mode", why, hint="use mode copy")
        for tag in job.tags:
            if tag.startswith("cloudtrain."):
                why, hint = "names that begin with cloudtrain. are reserved", "choose another name for the tag"
                raise SpecError(why, field=f"tags.{tag}", hint=hint)

    def _mounts(self, layout: Layout, attempt: int, *, root: str = "") -> tuple[list[Mount], list[str]]:
        """Return a node's mounts below ``root``, and the arguments with which `cloudtrain.pyz` finds them."""
        mounts = [
            Mount(url=layout.runtime, path=f"{root}cloudtrain.pyz", kind="mount"),
            Mount(url=layout.code, path=f"{root}code.tar.gz", kind="mount"),
            Mount(url=layout.context, path=f"{root}container/context.json", kind="mount"),
            Mount(url=layout.key, path=f"{root}container/key", kind="mount"),
            Mount(url=layout.live, path=f"{root}live", kind="sync"),
        ]
        words = [f"{root}cloudtrain.pyz", "run", "--context", f"{root}container/context.json"]
        words += ["--attempt", str(attempt), "--path", f"code={root}code.tar.gz", "--path", f"live={root}live"]
        if url_scheme(layout.run) == "file":
            mounts.append(Mount(url=layout.direct, path=f"{root}checkpoints", kind="sync"))
            words += ["--path", f"direct={root}checkpoints"]
        for name, item in sorted(layout.inputs.items()):
            kind = item.mode if item.mode != "auto" else "mount" if url_scheme(item.url) == "file" else "copy"
            path = f"{root}inputs/{name}/{item.file}" if item.file else f"{root}inputs/{name}"
            mounts.append(Mount(url=item.url, path=path, kind=kind))
            words += ["--path", f"input.{name}={root}inputs/{name}"]
        if layout.resume:
            mounts.append(Mount(url=layout.resume, path=f"{root}resume", kind="mount"))
            words += ["--path", f"resume={root}resume"]
        return mounts, words

    def _request(
        self,
        job: Job,
        layout: Layout,
        *,
        attempt: int,
        gpu_index: int,
        nodes: Sequence[NodeSpec],
        body: Mapping[str, Any],
        owned: Sequence[str],
    ) -> Request:
        """Return the request that starts ``nodes`` under the rules of all such providers; options merged last."""
        from ..provider_api.limits import THIS_MACHINE, hard_limit

        prices = getattr(self.settings, "prices", {})
        seconds, notes = hard_limit(job, self.name, lambda _: [THIS_MACHINE], gpu_index=gpu_index, own=prices)
        rules = LaunchRules(
            time_limit=seconds,
            retries=job.retries,
            restart_on=(PREEMPTED,),
            max_restarts=MAX_RESTARTS,
            stop_grace=CLIENT_TIMINGS.stop_grace,
        )
        body = {**body, **LaunchSpec(nodes=nodes, rules=rules).to_dict()}
        for name in job.options.get(self.name, {}):
            if name not in body:
                raise SpecError("no such field", field=f"options.{self.name}.{name}", hint=did_you_mean(name, body))
        body = merge_options(body, job.options.get(self.name, {}), owned=[*OWNED, *owned], provider=self.name)
        try:
            LaunchSpec.from_dict({key: body[key] for key in ("nodes", "rules")})
        except SpecError as exc:
            raise SpecError(exc.message, field=f"options.{self.name}.{exc.field}", hint=exc.hint) from None
        return Request(
            provider=self.name,
            operation="supervise",
            body=body,
            context=context_of(self.name, job, layout, processes=job.resources.processes(gpu_index)),
            run=layout.run,
            attempt=attempt,
            gpu_index=gpu_index,
            notes=tuple(notes),
        )

    # ---------------------------------------------------------------------------------------------------------- the run

    def submit(self, request: Request, secrets: Mapping[str, str] | None = None) -> str:
        if os.name != "posix":
            raise UnsupportedError(self.name, "provider", "its supervisor needs Linux or macOS")
        folder = self._folder(request)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            claimed = folder / "request.json"
            if not claimed.exists():
                write_json(claimed, request.to_dict())
        except OSError as exc:
            raise StorageError(f"cannot write {folder}: {exc.strerror}") from None
        if not (folder / "status.json").exists():
            self._supervise(folder, secrets or {})
        return self._native_id(folder)

    def _supervise(self, folder: Path, secrets: Mapping[str, str]) -> None:
        """Start the supervisor, detached; of several, the one that gets the folder's lock stays."""
        begin = "import sys; sys.path.append(sys.argv.pop(1)); "
        code = f"{begin}from cloudtrain.engine.supervisor import main; main(*sys.argv[1:])"
        package = Path(__file__).resolve().parents[2]
        with open(folder / "supervisor.log", "ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-c", code, str(package), str(folder), self.engine],
                cwd=folder,
                env=_outside(os.environ),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        assert process.stdin is not None
        with process.stdin as pipe:
            pipe.write(json.dumps(dict(secrets)).encode())
        threading.Thread(target=process.wait, daemon=True).start()
        deadline = time.monotonic() + CLIENT_TIMINGS.supervisor_start
        while not (folder / "status.json").exists():
            if process.poll() is not None and not (folder / "status.json").exists():
                _raise_refusal(folder / "refused.json")
                last = last_line(folder / "supervisor.log") or "it printed nothing"
                raise PlatformError(f"the supervisor did not start: {last}")
            if time.monotonic() > deadline:
                with contextlib.suppress(ProcessLookupError):  # it must not start the job after this error
                    os.killpg(process.pid, signal.SIGKILL)
                waited = f"{CLIENT_TIMINGS.supervisor_start:.0f} s"
                raise PlatformError(f"the supervisor has not started within {waited}: see {folder}")
            time.sleep(0.01)

    def find(self, request: Request) -> str | None:
        folder = self._folder(request)
        if (folder / "status.json").exists():
            return self._native_id(folder)
        for earlier in reversed(range(request.attempt)):  # an earlier attempt's supervisor may have started it
            folder = self._folder(replace(request, attempt=earlier))
            if (folder / "status.json").exists():
                data = _read(folder / "status.json")
                started = {row["number"].partition(".")[0] for row in data["attempts"]}
                # A supervisor that ended by itself may have recorded an attempt just before.
                ended = data["state"] in FINAL and "taken_over" not in data
                return self._native_id(folder) if ended or str(request.attempt) in started else None
        return None

    def status(self, native_id: str) -> Status:
        folder = existing(native_id)
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
        return status if status.final or is_alive(folder) else self._abandoned(folder, status)

    def logs(self, native_id: str, cursor: Any = None) -> LogPage:
        folder = existing(native_id)
        offsets = dict(cursor or {})
        lines: list[LogLine] = []
        more = False
        for path in _logs_in(folder):
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

    def stuck(self, native_id: str) -> dict[str, str]:
        """Return each checkpoint that the newest attempt's nodes could not copy to the store, with the reason."""
        logs = _logs_in(existing(native_id))
        found: dict[str, str] = {}
        for path in (each for each in logs if each.parent == logs[-1].parent):
            with open(path, "rb") as stream:
                stream.seek(max(0, path.stat().st_size - PAGE_BYTES))
                said = stream.read().decode("utf-8", "replace")
            found |= {match["name"]: match["why"] for match in _STUCK.finditer(said)}
        return found

    def cancel(self, native_id: str) -> None:
        folder = existing(native_id)
        try:
            (folder / "cancel").touch()
        except OSError as exc:  # a full or read-only disk
            raise StorageError(f"cannot write {folder / 'cancel'}: {exc.strerror}") from None

    def launch_spec(self, request: Request) -> LaunchSpec:
        return LaunchSpec.from_dict({key: request.body[key] for key in ("nodes", "rules")})

    def abandoned(self, native_id: str) -> bool:
        """Return True if the supervisor was killed, or this machine restarted, before the run ended."""
        with contextlib.suppress(NotFoundError, LostContactError):
            folder = existing(native_id)
            if is_alive(folder):
                return False
            data = _read(folder / "status.json")
            return data["state"] not in FINAL and data["host"] == socket.gethostname()
        return False

    def _folder(self, request: Request) -> Path:
        """Return the folder of the supervisor that a client starts for this attempt.

        It is below the run's own folder if that is on this machine. Attempts that a supervisor starts itself have none.
        """
        run, suffix = request.run, f"-{request.attempt}" if request.attempt else ""
        if run.startswith("file://"):
            return Path(run.removeprefix("file://")) / f"supervisor{suffix}"
        home = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
        root = self.settings.state_dir or os.path.join(home, "cloudtrain")
        return Path(root) / (hashlib.sha256(run.encode()).hexdigest()[:16] + suffix)

    def _native_id(self, folder: Path) -> str:
        return f"{socket.gethostname()}:{folder}"

    def _abandoned(self, folder: Path, status: Status) -> Status:
        """Return status failed for a run whose supervisor died; raise `LostContactError` from another machine."""
        data = _read(folder / "status.json")
        if data["state"] in FINAL:
            return self.status(f"{data['host']}:{folder}")  # it ended between the two reads
        if data["host"] != socket.gethostname():
            raise LostContactError(f"this run is on the machine {data['host']}", passing=False, hint="ask there")
        with locked(folder / "clearing") as free:
            if free and _read(folder / "status.json")["state"] not in FINAL:  # else the next attempt may have begun
                self._clear(folder)
        ended = last_sign(folder, data["seen"])
        attempts = tuple(replace(row, ended=row.ended or ended) for row in status.attempts)
        if attempts and not (folder / "live").exists() and all_succeeded(folder, attempts[-1]):  # the store has it all
            return replace(status, state="succeeded", native=ABANDONED, attempts=attempts, finished=ended)
        cancelled = (folder / "cancel").exists()
        rebooted = data["boot"] and data["boot"] != boot_id()
        reason = "this machine was restarted during the run" if rebooted else "the run's supervisor was killed"
        return Status(
            state="cancelled" if cancelled else "failed",
            native=ABANDONED,
            reason="cancelled by the user" if cancelled else reason,
            category="cancelled" if cancelled else "infra",
            attempts=attempts,
            started=status.started,
            finished=ended,
            url=status.url,
        )


class ContainersProvider(SupervisedProvider):
    """Base of the providers whose nodes are containers."""

    def image_digest(self, request: Request) -> str:
        """Return this machine's id of the image that the nodes run. Raises the engine's errors."""
        from .docker_api import connect

        return str(connect().inspect_image(self.launch_spec(request).nodes[0].image)["Id"])

    def _clear(self, folder: Path) -> None:
        from .docker_api import clear, connect, run_label

        with contextlib.suppress(Exception):  # the run's end must be reported all the same
            clear(connect(), run_label(_read(folder / "request.json")["run"]))


def origin_tags(layout: Layout) -> dict[str, str]:
    """Return the run's origin as tags of its nodes: the commit, and the page of the CI run."""
    page = layout.origin.get("ci_url") or layout.origin.get("ci_run", "")
    said = {"cloudtrain.revision": layout.origin.get("revision", ""), "cloudtrain.ci": page}
    return {name: value for name, value in said.items() if value}


def _outside(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables without those that name the scratch folder of the node on which this client runs.

    A node's end kills every process with such a variable, and a run that a script starts must outlive the script.
    """
    inside = re.match(r".*?/cloudtrain-[^/]+/", environ.get("CLOUDTRAIN_CHECKPOINT_DIR", ""))
    return {name: value for name, value in environ.items() if inside is None or not value.startswith(inside[0])}


def existing(native_id: str) -> Path:
    """Return the folder of a run's supervisor. Raises `NotFoundError`, and `LostContactError` on another machine."""
    host, _, path = native_id.partition(":")
    folder = Path(path)
    if (folder / "status.json").exists() and (folder / "request.json").exists():  # else the store was moved
        return folder
    if host != socket.gethostname():
        raise LostContactError(f"this run is on the machine {host}", passing=False, hint="ask there")
    hint = "if the store of this unfinished run was moved, move it back, and run the same command again"
    raise NotFoundError(f"no supervisor has ever written {folder}", hint=hint)


@contextlib.contextmanager
def locked(path: Path, seconds: float = 0.0, given_up: Callable[[], bool] = lambda: False) -> Iterator[bool]:
    """Hold the lock file ``path``; yield False if another process does not release it within ``seconds``, or before
    ``given_up()``. Raises `StorageError` for its disk."""
    import fcntl

    deadline = time.monotonic() + seconds

    try:
        lock = open(path, "ab")  # noqa: SIM115 - closed below; errors of the block are not the disk's
    except OSError as exc:
        raise StorageError(f"cannot write {path}: {exc.strerror}") from None
    with lock:
        free = False
        while not free:
            with contextlib.suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                free = True
            if free or time.monotonic() >= deadline or given_up():
                break
            time.sleep(0.02)
        yield free


def is_alive(folder: Path) -> bool:
    """Return True if a supervisor holds the folder's lock."""
    import fcntl

    try:
        lock = open(folder / "lock", "rb")  # noqa: SIM115 - to read is enough, also for another user's client
    except FileNotFoundError:
        return False
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: concurrent callers do not block each other
        except OSError:
            return True
    return False


def last_sign(folder: Path, seen: float) -> float:
    """Return the time of the last sign of a killed supervisor's nodes: their last line, or its own last status."""
    return max([seen, *(path.stat().st_mtime for path in (folder / "out").glob("*/*.log"))])


def all_succeeded(folder: Path, attempt: AttemptInfo) -> bool:
    """Return True if the exit record of every node says that this start succeeded."""
    from ..runs.outcome import records_of
    from ..storage.local_disk import local_path

    request = _read(folder / "request.json")
    records = exit_records(local_path(f"{request['run']}/live") or folder / "live")
    ended = {record["node"] for record in records_of(attempt, records) if record["outcome"] == "succeeded"}
    return len(ended) == (attempt.nodes or int(request["context"]["nodes"]))


def exit_records(live: Path) -> list[dict[str, Any]]:
    """Return the exit records of all nodes so far, as the nodes wrote them."""
    found = []
    for path in sorted((live / "exit").glob("*.json")):
        with contextlib.suppress(OSError, ValueError):
            found.append(json.loads(path.read_bytes()))
    return found


def refuse(path: Path, exc: errors.CloudtrainError) -> None:
    """Write the supervisor's refusal of the request for its client."""
    field, text = (exc.field, exc.message) if isinstance(exc, SpecError) else ("", str(exc))
    kind = "SpecError" if isinstance(exc, SpecError) else type(exc).__name__
    write_json(path, {"kind": kind, "field": field, "text": text, "hint": exc.hint})


def _raise_refusal(path: Path) -> None:
    if path.exists():
        said = _read(path)
        path.unlink(missing_ok=True)
        if said["kind"] == "SpecError":
            raise SpecError(said["text"], field=said["field"], hint=said["hint"])
        raise getattr(errors, said["kind"], PlatformError)(said["text"], hint=said["hint"])


def _logs_in(folder: Path) -> list[Path]:
    """Return the nodes' logs of a supervisor, oldest attempt first, then by node."""
    logs = (folder / "out").glob("*/node-*.log")
    return sorted(logs, key=lambda path: attempt_key(f"{path.parent.name}/{path.stem}"))


def _read(path: Path) -> Any:
    """Read a record. Where none can be renamed, its writer fills it in place, so half of one is read again."""
    try:
        return json.loads(path.read_bytes())
    except ValueError:
        time.sleep(CLIENT_TIMINGS.half_record)
        return json.loads(path.read_bytes())


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Write the file whole or not at all. Raises `StorageError` if the disk fails.

    It is not forced to the disk: a heartbeat must not wait there behind a checkpoint of many GB.
    """
    from ..runtime.checkpoints import put_whole

    text = json.dumps(data).encode()
    try:
        put_whole(path, lambda temporary: temporary.write_bytes(text), temporary=".part")
    except OSError as exc:
        raise StorageError(f"cannot write {path.parent}: {exc.strerror}") from None
