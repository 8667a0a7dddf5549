"""The check of a node before its ranks: how its processes end, and the machine that a failure names."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rows import for_each

from cloudtrain.provider_api.node import Topology
from cloudtrain.runtime import host_facts, node_check
from cloudtrain.runtime.cause import Failure, category, failure_line
from cloudtrain.runtime.decisions import Notice
from cloudtrain.runtime.node import Node
from cloudtrain.runtime.node_check import Finding
from cloudtrain.runtime.preflight import check_failure, run_check
from cloudtrain.runtime.timings import TIMINGS

ROW = {"torch": "2", "gpus": 0, "gpu": None, "ranks": 2, "shm_bytes": 1 << 30}
REPORT = {"nodes": {"0": ROW}, "links": {}, "allreduce": {"right": True}, "error": ""}
BEGINS = f"print({node_check.BEGUN!r}, flush=True)"
WRITES = f"{BEGINS}; open('preflight.json', 'w').write({json.dumps(REPORT)!r})"
HANGS = "import time; time.sleep(60)"
STOPPED = "import os, signal; os.kill(os.getpid(), signal.SIGTERM)"
UNBLOCKED = "import signal; signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])"
ECC = "torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered"
RESET = "RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer"


def dies(*lines: str) -> str:
    return f"{BEGINS}; import sys; sys.exit({chr(10).join(lines)!r})"


def check(
    folder: Path, *scripts: str, node: int = 0, gpus: int | None = None, over: Callable[[], bool] = lambda: False
) -> list[Finding]:
    pids: list[int] = []

    def wait(until: Callable[[], bool], end: float | None) -> None:
        while not until() and (end is None or time.monotonic() < end):
            time.sleep(0.01)

    script = f"import os; exec({list(scripts)!r}[int(os.environ['LOCAL_RANK'])])"
    found = run_check(
        [sys.executable, "-c", script],
        len(scripts),
        {},
        Topology(nodes=1, node_rank=node, master_addr="127.0.0.1", master_port=1),
        folder=folder,
        gpus=gpus,
        started=pids.append,
        wait=wait,
        over=over,
    )
    assert len(pids) == len(scripts)
    return found


@pytest.mark.slow
@for_each(
    ("scripts", "gpus", "text", "node"),
    [
        ([WRITES, BEGINS], None, "", None),
        ([f"{STOPPED}; {WRITES}", BEGINS], 8, "node 0 has 0 GPUs for torch, 8 are expected", 0),  # it has survived
        ([BEGINS, f"{UNBLOCKED}; {STOPPED}"], 8, "", None),
        ([WRITES, BEGINS], 8, "node 0 has 0 GPUs for torch, 8 are expected", 0),
        ([BEGINS, dies("Traceback", ECC)], None, f"a process ended with code 1: {ECC}", 0),
        ([dies(RESET, "more"), HANGS], None, f"a process ended with code 1: {RESET}", None),
        ([dies(RESET, ECC)], None, f"a process ended with code 1: {ECC}", 0),
        ([dies("no space left")], None, "a process ended with code 1: no space left", 0),
        ([WRITES, HANGS], None, "1 of its 2 processes have not begun in 1s", 0),
        ([WRITES, f"{BEGINS}; {HANGS}"], None, "it has not ended in 2s", None),
    ],
)
def test_how_a_check_ends(
    scripts: list[str], gpus: int | None, text: str, node: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TIMINGS, "node_check_begin", 1.0)
    monkeypatch.setattr(TIMINGS, "node_check", 2.0)
    folder = tmp_path / str(time.monotonic_ns())
    folder.mkdir()
    found = check(folder, *scripts, gpus=gpus)
    assert [(item.text.partition(": check ")[0], item.node) for item in found] == ([(text, node)] if text else [])


def test_an_attempt_that_is_over_ends_the_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that dies a moment later still reports its cause: another node may have died of it."""
    monkeypatch.setattr(TIMINGS, "stop_kill", 0.2)
    assert check(tmp_path, f"{BEGINS}; {HANGS}", over=lambda: True) == []
    monkeypatch.setattr(TIMINGS, "stop_kill", 20.0)
    [found] = check(tmp_path, f"import time; time.sleep(0.5); {dies(ECC)}", over=lambda: True)
    assert ECC in found.text


@for_each(("since", "fails"), [(None, True), (1.0, False)])
def test_what_a_check_finds_after_a_notice_does_not_count(since: float | None, fails: bool) -> None:
    failed: list[Failure] = []
    node: Any = SimpleNamespace(
        _space=SimpleNamespace(check=lambda *_: [Finding("a process has ended", 0)]), attempt="0.0", me=0, machines={},
        _pump=None, _over=None, notice=Notice(since=since), _fail=failed.append, _answer=lambda kind: None,
    )  # fmt: skip
    Node._check_this_node(node)
    assert bool(failed) == fails


def test_a_failure_names_the_node_its_machine_and_the_check() -> None:
    assert check_failure([Finding("torch differs", category="")], 0, {}) is None
    found = [Finding("no all-reduce came to its end"), Finding("it has 7 GPUs", 1), Finding("and no room", 1)]
    failure = check_failure(found, 0, {0: "a", 1: "b"})
    assert failure is not None
    assert failure_line(failure) == "node 1 failed the node check on machine b: it has 7 GPUs; and no room"
    assert (failure.node, failure.public()["machine"], category(failure)) == (1, "b", "infra")
    alone = check_failure(found[:1], 0, {0: "a"})
    assert alone is not None
    assert failure_line(alone) == "node 0 reports that the node check failed: no all-reduce came to its end"
    assert "machine" not in alone.public()


def links(*broken: tuple[int, int], clock: float = 0.0) -> dict[str, Any]:
    link = {"error": "", "skew_s": clock, "within_s": 0.0}
    cut = {"error": "a:1: refused"}
    names = [str(number) for number in range(3)]
    made = {a: {b: cut if (int(a), int(b)) in broken else link for b in names if b != a} for a in names}
    return {"nodes": dict.fromkeys(names, ROW), "links": made, "allreduce": {"right": True}, "error": ""}


@for_each(
    ("report", "nodes", "categories"),
    [
        (links((0, 2), (1, 2)), [2, 2], {"infra"}),
        (links((2, 0), (2, 1)), [2, 2], {"infra"}),
        (links((0, 1)), [None], {"infra"}),  # either of the two
        (links(clock=5.0), [1, 2], {""}),  # training does not mind
        ({**links(), "nodes": {**links()["nodes"], "1": {**ROW, "torch": "1"}}}, [None], {""}),
        ({**links(), "nodes": {key: {**ROW, "gpus": 1} for key in "012"}}, [0, 1, 2], {"infra"}),  # and 2 ranks
        ({**links(), "nodes": {"0": {**ROW, "gpus": 4}, "1": ROW, "2": {**ROW, "gpus": 4}}}, [1], {"infra"}),
        ({"nodes": {"0": {**ROW, "torch": None}}, "links": {}, "error": node_check.NO_TORCH}, [None], {"image"}),
    ],
)
def test_the_node_that_a_problem_is_of(report: dict[str, Any], nodes: list[int | None], categories: set[str]) -> None:
    found = list(node_check.findings(report, nodes=3, gpus=None))
    assert [item.node for item in found] == nodes
    assert {item.category for item in found} == categories


@for_each(
    ("files", "name"),
    [
        ({"board_asset_tag": "i-0abc123\n", "product_uuid": "ec2"}, "i-0abc123"),
        ({"product_serial": "GoogleCloud-AB12\n"}, "GoogleCloud-AB12"),
        ({"chassis_asset_tag": "7783-7084-3265-9085-8269-3286-77", "product_uuid": "6f-1"}, "6f-1"),
        ({"board_asset_tag": "Default string", "product_uuid": "6f-1"}, "here"),
        ({"chassis_asset_tag": "7783-7084-3265-9085-8269-3286-77"}, "here"),
        ({}, "here"),
    ],
)
def test_a_machine_is_known_by_its_firmware(
    files: dict[str, str], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / str(time.monotonic_ns())
    folder.mkdir()
    for file, text in files.items():
        (folder / file).write_text(text)
    monkeypatch.setattr(host_facts, "DMI", folder)
    monkeypatch.setattr(host_facts.socket, "gethostname", lambda: "here")
    assert host_facts.machine_name() == name


def test_more_gpus_than_expected_are_a_note() -> None:
    [found] = node_check.findings({**links(), "nodes": {"0": {**ROW, "gpus": 8}}}, nodes=1, gpus=4)
    assert (found.node, found.category) == (0, "")
