"""Wall time of a whole local job, 1 node x 2 processes, about 60 s: ``cloudtrain submit`` over torchrun alone.

The script takes the same steps in both, 20 a second: matrix products and an all-reduce, a printed line and a metrics
line. Then it waits as a rank waits for its GPU. With ``--busy 1`` it does not wait, so every interference counts, also
that of other jobs. ``submit`` is the whole command: plan, stage, supervise, follow. CPU seconds include the
supervisor's and the node's.

The script records the begin and the end of its loop. The time outside is cloudtrain's or torchrun's own. Other jobs
disturb the loop, so on a busy machine the third figure says more than the first.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

from common import (
    CLOUDTRAIN,
    TORCHRUN,
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
began = time.time()
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
if rank == 0:
    with open(os.environ["BENCHMARK_STAMPS"], "w") as stamps:
        json.dump([began, time.time()], stamps)
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
    flags.add_argument("--busy", type=float, default=0.1, help="share of a step that computes (default 0.1)")
    chosen = options(flags)
    steps = int((10 if chosen.quick else 60) / STEP_SECONDS)
    one = subprocess.run([sys.executable, "-c", CALIBRATE], env=environ(), check=True, capture_output=True, text=True)
    repeats = max(1, round(chosen.busy * STEP_SECONDS / float(one.stdout)))
    words = [str(steps), str(repeats), str((1 - chosen.busy) * STEP_SECONDS)]
    with scratch() as folder:
        (folder / "train.py").write_text(SCRIPT)
        ours = Phases(folder, submit(folder, words))
        other = Phases(folder, [*TORCHRUN, "train.py", *words])
        found = pairs(ours, other, count=chosen.pairs, warm=False)
    load = f"{steps} steps, busy {chosen.busy:.0%}"
    figures = [
        Figure(
            name=f"{what} of cloudtrain submit / torchrun, 1 node x 2 processes, {load}",
            value=median_ratio(found, what),
            # In 10 s the fixed costs weigh six times as much: only the full length has the target.
            target=TARGET if what == "wall" and not chosen.quick else None,
            note=sides(found, what),
            pairs=found if what == "wall" else (),
        )
        for what in ("wall", "cpu")
    ]
    more = statistics.median(a["before"] + a["after"] for a in ours.rows)
    less = statistics.median(b["before"] + b["after"] for b in other.rows)
    figures.append(
        Figure(
            name="seconds outside the loop, submit - torchrun",
            value=more - less,
            unit="s",
            note=f"ours {ours}; torchrun {other}",
            pairs=[{"ours": a, "peer": b} for a, b in zip(ours.rows, other.rows, strict=True)],
        )
    )
    return report(figures, as_json=chosen.json)


class Phases:
    """A command to run on each call; ``rows`` has the seconds before, in and after the script's loop."""

    def __init__(self, folder: Path, command: list[str]) -> None:
        self._folder, self._command = folder, command
        self.rows: list[dict[str, float]] = []

    def __call__(self) -> Cost:
        stamps = self._folder / "stamps.json"
        stamps.unlink(missing_ok=True)
        start = time.time()
        cost = cost_of(self._command, cwd=self._folder, env=environ({"BENCHMARK_STAMPS": str(stamps)}))
        began, ended = json.loads(stamps.read_bytes())
        self.rows.append({"before": began - start, "loop": ended - began, "after": start + cost.wall - ended})
        return cost

    def __str__(self) -> str:
        medians = {name: statistics.median(row[name] for row in self.rows) for name in self.rows[0]}
        return ", ".join(f"{name} {value:.2f}" for name, value in medians.items())


def submit(folder: Path, words: list[str]) -> list[str]:
    flags = ["--nproc-per-node", "2", "--store", str(folder / "store"), "--max-runtime", "1h"]
    return [CLOUDTRAIN, "submit", "train.py", *flags, "--", *words]


if __name__ == "__main__":
    sys.exit(main())
