"""CPU of the cheap verbs compared with another launcher's ``--help``, and the cost of ``import cloudtrain``.

``list``, ``status RUN`` (a finished run) and ``--help`` over ``torchx --help`` (torchx 0.7.0, installed if absent). CPU
seconds (user + system), since other jobs on a shared machine change wall time far more.
"""

from __future__ import annotations

import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
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
    peer,
    report,
    scratch,
    sides,
)

RUNS = 10
IMPORT_LIMIT_MS = 20.0


def main() -> int:
    chosen = options(parser(__doc__, count=15, quick=9))
    torchx = [str(peer("torchx", "0.7.0") / "bin" / "torchx"), "--help"]
    figures = []
    with scratch() as folder:
        run = finished_runs(folder)
        for name, words, target in (
            ("list", ["list", "--store", "store"], 1.25),
            ("status RUN", ["status", run, "--store", "store"], 1.25),
            ("--help", ["--help"], 1.5),
        ):
            found = pairs(cost(folder, [CLOUDTRAIN, *words]), cost(folder, torchx), count=chosen.pairs)
            figures.append(
                Figure(
                    name=f"CPU of cloudtrain {name} / torchx --help",
                    value=median_ratio(found, "cpu"),
                    target=target,
                    note=sides(found, "cpu"),
                    pairs=found,
                )
            )
        bare, ours = [sys.executable, "-c", "pass"], [sys.executable, "-c", "import cloudtrain"]
        found = pairs(cost(folder, ours), cost(folder, bare), count=2 * chosen.pairs)
        figures.append(
            Figure(
                name="CPU of import cloudtrain - bare Python",
                value=1000 * statistics.median(pair.ours.cpu - pair.peer.cpu for pair in found),
                target=IMPORT_LIMIT_MS,
                unit="ms",
                note=sides(found, "cpu"),
                pairs=found,
            )
        )
    return report(figures, as_json=chosen.json)


def cost(folder: Path, command: Sequence[str]) -> Callable[[], Cost]:
    return partial(cost_of, command, cwd=folder)


def finished_runs(folder: Path) -> str:
    """Make a store of `RUNS` finished runs in ``folder``. Return the id of one that really ran."""
    (folder / "train.py").write_text("print('done')\n")
    run = "really-ran"
    words = [CLOUDTRAIN, "submit", "train.py", "--store", "store", "--run-id", run, "--max-runtime", "10m"]
    subprocess.run(words, cwd=folder, env=environ(), check=True, capture_output=True)
    runs = folder / "store" / "runs"
    for i in range(1, RUNS):
        shutil.copytree(runs / run, runs / f"copy-{i}")
    return run


if __name__ == "__main__":
    sys.exit(main())
