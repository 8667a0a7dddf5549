"""Provider ``local`` in the contract suite, its refusals, and proof that the suite finds faults."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from node_shells import check_shell

import cloudtrain
from cloudtrain.engine import ENGINE_PREFIX, supervised
from cloudtrain.engine.processes import ProcessEngine, share_of_gpus
from cloudtrain.errors import CapacityError, NotFoundError, SpecError, UnsupportedError
from cloudtrain.job.job import DEFAULT_STALL_TIMEOUT, Job
from cloudtrain.provider_api.launch_spec import LaunchRules, LaunchSpec, NodeSpec
from cloudtrain.provider_api.protocol import Layout, Request
from cloudtrain.providers.local import _REFUSED, Provider
from cloudtrain.runs.run import Run
from cloudtrain.testing.contract import ProviderContract
from cloudtrain.testing.platform import FakePlatform, Impossible
from cloudtrain.testing.tables import CASES, Fields

PACKAGE = Path(cloudtrain.__file__).parents[1]
HELPERS = Path(__file__).parents[1] / "kit"


class LocalWorld(FakePlatform):
    """This machine: its processes are the platform, so nothing is faked. Nodes are found by their parent."""

    def __init__(self, folder: Path, provider: Provider | None = None, *, store: str = "") -> None:
        super().__init__(
            folder,
            provider=provider or Provider(state_dir=str(folder / "state"), prices={"localhost": 1.5}),
            store=store or (folder / "store").as_uri(),
            nowhere=f"{socket.gethostname()}:/nowhere",
        )

    @contextlib.contextmanager
    def node(self, request: Request, number: int) -> Iterator[Mapping[str, str]]:
        reader, writer = os.pipe()
        os.write(writer, b"{}")
        os.close(writer)
        nodes = len(self.provider.launch_spec(request).nodes)
        words: dict[str, Any] = {"NODE": number, "NODES": nodes, "PORT": 29500, "SUPERVISOR": os.getpid()}
        words |= {"SECRETS_FD": reader, "GROUPS": self.folder / f"groups-{number}", "SCRATCH": self.folder}
        yield {ENGINE_PREFIX + key: str(value) for key, value in words.items()}

    def preempt(self, run: Run, number: int) -> None:
        os.kill(self._pid(run, number), signal.SIGTERM)

    def kill(self, run: Run, number: int) -> None:
        os.killpg(self._pid(run, number), signal.SIGKILL)

    def fault(self, category: str) -> contextlib.AbstractContextManager[Fields]:
        raise Impossible("local processes have no accounts, quotas or images, and no lack of capacity")

    def check(self, request: Request) -> None:
        super().check(request)
        LaunchSpec.from_dict({key: request.body[key] for key in ("nodes", "rules")})

    def _pid(self, run: Run, number: int) -> int:
        """Return the process of node ``number``: nodes start in order."""
        native = self.provider.find(self.provider.plan(run.job, Layout.from_dict(run.record["layout"])))
        assert native is not None
        supervisor = json.loads(Path(native.partition(":")[2], "status.json").read_bytes())["pid"]
        table = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
        pairs = [tuple(map(int, line.split())) for line in table.splitlines()]
        return sorted(pid for pid, parent in pairs if parent == supervisor)[number]


class TestLocal(ProviderContract):
    @pytest.fixture(scope="class")
    @classmethod
    def world(cls, tmp_path_factory: pytest.TempPathFactory) -> FakePlatform:
        return LocalWorld(tmp_path_factory.mktemp("world"))


@pytest.mark.slow
def test_a_shell_enters_a_node(tmp_path: Path) -> None:
    check_shell(LocalWorld(tmp_path))


@pytest.mark.slow
@pytest.mark.remote
@pytest.mark.proof
class TestLocalOnS3(ProviderContract):
    """The same suite with a store on S3, which the supervisor syncs with the nodes."""

    @pytest.fixture(scope="class")
    @classmethod
    def world(cls, tmp_path_factory: pytest.TempPathFactory, s3_server: str) -> Iterator[FakePlatform]:
        folder = tmp_path_factory.mktemp("world")
        with pytest.MonkeyPatch.context() as patch:
            for name in [name for name in os.environ if name.startswith("AWS_")]:
                patch.delenv(name)
            patch.setenv("AWS_ENDPOINT_URL", s3_server)
            patch.setenv("AWS_ACCESS_KEY_ID", "testing")
            patch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
            patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
            patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
            patch.setenv("AWS_CONFIG_FILE", str(folder / "none"))
            patch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(folder / "none"))
            yield LocalWorld(folder, store=new_store(s3_server))


def new_store(endpoint: str) -> str:
    """Return the URL of a store in a new bucket."""
    import boto3

    bucket = f"contract-{uuid.uuid4().hex[:12]}"
    boto3.client("s3", endpoint_url=endpoint).create_bucket(Bucket=bucket)
    return f"s3://{bucket}/some/store"


# ------------------------------------------------------------------------------------------------------------- refusals


@pytest.fixture
def world(tmp_path: Path) -> FakePlatform:
    return LocalWorld(tmp_path)


def test_limits_of_money_and_of_gpus(tmp_path: Path) -> None:
    """Check the price of the machine, which does not depend on the nodes on it, and the GPUs of all nodes."""
    world = LocalWorld(tmp_path)

    def limit(**fields: Any) -> Any:
        return world.plan(fields).request.body["rules"]["time_limit"]

    assert limit(max_cost=3, instance_count=2) == 7200
    assert limit(max_gpu_hours=8, gpu="A100:2", instance_count=2) == 7200
    assert limit(max_gpu_hours=8, max_cost=1.5, gpu="A100:2", instance_count=2) == 3600
    assert limit(max_gpu_hours=8, gpu=["A100:2", "A100:8"], instance_count=2) == 1800, (
        "the larger choice must limit the time"
    )
    assert limit(max_gpu_hours=8, gpu="A100:2", max_runtime="1h") == 3600
    without = LocalWorld(tmp_path / "without", Provider(state_dir=str(tmp_path)))
    with pytest.raises(UnsupportedError, match=r"no price of localhost is known"):
        without.plan({"max_cost": 1})


@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
        ({"image": "python:3.12"}, "image", "--provider docker"),
        ({"instance_type": "big"}, "resources.instance_type", "on.PROVIDER"),
        ({"cpus": 1}, "resources.cpus", "share all cores"),
        ({"memory_gb": 1}, "resources.memory_gb", "share the memory"),
        ({"disk_gb": 1}, "resources.disk_gb", "share the disk"),
        ({"shm_gb": 1}, "resources.shm_gb", "share /dev/shm"),
        ({"spot": True}, "resources.spot", "never taken away"),
        ({"max_wait": "1h"}, "max_wait", "start at once"),
        ({"keep_warm": "1h"}, "keep_warm", "always there"),
        ({"gpu": "A100:1", "gpu_memory": "8GB"}, "resources.gpu_memory", "share the GPUs"),
        ({"max_gpu_hours": 1}, "max_gpu_hours", "asks for no GPU"),
        ({"secrets": {"TOKEN": "aws:arn:aws:x"}}, "secrets.TOKEN", "only env:NAME"),
        ({"inputs": {"data": {"url": "s3://bucket/data", "mode": "mount"}}}, "inputs.data.mode", "use mode copy"),
        ({"inputs": {"data": {"url": "s3://bucket/data", "shard": True}}}, "inputs.data.shard", "the same files"),
        ({"inputs": {"data": "azureml:data:1"}}, "inputs.data", "cannot read azureml:"),
    ],
)
def test_refuses(world: FakePlatform, fields: Fields, field: str, words: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        world.plan(fields)
    assert (caught.value.field, caught.value.provider, caught.value.exit_code) == (field, "local", 2)
    assert words in caught.value.with_hint()


@pytest.mark.parametrize(
    ("options", "where"),
    [
        ({"nodes": {"*": {"image": "x"}}}, "options.local.nodes.*.image"),
        ({"nodes": {"*": {"platform": "linux/arm64"}}}, "options.local.nodes.*.platform"),
        ({"nodes": {"*": {"container": {"Env": []}}}}, "options.local.nodes.*.container"),
        ({"nodes": {"*": {"hostname": "x"}}}, "options.local.nodes.*.hostname"),
        ({"nodes": {"*": {"workdir": "x"}}}, "options.local.nodes.*.workdir"),
        (
            {"nodes": {"*": {"env": {"CLOUDTRAIN_ENGINE_NODE": "1"}}}},
            "options.local.nodes.*.env.CLOUDTRAIN_ENGINE_NODE",
        ),
        ({"nodes": {"*": {"env": {"A": 1}}}}, "options.local.nodes.*.env"),
        ({"nodes": {"*": {"entrypoint": "strace"}}}, "options.local.nodes.*.entrypoint"),
        ({"nodes": {"*": {"files": {"x": 1}}}}, "options.local.nodes.*.files"),
        ({"nodes": {"*": {"entripoint": []}}}, "options.local.nodes.*.entripoint"),
        ({"rules": {"stop_grace": 5}}, "options.local.rules.stop_grace"),
        ({"rules": {"stop_signal": "SIGINT"}}, "options.local.rules.stop_signal"),
        ({"rules": {"restart_on": []}}, "options.local.rules.restart_on"),
        ({"rules": {"max_restarts": 1.5}}, "options.local.rules.max_restarts"),
        ({"name": "x"}, "options.local.name"),
        ({"gpu": "x"}, "options.local.gpu"),
        ({"ndoes": {}}, "options.local.ndoes"),
    ],
)
def test_an_option_that_processes_would_ignore_is_refused(world: FakePlatform, options: Fields, where: str) -> None:
    with pytest.raises(SpecError) as caught:
        world.plan({"options": {"local": options}})
    assert caught.value.field == where


def test_every_refusal_has_a_case() -> None:
    tried = {mark.args[1][i][1] for mark in test_refuses.pytestmark for i in range(len(mark.args[1]))}  # type: ignore[attr-defined]
    assert set(_REFUSED) <= tried


def test_gpus_that_are_not_here_are_one_line_and_exit_2_and_nothing_is_recorded(world: FakePlatform) -> None:
    plan = world.plan({"gpu": "H100:64"})
    with pytest.raises(SpecError, match="64 H100 GPUs on this machine, which has") as caught:
        world.send(plan)
    assert (caught.value.exit_code, caught.value.field) == (2, "resources.gpu")
    assert "\n" not in str(caught.value)
    assert plan.run_id not in plan.store.runs()


@pytest.mark.parametrize("python", ["this", "another"])
def test_without_torch_nothing_is_recorded(world: FakePlatform, monkeypatch: pytest.MonkeyPatch, python: str) -> None:
    monkeypatch.setattr("cloudtrain.engine.processes.has_torch", lambda python: False)
    if python == "another":
        monkeypatch.setattr(sys, "executable", "/another/python")
    plan = world.plan({"instance_count": 2})
    with pytest.raises(SpecError, match=r"has no torch, which starts|needs torch") as caught:
        world.send(plan)
    assert caught.value.exit_code == 2
    assert "pip install" in caught.value.hint
    assert plan.run_id not in plan.store.runs()
    Provider().check(world.plan({"instance_count": 2, "launcher": "python"}).request)


def test_a_shell_is_a_command_of_the_node_s_own_python(world: FakePlatform, tmp_path: Path) -> None:
    request = world.plan({"instance_count": 2}).request
    (tmp_path / "nodes").mkdir()
    for name in ("request.json", "status.json"):
        (tmp_path / name).write_text("{}")
    native = f"{socket.gethostname()}:{tmp_path}"
    with pytest.raises(SpecError) as caught:
        Provider().shell(request, native, 1, ["ls"], tty=True)
    assert (str(caught.value), caught.value.hint) == ("node: the node does not run now", "try again")
    (tmp_path / "nodes/node-1.started").write_text('{"scratch": "/tmp/s"}')
    words = ["shell", "--run-id", "contract", "--node", "1", "--scratch", "/tmp/s", "--", "ls"]
    found = Provider().shell(request, native, 1, ["ls"], tty=True).argv
    assert found == [sys.executable, f"{tmp_path}/nodes/node-1/cloudtrain.pyz", *words]


def test_checkpoints_that_the_newest_attempt_could_not_copy_are_named(tmp_path: Path) -> None:
    line = "[n{}] cloudtrain: mirror: cannot copy checkpoint step-{} to /s/live: No space left on device; trying again"
    for attempt, node, step in (("0.0", 0, 5), ("0.10", 0, 10), ("0.10", 1, 20)):
        path = tmp_path / "out" / attempt / f"node-{node}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"step 1\n{line.format(node, step)}\nstep 2\n")
    for name in ("request.json", "status.json"):
        (tmp_path / name).write_text("{}")
    why = "No space left on device"
    assert Provider().stuck(f"{socket.gethostname()}:{tmp_path}") == {"step-10": why, "step-20": why}


LISTING = """\
GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-aaaa-0)
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-bbbb-1)
  MIG 1g.10gb     Device  0: (UUID: MIG-cccc)
GPU 2: NVIDIA L4 (UUID: GPU-dddd-2)
"""


@pytest.fixture
def gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put nvidia-smi of a machine with two H100, one of them in slices, and an L4 on the path."""
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text(f"#!/bin/sh\ncat <<'END'\n{LISTING}END\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tool.parent), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.parametrize(
    ("visible", "gpu", "nodes", "dealt"),
    [
        (None, "H100:1", 2, [["0"], ["1"]]),
        (None, "H100:2", 1, [["0", "1"]]),
        ("1,0,2", "H100:1", 2, [["1"], ["0"]]),
        ("GPU-bbbb, MIG-cccc", "H100:1", 2, [["GPU-bbbb"], ["MIG-cccc"]]),
        ("2", "L4:1", 1, [["2"]]),
        (None, "H100:3", 1, "3 H100 GPUs on this machine, which has 3 (NVIDIA H100 80GB HBM3)"),
        (None, "L4:1", 1, "other GPUs come before this machine's 1 L4; name these alone in CUDA_VISIBLE_DEVICES"),
        ("0", "H100:1", 2, "and CUDA_VISIBLE_DEVICES=0 leaves 1 of them"),
        ("", "H100:1", 1, "and CUDA_VISIBLE_DEVICES= leaves 0 of them"),
        ("-1", "H100:1", 1, "leaves 0 of them"),
        ("0,-1,1", "H100:2", 1, "leaves 1 of them"),
        ("0,0", "H100:2", 1, "leaves 1 of them"),
        ("7", "H100:1", 1, "leaves 0 of them"),
        ("GPU-eeee", "H100:1", 1, "leaves 0 of them"),
    ],
)
@pytest.mark.usefixtures("gpus")
def test_gpus_are_those_that_the_environment_leaves(
    world: FakePlatform, monkeypatch: pytest.MonkeyPatch, visible: str | None, gpu: str, nodes: int, dealt: Any
) -> None:
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    request = world.plan({"gpu": gpu, "instance_count": nodes}).request
    specs = world.provider.launch_spec(request).nodes
    if isinstance(dealt, list):
        Provider().check(request)
        assert [share_of_gpus(number, spec, os.environ) for number, spec in enumerate(specs)] == dealt
    else:
        with pytest.raises(SpecError) as caught:
            Provider().check(request)
        assert dealt in f"{caught.value}; {caught.value.hint}"
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("visible", "number", "count"), [("3", 0, 2), ("0,1,2", 2, 2), ("0,1,2", 1, 2), ("", 0, 1)])
def test_a_node_never_starts_with_fewer_gpus(tmp_path: Path, visible: str, number: int, count: int) -> None:
    environ = {"CUDA_VISIBLE_DEVICES": visible}
    spec = NodeSpec(command=["true"], gpus=count)
    with pytest.raises(CapacityError, match=f"node {number} has no {count} of the"):
        share_of_gpus(number, spec, environ)
    engine = ProcessEngine(folder=tmp_path, environ=environ)
    simulation = LaunchSpec(nodes=[spec] * (number + 1), rules=LaunchRules(time_limit=1))
    with pytest.raises(CapacityError):
        engine.start(simulation, attempt="0.0", local={}, secrets={})
    assert not (tmp_path / "nodes").exists()


def test_an_input_of_this_machine_is_read_in_place(world: FakePlatform) -> None:
    """Check that a remote input is copied, and that ``mode`` copy copies both."""
    plan = world.plan(
        {
            "inputs": {
                "here": str(world.place.data),
                "copied": {"url": str(world.place.data), "mode": "copy"},
                "far": "s3://bucket/data",
            }
        }
    )
    mounts = {mount.path: mount.kind for mount in world.provider.launch_spec(plan.request).nodes[0].mounts}
    assert {mounts[f"inputs/{name}"] for name in ("copied", "far")} == {"copy"}
    assert mounts["inputs/here"] == "mount"


def test_an_input_without_a_file_is_refused(world: FakePlatform, tmp_path: Path) -> None:
    (tmp_path / "empty" / "sub").mkdir(parents=True)
    with pytest.raises(SpecError, match=r"inputs.d: .*empty holds no file"):
        world.plan({"inputs": {"d": str(tmp_path / "empty")}})


def test_a_folder_of_a_web_server_is_refused(world: FakePlatform) -> None:
    with pytest.raises(SpecError, match=r"inputs.far: http://host/data/ names no file, and HTTP cannot list a folder"):
        world.plan({"inputs": {"far": "http://host/data/"}})
    world.plan({"inputs": {"far": "https://host/download?id=3"}})  # a file may have no suffix


def test_a_status_without_a_request_is_not_of_this_run(world: FakePlatform, tmp_path: Path) -> None:
    (tmp_path / "status.json").write_text("{}")
    with pytest.raises(NotFoundError, match="no supervisor has ever written") as caught:
        world.provider.status(f"{socket.gethostname()}:{tmp_path}")
    assert caught.value.hint.startswith("if the store of this unfinished run was moved, move it back")


@pytest.mark.slow
def test_an_input_in_a_bucket_that_does_not_exist_ends_the_run(world: FakePlatform, s3_environment: str) -> None:
    run = world.send(world.plan({"inputs": {"d": "s3://no-such-bucket/x.tar"}}, run_id="bucket"))
    result = run.wait(timeout=60)
    why = "s3://no-such-bucket/x.tar: the bucket or container does not exist"
    assert (result["state"], result["category"], result["reason"]) == ("failed", "spec", why)


@pytest.mark.slow
def test_a_killed_node_leaves_no_process(world: FakePlatform) -> None:
    run = world.send(world.plan(CASES["infra"].job, {"env": {"PROBE": "hold"}}, run_id="killed"))
    world.await_line(run, "holding")
    world.kill(run, 1)
    assert run.wait(timeout=60, poll=0.1)["category"] == "infra"
    table = subprocess.run(["ps", "-A", "-o", "args="], capture_output=True, text=True, check=True).stdout
    assert [line for line in table.splitlines() if "/killed-n" in line or run.url in line] == []


# ----------------------------------------------------------------------------------------------- the suite finds faults


class Silent(Provider):
    """A provider that silently ignores tags."""

    def plan(self, job: Job, layout: Layout, attempt: int = 0, gpu_index: int = 0) -> Request:
        return super().plan(job.replace(tags={}), layout, attempt, gpu_index)


class Forgetful(Provider):
    """A provider whose scripts never get the stall timeout."""

    def plan(self, job: Job, layout: Layout, attempt: int = 0, gpu_index: int = 0) -> Request:
        return super().plan(job.replace(stall_timeout=DEFAULT_STALL_TIMEOUT), layout, attempt, gpu_index)


class Meddling(Provider):
    """A provider that changes the job it gets."""

    def plan(self, job: Job, layout: Layout, attempt: int = 0, gpu_index: int = 0) -> Request:
        job.tags["seen"] = "yes"
        return super().plan(job, layout, attempt, gpu_index)


class Vague(Provider):
    """A provider that refuses without the field's full name."""

    def plan(self, job: Job, layout: Layout, attempt: int = 0, gpu_index: int = 0) -> Request:
        if job.resources.spot:
            raise UnsupportedError(self.name, "spot", "no")
        return super().plan(job, layout, attempt, gpu_index)


class Obliging(Provider):
    """A provider whose options can lift the time limit."""

    def plan(self, job: Job, layout: Layout, attempt: int = 0, gpu_index: int = 0) -> Request:
        rules = job.options.get("local", {}).get("rules", {})
        if not isinstance(rules, dict) or "time_limit" not in rules:
            return super().plan(job, layout, attempt, gpu_index)
        request = super().plan(job.replace(options={}), layout, attempt, gpu_index)
        return dataclasses.replace(request, body={**request.body, "rules": {**request.body["rules"], **rules}})


class Deaf(Provider):
    """A provider that silently cancels unknown jobs."""

    def cancel(self, native_id: str) -> None:
        with contextlib.suppress(NotFoundError):
            super().cancel(native_id)


class Eager(Provider):
    """A provider whose every submit is a new job."""

    def submit(self, request: Request, secrets: Mapping[str, str] | None = None) -> str:
        return super().submit(request, secrets) + "/." * next(COUNTER)


COUNTER = itertools.count()
BITES: dict[type[Provider], set[str]] = {
    Silent: {"test_platform_field_is_honoured_or_refused[tags]"},
    Forgetful: {"test_script_field_reaches_the_context[stall_timeout]"},
    Meddling: {"test_plan_is_pure", "test_plans_with_no_network_account_or_sdk"},
    Vague: {"test_platform_field_is_honoured_or_refused[resources.spot]"},
    Obliging: {"test_options_cannot_change_what_cloudtrain_sets"},
    Deaf: {"test_an_unknown_id_is_not_found[cancel]"},
    Eager: {"test_submitted_twice_is_one_job"},
}
FEW = (Eager,)
"""Faults that `make test` plants; `make proof` plants all."""
TAGS = "test_platform_field_is_honoured_or_refused[tags]"
SUITE_OF_BROKEN = """
import pytest
from cloudtrain.providers import local
from cloudtrain.testing.contract import ProviderContract
from local_under_test import {name}, LocalWorld


class TestBroken(ProviderContract):
    xfails = {xfails}

    @pytest.fixture(scope="class")
    @classmethod
    def world(cls, tmp_path_factory):
        {name}.__module__ = local.__name__
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(local, "Provider", {name})
            yield LocalWorld(tmp_path_factory.mktemp("world"), {name}())
"""


def failed_tests(
    broken: type[Provider], folder: Path, *chosen: str, xfails: Mapping[str, str] | None = None
) -> set[str]:
    """Return the chosen tests that fail when ``broken`` is registered as ``local``."""
    (folder / "local_under_test.py").write_text(Path(__file__).read_text(encoding="utf-8"), encoding="utf-8")
    (folder / "test_broken.py").write_text(SUITE_OF_BROKEN.format(name=broken.__name__, xfails=dict(xfails or {})))
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = slow\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=no", "-rf", *chosen, "test_broken.py"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (folder, PACKAGE, HELPERS)))},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    failed = set(re.findall(r"^FAILED \S+::(test_\S+)", done.stdout, re.MULTILINE))
    assert done.returncode == bool(failed), done.stdout + done.stderr
    return failed


@pytest.mark.slow
@pytest.mark.parametrize(
    "broken",
    [pytest.param(broken, id=broken.__name__, marks=() if broken in FEW else pytest.mark.proof) for broken in BITES],
)
def test_the_suite_finds_each_fault(broken: type[Provider], tmp_path: Path) -> None:
    """Check that exactly the test of a fault fails, of all quick tests or of those that submit."""
    submitting = ("-k", "submitted or unknown or find or conflict or (outcome and succeeded)")
    assert failed_tests(broken, tmp_path, *(submitting if broken is Eager else ("-m", "not slow"))) == BITES[broken]


@pytest.mark.slow
@pytest.mark.proof
def test_an_expected_failure_must_be_one(tmp_path: Path) -> None:
    assert failed_tests(Silent, tmp_path, "-m", "not slow", xfails={TAGS: "it has no tags"}) == set()
    assert failed_tests(Vague, tmp_path, "-k", "honoured", xfails={TAGS: "it has no tags"}) == {TAGS, *BITES[Vague]}


def test_a_record_that_is_being_written_in_place_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check a folder that forbids renaming, between the opening of the file and its first byte."""
    path = tmp_path / "status.json"
    path.write_bytes(b"")
    monkeypatch.setattr("time.sleep", lambda seconds: path.write_text('{"state": "running"}'))
    assert supervised._read(path) == {"state": "running"}
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    path.write_bytes(b"{")
    with pytest.raises(ValueError, match="Expecting"):
        supervised._read(path)
