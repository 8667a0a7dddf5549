"""Provider ``vertex`` over the wire: the contract suite, and whole runs by the command line."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import clients
import pytest
from clients import DDP, PATIENCE, PLAIN, SHAPE, TRAIN, at_work, check_cancelled
from jobs import Done, Jobs
from worlds.vertex.life import CustomJob
from worlds.vertex.wire import Fault, Refusal
from worlds.vertex.world import BUCKET, VertexWorld

from cloudtrain.errors import AuthError, CloudtrainError, LostContactError
from cloudtrain.testing.contract import ProviderContract
from cloudtrain.testing.platform import FakePlatform

pytestmark = [
    pytest.mark.docker,
    pytest.mark.remote,
    pytest.mark.slow,
    # aiohttp warns of bodies of bytes above 1 MiB, and gcsfs chooses what it sends.
    pytest.mark.filterwarnings("ignore:Sending a large body directly:ResourceWarning"),
]

TRIALS = 100
"""Trials of a creation whose answer is lost."""
EARLY_SECONDS = 10
"""Seconds by which node 0 ends before its peers."""


@pytest.fixture(scope="class")
def made(tmp_path_factory: pytest.TempPathFactory, engine: Any, images: Callable[[str], str]) -> Iterator[VertexWorld]:
    """Give a FakePlatform for this class alone, with its environment."""
    folder = tmp_path_factory.mktemp("world")
    with at_work(folder, engine, lambda: VertexWorld(folder, image=images("pip"))) as world:
        yield world


class TestVertex(ProviderContract):
    @pytest.fixture(scope="class")
    @classmethod
    def world(cls, made: VertexWorld) -> FakePlatform:
        return made


# ----------------------------------------------------------------------------------------------------------- whole runs


class Client(clients.Client):
    """The command line, with a store on Cloud Storage."""

    world: VertexWorld

    def __init__(self, world: VertexWorld, jobs: Jobs) -> None:
        settings = [word for name, value in world.settings.items() for word in ("--set", f"{name}={value}")]
        super().__init__(world, jobs, "--image", world.image, *settings)

    def until(self, run_id: str, text: str, attempt: int = 0) -> CustomJob:
        """Wait until a node of the job has printed a line with ``text``. Return the job."""
        job: CustomJob = self.job(run_id, attempt)
        Jobs.wait_for(lambda: job.over or text in job.printed(), PATIENCE)
        assert not job.over, job.record.error
        return job


@pytest.fixture
def client(made: VertexWorld, tmp_path: Path) -> Iterator[Client]:
    jobs = Jobs(tmp_path)
    yield Client(made, jobs)
    jobs.close()


EARLY = f"""
    import os, sys, time
    from pathlib import Path
    rank = os.environ["RANK"]
    folder = Path(os.environ["CLOUDTRAIN_CHECKPOINT_DIR"], "last")
    folder.mkdir(exist_ok=True)
    (folder / ("shard-" + rank)).write_text("of " + rank)
    if rank in "23":
        time.sleep({EARLY_SECONDS})
    Path(os.environ["CLOUDTRAIN_ARTIFACT_DIR"], "of-" + rank).write_text(rank)
    print("the last of", rank, flush=True)
"""


PORTS = """
    import os, socket
    if os.environ["RANK"] == "1":
        name, found = os.environ["MASTER_ADDR"], {}
        for port in (2222, 2223, 3333, 6000, 29500):
            try:
                socket.create_connection((name, port), 10).close()
                found[port] = "open"
            except ConnectionRefusedError:
                found[port] = "refused"
        print("by name:", found, flush=True)
"""
STEPS_FAIL = """
    import os
    from pathlib import Path
    rank = os.environ["RANK"]
    if rank == "0":
        print("the script begins", flush=True)
    for step in range(1, 9):
        if step == 5 and rank == "1":
            raise RuntimeError("my bug in step 5")
"""


@pytest.mark.timeout(4 * PATIENCE)
class TestWholeRuns:
    def test_two_nodes_meet_at_the_ports_that_the_chief_s_name_forwards(self, client: Client) -> None:
        script = client.jobs.write("ports/ports.py", PORTS)
        done = client.submit(str(script), "ports", shape=PLAIN)
        assert (done.code, done.json["state"]) == (0, "succeeded"), done.err
        found = {2222: "open", 2223: "refused", 3333: "open", 6000: "open", 29500: "refused"}
        assert f"by name: {found}" in client.job("ports").printed()

    def test_a_script_that_fails_runs_once_though_its_container_is_started_again(self, client: Client) -> None:
        """Check this because Vertex AI restarts a failed container at once and in place, until it has ended the job."""
        script = client.jobs.write("bug/bug.py", STEPS_FAIL)
        done = client.submit(str(script), "bug", shape=PLAIN)
        result, printed = done.json, client.job("bug").printed()
        assert (done.code, result["category"]) == (1, "user_error"), done.err
        failure = result["failure"]
        assert (failure["node"], failure["rank"], failure["exception"], failure["line"]) == (
            1, 1, "RuntimeError: my bug in step 5", 9,
        )  # fmt: skip
        assert [row["number"] for row in result["attempts"]] == ["0.0"]
        assert printed.count("the script begins") == 1
        assert "the script does not run a second time" in printed, "no container was started again"
        assert "cloudtrain: RuntimeError: my bug in step 5" in printed, "Vertex AI's own message shows what comes last"

    @pytest.mark.proof
    def test_spot_machines_that_are_taken_back_resume_bit_for_bit(
        self, client: Client, whole: dict[int, float]
    ) -> None:
        epoch = random.Random(8).randrange(2, 6)
        process = client.jobs.start(*client.words(DDP, "spot", *TRAIN, "--spot", "--keep-checkpoints", "2"))
        client.until("spot", f"step {22 * epoch} epoch {epoch} ").preempt(1)
        out, err = process.communicate(timeout=PATIENCE)
        done = Done(process.returncode, out, err)
        assert (done.code, done.json["state"]) == (0, "succeeded"), err
        first, second = done.json["attempts"]
        assert (first["number"], second["number"]) == ("0.0", "0.1")
        assert int(second["resumed_from"].removeprefix("step-")) >= 22 * epoch
        assert client.losses("spot") == whole

    @pytest.mark.proof
    @pytest.mark.parametrize("grace", [6.0, None], ids=["killed early", "kept"])
    def test_the_doctor_looks_at_ports_folders_and_grace(self, client: Client, grace: float | None) -> None:
        """Check two small machines. Doctor reports a service that kills early, and no other."""
        plane = client.world.plane
        kept, plane.grace = plane.grace, plane.grace if grace is None else grace
        try:
            words = [*[word for word in client.flags if word != "--provider"][1:], *SHAPE]
            done = client.jobs.here("doctor", "vertex", "--job", "--measure-grace", *words)
        finally:
            plane.grace = kept
        doctor_report = done.json
        report = doctor_report["report"]
        assert doctor_report["state"] == "cancelled", done.err
        assert {2222, 2223, 3333, 6000, 29500} <= {int(port) for port in report["ports"]["ports"]}
        tried = report["ports"]["from"]["1"]
        assert set(tried["address"].values()) == {""}
        assert [tried["name"][port] for port in ("2222", "3333", "6000")] == ["", "", ""]
        assert report["ports"]["name"].startswith("cmle-training-workerpool0-")
        assert report["allreduce"]["right"]
        assert all(row["folders"]["checkpoints"]["writable"] for row in report["nodes"].values())
        rows = report["grace"]["nodes"].values()
        assert report["grace"]["reckoned"] == 30
        if grace is None:
            assert (done.code, doctor_report["problems"]) == (0, []), done.err
            assert all(row["recorded"] and 20 < row["seconds"] < 30 for row in rows)
        else:
            assert done.code == 1
            assert [line[:17] for line in doctor_report["problems"]] == ["node 0 was killed", "node 1 was killed"]
            seconds = [row["seconds"] for row in rows if not row["recorded"]]
            assert [2 < each < 10 for each in seconds] == [True, True], seconds

    @pytest.mark.proof
    def test_a_node_0_that_is_done_long_before_its_peers_loses_nothing(self, client: Client) -> None:
        """Check this because the service takes its end for the job's, and kills the others at once."""
        script = client.jobs.write("early/early.py", EARLY)
        done = client.submit(str(script), "early")
        assert (done.code, done.json["state"]) == (0, "succeeded"), done.err
        pulled = client.pulled("early")
        shards = {path.name: path.read_text() for path in (pulled / "checkpoints/last").iterdir()}
        assert shards == {f"shard-{rank}": f"of {rank}" for rank in range(4)}
        assert {path.name for path in (pulled / "artifacts").rglob("of-*")} == {f"of-{rank}" for rank in range(4)}
        followed = client.jobs.here("logs", "early", "--store", client.store).out
        assert [followed.count(f"the last of {rank}") for rank in range(4)] == [1, 1, 1, 1]
        assert [(record["node"], record["outcome"]) for record in client.run("early").store.exits("early")] == [
            (0, "succeeded"), (1, "succeeded"),
        ]  # fmt: skip
        job = client.job("early")
        assert job.record.end_time.seconds - job.record.start_time.seconds >= EARLY_SECONDS

    @pytest.mark.proof
    def test_a_cancelled_run_leaves_the_checkpoints_of_all_ranks(self, client: Client) -> None:
        check_cancelled(client)
        assert client.job("stopped").history[-2:] == ["JOB_STATE_CANCELLING", "JOB_STATE_CANCELLED"]

    @pytest.mark.proof
    def test_a_worker_that_is_lost_starts_the_job_again(self, client: Client, whole: dict[int, float]) -> None:
        process = client.jobs.start(*client.words(DDP, "lost", *TRAIN))
        client.until("lost", "step 66 epoch 3 ").lose(1)
        out, err = process.communicate(timeout=PATIENCE)
        done = Done(process.returncode, out, err)
        assert (done.code, done.json["state"]) == (0, "succeeded"), err
        assert [attempt["number"] for attempt in done.json["attempts"]] == ["0.0", "0.1"]
        assert client.losses("lost") == whole


# --------------------------------------------------------------------------------------------------- unreliable service


@pytest.fixture
def idle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, images: Callable[[str], str]) -> Iterator[VertexWorld]:
    """Give a project without machines: its jobs wait until they are cancelled."""
    world = VertexWorld(tmp_path, image=images("pip"))
    for name, value in world.plane.environ().items():
        monkeypatch.setenv(name, value)
    world.plane.no_capacity, world.plane.capacity_seconds = True, 600.0
    yield world
    world.close()


def held(world: VertexWorld) -> CustomJob:
    """Return the only job."""
    (job,) = world.plane.jobs.values()
    return job


class TestTrouble:
    @pytest.mark.parametrize(
        "fault",
        [Fault.throttled("POST customJobs", 1, seconds=1), Fault.broken("POST customJobs", 2)],
        ids=["throttled", "unavailable"],
    )
    def test_passing_faults_are_retried(self, idle: VertexWorld, fault: Fault) -> None:
        idle.plane.wire.faults.append(Fault(fault.operation, fault.error, fault.times))
        run = idle.send(idle.plan(run_id="again"))
        assert run.status().state == "pending"
        assert idle.plane.wire.count("POST customJobs") == fault.times + 1
        held(idle)

    @pytest.mark.parametrize(
        "trials", [3, pytest.param(TRIALS, marks=[pytest.mark.proof, pytest.mark.timeout(4 * PATIENCE)])]
    )
    def test_a_creation_whose_answer_is_lost_is_one_job(self, idle: VertexWorld, trials: int) -> None:
        """Check this though the listing that would show the job lags. In some trials the job was never created."""
        draw = random.Random(trials)
        for number in range(trials):
            before = set(idle.plane.jobs)
            idle.plane.list_lag = draw.choice((0.0, 0.5, 2.0))
            idle.plane.wire.faults.append(Fault("POST customJobs", done=draw.random() < 0.8))
            run = idle.send(idle.plan(run_id=f"lost-{number}"))
            (name,) = set(idle.plane.jobs) - before
            assert run.result()["native_id"] == name
            idle.plane.job(name).stop()
        assert idle.plane.wire.count("POST customJobs") >= trials

    def test_no_machines_at_submission_and_no_machines_later(self, idle: VertexWorld) -> None:
        """Check both forms: a refusal with the status of a rate limit, and a job that failed."""
        message = "Resources are insufficient in region: europe-west4. Please try a different region."
        idle.plane.wire.faults.append(Fault("POST customJobs", Refusal("RESOURCE_EXHAUSTED", message)))
        with pytest.raises(CloudtrainError) as caught:
            idle.send(idle.plan(run_id="at-once"))
        assert (caught.value.exit_code, type(caught.value).__name__) == (4, "CapacityError")
        assert idle.plane.jobs == {}
        idle.plane.capacity_seconds = 1.0
        result = idle.send(idle.plan(run_id="in-the-end")).wait(timeout=PATIENCE, poll=0.2)
        assert (result["state"], result["category"], result["exit_code"]) == ("failed", "capacity", 4)

    @pytest.mark.parametrize("state", ["CANCELLED", "EXPIRED", "FAILED"])
    def test_a_job_that_ran_for_too_long_is_a_timeout_in_any_state(self, idle: VertexWorld, state: str) -> None:
        """Check without a container: the test writes the record as the service would."""
        run = idle.send(idle.plan({"max_runtime": 3600}, run_id="long"))
        job = held(idle)
        began = {"attempt": "0.0", "started": time.time() - 3700, "after": None}
        run.store.files.write("runs/long/live/attempts/0.0.json", json.dumps(began).encode())
        job.end(state)
        result = run.wait(timeout=PATIENCE, poll=0.2)
        assert (result["state"], result["category"], result["exit_code"]) == ("failed", "timeout", 6)

    def test_cancelled_while_it_waits_for_machines(self, idle: VertexWorld) -> None:
        run = idle.send(idle.plan(run_id="waits"))
        run.cancel()
        result = run.wait(timeout=PATIENCE, poll=0.2)
        assert (result["state"], result["exit_code"]) == ("cancelled", 5)

    def test_an_unknown_state_is_running(self, idle: VertexWorld) -> None:
        run = idle.send(idle.plan(run_id="odd"))
        idle.plane.unknown[held(idle).name] = 77
        assert run.status().state == "running"
        assert "77" in run.status().native

    def test_a_key_that_is_revoked_during_a_run(self, idle: VertexWorld) -> None:
        run = idle.send(idle.plan(run_id="revoked"))
        native = held(idle).name
        idle.plane.identity.expire()
        assert run.provider.status(native).state == "pending", "the client must get another token"
        idle.plane.identity.expire()
        idle.plane.identity.signed_in = False
        with pytest.raises(AuthError):
            idle.provider.status(native)

    def test_a_bucket_elsewhere_is_refused_before_anything_is_created(self, idle: VertexWorld) -> None:
        for place in (("US-EAST1", "region"), ("EU", "multi-region")):
            idle.plane.gcs.places[BUCKET] = place
            with pytest.raises(CloudtrainError) as caught:
                idle.send(idle.plan(run_id=f"elsewhere-{place[1]}"))
            assert (caught.value.exit_code, caught.value.field, "\n" in str(caught.value)) == (2, "store", False)
        assert idle.plane.jobs == {}

    @pytest.mark.parametrize(
        ("count", "late"), [(400, 6.0), pytest.param(4000, 30.0, marks=[pytest.mark.proof, pytest.mark.timeout(600)])]
    )
    def test_every_line_comes_once_however_late(self, idle: VertexWorld, count: int, late: float) -> None:
        """Check lines up to ``late`` seconds late, out of order, twice and in pages, with refusals in between."""
        idle.provider = type(idle.provider)(**{**idle.settings, "log_drain": int(late) + 2})
        run = idle.send(idle.plan({"instance_count": 2}, run_id="lines"))
        job, entries, draw = held(idle), idle.plane.entries, random.Random(count)
        entries.delay = lambda task, text: draw.choice((0.0, draw.random() * late))
        entries.twice = lambda entry: entry.timestamp % 3 == 0
        entries.page_entries, entries.repeats = 300, 7
        idle.plane.wire.faults += [Fault.throttled("POST entries", 1, seconds=n % 3) for n in range(4)]

        def print_them() -> None:
            for number in range(count):
                entries.put(job.id, f"workerpool{number % 2}-0", [f"line {number}"])
                if number % 100 == 99:
                    time.sleep(0.2)
            entries.put("43", "workerpool0-0", ["another's"])
            job.stop()
            idle.plane.wire.faults.append(Fault.throttled("POST entries", 2, seconds=1))

        printer = threading.Thread(target=print_them)
        printer.start()
        lines = list(run.logs(follow=True, poll=0.2))
        printer.join()
        own_lines = [line for line in lines if line.text.startswith("line ")]
        assert sorted(int(line.text.removeprefix("line ")) for line in own_lines) == list(range(count))
        assert {(line.node, int(line.text.removeprefix("line ")) % 2) for line in own_lines} == {("0", 0), ("1", 1)}
        assert not any("another" in line.text for line in lines)

    def test_an_unreachable_log_does_not_end_a_run(self, idle: VertexWorld) -> None:
        run = idle.send(idle.plan(run_id="silent"))
        idle.plane.wire.faults.append(Fault.broken("POST entries", 1))
        with pytest.raises(LostContactError):
            idle.provider.logs(held(idle).name)
        idle.plane.entries.put(held(idle).id, "workerpool0-0", ["here again"])
        assert "here again" in [line.text for line in run.logs()]
