"""Find a provider's missing settings, say how to set them, and make a plan without them.

Each provider states its needs as data (`Need`). Names are those of ``cloudtrain config``:
``store``, ``NAME.region``; ``image`` is a field of the job.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import SpecError
from ..job.job import Job
from ..provider_api.protocol import Need, Provider, lacking, needs_of
from ..provider_api.registry import find_provider
from .settings import FILE, PROJECT, Settings

_IMAGE, _STORE = "image", "store"


def find_missing(settings: Settings, provider: Provider, job: Job) -> tuple[str, ...]:
    """Return the names of the values that ``provider``, made of ``settings``, lacks to send ``job``.

    Raises `SpecError` for a store at the place that stands for a missing one.
    """
    kind, need = type(provider), needs_of(type(provider)).get(_STORE)
    missing = lacking(kind, provider.settings, job)
    if need is None or settings.store == Settings.store:
        return (_STORE, *missing) if need else missing
    if f"{settings.store.removeprefix('file://')}/".startswith(f"{_stand_in(_STORE, need)}/"):
        hint = f"for example {assignment(_STORE, need)}"
        raise SpecError(f"{settings.store!r} is what a plan shows if no store is set", field=_STORE, hint=hint)
    return missing


def refusal(provider: str, names: Sequence[str], *, file: str = "", profile: str = "") -> SpecError:
    """Return the error for a job that lacks ``names``; its hint has the lines to paste into ``file``."""
    lines = [snippet(provider, names, file=file, profile=profile)]
    lines += [] if file else [f"or let cloudtrain ask: cloudtrain init --provider {provider}"]
    return SpecError(missing_line(names), field=f"provider {provider}", hint="\n".join(lines))


def missing_line(names: Sequence[str]) -> str:
    """Return ``2 settings are missing: region, role``."""
    listed = ", ".join(map(_short, names))
    return f"1 setting is missing: {listed}" if len(names) == 1 else f"{len(names)} settings are missing: {listed}"


def snippet(provider: str, names: Sequence[str], *, file: str = "", profile: str = "") -> str:
    """Return the lines that set ``names`` to examples, as TOML to paste, with how to find each value.

    They belong into the table of ``profile``, if one is given.
    """
    project = Path(file).name == PROJECT
    outer = [*(["tool", "cloudtrain"] if project else []), *(["profiles", profile] if profile else [])]
    head, table = f"[{'.'.join(outer)}]" if outer else "", f"[{'.'.join([*outer, provider])}]"
    needs = needs_of(find_provider(provider))
    rows = {name: assignment(_short(name), needs[name]) for name in names}
    own = [row for name, row in rows.items() if "." in name]
    lines = [f"add to {PROJECT if project else FILE}:"] if _STORE in rows or own else []
    lines += [*filter(None, [head]), rows[_STORE]] if _STORE in rows else []
    lines += [table, *own] if own else []
    if _IMAGE in rows:
        lines += ["add to the job file, or name it with --image:", rows[_IMAGE]]
    return "\n".join(lines)


def assignment(name: str, need: Need) -> str:
    """Return the TOML line that sets ``name`` to an example."""
    return f"{name} = {json.dumps(need.example)}  # {need.find}"


def stand_ins(settings: Settings, provider: str, job: Job, names: Sequence[str]) -> tuple[Settings, Provider, Job]:
    """Return settings, provider and job with valid stand-ins for the missing values, so that they can be planned."""
    needs = needs_of(find_provider(provider))
    values = {_short(name): _stand_in(name, needs[name]) for name in names}
    job = job.replace(image=values.pop(_IMAGE)) if _IMAGE in values else job
    settings = dataclasses.replace(settings, store=values.pop(_STORE, settings.store))
    return settings, settings.make_provider(provider, **values), job


def with_placeholders(data: Any, provider: str, names: Sequence[str]) -> Any:
    """Return ``data``, plain JSON, with ``<role>`` and the like in place of each stand-in."""
    texts: dict[str, str] = {}
    for name in names:
        need = needs_of(find_provider(provider))[name]
        stand_in, shown = _stand_in(name, need), need.shown or f"<{_short(name)}>"
        texts[stand_in] = shown
        if "://" in stand_in and "://" in shown:  # a mounted bucket's path has no scheme
            texts[stand_in.partition("://")[2]] = shown.partition("://")[2]
    for text in sorted(texts, key=len, reverse=True):
        data = _replaced(data, text, texts[text])
    return data


def _replaced(data: Any, old: str, new: str) -> Any:
    if isinstance(data, str):
        return data.replace(old, new)
    if isinstance(data, dict):
        return {_replaced(key, old, new): _replaced(value, old, new) for key, value in data.items()}
    return [_replaced(item, old, new) for item in data] if isinstance(data, list) else data


def _short(name: str) -> str:
    return name.rpartition(".")[2]


def _stand_in(name: str, need: Need) -> str:
    return need.stand_in or f"missing-{_short(name).replace('_', '-')}"
