"""Calls of provider ``modelarts``: signatures, one job for a request, errors, statuses, logs and doctor."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import build_opener

import pytest
from rows import for_each
from worlds.base import Fault
from worlds.modelarts.plane import AK, PROJECT, REGION, Plane, refusal

from cloudtrain.errors import (
    AuthError,
    CloudtrainError,
    ConflictError,
    LostContactError,
    NotFoundError,
    QuotaError,
    SpecError,
)
from cloudtrain.provider_api.protocol import Request
from cloudtrain.providers import _cloud
from cloudtrain.providers.modelarts import Provider, api, logs
from cloudtrain.providers.modelarts.api import error_of
from cloudtrain.providers.modelarts.status import ABNORMAL_SECONDS, CLOCK_SECONDS, _stopped, category_of, status_of
from cloudtrain.storage import obs
from cloudtrain.storage.files import files
from cloudtrain.testing.tables import Place, Sample, plan_of

SAMPLE = Sample.of(Provider)
NATIVE = f"{REGION}/{PROJECT}/00000000-0000-0000-0000-000000000000"


@pytest.fixture
def plane(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Plane]:
    """Give a project whose jobs wait for machines: nothing starts."""
    with Plane(tmp_path / "huawei") as plane:
        for name, value in plane.environ().items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(obs, "_proven", set())
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        monkeypatch.setattr(_cloud, "SETTLE", 0.5)
        plane.no_machines = True
        plane.obs.make("contract-bucket")
        yield plane


@pytest.fixture
def provider() -> Any:
    return Provider(**{**SAMPLE.settings, "log_drain": 0})


def request(provider: Provider, folder: Path, **fields: Any) -> Request:
    place = Place(
        folder / f"place-{len(list(folder.iterdir()))}", store=SAMPLE.store, provider="modelarts", secret="env:A"
    )
    return plan_of(provider, place, SAMPLE.job, fields).request


# -------------------------------------------------------------------------------------------------------------- callers


def test_an_iam_token_calls_and_buys_keys_for_obs(
    plane: Plane, provider: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plane.tokens.add("token-1")
    plane.keys.clear()
    monkeypatch.setenv(api.TOKEN, "token-1")
    native = provider.submit(request(provider, tmp_path))
    assert provider.status(native).state == "pending"
    store = files(SAMPLE.store, storage=provider.storage)
    assert store.create("a", b"1")
    assert store.read("a") == b"1"
    assert plane.wire.count("securitytokens") == 1
    assert provider.principal() is None
    monkeypatch.setenv(api.TOKEN, "another")
    with pytest.raises(AuthError):
        provider.status(native)


def test_keys_come_from_the_file_of_the_sdk(plane: Plane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ak, sk, token = plane.temporary()
    file = tmp_path / "credentials"
    file.write_text(f"[basic]\nak = {ak}\nsk = {sk}\nsecurity_token = {token}\n")
    for name in ("HUAWEICLOUD_SDK_AK", "HUAWEICLOUD_SDK_SK"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HUAWEICLOUD_SDK_CREDENTIALS_FILE", str(file))
    made = Provider(**SAMPLE.settings)
    assert list(made.account.list_jobs("x")) == []
    assert made.principal() == ak
    for text, words in (("no section", "is not a file of credentials"), ("[basic]\nak = x\n", "no keys")):
        file.write_text(text)
        monkeypatch.setattr(obs, "_MACHINE", "http://127.0.0.1:9/none")
        with pytest.raises(AuthError) as caught:
            made.account.keys()
        assert words in str(caught.value)


def test_a_server_of_huawei_cloud_has_keys_of_its_agency(
    plane: Plane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ak, sk, token = plane.temporary()
    answer = {"credential": {"access": ak, "secret": sk, "securitytoken": token}}
    from worlds.vertex.wire import Answer

    plane.wire.route("GET", "/openstack/latest/securitykey", "metadata", lambda call: Answer(answer), open=True)
    plane.wire._routes.insert(0, plane.wire._routes.pop())
    monkeypatch.setattr(obs, "_MACHINE", f"{plane.url}/openstack/latest/securitykey")
    found = obs.find_keys({"HUAWEICLOUD_SDK_CREDENTIALS_FILE": str(tmp_path / "none")})
    assert found == (ak, sk, token)


@for_each(
    ("status", "code", "message", "kind", "words"),
    [
        (401, "APIGW.0301", "Incorrect IAM authentication information", AuthError, "clock"),
        (403, "ModelArts.0010", "no permission", AuthError, "role"),
        (403, "ModelArts.0110", "no agency authorization", AuthError, "Add Authorization"),
        (400, "ModelArts.0110", "no agency authorization", SpecError, "Add Authorization"),
        (403, "ModelArts.0116", "too many", QuotaError, "Quotas"),
        (400, "ModelArts.0104", "The quota is exceeded", QuotaError, "Quotas"),
        (404, "ModelArts.2757", "not found", NotFoundError, ""),
        (404, "APIGW.0101", "The API does not exist", NotFoundError, "project_id"),
        (429, "APIGW.0308", "The throttling threshold has been reached", LostContactError, ""),
        (500, "", "", LostContactError, ""),
        (409, "ModelArts.1", "exists", ConflictError, ""),
        (400, "ModelArts.0104", "Invalid parameter", SpecError, ""),
    ],
)
def test_errors_have_their_kind_and_their_way_out(
    status: int, code: str, message: str, kind: type[CloudtrainError], words: str
) -> None:
    found = error_of(status, code, message, what="create job")
    assert type(found) is kind
    assert "\n" not in str(found).partition("\nhint")[0]
    assert words in (found.hint or "")


def test_a_requested_pause_is_kept(plane: Plane, provider: Any) -> None:
    plane.wire.faults.append(Fault("list", refusal(429, "APIGW.0308", "throttled", **{"Retry-After": "60"})))
    for words in ("throttled", "asks for a pause"):
        with pytest.raises(LostContactError) as caught:
            list(provider.account.list_jobs("x"))
        assert words in str(caught.value)
    assert plane.wire.count("list") == 1


# -------------------------------------------------------------------------------------------------------------- one job


def test_a_lost_answer_makes_no_second_job(plane: Plane, provider: Any, tmp_path: Path) -> None:
    wanted = request(provider, tmp_path)
    plane.wire.faults.append(Fault("create", None, done=True))
    with pytest.raises(LostContactError):
        provider.submit(wanted)
    assert len(plane.jobs) == 1
    assert provider.submit(wanted) == provider.find(wanted)
    assert len(plane.jobs) == 1


def test_a_job_that_shows_late_in_the_list_is_awaited_after_a_lost_answer(
    plane: Plane, provider: Any, tmp_path: Path
) -> None:
    wanted = request(provider, tmp_path)
    plane.list_lag = 0.3
    plane.wire.faults.append(Fault("create", None, done=True))
    with pytest.raises(LostContactError):
        provider.submit(wanted)
    provider.submit(wanted)
    assert len(plane.jobs) == 1


@pytest.mark.parametrize("comes", [True, False])
def test_a_refusal_after_a_lost_answer_counts_if_no_job_comes(
    plane: Plane, provider: Any, tmp_path: Path, comes: bool
) -> None:
    wanted = request(provider, tmp_path)
    plane.wire.faults.append(Fault("create", None, done=comes))
    with pytest.raises(LostContactError):
        provider.submit(wanted)
    plane.quota = 0
    if comes:
        assert plane.job(provider.submit(wanted)).body["metadata"]["name"] == wanted.body["metadata"]["name"]
        return
    with pytest.raises(QuotaError):
        provider.submit(wanted)
    assert plane.jobs == {}


@pytest.mark.parametrize("status", [400, 409])
def test_a_refused_stop_counts_unless_the_job_stops_all_the_same(
    plane: Plane, provider: Any, tmp_path: Path, status: int
) -> None:
    native = provider.submit(request(provider, tmp_path))
    for done in (False, True):
        refused = refusal(status, "ModelArts.2760", "A job in this phase cannot be terminated")
        plane.wire.faults.append(Fault("stop", refused, done=done))
        if not done:
            with pytest.raises(SpecError, match="cannot be terminated"):
                provider.cancel(native)
            assert provider.status(native).state == "pending"
    provider.cancel(native)
    assert plane.wire.count("stop") == 2
    assert plane.job(native).wait() == "Terminated"


def test_the_older_of_two_jobs_counts_and_the_other_is_stopped(plane: Plane, provider: Any, tmp_path: Path) -> None:
    wanted = request(provider, tmp_path)
    plane.list_lag = 10.0
    first, second = provider.submit(wanted), provider.submit(wanted)
    assert first != second
    plane.list_lag = 0.0
    assert provider.find(wanted) == first
    plane.wire.faults.append(Fault("stop", refusal(400, "ModelArts.2760", "A job in this phase cannot be terminated")))
    with pytest.raises(LostContactError, match=f"{second} is a second job of this request, and it cannot be stopped"):
        provider.submit(wanted)
    assert provider.submit(wanted) == first
    assert plane.job(second).wait() == "Terminated"
    assert provider.status(first).state == "pending"


def test_another_request_of_that_attempt_is_a_conflict(plane: Plane, provider: Any, tmp_path: Path) -> None:
    provider.submit(request(provider, tmp_path))
    other = request(provider, tmp_path, max_runtime=7200)
    assert provider.find(other) is None
    with pytest.raises(ConflictError) as caught:
        provider.submit(other)
    assert caught.value.field == "run_id"


def test_a_job_is_looked_for_in_the_workspace_of_its_request(plane: Plane, provider: Any, tmp_path: Path) -> None:
    wanted = request(provider, tmp_path)
    native = provider.submit(wanted)
    assert list(Provider(**{**SAMPLE.settings, "workspace_id": "other"}).account.list_jobs("contract")) == []
    assert Provider(**{**SAMPLE.settings, "workspace_id": "other"}).find(wanted) == native


def test_a_search_reads_all_pages(plane: Plane, provider: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check this because the offset counts pages: a client that counts rows would miss jobs."""
    monkeypatch.setattr(api, "PAGE", 2)
    natives = [provider.submit(request(provider, tmp_path, tags={"n": str(n)}, name=f"n{n}")) for n in range(1)]
    for number in range(4):
        body = json.loads(json.dumps(plane.job(natives[0]).body))
        body["metadata"]["name"] = f"contract-other-{number}"
        provider.account.call("POST", "training-jobs", what="create", body=body)
    found = [job["metadata"]["id"] for job in provider.account.list_jobs("contract")]
    assert len(found) == len(set(found)) == 5
    assert plane.wire.count("list") >= 3


def test_too_long_secrets_are_refused_before_anything_is_sent(plane: Plane, provider: Any, tmp_path: Path) -> None:
    wanted = request(provider, tmp_path, secrets={"TOKEN": "env:A"})
    files(wanted.run, storage=provider.storage).write("container/key", b"k" * 32)
    with pytest.raises(SpecError) as caught:
        provider.submit(wanted, {"A": "x" * 4000})
    assert caught.value.field == "secrets"
    assert plane.wire.count("create") == 0
    native = provider.submit(wanted, {"A": "value"})
    assert "value" not in json.dumps(plane.job(native).body)


def test_a_shell_is_ssh_to_the_node(plane: Plane, provider: Any, tmp_path: Path) -> None:
    wanted = request(provider, tmp_path, interactive=True, instance_count=2)
    native = provider.submit(wanted)
    found = provider.shell(wanted, native, 1, ["nvidia-smi"], tty=False).argv
    assert found[:4] == ["ssh", "-p", "23", "ma-user@127.0.0.1"]
    assert "nvidia-smi" in found[4]
    plain = request(provider, tmp_path)
    with pytest.raises(SpecError):
        provider.shell(plain, native, 0, [], tty=True)


# ------------------------------------------------------------------------------------------------------------- statuses


def job(phase: str, **own: Any) -> dict[str, Any]:
    status = {"phase": phase, **own}
    command = "/bin/sh -c x cloudtrain pyz run --path limit=60 --"
    return {"metadata": {"name": "a-b-1-0-ff"}, "status": status, "algorithm": {"command": command}}


FAULT = {"recover_records": [{"fault_scenario": "node_fault"}], "end_reason": "node_fault on worker-1"}


@for_each(
    ("found", "state", "category"),
    [
        (job("Creating"), "pending", ""),
        (job("Pending"), "pending", ""),
        (job("Running"), "running", ""),
        (job("Terminating"), "running", ""),
        (job("Abnormal", secondary_phase="Lost"), "running", ""),
        (job("NewWord"), "running", ""),
        (job("Completed"), "succeeded", ""),
        (job("Terminated", duration=1000), "cancelled", "cancelled"),
        (job("Terminated", duration=2 * 3600 * 1000), "failed", "timeout"),
        (job("Failed"), "failed", "infra"),
        (job("Failed", task_statuses=[{"task": "worker-0", "exit_code": 1}]), "failed", "user_error"),
        (job("Failed", task_statuses=[{"task": "worker-0", "exit_code": 76}]), "failed", "timeout"),
        (job("Failed", task_statuses=[{"task": "worker-0", "exit_code": 127}]), "failed", "image"),
        (
            job("Failed", task_statuses=[{"task": "worker-0", "exit_code": 75}, {"task": "worker-1", "exit_code": 1}]),
            "failed",
            "user_error",
        ),
        (
            job("Failed", task_statuses=[{"task": "worker-0", "exit_code": 137, "message": "OOMKilled"}]),
            "failed",
            "oom",
        ),
        (job("Failed", running_records=[FAULT]), "failed", "infra"),
        (
            job("Failed", task_statuses=[{"task": "worker-0", "message": "Failed to pull image a/b:1"}]),
            "failed",
            "image",
        ),
    ],
)
def test_a_phase_is_a_state(found: Mapping[str, Any], state: str, category: str) -> None:
    status = status_of(found)
    assert (status.state, status.category) == (state, category)
    assert status.reason or state in ("succeeded", "running")


def test_a_job_that_stays_abnormal_is_lost(plane: Plane, provider: Any, tmp_path: Path) -> None:
    native = provider.submit(request(provider, tmp_path))
    plane.abnormal.add(native.rpartition("/")[2])
    assert provider.status(native).state == "running"
    provider.account.abnormal[native] = time.monotonic() - ABNORMAL_SECONDS - 1
    found = provider.status(native)  # it stops the job
    assert (found.state, found.category) == ("failed", "infra")
    plane.abnormal.clear()
    assert provider.status(native).native in ("Terminating", "Terminated"), (
        "a lost job must not return next to another job"
    )


@for_each(
    ("records", "duration", "stopped"),
    [
        ([], 1000, None),
        ([{"start_type": "init_or_rescheduled"}], 1000, None),
        ([{"start_at": 5000}], 1000, 6000.0),
        ([{"start_at": 5000, "end_at": 5500}], 1000, 5500.0),
        ([{"start_at": 1000, "end_at": 1600}, {"start_at": 5000}], 1000, 6000.0),
        ([{"start_at": 5000}], 0, None),
    ],
)
def test_the_records_give_the_end_of_a_job(records: list[dict[str, Any]], duration: int, stopped: float | None) -> None:
    assert _stopped({"running_records": records, "duration": duration * 1000}) == stopped


def test_a_first_status_recognises_a_job_that_was_lost_long_ago(plane: Plane, provider: Any, tmp_path: Path) -> None:
    """Check this because `cloudtrain status` asks once. ModelArts' own times count, with room for a wrong clock."""
    native = provider.submit(request(provider, tmp_path))
    job = plane.job(native)
    plane.abnormal.add(job.id)
    job.records = [{"start_at": int(time.time() - ABNORMAL_SECONDS - CLOCK_SECONDS + 60)}]
    assert provider.status(native).state == "running"
    job.records = [{"start_at": int(time.time() - ABNORMAL_SECONDS - CLOCK_SECONDS - 20)}]
    assert provider.status(native).state == "running", "without seconds of running it is not lost"
    job.started = time.time() - 5
    plane.abnormal.clear()
    assert provider.status(native).state == "pending", "only this phase counts"
    plane.abnormal.add(job.id)
    found = provider.status(native)  # it stops the job
    assert (found.state, found.category) == ("failed", "infra")
    plane.abnormal.clear()
    assert provider.status(native).native in ("Terminating", "Terminated")


@pytest.mark.parametrize("code", [301, 302, 307, 308])
def test_a_redirect_gets_no_key(code: int) -> None:
    paths: list[str] = []

    class Away(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            paths.append(self.path)
            self.send_response(code)
            self.send_header("Location", "/elsewhere")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Print nothing."""

    with HTTPServer(("127.0.0.1", 0), Away) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        with pytest.raises(HTTPError, match=str(code)):
            build_opener(obs.NoRedirects).open(f"http://127.0.0.1:{server.server_port}/first", timeout=10)
    assert paths == ["/first"]


def test_running_records_are_the_attempts() -> None:
    records = [
        {"start_at": 100, "end_at": 150, "end_reason": "node_fault on worker-1", "end_recover": "job_reschedule"},
        {"start_at": 200},
    ]
    status = status_of(job("Running", running_records=records, start_time=100_000, duration=5000))
    rows = [(row.number, row.started, row.ended, row.category) for row in status.attempts]
    assert rows == [("1.0", 100.0, 150.0, "preempted"), ("1.1", 200.0, None, "")]
    assert status.limit_s == 60
    assert (
        status_of(job("Completed", running_records=records[:1], start_time=100_000, duration=51_500)).finished == 151.5
    )


@for_each(
    ("message", "category"),
    [
        ("insufficient resources in the pool", "capacity"),
        ("the agency has no permission", "auth"),
        ("preempted by a job of higher priority", "preempted"),
        ("auto_stop reached", "timeout"),
        ("something else", "infra"),
    ],
)
def test_a_message_without_an_exit_code_has_a_category(message: str, category: str) -> None:
    assert category_of(0, message) == category


# ----------------------------------------------------------------------------------------------------------------- logs


def page(content: str, full: int, given: int, *, whole: bool = False) -> tuple[list[str], int]:
    lines: list[Any] = []
    at = logs._take({"content": content, "full_size": full}, "worker-1", given, lines, whole=whole)
    assert {line.node for line in lines} <= {"1"}
    return [line.text for line in lines], at


@for_each(
    ("content", "full", "given", "whole", "lines", "after"),
    [
        ("a\nbc\n", 5, 0, False, ["a", "bc"], 5),
        ("a\nbc\n", 5, 2, False, ["bc"], 5),
        ("a\nbc", 4, 0, False, ["a"], 2),
        ("a\nbc", 4, 2, True, ["bc"], 4),
        ("ä\n", 3, 0, False, ["ä"], 3),
        ("rest of one\nnew\n", 100, 50, False, ["new"], 100),
        ("fresh\n", 6, 90, False, ["fresh"], 6),
        ("", 0, 0, True, [], 0),
    ],
)
def test_a_log_is_read_on_by_its_bytes(
    content: str, full: int, given: int, whole: bool, lines: list[str], after: int
) -> None:
    assert page(content, full, given, whole=whole) == (lines, after)


# --------------------------------------------------------------------------------------------------------------- doctor


def test_doctor_finds_no_fault(plane: Plane, provider: Any, tmp_path: Path) -> None:
    wanted = request(provider, tmp_path)
    found = {check.name: check for check in provider.checks(SAMPLE.store, wanted)}
    assert {name: check.status for name, check in found.items() if check.status != "ok"} == {"image": "unknown"}
    assert AK in found["credentials"].detail
    assert plane.wire.count("create") == 0


@for_each(
    ("fault", "name", "words"),
    [
        ("agency", "authorization", "Add Authorization"),
        ("quota", "quota", "Quotas"),
        ("flavor", "flavor", "modelarts.vm.cpu.2u"),
        ("nodes", "flavor", "fewer nodes"),
        ("bucket", "bucket", "make it in cn-north-4"),
        ("store", "bucket", "obs://BUCKET/PREFIX"),
        ("key", "credentials", "HUAWEICLOUD_SDK_AK"),
    ],
)
def test_doctor_names_each_fault(fault: str, name: str, words: str, tmp_path: Path) -> None:
    folder = tmp_path / fault
    folder.mkdir()
    with Plane(folder / "huawei") as plane, pytest.MonkeyPatch.context() as patch:
        for key, value in plane.environ().items():
            patch.setenv(key, value)
        plane.obs.make("contract-bucket")
        provider = Provider(**SAMPLE.settings)
        fields = {"flavor": {"instance_type": "modelarts.x.y"}, "nodes": {"instance_type": "modelarts.p3.large.public"}}
        wanted = request(provider, folder, instance_count=2, **fields.get(fault, {}))
        store = {"bucket": "obs://another/x", "store": "s3://bucket/x"}.get(fault, SAMPLE.store)
        plane.agency, plane.quota = fault != "agency", 0 if fault == "quota" else 10
        if fault == "key":
            patch.delenv("HUAWEICLOUD_SDK_AK")
            patch.setenv("HUAWEICLOUD_SDK_CREDENTIALS_FILE", str(folder / "none"))
            patch.setattr(obs, "_MACHINE", "http://127.0.0.1:9/none")
        found = [check for check in provider.checks(store, wanted) if check.status == "failed"]
    assert [check.name for check in found] == [name]
    assert words in found[0].fix
