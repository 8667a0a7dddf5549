"""Train a task (model, data and loss in one small file) with FSDP2, fully_shard: one file to copy and change.

    torchrun --nproc-per-node 2 entrypoints/fsdp.py --train examples/data/persuasion.txt.gz    # or plain `python`

tasks/digits.py lists what a task needs. The global batch is fixed: the loss is the same, however it is split.
"""

import argparse
import functools
import json
import math
import os
import re
import shutil
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from importlib import import_module, util
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp  # before any group: the import of torch._dynamo could keep a group alive
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, default_collate

BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl", "npu": "cpu:gloo,npu:hccl"}
DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
PEAK_FLOPS = {  # dense bf16 or fp16, from NVIDIA's data sheets; names of torch.cuda.get_device_name()
    "NVIDIA B200": 2250e12, "NVIDIA H200": 989e12, "NVIDIA H100 80GB HBM3": 989e12, "NVIDIA H100 PCIe": 756e12,
    "NVIDIA A100-SXM4-80GB": 312e12, "NVIDIA A100-SXM4-40GB": 312e12, "NVIDIA L40S": 362e12, "NVIDIA L4": 121e12,
}  # fmt: skip


def need(truth: bool, otherwise: str) -> None:
    """Exit with the line ``otherwise`` if ``truth`` is false, on every process alike."""
    if not truth:
        raise SystemExit(f"fsdp.py: {otherwise}")


def arguments() -> tuple[Any, argparse.Namespace]:
    """Return the task's module, and the values of all flags, including the task's own."""
    flags = argparse.ArgumentParser(description="Train a task with FSDP2.", allow_abbrev=False)
    flags.add_argument("--task", type=Path, default=Path(__file__).parent / "tasks/gpt.py", help="model, data, loss")
    flags.add_argument("--resume", default=os.environ.get("CLOUDTRAIN_RESUME_FROM", ""), help="a step-N folder")
    flags.add_argument("--global-batch", type=int, default=16, help="samples of a step, summed over all processes")
    flags.add_argument("--micro-batch", type=int, default=0, help="samples of a pass; 0: a process's whole share")
    flags.add_argument("--epochs", type=int, default=3)
    flags.add_argument("--max-steps", type=int, default=sys.maxsize, help="stop after this many steps")
    flags.add_argument("--save-every", type=int, default=sys.maxsize, help="steps; each epoch ends with one, too")
    flags.add_argument("--patience", type=int, default=sys.maxsize, help="epochs without a better validation loss")
    flags.add_argument("--lr", type=float, default=3e-3, help="peak of the learning rate")
    flags.add_argument("--warmup", type=int, default=20, help="steps up to the peak; half a cosine goes down to 0")
    flags.add_argument("--clip", type=float, default=1.0, help="largest norm of the gradient")
    flags.add_argument("--precision", choices=DTYPES, default="fp32", help="of the passes; the weights stay float32")
    flags.add_argument("--replicate", type=int, default=1, help="HSDP: copies of the model, each sharded in turn")
    flags.add_argument("--no-reshard", action="store_true", help="keep gathered weights from forward to backward")
    flags.add_argument("--recompute", action="store_true", help="activations in backward, block by block; saves memory")
    flags.add_argument("--cpu-offload", action="store_true", help="weights, gradients and optimizer; saves GPU memory")
    flags.add_argument("--compile", action="store_true", help="compile each block")
    flags.add_argument("--deterministic", action="store_true", help="deterministic kernels on GPUs, often slower")
    flags.add_argument("--workers", type=int, default=0, help="DataLoader workers of each process")
    flags.add_argument("--profile", default="", metavar="A:B", help="a Chrome trace of steps A to B")
    flags.add_argument("--seed", type=int, default=0)
    flags.add_argument("--device", choices=["cuda", "npu"], default="cuda", help="npu: Ascend cards, with torch_npu")
    path = flags.parse_known_args([word for word in sys.argv[1:] if word not in ("-h", "--help")])[0].task
    need(path.is_file(), f"--task {str(path)!r} is not a file")
    sys.path.insert(0, str(path.parent.absolute()))  # so that the task can import files of its own folder
    task = import_module(path.stem)
    getattr(task, "add_arguments", lambda _: None)(flags)
    return task, flags.parse_args()


def sharded(task: Any, args: argparse.Namespace, device: torch.device) -> tuple[FSDPModule, list[nn.Module]]:
    """Return the task's model, sharded, and its blocks. Rank 0 draws the weights on its CPU for any world size."""
    whole = task.build_model(args) if dist.get_rank() == 0 else None
    with torch.device("meta"):  # shapes without memory: only rank 0 ever holds all weights
        model = task.build_model(args)
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    blocks = list(task.blocks(model) if hasattr(task, "blocks") else max(lists, key=len, default=()))
    shape = (args.replicate, dist.get_world_size() // args.replicate)[args.replicate == 1 :]
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    precision = MixedPrecisionPolicy(param_dtype=DTYPES[args.precision], reduce_dtype=torch.float32)
    offload = CPUOffloadPolicy(pin_memory=device.type != "cpu") if args.cpu_offload else OffloadPolicy()
    for block in blocks:
        if args.compile:
            block.forward = torch.compile(block.forward)
        if args.recompute:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    for module in (*blocks, model):  # backward needs the root's own weights at once
        reshard = module is not model and not args.no_reshard
        fully_shard(module, mesh=mesh, reshard_after_forward=reshard, mp_policy=precision, offload_policy=offload)
    model.to_empty(device="cpu" if args.cpu_offload else device)
    spread = state_dict.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    state_dict.set_model_state_dict(model, whole.state_dict() if whole else {}, options=spread)
    for name, buffer in list(model.named_buffers()):  # including buffers that are in no state dict
        value = whole.get_buffer(name).to(device) if whole else torch.empty_like(buffer, device=device)
        dist.broadcast(value, 0)
        setattr(model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], value)
    return model, blocks


def estimate(model: nn.Module, blocks: list[nn.Module], args: argparse.Namespace, device: torch.device) -> str:
    """Return a line with the memory that a process needs without activations, and the memory that it has."""
    shard = sum(parameter.to_local().nbytes for parameter in model.parameters())
    sizes = [sum(parameter.numel() for parameter in block.parameters()) for block in blocks]
    rest = sum(parameter.numel() for parameter in model.parameters()) - sum(sizes)
    gathered = rest + (sum(sizes) if args.no_reshard else 2 * max(sizes, default=0))  # the next block is prefetched
    gathered *= 4 if args.precision == "fp32" else 2
    ram = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    there = ram if device.type == "cpu" else getattr(torch, device.type).get_device_properties(device).total_memory
    short = gathered + (0 if args.cpu_offload else 4 * shard) > there
    weights, adamw, gathered, there = (f"{size / 1e6:,.1f} MB" for size in (shard, 2 * shard, gathered, there))
    text = f"weights {weights}, gradients {weights}, AdamW {adamw}{', all in RAM' if args.cpu_offload else ''}"
    advice = "; too little: use more processes, --cpu-offload or --precision bf16" if short else ""
    return f"memory of a process: {text}; gathered weights {gathered}; activations; available {there}{advice}"


def fits(model: Any, blocks: list[nn.Module], loss_of: Any, samples: Any, passes: int, group: Any) -> bool:
    """Return True if a pass fits into the memory of every process, in addition to AdamW's state.

    If one process runs out of memory in the middle of a pass, the others would wait for it at the next gather or
    scatter of weights. So all processes vote before each of these, and all leave the pass at the same point.
    """
    reserve, buffers, handles, full = [], [buffer.clone() for buffer in model.buffers()], [], False

    def vote(mine: bool = False) -> None:
        nonlocal full
        dist.all_reduce(votes := torch.tensor(float(mine)), group=group)
        full = votes.item() > 0
        if full and not mine:
            raise torch.OutOfMemoryError

    def vote_in_backward(tensors: Any) -> None:
        for tensor in tensors if isinstance(tensors, tuple) else (tensors,):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(lambda _: vote())

    for module in (*blocks, model):  # FSDP has its hooks already; prepend puts this one first
        handles += [
            module.register_forward_pre_hook(lambda *_: vote(), prepend=True),  # before it gathers
            module.register_forward_hook(lambda _, __, output: vote_in_backward(output), prepend=True),  # gathers again
            module.register_forward_pre_hook(lambda _, inputs: vote_in_backward(inputs)),  # before it scatters
        ]
    try:
        reserve += [torch.empty_like(parameter) for parameter in model.parameters() for _ in range(2)]
        reserve += [torch.empty(p.shape, device=p.device) for p in model.parameters() if passes > 1]  # whole gradients
        loss, _ = loss_of(default_collate(samples))
        vote()
        loss.backward()
        vote()
    except torch.OutOfMemoryError:
        if not full:
            vote(mine=True)
        model.reset_iter_state()
    for handle in handles:
        handle.remove()
    model.zero_grad()
    for buffer, before in zip(model.buffers(), buffers, strict=True):
        buffer.copy_(before)
    return not full


def main() -> None:
    env, (task, args) = os.environ, arguments()
    need(args.device == "cuda" or util.find_spec("torch_npu") is not None, "--device npu needs the package torch_npu")
    gpus = (cards := torch.cuda if args.device == "cuda" else import_module("torch_npu").npu).device_count()
    if "RANK" not in env:  # no torchrun: one plain process
        env.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    rank, world, local = (int(env[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    folder, artifacts = (Path(env.get(f"CLOUDTRAIN_{k}_DIR") or f"{k.lower()}s") for k in ("CHECKPOINT", "ARTIFACT"))
    (train, validation, test), file = task.build_datasets(args), Path(args.resume, "train.json")
    batch, share, per_epoch = args.global_batch, args.global_batch // world, len(train) // max(1, args.global_batch)
    micro, steps = args.micro_batch or share or 1, min(args.epochs * per_epoch, args.max_steps)
    need(not gpus or local < gpus, f"no GPU for local rank {local}: this node has {gpus}; start one process per GPU")
    need(args.replicate > 0 and world % args.replicate == 0, f"--replicate {args.replicate} must divide {world} ranks")
    even = 0 < batch <= len(train) and micro > 0 and batch % (world * micro) == 0
    need(even, f"--global-batch {batch} of {len(train)} does not split over {world} processes, passes of {micro} each")
    need(len(validation) > 0 and len(test) > 0, "nothing is held out to validate or to test")
    first, last = map(int, args.profile.split(":")) if re.fullmatch(r"\d+:\d+", args.profile) else (0, 0)
    need(not args.profile or 0 < first <= last <= steps, f"--profile {args.profile!r} is not two steps, as in 10:13")
    contract = {"seed": args.seed, "global_batch": batch, "steps": steps, "lr": args.lr}
    need(not args.resume or file.is_file(), f"--resume {args.resume!r} is not a checkpoint of this script")
    notes = json.loads(file.read_text()) if args.resume else {"step": 0, "contract": contract}
    need(notes["contract"] == contract, f"--resume: saved with {notes['contract']}, but this run has {contract}")
    for path in folder.glob(".step-*.tmp") if local == 0 else ():  # unfinished checkpoints of a killed run
        shutil.rmtree(path, ignore_errors=True)
    env.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(args.deterministic)
    torch.manual_seed(args.seed)
    cards.set_device(local if gpus else -1)
    device = torch.device(args.device, local) if gpus else torch.device("cpu")
    say = print if rank == 0 else lambda *_, **__: None
    dist.init_process_group(BACKENDS[device.type], device_id=device if gpus else None)
    aside = dist.new_group(backend="gloo")  # for votes and threads that save, apart from the loop's collectives
    model, blocks = sharded(task, args, device)
    say(estimate(model, blocks, args, device))

    def loss_of(part: list[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        return task.compute_loss(model, [tensor.to(device, non_blocking=True) for tensor in part])

    @torch.no_grad()
    def evaluate(data: Any) -> dict[str, float]:
        """Return the means over all samples. Each process takes every world-th one, unpadded: none counts twice."""
        model.eval()
        mine, sums = range(rank, len(data), world), torch.zeros((), dtype=torch.float64, device=device)
        # All processes gather weights together, so all make as many passes. An empty pass has a sample that counts 0.
        passes = [mine[at : at + micro] for at in range(0, math.ceil(len(data) / world), micro)]
        parts = DataLoader(data, batch_sampler=[rows or range(1) for rows in passes], num_workers=args.workers)
        for rows, part in zip(passes, parts, strict=True):
            loss, others = loss_of(part)
            row = [task.count(part), *map(float, (loss, *others.values()))]
            sums = sums + bool(rows) * torch.tensor(row, dtype=torch.double, device=device)
        model.train()
        dist.all_reduce(sums)
        return dict(zip(("loss", *others), (sums[1:] / sums[0]).tolist(), strict=True))

    while not fits(model, blocks, loss_of, [train[i] for i in range(micro)], share // micro, aside):
        need(micro > 1, "out of memory with one sample: use more processes, --cpu-offload or --recompute")
        micro = max(size for size in range(1, micro // 2 + 1) if share % size == 0)
        cards.empty_cache()
        say(f"out of memory: now {micro} samples a pass, {share // micro} passes a step", flush=True)
    optimizer = torch.optim.AdamW(model.parameters(), fused=args.device == "cuda")
    scaler = torch.amp.GradScaler(device.type, enabled=args.precision == "fp16")  # shards agree on an overflow

    def state() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": state_dict.get_optimizer_state_dict(model, optimizer)}

    def order(step: int) -> Any:
        """Yield this process's samples from a step on: a function of the seed, so there is no state to save."""
        for epoch in range(step // per_epoch, args.epochs):
            generator = torch.Generator().manual_seed(args.seed * 1_000_003 + epoch)
            shuffled = torch.randperm(len(train), generator=generator).tolist()
            for first in range(max(0, step - epoch * per_epoch) * batch + rank * share, per_epoch * batch, batch):
                yield from shuffled[first : first + share]

    def publish(written: Future[Any], step: int, best: int) -> None:
        """Rename the checkpoint on this node's disk, after all processes have written their parts."""
        written.result()
        if local == 0:
            with suppress(FileNotFoundError):  # on a disk that nodes share, another node has renamed it
                (folder / f".step-{step}.tmp").rename(folder / f"step-{step}")
        if rank == 0 and step == best:
            (folder / "best").write_text(f"step-{best}\n")

    state()  # makes AdamW's moments by a step of zeros, so that a checkpoint also has those of unused parameters
    for moments in optimizer.state.values():
        moments["step"].zero_()  # that step does not count
    if args.resume:
        dcp.load(saved := state(), checkpoint_id=args.resume, process_group=aside)
        state_dict.set_optimizer_state_dict(model, optimizer, saved["optimizer"])
        scaler.load_state_dict(notes.get("scaler") or scaler.state_dict())
    step, best = notes["step"], notes.get("best", {"step": notes["step"], "loss": math.inf, "test": {}})
    statistics = [buffer for name, buffer in model.named_buffers() if name.endswith(("_mean", "_var", "_tracked"))]
    artifacts.mkdir(parents=True, exist_ok=True)
    there = getattr(util.find_spec("tensorboard"), "origin", 0) or say("no event files: tensorboard is not installed")
    tensorboard = import_module("torch.utils.tensorboard") if there and rank == 0 else None
    board = tensorboard.SummaryWriter(artifacts, purge_step=step + 1) if tensorboard else None
    peak = PEAK_FLOPS.get(cards.get_device_name(), 0) if gpus else 0
    flops = task.flops_per_item(model) if hasattr(task, "flops_per_item") and args.precision != "fp32" else 0
    profiler = torch.profiler.profile() if rank == 0 and step < first else None
    stager, publisher = DefaultStager(StagingOptions(gpus > 0, False, True, gpus > 0)), ThreadPoolExecutor(1)
    saving, stopping = publisher.submit(lambda: None), False
    loader = iter(DataLoader(train, micro, sampler=order(step), num_workers=args.workers, pin_memory=gpus > 0))
    while step < steps and not stopping and step - best["step"] < max(1, args.patience) * per_epoch:
        if profiler and step + 1 == first:
            profiler.start()
        began = time.perf_counter()
        torch.manual_seed(((args.seed * 1_000_003 + step) * 65_537 + rank) % 2**63)  # so dropout has no state to save
        parts, waited = [next(loader) for _ in range(share // micro)], time.perf_counter() - began
        dist.all_reduce(items := torch.tensor(float(sum(map(task.count, parts))), device=device))
        loss_sum = torch.zeros((), device=device)
        for number, part in enumerate(parts, 1):
            model.set_requires_gradient_sync(number == len(parts))  # the last pass scatters the gradients
            loss, _ = loss_of(part)
            scaler.scale(loss * world / items).backward()  # FSDP takes the mean over processes
            loss_sum += loss.detach()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), args.clip).full_tensor()
        warm, cosine = (step + 1) / max(1, args.warmup), (1 + math.cos(math.pi * step / steps)) / 2
        lr = optimizer.param_groups[0]["lr"] = args.lr * min(warm, cosine)
        stager.synchronize_staging()  # the last save has copied the weights: they may change now
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        for buffer in statistics:  # BatchNorm's, so that all processes save one model
            dist.broadcast(buffer, 0)
        step, epoch, epoch_ends = step + 1, step // per_epoch + 1, (step + 1) % per_epoch == 0 or step + 1 == steps
        total = torch.stack([loss_sum, loss_sum.new_tensor(os.path.exists(env.get("CLOUDTRAIN_PREEMPT_FILE", "")))])
        dist.all_reduce(total)  # the loss of the whole batch, and if any node must stop: all stop at the same step
        mean, stopping, seconds = total[0].item() / items.item(), total[1].item() > 0, time.perf_counter() - began
        line = {"step": step, "epoch": epoch, "time": time.time(), "loss": mean, "lr": lr, "grad_norm": norm.item()}
        unit, rate = getattr(task, "UNIT", "samples"), items.item() / seconds
        line |= {"samples_per_s": batch / seconds, f"{unit}_per_s": rate, "data_wait": waited / seconds}
        line |= {"mfu": rate * flops / (world * peak)} if flops and peak else {}
        line["peak_memory"] = cards.max_memory_allocated() if gpus else getrusage(RUSAGE_SELF).ru_maxrss * 1024
        if profiler and step == last:
            profiler.stop()
            profiler.export_chrome_trace(str(artifacts / f"trace-{first}-{last}.json"))
        if epoch_ends:
            line |= {f"val_{name}": value for name, value in evaluate(validation).items()}
            if line["val_loss"] < best["loss"]:  # the test set decides nothing: it reports the best model
                best = {"step": step, "loss": line["val_loss"], "test": evaluate(test)}
            say(" ".join(f"{name} {value:.4g}" for name, value in line.items() if name != "time"), flush=True)
        with open(env.get("CLOUDTRAIN_METRICS_FILE") or os.devnull if rank == 0 else os.devnull, "a") as metrics:
            metrics.write(json.dumps({k: v if math.isfinite(v) else None for k, v in line.items()}) + "\n")
        for name, value in line.items() if board else ():
            board.add_scalar(name, value, step)
        if epoch_ends or stopping or step % max(1, args.save_every) == 0:
            saving.result()  # one save at a time
            hidden = folder / f".step-{step}.tmp"
            shutil.rmtree(folder / f"step-{step}", ignore_errors=True)  # of a run from which this one has diverged
            if rank == 0:
                hidden.mkdir(parents=True, exist_ok=True)
                new = notes | {"step": step, "best": best, "scaler": scaler.state_dict()}
                (hidden / "train.json").write_text(json.dumps(new))
            kept = state()
            kept["model"] |= {k: v.to("cpu", copy=True) for k, v in model.named_buffers() if k in kept["model"]}
            written = dcp.async_save(kept, checkpoint_id=hidden, process_group=aside, async_stager=stager)
            saving = publisher.submit(publish, written.upload_completion, step, best["step"])
    saving.result()
    if board:
        board.close()
    if stopping:
        say(f"preempted at step {step} of {steps}, saved")
    else:
        whole = state_dict.StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights = state_dict.get_model_state_dict(model, options=whole)
        weights = {name: weight.clone(memory_format=torch.contiguous_format) for name, weight in weights.items()}
        if rank == 0 and util.find_spec("safetensors"):
            import_module("safetensors.torch").save_file(weights, artifacts / "model.safetensors")
        elif rank == 0:
            torch.save(weights, artifacts / "model.pt")
            say("wrote model.pt, as safetensors is not installed")
        step, scores = (best["step"], best["test"]) if best["test"] else (step, evaluate(test))
        result = " ".join(f"{name} {value:.4f}" for name, value in scores.items())
        say(f"{result} on {len(test)} held-out samples, with the weights of step {step}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
