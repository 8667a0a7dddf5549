"""The search space of a sweep: ranges and choices by hyperparameter, random points and grids. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from ...errors import SpecError
from ...validate import is_number, plain_number, table_of

Params = dict[str, Any]
RANGE_KEYS = ("low", "high", "log", "step")
_NAME = re.compile(r"[^\s=-][^\s=]*")
LARGEST = 1e300
"""Largest bound of a range."""
MOST_GRID = 100_000
"""Most points of a grid."""
MOST_POINTS = 10**15
"""Most points of a range with a step: each is a number of its own in a float."""


@dataclass(frozen=True, kw_only=True)
class Range:
    """Numbers from ``low`` to ``high``, both included. ``step`` 0 means every number; ``whole`` means integers."""

    low: float
    high: float
    log: bool = False
    step: float = 0
    whole: bool = False

    def contains(self, value: Any) -> bool:
        """Return whether ``value`` is a number of the range, on a step if it has one. Optuna takes no other."""
        fits = is_number(value) and (not self.whole or isinstance(value, int))
        if not fits or not self.low <= value <= self.high:
            return False
        steps = (value - self.low) / (self.step or 1)
        return not self.step or abs(steps - round(steps)) < 1e-8

    def draw(self, random: Random) -> float:
        """Return a random number of the range."""
        if self.log and self.whole:
            return min(self.high, max(self.low, round(_log_uniform(random, self.low - 0.5, self.high + 0.5))))
        if self.log:
            return min(self.high, max(self.low, _log_uniform(random, self.low, self.high)))
        if self.whole or self.step:
            return self.point(random.randrange(self.count))
        return random.uniform(self.low, self.high)

    @property
    def count(self) -> int:
        """The number of points of a range with a step; a whole range has the step 1 by default."""
        return int((self.high - self.low) / (self.step or 1) + 1e-9) + 1

    def point(self, number: int) -> float:
        """Return point ``number`` of a range with a step, from 0 on, ascending."""
        point = self.low + number * (self.step or 1)
        return point if self.whole else round(point, 12)


@dataclass(frozen=True, kw_only=True)
class Choices:
    """A list of values without an order, with the methods of a `Range`."""

    values: tuple[Any, ...]

    def contains(self, value: Any) -> bool:
        return any(value == each and type(value) is type(each) for each in self.values)

    def draw(self, random: Random) -> Any:
        return self.point(random.randrange(self.count))

    @property
    def count(self) -> int:
        return len(self.values)

    def point(self, number: int) -> Any:
        return self.values[number]


Dimension = Range | Choices
Space = Mapping[str, Dimension]


def _log_uniform(random: Random, low: float, high: float) -> float:
    return math.exp(random.uniform(math.log(low), math.log(high)))


def parse_space(table: Any) -> dict[str, Dimension]:
    """Return the dimensions of ``[space]`` by hyperparameter. Raises `SpecError` with the dotted field."""
    found = {}
    for name, value in table_of(table, "space").items():
        if not _NAME.fullmatch(name):
            raise SpecError(f"{name!r} is not a hyperparameter's name", field="space", hint="for example: lr, model.lr")
        found[name] = _dimension(value, f"space.{name}")
    if not found:
        raise SpecError("must name at least one hyperparameter", field="space", hint="lr = { low = 1e-5, high = 0.1 }")
    return found


def _dimension(value: Any, where: str) -> Dimension:
    if isinstance(value, Sequence) and not isinstance(value, str):
        known = (isinstance(item, (str, bool)) or (is_number(item) and abs(item) < math.inf) for item in value)
        if isinstance(value, tuple) and (ends := [item for item in value if is_number(item)]):  # a range in skopt
            hint = f"for choices write {[*value]}, for a range {{'low': {min(ends)}, 'high': {max(ends)}}}"
            raise SpecError("a tuple may mean choices or a range", field=where, hint=hint)
        if not value or not all(known):
            raise SpecError("must be a list of at least one text, finite number or boolean", field=where)
        if len({(type(item), item) for item in value}) < len(value):
            raise SpecError("has one value twice", field=where)
        return Choices(values=tuple(map(plain_number, value)))
    table = table_of(value, where)
    for key in table:
        if key not in RANGE_KEYS:
            hint = "write { low = 1, high = 8, step = 1, log = false }"
            raise SpecError(f"has no key {key!r}", field=where, hint=hint)
    numbers = {key: _number(table.get(key), f"{where}.{key}") for key in ("low", "high")}
    low, high, log = numbers["low"], numbers["high"], table.get("log", False)
    step = _number(table["step"], f"{where}.step") if "step" in table else 0
    if not isinstance(log, bool):
        raise SpecError("must be true or false", field=f"{where}.log", hint="write log = true")
    if low >= high:
        raise SpecError(f"must be below high, {high:g}", field=f"{where}.low")
    if log and low <= 0:
        raise SpecError("must be above zero with log = true", field=f"{where}.low", hint="low = 1e-6")
    if "step" in table and (step <= 0 or log):
        raise SpecError("must be above zero, and not with log = true", field=f"{where}.step", hint="remove step or log")
    if step and (high - low) / step > MOST_POINTS:
        raise SpecError(f"{step:g} is too small for a range from {low:g} to {high:g}", field=f"{where}.step")
    whole = all(isinstance(number, int) for number in (low, high, step))
    return Range(low=low, high=high, log=log, step=step, whole=whole)


def _number(value: Any, where: str) -> float:
    if not (is_number(value) and abs(value) <= LARGEST):  # also for NaN
        raise SpecError("must be a number", field=where, hint="{ low = 1e-5, high = 0.1, log = true }")
    number: float = plain_number(value)
    return number


def random_point(space: Space, seed: int, number: int) -> Params:
    """Return the random parameters of trial ``number``. The same seed and number give the same parameters."""
    random = Random(f"{seed}/{number}")
    return {name: space[name].draw(random) for name in sorted(space)}


def grid_size(space: Space) -> int:
    """Return the number of points. Raises `SpecError` for a range without a step, and for too many points."""
    size = 1
    for name, dimension in space.items():
        if isinstance(dimension, Range) and (dimension.log or not (dimension.step or dimension.whole)):
            why, hint = "a grid needs a step or a list of values", f"{name} = [0.001, 0.01, 0.1]"
            raise SpecError(why, field=f"space.{name}", hint=hint)
        size *= dimension.count
        if size > MOST_GRID:
            raise SpecError(f"the grid has more than {MOST_GRID:,} points", field="space", hint="use random or tpe")
    return size


def grid_point(space: Space, number: int) -> Params | None:
    """Return point ``number`` of the grid; the last name of the space changes fastest. None after the last point."""
    found = {}
    for name in reversed([*space]):
        number, at = divmod(number, space[name].count)
        found[name] = space[name].point(at)
    return None if number else {name: found[name] for name in space}
