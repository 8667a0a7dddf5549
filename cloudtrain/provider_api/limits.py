"""Convert limits of money and GPU hours into seconds of running time, which a platform can enforce. Pure.

``max_cost`` buys ``max_cost / (machines x price)`` hours, ``max_gpu_hours`` gives ``max_gpu_hours / GPUs``. The
shortest of these and ``max_runtime`` is the hard limit of the native request. A run's choice of a GPU list is not known
in advance. So the most expensive one, and the one with the most GPUs, set the limit for every choice.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import SpecError, UnsupportedError
from ..validate import is_price
from . import catalog
from .protocol import check_settings

if TYPE_CHECKING:  # a node compiles all imports at each start, and does not need these
    from ..job.job import Job

THIS_MACHINE = "localhost"
"""Name under which a machine that starts its nodes itself has a price; all nodes are on it."""
LONGEST = 10**9
"""Seconds; longer than any platform runs a job. An amount of money may buy more than fit into an integer."""


def checked_settings(settings: Any, provider: str) -> Any:
    """Return a provider's settings with sorted prices, if their values are valid by themselves. Raises `SpecError`."""
    check_settings(settings, f"{provider}.")
    return dataclasses.replace(settings, prices=checked_prices(settings.prices, provider))


def checked_prices(prices: Any, provider: str) -> dict[str, float]:
    """Return the setting ``prices``, sorted by name. Raises `SpecError` for a value that is not a price."""
    values = prices.values() if isinstance(prices, Mapping) else [None]
    if not all(is_price(value) for value in values):
        raise SpecError("must be a table of US dollars an hour by machine, each above zero", field=f"{provider}.prices")
    return dict(sorted(prices.items()))


def gpus_per_node(provider: str, machine: str, job: Job, gpu_index: int) -> int | None:
    """Return the GPUs a node for the ``gpu_index``-th GPU of the list, on ``machine``; None means unknown.

    ``machine`` is a name of the price table: ``n1-standard-8+T4:1`` if its own name does not include the GPUs.
    """
    if job.resources.gpu:
        return job.resources.gpus[gpu_index].count
    if machine == THIS_MACHINE:
        return 0
    name, plus, attached = machine.partition("+")
    if plus:
        return int(attached.rpartition(":")[2])
    counts = {m.gpu_count for m in catalog.machines(provider) if m.instance_type == name}
    return min(counts, default=None)  # the machine without GPUs, if the name stands for both


def hard_limit(
    job: Job,
    provider: str,
    names: Callable[[int], Sequence[str]],
    *,
    gpu_index: int,
    own: Mapping[str, float],
    least: int = 1,
    held: int = 0,
) -> tuple[int, list[str]]:
    """Return the seconds after which the platform must end the job, and notes for the user.

    ``names(index)`` are the machines possible for that GPU of the list, named as in ``own``, the account's prices. It
    raises `SpecError` for a GPU that the provider lacks. ``least`` is the platform's shortest limit, ``held`` the
    seconds of machines paid for after the job. Raises `UnsupportedError` if a price or a number of GPUs is unknown, and
    `SpecError` for a limit below ``least``.
    """
    if job.max_cost is None and job.max_gpu_hours is None:
        return job.max_runtime, []
    found = list(_machines(job, names, gpu_index))
    count = 1 if found[0][1] == THIS_MACHINE else job.resources.instance_count
    span = "one second" if least == 1 else f"{least} s"
    limits = {"max_runtime": (job.max_runtime, "")}
    if job.max_cost is not None:
        name, hourly = _dearest(provider, [name for _, name in found], own)
        seconds = int(min(job.max_cost / hourly / count * 3600, LONGEST)) - held
        if seconds < least:
            raise SpecError(f"does not pay for {span} of {count} x {name}", field="max_cost")
        what = f"max_cost {job.max_cost:g} USD buys {seconds} s of {count} x {name} at {hourly:g} USD an hour"
        limits["max_cost"] = seconds, what
    if job.max_gpu_hours is not None:
        gpus = max(_known(provider, name, job, at) for at, name in found) * job.resources.instance_count
        seconds = int(min(job.max_gpu_hours / gpus * 3600, LONGEST)) - held
        if seconds < least:
            raise SpecError(f"is not enough for {span} of {gpus} GPUs", field="max_gpu_hours")
        limits["max_gpu_hours"] = seconds, f"max_gpu_hours {job.max_gpu_hours:g} is {seconds} s of {gpus} GPUs"
    which = min(limits, key=lambda name: limits[name][0])
    said = [f"{what}: that is the limit now" for name, (_, what) in limits.items() if name == which and what]
    others = [what for name, (_, what) in limits.items() if name != which and what]
    if which == "max_runtime":
        said = [f"max_runtime {job.max_runtime} s is the limit now: {'; '.join(others)}"]
    return limits[which][0], said


def _machines(job: Job, names: Callable[[int], Sequence[str]], gpu_index: int) -> Iterator[tuple[int, str]]:
    """Yield (gpu_index, machine) for every machine that the run may get."""
    for at in range(max(1, len(job.resources.gpu))):
        try:
            found = names(at)
        except SpecError:
            if at == gpu_index:
                raise
            continue  # no attempt gets it
        yield from ((at, name) for name in found)


def _dearest(provider: str, names: Sequence[str], own: Mapping[str, float]) -> tuple[str, float]:
    """Return the most expensive machine by the account's own prices: other lists may be too low or differ by client."""
    for name in names:
        if name not in own:
            known = catalog.price(provider, name)
            near = f" ({known.usd_per_hour:g} is {known.source.partition(' (')[0]}, not your own)" if known else ""
            how = f'to set it, add --set prices.{name}=USD, or [{provider}.prices] "{name}" = USD an hour'
            raise UnsupportedError(provider, "max_cost", f"no price of {name} is known{near}", hint=how)
    name = max(names, key=lambda name: own[name])
    return name, float(own[name])


def _known(provider: str, name: str, job: Job, gpu_index: int) -> int:
    gpus = gpus_per_node(provider, name, job, gpu_index)
    if gpus is None:
        why, how = f"the number of GPUs of {name} is unknown", "set gpu (NAME:COUNT), or use max_runtime"
        raise UnsupportedError(provider, "max_gpu_hours", why, hint=how)
    if not gpus:
        what = "the job asks for no GPU" if name == THIS_MACHINE else f"{name} has no GPU"
        raise UnsupportedError(provider, "max_gpu_hours", what, hint="ask for GPUs with gpu, or use max_runtime")
    return gpus
