"""The platforms' machines and their prices: ``data/instances.csv`` and ``data/prices.csv``.

The tables never reject a machine that they lack, because platforms add machines.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from ..errors import SpecError, UnsupportedError
from ..job.job import Gpu
from ..validate import respelt, similar

GIB_IN_GB = 1.073741824
COMPASS = ("north", "south", "east", "west", "central", "northeast", "northwest", "southeast", "southwest")
"""Words in the names of regions."""
_MEMORY = re.compile(r"-(\d+)GB$")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One kind of machine. ``gpu`` is empty without one; None: no source has the value. ``disk_gb`` is built in.

    ``accelerator`` is the platform's name of the GPU, if requests need it. ``network`` is the source's own text.
    ``spot_only``: not available on demand. ``retired`` is the date from which the platform no longer offers it, or "".
    """

    instance_type: str
    gpu: str = ""
    gpu_count: int = 0
    gpu_memory_gib: float | None = None
    vcpus: int | None = None
    memory_gib: float | None = None
    disk_gb: int | None = None
    arch: str = "x86_64"
    accelerator: str = ""
    network: str = ""
    spot_only: bool = False
    retired: str = ""

    @property
    def gpus(self) -> str:
        """The GPUs as a Job names them: ``A100-80GB:8``; empty without a GPU."""
        return f"{self.gpu}:{self.gpu_count}" if self.gpu else ""

    def has(self, *, cpus: int | None, memory_gb: int | None) -> bool:
        """Return whether the machine is known to have at least this many cores and this much memory."""
        enough_cpus = cpus is None or (self.vcpus or 0) >= cpus
        return enough_cpus and (memory_gb is None or (self.memory_gib or 0) * GIB_IN_GB >= memory_gb)

    def is_for(self, gpu: Gpu) -> bool:
        """Return whether the machine has the kind of GPU that ``gpu`` names, in any number."""
        memory = gpu.memory_gb in (None, self.gpu_memory_gib) or self.gpu.endswith(f"-{gpu.memory_gb}GB")
        return bool(self.gpu) and _MEMORY.sub("", self.gpu) == gpu.name and memory


@dataclass(frozen=True, kw_only=True)
class Price:
    """US dollars for an hour of one machine on demand, from ``source``; ``date`` is empty if the source has none.

    ``spot_usd_per_hour`` is the lowest spot price of the same list, or None. ``own``: from the account's own settings;
    other prices only serve estimates. ``of_service``: the price of that very service, not of another one with the same
    machines.
    """

    usd_per_hour: float
    source: str
    date: str = ""
    own: bool = False
    of_service: bool = False
    spot_usd_per_hour: float | None = None


def _rows(table: str) -> list[dict[str, str]]:
    """Return the rows of a shipped table."""
    with (Path(__file__).parents[1] / "data" / table).open(newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


def _float(text: str) -> float | None:
    return float(text) if text else None


def _int(text: str) -> int | None:
    return int(text) if text else None


@cache
def _prices() -> dict[tuple[str, str], dict[str, Price]]:
    """Return the shipped prices of each provider and instance type, by region.

    Column ``list`` names the price list, ``own`` (yes, no) says if it is that very service's. ``spot_usd_per_hour`` is
    the cheapest zone's.
    """
    found: dict[tuple[str, str], dict[str, Price]] = {}
    for row in _rows("prices.csv"):
        found.setdefault((row["provider"], row["instance_type"]), {})[row["region"]] = Price(
            usd_per_hour=float(row["usd_per_hour"]),
            source=f"{row['list']}, {row['region']} ({row['source']})",
            date=row["date"],
            of_service=row["own"] == "yes",
            spot_usd_per_hour=_float(row["spot_usd_per_hour"]),
        )
    return found


def price(
    provider: str, instance_type: str, own: Mapping[str, float] | None = None, *, region: str = ""
) -> Price | None:
    """Return the price from the account's ``own`` table, else the shipped one of ``region``, else of any region."""
    if own and instance_type in own:
        usd, source = float(own[instance_type]), f"setting {provider}.prices"
        return Price(usd_per_hour=usd, source=source, own=True, of_service=True)
    found = _prices().get((provider, instance_type), {})
    return found.get(region) or next(iter(found.values()), None)


def region_of(settings: Any) -> str:
    """Return the account's region, from whichever of the two settings its provider has; empty if it has neither."""
    return str(getattr(settings, "region", "") or getattr(settings, "location", "") or "")


@cache
def providers() -> tuple[str, ...]:
    """Return the providers in the table of machines."""
    return tuple(sorted({row["provider"] for row in _rows("instances.csv")}))


@cache
def machines(provider: str) -> tuple[Machine, ...]:
    """Return every known machine of ``provider``, except those with a fraction of a GPU."""
    return tuple(
        Machine(
            instance_type=row["instance_type"],
            gpu=row["gpu"],
            gpu_count=int(row["gpu_count"]),
            gpu_memory_gib=_float(row["gpu_memory_gib"]),
            vcpus=_int(row["vcpus"]),
            memory_gib=_float(row["memory_gib"]),
            disk_gb=_int(row["disk_gb"]),
            arch=row["arch"] or "x86_64",
            accelerator=row["accelerator_type"],
            network=row["network"],
            spot_only=row["offer"] == "spot",
            retired=row["offer"].removeprefix("retired ") if row["offer"].startswith("retired ") else "",
        )
        for row in _rows("instances.csv")
        if row["provider"] == provider and row["gpu_count"].isdigit()
    )


def machine(provider: str, instance_type: str) -> Machine | None:
    """Return the machine of that name, or None if the table lacks it."""
    return next((m for m in machines(provider) if m.instance_type == instance_type), None)


def check_name(provider: str, name: str, form: re.Pattern[str], *, prefix: str = "") -> None:
    """Raise `UnsupportedError` if a machine's name does not match its platform's ``form``, or has a misspelt word.

    The hint is the nearest name. A well-formed name that the table lacks passes: platforms add machines. ``prefix``
    begins every name here; other services of the same vendor leave it out.
    """
    names = [m.instance_type for m in machines(provider)]
    meant = respelt(name, names, least=5)
    if form.fullmatch(name) and meant == name:
        return
    tries = [meant, f"{prefix}{meant}"]
    near = next((item for item in tries if form.fullmatch(item)), "")
    near = near or next(filter(None, (similar(item, names) for item in tries)), "")
    hint = f"did you mean {near!r}?" if near else f"to list the machines, run: cloudtrain gpus --provider {provider}"
    why = f"{name!r} is not the name of a machine type"
    raise UnsupportedError(provider, "resources.instance_type", why, hint=hint)


def check_region(field: str, region: str, known: Sequence[str]) -> None:
    """Raise `SpecError` for a region with a misspelt word. A region with new words or a new number passes."""
    meant = respelt(region, (*known, *COMPASS), least=4)
    if meant != region:
        raise SpecError(f"{region!r} is not a region", field=field, hint=f"did you mean {meant!r}?")


def for_gpu(provider: str, gpu: Gpu, *, cpus: int | None = None, memory_gb: int | None = None) -> Machine:
    """Return the smallest machine with exactly the GPUs of ``gpu``, and at least these cores and memory.

    Raises `UnsupportedError` (``resources.gpu``) with the machines that have that GPU.
    """
    same = [m for m in machines(provider) if m.is_for(gpu)]
    exact = [m for m in same if m.gpu_count == gpu.count]
    fitting = [m for m in exact if not m.retired and m.has(cpus=cpus, memory_gb=memory_gb)]
    if not fitting:
        raise _none(provider, gpu, same, exact)
    return min(fitting, key=lambda m: (m.gpu_memory_gib or 0, *_size(m)))


def for_cpus(provider: str, families: Sequence[str], *, cpus: int | None, memory_gb: int | None) -> Machine:
    """Return the smallest machine without a GPU, of ``families`` (prefixes of names), with at least these resources.

    Raises `UnsupportedError` (``resources.cpus`` or ``resources.memory_gb``), naming the largest.
    """
    known = [m for m in machines(provider) if not m.gpu and m.instance_type.startswith(tuple(families))]
    fitting = [m for m in known if m.has(cpus=cpus, memory_gb=memory_gb)]
    if not fitting:
        field = "resources.cpus" if not any(m.has(cpus=cpus, memory_gb=None) for m in known) else "resources.memory_gb"
        largest = max(known, key=_size)
        why = f"no machine has that much; the largest, {_describe(largest)}; or pin instance_type"
        raise UnsupportedError(provider, field, why)
    return min(fitting, key=_size)


def _size(m: Machine) -> tuple[int, float]:
    return m.vcpus or 0, m.memory_gib or 0.0


def _describe(m: Machine) -> str:
    return f"{m.instance_type}, has {m.vcpus} cores and {m.memory_gib or 0:g} GiB"


def _none(provider: str, gpu: Gpu, same: Sequence[Machine], exact: Sequence[Machine]) -> UnsupportedError:
    """Return the error for GPUs that no machine has; its hint is an available GPU or number of nodes."""
    hint = ""
    if exact and all(m.retired for m in exact):
        gone = min(exact, key=_size)
        why, hint = f"{gone.instance_type}, which had {gpu}, was retired on {gone.retired}", "choose another GPU"
    elif exact:
        largest = max(exact, key=_size)
        why = f"no machine with {gpu} has the requested cpus and memory_gb; the largest, {_describe(largest)}"
    else:
        there = [m for m in same or machines(provider) if m.gpu and not m.retired]
        why, hint = f"no known machine has {gpu}", suggested_gpu(gpu, there)
    return UnsupportedError(provider, "resources.gpu", why, hint=hint)


def gpu_names(known: Iterable[Machine]) -> list[str]:
    """Return the GPUs of machines as a job names them, by name and then by number."""
    return list(dict.fromkeys(m.gpus for m in sorted(known, key=lambda m: (m.gpu, m.gpu_count)) if m.gpu))


def suggested_gpu(gpu: Gpu, known: Iterable[Machine]) -> str:
    """Return a hint for a GPU that no machine of ``known`` has: a similar name, or the same number on more nodes."""
    known = list(known)
    counts = sorted({m.gpu_count for m in known if m.is_for(gpu)}, reverse=True)
    count = next((count for count in counts if gpu.count % count == 0), 0)
    if count:
        ours = ", ".join(gpu_names(m for m in known if m.is_for(gpu)))
        found = f"--nodes {gpu.count // count} --gpu {replace(gpu, count=count)} has {gpu.count} GPUs"
        return f"{found}; a machine has {ours}"
    is_real = any(m.is_for(replace(gpu, memory_gb=None)) for name in providers() for m in machines(name))
    near = "" if is_real else similar(gpu.name, {_MEMORY.sub("", m.gpu) for m in known if m.gpu})
    if counts or not near or near == gpu.name:
        names = gpu_names(known) if counts else sorted({_MEMORY.sub("", m.gpu) for m in known if m.gpu})
        return f"choose from {', '.join(names)}; cloudtrain gpus lists the machines"
    typo = replace(gpu, name=near)
    meant = typo if any(m.is_for(typo) for m in known) else replace(typo, memory_gb=None)
    there = {m.gpu_count for m in known if m.is_for(meant)}
    return f"did you mean --gpu {meant if meant.count in there else replace(meant, count=max(there))}?"


def variants(provider: str, gpu: Gpu) -> list[str]:
    """Return the GPUs of ``provider`` that match ``gpu``: several if it leaves the memory open."""
    return gpu_names(m for m in machines(provider) if m.is_for(gpu) and m.gpu_count == gpu.count and not m.retired)
