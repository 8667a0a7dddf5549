"""Convert a setting's value to its type: text, number, list, table, or a list with one value for each place.

Values come from TOML, or as text from variables and flags. `SpecError` names the source of a wrong value.
"""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import SpecError
from ..validate import brief, json_or_text, text_of, url_scheme

__all__ = ["Each", "Found", "is_table", "over", "resolve_below", "texts", "typed", "typed_each", "urls"]

_BETWEEN = re.compile(r",\s*(?=[A-Za-z][A-Za-z0-9+.-]*://)")
"""Separator of two URLs."""


class Found(NamedTuple):
    """A setting's value and its source: ``cloudtrain.toml [profiles.prod]``, a variable, ``--set``."""

    value: Any
    source: str


class Each(tuple[Any, ...]):
    """A setting's values, one for each place, at least two."""


def typed(value: Any, kind: Any, where: str) -> Any:
    """Return ``value``, maybe text, as ``kind``: str, int, float, bool, list of str, table, or optional one."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        kind = next(k for k in typing.get_args(kind) if k is not type(None))
    if typing.get_origin(kind) in (list, tuple):
        parts = [part.strip() for part in value.split(",")] if isinstance(value, str) else value
        if not isinstance(parts, (list, tuple)) or not all(isinstance(part, str) for part in parts):
            raise SpecError(f"must be a list of texts, not {brief(value)}", field=where)
        return tuple(parts)
    if is_table(kind):
        table = _entries(value) if isinstance(value, str) else value
        if not isinstance(table, Mapping):
            raise SpecError(f"must be a table, in a variable NAME=VALUE,… or JSON, not {brief(value)}", field=where)
        return table
    if isinstance(value, str) and kind is bool and value.lower() in ("true", "1", "yes", "false", "0", "no"):
        return value.lower() in ("true", "1", "yes")
    try:
        if (isinstance(value, str) and kind in (int, float)) or (kind is float and type(value) is int):
            return kind(value)
    except (ValueError, OverflowError):
        pass
    if kind in (str, int, float, bool) and type(value) is not kind:
        raise SpecError(f"must be {kind.__name__}, not {brief(value)}", field=where)
    return value


def over(old: Found | None, value: Any) -> Any:
    """Return ``value``; if it is a table, merged over the entries of ``old``."""
    return {**old.value, **value} if old is not None and isinstance(value, Mapping) else value


def _entries(text: str) -> Any:
    """Return the table that a text holds as JSON or ``a=1,b=2``; None for other text."""
    if text.lstrip().startswith("{"):
        return json_or_text(text)
    pairs = [part.strip().partition("=") for part in text.split(",")]
    return {name: json_or_text(value) for name, _, value in pairs} if all(n and e for n, e, _ in pairs) else None


def is_table(kind: Any) -> bool:
    """Return whether settings of this type are tables."""
    return typing.get_origin(kind) is dict or kind is dict


def urls(value: Any, where: str) -> tuple[str, ...]:
    """Return the stores of one URL, a list, or a text of several URLs with commas between. A path may have commas."""
    return texts(_BETWEEN.split(value) if isinstance(value, str) else value, where)


def texts(value: Any, where: str) -> tuple[str, ...]:
    """Return a list of at least one text; of several texts none is empty."""
    if not isinstance(value, (list, tuple)):
        raise SpecError(f"must be str, not {brief(value)}; or a list of such", field=where)
    if not value or not all(isinstance(item, str) for item in value) or (len(value) > 1 and not all(value)):
        raise SpecError(f"must be a list of texts, none empty, not {brief(value)}", field=where)
    return tuple(value)


def typed_each(value: Any, kind: Any, where: str, *, splits: bool) -> Any:
    """Return ``value`` as `typed` does, or one value for each place if it is a list; ``splits``: also at commas."""
    if kind is str and splits and isinstance(value, str) and "," in value:
        value = [part.strip() for part in value.split(",")]
    if typing.get_origin(kind) in (list, tuple) and isinstance(value, str) and value.lstrip().startswith("["):
        value = _json_list(value, where)
    many = isinstance(value, (list, tuple)) and (
        kind is str or (typing.get_origin(kind) is tuple and any(isinstance(item, (list, tuple)) for item in value))
    )
    if not many:
        return typed(value, kind, where)
    if not value or (kind is str and splits and not all(value)):
        raise SpecError("must be one, or a list of one for each place, and names none", field=where)
    found = Each(typed(item, kind, where) for item in value)
    return found if len(found) > 1 else found[0]


def _json_list(text: str, where: str) -> list[Any]:
    """Return the list that ``text`` holds as JSON. Raises `SpecError`."""
    found = json_or_text(text)
    if not isinstance(found, list):
        raise SpecError(f'{brief(text)} is not a list in JSON; write one,two or ["one", "two"]', field=where)
    return found


def resolve_below(store: Any, folder: Path, where: str) -> Any:
    """Return ``store``, one URL or several, with relative paths below ``folder``; other values are unchanged."""
    if isinstance(store, list):
        return [resolve_below(item, folder, where) for item in store]
    if not isinstance(store, str) or not store or url_scheme(store):
        return store
    try:
        return str(folder / Path(text_of(store, where)).expanduser())
    except RuntimeError as exc:  # an unknown ~user
        raise SpecError(str(exc), field=where) from None
