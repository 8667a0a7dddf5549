"""``cloudtrain doctor``: its lines and exit codes, the round trip of a store, and the job that looks at every node."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import slowfs
from disks import mounted
from doctor_runs import Examiner
from faulty_s3 import FaultyS3
from rows import for_each

from cloudtrain import cli
from cloudtrain.cli import format
from cloudtrain.doctor.doctor import Grace, expected_gpus, judged, round_trip
from cloudtrain.errors import AuthError, CloudtrainError, LostContactError, NotFoundError, SpecError
from cloudtrain.job.job import Job
from cloudtrain.provider_api.checks import Check, failure, gravest, ok, tried
from cloudtrain.provider_api.protocol import Request, Status
from cloudtrain.provider_api.registry import find_provider
from cloudtrain.runs.log_order import Line
from cloudtrain.runtime import node_check
from cloudtrain.storage.files import LocalFiles, TransferOptions, files

SHAPE = ("--nodes", "2", "--nproc-per-node", "2")


# --------------------------------------------------------------------------------------------------------- its lines


@pytest.mark.slow
def test_this_machine_is_well(examiner: Examiner) -> None:
    found = examiner("local")
    names = ["settings", "plan", "torch", "ports", "shm", "disk", "gpus", "store"]
    assert found.names == names
    assert {found.status(name) for name in names} == {"ok"}, found.rows
    assert found.code == 0
    assert os.listdir() == [], "neither store nor plan leave anything"


def test_the_plan_of_a_cluster_names_the_provider(examiner: Examiner) -> None:
    examiner.settings("slurm", str(examiner.folder / "store"), {})
    assert examiner().rows["plan"]["detail"] == "1 node on slurm"


def test_a_python_without_torch(examiner: Examiner) -> None:
    python = examiner.folder / "python"
    python.write_text("#!/bin/sh\necho \"ModuleNotFoundError: No module named 'torch'\" >&2\nexit 1\n")
    python.chmod(0o755)
    examiner("--set", f"python={python}").failure("torch", "No module named 'torch'", fix="pip install torch", code=2)
    python.write_text("#!/bin/sh\n")
    examiner("--set", f"local.python={python}").failure("torch", "is no Python", fix="pip install torch", code=2)


def test_a_run_without_torch_names_the_check_that_prints_the_command() -> None:
    failure = {"exception": "ModuleNotFoundError: No module named 'torch'"}
    assert "cloudtrain doctor prints how to install it" in format.fix({"category": "user_error", "failure": failure})
    failure = {"exception": "ModuleNotFoundError: No module named 'torchvision'"}
    fix = format.fix({"category": "user_error", "failure": failure})
    assert "add --requirements FILE" in fix
    assert "own code, add the folder that has it: --env PYTHONPATH=. or PYTHONPATH=src" in fix


@for_each(("exception", "code", "fix"), [
    (None, -9, "the memory of its machine was probably full: load less at a time"),
    ("ValueError: x", -9, ""),
    (None, -11, ""),
    (None, None, ""),
])  # fmt: skip
def test_a_rank_that_was_killed_without_a_message_had_probably_no_memory(
    exception: str | None, code: int | None, fix: str
) -> None:
    failure = {"exception": exception, "process_exit_code": code}
    found = format.fix({"category": "user_error", "failure": failure})
    assert found.startswith(fix)
    assert bool(found) == bool(fix)


def test_a_python_that_there_is_none(examiner: Examiner) -> None:
    found = examiner("--set", "python=/no/such/python")
    found.failed("torch", "does not start", fix="set python", code=2)
    found.failed("gpus", "there is no program /no/such/python", fix="local.python", code=2)


def test_gpus_that_there_are_none(examiner: Examiner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found = examiner("--gpu", "H100:8", "--set", "python=/bin/false")
    found.failed("gpus", "8 H100 GPUs", fix="ask for what this machine has", code=2)
    assert found.code == 2


def test_a_job_that_cannot_be_planned(examiner: Examiner) -> None:
    found = examiner("--spot", "--set", "python=/bin/false")
    found.failed("plan", "never taken away", fix="resources.spot", code=2)
    assert found.status("gpus") == "skipped"


def test_a_provider_and_a_setting_that_there_are_none(examiner: Examiner) -> None:
    assert cli.main(["doctor", "lokal"]) == 2
    assert "hint: cloudtrain doctor local" in examiner.capsys.readouterr().err
    examiner("--set", "sse=what").failure("settings", "sse", fix="sse", code=2)


def test_no_engine(examiner: Examiner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{examiner.folder}/none.sock")
    found = examiner("docker")
    found.failure("engine", "no container engine answers", fix="start it", code=2)
    assert found.status("plan") == "skipped", "no image is named"


@pytest.mark.docker
def test_an_engine_of_containers(examiner: Examiner, images: Callable[[str], str]) -> None:
    found = examiner("docker", "--image", images("torch"))
    names = ["settings", "plan", "engine", "gpu runtime", "shm", "image", "disk", "start", "store"]
    assert found.names == names
    assert {found.status(name) for name in names} == {"ok"}, found.rows
    assert "8 GiB" in found.rows["shm"]["detail"]
    found = examiner("docker", "--image", "cloudtrain.invalid/none:1", "--gpu", "H100:1")
    assert found.status("image") == "unknown"
    found.failed("gpu runtime", "none for NVIDIA GPUs", fix="NVIDIA Container Toolkit", code=4)
    assert found.code == 2


@pytest.mark.parametrize("argv", [["--run-id", "x"], ["--entry-point", "x.py"], ["--job", "--hp", "a=1"]])
def test_what_the_doctor_does_not_take(examiner: Examiner, argv: list[str]) -> None:
    assert cli.main(["doctor", *argv]) == 2
    assert examiner.capsys.readouterr().err.startswith("error: ")


def test_the_gravest_failure_is_the_exit_code() -> None:
    def failing(*codes: int) -> list[Check]:
        return [ok("x", "y"), *(Check(name="x", status="failed", exit_code=code) for code in codes)]

    assert gravest(failing()) == 0
    assert [gravest(failing(*codes)) for codes in ((4, 2), (2, 8), (8, 9), (9, 7), (7, 3, 4))] == [2, 8, 9, 7, 3]
    assert gravest([Check(name="x", status="unknown", exit_code=3)]) == 0


@for_each(
    ("error", "extra", "status"),
    [
        (AuthError("may not: ask somebody"), True, "unknown"),
        (NotFoundError("no such API"), True, "unknown"),
        (LostContactError("away"), True, "unknown"),
        (SpecError("wrong", field="x.y"), True, "failed"),
        (AuthError("may not: ask somebody"), False, "failed"),
    ],
)
def test_what_no_run_needs_may_be_refused(error: CloudtrainError, extra: bool, status: str) -> None:
    def look() -> Check:
        raise error

    [check] = tried("it", look, extra=extra)
    assert check.status == status
    assert bool(check.fix) == (status == "failed")
    assert failure("it", AuthError("may not: ask somebody")).fix == "ask somebody"


# --------------------------------------------------------------------------------------------------------- the store


@pytest.fixture(scope="module")
def wire() -> Iterator[FaultyS3]:
    with FaultyS3() as server:
        yield server
        server.shutdown()


@pytest.fixture
def s3(wire: FaultyS3, s3_unset: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FaultyS3]:
    wire.clear()
    for name, value in {
        "AWS_ENDPOINT_URL": wire.url,
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": str(tmp_path / "none"),
        "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "none"),
    }.items():
        monkeypatch.setenv(name, value)
    wire.only_below = "some/store/"
    yield wire
    wire.only_below, wire.denies = "", lambda method, path, headers: ""


@pytest.fixture
def s3_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)


def tree(**more: Any) -> Any:
    return files("s3://bucket/some/store", moving=TransferOptions(**more))


SSE, NO = "x-amz-server-side-encryption", "no identity-based policy allows it"


@pytest.mark.parametrize("sse", ["", "aws:kms"])
def test_a_store_whose_prefix_alone_is_listed(s3: FaultyS3, sse: str) -> None:
    """Check also a store that refuses objects without its required encryption."""

    s3.denies = lambda method, path, headers: NO if method == "PUT" and headers.get(SSE, "") != sse else ""
    check = round_trip(tree(sse=sse, sse_kms_key_id="key" if sse else ""))
    assert check.status == "ok", check
    assert s3.objects == {}


def test_a_store_that_refuses_what_is_not_encrypted(s3: FaultyS3) -> None:
    s3.denies = lambda method, path, headers: NO if method == "PUT" and SSE not in headers else ""
    check = round_trip(tree())
    assert (check.status, check.exit_code) == ("failed", 3), check
    assert check.detail.startswith("create: ")
    assert "set sse and sse_kms_key_id" in check.fix


def listing(method: str, path: str, headers: Any) -> str:
    return NO if method == "GET" and "list-type" in path else ""


def reading(method: str, path: str, headers: Any) -> str:
    return NO if method == "GET" and "list-type" not in path else ""


def removing(method: str, path: str, headers: Any) -> str:
    return NO if method == "DELETE" or (method == "POST" and "delete" in path) else ""


@pytest.mark.parametrize(("denies", "step"), [(reading, "read"), (listing, "list"), (removing, "delete")])
def test_each_step_that_is_refused(s3: FaultyS3, denies: Callable[..., str], step: str) -> None:
    s3.denies = denies
    check = round_trip(tree())
    assert (check.status, check.exit_code) == ("failed", 3), check
    assert check.detail.startswith(f"{step}: ")
    assert f"let the caller {step} below s3://bucket/some/store" in check.fix
    assert ("is left there" in check.detail) == bool(s3.objects) == (step == "delete")


@pytest.mark.parametrize(
    ("word", "fix"),
    [
        ("User: arn:aws:iam::1:user/me is not authorized to perform: kms:GenerateDataKey", "use the key"),
        ("The provided token has expired.", "sign in again"),
    ],
)
def test_a_refusal_that_says_why(s3: FaultyS3, word: str, fix: str) -> None:
    s3.denies = lambda method, path, headers: word if method == "PUT" else ""
    check = round_trip(tree(sse="aws:kms"))
    assert (check.status, check.exit_code) == ("failed", 3)
    assert fix in check.fix, check


def test_a_store_that_replaces_what_is_there(tmp_path: Path) -> None:
    class Loose(LocalFiles):
        def create(self, key: str, data: bytes, *, private: bool = False) -> bool:
            self.write(key, data)
            return True

    check = round_trip(Loose(root=tmp_path))
    assert (check.status, check.exit_code) == ("failed", 8)
    assert "has no exclusive creation" in check.detail
    assert "conditional writes" in check.fix
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("ignores", "lacks"), [("If-Match", "conditional writes"), ("If-None-Match", "exclusive creation")]
)
def test_a_server_that_ignores_a_condition_is_no_store(s3: FaultyS3, ignores: str, lacks: str) -> None:
    s3.ignores = ignores
    check = round_trip(tree())
    assert (check.status, check.exit_code) == ("failed", 8)
    assert f"this store does not keep {lacks}, and two clients could start one run twice" in check.detail
    assert "conditional writes" in check.fix
    assert s3.objects == {}


def test_a_local_store_leaves_no_folder_that_was_not_there(tmp_path: Path) -> None:
    assert round_trip(LocalFiles(root=tmp_path / "a" / "b")).status == "ok"
    assert os.listdir(tmp_path) == []
    (tmp_path / "file").write_text("x")
    check = round_trip(LocalFiles(root=tmp_path / "file" / "store"))
    assert (check.status, check.exit_code) == ("failed", 8)
    assert os.listdir(tmp_path) == ["file"]


# ------------------------------------------------------------------------------------------- a run that waits for long


def test_a_long_wait_says_why_once() -> None:
    now, said = [0.0], list[str]()
    changes = format.Changes(said.append, clock=lambda: now[0])
    waiting = Status(state="pending", native="QUEUED", reason="behind quota x_gpus", url="https://console/job")
    for at in (0.0, 30.0, 59.0):
        now[0] = at
        changes(waiting)
    assert said == ["pending: behind quota x_gpus"]
    for at in (60.0, 61.0, 500.0):
        now[0] = at
        changes(waiting)
    told = "still pending after 1m: QUEUED: behind quota x_gpus; see https://console/job"
    assert said[1:] == [told]
    changes(Status(state="running"))
    now[0] = 600.0
    changes(waiting)
    now[0] = 659.0
    changes(waiting)
    assert said[2:] == ["running", "pending: behind quota x_gpus"]
    now[0] = 660.0
    changes(Status(state="pending"))
    assert said[4:] == ["pending", "still pending after 1m: no state of its own: the platform gives no reason"]


# -------------------------------------------------------------------------------------------------- checks on the nodes


def report(*nodes: dict[str, Any], links: Any = None, **more: Any) -> dict[str, Any]:
    plain = {
        "host": "h",
        "python": "3.11",
        "machine": "x86_64",
        "ranks": 8,
        "shm_bytes": 1 << 33,
        "gpus": 8,
        "gpu": "H100",
        "driver": "550",
        "torch": "2.6",
        "cuda": "12.4",
        "nccl": "2.21",
        "cpus": 8,
    }
    told = {str(number): {**plain, **node} for number, node in enumerate(nodes)}
    near = {"error": "", "skew_s": 0.001, "within_s": 0.001}
    made = {a: {b: near for b in told if b != a} for a in told}
    for (a, b), link in (links or {}).items():
        made[a][b] = {**near, **link}
    speeds = {"backend": "nccl", "ranks": 16, "right": True, "rows": []}
    return {"nodes": told, "links": made, "allreduce": speeds, "error": "", **more}


def test_nodes_that_are_alike() -> None:
    assert node_check.problems(report({}, {}), nodes=2, gpus=8) == []
    assert node_check.problems(report({}, {}), nodes=2, gpus=None) == []
    [few] = node_check.problems(report({}, {"gpus": 4}), nodes=2, gpus=None)
    assert few.startswith("node 1 has 4 GPUs for torch, 8 are expected")


def test_one_rank_alone_has_no_all_reduce_to_time() -> None:
    alone = report({"ranks": 1}, allreduce=None)
    assert node_check.problems(alone, nodes=1, gpus=8) == []
    assert "all-reduce" not in node_check.table(alone)
    broken = report({"ranks": 1}, allreduce=None, error="NCCL failed")
    assert node_check.problems(broken, nodes=1, gpus=8) == ["no all-reduce came to its end: NCCL failed"]


@for_each(
    ("found", "line"),
    [
        (report({}, {"driver": "535"}), "driver differs: 550 on node 0, 535 on node 1; give all nodes one kind"),
        (report({}, {"torch": "2.5"}, {}), "torch differs: 2.6 on node 0, 2, 2.5 on node 1; give all nodes one image"),
        (report({}, {"nccl": None}), "nccl differs: 2.21 on node 0, none on node 1"),
        (report({}), "1 of 2 nodes have reported"),
        (report({}, {"gpus": 0}), "node 1 has 0 GPUs for torch, 8 are expected: check CUDA"),
        (report({}, {}, links={("0", "1"): {"skew_s": 3.5}}), "the clock of node 1 is 3.5 s ahead of that of node 0"),
        (
            report({}, {}, links={("1", "0"): {"error": "a:1: refused"}}, allreduce=None),
            "node 1 cannot reach node 0 (a:1: refused); open all TCP ports",
        ),
        (report({}, {}, allreduce=None), "no all-reduce came to its end: see the logs"),
        (report({}, {}, allreduce={"right": False}), "an all-reduce gave a wrong sum"),
    ],
)
def test_nodes_that_are_not(found: dict[str, Any], line: str) -> None:
    wrong = node_check.problems(found, nodes=max(2, len(found["nodes"])), gpus=8)
    assert len(wrong) == 1, wrong
    assert wrong[0].startswith(line)


def test_what_the_job_leaves_is_judged_by_what_was_asked_for(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"left no preflight\.json"):
        judged(tmp_path, nodes=2, gpus=None)
    (tmp_path / "artifacts").mkdir()
    (tmp_path / "artifacts" / "preflight.json").write_text(json.dumps(report({}, {"driver": "535"})))
    found, wrong = judged(tmp_path, nodes=2, gpus=8)
    assert [line.partition(":")[0] for line in wrong] == ["driver differs"]
    assert "535" in node_check.table(found)


def test_how_many_gpus_are_expected() -> None:
    provider = find_provider("sagemaker")(region="eu-west-1", role="arn:aws:iam::123456789012:role/x")
    request = Request(provider="x", operation="", body={}, context={}, run="r", instance_types=("ml.p5.48xlarge",))
    job = Job.make(entry_point="t.py")
    assert expected_gpus(job, provider, request) == 8
    assert expected_gpus(job.replace(gpu=("H100:4",)), provider, request) == 4
    either = Request(**{**vars(request), "instance_types": ("n1-standard-4",)})
    assert expected_gpus(job, find_provider("vertex")(), either) is None, "such a machine has GPUs, or none"
    assert expected_gpus(job, find_provider("local")(), Request(**{**vars(request), "instance_types": ()})) is None


def test_doors_between_nodes() -> None:
    door = node_check.Door(3)
    try:
        link = node_check.look_in(3, "127.0.0.1", door.port)
        assert link["error"] == ""
        assert abs(link["skew_s"]) <= link["within_s"] + 0.05
        assert "is node 3" in node_check.look_in(1, "127.0.0.1", door.port)["error"]
    finally:
        door.close()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert "refused" in node_check.look_in(3, "127.0.0.1", port)["error"]


def test_ports_by_name_and_by_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name may lead to a service that forwards only some ports. Here it leads nowhere."""
    monkeypatch.setattr(node_check, "CONNECT", 2.0)
    with socket.create_server(("", 0)) as server, socket.create_server(("", 0)) as closed:
        taken, shut = server.getsockname()[1], closed.getsockname()[1]
        closed.close()
        with node_check.doors_of([taken, shut], 1) as found:
            assert found == {str(taken): "in use", str(shut): "free", "1": "chosen by the system"}
            doors = {"name": "no-such-host.invalid", "address": "127.0.0.1", "ports": found}
            tried = node_check.knock_at_all(doors)
    assert [tried["address"][port] for port in found] == ["", "", "Connection refused"]
    assert all(tried["name"].values())
    output = node_check.table(report({}, {}, ports={**doors, "from": {"1": tried}}))
    assert f"{taken}" in output
    [row] = [line for line in output.splitlines() if line.startswith("1  ") and "chosen" in line]
    assert row.endswith("0 of 1 (Connection refused)")


def test_folders_and_what_is_mounted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket, mounts = tmp_path / "gcs bucket", tmp_path / "mounts"
    bucket.mkdir()
    told = str(bucket).replace(" ", "\\040")
    mounts.write_text(f"/dev/sda / ext4 rw 0 0\ngcsfuse {told} fuse.gcsfuse rw 0 0\nproc /proc proc rw 0 0\n")
    monkeypatch.setenv("CLOUDTRAIN_CHECKPOINT_DIR", str(tmp_path / "nowhere"))
    monkeypatch.setenv("CLOUDTRAIN_ARTIFACT_DIR", str(tmp_path))
    found = node_check.folders(mounts)
    assert (found["artifacts"]["kind"], found["artifacts"]["writable"]) == ("ext4", True)
    assert (found["checkpoints"]["writable"], found["checkpoints"]["free_bytes"]) == (False, None)
    assert (found[str(bucket)]["kind"], found[str(bucket)]["writable"]) == ("fuse.gcsfuse", True)
    assert "/proc" not in found
    assert os.listdir(bucket) == []
    one = report({"folders": found}, {"folders": {**found, "checkpoints": found["artifacts"]}})
    [wrong] = node_check.problems(one, nodes=2, gpus=8)
    assert wrong.startswith("node 0 cannot write to its checkpoints: ")
    rows = [line.split() for line in node_check.table(one).splitlines() if line.startswith("checkpoints")]
    assert [(row[1], row[2], row[-2]) for row in rows] == [("0", "ext4", "no"), ("1", "ext4", "yes")]


def test_a_dead_mount_is_named_and_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, any hung network mount of a machine, which the job did not use, held up the check for ever."""
    dead, mounts, real = tmp_path / "dead", tmp_path / "mounts", os.path.realpath
    dead.mkdir()
    mounts.write_text(f"/dev/sda / ext4 rw 0 0\nserver:/data {dead} nfs4 rw 0 0\n")
    over = threading.Event()

    def hang(path: str) -> str:
        if path == str(dead):
            over.wait(60)
        return real(path)

    monkeypatch.setattr(os.path, "realpath", hang)
    monkeypatch.setattr(node_check, "ANSWER", 0.5)
    monkeypatch.setenv("CLOUDTRAIN_CHECKPOINT_DIR", str(tmp_path))
    monkeypatch.setenv("CLOUDTRAIN_ARTIFACT_DIR", str(tmp_path))
    row = {"path": str(dead), "kind": "nfs4", "free_bytes": None, "writable": None}
    found = node_check.folders(mounts)
    assert found[str(dead)] == row
    assert found["checkpoints"]["writable"]
    assert node_check.problems(report({"folders": found}, {}), nodes=2, gpus=8) == []
    [line] = [line for line in node_check.table(report({"folders": found}, {})).splitlines() if line.startswith("/")]
    assert "no answer" in line
    monkeypatch.setenv("CLOUDTRAIN_CHECKPOINT_DIR", str(dead))
    [wrong] = node_check.problems(report({"folders": node_check.folders(mounts)}, {}), nodes=2, gpus=8)
    assert wrong.startswith("node 0 gives no answer for its checkpoints in ")
    over.set()


def test_a_mount_that_has_lost_its_program_is_no_folder_to_write_to(tmp_path: Path) -> None:
    mounts, file = tmp_path / "mounts", tmp_path / "resolv.conf"
    file.touch()
    bucket = str(tmp_path / "bucket")
    mounts.write_text(f"s3fs {bucket} fuse.s3fs rw 0 0\nserver:/file {file} nfs4 rw 0 0\n")
    with mounted(slowfs.__file__, tmp_path / "behind", Path(bucket)) as program:
        program.kill()
        program.wait()
        found = node_check.folders(mounts)
    assert (found[bucket]["kind"], found[bucket]["writable"]) == ("fuse.s3fs", False)
    assert str(file) not in found


class Cancelled:
    """A run that stops when it is asked to. Only node 0 has recorded its end."""

    run_id = "r"

    def __init__(self) -> None:
        self.store, self.cancels = self, 0

    def cancel(self) -> None:
        self.cancels += 1

    def exits(self, run_id: str) -> list[dict[str, Any]]:
        return [{"node": 0, "attempt": "0.0"}, {"node": 1, "attempt": "0.1"}]


def test_the_grace_is_the_last_that_a_node_says() -> None:
    run: Any = Cancelled()
    grace = Grace(run)

    def says(node: int | str, text: str, attempt: str = "0.0") -> None:
        grace(Line(attempt=attempt, node=node, rank=0, seq=1, text=text))

    says("service", "of the platform itself", attempt="")
    assert (run.cancels, grace.asked) == (0, False)
    for _ in range(2):
        says(0, node_check.READY)
    assert (run.cancels, grace.asked) == (1, True)
    says(1, "preflight: 60.0 s since the stop signal", attempt="0.1")
    for node, seconds in ((0, 0.0), (1, 0.5), (1, 15.0), (0, 22.5)):
        says(node, f"preflight: {seconds:.1f} s since the stop signal")
    found, wrong = grace.judged(3, 30.0)
    assert [found["nodes"][str(node)]["seconds"] for node in range(3)] == [22.5, 15.0, None]
    assert [line[:6] for line in wrong] == ["node 1", "node 2"]
    assert "killed 15.0 s after SIGTERM, of 30 s reckoned" in wrong[0]
    output = node_check.table(report({}, {}, grace=found))
    assert "1     at least 15.0 s  killed" in output


def test_only_a_job_has_a_grace(examiner: Examiner, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "local", "--measure-grace"]) == 2
    assert "without --job" in capsys.readouterr().err


def check_report(done: subprocess.CompletedProcess[str], each: int = 2) -> None:
    """Check the report of two nodes with ``each`` ranks."""
    assert done.returncode == 0, done.stderr
    output = json.loads(done.stdout)
    assert (output["state"], output["problems"], output["exit_code"]) == ("succeeded", [], 0)
    found = output["report"]
    assert set(found["nodes"]) == {"0", "1"}
    assert {row["ranks"] for row in found["nodes"].values()} == {each}
    assert found["links"]["0"]["1"]["error"] == found["links"]["1"]["0"]["error"] == ""
    ports = found["ports"]
    assert set(ports["ports"].values()) == {"in use", "chosen by the system"}
    assert ports["from"] == {"1": {way: dict.fromkeys(ports["ports"], "") for way in ("name", "address")}}
    folders = found["nodes"]["1"]["folders"]
    assert all(folders[name]["writable"] for name in ("checkpoints", "artifacts", "current folder"))
    speeds = found["allreduce"]
    assert (speeds["backend"], speeds["ranks"], speeds["right"]) == ("gloo", 2 * each, True)
    assert [row["bytes"] for row in speeds["rows"]] == list(node_check.CPU_SIZES)
    for row in speeds["rows"]:
        assert row["algbw"] == pytest.approx(row["bytes"] / row["seconds"] / 1e9)
        assert row["busbw"] == pytest.approx(row["algbw"] * (2 - 1 / each))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "each"),
    [
        pytest.param(("--nodes", "2", "--launcher", "python"), 1, id="python"),
        pytest.param(SHAPE, 2, id="torchrun", marks=pytest.mark.proof),
    ],
)
def test_all_nodes_are_looked_at(tmp_path: Path, shape: tuple[str, ...], each: int) -> None:
    command = [sys.executable, "-m", "cloudtrain", "doctor", "local", "--job", *shape, "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)
    check_report(done, each)


@pytest.mark.proof
def test_the_grace_of_this_machine_is_measured(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "cloudtrain", "doctor", "local", "--job", "--measure-grace", *SHAPE, "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    output = json.loads(done.stdout)
    assert (output["state"], output["problems"]) == ("cancelled", [])
    grace = output["report"]["grace"]
    assert {row["recorded"] for row in grace["nodes"].values()} == {True}
    assert all(0.5 * grace["reckoned"] < row["seconds"] < grace["reckoned"] for row in grace["nodes"].values())
    assert output["report"]["allreduce"]["right"]


@pytest.mark.proof
@pytest.mark.docker
def test_all_containers_are_looked_at(tmp_path: Path, images: Callable[[str], str]) -> None:
    command = [sys.executable, "-m", "cloudtrain", "doctor", "docker", "--job", *SHAPE, "--json"]
    command += ["--image", images("torch")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)
    check_report(done)
