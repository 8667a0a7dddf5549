"""A typical script for SageMaker's PyTorch estimator: it reads paths and hosts from ``SM_*``, and the rest from
flags."""

import argparse
import json
import os

import torch
import torch.distributed as dist


def train(args: argparse.Namespace) -> None:
    world, rank = len(args.hosts), args.hosts.index(args.current_host)
    os.environ["WORLD_SIZE"], os.environ["RANK"] = str(world), str(rank)
    dist.init_process_group(args.backend, rank=rank, world_size=world)
    device = "cuda" if args.num_gpus > 0 else "cpu"
    model = torch.nn.Linear(3, 1).to(device)
    for parameter in model.parameters():
        dist.broadcast(parameter.data, 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=args.momentum)
    with open(os.path.join(args.data_dir, "rows")) as stream:
        rows = torch.tensor([[float(word) for word in line.split()] for line in stream])[rank::world]
    for epoch in range(1, args.epochs + 1):
        optimizer.zero_grad()
        loss = (model(rows) - 1).square().mean()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= world
        optimizer.step()
        print(f"Train Epoch: {epoch} Loss: {loss.item():.6f} on {args.current_host}", flush=True)
    if args.current_host == args.hosts[0]:
        with open(os.path.join(args.model_dir, "model.pth"), "wb") as stream:
            torch.save(model.cpu().state_dict(), stream)
    told = {"hosts": args.hosts, "hps": json.loads(os.environ["SM_HPS"]), "job": os.environ["TRAINING_JOB_NAME"]}
    told |= {"lr": os.environ["SM_HP_LR"], "training_env": json.loads(os.environ["SM_TRAINING_ENV"])}
    with open(os.path.join(args.output_data_dir, f"{args.current_host}.json"), "w") as stream:
        json.dump(told, stream)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10, metavar="N")
    parser.add_argument("--lr", type=float, default=0.01, metavar="LR")
    parser.add_argument("--momentum", type=float, default=0.5, metavar="M")
    parser.add_argument("--backend", type=str, default=None)
    parser.add_argument("--hosts", type=list, default=json.loads(os.environ["SM_HOSTS"]))
    parser.add_argument("--current-host", type=str, default=os.environ["SM_CURRENT_HOST"])
    parser.add_argument("--model-dir", type=str, default=os.environ["SM_MODEL_DIR"])
    parser.add_argument("--data-dir", type=str, default=os.environ["SM_CHANNEL_TRAIN"])
    parser.add_argument("--output-data-dir", type=str, default=os.environ["SM_OUTPUT_DATA_DIR"])
    parser.add_argument("--num-gpus", type=int, default=os.environ["SM_NUM_GPUS"])
    train(parser.parse_args())
