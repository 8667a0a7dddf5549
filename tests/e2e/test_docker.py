"""Whole runs in containers with kills, cuts and full disks, and checks that nothing is left behind."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from clients import DDP, PATIENCE, SHAPE, STEPS, TRAIN, losses
from containers import Daemon, left, registry
from jobs import Done, Jobs

from cloudtrain.errors import EXIT_CODES

pytestmark = [pytest.mark.docker, pytest.mark.slow, pytest.mark.usefixtures("nothing_left")]

HOLD = """
    import os, sys, time
    print("up", flush=True)
    if os.environ["CLOUDTRAIN_ATTEMPT"] != "0.0":
        sys.exit(0)
    while not os.path.exists(os.environ["CLOUDTRAIN_PREEMPT_FILE"]):
        time.sleep(0.05)
    print("sigterm", flush=True)
"""
"""Script whose first attempt ends on a stop signal, and any other at once."""


class Containers:
    """Runs of the code folder of `jobs` on one image, by one engine."""

    def __init__(self, jobs: Jobs, engine: Any, image: str) -> None:
        self.jobs, self.engine, self.image = jobs, engine, image

    def flags(self, run_id: str, *flags: str) -> list[str]:
        return ["--provider", "docker", "--image", self.image, "--run-id", run_id, *flags]

    def start(self, script: str, run_id: str, *flags: str, **environ: str) -> subprocess.Popen[str]:
        """Submit and wait, in the background."""
        words = ["submit", script, "--store", str(self.jobs.store), "--json", *self.flags(run_id, *flags)]
        return self.jobs.start(*words, **environ)

    def await_end(self, process: subprocess.Popen[str], timeout: float = 90) -> Done:
        out, err = process.communicate(timeout=timeout)
        return Done(process.returncode, out, err)

    def submit(self, script: str, run_id: str, *flags: str, **environ: str) -> Done:
        return self.jobs.submit(script, *self.flags(run_id, *flags), **environ)

    def id(self, run_id: str, node: int) -> str:
        (found,) = self.engine.containers(filters={"label": [self._label(run_id), f"cloudtrain.node={node}"]})
        return str(found["Id"])

    def network(self, run_id: str) -> str:
        (found,) = self.engine.networks(filters={"label": self._label(run_id)})
        return str(found["Id"])

    def _label(self, run_id: str) -> str:
        """Return the label of this run alone: tests of other workers use the same engine."""
        return f"cloudtrain.run={(self.jobs.store / 'runs' / run_id).as_uri()}"

    def await_text(self, run_id: str, text: str, *, nodes: int = 1, attempt: str = "0.0", seconds: float = 60) -> None:
        """Wait until every node has printed ``text``."""
        out = self.jobs.store / "runs" / run_id / "supervisor" / "out" / attempt

        def has_printed(node: int) -> bool:
            with suppress(OSError):
                return text in (out / f"node-{node}.log").read_text(errors="replace")
            return False

        self.jobs.wait_for(lambda: all(has_printed(node) for node in range(nodes)), seconds)


@pytest.fixture
def small(jobs: Jobs, engine: Any, images: Callable[[str], str]) -> Containers:
    """Give runs on an image without torch, which starts fast."""
    return Containers(jobs, engine, images("py313"))


@pytest.fixture
def torch(jobs: Jobs, engine: Any, images: Callable[[str], str]) -> Containers:
    return Containers(jobs, engine, images("torch"))


PYTHON = ("--launcher", "python")
BOTH = (*PYTHON, "--nodes", "2")


# ---------------------------------------------------------------------------------------------------------- portability


@pytest.mark.proof
def test_the_same_losses_as_in_processes(torch: Containers, whole: dict[int, float], tmp_path: Path) -> None:
    """Check bit for bit, with the same job and data on 2 nodes of 2 ranks."""
    flags = torch.flags("digits", *SHAPE, *TRAIN, "--store", str(torch.jobs.store), "--pull", str(tmp_path / "out"))
    done = torch.jobs.cli("submit", DDP, *flags, "--json", timeout=PATIENCE)
    assert done.code == 0, done.err
    assert losses(tmp_path / "out") == whole
    assert max(whole) == STEPS


ANYWHERE = """
    import json, os, sys, tempfile, time
    env = os.environ
    tempfile.TemporaryFile(dir=env["HOME"]).close()
    import getpass; getpass.getuser()
    rank = env["RANK"]
    if len(sys.argv) > 1:
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        total = torch.ones(1) * int(rank)
        dist.all_reduce(total)
        print("sum", total.item(), flush=True)
        dist.destroy_process_group()
    with open(env["CLOUDTRAIN_ARTIFACT_DIR"] + f"/rank-{rank}.json", "w") as out:
        data = open(env["CLOUDTRAIN_INPUT_DATA"]).read()
        json.dump({"uid": os.getuid(), "version": list(sys.version_info[:2]), "input": data}, out)
    if rank == "0":
        with open(env["CLOUDTRAIN_METRICS_FILE"], "a") as out:
            out.write(json.dumps({"step": int(env["CLOUDTRAIN_ATTEMPT"][-1]), "loss": 0.5}) + "\\n")
    if not env["CLOUDTRAIN_RESUME_FROM"]:
        os.makedirs(env["CLOUDTRAIN_CHECKPOINT_DIR"] + "/step-1", exist_ok=True)
        open(env["CLOUDTRAIN_CHECKPOINT_DIR"] + f"/step-1/shard-{rank}", "w").write(rank)
        print("up", flush=True)
        while not os.path.exists(env["CLOUDTRAIN_PREEMPT_FILE"]):
            time.sleep(0.05)
    else:
        shards = sorted(os.listdir(env["CLOUDTRAIN_RESUME_FROM"]))
        print("resumed", shards, flush=True)
        assert shards == ["shard-0", "shard-1"]
"""
VARIANTS = {
    "torch": ("torch", ()),
    "only-python": ("python", ()),
    "user-without-passwd": ("user", ("--set", "user=4242:4242")),
    "python-3.13-no-torch": ("py313", ()),
    "read-only-root": ("torch", ("--option", "docker.nodes.*.read_only=true")),
    "tiny-shm": ("torch", ("--option", 'docker.nodes.*.container.HostConfig.Tmpfs={"/dev/shm": "size=64k"}')),
}


WITHOUT_TORCH = ("only-python", "user-without-passwd", "python-3.13-no-torch", "read-only-root", "tiny-shm")
"""Variants whose ranks need not train together, as torch takes seconds to start. The proof trains with all."""
IN_SUITE = ("user-without-passwd",)


@pytest.mark.parametrize(
    ("variant", "gloo"),
    [
        *(
            pytest.param(variant, False, marks=() if variant in IN_SUITE else pytest.mark.proof)
            for variant in WITHOUT_TORCH
        ),
        *(
            pytest.param(variant, True, marks=pytest.mark.proof)
            for variant, (tag, _) in VARIANTS.items()
            if tag != "py313"
        ),
    ],
)
def test_a_node_on_any_image(
    jobs: Jobs, engine: Any, images: Callable[[str], str], variant: str, gloo: bool, tmp_path: Path
) -> None:
    """Check ranks, input, artifacts, metrics, a checkpoint, a notice to one node, and the resume from it."""
    tag, flags = VARIANTS[variant]
    flags = flags if gloo else (*flags, *PYTHON)
    runs = Containers(jobs, engine, images(tag))
    (tmp_path / "data.txt").write_text("some data")
    jobs.write("train.py", ANYWHERE)
    words = ("--", "gloo") if gloo else ()
    pulled = tmp_path / "pulled"
    given = ("--nodes", "2", "--input", f"data={tmp_path / 'data.txt'}", "--pull", str(pulled))
    process = runs.start("train.py", "any", *given, *flags, *words)
    runs.await_text("any", "up", nodes=2)
    engine.kill(runs.id("any", 1), "SIGTERM")
    done = runs.await_end(process)
    assert done.code == 0, done.err
    assert [a["number"] for a in done.json["attempts"]] == ["0.0", "0.1"]
    assert done.json["attempts"][0]["reason"] == "node 1 got a stop signal"
    assert [a["resumed_from"] for a in done.json["attempts"]] == ["", "step-1"]
    sights = [json.loads((pulled / "artifacts" / f"rank-{rank}.json").read_text()) for rank in (0, 1)]
    wanted = {"input": "some data", "uid": 4242 if tag == "user" else os.getuid()}
    assert [{key: sight[key] for key in wanted} for sight in sights] == [wanted, wanted]
    assert sights[0]["version"] == ([3, 13] if tag == "py313" else [3, 11])
    assert ("sum 1.0" in done.err) == gloo
    assert len((pulled / "metrics.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize(
    ("tag", "words"),
    [
        pytest.param("nopython", "this image has no python3 and no python", marks=pytest.mark.proof),
        pytest.param("arm64", "is for linux/", marks=pytest.mark.proof),
        ("none", "is not here and cannot be pulled"),
    ],
)
def test_an_unfit_image_is_one_line_and_exit_2(
    jobs: Jobs, engine: Any, images: Callable[[str], str], tag: str, words: str
) -> None:
    image = "127.0.0.1:9/team/none:1" if tag == "none" else images(tag)
    jobs.write("train.py", "")
    done = Containers(jobs, engine, image).submit("train.py", "no-image")
    assert done.code == 2, done.err
    assert words in (done.json.get("reason") or done.json["error"])
    assert "Traceback" not in done.err


@pytest.mark.parametrize("logged_in", [True, False])
def test_an_image_is_pulled_with_the_logins_that_docker_has(
    jobs: Jobs, engine: Any, images: Callable[[str], str], tmp_path: Path, logged_in: bool
) -> None:
    jobs.write("train.py", "")
    with registry(images("nopython"), user="ann", password="word") as address:
        auth = base64.b64encode(b"ann:word").decode()
        (tmp_path / "config.json").write_text(json.dumps({"auths": {address: {"auth": auth}} if logged_in else {}}))
        image = f"{address}/team/trainer:7"
        process = Containers(jobs, engine, image).start("train.py", "pulled", DOCKER_CONFIG=str(tmp_path))
        out, err = process.communicate(timeout=60)
    here = [item for item in engine.images() if image in (item["RepoTags"] or ())]
    if here:
        engine.remove_image(image)
    assert process.returncode == 2, err
    reason = json.loads(out)["reason"]
    assert ("this image has no python" in reason) == logged_in == bool(here)
    assert ("cannot be pulled" in reason) != logged_in


def test_a_remote_store(small: Containers, s3_url: str, tmp_path: Path) -> None:
    """Check that the supervisor copies code and inputs, and the nodes' results."""
    (tmp_path / "data.txt").write_text("some data")
    small.jobs.environ |= {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    small.jobs.write(
        "train.py",
        """
        import os
        rank = os.environ["RANK"]
        folder = os.environ["CLOUDTRAIN_CHECKPOINT_DIR"] + "/step-1"
        os.makedirs(folder)
        open(folder + "/shard-" + rank, "w").write(open(os.environ["CLOUDTRAIN_INPUT_DATA"]).read())
        """,
    )
    done = small.jobs.cli(
        "submit", "train.py", *small.flags("far", *BOTH), "--store", s3_url, "--input", f"data={tmp_path / 'data.txt'}",
        "--set", f"state_dir={tmp_path / 'state'}", "--pull", str(tmp_path / "pulled"), "--json",
    )  # fmt: skip
    assert done.code == 0, done.err
    found = sorted((tmp_path / "pulled" / "checkpoints").rglob("shard-*"))
    assert [path.read_text() for path in found] == ["some data"] * 2


@pytest.mark.proof
def test_a_checkpoint_that_a_script_writes_to_the_store_itself(small: Containers) -> None:
    """Check with a local store, which is a mount of the container. Its URL there is a path of the container."""
    small.jobs.write(
        "train.py",
        """
        import os, pathlib
        url, resume = os.environ["CLOUDTRAIN_CHECKPOINT_URL"], os.environ["CLOUDTRAIN_RESUME_FROM"]
        folder = pathlib.Path(url.removeprefix("file://")) / "step-1"
        if os.environ["CLOUDTRAIN_ATTEMPT"] == "1.0":
            assert resume == f"{url}/step-1" and (folder / ".metadata").exists(), resume
            raise SystemExit
        folder.mkdir()
        (folder / ".metadata").touch()
        raise ValueError("and now again")
        """,
    )
    done = small.submit("train.py", "direct", *PYTHON, "--retries", "1")
    assert done.code == 0, done.err
    assert (small.jobs.store / "runs/direct/checkpoints/step-1/.metadata").exists()


def test_an_image_without_torch_is_named(small: Containers) -> None:
    small.jobs.write("train.py", "")
    done = small.submit("train.py", "no-torch", "--nodes", "2")
    assert (done.code, done.json["category"]) == (2, "image")
    assert "has no torch" in done.json["reason"]


# --------------------------------------------------------------------------------------------- lost nodes and processes


@pytest.mark.parametrize("number", [0, pytest.param(1, marks=pytest.mark.proof)])
def test_a_killed_node_is_named_and_its_peers_stop(small: Containers, number: int) -> None:
    small.jobs.write("train.py", HOLD)
    process = small.start("train.py", "killed", *BOTH)
    small.await_text("killed", "up", nodes=2)
    small.engine.kill(small.id("killed", number), "SIGKILL")
    began = time.monotonic()
    done = small.await_end(process)
    assert time.monotonic() - began < 10
    assert (done.code, done.json["category"]) == (EXIT_CODES["infra"], "infra")
    assert done.json["reason"].startswith(f"node {number} was killed by signal 9")


@pytest.mark.proof
def test_a_removed_node_is_named(small: Containers) -> None:
    small.jobs.write("train.py", HOLD)
    process = small.start("train.py", "removed", *BOTH)
    small.await_text("removed", "up", nodes=2)
    small.engine.remove_container(small.id("removed", 1), force=True)
    done = small.await_end(process)
    assert (done.code, done.json["category"]) == (EXIT_CODES["infra"], "infra")
    assert done.json["reason"].startswith(("node 1: cloudtrain-removed-", "node 1 was killed by signal 9"))


@pytest.mark.proof
def test_a_killed_client_leaves_a_run_that_ends_well(small: Containers) -> None:
    small.jobs.write("train.py", "import time\nfor i in range(60): print('line', i, flush=True); time.sleep(0.05)\n")
    process = small.start("train.py", "client", *BOTH)
    small.await_text("client", "line 3", nodes=2)
    os.killpg(process.pid, signal.SIGKILL)
    done = small.jobs.cli("wait", "client", "--store", str(small.jobs.store), "--json")
    assert (done.code, done.json["state"]) == (0, "succeeded")
    lines = [line.text for line in small.jobs.run("client").logs() if line.rank == 1]
    assert lines == [f"line {i}" for i in range(60)]


def test_a_killed_supervisor_leaves_no_containers(small: Containers) -> None:
    small.jobs.write("train.py", HOLD)
    process = small.start("train.py", "abandoned", *BOTH)
    small.await_text("abandoned", "up", nodes=2)
    os.kill(small.jobs.supervisor(), signal.SIGKILL)
    done = small.await_end(process)
    assert (done.code, done.json["reason"]) == (EXIT_CODES["infra"], "the run's supervisor was killed")
    volumes = left(small.engine, Path("/no/folder"))
    small.jobs.wait_for(lambda: left(small.engine, small.jobs.tmp) == volumes, 15)
    small.jobs.gone()


@pytest.mark.proof
def test_with_retries_the_client_continues_after_a_killed_supervisor(small: Containers) -> None:
    """Check that the killed supervisor's guard, which removes its containers, keeps those of the next attempt."""
    small.jobs.write("train.py", HOLD)
    process = small.start("train.py", "gone-on", *BOTH, "--retries", "1")
    small.await_text("gone-on", "up", nodes=2)
    os.kill(small.jobs.supervisor(), signal.SIGKILL)
    done = small.await_end(process)
    assert (done.code, done.json["state"]) == (0, "succeeded"), done.err
    assert [row["number"] for row in done.json["attempts"]] == ["0.0", "1.0"]
    assert "starting attempt 1" in done.err
    small.jobs.gone()


@pytest.mark.proof
def test_status_removes_the_containers_of_a_killed_supervisor_and_guard(small: Containers) -> None:
    small.jobs.write("train.py", HOLD)
    process = small.start("train.py", "abandoned", *BOTH)
    small.await_text("abandoned", "up", nodes=2)
    guard = small.jobs.wait_for(lambda: small.jobs.pid_of(r"import guard; guard\("))
    for pid in (guard, small.jobs.supervisor()):
        os.kill(pid, signal.SIGKILL)
    assert small.await_end(process).code == EXIT_CODES["infra"]


@pytest.mark.proof
def test_a_killed_guard_changes_nothing(small: Containers) -> None:
    small.jobs.write("train.py", HOLD)
    process = small.start("train.py", "guarded", *BOTH)
    small.await_text("guarded", "up", nodes=2)
    os.kill(small.jobs.wait_for(lambda: small.jobs.pid_of(r"import guard; guard\(")), signal.SIGKILL)
    small.engine.kill(small.id("guarded", 0), "SIGTERM")
    done = small.await_end(process)
    assert (done.code, done.json["state"]) == (0, "succeeded"), done.err


def test_a_node_killed_before_its_peers_have_met_it_ends_the_run(small: Containers) -> None:
    small.jobs.write("train.py", HOLD)
    process = small.start("train.py", "unmet", *BOTH)

    def started() -> list[str]:
        wanted = {"label": ["cloudtrain.node=1", f"cloudtrain.run={(small.jobs.store / 'runs/unmet').as_uri()}"]}
        return [item["Id"] for item in small.engine.containers(filters=wanted)]

    small.engine.kill(small.jobs.wait_for(started)[0], "SIGKILL")
    began = time.monotonic()
    done = small.await_end(process)
    assert time.monotonic() - began < 10
    assert (done.code, done.json["category"]) == (EXIT_CODES["infra"], "infra")
    assert done.json["reason"].startswith("node 1 was killed by signal 9")


def test_a_cancel_at_once_is_not_lost(small: Containers) -> None:
    """Cancel before the run has a signal handler or a container."""
    small.jobs.write("train.py", HOLD)
    done = small.submit("train.py", "soon", "--detach", *BOTH)
    assert done.code == 0, done.err
    assert small.jobs.cli("cancel", "soon", "--store", str(small.jobs.store)).code == 0
    began = time.monotonic()
    done = small.jobs.cli("wait", "soon", "--store", str(small.jobs.store), "--json")
    assert time.monotonic() - began < 10
    assert (done.code, done.json["category"]) == (EXIT_CODES["cancelled"], "cancelled")


def test_a_cancel_ends_a_pull_that_stalls(jobs: Jobs, engine: Any, images: Callable[[str], str]) -> None:
    jobs.write("train.py", "")
    with registry(images("nopython"), user="", password="", stalls=True) as address:
        image = f"{address}/team/stalls:1"
        process = Containers(jobs, engine, image).start("train.py", "stalls")
        deadline, status = time.monotonic() + 60, ""
        while "pulling" not in status:
            assert process.poll() is None, "".join(process.communicate())
            assert time.monotonic() < deadline, status
            time.sleep(0.2)
            status = jobs.cli("status", "stalls", "--store", str(jobs.store), "--json").out
        assert jobs.cli("cancel", "stalls", "--store", str(jobs.store)).code == 0
        out, err = process.communicate(timeout=15)
    assert process.returncode == EXIT_CODES["cancelled"], err
    assert json.loads(out)["category"] == "cancelled"


def test_more_cores_than_this_machine_has_is_capacity(small: Containers) -> None:
    small.jobs.write("train.py", "")
    done = small.submit("train.py", "cores", *PYTHON, "--cpus", "4096", "--retries", "1")
    assert (done.code, done.json["category"]) == (EXIT_CODES["capacity"], "capacity")
    assert all(attempt["ended"] for attempt in done.json["attempts"])


@pytest.mark.proof
def test_cancel_stops_the_script_and_leaves_nothing(small: Containers) -> None:
    small.jobs.write("train.py", HOLD)
    process = small.start("train.py", "cancelled", *BOTH)
    small.await_text("cancelled", "up", nodes=2)
    assert small.jobs.cli("cancel", "cancelled", "--store", str(small.jobs.store)).code == 0
    done = small.await_end(process)
    assert (done.code, done.json["category"]) == (EXIT_CODES["cancelled"], "cancelled")
    assert "sigterm" in done.err


@pytest.mark.proof
def test_a_handler_has_the_full_grace(torch: Containers) -> None:
    """Check SIGTERM to one container: the handlers of all ranks run at once, for most of the 30 s, under torchrun."""
    torch.jobs.write(
        "train.py",
        """
        import os, signal, sys, time
        if os.environ["CLOUDTRAIN_ATTEMPT"] != "0.0":
            sys.exit(0)
        def save(number, frame):
            began = time.monotonic()
            print("handler", flush=True)
            time.sleep(28)
            print(f"saved after {time.monotonic() - began:.0f} s", flush=True)
            sys.exit(0)
        signal.signal(signal.SIGTERM, save)
        print("up", flush=True)
        while True:
            time.sleep(0.1)
        """,
    )
    process = torch.start("train.py", "handler", "--nodes", "2", "--nproc-per-node", "2")
    torch.await_text("handler", "up", nodes=2)
    torch.jobs.wait_for(lambda: torch.jobs.run("handler") and sum(
        line.text == "up" for line in torch.jobs.run("handler").logs()
    ) == 4)  # fmt: skip
    torch.engine.kill(torch.id("handler", 1), "SIGTERM")
    began = time.monotonic()
    torch.await_text("handler", "handler", nodes=2)
    assert time.monotonic() - began < 3
    done = torch.await_end(process)
    assert done.code == 0, done.err
    assert done.err.count("saved after 28 s") == 4
    assert [a["number"] for a in done.json["attempts"]] == ["0.0", "0.1"]


# ------------------------------------------------------------------------------------------------ disk, network, memory


def test_the_full_disk_of_one_container_is_named(small: Containers) -> None:
    small.jobs.write(
        "train.py",
        """
        import os, time
        with open(os.environ["CLOUDTRAIN_CHECKPOINT_DIR"] + "/step-1.pt", "wb") as out:
            for _ in range(64):
                out.write(bytes(1 << 20)); out.flush()
        time.sleep(60)
        """,
    )
    tmpfs = 'docker.nodes.1.container.HostConfig.Tmpfs={"/tmp": "size=16m,mode=1777"}'
    began = time.monotonic()
    done = small.submit("train.py", "full", *BOTH, "--option", tmpfs)
    assert time.monotonic() - began < 40
    assert (done.code, done.json["category"]) == (1, "user_error")
    failure = done.json["failure"]
    assert (failure["node"], failure["rank"]) == (1, 1)
    assert "No space left on device" in failure["exception"]


@pytest.mark.proof
def test_a_run_survives_a_network_cut_of_20_s_and_reports_it(torch: Containers) -> None:
    torch.jobs.write(
        "train.py",
        """
        import time, torch, torch.distributed as dist
        dist.init_process_group("gloo")
        for step in range(40):
            total = torch.ones(1)
            dist.all_reduce(total)
            assert total.item() == 2
            print("step", step, flush=True)
            time.sleep(0.1)
        dist.destroy_process_group()
        """,
    )
    process = torch.start("train.py", "cut", "--nodes", "2")
    torch.await_text("cut", "step 3", nodes=2)
    node, network = torch.id("cut", 1), torch.network("cut")
    torch.engine.disconnect_container_from_network(node, network)
    time.sleep(20)
    torch.engine.connect_container_to_network(node, network, aliases=["node-1"])
    done = torch.await_end(process)
    assert done.code == 0, done.err
    assert "step 39" in done.err


@pytest.mark.proof
def test_a_network_cut_for_good_ends_the_run(small: Containers) -> None:
    small.jobs.write("train.py", HOLD)
    process = small.start("train.py", "cut-off", *BOTH)
    small.await_text("cut-off", "up", nodes=2)
    small.engine.disconnect_container_from_network(small.id("cut-off", 1), small.network("cut-off"))
    done = small.await_end(process, timeout=150)
    assert (done.code, done.json["category"]) == (EXIT_CODES["infra"], "infra")
    assert done.json["reason"] == "node 1 was lost: it was not heard of for 90 s"


def test_a_memory_limit_is_an_oom(small: Containers) -> None:
    small.jobs.write("train.py", "data = [b'x' * (1 << 24) for _ in range(200)]\n")
    done = small.submit("train.py", "memory", *PYTHON, "--memory-gb", "1")
    assert (done.code, done.json["category"]) == (1, "oom"), done.err


def read(path: Path) -> bytes:
    """Return a file's bytes, or none if it has gone."""
    with suppress(OSError):
        return path.read_bytes()
    return b""


def test_containers_have_limits_user_labels_and_mounts_and_hide_secrets(small: Containers, tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "file").write_text("more")
    small.jobs.write("train.py", "import os; print(os.environ['TOKEN'][::-1], open('/more/file').read())\n" + "\n".join(
        line.strip() if not line.startswith("        ") else line[4:] for line in HOLD.splitlines()
    ))  # fmt: skip
    binds = f'docker.nodes.*.container.HostConfig.Binds=["{tmp_path}/more:/more:ro"]'
    process = small.start(
        "train.py", "limits", *PYTHON, "--cpus", "1", "--memory-gb", "1", "--shm-gb", "2", "--tag", "team=vision",
        "--option", binds, "--set", "user=4242:4343", "--secret", "TOKEN=env:OF_TEST", OF_TEST="terces-rep",
    )  # fmt: skip
    small.await_text("limits", "up")
    container = small.engine.inspect_container(small.id("limits", 0))
    run = small.jobs.store / "runs" / "limits"
    kept = Path(small.engine.info()["DockerRootDir"], "containers", container["Id"])
    assert os.geteuid() != 0 or (kept / "config.v2.json").exists()
    on_disk = [
        path for folder in (run, kept) for path in folder.rglob("*")
        if path.is_file() and b"terces-rep" in path.read_bytes()
    ]  # fmt: skip
    in_argv = [path for path in Path("/proc").glob("[0-9]*/cmdline") if b"terces-rep" in read(path)]
    assert small.jobs.cli("cancel", "limits", "--store", str(small.jobs.store)).code == 0
    done = small.await_end(process)
    assert "per-secret more" in done.err
    assert (on_disk, in_argv) == ([], [])
    assert "terces-rep" not in json.dumps(container)
    host, config = container["HostConfig"], container["Config"]
    limits = (host["NanoCpus"], host["Memory"], host["MemorySwap"], host["ShmSize"])
    assert limits == (10**9, 1 << 30, 1 << 30, 2 << 30)
    assert (config["User"], config["Hostname"], config["Labels"]["team"]) == ("4242:4343", "node-0", "vision")


# ---------------------------------------------------------------------------------------------------- the engine itself


@pytest.mark.proof
@pytest.mark.parametrize("how", ["SIGTERM", "SIGKILL"])
def test_an_engine_that_is_restarted_is_awaited(
    jobs: Jobs, daemon: Daemon, images: Callable[[str], str], how: str
) -> None:
    """Check this because it stops its containers at its own end or its next start: a notice, and the run continues."""
    runs = Containers(jobs, daemon.api(), images("py313"))
    jobs.write("train.py", HOLD)
    process = runs.start("train.py", "restarted", *BOTH, DOCKER_HOST=daemon.host)
    runs.await_text("restarted", "up", nodes=2)
    daemon.stop(getattr(signal, how))
    time.sleep(3)
    daemon.start()
    done = runs.await_end(process)
    assert done.code == 0, done.err
    attempts = done.json["attempts"]
    assert [a["number"] for a in attempts] == ["0.0", "0.1"]
    assert "got a stop signal" in attempts[0]["reason"]
    remains = (
        daemon.api().containers(all=True),
        [n for n in daemon.api().networks() if n["Name"].startswith("cloudtrain")],
    )
    assert remains == ([], [])
