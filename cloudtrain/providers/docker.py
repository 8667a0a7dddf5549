"""Provider ``docker``: run nodes as containers of this machine, on the run's own network, on any image.

Its Request is a LaunchSpec as JSON: image, command, mounts, limits and rules. The supervisor's engine starts it. The
Engine API's own fields come through ``options.docker.nodes.*.container``.
"""

from __future__ import annotations

import json
import os
import posixpath
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from ..engine import ENGINE_PREFIX
from ..engine.supervised import PREEMPTED, STATE_DIR, ContainersProvider, origin_tags
from ..errors import SpecError
from ..provider_api.launch_spec import NodeSpec
from ..provider_api.node import NodeEnvironment, Topology
from ..provider_api.protocol import Layout, Request, Shell, python_command, setting, shell_arguments
from ..storage.timings import CLIENT_TIMINGS
from ..validate import did_you_mean, texts_of

if TYPE_CHECKING:
    from ..job.job import Job
    from ..provider_api.checks import Check

GIB = 1 << 30
ROOT = "/cloudtrain/"
"""Folder of a node's mounts."""
PORT = 29500
"""torchrun's own default; every container has all ports to itself."""
SHM_GB = 8
"""/dev/shm if the job does not set it: a limit, not a reservation. Docker's 64 MB break DataLoader workers."""
OWNED = (
    *(f"nodes.*.{name}" for name in ("image", "user", "platform", "entrypoint", "hostname", "env", "cpus", "memory")),
    *("nodes.*.shm", "nodes.*.workdir", "nodes.*.files", "name", "gpu"),
    *(
        f"nodes.*.container.{name}"
        for name in (
            *("Image", "Cmd", "Entrypoint", "User", "Hostname", "Tty", "OpenStdin", "StdinOnce", "AttachStdin"),
            *("AttachStdout", "AttachStderr", "NetworkDisabled", "NetworkingConfig", "StopSignal", "StopTimeout"),
            *("Healthcheck", "HostConfig.VolumesFrom"),  # no healthcheck is read; the volumes' targets are unknown
            *("HostConfig.NetworkMode", "HostConfig.AutoRemove", "HostConfig.RestartPolicy", "HostConfig.Memory"),
            *("HostConfig.NanoCpus", "HostConfig.ShmSize", "HostConfig.ReadonlyRootfs"),
        )
    ),
)
"""Fields that `options` cannot change: another field sets them, or the run relies on them."""
FIELDS = frozenset(
    ("Domainname", "ExposedPorts", "Env", "Labels", "MacAddress", "Shell", "Volumes", "WorkingDir", "HostConfig")
)
HOST_FIELDS = frozenset((
    "Annotations", "Binds", "BlkioDeviceReadBps", "BlkioDeviceReadIOps", "BlkioDeviceWriteBps", "BlkioDeviceWriteIOps",
    "BlkioWeight", "BlkioWeightDevice", "CapAdd", "CapDrop", "Cgroup", "CgroupParent", "CgroupnsMode", "CpuPeriod",
    "CpuQuota", "CpuRealtimePeriod", "CpuRealtimeRuntime", "CpuShares", "CpusetCpus", "CpusetMems", "DeviceCgroupRules",
    "DeviceRequests", "Devices", "Dns", "DnsOptions", "DnsSearch", "ExtraHosts", "GroupAdd", "Init", "IpcMode",
    "LogConfig", "MaskedPaths", "MemoryReservation", "MemorySwap", "MemorySwappiness", "Mounts", "OomKillDisable",
    "OomScoreAdj", "PidMode", "PidsLimit", "PortBindings", "Privileged", "PublishAllPorts", "ReadonlyPaths", "Runtime",
    "SecurityOpt", "StorageOpt", "Sysctls", "Tmpfs", "UTSMode", "Ulimits", "UsernsMode", "VolumeDriver",
))  # fmt: skip
"""ContainerCreate's fields that `options` may set, from the Engine API's description, version 1.43. The engine ignores
unknown fields, so a misspelt one would be lost silently."""
PARTS: Mapping[str, Sequence[str]] = {
    "Mounts": ("Target", "Source", "Type", "ReadOnly", "Consistency", "BindOptions", "VolumeOptions", "TmpfsOptions"),
    "Devices": ("PathInContainer", "PathOnHost", "CgroupPermissions"),
}
"""Lists of tables, and the fields of each, first that of the place on the node. (The engine takes a ``target`` too.)"""
_CONTAINER = "options.docker.nodes.*.container."
_REFUSED = {
    "resources.instance_type": "its only machine is this one",
    "resources.gpu_memory": "an engine gives a container whole GPUs",
    "resources.disk_gb": "an engine can limit a container's disk on few file systems only",
    "resources.spot": "this machine is never taken away",
    "max_wait": "containers start at once",
    "keep_warm": "this machine is always there",
}
_INSTEAD = {
    "resources.instance_type": "put instance_type under on.PROVIDER in a job file",
    "resources.disk_gb": "if your engine can, set options.docker.nodes.*.container.HostConfig.StorageOpt",
}


def _caller() -> str:
    return f"{os.getuid()}:{os.getgid()}" if os.name == "posix" else ""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of the containers on this machine."""

    user: str = setting(
        "uid[:gid] that runs the containers; default: yours. Another user needs root, and cloudtrain gives it the "
        "run's folder",
        _caller,
    )
    platform: str = setting("platform of the image, such as linux/amd64; default: the engine's own")
    state_dir: str = setting(STATE_DIR)
    prices: dict[str, Any] = setting("US dollars an hour of this machine, localhost", dict)


class Provider(ContainersProvider):
    """Provider of containers on this machine; see `cloudtrain.provider_api.protocol.Provider` for the methods."""

    name: ClassVar[str] = "docker"
    Settings: ClassVar[type[Any]] = Settings
    engine: ClassVar[str] = "containers"

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        if os.name == "posix" and not re.fullmatch(r"\d+(:\d+)?", self.settings.user):
            raise SpecError(f"must be uid or uid:gid in numbers, not {self.settings.user!r}", field="docker.user")

    def plan(self, job: Job, layout: Layout, attempt: int = 0, gpu_index: int = 0) -> Request:
        if not job.image:
            raise SpecError(
                "provider docker needs one with Python 3.10 or newer, and torch for torchrun",
                field="image",
                hint="name one: --image pytorch/pytorch:2.8.0-cuda12.8-cudnn9-runtime",
            )
        self._refuse(job, layout, _REFUSED, _INSTEAD)
        labels = {**origin_tags(layout), **dict(sorted(job.tags.items()))}
        gpus = job.resources.gpus[gpu_index] if job.resources.gpu else None
        mounts, words = self._mounts(layout, attempt, root=ROOT)
        wanted, command = job.resources, python_command(words)
        nodes = [
            NodeSpec(
                image=job.image,
                platform=self.settings.platform or None,
                entrypoint=command[: -len(words)],
                command=words,
                mounts=mounts,
                user=self.settings.user or None,
                hostname=f"node-{number}",
                gpus=gpus.count if gpus else 0,
                cpus=wanted.cpus,
                memory=wanted.memory_gb * GIB if wanted.memory_gb else None,
                shm=(wanted.shm_gb or SHM_GB) * GIB,
                container={"Labels": labels, "HostConfig": {}},
            )
            for number in range(wanted.instance_count)
        ]
        body = {"name": job.name, "gpu": gpus.name if gpus else None}
        request = self._request(job, layout, attempt=attempt, gpu_index=gpu_index, nodes=nodes, body=body, owned=OWNED)
        _check_options(request.body, labels)
        return request

    def check(self, request: Request) -> None:
        from ..engine.docker_api import check_image, connect
        from ..engine.processes import check_gpus

        nodes = self.launch_spec(request).nodes
        if wanted := sum(node.gpus for node in nodes):
            check_gpus(wanted, str(request.body["gpu"]))
        try:
            api = connect()
        except SpecError as exc:
            hint = "\n".join(filter(None, [exc.hint, "or run it without containers: --provider local"]))
            raise SpecError(exc.message, field="provider docker", hint=hint) from None
        if wanted and not any("nvidia" in name for name in api.info().get("Runtimes") or {}):
            hint = "install the NVIDIA Container Toolkit, run nvidia-ctk runtime configure, and restart the engine"
            raise SpecError("the container engine has no runtime for NVIDIA GPUs", field="resources.gpu", hint=hint)
        uid = nodes[0].user and nodes[0].user.partition(":")[0]
        if uid and int(uid) != os.geteuid() and os.geteuid() != 0:
            why = f"uid {uid} could not write the run's folder, and only root may change its owner"
            raise SpecError(why, field="docker.user", hint="leave docker.user unset")
        check_image(api, str(nodes[0].image), nodes[0].platform)

    def checks(self, store: str, request: Request | None) -> Iterator[Check]:
        """Yield the checks of `doctor`."""
        from ..engine.checks import of_containers

        yield from of_containers(request, self.check)

    def shell(self, request: Request, native_id: str, node: int, command: Sequence[str], *, tty: bool) -> Shell:
        from ..engine.docker_api import running_node

        found = running_node(request.run, node)
        words = python_command(shell_arguments(f"{ROOT}cloudtrain.pyz", request, node, command))
        install = "install the docker command: https://docs.docker.com/engine/install"
        return Shell(argv=["docker", "exec", "-i", *(["-t"] if tty else []), found, *words], install=install)

    @staticmethod
    def node_environment(environ: Mapping[str, str], argv: Mapping[str, str]) -> NodeEnvironment:
        secrets = json.loads(sys.stdin.readline()) if environ.get(ENGINE_PREFIX + "SECRETS") else {}
        return NodeEnvironment(
            topology=Topology(
                nodes=int(environ[ENGINE_PREFIX + "NODES"]),
                node_rank=int(environ[ENGINE_PREFIX + "NODE"]),
                master_addr="node-0",
                master_port=PORT,
            ),
            paths=dict(argv),
            scratch=(),
            stop_grace=CLIENT_TIMINGS.stop_grace,
            exit_code={"succeeded": 0, "failed": 1, "preempted": PREEMPTED},
            secrets=lambda reference: secrets[reference.partition(":")[2]],
            cpus=int(environ[ENGINE_PREFIX + "CPUS"]),
            attempt=environ.get(ENGINE_PREFIX + "ATTEMPT", ""),
            machine=environ.get(ENGINE_PREFIX + "MACHINE", ""),
        )


def _check_options(body: Mapping[str, Any], labels: Mapping[str, str]) -> None:
    """Raise `SpecError` for a field that the engine would ignore, or a mount that would hide the run's own folders."""
    for node in body["nodes"]:
        container = node["container"]
        if not isinstance(container, Mapping) or not isinstance(container.get("HostConfig"), Mapping):
            raise SpecError("must be a table", field=_CONTAINER.rstrip("."))
        host = container["HostConfig"]
        for where, table, known in ((_CONTAINER, container, FIELDS), (f"{_CONTAINER}HostConfig.", host, HOST_FIELDS)):
            for name in table:
                if name not in known:
                    raise SpecError("no such field", field=f"{where}{name}", hint=did_you_mean(name, known))
        for name, target in _targets(container, host):
            place = "/" + posixpath.normpath("/" + target).strip("/")
            if place == "/" or f"{place}/".startswith(ROOT):
                raise SpecError(f"{target} would hide what the run itself mounts below {ROOT}", field=name)
        for item in texts_of(container.get("Env", []), f"{_CONTAINER}Env", empty=True):
            if "=" not in item[1:]:
                raise SpecError(f"must be NAME=VALUE, not {item!r}", field=f"{_CONTAINER}Env")
            if item.startswith("CLOUDTRAIN_"):
                raise SpecError(f"{item.partition('=')[0]} is set by cloudtrain itself", field=f"{_CONTAINER}Env")
        for name, value in _table(container.get("Labels", {}), f"{_CONTAINER}Labels").items():
            if name.startswith("cloudtrain.") and labels.get(name) != value:
                raise SpecError(f"{name} is set by cloudtrain itself", field=f"{_CONTAINER}Labels")


def _targets(container: Mapping[str, Any], host: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (field, path on the node) of every mount that a user adds."""
    field = f"{_CONTAINER}HostConfig.Binds"
    for bind in texts_of(host.get("Binds", []), field, empty=True):
        if bind.count(":") not in (1, 2):
            raise SpecError(f"must be host:node or host:node:ro, not {bind!r}", field=field)
        yield field, bind.split(":")[1]
    for name, known in PARTS.items():
        field, key, tables = f"{_CONTAINER}HostConfig.{name}", known[0], host.get(name, [])
        if not isinstance(tables, list) or not all(isinstance(t, Mapping) for t in tables):
            raise SpecError("must be a list of tables", field=field)
        for table in tables:
            for wrong in (part for part in table if part not in known):
                raise SpecError("no such field", field=f"{field}.*.{wrong}", hint=did_you_mean(wrong, known))
            if not isinstance(table.get(key), str):
                raise SpecError(f"each must have a {key}, which is text", field=field)
            yield field, table[key]
    for name in ("MaskedPaths", "ReadonlyPaths"):
        field = f"{_CONTAINER}HostConfig.{name}"
        yield from ((field, path) for path in texts_of(host.get(name, []), field, empty=True))
    field = f"{_CONTAINER}HostConfig.Tmpfs"
    yield from ((field, path) for path in _table(host.get("Tmpfs", {}), field))
    if not isinstance(volumes := container.get("Volumes", {}), Mapping):
        raise SpecError("must be a table of paths", field=f"{_CONTAINER}Volumes")
    yield from ((f"{_CONTAINER}Volumes", path) for path in volumes)


def _table(value: Any, field: str) -> Mapping[str, str]:
    if not isinstance(value, Mapping) or not all(isinstance(item, str) for item in value.values()):
        raise SpecError("must be a table of texts", field=field)
    return value


SAMPLE = {
    "settings": {"prices": {"localhost": 1.5}},
    "job": {"image": "registry.example/team/trainer:1"},
    "rows": {
        "options": {
            "options": {"docker": {"nodes": {"*": {"container": {"HostConfig": {"Binds": ["/data:/data:ro"]}}}}}}
        }
    },
}
