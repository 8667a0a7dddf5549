"""Pipeline parallel with `torch.distributed.pipelining`: a drawing of the schedule, and its bubble against theory.

    torchrun --nproc-per-node 4 examples/pipeline_parallel.py                                       # by itself
    cloudtrain submit examples/pipeline_parallel.py --nodes 2 --nproc-per-node 2 --max-runtime 10m  # as a run

Each rank is a stage and holds only its layers. A batch is cut into m micro-batches, so that stages work at once. While
the pipe fills and drains, stages wait. The bubble is the lost share of p stages' time: (p-1) / (m+p-1), smaller with
more micro-batches. GPipe does all forwards, then all backwards. 1F1B alternates, which loses the same time and keeps at
most p activations instead of m. Look for a drawing of one step for each schedule and m. A row is a stage; digits are
forwards, letters backwards, dots the bubble. Look also for the measured bubble against theory, and losses equal to
those of the whole model in one process.

Theory assumes stages of equal and steady speed, which shared CPU cores do not have. So on CPUs each micro-batch also
sleeps (`--sleep-ms`, twice as long in backward), as a GPU's process waits for its kernels. Then the measured wait comes
from the schedule, not from other jobs. On GPUs the sleep is 0, and all of it is real.
"""

import argparse
import os
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn  # before there is a group: imported later, it would hold the group beyond its end
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

WIDTH, ROWS = 128, 64
SCHEDULES = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}


def layers_of(stage: int) -> nn.Module:
    torch.manual_seed(stage)  # any rank can make any stage
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH))


class TimedStage(PipelineStage):
    """A stage that records when each micro-batch's forward and backward ran here."""

    sleep = 0.0

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.spans: list[tuple[str, float, float]] = []

    def forward_one_chunk(self, chunk: int, *args: Any, **kwargs: Any) -> Any:
        return self._timed(super().forward_one_chunk, str(chunk % 10), self.sleep, chunk, *args, **kwargs)

    def backward_one_chunk(self, chunk: int, *args: Any, **kwargs: Any) -> Any:
        return self._timed(super().backward_one_chunk, chr(97 + chunk % 26), 2 * self.sleep, chunk, *args, **kwargs)

    def _timed(self, work: Any, mark: str, sleep: float, *args: Any, **kwargs: Any) -> Any:
        began = time.time()  # comparable between the processes of a machine
        result = work(*args, **kwargs)
        time.sleep(sleep)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.spans.append((mark, began, time.time()))
        return result


def drawing(spans: list[list[tuple[str, float, float]]], columns: int = 72) -> list[str]:
    """Draw one row for each stage, to scale."""
    first, last = min(s[0][1] for s in spans), max(s[-1][2] for s in spans)
    rows = []
    for stage, work in enumerate(spans):
        row = ["."] * columns
        for mark, began, ended in work:
            left, right = (round((t - first) / (last - first) * columns) for t in (began, ended))
            row[left:right] = mark * (right - left)
        rows.append(f"  stage {stage} |{''.join(row)}|")
    return rows


def bubble_of(spans: list[list[tuple[str, float, float]]]) -> float:
    """Return the share of all stages' time without work, from the first forward to the last backward."""
    whole = max(s[-1][2] for s in spans) - min(s[0][1] for s in spans)
    return 1 - sum(ended - began for s in spans for _, began, ended in s) / (len(spans) * whole)


def measure(name: str, m: int, device: torch.device, steps: int) -> tuple[list[float], list[Any], list[Any]]:
    """Return the bubbles of all steps, the last step's spans by stage, and the losses, which only the last
    stage has."""
    rank, world = dist.get_rank(), dist.get_world_size()
    stage = TimedStage(layers_of(rank).to(device), rank, world, device)
    schedule = SCHEDULES[name](stage, m, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.SGD(stage.submod.parameters(), lr=2.0, momentum=0.9)
    inputs, targets = batch(device)
    bubbles: list[float] = []
    losses: list[Any] = []
    everyone: list[Any] = []
    for _ in range(steps + 1):  # the first one learns the shapes of the passed tensors
        stage.spans = []
        optimizer.zero_grad()
        dist.all_reduce(torch.zeros(1))  # all begin together
        micro: list[Tensor] = []
        if rank == 0:
            schedule.step(inputs)
        elif rank == world - 1:
            schedule.step(target=targets, losses=micro)
        else:
            schedule.step()
        optimizer.step()
        everyone = [None] * world
        dist.all_gather_object(everyone, stage.spans)
        bubbles.append(bubble_of(everyone))
        losses.append(torch.stack(micro).mean().item() if micro else None)
    return bubbles[1:], everyone, losses


def batch(device: torch.device) -> tuple[Tensor, Tensor]:
    inputs = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(99)).to(device)
    return inputs, inputs.roll(1, 1)


def in_one_process(world: int, device: torch.device, steps: int) -> list[float]:
    model = nn.Sequential(*map(layers_of, range(world))).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0, momentum=0.9)
    inputs, targets = batch(device)
    losses = []
    for _ in range(steps + 1):
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    flags = argparse.ArgumentParser(description="Pipeline parallel, with its bubble.")
    flags.add_argument("--micro-batches", type=int, nargs="+", default=[4, 16])
    flags.add_argument(
        "--steps", type=int, default=5, help="measured steps for each schedule and number of micro-batches"
    )
    flags.add_argument(
        "--sleep-ms", type=float, default=None, help="sleep of a forward; default: 10 on CPUs, 0 on GPUs"
    )
    args = flags.parse_args()
    if int(os.environ.get("WORLD_SIZE", 1)) < 2:
        raise SystemExit(
            "pipeline_parallel.py: a pipe has two stages at least: start it with torchrun --nproc-per-node 2"
        )
    rank, world, local = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    for m in args.micro_batches:
        if m < world or ROWS % m:
            why = f"1F1B needs one a stage, so {world} at least, and {ROWS} rows are divided evenly"
            raise SystemExit(f"pipeline_parallel.py: --micro-batches {m}: {why}")
    gpu = torch.cuda.device_count() > local
    device = torch.device("cuda", local) if gpu else torch.device("cpu")
    torch.set_num_threads(1)
    if gpu:
        torch.cuda.set_device(device)
    TimedStage.sleep = (args.sleep_ms if args.sleep_ms is not None else 0 if gpu else 10) / 1000
    dist.init_process_group("cpu:gloo,cuda:nccl" if gpu else "gloo", device_id=device if gpu else None)
    for name in SCHEDULES:
        for m in args.micro_batches:
            bubbles, spans, losses = measure(name, m, device, args.steps)
            if rank == world - 1:
                whole = in_one_process(world, device, args.steps)
                apart = max(abs(a - b) for a, b in zip(losses, whole, strict=True))
                measured, theory = statistics.median(bubbles), (world - 1) / (m + world - 1)
                print(f"{name}, {m} micro-batches: bubble {measured:.3f}, theory {theory:.3f}", end="; ")
                print(f"loss {losses[0]:.4f} to {losses[-1]:.4f}, at most {apart:.1e} from one process")
                print("\n".join(drawing(spans)), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
