"""Azure ML's view of a job's nodes, read from its pages for tests and independent of cloudtrain's provider.

`reading` returns the LaunchSpec of the body of ``PUT …/jobs/{name}``; `differences` compares it with another one. Paths
on nodes come from public traces (unverified), so no test may depend on them.
"""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Callable, Mapping
from typing import Any

from cloudtrain.provider_api.launch_spec import LaunchRules, LaunchSpec, Mount, NodeSpec

from .strict import seconds_of

__all__ = ["GRACE", "MASTER_PORT", "differences", "reading"]

GRACE = 30.0
"""Seconds between SIGTERM and SIGKILL: documented for a spot machine, unverified for jobs."""
MASTER_PORT = 6105
SHELL = ["/bin/sh", "-c"]
NO_LIMIT = 30 * 86400.0
"""Time limit of a job that sets none."""
SHM = {"b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
MODES = {"ReadOnlyMount": "mount", "Download": "copy", "ReadWriteMount": "sync", "Upload": "sync"}
_PLACEHOLDER = re.compile(r"\$\{\{\s*(inputs|outputs)\.([A-Za-z0-9_]+)\s*\}\}")
PLATFORM = re.compile(r"(AZUREML|AZ_BATCH|AZURE_ML)_.*|RANK|LOCAL_RANK|WORLD_SIZE")
"""Variables that the platform adds, so a provider need not name them."""


def reading(name: str, body: Mapping[str, Any], image: str, *, default_output: str = "") -> LaunchSpec:
    """Return what the platform starts for a job, from ``image``. Outputs without a path go to ``default_output``."""
    job = body["properties"]
    resources = job.get("resources") or {}
    count = int(resources.get("instanceCount") or 1)
    root = f"/mnt/azureml/cr/j/{hashlib.sha256(name.encode()).hexdigest()[:32]}"
    mounts, words = _mounts(job, f"{root}/cap/data-capability/wd", default_output)
    command = _PLACEHOLDER.sub(lambda match: words[match[1], match[2]], job["command"])
    names = [f"{hashlib.sha256(name.encode()).hexdigest()[:12]}{number:06}" for number in range(count)]
    size = str(resources.get("shmSize") or "2g").lower()
    nodes = [
        NodeSpec(
            image=image,
            entrypoint=SHELL,
            command=[command],
            env={**(job.get("environmentVariables") or {}), **_platform(job, name, number, names)},
            mounts=mounts,
            workdir=f"{root}/exe/wd",
            hostname=host,
            shm=int(size[:-1]) * SHM[size[-1]],
        )
        for number, host in enumerate(names)
    ]
    timeout = (job.get("limits") or {}).get("timeout")
    limit = seconds_of(timeout) if timeout else NO_LIMIT
    return LaunchSpec(nodes=nodes, rules=LaunchRules(time_limit=limit, stop_grace=GRACE))


def _mounts(job: Mapping[str, Any], root: str, default: str) -> tuple[list[Mount], dict[tuple[str, str], str]]:
    """Return the mounts of inputs and outputs, and the values of the command's placeholders."""
    mounts: list[Mount] = []
    words: dict[tuple[str, str], str] = {}
    for name, item in (job.get("inputs") or {}).items():
        if item["jobInputType"] == "literal":
            words["inputs", name] = item["value"]
            continue
        path, url = f"{root}/INPUT_{name}", item["uri"]
        if item["jobInputType"] == "uri_file":
            path = f"{path}/{url.rstrip('/').rpartition('/')[2]}"
        words["inputs", name] = path if item.get("mode") != "Direct" else url
        if item.get("mode") != "Direct":
            mounts.append(Mount(url=url, path=path, kind=MODES[item.get("mode") or "ReadOnlyMount"]))
    for name, item in (job.get("outputs") or {}).items():
        path, url = f"{root}/{name}", item.get("uri") or f"{default}{name}/"
        words["outputs", name] = path if item.get("mode") != "Direct" else url
        if item.get("mode") != "Direct":
            mounts.append(Mount(url=url, path=path, kind=MODES[item.get("mode") or "ReadWriteMount"]))
    return mounts, words


def _platform(job: Mapping[str, Any], name: str, number: int, names: list[str]) -> dict[str, str]:
    """Return the platform's variables of one node. Without a distribution, a node does not learn of the other nodes."""
    env = {
        "AZUREML_RUN_ID": name,
        "AZUREML_EXPERIMENT_NAME": job.get("experimentName") or "Default",
        "AZUREML_NODE_COUNT": str(len(names)),
        "AZUREML_CR_NODE_RANK": str(number),
    }
    if (job.get("distribution") or {}).get("distributionType") == "PyTorch":
        env |= {
            "MASTER_ADDR": names[0],
            "MASTER_PORT": str(MASTER_PORT),
            "NODE_RANK": str(number),
            "RANK": str(number),
            "LOCAL_RANK": "0",
            "WORLD_SIZE": str(len(names)),
        }
    return env


# -------------------------------------------------------------------------------------------------------- comparisons


def differences(ours: LaunchSpec, theirs: LaunchSpec, place: Callable[[str], tuple[str, str]]) -> list[str]:
    """Return how ``theirs`` differs from ``ours``; empty when they agree.

    ``place`` gives (container, path) of a URL. Paths on a node and host names may differ, but must be used alike.
    """
    found = []

    def compare(where: str, first: Any, second: Any) -> None:
        if first != second:
            found.append(f"{where}: the platform has {first!r}, not {second!r}")

    compare("number of nodes", len(ours.nodes), len(theirs.nodes))
    hosts = [[str(node.hostname) for node in side.nodes] for side in (ours, theirs)]
    for number, pair in enumerate(zip(ours.nodes, theirs.nodes, strict=False)):
        at = f"node {number}: "
        first, second = (_plain(node, names, place) for node, names in zip(pair, hosts, strict=True))
        for what in first:
            compare(at + what, first[what], second[what])
    compare("time limit", ours.rules.time_limit, theirs.rules.time_limit)
    compare("grace", ours.rules.stop_grace, theirs.rules.stop_grace)
    compare("signal", ours.rules.stop_signal, theirs.rules.stop_signal)
    return found


def _plain(node: NodeSpec, hosts: list[str], place: Callable[[str], tuple[str, str]]) -> dict[str, Any]:
    """Return the parts that must be equal, with a node's own paths and names replaced by their meaning."""
    where = {mount.path: f"<{mount.kind} {'/'.join(place(mount.url.rstrip('/')))}>" for mount in node.mounts}

    def substitute(text: str) -> str:
        for path in sorted(where, key=len, reverse=True):
            text = text.replace(path, where[path])
        for number, host in enumerate(hosts):
            text = text.replace(host, f"<host {number}>")
        return text

    words = [*(node.entrypoint or ()), *node.command]
    if words[:2] == SHELL and len(words) == 3:
        words = shlex.split(words[2].removeprefix("exec "))  # for a command that needs no shell
    return {
        "image": node.image,
        "command": [substitute(word) for word in words],
        "user": node.user,
        "env": {key: substitute(value) for key, value in node.env.items() if not PLATFORM.fullmatch(key)},
        "mounts": sorted(where.values()),
        "shm": node.shm,
    }
