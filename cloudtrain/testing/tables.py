"""Define the contract suite's changes, and where each must show: a row for every field of a Job.

`PLATFORM` fields are the platform's to honour: a change reaches the native request, or is refused by name. `SCRIPT`
fields are the script's: a change reaches context.json, and a job of a World has seen it. `ELSEWHERE` gives the reason
for the few others. `CASES` are the ways a run can go. Standard library alone: the docs' matrix uses the tests' own
rows.
"""

from __future__ import annotations

import hashlib
import importlib
import shutil
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from ..errors import UnsupportedError
from ..job.job import Input, Job, Resources, Source
from ..provider_api.protocol import Provider
from ..runs.metrics import json_rows
from ..runs.submit import Plan, make_plan
from ..settings.settings import Settings
from ..storage.local_disk import local_path
from . import probe

__all__ = [
    "CASES",
    "ELSEWHERE",
    "JOBS",
    "PLATFORM",
    "RUN_ID",
    "SCRIPT",
    "SECRET",
    "SECRETS",
    "Case",
    "Fields",
    "Place",
    "Row",
    "Sample",
    "Seen",
    "by_client",
    "field_names",
    "merged",
    "plan_of",
    "platform_rows",
    "settings_of",
    "verdict",
]

Fields = Mapping[str, Any]
"""Flat fields of a Job, as `Job.make` takes them."""

RUN_ID = "contract"
SECRET = "s3cret-of-the-contract-suite"
"""The value of every World's secret."""
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
    needs. ``secret`` is a reference of a kind that its nodes read.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    store: str = ""
    job: Fields = field(default_factory=dict)
    rows: Mapping[str, Fields] = field(default_factory=dict)
    bases: Mapping[str, Fields] = field(default_factory=dict)
    secret: str = "env:" + probe.SECRET

    @classmethod
    def of(cls, provider: type[Provider]) -> Sample:
        return cls(**getattr(importlib.import_module(provider.__module__), "SAMPLE", {}))


@dataclass(frozen=True, kw_only=True)
class Place:
    """Folders and URLs that rows name. ``secret`` refers to `SECRET`; ``earlier`` is a run of the store."""

    folder: Path
    store: str
    provider: str
    secret: str

    @property
    def code(self) -> Path:
        return self.folder / "code"

    @property
    def moved(self) -> Path:
        return self.folder / "moved"

    @property
    def data(self) -> Path:
        return self.folder / "data"

    @property
    def earlier(self) -> str:
        return f"{self.store}/runs/earlier"

    @classmethod
    def make(cls, folder: Path, *, store: str, provider: str, secret: str) -> Place:
        """Return the place, with its files written below ``folder``."""
        place = cls(folder=folder, store=store, provider=provider, secret=secret)
        for code in (place.code, place.moved):
            _write_code(code)
        (place.moved / "moved.txt").write_text("moved")
        for name in ("data", "more"):
            (folder / name / "sub").mkdir(parents=True)
            (folder / name / "a.csv").write_text(f"{name} a")
            (folder / name / "sub" / "b.csv").write_text(f"{name} b")
        (folder / "contract_dependency").mkdir()
        (folder / "contract_dependency" / "__init__.py").write_text("WORD = 'beside'\n")
        if (path := local_path(place.earlier)) is not None:
            path.mkdir(parents=True)
            (path / "run.json").write_text("{}")  # a run before its first checkpoint
        return place

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

    def all(self, test: Callable[[Mapping[str, Any]], bool]) -> bool:
        """Return True if there are ranks, and ``test`` holds for each."""
        return bool(self.ranks) and all(map(test, self.ranks))


@dataclass(frozen=True, kw_only=True)
class Row:
    """Change of one field. ``base`` is the job's fields before and after. ``run`` names the job of `JOBS` that carries
    the change, and ``seen`` checks it."""

    change: Callable[[Place], Fields]
    base: Callable[[Place], Fields] = lambda place: {}
    run: str = ""
    seen: Callable[[Seen, Place], bool] = lambda seen, place: False


def _to(**change: Any) -> Callable[[Place], Fields]:
    return lambda place: change


def _input(**item: Any) -> Callable[[Place], Fields]:
    return lambda place: {"inputs": {"data": {"url": str(place.folder / "data"), **item}}}


# ------------------------------------------------------------------------------------------------------ platform fields

PLATFORM: dict[str, Row] = {
    "name": Row(change=_to(name="another-name")),
    "image": Row(change=_to(image="registry.example/team/trainer:2")),
    "resources.instance_count": Row(change=_to(instance_count=2)),
    "resources.instance_type": Row(change=_to(instance_type="another-type")),
    "resources.gpu": Row(change=_to(gpu=("A100:2",))),
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
    "tags": Row(change=_to(tags={"team": "vision"})),
    "inputs.url": Row(base=_input(), change=lambda place: {"inputs": {"data": {"url": str(place.folder / "more")}}}),
    "inputs.mode": Row(base=_input(mode="copy"), change=_input(mode="mount")),
    "inputs.shard": Row(base=_input(), change=_input(shard=True)),
    "options": Row(change=lambda place: {"options": {place.provider: {"contract": {"verbatim": [1, "two", None]}}}}),
    "resume_from": Row(change=lambda place: {"resume_from": place.earlier}),
}
"""Fields that the platform honours in its request, or refuses; some may be the waiting client's (`by_client`)."""


def by_client(provider: Provider | type[Provider], field: str) -> bool:
    """Return True if a waiting client acts on the field, so that no request need hold it."""
    return {"retries": provider.retried_by, "max_wait": provider.max_wait_by}.get(field) == "client"


# -------------------------------------------------------------------------------------------------------- script fields

_HYPERPARAMETERS = {"lr": 0.1, "name": "a b", "flag": True, "nested": {"k": [1, None]}, "run": "{run_id}"}
_FLAGS = {"--lr": "0.1", "--name": "a b", "--flag": "true", "--nested": '{"k": [1, null]}', "--run": "earlier"}
_LINE = "^probe 0 line ([0-9]+)$"
_DATA = {"a.csv": "data a", "sub/b.csv": "data b"}


def _pairs(words: Sequence[str]) -> dict[str, str]:
    return dict(zip(words[::2], words[1::2], strict=True))


def _listed(seen: Seen, name: str) -> bool:
    return any(name in rank["files"] for rank in seen.ranks)


SCRIPT: dict[str, Row] = {
    "args": Row(
        change=_to(args=STRANGE),
        run="torchrun",
        seen=lambda seen, place: seen.all(lambda rank: rank["argv"][-len(STRANGE) :] == list(STRANGE)),
    ),
    "env": Row(
        change=_to(env={"CONTRACT_ENV": "a\nb 'c' {run_id} {x}"}),
        run="torchrun",
        seen=lambda seen, place: seen.all(lambda rank: rank["env"]["CONTRACT_ENV"] == "a\nb 'c' earlier {x}"),
    ),
    "hyperparameters": Row(
        change=_to(hyperparameters=_HYPERPARAMETERS),
        run="torchrun",
        seen=lambda seen, place: seen.all(lambda rank: _pairs(rank["argv"][1 : 1 + 2 * len(_FLAGS)]) == _FLAGS),
    ),
    "hyperparameter_style": Row(
        base=_to(hyperparameters={"lr": 0.5}),
        change=_to(hyperparameters={"lr": 0.5}, hyperparameter_style="hydra"),
        run="python",
        seen=lambda seen, place: seen.all(lambda rank: rank["argv"][1:] == ["lr=0.5"]),
    ),
    "secrets": Row(
        change=lambda place: {"secrets": {probe.SECRET: place.secret}},
        run="torchrun",
        seen=lambda seen, place: seen.all(lambda rank: rank["secret"] == hashlib.sha256(SECRET.encode()).hexdigest()),
    ),
    "inputs": Row(
        change=lambda place: {"inputs": {"data": str(place.data), "one-file": str(place.data / "a.csv")}},
        run="torchrun",
        seen=lambda seen, place: seen.all(
            lambda rank: rank["inputs"] == {"DATA": _DATA, "ONE_FILE": {"a.csv": "data a"}}
        ),
    ),
    "resources.nproc_per_node": Row(
        change=_to(nproc_per_node=2),
        run="torchrun",
        seen=lambda seen, place: len(seen.ranks) == 4 and seen.all(lambda r: r["env"]["LOCAL_WORLD_SIZE"] == "2"),
    ),
    "launcher": Row(
        change=_to(launcher="python"),
        run="python",
        seen=lambda seen, place: len(seen.ranks) == 2 and seen.all(lambda r: "TORCHELASTIC_RUN_ID" not in r["env"]),
    ),
    "checkpoint_paths": Row(
        change=_to(checkpoint_paths=("out/ckpt-*",)),
        run="command",
        seen=lambda seen, place: any((seen.folder / "checkpoints").rglob("weights.txt")),
    ),
    "keep_checkpoints": Row(
        change=_to(keep_checkpoints=1),
        run="command",
        seen=lambda seen, place: (
            [p.read_text() for p in (seen.folder / "checkpoints").rglob("weights.txt")] == ["weights 7"]
        ),
    ),
    "outputs": Row(
        change=_to(outputs=False), run="python", seen=lambda seen, place: not (seen.folder / "outputs").exists()
    ),
    "max_outputs": Row(
        change=_to(max_outputs="1kB"),
        run="command",
        seen=lambda seen, place: (
            sorted(p.relative_to(seen.folder / "outputs").as_posix() for p in (seen.folder / "outputs").rglob("*.txt"))
            == ["made/small.txt", "small.txt"]
        ),
    ),
    "stall_timeout": Row(
        change=_to(stall_timeout=2), run="stalled", seen=lambda seen, place: seen.result["category"] == "stalled"
    ),
    "debug_nccl": Row(
        change=_to(debug_nccl=True),
        run="python",
        seen=lambda seen, place: seen.all(
            lambda rank: (rank["env"]["NCCL_DEBUG"], rank["env"]["TORCH_DISTRIBUTED_DEBUG"]) == ("INFO", "DETAIL")
        ),
    ),
    "metrics": Row(
        change=_to(metrics={"step": _LINE, "line": _LINE}),
        run="command",
        seen=lambda seen, place: (
            [row["line"] for row in seen.metrics if row["step"] == row["line"]] == [*range(probe.LINES)]
        ),
    ),
    "resume_from": Row(
        change=lambda place: {"resume_from": place.earlier},
        run="python",
        seen=lambda seen, place: seen.all(
            lambda rank: rank["resume"] == {"shard-0.txt": "shard 0", "shard-1.txt": "shard 1"}
        ),
    ),
    "source.entry_point": Row(
        change=_to(entry_point="other.py"),
        run="torchrun",
        seen=lambda seen, place: seen.all(lambda rank: rank["argv"][0].rpartition("/")[2] == "other.py"),
    ),
    "source.path": Row(
        change=lambda place: {"source_dir": str(place.moved)},
        run="torchrun",
        seen=lambda seen, place: _listed(seen, "moved.txt"),
    ),
    "source.dependencies": Row(
        change=lambda place: {"dependencies": [str(place.folder / "contract_dependency")]},
        run="command",
        seen=lambda seen, place: seen.all(lambda rank: rank["words"]["contract_dependency"] == "beside"),
    ),
    "source.requirements": Row(
        change=_to(requirements="requirements.txt"),
        run="command",
        seen=lambda seen, place: seen.all(lambda rank: rank["words"]["contract_wheel"] == "installed"),
    ),
    "source.exclude": Row(
        change=_to(exclude=("leave.txt",)),
        run="command",
        seen=lambda seen, place: bool(seen.ranks) and not _listed(seen, "leave.txt"),
    ),
}
"""Fields that the script sees. ``resume_from`` is in both tables: a folder to mount, and a checkpoint to find."""

JOBS: dict[str, Fields] = {
    "torchrun": {"instance_count": 2, "env": {"PROBE": "gloo,checkpoint,metrics"}},
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


def field_names() -> set[str]:
    """Return the dotted names of every field of a Job and its parts, as the tables must have them."""
    names = {f.name for f in fields(Job)} - {"source", "resources"}
    return names | {
        f"{owner}.{f.name}"
        for owner, part in (("source", Source), ("resources", Resources), ("inputs", Input))
        for f in fields(part)
    }


# -------------------------------------------------------------------------------------------------------- ends of a run


@dataclass(frozen=True, kw_only=True)
class Case:
    """A job, the action once its script holds (``cancel``; ``kill`` or ``preempt`` a node), and its end."""

    means: str
    state: str
    category: str | None
    exit_code: int
    probe: str
    job: Fields = field(default_factory=dict)
    act: str = ""
    attempts: tuple[str, ...] = ("0.0",)


CASES: dict[str, Case] = {
    "succeeded": Case(means="all ranks ended with 0", state="succeeded", category=None, exit_code=0, probe=""),
    "user_error": Case(
        means="a rank raised, or ended with another code",
        state="failed",
        category="user_error",
        exit_code=1,
        probe="fail-last",
        job={"instance_count": 2, "nproc_per_node": 2},
    ),
    "oom": Case(means="a rank ran out of memory", state="failed", category="oom", exit_code=1, probe="memory"),
    "timeout": Case(
        means="max_runtime is used up",
        state="failed",
        category="timeout",
        exit_code=6,
        probe="hold",
        job={"max_runtime": 2},
    ),
    "cancelled": Case(
        means="the user cancelled it", state="cancelled", category="cancelled", exit_code=5, probe="hold", act="cancel"
    ),
    "infra": Case(
        means="a node was lost without a notice",
        state="failed",
        category="infra",
        exit_code=9,
        probe="hold",
        job={"instance_count": 2, "launcher": "python"},
        act="kill",
    ),
    "preempted": Case(
        means="the platform took a node back, after a notice, and started all nodes again",
        state="succeeded",
        category=None,
        exit_code=0,
        probe="checkpoint,metrics,hold-once",
        job={"instance_count": 2, "launcher": "python"},
        act="preempt",
        attempts=("0.0", "0.1"),
    ),
    "retried": Case(
        means="the first attempt failed and a further one was allowed",
        state="succeeded",
        category=None,
        exit_code=0,
        probe="fail-first",
        job={"retries": 1},
        attempts=("0.0", "1.0"),
    ),
}
"""Ways a run goes by its script and its nodes. A `World`'s ``fault`` gives those that only the platform can cause."""


# ------------------------------------------------------------------------------------------------------------- planning


@dataclass(frozen=True, kw_only=True)
class _Given(Settings):
    """Settings of a provider that is already made."""

    made: Provider

    def make_provider(self, name: str | None = None, **given: Any) -> Provider:
        return self.made


def settings_of(provider: Provider) -> Any:
    """Return the provider's settings, an instance of its ``Settings``."""
    return provider.settings


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


def platform_rows(provider: type[Provider]) -> dict[str, Row]:
    """Return `PLATFORM` in the words of one provider's `Sample`."""
    sample = Sample.of(provider)
    rows = dict(PLATFORM)
    for name in {*sample.rows, *sample.bases}:
        row = rows[name]
        rows[name] = Row(
            base=_to(**sample.bases[name]) if name in sample.bases else row.base,
            change=_to(**sample.rows[name]) if name in sample.rows else row.change,
        )
    return rows


def verdict(provider: Provider, place: Place, row: Row, job: Fields) -> tuple[frozenset[str], UnsupportedError | None]:
    """Return the parts of the request (body, context) that the row's change reached, or its refusal."""
    base = row.base(place)
    before = plan_of(provider, place, job, base).request
    try:
        after = plan_of(provider, place, job, base, row.change(place)).request
    except UnsupportedError as exc:
        return frozenset(), exc
    return frozenset(part for part in ("body", "context") if getattr(before, part) != getattr(after, part)), None
