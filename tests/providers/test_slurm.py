"""Provider ``slurm`` on a real cluster of this machine: the contract suite, and features that need a real Slurm."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from jobs import Jobs
from node_shells import check_shell
from slurmcluster import (
    Cluster,
    SlurmPlatform,
    await_text,
    check_nothing_lost,
    ddp_world,
    loss_of,
    running,
    send,
    texts,
)
from worlds.bucket import MountedBucket

from cloudtrain.errors import LostContactError
from cloudtrain.providers.slurm import Provider, api
from cloudtrain.runs.retry import Retry
from cloudtrain.store.gc import collect_at
from cloudtrain.store.store import Store
from cloudtrain.testing import probe
from cloudtrain.testing.contract import ProviderContract
from cloudtrain.testing.platform import FakePlatform, numbered
from cloudtrain.testing.running import PLAIN

pytestmark = pytest.mark.slow

FAULTY = Path(__file__).parents[1] / "scripts" / "faulty_node"


@pytest.fixture(scope="class")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


class TestSlurm(ProviderContract):
    @pytest.fixture(scope="class")
    @classmethod
    def world(cls, cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> FakePlatform:
        return SlurmPlatform(tmp_path_factory.mktemp("world"), cluster)


# ---------------------------------------------------------------------------------------------------- features of Slurm


@pytest.fixture(scope="module")
def ddp(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmPlatform]:
    """Give a cluster for DDP runs on two nodes."""
    with running(tmp_path_factory.mktemp("slurm")) as cluster:
        yield ddp_world(tmp_path_factory.mktemp("world"), cluster)


@pytest.fixture(scope="module")
def clean(ddp: SlurmPlatform) -> str:
    """Return the loss of an undisturbed run."""
    return loss_of(send(ddp, "clean"))


@pytest.mark.proof
def test_a_preempted_job_saves_and_comes_to_the_same_bits(ddp: SlurmPlatform, clean: str) -> None:
    """Check this while no rank handles a signal, and each has a DataLoader's worker: Slurm's SIGTERM reaches all of
    them."""
    run = send(ddp, "preempted-ddp")
    await_text(run, "from step", 2)
    ddp.cluster.preempt(ddp.job(run), 1)
    assert loss_of(run) == clean
    assert [row["number"] for row in run.result()["attempts"]] == ["0.0", "0.1"]
    check_nothing_lost(run)


@pytest.mark.proof
def test_a_lost_node_is_replaced_and_comes_to_the_same_bits(ddp: SlurmPlatform, clean: str) -> None:
    """Kill slurmd, its step and its ranks. Slurm itself starts the job again, on other nodes."""
    run = send(ddp, "lost-ddp", env={"STEPS": "60", "PACE": "0.2"})
    await_text(run, "from step", 2)
    job = ddp.job(run)
    node = ddp.cluster.nodes_of(job)[1]
    ddp.cluster.kill_node(node)
    try:
        await_text(run, "from step", 4)
        assert node not in ddp.cluster.nodes_of(job)
        assert loss_of(run) == clean
    finally:
        ddp.cluster.start()


@pytest.mark.proof
def test_a_controller_that_restarts_in_the_middle_changes_nothing(ddp: SlurmPlatform, clean: str) -> None:
    run = send(ddp, "restarted-ddp")
    await_text(run, "from step", 2)
    ddp.cluster.end("slurmctld")
    with pytest.raises(LostContactError):
        ddp.provider.find(run.store.attempt_request(run.run_id, 0))
    ddp.cluster.start()
    assert loss_of(run) == clean
    assert [row["number"] for row in run.result()["attempts"]] == ["0.0"]


def test_a_cancelled_job_stays_so(ddp: SlurmPlatform) -> None:
    """Check this because the nodes stop with the code for another start, for which the script must not ask."""
    run = ddp.send(ddp.plan(PLAIN, {"instance_count": 2, "env": {"PROBE": "hold"}}, run_id="cancelled-probe"))
    await_text(run, "holding", 2)
    run.cancel()
    assert run.wait(timeout=60, poll=0.3)["state"] == "cancelled"
    job = ddp.job(run)
    time.sleep(4)  # longer than Slurm holds a requeued job back
    assert ddp.cluster.field(job, "JobState") == "CANCELLED"
    assert ddp.cluster.field(job, "Restarts") == "0"


@pytest.mark.proof
def test_two_jobs_on_one_node_do_not_collide(ddp: SlurmPlatform, clean: str) -> None:
    """Check shared nodes: each job has its own ports."""
    place = type(ddp.provider)(**{**dataclasses.asdict(ddp.provider.settings), "nodelist": "n1,n2"})
    world = ddp_world(ddp.folder / "shared", ddp.cluster, **dataclasses.asdict(place.settings))
    runs = [send(world, f"shared-{number}") for number in range(2)]
    assert [loss_of(run) for run in runs] == [clean, clean]


def test_a_failing_line_of_setup_fails_the_run_and_is_named(ddp: SlurmPlatform, tmp_path: Path) -> None:
    module = tmp_path / "module.sh"
    module.write_text("false\nexport LOADED=yes\nmodule() { eval 'test $2 = gcc'; return $?; }\n[ -d /no ] && cd /no\n")
    lines = [f"source {module}", "[ -d /no/such ] && echo", "grep -q x /dev/null || true", 'echo "setup: $LOADED"']
    world = ddp_world(tmp_path / "good", ddp.cluster, setup=(*lines, "module load gcc", "export PROBE=hold"))
    run = world.send(world.plan(PLAIN, run_id="good-setup"))
    await_text(run, "holding")
    run.cancel()
    assert any("setup: yes" in text for text in texts(run))

    codes = {"module load cuda": 1, "source /no/such": 1, "no-such-tool": 127}
    wanted = {line: f"{line} (exit code {code})" for line, code in codes.items()}
    wanted["[ -e /no/such ] || exit 0"] = "it ended the job script (exit code 0)"
    for number, (line, which) in enumerate(wanted.items()):
        world = ddp_world(tmp_path / f"bad-{number}", ddp.cluster, setup=(*lines, line, "echo later"))
        run = world.send(world.plan(PLAIN, run_id=f"bad-setup-{number}"))
        result, why = run.wait(timeout=60, poll=0.3), f"a line of slurm.setup failed: {which}"
        assert (result["state"], result["category"], result["reason"]) == ("failed", "image", why)
        said = texts(run)
        assert any(why in text for text in said)
        assert not any("later" in text for text in said)


def test_a_job_that_slurm_starts_again_during_setup_keeps_its_secrets(ddp: SlurmPlatform, tmp_path: Path) -> None:
    once = tmp_path / "once"
    setup = ("set -e", f"if [ ! -e {once} ]; then touch {once}; sleep 60; fi")
    world = ddp_world(tmp_path / "world", ddp.cluster, setup=setup)
    run = world.send(world.plan(PLAIN, {"secrets": {"TOKEN": f"env:{probe.SECRET}"}}, run_id="again-in-setup"))
    native = (run.store.submitted(run.run_id, 0) or {})["native_id"]
    deadline = time.monotonic() + 30
    while not once.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    ddp.cluster.call("scontrol", "requeue", native.partition(":")[0])
    while ddp.cluster.field(native.partition(":")[0], "JobState") != "PENDING" and time.monotonic() < deadline:
        time.sleep(0.1)
    assert (Path(native.partition(":")[2]) / "secrets").exists()
    assert run.wait(timeout=60, poll=0.3)["state"] == "succeeded"


def test_a_port_that_is_taken_after_the_script_s_look_ends_all_nodes_soon(ddp: SlurmPlatform, tmp_path: Path) -> None:
    taken = tmp_path / "taken.py"
    taken.write_text(
        "import os, socket, time\n"
        "server = socket.create_server(('', int(os.environ['CLOUDTRAIN_SLURM_PORT']) + 1))\n"
        "open(__file__ + '.ready', 'w').close()\ntime.sleep(60)\n"
    )
    setup = (f"python3 {taken} &", f"until [ -e {taken}.ready ]; do sleep 0.1; done")
    world = ddp_world(tmp_path / "world", ddp.cluster, setup=setup)
    run = world.send(world.plan(PLAIN, {"instance_count": 2}, run_id="taken-port"))
    result = run.wait(timeout=60, poll=0.3)
    assert (result["state"], result["category"]) == ("failed", "infra")
    assert "cannot listen on port" in result["reason"]


def test_a_machine_that_fails_twice_is_excluded(ddp: SlurmPlatform) -> None:
    """Check that attempt 2 runs on other nodes: attempts 0 and 1 get n1 and n2, and the check fails on n2."""
    env = {"PYTHONPATH": str(FAULTY), "FAULTY": "n2"}
    run = ddp.send(
        ddp.plan(PLAIN, {"instance_count": 2, "env": env, "node_check": True, "retries": 3}, run_id="bad-node")
    )
    result = run.wait(retry=Retry(run), timeout=150, poll=0.3)
    assert result["state"] == "succeeded", (result["reason"], texts(run))
    assert [row.get("machine") for row in result["attempts"]] == ["n2", "n2", None]
    assert "failed the node check on machine n2: a process ended with code 1" in result["attempts"][1]["reason"]
    assert result["bad_machines"] == [{"machine": "n2", "attempts": 2, "excluded": True}]
    exits = run.store.exits(run.run_id)
    assert {row["machine"] for row in exits if row["attempt"] == "1.0"} == {"n1", "n2"}
    assert len({row["machine"] for row in exits if row["attempt"] == "2.0"} - {"n2"}) == 2
    scripts = [request.body["script"] for k in range(3) if (request := run.store.attempt_request(run.run_id, k))]
    assert ["#SBATCH --exclude=n2\n" in script for script in scripts] == [False, False, True]


def test_a_shell_enters_a_node(ddp: SlurmPlatform) -> None:
    check_shell(ddp)


def test_all_runs_share_one_squeue(ddp: SlurmPlatform, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    real = api.Cluster.run

    def counted(self: api.Cluster, script: str, **more: Any) -> Any:
        calls.append(script)
        return real(self, script, **more)

    monkeypatch.setattr(api, "SQUEUE_S", 5.0)
    monkeypatch.setattr(api.Cluster, "run", counted)
    run = ddp.send(ddp.plan(PLAIN, {"env": {"PROBE": "hold"}}, run_id="listed"))
    native = run.store.submitted("listed", 0)
    assert native is not None
    for _ in range(20):
        ddp.provider.status(str(native["native_id"]))
    run.cancel()
    assert sum("squeue -h --me" in script and '-o "%A|%T' in script for script in calls) <= 1


EAT = """
import os, time
print("eats", flush=True)
held = []
while os.environ["RANK"] == "1" and len(held) < 80:
    held.append(bytearray(b"x" * 10_000_000))
    time.sleep(0.05)
time.sleep(20)
"""


@pytest.mark.parametrize("limits", ["poll", pytest.param("cgroup", marks=pytest.mark.proof)])
def test_a_job_that_slurm_kills_for_its_memory_is_oom(tmp_path: Path, limits: str) -> None:
    """Check two cases: slurmstepd kills the whole step, so the nodes write no record; or the kernel kills one
    process."""
    if limits == "cgroup" and not os.access("/sys/fs/cgroup/memory/tasks", os.W_OK):
        pytest.skip("needs root and cgroups of version 1")
    with running(tmp_path / "slurm", NODES="2", LIMITS=limits) as cluster:
        world = ddp_world(tmp_path / "world", cluster, mem="300M")
        (world.place.code / "eat.py").write_text(EAT)
        run = send(world, f"oom-{limits}", entry_point="eat.py", launcher="python")
        result = run.wait(timeout=90, poll=0.3)
    assert (result["state"], result["category"], result["exit_code"]) == ("failed", "oom", 1), result
    assert "it used more memory than its limit, 300M a node; ask for more with --memory-gb" in result["reason"]
    assert ("rank 1 on node 1" in result["reason"]) == (limits == "cgroup"), "a living node must name the rank"


# ------------------------------------------------------------------------------------------- a store in a bucket


@pytest.fixture(scope="module")
def bucket(ddp: SlurmPlatform, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmPlatform]:
    """Give the cluster a store in a bucket that its nodes have mounted, with the rules of Mountpoint for S3."""
    if os.geteuid() != 0 or not os.path.exists("/dev/fuse"):
        pytest.skip("needs root and FUSE")
    made, folder = MountedBucket(tmp_path_factory.mktemp("bucket")), tmp_path_factory.mktemp("files")
    with contextlib.closing(made), pytest.MonkeyPatch.context() as patch:
        for name, value in made.google.environ().items():
            patch.setenv(name, value)
        own = {"mounts": {made.url: str(made.place)}, "folder": str(folder)}
        yield ddp_world(tmp_path_factory.mktemp("world"), ddp.cluster, store=f"{made.url}/store", **own)


@pytest.mark.proof
def test_a_preempted_job_whose_store_is_a_bucket_comes_to_the_same_bits(
    ddp: SlurmPlatform, bucket: SlurmPlatform, clean: str, tmp_path: Path
) -> None:
    """Check that its local input is uploaded, and that its logs are in a folder of the nodes."""
    run = send(bucket, "in-bucket", inputs={"data": str(bucket.place.data)})
    await_text(run, "from step", 2)
    ddp.cluster.preempt(bucket.job(run), 1)
    assert loss_of(run) == clean
    assert [row["number"] for row in run.result()["attempts"]] == ["0.0", "0.1"]
    check_nothing_lost(run)
    lines = numbered(bucket.provider, str(run.result()["native_id"]))
    assert len(lines) == len(set(lines)) > 0
    run.pull(tmp_path / "pulled")
    assert list(tmp_path.glob("pulled/checkpoints/step-60/state.pt"))


@pytest.mark.proof
def test_a_job_whose_store_is_a_bucket_comes_to_the_same_bits(bucket: SlurmPlatform, clean: str) -> None:
    assert loss_of(send(bucket, "clean-bucket")) == clean


def test_gc_removes_the_files_of_a_deleted_run_s_job(ddp: SlurmPlatform, tmp_path: Path) -> None:
    own = {"folder": str(tmp_path / "files"), "extra": {"begin": "now+1hour"}}
    world = SlurmPlatform(tmp_path, ddp.cluster, **own)
    plan, kept = world.plan(run_id="dropped"), world.plan(run_id="kept")
    world.place.clear_earlier()
    record = {"protocol": 1, "layout": {"code_digest": "c" * 64, "runtime_digest": "d" * 64}}
    Store(world.store).create_run(kept.layout, record)
    native = world.provider.submit(plan.request)
    assert world.provider.objects() == [], "gc must not touch a job that is not over"
    world.provider.cancel(native)
    while not world.provider.status(native).final:
        time.sleep(0.1)
    (found,) = world.provider.objects()
    assert (found.kind, found.run) == ("folder", plan.request.run)
    collected = collect_at(world.store, older_than=0, delete=True, objects=lambda records: {found: world.provider})
    assert found.key in {item.key for item in collected.found}
    assert list((tmp_path / "files").iterdir()) == []


def test_the_doctor_compares_the_time_limit_with_the_partition_s(ddp: SlurmPlatform) -> None:
    """Slurm accepts a job that is too long for its partition, here of 3 minutes, and never starts it."""
    for seconds, status, said in ((60, "ok", "at most 3:00"), (3600, "failed", "60 minutes, but short allows 3:00")):
        request = ddp.plan({"max_runtime": seconds}).request
        rows = {row.name: row for row in Provider(partition="short").checks(ddp.store, request)}
        assert rows["partition"].status == status
        assert said in rows["partition"].detail
        assert re.search(r"to start at \d{4}-\d\d-\d\dT", rows["request"].detail)


@pytest.mark.docker
def test_a_rehearsal_needs_no_cluster(jobs: Jobs, images: Callable[[str], str]) -> None:
    """Run the exact request in containers of two nodes, with the ports and the address that srun would give."""
    jobs.write("train.py", "import os\nprint('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])\n")
    words = ("rehearse", "train.py", "--provider", "slurm", "--store", "/lustre/me/store", "--nodes", "2")
    words += ("--launcher", "python", "--max-runtime", "2m", "--run-id", "rehearsed", "--json")
    done = jobs.cli(*words)
    assert done.code == 2
    assert "slurm starts nodes without an image" in done.err
    done = jobs.cli(*words, "--local-image", images("pip"))
    assert done.code == 0, done.err
    assert done.json["state"] == "succeeded"
