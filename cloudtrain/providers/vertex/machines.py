"""Which machine a job gets, and what of it Vertex AI must be told: a GPU is named beside its machine, and counted."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ... import catalog
from ...errors import SpecError, UnsupportedError
from .fabric import SCRIPTS, TRANSPORTS
from .words import NAME

if TYPE_CHECKING:
    from ...catalog import Machine
    from ...job import Gpu, Job

__all__ = ["FLEXIBLE", "accelerated", "machine_of", "machine_spec", "notes_of", "priced", "told_as"]

FIRST = "n1-standard-4"
"""The smallest machine for training; part of its memory is the system's own."""
FAMILIES = ("n1-standard-", "n1-highmem-", "n1-highcpu-")
ATTACHED = "n1-"
"""The family whose machines are with and without GPUs; elsewhere the machine's name says them."""
CORES = 4
"""Cores a GPU where neither job nor machine says: eight GPUs would starve on the four cores that are allowed."""
STARVED = 4
"""So few vCPUs, beside a GPU, may stop the log of a job that goes on. Google names n1-highmem-2 as an example."""
ACCELERATED = re.compile(r"(a\d+x?|g\d+)-")
TPU = re.compile(r"(ct|tpu)", re.IGNORECASE)
FLEXIBLE = frozenset(
    (
        *("NVIDIA_L4", "NVIDIA_TESLA_A100", "NVIDIA_A100_80GB", "NVIDIA_H100_80GB", "NVIDIA_H100_MEGA_80GB"),
        *("NVIDIA_H200_141GB", "NVIDIA_B200"),
    )
)
"""What FLEX_START is for: Vertex AI's page on the Dynamic Workload Scheduler."""


def machine_of(job: Job, choice: int) -> Machine:
    """The machine. Raises `UnsupportedError`, or `SpecError` for one of which too little is known."""
    wanted = job.resources
    gpu = wanted.gpus[choice] if wanted.gpu else None
    if wanted.instance_type:
        return _pinned(job, wanted.instance_type, gpu)
    if gpu is not None:
        found = catalog.for_gpu(NAME, gpu, cpus=wanted.cpus, memory_gb=wanted.memory_gb)
        if found.instance_type.startswith(ATTACHED) and not wanted.cpus:
            found = catalog.for_gpu(NAME, gpu, cpus=CORES * gpu.count, memory_gb=wanted.memory_gb)
        return found
    if wanted.cpus or wanted.memory_gb:
        return catalog.for_cpus(NAME, FAMILIES, cpus=wanted.cpus, memory_gb=wanted.memory_gb)
    return next(m for m in catalog.machines(NAME) if m.instance_type == FIRST and not m.gpu)


def _pinned(job: Job, name: str, gpu: Gpu | None) -> Machine:
    same = [m for m in catalog.machines(NAME) if m.instance_type == name]
    if not same:
        return _unknown(name, gpu)
    bare = [m for m in same if not m.gpu]
    fitting = [m for m in same if m.is_for(gpu) and m.gpu_count == gpu.count] if gpu else bare or same
    if not fitting:
        there = ", ".join(m.gpus for m in same if m.gpu) or "no GPU"
        raise UnsupportedError(NAME, "resources.gpu", f"{name} has {there}, not {gpu}; leave one of the two out")
    found = fitting[0]
    for field, asked in (("cpus", job.resources.cpus), ("memory_gb", job.resources.memory_gb)):
        if not found.has(**{"cpus": None, "memory_gb": None, field: asked}):
            why = f"{name} has {found.vcpus} cores and {found.memory_gib or 0:g} GiB; leave one of the two out"
            raise UnsupportedError(NAME, f"resources.{field}", why)
    return found


def _unknown(name: str, gpu: Gpu | None) -> Machine:
    """One that the table lacks may be used where it has no GPU, whose own name and number Vertex must be told."""
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)+", name):
        raise UnsupportedError(NAME, "resources.instance_type", f"{name!r} is not the name of a machine type")
    if TPU.match(name):
        raise UnsupportedError(
            NAME, "resources.instance_type", f"{name} has TPUs, which PyTorch's torchrun does not use"
        )
    if gpu is not None or ACCELERATED.match(name):
        why = f"which GPUs {name} has is not known here; leave instance_type out, or name one that is"
        raise UnsupportedError(NAME, "resources.instance_type", why)
    if name.startswith(ATTACHED):
        raise SpecError(f"there is no {name} for training; the smallest is {FIRST}", field="resources.instance_type")
    return catalog.Machine(instance_type=name)


def accelerated(machine: Machine) -> str:
    """Why the machine cannot be had on demand; empty when it can. Source: Compute Engine's page on A3 machines."""
    if machine.spot_only:
        return f"{machine.instance_type} is for spot and FLEX_START only: set spot, a max_wait or vertex.strategy"
    return ""


def notes_of(machine: Machine, nodes: int) -> list[str]:
    """Return what the user should know of this machine. Source: Vertex AI's page on compute resources."""
    notes = []
    if nodes > 1 and (transport := TRANSPORTS.get(machine.accelerator)):
        notes.append(f"{transport} between nodes: each node sources {SCRIPTS[transport]}, if it is there")
    if machine.instance_type.startswith(ATTACHED) and machine.gpu and (machine.vcpus or 0) <= STARVED:
        few = f"{machine.instance_type} has {machine.vcpus} vCPUs for its GPUs and for Vertex AI's logging agent"
        notes.append(f"{few}: if the log stops, take a machine with more")
    return notes


def machine_spec(machine: Machine) -> dict[str, Any]:
    """The machineSpec: both the machine's name and its accelerators."""
    spec: dict[str, Any] = {"machineType": machine.instance_type}
    if machine.gpu:
        spec |= {"acceleratorType": machine.accelerator, "acceleratorCount": machine.gpu_count}
    return spec


def told_as(spec: Mapping[str, Any]) -> Machine | None:
    """The machine of a machineSpec, None where the table has none."""
    count = int(spec.get("acceleratorCount") or 0)
    return next(
        (
            m
            for m in catalog.machines(NAME)
            if m.instance_type == spec.get("machineType")
            and m.gpu_count == count
            and m.accelerator == (spec.get("acceleratorType") if count else "")
        ),
        None,
    )


def priced(machine: Machine) -> str:
    """The name under which the machine has a price: ``n1-standard-8+T4:1`` where its GPUs are not in its own."""
    name = machine.instance_type
    return f"{name}+{machine.gpus}" if machine.gpu and name.startswith(ATTACHED) else name
