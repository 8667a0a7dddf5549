"""Find the number of nodes of a job that asks for a total of GPUs, or of an attempt with fewer nodes. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..errors import SpecError, UnsupportedError
from ..job.job import Gpu
from . import catalog

if TYPE_CHECKING:
    from ..job.job import Job
    from .catalog import Machine
    from .protocol import Layout, Provider, Request

FIELD = "resources.total_gpus"


def with_node_count(job: Job, provider: str, *, picks_machine: bool = True) -> Job:
    """Return ``job`` with the nodes and the GPUs of each node in place of its ``total_gpus``.

    A node has the GPUs that the job names (a count above 1), or its share of the job's own number of nodes, or those of
    the largest machine whose GPUs divide the total. The GPUs of a list share this number. ``picks_machine`` as in
    `ProviderExtras`. Raises `SpecError` if the fields contradict each other, and `UnsupportedError` for a GPU or a
    machine that is unknown. Each choice in a hint is complete: with it in place of the job's own flags, the job passes.
    """
    total, wanted = job.resources.total_gpus, job.resources
    if total is None:
        return job
    known = [m for m in catalog.machines(provider) if m.gpu] if picks_machine else []
    if not wanted.gpu and not wanted.instance_type:
        hint = f"add --gpu NAME, such as --gpu {_example(job, known)}"
        raise SpecError("needs the kind of GPU", field=FIELD, hint=hint)
    if len({gpu.count for gpu in wanted.gpus} - {1}) > 1:
        raise SpecError(f"{', '.join(wanted.gpu)} name different numbers of GPUs a node", field="resources.gpu")
    each, why = _count(job, known)
    if not each:
        if known and wanted.gpu:  # the catalogue's own error for a GPU that it lacks
            counts = [m.gpu_count for m in known if m.is_for(wanted.gpus[0])]
            first = replace(wanted.gpus[0], count=max(counts)) if counts else wanted.gpus[0]
            catalog.for_gpu(provider, first, cpus=wanted.cpus, memory_gb=wanted.memory_gb)
        choices = " or ".join(_choices(job, known, complete=bool(why)))
        hint = f"write {choices}" if choices else ""
        if why:
            raise SpecError(why, field=FIELD, hint=hint)
        raise UnsupportedError(provider, FIELD, "the GPUs of its machines are not known here", hint=hint)
    gpu = tuple(str(replace(item, count=each)) for item in wanted.gpus)
    return job.replace(total_gpus=None, instance_count=total // each, gpu=gpu)


def plan_attempt(provider: Provider, job: Job, layout: Layout, number: int, gpu_index: int, *, nodes: int) -> Request:
    """Return the request of attempt ``number`` with ``nodes`` nodes. Its context keeps the job's own number of nodes.

    Raises the errors of `Provider.plan`.
    """
    if nodes == job.resources.instance_count:
        return provider.plan(job, layout, number, gpu_index)
    fewer = job.replace(instance_count=nodes, min_instance_count=None)
    request = provider.plan(fewer, layout, number, gpu_index)
    return replace(request, context={**request.context, "planned_nodes": job.resources.instance_count})


def _count(job: Job, known: Sequence[Machine]) -> tuple[int, str]:
    """Return the GPUs of each node, or 0 and what is wrong: empty for a machine that is not among the ``known``."""
    wanted = job.resources
    total, nodes = wanted.total_gpus or 0, wanted.instance_count if wanted.instance_count > 1 else 0
    named = max((gpu.count for gpu in wanted.gpus if gpu.count > 1), default=0)
    least = wanted.min_instance_count
    over = f"{nodes} nodes" + (f" (the most of {least}:{nodes})" if least else "")
    offered = _offered(job, known)
    if not named and nodes and wanted.gpu:
        if total % nodes:
            return 0, f"cannot divide {_gpus(total)} over {over}"
        each = total // nodes
    elif named or (total == 1 and wanted.gpu and not offered):
        each = named or 1
    elif not offered:
        return 0, ""
    else:
        each = max((count for count in offered if total % count == 0), default=0)
    if nodes and nodes * each != total:
        if named:
            return 0, f"{over} of {_gpus(named)} have {nodes * named}, not {total}"
        return 0, f"{over} of {wanted.instance_type} do not have {_gpus(total)}"
    if not each or total % each:
        return 0, f"cannot divide {_gpus(total)} over machines of {_listed({named} if named else offered)}"
    there = frozenset() if wanted.instance_type else _common(wanted.gpus, [m for m in known if not m.retired])
    if there and each not in there:
        if nodes and not named:
            return 0, f"{_gpus(total)} on {over} are {each} a node, but machines have {_listed(there)}"
        return 0, f"a node has {_gpus(each)}, but machines have {_listed(there)}"
    return each, ""


def _offered(job: Job, known: Sequence[Machine]) -> frozenset[int]:
    """Return the numbers of GPUs of the machines that the job can get, common to all GPUs of its list."""
    wanted = job.resources
    form = re.compile(re.escape(wanted.instance_type or ""), re.IGNORECASE)
    named = [m for m in known if (form.fullmatch(m.instance_type) if wanted.instance_type else not m.retired)]
    return _common(wanted.gpus, [m for m in named if _can_get(job, m)])


def _common(gpus: Sequence[Gpu], known: Sequence[Machine]) -> frozenset[int]:
    """Return the numbers of GPUs of machines, common to all ``gpus`` that any of them has."""
    each = [{m.gpu_count for m in known if m.is_for(gpu)} for gpu in gpus] or [{m.gpu_count for m in known}]
    found = [frozenset(counts) for counts in each if counts]
    return frozenset.intersection(*found) if found else frozenset()


def _can_get(job: Job, machine: Machine) -> bool:
    wanted = job.resources
    on_demand = not machine.spot_only or wanted.spot or job.max_wait is not None
    return on_demand and machine.has(cpus=wanted.cpus, memory_gb=wanted.memory_gb)


def _example(job: Job, known: Sequence[Machine]) -> str:
    """Return a GPU with which the job passes: an H100 if a machine has it, or if none is known."""
    names = [m for m in known if not m.retired and m.arch == "x86_64"]
    names.sort(key=lambda m: (m.gpu.startswith("H100"), m.gpu_memory_gib or 0, m.gpu_count), reverse=True)
    usual = [f"H100:{count}" for count in (8, 4, 2, 1, 3, 5, 7)]
    tries = [m.gpus for m in names if _can_get(job, m)] if known else [*usual, f"H100:{job.resources.total_gpus}"]
    return next((gpu for gpu in tries if _count(job.replace(gpu=gpu), known)[0]), [*tries, "H100"][0])


def _choices(job: Job, known: Sequence[Machine], *, complete: bool) -> Iterator[str]:
    """Yield flags with each of which the job passes: the nearest totals, then nodes, then GPUs of a node.

    ``complete``: the job's flags are enough, but do not fit each other. Otherwise another total does not help.
    """
    wanted = job.resources
    total, nodes = wanted.total_gpus or 0, wanted.instance_count
    offered = _offered(job, known)
    counts = sorted(offered or {8, 4, 2, 1, *(gpu.count for gpu in wanted.gpus)}, reverse=True)
    near = {count * step for count in counts for step in (nodes, total // count, total // count + 1)}
    near |= {total // nodes * nodes, (total // nodes + 1) * nodes}

    def fits(**fields: Any) -> bool:
        with suppress(SpecError):  # a number beyond the bounds of its field
            each, _ = _count(job.replace(**fields), known)
            return each > 0 and (not offered or each in offered)
        return False

    fitting = [n for n in sorted(near) if n and n != total and fits(total_gpus=n)] if complete else []
    nearest = [n for n in fitting if n < total][-1:] + [n for n in fitting if n > total][:1]
    yield from (f"--gpus {n}" for n in nearest)
    divisors = [count for count in [*counts, total // nodes] if count and total % count == 0]
    over = [(f"--nodes {total // n}", {"instance_count": total // n, "min_instance_count": None}) for n in divisors]
    of = []
    for count in divisors if wanted.gpu or not offered else ():
        gpus = [str(replace(gpu, count=count)) for gpu in wanted.gpus or (Gpu(name="H100"),)]
        of.append((" ".join(f"--gpu {gpu}" for gpu in gpus), {"gpu": gpus}))
    alone = [next((flags for flags, change in some if fits(**change)), "") for some in (over, of)]
    yield from filter(None, alone)
    if not any(alone) and not nearest:
        both = zip(over, of, strict=False)
        yield from [f"{flags} {more}" for (flags, one), (more, two) in both if fits(**one, **two)][:1]


def _gpus(count: int) -> str:
    return f"{count} GPU" + ("" if count == 1 else "s")


def _listed(counts: Iterable[int]) -> str:
    *others, last = sorted(counts)
    return " or ".join([*map(str, others), _gpus(last)])
