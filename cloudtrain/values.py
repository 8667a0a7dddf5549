"""Plain values, checked: each function returns what it was given, made right, or raises `SpecError`."""

from __future__ import annotations

import contextlib
import difflib
import json
import math
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta, timezone
from pathlib import PurePosixPath
from typing import Any

from .errors import SpecError, StorageError, scrubbed

__all__ = [
    "BRIEF",
    "METADATA",
    "brief",
    "checked_run",
    "choice_of",
    "duration",
    "family",
    "is_price",
    "json_loads",
    "json_rows",
    "json_value",
    "merge_metrics",
    "nearest",
    "newer_than_metadata",
    "parse_duration",
    "sequence_of",
    "step_of",
    "table_of",
    "text_of",
    "texts_of",
    "toml_loads",
    "training_states",
    "unix_seconds",
    "unversioned",
    "url_scheme",
    "whole_number",
    "without_secrets",
]

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):(?!\\)")
BRIEF = 300
_LONGEST = 100 * 366 * 86400
_DURATION = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?")


def nearest(word: str, choices: Iterable[str]) -> str:
    """`` (did you mean 'x'?)`` for the valid choice closest to ``word``, or the empty string when none is close."""
    close = difflib.get_close_matches(word, list(choices), n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""


def brief(value: Any) -> str:
    """``repr`` of a value in a message, cut where nobody would read on: `BRIEF` characters."""
    text = repr(value)
    return text if len(text) <= BRIEF else f"{text[: BRIEF - 1]}…"


def without_secrets(url: str) -> str:
    """``url`` without a query, which may be a signature, and without a user's name and password."""
    plain = scrubbed(url).partition("?")[0].replace("://***@", "://")  # a key of AWS may have slashes
    return re.sub(r"(?<=://)[^/@]*:[^/@]*@", "", plain)


def url_scheme(url: str) -> str:
    """The scheme of ``url`` in lower case (``s3``, ``abfs``, ``file``); a plain path (``C:\\x`` too) is ``""``."""
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
        or (isinstance(value, float) and not (math.isfinite(value) and value.is_integer()))
    ):
        raise SpecError(f"{value!r} is not a whole number of seconds, nor text like '12h'", field=field)
    if value <= 0:
        raise SpecError(f"must be above zero, not {value!r}", field=field)
    if value > _LONGEST:
        raise SpecError("must be at most 100 years", field=field)
    return int(value)


def duration(seconds: float) -> str:
    """Seconds as a Job reads them: ``45s``, ``1h30m``, ``24h``; the two largest units, days only from the third."""
    left = max(0, round(seconds))
    units = (("d", 86400), ("h", 3600), ("m", 60), ("s", 1))[0 if left >= 3 * 86400 else 1 :]
    words = []
    for name, length in units:
        if left >= length:
            words.append(f"{left // length}{name}")
            left %= length
    return "".join(words[:2]) or "0s"


def toml_loads(text: str, *, where: str) -> dict[str, Any]:
    """Parsed TOML; `SpecError` naming ``where``, line and column when it is not."""
    if sys.version_info >= (3, 11):
        import tomllib  # novm
    else:
        import tomli as tomllib
    try:
        data: dict[str, Any] = tomllib.loads(text)
        return data
    except ValueError as exc:  # a number of thousands of digits is one too
        raise SpecError(f"not TOML: {exc}", field=where) from None
    except RecursionError:
        raise SpecError("not TOML that anybody wrote: nested too deeply", field=where) from None


def json_loads(data: bytes) -> Any:
    """Parsed JSON; `ValueError` for whatever is none, however it is not."""
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("nested too deeply") from None


_RUN_RECORD: dict[str, tuple[type, ...]] = {"created": (int, float)}
_RUN_RECORD |= dict.fromkeys(("settings", "job", "layout", "code"), (dict,))
_RUN_RECORD |= dict.fromkeys(("run_id", "run", "provider", "job_digest", "runtime", "version"), (str,))
"""Types of what a run.json has at the top."""


def checked_run(record: dict[str, Any], needed: Iterable[str], where: str) -> dict[str, Any]:
    """``record``, a run.json that has all that is ``needed``. Raises `StorageError`: the file ``where`` is damaged."""
    lacks = next((f"it has no {name}" for name in needed if name not in record), "")
    wrong = (name for name, kinds in _RUN_RECORD.items() if name in record and type(record[name]) not in kinds)
    if why := lacks or next((f"its {name} is a {type(record[name]).__name__}" for name in wrong), ""):
        raise StorageError(f"{where} is damaged: {why}")
    return record


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


def is_price(value: Any) -> bool:
    """Whether it is US dollars an hour: above zero, and less than 10^12, as no machine costs that."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < 1e12


def sequence_of(value: Any) -> Any:
    """A lone text as a list of one, as is whatever else is no list: who reads the items says what is wrong."""
    return value if isinstance(value, Iterable) and not isinstance(value, (str, Mapping)) else [value]


def unix_seconds(moment: datetime | str | float) -> float:
    """Unix seconds of a moment: a number of them, or a time or ISO text, in UTC unless it says otherwise."""
    if isinstance(moment, str):  # before Python 3.11 neither Z nor nanoseconds are part of that
        text = re.sub(r"\.(\d+)", lambda match: f".{match[1]:0<6.6}", moment.strip().replace("Z", "+00:00"))
        moment = datetime.fromisoformat(text)
    if isinstance(moment, datetime):
        return (moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)).timestamp()
    return float(moment)


# --------------------------------------------------------------------------------------------------------- checkpoints

_BESIDE = frozenset(
    [
        ".json",
        ".jsonl",
        ".txt",
        ".md",
        ".rst",
        ".yaml",
        ".yml",
        ".toml",
        ".ini",
        ".cfg",
        ".csv",
        ".tsv",
        ".log",
        ".py",
        ".sh",
        ".html",
        ".png",
        ".jpg",
        ".jpeg",
        ".gif",
        ".svg",
        ".pdf",
        ".mp4",
        ".wav",
    ]
)
"""Suffixes of what scripts write beside their checkpoints: settings, logs, pictures, programs."""
_STEP = re.compile(r"(?:step|iter|iteration|checkpoint|ckpt)[-_=]*(\d+)", re.IGNORECASE)
_VERSION = re.compile(r"[-_.]?(?<![a-z0-9])v\d+", re.IGNORECASE)
_NO_STEP = re.compile(r"(?<![a-z0-9])v\d+|epochs?[-_=]*\d+", re.IGNORECASE)


METADATA = ".metadata"
"""What ``torch.distributed.checkpoint`` writes last."""


def newer_than_metadata(times: Mapping[str, float]) -> str:
    """The file of a checkpoint, of paths and when each changed, that was written after its `METADATA`; else empty.

    There is one while a checkpoint is written over: the old ``.metadata`` stays until the new one comes.
    """
    last = max(times, key=lambda path: times[path])
    return last if times[last] > times[METADATA] else ""


def family(name: str) -> str:
    """``name`` with its numbers left out: that of every checkpoint, or file, that a script writes in the same place."""
    return re.sub(r"\d+", "#", name)


def unversioned(name: str) -> str:
    """``name`` with its version left out: ``last.ckpt`` of ``last-v1.ckpt``, which is written beside an older one."""
    return _VERSION.sub("", name)


def step_of(name: str) -> int | None:
    """The step that a checkpoint's name tells: the number after step, iter or checkpoint, else the last one.

    That of an epoch is none, nor is a version (``last-v1.ckpt``).
    """
    found = _STEP.findall(name) or re.findall(r"\d+", _NO_STEP.sub("", name))
    return int(found[-1]) if found else None


def training_states(entries: Mapping[str, tuple[str, Sequence[str]]]) -> set[str]:
    """Which of ``entries`` (key to name, and paths below it: one empty path for a file) a training can go on from.

    Trainers leave more in the folder of their checkpoints: HF's has the final model and the settings beside
    ``checkpoint-500/``, DeepSpeed's a script. So, of the first of these kinds that there is: numbered folders, and
    other folders that share a file with them (``last.ckpt/``); numbered files, and others of the same suffix
    (``last.ckpt``); whatever is no text, log or picture; everything.
    """
    states = {key: item for key, item in entries.items() if not all(map(_beside, _files_of(*item)))} or dict(entries)
    folders = {key for key, (_, paths) in states.items() if list(paths) != [""]}
    files = states.keys() - folders
    if numbered := {key for key in folders if re.search(r"\d", states[key][0])}:
        known = {family(path) for key in numbered for path in states[key][1] if not _beside(path)}
        return numbered | {key for key in folders if known & {family(path) for path in states[key][1]}}
    if numbered := {key for key in files if re.search(r"\d", unversioned(states[key][0]))}:
        suffixes = {PurePosixPath(states[key][0]).suffix for key in numbered}
        return {key for key in files if PurePosixPath(states[key][0]).suffix in suffixes}
    return set(states)


def _files_of(name: str, paths: Sequence[str]) -> list[str]:
    return [path or name for path in paths]


def _beside(path: str) -> bool:
    return PurePosixPath(path).suffix.lower() in _BESIDE or "tfevents" in path


def merge_metrics(attempts: Iterable[Iterable[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """The rows of all attempts, given oldest first, as one history.

    An attempt replaces the earlier rows from its own first step on; rows without a step stay where they are.
    """
    merged: list[dict[str, Any]] = []
    for attempt in attempts:
        rows = [dict(row) for row in attempt]
        steps = [step for row in rows if (step := _step(row)) is not None]
        first = min(steps, default=float("inf"))
        merged = [row for row in merged if (step := _step(row)) is None or step < first] + rows
    return merged


def _step(row: Mapping[str, Any]) -> float | None:
    step = row.get("step")
    return step if isinstance(step, (int, float)) and not isinstance(step, bool) else None


def json_rows(data: bytes) -> list[dict[str, Any]]:
    """The JSON objects of JSON Lines; a line that is none (the last of a killed process) is left out."""
    rows: list[dict[str, Any]] = []
    for line in data.splitlines():
        with contextlib.suppress(ValueError):
            row = json.loads(line)
            if isinstance(row, dict):
                rows.append(row)
    return rows
