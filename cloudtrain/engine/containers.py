"""Run nodes as containers on the run's own network, through the Docker Engine API (Docker, or Podman's socket).

Output comes through an attached stream. Secrets go in by standard input, so they are in no file, argument or inspect
output. If this process is killed, a guard removes every container and network by its labels.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from ..errors import StorageError
from ..provider_api.launch_spec import LaunchSpec, NodeSpec
from ..storage.timings import CLIENT_TIMINGS
from . import ENGINE_PREFIX, NodeError, last_line, staged
from .docker_api import LABEL, away, check_image, clear, make_client, remove_container, run_label, why
from .processes import share_of_gpus
from .supervised import locked

T = TypeVar("T")

GONE = -9
DEEP, JOINED = ("HostConfig", "Labels"), ("Mounts", "DeviceRequests", "SecurityOpt", "Env", "ExtraHosts")
"""Fields of ContainerCreate that join the user's entries with cloudtrain's."""
LOG = {"Type": "json-file", "Config": {"max-size": "16m", "max-file": "1"}}
"""Limits of the engine's own copy, for debugging by hand: cloudtrain keeps the stream."""


class ContainerEngine:
    """Engine that runs nodes as containers. ``folder`` holds staged files and output.

    ``bare`` nodes get no facts about each other, as on every platform. ``isolated`` nodes reach only each other.
    """

    def __init__(
        self, *, folder: Path, run: str, environ: Mapping[str, str], bare: bool = False, isolated: bool = False
    ) -> None:
        self._folder, self._run, self._environ = folder, run, environ
        self._bare, self._isolated = bare, isolated
        self._label = run_label(run)
        self._local = threading.local()
        self._version = ""
        self._info: Mapping[str, Any] = {}
        self._users: dict[str, str] = {}
        self._services: dict[str, str] = {}
        self._guard: subprocess.Popen[bytes] | None = None
        self._aside = ThreadPoolExecutor(1)
        self._network_made: Future[None] = Future()
        self._given_up: Callable[[], bool] = lambda: False
        self._lock = threading.Lock()
        self._away_since: float | None = None

    def prepare(self, launch: LaunchSpec, report: Callable[[str], None], given_up: Callable[[], bool]) -> None:
        """Pull missing images with the engine's own logins, and create the network meanwhile."""
        self._given_up = given_up
        self._start_guard()
        self._network_made = self._aside.submit(self.patiently, self._make_network, given_up)
        self._info = self.patiently(lambda api: api.info(), given_up)
        for image, platform in dict.fromkeys((str(spec.image), spec.platform) for spec in launch.nodes):
            here = partial(check_image, image=image, platform=platform)
            if not self.patiently(here, given_up):
                report(f"pulling {image}")
                self.patiently(partial(self._pull, image=image, platform=platform), given_up)
                self.patiently(here, given_up)
            found = self.patiently(lambda api, image=image: api.inspect_image(image), given_up)  # type: ignore[misc]
            self._users[image] = str((found.get("Config") or {}).get("User") or "")

    def _pull(self, api: Any, image: str, platform: str | None) -> None:
        """Pull in an abandonable thread: a stalled registry has no time limit, and a cancel must not wait."""
        pulled: Future[None] = Future()

        def pull() -> None:
            try:
                for event in api.pull(image, stream=True, decode=True, platform=platform):
                    if "error" in event:
                        raise NodeError(_no_image(image, str(event["error"])), category="image")
            except Exception as exc:  # noqa: BLE001  the calling thread raises it
                pulled.set_exception(_pull_error(exc, image))
            else:
                pulled.set_result(None)

        threading.Thread(target=pull, name="pull", daemon=True).start()
        while not wait([pulled], timeout=0.2).done:
            if self._given_up():
                raise NodeError(f"given up while {image} was pulled")
        pulled.result()

    # ------------------------------------------------------------------------------------------- waiting for the engine

    def patiently(self, work: Callable[[Any], T], given_up: Callable[[], bool] = lambda: False) -> T:
        """Call ``work(client)`` until the engine answers, for up to `ClientTimings.docker_silence` of one absence.

        Raises `NodeError` then, or once ``given_up()``, and for a refusal that ``work`` does not handle.
        """
        import docker

        while True:
            try:
                done = work(self._client())
            except docker.errors.NotFound:
                raise
            except (OSError, docker.errors.DockerException) as exc:
                if not away(exc):
                    raise NodeError(f"the container engine fails: {why(exc)}") from None
                if self._note_absence() > CLIENT_TIMINGS.docker_silence or given_up():
                    raise NodeError(f"the container engine does not answer: {why(exc)}") from None
                time.sleep(0.5)
            else:
                self._away_since = None
                return done

    def _client(self) -> Any:
        """Return this thread's own client. Only making the first one calls the engine."""
        if not hasattr(self._local, "api"):
            if not self._version:
                with self._lock:
                    self._version = self._version or make_client("auto")._version
            self._local.api = make_client(self._version)
        return self._local.api

    def _note_absence(self) -> float:
        """Return the seconds since the engine last answered any thread."""
        with self._lock:
            now = time.monotonic()
            self._away_since = self._away_since or now
            return now - self._away_since

    # ------------------------------------------------------------------------------------------------------- starting

    def start(
        self, launch: LaunchSpec, *, attempt: str, local: Mapping[str, Path], secrets: Mapping[str, str]
    ) -> list[ContainerNode]:
        try:
            (self._folder / "out" / attempt).mkdir(parents=True, exist_ok=True)
            paths = [self._stage(spec, number, local) for number, spec in enumerate(launch.nodes)]
        except OSError as exc:
            raise StorageError(f"cannot make the nodes' files in {self._folder}: {exc}") from None
        return self.patiently(lambda api: self._start_all(api, launch, attempt, paths, secrets), self._given_up)

    def _start_all(
        self,
        api: Any,
        launch: LaunchSpec,
        attempt: str,
        paths: Sequence[Mapping[str, Path]],
        secrets: Mapping[str, str],
    ) -> list[ContainerNode]:
        for item in api.containers(all=True, filters=self._ours):  # left by a start that the engine did not finish
            remove_container(api, item["Id"])
        served = [spec for spec in launch.nodes if spec.ports and spec.hostname]
        self._services = {str(spec.hostname): self._start_service(api, spec, n) for n, spec in enumerate(served)}

        def start(number: int) -> ContainerNode:
            body = self._body(launch, number, attempt, paths[number], bool(secrets))
            name = f"cloudtrain-{self._run.rpartition('/')[2]}-{self._label[:6]}-{attempt}-{number}"
            out = self._folder / "out" / attempt / f"node-{number}.log"
            return ContainerNode(self, body, name, launch.nodes[number], out, secrets)

        with ThreadPoolExecutor(len(paths)) as pool:
            futures = [pool.submit(start, number) for number in range(len(paths))]
        nodes = [f.result() for f in futures if f.exception() is None]
        if len(nodes) < len(futures):
            for node in nodes:
                node.kill()
        for future in futures:
            future.result()  # raises the first error
        for node in nodes:
            node.follow()
        return nodes

    def _start_service(self, api: Any, spec: NodeSpec, number: int) -> str:
        """Start a service that answers at a node's name, on its forwarded ports alone. Return its address.

        It runs in the node's own image, which has a Python. Raises `NodeError` for an image that cannot be started.
        """
        program = Path(__file__).with_name("forward.py").read_text(encoding="utf-8")
        find = 'exec "$(command -v python3 || command -v python)" -c "$0" "$@"'
        body = {
            "Image": spec.image,
            "Entrypoint": ["/bin/sh", "-c", find],
            "Cmd": [program, str(CLIENT_TIMINGS.forward), _backend(spec), *map(str, spec.ports)],
            "Labels": self._labels(),
            "Healthcheck": {"Test": ["NONE"]},
            "HostConfig": {"NetworkMode": self._network, "LogConfig": LOG},
        }
        self.await_network()
        name = f"{self._network}-service-{number}"  # below 64 characters, or DNS has no name for its address
        with _refusals(partial(_refused, spec=spec)):
            made = str(api.create_container_from_config(body, name, platform=spec.platform)["Id"])
            api.start(made)
        networks = api.inspect_container(made)["NetworkSettings"]["Networks"]
        return str(networks.get(self._network, {}).get("IPAddress") or "")

    def _make_network(self, api: Any) -> None:
        none_left = "the container engine has no network to give"
        if not api.networks(filters=self._ours):
            with _refusals(lambda exc: NodeError(f"{none_left}: {why(exc)}", category="capacity")):
                api.create_network(self._network, driver="bridge", internal=self._isolated, labels=self._labels())

    def await_network(self) -> None:
        """Wait for the network that `prepare` has requested. Raises `NodeError` if the engine has none left."""
        self._network_made.result()

    @property
    def _ours(self) -> dict[str, str]:
        return {"label": f"{LABEL}id={self._label}"}

    @property
    def _network(self) -> str:
        return f"cloudtrain-{self._label}"

    def _labels(self) -> dict[str, str]:
        return {
            f"{LABEL}id": self._label,
            f"{LABEL}run": self._run,
            f"{LABEL}supervisor": f"{socket.gethostname()}:{self._folder}",
        }

    def _stage(self, spec: NodeSpec, number: int, local: Mapping[str, Path]) -> dict[str, Path]:
        """Return the path on this machine of each of the node's mounts and files, by its path there."""
        root = self._folder / "nodes" / f"node-{number}"
        staged(spec, root, local)
        paths = {
            mount.path: local[mount.url] if mount.kind != "copy" else root / mount.path.lstrip("/")
            for mount in spec.mounts
        }
        paths |= {name: root / name.lstrip("/") for name in spec.files}
        uid, gid = _ids(spec.user or self._users.get(str(spec.image)))
        # Only root can give files to an image's own user. A client that is not root sets the nodes' user.
        if uid is not None and uid != os.geteuid() and (spec.user or os.geteuid() == 0):
            _hand_over(root, uid, gid)
            for mount in spec.mounts:
                if mount.kind == "sync":
                    _hand_over(paths[mount.path], uid, gid)
                elif mount.kind == "mount" and _is_private(paths[mount.path]):
                    # Mode 0600, as the run's key has: copy it for the other user.
                    copy = root / "own" / mount.path.lstrip("/")
                    copy.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(paths[mount.path], copy)
                    _hand_over(copy, uid, gid)
                    paths[mount.path] = copy
        return paths

    def _body(
        self, launch: LaunchSpec, number: int, attempt: str, paths: Mapping[str, Path], secrets: bool
    ) -> dict[str, Any]:
        """Return the body of the Engine API's ContainerCreate."""
        spec, nodes = launch.nodes[number], len(launch.nodes)
        cpus = spec.cpus or max(1, int(self._info["NCPU"]) // nodes)
        facts: dict[str, int | str] = {"NODE": number, "NODES": nodes, "CPUS": cpus, "ATTEMPT": attempt}
        facts["MACHINE"] = str(self._info.get("Name") or "")
        if secrets:
            facts["SECRETS"] = 1
        env = {**spec.env, **({} if self._bare else {ENGINE_PREFIX + key: value for key, value in facts.items()})}
        body: dict[str, Any] = {
            "Image": spec.image,
            "Cmd": list(spec.command),
            "Env": [f"{key}={value}" for key, value in env.items()],
            "Labels": {},
            "StopSignal": launch.rules.stop_signal,
            "StopTimeout": int(launch.rules.stop_grace),
            "Healthcheck": {"Test": ["NONE"]},
            "OpenStdin": secrets,
            "StdinOnce": secrets,
            "HostConfig": self._host_config(spec, number, paths),
            "NetworkingConfig": {"EndpointsConfig": {self._network: {"Aliases": _aliases(spec)}}},
        }
        body |= {"Hostname": spec.hostname} if spec.hostname else {}
        body |= {"Entrypoint": list(spec.entrypoint)} if spec.entrypoint is not None else {}
        body |= {"WorkingDir": _absolute(spec.workdir)} if spec.workdir != "." else {}
        body |= {"User": self._user(spec.user)} if spec.user else {}
        body = _merged(body, spec.container)
        body["Labels"] |= {**self._labels(), f"{LABEL}attempt": attempt, f"{LABEL}node": str(number)}
        return body

    def _host_config(self, spec: NodeSpec, number: int, paths: Mapping[str, Path]) -> dict[str, Any]:
        read_only = {mount.path for mount in spec.mounts if mount.kind == "mount"} | set(spec.files)
        host: dict[str, Any] = {
            "NetworkMode": self._network,
            "ReadonlyRootfs": spec.read_only,
            "LogConfig": LOG,
            "Mounts": [
                {"Type": "bind", "Source": str(source), "Target": _absolute(path), "ReadOnly": path in read_only}
                for path, source in paths.items()
            ],
        }
        # The way to the other nodes' services: /etc/hosts comes before DNS.
        if services := [f"{name}:{at}" for name, at in self._services.items() if name != spec.hostname and at]:
            host["ExtraHosts"] = services
        if self._has_option("selinux"):
            host["SecurityOpt"] = ["label=disable"]  # else SELinux lets it read no mount
        if spec.cpus:
            host["NanoCpus"] = int(spec.cpus * 1e9)
        if spec.memory:
            host |= {"Memory": spec.memory, "MemorySwap": spec.memory}
        if spec.shm:
            host["ShmSize"] = spec.shm
        if spec.gpus:
            ids = share_of_gpus(number, spec, self._environ)
            host["DeviceRequests"] = [{"DeviceIDs": ids, "Capabilities": [["gpu"]]}]
        return host

    def _has_option(self, name: str) -> bool:
        return any(f"name={name}" in option for option in self._info.get("SecurityOptions") or [])

    def _user(self, user: str) -> str:
        """Return root for this user if the engine is rootless: its containers see this user as root."""
        return "0:0" if self._has_option("rootless") and _ids(user)[0] == os.geteuid() else user

    # --------------------------------------------------------------------------------------------------------- clean-up

    def take_over(self, folder: Path, given_up: Callable[[], bool]) -> None:
        with locked(folder / "guard.lock", float("inf"), given_up):
            pass  # its guard has ended, and cannot remove this supervisor's containers
        self.patiently(lambda api: clear(api, self._label), given_up)
        shutil.rmtree(folder / "nodes", ignore_errors=True)

    def _start_guard(self) -> None:
        if self._guard is not None:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        with open(self._folder / "guard.lock", "ab") as lock:  # held until the guard ends, by the guard alone
            fcntl.flock(lock, fcntl.LOCK_EX)
            # -S and imports after the wait keep an idle guard cheap.
            code = "import sys\nif not sys.stdin.buffer.read(1):\n import site; site.main()\n"
            code += " sys.path.append(sys.argv[1]); from cloudtrain.engine.docker_api import guard; guard(sys.argv[2])"
            package = str(Path(__file__).resolve().parents[2])
            self._guard = subprocess.Popen(
                [sys.executable, "-S", "-c", code, package, self._label],
                stdin=subprocess.PIPE,
                start_new_session=True,
                pass_fds=(lock.fileno(),),
            )

    def clean(self) -> None:
        """Remove the run's objects. The guard keeps trying to remove the rest; the run ends all the same."""
        done = b""
        self._aside.shutdown()  # else a network still being made would be left
        try:
            self.patiently(lambda api: clear(api, self._label))
            done = b"."
        except Exception as exc:  # noqa: BLE001  clean-up may not change how the run ended
            sys.stderr.write(f"not all of the run's containers are removed: {why(exc)}\n")
        if self._guard is not None and self._guard.stdin is not None:
            with contextlib.suppress(OSError):  # the guard was killed
                self._guard.stdin.write(done)
                self._guard.stdin.close()
            if done:
                self._guard.wait()
        shutil.rmtree(self._folder / "nodes", ignore_errors=True)


class ContainerNode:
    """Container that is created, attached to and started. Raises `NodeError` when the engine will not start it."""

    def __init__(
        self,
        engine: ContainerEngine,
        body: Mapping[str, Any],
        name: str,
        spec: NodeSpec,
        out: Path,
        secrets: Mapping[str, str],
    ) -> None:
        self._engine, self._out, self.name = engine, out, name
        self.trouble: tuple[str, str] | None = None
        self._code: int | None = None
        self._memory = spec.memory
        self._ended = threading.Event()
        self._killed = False
        api = engine._client()
        with contextlib.ExitStack() as undo, _refusals(partial(_refused, spec=spec)):
            self.id = str(api.create_container_from_config(dict(body), name, platform=spec.platform)["Id"])
            self._stream = self._attach(api, stdin=bool(secrets))
            undo.callback(self._stream.close)
            engine.await_network()
            api.start(self.id)
            undo.pop_all()
        if secrets:
            plain: Any = getattr(self._stream, "_sock", self._stream)
            plain.sendall(json.dumps(dict(secrets)).encode() + b"\n")

    def _attach(self, api: Any, *, stdin: bool) -> Any:
        return api.attach_socket(self.id, params={"stdin": int(stdin), "stdout": 1, "stderr": 1, "stream": 1})

    def follow(self) -> None:
        """Start a thread that keeps the container's output and watches for its end."""
        threading.Thread(target=self._follow, name=self.name, daemon=True).start()

    def _follow(self) -> None:
        try:
            _append(self._out, b"")
            running = True
            while running:
                for data in _frames(self._stream):
                    _append(self._out, data)
                running = self._attached_again()
        except Exception as exc:  # noqa: BLE001  without its watcher the node would never end
            self.trouble = ("infra", f"{self.name} can no longer be watched: {why(exc)}")
            self._code = GONE
        self._ended.set()

    def _attached_again(self) -> bool:
        """Return False if the container has ended, else attach to it again."""
        import docker

        try:
            for pause in (0.0, 0.01, 0.05, 0.2, 0.5):
                time.sleep(pause)
                if not self._is_running():
                    return False
            self._stream = self._engine.patiently(lambda api: self._attach(api, stdin=False))
            # A container that ended meanwhile would keep the new stream open for ever.
            if not self._is_running():
                self._stream.close()
                return False
        except docker.errors.NotFound:
            if not self._killed:
                self.trouble = ("infra", f"{self.name} was removed while it ran")
            self._code = GONE
            return False
        return True

    def _is_running(self) -> bool:
        """Return True if the container runs; if it has ended, keep its exit code and trouble."""
        state: Mapping[str, Any] = self._engine.patiently(lambda api: api.inspect_container(self.id))["State"]
        if state["Running"]:
            return True
        code = int(state["ExitCode"])
        if state.get("OOMKilled") and code == 137:
            limit = f" of {self._memory / 2**30:.1f} GiB" if self._memory else ""
            self.trouble = ("oom", f"the kernel killed it for memory: its limit{limit} is reached")
        elif code in (126, 127):
            last = last_line(self._out).removeprefix("cloudtrain: ")
            self.trouble = ("image", last or f"exit code {code}: its command cannot be run")
        self._code = 128 - code if 128 < code <= 128 + 64 else code
        return False

    def poll(self) -> int | None:
        return self._code if self._ended.is_set() else None

    def signal(self, name: str) -> None:
        with contextlib.suppress(Exception):  # it has ended, or the engine is away: the kill comes anyway
            self._engine._client().kill(self.id, name)

    def kill(self) -> None:
        import docker

        self._killed = True
        with contextlib.suppress(docker.errors.APIError, NodeError):
            self._engine.patiently(lambda api: remove_container(api, self.id))
        if not self._ended.is_set():
            self._code = GONE
            self._ended.set()


# -------------------------------------------------------------------------------------------------------------- pieces


def _append(path: Path, data: bytes) -> None:
    """Append to the log of a node's output. A full disk costs some of it there; the node keeps its own."""
    with contextlib.suppress(OSError), open(path, "ab") as out:
        out.write(data)


def _frames(stream: Any) -> Iterator[bytes]:
    """Yield an attached container's output, both streams, until the container or the engine ends."""
    from docker.utils.socket import frames_iter

    with contextlib.suppress(OSError), contextlib.closing(stream):
        for _, data in frames_iter(stream, tty=False):
            yield data


@contextlib.contextmanager
def _refusals(error: Callable[[Any], Exception]) -> Iterator[None]:
    """Raise ``error(refusal)`` for a refusal of the engine. An engine that does not answer refuses nothing."""
    import docker

    try:
        yield
    except docker.errors.APIError as exc:
        if away(exc):
            raise
        raise error(exc) from None


def _refused(exc: Any, spec: NodeSpec) -> Exception:
    """Return the error for the engine's refusal to start a node."""
    reason = why(exc)
    if "bind source path does not exist" in reason or "not shared from the host" in reason or "is not shared" in reason:
        return NodeError(f"the container engine does not see this machine's files, or not all of them: {reason}")
    if "could not select device driver" in reason or "nvidia-container" in reason or "Range of CPUs" in reason:
        return NodeError(f"the container engine has not got what is asked for: {reason}", category="capacity")
    if "No such image" in reason:
        return NodeError(f"image {spec.image} is gone: {reason}", category="image")
    if 'exec: "' in reason or "executable file not found" in reason or "exec format error" in reason:
        command = [*(spec.entrypoint or ()), *spec.command][:1]
        return NodeError(f"image {spec.image} cannot run {' '.join(command) or 'it'}: {reason}", category="image")
    return NodeError(f"the container engine does not start a node: {reason}")


def _no_image(image: str, reason: str) -> str:
    return (
        f"image {image} is not here and cannot be pulled ({reason}); build it, or log in to its registry; "
        "in a rehearsal, you can name another one: --local-image IMAGE"
    )


def _pull_error(exc: Exception, image: str) -> Exception:
    """Return the error for a failed pull: an absence of the engine, or a fault of the image."""
    import docker

    if isinstance(exc, docker.errors.DockerException) and not away(exc):
        return NodeError(_no_image(image, why(exc)), category="image")
    # If a stream breaks off, the transport's own errors come unwrapped.
    return exc if isinstance(exc, (OSError, NodeError)) else ConnectionError(why(exc))


def _aliases(spec: NodeSpec) -> list[str]:
    """Return the network's names for the node: its own, unless a service answers to that."""
    return [] if not spec.hostname else [_backend(spec)] if spec.ports else [spec.hostname]


def _backend(spec: NodeSpec) -> str:
    """Return the name by which a service finds its node."""
    return f"{spec.hostname}-pod"


def _merged(into: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Merge ``more`` over ``into``: `DEEP` tables and `JOINED` lists are joined, all else is replaced."""
    out = dict(into)
    for key, value in more.items():
        old = out.get(key)
        if key in DEEP and isinstance(old, Mapping) and isinstance(value, Mapping):
            out[key] = _merged(old, value)
        elif key in JOINED and isinstance(old, list):
            out[key] = [*old, *value]
        else:
            out[key] = value
    return out


def _absolute(path: str) -> str:
    return path if path.startswith("/") else f"/{path}"


def _ids(user: str | None) -> tuple[int | None, int]:
    """Return (uid, gid) of ``uid[:gid]``; uid None for the image's own user or a name."""
    uid, _, gid = (user or "").partition(":")
    return (int(uid), int(gid) if gid.isdigit() else int(uid)) if uid.isdigit() else (None, -1)


def _is_private(path: Path) -> bool:
    return path.is_file() and not path.stat().st_mode & stat.S_IROTH


def _hand_over(path: Path, uid: int, gid: int) -> None:
    """Give the path and everything below it to another user. Only root may do this."""
    for item in (path, *path.rglob("*")):
        os.chown(item, uid, gid, follow_symlinks=False)
