"""The time that an attempt has waited for machines: since it was submitted, or since it lost its machines."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from store_times import DatedFiles, TimelessFiles

from cloudtrain.provider_api.protocol import AttemptInfo, Request, Status
from cloudtrain.runs.attempts import AttemptPolicy
from cloudtrain.runs.max_wait import MaxWait
from cloudtrain.storage.timings import CLIENT_TIMINGS
from cloudtrain.store.store import Store, StoreClock

T0 = 1_700_000_000.0
LIMIT = 600
POLICY = AttemptPolicy(max_runtime=3600, max_wait=LIMIT)
WHY = "no machines within max_wait (10m)"
PENDING = Status(state="pending")


class Clock:
    now = T0

    def __call__(self) -> float:
        return self.now


def begun(tmp_path: Path, limit: int | None = LIMIT) -> tuple[MaxWait, Store, Clock]:
    """Return attempt 0, submitted at `T0` by the store's clock."""
    store, clock = Store(str(tmp_path)), Clock()
    store.files = DatedFiles(tmp_path, clock)
    store.create_attempt("r", 0, Request(provider="p", operation="o", body={}, context={}, run="r"))
    store.write_submitted("r", 0, "0")
    return client(store, clock, limit=limit), store, clock


def client(store: Store, clock: Clock, limit: int | None = LIMIT, fast: float = 0.0) -> MaxWait:
    """Return a client that has not looked yet. Its clock is ``fast`` by so many seconds."""
    own = StoreClock(store, "r", now=lambda: clock.now + fast, ticks=clock)
    return MaxWait(store=store, run_id="r", policy=replace(POLICY, max_wait=limit), clock=own)


def test_since_it_was_submitted(tmp_path: Path) -> None:
    wait, store, clock = begun(tmp_path)
    for seconds in (0, 1, LIMIT):
        clock.now = T0 + seconds
        assert wait.ends(0, PENDING) == ""
    assert store.expired("r", 0) is None
    clock.now = T0 + LIMIT + 1
    assert wait.ends(0, PENDING) == WHY
    assert store.expired("r", 0) == {"reason": WHY, "created_by": store.expired("r", 0)["created_by"]}  # type: ignore[index]


def test_the_platforms_own_reason_for_the_wait_is_kept(tmp_path: Path) -> None:
    wait, store, clock = begun(tmp_path)
    clock.now = T0 + LIMIT + 1
    why = wait.ends(0, replace(PENDING, reason="PENDING: QOSMaxJobsPerUserLimit"))
    assert why == f"{WHY}: PENDING: QOSMaxJobsPerUserLimit" == (store.expired("r", 0) or {})["reason"]


def test_what_does_not_end_is_cancelled_again_after_a_while_and_by_any_other_client_at_once(tmp_path: Path) -> None:
    wait, store, clock = begun(tmp_path)
    clock.now = T0 + LIMIT + 1
    assert wait.ends(0, PENDING) == WHY
    clock.now += CLIENT_TIMINGS.cancel_again
    assert wait.ends(0, PENDING) == ""
    clock.now += 1
    assert wait.ends(0, PENDING) == WHY
    assert client(store, clock).ends(0, PENDING) == WHY


def test_one_that_has_started_by_the_platform_s_word_alone_waits_since_it_was_seen_to(tmp_path: Path) -> None:
    """It lost its machines before its nodes had written a record."""
    wait, store, clock = begun(tmp_path)
    again = Status(state="pending", started=T0 + 1)
    clock.now = T0 + 10 * LIMIT
    assert wait.ends(0, again) == ""
    clock.now += LIMIT
    assert client(store, clock).ends(0, again) == ""
    clock.now += 1
    assert wait.ends(0, again) == WHY


def test_machines_that_are_lost_again_are_waited_for_anew_though_nodes_left_no_word_the_first_time(
    tmp_path: Path,
) -> None:
    wait, store, clock = begun(tmp_path)
    lost = Status(state="pending", started=T0 + 1)
    clock.now = T0 + 2
    assert wait.ends(0, lost) == ""
    store.files.write("runs/r/live/attempts/0.0.json", json.dumps({"attempt": "0.0", "started": T0 + 60}).encode())
    clock.now = T0 + 18_000  # when it has run for hours
    assert wait.ends(0, lost) == ""
    clock.now += LIMIT
    assert client(store, clock).ends(0, lost) == ""
    clock.now += 1
    assert wait.ends(0, lost) == WHY


@pytest.mark.parametrize("fast", [-7200.0, 7200.0])
@pytest.mark.parametrize("waits", ["first", "again", "again, by the platform"])
def test_a_client_whose_clock_is_wrong_ends_it_in_time(tmp_path: Path, fast: float, waits: str) -> None:
    first, store, clock = begun(tmp_path)
    began = {"first": (), "again": (AttemptInfo(number="0.0", started=T0),)}
    status = replace(PENDING, attempts=began.get(waits, (AttemptInfo(number="0.0", started=T0 - 9, ended=T0),)))
    assert first.ends(0, status) == ""
    clock.now += LIMIT
    assert client(store, clock, fast=fast).ends(0, status) == ""
    clock.now += 1
    assert client(store, clock, fast=fast).ends(0, status) == WHY


def test_a_wait_that_began_while_the_client_was_suspended_ends_in_time(tmp_path: Path) -> None:
    """The machine's clock of waits stands still while it is suspended."""
    _, store, clock = begun(tmp_path)
    suspended = 0.0
    own = StoreClock(store, "r", now=clock, ticks=lambda: clock.now - suspended)
    wait = MaxWait(store=store, run_id="r", policy=POLICY, clock=own)
    assert wait.ends(0, PENDING) == ""
    suspended = 8 * 3600.0
    clock.now += suspended
    lost = replace(PENDING, attempts=(AttemptInfo(number="0.0", started=T0 + 60, ended=clock.now),))
    assert wait.ends(0, lost) == ""
    clock.now += LIMIT + 1
    assert wait.ends(0, lost) == WHY


def test_the_present_time_of_the_store_is_asked_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wait, _, clock = begun(tmp_path)
    written: list[str] = []
    write = DatedFiles.write
    monkeypatch.setattr(DatedFiles, "write", lambda self, key, data: (written.append(key), write(self, key, data))[1])
    for _ in range(3):
        wait.ends(0, PENDING)
        clock.now += LIMIT + 1 + CLIENT_TIMINGS.cancel_again
    assert written == ["runs/r/awaited.json"]


@pytest.mark.parametrize("state", ["running", "succeeded", "failed", "cancelled"])
def test_what_does_not_wait_is_left_alone(tmp_path: Path, state: str) -> None:
    wait, store, clock = begun(tmp_path)
    clock.now = T0 + 10 * LIMIT
    assert wait.ends(0, Status(state=state)) == ""
    assert store.expired("r", 0) is None


def test_without_a_limit_it_waits_for_ever(tmp_path: Path) -> None:
    wait, _, clock = begun(tmp_path, limit=None)
    clock.now = T0 + 1e9
    assert wait.ends(0, PENDING) == ""


def test_a_restart_waits_since_the_platform_says_it_lost_its_machines(tmp_path: Path) -> None:
    wait, _, clock = begun(tmp_path)
    lost = AttemptInfo(number="0.0", started=T0 + 100, ended=T0 + 90_000)
    clock.now = T0 + 90_000 + LIMIT
    assert wait.ends(0, Status(state="pending", attempts=(lost,))) == ""
    clock.now += 1
    assert wait.ends(0, Status(state="pending", attempts=(lost,))) == WHY


@pytest.mark.parametrize("told_by", ["platform", "nodes"])
def test_a_restart_waits_since_somebody_saw_it_wait_where_nobody_knows(tmp_path: Path, told_by: str) -> None:
    """Any later client, from any machine, counts from the same moment."""
    wait, store, clock = begun(tmp_path)
    status = PENDING
    if told_by == "platform":
        status = Status(state="pending", attempts=(AttemptInfo(number="0.0", started=T0 + 100),))
    else:
        store.files.write("runs/r/live/attempts/0.0.json", json.dumps({"attempt": "0.0", "started": T0}).encode())
    clock.now = T0 + 90_000
    assert wait.ends(0, status) == ""
    other = client(store, clock)
    clock.now += LIMIT
    assert other.ends(0, status) == ""
    clock.now += 1
    assert other.ends(0, status) == WHY


def test_only_the_newest_attempt_of_a_run_that_nobody_has_cancelled(tmp_path: Path) -> None:
    wait, store, clock = begun(tmp_path)
    clock.now = T0 + 10 * LIMIT
    store.create_attempt("r", 1, Request(provider="p", operation="o", body={}, context={}, run="r", attempt=1))
    assert wait.ends(0, PENDING) == ""
    _, store, _ = begun(tmp_path / "other")
    store.cancel("r")
    assert client(store, clock).ends(0, PENDING) == ""


@pytest.mark.parametrize("kind", [DatedFiles, TimelessFiles])
def test_a_step_of_the_machines_clock_ends_no_wait_that_this_process_measures(tmp_path: Path, kind: Any) -> None:
    _, store, ticks = begun(tmp_path)
    if kind is TimelessFiles:
        store.files = TimelessFiles(root=tmp_path)
        store.files.write("runs/r/attempts/0/submitted.json", json.dumps({"native_id": "0", "time": T0}).encode())
    wall = Clock()
    clock = StoreClock(store, "r", now=wall, ticks=ticks)
    wait = MaxWait(store=store, run_id="r", policy=POLICY, clock=clock)
    assert wait.ends(0, PENDING) == ""
    wall.now += 10 * LIMIT
    assert wait.ends(0, PENDING) == ""
    ticks.now += LIMIT + 1
    assert wait.ends(0, PENDING) == WHY
