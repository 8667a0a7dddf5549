"""Mean time of a training step while checkpoints are mirrored, over the same with checkpoints that are not mirrored.

One job, 1 node x 2 processes that compute throughout: on 2 cores, each step feels the mirror. Every 60 s the two save
200 MB, alternately to the mirrored folder and to one next to it on the same disk. So both sides of a pair write as much
and have the same other jobs. A step's mean time is that of the whole interval with its save. At the end of it the
checkpoint must be complete in the store, or there is no figure.

CPU seconds are those of the node's runtime, which mirrors, in such an interval: on a busy machine a better measure than
wall time. It scans the folder in both kinds of interval, so that is in the other side's cost, not in the ratio.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

from common import (
    CLOUDTRAIN,
    Cost,
    Figure,
    Pair,
    cost_of,
    environ,
    median_ratio,
    options,
    parser,
    report,
    scratch,
    sides,
)

TARGET = 1.02
SCRIPT = '''\
"""PAIRS pairs of intervals of SECONDS each; MEGABYTES are saved at the beginning of each. One row for each interval."""

import json
import os
import shutil
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

pairs, seconds, size = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]) * 1_000_000
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
state = torch.randn(size // world // 4)
weights = torch.randn(256, 256, generator=torch.Generator().manual_seed(rank)) / 16
watched = Path(os.environ["CLOUDTRAIN_CHECKPOINT_DIR"])
folders = {True: watched, False: watched.with_name("unwatched")}
runtime = int(Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[1])


def spent():
    """CPU seconds of the node's runtime so far."""
    words = Path(f"/proc/{runtime}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def step():
    x = torch.eye(256)
    for _ in range(40):
        x = x @ weights
    over = torch.tensor([float(rank == 0 and time.time() >= began + length)])
    dist.all_reduce(over)
    return bool(over)


def save(folder, number):
    (folder / f"step-{number}").mkdir(parents=True, exist_ok=True)
    for old in set(folder.glob("step-*")) - {folder / f"step-{number}"} if rank == 0 else ():
        shutil.rmtree(old.rename(folder / ".old"))
    torch.save(state, folder / f"step-{number}" / f"shard-{rank}.pt")


rows = []
order = [False] + [mirrored for pair in range(pairs) for mirrored in ((True, False) if pair % 2 else (False, True))]
for number, mirrored in enumerate(order):
    dist.barrier()
    began, length, cpu, steps = time.time(), seconds, spent(), 1
    save(folders[mirrored], number)
    while not step():
        steps += 1
    rows.append({"mirrored": mirrored, "steps": steps, "began": began, "ended": time.time(), "cpu": spent() - cpu})
    if rank == 0:
        print(rows[-1], flush=True)
if rank == 0:
    Path(os.environ["BENCHMARK_ROWS"]).write_text(json.dumps(rows[1:]))  # the first one only warms up
dist.destroy_process_group()
'''


def main() -> int:
    flags = parser(__doc__, count=10, quick=1)
    flags.add_argument("--seconds", type=float, help="seconds between two checkpoints; default 60, with --quick 15")
    flags.add_argument("--megabytes", type=int, default=200, help="MB of a checkpoint (default 200)")
    chosen = options(flags)
    seconds = chosen.seconds or (15.0 if chosen.quick else 60.0)
    with scratch() as folder:
        pairs = measure(folder, chosen.pairs, seconds, chosen.megabytes)
    more = statistics.median(pair.ours.cpu - pair.peer.cpu for pair in pairs)
    what = f"{chosen.megabytes} MB every {seconds:.0f} s"
    # In a shorter interval the mirror weighs more than it ever does.
    target = TARGET if seconds >= 60 else None
    figures = [
        Figure(
            name=f"mean step, mirrored / not mirrored, 2 busy processes, {what}",
            value=median_ratio(pairs, "wall"),
            target=target,
            note=sides(pairs, "wall"),
            pairs=pairs,
        ),
        Figure(
            name=f"the same, were all ranks to wait for every CPU second of the runtime that mirrors, {what}",
            value=1 + more / seconds,
            target=target,
            note=f"CPU of the runtime: {sides(pairs, 'cpu')}",
        ),
    ]
    return report(figures, as_json=chosen.json)


def measure(folder: Path, count: int, seconds: float, megabytes: int) -> list[Pair]:
    """Run the job. ``wall`` is the mean of a step, ``cpu`` that of the runtime in the interval."""
    (folder / "train.py").write_text(SCRIPT)
    rows_file, store = folder / "rows.json", folder / "store"
    words = [str(count), str(seconds), str(megabytes)]
    command = [CLOUDTRAIN, "submit", "train.py", "--nproc-per-node", "2", "--store", str(store), "--max-runtime", "4h"]
    cost_of([*command, "--", *words], cwd=folder, env=environ({"BENCHMARK_ROWS": str(rows_file)}))
    rows = json.loads(rows_file.read_bytes())
    commits = [path.stat().st_mtime for path in store.glob("runs/*/live/checkpoints/*/*/commit.json")]
    for row in rows:
        if any(row["began"] <= when <= row["ended"] for when in commits) != row["mirrored"]:
            raise RuntimeError(f"a checkpoint was not mirrored within its interval: {row}, commits at {commits}")
    costs = [Cost(wall=(row["ended"] - row["began"]) / row["steps"], cpu=row["cpu"]) for row in rows]
    both = zip(rows[::2], costs[::2], costs[1::2], strict=True)
    return [Pair(ours=one, peer=two) if row["mirrored"] else Pair(ours=two, peer=one) for row, one, two in both]


if __name__ == "__main__":
    sys.exit(main())
