"""``make proof``: all seeded trials, the portability matrix, and every benchmark against its target, as one page.

    python proof/proof.py [--slice] [--no-report] [--only tests|portability|benchmarks] [--trials N] [--seed N]
                          [--workers N] [--select EXPR] [--minutes N]

Exit code 0 only if every trial passed, none was skipped, and every target was met. A slice measures too little for
times: it reports a missed target of a ratio or of seconds, and only a missed target of bytes fails.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TRIALS, SLICE_TRIALS = 1000, 20
MINUTES, SLICE_MINUTES = 30.0, 2.0
SECONDS = 3600
"""Time limit of one test, and of one benchmark."""
IN_SLICE = frozenset({"cold_start", "first_line", "plan"})
"""Benchmarks with a result within a minute. The others take several, and decide on times only."""
MISSED = "target missed in a rough run, which does not count"


@dataclass(frozen=True, kw_only=True)
class Line:
    """One row of the report: ``passed`` None means reported, without a target."""

    name: str
    figure: str
    passed: bool | None
    note: str = ""

    @property
    def verdict(self) -> str:
        return {True: "pass", False: "FAIL", None: "reported"}[self.passed]


@dataclass(frozen=True, kw_only=True)
class Part:
    """One command of the proof with its lines."""

    title: str
    command: str
    lines: Sequence[Line]
    seconds: float

    @property
    def passed(self) -> bool:
        return bool(self.lines) and all(line.passed is not False for line in self.lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the chosen parts, and return the exit code."""
    options = _options(argv)
    began = datetime.datetime.now(datetime.timezone.utc)
    parts = []
    if options.only in (None, "tests"):
        more = {"minutes": options.minutes, "workers": options.workers, "select": options.select}
        parts.append(trials(options.trials, options.seed, **more))
    if options.only == "portability" or not (options.only or options.slice or options.select):
        parts.append(portability())
    if options.only in (None, "benchmarks"):
        parts += [
            benchmark(path, quick=options.slice) for path in benchmarks() if not options.slice or path.stem in IN_SLICE
        ]
    for part in parts:
        print(f"\n{part.title} ({part.seconds:.0f} s): {'pass' if part.passed else 'FAIL'}")
        for line in part.lines:
            print(f"  {line.verdict:8}  {line.name}  {line.figure}  {line.note}".rstrip())
    if options.report:
        print(f"\nwritten: {write(parts, options, began).relative_to(ROOT)}")
    return 0 if parts and all(part.passed for part in parts) else 1


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--slice", action="store_true", help="run a few trials and quick benchmarks for a rough answer")
    parser.add_argument("--no-report", dest="report", action="store_false", help="write no page to docs/proof")
    parser.add_argument("--only", choices=["tests", "portability", "benchmarks"])
    parser.add_argument("--trials", type=int, help=f"trials of each seeded test; {TRIALS}, with --slice {SLICE_TRIALS}")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, help=f"minutes of soak; {MINUTES:g}, with --slice {SLICE_MINUTES:g}")
    parser.add_argument("--workers", type=int, default=1, help="tests at a time")
    parser.add_argument("--select", default="", help="run only the tests that pytest -k selects")
    options = parser.parse_args(argv)
    options.trials = options.trials or (SLICE_TRIALS if options.slice else TRIALS)
    options.minutes = options.minutes or (SLICE_MINUTES if options.slice else MINUTES)
    return options


# -------------------------------------------------------------------------------------------------------------- trials


def trials(count: int, seed: int, *, minutes: float = MINUTES, workers: int = 1, select: str = "") -> Part:
    """Run every test marked proof, and under the proof profile every property-based one, with ``count`` trials each."""
    words = {
        "CLOUDTRAIN_TEST_PROFILE": "proof",
        "CLOUDTRAIN_TRIALS": str(count),
        "CLOUDTRAIN_SEED": str(seed),
        "CLOUDTRAIN_SOAK_MINUTES": f"{minutes:g}",
        "CLOUDTRAIN_REQUIRE_ALL": "1",
    }
    with tempfile.TemporaryDirectory(prefix="cloudtrain-proof-") as folder:
        results = Path(folder) / "results.xml"
        command = [sys.executable, "-m", "pytest", "-m", "proof", f"--hypothesis-seed={seed}", f"--timeout={SECONDS}"]
        command += ["-ojunit_family=xunit1"]  # the only family with properties of a test
        command += [f"-n{workers}"] if workers > 1 else []
        command += [f"-k{select}"] if select else []
        began = time.monotonic()
        done = subprocess.run([*command, f"--junitxml={results}"], cwd=ROOT, env={**os.environ, **words}, check=False)
        seconds = time.monotonic() - began
        lines = tests_of(results) if results.exists() else []
    if done.returncode and all(line.passed for line in lines):
        what = "no test is a proof" if done.returncode == 5 else f"exit code {done.returncode}"
        lines = [*lines, Line(name="pytest", figure="", passed=False, note=what)]
    environ = " ".join(f"{name}={value}" for name, value in words.items())
    text = f"{environ} python {' '.join(command[1:])}"
    return Part(title="Seeded trials", command=text, lines=lines, seconds=seconds)


def tests_of(results: Path) -> list[Line]:
    """Return a line for each test of a JUnit file, over all its parameters. Its note has the failed cases, and the
    property ``note`` of the test."""
    tests: dict[str, list[ElementTree.Element]] = {}
    for case in ElementTree.parse(results).iter("testcase"):
        name = "::".join(filter(None, (case.get("classname"), case.get("name"))))
        tests.setdefault(name.partition("[")[0], []).append(case)
    return [_test(name, cases) for name, cases in tests.items()]


def _test(name: str, cases: Sequence[ElementTree.Element]) -> Line:
    wrong = [
        f"{case.get('name')}: {(child.get('message') or child.tag).strip().splitlines()[0][:160]}"
        for case in cases
        for child in case
        if child.tag in ("failure", "error", "skipped")
    ]
    notes = [
        str(item.get("value")) if item.get("name") == "note" else f"{item.get('name')}: {item.get('value')}"
        for case in cases
        for item in case.iter("property")
    ]
    seconds = sum(float(case.get("time") or 0) for case in cases)
    figure = f"{seconds:.1f} s" if len(cases) == 1 else f"{len(cases)} cases, {seconds:.1f} s"
    more = f" (and {len(wrong) - 5} more)" if len(wrong) > 5 else ""
    return Line(name=name, figure=figure, passed=not wrong, note="; ".join([*wrong[:5], *notes]) + more)


# --------------------------------------------------------------------------------------------------------- portability


def portability() -> Part:
    """Run the full matrix, which writes its record and page again."""
    import portability as matrix

    words, began = ["proof/portability.py"], time.monotonic()
    done = subprocess.run([sys.executable, *words], cwd=ROOT, check=False)
    record, lines = matrix.read(), []
    for row in dict.fromkeys(cell.row for cell in matrix.CELLS.values()):
        wrong = {cell.provider: matrix.wrong(record, cell) for cell in matrix.CELLS.values() if cell.row == row}
        note = "; ".join(f"{provider}: {what}" for provider, what in wrong.items() if what)
        lines.append(Line(name=row, figure=f"{len(wrong)} cells", passed=not note, note=note))
    if done.returncode and all(line.passed for line in lines):
        lines.append(Line(name=words[0], figure="", passed=False, note=f"exit code {done.returncode}"))
    command = f"python {words[0]}"
    return Part(title="Portability", command=command, lines=lines, seconds=time.monotonic() - began)


# ---------------------------------------------------------------------------------------------------------- benchmarks


def benchmarks() -> list[Path]:
    """Return the benchmarks: scripts, without the modules that they share."""
    found = sorted((ROOT / "benchmarks").glob("*.py"))
    return [path for path in found if '__name__ == "__main__"' in path.read_text(encoding="utf-8")]


def benchmark(path: Path, *, quick: bool) -> Part:
    """Run one benchmark. Return its figures against their targets. A failure with all targets met counts too."""
    words = [path.relative_to(ROOT).as_posix(), "--json", *(["--quick"] if quick else [])]
    began = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, *words], cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=SECONDS, check=False
        )
        code, lines = done.returncode, figures_of(done.stdout, quick=quick)
    except subprocess.TimeoutExpired:
        code, lines = -1, [Line(name=path.stem, figure="", passed=False, note=f"not done in {SECONDS} s")]
    missed = any(line.passed is False or line.note.startswith(MISSED) for line in lines)
    if code and not (code == 1 and missed):
        lines = [*lines, Line(name=path.stem, figure="", passed=False, note=f"exit code {code}")]
    command = f"python {' '.join(words)}"
    return Part(title=f"Benchmark {path.stem}", command=command, lines=lines, seconds=time.monotonic() - began)


def figures_of(text: str, *, quick: bool) -> list[Line]:
    """Return the lines of a benchmark's ``--json`` output."""
    try:
        return [_figure(item, quick=quick) for item in json.loads(text)["figures"]]
    except (ValueError, KeyError, TypeError) as exc:
        note = f"printed no figures ({type(exc).__name__}: {exc})"
        return [Line(name="output", figure="", passed=False, note=note)]


def _figure(item: dict[str, Any], *, quick: bool) -> Line:
    unit = "" if item["unit"] == "ratio" else f" {item['unit']}"
    target = item["target"]
    figure = f"{item['value']:.3f}{unit}" + ("" if target is None else f" (<= {target}{unit})")
    passed, note = None if target is None else bool(item["passed"]), item.get("note") or ""
    if passed is False and quick and item["unit"] != "bytes":
        passed, note = None, f"{MISSED}; {note}"
    return Line(name=item["name"], figure=figure, passed=passed, note=note)


# -------------------------------------------------------------------------------------------------------------- report


def write(parts: Sequence[Part], options: argparse.Namespace, began: datetime.datetime) -> Path:
    """Write ``docs/proof/<date>.md``; from the second report of a day on, a number follows the date."""
    folder = ROOT / "docs" / "proof"
    folder.mkdir(parents=True, exist_ok=True)
    day, number = f"{began:%Y-%m-%d}", 1
    path = folder / f"{day}.md"
    while path.exists():
        number += 1
        path = folder / f"{day}-{number}.md"
    path.write_text(page(parts, options, began), encoding="utf-8")
    return path


def page(parts: Sequence[Part], options: argparse.Namespace, began: datetime.datetime) -> str:
    """Return the report as Markdown."""
    passed = all(part.passed for part in parts)
    about = {
        "result": "pass" if passed else "FAIL",
        "commit": commit(),
        "trials": f"{options.trials} of each seeded test without a number of its own, seed {options.seed}",
        "extent": ", ".join(
            [
                "a slice" if options.slice else "full",
                *([f"{options.only} only"] if options.only else []),
                *([f"tests that match {options.select!r}"] if options.select else []),
            ]
        ),
        **machine(),
    }
    rows = [f"| {name} | {_cell(value)} |" for name, value in about.items()]
    text = [f"# Proof of {began:%Y-%m-%d %H:%M} UTC", "", "| | |", "| --- | --- |", *rows]
    for part in parts:
        rows = [f"| {_cell(x.name)} | {_cell(x.figure)} | {x.verdict} | {_cell(x.note)} |" for x in part.lines]
        text += ["", f"## {part.title}", "", f"`{part.command}`, {part.seconds:.0f} s", ""]
        text += ["| what | figure | verdict | note |", "| --- | --- | --- | --- |", *rows]
    return "\n".join(text) + "\n"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def commit(ignored: Sequence[Path] = ()) -> str:
    """Return the commit, and if files other than ``ignored`` have changed since."""
    head = _output_of("git", "rev-parse", "HEAD")
    names = [f":(exclude){path.relative_to(ROOT).as_posix()}" for path in ignored]
    changed = _output_of("git", "status", "--porcelain", "--untracked-files=no", "--", ".", *names)
    return head + (", with changes" if changed else "") if head else "not in git"


def machine() -> dict[str, str]:
    """Return the facts of the measuring machine."""
    try:
        torch = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        torch = "none"
    return {
        "machine": f"{os.cpu_count()} cores, {_processor()}, {platform.system()} {platform.release()}",
        "load at the end": ", ".join(f"{load:.2f}" for load in os.getloadavg()),
        "python": platform.python_version(),
        "torch": torch,
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return named or platform.machine()


def _output_of(*command: str) -> str:
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


if __name__ == "__main__":
    sys.exit(main())
