"""Choose the parameters of the next trial: grid, random, or Optuna's TPE. Pure functions of the trials so far.

Optuna keeps nothing for us: each call builds a study in memory from the trials. It comes with the extra ``sweep``.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import suppress
from random import Random
from typing import TYPE_CHECKING, Any

from ...errors import SpecError
from .space import Choices, Dimension, Params, grid_point, random_point
from .spec import SweepSpec
from .state import Outcome, State, Trial

if TYPE_CHECKING:
    from optuna import Study
    from optuna.trial import FrozenTrial

MISSING = "the sampler tpe needs Optuna, which is not installed here"


def check_sampler(spec: SweepSpec) -> None:
    """Raise `SpecError` if this machine lacks the package of the sampler."""
    if spec.sampler == "tpe":
        _optuna()


def propose(spec: SweepSpec, state: State) -> Params | None:
    """Return the parameters of the next trial; None if a grid has no further point.

    Equal states give equal parameters, on any machine. Raises `SpecError` if Optuna is missing.
    """
    number = len(state.trials)
    if number < len(spec.first):
        return random_point(spec.space, spec.seed, number) | spec.first[number]
    if spec.sampler == "grid":
        return grid_point(spec.space, number - len(spec.first))
    if spec.sampler == "random":
        return random_point(spec.space, spec.seed, number)
    study = study_of(spec, state)
    found: Params = study.ask({name: _distribution(item) for name, item in spec.space.items()}).params
    return {name: found[name] for name in spec.space}


def study_of(spec: SweepSpec, state: State) -> Study:
    """Return an Optuna study in memory with every trial of ``state``. Raises `SpecError` if Optuna is missing."""
    optuna = _optuna()
    known = {name: _distribution(item) for name, item in spec.space.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # multivariate sampling is called experimental
        seed = Random(f"{spec.seed}/{len(state.trials)}").getrandbits(31)  # of its own for each trial
        sampler = optuna.samplers.TPESampler(seed=seed, multivariate=True, constant_liar=True)
        study = optuna.create_study(direction=spec.goal, sampler=sampler)
        for trial in state.trials:
            study.add_trial(_frozen(trial, state.outcomes.get(trial.n), known))
    found: Study = study
    return found


def _frozen(trial: Trial, outcome: Outcome | None, known: Mapping[str, Any]) -> FrozenTrial:
    """Return Optuna's form of a trial: a stopped one is pruned at its best value, one without a value has failed."""
    from optuna.trial import TrialState, create_trial

    rows: dict[int, float] = {}
    value = None
    state = TrialState.RUNNING
    if outcome is not None and outcome.value is None:
        state = TrialState.FAIL
    elif outcome is not None and outcome.value is not None:
        state = TrialState.COMPLETE if outcome.state == "succeeded" else TrialState.PRUNED
        value = outcome.value if state is TrialState.COMPLETE else None
        rows = {max(0, int(outcome.at or 0)): outcome.value}
    return create_trial(
        state=state,
        params=trial.params,
        distributions={name: known[name] for name in trial.params if name in known},
        value=value,
        intermediate_values=rows,
        user_attrs={"run": trial.run},
    )


def _distribution(item: Dimension) -> Any:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if isinstance(item, Choices):
        return CategoricalDistribution(item.values)
    if item.whole:
        step = int(item.step or 1)
        high = item.high if item.log else item.low + (item.count - 1) * step
        return IntDistribution(int(item.low), int(high), log=item.log, step=step)
    high = round(item.low + (item.count - 1) * item.step, 12) if item.step else item.high
    return FloatDistribution(float(item.low), float(high), log=item.log, step=item.step or None)


def _optuna() -> Any:
    with suppress(ModuleNotFoundError):
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        return optuna
    from ...storage.extras import install_command

    raise SpecError(MISSING, field="sampler", hint=f"run: {install_command('sweep')}, or use random or grid")
