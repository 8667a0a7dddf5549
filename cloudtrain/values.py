"""Plain values, checked: each function returns what it was given, made right, or raises `SpecError`."""

from __future__ import annotations

import difflib
import math
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

from .errors import SpecError

__all__ = [
    "choice_of",
    "json_value",
    "nearest",
    "parse_duration",
    "sequence_of",
    "table_of",
    "text_of",
    "texts_of",
    "toml_loads",
    "url_scheme",
    "whole_number",
]

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):(?!\\)")
_DURATION = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?")


def nearest(word: str, choices: Iterable[str]) -> str:
    """`` (did you mean 'x'?)`` for the valid choice closest to ``word``, or the empty string when none is close."""
    close = difflib.get_close_matches(word, list(choices), n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""


def url_scheme(url: str) -> str:
    """The scheme of ``url`` in lower case (``s3``, ``azureml``, ``file``); a plain path (``C:\\x`` too) is ``""``."""
    match = _SCHEME.match(url)
    return match[1].lower() if match and len(match[1]) > 1 else ""


def parse_duration(value: Any, *, field: str) -> int:
    """Seconds of ``90``, ``"90s"``, ``"1h30m"``, ``"2d"`` or a timedelta; whole and above zero, else `SpecError`."""
    if isinstance(value, timedelta):
        value = value.total_seconds()
    if isinstance(value, str):
        match = _DURATION.fullmatch(value.strip().lower())
        if value.strip().isdigit():
            value = int(value)
        elif match and any(match.groups()):
            value = sum(int(n or 0) * unit for n, unit in zip(match.groups(), (86400, 3600, 60, 1), strict=True))
        else:
            raise SpecError(f"{value!r} is not a duration; write '90s', '45m', '12h', '2d' or '1h30m'", field=field)
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not math.isfinite(value)
        or value != int(value)
    ):
        raise SpecError(f"{value!r} is not a whole number of seconds, nor text like '12h'", field=field)
    if value <= 0:
        raise SpecError(f"must be above zero, not {value!r}", field=field)
    return int(value)


def toml_loads(text: str, *, where: str) -> dict[str, Any]:
    """Parsed TOML; `SpecError` naming ``where``, line and column when it is not."""
    if sys.version_info >= (3, 11):
        import tomllib  # novm
    else:
        import tomli as tomllib
    try:
        data: dict[str, Any] = tomllib.loads(text)
        return data
    except tomllib.TOMLDecodeError as exc:
        raise SpecError(f"not TOML: {exc}", field=where) from None


def text_of(value: Any, where: str, *, empty: bool = False) -> str:
    """UTF-8 text without NUL; not empty unless ``empty``."""
    if not isinstance(value, str):
        raise SpecError(f"must be text, not {type(value).__name__}", field=where)
    if not value and not empty:
        raise SpecError("must not be empty", field=where)
    if "\0" in value:
        raise SpecError("holds a NUL character, which no process argument or variable can carry", field=where)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise SpecError("is not valid UTF-8 text", field=where) from None
    return value


def texts_of(value: Any, where: str, *, empty: bool = False) -> tuple[str, ...]:
    """A list of texts, as a tuple."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise SpecError(f"must be a list of texts, not {type(value).__name__}", field=where)
    return tuple(text_of(item, f"{where}[{i}]", empty=empty) for i, item in enumerate(value))


def whole_number(value: Any, where: str, *, least: int, most: int | None = None) -> int:
    """An int of at least ``least``, at most ``most``."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise SpecError(f"must be a whole number, not {value!r}", field=where)
    if value < least or (most is not None and value > most):
        raise SpecError(
            f"must be {least} or more" + (f", at most {most}" if most else "") + f", not {value}", field=where
        )
    return value


def choice_of(value: Any, choices: tuple[str, ...], where: str) -> str:
    """One of ``choices``; the nearest is named when it is none."""
    if value not in choices:
        raise SpecError(f"{value!r} is none of {', '.join(choices)}{nearest(str(value), choices)}", field=where)
    return str(value)


def table_of(value: Any, where: str) -> dict[str, Any]:
    """A table with text keys, as a dict."""
    if not isinstance(value, Mapping):
        raise SpecError(f"must be a table of names and values, not {type(value).__name__}", field=where)
    for key in value:
        text_of(key, f"{where} key")
    return dict(value)


def json_value(value: Any, where: str) -> Any:
    """A deep plain copy of ``value``, which must be JSON (no NaN, text keys only)."""
    if isinstance(value, Mapping):
        return {text_of(k, where, empty=True): json_value(v, f"{where}.{k}") for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_value(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        raise SpecError(f"{value!r} has no place in JSON", field=where)
    if value is None or isinstance(value, (str, int, float, bool)):
        return text_of(value, where, empty=True) if isinstance(value, str) else value
    raise SpecError(f"{type(value).__name__} has no place in JSON", field=where)


def sequence_of(value: Any) -> Sequence[Any]:
    """A lone text as a list of one."""
    return [value] if isinstance(value, str) else value
