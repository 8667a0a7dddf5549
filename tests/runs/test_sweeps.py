"""Sweeps without a platform: the file, the space, samplers, prune rules, and every decision on the log."""

from __future__ import annotations

import functools
import io
import itertools
import json
import math
import os
import random
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import rows
from rich.console import Console
from rows import for_each

from cloudtrain.cli import main
from cloudtrain.cli.sweep import sweep_screen
from cloudtrain.errors import LostContactError, QuotaError, SpecError
from cloudtrain.job.job import Job
from cloudtrain.report.comparison import Compared, comparison_page
from cloudtrain.report.curves import curves
from cloudtrain.report.sweep import sweep_page
from cloudtrain.runs.handover import sending
from cloudtrain.runs.listing import list_page
from cloudtrain.runs.reconcile import reconcile_store
from cloudtrain.runs.submit import plan_record
from cloudtrain.runs.sweeps.decide import next_entry
from cloudtrain.runs.sweeps.drive import Log
from cloudtrain.runs.sweeps.prune import costs_of, is_hopeless, value_of
from cloudtrain.runs.sweeps.samplers import check_sampler, propose, study_of
from cloudtrain.runs.sweeps.space import grid_point, grid_size, parse_space, random_point
from cloudtrain.runs.sweeps.spec import Prune, SweepSpec, check_caps, check_sweep_id
from cloudtrain.runs.sweeps.state import Entry, Outcome, State, Trial, committed, fold, used
from cloudtrain.runs.sweeps.sweep import Sweep, make_sweep, plan_of_sweep
from cloudtrain.runs.sweeps.trials import RunTrials, outcome_of, trial_plan
from cloudtrain.runs.sweeps.view import change_lines, sweep_summary
from cloudtrain.settings.settings import Settings
from cloudtrain.storage.extras import install_command
from cloudtrain.storage.timings import CLIENT_TIMINGS
from cloudtrain.store.gc import collect
from cloudtrain.store.store import Store

SPACE = {
    "lr": {"low": 1e-5, "high": 1e-1, "log": True},
    "dropout": {"low": 0.0, "high": 0.5, "step": 0.1},
    "layers": {"low": 2, "high": 12, "step": 2},
    "width": {"low": 16, "high": 1024, "log": True},
    "optimizer": ["adamw", "lion"],
}
CAP = {"max_cost": 10.0}


def spec_of(**tables: Any) -> SweepSpec:
    given = {"metric": "loss", "space": SPACE, "limits": {"trials": 6, "parallel": 2}}
    return SweepSpec.from_dict({**given, **tables})


# ------------------------------------------------------------------------------------------------------------ the file


def test_a_description_comes_back_from_json() -> None:
    spec = spec_of(
        goal="maximize", value="last", sampler="tpe", seed=3, first=[{"lr": 3e-4}], prune={"rule": "asha", "min": 3},
        limits={"trials": 6, "max_cost": 20, "max_runtime": "2h"},
    )  # fmt: skip
    assert SweepSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec
    assert spec.limits.max_runtime == 7200


@for_each(
    ("tables", "field"),
    [
        ({"space": {}}, "space"),
        ({"space": {"lr": {"low": 1, "high": 1}}}, "space.lr.low"),
        ({"space": {"lr": {"low": 0, "high": 1, "log": True}}}, "space.lr.low"),
        ({"space": {"lr": {"low": 0, "hihg": 1}}}, "space.lr"),
        ({"space": {"lr": {"low": 0, "high": math.inf}}}, "space.lr.high"),
        ({"space": {"lr": {"low": 0, "high": 1, "step": 0}}}, "space.lr.step"),
        ({"space": {"lr": []}}, "space.lr"),
        ({"space": {"a b": [1, 2]}}, "space"),
        ({"space": {"--lr": [1, 2]}}, "space"),
        ({"space": {"lr": [1, 1]}}, "space.lr"),
        ({"space": {"lr": [0.1, math.nan]}}, "space.lr"),
        ({"space": {"lr": {"low": 0, "high": 10**400}}}, "space.lr.high"),
        ({"limits": {"parallel": 2}}, "limits"),
        ({"limits": {"trails": 2}}, "limits.trails"),
        ({"limits": {"trials": 0}}, "limits.trials"),
        ({"limits": {"max_cost": -1}}, "limits.max_cost"),
        ({"goal": "minimise"}, "goal"),
        ({"sampler": "bayes"}, "sampler"),
        ({"space": {"lr": {"low": 0, "high": 1, "step": 1e-300}}}, "space.lr.step"),
        ({"sampler": "grid"}, "space.lr"),
        ({"sampler": "grid", "space": {"lr": {"low": 1, "high": 20_000}}, "limits": {}}, "space"),
        ({"prune": {"min": 2}}, "prune.rule"),
        ({"prune": "hyperband"}, "prune.rule"),
        ({"first": [{"lr": 1.0}]}, "first[0].lr"),
        ({"first": [{"layers": 3}]}, "first[0].layers"),
        ({"first": [{"layers": 4.0}]}, "first[0].layers"),
        ({"first": [{"dropout": 0.25}]}, "first[0].dropout"),
        ({"first": [{"learning_rate": 1e-3}]}, "first[0].learning_rate"),
        ({"metrc": "loss"}, "metrc"),
    ],
)
def test_a_wrong_description_names_its_field(tables: Mapping[str, Any], field: str) -> None:
    with pytest.raises(SpecError) as caught:
        spec_of(**tables)
    assert caught.value.field == field
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ("[job]\nlaunchr = 'python'", "job.launchr"),
        ("[job]\nentry_point = 'train.py'\n[trial]\nmax_cost = -1", "trial.max_cost"),
    ],
)
def test_a_wrong_field_of_the_job_is_named_by_its_path_in_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], wrong: str, field: str
) -> None:
    (tmp_path / "tune.toml").write_text(f"metric = 'loss'\n{wrong}\n")
    assert main(["sweep", str(tmp_path / "tune.toml"), "--store", str(tmp_path / "store")]) == 2
    assert capsys.readouterr().err.startswith(f"error: {field}: ")
    assert not (tmp_path / "store").exists()


def test_a_new_sweep_begins_with_the_warnings_of_its_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    job = "[job]\nentry_point = 'train.py'\nargs = ['{artefact_dir}']\n[space]\nlr = [1]\n[limits]\ntrials = 1\n"
    (tmp_path / "tune.toml").write_text(f"metric = 'loss'\n{job}")
    text = "warning: args: {artefact_dir} is not a placeholder; did you mean {artifact_dir}?\n"
    for verb, code in (("plan", 0), ("sweep", 8)):  # a file is no folder for a store, so no trial starts
        assert main([verb, "tune.toml", "--store", str(tmp_path / "train.py/store")]) == code
        assert capsys.readouterr().err.count(text) == 1


def test_plan_takes_a_file_with_a_space_for_a_sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tune.toml").write_text("metrc = 'loss'\n[job]\nentry_point = 'train.py'\n[space]\nlr = [1, 2]\n")
    assert main(["plan", str(tmp_path / "tune.toml")]) == 2
    assert capsys.readouterr().err.startswith("error: metrc: is not a field of a sweep\nhint: did you mean 'metric'?")


def test_a_trial_that_prune_cannot_compare_says_so() -> None:
    spec = spec_of(limits={"trials": 3}, prune={"rule": "asha", "by": "epoch"})
    before = fold(spec, [trial(0)])
    blind = Outcome(trial=0, state="succeeded", value=0.5)
    assert change_lines(spec, before, before.with_outcomes([blind])) == [
        "trial 0: succeeded, loss 0.5 (best so far): its metrics have no column epoch, so [prune] could not compare it"
    ]


def test_a_sweep_whose_trials_have_no_cap_in_the_currency_of_a_limit_is_refused() -> None:
    for name in ("max_cost", "max_gpu_hours"):
        limits = spec_of(limits={name: 100}).limits
        with pytest.raises(SpecError, match=f"limits.{name}: the sweep has this limit") as caught:
            check_caps(limits, {})
        assert "\n" not in str(caught.value)
        with pytest.raises(SpecError, match="100 is less than the 101 of one trial"):
            check_caps(limits, {name: 101.0})
        check_caps(limits, {name: 100.0})


def test_an_id_leaves_room_for_the_number_of_a_trial() -> None:
    assert check_sweep_id("a" * 35)
    for wrong in ("a" * 36, "Tune", "tune--1", ""):
        with pytest.raises(SpecError):
            check_sweep_id(wrong)


# ----------------------------------------------------------------------------------------------- space and samplers


@pytest.mark.parametrize("value", [(1e-4, 1e-1), (1e-4, 1e-1, "log-uniform"), (64, 128)])
def test_a_tuple_of_numbers_is_refused_because_elsewhere_it_is_a_range(value: tuple[Any, ...]) -> None:
    with pytest.raises(SpecError, match=r"space\.lr: a tuple may mean choices or a range") as caught:
        parse_space({"lr": value})
    numbers = value[:2]
    assert (
        f"for choices write {[*value]}, for a range {{'low': {numbers[0]}, 'high': {numbers[1]}}}" in caught.value.hint
    )
    assert parse_space({"name": ("adam", "sgd")}) == parse_space({"name": ["adam", "sgd"]})


def test_random_points_lie_in_the_space_and_depend_on_seed_and_number_alone() -> None:
    space = parse_space(SPACE)
    points = [random_point(space, 0, number) for number in range(300)]
    assert all(space[name].contains(value) for point in points for name, value in point.items())
    assert {point["layers"] for point in points} == {2, 4, 6, 8, 10, 12}
    assert {point["dropout"] for point in points} == {0.0, 0.1, 0.2, 0.3, 0.4, 0.5}
    assert {type(point["width"]) for point in points} == {int}
    assert sum(point["lr"] < 1e-3 for point in points) in range(110, 190)  # half of a logarithmic range
    assert random_point(dict(reversed(space.items())), 0, 7) == points[7] != random_point(space, 1, 7)


def test_a_grid_has_every_point_once() -> None:
    space = parse_space({"a": [1, 2], "b": {"low": 0, "high": 2}, "c": {"low": 0.0, "high": 0.2, "step": 0.1}})
    points = [grid_point(space, number) for number in range(grid_size(space))]
    assert points == [
        dict(zip("abc", item, strict=True)) for item in itertools.product([1, 2], [0, 1, 2], [0, 0.1, 0.2])
    ]
    assert grid_point(space, len(points)) is None


def history(spec: SweepSpec, count: int, running: int = 0) -> State:
    entries: list[Entry] = []
    for n in range(count + running):
        entries.append(trial(n, params=random_point(spec.space, 9, n)))
    state = fold(spec, entries)
    return state.with_outcomes(
        Outcome(trial=n, state="stopped" if n % 3 == 2 else "succeeded", value=float(n % 5), at=n) for n in range(count)
    )


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["random", "tpe"])
def test_equal_histories_give_equal_parameters_in_another_process(sampler: str) -> None:
    spec = spec_of(sampler=sampler)
    state = history(spec, 15, 3)
    found = propose(spec, state)
    assert found is not None
    assert all(spec.space[name].contains(value) for name, value in found.items())
    assert list(found) == list(spec.space) or sampler == "random"
    assert propose(spec, history(spec, 15, 3)) == found != propose(spec, history(spec, 14, 3))
    code = f"""
import sys; sys.path[:0] = {[str(Path(__file__).parent), str(Path(rows.__file__).parent)]!r}
import json, test_sweeps as t
spec = t.spec_of(sampler={sampler!r})
print(json.dumps(t.propose(spec, t.history(spec, 15, 3))))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == found


@pytest.mark.parametrize("sampler", ["random", "tpe", "grid"])
def test_first_points_come_first(sampler: str) -> None:
    space = {"lr": [0.1, 0.2], "layers": {"low": 1, "high": 3}}
    spec = spec_of(space=space, sampler=sampler, first=[{"lr": 0.2, "layers": 3}, {"lr": 0.1}])
    zero, one, two = (
        propose(spec, fold(spec, [trial(k, params={"lr": 0.1, "layers": 1}) for k in range(n)])) for n in range(3)
    )
    assert zero == {"lr": 0.2, "layers": 3}
    assert one is not None
    assert one["lr"] == 0.1
    assert one["layers"] in (1, 2, 3)
    assert two is not None
    assert sampler != "grid" or two == {"lr": 0.1, "layers": 1}


def test_tpe_proposes_what_optuna_itself_would_propose() -> None:
    """A study that ran entirely by ask and tell gives the same next parameters as our rebuilt one."""
    import optuna

    spec = spec_of(sampler="tpe", seed=5)
    state = history(spec, 20, 7)
    study = optuna.create_study()
    for one in state.trials:
        study.enqueue_trial(one.params)
    ranges = {
        "lr": optuna.distributions.FloatDistribution(1e-5, 1e-1, log=True),
        "dropout": optuna.distributions.FloatDistribution(0.0, 0.5, step=0.1),
        "layers": optuna.distributions.IntDistribution(2, 12, step=2),
        "width": optuna.distributions.IntDistribution(16, 1024, log=True),
        "optimizer": optuna.distributions.CategoricalDistribution(("adamw", "lion")),
    }
    for one in state.trials:
        request = study.ask(ranges)
        assert request.params == one.params
        outcome = state.outcomes.get(one.n)
        if outcome is not None and outcome.value is not None:
            request.report(outcome.value, one.n)
            pruned = optuna.trial.TrialState.PRUNED if outcome.state == "stopped" else None
            study.tell(request, None if pruned else outcome.value, state=pruned)
    study.sampler = study_of(spec, state).sampler
    assert propose(spec, state) == study.ask(ranges).params


def test_a_study_has_every_trial() -> None:
    spec = spec_of(goal="maximize", sampler="random")
    study = study_of(spec, history(spec, 6, 2))
    assert [item.state.name for item in study.trials] == [*["COMPLETE", "COMPLETE", "PRUNED"] * 2, *["RUNNING"] * 2]
    assert study.best_value == 4.0
    assert study.best_trial.user_attrs == {"run": "s-0004"}


def test_without_optuna_only_tpe_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    spec = spec_of(sampler="tpe")
    with pytest.raises(SpecError) as caught:
        check_sampler(spec)
    assert caught.value.hint == f"run: {install_command('sweep')}, or use random or grid"
    check_sampler(spec_of())
    assert propose(spec_of(), fold(spec_of(), []))


# -------------------------------------------------------------------------------------------------------------- rules


def rows_of(*values: float, start: int = 1) -> list[dict[str, float]]:
    return [{"step": step, "loss": value} for step, value in enumerate(values, start)]


def test_asha_keeps_the_best_third_at_each_rung() -> None:
    spec = spec_of(prune={"rule": "asha", "min": 1, "factor": 3})
    assert spec.prune is not None
    trials = [costs_of(rows_of(value, value - 0.1, value - 0.2), spec) for value in range(9)]
    stopped = [is_hopeless(mine, trials[:n] + trials[n + 1 :], spec.prune) for n, mine in enumerate(trials)]
    assert stopped == [False] * 3 + [True] * 6
    assert not is_hopeless(trials[8], trials[:1], spec.prune)  # two trials are too few for a third
    assert not is_hopeless([], trials, spec.prune)


def test_asha_forgives_a_late_improvement_no_more_than_its_rung() -> None:
    rule = Prune(rule="asha", min=3, factor=2)
    others = [[(1.0, 0.5), (3.0, 0.5)]] * 3
    assert not is_hopeless([(2.0, 9.0)], others, rule)
    assert is_hopeless([(2.0, 9.0), (3.0, 9.0), (4.0, 0.1)], others, rule)
    assert not is_hopeless([(2.0, 9.0), (3.0, 0.1)], others, rule)


def test_median_needs_its_peers_and_compares_at_the_same_progress() -> None:
    rule = Prune(rule="median", min=2, peers=3)
    others = [[(1.0, cost), (2.0, cost - 1), (9.0, 0.0)] for cost in (1.0, 2.0, 3.0)]
    assert is_hopeless([(1.0, 9.0), (2.0, 1.5)], others, rule)
    assert not is_hopeless([(1.0, 9.0), (2.0, 0.9)], others, rule)
    assert not is_hopeless([(1.0, 9.0)], others, rule)
    assert not is_hopeless([(1.0, 9.0), (2.0, 1.5)], others[:2], rule)


@pytest.mark.parametrize("rule", ["asha", "median"])
def test_the_order_of_rows_and_trials_does_not_matter(rule: str) -> None:
    spec = spec_of(prune={"rule": rule, "factor": 2, "peers": 2})
    assert spec.prune is not None
    chance = random.Random(3)
    for _ in range(200):
        trials = [rows_of(*(chance.random() for _ in range(chance.randint(1, 9)))) for _ in range(6)]
        points = [costs_of(rows, spec) for rows in trials]
        found = is_hopeless(points[0], points[1:], spec.prune)
        shuffled = [costs_of(chance.sample(rows, len(rows)), spec) for rows in trials]
        assert is_hopeless(shuffled[0], chance.sample(shuffled[1:], 5), spec.prune) == found


def test_a_value_that_is_not_a_number_is_worse_than_every_other() -> None:
    for goal in ("minimize", "maximize"):
        spec = spec_of(goal=goal, prune={"rule": "asha", "factor": 2})
        assert spec.prune is not None
        good = costs_of(rows_of(-1e9 if goal == "maximize" else 1e9), spec)
        for bad in (math.nan, math.inf, -math.inf):
            lost = costs_of(rows_of(bad), spec)
            assert is_hopeless(lost, [good], spec.prune)
            assert not is_hopeless(good, [lost], spec.prune)


def test_the_value_of_a_trial() -> None:
    rows = rows_of(3.0, 1.0, math.nan, 2.0)
    assert value_of(rows, spec_of()) == 1.0
    assert value_of(rows, spec_of(goal="maximize")) == 3.0
    assert value_of(rows, spec_of(value="last")) == 2.0
    assert value_of(rows[:3], spec_of(value="last")) is None
    assert value_of([{"step": 1, "loss": "low"}, {"accuracy": 1}, {"step": 2, "loss": True}], spec_of()) is None


# ---------------------------------------------------------------------------------------------------------- decisions


def trial(n: int, *, at: float = 0.0, ended: list[dict[str, Any]] | None = None, **fields: Any) -> dict[str, Any]:
    base = {"kind": "trial", "n": n, "run": f"s-{n:04d}", "params": {"lr": 1e-3}, "cap": CAP, "at": at}
    return {**base, "ended": ended or [], **fields}


def after(
    spec: SweepSpec, *entries: Entry, now: float = 1.0, points: Any = None, found: Any = ()
) -> dict[str, Any] | None:
    state = fold(spec, entries).with_outcomes(found)
    return next_entry(spec, state, points or {}, now, sweep_id="s", cap=CAP)


def done(n: int, state: str = "succeeded", cost: float | None = 1.0) -> Outcome:
    return Outcome(trial=n, state=state, value=1.0 if state == "succeeded" else None, max_cost=cost)


def test_it_starts_as_many_as_may_run_at_once() -> None:
    spec = spec_of()
    first = after(spec)
    assert first is not None
    assert (first["kind"], first["n"], first["run"], first["cap"]) == ("trial", 0, "s-0000", CAP)
    assert (after(spec, trial(0)) or {})["run"] == "s-0001"
    assert after(spec, trial(0), trial(1)) is None
    third = after(spec, trial(0), trial(1), found=[done(1)])
    assert third is not None
    assert (third["n"], third["ended"]) == (2, [{"trial": 1, "state": "succeeded", "value": 1.0, "max_cost": 1.0}])


def test_it_ends_once_when_all_trials_have() -> None:
    spec = spec_of(limits={"trials": 2, "parallel": 2})
    assert after(spec, trial(0), trial(1), found=[done(0)]) is None
    end = after(spec, trial(0), trial(1), found=[done(0), done(1)])
    assert end is not None
    assert (end["kind"], end["why"]) == ("end", "trials")
    assert after(spec, trial(0), trial(1), end) is None
    assert fold(spec, [trial(0), trial(1), end]).live == []


def test_the_budget_counts_the_cap_of_what_runs_and_the_use_of_what_has_ended() -> None:
    spec = spec_of(limits={"max_cost": 25, "parallel": 9})
    assert (after(spec, trial(0)) or {})["kind"] == "trial"
    assert after(spec, trial(0), trial(1)) is None  # 20 are reserved, and one more could make 30
    assert (after(spec, trial(0), trial(1), found=[done(0, cost=5.0)]) or {})["kind"] == "trial"
    assert after(spec, trial(0), trial(1), found=[done(0, cost=None)]) is None  # an unknown use counts as the cap
    end = after(spec, trial(0), trial(1), found=[done(0, cost=9.0), done(1, cost=9.0)])
    assert (end or {})["why"] == "budget"
    state = fold(spec, [trial(0), trial(1)]).with_outcomes([done(0, cost=4.0)])
    assert (used(state, "max_cost"), committed(state, "max_cost")) == (4.0, 14.0)


def test_caps_of_a_tenth_fill_a_budget_of_one() -> None:
    spec = spec_of(limits={"max_cost": 1.0, "parallel": 20})
    entries: list[dict[str, Any]] = []
    state = fold(spec, entries)
    while (entry := next_entry(spec, state, {}, 1.0, sweep_id="s", cap={"max_cost": 0.1})) is not None:
        entries.append({**entry, "at": 0.0})
        state = fold(spec, entries)
    assert len(entries) == 10


def test_time_that_is_over_stops_every_trial_and_then_ends_the_sweep() -> None:
    spec = spec_of(limits={"max_runtime": 100})
    assert after(spec, trial(0, at=50.0), now=149.0) is None
    stop = after(spec, trial(0, at=50.0), now=150.0)
    assert stop == {"kind": "stop", "trial": None, "why": "max_runtime", "ended": []}
    assert fold(spec, [trial(0, at=50.0), stop]).stop_of(0) == "max_runtime"
    assert after(spec, trial(0, at=50.0), stop, now=151.0) is None
    end = after(spec, trial(0, at=50.0), stop, now=152.0, found=[done(0, "cancelled")])
    assert (end or {})["why"] == "max_runtime"


def test_failures_in_a_row_end_it_and_changed_limits_open_it_again() -> None:
    spec = spec_of(limits={"trials": 9, "failures": 2})
    failed = [done(0), done(1, "failed"), done(2, "failed")]
    entries = [trial(0), trial(1), trial(2)]
    for other in ("stopped", "interrupted"):
        assert (after(spec, *entries, found=[*failed[:2], done(2, other)]) or {})["kind"] == "trial"
    end = after(spec, *entries, found=failed)
    assert (end or {})["why"] == "failures"
    opened = [*entries, end or {}, {"kind": "limits", "limits": {"trials": 4}}]
    state = fold(spec, opened)
    assert (state.ended, state.limits.trials, state.limits.failures) == ("", 4, 2)
    assert (after(spec, *opened) or {})["n"] == 3


def test_three_refusals_in_a_row_end_it() -> None:
    spec = spec_of(limits={"trials": 9, "failures": 2})
    entries = [trial(n) for n in range(3)]
    assert (after(spec, *entries[:2], found=[done(0, "refused"), done(1, "refused")]) or {})["kind"] == "trial"
    assert (after(spec, *entries, found=[done(n, "refused") for n in range(3)]) or {})["why"] == "refused"


def test_a_hopeless_trial_is_stopped_once() -> None:
    spec = spec_of(prune={"rule": "asha", "factor": 2}, limits={"trials": 3, "parallel": 3})
    points = {0: [(1.0, 1.0)], 1: [(1.0, 5.0)], 2: [(1.0, 0.5)]}
    entries = [trial(0), trial(1), trial(2)]
    stop = after(spec, *entries, points=points)
    assert stop is not None
    assert (stop["kind"], stop["why"]) == ("stop", "asha")
    stopped = {stop["trial"]}
    while (
        stop := after(spec, *entries, *({"kind": "stop", "trial": n, "why": "asha"} for n in stopped), points=points)
    ) is not None:
        assert stop["trial"] not in stopped
        stopped.add(stop["trial"])
    assert stopped == {0, 1}


def test_a_grid_ends_after_its_last_point() -> None:
    spec = spec_of(space={"lr": [1, 2]}, sampler="grid", limits={"parallel": 3})
    assert (after(spec, trial(0)) or {})["params"] == {"lr": 2}
    assert after(spec, trial(0), trial(1)) is None
    assert (after(spec, trial(0), trial(1), found=[done(0), done(1)]) or {})["why"] == "space"


def test_a_cancelled_sweep_starts_nothing_and_ends_when_its_trials_have() -> None:
    spec = spec_of()
    stop = {"kind": "stop", "trial": None, "why": "cancelled"}
    assert (after(spec, stop) or {})["why"] == "cancelled"
    assert after(spec, trial(0), stop) is None
    assert (after(spec, trial(0), stop, found=[done(0, "cancelled")]) or {})["why"] == "cancelled"


# ----------------------------------------------------------------------------------------------------- native requests


@pytest.mark.parametrize(
    ("name", "path", "limit"),
    [
        ("sagemaker", ("StoppingCondition", "MaxRuntimeInSeconds"), 7200),
        ("azureml", ("limits", "timeout"), 6000),
        ("vertex", ("jobSpec", "scheduling", "timeout"), "7200s"),
    ],
)
def test_the_cap_of_a_trial_is_the_platforms_own_limit(
    name: str, path: tuple[str, ...], limit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every trial's native request holds 0.5 USD of the machine's own price. Parameters and run id differ."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print('hello')\n")
    sample: Any = import_module(f"cloudtrain.providers.{name}").SAMPLE
    settings = Settings.load(overrides=sample["settings"], provider=name, store=sample["store"])
    job = Job.make(entry_point="train.py", max_cost=0.5, hyperparameters={"epochs": 3}, **sample["job"])
    sweep = make_sweep(plan_of_sweep(job, settings, sweep_id="tune", cwd=tmp_path), spec_of(limits={"max_cost": 20}))
    for n in (0, 3):
        one = Trial(n=n, run=f"tune-{n:04d}", params={"lr": 0.1 * (n + 1)}, cap=sweep.cap)
        plan = trial_plan(sweep.record, one, store=sweep.store, provider=sweep.provider, settings=settings)
        assert functools.reduce(lambda found, key: found[key], path, plan.request.body) == limit
        assert plan.hard_limit == int(str(limit).rstrip("s"))
        assert plan.job.hyperparameters == {"epochs": 3, "lr": 0.1 * (n + 1)}
        assert plan.job.tags == {"sweep": "tune"}
        assert plan.run_url == f"{sample['store']}/runs/tune-{n:04d}"
    with pytest.raises(SpecError, match=r"limits.max_gpu_hours: .* each trial needs its own max_gpu_hours"):
        make_sweep(plan_of_sweep(job, settings, sweep_id="tune", cwd=tmp_path), spec_of(limits={"max_gpu_hours": 20}))


def test_a_fallback_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print('hello')\n")
    (tmp_path / "cloudtrain.toml").write_text('fallback = ["spare"]\n[profiles.spare]\nprovider = "docker"\n')
    job = Job.make(entry_point="train.py")
    with pytest.raises(SpecError, match="fallback: a sweep cannot use spare") as caught:
        plan_of_sweep(job, Settings.load(), sweep_id="tune", cwd=tmp_path)
    assert caught.value.hint == "run the sweep with --set fallback="
    assert plan_of_sweep(job, Settings.load(overrides={"fallback": ""}), sweep_id="tune", cwd=tmp_path)


# ------------------------------------------------------------------------------------------------------------ outcomes


@for_each(
    ("result", "stop", "state", "cost"),
    [
        ({"state": "succeeded", "native_id": "j", "cost": {"estimate_usd": 2.0}}, "", "succeeded", 2.0),
        ({"state": "cancelled", "native_id": "j", "cost": {"estimate_usd": 2.0}}, "asha", "stopped", 2.0),
        ({"state": "failed", "category": "user_error", "native_id": "j", "cost": {}}, "median", "stopped", None),
        ({"state": "failed", "category": "user_error", "native_id": "j", "cost": {}}, "", "failed", None),
        ({"state": "failed", "category": "user_error", "native_id": "j", "cost": {}}, "cancelled", "failed", None),
        ({"state": "failed", "category": "oom", "native_id": "j", "cost": {}}, "asha", "failed", None),
        ({"state": "cancelled", "native_id": "j", "cost": {"estimate_usd": None}}, "max_runtime", "cancelled", None),
        ({"state": "cancelled", "native_id": None, "cost": None}, "cancelled", "cancelled", 0.0),
        (
            {"state": "failed", "category": "timeout", "native_id": "j", "cost": {"estimate_usd": 9.0}},
            "",
            "capped",
            9.0,
        ),
        ({"state": "failed", "category": "oom", "native_id": "j", "cost": {}}, "", "failed", None),
        ({"state": "failed", "category": "preempted", "native_id": "j", "cost": {}}, "", "interrupted", None),
        ({"state": "failed", "category": "infra", "native_id": "j", "cost": {}}, "", "interrupted", None),
        ({"state": "failed", "category": "auth", "native_id": "j", "cost": {}}, "", "refused", None),
        (
            {"state": "failed", "category": "quota", "native_id": None, "cost": {"estimate_usd": None}},
            "",
            "refused",
            0.0,
        ),
    ],
)
def test_the_outcome_of_a_trial(result: Mapping[str, Any], stop: str, state: str, cost: float | None) -> None:
    one = Trial(n=4, run="s-0004", params={}, cap=CAP)
    found = outcome_of(one, result, [{"step": 3, "loss": 0.5}], stop, spec_of())
    assert (found.trial, found.state, found.value, found.at, found.max_cost) == (4, state, 0.5, 3.0, cost)


@for_each(
    ("attempts", "more", "rows", "cost"),
    [
        ([{"category": "capacity"}, {"category": "quota"}], {}, [], 0.0),
        ([{"category": "capacity", "started": "2026-11-26T10:00:00Z"}], {}, [], None),
        ([{"category": "preempted"}, {"category": "capacity"}], {}, [], None),
        ([{"category": "capacity"}], {"checkpoint": {"name": "step-1"}}, [], None),
        ([{"category": "capacity"}], {}, [{"step": 1, "loss": 0.5}], None),
        ([{"category": "capacity"}], {"cost": {"estimate_usd": 2.5}}, [{"step": 1, "loss": 0.5}], 2.5),
    ],
)
def test_a_trial_that_never_had_machines_by_its_record_has_cost_nothing(
    attempts: Any, more: Any, rows: Any, cost: float | None
) -> None:
    """An unknown cost of any other trial counts as its whole cap."""
    one, result = Trial(n=0, run="s-0000", params={}, cap=CAP), {"attempts": attempts, "cost": {}, **more}
    found = outcome_of(
        one, {"state": "failed", "category": "capacity", "native_id": "j", **result}, rows, "", spec_of()
    )
    assert (found.state, found.max_cost) == ("refused", cost)


def test_a_trial_whose_request_has_no_answer_counts_with_its_cap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its job may still arrive at the platform, although the run has been cancelled."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    sweep = Sweep(
        Job.make(entry_point="train.py"), space={"lr": [1]}, metric="loss", trials=1,
        store=f"memory://{uuid.uuid4().hex}/store", sweep_id="s",
    )  # fmt: skip
    assert sweep.create()
    one = Trial(n=0, run="s-0000", params={"lr": 1}, cap=sweep.cap)
    plan = trial_plan(
        sweep.record, one, store=sweep.store, provider=sweep.provider, settings=Settings.load()
    )  # fmt: skip
    assert sweep.store.create_attempt(plan.run_id, 0, plan.request)
    result = {"state": "cancelled", "native_id": None, "cost": None}
    trials = RunTrials(
        sweep.record, sweep.spec, store=sweep.store, provider=sweep.provider, settings=Settings.load(), environ={}
    )
    assert trials.outcome(one, result, "cancelled").max_gpu_hours == 0.0
    with pytest.raises(KeyboardInterrupt), sending(sweep.store, one.run, plan.request, arrival=0, say=print):
        raise KeyboardInterrupt
    assert trials.outcome(one, result, "cancelled").max_gpu_hours is None


def test_a_sweep_shows_that_it_waits_for_another_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    sweep = Sweep(
        Job.make(entry_point="train.py"), space={"lr": [1]}, metric="loss", trials=1,
        store=f"memory://{uuid.uuid4().hex}/store", sweep_id="s", provider="local",
    )  # fmt: skip
    assert sweep.create()
    one, lines = Trial(n=0, run="s-0000", params={"lr": 1}, cap=sweep.cap), list[str]()
    plan = trial_plan(sweep.record, one, store=sweep.store, provider=sweep.provider, settings=Settings.load())
    with pytest.raises(KeyboardInterrupt), sending(sweep.store, one.run, plan.request, arrival=0, say=print):
        raise KeyboardInterrupt
    trials = RunTrials(
        sweep.record, sweep.spec, store=sweep.store, provider=sweep.provider, settings=Settings.load(), environ={},
        say=lines.append,
    )  # fmt: skip
    monkeypatch.setattr(type(sweep.provider), "submit", Mock(side_effect=QuotaError("no more GPUs")))
    trials.advance(one, "")
    assert lines == [f"s-0000: waiting: another client may be sending attempt 0 of {plan.run_url}"]
    assert caplog.text == ""


def test_a_cancelled_sweep_waits_for_a_request_that_was_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(CLIENT_TIMINGS, "arrival", 0.05)
    (tmp_path / "train.py").write_text("")
    sweep = Sweep(
        Job.make(entry_point="train.py", secrets={"TOKEN": "env:TOKEN"}), space={"lr": [1]}, metric="loss", trials=1,
        store=str(tmp_path / "store"), sweep_id="s", provider="local",
    )  # fmt: skip
    monkeypatch.setattr(type(sweep.provider), "arrival_s", 300.0)

    def dies(*given: Any, **named: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(type(sweep.provider), "submit", dies)
        with pytest.raises(KeyboardInterrupt):
            sweep.step(environ={"TOKEN": "x"})
    sweep.cancel()
    assert (sweep.result()["state"], sweep.state().live[0].run) == ("running", "s-0000")
    past, trial = time.time() - 301, tmp_path / "store/runs/s-0000"
    for file in (trial / "cancelled.json", *trial.glob("attempts/*/sending-*.json")):
        os.utime(file, (past, past))
    assert sweep.step(environ={})["state"] == "cancelled"


@pytest.mark.parametrize("where", ["staging", "create_run", "create_attempt", "sending"])
def test_a_client_without_a_secret_can_stop_a_trial_that_was_never_sent(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first client dies ``where``; the second one lacks the secret's variable."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    sweep = Sweep(
        Job.make(entry_point="train.py", secrets={"TOKEN": "env:TOKEN"}), space={"lr": [1]}, metric="loss", trials=1,
        store=f"memory://{uuid.uuid4().hex}/store", sweep_id="s", provider="local",
    )  # fmt: skip
    assert sweep.create()
    one = Trial(n=0, run="s-0000", params={"lr": 1}, cap=sweep.cap)

    def trials(environ: Mapping[str, str]) -> RunTrials:
        return RunTrials(
            sweep.record, sweep.spec, store=sweep.store, provider=sweep.provider, settings=Settings.load(),
            environ=environ,
        )  # fmt: skip

    def dies(*given: Any, **named: Any) -> Any:
        raise KeyboardInterrupt

    at = {"staging": "cloudtrain.runs.submit.stage_content", "sending": "cloudtrain.runs.submit.deliver"}
    with monkeypatch.context() as patch:
        patch.setattr(at.get(where) or f"cloudtrain.store.store.Store.{where}", dies)
        with pytest.raises(KeyboardInterrupt):
            trials({"TOKEN": "x"}).advance(one, "")
    found = trials({}).advance(one, "cancelled")
    assert found is not None
    assert (found.state, found.max_gpu_hours) == ("cancelled", 0.0)


def test_a_trial_without_the_metric_has_failed_and_names_its_columns() -> None:
    one = Trial(n=0, run="s-0000", params={}, cap=CAP)
    rows = [{"step": 1, "val_loss": 0.5}, {"step": 2, "lr": 0.1, "val_loss": 0.4}]
    found = outcome_of(one, {"state": "succeeded", "native_id": "j"}, rows, "", spec_of())
    assert (found.state, found.reason) == ("failed", "its metrics have no finite loss; columns: step, val_loss, lr")


# ------------------------------------------------------------------------------------------------------------ the views


def test_the_live_table_has_the_budget_and_the_running_trials_first() -> None:
    spec = spec_of(limits={"max_cost": 40, "trials": 9, "parallel": 2}, space={"lr": [0.1, 0.2]})
    state = fold(spec, [trial(n, params={"lr": 0.1}) for n in range(4)])
    state = state.with_outcomes([done(0, cost=3.0), done(2, "failed")])
    result = sweep_summary(spec, state, url="s", sweep_id="tune", provider="local")
    console = Console(width=100, file=io.StringIO(), record=True)
    console.print(sweep_screen(result, {1: (7.0, 0.25)}, height=20))
    lines = [" ".join(line.split()) for line in console.export_text().splitlines()]
    assert lines == [
        "tune running, on local",
        "4 trials, 2 running; best loss 1 (trial 0); 4.00 + 20.00 of 40 USD",
        "trial state loss at lr",
        "1 running 0.25 7 0.1",
        "3 running 0.1",
        "0 succeeded 1 0.1",
        "2 failed 0.1",
    ]
    console.print(sweep_screen(result, {}, height=4))
    assert len(console.export_text().splitlines()) == 4


def compared(run_id: str, lr: float, losses: Any) -> Compared:
    found = curves({"0.0": rows_of(*losses)})
    result = {"run_id": run_id, "state": "succeeded", "attempts": [{}], "cost": {"estimate_usd": 1.5}}
    return Compared(result=result, job={"name": "t", "hyperparameters": {"lr": lr}}, curves=found)


def test_a_page_compares_runs() -> None:
    page = comparison_page([compared("a", 0.1, (3.0, 2.0)), compared("<b>", 0.2, (3.0, 1.0))])
    assert page.count("<polyline") == 2
    assert "Last values: a 2, &lt;b&gt; 1." in page
    assert ">hyperparameters.lr</th>" in page
    assert ">name</th>" not in page  # it is the same
    assert "The jobs have the same fields." in comparison_page([compared("a", 0.1, ()), compared("b", 0.1, ())])
    assert {">2<", ">3<", ">step<"} <= {f">{word}<" for word in (2, 3, "step") if f">{word}<" in page}, (
        "both axes have marks"
    )


def test_a_page_draws_the_trials_of_a_sweep() -> None:
    trials = [
        {
            "trial": n, "run_id": f"r{n}", "state": "succeeded", "value": value, "reason": "", "cost_usd": None,
            "params": {"lr": 10.0**-n, "same": 1, "kind": "ab"[n % 2]},
        }
        for n, value in enumerate([3.0, 2.0, 2.5])
    ]  # fmt: skip
    budget = {key: {"used": 0.0, "limit": None, "reserved": 0.0} for key in ("max_cost", "max_gpu_hours")}
    result = {
        "sweep_id": "s", "state": "succeeded", "reason": "", "provider": "local", "metric": "loss", "goal": "minimize",
        "best": None, "counts": {}, "limits": {"trials": 3, "parallel": 1}, "budget": budget, "trials": trials,
    }  # fmt: skip
    page = sweep_page(result, store="s3://bucket")
    assert page.count("<polyline") == 1 + 3
    assert page.count("<circle") == 3
    assert page.count(",107.0 ") == 4, "a parameter that all trials share stands in the middle"
    assert "3 values from 2 to 3; the best is 2." in page
    assert page.count("<circle") == sweep_page({**result, "trials": trials[:1]}, store="s3://b").count("<circle") + 1


# ----------------------------------------------------------------------------------------------------------- the store


def test_a_log_is_read_once_and_its_numbers_have_no_gap(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    assert store.log_entries("sweeps/s") == []
    assert [store.add_log_entry("sweeps/s", n, {"kind": "trial", "n": n}) for n in (0, 1, 1, 2)] == [
        True,
        True,
        False,
        True,
    ]
    log = Log(store, "sweeps/s")
    assert [entry["n"] for entry in log.read()] == [0, 1, 2]
    assert not Log(store, "sweeps/s").add({"kind": "end"})  # it has read nothing, so it may not append after the others
    assert log.add({"kind": "trial", "n": 3})
    assert store.add_log_entry("sweeps/s", 5, {"kind": "trial", "n": 5})
    (tmp_path / "sweeps/s/log/000000.json").unlink()
    assert [entry["n"] for entry in log.read()] == [0, 1, 2, 3]


def test_a_store_wide_reconcile_makes_the_steps_of_a_local_sweep_in_a_remote_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only another machine knows the trial. It stays, and the sweep ends once the trial has a result."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print('hello')\n")
    monkeypatch.setenv("CLOUDTRAIN_LOCAL_STATE_DIR", str(tmp_path / "state"))
    job, store = Job.make(entry_point="train.py"), f"memory://{uuid.uuid4().hex}/store"
    sweep = Sweep(job, space={"lr": [1]}, metric="loss", trials=1, store=store, sweep_id="s")
    assert sweep.create()
    other = trial(0, params={"lr": 1}, cap={}, at=time.time())
    assert sweep.store.add_log_entry("sweeps/s", 0, other)
    plan = trial_plan(
        sweep.record, fold(sweep.spec, [other]).trials[0], store=sweep.store, provider=sweep.provider,
        settings=Settings.load(),
    )  # fmt: skip
    record = {**plan_record(plan), "protocol": 1, "created": time.time()}
    assert sweep.store.create_run(plan.layout, record)
    assert sweep.store.create_attempt(plan.run_id, 0, plan.request)
    sweep.store.write_submitted("s-0000", 0, "elsewhere:/gone/s-0000")
    rows = {row["run_id"]: row for row in reconcile_store(store, environ={})}
    assert rows["s"]["exit_code"] == rows["s-0000"]["exit_code"] == 0
    assert rows["s"]["error"] == rows["s-0000"]["error"] != ""
    assert len(sweep.store.log_entries("sweeps/s")) == 1
    ended = {"state": "succeeded", "native_id": "j", "category": None, "reason": "", "cost": {}}
    sweep.store.write_result("s-0000", ended)
    (row,) = reconcile_store(store, environ={})
    assert (row["run_id"], row["state"], row["error"], row["exit_code"]) == ("s", "failed", None, 0)
    assert [entry["kind"] for entry in sweep.store.log_entries("sweeps/s")] == ["trial", "end"]


def test_a_sweep_with_a_trial_that_cannot_be_planned_can_be_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print('hello')\n")
    space, store = {"data": ["a", "{inputs.none}"]}, str(tmp_path / "store")
    job = Job.make(entry_point="train.py")
    sweep = Sweep(job, space=space, sampler="grid", metric="loss", store=store, sweep_id="s")
    assert sweep.create()
    assert sweep.store.add_log_entry("sweeps/s", 0, trial(0, params={"data": "{inputs.none}"}, cap={}, at=time.time()))
    with pytest.raises(SpecError, match="names no input"):
        sweep.step()
    sweep.cancel()
    (row,) = sweep.result()["trials"]
    assert (row["state"], row["cost_usd"]) == ("cancelled", 0.0)
    assert "names no input" in row["reason"]
    assert [entry["kind"] for entry in sweep.store.log_entries("sweeps/s")] == ["trial", "stop", "end"]
    assert reconcile_store(store, environ={}) == list_page(store).rows == []


def test_verbs_name_commands_that_take_a_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    store = str(tmp_path / "store")
    sweep = Sweep(
        Job.make(entry_point="train.py"), space={"lr": [1]}, metric="loss", trials=1, store=store, sweep_id="s"
    )
    assert sweep.create()
    assert main(["report", "s", "--store", store]) == 0
    lines = [line.partition("cloudtrain ")[2] for line in capsys.readouterr().err.splitlines()]
    commands = [line.split() for line in lines if line]
    assert [words[0] for words in commands] == ["list", "status"]
    assert [main(words) for words in commands] == [0, 0]
    sweep.cancel()
    capsys.readouterr()
    assert main(["status", "s", "--store", store]) == 0
    assert "cancelled: cancelled" not in capsys.readouterr().out


def test_a_command_runs_at_the_end_of_a_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    job, at = Job.make(entry_point="train.py"), ["--store", str(tmp_path / "store")]
    sweep = Sweep(job, space={"lr": [1]}, metric="loss", trials=1, store=at[1], sweep_id="s")
    assert sweep.create()
    assert main(["sweep", "s", *at, "--detach", "--on-end", "true"]) == 2
    assert "on_end: needs a client that waits" in capsys.readouterr().err
    sweep.cancel()
    words = " ".join(f"$CLOUDTRAIN_{name}" for name in ("RUN_ID", "RUN", "STATE", "EXIT_CODE"))
    for verb in ("sweep", "wait"):
        assert main([verb, "s", *at, "--on-end", f'echo "{words}" >> end; exit 3']) == 5
        assert "--on-end ended with 3; the exit code here is that of the sweep" in capsys.readouterr().err
    assert (tmp_path / "end").read_text().splitlines() == [f"s {sweep.url} cancelled 5"] * 2


@for_each(
    ("field", "wrong"),
    [
        ("job", {"job": "train.py"}),
        ("space", {"space": ["lr"]}),
        ("first[0]", {"first": {"lr": 1}}),
        ("settings", {"settings": "budget=team"}),
    ],
)
def test_a_keyword_of_another_type_names_its_field(field: str, wrong: dict[str, Any]) -> None:
    keywords: Any = {"job": Job.make(entry_point="train.py"), "space": {"lr": [1]}, "metric": "loss", "trials": 1}
    with pytest.raises(SpecError, match=r"must be a (Job|table of names and values), not (str|list)") as caught:
        Sweep(**{**keywords, **wrong})
    assert caught.value.field == field


def test_gc_keeps_the_content_of_a_sweep_that_has_no_run_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print('hello')\n")
    store = str(tmp_path / "store")
    sweep = Sweep(Job.make(entry_point="train.py"), space={"lr": [1, 2]}, metric="loss", trials=2, store=store)
    assert sweep.create()
    assert not sweep.create()
    found = collect(Store(store), older_than=0, delete=True)
    assert [item for item in found.found if item.kind in ("code", "runtime")] == []
    assert Sweep.attach(sweep.url).spec == sweep.spec


def test_the_upload_of_a_new_sweep_takes_nothing_from_its_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print('hello')\n")
    job, store = Job.make(entry_point="train.py"), str(tmp_path / "store")
    sweep, create, steps = Sweep(job, space={"lr": [1, 2]}, metric="loss", trials=2, store=store), Sweep.create, []
    monkeypatch.setattr(Sweep, "create", lambda self: (create(self), time.sleep(0.3)))
    monkeypatch.setattr(Sweep, "_step", lambda *_: steps.append(time.sleep(0.02)) or True)
    with pytest.raises(LostContactError, match="has not ended within the timeout"):
        sweep.run(timeout=0.25, on_change=None)
    assert len(steps) > 1
