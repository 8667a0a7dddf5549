"""Translate the keywords of SageMaker's SDK v2 (2.257.7, its last release) into a Job's fields, settings and inputs.

`CARRIED`, `WITHOUT_EFFECT` and `REFUSED` hold every keyword of its ``PyTorch``. Other keywords do not exist there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

from ..errors import SpecError
from ..job.job import Input
from ..validate import choice_of, did_you_mean, parse_duration, table_of, text_of, url_scheme

NAME = "sagemaker"
CHECKPOINTS = "/opt/ml/checkpoints"
LINEAGE = "checkpoint_s3_uri"

WITHOUT_EFFECT: dict[str, Any] = {  # with the value that it may have (...: any)
    "container_log_level": ...,
    "py_version": ...,
    "disable_profiler": True,
    "debugger_hook_config": False,
    "checkpoint_local_path": CHECKPOINTS,
}
_REFUSED = """
code_location: leave it out, because the code lies in the store (output_path)
git_config: check the repository out and give source_dir
tensorboard_output_config: write event files to CLOUDTRAIN_ARTIFACT_DIR; pull brings them
compiler_config: call torch.compile in the script
training_recipe: give the script that the recipe starts as entry_point, and its values as hyperparameters
recipe_overrides: give the values as hyperparameters
instance_groups: give instance_type and instance_count, because all nodes of a run are alike
container_entry_point: give a shell script as entry_point ('run.sh')
container_arguments: give hyperparameters
"""
_NATIVE = "rules profiler_config enable_sagemaker_metrics enable_infra_check enable_session_tag_chaining training_plan"
_NATIVE += " max_retry_attempts instance_placement_config training_repository_access_mode"
_NATIVE += " training_repository_credentials_provider_arn"
REFUSED = dict(line.split(": ", 1) for line in _REFUSED.strip().splitlines())
REFUSED |= dict.fromkeys(_NATIVE.split(), "give it in the API's words: cloudtrain.Estimator(options={'sagemaker': …})")
"""Keyword: what to do instead."""

_DEFAULTS = {"max_run": 24 * 3600, "instance_count": 1, "model_channel_name": "model"}
_FIELDS = {"image_uri": "image", "environment": "env", "max_run": "max_runtime", "volume_size": "disk_gb"}
_FIELDS |= {"use_spot_instances": "spot", "entry_point": "entry_point", "source_dir": "source_dir"}
_FIELDS |= {name: name for name in ("dependencies", "instance_count", "instance_type")}
SETTINGS = {"keep_alive_period_in_seconds": "keep_alive_period", "enable_remote_debug": "debug_shell"}
SETTINGS |= {name: name for name in ("role", "framework_version", "subnets", "security_group_ids", "volume_kms_key")}
SETTINGS |= {name: name for name in ("output_kms_key", "encrypt_inter_container_traffic", "enable_network_isolation")}
_OTHERS = "hyperparameters distribution max_wait disable_output_compression tags"
_OTHERS += " output_path base_job_name input_mode model_uri model_channel_name metric_definitions sagemaker_session"
CARRIED = frozenset({*_FIELDS, *SETTINGS, LINEAGE, *_OTHERS.split()})


def checked(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given keywords that are carried over; raise `SpecError` for one that is not.

    None and an empty collection, v2's own defaults, count as not given.
    """
    known = [*CARRIED, *WITHOUT_EFFECT, *REFUSED]
    found = {name: value for name, value in given.items() if value is not None and value not in ("", [], (), {})}
    for name in given:
        if name not in known:
            why, near = "PyTorch of the SageMaker SDK v2 has no such keyword", did_you_mean(name, known)
            raise SpecError(why, field=name, hint=near)
    for name, value in found.items():
        if name in REFUSED:
            raise SpecError(f"is not carried over: {REFUSED[name]}", field=name)
        if name in WITHOUT_EFFECT and WITHOUT_EFFECT[name] not in (..., value):
            raise SpecError(f"is carried over as {WITHOUT_EFFECT[name]!r} alone, not {value!r}", field=name)
    return {name: value for name, value in found.items() if name in CARRIED}


def job_fields(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return a Job's flat fields, as `Job.make` takes them, for the `checked` keywords. Raises `SpecError`."""
    known = {**_DEFAULTS, **keywords}
    fields: dict[str, Any] = {ours: known[name] for name, ours in _FIELDS.items() if name in known}
    fields |= _code(known) | _hyperparameters(known.get("hyperparameters", {}))
    packed = "NONE" if known.get("disable_output_compression") else "GZIP"
    fields["options"] = {NAME: {"OutputDataConfig": {"CompressionType": packed}}}
    fields["stall_timeout"] = 0  # v2 lets a silent script run on
    if not str(known.get("entry_point", "")).endswith(".sh"):
        fields["launcher"] = _launcher(known.get("distribution", {}))
    if "base_job_name" in known:
        fields["name"] = re.sub(r"[^a-z0-9]+", "-", str(known["base_job_name"]).lower())[:40].strip("-")
    if "tags" in known or LINEAGE in known:
        fields["tags"] = _tags(known)
    if "metric_definitions" in known:
        fields["metrics"] = _pairs(known["metric_definitions"], "Name", "Regex", "metric_definitions")
    if "max_wait" in known:
        fields["max_wait"] = _max_wait(known)
    if "model_uri" in known:
        fields["inputs"] = {known["model_channel_name"]: known["model_uri"]}
    return fields


def _code(known: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the shipped files: ``source_dir`` with its requirements.txt, or else the script alone."""
    if "source_dir" in known:
        has_requirements = (Path(known["source_dir"]) / "requirements.txt").is_file()
        return {"requirements": "requirements.txt"} if has_requirements else {}
    script = Path(text_of(str(known.get("entry_point", "")), "entry_point"))
    escaped = re.sub(r"([\\*?\[\] ])", r"\\\1", script.name)
    return {"entry_point": script.name, "source_dir": str(script.parent), "exclude": ["/*", f"!/{escaped}"]}


def _hyperparameters(values: Any) -> dict[str, Any]:
    """Return the fields that give a script the flags of AWS's toolkit.

    Ours differ for a name of one letter, and for a value that is neither a text nor a number.
    """
    table = table_of(values, "hyperparameters")
    if all(len(key) > 1 and type(value) in (str, int, float) for key, value in table.items()):
        return {"hyperparameters": table}
    try:
        read = json.loads(json.dumps(table))
    except (TypeError, ValueError):  # the Job refuses what is not JSON
        return {"hyperparameters": table}
    args = []
    for key, value in sorted(read.items()):
        if isinstance(value, dict):
            value = ",".join(f"{name}={item}" for name, item in sorted(value.items()))
        args += [f"-{key}" if len(key) == 1 else f"--{key}", str(value)]
    return {"hyperparameters": table, "hyperparameter_style": "none", "args": args}


def _launcher(distribution: Any) -> str:
    """Return the launcher of ``distribution``; parts that are not enabled have no effect."""
    launcher = "python"
    for name, part in table_of(distribution, "distribution").items():
        if not table_of(part, f"distribution.{name}").get("enabled", True):
            continue
        more = [key for key, value in part.items() if key != "enabled" and value]
        if name not in ("torch_distributed", "pytorchddp") or more:
            why, where = "is not carried over: torchrun starts the ranks", ".".join(["distribution", name, *more[:1]])
            raise SpecError(why, field=where, hint="give {'torch_distributed': {'enabled': True}}")
        launcher = "torchrun"
    return launcher


def _pairs(value: Any, key: str, item: str, where: str) -> dict[str, str]:
    """Return a list of ``{key: …, item: …}``, as AWS writes tables, as one dict of texts."""
    pairs = value if isinstance(value, (list, tuple)) else [value]
    if not all(isinstance(pair, Mapping) and set(pair) == {key, item} for pair in pairs):
        raise SpecError(f"must be a list of {{'{key}': …, '{item}': …}}", field=where)
    return {pair[key]: text_of(pair[item], f"{where}.{pair[key]}", empty=True) for pair in pairs}


def _tags(known: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tags, with the one by which jobs with the same ``checkpoint_s3_uri`` find each other."""
    given = known.get("tags", {})
    tags = dict(given) if isinstance(given, Mapping) else _pairs(given, "Key", "Value", "tags")
    if LINEAGE in known:
        uri = text_of(known[LINEAGE], LINEAGE)
        if url_scheme(uri) != "s3":
            raise SpecError(f"{uri!r} is not a URL of S3", field=LINEAGE, hint="write s3://BUCKET/PREFIX")
        tags[LINEAGE] = uri.rstrip("/")
    return tags


def _max_wait(known: Mapping[str, Any]) -> int:
    """Return the seconds of waiting alone, at least one."""
    whole, run = (parse_duration(known[name], field=name) for name in ("max_wait", "max_run"))
    if whole < run or not known.get("use_spot_instances"):
        raise SpecError(f"is for use_spot_instances=True, and at least max_run ({run} s)", field="max_wait")
    return max(1, whole - run)


@dataclass(frozen=True)
class TrainingInput:
    """A channel of S3, with v2's arguments. Others do not exist: the script gets the files of a URL as they are."""

    s3_data: str
    distribution: str | None = None
    content_type: str | None = field(default=None, kw_only=True)  # has no effect
    input_mode: str | None = field(default=None, kw_only=True)


def inputs_of(inputs: Any, *, input_mode: str | None = None) -> dict[str, Input]:
    """Return the inputs of ``fit``: a URL, a `TrainingInput`, an Input, or a dict of them.

    An input without a name is the channel ``training``, as in v2. Raises `SpecError` for one that is refused.
    """
    if inputs is None:
        return {}
    table = inputs if isinstance(inputs, Mapping) else {"training": inputs}
    return {str(name): _input(value, f"inputs.{name}", input_mode) for name, value in table.items()}


def _input(value: Any, where: str, input_mode: str | None) -> Input:
    if isinstance(value, (str, PurePath)):
        value = TrainingInput(str(value))
    if isinstance(value, Input):
        return value
    if not isinstance(value, TrainingInput):
        hint = "import TrainingInput from cloudtrain.compat.sagemaker_v2; for a file system, give efs://ID/FOLDER"
        raise SpecError(f"must be a URL or a TrainingInput, not {type(value).__name__}", field=where, hint=hint)
    kinds = ("FullyReplicated", "ShardedByS3Key")
    shard = choice_of(value.distribution or kinds[0], kinds, f"{where}.distribution") == kinds[1]
    return Input(url=value.s3_data, mode=_mode(value.input_mode or input_mode, where), shard=shard)


def _mode(mode: Any, where: str) -> str:
    if mode == "Pipe":
        raise SpecError("Pipe is not carried over: FastFile streams from S3 too, as files", field=where)
    return "mount" if mode is not None and choice_of(mode, ("File", "FastFile"), where) == "FastFile" else "auto"
