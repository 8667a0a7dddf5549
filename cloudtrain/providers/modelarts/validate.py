"""Check the body of a training job before it is sent, with no SDK.

`fields.json` holds the models of Huawei's SDK that a body can reach (``tools/modelarts_tables.py``). The limits are
those of Huawei's page on creating a training job.
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
from .node import SECRETS

__all__ = ["DESCRIPTION", "check_body", "problems"]

DESCRIPTION, VARIABLES, LONGEST_VALUE = 256, 100, 4096
"""Most characters of a description, most variables of a job, and most characters of each."""
_KINDS: Mapping[str, tuple[type[Any] | tuple[type[Any], ...], str]] = {
    "str": (str, "text"),
    "int": (int, "a whole number"),
    "float": ((int, float), "a number"),
    "bool": (bool, "true or false"),
}
_LIST, _MAP = re.compile(r"list\[(.+)\]"), re.compile(r"dict\(str, (.+)\)")


@cache
def _models() -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = json.loads(Path(__file__).with_name("fields.json").read_bytes())["models"]
    return found


def check_body(body: Mapping[str, Any]) -> None:
    """Raise `SpecError`, named by its place in ``options``, for values that ModelArts refuses. Only `options` can be
    wrong."""
    where = f"options.{NAME}"
    for place, why, hint in problems(body):
        raise SpecError(why, field=f"{where}.{place}".rstrip("."), hint=hint)
    variables = body["algorithm"].get("environments") or {}
    if len(variables) > VARIABLES:
        hint = "use the job's own env, which has no such limit"
        raise SpecError(f"has {len(variables)} entries, at most {VARIABLES}", field=f"{where}.algorithm", hint=hint)
    for name, value in variables.items():
        if name.startswith("CLOUDTRAIN_") and (name != SECRETS or value):
            raise SpecError("cloudtrain itself sets such names", field=f"{where}.algorithm.environments.{name}")
        field = f"{where}.algorithm.environments.{name}"
        if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII) or name.startswith(("MA_", "VC_")):
            raise SpecError("is not a name that a job may set", field=field)
        if len(value) > LONGEST_VALUE or "$" in value:
            why = f"has more than {LONGEST_VALUE} characters, or a $, which ModelArts refuses"
            raise SpecError(why, field=field, hint="use the job's own env, which has no such limit")


def problems(value: Any, kind: str = "Job", place: str = "") -> list[tuple[str, str, str]]:
    """Return (place, reason, hint) of each part of ``value`` that is not as the SDK's model ``kind`` has it."""
    if match := _LIST.fullmatch(kind):
        if not isinstance(value, list):
            return [(place, f"must be a list, not {value!r}", "")]
        return [row for number, item in enumerate(value) for row in problems(item, match[1], f"{place}.{number}")]
    if match := _MAP.fullmatch(kind):
        if not isinstance(value, Mapping):
            return [(place, f"must be a table, not {value!r}", "")]
        return [row for key, item in value.items() for row in problems(item, match[1], f"{place}.{key}".lstrip("."))]
    if kind in _KINDS:
        types, word = _KINDS[kind]
        fits = isinstance(value, types) and not (isinstance(value, bool) and kind in ("int", "float"))
        return [] if fits else [(place, f"must be {word}, not {value!r}", "")]
    known = _models().get(kind)
    if known is None:  # any JSON
        return []
    if not isinstance(value, Mapping):
        return [(place, f"must be a table, not {value!r}", "")]
    found = []
    for key, item in value.items():
        there = f"{place}.{key}".lstrip(".")
        if key in known:
            found += problems(item, known[key], there)
        else:
            found.append((there, f"no such field of a {kind}", did_you_mean(key, known)))
    return found
