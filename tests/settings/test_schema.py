"""The schemas of job files and settings: as published, and equal to what `Job` and `Settings` accept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from rows import for_each

from cloudtrain import schemas
from cloudtrain.cli import main
from cloudtrain.errors import SpecError
from cloudtrain.job.job import FLAT_FIELDS, Job
from cloudtrain.settings import schema
from cloudtrain.settings.settings import Settings
from cloudtrain.validate import toml_loads


@pytest.mark.parametrize("name", ["job", "settings"])
def test_the_published_one_is_the_one_that_is_made(name: str) -> None:
    """To update the file: cloudtrain schema NAME > cloudtrain/schemas/NAME.schema.json"""
    made = schema.schema(name)
    Draft202012Validator.check_schema(made)
    assert json.loads(schemas.path(name).read_text(encoding="utf-8")) == made


def is_valid(name: str, value: Any) -> bool:
    return Draft202012Validator(schema.schema(name)).is_valid(value)


def is_job(fields: dict[str, Any]) -> bool:
    try:
        Job.from_dict(fields)
    except SpecError:
        return False
    return True


ENTRY = {"entry_point": "train.py"}
#: Of every field values that a job takes, and values that it refuses.
VALUES: dict[str, tuple[list[Any], list[Any]]] = {
    "name": (["a", "a-1", ""], ["A", "a--b", "-a", "a" * 41, 3]),
    "image": (["a:1"], ["a b", "-a", 3, ""]),
    "launcher": (["torchrun", "python", "command"], ["mpi", 3]),
    "hyperparameters": ([{"a": 1, "b": [1, {"c": None}]}], [{"a": None}, [], "a"]),
    "hyperparameter_style": (["flags", "hydra", "none"], ["x", 3]),
    "args": ([[], ["a", ""]], [[3], {}]),
    "env": ([{"A": "1", "B": ""}], [{"A": 1}, ["A"]]),
    "secrets": ([{"A": "env:A"}, {"A": "aws:arn"}], [{"A": "x"}, {"A": "env:"}, {"A": 1}]),
    "inputs": (
        [{"train": "data"}, {"train": {"url": "s3://b/x", "mode": "copy", "shard": True}}],
        [{"train": {}}, {"train": {"url": "x", "mode": "x"}}, {"train": {"url": "x", "shard": 1}}, {"train": 3}],
    ),
    "max_runtime": ([1, "90", "12h", "1h30m", "2D"], [0, -1, "x", "h", "", "1.5h", True, None]),
    "max_wait": ([1, "2h"], [0, "x"]),
    "max_cost": ([0.5, 3], [0, -1, "3", True]),
    "max_gpu_hours": ([0.5, 3], [0, -1, "3", True]),
    "retries": ([0, 100], [-1, 101, "1", True]),
    "stall_timeout": ([0, "30m"], [-1, "x"]),
    "debug_nccl": ([True, False], ["yes", 1]),
    "min_gpu_util": (["5% for 30m", "0.5 % for 90"], ["5%", "x% for 30m", "5% for", 5]),
    "node_check": ([True, False], ["yes", 1]),
    "keep_warm": ([1, "30m"], [0, "x"]),
    "interactive": ([True, False], ["yes", 1]),
    "resume_from": (["run-1"], [3, ""]),
    "checkpoint_paths": ([["a/*"], "a"], [[3], 3]),
    "keep_checkpoints": ([0, 3], [-1, 1.5]),
    "metrics": ([{"loss": "loss ([0-9.]+)", "val/loss": "^x (.)"}], [{"loss": ""}, {"loss": 3}, ["loss"]]),
    "outputs": ([True, False], ["no", 1]),
    "max_outputs": ([1, "2GB", "1.5 TB", "300kB"], [0, -1, "x", "", "1GiB", True, 1.5]),
    "webhook": (["https://h", "http://h:1/x?y=z"], ["ftp://h", "https://", "{secrets.}", "h", "", 3]),
    "webhook_headers": ([{}], [{"A": ""}, {"A": 1}, ["A"]]),
    "tags": ([{"a": "b", "c": ""}], [{"a": 1}]),
    "options": ([{"local": {"x": [None]}}], [{"local": 3}, 3]),
    "on": ([{"local": {"image": "x", "instance_count": 2}}], [{"local": {"nosuch": 1}}, {"local": {"name": "x"}}, 3]),
    "source_dir": (["src"], ["", 3]),
    "entry_point": (["t.py"], [3]),
    "dependencies": ([["a"], "a"], [[""], [3], 3]),
    "requirements": (["r.txt"], [3, ""]),
    "exclude": ([["*.x"], "*.x"], [[3]]),
    "instance_count": ([1, 4096, "2:4", "4:4"], [0, 4097, "2", "2:", 1.5, True]),
    "min_instance_count": ([1], [0, 4097, "2:4", True]),
    "instance_type": (["ml.x"], [3, ""]),
    "gpu": (["H100:8", ["H100:8", "A100"]], [3, [3], ""]),
    "total_gpus": ([1, 65536], [0, "16", 1.5]),
    "gpu_memory": ([1, "8GB"], [0, "8 GiB", True]),
    "nproc_per_node": ([1], [0, "1"]),
    "cpus": ([1], [0, "1"]),
    "memory_gb": ([1], [0]),
    "disk_gb": ([1], [0]),
    "shm_gb": ([1], [0]),
    "spot": ([True], [1, "yes"]),
}  # fmt: skip


@for_each("flat", list(FLAT_FIELDS))
def test_a_job_and_its_schema_take_and_refuse_the_same(flat: str) -> None:
    good, bad = VALUES[flat]
    owner, name = FLAT_FIELDS[flat]
    for value, expected in [*((v, True) for v in good), *((v, False) for v in bad)]:
        nested = {**ENTRY, owner: {name: value}} if owner else {}
        if nested and name == "entry_point":
            nested.pop("entry_point")
        for fields in filter(None, ({**ENTRY, flat: value}, nested)):
            assert is_job(fields) is expected, (fields, "Job")
            assert is_valid("job", fields) is expected, (fields, "schema")


def test_a_name_that_no_job_has_is_in_no_schema() -> None:
    for wrong in ({"nosuch": 1}, {"source": {"nosuch": 1}}, {"resources": {"gpus": 1}}):
        assert not is_job({**ENTRY, **wrong})
        assert not is_valid("job", {**ENTRY, **wrong})


def test_settings_and_their_schema_take_and_refuse_the_same(tmp_path: Path) -> None:
    good = [
        'store = "s3://b/x"\nconcurrency = 3\n[sagemaker]\nsubnets = ["a"]\n[sagemaker.prices]\na = 1',
        'fallback = ["p"]\n[profiles.p]\nfallback = []\nstore = "x"\n[profiles.p.sagemaker]\nstore = "s3://b/y"',
        'profile = "p"\n[profiles.p]\nprovider = "vertex"\n[profiles.p.vertex]\nlog_drain = 3\ndebug_shell = true',
    ]  # fmt: skip
    bad = [
        "store = ['a', 'b']", "[sagemaker]\nregion = ['a', 'b']", "fallback = 3", "store = 3", "nosuch = 3",
        "concurrency = 65", 'sse = "x"', "[nosuch]", "[sagemaker]\nnosuch = 1",
        "[sagemaker]\nsubnets = 3", "[sagemaker]\nprices = 3", "[profiles]\np = 3", "profile = 3",
    ]  # fmt: skip
    for text, expected in [*((t, True) for t in good), *((t, False) for t in bad)]:
        (tmp_path / "cloudtrain.toml").write_text(text)
        assert is_valid("settings", toml_loads(text, where="")) is expected, text
        try:
            found = Settings.load(cwd=tmp_path, environ={})
            taken = bool(found.moving and found.of_provider("sagemaker") is not None)
        except SpecError:
            taken = False
        assert taken is expected, text


def test_a_message_says_what_the_field_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "job.toml").write_text('entry_point = "t.py"\n[resources]\ncpus = "many"\n')
    assert main(["plan", str(tmp_path / "job.toml")]) == 2
    err = capsys.readouterr().err
    assert (
        err == "error: resources.cpus: must be a whole number, not 'many' (minimum number of CPU cores of each node)\n"
    )


def test_the_verb_prints_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema"]) == 0
    assert {"job", "settings"} <= set(capsys.readouterr().out.split())
    assert main(["schema", "job"]) == 0
    assert json.loads(capsys.readouterr().out) == schema.job_schema()
    assert main(["schema", "jobs"]) == 2
    assert "did you mean 'job'?" in capsys.readouterr().err
