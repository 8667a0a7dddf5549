"""Check a CreateTrainingJob request before it is sent, with no SDK.

`limits.json` holds the limits of botocore's model (``tools/sagemaker_tables.py``). botocore itself does not check
patterns, maxima and choices. The model has no rules that span fields.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any

from ...errors import SpecError
from .._cloud import problems, table_in
from . import NAME

limits = partial(table_in, __file__, "limits.json")
"""Return the table."""
_OPEN = "TrainingInstanceType"
"""Choices that a newer service may extend, so others are not refused."""
#: Java's classes of characters that Python's ``re`` lacks, inside brackets. ``\\w`` holds letters, numbers and the
#: underscore. Wherever the model uses these classes, the underscore is allowed too.
_CLASSES = {
    r"\p{L}": r"\w",
    r"\p{N}": "",
    r"\p{Z}": " \u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000",
    r"\p{Alnum}": "A-Za-z0-9",
}


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


def check_body(body: Mapping[str, Any], fields: Mapping[str, str], options: Mapping[str, Any]) -> None:
    """Raise `SpecError` for the first limit that ``body`` breaks.

    The error's field comes from the user's own ``options``, else from ``fields``, a map from parts of a request (dotted
    paths) to the user's fields.
    """
    for path, why, hint in broken(body):
        option = _option_at(options, path)
        field = field_at(fields, path) if option is None else _dotted(("options", NAME, *option))
        raise SpecError(f"{why} ({_dotted(path)} of the request)", field=field or "options", hint=hint)


def _dotted(path: Sequence[str]) -> str:
    """Return a path in one line: a user's key may hold any character."""
    return ".".join(key if key.isprintable() else repr(key)[1:-1] for key in path)


def broken(body: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], str, str]]:
    """Yield (path, reason, hint) of every limit of the model that ``body`` breaks."""
    yield from problems(_shapes(), limits()["input"], body)


@cache
def _shapes() -> dict[str, Any]:
    """Return the model's shapes as `problems` reads them."""
    found = {
        name: {**shape, "python": translated(shape["pattern"])} if "pattern" in shape else shape
        for name, shape in limits()["shapes"].items()
    }
    return {**found, _OPEN: {"type": "string"}}


def translated(pattern: str) -> re.Pattern[str]:
    """Return a pattern of the model, which is Java's, as Python's."""
    for java, python in _CLASSES.items():
        pattern = pattern.replace(java, python)
    return re.compile(pattern)
