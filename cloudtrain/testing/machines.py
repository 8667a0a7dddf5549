"""What faked platforms share that really run what they are sent: faults on demand, an end of all that they have begun,
their nodes as containers of this machine, and folders kept in step with a store."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from ..engine import ENGINE_PREFIX, NodeHandle
from ..engine.api import make_client
from ..engine.containers import ContainerEngine

__all__ = ["Fault", "Machines", "Objects", "Platform", "Printed", "Started", "Sync", "due"]

T = TypeVar("T")

POLL_SECONDS, SYNC_SECONDS = 0.05, 0.3
PEERS_SECONDS = 20.0
"""How long the other nodes go on after one container has failed."""
DEAF_SECONDS = 10.0
"""How long the first word of a container is waited for before it is told to stop."""


@dataclass
class Fault:
    """What befalls the next ``times`` calls of an operation (``*``: of any).

    ``error`` is answered in place of the result; with ``done`` the call has its effect all the same, and without an
    ``error`` the connection is then cut: the answer that gets lost.
    """

    operation: str
    error: Exception | None = None
    times: int = 1
    done: bool = False


def due(faults: Sequence[Fault], *operations: str) -> Fault | None:
    """The first fault of one of the operations, which is then one time less due."""
    fault = next((item for item in faults if item.operation in operations and item.times > 0), None)
    if fault is not None:
        fault.times -= 1
    return fault


class Platform:
    """What a platform has begun: ``jobs`` whose nodes stop within ``grace`` seconds, and the server ``wire``."""

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
    """The engine, less what it tells its nodes of each other: no platform says that."""

    def __init__(self, *, isolated: bool = False, **named: Any) -> None:
        super().__init__(**named)
        self._isolated = isolated
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
            client.create_network = partial(client.create_network, internal=self._isolated)
        return self._local.api

    def clean(self) -> None:
        super().clean()
        for item in self._made:  # a supervisor, which ends with its run, does without
            item.close()

    def _body(self, *args: Any, **named: Any) -> dict[str, Any]:
        body = super()._body(*args, **named)
        body["Env"] = [pair for pair in body["Env"] if not pair.startswith(ENGINE_PREFIX)]
        return body

    def gateway(self) -> str:
        """This machine's address for the job's containers."""
        self.await_network()
        (network,) = self.patiently(lambda api: api.networks(filters=self._ours))
        return str(self.patiently(lambda api: api.inspect_network(network["Id"]))["IPAM"]["Config"][0]["Gateway"])


class Printed:
    """What one container prints at ``path``, given to ``take`` as it comes."""

    def __init__(self, path: Path, take: Callable[[bytes], None]) -> None:
        self._path, self._take, self._at = path, take, 0

    @property
    def any(self) -> bool:
        """Whether it has said something."""
        return self._at > 0

    def step(self) -> None:
        """What is new."""
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
    """The containers of one start of all nodes, watched to their end. ``grace`` are the seconds before a kill.

    ``on_stop`` hears once why the platform stops them itself; ``first`` names the node that is told before all others.
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
        self._told: set[int] = set()
        self.seconds = 0.0

    def watch(self, why_to_stop: Callable[[float], str]) -> str:
        """Until all have ended; why the platform ended them itself (``peers``: one had failed), or empty.

        ``why_to_stop`` is asked with the seconds since their start.
        """
        began, why, told_at, failed_at = time.monotonic(), "", 0.0, 0.0
        while any(node.poll() is None for node in self._containers):
            now = time.monotonic()
            for tail in self._printed:
                tail.step()
            if not failed_at and any(node.poll() not in (None, 0) for node in self._containers):
                failed_at = now
            if not why:
                why, told_at = why_to_stop(now - began), now
                if not why and failed_at and now - failed_at > PEERS_SECONDS:
                    why = "peers"
                if why:
                    self._on_stop(why)
            if why and now - told_at > self._grace():
                for node in self._containers:
                    node.kill()
            elif why:
                self._tell(why, deaf=now - told_at > DEAF_SECONDS)
            time.sleep(POLL_SECONDS)
        self.seconds = time.monotonic() - began
        return why

    def _tell(self, why: str, *, deaf: bool) -> None:
        """SIGTERM to every container, once, when it hears: its first process has shown that it is there.

        (Jobs of tests are stopped within a second of their start; a platform is slower.) The others go when the first
        has.
        """
        first = self._first(why)
        for number, node in enumerate(self._containers):
            its_turn = first in (None, number) or self._containers[first or 0].poll() is not None
            if number not in self._told and its_turn and (deaf or self._printed[number].any):
                self._told.add(number)
                node.signal("SIGTERM")

    @contextlib.contextmanager
    def in_step(self, sync: Callable[[], None], crashed: Callable[[str], None]) -> Any:
        """``sync`` again and again beside the watch: a slow store must not keep a container from being told to stop.

        ``crashed`` hears a mistake of ours, which would end it unseen.
        """
        over = threading.Event()

        def go_on() -> None:
            try:
                while not over.wait(SYNC_SECONDS):
                    sync()
            except Exception:  # noqa: BLE001  it would end unseen, with a store that is never up to date again
                crashed(traceback.format_exc())

        thread = threading.Thread(target=go_on, daemon=True)
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


# ------------------------------------------------------------------------------------------------- folders and a store


class Objects(Protocol):
    """A store as a platform moves bytes to and from it; URLs are the platform's own."""

    def fetch(self, url: str, folder: Path) -> list[str]:
        """Download all below the URL; the names it got below ``folder``."""

    def names(self, url: str) -> set[str]:
        """What is below the URL, which ends with a slash."""

    def put(self, url: str, data: bytes) -> None:
        """Write one object."""

    def delete(self, url: str) -> None:
        """Remove one object."""


class Sync:
    """One node's folder and its prefix: all of it down at the start, changes up as they are seen.

    What vanishes here is deleted there. ``lag`` is how many seconds old a change must be before it goes up; while
    ``stale()``, a file that this node still has comes back in the store after a peer has deleted it there. Every
    ``peers`` seconds (0: never) what others write and delete there appears and vanishes here, as in a mounted folder.
    """

    def __init__(
        self,
        store: Objects,
        url: str,
        folder: Path,
        *,
        lag: Callable[[], float],
        stale: Callable[[], bool] = lambda: False,
        peers: float = 0.0,
    ) -> None:
        self.store, self.url, self.folder = store, url.rstrip("/") + "/", folder
        self._lag, self._stale, self._peers = lag, stale, peers
        self._sent: dict[str, tuple[int, int]] = {}
        self._looked = 0.0

    def restore(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.store.fetch(self.url, self.folder)
        self._sent = self._local()

    def step(self, *, whole: bool = False) -> None:
        """Once through the folder; ``whole``: the last changes too."""
        local, now = self._local(), time.time()
        for name, state in sorted(local.items()):
            old = now - state[1] / 1e9 >= self._lag()
            if self._sent.get(name) != state and (whole or old):
                self._put(name)
                self._sent[name] = state
        for name in sorted(self._sent.keys() - local.keys()):
            self.store.delete(self.url + name)
            del self._sent[name]
        if self._stale():
            for name in sorted(self._sent.keys() - self.store.names(self.url)):
                self._put(name)
        elif self._peers and not whole and time.monotonic() - self._looked > self._peers:
            self._follow(local)
            self._looked = time.monotonic()

    def _follow(self, local: dict[str, tuple[int, int]]) -> None:
        there = self.store.names(self.url)
        for name in sorted(there - local.keys() - self._sent.keys()):
            aside = self.folder.with_name(f"{self.folder.name}.coming")
            with contextlib.suppress(FileNotFoundError):
                self.store.fetch(self.url + name, aside)
                came, path = aside / name.rpartition("/")[2], self.folder / name
                path.parent.mkdir(parents=True, exist_ok=True)
                stat = came.stat()
                self._sent[name] = (stat.st_size, stat.st_mtime_ns)
                came.rename(path)
        for name in sorted(self._sent.keys() - there):
            if self._sent[name] == self._local().get(name):
                (self.folder / name).unlink(missing_ok=True)
                del self._sent[name]

    def _put(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.store.put(self.url + name, (self.folder / name).read_bytes())

    def _local(self) -> dict[str, tuple[int, int]]:
        found = {}
        for root, _, names in os.walk(self.folder):  # folders may vanish meanwhile
            for path in (Path(root, name) for name in names):
                with contextlib.suppress(OSError):
                    stat = path.stat()
                    found[path.relative_to(self.folder).as_posix()] = (stat.st_size, stat.st_mtime_ns)
        return found
