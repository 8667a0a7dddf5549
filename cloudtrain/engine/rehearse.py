"""Rehearse a job: run the exact Request of another platform on this machine as that platform would.

`plan_rehearsal` makes the real plan, with real URLs and no credentials, and from it one that `submit` runs here. Run
id, code and inputs are the same, staged into a local store in place of the cloud's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import SpecError
from ..job.job import Job
from ..provider_api.protocol import Provider, recorded_settings
from ..provider_api.registry import find_provider
from ..runs.fallback import only_first
from ..runs.submit import Plan, first_request, make_plan
from ..settings.settings import Settings
from ..storage.local_disk import local_path, normalize
from ..store.store import Store
from ..validate import did_you_mean
from .supervised import SupervisedProvider
from .url_map import map_urls, stand_in_for

STORE = "./.cloudtrain"  # default store of rehearsals


def plan_rehearsal(
    job: Job,
    *,
    settings: Settings,
    provider: str | None = None,
    run_id: str | None = None,
    cwd: Path,
    store: str = STORE,
    maps: Mapping[str, str] | None = None,
    image: str = "",
    secrets: Mapping[str, str] | None = None,
    drills: Sequence[tuple[str, str]] = (),
) -> Plan:
    """Return the plan of a rehearsal of ``job`` on ``provider`` (default: the setting), without the fallback.

    ``store`` is the local folder in place of the real store. ``maps`` are local paths by the URLs they stand for.
    ``image`` is a local image in the request's place. ``secrets`` are references ``env:VARIABLE`` by the names of the
    job's secrets. ``drills`` are pairs like ``("preempt", "node=1,after=30s")``. Its request's ``body`` holds the
    provider's ``request`` and the ``differences`` from the platform. Raises `SpecError`, and the errors of `make_plan`.
    """
    real = make_plan(job, settings=only_first(settings)[0], provider=provider, run_id=run_id, cwd=cwd)
    target = real.provider
    if isinstance(target, SupervisedProvider):
        hint = "name a cloud, or use submit"
        raise SpecError(f"{target.name} already runs on this machine", field="provider", hint=hint)
    here = Store(store, cwd=cwd)
    if local_path(here.url) is None:
        raise SpecError(f"must be a folder of this machine, not {store}", field="local_store")
    stand_ins = _stand_ins(real, {url.rstrip("/"): _existing(path, cwd) for url, path in (maps or {}).items()})
    rehearsal: Any = find_provider("rehearsal")
    chosen: Provider = rehearsal(
        target=target.name,
        account=recorded_settings(type(target).Settings, dataclasses.asdict(target.settings)),
        store=real.store.url,
        maps=stand_ins,
        image=image,
        secrets=dict(real.job.secrets),
        drills=tuple(f"{kind} {text}" for kind, text in drills),
    )
    job = real.job.replace(secrets=_substitutes(real.job, secrets or {}))
    _check_data(real, {real.store.url: here.url, **stand_ins})
    layout = map_urls(real.layout, here.url)
    inputs = {
        name: dataclasses.replace(item, source=None) if real.layout.inputs[name].url in stand_ins else item
        for name, item in layout.inputs.items()
    }
    source = layout.resume_source and stand_in_for(layout.resume_source, stand_ins, or_same=True)
    layout = dataclasses.replace(layout, inputs=inputs, resume_source=source)
    return dataclasses.replace(
        real,
        job=job,
        provider=chosen,
        store=here,
        layout=layout,
        request=first_request(chosen, job, layout),
        later=(),
        settings=dataclasses.replace(real.settings, budget=""),
        upload=dataclasses.replace(real.upload, node_half=type(target)),
    )


def _existing(path: str, cwd: Path) -> str:
    url = normalize(path, cwd=cwd)
    if not _is_here(url):
        raise SpecError(f"there is no {path} on this machine", field="map")
    return url


def _stand_ins(real: Plan, maps: Mapping[str, str]) -> dict[str, str]:
    """Return ``maps``, with inputs that the plan would have copied into the store, and with files of this machine."""
    here = {item.url: item.url for item in real.layout.inputs.values() if _is_here(item.url)}
    sources = {item.url: item.source for item in real.layout.inputs.values() if item.source}
    found = {url: stand_in_for(source, maps, or_same=True) for url, source in sources.items()}
    return {**here, **maps, **{url: place for url, place in found.items() if place != sources[url]}}


def _is_here(url: str) -> bool:
    path = local_path(url)
    return path is not None and path.exists()


def _check_data(real: Plan, places: Mapping[str, str]) -> None:
    """Raise `SpecError` for data that is neither staged nor on this machine."""
    staged = {tree.digest for tree in real.upload.trees}
    for name, item in real.layout.inputs.items():
        digest = item.url.removeprefix(f"{real.store.url}/data/").partition("/")[0]
        if digest not in staged and not (item.source and item.url not in places):
            _check_there(item.url, places, f"inputs.{name}")
    if real.layout.resume and not real.layout.resume_source:
        _check_there(real.layout.resume, places, "resume_from")


def _check_there(url: str, places: Mapping[str, str], field: str) -> None:
    try:
        path = local_path(stand_in_for(url, places))
    except SpecError as exc:
        raise SpecError(exc.message, field=field, hint=exc.hint) from None
    if path is None or not path.exists():
        hint = f"name another folder: --map {url}=PATH"
        raise SpecError(f"there is no {path}, which stands for {url}", field=field, hint=hint)


def _substitutes(job: Job, given: Mapping[str, str]) -> dict[str, str]:
    """Return the references ``env:VARIABLE`` in place of the job's own. Raises `SpecError` for a secret without one."""
    for name, reference in given.items():
        if name not in job.secrets:
            hint = did_you_mean(name, job.secrets)
            raise SpecError(f"the job has no secret {name!r}", field="secret_value", hint=hint)
        if not reference.startswith("env:") or not reference[4:]:
            raise SpecError(f"must be env:VARIABLE, not {reference!r}", field=f"secret_value.{name}")
    for name in job.secrets:
        if name not in given:
            how = f"give a value: --secret-value {name}=env:VARIABLE"
            raise SpecError("has no value in a rehearsal", field=f"secrets.{name}", hint=how)
    return {name: given[name] for name in job.secrets}
