"""Provider ``local`` against the contract suite, what it refuses, and proof that the suite bites."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from cloudtrain.engine import ENGINE_PREFIX
from cloudtrain.errors import CapacityError, UnsupportedError
from cloudtrain.provider import Request, Simulation
from cloudtrain.providers.local import Provider
from cloudtrain.run import Run
from cloudtrain.testing.contract import ProviderContract
from cloudtrain.testing.tables import Fields
from cloudtrain.testing.worlds import Impossible, World


class LocalWorld(World):
    """This machine: its processes are the platform, so nothing is faked. Nodes are found by their parent."""

    def __init__(self, folder: Path) -> None:
        store = (folder / "store").as_uri()
        super().__init__(folder, provider=Provider(), store=store, nowhere=f"{socket.gethostname()}:/nowhere")

    @contextlib.contextmanager
    def node(self, request: Request, number: int) -> Iterator[Mapping[str, str]]:
        reader, writer = os.pipe()
        os.write(writer, b"{}")
        os.close(writer)
        nodes = len(self.provider.nodes(request).nodes)
        words = {"NODE": number, "NODES": nodes, "PORT": 29500, "SUPERVISOR": os.getpid(), "SECRETS_FD": reader}
        yield {ENGINE_PREFIX + key: str(value) for key, value in words.items()}

    def preempt(self, run: Run, number: int) -> None:
        os.kill(self._pid(run, number), signal.SIGTERM)

    def kill(self, run: Run, number: int) -> None:
        os.killpg(self._pid(run, number), signal.SIGKILL)

    def fault(self, category: str) -> contextlib.AbstractContextManager[Fields]:
        if category != "capacity":
            raise Impossible("processes of one's own machine know no accounts, quotas or images")
        return contextlib.nullcontext({"gpu": "H100:64"})

    def check(self, request: Request) -> None:
        super().check(request)
        Simulation.from_dict({key: request.body[key] for key in ("nodes", "rules")})

    def _pid(self, run: Run, number: int) -> int:
        """The process of node ``number``: nodes are started in order."""
        supervisor = json.loads(Path(run.url.removeprefix("file://"), "supervisor", "status.json").read_bytes())["pid"]
        table = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
        pairs = [tuple(map(int, line.split())) for line in table.splitlines()]
        return sorted(pid for pid, parent in pairs if parent == supervisor)[number]


class TestLocal(ProviderContract):
    @pytest.fixture(scope="class")
    @classmethod
    def world(cls, tmp_path_factory: pytest.TempPathFactory) -> World:
        return LocalWorld(tmp_path_factory.mktemp("world"))
