"""CPU of an hour's samples of a node's usage, as a share of one core, the least that a rank has.

A process takes an hour's samples one after another, and its pair waits without any. CPU seconds are those of the
process and of nvidia-smi. A shell script replaces it if this machine has none: the real one takes longer, by the
driver's time. The samples come without a pause, so caches are warmer than in a real hour.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
from functools import partial
from pathlib import Path

from common import Cost, Figure, Pair, cost_of, environ, options, pairs, parser, report, scratch, sides

from cloudtrain.runtime.timings import Timings

TARGET = 1.003
HOUR = 3600.0
SCRIPT = """
import sys, threading, time
from pathlib import Path
from cloudtrain.runtime import usage

count, file = int(sys.argv[1]), Path("usage.jsonl")
file.unlink(missing_ok=True)
usage.TIMINGS.usage = 0.001
if count:
    sampler = usage.UsageSampler(file, disk=Path("."))
    sampler.start()
    while not file.exists() or file.read_bytes().count(b"\\n") < count:
        time.sleep(1)
    sampler.stop()
"""
SMI = "#!/bin/sh\necho '90, 10000, 80000'\necho '90, 10000, 80000'\n"


def main() -> int:
    chosen = options(parser(__doc__, count=5, quick=3))
    count = round(HOUR / Timings().usage)
    with scratch() as folder:
        (folder / "sample.py").write_text(SCRIPT)
        (folder / "nvidia-smi").write_text(SMI)
        (folder / "nvidia-smi").chmod(0o755)
        with_gpus = f"{folder}:{os.environ['PATH']}" if shutil.which("nvidia-smi") is None else os.environ["PATH"]
        found = {
            name: pairs(
                partial(run, folder, path, count), partial(run, folder, path, 0), count=chosen.pairs, warm=False
            )
            for name, path in {"without a GPU": str(folder / "none"), "with nvidia-smi": with_gpus}.items()
        }
    return report([figure_of(name, some, count) for name, some in found.items()], as_json=chosen.json)


def figure_of(name: str, found: list[Pair], count: int) -> Figure:
    more = statistics.median(pair.ours.cpu - pair.peer.cpu for pair in found)
    what = f"an hour of a core with {count} samples / without, {name}"
    return Figure(name=what, value=1 + more / HOUR, target=TARGET, note=sides(found, "cpu"), pairs=found)


def run(folder: Path, path: str, count: int) -> Cost:
    """Take ``count`` samples. Raises `RuntimeError` if it fails."""
    command = [sys.executable, str(folder / "sample.py"), str(count)]
    return cost_of(command, cwd=folder, env=environ({"PATH": path}), alone=True)


if __name__ == "__main__":
    sys.exit(main())
