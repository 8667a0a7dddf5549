"""Test a provider's border, plans and nodes before anything is sent, as a part of `cloudtrain.testing.contract`."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from ..engine import ENGINE_PREFIX
from ..errors import SpecError, UnsupportedError
from ..job.job import Job
from ..job.run_id import check_run_id
from ..provider_api.launch_spec import LaunchSpec
from ..provider_api.node import NodeEnvironment
from ..provider_api.protocol import Layout, LayoutInput, Provider, Request, context_of
from ..provider_api.registry import find_provider
from ..store import runtime_zip
from .platform import FakePlatform
from .tables import (
    ELSEWHERE,
    PLATFORM,
    RUN_ID,
    SCRIPT,
    SECRETS,
    Fields,
    by_client,
    field_helps,
    merged,
    needs_nothing,
    platform_rows,
    secret_row,
    verdict,
)

__all__ = ["PlanContract"]

RETRIED_BY = ("platform", "supervisor", "client")
MAX_WAIT_BY = ("platform", "client")
#: In an empty environment and folder, without a network: the plan of the job on stdin, and the imported modules.
PLAN_ALONE = """
import json, socket, sys
def cut(*args, **more): raise OSError("the network is cut")
socket.socket.connect = socket.create_connection = socket.getaddrinfo = cut
given = json.load(sys.stdin)
sys.path.extend(given["path"])
before = set(sys.modules)
from cloudtrain.job.job import Job
from cloudtrain.provider_api.protocol import Layout
from cloudtrain.provider_api.registry import find_provider
provider = find_provider(given["provider"])(**given["settings"])
request = provider.plan(Job.from_dict(given["job"]), Layout.from_dict(given["layout"]))
provider.launch_spec(request)
roots = {name.partition(".")[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names)
own = type(provider).__module__.partition(".")[0]
print(json.dumps({"request": request.to_dict(), "foreign": sorted(roots - {"cloudtrain", own})}))
"""
#: A node has the runtime's zip and the standard library: no site-packages, no environment.
NODE_ALONE = """
import sys
sys.path.append(sys.argv[1])
before = set(sys.modules)
import cloudtrain.runtime.__main__
from cloudtrain.provider_api.registry import find_provider
assert callable(find_provider(sys.argv[2]).node_environment)
assert cloudtrain.__file__.startswith(sys.argv[1]), cloudtrain.__file__
print(sorted({name.partition(".")[0] for name in set(sys.modules) - before} - {"cloudtrain", *sys.stdlib_module_names}))
"""


class PlanContract:
    """The quick half of the suite."""

    # ------------------------------------------------------------------------------------------------------- the border

    def test_has_the_whole_border(self, world: FakePlatform) -> None:
        provider = world.provider
        assert isinstance(provider, Provider)
        for name, wanted in inspect.getmembers(Provider, inspect.isfunction):
            if not name.startswith("_"):
                assert _parameters(getattr(provider, name)) == _parameters(
                    wanted, drop_self=name != "node_environment"
                ), name
        static = inspect.getattr_static(type(provider), "node_environment")  # a node makes no provider
        assert isinstance(static, (staticmethod, classmethod))
        assert provider.schemes
        assert all(scheme == scheme.lower().strip(":/") for scheme in provider.schemes)
        assert provider.retried_by in RETRIED_BY
        assert provider.max_wait_by in MAX_WAIT_BY

    def test_is_registered_by_its_name(self, world: FakePlatform) -> None:
        provider = type(world.provider)
        assert find_provider(provider.name) is provider
        if provider.__module__.startswith("cloudtrain."):
            assert provider.__module__.rpartition(".")[2] == provider.name

    def test_settings_are_a_frozen_dataclass(self, world: FakePlatform) -> None:
        settings = world.provider.settings
        assert isinstance(settings, world.provider.Settings)
        assert settings.__dataclass_params__.frozen
        plain = json.loads(json.dumps(dataclasses.asdict(settings)))
        assert type(world.provider)(**plain).settings == settings

    def test_who_calls_is_recorded_nowhere(self, world: FakePlatform) -> None:
        """Check that the caller is not recorded, and that another platform's store gets no options."""
        callers = {item.name for item in dataclasses.fields(world.provider.Settings) if item.metadata.get("caller")}
        assert not callers & set(world.plan().document()["settings"])
        assert isinstance(world.provider.storage(world.store), Mapping)
        assert dict(world.provider.storage("none://bucket/store")) == {}

    def test_plans_with_no_network_account_or_sdk(self, world: FakePlatform, tmp_path: Path) -> None:
        plan = world.plan({"args": ("ü", "{x}"), "inputs": {"data": str(world.place.data)}})
        given = {
            "path": [p for p in sys.path if p],
            "provider": world.provider.name,
            "settings": dataclasses.asdict(world.provider.settings),
            "job": plan.job.to_dict(),
            "layout": dataclasses.asdict(plan.layout),
        }
        env = {"HOME": str(tmp_path)}
        answer = json.loads(_python(["-c", PLAN_ALONE], cwd=tmp_path, env=env, text=json.dumps(given)))
        assert answer["foreign"] == []
        assert answer["request"] == plan.request.to_dict()
        assert list(tmp_path.iterdir()) == []

    # --------------------------------------------------------------------------------------------------- planning: pure

    def test_plan_is_pure(self, world: FakePlatform) -> None:
        """Check the first plan too: a plan that changed the job would do no harm the second time."""
        provider, given = world.provider, {"tags": {"a": "b"}, "env": {"A": "1"}, "inputs": {"data": world.store}}
        job = Job.make(**merged({"entry_point": "train.py"}, world.sample.job, given))
        layout = Layout(
            store=world.store,
            run_id=RUN_ID,
            code_digest="c" * 64,
            runtime_digest="d" * 64,
            inputs={"data": LayoutInput(url=f"{world.store}/data/d")},
        )
        before = copy.deepcopy((job, layout))
        first, second = provider.plan(job, layout), provider.plan(job, layout)
        assert first == second
        assert (job, layout) == before
        first.body.clear()  # type: ignore[attr-defined]
        assert provider.plan(job, layout) == second

    def test_request_is_json_and_round_trips(self, world: FakePlatform) -> None:
        request = world.plan({"args": ("ü", "\n")}).request
        assert json.loads(json.dumps(request.body, allow_nan=False)) == request.body
        assert Request.from_dict(json.loads(json.dumps(request.to_dict()))).to_dict() == request.to_dict()
        assert request.provider == world.provider.name
        assert request.run == f"{world.store}/runs/{RUN_ID}"

    def test_context_is_the_same_as_everywhere(self, world: FakePlatform) -> None:
        plan = world.plan({"nproc_per_node": 3, "args": ("x",), "inputs": {"data": str(world.place.data)}})
        assert plan.request.context == context_of(world.provider.name, plan.job, plan.layout, processes=3)

    def test_the_platform_accepts_the_longest_names(self, world: FakePlatform) -> None:
        longest = "a-" + "b" * 38
        world.check(world.plan({"name": longest}, run_id=check_run_id(longest)).request)
        world.check(world.plan({"name": "0"}, run_id="0").request)

    @pytest.mark.parametrize("tags", [{"k": ""}, {"Key": "two words"}, {"ключ": "ü/:=+-@_"}, {"k" * 200: "v" * 300}])
    def test_tags_are_legal_or_refused(self, world: FakePlatform, tags: Mapping[str, str]) -> None:
        planned = _planned(world, {"tags": tags})
        if isinstance(planned, SpecError):
            assert planned.field.partition(".")[0] == "tags"
        else:
            world.check(planned)

    def test_attempts_are_told_apart(self, world: FakePlatform) -> None:
        plan = world.plan()
        first, second = (world.provider.plan(plan.job, plan.layout, attempt=k) for k in (0, 1))
        assert (first.attempt, second.attempt) == (0, 1)
        assert first.body != second.body
        assert first.context == second.context

    def test_choice_takes_the_gpu_of_the_list(self, world: FakePlatform) -> None:
        row = platform_rows(type(world.provider))["resources.gpu"]
        gpu = row.change(world.place)["gpu"][0]
        fields = {"gpu": [gpu, gpu.rpartition(":")[0] + ":1"]}
        if isinstance(_planned(world, fields), UnsupportedError):
            return  # it has no GPU, and refuses it: the table tests that
        plan = world.plan(fields)
        first, second = (world.provider.plan(plan.job, plan.layout, 0, i) for i in (0, 1))
        assert (first.gpu_index, second.gpu_index) == (0, 1)
        assert first.body != second.body
        count = int(gpu.rpartition(":")[2])
        assert [world.provider.launch_spec(request).nodes[0].gpus for request in (first, second)] == [count, 1]

    # The source of a copied checkpoint is the client's affair: nodes get the copy.
    @pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(Layout) if f.name != "resume_source"])
    def test_every_url_reaches_the_request(self, world: FakePlatform, name: str) -> None:
        plan = world.plan({"inputs": {"data": str(world.place.data)}})
        change = {
            "store": world.store + "-2",
            "run_id": "another",
            "code_digest": "0" * 64,
            "runtime_digest": "1" * 64,
            "inputs": {"data": LayoutInput(url=f"{world.store}/elsewhere")},
            "resume": world.place.earlier,
            "origin": {"revision": "0" * 40, "ci": "github", "ci_run": "1", "ci_url": "https://example.org/1"},
        }[name]
        layout = dataclasses.replace(plan.layout, **{name: change})  # type: ignore[arg-type]
        assert world.provider.plan(plan.job, layout).body != plan.request.body

    # --------------------------------------------------------------------------------------------------- the two tables

    def test_every_field_has_a_row(self) -> None:
        assert {*PLATFORM, *SCRIPT, *ELSEWHERE} == field_helps().keys()

    @pytest.mark.parametrize("field", PLATFORM)
    def test_platform_field_is_honoured_or_refused(self, world: FakePlatform, field: str) -> None:
        row = platform_rows(type(world.provider))[field]
        reached, refused = verdict(world.provider, world.place, row, world.sample.job)
        if refused is not None:
            assert refused.field == (field.replace("inputs", "inputs.data") if field.startswith("inputs.") else field)
            assert refused.provider == world.provider.name
            assert refused.why.strip()
        elif "body" in reached:
            world.check(world.plan(row.base(world.place), row.change(world.place)).request)
        elif needs_nothing(world.provider, field):
            plan = world.plan(row.base(world.place), row.change(world.place))
            assert any(note.startswith(f"{field}: ") for note in plan.notes)
        else:
            assert by_client(world.provider, field), "neither in the request nor refused"

    @pytest.mark.parametrize("field", SCRIPT)
    def test_script_field_reaches_the_context(self, world: FakePlatform, field: str) -> None:
        reached, refused = verdict(world.provider, world.place, SCRIPT[field], world.sample.job)
        assert refused is None
        assert "context" in reached

    @pytest.mark.parametrize("kind", SECRETS)
    def test_secrets_are_references(self, world: FakePlatform, kind: str) -> None:
        reached, refused = verdict(world.provider, world.place, secret_row(kind), world.sample.job)
        if world.sample.secret.startswith(kind):
            assert refused is None
        if refused is not None:
            assert refused.field == "secrets.TOKEN"
            assert refused.why.strip()
        else:
            assert "context" in reached

    def test_request_holds_no_digest_of_the_job(self, world: FakePlatform) -> None:
        """Check that no digest changes with every field, which would hide ignored fields in the tables."""
        plain, other = world.plan().request, world.plan({"args": ("x",), "env": {"A": "1"}}).request
        assert plain.body == other.body

    # ---------------------------------------------------------------------------------------------- options, on, inputs

    def test_options_arrive_verbatim(self, world: FakePlatform) -> None:
        name = world.provider.name
        options = platform_rows(type(world.provider))["options"].change(world.place)["options"][name]
        request = world.plan({"options": {name: options, "elsewhere": {"contract": "not for us"}}}).request
        for path, value in _leaves(options):
            assert _at(world.named_by_options(request), path) == value
        assert "not for us" not in json.dumps(request.body)

    def test_options_cannot_change_what_cloudtrain_sets(self, world: FakePlatform) -> None:
        """Try every place of the request: the nodes still start our command, with our mounts and time limit."""
        name, provider = world.provider.name, world.provider
        request = world.plan().request
        before = provider.launch_spec(request)
        refused = 0
        for path in _places(request.body):
            planned = _planned(world, {"options": {name: _nested(path, "contract")}})
            if isinstance(planned, SpecError):
                refused += 1
                assert planned.field.startswith(f"options.{name}.{path[0]}"), planned
                continue
            after = provider.launch_spec(planned)
            for old, new in zip(before.nodes, after.nodes, strict=True):
                assert (old.command, old.mounts) == (new.command, new.mounts), path
            assert before.rules.time_limit == after.rules.time_limit, path
        assert refused

    def test_options_know_only_the_indices_there_are(self, world: FakePlatform) -> None:
        name = world.provider.name
        for path in _places(world.plan().request.body, lists=True):
            for index in ("999", "-1", "x"):
                with pytest.raises(SpecError) as caught:
                    world.plan({"options": {name: _nested((*path, index), {})}})
                assert caught.value.field.startswith(f"options.{name}.{path[0]}")

    def test_on_applies(self, world: FakePlatform) -> None:
        change = {"max_runtime": 7200, "args": ["x"]}
        here = world.plan({"on": {world.provider.name: change}}).request
        assert here == world.plan(change).request
        assert world.plan({"on": {"elsewhere": change}}).request == world.plan().request

    def test_inputs_it_cannot_read_are_refused(self, world: FakePlatform) -> None:
        with pytest.raises(UnsupportedError) as caught:
            world.plan({"inputs": {"data": "nosuch://x/y"}})
        assert caught.value.field == "inputs.data"

    # ------------------------------------------------------------------------------------------------------------ nodes

    @pytest.mark.parametrize("nodes", [1, 2, 4])
    def test_nodes_are_what_the_request_says(self, world: FakePlatform, nodes: int) -> None:
        plan = world.plan({"instance_count": nodes, "max_runtime": 1234, "inputs": {"data": str(world.place.data)}})
        launch = world.provider.launch_spec(plan.request)
        assert LaunchSpec.from_dict(json.loads(json.dumps(launch.to_dict()))).to_dict() == launch.to_dict()
        assert launch == world.provider.launch_spec(Request.from_dict(plan.request.to_dict()))
        assert len(launch.nodes) == nodes
        assert launch.rules.time_limit == 1234
        for number, node in enumerate(launch.nodes):
            words = " ".join([*(node.entrypoint or ()), *node.command])
            assert "cloudtrain.pyz" in words
            assert f"--attempt {plan.request.attempt}" in words
            kinds = {mount.url: mount.kind for mount in node.mounts}
            assert kinds[plan.layout.live] == "sync"
            assert {"copy", "sync", "mount"} >= set(kinds.values())
            assert f"{ENGINE_PREFIX}NODE" not in node.env
            assert node.env.get("RANK", str(number)) == str(number), (
                "what a platform gives is of its one process a node"
            )

    @pytest.mark.parametrize("nodes", [1, 2, 4])
    def test_nodes_agree_on_the_topology(self, world: FakePlatform, nodes: int) -> None:
        plan = world.plan({"instance_count": nodes, "inputs": {"data": str(world.place.data)}})
        with _sites(world, plan.request) as sites:
            found = [site.topology for site in sites]
            assert [t.node_rank for t in found] == list(range(nodes))
            assert {(t.nodes, t.master_addr, t.master_port) for t in found} == {
                (nodes, found[0].master_addr, found[0].master_port)
            }
            assert 0 < found[0].master_port < 65535  # the node link has the next one

    def test_a_node_knows_its_folders_and_exit_codes(self, world: FakePlatform) -> None:
        plan = world.plan({"inputs": {"data": str(world.place.data)}})
        with _sites(world, plan.request) as (site,):
            assert {"live", "code", "input.data"} <= set(site.paths)
            assert set(site.exit_code) - {"lost"} == {"succeeded", "failed", "preempted"}
            assert site.exit_code["succeeded"] == 0
            assert all(0 < site.exit_code.get(word, 1) < 256 for word in ("failed", "lost"))
            assert 0 <= site.exit_code["preempted"] < 256
            assert site.stop_grace > 0

    def test_a_node_needs_the_standard_library_alone(self, world: FakePlatform, tmp_path: Path) -> None:
        archive = tmp_path / "cloudtrain.pyz"
        archive.write_bytes(runtime_zip.build(type(world.provider)))  # a third party's is beside ours
        found = _python(["-I", "-S", "-c", NODE_ALONE, str(archive), world.provider.name], cwd=tmp_path, env={})
        assert found.strip() == "[]"


def _planned(world: FakePlatform, fields: Fields) -> Request | SpecError:
    try:
        return world.plan(fields).request
    except SpecError as exc:
        return exc


def _parameters(function: Any, *, drop_self: bool = False) -> list[tuple[str, Any, Any]]:
    found = list(inspect.signature(function).parameters.values())
    return [(p.name, p.kind, p.default) for p in found[drop_self:]]


def _python(args: Sequence[str], *, cwd: Path, env: Mapping[str, str], text: str = "") -> str:
    done = subprocess.run(
        [sys.executable, "-B", *args], cwd=cwd, env=dict(env), input=text, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@contextlib.contextmanager
def _sites(world: FakePlatform, request: Request) -> Iterator[list[NodeEnvironment]]:
    """Yield every node's NodeEnvironment of the request."""
    specs = world.provider.launch_spec(request).nodes
    with contextlib.ExitStack() as stack:
        sites = []
        for number, spec in enumerate(specs):
            words = list(spec.command)
            pairs = [words[i + 1] for i, word in enumerate(words) if word == "--path"]
            environ = stack.enter_context(world.node(request, number))
            sites.append(world.provider.node_environment(environ, dict(pair.split("=", 1) for pair in pairs)))
        yield sites


def _leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _leaves(item, (*path, key))
    else:
        yield path, value


def _at(value: Any, path: Sequence[str]) -> Any:
    for key in path:
        value = value[0 if key == "*" else int(key)] if isinstance(value, list) else value[key]
    return value


def _places(value: Any, path: tuple[str, ...] = (), *, lists: bool = False) -> Iterator[tuple[str, ...]]:
    """Yield every place in ``value`` that an option could name; ``lists``: only those that hold a list."""
    inner = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    if path and (isinstance(value, list) or not lists):
        yield path
    for key, item in inner:
        yield from _places(item, (*path, str(key)), lists=lists)


def _nested(path: Sequence[str], value: Any) -> dict[str, Any]:
    for key in reversed(path):
        value = {key: value}
    return dict(value)
