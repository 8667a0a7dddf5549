"""The catalogue: which machines give which GPUs where, and at what price."""

from __future__ import annotations

import dataclasses
import fnmatch
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from ..errors import NotFoundError, SpecError
from ..job.job import Gpu
from ..provider_api import catalog
from ..provider_api.protocol import extras_of
from ..provider_api.registry import provider_names, suggested_provider
from ..validate import did_you_mean
from . import format
from .common_flags import HERE, At, switch
from .output import Screen
from .runs import Json, Ours
from .submit import Set, settings_pairs

if TYPE_CHECKING:
    from ..provider_api.catalog import Machine, Price
    from ..settings.settings import Settings

Pattern = Annotated[
    str | None, Parameter(help="NAME[-MEM][:COUNT], or a machine's name, in which * stands for anything; default: all")
]
Provider = Annotated[
    str | None, Parameter(name=("--provider", "-p"), metavar="NAME", help="machines of this provider only")
]
Memory = Annotated[float | None, Parameter(metavar="GIB", help="least memory of each GPU, in GiB")]
Network = Annotated[str | None, Parameter(metavar="TEXT", help="text in the machine's network: EFA, InfiniBand")]
SpotOnly = Annotated[
    bool | None, Parameter(help="machines that are sold as spot only; with no-: the others", show_default=False)
]
MaxPrice = Annotated[
    float | None, Parameter(metavar="USD", help="most US dollars an hour; omits machines without a known price")
]
Region = Annotated[
    str | None, Parameter(metavar="REGION", help="region of the prices; default: the provider's own setting")
]
Sort = Annotated[
    Literal["provider", "price", "gpu-price"],
    Parameter(
        metavar="KEY",
        show_default=False,
        help="price: lowest price an hour first; gpu-price: lowest price of each GPU first; default: by provider",
    ),
]
All = Annotated[bool, switch("machines without a known price too", "--all")]

COLUMNS = ("provider", "instance_type", "gpus", "memory", "cpus", "network", "usd_per_hour", "spot", "priced")


def gpus(
    pattern: Pattern = None,
    /,
    *,
    provider: Provider = None,
    memory: Memory = None,
    network: Network = None,
    spot_only: SpotOnly = None,
    max_price: MaxPrice = None,
    region: Region = None,
    sort: Sort = "provider",
    everything: All = False,
    settings: Set = None,
    at: At = HERE,
    json: Json = False,
    screen: Ours[Screen],
) -> int:
    """Machines with GPUs, by name, memory, network and price."""
    if provider is not None and provider not in provider_names():
        near = suggested_provider(provider)
        raise NotFoundError(f"no provider {provider!r}", field="provider", hint=near)
    chosen = at.settings(overrides=settings_pairs(settings), provider=provider)
    if settings and provider is None and chosen.provider not in catalog.providers():
        raise SpecError("belongs to one provider", field="set", hint="add --provider NAME")
    if at.profile and "provider" in chosen.origins:
        provider = chosen.provider
    made = {name: _made(chosen, name) for name in ((provider,) if provider else catalog.providers())}
    rows = [
        _row(name, machine, _price(made[name].settings, name, machine, region))
        for name, machine in _matching(pattern, _known(made))
        if _fits(machine, memory, network, spot_only)
    ]
    if max_price is not None:
        rows = [row for row in rows if row["usd_per_hour"] is not None and row["usd_per_hour"] <= max_price]
    rows.sort(key=lambda row: (_cost(row, sort), row["provider"], row["gpu"], row["gpu_count"], _cost(row, "price")))
    if screen.json:
        screen.emit({"machines": rows, "exit_code": 0})
    else:
        priced = [row for row in rows if row["usd_per_hour"] is not None]
        if pattern is None and priced and not everything:  # who names a machine wants to see it
            if more := len(rows) - len(priced):
                screen.talk(f"{more} machines without a known price are not listed (--all lists them)")
            rows = priced
        if rows:
            screen.data(format.table([_shown(row) for row in rows], COLUMNS))
    if not rows:
        screen.talk(f"no machine of {provider or 'the catalogue'} fits")
    _say(rows, screen)
    return 0


def _made(settings: Settings, name: str) -> Any:
    """The provider; ``--set`` is the chosen one's."""
    own = settings if name == settings.provider else dataclasses.replace(settings, overrides={})
    return own.make_provider(name)


def _known(made: Mapping[str, Any]) -> list[tuple[str, Machine]]:
    """The machines of each provider: those of the catalogue, or those that its account lists."""
    return [
        (name, machine)
        for name, provider in made.items()
        for machine in (catalog.machines(name) or extras_of(provider).machines())
        if machine.gpu and not machine.retired
    ]


def _matching(pattern: str | None, known: Sequence[tuple[str, Machine]]) -> Sequence[tuple[str, Machine]]:
    """Raises `NotFoundError`, with the nearest name, where none is called so."""
    if pattern is None:
        return known
    text = pattern.strip()
    found = [pair for pair in known if fnmatch.fnmatch(pair[1].instance_type.lower(), text.lower())]
    if found:
        return found
    try:
        gpu = Gpu.parse(text, field="pattern")
    except SpecError:
        gpu = None
    same = [pair for pair in known if gpu is not None and pair[1].is_for(gpu)]
    found = [pair for pair in same if gpu is not None and (":" not in text or pair[1].gpu_count == gpu.count)]
    if found:
        return found
    if gpu is not None and same:
        there = [machine for _, machine in same]
        raise NotFoundError(f"no known machine has {gpu}", field="pattern", hint=catalog.suggested_gpu(gpu, there))
    names = {machine.gpu for _, machine in known} | {machine.instance_type for _, machine in known}
    near = did_you_mean(text, sorted(names))
    raise NotFoundError(f"no known GPU or machine is called {text!r}", field="pattern", hint=near)


def _fits(machine: Machine, memory: float | None, network: str | None, spot_only: bool | None) -> bool:
    return (
        (memory is None or (machine.gpu_memory_gib or 0) >= memory)
        and (network is None or re.search(f"(?<!no ){re.escape(network)}", machine.network, re.IGNORECASE) is not None)
        and spot_only in (None, machine.spot_only)
    )


def _price(own: Any, provider: str, machine: Machine, region: str | None) -> Price | None:
    """By the settings ``own``; under the name that a plan would look for, where its GPUs are not in the machine's."""
    same = {other.gpus for other in catalog.machines(provider) if other.instance_type == machine.instance_type}
    name = machine.instance_type if len(same) == 1 else f"{machine.instance_type}+{machine.gpus}"
    return catalog.price(provider, name, getattr(own, "prices", None), region=region or catalog.region_of(own))


def _row(provider: str, machine: Machine, price: Price | None) -> dict[str, Any]:
    names = ("instance_type", "gpu", "gpu_count", "gpu_memory_gib", "vcpus", "memory_gib", "disk_gb", "arch", "network")
    whose = None
    if price is not None:
        told = ("source", "date", "own", "of_service")
        whose = {name: getattr(price, name) or (None if name == "date" else False) for name in told}
    return {
        "provider": provider,
        **{name: getattr(machine, name) for name in names},
        "spot_only": machine.spot_only,
        "usd_per_hour": price.usd_per_hour if price is not None else None,
        "spot_usd_per_hour": price.spot_usd_per_hour if price is not None else None,
        "price": whose,
    }


def _cost(row: Mapping[str, Any], sort: str) -> float:
    """Return the US dollars an hour by which a machine is sorted; one without a known price comes last."""
    if sort == "provider":
        return 0.0
    if row["usd_per_hour"] is None:
        return float("inf")
    return float(row["usd_per_hour"]) / (row["gpu_count"] if sort == "gpu-price" else 1)


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    whose = row["price"] or {}
    return {
        **row,
        "gpus": f"{row['gpu']}:{row['gpu_count']}",
        "memory": f"{row['gpu_memory_gib']:g} GiB" if row["gpu_memory_gib"] else "",
        "cpus": row["vcpus"],
        "usd_per_hour": f"{row['usd_per_hour']:.2f}" if row["usd_per_hour"] is not None else "unknown",
        "spot": "only" if row["spot_only"] else f"{row['spot_usd_per_hour']:.2f}" if row["spot_usd_per_hour"] else "",
        "priced": " ".join(filter(None, [whose.get("date"), "" if whose.get("of_service", True) else "(1)"])),
    }


def _say(rows: Sequence[dict[str, Any]], screen: Screen) -> None:
    for source in sorted({row["price"]["source"] for row in rows if row["price"]}):
        screen.talk(f"prices: {source}")
    if any(row["price"] and not row["price"]["of_service"] for row in rows):
        screen.talk("(1): the price list of another service with the same machines; the platform may charge more")
    if any(row["price"] is None for row in rows):
        screen.talk("unknown: to set your own price, add --provider NAME --set prices.MACHINE=USD")
