"""`reconcile`: the steps of a waiting client, done once by real clients: alone, many at once, and killed at each step.
The platform is foldercloud, so that a trial is a few processes and no training."""

from __future__ import annotations

import json
import os
import random
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from foldercloud import NAME, Provider, install
from jobs import Jobs, dying
from store_times import date_back

from cloudtrain.cli import main
from cloudtrain.errors import LostContactError, NotFoundError
from cloudtrain.estimator import Estimator
from cloudtrain.runs.reconcile import reconcile, reconcile_store
from cloudtrain.runs.retry import Retry
from cloudtrain.runs.run import Run
from cloudtrain.settings.settings import Settings
from cloudtrain.storage.timings import CLIENT_TIMINGS
from cloudtrain.store.store import Store

FAILED = {"state": "failed", "category": "infra", "reason": "the machine burnt"}
TRIALS = int(os.environ.get("CLOUDTRAIN_TRIALS") or 0)
SEED = os.environ.get("CLOUDTRAIN_SEED") or "0"
ROOT = Path(__file__).parents[2]


class Place:
    """A store, the platform's folder, and clients of both."""

    def __init__(self, tmp_path: Path) -> None:
        self.jobs = Jobs(tmp_path)
        self.jobs.write("train.py", "print('hello')\n")
        self.cloud = tmp_path / "cloud"
        self.cloud.mkdir()
        self.site = tmp_path / "site"
        install(self.site)
        self.jobs.environ["PYTHONPATH"] = os.pathsep.join([str(self.site), *filter(None, sys.path)])
        self.store = Store(str(self.jobs.store))
        self.platform = Provider(folder=str(self.cloud))

    def submit(self, run_id: str = "r", **fields: Any) -> Run:
        estimator = Estimator(
            entry_point="train.py", source_dir=self.jobs.code, provider=NAME, store=str(self.jobs.store),
            settings={"folder": str(self.cloud)}, **{"max_runtime": 600, **fields},
        )  # fmt: skip
        return estimator.fit(wait=False, run_id=run_id)

    def words(self, run_id: str) -> list[str]:
        words = ["submit", "train.py", "--store", str(self.jobs.store), "--provider", NAME, "--run-id", run_id]
        return [*words, "--set", f"folder={self.cloud}", "--detach", "--max-runtime", "600"]

    def reconcile(self, **environ: str) -> list[dict[str, Any]]:
        return reconcile_store(self.store.url, environ=environ)

    def dies(self, call: str, moment: str, *words: str) -> None:
        words = words or ("reconcile", self.store.url)
        client = self.jobs.start(*words, python=dying(call, moment))
        out, err = client.communicate(timeout=120)
        assert client.returncode == 99, f"the call was never made: {out}{err}"

    def long_ago(self, run: Run, attempt: int = 0) -> None:
        """Date the attempt's submission two days back."""
        date_back(self.store.files, f"runs/{run.run_id}/attempts/{attempt}/submitted.json", 2 * 86400)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    made = Place(tmp_path)
    monkeypatch.syspath_prepend(str(made.site))
    yield made
    made.jobs.close()


# ----------------------------------------------------------------------------------------------------------- one client


def test_a_run_that_goes_on_is_left_alone(place: Place) -> None:
    run = place.submit(retries=1)
    for state in ("pending", "running"):
        place.platform.stand("r.0", state=state)
        (row,) = place.reconcile()
        assert (row["state"], row["done"], row["error"], row["exit_code"]) == (state, [], None, 0)
    assert place.platform.jobs() == ["r.0"]
    assert run.store.result("r") is None


def test_what_failed_and_may_be_retried_is_resubmitted_and_what_is_over_is_closed(place: Place) -> None:
    run = place.submit(retries=1)
    place.platform.stand("r.0", **FAILED)
    (row,) = place.reconcile()
    assert (row["state"], row["done"]) == ("pending", ["starting attempt 1"])
    assert place.reconcile()[0]["done"] == []
    place.platform.stand("r.1", state="succeeded")
    (row,) = place.reconcile()
    assert (row["state"], row["done"]) == ("succeeded", ["closed: succeeded"])
    assert [a["number"] for a in run.result()["attempts"]] == ["0.0", "1.0"]
    assert place.reconcile() == []
    assert place.platform.jobs() == ["r.0", "r.1"]


def test_a_run_of_which_no_attempt_is_left_is_closed(place: Place) -> None:
    place.submit()
    place.platform.stand("r.0", **FAILED)
    (row,) = place.reconcile()
    assert (row["state"], row["category"], row["exit_code"]) == ("failed", "infra", 0)
    assert place.reconcile() == []


def test_two_failures_alike_end_the_run_whoever_saw_the_first(place: Place) -> None:
    run = place.submit(retries=5)
    for attempt in range(2):
        place.platform.stand(f"r.{attempt}", **FAILED | {"category": "user_error"})
        (row,) = place.reconcile()
    assert row["done"] == [
        "no further attempt: the same failure twice with no new checkpoint between",
        "closed: failed",
    ]
    assert run.wait(retry=Retry(run))["state"] == "failed"
    assert place.platform.jobs() == ["r.0", "r.1"]


def test_a_preemption_is_like_no_other(place: Place) -> None:
    place.submit(retries=5)
    for attempt in range(4):
        place.platform.stand(f"r.{attempt}", **FAILED | {"category": "preempted"})
        assert place.reconcile()[0]["done"] == [f"starting attempt {attempt + 1}"]


@pytest.mark.slow
def test_what_was_recorded_and_never_sent_is_sent(place: Place) -> None:
    place.dies("cloudtrain.store.store:Store.create_attempt", "after", *place.words("r"))
    assert place.platform.jobs() == []
    (row,) = place.reconcile()
    assert row["done"] == ["sending attempt 0, which was recorded and never sent"]
    assert (row["state"], place.platform.jobs()) == ("pending", ["r.0"])


@pytest.mark.slow
def test_what_was_refused_while_somebody_looked_is_not_sent_later(place: Place) -> None:
    """Its user read that no job runs, and may have submitted another run."""
    done = place.jobs.cli(*place.words("r"), "--set", f"folder={place.cloud / 'gone'}")
    assert done.code != 0
    place.store.write_refused("r", 0, category="quota", reason="the quota is 0")
    (row,) = place.reconcile()
    assert (row["state"], row["done"], place.platform.jobs()) == ("failed", ["closed: failed"], [])
    assert (row["category"], row["reason"]) == ("quota", "refused: the quota is 0")
    assert place.reconcile() == []


@pytest.mark.costly
def test_what_was_cancelled_is_cancelled_again_if_nobody_asked_the_platform(place: Place) -> None:
    run = place.submit(retries=3)
    place.dies("cloudtrain.store.store:Store.cancel", "after", "cancel", run.url)
    assert place.platform.status("r.0").state == "pending"
    (row,) = place.reconcile()
    assert (row["state"], row["category"]) == ("cancelled", "cancelled")
    assert place.reconcile() == []
    assert place.platform.jobs() == ["r.0"]


@pytest.mark.costly
def test_another_clients_context_is_never_told_to_the_nodes_of_a_newer_attempt(place: Place) -> None:
    """A newer client came between this client's record and its context."""
    run = place.submit(gpu=["H100:8", "A100:4"])
    slow = Retry(run)
    place.platform.stand("r.0", state="failed", category="capacity", reason="none")
    place.dies("foldercloud:Provider.submit", "before")
    late = place.store.attempt_request("r", 1)
    assert late is not None
    assert late.context["processes"] == 4
    third = place.platform.plan(run.job, slow._layout, attempt=2, gpu_index=0)
    assert place.store.create_attempt("r", 2, third)
    slow._send(late, {})
    context = json.loads(place.store.files.read("runs/r/container/context.json"))
    assert context["processes"] == 8
    assert "r.2" not in place.platform.jobs(), "only the client that recorded it, or the next one, may send it"


# ------------------------------------------------------------------------------------------------------------- max_wait


def test_a_wait_for_machines_that_is_too_long_ends_as_a_lack_of_capacity(place: Place) -> None:
    run = place.submit(max_wait=3600)
    assert place.reconcile()[0]["done"] == []
    place.long_ago(run)
    (row,) = place.reconcile()
    assert row["done"] == ["stopping attempt 0: no machines within max_wait (1h)", "closed: failed"]
    result = run.result()
    assert (result["state"], result["category"], result["exit_code"]) == ("failed", "capacity", 4)
    assert result["reason"] == "no machines within max_wait (1h)"
    assert run.store.result("r") is not None


def test_what_has_waited_too_long_is_retried_and_the_next_gpu_is_tried(place: Place) -> None:
    run = place.submit(max_wait=3600, gpu=["H100:8", "A100:8"])
    place.long_ago(run)
    (row,) = place.reconcile()
    assert row["done"][1:] == ["starting attempt 1 with GPU A100:8"]
    assert place.platform.jobs() == ["r.0", "r.1"]
    request = place.store.attempt_request("r", 1)
    assert request is not None
    assert request.gpu_index == 1
    assert run.status().state == "pending"
    place.platform.stand("r.1", state="succeeded")
    result = run.result()
    assert result["state"] == "succeeded"
    assert result["attempts"][0]["reason"] == "no machines within max_wait (1h)"


@pytest.mark.costly
def test_a_client_that_waits_ends_it_too(place: Place) -> None:
    run = place.submit(max_wait=3600, retries=1)
    place.long_ago(run)
    waiting = place.jobs.start("wait", run.url, "--json")
    place.jobs.wait_for(lambda: "r.1" in place.platform.jobs())
    place.platform.stand("r.1", state="succeeded")
    out, err = waiting.communicate(timeout=60)
    assert (waiting.returncode, json.loads(out)["state"]) == (0, "succeeded"), err


def test_somebody_who_only_looks_ends_nothing(place: Place) -> None:
    run = place.submit(max_wait=3600)
    place.long_ago(run)
    assert (run.status().state, run.result()["state"], list(run.logs())) == ("pending", "pending", [])
    assert place.store.expired("r", 0) is None


@pytest.mark.costly
def test_machines_that_came_are_not_stopped(place: Place) -> None:
    """They came between the decision and the cancel: the run has the machines that it waited for."""
    run = place.submit(max_wait=3600)
    place.long_ago(run)
    place.dies("foldercloud:Provider.cancel", "before")
    place.platform.stand("r.0", state="running")
    assert place.reconcile()[0]["done"] == []
    place.platform.stand("r.0", state="succeeded")
    assert place.reconcile()[0]["state"] == "succeeded"


def test_a_user_who_cancels_ends_it_as_cancelled(place: Place) -> None:
    run = place.submit(max_wait=3600)
    place.long_ago(run)
    run.cancel()
    assert place.reconcile()[0]["category"] == "cancelled"


# ------------------------------------------------------------------------------------------------------ the clients die

RETRY = ("Store.write_ended", "Store.create_attempt", "Provider.submit", "Store.write_submitted")
STEPS = {
    **{f"retry {step}": step for step in RETRY},
    **{f"send {step}": step for step in RETRY[2:]},
    **{f"wait {step}": step for step in ("Store.expire", "Provider.cancel", "Store.write_result")},
    **{f"close {step}": step for step in ("Store.write_result",)},
}


FEW_DEATHS = (("retry Provider.submit", "after"), ("wait Store.expire", "after"))
"""In the suite, where `test_schedules` has thousands of orders of them; all of them are proof."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("step", "moment"),
    [
        pytest.param(step, moment, marks=() if (step, moment) in FEW_DEATHS else pytest.mark.proof)
        for step in STEPS
        for moment in ("before", "after")
    ],
)
def test_a_client_that_dies_leaves_what_the_next_goes_on_from(place: Place, step: str, moment: str) -> None:
    """Repeat the command: each attempt has one job and one record, and the run ends as it would have."""
    owner = "foldercloud" if STEPS[step].startswith("Provider") else "cloudtrain.store.store"
    kind = step.partition(" ")[0]
    if kind == "send":
        place.dies("cloudtrain.store.store:Store.create_attempt", "after", *place.words("r"))
    else:
        run = place.submit(retries=int(kind == "retry"), max_wait=3600)
    if kind in ("retry", "close"):
        place.platform.stand("r.0", **FAILED)
    if kind == "wait":
        place.long_ago(run)
    place.dies(f"{owner}:{STEPS[step]}", moment)
    for _ in range(3):
        assert all(row["error"] is None for row in place.reconcile())
    jobs = ["r.0", "r.1"] if kind == "retry" else ["r.0"]
    assert place.platform.jobs() == jobs
    assert [str(place.store.submitted("r", k)["native_id"]) for k in place.store.attempts("r")] == jobs  # type: ignore[index]
    if kind in ("retry", "send"):
        place.platform.stand(jobs[-1], state="succeeded")
        place.reconcile()
    result = place.store.result("r")
    assert result is not None
    ends = {"retry": ("succeeded", None), "send": ("succeeded", None), "wait": ("failed", "capacity")}
    assert (result["state"], result["category"]) == ends.get(kind, ("failed", "infra"))


# --------------------------------------------------------------------------------------------------------- many at once

#: Held back until all have found that the attempt failed, then let go together.
TOGETHER = """
import os, sys, time
go = sys.argv.pop(1)
from cloudtrain.runs.retry import Retry
call = Retry.__call__
def waiting(self, result):
    open(f"{go}.{os.getpid()}", "w").close()
    while not os.path.exists(go):
        time.sleep(0.001)
    return call(self, result)
Retry.__call__ = waiting
from cloudtrain.cli import main
sys.exit(main())
"""


def many_at_once(place: Place, clients: int, rounds: int) -> None:
    """In each round an attempt has failed, and ``clients`` see it at the same moment."""
    run = place.submit(retries=rounds + 5)
    for number in range(rounds):
        place.platform.stand(f"r.{number}", **FAILED | {"reason": f"fire {number}"})
        go = place.jobs.tmp / f"go-{number}"
        python = [sys.executable, "-c", TOGETHER, str(go)]
        started = [place.jobs.start("reconcile", run.url, "--json", python=python) for _ in range(clients)]
        place.jobs.wait_for(lambda go=go: len(list(go.parent.glob(f"{go.name}.*"))) == clients)  # type: ignore[misc]
        go.touch()
        rows = []
        for process in started:
            out, err = process.communicate(timeout=60)
            assert process.returncode == 0, err
            rows += json.loads(out)["runs"]
        assert sum(f"starting attempt {number + 1}" in row["done"] for row in rows) == 1
        assert {row["state"] for row in rows} == {"pending"}
        assert place.platform.jobs() == [f"r.{k}" for k in range(number + 2)]
        assert place.store.attempts("r") == list(range(number + 2))


@pytest.mark.slow
def test_two_at_once_start_one_attempt(place: Place) -> None:
    many_at_once(place, 2, 3)


@pytest.mark.proof
def test_any_number_at_once_start_one_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(f"reconcile {SEED}")
    for trial in range(max(1, TRIALS // 10)):
        folder = tmp_path / str(trial)
        folder.mkdir()
        place = Place(folder)
        with monkeypatch.context() as patch:
            patch.syspath_prepend(str(place.site))
            many_at_once(place, draw.randrange(2, 6), 3)
        place.jobs.close()


@pytest.mark.slow
def test_one_that_waits_and_one_that_reconciles_start_one_attempt(place: Place) -> None:
    run = place.submit(retries=1, max_wait=3600)
    waiting = place.jobs.start("wait", run.url, "--json")
    place.platform.stand("r.0", **FAILED)
    with suppress(StopIteration):
        for _ in range(20):
            place.reconcile()
    place.jobs.wait_for(lambda: "r.1" in place.platform.jobs())
    place.platform.stand("r.1", state="succeeded")
    out, err = waiting.communicate(timeout=60)
    assert (waiting.returncode, json.loads(out)["state"]) == (0, "succeeded"), err
    assert place.platform.jobs() == ["r.0", "r.1"]


# -------------------------------------------------------------------------------------------------------- a whole store


def test_one_run_that_cannot_be_read_does_not_stop_the_others(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    for run_id in ("a", "b", "c", "d"):
        place.submit(run_id, retries=1)
        place.platform.stand(f"{run_id}.0", **FAILED)
    (place.jobs.store / "runs/a/run.json").write_text("{")
    (place.cloud / "b.0").unlink()
    record = json.loads((place.jobs.store / "runs/c/run.json").read_text())
    (place.jobs.store / "runs/c/run.json").write_text(json.dumps({**record, "provider": "nosuch"}))
    assert main(["reconcile", str(place.jobs.store), "--json"]) == 8
    output = json.loads(capsys.readouterr().out)
    rows = {row["run_id"]: row for row in output["runs"]}
    assert output["exit_code"] == 8
    assert {name: row["exit_code"] for name, row in rows.items()} == {"a": 8, "b": 2, "c": 2, "d": 0}
    assert "not a JSON object" in rows["a"]["error"]
    assert "no job b.0" in rows["b"]["error"]
    assert "nosuch" in rows["c"]["error"]
    assert rows["d"]["done"] == ["starting attempt 1"]


class Silent(Provider):
    """Does not answer; ``elsewhere``: never will, from here."""

    passing: bool = True
    asked: int = 0

    def status(self, native_id: str) -> Any:
        type(self).asked += 1
        raise LostContactError("no answer", passing=self.passing)


def test_a_platform_that_does_not_answer_is_waited_for_once(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    for run_id in ("a", "b", "c"):
        place.submit(run_id)
    monkeypatch.setattr("cloudtrain.settings.settings.find_provider", lambda name: Silent)
    monkeypatch.setattr(CLIENT_TIMINGS, "platform", 1.0)
    rows = place.reconcile()
    assert [row["exit_code"] for row in rows] == [7, 7, 7]
    assert Silent.asked <= 6
    monkeypatch.setattr(Silent, "passing", False)
    assert [(row["error"], row["exit_code"]) for row in place.reconcile()] == [("no answer", 0)] * 3


def test_which_target_is_a_run_and_which_a_store(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    run = place.submit("one")
    place.submit("two")
    folder = place.jobs.tmp
    monkeypatch.chdir(folder)
    here = Settings(store=str(place.jobs.store))

    def found(target: str | None) -> list[str]:
        return [row["run_id"] for row in reconcile(target, settings=here, cwd=folder, environ={})]

    for target in (run.url, "one", "store/runs/one", "./store/runs/one/"):
        assert found(target) == ["one"], target
    for target in (None, place.store.url, "store", "./store", str(place.jobs.store)):
        assert found(target) == ["one", "two"], target
    for nothing in ("three", "./nosuch", "file:///no/such/store", "store/runs/three"):
        with pytest.raises(NotFoundError):
            found(nothing)
    assert [row["run_id"] for row in Estimator.reconcile(run.url)] == ["one"]
    assert [row["run_id"] for row in Estimator.reconcile(store=place.store.url)] == ["one", "two"]


def test_the_command_line_says_what_it_did(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    run = place.submit(retries=1)
    place.platform.stand("r.0", **FAILED)
    assert main(["reconcile", run.url]) == 0
    output = capsys.readouterr()
    assert "r: starting attempt 1" in output.err
    assert output.out.split()[5:8] == ["r", "pending", "-"]
    place.platform.stand("r.1", state="succeeded")
    assert main(["reconcile", place.store.url]) == 0
    assert main(["reconcile", place.store.url]) == 0
    assert "no unfinished run here" in capsys.readouterr().err
    assert main(["reconcile", "nosuch", "--store", place.store.url]) == 2


# -------------------------------------------------------------------------------------------------------- on a schedule


@pytest.mark.slow
def test_the_workflow_of_the_examples_reconciles_the_store(place: Place) -> None:
    text = (ROOT / "examples/reconcile.yml").read_text(encoding="utf-8")
    workflow = yaml.safe_load(text)
    (schedule,) = workflow[True]["schedule"]  # YAML 1.1 reads `on` as that, GitHub as the word
    minutes, *others = schedule["cron"].split()
    assert others == ["*"] * 4
    assert all(0 <= int(minute) < 60 for minute in minutes.split(","))
    (job,) = workflow["jobs"].values()
    assert all(("uses" in step) != ("run" in step) for step in job["steps"])
    assert job["env"] == {"CLOUDTRAIN_STORE": "${{ vars.CLOUDTRAIN_STORE }}"}
    page = (ROOT / "docs/examples.md").read_text(encoding="utf-8")
    for name in re.findall(r"vars\.(\w+)", text):
        assert f"`{name}`" in page, f"docs/examples.md does not say what {name} is"

    place.submit(retries=1)
    place.platform.stand("r.0", **FAILED)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    step = place.jobs.start("-ec", job["steps"][-1]["run"], python=["sh"], PATH=path, CLOUDTRAIN_STORE=place.store.url)
    out, err = step.communicate(timeout=60)
    assert step.returncode == 0, out + err
    assert "starting attempt 1" in err
    assert place.platform.jobs() == ["r.0", "r.1"]
