"""A script that writes 2,000 small files in its working folder: with its outputs copied, over without (`--no-outputs`).

Wall seconds are those of the script alone. CPU seconds are those of the node's runtime meanwhile: on a busy machine a
better measure than wall time.
"""

from __future__ import annotations

import json
import statistics
import sys
from functools import partial
from pathlib import Path

from common import (
    CLOUDTRAIN,
    Cost,
    Figure,
    cost_of,
    environ,
    median_ratio,
    options,
    pairs,
    parser,
    report,
    scratch,
    sides,
)

TARGET = 1.01
SCRIPT = '''\
"""Write FILES files of 1 kB, SECONDS / FILES apart, with work between them."""

import json
import os
import sys
import time
from pathlib import Path

files, seconds = int(sys.argv[1]), float(sys.argv[2])


def spent():
    """CPU seconds of the node's runtime so far."""
    words = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


began, cpu = time.monotonic(), spent()
for number in range(files):
    folder = Path("out", str(number % 20))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{number}.txt").write_bytes(b"x" * 1000)
    until = time.thread_time() + seconds / files
    while time.thread_time() < until:
        pass
row = {"wall": time.monotonic() - began, "cpu": spent() - cpu}
Path(os.environ["BENCHMARK_ROWS"]).write_text(json.dumps(row))
'''


def main() -> int:
    flags = parser(__doc__, count=5, quick=3)
    flags.add_argument("--files", type=int, default=2000, help="default 2,000")
    flags.add_argument("--seconds", type=float, help="seconds of work; default 60, with --quick 15")
    chosen = options(flags)
    seconds = chosen.seconds or (15.0 if chosen.quick else 60.0)
    with scratch() as folder:
        (folder / "train.py").write_text(SCRIPT)
        words = ["--", str(chosen.files), str(seconds)]
        ours, peer = partial(run, folder, *words), partial(run, folder, "--no-outputs", *words)
        found = pairs(ours, peer, count=chosen.pairs, warm=False)
    more = statistics.median(pair.ours.cpu - pair.peer.cpu for pair in found)
    what = f"{chosen.files} files in {seconds:.0f} s"
    figures = [
        Figure(
            name=f"the script, outputs / no outputs, {what}",
            value=median_ratio(found, "wall"),
            note=sides(found, "wall"),
        ),
        Figure(
            name=f"the same, were it to wait for every CPU second of the runtime that copies, {what}",
            value=1 + more / seconds,
            target=TARGET,
            note=f"CPU of the runtime: {sides(found, 'cpu')}",
            pairs=found,
        ),
    ]
    return report(figures, as_json=chosen.json)


def run(folder: Path, *words: str) -> Cost:
    """Run the job once. Raises `RuntimeError` if it fails."""
    rows = folder / "row.json"
    command = [CLOUDTRAIN, "submit", "train.py", "--store", str(folder / "store"), "--launcher", "python"]
    cost_of([*command, *words], cwd=folder, env=environ({"BENCHMARK_ROWS": str(rows)}))
    return Cost(**json.loads(rows.read_bytes()))


if __name__ == "__main__":
    sys.exit(main())
