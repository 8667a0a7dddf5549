"""Check plain values: each function returns its argument, normalised, or raises `SpecError`."""

from __future__ import annotations

import contextlib
import json
import math
import numbers
import operator
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any, TypeGuard, TypeVar

from .errors import NotFoundError, SpecError, StorageError, scrubbed

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):(?!\\)")
T = TypeVar("T")
TEST_TIMINGS = "CLOUDTRAIN_TEST_TIMINGS"
"""Variable with which cloudtrain's own tests shorten waits: ``node.silence=12,client.lease_pauses=0.1/0.2``."""
BRIEF = 300
_LONGEST = 100 * 366 * 86400
_FILE_SUFFIX = re.compile(r"\.[A-Za-z][A-Za-z0-9]{0,11}$")
_SIZE = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,9})?) ?(B|kB|KB|MB|GB|TB)?")
_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_DURATION = re.compile("".join(f"(?:([0-9]{{1,12}}){unit})?" for unit in "dhms"))
URL_FORMS = {
    **dict.fromkeys(("s3", "gs", "obs"), "SCHEME://BUCKET/PATH"),
    **dict.fromkeys(("abfs", "abfss", "az"), "abfs://CONTAINER@ACCOUNT.dfs.core.windows.net/PATH"),
    **dict.fromkeys(("http", "https", "ftp", "sftp"), "SCHEME://HOST/PATH"),
}
"""The form of a URL with this scheme."""
DEEPEST = 64
_BIGGEST = 10**300
"""Numbers beyond this are not portable in JSON: other readers use doubles."""


def similar(word: str, choices: Iterable[str], *, short_forms: bool = True, most: int = 3) -> str:
    """Return the choice that ``word``, with at most ``most`` slips, may be a misspelling of, or the empty string."""
    choices, most = list(choices), min(most, max(1, len(word) // 3))

    def ranked(fitting: Iterable[str]) -> list[tuple[int, bool, str]]:
        return [(_slips(word.lower(), choice.lower()), word[:2] != choice[:2], choice) for choice in fitting]

    near = ranked(choice for choice in choices if abs(len(choice) - len(word)) <= most)  # each letter more is a slip
    near = [item for item in near if item[0] <= most and 2 * item[0] < len(word)]
    short = [choice for choice in choices if short_forms and _is_short_for(word.lower(), choice.lower())]
    return min(near or ranked(short), default=("",))[-1]


def respelt(name: str, names: Iterable[str], *, least: int) -> str:
    """Return ``name`` with each misspelt word of ``names`` corrected (``eu-wset-9``: ``eu-west-9``).

    A word is a run of at least ``least`` letters. Numbers and new words stay, so a new name stays as it is.
    """
    words = {word for known in names for word in re.findall(rf"[a-z]{{{least},}}", known.lower())}

    def put_right(match: re.Match[str]) -> str:
        word = match[0].lower()
        right = "" if word in words else similar(word, words, short_forms=False)
        return (right.capitalize() if match[0][0].isupper() else right) or match[0]

    return re.sub(rf"[A-Za-z]{{{least},}}", put_right, name)


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """Return the hint ``did you mean 'x'?`` for a name that is not one of ``choices``; empty when none is `similar`."""
    found = similar(word, (choice for choice in choices if choice != word))
    return f"did you mean {found!r}?" if found else ""


def near_or_all(word: str, choices: Iterable[str]) -> str:
    """Return the hint `did_you_mean`; if no choice is similar, a hint with all of them."""
    choices = list(choices)
    return did_you_mean(word, choices) or f"valid values: {', '.join(filter(None, choices))}"


def _is_short_for(one: str, other: str) -> bool:
    """Return whether the shorter word is the longer one with letters left out after the first three."""
    short, long = sorted((one, other), key=len)
    rest = iter(long)
    return len(short) > 2 and short[:3] == long[:3] and all(letter in rest for letter in short)


def _slips(one: str, other: str) -> int:
    """Return the number of slips between two words: Damerau's distance, with neighbours swapped at most once."""
    before: list[int] = []
    row = list(range(len(other) + 1))
    for i, left in enumerate(one):
        older, before, row = before, row, [i + 1]
        for j, right in enumerate(other):
            row.append(min(before[j] + (left != right), before[j + 1] + 1, row[j] + 1))
            if i and j and left == other[j - 1] and one[i - 1] == right:
                row[-1] = min(row[-1], older[j - 1] + 1)
    return row[-1]


def brief(value: Any) -> str:
    """Return ``repr`` of a value for a message, cut to `BRIEF` characters."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an int of thousands of digits, or a list in a list in a list…
        return f"a very long {type(value).__name__}"
    return text if len(text) <= BRIEF else f"{text[: BRIEF - 1]}…"


def without_secrets(url: str) -> str:
    """Return ``url`` without a query, which may be a signature, and without a user's name and password."""
    plain = scrubbed(url).partition("?")[0].replace("://***@", "://")  # an AWS key may have slashes
    return re.sub(r"(?<=://)[^/@]*:[^/@]*@", "", plain)


def url_scheme(url: str) -> str:
    """Return the scheme of ``url`` in lower case (``s3``, ``abfs``, ``file``); a plain path (``C:\\x``) has none."""
    match = _SCHEME.match(url)
    return match[1].lower() if match and len(match[1]) > 1 else ""


def check_listable(url: str, where: str) -> None:
    """Raise `SpecError` with the field ``where`` for a folder of a web server."""
    if file_of_url(url) is None and url_scheme(url) in ("http", "https"):
        why = f"{url} names no file, and HTTP cannot list a folder"
        raise SpecError(why, field=where, hint="give the URL of one file")


def file_of_url(url: str) -> str | None:
    """Return the file's name if ``url`` is remote and ends in a suffix like ``.csv.gz``, not in ``/``; else None."""
    if "://" not in url or url.endswith("/") or url_scheme(url) == "":
        return None
    bucket, slash, path = url.split("://", 1)[1].partition("/")
    name = path.partition("?")[0].rsplit("/", 1)[-1]
    return name if slash and bucket and _FILE_SUFFIX.search(name) else None


def parse_duration(value: Any, *, field: str) -> int:
    """Return the seconds of ``90``, ``"90s"``, ``"1h30m"``, ``"2d"`` or a timedelta; above zero, else `SpecError`."""
    if isinstance(value, timedelta):
        value = value.total_seconds()
    if isinstance(value, str):
        match = _DURATION.fullmatch(value.strip().lower())
        if re.fullmatch("[0-9]{1,12}", value.strip()):
            value = int(value)
        elif match and any(match.groups()):
            value = sum(int(n or 0) * unit for n, unit in zip(match.groups(), (86400, 3600, 60, 1), strict=True))
        else:
            why = f"{brief(value)} is not a duration; write '90s', '45m', '12h', '2d' or '1h30m'"
            raise SpecError(why, field=field)
    if not is_number(value) or value % 1 != 0:  # also for infinity and NaN
        raise SpecError(f"{brief(value)} is not a whole number of seconds, nor text like '12h'", field=field)
    if value <= 0:
        raise SpecError(f"must be above zero, not {brief(value)}", field=field)
    if value > _LONGEST:
        raise SpecError("must be at most 100 years", field=field)
    return int(value)


def parse_seconds(value: Any, *, field: str) -> float:
    """Return the seconds of a number or timedelta, also with a fraction, or of a `parse_duration`'s text.

    A number below zero is zero: the rest of a time that is over. At most 100 years. Raises `SpecError`.
    """
    value = value.total_seconds() if isinstance(value, timedelta) else value
    if is_number(value) and value == value:  # not NaN
        return float(min(max(0, value), _LONGEST))
    return float(parse_duration(value, field=field))


def parse_since(value: Any, now: float, *, field: str) -> float:
    """Return Unix seconds of a moment: a duration before ``now`` (``"10m"``, a timedelta), or a time.

    A time is a datetime or ISO 8601 text; without a zone it is UTC. Raises `SpecError`.
    """
    if isinstance(value, timedelta) or (isinstance(value, str) and re.match(r"(\d+[dhms]?)+$", value.strip(), re.I)):
        return now - parse_duration(value, field=field)
    with contextlib.suppress(ValueError, OverflowError):
        if isinstance(value, (datetime, str)):
            return unix_seconds(value)
    hint = "write how long ago ('10m', '2h30m', '1d') or a time ('2026-11-24T03:00:00Z')"
    raise SpecError(f"{brief(value)} is neither a duration nor a time", field=field, hint=hint)


def parse_size(value: Any, *, field: str) -> int:
    """Return bytes of ``2000000``, ``"500MB"`` or ``"1.5 TB"``; a GB has 10^9 bytes. Raises `SpecError`."""
    match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    if match:
        value = round(float(match[1]) * _UNITS[(match[2] or "B").upper()])
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 10**15:
        raise SpecError(f"{brief(value)} is not a size", field=field, hint="write '500MB', '10GB' or '1.5TB'")
    return value


def duration(seconds: float) -> str:
    """Return seconds as a Job reads them: ``45s``, ``1h30m``, ``24h``; the two largest units, days from three on."""
    left = max(0, round(seconds))
    units = (("d", 86400), ("h", 3600), ("m", 60), ("s", 1))[0 if left >= 3 * 86400 else 1 :]
    words = []
    for name, length in units:
        if left >= length:
            words.append(f"{left // length}{name}")
            left %= length
    return "".join(words[:2]) or "0s"


def timings_of(kind: Callable[..., T], half: str, text: str) -> T:
    """Return the ``kind`` of waits with those of ``half`` in ``text``. Raises `TypeError`, `ValueError`."""
    pairs = [pair.replace("=", ".", 1).split(".", 2) for pair in text.split(",") if pair]
    return kind(
        **{
            name: tuple(float(each) for each in value.split("/") if each) if "/" in value else float(value)
            for where, name, value in pairs
            if where == half
        }
    )


def toml_loads(text: str, *, where: str) -> dict[str, Any]:
    """Parse TOML. Raises `SpecError` with ``where``, line and column."""
    if sys.version_info >= (3, 11):
        import tomllib  # novm
    else:
        import tomli as tomllib
    try:
        data: dict[str, Any] = tomllib.loads(text)
        return data
    except ValueError as exc:  # includes a number of thousands of digits
        raise SpecError(f"not TOML: {exc}", field=where) from None
    except RecursionError:
        raise SpecError("not TOML: nested too deeply", field=where) from None


def json_loads(data: str | bytes) -> Any:
    """Parse JSON. Raises `ValueError` for any invalid input, also if nested too deeply."""
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def read_table(path: Path, *, shown: str, field: str) -> dict[str, Any]:
    """Return the table in a JSON file, by its suffix, or else in a TOML file; errors show the path as ``shown``.

    Raises `NotFoundError` with ``field``, `StorageError` if the file cannot be read, `SpecError` for its content.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        raise NotFoundError(f"no such file: {shown}", field=field) from None
    except UnicodeDecodeError:
        raise SpecError(f"{shown} is not UTF-8 text", field=field) from None
    except OSError as exc:
        raise StorageError(f"cannot read {shown}: {exc.strerror or exc}") from None
    if path.suffix != ".json":
        return toml_loads(text, where=shown)
    try:
        data = json_loads(text)
    except ValueError as exc:
        raise SpecError(f"not JSON: {exc}", field=shown) from None
    if not isinstance(data, dict):
        raise SpecError("must be a table", field=shown)
    return data


def json_or_text(text: Any) -> Any:
    """Return the value that a text has as JSON, or the text if it is not JSON, as NaN and Infinity are not."""

    def refuse(name: str) -> Any:
        raise ValueError(name)

    try:
        return json.loads(text, parse_constant=refuse) if isinstance(text, str) else text
    except (ValueError, RecursionError):
        return text


def text_of(value: Any, where: str, *, empty: bool = False) -> str:
    """Return UTF-8 text without NUL; not empty unless ``empty``."""
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
    """Return a list of texts as a tuple."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise SpecError(f"must be a list of texts, not {type(value).__name__}", field=where)
    return tuple(text_of(item, f"{where}[{i}]", empty=empty) for i, item in enumerate(value))


def whole_number(value: Any, where: str, *, least: int, most: int | None = None) -> int:
    """Return an int of at least ``least``, at most ``most``."""
    number: int | None = None
    if not isinstance(value, bool):
        with contextlib.suppress(TypeError):  # arrays and classes have __index__ too
            number = operator.index(value)
    if number is None:
        raise SpecError(f"must be a whole number, not {brief(value)}", field=where)
    if number < least or (most is not None and number > most):
        raise SpecError(
            f"must be {least} or more" + (f", at most {most}" if most is not None else "") + f", not {brief(value)}",
            field=where,
        )
    return number


def choice_of(value: Any, choices: tuple[str, ...], where: str) -> str:
    """Return one of ``choices``; the error for any other value names the nearest."""
    if value not in choices:
        hint = near_or_all(brief(value).strip("'"), choices)
        raise SpecError(f"{brief(value)} is not a valid value", field=where, hint=hint)
    return str(value)


def table_of(value: Any, where: str) -> dict[str, Any]:
    """Return a table with text keys as a dict."""
    if not isinstance(value, Mapping):
        raise SpecError(f"must be a table of names and values, not {type(value).__name__}", field=where)
    for key in value:
        text_of(key, f"{where} key")
    return dict(value)


def json_value(value: Any, where: str, *, depth: int = 0) -> Any:
    """Return a deep plain copy of ``value``, which must be JSON: no NaN, text keys, at most 64 tables or lists deep."""
    if depth > DEEPEST:
        raise SpecError(f"is nested more than {DEEPEST} levels deep", field=where[:BRIEF])
    if isinstance(value, Mapping):
        return {text_of(k, where, empty=True): json_value(v, f"{where}.{k}", depth=depth + 1) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_value(item, f"{where}[{i}]", depth=depth + 1) for i, item in enumerate(value)]
    value = plain_number(value)
    if isinstance(value, int) and abs(value) > _BIGGEST:
        raise SpecError("is a number of more than 300 digits, too long for JSON", field=where)
    if isinstance(value, float) and not math.isfinite(value):
        raise SpecError(f"{value!r} cannot be written as JSON", field=where)
    if value is None or isinstance(value, (str, int, float, bool)):
        return text_of(value, where, empty=True) if isinstance(value, str) else value
    hint = "take its plain value with .tolist()" if hasattr(value, "tolist") else ""
    raise SpecError(f"{type(value).__name__} cannot be written as JSON", field=where, hint=hint)


def is_number(value: Any) -> TypeGuard[float]:
    """Return whether it is a number, also one of NumPy: Python counts booleans as such."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def plain_number(value: Any) -> Any:
    """Return a number of NumPy as one of Python, and any other value unchanged."""
    if not is_number(value) or isinstance(value, (int, float)):
        return value
    return int(value) if isinstance(value, numbers.Integral) else float(value)


def check_functions(**given: Any) -> None:
    """Raise `SpecError` for an argument, by its name, that is neither a function nor None."""
    for name, value in given.items():
        if value is not None and not callable(value):
            raise SpecError(f"must be a function, not {brief(value)}", field=name)


def is_price(value: Any) -> bool:
    """Return whether it is US dollars an hour: above zero, and below 10^12, more than any machine costs."""
    return is_number(value) and 0 < value < 1e12


def sequence_of(value: Any) -> Any:
    """Return a list of one for a lone text or other non-list; the reader of the items rejects wrong ones."""
    return value if isinstance(value, Iterable) and not isinstance(value, (str, Mapping)) else [value]


def unix_seconds(moment: datetime | str | float) -> float:
    """Return Unix seconds of a moment: a number of them, or a time or ISO text, in UTC without a zone."""
    if isinstance(moment, str):  # before Python 3.11 fromisoformat takes neither Z nor nanoseconds
        text = re.sub(r"\.(\d+)", lambda match: f".{match[1]:0<6.6}", moment.strip().replace("Z", "+00:00"))
        moment = datetime.fromisoformat(text)
    if isinstance(moment, datetime):
        return (moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)).timestamp()
    return float(moment)
