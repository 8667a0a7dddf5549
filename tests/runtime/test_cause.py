"""The root cause among many failures: consequences come last at any time. Before them, the earliest failure wins."""

# ruff: noqa: E501  what torch, gloo and NCCL print is quoted as it is

from __future__ import annotations

import random
import signal
from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from rows import for_each

from cloudtrain.errors import CATEGORIES
from cloudtrain.runtime.cause import SLACK_NS, Failure, category, failure_line, root_cause

MS = 1_000_000
T = 1_700_000_000_000_000_000


def error(rank: int, text: str, ms: float = 0, **rest: Any) -> Failure:
    return Failure(kind="error", node=rank // 2, rank=rank, exception=text, time_ns=T + int(ms * MS), code=1, **rest)


def died(rank: int, code: int | None, ms: float = 0) -> Failure:
    return Failure(kind="died", node=rank // 2, rank=rank, code=code, time_ns=T + int(ms * MS))


def lost(node: int, ms: float = 0) -> Failure:
    return Failure(kind="lost", node=node, exception="was lost: the connection ended", time_ns=T + int(ms * MS))


#: Errors that torch, gloo and NCCL print on a rank whose peer has died.
CONSEQUENCES = [
    "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:27352",
    "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Read error [10.0.0.2]:4471: Connection reset by peer",
    "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation to complete",
    "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:133] Timed out waiting 1800000ms for send operation to complete",
    "RuntimeError: Gloo connectFullMesh failed with [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:144] no error",
    "RuntimeError: Rank 2 successfully reached monitoredBarrier, but received errors while waiting for send/recv from rank 0. Please check rank 0 logs for faulty rank.\n Original exception: \n[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1",
    "torch.distributed.DistBackendError: NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.hpp:268, remote process exited or there was a network error, NCCL version 2.20.5\nncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
    "torch.distributed.DistBackendError: [1] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d key-value store by key '0', but store->get('0') got error: Connection reset by peer",
    "RuntimeError: NCCL communicator was aborted on rank 1.  Original reason for failure was: [Rank 1] Watchdog caught collective operation timeout",
    "RuntimeError: [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=12, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600029 milliseconds before timing out.",
    "RuntimeError: NCCL error: unhandled system error, NCCL version 2.14.3\nncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.",
    "torch.distributed.DistNetworkError: The client socket has timed out after 60000ms while trying to connect to (127.0.0.1, 29500).",
    "torch.distributed.DistNetworkError: failed to recv, got 0 bytes",
    "torch.distributed.DistNetworkError: Failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown or crash?",
    "torch.distributed.DistStoreError: Timed out after 61 seconds waiting for clients. 1/2 clients joined.",
    "torch.distributed.DistStoreError: wait timeout after 300000ms, keys: /default_pg/0//cpu//1/0",
    "RuntimeError: recvValue failed on SocketImpl(fd=55, addr=[localhost]:52058, remote=[localhost]:29500): failed to recv, got 0 bytes",
    "RuntimeError: Socket Timeout",
    "RuntimeError: DataLoader worker (pid(s) 4312, 4313) exited unexpectedly",
    "RuntimeError: DataLoader worker (pid 4312) is killed by signal: Terminated. ",
    "torch.distributed.elastic.multiprocessing.api.SignalException: Process 4312 got signal: 15",
    "ConnectionResetError: [Errno 104] Connection reset by peer",
    "BrokenPipeError: [Errno 32] Broken pipe",
]  # fmt: skip

CAUSES = [
    "ValueError: THE ROOT CAUSE",
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB",
    "FileNotFoundError: [Errno 2] No such file or directory: 'data/train.bin'",
    "KeyError: 'state_dict'",
    "RuntimeError: Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!",
    "RuntimeError: mat1 and mat2 shapes cannot be multiplied (64x10 and 20x5)",
    "RuntimeError: CUDA error: device-side assert triggered",
    "FloatingPointError: loss is nan at step 12",
    "AssertionError",
    "SystemExit: 42",
    "ModuleNotFoundError: No module named 'einops'",
]


@for_each("text", CONSEQUENCES)
def test_what_follows_from_a_peers_end_is_a_consequence(text: str) -> None:
    assert error(0, text).consequence
    for cause in CAUSES:
        # 3 s earlier by the clock, and still not the cause.
        found = root_cause([error(0, text, ms=-3000), error(3, cause)])
        assert found is not None
        assert found.rank == 3


@for_each("text", CAUSES)
def test_what_a_script_does_wrong_is_not(text: str) -> None:
    assert not error(0, text).consequence


@given(
    st.lists(st.tuples(st.sampled_from(CONSEQUENCES), st.integers(-5000, 5000)), max_size=7),
    st.lists(
        st.tuples(st.sampled_from(CAUSES), st.integers(0, 5000)), min_size=1, max_size=4, unique_by=lambda t: t[1]
    ),
    st.randoms(use_true_random=False),
)
def test_the_first_of_the_causes_whatever_comes_in_whatever_order(
    consequences: list[tuple[str, int]], causes: list[tuple[str, int]], order: random.Random
) -> None:
    failures = [error(i, text, ms) for i, (text, ms) in enumerate([*consequences, *causes])]
    first = min(failures[len(consequences) :], key=lambda f: f.time_ns)
    order.shuffle(failures)
    assert root_cause(failures) == first


def test_twenty_milliseconds_are_enough() -> None:
    """torchrun's times are whole seconds, so it would name rank 0 here."""
    failures = [
        error(0, "ValueError: second", ms=20),
        error(1, "ValueError: first", ms=0),
        error(2, "ValueError: third", 40),
    ]
    found = root_cause(failures)
    assert found is not None
    assert found.rank == 1


def test_nothing_of_nothing() -> None:
    assert root_cause([]) is None


@for_each(
    ("failures", "stopped_ms", "rank"),
    [
        # A silent death with its own exit code is a cause. The peers' errors are not.
        ([died(1, -9, ms=5), error(0, CONSEQUENCES[0], ms=4)], None, 1),
        ([died(2, 42), error(3, CONSEQUENCES[0], ms=1), died(0, -15, ms=9)], None, 2),
        # A rank that was stopped by a signal is never the cause.
        ([died(0, -15, ms=-5), error(1, "ValueError: x", ms=3000)], None, 1),
        # Died after we began to kill: that was us.
        ([died(0, -9, ms=100), error(1, "ValueError: x", ms=200)], 50, 1),
        ([died(0, -9, ms=10), error(1, "ValueError: x", ms=200)], 50, 0),
        # With no exit code only the very first to go counts.
        ([died(0, None, ms=0), died(1, None, ms=2000), error(2, CONSEQUENCES[0], ms=10)], None, 0),
        ([died(0, None, ms=2000), error(2, CONSEQUENCES[0], ms=0)], None, 2),
        # A rank's own word before a lost node; a lost node before complaints about it.
        ([Failure(kind="lost", node=1, time_ns=T, exception="was lost"), error(0, "ValueError: x", ms=5)], None, 0),
        ([error(0, CONSEQUENCES[0], ms=-5), Failure(kind="lost", node=1, time_ns=T, exception="was lost")], None, None),
        # Only consequences: the first of them.
        ([error(0, CONSEQUENCES[0], ms=5), error(1, CONSEQUENCES[6], ms=3)], None, 1),
    ],
)
def test_ranking(failures: list[Failure], stopped_ms: float | None, rank: int | None) -> None:
    stopped = None if stopped_ms is None else T + int(stopped_ms * MS)
    for given_order in (failures, failures[::-1]):
        found = root_cause(given_order, stopped_ns=stopped)
        assert found is not None
        assert found.rank == rank


@for_each("text", CAUSES)
def test_how_a_rank_with_a_notice_came_down_is_not_the_cause(text: str) -> None:
    came_down = [error(1, text, notified=True), replace(died(2, 42, ms=1), notified=True)]
    found = root_cause([*came_down, error(3, "ValueError: x", ms=3000)])
    assert found is not None
    assert found.rank == 3


def test_a_silent_death_is_seen_late_by_a_busy_machine_but_not_later_than_the_slack() -> None:
    first = error(0, CONSEQUENCES[0], ms=0)
    found = root_cause([first, Failure(kind="died", node=0, rank=1, time_ns=T + SLACK_NS)])
    assert found is not None
    assert found.rank == 1


@for_each(
    ("failure", "oom_kill", "wanted"),
    [
        (error(0, "ValueError: x"), False, "user_error"),
        (error(0, CAUSES[1]), False, "oom"),
        (error(0, "MemoryError"), False, "oom"),
        (error(0, "RuntimeError: [enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 400 bytes"), False, "oom"),
        (error(0, "OSError: [Errno 12] Cannot allocate memory"), False, "oom"),
        (died(0, -9), True, "oom"),
        (died(0, 137), True, "oom"),
        (died(0, -9), False, "user_error"),
        (died(0, 1), True, "user_error"),
        (error(0, "ValueError: x"), True, "user_error"),
        (lost(1), False, "infra"),
        (Failure(kind="setup", node=0, time_ns=T, exception="x", category="image"), False, "image"),
        (Failure(kind="stalled", node=0, time_ns=T, exception="x", category="stalled"), False, "stalled"),
    ],
)  # fmt: skip
def test_categories(failure: Failure, oom_kill: bool, wanted: str) -> None:
    assert category(failure, oom_kill=oom_kill) == wanted
    assert wanted in CATEGORIES


@for_each(
    ("failure", "line"),
    [
        (error(3, "ValueError: THE ROOT", file="train.py", line=12), "rank 3 on node 1 raised ValueError: THE ROOT (train.py:12)"),
        (error(3, "ValueError: two\nlines"), "rank 3 on node 1 raised ValueError: two"),
        (error(3, "\n\n  ValueError: late\n"), "rank 3 on node 1 raised   ValueError: late"),
        (Failure(kind="error", node=0, rank=0, time_ns=T, exception="SystemExit: 42", code=42, file="t.py", line=3),
         "rank 0 on node 0 exited with code 42 (t.py:3)"),
        (Failure(kind="error", node=0, rank=0, time_ns=T, exception="SystemExit: 3", code=3, file="t.py", line=3,
                 last_line="no data"), "rank 0 on node 0 exited with code 3 (t.py:3); last line: no data"),
        (Failure(kind="error", node=0, rank=0, time_ns=T, exception="SystemExit: t.py: error: x", code=2, file="t.py",
                 line=3, last_line="no data"), "rank 0 on node 0 exited with code 2: t.py: error: x (t.py:3)"),
        (replace(died(1, 42), last_line="no data"), "rank 1 on node 0 exited with code 42; last line: no data"),
        (replace(died(1, 42), last_line="x" * 301), f"rank 1 on node 0 exited with code 42; last line: {'x' * 297}..."),
        (replace(died(1, -11), last_line="no data"), "rank 1 on node 0 was killed by SIGSEGV"),
        (replace(died(1, 42), last_line="no data", exception="over"), "rank 1 on node 0 exited with code 42; over"),
        (error(3, "ValueError: x", last_line="no data"), "rank 3 on node 1 raised ValueError: x"),
        (died(1, -9), "rank 1 on node 0 was killed by SIGKILL"),
        (died(1, -11), "rank 1 on node 0 was killed by SIGSEGV"),
        (died(1, -99), "rank 1 on node 0 was killed by signal 99"),
        (died(1, 42), "rank 1 on node 0 exited with code 42"),
        (died(1, None), "rank 1 on node 0 died without a message"),
        (Failure(kind="setup", node=1, time_ns=T, exception="no torch here"), "node 1 could not continue: no torch here"),
    ],
)  # fmt: skip
def test_summaries_are_one_line(failure: Failure, line: str) -> None:
    assert failure_line(failure) == line
    assert "\n" not in failure_line(failure)


def test_the_last_line_is_redacted_and_decides_nothing() -> None:
    quoting = error(0, "SystemExit: 1", last_line="Connection reset by peer; out of memory")
    assert root_cause([quoting, error(1, "ValueError: x", ms=5)]) == quoting
    assert category(quoting) == "user_error"
    assert quoting.without_secrets(lambda text: text.replace("peer", "***")).last_line.startswith(
        "Connection reset by ***"
    )


def test_a_lost_node_is_named() -> None:
    assert "node 1" in failure_line(lost(1))
    assert "lost" in failure_line(lost(1))


def test_records_travel_and_show_only_what_they_should() -> None:
    failure = error(1, "ValueError: x", file="a.py", line=1, traceback="Traceback", notified=True)
    assert Failure(**failure.to_dict()) == failure
    assert failure.public() == {
        "node": 0, "rank": 1, "exception": "ValueError: x", "file": "a.py", "line": 1, "traceback": "Traceback",
        "process_exit_code": 1, "time_ns": T,
    }  # fmt: skip
    assert died(1, -int(signal.SIGKILL)).public()["exception"] is None
