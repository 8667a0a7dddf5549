"""Wall time of a whole local job, 1 node x 2 processes, about 60 s: ``cloudtrain submit`` over torchrun alone.

The script does the same number of steps in both: matrix products and an all-reduce, a printed line and a metrics line
each, 20 a second, and then it waits as a rank waits for its GPU. ``--busy 1`` takes the waiting away: then every
interference counts, and so does every neighbour of this machine. ``submit`` is the whole command: plan, stage,
supervise, follow. CPU seconds include the supervisor's and the node's.
"""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path

from common import (
    CLOUDTRAIN,
    TORCHRUN,
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

TARGET = 1.025
STEP_SECONDS = 0.05
SCRIPT = '''\
"""Fixed work: STEPS steps of REPEATS products and an all-reduce, a line and a metrics line each, then PAUSE seconds."""

import json
import os
import sys
import time

import torch
import torch.distributed as dist

steps, repeats, pause = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
dist.init_process_group("gloo")
rank = dist.get_rank()
weights = torch.randn(256, 256, generator=torch.Generator().manual_seed(rank)) / 16
metrics = open(os.environ.get("CLOUDTRAIN_METRICS_FILE", os.devnull), "a") if rank == 0 else None
for step in range(steps):
    x = torch.eye(256)
    for _ in range(repeats):
        x = x @ weights
    dist.all_reduce(x)
    if metrics:
        loss = float(x.norm())
        print(f"step {step} loss {loss:.4f}", flush=True)
        metrics.write(json.dumps({"step": step, "epoch": 0, "time": time.time(), "loss": loss}) + "\\n")
        metrics.flush()
    time.sleep(pause)
dist.destroy_process_group()
'''
CALIBRATE = """\
import time, torch
torch.set_num_threads(1)
weights, x = torch.randn(256, 256) / 16, torch.eye(256)
for _ in range(200): x = x @ weights
began = time.thread_time()
for _ in range(2000): x = x @ weights
print((time.thread_time() - began) / 2000)
"""


def main() -> int:
    flags = parser(__doc__, count=3, quick=1)
    flags.add_argument("--busy", type=float, default=0.1, help="part of a step that computes (default 0.1)")
    chosen = options(flags)
    steps = int((10 if chosen.quick else 60) / STEP_SECONDS)
    one = subprocess.run([sys.executable, "-c", CALIBRATE], env=environ(), check=True, capture_output=True, text=True)
    repeats = max(1, round(chosen.busy * STEP_SECONDS / float(one.stdout)))
    words = [str(steps), str(repeats), str((1 - chosen.busy) * STEP_SECONDS)]
    with scratch() as folder:
        (folder / "train.py").write_text(SCRIPT)
        ours = partial(cost_of, submit(folder, words), cwd=folder)
        other = partial(cost_of, [*TORCHRUN, "train.py", *words], cwd=folder)
        found = pairs(ours, other, count=chosen.pairs, warm=False)
    load = f"{steps} steps, busy {chosen.busy:.0%}"
    figures = [
        Figure(
            name=f"{what} of cloudtrain submit / torchrun, 1 node x 2 processes, {load}",
            value=median_ratio(found, what),
            # In 10 s the fixed costs weigh six times as much: only the whole length is held to the target.
            target=TARGET if what == "wall" and not chosen.quick else None,
            note=sides(found, what),
            pairs=found if what == "wall" else (),
        )
        for what in ("wall", "cpu")
    ]
    return report(figures, as_json=chosen.json)


def submit(folder: Path, words: list[str]) -> list[str]:
    flags = ["--nproc-per-node", "2", "--store", str(folder / "store"), "--max-runtime", "1h"]
    return [CLOUDTRAIN, "submit", "train.py", *flags, "--", *words]


if __name__ == "__main__":
    sys.exit(main())
