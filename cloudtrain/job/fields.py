"""Kinds of a Job's fields. Each kind has the check of a value and the JSON Schema of the same values.

`Job` checks itself with them, `settings.schema` publishes them, and the command line makes a flag of each field.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from ..errors import SpecError
from ..validate import (
    brief,
    choice_of,
    is_number,
    json_value,
    parse_duration,
    parse_size,
    sequence_of,
    table_of,
    text_of,
    texts_of,
    whole_number,
)

MAX_ID = 40
"""Most characters of a run id and of a job's name."""
SECRET_SCHEMES = ("aws", "azure", "env", "gcp")

_ID = re.compile(r"[a-z0-9](-?[a-z0-9])*")
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_RESERVED = re.compile(
    r"(RANK|LOCAL_RANK|GROUP_RANK|ROLE_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|GROUP_WORLD_SIZE|MASTER_ADDR|MASTER_PORT"
    r"|PET_.*|TORCHELASTIC_.*|CLOUDTRAIN_.*)"
)
_METRIC = re.compile(r"(?! )[^=\x00-\x1f\x7f-\x9f]{1,100}(?<! )")
_WEBHOOK = r"(https?://[^\s/{}]+(/\S*)?|\{secrets\.[A-Za-z_][A-Za-z0-9_]*\})"
_UTIL = r"\s*([0-9]{1,3}(?:\.[0-9]{1,6})?)\s*%\s*for\s+(\S+)\s*"
_HEADER = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
"""A token of RFC 9110, section 5.6.2."""
_EXAMPLE = "loss ([0-9.]+)"

Schema = Mapping[str, Any]


class Kind(NamedTuple):
    """``check`` takes a value and its dotted field and returns the value, normalised, or raises `SpecError`."""

    check: Callable[[Any, str], Any]
    schema: Schema


def item(kind: Kind, help: str, default: Any = None) -> Any:
    """Return a dataclass field of ``kind``; a default of `dataclasses.MISSING` makes it required."""
    metadata = {"help": help, "kind": kind}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=dict, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def check_fields(instance: Any, prefix: str) -> None:
    """Check and normalise each field of a frozen dataclass that `item` made. A default of None stays None."""
    for spec in dataclasses.fields(instance):
        value = getattr(instance, spec.name)
        if "kind" in spec.metadata and (value is not None or spec.default is not None):
            checked = spec.metadata["kind"].check(value, prefix + spec.name)
            object.__setattr__(instance, spec.name, checked)


# ---------------------------------------------------------------------------------------------------- text and numbers


def is_slug(name: Any) -> bool:
    """Return whether ``name`` is lower-case letters, digits and single inner dashes, at most `MAX_ID` characters."""
    return isinstance(name, str) and len(name) <= MAX_ID and bool(_ID.fullmatch(name))


def slug(text: str) -> str:
    """Return the closest legal name to ``text``, or ``job`` if no character is legal."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:MAX_ID].rstrip("-") or "job"


def path_text(value: Any) -> Any:
    """Return a path as text, and any other value unchanged for the check of texts."""
    if not isinstance(value, os.PathLike):
        return value
    return str(value) if "://" in str(value) else os.fspath(value)  # fspath of a path in a cloud may download the file


def path_of(value: Any, where: str) -> Path:
    """Return a path. Raises `SpecError` with the field ``where`` if it is neither text nor a path."""
    return Path(text_of(path_text(value), where))


def _name(value: Any, where: str) -> Any:
    if not is_slug(value):
        why = f"{value!r} is not a name: lower-case letters, digits and single inner dashes, at most {MAX_ID}"
        raise SpecError(why, field=where, hint=f"call it {slug(str(value))!r}")
    return value


def _image(value: Any, where: str) -> str:
    if any(c.isspace() for c in text_of(value, where)) or value.startswith("-"):
        raise SpecError(f"{value!r} is not the name of an image", field=where)
    return str(value)


def _webhook(value: Any, where: str) -> str:
    if not re.fullmatch(_WEBHOOK, text_of(value, where)):
        how = "write https://HOST/PATH, or {secrets.NAME} for a URL that is a secret of the job"
        raise SpecError(f"{value!r} is not a URL to post to", field=where, hint=how)
    return str(value)


def _switch(value: Any, where: str) -> bool:
    if not isinstance(value, bool):
        raise SpecError(f"must be true or false, not {value!r}", field=where)
    return value


def _paths(value: Any, where: str) -> tuple[str, ...]:
    found = sequence_of(value)
    return texts_of([path_text(part) for part in found] if isinstance(found, (list, tuple)) else found, where)


def _globs(value: Any, where: str) -> tuple[str, ...]:
    globs = texts_of(sequence_of(value), where)
    for i, glob in enumerate(globs):
        if PurePosixPath(glob).is_absolute() or ".." in PurePosixPath(glob).parts:
            raise SpecError(f"{glob!r} leaves the working folder", field=f"{where}[{i}]")
    return globs


def _min_gpu_util(value: Any, where: str) -> str:
    """Return ``5% for 30m`` with single spaces."""
    match = re.fullmatch(_UTIL, text_of(value, where))
    percent = float(match[1]) if match else 0.0
    if match is None or not 0 < percent <= 100:
        raise SpecError(f"{brief(value)} is not a percentage and a time", field=where, hint="write '5% for 30m'")
    parse_duration(match[2], field=where)
    return f"{percent:g}% for {match[2]}"


def _amount(what: str) -> Kind:
    def check(value: Any, where: str) -> float:
        if not is_number(value) or not 0 < value < 1e12:
            raise SpecError(f"must be {what} above zero, not {value!r}", field=where)
        return float(value)

    return Kind(check, {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1e12})


def choice(names: tuple[str, ...]) -> Kind:
    """Return the kind of one of ``names``."""
    return Kind(lambda value, where: choice_of(value, names, where), {"enum": list(names)})


def whole(least: int, most: int) -> Kind:
    """Return the kind of an integer from ``least`` to ``most``."""
    schema = {"type": "integer", "minimum": least, "maximum": most}
    return Kind(lambda value, where: whole_number(value, where, least=least, most=most), schema)


_TEXT: Schema = {"type": "string", "minLength": 1}
_ONE_OR_MORE: Schema = {"anyOf": [_TEXT, {"type": "array", "items": _TEXT}]}
_SECONDS: list[Schema] = [
    {"type": "integer", "minimum": 1},
    {"type": "string", "pattern": "^[0-9]+$|^(?=.)([0-9]+[dD])?([0-9]+[hH])?([0-9]+[mM])?([0-9]+[sS])?$"},
]
_BYTES: list[Schema] = [
    {"type": "integer", "minimum": 1},
    {"type": "string", "pattern": r"^\s*[0-9]{1,15}(\.[0-9]{1,9})? ?(B|kB|KB|MB|GB|TB)?\s*$"},
]

TEXT = Kind(text_of, _TEXT)
PATH = Kind(lambda value, where: text_of(path_text(value), where), _TEXT)
PATHS = Kind(_paths, _ONE_OR_MORE)
PATTERNS = Kind(lambda value, where: texts_of(sequence_of(value), where), _ONE_OR_MORE)
CHECKPOINT_GLOBS = Kind(_globs, _ONE_OR_MORE)
RAW_TEXTS = Kind(
    lambda value, where: texts_of(value, where, empty=True), {"type": "array", "items": {"type": "string"}}
)
NAME = Kind(_name, {"type": "string", "maxLength": MAX_ID, "pattern": "^([a-z0-9](-?[a-z0-9])*)?$"})
IMAGE = Kind(_image, {"type": "string", "pattern": r"^[^\s-]\S*$"})
SWITCH = Kind(_switch, {"type": "boolean"})
DURATION = Kind(lambda value, where: parse_duration(value, field=where), {"anyOf": _SECONDS})
DURATION_OR_ZERO = Kind(
    lambda value, where: 0 if value in (0, "0") else parse_duration(value, field=where),
    {"anyOf": [*_SECONDS, {"const": 0}]},
)
WEBHOOK = Kind(_webhook, {"type": "string", "pattern": f"^{_WEBHOOK}$"})
MIN_GPU_UTIL = Kind(_min_gpu_util, {"type": "string", "pattern": f"^{_UTIL}$"})
SIZE = Kind(lambda value, where: parse_size(value, field=where), {"anyOf": _BYTES})
AMOUNT_OF_USD = _amount("an amount of US dollars")
GPU_HOURS = _amount("a number of hours")


# ------------------------------------------------------------------------------------------------------------- tables


def mapping(kind: Kind, check_name: Callable[[str, str], None] | None = None) -> Kind:
    """Return the kind of a table of values of ``kind``; ``check_name`` takes each key and the table's field."""

    def check(value: Any, where: str) -> dict[str, Any]:
        table = table_of(value, where)
        if check_name is not None:
            for key in table:  # first, as the field of a value shows its name
                check_name(key, where)
        return {key: kind.check(item, f"{where}.{key}") for key, item in table.items()}

    return Kind(check, {"type": "object", "additionalProperties": kind.schema})


def _env_name(name: str, where: str) -> None:
    if not _ENV_NAME.fullmatch(name):
        shown = "it" if "secret" in where else repr(name)  # with --secret $TOKEN it is the secret
        raise SpecError(f"{shown} is not a name for an environment variable", field=where)
    if _RESERVED.fullmatch(name):
        raise SpecError(
            f"{name} is set by torchrun or cloudtrain for every rank", field=where, hint="choose another name"
        )


def _reference(value: Any, where: str) -> str:
    scheme, _, rest = text_of(value, where).partition(":")
    if scheme not in SECRET_SCHEMES or not (_ENV_NAME.fullmatch(rest) if scheme == "env" else rest):
        how = "write env:NAME (without $), aws:ARN, azure:VAULT/NAME or gcp:RESOURCE"
        raise SpecError("its value is not a reference to a secret", field=where, hint=how)  # and may be the secret
    return str(value)


def _hyperparameter(value: Any, where: str) -> Any:
    if value is None:
        raise SpecError("has no value (None)", field=where, hint="leave it out")
    return json_value(value, where)


def _metric_name(name: str, where: str) -> None:
    if not _METRIC.fullmatch(name):
        how = "use 1 to 100 printable characters without =, and no space at the ends"
        raise SpecError(f"{name!r} is not a name for a metric", field=where, hint=how)
    if name == "time":
        raise SpecError("time is the time of the row itself", field=where, hint="use another name")


def _metric(value: Any, where: str) -> str:
    pattern = text_of(value, where)
    try:
        groups = re.compile(pattern).groups
    except (re.error, OverflowError, RecursionError) as exc:
        why = f"{pattern!r} is not a regular expression: {exc}"
        raise SpecError(why, field=where, hint=f"write it like {_EXAMPLE!r}") from None
    if groups == 0:
        raise SpecError(f"{pattern!r} has no group, not one", field=where, hint=f"write it like {_EXAMPLE!r}")
    if groups > 1:
        how = "write (?:...) for every group except the group of the number"
        raise SpecError(f"{pattern!r} has {groups} groups, not one", field=where, hint=how)
    return pattern


def _header(name: str, where: str) -> None:
    if not _HEADER.fullmatch(name):
        hint = "write NAME=VALUE, as in Authorization=Bearer {secrets.TOKEN}"
        raise SpecError("its name is not that of a header", field=where, hint=hint)  # and may be 'NAME: SECRET'


def _header_value(value: Any, where: str) -> str:
    if not text_of(value, where).isprintable():
        raise SpecError("must be one line of printable characters", field=where)
    return str(value)


_ANY_TEXT = Kind(lambda value, where: text_of(value, where, empty=True), {"type": "string"})
ENV = mapping(_ANY_TEXT, _env_name)
WEBHOOK_HEADERS = mapping(Kind(_header_value, _TEXT), _header)
TAGS = mapping(_ANY_TEXT)
_REFERENCE = rf"^(env:{_ENV_NAME.pattern}$|({'|'.join(s for s in SECRET_SCHEMES if s != 'env')}):.)"
SECRETS = mapping(Kind(_reference, {"type": "string", "pattern": _REFERENCE}), _env_name)
HYPERPARAMETERS = mapping(Kind(_hyperparameter, {"not": {"type": "null"}}))
METRICS = mapping(Kind(_metric, _TEXT), _metric_name)
JSON_TABLES = mapping(Kind(lambda value, where: json_value(table_of(value, where), where), {"type": "object"}))
