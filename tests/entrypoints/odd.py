"""A small, quick task for the tests, with uneven counts and the failures of large tasks. A sample is a sequence whose
end is padding, which does not count. A fixed random teacher sets the classes."""

import argparse
import json
import os
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.staging import DefaultStager
from torch.utils.data import Dataset

UNIT = "tokens"
CONTEXT, WIDTH, CLASSES, PADDING = 12, 16, 5, -100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags for the unusual cases."""
    parser.add_argument("--samples", type=int, default=96)
    parser.add_argument("--held-out", type=int, default=21)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--batch-norm", action="store_true")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds that a sample takes to be read")
    parser.add_argument("--noise", action="store_true", help="labels to validate by that nothing can learn")
    parser.add_argument("--overflow", type=int, default=-1, help="the sample whose gradient is too large for float16")
    parser.add_argument("--late", type=int, default=0, help="passes of training until a second head is used, too")
    parser.add_argument("--frozen", action="store_true", help="the first layer learns nothing")
    parser.add_argument("--copying", type=float, default=0.0, help="seconds until a save begins to copy")
    parser.add_argument("--full", default="", help="where rank 1 runs out of memory with more than 2 samples")


class Block(nn.Module):
    """A layer."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(args.dropout)
        self.norm = nn.BatchNorm1d(CONTEXT) if args.batch_norm else nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(torch.tanh(self.norm(self.linear(x))))


class Model(nn.Module):
    """Scores of each token, and one weight that only the overflowing sample changes."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.full = args.full
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(args) for _ in range(3))
        self.head, self.spike = nn.Linear(WIDTH, CLASSES), nn.Linear(1, 1, bias=False)
        nn.init.zeros_(self.spike.weight)
        self.first.requires_grad_(not args.frozen)
        self.late = args.late
        if args.late:
            self.second = nn.Linear(WIDTH, CLASSES)
            self.register_buffer("passes", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor, spike: Tensor) -> Tensor:
        def run_out(*_: Tensor) -> None:
            if os.environ["RANK"] == "1" and len(spike) > 2:
                raise torch.OutOfMemoryError("injected")

        x = self.first(x)
        for number, block in enumerate(self.blocks):
            x = block(x)
            if self.full == f"forward {number}":
                run_out()
            if self.full == f"backward {number}" and x.requires_grad:
                x.register_hook(run_out)
        if self.full == "loss":
            run_out()
        scores = self.head(x)
        if self.late:
            self.passes += self.training
            scores = scores + self.second(x) if self.passes > self.late else scores
        return torch.cat([scores[..., :1] + self.spike(spike)[:, None], scores[..., 1:]], -1)


def build_model(args: argparse.Namespace) -> nn.Module:
    """Return the model of the flags. With ``--copying``, a save copies late, so that steps may change its state."""
    copy = DefaultStager._stage

    def late(stager: DefaultStager, state: dict[str, Any]) -> dict[str, Any]:
        time.sleep(args.copying)
        return copy(stager, state)

    if args.copying:
        DefaultStager._stage = late  # type: ignore[method-assign]
    return Model(args)


class Samples(Dataset[tuple[Tensor, Tensor, Tensor]]):
    """Drawn by their number alone."""

    def __init__(self, first: int, count: int, *, noise: bool = False, overflow: int = -1, pause: float = 0.0) -> None:
        self.first, self.count, self.noise, self.overflow, self.pause = first, count, noise, overflow, pause
        self.teacher = torch.randn(WIDTH, CLASSES, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        time.sleep(self.pause)
        draw = torch.Generator().manual_seed(1 + self.first + index)
        x = torch.randn(CONTEXT, WIDTH, generator=draw)
        classes = torch.randint(CLASSES, (CONTEXT,), generator=draw) if self.noise else (x @ self.teacher).argmax(1)
        classes[1 + (self.first + index) % CONTEXT :] = PADDING
        return x, torch.tensor([60000.0 if index == self.overflow else 0.0]), classes


def build_datasets(args: argparse.Namespace) -> tuple[Samples, Samples, Samples]:
    """Return the samples for training, validation and test."""
    train = Samples(0, args.samples, overflow=args.overflow, pause=args.pause)
    return train, Samples(1000, args.held_out, noise=args.noise), Samples(2000, args.held_out)


def compute_loss(model: nn.Module, batch: list[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the cross-entropy without padding. Each rank records its weights before each pass of a step."""
    x, spike, classes = batch[0], batch[1], batch[2].flatten()
    if model.training:
        local = [weight.to_local() if hasattr(weight, "to_local") else weight for weight in model.parameters()]
        with open(f"weights-{os.environ['RANK']}.jsonl", "a") as stream:
            stream.write(json.dumps([weight.double().sum().item() for weight in local]) + "\n")
    scores = model(x, spike).flatten(0, 1).float()
    loss = nn.functional.cross_entropy(scores, classes, ignore_index=PADDING, reduction="sum")
    return loss, {"accuracy": (scores.argmax(1) == classes).sum()}


def count(batch: list[Tensor]) -> int:
    """Return the number of tokens that are not padding."""
    return int((batch[2] != PADDING).sum())
