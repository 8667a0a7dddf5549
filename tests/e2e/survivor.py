"""The training script of the survival trials: small, deterministic, DistributedDataParallel, and strict on resume.

Steps wait rather than compute. Every rank prints each step's loss and a sum of its whole state, to the last bit, and
each save. It refuses an incomplete checkpoint: a line that begins with REFUSED, and exit code 86.

Kinds of checkpoint:

- ``folder``: ``step-N/``, written in place: a shard of every rank, and the common part by rank 0;
- ``dcp``: the same by torch.distributed.checkpoint;
- ``again``: like ``folder``, always in ``latest/``;
- ``file``: ``last.pt``, rewritten by rank 0.
"""

import argparse
import hashlib
import io
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp  # it imports torch._dynamo, before the group: see entrypoints/ddp.py
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

REFUSED = 86
BATCH, WIDTH, CLASSES = 32, 32, 8
FLAGS = argparse.ArgumentParser(description=__doc__)
FLAGS.add_argument("--steps", type=int, default=150)
FLAGS.add_argument("--interval", type=int, default=30, help="steps between checkpoints")
FLAGS.add_argument("--pause", type=float, default=0.1, help="seconds that a step waits")
FLAGS.add_argument("--kind", choices=["folder", "dcp", "again", "file"], default="folder")
FLAGS.add_argument("--save-seconds", type=float, default=0.4, help="seconds that each file takes to write")
FLAGS.add_argument("--pad", type=int, default=1 << 18, help="bytes in each shard in addition to the state")
FLAGS.add_argument("--deaf", action="store_true", help="look for no notice")
FLAGS.add_argument("--handler", action="store_true", help="learn of a stop from a SIGTERM handler instead of the file")
FLAGS.add_argument("--workers", type=int, default=0, help="processes of the DataLoader")


def refuse(why: str) -> NoReturn:
    print(f"REFUSED: {why}", flush=True)
    sys.exit(REFUSED)


class Batches(Dataset[tuple[Tensor, Tensor]]):
    """This rank's part of each step's batch, which depends on the step alone."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        self.teacher = torch.randn(WIDTH, CLASSES, generator=torch.Generator().manual_seed(0))

    def __getitem__(self, step: int) -> tuple[Tensor, Tensor]:
        images = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step))
        labels = (images @ self.teacher).argmax(1)
        return images.chunk(self.world)[self.rank], labels.chunk(self.world)[self.rank]


# ---------------------------------------------------------------------------------------------------------- checkpoints


class Checkpoints:
    """Checkpoints of one kind, for tensors that change in place."""

    def __init__(self, folder: Path, flags: argparse.Namespace, tensors: dict[str, Tensor]) -> None:
        self.folder, self.kind, self.tensors = folder, flags.kind, tensors
        self.seconds, self.pad = flags.save_seconds, flags.pad
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.newest = 0

    def save(self, step: int) -> None:
        if self.newest == step:
            return
        print(f"saving {step}", flush=True)
        if self.kind == "dcp":
            time.sleep(self.seconds)
            dcp.save({**self.tensors, "step": torch.tensor(step)}, checkpoint_id=self.folder / f"step-{step}")
        elif self.kind != "file":
            folder = self.folder / ("latest" if self.kind == "again" else f"step-{step}")
            folder.mkdir(parents=True, exist_ok=True)
            self.write(
                folder / f"shard-{self.rank}.pt",
                {"step": step, "state": self.flat().tensor_split(self.world)[self.rank]},
            )
            if self.rank == 0:
                self.write(folder / "common.pt", {"step": step, "world": self.world})
        elif self.rank == 0:
            self.write(self.folder / "last.pt", {"step": step, "world": self.world, "state": self.flat()})
        self.newest = step
        print(f"saved {step} {time.time():.3f}", flush=True)

    def load(self, path: Path) -> int:
        """Load ``path``, and return its step."""
        self.newest = self.load_dcp(path) if self.kind == "dcp" else self.load_own(path)
        return self.newest

    def load_own(self, path: Path) -> int:
        names = ["common.pt", *(f"shard-{rank}.pt" for rank in range(self.world))] if self.kind != "file" else [""]
        if self.kind != "file" and sorted(os.listdir(path)) != names:
            refuse(f"{path.name} holds {sorted(os.listdir(path))}")
        common, *shards = [self.read(path / name) for name in names]
        origins = {(part["step"], part["attempt"]) for part in (common, *shards)}
        if common["world"] != self.world or len(origins) > 1:
            refuse(f"{path.name} is a mixture of {sorted(origins)}, or of another world than {self.world}")
        self.unflatten(torch.cat([part["state"] for part in shards]) if shards else common["state"])
        return self.named(path, common["step"])

    def load_dcp(self, path: Path) -> int:
        state = {**self.tensors, "step": torch.tensor(0)}
        try:
            dcp.load(state, checkpoint_id=path)
        except Exception as error:  # noqa: BLE001  any error means that this is not a checkpoint
            refuse(f"{path.name} cannot be loaded: {error!r}")
        return self.named(path, int(state["step"]))

    def named(self, path: Path, step: int) -> int:
        if self.kind in ("folder", "dcp") and path.name != f"step-{step}":
            refuse(f"{path.name} is of step {step}")
        return step

    def flat(self) -> Tensor:
        return torch.cat([tensor.detach().flatten() for tensor in self.tensors.values()])

    def sum(self) -> int:
        """Return a sum over every bit of the state: a single-precision loss hides a difference for many steps."""
        words = self.flat().view(torch.int32).long()
        return int((words * torch.arange(1, len(words) + 1)).sum()) & (1 << 64) - 1

    def unflatten(self, flat: Tensor) -> None:
        with torch.no_grad():
            parts = flat.split([tensor.numel() for tensor in self.tensors.values()])
            for tensor, part in zip(self.tensors.values(), parts, strict=True):
                tensor.copy_(part.view_as(tensor))

    def write(self, path: Path, state: dict[str, Any]) -> None:
        """Write in place and slowly, the file's own digest first."""
        buffer, pad = io.BytesIO(), torch.zeros(self.pad, dtype=torch.uint8)
        torch.save({**state, "attempt": os.environ["CLOUDTRAIN_ATTEMPT"], "pad": pad}, buffer)
        data = hashlib.sha256(buffer.getvalue()).hexdigest().encode() + buffer.getvalue()
        with open(path, "wb") as stream:
            for quarter in range(4):
                stream.write(data[quarter * len(data) // 4 : (quarter + 1) * len(data) // 4])
                stream.flush()
                time.sleep(self.seconds / 4)

    def read(self, path: Path) -> dict[str, Any]:
        data = path.read_bytes()
        if hashlib.sha256(data[64:]).hexdigest().encode() != data[:64]:
            refuse(f"{path.parent.name}/{path.name}, {len(data)} bytes, is not what was written")
        state: dict[str, Any] = torch.load(io.BytesIO(data[64:]), weights_only=True)
        return state


# ------------------------------------------------------------------------------------------------------------- training


def main() -> None:
    flags, env = FLAGS.parse_args(), os.environ
    notices: list[int] = []
    if flags.handler:
        signal.signal(signal.SIGTERM, lambda number, _: notices.append(number))

    def stopping() -> bool:
        return bool(notices) if flags.handler else not flags.deaf and os.path.exists(env["CLOUDTRAIN_PREEMPT_FILE"])

    torch.manual_seed(0)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = nn.Sequential(nn.Linear(WIDTH, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, CLASSES))
    ddp = nn.parallel.DistributedDataParallel(model)
    batches = Batches(rank, world)
    for _ in range(2):  # DDP orders its buckets again after the first pass: a resumed step must sum like any other
        images, labels = batches[0]
        nn.functional.cross_entropy(ddp(images), labels).backward()
        model.zero_grad()
    momentum = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
    tensors = dict(model.named_parameters()) | {f"momentum.{name}": value for name, value in momentum.items()}
    checkpoints = Checkpoints(Path(env["CLOUDTRAIN_CHECKPOINT_DIR"]), flags, tensors)
    resume = env["CLOUDTRAIN_RESUME_FROM"]
    step = checkpoints.load(Path(resume)) if resume else 0
    print(f"from {step} of {Path(resume).name!r}", flush=True)

    stop = False
    for images, labels in loader(batches, range(step + 1, flags.steps + 1), flags.workers):
        loss = nn.functional.cross_entropy(ddp(images), labels)
        loss.backward()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                momentum[name].mul_(0.9).add_(parameter.grad)
                parameter.sub_(momentum[name], alpha=0.05)
        model.zero_grad()
        step += 1
        # One sum carries the loss of the whole batch and any rank's stop notice: all ranks stop at the same step.
        total = torch.stack([loss.detach(), torch.tensor(float(stopping()))])
        dist.all_reduce(total)
        mean, stop = total[0].item() / world, total[1].item() > 0
        print(f"step {step} loss {mean.hex()} state {checkpoints.sum():016x}", flush=True)
        if rank == 0:
            with open(env["CLOUDTRAIN_METRICS_FILE"], "a") as metrics:
                line = {"step": step, "epoch": 0, "time": time.time(), "loss": mean}
                metrics.write(json.dumps(line) + "\n")
        if stop or step % flags.interval == 0 or step == flags.steps:
            checkpoints.save(step)
        if stop:
            break
        time.sleep(flags.pause)
    print(f"stopped at {step}" if stop else f"done at {step}", flush=True)
    del ddp  # before the group: see entrypoints/ddp.py
    dist.destroy_process_group()


def loader(batches: Batches, steps: range, workers: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Return the batches of ``steps``."""
    if not workers:
        return map(batches.__getitem__, steps)
    return iter(DataLoader(batches, batch_size=None, sampler=steps, num_workers=workers))


if __name__ == "__main__":
    main()
