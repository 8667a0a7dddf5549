"""Time to the first line of a script on the terminal: ``cloudtrain submit`` over torchrun alone. Reported only.

1 node x 2 processes, on a pseudo-terminal, for a script that imports torch and one that does not. The stamps of a run
show where the time of ``submit`` goes. Then a second submit of an unchanged tree of 2,000 files, which must upload no
byte of code or runtime.
"""

from __future__ import annotations

import statistics
import sys
import time
from functools import partial
from pathlib import Path

from common import (
    CLOUDTRAIN,
    TORCHRUN,
    Cost,
    Figure,
    cost_of,
    first_line,
    median_ratio,
    options,
    pairs,
    parser,
    report,
    scratch,
    sides,
    stamps,
    steps,
    tree,
)

MARK = b"first-line "
SCRIPTS = {
    "with torch": "import time\nT = time.time()\nimport torch\nprint('first-line', T, time.time(), flush=True)\n",
    "without torch": "import time\nT = time.time()\nprint('first-line', T, time.time(), flush=True)\n",
}


def main() -> int:
    chosen = options(parser(__doc__, count=7, quick=1))
    figures = []
    for name, script in SCRIPTS.items():
        with scratch() as folder:
            (folder / "train.py").write_text(script)
            watch = Watch(folder)
            found = pairs(watch.submit, watch.torchrun, count=chosen.pairs)
            figures.append(
                Figure(
                    name=f"time to the first line, {name}: cloudtrain submit / torchrun",
                    value=median_ratio(found, "wall"),
                    note=f"{sides(found, 'wall')}; ms: {steps(watch.stages)}",
                    pairs=found,
                )
            )
    with scratch() as folder:
        figures += again(folder)
    return report(figures, as_json=chosen.json)


class Watch:
    """A runner of commands on a pseudo-terminal; ``wall`` of its costs ends with the script's first line."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.stages: list[dict[str, float]] = []

    def torchrun(self) -> Cost:
        return first_line([*TORCHRUN, "train.py"], cwd=self._folder, mark=MARK)[0]

    def submit(self) -> Cost:
        run, began = f"r{time.time_ns()}", time.time()
        flags = ["--nproc-per-node", "2", "--store", "store", "--run-id", run, "--max-runtime", "10m"]
        cost, words = first_line([CLOUDTRAIN, "submit", "train.py", *flags], cwd=self._folder, mark=MARK)
        script, printed = map(float, words.split())
        stages = {"start": began, **stamps(self._folder / "store" / "runs" / run)}
        stages |= {"script": script, "printed": printed, "seen": began + cost.wall}
        self.stages.append(stages)
        return cost


def again(folder: Path) -> list[Figure]:
    """Submit the same tree twice."""
    code = tree(folder / "code", files=2_000, size=50_000_000, script="print('hello')\n")
    store = folder / "store"
    command = [CLOUDTRAIN, "submit", "train.py", "--store", str(store), "--max-runtime", "10m", "--detach"]
    send = partial(cost_of, command, cwd=code)
    first = send()
    before = staged(store)
    costs = [send() for _ in range(3)]
    after = staged(store)
    new = sum(size for key, (size, *_) in after.items() if before.get(key) != after[key])
    wall = statistics.median(cost.wall for cost in costs)
    return [
        Figure(
            name="bytes of code and runtime that a second submit of 2,000 files uploads",
            value=float(new),
            target=0.0,
            unit="bytes",
        ),
        Figure(
            name="wall of submit --detach, 2,000 files, again / the first time",
            value=wall / first.wall,
            note=f"{wall:.3f} s / {first.wall:.3f} s",
            pairs=[{"first": first.wall, "again": cost.wall} for cost in costs],
        ),
    ]


def staged(store: Path) -> dict[str, tuple[int, int, int]]:
    """Return size, inode and date of every stored file of code and runtime."""
    found = {}
    for kind in ("code", "runtime"):
        for path in (store / kind).rglob("*"):
            if path.is_file():
                status = path.stat()
                found[str(path)] = (status.st_size, status.st_ino, status.st_mtime_ns)
    return found


if __name__ == "__main__":
    sys.exit(main())
