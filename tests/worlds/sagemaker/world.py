"""SageMaker as a FakePlatform of the contract suite: real boto3, loopback servers, jobs in containers here."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cloudtrain.provider_api.launch_spec import LaunchSpec
from cloudtrain.provider_api.protocol import Request
from cloudtrain.provider_api.registry import find_provider
from cloudtrain.runs.run import Run
from cloudtrain.testing.platform import FakePlatform
from cloudtrain.testing.tables import SECRET, Fields

from .instances import configuration, differences, hosts, reading
from .life import TrainingJob
from .plane import REGION, REGISTRY, Plane
from .strict import broken_rules, model_errors
from .wire import ACCOUNT, Fault

__all__ = ["SageMakerWorld"]

ROLE = "training"


class SageMakerWorld(FakePlatform):
    """A `Plane` with a role, a bucket and a secret. ``image`` is an image of this machine's engine, for all jobs.

    Keep the environment of `Plane.environ` while you use it. ``settings`` are further settings of the provider.
    """

    def __init__(self, folder: Path, *, moto: str, image: str, runs: bool = True, **settings: Any) -> None:
        self.plane = Plane(folder / "aws", moto=moto, nodes=self._nodes, runs=runs)
        self.image = f"{REGISTRY}/{image}"
        role = self.plane.make_role(ROLE)
        bucket = self.plane.make_bucket(f"contract-{uuid.uuid4().hex[:12]}")
        made = find_provider("sagemaker")(**{"region": REGION, "role": role, **settings})
        nowhere = f"arn:aws:sagemaker:{REGION}:{ACCOUNT}:training-job/none"
        super().__init__(folder, provider=made, store=f"{bucket}/store", nowhere=nowhere)
        self.plane.roles.values[self.place.secret.removeprefix("aws:")] = SECRET

    def _nodes(self, body: Mapping[str, Any]) -> LaunchSpec:
        """Return the provider's LaunchSpec of a request. Only the body has come over the wire."""
        run = body["CheckpointConfig"]["S3Uri"].rstrip("/").removesuffix("/live")
        return self.provider.launch_spec(Request(provider="sagemaker", operation="", body=body, context={}, run=run))

    def close(self) -> None:
        """End all jobs and servers."""
        self.plane.close()

    def plan(self, *parts: Fields, run_id: str = "contract") -> Any:
        spot = {"spot": True} if run_id == "preempted" else {}  # the platform takes no other machines back
        return super().plan({"image": self.image, **spot}, *parts, run_id=run_id)

    def check(self, request: Request) -> None:
        super().check(request)
        problems = model_errors("CreateTrainingJob", request.body) or broken_rules(request.body)
        problems += differences(reading(request.body), self.provider.launch_spec(request))
        assert not problems, "\n".join(problems)

    @contextlib.contextmanager
    def node(self, request: Request, number: int) -> Iterator[Mapping[str, str]]:
        root = self.folder / "nodes" / uuid.uuid4().hex / "opt" / "ml"
        spec = self.provider.launch_spec(request).nodes[number]
        assert spec.hostname in hosts(len(self.provider.launch_spec(request).nodes))
        for path, text in configuration(request.body, str(spec.hostname)).items():
            file = root / path.removeprefix("/opt/ml/")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        yield {**spec.env, "SAGEMAKER_BASE_DIR": str(root)}

    def job(self, run: Run, attempt: int = 0) -> TrainingJob:
        """Return the training job of one attempt of a run."""
        submitted = run.store.submitted(run.run_id, attempt)
        assert submitted is not None
        return self.plane.job(str(submitted["native_id"]).rpartition("/")[2])

    def preempt(self, run: Run, number: int) -> None:
        self.job(run).interrupt(number)

    def kill(self, run: Run, number: int) -> None:
        self.job(run).lose(number, for_good=True)

    @contextlib.contextmanager
    def fault(self, category: str) -> Iterator[Fields]:
        plane, kind = self.plane, "ml.m5.xlarge"
        if category == "capacity":
            plane.no_capacity.add(kind)
            yield {"instance_type": kind}
            plane.no_capacity.remove(kind)
        elif category == "quota":
            plane.quotas[kind] = 0
            yield {"instance_type": kind}
            del plane.quotas[kind]
        elif category == "auth":
            role = str(self.provider.settings.role)
            plane.wire.faults.append(Fault.denied("CreateTrainingJob", "iam:PassRole", role, times=1000))
            yield {}
            plane.wire.faults.clear()
        else:
            yield {"image": f"{REGISTRY}/team/none:1"}
