"""Task: 8x8 handwritten digits, a small CNN. What an entry point needs of any task file:

build_model(args)            an nn.Module
build_datasets(args)         training, validation, test: map-style; a sample is a tuple of tensors, each time the same
compute_loss(model, batch)   the loss summed over the batch's items, and {name: sum} of whatever else is to be averaged
count(batch)                 the number of those items, samples or tokens; the batch is still on the CPU

and what a task may have:

add_arguments(parser)        flags of its own
UNIT                         what an item is called, unless "samples"
blocks(model)                what to shard, checkpoint and compile one by one, unless the longest ModuleList
flops_per_item(model)        floating-point operations, forward and backward; without it no MFU is told
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
    """Where the data is."""
    given = os.environ.get("CLOUDTRAIN_INPUT_TRAIN", "")
    parser.add_argument("--train", default=given, help="digits.csv.gz, or a folder that holds it and no other")


def build_model(args: argparse.Namespace) -> nn.Module:
    """GroupNorm because BatchNorm sees one process's slice only; strides because pooling may lack an exact backward."""
    layers: list[nn.Module] = []
    for inputs, outputs, stride in ((1, 32, 1), (32, 64, 2), (64, 64, 2)):
        layers += [nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1), nn.GroupNorm(8, outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 2 * 2, 10))


def build_datasets(args: argparse.Namespace) -> tuple[Dataset, Dataset, Dataset]:
    """Images (1, 8, 8) in 0..1 and labels. The same ones are held out for every seed."""
    try:
        (file,) = Path(args.train).glob("*.csv.gz") if os.path.isdir(args.train) else [args.train]
        with gzip.open(file, "rt") as rows:
            pixels, labels = torch.split(torch.tensor([[int(v) for v in row.split(",")] for row in rows]), [64, 1], 1)
    except (OSError, EOFError, ValueError, RuntimeError) as error:
        raise SystemExit(
            f"digits.py: --train {args.train!r} is no digits.csv.gz, nor a folder with one: {error}"
        ) from None
    digits = TensorDataset(pixels.reshape(-1, 1, 8, 8) / 16, labels.flatten())
    order = torch.randperm(len(digits), generator=torch.Generator().manual_seed(0)).tolist()
    validation, test, train = order[:HELD_OUT], order[HELD_OUT : 2 * HELD_OUT], order[2 * HELD_OUT :]
    return Subset(digits, train), Subset(digits, validation), Subset(digits, test)


def compute_loss(model: nn.Module, batch: list[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Cross-entropy, and how many are right."""
    images, labels = batch
    scores = model(images).float()
    return nn.functional.cross_entropy(scores, labels, reduction="sum"), {
        "accuracy": (scores.argmax(1) == labels).sum()
    }


def count(batch: list[Tensor]) -> int:
    """Samples."""
    return len(batch[0])
