"""A step of `nn.DataParallel` compared with DistributedDataParallel's: same model, same global batch, same run.

    torchrun --nproc-per-node 2 examples/data_parallel_vs_ddp.py                                    # by itself
    cloudtrain submit examples/data_parallel_vs_ddp.py --nodes 2 --max-runtime 10m                  # as a run

Rank 0 first measures the forms of one process, while the others wait. Then all ranks together measure DDP:

  one process      the bare model, the whole batch
  DataParallel     one process, one thread a GPU of its node; without GPUs the same as the bare model
  threads by hand  without GPUs only: what DataParallel would do, a thread for each slice of the batch in one process
  DDP              one process a slice, on any number of nodes

DataParallel sends the weights to every GPU in each forward, and sums all gradients on the first one. Its threads share
one interpreter lock, and it cannot use a second node. All losses must agree: only the method differs. CPUs can measure
the lock and the border between nodes. The copies between GPUs are computed, not measured.
"""

import argparse
import os
import statistics
import threading
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.distributed.nn  # before there is a group: imported later, it would hold the group beyond its end
from torch import Tensor, nn

WIDTH, LAYERS, CLASSES = 128, 16, 10


class Residual(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


def small_model() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [Residual(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(LAYERS)]
    return nn.Sequential(*blocks, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES))


class Threads(nn.Module):
    """DataParallel's forward on CPUs: a thread for each slice. They share the weights, so no copy is needed.

    On GPUs, backward is more in its favour: autograd has one thread for each GPU there, and one for all of the CPU.
    """

    def __init__(self, module: nn.Module, slices: int) -> None:
        super().__init__()
        self.module, self.slices = module, slices

    def forward(self, inputs: Tensor) -> Tensor:
        parts = list(inputs.chunk(self.slices))

        def replica(i: int) -> None:
            parts[i] = self.module(parts[i])

        threads = [threading.Thread(target=replica, args=(i,)) for i in range(len(parts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return torch.cat(parts)


def train(model: nn.Module, inputs: Tensor, labels: Tensor, steps: int) -> tuple[list[Tensor], float]:
    """Return the losses of this process's rows, and the median seconds of a step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    losses, seconds = [], []
    for _ in range(steps):
        began = time.perf_counter()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().cpu())  # waits for the device, so the clock is right
        seconds.append(time.perf_counter() - began)
    return losses, statistics.median(seconds[steps // 5 :])  # the first steps warm up


def main() -> None:
    flags = argparse.ArgumentParser(description="nn.DataParallel compared with DistributedDataParallel.")
    flags.add_argument("--steps", type=int, default=10)
    flags.add_argument("--global-batch", type=int, default=2048)
    args = flags.parse_args()
    if "RANK" not in os.environ:
        raise SystemExit("data_parallel_vs_ddp.py: DDP needs processes: start it with torchrun --nproc-per-node 2")
    rank, world, local = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    batch, gpus = args.global_batch, torch.cuda.device_count()
    if batch < 1 or batch % world:
        raise SystemExit(f"data_parallel_vs_ddp.py: --global-batch {batch} does not split over {world} processes")
    if gpus and local >= gpus:
        raise SystemExit(f"data_parallel_vs_ddp.py: no GPU for local rank {local}, this node has {gpus}")

    torch.set_num_threads(1)  # a process uses one core, and so does each thread of the by-hand form
    device = torch.device("cuda", local) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if gpus else "gloo")
    random = torch.Generator().manual_seed(1)
    inputs = torch.randn(batch, WIDTH, generator=random)
    labels = inputs[:, :CLASSES].argmax(1)
    inputs, labels = inputs.to(device), labels.to(device)

    found: dict[str, tuple[list[float], float]] = {}
    if rank == 0:
        forms: dict[str, Callable[[nn.Module], nn.Module]] = {
            "one process": nn.Sequential,
            "DataParallel": nn.DataParallel,
        }
        if not gpus:
            forms["threads by hand"] = lambda model: Threads(model, world)
        for name, form in forms.items():
            losses, seconds = train(form(small_model().to(device)), inputs, labels, args.steps)
            found[name] = [loss.item() for loss in losses], seconds
    # A sum on the CPUs is the barrier: nccl's would keep the waiting ranks' GPUs busy during DataParallel.
    dist.all_reduce(torch.zeros(1))
    ddp = nn.parallel.DistributedDataParallel(small_model().to(device), device_ids=[local] if gpus else None)
    losses, seconds = train(ddp, inputs.chunk(world)[rank], labels.chunk(world)[rank], args.steps)
    mean = torch.stack(losses)
    dist.all_reduce(mean)
    found["DDP"] = (mean / world).tolist(), seconds

    if rank == 0:
        print(f"{world} processes, {gpus} GPUs on this node, global batch {batch}, median of {args.steps} steps")
        for name, (values, seconds) in found.items():
            apart = max(abs(a - b) for a, b in zip(values, found["one process"][0], strict=True))
            print(f"{name:15} {1000 * seconds:8.2f} ms/step  loss {values[0]:.4f} to {values[-1]:.4f}", end="  ")
            print(f"largest difference {apart:.1e}")
        weights = sum(p.numel() * p.element_size() for p in ddp.parameters())
        through_first, ring = 2 * (world - 1) * weights, 2 * (world - 1) * weights // world
        print(f"bytes a step through the busiest device, {world} of them: DataParallel {through_first}, DDP {ring}")
        if not gpus:
            print("no GPU: DataParallel is the bare model here; the copies it would make are not measured")
    del ddp  # it holds the group
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
