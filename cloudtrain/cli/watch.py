"""The live view of a run: what it shows, and when it looks.

The platform is asked for the run's state as often as `wait` asks it, and for nothing else. All else comes from the
store, where nodes write every 5 seconds, as `pull --follow` sees it. No attempt is started, none is stopped.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ..errors import CloudtrainError
from ..provider_api.protocol import AttemptInfo, Status
from ..report.curves import Curve, curves, is_log, spread
from ..report.markup import quantity
from ..runs.live_data import Node, Seen, plain
from ..runs.log_order import Line, attempt_key, line_label
from ..runs.outcome import first_line, shown, status_of
from ..runs.pull import EVERY
from ..runs.run import Run
from ..runs.summary import plural
from ..store.checkpoint import Checkpoint
from ..validate import duration
from . import format

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

__all__ = ["Picture", "Watch", "braille", "follow", "on_terminal"]

SHARE = 10
"""A look at the store that took a second is followed by so many without one: long runs have many files."""
LINES = 100
"""Last lines of each node that are kept: what the largest terminal shows."""
TOLD = 60.0
"""Seconds between two lines about steps where there is no terminal: a log is read later, by people."""
ATTEMPTS = 4
"""Attempts that have a line of their own, the newest ones."""
WIDEST = 500
"""Columns of the widest terminal that a chart is kept for."""
CHART = (3, 10)
"""Rows of the chart, at least and at most."""
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Bits of a braille character, U+2800 and up: four rows of two dots."""
RAMP = "_.,-=+*#"
"""Heights in ASCII, lowest first."""


# ----------------------------------------------------------------------------------------------------------- what it is


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What the metrics say by now: the newest attempt's last step, and the loss and the throughput, as name and value.

    ``points`` are those of the curve ``name`` over ``axis`` that count, as many as the widest terminal can show;
    ``log``: their heights are told by logarithms, as on the page of `report`.
    """

    step: float | None = None
    loss: tuple[str, float] | None = None
    throughput: tuple[str, float] | None = None
    name: str = ""
    axis: str = "step"
    log: bool = False
    points: Sequence[tuple[float, float]] = ()

    @property
    def newest(self) -> float | None:
        """The last step; the last row where no row tells a step."""
        return self.step if self.step is not None or not self.points else self.points[-1][0]


def measured(drawn: Sequence[Curve]) -> Measured:
    """Of all curves those few numbers; the first curve where there is no loss."""
    newest = max(
        (part.attempt for curve in drawn for part in curve.stretches if part.points), key=attempt_key, default=""
    )
    steps = [
        part.points[-1][0]
        for curve in drawn
        if curve.axis == "step"
        for part in curve.stretches
        if part.points and part.attempt == newest
    ]
    last = {curve.kind: (curve.name, history[-1][1]) for curve in reversed(drawn) if (history := curve.history)}
    shown = next((curve for curve in drawn if curve.points), None)
    if shown is None:
        return Measured()
    history = shown.history
    return Measured(
        step=max(steps, default=None),
        loss=last.get("loss"),
        throughput=last.get("throughput"),
        name=shown.name,
        axis=shown.axis,
        log=is_log(shown),
        points=spread(history, WIDEST, history[0][0], history[-1][0]),
    )


@dataclass(frozen=True, kw_only=True)
class Picture:
    """All that is known of a run at ``when`` (Unix seconds). ``trouble`` is why the store could not be read, if so.

    ``begun`` are the attempts whose nodes have said from where they began: the platform tells of one before.
    """

    run_id: str
    provider: str
    when: float
    status: Status = field(default_factory=lambda: Status(state="pending"))
    max_runtime: float = 0.0
    attempts: Sequence[AttemptInfo] = ()
    begun: frozenset[str] = frozenset()
    nodes: Sequence[Node] = ()
    checkpoint: Checkpoint | None = None
    measured: Measured = field(default_factory=Measured)
    lines: Mapping[int, Sequence[Line]] = field(default_factory=dict)
    trouble: str = ""
    cancelling: bool = False
    waiting: str = ""
    result: dict[str, Any] | None = None

    @property
    def attempt(self) -> str:
        """The newest attempt's number; empty before there is one."""
        return self.attempts[-1].number if self.attempts else ""

    def spent(self, now: float) -> float | None:
        """Seconds that all attempts have run; None before the first one has."""
        begun = [(a.started, a.ended) for a in self.attempts if a.started is not None]
        if not begun:
            return None
        ends = [*[started for started, _ in begun[1:]], now]
        return sum(
            max(0.0, (ended or follows) - started) for (started, ended), follows in zip(begun, ends, strict=True)
        )


class Watch:
    """Watches ``run``: ``on_picture`` is given all that is known of it, again and again. It must return soon."""

    def __init__(
        self,
        run: Run,
        *,
        clock: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
        on_picture: Callable[[Picture], None],
    ) -> None:
        self._run = Run(
            store=run.store,
            run_id=run.run_id,
            provider=run.provider,
            settings=run._settings,
            clock=clock,
            sleep=self._nap,
        )  # the same run, whose naps are ours: the store is looked at between two questions to the platform
        self._clock, self._sleep, self._on_picture = clock, sleep, on_picture
        self._seen = Seen(run.store, run.run_id)
        self._due = 0.0
        self._counts: dict[str, int] = {}
        self._measured = Measured()
        job = run.job.at(run.provider_name)
        self._expected = job.resources.instance_count
        ended = run.store.result(run.run_id)
        self.picture = Picture(
            run_id=run.run_id,
            provider=run.provider_name,
            when=clock(),
            status=status_of(ended) if ended else Status(state="pending"),
            max_runtime=float(job.max_runtime),
            result=shown(ended) if ended else None,
        )

    def watch(self) -> Picture:
        """The last picture, of a run that has ended. Raises what `Run.logs` raises when the platform is silent."""
        place, result = self._run.store, self._along()
        while self._run.store is not place:  # it has gone on to another one
            place = self._run.store
            self._seen, self._counts = Seen(place, self._run.run_id), {}
            self.picture = replace(self.picture, provider=self._run.provider_name)
            result = self._along()
        self._due = 0.0
        self._look()
        self.picture = replace(self.picture, result=result)
        self._on_picture(self.picture)
        return self.picture

    def _along(self) -> dict[str, Any]:
        """The result, kept by now, so nobody is asked again, unless another attempt may follow."""
        for status in self._run._along():
            self.picture = replace(self.picture, status=status, when=self._clock())
            if not status.final:
                self._look()
        return self._run.result()

    def _nap(self, seconds: float) -> None:
        until = self._clock() + seconds
        while (left := until - self._clock()) > 0:
            self._sleep(max(0.01, min(left, self._due - self._clock())) if self._due > self._clock() else 0.01)
            self._look()

    def _look(self) -> None:
        """At the store, if it is time; a store that does not answer keeps the picture as it is."""
        began = self._clock()
        if began < self._due:
            self._on_picture(self.picture)
            return
        try:
            self.picture = self._looked()
        except CloudtrainError as exc:  # whether it is lost for good, who asks for the state finds out
            self.picture = replace(self.picture, trouble=first_line(str(exc)), when=self._clock())
        now = self._clock()
        self._due = now + max(EVERY, SHARE * (now - began))
        self._on_picture(self.picture)

    def _looked(self) -> Picture:
        seen, before = self._seen, self.picture
        attempts = seen.infos(before.status.attempts)
        newest = attempts[-1].number if attempts else ""
        lines: dict[int, list[Line]] = {}
        for info in reversed(attempts[-2:]):  # until the newest one says something, the last words of the one before
            lines = lines or seen.lines(info.number, LINES)
        return replace(
            before,
            attempts=attempts,
            begun=seen.begun,
            nodes=seen.nodes(newest, self._expected) if newest else (),
            lines=lines,
            measured=self._measure(),
            checkpoint=self._run.checkpoint(),
            trouble="",
            waiting=self._run.waiting() if before.status.state == "running" else "",
            cancelling=before.cancelling or self._run.store.cancelled(self._run.run_id),
            when=self._clock(),
        )

    def _measure(self) -> Measured:
        """Anew only where rows have come: a long run has many."""
        rows = self._seen.metrics()
        counts = {attempt: len(some) for attempt, some in rows.items()}
        if counts != self._counts:
            self._counts, self._measured = counts, measured(curves(rows))
        return self._measured


# -------------------------------------------------------------------------------------------------------- on a terminal


def on_terminal(watch: Callable[[Callable[[Picture], None]], Watch], console: Console) -> Picture:
    """Draw every picture over the one before, on a screen of its own, and leave the last one on the terminal.

    ``watch`` makes the `Watch` of a function that takes pictures.
    """
    from rich.live import Live

    now = _Now(ascii_only=not console.encoding.startswith("utf"))
    looking = watch(now.take)
    now.take(looking.picture)
    try:
        with Live(
            now, console=console, screen=True, refresh_per_second=2, redirect_stdout=False, redirect_stderr=False
        ):
            return looking.watch()
    finally:
        console.print(now.drawn(console.width, max(12, console.height - 2)))


class _Now:
    """The newest picture. Drawn anew twice a second, by a thread of rich's: ages grow, a window changes its size."""

    def __init__(self, *, ascii_only: bool) -> None:
        self._ascii_only = ascii_only

    def take(self, picture: Picture) -> None:
        self._picture = picture

    def drawn(self, width: int, height: int) -> Any:
        return screen(self._picture, width=width, height=height, now=time.time(), ascii_only=self._ascii_only)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.drawn(options.max_width, options.max_height or console.height)


def screen(picture: Picture, *, width: int, height: int, now: float, ascii_only: bool = False) -> Any:
    """The picture as rich's Text, no wider and no higher than that."""
    from rich.text import Text

    head = [line for line in _head(picture, now) if line[0]]
    keep = max(1, min(len(head), height - 3 if height > 6 else height))
    rest = height - keep
    head = head[:keep]
    body: list[tuple[str, str]] = []
    if picture.measured.points and rest >= CHART[0] + 2:
        tall = min(CHART[1], max(CHART[0], rest // 2 - 1))
        body += _chart(picture.measured, width, tall, ascii_only)
    rest -= len(body)
    if rest >= 2 and (said := fair(picture.lines, rest - 1)):
        older = f" of attempt {said[0].attempt}" if said[0].attempt != picture.attempt else ""
        body.append((_rule(f"last lines{older}", width, ascii_only), "dim"))
        body += [(f"{line_label(line)}{line.text}", "") for line in said]
    text = Text(no_wrap=True, overflow="crop" if ascii_only else "ellipsis", end="")
    rows = (head + body)[:height]
    for i, (line, style) in enumerate(rows):
        row = Text(plain(line), style=style)
        row.truncate(width, overflow="crop" if ascii_only else "ellipsis")
        text.append_text(row)
        text.append("\n" if i < len(rows) - 1 else "")
    return text


def fair(lines: Mapping[int, Sequence[Line]], room: int) -> list[Line]:
    """The last lines of each node, as many of one as of another, ``room`` in all: two nodes' lines have no order."""
    taken = dict.fromkeys(lines, 0)
    while room > 0 and (more := [node for node in lines if taken[node] < len(lines[node])]):
        for node in more[:room]:
            taken[node] += 1
        room -= len(more)
    return [line for node, count in taken.items() if count for line in lines[node][-count:]]


COLOURS = {"succeeded": "bold green", "failed": "bold red", "running": "bold cyan"}


def _head(picture: Picture, now: float) -> Iterator[tuple[str, str]]:
    """Lines and their styles, the most important first."""
    status, result = picture.status, picture.result
    state = str(result["state"]) if result else status.state
    if result:
        now = picture.when  # it is over: nothing grows older
    words = [f"{picture.run_id}  {state}" + (" (cancelling)" if picture.cancelling and not status.final else "")]
    if result and result.get("category") and result["category"] != state:
        words[0] += f" ({result['category']})"
    if picture.attempt:
        words.append(f"attempt {picture.attempt}")
    words.append(f"on {picture.provider}")
    yield ", ".join(words), COLOURS.get(state, "bold yellow")
    yield (f"the store does not answer: {picture.trouble}" if picture.trouble else ""), "yellow"
    yield ("" if result else picture.waiting), "yellow"
    yield ", ".join(_progress(picture, now)), ""
    reason = str(result.get("reason") or "") if result else status.reason
    yield first_line(reason), "red" if state == "failed" else ""
    yield _checkpoint(picture.checkpoint, now, over=result is not None), ""
    yield _nodes(picture, now), ""
    for info in picture.attempts[-ATTEMPTS:] if len(picture.attempts) > 1 else ():
        yield _attempt(info, picture), "dim"


def _progress(picture: Picture, now: float) -> list[str]:
    seen = picture.measured
    words = [f"step {quantity(seen.step)}"] if seen.step is not None else []
    words += [f"{seen.loss[0]} {quantity(seen.loss[1])}"] if seen.loss else []
    spent = picture.spent(now)
    if spent is not None and picture.result:
        words.append(f"ran {duration(spent)}")
    elif spent is not None and picture.status.state == "running":
        words.append(f"{duration(picture.max_runtime - spent)} left of {duration(picture.max_runtime)}")
    words += [f"{seen.throughput[0]} {quantity(seen.throughput[1])}"] if seen.throughput else []
    return words


def _checkpoint(found: Checkpoint | None, now: float, *, over: bool) -> str:
    if found is None:
        return "checkpoint: none complete" + ("" if over else " yet")
    if over:
        return f"checkpoint: {found.name}"
    return f"checkpoint: {found.name}, {duration(now - found.committed)} ago"


def _nodes(picture: Picture, now: float) -> str:
    """Return ``2 of 2 nodes alive: 0 wrote 3s ago``; of many nodes those that have been silent for longest.

    All nodes were there when the attempt began, and the others end it when one is lost. So a node that has left no exit
    record is alive while the run runs, also one that prints nothing.
    """
    nodes = sorted(picture.nodes, key=lambda node: node.seen or 0.0)[:8] if len(picture.nodes) > 8 else picture.nodes
    if not nodes:
        return ""
    count, begun = len(picture.nodes), picture.attempt in picture.begun and picture.status.state == "running"
    said = []
    for node in nodes:
        if node.outcome or node.seen:
            said.append(f"{node.number} {node.outcome or f'wrote {duration(now - (node.seen or now))} ago'}")
        elif not begun:
            said.append(f"{node.number} nothing yet")
    if begun and (count > 1 or not said):
        alive = f"{sum(not node.outcome for node in picture.nodes)} of {plural(count, 'node')} alive"
        return ": ".join(filter(None, [alive + (", longest silent" if count > len(nodes) else ""), ", ".join(said)]))
    which = f"longest silent of {count} nodes" if count > len(nodes) else "nodes"
    return f"{which if count > 1 else 'node'}: {', '.join(said)}"


def _starts(info: AttemptInfo, picture: Picture) -> bool:
    """Whether it is not known yet from where an attempt goes on."""
    newest = info is picture.attempts[-1] and picture.result is None
    return newest and not info.resumed_from and info.number not in picture.begun


def _attempt(info: AttemptInfo, picture: Picture) -> str:
    newest = info is picture.attempts[-1]
    start = "starting" if _starts(info, picture) else "from the beginning"
    words = [f"resumed from {info.resumed_from}" if info.resumed_from else start]
    words += [info.reason or ("" if newest else "ended")]
    lost = info.lost or {}
    if (steps := lost.get("steps")) is not None:
        words.append(f"lost {quantity(steps)} steps")
    return f"attempt {info.number}: {', '.join(filter(None, words))}"


def _rule(title: str, width: int, ascii_only: bool) -> str:
    line = "-" if ascii_only else "─"
    return f"{line * 2} {title} ".ljust(width, line)


def _chart(curve: Measured, width: int, height: int, ascii_only: bool) -> list[tuple[str, str]]:
    """The curve that counts, its highest and lowest value at the left, its first and last step below its name."""
    points = curve.points
    low, high = min(y for _, y in points), max(y for _, y in points)
    labels = [quantity(high), *[""] * (height - 2), quantity(low)]
    left = max(map(len, labels))
    room = max(4, width - left - 1)
    heights = [(x, math.log10(y)) for x, y in points] if curve.log else points
    drawn = ramp(heights, room) if ascii_only else braille(heights, room, height)
    if ascii_only:
        labels = [f"{quantity(low)}..{quantity(high)}"]
        drawn = [drawn[0][: max(4, width - len(labels[0]) - 1)]]
        left = len(labels[0])
    name = f"{curve.name} (logarithmic)" if curve.log else curve.name
    span = f"{name}, {curve.axis} {quantity(points[0][0])} to {quantity(points[-1][0])}"
    rows = [f"{label:>{left}} {row}" for label, row in zip(labels, drawn, strict=True)]
    return [(_rule(span, width, ascii_only), "dim"), *[(row, "cyan") for row in rows]]


def braille(points: Sequence[tuple[float, float]], width: int, height: int) -> list[str]:
    """A chart of points, by x, in ``height`` rows of ``width`` characters of two by four dots."""
    cells = [[0] * width for _ in range(height)]
    (first, _), (last, _) = points[0], points[-1]
    low, high = min(y for _, y in points), max(y for _, y in points)

    def spot(x: float, y: float) -> tuple[int, int]:
        across = (x / 2 - first / 2) / (last / 2 - first / 2) if last > first else 0.0
        up = (y / 2 - low / 2) / (high / 2 - low / 2) if high > low else 0.5
        return round(across * (2 * width - 1)), round((1 - up) * (4 * height - 1))

    before: tuple[int, int] | None = None
    for x, y in spread(points, 2 * width, first, last):
        here = spot(x, y)
        for column, row in _between(before or here, here):
            cells[row // 4][column // 2] |= DOTS[row % 4][column % 2]
        before = here
    return ["".join(chr(0x2800 + cell) for cell in row) for row in cells]


def _between(start: tuple[int, int], end: tuple[int, int]) -> Iterator[tuple[int, int]]:
    """The dots of a straight line."""
    count = max(abs(end[0] - start[0]), abs(end[1] - start[1]), 1)
    for i in range(count + 1):
        yield round(start[0] + (end[0] - start[0]) * i / count), round(start[1] + (end[1] - start[1]) * i / count)


def ramp(points: Sequence[tuple[float, float]], width: int) -> list[str]:
    """The same in one row of ASCII, for terminals that know nothing else."""
    low, high = min(y for _, y in points), max(y for _, y in points)
    (first, _), (last, _) = points[0], points[-1]
    columns: dict[int, float] = {}
    for x, y in points:
        columns[int((x - first) / (last - first) * (width - 1)) if last > first else 0] = y
    heights = [RAMP[int((y - low) / (high - low) * (len(RAMP) - 1)) if high > low else 0] for y in columns.values()]
    return ["".join(heights)]


# ------------------------------------------------------------------------------------------------------ on no terminal


def follow(watch: Callable[[Callable[[Picture], None]], Watch], say: Callable[[str], None]) -> Picture:
    """One plain line for each change: of state, attempt, checkpoint and, once a minute, step."""
    told = _Told(say)
    looking = watch(told)
    last = looking.watch()
    told.end(last)
    return last


class _Told:
    """What has been said of the run so far."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say, self._state = say, format.Changes(lambda text: say(plain(text)))
        self._attempts: set[str] = set()
        self._cancelling = False
        self._waiting = ""
        self._checkpoint = ""
        self._step: float | None = None
        self._step_at = float("-inf")

    def __call__(self, picture: Picture) -> None:
        self._state(picture.status)
        for info in picture.attempts:
            if len(picture.attempts) > 1 and _starts(info, picture):
                continue  # until it can be said
            if info.number not in self._attempts and len(picture.attempts) > 1:
                self._say(plain(_attempt(info, picture)))
            self._attempts.add(info.number)
        if picture.waiting and picture.waiting != self._waiting:
            self._say(plain(picture.waiting))
        self._waiting = picture.waiting
        if picture.cancelling and not picture.status.final and not self._cancelling:
            self._say("cancelling")
            self._cancelling = True
        found = picture.checkpoint
        if found is not None and found.key != self._checkpoint:
            self._say(plain(f"checkpoint {found.name} is complete"))
            self._checkpoint = found.key
        if picture.measured.newest != self._step and picture.when - self._step_at >= TOLD:
            self._tell_step(picture)

    def _tell_step(self, picture: Picture) -> None:
        if picture.measured.newest is not None:
            self._say(plain(", ".join(_progress(picture, picture.when))))
        self._step, self._step_at = picture.measured.newest, picture.when

    def end(self, picture: Picture) -> None:
        """The run is over."""
        if picture.measured.newest != self._step:
            self._tell_step(picture)
        result = picture.result or {}
        self._say(plain(format.state_line({**result, "reason": ""})))
