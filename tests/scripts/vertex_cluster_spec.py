"""As users of Vertex AI's custom training write it: ranks from CLUSTER_SPEC, where to write from ``AIP_*``."""

import argparse
import json
import os

import torch
import torch.distributed as dist


def join() -> tuple[int, int]:
    spec = json.loads(os.environ["CLUSTER_SPEC"])
    pools, task = spec["cluster"], spec["task"]
    replicas = [host for pool in sorted(pools) for host in pools[pool]]
    before = [host for pool in sorted(pools) if pool < task["type"] for host in pools[pool]]
    rank = len(before) + task["index"]
    master, port = pools["workerpool0"][0].split(":")
    dist.init_process_group("gloo", init_method=f"tcp://{master}:{port}", rank=rank, world_size=len(replicas))
    return rank, len(replicas)


def fuse(uri: str) -> str:
    folder = uri.replace("gs://", "/gcs/", 1)
    os.makedirs(folder, exist_ok=True)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--model-dir", default=os.environ.get("AIP_MODEL_DIR", ""))
    parser.add_argument("--tensorboard", default=os.environ.get("AIP_TENSORBOARD_LOG_DIR", ""))
    args = parser.parse_args()
    rank, world = join()
    with open(os.path.join(args.data, "rows")) as stream:
        total = torch.tensor([float(word) for line in stream for word in line.split()][rank::world]).sum()
    for epoch in range(args.epochs):
        dist.all_reduce(total)
        print(f"epoch {epoch} total {total.item()} on {rank} of {world}", flush=True)
    if rank == 0:
        torch.save({"total": total}, os.path.join(fuse(args.model_dir), "model.pt"))
        with open(os.path.join(fuse(os.environ["AIP_CHECKPOINT_DIR"]), "last"), "w") as stream:
            stream.write(str(args.epochs))
    with open(os.path.join(fuse(args.tensorboard), f"events.{rank}"), "w") as stream:
        stream.write(os.environ["CLOUD_ML_PROJECT_ID"])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
