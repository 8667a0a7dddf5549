"""Refusals of CreateTrainingJob: botocore's model of the service read strictly, and the rules that are in no model.

botocore itself checks types, names, required members and minima, but no pattern, maximum or enum.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["LOCAL_STORAGE", "MAX_RUNTIME", "broken_rules", "model_errors", "service_model"]

MAX_RUNTIME = 28 * 86400
DEFAULT_RUNTIME = 86400
DEFAULT_CHECKPOINTS = "/opt/ml/checkpoints"
RESERVED = ("/opt/ml/input", "/opt/ml/model", "/opt/ml/output")
LOCAL_STORAGE = re.compile(r"ml\.(p4d|p4de|p5|p5e|p5en|p6-b200|p6-b300|g4dn|g5|g6|g6e|g7e|trn1|trn1n|trn2|[cmr]5d)\.")
"""Instance types with local disks: their volumes take no key."""
ECR = re.compile(
    r"(\d{12})\.dkr\.ecr\.([a-z0-9-]+)\.amazonaws\.com(\.cn)?/[a-z0-9._/-]+(:[\w.-]+)?(@sha256:[0-9a-f]{64})?"
)
#: Java's character classes, as Python writes them.
_CLASSES = {r"[\p{L}\p{Z}\p{N}_.:/=+\-@]": r"[\w\s.:/=+\-@]", r"\p{Alnum}": "A-Za-z0-9"}


@functools.cache
def service_model(service: str = "sagemaker") -> Any:
    """Return botocore's installed model of a service."""
    import botocore.session

    return botocore.session.get_session().get_service_model(service)


def model_errors(operation: str, request: Mapping[str, Any], service: str = "sagemaker") -> list[str]:
    """Return the errors that the model finds in a request, in the service's own words."""
    from botocore.validate import ParamValidator

    shape = service_model(service).operation_model(operation).input_shape
    report = ParamValidator().validate(request, shape)
    return [report.generate_report()] if report.has_errors() else list(_walk(shape, request, ""))


def _walk(shape: Any, value: Any, path: str) -> Iterator[str]:
    limits, kind = shape.metadata, shape.type_name
    size = len(value) if kind in ("list", "map", "string") else value
    if kind in ("list", "map", "string", "integer", "long") and "max" in limits and size > limits["max"]:
        what = "have length" if kind in ("list", "map", "string") else "have value"
        yield _broken(value, path, f"Member must {what} less than or equal to {limits['max']}")
    if kind == "structure":
        for name, item in value.items():
            lower = name[:1].lower() + name[1:]
            yield from _walk(shape.members[name], item, f"{path}.{lower}" if path else lower)
    elif kind == "list":
        for number, item in enumerate(value, 1):
            yield from _walk(shape.member, item, f"{path}.{number}.member")
    elif kind == "map":
        for name, item in value.items():
            yield from _walk(shape.key, name, f"{path}.{name}.key")
            yield from _walk(shape.value, item, f"{path}.{name}.value")
    elif kind == "string":
        if shape.enum and value not in shape.enum:
            yield _broken(value, path, f"Member must satisfy enum value set: [{', '.join(shape.enum)}]")
        if "pattern" in limits and not _pattern(limits["pattern"]).fullmatch(value):
            yield _broken(value, path, f"Member must satisfy regular expression pattern: {limits['pattern']}")


def _broken(value: Any, path: str, constraint: str) -> str:
    return f"Value '{value}' at '{path}' failed to satisfy constraint: {constraint}"


@functools.cache
def _pattern(text: str) -> re.Pattern[str]:
    for java, ours in _CLASSES.items():
        text = text.replace(java, ours)
    return re.compile(text)


# ------------------------------------------------------------------------------------------------------------ semantics


def broken_rules(request: Mapping[str, Any]) -> list[str]:
    """Return the service's refusals of a CreateTrainingJob that its model allows."""
    rules = (_algorithm, _resources, _stopping, _channels, _checkpoints, _tags)
    return [problem for rule in rules for problem in rule(request)]


def _algorithm(request: Mapping[str, Any]) -> Iterator[str]:
    algorithm = request.get("AlgorithmSpecification")
    if not algorithm:
        yield "AlgorithmSpecification is required for a training job that is not serverless"
        return
    if ("TrainingImage" in algorithm) == ("AlgorithmName" in algorithm):
        yield "You must specify either an algorithm name or a training image, and not both"
    image = algorithm.get("TrainingImage")
    if image is None:
        return
    config = algorithm.get("TrainingImageConfig", {})
    if config.get("TrainingRepositoryAccessMode", "Platform") == "Platform":
        if not ECR.fullmatch(image):
            yield f"Invalid training image: {image}. An image that is not in Amazon ECR needs the access mode Vpc"
        if "TrainingRepositoryAuthConfig" in config:
            yield "TrainingRepositoryAuthConfig is only for the access mode Vpc"
    elif "VpcConfig" not in request:
        yield "TrainingRepositoryAccessMode Vpc needs a VpcConfig"


def _resources(request: Mapping[str, Any]) -> Iterator[str]:
    resources = request.get("ResourceConfig")
    if not resources:
        yield "ResourceConfig is required for a training job that is not serverless"
        return
    single = "InstanceType" in resources or "InstanceCount" in resources
    ways = [single, "InstanceGroups" in resources, "InstancePreferences" in resources]
    if sum(ways) != 1:
        yield "Specify exactly one of InstanceType with InstanceCount, InstanceGroups, and InstancePreferences"
    if single and not {"InstanceType", "InstanceCount"} <= set(resources):
        yield "InstanceType and InstanceCount must be specified together"
    items = [resources] if single else [*resources.get("InstanceGroups", []), *resources.get("InstancePreferences", [])]
    for item in items:
        if item.get("InstanceCount", 1) < 1:
            yield "InstanceCount must be at least 1"
        if "VolumeKmsKeyId" in resources and LOCAL_STORAGE.match(item.get("InstanceType", "")):
            yield f"VolumeKmsKeyId is not supported for {item['InstanceType']}, which has local instance storage"
    spot = request.get("EnableManagedSpotTraining", False)
    if "InstancePreferences" in resources:
        if spot:
            yield "InstancePreferences is not supported with EnableManagedSpotTraining"
        for name in ("InstancePlacementConfig", "TrainingPlanArn"):
            if name in resources:
                yield f"InstancePreferences is not supported with {name}"
    if any(name in resources for name in ("SelectedInstanceType", "SelectedInstanceCount")):
        yield "SelectedInstanceType and SelectedInstanceCount are read-only"
    own_disks = all(LOCAL_STORAGE.match(item.get("InstanceType", "")) for item in items)
    if resources.get("VolumeSizeInGB", 1 if own_disks else 0) < 1:
        yield "VolumeSizeInGB must be at least 1"
    if spot and resources.get("KeepAlivePeriodInSeconds"):
        yield "KeepAlivePeriodInSeconds is not supported with EnableManagedSpotTraining"
    if spot and "TrainingPlanArn" in resources:
        yield "TrainingPlanArn is not supported with EnableManagedSpotTraining"


def _stopping(request: Mapping[str, Any]) -> Iterator[str]:
    stopping = request.get("StoppingCondition")
    if stopping is None:
        yield "StoppingCondition is required for a training job that is not serverless"
        return
    runtime, wait = stopping.get("MaxRuntimeInSeconds", DEFAULT_RUNTIME), stopping.get("MaxWaitTimeInSeconds")
    if runtime > MAX_RUNTIME:
        yield f"Invalid MaxRuntimeInSeconds. It must be less than or equal to {MAX_RUNTIME}"
    if request.get("EnableManagedSpotTraining", False):
        if wait is None or wait < runtime:
            yield (
                "Invalid MaxWaitTimeInSeconds. It must be present and be greater than or equal to MaxRuntimeInSeconds"
            )
    elif wait is not None:
        yield "MaxWaitTimeInSeconds is only supported when EnableManagedSpotTraining is set to true"


def _channels(request: Mapping[str, Any]) -> Iterator[str]:
    channels = request.get("InputDataConfig", [])
    names = [channel["ChannelName"] for channel in channels]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f"Duplicate channel name: {name}"
    for channel in channels:
        source = channel["DataSource"]
        kinds = [kind for kind in ("S3DataSource", "FileSystemDataSource") if kind in source]
        if len(kinds) != 1:
            yield f"Channel {channel['ChannelName']} must have exactly one data source"
        if "FileSystemDataSource" in kinds and "VpcConfig" not in request:
            yield f"Channel {channel['ChannelName']} is on a file system, which needs a VpcConfig"


def _checkpoints(request: Mapping[str, Any]) -> Iterator[str]:
    path = request.get("CheckpointConfig", {}).get("LocalPath", DEFAULT_CHECKPOINTS)
    if not path.startswith("/"):
        yield f"CheckpointConfig.LocalPath must be absolute, not {path}"
    for reserved in RESERVED:
        if f"{path.rstrip('/')}/".startswith(f"{reserved}/"):
            yield f"CheckpointConfig.LocalPath cannot be in {reserved}"


def _tags(request: Mapping[str, Any]) -> Iterator[str]:
    keys = [tag["Key"] for tag in request.get("Tags", [])]
    for key in sorted({key for key in keys if keys.count(key) > 1}):
        yield f"Duplicate tag key: {key}"
    for key in keys:
        if key.lower().startswith("aws:"):
            yield f"Tag keys that begin with aws: are reserved: {key}"
