"""Run a job of `cloudtrain.testing.fake_cloud` for real: its nodes are processes of this machine.

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
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from ..engine.processes import NodeProcess, ProcessEngine
from ..engine.supervised import SupervisedProvider
from ..engine.supervisor import Supervisor
from ..errors import CloudtrainError, SpecError
from ..job.job import Job
from ..provider_api.launch_spec import LaunchSpec
from ..provider_api.protocol import Layout, LayoutInput, LogPage, Provider, Request, Status
from ..providers.local import Provider as Local
from ..runtime.host_facts import handles_sigterm
from ..storage.files import files
from ..storage.local_disk import local_path
from ..validate import url_scheme

__all__ = ["LocalJob", "LocalRun", "Notice"]

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
class LocalRun:
    """Way to run jobs here.

    ``notices`` are of the next starts, in order; each start removes its own. ``processes`` is ranks on a node; None:
    the job's own number, 1 if it asks for GPUs. ``inputs`` replace the job's inputs. ``secrets`` are the values that a
    platform would read.
    """

    notices: list[Notice]
    processes: int | None
    inputs: Mapping[str, str | Path]
    secrets: Mapping[str, str]


class LocalJob:
    """One native job: started when made. Raises `SpecError` for a job that cannot be run here."""

    def __init__(
        self, *, folder: Path, provider: Provider, request: Request, local_run: LocalRun, secrets: Mapping[str, str]
    ) -> None:
        self.folder, self.native_id = folder, f"{socket.gethostname()}:{folder}"
        self._local = Local()
        folder.mkdir(parents=True)
        (folder / "request.json").write_text(json.dumps(request.to_dict()), encoding="utf-8")
        self._supervisor = _Supervisor(folder, provider, local_run, secrets)
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

    # The class's own methods: the fake cloud has replaced those of the provider local.

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
        """Stop the job, and wait until its processes have ended."""
        if self._thread.is_alive():
            self.cancel()
            self._thread.join(STOP_SECONDS)


class _Supervisor(Supervisor):
    """Supervisor of one attempt of a client's, or of all if the provider's own supervisor starts the later ones."""

    def __init__(self, folder: Path, provider: Provider, local_run: LocalRun, secrets: Mapping[str, str]) -> None:
        values = {**secrets, **local_run.secrets}
        super().__init__(folder=folder, engine="processes", secrets=values, environ=os.environ)
        self.engine = _Engine(folder, local_run.notices)
        self._real, self._local_run = provider, local_run

    @cached_property
    def provider(self) -> Provider:
        return cast("Provider", _Planner(self._real, self.record, self._local_run, self.folder))

    def check(self) -> None:
        """Raise if the job cannot be run here, while its sender still waits."""
        super().check()
        self.provider.launch_spec(self.request)


class _Planner:
    """Planner that plans as the real provider does, and returns the nodes that this machine starts."""

    def __init__(self, real: Provider, record: Mapping[str, Any], local_run: LocalRun, folder: Path) -> None:
        self._real, self._local_run, self._folder = real, local_run, folder
        self._job = Job.from_dict(record["job"]).at(record["provider"])
        self._layout = Layout.from_dict(record["layout"])

    def plan(self, job: Job, layout: Layout, attempt: int = 0, gpu_index: int = 0) -> Request:
        """Return the next attempt's request, as it is recorded."""
        return self._real.plan(job, layout, attempt, gpu_index)

    def launch_spec(self, request: Request) -> LaunchSpec:
        """Return the nodes that local starts for the same job. They read a context of their own: the store's is the
        platform's."""
        local = Local()
        layout = replace(self._layout, inputs=self._inputs(), origin={})
        planned = local.plan(self._local_job(), layout, attempt=request.attempt)
        context = dict(planned.context)
        if local_path(layout.store) is None:  # no node may use the real store
            context["checkpoint_url"] = (self._folder / "checkpoints").as_uri()
        path = self._folder / "container" / "context.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(context), encoding="utf-8")
        urls = {layout.context: path.as_uri()}
        spec = local.launch_spec(planned)
        nodes = [
            replace(node, mounts=[replace(mount, url=urls.get(mount.url, mount.url)) for mount in node.mounts])
            for node in spec.nodes
        ]
        return replace(spec, nodes=nodes)

    def _local_job(self) -> Job:
        """Return the job without what only its platform has. If a client starts later attempts, local starts none."""
        wanted, secrets = self._job.resources, {}
        for name, reference in self._job.secrets.items():
            own = reference.startswith("env:")
            if not own and name not in self._local_run.secrets:
                why = "no test reads it where it is; give run_locally(secrets={...}) a value for it"
                raise SpecError(why, field=f"secrets.{name}")
            secrets[name] = reference if own else f"env:{name}"
        machine = ("instance_type", "gpu_memory", "cpus", "memory_gb", "disk_gb", "shm_gb")
        platform = ("image", *machine, "max_wait", "keep_warm")
        money = ("max_cost", "max_gpu_hours")  # this machine has no price, and the job none of its GPUs here
        return self._job.replace(
            **dict.fromkeys((*platform, *money)),
            gpu=(),
            spot=False,
            nproc_per_node=self._local_run.processes or (1 if wanted.gpu else wanted.processes()),
            retries=self._job.retries if self._real.retried_by == "supervisor" else 0,
            secrets=secrets,
            inputs={},
            options={},
        )

    def _inputs(self) -> dict[str, LayoutInput]:
        inputs = {
            name: replace(item, mode="auto", shard=False, source=None) for name, item in self._layout.inputs.items()
        }
        for name, given in self._local_run.inputs.items():
            if name not in inputs:
                raise SpecError("the job has no such input", field=f"inputs.{name}")
            path = Path(given).resolve()
            if not path.exists():
                raise SpecError(f"there is no {path}", field=f"inputs.{name}")
            inputs[name] = replace(inputs[name], url=path.as_uri(), file=path.name if path.is_file() else None)
        for name, item in inputs.items():
            if url_scheme(item.url) not in Local.schemes | {"memory"}:
                why = f"no test reads {item.url}; give run_locally(inputs={{...}}) a path for it"
                raise SpecError(why, field=f"inputs.{name}")
        return inputs


class _Engine(ProcessEngine):
    """Engine that gives notice as a platform does: the stop signal to a node's first process."""

    def __init__(self, folder: Path, notices: list[Notice]) -> None:
        super().__init__(folder=folder, environ=os.environ)
        self._notices = notices
        self._watching: list[threading.Thread] = []

    def start(
        self, launch: LaunchSpec, *, attempt: str, local: Mapping[str, Path], secrets: Mapping[str, str]
    ) -> list[NodeProcess]:
        nodes = super().start(launch, attempt=attempt, local=local, secrets=secrets)
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

        def until(condition: Callable[[], bool]) -> bool:
            while node.poll() is None:
                if condition():
                    return True
                time.sleep(POLL_SECONDS)
            return False

        if not until(lambda: handles_sigterm(node.process.pid)) or not until(lambda: self._began(attempt)):
            return
        step, moment = notice.step, time.monotonic() + (notice.after or 0.0)
        if until(
            lambda: time.monotonic() >= moment if step is None else any(_step(one.scratch) >= step for one in nodes)
        ):
            node.signal("SIGTERM")

    def _began(self, attempt: str) -> bool:
        """Return True once node 0 has started all nodes."""
        log = self._folder / "out" / attempt / "node-0.log"
        with contextlib.suppress(OSError):
            return f"cloudtrain: attempt {attempt}:" in log.read_text(errors="replace")
        return False


def _step(scratch: Path) -> int:
    """Return the last step in the metrics of a node's script; -1 without any."""
    for path in scratch.glob("*/metrics.jsonl"):
        with contextlib.suppress(OSError, ValueError, IndexError, KeyError, TypeError):
            return int(json.loads(path.read_text().rpartition("\n")[0].splitlines()[-1])["step"])
    return -1
