"""Azure ML as a FakePlatform of the contract suite: real azure-ai-ml, loopback servers, jobs in containers here."""

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

from .blobs import place
from .hosts import differences, reading
from .life import CommandJob
from .plane import SUBSCRIPTION, Plane
from .strict import broken_rules, model_errors
from .wire import Fault

__all__ = ["AzureMLWorld"]


class AzureMLWorld(FakePlatform):
    """A `Plane` with a container and a secret. ``image`` is an image of this machine's engine, for all jobs.

    Keep the environment of `Plane.environ` while you use it. ``settings`` are further settings of the provider.
    """

    def __init__(self, folder: Path, *, azurite: str, image: str, runs: bool = True, **settings: Any) -> None:
        self.plane = Plane(folder / "azure", azurite=azurite, curated=image, runs=runs)
        self.image = image
        self.settings = {**self.workspace(), **settings}
        made = find_provider("azureml")(**self.settings)
        store = f"abfs://{self.plane.container}/store"
        super().__init__(folder, provider=made, store=store, nowhere=f"{self.plane.id}/jobs/none")
        vault, _, name = self.place.secret.removeprefix("azure:").partition("/")
        self.plane.secrets[vault, name] = SECRET

    def workspace(self) -> dict[str, Any]:
        """Return the provider's settings for this workspace."""
        subscription, group, workspace = self.plane.scope
        return {
            "subscription_id": subscription,
            "resource_group": group,
            "workspace_name": workspace,
            "ssh_public_key": "ssh-ed25519 AAAA world",
            "cloud": self.plane.cloud,
            "cloud_metadata": self.plane.metadata,
        }

    def close(self) -> None:
        """End all jobs and servers."""
        self.plane.close()

    def plan(self, *parts: Fields, run_id: str = "contract") -> Any:
        spot = {"spot": True} if run_id == "preempted" else {}  # the platform takes no other machines back
        limit = {"max_runtime": 60} if run_id == "timeout" else {}  # the service refuses less
        plan = super().plan({"image": self.image, **spot}, *parts, limit, run_id=run_id)
        if limit:
            self.plane.paces[str(plan.request.body["name"])] = 30.0
        return plan

    def check(self, request: Request) -> None:
        super().check(request)
        name, body = self.serialised(request)
        problems = model_errors(body) or broken_rules(name, body)
        image = request.body["environment"]
        ours = reading(name, body, image["image"] if isinstance(image, Mapping) else image)
        problems += differences(ours, self.provider.launch_spec(request), self._place)
        assert not problems, "\n".join(problems)

    def _place(self, url: str) -> tuple[str, str]:
        return place(url, self.plane.blobs.containers)

    def serialised(self, request: Request) -> tuple[str, Mapping[str, Any]]:
        """Return (name, body) as azure-ai-ml itself serialises the request."""
        import io
        import json

        from azure.ai.ml import load_job
        from azure.ai.ml._restclient.arm_ml_service._utils.model_base import SdkJSONEncoder

        made: Any = load_job(io.StringIO(json.dumps(request.body)))
        made = made._to_job() if hasattr(made, "_to_job") else made
        made.environment = f"{self.plane.id}/environments/any/versions/1"
        if made.compute:
            made.compute = f"{self.plane.id}/computes/{made.compute}"
        body = json.loads(json.dumps(made._to_rest_object(), cls=SdkJSONEncoder, exclude_readonly=True))
        return str(made.name), body

    @contextlib.contextmanager
    def node(self, request: Request, number: int) -> Iterator[Mapping[str, str]]:
        name, body = self.serialised(request)
        yield reading(name, body, self.image).nodes[number].env

    def job(self, run: Run, attempt: int = 0) -> CommandJob:
        """Return the command job of one attempt of a run."""
        submitted = run.store.submitted(run.run_id, attempt)
        assert submitted is not None
        return self.plane.job(str(submitted["native_id"]).rpartition("/")[2])

    def preempt(self, run: Run, number: int) -> None:
        self.plane.restarts = True  # as documented
        self.job(run).preempt(number)

    def kill(self, run: Run, number: int) -> None:
        self.job(run).lose(number)

    @contextlib.contextmanager
    def fault(self, category: str) -> Iterator[Fields]:
        plane, kind = self.plane, "Standard_DS3_v2"
        if category == "capacity":
            plane.no_capacity = True
            yield {"max_wait": 1}
            plane.no_capacity = False
        elif category == "quota":
            plane.quotas[kind] = 0
            yield {"instance_type": kind}
            del plane.quotas[kind]
        elif category == "auth":
            action = "Microsoft.MachineLearningServices/workspaces/jobs/write"
            plane.wire.faults.append(Fault.denied("PUT job", action, f"/subscriptions/{SUBSCRIPTION}", times=1000))
            yield {}
            plane.wire.faults.clear()
        else:
            yield {"image": "team/none:1"}
