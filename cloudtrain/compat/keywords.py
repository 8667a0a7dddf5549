"""Translate the keywords of SageMaker's SDK v2 (2.257.7, its last release) into a Job's fields, settings and inputs.

`CARRIED`, `WITHOUT_EFFECT` and `REFUSED` hold every keyword of its ``PyTorch``. Other keywords do not exist there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

from ..errors import SpecError
from ..job.job import Input
from ..validate import choice_of, did_you_mean, parse_duration, table_of, text_of, url_scheme

__all__ = ["CARRIED", "LINEAGE", "NAME", "REFUSED", "WITHOUT_EFFECT"]
__all__ += ["checked", "inputs_of", "job_fields", "keyword_of", "settings_of"]

NAME = "sagemaker"
CHECKPOINTS = "/opt/ml/checkpoints"
LINEAGE = "checkpoint_s3_uri"
NATIVE = "cloudtrain.Estimator"

_ATTACHED = f"no %s is attached; {NATIVE}(options={{'{NAME}': {{'%s': …}}}})"
WITHOUT_EFFECT: dict[str, tuple[Any, str]] = {
    "container_log_level": (
        ...,
        "it was the level of AWS's toolkit, which does not run; the script's logging is its own",
    ),
    "disable_profiler": (True, _ATTACHED % ("profiler", "ProfilerConfig")),
    "debugger_hook_config": (False, _ATTACHED % ("debugger", "DebugHookConfig")),
}
"""Keyword: the value that it may have (``...``: any) and why it changes nothing."""

REFUSED: dict[str, str] = {
    "code_location": "leave it out: code lies in the store (output_path), at its own digest, uploaded once",
    "git_config": "check the repository out and give source_dir; the commit is recorded with the run",
    "rules": _ATTACHED % ("debugger", "DebugRuleConfigurations"),
    "profiler_config": _ATTACHED % ("profiler", "ProfilerConfig"),
    "tensorboard_output_config": "write event files to CLOUDTRAIN_ARTIFACT_DIR; pull brings them",
    "compiler_config": "call torch.compile in the script",
    "training_recipe": "give the script that the recipe starts as entry_point, and its values as hyperparameters",
    "recipe_overrides": "give the values as hyperparameters",
    "instance_groups": "all nodes of a run are alike; give instance_type and instance_count",
    "container_entry_point": "the image's own start is cloudtrain's; give a shell script as entry_point ('run.sh')",
    "container_arguments": "the image's own start is cloudtrain's; give hyperparameters",
}
"""Keyword: what to do instead."""

_DEFAULTS = {"max_run": 24 * 3600, "instance_count": 1, "model_channel_name": "model"}
_FIELDS = {"image_uri": "image", "environment": "env", "max_run": "max_runtime", "volume_size": "disk_gb"}
_FIELDS |= {"use_spot_instances": "spot", "entry_point": "entry_point", "source_dir": "source_dir"}
_FIELDS |= {name: name for name in ("dependencies", "instance_count", "instance_type")}
_SETTINGS = {"keep_alive_period_in_seconds": "keep_alive_period", "enable_remote_debug": "debug_shell"}
_SETTINGS |= {name: name for name in ("role", "framework_version", "subnets", "security_group_ids", "volume_kms_key")}
_SETTINGS |= {name: name for name in ("output_kms_key", "encrypt_inter_container_traffic", "enable_network_isolation")}
_ALGORITHM, _IMAGE = "AlgorithmSpecification", "AlgorithmSpecification.TrainingImageConfig"
_CREDENTIALS = "TrainingRepositoryAuthConfig.TrainingRepositoryCredentialsProviderArn"
_OPTIONS = {
    "max_retry_attempts": "RetryStrategy.MaximumRetryAttempts",
    "metric_definitions": f"{_ALGORITHM}.MetricDefinitions",
    "enable_sagemaker_metrics": f"{_ALGORITHM}.EnableSageMakerMetricsTimeSeries",
    "enable_infra_check": "InfraCheckConfig.EnableInfraCheck",
    "enable_session_tag_chaining": "SessionChainingConfig.EnableSessionTagChaining",
    "training_plan": "ResourceConfig.TrainingPlanArn",
    "instance_placement_config": "ResourceConfig.InstancePlacementConfig",
    "training_repository_access_mode": f"{_IMAGE}.TrainingRepositoryAccessMode",
    "training_repository_credentials_provider_arn": f"{_IMAGE}.{_CREDENTIALS}",
}
CARRIED = frozenset(
    {*_FIELDS, *_SETTINGS, *_OPTIONS, LINEAGE, "checkpoint_local_path", "hyperparameters", "py_version"}
)
CARRIED |= {"distribution", "max_wait", "output_path", "disable_output_compression", "base_job_name", "tags"}
CARRIED |= {"input_mode", "model_uri", "model_channel_name", "sagemaker_session"}
"""The keywords that are carried over; docs/migration.md has a row for each."""
_KEYWORDS = {ours: name for name, ours in {**_FIELDS, **_SETTINGS}.items()}
_KEYWORDS |= {"path": "source_dir", "store": "output_path", "name": "base_job_name", "run_id": "job_name"}
_KEYWORDS |= {"metrics": "metric_definitions"}


def checked(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given keywords that are carried over; raise `SpecError` for one that is not, with a way out.

    None and an empty collection, v2's own defaults, count as not given.
    """
    found = {}
    known = [*CARRIED, *WITHOUT_EFFECT, *REFUSED]
    for name, value in given.items():
        if name not in known:
            now = name.removeprefix("train_")  # v1's prefix
            near = f"did you mean {now!r}?" if now in known else did_you_mean(now, known)
            raise SpecError("PyTorch of the SageMaker SDK v2 has no such keyword", field=name, hint=near)
        if value is None or (isinstance(value, (list, tuple, dict)) and not value):
            continue
        if name in REFUSED:
            raise SpecError(f"is not carried over: {REFUSED[name]}", field=name)
        allowed, why = WITHOUT_EFFECT.get(name, (value, ""))
        if allowed is not ... and value != allowed:
            raise SpecError(f"{value!r} is not carried over: {why}", field=name)
        if name in CARRIED:
            found[name] = value
    return found


def keyword_of(field: str) -> str:
    """Return the keyword that a field of a Job or a setting comes from, else the field itself."""
    name = re.sub(r"^(--set )?((resources|source|sagemaker)\.)?", "", field)
    first, dot, rest = name.partition(".")
    return f"{_KEYWORDS[first]}{dot}{rest}" if first in _KEYWORDS else field


def settings_of(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return the provider's settings among the `checked` keywords; of a session its ``region`` and ``profile``."""
    settings = {ours: keywords[name] for name, ours in _SETTINGS.items() if name in keywords}
    if (session := keywords.get("sagemaker_session")) is None:
        return settings
    where = "sagemaker_session"
    if getattr(session, "local_mode", False):
        raise SpecError("is of the local mode: leave it out and give instance_type='local'", field=where)
    if any(kind.__name__ == "PipelineSession" for kind in type(session).__mro__):  # its fit would send nothing
        raise SpecError("is of a pipeline: let a step of it call fit, with a plain session", field=where)
    region = getattr(session, "boto_region_name", None)
    if not isinstance(region, str):
        raise SpecError(
            "must be a sagemaker.Session", field=where, hint="give one, or leave it out and set AWS_REGION, AWS_PROFILE"
        )
    profile = getattr(vars(session).get("boto_session"), "profile_name", None)
    named = {"profile": profile} if isinstance(profile, str) and profile != "default" else {}
    return {**settings, "region": region, **named}


# ----------------------------------------------------------------------------------------------------- fields of a Job


def job_fields(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return a Job's flat fields, as `Job.make` takes them, for the `checked` keywords. Raises `SpecError`."""
    known = _checkpoints({**_DEFAULTS, **keywords})
    fields: dict[str, Any] = {ours: known[name] for name, ours in _FIELDS.items() if name in known}
    fields |= _code(known) | _hyperparameters(known.get("hyperparameters", {}))
    fields |= {"options": {NAME: _options(known)}, "stall_timeout": 0}  # v2 lets a silent script run on
    if not str(known.get("entry_point", "")).endswith(".sh"):
        fields["launcher"] = _launcher(known.get("distribution", {}))
    elif known.get("distribution"):
        raise SpecError(
            "starts Python, not a shell script", field="distribution", hint="leave it out, or give train.py"
        )
    if "base_job_name" in known:
        fields["name"] = re.sub(r"[^a-z0-9]+", "-", str(known["base_job_name"]).lower())[:40].strip("-")
    if "tags" in known or LINEAGE in known:
        fields["tags"] = _tags(known)
    if "metric_definitions" in known:
        fields["metrics"] = _metrics(known["metric_definitions"])
    if "max_wait" in known:
        fields["max_wait"] = _max_wait(known)
    if "model_uri" in known:
        fields["inputs"] = {known["model_channel_name"]: known["model_uri"]}
    return fields


def _code(known: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the shipped files: ``source_dir`` with its requirements.txt, or else the script alone."""
    given, entry = known.get("source_dir"), known.get("entry_point")
    if given is not None:
        if url_scheme(str(given)):
            raise SpecError(f"{given} is no folder of this machine", field="source_dir", hint="give a folder")
        return {"requirements": "requirements.txt"} if (Path(given) / "requirements.txt").is_file() else {}
    if not isinstance(entry, (str, PurePath)) or not str(entry).strip():
        raise SpecError("is missing: the script to run, such as 'train.py'", field="entry_point")
    script = Path(entry)
    escaped = re.sub(r"([\\*?\[\] ])", r"\\\1", script.name)
    return {"entry_point": script.name, "source_dir": str(script.parent), "exclude": ["/*", f"!/{escaped}"]}


def _hyperparameters(values: Any) -> dict[str, Any]:
    """Return the fields that give a script the flags of AWS's toolkit.

    Ours differ for a name of one letter, and for a value that is neither a text nor a number.
    """
    table = table_of(values, "hyperparameters")
    plain = all(len(key) > 1 and type(value) in (str, int, float) for key, value in table.items())
    if plain or any(value is None for value in table.values()):  # the Job refuses None, and says why
        return {"hyperparameters": table}
    try:
        read = json.loads(json.dumps(table))
    except (TypeError, ValueError):  # the Job refuses what is not JSON, too
        return {"hyperparameters": table}
    args = []
    for key, value in sorted(read.items()):
        if isinstance(value, dict):
            value = ",".join(f"{name}={item}" for name, item in sorted(value.items()))
        args += [f"-{key}" if len(key) == 1 else f"--{key}", str(value)]
    return {"hyperparameters": table, "hyperparameter_style": "none", "args": args}


_TORCH = ("torch_distributed", "pytorchddp")
_TORCHRUN = "give {'torch_distributed': {'enabled': True}}"
_DISTRIBUTIONS_REFUSED = {
    "mpi": f"no mpirun is there to start ranks; {_TORCHRUN}, and let the script read RANK and WORLD_SIZE",
    "smdistributed": f"{_TORCHRUN}; then init_process_group('smddp') in the script for its data parallelism, or"
    " 'mp_parameters' among the hyperparameters and its image as image_uri for its model parallelism",
    "pytorchxla": f"{_TORCHRUN}, and an image with torch_xla as image_uri",
    "parameter_server": f"PyTorch has none; {_TORCHRUN}",
    "multi_worker_mirrored_strategy": f"it is TensorFlow's; {_TORCHRUN}",
    "instance_groups": REFUSED["instance_groups"],
}


def _launcher(distribution: Any) -> str:
    where, launcher = "distribution", "python"
    known = [*_TORCH, *_DISTRIBUTIONS_REFUSED]
    for name, part in table_of(distribution, where).items():
        if name not in known:
            raise SpecError(f"{name!r} is not known", field=where, hint=did_you_mean(name, known))
        if name != "instance_groups" and not _is_enabled(part):
            continue
        if name in _DISTRIBUTIONS_REFUSED:
            raise SpecError(f"is not carried over: {_DISTRIBUTIONS_REFUSED[name]}", field=f"{where}.{name}")
        if more := [key for key, value in part.items() if key != "enabled" and value]:
            raise SpecError("is not carried over: torchrun starts the ranks, not mpirun", field=f"{where}.{more[0]}")
        launcher = "torchrun"
    return launcher


def _is_enabled(part: Any) -> bool:
    """Return True if a part of ``distribution``, or anything in it, is enabled."""
    return isinstance(part, Mapping) and (bool(part.get("enabled")) or any(map(_is_enabled, part.values())))


def _options(known: Mapping[str, Any]) -> dict[str, Any]:
    packed = "NONE" if known.get("disable_output_compression") else "GZIP"
    options: dict[str, Any] = {"OutputDataConfig": {"CompressionType": packed}}
    if "metric_definitions" in known:
        line = r"^\[a[0-9.]+ n[0-9]+ r[0-9]+ #[0-9]+\] "  # the platform sees a rank's line with this prefix
        definitions = [
            {"Name": name, "Regex": line + regex[1:] if regex.startswith("^") else regex}
            for name, regex in _metrics(known["metric_definitions"]).items()
        ]
        known = {"enable_sagemaker_metrics": True, **known, "metric_definitions": definitions}
    for name, where in _OPTIONS.items():
        if name not in known or (name == "training_repository_access_mode" and known[name] == "Platform"):
            continue  # Platform is the default
        *path, last = where.split(".")
        inner = options
        for key in path:
            inner = inner.setdefault(key, {})
        inner[last] = known[name]
    return options


def _pairs(value: Any, key: str, item: str, where: str, also: str = "") -> dict[str, Any]:
    """Return a list of ``{key: …, item: …}``, as AWS writes tables, as one dict."""
    pairs = value if isinstance(value, (list, tuple)) else [value]
    if not all(isinstance(pair, Mapping) and set(pair) == {key, item} for pair in pairs):
        raise SpecError(f"must be {also}a list of {{'{key}': …, '{item}': …}}", field=where)
    return {pair[key]: pair[item] for pair in pairs}


def _metrics(definitions: Any) -> dict[str, str]:
    where = "metric_definitions"
    return {
        name: text_of(regex, f"{where}.{name}") for name, regex in _pairs(definitions, "Name", "Regex", where).items()
    }


def _tags(known: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tags, with the one by which jobs with the same ``checkpoint_s3_uri`` find each other."""
    given = known.get("tags", {})
    tags = dict(given) if isinstance(given, Mapping) else _pairs(given, "Key", "Value", "tags", "a dict, or ")
    if LINEAGE in known:
        uri = text_of(known[LINEAGE], LINEAGE)
        if url_scheme(uri) != "s3":
            raise SpecError(f"{uri!r} is not a URL of S3", field=LINEAGE, hint="write s3://BUCKET/PREFIX")
        tags[LINEAGE] = uri.rstrip("/")
    return tags


def _checkpoints(known: dict[str, Any]) -> dict[str, Any]:
    """Return the keywords with ``{checkpoint_dir}`` for each value that is the folder ``checkpoint_local_path``.

    Raises `SpecError` for a folder that the script does not get from them: files that it writes there would be lost.
    """
    where = "checkpoint_local_path"
    folder = text_of(known.get(where, CHECKPOINTS), where).rstrip("/")
    if f"{folder}/".startswith(f"{CHECKPOINTS}/"):
        return known
    tables = {name: table_of(known.get(name, {}), name) for name in ("hyperparameters", "environment")}
    replaced = {
        name: {
            key: "{checkpoint_dir}" if isinstance(value, str) and value.rstrip("/") == folder else value
            for key, value in table.items()
        }
        for name, table in tables.items()
    }
    if replaced == tables:
        why = f"{folder!r} is not kept here, and the script is not given it"
        how = f"write to {CHECKPOINTS}, or give the folder to the script as a hyperparameter"
        raise SpecError(why, field=where, hint=how)
    return {**known, **replaced}


def _max_wait(known: Mapping[str, Any]) -> int:
    """Return the seconds of waiting alone, at least one."""
    if not known.get("use_spot_instances"):
        raise SpecError("is for use_spot_instances=True", field="max_wait", hint="leave it out")
    whole, run = (parse_duration(known[name], field=name) for name in ("max_wait", "max_run"))
    if whole < run:
        why = f"counts the running time too, so it is at least max_run ({run}), not {whole}"
        raise SpecError(why, field="max_wait")
    return max(1, whole - run)


# --------------------------------------------------------------------------------------------------------------- inputs

_READ = "the script reads files as they are"
_MODEL = "give the URL of the model's files"
_CHANNEL_REFUSED = {
    "CompressionType": f"{_READ}; let it open them with gzip",
    "RecordWrapperType": _READ,
    "ShuffleConfig": f"{_READ}, in the order of its own sampler",
    "TargetAttributeName": _READ,
    "AttributeNames": _READ,
    "InstanceGroupNames": "all nodes of a run are alike",
    "HubAccessConfig": _MODEL,
    "ModelAccessConfig": _MODEL,
}


def inputs_of(inputs: Any, *, input_mode: str | None = None) -> dict[str, Input]:
    """Return the inputs of ``fit``: a URL, a ``TrainingInput`` or ``FileSystemInput`` of either SDK, or a dict of them.

    An input without a name is the channel ``training``, as in v2. Raises `SpecError` for one that is refused.
    """
    if inputs is None:
        return {}
    table = inputs if isinstance(inputs, Mapping) else {"training": inputs}
    return {str(name): _input(value, f"inputs.{name}", input_mode) for name, value in table.items()}


def _input(value: Any, where: str, input_mode: str | None) -> Input:
    config = getattr(value, "config", None)
    if isinstance(value, (str, PurePath)):
        return Input(url=str(value), mode=_mode(input_mode, "input_mode"))
    if isinstance(value, Input):
        return value
    if not isinstance(config, Mapping) or "DataSource" not in config:
        raise SpecError(f"must be a URL or a TrainingInput, not {type(value).__name__}", field=where)
    source = config["DataSource"].get("S3DataSource", {})
    known = {*config, "S3Uri", "S3DataType", "S3DataDistributionType"}
    for key, item in {**config, **source}.items():
        why = _CHANNEL_REFUSED.get(key, "" if key in known else f"{NATIVE}(options=…) reaches the request itself")
        if why and item not in (None, "None"):
            raise SpecError(f"{key} is not carried over: {why}", field=where)
    mode = _mode(config.get("InputMode") or input_mode, where)
    if "FileSystemDataSource" in config["DataSource"]:
        return _file_system(config["DataSource"]["FileSystemDataSource"], where)
    if (kind := source.get("S3DataType", "S3Prefix")) != "S3Prefix":
        raise SpecError(f"S3DataType {kind} is not carried over: give the URL of a folder or file", field=where)
    return Input(url=source.get("S3Uri"), mode=mode, shard=source.get("S3DataDistributionType") == "ShardedByS3Key")


def _mode(mode: Any, where: str) -> str:
    if mode == "Pipe":
        raise SpecError("Pipe is not carried over: FastFile streams from S3 too, as files", field=where)
    return "mount" if mode is not None and choice_of(mode, ("File", "FastFile"), where) == "FastFile" else "auto"


def _file_system(source: Mapping[str, Any], where: str) -> Input:
    if source.get("FileSystemAccessMode", "ro") != "ro":
        why = "rw is not carried over: a file system is mounted read-only; results go to the store"
        raise SpecError(why, field=where)
    scheme = {"EFS": "efs", "FSxLustre": "fsx"}[choice_of(source.get("FileSystemType"), ("EFS", "FSxLustre"), where)]
    system, folder = (text_of(source.get(key), where) for key in ("FileSystemId", "DirectoryPath"))
    return Input(url=f"{scheme}://{system}/{folder.strip('/')}")
