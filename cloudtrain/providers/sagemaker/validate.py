"""Check a CreateTrainingJob request before it is sent, with no SDK.

`limits.json` holds the limits of botocore's model (``tools/sagemaker_tables.py``). botocore itself does not check
patterns, maxima and choices. The model has no rules that span fields.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ...errors import SpecError
from ...validate import did_you_mean
from . import NAME

__all__ = ["Broken", "broken", "check_body", "field_at", "limits", "translated"]

#: Choices that a newer service may extend, so others are not refused.
OPEN = frozenset({"TrainingInstanceType", "InstanceType"})
#: Java's classes of characters that Python's ``re`` lacks, inside brackets. ``\\w`` holds letters, numbers and the
#: underscore. Wherever the model uses these classes, the underscore is allowed too.
_CLASSES = {
    r"\p{L}": r"\w",
    r"\p{N}": "",
    r"\p{Z}": " \u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000",
    r"\p{Alnum}": "A-Za-z0-9",
}
_KINDS: Mapping[str, tuple[type[Any], ...]] = {
    **dict.fromkeys(("structure", "map"), (Mapping,)),
    **dict.fromkeys(("integer", "long"), (int,)),
    **dict.fromkeys(("float", "double"), (int, float)),
    "list": (list,),
    "string": (str,),
    "boolean": (bool,),
    "timestamp": (str, int, float),
}
_WORDS = {"structure": "a table", "map": "a table", "list": "a list", "string": "text", "boolean": "true or false"}


@dataclass(frozen=True, kw_only=True)
class Broken:
    """A limit that the value at ``path`` breaks, and the nearest legal value."""

    path: tuple[str, ...]
    message: str
    hint: str = ""


def field_at(fields: Mapping[str, str], path: Sequence[str]) -> str:
    """Return the user's field of the part of a request at ``path``, or of the nearest part above it; empty for none."""
    above = (".".join(path[:length]) for length in range(len(path), 0, -1))
    return next((fields[name] for name in above if name in fields), "")


def _option_at(options: Any, path: Sequence[str]) -> tuple[str, ...] | None:
    """Return the part of ``path`` that the user's options name, None if they do not reach it."""
    if not path or not isinstance(options, Mapping):
        return ()
    for key in (path[0], "*") if path[0].isdigit() else (path[0],):
        if key in options and (rest := _option_at(options[key], path[1:])) is not None:
            return (key, *rest)
    return None


@cache
def limits() -> dict[str, Any]:
    """Return the table."""
    table: dict[str, Any] = json.loads((Path(__file__).parent / "limits.json").read_bytes())
    return table


def check_body(body: Mapping[str, Any], fields: Mapping[str, str], options: Mapping[str, Any]) -> None:
    """Raise `SpecError` for the first limit that ``body`` breaks.

    The error's field comes from the user's own ``options``, else from ``fields``, a map from parts of a request (dotted
    paths) to the user's fields.
    """
    for item in broken(body):
        option = _option_at(options, item.path)
        field = field_at(fields, item.path) if option is None else _dotted(("options", NAME, *option))
        why = f"{item.message} ({_dotted(item.path)} of the request)"
        raise SpecError(why, field=field or "options", hint=item.hint)


def _dotted(path: Sequence[str]) -> str:
    """Return a path in one line: a user's key may hold any character."""
    return ".".join(key if key.isprintable() else repr(key)[1:-1] for key in path)


def broken(body: Mapping[str, Any]) -> Iterator[Broken]:
    """Yield every limit of the model that ``body`` breaks."""
    table = limits()
    yield from _walk(table["shapes"], table["input"], body, ())


def _walk(shapes: Mapping[str, Any], name: str, value: Any, path: tuple[str, ...]) -> Iterator[Broken]:
    shape = shapes[name]
    kind = shape["type"]
    if not isinstance(value, _KINDS[kind]) or (isinstance(value, bool) and kind != "boolean"):
        yield Broken(path=path, message=f"must be {_WORDS.get(kind, 'a number')}, not {value!r}")
        return
    yield from _size(shape, value, path)
    if kind == "structure":
        for missing in (key for key in shape["required"] if key not in value):
            yield Broken(path=(*path, missing), message="is missing")
        for key, item in value.items():
            if key not in shape["members"]:
                near = did_you_mean(key, shape["members"])
                yield Broken(path=(*path, key), message="no such field", hint=near)
            else:
                yield from _walk(shapes, shape["members"][key], item, (*path, key))
    elif kind == "list":
        for number, item in enumerate(value):
            yield from _walk(shapes, shape["member"], item, (*path, str(number)))
    elif kind == "map":
        for key, item in value.items():
            yield from _walk(shapes, shape["key"], key, (*path, key))
            yield from _walk(shapes, shape["value"], item, (*path, key))
    elif kind == "string":
        yield from _text(name, shape, value, path)


def _size(shape: Mapping[str, Any], value: Any, path: tuple[str, ...]) -> Iterator[Broken]:
    what = {"string": "characters", "list": "entries", "map": "entries"}.get(shape["type"], "")
    size = len(value) if what else value
    problem = f"has {size} {what}" if what else f"is {size}"
    if "max" in shape and size > shape["max"]:
        yield Broken(path=path, message=f"{problem}, at most {shape['max']}")
    if "min" in shape and size < shape["min"]:
        yield Broken(path=path, message=f"{problem}, at least {shape['min']}")


def _text(name: str, shape: Mapping[str, Any], value: str, path: tuple[str, ...]) -> Iterator[Broken]:
    if "enum" in shape and value not in shape["enum"] and name not in OPEN:
        near = did_you_mean(value, shape["enum"])
        yield Broken(path=path, message=f"{value!r} is none of {', '.join(shape['enum'])}", hint=near)
    if "pattern" in shape and not translated(shape["pattern"]).fullmatch(value):
        shown = value if len(value) <= 80 else value[:77] + "..."
        yield Broken(path=path, message=f"{shown!r} does not match {shape['pattern']}")


@cache
def translated(pattern: str) -> re.Pattern[str]:
    """Return a pattern of the model, which is Java's, as Python's."""
    for java, python in _CLASSES.items():
        pattern = pattern.replace(java, python)
    return re.compile(pattern)
