"""Check a command job's document before it is sent, with no SDK.

`options` may hold only what azure-ai-ml sends without loss. Its loader refuses unknown fields.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ...errors import SpecError
from ...validate import did_you_mean
from . import NAME

__all__ = ["check_body", "check_options"]

SERVICES = {
    "ssh": ("type", "nodes", "ssh_public_keys"),
    "jupyter_lab": ("type", "nodes"),
    "vs_code": ("type", "nodes"),
    "tensor_board": ("type", "nodes", "log_dir"),
}
"""Kinds of interactive services, and the fields of each."""
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def _variables(value: Any, where: str) -> Mapping[str, Any]:
    for key in value if isinstance(value, Mapping) else ():
        if not _VARIABLE.fullmatch(key):
            raise SpecError("is not a name for an environment variable", field=f"{where}.{key}")
        if key.startswith("CLOUDTRAIN_"):
            raise SpecError("is set by cloudtrain itself", field=f"{where}.{key}")
    return {ANY: str}


def _service(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        return {}
    kind = value.get("type")
    if kind not in tuple(SERVICES):  # a list has no hash
        raise SpecError(f"{kind!r} is none of {', '.join(SERVICES)}", field=f"{where}.type")
    if value.get("nodes", "all") != "all":
        raise SpecError("can only be all", field=f"{where}.nodes", hint="leave it out for node 0 alone")
    return dict.fromkeys(SERVICES[kind], str)


ANY = "*"
FREE: Mapping[str, Any] = {
    "description": str,
    "display_name": str,
    "properties": {ANY: str},
    "environment_variables": _variables,
    # No service reads max_instance_count. With docker_args the SDK drops locations.
    "resources": {"docker_args": str, "locations": list, "properties": {ANY: object}},
    "services": {ANY: _service},
    "parent_job_name": str,
}
"""Forms of the fields that `options` may set; `_check` reads them. `merge_options` has refused cloudtrain's own."""


def _check(value: Any, form: Any, where: str) -> None:
    """Raise `SpecError` for a value that does not have the form.

    A form is ``str``, ``list`` (of texts), ``object`` (anything), a table of forms, in which `ANY` stands for every
    key, or a function that checks a value and returns its form.
    """
    if not isinstance(form, (type, Mapping)):
        form = form(value, where)
    if form is str and (not isinstance(value, str) or "\0" in value):
        raise SpecError(f"must be text, not {value!r}", field=where)
    if form is list and not (value and isinstance(value, list) and all(isinstance(item, str) for item in value)):
        raise SpecError(f"must be a list of texts, not {value!r}", field=where)
    if isinstance(form, type):
        return
    if not isinstance(value, Mapping):
        raise SpecError(f"must be a table, not {value!r}", field=where)
    for key, item in value.items():
        if key not in form and ANY not in form:
            raise SpecError("no such field", field=f"{where}.{key}", hint=did_you_mean(key, form))
        _check(item, form.get(key, form.get(ANY)), f"{where}.{key}")


def check_options(options: Mapping[str, Any], body: Mapping[str, Any]) -> None:
    """Raise `SpecError` for an option that the document cannot carry. Fields in ``body`` are merged or owned."""
    where = f"options.{NAME}"
    for key, value in options.items():
        if key in FREE:
            own = set(body[key]) if key == "resources" else set()
            given = {k: v for k, v in value.items() if k not in own} if isinstance(value, Mapping) and own else value
            _check(given, FREE[key], f"{where}.{key}")
        elif key not in body and key not in ("code", "compute", "distribution", "queue_settings", "identity"):
            why, hint = "a command job has no such field to set", did_you_mean(key, FREE)
            raise SpecError(why, field=f"{where}.{key}", hint=hint)


def check_body(body: Mapping[str, Any], *, serverless: bool) -> None:
    """Raise `SpecError` for parts of ``body`` that contradict each other."""
    resources, where = body["resources"], f"options.{NAME}.resources"
    if resources.get("locations") and not serverless:
        why, hint = "are for serverless compute: a cluster has one region", "remove locations, or the setting compute"
        raise SpecError(why, field=f"{where}.locations", hint=hint)
