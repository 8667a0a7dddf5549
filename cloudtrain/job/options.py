"""Merge a Job's ``options`` into a native request, last and verbatim, except over cloudtrain's own parts. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import SpecError


def merge_options(
    body: Mapping[str, Any], options: Mapping[str, Any], *, owned: Sequence[str], provider: str
) -> dict[str, Any]:
    """Return ``body`` with ``options`` deep-merged. Lists merge by index (keys ``"0"``…; ``"*"`` is every element).

    Raises `SpecError` for a path that cloudtrain owns: dotted, ``*`` for any list index.
    """
    return _merge(json.loads(json.dumps(body)), options, (), owned, provider)  # type: ignore[no-any-return]


def _merge(into: Any, change: Any, path: tuple[str, ...], owned: Sequence[str], provider: str) -> Any:
    where = f"options.{provider}." + ".".join(path)
    if path and _owned(path, owned):
        raise SpecError("cloudtrain itself sets this part of the request", field=where)
    if isinstance(into, dict) and isinstance(change, Mapping):
        return {**into, **{k: _merge(into.get(k), v, (*path, k), owned, provider) for k, v in change.items()}}
    if isinstance(into, list) and isinstance(change, Mapping):
        added = sorted(int(key) for key in change if key.isdigit() and int(key) >= len(into))
        known = {*range(len(into)), *(at for number, at in enumerate(added) if at == len(into) + number)}
        for key in change:
            if key != "*" and not (key.isdigit() and int(key) in known):
                raise SpecError(f"{key!r} is no index of that list of {len(into)}; '*' means every one", field=where)
        out = list(into)
        for i in range(len(out)):
            if "*" in change:
                out[i] = _merge(out[i], change["*"], (*path, "*"), owned, provider)
        for key in sorted((k for k in change if k != "*"), key=int):
            old = out[int(key)] if int(key) < len(out) else None
            out[int(key) : int(key) + 1] = [_merge(old, change[key], (*path, "*"), owned, provider)]
        return out
    if _holds_owned(path, owned):
        raise SpecError("would replace a part of the request that cloudtrain itself sets", field=where)
    return json.loads(json.dumps(change))


def _owned(path: tuple[str, ...], owned: Sequence[str]) -> bool:
    return any(tuple(name.split(".")) == path[: name.count(".") + 1] for name in owned)


def _holds_owned(path: tuple[str, ...], owned: Sequence[str]) -> bool:
    return any(tuple(name.split("."))[: len(path)] == path for name in owned)
