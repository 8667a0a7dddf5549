"""Further attempts that a waiting client starts, and patience with a platform that does not answer."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from cloudtrain.errors import LostContactError, PlatformError, QuotaError, SpecError, StorageError
from cloudtrain.job.job import Job
from cloudtrain.provider_api.protocol import (
    AttemptInfo,
    Layout,
    LogPage,
    ProviderExtras,
    Request,
    Status,
    context_of,
)
from cloudtrain.runs import resume_nodes
from cloudtrain.runs.log_sources import patiently
from cloudtrain.runs.retry import Retry
from cloudtrain.runs.run import Run
from cloudtrain.settings.settings import NO_SETTINGS
from cloudtrain.storage.errors import report_retries
from cloudtrain.storage.files import files
from cloudtrain.storage.timings import CLIENT_TIMINGS
from cloudtrain.store.store import Store


@dataclass(frozen=True)
class NoSettings:
    """Settings of a provider that has none."""


@dataclass
class Platform(ProviderExtras):
    """Jobs in memory. ``ends`` are the ends of attempt 0, 1, …; ``failing`` is how many submits fail first."""

    name: ClassVar[str] = "memory"
    retried_by: ClassVar[str] = "client"
    max_wait_by: ClassVar[str] = "platform"
    min_poll_s: ClassVar[float] = 0.0
    max_poll_s: ClassVar[float] = 0.0
    settings: ClassVar[Any] = NoSettings()

    ends: list[Status]
    failing: int = 0
    sent: list[Request] = field(default_factory=list)
    secrets: list[Mapping[str, str] | None] = field(default_factory=list)
    chooses: bool = False

    def plan(self, job: Job, layout: Layout, attempt: int = 0, gpu_index: int = 0) -> Request:
        body = {"max_runtime": job.max_runtime, "max_cost": job.max_cost}
        types = tuple(map(str, job.resources.gpus[gpu_index:])) if self.chooses else ()
        return Request(
            provider="memory",
            operation="o",
            body=body,
            context=context_of("memory", job, layout, processes=1),
            run=layout.run,
            attempt=attempt,
            gpu_index=gpu_index,
            instance_types=types,
        )

    def submit(self, request: Request, secrets: Mapping[str, str] | None = None) -> str:
        if self.failing:
            self.failing -= 1
            raise LostContactError("not now")
        self.sent.append(request)
        self.secrets.append(secrets)
        return str(request.attempt)

    def find(self, request: Request) -> str | None:
        return None

    def status(self, native_id: str) -> Status:
        return self.ends[int(native_id)]

    def logs(self, native_id: str, cursor: Any = None) -> LogPage:
        return LogPage(lines=(), cursor=None)

    def cancel(self, native_id: str) -> None:
        """Do nothing: no job runs."""


def failed(category: str, reason: str = "x", *, seconds: float = 100.0, usd: float | None = None) -> Status:
    attempts = (AttemptInfo(number="0.0", started=1e9, ended=1e9 + seconds),)
    return Status(state="failed", category=category, reason=reason, attempts=attempts, cost_usd=usd)


def numbered(ends: list[Status]) -> list[Status]:
    """Return the statuses with an attempt number each."""
    return [
        Status(**{**vars(e), "attempts": tuple(AttemptInfo(**{**vars(a), "number": f"{k}.0"}) for a in e.attempts)})
        for k, e in enumerate(ends)
    ]


def begun(
    tmp_path: Path, *ends: Status, chooses: bool = False, layout: Mapping[str, Any] | None = None, **fields: Any
) -> tuple[Run, Platform]:
    """Return a run whose first attempt was sent. Its attempts end with these statuses. ``chooses``: the platform picks
    a GPU of the list."""
    store, job = Store(str(tmp_path)), Job.make(entry_point="train.py", **fields)
    placed = Layout(store=store.url, run_id="r", code_digest="c", runtime_digest="d", **(layout or {}))
    platform = Platform(numbered(list(ends)), chooses=chooses)
    plain = {**asdict(placed), "inputs": {}}
    store.create_run(placed, {"job": job.to_dict(), "provider": "memory", "settings": {}, "layout": plain})
    store.create_attempt("r", 0, platform.plan(job, placed))
    store.write_submitted("r", 0, "0")
    return Run(store=store, run_id="r", provider=platform), platform  # type: ignore[arg-type]


def waited(run: Run) -> dict[str, Any]:
    return run.wait(retry=Retry(run))


DONE = Status(state="succeeded")


def test_another_attempt_is_recorded_then_sent(tmp_path: Path) -> None:
    run, platform = begun(tmp_path, failed("infra"), DONE, retries=1)
    result = waited(run)
    assert (result["state"], result["native_id"]) == ("succeeded", "1")
    assert [r.attempt for r in platform.sent] == [1]
    assert run.store.attempt_request("r", 1) == platform.sent[0]


def test_another_attempt_gets_the_secrets_too(tmp_path: Path) -> None:
    """It is a separate job. Without the value, this client neither records nor sends it; another client may."""
    run, platform = begun(tmp_path, failed("infra"), DONE, retries=1, secrets={"TOKEN": "env:TOK"})
    for environ in ({}, {"TOK": ""}):
        with pytest.raises(SpecError, match=r"secrets\.TOKEN: its environment variable is not set here, or empty"):
            run.wait(retry=Retry(run, environ=environ))
    assert (platform.sent, run.store.attempt_request("r", 1), run.store.result("r")) == ([], None, None)
    assert run.wait(retry=Retry(run, environ={"TOK": "v"}))["state"] == "succeeded"
    assert platform.secrets == [{"TOK": "v"}]


def test_no_more_than_were_allowed(tmp_path: Path) -> None:
    run, platform = begun(tmp_path, failed("infra", "a"), failed("infra", "b"), failed("infra", "c"), retries=1)
    assert waited(run)["reason"] == "b"
    assert len(platform.sent) == 1


def test_the_same_failure_twice_is_the_end(tmp_path: Path) -> None:
    run, platform = begun(tmp_path, *[failed("user_error", "boom")] * 4, retries=3)
    assert waited(run)["state"] == "failed"
    assert len(platform.sent) == 1


def test_without_capacity_the_next_gpu_is_tried_and_is_no_retry(tmp_path: Path) -> None:
    run, platform = begun(
        tmp_path, failed("capacity"), failed("capacity"), DONE, gpu=["H100:8", "A100:8", "L4:8"], retries=0
    )
    assert waited(run)["state"] == "succeeded"
    assert [(r.attempt, r.gpu_index) for r in platform.sent] == [(1, 1), (2, 2)]


def test_without_capacity_anywhere_it_ends(tmp_path: Path) -> None:
    run, platform = begun(tmp_path, *[failed("capacity")] * 3, gpu=["H100:8", "A100:8"])
    assert waited(run)["category"] == "capacity"
    assert len(platform.sent) == 1


@pytest.mark.parametrize("retries", [0, 2])
def test_a_list_that_the_platform_went_through_is_not_gone_through_again(retries: int, tmp_path: Path) -> None:
    """A retry requests the whole list again, not only its rest."""
    ends = [failed("capacity")] * 4
    run, platform = begun(tmp_path, *ends, chooses=True, gpu=["H100:8", "A100:8"], retries=retries)
    assert waited(run)["category"] == "capacity"
    assert [(r.attempt, r.gpu_index) for r in platform.sent] == [(k + 1, 0) for k in range(retries)]


def test_a_list_with_a_gpu_without_quota_is_tried_from_the_next_on(tmp_path: Path) -> None:
    run, platform = begun(tmp_path, failed("quota"), DONE, chooses=True, gpu=["H100:8", "A100:8"])
    assert waited(run)["state"] == "succeeded"
    assert [(r.attempt, r.gpu_index) for r in platform.sent] == [(1, 1)]


def test_going_through_the_list_takes_no_retry_away(tmp_path: Path) -> None:
    run, platform = begun(tmp_path, *[failed("capacity")] * 9, gpu=["H100:8", "A100:8"], retries=2)
    assert waited(run)["category"] == "capacity"
    assert [r.gpu_index for r in platform.sent] == [1, 0, 1, 0, 1]


def test_every_gpu_is_asked_for_before_fewer_nodes_and_neither_takes_a_retry(tmp_path: Path) -> None:
    ends = [*[failed("capacity")] * 3, failed("preempted"), *[failed("capacity")] * 9]
    run, platform = begun(tmp_path, *ends, gpu=["H100:8", "A100:8"], instance_count="2:4", retries=1)
    assert waited(run)["category"] == "capacity"
    first = [(4, 1), (2, 0), (2, 1)]  # the first request was for (4, 0)
    # The one retry follows the preemption, with all nodes and the GPU that the run had; then without machines again.
    again = [(4, 1), (2, 0), (2, 1)]
    assert [(r.context["nodes"], r.gpu_index) for r in platform.sent] == [*first, *again]


def test_without_capacity_fewer_nodes_are_asked_for_and_all_again_after_them(tmp_path: Path) -> None:
    ends = [failed("preempted"), failed("capacity"), failed("preempted", "y"), DONE]
    run, platform = begun(tmp_path, *ends, instance_count="2:4", retries=2, max_gpu_hours=9)
    result = waited(run)
    assert result["state"] == "succeeded"
    assert [(r.context["nodes"], r.context["planned_nodes"]) for r in platform.sent] == [(4, 4), (2, 4), (4, 4)]
    assert [row["nodes"] for row in result["attempts"]] == [4, 4, 2, 4]
    assert run.store.attempt_request("r", 2) == platform.sent[1]


def of_ranks(store: Path, run_id: str, nodes: int | None) -> None:
    """Write a run ``run_id`` with a checkpoint of a file for each of 4 ranks."""
    folder = store / f"runs/{run_id}/live/checkpoints/step-3/0.0-1"
    files = {f"node-{node}/step-3/rank_{node}.pt": {"size": 1, "sha256": "0"} for node in range(4)}
    for name in files:
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_bytes(b"x")
    known = {"run_nodes": nodes} if nodes else {}
    commit = {"protocol": 1, "name": "step-3", "attempt": "0.0", "seq": 1, "time": 1.0, "files": files, **known}
    (folder / "commit.json").write_text(json.dumps(commit))


def test_a_checkpoint_of_single_ranks_keeps_its_number_of_nodes(tmp_path: Path) -> None:
    run, platform = begun(tmp_path, failed("capacity"), failed("capacity"), instance_count="2:4")
    of_ranks(tmp_path, "r", 4)
    messages: list[str] = []
    assert run.wait(retry=Retry(run, messages.append))["category"] == "capacity"
    assert platform.sent == []
    why = "checkpoint step-3 has files of single ranks (step-3/rank_0.pt), so it needs 4 nodes again"
    assert messages == [f"no further attempt: {why}"]


@pytest.mark.parametrize("there", ["runs/other/live/checkpoints", "runs/other/live/checkpoints/step-3", "own", "gone"])
@pytest.mark.parametrize("store", ["the same store", "another store"])
def test_a_given_checkpoint_of_single_ranks_keeps_its_number_of_nodes(store: str, there: str, tmp_path: Path) -> None:
    """Until the run has its own checkpoint, ``resume_from`` decides: another run, or a user's folder."""
    place = tmp_path / ("here" if store == "the same store" else "there")
    of_ranks(place, "other", 4)
    (place / "own").mkdir()
    (place / "own/rank_0.pt").write_bytes(b"x")
    layout = {"resume": (place / there).as_uri()}
    ends = [failed("capacity"), failed("capacity")]
    run, platform = begun(tmp_path / "here", *ends, layout=layout, instance_count="2:4")
    messages: list[str] = []
    assert run.wait(retry=Retry(run, messages.append))["category"] == "capacity"
    assert platform.sent == []
    unknown = "and does not say how many nodes wrote it, so it needs 4 nodes"
    why = {
        "own": f"checkpoint own has files of single ranks (rank_0.pt), {unknown}",
        "gone": f"resume_from: nothing at {place.as_uri()}/gone, so it needs 4 nodes",
    }
    of_run = "checkpoint step-3 has files of single ranks (step-3/rank_0.pt), so it needs 4 nodes again"
    assert messages == [f"no further attempt: {why.get(there, of_run)}"]


def test_a_given_checkpoint_that_cannot_be_read_keeps_the_number_of_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a failed attempt reads it: an unreachable store does not change how a run ends."""
    read: list[str] = []

    def away(_: Any, root: str) -> Any:
        read.append(root)
        raise StorageError("there: the bucket or container does not exist")

    monkeypatch.setattr(resume_nodes, "_newest_in", away)
    layout = {"resume": (tmp_path / "there/own").as_uri()}
    run, platform = begun(tmp_path / "a", failed("capacity"), layout=layout, instance_count="2:4")
    messages: list[str] = []
    assert run.wait(retry=Retry(run, messages.append))["category"] == "capacity"
    assert platform.sent == []
    why = "resume_from: there: the bucket or container does not exist, so it needs 4 nodes"
    assert messages == [f"no further attempt: {why}"]
    read.clear()
    run, _ = begun(tmp_path / "b", DONE, layout=layout, instance_count="2:4")
    assert waited(run)["state"] == "succeeded"
    assert read == []


def test_a_given_checkpoint_may_be_a_whole_bucket() -> None:
    tree = files("memory://given-bucket")
    tree.write("rank_0.pt", b"x")
    store = Store(url="memory://store")
    found = resume_nodes.nodes_that_restore(None, tree.url, (4, 3), store=store, settings=NO_SETTINGS)
    unknown = "and does not say how many nodes wrote it, so it needs 4 nodes"
    assert found == ((4,), f"checkpoint given-bucket has files of single ranks (rank_0.pt), {unknown}")


def test_limits_are_sums_over_attempts(tmp_path: Path) -> None:
    ends = [failed("infra", "a", seconds=400, usd=3.0), failed("infra", "b", seconds=500, usd=2.0), DONE]
    run, platform = begun(tmp_path, *ends, retries=5, max_runtime=1000, max_cost=10)
    waited(run)
    assert [dict(r.body) for r in platform.sent] == [
        {"max_runtime": 600, "max_cost": 7.0},
        {"max_runtime": 100, "max_cost": 5.0},
    ]


@pytest.mark.parametrize("limit", [{"max_runtime": 100}, {"max_cost": 3.0}])
def test_a_limit_that_is_used_up_is_the_end(limit: dict[str, Any], tmp_path: Path) -> None:
    run, platform = begun(tmp_path, failed("infra", usd=3.0), retries=5, **limit)
    assert waited(run)["state"] == "failed"
    assert platform.sent == []


def test_what_a_client_recorded_and_never_sent_is_sent_by_the_next(tmp_path: Path) -> None:
    run, platform = begun(tmp_path, failed("infra"), DONE, retries=1)
    request = platform.plan(run.job, Layout.from_dict(run.record["layout"]), attempt=1)
    run.store.create_attempt("r", 1, request)
    assert run.status().state == "pending"
    assert waited(run)["state"] == "succeeded"
    assert platform.sent == [request]


def test_nothing_is_sent_of_a_cancelled_run(tmp_path: Path) -> None:
    run, platform = begun(tmp_path, failed("infra"), DONE, retries=1)
    run.store.create_attempt("r", 1, platform.plan(run.job, Layout.from_dict(run.record["layout"]), attempt=1))
    run.store.cancel("r")
    waited(run)
    assert platform.sent == []


def rivalled(tmp_path: Path, rival: Callable[[Run, Platform, Request], None]) -> tuple[Run, Platform, Clock, Retry]:
    """Return a client that waits while attempt 0 fails and ``rival`` has recorded attempt 1, with its platform and
    clock."""
    begin, platform = begun(tmp_path, failed("infra"), DONE, retries=1)
    clock = Clock()
    run = Run(store=begin.store, run_id="r", provider=platform, clock=clock, sleep=clock.sleep)  # type: ignore[arg-type]
    retry, ask = Retry(run), platform.status

    def status(native_id: str) -> Status:
        request = platform.plan(run.job, Layout.from_dict(run.record["layout"]), attempt=1)
        run.store.create_attempt("r", 1, request)
        rival(run, platform, request)
        return ask(native_id)

    platform.status = status  # type: ignore[method-assign]
    return run, platform, clock, retry


def test_what_a_rival_recorded_who_died_is_sent_by_whoever_waits(tmp_path: Path) -> None:
    run, platform, clock, retry = rivalled(tmp_path, lambda *_: None)
    assert run.wait(retry=retry, poll=5.0, timeout=600.0)["state"] == "succeeded"
    assert [r.attempt for r in platform.sent] == [1]
    assert CLIENT_TIMINGS.unsent <= clock.now <= CLIENT_TIMINGS.unsent + 30


@pytest.mark.slow
def test_a_platform_that_is_silent_just_then_gets_the_next_attempt_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cloudtrain.runs.deliver.patiently", lambda call: call())
    begin, platform = begun(tmp_path, failed("infra"), DONE, retries=1)
    clock, said = Clock(), list[str]()
    run = Run(store=begin.store, run_id="r", provider=platform, clock=clock, sleep=clock.sleep)  # type: ignore[arg-type]
    platform.failing = 2  # the first, and when it is sent again
    assert run.wait(retry=Retry(run, said.append), poll=5.0, timeout=900.0)["state"] == "succeeded"
    assert [r.attempt for r in platform.sent] == [1]
    assert "attempt 1 could not be sent yet: not now" in said


def test_a_rival_that_is_slow_is_waited_for(tmp_path: Path) -> None:
    def slow(run: Run, platform: Platform, request: Request) -> None:
        if clock.now > CLIENT_TIMINGS.unsent / 2 and not platform.sent:
            run.store.write_submitted("r", 1, platform.submit(request))

    run, platform, clock, retry = rivalled(tmp_path, slow)
    assert run.wait(retry=retry, poll=5.0, timeout=600.0)["state"] == "succeeded"
    assert [r.attempt for r in platform.sent] == [1]
    assert clock.now < CLIENT_TIMINGS.unsent


def test_a_cancelled_run_gets_nothing_of_a_rival_sent(tmp_path: Path) -> None:
    def cancels(run: Run, platform: Platform, request: Request) -> None:
        if clock.now > CLIENT_TIMINGS.unsent / 2:
            run.store.cancel("r")

    run, platform, clock, retry = rivalled(tmp_path, cancels)
    assert run.wait(retry=retry, poll=5.0, timeout=600.0)["state"] in ("failed", "cancelled")
    retry.resend(1, clock.now)
    retry.resend(1, clock.now + CLIENT_TIMINGS.unsent)
    assert platform.sent == []


# ------------------------------------------------------------------------------------------------------------- patience


class Clock:
    """A clock that only sleep moves."""

    now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_a_call_is_made_again_until_it_is_answered() -> None:
    clock, platform = Clock(), Platform([DONE], failing=5)
    request = Request(provider="memory", operation="o", body={}, context={}, run="r")
    assert patiently(lambda: platform.submit(request), clock=clock, sleep=clock.sleep) == "0"
    assert 0 < clock.now < 60


def test_patience_ends() -> None:
    clock, platform = Clock(), Platform([DONE], failing=1000)
    request = Request(provider="memory", operation="o", body={}, context={}, run="r")
    with pytest.raises(LostContactError):
        patiently(lambda: platform.submit(request), clock=clock, sleep=clock.sleep)
    assert 30 < clock.now <= 60


def test_a_user_sees_that_a_call_is_made_again() -> None:
    clock, lines = Clock(), list[str]()

    def silent() -> str:
        raise LostContactError("ssh login: Could not resolve hostname login")

    with report_retries(lines.append), pytest.raises(LostContactError):
        patiently(silent, clock=clock, sleep=clock.sleep)
    assert len(lines) == 1
    assert re.fullmatch("ssh login: Could not resolve hostname login; trying again for up to 5[0-9] s", lines[0])


def test_what_does_not_pass_is_not_waited_for() -> None:
    clock = Clock()

    def elsewhere() -> str:
        raise LostContactError("this run is on another machine", passing=False)

    with pytest.raises(LostContactError):
        patiently(elsewhere, clock=clock, sleep=clock.sleep)
    assert clock.now == 0


# ------------------------------------------------------------------------------------------ other clients, and refusals


class Refusing(Platform):
    """A platform that refuses some attempts; the context holds the gpu_index."""

    refusals: ClassVar[dict[int, Exception]] = {}

    def plan(self, job: Job, layout: Layout, attempt: int = 0, gpu_index: int = 0) -> Request:
        return replace(super().plan(job, layout, attempt, gpu_index), context={"gpu_index": gpu_index})

    def submit(self, request: Request, secrets: Mapping[str, str] | None = None) -> str:
        if request.attempt in self.refusals:
            raise self.refusals[request.attempt]
        return super().submit(request, secrets)


def refusing(run: Run, platform: Platform, **refusals: Exception) -> Platform:
    platform.__class__ = Refusing
    Refusing.refusals = {int(name[1:]): exc for name, exc in refusals.items()}
    return platform


def test_the_next_gpu_gets_a_context_of_its_own(tmp_path: Path) -> None:
    run, platform = begun(tmp_path, failed("capacity"), DONE, gpu=["H100:8", "A10G:4"])
    refusing(run, platform)
    assert waited(run)["state"] == "succeeded"
    assert json.loads((tmp_path / "runs/r/container/context.json").read_bytes()) == {"gpu_index": 1}


def test_a_quota_of_nothing_for_one_gpu_leads_to_the_next(tmp_path: Path) -> None:
    run, platform = begun(tmp_path, failed("capacity"), DONE, DONE, gpu=["H100:8", "A100:8", "L4:8"])
    refusing(run, platform, a1=QuotaError("the quota is 0"))
    assert waited(run)["state"] == "succeeded"
    assert [(r.attempt, r.gpu_index) for r in platform.sent] == [(2, 2)]


@pytest.mark.parametrize("limit", [{"max_gpu_hours": 4}, {"max_cost": 100}])
def test_where_all_was_refused_nothing_is_spent(limit: dict[str, Any], tmp_path: Path) -> None:
    run, platform = begun(tmp_path, DONE, DONE, gpu=["H100:8", "A10G:4"], **limit)
    (tmp_path / "runs/r/attempts/0/submitted.json").unlink()
    run.store.write_refused("r", 0, category="capacity", reason="there is none")
    assert waited(run)["state"] == "succeeded"
    assert [(r.attempt, r.gpu_index) for r in platform.sent] == [(1, 1)]


@pytest.mark.parametrize(
    ("exc", "category"), [(QuotaError("no"), "quota"), (SpecError("no"), "spec"), (PlatformError("no"), "infra")]
)
def test_an_attempt_that_is_refused_is_the_end_and_is_told(tmp_path: Path, exc: Exception, category: str) -> None:
    run, platform = begun(tmp_path, failed("capacity"), DONE, gpu=["H100:8", "A100:8"])
    refusing(run, platform, a1=exc)
    result = waited(run)
    assert (result["state"], result["category"]) == ("failed", category)
    assert result["reason"] == "attempt 1 was refused: no"
    assert run.status().state == "failed"
    assert waited(run) == result


def goes_on_meanwhile(run: Run, platform: Any, then: Callable[[], object] = lambda: None) -> None:
    """Let another client send attempt 1 and do ``then``, while the first answer about attempt 0 is on its way."""
    ask = platform.status

    def slow(native_id: str) -> Status:
        status: Status = ask(native_id)
        if not platform.sent:
            request = platform.plan(run.job, Layout.from_dict(run.record["layout"]), attempt=1)
            assert run.store.create_attempt("r", 1, request)
            run.store.write_submitted("r", 1, platform.submit(request))
            then()
        return status

    platform.status = slow


def test_whoever_looks_while_another_starts_an_attempt_ends_nothing(tmp_path: Path) -> None:
    """Its answer was about attempt 0. Attempt 1 runs by now."""
    run, platform = begun(tmp_path, failed("infra", "a"), Status(state="running"), retries=1)
    goes_on_meanwhile(run, platform)
    run.result()
    assert run.store.result("r") is None
    assert Retry(run)({"category": "infra", "native_id": "0", "attempts": [], "state": "failed"}) is True
    assert len(platform.sent) == 1


def test_who_looked_before_another_attempt_was_sent_and_cancelled_closes_nothing(tmp_path: Path) -> None:
    """The answer was about attempt 0. Attempt 1 was sent since then, and the user has cancelled it."""
    run, platform = begun(tmp_path, failed("infra", "a"), Status(state="cancelled"), retries=1)
    goes_on_meanwhile(run, platform, then=lambda: run.store.cancel("r"))
    result = waited(run)
    assert (result["state"], result["native_id"]) == ("cancelled", "1")
    assert run.store.result("r") == {**result, "name": "train", "created": None}


def test_two_who_know_different_things_of_an_end_judge_alike(tmp_path: Path) -> None:
    """One client saw the nodes' report on the previous attempt and recorded it. The other gets it late."""
    run, platform = begun(tmp_path, failed("user_error", "boom"), failed("infra", "gone"), DONE, retries=5)
    ask = platform.status

    def noted(native_id: str) -> Status:
        if native_id == "1":
            run.store.write_ended("r", 1, run.store.ended("r", 0) or {})
        return ask(native_id)

    platform.status = noted  # type: ignore[method-assign]
    assert waited(run)["state"] == "failed"
    assert [r.attempt for r in platform.sent] == [1]


def test_nothing_follows_a_result(tmp_path: Path) -> None:
    run, platform = begun(tmp_path, failed("infra"), DONE, retries=1)
    retry, result = Retry(run), run._current_result()
    run.store.write_result("r", {**result, "reason": "another client found that nothing may follow"})
    assert retry(result) is True
    assert platform.sent == []
    assert waited(run)["reason"] == "another client found that nothing may follow"


def test_what_is_cancelled_while_it_is_recorded_is_not_sent(tmp_path: Path) -> None:
    run, platform = begun(tmp_path, failed("infra"), DONE, retries=1)
    create = run.store.create_attempt

    def cancelled(*args: Any) -> bool:
        run.store.cancel("r")
        return create(*args)

    run.store.create_attempt = cancelled  # type: ignore[method-assign]
    assert waited(run)["state"] == "failed"
    assert platform.sent == []


@pytest.mark.slow
def test_what_is_cancelled_while_the_platform_is_silent_is_not_sent_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "cloudtrain.runs.deliver.patiently", lambda call: patiently(call, sleep=lambda _: run.store.cancel("r"))
    )
    run, platform = begun(tmp_path, failed("infra"), DONE, retries=1)
    platform.failing = 1
    assert waited(run)["state"] == "failed"
    assert (platform.sent, platform.failing, run.store.cancelled("r")) == ([], 0, True)


def test_what_is_not_known_of_the_cost_is_said(tmp_path: Path) -> None:
    run, platform = begun(tmp_path, failed("infra"), DONE, retries=1, max_cost=5)
    messages: list[str] = []
    run.wait(retry=Retry(run, messages.append))
    assert messages == ["no further attempt: the use so far is unknown, so the rest of max_cost cannot be computed"]
    assert platform.sent == []
