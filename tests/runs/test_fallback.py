"""Fallback for lack of machines: in order, never two jobs alive, with any number of clients that die anywhere. These
tests run on foldercloud, so that a trial takes milliseconds. `providers/test_fallback_wire.py` has the clouds."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from functools import cache
from pathlib import Path
from typing import Any

import foldercloud
import pytest
import tomli_w
from earlier import Ran, recorded_with_lists
from foldercloud import NAME, Provider
from store_times import date_back

from cloudtrain import cli
from cloudtrain.cli.watch import Watch
from cloudtrain.errors import (
    AuthError,
    CapacityError,
    CloudtrainError,
    ConflictError,
    LostContactError,
    QuotaError,
    SpecError,
    StorageError,
)
from cloudtrain.estimator import Estimator
from cloudtrain.provider_api.checks import Check, failed, ok
from cloudtrain.provider_api.protocol import Layout, ProviderExtras
from cloudtrain.runs import deliver, handover, retry
from cloudtrain.runs.reconcile import reconcile
from cloudtrain.runs.retry import Retry
from cloudtrain.runs.run import Run
from cloudtrain.runs.submit import Plan, load_plan
from cloudtrain.settings.settings import Settings
from cloudtrain.storage import lease
from cloudtrain.storage.files import LocalFiles, parallel
from cloudtrain.storage.timings import CLIENT_TIMINGS
from cloudtrain.store import runtime_zip
from cloudtrain.store.store import Store

built = cache(runtime_zip.build)
"""Built once: its duration is no part of these trials."""
TRIALS = int(os.environ.get("CLOUDTRAIN_TRIALS") or 0)
SEED = os.environ.get("CLOUDTRAIN_SEED") or "0"
NONE = {"state": "failed", "category": "capacity", "reason": "no machines came"}


class Places:
    """Several profiles of the platform, each with a store, and their clients."""

    def __init__(self, folder: Path, count: int = 2) -> None:
        self.folder = folder
        self.code = folder / "code"
        self.code.mkdir(parents=True)
        (self.code / "train.py").write_text("print('hello')\n")
        self.clouds = [Provider(folder=str(folder / f"cloud-{n}")) for n in range(count)]
        self.stores = [Store(str(folder / f"store-{n}")) for n in range(count)]
        for cloud in self.clouds:
            Path(cloud.settings.folder).mkdir()
        self.write()

    def write(self, **first: Any) -> None:
        """Write the settings of this folder: the first provider, and a profile for each other one."""
        profiles = {f"p{n}": {"store": self.stores[n].url, NAME: {"folder": self.clouds[n].settings.folder}}
                    for n in range(len(self.stores))}  # fmt: skip
        data = {"provider": NAME, "fallback": list(profiles)[1:], **profiles.pop("p0"), "profiles": profiles, **first}
        Path("cloudtrain.toml").write_text(tomli_w.dumps(data))

    def estimator(self, **fields: Any) -> Estimator:
        return Estimator(entry_point="train.py", source_dir=self.code, **{"max_runtime": 600, **fields})

    def submit(self, **fields: Any) -> Run:
        return self.estimator(**fields).fit(wait=False, run_id="r")

    def attach(self, place: int = 0) -> Run:
        return Estimator.attach(f"{self.stores[place].url}/runs/r")

    def reconcile(self) -> list[dict[str, Any]]:
        url = self.stores[0].url
        return reconcile(f"{url}/runs/r", settings=Settings(), cwd=self.folder, environ={})

    def jobs(self) -> list[list[str]]:
        return [cloud.jobs() for cloud in self.clouds]

    def alive(self) -> list[int]:
        return [place for place, cloud in enumerate(self.clouds) for _ in cloud.alive()]

    def long_ago(self, place: int = 0) -> None:
        """Date the submission of its job two days back."""
        date_back(self.stores[place].files, "runs/r/attempts/0/submitted.json", 2 * 86400)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    foldercloud.install(tmp_path / "site")
    (tmp_path / "site/foldercloud.py").unlink()  # the module comes from this process
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setattr(runtime_zip, "build", built)
    monkeypatch.setattr(ProviderExtras, "arrival_s", 0.05)  # for a job of this platform, which is a file
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def places(tmp_path: Path, installed: None) -> Places:
    return Places(tmp_path / "places")


# ---------------------------------------------------------------------------------------------------- what is moved for


@pytest.mark.costly
def test_the_first_that_has_machines_gets_the_job_and_the_others_get_nothing(places: Places) -> None:
    run = places.submit()
    assert places.jobs() == [["r.0"], []]
    assert run.url == f"{places.stores[0].url}/runs/r"
    assert not (places.folder / "store-1").exists()
    assert "refusals" not in run.result()


def test_who_watches_goes_along(places: Places) -> None:
    """The watcher follows the run to its next provider until it ends, and shows its files."""
    run, pictures = places.submit(), list[Any]()

    def seen(picture: Any) -> None:
        pictures.append(picture)
        if len(pictures) == 1:
            places.clouds[0].stand("r.0", state="failed", category="capacity")
            places.reconcile()
            places.clouds[1].stand("r.0", state="running")
            places.stores[1].files.write("runs/r/live/metrics/0.0-node-0.jsonl", b'{"step": 1, "loss": 2.0}\n')
        elif picture.status.state == "running" and picture.measured.step == 1:
            places.clouds[1].stand("r.0", state="succeeded")

    now = [0.0]
    last = Watch(run, clock=lambda: now[0], sleep=lambda s: now.__setitem__(0, now[0] + s), on_picture=seen).watch()
    assert last.result is not None
    assert (last.result["state"], last.result["run"]) == ("succeeded", f"{places.stores[1].url}/runs/r")


@pytest.mark.parametrize("verb", ["logs", "pull"])
def test_who_follows_goes_along(places: Places, tmp_path: Path, verb: str) -> None:
    """Also if it sees the end of the first place before another client moves the run."""
    places.submit()
    places.clouds[0].stand("r.0", state="failed", category="capacity")

    def sleep(seconds: float) -> None:
        if not places.clouds[1].jobs():
            places.reconcile()
            places.stores[1].files.write("runs/r/live/logs/0.0/node-0/1.log", b"[a0.0 n0 r0 #1] hello\n")
            places.clouds[1].stand("r.0", state="succeeded")

    attached = places.attach()
    run = Run(store=attached.store, run_id="r", provider=attached.provider, sleep=sleep, settings=attached._settings)
    if verb == "logs":
        assert [line.text for line in run.logs(follow=True)] == ["hello"]
    else:
        run.pull(tmp_path / "out", follow=True)
        assert (tmp_path / "out/logs/0.0/node-0.log").read_text() == "[a0.0 n0 r0 #1] hello\n"
        assert json.loads((tmp_path / "out/result.json").read_text())["state"] == "succeeded"


@pytest.mark.costly
@pytest.mark.parametrize("verb", ["logs", "pull"])
def test_a_follower_waits_while_another_client_copies_data_to_the_next_place(
    places: Places, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    """The copy takes half an hour of the follower's clock."""
    places.submit()
    places.clouds[0].stand("r.0", state="failed", category="capacity")
    monkeypatch.setattr(lease, "_RENEWED", 30_000)
    send, copied, now, files = retry.send_plan, threading.Event(), [time.time()], places.stores[0].files

    def slowly(plan: Plan, **given: Any) -> Run:
        assert copied.wait(30)
        return send(plan, **given)

    monkeypatch.setattr(retry, "send_plan", slowly)
    mover = threading.Thread(target=places.reconcile)

    def marks() -> list[bytes]:
        return [
            found.data for key in files.entries("runs/r/moving") if (found := lease.load_lease(files, key)) is not None
        ]

    def sleep(seconds: float) -> None:
        before, began, deadline = marks(), now[0], time.monotonic() + 30
        if mover.ident is None:
            mover.start()
        while not copied.is_set() and marks() in ([], before):  # the mover is alive
            assert time.monotonic() < deadline
            time.sleep(0.002)
        now[0] = began + max(20.0, seconds)
        if now[0] - start > 1800 and not copied.is_set():
            copied.set()
            mover.join()
            places.stores[1].files.write("runs/r/live/logs/0.0/node-0/1.log", b"[a0.0 n0 r0 #1] hello\n")
            places.clouds[1].stand("r.0", state="succeeded")

    start, attached = now[0], places.attach()
    run = Run(
        store=attached.store, run_id="r", provider=attached.provider, clock=lambda: now[0], sleep=sleep,
        settings=attached._settings,
    )  # fmt: skip
    if verb == "logs":
        assert [line.text for line in run.logs(follow=True)] == ["hello"]
    else:
        run.pull(tmp_path / "out", follow=True)
        assert json.loads((tmp_path / "out/result.json").read_text())["state"] == "succeeded"
    assert [json.loads(data)["holder"] for data in marks()] == [""]


def test_a_follower_gives_up_a_client_that_died_as_it_moved_the_run(places: Places) -> None:
    places.submit()
    places.clouds[0].stand("r.0", state="failed", category="capacity")
    attached, now = places.attach(), [time.time()]
    with handover.moving(attached.store, "r") as mark:
        mark.kept = True
    start = now[0]
    run = Run(
        store=attached.store, run_id="r", provider=attached.provider, clock=lambda: now[0],
        sleep=lambda seconds: now.__setitem__(0, now[0] + 5), settings=attached._settings,
    )  # fmt: skip
    assert list(run.logs(follow=True)) == []
    assert 300 <= now[0] - start < 500


@pytest.mark.parametrize("verb", ["logs", "pull"])
def test_a_handle_from_before_the_move_reads_the_newest_place(places: Places, tmp_path: Path, verb: str) -> None:
    run = places.submit()
    places.clouds[0].stand("r.0", state="failed", category="capacity")
    places.reconcile()
    places.stores[1].files.write("runs/r/live/logs/0.0/node-0/1.log", b"[a0.0 n0 r0 #1] hello\n")
    if verb == "logs":
        assert [line.text for line in run.logs()] == ["hello"]
    else:
        assert "logs/0.0/node-0.log" in run.pull(tmp_path / "out").files


@pytest.mark.parametrize("category", ["quota", "capacity"])
def test_a_refusal_at_create_leads_to_the_next_place(places: Places, category: str) -> None:
    places.clouds[0].refuse(category, "the quota of X is 0")
    run = places.submit()
    assert places.jobs() == [[], ["r.0"]]
    assert run.url == f"{places.stores[1].url}/runs/r"
    (refusal,) = run.result()["refusals"]
    assert refusal == {
        "run": f"{places.stores[0].url}/runs/r", "provider": NAME, "place": places.clouds[0].settings.folder,
        "gpu": None, "category": category, "reason": "the quota of X is 0",
    }  # fmt: skip
    places.clouds[1].stand("r.0", state="succeeded")
    result = run.wait(retry=Retry(run))
    assert (result["state"], result["refusals"]) == ("succeeded", [refusal])
    left = places.stores[0].result("r")
    assert left is not None
    assert (left["state"], left["category"]) == ("failed", category)
    assert run.url in left["reason"]


def test_what_waits_for_machines_too_long_is_cancelled_for_certain_and_goes_on(places: Places) -> None:
    run = places.submit(max_wait=3600)
    assert Retry(run)(run.result()) is False
    places.long_ago()
    messages: list[str] = []
    run = places.attach()
    result = run.reconcile(retry=Retry(run, messages.append))
    assert (result["state"], result["run"]) == ("pending", f"{places.stores[1].url}/runs/r")
    assert [cloud.status("r.0").state for cloud in places.clouds] == ["cancelled", "pending"]
    assert [item["reason"] for item in result["refusals"]] == ["no machines within max_wait (1h)"]
    assert any("no machines within max_wait (1h); continuing on" in text for text in messages)


def test_a_job_that_never_got_machines_goes_on_while_somebody_waits(places: Places) -> None:
    places.submit()
    run = places.attach()
    places.clouds[0].stand("r.0", **NONE)
    started = threading.Thread(target=lambda: places.clouds[1].stand("r.0", state="succeeded"))

    def looked(status: Any) -> None:
        if places.clouds[1].jobs() and not started.ident:
            started.start()

    looked.every = True  # type: ignore[attr-defined]
    result = run.wait(retry=Retry(run), on_status=looked, on_line=lambda line: None)
    started.join()
    assert (result["state"], result["run"]) == ("succeeded", f"{places.stores[1].url}/runs/r")


@pytest.mark.parametrize("category", ["user_error", "infra", "preempted", "timeout", "auth", "image", "oom"])
def test_nothing_else_leads_on(places: Places, category: str) -> None:
    run = places.submit()
    places.clouds[0].stand("r.0", **NONE | {"category": category})
    assert run.wait(retry=Retry(run))["category"] == category
    assert places.jobs() == [["r.0"], []]
    assert handover.next_of(places.stores[0], "r") is None


def test_a_request_that_is_wrong_leads_nowhere(places: Places) -> None:
    places.clouds[0].refuse("user_error", "the role is wrong")
    with pytest.raises(SpecError, match="the role is wrong"):
        places.submit()
    assert places.jobs() == [[], []]


@pytest.mark.parametrize("trace", ["live/attempts/0.0.json", "live/exit/0.0-node-0.json"])
def test_a_run_that_has_run_stays_where_its_checkpoints_are(places: Places, trace: str) -> None:
    run = places.submit()
    record = {"attempt": "0.0", "node": 0, "started": 1.0, "ended": 2.0, "outcome": "preempted"}
    places.stores[0].files.write(f"runs/r/{trace}", json.dumps(record).encode())
    places.clouds[0].stand("r.0", **NONE)
    assert run.wait(retry=Retry(run))["category"] == "capacity"
    assert places.jobs() == [["r.0"], []]


def test_what_the_platform_says_has_had_machines_stays(places: Places) -> None:
    run = places.submit(retries=0)
    places.clouds[0].stand("r.0", **NONE, started=1.0, finished=2.0)
    assert run.wait(retry=Retry(run))["category"] == "capacity"
    assert places.jobs() == [["r.0"], []]


def test_a_want_of_machines_of_which_no_attempt_tells_leads_on(places: Places) -> None:
    run = places.submit()
    row = {"number": "0.0", "category": "preempted", "reason": "it was taken"}
    places.clouds[0].stand("r.0", **NONE, attempts=[row])
    assert [item["reason"] for item in run.reconcile(retry=Retry(run))["refusals"]] == ["no machines came"]
    assert places.alive() == [1]


def test_retries_are_not_spent_where_there_are_no_machines(places: Places) -> None:
    places.clouds[0].refuse("capacity", "none")
    assert len(places.submit(retries=3).result()["refusals"]) == 1
    assert places.alive() == [1]


def accepted_but(monkeypatch: pytest.MonkeyPatch, error: CloudtrainError) -> None:
    """Let each submit create the job and then raise ``error``."""
    call = Provider.submit

    def submit(self: Provider, request: Any, secrets: Any = None) -> str:
        call(self, request, secrets)
        raise error

    monkeypatch.setattr(Provider, "submit", submit)


def test_a_create_that_may_have_come_leads_nowhere(places: Places) -> None:
    with pytest.MonkeyPatch.context() as patch:
        accepted_but(patch, LostContactError("no answer", passing=False))
        with pytest.raises(LostContactError):
            places.submit()
    assert places.submit().url.startswith(places.stores[0].url)
    assert places.jobs() == [["r.0"], []]


def test_a_refusal_of_what_lives_all_the_same_leads_nowhere(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first answer was lost. On the second call, that same job uses up the quota."""
    accepted_but(monkeypatch, QuotaError("the quota is used up"))
    run = places.submit()
    assert run.status().state == "pending"
    assert places.jobs() == [["r.0"], []]


def test_where_nobody_has_machines_all_reasons_are_told(places: Places, capsys: pytest.CaptureFixture[str]) -> None:
    for number, cloud in enumerate(places.clouds):
        cloud.refuse("quota" if number else "capacity", f"nothing in {number}")
    with pytest.raises(QuotaError) as caught:
        places.submit()
    assert "nothing in 1" in str(caught.value)
    assert "nothing in 0" in str(caught.value)
    assert [item["category"] for item in caught.value.refusals] == ["capacity", "quota"]
    for place, state in ((0, "continued at"), (1, "refused: nothing in 1")):
        result = places.stores[place].result("r")
        assert result is not None
        assert (result["state"], result["native_id"], state in result["reason"]) == ("failed", None, True)
    places.clouds[1].refuse()  # there is room by now, but the run was reported as final
    with pytest.raises(QuotaError, match="nothing in 1") as caught:
        places.submit()
    assert caught.value.hint == "run r is over; to send the job again, choose another --run-id"
    assert places.attach().wait(timeout=5)["category"] == "quota"
    assert places.jobs() == [[], []]


def test_gpus_first_then_places(places: Places) -> None:
    for gpu_index in range(2):
        places.clouds[0].refuse("quota", f"no GPU {gpu_index}", gpu_index=gpu_index)
    places.clouds[1].refuse("capacity", "none here", gpu_index=0)
    run = places.submit(gpu=["H100:8", "A100:8"])
    assert [(item["gpu"], item["reason"]) for item in run.result()["refusals"]] == [
        ("H100:8", "no GPU 0"),
        ("A100:8", "no GPU 1"),
        ("H100:8", "none here"),
    ]
    assert places.jobs() == [[], ["r.1"]]
    again = places.submit(gpu=["H100:8", "A100:8"])
    assert (again.url, places.jobs()) == (run.url, [[], ["r.1"]])


def test_one_place_whose_first_gpu_is_refused_gets_the_second(tmp_path: Path, installed: None) -> None:
    places = Places(tmp_path / "one", count=1)
    places.clouds[0].refuse("quota", "no H100")
    run = places.submit(gpu=["H100:8", "A100:8"])
    assert places.jobs() == [["r.1"]]
    assert [item["gpu"] for item in run.result()["refusals"]] == ["H100:8"]


def test_where_every_gpu_was_refused_the_run_is_over(tmp_path: Path, installed: None) -> None:
    places = Places(tmp_path / "one", count=1)
    places.clouds[0].refuse("quota", "no H100")
    places.clouds[0].refuse("capacity", "no A100 either", gpu_index=1)
    for hint in ("", "run r is over; to send the job again, choose another --run-id"):
        with pytest.raises(CapacityError, match=r"no A100 either .before that, .*no H100") as caught:
            places.submit(gpu=["H100:8", "A100:8"])
        assert caught.value.hint == hint
        if not hint:
            places.clouds[0].refuse(gpu_index=1)  # there is room by now
    result = places.attach().wait(timeout=5)
    assert (result["state"], result["category"], result["exit_code"]) == ("failed", "capacity", 4)
    assert [item["gpu"] for item in result["refusals"]] == ["H100:8", "A100:8"]
    assert places.jobs() == [[]]


def test_the_id_of_a_run_to_resume_from_means_one_of_the_first_place_s_store(places: Places) -> None:
    Ran(places.stores[0].url, "old").save(6)
    places.clouds[0].refuse("quota", "no more")
    run = places.submit(resume_from="old")
    assert run.record["layout"]["resume"] == f"{places.stores[0].url}/runs/old/live/checkpoints"
    assert places.alive() == [1]
    assert places.submit(resume_from="old").url == run.url


def ran_elsewhere(places: Places) -> tuple[str, dict[str, bytes]]:
    """Return the URL of a run ``old`` that moved to the second provider, and its checkpoint there."""
    places.clouds[0].refuse("quota", "no more")
    url = places.estimator().fit(wait=False, run_id="old").url
    assert url == f"{places.stores[1].url}/runs/old"
    saved = Ran(places.stores[1].url, "old").save(6)
    places.clouds[1].stand("old.0", state="succeeded")
    places.clouds[0].refuse()
    return url, saved


NAMES: list[Callable[[Places], str]] = [
    lambda places: "old",
    lambda places: f"{places.stores[0].url}/runs/old",
    lambda places: f"{places.stores[1].url}/runs/old",
    lambda places: str(places.folder / "store-0/runs/old/live/checkpoints"),
]


@pytest.mark.parametrize("named", NAMES, ids=["id", "first", "second", "folder"])
def test_a_run_that_has_moved_is_resumed_from_where_it_ended_up(
    places: Places, named: Callable[[Places], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, saved = ran_elsewhere(places)
    there = f"{url}/live/checkpoints"
    estimator = places.estimator(resume_from=named(places))
    plan = estimator.plan()
    assert [item.layout.resume for item in (plan, *plan.fallbacks.further)] == [there] * 2
    assert places.submit(resume_from=named(places)).record["layout"]["resume"] == there
    monkeypatch.setattr(Provider, "schemes", frozenset({"gs"}))
    plan = estimator.plan()
    assert (plan.layout.resume_source, plan.fallbacks.further[0].layout.resume) == (there, there)
    estimator.fit(wait=False, run_id="copied")
    assert copied(places, 0, "copied") == saved


def test_a_saved_plan_of_a_run_that_has_moved_since_is_refused_with_where_it_is(places: Places) -> None:
    old = places.estimator().fit(wait=False, run_id="old")
    (places.folder / "store-0/runs/old/live/checkpoints").mkdir(parents=True)
    saved = places.folder / "plan.json"
    saved.write_text(json.dumps(places.estimator(resume_from=old.url).plan(run_id="r").document()))
    load_plan(saved, settings=Settings(), cwd=places.folder)
    places.clouds[0].stand("old.0", **NONE)
    old.reconcile(retry=Retry(old))
    moved = r"^resume_from: \S+store-0/runs/old/\S+ continued at \S+store-1/runs/old/\S+\nhint: plan again"
    with pytest.raises(SpecError, match=moved):
        load_plan(saved, settings=Settings(), cwd=places.folder)


def test_a_gpu_that_the_provider_cannot_plan_follows_no_other(
    tmp_path: Path, installed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    places, plan = Places(tmp_path / "one", count=1), Provider.plan

    def planned(self: Provider, job: Any, layout: Layout, attempt: int = 0, gpu_index: int = 0) -> Any:
        if gpu_index:
            raise SpecError("there is no such GPU here")
        return plan(self, job, layout, attempt, gpu_index)

    monkeypatch.setattr(Provider, "plan", planned)
    places.clouds[0].refuse("quota", "no H100")
    for _ in range(2):  # the same command reports the same
        with pytest.raises(QuotaError, match="no H100"):
            places.submit(gpu=["H100:8", "A100:8"])


def silent_to(monkeypatch: pytest.MonkeyPatch, native: str) -> None:
    """Let the platform answer no request to create that job."""
    call = Provider.submit

    def submit(self: Provider, request: Any, secrets: Any = None) -> str:
        if request.body["job"] == native:
            raise LostContactError("no answer")
        return call(self, request, secrets)

    monkeypatch.setattr(Provider, "submit", submit)


def test_a_further_gpu_that_was_recorded_and_not_sent_is_sent_by_the_same_command(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    places.clouds[0].refuse("quota", "no H100")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deliver, "patiently", lambda call: call())
        silent_to(patch, "r.1")
        with pytest.raises(LostContactError, match="no answer"):
            places.submit(gpu=["H100:8", "A100:8"])
    assert places.stores[0].attempts("r") == [0, 1]
    places.submit(gpu=["H100:8", "A100:8"])
    assert places.jobs() == [["r.1"], []]


def test_who_waits_sends_a_further_gpu_whose_client_died(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    places.clouds[0].refuse("quota", "no H100")
    send = Retry.send
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deliver, "patiently", lambda call: call())
        silent_to(patch, "r.1")
        with pytest.raises(LostContactError):
            places.submit(gpu=["H100:8", "A100:8"])
    monkeypatch.setattr(Retry, "send", lambda self, number: None)  # another client is about to
    run = places.attach()
    waits = Retry(run)
    monkeypatch.setattr(Retry, "send", send)
    monkeypatch.setattr(CLIENT_TIMINGS, "unsent", 0.0)
    result = run.wait(retry=waits, on_status=lambda status: [
        places.clouds[0].stand("r.1", state="succeeded") for _ in places.jobs()[0]
    ], timeout=20)  # fmt: skip
    assert (result["state"], places.jobs()) == ("succeeded", [["r.1"], []])


def test_a_refusal_that_cannot_be_noted_is_what_submit_says(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    places.clouds[0].refuse("quota", "no H100")

    def full(*args: Any, **fields: Any) -> None:
        raise StorageError("the disk is full")

    monkeypatch.setattr(Store, "write_refused", full)
    with pytest.raises(QuotaError, match="no H100"):
        places.submit(gpu=["H100:8", "A100:8"])
    assert places.jobs() == [[], []]


# ------------------------------------------------------------------------------------------------------------ who leads


@pytest.mark.parametrize("argv", [["doctor", "--job", "--run-id", "no id"], ["rehearse", "train.py"]])
def test_a_verb_that_leaves_the_fallback_out_says_so(
    places: Places, argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(argv) == 2
    assert "the fallback is left out: p1\n" in capsys.readouterr().err
    assert cli.main([*argv, "--fallback="]) == 2
    assert "left out" not in capsys.readouterr().err


def test_submit_prints_a_warning_once_and_its_place_if_not_all_have_it(
    places: Places, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def found(plan: Plan) -> tuple[str, ...]:
        return ("of all", f"of {plan.settings.profile or 'the first'}")

    monkeypatch.setattr(Plan, "warnings", property(found))
    monkeypatch.setattr(Plan, "notes", property(lambda plan: ("a note",)))
    for argv in (["submit", "--detach"], ["plan"]):
        assert cli.main([argv[0], "train.py", "--source-dir", str(places.code), *argv[1:]]) == 0
        lines = capsys.readouterr().err.splitlines()
        warned = [line for line in lines if line.startswith("warning: ")]
        assert warned == ["warning: of all", f"warning: of the first ({NAME})", "warning: of p1 (p1)"]
        assert lines.count("note: a note") == (argv[0] == "submit")


def test_plan_prints_the_same_warning_of_two_places_once(places: Places, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "train.py", "--source-dir", str(places.code), "--", "{artefact_dir}"]) == 0
    assert capsys.readouterr().err.count("{artefact_dir} is not a placeholder") == 1


def test_the_doctor_checks_every_profile_and_prints_the_same_check_once(
    places: Places, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = (cloud.settings.folder for cloud in places.clouds)

    def checks(self: Provider, store: str, request: Any) -> Iterator[Check]:
        yield ok("sdk", "folders 1.0")
        role = failed("role", "there is none", fix="make it", code=AuthError.exit_code)
        yield role if self.settings.folder == second else ok("role", "it may write")

    monkeypatch.setattr(Provider, "checks", checks, raising=False)
    assert cli.main(["doctor"]) == AuthError.exit_code
    heads, names = list[str](), list[list[str]]()
    for line in capsys.readouterr().out.splitlines():
        if line.endswith(":"):
            heads.append(line)
            names.append([])
        elif "fix:" not in line:
            names[-1].append(line.split()[1])
    assert heads == [f"{NAME} {first}:", f"p1 {NAME} {second}:"]
    assert names == [["settings:", "plan:", "sdk:", "role:", "store:"], ["settings:", "role:", "store:"]]
    assert cli.main(["doctor", "--json"]) == AuthError.exit_code
    output = json.loads(capsys.readouterr().out)
    assert (output["provider"], output["place"], output["exit_code"]) == (NAME, first, AuthError.exit_code)
    (item,) = output["fallbacks"]
    assert (item["profile"], item["place"], item["exit_code"]) == ("p1", second, AuthError.exit_code)
    for found in (output, item):
        assert [row["name"] for row in found["checks"]] == ["settings", "plan", "sdk", "role", "store"], "each is whole"
    assert cli.main(["doctor", "--fallback", "p2", "--json"]) == 2
    output = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in output["checks"]] == ["settings"]
    assert "fallbacks" not in output


def test_any_handle_and_id_leads_to_the_newest(places: Places) -> None:
    early = places.submit()
    places.clouds[0].stand("r.0", **NONE)
    assert places.reconcile()[0]["run"] == f"{places.stores[1].url}/runs/r"
    assert early.status().state == "pending"
    assert early.url == places.attach().url == f"{places.stores[1].url}/runs/r"
    assert places.attach(1).result()["refusals"][0]["category"] == "capacity"
    early.cancel()
    assert places.alive() == []
    assert places.attach().result()["state"] == "cancelled"


def test_a_cancel_forbids_the_next_place(places: Places) -> None:
    run = places.submit(max_wait=3600)
    places.clouds[0].stand("r.0", **NONE)
    run.cancel()
    assert run.wait(retry=Retry(run))["category"] == "capacity"
    assert places.jobs() == [["r.0"], []]


def died_on_the_way(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    """Move the run to the second provider, and let the client die before it starts anything there."""

    def dies(*args: Any) -> None:
        raise Died

    places.submit()
    places.clouds[0].stand("r.0", **NONE)
    run = places.attach()
    onward = Retry(run)
    with monkeypatch.context() as patch:
        patch.setattr(Store, "create_attempt", dies)
        with pytest.raises(Died):
            run.reconcile(retry=onward)
    assert handover.next_of(places.stores[0], "r") is not None


def test_a_cancel_that_whoever_moved_it_did_not_pass_on_counts(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    died_on_the_way(places, monkeypatch)
    places.stores[0].cancel("r")
    assert places.reconcile()[0]["state"] == "cancelled"
    assert places.jobs() == [["r.0"], []]
    result = places.stores[0].result("r")
    assert result is not None, "every check still reads the previous store"
    assert result["state"] == "failed"


def test_who_may_only_read_is_told_how_a_run_stands_that_was_moved(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = places.submit()
    places.clouds[0].stand("r.0", **NONE)
    run.reconcile(retry=Retry(run))
    places.stores[0].files.remove("runs/r/result.json")

    def denied(*args: Any, **options: Any) -> None:
        raise AuthError("you may not write here")

    for name in ("write", "create", "upload"):
        monkeypatch.setattr(LocalFiles, name, denied)
    assert places.attach().status().state == "pending"


def test_without_the_code_whoever_attaches_brings_it_over(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    data = places.folder / "data.csv"
    data.write_text("1,2\n")
    foldercloud.Provider.schemes = frozenset({"gs"})  # type: ignore[misc]
    try:
        places.submit(inputs={"train": str(data)})
        data.unlink()
        (places.code / "train.py").unlink()
        announced: list[str] = []
        exists = LocalFiles.exists

        def looked(self: LocalFiles, key: str) -> bool:
            if key.startswith("data/manifests/"):
                announced.extend(places.stores[1].files.names("staging"))
            return exists(self, key)

        monkeypatch.setattr(LocalFiles, "exists", looked)
        places.clouds[0].stand("r.0", **NONE)
        assert places.reconcile()[0]["error"] is None
    finally:
        foldercloud.Provider.schemes = frozenset({"file"})  # type: ignore[misc]
    assert announced, "gc does not know that the data is needed"
    assert places.stores[1].files.names("staging") == []
    assert places.jobs() == [["r.0"], ["r.0"]]
    trees = [{key: store.files.read(key) for key in store.files.list(part)} for part in ("code", "data", "runtime")
             for store in places.stores]  # fmt: skip
    assert all(trees)
    assert trees[0::2] == trees[1::2]
    request = places.stores[1].attempt_request("r", 0)
    assert request is not None
    assert places.stores[1].context(Layout.from_dict(places.stores[1].run("r")["layout"])) == request.context


def resumed(places: Places) -> dict[str, bytes]:
    """Return the files of a checkpoint, by their path in its copy. The job waits too long at the first provider. It
    resumes from the checkpoint of a run that has been deleted since."""
    ran = Ran(f"file://{places.folder}/theirs")
    saved = ran.save(6)
    places.submit(max_wait=3600, resume_from=ran.url)
    shutil.rmtree(places.folder / "theirs")
    places.long_ago()
    return saved


def copied(places: Places, place: int = 1, run_id: str = "r") -> dict[str, bytes]:
    """Return the files that nodes there resume from. commit.json proves them; the keys are paths below the step."""
    store = places.stores[place]
    key = str(store.run(run_id)["layout"]["resume"]).removeprefix(f"{store.url}/")
    (commit,) = [name for name in store.files.list(key) if name.endswith("/commit.json")]
    found = {}
    for path, item in json.loads(store.files.read(commit))["files"].items():
        found[path.split("/", 2)[2]] = store.files.read(commit.replace("commit.json", path))
        assert hashlib.sha256(found[path.split("/", 2)[2]]).hexdigest() == item["sha256"]
    return found


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nodes read no file of this machine, so that inputs must be copied for them."""
    monkeypatch.setattr(Provider, "schemes", frozenset({"gs"}))


def test_who_cannot_read_the_run_that_was_resumed_brings_the_checkpoint_from_the_place_before(
    tmp_path: Path, installed: None, apart: None
) -> None:
    places = Places(tmp_path / "three", count=3)
    saved = resumed(places)
    places.clouds[1].refuse("quota", "no more")
    (row,) = places.reconcile()
    assert row["error"] is None
    assert row["run"] == f"{places.stores[2].url}/runs/r"
    assert places.alive() == [2]
    assert [copied(places, place) for place in range(3)] == [saved] * 3
    assert not any(name.endswith(".json") for store in places.stores for name in store.files.names("staging"))


def test_a_checkpoint_that_is_damaged_in_the_place_before_comes_from_the_run_itself(
    places: Places, apart: None
) -> None:
    saved = resumed(places)
    store = places.stores[0]
    shards = [key for key in store.files.list("runs/r/resume") if key.endswith(".pt")]
    store.files.write(shards[0], bytes(len(store.files.read(shards[0]))))
    (row,) = places.reconcile()
    assert row["exit_code"] == StorageError.exit_code
    assert "has no complete copy of it" in str(row["error"])
    assert handover.next_of(store, "r") is None
    assert not places.stores[1].files.exists("runs/r/run.json")
    again = Ran(f"file://{places.folder}/theirs")
    given = again.save(6)
    assert places.reconcile()[0]["error"] is None
    assert copied(places) == given != saved


def test_another_version_brings_the_submitter_s_runtime_over_or_says_in_a_line_that_it_cannot(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    places.submit()
    places.clouds[0].stand("r.0", **NONE)
    (key,) = places.stores[0].files.list("runtime")
    data = places.stores[0].files.read(key)
    places.stores[0].files.remove(key)
    monkeypatch.setattr(runtime_zip, "digest", lambda provider=None: "0" * 64)
    (row,) = places.reconcile()
    assert row["exit_code"] == StorageError.exit_code
    assert f"{places.stores[0].url}/{key} is missing" in str(row["error"])
    assert handover.next_of(places.stores[0], "r") is None
    places.stores[0].files.write(key, data)
    assert places.reconcile()[0]["error"] is None
    assert places.stores[1].files.read(key) == data


def test_a_client_without_the_packages_of_a_fallback_sends_and_moves_nothing(
    places: Places, apart: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lacks(self: Provider, store: str, request: Any) -> Iterator[Check]:
        wrong = failed("sdk", "it needs folders, which is not installed", fix="pip install folders", code=2)
        yield wrong if self.settings.folder == places.clouds[1].settings.folder else ok("sdk", "folders 1.0")

    with monkeypatch.context() as patch:
        patch.setattr(Provider, "checks", lacks)
        with pytest.raises(SpecError, match=r"^fallback p1: it needs folders, which is not installed") as caught:
            places.submit()
        assert caught.value.hint == "pip install folders"
        assert places.stores[0].runs() == []
    places.submit()
    places.clouds[0].stand("r.0", **NONE)
    with monkeypatch.context() as patch:
        patch.setattr(Provider, "checks", lacks)
        assert "it needs folders" in str(places.reconcile()[0]["error"])
        assert (handover.next_of(places.stores[0], "r"), places.stores[0].result("r")) == (None, None)
    assert places.reconcile()[0]["error"] is None
    assert places.alive() == [1]


def test_the_id_of_a_run_with_other_places_is_not_given_away(places: Places) -> None:
    places.submit()
    with pytest.raises(ConflictError):
        places.submit(fallback="")


def test_who_waits_too_goes_along_when_another_client_moves_the_run(places: Places) -> None:
    places.submit()
    waiting, other = places.attach(), places.attach()

    def looked(status: Any) -> None:
        if not places.clouds[1].jobs():
            places.clouds[0].stand("r.0", **NONE)
            other.reconcile(retry=Retry(other))
        else:
            places.clouds[1].stand("r.0", state="succeeded")

    looked.every = True  # type: ignore[attr-defined]
    result = waiting.wait(retry=Retry(waiting), on_status=looked, timeout=20)
    assert (result["state"], result["run"]) == ("succeeded", f"{places.stores[1].url}/runs/r")


def test_each_place_has_a_max_wait_of_its_own(places: Places) -> None:
    """Check it as one client sees it that waits all the time."""
    places.submit(max_wait=3600)
    places.long_ago()
    now = [time.time()]
    run = Run(
        store=places.stores[0], run_id="r", clock=lambda: now[0],
        sleep=lambda seconds: now.__setitem__(0, now[0] + max(seconds, 1)),
    )  # fmt: skip
    with pytest.raises(LostContactError, match="has not ended within the timeout"):
        run.wait(retry=Retry(run), poll=30, timeout=600)
    assert places.alive() == [1]
    assert [store.expired("r", 0) is not None for store in places.stores] == [True, False]


# ------------------------------------------------------------------------------------- runs that were sent with lists


@pytest.fixture
def earlier(places: Places) -> Places:
    """Write the runs of `recorded_with_lists`; no setting names a provider."""
    recorded_with_lists(places.folder)
    return places


def of(places: Places, run_id: str, place: int = 0) -> Run:
    return Estimator.attach(f"{places.stores[place].url}/runs/{run_id}")


def test_a_run_sent_with_lists_moves_to_its_next_place(earlier: Places) -> None:
    earlier.clouds[0].stand("waits.0", **NONE)
    run = of(earlier, "waits")
    run.reconcile(retry=Retry(run))
    assert run.url == of(earlier, "waits").url == f"{earlier.stores[1].url}/runs/waits"
    assert "waits.0" in earlier.clouds[1].alive()
    earlier.clouds[0].stand("refused.1", **NONE)
    run = of(earlier, "refused")
    result = run.reconcile(retry=Retry(run))
    assert [(item["gpu"], item["category"]) for item in result["refusals"]] == [
        ("H100:8", "quota"), ("A100-80GB:8", "capacity"),
    ]  # fmt: skip
    assert "refused.0" in earlier.clouds[1].alive()


def test_a_run_that_moved_by_lists_is_read_cancelled_and_resumed(earlier: Places) -> None:
    for place in range(2):
        ended = of(earlier, "ended", place).result()
        assert (ended["state"], ended["refusals"][0]["reason"]) == ("succeeded", "no machines came")
        assert of(earlier, "moved", place).status().state == "pending"
    there = f"{earlier.stores[1].url}/runs/moved"
    Ran(earlier.stores[1].url, "moved").save(6)
    assert (
        earlier.submit(resume_from=f"{earlier.stores[0].url}/runs/moved").record["layout"]["resume"].startswith(there)
    )
    of(earlier, "moved").cancel()
    assert of(earlier, "moved").result()["state"] == "cancelled"
    assert "moved.0" not in earlier.clouds[1].alive()


def test_the_store_of_runs_sent_with_lists_is_collected(earlier: Places, capsys: pytest.CaptureFixture[str]) -> None:
    for store in earlier.stores:
        (code,) = store.files.names("code")
        store.files.write("code/" + "0" * 64 + "/code.tar.gz", b"of no run")
        for path in (earlier.folder / store.url.rpartition("/")[2]).rglob("*"):
            os.utime(path, (1e9, 1e9))
        assert cli.main(["gc", store.url, "--delete", "--json"]) == 0
        assert [item["key"] for item in json.loads(capsys.readouterr().out)["found"]] == ["code/" + "0" * 64]
        assert store.files.names("code") == [code]


# ---------------------------------------------------------------------------------- clients that die, and many at once


class Died(BaseException):
    """Raised where a client dies: it does nothing more."""


#: The calls that change a store or the platform.
EFFECTS: tuple[tuple[Any, str], ...] = (
    *((LocalFiles, name) for name in ("write", "create", "upload", "remove", "discard")),
    *((Provider, name) for name in ("submit", "find", "cancel")),
)


class Boundaries:
    """Counts the effects of the thread that made it, and calls ``at`` before, or after, the one numbered ``when``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen, self.when, self.after, self.at = 0, -1, False, lambda: None
        self.thread, self.inside = threading.get_ident(), False
        for owner, name in EFFECTS:
            monkeypatch.setattr(owner, name, self._wrapped(getattr(owner, name)))

    def _wrapped(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self.thread or self.inside:
                return call(*args, **kwargs)
            self.inside = True
            try:
                if self.dead:
                    raise Died
                number, self.seen = self.seen, self.seen + 1
                if number == self.when and not self.after:
                    self.at()
                try:
                    return call(*args, **kwargs)
                finally:
                    if number == self.when and self.after:
                        self.at()
            finally:
                self.inside = False

        return wrapped

    dead = False

    def die(self) -> None:
        self.dead = True
        raise Died

    def begin(self, when: int = -1, *, after: bool = False, at: Callable[[], None] | None = None) -> None:
        self.seen, self.when, self.after, self.dead = 0, when, after, False
        self.at = at or self.die


def again(places: Places, how: str) -> None:
    """Act as the next client. Only the same command starts a run whose first attempt was never recorded."""
    if how == "submit" or not places.stores[0].attempts("r"):
        run = places.submit()
        run.reconcile(retry=Retry(run))
    elif how == "attach":
        run = places.attach()
        run.reconcile(retry=Retry(run))
    else:
        assert places.reconcile()[0]["error"] is None


def move(places: Places, kind: str) -> None:
    """Move from the first provider to the second, as a client does."""
    if kind == "refused":
        places.submit()
    else:
        run = places.attach()
        run.reconcile(retry=Retry(run))


def begun(folder: Path, kind: str) -> Places:
    """Return profiles whose first provider has no machines. It refuses the job, or lets it wait too long. A resumed job
    has a checkpoint that only the first provider's copy still holds."""
    places = Places(folder)
    if kind == "refused":
        places.clouds[0].refuse("quota", "no more")
    elif kind == "resumed":
        resumed(places)
    else:
        places.submit(max_wait=3600)
        places.long_ago()
    return places


def one_job(places: Places) -> None:
    """Check for exactly one live job, at the second provider, and then for one result for all clients."""
    assert places.alive() == [1]
    assert places.clouds[1].jobs() == ["r.0"]
    places.clouds[1].stand("r.0", state="succeeded")
    for place in range(2):
        run = places.attach(place)
        result = run.reconcile(retry=Retry(run))
        assert (result["state"], result["run"]) == ("succeeded", f"{places.stores[1].url}/runs/r")
        assert [item["category"] for item in result["refusals"]] == [places_category(places)]
    left = places.stores[0].result("r")
    assert left is not None
    assert left["state"] == "failed"
    if places.stores[0].run("r")["layout"]["resume"]:
        assert copied(places) == copied(places, 0)
    assert not any("/sending/" in key for store in places.stores for key in store.files.list("runs"))


@pytest.mark.parametrize("refused", [False, True])
def test_one_client_sends_and_the_others_see_what_came_of_it(
    tmp_path: Path, installed: None, monkeypatch: pytest.MonkeyPatch, refused: bool
) -> None:
    """If a platform does not take a job's name, two calls at once would create two jobs."""
    monkeypatch.setattr(CLIENT_TIMINGS, "lease_pauses", (0.005, 0.02))
    places, sent, inside, send = Places(tmp_path / "places", 1), list[int](), set[int](), Provider.submit
    if refused:
        places.clouds[0].refuse("quota", "no more")

    def slow(self: Provider, request: Any, secrets: Any = None) -> str:
        inside.add(threading.get_ident())
        assert len(inside) == 1
        time.sleep(0.2)
        sent.append(request.attempt)
        inside.clear()
        return send(self, request, secrets)

    monkeypatch.setattr(Provider, "submit", slow)

    def client(_: int) -> str:
        try:
            return places.submit().run_id
        except QuotaError:
            return "refused"

    assert set(parallel(client, list(range(5)), jobs=5)) == {"refused" if refused else "r"}
    assert sent == [0]


def places_category(places: Places) -> str:
    return "capacity" if places.clouds[0].jobs() else "quota"


@pytest.fixture
def boundaries(installed: None, monkeypatch: pytest.MonkeyPatch) -> Boundaries:
    monkeypatch.setattr(ProviderExtras, "arrival_s", 0.0)
    monkeypatch.setattr(CLIENT_TIMINGS, "lease_pauses", (0.005, 0.02))
    return Boundaries(monkeypatch)


def cases(boundaries: Boundaries, folder: Path, kind: str, most: int) -> Iterator[tuple[int, bool, str, Path]]:
    """Yield (number of the effect, after it, the next client's action, an empty folder): all, or a sample by
    the seed."""
    places = begun(folder / "counted", kind)
    boundaries.begin()
    move(places, kind)
    count = boundaries.seen
    one_job(places)
    found = [(number, after, how) for number in range(count) for after in (False, True)
             for how in ("submit", "attach", "reconcile")]  # fmt: skip
    found = found if most >= len(found) else random.Random(f"{kind} {SEED}").sample(found, most)
    for number, (when, after, how) in enumerate(found):
        if kind == "refused" or how != "submit":
            yield when, after, how, folder / str(number)


def deaths(boundaries: Boundaries, folder: Path, kind: str, most: int) -> None:
    for when, after, how, place in cases(boundaries, folder, kind, most):
        boundaries.begin()
        places = begun(place, kind)
        boundaries.begin(when, after=after)
        with pytest.raises(Died):
            move(places, kind)
        boundaries.begin()
        again(places, how)
        again(places, how)

        one_job(places)


KINDS = ["refused", "waited"]


@pytest.mark.slow
@pytest.mark.parametrize("count", [3, pytest.param(max(20, TRIALS // 10), marks=pytest.mark.proof, id="many")])
def test_a_client_that_dies_while_it_brings_a_checkpoint_over_is_gone_on_from(
    boundaries: Boundaries, apart: None, tmp_path: Path, count: int
) -> None:
    deaths(boundaries, tmp_path / "deaths", "resumed", count)


@pytest.mark.slow
@pytest.mark.parametrize("count", [3, pytest.param(max(20, TRIALS // 10), marks=pytest.mark.proof, id="many")])
def test_two_clients_at_once_bring_one_checkpoint(
    boundaries: Boundaries, apart: None, tmp_path: Path, count: int
) -> None:
    meetings(boundaries, tmp_path / "meetings", "resumed", count, stalls=False)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_client_that_dies_on_the_way_leaves_what_the_next_goes_on_from(
    boundaries: Boundaries, tmp_path: Path, kind: str
) -> None:
    deaths(boundaries, tmp_path / "deaths", kind, 3)


@pytest.mark.proof
@pytest.mark.parametrize("kind", KINDS)
def test_a_client_that_dies_anywhere_on_the_way_leaves_what_the_next_goes_on_from(
    boundaries: Boundaries, tmp_path: Path, kind: str
) -> None:
    deaths(boundaries, tmp_path / "deaths", kind, max(40, TRIALS // 5))


def meetings(boundaries: Boundaries, folder: Path, kind: str, most: int, *, stalls: bool) -> None:
    """Let another client do the same at that moment. It runs as far as it can, and then the first one continues. With
    ``stalls``, the first one pauses so long that the other takes it for dead."""
    for when, after, how, place in cases(boundaries, folder, kind, most):
        boundaries.begin()
        places = begun(place, kind)
        others: list[threading.Thread] = []
        errors: list[BaseException] = []

        def other(how: str = how, places: Places = places, errors: list[BaseException] = errors) -> None:
            try:
                again(places, how)
            except CloudtrainError as exc:
                errors.append(exc)

        def meet(other: Callable[[], None] = other, others: list[threading.Thread] = others) -> None:
            others.append(threading.Thread(target=other))
            others[0].start()
            others[0].join(None if stalls else 0.4)

        boundaries.begin(when, after=after, at=meet)
        with suppress(StorageError) if stalls else nullcontext():  # "held up, so that another client …"
            move(places, kind)
        for thread in others:
            thread.join()
        assert not errors
        one_job(places)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stalls", [False, True], ids=["meets", "stalls"])
@pytest.mark.parametrize("count", [2, pytest.param(max(40, TRIALS // 5), marks=pytest.mark.proof, id="many")])
def test_two_clients_at_once_start_one_job(
    boundaries: Boundaries, tmp_path: Path, kind: str, stalls: bool, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CLIENT_TIMINGS, "sending", 3.0 if stalls else 60.0)
    if stalls:  # the whole client, with its renewals
        monkeypatch.setattr(lease.Lease, "_renew", lambda lease: lease._ended.wait())
    meetings(boundaries, tmp_path / "meetings", kind, count, stalls=stalls)
