"""Drills: planned losses of a rehearsed run's machines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import SpecError
from ..validate import parse_duration

KINDS = ("preempt", "kill", "shortage")
CHECKPOINT = "checkpoint"
_FORM = "must be node=NUMBER,after=TIME, as in node=1,after=30s, or after=checkpoint"


@dataclass(frozen=True, kw_only=True)
class Injection:
    """Planned loss of one node. ``preempt``: the platform takes the machine back (notice, grace, end). ``kill``: it is
    gone at once, without notice. ``shortage``: the machine is taken back, and from then on there are machines for the
    nodes before it only. ``after`` is seconds of running time, summed over starts. None waits for a complete
    checkpoint."""

    kind: str
    node: int
    after: float | None

    @classmethod
    def parse(cls, kind: str, text: str, *, nodes: int) -> Injection:
        """Parse ``node=1,after=30s`` for a job of ``nodes`` nodes. Raises `SpecError`."""
        pairs = [part.partition("=") for part in text.split(",")]
        given = {name.strip(): value.strip() for name, _, value in pairs}
        form = sorted(given) == ["after", "node"] and len(pairs) == 2 and given["node"].isdecimal()
        if not form or not (given["after"] == CHECKPOINT or given["after"][:1].isdigit()):
            raise SpecError(f"{_FORM}, not {text!r}", field=kind)
        if int(given["node"]) >= nodes:
            there = f"nodes are 0 to {nodes - 1}" if nodes > 1 else "the only node is 0"
            raise SpecError(f"there is no node {given['node']}: {there}", field=kind)
        if kind == "shortage" and not int(given["node"]):
            raise SpecError("leaves no machine, as node 0 is the first", field=kind, hint="name another node")
        timed = given["after"] != CHECKPOINT
        after = float(parse_duration(given["after"], field=kind)) if timed else None
        return cls(kind=kind, node=int(given["node"]), after=after)

    @property
    def words(self) -> str:
        """Return the drill as a command line option."""
        return f"--{self.kind} node={self.node},after={CHECKPOINT if self.after is None else f'{self.after:g}s'}"


class InjectionPlan:
    """Drills of one run, each done once."""

    def __init__(self, drills: Iterable[Mapping[str, Any]]) -> None:
        self._left = sorted((Injection(**item) for item in drills), key=lambda drill: drill.after or 0.0)

    def due(self, seconds: float, saved: Callable[[], bool]) -> Injection | None:
        """Return the next drill due after ``seconds`` of running. ``saved`` returns True for a complete checkpoint."""
        for drill in self._left:
            if saved() if drill.after is None else drill.after <= seconds:
                self._left.remove(drill)
                return drill
        return None

    def skip(self, seconds: float) -> None:
        """Drop the drills that were due within the first ``seconds`` of running, which another supervisor has done."""
        self._left = [drill for drill in self._left if drill.after is None or drill.after > seconds]

    @property
    def left(self) -> Sequence[Injection]:
        """Return the drills that are not due yet."""
        return tuple(self._left)
