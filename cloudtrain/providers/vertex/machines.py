"""Choose a job's machine, and write its machineSpec: a GPU is named beside its machine, and counted."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...errors import SpecError, UnsupportedError
from ...provider_api import catalog
from .. import _cloud
from . import NAME
from .node import SCRIPTS, TRANSPORTS

if TYPE_CHECKING:
    from ...job.job import Gpu, Job
    from ...provider_api.catalog import Machine

FIRST = "n1-standard-4"
"""The smallest machine for training; part of its memory is the system's own."""
FAMILIES = ("n1-standard-", "n1-highmem-", "n1-highcpu-")
ATTACHED = "n1-"
"""The family whose machines come with and without GPUs; elsewhere the machine's name implies them."""
CORES = 4
"""Default cores a GPU: eight GPUs would starve on the four cores that are allowed."""
MEMORY_GB = 3
"""Default gigabytes of memory a core beside a GPU: an n1-highcpu machine has less than one."""
STARVED = 4
"""Number of vCPUs, beside a GPU, at which a running job's log may stop. Google names n1-highmem-2 as an example."""
ACCELERATED = re.compile(r"(a\d+x?|g\d+)-")
FORM = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)+")
"""Series, kind and cores."""
TPU = re.compile(r"(ct|tpu)", re.IGNORECASE)
SCARCE = frozenset(("NVIDIA_H100_MEGA_80GB", "NVIDIA_H200_141GB", "NVIDIA_B200"))
"""GPUs for which Google recommends (configure-compute) a reservation or spot machines; FLEX_START has them, too."""
FLEXIBLE = SCARCE | {"NVIDIA_L4", "NVIDIA_TESLA_A100", "NVIDIA_A100_80GB", "NVIDIA_H100_80GB"}
"""Accelerators of FLEX_START: Vertex AI's page on the Dynamic Workload Scheduler."""
DISK_LIMITS_GB = (100, 64_000)
"""Least and most of a boot disk: Google's page configure-compute of serverless training."""
RESERVED = frozenset(("NVIDIA_GB200",))
"""GPUs that need a shared reservation: the same page."""
ENDED: Mapping[str, str] = {"NVIDIA_TESLA_P100": "15 September 2026"}
"""End of Google's support by GPU: the same page."""
LOCATIONS = (
    *("africa-south1", "asia-east1", "australia-southeast1", "europe-west4", "me-west1", "northamerica-northeast1"),
    *("southamerica-east1", "us-central1"),
)
"""One region of each part of the world, for the words of regions' names."""
_PAGE = _cloud.table_in(__file__, "regions.json")
REGIONS_DATE: str = _PAGE["date"]
REGIONS: Mapping[str, Sequence[str]] = _PAGE["regions"]
"""Regions where training has a GPU. Google adds regions, so the table only advises."""


def machine_of(job: Job, gpu_index: int) -> Machine:
    """Return the machine. Raises `UnsupportedError`, or `SpecError` if too little is known of it."""
    wanted = job.resources
    if wanted.instance_type and TPU.match(wanted.instance_type):
        why = f"{wanted.instance_type} has TPUs, which PyTorch's torchrun does not use"
        raise UnsupportedError(NAME, "resources.instance_type", why)
    name, found = _cloud.machine_of(NAME, job, gpu_index, form=FORM, families=FAMILIES, first=FIRST)
    gpu = wanted.gpus[gpu_index] if wanted.gpu else None
    if found is None:
        return _unknown(name, gpu)
    if gpu is not None and not wanted.instance_type and name.startswith(ATTACHED):
        cores = wanted.cpus or CORES * gpu.count
        with contextlib.suppress(UnsupportedError):  # our default size, which a job need not have
            return catalog.for_gpu(NAME, gpu, cpus=cores, memory_gb=wanted.memory_gb or MEMORY_GB * cores)
    return found


def _unknown(name: str, gpu: Gpu | None) -> Machine:
    """Return a machine that the table lacks, if it has no GPU: Vertex needs a GPU's own name and number."""
    if gpu is not None or ACCELERATED.match(name):
        why, hint = f"cloudtrain does not know which GPUs {name} has", "name another machine, or only a GPU with --gpu"
        raise UnsupportedError(NAME, "resources.instance_type", why, hint=hint)
    if name.startswith(ATTACHED):
        hint = f"the smallest one is {FIRST}"
        raise SpecError(f"there is no {name} for training", field="resources.instance_type", hint=hint)
    return catalog.Machine(instance_type=name)


def check_available(job: Job, machine: Machine, *, strategy: str, reserved: bool) -> None:
    """Raise `UnsupportedError` for a machine that cannot be had with ``strategy``, or without a reservation.

    Sources: Compute Engine's page on A3 machines, and Google's page configure-compute of serverless training.
    """
    if machine.spot_only and strategy not in ("SPOT", "FLEX_START"):
        why, hint = "comes only as spot or by FLEX_START", "add --spot or --max-wait, or set vertex.strategy"
    elif machine.accelerator in RESERVED and not reserved:
        why, hint = "needs a shared reservation", "set vertex.reservation"
    else:
        return
    field = "resources.gpu" if job.resources.gpu else "resources.instance_type"
    raise UnsupportedError(NAME, field, f"{machine.instance_type} {why}", hint=hint)


def advice(machine: Machine, *, strategy: str, reserved: bool, location: str) -> Iterator[str]:
    """Yield notes on the machine, none certain enough to refuse it. ``reserved``: the job asks for a reservation."""
    name, gpu = machine.instance_type, machine.gpu
    if machine.accelerator in SCARCE and strategy not in ("SPOT", "FLEX_START") and not reserved:
        yield f"{name}: Google recommends a reservation, spot or FLEX_START (a max_wait) for {gpu}, not on demand"
    if end := ENDED.get(machine.accelerator):
        yield f"{name}: Google's support of {gpu} ended on {end}"
    if location and (known := REGIONS.get(machine.accelerator)) and location not in known:
        yield f"{name}: Google's page of {REGIONS_DATE} lists no {gpu} in {location}, but in {', '.join(known)}"


def notes_of(machine: Machine, nodes: int) -> list[str]:
    """Return notes on this machine. Source: Vertex AI's page on compute resources."""
    notes = []
    if nodes > 1 and (transport := TRANSPORTS.get(machine.accelerator)):
        notes.append(f"{transport} between nodes: each node sources {SCRIPTS[transport]}, if it is there")
    if machine.instance_type.startswith(ATTACHED) and machine.gpu and (machine.vcpus or 0) <= STARVED:
        few = f"{machine.instance_type} has {machine.vcpus} vCPUs for its GPUs and for Vertex AI's logging agent"
        notes.append(f"{few}: if the log stops, take a machine with more")
    return notes


def machine_spec(machine: Machine) -> dict[str, Any]:
    """Return the machineSpec: both the machine's name and its accelerators."""
    spec: dict[str, Any] = {"machineType": machine.instance_type}
    if machine.gpu:
        spec |= {"acceleratorType": machine.accelerator, "acceleratorCount": machine.gpu_count}
    return spec


def known_machine(spec: Mapping[str, Any]) -> Machine | None:
    """Return the machine of a machineSpec; None if the table lacks it."""
    count = int(spec.get("acceleratorCount") or 0)
    wanted = spec.get("machineType"), count, spec.get("acceleratorType") if count else ""
    found = (m for m in catalog.machines(NAME) if (m.instance_type, m.gpu_count, m.accelerator) == wanted)
    return next(found, None)


def priced(machine: Machine) -> str:
    """Return the machine's name in price lists: ``n1-standard-8+T4:1`` if its own name does not imply the GPUs."""
    name = machine.instance_type
    return f"{name}+{machine.gpus}" if machine.gpu and name.startswith(ATTACHED) else name
