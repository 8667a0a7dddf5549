"""The log follower: each node's lines exactly once and in order, even if they come late, twice or never."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping

from hypothesis import given, settings
from hypothesis import strategies as st
from profiles import examples
from rows import for_each

from cloudtrain.provider_api.node import attempt_key
from cloudtrain.provider_api.protocol import LogLine
from cloudtrain.runs.log_order import Line, LogOrderer, MissingRange, Stream, parse_line

FOREVER = 1000.0


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def numbered(seq: int, *, attempt: str = "0.0", node: int = 0, rank: str = "0", text: str = "") -> str:
    return f"[a{attempt} n{node} r{rank} #{seq}] {text or f'line {seq}'}"


def raw(seq: int, *, attempt: str = "0.0", node: int = 0) -> LogLine:
    return LogLine(node=f"host-{node}", text=numbered(seq, attempt=attempt, node=node))


def seqs(lines: Iterable[Line]) -> list[int | str]:
    return [line.seq or line.text for line in lines]


def make(clock: Clock | None = None, **settings: int) -> LogOrderer:
    return LogOrderer(clock=clock or Clock(), **settings)


# ------------------------------------------------------------------------------------------------------------- one line


def test_a_numbered_line_is_taken_apart() -> None:
    line = parse_line(LogLine(node="algo-2", text="[a1.2 n1 r13 #7] loss=0.5", time=12.5))
    assert line == Line(attempt="1.2", node=1, rank=13, seq=7, text="loss=0.5", time=12.5)
    assert line.stream == ("1.2", 1)


def test_the_runtimes_own_line_has_no_rank() -> None:
    assert parse_line(LogLine(node="x", text="[a0.0 n0 r- #1] cloudtrain: hello")).rank is None


@for_each(
    ("text", "expected"),
    [
        ("[a0.0 n0 r0 #3] ", ""),
        ("[a0.0 n0 r0 #3]", ""),
        ("[a0.0 n0 r0 #3]   two", "  two"),
        ("[a0.0 n0 r0 #3] a\x85b\u2028c\rd\n", "a\x85b\u2028c\rd\n"),
        ("[a0.0 n0 r0 #3] [a9.9 n9 r9 #9] said the script", "[a9.9 n9 r9 #9] said the script"),
    ],
)
def test_the_text_stays_as_it_was(text: str, expected: str) -> None:
    line = parse_line(LogLine(node="", text=text))
    assert (line.seq, line.text) == (3, expected)


@for_each(
    "text",
    [
        "",
        "hello",
        "[a0 n0 r0 #1] x",
        "[a0.0 n0 r0 #0] x",
        "[a0.0 n0 r0 #1]x",
        " [a0.0 n0 r0 #1] x",
        "[a0.0 n٣ r0 #1] x",
        f"[a0.0 n0 r0 #{'9' * 5000}] x",
    ],
)
def test_anything_else_is_the_platforms_own(text: str) -> None:
    line = parse_line(LogLine(node="algo-1", text=text))
    assert line == Line(attempt="", node="algo-1", rank=None, seq=0, text=text)
    assert line.stream is None


def test_attempts_sort_by_number() -> None:
    assert sorted(["10.0", "2.1", "2.0", "", "x.y"], key=attempt_key) == ["", "x.y", "2.0", "2.1", "10.0"]
    names = ["1.0/node-2", "0.1/node-10", "0.1/node-9", "0.10/node-0"]
    assert sorted(names, key=attempt_key) == ["0.1/node-9", "0.1/node-10", "0.10/node-0", "1.0/node-2"]


# ----------------------------------------------------------------------------------------------------------------- gaps


def test_late_lines_are_put_in_order_and_repeated_ones_dropped() -> None:
    follower = make()
    assert seqs(follower.page([raw(2), raw(1), raw(1), raw(4), raw(2)])) == [1, 2]
    assert seqs(follower.page([raw(4), raw(3), raw(5), raw(1)])) == [3, 4, 5]
    assert follower.position(("0.0", 0)) == 6
    assert list(follower.finish()) == []


def test_a_gap_holds_no_other_node_or_attempt_back() -> None:
    follower = make()
    lines = [raw(2), raw(1, node=1), raw(1, attempt="0.1"), raw(2, node=1)]
    assert [(line.stream, line.seq) for line in follower.page(lines)] == [
        (("0.0", 1), 1),
        (("0.1", 0), 1),
        (("0.0", 1), 2),
    ]


def test_a_gap_is_looked_for_after_its_time_and_filled_from_a_segment() -> None:
    clock = Clock()
    follower = make(clock)
    assert seqs(follower.page([raw(1), raw(4), raw(6)])) == [1]
    clock.now += 9.9
    assert follower.wanted() == []
    clock.now += 0.1
    assert follower.wanted() == [want := MissingRange(attempt="0.0", node=0, first=2, last=5)]
    assert seqs(follower.segment(numbered(i) for i in range(1, 7))) == [2, 3, 4, 5, 6]
    assert list(follower.answered(want)) == []
    clock.now += FOREVER
    assert follower.wanted() == []


def test_a_gap_that_no_segment_fills_becomes_one_marker() -> None:
    clock = Clock()
    follower = make(clock)
    assert seqs(follower.page([raw(1), raw(5)])) == [1]
    answers: list[Line] = []
    asked = []
    for _ in range(31):
        for want in follower.wanted():
            asked.append(clock.now - 100)
            answers += follower.answered(want)
        clock.now += 1
    assert asked == [10, 20, 30]
    assert seqs(answers) == ["[… 3 lines lost]", 5]
    assert (answers[0].attempt, answers[0].node, answers[0].rank) == ("0.0", 0, None)
    assert list(follower.page([raw(3)])) == []  # too late: order is not broken for it
    assert seqs(follower.page([raw(6)])) == [6]


def test_each_gap_has_a_time_of_its_own() -> None:
    clock = Clock()
    follower = make(clock)
    list(follower.page([raw(2)]))
    clock.now += 25
    list(follower.page([raw(4)]))
    clock.now += 5
    (want,) = follower.wanted()
    assert seqs(follower.answered(want)) == ["[… 1 line lost]", 2]
    assert seqs(follower.page([raw(3)])) == [3, 4]


def test_what_waits_is_bounded() -> None:
    follower = make(max_held=10)
    assert list(follower.page(raw(i) for i in range(2, 12))) == []
    assert follower.wanted() == []
    assert list(follower.page([raw(12)])) == []
    assert follower.wanted() == [MissingRange(attempt="0.0", node=0, first=1, last=11)]  # at once
    out = list(follower.page(raw(i) for i in range(13, 1000)))
    assert seqs(out) == ["[… 1 line lost]", *range(2, 1000)]


def test_a_full_node_is_given_up_as_soon_as_its_segments_were_read() -> None:
    follower = make(max_held=10)
    list(follower.page(raw(i) for i in range(3, 15)))
    (want,) = follower.wanted()
    assert seqs(follower.answered(want)) == ["[… 2 lines lost]", *range(3, 15)]


# ------------------------------------------------------------------------------------------------- the platform's lines


def test_the_platforms_own_lines_are_told_apart_by_its_id() -> None:
    follower = make()
    own = [LogLine(node="h", text="pulling", id="1"), LogLine(node="h", text="pulling", id="2")]
    assert [line.text for line in follower.page(own + own)] == ["pulling", "pulling"]
    assert len(list(follower.page([LogLine(node="h", text="no id")] * 2))) == 2


def test_the_ids_remembered_are_bounded() -> None:
    follower = make(max_ids=3)
    lines = [LogLine(node="h", text="x", id=str(i)) for i in range(5)]
    assert len(list(follower.page(lines))) == 5
    assert len(list(follower.page(lines[2:]))) == 0
    assert len(list(follower.page(lines[:1]))) == 1


# -------------------------------------------------------------------------------------------------------------- the end


def test_the_end_asks_for_exactly_what_is_missing() -> None:
    follower = make()
    list(follower.page([raw(1), raw(2), raw(1, node=1), raw(1, node=2), raw(3, node=3)]))
    exits = [{"attempt": "0.0", "node": n, "lines": lines} for n, lines in enumerate([2, 4, None, 3])]
    assert follower.drain(exits, [("0.1", 0), ("0.0", 0)]) == [
        MissingRange(attempt="0.0", node=1, first=2, last=4),
        MissingRange(attempt="0.0", node=2, first=2, last=None),
        MissingRange(attempt="0.0", node=3, first=1, last=3),
        MissingRange(attempt="0.1", node=0, first=1, last=None),
    ]
    assert seqs(follower.segment(numbered(i, node=1) for i in (2, 3))) == [2, 3]
    assert seqs(follower.finish()) == ["[… 1 line lost]", "[… 2 lines lost]", 3]
    assert list(follower.finish()) == []


def test_a_segment_line_without_a_number_is_left_out() -> None:
    assert seqs(make().segment(["torn", numbered(1), ""])) == [1]


# ----------------------------------------------------------------------------------------------------------- properties

STREAMS: list[Stream] = [(attempt, node) for attempt in ("0.0", "0.1", "1.0") for node in range(3)]
Segments = Mapping[Stream, list[int]]


def read(segments: Segments, want: MissingRange) -> Iterator[str]:
    for seq in segments.get(want.stream, []):
        if seq >= want.first and (want.last is None or seq <= want.last):
            yield numbered(seq, attempt=want.attempt, node=want.node)


def play(
    follower: LogOrderer, clock: Clock, pages: list[list[LogLine]], step: float, segments: Segments
) -> Iterator[Line]:
    """Run a reader's loop: a page every ``step`` seconds, and missing lines from ``segments``."""
    for page in pages:
        yield from follower.page(page)
        clock.now += step
        for want in follower.wanted():
            yield from follower.segment(read(segments, want))
            yield from follower.answered(want)


def end(follower: LogOrderer, totals: Mapping[Stream, int], segments: Segments) -> Iterator[Line]:
    exits = [{"attempt": a, "node": n, "lines": total} for (a, n), total in totals.items()]
    for want in follower.drain(exits, segments):
        yield from follower.segment(read(segments, want))
    yield from follower.finish()


def by_stream(lines: Iterable[Line]) -> dict[Stream, list[Line]]:
    out: dict[Stream, list[Line]] = {}
    for line in lines:
        if line.stream is not None:
            out.setdefault(line.stream, []).append(line)
    return out


@st.composite
def deliveries(draw: Callable[..., object]) -> tuple[dict[Stream, int], list[list[LogLine]]]:
    """Draw the number of lines of each stream, and pages in which each line comes 0 to 3 times, in any order."""
    totals = draw(st.dictionaries(st.sampled_from(STREAMS), st.integers(0, 25), max_size=6))
    assert isinstance(totals, dict)
    rng = random.Random(draw(st.integers(0, 2**32)))
    lateness = draw(st.sampled_from([0.0, 3.0, 1000.0]))
    weights = draw(st.sampled_from([(0, 1, 0, 0), (1, 4, 2, 1), (3, 1, 1, 0), (1, 0, 0, 0)]))
    stamped = []
    for (attempt, node), total in totals.items():
        for seq in range(1, total + 1):
            for _ in range(rng.choices(range(4), weights)[0]):
                stamped.append((seq + rng.random() * lateness, raw(seq, attempt=attempt, node=node)))
    stamped += [
        (rng.random() * 25, LogLine(node="h", text=f"own {i}", id=str(i)))
        for i in range(5)
        for _ in range(rng.randint(1, 3))
    ]
    lines = [line for _, line in sorted(stamped, key=lambda item: item[0])]
    pages, size = [], draw(st.integers(1, 9))
    assert isinstance(size, int)
    for start in range(0, len(lines), size):
        pages.append(lines[start : start + size])
        if rng.random() < 0.1:
            pages.append(lines[: start + size])  # a reader that began again from the first cursor
    return totals, pages


@settings(max_examples=examples(400), deadline=None)
@given(deliveries(), st.sampled_from([0.1, 2.0, 11.0, 40.0]), st.booleans(), st.sampled_from([3, 10_000]))
def test_every_line_once_and_in_order(
    delivery: tuple[dict[Stream, int], list[list[LogLine]]], step: float, recorded: bool, max_held: int
) -> None:
    totals, pages = delivery
    segments = {stream: list(range(1, total + 1)) for stream, total in totals.items()}
    clock = Clock()
    # A page of up to 25 x 3 lines with max_held 3 could overflow before the first check, so pages are cut.
    cut = [[line] for page in pages for line in page] if max_held == 3 else pages
    follower = make(clock, max_held=max_held)
    out = list(play(follower, clock, cut, step, segments))
    out += end(follower, totals if recorded else {}, segments)
    assert {s: seqs(lines) for s, lines in by_stream(out).items()} == {
        s: list(range(1, n + 1)) for s, n in totals.items() if n
    }
    sent = Counter(line.id for page in pages for line in page if line.id)
    assert Counter(line.text for line in out if line.stream is None) == {f"own {i}": 1 for i in sent}


@settings(max_examples=examples(300), deadline=None)
@given(deliveries(), st.sampled_from([0.1, 2.0, 11.0, 40.0]), st.integers(0, 2**32))
def test_what_is_truly_lost_is_counted(
    delivery: tuple[dict[Stream, int], list[list[LogLine]]], step: float, seed: int
) -> None:
    totals, pages = delivery
    rng = random.Random(seed)
    segments = {stream: [i for i in range(1, total + 1) if rng.random() < 0.5] for stream, total in totals.items()}
    clock = Clock()
    follower = make(clock)
    out = by_stream([*play(follower, clock, pages, step, segments), *end(follower, totals, segments)])
    assert set(out) == {stream for stream, total in totals.items() if total}
    for stream, lines in out.items():
        position = 0
        for line in lines:
            if line.seq:
                assert line.seq == position + 1
            position += 1 if line.seq else int(line.text.split()[1])
        assert position == totals[stream]
