"""Parts that the fake platforms share: faults on demand, clean-up, nodes as containers, agents that sync folders."""

from __future__ import annotations

import contextlib
import threading
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from cloudtrain.engine import NodeHandle
from cloudtrain.engine.containers import ContainerEngine, ContainerNode
from cloudtrain.engine.docker_api import make_client
from cloudtrain.engine.node_folders import Objects, Sync, states_below

__all__ = ["Agent", "Fault", "Machines", "Platform", "Printed", "RestartedInPlace", "Started", "due"]

T = TypeVar("T")

POLL_SECONDS, SYNC_SECONDS = 0.05, 0.3
PEERS_SECONDS = 20.0
"""Seconds that the other nodes continue after one container has failed."""
DEAF_SECONDS = 10.0
"""Longest wait for a container's first output before it is stopped."""


@dataclass
class Fault:
    """A fault of the next ``times`` calls of an operation (``*``: any operation).

    The call returns ``error`` instead of its result. With ``done`` the call has its effect first. Without an ``error``
    the connection is then cut, so the answer is lost.
    """

    operation: str
    error: Exception | None = None
    times: int = 1
    done: bool = False


def due(faults: Sequence[Fault], *operations: str) -> Fault | None:
    """Return the first fault of one of the operations, and count it down."""
    fault = next((item for item in faults if item.operation in operations and item.times > 0), None)
    if fault is not None:
        fault.times -= 1
    return fault


class Platform:
    """A platform's ``jobs``, whose nodes stop within ``grace`` seconds, and its server ``wire``."""

    wire: Any
    grace: float
    jobs: Mapping[Any, Any]

    def close(self) -> None:
        """End every job and the servers. Raises `AssertionError` if any part of the fake itself failed."""
        for job in self.jobs.values():
            if not job.over:
                self.grace = 0.0
                job.stop()
        for job in self.jobs.values():
            job.wait()
        self.wire.close()
        crashes = [*self.wire.crashes, *(job.crash for job in self.jobs.values() if job.crash)]
        if crashes:
            raise AssertionError("\n".join(crashes))

    def __enter__(self: T) -> T:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class Machines(ContainerEngine):
    """Engine of a rehearsal, in a process that outlives its run: it closes what it opens."""

    def __init__(self, **named: Any) -> None:
        super().__init__(bare=True, **named)
        self._made: list[Any] = []

    def _client(self) -> Any:
        if not hasattr(self._local, "api"):
            with self._lock:
                if not self._version:
                    with make_client("auto") as first:
                        self._version = first._version
                client = self._local.api = make_client(self._version)
                self._made.append(client)
            attach = client.attach_socket

            def attach_socket(*args: Any, **named: Any) -> Any:
                stream = attach(*args, **named)
                self._made.append(stream._sock)
                return stream

            client.attach_socket = attach_socket
        return self._local.api

    def clean(self) -> None:
        super().clean()
        for item in self._made:  # a supervisor ends with its run, so it needs no such close
            item.close()

    def gateway(self) -> str:
        """Return this machine's address for the job's containers."""
        self.await_network()
        (network,) = self.patiently(lambda api: api.networks(filters=self._ours))
        return str(self.patiently(lambda api: api.inspect_network(network["Id"]))["IPAM"]["Config"][0]["Gateway"])


class RestartedInPlace:
    """Container that its machine restarts at once, one time, after an exit code other than 0.

    The kubelet of a Kubernetes node does that until the platform has ended the job. A code of ``passing``, a signal and
    a lack of memory are left to the platform here. ``first_code`` is the code of the first failure. The platform calls
    `settle` when it ends the job.
    """

    def __init__(self, node: ContainerNode, passing: Collection[int]) -> None:
        self._node, self._passing, self._settled = node, passing, False
        self._lock = threading.Lock()
        self.first_code: int | None = None
        self.trouble: tuple[str, str] | None = None

    def settle(self) -> None:
        """Stop restarting the container."""
        self._settled = True

    def poll(self) -> int | None:
        with self._lock:
            code, self.trouble = self._node.poll(), self._node.trouble
            gone = code is None or code <= 0 or code in self._passing or self._node.trouble is not None
            if gone or self._settled or self.first_code is not None:
                return code
            self.first_code = code
            self._start_again()
            return None

    def _start_again(self) -> None:
        node = self._node
        node._ended = threading.Event()
        node._code = None
        node._stream = node._attach(node._engine._client(), stdin=False)
        node._engine._client().start(node.id)
        node.follow()

    def signal(self, name: str) -> None:
        self._node.signal(name)

    def kill(self) -> None:
        self._settled = True
        self._node.kill()


class Printed:
    """Output of one container at ``path``, passed to ``take`` as it comes."""

    def __init__(self, path: Path, take: Callable[[bytes], None]) -> None:
        self._path, self._take, self._at = path, take, 0

    @property
    def any(self) -> bool:
        """Return True once there is output."""
        return self._at > 0

    def step(self) -> None:
        """Pass on the new output."""
        try:
            with open(self._path, "rb") as stream:
                stream.seek(self._at)
                data = stream.read()
        except FileNotFoundError:
            return
        self._at += len(data)
        if data:
            self._take(data)


class Started:
    """Containers of one start of all nodes, watched to their end. ``grace`` are the seconds before a kill.

    If the platform stops them, it calls ``on_stop`` once with the reason; ``first`` names the node to stop first.
    """

    def __init__(
        self,
        containers: Sequence[NodeHandle],
        printed: Sequence[Printed],
        *,
        grace: Callable[[], float],
        on_stop: Callable[[str], None] = lambda why: None,
        first: Callable[[str], int | None] = lambda why: None,
    ) -> None:
        self._containers, self._printed = containers, printed
        self._grace, self._on_stop, self._first = grace, on_stop, first
        self._signalled: set[int] = set()
        self.seconds = 0.0

    def watch(self, why_to_stop: Callable[[float], str]) -> str:
        """Wait for the end. Return the platform's reason to end them (``peers``: one had failed), or empty.

        ``why_to_stop`` gets the seconds since their start.
        """
        began, why, signal_at, failed_at = time.monotonic(), "", 0.0, 0.0
        while any(node.poll() is None for node in self._containers):
            now = time.monotonic()
            for tail in self._printed:
                tail.step()
            if not failed_at and any(node.poll() not in (None, 0) for node in self._containers):
                failed_at = now
            if not why:
                why, signal_at = why_to_stop(now - began), now
                if not why and failed_at and now - failed_at > PEERS_SECONDS:
                    why = "peers"
                if why:
                    self._on_stop(why)
            if why and now - signal_at > self._grace():
                for node in self._containers:
                    node.kill()
            elif why:
                self._tell(why, deaf=now - signal_at > DEAF_SECONDS)
            time.sleep(POLL_SECONDS)
        self.seconds = time.monotonic() - began
        return why

    def _tell(self, why: str, *, deaf: bool) -> None:
        """Send SIGTERM to each container once, after its first output: by then it can handle signals.
        The node that ``first`` names gets it alone; the others get it once that node has ended.
        """
        first = self._first(why)
        for number, node in enumerate(self._containers):
            its_turn = first in (None, number) or self._containers[first or 0].poll() is not None
            if number not in self._signalled and its_turn and (deaf or self._printed[number].any):
                self._signalled.add(number)
                node.signal("SIGTERM")

    @contextlib.contextmanager
    def in_step(self, sync: Callable[[], None], crashed: Callable[[str], None]) -> Any:
        """Call ``sync`` repeatedly in a thread, so that it cannot delay the watch. ``crashed`` gets the fake's own
        errors.
        """
        over = threading.Event()

        def repeat() -> None:
            try:
                while not over.wait(SYNC_SECONDS):
                    sync()
            except Exception:  # noqa: BLE001  the thread would end unseen, and the store stay out of date
                crashed(traceback.format_exc())

        thread = threading.Thread(target=repeat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            for node in self._containers:
                node.kill()
            over.set()
            thread.join()
        for tail in self._printed:
            tail.step()


class ListedObjects(Objects, Protocol):
    """Store that lists what it holds."""

    def names(self, url: str) -> set[str]:
        """Return the names below the URL, which ends with a slash."""


class Agent(Sync):
    """A platform's agent that syncs a node's folder with the store, with the faults of a real one.

    - A change goes up once it is ``lag()`` seconds old.
    - While ``stale()``, a node sends a file again that a peer has deleted from the store.
    - Every ``peers`` seconds (0: never) the peers' writes and deletions appear here, as in a mounted folder.
    - While ``dead()``, nothing goes up and no error is reported.
    """

    store: ListedObjects

    def __init__(
        self,
        store: ListedObjects,
        url: str,
        folder: Path,
        *,
        lag: Callable[[], float],
        stale: Callable[[], bool] = lambda: False,
        peers: float = 0.0,
        marks: str = "",
        dead: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__(store, url, folder, lag=0.0, marks=marks)
        self._lag_now, self._stale, self._peers, self._dead = lag, stale, peers, dead
        self._looked = 0.0
        self.restored: dict[str, int] = {}
        """Files restored at the start, with their bytes."""

    def restore(self) -> None:
        super().restore()
        self.restored = {name: size for name, (size, _) in self._sent.items()}

    def step(self, *, whole: bool = False) -> None:
        """Scan the folder once, and the store for the peers' changes."""
        if self._dead():
            return
        self.lag = self._lag_now()
        super().step(whole=whole)
        if self._stale():
            for name in sorted(self._sent.keys() - self.store.names(self.url)):
                self._put(name)
        elif self._peers and not whole and time.monotonic() - self._looked > self._peers:
            self._follow()
            self._looked = time.monotonic()

    def _follow(self) -> None:
        there, local = self.store.names(self.url), states_below(self.folder, self._marked)
        for name in sorted(there - local.keys() - self._sent.keys()):
            aside = self.folder.with_name(f"{self.folder.name}.coming")
            with contextlib.suppress(FileNotFoundError):
                self.store.fetch(self.url + name, aside)
                came, path = aside / name.rpartition("/")[2], self.folder / name
                path.parent.mkdir(parents=True, exist_ok=True)
                stat = came.stat()
                self._sent[name] = (stat.st_size, stat.st_mtime_ns)
                came.rename(path)
        local = states_below(self.folder, self._marked)
        for name in sorted(self._sent.keys() - there):
            if self._sent[name] == local.get(name):
                (self.folder / name).unlink(missing_ok=True)
                del self._sent[name]
