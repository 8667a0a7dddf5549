"""Train a task (model, data and loss in one small file) with DistributedDataParallel: one file to copy and change.

    torchrun --nproc-per-node 2 entrypoints/ddp.py --train examples/data/digits.csv.gz    # or plain `python`

tasks/digits.py lists what a task needs. The global batch is fixed: the loss is the same, however it is split.
"""

import argparse
import json
import os
import shutil
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext, suppress
from importlib import import_module, util
from math import cos, inf, isfinite, pi
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp  # before any group: the import of torch._dynamo could keep a group alive
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.utils.data import DataLoader, Subset, default_collate


def need(truth: bool, otherwise: str) -> None:
    """Exit with the line ``otherwise`` if ``truth`` is false, on every process alike."""
    if not truth:
        raise SystemExit(f"ddp.py: {otherwise}")


def arguments() -> tuple[Any, argparse.Namespace]:
    """Return the task's module, and the values of all flags, including the task's own."""
    flags = argparse.ArgumentParser(description="Train a task with DistributedDataParallel.", allow_abbrev=False)
    flags.add_argument("--task", type=Path, default=Path(__file__).parent / "tasks/digits.py", help="model, data, loss")
    flags.add_argument("--resume", default=os.environ.get("CLOUDTRAIN_RESUME_FROM", ""), help="a step-N folder")
    flags.add_argument("--global-batch", type=int, default=64, help="samples of a step, summed over all processes")
    flags.add_argument("--micro-batch", type=int, default=0, help="samples of a pass; 0: a process's whole share")
    flags.add_argument("--epochs", type=int, default=12)
    flags.add_argument("--max-steps", type=int, default=sys.maxsize, help="stop after this many steps")
    flags.add_argument("--save-every", type=int, default=sys.maxsize, help="steps; each epoch ends with one, too")
    flags.add_argument("--lr", type=float, default=4e-3, help="peak, after 20 steps; then half a cosine to 0")
    flags.add_argument("--clip", type=float, default=inf, help="largest norm of the gradient")
    flags.add_argument("--precision", choices=["fp32", "bf16", "fp16"], default="fp32", help="of passes, not weights")
    flags.add_argument("--compress", choices=["bf16", "fp16"], help="compress gradients between processes")
    flags.add_argument("--workers", type=int, default=0, help="DataLoader workers of each process")
    flags.add_argument("--seed", type=int, default=0)
    flags.add_argument("--device", choices=["cuda", "npu"], default="cuda", help="npu: Ascend cards, with torch_npu")
    path = flags.parse_known_args([word for word in sys.argv[1:] if word not in ("-h", "--help")])[0].task
    need(path.is_file(), f"--task {str(path)!r} is not a file")
    sys.path.insert(0, str(path.parent.absolute()))  # so that the task can import files of its own folder
    task = import_module(path.stem)
    getattr(task, "add_arguments", lambda _: None)(flags)
    return task, flags.parse_args()


def main() -> None:
    env, (task, args) = os.environ, arguments()
    need(args.device == "cuda" or util.find_spec("torch_npu") is not None, "--device npu needs the package torch_npu")
    gpus = (cards := torch.cuda if args.device == "cuda" else import_module("torch_npu").npu).device_count()
    if "RANK" not in env:  # no torchrun: one plain process
        env.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    rank, world, local = (int(env[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    folder, artifacts = (Path(env.get(f"CLOUDTRAIN_{k}_DIR") or f"{k.lower()}s") for k in ("CHECKPOINT", "ARTIFACT"))
    torch.manual_seed(args.seed)
    model, (train, validation, test) = task.build_model(args), task.build_datasets(args)
    batch, share, per_epoch = args.global_batch, args.global_batch // world, len(train) // max(1, args.global_batch)
    micro, steps = args.micro_batch or share or 1, min(args.epochs * per_epoch, args.max_steps)
    need(not gpus or local < gpus, f"no GPU for local rank {local}: this node has {gpus}; start one process per GPU")
    need(args.compress != "bf16" or gpus > 0, "--compress bf16 needs GPUs: gloo cannot sum bf16")
    even = 0 < batch <= len(train) and micro > 0 and batch % (world * micro) == 0
    need(even, f"--global-batch {batch} of {len(train)} does not split over {world} processes, passes of {micro} each")
    contract = {"seed": args.seed, "global_batch": batch, "steps": steps, "lr": args.lr}
    saved, held = Path(args.resume, "train.json"), min(len(validation), len(test))
    need(held >= world, f"{held} samples are held out, fewer than the {world} processes")
    need(not args.resume or saved.is_file(), f"--resume {args.resume!r} is not a checkpoint of this script")
    notes = json.loads(saved.read_text()) if args.resume else {"step": 0, "contract": contract}
    need(notes["contract"] == contract, f"--resume: saved with {notes['contract']}, but this run has {contract}")
    for path in folder.glob(".step-*.tmp") if local == 0 else ():  # unfinished checkpoints of a killed run
        shutil.rmtree(path, ignore_errors=True)
    env.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)  # the same bits on every run
    torch.set_num_threads(1)  # the number of threads changes the order of float sums
    cards.set_device(local if gpus else -1)
    device = torch.device(args.device, local) if gpus else torch.device("cpu")
    half, say = {"fp16": torch.half}.get(args.precision, torch.bfloat16), print if rank == 0 else lambda *_, **__: None
    backend = {"cuda": "nccl", "npu": "hccl"}[args.device] if gpus else "gloo"
    dist.init_process_group(backend, device_id=device if gpus else None)
    writers = dist.new_group(backend="gloo")  # for threads that save, apart from the loop's own collectives

    def loss_of(model: nn.Module, part: list[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        with torch.autocast(device.type, half, enabled=args.precision != "fp32"):
            return task.compute_loss(model, [tensor.to(device, non_blocking=True) for tensor in part])

    @torch.no_grad()
    def evaluate(data: Any) -> dict[str, float]:
        """Return the means over all samples. Each process takes every world-th one, unpadded: none counts twice."""
        model.eval()
        parts = DataLoader(Subset(data, range(rank, len(data), world)), micro)
        found = [(task.count(part), *loss_of(model, part)) for part in parts]
        model.train()
        rows = [[count, loss.item(), *(value.item() for value in more.values())] for count, loss, more in found]
        dist.all_reduce(sums := torch.tensor(rows, dtype=torch.double, device=device).sum(0))
        return dict(zip(("loss", *found[0][2]), (sums[1:] / sums[0]).tolist(), strict=True))

    if micro < 32 and any(isinstance(m, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)) for m in model.modules()):
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model) if gpus else model
        say(f"BatchNorm with {micro} samples a pass: " + ("SyncBatchNorm" if gpus else "SyncBatchNorm needs GPUs"))
    ddp = nn.parallel.DistributedDataParallel(model.to(device), gradient_as_bucket_view=True)
    if args.compress:
        ddp.register_comm_hook(None, getattr(default_hooks, f"{args.compress}_compress_hook"))
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    for _ in range(2):  # DDP orders its buckets, and so its sums, after the first backward: here, also when resuming
        loss_of(ddp, default_collate([train[index] for index in range(micro)]))[0].backward()
    model.load_state_dict(before, strict=False)
    ddp.zero_grad()
    optimizer = torch.optim.AdamW(model.parameters(), fused=args.device == "cuda")
    scaler = torch.amp.GradScaler(device.type, enabled=args.precision == "fp16")
    if args.resume:
        state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
        dcp.load(state, checkpoint_id=args.resume, process_group=writers)
        set_optimizer_state_dict(model, optimizer, state["optimizer"])
        scaler.load_state_dict(notes.get("scaler") or scaler.state_dict())

    def order(step: int) -> Any:
        """Yield this process's samples from a step on: a function of the seed, so there is no state to save."""
        for epoch in range(step // per_epoch, args.epochs):
            generator = torch.Generator().manual_seed(args.seed * 1_000_003 + epoch)
            shuffled = torch.randperm(len(train), generator=generator).tolist()
            for first in range(max(0, step - epoch * per_epoch) * batch + rank * share, per_epoch * batch, batch):
                yield from shuffled[first : first + share]

    def publish(written: Future[Any], step: int) -> None:
        """Rename the checkpoint on this node's disk, after all processes have written their parts."""
        written.result()
        with suppress(FileNotFoundError):  # another process has renamed it
            (folder / f".step-{step}.tmp").rename(folder / f"step-{step}")

    stager, publisher = DefaultStager(StagingOptions(gpus > 0, False, True, gpus > 0)), ThreadPoolExecutor(1)
    saving, stopping, step = publisher.submit(lambda: None), False, notes["step"]
    loader = iter(DataLoader(train, micro, sampler=order(step), num_workers=args.workers, pin_memory=gpus > 0))
    while step < steps and not stopping:
        began = time.perf_counter()
        torch.manual_seed(((args.seed * 1_000_003 + step) * 65_537 + rank) % 2**63)  # so dropout has no state to save
        parts = [next(loader) for _ in range(share // micro)]
        dist.all_reduce(items := torch.tensor(float(sum(map(task.count, parts))), device=device))
        loss_sum = torch.zeros((), device=device)
        for number, part in enumerate(parts, 1):
            with nullcontext() if number == len(parts) else ddp.no_sync():  # the last pass exchanges the gradients
                loss, _ = loss_of(ddp, part)
                scaler.scale(loss * world / items).backward()  # DDP takes the mean over processes
            loss_sum += loss.detach()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        lr = optimizer.param_groups[0]["lr"] = args.lr * min((step + 1) / 20, (1 + cos(pi * step / steps)) / 2)
        stager.synchronize_staging()  # the last save has copied the weights: they may change now
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        step, epoch, epoch_ends = step + 1, step // per_epoch + 1, (step + 1) % per_epoch == 0 or step + 1 == steps
        total = torch.stack([loss_sum, loss_sum.new_tensor(os.path.exists(env.get("CLOUDTRAIN_PREEMPT_FILE", "")))])
        dist.all_reduce(total)  # the loss of the whole batch, and if any node must stop: all stop at the same step
        mean, stopping, seconds = total[0].item() / items.item(), total[1].item() > 0, time.perf_counter() - began
        line = {"step": step, "epoch": epoch, "time": time.time(), "loss": mean, "lr": lr, "grad_norm": norm.item()}
        line["samples_per_s"], saves = batch / seconds, epoch_ends or stopping or step % max(1, args.save_every) == 0
        for buffer in model.buffers() if saves else ():
            dist.broadcast(buffer, 0)  # as DDP does before the next pass, so that all processes save one model
        if epoch_ends:
            line |= {f"val_{name}": value for name, value in evaluate(validation).items()}
            say(" ".join(f"{name} {value:.4g}" for name, value in line.items() if name != "time"), flush=True)
        with open(env.get("CLOUDTRAIN_METRICS_FILE") or os.devnull if rank == 0 else os.devnull, "a") as metrics:
            metrics.write(json.dumps({k: v if isfinite(v) else None for k, v in line.items()}) + "\n")
        if saves:
            saving.result()  # one save at a time
            hidden = folder / f".step-{step}.tmp"
            shutil.rmtree(folder / f"step-{step}", ignore_errors=True)  # of a run from which this one has diverged
            if rank == 0:
                hidden.mkdir(parents=True, exist_ok=True)
                (hidden / "train.json").write_text(json.dumps(notes | {"step": step, "scaler": scaler.state_dict()}))
            kept = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
            kept["model"] |= {k: v.to("cpu", copy=True) for k, v in model.named_buffers() if k in kept["model"]}
            written = dcp.async_save(kept, checkpoint_id=hidden, process_group=writers, async_stager=stager)
            saving = publisher.submit(publish, written.upload_completion, step)
    saving.result()
    scores = () if stopping else [f"{name} {value:.4f}" for name, value in evaluate(test).items()]
    say(f"preempted at step {step} of {steps}, saved" if stopping else f"{' '.join(scores)} on {len(test)} held out")
    if rank == 0 and not stopping:
        artifacts.mkdir(parents=True, exist_ok=True)
        torch.save(model.state_dict(), artifacts / "model.pt")
    del ddp  # it holds the group, and destroying a gloo group later than in the next line can deadlock on the GIL
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
