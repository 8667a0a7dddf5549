"""A real Slurm cluster on this machine, by tests/slurm.sh, as the platform of provider ``slurm``. Nothing is faked."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.provider_api.protocol import Layout, Request
from cloudtrain.providers.slurm import Provider, api
from cloudtrain.runs.run import Run
from cloudtrain.testing.platform import FakePlatform, Impossible
from cloudtrain.testing.tables import Fields

SCRIPT = Path(__file__).parents[1] / "slurm.sh"
DDP = Path(__file__).parents[1] / "providers" / "slurm_ddp.py"
GRACE = 30
"""Seconds of the stop grace that the provider is told: GraceTime is 30, KillWait 5."""


class Cluster:
    """slurmctld, four slurmd and munged below ``folder``."""

    def __init__(self, folder: Path, **options: str) -> None:
        self.folder, self._options = folder, options
        self.conf = folder / "slurm.conf"

    def start(self) -> None:
        options = {"PORT": str(_free_ports(10)), **self._options}
        self._script("start", env={**os.environ, **options})

    def stop(self) -> None:
        self._script("stop")

    def kill_node(self, node: str) -> None:
        self._script("kill", node)

    def _script(self, verb: str, *more: str, env: Mapping[str, str] | None = None) -> None:
        done = subprocess.run(
            ["bash", str(SCRIPT), verb, str(self.folder), *more], capture_output=True, text=True, env=env, check=False
        )
        assert done.returncode == 0, done.stderr

    def pid(self, name: str) -> int:
        return int((self.folder / "pid" / name).read_text())

    def end(self, name: str, number: int = signal.SIGTERM) -> None:
        """End one daemon and wait until it has ended."""
        pid = self.pid(name)
        os.kill(pid, number)
        deadline = time.monotonic() + 20
        while os.path.exists(f"/proc/{pid}") and time.monotonic() < deadline:
            time.sleep(0.05)
        (self.folder / "pid" / name).unlink(missing_ok=True)

    def call(self, *words: str, text: str | None = None) -> str:
        """Return the output of one of Slurm's tools."""
        env = {**os.environ, "SLURM_CONF": str(self.conf), "SLURM_TIME_FORMAT": "%s"}
        done = subprocess.run(words, input=text, capture_output=True, text=True, env=env, check=False)
        assert done.returncode == 0, (words, done.stderr)
        return done.stdout

    def field(self, job: str, name: str) -> str:
        output = self.call("scontrol", "-o", "show", "job", job)
        return next(word.partition("=")[2] for word in output.split() if word.startswith(f"{name}="))

    def nodes_of(self, job: str) -> list[str]:
        return self.call("scontrol", "show", "hostnames", self.field(job, "NodeList")).split()

    def preempt(self, job: str, number: int) -> None:
        """Take a node back by a job of a higher partition."""
        node = self.nodes_of(job)[number]
        words = ["sbatch", "-p", "high", "-w", node, "--exclusive", "-t", "1", "-o", "/dev/null", "--wrap", "sleep 1"]
        self.call(*words)

    def kill_task(self, job: str, number: int) -> None:
        """Kill every process of one node of the job; its slurmd and slurmstepd stay."""
        for pid in self.tasks(job, number):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def tasks(self, job: str, number: int) -> list[int]:
        """Return the pids of one node of the job, oldest first."""
        name, found = self.nodes_of(job)[number], []
        wanted = {f"SLURM_JOB_ID={job}", f"SLURM_CONF={self.conf}", f"SLURMD_NODENAME={name}", "SLURM_STEP_ID=0"}
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if {word.encode() for word in wanted} <= set((path / "environ").read_bytes().split(b"\0")):
                    found.append(int(path.name))
        return sorted(found)


def _free_ports(count: int) -> int:
    """Return the first of ``count`` ports without a listener."""
    base = 17000 + os.getpid() % 140 * 20
    while True:
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(base, base + count):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return base
        base += 20


class SlurmPlatform(FakePlatform):
    """The cluster as the contract suite's platform."""

    def __init__(self, folder: Path, cluster: Cluster, /, *, store: str = "", **settings: object) -> None:
        self.cluster = cluster
        given = {"partition": "low", "python": sys.executable, "stop_grace": GRACE, "prices": {"low": 2.0}}
        super().__init__(
            folder,
            provider=Provider(**{**given, **settings}),
            store=store or (folder / "store").as_uri(),
            nowhere="999999999:/nowhere/slurm-0-0",
        )

    def job(self, run: Run) -> str:
        native = self.provider.find(self.provider.plan(run.job, Layout.from_dict(run.record["layout"])))
        assert native is not None
        return native.partition(":")[0]

    @contextlib.contextmanager
    def node(self, request: Request, number: int) -> Iterator[Mapping[str, str]]:
        yield self.provider.launch_spec(request).nodes[number].env

    def check(self, request: Request) -> None:
        super().check(request)
        deadline = time.monotonic() + 30
        while True:
            try:
                self.cluster.call("sbatch", "--test-only", text=str(request.body["script"]))
                return
            except AssertionError as exc:  # a node that an earlier test lost is still returning
                if "node configuration is not available" not in str(exc) or time.monotonic() > deadline:
                    raise
            time.sleep(1)

    def preempt(self, run: Run, number: int) -> None:
        self.cluster.preempt(self.job(run), number)

    def kill(self, run: Run, number: int) -> None:
        self.cluster.kill_task(self.job(run), number)

    def fault(self, category: str) -> contextlib.AbstractContextManager[Fields]:
        if category == "quota":
            raise Impossible("limits of users need slurmdbd; the trials with accounting have them")
        if category == "image":
            raise Impossible("nodes run their own Python: there is no image")
        return self._fault(category)

    @contextlib.contextmanager
    def _fault(self, category: str) -> Iterator[Fields]:
        if category == "capacity":
            self.cluster.call("scontrol", "update", "nodename=ALL", "state=drain", "reason=test")
            try:
                yield {"max_wait": 2}
            finally:
                self.cluster.call("scontrol", "update", "nodename=ALL", "state=resume")
        else:
            self.cluster.end("munged")
            try:
                yield {}
            finally:
                self.cluster.start()


@contextlib.contextmanager
def running(folder: Path, **options: str) -> Iterator[Cluster]:
    """Start a cluster, and let this process's tools use it. Skip the test if Slurm is not installed."""
    if shutil.which("slurmctld", path=f"{os.environ['PATH']}:/usr/sbin:/sbin") is None:
        pytest.skip("Slurm is not installed: tests/slurm.sh install")
    cluster = Cluster(folder, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", str(cluster.conf))
        patch.setattr(api, "SQUEUE_S", 0.3)
        cluster.start()
        try:
            yield cluster
        finally:
            cluster.stop()


# --------------------------------------------------------------------------------------------------- whole runs of DDP


def ddp_world(folder: Path, cluster: Cluster, /, *, store: str = "", **settings: object) -> SlurmPlatform:
    """Return the platform of ``cluster`` with the script `DDP` in its code."""
    world = SlurmPlatform(folder, cluster, store=store, **settings)
    shutil.copy(DDP, world.place.code / "ddp.py")
    return world


def send(world: SlurmPlatform, run_id: str, *, steps: int = 60, **job: Any) -> Run:
    fields = {"entry_point": "ddp.py", "instance_count": 2, "env": {"STEPS": str(steps)}, "max_runtime": 600}
    return world.send(world.plan({**fields, **job}, run_id=run_id))


def texts(run: Run) -> list[str]:
    return [line.text for line in run.logs()]


def await_text(run: Run, text: str, count: int = 1) -> None:
    deadline = time.monotonic() + 90
    while sum(line.startswith(text) for line in texts(run)) < count:
        assert time.monotonic() < deadline, texts(run)
        assert not run.status().final, (run.status(), texts(run))
        time.sleep(0.3)


def loss_of(run: Run) -> str:
    """Return the loss of a run that has succeeded."""
    result = run.wait(timeout=150, poll=0.3)
    assert result["state"] == "succeeded", (result["reason"], texts(run))
    return next(text for text in texts(run) if text.startswith("loss "))


def check_nothing_lost(run: Run) -> None:
    """Check that each start resumes at the very step at which the previous one stopped."""
    words = texts(run)
    stopped = [text.split()[2] for text in words if text.startswith("stopped after")]
    began = [text.split()[2] for text in words if text.startswith("from step")]
    assert set(began) == {"0", *stopped}
