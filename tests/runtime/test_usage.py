"""The load of a node: counters of a cgroup or of /proc, GPUs by a fake nvidia-smi, and rows that reach the report."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from jobs import Jobs
from rows import for_each

from cloudtrain.runtime import usage
from cloudtrain.runtime.host_facts import cpu_count
from cloudtrain.runtime.timings import TIMINGS
from cloudtrain.runtime.usage import UsageSampler, gpu_rows, gpu_usage

SMI = """#!/bin/sh
case "$*" in *--query-gpu=utilization.gpu,memory.used,memory.total*--format=csv,noheader,nounits*) ;; *) exit 2 ;; esac
echo asked >> {asked}
{answer}
"""


def fake_smi(folder: Path, answer: str) -> Path:
    """Write a program nvidia-smi with this answer, and return the file with a line for each call."""
    folder.mkdir(exist_ok=True)
    asked = folder / "asked"
    (folder / "nvidia-smi").write_text(SMI.format(asked=asked, answer=answer))
    (folder / "nvidia-smi").chmod(0o755)
    return asked


def sampled(file: Path, count: int) -> list[dict[str, Any]]:
    sampler = UsageSampler(file, disk=file.parent)
    sampler.start()
    end = time.monotonic() + 30
    try:
        while not file.exists() or len(file.read_text().splitlines()) < count:
            assert time.monotonic() < end
            time.sleep(0.02)
    finally:
        sampler.stop()
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return empty folders that replace /sys/fs/cgroup and /proc."""
    for name in ("cgroup", "proc"):
        (tmp_path / name).mkdir()
        monkeypatch.setattr(usage, name.upper(), tmp_path / name)
    return tmp_path


def test_a_container_counts_by_its_cgroup(files: Path) -> None:
    (files / "cgroup/cpu.stat").write_text("usage_usec 4000000\nuser_usec 3\n")
    (files / "cgroup/io.pressure").write_text("some avg10=0.00 total=2500000\nfull avg10=0.00 total=1\n")
    (files / "cgroup/memory.current").write_text("250\n")
    (files / "cgroup/memory.max").write_text("1000\n")
    assert usage._counters() == {"cpu": 4 / cpu_count(), "data_wait": 2.5}
    assert usage._memory_share() == 0.25


def test_a_machine_counts_by_proc(files: Path) -> None:
    tick = os.sysconf("SC_CLK_TCK")
    (files / "proc/stat").write_text(f"cpu  {2 * tick} {tick} {tick} 900 900 0 0 0 0 0\ncpu0 1 1 1\n")
    (files / "cgroup/memory.current").write_text("250\n")
    (files / "cgroup/memory.max").write_text("max\n")
    (files / "proc/meminfo").write_text("MemTotal:  1000 kB\nMemFree:  1 kB\nMemAvailable:  400 kB\n")
    assert usage._counters() == {"cpu": 4 / cpu_count()}
    assert usage._memory_share() == pytest.approx(0.6)


def test_what_cannot_be_read_is_left_out(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TIMINGS, "usage", 0.05)
    monkeypatch.setenv("PATH", "")
    [row, *_] = sampled(tmp_path / "usage.jsonl", 1)
    assert set(row) == {"time", "disk"}


def test_a_busy_machine_is_told_from_an_idle_one(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The counters grow by a tenth of a second of each core between two looks, by any clock."""
    seconds = iter(range(1000))
    monkeypatch.setattr(TIMINGS, "usage", 0.2)
    monkeypatch.setattr(usage, "_cpu_seconds", lambda: next(seconds) * cpu_count() * 0.1)
    rows = sampled(tmp_path / "usage.jsonl", 2)
    assert all(0 < row["cpu"] <= 50 for row in rows), rows


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        ("echo '80, 10, 40'; echo '20, 30, 40'", {"gpu": 50.0, "gpu_memory": 75.0}),
        ("echo '[N/A], 10, 40'", {}),
    ],
)
def test_gpus_are_those_of_nvidia_smi(
    answer: str, found: dict[str, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_smi(tmp_path / "bin", answer)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    assert gpu_usage(gpu_rows()) == found


@for_each(
    ("answer", "calls", "said"),
    [
        ("exec sleep 60", 3, ["timed out after 0.2 seconds"]),
        ("exit 9", 3, ["non-zero exit status 9"]),
        ("echo '[N/A], 10, 40'", 3, ["shows the use of no GPU"]),
        ("[ $(wc -l < {asked}) != 2 ] || exec sleep 60; echo '80, 10, 40'", 6, ["80.0"] * 5),  # slow once
        ("", 0, ["there is no nvidia-smi"]),
    ],
)
def test_a_driver_that_fails_three_times_is_not_asked_again(
    answer: str, calls: int, said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / str(time.monotonic_ns())
    asked = fake_smi(folder, answer.format(asked=folder / "asked"))
    if not answer:
        (folder / "nvidia-smi").unlink()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setattr(usage, "GPU_SECONDS", 0.2)
    heard: list[float | str] = []
    sampler = UsageSampler(folder / "usage.jsonl", disk=folder, on_gpu=heard.append)
    for _ in range(6):
        sampler._levels()
    assert (len(asked.read_text().splitlines()) if calls else 0) == calls
    assert len(heard) == len(said)
    assert all(words in str(item) for words, item in zip(said, heard, strict=True)), heard


@pytest.mark.slow
def test_a_run_shows_how_busy_its_nodes_were(jobs: Jobs, tmp_path: Path) -> None:
    """Check rows of both nodes in the store, and curves in the report."""
    fake_smi(tmp_path / "bin", "echo '90, 10, 40'")
    jobs.environ["PATH"] = f"{tmp_path / 'bin'}:{jobs.environ.get('PATH', os.environ['PATH'])}"
    jobs.shorten(usage=0.3)
    jobs.write("train.py", "import time; time.sleep(3)")
    done = jobs.submit("train.py", "--nodes", "2", "--launcher", "python", "--run-id", "busy-1")
    assert done.code == 0, done.err
    found = sorted((jobs.store / "runs/busy-1/live/usage").glob("0.0-node-*.jsonl"))
    assert [path.name for path in found] == ["0.0-node-0.jsonl", "0.0-node-1.jsonl"]
    for path in found:
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        assert len(rows) >= 2
        assert all({"time", "cpu", "memory", "disk", "gpu", "gpu_memory"} <= set(row) for row in rows)
        assert {row["gpu"] for row in rows} == {90.0}
    assert not (jobs.store / "runs/busy-1/live/metrics").exists(), "samples are no metrics of the script"
    page = tmp_path / "page.html"
    assert jobs.cli("report", "busy-1", "--store", str(jobs.store), "-o", str(page)).code == 0
    text = page.read_text()
    assert "Busy or idle" in text
    assert all(name in text for name in ("GPU (%)", "GPU memory (%)", "CPU (%)", "memory (%)", "disk (%)"))
