"""Check a command job's document before it is sent, with no SDK.

`options` may hold only what azure-ai-ml sends without loss. Its loader refuses unknown fields.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ...errors import SpecError
from ...validate import did_you_mean
from .._cloud import problems
from . import NAME

SERVICES = {
    "ssh": ("type", "nodes", "ssh_public_keys"),
    "jupyter_lab": ("type", "nodes"),
    "vs_code": ("type", "nodes"),
    "tensor_board": ("type", "nodes", "log_dir"),
}
"""Kinds of interactive services, and the fields of each."""
_SHAPES: Mapping[str, Any] = {
    "job": {
        "type": "structure",
        "members": {
            **dict.fromkeys(("description", "display_name", "parent_job_name"), "text"),
            **dict.fromkeys(("properties", "environment_variables"), "texts"),
            "resources": "resources",
            "services": "services",
        },
    },
    "text": {"type": "string", "pattern": r"[^\0]*", "words": "text"},
    "texts": {"type": "map", "key": "text", "value": "text"},
    # No service reads max_instance_count. With docker_args the SDK drops locations.
    "resources": {
        "type": "structure",
        "members": {"docker_args": "text", "locations": "locations", "properties": "anything"},
    },
    "locations": {"type": "list", "member": "text", "min": 1, "words": "a list of texts"},
    "anything": {"type": "map", "key": "text", "value": "any"},
    "any": {"type": "any"},
    "services": {"type": "map", "key": "text", "value": "service"},
    "service": {
        "type": "structure",
        "members": {"type": "any", **dict.fromkeys(("nodes", "ssh_public_keys", "log_dir"), "text")},
    },
}
"""Fields that `options` may set, as `problems` reads them. `merge_options` has refused cloudtrain's own."""
FREE = _SHAPES["job"]["members"]


def check_options(options: Mapping[str, Any], body: Mapping[str, Any]) -> None:
    """Raise `SpecError` for an option that the document cannot carry. Fields in ``body`` are merged or owned."""
    where = f"options.{NAME}"
    for key, value in options.items():
        if key in FREE:
            own = set(body[key]) if key == "resources" else set()
            given = {k: v for k, v in value.items() if k not in own} if isinstance(value, Mapping) and own else value
            for path, why, hint in problems(_SHAPES, FREE[key], given, (where, key)):
                raise SpecError(why, field=".".join(path), hint=hint)
        elif key not in body and key not in ("code", "compute", "distribution", "queue_settings", "identity"):
            why, hint = "a command job has no such field to set", did_you_mean(key, FREE)
            raise SpecError(why, field=f"{where}.{key}", hint=hint)
    for name in options.get("environment_variables", ()):
        field = f"{where}.environment_variables.{name}"
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise SpecError("is not a name for an environment variable", field=field)
        if name.startswith("CLOUDTRAIN_"):
            raise SpecError("is set by cloudtrain itself", field=field)
    for name, service in options.get("services", {}).items():
        _check_service(service, f"{where}.services.{name}")


def _check_service(service: Mapping[str, Any], where: str) -> None:
    kind = service.get("type")
    if kind not in tuple(SERVICES):  # a list has no hash
        raise SpecError(f"{kind!r} is none of {', '.join(SERVICES)}", field=f"{where}.type")
    if service.get("nodes", "all") != "all":
        raise SpecError("can only be all", field=f"{where}.nodes", hint="leave it out for node 0 alone")
    for key in service:
        if key not in SERVICES[kind]:
            raise SpecError("no such field", field=f"{where}.{key}", hint=did_you_mean(key, SERVICES[kind]))


def check_body(body: Mapping[str, Any], *, serverless: bool) -> None:
    """Raise `SpecError` for parts of ``body`` that contradict each other."""
    resources, where = body["resources"], f"options.{NAME}.resources"
    if resources.get("locations") and not serverless:
        why, hint = "are for serverless compute: a cluster has one region", "remove locations, or the setting compute"
        raise SpecError(why, field=f"{where}.locations", hint=hint)
