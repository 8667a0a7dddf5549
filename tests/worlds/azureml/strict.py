"""What ``PUT …/jobs/{name}`` refuses: azure-ai-ml's own REST models read strictly, and the rules that stand in no
model.

The SDK itself sends whatever it is given under any of its names; it is the service that refuses.
"""

from __future__ import annotations

import enum
import functools
import re
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["JOB_NAME", "STATUSES", "broken_rules", "model_errors", "seconds_of"]

JOB_NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_-]{0,254}")
STATUSES = (
    "NotStarted", "Starting", "Provisioning", "Preparing", "Queued", "Running", "Finalizing", "CancelRequested",
    "Completed", "Failed", "Canceled", "NotResponding", "Paused", "Unknown",
)  # fmt: skip
"""arm_ml_service JobStatus."""
FURTHER = {
    "QueueSettings": ("priority",),
    "CommandJob": ("parentJobName",),
    "JobResourceConfiguration": ("locations",),
}
"""Members of the api-version 2025-01-01-preview, with which the SDK sends a job, that its models (2025-12-01) lack."""
_SHM = re.compile(r"[1-9]\d*[bBkKmMgG]")
_VARIABLE = re.compile(r"[^=\s]+")
_PLACEHOLDER = re.compile(r"\$\{\{\s*(inputs|outputs)\.([A-Za-z0-9_]+)\s*\}\}")
_DURATION = re.compile(r"P(?:(\d+)D)?(?:T(?:(\d+)H)?(?:(\d+)M)?(?:(\d+(?:\.\d+)?)S)?)?")
_ENVIRONMENT = re.compile(
    r"(/subscriptions/.+/environments/[^/]+/versions/[^/]+|"
    r"azureml://registries/[^/]+/environments/[^/]+/(versions|labels)/[^/]+)",
    re.IGNORECASE,
)
_SOURCE = re.compile(r"(azureml|https|wasbs|abfss|adl)://.+|/subscriptions/.+")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def seconds_of(duration: str) -> float:
    """Seconds of an ISO 8601 duration. Raises `ValueError` for anything else."""
    found = _DURATION.fullmatch(duration)
    if found is None or duration in ("P", "PT") or duration.endswith("T"):
        raise ValueError(duration)
    days, hours, minutes, seconds = (float(part or 0) for part in found.groups())
    return days * 86400 + hours * 3600 + minutes * 60 + seconds


# ------------------------------------------------------------------------------------------------------------ the model


@functools.cache
def _words() -> dict[str, Any]:
    """What the annotations of the SDK's models speak of."""
    import datetime

    from azure.ai.ml._restclient.arm_ml_service import models

    return {**vars(typing), "_models": models, "datetime": datetime}


def _named(model: Any) -> None:
    """Its fields get their names on the wire when the first of it is made."""
    model.__new__(model)


@functools.cache
def _fields(model: Any) -> dict[str, tuple[Any, bool]]:
    """(annotation, required) by the name on the wire, of a model and all its bases."""
    _named(model)
    annotations: dict[str, Any] = {}
    for kind in reversed(model.__mro__):
        annotations |= vars(kind).get("__annotations__", {})
    found = {}
    for name, field in model._attr_to_rest_field.items():
        meant = annotations[name]
        meant = eval(meant, _words()) if isinstance(meant, str) else meant
        found[field._rest_name] = (meant, not _optional(meant) and "create" in (field._visibility or ["create"]))
    return found


def _optional(meant: Any) -> bool:
    return type(None) in typing.get_args(meant)


def model_errors(body: Mapping[str, Any]) -> list[str]:
    """What the model of a command job itself forbids in a body."""
    models = _words()["_models"]
    found = [f"unknown member '{name}'" for name in body if name != "properties"]
    properties = body.get("properties")
    if not isinstance(properties, Mapping):
        return [*found, "'properties' is required"]
    if properties.get("jobType") != "Command":
        return [*found, f"'properties.jobType' is {properties.get('jobType')!r}, not 'Command'"]
    return [*found, *_walk(models.CommandJob, properties, "properties")]


def _resolved(meant: Any) -> Any:
    if isinstance(meant, (str, typing.ForwardRef)):
        return eval(meant if isinstance(meant, str) else meant.__forward_arg__, _words())
    return meant


def _walk(meant: Any, value: Any, path: str) -> Iterator[str]:
    meant = _resolved(meant)
    origin, inner = typing.get_origin(meant), typing.get_args(meant)
    if meant is Any or (value is None and type(None) in inner):
        return
    if origin in (typing.Union, types.UnionType):
        kinds = [_resolved(kind) for kind in inner if kind is not type(None)]
        if any(isinstance(kind, type) and issubclass(kind, enum.Enum) for kind in kinds):
            kinds.remove(str)  # the SDK's way to say that it lets any text through
        tries = [list(_walk(kind, value, path)) for kind in kinds]
        yield from min(tries, key=len)
    elif origin is typing.Literal:
        if value not in [getattr(item, "value", item) for item in inner]:
            yield f"'{path}' is {value!r}"
    elif origin is dict:
        if not isinstance(value, Mapping):
            yield f"'{path}' must be an object"
            return
        for name, item in value.items():
            yield from _walk(inner[1], item, f"{path}.{name}")
    elif origin is list:
        if not isinstance(value, list):
            yield f"'{path}' must be an array"
            return
        for number, item in enumerate(value):
            yield from _walk(inner[0], item, f"{path}[{number}]")
    elif isinstance(meant, type):
        yield from _one(meant, value, path)


def _one(meant: type[Any], value: Any, path: str) -> Iterator[str]:
    """One value of a plain type, an enum, or a model with its discriminator."""
    if hasattr(meant, "as_dict"):
        if not isinstance(value, Mapping):
            yield f"'{path}' must be an object"
            return
        kinds, chosen = _kinds(meant)
        if kinds and value.get(chosen) not in kinds:
            yield f"'{path}.{chosen}' is {value.get(chosen)!r}, not one of {', '.join(kinds)}"
        else:
            yield from _members(kinds[value[chosen]] if kinds else meant, value, path)
    elif issubclass(meant, enum.Enum):
        if value not in [item.value for item in meant]:
            yield f"'{path}' is {value!r}, not one of {', '.join(str(item.value) for item in meant)}"
    elif meant.__name__ in ("timedelta", "datetime", "str"):
        if not isinstance(value, str):
            yield f"'{path}' must be a string, not {value!r}"
    elif meant is float:
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            yield f"'{path}' must be a number, not {value!r}"
    elif meant in (int, bool) and type(value) is not meant:
        yield f"'{path}' must be {meant.__name__}, not {value!r}"


def _kinds(meant: Any) -> tuple[dict[str, Any], str]:
    """What a model may be besides, by the value of its discriminator; and that one's name."""
    _named(meant)
    chosen = next((f._rest_name for f in meant._attr_to_rest_field.values() if f._is_discriminator), "")
    return (meant.__dict__.get("__mapping__", {}) if chosen else {}), chosen


def _members(meant: Any, value: Mapping[str, Any], path: str) -> Iterator[str]:
    fields = _fields(meant)
    for name, item in value.items():
        if name in FURTHER.get(meant.__name__, ()):
            continue
        if name not in fields:
            yield f"Could not find member '{name}' on object of type '{meant.__name__}' ('{path}.{name}')"
        else:
            yield from _walk(fields[name][0], item, f"{path}.{name}")
    for name, (_, required) in fields.items():
        if required and name not in value:
            yield f"'{path}.{name}' is required"


# ------------------------------------------------------------------------------------------------------------ semantics


def broken_rules(name: str, body: Mapping[str, Any]) -> list[str]:
    """What the service refuses in a command job that its model allows."""
    properties = body["properties"]
    if JOB_NAME.fullmatch(name) is None:
        return [f"Job name {name!r} is invalid: letters, digits, '-' and '_', at most 255 of them"]
    rules = (_command, _environment, _bindings, _resources, _limits, _texts)
    return [problem for rule in rules for problem in rule(properties)]


def _command(properties: Mapping[str, Any]) -> Iterator[str]:
    command = properties.get("command", "")
    if not command.strip():
        yield "The command is empty"
    for kind, name in _PLACEHOLDER.findall(command):
        if name not in properties.get(kind, {}):
            yield f"The command refers to {kind}.{name}, which the job does not have"
    if "$${{" in command:
        yield "The command holds $${{, which nothing replaces"


def _environment(properties: Mapping[str, Any]) -> Iterator[str]:
    environment = properties.get("environmentId", "")
    if _ENVIRONMENT.fullmatch(environment) is None:
        yield f"environmentId {environment!r} is no id of an environment"


def _bindings(properties: Mapping[str, Any]) -> Iterator[str]:
    for name, item in (properties.get("inputs") or {}).items():
        if _NAME.fullmatch(name) is None:
            yield f"Invalid input name {name!r}"
        kind = item["jobInputType"]
        if kind == "literal" and not isinstance(item.get("value"), str):
            yield f"inputs.{name}: the value of a literal must be a string"
        if kind in ("uri_file", "uri_folder") and _SOURCE.fullmatch(item.get("uri", "")) is None:
            yield f"inputs.{name}: {item.get('uri')!r} is no URI that Azure Machine Learning reads"
        if item.get("mode") not in (None, "ReadOnlyMount", "Download", "Direct", "EvalMount", "EvalDownload"):
            yield f"inputs.{name}: mode {item['mode']} is none of an input"
    for name, item in (properties.get("outputs") or {}).items():
        if _NAME.fullmatch(name) is None:
            yield f"Invalid output name {name!r}"
        if (uri := item.get("uri")) is not None and not uri.startswith("azureml://"):
            yield f"outputs.{name}: {uri!r} is on no datastore"


def _resources(properties: Mapping[str, Any]) -> Iterator[str]:
    resources = properties.get("resources") or {}
    if resources.get("instanceCount", 1) < 1:
        yield "resources.instanceCount must be at least 1"
    shm = resources.get("shmSize")
    if shm is not None and _SHM.fullmatch(shm) is None:
        yield f"resources.shmSize {shm!r}: a number above 0 and one of b, k, m, g"
    compute = properties.get("computeId")
    if compute is not None and not compute.lower().startswith("/subscriptions/"):
        yield f"computeId {compute!r} is no resource id"
    if compute is not None and (properties.get("queueSettings") or {}).get("jobTier") == "Spot":
        yield "queueSettings.jobTier Spot is for serverless compute; a cluster has a tier of its own"


def _limits(properties: Mapping[str, Any]) -> Iterator[str]:
    timeout = (properties.get("limits") or {}).get("timeout")
    if timeout is not None:
        try:
            seconds_of(timeout)
        except ValueError:
            yield f"limits.timeout {timeout!r} is no ISO 8601 duration"


def _texts(properties: Mapping[str, Any]) -> Iterator[str]:
    for name in properties.get("environmentVariables") or {}:
        if _VARIABLE.fullmatch(name) is None:
            yield f"Invalid environment variable name {name!r}"
    if len(properties.get("tags") or {}) > 50:
        yield "A job has at most 50 tags"
