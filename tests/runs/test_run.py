"""The run handle, driven through a provider in memory and a real store on disk. No test sleeps: time is injected."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import Mock

import pytest
from memory_run import (
    PENDING,
    REASON,
    ROOT_CAUSE,
    RUNNING,
    SUCCEEDED,
    T0,
    T0_ISO,
    ClientRetried,
    Platform,
    World,
    failed,
    failure,
    numbered,
    request,
    texts,
)

from cloudtrain import __version__
from cloudtrain.cli.format import Changes
from cloudtrain.errors import (
    AuthError,
    CloudtrainError,
    LostContactError,
    NotFoundError,
    PlatformError,
    QuotaError,
    SpecError,
    StorageError,
)
from cloudtrain.provider_api.protocol import (
    ABANDONED,
    AttemptInfo,
    Layout,
    Provider,
    Request,
    Status,
)
from cloudtrain.runs.attempts import NOT_RETRIED
from cloudtrain.runs.deliver import deliver
from cloudtrain.runs.handover import cut_off as was_cut_off
from cloudtrain.runs.handover import sending
from cloudtrain.runs.listing import Wanted, list_page
from cloudtrain.runs.log_order import Line
from cloudtrain.runs.outcome import iso_time
from cloudtrain.runs.run import Run, open_run
from cloudtrain.storage.files import LocalFiles
from cloudtrain.storage.timings import CLIENT_TIMINGS
from cloudtrain.store.store import Store, StoreClock
from cloudtrain.validate import unix_seconds


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(root=tmp_path / "store")


# --------------------------------------------------------------------------------------------------------------- status


def test_the_double_is_a_provider() -> None:
    assert isinstance(Platform(), Provider)


def test_making_a_handle_reads_nothing_and_a_missing_run_is_not_found(world: World) -> None:
    run = world.run()
    assert run.url == f"{world.store.url}/runs/r1"
    for read in (run.status, run.result, run.wait, run.cancel, lambda: list(run.logs()), lambda: run.job):
        with pytest.raises(NotFoundError):
            read()
    assert not world.folder.exists()


def test_what_run_json_says(world: World) -> None:
    run = world.recorded(name="mine").run()
    assert (run.record["run_id"], run.job.name, run.provider_name) == ("r1", "mine", "memory")


def test_the_platform_is_asked_about_the_newest_attempt(world: World) -> None:
    world.recorded().attempt(0, failed()).attempt(1, RUNNING)
    assert world.run().status() == RUNNING
    assert world.platform.asked == ["status job-1"]


def test_ten_attempts_are_ordered_by_number(world: World) -> None:
    world.recorded()
    for k in range(11):
        world.attempt(k, failed())
    world.platform.jobs["job-10"] = RUNNING
    assert world.run().status() == RUNNING


def test_an_attempt_that_was_accepted_but_not_noted_is_found_and_noted(world: World) -> None:
    world.recorded().attempt(0, RUNNING, submitted=False)
    world.platform.accepted[0] = "job-0"
    assert world.run().status() == RUNNING
    assert world.run().status() == RUNNING
    assert world.platform.asked == ["find 0", "status job-0", "status job-0"]


def test_a_job_that_could_not_be_recorded_is_recorded_before_the_result(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the end, no client looks for it."""
    write, errors = Store.write_submitted, [StorageError("the store is full")]

    def once_full(*given: Any) -> None:
        if errors:
            raise errors.pop()
        write(*given)

    world.recorded().attempt(0, Status(state="succeeded", native="Done"), submitted=False)
    world.platform.accepted[0] = "job-0"
    monkeypatch.setattr(Store, "write_submitted", once_full)
    assert world.run().result()["state"] == "succeeded"
    assert (world.store.submitted("r1", 0) or {})["native_id"] == "job-0"


@pytest.mark.parametrize("attempts", [0, 1])
def test_a_run_that_was_never_submitted_says_how_to_go_on(world: World, attempts: int) -> None:
    world.recorded()
    for k in range(attempts):
        world.attempt(k, submitted=False)
    status = world.run().status()
    assert (status.state, status.reason) == (
        "pending",
        "recorded but never submitted; submit the same job again with --run-id r1, or cancel it",
    )
    result = world.run().result()
    assert (result["state"], result["exit_code"], result["native_id"], result["attempts"]) == (
        "pending",
        None,
        None,
        [],
    )
    assert world.result() is None


def test_cancelled_before_it_was_submitted(world: World) -> None:
    world.recorded().attempt(0, submitted=False)
    world.run().cancel()
    assert world.run().status().state == "cancelled"
    result = world.run().result()
    assert (result["state"], result["category"], result["exit_code"]) == ("cancelled", "cancelled", 5)
    assert world.result()["state"] == "cancelled"


def test_an_attempt_about_to_be_submitted_keeps_the_run_from_being_over(world: World) -> None:
    world.recorded(retries=1).attempt(0, failed("infra", "node lost")).attempt(1, submitted=False)
    result = world.run().result()
    assert (result["state"], result["category"]) == ("pending", None)
    assert result["reason"] == "attempt 1 is recorded but not submitted yet; the attempt before: node lost"
    assert world.result() is None
    world.run().cancel()
    assert world.run().result()["state"] == "failed"


def test_result_json_decides_alone(world: World) -> None:
    world.recorded().attempt(0, failed("oom", started=T0, finished=T0 + 5))
    first = world.run().result()
    del world.platform.jobs["job-0"]
    world.platform.asked.clear()
    status = world.run().status()
    assert (status.state, status.category, status.reason) == ("failed", "oom", "exit status 1")
    assert (status.started, status.finished) == (T0, T0 + 5)
    assert world.run().result() == first
    assert world.run().wait() == first
    assert world.platform.asked == []


@pytest.mark.parametrize("outcome", ["succeeded", "failed"])
def test_what_the_nodes_left_stands_in_for_a_platform_that_forgot(world: World, outcome: str) -> None:
    world.recorded().attempt(0)
    world.exit(0, outcome="failed", decided=True, reason="the attempt before")
    world.exit(0, attempt="0.1", outcome=outcome, decided=True, category="oom" if outcome == "failed" else "")
    result = world.run().result()
    assert (result["state"], result["category"]) == (outcome, "oom" if outcome == "failed" else None)


def test_a_platform_that_forgot_and_nothing_left_is_not_found(world: World) -> None:
    world.recorded().attempt(0).exit(1, outcome="failed")
    with pytest.raises(NotFoundError, match="job-0"):
        world.run().status()


# --------------------------------------------------------------------------------------------------------------- result


@pytest.mark.parametrize(
    ("category", "rank", "said", "reason"),
    [
        ("infra", None, "was lost: the connection ended", "the run's supervisor was killed"),
        ("user_error", 0, "raised ValueError: x", "node 1 raised ValueError: x"),
    ],
)
def test_a_node_that_was_lost_after_the_supervisor_was_killed_is_a_consequence(
    world: World, category: str, rank: int | None, said: str, reason: str
) -> None:
    """The containers are removed one after the other, and a peer of the first one may record its loss."""
    world.recorded().attempt(0, replace(failed("infra", "the run's supervisor was killed"), native=ABANDONED))
    failure = {"node": 1, "rank": rank, "exception": said}
    world.exit(0, category=category, reason=f"node 1 {said}", failure=failure, decided=True)
    result = world.run().result()
    assert (result["category"], result["reason"]) == (category, reason)


def test_the_history_says_why_who_from_where_and_what_was_lost(world: World) -> None:
    world.recorded()
    world.attempt(0, Status(state="running", attempts=(AttemptInfo(number="0.2", started=T0 + 30),)))
    world.start("0.0").exit(
        0, outcome="preempted", category="preempted", reason="node 1 was told", told=1, decided=True
    )
    world.start("0.1", after="0.0", resumed_from="step-8", started=T0 + 20, lost={"seconds": 0.0, "steps": 0})
    world.start("0.2", after="0.1", resumed_from="step-8", started=T0 + 30, lost={"seconds": 7.5, "steps": None})
    first, second, third = world.run().result()["attempts"]
    assert (first["reason"], first["category"], first["node"], first["rank"]) == (
        "node 1 was told",
        "preempted",
        1,
        None,
    )
    assert (first["resumed_from"], first["resumed_step"], first["lost"]) == ("", None, {"seconds": 0.0, "steps": 0})
    assert (second["resumed_step"], second["lost"]) == (8, {"seconds": 7.5, "steps": None})  # killed before any word
    assert (third["resumed_from"], third["lost"]) == ("step-8", None)


def test_the_result_of_a_failed_run(world: World) -> None:
    world.recorded(max_cost=12.5)
    world.attempt(0, failed(attempts=(AttemptInfo(number="0.0", started=T0, ended=T0 + 9),)))
    world.exit(0, outcome="failed", decided=True, category="user_error", failure=ROOT_CAUSE, resumed_from="step-120")
    world.exit(1, outcome="stopped")
    world.checkpoint("step-120")
    expected = {
        "run": f"{world.store.url}/runs/r1",
        "run_id": "r1",
        "provider": "memory",
        "native_id": "job-0",
        "state": "failed",
        "category": "user_error",
        "exit_code": 1,
        "reason": REASON,
        "failure": {name: value for name, value in ROOT_CAUSE.items() if name != "time_ns"},
        "attempts": [
            {
                "number": "0.0",
                "native_id": "job-0",
                "started": T0_ISO,
                "ended": "2023-11-14T22:13:29.000Z",
                "reason": REASON,
                "category": "user_error",
                "node": 1,
                "rank": 3,
                "resumed_from": "step-120",
                "resumed_step": 120,
                "nodes": 1,
                "lost": None,
            }
        ],
        "checkpoint": {"name": "step-120", "step": 120, "committed": "2023-11-14T22:13:15.000Z"},
        "cost": {
            "limit_usd": 12.5,
            "limit_gpu_hours": None,
            "estimate_usd": None,
            "priced_on": None,
            "gpu_hours": 0.0,
            "billed_s": None,
            "saved": None,
        },
    }
    assert world.run().result() == expected
    kept = world.result()
    assert kept == {**expected, "name": "train", "created": T0 - 60}
    assert world.run().result() == expected


def test_the_result_of_a_running_run_is_not_kept(world: World) -> None:
    world.recorded().attempt(0, Status(state="running", started=T0)).checkpoint("last.pt")
    result = world.run().result()
    assert (result["state"], result["exit_code"], result["category"], result["failure"]) == (
        "running",
        None,
        None,
        None,
    )
    assert result["checkpoint"] == {
        "name": "last.pt",
        "step": None,
        "committed": "2023-11-14T22:13:15.000Z",
        "age_s": 5.0,
    }
    assert [(a["number"], a["started"], a["ended"]) for a in result["attempts"]] == [("0.0", T0_ISO, None)]
    assert world.result() is None


def test_a_preempted_attempt_waits_with_its_reason(world: World) -> None:
    world.recorded().attempt(0, Status(state="pending", category="preempted", reason="spot reclaimed"))
    world.exit(0, outcome="preempted", decided=True)
    result = world.run().result()
    assert (result["state"], result["reason"], result["exit_code"]) == ("pending", "spot reclaimed", None)


def test_success_has_no_failure(world: World) -> None:
    world.recorded().attempt(0, SUCCEEDED).exit(0, outcome="succeeded", decided=True)
    result = world.run().result()
    assert (result["state"], result["exit_code"], result["category"], result["failure"]) == ("succeeded", 0, None, None)
    assert result["checkpoint"] is None


def test_a_failure_that_the_platform_took_for_success(world: World) -> None:
    world.recorded().attempt(0, SUCCEEDED).exit(0, outcome="failed", decided=True, failure=ROOT_CAUSE)
    result = world.run().result()
    assert (result["state"], result["category"], result["reason"]) == ("failed", "user_error", REASON)


@pytest.mark.parametrize(
    ("platform", "node", "category", "code", "whose"),
    [
        ("", "user_error", "user_error", 1, "node"),
        ("infra", "oom", "oom", 1, "node"),
        ("infra", "stalled", "stalled", 1, "node"),
        ("user_error", "oom", "oom", 1, "node"),
        ("oom", "infra", "oom", 1, "node"),
        ("", "infra", "infra", 9, "node"),
        ("infra", "", "user_error", 1, "node"),  # a record of a failure without a category speaks of the script
        ("timeout", "user_error", "timeout", 6, "platform"),
        ("capacity", "user_error", "capacity", 4, "platform"),
        ("quota", "user_error", "quota", 4, "platform"),
        ("auth", "user_error", "auth", 3, "platform"),
        ("image", "user_error", "image", 2, "platform"),
        ("preempted", "user_error", "preempted", 4, "platform"),
        ("cancelled", "user_error", "cancelled", 5, "platform"),
    ],
)
def test_whose_category_wins(world: World, platform: str, node: str, category: str, code: int, whose: str) -> None:
    world.recorded().attempt(0, failed(platform))
    world.exit(0, decided=True, category=node, failure=ROOT_CAUSE)
    result = world.run().result()
    assert (result["category"], result["exit_code"]) == (category, code)
    assert (result["failure"] is None) == (whose == "platform")
    assert result["reason"] == (REASON if whose == "node" else "exit status 1")


def test_a_cancelled_run_has_no_failure(world: World) -> None:
    world.recorded().attempt(0, Status(state="cancelled", native="Stopped"))
    world.exit(0, decided=True, category="user_error", failure=ROOT_CAUSE)
    result = world.run().result()
    assert (result["category"], result["reason"], result["failure"], result["exit_code"]) == (
        "cancelled",
        "cancelled",
        None,
        5,
    )


def test_a_failure_nobody_explains(world: World) -> None:
    world.recorded().attempt(0, failed(reason=""))
    result = world.run().result()
    assert (result["category"], result["exit_code"], result["reason"]) == (None, 9, "the platform reports Failed")


def test_a_node_that_was_preempted_for_good(world: World) -> None:
    world.recorded().attempt(0, failed()).exit(0, outcome="preempted", decided=True, reason="node 0 got a stop signal")
    result = world.run().result()
    assert (result["category"], result["exit_code"], result["reason"]) == ("preempted", 4, "node 0 got a stop signal")
    assert result["failure"] is None


def test_without_a_decided_record_the_first_failure_counts(world: World) -> None:
    world.recorded().attempt(0, failed())
    world.exit(0, outcome="stopped", ended=T0 + 1, failure=failure(node=0, rank=0, process_exit_code=-15))
    world.exit(1, ended=T0 + 2, failure=failure(node=1, rank=2, process_exit_code=1, time_ns=int((T0 + 2) * 1e9)))
    world.exit(2, ended=T0 + 9, failure=failure(node=2, rank=4, process_exit_code=42, time_ns=int((T0 + 1) * 1e9)))
    world.exit(3, ended=T0 + 3, failure={**failure(node=3, rank=6, process_exit_code=1), "time_ns": None})
    assert world.run().result()["reason"] == "rank 4 on node 2 exited with code 42"


def test_an_earlier_attempts_failure_is_not_the_runs(world: World) -> None:
    world.recorded(retries=1).attempt(0, failed()).attempt(1, failed("capacity", "no more of those"))
    world.exit(0, decided=True, failure=ROOT_CAUSE)
    result = world.run().result()
    assert (result["category"], result["reason"], result["failure"]) == ("capacity", "no more of those", None)
    assert [(a["number"], a["reason"]) for a in result["attempts"]] == [("0.0", REASON), ("1.0", "no more of those")]


def test_a_container_that_was_started_again_does_not_hide_the_failure(world: World) -> None:
    """Its nodes ended without a decision, before their ranks began. A later attempt that began has its own result."""
    world.recorded().attempt(0, failed()).start("0.0").exit(0, decided=True, failure=ROOT_CAUSE)
    world.exit(1, attempt="0.1", outcome="stopped")
    result = world.run()._compute(failed(), {0: "job-0"})
    assert (result["reason"], result["failure"]["rank"]) == (REASON, 3)
    world.start("0.1", after="0.0")
    result = world.run()._compute(failed(), {0: "job-0"})
    assert (result["reason"], result["failure"]) == ("exit status 1", None)


def test_a_preemption_before_is_not_why_a_run_failed(world: World) -> None:
    world.recorded().attempt(0, failed()).start("0.0").exit(0, outcome="preempted", decided=True)
    world.exit(1, attempt="0.1", outcome="stopped")
    assert world.run().result()["reason"] == "exit status 1"


def test_a_failure_that_a_restart_had_recovered_from_is_not_why_a_run_failed(world: World) -> None:
    world.recorded().attempt(0, failed()).start("0.0").exit(0, decided=True, failure=ROOT_CAUSE)
    world.start("0.1", after="0.0").exit(0, attempt="0.1", outcome="preempted", decided=True)
    world.exit(1, attempt="0.2", outcome="stopped")
    assert world.run().result()["reason"] == "exit status 1"
    world.exit(0, decided=True, failure=ROOT_CAUSE, lost=True)
    (world.folder / "live/exit/0.1-node-0.json").unlink()
    assert world.run().result()["reason"] == "exit status 1", "a lost node is restarted too"


UNTOLD = {"native": "RUNNING", "limit_s": 600.0}
"""A status of a platform that reports neither the start of a job nor that its time was up."""


def test_a_start_that_no_platform_tells_is_when_a_client_first_saw_it_running(world: World) -> None:
    world.recorded().attempt(0, Status(state="pending"))
    world.time.now += 7200
    assert world.run().status().started is None
    assert world.store.seen_running("r1", 0) is None, "it waits"
    world.platform.jobs["job-0"] = Status(state="running", **UNTOLD)
    assert world.run().status().started == T0 + 7200
    world.time.now += 60
    assert world.run().status().started == T0 + 7200, "another client does not see the first one's record"
    world.platform.jobs["job-0"] = Status(state="cancelled", finished=T0 + 7300, category="cancelled", **UNTOLD)
    result = world.run().result()
    assert (result["state"], result["attempts"][0]["started"]) == ("cancelled", iso_time(T0 + 7200))


def test_the_nodes_know_it_better_than_a_client_that_came_late(world: World) -> None:
    world.recorded().attempt(0, Status(state="running", **UNTOLD)).start("0.0", started=T0 + 30)
    world.time.now += 500
    assert world.run().status().started == T0 + 30
    assert world.store.seen_running("r1", 0) is None, "no record is needed"
    world.platform.jobs["job-0"] = Status(state="cancelled", finished=T0 + 630, **UNTOLD)
    result = world.run().result()
    assert (result["state"], result["category"]) == ("failed", "timeout")


def test_what_a_job_waited_for_machines_again_is_neither_time_nor_money(world: World) -> None:
    """It ran for 10 s of its ten minutes, was preempted, and waited in the queue until it ended 20 minutes later."""
    world.recorded().start("0.0").exit(0, outcome="preempted", decided=True)
    world.attempt(0, Status(state="failed", category="capacity", reason="none left", finished=T0 + 1200, **UNTOLD))
    result = world.run().result()
    assert (result["category"], result["attempts"][0]["ended"]) == ("capacity", iso_time(T0 + 10))
    assert result["cost"]["gpu_hours"] == 0


def test_an_expired_wait_for_machines_again_stays_one(world: World) -> None:
    """A client cancelled it. Although the attempt had run long enough, it is not a timeout."""
    world.recorded().start("0.0").exit(0, outcome="preempted", decided=True, ended=T0 + 590)
    world.attempt(0, Status(state="cancelled", finished=T0 + 4200, **UNTOLD))
    world.store.expire("r1", 0, "no machines within max_wait (1h)")
    result = world.run().result()
    assert (result["category"], result["reason"]) == ("capacity", "no machines within max_wait (1h)")


@pytest.mark.parametrize(("category", "usd"), [("infra", None), ("image", None), ("capacity", 0), ("quota", 0)])
def test_what_nobody_saw_run_cost_nothing_only_if_it_cannot_have_run(
    world: World, category: str, usd: float | None
) -> None:
    world.recorded().attempt(0, Status(state="failed", category=category, finished=T0 + 7200, **UNTOLD))
    assert world.run().result()["cost"]["estimate_usd"] == usd


def test_the_platform_s_clock_says_when_it_was_seen_running(world: World) -> None:
    world.recorded().attempt(0, Status(state="running", started=T0 - 30, **UNTOLD))
    assert world.run().status().started == T0 - 30
    assert world.store.seen_running("r1", 0) == T0 - 30


def test_a_client_that_may_only_read_can_look_at_a_run(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(self: Store, run_id: str, k: int, now: float) -> float:
        raise AuthError("you may not write there")

    monkeypatch.setattr(Store, "runs_since", refused)
    world.recorded().attempt(0, Status(state="running", **UNTOLD))
    assert world.run().status().started == T0


@pytest.mark.parametrize(("began", "expected"), [(T0 + 5, REASON), (T0 + 11, "exit status 1")])
def test_a_platform_that_counts_more_starts_than_the_nodes(world: World, began: float, expected: str) -> None:
    told = (AttemptInfo(number="0.0", started=T0), AttemptInfo(number="0.1", started=began))
    world.recorded().attempt(0, failed(attempts=told)).exit(0, decided=True, failure=ROOT_CAUSE)
    assert world.run().result()["reason"] == expected


@pytest.mark.parametrize(
    ("theirs", "ours", "expected"),
    [("user_error", "infra", "infra"), ("oom", "infra", "oom"), ("infra", "user_error", "user_error")],
)
def test_a_platform_that_saw_an_exit_code_knows_no_better_than_the_nodes(
    world: World, theirs: str, ours: str, expected: str
) -> None:
    world.recorded().attempt(0, failed(theirs)).exit(0, outcome="failed", category=ours, reason="x", decided=True)
    assert world.run().result()["category"] == expected


def test_attempts_come_from_platform_and_nodes_together(world: World) -> None:
    told = (
        AttemptInfo(number="0.0", started=T0, ended=T0 + 5, reason="preempted"),
        AttemptInfo(number="0.1", started=T0 + 6),
    )
    world.recorded().attempt(0, Status(state="running", attempts=told))
    world.attempt(1).write("attempts/1/submitted.json", {"native_id": "job-0", "time": T0})
    world.exit(0, attempt="0.1", outcome="failed", started=T0 + 7, ended=T0 + 9, resumed_from="a", reason="boom")
    world.exit(0, attempt="1.0", outcome="succeeded", started=T0 + 10, ended=T0 + 11, resumed_from="b")
    rows = world.run().result()["attempts"]
    assert [(a["number"], a["native_id"], a["reason"], a["resumed_from"]) for a in rows] == [
        ("0.0", "job-0", "preempted", ""),
        ("0.1", "job-0", "boom", "a"),
        ("1.0", "job-0", "", "b"),
    ]
    assert rows[1]["started"] == "2023-11-14T22:13:26.000Z"
    assert rows[1]["ended"] == "2023-11-14T22:13:29.000Z"


def test_an_attempt_that_a_platform_does_not_number_is_a_row(world: World) -> None:
    """A third party's provider may do so; its runs stay readable."""
    world.recorded().attempt(0, failed(attempts=(AttemptInfo(number="first", started=T0),)))
    result = world.run().result()
    assert (result["state"], [row["number"] for row in result["attempts"]]) == ("failed", ["first"])


def test_a_restart_that_the_platform_does_not_tell_of_is_an_attempt_of_its_own(world: World) -> None:
    """The native job's start is the first attempt's; its end and reason are the last one's. No second counts twice."""
    world.recorded().attempt(0, failed("preempted", started=T0, finished=T0 + 100))
    world.start("0.0", started=T0 + 1).start("0.1", after="0.0", started=T0 + 50)
    rows = world.run().result()["attempts"]
    assert [(a["number"], a["started"], a["ended"], a["reason"], a["category"]) for a in rows] == [
        ("0.0", iso_time(T0), iso_time(T0 + 50), "", None),
        ("0.1", iso_time(T0 + 50), iso_time(T0 + 100), "exit status 1", "preempted"),
    ]


@pytest.mark.parametrize("unknown", ["0", ""])  # "" is in the records of earlier versions
def test_a_node_that_ended_before_it_knew_its_attempt_makes_no_row(world: World, unknown: str) -> None:
    world.recorded().attempt(0, Status(state="cancelled", attempts=(AttemptInfo(number="0.0", started=T0),)))
    world.exit(1, attempt=unknown, outcome="preempted", started=T0 + 1, ended=T0 + 2)
    assert [a["number"] for a in world.run().result()["attempts"]] == ["0.0"]


def test_a_record_that_another_version_wrote_names_that_version(world: World) -> None:
    run = world.recorded().run()
    run._provider, run.record["job"]["new"] = None, 1
    reads: list[tuple[Callable[[], Any], str]] = [(lambda: run.job, ""), (lambda: run.provider, "choose from ")]
    for read, hint in reads:
        for version, begin in (
            ("9.9", f"cloudtrain 9.9 recorded this run, and this is {__version__}"),
            (__version__, ""),
        ):
            run.record["version"] = version
            with pytest.raises(SpecError) as caught:
                read()
            assert caught.value.hint.startswith(f"{begin}\n{hint}".strip())
            assert ("recorded" in caught.value.hint) is bool(begin)
            assert not hint or caught.value.__notes__ == [f"hint: {caught.value.hint}"]
            assert ("recorded" in str(getattr(caught.value, "__notes__", ""))) is bool(begin)


def test_an_earlier_attempt_that_the_platform_forgot_is_still_listed(world: World) -> None:
    world.recorded().attempt(0).attempt(1, RUNNING)
    assert [a["number"] for a in world.run().result()["attempts"]] == ["0.0", "1.0"]


@pytest.mark.parametrize(
    ("fields", "told", "expected"),
    [
        ({"exception": "OSError: x", "file": "a/b.py", "line": 7}, "", "rank 2 on node 0 raised OSError: x (b.py:7)"),
        ({"exception": "OSError: x"}, "it failed", "rank 2 on node 0 raised OSError: x"),
        ({"process_exit_code": -9}, "", "rank 2 on node 0 was killed by SIGKILL"),
        ({"process_exit_code": -99}, "", "rank 2 on node 0 was killed by signal 99"),
        ({"process_exit_code": 42}, "", "rank 2 on node 0 exited with code 42"),
        ({"rank": None, "process_exit_code": 3}, "", "node 0 exited with code 3"),
        ({"rank": None}, "the disk is full", "node 0: the disk is full"),
        ({}, "", "rank 2 on node 0: ended without a message"),
        ({"exception": "no sign of life"}, "rank 2 on node 0: silent\nmore", "rank 2 on node 0: silent"),
    ],
)
def test_the_reason_names_rank_node_and_place(world: World, fields: dict[str, Any], told: str, expected: str) -> None:
    world.recorded().attempt(0, failed())
    world.exit(0, decided=True, reason=told, failure=failure(**{"rank": 2, **fields}))
    assert world.run().result()["reason"] == expected


def test_a_platform_that_knows_the_nodes_reason_and_more_is_believed(world: World) -> None:
    world.recorded().attempt(0, failed("infra", "node 0 is gone; twice in a row"))
    world.exit(0, decided=True, reason="node 0 is gone")
    assert world.run().result()["reason"] == "node 0 is gone; twice in a row"


@pytest.mark.parametrize(("category", "lost"), [("user_error", False), ("oom", False), ("infra", True)])
def test_a_platform_that_quotes_the_nodes_output_does_not_hide_the_reason(
    world: World, category: str, lost: bool
) -> None:
    quoted = "The replica exited with status 1. [a0.0] cloudtrain: a fresh start cloudtrain: failed: {} See the logs"
    reason = "node 0 was lost: silent" if lost else "rank 1 on node 0 raised ValueError: n/a (train.py:2)"
    found = failure(exception="was lost: silent" if lost else "ValueError: n/a", rank=None if lost else 1)
    world.recorded().attempt(0, failed(category, quoted.format(reason)))
    world.exit(0, decided=True, reason=reason, failure=found, category=category)
    result = world.run().result()
    assert (result["reason"], result["attempts"][0]["reason"]) == (reason, reason)


def test_the_limit_is_the_one_for_this_provider(world: World) -> None:
    world.recorded(max_cost=5, on={"memory": {"max_cost": 7}}).attempt(0, RUNNING)
    assert world.run().result()["cost"]["limit_usd"] == 7


# --------------------------------------------------------------------------------------------------------- checkpoints


def test_the_newest_complete_checkpoint(world: World) -> None:
    world.recorded().attempt(0, RUNNING)
    assert world.run().checkpoint() is None
    world.checkpoint("step-10", when=T0 - 30).checkpoint("step-20", when=T0 - 20).checkpoint("step-30", size=4)
    newest = world.run().checkpoint()
    assert newest is not None
    assert newest.name == "step-20"
    world.checkpoint("step-10", seq=2, when=T0 - 10)
    newest = world.run().checkpoint()
    assert newest is not None
    assert (newest.name, newest.seq) == ("step-10", 2)


# ----------------------------------------------------------------------------------------------------------------- logs


def test_logs_of_what_there_is(world: World) -> None:
    world.recorded().attempt(0, RUNNING)
    world.says("pulling the image", numbered(2), numbered(1), numbered(1, node=1), numbered(4))
    world.segment([1, 2, 3])
    lines = list(world.run().logs())
    assert texts([line for line in lines if not line.attempt]) == ["pulling the image"]
    assert [line.seq for line in lines if line.node == 0] == [1, 2, 3, 4]
    assert [line.seq for line in lines if line.node == 1] == [1]
    assert world.time.naps == []


def test_logs_of_a_finished_run_are_completed_from_the_segments(world: World) -> None:
    world.recorded().attempt(0, failed()).attempt(1, SUCCEEDED)
    world.says("own line", numbered(1), attempt=0)
    world.says(numbered(2, attempt="1.0"), attempt=1)
    world.segment([1, 2]).segment([3, 4]).segment([1, 2, 3], attempt="1.0").segment([1], node=1, attempt="1.0")
    world.exit(0, lines=5).exit(0, attempt="1.0", outcome="succeeded", lines=3, decided=True)
    lines = list(world.run().logs())
    assert texts(lines) == [
        "own line",
        "line 1",
        *["line 2", "line 3", "line 4", "[… 1 line lost]"],
        *["line 1", "line 2", "line 3"],
        "line 1",
    ]
    assert list(world.run().logs(follow=True)) == lines
    world.run().result()
    assert list(world.run().logs()) == lines  # with result.json too


@pytest.mark.parametrize("error", [LostContactError("timed out"), AuthError("expired"), PlatformError("500")])
def test_logs_of_a_finished_run_whose_platform_does_not_answer(world: World, error: CloudtrainError) -> None:
    world.recorded().attempt(0, SUCCEEDED).segment([1, 2]).exit(0, outcome="succeeded", lines=2, decided=True)
    world.platform.logs_error = error
    note = f"[… the platform's log does not answer; lines come from the store: {error}]"
    assert texts(list(world.run().logs())) == [note, "line 1", "line 2"]
    world.platform.status_error = LostContactError("timed out")
    lines = texts(list(world.run().logs()))
    assert lines[1:] == ["line 1", "line 2"]
    assert lines[0].startswith("[… the platform's log does not answer")


def test_logs_whose_platform_has_no_log_yet_or_any_more(world: World) -> None:
    world.recorded().attempt(0, SUCCEEDED).segment([1])
    world.platform.logs_error = NotFoundError("no stream")
    assert texts(list(world.run().logs())) == ["line 1"]


def test_a_segment_that_vanishes_or_is_none_is_passed_over(world: World) -> None:
    world.recorded().attempt(0, SUCCEEDED).segment([1])
    world.write("live/logs/0.0/node-0/notes.txt", "x")
    world.write("live/logs/0.0/node-0/000000002.log", "")
    assert texts(list(world.run().logs())) == ["line 1"]


def stamped(seq: int, moment: str, *, node: int = 0) -> str:
    return f"[a0.0 n{node} r{node} #{seq} 2026-11-24T{moment}Z] line {seq}"


def timed(world: World) -> World:
    """Return a finished run of two nodes whose platform's log has no times."""
    world.recorded(instance_count=2).attempt(0, SUCCEEDED)
    world.says("pulling the image", *[numbered(i) for i in (1, 2, 3)], numbered(1, node=1))
    for node, moments in ((0, ["10:00:00.000", "10:05:00.000", "10:09:59.500"]), (1, ["10:06:00.250"])):
        lines = [stamped(i, moment, node=node) for i, moment in enumerate(moments, 1)]
        world.write(f"live/logs/0.0/node-{node}/000000001.log", "".join(f"{line}\n" for line in lines))
        world.exit(node, outcome="succeeded", decided=True, lines=len(moments))
    return world


TEN = unix_seconds("2026-11-24T10:00:00Z")


def test_lines_have_the_times_of_the_segments_where_the_platform_tells_none(world: World) -> None:
    run = timed(world).run()
    times = {(line.node, line.seq): line.time for line in run.logs()}
    assert times == {("host", 0): None, (0, 1): TEN, (0, 2): TEN + 300, (0, 3): TEN + 599.5, (1, 1): TEN + 360.25}
    assert [line.time for line in run.logs(times=False)] == [None] * 5


def test_the_platforms_own_times_win(world: World) -> None:
    timed(world)
    pages = world.platform.pages
    pages["job-0"] = [replace(line, time=5.0) for line in pages["job-0"]]
    assert [line.time for line in world.run().logs()] == [5.0] * 5


def test_an_older_runs_segments_have_no_times(world: World) -> None:
    world.recorded().attempt(0, RUNNING).segment([1, 2])
    world.says(numbered(1), numbered(2), numbered(3))
    assert [line.time for line in world.run().logs()] == [None] * 3


def test_a_line_that_is_not_stored_yet_has_the_time_at_which_it_was_read(world: World) -> None:
    world.recorded().attempt(0, RUNNING)
    world.says(numbered(1), numbered(2))
    world.write("live/logs/0.0/node-0/000000001.log", stamped(1, "10:00:00.000") + "\n")
    assert [line.time for line in world.run().logs()] == [TEN, world.time.now]


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ({"n": 2}, [1, 3]),
        ({"n": 0}, []),
        ({"n": 1, "rank": 0}, [3]),
        ({"node": 1}, [1]),
        ({"since": "2026-11-24T10:05:00Z"}, [2, 3, 1]),
        ({"since": datetime(2026, 11, 24, 10, 6)}, [3, 1]),
        ({"since": "2026-11-24T10:05", "n": 1, "node": 0}, [3]),
        ({"since": "2026-11-24T10:00:00"}, [0, 1, 2, 3, 1]),
        ({"since": "2030-01-01"}, []),
    ],
)
def test_some_of_the_lines(world: World, wanted: dict[str, Any], found: list[int]) -> None:
    assert [line.seq for line in timed(world).run().logs(**wanted)] == found


def test_lines_of_so_long_ago(world: World) -> None:
    run = timed(world).run()
    world.time.now = TEN + 600
    assert [line.seq for line in run.logs(since="5m")] == [2, 3, 1]
    assert [line.seq for line in run.logs(since=timedelta(seconds=1))] == [3]


def test_lines_without_any_time_are_all_given(world: World) -> None:
    world.recorded().attempt(0, SUCCEEDED).segment([1, 2]).exit(0, outcome="succeeded", lines=2, decided=True)
    assert [line.seq for line in world.run().logs(since="1h")] == [1, 2]


@pytest.mark.parametrize(
    ("wanted", "error"),
    [
        ({"rank": 9}, "no rank 9; ranks are 0 to 1"),
        ({"rank": -1}, "no rank -1; ranks are 0 to 1"),
        ({"node": 2}, "no node 2; nodes are 0 to 1"),
        ({"n": -3}, "n: "),
        ({"since": "soon"}, "since: 'soon' is neither a duration nor a time"),
        ({"since": "0m"}, "since: must be above zero"),
    ],
)
def test_lines_that_cannot_be(world: World, wanted: dict[str, Any], error: str) -> None:
    with pytest.raises(SpecError) as caught:
        timed(world).run().logs(**wanted)
    assert str(caught.value).startswith(error)


def test_following_begins_with_the_newest_lines(world: World) -> None:
    world.recorded().attempt(0, RUNNING)
    world.says(*[numbered(i) for i in range(1, 6)])
    world.time.at = [
        (20, lambda: world.says(numbered(6), numbered(7))),
        (40, lambda: world.exit(0, outcome="succeeded", decided=True, lines=7)),
        (41, lambda: world.platform.jobs.update({"job-0": SUCCEEDED})),
    ]
    came = [(line.seq, line.time) for line in world.run().logs(follow=True, n=2)]
    assert [seq for seq, _ in came] == [4, 5, 6, 7]
    assert all(at is not None and T0 <= at < T0 + 30 for _, at in came)


def test_following_gives_each_line_once_until_the_end(world: World) -> None:
    world.recorded().attempt(0, PENDING)
    jobs = world.platform.jobs
    world.time.at = [
        (5, lambda: jobs.update({"job-0": RUNNING})),
        (6, lambda: world.says(*(numbered(i) for i in (1, 2, 4)))),
        (7, lambda: world.segment([1, 2, 3, 4])),
        (30, lambda: world.says(numbered(3), numbered(5))),
        (31, lambda: world.segment([5, 6])),
        (40, lambda: world.exit(0, outcome="succeeded", decided=True, lines=6)),
        (41, lambda: jobs.update({"job-0": SUCCEEDED})),
    ]
    seen = [(line.seq, world.time.now - T0) for line in world.run().logs(follow=True)]
    assert [seq for seq, _ in seen] == [1, 2, 3, 4, 5, 6]
    when = dict(seen)
    assert 6 <= when[2] < 8.5  # as soon as it is there
    assert 16 <= when[3] < 19  # when its gap was 10 s old
    assert 41 <= when[6] < 43.5
    assert min(world.time.naps) <= 0.1
    assert max(world.time.naps) <= 2.0


def test_following_asks_seldom_while_nothing_happens_and_often_while_lines_come(world: World) -> None:
    world.recorded().attempt(0, RUNNING)
    world.platform.page_size = 1000
    world.time.at = [(t, lambda t=t: world.says(f"own {t}")) for t in range(300, 310)]  # type: ignore[misc]
    world.time.at += [(600, lambda: world.platform.jobs.update({"job-0": SUCCEEDED}))]
    assert len(list(world.run().logs(follow=True))) == 10
    asked = [text.split()[0] for text in world.platform.asked]
    assert asked.count("logs") < 600 / 2 + 200
    assert asked.count("status") < 600 / 2 + 20


def test_following_an_attempt_and_the_next(world: World) -> None:
    world.recorded(retries=1).attempt(0, RUNNING)

    def next_attempt() -> None:
        world.says("the last words", attempt=0)
        world.platform.jobs["job-0"] = failed()
        world.attempt(1, RUNNING)
        world.says(numbered(1, attempt="1.0"), attempt=1)

    world.says(numbered(1))
    world.time.at = [(5, next_attempt), (9, lambda: world.platform.jobs.update({"job-1": SUCCEEDED}))]
    lines = list(world.run().logs(follow=True))
    assert [(line.attempt, line.text) for line in lines] == [
        ("0.0", "line 1"),
        ("", "the last words"),
        ("1.0", "line 1"),
    ]


def test_following_waits_for_the_attempt_that_another_client_begins(world: World) -> None:
    world.platform = ClientRetried()
    world.recorded(retries=1).attempt(0, RUNNING)

    def next_attempt() -> None:
        world.attempt(1, RUNNING)
        world.says(numbered(1, attempt="1.0"), attempt=1)

    world.says(numbered(1))
    world.time.at = [
        (5, lambda: world.platform.jobs.update({"job-0": failed()})),
        (5 + CLIENT_TIMINGS.next_attempt - 10, next_attempt),
        (300, lambda: world.platform.jobs.update({"job-1": SUCCEEDED})),
    ]
    lines = list(world.run().logs(follow=True))
    assert [(line.attempt, line.text) for line in lines] == [("0.0", "line 1"), ("1.0", "line 1")]
    assert world.time.now - T0 >= 300


@pytest.mark.parametrize(
    ("retries", "ended", "seconds"),
    [
        (0, failed(), 5),
        (1, failed(), 5 + CLIENT_TIMINGS.next_attempt),
        (1, failed(finished=T0 - 60), 5 + CLIENT_TIMINGS.next_attempt - 65),
        (1, failed(finished=T0 - 1000), 5),
        (1, failed(min(NOT_RETRIED)), 5),
        (1, SUCCEEDED, 5),
        (1, Status(state="cancelled"), 5),
    ],
)
def test_following_ends_where_nobody_begins_another_attempt(
    world: World, retries: int, ended: Status, seconds: float
) -> None:
    world.platform = ClientRetried()
    world.recorded(retries=retries).attempt(0, RUNNING)
    world.says(numbered(1))
    world.time.at = [(5, lambda: world.platform.jobs.update({"job-0": ended}))]
    assert [line.seq for line in world.run().logs(follow=True)] == [1]
    assert seconds <= world.time.now - T0 < seconds + 5


def test_following_bears_a_store_that_does_not_answer_between_two_attempts(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.platform = ClientRetried()
    world.recorded(retries=1).attempt(0, RUNNING)
    run, exits = world.run(), Store.exits

    def silent(store: Store, run_id: str) -> Any:
        if 5 <= world.time.now - T0 < 30:
            raise StorageError("503")
        return exits(store, run_id)

    monkeypatch.setattr(Store, "exits", silent)
    monkeypatch.setattr("cloudtrain.runs.run.local_path", lambda url: None)  # a remote one, which may return
    world.time.at = [
        (5, lambda: world.platform.jobs.update({"job-0": failed()})),
        (60, lambda: (world.attempt(1, RUNNING), world.says(numbered(1, attempt="1.0"), attempt=1))),
        (70, lambda: world.platform.jobs.update({"job-1": SUCCEEDED})),
    ]
    assert [line.attempt for line in run.logs(follow=True)] == ["1.0"]


def test_following_ends_where_the_next_attempt_is_recorded_and_never_sent(world: World) -> None:
    world.platform = ClientRetried()
    world.recorded(retries=1).attempt(0, RUNNING)
    world.time.at = [
        (5, lambda: world.platform.jobs.update({"job-0": failed()})),
        (9, lambda: world.attempt(1, submitted=False)),
    ]
    with pytest.raises(LostContactError, match="attempt 1 is recorded but not submitted yet"):
        list(world.run().logs(follow=True))
    assert 600 <= world.time.now - T0 < 700


@pytest.mark.parametrize("error", [SpecError("no such workspace"), AuthError("no such project")])
def test_a_refused_run_is_over_though_its_platform_cannot_be_asked(world: World, error: CloudtrainError) -> None:
    """A wrong workspace, project or location does not exist later either. Else the run could never be closed."""

    class Nowhere(Platform):
        def find(self, request: Request) -> str | None:
            raise error

    world.platform = Nowhere()
    world.recorded().attempt(0, submitted=False)
    with pytest.raises(type(error), match="no such"):
        world.run().status()
    refusal = {"category": "capacity", "reason": "no such place", "time": T0}
    world.write("attempts/0/refused.json", refusal)
    with pytest.raises(type(error), match="no such"):  # the place is there: such a job may have been accepted after all
        world.run().result()
    world.write("attempts/0/refused.json", {**refusal, "category": "spec"})
    result = world.run().result()
    assert (result["state"], result["category"], result["reason"]) == ("failed", "spec", "refused: no such place")
    assert world.run().cancel() is None


def test_the_clock_of_an_attempt_that_was_refused_is_its_own(world: World) -> None:
    world.platform = ClientRetried()
    world.recorded(retries=2).attempt(0, RUNNING)
    refusal = {"category": "infra", "reason": "no", "time": T0 + 100}
    world.time.at = [
        (5, lambda: world.platform.jobs.update({"job-0": failed(finished=T0 + 5)})),
        (100, lambda: (world.attempt(1, submitted=False), world.write("attempts/1/refused.json", refusal))),
        (200, lambda: (world.attempt(2, RUNNING), world.says(numbered(1, attempt="2.0"), attempt=2))),
        (210, lambda: world.platform.jobs.update({"job-2": SUCCEEDED})),
    ]
    assert [line.attempt for line in world.run().logs(follow=True)] == ["2.0"]


def test_between_two_attempts_a_run_is_pending_to_whoever_looks(world: World) -> None:
    world.platform = ClientRetried()
    world.recorded(retries=1).attempt(0, failed())
    seen = [(status.state, status.reason) for status in world.run()._statuses_until_final()]
    told = ("pending", "attempt 0 ended: exit status 1; another attempt may follow")
    assert len(seen) > 1
    assert seen == [*[told] * (len(seen) - 1), ("failed", "exit status 1")]


@pytest.mark.parametrize("refused", [True, False])
def test_after_two_minutes_a_new_handle_shows_the_failure(world: World, refused: bool) -> None:
    """Check the ends that the platform does not report: a refusal's, and that of a job that it no longer knows."""
    world.platform = ClientRetried()
    if refused:
        world.recorded(gpu=["A100", "H100"]).attempt(0, submitted=False)
        placed = asdict(Layout(store=world.store.url, run_id="r1", code_digest="c", runtime_digest="d"))
        world.write("run.json", {**world.run().record, "layout": {**placed, "inputs": {}}})
        world.write("attempts/0/refused.json", {"category": "capacity", "reason": "no machines", "time": T0 + 10})
    else:
        world.recorded(retries=1).attempt(0).exit(decided=True, category="infra", reason="a node was lost")
    world.time.now = T0 + 20
    assert world.run().status().state == "pending"
    world.time.now = T0 + 10 + CLIENT_TIMINGS.next_attempt
    assert (world.run().status().state, world.run().result()["state"]) == ("failed", "failed")
    assert world.result() is None


def test_a_short_silence_of_the_platform_costs_nothing(world: World) -> None:
    world.recorded().attempt(0, RUNNING)
    world.says(numbered(1))

    def silence(error: CloudtrainError | None) -> None:
        world.platform.status_error = world.platform.logs_error = error

    world.time.at = [
        (10, lambda: silence(LostContactError("down"))),
        (500, lambda: silence(None)),
        (501, lambda: world.says(numbered(2))),
        (520, lambda: silence(LostContactError("down"))),
        (1000, lambda: silence(None)),
        (1010, lambda: world.platform.jobs.update({"job-0": SUCCEEDED})),
    ]
    assert [line.seq for line in world.run().logs(follow=True)] == [1, 2]


def test_a_long_silence_ends_with_what_the_store_has_and_an_error(world: World) -> None:
    world.recorded().attempt(0, RUNNING).segment([1, 2, 3])
    world.says(numbered(1))
    lost = LostContactError("down")
    world.time.at = [(10, lambda: setattr(world.platform, "status_error", lost))]
    seen = []
    with pytest.raises(LostContactError, match=r"down.*600 s") as caught:
        seen.extend(line.seq for line in world.run().logs(follow=True))
    assert seen == [1, 2, 3]
    assert 610 <= world.time.now - T0 < 615
    assert caught.value.exit_code == 7


def test_when_only_the_log_is_silent_the_segments_stand_in(world: World) -> None:
    world.recorded().attempt(0, RUNNING)
    world.platform.logs_error = LostContactError("down")
    world.time.at = [
        (700, lambda: world.segment([1, 2])),
        (800, lambda: world.segment([3])),
        (900, lambda: world.platform.jobs.update({"job-0": SUCCEEDED})),
    ]
    seen = [(line.text, world.time.now - T0) for line in world.run().logs(follow=True)]
    assert [text for text, _ in seen][1:] == ["line 1", "line 2", "line 3"]
    assert "does not answer" in seen[0][0]
    assert 600 <= seen[0][1] < 605
    assert 700 <= seen[1][1] < 710
    assert 800 <= seen[3][1] < 810


def test_a_log_that_is_throttled_says_once_why_it_comes_late(world: World) -> None:
    world.recorded().attempt(0, RUNNING)
    world.says(numbered(1))

    def throttled(wrong: bool) -> Callable[[], None]:
        error = LostContactError("60 reads a minute are shared", throttled=True)
        return lambda: setattr(world.platform, "logs_error", error if wrong else None)

    world.time.at = [
        (10, throttled(True)), (70, throttled(False)), (71, lambda: world.says(numbered(2))),
        (100, throttled(True)), (160, throttled(False)),
        (200, lambda: world.platform.jobs.update({"job-0": SUCCEEDED})),
    ]  # fmt: skip
    seen = texts(list(world.run().logs(follow=True)))
    assert seen == ["line 1", "[… the platform's log comes late: 60 reads a minute are shared]", "line 2"]


def test_another_error_of_a_log_that_is_followed_is_raised(world: World) -> None:
    world.recorded().attempt(0, RUNNING)
    world.platform.logs_error = AuthError("expired")
    with pytest.raises(AuthError):
        list(world.run().logs(follow=True))


def test_a_gap_nobody_fills_holds_the_others_not_back(world: World) -> None:
    world.recorded().attempt(0, RUNNING)
    world.says(numbered(2), numbered(1, node=1))
    world.time.at = [(100, lambda: world.platform.jobs.update({"job-0": SUCCEEDED}))]
    seen = [(line.text, world.time.now - T0) for line in world.run().logs(follow=True)]
    assert [text for text, _ in seen] == ["line 1", "[… 1 line lost]", "line 2"]
    assert seen[0][1] == 0
    assert 30 <= seen[1][1] < 45


# ----------------------------------------------------------------------------------------------------------------- wait


def test_wait_tells_lines_and_changes_and_gives_the_result(world: World) -> None:
    world.recorded().attempt(0, PENDING)
    jobs = world.platform.jobs
    world.says(numbered(1))
    world.time.at = [(3, lambda: jobs.update({"job-0": RUNNING})), (9, lambda: jobs.update({"job-0": SUCCEEDED}))]
    lines: list[Line] = []
    states: list[str] = []
    result = world.run().wait(on_line=lines.append, on_status=lambda status: states.append(status.state))
    assert (result["state"], result["exit_code"]) == ("succeeded", 0)
    assert states == ["pending", "running", "succeeded"]
    assert texts(lines) == ["line 1"]
    assert world.result()["state"] == "succeeded"


def test_who_wants_every_look_is_told_that_nothing_has_changed(world: World) -> None:
    world.recorded().attempt(0, PENDING)
    world.time.at = [(90, lambda: world.platform.jobs.update({"job-0": SUCCEEDED}))]
    messages: list[str] = []
    world.run().wait(on_status=Changes(messages.append, clock=lambda: world.time.now))
    assert messages[0] == "pending"
    assert [line.partition(" after ")[0] for line in messages[1:]] == ["still pending"], messages


def test_wait_without_a_reader_reads_no_log(world: World) -> None:
    world.recorded().attempt(0, RUNNING)
    world.time.at = [(60, lambda: world.platform.jobs.update({"job-0": SUCCEEDED}))]
    world.run().wait()
    assert {text.split()[0] for text in world.platform.asked} == {"status"}
    assert 60 <= world.time.now - T0 < 62.1


def test_a_job_of_a_second_is_seen_to_end_within_moments(world: World) -> None:
    world.recorded().attempt(0, RUNNING)
    world.time.at = [(1.0, lambda: world.platform.jobs.update({"job-0": SUCCEEDED}))]
    world.run().wait(on_line=lambda _: None)
    assert world.time.now - T0 < 1.5


@pytest.mark.parametrize("timeout", [0, 7.5])
@pytest.mark.parametrize("reader", [None, lambda _: None])
def test_wait_has_a_limit(world: World, timeout: float, reader: Callable[[Line], None] | None) -> None:
    world.recorded().attempt(0, RUNNING)
    with pytest.raises(LostContactError, match=r"r1 .*continues") as caught:
        world.run().wait(timeout=timeout, on_line=reader)
    assert world.time.now == pytest.approx(T0 + timeout)
    assert caught.value.exit_code == 7
    world.platform.jobs["job-0"] = SUCCEEDED
    assert world.run().wait(timeout=0)["state"] == "succeeded"


def test_waiting_for_what_was_never_submitted_ends(world: World) -> None:
    world.recorded().attempt(0, submitted=False)
    with pytest.raises(LostContactError, match="never submitted"):
        world.run().wait()
    assert 600 <= world.time.now - T0 < 605


def test_waiting_while_another_client_submits(world: World) -> None:
    world.recorded()
    world.time.at = [(30, lambda: world.attempt(0, RUNNING)), (60, lambda: world.attempt(0, SUCCEEDED))]
    assert world.run().wait()["state"] == "succeeded"


def test_an_error_that_does_not_pass_is_raised_at_once(world: World) -> None:
    world.recorded().attempt(0, RUNNING)
    world.platform.status_error = AuthError("expired")
    with pytest.raises(AuthError):
        world.run().wait()
    assert world.time.naps == []


def test_an_interrupt_passes_through_and_changes_nothing(world: World) -> None:
    world.recorded().attempt(0, RUNNING)
    world.says(numbered(1))

    def interrupt(_: object = None) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        world.run().wait(on_line=interrupt)
    world.time.at = [(1, interrupt)]
    with pytest.raises(KeyboardInterrupt):
        world.run().wait()
    assert world.result() is None
    assert world.platform.cancelled == []


def test_a_broken_local_store_is_no_silence(world: World) -> None:
    world.recorded().attempt(0, RUNNING)
    world.write("result.json", "{not json")
    with pytest.raises(StorageError):
        world.run().wait()
    assert world.time.naps == []


class Cut:
    """The files of a remote store behind a network that can be cut."""

    def __init__(self, files: Any) -> None:
        self.files, self.cut = files, False

    def __getattr__(self, name: str) -> Any:
        if self.cut:
            raise StorageError("memory://store: no route to host")
        return getattr(self.files, name)


@pytest.mark.parametrize("healed", [True, False])
def test_a_cut_network_silences_a_remote_store_too(world: World, healed: bool) -> None:
    world.recorded().attempt(0, RUNNING)
    store = Store(f"memory://store-{healed}")
    for path in world.root.rglob("*.json"):
        store.files.write(path.relative_to(world.root).as_posix(), path.read_bytes())
    store.files = cut = Cut(store.files)  # type: ignore[assignment]
    world.says(numbered(1), numbered(3))
    world.time.at = [(20, lambda: setattr(cut, "cut", True)), (30, lambda: world.says(numbered(2)))]
    if healed:
        world.time.at += [(500, lambda: setattr(cut, "cut", False))]
        world.time.at += [(510, lambda: world.platform.jobs.update({"job-0": SUCCEEDED}))]
    run = Run(store=store, run_id="r1", provider=world.platform, clock=world.time, sleep=world.time.sleep)
    lines: list[Line] = []
    if healed:
        assert run.wait(on_line=lines.append)["state"] == "succeeded"
        assert [line.seq for line in lines] == [1, 2, 3]
    else:
        with pytest.raises(StorageError, match=r"no route.*600 s"):
            run.wait(on_line=lines.append)
        assert 620 <= world.time.now - T0 < 625


def test_a_busy_machine_does_not_sleep_for_less_than_no_time(world: World) -> None:
    """Time passes between two looks at the clock, so the end of a pause may lie between them."""
    world.recorded().attempt(0, RUNNING)
    world.time.at = [(300, lambda: world.platform.jobs.update({"job-0": SUCCEEDED}))]

    def busy() -> float:
        world.time.now += 0.4
        return world.time.now

    run = Run(store=world.store, run_id="r1", provider=world.platform, clock=busy, sleep=world.time.sleep)
    assert run.wait()["state"] == "succeeded"


# -------------------------------------------------------------------------------------- attempts that a client starts


def test_a_waiting_client_starts_the_next_attempt(world: World) -> None:
    world.platform = ClientRetried()
    world.recorded(retries=1).attempt(0, failed())
    world.says("first", attempt=0)
    found, said = world.run().result(), "attempt 0 ended: exit status 1; another attempt may follow"
    assert (found["state"], found["reason"], found["exit_code"]) == ("pending", said, None)
    assert world.run().status().state == "pending"
    assert world.result() is None  # another client may continue it
    requests: list[str] = []

    def retry(result: dict[str, Any]) -> bool:
        requests.append(result["attempts"][-1]["number"])
        world.attempt(1, failed("oom"))
        world.says("second", attempt=1)
        return True

    lines: list[Line] = []
    result = world.run().wait(retry=retry, on_line=lines.append)
    assert requests == ["0.0"]
    assert texts(lines) == ["first", "second"]
    assert (result["category"], len(result["attempts"])) == ("oom", 2)
    assert world.result()["category"] == "oom"


def test_a_waiting_client_that_does_not_go_on_ends_the_run(world: World) -> None:
    world.platform = ClientRetried()
    world.recorded(retries=1).attempt(0, failed())
    result = world.run().wait(retry=lambda _: False)
    assert result["state"] == "failed"
    assert world.result()["state"] == "failed"


@pytest.mark.parametrize("category", ["auth", "quota", "image", "timeout", "cancelled"])
def test_what_another_attempt_would_not_cure_is_final(world: World, category: str) -> None:
    world.platform = ClientRetried()
    world.recorded(retries=1).attempt(0, failed(category))
    world.run().wait(retry=lambda _: pytest.fail("asked"))
    assert world.result()["category"] == category


def test_a_cancelled_run_gets_no_further_attempt(world: World) -> None:
    world.platform = ClientRetried()
    world.recorded(retries=1).attempt(0, failed())
    world.run().cancel()
    assert (world.folder / "cancelled.json").exists()
    world.run().wait(retry=lambda _: pytest.fail("asked"))
    assert world.result()["state"] == "failed"


# --------------------------------------------------------------------------------------------------------- cancel, pull


def test_cancel_forbids_attempts_first_and_then_stops_each(world: World) -> None:
    world.recorded().attempt(0, RUNNING).attempt(1, RUNNING).attempt(2, submitted=False)
    world.platform.accepted[2] = "job-2"
    world.platform.jobs["job-2"] = RUNNING
    order: list[bool] = []
    stop = world.platform.cancel
    world.platform.cancel = lambda native: (order.append(world.store.cancelled("r1")), stop(native))[1]  # type: ignore[method-assign]
    world.run().cancel()
    assert world.platform.cancelled == ["job-0", "job-1", "job-2"]
    assert order == [True] * 3
    world.run().cancel()
    assert world.store.cancelled("r1")


def test_cancel_tries_every_attempt_before_it_complains(world: World) -> None:
    world.recorded().attempt(0, RUNNING).attempt(1, RUNNING).attempt(2, RUNNING)
    world.platform.cancel_error = {"job-0": NotFoundError("gone"), "job-1": LostContactError("down")}
    with pytest.raises(LostContactError):
        world.run().cancel()
    assert world.platform.cancelled == ["job-2"]
    assert world.store.cancelled("r1")


@pytest.mark.parametrize("attempt", [0, 1])
@pytest.mark.parametrize("seen", ["cancel", "reconcile"])
def test_a_request_that_was_cut_off_is_cancelled_once_it_is_a_job(tmp_path: Path, attempt: int, seen: str) -> None:
    world = World(root=tmp_path / "store", platform=ClientRetried()).recorded(retries=1)
    for k in range(attempt):
        world.attempt(k, failed())
    world.attempt(attempt, submitted=False)
    with (
        pytest.raises(KeyboardInterrupt),
        sending(world.store, "r1", request(attempt), arrival=1.0, say=print),
    ):
        raise KeyboardInterrupt
    platform, name = world.platform, f"job-{attempt}"
    platform.jobs[name] = PENDING
    world.time.at.append((2.0, lambda: platform.accepted.setdefault(attempt, name)))
    if seen == "cancel":
        world.run().cancel()
    else:
        world.store.cancel("r1")  # by a client that died then
        world.run().reconcile()
    assert platform.cancelled[-1] == name
    assert world.result() is None
    platform.jobs[name] = Status(state="cancelled")
    assert world.run().result()["native_id"] == name


CANCELLED = Status(state="cancelled")


class Slow(ClientRetried):
    arrival_s: ClassVar[float] = 300.0


@pytest.fixture
def cut_off(tmp_path: Path) -> World:
    """A run that was cancelled after its client was cut off while it sent attempt 0."""
    world = World(root=tmp_path / "store", platform=Slow()).recorded().attempt(0, submitted=False)
    with pytest.raises(KeyboardInterrupt), sending(world.store, "r1", request(0), arrival=300.0, say=print):
        raise KeyboardInterrupt
    world.run().cancel()
    assert world.time.now - T0 < 6
    return world


def cancelled_ago(world: World, seconds: float) -> None:
    """Let the cancel be so old by the store's clock. The clock of the client that cancelled is off by an hour."""
    path = world.folder / "cancelled.json"
    path.write_text(json.dumps({"time": time.time() - 3600}))
    for file in (path, *world.folder.glob("attempts/*/sending-*.json")):  # its client was cut off before the cancel
        os.utime(file, (time.time() - seconds,) * 2)


@pytest.mark.parametrize("look", ["status", "result", "cancel", "reconcile", "wait"])
def test_each_look_stops_a_job_that_arrives_after_the_cancel(cut_off: World, look: str) -> None:
    platform, run = cut_off.platform, cut_off.run()
    assert run.status().state == "pending"
    within = "within 300 s of the cancel or of its client's end"
    reason = f"attempt 0 has no answer yet; the platform may still start it {within}"
    result = run.result()
    assert (result["state"], result["reason"].partition("Z; ")[2]) == ("pending", reason)
    assert cut_off.result() is None
    cancelled_ago(cut_off, 290)
    platform.accepted[0], platform.jobs["job-0"] = "job-0", PENDING
    cut_off.time.at.append((cut_off.time.now - T0 + 5, lambda: platform.jobs.update({"job-0": CANCELLED})))
    getattr(cut_off.run(), look)()
    assert {*platform.cancelled} == {"job-0"}
    platform.jobs["job-0"] = CANCELLED
    assert (cut_off.run().result()["state"], cut_off.run().result()["native_id"]) == ("cancelled", "job-0")


@pytest.mark.parametrize("look", ["cancel", "reconcile"])
def test_a_recorded_job_of_a_cancelled_run_is_stopped_by_cancel_and_reconcile(world: World, look: str) -> None:
    """Its own client died after it had recorded the job, and before it looked for a cancel."""
    world.recorded().attempt(0, RUNNING).store.cancel("r1")
    getattr(world.run(), look)()
    assert {*world.platform.cancelled} == {"job-0"}


@pytest.mark.parametrize(
    "error",
    [StorageError("read-only file system"), SpecError("it finalizes"), AuthError("no"), LostContactError("down")],
)
def test_a_client_that_cannot_stop_the_job_of_a_cancelled_run_follows_it_to_its_end(
    world: World, error: CloudtrainError
) -> None:
    world.recorded().attempt(0, RUNNING).store.cancel("r1")
    world.platform.cancel_error = {"job-0": error}
    world.time.at = [
        (700, lambda: setattr(world.platform, "cancel_error", {})),
        (800, lambda: world.platform.jobs.update({"job-0": CANCELLED})),
    ]
    assert world.run().wait()["state"] == "cancelled"
    assert world.platform.cancelled == ["job-0"]


def test_a_cut_off_run_ends_once_no_request_can_arrive(cut_off: World) -> None:
    cancelled_ago(cut_off, 290)
    assert cut_off.run().result()["state"] == "pending"
    done: list[str] = []
    assert cut_off.run().reconcile(say=done.append)["state"] == "pending"
    assert done == [cut_off.run().status().reason]
    cut_off.time.at.append((cut_off.time.now - T0 + 60, lambda: cancelled_ago(cut_off, 301)))
    result = cut_off.run().wait()
    assert (result["state"], result["native_id"]) == ("cancelled", None)
    assert cut_off.platform.cancelled == []


def test_a_job_that_arrives_after_the_end_is_stopped_by_another_cancel(cut_off: World) -> None:
    """Its client was suspended after its look for a cancel, then sent the request, and died."""
    cancelled_ago(cut_off, 301)
    assert cut_off.run().wait()["native_id"] is None
    cut_off.run().cancel()
    assert cut_off.platform.cancelled == []
    cut_off.platform.accepted[0], cut_off.platform.jobs["job-0"] = "job-0", PENDING
    cut_off.run().cancel()
    assert cut_off.platform.cancelled == ["job-0"]


def test_a_job_that_arrives_in_the_last_moment_is_stopped(cut_off: World, monkeypatch: pytest.MonkeyPatch) -> None:
    cancelled_ago(cut_off, 301)
    since, platform = StoreClock.age, cut_off.platform

    def late(clock: StoreClock, key: str) -> float | None:
        platform.accepted[0], platform.jobs["job-0"] = "job-0", PENDING
        return since(clock, key)

    monkeypatch.setattr(StoreClock, "age", late)
    assert cut_off.run().status() == PENDING
    assert platform.cancelled == ["job-0"]


def test_a_run_is_not_over_while_a_client_still_sends_it(tmp_path: Path) -> None:
    """It was held up between its look for a cancel and the request."""
    world = World(root=tmp_path / "store", platform=Slow()).recorded().attempt(0, submitted=False)
    with sending(world.store, "r1", request(0), arrival=300.0, say=print) as lease:
        world.store.cancel("r1")
        cancelled_ago(world, 301)
        lease.renew()
        status = world.run().status()
        assert status.state == "pending"
        assert status.reason.endswith("within 300 s of the cancel or of its client's end")
    assert world.run().status().state == "cancelled"


def test_a_later_attempt_that_was_cut_off_is_awaited_too(tmp_path: Path) -> None:
    world = World(root=tmp_path / "store", platform=Slow()).recorded(retries=1).attempt(0, failed(started=T0 - 9))
    world.attempt(1, submitted=False)
    with pytest.raises(KeyboardInterrupt), sending(world.store, "r1", request(1), arrival=300.0, say=print):
        raise KeyboardInterrupt
    world.run().cancel()
    result = world.run().result()
    assert (result["state"], result["attempts"][0]["started"]) == ("pending", iso_time(T0 - 9))
    cancelled_ago(world, 301)
    assert world.run().result()["state"] == "failed"


def test_a_client_that_takes_over_from_one_that_was_cut_off_leaves_the_lease(
    cut_off: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CLIENT_TIMINGS, "lease_given_up", 0.0)
    assert deliver(cut_off.run(), request(0), {}) is None
    assert cut_off.run().status().state == "pending"


class Unsure(Slow):
    """A platform that takes the first request without an answer, and refuses further ones."""

    arrival_s: ClassVar[float] = 0.3
    refusal: ClassVar[CloudtrainError] = QuotaError("no more GPUs")
    arrives: ClassVar[bool] = True
    throttled: ClassVar[bool] = False

    def submit(self, request: Request, secrets: Mapping[str, str] | None = None) -> str:
        self.asked.append("submit")
        if self.asked.count("submit") > 1:
            raise self.refusal
        if self.arrives:
            threading.Timer(0.1, self.accepted.setdefault, (request.attempt, f"job-{request.attempt}")).start()
        raise LostContactError("no answer", throttled=self.throttled)


@pytest.fixture
def unsure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr("cloudtrain.runs.log_sources.random.uniform", lambda low, high: 0.0)
    return World(root=tmp_path / "store", platform=Unsure()).recorded().attempt(0, submitted=False)


@pytest.mark.parametrize("refusal", [QuotaError("no more GPUs"), AuthError("the token has expired")])
def test_a_refusal_after_a_lost_answer_waits_for_the_first_request(
    unsure: World, monkeypatch: pytest.MonkeyPatch, refusal: CloudtrainError
) -> None:
    monkeypatch.setattr(Unsure, "refusal", refusal)
    said: list[str] = []
    assert deliver(unsure.run(), request(0), {}, say=said.append) == "job-0"
    why = f"attempt 0 was refused ({refusal}), but a request before that got no answer; looking for its job for 1 s"
    assert said == [why]
    assert unsure.store.refused("r1", 0) is None
    assert unsure.store.submitted("r1", 0) is not None


def test_a_refusal_counts_once_the_first_request_can_no_longer_arrive(
    unsure: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A caller of the Python interface sees the wait in the log."""
    monkeypatch.setattr(Unsure, "arrives", False)
    began = time.monotonic()
    with pytest.raises(QuotaError):
        deliver(unsure.run(), request(0), {})
    assert time.monotonic() - began > Unsure.arrival_s
    assert "attempt 0 was refused (no more GPUs), but a request before that got no answer" in caplog.text
    assert unsure.store.refused("r1", 0) is not None
    assert not was_cut_off(unsure.store, "r1", 0)


def test_a_throttled_request_is_no_lost_one(unsure: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Unsure, "arrives", False)
    monkeypatch.setattr(Unsure, "throttled", True)
    with pytest.raises(QuotaError):
        deliver(unsure.run(), request(0), {}, say=pytest.fail)
    assert unsure.platform.asked == ["submit", "submit"]


def test_a_request_that_was_never_sent_is_no_lost_one(unsure: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Unsure, "may_have_sent", lambda *_: False)
    with pytest.raises(QuotaError):
        deliver(unsure.run(), request(0), {}, say=pytest.fail)
    assert unsure.store.refused("r1", 0) is not None


def test_a_client_that_cannot_look_for_a_request_without_an_answer_leaves_the_lease(
    unsure: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Unsure, request: Request) -> str | None:
        raise AuthError("the token has expired")

    monkeypatch.setattr(Unsure, "find", refuse)
    with pytest.raises(AuthError):
        deliver(unsure.run(), request(0), {})
    assert unsure.store.refused("r1", 0) is None
    assert was_cut_off(unsure.store, "r1", 0)


@pytest.mark.parametrize("arrives", [True, False])
def test_a_job_of_a_request_without_an_answer_is_stopped_after_a_cancel(
    unsure: World, monkeypatch: pytest.MonkeyPatch, arrives: bool
) -> None:
    monkeypatch.setattr(Unsure, "arrives", arrives)
    monkeypatch.setattr("cloudtrain.runs.log_sources.random.uniform", lambda *_: unsure.store.cancel("r1") or 0.0)
    said: list[str] = []
    assert deliver(unsure.run(), request(0), {}, say=said.append) == ("job-0" if arrives else None)
    assert unsure.platform.cancelled == (["job-0"] if arrives else [])
    assert said == ["attempt 0 was cancelled, but a request before that got no answer; looking for its job for 1 s"]
    assert not was_cut_off(unsure.store, "r1", 0)


def test_a_job_that_arrives_after_a_refusal_and_a_cancel_is_stopped_before_it_is_recorded(
    unsure: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client dies once the job is recorded: from then on no client looks for it."""
    record = Store.write_submitted

    def dies(self: Store, *given: Any) -> None:
        record(self, *given)
        raise KeyboardInterrupt

    monkeypatch.setattr(Store, "write_submitted", dies)
    with pytest.raises(KeyboardInterrupt):
        deliver(unsure.run(), request(0), {}, say=lambda _: unsure.store.cancel("r1"))
    assert unsure.platform.cancelled == ["job-0"]


def test_a_job_of_a_cancelled_run_that_cannot_be_stopped_is_left_to_the_next_client(
    unsure: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once it is recorded, no client looks for it."""
    monkeypatch.setattr("cloudtrain.runs.log_sources.random.uniform", lambda *_: unsure.store.cancel("r1") or 0.0)

    def refuse(native_id: str) -> None:
        raise AuthError("the token has expired")

    with monkeypatch.context() as patch:
        patch.setattr(unsure.platform, "cancel", refuse)
        with pytest.raises(AuthError):
            deliver(unsure.run(), request(0), {}, say=list[str]().append)
    assert unsure.store.submitted("r1", 0) is None
    unsure.platform.jobs["job-0"] = RUNNING
    unsure.run().status()
    assert unsure.platform.cancelled == ["job-0"]


def test_a_job_that_was_found_after_a_refusal_runs_on(unsure: World) -> None:
    unsure.store.write_refused("r1", 0, category="quota", reason="no more GPUs")
    unsure.platform.accepted[0], unsure.platform.jobs["job-0"] = "job-0", RUNNING
    assert unsure.run().status().state == "running"
    assert deliver(unsure.run(), request(0), {}) == "job-0"
    assert unsure.platform.cancelled == []


def test_a_job_of_a_refused_attempt_that_was_followed_is_stopped_before_it_is_recorded(
    unsure: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client was held up after a lost answer. Another one was refused, and started the next attempt."""

    def meanwhile(*given: float) -> float:
        unsure.store.write_refused("r1", 0, category="infra", reason="try again")
        unsure.attempt(1, RUNNING)
        return 0.0

    def stop(native_id: str) -> None:
        assert unsure.store.submitted("r1", 0) is None
        unsure.platform.cancelled.append(native_id)

    monkeypatch.setattr("cloudtrain.runs.log_sources.random.uniform", meanwhile)
    monkeypatch.setattr(unsure.platform, "cancel", stop)
    assert deliver(unsure.run(), request(0), {}, say=list[str]().append) == "job-0"
    assert unsure.platform.cancelled == ["job-0"]


def test_a_request_that_was_sent_after_the_end_of_a_cancelled_run_is_looked_for(
    unsure: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client was held up after its look for a cancel. No other client looks for the job of a run that is over."""
    submit, said = unsure.platform.submit, list[str]()

    def held_up(*given: Any) -> str:
        unsure.store.cancel("r1")
        unsure.store.write_result("r1", {"state": "cancelled", "native_id": None})
        return submit(*given)

    monkeypatch.setattr(unsure.platform, "submit", held_up)
    assert deliver(unsure.run(), request(0), {}, say=said.append) == "job-0"
    assert unsure.platform.cancelled == ["job-0"]
    assert said == ["attempt 0 was cancelled, but a request before that got no answer; looking for its job for 1 s"]
    assert not was_cut_off(unsure.store, "r1", 0)


def test_a_run_is_pending_for_a_request_that_got_no_answer_after_the_cancel(
    unsure: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies(*given: Any) -> None:
        raise KeyboardInterrupt

    submit = unsure.platform.submit
    monkeypatch.setattr(Unsure, "arrival_s", 300.0)
    monkeypatch.setattr(unsure.platform, "find", dies)

    def held_up(*given: Any) -> str:
        unsure.store.cancel("r1")
        cancelled_ago(unsure, 301)
        return submit(*given)

    monkeypatch.setattr(unsure.platform, "submit", held_up)
    with pytest.raises(KeyboardInterrupt):
        deliver(unsure.run(), request(0), {})
    monkeypatch.undo()
    monkeypatch.setattr(Unsure, "arrival_s", 300.0)
    assert unsure.run().status().state == "pending"


def test_a_refusal_after_a_takeover_waits_for_the_request_of_the_last_holder(
    unsure: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    unsure.platform.asked.append("submit")
    with pytest.raises(KeyboardInterrupt), sending(unsure.store, "r1", request(0), arrival=0.3, say=print):
        raise KeyboardInterrupt
    monkeypatch.setattr(CLIENT_TIMINGS, "lease_given_up", 0.0)
    threading.Timer(0.1, unsure.platform.accepted.setdefault, (0, "job-0")).start()
    assert deliver(unsure.run(), request(0), {}) == "job-0"
    assert unsure.store.refused("r1", 0) is None


READ_ONLY = [AuthError("read only"), StorageError("Permission denied")]  # a bucket's, a disk's


@pytest.fixture(params=READ_ONLY, ids=["bucket", "disk"])
def read_only(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Callable[[], None]:
    """Return a function from whose call on no client can write to a store."""

    def refuse(*given: Any, **named: Any) -> None:
        raise request.param

    def begin() -> None:
        for name in ("write", "create", "swap"):
            monkeypatch.setattr(LocalFiles, name, refuse)

    return begin


def test_a_client_that_may_only_read_goes_by_its_own_clock(cut_off: World, read_only: Callable[[], None]) -> None:
    cut_off.write("cancelled.json", {"time": T0})
    read_only()
    clock = StoreClock(cut_off.store, "r1", now=lambda: T0 + 7, ticks=time.monotonic)
    assert clock.age("runs/r1/cancelled.json") == 7
    assert cut_off.run().status().state == "pending"


@pytest.mark.parametrize(("error", "calls"), [(AuthError("read only"), 1), (StorageError("timed out"), 2)])
def test_a_client_asks_for_the_clock_of_a_store_again_only_if_that_may_help(
    cut_off: World, monkeypatch: pytest.MonkeyPatch, error: CloudtrainError, calls: int
) -> None:
    cut_off.write("cancelled.json", {"time": T0})
    write = Mock(side_effect=error)
    monkeypatch.setattr(LocalFiles, "write", write)
    clock = StoreClock(cut_off.store, "r1", now=lambda: T0 + 7, ticks=lambda: 0.0)
    assert [clock.age("runs/r1/cancelled.json") for _ in range(2)] == [7, 7]
    assert write.call_count == calls


def test_a_client_that_may_only_read_sees_a_job_that_is_not_recorded(
    tmp_path: Path, read_only: Callable[[], None]
) -> None:
    world = World(root=tmp_path / "store").recorded().attempt(0, RUNNING, submitted=False)
    world.platform.accepted[0] = "job-0"
    read_only()
    assert world.run().status() == RUNNING
    assert world.run().result()["native_id"] == "job-0"


def test_a_client_with_a_fast_clock_also_waits_for_a_request_on_its_way(tmp_path: Path) -> None:
    world = World(root=tmp_path / "store", platform=ClientRetried()).recorded().attempt(0, submitted=False)
    with pytest.raises(KeyboardInterrupt), sending(world.store, "r1", request(0), arrival=1.0, say=print):
        raise KeyboardInterrupt
    world.write("cancelled.json", {"time": T0 - 60})
    world.run().cancel()
    assert 4 < world.time.now - T0 <= CLIENT_TIMINGS.arrival
    cancelled_ago(world, 2)
    assert world.run().status().state == "pending"


def test_a_run_whose_platform_is_silent_can_be_cancelled(world: World) -> None:
    world.recorded().attempt(0)
    world.platform.status_error = LostContactError("down")
    world.run().cancel()
    assert world.platform.cancelled == ["job-0"]


@pytest.mark.parametrize("kept", [True, False])
def test_cancelling_what_is_over_changes_nothing(world: World, kept: bool) -> None:
    world.recorded().attempt(0, SUCCEEDED)
    if kept:
        world.run().result()
    world.run().cancel()
    assert not world.store.cancelled("r1")
    assert world.platform.cancelled == []
    assert world.run().result()["state"] == "succeeded"


def test_pull_is_the_stores(world: World, tmp_path: Path) -> None:
    world.recorded().attempt(0, SUCCEEDED).checkpoint("step-5").write("live/artifacts/model.txt", "weights")
    world.run().pull(tmp_path / "out")
    assert [p.read_text() for p in (tmp_path / "out").rglob("model.txt")] == ["weights"]
    assert [p.read_text() for p in (tmp_path / "out").rglob("model.pt")] == ["abc"]
    world.run().pull(tmp_path / "some", what=("artifacts",))
    assert list((tmp_path / "some").rglob("model.pt")) == []


# ------------------------------------------------------------------------------------------------------------ finding


def test_a_run_is_opened_by_url_path_or_id(world: World, tmp_path: Path) -> None:
    world.recorded()
    url = world.run().url
    for ref in (url, url + "/", str(world.folder), "store/runs/r1", "./store/runs/r1/", "r1"):
        run = open_run(ref, store_url="store", cwd=tmp_path)
        assert (run.url, run.job.name) == (url, "train")
    assert open_run("runs/r1", store_url="elsewhere", cwd=world.root).url == url


def test_a_run_that_is_not_there_names_the_nearest(world: World, tmp_path: Path) -> None:
    world.run_id = "20260101-120000-train-ab12"
    world.recorded()
    for ref in ("20260101-120000-train-ab13", "20260101-120000-TRAIN-ab12", "store/runs/20260101-120000-train-ab1"):
        with pytest.raises(NotFoundError, match="no run ") as caught:
            open_run(ref, store_url="store", cwd=tmp_path)
        assert caught.value.hint == "did you mean '20260101-120000-train-ab12'?"
    for ref in ("store/r1", "/", "file:///tmp", ""):
        with pytest.raises(NotFoundError):
            open_run(ref, store_url="store", cwd=tmp_path)
    with pytest.raises(NotFoundError):
        open_run("anything", store_url="nowhere", cwd=tmp_path)


def test_the_provider_is_made_of_run_json(world: World) -> None:
    run = Run(store=world.recorded(provider="no-such").attempt(0).store, run_id="r1")
    with pytest.raises(NotFoundError, match="no-such"):
        run.status()


def test_runs_are_listed_with_their_states(tmp_path: Path) -> None:
    assert list_page(Store(str(tmp_path / "store")), limit=None).rows == []
    over = World(root=tmp_path / "store", run_id="b-over").recorded(created=T0, name="done")
    over.attempt(0, failed("oom")).run().result()
    World(root=over.root, run_id="a-old").recorded(created=T0 - 100)
    World(root=over.root, run_id="c-new").recorded(created=T0 + 100, provider="no-such").attempt(0)
    World(root=over.root, run_id="d-broken").write("run.json", "{")
    rows = list_page(Store(str(over.root)), limit=None).rows
    assert list_page(str(over.root), limit=None).rows == rows
    rows.sort(key=lambda row: (row["created"] or "", row["run_id"]), reverse=True)
    assert [(row["run_id"], row["state"], row["category"], row["name"]) for row in rows] == [
        ("c-new", "unknown", None, "train"),
        ("b-over", "failed", "oom", "done"),
        ("a-old", "unknown", None, "train"),
        ("d-broken", "unknown", None, None),
    ]
    assert rows[1]["created"] == T0_ISO
    assert rows[1]["provider"] == "memory"
    assert "no-such" in rows[0]["reason"]
    assert all(row["reason"] for row in rows if row["state"] == "unknown")


def test_metrics_that_cannot_be_read_are_named_in_the_list(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.recorded().attempt(0, SUCCEEDED).run().result()
    world.write("live/metrics/0.0-node-0.jsonl", {"val_loss": 1.0})
    wanted = Wanted(columns=("val_loss",))
    assert [row["columns"] for row in list_page(world.store, limit=None, wanted=wanted).rows] == [{"val_loss": 1.0}]
    really = os.scandir

    def failing(path: Path) -> Any:
        if Path(path).name == "metrics":
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return really(path)

    monkeypatch.setattr(os, "scandir", failing)
    (row,) = list_page(world.store, limit=None, wanted=wanted).rows
    assert (row["state"], row["columns"]) == ("succeeded", {"val_loss": None})
    assert row["reason"].startswith("its metrics cannot be read: ")
    assert "Input/output error" in row["reason"]


def test_a_finished_run_is_listed_from_its_result_alone(world: World) -> None:
    world.recorded().attempt(0, SUCCEEDED).run().result()
    (world.folder / "run.json").write_text("{", encoding="utf-8")
    assert [row["state"] for row in list_page(world.store, limit=None).rows] == ["succeeded"]


def test_a_result_of_another_hand_is_listed_too(world: World) -> None:
    world.recorded(name="mine").write("result.json", {"state": "succeeded", "category": None, "reason": ""})
    (row,) = list_page(world.store, limit=None).rows
    assert (row["state"], row["name"], row["provider"]) == ("succeeded", "mine", "memory")


def test_a_local_store_needs_no_third_party_package(world: World) -> None:
    world.recorded().attempt(0, SUCCEEDED).run().result()
    code = (
        "import sys; from pathlib import Path\n"
        "from cloudtrain.runs.listing import list_page; from cloudtrain.runs.run import open_run\n"
        f"assert [r['state'] for r in list_page({str(world.root)!r}, limit=None).rows] == ['succeeded']\n"
        f"open_run('r1', store_url={str(world.root)!r}, cwd=Path.cwd()).result()\n"
        "bad = {'fsspec', 'rich', 'cyclopts', 'torch', 'pathspec'} & set(sys.modules); assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


def test_refused_ids_are_a_users_error() -> None:
    assert issubclass(NotFoundError, SpecError)
