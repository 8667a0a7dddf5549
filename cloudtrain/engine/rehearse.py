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
from ..job.fields import SECRETS, path_text
from ..job.job import Job
from ..provider_api.protocol import Provider, recorded_settings
from ..provider_api.registry import find_provider
from ..runs.fallback import only_first
from ..runs.submit import Plan, first_request, make_plan
from ..settings import needs
from ..settings.settings import Settings
from ..storage.local_disk import local_path, normalize
from ..store.store import Store
from ..validate import did_you_mean, table_of, text_of
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
    image = text_of(image, "local_image", empty=True)
    real, missing = _real_plan(job, only_first(settings)[0], image, provider=provider, run_id=run_id, cwd=cwd)
    target = real.provider
    here = Store(store, cwd=cwd)
    if local_path(here.url) is None:
        raise SpecError(f"must be a folder of this machine, not {store}", field="local_store")
    given = table_of(maps or {}, "maps")
    stand_ins = _stand_ins(real, {url.rstrip("/"): _existing(path, cwd) for url, path in given.items()})
    rehearsal: Any = find_provider("rehearsal")
    chosen: Provider = rehearsal(
        target=target.name,
        account=recorded_settings(type(target).Settings, dataclasses.asdict(target.settings)),
        store=real.store.url,
        maps=stand_ins,
        image=image,
        secrets=dict(real.job.secrets),
        drills=tuple(f"{kind} {text}" for kind, text in drills),
        missing=missing,
    )
    job = real.job.replace(secrets=_substitutes(real.job, SECRETS.check(secrets or {}, "secret_value")))
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


def _real_plan(job: Job, settings: Settings, image: str, **where: Any) -> tuple[Plan, tuple[str, ...]]:
    """Return the platform's own plan, with made-up values for missing settings, and the names of these settings."""
    plan = make_plan(job, settings=settings, incomplete=True, **where)
    target = plan.provider
    if isinstance(target, SupervisedProvider):
        hint = "name a cloud, or use submit"
        raise SpecError(f"{target.name} already runs on this machine", field="provider", hint=hint)
    if not plan.missing:
        return plan, ()
    _, target, job = needs.stand_ins(settings, target.name, plan.job, plan.missing)
    theirs = target.launch_spec(plan.request).nodes[0].image
    made_up = theirs != plan.job.image and needs.with_placeholders(theirs, target.name, plan.missing) != theirs
    if made_up and not image:
        why, hint = f"no setting names the image of {target.name}", "name an image of this machine: --local-image IMAGE"
        raise SpecError(why, field="local_image", hint=hint)
    return dataclasses.replace(plan, provider=target, job=job, missing=()), plan.missing


def _existing(path: Any, cwd: Path) -> str:
    url = normalize(text_of(path_text(path), "map"), cwd=cwd)
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
        if not reference.startswith("env:"):  # and it may be the secret
            raise SpecError("must be env:VARIABLE", field=f"secret_value.{name}")
    for name in job.secrets:
        if name not in given:
            how = f"give a value: --secret-value {name}=env:VARIABLE"
            raise SpecError("has no value in a rehearsal", field=f"secrets.{name}", hint=how)
    return {name: given[name] for name in job.secrets}
