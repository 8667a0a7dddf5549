"""The report page: correct numbers, no file from elsewhere, and no content that could run."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import time
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from memory_run import PENDING, ROOT_CAUSE, RUNNING, SUCCEEDED, T0, World, again, failed, failure, rows
from rows import for_each

from cloudtrain import cli
from cloudtrain.errors import NotFoundError, SpecError
from cloudtrain.provider_api.protocol import Status
from cloudtrain.report import live_data as seen_module
from cloudtrain.report.curves import curves, means, number, spread, ticks
from cloudtrain.report.live_data import LiveRunReader
from cloudtrain.report.markup import COLUMNS, HEIGHT, LEFT, RIGHT, WIDTH, quantity, short, tag
from cloudtrain.report.report import HIDDEN, report, shareable
from cloudtrain.runs.run import Run
from cloudtrain.storage.files import files
from cloudtrain.storage.local_disk import walk
from cloudtrain.store.store import Store

CANARY = "<script>alert('ran')</script><img src=x onerror=alert(1)>\"' --></title></style></svg></pre>&amp;"
VOID = {"meta"}
LOADS = {"src", "srcset", "data", "poster", "background", "action", "formaction", "xlink:href", "ping", "manifest"}


class Page(HTMLParser):
    """A parsed page. It must be well-formed, and load and run nothing."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.source, self.stack, self.found = text, list[str](), list[tuple[str, dict[str, str]]]()
        self.texts: list[tuple[tuple[str, ...], str]] = []
        self.feed(text)
        self.close()
        assert self.stack == [], "elements that are never closed"
        ids = [attributes["id"] for _, attributes in self.found if "id" in attributes]
        assert len(ids) == len(set(ids))

    def handle_starttag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        self._check(name, attributes)
        if name not in VOID:
            self.stack.append(name)

    def handle_startendtag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        raise AssertionError(f"<{name}/> is no HTML")

    def handle_endtag(self, name: str) -> None:
        assert self.stack, f"</{name}> closes nothing"
        assert self.stack.pop() == name

    def handle_data(self, data: str) -> None:
        self.texts.append((tuple(self.stack), data))
        if self.stack[-1:] == ["style"]:
            assert not re.search(r"url\(|@import|expression|</", data)

    def _check(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        table = {key: value or "" for key, value in attributes}
        assert len(table) == len(attributes), f"<{name}> has an attribute twice"
        assert name not in ("script", "iframe", "object", "embed", "link", "img", "base", "form", "foreignobject")
        assert not {key for key in table if key.startswith("on") or key in LOADS | {"style"}}, table
        if "href" in table:
            assert name == "a"
            assert table["href"].startswith(("https://", "http://"))
        self.found.append((name, table))

    @property
    def text(self) -> str:
        return " ".join(data for stack, data in self.texts if "style" not in stack)

    def of(self, name: str, kind: str = "") -> list[dict[str, str]]:
        return [table for found, table in self.found if found == name and kind in ("", table.get("class"))]

    def table(self, caption: str) -> list[list[str]]:
        """Return the cells of the table whose caption begins with ``caption``, its head first."""
        inner = next(
            part
            for part in self.source.split("<table>")[1:]
            if _text(part.partition("</caption>")[0]).startswith(caption)
        ).partition("</table>")[0]
        rows = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.DOTALL) for row in inner.split("<tr>")[1:]]
        return [[_text(cell) for cell in row] for row in rows]

    def facts(self, caption: str) -> dict[str, str]:
        return {row[0]: row[1] for row in self.table(caption)[1:]}

    def blocks(self) -> list[str]:
        return [_text(part.partition(">")[2].partition("</pre>")[0]) for part in self.source.split("<pre")[1:]]

    def figure(self, name: str) -> str:
        return next(part for part in self.source.split("<figure>")[1:] if part.startswith(f"<h3>{name}"))


def _text(markup: str) -> str:
    import html

    return html.unescape(re.sub(r"<[^>]*>", "", markup))


def page_of(world: World, now: float = T0 + 60) -> Page:
    run = world.run()
    return Page(report(run, run.result(), clock=lambda: now))


def points(figure: str, kind: str) -> list[list[tuple[float, float]]]:
    lines = re.findall(rf'<polyline points="([^"]*)" class="{kind}">', figure)
    return [[tuple(map(float, pair.split(","))) for pair in line.split(" ")] for line in lines]  # type: ignore[misc]


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(root=tmp_path / "store")


# -------------------------------------------------------------------------------------------------------- kinds of runs


def test_a_good_run(world: World) -> None:
    world.recorded(name="digits", max_runtime="2h", retries=1).attempt(0, SUCCEEDED).start("0.0")
    world.exit(outcome="succeeded", decided=True, lines=3).segment([1, 2, 3])
    world.write("live/metrics/0.0-node-0.jsonl", rows(1, 20, lr=0.1, peak_memory=3 << 30, samples_per_s=800.5))
    world.checkpoint("step-20", when=T0 + 5)
    page = page_of(world)
    assert page.facts("Summary") == {
        "state": "succeeded, exit code 0",
        "time": "10s, 2023-11-14 22:13:20 UTC to 2023-11-14 22:13:30 UTC",
        "attempts": "1",
        "last step": "20",
        "loss": "0.05 at the end, lowest 0.05 at step 20",
        "newest checkpoint": "step-20, complete since 2023-11-14 22:13:25 UTC",
        "cost": "free, this machine",
    }
    assert page.table("loss, 20 points")[1:] == [[str(s), "0.0", quantity(1 / s)] for s in range(1, 21)]
    [line] = points(page.figure("loss"), "line")
    assert len(line) == 20
    assert (line[0][0], line[-1][0]) == (LEFT, RIGHT)
    assert all(0 <= y <= HEIGHT for _, y in line)
    assert [y for _, y in line] == sorted(y for _, y in line), "a loss that falls goes down the page"
    assert [part.partition("<")[0] for part in page.source.split("<h3>")[1:]] == [
        "loss", "samples_per_s", "lr", "peak_memory",
    ]  # fmt: skip
    assert "3 GiB" in page.figure("peak_memory")
    assert page.table("Complete ones")[1:] == [["step-20", "20", "0.0", "1", "3 B", "2023-11-14 22:13:25 UTC", "55s"]]
    assert page.blocks()[0].split("\n") == ["[n0 r0] line 1", "[n0 r0] line 2", "[n0 r0] line 3"]
    assert page.facts("Configuration")["limits"] == "max_runtime 2h, stall_timeout 30m, 1 retry"
    assert "Failure" not in page.text
    assert page.of("html") == [{"lang": "en"}]
    assert "default-src 'none'" in page.source
    assert all(table.get("role") == "img" for table in page.of("svg"))
    assert page.source.count("<title>") == 1 + len(page.of("svg")), "a chart has no name for screen readers"


def test_a_failed_run_shows_the_rank_that_failed_first(world: World) -> None:
    trace = 'Traceback (most recent call last):\n  File "t.py", line 7\nValueError: THE ROOT CAUSE'
    cause = {**ROOT_CAUSE, "traceback": trace, "process_exit_code": 1, "line": 7}
    world.recorded().attempt(0, failed()).exit(1, decided=True, category="user_error", failure=cause)
    lines = [f"[a0.0 n1 r{2 + i % 2} #{i}] of rank {2 + i % 2}, line {i}" for i in range(1, 13)]
    world.write("live/logs/0.0/node-1/000000001.log", "\n".join(lines[:4]) + "\n")
    world.write("live/logs/0.0/node-1/000000005.log", "\n".join(lines[4:]) + "\n")
    world.write("live/logs/0.0/node-0/000000001.log", "[a0.0 n0 r0 #1] of node 0\n")
    page = page_of(world)
    assert page.facts("Where it failed") == {
        "attempt": "0.0",
        "node": "1",
        "rank": "3",
        "exception": "ValueError: THE ROOT CAUSE and more",
        "place": "/scratch/code/t.py:7",
        "exit code of the process": "1",
    }
    first, second, *others = page.blocks()
    assert first == trace
    assert second.split("\n") == [f"of rank 3, line {i}" for i in range(1, 13, 2)]
    assert any("of node 0" in block for block in others)
    assert page.of("span", "state failed")
    assert "No node has written any metrics." in page.text
    assert "No node has written any metrics yet" not in page.text


def test_a_run_that_was_preempted_and_went_on(world: World) -> None:
    page = page_of(again(world))
    told = page.table("Attempts")
    assert [row[0] for row in told[1:]] == ["0.0", "1.0"]
    assert told[0][4:] == ["how it ended", "lost, done again"], "an empty column"
    assert told[1][4:] == ["preempted: spot capacity", "4 steps, 2 s"]
    assert told[2][3:5] == ["step-8", "succeeded"]
    assert page.facts("Summary")["attempts"] == "2, 4 steps and 2s done again"
    assert page.facts("Summary")["cost"] == "16s of machine time billed, about 1.50 USD, spot saved 63%"
    figure = page.figure("loss")

    def x(step: float) -> float:
        return LEFT + (step - 1) / 19 * (RIGHT - LEFT)

    [lost] = re.findall(r'<rect x="([\d.]+)" y="22.0" width="([\d.]+)"[^>]*class="lost">', figure)
    assert float(lost[0]) == pytest.approx(x(9), abs=0.06)
    assert float(lost[1]) == pytest.approx(x(12) - x(9), abs=0.1)
    [begins] = re.findall(r'<line x1="([\d.]+)"[^>]*class="begins">', figure)
    assert begins == lost[0]
    assert [[x for x, _ in line] for line in points(figure, "line")] == [
        pytest.approx([x(s) for s in range(1, 9)], abs=0.06),
        pytest.approx([x(s) for s in range(9, 21)], abs=0.06),
    ]
    [dashed] = points(figure, "again")
    assert [x for x, _ in dashed] == pytest.approx([x(s) for s in range(8, 13)], abs=0.06)
    assert "Steps 9 to 12 of attempt 0.0 were done again (dashed)." in page.text
    assert [row[3] for row in page.table("loss, 24 points")[1:]] == [""] * 8 + ["yes"] * 4 + [""] * 12
    assert "<h3>steps per second" in page.source, "no throughput from the times"
    assert page.table("steps per second")[1] == ["2", "0.0", "2", ""]


@pytest.mark.parametrize(("status", "text"), [(PENDING, "pending"), (RUNNING, "running")])
def test_a_run_that_goes_on(world: World, status: Status, text: str) -> None:
    world.recorded().attempt(0, status)
    world.time.now = T0 + 60
    if status is RUNNING:
        world.start("0.0").checkpoint("step-8", when=T0 + 30)
    page = page_of(world)
    assert page.facts("Summary")["state"] == text
    assert "The run continues" in page.text
    assert "No node has written any metrics yet." in page.text
    if status is RUNNING:
        assert page.facts("Summary")["time"] == "1m so far, from 2023-11-14 22:13:20 UTC"
        assert page.facts("Summary")["newest checkpoint"].startswith("step-8, 30s old")


def test_a_run_that_was_cancelled_before_anything_ran(world: World) -> None:
    world.recorded()
    world.write("cancelled.json", {"time": T0})
    page = page_of(world)
    assert page.facts("Summary")["state"] == "cancelled, exit code 5"
    assert page.facts("Summary")["attempts"] == "none has started"
    assert "No node has written a line to the store." in page.text


def test_a_page_about_a_rehearsal_names_the_platform(world: World) -> None:
    world.recorded().attempt(0, SUCCEEDED).exit(outcome="succeeded", decided=True)
    for step in range(10, 80, 10):
        world.checkpoint(f"step-{step}", seq=step, when=T0 + step)
    path = world.folder / "attempts/0/request.json"
    sent = json.loads(path.read_text())
    sent["body"] = {"target": "vertex", "differences": ["/gcs is a folder", "no quota"]}
    path.write_text(json.dumps(sent))
    page = page_of(world)
    assert "rehearsal of vertex on this machine" in page.text
    assert "Other than on vertex" in page.text
    assert "no quota" in page.text
    assert len(page.table("Complete ones")) == 1 + 5
    assert [row[0] for row in page.table("2 older ones")[1:]] == ["step-20", "step-10"]
    sent |= {"body": {}, "instance_types": ["n1-standard-4"]}
    path.write_text(json.dumps(sent))
    page = page_of(world)
    assert "rehearsal of" not in page.text
    assert page.facts("Summary")["cost"] == "the platform does not report it"


def test_the_handle_has_the_metrics_and_writes_the_page(world: World, tmp_path: Path) -> None:
    world.recorded().attempt(0, Status(state="running"))
    world.write("live/metrics/0.0-node-0.jsonl", rows(1, 12))
    world.write("live/metrics/1.0-node-0.jsonl", rows(9, 20))
    run = world.run()
    assert [row["step"] for row in run.metrics()] == list(range(1, 21))
    (tmp_path / "pages").mkdir()
    assert run.report(tmp_path / "pages") == tmp_path / "pages/r1.html"
    assert run.report(str(tmp_path / "own.html")) == tmp_path / "own.html"
    assert Page((tmp_path / "own.html").read_text()).found
    with pytest.raises(SpecError, match="there is no folder"):
        run.report(tmp_path / "nowhere" / "own.html")
    world.run_id = "nope"
    with pytest.raises(NotFoundError, match="no run"):
        world.run().metrics()


# ---------------------------------------------------------------------------------------------------------- odd metrics


def test_numbers_that_are_none(world: World) -> None:
    values = ["0.5", "NaN", "null", "-Infinity", "1e308", "-1e308", "1" + "0" * 400, '"text"', "true", "[1]", "0.25"]
    text = "".join(f'{{"step": {i}, "loss": {value}}}\n' for i, value in enumerate(values))
    world.recorded().attempt(0, SUCCEEDED).exit(outcome="succeeded", decided=True)
    world.write("live/metrics/0.0-node-0.jsonl", text + '{"step": NaN, "loss": 1}\n{"loss": 2}\n{"step": 1e999}\n{"st')
    page = page_of(world)
    figure = page.figure("loss")
    assert "4 values are no finite number, the first at step 1." in page.text
    assert [len(line) for line in points(figure, "line")] == [2], "1e308 and -1e308; a single point is a dot"
    assert len(re.findall('class="dot line"', figure)) == 2
    drawing = figure.partition("<svg")[2].partition("</svg>")[0]
    assert not re.search(r'="[^"]*(nan|inf)', drawing, re.IGNORECASE)
    assert len(re.findall('class="odd"', figure)) == 4


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}\n[]\nnot json\n",
        '{"step": 1, "note": "x"}\n',
        '{"step": 1, "loss": 3}\n',
        '{"step": 1, "loss": null}\n',
        '{"loss": 3}\n{"loss": 2}\n',
        '{"step": 5, "loss": 1}\n{"step": 5, "loss": 1}\n',
        '{"step": -1e308, "loss": -1e308}\n{"step": 1e308, "loss": 1e308}\n',
        '{"step": 0, "loss": 5e-324}\n{"step": 1, "loss": 1e308}\n',
        '{"step": 1e16, "loss": 1}\n{"step": 10000000000000002, "loss": 1.0000000000000002}\n',
        '{"step": 1, "loss": 0}\n{"step": 2, "loss": 0}\n',
    ],
)
def test_metrics_of_any_kind_make_a_page(world: World, text: str) -> None:
    world.recorded().attempt(0, SUCCEEDED)
    world.write("live/metrics/0.0-node-0.jsonl", text)
    page = page_of(world)
    for figure in page.source.split("<svg")[1:]:
        drawing = figure.partition("</svg>")[0]
        assert not re.search(r'="[^"]*(nan|inf)', drawing, re.IGNORECASE)
        for value in re.findall(r' (?:x|y|x1|x2|y1|y2|cx|cy)="([^"]*)"', drawing):
            assert -1 <= float(value) <= WIDTH


def test_a_loss_that_falls_by_decades_has_a_logarithmic_axis(world: World) -> None:
    world.recorded().attempt(0, SUCCEEDED)
    text = "".join(json.dumps({"step": i, "loss": 10.0**-i}) + "\n" for i in range(6))
    world.write("live/metrics/0.0-node-0.jsonl", text)
    page = page_of(world)
    assert "(logarithmic)" in page.figure("loss")
    [line] = points(page.figure("loss"), "line")
    falls = [b[1] - a[1] for a, b in pairwise(line)]
    assert falls == pytest.approx([falls[0]] * 5, abs=0.2)
    assert falls[0] > 20


def test_a_learning_rate_that_ends_near_zero_keeps_its_shape(world: World) -> None:
    world.recorded().attempt(0, SUCCEEDED)
    text = "".join(json.dumps({"step": i, "loss": 1.0, "lr": 1e-3 * (1 - i / 100) + 1e-9}) + "\n" for i in range(101))
    world.write("live/metrics/0.0-node-0.jsonl", text)
    assert "(logarithmic)" not in page_of(world).figure("lr")


@pytest.mark.slow
def test_a_hundred_thousand_rows_are_drawn_without_losing_a_peak(world: World) -> None:
    count, peak = 100_000, 43_210
    text = "".join(
        f'{{"step": {i}, "loss": {50 if i == peak else 1 + math.sin(i / 9000) / 2:.4f}}}\n' for i in range(1, count + 1)
    )
    world.recorded().attempt(0, SUCCEEDED)
    world.write("live/metrics/0.0-node-0.jsonl", text)
    page = page_of(world)
    assert len(page.source) < 200_000
    [line] = points(page.figure("loss"), "line")
    assert len(line) == COLUMNS // 2, "means"
    [band] = points(page.figure("loss"), "band line")
    assert len(band) <= 4 * COLUMNS
    highest = min(band, key=lambda point: point[1])
    assert highest[0] == pytest.approx(LEFT + (peak - 1) / (count - 1) * COLUMNS, abs=0.2)
    assert "100,000 points, more than the drawing can show" in page.text
    assert "has the first, lowest, highest and last of each column" in page.text
    table = page.table("loss, 40 of 100,000 points")
    assert (table[1][0], table[-1][0]) == ("1", "100,000")
    assert f"highest 50 at {peak:,}" in page.text


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(-1e6, 1e6)), max_size=400), st.integers(1, 12))
def test_what_is_left_out_of_a_drawing_is_neither_lowest_nor_highest(
    some: list[tuple[float, float]], columns: int
) -> None:
    some.sort(key=lambda point: point[0])
    shown = spread(some, columns, 0, 100)
    middle = means(some, columns, 0, 100)
    assert len(middle) == len({min(columns - 1, int(x / 100 * columns)) for x, _ in some})
    assert not some or min(y for _, y in some) - 1e-6 <= middle[0][1] <= max(y for _, y in some) + 1e-6
    left = iter(some)
    assert all(point in left for point in shown), "points of the curve, in their order"
    assert len(shown) <= 4 * columns
    for column in range(columns):
        before = [y for x, y in some if min(columns - 1, int(x / 100 * columns)) == column]
        after = [y for x, y in shown if min(columns - 1, int(x / 100 * columns)) == column]
        assert [min(before), max(before)] == [min(after), max(after)] if before else after == []


@given(st.floats(allow_nan=False), st.floats(allow_nan=False), st.integers(1, 8))
def test_ticks_are_few_and_within(low: float, high: float, about: int) -> None:
    marks = ticks(low, high, about)
    assert len(marks) <= 10 * about + 1
    assert marks == sorted(marks)
    if low < high and math.isfinite(high - low) and high - low > 1e-9 * max(abs(low), abs(high)):
        slack = (high - low) * 1e-6
        assert marks
        assert all(low - slack <= mark <= high + slack for mark in marks)


@for_each(
    ("low", "high", "about", "wanted"),
    [
        (0.95, 0.9944, 4, [0.95, 0.96, 0.97, 0.98, 0.99]),
        (1, 264, 5, [50, 100, 150, 200, 250]),
        (0, 0.99, 4, [0, 0.2, 0.4, 0.6, 0.8]),
        (0, 10, 5, [0, 2, 4, 6, 8, 10]),
        (-1, 1, 1, [-1, 0, 1]),
    ],
)
def test_ticks_are_enough_to_read_a_value(low: float, high: float, about: int, wanted: list[float]) -> None:
    assert ticks(low, high, about) == wanted


def test_the_words_of_numbers() -> None:
    assert [quantity(v) for v in (0, 12, 1234567, 0.12345, 1234.56, 1e9, 5e-324, math.inf)] == [
        "0", "12", "1,234,567", "0.1235", "1,234.6", "1e+09", "4.941e-324", "inf",
    ]  # fmt: skip
    assert [short(v) for v in (0.5, 20000, 1.3e6, -2.5e9)] == ["0.5", "20,000", "1.3M", "-2.5G"]
    assert number(True) is None
    assert number("1") is None


def test_a_restart_that_wrote_no_rows_loses_none() -> None:
    [curve] = curves({"0.0": [{"step": 1, "loss": 2.0}], "0.1": [{"note": 1}], "1.0": [{"step": 2, "loss": 1.0}]})[:1]
    assert [part.lost_from for part in curve.stretches] == [2.0, 2.0, None]
    assert curve.history == [(1.0, 2.0), (2.0, 1.0)]
    assert all(not part.lost for part in curve.stretches)


# --------------------------------------------------------------------------------------------------------- others' text


def hostile(world: World) -> World:
    """Return a run whose foreign texts are all markup."""
    cause = failure(node=0, rank=0, exception=f"E: {CANARY}", file=CANARY, line=1, traceback=CANARY)
    world.recorded(name="a", env={"NOTE": CANARY}, tags={"t": CANARY}, hyperparameters={CANARY: CANARY})
    world.attempt(0, failed()).start("0.0", resumed_from=CANARY)
    world.exit(decided=True, category="user_error", failure=cause, reason=CANARY, resumed_from=CANARY)
    lines = f"[a0.0 n0 r0 #1] {CANARY}\n[a0.0 n0 r0 #2] \x1b[31mred\x1b[0m \x07\0\n"
    world.write("live/logs/0.0/node-0/000000001.log", lines)
    world.write("live/metrics/0.0-node-0.jsonl", json.dumps({"step": 1, CANARY: 1.0, "loss": CANARY}) + "\n")
    world.checkpoint(CANARY.replace("/", ""))
    return world


def test_text_of_others_is_text(world: World) -> None:
    page = page_of(hostile(world))  # which asserts that no element could run or load
    assert page.source.count("<script") == 0
    assert page.text.count("<script>alert('ran')</script>") >= 10
    assert any(block.endswith(CANARY) for block in page.blocks())
    assert "[n0 r0] red \N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}" in page.text
    assert CANARY in page.facts("Where it failed")["exception"]


@given(st.text(), st.text())
def test_whatever_a_text_holds_it_stays_one(text: str, value: str) -> None:
    page = Page(tag("html", tag("p", text, title=value)))
    [(_, table)] = [found for found in page.found if found[0] == "p"]

    def shown(text: str) -> str:
        return re.sub(
            r"[\0-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]", "\N{REPLACEMENT CHARACTER}", text
        )

    assert [data for stack, data in page.texts if stack[-1] == "p"] == ([shown(text)] if text else [])
    assert table["title"] == shown(value)


def test_what_is_called_a_secret_is_not_shown(world: World) -> None:
    env = {"HF_TOKEN": "hf_1", "myApiKey": "k_1", "PLAIN": "shown", "MAX_TOKENS": "4096"}
    world.recorded(
        env=env,
        secrets={"WANDB_API_KEY": "env:WANDB_API_KEY"},
        args=["--password", "p_1", "--auth-token=t_1", "--lr", "0.1"],
        inputs={"train": "https://user:pw_1@host/a.csv?sig=s_1"},
        tags={"from": "https://gh_1@github.com/x", "data": "abfs://box@account/x"},
    ).attempt(0, RUNNING)
    page = page_of(world)
    for secret in ("hf_1", "k_1", "p_1", "t_1", "pw_1", "s_1", "gh_1"):
        assert secret not in page.source, secret
    for kept in (
        "shown",
        "4096",
        "env:WANDB_API_KEY",
        '"0.1"',
        "https://host/a.csv",
        "https://github.com/x",
        "box@account",
        HIDDEN,
    ):
        assert kept in page.text, kept


def test_shareable_leaves_the_rest_as_it_is() -> None:
    value = {"a": [1, None, True, {"b": 0.5}], "token": 3, "x": "s3://b/k", "tokenizer": "gpt2", "secret": ""}
    assert shareable(value) == value


# --------------------------------------------------------------------------------------------------------- command line


def written(world: World, capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = cli.main(["report", world.run_id, "--store", str(world.root), *argv])
    return code, *capsys.readouterr()


def finished(world: World) -> World:
    again(world)
    world.run().result()
    return world


def test_the_verb_writes_one_file(
    world: World, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    finished(world)
    code, out, err = written(world, capsys)
    assert (code, out) == (0, "r1.html\n"), err
    assert "cloudtrain pull r1" in err
    assert Page((tmp_path / "r1.html").read_text()).facts("Summary")["last step"] == "20"
    (tmp_path / "pages").mkdir()
    code, out, err = written(world, capsys, "--out", "pages", "--json")
    assert json.loads(out) == {
        "run": f"{world.store.url}/runs/r1", "run_id": "r1", "report": "pages/r1.html", "exit_code": 0,
    }  # fmt: skip
    code, out, err = written(world, capsys, "--out", "a/b.html")
    assert (code, out) == (2, "")
    assert "out: there is no folder a to write b.html to" in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pages", "r1.html", "store"]


def test_no_more_is_read_than_needed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page reads the end of a long log, and each file once. It asks the platform only for the run's page."""
    finished(world)
    for first in range(1, 2001, 20):
        world.segment(range(first, first + 20), attempt="1.0")
    run = world.run()
    result = run.result()
    world.platform.asked.clear()
    reads: list[str] = []
    read = type(run.store.files).read
    monkeypatch.setattr(
        type(run.store.files), "read", lambda files, key: (reads.append(key), read(files, key))[1], raising=True
    )
    Page(report(run, result))
    assert len(reads) == len(set(reads)), sorted(reads)
    assert len([key for key in reads if "/logs/" in key]) == 2
    assert world.platform.asked == ["status job-0"]


def test_of_large_merged_segments_few_are_read_to_find_a_rank_that_was_silent(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    for first in range(1, 1001, 100):
        world.segment(range(first, first + 100))
    monkeypatch.setattr(seen_module, "BYTES", 4000)
    reads: list[int] = []
    read = type(world.store.files).read

    def counted(files: Any, key: str) -> bytes:
        data = read(files, key)
        reads.append(len(data))
        return data

    monkeypatch.setattr(type(world.store.files), "read", counted)
    assert LiveRunReader(world.store, world.run_id).lines("0.0", 40, keep=lambda line: line.rank == 77) == {}
    assert len(reads) < 4, "there are ten segments of 2,500 bytes or more"
    assert sum(reads[:-1]) < 4000
    [lines] = LiveRunReader(world.store, world.run_id).lines("0.0", 40).values()
    assert [line.seq for line in lines] == list(range(961, 1001))


@pytest.mark.remote
def test_a_page_is_the_same_from_a_bucket(world: World, s3_url: str) -> None:
    finished(world).checkpoint("step-20").segment([1, 2, 3], attempt="1.0")
    for name, path in walk(world.root).items():
        files(s3_url).upload(path, name)
    there = Run(store=Store(s3_url), run_id=world.run_id, provider=world.platform)
    here, far = (Page(report(run, run.result(), clock=time.time)) for run in (world.run(), there))
    assert far.table("loss, 24 points") == here.table("loss, 24 points")
    assert far.table("Complete ones")[1][:6] == here.table("Complete ones")[1][:6]
    assert far.blocks()[0] == here.blocks()[0] == "[n0 r0] line 1\n[n0 r0] line 2\n[n0 r0] line 3"
    assert far.facts("Links")["run"] == f"{s3_url}/runs/r1"
    [node] = LiveRunReader(there.store, world.run_id).nodes("1.0")
    assert node.seen == pytest.approx(time.time(), abs=60)
    assert LiveRunReader(there.store, world.run_id).attempts() == ["0.0", "1.0"]


# ---------------------------------------------------------------------------------------------------- in a true browser

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
if CHROMIUM:

    @pytest.mark.slow
    def test_a_browser_runs_nothing_of_it(world: World, tmp_path: Path) -> None:
        text = page_of(hostile(world)).source
        (tmp_path / "page.html").write_text(text)
        flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom"]
        done = subprocess.run(
            [str(CHROMIUM), *flags, (tmp_path / "page.html").as_uri()], capture_output=True, text=True, timeout=120
        )
        shown = done.stdout
        assert shown.count("<h2") == text.count("<h2")
        assert "<img" not in shown
        assert "<script" not in shown
