"""ResNet-18 with BatchNorm on CIFAR-10's binary files, from an input channel, with DistributedDataParallel.

    python examples/make_cifar10.py data/cifar10 --records 200             # only where the real set is absent
    torchrun --nproc-per-node 2 examples/resnet_cifar10.py --train data/cifar10 --width 8 --epochs 3
    cloudtrain submit examples/resnet_cifar10.py --nodes 2 --max-runtime 10m --input train=data/cifar10 \
        -- --width 8 --epochs 3

The folder holds data_batch_1.bin to data_batch_5.bin and test_batch.bin, at any depth. BatchNorm takes its mean and
variance from one process's rows. On GPUs it becomes SyncBatchNorm, which takes them from the whole batch. SyncBatchNorm
has no CPU form: there each process normalises its own rows, and the script says so. Rank 0's running statistics are the
model's, in a checkpoint and in the test. Look for a falling loss and the accuracy on the test file. A run that was
killed or stopped resumes from its last checkpoint.
"""

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn  # before there is a group: imported later, it would hold the group beyond its end
from torch import Tensor, nn

RECORD = 1 + 3 * 32 * 32


def read(folder: str, pattern: str) -> tuple[Tensor, Tensor]:
    """Return images (n, 3, 32, 32) as bytes and labels (n,) of all files of that pattern."""
    files = sorted(Path(folder).rglob(pattern)) if folder else []
    if not files:
        raise SystemExit(f"resnet_cifar10.py: --train {folder!r} holds no {pattern}; make_cifar10.py makes some")
    data = b"".join(file.read_bytes() for file in files)
    if not data or len(data) % RECORD:
        raise SystemExit(f"resnet_cifar10.py: {pattern} in {folder!r}: {len(data)} bytes are no {RECORD}-byte records")
    records = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(-1, RECORD)
    if records[:, 0].max() > 9:
        raise SystemExit(f"resnet_cifar10.py: {pattern} in {folder!r}: class {records[:, 0].max()}, but 0 to 9 exist")
    return records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0].to(torch.int64)


class Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        self.short: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.short = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return (self.norm2(self.conv2(self.norm1(self.conv1(x)).relu())) + self.short(x)).relu()


def resnet18(width: int) -> nn.Sequential:
    """Return the form for small images: a 3x3 stem and no pooling before the first block. The usual width is 64."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    inputs = width
    for outputs, stride in ((width, 1), (2 * width, 2), (4 * width, 2), (8 * width, 2)):
        layers += [Residual(inputs, outputs, stride), Residual(outputs, outputs, 1)]
        inputs = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 10))


def scaled(images: Tensor) -> Tensor:
    return images.float() / 64 - 2


def augmented(images: Tensor, random: torch.Generator) -> Tensor:
    """Flip images at random, and move them by up to 4 pixels. The generator decides alone, so a resume repeats it."""
    count, device = len(images), images.device
    flip = (torch.rand(count, generator=random) < 0.5).to(device)
    moves = torch.randint(9, (2, count, 1), generator=random).to(device)
    rows, columns = moves + torch.arange(32, device=device)
    which, channels = torch.arange(count, device=device), torch.arange(3, device=device)
    images = torch.where(flip[:, None, None, None], images.flip(3), images)
    padded = nn.functional.pad(images, (4, 4, 4, 4))
    return padded[which[:, None, None, None], channels[:, None, None], rows[:, None, :, None], columns[:, None, None]]


def accuracy_of(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Return the accuracy. Each process takes every world-th image, so none counts twice, and rank 0's running
    statistics."""
    for buffer in model.buffers():
        dist.broadcast(buffer, 0)
    model.eval()
    right, mine = torch.zeros((), device=labels.device), slice(dist.get_rank(), None, dist.get_world_size())
    with torch.inference_mode():
        for part, truth in zip(images[mine].split(500), labels[mine].split(500), strict=True):
            right += (model(scaled(part)).argmax(1) == truth).sum()
    model.train()
    dist.all_reduce(right)
    return right.item() / len(labels)


def main() -> None:
    env, flags = os.environ, argparse.ArgumentParser(description="ResNet-18 on CIFAR-10's binary files.")
    flags.add_argument("--train", default=env.get("CLOUDTRAIN_INPUT_TRAIN", ""), help="the folder of the .bin files")
    flags.add_argument("--checkpoint-dir", type=Path, default=env.get("CLOUDTRAIN_CHECKPOINT_DIR") or "checkpoints")
    flags.add_argument("--artifact-dir", type=Path, default=env.get("CLOUDTRAIN_ARTIFACT_DIR") or "artifacts")
    flags.add_argument("--resume", default=env.get("CLOUDTRAIN_RESUME_FROM", ""), help="a step-N.pt")
    flags.add_argument("--global-batch", type=int, default=128)
    flags.add_argument("--epochs", type=int, default=30)
    flags.add_argument("--lr", type=float, default=0.1, help="the peak of the schedule")
    flags.add_argument("--width", type=int, default=64, help="channels of the first block")
    flags.add_argument("--seed", type=int, default=0)
    flags.add_argument("--device", choices=["cuda", "npu"], default="cuda", help="npu: Ascend cards, by torch_npu")
    args = flags.parse_args()
    if "RANK" not in env:  # no torchrun: one plain process
        env.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    rank, world, local = (int(env[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    if args.device == "npu":
        import torch_npu  # noqa: F401  it adds torch.npu, and the backend hccl
    batch, gpu = args.global_batch, getattr(torch, args.device).device_count() > local
    images, labels = read(args.train, "data_batch_*.bin")
    test_images, test_labels = read(args.train, "test_batch.bin")
    if not 0 < batch <= len(labels) or batch % world or args.width < 1:
        raise SystemExit(
            f"resnet_cifar10.py: --global-batch {batch} of {len(labels)} does not split over {world} processes"
        )
    contract = {"seed": args.seed, "global_batch": batch, "epochs": args.epochs, "lr": args.lr, "width": args.width}
    saved = torch.load(args.resume, map_location="cpu", weights_only=True) if args.resume else {}
    if saved and saved["contract"] != contract:
        raise SystemExit(f"resnet_cifar10.py: --resume {args.resume!r}: saved with {saved['contract']}, not {contract}")

    device = torch.device(args.device, local) if gpu else torch.device("cpu")
    torch.manual_seed(args.seed)
    if gpu:
        getattr(torch, args.device).set_device(device)
    dist.init_process_group(
        {"cuda": "nccl", "npu": "hccl"}[args.device] if gpu else "gloo", device_id=device if gpu else None
    )
    model = resnet18(args.width).to(device, memory_format=torch.channels_last)
    if gpu:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    elif rank == 0 and world > 1:
        print(
            f"no GPU, so no SyncBatchNorm: each process normalises its own {batch // world} rows of {batch}", flush=True
        )
    images, labels, test_images, test_labels = (t.to(device) for t in (images, labels, test_images, test_labels))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, nesterov=True, weight_decay=5e-4)
    step, per_epoch = saved.get("step", 0), len(labels) // batch
    steps = args.epochs * per_epoch
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=args.lr, total_steps=steps)
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    for name in parts if saved else ():
        parts[name].load_state_dict(saved[name])
    if rank == 0:
        print(f"begins at step {step} of {steps}", flush=True)
    ddp = nn.parallel.DistributedDataParallel(model, device_ids=[local] if gpu else None)

    preempted = False
    while step < steps and not preempted:
        epoch, position = divmod(step, per_epoch)
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(args.seed * 1_000_003 + epoch))
        rows = order[position * batch : (position + 1) * batch].chunk(world)[rank].to(device)
        random = torch.Generator().manual_seed((args.seed * 1_000_003 + step) * world + rank)
        inputs = augmented(scaled(images[rows]), random).contiguous(memory_format=torch.channels_last)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=gpu):
            loss = nn.functional.cross_entropy(ddp(inputs), labels[rows], label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        step += 1
        # One sum carries the loss of the whole batch and any node's stop notice, so all stop at the same step.
        total = torch.stack([loss.detach(), loss.new_tensor(os.path.exists(env.get("CLOUDTRAIN_PREEMPT_FILE", "")))])
        dist.all_reduce(total)
        mean, preempted, epoch_ends = total[0].item() / world, total[1].item() > 0, step % per_epoch == 0
        line = {"step": step, "epoch": epoch + 1, "time": time.time(), "loss": mean}
        if epoch_ends:
            line["accuracy"] = accuracy_of(model, test_images, test_labels)
        if rank == 0 and epoch_ends:
            print(f"epoch {epoch + 1} step {step} loss {mean:.4f} accuracy {line['accuracy']:.4f}", flush=True)
        if rank == 0 and env.get("CLOUDTRAIN_METRICS_FILE"):
            with open(env["CLOUDTRAIN_METRICS_FILE"], "a") as metrics:
                metrics.write(json.dumps(line) + "\n")
        if rank == 0 and (epoch_ends or preempted):
            state = {name: part.state_dict() for name, part in parts.items()} | {"step": step, "contract": contract}
            args.checkpoint_dir.mkdir(parents=True, exist_ok=True)
            partial = args.checkpoint_dir / f".step-{step}.tmp"
            torch.save(state, partial)
            partial.replace(args.checkpoint_dir / f"step-{step}.pt")  # the file is complete, or absent
    accuracy = accuracy_of(model, test_images, test_labels)
    if rank == 0 and step < steps:
        print(f"told to stop at step {step} of {steps}, saved")
    elif rank == 0:
        args.artifact_dir.mkdir(parents=True, exist_ok=True)
        torch.save(model.state_dict(), args.artifact_dir / "model.pt")
        print(f"accuracy {accuracy:.4f} on {len(test_labels)} test images")
    del ddp  # it holds the group
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
