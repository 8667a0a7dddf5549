"""Test the facts of a node's machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from cloudtrain.runtime import host_facts

V1 = "5:cpu,cpuacct:/\n4:memory:/docker/abc\n0::/docker/abc\n"


@pytest.mark.parametrize(
    ("own", "files", "wanted"),
    [
        pytest.param("0::/\n", {"memory.events": "low 0\noom 9\noom_kill 3\n"}, 3, id="container, v2"),
        pytest.param(
            "0::/user.slice/a.scope\n", {"user.slice/a.scope/memory.events": "oom_kill 2\n"}, 2, id="host, v2"
        ),
        pytest.param(
            V1,
            {"memory/docker/abc/memory.oom_control": "oom_kill 4\n", "memory/memory.oom_control": "oom_kill 8\n"},
            4,
            id="host, v1",
        ),
        pytest.param(V1, {"memory/memory.oom_control": "under_oom 0\noom_kill 5\n"}, 5, id="container, v1"),
        pytest.param(V1, {"memory/memory.oom_control": "under_oom 0\n"}, 7, id="old kernel"),
        pytest.param("0::/\n", {}, 7, id="no memory controller"),
        pytest.param("nonsense\n", {}, 7, id="unreadable"),
        pytest.param(None, {}, 7, id="no cgroups"),
    ],
)
def test_kills_for_memory_are_counted_where_the_process_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, own: str | None, files: dict[str, str], wanted: int
) -> None:
    """Another container's kill must not make a SIGKILL here count as out of memory."""
    for name, text in files.items():
        (tmp_path / "cgroup" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "cgroup" / name).write_text(text)
    (tmp_path / "vmstat").write_text("nr_free_pages 1\noom_kill 7\n")
    if own is not None:
        (tmp_path / "own").write_text(own)
    for name, path in (("PROC_CGROUP", "own"), ("CGROUP", "cgroup"), ("VMSTAT", "vmstat")):
        monkeypatch.setattr(host_facts, name, tmp_path / path)
    assert host_facts.oom_kills() == wanted
    (tmp_path / "vmstat").unlink()
    assert host_facts.oom_kills() == (0 if wanted == 7 else wanted)
