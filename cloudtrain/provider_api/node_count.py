"""Find the number of nodes of a job that asks for a total of GPUs, or of an attempt with fewer nodes. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from ..errors import SpecError, UnsupportedError
from . import catalog

if TYPE_CHECKING:
    from ..job.job import Gpu, Job
    from .protocol import Layout, Provider, Request

__all__ = ["plan_attempt", "with_node_count"]

FIELD = "resources.total_gpus"


def with_node_count(job: Job, provider: str, *, picks_machine: bool = True) -> Job:
    """Return ``job`` with the nodes and the GPUs of each node in place of its ``total_gpus``.

    A node has the GPUs that the job names (a count above 1), or its share of the job's own number of nodes, or those of
    the largest machine whose GPUs divide the total. The GPUs of a list share this number. ``picks_machine`` as in
    `ProviderExtras`. Raises `SpecError` if the fields contradict each other, and `UnsupportedError` if the machine's
    GPUs are unknown or do not divide the total; the hint has the nearest totals.
    """
    total, wanted = job.resources.total_gpus, job.resources
    if total is None:
        return job
    if not wanted.gpu and not wanted.instance_type:
        raise SpecError("needs the kind of GPU", field=FIELD, hint="add --gpu NAME, such as --gpu H100")
    named = {gpu.count for gpu in wanted.gpus if gpu.count > 1}
    if len(named) > 1:
        raise SpecError(f"{', '.join(wanted.gpu)} name different numbers of GPUs a node", field="resources.gpu")
    nodes = wanted.instance_count if wanted.instance_count > 1 else 0
    known = _counts(job, provider) if picks_machine else frozenset()
    if named:
        (each,) = named
        if nodes and nodes * each != total:
            hint = "leave out --gpus, --nodes or the number in --gpu"
            raise SpecError(f"{nodes} nodes of {each} GPUs have {nodes * each}, not {total}", field=FIELD, hint=hint)
    elif nodes and wanted.gpu:
        if total % nodes:
            raise _does_not_divide(total, {nodes}, f"{total} GPUs do not divide over {nodes} nodes")
        each = total // nodes
    elif not known:
        raise _unknown(job, provider, picks_machine=picks_machine)
    else:
        each = max((count for count in known if total % count == 0), default=0)
        if nodes and nodes * each != total:
            hint = "leave out --gpus or --nodes"
            raise SpecError(f"{nodes} nodes of {wanted.instance_type} do not have {total} GPUs", field=FIELD, hint=hint)
    if not each or total % each:
        counts = named or known
        raise _does_not_divide(total, counts, f"{total} GPUs do not divide over machines of {_listed(counts)} GPUs")
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


def _counts(job: Job, provider: str) -> frozenset[int]:
    """Return the numbers of GPUs of the machines that the job can get, common to all GPUs of its list."""
    wanted = job.resources
    form = re.compile(re.escape(wanted.instance_type or ""), re.IGNORECASE)
    known = [
        m
        for m in catalog.machines(provider)
        if m.gpu and (form.fullmatch(m.instance_type) if wanted.instance_type else not m.retired)
        and (not m.spot_only or wanted.spot or job.max_wait is not None)
        and m.has(cpus=wanted.cpus, memory_gb=wanted.memory_gb)
    ]  # fmt: skip

    def of(gpu: Gpu | None) -> frozenset[int]:
        return frozenset(m.gpu_count for m in known if gpu is None or m.is_for(gpu))

    found = [counts for gpu in (wanted.gpus or (None,)) if (counts := of(gpu))]
    return frozenset.intersection(*found) if found else frozenset()


def _unknown(job: Job, provider: str, *, picks_machine: bool) -> UnsupportedError:
    """Return the error of a job for which no machine is known. Raises the catalogue's own for a GPU that it lacks."""
    wanted = job.resources
    if picks_machine and wanted.gpu and catalog.machines(provider):
        gpu = wanted.gpus[0]
        most = max((m.gpu_count for m in catalog.machines(provider) if m.is_for(gpu)), default=1)
        catalog.for_gpu(provider, replace(gpu, count=most), cpus=wanted.cpus, memory_gb=wanted.memory_gb)
    total = wanted.total_gpus or 0
    each = next(count for count in (8, 4, 2, total) if total % count == 0)
    example = replace(wanted.gpus[0], count=each) if wanted.gpu else f"H100:{each}"
    hint = f"add --nodes N, or the GPUs of a node, such as --gpu {example}"
    return UnsupportedError(provider, FIELD, "the GPUs of its machines are not known here", hint=hint)


def _does_not_divide(total: int, counts: Iterable[int], why: str) -> SpecError:
    """Return the error with the nearest totals that divide, the smaller one first."""
    near = {each * step for each in counts for step in (total // each, -(-total // each)) if step}
    below, above = (max((n for n in near if n < total), default=0), min((n for n in near if n > total), default=0))
    choices = " or ".join(f"--gpus {n}" for n in (below, above) if n)
    return SpecError(why, field=FIELD, hint=f"the nearest are {choices}")


def _listed(counts: Iterable[int]) -> str:
    return " or ".join(map(str, sorted(counts)))
