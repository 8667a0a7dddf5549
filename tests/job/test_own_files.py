"""outputs.py: files that cloudtrain left among a user's files do not ship; files that only look alike do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cloudtrain import cli
from cloudtrain.job.bundle import build_bundle, changes
from cloudtrain.job.job import Source
from cloudtrain.job.own_files import _SETTINGS, PULL_STATE, reason
from cloudtrain.report.markup import page, tag
from cloudtrain.settings.settings import FILE
from cloudtrain.storage.local_disk import TEMP

RUN = {"run": "s3://b/p/runs/r-1", "run_id": "r-1"}
OURS: dict[str, Any] = {
    "result.json": {**RUN, "provider": "local", "state": "succeeded"},
    "deep/submitted.json": {**RUN, "provider": "local", "state": "pending", "exit_code": None},
    "plan.json": {**RUN, "provider": "local", "job": {}, "layout": {}, "request": {}},
    "error.json": {"error": "no", "field": "", "hint": "", "exit_code": 2},
    "list.json": {"runs": [], "next": None, "order": "created"},
    "config.json": {"file": None, "profile": None, "profiles": [], "provider": "local", "settings": []},
    "doctor.json": {"provider": "local", "checks": [], "exit_code": 0},
    "gc.json": {"store": "s3://b", "deleted": False, "older_than_s": 1, "found": []},
    "staged.json": {
        "url": "s3://b/data/1",
        "source": "x",
        "store": "s3://b",
        "digest": "1",
        "copied": 0,
        "exit_code": 0,
    },
    "job.json": {"entry_point": "train.py", "instance_count": 2},
    "job.toml": 'entry_point = "train.py"\n',
    "nested.toml": '[source]\nentry_point = "train.py"\n[resources]\ninstance_count = 2\n',
    "cloudtrain.toml": 'provider = "sagemaker"\n',
    "r-1.html": str(page("r-1", tag("main"))),
    f"pulled/{PULL_STATE}": {"run": RUN["run"], "files": {}},
    "pulled/.gitignore": "*\n",
    "pulled/run.json": RUN,
    "pulled/notes.txt": "mine",
}
THEIRS: dict[str, Any] = {
    "train.py": "print()\n",
    "mine/result.json": {"accuracy": 0.9},
    "mine/run.json": {"run": "s3://b/p/runs/r-1", "run_id": "another"},
    "mine/plan.json": [1, 2],
    "mine/error.json": {"error": "no", "exit_code": 2},
    "mine/model.json": {"name": "bert", "hyperparameters": {"lr": 0.1}, "env": {}, "tags": {"a": "b"}},
    "mine/launch.json": {"entry_point": "train.py", "nodes": 3},
    "mine/wandb.json": {"run": "https://wandb.ai/me/project/runs/r-1", "run_id": "r-1", "state": "finished"},
    "mine/entry.json": {"entry_point": "main.py"},
    "mine/config.json": {"keep_checkpoints": 3, "hyperparameters": {"lr": 0.1}},
    "mine/base.toml": 'max_runtime = "1h"\n[env]\nA = "b"\n',
    "mine/wrong.toml": 'launcher = "mpirun"\n',
    "mine/pyproject.toml": '[project]\nname = "x"\n',
    "mine/broken.json": '{"run": ',
    "mine/empty.json": "",
    "mine/deep.json": "[" * 100_000,
    "mine/latin.toml": b"a = '\xe9'\n",
    "mine/r-1.html": "<!DOCTYPE html><meta charset=utf-8><title>r-1</title>",
    "mine/result": json.dumps(RUN),
}


def fill(folder: Path, files: dict[str, Any]) -> None:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        text = content if isinstance(content, (str, bytes)) else json.dumps(content)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())


def bundle(folder: Path, **source: Any) -> Any:
    return build_bundle(Source(entry_point="train.py", **source), cwd=folder, git=False)


def test_what_cloudtrain_wrote_changes_nothing_and_what_is_the_user_s_ships(tmp_path: Path) -> None:
    fill(tmp_path, THEIRS)
    before = bundle(tmp_path)
    assert {file.path for file in before.files} == THEIRS.keys()
    fill(tmp_path, OURS)
    after = bundle(tmp_path)
    assert after.digest == before.digest
    rules = {item.path: item.rule for item in after.excluded}
    assert rules.keys() == {name for name in OURS if "pulled" not in name} | {"pulled/"}
    assert {rule.partition(" ")[0] for rule in rules.values()} == {"built-in:"}
    assert rules["result.json"] == rules["plan.json"] == "built-in: cloudtrain wrote it (--json)"
    assert rules["r-1.html"] == "built-in: page of cloudtrain report"
    assert rules["job.toml"] == rules["nested.toml"] == "built-in: job file"
    assert rules["pulled/"] == "built-in: cloudtrain pull wrote it"
    assert rules["cloudtrain.toml"] == "built-in: settings of cloudtrain"
    assert _SETTINGS == FILE


def test_a_file_that_is_named_ships_on_purpose(tmp_path: Path) -> None:
    fill(tmp_path, {"train.py": "", "result.json": OURS["result.json"], "job.toml": OURS["job.toml"]})
    (tmp_path / ".cloudtrainignore").write_text("!/result.json\n")
    assert [file.path for file in bundle(tmp_path).files] == [".cloudtrainignore", "result.json", "train.py"]
    found = bundle(tmp_path, exclude=("!/job.toml",))
    assert "job.toml" in [file.path for file in found.files]


@pytest.mark.parametrize("below", ["", "src/"])
def test_of_a_folder_of_the_user_s_that_pull_filled_the_rest_ships(tmp_path: Path, below: str) -> None:
    mine, pulled = ["logs/mine.txt", "net.py", ".gitignore"], ["logs/0.0/node-0.log", "metrics.jsonl"]
    fill(tmp_path, {"train.py": "", **{below + name: "" for name in mine + pulled}})
    fill(tmp_path, {below + PULL_STATE: {"run": RUN["run"], "files": {name: {} for name in pulled}}})
    assert [file.path for file in bundle(tmp_path).files] == sorted(["train.py", *(below + name for name in mine)])


def test_what_a_killed_pull_was_writing_does_not_ship(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cloudtrain.job.own_files._MOST", 1)  # the record of a large pull counts all the same
    fill(tmp_path, {"train.py": "", "src/net.py": "", "src/a.txt": "", f"src/{TEMP}1-2": "half"})
    fill(tmp_path, {f"src/{PULL_STATE}": {"run": RUN["run"], "files": {"a.txt": {}}}})
    assert [file.path for file in bundle(tmp_path).files] == ["src/net.py", "train.py"]


def test_a_large_file_is_not_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path, {"result.json": OURS["result.json"]})
    path, size = str(tmp_path / "result.json"), (tmp_path / "result.json").stat().st_size
    assert reason(path, size) == "cloudtrain wrote it (--json)"
    monkeypatch.setattr("cloudtrain.job.own_files._MOST", size - 1)
    assert reason(path, size) == ""


def test_changes_names_what_is_new_gone_and_different(tmp_path: Path) -> None:
    fill(tmp_path, {"train.py": "1", "old.py": "", "same.py": ""})
    archive = bundle(tmp_path).archive()
    assert changes(bundle(tmp_path), archive) == []
    fill(tmp_path, {"train.py": "2", "new.py": ""})
    (tmp_path / "old.py").unlink()
    assert changes(bundle(tmp_path), archive) == ["+ new.py", "- old.py", "~ train.py"]
    for damaged in (b"", b"no archive", archive[:40]):
        with pytest.raises(ValueError, match="not the archive"):
            changes(bundle(tmp_path), damaged)


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[str, str]:
    """Return the error and the hint of a submit under another job's id."""
    assert cli.main(["submit", *words, "--run-id", "r"]) == 2
    error, hint = capsys.readouterr().err.splitlines()[-2:]
    return error, hint


@pytest.mark.costly
def test_the_same_command_finds_its_run_again_and_another_job_is_told_what_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    fill(tmp_path, {"train.py": "print(1)\n", "job.toml": OURS["job.toml"], "data.csv": "1"})
    submit = ["submit", "job.toml", "--input", "d=data.csv", "--run-id", "r"]
    assert cli.main(submit) == 0
    for verb in (["report", "r"], ["pull", "r"]):
        assert cli.main(verb) == 0
    assert cli.main(submit) == 0
    capsys.readouterr()
    error, hint = refused(capsys, "job.toml", "--input", "d=data.csv", "--hp", "lr=1", "--env", "A=b")
    assert error.endswith("/.cloudtrain; different: env.A, hyperparameters.lr")
    assert hint == "hint: choose another --run-id; to find this run again, undo the change"
    fill(tmp_path, {f"more-{i}.py": "" for i in range(9)})
    error, _ = refused(capsys, "job.toml", "--input", "d=data.csv")
    assert error.endswith("; different: " + ", ".join(f"+ more-{i}.py" for i in range(8)) + ", 1 more")
    (tmp_path / ".cloudtrain/code").rename(tmp_path / ".cloudtrain/lost")
    assert refused(capsys, "job.toml", "--input", "d=data.csv")[0].endswith("; different: the code")
    for i in range(9):
        (tmp_path / f"more-{i}.py").unlink()
    fill(tmp_path.with_name("data"), {"data.csv": "1"})
    error, hint = refused(capsys, "job.toml", "--input", f"d={tmp_path.with_name('data')}")
    assert error.endswith("different: inputs.d.url")
