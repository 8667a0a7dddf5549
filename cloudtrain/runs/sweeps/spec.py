"""The description of a sweep, as in tune.toml: metric, limits, search space and prune rule. Checked values, pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ...errors import SpecError
from ...job.fields import MAX_ID, is_slug
from ...validate import choice_of, is_number, near_or_all, parse_duration, plain_number, table_of, text_of, whole_number
from .space import LARGEST, Dimension, Params, grid_size, parse_space

GOALS, VALUES = ("minimize", "maximize"), ("best", "last")
SAMPLERS, RULES = ("tpe", "random", "grid"), ("asha", "median")
CURRENCIES = {"max_cost": "USD", "max_gpu_hours": "GPU hours"}
"""Units of the limits that a run reserves, by the name of the job field with its own cap."""
DIGITS = 5
"""Most characters of a trial's number and its dash in the run id ``<sweep>-<number>``."""
LONGEST_ID = MAX_ID - DIGITS
"""Most characters of a sweep's id."""
MOST_TRIALS = 10_000
"""Trials of a sweep at most, whatever its limits."""
KEYS = ("metric", "goal", "value", "sampler", "seed", "limits", "space", "first", "prune")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits of a sweep; the first that is reached ends it. None: no such limit.

    ``max_cost`` is in US dollars, ``max_runtime`` in seconds from the first trial on. ``parallel`` trials run at once.
    ``failures`` is a number of failed trials in a row.
    """

    trials: int | None = None
    parallel: int = 1
    max_cost: float | None = None
    max_gpu_hours: float | None = None
    max_runtime: int | None = None
    failures: int = 5

    @classmethod
    def parse(cls, table: Any) -> Limits:
        """Return the limits of a table. Raises `SpecError` with the dotted field."""
        given = table_of(table, "limits")
        return cls(**{key: _LIMITS[_known(key, _LIMITS, "limits")](value) for key, value in given.items()})

    def changed(self, table: Mapping[str, Any]) -> Limits:
        """Return these limits with those of ``table`` in their place."""
        return dataclasses.replace(self, **{key: getattr(Limits.parse({key: table[key]}), key) for key in table})


@dataclass(frozen=True, kw_only=True)
class Prune:
    """A rule that stops a trial early. ``by`` is the metrics column that counts progress.

    ``min`` is the progress before which no trial stops. ``asha`` compares at ``min``, ``min x factor`` and so on.
    ``peers`` is the least number of other trials that ``median`` compares with.
    """

    rule: str
    by: str = "step"
    min: float = 1
    factor: int = 3
    peers: int = 4

    @classmethod
    def parse(cls, table: Any) -> Prune:
        """Return the rule of a table, or of its name alone. Raises `SpecError` with the dotted field."""
        given = {"rule": table} if isinstance(table, str) else table_of(table, "prune")
        if "rule" not in given:
            raise SpecError("must name a rule", field="prune.rule", hint='rule = "asha"')
        return cls(**{key: _PRUNE[_known(key, _PRUNE, "prune")](value) for key, value in given.items()})


@dataclass(frozen=True, kw_only=True)
class SweepSpec:
    """A sweep without its job. `to_dict` and `from_dict` round-trip through JSON."""

    metric: str
    space: dict[str, Dimension]
    limits: Limits
    goal: str = "minimize"
    value: str = "best"
    sampler: str = "random"
    seed: int = 0
    first: tuple[Params, ...] = ()
    prune: Prune | None = None
    written: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def sign(self) -> int:
        """The factor that turns the goal into minimizing: 1 or -1."""
        return 1 if self.goal == "minimize" else -1

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> SweepSpec:
        """Return the sweep of the tables in tune.toml. Raises `SpecError` with the dotted field."""
        for key in data:
            _known(key, KEYS, "")
        if "metric" not in data:
            raise SpecError("must name a column of the metrics file", field="metric", hint='metric = "val_loss"')
        space = parse_space(data.get("space", {}))
        prune = data.get("prune")
        spec = cls(
            metric=text_of(data["metric"], "metric"),
            space=space,
            limits=Limits.parse(data.get("limits", {})),
            goal=choice_of(data.get("goal", "minimize"), GOALS, "goal"),
            value=choice_of(data.get("value", "best"), VALUES, "value"),
            sampler=choice_of(data.get("sampler", "random"), SAMPLERS, "sampler"),
            seed=whole_number(data.get("seed", 0), "seed", least=0, most=2**31),
            first=_first(data.get("first", ()), space),
            prune=None if prune is None else Prune.parse(prune),
            written={key: value for key, value in data.items() if value is not None},
        )
        spec.check(spec.limits)
        return spec

    def to_dict(self) -> dict[str, Any]:
        """Return the tables as they were written."""
        return dict(self.written)

    def check(self, limits: Limits) -> None:
        """Raise `SpecError` unless ``limits`` end the sweep."""
        if self.sampler == "grid":
            size = grid_size(self.space)
            if size > MOST_TRIALS and (limits.trials or size) > MOST_TRIALS:
                text = f"the grid has {size:,} points, and a sweep at most {MOST_TRIALS:,} trials"
                raise SpecError(text, field="space", hint="set limits.trials, or use random or tpe")
        elif not any((limits.trials, limits.max_cost, limits.max_gpu_hours, limits.max_runtime)):
            hint = "set trials, max_cost, max_gpu_hours or max_runtime"
            raise SpecError("nothing would end this sweep", field="limits", hint=hint)


def check_sweep_id(sweep_id: str) -> str:
    """Return ``sweep_id``, a run id that leaves room for a trial's number. Raises `SpecError`."""
    if not is_slug(sweep_id) or len(sweep_id) > LONGEST_ID:
        form = f"lower-case letters, digits and single inner dashes, at most {LONGEST_ID}"
        raise SpecError(f"{sweep_id!r} is not a sweep id: {form}", field="sweep_id")
    return sweep_id


def check_caps(limits: Limits, cap: Mapping[str, Any]) -> None:
    """Raise `SpecError` if a trial has no cap of its own in the currency of a limit, or if not even one trial fits."""
    for name in CURRENCIES:
        limit, own = getattr(limits, name), cap.get(name)
        if limit is not None and own is None:
            why = f"the sweep has this limit, so each trial needs its own {name}"
            raise SpecError(why, field=f"limits.{name}", hint=f"set {name} below [trial]")
        if limit is not None and own is not None and own > limit:
            raise SpecError(f"{limit:g} is less than the {own:g} of one trial", field=f"limits.{name}")


def _known(key: str, keys: Any, table: str) -> str:
    if key not in keys:
        where = f"{table}.{key}" if table else key
        raise SpecError("is not a field of a sweep", field=where, hint=near_or_all(key, [*keys]))
    return key


def _first(points: Any, space: Mapping[str, Dimension]) -> tuple[Params, ...]:
    if not isinstance(points, (list, tuple)):
        raise SpecError("must be a list of tables", field="first")
    for number, point in enumerate(points):
        for name, value in table_of(point, f"first[{number}]").items():
            where = f"first[{number}].{name}"
            if name not in space:
                raise SpecError("is not in [space]", field=where, hint=near_or_all(name, [*space]))
            if not space[name].contains(plain_number(value)):
                raise SpecError(f"{value!r} is not a value of [space]", field=where)
    return tuple({name: plain_number(value) for name, value in point.items()} for point in points)


def _amount(name: str, value: Any) -> float:
    if not (is_number(value) and 0 < value <= LARGEST):
        raise SpecError("must be a number above zero", field=name)
    return float(value)


_Check = Callable[[Any], Any]
_LIMITS: dict[str, _Check] = {
    "trials": partial(whole_number, where="limits.trials", least=1, most=MOST_TRIALS),
    "parallel": partial(whole_number, where="limits.parallel", least=1, most=1000),
    "max_cost": partial(_amount, "limits.max_cost"),
    "max_gpu_hours": partial(_amount, "limits.max_gpu_hours"),
    "max_runtime": partial(parse_duration, field="limits.max_runtime"),
    "failures": partial(whole_number, where="limits.failures", least=1),
}
_PRUNE: dict[str, _Check] = {
    "rule": partial(choice_of, choices=RULES, where="prune.rule"),
    "by": partial(text_of, where="prune.by"),
    "min": partial(_amount, "prune.min"),
    "factor": partial(whole_number, where="prune.factor", least=2),
    "peers": partial(whole_number, where="prune.peers", least=1),
}
