"""Compute a run's use so far: machine time, GPU hours, and money if a price is known. Pure.

The platform's own figures come first. Otherwise an attempt counts from its start to its end. Without an end it counts
until the next attempt's start, the end of its native job, or now.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..job.job import Job
from ..provider_api import catalog
from ..provider_api.limits import THIS_MACHINE, gpus_per_node
from ..provider_api.protocol import AttemptInfo, Provider, Request, Status

NEVER_RAN = frozenset({"cancelled", "capacity", "quota"})
"""Categories of an attempt that had no machines, unless its nodes or a client know of a start."""

Spans = Sequence[tuple[float | None, float | None]]


@dataclass(frozen=True, kw_only=True)
class _Used:
    """Use by one native job; None means unknown."""

    usd: float | None = None
    date: str = ""
    gpu_hours: float | None = None


def seconds_of(spans: Spans, now: float, nodes: Sequence[int] = ()) -> float:
    """Return the running time of attempts, oldest first, from start (None: never started) to end (None: unknown).

    With the ``nodes`` of each attempt, return the sum over its nodes.
    """
    total = 0.0
    for number, (start, end) in enumerate(spans):
        if start is None:
            continue
        if end is None:
            end = next((later for later, _ in spans[number + 1 :] if later is not None), now)
        total += max(0.0, end - start) * (nodes[number] if nodes else 1)
    return total


def cost_of(
    job: Job,
    provider: Provider,
    statuses: Mapping[str, Status],
    attempts: Sequence[AttemptInfo],
    request_of: Callable[[str], Request | None],
    now: float,
) -> dict[str, Any]:
    """Return the ``cost`` of a result, over all attempts; None for each value that would be a guess.

    ``job`` is as ``provider`` runs it. ``statuses`` is the platform's status by native id, oldest first.
    ``request_of(native)`` is the request sent. ``now`` is Unix seconds. ``saved`` is the newest attempt's.
    """
    used = []
    for native, status in statuses.items():
        own = [info for info in attempts if info.native_id == native]
        used.append(_used(job, provider, status, own, partial(request_of, native), now))
    dates = sorted({item.date for item in used if item.date})
    return {
        "limit_usd": job.max_cost,
        "limit_gpu_hours": job.max_gpu_hours,
        "estimate_usd": _total([item.usd for item in used]),
        "priced_on": dates[0] if dates else None,
        "gpu_hours": _total([item.gpu_hours for item in used]),
        "billed_s": _total([status.billed_s for status in statuses.values()]),
        "saved": [*statuses.values()][-1].saved if statuses else None,
    }


def _total(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(sum(known), 4) if known and len(known) == len(values) else None


def _used(
    job: Job,
    provider: Provider,
    status: Status,
    attempts: Sequence[AttemptInfo],
    request_of: Callable[[], Request | None],
    now: float,
) -> _Used:
    spans: Spans = [(info.started, info.ended) for info in attempts]
    nodes = [info.nodes or job.resources.instance_count for info in attempts]
    began = any(start is not None for start, _ in spans)
    if status.final and not began and status.started is None:
        if not status.native:
            return _Used()  # the platform has forgotten it, and no node left a record
        if status.limit_s is not None and status.category not in NEVER_RAN:
            return _Used()  # it may have had machines, and the platform does not report its start
    until = status.finished if status.final and status.finished is not None else now
    if not began:
        spans, nodes = [(status.started, status.finished)], nodes[-1:] or [job.resources.instance_count]
    ran = seconds_of(spans, until, nodes) / 3600
    hours = ran if status.billed_s is None else status.billed_s / 3600
    names, gpu_index = _machines(job, status, request_of)
    gpu_hours = None
    gpus = [gpus_per_node(provider.name, name, job, gpu_index) for name in names]
    known = [count for count in gpus if count is not None]
    if known and len(known) == len(gpus):
        gpu_hours = max(ran, hours) * max(known)  # spot bills less than the job ran
    if status.cost_usd is not None and (status.cost_usd or not ran):  # a cost of 0 for time that ran is no answer
        return _Used(usd=status.cost_usd, gpu_hours=gpu_hours)
    if status.final and not hours:
        return _Used(usd=0.0, gpu_hours=gpu_hours if ran else 0.0)
    dearest = _dearest(provider, names)
    if dearest is None:
        return _Used(gpu_hours=gpu_hours)
    machines = seconds_of(spans, until) / 3600 if names == (THIS_MACHINE,) else hours  # all nodes share this machine
    return _Used(usd=machines * dearest.usd_per_hour, date=dearest.date, gpu_hours=gpu_hours)


def _machines(job: Job, status: Status, request_of: Callable[[], Request | None]) -> tuple[tuple[str, ...], int]:
    """Return the machine in use, else the requested ones; and the index of the GPU in the list, where that matters."""
    machine = status.instance_type
    if machine and len({gpu.count for gpu in job.resources.gpus}) <= 1:
        return (machine,), 0
    request = request_of()
    if request is None:
        return (machine,) if machine else (), 0
    return ((machine,) if machine else tuple(request.instance_types) or (THIS_MACHINE,)), request.gpu_index


def price_of(provider: Provider, machine: str) -> catalog.Price | None:
    """Return the price of a machine: the account's own, else that of its region; None if it is unknown."""
    settings = provider.settings
    own, region = getattr(settings, "prices", None), catalog.region_of(settings)
    return catalog.price(provider.name, machine, own, region=region)


def _dearest(provider: Provider, names: Sequence[str]) -> catalog.Price | None:
    """Return the highest price: the account's own or the very service's; None if one of the machines has neither."""
    found = [price_of(provider, name) for name in names]
    known = [price for price in found if price is not None and price.of_service]
    if not known or len(known) < len(found):
        return None
    return max(known, key=lambda price: price.usd_per_hour)
