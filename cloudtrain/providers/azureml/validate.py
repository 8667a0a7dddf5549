"""Check a command job's document before it is sent, with no SDK.

`options` may hold only what azure-ai-ml sends without loss. Its loader refuses unknown fields.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from ...errors import SpecError
from ...validate import did_you_mean
from .names import NAME

__all__ = ["check_document", "check_options"]

SERVICES = {
    "ssh": ("type", "nodes", "ssh_public_keys"),
    "jupyter_lab": ("type", "nodes"),
    "vs_code": ("type", "nodes"),
    "tensor_board": ("type", "nodes", "log_dir"),
}
"""Kinds of interactive services, and the fields of each."""
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

Check = Callable[[Any, str], None]


def _text(value: Any, where: str) -> None:
    if not isinstance(value, str) or "\0" in value:
        raise SpecError(f"must be text, not {value!r}", field=where)


def _texts(value: Any, where: str) -> None:
    if not isinstance(value, list) or not value or not all(isinstance(item, str) for item in value):
        raise SpecError(f"must be a list of texts, not {value!r}", field=where)


def _table(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise SpecError(f"must be a table, not {value!r}", field=where)
    return value


def _table_of_texts(value: Any, where: str) -> None:
    for key, item in _table(value, where).items():
        _text(item, f"{where}.{key}")


def _variables(value: Any, where: str) -> None:
    _table_of_texts(value, where)
    for key in value:
        if not _VARIABLE.fullmatch(key):
            raise SpecError("is not a name for an environment variable", field=f"{where}.{key}")
        if key.startswith("CLOUDTRAIN_"):
            raise SpecError("is set by cloudtrain itself", field=f"{where}.{key}")


def _services(value: Any, where: str) -> None:
    for name, service in _table(value, where).items():
        there = f"{where}.{name}"
        kind = _table(service, there).get("type")
        if not isinstance(kind, str) or kind not in SERVICES:
            raise SpecError(f"{kind!r} is none of {', '.join(SERVICES)}", field=f"{there}.type")
        for key, item in service.items():
            if key not in SERVICES[kind]:
                raise SpecError("no such field", field=f"{there}.{key}", hint=did_you_mean(key, SERVICES[kind]))
            _text(item, f"{there}.{key}")
        if service.get("nodes", "all") != "all":
            raise SpecError("can be all, or be left out: node 0", field=f"{there}.nodes")


def _resources(value: Any, where: str) -> None:
    """Check resources. No service reads ``max_instance_count``. With ``docker_args`` the SDK drops ``locations``."""
    _known(value, where, {"docker_args": _text, "locations": _texts, "properties": _plain})


def _plain(value: Any, where: str) -> None:
    _table(value, where)


FREE: Mapping[str, Check] = {
    "description": _text,
    "display_name": _text,
    "properties": _table_of_texts,
    "environment_variables": _variables,
    "resources": _resources,
    "services": _services,
    "parent_job_name": _text,
}
"""Fields that `options` may set. `merge_options` has refused cloudtrain's own."""


def _known(value: Any, where: str, checks: Mapping[str, Check]) -> None:
    for key, item in _table(value, where).items():
        if key not in checks:
            raise SpecError("no such field", field=f"{where}.{key}", hint=did_you_mean(key, checks))
        checks[key](item, f"{where}.{key}")


def check_options(options: Mapping[str, Any], body: Mapping[str, Any]) -> None:
    """Raise `SpecError` for an option that the document cannot carry. Fields in ``body`` are merged or owned."""
    where = f"options.{NAME}"
    for key, value in options.items():
        if key in FREE:
            own = set(body[key]) if key == "resources" else set()
            given = {k: v for k, v in value.items() if k not in own} if isinstance(value, Mapping) and own else value
            FREE[key](given, f"{where}.{key}")
        elif key not in body and key not in ("code", "compute", "distribution", "queue_settings", "identity"):
            raise SpecError(
                "a command job has no such field to set", field=f"{where}.{key}", hint=did_you_mean(key, FREE)
            )


def check_document(body: Mapping[str, Any], *, serverless: bool) -> None:
    """Raise `SpecError` for parts of ``body`` that contradict each other."""
    resources, where = body["resources"], f"options.{NAME}.resources"
    if resources.get("locations") and not serverless:
        raise SpecError("are for serverless compute: a cluster has one place", field=f"{where}.locations")
