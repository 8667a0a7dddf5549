"""Provider ``sagemaker`` over the wire: the contract suite, and whole runs by the command line."""

from __future__ import annotations

import dataclasses
import json
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import boto3
import clients
import pytest
from clients import (
    CALLS,
    DDP,
    DEATHS,
    DIGITS,
    PATIENCE,
    SHAPE,
    TRAIN,
    at_work,
    check_cancelled,
    check_death,
    ids_of_a_race,
)
from jobs import Done, Jobs, dying
from servers import Web
from worlds.sagemaker.life import LOG_GROUP
from worlds.sagemaker.plane import REGISTRY
from worlds.sagemaker.wire import Fault
from worlds.sagemaker.world import SageMakerWorld

from cloudtrain.errors import AuthError, ConflictError
from cloudtrain.runs.run import Run
from cloudtrain.testing.contract import ProviderContract
from cloudtrain.testing.platform import FakePlatform

pytestmark = [pytest.mark.docker, pytest.mark.remote, pytest.mark.slow]


@pytest.fixture(scope="class")
def made(
    tmp_path_factory: pytest.TempPathFactory, s3_server: str, engine: Any, images: Callable[[str], str]
) -> Iterator[SageMakerWorld]:
    """Give a FakePlatform for this class alone, with its environment."""
    folder = tmp_path_factory.mktemp("world")
    with at_work(folder, engine, lambda: SageMakerWorld(folder, moto=s3_server, image=images("pip"))) as world:
        yield world


class TestSageMaker(ProviderContract):
    @pytest.fixture(scope="class")
    @classmethod
    def world(cls, made: SageMakerWorld) -> FakePlatform:
        return made


# ----------------------------------------------------------------------------------------------------------- whole runs


class Client(clients.Client):
    """The command line, with a store on S3."""

    world: SageMakerWorld

    def __init__(self, world: SageMakerWorld, jobs: Jobs) -> None:
        super().__init__(world, jobs, "--set", f"role={world.provider.settings.role}", "--image", world.image)

    def until(self, run_id: str, text: str) -> None:
        """Wait until CloudWatch has a line with ``text``."""
        job, logs = self.job(run_id), self.world.plane.logs()
        stream = f"{job.name}/"
        Jobs.wait_for(lambda: job.over or any(text in line for line in logs.messages(LOG_GROUP, stream)), PATIENCE)
        assert not job.over, job.describe().get("FailureReason")


@pytest.fixture
def client(made: SageMakerWorld, tmp_path: Path) -> Iterator[Client]:
    jobs = Jobs(tmp_path)
    yield Client(made, jobs)
    jobs.close()


@pytest.mark.timeout(4 * PATIENCE)
class TestWholeRuns:
    @pytest.mark.proof
    def test_an_interrupted_spot_run_resumes_bit_for_bit(
        self, client: Client, whole: dict[int, float], web: Web, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Check with a lagging sync that restores deleted files from the peer. The data come from a web server that the
        instances cannot read, so the store gets a copy."""
        monkeypatch.setattr(client.world.plane, "sync_lag", 1.0)
        monkeypatch.setattr(client.world.plane, "stale_copies", True)
        epoch = random.Random(6).randrange(1, 3)
        web.write("digits.csv.gz", DIGITS.read_bytes())
        train = ("--input", f"train={web.url}/digits.csv.gz", *TRAIN[2:])
        words = client.words(DDP, "spot", *train, "--spot", "--keep-checkpoints", "2")
        process = client.jobs.start(*words)
        client.until("spot", f"step {22 * epoch} epoch {epoch} ")
        client.job("spot").interrupt(1)
        out, err = process.communicate(timeout=PATIENCE)
        done = Done(process.returncode, out, err)
        assert (done.code, done.json["state"]) == (0, "succeeded"), err
        first, second = done.json["attempts"]
        assert (first["number"], second["number"]) == ("0.0", "0.1")
        assert int(second["resumed_from"].removeprefix("step-")) >= 22 * epoch
        assert client.losses("spot") == whole
        assert done.json["uploaded"]["data_bytes"] == DIGITS.stat().st_size

    @pytest.mark.proof
    def test_a_stopped_run_leaves_the_checkpoints_of_all_ranks(self, client: Client) -> None:
        check_cancelled(client)
        assert client.job("stopped").describe()["SecondaryStatus"] == "Stopped"
        commit = client.run("stopped").store.newest_checkpoint("stopped")
        assert commit is not None
        assert commit.name == "last"


# ----------------------------------------------------------------------------------------------- downloads of a restart


SHARDS_BYTES = 4 * (2 << 20)
SHARDS = """
import os, sys, time
from pathlib import Path
rank, folder = os.environ["RANK"], Path(os.environ["CLOUDTRAIN_CHECKPOINT_DIR"])
resumed = os.environ.get("CLOUDTRAIN_RESUME_FROM", "")
step = int(resumed.rpartition("-")[2]) if resumed else 0
if resumed:
    print("resumed with", len(os.listdir(resumed)), "shards of step", step, flush=True)
while step < 100:
    step += 1
    notice = os.path.exists(os.environ["CLOUDTRAIN_PREEMPT_FILE"])
    path = folder / f"step-{step:03d}" / f"shard-{rank}"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(os.urandom(2 << 20))
    print("saved", step, flush=True)
    if notice or (step >= 12 and resumed and os.environ["CLOUDTRAIN_ATTEMPT"] == "0.2"):
        sys.exit()
    for _ in range(60):
        if not os.path.exists(os.environ["CLOUDTRAIN_PREEMPT_FILE"]):
            time.sleep(0.1)
"""


@pytest.mark.proof
@pytest.mark.timeout(4 * PATIENCE)
def test_a_restart_downloads_one_checkpoint(client: Client) -> None:
    """Interrupt a spot run of two nodes twice, and compare the downloaded bytes with one checkpoint."""
    client.jobs.write("shards.py", SHARDS)
    words = ["submit", "shards.py", *client.flags, *SHAPE, "--run-id", "shards", "--spot"]
    process = client.jobs.start(*words)
    for step, start in ((5, 1), (10, 2)):
        client.until("shards", f"saved {step}")
        client.job("shards").interrupt()
        Jobs.wait_for(lambda start=start: client.job("shards").starts > start, PATIENCE)
    out, err = process.communicate(timeout=PATIENCE)
    done = Done(process.returncode, out, err)
    assert (done.code, done.json["state"]) == (0, "succeeded"), err
    resumed = [row["resumed_from"] for row in done.json["attempts"]]
    store, job = client.run("shards").store, client.job("shards")
    first, *restarts = job.restored
    assert [sum(files.values()) for files in first] == [0, 0]
    for name, nodes in zip(resumed[1:], restarts, strict=True):
        for files in nodes:
            came = sum(files.values())
            print(f"resumed from {name}: {came} of {SHARDS_BYTES} bytes, {came / SHARDS_BYTES:.3f}", len(files))
            assert came <= 1.1 * SHARDS_BYTES, [file for file in files if "shard" in file]
    kept = store.checkpoints("shards")
    assert ["/live/" in item.key for item in kept] == [False, False, True]
    found = sorted(path.name for path in (client.pulled("shards") / "checkpoints").iterdir())
    assert found == [item.name for item in kept]
    archived = {key.split("/")[4] for key in store.files.list("runs/shards/archive/checkpoints")}
    assert archived == {item.name for item in kept[:2]}


# --------------------------------------------------------------------------------------------------- unreliable service


@pytest.fixture
def idle(
    tmp_path: Path, s3_environment: str, monkeypatch: pytest.MonkeyPatch, engine: Any, images: Callable[[str], str]
) -> Iterator[SageMakerWorld]:
    """Give an account without machines: its jobs wait for capacity until they are stopped."""
    world = SageMakerWorld(tmp_path, moto=s3_environment, image=images("pip"))
    for name, value in world.plane.environ().items():
        monkeypatch.setenv(name, value)
    world.plane.no_capacity.add("ml.m5.xlarge")
    world.plane.capacity_seconds = 600.0
    yield world
    world.close()


class TestTrouble:
    @pytest.mark.parametrize(
        "fault",
        [Fault.throttled("CreateTrainingJob", 2), Fault.broken("CreateTrainingJob", 2)],
        ids=lambda fault: fault.error.code,
    )
    def test_passing_faults_are_retried(self, idle: SageMakerWorld, fault: Fault) -> None:
        idle.plane.wire.faults.append(dataclasses.replace(fault))
        run = idle.send(idle.plan(run_id="again"))
        assert run.status().state == "pending"
        assert idle.plane.wire.count("CreateTrainingJob") == 3
        assert len(idle.plane.jobs) == 1

    @pytest.mark.parametrize(
        "fault", [Fault("CreateTrainingJob", done=True), Fault.broken("CreateTrainingJob", done=True)]
    )
    def test_a_lost_answer_makes_no_second_job(self, idle: SageMakerWorld, fault: Fault) -> None:
        idle.plane.wire.faults.append(dataclasses.replace(fault))
        run = idle.send(idle.plan(run_id="lost"))
        assert run.status().state == "pending"
        assert len(idle.plane.jobs) == 1

    def test_many_clients_at_one_create_a_second(self, idle: SageMakerWorld) -> None:
        """Check that each run is one job, however often its creation was throttled."""
        idle.plane.creates_a_second = 1.0  # AWS's own, and slower than any machine sends eight
        plans = {f"throttled-{number}": idle.plan(run_id=f"throttled-{number}") for number in range(8)}
        with ThreadPoolExecutor(8) as pool:
            runs = list(pool.map(idle.send, plans.values()))
        assert [run.status().state for run in runs] == ["pending"] * 8
        assert sorted(name for _, name in idle.plane.jobs) == sorted(
            plan.request.body["TrainingJobName"] for plan in plans.values()
        )
        assert idle.plane.wire.count("CreateTrainingJob") > 8, "no creation was throttled"

    def test_many_clients_at_once_create_one_job(self, idle: SageMakerWorld) -> None:
        found = ids_of_a_race(idle)
        assert len(idle.plane.jobs) == 1
        assert found == {idle.provider.find(idle.plan(run_id="race").request)}

    def test_a_foreign_job_of_that_name_is_a_conflict(self, idle: SageMakerWorld) -> None:
        plan = idle.plan(run_id="taken")
        for channel in plan.request.body["InputDataConfig"]:
            url = channel["DataSource"]["S3DataSource"]["S3Uri"]
            idle.plane.bucket.put(f"{url}x", b"so that there is one")
        boto3.client("sagemaker").create_training_job(**{**plan.request.body, "Tags": []})
        with pytest.raises(ConflictError) as caught:
            idle.send(plan)
        assert (caught.value.exit_code, caught.value.field) == (2, "run_id")
        assert idle.provider.find(plan.request) is None

    def test_credentials_that_expire_in_a_long_wait_are_read_again(
        self, idle: SageMakerWorld, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        run = idle.send(idle.plan(run_id="expires"))
        keys = tmp_path / "credentials"
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.delenv(name)
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(keys))
        again = type(idle.provider)(**dataclasses.asdict(idle.provider.settings))
        native = str(run.result()["native_id"])
        for key in ("AKIAFIRST00000000000", "AKIASECOND0000000000"):
            idle.plane.wire.keys[key] = "secret"
            keys.write_text(f"[default]\naws_access_key_id = {key}\naws_secret_access_key = secret\n")
            assert again.status(native).state == "pending"
            assert again.logs(native).lines == ()
            idle.plane.wire.expired.add(key)
        with pytest.raises(AuthError, match="sign in again"):
            again.status(native)

    @pytest.mark.parametrize(
        "late", ["as it ends", *(pytest.param(late, marks=pytest.mark.proof) for late in ("", "while it runs"))]
    )
    def test_ten_thousand_lines_come_once_each_and_in_time_order(self, idle: SageMakerWorld, late: str) -> None:
        """Check 64 streams, half of them of a restart, twice: in pages, some throttled, and with late lines."""
        run = idle.send(idle.plan(run_id="lines"))
        (job,), logs, draw = idle.plane.jobs.values(), idle.plane.logs(), random.Random(64)
        logs.page_events, logs.repeats, logs.empty_every = 700, 9, 5
        idle.plane.wire.faults += [Fault.throttled("FilterLogEvents", 1) for _ in range(5)]
        now = int(time.time() * 1000)
        streams = [f"{job.name}/algo-{host}-{1000 + start}" for start in range(2) for host in range(1, 33)]
        held = []
        for number in range(10_000):
            event = streams[number % 64], [(now + number // 10 - draw.randrange(50), f"line {number}")]
            if late and draw.random() < 0.4:
                held.append(event)
            else:
                logs.put(LOG_GROUP, *event)
        logs.put(LOG_GROUP, f"{job.name}-2/algo-1-1", [(now, "another's")])
        lines = []
        for line in run.logs(follow=True, poll=0.2):
            lines.append(line)
            while held:  # they come while the first page, which is in order, is read
                logs.put(LOG_GROUP, *held.pop())
            if len(lines) == 1:
                threading.Timer(0.0 if late == "as it ends" else 4.0, job.stop).start()
        assert sorted(int(line.text.removeprefix("line ")) for line in lines) == list(range(10_000))
        assert {line.node for line in lines} == {str(host) for host in range(32)}
        times = [line.time or 0.0 for line in lines]
        assert (times == sorted(times)) != bool(late)

    def test_a_node_that_dies_before_its_peers_begin_is_reported_at_once(self, idle: SageMakerWorld) -> None:
        run = idle.send(idle.plan({"instance_count": 2}, run_id="alone"))
        (job,) = idle.plane.jobs.values()
        assert list(run.logs()) == []
        idle.plane.logs().put(LOG_GROUP, f"{job.name}/algo-2-1", [(int(time.time() * 1000), "no such file")])
        assert [(line.node, line.text) for line in run.logs()] == [("1", "no such file")]

    def test_cancelled_while_it_waits_for_machines(self, idle: SageMakerWorld) -> None:
        run = idle.send(idle.plan(run_id="waits"))
        assert run.status().state == "pending"
        run.cancel()
        result = run.wait(timeout=PATIENCE, poll=0.2)
        assert (result["state"], result["exit_code"]) == ("cancelled", 5)

    def test_spot_machines_that_never_come_are_a_lack_of_capacity(self, idle: SageMakerWorld) -> None:
        run = idle.send(idle.plan({"spot": True, "max_runtime": 1, "max_wait": 1}, run_id="never"))
        result = run.wait(timeout=PATIENCE, poll=0.2)
        assert (result["state"], result["category"], result["exit_code"]) == ("failed", "capacity", 4)

    def test_machines_on_demand_that_never_come_are_a_lack_of_capacity(self, idle: SageMakerWorld) -> None:
        """Check this because the service stops such a job without a reason."""
        idle.plane.no_capacity.add("ml.g5.xlarge")
        run = idle.send(idle.plan({"gpu": ("A10G:1",), "max_wait": 1800}, run_id="pending"))
        (job,) = idle.plane.jobs.values()
        assert run.status().state == "pending"
        job.record["CreationTime"] -= 1801
        result = run.wait(timeout=PATIENCE, poll=0.2)
        assert job.record["TrainingJobStatus"] == job.record["SecondaryStatus"] == "Stopped"
        assert (result["state"], result["category"], result["exit_code"]) == ("failed", "capacity", 4)

    def test_an_image_without_python_is_named(self, idle: SageMakerWorld, images: Callable[[str], str]) -> None:
        """Check that the platform knows the cause, though no code of cloudtrain ran."""
        idle.plane.no_capacity.clear()
        run = idle.send(idle.plan({"image": f"{REGISTRY}/{images('nopython')}"}, run_id="no-python"))
        result = run.wait(timeout=PATIENCE, poll=0.2)
        (job,) = idle.plane.jobs.values()
        reason = " ".join(job.describe()["FailureReason"].split())
        assert reason == "AlgorithmError: never started: no python 3.10 , exit code: 127"
        assert (result["category"], result["exit_code"]) == ("image", 2)
        assert "never started: no python 3.10" in result["reason"]

    def test_a_script_s_message_is_not_the_platform_s(self, idle: SageMakerWorld) -> None:
        """Check this because its error is in FailureReason too."""
        idle.plane.no_capacity.clear()
        message = "the quota is used up: insufficient capacity, InternalServerError, no image to pull"
        (idle.place.code / "train.py").write_text(f"raise ValueError({message!r})\n")
        run = idle.send(idle.plan({"launcher": "python"}, run_id="says"))
        result = run.wait(timeout=PATIENCE, poll=0.2)
        (job,) = idle.plane.jobs.values()
        assert message in job.describe()["FailureReason"]
        assert (result["category"], result["exit_code"]) == ("user_error", 1)

    def test_an_unknown_status_is_running(self, idle: SageMakerWorld) -> None:
        run = idle.send(idle.plan(run_id="odd"))
        (job,) = idle.plane.jobs.values()
        idle.plane.unknown[job.name] = "Quiescing"
        assert run.status().state == "running"
        assert "Quiescing" in run.status().native


@pytest.mark.parametrize(("step", "moment"), DEATHS)
def test_a_client_that_dies_leaves_no_job_without_a_record(
    idle: SageMakerWorld, tmp_path: Path, step: str, moment: str
) -> None:
    (tmp_path / "jobs").mkdir()
    jobs = Jobs(tmp_path / "jobs")
    script = jobs.write("hold/train.py", "print('hello')\n")
    natives = lambda: [job.arn for job in idle.plane.jobs.values()]  # noqa: E731
    check_death(Client(idle, jobs), step, moment, str(script), natives)
    jobs.close()


# ------------------------------------------------------------------------------------------------------------ reconcile


def no_machines(idle: SageMakerWorld, tmp_path: Path) -> tuple[Jobs, Run]:
    """Return clients, and a run whose first attempt found no machines and may have another."""
    (tmp_path / "jobs").mkdir()
    run = idle.send(idle.plan({"spot": True, "max_runtime": 60, "max_wait": 1, "retries": 1}, run_id="again"))
    (job,) = idle.plane.jobs.values()
    Jobs.wait_for(lambda: job.over, PATIENCE)
    return Jobs(tmp_path / "jobs"), run


@pytest.mark.proof
def test_two_reconciling_clients_start_one_attempt(idle: SageMakerWorld, tmp_path: Path) -> None:
    jobs, run = no_machines(idle, tmp_path)
    started = [jobs.start("reconcile", target, "--json") for target in (run.url, run.store.url)]
    for process in started:
        out, err = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0, out + err
        assert json.loads(out)["runs"][0]["error"] is None, out
    assert len(idle.plane.jobs) == 2
    assert run.store.attempts("again") == [0, 1]
    *_, second = idle.plane.jobs.values()
    Jobs.wait_for(lambda: second.over, PATIENCE)
    done = jobs.here("reconcile", run.store.url, "--json")
    (row,) = done.json["runs"]
    assert (row["state"], row["category"], done.code) == ("failed", "capacity", 0), row
    assert run.store.result("again") is not None
    assert jobs.here("reconcile", run.store.url, "--json").json["runs"] == []
    jobs.close()


@pytest.mark.parametrize(
    ("step", "moment"),
    [
        pytest.param("submit", "after", marks=pytest.mark.proof),
        pytest.param("create_attempt", "after", marks=pytest.mark.proof),
        pytest.param("write_submitted", "before", marks=pytest.mark.proof),
    ],
)
def test_a_client_that_dies_reconciling_leaves_no_second_job(
    idle: SageMakerWorld, tmp_path: Path, step: str, moment: str
) -> None:
    jobs, run = no_machines(idle, tmp_path)
    client = jobs.start("reconcile", run.url, python=dying(CALLS[step].format(provider="sagemaker"), moment))
    out, err = client.communicate(timeout=PATIENCE)
    assert client.returncode == 99, out + err
    for _ in range(2):
        done = jobs.here("reconcile", run.url, "--json")
        assert done.code == 0, done.err
    assert len(idle.plane.jobs) == 2
    assert run.store.submitted("again", 1) is not None
    jobs.close()
