"""The suite that every provider passes. Subclass `ProviderContract` and give it a `World`; see the package's page."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from .. import pyz
from ..engine import ENGINE_PREFIX
from ..errors import CATEGORIES, EXIT_CODES, CloudtrainError, NotFoundError, SpecError, UnsupportedError
from ..job import Job, check_run_id
from ..provider import STATES, Layout, LayoutInput, Provider, Request, Simulation, Site, context_of, find_provider
from ..run import Run
from ..store import Store
from ..transfer import files
from .probe import LINES
from .tables import (
    CASES,
    ELSEWHERE,
    JOBS,
    PLATFORM,
    RUN_ID,
    SCRIPT,
    SECRET,
    Fields,
    Seen,
    field_names,
    platform_rows,
    verdict,
)
from .worlds import Impossible, World, numbered

__all__ = ["Jobs", "ProviderContract"]

FAULTS = ("capacity", "quota", "auth", "image")
RETRIED_BY = ("platform", "supervisor", "client")
#: In an empty environment, an empty folder and without a network: the plan of the job on stdin, and what was imported.
PLAN_ALONE = """
import json, socket, sys
def cut(*args, **more): raise OSError("the network is cut")
socket.socket.connect = socket.create_connection = socket.getaddrinfo = cut
given = json.load(sys.stdin)
sys.path.extend(given["path"])
before = set(sys.modules)
from cloudtrain.job import Job
from cloudtrain.provider import Layout, find_provider
provider = find_provider(given["provider"])(**given["settings"])
request = provider.plan(Job.from_dict(given["job"]), Layout.from_dict(given["layout"]))
provider.nodes(request)
roots = {name.partition(".")[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names)
own = type(provider).__module__.partition(".")[0]
print(json.dumps({"request": request.to_dict(), "foreign": sorted(roots - {"cloudtrain", own})}))
"""
#: On a node there is the runtime's zip and the standard library: no site-packages, no environment.
NODE_ALONE = """
import sys
sys.path.append(sys.argv[1])
before = set(sys.modules)
import cloudtrain.runtime.__main__
from cloudtrain.provider import find_provider
assert callable(find_provider(sys.argv[2]).site)
assert cloudtrain.__file__.startswith(sys.argv[1]), cloudtrain.__file__
print(sorted({name.partition(".")[0] for name in set(sys.modules) - before} - {"cloudtrain", *sys.stdlib_module_names}))
"""
SUBMIT_PLAN = """
import os, pathlib, sys
from cloudtrain.settings import Settings
from cloudtrain.submit import load_plan, submit
run = submit(load_plan(pathlib.Path(sys.argv[1]), settings=Settings(), cwd=pathlib.Path.cwd()), environ=os.environ)
print(run.provider.find(run.store.attempt_request(run.run_id, 0)))
"""


class Jobs:
    """The runs of one world, each submitted when it is first asked for and shared by all tests of the class."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._runs: dict[str, Run] = {}
        self._seen: dict[str, Seen] = {}
        self.states: dict[str, list[str]] = {}

    def run(self, name: str, *parts: Fields) -> Run:
        if name not in self._runs:
            self._runs[name] = self.world.send(self.world.plan(*parts, run_id=name))
        return self._runs[name]

    def script(self, name: str) -> Seen:
        """What the job of `JOBS` with every change of `SCRIPT` that names it has shown."""
        if name not in self._seen:
            place = self.world.place
            rows = [row for row in SCRIPT.values() if row.run == name]
            parts = [part(place) for row in rows for part in (row.base, row.change)]
            if name == "python":
                self.script("torchrun")  # the earlier run that this one resumes from
            run = self.run("earlier" if name == "torchrun" else name, JOBS[name], *parts)
            self._seen[name] = self.world.seen(run)
        return self._seen[name]

    def case(self, name: str) -> Seen:
        """What the run of one of `CASES` has shown, after what is done to it was done."""
        if name not in self._seen:
            case, world = CASES[name], self.world
            run = self.run(name.replace("_", "-"), {"env": {"PROBE": case.probe}}, case.job)
            if case.act:
                world.await_line(run, "holding")
                self.states[name] = [run.status().state]
                last = run.job.resources.instance_count - 1
                {"cancel": lambda *_: run.cancel(), "kill": world.kill, "preempt": world.preempt}[case.act](run, last)
            states = self.states.setdefault(name, [])
            run.wait(timeout=120, poll=0.2, on_status=lambda status: states.append(status.state))
            self._seen[name] = world.seen(run)
        return self._seen[name]

    def native(self, run: Run) -> str:
        """The platform's own id of the run's first attempt."""
        submitted = run.store.submitted(run.run_id, 0)
        assert submitted is not None
        return str(submitted["native_id"])


class ProviderContract:
    """One provider's contract. A subclass gives the fixture ``world`` (scope class), and nothing else but ``xfails``.

    ``xfails`` maps a test's name (with its ``[parameter]``, or without for all) to the reason why this platform cannot
    pass it. Such a test must fail: once it passes, the suite fails until the entry is gone.
    """

    xfails: ClassVar[Mapping[str, str]] = {}
    _given: ClassVar[frozenset[str]] = frozenset({"world", "xfails"})

    def __init_subclass__(cls, **more: Any) -> None:
        """Refuse, when it is made, a class that drops or replaces any part of the suite."""
        super().__init_subclass__(**more)
        suite = {name for name in vars(ProviderContract) if not name.startswith("__")} - cls._given
        replaced = sorted(n for n in suite if inspect.getattr_static(cls, n) is not vars(ProviderContract)[n])
        if replaced:
            raise TypeError(f"{cls.__name__} replaces {', '.join(replaced)}; use xfails, with the reason")
        for name, reason in cls.xfails.items():
            if name.partition("[")[0] not in suite or not reason.strip():
                raise TypeError(f"{cls.__name__}.xfails[{name!r}] names no test of the suite, or gives no reason")

    @pytest.fixture(scope="class")
    @classmethod
    def world(cls) -> World:
        raise NotImplementedError(f"{cls.__name__} gives no world")

    @pytest.fixture(scope="class")
    @classmethod
    def jobs(cls, world: World) -> Jobs:
        return Jobs(world)

    @pytest.fixture(autouse=True)
    def _expect_failures(self, request: pytest.FixtureRequest) -> None:
        name = str(request.node.name)
        reason = self.xfails.get(name) or self.xfails.get(name.partition("[")[0])
        if reason:
            request.applymarker(pytest.mark.xfail(reason=reason, strict=True))

    # ------------------------------------------------------------------------------------------------------- the border

    def test_has_the_whole_border(self, world: World) -> None:
        provider = world.provider
        assert isinstance(provider, Provider)
        for name, wanted in inspect.getmembers(Provider, inspect.isfunction):
            if not name.startswith("_"):
                assert _parameters(getattr(provider, name)) == _parameters(wanted, drop_self=name != "site"), name
        assert isinstance(inspect.getattr_static(type(provider), "site"), staticmethod)
        assert provider.schemes
        assert all(scheme == scheme.lower().strip(":/") for scheme in provider.schemes)
        assert provider.retried_by in RETRIED_BY

    def test_is_registered_by_its_name(self, world: World) -> None:
        provider = type(world.provider)
        assert find_provider(provider.name) is provider
        if provider.__module__.startswith("cloudtrain."):
            assert provider.__module__.rpartition(".")[2] == provider.name

    def test_settings_are_a_frozen_dataclass(self, world: World) -> None:
        settings = world.provider.settings  # type: ignore[attr-defined]
        assert isinstance(settings, world.provider.Settings)
        assert dataclasses.is_dataclass(settings)
        assert settings.__dataclass_params__.frozen
        plain = json.loads(json.dumps(dataclasses.asdict(settings)))
        assert type(world.provider)(**plain).settings == settings  # type: ignore[attr-defined]

    def test_plans_with_no_network_account_or_sdk(self, world: World, tmp_path: Path) -> None:
        plan = world.plan({"args": ("ü", "{x}"), "inputs": {"data": str(world.place.data)}})
        given = {
            "path": [p for p in sys.path if p],
            "provider": world.provider.name,
            "settings": dataclasses.asdict(world.provider.settings),  # type: ignore[attr-defined]
            "job": plan.job.to_dict(),
            "layout": dataclasses.asdict(plan.layout),
        }
        answer = json.loads(_python(["-c", PLAN_ALONE], cwd=tmp_path, env={"HOME": str(tmp_path)}, text=json.dumps(given)))
        assert answer["foreign"] == []
        assert answer["request"] == plan.request.to_dict()
        assert list(tmp_path.iterdir()) == []

    # ---------------------------------------------------------------------------------------------------- planning: pure

    def test_plan_is_pure(self, world: World) -> None:
        plan = world.plan({"inputs": {"data": str(world.place.data)}, "tags": {"a": "b"}, "env": {"A": "1"}})
        job, layout = copy.deepcopy((plan.job, plan.layout))
        first, second = (world.provider.plan(plan.job, plan.layout) for _ in range(2))
        assert first == second
        assert first is not second
        assert plan.job.to_json() == job.to_json()
        assert plan.layout == layout
        assert first.body is not second.body

    def test_request_is_json_and_round_trips(self, world: World) -> None:
        request = world.plan({"args": ("ü", "\n")}).request
        assert json.loads(json.dumps(request.body, allow_nan=False)) == request.body
        assert Request.from_dict(json.loads(json.dumps(request.to_dict()))).to_dict() == request.to_dict()
        assert request.provider == world.provider.name
        assert request.run == f"{world.store}/runs/{RUN_ID}"

    def test_context_is_the_same_as_everywhere(self, world: World) -> None:
        plan = world.plan({"nproc_per_node": 3, "args": ("x",), "inputs": {"data": str(world.place.data)}})
        assert plan.request.context == context_of(world.provider.name, plan.job, plan.layout, processes=3)

    def test_the_platform_accepts_the_longest_names(self, world: World) -> None:
        longest = "a-" + "b" * 38
        world.check(world.plan({"name": longest}, run_id=check_run_id(longest)).request)
        world.check(world.plan({"name": "0", "tags": {"k": "", "ключ": "with space"}}, run_id="0").request)

    def test_attempts_are_told_apart(self, world: World) -> None:
        plan = world.plan()
        first, second = (world.provider.plan(plan.job, plan.layout, attempt=k) for k in (0, 1))
        assert (first.attempt, second.attempt) == (0, 1)
        assert first.body != second.body
        assert first.context == second.context

    def test_choice_takes_the_gpu_of_the_list(self, world: World) -> None:
        row = platform_rows(type(world.provider))["resources.gpu"]
        gpu = row.change(world.place)["gpu"][0]
        try:
            plan = world.plan({"gpu": [gpu, gpu.rpartition(":")[0] + ":1"]})
        except UnsupportedError:
            pytest.skip("it has no GPUs")
        first, second = (world.provider.plan(plan.job, plan.layout, choice=i) for i in (0, 1))
        assert (first.choice, second.choice) == (0, 1)
        assert first.body != second.body
        count = int(gpu.rpartition(":")[2])
        assert [world.provider.nodes(request).nodes[0].gpus for request in (first, second)] == [count, 1]

    @pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(Layout)])
    def test_every_url_reaches_the_request(self, world: World, name: str) -> None:
        plan = world.plan({"inputs": {"data": str(world.place.data)}})
        change = {
            "store": world.store + "-2",
            "run_id": "another",
            "code_digest": "0" * 64,
            "runtime_digest": "1" * 64,
            "inputs": {"data": LayoutInput(url=f"{world.store}/elsewhere")},
            "resume": world.place.earlier,
        }[name]
        layout = dataclasses.replace(plan.layout, **{name: change})  # type: ignore[arg-type]
        assert world.provider.plan(plan.job, layout).body != plan.request.body

    # ------------------------------------------------------------------------------------------------------ the two tables

    def test_every_field_has_a_row(self) -> None:
        assert field_names() - {*PLATFORM, *SCRIPT, *ELSEWHERE} == set()
        assert {*PLATFORM, *SCRIPT, *ELSEWHERE} - field_names() == set()

    @pytest.mark.parametrize("field", PLATFORM)
    def test_platform_field_is_honoured_or_refused(self, world: World, field: str) -> None:
        row = platform_rows(type(world.provider))[field]
        reached, refused = verdict(world.provider, world.place, row, world.sample.job)
        if refused is not None:
            assert refused.field == (field.replace("inputs", "inputs.data") if field.startswith("inputs.") else field)
            assert refused.provider == world.provider.name
            assert refused.why.strip()
        elif "body" in reached:
            world.check(world.plan(row.base(world.place), row.change(world.place)).request)
        else:
            assert (field, world.provider.retried_by) == ("retries", "client"), "neither in the request nor refused"

    @pytest.mark.parametrize("field", SCRIPT)
    def test_script_field_reaches_the_context(self, world: World, field: str) -> None:
        reached, refused = verdict(world.provider, world.place, SCRIPT[field], world.sample.job)
        assert refused is None
        assert "context" in reached

    @pytest.mark.slow
    @pytest.mark.parametrize("field", SCRIPT)
    def test_script_field_is_seen_by_the_script(self, jobs: Jobs, field: str) -> None:
        row = SCRIPT[field]
        seen = jobs.script(row.run)
        assert row.seen(seen, jobs.world.place), (seen.result["reason"], seen.ranks[:1])

    def test_request_holds_no_digest_of_the_job(self, world: World) -> None:
        """One would change with every field, and so hide in the tables those that are ignored."""
        plain, other = world.plan().request, world.plan({"args": ("x",), "env": {"A": "1"}}).request
        assert plain.body == other.body

    # ---------------------------------------------------------------------------------------------- options, on, inputs

    def test_options_arrive_verbatim(self, world: World) -> None:
        name = world.provider.name
        options = platform_rows(type(world.provider))["options"].change(world.place)["options"][name]
        body = world.plan({"options": {name: options, "elsewhere": {"contract": "not for us"}}}).request.body
        for path, value in _leaves(options):
            assert _at(body, path) == value
        assert "not for us" not in json.dumps(body)

    def test_options_cannot_change_what_cloudtrain_sets(self, world: World) -> None:
        """Tried at every place of the request: the nodes still start our command, with our mounts and time limit."""
        name, provider = world.provider.name, world.provider
        request = world.plan().request
        before = provider.nodes(request)
        refused = 0
        for path in _places(request.body):
            try:
                after = provider.nodes(world.plan({"options": {name: _nested(path, "contract")}}).request)
            except SpecError as exc:
                refused += 1
                assert exc.field.startswith(f"options.{name}.{path[0]}"), exc
                continue
            for old, new in zip(before.nodes, after.nodes, strict=True):
                assert (old.command, old.mounts) == (new.command, new.mounts), path
            assert before.rules.time_limit == after.rules.time_limit, path
        assert refused

    def test_options_know_only_the_indices_there_are(self, world: World) -> None:
        name = world.provider.name
        lists = [path for path in _places(world.plan().request.body, lists=True)]
        for path in lists:
            for index in ("999", "-1", "x"):
                with pytest.raises(SpecError) as caught:
                    world.plan({"options": {name: _nested((*path, index), {})}})
                assert caught.value.field.startswith(f"options.{name}.{path[0]}")

    def test_on_applies(self, world: World) -> None:
        change = {"max_runtime": 7200, "args": ["x"]}
        here = world.plan({"on": {world.provider.name: change}}).request
        assert here == world.plan(change).request
        assert world.plan({"on": {"elsewhere": change}}).request == world.plan().request

    def test_inputs_it_cannot_read_are_refused(self, world: World) -> None:
        with pytest.raises(UnsupportedError) as caught:
            world.plan({"inputs": {"data": "nosuch://x/y"}})
        assert caught.value.field == "inputs.data"

    # ------------------------------------------------------------------------------------------- what a node is started as

    @pytest.mark.parametrize("nodes", [1, 2, 4])
    def test_nodes_are_what_the_request_says(self, world: World, nodes: int) -> None:
        plan = world.plan({"instance_count": nodes, "max_runtime": 1234, "inputs": {"data": str(world.place.data)}})
        simulation = world.provider.nodes(plan.request)
        assert Simulation.from_dict(json.loads(json.dumps(simulation.to_dict()))).to_dict() == simulation.to_dict()
        assert simulation == world.provider.nodes(Request.from_dict(plan.request.to_dict()))
        assert len(simulation.nodes) == nodes
        assert simulation.rules.time_limit == 1234
        for node in simulation.nodes:
            words = " ".join([*(node.entrypoint or ()), *node.command])
            assert "cloudtrain.pyz" in words
            assert f"--attempt {plan.request.attempt}" in words
            kinds = {mount.url: mount.kind for mount in node.mounts}
            assert kinds[plan.layout.live] == "sync"
            assert {"copy", "sync", "mount"} >= set(kinds.values())
            assert {f"{ENGINE_PREFIX}NODE", "RANK"}.isdisjoint(node.env)

    @pytest.mark.parametrize("nodes", [1, 2, 4])
    def test_nodes_agree_on_the_topology(self, world: World, nodes: int) -> None:
        plan = world.plan({"instance_count": nodes, "inputs": {"data": str(world.place.data)}})
        with _sites(world, plan.request) as sites:
            found = [site.topology for site in sites]
            assert [t.node_rank for t in found] == list(range(nodes))
            assert {(t.nodes, t.master_addr, t.master_port) for t in found} == {
                (nodes, found[0].master_addr, found[0].master_port)
            }
            assert 0 < found[0].master_port < 65535  # the node link has the next one

    def test_a_node_knows_its_folders_and_exit_codes(self, world: World) -> None:
        plan = world.plan({"inputs": {"data": str(world.place.data)}})
        with _sites(world, plan.request) as (site,):
            assert {"live", "code", "input.data"} <= set(site.paths)
            assert set(site.exit_code) == {"succeeded", "failed", "preempted"}
            assert site.exit_code["succeeded"] == 0
            assert 0 < site.exit_code["failed"] < 256
            assert 0 <= site.exit_code["preempted"] < 256
            assert site.stop_grace > 0

    def test_a_node_needs_the_standard_library_alone(self, world: World, tmp_path: Path) -> None:
        archive = tmp_path / "cloudtrain.pyz"
        archive.write_bytes(pyz.build())
        found = _python(["-I", "-S", "-c", NODE_ALONE, str(archive), world.provider.name], cwd=tmp_path, env={})
        assert found.strip() == "[]"

    # --------------------------------------------------------------------------------------------- submitting and finding

    @pytest.mark.parametrize("verb", ["status", "logs", "cancel"])
    def test_an_unknown_id_is_not_found(self, world: World, verb: str) -> None:
        with pytest.raises(NotFoundError):
            getattr(world.provider, verb)(world.nowhere)

    def test_find_creates_nothing(self, world: World) -> None:
        before = files(world.store).list()
        request = world.plan(run_id="never").request
        assert world.provider.find(request) is None
        assert world.provider.find(request) is None
        assert files(world.store).list() == before

    @pytest.mark.slow
    def test_submitted_twice_is_one_job(self, jobs: Jobs) -> None:
        world = jobs.world
        run = jobs.run("twice")
        request = run.store.attempt_request("twice", 0)
        assert request is not None
        native = jobs.native(run)
        assert world.provider.find(request) == native
        assert [world.provider.submit(request) for _ in range(2)] == [native, native]
        assert jobs.native(world.send(world.plan(run_id="twice"))) == native
        _check_ran_once(world, run, native)
        assert world.provider.submit(request) == native, "not after the end either"
        _check_ran_once(world, run, native)

    @pytest.mark.slow
    def test_submitted_by_two_processes_is_one_job(self, world: World, tmp_path: Path) -> None:
        plan = world.plan(run_id="at-once")
        saved = tmp_path / "plan.json"
        saved.write_text(json.dumps(plan.document()))
        both = [
            subprocess.Popen([sys.executable, "-c", SUBMIT_PLAN, str(saved)], stdout=subprocess.PIPE, text=True)
            for _ in range(2)
        ]
        natives = {process.communicate(timeout=120)[0].strip() for process in both}
        assert [process.returncode for process in both] == [0, 0]
        assert len(natives) == 1
        _check_ran_once(world, Run(store=plan.store, run_id="at-once", provider=world.provider), natives.pop())

    # ------------------------------------------------------------------------------------------------------ how runs go

    @pytest.mark.slow
    @pytest.mark.parametrize("name", CASES)
    def test_outcome(self, jobs: Jobs, name: str) -> None:
        case = CASES[name]
        if name == "retried" and jobs.world.provider.retried_by == "client":
            pytest.skip("only a waiting client starts further attempts")
        result = jobs.case(name).result
        assert (result["state"], result["category"], result["exit_code"]) == (case.state, case.category, case.exit_code)
        assert tuple(attempt["number"] for attempt in result["attempts"]) == case.attempts
        assert result["reason"] or result["state"] == "succeeded"
        assert "\n" not in result["reason"]
        seen = [STATES.index(state) for state in jobs.states[name]]
        assert seen[-1] == STATES.index(case.state)
        if len(case.attempts) == 1:
            assert seen == sorted(seen)
        if case.act:
            assert jobs.states[name][0] == "running"

    @pytest.mark.slow
    def test_status_says_what_the_platform_says(self, jobs: Jobs) -> None:
        jobs.case("succeeded")
        status = jobs.world.provider.status(jobs.native(jobs.run("succeeded")))
        assert (status.state, status.category, status.reason) == ("succeeded", "", "")
        assert status.native
        assert status.started is not None
        assert status.finished is not None
        assert status.started < status.finished < time.time() + 1
        assert [attempt.number for attempt in status.attempts] in (["0.0"], [])

    @pytest.mark.slow
    def test_the_rank_that_failed_is_named(self, jobs: Jobs) -> None:
        failure = jobs.case("user_error").result["failure"]
        assert (failure["node"], failure["rank"], failure["process_exit_code"]) == (1, 3, 1)
        assert failure["exception"] == "ValueError: the last rank fails"
        assert failure["file"] == "train.py"
        lines = (jobs.world.place.code / "train.py").read_text().splitlines()
        assert "the last rank fails" in lines[failure["line"] - 1]
        assert "ValueError: the last rank fails" in failure["traceback"]

    @pytest.mark.slow
    def test_a_preempted_run_goes_on_where_it_was(self, jobs: Jobs) -> None:
        seen = jobs.case("preempted")
        assert [attempt["resumed_from"] for attempt in seen.result["attempts"]] == ["", "step-3"]
        rows = [json.loads(line) for line in (seen.folder / "metrics.jsonl").read_text().splitlines()]
        assert [(row["step"], row["attempt"]) for row in rows] == [
            (0, "0.0"), (1, "0.0"), (2, "0.1"), (3, "0.1"), (4, "0.1"),
        ]  # fmt: skip

    @pytest.mark.slow
    @pytest.mark.parametrize("name", ["cancelled", "succeeded", "user_error"])
    def test_cancel_after_the_end_changes_nothing(self, jobs: Jobs, name: str) -> None:
        jobs.case(name)
        provider, run = jobs.world.provider, jobs.run(name.replace("_", "-"))
        native = jobs.native(run)
        before = provider.status(native)
        for _ in range(2):
            provider.cancel(native)
            run.cancel()
        assert provider.status(native) == before
        assert (before.state, before.category or None) == (CASES[name].state, CASES[name].category)

    @pytest.mark.parametrize("category", FAULTS)
    def test_fault(self, world: World, category: str) -> None:
        try:
            fault = world.fault(category)
        except Impossible as exc:
            pytest.skip(str(exc))
        with fault as fields:
            try:
                result = world.send(world.plan(fields, run_id=f"fault-{category}")).wait(timeout=120, poll=0.2)
            except CloudtrainError as exc:
                assert exc.exit_code == EXIT_CODES[category]
                assert "\n" not in str(exc)
            else:
                assert (result["state"], result["category"]) == ("failed", category)
                assert result["reason"]

    # --------------------------------------------------------------------------------------------------------------- logs

    @pytest.mark.slow
    def test_every_line_comes_once(self, jobs: Jobs) -> None:
        for name in ("torchrun", "python"):
            jobs.script(name)
            run = jobs.run("earlier" if name == "torchrun" else name)
            exits = run.store.exits(run.run_id)
            wanted = [(r["attempt"], r["node"], n + 1) for r in exits for n in range(r["lines"])]
            assert sorted(numbered(jobs.world.provider, jobs.native(run))) == sorted(wanted)
            lines = list(run.logs())
            assert sorted((*line.stream, line.seq) for line in lines if line.stream) == sorted(wanted)
            for rank in range(run.job.resources.instance_count * run.job.resources.processes()):
                said = [line.text for line in lines if line.rank == rank and line.text.startswith("probe ")]
                assert said == [f"probe {rank} line {i}" for i in range(LINES)]

    @pytest.mark.slow
    def test_a_cursor_goes_on_where_it_was(self, jobs: Jobs) -> None:
        """Also one that was made while the run went on, kept as JSON, and used by another handle."""
        jobs.case("cancelled")
        provider, native = jobs.world.provider, jobs.native(jobs.run("cancelled"))
        page = provider.logs(native)
        cursor = json.loads(json.dumps(page.cursor))
        assert provider.logs(native).lines == page.lines
        other = type(provider)(**dataclasses.asdict(provider.settings))  # type: ignore[attr-defined]
        rest = other.logs(native, cursor)
        ids = [(line.node, line.text) for line in page.lines]
        assert not set(ids) & {(line.node, line.text) for line in rest.lines}
        if not page.more:
            assert rest.lines == ()
            assert json.loads(json.dumps(rest.cursor)) == cursor

    # ----------------------------------------------------------------------------------------------------------- end to end

    @pytest.mark.slow
    def test_ranks_train_together(self, jobs: Jobs) -> None:
        seen = jobs.script("torchrun")
        assert seen.result["state"] == "succeeded", seen.result["reason"]
        assert [rank["sum"] for rank in seen.ranks] == [1.0 + 2 + 3 + 4] * 4
        words = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
        assert [tuple(int(rank["env"][word]) for word in words) for rank in seen.ranks] == [
            (rank, rank % 2, 4, 2) for rank in range(4)
        ]
        assert len({(rank["env"]["MASTER_ADDR"], rank["env"]["MASTER_PORT"]) for rank in seen.ranks}) == 1

    @pytest.mark.slow
    @pytest.mark.parametrize("name", ["torchrun", "python", "command"])
    def test_script_sees_the_words_of_the_contract(self, jobs: Jobs, name: str) -> None:
        """DESIGN §4; and neither the engine's own words nor what another launcher left."""
        for rank in jobs.script(name).ranks:
            env = rank["env"]
            ours = {key for key in env if key.startswith("CLOUDTRAIN_")}
            always = {"RUN_ID", "ATTEMPT", "PROVIDER", "CHECKPOINT_DIR", "RESUME_FROM", "ARTIFACT_DIR"}
            always |= {"METRICS_FILE", "PREEMPT_FILE", "HYPERPARAMETERS"}
            optional = {"CHECKPOINT_URL", *(f"INPUT_{channel}" for channel in rank["inputs"])}
            assert {f"CLOUDTRAIN_{word}" for word in always} <= ours
            assert ours <= {f"CLOUDTRAIN_{word}" for word in always | optional}
            assert env["CLOUDTRAIN_PROVIDER"] == jobs.world.provider.name
            assert env["CLOUDTRAIN_ATTEMPT"] == "0.0"
            assert "cloudtrain" not in rank["path"][0].rpartition("/")[2]
            if name != "command":
                assert rank["path"][0] == rank["cwd"], "as plain torchrun has it"
                assert rank["path"][-1].endswith(".pyz"), "a user's own package of any name wins"
            assert not rank["has_torch"], "the script decides what is imported, and when"

    @pytest.mark.slow
    def test_checkpoint_is_pulled_whole(self, jobs: Jobs) -> None:
        seen = jobs.script("torchrun")
        step = seen.folder / "checkpoints" / "step-3"
        assert {p.name: p.read_text() for p in step.iterdir()} == {"shard-0.txt": "shard 0", "shard-1.txt": "shard 1"}
        commit = jobs.run("earlier").store.newest_checkpoint("earlier")
        assert commit is not None
        assert seen.result["checkpoint"]["name"] == commit.name

    @pytest.mark.slow
    def test_metrics_are_merged(self, jobs: Jobs) -> None:
        rows = (jobs.script("torchrun").folder / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(row)["step"] for row in rows] == [0, 1, 2]

    @pytest.mark.slow
    @pytest.mark.parametrize("name", ["torchrun", "python"])
    def test_all_nodes_leave_together(self, jobs: Jobs, name: str) -> None:
        """The end barrier: a record of each node, one of them the decided one, all after the last rank's end."""
        jobs.script(name)
        run = jobs.run("earlier" if name == "torchrun" else name)
        exits = run.store.exits(run.run_id)
        assert [(r["node"], r["outcome"]) for r in exits] == [(0, "succeeded"), (1, "succeeded")]
        assert [r["decided"] for r in exits] == [True, False]
        assert [r["failure"] for r in exits] == [None, None]
        assert run.store.result(run.run_id) is not None

    @pytest.mark.slow
    def test_no_secret_is_left_anywhere(self, jobs: Jobs) -> None:
        jobs.script("torchrun")
        run = jobs.run("earlier")
        store = files(run.url)
        holding = [key for key in store.list() if SECRET.encode() in store.read(key)]
        assert holding == []
        assert not any(SECRET in line.text for line in run.logs())

    # ------------------------------------------------------------------------------------------------------ the suite itself

    def test_no_test_is_replaced(self) -> None:
        with pytest.raises(TypeError, match="replaces test_plan_is_pure"):
            type("TestLax", (ProviderContract,), {"test_plan_is_pure": None})
        with pytest.raises(TypeError, match="no reason"):
            type("TestLax", (ProviderContract,), {"xfails": {"test_plan_is_pure": " "}})

    def test_categories_have_a_way_to_be_reached(self) -> None:
        reached = {case.category for case in CASES.values() if case.category} | {"stalled", *CASES} | set(FAULTS)
        assert set(CATEGORIES) <= reached


# ------------------------------------------------------------------------------------------------------------- pieces


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
def _sites(world: World, request: Request) -> Iterator[list[Site]]:
    """What every node of the request is given."""
    specs = world.provider.nodes(request).nodes
    with contextlib.ExitStack() as stack:
        sites = []
        for number, spec in enumerate(specs):
            words = list(spec.command)
            pairs = [words[i + 1] for i, word in enumerate(words) if word == "--path"]
            environ = stack.enter_context(world.node(request, number))
            sites.append(world.provider.site(environ, dict(pair.split("=", 1) for pair in pairs)))
        yield sites


def _check_ran_once(world: World, run: Run, native: str) -> None:
    """One job ran, one time: one attempt, one exit record, and each line once in the platform's own log."""
    result = run.wait(timeout=120, poll=0.2)
    assert (result["state"], result["native_id"]) == ("succeeded", native)
    assert [attempt["number"] for attempt in result["attempts"]] == ["0.0"]
    assert run.store.attempts(run.run_id) == [0]
    lines = numbered(world.provider, native)
    assert len(lines) == len(set(lines)) == run.store.exits(run.run_id)[0]["lines"]


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
    """Every place in ``value`` that an option could name; ``lists``: only those that hold a list."""
    inner = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    if path and (isinstance(value, list) or not lists):
        yield path
    for key, item in inner:
        yield from _places(item, (*path, str(key)), lists=lists)


def _nested(path: Sequence[str], value: Any) -> dict[str, Any]:
    for key in reversed(path):
        value = {key: value}
    return dict(value)
