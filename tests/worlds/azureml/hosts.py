"""What the platform puts on a node: a reading of Azure ML's pages, made for tests and by nobody's provider.

`reading` is the Simulation of the body of ``PUT …/jobs/{name}`` as those pages have it, `differences` how another one
departs from it. Where nodes keep things is from public traces (unverified): nothing may depend on it.
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
"""Seconds between SIGTERM and SIGKILL; that of a spot machine, and unverified for jobs."""
MASTER_PORT = 6105
SHELL = ["/bin/sh", "-c"]
NO_LIMIT = 30 * 86400.0
"""A job without a time limit."""
SHM = {"b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
MODES = {"ReadOnlyMount": "mount", "Download": "copy", "ReadWriteMount": "sync", "Upload": "sync"}
_PLACEHOLDER = re.compile(r"\$\{\{\s*(inputs|outputs)\.([A-Za-z0-9_]+)\s*\}\}")
PLATFORM = re.compile(r"(AZUREML|AZ_BATCH|AZURE_ML)_.*|RANK|LOCAL_RANK|WORLD_SIZE")
"""Variables that the platform sets besides, and no provider need say."""


def reading(name: str, body: Mapping[str, Any], image: str, *, default_output: str = "") -> LaunchSpec:
    """What the platform starts for a job, from ``image``. ``default_output`` is where outputs without a path go."""
    job = body["properties"]
    resources = job.get("resources") or {}
    count = int(resources.get("instanceCount") or 1)
    root = f"/mnt/azureml/cr/j/{hashlib.sha256(name.encode()).hexdigest()[:32]}"
    mounts, words = _mounts(job, f"{root}/cap/data-capability/wd", default_output)
    command = _PLACEHOLDER.sub(lambda match: words[match[1], match[2]], job["command"])
    names = [f"{hashlib.sha256(name.encode()).hexdigest()[:12]}{number:06}" for number in range(count)]
    said = str(resources.get("shmSize") or "2g").lower()
    nodes = [
        NodeSpec(
            image=image,
            entrypoint=SHELL,
            command=[command],
            env={**(job.get("environmentVariables") or {}), **_platform(job, name, number, names)},
            mounts=mounts,
            workdir=f"{root}/exe/wd",
            hostname=host,
            shm=int(said[:-1]) * SHM[said[-1]],
        )
        for number, host in enumerate(names)
    ]
    timeout = (job.get("limits") or {}).get("timeout")
    limit = seconds_of(timeout) if timeout else NO_LIMIT
    return LaunchSpec(nodes=nodes, rules=LaunchRules(time_limit=limit, stop_grace=GRACE))


def _mounts(job: Mapping[str, Any], root: str, default: str) -> tuple[list[Mount], dict[tuple[str, str], str]]:
    """Inputs and outputs; and what the command's placeholders become."""
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
    """Variables of one node. Of a job without a distribution no node learns of the others."""
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
    """Where ``theirs`` says that the platform starts something else than ``ours`` does; empty when they agree.

    ``place`` is (container, path) of a URL. Paths of a node and names of hosts may be others, but must be used alike.
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
    """What must be equal, with a node's own paths and names replaced by what they mean."""
    where = {mount.path: f"<{mount.kind} {'/'.join(place(mount.url.rstrip('/')))}>" for mount in node.mounts}

    def meant(text: str) -> str:
        for path in sorted(where, key=len, reverse=True):
            text = text.replace(path, where[path])
        for number, host in enumerate(hosts):
            text = text.replace(host, f"<host {number}>")
        return text

    words = [*(node.entrypoint or ()), *node.command]
    if words[:2] == SHELL and len(words) == 3:
        words = shlex.split(words[2].removeprefix("exec "))  # of a command that needs no shell
    return {
        "image": node.image,
        "command": [meant(word) for word in words],
        "user": node.user,
        "env": {key: meant(value) for key, value in node.env.items() if not PLATFORM.fullmatch(key)},
        "mounts": sorted(where.values()),
        "shm": node.shm,
    }
