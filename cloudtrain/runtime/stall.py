"""Detect a run that has gone silent, and find out where each of its ranks is.

Every node sends node 0 its signs of life. After too long a silence node 0 lets every rank of every node print its
stacks. Each node reads its ranks' main threads from them and reports to node 0. Node 0 names the rank that is elsewhere
than the others: in a deadlocked collective that is the rank that never came.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .cause import Failure
from .idle import IdleGpus
from .launch import Ranks
from .nccl import Recorder
from .timings import TIMINGS

KINDS = ("alive", "stacks", "where", "gpu")  # messages of the node link for this module
NAMED = 3  # most places in a message, the rarest, and one more if it is the last; most ranks of one place by number

Message = dict[str, Any]

_THREAD = re.compile(r"(?:Current thread|Thread) 0x[0-9a-f]+.*\(most recent call first\):$")
_FRAME = re.compile(r'  File "(.*)", line (\d+|\?\?\?) in (.*)$')
_ESCAPED = re.compile(r"\\(x[0-9a-f]{2}|u[0-9a-f]{4}|U[0-9a-f]{8})")
_PACKAGES = re.compile(r".*/(?:site|dist)-packages/")
_FOREIGN = re.compile(r"torch/|.*/lib(?:64)?/python3\.\d+/|.*\.(?:zip|pyz)/|<")
"""Files of torch, Python or ourselves, after the path to a folder of packages is cut off."""


# ------------------------------------------------------------------------------------------------- where one rank is


@dataclass(frozen=True)
class StackPosition:
    """The place of a rank's main thread: the user's own line, and the innermost function. ``why`` if it is unknown."""

    node: int
    rank: int
    file: str | None = None
    line: int | None = None
    function: str = ""
    why: str = ""

    @property
    def where(self) -> tuple[str | None, int | None, str, str]:
        """Return the facts that ranks in the same place have in common."""
        return self.file, self.line, self.function, self.why


Frame = tuple[str, int | None, str]


def frames_of(lines: Iterable[str], bottom: str) -> tuple[list[Frame], bool]:
    """Return the main thread's frames, innermost first, in faulthandler's output so far, and whether that is all.

    The main thread is the one that began in the file ``bottom``, else the last one. The others come before it; of more
    than a hundred the last are left out. Its first line may follow a progress bar without an end of line.
    """
    frames: list[Frame] = []
    for line in lines:
        if _THREAD.search(line) or line == "...":
            frames = []
        elif found := _FRAME.match(line):
            file, number, function = (_ESCAPED.sub(_unescaped, part) for part in found.groups())
            frames.append((file, int(number) if number.isdigit() else None, function))
            if file == bottom and function == "<module>":
                return frames, True
    return frames, False


def _unescaped(found: re.Match[str]) -> str:
    character = chr(int(found[1][1:], 16))
    return character if character.isprintable() else found[0]


def innermost_position(node: int, rank: int, frames: Sequence[Frame], *, code: Path, bottom: str) -> StackPosition:
    """Return the innermost frame below ``code``; else the innermost not of Python or torch; else the innermost."""
    if not frames:
        return StackPosition(node, rank, why="did not answer")
    theirs = [frame for frame in frames if frame[0] != bottom] or frames
    own = [frame for frame in theirs if frame[0].startswith(f"{code}/")]
    other = [frame for frame in theirs if not _FOREIGN.match(_known_as(frame[0], code))]
    file, line, _ = (own or other or theirs)[0]
    return StackPosition(node, rank, _known_as(file, code), line, frames[0][2])


def _known_as(file: str, code: Path) -> str:
    """Return a path as the user knows it: below the code, or below a folder of packages."""
    return _PACKAGES.sub("", file.removeprefix(f"{code}/"))


class Look:
    """One look at the ranks of this node: making it lets them print their stacks and dump their flight recorders."""

    def __init__(self, ranks: Ranks, recorder: Recorder, *, node: int, code: Path, bottom: Path) -> None:
        self._ranks, self._recorder = ranks, recorder
        self._node, self._code, self._bottom = node, code, str(bottom)
        self._lines = ranks.dump_stacks()
        recorder.trigger()
        self._until = time.monotonic() + TIMINGS.stall_look

    def over(self) -> bool:
        """Return whether every rank has answered, or will not."""
        whole = all(frames_of(list(lines), self._bottom)[1] for lines in self._lines.values())
        return (whole and self._recorder.answered()) or time.monotonic() > self._until

    def places(self) -> list[StackPosition]:
        """Return the place of every rank that has not ended."""
        found = []
        for local, lines in sorted(self._lines.items()):
            rank, (frames, _) = self._ranks.first_rank + local, frames_of(list(lines), self._bottom)
            if local in self._ranks.pids:
                place = innermost_position(self._node, rank, frames, code=self._code, bottom=self._bottom)
            else:
                place = StackPosition(self._node, rank, why="has not started")
            found.append(place)
        return found


# ---------------------------------------------------------------------------------------------------- where all are


def _groups(places: Iterable[StackPosition]) -> list[list[StackPosition]]:
    """Return the places in groups of equal ones, the rarest first."""
    found: dict[Any, list[StackPosition]] = {}
    for place in sorted(places, key=lambda place: place.rank):
        found.setdefault(place.where, []).append(place)
    return sorted(found.values(), key=len)  # stable: of equal sizes, the lowest rank first


def culprit(places: Sequence[StackPosition]) -> StackPosition | None:
    """Return the one rank that is alone in its place while all others share one, or that is the only one."""
    groups = _groups(places)
    if len(places) == 1 or (len(groups) == 2 and len(groups[0]) == 1 < len(groups[1])):
        return groups[0][0]
    return None


def describe_positions(places: Sequence[StackPosition]) -> str:
    """Return ``rank 3 on node 1 is at train.py:40 (load_batch), the other 3 are at train.py:52 (all_reduce)``."""
    groups = _groups(places)
    named, rest = (groups, []) if len(groups) <= NAMED + 1 else (groups[:NAMED], groups[NAMED:])
    parts = [_group(group, others=i > 0, last=not rest and i == len(named) - 1) for i, group in enumerate(named)]
    if rest:
        parts.append(f"the other {sum(map(len, rest))} are at {len(rest)} other lines")
    return ", ".join(parts)


def _group(group: Sequence[StackPosition], *, others: bool, last: bool) -> str:
    count, first = len(group), group[0]
    if count == 1:
        who = f"rank {first.rank} on node {first.node}"
    elif not last:
        numbers = ", ".join(str(place.rank) for place in group)
        who = f"ranks {numbers}" if count <= NAMED else f"{count} ranks"
    else:
        who = f"the other {count}" if others else f"all {count} ranks"
    if first.why:
        return f"{who} {first.why if count == 1 else first.why.replace('has ', 'have ', 1)}"
    line = "" if first.line is None else f":{first.line}"
    return f"{who} {'is' if count == 1 else 'are'} at {first.file}{line} ({first.function})"


# ------------------------------------------------------------------------------------------------- one node's part


class Stall:
    """One node's part. ``send(node, message)`` reaches a node, our own too; ``peers()`` are the live ones.

    ``last()`` is when this node last showed a sign of life (monotonic seconds). ``look()`` makes a `Look`, None if no
    rank was started. ``idle`` takes the samples of GPUs, and ``has_metrics()`` is whether there is a row yet. Call
    `take` with the messages of `KINDS`, and `tick` a few times a second.
    """

    def __init__(
        self,
        *,
        node: int,
        processes: int,
        limit: float,
        send: Callable[[int, Message], None],
        peers: Callable[[], set[int]],
        last: Callable[[], float],
        look: Callable[[], Look | None],
        idle: IdleGpus | None = None,
        has_metrics: Callable[[], bool] = lambda: True,
    ) -> None:
        self._node, self._processes, self._limit = node, processes, limit
        self._send, self._peers, self._last, self._new_look = send, peers, last, look
        self._alive = self._reported = time.monotonic()  # the wait for peers before this is no stall
        self._idle, self._has_metrics, self._why = idle, has_metrics, ""
        self._look: Look | None = None
        self._asked: tuple[float, set[int]] | None = None
        self._answers: dict[int, list[StackPosition]] = {}

    def take(self, sender: int, message: Mapping[str, Any]) -> None:
        """Take a message of `KINDS` from node ``sender``."""
        if message["t"] == "alive":
            self._alive = max(self._alive, time.monotonic() - message["age"])
        elif message["t"] == "gpu":
            if self._idle is not None:
                self._idle.take(sender, message["used"], time.monotonic())
        elif message["t"] == "stacks":
            self._look = self._new_look()
            if self._look is None:
                self._send(0, {"t": "where", "ranks": []})
        else:
            self._answers[sender] = [StackPosition(**place) for place in message["ranks"]]

    def drop_idle(self) -> None:
        """Drop the rule of idle GPUs, and a question that it has asked: the ranks of this node have ended."""
        self._idle = self._asked = None

    def tick(self, *, over: bool) -> Failure | None:
        """Do what is due. On node 0, return the failure of a stalled run, unless it is ``over`` for another cause."""
        now = time.monotonic()
        self._tell(now)
        if self._look is not None and self._look.over():
            self._send(0, {"t": "where", "ranks": [asdict(place) for place in self._look.places()]})
            self._look = None
        if self._node != 0 or over:
            return None
        if self._asked is None:
            self._why = self._reason(now)
            if self._why:
                self._asked = now, self._peers()
                for node in sorted(self._asked[1]):
                    self._send(node, {"t": "stacks"})
            return None
        since, asked = self._asked
        if asked <= set(self._answers) or now - since > TIMINGS.stacks:
            return self._failure(asked)
        return None

    def _reason(self, now: float) -> str:
        if self._limit and now - self._alive > self._limit + TIMINGS.alive_late:
            return f"no line, metric or checkpoint from any rank for {self._limit:g} s"
        return self._idle.reason(now, has_metrics=self._has_metrics()) if self._idle is not None else ""

    def _tell(self, now: float) -> None:
        last = self._last()
        if last > self._reported and now - self._reported >= min(TIMINGS.alive, self._limit / 4 or TIMINGS.alive):
            self._reported = now
            self._send(0, {"t": "alive", "age": max(0.0, now - last)})

    def _failure(self, asked: set[int]) -> Failure:
        places = [place for node in asked & set(self._answers) for place in self._answers[node]]
        for node in asked - set(self._answers):
            ranks = range(node * self._processes, (node + 1) * self._processes)
            places += [StackPosition(node, rank, why="did not answer") for rank in ranks]
        alone = culprit(places)
        return Failure(
            kind="stalled",
            node=0 if alone is None else alone.node,
            rank=None if alone is None else alone.rank,
            file=None if alone is None else alone.file,
            line=None if alone is None else alone.line,
            time_ns=time.time_ns(),
            exception="; ".join(filter(None, (self._why, describe_positions(places)))),
            category="stalled",
        )
