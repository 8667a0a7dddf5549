"""``NAME=VALUE`` on the command line: ``--env A=1``, ``--env.A 1``, ``--option provider.path.to=value``."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["TABLES", "merge", "pairs", "tree", "undot"]

#: Flags that take NAME=VALUE, as the brief spelling and the field's own.
TABLES = (
    "--hp", "--hyperparameters", "--env", "--secret", "--secrets", "--input", "--inputs", "--tag", "--tags",
    "--metric", "--metrics", "--option", "--options", "--on", "--set",
)  # fmt: skip
_DOTTED = re.compile(rf"({'|'.join(TABLES)})\.([^=]+)(=.*)?", re.DOTALL)


def undot(tokens: Sequence[str]) -> list[str]:
    """``tokens`` with ``--env.A 1`` and ``--env.A=1`` written as ``--env=A=1``, whatever the value looks like."""
    out: list[str] = []
    rest = list(tokens)
    while rest:
        token = rest.pop(0)
        match = _DOTTED.fullmatch(token)
        if match and match[3] is not None:
            token = f"{match[1]}={match[2]}{match[3]}"
        elif match and rest:
            token = f"{match[1]}={match[2]}={rest.pop(0)}"
        out.append(token)
    return out


def pairs(flag: str, texts: Sequence[str], *, field: str) -> dict[str, str]:
    """``{"A": "x=1"}`` of ``["A=x=1"]``: split at the first ``=``, the value kept as it is; the last of a name wins."""
    from ..errors import SpecError

    out: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise SpecError(f"{flag} {text!r} is not NAME=VALUE", field=field)
        out[name] = value
    return out


def tree(flag: str, texts: Sequence[str], *, field: str) -> dict[str, Any]:
    """``{"p": {"a": {"b": 1}}}`` of ``["p.a.b=1"]``; values are JSON where they are JSON, else text.

    ``p={"a.b": 1}`` writes what dots cannot.
    """
    from ..errors import SpecError

    out: dict[str, Any] = {}
    for path, text in pairs(flag, texts, field=field).items():
        value = _json_or_text(text)
        names = path.split(".")
        if not all(names):
            raise SpecError(f"{flag} {path!r} has an empty name", field=field)
        if len(names) == 1 and not isinstance(value, Mapping):
            raise SpecError(f"{flag} {path}={text!r}: write PROVIDER.PATH=VALUE, or PROVIDER={{…}}", field=field)
        for name in reversed(names):
            value = {name: value}
        out = merge(out, value)
    return out


def merge(into: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    """``into`` with ``change`` merged in, tables by key at every depth."""
    out = dict(into)
    for key, value in change.items():
        old = out.get(key)
        out[key] = merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return out


def _json_or_text(text: str) -> Any:
    def refuse(name: str) -> Any:
        raise ValueError(name)  # NaN and Infinity are no JSON

    try:
        return json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError):
        return text
