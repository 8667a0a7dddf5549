"""Test a provider with jobs that run on its `FakePlatform`, as a part of `cloudtrain.testing.contract`.

Each job runs once, for all tests that look at it.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from ..errors import CATEGORIES, EXIT_CODES, CloudtrainError, ConflictError, NotFoundError
from ..provider_api.protocol import STATES, LogPage
from ..runs.outcome import unix_time
from ..runs.run import Run
from ..runs.submit import Plan
from ..storage.files import files
from . import probe
from .platform import PATIENCE, POLL, FakePlatform, Impossible, numbered, to_end
from .tables import CASES, JOBS, SCRIPT, SECRET, Fields, Seen

__all__ = ["Jobs", "RunContract"]

FAULTS = ("capacity", "quota", "auth", "image")
PLAIN: Fields = {"launcher": "python"}
"""A job that needs no torchrun, whose start imports torch on every node."""
BY_RUNTIME = ("together", "python", "command", "stalled", "oom", "retried")
"""Jobs of which cloudtrain's own runtime decides on the nodes what happens, alike on every platform."""
SUBMIT_PLAN = """
import os, pathlib, sys
from cloudtrain.settings.settings import Settings
from cloudtrain.runs.submit import load_plan, send_plan
run = send_plan(load_plan(pathlib.Path(sys.argv[1]), settings=Settings(), cwd=pathlib.Path.cwd()), environ=os.environ)
print(run.provider.find(run.store.attempt_request(run.run_id, 0)))
"""


class Jobs:
    """Runs of one platform, each submitted when it is first needed and shared by all tests of the class.

    A run that did not end as it must fails each of these tests at once: none waits for it again.
    """

    def __init__(self, world: FakePlatform) -> None:
        self.world = world
        self._runs: dict[str, Run] = {}
        self._seen: dict[str, Seen] = {}
        self._failed: dict[str, Exception] = {}
        self.states: dict[str, list[str]] = {}
        self.early: dict[str, LogPage] = {}

    def run(self, name: str, *parts: Fields) -> Run:
        if name not in self._runs:
            self._runs[name] = self.world.send(self.world.plan(*parts, run_id=name))
        return self._runs[name]

    def seen(self, name: str) -> Seen:
        """Return the result of the job of `JOBS` or `CASES`, after its action, with every change of `SCRIPT` for it."""
        if name in self._failed:
            raise self._failed[name]
        if name not in self._seen:
            try:
                self._seen[name] = self._case(name) if name in CASES else self._script(name)
            except Exception as exc:
                self._failed[name] = exc
                raise
        return self._seen[name]

    def _script(self, name: str) -> Seen:
        if name == "torchrun" and "earlier" not in self._runs:
            self.world.place.clear_earlier()
        return self.world.seen(self.run("earlier" if name == "torchrun" else name, JOBS[name], *self._changes(name)))

    def _case(self, name: str) -> Seen:
        case, world = CASES[name], self.world
        if name == "user_error":
            self.seen("torchrun")  # the earlier run that this one resumes from
        secrets = {"secrets": {probe.SECRET: world.place.secret}} if name == "user_error" else {}
        parts = (PLAIN, {"env": {"PROBE": case.probe}}, case.job, secrets, *self._changes(name))
        run = self.run(name.replace("_", "-"), *parts)
        if case.act:
            world.await_line(run, "holding")
            self.states[name] = [run.status().state]
            self.early[name] = world.provider.logs(self.native(run))
            last = run.job.resources.instance_count - 1
            {"cancel": lambda *_: run.cancel(), "kill": world.kill, "preempt": world.preempt}[case.act](run, last)
        states = self.states.setdefault(name, [])
        run.wait(timeout=PATIENCE, poll=POLL, on_status=lambda status: states.append(status.state))
        return world.seen(run)

    def _changes(self, name: str) -> list[Fields]:
        place = self.world.place
        rows = [row for row in SCRIPT.values() if row.run == name]
        return [part(place) for row in rows for part in (row.base, row.change)]

    def native(self, run: Run) -> str:
        """Return the platform's own id of the run's first attempt."""
        submitted = run.store.submitted(run.run_id, 0)
        assert submitted is not None
        return str(submitted["native_id"])


def _marked(names: Iterable[str]) -> list[Any]:
    """Return names of jobs, or of fields of `SCRIPT`, as parameters. Those of `BY_RUNTIME` are marked so."""

    def job(name: str) -> str:
        return SCRIPT[name].run if name in SCRIPT else name

    mark = pytest.mark.by_runtime
    return [pytest.param(name, marks=mark) if job(name) in BY_RUNTIME else name for name in names]


class RunContract:
    """The half of the suite that runs jobs, nearly all of it slow.

    Tests marked ``by_runtime`` check what cloudtrain's own runtime decides on the nodes, alike on every platform.
    """

    @pytest.fixture(scope="class")
    @classmethod
    def jobs(cls, world: FakePlatform) -> Jobs:
        """Return the runs of this class's platform."""
        return Jobs(world)

    # ------------------------------------------------------------------------------------------- submitting and finding

    @pytest.mark.parametrize("verb", ["status", "logs", "cancel"])
    def test_an_unknown_id_is_not_found(self, world: FakePlatform, verb: str) -> None:
        with pytest.raises(NotFoundError):
            getattr(world.provider, verb)(world.nowhere)

    def test_find_creates_nothing(self, world: FakePlatform) -> None:
        before = files(world.store).list()
        request = world.plan(run_id="never").request
        assert world.provider.find(request) is None
        assert world.provider.find(request) is None
        assert files(world.store).list() == before

    @pytest.mark.slow
    def test_submitted_twice_is_one_job(self, jobs: Jobs) -> None:
        world, plain = jobs.world, (PLAIN, {"env": {"PROBE": ""}})
        run = jobs.run("succeeded", *plain)
        request = run.store.attempt_request("succeeded", 0)
        assert request is not None
        native = jobs.native(run)
        assert world.provider.find(request) == native
        assert [world.provider.submit(request) for _ in range(2)] == [native, native]
        assert jobs.native(world.send(world.plan(*plain, run_id="succeeded"))) == native
        _check_ran_once(world, run, native)
        assert world.provider.submit(request) == native, "not after the end either"
        _check_ran_once(world, run, native)

    @pytest.mark.slow
    def test_submitted_by_two_processes_is_one_job(self, world: FakePlatform, tmp_path: Path) -> None:
        plan = world.plan(PLAIN, run_id="at-once")
        saved = tmp_path / "plan.json"
        saved.write_text(json.dumps(plan.document()))
        both = [
            subprocess.Popen([sys.executable, "-c", SUBMIT_PLAN, str(saved)], stdout=subprocess.PIPE, text=True)
            for _ in range(2)
        ]
        natives = {process.communicate(timeout=PATIENCE)[0].strip() for process in both}
        assert [process.returncode for process in both] == [0, 0]
        assert len(natives) == 1
        _check_ran_once(world, Run(store=plan.store, run_id="at-once", provider=world.provider), natives.pop())

    @pytest.mark.slow
    def test_a_taken_run_id_is_a_conflict(self, jobs: Jobs) -> None:
        """Check that a taken id is never adopted, and that its run stays as it is."""
        jobs.seen("succeeded")
        run = jobs.run("succeeded")
        with pytest.raises(ConflictError) as caught:
            jobs.world.send(jobs.world.plan({"args": ("another",)}, run_id="succeeded"))
        assert caught.value.field == "run_id"
        _check_ran_once(jobs.world, run, jobs.native(run))

    # --------------------------------------------------------------------------------------------------------- outcomes

    @pytest.mark.slow
    @pytest.mark.parametrize("name", _marked(CASES))
    def test_outcome(self, jobs: Jobs, name: str) -> None:
        case = CASES[name]
        if name == "retried" and jobs.world.provider.retried_by == "client":
            return  # only a waiting client starts further attempts
        result = jobs.seen(name).result
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
        jobs.seen("succeeded")
        status = jobs.world.provider.status(jobs.native(jobs.run("succeeded")))
        assert (status.state, status.category, status.reason) == ("succeeded", "", "")
        assert status.native
        assert status.finished is not None
        # A platform that leaves the start to the nodes' records names its time limit instead.
        began = (
            status.started
            if status.limit_s is None
            else unix_time(jobs.run("succeeded").result()["attempts"][0]["started"])
        )
        assert began is not None
        assert began <= status.finished < time.time() + 1  # Slurm and Kubernetes report whole seconds
        assert [attempt.number for attempt in status.attempts] in (["0.0"], [])

    @pytest.mark.slow
    def test_the_rank_that_failed_is_named(self, jobs: Jobs) -> None:
        failure = jobs.seen("user_error").result["failure"]
        assert (failure["node"], failure["rank"], failure["process_exit_code"]) == (1, 1, 1)
        assert failure["exception"] == f"ValueError: ('the last rank fails', '***{probe.SECRET}***')"
        assert failure["file"] == "train.py"
        lines = (jobs.world.place.code / "train.py").read_text().splitlines()
        assert "the last rank fails" in lines[failure["line"] - 1]
        assert failure["exception"] in failure["traceback"]

    @pytest.mark.slow
    def test_a_preempted_run_goes_on_where_it_was(self, jobs: Jobs) -> None:
        seen = jobs.seen("preempted")
        assert [attempt["resumed_from"] for attempt in seen.result["attempts"]] == ["", "step-3"]
        rows = [json.loads(line) for line in (seen.folder / "metrics.jsonl").read_text().splitlines()]
        assert [(row["step"], row["attempt"]) for row in rows] == [
            (0, "0.0"), (1, "0.0"), (2, "0.1"), (3, "0.1"), (4, "0.1"),
        ]  # fmt: skip

    @pytest.mark.slow
    @pytest.mark.parametrize("name", ["cancelled", "succeeded", "user_error"])
    def test_cancel_after_the_end_changes_nothing(self, jobs: Jobs, name: str) -> None:
        jobs.seen(name)
        provider, run = jobs.world.provider, jobs.run(name.replace("_", "-"))
        native = jobs.native(run)
        before = provider.status(native)
        for _ in range(2):
            provider.cancel(native)
            run.cancel()
        assert provider.status(native) == before
        assert (before.state, before.category or None) == (CASES[name].state, CASES[name].category)

    @pytest.mark.parametrize("category", FAULTS)
    def test_fault(self, world: FakePlatform, category: str, record_property: Callable[[str, object], None]) -> None:
        try:
            fault = world.fault(category)
        except Impossible as exc:
            record_property("impossible", str(exc))
            return
        with fault as fields:
            end = _end(world, world.plan(fields, run_id=f"fault-{category}"))
        if isinstance(end, CloudtrainError):
            assert (end.exit_code, "\n" in str(end)) == (EXIT_CODES[category], False)
        else:
            assert (end["state"], end["category"]) == ("failed", category)
            assert end["reason"]

    # ------------------------------------------------------------------------------------------------------------- logs

    @pytest.mark.slow
    @pytest.mark.parametrize("name", _marked(("torchrun", "python")))
    def test_every_line_comes_once(self, jobs: Jobs, name: str) -> None:
        jobs.seen(name)
        run = jobs.run("earlier" if name == "torchrun" else name)
        exits = run.store.exits(run.run_id)
        wanted = [(r["attempt"], r["node"], n + 1) for r in exits for n in range(r["lines"])]
        assert sorted(numbered(jobs.world.provider, jobs.native(run))) == sorted(wanted)
        lines = list(run.logs())
        assert sorted((*line.stream, line.seq) for line in lines if line.stream) == sorted(wanted)
        for rank in range(run.job.resources.instance_count * run.job.resources.processes()):
            said = [line.text for line in lines if line.rank == rank and line.text.startswith("probe ")]
            assert said == [f"probe {rank} line {i}" for i in range(probe.LINES)]

    @pytest.mark.slow
    def test_a_cursor_goes_on_where_it_was(self, jobs: Jobs) -> None:
        """Use a cursor, made during the run and kept as JSON, after the run's end by another handle."""
        jobs.seen("cancelled")
        provider, native, early = jobs.world.provider, jobs.native(jobs.run("cancelled")), jobs.early["cancelled"]
        again = type(provider)(**dataclasses.asdict(provider.settings))
        whole, cursor = to_end(provider, native)
        rest, _ = to_end(again, native, json.loads(json.dumps(early.cursor)))
        assert early.lines
        assert rest
        assert [*early.lines, *rest] == whole
        assert to_end(again, native, cursor) == ([], cursor)

    # ------------------------------------------------------------------------------------------------------- end to end

    @pytest.mark.slow
    @pytest.mark.parametrize("field", _marked(SCRIPT))
    def test_script_field_is_seen_by_the_script(self, jobs: Jobs, field: str) -> None:
        row = SCRIPT[field]
        seen = jobs.seen(row.run)
        assert row.seen(seen), (seen.result["reason"], seen.ranks[:1])

    @pytest.mark.slow
    @pytest.mark.by_runtime
    def test_ranks_train_together(self, jobs: Jobs) -> None:
        """Check an all_reduce of four ranks. Each imports torch, so most platforms show only that torchrun meets."""
        seen = jobs.seen("together")
        assert seen.result["state"] == "succeeded", seen.result["reason"]
        assert [rank["sum"] for rank in seen.ranks] == [1.0 + 2 + 3 + 4] * 4

    @pytest.mark.slow
    def test_ranks_know_each_other(self, jobs: Jobs) -> None:
        seen = jobs.seen("torchrun")
        assert seen.result["state"] == "succeeded", seen.result["reason"]
        words = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
        assert [tuple(int(rank["env"][word]) for word in words) for rank in seen.ranks] == [
            (rank, rank % 2, 4, 2) for rank in range(4)
        ]
        assert len({(rank["env"]["MASTER_ADDR"], rank["env"]["MASTER_PORT"]) for rank in seen.ranks}) == 1

    @pytest.mark.slow
    @pytest.mark.parametrize("name", _marked(("torchrun", "python", "command")))
    def test_script_sees_the_words_of_the_contract(self, jobs: Jobs, name: str) -> None:
        """Check DESIGN §4, and that neither the engine's own words nor another launcher's are left."""
        for rank in jobs.seen(name).ranks:
            env = rank["env"]
            ours = {key for key in env if key.startswith("CLOUDTRAIN_")}
            always = {"RUN_ID", "ATTEMPT", "PROVIDER", "CHECKPOINT_DIR", "RESUME_FROM", "ARTIFACT_DIR"}
            always |= {"METRICS_FILE", "PREEMPT_FILE", "HYPERPARAMETERS"} | (
                {"PLANNED_WORLD_SIZE"} if name == "torchrun" else set()
            )
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
        seen = jobs.seen("torchrun")
        step = seen.folder / "checkpoints" / "step-3"
        assert {p.name: p.read_text() for p in step.iterdir()} == {"shard-0.txt": "shard 0", "shard-1.txt": "shard 1"}
        commit = jobs.run("earlier").store.newest_checkpoint("earlier")
        assert commit is not None
        assert seen.result["checkpoint"]["name"] == commit.name

    @pytest.mark.slow
    def test_metrics_are_merged(self, jobs: Jobs) -> None:
        rows = (jobs.seen("torchrun").folder / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(row)["step"] for row in rows] == [0, 1, 2]

    @pytest.mark.slow
    @pytest.mark.parametrize("name", _marked(("torchrun", "python")))
    def test_all_nodes_leave_together(self, jobs: Jobs, name: str) -> None:
        """Check the end barrier: a record of each node, one of them the decided one, all after the last rank's end."""
        jobs.seen(name)
        run = jobs.run("earlier" if name == "torchrun" else name)
        exits = run.store.exits(run.run_id)
        assert [(r["node"], r["outcome"]) for r in exits] == [(0, "succeeded"), (1, "succeeded")]
        assert [r["decided"] for r in exits] == [True, False]
        assert [r["failure"] for r in exits] == [None, None]
        assert run.store.result(run.run_id) is not None

    @pytest.mark.slow
    def test_no_secret_is_left_anywhere(self, jobs: Jobs) -> None:
        """Check the masking, though the script prints the secret and another one dies with it in its message."""
        provider, shown = jobs.world.provider, f"***{probe.SECRET}***"
        for seen, name in ((jobs.seen("torchrun"), "earlier"), (jobs.seen("user_error"), "user-error")):
            run = jobs.run(name)
            store, native = files(run.url), jobs.native(run)
            holding = [key for key in store.list() if SECRET.encode() in store.read(key)]
            pulled = [path for path in seen.folder.rglob("*") if path.is_file() and SECRET in path.read_text("latin-1")]
            assert (holding, pulled) == ([], [])
            texts = [line.text for line in run.logs()] + [line.text for line in to_end(provider, native)[0]]
            assert sum(f"secret {shown} '{shown}' https://user:{shown}@" in text for text in texts) >= len(seen.ranks)
            assert not any(SECRET in text for text in (*texts, json.dumps(run.record), str(provider.status(native))))
            assert SECRET not in json.dumps(seen.result)

    def test_categories_have_a_way_to_be_reached(self) -> None:
        reached = {case.category for case in CASES.values() if case.category} | {"stalled", *CASES} | set(FAULTS)
        # A refused request leaves no run, and a full store no record of its end.
        assert set(CATEGORIES) - {"spec", "storage"} <= reached


def _end(world: FakePlatform, plan: Plan) -> Mapping[str, Any] | CloudtrainError:
    """Return the result of the submitted plan, or the error of submit."""
    try:
        return world.send(plan).wait(timeout=PATIENCE, poll=POLL)
    except CloudtrainError as exc:
        return exc


def _check_ran_once(world: FakePlatform, run: Run, native: str) -> None:
    """Check that one job ran, one time: one attempt, one exit record, and each line once in the platform's own log."""
    result = run.wait(timeout=PATIENCE, poll=POLL)
    assert (result["state"], result["native_id"]) == ("succeeded", native)
    assert [attempt["number"] for attempt in result["attempts"]] == ["0.0"]
    assert run.store.attempts(run.run_id) == [0]
    lines = numbered(world.provider, native)
    assert len(lines) == len(set(lines)) == run.store.exits(run.run_id)[0]["lines"]
