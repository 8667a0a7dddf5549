"""The Estimator: its keywords are the Job's fields, its defaults the Job's, and fit is a submit that can wait."""

from __future__ import annotations

import inspect
from datetime import timedelta
from pathlib import Path

import pytest

from cloudtrain.errors import SpecError
from cloudtrain.estimator import Estimator, RunFailedError, log_line, ranks
from cloudtrain.follow import Line
from cloudtrain.job import FLAT_FIELDS, Job

OWN = {"provider", "store", "settings", "write"}


def test_its_keywords_are_the_fields_of_a_job() -> None:
    parameters = inspect.signature(Estimator).parameters
    assert set(parameters) == set(FLAT_FIELDS) | OWN
    assert {p.kind for p in parameters.values()} == {inspect.Parameter.KEYWORD_ONLY}
    assert {p.default for p in parameters.values()} == {None}


def test_what_is_not_given_is_the_jobs_default() -> None:
    assert Estimator(entry_point="t.py").job == Job.make(entry_point="t.py")


def test_what_is_given_reaches_the_job() -> None:
    estimator = Estimator(
        entry_point=Path("t.py"),
        source_dir=Path("src"),
        dependencies=[Path("../lib")],
        instance_count=2,
        gpu="H100:8",
        hyperparameters={"lr": 0.1},
        max_runtime=timedelta(hours=12),
        spot=True,
        retries=0,
    )
    assert estimator.job == Job.make(
        entry_point="t.py", source_dir="src", dependencies=["../lib"], instance_count=2, gpu=["H100:8"],
        hyperparameters={"lr": 0.1}, max_runtime=43200, spot=True,
    )  # fmt: skip


def test_a_misspelt_keyword_or_a_wrong_value_is_refused() -> None:
    with pytest.raises(TypeError):
        Estimator(entry_point="t.py", instance_cout=2)  # type: ignore[call-arg]
    with pytest.raises(SpecError, match="instance_count"):
        Estimator(entry_point="t.py", instance_count=0)


def test_log_lines_name_node_and_rank_where_there_are_many() -> None:
    line = Line(attempt="0.0", node=1, rank=3, seq=1, text="hello")
    assert log_line(line, many=True) == "[n1 r3] hello"
    assert log_line(line, many=False) == "hello"
    assert log_line(Line(attempt="0.0", node=1, rank=None, seq=2, text="x"), many=True) == "[n1] x"
    assert log_line(Line(attempt="", node="algo-1", rank=None, seq=0, text="x"), many=True) == "[algo-1] x"
    assert log_line(Line(attempt="", node="", rank=None, seq=0, text="x"), many=True) == "x"


def test_ranks() -> None:
    assert ranks(Job.make(entry_point="t.py", instance_count=2, nproc_per_node=3)) == 6
    assert ranks(Job.make(entry_point="t.py", instance_count=2, gpu="H100:8", launcher="python")) == 2


def test_a_failed_run_is_an_error_with_its_result() -> None:
    result = {"run_id": "r-1", "state": "failed", "category": "oom", "exit_code": 1, "reason": "killed"}
    error = RunFailedError(result)
    assert (error.exit_code, error.result) == (1, result)
    assert str(error) == "run r-1 failed (oom): killed"
