"""Drills: a machine of a rehearsed run that is taken back or lost, on purpose and on time."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import SpecError
from ..validate import parse_duration

__all__ = ["KINDS", "Drill", "Drills"]

KINDS = ("preempt", "kill")
CHECKPOINT = "checkpoint"
_FORM = "must be node=NUMBER,after=TIME, as in node=1,after=30s, or after=checkpoint"


@dataclass(frozen=True, kw_only=True)
class Drill:
    """``kind`` is ``preempt`` (the platform takes the machine back: notice, grace, end) or ``kill`` (it is gone at
    once, without a word); ``after`` is seconds of running time, summed over starts, or None: once there is a complete
    checkpoint."""

    kind: str
    node: int
    after: float | None

    @classmethod
    def parse(cls, kind: str, text: str, *, nodes: int) -> Drill:
        """Of ``node=1,after=30s``, for a job of ``nodes`` nodes. Raises `SpecError`."""
        pairs = [part.partition("=") for part in text.split(",")]
        given = {name.strip(): value.strip() for name, _, value in pairs}
        if sorted(given) != ["after", "node"] or len(pairs) != 2 or not given["node"].isdecimal():
            raise SpecError(f"{_FORM}, not {text!r}", field=kind)
        if int(given["node"]) >= nodes:
            raise SpecError(f"there is no node {given['node']}: the job's are 0 to {nodes - 1}", field=kind)
        timed = given["after"] != CHECKPOINT
        after = float(parse_duration(given["after"], field=kind)) if timed else None
        return cls(kind=kind, node=int(given["node"]), after=after)

    @property
    def words(self) -> str:
        """As the command line has it."""
        return f"--{self.kind} node={self.node},after={CHECKPOINT if self.after is None else f'{self.after:g}s'}"


class Drills:
    """Those of one run, each done once."""

    def __init__(self, told: Iterable[Mapping[str, Any]]) -> None:
        self._left = sorted((Drill(**item) for item in told), key=lambda drill: drill.after or 0.0)

    def due(self, seconds: float, saved: Callable[[], bool]) -> Drill | None:
        """The next one whose time has come, after ``seconds`` of running; ``saved`` tells of a complete checkpoint."""
        for drill in self._left:
            if saved() if drill.after is None else drill.after <= seconds:
                self._left.remove(drill)
                return drill
        return None

    @property
    def left(self) -> Sequence[Drill]:
        """Those whose time has not come."""
        return tuple(self._left)

    @staticmethod
    def told(drills: Iterable[Drill]) -> list[dict[str, Any]]:
        """As a request holds them."""
        return [dataclasses.asdict(drill) for drill in drills]
