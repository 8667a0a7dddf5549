"""Predict the pods that a request's Job starts, as data for an engine, a rehearsal and the contract suite. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...provider_api.launch_spec import LaunchSpec, NodeSpec
from ...provider_api.protocol import Request
from .._cloud import shared_mounts, shared_rules
from .node import AGAIN, CLOCK_PATH, INDEX, LIMIT_PATH
from .request import job_object, volume_url

if TYPE_CHECKING:
    from . import Settings

__all__ = ["launch_spec"]

GB = 1000**3


def launch_spec(settings: Settings, request: Request) -> LaunchSpec:
    """Return one node a pod."""
    job = job_object(request)
    name, spec = str(job["metadata"]["name"]), job["spec"]
    service = spec["template"]["spec"]["subdomain"]
    container = spec["template"]["spec"]["containers"][0]
    limits, words, nodes = container["resources"]["limits"], container["args"], int(spec["completions"])
    cores, memory, gpus = limits.get("cpu"), limits.get("memory"), limits.get(settings.gpu_resource, "0")

    def url(path: str) -> str:
        below = path.removeprefix(settings.root)
        return volume_url(settings) + below if below != path else f"file://{path}"

    def node(number: int) -> NodeSpec:
        return NodeSpec(
            image=container["image"],
            entrypoint=list(container["command"]),
            command=list(words),
            env={**{item["name"]: item["value"] for item in container["env"] if "value" in item}, INDEX: str(number)},
            mounts=list(shared_mounts(words[1:], url, (LIMIT_PATH, CLOCK_PATH))),
            hostname=f"{name}-{number}.{service}" if nodes > 1 else None,
            gpus=int(gpus) if str(gpus).isdecimal() else 0,
            cpus=int(cores) if str(cores).isdecimal() else None,
            memory=_bytes(memory),
            shm=_bytes(_shm(job)),
        )

    rules = shared_rules(time_limit=float(_words(words, LIMIT_PATH)), again=AGAIN, stop_grace=settings.stop_grace)
    return LaunchSpec(nodes=[node(number) for number in range(nodes)], rules=rules)


def _shm(job: Any) -> str | None:
    volumes = {volume["name"]: volume for volume in job["spec"]["template"]["spec"]["volumes"]}
    found: str | None = volumes["shm"]["emptyDir"].get("sizeLimit")
    return found


def _bytes(quantity: Any) -> int | None:
    """Return the bytes of a quantity that `request` made, ``16G``; None for any other."""
    text = str(quantity or "")
    return int(text[:-1]) * GB if text.endswith("G") and text[:-1].isdecimal() else None


def _words(words: list[str], name: str) -> str:
    """Return the value of the ``--path`` pair ``name``."""
    return next(word.partition("=")[2] for word in words if word.startswith(f"{name}="))
