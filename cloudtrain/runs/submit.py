"""Turn a Job into a Run: make the plan, show it, send exactly it.

`make_plan` only reads files. `send_plan` uploads what the store lacks and records the intent (``run.json``, then
``attempts/0/request.json``, both created exclusively). Only then does the provider act. A crash between any two steps
leaves nothing, or a record from which the same command, or `attach`, continues.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import stat
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import _version
from ..errors import CloudtrainError, ConflictError, SpecError, StorageError, UnsupportedError, scrubbed
from ..job.bundle import Bundle, build_bundle, changes
from ..job.entry_point import check_keeps_batch, check_script
from ..job.job import DEFAULT_MAX_RUNTIME, DEFAULT_STALL_TIMEOUT, Job, Source
from ..job.provenance import digest_of, in_background, origin_of
from ..job.run_id import check_run_id, new_run_id
from ..provider_api.limits import THIS_MACHINE
from ..provider_api.node_count import plan_attempt, with_node_count
from ..provider_api.protocol import Layout, Provider, Request, extras_of, extras_of_type, recorded_settings
from ..provider_api.registry import provider_names, suggested_provider
from ..settings.needs import find_missing, refusal, stand_ins, with_placeholders
from ..settings.settings import NO_SETTINGS, Settings
from ..storage.digest_cache import LocalTree
from ..storage.files import Progress
from ..storage.local_disk import local_path
from ..store import runtime_zip
from ..store.store import Staged, Store
from ..validate import json_loads, url_scheme, without_secrets
from .cost import price_of
from .deliver import deliver, error_of, reserve, secret_values, write_context
from .handover import ANSWERS, unsent_attempt
from .outcome import one_line
from .run import Run
from .summary import columns, plan_rows, table_html
from .warnings import append_cautions, cautions, gpu_memory_gib, gpu_memory_texts, memory_notes, total_gpus

if TYPE_CHECKING:
    from ..store.copies import PreviousPlace

MIB = 1 << 20
MOST_NAMED = 8
"""Files and fields that an error names; it counts the others."""


@dataclass(frozen=True, kw_only=True)
class Upload:
    """The content that the nodes of a plan need: the code, local inputs, and cloudtrain itself.

    ``node_half`` is the provider whose code the nodes need, if that is not the plan's. ``runtime`` gives cloudtrain.pyz
    if it is not built here.
    """

    bundle: Bundle
    trees: tuple[LocalTree, ...] = ()
    node_half: type[Provider] | None = None
    runtime: Callable[[], bytes] | None = None


@dataclass(frozen=True, kw_only=True)
class Fallbacks:
    """The fallbacks of a plan, and what had no machines before it.

    ``further`` are the plans of the fallbacks, ``rest`` such plans from run.json. ``first`` is the URL of the run that
    a fallback follows first of all; ``refusals`` are those before it. ``left`` is where the run was before, which may
    have its copies.
    """

    further: tuple[Plan, ...] = ()
    rest: tuple[Mapping[str, Any], ...] = ()
    first: str = ""
    refusals: tuple[Mapping[str, Any], ...] = ()
    left: PreviousPlace | None = None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A complete plan of a run. `document` is the output of ``plan --json``.

    ``job`` is as this provider runs it, ``later`` are the requests of further GPUs of its list. ``settings`` have the
    identity for other stores. ``missing`` names the settings that are not set: `layout` and `request` then hold
    stand-ins, `document` shows placeholders, and `send_plan` refuses the plan. If the cheapest was
    to be found, ``ranking`` has a row for each profile: the plans by price, then the profiles that refuse the job.
    """

    job: Job
    source: Source
    provider: Provider
    store: Store
    layout: Layout
    request: Request
    later: tuple[Request, ...] = ()
    upload: Upload
    fallbacks: Fallbacks = Fallbacks()
    settings: Settings = dataclasses.field(default=NO_SETTINGS, compare=False, repr=False)
    missing: tuple[str, ...] = ()
    ranking: tuple[Mapping[str, Any], ...] = ()

    @property
    def provider_name(self) -> str:
        return self.provider.name

    @property
    def run_id(self) -> str:
        return self.layout.run_id

    @property
    def run_url(self) -> str:
        return self.layout.run

    def __repr__(self) -> str:
        return f"Plan({self.run_url!r}, provider={self.provider_name!r})"

    def __str__(self) -> str:
        return columns(self._summary())

    def _repr_html_(self) -> str:
        """Return the summary as a notebook shows it."""
        return table_html(self._summary())

    def _summary(self) -> list[tuple[str, str]]:
        """Return the machines, limits and price, the warnings and the next call as rows."""
        rows = [*plan_rows(self.document()), *(("warning", text) for text in self.warnings)]
        if self.missing:
            return [*rows, ("missing", ", ".join(self.missing))]
        return [*rows, ("next", "cloudtrain.submit(job)")]

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings of wasted money, an exposed secret, or code that ships by mistake."""
        bundle, node_half = self.upload.bundle, self.upload.node_half or type(self.provider)
        found = [*bundle.warnings, *cautions(self.job, self.request)]
        if places := extras_of_type(node_half).object_mounts:
            scripts = [(file.path, bundle.disk(file.path)) for file in bundle.files if not file.link]
            found += append_cautions([item for item in scripts if item[0].endswith(".py")], places)
        return tuple(dict.fromkeys(found))

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the user that are not warnings."""
        notes = [*self.request.notes, *memory_notes(self.job, self.request)]
        machines = self.request.instance_types
        if machines and total_gpus(self.job, self.request) != 0 and self.price() is None:
            notes.append(f"no price of {machines[0]} is known, so the cost of this run is unknown")
        if self.job.interactive and extras_of(self.provider).always_interactive:
            notes.append(f"interactive: not needed, as provider {self.provider.name} lets a shell into every job")
        return tuple(notes)

    def document(self) -> dict[str, Any]:
        """Return plain JSON values. Equal plans give equal documents. Sizes are in bytes, times in seconds. Missing
        settings have placeholders."""
        further = [plan._document() for plan in self.fallbacks.further]
        rest = {"fallbacks": further, "ranking": [dict(row) for row in self.ranking]}
        return self._document() | {name: rows for name, rows in rest.items() if rows}

    def _document(self) -> dict[str, Any]:
        document = {
            "run_id": self.run_id,
            "run": self.run_url,
            "provider": self.provider_name,
            "profile": self.settings.profile or None,
            "missing": list(self.missing),
            "settings": recorded_settings(type(self.provider).Settings, dataclasses.asdict(self.provider.settings)),
            "job": self.job.to_dict(),
            "job_digest": self.job.digest,
            "source": dataclasses.asdict(self.source),
            "code": self._code(),
            "runtime": {"digest": self.layout.runtime_digest, "url": self.layout.runtime},
            "inputs": {name: dataclasses.asdict(item) for name, item in self.layout.inputs.items()},
            "resources": self._resources(),
            "warnings": list(self.warnings),
            "notes": list(self.notes),
            "limits": self._limits(),
            "retries": {"count": self.job.retries, "by": self.provider.retried_by},
            "disk": self._disk(),
            "layout": dataclasses.asdict(self.layout),
            "request": self.request.to_dict(),
        }
        return dict(with_placeholders(document, self.provider_name, self.missing))

    def _code(self) -> dict[str, Any]:
        bundle = self.upload.bundle
        return {
            "root": str(bundle.root),
            "entry_point": bundle.entry_point,
            "digest": bundle.digest,
            "url": self.layout.code,
            "bytes": bundle.size,
            "files": [{"path": f.path, "bytes": f.size, "mode": f"{f.mode:04o}"} for f in bundle.files],
            "excluded": [{"path": e.path, "rule": e.rule} for e in bundle.excluded],
            "git": bundle.git,
            "warnings": list(bundle.warnings),
        }

    def _resources(self) -> dict[str, Any]:
        wanted, gpus = self.job.resources, total_gpus(self.job, self.request)
        requests = (self.request, *self.later)
        names = list(dict.fromkeys(name for item in requests for name in gpu_memory_texts(self.job, item)))
        memory = gpu_memory_gib(self.provider_name, names)
        return {
            "instance_count": wanted.instance_count,
            "node_counts": list(wanted.node_counts),
            "instance_type": wanted.instance_type,
            "gpu": list(wanted.gpu),
            "nproc_per_node": self.request.context["processes"],
            "ranks": wanted.instance_count * int(self.request.context["processes"]),
            "gpus": gpus,
            "gpu_names": names,
            "gpu_memory_gib": memory,
            "total_gpu_memory_gib": memory * gpus if memory and gpus else None,
            "instance_types": list(self.request.instance_types),
            "price": self.price(),
        }

    @property
    def hard_limit(self) -> float:
        """Seconds of running time after which the platform itself ends the run, by the request."""
        return self.provider.launch_spec(self.request).rules.time_limit

    def price(self) -> dict[str, Any] | None:
        """Return the most that all nodes cost on demand until the hard limit, on the most expensive possible machine of
        any choice; None if one has no price."""
        names = dict.fromkeys(name for request in (self.request, *self.later) for name in request.instance_types)
        machines = self.job.resources.instance_count if names else 1  # else all nodes share this machine
        found = {name: price_of(self.provider, name) for name in names or [THIS_MACHINE]}
        known = {name: price for name, price in found.items() if price is not None}
        if len(known) < len(found):
            return None
        name, dearest = max(known.items(), key=lambda item: item[1].usd_per_hour)
        hourly = dearest.usd_per_hour * machines
        paid = self.hard_limit + extras_of(self.provider).warm_seconds(self.request)
        return {
            "usd_per_hour": round(hourly, 4),
            "usd_for_hard_limit": round(hourly * paid / 3600, 2),
            "machines": machines,
            "hard_limit_s": self.hard_limit,
            "is_estimate": True,
            "instance_type": name,
            "own": all(price.own for price in known.values()),
            "of_service": dearest.of_service,
            "source": dearest.source,
            "date": dearest.date or None,
        }

    def _limits(self) -> dict[str, Any]:
        return {
            "hard_limit_s": self.hard_limit,
            "max_runtime_s": self.job.max_runtime,
            "max_runtime_is_default": self.job.max_runtime == DEFAULT_MAX_RUNTIME,
            "max_wait_s": self.job.max_wait,
            "max_wait_by": self.provider.max_wait_by,
            "max_cost_usd": self.job.max_cost,
            "max_gpu_hours": self.job.max_gpu_hours,
            "stall_timeout_s": self.job.stall_timeout or None,
            "stall_timeout_is_default": self.job.stall_timeout == DEFAULT_STALL_TIMEOUT,
            "max_code_bytes": self.settings.max_code_mb * MIB,
        }

    def _disk(self) -> dict[str, Any]:
        """Return a node's known disk needs: code, copied inputs, and the number of checkpoints (kept, being copied,
        being written). None: all."""
        copied = sum(tree.bytes for tree in self.upload.trees)
        kept = int(self.request.context["keep_checkpoints"])
        return {"code_bytes": self.upload.bundle.size, "input_bytes": copied, "checkpoints": kept + 2 if kept else None}


def make_plan(
    job: Job,
    *,
    settings: Settings,
    provider: str | None = None,
    run_id: str | None = None,
    cwd: Path,
    preview: bool = False,
    incomplete: bool = False,
    follows: bool = False,
) -> Plan:
    """Return the plan of ``job`` on ``provider`` (default: the setting). Reads files; no network, credentials or SDK.

    With ``preview`` and no ``run_id`` the id is ``<name>-plan``, else a new one. With ``preview`` or ``incomplete`` a
    missing setting gets a placeholder. ``follows``: ask the store of the run to resume from for its newest place, not
    only this machine's files. Raises `SpecError` (for all missing settings), `UnsupportedError` and `StorageError`.
    """
    chosen = settings.make_provider(provider)
    _check_names(job)
    job = with_node_count(job.at(chosen.name), chosen.name, picks_machine=extras_of(chosen).picks_machine())
    missing = find_missing(settings, chosen, job)
    if missing and not (preview or incomplete):
        raise refusal(chosen.name, missing, file=settings.file, profile=settings.profile)
    filled, planner, whole = stand_ins(settings, chosen.name, job, missing) if missing else (settings, chosen, job)
    store = Store(filled.resolved(ask=not preview), cwd=cwd, storage=chosen.storage, moving=settings.moving)
    bundle = _built(job.source, store, settings, cwd, inputs=[item.url for item in job.inputs.values()])
    if job.launcher != "command" and bundle.entry_point:
        check_script(bundle.root, bundle.entry_point)
    if job.resources.min_instance_count:
        check_keeps_batch(job, (bundle.disk(file.path) for file in bundle.files if not file.link))
    if run_id is None:
        run_id = f"{job.name[:35].rstrip('-')}-plan" if preview else new_run_id(job.name)
    inputs, trees = store.inputs(job, chosen.schemes, run_id=check_run_id(run_id), cwd=cwd)
    layout = Layout(
        store=store.url,
        run_id=run_id,
        code_digest=bundle.digest,
        runtime_digest=runtime_zip.digest(type(chosen)),
        inputs=inputs,
        origin=origin_of(bundle.git, os.environ),
    )
    if job.resume_from is not None:
        layout = _resumed(job.resume_from, layout, store, chosen, settings, cwd, ask=not preview, follows=follows)
    extra = tuple(str((cwd / path).resolve()) for path in job.source.dependencies)
    source = dataclasses.replace(job.source, path=str(bundle.root), entry_point=bundle.entry_point, dependencies=extra)
    # As it is recorded: the script relative to the code, and no folder of this machine.
    recorded = {"entry_point": bundle.entry_point, "source_dir": None, "dependencies": (), "exclude": ()}
    job, whole = job.replace(**recorded), whole.replace(**recorded)
    return Plan(
        job=job,
        source=source,
        provider=chosen,
        store=store,
        layout=layout,
        request=first_request(planner, whole, layout),
        later=_later_choices(planner, whole, layout),
        upload=Upload(bundle=bundle, trees=tuple(trees)),
        settings=settings,
        missing=missing,
    )


def first_request(provider: Provider, job: Job, layout: Layout) -> Request:
    """Return the request of attempt 0. It has notes about a checkpoint from outside the store: the risk of loading it,
    and its copy."""
    request, given = provider.plan(job, layout), layout.resume_source or layout.resume
    if given is None or given.startswith(f"{layout.store}/runs/"):
        return request
    why = "with write access there, anyone can run code in this job, because torch.load unpickles"
    notes = [f"resume_from {scrubbed(given)} is outside this store: {why}"]
    if layout.resume_source:
        notes += [f"its newest complete checkpoint is copied to {layout.resume}, through this machine, when it is sent"]
    return dataclasses.replace(request, notes=(*request.notes, *notes))


def _later_choices(provider: Provider, job: Job, layout: Layout) -> tuple[Request, ...]:
    """Return the requests of every GPU of the list but the first, less those that the provider refuses.

    Raises `SpecError` for one that a limit forbids, and for fewer nodes that the provider refuses, so that this shows
    before the first fails.
    """
    if job.resources.min_instance_count and provider.retried_by == "platform":
        why = "the platform itself starts further attempts, with the same request"
        raise UnsupportedError(provider.name, "resources.min_instance_count", why)
    for nodes in job.resources.node_counts[1:]:
        plan_attempt(provider, job, layout, 0, 0, nodes=nodes)
    found = []
    for gpu_index in range(1, len(job.resources.gpu)):
        try:
            found.append(provider.plan(job, layout, 0, gpu_index))
        except SpecError as exc:
            if exc.field in ("max_cost", "max_gpu_hours"):
                raise
    return tuple(found)


def _resumed(
    given: str,
    layout: Layout,
    store: Store,
    provider: Provider,
    settings: Settings,
    cwd: Path,
    *,
    ask: bool,
    follows: bool,
) -> Layout:
    """Return the layout with the URL of the folder ``given`` by ``resume_from``, and the URL that it is a copy of.

    The folder is a run's complete checkpoints, in the run's newest place, or the user's own.
    """
    from ..store.copies import resume_copy_url
    from .resume import checkpoints_url

    url = checkpoints_url(given, store=store, settings=settings, cwd=cwd, ask=ask, follows=follows)
    there = resume_copy_url(url, store, layout.run_id, provider.schemes)
    return dataclasses.replace(layout, resume=there or url, resume_source=url if there else None)


def load_plan(path: Path, *, settings: Settings, cwd: Path) -> Plan:
    """Return the plan of a saved ``plan --json``, checked against its code.

    Raises `SpecError` if the file is not a plan, or the source or cloudtrain itself has changed.
    """
    try:
        data = json_loads(path.read_bytes())
        plans = [data, *data.get("fallbacks", ())]
    except (OSError, ValueError, AttributeError, TypeError) as exc:
        raise SpecError(f"{path} is not a saved plan ({type(exc).__name__}: {exc})", field="plan") from None
    return link_fallbacks([_loaded(item, path, settings=settings, cwd=cwd) for item in plans])


def _loaded(data: Mapping[str, Any], path: Path, *, settings: Settings, cwd: Path) -> Plan:
    """Return one of the plans in the file at ``path``."""
    from ..store.copies import followed

    try:
        job, layout = Job.from_dict(data["job"]), Layout.from_dict(data["layout"])
        source, request = Source(**data["source"]), Request.from_dict(data["request"])
        provider, own, missing = str(data["provider"]), dict(data["settings"]), tuple(data.get("missing", ()))
        profile = str(data.get("profile") or "")
    except (ValueError, KeyError, TypeError, SpecError) as exc:
        why = f"{path} is not a plan of this version of cloudtrain ({one_line(exc)})"
        raise SpecError(why, field="plan", hint="plan the job again, and save that plan") from None
    if missing:
        raise refusal(provider, missing, file=settings.file, profile=profile)
    if profile in settings.profiles and profile != settings.profile:
        settings = settings.of_profile(profile)  # with its identity, and its keys for the store
    chosen = settings.make_provider(provider, **own)
    store = Store(layout.store, storage=chosen.storage, moving=settings.moving)
    bundle = _built(source, store, settings, cwd, path)
    if bundle.digest != layout.code_digest:
        raise SpecError(f"the code in {source.path} has changed since it was planned", field="plan", hint="plan again")
    if runtime_zip.digest(type(chosen)) != layout.runtime_digest:
        raise SpecError("it was made by another version of cloudtrain", field="plan", hint="plan again")
    inputs, trees = store.inputs(job, chosen.schemes, run_id=layout.run_id, cwd=cwd)
    if inputs != dict(layout.inputs):
        raise SpecError("an input has changed since it was planned", field="plan", hint="plan again")
    resumed = layout.resume_source or layout.resume
    if resumed and (now := followed(resumed, settings, ask=True)) != resumed:
        raise SpecError(f"{resumed} continued at {now}", field="resume_from", hint="plan again with that URL")
    return Plan(
        job=job,
        source=source,
        provider=chosen,
        store=store,
        layout=layout,
        request=request,
        later=_later_choices(chosen, job, layout),
        upload=Upload(bundle=bundle, trees=tuple(trees)),
        settings=settings,
    )


def _built(
    source: Source, store: Store, settings: Settings, cwd: Path, *files: Path, inputs: Sequence[str] = ()
) -> Bundle:
    """Return the bundle, without the store and ``files`` in the source, or the files that this process writes to."""
    home, most, outputs = local_path(store.url), settings.max_code_mb * MIB, _identities(1, 2, *files)
    never = [home] if home else []
    return build_bundle(source, cwd=cwd, max_bytes=most, never=never, outputs=outputs, inputs=inputs)


def link_fallbacks(plans: Sequence[Plan]) -> Plan:
    """Return the first of ``plans``, with the others to follow if it has no machines. Raises `SpecError` if two have
    one run URL."""
    taken = [plan.run_url for plan in plans]
    for plan in plans[1:]:
        if taken.count(plan.run_url) > 1:
            why = f"fallback {plan.settings.profile} has a store of another profile: {without_secrets(plan.store.url)}"
            hint = f"give it a store of its own, in [profiles.{plan.settings.profile}]"
            raise SpecError(why, field="store", hint=hint)
    following: tuple[Plan, ...] = ()
    for plan in reversed(plans[1:]):  # each has those that follow it
        own = Fallbacks(first=taken[0], further=following)
        following = (dataclasses.replace(plan, fallbacks=own), *following)
    return dataclasses.replace(plans[0], fallbacks=Fallbacks(further=following))


def _check_names(job: Job) -> None:
    """Raise `SpecError` for an unknown provider in ``on`` or ``options`` with a similar name to a known one."""
    for field, table in (("on", job.on), ("options", job.options)):
        for name in table:
            if name not in provider_names() and (near := suggested_provider(name)):
                raise SpecError(f"no provider {name!r}", field=field, hint=near)


def _identities(*files: int | Path) -> list[tuple[int, int]]:
    """Return ``(st_dev, st_ino)`` of the regular files among ``files``: open descriptors or paths."""
    found = []
    for file in files:
        with contextlib.suppress(OSError):
            status = os.stat(file)
            if stat.S_ISREG(status.st_mode):
                found.append((status.st_dev, status.st_ino))
    return found


def send_plan(
    plan: Plan,
    *,
    environ: Mapping[str, str],
    progress: Callable[[str], None] | None = None,
    moved: Progress | None = None,
    note: Callable[[str], None] | None = None,
    decide: Callable[[], object] | None = None,
) -> Run:
    """Stage, record and send, in the plan's own place alone. Submitting the same plan again gives the same run.

    ``progress`` is called with each step, ``moved`` with each upload, as in `Store.stage`, and ``note`` before a wait
    (default: ``progress``). ``decide`` is called once the run is recorded, before it can start. Raises `ConflictError`
    for another job's id, and errors of storage and provider. A refusal ends the run, unless another may follow.
    """
    for each in (plan, *plan.fallbacks.further):
        if each.missing:
            raise refusal(each.provider_name, each.missing, file=each.settings.file, profile=each.settings.profile)
    values = secret_values(plan.job, environ)
    say = progress or (lambda _: None)
    known = with_recorded_origin(plan)
    if known is not None:
        _check_not_refused(run_of_plan(known))
    elif not plan.fallbacks.first:  # a run that continues from other places records its refusals
        _check_this_machine(plan)
    origin = _origin(plan) if known is None else dict[str, Any]
    plan = known or plan
    staged = _staged(plan, say, moved)
    say("recording the run")
    record = {**_record(plan), "origin": origin()}
    if known is None:
        reserve(plan.store, plan.settings.budget, plan.run_id, plan.job)
    if not plan.store.create_run(plan.layout, record):
        plan = with_recorded_origin(plan) or plan
    if decide is not None:
        decide()
    # Not before the id is known to be ours: another job's context must never be overwritten.
    if not plan.store.attempts(plan.run_id):  # nor that of our later attempt
        plan.store.write_container(plan.layout, plan.request.context, secrets.token_bytes(32))
    if not plan.store.create_attempt(plan.run_id, 0, plan.request):
        write_context(plan.store, plan.layout, plan.run_id)
        there = plan.store.attempt_request(plan.run_id, 0)
        if there is not None and there.to_dict() != plan.request.to_dict():
            raise _recorded_otherwise(plan)
    run = run_of_plan(plan, staged)
    # A platform may have forgotten a sent request, so the records decide. A waiting client sends further attempts.
    if unsent_attempt(run) != 0:
        return run
    say(f"submitting to {plan.provider_name}")
    try:
        # The submitter gets an error, so no other client may send it later.
        native = deliver(run, plan.request, values, refusals=ANSWERS, say=note or progress)
    except ANSWERS:
        with contextlib.suppress(CloudtrainError):
            if run.result()["native_id"] is not None:  # else the result is kept, if nothing follows
                return run  # it was accepted nevertheless
        raise
    if native is None:
        _check_not_refused(run)
    return run


def _check_this_machine(plan: Plan) -> None:
    """Raise the provider's errors about sending the plan from this machine, not the plans that may follow."""
    from ..storage.remote import check_openable

    extras_of(plan.provider).check(plan.request)
    if "file" not in plan.provider.schemes:
        return
    # This machine copies these to its nodes. A rehearsal does not read the cloud's URLs, but what stands for them.
    read = {mount.url for node in plan.provider.launch_spec(plan.request).nodes for mount in node.mounts}
    for name, item in plan.layout.inputs.items():
        if item.source is None and item.url in read and url_scheme(item.url) != "file":
            try:
                check_openable(item.url)
            except SpecError as exc:
                raise SpecError(exc.message, field=f"inputs.{name}", hint=exc.hint) from None


def _check_not_refused(run: Run) -> None:
    """Raise the error of a refused run that is over: its id is used up. Keep its result if there is none yet."""
    store, run_id = run.store, run.run_id
    newest = store.newest_attempt(run_id)
    if store.refused(run_id, newest) is None:
        return
    if store.result(run_id) is None:
        run.result()
    ended = store.result(run_id)
    if ended is not None and ended["state"] == "failed" and ended["native_id"] is None:
        hint = f"run {run_id} is over; to send the job again, choose another --run-id"
        raise error_of(str(ended["category"]))(f"run {run_id} has ended: {ended['reason']}", hint=hint)


def _staged(plan: Plan, say: Callable[[str], None], moved: Progress | None) -> Staged:
    """Upload what the store lacks, and copy a new run's remote data that its nodes cannot read; return the amounts."""
    say("uploading what the store lacks")
    layout, store, left = plan.layout, plan.store, plan.fallbacks.left
    staged = stage_content(plan, say=say, moved=moved)
    sources = layout.resume_source or any(item.source for item in layout.inputs.values())
    if not sources or store.has_run(plan.run_id):  # an existing run has its copies
        return staged
    from ..store.copies import copy_checkpoint, copy_inputs

    try:
        copied = copy_inputs(store, layout, left=left, progress=moved, say=say)
        copied += copy_checkpoint(store, layout, settings=plan.settings, left=left, progress=moved, say=say)
    except BaseException:
        store.withdraw(plan.run_id)
        raise
    return dataclasses.replace(staged, data_bytes=staged.data_bytes + copied)


def stage_content(plan: Plan, *, say: Callable[[str], None] | None = None, moved: Progress | None = None) -> Staged:
    """Upload the code, cloudtrain.pyz and the local inputs of a plan that the store lacks; return the amounts.

    They stay announced until `Store.create_run` or `Store.withdraw`. Raises the errors of `Store.stage`.
    """
    upload = plan.upload
    zipped = upload.runtime or partial(runtime_zip.build, upload.node_half or type(plan.provider))
    archive = upload.bundle.archive
    return plan.store.stage(plan.layout, archive=archive, pyz=zipped, trees=upload.trees, progress=moved, say=say)


def run_of_plan(plan: Plan, staged: Staged | None = None) -> Run:
    """Return the run of ``plan``; ``staged`` is what was uploaded for it."""
    return Run(store=plan.store, run_id=plan.run_id, provider=plan.provider, settings=plan.settings, staged=staged)


def _record(plan: Plan) -> dict[str, Any]:
    known = plan.fallbacks
    following: list[Mapping[str, Any]] = [*map(plan_record, known.further)] or [*known.rest]
    extra = {"fallbacks": following, "first": known.first, "refusals": list(known.refusals)}
    extra["budget"] = plan.settings.budget
    head = {"protocol": 1, "version": _version.__version__, "created": time.time()}
    return {**head, **plan_record(plan), **{key: value for key, value in extra.items() if value}}


def plan_record(plan: Plan) -> dict[str, Any]:
    """Return the entries of run.json about a plan itself, from which `plan_of_record` makes a plan again."""
    document = plan._document()
    return {
        **{key: document[key] for key in ("run_id", "run", "provider", "settings", "job", "job_digest", "layout")},
        "code": {key: document["code"][key] for key in ("digest", "entry_point", "bytes", "git")},
        "runtime": plan.layout.runtime_digest,
        "moving": plan.store.moving._asdict(),
    }


def plan_of_record(
    record: Mapping[str, Any],
    job: Job,
    layout: Layout,
    *,
    store: Store,
    provider: Provider,
    settings: Settings,
    fetch: Callable[[str], bytes],
    fallbacks: Fallbacks = Fallbacks(),
) -> Plan:
    """Return the plan of a run whose code a store has, by ``record``, the entries of `plan_record`.

    ``job`` and ``layout`` are the run's own. ``fetch`` returns the code and cloudtrain.pyz, by their keys. Raises the
    errors of `Provider.plan`.
    """
    code, runtime = layout.code.removeprefix(f"{layout.store}/"), layout.runtime.removeprefix(f"{layout.store}/")
    built_here = runtime_zip.digest(type(provider)) == layout.runtime_digest
    entry_point = record["code"]["entry_point"]
    bundle = _StoredBundle(
        root=Path(),
        entry_point=entry_point,
        files=(),
        git=record["code"]["git"],
        known=record["code"],
        fetch=partial(fetch, code),
    )
    return Plan(
        job=job,
        source=Source(path=".", entry_point=entry_point),
        provider=provider,
        store=store,
        layout=layout,
        request=first_request(provider, job, layout),
        later=_later_choices(provider, job, layout),
        upload=Upload(bundle=bundle, runtime=None if built_here else partial(fetch, runtime)),
        fallbacks=fallbacks,
        settings=settings,
    )


@dataclass(frozen=True, kw_only=True)
class _StoredBundle(Bundle):
    """A bundle in a store: ``known`` is its entry in run.json, ``fetch`` returns its archive."""

    known: Mapping[str, Any]
    fetch: Callable[[], bytes]

    @property
    def size(self) -> int:
        return int(self.known["bytes"])

    @property
    def digest(self) -> str:
        return str(self.known["digest"])

    def archive(self) -> bytes:
        return self.fetch()


def _origin(plan: Plan) -> Callable[[], dict[str, Any]]:
    """Start asking for the caller's identity and the image's digest; the returned function gives the origin record.

    It is not part of the plan: the provider learns it from its first call.
    """
    image = getattr(plan.provider.settings, "image", "") or plan.job.image  # a rehearsal may run another one
    extras = extras_of(plan.provider)
    principal = in_background(extras.principal)
    digest = in_background(partial(extras.image_digest, plan.request) if digest_of(image) is None else None)
    return lambda: {
        **plan.layout.origin,
        "principal": principal(),
        "image": image,
        "image_digest": digest_of(image) or digest(),
    }


def with_recorded_origin(plan: Plan) -> Plan | None:
    """Return the plan with the recorded origin, from which its run continues; None for a new run.

    The native tags include the origin, and a repeated CI step must find its run, not start a second one. Raises
    `ConflictError` if the run id belongs to any other plan.
    """
    if not plan.store.has_run(plan.run_id):
        return None
    record = plan.store.run(plan.run_id, needs=("job_digest", "code", "provider", "layout"))
    ours: tuple[Any, ...] = (plan.job.digest, plan.layout.code_digest, plan.provider_name)
    if (record["job_digest"], record["code"].get("digest"), record["provider"]) != ours:
        raise _of_another_job(plan, record)
    layout = Layout.from_dict(record["layout"])
    known = plan.fallbacks
    following = [item.run_url for item in known.further] or [item["run"] for item in known.rest]
    there = [item["run"] for item in record.get("fallbacks", ())]
    if layout != plan.layout or (there, record.get("first", "")) != (following, known.first):
        raise _recorded_otherwise(plan, layout)
    if layout.origin == plan.layout.origin:  # a saved plan is sent as it was saved
        return plan
    request = first_request(plan.provider, plan.job, layout)
    later = _later_choices(plan.provider, plan.job, layout)
    return dataclasses.replace(plan, layout=layout, request=request, later=later)


def _of_another_job(plan: Plan, record: Mapping[str, Any]) -> ConflictError:
    """Return the error of a run id that another job has, naming the differences that the store still shows."""
    words = []
    if record["provider"] != plan.provider_name:
        words.append(f"it runs on {record['provider']}")
    if record["job_digest"] != plan.job.digest:
        before, now = flat_fields(record.get("job", {})), flat_fields(plan.job.to_dict())
        words += [name for name in sorted(before.keys() | now.keys()) if before.get(name) != now.get(name)]
    if (digest := record["code"].get("digest")) != plan.layout.code_digest:
        try:
            changed = changes(plan.upload.bundle, plan.store.files.read(f"code/{digest}/code.tar.gz"))
        except (FileNotFoundError, StorageError, ValueError):  # the store no longer has it
            changed = []
        words += changed or ["the code"]
    why = f"{plan.run_id!r} is already the id of another job in {plan.store.url}; different: {_listed(words)}"
    hint = "choose another --run-id; to find this run again, undo the change"
    return ConflictError(why, field="run_id", hint=hint)


def flat_fields(value: Any, name: str = "") -> dict[str, Any]:
    """Return the values of a job's nested tables by their dotted names."""
    if not isinstance(value, Mapping):
        return {name: value}
    return {k: v for key, item in value.items() for k, v in flat_fields(item, f"{name}.{key}" if name else key).items()}


def _listed(words: Sequence[str]) -> str:
    more = len(words) - MOST_NAMED
    return ", ".join([*words[:MOST_NAMED], *([f"{more} more"] if more > 0 else [])])


def _recorded_otherwise(plan: Plan, recorded: Layout | None = None) -> ConflictError:
    """Return the error of a run id whose job was recorded with another request; ``recorded`` is its layout."""
    words = []
    if recorded is not None:
        before, now = recorded.inputs, plan.layout.inputs
        words = [f"inputs.{name}" for name in sorted(before.keys() | now.keys()) if before.get(name) != now.get(name)]
        given = [(layout.resume_source or layout.resume) for layout in (recorded, plan.layout)]
        words += ["resume_from"] if given[0] != given[1] else []
        words += ["the version of cloudtrain"] if recorded.runtime_digest != plan.layout.runtime_digest else []
    why = f"{plan.run_id!r} was recorded with another request; different: {_listed(words) or 'settings'}"
    return ConflictError(why, field="run_id", hint="choose another --run-id")
