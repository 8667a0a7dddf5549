"""Predict Azure ML's containers for a request, as data for an engine, a FakePlatform and the contract suite. Pure.

The folders come from public traces. Cloudtrain does not rely on them: the command line names every one.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ...provider_api import catalog
from ...provider_api.launch_spec import LaunchRules, LaunchSpec, Mount, NodeSpec
from ...provider_api.protocol import Request
from .._cloud import size_of
from . import NAME
from .node import GRACE
from .urls import for_fsspec

if TYPE_CHECKING:
    from . import Settings

ROOT = "/mnt/azureml/cr/j"
PORT = 6105
"""MASTER_PORT, by the documents of Azure ML's first SDK."""
_PLACEHOLDER = re.compile(r"\$\{\{(inputs|outputs)\.(\w+)\}\}")
_KINDS = {"download": "copy", "ro_mount": "mount", "rw_mount": "sync"}
_UNITS = {"b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


def launch_spec(settings: Settings, request: Request) -> LaunchSpec:
    """Return one container an instance."""
    body = request.body
    resources, job = body["resources"], body["name"]
    root = f"{ROOT}/{job}"
    paths, mounts = _places(body, f"{root}/cap/data-capability/wd", request.run, settings.datastore)
    # The shell replaces itself with the command in the line.
    line = _PLACEHOLDER.sub(lambda match: paths[match[1], match[2]], body["command"])
    words = shlex.split(line.removeprefix("exec "))
    machine = catalog.machine(NAME, resources["instance_type"]) if "instance_type" in resources else None
    environment, count = body["environment"], resources["instance_count"]
    hosts = [f"node-{number}" for number in range(count)]
    specs = [
        NodeSpec(
            image=environment["image"] if isinstance(environment, Mapping) else environment,
            entrypoint=words[:1],
            command=words[1:],
            env={**body["environment_variables"], "AZUREML_RUN_ID": job, **_topology(body, number, hosts)},
            mounts=mounts,
            workdir=f"{root}/exe/wd",
            hostname=host,
            **size_of(machine),
            shm=int(resources["shm_size"][:-1]) * _UNITS[resources["shm_size"][-1]],
        )
        for number, host in enumerate(hosts)
    ]
    return LaunchSpec(nodes=specs, rules=LaunchRules(time_limit=body["limits"]["timeout"], stop_grace=GRACE))


def _topology(body: Mapping[str, Any], number: int, hosts: list[str]) -> dict[str, str]:
    """Return the variables of a PyTorch distribution with one process a node; empty for other jobs.

    By Azure ML's page on distributed training. torchrun sets them again for its ranks.
    """
    if "distribution" not in body:
        return {}
    words = {"MASTER_ADDR": hosts[0], "MASTER_PORT": str(PORT), "NODE_RANK": str(number)}
    return {**words, "WORLD_SIZE": str(len(hosts)), "RANK": str(number), "LOCAL_RANK": "0"}


def _places(
    body: Mapping[str, Any], root: str, run: str, datastore: str
) -> tuple[dict[tuple[str, str], str], list[Mount]]:
    """Return the path of each placeholder, and the mounts there."""
    paths, mounts = {}, []
    for kind in ("inputs", "outputs"):
        for name, item in body[kind].items():
            url = for_fsspec(item["path"], run=run, datastore=datastore)
            path = f"{root}/{name}" + (f"/{url.rpartition('/')[2]}" if item["type"] == "uri_file" else "")
            paths[kind, name] = path
            mounts.append(Mount(url=url, path=path, kind=_KINDS[item["mode"]]))
    return paths, mounts
