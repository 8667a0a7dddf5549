"""A training step of ``entrypoints/ddp.py`` and ``fsdp.py`` over one of a bare loop of the same model; a save's stall.

Both train ``tasks/gpt.py`` on the text of ``examples/data`` under the same torchrun, 2 processes of one thread each.
The bare loop does only the necessary: a batch, forward, backward, optimizer, reset of the gradients. It computes no
norm, sums no loss, writes no metrics, and cannot be stopped. A step's time is the median between the stamps that both
write after each step, without the first ones.

A save compares the entry points' ``async_save``, with a stager that copies during the next passes, with ``dcp.save``.
Both alternate in one process group, and the disk rests in between. The figure is the time that the loop waits: in the
call, and before the optimizer, which waits for the copy. The note has the cost of copying and writing for passes on the
same cores: those with a save over those without.
"""

from __future__ import annotations

import gzip
import itertools
import json
import statistics
import subprocess
import sys
from functools import partial
from pathlib import Path

from common import (
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

ROOT = Path(__file__).resolve().parents[1]
TASK = ROOT / "entrypoints/tasks/gpt.py"
STEP_TARGET, STALL_TARGET = 1.03, 0.06
BATCH, CONTEXT, SKIPPED = 16, 64, 10
SHAPE = ["--width", "256", "--layers", "4", "--context", str(CONTEXT)]
BARE = '''\
"""A bare loop: what is left of a training script without all that one wants of it."""

import argparse
import importlib
import json
import os
import sys
import time

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

sys.path.insert(0, os.path.dirname(sys.argv[2]))
task = importlib.import_module("gpt")
flags = argparse.ArgumentParser()
task.add_arguments(flags)
args = flags.parse_args(sys.argv[4:])
torch.set_num_threads(1)
torch.manual_seed(0)
dist.init_process_group("gloo")
model = task.build_model(args)
if sys.argv[1] == "ddp":
    model = DistributedDataParallel(model, gradient_as_bucket_view=True)
else:
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
train, _, _ = task.build_datasets(args)
micro = int(sys.argv[3]) // dist.get_world_size()
for step, batch in enumerate(DataLoader(train, micro, sampler=DistributedSampler(train), drop_last=True)):
    loss, _ = task.compute_loss(model, batch)
    (loss / task.count(batch)).backward()
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        with open(os.environ["CLOUDTRAIN_METRICS_FILE"], "a") as stamps:
            stamps.write(json.dumps({"step": step + 1, "time": time.time()}) + "\\n")
del model
dist.destroy_process_group()
'''
SAVES = '''\
"""Saves in turn, both ways: the seconds for which the loop stands still, the slowest process's."""

import json
import shutil
import sys
import time

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard

folder, size, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
torch.set_num_threads(1)
dist.init_process_group("gloo")
width = round((size / 12 / 4) ** 0.5)  # four layers; a float for each weight, and two of AdamW
model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(4)))
for layer in model:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
model(torch.ones(2, width)).sum().backward()
optimizer.step()
aside = dist.new_group(backend="gloo")
stager = DefaultStager(StagingOptions(False, False, True, False))  # as without a GPU


def state():
    return {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}


def passes():
    began = time.perf_counter()
    model(torch.ones(64, width)).sum().backward()
    return time.perf_counter() - began


def slowest(seconds):
    worst = torch.tensor(seconds)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return worst.item()


found = []
for number in range(-1, count):
    row = {}
    for way in ("async", "sync") if number % 2 else ("sync", "async"):
        dist.barrier()
        began = time.perf_counter()
        if way == "sync":
            dcp.save(state(), checkpoint_id=f"{folder}/{way}", process_group=aside)
            row[way] = slowest(time.perf_counter() - began)
        else:
            written = dcp.async_save(
                state(), checkpoint_id=f"{folder}/{way}", process_group=aside, async_stager=stager
            )
            stood = time.perf_counter() - began
            beside = passes()
            began = time.perf_counter()
            stager.synchronize_staging()
            row[way], row["beside"] = slowest(stood + time.perf_counter() - began), slowest(beside)
            written.upload_completion.result()
            row["alone"] = slowest(passes())
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(f"{folder}/{way}")
        time.sleep(1)
    found.append(row)
if dist.get_rank() == 0:
    print("saves", json.dumps(found[1:]), flush=True)  # the first only fills the caches
stager.close()
del model
dist.destroy_process_group()
'''


def main() -> int:
    flags = parser(__doc__, count=10, quick=1)
    flags.add_argument("--steps", type=int, default=60)
    chosen = options(flags)
    with scratch() as folder:
        text = gzip.decompress((ROOT / "examples/data/persuasion.txt.gz").read_bytes())
        # Nine tenths are for training: one epoch of --steps steps, and one spare context.
        (folder / "text.txt").write_bytes(text[: (chosen.steps * BATCH + 1) * CONTEXT * 10 // 9 + CONTEXT])
        (folder / "bare.py").write_text(BARE)
        (folder / "saves.py").write_text(SAVES)
        figures = [figure for name in ("ddp", "fsdp") for figure in steps(name, folder, chosen.pairs)]
        figures += stall(folder, chosen.pairs)
    return report(figures, as_json=chosen.json)


def steps(name: str, folder: Path, count: int) -> list[Figure]:
    """Compare a step of an entry point with one of the bare loop."""
    data = ["--train", str(folder / "text.txt"), *SHAPE]
    ours = [*TORCHRUN, str(ROOT / f"entrypoints/{name}.py"), "--task", str(TASK), "--epochs", "1"]
    ours += ["--global-batch", str(BATCH), *data]
    bare = [*TORCHRUN, str(folder / "bare.py"), name, str(TASK), str(BATCH), *data]
    found = pairs(partial(step_of, ours, folder), partial(step_of, bare, folder), count=count)
    whole = {what: median_ratio(found, what) for what in ("wall", "cpu")}
    return [
        Figure(
            name=f"wall of a step of {name}.py / of a bare loop, GPT of 3 M weights, 2 processes",
            value=whole["wall"],
            target=STEP_TARGET,
            note=sides(found, "wall"),
            pairs=found,
        ),
        Figure(name=f"cpu of all of {name}.py / of the bare loop's", value=whole["cpu"], note=sides(found, "cpu")),
    ]


def step_of(command: list[str], folder: Path) -> Cost:
    """Return the cost: ``wall`` is the median of one step, ``cpu`` that of the whole command."""
    stamps = folder / "stamps.jsonl"
    stamps.unlink(missing_ok=True)
    env = environ({"CLOUDTRAIN_METRICS_FILE": str(stamps), "OMP_NUM_THREADS": "1"})
    env |= {f"CLOUDTRAIN_{what}_DIR": str(folder / what.lower()) for what in ("CHECKPOINT", "ARTIFACT")}
    cost = cost_of(command, cwd=folder, env=env)
    times = [json.loads(line)["time"] for line in stamps.read_text().splitlines()]
    between = [after - before for before, after in itertools.pairwise(times[SKIPPED:-1])]  # the last one validates too
    return Cost(wall=statistics.median(between), cpu=cost.cpu)


def stall(folder: Path, count: int) -> list[Figure]:
    """Compare the time that an asynchronous and a synchronous save stop the loop, and passes with and without a
    save."""
    words = [*TORCHRUN, str(folder / "saves.py"), str(folder / "saved"), str(200_000_000), str(count)]
    done = subprocess.run(words, cwd=folder, env=environ(), capture_output=True, text=True)
    line = next((text for text in done.stdout.splitlines() if text.startswith("saves ")), None)
    if done.returncode or line is None:
        raise RuntimeError(f"{' '.join(words)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    rows = json.loads(line.removeprefix("saves "))
    return [
        Figure(name=name, value=statistics.median(ratios), target=target, note=note, pairs=rows)
        for name, target, ratios, note in (
            ("stall of async_save / dcp.save, 200 MB, 2 processes", STALL_TARGET, *compared(rows, "async", "sync")),
            ("wall of passes beside a save / of those alone", None, *compared(rows, "beside", "alone")),
        )
    ]


def compared(rows: list[dict[str, float]], ours: str, theirs: str) -> tuple[list[float], str]:
    """Return the ratio in each pair, and the note of a figure made of them."""
    ratios = [row[ours] / row[theirs] for row in rows]
    medians = [statistics.median(row[side] for row in rows) for side in (ours, theirs)]
    note = f"{medians[0]:.3f} s / {medians[1]:.3f} s, {len(rows)} pairs {min(ratios):.3f}..{max(ratios):.3f}"
    return ratios, note


if __name__ == "__main__":
    sys.exit(main())
