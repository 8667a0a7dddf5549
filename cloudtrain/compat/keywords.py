"""What becomes of each keyword of SageMaker's SDK v2 (2.257.7, the last one): carried over, without effect, or refused.

`CARRIED`, `WITHOUT_EFFECT` and `REFUSED` hold every keyword of its ``PyTorch``, each with a word on why; a keyword in
none of them is no keyword of that SDK. The functions below make a Job's fields, settings and inputs of those carried.
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

__all__ = [
    "CARRIED",
    "DEFAULTS",
    "LINEAGE",
    "NAME",
    "REFUSED",
    "WITHOUT_EFFECT",
    "checked",
    "inputs_of",
    "job_fields",
    "keyword_of",
    "settings_of",
]

NAME = "sagemaker"
DEFAULT_CHANNEL = "training"
"""What v2 calls the one input that has no name; ours is ``train``."""
CHECKPOINTS = "/opt/ml/checkpoints"
LINEAGE = "checkpoint_s3_uri"
NATIVE = "cloudtrain.Estimator"

CARRIED: dict[str, str] = {
    "entry_point": "`entry_point`",
    "source_dir": "`source_dir`; without one the script ships alone, as it did",
    "dependencies": "`dependencies`",
    "hyperparameters": "`hyperparameters`; the script gets the very flags of AWS's toolkit",
    "environment": "`env`",
    "distribution": "`launcher`: `torch_distributed` and `pytorchddp` are torchrun; none is one process a node",
    "instance_count": "`instance_count`",
    "instance_type": "`instance_type`; `local` is this machine, an `image_uri` with it a container there",
    "image_uri": "`image`",
    "framework_version": "setting `framework_version`; none is the newest of AWS's images",
    "py_version": "compared with the image of that `framework_version`, which has one Python",
    "role": "setting `role`, an ARN",
    "volume_size": "`disk_gb`",
    "volume_kms_key": "setting `volume_kms_key`",
    "output_kms_key": "setting `output_kms_key`",
    "max_run": "`max_runtime`",
    "max_wait": "`max_wait`, which is without the running time: `max_wait - max_run`",
    "use_spot_instances": "`spot`",
    "max_retry_attempts": "`RetryStrategy` among the options, SageMaker's own restarts, not our `retries`; none is 3",
    "keep_alive_period_in_seconds": "setting `keep_alive_period`",
    "output_path": "`store`; none is the setting, else `cloudtrain` in the bucket that v2 takes by default",
    "disable_output_compression": "`OutputDataConfig` among the options; a `model.tar.gz` unless True",
    "base_job_name": "`name`, in lower case",
    "tags": "`tags`",
    "subnets": "setting `subnets`",
    "security_group_ids": "setting `security_group_ids`",
    "encrypt_inter_container_traffic": "setting `encrypt_inter_container_traffic`",
    "enable_network_isolation": "setting `enable_network_isolation`",
    "enable_remote_debug": "setting `debug_shell`",
    "input_mode": "`mode` of the inputs: FastFile is `mount`; Pipe is refused",
    "model_uri": "an input named by `model_channel_name`",
    "model_channel_name": "the name of that input",
    "metric_definitions": "`metrics`; also `MetricDefinitions` among the options, with our prefix after a leading `^`",
    "checkpoint_s3_uri": "tag `checkpoint_s3_uri`: checkpoints are kept in the run, and the next job with the same URI"
    " resumes from them",
    "checkpoint_local_path": f"`{CHECKPOINTS}` or below; any other folder if it is among the hyperparameters or in the"
    " environment, as `{checkpoint_dir}`",
    "enable_sagemaker_metrics": "`EnableSageMakerMetricsTimeSeries` among the options; True with metrics, as there",
    "enable_infra_check": "`InfraCheckConfig` among the options",
    "enable_session_tag_chaining": "`SessionChainingConfig` among the options",
    "training_plan": "`TrainingPlanArn` among the options",
    "instance_placement_config": "`InstancePlacementConfig` among the options",
    "training_repository_access_mode": "`TrainingImageConfig` among the options",
    "training_repository_credentials_provider_arn": "`TrainingImageConfig` among the options",
    "sagemaker_session": "settings `region` and `profile`, the default bucket; fit refuses keys given by hand",
}

WITHOUT_EFFECT: dict[str, tuple[Any, str]] = {
    "container_log_level": (
        ...,
        "it was the level of AWS's toolkit, which does not run; the script's logging is its own",
    ),
    "disable_profiler": (
        True,
        f"no profiler is attached; {NATIVE}(options={{'{NAME}': {{'ProfilerConfig': …}}}})",
    ),
    "debugger_hook_config": (
        False,
        f"no debugger is attached; {NATIVE}(options={{'{NAME}': {{'DebugHookConfig': …}}}})",
    ),
}
"""Keyword: the value that it may have (``...``: any) and why it changes nothing."""

REFUSED: dict[str, str] = {
    "code_location": "leave it out: code lies in the store (output_path), at its own digest, uploaded once",
    "git_config": "check the repository out and give source_dir; the commit is recorded with the run",
    "rules": f"no debugger is attached; {NATIVE}(options={{'{NAME}': {{'DebugRuleConfigurations': …}}}})",
    "profiler_config": f"no profiler is attached; {NATIVE}(options={{'{NAME}': {{'ProfilerConfig': …}}}})",
    "tensorboard_output_config": "write event files to CLOUDTRAIN_ARTIFACT_DIR; pull brings them",
    "compiler_config": "call torch.compile in the script",
    "training_recipe": "give the script that the recipe starts as entry_point, and its values as hyperparameters",
    "recipe_overrides": "give the values as hyperparameters",
    "instance_groups": "all nodes of a run are alike; give instance_type and instance_count",
    "container_entry_point": "the image's own start is cloudtrain's; give a shell script as entry_point ('run.sh')",
    "container_arguments": "the image's own start is cloudtrain's; give hyperparameters",
}
"""Keyword: what to do instead."""

DEFAULTS: dict[str, Any] = {"max_run": 24 * 3600, "instance_count": 1, "model_channel_name": "model"}

_RENAMED = {"image_uri": "image", "environment": "env", "max_run": "max_runtime", "volume_size": "disk_gb",
            "use_spot_instances": "spot"}  # fmt: skip
_SAME = ("entry_point", "source_dir", "dependencies", "instance_count", "instance_type")
_SETTINGS = {"keep_alive_period_in_seconds": "keep_alive_period", "enable_remote_debug": "debug_shell"} | {
    name: name
    for name in (
        *("role", "framework_version", "subnets", "security_group_ids", "volume_kms_key", "output_kms_key"),
        *("encrypt_inter_container_traffic", "enable_network_isolation"),
    )
}
_IMAGE_CONFIG = ("AlgorithmSpecification", "TrainingImageConfig")
_OPTIONS: dict[str, tuple[str, ...]] = {
    "max_retry_attempts": ("RetryStrategy", "MaximumRetryAttempts"),
    "metric_definitions": ("AlgorithmSpecification", "MetricDefinitions"),
    "enable_sagemaker_metrics": ("AlgorithmSpecification", "EnableSageMakerMetricsTimeSeries"),
    "enable_infra_check": ("InfraCheckConfig", "EnableInfraCheck"),
    "enable_session_tag_chaining": ("SessionChainingConfig", "EnableSessionTagChaining"),
    "training_plan": ("ResourceConfig", "TrainingPlanArn"),
    "instance_placement_config": ("ResourceConfig", "InstancePlacementConfig"),
    "training_repository_access_mode": (*_IMAGE_CONFIG, "TrainingRepositoryAccessMode"),
    "training_repository_credentials_provider_arn": (
        *(*_IMAGE_CONFIG, "TrainingRepositoryAuthConfig", "TrainingRepositoryCredentialsProviderArn"),
    ),
}
_THEIRS = {
    **{ours: theirs for theirs, ours in _RENAMED.items()},
    **{f"resources.{ours}": theirs for theirs, ours in _RENAMED.items()},
    **{f"{NAME}.{ours}": theirs for theirs, ours in _SETTINGS.items()},
    **{ours: theirs for theirs, ours in _SETTINGS.items()},
    **{f"source.{name}": name for name in ("entry_point", "dependencies")},
    **{f"resources.{name}": name for name in ("instance_count", "instance_type")},
    "source.path": "source_dir",
    "store": "output_path",
    "name": "base_job_name",
    "run_id": "job_name",
    "metrics": "metric_definitions",
}
_LINE = r"^\[a[0-9.]+ n[0-9]+ r[0-9]+ #[0-9]+\] "
"""How a rank's line begins where the platform itself looks at it."""
_MODES = {"File": "auto", "FastFile": "mount"}


# ------------------------------------------------------------------------------------------------------------- keywords


def checked(given: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords that are given and carried over. Raises `SpecError` for one that is not, with what to do instead.

    None and an empty collection, v2's own defaults, count as not given.
    """
    found = {}
    for name, value in given.items():
        if name not in CARRIED and name not in WITHOUT_EFFECT and name not in REFUSED:
            now = name.removeprefix("train_")  # v1's prefix
            known = [*CARRIED, *WITHOUT_EFFECT, *REFUSED]
            near = f"did you mean {now!r}?" if now in known else did_you_mean(now, known)
            raise SpecError("PyTorch of the SageMaker SDK v2 has no such keyword", field=name, hint=near)
        if value is None or (isinstance(value, (list, tuple, dict)) and not value):
            continue
        if name in REFUSED:
            raise SpecError(f"is not carried over: {REFUSED[name]}", field=name)
        if name in WITHOUT_EFFECT:
            allowed, why = WITHOUT_EFFECT[name]
            if allowed is not ... and value != allowed:
                raise SpecError(f"{value!r} is not carried over: {why}", field=name)
            continue
        found[name] = value
    return found


def keyword_of(field: str) -> str:
    """The keyword that a field of a Job, or a setting, comes from; the field itself where they are called the same."""
    parts = field.removeprefix("--set ").split(".")  # so the settings name what a constructor gave them
    for length in range(len(parts), 0, -1):
        if (theirs := _THEIRS.get(".".join(parts[:length]))) is not None:
            return ".".join([theirs, *parts[length:]])
    return field


def settings_of(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of provider SageMaker among the keywords, which `checked` gave."""
    settings = {ours: keywords[theirs] for theirs, ours in _SETTINGS.items() if theirs in keywords}
    return {**settings, **_session(keywords["sagemaker_session"])} if "sagemaker_session" in keywords else settings


def _session(session: Any) -> dict[str, Any]:
    """``region`` and ``profile`` of a ``sagemaker.Session``, or of anything that looks like one."""
    where = "sagemaker_session"
    if getattr(session, "local_mode", False):
        raise SpecError("is of the local mode: leave it out and give instance_type='local'", field=where)
    if any(kind.__name__ == "PipelineSession" for kind in type(session).__mro__):  # its fit would send nothing
        raise SpecError("is of a pipeline: let a step of it call fit, with a plain session", field=where)
    region = getattr(session, "boto_region_name", None)
    if not isinstance(region, str):
        raise SpecError("must be a sagemaker.Session; or leave it out and set AWS_REGION, AWS_PROFILE", field=where)
    profile = getattr(vars(session).get("boto_session"), "profile_name", None)
    return {"region": region, **({"profile": profile} if isinstance(profile, str) and profile != "default" else {})}


# ----------------------------------------------------------------------------------------------------- fields of a Job


def job_fields(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Flat fields of a Job, as `Job.make` takes them, of the keywords that `checked` gave. Raises `SpecError`."""
    known = {**DEFAULTS, **keywords}
    fields = {name: known[name] for name in _SAME if name in known}
    fields |= {ours: known[theirs] for theirs, ours in _RENAMED.items() if theirs in known}
    known, fields = _checkpoints(known, fields)
    fields |= _code(known) | _hyperparameters(known.get("hyperparameters", {}))
    fields |= {"options": {NAME: _options(known)}, "stall_timeout": 0}  # v2 lets a silent script run on
    if not str(known.get("entry_point", "")).endswith(".sh"):
        fields["launcher"] = _launcher(known.get("distribution", {}))
    elif known.get("distribution"):
        raise SpecError("starts Python, not a shell script; leave it out, or give train.py", field="distribution")
    if "base_job_name" in known:
        fields["name"] = re.sub(r"[^a-z0-9]+", "-", str(known["base_job_name"]).lower())[:40].strip("-")
    if "tags" in known or LINEAGE in known:
        fields["tags"] = _tags(known.get("tags", {})) | _lineage(known)
    if "metric_definitions" in known:
        fields["metrics"] = _metrics(known["metric_definitions"])
    if "max_wait" in known:
        fields["max_wait"] = _max_wait(known)
    if "model_uri" in known:
        fields["inputs"] = {known["model_channel_name"]: known["model_uri"]}
    return fields


def _code(known: Mapping[str, Any]) -> dict[str, Any]:
    """What ships, as v2 has it: ``source_dir`` with its requirements.txt, or else the script alone."""
    given, entry = known.get("source_dir"), known.get("entry_point")
    if given is not None:
        if url_scheme(str(given)):
            raise SpecError(f"{given} is no folder of this machine; give one", field="source_dir")
        has = (Path(given) / "requirements.txt").is_file()
        return {"requirements": "requirements.txt"} if has else {}
    if not isinstance(entry, (str, PurePath)) or not str(entry).strip():
        raise SpecError("is missing: the script to run, such as 'train.py'", field="entry_point")
    script = Path(entry)
    escaped = re.sub(r"([\\*?\[\] ])", r"\\\1", script.name)
    return {"entry_point": script.name, "source_dir": str(script.parent), "exclude": ["/*", f"!/{escaped}"]}


def _hyperparameters(values: Any) -> dict[str, Any]:
    """The flags that AWS's toolkit makes of them: ours, but for one-letter names, and values that are not plain."""
    table = table_of(values, "hyperparameters")
    plain = all(len(key) > 1 and type(value) in (str, int, float) for key, value in table.items())
    if plain or any(value is None for value in table.values()):  # None is refused by the Job, which says why
        return {"hyperparameters": table}
    try:
        read = json.loads(json.dumps(table))
    except (TypeError, ValueError):  # not JSON either: the same
        return {"hyperparameters": table}
    args = [part for key in sorted(read) for part in (f"-{key}" if len(key) == 1 else f"--{key}", _flag(read[key]))]
    return {"hyperparameters": table, "hyperparameter_style": "none", "args": args}


def _flag(value: Any) -> str:
    if isinstance(value, dict):
        return ",".join(f"{key}={item}" for key, item in sorted(value.items()))
    return str(value)


def _launcher(distribution: Any) -> str:
    where = "distribution"
    table = table_of(distribution, where)
    torch = ("torch_distributed", "pytorchddp")
    for name, told in table.items():
        if name not in (*torch, *_OTHER):
            raise SpecError(f"{name!r} is not known", field=where, hint=did_you_mean(name, [*torch, *_OTHER]))
        if name in _OTHER and (name == "instance_groups" or _enabled(told)):
            raise SpecError(f"is not carried over: {_OTHER[name]}", field=f"{where}.{name}")
        if name in torch and _enabled(told):
            for key in set(told) - {"enabled"}:
                if told[key]:
                    raise SpecError(
                        "is not carried over: torchrun starts the ranks, not mpirun", field=f"{where}.{key}"
                    )
    return "torchrun" if any(_enabled(table.get(name)) for name in torch) else "python"


def _enabled(told: Any) -> bool:
    """Whether a part of ``distribution`` is on: itself, or something in it."""
    return isinstance(told, Mapping) and (bool(told.get("enabled")) or any(map(_enabled, told.values())))


_TORCHRUN = "give {'torch_distributed': {'enabled': True}}"
_OTHER = {
    "mpi": f"no mpirun is there to start ranks; {_TORCHRUN}, and let the script read RANK and WORLD_SIZE",
    "smdistributed": f"{_TORCHRUN}; then init_process_group('smddp') in the script for its data parallelism, or"
    " 'mp_parameters' among the hyperparameters and its image as image_uri for its model parallelism",
    "pytorchxla": f"{_TORCHRUN}, and an image with torch_xla as image_uri",
    "parameter_server": f"PyTorch has none; {_TORCHRUN}",
    "multi_worker_mirrored_strategy": f"it is TensorFlow's; {_TORCHRUN}",
    "instance_groups": "all nodes of a run are alike; give instance_type and instance_count",
}


def _options(known: Mapping[str, Any]) -> dict[str, Any]:
    packed = "NONE" if known.get("disable_output_compression") else "GZIP"
    options: dict[str, Any] = {"OutputDataConfig": {"CompressionType": packed}}
    if "metric_definitions" in known:
        definitions = [
            {"Name": name, "Regex": regex if not regex.startswith("^") else _LINE + regex[1:]}
            for name, regex in _metrics(known["metric_definitions"]).items()
        ]
        known = {"enable_sagemaker_metrics": True, **known, "metric_definitions": definitions}
    for name, path in _OPTIONS.items():
        if name not in known or (name == "training_repository_access_mode" and known[name] == "Platform"):
            continue  # Platform is what it is without
        inner = options
        for key in path[:-1]:
            inner = inner.setdefault(key, {})
        inner[path[-1]] = known[name]
    return options


def _metrics(definitions: Any) -> dict[str, str]:
    where, pairs = "metric_definitions", definitions if isinstance(definitions, (list, tuple)) else [definitions]
    if not all(isinstance(pair, Mapping) and set(pair) == {"Name", "Regex"} for pair in pairs):
        raise SpecError("must be a list of {'Name': ..., 'Regex': ...}", field=where)
    return {pair["Name"]: text_of(pair["Regex"], f"{where}.{pair['Name']}") for pair in pairs}


def _lineage(known: Mapping[str, Any]) -> dict[str, str]:
    """Return the tag by which jobs with the same ``checkpoint_s3_uri`` find each other."""
    if LINEAGE not in known:
        return {}
    uri = text_of(known[LINEAGE], LINEAGE)
    if url_scheme(uri) != "s3":
        raise SpecError(f"{uri!r} is not a URL of S3", field=LINEAGE, hint="write s3://BUCKET/PREFIX")
    return {LINEAGE: uri.rstrip("/")}


def _checkpoints(known: dict[str, Any], fields: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return both with ``{checkpoint_dir}`` where a value is the folder of ``checkpoint_local_path``.

    Raises `SpecError` for a folder that the script cannot have been given so: what it writes there would be lost.
    """
    where = "checkpoint_local_path"
    if where not in known:
        return known, fields
    folder = text_of(known[where], where).rstrip("/")
    if f"{folder}/".startswith(f"{CHECKPOINTS}/"):
        return known, fields
    tables = {name: table_of(known.get(name, {}), name) for name in ("hyperparameters", "environment")}
    if not any(_is_folder(value, folder) for table in tables.values() for value in table.values()):
        why = f"{folder!r} is not kept here, and the script is not given it"
        how = f"write to {CHECKPOINTS}, or give the folder to the script as a hyperparameter"
        raise SpecError(why, field=where, hint=how)
    for name, table in tables.items():
        tables[name] = {key: "{checkpoint_dir}" if _is_folder(value, folder) else value for key, value in table.items()}
    return {**known, **tables}, {**fields, "env": tables["environment"]}


def _is_folder(value: Any, folder: str) -> bool:
    return isinstance(value, str) and value.rstrip("/") == folder


def _tags(tags: Any) -> dict[str, Any]:
    if isinstance(tags, Mapping):
        return dict(tags)
    pairs = tags if isinstance(tags, (list, tuple)) else [tags]
    if not all(isinstance(pair, Mapping) and set(pair) == {"Key", "Value"} for pair in pairs):
        raise SpecError("must be a dict, or a list of {'Key': …, 'Value': …}", field="tags")
    return {pair["Key"]: pair["Value"] for pair in pairs}


def _max_wait(known: Mapping[str, Any]) -> int:
    """Ours: the wait alone, at least a second."""
    if not known.get("use_spot_instances"):
        raise SpecError("is for use_spot_instances=True; leave it out", field="max_wait")
    whole, run = parse_duration(known["max_wait"], field="max_wait"), parse_duration(known["max_run"], field="max_run")
    if whole < run:
        raise SpecError(
            f"counts the running time too, so it is at least max_run ({run}), not {whole}", field="max_wait"
        )
    return max(1, whole - run)


# --------------------------------------------------------------------------------------------------------------- inputs


def inputs_of(inputs: Any, *, input_mode: str | None = None) -> dict[str, Input]:
    """Our inputs of what ``fit`` takes: a URL, a ``TrainingInput`` or ``FileSystemInput`` of either SDK, or a dict.

    One without a name is the channel ``training``, as v2 has it. Raises `SpecError` for what a channel cannot be here.
    """
    if inputs is None:
        return {}
    table = inputs if isinstance(inputs, Mapping) else {DEFAULT_CHANNEL: inputs}
    return {str(name): _input(value, f"inputs.{name}", input_mode) for name, value in table.items()}


def _input(value: Any, where: str, input_mode: str | None) -> Input:
    config = getattr(value, "config", None)
    if isinstance(value, (str, PurePath)):
        return Input(url=str(value), mode=_mode(input_mode, "input_mode"))
    if isinstance(value, Input):
        return value
    if not isinstance(config, Mapping) or "DataSource" not in config:
        raise SpecError(f"must be a URL or a TrainingInput, not {type(value).__name__}", field=where)
    for key, item in config.items():
        if key in _CHANNEL_REFUSED and item not in (None, "None"):
            raise SpecError(f"{key} is not carried over: {_CHANNEL_REFUSED[key]}", field=where)
    mode = _mode(config.get("InputMode") or input_mode, where)
    if "FileSystemDataSource" in config["DataSource"]:
        return _file_system(config["DataSource"]["FileSystemDataSource"], where)
    source = config["DataSource"].get("S3DataSource", {})
    for key in source:
        if key not in ("S3Uri", "S3DataType", "S3DataDistributionType"):
            why = _CHANNEL_REFUSED.get(key, f"{NATIVE}(options=…) reaches the request itself")
            raise SpecError(f"{key} is not carried over: {why}", field=where)
    if (kind := source.get("S3DataType", "S3Prefix")) != "S3Prefix":
        raise SpecError(f"S3DataType {kind} is not carried over: give the URL of a folder or file", field=where)
    return Input(url=source.get("S3Uri"), mode=mode, shard=source.get("S3DataDistributionType") == "ShardedByS3Key")


_READ = "the script reads files as they are"
_CHANNEL_REFUSED = {
    "CompressionType": f"{_READ}; let it open them with gzip",
    "RecordWrapperType": _READ,
    "ShuffleConfig": f"{_READ}, in the order of its own sampler",
    "TargetAttributeName": _READ,
    "AttributeNames": _READ,
    "InstanceGroupNames": "all nodes of a run are alike",
    "HubAccessConfig": "give the URL of the model's files",
    "ModelAccessConfig": "give the URL of the model's files",
}


def _mode(mode: Any, where: str) -> str:
    if mode == "Pipe":
        raise SpecError("Pipe is not carried over: FastFile streams from S3 too, as files", field=where)
    return "auto" if mode is None else _MODES[choice_of(mode, tuple(_MODES), where)]


def _file_system(source: Mapping[str, Any], where: str) -> Input:
    if source.get("FileSystemAccessMode", "ro") != "ro":
        raise SpecError(
            "rw is not carried over: a file system is mounted read-only; results go to the store", field=where
        )
    scheme = {"EFS": "efs", "FSxLustre": "fsx"}[choice_of(source.get("FileSystemType"), ("EFS", "FSxLustre"), where)]
    system, folder = (text_of(source.get(key), where) for key in ("FileSystemId", "DirectoryPath"))
    return Input(url=f"{scheme}://{system}/{folder.strip('/')}")
