"""HTML that cannot be broken into: whatever is no `Html` yet is escaped; and charts in SVG, drawn from curves.

The page needs nothing but itself: no script, no font, no picture from elsewhere.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Callable, Sequence

from ..job.own_files import GENERATOR
from .curves import Curve, Point, Stretch, decades, is_log, means, spread, ticks

__all__ = ["Html", "chart", "figure", "page", "quantity", "size", "table", "tag"]

WIDTH, HEIGHT = 560.0, 230.0
LEFT, RIGHT, TOP, BOTTOM = 62.0, 14.0, 22.0, 38.0
COLUMNS = int(WIDTH - LEFT - RIGHT)
ROWS = 40
"""Rows of the table beside a curve, at most."""
SHORT = 28
"""Characters of a table's cell that is not broken into lines: a time, a name."""
LABEL = 34.0
"""Units of the drawing between two labels of attempts, at least; one between is left out, its line is not."""
_NOT_XML = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
_VOID = frozenset({"meta", "br", "hr"})


class Html(str):
    """Text that is markup already."""

    __slots__ = ()


def tag(name: str, /, *children: str | Sequence[str] | None, **attributes: str | float | None) -> Html:
    """``<name …>children</name>``. Children that are no `Html` are escaped; None, of children and attributes, is left
    out. ``class_`` is class, ``_`` in other names a hyphen."""
    words = [name]
    for key, value in attributes.items():
        if value is not None:
            spelled = key.rstrip("_").replace("_", "-")
            words.append(f'{spelled}="{_escaped(str(value))}"')
    if name in _VOID:
        return Html(f"<{' '.join(words)}>")
    flat = [part for child in children for part in ([child] if isinstance(child, str) else child or ())]
    inner = "".join(part if isinstance(part, Html) else _escaped(part) for part in flat)
    return Html(f"<{' '.join(words)}>{inner}</{name}>")


def _escaped(text: str) -> str:
    """For text and attributes both; what no XML may hold is shown as such."""
    return html.escape(_NOT_XML.sub("\N{REPLACEMENT CHARACTER}", text), quote=True)


def table(
    caption: str, head: Sequence[str], rows: Sequence[Sequence[str]], *, numeric: Sequence[int] = (), hide: bool = False
) -> Html:
    """A table that scrolls within itself; columns ``numeric`` are right-aligned. ``hide``: the caption is for
    readers of the page's structure only. The first cell of a row is its heading."""

    def cell(index: int, text: str) -> Html:
        kind = "number" if index in numeric else "short" if len(text) <= SHORT else "long"
        return tag("th", text, scope="row", class_=kind) if index == 0 else tag("td", text, class_=kind)

    top = [tag("th", text, scope="col", class_="number" if i in numeric else None) for i, text in enumerate(head)]
    body = [tag("tr", [cell(i, text) for i, text in enumerate(row)]) for row in rows]
    label = tag("caption", caption, class_="hidden" if hide else None)
    inner = tag("table", label, tag("thead", tag("tr", top)), tag("tbody", body))
    return tag("div", inner, class_="scroll", tabindex=0, role="region", aria_label=caption)


def page(title: str, *body: Html) -> Html:
    """A whole page. The policy in it lets nothing run and nothing load, whatever stands in it."""
    policy = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        Html(GENERATOR),
        Html(f'<meta http-equiv="Content-Security-Policy" content="{policy}">'),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="referrer", content="no-referrer"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", title),
        Html(f"<style>{STYLE}</style>"),
    )
    return Html(f"<!DOCTYPE html>\n{tag('html', head, tag('body', *body), lang='en')}\n")


# --------------------------------------------------------------------------------------------------------------- charts


def figure(curve: Curve, *, of_memory: bool = False) -> Html:
    """The chart of one curve, what it shows in words, and a table of its numbers."""
    show = _units(curve, of_memory)
    name = "steps per second, by the times of the rows" if curve.derived else curve.name
    words = " ".join(sentences(curve, show))
    return tag(
        "figure",
        tag("h3", name, *([tag("small", " (logarithmic)")] if is_log(curve) else [])),
        chart(curve, name, words, show),
        tag("figcaption", words),
        _numbers(curve, name, show),
    )


def _units(curve: Curve, of_memory: bool) -> Callable[[float], str]:
    """How its values are written; what looks like bytes, as bytes."""
    values = [abs(y) for _, y in curve.points]
    named = re.search(r"(gb|gib|mb|mib|kb|kib|percent|pct|frac|ratio|share)\b", curve.name.replace("_", " "), re.I)
    if of_memory and values and max(values) >= 1 << 20 and not named:
        return size
    return quantity


def quantity(value: float) -> str:
    """A number for people: four digits that count, thousands with a comma."""
    if not math.isfinite(value):
        return str(value)
    if value == round(value) and abs(value) < 1e7:
        return f"{value:,.0f}"
    if 1000 <= abs(value) < 1e7:
        return f"{value:,.1f}"
    return f"{value:.4g}"


def short(value: float) -> str:
    """A number at an axis, where there is little room: ``1.3M``."""
    for power, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if 1e5 <= abs(value) < 1e15 and abs(value) >= power:
            return f"{value / power:.4g}{unit}"
    return quantity(value)


def size(value: float) -> str:
    """Bytes as people write them: ``812 B``, ``1.4 GiB``."""
    units = iter(("B", "KiB", "MiB", "GiB", "TiB"))
    unit = next(units)
    while abs(value) >= 1024 and unit != "TiB":
        value, unit = value / 1024, next(units)
    return f"{value:.3g} {unit}"


def _unit(value: float) -> float:
    """The bytes of the unit in which `size` writes ``value``."""
    return 1024.0 ** min(4, max(0, int(math.log(abs(value), 1024)))) if value else 1.0


def sentences(curve: Curve, show: Callable[[float], str] = quantity) -> list[str]:
    """What a curve shows, for who cannot see it, and what the drawing leaves out."""
    said: list[str] = []
    history = curve.history
    if history:
        (_, first), (_, last) = history[0], history[-1]
        low, high = min(history, key=lambda p: p[1]), max(history, key=lambda p: p[1])
        x = curve.axis
        said.append(f"First {show(first)}, last {show(last)} at {x} {quantity(history[-1][0])}.")
        said.append(f"Lowest {show(low[1])} at {x} {quantity(low[0])}, highest {show(high[1])} at {quantity(high[0])}.")
    if curve.odd:
        count = len(curve.odd)
        many = f"{count:,} values are" if count > 1 else "1 value is"
        said.append(f"{many} no finite number, the first at {curve.axis} {quantity(min(curve.odd))}.")
    lost = [part for part in curve.stretches if part.lost]
    for part in lost if len(lost) <= 2 else ():
        span = f"{quantity(part.lost[0][0])} to {quantity(part.lost[-1][0])}"
        said.append(f"{curve.axis.capitalize()}s {span} of attempt {part.attempt} were done again (dashed).")
    if len(lost) > 2:
        said.append(f"What {len(lost)} attempts had done was done again in part (dashed).")
    if _is_dense(curve):
        said.append(
            f"{len(curve.points):,} points, more than the drawing can show: the line is the mean of each two of its"
            f" {COLUMNS} columns, and the band behind it has the first, lowest, highest and last of each column."
        )
    return said


def _is_dense(curve: Curve) -> bool:
    """Whether any of its columns holds more points than the drawing shows of them."""
    xs = [x for x, _ in curve.points] + curve.odd
    low, high = min(xs), max(xs)
    pieces = [points for part in curve.stretches for points in (part.lost, part.counted)]
    return any(len(spread(points, COLUMNS, low, high)) < len(points) for points in pieces)


def chart(curve: Curve, name: str, words: str, show: Callable[[float], str]) -> Html:
    """The drawing of one curve: attempts begin at upright lines, what was lost is shaded and dashed."""
    xs = [x for x, _ in curve.points] + curve.odd
    place = _Place(curve, min(xs), max(xs))
    parts: list[Html] = [tag("title", name), tag("desc", words), *_grid(place, curve.axis, show)]
    for i, part in enumerate(curve.stretches):
        following = next((p for p in curve.stretches[i + 1 :] if p.points or p.odd), None)
        if part.lost and following is not None:
            left, right = place.x(part.lost_from or 0.0), place.x(max(x for x, _ in part.lost))
            parts.append(
                tag("rect", x=_r(left), y=TOP, width=_r(max(right - left, 2)), height=_r(place.height), class_="lost")
            )
    parts += _begins(curve, place)
    for part in curve.stretches:
        parts += _lines(part, place)
    odd = sorted({round(place.x(x)) for x in curve.odd})
    base = TOP + place.height
    parts += [tag("path", d=f"M{x - 3} {base}l3 -7l3 7z", class_="odd") for x in odd[:COLUMNS]]
    return tag("svg", *parts, viewBox=f"0 0 {WIDTH:g} {HEIGHT:g}", role="img")


class _Place:
    """Where a point is drawn."""

    def __init__(self, curve: Curve, low: float, high: float) -> None:
        self.log = is_log(curve)
        values = [y for _, y in curve.points] or [0.0, 1.0]
        bottom, top = (math.log10(v) if self.log else v for v in (min(values), max(values)))
        if top <= bottom:
            room = abs(bottom) * 0.1 or 1.0
        elif math.isinf(top - bottom):
            room = 0.0
        else:
            room = (top - bottom) * 0.04
            if not self.log and 0 <= bottom <= (top - bottom) * 0.5:
                bottom, room = 0.0, (top - bottom) * 0.04  # near enough to zero that it belongs in the picture
        self.bottom = bottom - (room if bottom or top <= bottom else 0.0)
        self.top = top + room
        self.low, self.high = low, high if high > low else low + 1
        self.width, self.height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def x(self, value: float) -> float:
        return LEFT + (value / 2 - self.low / 2) / (self.high / 2 - self.low / 2) * self.width

    def y(self, value: float) -> float:
        value = math.log10(value) if self.log else value
        share = (value / 2 - self.bottom / 2) / (self.top / 2 - self.bottom / 2)  # halves: their difference is finite
        return TOP + (1 - share) * self.height


def _r(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _grid(place: _Place, axis: str, show: Callable[[float], str]) -> list[Html]:
    parts: list[Html] = []
    unit = _unit(place.top) if show is size else 1.0
    marks = [mark * unit for mark in ticks(place.bottom / unit, place.top / unit, 4)]
    if place.log:
        marks = decades(place.bottom, place.top, 5)
    for mark in marks:
        y = _r(place.y(mark))
        parts.append(tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=y, y2=y, class_="grid"))
        parts.append(
            tag("text", (short if show is quantity else show)(mark), x=LEFT - 6, y=y, dy="0.32em", text_anchor="end")
        )
    base = TOP + place.height
    for mark in ticks(place.low, place.high, 5):
        if mark == round(mark) or abs(mark) < 1:
            x = place.x(mark)
            anchor = "end" if x > WIDTH - RIGHT - 20 else "middle"
            parts.append(tag("line", x1=_r(x), x2=_r(x), y1=base, y2=base + 4, class_="axis"))
            parts.append(tag("text", short(mark), x=_r(x), y=base + 16, text_anchor=anchor))
    parts.append(tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=base, y2=base, class_="axis"))
    parts.append(tag("text", axis, x=(LEFT + WIDTH - RIGHT) / 2, y=HEIGHT - 6, text_anchor="middle", class_="name"))
    return parts


def _begins(curve: Curve, place: _Place) -> list[Html]:
    """An upright line where each attempt but the first begins."""
    parts: list[Html] = []
    free = 0.0
    for part in [part for part in curve.stretches if part.points or part.odd][1:]:
        x = place.x(min([x for x, _ in part.points[:1]] + sorted(part.odd)[:1]))
        parts.append(tag("line", x1=_r(x), x2=_r(x), y1=TOP - 4, y2=_r(TOP + place.height), class_="begins"))
        if x >= free:
            late = x > WIDTH - RIGHT - LABEL / 2
            parts.append(
                tag("text", part.attempt, x=_r(x), y=TOP - 8, text_anchor="end" if late else "middle", class_="name")
            )
            free = x + LABEL
    return parts


def _lines(part: Stretch, place: _Place) -> list[Html]:
    """The lines of an attempt, broken where a value was no number; a point that stands alone is a dot."""
    drawn: list[Html] = []
    for points, kind in ((part.lost, "again"), (part.counted, "line")):
        if kind == "again" and part.counted and points:
            points = [part.counted[-1], *points]
        for piece in _pieces(points, sorted(part.odd)):
            shown = spread(piece, COLUMNS, place.low, place.high)
            if len(shown) < len(piece):
                drawn.append(_line(shown, place, f"band {kind}"))
                shown = means(piece, COLUMNS // 2, place.low, place.high)
            if len(shown) == 1:
                (x, y) = shown[0]
                drawn.append(tag("circle", cx=_r(place.x(x)), cy=_r(place.y(y)), r=2.5, class_=f"dot {kind}"))
            else:
                drawn.append(_line(shown, place, kind))
    return drawn


def _line(points: Sequence[Point], place: _Place, kind: str) -> Html:
    text = " ".join(f"{_r(place.x(x))},{_r(place.y(y))}" for x, y in points)
    return tag("polyline", points=text, class_=kind)


def _pieces(points: Sequence[Point], breaks: Sequence[float]) -> list[list[Point]]:
    pieces: list[list[Point]] = []
    at = 0
    fresh = True
    for point in points:
        while at < len(breaks) and breaks[at] <= point[0]:
            at, fresh = at + 1, True
        if fresh:
            pieces.append([])
            fresh = False
        pieces[-1].append(point)
    return pieces


def _numbers(curve: Curve, name: str, show: Callable[[float], str]) -> Html:
    """The curve as a table: of many points some, evenly, with the first and the last of each attempt."""
    rows: list[tuple[float, str, float | None, bool]] = []
    for part in curve.stretches:
        lost = part.lost_from
        rows += [(x, part.attempt, y, lost is not None and x >= lost) for x, y in part.points]
        rows += [(x, part.attempt, None, False) for x in part.odd]
    count = len(rows)
    if count > ROWS:
        wanted = {round(i * (count - 1) / (ROWS - 1)) for i in range(ROWS)}
        rows = [row for i, row in enumerate(rows) if i in wanted]
    told = f"{len(rows)} of {count:,} points" if count > len(rows) else f"{count} points" if count != 1 else "1 point"
    again = any(row[3] for row in rows)
    head = [curve.axis, "attempt", name, *(["done again"] if again else [])]
    cells = [
        [
            quantity(x),
            attempt,
            "no finite number" if y is None else show(y),
            *(["yes" if lost else ""] if again else []),
        ]
        for x, attempt, y, lost in rows
    ]
    return tag("details", tag("summary", f"Numbers: {told}"), table(f"{name}, {told}", head, cells, numeric=(0, 2)))


STYLE = """
:root { color-scheme: light dark; --ground: #fff; --text: #1b1f24; --faint: #59636e; --rule: #d5dae0; --panel: #f5f7f9;
  --line: #0b62c4; --lost: #c9700022; --again: #a85b00; --good: #136c2e; --bad: #b3261e; --other: #7a5200; }
@media (prefers-color-scheme: dark) { :root { --ground: #12161b; --text: #e4e8ec; --faint: #9aa5b1; --rule: #353d47;
  --panel: #1b2128; --line: #6cb2ff; --lost: #e0a04030; --again: #e8ab58; --good: #63cf81; --bad: #ff8a80;
  --other: #e6bb66; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 78rem; padding: 1.5rem 1.25rem 4rem; background: var(--ground); color: var(--text);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
h1 { font-size: 1.45rem; margin: 0; overflow-wrap: anywhere; line-height: 1.25; }
h2 { font-size: 1.1rem; margin: 2.25rem 0 .75rem; padding-bottom: .25rem; border-bottom: 1px solid var(--rule); }
h3 { font-size: .95rem; margin: 0 0 .25rem; overflow-wrap: anywhere; }
h4 { font-size: .9rem; margin: 1rem 0 .25rem; }
h3 small, .faint { color: var(--faint); font-weight: normal; }
p { margin: .4rem 0; overflow-wrap: anywhere; }
a { color: var(--line); overflow-wrap: anywhere; }
.state { display: inline-block; margin-right: .5rem; padding: .05rem .6rem; border: 1.5px solid currentColor;
  border-radius: 1rem; font-weight: 600; color: var(--other); }
.state.succeeded { color: var(--good); } .state.failed { color: var(--bad); } .state.running { color: var(--line); }
.reason { font-size: 1.05rem; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 30rem), 1fr)); gap: 1.25rem; }
figure { margin: 0; padding: .9rem; border: 1px solid var(--rule); border-radius: .5rem; min-width: 0; }
figcaption { color: var(--faint); font-size: .85rem; margin: .25rem 0 .4rem; }
svg { display: block; width: 100%; height: auto; }
svg text { fill: var(--faint); font-size: 12px; font-variant-numeric: tabular-nums; }
svg .name { fill: var(--text); }
svg .grid { stroke: var(--rule); stroke-width: 1; } svg .axis { stroke: var(--faint); stroke-width: 1; }
svg .line { fill: none; stroke: var(--line); stroke-width: 1.6; stroke-linejoin: round; }
svg .again { fill: none; stroke: var(--again); stroke-width: 1.4; stroke-dasharray: 4 3; stroke-linejoin: round; }
svg .band.line, svg .band.again { stroke-opacity: .3; stroke-dasharray: none; stroke-width: 1; }
svg .dot.line { fill: var(--line); } svg .dot.again { fill: var(--again); }
svg .begins { stroke: var(--faint); stroke-width: 1; stroke-dasharray: 2 3; }
svg .lost { fill: var(--lost); } svg .odd { fill: var(--bad); }
.scroll { overflow-x: auto; max-width: 100%; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
caption { text-align: left; color: var(--faint); padding: .3rem 0; }
.hidden { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); white-space: nowrap; }
th, td { text-align: left; vertical-align: top; padding: .3rem .9rem .3rem 0; border-bottom: 1px solid var(--rule);
  font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
thead th { color: var(--faint); font-weight: 600; white-space: nowrap; }
th[scope=row] { font-weight: 600; } .number { text-align: right; white-space: nowrap; }
td.short, th.short { white-space: nowrap; } td.long { min-width: 15rem; } .facts td.long { min-width: 0; }
.facts th[scope=row] { width: 12.5rem; font-weight: normal; color: var(--faint); white-space: nowrap; }
.facts thead { display: none; }
pre { margin: .4rem 0; padding: .7rem .9rem; background: var(--panel); border: 1px solid var(--rule);
  border-radius: .4rem;
  overflow-x: auto; font: 12.5px/1.45 ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace;
  tab-size: 4; }
pre.tall { max-height: 32rem; overflow-y: auto; }
code { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; font-size: .92em; }
summary { cursor: pointer; color: var(--faint); font-size: .9rem; padding: .15rem 0; }
details > summary:hover { color: var(--text); }
@media (max-width: 40rem) { body { padding: 1rem .75rem 3rem; } svg { overflow: visible; }
  svg text { font-size: 19px; } svg .line { stroke-width: 2.4; }
  .facts th[scope=row] { width: 7.5rem; white-space: normal; } thead th, td.short, th.short { padding-right: .6rem; } }
@media print { body { max-width: none; } figure, pre, tr { break-inside: avoid; } }
"""
