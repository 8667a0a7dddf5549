"""Predict the pods that a request's Job starts, as data for an engine, a rehearsal and the contract suite. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ...provider_api.launch_spec import LaunchSpec
from ...provider_api.protocol import Request
from .._cloud import pairs_of, shared_launch_spec
from .node import AGAIN, CLOCK_PATH, INDEX, LIMIT_PATH
from .request import job_object, mounts
from .validate import quantity_of

if TYPE_CHECKING:
    from . import Settings


def launch_spec(settings: Settings, request: Request) -> LaunchSpec:
    """Return one node a pod."""
    job = job_object(request)
    name, spec = job["metadata"]["name"], job["spec"]["template"]["spec"]
    container, nodes = spec["containers"][0], int(job["spec"]["completions"])
    limits, words = container["resources"]["limits"], container["args"]
    shm = next(volume["emptyDir"] for volume in spec["volumes"] if volume["name"] == "shm")
    return shared_launch_spec(
        settings,
        words,
        mounts(settings),
        (LIMIT_PATH, CLOCK_PATH),
        hosts=[f"{name}-{number}.{spec['subdomain']}" for number in range(nodes)],
        rank=INDEX,
        time_limit=float(pairs_of(words)[LIMIT_PATH]),
        again=AGAIN,
        image=container["image"],
        entrypoint=list(container["command"]),
        env={item["name"]: item["value"] for item in container["env"] if "value" in item},
        gpus=_whole(limits, settings.gpu_resource) or 0,
        cpus=_whole(limits, "cpu"),
        memory=_whole(limits, "memory"),
        shm=_whole(shm, "sizeLimit"),
    )


def _whole(quantities: Mapping[str, Any], name: str) -> int | None:
    """Return a quantity as a whole number, at least 1; None if it is not set."""
    return math.ceil(quantity_of(quantities[name], name)) if name in quantities else None
