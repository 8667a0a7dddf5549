"""The Job: what to run, as a frozen, validated value without anything of a cloud account.

``Job``, ``Source``, ``Input`` and ``Resources`` are keyword-only dataclasses. They validate themselves and raise
`SpecError` with the dotted field and, for a misspelt name, the nearest valid one. `Job.to_json` is canonical (sorted
keys, defaults left out), so `Job.digest` identifies the job. A field added in a later version does not change the
digests of earlier jobs.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import secrets as _secrets
import shlex
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath, PurePosixPath
from typing import Any

from ..errors import SpecError
from ..validate import (
    brief,
    choice_of,
    did_you_mean,
    json_loads,
    json_value,
    parse_duration,
    parse_size,
    sequence_of,
    table_of,
    text_of,
    texts_of,
    toml_loads,
    url_scheme,
    whole_number,
)

__all__ = [
    "DEFAULT_MAX_OUTPUTS",
    "DEFAULT_MAX_RUNTIME",
    "DEFAULT_STALL_TIMEOUT",
    "Gpu",
    "Input",
    "Job",
    "Resources",
    "Scalar",
    "Source",
    "anchored",
    "check_run_id",
    "is_run_id",
    "job_name",
    "new_run_id",
    "run_tag",
]

Scalar = str | int | float | bool

DEFAULT_MAX_RUNTIME = 24 * 3600
"""Seconds; printed by every plan and submit."""
DEFAULT_MAX_OUTPUTS = 10 * 10**9
"""Bytes of outputs that come back from each node."""
DEFAULT_STALL_TIMEOUT = 30 * 60
"""Seconds without a line, metric or checkpoint from any rank before a run is called stalled."""

MOST = {"nproc_per_node": 1024, "cpus": 10**4, "memory_gb": 10**6, "disk_gb": 10**7, "shm_gb": 10**6}
"""Bounds of a node, far beyond any machine: a larger number is a mistake."""
LAUNCHERS = ("torchrun", "python", "command")
STYLES = ("flags", "hydra", "none")
MODES = ("auto", "copy", "mount")
NO_SCRIPTS = frozenset(
    (
        *(".ipynb", ".yaml", ".yml", ".toml", ".json", ".jsonl", ".csv", ".tsv", ".parquet", ".arrow", ".npy", ".npz"),
        *(
            ".pt",
            ".pth",
            ".ckpt",
            ".safetensors",
            ".h5",
            ".txt",
            ".md",
            ".rst",
            ".html",
            ".xml",
            ".ini",
            ".cfg",
            ".log",
        ),
        *(".cfg", ".png", ".jpg", ".jpeg", ".pdf", ".tar", ".gz", ".tgz"),
    )
)
"""Suffixes of notebooks, settings, data, weights and texts, which Python does not run."""
SECRET_SCHEMES = ("aws", "azure", "env", "gcp")

_ID = re.compile(r"[a-z0-9](-?[a-z0-9])*")
_ID_MAX = 40
_NAME_MAX = 63
_CHANNEL = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,62}")
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_RESERVED = re.compile(
    r"(RANK|LOCAL_RANK|GROUP_RANK|ROLE_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|GROUP_WORLD_SIZE|MASTER_ADDR|MASTER_PORT"
    r"|PET_.*|TORCHELASTIC_.*|CLOUDTRAIN_.*)"
)
_GPU = re.compile(r"([A-Z][A-Z0-9]*(?:-[A-Z]+[A-Z0-9]*)*)(?:-([0-9]{1,4})GB)?(?::([0-9]{1,4}))?")
_METRIC = re.compile(r"(?! )[^=\x00-\x1f\x7f-\x9f]{1,100}(?<! )")
_EXAMPLE = "loss ([0-9.]+)"
_URLS = {
    **dict.fromkeys(("s3", "gs"), "SCHEME://BUCKET/PATH"),
    **dict.fromkeys(("abfs", "abfss", "az"), "abfs://CONTAINER@ACCOUNT.dfs.core.windows.net/PATH"),
    **dict.fromkeys(("http", "https", "ftp", "sftp"), "SCHEME://HOST/PATH"),
}
"""The form of a URL with this scheme."""
_PLACEHOLDER_INPUT = re.compile(r"\{inputs\.([A-Za-z][A-Za-z0-9_-]*)\}")


# ------------------------------------------------------------------------------------------- words and small parsers


def check_run_id(run_id: str) -> str:
    """Return ``run_id`` if it is lower-case letters, digits and single inner dashes, at most 40; else `SpecError`."""
    if not is_run_id(run_id):
        raise SpecError(
            f"{run_id!r} is not a run id: lower-case letters, digits and single inner dashes, at most {_ID_MAX}",
            field="run_id",
            hint=f"call it {_slug(run_id)!r}",
        )
    return run_id


def is_run_id(name: str) -> bool:
    """Return whether `check_run_id` accepts ``name``."""
    return len(name) <= _ID_MAX and bool(_ID.fullmatch(name))


def new_run_id(name: str, *, now: float | None = None, token: str | None = None) -> str:
    """Return ``<UTC yyyymmdd-hhmmss>-<name>-<4 hex>``; the name is cut so that the id has at most 40 characters."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(now))
    tail = token or _secrets.token_hex(2)
    room = _ID_MAX - len(stamp) - len(tail) - 2
    return check_run_id(f"{stamp}-{name[:room].rstrip('-')}-{tail}")


def run_tag(run: str) -> str:
    """Return the tag that marks a platform's job as that of the run with this URL: 16 hex digits."""
    return hashlib.sha256(run.encode()).hexdigest()[:16]


def job_name(run: str, attempt: int, choice: int) -> str:
    """Return a platform's name for a job: at most 63 of ``[a-z0-9-]``, different for every (run, attempt, choice).

    The strictest platform allows 63; elsewhere the name is a label.
    """
    tail = f"-{run_tag(run)}" + (f"-{attempt}" if attempt or choice else "") + (f"-{choice}" if choice else "")
    return run.rpartition("/")[2][: _NAME_MAX - len(tail)].rstrip("-") + tail


def _slug(text: str) -> str:
    """Return the closest legal name to ``text``, or ``job`` if no character is legal."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:_ID_MAX].rstrip("-") or "job"


# ----------------------------------------------------------------------------------------------- checks used by types


def _env_names(table: dict[str, Any], where: str) -> None:
    for key in table:
        if not _ENV_NAME.fullmatch(key):
            raise SpecError(f"{key!r} is not a name for an environment variable", field=where)
        if _RESERVED.fullmatch(key):
            raise SpecError(f"{key} is set by torchrun or cloudtrain for every rank; choose another name", field=where)


def _instead_of(entry: str, suffix: str) -> str:
    """Return a hint for an entry point that is not a script, by its suffix."""
    if suffix == ".ipynb":
        return f"export the notebook first: jupyter nbconvert --to script {shlex.quote(entry)}"
    if suffix in (".yaml", ".yml"):
        return "write the job file in TOML or JSON; docs/migration.md translates other tools' files"
    if suffix in (".toml", ".json"):
        return f"run a job file with: cloudtrain submit {shlex.quote(entry)}"
    return f"name the script, and pass the file to it: cloudtrain submit train.py --input data={shlex.quote(entry)}"


def _set(instance: Any, **values: Any) -> None:
    for name, value in values.items():
        object.__setattr__(instance, name, value)


def _path(value: Any) -> Any:
    """Return a path as text, and any other value unchanged for the check of texts."""
    return str(value) if isinstance(value, PurePath) else value


def _help(text: str) -> dict[str, str]:
    return {"help": text}


# -------------------------------------------------------------------------------------------------------------- types


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One choice of accelerator, written ``NAME[-MEM][:COUNT]``: ``H100:8``, ``A100-80GB:4``.

    ``memory_gb`` is GB for each GPU (None: any variant); ``count`` is GPUs a node.
    """

    name: str
    memory_gb: int | None = None
    count: int = 1

    @classmethod
    def parse(cls, text: str, *, field: str = "resources.gpu") -> Gpu:
        match = _GPU.fullmatch(text_of(text, field).strip().upper())
        if not match or match[3] == "0":
            raise SpecError(f"{brief(text)} is not NAME[-MEM][:COUNT], such as 'H100:8' or 'A100-80GB:4'", field=field)
        return cls(name=match[1], memory_gb=int(match[2]) if match[2] else None, count=int(match[3] or 1))

    def __str__(self) -> str:
        memory = f"-{self.memory_gb}GB" if self.memory_gb else ""
        return f"{self.name}{memory}:{self.count}"


@dataclass(frozen=True, kw_only=True)
class Source:
    """The code: a folder, the script in it, and the further files that ship."""

    path: str | None = field(
        default=None,
        metadata=_help("folder to ship; default: the current one if the script lies in it, else the script's"),
    )
    entry_point: str = field(default="", metadata=_help("train.py, '-m pkg.mod' or x.sh"))
    dependencies: tuple[str, ...] = field(default=(), metadata=_help("further local folders put beside the source"))
    requirements: str | None = field(
        default=None, metadata=_help("requirements file in the source, installed into scratch on each node")
    )
    exclude: tuple[str, ...] = field(default=(), metadata=_help("patterns (gitignore syntax) of files not to ship"))

    def __post_init__(self) -> None:
        if self.path is not None:
            _set(self, path=text_of(_path(self.path), "source.path"))
        dependencies = sequence_of(self.dependencies)
        if isinstance(dependencies, (list, tuple)):
            dependencies = [_path(item) for item in dependencies]
        _set(
            self,
            entry_point=text_of(_path(self.entry_point), "source.entry_point", empty=True).strip(),
            dependencies=texts_of(dependencies, "source.dependencies"),
            exclude=texts_of(sequence_of(self.exclude), "source.exclude"),
        )
        if self.requirements is not None:
            text_of(self.requirements, "source.requirements")
        words = self.entry_point.split()
        if words[:1] == ["-m"] and (len(words) != 2 or not all(p.isidentifier() for p in words[1].split("."))):
            raise SpecError(f"{self.entry_point!r} is not '-m package.module'", field="source.entry_point")

    @property
    def module(self) -> str | None:
        """``pkg.mod`` of ``-m pkg.mod``, else None."""
        return self.entry_point.split()[1] if self.entry_point.startswith("-m ") else None


@dataclass(frozen=True, kw_only=True)
class Input:
    """A channel's data: a local path or a URL, and how it reaches the node."""

    url: str = field(metadata=_help("local path, or URL of a file or folder"))
    mode: str = field(default="auto", metadata=_help("auto, copy or mount"))
    shard: bool = field(default=False, metadata=_help("give each node its own part, where the platform can"))

    def __post_init__(self) -> None:
        _set(self, url=text_of(_path(self.url), "inputs.url"), mode=choice_of(self.mode, MODES, "inputs.mode"))
        if not isinstance(self.shard, bool):
            raise SpecError(f"must be true or false, not {self.shard!r}", field="inputs.shard")
        example = _URLS.get(url_scheme(self.url))
        if example and not re.fullmatch(r"[a-z0-9]+://[^/\s]+(?!.*/\.\./)(/\S.*|/)?", self.url, re.IGNORECASE):
            raise SpecError(f"{brief(self.url)} names nothing to read", field="inputs.url", hint=f"write {example}")


@dataclass(frozen=True, kw_only=True)
class Resources:
    """The size and number of the nodes. GB are 10^9 bytes, as clouds count them."""

    instance_count: int = field(default=1, metadata=_help("number of nodes"))
    instance_type: str | None = field(default=None, metadata=_help("the platform's own name of a machine"))
    gpu: tuple[str, ...] = field(default=(), metadata=_help("NAME[-MEM][:COUNT] a node, in order of preference"))
    nproc_per_node: int | None = field(default=None, metadata=_help("ranks a node; default: the GPU count, else 1"))
    cpus: int | None = field(default=None, metadata=_help("CPU cores a node, at least"))
    memory_gb: int | None = field(default=None, metadata=_help("memory a node, at least"))
    disk_gb: int | None = field(default=None, metadata=_help("scratch disk a node"))
    shm_gb: int | None = field(default=None, metadata=_help("size of /dev/shm"))
    spot: bool = field(default=False, metadata=_help("preemptible machines"))

    def __post_init__(self) -> None:
        whole_number(self.instance_count, "resources.instance_count", least=1, most=4096)
        for name, most in MOST.items():
            if getattr(self, name) is not None:
                whole_number(getattr(self, name), f"resources.{name}", least=1, most=most)
        if self.instance_type is not None:
            text_of(self.instance_type, "resources.instance_type")
        if not isinstance(self.spot, bool):
            raise SpecError(f"must be true or false, not {self.spot!r}", field="resources.spot")
        names = texts_of(sequence_of(self.gpu), "resources.gpu")
        texts = [part.strip() for name in names for part in name.split(",")]
        _set(self, gpu=tuple(str(Gpu.parse(text)) for text in texts))

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        """``gpu`` parsed, in order of preference."""
        return tuple(Gpu.parse(text) for text in self.gpu)

    def processes(self, choice: int = 0) -> int:
        """Return the ranks on each node if the ``choice``-th GPU of the list is used."""
        if self.nproc_per_node:
            return self.nproc_per_node
        return self.gpus[choice].count if self.gpu else 1


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job to run. Equal jobs have equal `digest`; `to_json` and `to_toml` round-trip."""

    name: str = field(default="", metadata=_help("name of the job; default: the script's"))
    source: Source = field(default_factory=Source)
    image: str | None = field(default=None, metadata=_help("container image; nothing is installed in it"))
    launcher: str = field(
        default="",
        metadata=_help("torchrun, python (one process a node) or command; default: torchrun, command for .sh"),
    )
    hyperparameters: dict[str, Any] = field(default_factory=dict, metadata=_help("names and values for the script"))
    hyperparameter_style: str = field(default="flags", metadata=_help("flags (--k v), hydra (k=v) or none"))
    args: tuple[str, ...] = field(default=(), metadata=_help("further arguments of the script, as they are"))
    env: dict[str, str] = field(default_factory=dict, metadata=_help("environment variables of the script"))
    secrets: dict[str, str] = field(
        default_factory=dict,
        metadata=_help("environment variables by reference: env:NAME, aws:ARN, azure:VAULT/NAME, gcp:RESOURCE"),
    )
    inputs: dict[str, Input] = field(default_factory=dict, metadata=_help("channels: a local path or URL each"))
    resources: Resources = field(default_factory=Resources)
    max_runtime: int = field(default=DEFAULT_MAX_RUNTIME, metadata=_help("running time, summed over attempts: '12h'"))
    max_wait: int | None = field(default=None, metadata=_help("longest wait for machines: '2h'"))
    max_cost: float | None = field(default=None, metadata=_help("most US dollars the run may cost"))
    max_gpu_hours: float | None = field(
        default=None, metadata=_help("most hours of GPUs, times their number, over attempts")
    )
    retries: int = field(default=0, metadata=_help("further attempts after one that failed"))
    stall_timeout: int = field(
        default=DEFAULT_STALL_TIMEOUT, metadata=_help("no sign of life for so long is a failure; 0: never")
    )
    debug_nccl: bool = field(
        default=False, metadata=_help("NCCL and torch.distributed tell what they do, in many lines")
    )
    resume_from: str | None = field(default=None, metadata=_help("run, or checkpoint folder, to start from"))
    checkpoint_paths: tuple[str, ...] = field(
        default=(), metadata=_help("further checkpoints a script writes: globs below its working folder")
    )
    keep_checkpoints: int | None = field(
        default=None,
        metadata=_help(
            "newest complete checkpoints kept, and what a pointer names; 0: all of them; "
            "default: 0, or 3 where each restart downloads them all"
        ),
    )
    metrics: dict[str, str] = field(
        default_factory=dict,
        metadata=_help("metrics in the lines that rank 0 prints: a regular expression with one group each"),
    )
    outputs: bool = field(
        default=True, metadata=_help("bring back the files that the script writes below its working folder")
    )
    max_outputs: int = field(
        default=DEFAULT_MAX_OUTPUTS, metadata=_help("most of these files a node, the largest are left out: '10GB'")
    )
    tags: dict[str, str] = field(default_factory=dict, metadata=_help("labels of the job on the platform"))
    options: dict[str, dict[str, Any]] = field(
        default_factory=dict, metadata=_help("by provider: merged last into the native request, verbatim")
    )
    on: dict[str, dict[str, Any]] = field(
        default_factory=dict, metadata=_help("by provider: fields of this job that are different there")
    )

    def __post_init__(self) -> None:
        if not isinstance(self.source, Source):
            raise SpecError("must be a Source", field="source")
        if not isinstance(self.resources, Resources):
            raise SpecError("must be a Resources", field="resources")
        self._check_what()
        self._check_limits()
        self._check_values()
        self._check_metrics()
        self._check_placeholders()
        for provider, overrides in self.on.items():
            _override(self, provider, overrides)

    def _check_what(self) -> None:
        entry = self.source.entry_point
        launcher = self.launcher or ("command" if entry.endswith(".sh") else "torchrun")
        _set(self, launcher=choice_of(launcher, LAUNCHERS, "launcher"), args=texts_of(self.args, "args", empty=True))
        if not entry and not (launcher == "command" and self.args):
            how = "name one: cloudtrain submit train.py, or -m pkg.mod, or entry_point in a job file"
            raise SpecError("no script", field="source.entry_point", hint=how)
        if launcher != "command" and (suffix := PurePosixPath(entry).suffix.lower()) in NO_SCRIPTS:
            raise SpecError(f"{entry!r} is not a script", field="source.entry_point", hint=_instead_of(entry, suffix))
        if entry.endswith(".sh") and launcher != "command":
            raise SpecError(f"{launcher} starts Python, not {entry}; use launcher 'command'", field="launcher")
        choice_of(self.hyperparameter_style, STYLES, "hyperparameter_style")
        name = self.name or _slug(
            (self.source.module or "").rpartition(".")[2] or PurePosixPath(entry.replace("\\", "/")).stem
        )
        if not isinstance(name, str) or len(name) > _ID_MAX or not _ID.fullmatch(name):
            raise SpecError(
                f"{name!r} is not a name: lower-case letters, digits and single inner dashes, at most {_ID_MAX}",
                field="name",
                hint=f"call it {_slug(str(name))!r}",
            )
        _set(self, name=name)
        if self.image is not None and (
            any(c.isspace() for c in text_of(self.image, "image")) or self.image.startswith("-")
        ):
            raise SpecError(f"{self.image!r} is not the name of an image", field="image")

    def _check_limits(self) -> None:
        _set(self, max_runtime=parse_duration(self.max_runtime, field="max_runtime"))
        if self.max_wait is not None:
            _set(self, max_wait=parse_duration(self.max_wait, field="max_wait"))
        if self.stall_timeout not in (0, "0"):
            _set(self, stall_timeout=parse_duration(self.stall_timeout, field="stall_timeout"))
        else:
            _set(self, stall_timeout=0)
        for name, what in (("max_cost", "an amount of US dollars"), ("max_gpu_hours", "a number of hours")):
            most = getattr(self, name)
            if most is None:
                continue
            if isinstance(most, bool) or not isinstance(most, (int, float)) or not 0 < most < 1e12:
                raise SpecError(f"must be {what} above zero, not {most!r}", field=name)
            _set(self, **{name: float(most)})
        whole_number(self.retries, "retries", least=0, most=100)
        if self.keep_checkpoints is not None:
            whole_number(self.keep_checkpoints, "keep_checkpoints", least=0, most=10**6)
        _set(self, max_outputs=parse_size(self.max_outputs, field="max_outputs"))
        for name in ("debug_nccl", "outputs"):
            if not isinstance(getattr(self, name), bool):
                raise SpecError(f"must be true or false, not {getattr(self, name)!r}", field=name)
        if self.resume_from is not None:
            text_of(self.resume_from, "resume_from")
        _set(self, checkpoint_paths=texts_of(sequence_of(self.checkpoint_paths), "checkpoint_paths"))
        for i, glob in enumerate(self.checkpoint_paths):
            if PurePosixPath(glob).is_absolute() or ".." in PurePosixPath(glob).parts:
                raise SpecError(f"{glob!r} leaves the working folder", field=f"checkpoint_paths[{i}]")

    def _check_values(self) -> None:
        env = {k: text_of(v, f"env.{k}", empty=True) for k, v in table_of(self.env, "env").items()}
        _env_names(env, "env")
        secrets = {k: text_of(v, f"secrets.{k}") for k, v in table_of(self.secrets, "secrets").items()}
        _env_names(secrets, "secrets")
        for key, reference in secrets.items():
            scheme, _, rest = reference.partition(":")
            if scheme not in SECRET_SCHEMES or not rest:
                raise SpecError(
                    f"{reference!r} is no reference; write one of env:NAME, aws:ARN, azure:VAULT/NAME, gcp:RESOURCE",
                    field=f"secrets.{key}",
                )
            if key in env:
                raise SpecError("is in env too; keep one of the two", field=f"secrets.{key}")
        hyperparameters = {}
        for key, value in table_of(self.hyperparameters, "hyperparameters").items():
            if value is None:
                raise SpecError("has no value (None); leave it out", field=f"hyperparameters.{key}")
            hyperparameters[key] = json_value(value, f"hyperparameters.{key}")
        tags = {k: text_of(v, f"tags.{k}", empty=True) for k, v in table_of(self.tags, "tags").items()}
        inputs = {k: _input(v, f"inputs.{k}") for k, v in table_of(self.inputs, "inputs").items()}
        seen: dict[str, str] = {}
        for key in inputs:
            if not _CHANNEL.fullmatch(key):
                raise SpecError(
                    f"{key!r} is not a channel name: a letter, then letters, digits, - or _", field="inputs"
                )
            if (other := seen.setdefault(key.upper().replace("-", "_"), key)) != key:
                raise SpecError(f"{key!r} and {other!r} would share one variable", field="inputs")
        options = {
            k: json_value(table_of(v, f"options.{k}"), f"options.{k}")
            for k, v in table_of(self.options, "options").items()
        }
        on = {k: json_value(table_of(v, f"on.{k}"), f"on.{k}") for k, v in table_of(self.on, "on").items()}
        _set(
            self,
            env=env,
            secrets=secrets,
            hyperparameters=hyperparameters,
            tags=tags,
            inputs=inputs,
            options=options,
            on=on,
        )

    def _check_metrics(self) -> None:
        metrics = {k: text_of(v, f"metrics.{k}") for k, v in table_of(self.metrics, "metrics").items()}
        for name, pattern in metrics.items():
            if not _METRIC.fullmatch(name):
                how = "use 1 to 100 printable characters without =, and no space at the ends"
                raise SpecError(f"{name!r} is not a name for a metric", field="metrics", hint=how)
            if name == "time":
                raise SpecError("time is the time of the row itself", field="metrics", hint="use another name")
            try:
                groups = re.compile(pattern).groups
            except (re.error, OverflowError, RecursionError) as exc:
                why = f"{pattern!r} is not a regular expression: {exc}"
                raise SpecError(why, field=f"metrics.{name}", hint=f"write it like {_EXAMPLE!r}") from None
            if groups != 1:
                how = (
                    "write (?:...) for every group but that of the number" if groups else f"write it like {_EXAMPLE!r}"
                )
                count = "no group" if not groups else f"{groups} groups"
                raise SpecError(f"{pattern!r} has {count}, not one", field=f"metrics.{name}", hint=how)
        _set(self, metrics=metrics)

    def _check_placeholders(self) -> None:
        places = [("args", text) for text in self.args] + [("env", text) for text in self.env.values()]
        places += [("hyperparameters", v) for v in self.hyperparameters.values() if isinstance(v, str)]
        for where, text in places:
            for channel in _PLACEHOLDER_INPUT.findall(text):
                if channel not in self.inputs:
                    why, near = f"{{inputs.{channel}}} names no input of this job", did_you_mean(channel, self.inputs)
                    raise SpecError(why, field=where, hint=near)

    # ---------------------------------------------------------------------------------------------------- conversions

    @classmethod
    def make(cls, **fields: Any) -> Job:
        """Return a Job made of flat keywords: its own fields and those of Source and Resources, by their names.

        ``source_dir`` is Source's ``path``. Raises `SpecError` for an unknown name, with the nearest valid one.
        """
        return cls.from_dict(fields)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Job:
        """Return a Job made of plain values, nested as in `to_dict` or flat as in `make`."""
        data = table_of(data, "job")
        top: dict[str, Any] = {}
        parts: dict[str, dict[str, Any]] = {"source": {}, "resources": {}}
        for key, value in data.items():
            if key in parts:
                if isinstance(value, (Source, Resources)):
                    value = _plain(value)
                parts[key].update(table_of(value, key))
            elif key in FLAT_FIELDS:
                owner, name = FLAT_FIELDS[key]
                (parts[owner] if owner else top)[name] = value
            else:
                raise SpecError("no such field", field=str(key), hint=did_you_mean(key, [*FLAT_FIELDS, *parts]))
        return cls(
            source=_build(Source, parts["source"], "source"),
            resources=_build(Resources, parts["resources"], "resources"),
            **top,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values; fields at their default are left out."""
        plain: dict[str, Any] = _plain(self)
        return plain

    def to_json(self) -> str:
        """Return canonical JSON: sorted keys, no spaces, defaults left out."""
        return json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"), ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> Job:
        """Return the Job of a text that `to_json` wrote. Raises `SpecError`."""
        try:
            data = json_loads(text)
        except ValueError as exc:
            raise SpecError(f"not JSON: {exc}") from None
        return cls.from_dict(table_of(data, "job"))

    def to_toml(self) -> str:
        """Return TOML of `to_dict`. Raises `SpecError` for a null in ``options`` or ``on``: TOML has none."""
        import tomli_w

        try:
            return tomli_w.dumps(self.to_dict())
        except TypeError:
            raise SpecError("holds a null, which TOML cannot say; use JSON", field="options") from None

    @classmethod
    def from_toml(cls, text: str, *, folder: Path | None = None) -> Job:
        """Return the Job of a TOML text; relative local paths in it are below ``folder`` (default: left as written)."""
        data = toml_loads(text, where="job")
        return cls.from_dict(data if folder is None else anchored(data, folder))

    @property
    def digest(self) -> str:
        """SHA-256 (hex) of `to_json`: it identifies the job on any machine."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def at(self, provider: str) -> Job:
        """Return this job as ``provider`` runs it: ``on[provider]`` applied, every ``on`` dropped.

        Tables (env, inputs, tags, hyperparameters) merge by key; all other fields are replaced.
        """
        return _override(self, provider, self.on.get(provider, {}))

    def replace(self, **fields: Any) -> Job:
        """Return a copy with flat ``fields`` replaced."""
        return Job.from_dict({**_flat(self), **fields})


#: Flat name -> (``source``, ``resources`` or ``""``, name there), for Estimator, job.toml, ``on`` and the CLI.
FLAT_FIELDS: dict[str, tuple[str, str]] = {
    **{f.name: ("", f.name) for f in dataclasses.fields(Job) if f.name not in ("source", "resources")},
    **{("source_dir" if f.name == "path" else f.name): ("source", f.name) for f in dataclasses.fields(Source)},
    **{f.name: ("resources", f.name) for f in dataclasses.fields(Resources)},
}
_NOT_ON = ("name", "options", "on")


def _input(value: Any, where: str) -> Input:
    if isinstance(value, Input):
        return value
    if isinstance(value, Mapping):
        built: Input = _build(Input, dict(value), where)
        return built
    return Input(url=text_of(_path(value), where))


def _build(kind: type[Any], values: Mapping[str, Any], where: str) -> Any:
    names = [f.name for f in dataclasses.fields(kind)]
    for key in values:
        if key not in names:
            raise SpecError("no such field", field=f"{where}.{key}", hint=did_you_mean(key, names))
    if kind is Input and "url" not in values:
        raise SpecError("needs a url", field=where)
    return kind(**values)


def _plain(value: Any) -> Any:
    """Return the JSON values of a dataclass without the fields at their default."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        out = {}
        for f in dataclasses.fields(value):
            item = getattr(value, f.name)
            default = f.default_factory() if f.default_factory is not dataclasses.MISSING else f.default
            if item != default:
                out[f.name] = _plain(item)
        return out
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def _flat(job: Job) -> dict[str, Any]:
    owners = {"": job, "source": job.source, "resources": job.resources}
    return {flat: getattr(owners[owner], name) for flat, (owner, name) in FLAT_FIELDS.items()}


def _override(job: Job, provider: str, overrides: Mapping[str, Any]) -> Job:
    fields = _flat(job)
    fields["on"] = {}
    for key, value in overrides.items():
        where = f"on.{provider}.{key}"
        if key in _NOT_ON or key not in fields:
            allowed = [k for k in fields if k not in _NOT_ON]
            raise SpecError("no field that can differ by provider", field=where, hint=did_you_mean(key, allowed))
        fields[key] = {**fields[key], **table_of(value, where)} if isinstance(fields[key], dict) else value
    try:
        return Job.from_dict(fields)
    except SpecError as exc:
        if not overrides:
            raise
        raise SpecError(str(exc), field=f"on.{provider}", hint=exc.hint) from None


def anchored(data: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return ``data`` with its relative local paths (source, dependencies, inputs) absolute below ``folder``."""

    def local(path: Any) -> Any:
        return str(folder / path) if isinstance(path, str) and not url_scheme(path) else path

    out = dict(data)
    source = dict(out.get("source", {})) if isinstance(out.get("source", {}), Mapping) else {}
    path = source.pop("path", out.pop("source_dir", None))
    out["source"] = {**source, "path": local(path) if path is not None else str(folder)}
    for owner in (out, out["source"]):
        if isinstance(owner.get("dependencies"), list):
            owner["dependencies"] = [local(p) for p in owner["dependencies"]]
    if isinstance(out.get("inputs"), Mapping):
        out["inputs"] = {
            k: {**v, "url": local(v.get("url"))} if isinstance(v, Mapping) else local(v)
            for k, v in out["inputs"].items()
        }
    return out
