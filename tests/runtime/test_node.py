"""What a node makes of failures while a stop notice is under way; nothing is started."""

from __future__ import annotations

import json
import queue
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from cloudtrain.provider import Site, Topology
from cloudtrain.runtime import node
from cloudtrain.runtime.cause import Failure
from cloudtrain.runtime.history import FIRST
from cloudtrain.runtime.node import Node


@pytest.fixture
def head(tmp_path: Path) -> Node:
    """Node 0 of two, whose own rank has had no signal."""
    topology = Topology(nodes=2, node_rank=0, master_addr="127.0.0.1", master_port=5000)
    site = Site(topology=topology, paths={"live": str(tmp_path)}, scratch=[])
    return Node(context={"resume": None}, site=site, attempt=0, key=b"k", inbox=queue.SimpleQueue())


def says(head: Node, *, notified: bool, kind: str = "error", exception: str = "SystemExit: 1") -> None:
    """Node 1 tells of a failure, as it would."""
    failure = Failure(kind=kind, node=1, rank=1, time_ns=time.time_ns(), exception=exception, code=1, notified=notified)
    head._handle(1, {"t": "failed", "failures": [failure.to_dict()]})


def test_a_rank_that_had_the_notice_may_fail_before_node_0_has_told_any(head: Node) -> None:
    head._handle(1, {"t": "preempt", "why": "node 1 was told to stop", "node": 1})
    says(head, notified=True)
    assert head.stopped_ns is None
    assert head.stopping is None  # the others keep their grace
    assert head._outcome() == "preempted"


def test_a_rank_that_had_no_notice_fails_as_ever(head: Node) -> None:
    head._handle(1, {"t": "preempt", "why": "node 1 was told to stop", "node": 1})
    says(head, notified=True)
    says(head, notified=False, exception="ValueError: x")
    assert head.stopping is None  # the same rank again
    head.failures.clear()
    says(head, notified=False, exception="ValueError: x")
    assert head.stopping is not None
    assert head._outcome() == "failed"


def test_what_fails_after_our_own_signal_is_no_failure_either(head: Node) -> None:
    head._handle(1, {"t": "preempt", "why": "node 1 was told to stop", "node": 1})
    head.stopped_ns = time.time_ns() - 1
    says(head, notified=False)
    assert head.stopping is None
    assert head._outcome() == "preempted"


def test_a_peer_that_comes_after_the_notice_hears_of_it_and_is_waited_for(
    head: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would look in vain for a node 0 that has gone, until it is killed, and the run with it."""
    sent: list[tuple[int, dict[str, object]]] = []
    monkeypatch.setattr("cloudtrain.runtime.link.Link.send", lambda _, node, message: sent.append((node, message)))
    monkeypatch.setattr("cloudtrain.runtime.link.Link.connected", lambda _: {node for node, _ in sent if node == 1})
    head.attempt = "0.0"
    head._handle(0, {"t": "signal", "number": signal.SIGTERM, "at": time.monotonic()})
    done = {"t": "done", "outcome": "preempted", "failures": []}

    def come() -> None:
        for message in ({"t": "hello"}, {"t": "ready", "failures": []}, done):
            head.inbox.put((1, message))

    threading.Timer(0.5, come).start()
    assert head._conclude() == "preempted"
    assert head.inbox.empty()
    assert [message["t"] for node, message in sent if node == 1] == ["attempt", "preempt"]


def test_a_node_that_does_not_meet_node_0_soon_after_the_notice_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node.Workspace, "fill", lambda _: None)
    topology = Topology(nodes=2, node_rank=1, master_addr="127.0.0.1", master_port=5000)
    site = Site(topology=topology, paths={"live": str(tmp_path)}, scratch=[str(tmp_path)], stop_grace=30)
    peer = Node(context={"resume": None, "run_id": "r"}, site=site, attempt=0, key=b"k", inbox=queue.SimpleQueue())
    peer.inbox.put((-1, {"t": "signal", "number": signal.SIGTERM, "at": time.monotonic()}))
    began = time.monotonic()
    peer._prepare_and_join()
    assert peer._finish() == "preempted"
    assert time.monotonic() - began < 10


def test_who_comes_as_node_0_leaves_is_preempted_with_it(head: Node) -> None:
    head._on_exit(0, {"outcome": "preempted", "lost": False})
    assert (head.released, head._outcome()) == (True, "preempted")


def test_the_grace_counts_from_the_notice_not_from_when_it_is_read(head: Node) -> None:
    head._handle(1, {"t": "preempt", "why": "node 1 was told to stop", "node": 1})
    assert not head._late()
    head._handle(-1, {"t": "signal", "number": signal.SIGTERM, "at": time.monotonic() - 100})
    assert head._late()


def test_a_node_that_has_left_while_it_restored_stays_accounted_for(head: Node) -> None:
    head._handle(1, {"t": "done", "outcome": "preempted", "failures": []})
    head._handle(1, {"t": "restored", "why": "", "damaged": False, "failures": []})
    assert head._accounted() == {1}


def test_a_notice_is_heard_while_a_checkpoint_is_restored(
    head: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head.space = SimpleNamespace(preempt=tmp_path / "preempt")  # type: ignore[assignment]
    let = threading.Event()
    message = {"t": "restore", "root": "own", "folder": "", "also": []}
    monkeypatch.setattr(head.resume, "candidates", lambda: iter([("step-1", 1.0, message)]))
    monkeypatch.setattr(head.resume, "restore", lambda *_: (let.wait(10), ("", False))[1])
    head.attempt, head.nodes = FIRST, 1
    notice = {"t": "signal", "number": signal.SIGTERM, "at": time.monotonic()}
    threading.Timer(0.3, head.inbox.put, [(-1, notice)]).start()
    began = time.monotonic()
    head._agree_on_resume()
    let.set()
    assert (head.go, head._outcome()) == (None, "preempted")
    assert time.monotonic() - began < 5


def test_without_a_notice_a_failure_is_one(head: Node) -> None:
    says(head, notified=False)
    assert head.stopping is not None
    assert head._outcome() == "failed"


def test_a_consequence_of_a_node_that_says_nothing_more_is_that_node_lost(
    head: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The link may not know yet that it is gone: the failure is the platform's, no error of the user's script."""
    monkeypatch.setattr(node, "PEERS_SECONDS", 0.1)
    told: list[dict[str, object]] = []
    monkeypatch.setattr("cloudtrain.runtime.link.Link.send_all", lambda _, message: told.append(message))
    head.attempt, head.go = "0.0", {"t": "go"}
    closed = "RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:1"
    failure = Failure(kind="error", node=0, rank=0, time_ns=time.time_ns(), exception=closed, code=1)
    head._fail(failure)
    assert head._conclude() == "failed"
    record = json.loads(Path(head.live, "exit", "0.0-node-0.json").read_text())
    assert (record["category"], record["failure"]["node"], record["failure"]["rank"]) == ("infra", 1, None)
    assert record["reason"] == "node 1 was lost: it has not said how it ended"
    assert told[-1] == {"t": "exit", "outcome": "failed", "lost": True}


# -------------------------------------------------------------------------------------------------- what to resume from


def restored(head: Node, why: str, *, damaged: bool) -> None:
    """Node 0 has two candidates and no peers; every restore ends so."""
    head.nodes, head.attempt = 1, "0.1"
    head.space = SimpleNamespace(direct=lambda: None)  # type: ignore[assignment]
    message = {"t": "restore", "root": "own", "folder": "", "also": []}
    head.resume.candidates = lambda: iter([("b", 2.0, message), ("a", 1.0, message)])  # type: ignore[method-assign]
    head.resume.restore = lambda message, space: (why, damaged)  # type: ignore[method-assign]
    head._agree_on_resume()


def test_a_damaged_checkpoint_is_passed_over(head: Node) -> None:
    restored(head, "it is not what was committed", damaged=True)
    assert head.go == {"t": "go", "resume": "", "url": "", "saved": None}
    assert not head.failures


def test_a_disk_that_fails_is_no_reason_to_lose_a_whole_checkpoint(head: Node) -> None:
    restored(head, "cannot restore checkpoint b: No space left on device", damaged=False)
    assert head.go is None
    (failure,) = head.failures
    assert (failure.kind, failure.category) == ("setup", "infra")
    assert "No space left" in failure.exception


def test_the_newest_that_can_be_restored_is_it(head: Node) -> None:
    restored(head, "", damaged=False)
    assert head.go == {"t": "go", "resume": "b", "url": "", "saved": 2.0}


def test_a_node_that_never_restores_is_named(head: Node) -> None:
    head.site = replace(head.site, join_timeout=0.2)
    nodes, head.nodes = head.nodes, 1
    restored(head, "", damaged=False)
    assert head.go is not None  # alone it goes on
    head.nodes, head.go = nodes, None
    head._agree_on_resume()
    assert head.go is None
    (failure,) = head.failures
    assert (failure.kind, failure.node) == ("lost", 1)
    assert failure.exception.startswith("has not restored checkpoint b in ")
