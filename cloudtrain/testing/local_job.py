"""Run a job of `cloudtrain.testing.fake_cloud` for real: its nodes are processes here, for any provider.

The supervisor of provider local runs it, in a thread of the test's own process. So it reaches stores in that process's
memory. The request stays the platform's; only the started nodes are local's.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from ..engine.processes import NodeProcess, ProcessEngine
from ..engine.supervised import SupervisedProvider
from ..engine.supervisor import Supervisor
from ..errors import CloudtrainError, SpecError
from ..job.job import Job
from ..provider_api.launch_spec import LaunchSpec
from ..provider_api.protocol import Layout, LogPage, Provider, Request, Status
from ..providers.local import Provider as Local
from ..runtime.host_facts import handles_sigterm
from ..storage.files import files
from ..storage.local_disk import local_path
from ..validate import url_scheme

__all__ = ["How", "LocalJob", "Notice"]

POLL_SECONDS = 0.005
START_SECONDS = 60.0
STOP_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class Notice:
    """Moment of a preemption notice to ``node``: at a step of its metrics, or some seconds after its ranks began."""

    step: int | None = None
    after: float | None = None
    node: int = 0


@dataclass(frozen=True, kw_only=True)
class How:
    """Way to run a job here. ``notices`` are the first starts', in order. ``processes`` is ranks on a node; None: the
    job's own number, 1 if it asks for GPUs. ``inputs`` replace the job's inputs. ``secrets`` are the values that a
    platform would read."""

    notices: Sequence[Notice] = ()
    processes: int | None = None
    inputs: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, str] = field(default_factory=dict)


class LocalJob:
    """One native job: started when made. Raises `SpecError` for a job that cannot be run here."""

    def __init__(
        self,
        *,
        folder: Path,
        provider: Provider,
        request: Request,
        how: How,
        secrets: Mapping[str, str],
        notices: list[Notice],
    ) -> None:
        self.folder, self.native_id = folder, f"{socket.gethostname()}:{folder}"
        self._local = Local()
        folder.mkdir(parents=True)
        (folder / "request.json").write_text(json.dumps(request.to_dict()), encoding="utf-8")
        self._supervisor = _Supervisor(folder=folder, provider=provider, how=how, secrets=secrets, notices=notices)
        self._supervisor.check()
        if local_path(request.run) is None:
            # As on a platform, a later attempt's nodes find the files of the attempt before.
            files(request.run).download_tree("live", folder / "live")
        self._thread = threading.Thread(target=self._run, name=f"cloudtrain-{folder.name}", daemon=True)
        self._thread.start()
        deadline = time.monotonic() + START_SECONDS
        while not (folder / "status.json").exists():
            if not self._thread.is_alive() or time.monotonic() > deadline:
                raise CloudtrainError(f"the job did not start; see {folder}")
            time.sleep(POLL_SECONDS)

    def _run(self) -> None:
        """Run the supervisor as `cloudtrain.engine.supervisor.main` does: its lock shows that it lives."""
        import fcntl

        with open(self.folder / "lock", "ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            os.set_inheritable(lock.fileno(), False)
            self._supervisor.run()

    def status(self) -> Status:
        """Return the job's status."""
        return SupervisedProvider.status(self._local, self.native_id)

    def logs(self, cursor: Any) -> LogPage:
        """Return a page of the nodes' output."""
        return SupervisedProvider.logs(self._local, self.native_id, cursor)

    def cancel(self) -> None:
        """Request the job's stop."""
        SupervisedProvider.cancel(self._local, self.native_id)

    def close(self) -> None:
        """Stop the job, and wait until nothing of it is left."""
        if self._thread.is_alive():
            self.cancel()
            self._thread.join(STOP_SECONDS)


class _Supervisor(Supervisor):
    """Supervisor of one attempt of a client's, or of all if the provider's own supervisor starts the later ones."""

    def __init__(
        self, *, folder: Path, provider: Provider, how: How, secrets: Mapping[str, str], notices: list[Notice]
    ) -> None:
        super().__init__(folder=folder, engine="processes", secrets={**secrets, **how.secrets}, environ=os.environ)
        self.engine = _Engine(folder=folder, notices=notices)
        self._real, self._how = provider, how

    @cached_property
    def provider(self) -> Provider:
        record = self.record
        job = Job.from_dict(record["job"]).at(record["provider"])
        layout = Layout.from_dict(record["layout"])
        return cast("Provider", _Here(real=self._real, job=job, layout=layout, how=self._how, folder=self.folder))

    def check(self) -> None:
        """Raise if the job cannot be run here, while its sender still waits."""
        super().check()
        self.provider.launch_spec(self.request)


@dataclass(frozen=True, kw_only=True)
class _Here:
    """Planner that plans as the real provider does, and returns the nodes that this machine starts."""

    real: Provider
    job: Job
    layout: Layout
    how: How
    folder: Path

    def plan(self, job: Job, layout: Layout, attempt: int = 0, choice: int = 0) -> Request:
        """Return the next attempt's request, as it is recorded."""
        return self.real.plan(job, layout, attempt=attempt, choice=choice)

    def launch_spec(self, request: Request) -> LaunchSpec:
        """Return the nodes that local starts for the same job. If a client starts later attempts, local starts none."""
        told = self.folder / "container" / "context.json"
        layout = _Told(
            store=self.layout.store,
            run_id=self.layout.run_id,
            code_digest=self.layout.code_digest,
            runtime_digest=self.layout.runtime_digest,
            resume=self.layout.resume,
            inputs={
                name: replace(item, mode="auto", shard=False, source=None) for name, item in self.layout.inputs.items()
            },
            told=told.as_uri(),
        )
        retries = self.job.retries if self.real.retried_by == "supervisor" else 0
        here = Local().plan(self._job(retries), self._with_inputs(layout), attempt=request.attempt)
        context = dict(here.context)
        if local_path(self.layout.store) is None:  # no node may use the real store
            context["checkpoint_url"] = (self.folder / "checkpoints").as_uri()
        told.parent.mkdir(exist_ok=True)
        told.write_text(json.dumps(context), encoding="utf-8")
        return Local().launch_spec(here)

    def _job(self, retries: int) -> Job:
        wanted = self.job.resources
        processes = self.how.processes or (1 if wanted.gpu else wanted.processes())
        platform = ("image", "instance_type", "cpus", "memory_gb", "disk_gb", "shm_gb", "max_wait")
        money = ("max_cost", "max_gpu_hours")  # this machine has no price, and the job none of its GPUs here
        secrets = {}
        for name, reference in self.job.secrets.items():
            own = reference.startswith("env:")
            if not own and name not in self.how.secrets:
                raise SpecError(
                    "no test reads it where it is; give run_locally(secrets={...}) a value for it",
                    field=f"secrets.{name}",
                )
            secrets[name] = reference if own else f"env:{name}"
        return self.job.replace(
            **dict.fromkeys((*platform, *money)),
            gpu=(),
            spot=False,
            nproc_per_node=processes,
            retries=retries,
            secrets=secrets,
            inputs={},
            options={},
        )

    def _with_inputs(self, layout: Layout) -> Layout:
        inputs = dict(layout.inputs)
        for name, given in self.how.inputs.items():
            if name not in inputs:
                raise SpecError("the job has no such input", field=f"inputs.{name}")
            path = Path(given).resolve()
            if not path.exists():
                raise SpecError(f"there is no {path}", field=f"inputs.{name}")
            inputs[name] = replace(inputs[name], url=path.as_uri(), file=path.name if path.is_file() else None)
        for name, item in inputs.items():
            if url_scheme(item.url) not in Local.schemes | {"memory"}:
                raise SpecError(
                    f"no test reads {item.url}; give run_locally(inputs={{...}}) a path for it", field=f"inputs.{name}"
                )
        return replace(layout, inputs=inputs)


@dataclass(frozen=True, kw_only=True)
class _Told(Layout):
    """Layout with its own context: the store's context is the platform's."""

    told: str

    @property
    def context(self) -> str:
        return self.told


class _Engine(ProcessEngine):
    """Engine that gives notice as a platform does: the stop signal to a node's first process."""

    def __init__(self, *, folder: Path, notices: list[Notice]) -> None:
        super().__init__(folder=folder, environ=os.environ)
        self._out, self._notices = folder / "out", notices
        self._watching: list[threading.Thread] = []

    def start(
        self, simulation: LaunchSpec, *, attempt: str, local: Mapping[str, Path], secrets: Mapping[str, str]
    ) -> list[NodeProcess]:
        nodes = super().start(simulation, attempt=attempt, local=local, secrets=secrets)
        if self._notices:
            notice = self._notices.pop(0)
            watch = threading.Thread(target=self._watch, args=(notice, attempt, nodes), daemon=True)
            self._watching.append(watch)
            watch.start()
        return nodes

    def clean(self) -> None:
        for watch in self._watching:
            watch.join()
        super().clean()

    def _watch(self, notice: Notice, attempt: str, nodes: Sequence[NodeProcess]) -> None:
        """Wait until the moment of the notice, or the end of the start; then signal the node."""
        node = nodes[notice.node]

        def until(what: Callable[[], bool]) -> bool:
            while node.poll() is None:
                if what():
                    return True
                time.sleep(POLL_SECONDS)
            return False

        if not until(lambda: handles_sigterm(node.process.pid)) or not until(lambda: self._began(attempt)):
            return
        if notice.step is not None:
            wanted = notice.step
            due = until(lambda: any(_step(one.scratch) >= wanted for one in nodes))
        else:
            moment = time.monotonic() + (notice.after or 0.0)
            due = until(lambda: time.monotonic() >= moment)
        if due:
            node.signal("SIGTERM")

    def _began(self, attempt: str) -> bool:
        """Return True once node 0 has started all nodes."""
        with contextlib.suppress(OSError):
            return f"cloudtrain: attempt {attempt}:" in (self._out / attempt / "node-0.log").read_text(errors="replace")
        return False


def _step(scratch: Path) -> int:
    """Return the last step in the metrics of a node's script; -1 without any."""
    for path in scratch.glob("*/metrics.jsonl"):
        with contextlib.suppress(OSError, ValueError, IndexError, KeyError, TypeError):
            return int(json.loads(path.read_text().rpartition("\n")[0].splitlines()[-1])["step"])
    return -1
