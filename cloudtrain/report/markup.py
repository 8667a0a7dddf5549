"""HTML that escapes every text that is not `Html` yet, and charts in SVG. The page loads nothing and runs nothing."""

from __future__ import annotations

import html
import math
import re
from bisect import bisect_right as bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from string import Template

from ..errors import SpecError
from ..storage.local_disk import disk_errors, make_durable, temp_file
from .curves import DERIVED, AttemptSeries, Curve, Point, is_log, means, spread, ticks

WIDTH, HEIGHT = 560.0, 230.0
LEFT, RIGHT, TOP, BOTTOM = 62.0, 546.0, 22.0, 192.0  # the edges of the curve within the drawing
COLUMNS = int(RIGHT - LEFT)
ROWS = 40  # rows of the table beside a curve, at most
LABEL = 34.0  # units of the drawing between two labels of attempts, at least
_NOT_XML = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


class Html(str):
    """Text that is markup already."""

    __slots__ = ()


def tag(name: str, /, *children: str | None, **attributes: str | float | None) -> Html:
    """Return ``<name …>children</name>``, escaped but for `Html`.

    None, as a child or an attribute, is left out. ``class_`` is class; ``_`` in other names is a hyphen. A number has
    one decimal, a drawing's precision.
    """
    words = [name]
    for key, value in attributes.items():
        if value is not None:
            text = f"{value:.1f}" if isinstance(value, float) else str(value)
            words.append(f'{key.rstrip("_").replace("_", "-")}="{_escaped(text)}"')
    inner = "".join(map(_escaped, filter(None, children)))
    return Html(f"<{' '.join(words)}>{inner}</{name}>")


def _escaped(text: str) -> str:
    """Escape for text and attributes both, and replace characters that XML cannot hold."""
    return text if isinstance(text, Html) else html.escape(_NOT_XML.sub("\N{REPLACEMENT CHARACTER}", text))


def html_table(
    caption: str, head: Sequence[str], rows: Sequence[Sequence[str]], *, numeric: Sequence[int] = (), hide: bool = False
) -> Html:
    """Return a table that scrolls within itself, with columns ``numeric`` right-aligned.

    ``hide`` shows the caption to screen readers only. The first cell of a row is its heading.
    """

    def cell(index: int, text: str) -> Html:
        kind = "number" if index in numeric else "short" if len(text) <= 28 else "long"
        return tag("th", text, scope="row", class_=kind) if index == 0 else tag("td", text, class_=kind)

    top = [tag("th", text, scope="col", class_="number" if i in numeric else None) for i, text in enumerate(head)]
    body = [tag("tr", *[cell(i, text) for i, text in enumerate(row)]) for row in rows]
    label = tag("caption", caption, class_="hidden" if hide else None)
    inner = tag("table", label, tag("thead", tag("tr", *top)), tag("tbody", *body))
    return tag("div", inner, class_="scroll", tabindex=0, role="region", aria_label=caption)


def page(title: str, body: Html) -> Html:
    """Return a whole page: ``data/report.html`` with its two blanks filled in."""
    template = Template((Path(__file__).parents[1] / "data" / "report.html").read_text(encoding="utf-8"))
    return Html(template.substitute(title=_escaped(title), body=_escaped(body)))


def save_page(text: Html, path: Path, name: str) -> Path:
    """Write a page to ``path``, a file or a folder; in a folder it is ``<name>.html``. Return the file.

    Raises `SpecError` when there is no folder to write it to, and `StorageError`.
    """
    if path.is_dir():
        path /= f"{name}.html"
    if not path.parent.is_dir():
        raise SpecError(f"there is no folder {path.parent} to write {path.name} to", field="out")
    with disk_errors(path), temp_file(path) as temp:
        temp.write_text(text, encoding="utf-8")
        make_durable(temp, path)
    return path


def quantity(value: float) -> str:
    """Return a number for people: four significant digits, thousands with a comma."""
    if math.isfinite(value) and abs(value) < 1e7 and (value == round(value) or abs(value) >= 1000):
        return f"{value:,.0f}" if value == round(value) else f"{value:,.1f}"
    return f"{value:.4g}"


def short(value: float) -> str:
    """Return a number for an axis, where there is little room: ``1.3M``."""
    for power, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if 1e5 <= abs(value) < 1e15 and abs(value) >= power:
            return f"{value / power:.4g}{unit}"
    return quantity(value)


def _size(value: float) -> str:
    """Return bytes to four digits, as neighbouring marks of an axis differ in them: ``3.474 GiB``."""
    power = min(4, int(math.log(max(1.0, abs(value)), 1024)))
    return f"{quantity(value / 1024**power)} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


# --------------------------------------------------------------------------------------------------------------- charts


def figure(curve: Curve) -> Html:
    """Return the chart of one curve, its description in words, and a table of its numbers."""
    name = "steps per second, by the times of the rows" if curve.name == DERIVED else curve.name
    unit, show = 1.0, quantity
    largest = max((abs(y) for _, y in curve.points), default=0.0)
    named = re.search(r"([gmk]i?b|percent|pct|frac|ratio|share)\b", curve.name.replace("_", " "), re.IGNORECASE)
    if curve.kind == "memory" and largest >= 1 << 20 and not named:  # bytes
        unit, show = 1024.0 ** min(4, int(math.log(largest, 1024))), _size
    parts, dense = chart(curve, unit, show)
    words = " ".join(_sentences(curve, show))
    if dense:
        words += (
            f" {len(curve.points):,} points, more than the drawing can show: the line is the mean of each two of its"
            f" {COLUMNS} columns, and the band behind it has the first, lowest, highest and last of each column."
        )
    title = tag("h3", name, tag("small", " (logarithmic)") if is_log(curve) else None)
    return drawing(title, name, words, parts, _numbers(curve, name, show))


def drawing(title: str, name: str, words: str, parts: Sequence[Html], *below: Html) -> Html:
    """Return a figure of the ``parts`` of its drawing, with its title, its description in words, and what is below."""
    box = f"0 0 {WIDTH:g} {HEIGHT:g}"
    svg = tag("svg", tag("title", name), tag("desc", words), *parts, viewBox=box, role="img")
    head = title if isinstance(title, Html) else tag("h3", title)
    return tag("figure", head, svg, tag("figcaption", words), *below)


def _sentences(curve: Curve, show: Callable[[float], str]) -> list[str]:
    """Describe a curve for people who cannot see it."""
    words: list[str] = []
    x, history = curve.axis, curve.history
    if history:
        low, high = min(history, key=lambda p: p[1]), max(history, key=lambda p: p[1])
        words = [
            f"First {show(history[0][1])}, last {show(history[-1][1])} at {x} {quantity(history[-1][0])}.",
            f"Lowest {show(low[1])} at {x} {quantity(low[0])}, highest {show(high[1])} at {quantity(high[0])}.",
        ]
    if curve.odd:
        many = f"{len(curve.odd):,} values are" if len(curve.odd) > 1 else "1 value is"
        words.append(f"{many} no finite number, the first at {x} {quantity(min(curve.odd))}.")
    lost = [part for part in curve.stretches if part.lost]
    if len(lost) > 2:
        return [*words, f"Parts of {len(lost)} attempts were done again (dashed)."]
    for part in lost:
        span = f"{quantity(part.lost[0][0])} to {quantity(part.lost[-1][0])}"
        words.append(f"{x.capitalize()}s {span} of attempt {part.attempt} were done again (dashed).")
    return words


@dataclass(frozen=True)
class Scale:
    """The position of a value in the drawing, from ``low`` at ``start`` to ``high`` at ``end``."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        value = math.log10(value) if self.log else value
        width = self.high / 2 - self.low / 2  # halves: their difference is finite
        share = (value / 2 - self.low / 2) / width if width else 0.5
        return self.start + share * (self.end - self.start)


def heights(points: Sequence[Point], *, log: bool = False) -> Scale:
    """Return the scale of the values, with a little room above and below; from zero if zero is near."""
    values = [math.log10(y) if log else y for _, y in points] or [0.0, 1.0]
    low, high = min(values), max(values)
    room = (abs(low) * 0.1 or 1.0) if high <= low else (high - low) * 0.04 if math.isfinite(high - low) else 0.0
    zero = not log and low < high and 0 <= low <= (high - low) * 0.5
    return Scale(0.0 if zero else low - room, high + room, BOTTOM, TOP, log)


def widths(xs: Sequence[float]) -> Scale:
    """Return the scale of the steps or trials."""
    low, high = min(xs, default=0.0), max(xs, default=0.0)
    return Scale(low, high if high > low else low + 1, LEFT, RIGHT)


def chart(curve: Curve, unit: float, show: Callable[[float], str]) -> tuple[list[Html], bool]:
    """Return the parts of the drawing of one curve, and whether it has more points than the drawing shows.

    Attempts begin at upright lines; what was done again is shaded and dashed. ``unit``: of the marks at the left.
    """
    across = widths([x for x, _ in curve.points] + curve.odd)
    up = heights(curve.points, log=is_log(curve))
    parts = grid(curve.axis, across, up, unit, short if show is quantity else show)
    begun = [part for part in curve.stretches if part.points or part.odd]
    for part in begun[:-1]:
        if part.lost:
            left, right = across(part.lost_from or 0.0), across(part.lost[-1][0])
            parts.append(tag("rect", x=left, y=TOP, width=max(right - left, 2.0), height=BOTTOM - TOP, class_="lost"))
    free = 0.0
    for part in begun[1:]:
        x = across(min([x for x, _ in part.points[:1]] + part.odd))
        parts.append(_rule(x, x, TOP - 4, BOTTOM, "begins"))
        if x >= free:
            parts.append(label(part.attempt, x, TOP - 8, "end" if x > RIGHT - LABEL / 2 else "middle", "name"))
            free = x + LABEL
    dense = False
    for part in begun:
        for piece, kind in _pieces(part):
            line = spread(piece, COLUMNS, across.low, across.high)
            if len(line) < len(piece):
                dense = True
                parts.append(polyline(line, across, up, f"band {kind}"))
                line = means(piece, COLUMNS // 2, across.low, across.high)
            parts.append(polyline(line, across, up, kind))
    odd = sorted({round(across(x)) for x in curve.odd})
    return [*parts, *[tag("path", d=f"M{x - 3} {BOTTOM:g}l3 -7l3 7z", class_="odd") for x in odd]], dense


def _rule(x1: float, x2: float, y1: float, y2: float, kind: str) -> Html:
    return tag("line", x1=x1, x2=x2, y1=y1, y2=y2, class_=kind)


def label(text: str, x: float, y: float, anchor: str, kind: str | None = None) -> Html:
    """Return a text of a drawing; ``anchor`` is the part of it at ``x``: start, middle or end."""
    return tag("text", text, x=x, y=y, text_anchor=anchor, class_=kind)


def upright(x: float) -> Html:
    """Return the axis of one parameter, or the left one, at ``x``."""
    return _rule(x, x, BOTTOM, TOP, "axis")


def grid(axis: str, across: Scale, up: Scale, unit: float = 1.0, show: Callable[[float], str] = short) -> list[Html]:
    """Return the marks of both scales, and the name of the lower one."""
    marks = [mark * unit for mark in ticks(up.low / unit, up.high / unit, 4)]
    if up.log:
        marks = [10.0**mark for mark in ticks(up.low, up.high, 5) if mark == round(mark) and abs(mark) <= 308]
    parts: list[Html] = []
    for mark in marks:
        parts.append(_rule(LEFT, RIGHT, up(mark), up(mark), "grid"))
        parts.append(label(show(mark), LEFT - 6, up(mark) + 4, "end"))
    for mark in ticks(across.low, across.high, 5):
        if mark == round(mark) or abs(mark) < 1:
            x = across(mark)
            parts.append(_rule(x, x, BOTTOM, BOTTOM + 4, "axis"))
            parts.append(label(short(mark), x, BOTTOM + 16, "end" if x > RIGHT - 20 else "middle"))
    parts.append(_rule(LEFT, RIGHT, BOTTOM, BOTTOM, "axis"))
    return [*parts, label(axis, (LEFT + RIGHT) / 2, HEIGHT - 6, "middle", "name")]


def _pieces(part: AttemptSeries) -> list[tuple[list[Point], str]]:
    """Return the lines of an attempt and their kinds, broken where a value was no finite number."""
    breaks = sorted(part.odd)
    joint = part.counted[-1:] if part.lost else []
    return [
        ([*points], kind)
        for some, kind in ((joint + part.lost, "again"), (part.counted, "line"))
        for _, points in groupby(some, key=lambda point: bisect(breaks, point[0]))
    ]


def polyline(points: Sequence[Point], across: Scale, up: Scale, kind: str, colour: str | None = None) -> Html:
    """Return a line through the points; a point that stands alone is a dot."""
    if len(points) == 1:
        style = f"fill: {colour}" if colour else None
        return tag("circle", cx=across(points[0][0]), cy=up(points[0][1]), r=2.5, class_=f"dot {kind}", style=style)
    marks = " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in points)
    return tag("polyline", points=marks, class_=kind, style=f"stroke: {colour}" if colour else None)


def _numbers(curve: Curve, name: str, show: Callable[[float], str]) -> Html:
    """Return the curve as a table: of many points `ROWS`, evenly, with the first and the last."""
    rows: list[list[str]] = []
    for part in curve.stretches:
        end = math.inf if part.lost_from is None else part.lost_from
        rows += [[quantity(x), part.attempt, show(y), "yes" if x >= end else ""] for x, y in part.points]
        rows += [[quantity(x), part.attempt, "no finite number", ""] for x in part.odd]
    count = len(rows)
    if count > ROWS:
        rows = [rows[round(i * (count - 1) / (ROWS - 1))] for i in range(ROWS)]
    text = f"{ROWS} of {count:,} points" if count > ROWS else f"{count} points" if count != 1 else "1 point"
    width = 4 if any(row[3] for row in rows) else 3
    head = [curve.axis, "attempt", name, "done again"][:width]
    body = html_table(f"{name}, {text}", head, [row[:width] for row in rows], numeric=(0, 2))
    return tag("details", tag("summary", f"Numbers: {text}"), body)
