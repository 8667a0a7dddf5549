"""A Lightning script as in Lightning's documentation, submitted unchanged: it knows nothing of cloudtrain.

    torchrun --nproc-per-node 2 examples/lightning_digits.py --data examples/data/digits.csv.gz --devices 2
    cloudtrain submit examples/lightning_digits.py --nodes 2 --retries 1 --max-runtime 10m \
        --input train=examples/data/digits.csv.gz -- --num-nodes 2 \
        --data {inputs.train} --checkpoint-dir {checkpoint_dir} --resume {resume_from?}

Placeholders fill its own flags on the node. `--resume {resume_from?}` disappears if there is no checkpoint. Look for
`Restored all states from the checkpoint` after a kill, and the final accuracy.
"""

import argparse
import gzip

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset, random_split


class LitDigits(L.LightningModule):
    def __init__(self, lr: float = 3e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        pixels, labels = batch
        loss = nn.functional.cross_entropy(self.model(pixels), labels)
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        pixels, labels = batch
        self.log("val_acc", (self.model(pixels).argmax(1) == labels).float().mean(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr * 30, momentum=0.9)


def digits(file: str) -> Dataset:
    try:
        with gzip.open(file, "rt") as rows:
            table = torch.tensor([[int(value) for value in row.split(",")] for row in rows])
    except (OSError, EOFError, ValueError) as error:
        raise SystemExit(f"lightning_digits.py: --data {file!r} is no digits.csv.gz: {error}") from None
    return TensorDataset(table[:, :64] / 16, table[:, 64])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True)
    parser.add_argument("--checkpoint-dir", default="checkpoints")
    parser.add_argument("--resume", help="a checkpoint to resume from")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--devices", default="auto", help="on each node")
    parser.add_argument("--num-nodes", type=int, default=1)
    args = parser.parse_args()

    L.seed_everything(0)
    train, held = random_split(digits(args.data), [1437, 360])
    checkpoints = ModelCheckpoint(dirpath=args.checkpoint_dir, filename="digits-{epoch:02d}", save_top_k=-1)
    trainer = L.Trainer(
        max_epochs=args.epochs,
        accelerator="auto",
        devices=args.devices,
        num_nodes=args.num_nodes,
        strategy="ddp",
        callbacks=[checkpoints],
        logger=False,
        enable_progress_bar=False,
    )
    trainer.fit(
        LitDigits(),
        DataLoader(train, batch_size=32, shuffle=True),
        DataLoader(held, batch_size=60),
        ckpt_path=args.resume,
    )
    if trainer.is_global_zero:
        accuracy = trainer.callback_metrics["val_acc"].item()
        print(f"{trainer.world_size} processes, {trainer.global_step} steps, accuracy {accuracy:.4f}", flush=True)


if __name__ == "__main__":
    main()
