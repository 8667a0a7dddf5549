"""Make JSON Schemas (draft 2020-12) of job files and settings files from the dataclasses.

An editor completes and checks with them what `Job` and `Settings` will read. `schemas` has them as files, with those of
``--json`` output.
"""

from __future__ import annotations

import dataclasses
import re
import types
import typing
from collections.abc import Mapping
from functools import cache
from typing import Any

from .. import schemas
from ..errors import NotFoundError, SpecError
from ..job.job import FIELDS, FLAT_FIELDS
from ..provider_api.registry import find_provider, provider_names
from ..validate import near_or_all
from .coerce import is_table
from .settings import Settings

DRAFT = "https://json-schema.org/draft/2020-12/schema"

Schema = dict[str, Any]


@cache
def job_schema() -> Schema:
    """Return the schema of a job file: every field, flat or in the tables ``source`` and ``resources``."""
    flat = {name: _field(spec, spec.metadata["kind"].schema) for name, spec in FIELDS.items()}
    on = {name: item for name, item in flat.items() if name not in ("name", "options", "on")}
    tables = {
        table: _table(text, {name: flat[key] for key, (owner, name) in FLAT_FIELDS.items() if owner == table})
        for table, text in (("source", "code of the job"), ("resources", "machines of the job"))
    }
    flat["on"]["additionalProperties"] = {"$ref": "#/$defs/on"}
    return {
        "$schema": DRAFT,
        "title": "A job file of cloudtrain",
        "type": "object",
        "properties": {**flat, **tables},
        "additionalProperties": False,
        "$defs": {"on": _table("fields of the job for one provider", on)},
    }


@cache
def settings_schema() -> Schema:
    """Return the schema of cloudtrain.toml and ``[tool.cloudtrain]`` in pyproject.toml, for all installed providers."""
    general = {name: item for name, item in _settings(Settings).items() if "description" in item}
    general["fallback"]["anyOf"][0].pop("minLength")  # an empty text is an empty list
    providers = {name: _provider(name) for name in provider_names()}
    layer = _table("settings of one profile", {**general, **providers})
    return {
        "$schema": DRAFT,
        "title": "Settings of cloudtrain",
        "type": "object",
        "properties": {
            **general,
            **{name: {"$ref": f"#/$defs/profile/properties/{name}"} for name in providers},
            "profile": {"type": "string", "description": "profile if the command and the environment name none"},
            "profiles": {
                "type": "object",
                "description": "profiles by name",
                "additionalProperties": {"$ref": "#/$defs/profile"},
            },
        },
        "additionalProperties": False,
        "$defs": {"profile": layer},
    }


def schema_names() -> list[str]:
    """Return the names of all schemas."""
    return sorted([*schemas.names(), *schemas.WRITTEN])


def schema(name: str) -> Schema:
    """Return the schema called ``name``; that of settings has third parties' providers. Raises `NotFoundError`."""
    made = {"job": job_schema, "settings": settings_schema}.get(name)
    if made is not None:
        return made()
    if name not in schema_names():
        raise NotFoundError(f"no schema {name!r}", field="name", hint=near_or_all(name, schema_names()))
    return schemas.load(name)


def described(exc: SpecError) -> SpecError:
    """Return ``exc``, about a job field of a wrong type or value, with the schema's description of that field."""
    if type(exc) is not SpecError or not exc.message.startswith("must be"):
        return exc
    where: Mapping[str, Any] = job_schema()
    for part in re.sub(r"\[\d+\]", "", exc.field).split("."):
        where = where.get("properties", {}).get(part, {})
    text = where.get("description")
    return SpecError(f"{exc.message} ({text})", field=exc.field, hint=exc.hint) if text else exc


def _field(spec: dataclasses.Field[Any], kind: Mapping[str, Any]) -> Schema:
    """Return the schema ``kind`` of a field, with its description and default."""
    text = spec.metadata.get("help")
    found = {**kind, "description": text} if text else {**kind}
    if isinstance(spec.default, (str, int, float, bool)) and spec.default != "":
        found["default"] = spec.default
    return found


def _table(about: str, properties: Schema) -> Schema:
    """Return the schema of a table that holds these keys and no others."""
    return {"type": "object", "description": about, "properties": properties, "additionalProperties": False}


def _settings(kind: type[Any]) -> Schema:
    hints = typing.get_type_hints(kind)
    return {
        spec.name: _field(spec, {**_of(hints[spec.name]), **spec.metadata.get("schema", {})})
        for spec in dataclasses.fields(kind)
    }


def _provider(name: str) -> Schema:
    properties = _settings(find_provider(name).Settings)
    properties["store"] = {"type": "string", "description": "URL of the store for this provider's jobs"}
    if "prices" in properties:
        properties["prices"]["additionalProperties"] = {"type": "number", "exclusiveMinimum": 0}
    return _table(f"settings of provider {name}", properties)


def _of(hint: Any) -> Schema:
    """Return the schema of a setting's type: text, number, list of texts (or one alone) or tables, table."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        hint = next(kind for kind in typing.get_args(hint) if kind is not type(None))
    if typing.get_origin(hint) in (tuple, list):
        array = {"type": "array", "items": _of(typing.get_args(hint)[0])}
        return array if is_table(typing.get_args(hint)[0]) else {"anyOf": [{"type": "string", "minLength": 1}, array]}
    if typing.get_origin(hint) is dict:
        return {"type": "object"}
    return {"type": {bool: "boolean", int: "integer", float: "number"}.get(hint, "string")}
