"""The parts of a pod that choose its machines: kinds of GPUs, spot nodes, and shares of a GPU by HAMi. Pure.

Sources of these and of `gpus.json`: the NVIDIA GPU operator's labels, SkyPilot's table of labels (its file
sky/provision/kubernetes/utils.py), the clouds' pages on spot nodes, and HAMi's documentation and source of 2026-08.
None was run with a real GPU.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from ...errors import SpecError, UnsupportedError
from ...validate import choice_of, near_or_all, whole_number
from .._cloud import table_in
from . import NAME
from .validate import check_fields, check_key, check_labels

if TYPE_CHECKING:
    from ...job.job import Gpu, Job
    from . import Settings

SPOT: Mapping[str, tuple[Mapping[str, str], Mapping[str, str] | None]] = {
    "gke": ({"cloud.google.com/gke-spot": "true"}, {"key": "cloud.google.com/gke-spot", "value": "true"}),
    "eks": ({"eks.amazonaws.com/capacityType": "SPOT"}, None),
    "karpenter": ({"karpenter.sh/capacity-type": "spot"}, None),
    "aks": (
        {"kubernetes.azure.com/scalesetpriority": "spot"},
        {"key": "kubernetes.azure.com/scalesetpriority", "value": "spot"},
    ),
}
"""The nodes' label and the taint of spot machines, by the kind of the cluster."""
_HAMI: Mapping[str, tuple[str, range | tuple[str, ...] | str]] = {
    "gpumem": ("nvidia.com/gpumem", range(1, 2**31)),
    "gpumem_percentage": ("nvidia.com/gpumem-percentage", range(1, 101)),
    "gpucores": ("nvidia.com/gpucores", range(101)),
    "priority": ("nvidia.com/priority", range(2)),
    "use_gputype": ("nvidia.com/use-gputype", "*string"),
    "nouse_gputype": ("nvidia.com/nouse-gputype", "*string"),
    "use_gpuuuid": ("nvidia.com/use-gpuuuid", "*string"),
    "nouse_gpuuuid": ("nvidia.com/nouse-gpuuuid", "*string"),
    "vgpu_mode": ("nvidia.com/vgpu-mode", ("hami-core", "mig", "mps")),
    "numa_bind": ("nvidia.com/numa-bind", "bool"),
    "node_scheduler_policy": ("hami.io/node-scheduler-policy", ("binpack", "spread")),
    "gpu_scheduler_policy": ("hami.io/gpu-scheduler-policy", ("spread", "binpack", "topology-aware", "mutex", "numa")),
}
"""HAMi's word for each rule, and its values. Numbers are resources of a container, ``gpumem`` in MiB of each card. All
others are annotations of the pods, and words may be several, joined by commas."""
NVIDIA, MIB = "nvidia.com/gpu", 1 << 20
"""The GPU whose memory the rules share, and the bytes of HAMi's unit."""
RESOURCES = "resources"
"""The key of a table of further resources by their full names, for the other devices that HAMi shares."""
gpu_names = partial(table_in, __file__, "gpus.json")
"""Return the known values of a nodes' label by the name of a GPU, by the label's key."""


def with_gpu_memory(settings: Settings, job: Job) -> Settings:
    """Return ``settings`` with the job's own memory of each GPU as HAMi's rule, in whole MiB.

    Raises `UnsupportedError` if the settings do not say that HAMi is there, `SpecError` for a job without GPUs.
    """
    wanted, field = job.resources.gpu_memory, "resources.gpu_memory"
    if wanted is None:
        return settings
    if not settings.hami or settings.gpu_resource != NVIDIA:
        hint = f'if your cluster shares {NVIDIA} by HAMi, set {NAME}.hami = {{ gpu_scheduler_policy = "spread" }}'
        raise UnsupportedError(NAME, field, "its nodes have whole GPUs", hint=hint)
    if not job.resources.gpu:
        raise SpecError("needs resources.gpu", field=field, hint="add the GPU, like --gpu A100:1")
    if wanted < MIB:
        raise SpecError(f"{wanted} bytes are less than 1 MiB", field=field, hint="write '8GB'")
    rest = {name: rule for name, rule in settings.hami.items() if name != "gpumem_percentage"}
    return dataclasses.replace(settings, hami={**rest, "gpumem": wanted // MIB})


def gpu_limits(settings: Settings, gpu: Gpu | None) -> dict[str, str]:
    """Return the limits of a container that ask for its GPUs, as texts: every client takes these."""
    if gpu is None:
        return {}
    limits = {settings.gpu_resource: str(gpu.count)}
    numbers = {name: word for name, (word, rule) in _HAMI.items() if isinstance(rule, range)}
    limits |= {word: str(settings.hami[name]) for name, word in numbers.items() if name in settings.hami}
    return {**limits, **{name: str(value) for name, value in settings.hami.get(RESOURCES, {}).items()}}


def is_shared(settings: Settings) -> bool:
    """Return whether HAMi may give the rest of a GPU to other pods."""
    hami = settings.hami
    return "gpumem" in hami or hami.get("gpumem_percentage", 100) < 100 or hami.get("gpucores", 100) < 100


def gpu_selector(settings: Settings, gpu: Gpu | None) -> list[dict[str, Any]]:
    """Return the expressions of a node's labels for this kind of GPU. Raises `UnsupportedError` for an unknown one."""
    if gpu is None or not settings.gpu_label:
        return []
    name = str(gpu).rpartition(":")[0]
    values: list[str] = []
    for table in (settings.gpu_names, gpu_names().get(settings.gpu_label, {})):  # A100 is also A100-40GB
        fitting = [item for item in table if name in (item, item.rpartition("-")[0])]
        values = values or [value for item in fitting for value in _values(table[item])]
    if not values:
        hint = f'look it up with kubectl get nodes -L {settings.gpu_label}, then set gpu_names = {{ {name} = ["…"] }}'
        hint += f'; or set gpu_label = "" to take any {settings.gpu_resource}'
        raise UnsupportedError(
            NAME, "resources.gpu", f"no value of {settings.gpu_label} is known for {name}", hint=hint
        )
    return [{"key": settings.gpu_label, "operator": "In", "values": values}]


def _values(value: Any) -> tuple[str, ...]:
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


def spot_selector(settings: Settings, spot: bool) -> dict[str, str]:
    """Return the label of spot nodes. Raises `UnsupportedError` if the settings do not say which kind they are."""
    if not spot:
        return {}
    if not settings.spot:
        hint = f"set kubernetes.spot to one of: {', '.join(SPOT)}; or set node_selector and tolerations"
        raise UnsupportedError(NAME, "resources.spot", "kubernetes.spot is not set", hint=hint)
    return dict(SPOT[settings.spot][0])


def tolerations(settings: Settings, gpu: Gpu | None, spot: bool) -> list[dict[str, Any]]:
    """Return the taints that the pods accept. A silent node's pods go after 60 s, where the default is 300."""
    found: list[dict[str, Any]] = [
        {"key": f"node.kubernetes.io/{name}", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 60}
        for name in ("unreachable", "not-ready")
    ]
    if gpu is not None:
        found.append({"key": settings.gpu_resource, "operator": "Exists", "effect": "NoSchedule"})
    if gpu is not None and gpu.name.startswith(("GB", "GH")):  # beside an Arm CPU: GKE taints such nodes
        found.append({"key": "kubernetes.io/arch", "operator": "Equal", "value": "arm64", "effect": "NoSchedule"})
    taint = SPOT[settings.spot][1] if spot and settings.spot else None
    if taint is not None:
        found.append({**taint, "operator": "Equal", "effect": "NoSchedule"})
    return [*found, *(dict(item) for item in settings.tolerations)]


def hami_annotations(settings: Settings) -> dict[str, str]:
    """Return HAMi's annotations of the pods. Raises `SpecError` if no card is left."""

    def cards(rule: str) -> set[str]:
        return {*",".join(_values(settings.hami.get(rule, ()))).split(",")} - {""}

    for kind in ("gputype", "gpuuuid"):
        if (uses := cards(f"use_{kind}")) and uses <= cards(f"nouse_{kind}"):
            field = f"{NAME}.hami.use_{kind}"
            raise SpecError(f"nouse_{kind} excludes all of it", field=field, hint="keep one of them")
    words = {name: word for name, (word, rule) in _HAMI.items() if not isinstance(rule, range)}
    found = {word: settings.hami[name] for name, word in words.items() if name in settings.hami}
    return {
        word: str(value).lower() if isinstance(value, bool) else ",".join(_values(value))
        for word, value in found.items()
    }


def check_gpu_names(names: Any) -> None:
    """Raise `SpecError` for names of GPUs whose values no node's label can have."""
    where = f"{NAME}.gpu_names"
    check_fields(names, "%any", where)
    for name, values in names.items():
        _check_texts(values, f"{where}.{name}")
        for value in _values(values):
            check_labels({name: value}, where)


def _check_texts(value: Any, where: str) -> None:
    if not value or not all(isinstance(item, str) and item for item in _values(value)):
        raise SpecError(f"must be text or a list of texts, not {value!r}", field=where)


def check_hami(hami: Any, gpu_resource: str) -> None:
    """Raise `SpecError` for a rule of HAMi that its scheduler would refuse, cut or silently ignore."""
    where = f"{NAME}.hami"
    check_fields(hami, "%any", where)
    for name, value in hami.items():
        field, (_, rule) = f"{where}.{name}", _HAMI.get(name, ("", ""))
        if isinstance(rule, range):
            whole_number(value, field, least=rule[0], most=rule[-1])
        elif isinstance(rule, tuple):
            for word in str(value).split(","):
                choice_of(word, rule, field)
        elif rule == "bool":
            check_fields(value, rule, field)
        elif rule:
            _check_texts(value, field)
        elif name == RESOURCES:
            _check_resources(value, field, gpu_resource)
        else:
            raise SpecError("is no rule of HAMi", field=field, hint=near_or_all(name, [*_HAMI, RESOURCES]))
    if "gpumem" in hami and "gpumem_percentage" in hami:
        raise SpecError("excludes gpumem_percentage", field=f"{where}.gpumem", hint="keep one of them")


def _check_resources(value: Any, field: str, gpu_resource: str) -> None:
    check_fields(value, "%int", field)
    for name, number in value.items():
        if "/" not in name or number < 0:
            raise SpecError("must be a resource's full name and a whole number", field=f"{field}.{name}")
        check_key(name, f"{field}.{name}")
        if name == gpu_resource:
            raise SpecError("is the number of GPUs", field=f"{field}.{name}", hint="set resources.gpu")


def kind_of(settings: Settings, labels: Mapping[str, str]) -> str:
    """Return the name in a job of the GPU of a node with these labels; the label's own value if none is known."""
    value = labels.get(settings.gpu_label, "")
    known = {**gpu_names().get(settings.gpu_label, {}), **settings.gpu_names}
    return next((name for name, values in known.items() if value in _values(values)), value.upper() or "GPU")
