"""Task: 8x8 handwritten digits, a small CNN. An entry point needs these functions of a task file:

build_model(args)            returns an nn.Module
build_datasets(args)         returns training, validation and test data, map-style. A sample is a tuple of tensors, and
                             always the same for an index
compute_loss(model, batch)   returns the loss summed over the batch's items, and {name: sum} of other values to average
count(batch)                 returns the number of items: samples or tokens. The batch is still on the CPU

A task may also have:

add_arguments(parser)        adds flags of its own
UNIT                         is the name of an item; default: "samples"
blocks(model)                returns the modules to shard, checkpoint and compile one by one; default: the longest
                             ModuleList
flops_per_item(model)        returns floating-point operations, forward and backward. Without it there is no MFU
"""

import argparse
import gzip
import os
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset, TensorDataset

HELD_OUT = 180  # for validation, and as many for the test


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flag for the data."""
    given = os.environ.get("CLOUDTRAIN_INPUT_TRAIN", "")
    parser.add_argument("--train", default=given, help="digits.csv.gz, or a folder that holds it and no other")


def build_model(args: argparse.Namespace) -> nn.Module:
    """Return the CNN.

    It has GroupNorm, because BatchNorm sees only the samples of one process. It has strides, because the backward pass
    of pooling may not be deterministic.
    """
    layers: list[nn.Module] = []
    for inputs, outputs, stride in ((1, 32, 1), (32, 64, 2), (64, 64, 2)):
        layers += [nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1), nn.GroupNorm(8, outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 2 * 2, 10))


def build_datasets(args: argparse.Namespace) -> tuple[Dataset, Dataset, Dataset]:
    """Return images (1, 8, 8) in 0..1 with labels. The held-out samples are the same for every seed."""
    try:
        (file,) = Path(args.train).glob("*.csv.gz") if os.path.isdir(args.train) else [args.train]
        with gzip.open(file, "rt") as rows:
            pixels, labels = torch.split(torch.tensor([[int(v) for v in row.split(",")] for row in rows]), [64, 1], 1)
    except (OSError, EOFError, ValueError, RuntimeError) as error:
        raise SystemExit(
            f"digits.py: --train {args.train!r} is not digits.csv.gz or a folder with it: {error}"
        ) from None
    digits = TensorDataset(pixels.reshape(-1, 1, 8, 8) / 16, labels.flatten())
    order = torch.randperm(len(digits), generator=torch.Generator().manual_seed(0)).tolist()
    validation, test, train = order[:HELD_OUT], order[HELD_OUT : 2 * HELD_OUT], order[2 * HELD_OUT :]
    return Subset(digits, train), Subset(digits, validation), Subset(digits, test)


def compute_loss(model: nn.Module, batch: list[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the cross-entropy, and the number of correct answers."""
    images, labels = batch
    scores = model(images).float()
    return nn.functional.cross_entropy(scores, labels, reduction="sum"), {
        "accuracy": (scores.argmax(1) == labels).sum()
    }


def count(batch: list[Tensor]) -> int:
    """Return the number of samples."""
    return len(batch[0])
