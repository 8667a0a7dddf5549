"""Scripts without any knowledge of cloudtrain that overwrite their checkpoint, killed again and again."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys

import pytest
from jobs import Jobs

from cloudtrain.runs.run import Run

pytestmark = pytest.mark.slow

STEPS, EVERY, NAP = 300, 50, 0.1

#: A typical script of the web. `--save` names one file, which rank 0 writes, or with `--shards` one folder of all
#: ranks.
SCRIPT = """
import argparse, os, time
import torch
import torch.distributed as dist

flags = argparse.ArgumentParser()
flags.add_argument("--save", required=True)
flags.add_argument("--shards", action="store_true")
flags.add_argument("--steps", type=int, default=300)
flags.add_argument("--every", type=int, default=50)
flags.add_argument("--nap", type=float, default=0.0)
args = flags.parse_args()

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
files = [f"{args.save}/shard-{i}.pt" for i in range(world)] if args.shards else [args.save]
step, weights = 0, torch.zeros(8)
if os.path.exists(args.save):
    states = [torch.load(file) for file in files]
    print("loaded", *[state["step"] for state in states], flush=True)
    step, weights = states[0]["step"], torch.cat([state["weights"] for state in states])
print("begins at", step, flush=True)
while step < args.steps:
    batch = torch.randn(8 * world, 8, generator=torch.Generator().manual_seed(step))[rank::world]
    error = batch @ weights - batch.sum(1)
    sums = torch.cat([error @ batch, error.square().sum()[None]]) / (8 * world)
    dist.all_reduce(sums)
    weights -= 0.02 * sums[:-1]
    step += 1
    time.sleep(args.nap)
    if rank == 0:
        print("step", step, sums[-1].item().hex(), flush=True)
    if step % args.every == 0 and args.shards:
        os.makedirs(args.save, exist_ok=True)
        torch.save({"step": step, "weights": weights.chunk(world)[rank]}, files[rank])
    elif step % args.every == 0 and rank == 0:
        torch.save({"step": step, "weights": weights}, args.save)
dist.barrier()
dist.destroy_process_group()
"""


def rest_of_lines(run: Run, attempt: int, what: str, rank: int | None = None) -> list[str]:
    """Return the rest of the lines of an attempt that begin with ``what``, of one rank or of all."""
    lines = (line for line in run.logs() if line.attempt == f"{attempt}.0" and rank in (None, line.rank))
    return [line.text.removeprefix(what).strip() for line in lines if line.text.startswith(what)]


def ranks_of(jobs: Jobs) -> list[int]:
    """Return the pids of all ranks. torchrun, their parent, has the same command line, but not this variable."""
    pids = [pid for pid, line in sorted(jobs.processes().items()) if re.search(r"worker\.py train\.py", line)]
    return [pid for pid in pids if jobs.variable(pid, "TORCHELASTIC_RUN_ID")]


def uninterrupted(jobs: Jobs, *words: str) -> dict[str, str]:
    """Return the losses under bare torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4", "--", "train.py"]
    env = jobs.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--save", str(jobs.tmp / "bare"), *words],
        cwd=jobs.code, env=env, capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    return dict(line.split()[1:] for line in done.stdout.splitlines() if line.startswith("step "))


@pytest.mark.parametrize(
    "words",
    [
        pytest.param((), id="one file", marks=pytest.mark.proof),
        pytest.param(("--shards",), id="a folder of shards", marks=pytest.mark.proof),
    ],
)
def test_a_checkpoint_written_over_the_one_before_is_never_mixed_with_it(jobs: Jobs, words: tuple[str, ...]) -> None:
    """Check this because each resume leaves a copy of it on every node, and a node rewrites only some of its files."""
    jobs.write("train.py", SCRIPT)
    rng = random.Random(len(words))
    wanted = uninterrupted(jobs, *words)
    flags = ("--nodes", "2", "--nproc-per-node", "2", "--retries", "3", "--max-runtime", "10m")
    script = ("--save", "{checkpoint_dir}/last.pt", "--every", str(EVERY), "--nap", str(NAP), *words)
    run = jobs.detach("train.py", *flags, "--", *script)
    commits = jobs.store / "runs" / run.run_id / "live/checkpoints/last.pt"
    for attempt in range(2):
        jobs.wait_for(lambda: list(commits.glob(f"{attempt}.0-*/commit.json")))  # noqa: B023  awaited at once
        os.kill(rng.choice(ranks_of(jobs)), signal.SIGKILL)
        jobs.wait_for(lambda: len(rest_of_lines(run, attempt + 1, "begins at")) == 4)  # noqa: B023
        assert len(set(rest_of_lines(run, attempt + 1, "begins at"))) == 1, "all ranks must be at one step"
    done = jobs.cli("wait", run.url, "--json")
    assert (done.code, done.json["state"]) == (0, "succeeded"), done.json
    assert [a["resumed_from"] for a in done.json["attempts"]] == ["", "last.pt", "last.pt"], done.json["attempts"]

    begins = [int(rest_of_lines(run, attempt, "begins at")[0]) for attempt in range(3)]
    assert begins == sorted(set(begins))
    assert all(step % EVERY == 0 for step in begins)
    for attempt, begin in enumerate(begins):
        loaded = {step for steps in rest_of_lines(run, attempt, "loaded") for step in steps.split()}
        assert loaded == ({str(begin)} if attempt else set()), "all loaded files must have one version"
        losses = dict(pair.split() for pair in rest_of_lines(run, attempt, "step", rank=0))
        assert [int(step) for step in losses] == list(range(begin + 1, begin + 1 + len(losses)))
        assert losses == {step: wanted[step] for step in losses}  # bit for bit
    assert str(STEPS) in losses
