"""A node's verdict on failures after a stop notice. No process is started."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, Mock

import pytest
import slowfs
from disks import slow_disk

from cloudtrain.engine.processes import free_port_pair
from cloudtrain.errors import StorageError
from cloudtrain.provider_api.node import NodeEnvironment, Topology
from cloudtrain.runtime import node, notices
from cloudtrain.runtime.__main__ import _failure_before
from cloudtrain.runtime.cause import Failure
from cloudtrain.runtime.checkpoints import Watch
from cloudtrain.runtime.history import FIRST
from cloudtrain.runtime.logs import LogWriter
from cloudtrain.runtime.node import Node
from cloudtrain.runtime.resume import Resume
from cloudtrain.runtime.timings import TIMINGS


@pytest.fixture
def head(tmp_path: Path) -> Node:
    """Return node 0 of two, whose own rank has had no signal."""
    topology = Topology(nodes=2, node_rank=0, master_addr="127.0.0.1", master_port=free_port_pair())
    site = NodeEnvironment(topology=topology, paths={"live": str(tmp_path)}, scratch=[])
    return Node(context={"resume": None}, site=site, attempt=0, key=b"k", inbox=queue.SimpleQueue())


def says(head: Node, *, notified: bool, kind: str = "error", exception: str = "SystemExit: 1") -> None:
    """Report a failure from node 1."""
    failure = Failure(kind=kind, node=1, rank=1, time_ns=time.time_ns(), exception=exception, code=1, notified=notified)
    head._handle(1, {"t": "failed", "failures": [failure.to_dict()]})


def test_a_rank_that_had_the_notice_may_fail_before_node_0_has_told_any(head: Node) -> None:
    head._handle(1, {"t": "preempt", "why": "node 1 got a stop signal", "node": 1})
    says(head, notified=True)
    assert head.stopped_ns is None
    assert head.stopping is None  # the others keep their grace
    assert head._outcome() == "preempted"


def test_a_rank_that_had_no_notice_fails_as_ever(head: Node) -> None:
    head._handle(1, {"t": "preempt", "why": "node 1 got a stop signal", "node": 1})
    says(head, notified=True)
    says(head, notified=False, exception="ValueError: x")
    assert head.stopping is None  # the same rank again
    head.failures.clear()
    says(head, notified=False, exception="ValueError: x")
    assert head.stopping is not None
    assert head._outcome() == "failed"


def test_what_fails_after_our_own_signal_is_no_failure_either(head: Node) -> None:
    head._handle(1, {"t": "preempt", "why": "node 1 got a stop signal", "node": 1})
    head.stopped_ns = time.time_ns() - 1
    says(head, notified=False)
    assert head.stopping is None
    assert head._outcome() == "preempted"


@pytest.mark.slow
def test_a_peer_that_comes_after_the_notice_hears_of_it_and_is_waited_for(
    head: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise it would look for a node 0 that has ended, until the platform kills it and the run."""
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


@pytest.mark.slow
def test_a_node_that_does_not_meet_node_0_soon_after_the_notice_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node.Workspace, "fill", lambda _: None)
    topology = Topology(nodes=2, node_rank=1, master_addr="127.0.0.1", master_port=free_port_pair())
    site = NodeEnvironment(topology=topology, paths={"live": str(tmp_path)}, scratch=[str(tmp_path)], stop_grace=30)
    peer = Node(context={"resume": None, "run_id": "r"}, site=site, attempt=0, key=b"k", inbox=queue.SimpleQueue())
    peer.inbox.put((-1, {"t": "signal", "number": signal.SIGTERM, "at": time.monotonic()}))
    began = time.monotonic()
    peer._prepare_and_join()
    assert peer._finish() == "preempted"
    assert time.monotonic() - began < 10
    assert json.loads((tmp_path / "exit" / "0-node-1.json").read_bytes())["attempt"] == "0"


def test_a_disk_that_is_full_at_the_start_is_the_cause_and_not_a_lost_node(
    head: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(_: object) -> None:
        assert head.space is not None
        raise OSError(errno.ENOSPC, "No space left on device", str(head.space.folder / "worker.py"))

    monkeypatch.setattr(node.Workspace, "fill", fill)
    head.site, head.context = replace(head.site, scratch=[str(tmp_path)]), {"resume": None, "run_id": "r"}
    head.nodes, head.attempt = 1, "0.0"
    head._prepare_and_join()
    assert head._finish() == "failed"
    record = json.loads(Path(head.live, "exit", "0.0-node-0.json").read_text())
    assert record["category"] == "infra"
    assert record["reason"] == "node 0 could not continue: No space left on device: <scratch>/worker.py"


def test_a_command_that_is_missing_is_named_as_the_user_wrote_it(
    head: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(**_: object) -> None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "./tool")

    context = {"resume": None, "run_id": "r", "checkpoint_paths": [], "entry_point": "", "args": ["./tool"]}
    head.site, head.context = replace(head.site, scratch=[str(tmp_path)], paths={"live": str(tmp_path)}), context
    head.nodes, head.attempt, head.go = 1, "0.0", {"t": "go", "resume": "", "url": "", "saved": None}
    head.space = node.Workspace(context=context, site=head.site, log=head.log, wait=print)
    monkeypatch.setattr(head.space, "start", start)
    monkeypatch.setattr(head, "_watch_the_script", lambda *_: None)
    head._launch()
    assert head.failures[0].exception == "cannot start ./tool: No such file or directory"


def test_who_comes_as_node_0_leaves_is_preempted_with_it(head: Node) -> None:
    head._on_exit(0, {"outcome": "preempted", "lost": False})
    assert (head.released, head._outcome()) == (True, "preempted")


def test_the_grace_counts_from_the_notice_not_from_when_it_is_read(head: Node) -> None:
    head._handle(1, {"t": "preempt", "why": "node 1 got a stop signal", "node": 1})
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


def test_a_reason_that_is_no_text_reaches_the_platform_too(head: Node, tmp_path: Path) -> None:
    """A script may raise with the name of a file that is not UTF-8."""
    head.nodes, head.attempt = 1, "0.0"
    head.site = replace(head.site, failure_file=str(tmp_path / "failure"))
    failed = Failure(kind="error", node=0, rank=0, time_ns=1, exception="ValueError: caf\udce9.txt", code=1)
    head._fail(failed)
    assert head._conclude() == "failed"
    assert (tmp_path / "failure").read_text() == "rank 0 on node 0 raised ValueError: caf?.txt"


@pytest.mark.slow
@pytest.mark.parametrize("noticed", [False, True])
def test_a_store_that_hangs_does_not_keep_the_node(
    head: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], noticed: bool
) -> None:
    """Its mount takes no write for minutes. The machine costs money until the node ends."""
    monkeypatch.setattr(TIMINGS, "record", 1.0)
    head.log = LogWriter(node=0, flush_seconds=0.1)
    head.nodes, head.live = 1, tmp_path / "place" / "live"
    head.site = replace(head.site, attempt="0.0", failure_file=str(tmp_path / "failure"), stop_grace=4.0)
    record = tmp_path / "behind" / "live" / "exit" / "0.0-node-0.json"
    with slow_disk(tmp_path / "behind", tmp_path / "place"):
        head._begin("0.0")
        (tmp_path / "behind" / slowfs.HANGS).touch()
        head.log.say("the last line")
        while not head.log._disk.locked():  # until the thread of the log hangs
            time.sleep(0.02)
        began = time.monotonic()
        if noticed:
            head._handle(0, {"t": "signal", "number": signal.SIGTERM, "at": began})
        else:
            head._fail(Failure(kind="error", node=0, rank=0, time_ns=1, exception="ValueError: x", code=1))
        monkeypatch.setattr(head, "_prepare_and_join", lambda: None)
        assert head.run() == head.site.exit_code["preempted" if noticed else "failed"]
        assert time.monotonic() - began < 8
        assert "the exit record may be missing" in capfd.readouterr().out
        assert not record.exists()
        (tmp_path / "behind" / slowfs.HANGS).unlink()
        head._recorder.shutdown()  # all comes in the right order once the store answers
        assert json.loads(record.read_text())["outcome"] == ("preempted" if noticed else "failed")
    assert noticed or (tmp_path / "failure").read_text() == "rank 0 on node 0 raised ValueError: x"


@pytest.fixture
def silent(head: Node, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    """Node 0 whose folder in the store is on a mount that never answers."""
    healed = threading.Event()

    def listing(real: Callable[[Path], Any], folder: Path) -> Any:
        if str(folder).startswith(str(head.live)):
            healed.wait()
        return real(folder)

    for call in ("listdir", "scandir"):
        monkeypatch.setattr(os, call, partial(listing, getattr(os, call)))
    monkeypatch.setattr(TIMINGS, "mount", 0.5)
    yield head
    healed.set()


def test_a_taken_port_on_node_0_ends_all_nodes_at_once_and_is_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node.Workspace, "fill", lambda _: None)
    monkeypatch.setattr(node.Workspace, "gpu_trouble", lambda _: None)
    codes: dict[int, int] = {}
    port = free_port_pair()

    def run(number: int) -> None:
        topology = Topology(nodes=2, node_rank=number, master_addr="127.0.0.1", master_port=port)
        site = NodeEnvironment(
            topology=topology, paths={"live": str(tmp_path)}, scratch=[str(tmp_path / "scratch")], attempt="0.3"
        )
        context = {"resume": None, "run_id": "r"}
        codes[number] = Node(context=context, site=site, attempt=0, key=b"k", inbox=queue.SimpleQueue()).run()

    with socket.create_server(("127.0.0.1", port + 1)):
        nodes = [threading.Thread(target=run, args=(number,), daemon=True) for number in (1, 0)]
        for each in nodes:
            each.start()
        for each in nodes:
            each.join(20)
    assert sorted(codes) == [0, 1]
    first, second = (json.loads((tmp_path / f"exit/{name}.json").read_bytes()) for name in ("0.3-node-0", "0-node-1"))
    why = f"node 0 could not continue: cannot listen on port {port + 1}: Address already in use"
    assert (first["outcome"], first["category"], first["reason"], first["decided"]) == ("failed", "infra", why, True)
    assert second["reason"] == f"node 0 was lost: {why}"


def test_a_mount_that_never_answers_ends_the_node_before_its_number_is_known(silent: Node) -> None:
    began = time.monotonic()
    with pytest.raises(StorageError) as error:
        silent.run()
    assert str(error.value) == f"{silent.live} has not answered for 0 s"
    assert time.monotonic() - began < 5


def test_a_mount_that_never_answers_fails_the_attempt_at_its_start(
    silent: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node.Workspace, "fill", lambda _: None)
    monkeypatch.setattr(node.Workspace, "gpu_trouble", lambda _: None)
    monkeypatch.setattr("cloudtrain.runtime.checkpoints._survey", lambda root, _: os.listdir(root))
    silent.site, silent.context = (
        replace(silent.site, scratch=[str(tmp_path / "scratch")]),
        {"resume": None, "run_id": "r"},
    )
    silent.nodes, silent.attempt = 1, "0.0"
    began = time.monotonic()
    silent._prepare_and_join()
    assert time.monotonic() - began < 5
    (failure,) = silent.failures
    assert (failure.category, failure.exception) == ("infra", f"{silent.live} has not answered for 0 s")


def test_a_mount_that_never_answers_fails_the_attempt_before_its_ranks_start(silent: Node) -> None:
    silent.go, silent.attempt = {"t": "go", "resume": "", "url": "", "saved": None}, "1.0"
    silent.space = SimpleNamespace(watch=Mock(), bring_back=Mock(), readable=str)  # type: ignore[assignment]
    began = time.monotonic()
    silent._launch()
    assert time.monotonic() - began < 5
    assert silent.code == 1
    (failure,) = silent.failures
    assert (failure.category, failure.exception) == ("infra", f"{silent.live} has not answered for 0 s")


@pytest.mark.parametrize("dead", [True, False])
def test_a_restore_ends_once_its_mount_has_not_answered_and_no_sooner(
    silent: Node, monkeypatch: pytest.MonkeyPatch, dead: bool
) -> None:
    def restore(message: object, space: object) -> tuple[str, bool]:
        if dead:
            os.listdir(silent.live)
        time.sleep(1.5)
        return "", False

    monkeypatch.setattr(TIMINGS, "mount_pauses", (0.1, 0.1))
    if not dead:
        silent.live = Path("elsewhere")
    silent.nodes, silent.attempt = 1, FIRST
    silent.space = SimpleNamespace(readable=str)  # type: ignore[assignment]
    message = {"t": "restore", "root": "own", "folder": "", "also": []}
    silent.resume.candidates = lambda: iter([("b", 2.0, message)])  # type: ignore[method-assign]
    silent.resume.restore = restore  # type: ignore[method-assign]
    threading.Timer(5.0, silent.inbox.put, [(-1, {"t": "stop"})]).start()
    silent._agree_on_resume()
    found = [(failure.category, failure.exception) for failure in silent.failures]
    assert found == ([("infra", f"{silent.live} has not answered for 0 s")] if dead else [])
    assert (silent.go is None, silent.stopping is None) == (dead, not dead)


def test_a_mount_that_never_answers_ends_a_container_that_was_started_again(silent: Node) -> None:
    with pytest.raises(StorageError, match="has not answered for 0 s"):
        _failure_before(silent.site, 0)


def test_the_exit_record_and_the_mirror_count_how_far_the_clock_was_set_back(
    head: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "set_back" not in head._record("succeeded", None, decided=False)
    mirror, real = Mock(side_effect=InterruptedError), time.time
    monkeypatch.setattr(node, "Mirror", mirror)
    monkeypatch.setattr(head, "_commits", Mock())
    with pytest.raises(InterruptedError):  # its arguments are all that counts here
        head._watch_the_script(MagicMock(), Mock(entries=dict))
    monkeypatch.setattr(time, "time", lambda: real() - 3600.0)
    record = head._record("succeeded", None, decided=False)
    assert record["set_back"] == mirror.call_args.kwargs["clock"].set_back() == pytest.approx(3600.0, abs=5.0)


def test_a_record_that_cannot_be_made_is_no_store_that_hangs(head: Node) -> None:
    with pytest.raises(ZeroDivisionError):
        head._in_time(lambda: 1 / 0)


def test_a_consequence_of_a_node_that_says_nothing_more_is_that_node_lost(
    head: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The link may not know yet that the node is lost. The failure is the platform's, not the user's script's."""
    monkeypatch.setattr(TIMINGS, "peers", 0.1)
    told: list[dict[str, object]] = []
    monkeypatch.setattr("cloudtrain.runtime.link.Link.send_all", lambda _, message: told.append(message))
    head.attempt, head.go = "0.0", {"t": "go"}
    closed = "RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:1"
    failure = Failure(kind="error", node=0, rank=0, time_ns=time.time_ns(), exception=closed, code=1)
    head._fail(failure)
    assert head._conclude() == "failed"
    record = json.loads(Path(head.live, "exit", "0.0-node-0.json").read_text())
    assert (record["category"], record["failure"]["node"], record["failure"]["rank"]) == ("infra", 1, None)
    assert record["reason"] == "node 1 was lost: it has not reported how it ended"
    assert told[-1] == {"t": "exit", "outcome": "failed", "lost": True}


# ---------------------------------------------------------------------------------------------------- resume candidates


def restored(head: Node, why: str, *, damaged: bool) -> None:
    """Let each restore of node 0 end like this. It has two candidates and no peers."""
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
    assert head.go is not None  # without peers it starts
    head.nodes, head.go = nodes, None
    head._agree_on_resume()
    assert head.go is None
    (failure,) = head.failures
    assert (failure.kind, failure.node) == ("lost", 1)
    assert failure.exception.startswith("has not restored checkpoint b in ")


@pytest.fixture
def hanging(head: Node, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Return an event that stands for a store without an answer. Node 0, alone, gets a stop signal meanwhile."""
    monkeypatch.setattr("cloudtrain.runtime.link.Link.send_all", lambda *_: None)
    head.nodes, head.attempt, answer = 1, "0.1", threading.Event()
    stop = {"t": "signal", "number": signal.SIGTERM, "at": time.monotonic()}
    threading.Timer(0.3, head.inbox.put, [(-1, stop)]).start()
    yield answer
    answer.set()


def left_by_the_notice(head: Node) -> bool:
    return head.notice.why == "node 0 got a stop signal (SIGTERM)" and head._finish() == "preempted"


@pytest.mark.parametrize("question", ["direct", "candidates", "the next candidate"])
def test_a_notice_is_heard_while_the_store_is_searched(
    head: Node, hanging: threading.Event, tmp_path: Path, question: str
) -> None:
    """A mount that fails is asked for a minute, a silent store for five."""

    def candidates() -> Iterator[tuple[str, float, dict[str, object]]]:
        if question == "the next candidate":
            yield "b", 2.0, {"t": "restore", "root": "own", "folder": "", "also": []}
        hanging.wait()

    direct = hanging.wait if question == "direct" else lambda: None
    head.space = SimpleNamespace(direct=direct, preempt=tmp_path / "preempt")  # type: ignore[assignment]
    head.resume.candidates = candidates  # type: ignore[assignment, method-assign]
    head.resume.restore = lambda message, space: ("damaged", True)  # type: ignore[method-assign]
    head._agree_on_resume()
    assert head.go is None
    assert left_by_the_notice(head)


def test_a_notice_is_heard_while_artifacts_come_back(head: Node, hanging: threading.Event, tmp_path: Path) -> None:
    head.space = SimpleNamespace(  # type: ignore[assignment]
        preempt=tmp_path / "preempt", watch=lambda: None, bring_back=lambda _: hanging.wait()
    )
    head.go = {"t": "go", "resume": "", "url": "", "saved": None}
    head._launch()
    assert head.ranks is None
    assert left_by_the_notice(head)


def test_a_checkpoint_that_another_job_kept_elsewhere_is_resumed_from_where_it_is(
    head: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other job had ``checkpoint_paths``; this one has none."""
    given = tmp_path / "other/live/checkpoints/out--step-8/0.0-1"
    file = given / "node-0/out--step-8/model.pt"
    file.parent.mkdir(parents=True)
    file.write_text("weights")
    commit = {"protocol": 1, "name": "out--step-8", "place": "out/step-8", "attempt": "0.0", "seq": 1, "time": 1.0}
    digest = hashlib.sha256(b"weights").hexdigest()
    files = {"node-0/out--step-8/model.pt": {"size": 7, "sha256": digest}}
    (given / "commit.json").write_text(json.dumps({**commit, "files": files}))
    started: list[str] = []
    space = SimpleNamespace(
        node=0, nodes=1, checkpoints=tmp_path / "ck", bring_back=lambda _: None, note_group=lambda _: None,
        watch=lambda: Watch(folder=tmp_path / "ck", workdir=tmp_path / "code"),
        start=lambda **how: started.append(how["resume"]) or SimpleNamespace(pid=1),
    )  # fmt: skip
    monkeypatch.setattr(head, "_watch_the_script", lambda *_: None)
    head.nodes, head.attempt, head.space = 1, FIRST, space  # type: ignore[assignment]
    url = "s3://b/runs/other/live/checkpoints"
    head.resume = Resume(live=head.live / "live", given=str(given.parent.parent), url=url, say=print)
    head._agree_on_resume()
    head._launch()
    assert Path(*started, "model.pt").read_text() == "weights"


# ---------------------------------------------------------------------- notices without a signal, and withdrawn notices


class Working:
    """Ranks that run on, of which one handles SIGTERM."""

    def __init__(self) -> None:
        self.notified = 0
        self.codes: dict[int, int] = {}
        self.closing_ns, self.lone = 0, False

    def signal(self, number: int) -> None:
        raise AssertionError(f"signal {number}")

    def last_line_of(self, rank: int, end_ns: int) -> str:
        return ""

    def notify(self) -> bool:
        self.notified += 1
        return self.notified == 1

    def forget_notice(self, seconds: float) -> None:
        self.notified = 0

    def kill(self) -> None:
        pass


@pytest.fixture
def at_work(head: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    """Return node 0 of two, with ranks; ``head.sent`` is what it sends to all nodes."""
    sent: list[dict[str, object]] = []
    monkeypatch.setattr("cloudtrain.runtime.link.Link.send_all", lambda _, message: sent.append(message))
    monkeypatch.setattr(TIMINGS, "launcher", 0.0)
    head.sent = sent  # type: ignore[attr-defined]
    head.site = dataclasses.replace(head.site, hold=0.5)
    head.space = SimpleNamespace(  # type: ignore[assignment]
        preempt=tmp_path / "preempt", metrics=tmp_path / "m", keep_dumps=lambda _: None
    )
    head.ranks = Working()  # type: ignore[assignment]
    head.attempt, head.go = "0.0", {"t": "go"}
    return head


def sent(head: Node) -> list[str]:
    return [message["t"] for message in head.sent]  # type: ignore[attr-defined]


def notice(head: Node, why: str, source: int = 0) -> None:
    """Take a notice ``why`` from a source of this node, and handle it."""
    head._heard_of(source, why)
    while not head.inbox.empty():
        head._handle(*head.inbox.get())


def test_a_notice_reaches_all_and_is_withdrawn_from_all(at_work: Node, tmp_path: Path) -> None:
    notice(at_work, "Azure announced Preempt")
    assert (sent(at_work), (tmp_path / "preempt").exists(), at_work._outcome()) == (["preempt"], True, "preempted")
    notice(at_work, "")
    assert (sent(at_work), (tmp_path / "preempt").exists()) == (["preempt", "withdrawn"], False)
    assert not at_work._late()
    notice(at_work, "Azure announced Preempt")  # the next one counts again
    assert (sent(at_work)[2:], (tmp_path / "preempt").exists()) == (["preempt"], True)


def test_two_sources_are_one_notice_until_both_are_silent(at_work: Node) -> None:
    notice(at_work, "a file is there", 0)
    notice(at_work, "Azure announced Preempt", 1)
    notice(at_work, "", 0)
    assert sent(at_work) == ["preempt"]
    notice(at_work, "", 1)
    assert sent(at_work) == ["preempt", "withdrawn"]


def test_a_notice_to_two_nodes_holds_until_both_are_spared(at_work: Node) -> None:
    notice(at_work, "Azure announced Preempt")
    at_work._handle(1, {"t": "preempt", "why": "node 1 is about to go", "node": 1, "of": "notice"})
    notice(at_work, "")
    assert sent(at_work) == ["preempt"]
    at_work._handle(1, {"t": "withdraw", "node": 1})
    assert sent(at_work) == ["preempt", "withdrawn"]


def test_a_signal_is_never_withdrawn(at_work: Node) -> None:
    notice(at_work, "Azure announced Preempt")
    at_work._handle(-1, {"t": "signal", "number": signal.SIGTERM, "at": time.monotonic()})
    notice(at_work, "")
    assert sent(at_work) == ["preempt", "preempt"], "the peers hear of the signal, too: it ends their stay"
    assert not at_work._held()


def test_no_rank_is_killed_for_a_notice_that_was_withdrawn(at_work: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    notice(at_work, "Azure announced Preempt")
    notice(at_work, "")
    at_work._escalate(time.monotonic() + 1000)
    assert at_work.signalled == 0


def drain(head: Node) -> None:
    while not head.inbox.empty():
        head._handle(*head.inbox.get())


def spared(head: Node) -> None:
    """Give a peer a notice, and withdraw it."""
    head._handle(1, {"t": "preempt", "why": "node 1 is about to go", "node": 1, "of": "notice"})
    head._handle(1, {"t": "withdraw", "node": 1})


@pytest.mark.parametrize(
    "message", [{"t": "rank", "local": 0, "event": "end"}, {"t": "ended", "code": 0}], ids=lambda message: message["t"]
)
def test_ranks_that_end_soon_after_a_withdrawal_take_all_nodes_along(at_work: Node, message: dict[str, object]) -> None:
    """Those ranks may have seen the notice, so this is not a success. A peer's rank may miss it and wait for ever."""
    spared(at_work)
    assert at_work._outcome() == "stopped", "as without a notice"
    at_work._handle(0, message)
    drain(at_work)
    at_work.code = 0
    assert (sent(at_work), at_work._outcome()) == (["preempt", "withdrawn", "preempt"], "preempted")
    assert at_work.space is not None
    assert at_work.space.preempt.exists()
    assert at_work._grace_end() == float("inf"), "no machine is about to be taken"


@pytest.mark.parametrize(("notified", "outcome"), [(True, "preempted"), (False, "failed")])
def test_a_rank_that_fails_soon_after_a_withdrawal(at_work: Node, notified: bool, outcome: str) -> None:
    spared(at_work)
    at_work.ranks.notified = lambda rank, time_ns: notified  # type: ignore[union-attr, method-assign]
    at_work._fail(Failure(kind="error", node=0, rank=0, time_ns=time.time_ns(), exception="SystemExit: 1", code=1))
    drain(at_work)
    assert (at_work._outcome(), at_work.stopping is None) == (outcome, notified)


def test_what_ends_later_is_a_success(at_work: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TIMINGS, "withdrawn", 0.0)
    spared(at_work)
    at_work._handle(0, {"t": "ended", "code": 0})
    assert (at_work.notice.since, at_work._outcome(), sent(at_work)) == (None, "succeeded", ["preempt", "withdrawn"])


def test_ranks_hear_of_a_second_notice(at_work: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(at_work, "_blame_the_dead", lambda: None)
    for _ in range(2):
        notice(at_work, "Azure announced Preempt")
        at_work._tick()
        assert (at_work.ranks.notified, at_work.stopped_ns is None) == (1, False)  # type: ignore[union-attr]
        notice(at_work, "")
        assert (at_work.ranks.notified, at_work.stopped_ns) == (0, None)  # type: ignore[union-attr]


@pytest.mark.parametrize("spoken", [True, False])
def test_ranks_that_have_left_before_the_withdrawal_end_the_attempt(at_work: Node, spoken: bool) -> None:
    """Test ranks of this node, and of a peer whose last message has come."""
    notice(at_work, "Azure announced Preempt")
    if spoken:
        at_work._handle(1, {"t": "done", "outcome": "preempted", "failures": []})
    else:
        at_work._handle(0, {"t": "rank", "local": 0, "event": "end"})
    notice(at_work, "")
    assert sent(at_work) == ["preempt", "withdrawn", "preempt"]
    assert at_work.sent[-1]["of"] == ""  # type: ignore[attr-defined]
    assert (at_work.notice.since is None, at_work._held(), at_work._outcome()) == (False, False, "preempted")


def test_a_notice_after_ranks_have_left_at_a_withdrawn_one_counts_from_its_own_time(at_work: Node) -> None:
    notice(at_work, "Azure announced Preempt")
    at_work.code, at_work.notice = 0, replace(at_work.notice, since=time.monotonic() - 1000)
    notice(at_work, "")
    notice(at_work, "Azure announced Preempt")
    assert (at_work._held(), at_work._late(), sent(at_work)[-1]) == (True, False, "preempt")


def test_a_node_stays_until_it_is_taken_or_the_hold_is_over(at_work: Node) -> None:
    notice(at_work, "Azure announced Preempt")
    at_work.code, began = 0, time.monotonic()
    at_work._hold()
    assert time.monotonic() - began >= 0.4
    threading.Timer(0.1, at_work._heard_of, (0, "")).start()
    at_work.notice = replace(at_work.notice, since=time.monotonic())
    at_work.site = replace(at_work.site, hold=30.0)
    at_work._hold()
    assert time.monotonic() - began < 10


class Copying:
    """A mirror that is not idle before ``seconds`` have passed."""

    def __init__(self, seconds: float) -> None:
        self.idle, self.last, self.trouble = threading.Event(), 0.0, ""
        threading.Timer(seconds, self.idle.set).start()

    def finish(self, *, clean: bool) -> None:
        pass

    stop = freeze = lambda self: None


@pytest.mark.slow
@pytest.mark.parametrize(("seconds", "outcome"), [(0.5, "succeeded"), (60.0, "preempted")])
def test_a_notice_after_the_script_has_ended_well(at_work: Node, seconds: float, outcome: str) -> None:
    """The attempt succeeds if everything is mirrored in time."""
    at_work._handle(0, {"t": "ended", "code": 0})
    at_work.mirror = Copying(seconds)  # type: ignore[assignment]
    at_work.inbox.put((1, {"t": "done", "outcome": "succeeded", "failures": []}))
    at_work.site = dataclasses.replace(at_work.site, hold=2.0)
    at_work._heard_of(0, "Azure announced Preempt")
    assert at_work._finish() == outcome
    assert at_work.remarks == ([] if outcome == "succeeded" else ["not everything could be mirrored"])


def test_a_notice_after_the_script_has_ended_well_that_is_withdrawn(at_work: Node) -> None:
    at_work._handle(0, {"t": "ended", "code": 0})
    notice(at_work, "Azure announced Preempt")
    notice(at_work, "")
    assert (at_work.notice.since, at_work._outcome()) == (None, "succeeded")


def test_mirroring_goes_on_while_the_node_is_held(at_work: Node) -> None:
    """The hold outlasts a signal's grace. Missing files are reported after the hold."""
    at_work.site = dataclasses.replace(at_work.site, hold=20.0, stop_grace=2)
    at_work.mirror = Copying(1.0)  # type: ignore[assignment]
    notice(at_work, "Azure announced Preempt")
    at_work._handle(0, {"t": "ended", "code": 0})
    at_work.inbox.put((1, {"t": "done", "outcome": "preempted", "failures": []}))
    threading.Timer(1.5, at_work._heard_of, (0, "")).start()
    assert (at_work._finish(), at_work.remarks) == ("preempted", [])


def test_mirroring_goes_on_after_a_withdrawal(at_work: Node) -> None:
    at_work.site = dataclasses.replace(at_work.site, hold=0.5, stop_grace=2)
    at_work.mirror = Copying(1.5)  # type: ignore[assignment]
    notice(at_work, "Azure announced Preempt")
    at_work._handle(0, {"t": "ended", "code": 0})
    at_work.inbox.put((1, {"t": "done", "outcome": "preempted", "failures": []}))
    notice(at_work, "")
    assert (at_work._finish(), at_work.remarks) == ("preempted", [])


@pytest.fixture
def peer(at_work: Node, monkeypatch: pytest.MonkeyPatch) -> Node:
    """Return node 1 of the two."""
    monkeypatch.setattr("cloudtrain.runtime.link.Link.send", lambda _, node, message: at_work.sent.append(message))  # type: ignore[attr-defined]
    at_work.me = 1
    return at_work


def test_a_peer_that_ends_long_after_a_withdrawal_waits_for_node_0(peer: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hold of the withdrawn notice has ended by then."""
    monkeypatch.setattr(TIMINGS, "withdrawn", 0.0)
    monkeypatch.setattr(TIMINGS, "hold_slack", 0.0)
    peer._handle(0, {"t": "preempt", "why": "node 0 is about to go", "node": 0, "of": "notice"})
    peer._handle(0, {"t": "withdrawn"})
    peer._handle(1, {"t": "ended", "code": 0})
    threading.Timer(1.0, peer.inbox.put, [(0, {"t": "exit", "outcome": "succeeded", "lost": False})]).start()
    assert (peer._finish(), peer.released) == ("succeeded", True)
    assert sent(peer) == ["done"]


def test_a_peer_that_has_left_at_a_withdrawn_notice_says_so_and_waits_for_node_0(
    peer: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TIMINGS, "hold_slack", 0.0)
    peer._handle(0, {"t": "preempt", "why": "node 0 is about to go", "node": 0, "of": "notice"})
    peer._handle(1, {"t": "ended", "code": 0})
    peer.inbox.put((0, {"t": "withdrawn"}))
    threading.Timer(1.5, peer.inbox.put, [(0, {"t": "exit", "outcome": "preempted", "lost": False})]).start()
    assert (peer._finish(), peer.released) == ("preempted", True)
    assert sorted(sent(peer)) == ["done", "preempt"]


def test_a_peer_stays_for_the_platform_when_node_0_is_taken_first(peer: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TIMINGS, "hold_slack", 0.0)
    peer.site = dataclasses.replace(peer.site, hold=1.0)
    peer._handle(0, {"t": "preempt", "why": "node 0 is about to go", "node": 0, "of": "notice"})
    peer._handle(1, {"t": "ended", "code": 0})
    peer.gone.add(0)
    began = time.monotonic()
    assert peer._finish() == "preempted"
    assert time.monotonic() - began >= 0.8


def test_a_node_that_may_be_taken_says_why_it_left_before_it_mirrors(
    at_work: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Taken(Exception):
        pass

    def taken(*_: object) -> None:
        raise Taken

    notice(at_work, "Azure announced Preempt")
    at_work.code, at_work.mirror = 0, SimpleNamespace(idle=threading.Event())  # type: ignore[assignment]
    monkeypatch.setattr(at_work, "_finish_mirror", taken)
    with pytest.raises(Taken):
        at_work._finish()
    record = json.loads(Path(at_work.live, "exit", "0.0-node-0.json").read_text())
    assert (record["outcome"], record["category"], record["told"]) == ("preempted", "preempted", 0)


class SlowMirror:
    """A mirror that is idle some time after the script's end, or only once it is in a hurry."""

    def __init__(self) -> None:
        self.idle, self.last, self.trouble = threading.Event(), 0.0, ""

    def finish(self, *, clean: bool) -> None:
        threading.Timer(0.5, self.idle.set).start()


@pytest.mark.parametrize(("told", "exception", "waits"), [(True, "SystemExit: 143", True), (False, "x", False)])
def test_a_script_that_leaves_after_a_notice_has_the_grace_for_its_last_checkpoint(
    head: Node, monkeypatch: pytest.MonkeyPatch, told: bool, exception: str, waits: bool
) -> None:
    monkeypatch.setattr(TIMINGS, "mirror_failed", 0.1)
    hurried: list[str] = []
    head.uploads = SimpleNamespace(hurry=lambda: hurried.append("at once"), given_up=[])  # type: ignore[assignment]
    if told:
        head._handle(-1, {"t": "signal", "number": signal.SIGTERM, "at": time.monotonic()})
    says(head, notified=True, exception=exception)
    mirror = SlowMirror()
    head._finish_mirror(mirror, False)  # type: ignore[arg-type]
    assert mirror.idle.is_set() is waits
    assert hurried == ["at once"]


def test_a_clean_end_without_a_notice_is_in_no_hurry(head: Node) -> None:
    hurried: list[str] = []
    head.uploads = SimpleNamespace(hurry=lambda: hurried.append("at once"), given_up=[])  # type: ignore[assignment]
    head._finish_mirror(SlowMirror(), True)  # type: ignore[arg-type]
    assert hurried == []


@pytest.mark.parametrize("blind", [False, True])
def test_a_clean_end_with_results_that_are_not_in_the_store_is_no_plain_success(head: Node, blind: bool) -> None:
    head.uploads = SimpleNamespace(given_up=["step-2/0.0-2"], blind=blind)  # type: ignore[assignment]
    head.code = 0
    head._finish_mirror(SlowMirror(), True)  # type: ignore[arg-type]
    text = "not known to be in the store: checkpoint step-2/0.0-2"
    assert head.remarks == ([text] if blind else [])
    assert head._outcome() == ("succeeded" if blind else "failed")
    assert [failure.category for failure in head.failures] == ([] if blind else ["infra"])


def test_a_stop_after_the_script_ended_does_not_make_lost_results_a_success(head: Node) -> None:
    head.code, head.complete = 0, True
    head._handle(-1, {"t": "signal", "number": signal.SIGTERM, "at": time.monotonic()})
    assert head._outcome() == "succeeded"
    head.uploads = SimpleNamespace(given_up=["step-2/0.0-2"], blind=False)  # type: ignore[assignment]
    assert head._outcome() == "preempted"


def test_after_a_signal_no_node_stays(at_work: Node) -> None:
    at_work._handle(-1, {"t": "signal", "number": signal.SIGTERM, "at": time.monotonic()})
    at_work.site = dataclasses.replace(at_work.site, hold=30.0)
    began = time.monotonic()
    at_work._hold()
    assert time.monotonic() - began < 5


def test_a_source_is_asked_again_and_again_and_told_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TIMINGS, "notice_look", 0.01)
    answers, told, over = iter([None, "", "going", None, "going", ""]), list[str](), threading.Event()

    def look() -> str | None:
        answer = next(answers, "end")
        if answer == "end":
            over.wait()
        return answer

    notices.watch(look, told.append)
    deadline = time.monotonic() + 10
    while told != ["going", ""] and time.monotonic() < deadline:
        time.sleep(0.01)
    assert told == ["going", ""]


def test_a_source_that_never_answers_is_asked_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    class Over(Exception):
        pass

    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 8:
            raise Over

    monkeypatch.setattr(notices.time, "sleep", sleep)
    with pytest.raises(Over):
        notices._ask(lambda: None, lambda text: None)
    assert slept == [2, 4, 8, 16, 32, 60, 60, 60]
