"""Preemption on Azure ML without a signal: Scheduled Events, a lost machine, and a restart of the same job.

The metadata service is the loopback one of `worlds.azureml`; the jobs run in local containers.
"""

from __future__ import annotations

import http.server
import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from azureml_client import AzureClient
from clients import PATIENCE, at_work
from jobs import Jobs
from trials import SCRIPT
from worlds.azureml.life import CommandJob
from worlds.azureml.world import AzureMLWorld

from cloudtrain.providers.azureml import node
from cloudtrain.providers.azureml.node import ScheduledEvents, marker, node_environment

# -------------------------------------------------------------------------------------------------------- announcements


class Metadata:
    """A metadata service: ``answers`` by the end of a path. It records calls that it refused, or that came through a
    proxy."""

    def __init__(self) -> None:
        self.answers: dict[str, str] = {"/name": "AML-set_1"}
        self.calls: list[str] = []
        metadata = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                path, _, query = self.path.partition("?")
                metadata.calls.append(f"{path}?{query}")
                text = next((text for end, text in metadata.answers.items() if path.endswith(end)), None)
                good = self.headers["Metadata"] == "true" and text is not None and path.startswith("/metadata/")
                self.send_response(200 if good else 400)
                self.end_headers()
                self.wfile.write((text or "").encode())

            def log_message(self, *_: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def announce(self, *events: dict[str, Any]) -> None:
        self.answers["/scheduledevents"] = json.dumps({"DocumentIncarnation": 1, "Events": list(events)})


@pytest.fixture
def metadata() -> Iterator[Metadata]:
    made = Metadata()
    yield made
    made.server.shutdown()
    made.server.server_close()


def event(kind: str = "Preempt", *machines: str) -> dict[str, Any]:
    return {"EventId": "A", "EventStatus": "Scheduled", "EventType": kind, "Resources": [*machines] or ["aml-set_1"]}


@pytest.mark.parametrize(
    ("events", "reason"),
    [
        ([], ""),
        ([event()], "Azure announced Preempt of its machine"),
        ([event("Terminate")], "Azure announced Terminate of its machine"),
        ([event("Preempt", "aml-set_0", "AML-SET_1")], "Azure announced Preempt of its machine"),
        ([event("Preempt", "aml-set_0")], ""),
        ([event("Freeze"), event("Reboot"), event("Redeploy")], ""),
        ([event("Reboot"), event()], "Azure announced Preempt of its machine"),
    ],
)
def test_an_event_counts_only_for_this_machine(metadata: Metadata, events: list[dict[str, Any]], reason: str) -> None:
    metadata.announce(*events)
    look = ScheduledEvents(metadata.url)
    assert (look(), look()) == (reason, reason)
    assert metadata.calls.count("/metadata/scheduledevents?api-version=2020-07-01") == 2


def test_the_metadata_service_is_called_without_a_proxy(metadata: Metadata, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    metadata.announce(event())
    assert ScheduledEvents(metadata.url)()


@pytest.mark.parametrize("answer", ["", "<html>", "[]", '{"Events": 7}', '{"Events": [{}]}', '{"Events": [3]}'])
def test_an_empty_answer_is_no_notice(metadata: Metadata, answer: str) -> None:
    metadata.answers["/scheduledevents"] = answer
    assert ScheduledEvents(metadata.url)() is None


def test_a_missing_service_is_no_notice(metadata: Metadata, monkeypatch: pytest.MonkeyPatch) -> None:
    look = ScheduledEvents(metadata.url)
    assert look() is None  # 400
    metadata.server.shutdown()
    metadata.server.server_close()
    assert look() is None
    monkeypatch.setattr(node, "CONNECT_SECONDS", 0.2)
    began = time.monotonic()
    assert ScheduledEvents("http://192.0.2.1")() is None
    assert time.monotonic() - began < 5


def test_a_kubernetes_cluster_announces_by_a_file(tmp_path: Path) -> None:
    file = tmp_path / "to-be-preempted"
    assert marker(str(file)) == ""
    file.touch()
    assert marker(str(file)) == f"{file} is there"


def test_the_address_of_the_metadata_service_is_azures_own() -> None:
    """Check that only cloudtrain's own variable changes it: neither a job's env nor its options can set that."""
    found = node_environment({}, {})
    assert [look._url.geturl() for look in found.notices if isinstance(look, ScheduledEvents)] == [node.URL]
    assert found.hold == 120.0


# ----------------------------------------------------------------------------------------------------------- whole runs

NOTICE, INTERVAL, STEPS, PAUSE = 12.0, 60, 170, 0.05


@pytest.fixture(scope="module")
def made(
    tmp_path_factory: pytest.TempPathFactory, azure_server: str, engine: Any, images: Callable[[str], str]
) -> Iterator[AzureMLWorld]:
    folder = tmp_path_factory.mktemp("world")
    with at_work(folder, engine, lambda: AzureMLWorld(folder, azurite=azure_server, image=images("pip"))) as world:
        world.plane.notice, world.plane.restarts = NOTICE, True
        yield world


@pytest.fixture
def client(made: AzureMLWorld, tmp_path: Path) -> Iterator[AzureClient]:
    jobs = Jobs(tmp_path)
    shutil.copy(SCRIPT, jobs.code)
    yield AzureClient(made, jobs)
    jobs.close()


def detached(client: AzureClient, run_id: str, *words: str) -> CommandJob:
    """Start a run that no client waits for. Return its job at the 80th step."""
    flags = ("--spot", "--detach", "--", "--steps", str(STEPS), "--interval", str(INTERVAL), "--pause", str(PAUSE))
    done = client.submit(str(SCRIPT), run_id, *flags, *words)
    assert done.code == 0, done.err
    client.until(run_id, f"step {INTERVAL + 20} ")
    return client.job(run_id)  # type: ignore[no-any-return]


def steps(job: CommandJob, attempt: str) -> list[int]:
    """Return the steps of rank 0."""
    lines = [line for line in job.printed().splitlines() if line.startswith(f"[a{attempt} n0 r0 ")]
    return [int(line.split("] step ")[1].split()[0]) for line in lines if "] step " in line]


@pytest.mark.docker
@pytest.mark.remote
@pytest.mark.slow
@pytest.mark.timeout(4 * PATIENCE)
class TestWholeRuns:
    @pytest.mark.proof
    def test_the_service_itself_resumes_a_job_whose_machine_was_taken_and_no_step_is_lost(
        self, client: AzureClient
    ) -> None:
        job = detached(client, "taken")
        job.preempt(1)
        assert job.wait(PATIENCE) == "Completed"
        assert (job.starts, client.world.plane.wire.leaks) == (2, [])
        result = client.run("taken").result()
        first, second = result["attempts"]
        assert (first["number"], first["category"], first["node"]) == ("0.0", "preempted", 1), job.printed()
        assert (second["number"], result["state"]) == ("0.1", "succeeded")
        stopped = steps(job, "0.0")[-1]
        assert steps(job, "0.1")[0] == stopped + 1
        assert second["resumed_from"] == f"step-{stopped}"

    @pytest.mark.proof
    def test_a_notice_withdrawn_after_all_ranks_exited_ends_the_attempt_as_preempted(
        self, client: AzureClient, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(client.world.plane, "notice", 10 * NOTICE)
        job = detached(client, "spared")
        job.preempt(0)
        client.until("spared", "waiting until the platform takes node 0, at most 120 s from the notice")
        job.withdraw()
        assert job.wait(PATIENCE) == "Failed"
        assert job.starts == 1
        (attempt,) = client.run("spared").result()["attempts"]
        assert (attempt["number"], attempt["category"]) == ("0.0", "preempted"), job.printed()

    @pytest.mark.proof
    def test_ranks_that_still_run_when_a_notice_is_withdrawn_train_on(
        self, client: AzureClient, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(client.world.plane, "notice", 10 * NOTICE)
        job = detached(client, "deaf", "--deaf")
        job.preempt(1)
        client.until("deaf", "Azure announced Preempt")
        job.withdraw()
        assert job.wait(PATIENCE) == "Failed", "an end within 120 s may be due to the notice"
        assert "the notice was withdrawn; training continues" in job.printed()
        assert (job.starts, steps(job, "0.0")[-1]) == (1, STEPS)
