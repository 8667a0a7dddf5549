"""The decisions of a node, as tables: state and message in, new state and actions out."""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import Any

import pytest
from rows import for_each

from cloudtrain.runtime.cause import Failure
from cloudtrain.runtime.decisions import (
    Notice,
    conclude,
    hear,
    node_outcome,
    restore_verdict,
    signal_due,
    with_reports,
)
from cloudtrain.runtime.timings import TIMINGS

INF = float("inf")
SAVE = "the script may save a checkpoint now"


def of(kind: str = "error", *, node: int = 1, **changes: Any) -> Failure:
    return Failure(**{"kind": kind, "node": node, "rank": node, "time_ns": 50, "exception": "x", **changes})


def after(*messages: dict[str, Any], me: int = 0, now: float = 100.0, leaving: bool = False) -> Notice:
    notice = Notice()
    for message in messages:
        notice, _ = hear(notice, message, me=me, now=now, leaving=leaving)
    return notice


def tell(why: str, node: int, of: str) -> tuple[str, Any]:
    return "tell", {"t": "preempt", "why": why, "node": node, "of": of}


SIGNAL = {"t": "signal", "number": signal.SIGTERM, "at": 90.0}
GOING = {"t": "notice", "source": 0, "why": "Azure announced Preempt", "at": 95.0}
STAYING = {**GOING, "why": ""}
PEER = {"t": "preempt", "why": "node 1 is about to go", "node": 1, "of": "notice"}

# ------------------------------------------------------------------------------------------------------------- notices


def test_a_signal_counts_from_its_arrival_warns_the_script_and_goes_to_node_0() -> None:
    notice, actions = hear(Notice(), SIGNAL, me=3, now=100.0)
    why = "node 3 got a stop signal"
    assert actions == [("say", f"{why} (SIGTERM); {SAVE}"), ("warn", None), tell(why, 3, "signal")]
    standing = frozenset({(3, "signal")})
    assert notice == Notice(since=90.0, heard=100.0, why=f"{why} (SIGTERM)", node=3, standing=standing)


def test_a_source_is_announced_once_and_taken_back_when_all_sources_are_silent() -> None:
    notice, actions = hear(Notice(), GOING, me=2, now=100.0)
    why = "node 2 is about to go"
    assert actions == [("say", f"{why} (Azure announced Preempt); {SAVE}"), ("warn", None), tell(why, 2, "notice")]
    assert (notice.since, notice.heard, notice.sources, notice.standing) == (95.0, 100.0, {0}, {(2, "notice")})
    notice, actions = hear(notice, {**GOING, "source": 1}, me=2, now=101.0)
    assert (notice.sources, actions) == ({0, 1}, [])
    notice, actions = hear(notice, STAYING, me=2, now=102.0)
    assert (notice.sources, actions) == ({1}, [])
    notice, actions = hear(notice, {**STAYING, "source": 1}, me=2, now=103.0)
    assert (notice.sources, actions) == (frozenset(), [("tell", {"t": "withdraw", "node": 2})])
    assert notice.since == 95.0, "node 0 takes it back, not this node"
    assert hear(Notice(), STAYING, me=2, now=1.0) == (Notice(), []), "nothing was announced"


@for_each(
    ("me", "passed_on", "of", "passes"),
    [
        (0, set(), "notice", True),
        (0, {"notice"}, "notice", False),
        (0, {"notice"}, "signal", True),
        (1, set(), "notice", False),
    ],
)
def test_node_0_passes_a_peers_notice_on_once_for_each_origin(
    me: int, passed_on: set[str], of: str, passes: bool
) -> None:
    message = {**PEER, "of": of}
    notice, actions = hear(Notice(passed_on=frozenset(passed_on)), message, me=me, now=100.0)
    expected = [("tell_all", message)] if passes else []
    assert actions == [*expected, ("say", f"node 1 is about to go; {SAVE}"), ("warn", None)]
    assert notice.passed_on == passed_on | ({of} if passes else set())
    assert (notice.since, notice.heard, notice.node, notice.standing) == (100.0, 100.0, 1, {(1, of)})


def test_a_notice_without_an_origin_is_that_of_a_signal() -> None:
    message = {"t": "preempt", "why": "w", "node": 1}
    assert hear(Notice(), message, me=1, now=1.0)[0].standing == {(1, "signal")}


@pytest.mark.parametrize(
    ("standing", "at", "since"),
    [
        (True, 40.0, 40.0),  # an earlier one counts
        (True, 99.0, 90.0),
        (False, 99.0, 99.0),  # no machine was about to be taken: this notice counts from its own time
    ],
)
def test_a_second_notice_says_nothing_and_may_count_from_earlier(standing: bool, at: float, since: float) -> None:
    first = Notice(since=90.0, heard=91.0, why="w", node=1, standing=frozenset({(1, "notice")} if standing else ()))
    notice, actions = hear(first, {**SIGNAL, "at": at}, me=2, now=100.0)
    assert actions == [tell("node 2 got a stop signal", 2, "signal")]
    assert notice == replace(first, since=since, standing=first.standing | {(2, "signal")})


def test_a_withdrawal_reaches_all_once_no_node_is_about_to_go() -> None:
    two = after(PEER, {**PEER, "node": 2}, now=100.0)
    one, actions = hear(two, {"t": "withdraw", "node": 1}, me=0, now=120.0)
    assert (one.standing, one.since, actions) == ({(2, "notice")}, 100.0, [])
    none, actions = hear(one, {"t": "withdraw", "node": 2}, me=0, now=130.0)
    train_on = [("say", "the notice was withdrawn; training continues"), ("train_on", None)]
    assert actions == [("tell_all", {"t": "withdrawn"}), *train_on]
    assert none == Notice(heard=100.0, withdrawn=130.0)
    assert hear(none, {"t": "withdraw", "node": 2}, me=0, now=140.0) == (none, []), "there is none to take back"


def test_a_signal_stands_though_a_notice_of_its_node_is_taken_back() -> None:
    notice, actions = hear(after({**PEER, "of": "signal"}), {"t": "withdraw", "node": 1}, me=0, now=120.0)
    assert (notice.standing, notice.since, actions) == ({(1, "signal")}, 100.0, [])


def test_a_peer_trains_on_after_the_withdrawal() -> None:
    notice, actions = hear(after(PEER, me=1), {"t": "withdrawn"}, me=1, now=130.0)
    assert [do for do, _ in actions] == ["say", "train_on"]
    assert (notice.since, notice.why, notice.node, notice.withdrawn) == (None, "", None, 130.0)
    assert hear(Notice(), {"t": "withdrawn"}, me=1, now=1.0) == (Notice(), [])


def test_ranks_that_have_left_make_all_nodes_leave_in_place_of_the_withdrawal() -> None:
    notice, actions = hear(after(PEER, me=1), {"t": "withdrawn"}, me=1, now=130.0, leaving=True)
    assert actions == [tell("ranks of node 1 have left at a notice that was withdrawn", 1, "")]
    assert (notice.since, notice.standing) == (130.0, frozenset()), "no machine is about to be taken"


@for_each(
    ("since", "ago", "leaves"),
    [(None, TIMINGS.withdrawn - 1, True), (None, TIMINGS.withdrawn, False), (90.0, 1.0, False), (None, INF, False)],
)
def test_a_rank_that_ends_soon_after_a_withdrawal_takes_all_nodes_along(
    since: float | None, ago: float, leaves: bool
) -> None:
    notice = Notice(since=since, withdrawn=1000.0 - ago)
    found, actions = hear(notice, {"t": "left"}, me=0, now=1000.0)
    why = "ranks of node 0 have left at a notice that was withdrawn"
    assert actions == ([("say", f"{why}; {SAVE}"), ("warn", None), tell(why, 0, "")] if leaves else [])
    assert (found.since, found.standing) == (1000.0 if leaves else since, frozenset())


@for_each(
    ("origins", "hold", "held", "end"),
    [
        ([], 60.0, False, INF),
        (["notice"], 60.0, True, 160.0),
        (["notice"], 0.5, True, 100.5),
        (["notice"], 0.0, False, 128.0),
        (["signal"], 60.0, False, 128.0),
        (["notice", "signal"], 60.0, False, 128.0),
    ],
)
def test_only_a_notice_holds_a_node_and_ends_it_late(origins: list[str], hold: float, held: bool, end: float) -> None:
    notice = Notice(since=100.0, standing=frozenset((1, each) for each in origins))
    assert (notice.held(hold), notice.end(hold=hold, stop_grace=30.0)) == (held, end)
    assert Notice(standing=notice.standing).end(hold=hold, stop_grace=30.0) == INF, "no notice, no end"


@pytest.mark.parametrize(("origins", "of"), [(["notice"], "notice"), (["notice", "signal"], "signal"), ([], "")])
def test_a_node_that_comes_later_hears_of_the_notice(origins: list[str], of: str) -> None:
    notice = Notice(since=1.0, why="w", node=2, standing=frozenset((2, each) for each in origins))
    assert Notice().heard == 0.0
    assert notice.for_newcomer() == {"t": "preempt", "why": "w", "node": 2, "of": of}


# ------------------------------------------------------------------------------------------------------------- signals


@for_each(
    ("stopping", "since", "grace", "signalled", "at", "due"),
    [
        (None, None, 30.0, 0, 1e9, ""),
        # a failure: term after 0.5 s, kill after 3 s, torchrun 2 s later
        (100.0, None, 30.0, 0, 100.4, ""),
        (100.0, None, 30.0, 0, 100.5, "term"),
        (100.0, None, 30.0, 1, 102.9, ""),
        (100.0, None, 30.0, 1, 103.0, "kill"),
        (100.0, None, 30.0, 0, 103.0, "kill"),
        (100.0, None, 30.0, 2, 104.9, ""),
        (100.0, None, 30.0, 2, 105.0, "all"),
        (100.0, None, 30.0, 1, 105.0, "kill"),
        (100.0, 0.0, 30.0, 0, 100.4, ""),  # a failure wins over a notice
        # a notice: a quarter of the grace is kept, 15 s at most; a third of that lies between the two signals
        (None, 100.0, 40.0, 0, 129.9, ""),
        (None, 100.0, 40.0, 0, 130.0, "term"),
        (None, 100.0, 40.0, 1, 133.3, ""),
        (None, 100.0, 40.0, 1, 133.4, "kill"),
        (None, 100.0, 120.0, 0, 204.9, ""),
        (None, 100.0, 120.0, 0, 205.0, "term"),
        (None, 100.0, 120.0, 1, 210.0, "kill"),
        (None, 100.0, 120.0, 2, 212.0, "all"),
    ],
)
def test_which_signal_is_due(
    stopping: float | None, since: float | None, grace: float, signalled: int, at: float, due: str
) -> None:
    assert signal_due(stopping=stopping, since=since, stop_grace=grace, signalled=signalled, now=at) == due


# ------------------------------------------------------------------------------------------------------------ failures


def test_a_peers_report_adds_failures_and_exit_codes_and_repeats_nothing() -> None:
    known = of("died", code=None)
    assert with_reports([known], [of("died", code=-9), of("error")]) == [of("died", code=-9), of("error")]
    assert with_reports([of("died", code=1)], [of("died", code=-9)]) == [of("died", code=1)]
    assert with_reports([], [of("error"), of("error", exception="y")]) == [of("error")], (
        "one rank, one kind: one failure"
    )
    assert known.code is None, "the argument stays"


@for_each(
    ("answers", "verdict"),
    [
        ({0: "", 1: ""}, ("go", "")),
        ({0: ""}, ("late", 1)),
        ({1: "disk"}, ("late", 0)),
        ({0: "", 1: "disk"}, ("fail", "disk")),
        ({0: "digest!", 1: ""}, ("pass", "digest!")),
        ({1: "size!", 0: "digest!"}, ("pass", "digest!")),  # the lowest node's
        ({0: "digest!", 1: "disk"}, ("fail", "disk")),  # node 1 may still be restoring it
    ],
)
def test_all_start_from_a_checkpoint_that_each_of_them_has_restored(
    answers: dict[int, str], verdict: tuple[str, Any]
) -> None:
    found = {node: {"why": why, "damaged": why.endswith("!")} for node, why in answers.items()}
    assert restore_verdict(found, 2) == verdict


# -------------------------------------------------------------------------------------------------------------- the end

REAL, CONSEQUENCE = of(exception="ValueError"), of(exception="Connection closed by peer")


@for_each(
    ("failures", "changes", "outcome"),
    [
        ([], {}, "succeeded"),
        ([], {"code": 1}, "stopped"),
        ([], {"code": None}, "stopped"),
        ([], {"stopping": True}, "stopped"),
        ([REAL], {}, "failed"),
        ([REAL], {"noticed": True}, "failed"),
        ([REAL], {"noticed": True, "stopped_ns": 49}, "preempted"),
        ([REAL], {"noticed": True, "stopped_ns": 50}, "failed"),
        ([CONSEQUENCE], {"noticed": True}, "preempted"),
        ([CONSEQUENCE, REAL], {"noticed": True}, "failed"),
        ([], {"noticed": True}, "preempted"),
        ([], {"noticed": True, "complete": True, "saved": True}, "succeeded"),
        ([], {"noticed": True, "complete": True, "saved": False}, "preempted"),
        ([], {"noticed": True, "complete": False, "saved": True}, "preempted"),
        ([], {"noticed": True, "complete": True, "saved": True, "stopping": True}, "preempted"),
        ([CONSEQUENCE], {"noticed": True, "complete": True, "saved": True}, "preempted"),
    ],
)
def test_the_outcome_of_one_node(failures: list[Failure], changes: dict[str, Any], outcome: str) -> None:
    facts: dict[str, Any] = {"stopped_ns": None, "noticed": False, "complete": False, "saved": False, "code": 0}
    assert node_outcome(failures, **{**facts, "stopping": False, **changes}) == outcome


@for_each(
    ("outcome", "failures", "outcomes", "expected"),
    [
        ("succeeded", [], {1: "succeeded", 2: "succeeded"}, ("succeeded", None)),
        ("succeeded", [], {1: "succeeded"}, ("preempted", None)),  # node 2 has not reported
        ("succeeded", [], {1: "succeeded", 2: "preempted"}, ("preempted", None)),
        ("preempted", [], {}, ("preempted", None)),
        ("preempted", [REAL], {1: "stopped", 2: "stopped"}, ("preempted", None)),
        ("failed", [REAL], {}, ("failed", REAL)),
        ("failed", [CONSEQUENCE], {1: "failed", 2: "stopped"}, ("failed", CONSEQUENCE)),
        (
            "failed", [CONSEQUENCE], {2: "stopped"},
            ("failed", Failure(kind="lost", node=1, time_ns=7, exception="was lost: it has not reported how it ended")),
        ),
    ],
)  # fmt: skip
def test_node_0_decides_for_all(
    outcome: str, failures: list[Failure], outcomes: dict[int, str], expected: tuple[str, Failure | None]
) -> None:
    found = conclude(outcome, failures, others={1, 2}, outcomes=outcomes, stopped_ns=None, now_ns=7)
    assert found == expected


def test_a_cause_after_this_nodes_own_signal_is_none_of_the_others() -> None:
    late, early = of("died", node=0, code=1, time_ns=60), of("lost", node=1, time_ns=70)
    assert conclude("failed", [late, early], others={1}, outcomes={1: "x"}, stopped_ns=None, now_ns=7)[1] == late
    assert conclude("failed", [late, early], others={1}, outcomes={1: "x"}, stopped_ns=55, now_ns=7)[1] == early
