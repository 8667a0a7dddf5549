"""Users' own scripts, which know nothing of cloudtrain, rehearsed unchanged on their clouds."""

from __future__ import annotations

import csv
import importlib
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from jobs import Done, Jobs

SCRIPTS = Path(__file__).parents[1] / "scripts"
ROWS = "1 2 3\n4 5 6\n7 8 9\n10 11 12\n"
DATA = {
    "sagemaker": "s3://data-bucket/rows/",
    "vertex": "gs://data-bucket/rows",
    "azureml": "abfs://data@contractstore.dfs.core.windows.net/rows",
}

pytestmark = [pytest.mark.docker, pytest.mark.slow]


class Theirs:
    """A folder with only the script, and the rows that stand for the cloud's data."""

    def __init__(self, tmp_path: Path, image: str) -> None:
        self.jobs, self.image, self.run = Jobs(tmp_path), image, tmp_path / "store" / "runs" / "theirs"
        (tmp_path / "rows").mkdir()
        (tmp_path / "rows" / "rows").write_text(ROWS)

    def rehearse(self, target: str, script: str, *flags: str, timeout: float = 240) -> Done:
        shutil.copy(SCRIPTS / script, self.jobs.code)
        sample, data = importlib.import_module(f"cloudtrain.providers.{target}").SAMPLE, DATA[target]
        words = ["--provider", target, "--store", sample["store"], "--image", sample["job"]["image"], "--nodes", "2"]
        words += ["--local-image", self.image, "--local-store", str(self.jobs.store), "--run-id", "theirs", "--json"]
        words += ["--input", f"train={data}", "--map", f"{data}={self.jobs.tmp / 'rows'}", "--max-runtime", "10m"]
        for name, value in sample["settings"].items():
            words += ["--set", f"{name}={value if isinstance(value, str) else json.dumps(value)}"]
        entry = () if "command" in flags else (script,)
        done = self.jobs.cli("rehearse", *entry, *words, *flags, timeout=timeout)
        assert (done.code, done.json["state"]) == (0, "succeeded"), done.err
        return done

    def kept(self, folder: str) -> dict[str, Path]:
        """Return the files that the cloud would have kept, by the path below ``folder`` of the run."""
        root = self.run / folder
        return {path.relative_to(root).as_posix(): path for path in root.rglob("*") if path.is_file()}


@pytest.fixture
def theirs(tmp_path: Path, images: Callable[[str], str], nothing_left: None) -> Iterator[Theirs]:
    made = Theirs(tmp_path, images("torch"))
    yield made
    made.jobs.close()


@pytest.fixture
def lightning(tmp_path: Path, images: Callable[[str], str], nothing_left: None) -> Iterator[Theirs]:
    made = Theirs(tmp_path, images("lightning"))
    yield made
    made.jobs.close()


def test_the_scripts_know_nothing_of_us() -> None:
    for path in SCRIPTS.glob("*.py"):
        assert "cloudtrain" not in path.read_text().lower(), path.name


@pytest.mark.proof
def test_plain_torchrun(theirs: Theirs) -> None:
    words = ("--", "--data", "{inputs.train}", "--epochs", "2", "--save", "{artifact_dir}")
    done = theirs.rehearse("vertex", "plain_torchrun.py", *words)
    assert set(re.findall(r"epoch 1 loss \d+\.\d+ on (\d) of 2", done.err)) == {"0", "1"}
    assert "node-0/model.pt" in theirs.kept("live/artifacts")


@pytest.mark.proof
def test_sagemaker_s_script_mode(theirs: Theirs) -> None:
    """One process a host, as that estimator starts it. Every path and flag is SageMaker's."""
    words = ("--launcher", "python", "--hp", "epochs=3", "--hp", "lr=0.02", "--hp", "backend=gloo")
    done = theirs.rehearse("sagemaker", "sagemaker_script_mode.py", *words)
    assert set(re.findall(r"Train Epoch: 3 Loss: \d+\.\d+ on (\S+)", done.err)) == {"algo-1", "algo-2"}
    files = {name.partition("/")[2]: path for name, path in theirs.kept("native").items()}
    assert files.keys() >= {"output/model/model.pth", "output/data/algo-1.json", "output/data/algo-2.json"}
    output = json.loads(files["output/data/algo-2.json"].read_text())
    assert (output["hosts"], output["lr"]) == (["algo-1", "algo-2"], "0.02")
    assert output["hps"] == {"epochs": 3, "lr": 0.02, "backend": "gloo"}
    assert output["training_env"]["channel_input_dirs"] == {"train": "/opt/ml/input/data/train"}
    assert output["training_env"]["hyperparameters"] == output["hps"]
    assert output["job"]


@pytest.mark.proof
def test_vertex_s_cluster_spec(theirs: Theirs) -> None:
    """It finds its peers itself, at the service's port. It reads gs:// below /gcs."""
    words = ("--launcher", "python", "--", "--data", "{inputs.train}", "--epochs", "1")
    done = theirs.rehearse("vertex", "vertex_cluster_spec.py", *words)
    assert set(re.findall(r"epoch 0 total 78.0 on (\d) of 2", done.err)) == {"0", "1"}
    files = theirs.kept("native")
    assert files.keys() >= {"model/model.pt", "checkpoints/last", "logs/events.0", "logs/events.1"}


@pytest.mark.proof
def test_azureml_s_variables_and_outputs(theirs: Theirs) -> None:
    """Azure ML's users write to ./outputs, which is kept with the run."""
    words = ("--", "--data", "{inputs.train}", "--epochs", "1")
    done = theirs.rehearse("azureml", "azureml_outputs.py", *words)
    assert set(re.findall(r"epoch 0 total 78.0 on (\d) of 2", done.err)) == {"0", "1"}
    files = theirs.kept("live/artifacts")
    assert files.keys() >= {"node-0/told-0.json", "node-1/told-1.json", "node-0/model.pt"}
    told = [json.loads(files[f"node-{rank}/told-{rank}.json"].read_text()) for rank in (0, 1)]
    assert [(item["master"], item["node_rank"], item["local_rank"]) for item in told] == [
        ("node-0", 0, 0),
        ("node-0", 1, 0),
    ]
    assert told[0]["run"] == told[1]["run"] != ""


# ----------------------------------------------------------------------------------------------------------- Lightning

#: The folder in which a user of that cloud finds Lightning's files.
KEPT = {
    "sagemaker": ("native", r"[^/]+/output/data/"),
    "azureml": ("live/artifacts", r"node-0/"),
    "vertex": ("native", r"model/"),
}
EPOCHS = 15
LIGHTNING = ("--", "--data", "{inputs.train}", "--nodes", "2")


@pytest.mark.proof
@pytest.mark.parametrize("target", DATA)
def test_lightning_under_torchrun(lightning: Theirs, target: str) -> None:
    logs = ("--logs", "{artifact_dir}") if target == "vertex" else ()  # a bucket cannot be appended to
    done = lightning.rehearse(target, "lightning_ddp.py", *LIGHTNING, *logs)
    assert set(re.findall(r"epoch 1 loss \d+\.\d+ on (\d) of 2", done.err)) == {"0", "1"}
    folder, below = KEPT[target]
    files = {re.sub(f"^{below}", "", name): path for name, path in lightning.kept(folder).items()}
    assert files.keys() >= {"checkpoints/epoch=0-step=2.ckpt", "checkpoints/last.ckpt"}
    files |= {name.removeprefix("node-0/"): path for name, path in lightning.kept("live/artifacts").items()}
    assert "csv/version_0/hparams.yaml" in files
    rows = list(csv.DictReader(files["csv/version_0/metrics.csv"].read_text().splitlines()))
    assert [row["step"] for row in rows if row["train_loss_step"]] == ["0", "1", "2", "3"]
    assert [row["epoch"] for row in rows if row["train_loss_epoch"]] == ["0", "1"]


@pytest.mark.proof
@pytest.mark.parametrize("target", DATA)
def test_lightning_that_starts_its_own_processes(lightning: Theirs, target: str) -> None:
    """One process a node, without a rank set. The Trainer starts the other one of each node."""
    words = ("--launcher", "command", "--nproc-per-node", "2")
    command = ("--", "env", "-u", "LOCAL_RANK", "python3", "lightning_ddp.py")
    own = ("--devices", "2", "--logs", "{artifact_dir}")
    done = lightning.rehearse(target, "lightning_ddp.py", *words, *command, *LIGHTNING[1:], *own)
    assert set(re.findall(r"epoch 1 loss \d+\.\d+ on (\d) of 4", done.err)) == {"0", "1", "2", "3"}


@pytest.mark.proof
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("target", "flags", "checkpoints"),
    [
        ("sagemaker", ("--spot",), "/opt/ml/checkpoints"),
        ("azureml", ("--retries", "1"), "{checkpoint_dir}"),
        ("vertex", ("--spot",), "{checkpoint_dir}"),
    ],
)
def test_lightning_goes_on_from_its_own_last_checkpoint(
    lightning: Theirs, target: str, flags: tuple[str, ...], checkpoints: str
) -> None:
    import torch

    own = ("--checkpoints", checkpoints, "--logs", "{artifact_dir}", "--epochs", str(EPOCHS), "--pause", "1")
    words = (*flags, "--preempt", "node=1,after=checkpoint", *LIGHTNING, *own)
    done = lightning.rehearse(target, "lightning_ddp.py", *words, timeout=500)
    first, last = done.json["attempts"]
    assert (first["category"], last["reason"]) == ("preempted", "succeeded"), done.json["attempts"]
    assert re.fullmatch(r"last\.ckpt|epoch=\d+-step=\d+\.ckpt", last["resumed_from"])
    again = done.err.partition("Restored all states from the checkpoint at ")[2]
    assert re.match(r"\S+/last\.ckpt\n", again), done.err
    begun = {rank: int(epoch) for epoch, rank in reversed(re.findall(r"epoch (\d+) loss \S+ on (\d) of 2", again))}
    assert begun["0"] == begun["1"] > 0, begun
    left = lightning.kept("live/checkpoints/last.ckpt").items()
    states = {int(match[1]): path for name, path in left if (match := re.match(r"0\.0-(\d+)/node-0/", name))}
    if states or checkpoints == "{checkpoint_dir}":  # else Lightning writes that file again, of which two are kept
        assert begun["0"] == torch.load(states[max(states)], weights_only=False)["epoch"] + 1
    assert set(re.findall(rf"done at epoch {EPOCHS} on (\d) of 2", again)) == {"0", "1"}
