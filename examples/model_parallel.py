"""Model parallel by hand: the first layers on one device, the rest on another, activations passed between them.

    python examples/model_parallel.py                                       # one process, two devices
    torchrun --nproc-per-node 2 examples/model_parallel.py                  # two processes, half the layers each
    cloudtrain submit examples/model_parallel.py --nodes 2 --max-runtime 10m

One process moves activations with `.to(device)`, and autograd finds the way back. Two processes send them, and send
back the gradient of the received tensor: `hidden.backward(gradient)` continues where the other process stopped. Both
train the same model, to the same losses. Look for the losses, each process's share of the weights, and its share of
computing time. Only one of the two computes at a time (except for the optimizers), so together they are about as fast
as one; pipeline_parallel.py fixes that. Without GPUs both devices of the first form are the CPU: this runs its code but
saves no memory. The second form saves half in each process everywhere.
"""

import argparse
import os
import time
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn  # before there is a group: imported later, it would hold the group beyond its end
from torch import Tensor, nn

ROWS, INPUTS, WIDTH, OUTPUTS = 256, 32, 512, 8


def halves() -> tuple[nn.Module, nn.Module]:
    """Return the model, cut where little data passes. Every process makes the same weights."""
    torch.manual_seed(0)
    front = nn.Sequential(nn.Linear(INPUTS, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh())
    back = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, OUTPUTS))
    return front, back


class TwoDevices(nn.Module):
    """The whole model in one process."""

    def __init__(self, first: torch.device, second: torch.device) -> None:
        super().__init__()
        front, back = halves()
        self.front, self.back, self.second = front.to(first), back.to(second), second

    def forward(self, inputs: Tensor) -> Tensor:
        return self.back(self.front(inputs).to(self.second))


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    inputs = torch.randn(ROWS, INPUTS, generator=torch.Generator().manual_seed(step))
    return inputs, inputs[:, :OUTPUTS].cumsum(1).sin()


def in_one_process(steps: int) -> list[float]:
    gpus = torch.cuda.device_count()
    first, second = (torch.device("cuda", min(i, gpus - 1)) if gpus else torch.device("cpu") for i in range(2))
    model = TwoDevices(first, second)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(steps):
        inputs, targets = batch_of(step)
        loss = nn.functional.mse_loss(model(inputs.to(first)), targets.to(second))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(f"one process, {first} and {second}: loss {losses[0]:.4f} at first, {losses[-1]:.4f} at last")
    return losses


class Clock:
    """Seconds that this process computed."""

    busy = 0.0

    @contextmanager
    def running(self, device: torch.device) -> Any:
        began = time.perf_counter()
        yield
        if device.type == "cuda":
            torch.cuda.synchronize()
        self.busy += time.perf_counter() - began


def in_two_processes(rank: int, device: torch.device, steps: int) -> list[float]:
    """Return the losses, which only rank 1 has."""
    half = halves()[rank].to(device)
    optimizer = torch.optim.SGD(half.parameters(), lr=0.1, momentum=0.9)
    passed = torch.empty(ROWS, WIDTH, device=device)  # activations forward, their gradient back
    losses, clock, began = [], Clock(), time.perf_counter()
    for step in range(steps):
        inputs, targets = (tensor.to(device) for tensor in batch_of(step))
        optimizer.zero_grad()
        if rank == 0:
            with clock.running(device):
                hidden = half(inputs)
            dist.send(hidden.detach(), dst=1)
            dist.recv(passed, src=1)
            with clock.running(device):
                hidden.backward(passed)
        else:
            dist.recv(passed, src=0)
            with clock.running(device):
                arrived = passed.clone().requires_grad_()
                loss = nn.functional.mse_loss(half(arrived), targets)
                loss.backward()
            dist.send(arrived.grad, dst=0)
            losses.append(loss.item())
        with clock.running(device):
            optimizer.step()
    held, whole = (sum(p.numel() for m in parts for p in m.parameters()) for parts in ([half], halves()))
    share = clock.busy / (time.perf_counter() - began)
    print(f"rank {rank} holds {held / whole:.0%} of the weights and computed {share:.0%} of the time", flush=True)
    return losses


def main() -> None:
    flags = argparse.ArgumentParser(description="A model cut in two by hand.")
    flags.add_argument("--steps", type=int, default=50)
    args = flags.parse_args()
    rank, world, local = (int(os.environ.get(key, d)) for key, d in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0)))
    if world > 2:
        raise SystemExit(f"model_parallel.py: the model is cut in two, so start one or two processes, not {world}")
    if args.steps < 1:
        raise SystemExit(f"model_parallel.py: --steps {args.steps} is not positive")
    torch.set_num_threads(1)
    if world == 1:
        in_one_process(args.steps)
        return
    gpu = torch.cuda.device_count() > local
    device = torch.device("cuda", local) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpu else "gloo", device_id=device if gpu else None)
    losses = in_two_processes(rank, device, args.steps)
    if rank == 1:
        apart = max(abs(a - b) for a, b in zip(losses, in_one_process(args.steps), strict=True))
        print(f"two processes: loss {losses[0]:.4f} at first, {losses[-1]:.4f} at last")
        print(f"largest difference from one process: {apart:.1e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
