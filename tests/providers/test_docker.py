"""Provider ``docker`` in the contract suite, its plans and its refusals."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from containers import left
from node_shells import check_shell
from plans import Plans
from rows import for_each
from worlds.vertex.wire import Answer, Wire

from cloudtrain.engine import ENGINE_PREFIX
from cloudtrain.engine.docker_api import _address, _is_remote, check_image, clear, make_client, why
from cloudtrain.errors import SpecError, UnsupportedError
from cloudtrain.provider_api.protocol import Request
from cloudtrain.providers.docker import _REFUSED, Provider
from cloudtrain.runs.run import Run
from cloudtrain.storage.timings import CLIENT_TIMINGS
from cloudtrain.testing.contract import ProviderContract
from cloudtrain.testing.platform import FakePlatform, Impossible
from cloudtrain.testing.tables import Fields


class DockerWorld(FakePlatform):
    """This machine's engine; nothing is faked. ``image`` is the image of all jobs."""

    def __init__(self, folder: Path, *, engine: Any, image: str, store: str = "") -> None:
        super().__init__(
            folder,
            provider=Provider(state_dir=str(folder / "state"), prices={"localhost": 1.5}),
            store=store or (folder / "store").as_uri(),
            nowhere=f"{socket.gethostname()}:/nowhere",
        )
        self.engine, self.image = engine, image

    def plan(self, *parts: Fields, run_id: str = "contract") -> Any:
        return super().plan({"image": self.image}, *parts, run_id=run_id)

    @contextlib.contextmanager
    def node(self, request: Request, number: int) -> Iterator[Mapping[str, str]]:
        words = {"NODE": number, "NODES": len(self.provider.launch_spec(request).nodes), "CPUS": 1}
        yield {ENGINE_PREFIX + key: str(value) for key, value in words.items()}

    def container(self, run: Run, number: int) -> str:
        """Return the id of the running container of node ``number``."""
        wanted = {"label": [f"cloudtrain.run={run.url}", f"cloudtrain.node={number}"]}
        (found,) = self.engine.containers(filters=wanted)
        return str(found["Id"])

    def preempt(self, run: Run, number: int) -> None:
        self.engine.kill(self.container(run, number), "SIGTERM")

    def kill(self, run: Run, number: int) -> None:
        self.engine.kill(self.container(run, number), "SIGKILL")

    def fault(self, category: str) -> contextlib.AbstractContextManager[Fields]:
        if category == "image":
            return contextlib.nullcontext({"image": "127.0.0.1:9/team/none:1"})
        raise Impossible("a local engine has no accounts, no quotas and no lack of capacity")


@pytest.mark.docker
@pytest.mark.slow
class TestDocker(ProviderContract):
    @pytest.fixture(scope="class")
    @classmethod
    def world(
        cls, tmp_path_factory: pytest.TempPathFactory, engine: Any, images: Callable[[str], str]
    ) -> Iterator[FakePlatform]:
        folder = tmp_path_factory.mktemp("world")
        before = left(engine, folder)
        yield DockerWorld(folder, engine=engine, image=images("pip"))
        assert left(engine, folder) == before


@pytest.mark.docker
@pytest.mark.slow
def test_a_shell_enters_a_node(tmp_path: Path, engine: Any, images: Callable[[str], str]) -> None:
    check_shell(DockerWorld(tmp_path, engine=engine, image=images("pip")))


# ---------------------------------------------------------------------------------------------------- without an engine


@pytest.fixture
def world(tmp_path: Path) -> FakePlatform:
    return DockerWorld(tmp_path, engine=None, image="registry.example/trainer:1")


@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
        ({"instance_type": "big"}, "resources.instance_type", "on.PROVIDER"),
        ({"disk_gb": 1}, "resources.disk_gb", "StorageOpt"),
        ({"spot": True}, "resources.spot", "never taken away"),
        ({"max_wait": "1h"}, "max_wait", "start at once"),
        ({"keep_warm": "1h"}, "keep_warm", "always there"),
        ({"gpu": "A100:1", "gpu_memory": "8GB"}, "resources.gpu_memory", "whole GPUs"),
        ({"max_gpu_hours": 1}, "max_gpu_hours", "asks for no GPU"),
        ({"secrets": {"TOKEN": "aws:arn:aws:x"}}, "secrets.TOKEN", "only env:NAME"),
        ({"inputs": {"data": {"url": "s3://bucket/data", "mode": "mount"}}}, "inputs.data.mode", "use mode copy"),
        ({"inputs": {"data": "azureml:data:1"}}, "inputs.data", "cannot read azureml:"),
    ],
)
def test_refuses(world: FakePlatform, fields: Fields, field: str, words: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        world.plan(fields)
    assert (caught.value.field, caught.value.provider, caught.value.exit_code) == (field, "docker", 2)
    assert words in caught.value.with_hint()


def test_every_refusal_has_a_case() -> None:
    tried = {mark.args[1][i][1] for mark in test_refuses.pytestmark for i in range(len(mark.args[1]))}  # type: ignore[attr-defined]
    assert set(_REFUSED) <= tried


def option(**fields: Any) -> Fields:
    return {"options": {"docker": fields}}


def host(**fields: Any) -> Fields:
    return option(nodes={"*": {"container": {"HostConfig": fields}}})


@pytest.mark.parametrize(
    ("fields", "where", "words"),
    [
        ({"image": None}, "image", "Python 3.10 or newer"),
        (
            option(nodes={"*": {"container": {"HostConfig": {"ShmSzie": 1}}}}),
            "HostConfig.ShmSzie",
            "ShmSzie: no such field",
        ),
        (option(nodes={"*": {"container": {"HostConfig": {"Bind": []}}}}), "HostConfig.Bind", "'Binds'"),
        (option(nodes={"0": {"container": {"Lables": {}}}}), "container.Lables", "'Labels'"),
        (option(nodes={"0": {"container": {"HostConfig": 1}}}), "container", "would replace"),
        (option(nodes={"0": {"container": 1}}), "container", "would replace"),
        (option(ndoes={}), "options.docker.ndoes", "'nodes'"),
        (option(nodes={"*": {"container": {"HostConfig": {"AutoRemove": True}}}}), "HostConfig.AutoRemove", "itself"),
        (option(nodes={"*": {"env": {"A": "1"}}}), "nodes.*.env", "itself"),
        (option(nodes={"2": {"read_only": True}}), "nodes", "no index"),
        (option(rules={"stop_grace": 5}), "rules.stop_grace", "itself"),
        (option(rules={"restart_on": [1]}), "rules.restart_on", "itself"),
        (option(rules={"max_restarts": "many"}), "rules.max_restarts", "a whole number"),
        (host(Tmpfs={"/cloudtrain/live": ""}), "HostConfig.Tmpfs", "would hide"),
        (host(Binds=["/tmp:/cloudtrain"]), "HostConfig.Binds", "would hide"),
        (host(Binds=["/tmp"]), "HostConfig.Binds", "host:node"),
        (host(Binds="/tmp:/x"), "HostConfig.Binds", "a list of texts"),
        (host(Mounts=[{"Type": "bind", "Source": "/tmp", "Target": "/cloudtrain/inputs"}]), "Mounts", "would hide"),
        (host(Mounts=[{"Type": "bind"}]), "Mounts", "a Target"),
        (host(Mounts=[{"target": "/cloudtrain/live"}]), "HostConfig.Mounts.*.target", "'Target'"),
        (host(Mounts=None), "HostConfig.Mounts", "a list of tables"),
        (host(Tmpfs={"//cloudtrain//live/": ""}), "HostConfig.Tmpfs", "would hide"),
        (host(Tmpfs={"/x/../cloudtrain/live/deep": ""}), "HostConfig.Tmpfs", "would hide"),
        (host(Tmpfs=["/x"]), "HostConfig.Tmpfs", "a table of texts"),
        (host(MaskedPaths=["/cloudtrain/live"]), "HostConfig.MaskedPaths", "would hide"),
        (host(ReadonlyPaths=["/cloudtrain/live"]), "HostConfig.ReadonlyPaths", "would hide"),
        (host(Devices=[{"PathOnHost": "/dev/x", "PathInContainer": "/cloudtrain/live"}]), "Devices", "would hide"),
        (host(VolumesFrom=["other"]), "HostConfig.VolumesFrom", "itself"),
        (option(nodes={"0": {"container": {"Volumes": {"/": {}}}}}), "container.Volumes", "would hide"),
        (option(nodes={"0": {"container": {"Volumes": ["/x"]}}}), "container.Volumes", "a table of paths"),
        (option(nodes={"0": {"container": {"Healthcheck": {"Test": ["CMD", "true"]}}}}), "Healthcheck", "itself"),
        (option(nodes={"0": {"container": {"Labels": {"cloudtrain.id": "x"}}}}), "container.Labels", "itself"),
        (option(nodes={"0": {"container": {"Labels": ["x"]}}}), "container.Labels", "a table of texts"),
        (option(nodes={"0": {"container": {"Env": {"A": "1"}}}}), "container.Env", "a list of texts"),
        (option(nodes={"0": {"container": {"Env": ["HOME"]}}}), "container.Env", "NAME=VALUE"),
        (option(nodes={"0": {"read_only": "no"}}), "nodes.*.read_only", "true or false"),
        (option(nodes={"0": {"workdir": "/tmp"}}), "nodes.*.workdir", "itself"),
        (option(rules={"stop_signal": "SIGINT"}), "rules.stop_signal", "itself"),
        (option(nodes={"0": {"container": {"Env": ["CLOUDTRAIN_ENGINE_NODE=1"]}}}), "container.Env", "itself"),
        ({"tags": {"cloudtrain.run": "x"}}, "tags.cloudtrain.run", "another name"),
    ],
)
def test_an_option_that_would_be_lost_is_refused(world: FakePlatform, fields: Fields, where: str, words: str) -> None:
    with pytest.raises(SpecError) as caught:
        world.plan(fields)
    assert where in caught.value.field
    assert words in f"{caught.value} {caught.value.hint}"


@for_each("user", ["", "root", "1000:", "-1", "1:2:3"])
def test_a_user_is_a_number(user: str) -> None:
    with pytest.raises(SpecError, match="uid:gid in numbers"):
        Provider(user=user)


def test_a_node_runs_as_the_caller_and_has_its_own_name(world: FakePlatform) -> None:
    nodes = world.provider.launch_spec(world.plan({"instance_count": 3}).request).nodes
    assert [node.hostname for node in nodes] == ["node-0", "node-1", "node-2"]
    assert {node.user for node in nodes} == {f"{os.getuid()}:{os.getgid()}"}
    assert nodes[0].entrypoint is not None
    assert nodes[0].entrypoint[:2] == ["/bin/sh", "-c"]
    assert "exec" in nodes[0].entrypoint[2]
    assert {node.platform for node in nodes} == {None}


def test_a_request_has_its_platform_and_its_choice_of_gpus() -> None:
    plans = Plans(Provider, {"platform": "linux/arm64"}, "file:///store", {"image": "a/b:1"})
    request = plans.planned(gpu=["H100:8", "A100:2"], gpu_index=1, memory_gb=3)
    (node,) = Provider().launch_spec(request).nodes
    assert node.memory == 3 << 30
    assert (node.platform, node.gpus, request.body["gpu"], request.gpu_index) == ("linux/arm64", 2, "A100", 1)


def test_a_job_without_an_image_is_refused() -> None:
    assert Plans(Provider, {}, "file:///store").refused().with_hint() == (
        "image: provider docker needs one with Python 3.10 or newer, and torch for torchrun; name one: --image "
        "pytorch/pytorch:2.8.0-cuda12.8-cudnn9-runtime"
    )


# ------------------------------------------------------------------------------------------ an engine without a runtime


@pytest.fixture
def engine_on_tcp(monkeypatch: pytest.MonkeyPatch) -> Iterator[Wire]:
    """Give the API of an engine with one running container, and without a runtime for GPUs."""
    wire = Wire()
    wire.route("GET", r"(?:/v1\.44)?/version", "version", lambda call: Answer({"ApiVersion": "1.44"}), open=True)
    wire.route("GET", r"/v1\.44/info", "info", lambda call: Answer({"Runtimes": {"runc": {}}}), open=True)
    wire.route("GET", r"/v1\.44/containers/json", "containers", lambda call: Answer([{"Id": "abc"}]), open=True)
    monkeypatch.setenv("DOCKER_HOST", wire.listen().replace("http://", "tcp://"))
    yield wire
    wire.close()
    assert wire.crashes == []


def test_gpus_need_this_machine_s_and_the_engine_s_runtime(
    world: FakePlatform, engine_on_tcp: Wire, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SpecError, match="64 H100 GPUs on this machine, which has"):
        Provider().check(world.plan({"gpu": "H100:64"}).request)
    assert engine_on_tcp.calls == []
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-aaaa-0)'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tool.parent), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(SpecError) as caught:
        Provider().check(world.plan({"gpu": "H100:1"}).request)
    assert str(caught.value) == "resources.gpu: the container engine has no runtime for NVIDIA GPUs"
    assert "nvidia-ctk runtime configure" in caught.value.hint


@pytest.mark.parametrize(("tty", "flags"), [(True, ["-i", "-t"]), (False, ["-i"])])
def test_a_shell_is_a_command_of_docker(world: FakePlatform, engine_on_tcp: Wire, tty: bool, flags: list[str]) -> None:
    way = Provider().shell(world.plan().request, "", 0, ["ls"], tty=tty)
    assert way.argv[: len(flags) + 5] == ["docker", "exec", *flags, "abc", "/bin/sh", "-c"]
    words = ["/cloudtrain/cloudtrain.pyz", "shell", "--run-id", "contract", "--node", "0", "--scratch", "", "--", "ls"]
    assert way.argv[-10:] == words


@pytest.mark.parametrize(
    ("host", "words"),
    [
        ("unix:///no/such.sock", "no container engine answers at unix:///no/such.sock"),
        ("tcp://127.0.0.1:1", "no container engine answers at tcp://127.0.0.1:1"),
        ("tcp://192.0.2.1:2375", "cannot mount this machine's files"),
        ("ssh://me@example.org", "cannot mount this machine's files"),
        ("192.0.2.1:2375", "cannot mount this machine's files"),
        ("nonsense", "no container engine answers at nonsense"),
    ],
)
def test_no_engine_here_is_one_line_that_offers_local(
    world: FakePlatform, monkeypatch: pytest.MonkeyPatch, host: str, words: str
) -> None:
    monkeypatch.setenv("DOCKER_HOST", host)
    plan = world.plan()
    with pytest.raises(SpecError) as caught:
        world.send(plan)
    assert (caught.value.exit_code, "\n" in str(caught.value)) == (2, False)
    assert words in f"{caught.value} {caught.value.hint}"
    assert "--provider local" in caught.value.hint


@pytest.fixture
def contexts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create docker's own folder, with the contexts ``far``, ``dead`` and ``broken``, and no config.json."""
    folder = tmp_path / "docker"
    for name, address in (("far", "ssh://me@example.org"), ("dead", "unix:///no/such.sock"), ("broken", None)):
        meta = folder / "contexts" / "meta" / hashlib.sha256(name.encode()).hexdigest() / "meta.json"
        meta.parent.mkdir(parents=True)
        endpoints = {"docker": {"Host": address, "SkipTLSVerify": False}}
        meta.write_text(json.dumps({"Name": name, "Endpoints": endpoints}) if address else "[]")
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    monkeypatch.delenv("DOCKER_CONTEXT", raising=False)
    monkeypatch.setenv("DOCKER_CONFIG", str(folder))
    return folder


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("far", "the containers of ssh://me@example.org cannot mount"),
        ("dead", "no container engine answers at unix:///no/such.sock"),
        ("none", "names 'none', which is no context"),
        ("broken", "meta.json cannot be read"),
    ],
)
@pytest.mark.parametrize("by", ["variable", "config"])
def test_the_context_is_docker_s_own_choice(
    world: FakePlatform, contexts: Path, monkeypatch: pytest.MonkeyPatch, by: str, name: str, words: str
) -> None:
    if by == "variable":
        monkeypatch.setenv("DOCKER_CONTEXT", name)
    else:
        (contexts / "config.json").write_text(json.dumps({"currentContext": name}))
    with pytest.raises(SpecError) as caught:
        Provider().check(world.plan().request)
    assert words in f"{caught.value} {caught.value.hint}"
    assert "--provider local" in caught.value.hint


def test_docker_host_comes_before_a_context_and_that_before_the_current_one(
    contexts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _address() == "unix:///var/run/docker.sock"
    (contexts / "config.json").write_text(json.dumps({"currentContext": "dead"}))
    assert _address() == "unix:///no/such.sock"
    assert make_client("1.43").timeout == CLIENT_TIMINGS.docker_call
    monkeypatch.setenv("DOCKER_CONTEXT", "far")
    assert _address() == "ssh://me@example.org"
    monkeypatch.setenv("DOCKER_CONTEXT", "default")
    assert _address() == "unix:///var/run/docker.sock"
    monkeypatch.setenv("DOCKER_CONTEXT", "far")
    monkeypatch.setenv("DOCKER_HOST", "tcp://127.0.0.1:1")
    assert _address() == "tcp://127.0.0.1:1"
    assert make_client("1.43").base_url == "http://127.0.0.1:1"


@for_each(
    ("address", "remote"),
    [
        ("unix:///var/run/docker.sock", False),
        ("tcp://127.1.2.3:2375", False),
        ("tcp://localhost:2375", False),
        ("localhost:2375", False),
        (":2375", False),
        ("tcp://0.0.0.0:2375", False),
        ("https://[::1]:2376/x", False),
        ("nonsense", False),
        ("10.0.0.5:2375", True),
        ("engine.example:2375", True),
        ("tcp://localhost.example:2375", True),
        ("tcp://[2001:db8::1]:2375", True),
        ("ssh://localhost", True),
    ],
)
def test_remote_addresses(address: str, remote: bool) -> None:
    assert _is_remote(address) == remote


# -------------------------------------------------------------------------------------------------------- a fake engine


class FakeEngine:
    """An engine with the calls of `check_image` and `clear`. The networks exist; their containers have just gone."""

    def __init__(self, **image: str) -> None:
        self.image, self.removed = image, list[str]()

    def inspect_image(self, name: str) -> Mapping[str, str]:
        return self.image

    def version(self) -> Mapping[str, str]:
        return {"Arch": "arm"}

    def containers(self, **words: Any) -> list[Any]:
        return []

    def networks(self, **words: Any) -> list[Any]:
        return [{"Id": "a"}, {"Id": "b"}]

    def inspect_network(self, name: str) -> Any:
        return {"Containers": {"gone": {}}}

    def disconnect_container_from_network(self, *names: str, force: bool) -> None:
        import docker

        raise docker.errors.NotFound("no such container")

    def remove_network(self, name: str) -> None:
        self.removed.append(name)


def test_a_container_that_has_just_gone_does_not_keep_its_network() -> None:
    engine = FakeEngine()
    assert clear(engine, "x")
    assert engine.removed == ["a", "b"]


@for_each(
    ("image", "variant", "platform", "fits"),
    [
        ("arm64", "", "linux/arm64/v8", True),
        ("arm64", "v8", "linux/arm64", True),
        ("arm", "v7", None, True),
        ("arm", "", "linux/arm64", False),
        ("arm64", "", "linux/arm", False),
        ("arm", "v6", "linux/arm/v7", False),
        ("s390x", "", None, False),
    ],
)
def test_the_platform_of_an_image(image: str, variant: str, platform: str | None, fits: bool) -> None:
    engine = FakeEngine(Os="linux", Architecture=image, Variant=variant)
    if fits:
        assert check_image(engine, "x", platform)
    else:
        with pytest.raises(SpecError, match=f"x is for linux/{image}"):
            check_image(engine, "x", platform)


def test_why_names_the_cause_and_no_handled_error() -> None:
    def raised(exc: Exception, during: Exception, *, cause: Exception | None = None, hide: bool = False) -> Exception:
        exc.__context__ = during
        if cause or hide:
            exc.__cause__ = cause  # as by `from`, which hides the context
        return exc

    missing, other = FileNotFoundError(2, "no such file"), PermissionError(13, "not yours")
    assert why(raised(RuntimeError("wrapped"), missing)) == "no such file"
    assert why(raised(RuntimeError("wrapped"), missing, hide=True)) == "wrapped"
    assert why(raised(RuntimeError("wrapped"), missing, cause=other)) == "not yours"
    assert why(raised(SpecError("ours"), missing)) == "ours"
    assert why(raised(RuntimeError("wrapped"), other, cause=raised(SpecError("ours"), missing))) == "ours"


def test_a_missing_client_library_gives_the_install_command(
    world: FakePlatform, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "docker", None)
    with pytest.raises(SpecError, match=r"^provider docker: .*needs docker, which is not installed") as caught:
        Provider().check(world.plan().request)
    assert "[docker]'" in caught.value.hint
    assert "--provider local" in caught.value.hint
