"""The live view of a run: what it shows, and when it looks.

It asks the platform for the run's state as often as `wait` does, and for nothing else. All else comes from the store,
where nodes write every 5 seconds. It starts no attempt and stops none.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ..errors import CloudtrainError
from ..provider_api.node import attempt_key
from ..provider_api.protocol import AttemptInfo, Status
from ..report.curves import Curve, by_column, curves, is_log, spread
from ..report.live_data import LiveRunReader, NodeData, printable
from ..report.markup import quantity
from ..report.usage import usage_text
from ..runs.log_order import Line, line_label
from ..runs.outcome import first_line, public_result, status_of
from ..runs.run import Run
from ..runs.summary import plural
from ..runtime.checkpoint_model import Checkpoint
from ..storage.timings import CLIENT_TIMINGS
from ..validate import duration
from . import format

if TYPE_CHECKING:
    from rich.console import Console

SHARE = 10  # a look at the store that took a second is followed by so many without one: long runs have many files
LINES = 100  # last lines of each node that are kept: the largest terminal shows as many
STEP_EVERY = 60.0  # seconds between two lines about steps without a terminal
ATTEMPTS = 4  # the newest attempts have a line of their own
WIDEST = 500  # columns of the widest terminal that a curve is kept for
LABEL = len("attempt 0.0")  # columns of the names of facts, at least
HEIGHTS = {True: "_.,-=+*#", False: "▁▂▃▄▅▆▇█"}  # of a sparkline, lowest first: in ASCII, and in Unicode
COLOURS = {"succeeded": "bold green", "failed": "bold red", "running": "bold cyan"}


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The newest attempt's last step, the loss and the throughput (name and value), and the `spread` curve ``name``."""

    step: float | None = None
    loss: tuple[str, float] | None = None
    throughput: tuple[str, float] | None = None
    name: str = ""
    axis: str = "step"
    log: bool = False
    points: Sequence[tuple[float, float]] = ()

    @property
    def newest(self) -> float | None:
        """Return the last step; the last row where no row has a step."""
        return self.step if self.step is not None or not self.points else self.points[-1][0]


def measured(drawn: Sequence[Curve]) -> Measured:
    """Return those few numbers of all curves; the points are the first curve's."""
    curve = next((curve for curve in drawn if curve.points), None)
    if curve is None:
        return Measured()
    parts = [part for curve in drawn for part in curve.stretches if part.points]
    newest = max((part.attempt for part in parts), key=attempt_key)
    steps = [part.points[-1][0] for part in parts if curve.axis == "step" and part.attempt == newest]
    last = {found.kind: (found.name, found.history[-1][1]) for found in reversed(drawn) if found.history}
    history = curve.history
    return Measured(
        step=max(steps, default=None),
        loss=last.get("loss"),
        throughput=last.get("throughput"),
        name=curve.name,
        axis=curve.axis,
        log=is_log(curve),
        points=spread(history, WIDEST, history[0][0], history[-1][0]),
    )


@dataclass(frozen=True, kw_only=True)
class Picture:
    """The state of a run at ``when`` (Unix seconds). ``trouble`` is the error of reading the store.

    ``begun`` are the attempts whose nodes have recorded where they began: the platform knows an attempt before that.
    """

    run_id: str
    provider: str
    when: float
    status: Status = field(default_factory=lambda: Status(state="pending"))
    max_runtime: float = 0.0
    attempts: Sequence[AttemptInfo] = ()
    begun: frozenset[str] = frozenset()
    nodes: Sequence[NodeData] = ()
    checkpoint: Checkpoint | None = None
    measured: Measured = field(default_factory=Measured)
    usage: Mapping[str, float] = field(default_factory=dict)
    lines: Mapping[int, Sequence[Line]] = field(default_factory=dict)
    trouble: str = ""
    cancelling: bool = False
    waiting: str = ""
    result: dict[str, Any] | None = None

    @property
    def attempt(self) -> str:
        """Return the newest attempt's number, or an empty text."""
        return self.attempts[-1].number if self.attempts else ""

    def spent(self, now: float) -> float | None:
        """Return the seconds that all attempts have run; None before the first one has."""
        begun = [(info.started, info.ended) for info in self.attempts if info.started is not None]
        ends = [*[started for started, _ in begun[1:]], now]
        ran = [max(0.0, (ended or follows) - started) for (started, ended), follows in zip(begun, ends, strict=False)]
        return sum(ran) if ran else None


class Watch:
    """A watcher of ``run`` that calls ``on_picture`` with each new `Picture`; the call must return soon."""

    def __init__(
        self,
        run: Run,
        *,
        clock: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
        on_picture: Callable[[Picture], None] = lambda picture: None,
    ) -> None:
        self._run = Run(
            store=run.store,
            run_id=run.run_id,
            provider=run.provider,
            settings=run._settings,
            clock=clock,
            sleep=self._nap,
        )  # the same run, but between two questions to the platform it looks at the store
        self._clock, self._sleep, self._on_picture = clock, sleep, on_picture
        self._ticks = self._run._ticks  # of waits: a clock of the machine may step
        self._seen = LiveRunReader(run.store, run.run_id)
        self._due = 0.0
        self._counts: dict[str, int] = {}
        self._measured = Measured()
        job = run.job.at(run.provider_name)
        ended = run.store.result(run.run_id)
        self.picture = Picture(
            run_id=run.run_id,
            provider=run.provider_name,
            when=clock(),
            status=status_of(ended) if ended else Status(state="pending"),
            max_runtime=float(job.max_runtime),
            result=public_result(ended) if ended else None,
        )

    def watch(self) -> Picture:
        """Return the last picture, of a run that has ended. Raises `LostContactError` if the platform is silent."""
        place = None
        while place is not self._run.store:  # again if the run has moved to another place
            if place is not None:
                self._seen, self._counts = LiveRunReader(self._run.store, self._run.run_id), {}
                self.picture = replace(self.picture, provider=self._run.provider_name)
            place = self._run.store
            for status in self._run._statuses_until_final():
                self.picture = replace(self.picture, status=status, when=self._clock())
                if not status.final:
                    self._look()
            result = self._run.result()
        self._due = 0.0
        self._look()
        self.picture = replace(self.picture, result=result)
        self._on_picture(self.picture)
        return self.picture

    def _nap(self, seconds: float) -> None:
        until = self._ticks() + seconds
        while (left := until - self._ticks()) > 0:
            self._sleep(max(0.01, min(left, self._due - self._ticks())) if self._due > self._ticks() else 0.01)
            self._look()

    def _look(self) -> None:
        """Look at the store if it is time. If the store does not answer, the picture stays as it is."""
        began = self._ticks()
        if began >= self._due:
            try:
                self.picture = self._looked()
            except CloudtrainError as exc:  # asking for the state finds out whether it is lost for good
                self.picture = replace(self.picture, trouble=first_line(str(exc)), when=self._clock())
            now = self._ticks()
            self._due = now + max(CLIENT_TIMINGS.pull_look, SHARE * (now - began))
        self._on_picture(self.picture)

    def _looked(self) -> Picture:
        seen, before = self._seen, self.picture
        attempts = seen.infos(before.status.attempts)
        newest = attempts[-1].number if attempts else ""
        lines: dict[int, list[Line]] = {}
        for info in reversed(attempts[-2:]):  # the one before, until the newest one writes a line
            lines = lines or seen.lines(info.number, LINES)
        rows = seen.metrics()
        counts = {attempt: len(some) for attempt, some in rows.items()}
        if counts != self._counts:  # a long run has many rows: measured again only if there are more
            self._counts, self._measured = counts, measured(curves(rows))
        return replace(
            before,
            attempts=attempts,
            begun=seen.begun,
            nodes=seen.nodes(newest, self._run._nodes_of(newest)) if newest else (),
            lines=lines,
            measured=self._measured,
            usage=(seen.usage().get(newest) or [{}])[-1],
            checkpoint=self._run.checkpoint(),
            trouble="",
            waiting=self._run.waiting() if before.status.state == "running" else "",
            cancelling=before.cancelling or self._run.store.cancelled(self._run.run_id),
            when=self._clock(),
        )


# -------------------------------------------------------------------------------------------------------- on a terminal


def on_terminal(watch: Watch, console: Console) -> Picture:
    """Draw each picture over the one before, on a screen of its own, and leave the last one on the terminal."""
    from rich.live import Live

    def drawn(spare: int = 0) -> Any:
        ascii_only = not console.encoding.startswith("utf")
        height = max(12, console.height - spare) if spare else console.height
        return screen(watch.picture, width=console.width, height=height, now=time.time(), ascii_only=ascii_only)

    live = Live(  # drawn twice a second: ages grow, a window changes its size
        console=console,
        get_renderable=drawn,
        screen=True,
        refresh_per_second=2,
        redirect_stdout=False,
        redirect_stderr=False,
    )
    try:
        with live:
            return watch.watch()
    finally:
        console.print(drawn(2))


def screen(picture: Picture, *, width: int, height: int, now: float, ascii_only: bool = False) -> Any:
    """Return the picture as a table of rich's, no higher than that: the facts, the curve, the last lines."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    def line(text: str, style: str = "") -> Text:
        return Text(printable(text), style=style, no_wrap=True, overflow="crop" if ascii_only else "ellipsis")

    facts = [row for row in _facts(picture, now, width, ascii_only) if row[1] and (row[0] != "busy" or height > 12)]
    keep = max(0, min(len(facts), height - 3 if height > 6 else height - 1))
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(min_width=LABEL)
    for name, text, style in facts[:keep]:
        table.add_row(line(name, "dim"), line(text, style))
    rest = height - 1 - keep
    lines = fair(picture.lines, rest - 1) if rest >= 2 else []
    body = [line(f"{line_label(item)}{item.text}") for item in lines]
    if lines:
        older = f" of attempt {lines[0].attempt}" if lines[0].attempt != picture.attempt else ""
        body.insert(0, line(f"last lines{older}", "dim"))
    state = str(picture.result["state"]) if picture.result else picture.status.state
    title = line(_title(picture, state), COLOURS.get(state, "bold yellow"))
    return Group(title, *([table] if keep else []), *body)


def fair(lines: Mapping[int, Sequence[Line]], room: int) -> list[Line]:
    """Return the last lines of each node, ``room`` in all and as many of one as of another, node by node."""
    taken = dict.fromkeys(lines, 0)
    while room > 0 and (more := [node for node in lines if taken[node] < len(lines[node])]):
        for node in more[:room]:
            taken[node] += 1
        room -= len(more)
    return [line for node, count in taken.items() if count for line in lines[node][-count:]]


def _title(picture: Picture, state: str) -> str:
    category = (picture.result or {}).get("category")
    cancelling = " (cancelling)" if picture.cancelling and not picture.status.final else ""
    why = f" ({category})" if category and category != state else ""
    attempt = f", attempt {picture.attempt}" if picture.attempt else ""
    return f"{picture.run_id}  {state}{cancelling}{why}{attempt}, on {picture.provider}"


def _facts(picture: Picture, now: float, width: int, ascii_only: bool) -> Iterator[tuple[str, str, str]]:
    """Yield name, text and style of each row, the most important first; a row without text is not shown."""
    result, found, curve = picture.result, picture.checkpoint, picture.measured
    now = picture.when if result else now  # of a run that is over nothing grows older
    yield "trouble", f"the store does not answer: {picture.trouble}" if picture.trouble else "", "yellow"
    yield "waiting", "" if result else picture.waiting, "yellow"
    yield "progress", ", ".join(_progress(picture, now)), ""
    reason = str(result.get("reason") or "") if result else picture.status.reason
    yield "reason", first_line(reason), "red" if result and result["state"] == "failed" else ""
    if curve.points:
        ends = f"{quantity(curve.points[0][1])} to {quantity(curve.points[-1][1])}"
        span = f"{curve.axis} {quantity(curve.points[0][0])} to {quantity(curve.points[-1][0])}"
        words = f"{ends}, {span}{', logarithmic' if curve.log else ''}"
        room = width - len(words) - max(len(curve.name), LABEL) - 3
        yield curve.name, f"{sparkline(curve, max(8, room), ascii_only)} {words}", "cyan"
    age = f", {duration(now - found.committed)} ago" if found and not result else ""
    yield "checkpoint", f"{found.name}{age}" if found else "none complete" + ("" if result else " yet"), ""
    yield "nodes", _nodes(picture, now), ""
    yield "busy", usage_text(picture.usage), ""
    for info in picture.attempts[-ATTEMPTS:] if len(picture.attempts) > 1 else ():
        yield f"attempt {info.number}", _attempt(info, picture), "dim"


def _progress(picture: Picture, now: float) -> list[str]:
    found, spent = picture.measured, picture.spent(now)
    words = [f"step {quantity(found.step)}"] if found.step is not None else []
    words += [f"{found.loss[0]} {quantity(found.loss[1])}"] if found.loss else []
    if spent is not None and picture.result:
        words.append(f"ran {duration(spent)}")
    elif spent is not None and picture.status.state == "running":
        words.append(f"{duration(picture.max_runtime - spent)} left of {duration(picture.max_runtime)}")
    words += [f"{found.throughput[0]} {quantity(found.throughput[1])}"] if found.throughput else []
    return words


def _nodes(picture: Picture, now: float) -> str:
    """Return ``2 of 2 alive: 0 wrote 3s ago``. Of many nodes, only those are named that have been silent for longest.

    All nodes were there when the attempt began, and the others end it when one is lost. So a node without an exit
    record is alive while the run runs, even if it prints nothing.
    """
    count = len(picture.nodes)
    begun = bool(count) and picture.attempt in picture.begun and picture.status.state == "running"
    nodes = sorted(picture.nodes, key=lambda node: node.seen or 0.0)[:8] if count > 8 else picture.nodes
    words = [
        f"{node.number} {node.outcome or (f'wrote {duration(now - node.seen)} ago' if node.seen else 'nothing yet')}"
        for node in nodes
        if node.outcome or node.seen or not begun
    ]
    alive = f"{sum(not node.outcome for node in picture.nodes)} of {count} alive" if begun else ""
    silent = f"longest silent of {plural(count, 'node')}" if count > len(nodes) else ""
    return ": ".join(filter(None, [", ".join(filter(None, [alive, silent])), ", ".join(words)]))


def _is_starting(info: AttemptInfo, picture: Picture) -> bool:
    """Return True while it is not known yet from where an attempt resumes."""
    newest = info is picture.attempts[-1] and picture.result is None
    return newest and not info.resumed_from and info.number not in picture.begun


def _attempt(info: AttemptInfo, picture: Picture) -> str:
    start = "starting" if _is_starting(info, picture) else "from the beginning"
    words = [f"resumed from {info.resumed_from}" if info.resumed_from else start]
    words.append(info.reason or ("" if info is picture.attempts[-1] else "ended"))
    steps = (info.lost or {}).get("steps")
    words += [f"lost {quantity(steps)} steps"] if steps is not None else []
    return ", ".join(filter(None, words))


def sparkline(curve: Measured, width: int, ascii_only: bool = False) -> str:
    """Return the curve in one line of ``width`` characters. Each shows the highest value in its column."""
    heights = [(x, math.log10(y) if curve.log else y) for x, y in curve.points]
    low, high = min(y for _, y in heights), max(y for _, y in heights)
    held, text, top = by_column(heights, width, heights[0][0], heights[-1][0]), "", low
    for at in range(width if len(held) > 1 else 1):
        top = max((y for _, y in held.get(at, ())), default=top)  # an empty column is as high as the one before
        share = (top / 2 - low / 2) / (high / 2 - low / 2) if high / 2 > low / 2 else 0.0  # halves: finite
        text += HEIGHTS[ascii_only][round(share * 7)]
    return text


# ------------------------------------------------------------------------------------------------------ on no terminal


def follow(watch: Callable[[Callable[[Picture], None]], Watch], say: Callable[[str], None]) -> Picture:
    """Say one plain line for each change: of state, attempt, checkpoint and, once a minute, step."""
    changes = _Changes(lambda text: say(printable(text)))
    last = watch(changes).watch()
    if last.measured.newest != changes.step:
        changes.say_step(last)
    say(printable(format.state_line({**(last.result or {}), "reason": ""})))
    return last


class _Changes:
    """The changes of a run. ``say`` is called with each line once; `step` is the last step that was said."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say, self._state = say, format.Changes(say)
        self._last: dict[str, str] = {}
        self.step: float | None = None
        self._step_at = float("-inf")

    def __call__(self, picture: Picture) -> None:
        self._state(picture.status)
        several, found = len(picture.attempts) > 1, picture.checkpoint
        for info in picture.attempts:
            if not several:
                self._last[info.number] = ""
            elif not _is_starting(info, picture) and info.number not in self._last:
                self._change(info.number, info.number, f"attempt {info.number}: {_attempt(info, picture)}")
        self._change("waiting", picture.waiting, picture.waiting)
        if not picture.status.final:
            self._change("cancelling", "cancelling" if picture.cancelling else "", "cancelling")
        if found is not None:
            self._change("checkpoint", found.key, f"checkpoint {found.name} is complete")
        if picture.measured.newest != self.step and picture.when - self._step_at >= STEP_EVERY:
            self.say_step(picture)

    def _change(self, name: str, value: str, text: str) -> None:
        if value and self._last.get(name) != value:
            self._say(text)
        self._last[name] = value

    def say_step(self, picture: Picture) -> None:
        """Say the step, if there is one."""
        if picture.measured.newest is not None:
            self._say(", ".join(_progress(picture, picture.when)))
        self.step, self._step_at = picture.measured.newest, picture.when
