"""Check a CustomJob before it is sent, with no SDK.

`fields.json` holds the fields of the SDK's protobufs (``tools/vertex_tables.py``). The protobufs have no limits, and no
rules that span fields.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from ...errors import SpecError
from ...validate import did_you_mean
from . import NAME
from .node import NODES

ENV_COUNT = 100
"""Most variables of a container, besides the service's own: docs of ContainerSpec.env."""
DURATION = re.compile(r"\d{1,12}s")
_INT = {"int32": (-(2**31), 2**31 - 1), "int64": (-(2**63), 2**63 - 1)}
_WORDS = {"string": "text", "bool": "true or false", "map": "a table of texts", "Duration": "seconds, like 3600s"}


@cache
def fields() -> dict[str, Any]:
    """Return the table."""
    table: dict[str, Any] = json.loads((Path(__file__).parent / "fields.json").read_bytes())
    return table


def check_body(body: Mapping[str, Any]) -> None:
    """Raise `SpecError`, named by its place in ``options``, for values that the API refuses. Only `options` can be
    wrong."""
    table = fields()
    _message(table, table["input"], body, f"options.{NAME}")
    pools = body["jobSpec"]["workerPoolSpecs"]
    for pool in pools:
        _check_env(pool["containerSpec"].get("env", []), sum(int(pool["replicaCount"]) for pool in pools))
        if "pythonPackageSpec" in pool:
            where = f"options.{NAME}.jobSpec.workerPoolSpecs.*.pythonPackageSpec"
            raise SpecError("is not allowed: each pool has cloudtrain's container", field=where)
    scheduling = body["jobSpec"]["scheduling"]
    if scheduling.get("disableRetries") and scheduling.get("strategy") == "SPOT":
        where = f"options.{NAME}.jobSpec.scheduling.disableRetries"
        why = "is set, and a job on spot machines needs such retries"
        raise SpecError(why, field=where, hint="remove disableRetries, or spot")


def _message(table: Mapping[str, Any], name: str, value: Any, where: str) -> None:
    if not isinstance(value, Mapping):
        raise SpecError(f"must be a table, not {value!r}", field=where)
    known = table["messages"][name]
    for key, item in value.items():
        there = f"{where}.{key}"
        if key not in known:
            raise SpecError(f"no such field of a {name}", field=there, hint=did_you_mean(key, known))
        kind = known[key]
        if not kind.endswith("[]"):
            _value(table, kind, item, there)
        elif not isinstance(item, list):
            raise SpecError(f"must be a list, not {item!r}", field=there)
        else:
            for number, one in enumerate(item):
                _value(table, kind[:-2], one, f"{there}.{number}")


def _value(table: Mapping[str, Any], kind: str, value: Any, where: str) -> None:
    if kind in table["messages"]:
        return _message(table, kind, value, where)
    if kind in table["enums"]:
        if value not in table["enums"][kind]:
            choices = table["enums"][kind]
            near = did_you_mean(str(value), choices)
            raise SpecError(f"{value!r} is none of {', '.join(choices)}", field=where, hint=near)
    elif not _fits(kind, value):
        raise SpecError(f"must be {_WORDS.get(kind, 'a whole number')}, not {value!r}", field=where)
    return None


def _fits(kind: str, value: Any) -> bool:
    if kind == "map":
        return isinstance(value, Mapping) and all(_is_text(part) for pair in value.items() for part in pair)
    if kind == "Duration":
        return isinstance(value, str) and bool(DURATION.fullmatch(value)) and int(value[:-1]) <= 315_576_000_000
    if kind == "string":
        return _is_text(value)
    if kind == "bool":
        return isinstance(value, bool)
    least, most = _INT[kind]
    if kind == "int64" and isinstance(value, str) and re.fullmatch(r"-?\d{1,19}", value):
        value = int(value)  # JSON sends an int64 as text
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _is_text(value: Any) -> bool:
    """Return True for text that UTF-8 can encode: half of a surrogate pair cannot be."""
    return isinstance(value, str) and not any("\ud800" <= char <= "\udfff" for char in value)


def _check_env(variables: list[Mapping[str, str]], count: int) -> None:
    """Check the variables; ``count`` is the job's nodes."""
    where = f"options.{NAME}.jobSpec.workerPoolSpecs.*.containerSpec.env"
    if len(variables) > ENV_COUNT:
        why = f"has {len(variables)} variables, at most {ENV_COUNT}"
        raise SpecError(why, field=where, hint="use the job's own env, which has no such limit")
    names = [item.get("name", "") for item in variables]
    if names[:1] != [NODES] or variables[0].get("value") != str(count):
        why = f"cloudtrain itself sets the first variable, {NODES}"
        raise SpecError(why, field=where, hint="begin with index 1")
    for number, name in enumerate(names):
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise SpecError(f"{name!r} is not a name for an environment variable", field=f"{where}.{number}.name")
        if number and (name.startswith("CLOUDTRAIN_") or name in names[:number]):
            raise SpecError(f"{name} is set already", field=f"{where}.{number}.name")
