"""Sweeps through the real console script on provider local: a complete sweep, two clients with one killed, pruning."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from jobs import Done, Jobs

from cloudtrain.runs.sweeps.sweep import Sweep, open_sweep

ROOT = Path(__file__).parents[2]
SCRIPT = """
import argparse, json, math, os, pathlib, time
flags = argparse.ArgumentParser()
for name, kind in (("lr", float), ("width", int), ("seconds", float), ("started", str)):
    flags.add_argument(f"--{name}", type=kind)
args = flags.parse_args()
with open(args.started, "a") as started:
    started.write(os.environ["CLOUDTRAIN_RUN_ID"] + "\\n")
floor = abs(math.log10(args.lr) + 3) + 8 / args.width
for step in range(1, 10):
    time.sleep(args.seconds)
    with open(os.environ["CLOUDTRAIN_METRICS_FILE"], "a") as metrics:
        metrics.write(json.dumps({"step": step, "loss": floor + 1 / step}) + "\\n")
folder = pathlib.Path(os.environ["CLOUDTRAIN_CHECKPOINT_DIR"])
(folder / "step-9.tmp").write_text(str(args.lr))
(folder / "step-9.tmp").rename(folder / "step-9")
"""
TUNE = """
metric = "loss"
sampler = "{sampler}"
[job]
entry_point = "train.py"
launcher = "python"
max_runtime = "5m"
hyperparameters = {{ seconds = {seconds}, started = "{started}" }}
[limits]
trials = {trials}
parallel = 3
{limits}
[space]
lr = {{ low = 1e-5, high = 1e-1, log = true }}
width = [8, 16, 32]
{more}
"""


class Sweeps:
    """A tune.toml in the code folder, and the records of its trials."""

    def __init__(self, jobs: Jobs) -> None:
        self.jobs, self.started = jobs, jobs.tmp / "started.txt"
        jobs.write("train.py", SCRIPT)

    def tune(
        self, *, sampler: str = "random", seconds: float = 0.05, trials: int = 12, limits: str = "", more: str = ""
    ) -> None:
        text = TUNE.format(
            sampler=sampler, seconds=seconds, started=self.started, trials=trials, limits=limits, more=more
        )
        self.jobs.write("tune.toml", text)

    def flags(self) -> list[str]:
        return ["--store", str(self.jobs.store)]

    def cli(self, verb: str, *words: str, timeout: float = 200) -> Done:
        return self.jobs.cli(verb, *words, *self.flags(), timeout=timeout)

    def open(self, sweep_id: str) -> Sweep:
        return open_sweep(sweep_id, store_url=str(self.jobs.store))

    def runs(self) -> list[str]:
        return self.started.read_text().split() if self.started.exists() else []


@pytest.fixture
def sweeps(tmp_path: Path) -> Iterator[Sweeps]:
    made = Jobs(tmp_path)
    yield Sweeps(made)
    made.close()


def entries(sweep: Sweep, kind: str) -> Sequence[dict[str, Any]]:
    return [entry for entry in sweep.store.log_entries(f"sweeps/{sweep.id}") if entry["kind"] == kind]


def check_once(sweeps: Sweeps, sweep: Sweep, count: int) -> None:
    """Check that each of ``count`` trials has one run of one attempt, started once, and that the sweep ended once."""
    names = [f"{sweep.id}-{n:04d}" for n in range(count)]
    assert [entry["run"] for entry in entries(sweep, "trial")] == names
    assert sweep.store.runs() == names
    assert [sweep.store.attempts(name) for name in names] == [[0]] * count
    assert sorted(sweeps.runs()) == names
    assert len(entries(sweep, "end")) == 1
    assert [row["state"] for row in sweep.result()["trials"] if row["state"] not in ("succeeded", "stopped")] == []


@pytest.mark.slow
def test_a_sweep_prunes_and_gives_the_best_checkpoint(sweeps: Sweeps) -> None:
    sweeps.tune(seconds=0.3, trials=5, more='[prune]\nrule = "asha"\nmin = 1\nfactor = 2')
    done = sweeps.cli("sweep", "tune.toml", "--sweep-id", "tune-1", "--json")
    assert done.code == 0, done.err
    result = done.json
    assert result["state"] == "succeeded"
    assert result["counts"]["stopped"] >= 2
    assert "next: cloudtrain pull tune-1 --store" in done.err, "a trial may have no checkpoint"
    check_once(sweeps, sweeps.open("tune-1"), 5)
    known = [row["value"] for row in result["trials"] if row["state"] == "succeeded"]
    assert result["best"]["value"] == min(known)
    pulled = sweeps.cli("pull", "tune-1", "out", "--what", "checkpoints:best", "--json")
    assert pulled.code == 0, pulled.err
    assert pulled.json["run_id"] == result["best"]["run_id"]
    assert float((sweeps.jobs.code / "out/checkpoints/step-9").read_text()) == result["best"]["params"]["lr"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "place",
    [
        "folder",
        *(pytest.param(name, marks=[pytest.mark.remote, pytest.mark.proof]) for name in ("s3", "azure", "gcs")),
    ],
)
def test_two_clients_with_one_killed(sweeps: Sweeps, place: str, request: pytest.FixtureRequest) -> None:
    jobs = sweeps.jobs
    if place != "folder":
        jobs.store = request.getfixturevalue(f"{place}_url")
        ours = ("AWS_", "AZURE_", "GOOGLE_", "STORAGE_", "CLOUDTRAIN_AZURE", "CLOUDSDK_")
        jobs.environ |= {name: text for name, text in os.environ.items() if name.startswith(ours)}
        jobs.environ["XDG_STATE_HOME"] = str(jobs.tmp / "state")
    sweeps.tune(seconds=0.1, trials=5)
    first = jobs.start("sweep", "tune.toml", "--sweep-id", "both", *sweeps.flags())
    jobs.wait_for(lambda: len(sweeps.runs()) >= 2, 120)
    second = jobs.start("sweep", "both", "--json", *sweeps.flags())
    jobs.wait_for(lambda: len(sweeps.runs()) >= 3, 120)
    first.send_signal(signal.SIGKILL)
    out, err = second.communicate(timeout=240)
    assert second.returncode == 0, err
    assert json.loads(out)["state"] == "succeeded"
    sweep = sweeps.open("both")
    check_once(sweeps, sweep, 5)
    assert len({entry["by"] for entry in sweep.store.log_entries("sweeps/both")}) == 2


@pytest.mark.slow
def test_a_sweep_continues_from_its_record_alone(sweeps: Sweeps, tmp_path: Path) -> None:
    """Check that a client without the code drives it, that changed limits open it again, and that a cancelled
    one ends."""
    sweeps.tune(trials=2)
    first = sweeps.cli("sweep", "tune.toml", "--sweep-id", "tune-1", "--detach", "--json")
    assert (first.code, first.json["counts"]["running"]) == (0, 2)
    for name in ("train.py", "tune.toml"):
        (sweeps.jobs.code / name).unlink()
    assert sweeps.cli("wait", "tune-1", "--json").json["state"] == "succeeded"
    again = sweeps.cli("sweep", "tune-1", "--trials", "3", "--json")
    assert (again.code, len(again.json["trials"])) == (0, 3)
    assert len(entries(sweeps.open("tune-1"), "end")) == 2
    assert sweeps.cli("sweep", "tune-1", "--trials", "40", "--detach").code == 0
    ended = sweeps.cli("cancel", "tune-1", "--wait", "--json")
    assert (ended.code, ended.json["state"]) == (0, "cancelled")
    assert sweeps.cli("wait", "tune-1").code == 5
    sweeps.jobs.gone()


DIGITS = """
metric = "val_loss"
[job]
entry_point = "ddp.py"
{image}
max_runtime = "10m"
hyperparameters = {{ epochs = {epochs} }}
[job.inputs]
train = "./digits.csv.gz"
[limits]
trials = {trials}
parallel = 2
[space]
lr = {{ low = 1e-5, high = 3e-2, log = true }}
global-batch = [32, 64, 128]
[prune]
rule = "asha"
by = "epoch"
"""


def digits(sweeps: Sweeps, *, trials: int, epochs: int, image: str = "") -> None:
    """Write a sweep that trains the small CNN of `entrypoints` on the digits."""
    shutil.copytree(ROOT / "entrypoints", sweeps.jobs.code, dirs_exist_ok=True)
    shutil.copy(ROOT / "examples/data/digits.csv.gz", sweeps.jobs.code)
    sweeps.jobs.write("tune.toml", DIGITS.format(trials=trials, epochs=epochs, image=image and f'image = "{image}"'))


def check_best(sweeps: Sweeps, result: dict[str, Any], store: Path) -> None:
    """Check that the best trial's checkpoint is pulled in full."""
    best, known = result["best"], [row["value"] for row in result["trials"] if row["state"] == "succeeded"]
    assert best["value"] == min(known) < 0.7
    pulled = sweeps.jobs.cli(
        "pull", result["sweep_id"], "out", "--what", "checkpoints:best", "--json", "--store", str(store)
    )
    assert (pulled.code, pulled.json["run_id"]) == (0, best["run_id"]), pulled.err
    (folder,) = (sweeps.jobs.code / "out/checkpoints").iterdir()
    assert json.loads((folder / "train.json").read_text())["step"] == int(folder.name.partition("-")[2])


@pytest.mark.proof
@pytest.mark.timeout(1200)
def test_twelve_trials_of_a_real_training(sweeps: Sweeps) -> None:
    digits(sweeps, trials=12, epochs=6)
    done = sweeps.cli("sweep", "tune.toml", "--sweep-id", "digits", "--json", timeout=1000)
    assert done.code == 0, done.err
    result = done.json
    assert len(result["trials"]) == result["counts"]["stopped"] + result["counts"]["succeeded"] == 12
    assert result["counts"]["stopped"] >= 3
    check_best(sweeps, result, sweeps.jobs.store)


@pytest.mark.docker
@pytest.mark.proof
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("target", ["sagemaker", "azureml", "vertex"])
def test_four_trials_on_each_rehearsed_cloud(
    sweeps: Sweeps, images: Callable[[str], str], nothing_left: None, target: str
) -> None:
    sample = importlib.import_module(f"cloudtrain.providers.{target}").SAMPLE
    digits(sweeps, trials=4, epochs=3, image=sample["job"]["image"])
    store = sweeps.jobs.store
    words = ["--provider", target, "--store", sample["store"], "--rehearse", "--local-image", images("torch")]
    words += ["--local-store", str(store), "--sweep-id", "digits", "--json"]
    for name, value in sample["settings"].items():
        words += ["--set", f"{name}={value if isinstance(value, str) else json.dumps(value)}"]
    done = sweeps.jobs.cli("sweep", "tune.toml", *words, timeout=1000)
    assert done.code == 0, done.err
    result = done.json
    assert [row["run_id"] for row in result["trials"]] == sweeps.open("digits").store.runs()
    assert result["counts"]["stopped"] + result["counts"]["succeeded"] == 4
    check_best(sweeps, result, store)
