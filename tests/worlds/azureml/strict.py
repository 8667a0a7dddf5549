"""Refusals of ``PUT …/jobs/{name}``: azure-ai-ml's own REST models read strictly, and the rules that are in no model.

The SDK sends everything that it is given; only the service refuses.
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
"""Statuses of arm_ml_service's JobStatus."""
FURTHER = {
    "QueueSettings": ("priority",),
    "CommandJob": ("parentJobName",),
    "JobResourceConfiguration": ("locations",),
}
"""Members of the api-version 2025-01-01-preview that the SDK's models (2025-12-01) lack. The SDK sends jobs with it."""
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
    """Return the seconds of an ISO 8601 duration. Raises `ValueError` for anything else."""
    found = _DURATION.fullmatch(duration)
    if found is None or duration in ("P", "PT") or duration.endswith("T"):
        raise ValueError(duration)
    days, hours, minutes, seconds = (float(part or 0) for part in found.groups())
    return days * 86400 + hours * 3600 + minutes * 60 + seconds


# ------------------------------------------------------------------------------------------------------------ the model


@functools.cache
def _words() -> dict[str, Any]:
    """Return the names that the annotations of the SDK's models use."""
    import datetime

    from azure.ai.ml._restclient.arm_ml_service import models

    return {**vars(typing), "_models": models, "datetime": datetime}


def _named(model: Any) -> None:
    """Create one instance: only then do a model's fields get their names on the wire."""
    model.__new__(model)


@functools.cache
def _fields(model: Any) -> dict[str, tuple[Any, bool]]:
    """Return (annotation, required) by the name on the wire, for a model and all its bases."""
    _named(model)
    annotations: dict[str, Any] = {}
    for kind in reversed(model.__mro__):
        annotations |= vars(kind).get("__annotations__", {})
    found = {}
    for name, field in model._attr_to_rest_field.items():
        annotation = annotations[name]
        annotation = eval(annotation, _words()) if isinstance(annotation, str) else annotation
        found[field._rest_name] = (
            annotation,
            not _optional(annotation) and "create" in (field._visibility or ["create"]),
        )
    return found


def _optional(annotation: Any) -> bool:
    return type(None) in typing.get_args(annotation)


def model_errors(body: Mapping[str, Any]) -> list[str]:
    """Return the errors that the model of a command job finds in a body."""
    models = _words()["_models"]
    found = [f"unknown member '{name}'" for name in body if name != "properties"]
    properties = body.get("properties")
    if not isinstance(properties, Mapping):
        return [*found, "'properties' is required"]
    if properties.get("jobType") != "Command":
        return [*found, f"'properties.jobType' is {properties.get('jobType')!r}, not 'Command'"]
    return [*found, *_walk(models.CommandJob, properties, "properties")]


def _resolved(annotation: Any) -> Any:
    if isinstance(annotation, (str, typing.ForwardRef)):
        return eval(annotation if isinstance(annotation, str) else annotation.__forward_arg__, _words())
    return annotation


def _walk(annotation: Any, value: Any, path: str) -> Iterator[str]:
    annotation = _resolved(annotation)
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is Any or (value is None and type(None) in inner):
        return
    if origin in (typing.Union, types.UnionType):
        kinds = [_resolved(kind) for kind in inner if kind is not type(None)]
        if any(isinstance(kind, type) and issubclass(kind, enum.Enum) for kind in kinds):
            kinds.remove(str)  # the SDK's models add str to allow any text
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
    elif isinstance(annotation, type):
        yield from _one(annotation, value, path)


def _one(annotation: type[Any], value: Any, path: str) -> Iterator[str]:
    """Check one value of a plain type, an enum, or a model with its discriminator."""
    if hasattr(annotation, "as_dict"):
        if not isinstance(value, Mapping):
            yield f"'{path}' must be an object"
            return
        kinds, chosen = _kinds(annotation)
        if kinds and value.get(chosen) not in kinds:
            yield f"'{path}.{chosen}' is {value.get(chosen)!r}, not one of {', '.join(kinds)}"
        else:
            yield from _members(kinds[value[chosen]] if kinds else annotation, value, path)
    elif issubclass(annotation, enum.Enum):
        if value not in [item.value for item in annotation]:
            yield f"'{path}' is {value!r}, not one of {', '.join(str(item.value) for item in annotation)}"
    elif annotation.__name__ in ("timedelta", "datetime", "str"):
        if not isinstance(value, str):
            yield f"'{path}' must be a string, not {value!r}"
    elif annotation is float:
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            yield f"'{path}' must be a number, not {value!r}"
    elif annotation in (int, bool) and type(value) is not annotation:
        yield f"'{path}' must be {annotation.__name__}, not {value!r}"


def _kinds(model: Any) -> tuple[dict[str, Any], str]:
    """Return a model's variants by the value of its discriminator, and the discriminator's name."""
    _named(model)
    chosen = next((f._rest_name for f in model._attr_to_rest_field.values() if f._is_discriminator), "")
    return (model.__dict__.get("__mapping__", {}) if chosen else {}), chosen


def _members(model: Any, value: Mapping[str, Any], path: str) -> Iterator[str]:
    fields = _fields(model)
    for name, item in value.items():
        if name in FURTHER.get(model.__name__, ()):
            continue
        if name not in fields:
            yield f"Could not find member '{name}' on object of type '{model.__name__}' ('{path}.{name}')"
        else:
            yield from _walk(fields[name][0], item, f"{path}.{name}")
    for name, (_, required) in fields.items():
        if required and name not in value:
            yield f"'{path}.{name}' is required"


# ------------------------------------------------------------------------------------------------------------ semantics


def broken_rules(name: str, body: Mapping[str, Any]) -> list[str]:
    """Return the service's refusals of a command job that its model allows."""
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
