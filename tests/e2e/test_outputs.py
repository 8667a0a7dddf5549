"""Outputs of frameworks that write below the working folder: four ranks on several nodes, and all files are pulled."""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import time
from collections.abc import Callable

import pytest
from jobs import Jobs

from cloudtrain.errors import EXIT_CODES
from cloudtrain.runtime.timings import Timings

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


_HEAVY = dict.fromkeys(("lightning", "transformers", "accelerate"), pytest.mark.proof)
"""Frameworks that take half a minute of both cores to start; CI runs them in its slice of the proof."""


@pytest.mark.parametrize("framework", [pytest.param(name, marks=_HEAVY.get(name, ())) for name in CASES])
def test_all_files_that_a_framework_writes_below_the_working_folder_are_pulled(jobs: Jobs, framework: str) -> None:
    """Check Lightning, Transformers and Accelerate themselves. The tests do not install Hydra: a script writes files of
    its names."""
    script, expected = CASES[framework]
    jobs.write("train.py", script)
    # The stand-in of Hydra does not need torch, which a torchrun imports.
    shape = (
        ["--nodes", "4", "--launcher", "python"] if framework == "hydra" else ["--nodes", "2", "--nproc-per-node", "2"]
    )
    done = jobs.submit("train.py", *shape, "--pull", str(jobs.tmp / "out"), timeout=300)
    assert done.code == 0, done.err
    outputs = jobs.tmp / "out" / "outputs"
    found = {path.relative_to(outputs).as_posix() for path in outputs.rglob("*") if path.is_file()}
    assert set(expected) <= found
    extra = {name for name in found - set(expected) if not re.search(r"metrics\.csv|tfevents|README\.md", name)}
    assert not extra
    assert all((outputs / name).stat().st_size for name in expected if not name.endswith("hparams.yaml"))


OWN = """
import os, pathlib
if os.environ["RANK"] == "0":
    folder = pathlib.Path("lightning_logs/version_0/checkpoints")
    folder.mkdir(parents=True)
    (folder / "epoch=1-step=10.ckpt").write_bytes(b"x" * 1000)
    pathlib.Path("model.pt").write_bytes(b"y" * 10)
"""


@pytest.mark.docker
@pytest.mark.parametrize(
    "target", ["docker", *(pytest.param(name, marks=pytest.mark.proof) for name in ("azureml", "sagemaker", "vertex"))]
)
def test_outputs_come_back_from_containers_and_from_rehearsals_of_every_cloud(
    jobs: Jobs, images: Callable[[str], str], nothing_left: None, target: str
) -> None:
    """Check the clouds as `rehearse` starts them here."""
    jobs.write("train.py", OWN)
    jobs.write(".gitignore", "lightning_logs/\n")
    image, store = images("py313"), str(jobs.store)
    words = ["submit", "train.py", "--provider", "docker", "--image", image, "--store", store]
    if target != "docker":
        sample = importlib.import_module(f"cloudtrain.providers.{target}").SAMPLE
        words = ["rehearse", "train.py", "--provider", target, "--store", sample["store"]]
        words += ["--image", sample["job"]["image"], "--local-image", image, "--local-store", store]
        for name, value in sample["settings"].items():
            words += ["--set", f"{name}={value if isinstance(value, str) else json.dumps(value)}"]
    out = jobs.tmp / "out"
    done = jobs.cli(*words, "--nodes", "2", "--launcher", "python", "--run-id", "home", "--pull", str(out), timeout=240)
    assert done.code == 0, done.err
    found = {path.relative_to(out / "outputs").as_posix() for path in (out / "outputs").rglob("*") if path.is_file()}
    assert found == {"lightning_logs/version_0/checkpoints/epoch=1-step=10.ckpt", "model.pt"}


@pytest.mark.docker
def test_a_rehearsal_of_an_image_that_cannot_be_pulled_names_the_flag_of_another(jobs: Jobs) -> None:
    jobs.write("train.py", "print(1)")
    words = ["rehearse", "train.py", "--provider", "vertex", "--store", "gs://bucket/x", "--image", "127.0.0.1:9/no:1"]
    settings = ("project=my-project", "location=europe-west4")
    done = jobs.cli(*words, *(word for pair in settings for word in ("--set", pair)), "--local-store", str(jobs.store))
    assert done.code == 2, done.err
    assert "cannot be pulled" in done.err
    assert "in a rehearsal, you can name another one: --local-image IMAGE" in done.err


STAMPS = """
import os, pathlib, time
for second in range(300):
    pathlib.Path(f"stamp-{os.environ['RANK']}-{time.time():.0f}").write_text("now")
    time.sleep(1)
"""


def test_a_killed_node_loses_at_most_thirty_seconds_of_its_outputs(jobs: Jobs) -> None:
    assert Timings().output_look == 10.0  # three scans take 30 seconds
    jobs.shorten(output_look=1.0, output_young=0.5)  # a tenth: three scans then take 3 seconds
    jobs.write("train.py", STAMPS)
    run = jobs.detach("train.py", "--nodes", "2", "--launcher", "python")
    outputs = jobs.store / "runs" / run.run_id / "live" / "outputs"
    jobs.wait_for(lambda: list(outputs.rglob("stamp-1-*")))
    time.sleep(10)  # longer than the bound below: outputs that are copied only once fail it
    killed = time.time()
    os.killpg(jobs.node(1), signal.SIGKILL)
    assert jobs.cli("wait", run.url).code == EXIT_CODES["infra"]
    run.pull(jobs.tmp / "out")
    newest = max(int(path.name.rpartition("-")[2]) for path in (jobs.tmp / "out" / "outputs").rglob("stamp-1-*"))
    assert killed - newest < 3 + 5  # plus the time of one scan on a busy machine
