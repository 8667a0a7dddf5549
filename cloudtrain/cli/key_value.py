"""``NAME=VALUE`` on the command line: ``--env A=1``, ``--env.A 1``, ``--option provider.path.to=value``."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

#: Fields of a Job whose flag has another name.
SPELLINGS = {
    "instance_count": "--nodes", "hyperparameters": "--hp", "inputs": "--input", "secrets": "--secret",
    "metrics": "--metric", "tags": "--tag", "options": "--option", "dependencies": "--dependency",
    "checkpoint_paths": "--checkpoint-path", "total_gpus": "--gpus",
    "webhook_headers": "--webhook-header",
}  # fmt: skip
#: Second spelling of a flag -> its spelling in help, completion and documents.
ALIASES = {
    **{"--" + field.replace("_", "-"): flag for field, flag in SPELLINGS.items()},
    "--timeout": "--wait-timeout",
    "--only": "--what",
    "--interconnect": "--network",
}
#: Flags that take NAME=VALUE.
TABLES = ("--hp", "--env", "--secret", "--input", "--tag", "--metric", "--option", "--on", "--set", "--webhook-header")
_FLAG = re.compile(r"(--[A-Za-z_-]+)([.=].*)?", re.DOTALL)
_DOTTED = re.compile(rf"({'|'.join(TABLES)})\.([^=]+)(=.*)?", re.DOTALL)


def first_spelling(token: str) -> str:
    """Return ``token`` with a flag's second spelling (`ALIASES`) replaced by its first."""
    match = _FLAG.fullmatch(token)
    flag = ALIASES.get(match[1].replace("_", "-")) if match else None
    return f"{flag}{match[2] or ''}" if match and flag else token


def undot(tokens: Sequence[str]) -> list[str]:
    """Return ``tokens`` with each flag in its first spelling, and ``--env.A 1`` and ``--env.A=1`` as ``--env=A=1``."""
    out: list[str] = []
    rest = list(tokens)
    while rest:
        token = first_spelling(rest.pop(0))
        match = _DOTTED.fullmatch(token)
        if match and match[3] is not None:
            token = f"{match[1]}={match[2]}{match[3]}"
        elif match and rest:
            token = f"{match[1]}={match[2]}={rest.pop(0)}"
        out.append(token)
    return out


def pairs(flag: str, texts: Sequence[str], *, field: str) -> dict[str, str]:
    """Return ``{"A": "x=1"}`` for ``["A=x=1"]``: split at the first ``=``. The last value of a name wins."""
    from ..errors import SpecError

    out: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            text = "NAME" if flag in ("--secret-value", "--webhook-header") else text  # it may be the secret
            raise SpecError(f"{flag} {text!r} is not NAME=VALUE", field=field, hint=_with_both(flag, text))
        out[name] = value
    return out


def _with_both(flag: str, text: str) -> str:
    """Return a hint that completes ``text`` to a name and a value: a lone text is an input's URL, else a name."""
    if flag == "--input" or text.startswith("="):
        text = f"{'train' if flag == '--input' else 'NAME'}={text.lstrip('=')}"
        return f"write {shlex.join([flag, text])}"
    return f"write {flag} {text}=VALUE"


def tree(flag: str, texts: Sequence[str], *, field: str) -> dict[str, Any]:
    """Return ``{"p": {"a": 1}}`` for ``["p.a=1"]``; values are JSON, else text. ``p={"a.b": 1}`` sets names with
    dots."""
    from ..errors import SpecError
    from ..validate import json_or_text

    out: dict[str, Any] = {}
    for path, text in pairs(flag, texts, field=field).items():
        value = json_or_text(text)
        names = path.split(".")
        if not all(names):
            raise SpecError(f"{flag} {path!r} has an empty name", field=field)
        if len(names) == 1 and not isinstance(value, Mapping):
            how = f"write {flag} PROVIDER.PATH=VALUE, or {flag} PROVIDER={{…}} with a JSON table"
            raise SpecError(f"{flag} {path}={text!r} has no PROVIDER.PATH", field=field, hint=how)
        for name in reversed(names):
            value = {name: value}
        out = merge(out, value)
    return out


def merge(into: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``into`` with ``change`` merged in, tables by key at every depth."""
    out = dict(into)
    for key, value in change.items():
        old = out.get(key)
        out[key] = merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return out
