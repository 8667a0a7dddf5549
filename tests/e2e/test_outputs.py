"""Outputs of frameworks that write below the working folder: 2 nodes of 2 processes, and all of it is pulled."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from jobs import Jobs

pytestmark = pytest.mark.slow

LIGHTNING = """
import lightning, torch

class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, _):
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

machines = {"accelerator": "cpu", "devices": 2, "num_nodes": 2, "strategy": "ddp"}
lightning.Trainer(max_epochs=1, **machines).fit(Model(), torch.utils.data.DataLoader(torch.randn(16, 4), batch_size=2))
"""
TRANSFORMERS = """
import torch, transformers

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, x, labels=None):
        return {"loss": self.layer(x).square().mean()}

arguments = transformers.TrainingArguments(
    output_dir="out", max_steps=4, save_steps=2, report_to=[], use_cpu=True, per_device_train_batch_size=2
)
rows = [{"x": torch.randn(4), "labels": 0} for _ in range(32)]
transformers.Trainer(model=Model(), args=arguments, train_dataset=rows).train()
"""
ACCELERATE = """
import torch
from accelerate import Accelerator

accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(4, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
accelerator.backward(model(torch.randn(2, 4)).square().mean())
optimizer.step()
accelerator.save_state("ckpt")
accelerator.end_training()
"""
HYDRA = """
import os, pathlib

rank = int(os.environ["RANK"])
folder = pathlib.Path(f"outputs/2026-01-31/12-00-0{rank}")
(folder / ".hydra").mkdir(parents=True)
for name in ("config", "hydra", "overrides"):
    (folder / ".hydra" / f"{name}.yaml").write_text("[]\\n")
(folder / "train.log").write_text(f"[2026-01-31 12:00:0{rank},000][__main__][INFO] - rank {rank}\\n")
"""
STATE = ("model.safetensors", "optimizer.pt", "scheduler.pt", "trainer_state.json", "training_args.bin")
CASES = {
    "lightning": (
        LIGHTNING,
        ["lightning_logs/version_0/hparams.yaml", "lightning_logs/version_0/checkpoints/epoch=0-step=2.ckpt"],
    ),
    "transformers": (
        TRANSFORMERS,
        [
            f"out/checkpoint-{step}/{name}"
            for step in (2, 4)
            for name in (*STATE, *(f"rng_state_{rank}.pth" for rank in range(4)))
        ],
    ),
    "accelerate": (
        ACCELERATE,
        [
            f"ckpt/{name}"
            for name in ("model.safetensors", "optimizer.bin", *(f"random_states_{r}.pkl" for r in range(4)))
        ],
    ),
    "hydra": (
        HYDRA,
        [
            f"outputs/2026-01-31/12-00-0{rank}/{name}"
            for rank in range(4)
            for name in ("train.log", ".hydra/config.yaml", ".hydra/hydra.yaml", ".hydra/overrides.yaml")
        ],
    ),
}


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Jobs]:
    made = Jobs(tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize("framework", CASES)
def test_what_a_framework_writes_below_the_working_folder_is_pulled_whole(jobs: Jobs, framework: str) -> None:
    """Lightning, Transformers and Accelerate write their files themselves. The script for Hydra, which the tests do not
    install, writes files of the names that Hydra gives them."""
    script, expected = CASES[framework]
    jobs.write("train.py", script)
    done = jobs.submit(
        "train.py", "--nodes", "2", "--nproc-per-node", "2", "--pull", str(jobs.tmp / "out"), timeout=300
    )
    assert done.code == 0, done.err
    outputs = jobs.tmp / "out" / "outputs"
    found = {path.relative_to(outputs).as_posix() for path in outputs.rglob("*") if path.is_file()}
    assert set(expected) <= found
    extra = {name for name in found - set(expected) if not re.search(r"metrics\.csv|tfevents|README\.md", name)}
    assert not extra
    assert all((outputs / name).stat().st_size for name in expected if not name.endswith("hparams.yaml"))
