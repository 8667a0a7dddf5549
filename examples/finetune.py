"""Fine-tuning: initial weights are not a resume.

    python examples/finetune.py --train examples/data/digits.csv.gz                               # the base model
    python examples/finetune.py --train examples/data/digits.csv.gz --task parity --rows 100 --epochs 10 \
        --weights artifacts/model.pt --checkpoint-dir tuned                                       # fine-tuned

    cloudtrain submit examples/finetune.py --max-runtime 10m --input train=examples/data/digits.csv.gz --pull out/base
    cloudtrain submit examples/finetune.py --nodes 2 --retries 1 --max-runtime 10m \
        --input train=examples/data/digits.csv.gz --input weights=out/base/artifacts/model.pt \
        -- --task parity --rows 100 --epochs 10

The base model learns which digit it sees. Fine-tuned on a hundred rows, it learns odd and even. Its weights come from
an input channel. They start a new training: step 0, a fresh optimizer, and a new head, because the classes differ. A
checkpoint continues a training: weights, head, optimizer and step. So if there is a checkpoint, the script does not
read the initial weights. A script that loads them at each start would lose the work of the earlier attempt. Look for
the line that names the start, and compare the accuracy with that of a run without --weights.
"""

import argparse
import gzip
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn  # before there is a group: imported later, it would hold the group beyond its end
from torch import Tensor, nn

TASKS = {"digit": 10, "parity": 2}
HELD = 360


def read_digits(file: str) -> tuple[Tensor, Tensor]:
    """Return images (n, 1, 8, 8) in 0..1 and labels (n,) from a gzipped CSV."""
    try:
        with gzip.open(file, "rt") as rows:
            table = torch.tensor([[int(value) for value in row.split(",")] for row in rows])
        return table[:, :64].reshape(-1, 1, 8, 8) / 16, table[:, 64]
    except (OSError, EOFError, ValueError, IndexError) as error:
        raise SystemExit(f"finetune.py: --train {file!r} is no digits.csv.gz: {error}") from None


class SmallCnn(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for inputs, outputs, stride in ((1, 16, 1), (16, 32, 2), (32, 64, 2)):
            layers += [nn.Conv2d(inputs, outputs, 3, stride, padding=1), nn.GroupNorm(8, outputs), nn.ReLU()]
        self.body, self.head = nn.Sequential(*layers, nn.Flatten()), nn.Linear(64 * 2 * 2, classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.body(images))


def load_body(model: SmallCnn, file: str) -> None:
    """Load the initial weights: all but the head. Refuse a file that lacks one."""
    try:
        weights = torch.load(file, map_location="cpu", weights_only=True)
        body = {name.removeprefix("body."): tensor for name, tensor in weights.items() if name.startswith("body.")}
        model.body.load_state_dict(body)
    except Exception as error:  # noqa: BLE001  the file may be of any kind, and each fails differently
        why = str(error).splitlines()[0]
        raise SystemExit(f"finetune.py: --weights {file!r} is no model.pt of this script: {why}") from None


def main() -> None:
    env, flags = os.environ, argparse.ArgumentParser(description="Fine-tune a small CNN on handwritten digits.")
    flags.add_argument("--train", default=env.get("CLOUDTRAIN_INPUT_TRAIN", ""), help="digits.csv.gz")
    flags.add_argument("--weights", default=env.get("CLOUDTRAIN_INPUT_WEIGHTS", ""), help="a model.pt to start from")
    flags.add_argument("--checkpoint-dir", type=Path, default=env.get("CLOUDTRAIN_CHECKPOINT_DIR") or "checkpoints")
    flags.add_argument("--artifact-dir", type=Path, default=env.get("CLOUDTRAIN_ARTIFACT_DIR") or "artifacts")
    flags.add_argument("--resume", default=env.get("CLOUDTRAIN_RESUME_FROM", ""), help="a step-N.pt to resume from")
    flags.add_argument("--task", choices=TASKS, default="digit")
    flags.add_argument("--rows", type=int, default=1400, help="digits to train on; 360 others are the test of any task")
    flags.add_argument("--global-batch", type=int, default=20)
    flags.add_argument("--epochs", type=int, default=6)
    flags.add_argument("--lr", type=float, default=0.02)
    args = flags.parse_args()
    if "RANK" not in env:  # no torchrun: one plain process
        env.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    rank, world, local = (int(env[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    images, labels = read_digits(args.train)
    labels = labels % TASKS[args.task]
    batch, gpu = args.global_batch, torch.cuda.device_count() > local
    if not 0 < batch <= args.rows <= len(labels) - HELD or batch % world:
        sizes = f"--global-batch {batch} and --rows {args.rows} of {len(labels) - HELD}"
        raise SystemExit(f"finetune.py: {sizes}: a batch is at most the rows, and splits over {world} processes")

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = SmallCnn(TASKS[args.task])
    saved = {}
    if args.resume:  # first: a checkpoint replaces the initial weights
        saved = torch.load(args.resume, map_location="cpu", weights_only=True)
        model.load_state_dict(saved["model"])
        start = f"goes on at step {saved['step']}"
    elif args.weights:
        load_body(model, args.weights)
        start = "begins with initial weights and a new head"
    else:
        start = "begins from scratch"
    step = saved.get("step", 0)
    device = torch.device("cuda", local) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpu else "gloo", device_id=device if gpu else None)
    if rank == 0:
        print(start, flush=True)
    model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    if saved:
        optimizer.load_state_dict(saved["optimizer"])
    ddp = nn.parallel.DistributedDataParallel(model, device_ids=[local] if gpu else None)
    test, train = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0)).tensor_split([HELD])
    images, labels, per_epoch = images.to(device), labels.to(device), args.rows // batch
    while step < args.epochs * per_epoch:
        epoch, position = divmod(step, per_epoch)
        order = torch.randperm(args.rows, generator=torch.Generator().manual_seed(epoch))
        rows = train[order[position * batch : (position + 1) * batch]].chunk(world)[rank]
        loss = nn.functional.cross_entropy(ddp(images[rows]), labels[rows])
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
        if rank == 0 and step % per_epoch == 0:
            args.checkpoint_dir.mkdir(parents=True, exist_ok=True)
            partial = args.checkpoint_dir / f".step-{step}.tmp"
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, partial)
            partial.replace(args.checkpoint_dir / f"step-{step}.pt")  # the file is complete, or absent
    if rank == 0:
        with torch.inference_mode():
            accuracy = (model(images[test]).argmax(1) == labels[test]).float().mean().item()
        args.artifact_dir.mkdir(parents=True, exist_ok=True)
        torch.save(model.state_dict(), args.artifact_dir / "model.pt")
        print(f"accuracy {accuracy:.4f} on {len(test)} digits after {step} steps")
    del ddp  # it holds the group
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
