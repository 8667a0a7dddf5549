"""``cloudtrain list`` of a store of 10,000 runs: seconds and memory of the first page, compared with a plain loop.

The peer reads the result of every run in a loop and sorts, as a script would: the cost without stopping at a page's own
runs. Wall seconds of the first page are of the call alone, in a process after its imports; its memory is that process's
peak. Half of the ids begin with a time, half do not. Every run is over: for others the command would ask the platform.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from common import Cost, Figure, environ, median_ratio, options, pairs, parser, report, scratch, sides

RUNS = 10_000
SECONDS, BYTES = 1.0, 150 << 20
T0 = 1_700_000_000
PEAK = """
peak = int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) << 10
print(json.dumps({"wall": time.perf_counter() - began, "cpu": time.process_time() - spent, "rss": peak, "rows": rows}))
"""
OURS = """
import contextlib, io, json, sys, time
from cloudtrain import cli
from cloudtrain.cli import runs
from cloudtrain.runs import listing
out = io.StringIO()
began, spent = time.perf_counter(), time.process_time()
with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
    assert cli.main(["list", "--json", "--store", sys.argv[1]]) == 0
rows = [row["run_id"] for row in json.loads(out.getvalue())["runs"]]
"""
PEER = """
import json, sys, time
from pathlib import Path
began, spent = time.perf_counter(), time.process_time()
found = [json.loads(path.read_bytes()) for path in Path(sys.argv[1], "runs").glob("*/result.json")]
rows = [row["run_id"] for row in sorted(found, key=lambda row: row["created"], reverse=True)[:50]]
"""


@dataclass(frozen=True)
class Result:
    cost: Cost
    rows: list[str]


def main() -> int:
    chosen = options(parser(__doc__, count=9, quick=3))
    with scratch() as folder:
        store = made(folder / "store")
        ours, other = measured(OURS, store), measured(PEER, store)
        if ours.rows != other.rows:
            raise SystemExit(f"the first page is {ours.rows[:3]} …, not {other.rows[:3]} …")
        found = pairs(lambda: measured(OURS, store).cost, lambda: measured(PEER, store).cost, count=chosen.pairs)
    first = [pair.ours for pair in found]
    figures = [
        Figure(
            name=f"wall of the first page of {RUNS:,} runs",
            value=statistics.median(cost.wall for cost in first),
            target=SECONDS,
            unit="s",
            note=f"{min(c.wall for c in first):.3f}..{max(c.wall for c in first):.3f} s, {len(first)} times",
            pairs=found,
        ),
        Figure(
            name="peak memory of the process",
            value=max(cost.rss for cost in first) / 1e6,
            target=BYTES / 1e6,
            unit="MB",
        ),
        Figure(
            name="wall of the first page / a loop that reads every result",
            value=median_ratio(found, "wall"),
            note=sides(found, "wall"),
        ),
        Figure(name="CPU of the same", value=median_ratio(found, "cpu"), note=sides(found, "cpu")),
    ]
    return report(figures, as_json=chosen.json)


def made(store: Path) -> Path:
    """Make a store of `RUNS` finished runs, a minute apart."""
    for number in range(RUNS):
        when = T0 + 60 * number
        stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(when))
        run_id = f"{stamp}-train-{number:04x}" if number % 2 else f"ci-{number}"
        folder = store / "runs" / run_id
        folder.mkdir(parents=True)
        row = {"run_id": run_id, "provider": "local", "state": "succeeded", "category": None, "reason": ""}
        attempts = [{"number": "0.0", "reason": "x" * 500}]
        (folder / "result.json").write_text(
            json.dumps({**row, "name": "train", "created": when, "attempts": attempts}), encoding="utf-8"
        )
        (folder / "run.json").write_text(json.dumps({"run_id": run_id, "created": when}), encoding="utf-8")
        os.utime(folder / "run.json", (when, when))
    return store


def measured(code: str, store: Path) -> Result:
    """Run ``code`` on ``store`` in a new Python. Return its own measurements."""
    command = [sys.executable, "-c", code + PEAK, str(store)]
    done = subprocess.run(command, env=environ(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"the measured process ended with {done.returncode}: {done.stderr[-2000:]}")
    numbers = json.loads(done.stdout)
    return Result(Cost(wall=numbers["wall"], cpu=numbers["cpu"], rss=numbers["rss"]), numbers["rows"])


if __name__ == "__main__":
    sys.exit(main())
