"""Vertex AI as a FakePlatform of the contract suite: Google's clients, loopback servers, jobs in containers here."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cloudtrain.provider_api.protocol import Request
from cloudtrain.provider_api.registry import find_provider
from cloudtrain.runs.run import Run
from cloudtrain.testing.platform import FakePlatform
from cloudtrain.testing.tables import SECRET, Fields

from .life import CustomJob
from .plane import Plane
from .replicas import differences, reading
from .strict import broken_rules, model_errors, parsed
from .wire import Fault, Refusal

__all__ = ["VertexWorld"]

BUCKET = "contract-bucket"


class VertexWorld(FakePlatform):
    """A `Plane` with a bucket, a service account and a secret. ``image`` is an image of this machine's engine.

    Keep the environment of `Plane.environ` while you use it. ``settings`` are further settings of the provider.
    """

    def __init__(self, folder: Path, *, image: str, **settings: Any) -> None:
        self.plane = plane = Plane(folder / "google")
        self.image = image
        account = f"trainer@{plane.project}.iam.gserviceaccount.com"
        plane.accounts.add(account)
        plane.gcs.make(BUCKET)
        self.settings = {
            "project": plane.project,
            "location": plane.location,
            "service_account": account,
            "log_drain": 2,
            **settings,
        }
        made = find_provider("vertex")(**self.settings)
        store, nowhere = f"gs://{BUCKET}/store", f"{plane.parent}/customJobs/1"
        super().__init__(folder, provider=made, store=store, nowhere=nowhere)
        plane.identity.values[self.place.secret.removeprefix("gcp:")] = SECRET
        plane.identity.readers.add(account)

    def close(self) -> None:
        """End all jobs and servers."""
        self.plane.close()

    def plan(self, *parts: Fields, run_id: str = "contract") -> Any:
        spot = {"spot": True} if run_id == "preempted" else {}  # the platform takes no other machines back
        return super().plan({"image": self.image, **spot}, *parts, run_id=run_id)

    def check(self, request: Request) -> None:
        super().check(request)
        problems = model_errors(request.body) or broken_rules(parsed(request.body))
        problems += differences(request.body, self.provider.launch_spec(request))
        assert not problems, "\n".join(problems)

    @contextlib.contextmanager
    def node(self, request: Request, number: int) -> Iterator[Mapping[str, str]]:
        yield reading(f"{self.plane.parent}/customJobs/1", parsed(request.body)).nodes[number].env

    def job(self, run: Run, attempt: int = 0) -> CustomJob:
        """Return the custom job of one attempt of a run."""
        submitted = run.store.submitted(run.run_id, attempt)
        assert submitted is not None
        return self.plane.job(str(submitted["native_id"]))

    def preempt(self, run: Run, number: int) -> None:
        self.job(run).preempt(number)

    def kill(self, run: Run, number: int) -> None:
        self.job(run).lose(number, for_good=True)

    @contextlib.contextmanager
    def fault(self, category: str) -> Iterator[Fields]:
        plane = self.plane
        if category == "capacity":
            plane.no_capacity = True
            yield {}
            plane.no_capacity = False
        elif category == "quota":
            plane.quotas["custom_model_training_cpus"] = 0
            yield {}
            plane.quotas.clear()
        elif category == "auth":
            resource = f"//aiplatform.googleapis.com/{plane.parent}"
            refused = Refusal.denied("aiplatform.customJobs.create", resource)
            plane.wire.faults.append(Fault("POST customJobs", refused, times=1000))
            yield {}
            plane.wire.faults.clear()
        else:
            yield {"image": "team/none:1"}
