"""Train a small CNN on 8x8 handwritten digits with DistributedDataParallel: plain PyTorch, one file to copy and change.

    torchrun --nproc-per-node 2 entrypoints/ddp.py --train examples/data/digits.csv.gz    # plain `python` will do, too

Nothing but torch is needed. The CLOUDTRAIN_* variables are read where a platform sets them; each has a plain default.
The global batch is the contract: on any number of processes the loss is the same, up to the order of float sums.
"""

import argparse
import gzip
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


def read_digits(where: str) -> tuple[Tensor, Tensor]:
    """Images (n, 1, 8, 8) in 0..1 and labels (n,), from a gzipped CSV or from a folder that holds exactly one."""
    try:
        (file,) = Path(where).glob("*.csv.gz") if os.path.isdir(where) else [where]
        with gzip.open(file, "rt") as rows:
            pixels, labels = torch.split(torch.tensor([[int(v) for v in row.split(",")] for row in rows]), [64, 1], 1)
    except (OSError, EOFError, ValueError, RuntimeError) as error:
        raise SystemExit(f"ddp.py: --train {where!r} is no digits.csv.gz, nor a folder with one: {error}") from None
    return pixels.reshape(-1, 1, 8, 8) / 16, labels.flatten()


def small_cnn() -> nn.Sequential:
    """GroupNorm because BatchNorm sees one process's slice only; strides because pooling may lack an exact backward."""
    layers: list[nn.Module] = []
    for inputs, outputs, stride in ((1, 32, 1), (32, 64, 2), (64, 64, 2)):
        layers += [nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1), nn.GroupNorm(8, outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 2 * 2, 10))


def accuracy_of(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Share of right answers. Each process judges every world-th digit, unpadded, so that none is counted twice."""
    mine = slice(dist.get_rank(), None, dist.get_world_size())
    with torch.inference_mode():
        right = (model(images[mine]).argmax(1) == labels[mine]).sum()
    dist.all_reduce(right)
    return float(right) / len(labels)


def main() -> None:
    env, flags = os.environ, argparse.ArgumentParser(description="Train a small CNN on handwritten digits with DDP.")
    flags.add_argument("--train", default=env.get("CLOUDTRAIN_INPUT_TRAIN", ""), help="digits.csv.gz or its folder")
    flags.add_argument("--checkpoint-dir", type=Path, default=env.get("CLOUDTRAIN_CHECKPOINT_DIR") or "checkpoints")
    flags.add_argument("--artifact-dir", type=Path, default=env.get("CLOUDTRAIN_ARTIFACT_DIR") or "artifacts")
    flags.add_argument("--resume", default=env.get("CLOUDTRAIN_RESUME_FROM", ""), help="a step-N folder, on every node")
    flags.add_argument("--global-batch", type=int, default=64, help="over all processes together")
    flags.add_argument("--epochs", type=int, default=12)
    flags.add_argument("--lr", type=float, default=4e-3, help="the peak of the schedule")
    flags.add_argument("--seed", type=int, default=0)
    args = flags.parse_args()
    if "RANK" not in env:  # no torchrun: one plain process
        env.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    rank, world, local = (int(env[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    batch, gpus = args.global_batch, torch.cuda.device_count()
    if gpus and local >= gpus:  # whatever can be refused is refused here, before processes wait for one another
        raise SystemExit(f"ddp.py: no GPU for local rank {local}, this node has {gpus}: start one process per GPU")
    images, labels = read_digits(args.train)
    # 360, a fifth, are held out: the same ones for every seed.
    held, kept = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0)).tensor_split([360])
    if not 0 < batch <= len(kept) or batch % world:
        raise SystemExit(f"ddp.py: --global-batch {batch} of {len(kept)} digits does not split over {world} processes")
    contract = {"seed": args.seed, "global_batch": batch, "epochs": args.epochs, "lr": args.lr}
    saved = torch.load(f"{args.resume}/state.pt", map_location="cpu", weights_only=True) if args.resume else {}
    if saved and saved["contract"] != contract:
        raise SystemExit(f"ddp.py: --resume {args.resume!r}: saved with {saved['contract']}, this run has {contract}")

    # The same bits on every run: exact kernels, and one thread, as the number of threads orders the float sums.
    # This imports torch._dynamo, which must precede the group: its default arguments would hold a group for good.
    env.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    device = torch.device("cuda", local) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if gpus else "gloo", device_id=device if gpus else None)
    images, labels, model = images.to(device), labels.to(device), small_cnn().to(device)
    ddp = nn.parallel.DistributedDataParallel(model, device_ids=[local] if gpus else None, gradient_as_bucket_view=True)
    # DDP reorders its gradient buckets after the first backward, and with them the sums over more than two processes.
    # One backward before step 1, and before a restored step alike, makes a resumed run equal bit for bit.
    ddp(images[:1]).sum().backward()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    step, per_epoch = saved.get("step", 0), len(kept) // batch
    steps = args.epochs * per_epoch
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=args.lr, total_steps=steps)
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    for name in parts if saved else ():
        parts[name].load_state_dict(saved[name])

    began, seen, preempted = time.perf_counter(), 0, False
    while step < steps and not preempted:
        # The order is a function of seed and step alone: no sampler state to save, whatever the number of processes.
        epoch, position = divmod(step, per_epoch)
        order = torch.randperm(len(kept), generator=torch.Generator().manual_seed(args.seed * 1_000_003 + epoch))
        rows = kept[order[position * batch : (position + 1) * batch]].chunk(world)[rank]
        loss = nn.functional.cross_entropy(ddp(images[rows]), labels[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step, seen = step + 1, seen + batch
        # One sum carries the loss of the whole batch and whether any node is to stop, so all stop at the same step.
        total = torch.stack([loss.detach(), loss.new_tensor(os.path.exists(env.get("CLOUDTRAIN_PREEMPT_FILE", "")))])
        dist.all_reduce(total)
        mean, preempted, epoch_ends = total[0].item() / world, total[1].item() > 0, step % per_epoch == 0
        line = {"step": step, "epoch": epoch + 1, "time": time.time(), "loss": mean, "lr": scheduler.get_last_lr()[0]}
        scheduler.step()
        if epoch_ends:
            line["samples_per_s"] = seen / (time.perf_counter() - began)
            line["val_accuracy"] = accuracy_of(model, images[held], labels[held])
            began, seen = time.perf_counter(), 0
            if rank == 0:
                print(f"epoch {epoch + 1} step {step} loss {mean:.4f} accuracy {line['val_accuracy']:.4f}", flush=True)
        if rank == 0 and env.get("CLOUDTRAIN_METRICS_FILE"):
            with open(env["CLOUDTRAIN_METRICS_FILE"], "a") as metrics:
                metrics.write(json.dumps(line) + "\n")
        if rank == 0 and (epoch_ends or preempted):
            state = {name: part.state_dict() for name, part in parts.items()}
            state |= {"step": step, "epochs_run": step // per_epoch, "contract": contract, "world_size": world}
            # The rename makes it appear whole; until then the dot in front says that it is no checkpoint yet.
            partial, final = (args.checkpoint_dir / name for name in (f".step-{step}.tmp", f"step-{step}"))
            partial.mkdir(parents=True, exist_ok=True)
            torch.save(state, partial / "state.pt")
            shutil.rmtree(final, ignore_errors=True)
            partial.replace(final)
    accuracy = accuracy_of(model, images[held], labels[held])
    if rank == 0 and step < steps:
        print(f"preempted at step {step} of {steps}, saved")
    elif rank == 0:
        args.artifact_dir.mkdir(parents=True, exist_ok=True)
        torch.save(model.cpu().state_dict(), args.artifact_dir / "model.pt")
        summary = {"accuracy": accuracy, "steps": steps, "world_size": world}
        (args.artifact_dir / "summary.json").write_text(json.dumps(summary) + "\n")
        print(f"accuracy {accuracy:.4f} on {len(held)} held-out digits")
    del ddp  # it holds the group too, and a gloo group that dies with it, not in the next line, can deadlock on the GIL
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
