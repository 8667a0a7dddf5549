"""What a run has used up by now: machine time, GPU hours, and money where a price is known. Pure.

A platform's own word comes first. Where it tells none, an attempt counts from its start to its end, and one that has no
end until the next began, its native job ended, or now.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..job.job import Job
from ..provider_api import catalog
from ..provider_api.limits import THIS_MACHINE, gpus_of
from ..provider_api.protocol import AttemptInfo, Request, Status

__all__ = ["Account", "cost_of", "seconds_of"]

NEVER_RAN = frozenset({"cancelled", "capacity", "quota"})
"""Categories of an attempt that had no machines, if neither its nodes nor a client know of a start."""

Spans = Sequence[tuple[float | None, float | None]]


@dataclass(frozen=True, kw_only=True)
class _Used:
    """By one native job; None is what nobody knows."""

    usd: float | None = None
    date: str = ""
    gpu_hours: float | None = None


@dataclass(frozen=True, kw_only=True)
class Account:
    """Who runs ``job`` (as ``provider`` runs it), by the account's ``prices``, in its ``region``."""

    job: Job
    provider: str
    prices: Mapping[str, float] | None = None
    region: str = ""


def seconds_of(spans: Spans, now: float) -> float:
    """Running time of attempts, oldest first, each from its start (None: it never did) to its end (None: no word)."""
    total = 0.0
    for number, (start, end) in enumerate(spans):
        if start is None:
            continue
        if end is None:
            end = next((later for later, _ in spans[number + 1 :] if later is not None), now)
        total += max(0.0, end - start)
    return total


def cost_of(
    account: Account,
    said: Mapping[str, Status],
    attempts: Sequence[AttemptInfo],
    request_of: Callable[[str], Request | None],
    now: float,
) -> dict[str, Any]:
    """The ``cost`` of a result, of all attempts; None where somebody would have to guess.

    ``said`` is what the platform says by native id, oldest first, ``request_of(native)`` what it was sent; ``now`` is
    Unix seconds. ``saved`` is the newest attempt's.
    """
    used = []
    for native, status in said.items():
        spans = [(info.started, info.ended) for info in attempts if info.native_id == native]
        used.append(_used(account, status, spans, partial(request_of, native), now))
    dates = sorted({item.date for item in used if item.date})
    return {
        "limit_usd": account.job.max_cost,
        "limit_gpu_hours": account.job.max_gpu_hours,
        "estimate_usd": _total([item.usd for item in used]),
        "priced_on": dates[0] if dates else None,
        "gpu_hours": _total([item.gpu_hours for item in used]),
        "billed_s": _total([status.billed_s for status in said.values()]),
        "saved": [*said.values()][-1].saved if said else None,
    }


def _total(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(sum(known), 4) if known and len(known) == len(values) else None


def _used(
    account: Account, status: Status, spans: Spans, request_of: Callable[[], Request | None], now: float
) -> _Used:
    began = any(start is not None for start, _ in spans)
    if status.final and not began and status.started is None:
        if not status.native:
            return _Used()  # the platform has forgotten it, and no node left a word
        if status.limit_s is not None and status.category not in NEVER_RAN:
            return _Used()  # it may have had machines, and the platform does not tell since when
    until = status.finished if status.final and status.finished is not None else now
    seconds = seconds_of(spans if began else [(status.started, status.finished)], until)
    nodes = account.job.resources.instance_count
    ran = seconds * nodes / 3600
    hours = ran if status.billed_s is None else status.billed_s / 3600
    names, choice = _machines(account.job, status, request_of)
    gpu_hours = None
    gpus = [gpus_of(account.provider, name, account.job, choice) for name in names]
    known = [count for count in gpus if count is not None]
    if known and len(known) == len(gpus):
        gpu_hours = max(ran, hours) * max(known)  # of spot, less is billed than has run
    if status.cost_usd is not None and (status.cost_usd or not ran):  # nothing, of what has run, is no answer
        return _Used(usd=status.cost_usd, gpu_hours=gpu_hours)
    if status.final and not hours:
        return _Used(usd=0.0, gpu_hours=gpu_hours)
    dearest = _dearest(account, names)
    if dearest is None:
        return _Used(gpu_hours=gpu_hours)
    machines = hours / nodes if names == (THIS_MACHINE,) else hours  # all nodes are on that one
    return _Used(usd=machines * dearest.usd_per_hour, date=dearest.date, gpu_hours=gpu_hours)


def _machines(job: Job, status: Status, request_of: Callable[[], Request | None]) -> tuple[tuple[str, ...], int]:
    """The machine that it has, else those that it was to have; and which GPU of the list, where that matters."""
    told = status.instance_type
    if told and len({gpu.count for gpu in job.resources.gpus}) <= 1:
        return (told,), 0
    request = request_of()
    if request is None:
        return (told,) if told else (), 0
    return ((told,) if told else tuple(request.instance_types) or (THIS_MACHINE,)), request.choice


def _dearest(account: Account, names: Sequence[str]) -> catalog.Price | None:
    """The account's own price, or one that the very service asks for; None where one of the machines has neither."""
    found = [catalog.price(account.provider, name, account.prices, region=account.region) for name in names]
    known = [price for price in found if price is not None and price.of_service]
    if not known or len(known) < len(found):
        return None
    return max(known, key=lambda price: price.usd_per_hour)
