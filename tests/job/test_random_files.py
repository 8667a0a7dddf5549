"""job.toml, cloudtrain.toml and run.json with random changes: a valid value or one clean line, within 1 s.

Some changes know the structure: other types, renamed keys, nested tables, odd numbers. Others change bytes.
``CLOUDTRAIN_SEED`` and a trial's number reproduce it.
"""

from __future__ import annotations

import json
import math
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from foldercloud import NAME, install
from trials import SEED, TRIALS

from cloudtrain.cli import main
from cloudtrain.errors import CloudtrainError
from cloudtrain.estimator import Estimator
from cloudtrain.job.job import Job
from cloudtrain.settings.settings import Settings

MOST_SECONDS = 1.0
"""Seconds of this process's own time: a busy machine takes longer by the clock."""
LONGEST = 200_000
"""Bytes: of megabytes the standard library's own parser makes more than a second."""
FEW, ALL = 60, 4 * (TRIALS or 1000)
COUNTS = [
    pytest.param(FEW, marks=pytest.mark.slow),
    pytest.param(ALL, marks=[pytest.mark.proof, pytest.mark.timeout(3600)], id="all"),
]

JOB: dict[str, Any] = {
    "name": "digits", "entry_point": "train.py", "args": ["--lr", "0.1"],
    "hyperparameters": {"epochs": 3, "lr": 0.1, "deep": {"a": [1, "b"]}}, "hyperparameter_style": "flags",
    "env": {"A": "1"}, "secrets": {"TOKEN": "env:HF_TOKEN"}, "instance_count": 1, "gpu": ["H100:8", "A100:8"],
    "nproc_per_node": 2, "max_runtime": "2h", "retries": 1, "spot": False,
    "inputs": {"train": "s3://bucket/x", "val": {"url": "s3://b/v", "mode": "copy", "shard": False}},
    "metrics": {"loss": "loss ([0-9.]+)"}, "tags": {"team": "vision"},
    "checkpoint_paths": ["out/*"], "keep_checkpoints": 2, "stall_timeout": 600,
    "options": {"local": {"rules": {"max_restarts": 3}}},
    "on": {"docker": {"image": "x:1", "max_cost": 2.5, "max_wait": "1d", "cpus": 2}},
    "launcher": "torchrun", "debug_nccl": True, "source": {"exclude": ["*.bin"]},
}  # fmt: skip
SETTINGS: dict[str, Any] = {
    "provider": "local", "store": "store", "max_code_mb": 50, "concurrency": 8, "sse": "",
    "local": {"python": sys.executable, "state_dir": "state"},
    "docker": {"user": "0:0", "platform": "linux/amd64"},
    "sagemaker": {"region": "eu-west-1", "role": "arn:aws:iam::123456789012:role/x", "prices": {"ml.m5.xlarge": 0.25}},
}  # fmt: skip
WORDS: list[Any] = [
    "", "x", "é\u202e\U0001f600", "\0", "\ud800", "a" * 5000, "../..", "/", "{inputs.x}", "s3://", "12h", "-1", "nan",
    "cloudtrain", "${HOME}", "~", "C:\\x", "a\nb\r\tc", "__proto__", "file:///x", "file://host/x", "https://u:p@h/x?sig=1",
]  # fmt: skip
NUMBERS: list[Any] = [
    0,
    -1,
    1,
    2**31,
    2**63,
    2**64,
    10**400,
    -(10**30),
    0.5,
    -0.0,
    1e308,
    math.nan,
    math.inf,
    -math.inf,
]
ODD = [*WORDS, *NUMBERS, True, False, None, [], {}, [[]], [{}], {"": ""}, {"a": {"b": {"c": []}}}, [1, "a", None]]


# ----------------------------------------------------------------------------------------------------------- mutations


def nodes(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every node in plain data, the root first."""
    yield path
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in pairs:
        yield from nodes(item, (*path, key))


def changed(rng: random.Random, data: Any) -> Any:
    """Return a copy of ``data`` with one part changed."""
    data = json.loads(json.dumps(data))
    path = rng.choice(list(nodes(data)))
    if not path:
        return (
            rng.choice(ODD) if rng.random() < 0.2 else {**data, rng.choice(["x", "", "source", "a.b"]): rng.choice(ODD)}
        )
    *way, last = path
    owner = data
    for key in way:
        owner = owner[key]
    old = owner[last]
    match rng.randrange(9):
        case 0 | 1 | 2:
            owner[last] = rng.choice(ODD)
        case 3:  # another type of the same
            owner[last] = rng.choice([str(old), [old], {"x": old}, [old] * 1000, json.dumps(old), not old])
        case 4:  # another name
            name = str(last)
            word = rng.choice([name.upper(), name + "s", name[:-1], f"{name}.x", f" {name}", "", "\0", "é", "x" * 3000])
            if isinstance(owner, dict):
                owner[word] = owner.pop(last)
        case 5:
            owner.pop(last)
        case 6:  # something from elsewhere in the same document
            there: Any = data
            for key in rng.choice(list(nodes(data))):
                there = there[key]
            owner[last] = json.loads(json.dumps(there))
        case 7:  # nested deeply
            for _ in range(rng.choice([3, 60, 400])):
                old = {"a": old} if rng.random() < 0.5 else [old]
            owner[last] = old
        case 8:
            owner[last] = (
                old * rng.choice([0, -1, 10**6]) if isinstance(old, (int, float)) else str(old) * rng.choice([0, 50])
            )
    return data


def bytes_of(rng: random.Random, text: bytes) -> bytes:
    """Return ``text`` with random bytes changed."""
    at = rng.randrange(len(text) + 1)
    end = min(len(text), at + rng.randrange(1, 40))
    return rng.choice(
        [
            text[:at], text[:at] + text[end:], text[:at] + bytes([rng.randrange(256)]) + text[at + 1 :],
            text[:at] + rng.randbytes(rng.randrange(1, 9)) + text[at:], text[:at] + text[at:end] * 3 + text[end:],
            text[:at] + b"\0" + text[at:], b"\xef\xbb\xbf" + text, text.replace(b"\n", b"\r\n"), text + text, b"",
            text[:at] + b"[" * 3000 + text[at:], text.decode("utf-8", "replace").encode("utf-16"),
        ]
    )  # fmt: skip


def mutation(kind: str, number: int, data: dict[str, Any], write: Callable[[Any], bytes]) -> bytes:
    """Return the file of trial ``number``: ``data`` with one or a few changes."""
    rng = random.Random(f"{SEED}-{kind}-{number}")
    out: Any = data
    text = write(data)
    try:
        for _ in range(rng.choice([0, 1, 1, 2, 4])):
            out = changed(rng, out if isinstance(out, dict) else data)
        text = write(out)
    except (TypeError, ValueError, AttributeError, RecursionError):
        pass  # the format cannot write it
    text = text[:LONGEST]
    return bytes_of(rng, text) if rng.random() < 0.3 else text


def toml(value: Any) -> bytes:
    return tomli_w.dumps(value).encode("utf-8", "surrogatepass")


def plain_json(value: Any) -> bytes:
    return json.dumps(value).encode()


# ------------------------------------------------------------------------------------------------------------- judging


def clean(exc: CloudtrainError) -> None:
    """Check that the message is one line."""
    assert "\n" not in str(exc)
    assert str(exc)


def told(argv: list[str], capsys: pytest.CaptureFixture[str]) -> int:
    """Return the command's exit code. Check that its output is a document or one clean line."""
    began = time.process_time()
    code = main(argv)
    seconds = time.process_time() - began
    out, err = capsys.readouterr()
    assert seconds <= MOST_SECONDS, f"{argv[0]}: {seconds:.2f} s"
    assert "this is a bug" not in out + err, err
    assert "Traceback" not in err, err
    if code == 0:
        assert out or argv[0] == "logs"
        return code
    assert code in (1, 2, 3, 4, 5, 6, 7, 8, 9)
    answer = json.loads(out)
    if "error" in answer:
        assert answer["exit_code"] == code
        assert "\n" not in answer["error"]
        assert 0 < len(answer["error"]) < 20_000
    return code


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("CLOUDTRAIN_")]:
        monkeypatch.delenv(name)
    (tmp_path / "train.py").write_text("print('hello')\n")
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("count", COUNTS)
def test_a_job_file(folder: Path, capsys: pytest.CaptureFixture[str], count: int) -> None:
    codes = set()
    for number in range(count):
        text = mutation("job", number, JOB, toml)
        (folder / "job.toml").write_bytes(text)
        try:
            began = time.process_time()
            try:
                job = Job.from_toml(text.decode(), folder=folder)
                assert Job.from_toml(job.to_toml()) == job
            except UnicodeDecodeError:
                pass  # not UTF-8: the command below reports it
            except CloudtrainError as exc:
                clean(exc)
            assert time.process_time() - began <= MOST_SECONDS
            codes.add(told(["plan", "job.toml", "--json"], capsys))
        except BaseException as exc:
            exc.add_note(f"trial {number}: {text!r}") if hasattr(exc, "add_note") else print(number, text)
            raise
    assert {0, 2} <= codes, "some are jobs still"


@pytest.mark.parametrize("count", COUNTS)
def test_a_settings_file(folder: Path, capsys: pytest.CaptureFixture[str], count: int) -> None:
    codes = set()
    for number in range(count):
        text = mutation("settings", number, SETTINGS, toml)
        (folder / "cloudtrain.toml").write_bytes(text)
        try:
            began = time.process_time()
            try:
                made = Settings.load(cwd=folder, environ={})
                assert made.moving
                for name in ("local", "docker", "sagemaker"):
                    made.make_provider(name)
            except CloudtrainError as exc:
                clean(exc)
            assert time.process_time() - began <= MOST_SECONDS
            codes.add(told(["plan", "train.py", "--json"], capsys))
        except BaseException as exc:
            exc.add_note(f"trial {number}: {text!r}") if hasattr(exc, "add_note") else print(number, text)
            raise
    assert {0, 2} <= codes


@pytest.fixture
def store(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield a store with one run on foldercloud, whose run.json the test changes."""
    install(folder / "site")
    monkeypatch.syspath_prepend(str(folder / "site"))
    (folder / "cloud").mkdir()
    estimator = Estimator(
        entry_point="train.py", source_dir=folder, provider=NAME, store=str(folder / "store"),
        settings={"folder": str(folder / "cloud")}, max_runtime=600, max_wait=600, exclude=["site", "cloud"],
    )  # fmt: skip
    estimator.fit(wait=False, run_id="r")
    return folder / "store"


def command(number: int, store: Path) -> list[str]:
    """Return the command line of trial ``number``, for a store with one run."""
    run, place = ["r", "--store", str(store), "--json"], [str(store), "--json"]
    verbs = (
        ["status", *run], ["logs", *run], ["list", *run[1:]], ["pull", "r", "out", *run[1:]], ["gc", *place],
        ["reconcile", *run], ["reconcile", *place], ["cancel", *run], ["wait", *run, "--timeout", "1s"],
    )  # fmt: skip
    return verbs[number % len(verbs)]


@pytest.mark.parametrize("count", COUNTS)
def test_a_run_record(store: Path, capsys: pytest.CaptureFixture[str], count: int) -> None:
    path = store / "runs/r/run.json"
    record = json.loads(path.read_bytes())
    for number in range(count):
        text = mutation("run", number, record, plain_json)
        path.write_bytes(text)
        try:
            told(command(number, store), capsys)
        except BaseException as exc:
            exc.add_note(f"trial {number}: {text!r}") if hasattr(exc, "add_note") else print(number, text)
            raise
        for name in ("cancelled.json", "result.json", "attempts/0/expired.json"):
            (store / "runs/r" / name).unlink(missing_ok=True)
