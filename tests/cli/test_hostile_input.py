"""Hostile input on the command line and in files: each case ends with its exit code and one line, and sends nothing."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path

import pytest
from rows import for_each

from cloudtrain import cli
from cloudtrain.errors import SpecError
from cloudtrain.job.job import Job
from cloudtrain.runs.metrics import json_rows
from cloudtrain.validate import parse_duration, parse_size

DIGITS = "9" * 5000
DEEP = "[" * 1000 + "]" * 1000
NESTED = '{"a":' * 900 + "1" + "}" * 900

#: Flags of durations, of sizes, of counts and of amounts. The first of each kind gets every value, the others three.
NUMBERS = (
    ("--max-runtime", "--max-wait", "--stall-timeout"), ("--max-outputs",),
    ("--nodes", "--nproc-per-node", "--retries", "--keep-checkpoints", "--cpus"),
    ("--max-cost", "--max-gpu-hours", "--memory-gb", "--disk-gb", "--shm-gb"),
)  # fmt: skip
FLAGS = [
    *(f"{flags[0]} {x}" for flags in NUMBERS for x in ("²", "①", "٣x", DIGITS, "1" * 400, "1e999", "nan", "-1")),
    *(f"{flag} {value}" for flags in NUMBERS for flag in flags[1:] for value in (DIGITS, "nan", "-1")),
    f"--gpu H100:{DIGITS}", "--gpu H100:²", "--gpu A100-²GB:1",
    "--input x=s3://", "--input x=s3:///", "--input x=s3://b ucket/x", "--input x=s3:", "--input x=gs://", "--input x=",
    "--input x=https://", "--input x=://", "--input x=s3://bucket/../../x",
    "--store train.py", "--store train.py/x", "--store file:///proc/x", "--store s3://", "--store ://",
    "--set python=nothing.py", "--set python=notes.txt", "--set python=.", "--set python=/nowhere/python",
    f"--option local.x={DEEP}", f"--option 'local={NESTED}'",
]  # fmt: skip
JOBS = {
    "deep.json": '{"entry_point": "train.py", "hyperparameters": {"x": ' + DEEP + "}}",
    "nested.json": '{"entry_point": "train.py", "hyperparameters": {"x": ' + NESTED + "}}",
    "digits.json": '{"entry_point": "train.py", "retries": ' + DIGITS + "}",
    "hyper.json": '{"entry_point": "train.py", "hyperparameters": {"x": ' + "9" * 4000 + "}}",
    "deep.toml": 'entry_point = "train.py"\nhyperparameters = {x = ' + DEEP + "}\n",
    "digits.toml": f'entry_point = "train.py"\nretries = {DIGITS}\n',
    "empty.json": "",
    "surrogate.json": '{"entry_point": "train.py", "hyperparameters": {"x": "\\ud800"}}',
    "twice.toml": 'entry_point = "train.py"\nentry_point = "train.py"\n',
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in [name for name in os.environ if name.startswith(("CLOUDTRAIN_", "AWS_", "AZURE_", "GOOGLE_"))]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print(1)\n")
    (tmp_path / "notes.txt").write_text("not a program")
    for name, text in JOBS.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def refused(argv: list[str], capsys: pytest.CaptureFixture[str], folder: Path, *, codes: tuple[int, ...] = (2,)) -> str:
    code = cli.main(argv)
    out, err = capsys.readouterr()
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert code in codes, (code, out[-500:], err[-1500:])
    assert len(errors) == 1, err[-1500:]
    assert "Traceback" not in err + out
    assert len(errors[0]) < 1000, errors[0][:2000]
    assert not list(folder.glob(".cloudtrain/runs/*"))
    return errors[0]


@pytest.mark.parametrize("flags", FLAGS, ids=lambda text: text[:40])
def test_a_hostile_flag_is_refused_in_one_line(flags: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refused(["submit", "train.py", *shlex.split(flags)], capsys, folder, codes=(2, 8))


@pytest.mark.parametrize("name", JOBS)
def test_a_hostile_job_file_is_refused_in_one_line(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refused(["plan", name], capsys, folder)


@pytest.mark.costly
def test_a_report_where_nothing_can_be_written_is_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["submit", "train.py", "--run-id", "fine"]) == 0
    capsys.readouterr()
    for place in ("/proc/report.html", "/proc/self/mem/x.html", "/dev/full/x.html", "train.py/x.html", "/proc"):
        code = cli.main(["report", "fine", "--out", place])
        err = capsys.readouterr().err
        assert code in (2, 8), err
        assert [line for line in err.splitlines() if line.startswith("error: ")], err
        assert "bug in cloudtrain" not in err


@for_each("value", ["²", "1²h", "٣", DIGITS, DIGITS + "h", int("1" * 4000) * 10**2000, 1e300, True])
def test_no_such_duration(value: object) -> None:
    with pytest.raises(SpecError) as caught:
        parse_duration(value, field="max_runtime")
    assert len(str(caught.value)) < 400


@for_each("value", ["²GB", "1²", DIGITS, int("1" * 4000) * 10**2000, "1 PB", "-1GB", "GB"])
def test_no_such_size(value: object) -> None:
    with pytest.raises(SpecError) as caught:
        parse_size(value, field="max_outputs")
    assert len(str(caught.value)) < 400


def test_numbers_and_tables_that_json_cannot_carry_are_refused_in_python_too() -> None:
    deep: list[object] = []
    for _ in range(5000):
        deep = [deep]
    for value in (10**5000, deep, {"x": 10**301}):
        with pytest.raises(SpecError):
            Job.make(entry_point="train.py", hyperparameters={"x": value})


def test_rows_of_metrics_that_nobody_can_read_are_left_out() -> None:
    rows = [
        '{"step": 1}',
        '{"step": ' + DIGITS + "}",
        '{"x": ' + DEEP + "}",
        NESTED,
        '{"step": 2, "x": [[1]]}',
        "[",
        "5",
    ]
    assert json_rows("\n".join(rows).encode()) == [{"step": 1}, {"step": 2, "x": [[1]]}]
    assert json.dumps(json_rows(NESTED.encode())) == "[]"
