"""The output of ``--json``, checked by the published schemas: every verb, state and error, and no further keys."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import check_jsonschema
import foldercloud
import jsonschema
import pytest
from click.testing import CliRunner
from rows import for_each

from cloudtrain import cli, errors, schemas
from cloudtrain.cli import runs
from cloudtrain.job import fields, job
from cloudtrain.provider_api import protocol
from cloudtrain.provider_api.protocol import STATES
from cloudtrain.runs.log_order import Line
from cloudtrain.store import store

ROOT = Path(__file__).parents[2]
CHECKERS = {name: jsonschema.Draft202012Validator(schemas.load(name), format_checker=None) for name in schemas.names()}
NOT_VERBS = {"error", "result"}
"""Schemas that are not named after a verb."""


def valid(name: str, value: Any) -> Any:
    """Return ``value`` if the schema accepts it."""
    CHECKERS[name].validate(value)
    return value


def refused(name: str, value: Any) -> bool:
    return not CHECKERS[name].is_valid(value)


def out_of_order(value: Any, schema: dict[str, Any], defs: dict[str, Any]) -> list[Any]:
    """Return the objects in ``value`` whose keys have another order than in the schema, at every depth."""
    if "$ref" in schema:
        more = {key: item for key, item in schema.items() if key == "properties"}
        target = defs[schema["$ref"].rpartition("/")[2]]
        while "$ref" in target:
            target = defs[target["$ref"].rpartition("/")[2]]
        schema = {**target, "properties": {**target.get("properties", {}), **more.get("properties", {})}}
    if "oneOf" in schema:
        checkers = [(jsonschema.Draft202012Validator({**one, "$defs": defs}), one) for one in schema["oneOf"]]
        schema = next(one for checker, one in checkers if checker.is_valid(value))
        return out_of_order(value, schema, defs)
    found: list[Any] = []
    if isinstance(value, dict):
        order = list(schema.get("properties", {}))
        known = [key for key in value if key in order]
        found += [] if known == sorted(known, key=order.index) else [known]
        for key in known:
            found += out_of_order(value[key], schema["properties"][key], defs)
    elif isinstance(value, list) and isinstance(schema.get("items"), dict):
        for item in value:
            found += out_of_order(item, schema["items"], defs)
    return found


class Account:
    """The command line in this process, on a platform that is a folder, with a store in another."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self.capsys = folder, capsys
        self.jobs = foldercloud.Provider(folder=str(folder / "jobs"))

    def of(self, verb: str, *words: str, code: int | None = 0) -> Any:
        """Return the one object on stdout, checked by the verb's schema. It exits with ``code`` (None: any)."""
        ended = cli.main([verb, "--json", *words])
        out, err = self.capsys.readouterr()
        assert code in (None, ended), (ended, out, err)
        assert out.endswith("\n")
        found = valid(verb, json.loads(out))
        assert out_of_order(found, schemas.load(verb), schemas.load(verb)["$defs"]) == []
        assert found.get("exit_code") is None or "state" in found or found["exit_code"] == ended
        return found

    def lines(self, *words: str, code: int = 0) -> list[Any]:
        assert cli.main(["logs", *words, "--json"]) == code
        return [valid("logs", json.loads(line)) for line in self.capsys.readouterr().out.splitlines()]

    def submit(self, run_id: str, *words: str, **status: Any) -> None:
        """Submit a detached run whose platform's job has this status."""
        self.of("submit", "train.py", "--run-id", run_id, "--detach", *words)
        if status:
            self.jobs.stand(f"{run_id}.0", **status)


@pytest.fixture
def account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Account:
    foldercloud.install(tmp_path / "site")
    (tmp_path / "site/foldercloud.py").unlink()  # the module comes from this process
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    (tmp_path / "jobs").mkdir()
    code = tmp_path / "code"
    code.mkdir()
    (code / "train.py").write_text("print('hello')\n")
    (code / "cloudtrain.toml").write_text(f'provider = "foldercloud"\n[foldercloud]\nfolder = "{tmp_path}/jobs"\n')
    monkeypatch.chdir(code)
    return Account(tmp_path, capsys)


# ------------------------------------------------------------------------------------------------------ the files


def test_every_verb_has_a_schema_and_every_schema_a_verb() -> None:
    printing = {verb for verb in cli.VERBS if "--json" in _help_of(verb)}
    assert set(schemas.names()) == printing | NOT_VERBS


def _help_of(verb: str) -> str:
    return " ".join(name for item in cli.make_app()[verb].assemble_argument_collection() for name in item.names)


@pytest.mark.costly
@for_each("name", [*schemas.names(), schemas.SHARED])
def test_the_files_are_schemas_and_strict(name: str) -> None:
    raw = json.loads(schemas.path(name).read_text())
    assert raw["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    jsonschema.Draft202012Validator.check_schema(raw)
    loose = [where for where, schema in _objects(raw, name) if not _strict(schema)]
    free = {
        "plan.$defs.plan.settings", "plan.$defs.plan.request.body", "plan.$defs.plan.request.context",
        "defs.$defs.outcome", "defs.$defs.job.hyperparameters", "defs.$defs.job.options", "defs.$defs.job.on",
        "doctor.$defs.nodes.report",
    }  # fmt: skip
    assert {where for where in loose if not where.startswith("defs.$defs.outcome.")} <= free


def _objects(schema: Any, where: str) -> Iterator[tuple[str, dict[str, Any]]]:
    if isinstance(schema, dict):
        if schema.get("type") == "object" or schema.get("type") == ["object", "null"]:
            yield where, schema
        for key, item in schema.items():
            yield from _objects(item, where if key in ("properties", "items", "oneOf") else f"{where}.{key}")
    elif isinstance(schema, list):
        for item in schema:
            yield from _objects(item, where)


def _strict(schema: dict[str, Any]) -> bool:
    return "additionalProperties" in schema


@for_each("name", [*schemas.names(), schemas.SHARED, *schemas.WRITTEN])
def test_each_field_has_a_description_that_names_its_value(name: str) -> None:
    """An editor shows this text alone, or that of the definition to which the field refers."""
    fields = dict(_fields(json.loads(schemas.path(name).read_text()), name))
    assert [where for where, field in fields.items() if not {"description", "$ref"} & field.keys()] == []
    fragments = ("of", "that", "what", "who", "whose", "where", "how", "why", "whether", "by", "from", "its", "it")
    texts = {where: field.get("description", "") for where, field in fields.items()}
    assert {
        where: text for where, text in texts.items() if text.lower().startswith(tuple(f"{w} " for w in fragments))
    } == {}


def _fields(schema: Any, where: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each field and definition with its path, at every depth."""
    if isinstance(schema, dict):
        for key, item in schema.items():
            named = key in ("properties", "$defs")
            if named:
                yield from ((f"{where}.{field}", spec) for field, spec in item.items())
            for inner, spec in item.items() if named else [("", item)]:
                if key not in ("if", "then", "else"):
                    yield from _fields(spec, f"{where}.{inner}" if inner else where)
    elif isinstance(schema, list):
        for number, item in enumerate(schema):
            yield from _fields(item, f"{where}[{number}]")


def test_the_files_refer_to_each_other_as_files(tmp_path: Path) -> None:
    """A tool that has the path of one, and knows nothing else, finds the others."""
    error = {"error": "x: no", "field": "x", "hint": "", "exit_code": 2}
    (tmp_path / "good.json").write_text(json.dumps(error))
    (tmp_path / "bad.json").write_text(json.dumps({**error, "more": 1}))
    for name, code in (("good", 0), ("bad", 1)):
        words = ["--schemafile", str(schemas.path("status")), str(tmp_path / f"{name}.json")]
        done = CliRunner().invoke(check_jsonschema.main, words)
        assert done.exit_code == code, done.output


def test_words_are_those_of_the_code() -> None:
    shared = json.loads(schemas.path(schemas.SHARED).read_text())["$defs"]
    assert shared["state"]["enum"] == list(STATES)
    assert shared["category"]["enum"] == [*errors.CATEGORIES, None]
    for name in ("list", "reconcile"):
        row = schemas.load(name)["$defs"]["row"]
        assert row["properties"]["state"]["enum"] == [*STATES, "unknown"]
    kinds = {
        "job": job.Job,
        "input": job.Input,
    }
    for name, kind in kinds.items():
        assert set(shared[name]["properties"]) == {f.name for f in dataclasses.fields(kind)}
    for name, kind in (("source", job.Source), ("resources", job.Resources)):
        assert set(shared["job"]["properties"][name]["properties"]) == {f.name for f in dataclasses.fields(kind)}
    assert set(schemas.load("logs")["$defs"]["line"]["properties"]) == {f.name for f in dataclasses.fields(Line)}
    assert set(schemas.load("plan")["$defs"]["layout"]["properties"]) == {
        f.name for f in dataclasses.fields(protocol.Layout)
    }
    assert shared["run_id"]["pattern"].strip("^$") == fields._ID.pattern.strip("^$")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tool", "page"),
    [
        ("json_page", "json.md"),
        ("python_page", "python.md"),
        ("providers_page", "providers.md"),
        ("reference_page", "reference.md"),
        ("llms", "llms.txt"),
    ],
)
def test_a_made_page_is_not_stale(tool: str, page: str, capsys: pytest.CaptureFixture[str]) -> None:
    with suppress(SystemExit):
        runpy.run_path(str(ROOT / f"tools/{tool}.py"), run_name="__main__")
    made = capsys.readouterr()
    assert made.out == (ROOT / "docs" / page).read_text(), f"python tools/{tool}.py > docs/{page}"
    assert made.err == ""
    assert "| ignored |" not in made.out, "a provider silently ignores a field"


# ------------------------------------------------------------------------------------------------------------- refusals


TUNE = """
metric = "loss"
job = "job.toml"
[limits]
trials = 3
parallel = 2
max_cost = 10
[trial]
max_cost = 2.5
[space]
lr = [0.1, 0.2]
"""


@pytest.mark.costly
def test_a_budget_that_runs_share_and_what_they_have_cost(account: Account) -> None:
    assert account.of("budget", "team", code=2)["field"] == "budget"
    words = ("submit", "train.py", "--set", "budget=team", "--detach")
    assert "no budget 'team'" in account.of(*words, "--run-id", "early", "--max-cost", "6", code=2)["error"]
    made = account.of("budget", "team", "--max-cost", "10")
    assert made["limits"] == {"max_cost": {"limit": 10.0, "used": 0, "reserved": 0}, "max_gpu_hours": None}
    free = account.of(*words, "--run-id", "free", code=2)
    assert ("needs its own max_cost" in free["error"], free["hint"]) == (True, "add --max-cost USD")
    for _ in range(2):  # the second time it is the same run
        account.of(*words, "--run-id", "one", "--max-cost", "6", "--tag", "team=red")
    no = account.of(*words, "--run-id", "two", "--max-cost", "6", code=2)
    assert no["error"] == "budget: 4.00 of 10 USD are left in 'team'; this run may use 6"
    assert no["hint"] == "to see its runs: cloudtrain budget team; to close ended ones: cloudtrain reconcile"
    assert not [run for run in ("early", "free", "two") if Path(f".cloudtrain/runs/{run}/run.json").exists()]
    assert account.of("budget", "team")["runs"] == [{"run_id": "one", "max_cost": 6.0, "max_gpu_hours": None}]
    account.jobs.stand("one.0", state="succeeded", attempts=ATTEMPTS[1:], cost_usd=1.5)
    account.of("wait", "one")
    account.of(*words, "--run-id", "two", "--max-cost", "6")
    account.of("cancel", "two", "--wait")
    known = account.of("budget", "team")
    assert (known["limits"]["max_cost"]["used"], known["runs"]) == (1.5, [])
    account.of("submit", "train.py", "--detach", "--run-id", "old")
    account.jobs.stand("old.0", state="failed", attempts=ATTEMPTS[1:], cost_usd=None)
    total = account.of("cost", "--by", "team", "--since", "1d")
    assert (total["total"]["runs"], total["total"]["usd"], total["total"]["usd_unknown"]) == (3, 1.5, 1)
    assert [(group["value"], group["usd"]) for group in total["groups"]] == [("red", 1.5), (None, 0.0)]
    refused = account.of(*words, "--run-id", "three", "--max-cost", "1", "--fallback", "spare", code=2)
    assert (refused["field"], refused["hint"]) == ("budget", "leave the fallback out: --fallback=")


@pytest.mark.costly
def test_the_trials_of_a_sweep_reserve_from_the_budget_too(account: Account) -> None:
    def held() -> list[str]:
        return [row["run_id"] for row in account.of("budget", "team")["runs"]]

    Path("tune.toml").write_text(TUNE)
    Path("job.toml").write_text('entry_point = "train.py"\n')
    account.of("budget", "team", "--max-cost", "4")
    refused = account.of("sweep", "tune.toml", "--sweep-id", "s", "--set", "budget=team", "--detach", code=2)
    assert (refused["field"], held()) == ("budget", ["s-0000"])
    assert not Path(".cloudtrain/runs/s-0001/run.json").exists()
    account.of("budget", "team", "--max-cost", "9")
    account.of("sweep", "s", "--detach")  # another client, without the setting: the sweep's record has it
    assert held() == ["s-0000", "s-0001"]
    account.of("sweep", "s", "--parallel", "3", "--detach")
    assert held() == ["s-0000", "s-0001", "s-0002"]
    account.of("budget", "team", "--max-cost", "1")
    assert account.of("cancel", "s")["exit_code"] in (None, 5)  # also with a budget that is used up
    account.of("sweep", "tune.toml", "--sweep-id", "t", "--set", "budget=team", "--detach", code=2)
    assert account.of("cancel", "t")["state"] == "cancelled"  # its trial was never recorded


@pytest.mark.costly
def test_a_sweep_in_every_verb(account: Account) -> None:
    Path("tune.toml").write_text(TUNE)
    Path("job.toml").write_text('entry_point = "train.py"\n')
    planned = account.of("plan", "tune.toml")
    assert planned["sweep"]["cap"] == {"max_cost": 2.5, "max_runtime": 86400}
    assert planned["job"]["hyperparameters"]["lr"] in (0.1, 0.2)
    assert planned["run_id"] == "train-plan-0000"
    assert not Path(".cloudtrain").exists()
    assert account.of("plan", "tune.toml", "--nodes", "2", code=2)["field"] == "instance_count"
    first = account.of("sweep", "tune.toml", "--sweep-id", "s", "--detach")
    assert first["trials"][0]["params"]["lr"] == planned["job"]["hyperparameters"]["lr"]
    assert (first["state"], first["exit_code"], first["counts"]["running"]) == ("running", None, 2)
    assert first["budget"]["max_cost"] == {"limit": 10.0, "used": 0, "reserved": 5.0}
    assert account.of("sweep", "s", "--wait-timeout", "1s", code=7)["sweep_id"] == "s"
    assert account.of("status", "s")["trials"] == first["trials"]
    for number, (loss, cost) in enumerate(((0.5, 1.0), (0.25, 0.5), (0.75, 2.0))):
        run = f"s-{number:04d}"
        metrics = Path(f".cloudtrain/runs/{run}/live/metrics/0.0-node-0.jsonl")
        metrics.parent.mkdir(parents=True)
        metrics.write_text(json.dumps({"step": 1, "loss": loss}) + "\n")
        account.jobs.stand(f"{run}.0", state="succeeded", attempts=ATTEMPTS[1:], cost_usd=cost)
        rows = account.of("reconcile")["runs"]
        assert (rows[-1]["run_id"], rows[-1]["error"]) == ("s", None)
    found = account.of("reconcile", "s")
    assert account.of("reconcile", str(Path(".cloudtrain/sweeps/s").absolute())) == found
    assert account.of("reconcile")["runs"] == []
    assert (found["state"], found["exit_code"], found["best"]["run_id"]) == ("succeeded", 0, "s-0001")
    assert found["budget"]["max_cost"] == {"limit": 10.0, "used": 3.5, "reserved": 0.0}
    for verb, *words in (
        ["status", "s"],
        ["wait", "s"],
        ["watch", "s"],
        ["list", "s"],
        ["cancel", "s"],
        ["sweep", "s"],
    ):
        assert account.of(verb, *words) == found
    assert account.of("status", "s", "s-0001")["runs"][0] == found
    assert account.of("report", "s")["sweep_id"] == "s"
    assert "s-0002" in Path("s.html").read_text()
    assert account.of("pull", "s", "out")["run_id"] == "s-0001"
    assert account.of("logs", "s", code=2)["hint"] == "to list its trials, run: cloudtrain list s"
    more = account.of("sweep", "s", "--trials", "4", "--detach")
    assert (more["state"], more["limits"]["trials"]) == ("running", 4)
    assert account.of("cancel", "s")["reason"] == "cancelled"
    assert account.of("wait", "s", code=5)["counts"]["cancelled"] == 1


def test_a_sweep_that_cannot_be_sent(account: Account) -> None:
    Path("job.toml").write_text('entry_point = "train.py"\n')
    Path("tune.toml").write_text(TUNE.replace("[trial]\nmax_cost = 2.5\n", ""))
    assert account.of("sweep", "tune.toml", code=2)["field"] == "limits.max_cost"
    assert account.of("sweep", "none.toml", code=2)["field"] == "sweep"
    assert account.of("sweep", "none", code=2)["field"] == "sweep"
    assert account.of("list", "none", code=2)["field"] == "sweep"
    Path("tune.toml").write_text(TUNE)
    account.of("sweep", "tune.toml", "--sweep-id", "s", "--detach")
    Path("tune.toml").write_text(TUNE.replace("0.2", "0.3"))
    assert account.of("sweep", "tune.toml", "--sweep-id", "s", code=2)["field"] == "sweep_id"
    assert not Path(".cloudtrain/runs/s-0002").exists()


@pytest.mark.costly
def test_what_is_no_answer_is_refused(account: Account) -> None:
    account.submit("r1", state="failed", category="oom", reason="too much")
    good = account.of("status", "r1")
    changed: list[dict[str, Any]] = [{**good, key: None} for key in ("run", "run_id", "state", "attempts", "cost")]
    changed += [{key: value for key, value in good.items() if key != left} for left in good]
    changed += [{**good, "more": 1}, {**good, "state": "done"}, {**good, "category": "bad"}, {**good, "exit_code": 10}]
    changed += [{**good, "exit_code": None}, {**good, "state": "running"}]
    changed += [{**good, "cost": {**good["cost"], "usd": 1}}]
    changed += [{**good, "attempts": [{**good["attempts"][0], "number": "first"}]}, {**good, "error": "x"}]
    changed += [{"error": "x", "exit_code": 2}, {"error": "x\ny", "field": "", "hint": "", "exit_code": 2}, {}]
    refusal: dict[str, Any] = {"error": "x", "field": "", "hint": "", "exit_code": 2}
    changed += [{**refusal, "exit_code": 0}, {**refusal, "run": 1}]
    for value in changed:
        assert refused("status", value), value
    listed = account.of("list")
    assert refused("list", {**listed, "order": "name"})
    assert refused("list", {**listed, "runs": [{**listed["runs"][0], "cost": 1}]})
    plan = account.of("plan", "train.py")
    for part in plan:
        assert refused("plan", {key: value for key, value in plan.items() if key != part})
    assert refused("plan", {**plan, "job": {**plan["job"], "nodes": 2}})


# ---------------------------------------------------------------------------------------------- every verb, every state


ATTEMPTS = [
    {"number": "0.0", "started": 1e9, "ended": 1e9 + 9, "reason": "spot reclaimed", "category": "preempted", "node": 1},
    {"number": "0.1", "started": 1e9 + 20, "resumed_from": "step-8"},
]
STANDS: dict[str, dict[str, Any]] = {
    "pending": {"state": "pending", "reason": "waits for machines"},
    "running": {"state": "running", "started": 1e9},
    "preempted": {"state": "pending", "category": "preempted", "reason": "reclaimed", "attempts": ATTEMPTS[:1]},
    "restarted": {"state": "running", "attempts": ATTEMPTS},
    "succeeded": {"state": "succeeded", "attempts": ATTEMPTS, "billed_s": 12.5, "cost_usd": 0.5, "saved": 0.6},
    "failed": {"state": "failed", "category": "oom", "reason": "too much"},
    "cancelled": {"state": "cancelled", "reason": "by the user"},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", STANDS)
def test_a_run_in_every_state(account: Account, name: str) -> None:
    account.submit("r1", **STANDS[name])
    found = account.of("status", "r1")
    assert found["state"] == STANDS[name]["state"]
    assert account.of("list")["runs"][0]["state"] == found["state"]
    row = account.of("reconcile", "r1")["runs"][0]
    assert (row["state"], row["error"]) == (found["state"], None)
    assert account.lines("r1") == []
    if found["state"] in protocol.FINAL:
        assert account.of("wait", "r1", code=found["exit_code"]) == found
        assert account.of("cancel", "r1") == found
        assert account.of("submit", "train.py", "--run-id", "r1", code=found["exit_code"]) == found
        kept = json.loads((account.folder / "code/.cloudtrain/runs/r1/result.json").read_text())
        assert valid("result", kept).keys() - found.keys() == {"name", "created"}
        assert account.of("pull", "r1", "out")["files"] == ["result.json", "run.json"]
    else:
        assert name != "running" or account.of("wait", "r1", "--timeout", "1s", code=7)["run_id"] == "r1"
        assert account.of("cancel", "r1")["state"] == "cancelled"


@pytest.mark.costly
def test_a_run_that_ended_for_every_reason(account: Account) -> None:
    account.submit("r1")
    result = account.folder / "code/.cloudtrain/runs/r1/result.json"
    for category, code in errors.EXIT_CODES.items():
        account.jobs.stand("r1.0", state="failed", category=category, reason="why")
        found = account.of("wait", "r1", code=code)
        assert (found["state"], found["category"]) == ("failed", category)
        result.unlink()


def test_a_run_that_was_tried_again(account: Account) -> None:
    account.submit("r1", "--retries", "1", state="failed", category="infra", reason="a node died")
    assert account.of("reconcile", "r1")["runs"][0]["done"]
    account.jobs.stand("r1.1", state="failed", category="infra", reason="again")
    found = account.of("wait", "r1", code=9)
    assert [attempt["number"] for attempt in found["attempts"]] == ["0.0", "1.0"]


def test_stores_without_runs_and_with_broken_ones(account: Account) -> None:
    assert account.of("list")["runs"] == []
    (account.folder / "code/.cloudtrain/runs/broken").mkdir(parents=True)
    (account.folder / "code/.cloudtrain/runs/broken/run.json").write_text("{")
    assert account.of("list")["runs"][0]["state"] == "unknown"
    assert account.of("reconcile", code=8)["runs"][0]["exit_code"] == 8
    account.of("status", "broken", code=8)
    assert account.of("gc", code=None)["unreadable"] == ["broken"]


def test_what_no_run_needs(account: Account) -> None:
    account.submit("r1")
    leftover = account.folder / "code/.cloudtrain/code" / ("0" * 64) / "code.tar.gz"
    leftover.parent.mkdir()
    leftover.write_bytes(b"x")
    assert [item["files"] for item in account.of("gc")["younger"]] == [1]
    os.utime(leftover, (1e9, 1e9))
    assert account.of("gc", "--older-than", "30d", "--delete")["bytes"] == 1


def test_data_for_many_runs(account: Account) -> None:
    (account.folder / "code/data").mkdir()
    (account.folder / "code/data/a.csv").write_text("1,2")
    assert [account.of("stage", "data")["copied"] for _ in range(2)] == [3, 0]
    account.of("stage", "nothing", code=2)


def test_plans(account: Account) -> None:
    (account.folder / "code/data.csv").write_text("1\n")
    (account.folder / "code/big.log").write_text("1\n")
    (account.folder / "code/requirements.txt").write_text("\n")
    words = ["--input", "train=data.csv", "--hp", "lr=1", "--env", "A=1", "--gpu", "H100:8", "--nodes", "2", "--spot"]
    words += ["--max-wait", "1h", "--tag", "a=b", "--requirements", "requirements.txt", "--exclude", "*.log"]
    words += ["--keep-checkpoints", "0", "--stall-timeout", "0", "--retries", "2", "--secret", "A2=env:B"]
    found = account.of("plan", "train.py", *words)
    assert found["job"]["resources"]["gpu"] == ["H100:8"]
    account.of("plan", "train.py", "--provider", "local", "--", "x")
    account.of("plan", "train.py", "--provider", "docker", "--image", "a:1")


@pytest.mark.costly
def test_several_runs_are_one_object(account: Account) -> None:
    for run_id, state in (("r1", "succeeded"), ("r2", "running")):
        account.submit(run_id, state=state)
    one = account.of("status", "r1")
    assert account.of("status", "r1", "r2")["runs"][0] == one
    mixed = account.of("status", "r2", "nosuch", "r1", code=2)
    assert [row.get("state") for row in mixed["runs"]] == ["running", None, "succeeded"]
    assert "nosuch" in mixed["runs"][1]["error"]
    pages = account.of("report", "r1", "r2")
    assert [Path(row["report"]).name for row in pages["runs"]] == ["r1.html", "r2.html"]
    assert Path(pages["comparison"]).name == "comparison.html"
    assert account.of("report", "r1", "none", code=2)["comparison"] is None
    pulled = account.of("pull", "r1", "r2", "-o", "out")
    assert [row["folder"] for row in pulled["runs"]] == ["out/r1", "out/r2"]
    assert account.of("pull", "r1", "-o", "alone")["folder"] == "alone"
    assert [row["state"] for row in account.of("cancel", "r1", "r2")["runs"]] == ["succeeded", "cancelled"]


@pytest.mark.costly
def test_a_run_is_found_by_the_beginning_of_its_id_and_as_the_last_one(account: Account) -> None:
    account.of("status", code=2)
    account.submit("abc-1", state="succeeded")
    account.submit("abd-1", state="succeeded")
    os.utime(account.folder / "code/.cloudtrain/runs/abc-1/run.json", (1e9, 1e9))
    assert account.of("status", "abc")["run_id"] == "abc-1"
    assert {account.of("status", *words)["run_id"] for words in ([], ["last"], ["-"])} == {"abd-1"}
    assert account.of("reconcile", "abc")["runs"][0]["run_id"] == "abc-1"
    found = account.of("cancel", "ab", code=2)
    assert ("'ab'" in found["error"], found["hint"]) == (True, "one of 'abc-1', 'abd-1'")
    account.submit("ab", state="succeeded")
    account.submit("last", state="succeeded")
    os.utime(account.folder / "code/.cloudtrain/runs/last/run.json", (1e9, 1e9))
    assert [account.of("wait", word)["run_id"] for word in ("ab", "last", "-")] == ["ab", "last", "ab"]


def test_a_run_that_is_there_is_found_without_a_list(account: Account, monkeypatch: pytest.MonkeyPatch) -> None:
    account.submit("r1", state="succeeded")
    monkeypatch.setattr(store.Store, "runs", _raise(AssertionError))
    assert account.of("status", "r1")["run_id"] == "r1"


@pytest.mark.costly
def test_the_exit_code_of_a_detached_run_is_that_of_its_end(account: Account) -> None:
    words = ("train.py", "--run-id", "r1", "--detach")
    assert account.of("submit", *words)["exit_code"] is None
    account.jobs.stand("r1.0", state="failed", category="oom", reason="too much")
    account.of("wait", "r1", code=1)
    assert account.of("submit", *words)["exit_code"] == 1


@pytest.mark.costly
def test_runs_with_their_hyperparameters_tags_metrics_and_cost(account: Account) -> None:
    for number, rate in enumerate(("0.1", "0.2")):
        account.submit(f"r{number}", "--hp", f"lr={rate}", "--tag", f"part={number}", "--name", f"sweep-{number}")
    account.submit("other", state="succeeded", cost_usd=0.5)
    metrics = account.folder / "code/.cloudtrain/runs/r1/live/metrics"
    metrics.mkdir(parents=True)
    (metrics / "0.0-node-0.jsonl").write_text('{"step": 1, "loss": 0.5}\n{"step": 2, "loss": 0.25}\n')
    account.of("wait", "other")
    rows = account.of("list", "--columns", "hp.lr,loss", "--columns", "tag.part,cost")["runs"]
    found = {row["run_id"]: row["columns"] for row in rows}
    assert found["r0"] == {"hp.lr": "0.1", "loss": None, "tag.part": "0", "cost": None}
    assert found["r1"] == {"hp.lr": "0.2", "loss": 0.25, "tag.part": "1", "cost": None}
    assert found["other"] == {"hp.lr": None, "loss": None, "tag.part": None, "cost": 0.5}

    def ids(*words: str) -> list[str]:
        return sorted(row["run_id"] for row in account.of("list", *words)["runs"])

    assert ids("--tag", "part=1") == ["r1"]
    assert ids("--name", "sweep-*") == ["r0", "r1"]
    assert ids("--name", "sweep-*", "--tag", "part=0", "--provider", "foldercloud") == ["r0"]
    assert ids("--provider", "nosuch") == []
    assert "columns" not in account.of("list")["runs"][0]


def test_what_was_uploaded(account: Account) -> None:
    cli.main(["submit", "train.py", "--store", "memory://schemas", "--run-id", "u1", "--detach", "--json"])
    found = valid("submit", json.loads(account.capsys.readouterr().out))
    assert found["uploaded"]["code_bytes"] > 0
    account.jobs.stand("u1.0", state="succeeded")
    assert account.of("wait", "u1", "--store", "memory://schemas")["state"] == "succeeded"


@pytest.mark.slow
def test_a_training_that_fails_on_this_machine(account: Account) -> None:
    """Run one real training: ranks, traceback, lines and a pull."""
    (account.folder / "code/bad.py").write_text("print('before', flush=True)\nraise ValueError('THE CAUSE')\n")
    words = ["bad.py", "--provider", "local", "--run-id", "bad", "--max-runtime", "5m", "--pull", "out"]
    found = account.of("submit", *words, code=1)
    assert found["failure"]["exception"] == "ValueError: THE CAUSE"
    assert found["pulled"]["files"]
    assert account.of("status", "bad") == {key: value for key, value in found.items() if key != "pulled"}
    assert any(line["text"] == "before" and line["rank"] == 0 for line in account.lines("bad"))
    assert account.of("pull", "bad", "again")["transferred"] > 0
    (account.folder / "file").write_text("")
    again = account.of("submit", *words[:-1], str(account.folder / "file"), code=1)
    assert again["error"].startswith("pull: ")


# ------------------------------------------------------------------------------------------------------------- failures


@pytest.mark.parametrize("verb", [verb for verb in cli.VERBS if verb in schemas.names()])
def test_a_wrong_command_line_of_every_verb(account: Account, verb: str) -> None:
    found = account.of(verb, "--no-such-flag", code=2)
    assert "no-such-flag" in found["error"]


@pytest.mark.parametrize("verb", ["status", "wait", "cancel", "logs", "list", "reconcile"])
def test_an_interrupt_is_one_object(account: Account, monkeypatch: pytest.MonkeyPatch, verb: str) -> None:
    account.submit("r1")
    monkeypatch.setattr(foldercloud.Provider, "status", _raise(KeyboardInterrupt))
    words = [] if verb == "list" else ["r1"]
    assert "interrupted" in account.of(verb, *words, code=7)["error"]


def test_an_interrupt_of_a_submit_is_one_object(account: Account, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foldercloud.Provider, "status", _raise(KeyboardInterrupt))
    found = account.of("submit", "train.py", "--run-id", "r1", code=7)
    assert (found["run_id"], found["provider"]) == ("r1", "foldercloud")


def test_an_interrupt_after_the_object_adds_no_second_one(account: Account, monkeypatch: pytest.MonkeyPatch) -> None:
    account.submit("r1", state="succeeded")
    monkeypatch.setattr(runs, "FINAL", _Interrupting())
    assert account.of("status", "r1", code=7)["state"] == "succeeded"


class _Interrupting:
    def __contains__(self, _: object) -> bool:
        raise KeyboardInterrupt


def _raise(kind: type[BaseException]) -> Callable[..., Any]:
    def raising(*_: Any) -> Any:
        raise kind

    return raising


@pytest.mark.slow
def test_what_a_pipe_gets_is_the_object_and_nothing_else(account: Account) -> None:
    """Use the real process: libraries may print, warn or log."""
    account.submit("r1", state="failed", category="oom", reason="é\x1b[31m")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(account.folder / "site"), str(ROOT / "tests/kit")])}
    for words, name in ((["wait", "r1"], "wait"), (["status", "nosuch"], "status")):
        done = subprocess.run(
            [sys.executable, "-m", "cloudtrain", *words, "--json"], env=env, capture_output=True, check=False
        )
        valid(name, json.loads(done.stdout))
        assert done.stdout.count(b"\n") == 1
        assert b"\x1b" not in done.stdout


def test_a_stream_is_an_object_a_line_up_to_the_error() -> None:
    screen = cli.Screen(io.StringIO(), io.StringIO())
    screen.emit({"error": "x", "exit_code": 7})
    screen.emit({"error": "y", "exit_code": 7})
    assert isinstance(screen.out, io.StringIO)
    assert json.loads(screen.out.getvalue()) == {"error": "x", "exit_code": 7, "field": "", "hint": ""}


# ---------------------------------------------------------------------------------------- objects that are not of a run


@pytest.mark.costly
def test_settings_machines_and_checks(account: Account) -> None:
    rows = {row["key"]: row for row in account.of("config")["settings"]}
    assert rows["provider"]["source"] == "cloudtrain.toml"
    assert len(account.of("config", "store")["settings"]) == 1
    account.of("config", "stor", code=2)
    assert {row["gpu"] for row in account.of("gpus", "H100:8")["machines"]} == {"H100"}
    assert account.of("gpus")["machines"]
    account.of("gpus", "H1000", code=2)
    assert {row["status"] for row in account.of("doctor")["checks"]} >= {"ok"}
    assert account.of("doctor", "--set", "folder=", "--set", "nosuch=1", code=2)["checks"][0]["status"] == "failed"
    account.of("doctor", "nosuch", code=2)


def test_the_page_about_a_run_and_the_view_of_one(account: Account) -> None:
    account.submit("r1", state="failed", category="oom", reason="too much")
    assert account.of("report", "r1")["report"] == "r1.html"
    assert account.of("watch", "r1")["category"] == "oom"
    account.of("report", "r2", code=2)
