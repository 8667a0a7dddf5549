"""``make mutants``: change provider files, the attempt policy and a node's decisions, and check that a test fails.

    .venv-mutants/bin/python tools/mutants.py [--share 0.05] [--seed 0] [--only GLOB …] [--again] [--no-report]

mutmut makes the mutants. For each it runs the tests that reach its function, in ``tests/providers``,
``tests/runs/test_attempts.py`` and ``tests/runtime/test_decisions.py``. They need no container engine and only this
project's own emulators (``[tool.mutmut]`` in pyproject.toml). ``--seed`` draws ``--share`` of each file's mutants;
``--again`` tries the survivors of the last run. Exit code 0: every survivor is explained in ``tools/survivors.toml``.
1: one is not. 2: no mutant was tried.

mutmut leaves out module and class level (the tables of native states, prices, regions), functions with a decorator
other than classmethod and staticmethod (properties), annotations, and code that runs in another process.
"""

from __future__ import annotations

import argparse
import datetime
import fnmatch
import importlib.metadata
import json
import math
import os
import random
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

try:
    import tomllib
except ModuleNotFoundError:
    import tomli as tomllib  # Python 3.10

ROOT = Path(__file__).resolve().parents[1]
EXPLAINED = ROOT / "tools" / "survivors.toml"
SHARE = 0.05
"""Share of about 8,000 mutants at 1 to 5 s each that takes half an hour on one busy core."""
DONE, OPEN, NOTHING = 0, 1, 2
KILLED = ("killed", "timeout", "segfault")
"""A mutant that hangs or crashes counts as noticed."""


@dataclass(frozen=True, kw_only=True)
class Survivor:
    """A change that made no test fail: ``lines`` are its ``-`` and ``+`` lines, stripped."""

    name: str
    file: str
    function: str
    lines: tuple[str, ...]
    status: str
    why: str = ""


@dataclass
class FileResult:
    """Results for the mutants of one file."""

    mutants: int = 0
    ends: Counter[str] = field(default_factory=Counter)

    @property
    def killed(self) -> int:
        return sum(self.ends[end] for end in KILLED)


# ------------------------------------------------------------------------------------------------------------- mutants


def generate() -> dict[str, list[str]]:
    """Make all mutants, next to the tests in ``mutants/``. Return their names by file."""
    from mutmut import __main__ as mutmut
    from mutmut.mutation.trampoline import set_mutant_under_test

    set_mutant_under_test("mutant_generation")
    Path("mutants").mkdir(exist_ok=True)
    with mutmut.CatchOutput():
        mutmut.copy_src_dir()
        mutmut.copy_also_copy_files()
        mutmut.create_mutants(1)
    return {file: sorted(ends) for file, ends in results().items()}


def results() -> dict[str, dict[str, int | None]]:
    """Return the exit code of the tests for each mutant, by file; None if it was not tried."""
    found = {}
    for meta in sorted(Path("mutants").rglob("*.meta")):
        ends = json.loads(meta.read_text(encoding="utf-8"))["exit_code_by_key"]
        if ends:
            found[meta.relative_to("mutants").as_posix().removesuffix(".meta")] = ends
    return found


def sample(names: Mapping[str, Sequence[str]], share: float, seed: int) -> list[str]:
    """Draw ``share`` of each file's mutants, at least one, by ``seed`` and the file's name alone."""
    chosen: list[str] = []
    for file, all_of in names.items():
        count = math.ceil(share * len(all_of))
        chosen += sorted(random.Random(f"{seed} {file}").sample(list(all_of), count))
    return chosen


def lines_of(diff: str) -> tuple[str, ...]:
    """Return the removed and added lines of a unified diff, without indentation."""
    changed = [line for line in diff.splitlines() if re.match(r"[-+](?![-+]{2} )", line)]
    return tuple(f"{line[0]} {line[1:].strip()}" for line in changed)


def explanations() -> dict[tuple[str, tuple[str, ...]], str]:
    """Return the explanation of each survivor, by function and change. A function that no test reaches has no change.

    It begins with its kind: equivalent, wording, elsewhere (a test outside this run notices it), or open.
    """
    table = tomllib.loads(EXPLAINED.read_text(encoding="utf-8"))
    found = {
        (row["function"], tuple(row["change"])): f"{row['kind']}: {row['why']}" for row in table.get("survivor", ())
    }
    unreached = {
        (name, ()): f"{row['kind']}: {row['why']}" for row in table.get("unreached", ()) for name in row["functions"]
    }
    return {**found, **unreached}


def survivors(tried: set[str]) -> Iterator[Survivor]:
    """Yield the mutants of ``tried`` that no test noticed, or that no test reaches."""
    from mutmut.mutation.diff_apply import get_diff_for_mutant
    from mutmut.stats import status_by_exit_code
    from mutmut.utils.format_utils import mangled_name_from_mutant_name

    known = explanations()
    for file, ends in results().items():
        for name, code in ends.items():
            if name not in tried or (status := status_by_exit_code[code]) in KILLED:
                continue
            function = mangled_name_from_mutant_name(name).replace("xǁ", "").replace("ǁ", ".").replace(".x_", ".", 1)
            lines = lines_of(get_diff_for_mutant(name, path=Path(file)))
            why = known.get((function, () if status == "no tests" else lines), "")
            yield Survivor(name=name, file=file, function=function, lines=lines, status=status, why=why)


# -------------------------------------------------------------------------------------------------------------- report


def table(tried: set[str]) -> dict[str, FileResult]:
    """Return the results by file."""
    from mutmut.stats import status_by_exit_code

    rows = {}
    for file, ends in results().items():
        chosen = [status_by_exit_code[code] for name, code in ends.items() if name in tried]
        rows[file] = FileResult(mutants=len(ends), ends=Counter(chosen))
    return rows


def spent(options: argparse.Namespace, seconds: float) -> str:
    """Return the time it took, including earlier runs of the same sample, which ``mutants/`` records."""
    record, sample = Path("mutants/runs.json"), [options.only, options.share, options.seed]
    runs = json.loads(record.read_text(encoding="utf-8")) if record.exists() else []
    runs += [[sample, seconds]] if seconds else []
    record.write_text(json.dumps(runs), encoding="utf-8")
    took = [each for of, each in runs if of == sample]
    return f"{sum(took) / 60:.0f} min" + (f" in {len(took)} runs" if len(took) > 1 else "")


def page(
    options: argparse.Namespace,
    rows: Mapping[str, FileResult],
    remaining: Sequence[Survivor],
    *,
    took: str,
    missed: int,
) -> str:
    """Return the report as Markdown; ``missed`` mutants of the sample were not tried."""
    today = datetime.datetime.now(datetime.timezone.utc)
    total, tried, killed = (
        sum(row.mutants for row in rows.values()),
        sum(row.ends.total() for row in rows.values()),
        sum(row.killed for row in rows.values()),
    )
    share = f"{tried} of {total} mutants ({tried / total:.1%}), {options.share:.0%} of each file, seed {options.seed}"
    share += f"; {missed} more of that sample were not tried" if missed else ""
    text = [
        f"# Mutants of {today:%Y-%m-%d %H:%M} UTC",
        "",
        "| | |",
        "| --- | --- |",
        f"| result | {killed} of {tried} noticed ({killed / tried:.1%}), {len(remaining)} not; "
        f"{sum(not item.why for item in remaining)} of them unexplained |",
        f"| tool | mutmut {importlib.metadata.version('mutmut')}, Python {sys.version.split()[0]} |",
        f"| commit | {commit()} |",
        f"| extent | {share} |",
        f"| machine | {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the end; {took} |",
        "",
        "`killed`: a test failed. `timeout`: the tests used 30 times the processor time that they need; noticed, too.",
        "`survived`: every test passed. `no tests`: none of the tests that were run reaches the function. Module level",
        "(tables) and decorated functions are not mutated; tests that need an engine of containers, or an emulator",
        "that is not ours, were not run.",
        "",
        "| file | mutants | tried | killed | timeout | survived | no tests |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for file, row in rows.items():
        late = row.ends["timeout"] + row.ends["segfault"]
        others = row.ends.total() - row.killed - row.ends["no tests"]
        cells = (row.mutants, row.ends.total(), row.ends["killed"], late, others, row.ends["no tests"])
        text.append(f"| `{file}` | {' | '.join(map(str, cells))} |")
    kinds = Counter(item.why.partition(":")[0] or "not explained" for item in remaining)
    text += ["", "## Survivors", "", ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items())) + ".", ""]
    for item in remaining:
        change = "\n".join(item.lines)
        why = item.why or "**not explained**"
        text += [f"`{item.function}` ({item.status}): {why}", "", "```diff", change, "```", ""]
    return "\n".join(text).rstrip() + "\n"


def commit() -> str:
    """Return the commit, and if files have changed since."""
    head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    words = ["git", "status", "--porcelain", "--untracked-files=no"]
    changed = subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()
    return (head or "not in git") + (", with changes" if changed else "")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--share", type=float, default=SHARE, help=f"of each file's mutants; {SHARE}, all: 1")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", action="append", default=[], metavar="GLOB", help="files, from the root on")
    parser.add_argument("--again", action="store_true", help="try the survivors again")
    parser.add_argument("--page", action="store_true", help="try none, and write the page of earlier results")
    parser.add_argument("--no-report", dest="report", action="store_false", help="write no page to docs/proof")
    options = parser.parse_args(argv)
    os.chdir(ROOT)
    names = generate()
    if options.only:
        names = {file: of for file, of in names.items() if any(fnmatch.fnmatch(file, glob) for glob in options.only)}
    tried, missed = sample(names, options.share, options.seed), 0
    if options.page:
        done = {name for ends in results().values() for name, code in ends.items() if code is not None}
        missed = len({*tried} - done)
        tried = [name for name in tried if name in done]
    run = [] if options.page else [item.name for item in survivors({*tried})] if options.again else tried
    began = time.monotonic()
    if run:
        command = [sys.executable, "-m", "mutmut", "run", "--max-children", "1", *run]
        with open("mutants/run.log", "w", encoding="utf-8") as log:
            subprocess.run(command, stdout=log, stderr=log, check=False)
    took = spent(options, time.monotonic() - began if run else 0.0)
    rows = {file: row for file, row in table({*tried}).items() if row.ends.total()}
    if not rows or any(row.ends["not checked"] for row in rows.values()):
        sys.stderr.write("mutants: not all could be tried; read mutants/run.log\n")
        return NOTHING
    remaining = list(survivors({*tried}))
    text = page(options, rows, remaining, took=took, missed=missed)
    sys.stdout.write(text)
    if options.report:
        path = ROOT / "docs" / "proof" / f"{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d}-mutants.md"
        path.write_text(text, encoding="utf-8")
    return OPEN if any(not item.why for item in remaining) else DONE


if __name__ == "__main__":
    sys.exit(main())
