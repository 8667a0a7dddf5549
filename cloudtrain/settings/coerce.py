"""Convert a setting's value to its type: text, number, list or table.

Values come from TOML, or as text from variables and flags. `SpecError` names the source of a wrong value.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import SpecError
from ..job.fields import path_text
from ..validate import brief, json_or_text, text_of, url_scheme


class Found(NamedTuple):
    """A setting's value and its source: ``cloudtrain.toml [profiles.prod]``, a variable, ``--set``."""

    value: Any
    source: str


def typed(value: Any, kind: Any, where: str) -> Any:
    """Return ``value``, maybe text, as ``kind``: str, int, float, bool, table, list of str or tables, or optional."""
    value = path_text(value)
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        kind = next(k for k in typing.get_args(kind) if k is not type(None))
    if typing.get_origin(kind) in (list, tuple):
        value = _json_list(value, where) if isinstance(value, str) and value.lstrip().startswith("[") else value
        parts = [part.strip() for part in value.split(",")] if isinstance(value, str) else value
        one, many = (Mapping, "tables") if is_table(typing.get_args(kind)[0]) else (str, "texts")
        if not isinstance(parts, (list, tuple)) or not all(isinstance(part, one) for part in parts):
            raise SpecError(f"must be a list of {many}, not {brief(value)}", field=where)
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
    if isinstance(value, (list, tuple)):
        hint = 'for other regions or providers, write a profile for each, and fallback = ["PROFILE"] (docs/fallback.md)'
        raise SpecError(f"must be one value, not the list {brief(list(value))}", field=where, hint=hint)
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


def _json_list(text: str, where: str) -> list[Any]:
    """Return the list that ``text`` holds as JSON. Raises `SpecError`."""
    found = json_or_text(text)
    if not isinstance(found, list):
        raise SpecError(f'{brief(text)} is not a list in JSON; write one,two or ["one", "two"]', field=where)
    return found


def resolve_below(store: Any, folder: Path, where: str) -> Any:
    """Return ``store``, with a relative path below ``folder``; other values are unchanged."""
    if not isinstance(store, str) or not store or url_scheme(store):
        return store
    try:
        return str(folder / Path(text_of(store, where)).expanduser())
    except RuntimeError as exc:  # an unknown ~user
        raise SpecError(str(exc), field=where) from None
