"""Requests that a cloud's provider plans for jobs that never run, for its test_…_plan.py."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from cloudtrain.errors import SpecError
from cloudtrain.job.job import Job
from cloudtrain.provider_api.protocol import Layout, LayoutInput, Request

__all__ = ["PROVIDERS", "STORES", "Plans", "sample_plans"]

PROVIDERS = ("local", "docker", "sagemaker", "azureml", "vertex")
STORES = {"sagemaker": "s3://b/s", "azureml": "abfs://c@acct.dfs.core.windows.net/s", "vertex": "gs://b/s"}


@dataclass(frozen=True)
class Plans:
    """Plans of ``provider`` with ``settings``, in a store at ``store``; every job has ``fields``."""

    provider: Callable[..., Any]
    settings: Mapping[str, Any]
    store: str
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def layout(self, **change: Any) -> Layout:
        base = Layout(store=self.store, run_id="r", code_digest="c" * 64, runtime_digest="d" * 64)
        return dataclasses.replace(base, **change)

    def planned(
        self, given: Mapping[str, Any] | None = None, /, *, attempt: int = 0, gpu_index: int = 0, **fields: Any
    ) -> Request:
        """Return the request of a job. ``given`` adds settings (and ``store``). Inputs are where a store would put
        them."""
        job = Job.make(**{"entry_point": "train.py", **self.fields, **fields})
        last = {name: item.url.rpartition("/")[2] for name, item in job.inputs.items()}
        inputs = {
            name: LayoutInput(
                url=item.url, file=last[name] if "." in last[name] else None, mode=item.mode, shard=item.shard
            )
            for name, item in job.inputs.items()
        }
        changed = dict(given or {})
        there = {"store": store} if (store := changed.pop("store", None)) else {}
        provider = self.provider(**{**self.settings, **changed})
        where = self.layout(inputs=inputs, resume=job.resume_from, **there)
        request: Request = provider.plan(job, where, attempt=attempt, gpu_index=gpu_index)
        return request

    def refused(self, given: Mapping[str, Any] | None = None, /, **fields: Any) -> SpecError:
        """Return the error that refuses such a job."""
        with pytest.raises(SpecError) as caught:
            self.planned(given, **fields)
        assert "\n" not in str(caught.value)
        return caught.value


def sample_plans(name: str) -> Plans:
    """Return the plans of a provider with the settings and the job of its ``SAMPLE``."""
    module = importlib.import_module(f"cloudtrain.providers.{name}")
    store = STORES.get(name, "file:///store")
    return Plans(module.Provider, module.SAMPLE.get("settings", {}), store, module.SAMPLE.get("job", {}))
