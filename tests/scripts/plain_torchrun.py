"""A script for any machine with torchrun: it knows no cloud and no launcher."""

import argparse
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--save", required=True)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    assert (rank, world) == (dist.get_rank(), dist.get_world_size())
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with open(os.path.join(args.data, "rows")) as stream:
        rows = torch.tensor([[float(word) for word in line.split()] for line in stream])[rank::world]
    for epoch in range(args.epochs):
        loss = (model(rows) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"epoch {epoch} loss {loss.item():.4f} on {rank} of {world}", flush=True)
    if rank == 0:
        torch.save(model.module.state_dict(), os.path.join(args.save, "model.pt"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
