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
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from ..errors import SpecError
from ..validate import (
    URL_FORMS,
    brief,
    did_you_mean,
    json_loads,
    sequence_of,
    similar,
    table_of,
    text_of,
    texts_of,
    toml_loads,
    url_scheme,
)
from . import fields
from .fields import DURATION, PATH, SWITCH, TEXT, check_fields, choice, item, path_text, whole

Scalar = str | int | float | bool

DEFAULT_MAX_RUNTIME = 24 * 3600
"""Seconds; printed by every plan and submit."""
DEFAULT_MAX_OUTPUTS = 10 * 10**9
"""Bytes of outputs that come back from each node."""
DEFAULT_STALL_TIMEOUT = 30 * 60
"""Seconds without a line, metric or checkpoint from any rank before a run is called stalled."""

LAUNCHERS = ("torchrun", "python", "command")
STYLES = ("flags", "hydra", "none")
MODES = ("auto", "copy", "mount")
NO_SCRIPTS = frozenset((
    ".ipynb", ".yaml", ".yml", ".toml", ".json", ".jsonl", ".csv", ".tsv", ".parquet", ".arrow", ".npy", ".npz", ".pt",
    ".pth", ".ckpt", ".safetensors", ".h5", ".txt", ".md", ".rst", ".html", ".xml", ".ini", ".cfg", ".log", ".png",
    ".jpg", ".jpeg", ".pdf", ".tar", ".gz", ".tgz",
))  # fmt: skip
"""Suffixes of notebooks, settings, data, weights and texts, which Python does not run."""

_NAME_MAX = 63
_CHANNEL = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,62}")
_GPU = re.compile(
    r"(ASCEND-[0-9]{3}[A-Z]?[0-9]?|[A-Z][A-Z0-9]*(?:-[A-Z]+[A-Z0-9]*)*)(?:-([0-9]{1,4})GB)?(?::([0-9]{1,4}))?"
)
_NODES = re.compile(r"([0-9]{1,5}):([0-9]{1,5})")
_PLACEHOLDER_SECRET = re.compile(r"\{secrets\.([^}]*)\}")
_LEFT_OUT = "{resume_from?}"
_BRACED = re.compile(r"(?<![${])\{([^{}]*)\}")
"""A word in braces, but no variable of a shell (``${RUN_ID}``) or of a template (``{{ run_id }}``)."""
_PLACEHOLDER_INPUT = re.compile(r"\{inputs\.([A-Za-z][A-Za-z0-9_-]*)\}")


# --------------------------------------------------------------------------------------------------------------- names


def run_tag(run: str) -> str:
    """Return the tag that marks a platform's job as that of the run with this URL: 16 hex digits."""
    return hashlib.sha256(run.encode()).hexdigest()[:16]


def job_name(run: str, attempt: int, gpu_index: int) -> str:
    """Return a platform's name for a job: at most 63 of ``[a-z0-9-]``, different for every (run, attempt, gpu_index).

    The strictest platform allows 63; elsewhere the name is a label.
    """
    tail = f"-{run_tag(run)}" + (f"-{attempt}" if attempt or gpu_index else "") + (f"-{gpu_index}" if gpu_index else "")
    return run.rpartition("/")[2][: _NAME_MAX - len(tail)].rstrip("-") + tail


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


def _entry_point(value: Any, where: str) -> str:
    entry = text_of(path_text(value), where, empty=True).strip()
    words = entry.split()
    if words[:1] == ["-m"] and (len(words) != 2 or not all(p.isidentifier() for p in words[1].split("."))):
        raise SpecError(f"{entry!r} is not '-m package.module'", field=where)
    return entry


def _gpu(value: Any, where: str) -> tuple[str, ...]:
    texts = [part.strip() for name in texts_of(sequence_of(value), where) for part in name.split(",")]
    return tuple(str(Gpu.parse(text, field=where)) for text in texts)


@dataclass(frozen=True, kw_only=True)
class Source:
    """The code: a folder with the script, and further folders that cloudtrain sends to the nodes."""

    path: str | None = item(
        PATH, "folder with the code; default: the current folder if it has the script, or the script's folder"
    )
    entry_point: str = item(fields.Kind(_entry_point, TEXT.schema), "script to run: train.py, '-m pkg.mod' or x.sh", "")
    dependencies: tuple[str, ...] = item(fields.PATHS, "further local folders to send next to the code", ())
    requirements: str | None = item(PATH, "requirements file in the code; each node installs it")
    exclude: tuple[str, ...] = item(fields.PATTERNS, "patterns (gitignore syntax) of files not to send", ())

    def __post_init__(self) -> None:
        check_fields(self, "source.")

    @property
    def module(self) -> str | None:
        """``pkg.mod`` of ``-m pkg.mod``, else None."""
        return self.entry_point.split()[1] if self.entry_point.startswith("-m ") else None


@dataclass(frozen=True, kw_only=True)
class Input:
    """A channel's data: a local path or a URL, and how it reaches the node."""

    url: str = item(PATH, "local path or URL of a file or folder", dataclasses.MISSING)
    mode: str = item(choice(MODES), "access mode of the nodes: auto, copy or mount", "auto")
    shard: bool = item(SWITCH, "give each node its own part of the files, if the platform can", False)

    def __post_init__(self) -> None:
        check_fields(self, "inputs.")
        example = URL_FORMS.get(url_scheme(self.url))
        if example and not re.fullmatch(r"[a-z0-9]+://[^/\s]+(?!.*/\.\./)(/\S.*|/)?", self.url, re.IGNORECASE):
            raise SpecError(f"{brief(self.url)} names nothing to read", field="inputs.url", hint=f"write {example}")


_COUNT = whole(1, 4096)
_COUNTS = fields.Kind(_COUNT.check, {"anyOf": [_COUNT.schema, {"type": "string", "pattern": f"^{_NODES.pattern}$"}]})


@dataclass(frozen=True, kw_only=True)
class Resources:
    """The size and number of the nodes. GB are 10^9 bytes, as clouds count them.

    ``instance_count="2:4"`` is 4, with ``min_instance_count=2``.
    """

    # The upper bounds are far beyond any machine: a larger number is a mistake.
    instance_count: int = item(_COUNTS, "number of nodes; 2:4 means 4, or at least 2 if there are too few machines", 1)
    min_instance_count: int | None = item(
        _COUNT, "minimum number of nodes of an attempt; instance_count = '2:4' sets both"
    )
    instance_type: str | None = item(TEXT, "machine type, by its name on the platform")
    gpu: tuple[str, ...] = item(
        fields.Kind(_gpu, fields.PATTERNS.schema), "GPUs of each node, NAME[-MEM][:COUNT], in order of preference", ()
    )
    total_gpus: int | None = item(
        whole(1, 4096 * 16), "number of GPUs of all nodes; cloudtrain derives the number of nodes"
    )
    gpu_memory: int | None = item(
        fields.SIZE, "memory of each GPU, such as '8GB', if HAMi shares the GPUs; default: all"
    )
    nproc_per_node: int | None = item(
        whole(1, 1024), "number of ranks on each node; default: its number of GPUs, or 1 without GPUs"
    )
    cpus: int | None = item(whole(1, 10**4), "minimum number of CPU cores of each node")
    memory_gb: int | None = item(whole(1, 10**6), "minimum memory of each node, in GB")
    disk_gb: int | None = item(whole(1, 10**7), "scratch disk of each node, in GB")
    shm_gb: int | None = item(whole(1, 10**6), "size of /dev/shm on each node, in GB")
    spot: bool = item(SWITCH, "use preemptible (spot) machines", False)

    def __post_init__(self) -> None:
        given = self.instance_count
        if isinstance(given, str) and (both := _NODES.fullmatch(given)):
            object.__setattr__(self, "min_instance_count", int(both[1]))
            object.__setattr__(self, "instance_count", int(both[2]))
        check_fields(self, "resources.")
        if self.min_instance_count == self.instance_count:
            object.__setattr__(self, "min_instance_count", None)
        if self.min_instance_count and len(self.node_counts) < 2:
            least, most = sorted((self.min_instance_count, self.instance_count))
            near = least if most % least == 0 else max(n for n in range(1, least) if most % n == 0)
            why = f"{self.min_instance_count}:{self.instance_count} has no smaller number that divides the larger one"
            raise SpecError(why, field="resources.instance_count", hint=f"write {near}:{most}")

    @property
    def node_counts(self) -> tuple[int, ...]:
        """The numbers of nodes that an attempt may have, the most first.

        Each divides the most, so that a rank of fewer ones makes a whole number of passes in place of one.
        """
        most = self.instance_count
        return tuple(n for n in range(most, (self.min_instance_count or most) - 1, -1) if most % n == 0)

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        """``gpu`` parsed, in order of preference."""
        return tuple(Gpu.parse(text) for text in self.gpu)

    def processes(self, gpu_index: int = 0) -> int:
        """Return the ranks on each node if the ``gpu_index``-th GPU of the list is used."""
        if self.nproc_per_node:
            return self.nproc_per_node
        return self.gpus[gpu_index].count if self.gpu else 1


def _input(value: Any, where: str) -> Input:
    if isinstance(value, Input):
        return value
    if isinstance(value, Mapping):
        built: Input = _build(Input, dict(value), where)
        return built
    return Input(url=text_of(path_text(value), where))


def _channel(name: str, where: str) -> None:
    if not _CHANNEL.fullmatch(name):
        raise SpecError(f"{name!r} is not a channel name: a letter, then letters, digits, - or _", field=where)


_INPUT = {
    "type": "object",
    "properties": {
        f.name: {**f.metadata["kind"].schema, "description": f.metadata["help"]} for f in dataclasses.fields(Input)
    },
    "required": ["url"],
    "additionalProperties": False,
}
_INPUTS = fields.mapping(fields.Kind(_input, {"anyOf": [TEXT.schema, _INPUT]}), _channel)
_LAUNCHER = fields.Kind(choice(LAUNCHERS).check, {"enum": ["", *LAUNCHERS]})


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job to run. Equal jobs have an equal `digest`, also after `to_json` and `from_json`."""

    name: str = item(fields.NAME, "name of the job; default: the name of the script", "")
    source: Source = field(default_factory=Source)
    image: str | None = item(fields.IMAGE, "container image; cloudtrain installs nothing in it")
    launcher: str = item(
        _LAUNCHER,
        "launcher: torchrun, python (one process on each node) or command; default: torchrun, or command for .sh",
        "",
    )
    hyperparameters: dict[str, Any] = item(fields.HYPERPARAMETERS, "hyperparameters of the script", {})
    hyperparameter_style: str = item(
        choice(STYLES), "form of the hyperparameters: flags (--k v), hydra (k=v) or none", "flags"
    )
    args: tuple[str, ...] = item(fields.RAW_TEXTS, "further arguments of the script, unchanged", ())
    env: dict[str, str] = item(fields.ENV, "environment variables of the script", {})
    secrets: dict[str, str] = item(
        fields.SECRETS,
        "secret environment variables, by reference: env:NAME, aws:ARN, azure:VAULT/NAME, gcp:RESOURCE",
        {},
    )
    inputs: dict[str, Input] = item(_INPUTS, "input data by channel: a local path or URL", {})
    resources: Resources = field(default_factory=Resources)
    max_runtime: int = item(DURATION, "maximum running time, summed over attempts, such as '12h'", DEFAULT_MAX_RUNTIME)
    max_wait: int | None = item(DURATION, "maximum wait for machines, such as '2h'")
    max_cost: float | None = item(fields.AMOUNT_OF_USD, "maximum cost of the run, in US dollars")
    max_gpu_hours: float | None = item(fields.GPU_HOURS, "maximum number of GPU hours, summed over nodes and attempts")
    retries: int = item(whole(0, 100), "number of further attempts after a failed one", 0)
    stall_timeout: int = item(
        fields.DURATION_OR_ZERO,
        "maximum time without a line, metric or checkpoint before the run counts as stalled; 0: no limit",
        DEFAULT_STALL_TIMEOUT,
    )
    keep_warm: int | None = item(
        DURATION, "time for which the machines wait for the next job, at your cost, such as '30m'"
    )
    min_gpu_util: str | None = item(
        fields.MIN_GPU_UTIL, "minimum use of the busiest GPU, such as '5% for 30m'; below it, the run counts as stalled"
    )
    node_check: bool = item(SWITCH, "check every node and GPU for about 30 s before each attempt", False)
    interactive: bool = item(SWITCH, "allow cloudtrain shell, on platforms that need this before the run starts", False)
    debug_nccl: bool = item(SWITCH, "log each step of NCCL and torch.distributed, in many lines", False)
    resume_from: str | None = item(TEXT, "run or checkpoint folder from which to start")
    checkpoint_paths: tuple[str, ...] = item(
        fields.CHECKPOINT_GLOBS, "glob patterns of further checkpoints below the working folder", ()
    )
    keep_checkpoints: int | None = item(
        whole(0, 10**6),
        "number of newest complete checkpoints to keep; one that a pointer names stays too; 0: all; "
        "default: 0, or 3 if each restart downloads them all",
    )
    metrics: dict[str, str] = item(
        fields.METRICS, "metrics in the lines of rank 0, by name: a regular expression with one group", {}
    )
    outputs: bool = item(SWITCH, "copy the files that the script writes below its working folder to the store", True)
    max_outputs: int = item(
        fields.SIZE,
        "maximum size of the outputs of each node, such as '10GB'; above it, the largest files are skipped",
        DEFAULT_MAX_OUTPUTS,
    )
    webhook: str | None = item(fields.WEBHOOK, "URL to which node 0 posts the outcome of each attempt")
    webhook_headers: dict[str, str] = item(
        fields.WEBHOOK_HEADERS, "headers of the webhook; {secrets.NAME} is the value of a secret of the job", {}
    )
    tags: dict[str, str] = item(fields.TAGS, "labels of the job on the platform", {})
    options: dict[str, dict[str, Any]] = item(
        fields.JSON_TABLES, "fields of the native request, by provider; cloudtrain merges them last and unchanged", {}
    )
    on: dict[str, dict[str, Any]] = item(
        fields.JSON_TABLES, "fields of this job with other values for one provider, by provider", {}
    )

    def __post_init__(self) -> None:
        for name, kind in (("source", Source), ("resources", Resources)):
            if not isinstance(getattr(self, name), kind):
                raise SpecError(f"must be a {kind.__name__}", field=name)
        entry = self.source.entry_point
        if not self.launcher:
            object.__setattr__(self, "launcher", "command" if entry.endswith(".sh") else "torchrun")
        if not self.name:
            script = (self.source.module or "").rpartition(".")[2] or PurePosixPath(entry.replace("\\", "/")).stem
            object.__setattr__(self, "name", fields.slug(script))
        self._check_script()
        check_fields(self, "")
        self._check_names()
        for provider, overrides in self.on.items():
            _override(self, provider, overrides)

    def _check_script(self) -> None:
        entry = self.source.entry_point
        if not entry and not (self.launcher == "command" and self.args):
            how = "name one: cloudtrain submit train.py, or -m pkg.mod, or entry_point in a job file"
            raise SpecError("no script", field="source.entry_point", hint=how)
        if self.launcher != "command" and (suffix := PurePosixPath(entry).suffix.lower()) in NO_SCRIPTS:
            raise SpecError(f"{entry!r} is not a script", field="source.entry_point", hint=_instead_of(entry, suffix))
        if entry.endswith(".sh") and self.launcher != "command":
            raise SpecError(
                f"{self.launcher} starts Python, not {entry}", field="launcher", hint="use launcher 'command'"
            )

    def _check_names(self) -> None:
        """Check the names that two fields share, and those of ``{inputs.NAME}``."""
        for key in self.secrets:
            if key in self.env:
                raise SpecError("is in env too", field=f"secrets.{key}", hint="keep one of the two")
        variables: dict[str, str] = {}
        for key in self.inputs:
            if (other := variables.setdefault(key.upper().replace("-", "_"), key)) != key:
                raise SpecError(f"{key!r} and {other!r} would share one variable", field="inputs")
        for where, text in _texts_with_placeholders(self):
            for channel in _PLACEHOLDER_INPUT.findall(text):
                if channel not in self.inputs:
                    why, near = f"{{inputs.{channel}}} names no input of this job", did_you_mean(channel, self.inputs)
                    raise SpecError(why, field=where, hint=near or f"name it in inputs: --input {channel}=PATH")

        texts = [("webhook", self.webhook or "")]
        texts += [(f"webhook_headers.{name}", text) for name, text in self.webhook_headers.items()]
        for where, text in texts:
            for name in _PLACEHOLDER_SECRET.findall(text):
                if name not in self.secrets:
                    why, near = f"{{secrets.{name}}} names no secret of this job", did_you_mean(name, self.secrets)
                    raise SpecError(why, field=where, hint=near or f"add --secret {name}")

    # ---------------------------------------------------------------------------------------------------- conversions

    @classmethod
    def make(cls, **fields: Any) -> Job:
        """Return a Job made of keywords: the fields of Job, Source and Resources, without nesting.

        ``source_dir`` is Source's ``path``. Raises `SpecError` for an unknown name. Its hint is the nearest valid one.
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
                raise SpecError("no such field", field=str(key), hint=_meant(key, [*FLAT_FIELDS, *parts]))
        return cls(
            source=_build(Source, parts["source"], "source"),
            resources=_build(Resources, parts["resources"], "resources"),
            **top,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values, without the fields that have their default."""
        plain: dict[str, Any] = _plain(self)
        return plain

    def to_json(self) -> str:
        """Return canonical JSON: `to_dict` with sorted keys and no spaces."""
        return json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"), ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> Job:
        """Return the Job of a text that `to_json` wrote. Raises `SpecError`."""
        try:
            data = json_loads(text)
        except (TypeError, ValueError) as exc:
            raise SpecError(f"not JSON: {exc}") from None
        return cls.from_dict(table_of(data, "job"))

    def to_toml(self) -> str:
        """Return `to_dict` as TOML. Raises `SpecError` for a null in ``options`` or ``on``, as TOML has none."""
        import tomli_w

        try:
            return tomli_w.dumps(self.to_dict())
        except TypeError:
            raise SpecError("holds a null, which TOML does not have", field="options", hint="use JSON") from None

    @classmethod
    def from_toml(cls, text: str, *, folder: Path | None = None) -> Job:
        """Return the Job of a TOML text. Relative local paths start at ``folder`` (default: they stay as they are)."""
        data = toml_loads(text_of(text, "job", empty=True), where="job")
        return cls.from_dict(data if folder is None else anchored(data, fields.path_of(folder, "folder")))

    @property
    def digest(self) -> str:
        """SHA-256 (hex) of `to_json`: it identifies the job on any machine."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def at(self, provider: str) -> Job:
        """Return this job as ``provider`` runs it: with the fields of ``on[provider]``, and without ``on``.

        Tables (env, inputs, tags, hyperparameters) merge by key. Any other field of ``on`` replaces the job's.
        """
        return _override(self, provider, self.on.get(text_of(provider, "provider"), {}))

    def replace(self, **fields: Any) -> Job:
        """Return a copy with other values of these fields, named as in `make`."""
        return Job.from_dict({**_flat(self), **fields})


_OWNERS: dict[str, Any] = {"": Job, "source": Source, "resources": Resources}
#: Flat name -> (``source``, ``resources`` or ``""``, name there), for Estimator, job.toml, ``on`` and the CLI.
FLAT_FIELDS: dict[str, tuple[str, str]] = {
    {"path": "source_dir"}.get(f.name, f.name): (owner, f.name)
    for owner, kind in _OWNERS.items()
    for f in dataclasses.fields(kind)
    if "kind" in f.metadata
}
#: Flat name -> the field of its dataclass, whose metadata has ``kind`` and ``help``.
FIELDS: dict[str, dataclasses.Field[Any]] = {
    flat: _OWNERS[owner].__dataclass_fields__[name] for flat, (owner, name) in FLAT_FIELDS.items()
}
_NOT_ON = ("name", "options", "on")


def _texts_with_placeholders(job: Job) -> list[tuple[str, str]]:
    """Return each text in which the node replaces placeholders, with its field."""
    texts = [("args", text) for text in job.args] + [("env", text) for text in job.env.values()]
    return texts + [("hyperparameters", v) for v in job.hyperparameters.values() if isinstance(v, str)]


def misspelt_placeholders(job: Job) -> Iterator[str]:
    """Yield a warning for each text that looks like a placeholder. The node leaves it as it is."""
    names = ["checkpoint_dir", "artifact_dir", "resume_from", "run_id", *(f"inputs.{name}" for name in job.inputs)]
    for where, text in _texts_with_placeholders(job):
        if _LEFT_OUT in text and (text != _LEFT_OUT or where == "env"):
            why = f"works only as an argument of its own, not in {brief(text)}; use {{resume_from}}"
            yield f"{where}: {_LEFT_OUT} {why}"
            continue
        for word in _BRACED.findall(text.replace(_LEFT_OUT, "")):
            near = similar(word.strip().rstrip("?"), names, short_forms=False, most=1)
            if near and near != word:
                yield f"{where}: {{{word}}} is not a placeholder; did you mean {{{near}}}?"


def check_job(job: Any) -> Job:
    """Return ``job``. Raises `SpecError` for anything else."""
    if not isinstance(job, Job):
        how = f"cloudtrain.Job.make(entry_point={job if isinstance(job, str) else 'train.py'!r})"
        raise SpecError(f"must be a Job, not {type(job).__name__}", field="job", hint=f"write {how}")
    return job


def _instead_of(entry: str, suffix: str) -> str:
    """Return a hint for an entry point that is not a script, by its suffix."""
    if suffix == ".ipynb":
        return f"export the notebook first: jupyter nbconvert --to script {shlex.quote(entry)}"
    if suffix in (".yaml", ".yml"):
        return "write the job file in TOML or JSON; docs/migration.md translates other tools' files"
    if suffix in (".toml", ".json"):
        return f"run a job file with: cloudtrain submit {shlex.quote(entry)}"
    return f"name the script, and pass the file to it: cloudtrain submit train.py --input data={shlex.quote(entry)}"


def _meant(key: str, names: Iterable[str]) -> str:
    """Return a hint for an unknown field: the field of the flag with this name, or a similar field."""
    field = {"nodes": "instance_count", "hp": "hyperparameters"}.get(key, "")
    return f"did you mean {field!r}?" if field in names else did_you_mean(key, names)


def _build(kind: type[Any], values: Mapping[str, Any], where: str) -> Any:
    names = [f.name for f in dataclasses.fields(kind)]
    for key in values:
        if key not in names:
            raise SpecError("no such field", field=f"{where}.{key}", hint=_meant(key, names))
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
