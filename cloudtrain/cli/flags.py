"""The flags of a Job, made from its dataclass fields: names, reading, and the Job that they make."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Group, Parameter

from ..errors import SpecError
from ..job.job import FIELDS, FLAT_FIELDS, Job, anchored
from ..validate import read_table
from .key_value import SPELLINGS, merge, pairs, tree

SHORTS = {"instance_count": "-n"}
#: Group of the help -> its fields, each with the text after the flag.
FORMS = {
    "Job": {
        "name": "NAME", "entry_point": "SCRIPT", "source_dir": "DIR", "dependencies": "DIR", "requirements": "PATH",
        "exclude": "PATTERN", "image": "IMAGE", "launcher": "LAUNCHER", "hyperparameters": "NAME=VALUE",
        "hyperparameter_style": "STYLE", "env": "NAME=VALUE", "secrets": "NAME[=REFERENCE]", "tags": "NAME=VALUE",
        "webhook": "URL", "webhook_headers": "NAME=VALUE", "metrics": "NAME=REGEX", "interactive": "", "debug_nccl": "",
        "options": "PROVIDER.PATH=JSON", "on": "PROVIDER.FIELD=JSON",
    },
    "Machines": {
        "instance_count": "INT[:INT]", "instance_type": "TYPE", "gpu": "GPU[:COUNT]", "total_gpus": "INT",
        "gpu_memory": "SIZE",
        "nproc_per_node": "INT", "cpus": "INT", "memory_gb": "INT", "disk_gb": "INT", "shm_gb": "INT", "spot": "",
    },
    "Data": {"inputs": "CHANNEL=URL", "outputs": "", "max_outputs": "SIZE"},
    "Limits": {
        "max_runtime": "DURATION", "max_wait": "DURATION", "max_cost": "USD", "max_gpu_hours": "HOURS",
        "retries": "INT", "stall_timeout": "DURATION", "min_gpu_util": "PERCENT for DURATION",
        "node_check": "", "keep_warm": "DURATION",
    },
    "Resume": {"resume_from": "RUN", "checkpoint_paths": "GLOB", "keep_checkpoints": "INT"},
}  # fmt: skip
_GROUPS = {name: Group(name, sort_key=number) for number, name in enumerate(FORMS, start=1)}
_FORM_OF = {flat: (_GROUPS[name], form) for name, fields in FORMS.items() for flat, form in fields.items()}
#: The words after ``--``, which has no flag; and the first number of ``--nodes 2:4``.
NOT_FLAGS = ("args", "min_instance_count")


def flag_names(flat: str) -> tuple[str, ...]:
    """Return the flags that set the Job's flat field."""
    names = [SPELLINGS.get(flat, "--" + flat.replace("_", "-")), SHORTS.get(flat, "")]
    return tuple(filter(None, names))


def _kind(flat: str) -> str:
    """Return ``bool``, ``int``, ``float``, ``str``, ``tuple`` or ``dict``, from the field's annotation."""
    return str(FIELDS[flat].type).partition("[")[0].partition(" ")[0]


def _annotation(flat: str) -> Any:
    kind, text, (group, form) = _kind(flat), FIELDS[flat].metadata["help"], _FORM_OF[flat]
    hints = {"bool": bool | None, "tuple": list[str] | None, "dict": list[str] | None}
    hint: Any = hints.get(kind, str | None)
    return Annotated[
        hint,
        Parameter(
            name=flag_names(flat),
            help=f"{text}; repeatable" if kind in ("tuple", "dict") else text,
            metavar=form,
            group=group,
            negative_iterable="",
            json_list=False,
        ),
    ]


if TYPE_CHECKING:

    class JobFlags:
        """Fields of a Job from the command line; None for each one not given."""

else:
    JobFlags = dataclasses.make_dataclass(
        "JobFlags",
        [(flat, _annotation(flat), None) for flat in FLAT_FIELDS if flat not in NOT_FLAGS],
        frozen=True,
        kw_only=True,
        namespace={"__module__": __name__},  # or Python 3.10 puts it in `types`, which cyclopts takes for a builtin
    )


def job_of(script: str | None, module: str | None, flags: JobFlags, args: list[str] | None, *, cwd: Path) -> Job:
    """Return the Job that a command line describes.

    ``script`` is the entry point, or a job file (``.toml``, ``.json``) whose fields the flags override: tables by key,
    everything else whole. ``args`` (the words after ``--``) replaces its args. ``module`` is that of ``-m``.
    """
    fields: dict[str, Any] = {}
    given = given_flags(flags)
    entries = [given["entry_point"]] if "entry_point" in given else []
    if script is not None and script.endswith((".toml", ".json")):
        fields = _read_job_file(script, cwd)
    elif script is not None:
        entries.append(script)
    if module is not None:
        entries.append(f"-m {module}")
    if len(entries) > 1:
        raise SpecError(
            f"two scripts: {entries[0]!r} and {entries[1]!r}", field="source.entry_point", hint="name one of them"
        )
    if entries:
        given["entry_point"] = entries[0]
    for flat, value in given.items():
        if isinstance(value, dict) and isinstance(fields.get(flat), Mapping):
            value = merge(fields[flat], value) if flat in ("options", "on") else {**fields[flat], **value}
        fields.pop(flat, None)  # to the end: later fields win over [source] and [resources] of a job file
        fields[flat] = value
    if args is not None:
        fields["args"] = tuple(args)
    try:
        return Job.from_dict(fields)
    except SpecError as exc:
        from ..settings.schema import described
        from .init import JOB

        if exc.field == "source.entry_point" and script is None and not entries and (cwd / JOB).is_file():
            hint = f"to use {JOB}, put it after the verb, as in: cloudtrain submit {JOB}"
            raise SpecError("no script and no job file", field=exc.field, hint=hint) from None
        raise described(exc) from None


def given_flags(flags: JobFlags) -> dict[str, Any]:
    """Return flat field -> value, for the flags that were given."""
    raw = {f.name: getattr(flags, f.name) for f in dataclasses.fields(flags)}  # type: ignore[arg-type]
    return {flat: _value(flat, value) for flat, value in raw.items() if value is not None}


def _value(flat: str, value: Any) -> Any:
    kind, flag = _kind(flat), flag_names(flat)[0]
    if flat in ("options", "on"):
        return tree(flag, value, field=flat)
    if flat == "secrets":
        value = [text if "=" in text else f"{text}=env:{text}" for text in value]
    if flat == "metrics" and (bare := next((text for text in value if "=" not in text), None)) is not None:
        how = f"{flag} '{bare}={bare} ([0-9.]+)'"
        raise SpecError(f"{flag} {bare!r} has no regular expression", field=flat, hint=how)
    if kind == "dict":
        return pairs(flag, value, field=flat)
    if kind == "tuple":
        return tuple(value)
    if kind in ("int", "float"):
        return _number(value, int if kind == "int" else float)
    return value


def _number(text: str, kind: type[int] | type[float]) -> int | float | str:
    try:
        return kind(text)
    except ValueError:
        return text  # the Job reads '12h', and refuses 'x'


def _refuse_settings(data: Mapping[str, Any], script: str) -> None:
    """Raise `SpecError` for a setting in a job file: a job says nothing about an account."""
    from ..settings.settings import setting_hint

    for key in data.keys() - FLAT_FIELDS.keys() - {"source", "resources"}:
        if hint := setting_hint(key, data[key]):
            raise SpecError(f"{script} has the key {key!r}, which is not a field of a job", field=key, hint=hint)


def _read_job_file(script: str, cwd: Path) -> dict[str, Any]:
    data = read_table(cwd / script, shown=script, field="job")
    _refuse_settings(data, script)
    return anchored(data, Path(script).parent)
