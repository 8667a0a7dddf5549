"""Define the contract suite's changes, and where each must show: a row for every field of a Job.

A change of a `PLATFORM` field reaches the native request, or is refused by name. A change of a `SCRIPT` field reaches
context.json, and a job has seen it. `ELSEWHERE` gives the reason for the few others. `CASES` are the ways a run can
end. Standard library alone: the docs' matrix uses the same rows.
"""

from __future__ import annotations

import hashlib
import importlib
import shutil
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from ..errors import UnsupportedError
from ..job.job import Input, Job, Resources, Source
from ..provider_api.protocol import Provider, extras_of_type
from ..runs.metrics import json_rows
from ..runs.submit import Plan, make_plan
from ..settings.settings import Settings
from ..storage.local_disk import local_path
from . import probe

__all__ = [
    "CASES", "ELSEWHERE", "JOBS", "PLATFORM", "RUN_ID", "SCRIPT", "SECRET", "SECRETS", "Case", "Fields",
    "Place", "Row", "Sample", "Seen", "by_client", "field_helps", "merged", "needs_nothing", "plan_of",
    "platform_rows", "secret_row", "verdict",
]  # fmt: skip

Fields = Mapping[str, Any]
"""Flat fields of a Job, as `Job.make` takes them."""

RUN_ID = "contract"
SECRET = "s3cret-of-the-contract-suite"
"""The value of every platform's secret."""
STRANGE = (
    "plain", "", "two words", "it's", '"quoted"', "a\nb", "tab\there", "ünï-çødé ☃", '{"json": [1, {}]}', "{x}",
    "$HOME", "`id`", "--", "-n", "*", "a;b", "back\\slash", "%s", "#",
)  # fmt: skip
"""Arguments that a shell, a format string or a JSON writer on the way would change."""


# ------------------------------------------------------------------------------------------------------ places and rows


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Needs of one platform's jobs. A provider's module gives them in a constant ``SAMPLE``, a dict of these fields.

    ``settings`` make the provider without any account. ``store`` is a URL it can use. ``job`` are fields that each plan
    needs. ``rows`` are changes in the platform's own words, for fields whose values are its own:
    ``{"resources.instance_type": {"instance_type": "ml.m5.large"}}``. ``bases`` are further fields that such a job
    needs. Both may be functions of the `Place`. ``secret`` is a reference of a kind that its nodes read.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    store: str = ""
    job: Fields = field(default_factory=dict)
    rows: Mapping[str, Fields | Callable[[Place], Fields]] = field(default_factory=dict)
    bases: Mapping[str, Fields | Callable[[Place], Fields]] = field(default_factory=dict)
    secret: str = "env:" + probe.SECRET

    @classmethod
    def of(cls, provider: type[Provider]) -> Sample:
        return cls(**getattr(importlib.import_module(provider.__module__), "SAMPLE", {}))


class Place:
    """Folders and URLs that rows name, with files written below ``folder``.

    ``secret`` refers to `SECRET`; ``earlier`` is a run of the store.
    """

    def __init__(self, folder: Path, *, store: str, provider: str, secret: str) -> None:
        self.folder, self.store, self.provider, self.secret = folder, store, provider, secret
        self.code, self.moved, self.data = folder / "code", folder / "moved", folder / "data"
        self.earlier = f"{store}/runs/earlier"
        for code in (self.code, self.moved):
            _write_code(code)
        (self.moved / "moved.txt").write_text("moved")
        for name in ("data", "more"):
            (folder / name / "sub").mkdir(parents=True)
            (folder / name / "a.csv").write_text(f"{name} a")
            (folder / name / "sub" / "b.csv").write_text(f"{name} b")
        (folder / "contract_dependency").mkdir()
        (folder / "contract_dependency" / "__init__.py").write_text("WORD = 'beside'\n")
        if (path := local_path(self.earlier)) is not None:
            path.mkdir(parents=True)
            (path / "run.json").write_text("{}")  # a run before its first checkpoint

    def clear_earlier(self) -> None:
        """Remove the record that stands for the earlier run in plans, so that a real run can take its place."""
        if (path := local_path(self.earlier)) is not None:
            shutil.rmtree(path, ignore_errors=True)


def _write_code(code: Path) -> None:
    """Write the probe under several names, a shell script that starts it, and a wheel for pip without a network."""
    (code / "contract_package").mkdir(parents=True)
    for name in ("train.py", "other.py", "contract_package/module.py"):
        shutil.copy(str(probe.__file__), code / name)
    (code / "contract_package" / "__init__.py").write_text("")
    (code / "start.sh").write_text('exec "$(command -v python3 || command -v python)" train.py "$@"\n')
    (code / "leave.txt").write_text("leave me")
    (code / "requirements.txt").write_text("--no-index\n--find-links wheels\ncontract-wheel==1.0\n")
    (code / "wheels").mkdir()
    info = "contract_wheel-1.0.dist-info"
    members = {
        "contract_wheel.py": "WORD = 'installed'\n",
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: contract-wheel\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: contract\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": "",
    }
    with zipfile.ZipFile(code / "wheels" / "contract_wheel-1.0-py3-none-any.whl", "w") as wheel:
        for name, text in members.items():
            wheel.writestr(zipfile.ZipInfo(name), text)


@dataclass(frozen=True, kw_only=True)
class Seen:
    """Results of a finished run: the views of its ranks in order, its result, and the pulled folder."""

    ranks: tuple[Mapping[str, Any], ...]
    result: Mapping[str, Any]
    folder: Path

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Return the rows of the pulled metrics."""
        file = self.folder / "metrics.jsonl"
        return json_rows(file.read_bytes()) if file.is_file() else []

    def texts(self, folder: str, name: str) -> dict[str, str]:
        """Return the text of each pulled file below ``folder`` that matches ``name``, by its path there."""
        root = self.folder / folder
        return {p.relative_to(root).as_posix(): p.read_text() for p in root.rglob(name)}


@dataclass(frozen=True, kw_only=True)
class Row:
    """Change of one field. ``base`` is the job's fields before and after. ``run`` names the job that carries it, of
    `JOBS` or `CASES`, and ``seen`` checks it."""

    change: Callable[[Place], Fields]
    base: Callable[[Place], Fields] = lambda place: {}
    run: str = ""
    seen: Callable[[Seen], bool] = lambda seen: False


def _to(**change: Any) -> Callable[[Place], Fields]:
    return lambda place: change


def _input(**item: Any) -> Callable[[Place], Fields]:
    return lambda place: {"inputs": {"data": {"url": str(place.folder / "data"), **item}}}


def _ranks(test: Callable[[Mapping[str, Any]], bool]) -> Callable[[Seen], bool]:
    """Return a check that holds if there are ranks, and ``test`` holds for the view of each."""
    return lambda seen: bool(seen.ranks) and all(map(test, seen.ranks))


# ------------------------------------------------------------------------------------------------------ platform fields

PLATFORM: dict[str, Row] = {
    "name": Row(change=_to(name="another-name")),
    "image": Row(change=_to(image="registry.example/team/trainer:2")),
    "resources.instance_count": Row(change=_to(instance_count=2)),
    "resources.min_instance_count": Row(
        base=_to(instance_count=2, env={"KEEPS": "PLANNED_WORLD_SIZE"}),
        change=_to(instance_count="1:2", env={"KEEPS": "PLANNED_WORLD_SIZE"}),
    ),
    "resources.instance_type": Row(change=_to(instance_type="another-type")),
    "resources.gpu": Row(change=_to(gpu=("A100:2",))),
    "resources.total_gpus": Row(base=_to(gpu=("T4:4",)), change=_to(total_gpus=8)),
    "resources.gpu_memory": Row(change=_to(gpu_memory="8GB")),
    "resources.cpus": Row(change=_to(cpus=4)),
    "resources.memory_gb": Row(change=_to(memory_gb=24)),
    "resources.disk_gb": Row(change=_to(disk_gb=500)),
    "resources.shm_gb": Row(change=_to(shm_gb=4)),
    "resources.spot": Row(change=_to(spot=True)),
    "max_runtime": Row(change=_to(max_runtime=7200)),
    "max_wait": Row(change=_to(max_wait=9000)),
    "max_cost": Row(change=_to(max_cost=7.5)),
    "max_gpu_hours": Row(base=_to(gpu=("T4:1",)), change=_to(max_gpu_hours=1.5)),
    "retries": Row(change=_to(retries=2)),
    "keep_warm": Row(change=_to(keep_warm=1800)),
    "interactive": Row(change=_to(interactive=True)),
    "tags": Row(change=_to(tags={"team": "vision"})),
    "inputs.url": Row(base=_input(), change=lambda place: {"inputs": {"data": {"url": str(place.folder / "more")}}}),
    "inputs.mode": Row(base=_input(mode="copy"), change=_input(mode="mount")),
    "inputs.shard": Row(base=_input(), change=_input(shard=True)),
    "options": Row(change=lambda place: {"options": {place.provider: {"contract": {"verbatim": [1, "two", None]}}}}),
    "resume_from": Row(change=lambda place: {"resume_from": place.earlier}),
}
"""Fields that the platform honours in its request, or refuses; some may be the waiting client's (`by_client`)."""


def by_client(provider: Provider | type[Provider], field: str) -> bool:
    """Return True if a waiting client or the supervisor acts on the field, so that no request need hold it."""
    if field == "resources.min_instance_count":
        return provider.retried_by != "platform"
    return {"retries": provider.retried_by, "max_wait": provider.max_wait_by}.get(field) == "client"


def needs_nothing(provider: Provider | type[Provider], field: str) -> bool:
    """Return True if the platform does for every job what the field asks for; `plan` then says so in a note."""
    kind = provider if isinstance(provider, type) else type(provider)
    return field == "interactive" and extras_of_type(kind).always_interactive


# -------------------------------------------------------------------------------------------------------- script fields

_HYPERPARAMETERS = {"lr": 0.1, "name": "a b", "flag": True, "nested": {"k": [1, None]}, "run": "{run_id}"}
_FLAGS = {"--lr": "0.1", "--name": "a b", "--flag": "true", "--nested": '{"k": [1, null]}', "--run": "earlier"}
_NAMES, _VALUES = slice(1, 1 + 2 * len(_FLAGS), 2), slice(2, 2 + 2 * len(_FLAGS), 2)
_DEBUG_NCCL = {"NCCL_DEBUG": "INFO", "TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
_DEAD_END = "http://127.0.0.1:9/ended"
_LINE = "^probe 0 line ([0-9]+)$"
_INPUTS = {"DATA": {"a.csv": "data a", "sub/b.csv": "data b"}, "ONE_FILE": {"a.csv": "data a"}}
_SHARDS = {"shard-0.txt": "shard 0", "shard-1.txt": "shard 1"}
_SECRET_DIGEST = hashlib.sha256(SECRET.encode()).hexdigest()


def _row(run: str, seen: Callable[[Seen], bool], **change: Any) -> Row:
    """Return a row whose change names no folder or URL of the place."""
    return Row(change=_to(**change), run=run, seen=seen)


SCRIPT: dict[str, Row] = {
    "args": _row("torchrun", _ranks(lambda rank: rank["argv"][-len(STRANGE) :] == list(STRANGE)), args=STRANGE),
    "env": _row(
        "torchrun",
        _ranks(lambda rank: rank["env"]["CONTRACT_ENV"] == "a\nb 'c' earlier {x}"),
        env={"CONTRACT_ENV": "a\nb 'c' {run_id} {x}"},
    ),
    "hyperparameters": _row(
        "torchrun",
        _ranks(lambda rank: dict(zip(rank["argv"][_NAMES], rank["argv"][_VALUES], strict=True)) == _FLAGS),
        hyperparameters=_HYPERPARAMETERS,
    ),
    "hyperparameter_style": Row(
        base=_to(hyperparameters={"lr": 0.5}),
        change=_to(hyperparameters={"lr": 0.5}, hyperparameter_style="hydra"),
        run="python",
        seen=_ranks(lambda rank: rank["argv"][1:] == ["lr=0.5"]),
    ),
    "secrets": Row(
        change=lambda place: {"secrets": {probe.SECRET: place.secret}},
        run="torchrun",
        seen=_ranks(lambda rank: rank["secret"] == _SECRET_DIGEST),
    ),
    # Nothing answers there, and the run succeeds all the same. tests/e2e/test_on_end.py has one that answers.
    "webhook": _row("torchrun", lambda seen: seen.result["state"] == "succeeded", webhook=_DEAD_END),
    "webhook_headers": Row(
        base=lambda place: {"webhook": _DEAD_END, "secrets": {probe.SECRET: place.secret}},
        change=_to(webhook_headers={"Authorization": f"Bearer {{secrets.{probe.SECRET}}}"}),
        run="torchrun",
        seen=lambda seen: seen.result["state"] == "succeeded",
    ),
    "inputs": Row(
        change=lambda place: {"inputs": {"data": str(place.data), "one-file": str(place.data / "a.csv")}},
        run="torchrun",
        seen=_ranks(lambda rank: rank["inputs"] == _INPUTS),
    ),
    "resources.nproc_per_node": _row(
        "torchrun",
        lambda seen: [rank["env"]["LOCAL_WORLD_SIZE"] for rank in seen.ranks] == ["2"] * 4,
        nproc_per_node=2,
    ),
    "launcher": _row(
        "python",
        lambda seen: ["TORCHELASTIC_RUN_ID" in rank["env"] for rank in seen.ranks] == [False] * 2,
        launcher="python",
    ),
    "checkpoint_paths": _row(
        "command", lambda seen: bool(seen.texts("checkpoints", "weights.txt")), checkpoint_paths=("out/ckpt-*",)
    ),
    "keep_checkpoints": _row(
        "command",
        lambda seen: [*seen.texts("checkpoints", "weights.txt").values()] == ["weights 7"],
        keep_checkpoints=1,
    ),
    "outputs": _row("python", lambda seen: not (seen.folder / "outputs").exists(), outputs=False),
    "max_outputs": _row(
        "command",
        lambda seen: sorted(seen.texts("outputs", "*.txt")) == ["made/small.txt", "small.txt"],
        max_outputs="1kB",
    ),
    "stall_timeout": _row("stalled", lambda seen: seen.result["category"] == "stalled", stall_timeout=2),
    "min_gpu_util": _row("torchrun", lambda seen: seen.result["state"] == "succeeded", min_gpu_util="5% for 30m"),
    "node_check": _row("together", lambda seen: bool(seen.texts("artifacts", "preflight.json")), node_check=True),
    "debug_nccl": _row("python", _ranks(lambda rank: _DEBUG_NCCL.items() <= rank["env"].items()), debug_nccl=True),
    "metrics": _row(
        "command",
        lambda seen: [row["line"] for row in seen.metrics if row["step"] == row["line"]] == [*range(probe.LINES)],
        metrics={"step": _LINE, "line": _LINE},
    ),
    "resume_from": Row(
        change=lambda place: {"resume_from": place.earlier},
        run="user_error",
        seen=_ranks(lambda rank: rank["resume"] == _SHARDS),
    ),
    "source.entry_point": _row(
        "torchrun", _ranks(lambda rank: rank["argv"][0].rpartition("/")[2] == "other.py"), entry_point="other.py"
    ),
    "source.path": Row(
        change=lambda place: {"source_dir": str(place.moved)},
        run="torchrun",
        seen=lambda seen: any("moved.txt" in rank["files"] for rank in seen.ranks),
    ),
    "source.dependencies": Row(
        change=lambda place: {"dependencies": [str(place.folder / "contract_dependency")]},
        run="command",
        seen=_ranks(lambda rank: rank["words"]["contract_dependency"] == "beside"),
    ),
    "source.requirements": _row(
        "command",
        _ranks(lambda rank: rank["words"]["contract_wheel"] == "installed"),
        requirements="requirements.txt",
    ),
    "source.exclude": _row("command", _ranks(lambda rank: "leave.txt" not in rank["files"]), exclude=("leave.txt",)),
}
"""Fields that the script sees. ``resume_from`` is in both tables: a folder to mount, and a checkpoint to find."""

JOBS: dict[str, Fields] = {
    "torchrun": {"instance_count": 2, "env": {"PROBE": "checkpoint,metrics"}},
    "together": {"instance_count": 2, "nproc_per_node": 2, "env": {"PROBE": "gloo"}},
    "python": {"entry_point": "-m contract_package.module", "instance_count": 2, "env": {"PROBE": "metrics,outputs"}},
    "command": {"entry_point": "start.sh", "launcher": "command", "env": {"PROBE": "own-checkpoint,outputs"}},
    "stalled": {"env": {"PROBE": "silent"}},
}
"""Jobs that carry the changes of `SCRIPT`, all rows that name a job at once, and their own fields."""

SECRETS: dict[str, str] = {
    "env": "env:" + probe.SECRET,
    "aws": "aws:arn:aws:secretsmanager:eu-west-1:123456789012:secret:contract-AbCdEf",
    "azure": "azure:contract-vault/contract",
    "gcp": "gcp:projects/contract/secrets/contract/versions/1",
}
"""A reference of each kind; a provider takes or refuses it by name."""

ELSEWHERE: dict[str, str] = {"on": "replaces other fields for one provider before anything is planned"}
"""Fields that need no row, and why: `on` has its own test."""


_PARTS = {"": Job, "source": Source, "resources": Resources, "inputs": Input}


def field_helps() -> dict[str, str]:
    """Return the help text of every field of a Job and its parts, by its dotted name as the tables have it."""
    found = {
        f"{owner}.{f.name}".lstrip("."): str(f.metadata.get("help", ""))
        for owner, part in _PARTS.items()
        for f in fields(part)
    }
    return {name: text for name, text in found.items() if name not in ("source", "resources")}


# -------------------------------------------------------------------------------------------------------- ends of a run


@dataclass(frozen=True)
class Case:
    """A job, the action once its script holds (``cancel``; ``kill`` or ``preempt`` a node), and its end."""

    means: str
    state: str
    category: str | None
    exit_code: int
    probe: str = ""
    job: Fields = field(default_factory=dict)
    act: str = ""
    attempts: tuple[str, ...] = ("0.0",)


_TWO_NODES = {"instance_count": 2, "launcher": "python"}
CASES: dict[str, Case] = {
    "succeeded": Case("all ranks ended with 0", "succeeded", None, 0),
    "user_error": Case(
        "a rank raised, or ended with another code", "failed", "user_error", 1, probe="fail-last", job=_TWO_NODES
    ),
    "oom": Case("a rank ran out of memory", "failed", "oom", 1, probe="memory"),
    "timeout": Case("max_runtime is used up", "failed", "timeout", 6, probe="hold", job={"max_runtime": 2}),
    "cancelled": Case("the user cancelled it", "cancelled", "cancelled", 5, probe="hold", act="cancel"),
    "infra": Case("a node was lost without a notice", "failed", "infra", 9, probe="hold", job=_TWO_NODES, act="kill"),
    "preempted": Case(
        "the platform took a node back, after a notice, and started all nodes again",
        "succeeded",
        None,
        0,
        probe="checkpoint,metrics,hold-once",
        job=_TWO_NODES,
        act="preempt",
        attempts=("0.0", "0.1"),
    ),
    "retried": Case(
        "the first attempt failed and a further one was allowed",
        "succeeded",
        None,
        0,
        probe="fail-first",
        job={"retries": 1},
        attempts=("0.0", "1.0"),
    ),
}
"""Ways a run ends by its script and its nodes. `FakePlatform.fault` gives those that only the platform can cause."""


# ------------------------------------------------------------------------------------------------------------- planning


@dataclass(frozen=True, kw_only=True)
class _Given(Settings):
    """Settings of a provider that is already made."""

    made: Provider

    def make_provider(self, name: str | None = None, **given: Any) -> Provider:
        return self.made


def merged(*parts: Fields) -> dict[str, Any]:
    """Merge later fields over earlier ones; tables merge by key."""
    out: dict[str, Any] = {}
    for part in parts:
        for key, value in part.items():
            both = isinstance(value, Mapping) and isinstance(out.get(key), Mapping)
            out[key] = {**out[key], **value} if both else value
    return out


def plan_of(provider: Provider, place: Place, *parts: Fields, run_id: str = RUN_ID) -> Plan:
    """Return the plan of the probe, with the fields of ``parts``, as `submit` would send it."""
    defaults = {"name": "contract", "source_dir": str(place.code), "entry_point": "train.py"}
    return make_plan(
        Job.make(**merged(defaults, *parts)),
        settings=_Given(provider=provider.name, store=place.store, made=provider),
        run_id=run_id,
        cwd=place.folder,
    )


def _own(fields: Fields | Callable[[Place], Fields]) -> Callable[[Place], Fields]:
    return fields if callable(fields) else _to(**fields)


def platform_rows(provider: type[Provider]) -> dict[str, Row]:
    """Return `PLATFORM` in the words of one provider's `Sample`."""
    sample = Sample.of(provider)
    rows = dict(PLATFORM)
    for name in {*sample.rows, *sample.bases}:
        row = rows[name]
        rows[name] = Row(
            base=_own(sample.bases[name]) if name in sample.bases else row.base,
            change=_own(sample.rows[name]) if name in sample.rows else row.change,
        )
    return rows


def secret_row(kind: str) -> Row:
    """Return the row of a secret with a reference of that kind of `SECRETS`."""
    return Row(change=_to(secrets={"TOKEN": SECRETS[kind]}))


def verdict(provider: Provider, place: Place, row: Row, job: Fields) -> tuple[frozenset[str], UnsupportedError | None]:
    """Return the parts of the request (body, context) that the row's change reached, or its refusal."""
    base = row.base(place)
    before = plan_of(provider, place, job, base).request
    try:
        after = plan_of(provider, place, job, base, row.change(place)).request
    except UnsupportedError as exc:
        return frozenset(), exc
    return frozenset(part for part in ("body", "context") if getattr(before, part) != getattr(after, part)), None
