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
from typing import TYPE_CHECKING, Any

from . import _version, pyz
from .errors import ConflictError, SpecError
from .job import DEFAULT_MAX_RUNTIME, Job, Source, check_run_id, new_run_id
from .provider import Layout, Provider, Request, provider_names
from .run import Run
from .settings import Settings
from .store import LocalTree, Store
from .transfer import local_path, normalize
from .values import nearest, url_scheme

if TYPE_CHECKING:
    from .bundle import Bundle

__all__ = ["Plan", "load_plan", "make_plan", "submit"]

MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What would be sent, whole. ``job`` is as this provider runs it; `document` is what ``plan --json`` prints."""

    job: Job
    source: Source
    provider: Provider
    store: Store
    bundle: Bundle
    layout: Layout
    request: Request
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
            "settings": dataclasses.asdict(self.provider.settings),
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
            "price": None,
        }

    def _limits(self) -> dict[str, Any]:
        return {
            "max_runtime_s": self.job.max_runtime,
            "max_runtime_is_default": self.job.max_runtime == DEFAULT_MAX_RUNTIME,
            "max_wait_s": self.job.max_wait,
            "max_cost_usd": self.job.max_cost,
            "stall_timeout_s": self.job.stall_timeout or None,
            "max_code_bytes": self.max_code_mb * MIB,
        }

    def _disk(self) -> dict[str, Any]:
        """What a node needs, as far as it is known before the run: code, and inputs that are copied to it."""
        copied = sum(tree.bytes for tree in self.trees)
        return {"code_bytes": self.bundle.size, "input_bytes": copied, "checkpoint_bytes": None}


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
    store = Store(settings.store, cwd=cwd)
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
        trees=tuple(trees),
        preview=preview and run_id is None,
        max_code_mb=settings.max_code_mb,
    )


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
    store = Store(layout.store)
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


def submit(plan: Plan, *, environ: Mapping[str, str], progress: Callable[[str], None] | None = None) -> Run:
    """Stage, record, send. Submitting the same plan again gives the same run, whole.

    Raises `ConflictError` when the run id belongs to another job, and whatever storage and the provider raise.
    """
    values = _secret_values(plan.job, environ)
    say = progress or (lambda _: None)
    _check_free(plan)
    say("uploading what the store lacks")
    zipped = partial(pyz.build, type(plan.provider))
    staged = plan.store.stage(plan.layout, archive=plan.bundle.archive, pyz=zipped, trees=plan.trees)
    say("recording the run")
    if not plan.store.create_run(plan.layout, _record(plan)):
        _check_free(plan)
    # Not before the id is known to be ours: another job's context must never be overwritten.
    plan.store.write_container(plan.layout, plan.request.context, secrets.token_bytes(32))
    if not plan.store.create_attempt(plan.run_id, 0, plan.request):
        recorded = plan.store.attempt_request(plan.run_id, 0)
        if recorded is not None and recorded.to_dict() != plan.request.to_dict():
            raise ConflictError(
                f"{plan.run_id!r} was recorded with another request (inputs, settings or version); choose another id",
                field="run_id",
            )
    run = Run(store=plan.store, run_id=plan.run_id, provider=plan.provider)
    run.staged = staged
    if plan.store.cancelled(plan.run_id):
        return run
    say(f"submitting to {plan.provider_name}")
    native_id = plan.provider.submit(plan.request, values)
    plan.store.write_submitted(plan.run_id, 0, native_id)
    if plan.store.cancelled(plan.run_id):  # it was cancelled while the provider took it
        plan.provider.cancel(native_id)
    return run


def _record(plan: Plan) -> dict[str, Any]:
    document = plan.document()
    return {
        "protocol": 1,
        "version": _version.__version__,
        "created": time.time(),
        **{key: document[key] for key in ("run_id", "run", "provider", "settings", "job", "job_digest", "layout")},
        "code": {key: document["code"][key] for key in ("digest", "entry_point", "bytes", "git")},
        "runtime": plan.layout.runtime_digest,
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
