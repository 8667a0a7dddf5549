"""The fake cluster as the platform of the contract suite."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.provider_api.protocol import Request
from cloudtrain.provider_api.registry import find_provider
from cloudtrain.providers.kubernetes.request import job_object
from cloudtrain.runs.run import Run
from cloudtrain.testing.platform import FakePlatform
from cloudtrain.testing.tables import Fields

from ..bucket import MountedBucket
from .cluster import Cluster
from .life import Job

__all__ = ["BucketWorld", "KubernetesWorld", "idle"]


class KubernetesWorld(FakePlatform):
    """A `Cluster` whose shared volume is ``folder``. ``image`` is an image of this machine's engine."""

    def __init__(self, folder: Path, *, image: str, **settings: Any) -> None:
        self.plane = plane = Cluster(folder / "cluster", volume=self.volume(folder))
        self.image = image
        self.settings = {
            "kubeconfig": str(plane.kubeconfig),
            "namespace": "team",
            "claim": "training",
            "root": str(folder),
            "spot": "gke",
            "hami": {"gpu_scheduler_policy": "spread"},
            "prices": {"node": 2.0, "a2-highgpu-1g": 4.0},
            **settings,
        }
        made = find_provider("kubernetes")(**self.settings)
        store = f"{settings.get('bucket') or folder.as_uri()}/store"
        super().__init__(folder, provider=made, store=store, nowhere="team/ct-nowhere-0")

    def volume(self, folder: Path) -> Path:
        """Return the folder behind the cluster's claim."""
        return folder

    def close(self) -> None:
        self.plane.close()

    def plan(self, *parts: Fields, run_id: str = "contract") -> Any:
        return super().plan({"image": self.image}, *parts, run_id=run_id)

    def check(self, request: Request) -> None:
        super().check(request)
        made = request.body["items"][0]
        path = f"/apis/{made['apiVersion']}/namespaces/{made['metadata']['namespace']}/{made['kind'].lower()}s"
        self.plane.handle("POST", path, {"dryRun": "All", "fieldValidation": "Strict"}, made)

    def named_by_options(self, request: Request) -> Any:
        return {"items": [job_object(request)]}

    @contextlib.contextmanager
    def node(self, request: Request, number: int) -> Iterator[Mapping[str, str]]:
        container = job_object(request)["spec"]["template"]["spec"]["containers"][0]
        env = {item["name"]: item.get("value", "node-a") for item in container["env"]}
        yield {**env, "JOB_COMPLETION_INDEX": str(number)}

    def job(self, run: Run, attempt: int = 0) -> Job:
        """Return an attempt's Job, once its JobSet has created it."""
        submitted = run.store.submitted(run.run_id, attempt)
        assert submitted is not None
        key, until = self.key(str(submitted["native_id"])), time.monotonic() + 60
        while key not in self.plane.jobs and time.monotonic() < until:
            self.provider.status(str(submitted["native_id"]))  # its controller acts at any call
            time.sleep(0.1)
        return self.plane.jobs[key]

    def key(self, native_id: str) -> tuple[str, str]:
        namespace, _, name = native_id.partition("/")
        return namespace, name

    def preempt(self, run: Run, number: int) -> None:
        self.job(run).evict(number)

    def kill(self, run: Run, number: int) -> None:
        self.job(run).kill(number)

    @contextlib.contextmanager
    def fault(self, category: str) -> Iterator[Fields]:
        plane = self.plane
        if category == "capacity":
            plane.no_capacity = True
            yield {"max_wait": 1}
            plane.no_capacity = False
        elif category == "quota":
            plane.quota = True
            yield {}
            plane.quota = False
        elif category == "auth":
            plane.denied |= {"POST jobs", "POST jobsets"}
            yield {}
            plane.denied.clear()
        else:
            yield {"image": "team/none:1"}


@contextlib.contextmanager
def idle(folder: Path, patch: pytest.MonkeyPatch, **settings: Any) -> Iterator[KubernetesWorld]:
    """Give a cluster without machines, so no container starts. No variable leads to another cluster."""
    for name in [name for name in os.environ if name.startswith("KUBE")]:
        patch.delenv(name)
    world = KubernetesWorld(folder, image="team/none:1", **settings)
    world.plane.no_capacity = True
    try:
        yield world
    finally:
        world.close()


class BucketWorld(KubernetesWorld):
    """A cluster whose claim is a `MountedBucket`."""

    def __init__(self, folder: Path, *, image: str, root: str = "/mnt/bucket") -> None:
        self._bucket = MountedBucket(folder)
        super().__init__(folder, image=image, bucket=self._bucket.url, root=root)
        self.google = self._bucket.google
        self.plane.environment = self.google.environ()

    def volume(self, folder: Path) -> Path:
        return self._bucket.place

    def close(self) -> None:
        super().close()
        self._bucket.close()
