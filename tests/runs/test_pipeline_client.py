"""A client that waits in a pipeline: signals, its own time limit, expiring credentials, and repeated steps."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
from foldercloud import NAME, Provider, install

from cloudtrain import cli
from cloudtrain.provider_api.protocol import Request
from cloudtrain.runs.run import open_run
from cloudtrain.storage.timings import CLIENT_TIMINGS

SUBMIT = ("submit", "train.py", "--provider", NAME, "--run-id", "r", "--max-runtime", "1h")


class Place:
    """A folder with a script, and the platform that is a folder."""

    def __init__(self, tmp: Path) -> None:
        install(tmp / "site")
        self.code = tmp / "code"
        self.code.mkdir()
        (self.code / "train.py").write_text("print('hello')")
        (tmp / "jobs").mkdir()
        self.platform = Provider(folder=str(tmp / "jobs"))
        self.slow = tmp / "jobs" / ".slow"
        self.asked_slowly = tmp / "jobs" / ".asked-slowly"
        self.environ = {
            **os.environ, "PYTHONPATH": str(tmp / "site"), f"CLOUDTRAIN_{NAME.upper()}_FOLDER": str(tmp / "jobs")
        }  # fmt: skip

    @contextmanager
    def client(self, *words: str, until: str = "pending") -> Iterator[subprocess.Popen[str]]:
        """Start a client and wait until it prints ``until``; kill it at the end."""
        process = subprocess.Popen(
            [sys.executable, "-m", "cloudtrain", *words, "--json"],
            cwd=self.code, env=self.environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            # A shell starts background commands with SIGINT ignored, nohup with SIGHUP; this suite may be one of them.
            preexec_fn=lambda: [signal.signal(each, signal.SIG_DFL) for each in (signal.SIGINT, signal.SIGHUP)],
        )  # fmt: skip
        try:
            assert process.stderr is not None
            assert any(text.startswith(until) for text in process.stderr)
            yield process
        finally:
            process.kill()
            process.communicate()

    def done(self, *words: str) -> tuple[int, dict[str, object], str]:
        """Run the command in this process, for a client without signals."""
        out, err = io.StringIO(), io.StringIO()
        with redirect_stdout(out), redirect_stderr(err):
            code = cli.main([*words, "--json"])
        return code, json.loads(out.getvalue()), err.getvalue()

    def logs(self, run: str) -> str:
        with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()):
            cli.main(["logs", "-f", run])
        return out.getvalue()


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    place = Place(tmp_path)
    monkeypatch.syspath_prepend(place.environ["PYTHONPATH"])
    monkeypatch.setenv(f"CLOUDTRAIN_{NAME.upper()}_FOLDER", str(tmp_path / "jobs"))
    monkeypatch.chdir(place.code)
    return place


def ended(process: subprocess.Popen[str]) -> tuple[int, dict[str, object], str]:
    out, err = process.communicate(timeout=30)
    return process.returncode, json.loads(out), err


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_leaves_the_run_alone_and_says_how_to_come_back(place: Place, number: signal.Signals) -> None:
    with place.client(*SUBMIT) as process:
        process.send_signal(number)
        code, said, err = ended(process)
    assert (code, said["exit_code"], said["run_id"]) == (7, 7, "r")
    assert "the run continues" in str(said["error"])
    assert "next: cloudtrain wait r" in err
    assert place.platform.status("r.0").state == "pending"


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_may_mean_that_the_run_is_to_stop(place: Place, number: signal.Signals) -> None:
    with place.client(*SUBMIT, "--on-signal", "cancel") as process:
        process.send_signal(number)
        sent = time.monotonic()
        while place.platform.status("r.0").state != "cancelled":
            assert time.monotonic() - sent < 5, "the job was not cancelled within 5 s"
            time.sleep(0.01)
        code, said, err = ended(process)
    assert (code, said["exit_code"], said["state"]) == (5, 5, "cancelled"), err


@pytest.mark.slow
def test_a_runner_that_sends_one_signal_after_the_other_gets_its_cancel(place: Place) -> None:
    """GitHub sends SIGINT, then SIGTERM. A slow platform is still asked to cancel."""
    with place.client(*SUBMIT, "--on-signal", "cancel") as process:
        place.asked_slowly.touch()
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
            process.send_signal(number)
            time.sleep(0.05)
        place.asked_slowly.unlink()
        code, said, err = ended(process)
    assert (code, said["exit_code"]) == (5, 5), err
    assert place.platform.status("r.0").state == "cancelled"


@pytest.mark.slow
def test_a_client_that_only_waits_takes_the_same_word(place: Place) -> None:
    assert place.done(*SUBMIT, "--detach")[0] == 0
    with place.client("wait", "r") as process:
        process.terminate()
        assert ended(process)[0] == 7
    assert place.platform.status("r.0").state == "pending"
    with place.client("wait", "r", "--on-signal", "cancel") as process:
        process.terminate()
        assert ended(process)[0] == 5
    assert place.platform.status("r.0").state == "cancelled"


@pytest.mark.slow
@pytest.mark.parametrize("word", ["cancel", "detach"])
def test_a_signal_while_the_platform_is_taking_the_job(place: Place, word: str) -> None:
    place.slow.touch()
    with place.client(*SUBMIT, "--on-signal", word, until="submitting") as process:
        while not place.platform.jobs():
            time.sleep(0.01)
        process.terminate()
        code, said, _ = ended(process)
    place.slow.unlink()
    state = place.platform.status("r.0").state
    assert (code, state) == ((5, "cancelled") if word == "cancel" else (7, "pending"))
    assert str(said["run"]).endswith("/runs/r")
    if word == "detach":
        assert said["error"] == "interrupted; the run was submitted and continues"
        assert said["hint"] == "to stop it, run: cloudtrain cancel r"
    assert place.done("cancel", "r")[0] == 0
    assert place.platform.jobs() == ["r.0"]


@pytest.mark.parametrize(
    ("where", "error", "hint"),
    [
        ("cloudtrain.runs.fallback:plan_with_fallbacks", "interrupted before anything was sent; there is no run", ""),
        ("cloudtrain.store.store:Store.stage", "interrupted before anything was sent; there is no run", ""),
        (
            "cloudtrain.store.store:Store.create_attempt",
            "interrupted; the run is recorded and was not sent",
            "to send it, run the same command with --run-id r\nto drop it, run: cloudtrain cancel r",
        ),
        (
            "foldercloud:Provider.submit",
            "interrupted; it is unknown yet if the run was submitted",
            "to look, run: cloudtrain status r",
        ),
    ],
)
def test_ctrl_c_while_it_submits_says_whether_there_is_a_run(
    place: Place, monkeypatch: pytest.MonkeyPatch, where: str, error: str, hint: str
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(where.replace(":", "."), interrupted)
    monkeypatch.setattr(CLIENT_TIMINGS, "arrival", 0.1)
    code, said, _ = place.done(*SUBMIT)
    assert code == 7
    assert (said["error"], str(said["hint"])[: len(hint)], said["exit_code"]) == (error, hint, 7)
    assert place.platform.jobs() == []


def test_a_request_that_a_signal_cut_off_is_cancelled_when_it_arrives(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit, arrivals = Provider.submit, list[threading.Timer]()

    def cut_off(self: Provider, request: Request, secrets: object = None) -> str:
        arrivals.append(threading.Timer(0.3, submit, (self, request)))
        arrivals[0].start()
        raise KeyboardInterrupt

    monkeypatch.setattr(Provider, "submit", cut_off)
    code, said, _ = place.done(*SUBMIT, "--on-signal", "cancel")
    arrivals[0].join()
    assert place.platform.status("r.0").state == "cancelled"
    assert (code, said["state"], said["native_id"]) == (5, "cancelled", "r.0")


def test_a_cancel_says_which_job_may_still_arrive_and_a_wait_stops_it(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut_off(self: Provider, request: Request, secrets: object = None) -> str:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Provider, "submit", cut_off)
        patch.setattr(CLIENT_TIMINGS, "arrival", 0.1)
        assert place.done(*SUBMIT)[0] == 7
    monkeypatch.setattr(CLIENT_TIMINGS, "arrival", 0.5)
    monkeypatch.setattr(Provider, "arrival_s", 5.0, raising=False)
    code, said, err = place.done("cancel", "r")
    assert (code, said["state"]) == (0, "pending")
    assert "attempt 0 has no answer yet; the platform may still start it within 5 s of the cancel or of its" in err
    assert "next: cloudtrain wait r" in err
    store = open_run(str(place.code / ".cloudtrain/runs/r"), store_url="").store
    request = store.attempt_request("r", 0)
    assert request is not None
    arrival = threading.Timer(0.5, place.platform.submit, (request,))
    arrival.start()
    code, said, _ = place.done("wait", "r")
    arrival.join()
    assert (code, said["state"], said["native_id"]) == (5, "cancelled", "r.0")


REFUSALS = [("user_error", "spec", 2), ("capacity", "capacity", 4), ("quota", "quota", 4)]


@pytest.mark.parametrize(("kind", "category", "code"), REFUSALS)
def test_a_refused_submission_is_over_for_every_verb(place: Place, kind: str, category: str, code: int) -> None:
    place.platform.refuse(kind, "it will not have it")
    assert place.done(*SUBMIT)[0] == code
    result = json.loads((place.code / ".cloudtrain/runs/r/result.json").read_text())
    assert (result["state"], result["category"], result["exit_code"]) == ("failed", category, code)
    for verb in (["wait", "r"], ["status", "r"]):
        _, said, _ = place.done(*verb)
        assert (said["state"], said["category"], said["exit_code"]) == ("failed", category, code)
        assert said["reason"] == "refused: it will not have it"
    assert place.logs("r") == ""
    place.platform.refuse()  # there is room by now, but the run has ended
    exit_code, said, _ = place.done(*SUBMIT)
    assert (exit_code, said["error"]) == (code, "run r has ended: refused: it will not have it")
    assert "choose another --run-id" in str(said["hint"])
    assert place.platform.jobs() == []


@pytest.mark.slow
def test_the_wait_has_a_length_of_its_own(place: Place) -> None:
    code, said, err = place.done(*SUBMIT, "--wait-timeout", "1s")
    assert (code, said["exit_code"]) == (7, 7)
    assert "it continues" in str(said["error"])
    assert "next: cloudtrain wait r" in err
    assert place.done("wait", "r", "--wait-timeout", "1s")[0] == 7
    assert place.done(*SUBMIT, "--wait-timeout", "soon")[0] == 2


@pytest.mark.slow
def test_credentials_that_expire_while_it_waits_are_lost_contact(place: Place) -> None:
    with place.client(*SUBMIT) as process:
        place.platform.stand("r.0", refused="the token has expired")
        code, said, err = ended(process)
    assert (code, said["exit_code"]) == (7, 7)
    assert "the token has expired; the run continues" in str(said["error"])
    assert "next: cloudtrain wait r" in err
    code, said, _ = place.done("wait", "r")  # they were invalid before: it did not wait
    assert (code, said["exit_code"]) == (3, 3)


@pytest.mark.slow
def test_the_same_step_again_comes_back_to_its_run(place: Place) -> None:
    assert place.done(*SUBMIT, "--detach")[0] == 0
    with place.client(*SUBMIT) as process:
        place.platform.stand("r.0", state="succeeded")
        assert ended(process)[0] == 0
    code, said, _ = place.done(*SUBMIT)
    assert (code, said["state"]) == (0, "succeeded")
    (native,) = place.platform.jobs()
    (Path(place.platform.settings.folder) / native).unlink()  # the platform has forgotten it, and nothing is sent again
    code, said, _ = place.done(*SUBMIT, "--detach")
    assert (code, said["state"]) == (0, "succeeded")
    assert place.platform.jobs() == []
    code, said, _ = place.done(*SUBMIT, "--hp", "lr=1")
    assert (code, said["exit_code"]) == (2, 2)
    assert "another job" in str(said["error"])
    assert place.platform.jobs() == []
