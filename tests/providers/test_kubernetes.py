"""Provider ``kubernetes`` over the wire: the contract suite, and features that only Kubernetes has."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import shutil
import struct
import subprocess
import termios
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import clients
import pytest
from clients import DDP, DEATHS, DIGITS, EPOCHS, PATIENCE, PLAIN, check_death
from jobs import CLI, Done, Jobs
from node_shells import check_shell
from worlds.kubernetes.life import Job
from worlds.kubernetes.world import KubernetesWorld

from cloudtrain.testing.contract import ProviderContract
from cloudtrain.testing.platform import FakePlatform

pytestmark = [pytest.mark.docker, pytest.mark.slow]


@pytest.fixture(scope="class")
def made(kubernetes: Any) -> Iterator[KubernetesWorld]:
    """Give a FakePlatform for this class alone, with its environment."""
    with kubernetes("pip") as world:
        yield world


class TestKubernetes(ProviderContract):
    @pytest.fixture(scope="class")
    @classmethod
    def world(cls, made: KubernetesWorld) -> FakePlatform:
        return made


@pytest.mark.proof
class TestJobSet(ProviderContract):
    """The same suite with JobSets."""

    @pytest.fixture(scope="class")
    @classmethod
    def world(cls, kubernetes: Any) -> Iterator[FakePlatform]:
        with kubernetes("pip", kind="jobset") as world:
            yield world


# ----------------------------------------------------------------------------------------------------------- whole runs


class Client(clients.Client):
    """The command line, with a store on the cluster's shared volume."""

    world: KubernetesWorld

    def __init__(self, world: KubernetesWorld, jobs: Jobs) -> None:
        own = {
            name: world.settings.get(name, "job" if name == "kind" else "")
            for name in ("kubeconfig", "namespace", "claim", "root", "bucket", "kind")
        }
        settings = [word for name, value in own.items() for word in ("--set", f"{name}={value}")]
        super().__init__(world, jobs, "--image", world.image, *settings)
        digits = world.folder / "digits.csv.gz"
        shutil.copyfile(DIGITS, digits)
        self.train = ("--input", f"train={digits}", "--hp", f"epochs={EPOCHS}")

    def until(self, run_id: str, text: str) -> Job:
        """Wait until a pod of the job has printed a line with ``text``. Return the job."""
        job: Job = self.job(run_id)
        Jobs.wait_for(lambda: job.over or text in job.printed(), PATIENCE)
        assert not job.over, job.made["status"]
        return job


@pytest.fixture(scope="module")
def torch_world(kubernetes: Any) -> Iterator[KubernetesWorld]:
    with kubernetes("torch") as world:
        yield world


@pytest.fixture
def client(torch_world: KubernetesWorld, tmp_path: Path) -> Iterator[Client]:
    jobs = Jobs(tmp_path)
    yield Client(torch_world, jobs)
    jobs.close()


HOLD = """
    import os, time
    print("the script begins", flush=True)
    while not os.path.exists(os.environ["CLOUDTRAIN_PREEMPT_FILE"]):
        time.sleep(0.05)
"""
SIZES = 'while ! read -t 0.1 word; do stty size; sleep 0.1; done; echo "got $word"; exit 7'
MANY = 1250
LINES = """
    import os, time
    for number in range(400):
        if os.path.exists(os.environ["CLOUDTRAIN_PREEMPT_FILE"]):
            break
        print(f"line {number} of rank {os.environ['RANK']} in {os.environ['CLOUDTRAIN_ATTEMPT']}", flush=True)
        time.sleep(0.01)
"""


PLACES: Sequence[Mapping[str, Any]] = ({}, {"kind": "jobset"}, {"bucket": True})
"""Settings: a Job on a shared volume, a JobSet there, and a Job on a mounted bucket."""


@pytest.mark.timeout(4 * PATIENCE)
class TestWholeRuns:
    @pytest.mark.proof
    @pytest.mark.parametrize("what", ["", "evict", "lose"])
    @pytest.mark.parametrize("settings", PLACES, ids=["job", "jobset", "bucket"])
    def test_a_pod_that_is_taken_or_lost_changes_no_bit(
        self, kubernetes: Any, whole: dict[int, float], tmp_path: Path, settings: Mapping[str, Any], what: str
    ) -> None:
        """Check that each step has the losses of provider local, on 2 nodes x 2 processes."""
        if settings.get("bucket") and (not Path("/dev/fuse").exists() or os.geteuid() != 0):
            pytest.skip("needs root and FUSE")
        with kubernetes("torch", **settings) as world:
            client = Client(world, jobs := Jobs(tmp_path))
            process = jobs.start(*client.words(DDP, "bits", *client.train, "--keep-checkpoints", "2"))
            if what:
                getattr(client.until("bits", "step 66 epoch 3 "), what)(1)
            out, err = process.communicate(timeout=PATIENCE)
            done = Done(process.returncode, out, err)
            assert (done.code, done.json["state"]) == (0, "succeeded"), err
            assert [row["number"] for row in done.json["attempts"]] == (["0.0", "0.1"] if what else ["0.0"])
            assert client.losses("bits") == whole
            assert ("jobsets" in {kind for kind, _, _ in world.plane.objects}) == (settings.get("kind") == "jobset")
            jobs.close()

    @pytest.mark.proof
    def test_max_runtime_counts_running_time_over_all_starts(self, client: Client) -> None:
        """Check that a second start gets the limit less the seconds of the first."""
        script = client.jobs.write("hold/hold.py", HOLD)
        words = client.words(str(script), "timed", shape=PLAIN)
        words[words.index("20m")] = "24s"
        process = client.jobs.start(*words)
        job = client.until("timed", "the script begins")
        time.sleep(6)
        job.evict(0)
        out, err = process.communicate(timeout=PATIENCE)
        done = Done(process.returncode, out, err)
        assert (done.code, done.json["category"]) == (6, "timeout"), err
        used = float(next(Path(client.store.removeprefix("file://")).glob("runs/timed/native/*/used")).read_text())
        assert 24 <= used < 40
        assert len(done.json["attempts"]) == 2

    def test_a_cancelled_job_keeps_its_pods_and_their_log(self, client: Client) -> None:
        script = client.jobs.write("hold/hold.py", HOLD)
        process = client.jobs.start(*client.words(str(script), "stopped", shape=PLAIN))
        job = client.until("stopped", "the script begins")
        assert client.jobs.here("cancel", "stopped", "--store", client.store).code == 0
        out, err = process.communicate(timeout=PATIENCE)
        assert json.loads(out)["state"] == "cancelled", err
        job.wait()
        assert [pod.object["status"]["reason"] for pod in job.pods] == ["DeadlineExceeded"] * 2
        assert "the script begins" in job.printed()

    def test_a_shell_reaches_the_pods(self, client: Client) -> None:
        """Check with pipes, and at a terminal, whose size the shell passes on."""
        check_shell(client.world)
        script = client.jobs.write("hold/hold.py", HOLD)
        process = client.jobs.start(*client.words(str(script), "terminal", shape=PLAIN))
        client.until("terminal", "the script begins")
        ours, theirs = pty.openpty()
        words = ["shell", "terminal", "--store", client.store, "--node", "1", "--", "bash", "-c", SIZES]
        entered = subprocess.Popen([*CLI, *words], env=client.jobs.environ, stdin=theirs, stdout=theirs)
        output = b""
        for size in ((33, 101), (44, 122)):
            fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", *size, 0, 0))
            while b"%d %d" % size not in output:
                output += os.read(ours, 4096)
        os.write(ours, b"end\r")
        assert entered.wait(60) == 7
        assert b"got end" in output + os.read(ours, 4096)
        client.run("terminal").cancel()
        process.communicate(timeout=PATIENCE)

    def test_each_line_comes_once_while_pods_are_evicted(self, client: Client) -> None:
        script = client.jobs.write("lines/lines.py", LINES)
        process = client.jobs.start(*client.words(str(script), "lines", shape=PLAIN))
        client.until("lines", "line 100 of rank 1").evict(1)
        _, err = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0, err
        printed = client.jobs.here("logs", "lines", "--store", client.store).out.splitlines()
        found = sorted(line.partition("line ")[2] for line in printed if "line " in line)
        assert len(set(found)) == len(found)
        second = {f"{number} of rank {rank} in 0.1" for number in range(400) for rank in range(2)}
        assert second <= set(found)
        assert {f"0 of rank {rank} in 0.0" for rank in range(2)} <= set(found)

    @pytest.mark.proof
    def test_ten_thousand_lines_of_eight_pods_come_once(self, client: Client, record_property: Any) -> None:
        """Check while the API loses an evicted pod's log, and all but the newest lines of every pod."""
        script = client.jobs.write("lines/lines.py", LINES.replace("400", str(MANY)))
        words = client.words(str(script), "many", shape=("--nodes", "8", "--launcher", "python"))
        assert client.jobs.here(*words, "--detach").code == 0
        job = client.until("many", "line 100 of rank 2")
        follower = client.jobs.start("logs", "many", "--store", client.store, "--follow")
        job.evict(1)
        lines: list[str] = []
        reader = threading.Thread(target=lambda: lines.append(follower.communicate(timeout=4 * PATIENCE)[0]))
        reader.start()
        dropped = 0
        while reader.is_alive():
            for pod in job.pods:
                dropped += max(0, len(pod.lines) - 50)
                del pod.lines[:-50]
            time.sleep(0.5)
        assert client.run("many").status().state == "succeeded"
        wanted = {f"{number} of rank {rank} in 0.1" for number in range(MANY) for rank in range(8)}
        for text in (*lines, client.jobs.here("logs", "many", "--store", client.store).out):
            found = [line.partition("line ")[2] for line in text.splitlines() if "line " in line]
            assert len(set(found)) == len(found)
            assert wanted <= set(found)
            first = [line for line in found if line.endswith(" in 0.0")]
            for rank in range(8):
                numbers = sorted(int(line.split()[0]) for line in first if line.split()[3] == str(rank))
                assert numbers == [*range(len(numbers))]
        assert dropped > MANY
        record_property("note", f"{len(found)} lines; the API had lost {dropped} of them")


@pytest.mark.proof
@pytest.mark.parametrize(("call", "moment"), DEATHS)
def test_a_client_s_death_leaves_one_job(made: KubernetesWorld, tmp_path: Path, call: str, moment: str) -> None:
    """Check with another job that waits for machines meanwhile."""
    plane, jobs = made.plane, Jobs(tmp_path)
    before, plane.no_capacity = set(plane.jobs), True
    made.store = (made.folder / f"store-{call}-{moment}").as_uri()

    def natives() -> list[str]:
        return [f"{namespace}/{name}" for namespace, name in plane.jobs if (namespace, name) not in before]

    script = jobs.write("short/short.py", "print('done')")
    check_death(Client(made, jobs), call, moment, str(script), natives)
    jobs.close()
