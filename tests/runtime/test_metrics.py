"""Rows of metrics from the lines that a script prints."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.runtime import metrics
from cloudtrain.runtime.metrics import PrintedMetrics

LOSS, STEP = "loss ([0-9.e+-]+|nan|inf)", "step ([0-9]+)"


class Reader:
    def __init__(self, tmp_path: Path, **patterns: str) -> None:
        self.said: list[str] = []
        self.file = tmp_path / "metrics.jsonl"
        self.reader = PrintedMetrics(patterns, self.file, say=self.said.append)

    def rows(self, *lines: str) -> list[dict[str, Any]]:
        """Return the rows of these lines without their time."""
        for line in lines:
            self.reader.read(line)
        rows = [json.loads(line) for line in self.file.read_text().splitlines()] if self.file.exists() else []
        for row in rows:
            assert abs(row.pop("time") - time.time()) < 60
        return rows


def test_a_line_with_a_number_is_a_row(tmp_path: Path) -> None:
    made = Reader(tmp_path, loss=LOSS, step=STEP, epoch="epoch ([0-9.]+)")
    assert made.rows("starting", "epoch 1", "step 50 loss 0.0114.", "step 100", "loss 2e-3") == [
        {"epoch": 1, "step": 50, "loss": 0.0114},
        {"epoch": 1, "step": 100, "loss": 0.002},
    ]


def test_without_a_step_no_row_has_one(tmp_path: Path) -> None:
    assert Reader(tmp_path, loss=LOSS).rows("loss 3", "loss 2") == [{"loss": 3}, {"loss": 2}]


@pytest.mark.parametrize(
    ("pattern", "line", "value"),
    [
        ("loss (.*)", "loss 1,", 1),
        ("loss (.*)", "loss nan", None),
        ("loss (.*)", "loss -inf", None),
        ("^loss (.*)", "loss 0.5", 0.5),
        (".*loss ([0-9.]+)", "loss 1 loss 2", 2),
        ("loss ([0-9.]+)", "loss 1 loss 2", 1),
        ("(?i)LOSS=([0-9.]+)", "Loss=4", 4),
        ("loss|err ([0-9]+)", "err 3", 3),
        ("lo+ss ([0-9]+)", "looss 3", 3),
        ("val_?loss ([0-9]+)", "valloss 3", 3),
        ("x{0,2}loss ([0-9]+)", "loss 3", 3),
        ("verlust: ([0-9.]+) €", "verlust: 1.5 €", 1.5),
    ],
)
def test_what_is_a_number(tmp_path: Path, pattern: str, line: str, value: float | None) -> None:
    assert Reader(tmp_path, loss=pattern).rows(line) == [{"loss": value}]


@pytest.mark.parametrize(
    ("pattern", "line"),
    [
        ("loss (.*)", "loss none"),
        ("loss (.*)", "loss 1.2.3"),
        ("^loss (.*)", "a loss 0.5"),
        ("loss( [0-9]+)?", "loss"),
        ("loss ([0-9]+)", "x" * metrics.LONGEST + "loss 1"),
    ],
)
def test_what_is_none(tmp_path: Path, pattern: str, line: str) -> None:
    assert Reader(tmp_path, loss=pattern).rows(line) == []


@pytest.mark.slow
def test_an_expression_that_takes_long_is_dropped_alone(tmp_path: Path) -> None:
    made = Reader(tmp_path, slow="(a+)+$", loss=LOSS)
    assert made.rows("a" * 24 + "b loss 1", "loss 2", "a" * 24 + "b loss 3") == [{"loss": n} for n in (1, 2, 3)]
    assert len(made.said) == 1
    assert made.said[0].startswith("metric slow is not read any more: its expression took ")


def test_what_this_python_cannot_read_is_said(tmp_path: Path) -> None:
    made = Reader(tmp_path, odd="(?P<", loss=LOSS)
    assert made.rows("loss 1") == [{"loss": 1}]
    assert made.said[0].startswith("metric odd is not read: this Python does not know its expression: ")


def test_a_disk_that_fails_is_said_once(tmp_path: Path) -> None:
    made = Reader(tmp_path / "nowhere", loss=LOSS)
    assert made.rows("loss 1", "loss 2") == []
    assert made.said == ["metrics cannot be written: No such file or directory"]


@pytest.mark.skipif(sys.flags.dev_mode, reason="times are another thing there")
def test_lines_without_metrics_cost_next_to_nothing(tmp_path: Path) -> None:
    made = Reader(tmp_path, loss=LOSS, step=STEP, accuracy=".*accuracy: ([0-9.]+)")
    line = "2026-11-24 03:00:00 INFO trainer: loading shard 17 of 200 from /data/train/shard-00017.tar (12.5 MB/s)"
    began = time.thread_time()
    for _ in range(20_000):
        made.reader.read(line)
    assert (time.thread_time() - began) / 20_000 < 20e-6, "seconds a line"


def test_a_number_of_thousands_of_digits_ends_nothing(tmp_path: Path) -> None:
    messages: list[str] = []
    metrics = PrintedMetrics({"loss": r"loss (\d+)"}, tmp_path / "m.jsonl", say=messages.append)
    for digits in (3, 320, 900):
        metrics.read("loss " + "9" * digits)
    rows = [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    assert [row["loss"] for row in rows][:1] == [999]
    assert messages == []
