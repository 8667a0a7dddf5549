"""Refuse a list where a setting has one value, and show the profiles that try the same regions and providers."""

from __future__ import annotations

import json
import re
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ..errors import SpecError
from ..provider_api.protocol import needs_of
from ..provider_api.registry import find_provider
from ..validate import brief

__all__ = ["ValueList", "refusal_of_lists", "values_of"]

_BETWEEN = re.compile(r",\s*(?=[A-Za-z][A-Za-z0-9+.-]*://)")
"""Separator of two URLs. A path may have commas."""
_STORE = "store"


class ValueList(NamedTuple):
    """A list that is the value of ``key``: of ``provider``'s settings, or of the general ones (empty)."""

    provider: str
    key: str
    values: tuple[Any, ...]
    where: str


def values_of(value: Any, kind: Any, *, urls: bool = False, commas: bool = False) -> tuple[Any, ...] | None:
    """Return the values of a list for a setting of type ``kind`` that takes one; None if ``value`` is no such list.

    In a text, ``urls`` are separated by commas, and with ``commas`` other values too.
    """
    if isinstance(value, str):
        parts = _BETWEEN.split(value) if urls else value.split(",") if commas else [value]
        return tuple(part.strip() for part in parts) if len(parts) > 1 else None
    if not isinstance(value, (list, tuple)):
        return None
    nested = typing.get_origin(kind) is tuple and any(isinstance(item, (list, tuple)) for item in value)
    return tuple(value) if kind is str or nested else None


def refusal_of_lists(lists: Sequence[ValueList], provider: str, *, inherited: str, table: Sequence[str]) -> SpecError:
    """Return the error of the first of ``lists``, with the profiles that would replace all of them.

    ``provider`` is the chosen one, ``inherited`` the one of a profile that names none. ``table`` is the path of the
    table that holds all settings in their file.
    """
    first = lists[0]
    error = SpecError(f"must be one value, not the list {brief(list(first.values))}", field=first.where)
    if len(first.values) < 2:
        error.hint = f"write {first.key} = {_toml({'x': first.values[0]})[4:]}" if first.values else ""
        return error
    names = next((item.values for item in lists if (item.provider, item.key) == ("", "provider")), (provider,))
    profiles = _profiles(list(map(str, names)), lists, inherited)
    data: dict[str, Any] = {"profiles": profiles}
    for name in reversed(table):
        data = {name: data}
    head = [f"[{'.'.join(table)}]"] if table else []
    lines = [*head, f"fallback = {json.dumps(list(profiles), ensure_ascii=False)}", "", _toml(data)]
    error.hint = "\n".join(["keep the first value, and add a profile for each other one:", *lines])
    return error


def _profiles(names: Sequence[str], lists: Iterable[ValueList], inherited: str) -> dict[str, dict[str, Any]]:
    """Return a profile for each provider of ``names`` and each of its listed values, but the very first."""
    general = next((item.values for item in lists if (item.provider, item.key) == ("", _STORE)), ())
    found: dict[str, dict[str, Any]] = {}
    for number, name in enumerate(names):
        own = {item.key: item.values for item in lists if item.provider == name}
        stores = own.pop(_STORE, general)
        for place in range(max([*map(len, own.values()), 1 if own else len(stores), 1])):
            if not number and not place:
                continue
            table = {key: values[place] for key, values in own.items() if place < len(values)}
            label = re.sub(r"[^A-Za-z0-9_-]+", "-", next(map(str, table.values()), name)).strip("-")
            label = label if label and label not in found else f"{name}-{place + 1}"
            store = stores[place] if place < len(stores) else _example_store(name, label)
            found[label] = {
                **({"provider": name} if name != inherited else {}),
                "store": store,
                **({name: table} if table else {}),
            }
    return found


def _example_store(name: str, label: str) -> str:
    try:
        need = needs_of(find_provider(name)).get(_STORE)
    except Exception:  # noqa: BLE001 - an unknown provider, or one that cannot be loaded, has no example
        need = None
    return need.example if need is not None else f"./.cloudtrain-{label}"


def _toml(data: Mapping[str, Any]) -> str:
    import tomli_w

    return tomli_w.dumps(data).rstrip()
