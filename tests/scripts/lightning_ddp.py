"""A typical PyTorch Lightning script: DDP by the Trainer, which resumes from its last checkpoint if it has one."""

import argparse
import os
import time

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, TensorDataset


def kept() -> str:
    """Return the folder of this cloud whose files outlive the job."""
    if "SM_OUTPUT_DATA_DIR" in os.environ:
        return os.environ["SM_OUTPUT_DATA_DIR"]
    return os.environ.get("AIP_MODEL_DIR", "outputs").replace("gs://", "/gcs/", 1)


class LitRows(L.LightningModule):
    def __init__(self, lr: float = 0.005, pause: float = 0.0) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = torch.nn.Linear(3, 1)

    def training_step(self, batch: tuple[torch.Tensor], batch_idx: int) -> torch.Tensor:
        time.sleep(self.hparams.pause)
        loss = (self.model(batch[0]) - 1).square().mean()
        self.log("train_loss", loss, on_epoch=True, sync_dist=True)
        world = self.trainer.world_size
        print(f"epoch {self.current_epoch} loss {loss.item():.4f} on {self.global_rank} of {world}", flush=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--devices", default="auto", help="on each node")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--out", default=kept())
    parser.add_argument("--logs", help="default: --out")
    parser.add_argument("--checkpoints", help="default: below --out")
    parser.add_argument("--resume", default="last", help="a checkpoint, or last")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds a step")
    args = parser.parse_args()

    L.seed_everything(0)
    with open(os.path.join(args.data, "rows")) as stream:
        rows = torch.tensor([[float(word) for word in line.split()] for line in stream])
    folder = args.checkpoints or os.path.join(args.out, "checkpoints")
    trainer = L.Trainer(
        max_epochs=args.epochs,
        accelerator="auto",
        devices=args.devices,
        num_nodes=args.nodes,
        strategy="ddp",
        logger=CSVLogger(args.logs or args.out, name="csv"),
        callbacks=[ModelCheckpoint(folder, filename="{epoch}-{step}", save_top_k=-1, save_last=True)],
        log_every_n_steps=1,
        enable_progress_bar=False,
    )
    loader = DataLoader(TensorDataset(rows), batch_size=1, shuffle=True)
    trainer.fit(LitRows(pause=args.pause), loader, ckpt_path=args.resume)
    print(f"done at epoch {trainer.current_epoch} on {trainer.global_rank} of {trainer.world_size}", flush=True)


if __name__ == "__main__":
    main()
