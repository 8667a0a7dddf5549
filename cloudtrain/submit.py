"""From a Job to a Run: make the plan, show it, send exactly it.

`make_plan` reads files and nothing else. `submit` uploads what the store lacks, records the intent (``run.json``, then
``attempts/0/request.json``, both created exclusively), and only then lets the provider act: a crash between any two
steps leaves either nothing, or a record that the same command, or `attach`, goes on from.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
import stat
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from . import _version, catalog, pyz
from .disk import local_path, normalize
from .errors import (
    AuthError,
    CapacityError,
    ConflictError,
    LostContactError,
    PlatformError,
    QuotaError,
    SpecError,
    StorageError,
)
from .job import DEFAULT_MAX_RUNTIME, DEFAULT_STALL_TIMEOUT, Job, Source, check_run_id, new_run_id
from .provider import Layout, Provider, Request, provider_names, recorded_settings
from .run import NO_MACHINES, Run, overtaken
from .settings import Settings
from .store import LocalTree, Store
from .tail import patiently
from .transfer import Progress
from .values import nearest, url_scheme
from .verdict import unix_time, was_lost

if TYPE_CHECKING:
    from .bundle import Bundle

__all__ = ["Plan", "Retry", "load_plan", "make_plan", "submit"]

MIB = 1 << 20
REFUSALS = (CapacityError, PlatformError, QuotaError, SpecError)
"""What a provider raises that will not have a request."""
UNSENT_SECONDS = 60.0
"""How long a client has from recording an attempt to having sent it; as long as `patiently` asks for."""
KILLED = 9
"""SIGKILL; not every client's system knows the name."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What would be sent, whole; `document` is what ``plan --json`` prints.

    ``job`` is as this provider runs it, ``later`` are the requests of further GPUs of its list.
    """

    job: Job
    source: Source
    provider: Provider
    store: Store
    bundle: Bundle
    layout: Layout
    request: Request
    later: tuple[Request, ...] = ()
    trees: tuple[LocalTree, ...] = ()
    preview: bool = False
    max_code_mb: int = 50

    @property
    def provider_name(self) -> str:
        return self.provider.name

    @property
    def run_id(self) -> str:
        return self.layout.run_id

    @property
    def run_url(self) -> str:
        return self.layout.run

    def document(self) -> dict[str, Any]:
        """Plain JSON; equal plans give equal documents. Sizes are bytes, times seconds."""
        return {
            "run_id": self.run_id,
            "run": self.run_url,
            "provider": self.provider_name,
            "settings": recorded_settings(type(self.provider).Settings, dataclasses.asdict(self.provider.settings)),
            "job": self.job.to_dict(),
            "job_digest": self.job.digest,
            "source": dataclasses.asdict(self.source),
            "code": self._code(),
            "runtime": {"digest": self.layout.runtime_digest, "url": self.layout.runtime},
            "inputs": {name: dataclasses.asdict(item) for name, item in self.layout.inputs.items()},
            "resources": self._resources(),
            "limits": self._limits(),
            "retries": {"count": self.job.retries, "by": self.provider.retried_by},
            "disk": self._disk(),
            "layout": dataclasses.asdict(self.layout),
            "request": self.request.to_dict(),
        }

    def _code(self) -> dict[str, Any]:
        return {
            "root": str(self.bundle.root),
            "entry_point": self.bundle.entry_point,
            "digest": self.bundle.digest,
            "url": self.layout.code,
            "bytes": self.bundle.size,
            "files": [{"path": f.path, "bytes": f.size, "mode": f"{f.mode:04o}"} for f in self.bundle.files],
            "excluded": [{"path": e.path, "rule": e.rule} for e in self.bundle.excluded],
            "git": self.bundle.git,
            "warnings": list(self.bundle.warnings),
        }

    def _resources(self) -> dict[str, Any]:
        wanted = self.job.resources
        return {
            "instance_count": wanted.instance_count,
            "instance_type": wanted.instance_type,
            "gpu": list(wanted.gpu),
            "nproc_per_node": self.request.context["processes"],
            "ranks": wanted.instance_count * int(self.request.context["processes"]),
            "instance_types": list(self.request.instance_types),
            "price": self._price(),
        }

    def _price(self) -> dict[str, Any] | None:
        """The most that all nodes cost on demand, by the dearest machine there may be, also of a later choice; None
        where one has no price."""
        own = getattr(self.provider.settings, "prices", None)
        names = dict.fromkeys(name for request in (self.request, *self.later) for name in request.instance_types)
        found = {name: catalog.price(self.provider_name, name, own) for name in names}
        known = {name: price for name, price in found.items() if price is not None}
        if not known or len(known) < len(found):
            return None
        name, dearest = max(known.items(), key=lambda item: item[1].usd_per_hour)
        hourly = dearest.usd_per_hour * self.job.resources.instance_count
        whole = hourly * self.job.max_runtime / 3600
        return {
            "usd_per_hour": round(hourly, 4),
            "usd_for_max_runtime": round(min(whole, self.job.max_cost or whole), 2),
            "is_estimate": True,
            "instance_type": name,
            "own": all(price.own for price in known.values()),
            "of_service": dearest.of_service,
            "source": dearest.source,
            "date": dearest.date or None,
        }

    def _limits(self) -> dict[str, Any]:
        return {
            "max_runtime_s": self.job.max_runtime,
            "max_runtime_is_default": self.job.max_runtime == DEFAULT_MAX_RUNTIME,
            "max_wait_s": self.job.max_wait,
            "max_wait_by": self.provider.max_wait_by,
            "max_cost_usd": self.job.max_cost,
            "stall_timeout_s": self.job.stall_timeout or None,
            "stall_timeout_is_default": self.job.stall_timeout == DEFAULT_STALL_TIMEOUT,
            "max_code_bytes": self.max_code_mb * MIB,
        }

    def _disk(self) -> dict[str, Any]:
        """What a node needs, as far as it is known before the run: code, inputs that are copied to it, and how many
        checkpoints there may be at a time: those kept, the one being copied, the one being written. None: all."""
        copied = sum(tree.bytes for tree in self.trees)
        kept = self.job.keep_checkpoints
        return {"code_bytes": self.bundle.size, "input_bytes": copied, "checkpoints": kept + 2 if kept else None}


def make_plan(
    job: Job,
    *,
    settings: Settings,
    provider: str | None = None,
    run_id: str | None = None,
    cwd: Path,
    preview: bool = False,
) -> Plan:
    """The plan of ``job`` on ``provider`` (default: the setting). Reads files; no network, no credentials, no SDK.

    With ``preview`` and no ``run_id`` the id is ``<name>-plan``, else a new one. Raises `SpecError`, `UnsupportedError`
    and `StorageError`.
    """
    from .bundle import build

    chosen = settings.make_provider(provider)
    _check_names(job)
    job = job.at(chosen.name)
    store = Store(settings.resolved(ask=not preview), cwd=cwd, storage=chosen.storage, moving=settings.moving)
    home = local_path(store.url)
    bundle = build(
        job.source,
        cwd=cwd,
        max_bytes=settings.max_code_mb * MIB,
        never=[home] if home else [],
        outputs=_identities(1, 2),
    )
    inputs, trees = store.inputs(job, chosen.schemes, cwd=cwd)
    if run_id is not None:
        check_run_id(run_id)
    layout = store.layout(
        run_id=run_id or (f"{job.name[:35].rstrip('-')}-plan" if preview else new_run_id(job.name)),
        code_digest=bundle.digest,
        runtime_digest=pyz.digest(type(chosen)),
        inputs=inputs,
        resume=_resume(job.resume_from, store, cwd),
    )
    source = dataclasses.replace(
        job.source,
        path=str(bundle.root),
        entry_point=bundle.entry_point,
        dependencies=tuple(str((cwd / path).resolve()) for path in job.source.dependencies),
    )
    # As it is recorded: the script relative to the code, and no folder of this machine.
    job = job.replace(entry_point=bundle.entry_point, source_dir=None, dependencies=(), exclude=())
    return Plan(
        job=job,
        source=source,
        provider=chosen,
        store=store,
        bundle=bundle,
        layout=layout,
        request=chosen.plan(job, layout),
        later=_later_choices(chosen, job, layout),
        trees=tuple(trees),
        preview=preview and run_id is None,
        max_code_mb=settings.max_code_mb,
    )


def _later_choices(provider: Provider, job: Job, layout: Layout) -> tuple[Request, ...]:
    """The requests of every GPU of the list but the first, less those that the provider refuses.

    Raises `SpecError` for one that `max_cost` forbids: that must not come out after the first has failed.
    """
    found = []
    for choice in range(1, len(job.resources.gpu)):
        try:
            found.append(provider.plan(job, layout, choice=choice))
        except SpecError as exc:
            if exc.field == "max_cost":
                raise
    return tuple(found)


def _resume(given: str | None, store: Store, cwd: Path) -> str | None:
    """The folder URL that ``resume_from`` means: a run's complete checkpoints, or a folder of the user's own."""
    if given is None:
        return None
    if not url_scheme(given) and "/" not in given and not (cwd / given).exists():
        check_run_id(given)
        given = f"{store.url}/runs/{given}"
    url = normalize(given, cwd=cwd)
    if "/runs/" in url and "/" not in url.rpartition("/runs/")[2]:
        url = f"{url}/live/checkpoints"
    path = local_path(url)
    if path is not None and not path.exists():
        raise SpecError(f"there is no {path}", field="resume_from")
    return url


def load_plan(path: Path, *, settings: Settings, cwd: Path) -> Plan:
    """A saved ``plan --json``, checked against the code it was made of.

    Raises `SpecError` when the file is not a plan, or the source or cloudtrain itself is no longer what it names.
    """
    from .bundle import build

    try:
        data = json.loads(path.read_bytes())
        job, layout, request = (
            Job.from_dict(data["job"]),
            Layout.from_dict(data["layout"]),
            Request.from_dict(data["request"]),
        )
        source = Source(**data["source"])
        chosen = settings.make_provider(data["provider"], **data["settings"])
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise SpecError(f"{path} is not a saved plan ({type(exc).__name__}: {exc})", field="plan") from None
    store = Store(layout.store, storage=chosen.storage, moving=settings.moving)
    home = local_path(store.url)
    bundle = build(
        source,
        cwd=cwd,
        max_bytes=settings.max_code_mb * MIB,
        never=[home] if home else [],
        outputs=_identities(1, 2, path),
    )
    if bundle.digest != layout.code_digest:
        raise SpecError(f"the code in {source.path} has changed since it was planned; plan again", field="plan")
    if pyz.digest(type(chosen)) != layout.runtime_digest:
        raise SpecError("it was made by another version of cloudtrain; plan again", field="plan")
    inputs, trees = store.inputs(job, chosen.schemes, cwd=cwd)
    if inputs != dict(layout.inputs):
        raise SpecError("an input has changed since it was planned; plan again", field="plan")
    return Plan(
        job=job,
        source=source,
        provider=chosen,
        store=store,
        bundle=bundle,
        layout=layout,
        request=request,
        later=_later_choices(chosen, job, layout),
        trees=tuple(trees),
        max_code_mb=settings.max_code_mb,
    )


def _check_names(job: Job) -> None:
    """Raise `SpecError` for a provider in ``on`` or ``options`` that is none, and close to one that is."""
    known = provider_names()
    for field, table in (("on", job.on), ("options", job.options)):
        for name in table:
            if name not in known and (hint := nearest(name, known)):
                raise SpecError(f"no provider {name!r}{hint}", field=field)


def _identities(*files: int | Path) -> list[tuple[int, int]]:
    """``(st_dev, st_ino)`` of the regular files among ``files``: open descriptors or paths."""
    found = []
    for file in files:
        with contextlib.suppress(OSError):
            status = os.stat(file)
            if stat.S_ISREG(status.st_mode):
                found.append((status.st_dev, status.st_ino))
    return found


def submit(
    plan: Plan,
    *,
    environ: Mapping[str, str],
    progress: Callable[[str], None] | None = None,
    moved: Progress | None = None,
) -> Run:
    """Stage, record, send. Submitting the same plan again gives the same run, whole.

    ``progress`` is told each step, ``moved`` each upload, as in `Store.stage`. Raises `ConflictError` when the run id
    belongs to another job, and whatever storage and the provider raise.
    """
    values = _secret_values(plan.job, environ)
    say = progress or (lambda _: None)
    _check_free(plan)
    say("uploading what the store lacks")
    zipped = partial(pyz.build, type(plan.provider))
    staged = plan.store.stage(
        plan.layout, archive=plan.bundle.archive, pyz=zipped, trees=plan.trees, progress=moved, say=say
    )
    sources = any(item.source for item in plan.layout.inputs.values())
    if sources and not plan.store.files.exists(f"runs/{plan.run_id}/run.json"):  # else they were copied for it
        from .relay import bring

        try:
            copied = bring(plan.store, plan.layout, progress=moved, say=say)
        except BaseException:
            plan.store.withdraw(plan.run_id)
            raise
        staged = dataclasses.replace(staged, data_bytes=staged.data_bytes + copied)
    say("recording the run")
    if not plan.store.create_run(plan.layout, _record(plan)):
        _check_free(plan)
    # Not before the id is known to be ours: another job's context must never be overwritten.
    if not plan.store.attempts(plan.run_id):  # nor that of a further attempt of ours
        plan.store.write_container(plan.layout, plan.request.context, secrets.token_bytes(32))
    if not plan.store.create_attempt(plan.run_id, 0, plan.request):
        _write_context(plan.store, plan.layout, plan.run_id)
        recorded = plan.store.attempt_request(plan.run_id, 0)
        if recorded is not None and recorded.to_dict() != plan.request.to_dict():
            raise _recorded_otherwise(plan)
    run = Run(store=plan.store, run_id=plan.run_id, provider=plan.provider)
    run.staged = staged
    if plan.store.cancelled(plan.run_id):
        return run
    say(f"submitting to {plan.provider_name}")
    try:
        native_id = patiently(partial(plan.provider.submit, plan.request, values))
    except (AuthError, *REFUSALS) as exc:
        # Whoever submits is told, and may have given up: nobody else sends it later.
        with contextlib.suppress(StorageError):
            plan.store.write_refused(plan.run_id, 0, category=_category(exc), reason=str(exc))
        raise
    plan.store.write_submitted(plan.run_id, 0, native_id)
    if plan.store.cancelled(plan.run_id):  # it was cancelled while the provider took it
        patiently(partial(plan.provider.cancel, native_id))
    return run


def _write_context(store: Store, layout: Layout, run_id: str) -> None:
    """What the nodes of the newest attempt are told, whatever a client that was overtaken has written meanwhile."""
    while True:
        newest = max(store.attempts(run_id))
        request = store.attempt_request(run_id, newest)
        # Another GPU may mean another number of ranks; most attempts are told the same.
        if request is not None and store.context(layout) != request.context:
            store.write_container(layout, request.context, secrets.token_bytes(32))
        if max(store.attempts(run_id)) == newest:
            return


class Retry:
    """What a waiting client asks after an attempt that failed, where it is the client who starts the next one.

    Making it sends an attempt that an earlier client recorded and never sent, `resend` that of one that died beside it;
    ``environ`` has the values of ``env:`` references. Two failures in a row with the same exception and no new
    checkpoint between end the run, whoever saw the first; ``max_runtime`` and ``max_cost`` are sums over attempts.
    """

    def __init__(
        self, run: Run, say: Callable[[str], None] | None = None, *, environ: Mapping[str, str] | None = None
    ) -> None:
        self._run, self._say = run, say or (lambda _: None)
        self._environ = os.environ if environ is None else environ
        self._due: dict[int, float] = {}
        attempts = run.store.attempts(run.run_id)
        if attempts and run.store.result(run.run_id) is None:
            self._send_recorded(max(attempts))

    def resend(self, attempt: int, now: float) -> None:
        """Send the newest attempt, which is recorded and not sent, once it has stood so for `UNSENT_SECONDS` of the
        caller's clock, ``now`` in seconds: whoever recorded it has died. Raises what sending raises."""
        if now >= self._due.setdefault(attempt, now + UNSENT_SECONDS):
            self._due[attempt] = now + UNSENT_SECONDS
            self._send_recorded(attempt)

    def _send_recorded(self, number: int) -> None:
        run, store = self._run, self._run.store
        if store.submitted(run.run_id, number) is not None or store.refused(run.run_id, number) is not None:
            return
        request = store.attempt_request(run.run_id, number)
        if store.cancelled(run.run_id):
            run.cancel()  # it may have been sent all the same
        elif request is not None and self._is_ours(number):
            self._say(f"sending attempt {number}, which was recorded and never sent")
            self._send(request, _secret_values(run.job, self._environ) if not number else {})

    def _is_ours(self, attempt: int) -> bool:
        """Whether a client may send it: nodes that a machine starts are its own, and with a store elsewhere no other
        machine sees whether it has."""
        if self._run.provider.retried_by == "supervisor":
            return attempt == 0 and local_path(self._run.store.url) is not None
        return attempt == 0 or self._run.provider.retried_by == "client"

    def __call__(self, result: Mapping[str, Any]) -> bool:
        """Start another attempt; False when none should follow, or the run was cancelled."""
        run, store = self._run, self._run.store
        newest = max(store.attempts(run.run_id))
        if overtaken(store, run.run_id, newest, result):
            return True
        checkpoint = run.checkpoint()
        failure = {"exception": _exception(result), "checkpoint": checkpoint.key if checkpoint is not None else None}
        store.write_ended(run.run_id, newest, failure)
        elsewhere = result["category"] in NO_MACHINES
        if not elsewhere and failure["exception"] and newest and store.ended(run.run_id, newest - 1) == failure:
            self._say("the same failure twice with no new checkpoint between: no further attempt")
            return False
        last = store.attempt_request(run.run_id, newest)
        job, why = _left(run.job.at(run.provider_name), result)
        if last is None or job is None or store.cancelled(run.run_id):
            if why:
                self._say(f"no further attempt: {why}")
            return False
        gpus = job.resources.gpu
        following = last.next_choice(result["category"])
        choice = (following if following < len(gpus) else 0) if elsewhere else last.choice
        try:
            request = run.provider.plan(job, self._layout, attempt=newest + 1, choice=choice)
        except SpecError as exc:
            self._say(f"no further attempt: {exc}")
            return False
        if store.create_attempt(run.run_id, newest + 1, request):
            self._say(f"starting attempt {newest + 1}" + (f" with GPU {gpus[choice]}" if elsewhere and gpus else ""))
            try:
                self._send(request)
            except LostContactError as exc:
                if not exc.passing:
                    raise
                self._say(f"attempt {newest + 1} could not be sent yet: {exc}")  # `resend` does, or whoever comes next
        return True  # or another client has started it

    @property
    def _layout(self) -> Layout:
        return Layout.from_dict(self._run.record["layout"])

    def _send(self, request: Request, values: Mapping[str, str] = MappingProxyType({})) -> None:
        """A refusal is noted: the run must not wait for an attempt that will never be."""
        run = self._run
        _write_context(run.store, self._layout, run.run_id)
        if max(run.store.attempts(run.run_id)) > request.attempt:
            return  # another client sent it, saw it fail and has gone on
        try:
            native = patiently(partial(run.provider.submit, request, values))
        except REFUSALS as exc:
            run.store.write_refused(run.run_id, request.attempt, category=_category(exc), reason=str(exc))
            self._say(f"attempt {request.attempt} was refused: {exc}")
            return
        run.store.write_submitted(run.run_id, request.attempt, native)
        if run.store.cancelled(run.run_id):
            patiently(partial(run.provider.cancel, native))


def _category(exc: Exception) -> str:
    kinds = ((QuotaError, "quota"), (CapacityError, "capacity"), (SpecError, "user_error"), (AuthError, "auth"))
    return next((category for kind, category in kinds if isinstance(exc, kind)), "infra")


def _exception(result: Mapping[str, Any]) -> str:
    """What is compared with the next attempt's; empty for what says nothing of the script and so is like no other: a
    preemption, a kill from outside, a node that is lost."""
    failure = result.get("failure") or {}
    killed = failure and not failure["exception"] and failure["process_exit_code"] in (None, -KILLED)
    if result["category"] == "preempted" or was_lost(failure or None) or (killed and result["category"] != "oom"):
        return ""
    return str(failure.get("exception") or result.get("reason") or result["category"])


def _left(job: Job, result: Mapping[str, Any]) -> tuple[Job | None, str]:
    """The job with what its attempts have left of its limits; None, and why, when that is nothing or nobody knows."""
    spans = [(unix_time(a.get("started")), unix_time(a.get("ended"))) for a in result["attempts"]]
    used = sum(end - start for start, end in spans if start is not None and end is not None)
    left = int(job.max_runtime - used)
    if left < 1:
        return None, "max_runtime is used up"
    if job.max_cost is None:
        return job.replace(max_runtime=left), ""
    spent = result["cost"]["estimate_usd"]
    if spent is None:
        return None, "nobody knows what is left of max_cost"
    if spent >= job.max_cost:
        return None, "max_cost is used up"
    return job.replace(max_runtime=left, max_cost=job.max_cost - spent), ""


def _record(plan: Plan) -> dict[str, Any]:
    document = plan.document()
    return {
        "protocol": 1,
        "version": _version.__version__,
        "created": time.time(),
        **{key: document[key] for key in ("run_id", "run", "provider", "settings", "job", "job_digest", "layout")},
        "code": {key: document["code"][key] for key in ("digest", "entry_point", "bytes", "git")},
        "runtime": plan.layout.runtime_digest,
        "moving": plan.store.moving._asdict(),
    }


def _check_free(plan: Plan) -> None:
    """Raise `ConflictError` when the run id is taken by anything but this very plan."""
    if not plan.store.files.exists(f"runs/{plan.run_id}/run.json"):
        return
    record = plan.store.run(plan.run_id)
    ours = (plan.job.digest, plan.layout.code_digest, plan.provider_name)
    if (record["job_digest"], record["code"]["digest"], record["provider"]) != ours:
        raise ConflictError(
            f"{plan.run_id!r} is already the id of another job in {plan.store.url}; choose another", field="run_id"
        )
    if Layout.from_dict(record["layout"]) != plan.layout:
        raise _recorded_otherwise(plan)


def _recorded_otherwise(plan: Plan) -> ConflictError:
    return ConflictError(
        f"{plan.run_id!r} was recorded with another request (inputs, settings or version); choose another id",
        field="run_id",
    )


def _secret_values(job: Job, environ: Mapping[str, str]) -> dict[str, str]:
    """Values of the ``env:`` references, by the variable's name. Raises `SpecError` for one that is not set."""
    values = {}
    for name, reference in job.secrets.items():
        scheme, _, variable = reference.partition(":")
        if scheme == "env":
            if variable not in environ:
                raise SpecError(f"{variable} is not set here{nearest(variable, environ)}", field=f"secrets.{name}")
            values[variable] = environ[variable]
    return values
