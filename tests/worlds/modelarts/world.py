"""ModelArts as a FakePlatform of the contract suite: loopback servers, jobs in containers of uid 1000."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from huawei import body_errors

from cloudtrain.provider_api.protocol import Request
from cloudtrain.provider_api.registry import find_provider
from cloudtrain.providers.modelarts import SAMPLE
from cloudtrain.runs.run import Run
from cloudtrain.testing.platform import FakePlatform, Impossible
from cloudtrain.testing.tables import Fields

from ..base import Fault
from .life import TrainingJob, differences, reading
from .plane import PROJECT, REGION, Plane, refusal

__all__ = ["ModelArtsWorld"]

BUCKET, IMAGE = "contract-bucket", "team/trainer:1"


class ModelArtsWorld(FakePlatform):
    """A `Plane` with a bucket. ``image`` is an image of this machine's engine. Keep the environment of `Plane.environ`
    while you use it. ``settings`` are further settings of the provider."""

    def __init__(self, folder: Path, *, image: str, **settings: Any) -> None:
        self.plane = plane = Plane(folder / "huawei")
        self.image = IMAGE
        plane.images[IMAGE] = image
        plane.obs.make(BUCKET)
        own = {**SAMPLE["settings"], "region": REGION, "project_id": PROJECT, "log_drain": 1}
        self.settings = {**own, **settings}
        made = find_provider("modelarts")(**self.settings)
        nowhere = f"{REGION}/{PROJECT}/00000000-0000-0000-0000-000000000000"
        super().__init__(folder, provider=made, store=f"obs://{BUCKET}/store", nowhere=nowhere)

    def close(self) -> None:
        """End all jobs and servers."""
        self.plane.close()

    def plan(self, *parts: Fields, run_id: str = "contract") -> Any:
        return super().plan({"image": IMAGE}, *parts, run_id=run_id)

    def check(self, request: Request) -> None:
        super().check(request)
        problems = body_errors(request.body) + differences(request.body, self.provider.launch_spec(request))
        assert not problems, "\n".join(problems)

    @contextlib.contextmanager
    def node(self, request: Request, number: int) -> Iterator[Mapping[str, str]]:
        yield reading("1", request.body).nodes[number].env

    def job(self, run: Run, attempt: int = 0) -> TrainingJob:
        """Return the job of one attempt of a run."""
        submitted = run.store.submitted(run.run_id, attempt)
        assert submitted is not None
        return self.plane.job(str(submitted["native_id"]))

    def preempt(self, run: Run, number: int) -> None:
        self.job(run).fault(number)

    def kill(self, run: Run, number: int) -> None:
        self.job(run).lose(number)

    def fault(self, category: str) -> contextlib.AbstractContextManager[Fields]:
        if category == "capacity":
            raise Impossible("a job waits for machines until max_wait ends it; ModelArts itself never does")
        return self._fault(category)

    @contextlib.contextmanager
    def _fault(self, category: str) -> Iterator[Fields]:
        plane = self.plane
        if category == "quota":
            plane.quota = 0
            yield {}
            plane.quota = 100
        elif category == "auth":
            denied = refusal(403, "ModelArts.0010", "The user has no permission modelarts:trainJob:create")
            plane.wire.faults.append(Fault("create", denied, times=1000))
            yield {}
            plane.wire.faults.clear()
        else:
            yield {"image": "team/none:1"}
