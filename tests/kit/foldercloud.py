"""A platform in a folder, for trials with many real clients and no engine: a native job is a file, created once.

It starts nothing: a test sets the state of a job. A job may wait for ever. `install` registers it as a third party's
provider.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from cloudtrain.errors import AuthError, CapacityError, NotFoundError, QuotaError, SpecError
from cloudtrain.job.job import Job
from cloudtrain.provider_api.launch_spec import LaunchRules, LaunchSpec, NodeSpec
from cloudtrain.provider_api.node import NodeEnvironment, Topology
from cloudtrain.provider_api.protocol import AttemptInfo, Layout, LogPage, ProviderExtras, Request, Status, context_of

NAME = "foldercloud"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """``folder`` holds the jobs."""

    folder: str = field(default="", metadata={"place": True})


class Provider(ProviderExtras):
    """A provider whose jobs are files; see `cloudtrain.provider_api.protocol.Provider`."""

    name: ClassVar[str] = NAME
    Settings: ClassVar[type[Any]] = Settings
    schemes: ClassVar[frozenset[str]] = frozenset({"file"})
    retried_by: ClassVar[str] = "client"
    max_wait_by: ClassVar[str] = "client"
    min_poll_s: ClassVar[float] = 0.01
    max_poll_s: ClassVar[float] = 0.05

    def __init__(self, **settings: Any) -> None:
        self.settings = Settings(**settings)

    def plan(self, job: Job, layout: Layout, attempt: int = 0, gpu_index: int = 0) -> Request:
        context = context_of(NAME, job, layout, processes=job.resources.processes(gpu_index))
        body = {"job": f"{layout.run_id}.{attempt}", "seconds": job.max_runtime, "origin": dict(layout.origin)}
        return Request(
            provider=NAME,
            operation="write",
            body=body,
            context=context,
            run=layout.run,
            attempt=attempt,
            gpu_index=gpu_index,
        )

    def store_url(self, url: str, *, ask: bool) -> str:
        """Return the folder of ``foldercloud://NAME``, next to the jobs. It acts as if the platform must be asked."""
        if not ask:
            raise SpecError(f"a plan asks nobody where {url} is", field="store")
        return f"file://{self.settings.folder}-{url.partition('://')[2]}"

    def _job(self, native_id: str) -> Path:
        return Path(self.settings.folder) / native_id

    def submit(self, request: Request, secrets: Mapping[str, str] | None = None) -> str:
        path = self._job(str(request.body["job"]))
        refusal = self._job(f".refuses-{request.gpu_index}")
        if refusal.exists() and not path.exists():
            category, _, reason = refusal.read_text().partition(": ")
            raise {"quota": QuotaError, "capacity": CapacityError, "user_error": SpecError}[category](reason)
        temp = self._job(f".{path.name}.{os.getpid()}-{threading.get_ident()}")
        temp.write_text(json.dumps({"state": "pending"}))
        with contextlib.suppress(FileExistsError):  # the file is of this same attempt
            os.link(temp, path)  # at once: a client that is killed now leaves a whole file or none
        temp.unlink()
        while self._job(".slow").exists():  # the answer takes its time
            time.sleep(0.02)
        return path.name

    def find(self, request: Request) -> str | None:
        path = self._job(str(request.body["job"]))
        return path.name if path.exists() else None

    def status(self, native_id: str) -> Status:
        try:
            data = json.loads(self._job(native_id).read_text())
            while self._job(".asked-slowly").exists():
                time.sleep(0.02)
        except (OSError, ValueError):  # also for a name that no file can have
            raise NotFoundError(f"no job {native_id[:80]}") from None
        if "refused" in data:
            raise AuthError(data["refused"])
        attempts = tuple(AttemptInfo(**item) for item in data.pop("attempts", ()))
        return Status(native=data["state"], attempts=attempts, **data)

    def logs(self, native_id: str, cursor: Any = None) -> LogPage:
        return LogPage(lines=(), cursor=None)

    def cancel(self, native_id: str) -> None:
        if not self.status(native_id).final:
            self.stand(native_id, state="cancelled", category="cancelled", reason="it was stopped")

    def storage(self, url: str) -> dict[str, Any]:
        return {}

    def stand(self, native_id: str, **status: Any) -> None:
        """Set the state of the job."""
        temp = self._job(f".{native_id}.{os.getpid()}")
        temp.write_text(json.dumps(status))
        temp.replace(self._job(native_id))

    def refuse(self, category: str = "", reason: str = "there is none", *, gpu_index: int = 0) -> None:
        """Refuse requests for that GPU of the list, without creating a job. Without a category, accept them again."""
        path = self._job(f".refuses-{gpu_index}")
        path.write_text(f"{category}: {reason}") if category else path.unlink()

    def alive(self) -> list[str]:
        """Return the native ids of all jobs that are not final."""
        return [name for name in self.jobs() if not self.status(name).final]

    def jobs(self) -> list[str]:
        """Return the native ids of all jobs."""
        return sorted(path.name for path in Path(self.settings.folder).glob("[!.]*"))

    @staticmethod
    def node_environment(environ: Mapping[str, str], argv: Mapping[str, str]) -> NodeEnvironment:
        """Return an environment without content: no node ever starts."""
        return NodeEnvironment(
            topology=Topology(nodes=1, node_rank=0, master_addr="", master_port=1), paths={}, scratch=()
        )

    def launch_spec(self, request: Request) -> LaunchSpec:
        return LaunchSpec(nodes=(NodeSpec(command=()),), rules=LaunchRules(time_limit=float(request.body["seconds"])))


def install(site: Path) -> None:
    """Register the provider for processes with ``site`` on ``sys.path``."""
    info = site / "foldercloud-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: foldercloud\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[cloudtrain.providers]\n{NAME} = foldercloud:Provider\n")
    (site / "foldercloud.py").write_text(Path(__file__).read_text())
