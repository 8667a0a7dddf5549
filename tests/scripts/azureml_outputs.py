"""As users of Azure ML write it: ranks from the PyTorch distribution's variables, results below ``./outputs``."""

import argparse
import json
import os

import torch
import torch.distributed as dist


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True)
    parser.add_argument("--epochs", type=int, default=1)
    args = parser.parse_args()
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    node_rank, world = int(os.environ["NODE_RANK"]), int(os.environ["WORLD_SIZE"])
    # Older clusters of Azure Batch set this variable.
    master = os.environ.get("AZ_BATCH_MASTER_NODE", os.environ["MASTER_ADDR"]).split(":")[0]
    os.environ["MASTER_ADDR"] = master
    dist.init_process_group("gloo", init_method="env://")
    with open(os.path.join(args.data, "rows")) as stream:
        total = torch.tensor([float(word) for line in stream for word in line.split()][rank::world]).sum()
    for epoch in range(args.epochs):
        dist.all_reduce(total)
        print(f"epoch {epoch} total {total.item()} on {rank} of {world}", flush=True)
    os.makedirs("outputs", exist_ok=True)
    told = {"run": os.environ["AZUREML_RUN_ID"], "master": master, "node_rank": node_rank, "local_rank": local_rank}
    with open(f"outputs/told-{rank}.json", "w") as stream:
        json.dump(told, stream)
    if rank == 0:
        torch.save({"total": total}, "outputs/model.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
