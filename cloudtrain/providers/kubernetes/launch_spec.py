"""Predict the pods that a request's Job starts, as data for an engine, a rehearsal and the contract suite. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ...provider_api.launch_spec import LaunchRules, LaunchSpec, Mount, NodeSpec
from ...provider_api.protocol import Request
from .node import AGAIN, CLOCK_PATH, FLUSH_PATH, GRACE_PATH, INDEX, LIMIT_PATH
from .request import job_object, volume_url
from .validate import quantity_of

if TYPE_CHECKING:
    from . import Settings

__all__ = ["launch_spec"]

RESTARTS = 1000
"""Restarts of a job by Kubernetes: only the time limit of the run ends them."""


def launch_spec(settings: Settings, request: Request) -> LaunchSpec:
    """Return one node a pod."""
    job = job_object(request)
    name, spec = str(job["metadata"]["name"]), job["spec"]["template"]["spec"]
    container, nodes = spec["containers"][0], int(job["spec"]["completions"])
    limits, words = container["resources"]["limits"], container["args"]
    shm = next(volume["emptyDir"] for volume in spec["volumes"] if volume["name"] == "shm")

    def node(number: int) -> NodeSpec:
        return NodeSpec(
            image=container["image"],
            entrypoint=list(container["command"]),
            command=list(words),
            env={**{item["name"]: item["value"] for item in container["env"]}, INDEX: str(number)},
            mounts=list(_mounts(settings, words)),
            hostname=f"{name}-{number}.{spec['subdomain']}" if nodes > 1 else None,
            gpus=_whole(limits, settings.gpu_resource) or 0,
            cpus=_whole(limits, "cpu"),
            memory=_whole(limits, "memory"),
            shm=_whole(shm, "sizeLimit"),
        )

    rules = LaunchRules(
        time_limit=float(next(word.partition("=")[2] for word in words if word.startswith(f"{LIMIT_PATH}="))),
        restart_on=(AGAIN,),
        max_restarts=RESTARTS,
        preemptions=RESTARTS,
        losses=RESTARTS,
        stop_grace=settings.stop_grace,
    )
    return LaunchSpec(nodes=[node(number) for number in range(nodes)], rules=rules)


def _whole(quantities: Mapping[str, Any], name: str) -> int | None:
    """Return a quantity as a whole number, at least 1; None if it is not set."""
    return math.ceil(quantity_of(quantities[name], name)) if name in quantities else None


def _mounts(settings: Settings, words: list[str]) -> Iterator[Mount]:
    """Yield each file and folder of the command by itself: all are on the nodes' volume."""
    context = words[words.index("--context") + 1]
    paths = {words[1]: "", context: "", f"{context.rpartition('/')[0]}/key": ""}
    pairs = [word.partition("=") for before, word in itertools.pairwise(words) if before == "--path"]
    known = (GRACE_PATH, LIMIT_PATH, CLOCK_PATH, FLUSH_PATH)
    for path, name in [*paths.items(), *((path, name) for name, _, path in pairs if name not in known)]:
        below = path.removeprefix(settings.root)
        url = volume_url(settings) + below if below != path else f"file://{path}"
        yield Mount(url=url, path=path, kind="sync" if name in ("live", "direct") else "mount")
