"""Data in the binary format of CIFAR-10, if you lack the real set: six files of 3073-byte records, ten classes.

    python examples/make_cifar10.py data/cifar10 --records 200

A record is one byte of class, then 1024 bytes each of red, green and blue, row by row. A class here is a colour and the
direction of stripes, in noise and at a random position. A convolution learns it in seconds; a broken loop stays at one
in ten. You can use the real files (`cifar-10-binary.tar.gz`, unpacked) instead, without a change to the script.
"""

import argparse
import math
from pathlib import Path

import torch
from torch import Tensor

CLASSES, SIDE = 10, 32
FILES = [f"data_batch_{number}.bin" for number in range(1, 6)] + ["test_batch.bin"]


def records_of(count: int, random: torch.Generator) -> Tensor:
    """Return records (count, 3073), with the classes in nearly equal numbers."""
    labels = torch.arange(count)[torch.randperm(count, generator=random)] % CLASSES
    angle, hue = labels % 5 * (math.pi / 5), labels // 5 * math.pi
    phase = torch.rand(count, generator=random) * 2 * math.pi
    y, x = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")
    along = x * angle.cos()[:, None, None] + y * angle.sin()[:, None, None]
    stripes = (along * 0.8 + phase[:, None, None]).sin()
    tint = (hue[:, None] + torch.tensor([0.0, 2.0, 4.0])).cos()
    images = 128 + 40 * stripes[:, None] + 25 * tint[:, :, None, None]
    images = images + 40 * torch.randn(count, 3, SIDE, SIDE, generator=random)
    return torch.cat([labels[:, None], images.clamp(0, 255).flatten(1)], 1).to(torch.uint8)


def main() -> None:
    flags = argparse.ArgumentParser(description="Write made-up images in the binary format of CIFAR-10.")
    flags.add_argument("folder", type=Path)
    flags.add_argument("--records", type=int, default=10_000, help="number of records in each of the six files")
    flags.add_argument("--seed", type=int, default=0)
    args = flags.parse_args()
    if args.records < 1:
        raise SystemExit(f"make_cifar10.py: --records {args.records} is not positive")
    args.folder.mkdir(parents=True, exist_ok=True)
    random = torch.Generator().manual_seed(args.seed)
    for name in FILES:
        (args.folder / name).write_bytes(records_of(args.records, random).numpy().tobytes())
    print(f"{len(FILES)} files of {args.records} records in {args.folder}")


if __name__ == "__main__":
    main()
