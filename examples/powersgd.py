"""PowerSGD: DDP sends two thin factors of each gradient instead of it, and a killed run resumes exactly.

    torchrun --nproc-per-node 2 examples/powersgd.py --train examples/data/digits.csv.gz              # by itself
    cloudtrain submit examples/powersgd.py --nodes 2 --retries 1 --max-runtime 10m \
        --input train=examples/data/digits.csv.gz                                                     # as a run

A gradient of n x m floats is sent as P (n x r) and Q (m x r), whose product approximates it: r (n + m) floats. A
process adds its own approximation error to its next gradient (error feedback), and the next Q starts from the last one
(warm start). So there is state in addition to weights and optimizer, and each rank has its own errors. A checkpoint
without them also resumes, but as a different training. Look for the rank of a gradient before and after compression
begins, and the number of all-reduced floats. A killed run has the losses of an undisturbed one.
"""

import argparse
import gzip
import json
import os
import shutil
import time
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn  # before there is a group: imported later, it would hold the group beyond its end
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

HELD = 360
SAVED = [  # of PowerSGDState; its random numbers are drawn once, for the first Qs
    "iter", "error_dict", "p_memory_dict", "q_memory_dict",
    "total_numel_before_compression", "total_numel_after_compression",
]  # fmt: skip


def read_digits(file: str) -> tuple[Tensor, Tensor]:
    """Return pixels (n, 64) in 0..1 and labels (n,) from a gzipped CSV."""
    try:
        with gzip.open(file, "rt") as rows:
            table = torch.tensor([[int(value) for value in row.split(",")] for row in rows])
        return table[:, :64] / 16, table[:, 64]
    except (OSError, EOFError, ValueError, IndexError) as error:
        raise SystemExit(f"powersgd.py: --train {file!r} is no digits.csv.gz: {error}") from None


def main() -> None:
    env, flags = os.environ, argparse.ArgumentParser(description="Train on digits, gradients compressed by PowerSGD.")
    flags.add_argument("--train", default=env.get("CLOUDTRAIN_INPUT_TRAIN", ""), help="digits.csv.gz")
    flags.add_argument("--checkpoint-dir", type=Path, default=env.get("CLOUDTRAIN_CHECKPOINT_DIR") or "checkpoints")
    flags.add_argument("--resume", default=env.get("CLOUDTRAIN_RESUME_FROM", ""), help="a step-N to resume from")
    flags.add_argument("--matrix-rank", type=int, default=4, help="columns of P and of Q")
    flags.add_argument(
        "--plain-steps", type=int, default=22, help="steps before compression begins: the first are delicate"
    )
    flags.add_argument("--global-batch", type=int, default=64)
    flags.add_argument("--epochs", type=int, default=6)
    flags.add_argument("--lr", type=float, default=0.05)
    args = flags.parse_args()
    if "RANK" not in env:  # no torchrun: one plain process
        env.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    rank, world, local = (int(env[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    pixels, labels = read_digits(args.train)
    batch, gpu = args.global_batch, torch.cuda.device_count() > local
    if not 0 < batch <= len(labels) - HELD or batch % world:
        raise SystemExit(f"powersgd.py: --global-batch {batch} does not split over {world} processes")
    mine = f"powersgd-{rank}-of-{world}.pt"
    if args.resume and not Path(args.resume, mine).is_file():
        raise SystemExit(f"powersgd.py: --resume {args.resume!r} is no checkpoint of {world} processes of this script")

    torch.set_num_threads(1)
    torch.manual_seed(0)
    device = torch.device("cuda", local) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpu else "gloo", device_id=device if gpu else None)
    test, train = torch.randperm(len(labels)).tensor_split([HELD])
    pixels, labels, per_epoch = pixels.to(device), labels.to(device), len(train) // batch
    hidden_layer = nn.Linear(256, 256)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), hidden_layer, nn.ReLU(), nn.Linear(256, 10)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    # One bucket for all: PowerSGD sends from callbacks, and with gloo the callbacks of two buckets wait for each other
    # forever.
    megabytes = 1 + sum(p.nbytes for p in model.parameters()) // 2**20
    ddp = nn.parallel.DistributedDataParallel(model, device_ids=[local] if gpu else None, bucket_cap_mb=megabytes)
    powersgd = PowerSGDState(None, args.matrix_rank, 2 + args.plain_steps, orthogonalization_epsilon=1e-8)
    ddp.register_comm_hook(powersgd, powerSGD_hook)
    # After its first backward DDP orders the bucket again. Errors are kept in that order, so one comes first here too.
    for _ in range(2):
        ddp(pixels[:1]).sum().backward()
    ddp.zero_grad()
    step = 0
    if args.resume:
        saved = torch.load(Path(args.resume, "training.pt"), map_location=device, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
        for name, value in torch.load(Path(args.resume, mine), map_location=device, weights_only=True).items():
            setattr(powersgd, name, value)

    while step < args.epochs * per_epoch:
        epoch, position = divmod(step, per_epoch)
        order = torch.randperm(len(train), generator=torch.Generator().manual_seed(epoch))
        rows = train[order[position * batch : (position + 1) * batch]].chunk(world)[rank]
        loss = nn.functional.cross_entropy(ddp(pixels[rows]), labels[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        mean = loss.detach() / world
        dist.all_reduce(mean)
        if rank == 0 and env.get("CLOUDTRAIN_METRICS_FILE"):
            line = {"step": step, "epoch": epoch + 1, "time": time.time(), "loss": mean.item()}
            with open(env["CLOUDTRAIN_METRICS_FILE"], "a") as metrics:
                metrics.write(json.dumps(line) + "\n")
        if step % per_epoch == 0:
            if rank == 0:
                found = torch.linalg.matrix_rank(hidden_layer.weight.grad)
                print(f"epoch {epoch + 1} loss {mean.item():.4f}, a gradient of rank {found} of 256", flush=True)
            partial, whole = args.checkpoint_dir / f".step-{step}.tmp", args.checkpoint_dir / f"step-{step}"
            partial.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(whole, ignore_errors=True)  # of a run that this one replaces
            if rank == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                torch.save(state, partial / "training.pt")
            torch.save({name: getattr(powersgd, name) for name in SAVED}, partial / mine)
            dist.barrier()  # all have written their part, each to its node's disk
            with suppress(FileNotFoundError):  # another process of this node was first
                partial.rename(whole)
    if rank == 0:
        with torch.inference_mode():
            accuracy = (model(pixels[test]).argmax(1) == labels[test]).float().mean().item()
        _, floats, sent = (int(n / max(1, powersgd.iter - 2 - args.plain_steps)) for n in powersgd.compression_stats())
        print(f"accuracy {accuracy:.4f} on {HELD} digits; a compressed step all-reduces {sent} floats for {floats}")
    del ddp  # it holds the group
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
