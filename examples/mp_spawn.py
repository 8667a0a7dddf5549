"""A script that starts its own processes with `mp.spawn`: launcher python, one process a node, its own ranks.

    python examples/mp_spawn.py --train examples/data/digits.csv.gz --processes 2                   # by itself
    cloudtrain submit examples/mp_spawn.py --launcher python --nodes 2 --max-runtime 10m \
        --input train=examples/data/digits.csv.gz -- --processes 2                                  # as a run

With launcher python each node runs the script once: RANK and WORLD_SIZE count nodes, MASTER_ADDR and MASTER_PORT are
node 0's. The parent makes one rank for each process: rank = node * processes + local. Look for the ranks and their
nodes, and a falling loss. A killed run resumes from its last epoch.
"""

import argparse
import gzip
import os
import socket
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn  # before there is a group: imported later, it would hold the group beyond its end
import torch.multiprocessing as mp
from torch import Tensor, nn


def read_digits(file: str) -> tuple[Tensor, Tensor]:
    """Return pixels (n, 64) in 0..1 and labels (n,) from a gzipped CSV."""
    try:
        with gzip.open(file, "rt") as rows:
            table = torch.tensor([[int(value) for value in row.split(",")] for row in rows])
        return table[:, :64] / 16, table[:, 64]
    except (OSError, EOFError, ValueError, IndexError) as error:
        raise SystemExit(f"mp_spawn.py: --train {file!r} is no digits.csv.gz: {error}") from None


def train(local: int, node: int, nodes: int, args: argparse.Namespace) -> None:
    """Train as one rank. `mp.spawn` gives the first argument, the number of the process on this node."""
    rank, world = node * args.processes + local, nodes * args.processes
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", local) if gpu else torch.device("cpu")
    torch.set_num_threads(1)
    if gpu:
        torch.cuda.set_device(device)
    address = f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    dist.init_process_group("nccl" if gpu else "gloo", init_method=address, rank=rank, world_size=world)
    print(f"rank {rank} of {world}: process {local} of node {node}", flush=True)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    first = 0
    if args.resume:
        state = torch.load(args.resume, map_location=device, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["epochs_run"]
    ddp = nn.parallel.DistributedDataParallel(model, device_ids=[local] if gpu else None)
    pixels, labels = (tensor.to(device) for tensor in read_digits(args.train))
    for epoch in range(first, args.epochs):
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(epoch))
        total = torch.zeros(2, device=device)
        for rows in order.split(args.global_batch)[: len(labels) // args.global_batch]:
            mine = rows.chunk(world)[rank]
            loss = nn.functional.cross_entropy(ddp(pixels[mine]), labels[mine])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += torch.stack([loss.detach(), torch.ones_like(loss)])
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch + 1} loss {(total[0] / total[1]).item():.4f}", flush=True)
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epochs_run": epoch + 1}
            partial = args.checkpoint_dir / f".epoch-{epoch + 1}.tmp"
            torch.save(state, partial)
            partial.replace(args.checkpoint_dir / f"epoch-{epoch + 1}.pt")  # the file is complete, or absent
    del ddp  # it holds the group
    dist.destroy_process_group()


def main() -> None:
    env, flags = os.environ, argparse.ArgumentParser(description="Train on digits with processes of mp.spawn.")
    flags.add_argument("--train", default=env.get("CLOUDTRAIN_INPUT_TRAIN", ""), help="digits.csv.gz")
    flags.add_argument("--checkpoint-dir", type=Path, default=env.get("CLOUDTRAIN_CHECKPOINT_DIR") or "checkpoints")
    flags.add_argument("--resume", default=env.get("CLOUDTRAIN_RESUME_FROM", ""), help="an epoch-N.pt")
    flags.add_argument("--processes", type=int, default=torch.cuda.device_count() or 1, help="on each node")
    flags.add_argument("--global-batch", type=int, default=64)
    flags.add_argument("--epochs", type=int, default=5)
    args = flags.parse_args()
    node, nodes = int(env.get("RANK", 0)), int(env.get("WORLD_SIZE", 1))
    world = nodes * args.processes
    if args.processes < 1 or not 0 < args.global_batch <= 1797 or args.global_batch % world:
        raise SystemExit(f"mp_spawn.py: --global-batch {args.global_batch} does not split over {world} processes")
    read_digits(args.train)  # refuse here, before processes wait for each other
    args.checkpoint_dir.mkdir(parents=True, exist_ok=True)
    if "MASTER_ADDR" not in env:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            env.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free.getsockname()[1]))
    # A process that fails raises here, with its traceback, and the others are stopped.
    mp.spawn(train, args=(node, nodes, args), nprocs=args.processes)


if __name__ == "__main__":
    main()
