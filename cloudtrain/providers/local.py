"""Provider ``local``: run nodes as process groups of this machine, under a supervisor that outlives the client.

Its Request is a LaunchSpec as JSON: the exact commands, mounts and rules that the supervisor's engine starts. The node
runs this machine's Python and sees the client's environment. The script sees the contract every provider keeps.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from ..engine import ENGINE_PREFIX
from ..engine.supervised import PREEMPTED, STATE_DIR, SupervisedProvider, existing, origin_tags
from ..errors import SpecError
from ..provider_api.launch_spec import NodeSpec
from ..provider_api.node import NodeEnvironment, Topology
from ..provider_api.protocol import Layout, Request, Shell, setting, shell_arguments
from ..storage.timings import CLIENT_TIMINGS

if TYPE_CHECKING:
    from ..job.job import Job
    from ..provider_api.checks import Check

OWNED = (
    *("tags", "name", "gpu"),
    *(f"nodes.*.{name}" for name in ("image", "platform", "user", "read_only", "hostname")),
    *(f"nodes.*.{name}" for name in ("cpus", "memory", "shm", "container")),
)
_REFUSED = {
    "image": "it runs this machine's own Python",
    "resources.instance_type": "its only machine is this one",
    "resources.gpu_memory": "processes share the GPUs of this machine",
    "resources.cpus": "processes share all cores of this machine",
    "resources.memory_gb": "processes share the memory of this machine",
    "resources.disk_gb": "processes share the disk of this machine",
    "resources.shm_gb": "processes share /dev/shm of this machine",
    "resources.spot": "this machine is never taken away",
    "max_wait": "processes start at once",
    "keep_warm": "this machine is always there",
}
_INSTEAD = {
    "image": "use --provider docker, or put the image under on.PROVIDER in a job file",
    "resources.instance_type": "put instance_type under on.PROVIDER in a job file",
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of the processes on this machine."""

    python: str = setting(
        "Python that runs the ranks; default: the Python that runs cloudtrain", lambda: sys.executable or "python3"
    )
    state_dir: str = setting(STATE_DIR)
    prices: dict[str, Any] = setting("US dollars an hour of this machine, localhost", dict)


class Provider(SupervisedProvider):
    """Provider of processes on this machine; see `cloudtrain.provider_api.protocol.Provider` for the methods."""

    name: ClassVar[str] = "local"
    Settings: ClassVar[type[Any]] = Settings
    engine: ClassVar[str] = "processes"

    def plan(self, job: Job, layout: Layout, attempt: int = 0, gpu_index: int = 0) -> Request:
        self._refuse(job, layout, _REFUSED, _INSTEAD)
        gpus = job.resources.gpus[gpu_index] if job.resources.gpu else None
        mounts, words = self._mounts(layout, attempt)
        node = NodeSpec(command=[self.settings.python, *words], mounts=mounts, gpus=gpus.count if gpus else 0)
        tags = {**origin_tags(layout), **job.tags}
        body = {"name": job.name, "tags": tags, "gpu": gpus.name if gpus else None}
        nodes = [node] * job.resources.instance_count
        request = self._request(job, layout, attempt=attempt, gpu_index=gpu_index, nodes=nodes, body=body, owned=OWNED)
        for name in (name for spec in request.body["nodes"] for name in spec["env"]):
            if name.startswith("CLOUDTRAIN_"):
                raise SpecError("is set by cloudtrain itself", field=f"options.local.nodes.*.env.{name}")
        return request

    def check(self, request: Request) -> None:
        import shutil  # a plan does not need it

        from ..engine.processes import check_gpus, has_torch
        from ..storage.extras import not_installed

        nodes, context = self.launch_spec(request).nodes, request.context
        python = nodes[0].command[0]
        if shutil.which(python) is None:
            hint = "set local.python to the path of a Python, or leave it out"
            raise SpecError(f"there is no program {python}", field="local.python", hint=hint)
        several = context["launcher"] == "torchrun" and context["nodes"] * context["processes"] > 1
        if several and not has_torch(python):
            if python == sys.executable:
                raise not_installed(f"provider {self.name}", self.name, field="", named=["torch"])
            why = f"{python} has no torch, which starts several ranks"
            raise SpecError(why, field="local.python", hint=_torch_command(python))
        if wanted := sum(node.gpus for node in nodes):
            check_gpus(wanted, str(request.body["gpu"]))

    def checks(self, store: str, request: Request | None) -> Iterator[Check]:
        """Yield the checks of `doctor`."""
        from ..engine.checks import of_processes

        python = self.settings.python
        yield from of_processes(python, request, self.check, fix=_torch_command(python))

    def shell(self, request: Request, native_id: str, node: int, command: Sequence[str], *, tty: bool) -> Shell:
        root = existing(native_id) / "nodes" / f"node-{node}"
        try:
            scratch = json.loads(root.with_name(f"{root.name}.started").read_bytes())["scratch"]
        except (OSError, ValueError):  # between two starts
            raise SpecError("the node does not run now", field="node", hint="try again") from None
        words = shell_arguments(str(root / "cloudtrain.pyz"), request, node, command, scratch=scratch)
        return Shell(argv=[request.body["nodes"][node]["command"][0], *words])

    @staticmethod
    def node_environment(environ: Mapping[str, str], argv: Mapping[str, str]) -> NodeEnvironment:
        from ..runtime.host_facts import cpu_count

        nodes = int(environ[ENGINE_PREFIX + "NODES"])
        with open(int(environ[ENGINE_PREFIX + "SECRETS_FD"]), "rb") as pipe:
            secrets = json.load(pipe)
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        return NodeEnvironment(
            topology=Topology(
                nodes=nodes,
                node_rank=int(environ[ENGINE_PREFIX + "NODE"]),
                master_addr="127.0.0.1",
                master_port=int(environ[ENGINE_PREFIX + "PORT"]),
            ),
            paths=dict(argv),
            scratch=(environ[ENGINE_PREFIX + "SCRATCH"],),
            # Every peer is this machine: gloo need not be able to resolve its host name.
            export_env={} if "GLOO_SOCKET_IFNAME" in environ else {"GLOO_SOCKET_IFNAME": loopback},
            stop_grace=CLIENT_TIMINGS.stop_grace,
            exit_code={"succeeded": 0, "failed": 1, "preempted": PREEMPTED},
            secrets=lambda reference: secrets[reference.partition(":")[2]],
            supervisor=int(environ[ENGINE_PREFIX + "SUPERVISOR"]),
            groups_file=environ[ENGINE_PREFIX + "GROUPS"],
            cpus=max(1, cpu_count() // nodes),
            attempt=environ.get(ENGINE_PREFIX + "ATTEMPT", ""),
        )


def _torch_command(python: str) -> str:
    """Return the command that installs torch for ``python``."""
    from ..storage.extras import install_command

    own = python == sys.executable
    return install_command("local") if own else f"{python} -m pip install torch numpy"


SAMPLE = {
    "settings": {"prices": {"localhost": 1.5}},
    "rows": {"options": {"options": {"local": {"rules": {"max_restarts": 3}}}}},
}
