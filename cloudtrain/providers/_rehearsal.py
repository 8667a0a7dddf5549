"""Provider ``rehearsal``: run the nodes that another provider's platform would start, in containers here.

`cloudtrain.engine.rehearse` makes it of a plan of the other provider, the target; callers never name it (hence the
underscore). `plan` reports the limits that this machine cannot keep. Nodes run the target's own half. Its Request holds
the target's whole.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from ..engine.fault_injection import Injection
from ..engine.supervised import ContainersProvider
from ..engine.url_map import map_urls, stand_in_for
from ..errors import SpecError
from ..provider_api.launch_spec import LaunchSpec, Mount, NodeSpec
from ..provider_api.node import NodeEnvironment
from ..provider_api.protocol import Layout, Request, python_command
from ..provider_api.protocol import Provider as Target
from ..provider_api.registry import find_provider
from ..runtime.gpus import count as gpu_count

if TYPE_CHECKING:
    from ..job.job import Job

GIB = 1 << 30
DIRECT = "/cloudtrain/checkpoints"
"""Path on a node of the folder that CLOUDTRAIN_CHECKPOINT_URL names."""
SECRETS = (
    "import json, os, sys; values = json.loads(sys.stdin.readline()); names = json.loads(sys.argv[1]); "
    "os.environ.update({name: values[name_here] for name, name_here in names.items()}); "
    "os.execvp(sys.argv[2], sys.argv[2:])"
)
"""Wrapper that reads a node's substituted secrets from standard input and then execs its command."""
EVERYWHERE = "the network between nodes, permissions, quotas, capacity and prices are not the platform's"


def _user() -> str:
    return f"{os.getuid()}:{os.getgid()}" if os.name == "posix" and os.getuid() else ""


def _memory() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 0


@dataclass(frozen=True, kw_only=True)
class Settings:
    """``target`` is the provider's name, ``account`` its settings as runs record them, ``store`` the URL of its store.

    ``maps`` are further URLs and the file URLs of their stand-ins here. ``image`` replaces the request's image.
    ``secrets`` are the job's references in the cloud. ``drills`` are words like ``preempt node=1,after=30s``.
    ``missing`` names settings of the account that have made-up values. The rest is this machine: ``user`` (``uid:gid``)
    that nodes run as, empty for the image's own, cores, bytes, GPUs.
    """

    target: str = ""
    account: dict[str, Any] = field(default_factory=dict)
    store: str = ""
    maps: dict[str, Any] = field(default_factory=dict)
    image: str = ""
    secrets: dict[str, Any] = field(default_factory=dict)
    drills: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    user: str = field(default_factory=_user)
    cores: int = field(default_factory=lambda: os.cpu_count() or 1)
    memory: int = field(default_factory=_memory)
    gpus: int = field(default_factory=gpu_count)
    no_objects: str = ""  # has no effect: runs that earlier versions recorded have it
    state_dir: str = ""


class Provider(ContainersProvider):
    """Provider that runs another provider's platform here; see `Provider` for the methods."""

    name: ClassVar[str] = "rehearsal"
    Settings: ClassVar[type[Any]] = Settings
    engine: ClassVar[str] = "bare-containers"

    def __init__(self, **settings: Any) -> None:
        self.settings = Settings(**settings)
        if not self.settings.target:
            hint = "to rehearse a platform, run: cloudtrain rehearse SCRIPT --provider NAME"
            raise SpecError("rehearsal is not a provider that a job can name", field="provider", hint=hint)

    @property
    def target(self) -> Target:
        """Return the provider whose platform is rehearsed."""
        return find_provider(self.settings.target)(**self.settings.account)

    def plan(self, job: Job, layout: Layout, attempt: int = 0, gpu_index: int = 0) -> Request:
        own, target = self.settings, self.target
        secrets = {name: reference.partition(":")[2] for name, reference in job.secrets.items()}
        theirs = job.replace(secrets=own.secrets) if own.secrets else job
        request = target.plan(theirs, map_urls(layout, own.store), attempt, gpu_index)
        launch = target.launch_spec(request)
        if not (own.image or launch.nodes[0].image):
            hint = "name an image that stands in for its machines: --local-image IMAGE"
            raise SpecError(f"{own.target} starts nodes without an image", field="local_image", hint=hint)
        most = sys.maxsize if attempt else len(launch.nodes)  # a later attempt may have fewer than the first
        drills = [Injection.parse(*text.split(" ", 1), nodes=most) for text in own.drills]
        limits, differences = self._limits(launch.nodes)
        places = {own.store: layout.store, **own.maps}
        direct = Mount(url=layout.direct, path=DIRECT, kind="sync")

        def here(spec: NodeSpec) -> NodeSpec:
            mounts = [dataclasses.replace(mount, url=stand_in_for(mount.url, places)) for mount in spec.mounts]
            spec = dataclasses.replace(spec, mounts=[*mounts, direct], **limits)
            if not secrets:
                return spec
            words = python_command(["-c", SECRETS, json.dumps(secrets), *(spec.entrypoint or ()), *spec.command])
            return dataclasses.replace(spec, entrypoint=words[:1], command=words[1:])

        rules = dataclasses.replace(launch.rules, retries=job.retries)
        launch = LaunchSpec(nodes=[here(spec) for spec in launch.nodes], rules=rules)
        module = sys.modules[type(target).__module__]
        differences += [*getattr(module, "DIFFERENCES", ()), *self._differences(job, drills)]
        return Request(
            provider=self.name,
            operation="rehearse",
            body={
                "target": own.target,
                "request": request.to_dict(),
                "differences": differences,
                "drills": [dataclasses.asdict(drill) for drill in drills],
                **launch.to_dict(),
            },
            # Code that writes to the store by itself cannot reach the cloud's store.
            context={
                **request.context,
                "secrets": {},
                **({"masked": sorted(secrets)} if secrets else {}),
                "checkpoint_url": f"file://{DIRECT}",
                **({"node_check": {"gpus": None}} if "gpus" in limits and "node_check" in request.context else {}),
            },
            run=layout.run,
            attempt=attempt,
            gpu_index=gpu_index,
            notes=request.notes,
        )

    def _limits(self, nodes: Sequence[NodeSpec]) -> tuple[dict[str, Any], list[str]]:
        """Return the limits that differ here, the same for all nodes, and the words for them."""
        own, spec, count = self.settings, nodes[0], len(nodes)
        limits: dict[str, Any] = {"user": spec.user or own.user or None}
        notes = []
        if own.image and own.image != spec.image:
            limits["image"] = own.image
            notes.append(f"image {own.image} stands in for {spec.image}")
        if spec.gpus * count > own.gpus:
            limits["gpus"] = 0
            notes.append(f"of {spec.gpus * count} GPUs {own.gpus or 'none'} are here: all ranks run on CPU")
        if (spec.cpus or 0) * count > own.cores:
            limits["cpus"] = None
            has = f"the nodes share the {own.cores} of this machine, without a limit"
            notes.append(f"{count} x {spec.cpus} cores: {has}")
        if (spec.memory or 0) * count > own.memory:
            limits["memory"] = None
            has = f"the nodes share {own.memory / GIB:.0f} GiB, without a limit"
            notes.append(f"{count} x {round((spec.memory or 0) / GIB)} GiB of memory: {has}")
        ours = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
        if own.image or spec.platform == f"linux/{ours}":
            limits["platform"] = None
        elif spec.platform:
            notes.append(f"{spec.platform} is emulated on this machine")
        if limits["user"] != spec.user:
            notes.append(f"nodes run as {own.user}, you, and not as the image's own user")
            # On a platform the image's user may write in the platform's own folders (as /opt/ml) and beside synced
            # ones. The engine makes such folders for root alone.
            roots = {"/".join(path.split("/")[:3]) for path in spec.files}
            beside = {mount.path.rpartition("/")[0] for mount in spec.mounts if mount.kind == "sync"}
            roots |= {path for path in beside if any(path.startswith(f"{root}/") for root in roots)}
            limits["container"] = {"HostConfig": {"Tmpfs": dict.fromkeys(sorted(roots), "mode=1777")}} if roots else {}
        return limits, notes

    def _differences(self, job: Job, drills: Sequence[Injection]) -> list[str]:
        own = self.settings
        notes = [f"{place} stands in for {url}" for url, place in own.maps.items()]
        notes += [f"settings that are not set have made-up values: {', '.join(own.missing)}"] if own.missing else []
        if whole := [name for name, item in job.inputs.items() if item.shard]:
            notes.append(f"every node has all of inputs {', '.join(whole)}, of which the platform gives each a share")
        if own.secrets:
            notes.append(f"secrets {', '.join(own.secrets)} have values of this machine's environment")
        if not job.resources.spot and any(drill.kind != "kill" for drill in drills):
            notes.append("the job asks for no spot machines: --preempt does as with one that does")
        return [*notes, EVERYWHERE]

    def check(self, request: Request) -> None:
        from ..engine.docker_api import check_image, connect

        node = self.launch_spec(request).nodes[0]
        try:
            check_image(connect(), str(node.image), node.platform)
        except SpecError as exc:
            raise SpecError(exc.message, field=exc.field or "rehearse", hint=exc.hint) from None

    def launch_spec(self, request: Request) -> LaunchSpec:
        """Return the nodes; requests of earlier versions have a rule ``objects``, which has no effect now."""
        rules = {key: value for key, value in request.body["rules"].items() if key != "objects"}
        return super().launch_spec(dataclasses.replace(request, body={**request.body, "rules": rules}))

    @staticmethod
    def node_environment(environ: Mapping[str, str], argv: Mapping[str, str]) -> NodeEnvironment:
        """Raise `SpecError`: the nodes of a rehearsal run the target's `node_environment`."""
        raise SpecError("the nodes of a rehearsal use the environment of its target", field="provider")
