"""An Accelerate script as in Accelerate's documentation, submitted unchanged: it knows nothing of cloudtrain.

    torchrun --nproc-per-node 2 examples/accelerate_digits.py --data examples/data/digits.csv.gz
    cloudtrain submit examples/accelerate_digits.py --nodes 2 --retries 1 --max-runtime 10m \
        --input train=examples/data/digits.csv.gz --env ACCELERATE_USE_CPU=true -- \
        --data {inputs.train} --output_dir {checkpoint_dir} --resume_from_checkpoint {resume_from?}

`save_state` writes one folder an epoch, and `load_state` reads one: model, optimizer and generators. Without GPUs,
Accelerate needs ACCELERATE_USE_CPU=true, with and without cloudtrain: otherwise each process silently trains alone.
Look for the number of processes that train together, `Resumed from checkpoint` after a kill, and the final accuracy.
"""

import argparse
import gzip
import os

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset, random_split


def digits(file: str) -> Dataset:
    try:
        with gzip.open(file, "rt") as rows:
            table = torch.tensor([[int(value) for value in row.split(",")] for row in rows])
    except (OSError, EOFError, ValueError) as error:
        raise SystemExit(f"accelerate_digits.py: --data {file!r} is no digits.csv.gz: {error}") from None
    return TensorDataset(table[:, :64] / 16, table[:, 64])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True)
    parser.add_argument("--output_dir", default="checkpoints")
    parser.add_argument("--resume_from_checkpoint", help="a folder epoch_N to resume from")
    parser.add_argument("--num_epochs", type=int, default=8)
    args = parser.parse_args()

    data = digits(args.data)
    accelerator = Accelerator()
    accelerator.print(f"{accelerator.num_processes} processes, {accelerator.distributed_type}")
    set_seed(0)
    train, held = random_split(data, [1437, 360])
    train_dataloader = DataLoader(train, batch_size=32, shuffle=True)
    eval_dataloader = DataLoader(held, batch_size=60)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer, train_dataloader, eval_dataloader = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader
    )

    starting_epoch = 0
    if args.resume_from_checkpoint:
        accelerator.print(f"Resumed from checkpoint: {args.resume_from_checkpoint}")
        accelerator.load_state(args.resume_from_checkpoint)
        starting_epoch = int(os.path.basename(args.resume_from_checkpoint).removeprefix("epoch_")) + 1

    for epoch in range(starting_epoch, args.num_epochs):
        model.train()
        for pixels, labels in train_dataloader:
            loss = nn.functional.cross_entropy(model(pixels), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        right = total = 0
        for pixels, labels in eval_dataloader:
            with torch.no_grad():
                predictions = model(pixels).argmax(dim=1)
            predictions, references = accelerator.gather_for_metrics((predictions, labels))
            right += (predictions == references).sum().item()
            total += len(references)
        accelerator.print(f"epoch {epoch}: accuracy {right / total:.4f} on {total}", flush=True)
        accelerator.save_state(os.path.join(args.output_dir, f"epoch_{epoch}"))
    # A process that ends while its gloo threads work can crash (docs/examples.md). After a barrier they rest.
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
