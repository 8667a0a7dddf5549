"""Mistakes of new users: each ends with its exit code and one helpful line.

One row is one command line in the folder of `Folder`. ``error`` and ``hint`` are patterns for the two lines on stderr.
``shows`` is one for stdout and stderr together, for commands that succeed and warn. A mistake sends nothing and shows
no traceback, and its message is one line.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from disks import small_disk

from cloudtrain import cli

SAGEMAKER = (
    "--provider sagemaker --store s3://bucket/runs --set region=eu-west-1 "
    "--set role=arn:aws:iam::123456789012:role/Train"
)
AZUREML = (
    "--provider azureml --store abfs://runs@account.dfs.core.windows.net/x "
    "--set subscription_id=00000000-0000-0000-0000-000000000001 "
    "--set resource_group=g --set workspace_name=w --set environment=azureml:torch:1"
)
VERTEX = "--provider vertex --store gs://bucket/runs --set project=my-project --set location=europe-west4 --image i:1"
KUBERNETES = "--provider kubernetes --store /v/x --set root=/v --set claim=c --image i:1"
ARN = "aws:arn:aws:secretsmanager:eu-west-1:123456789012:secret:token"

FILES = {
    "train.py": "import argparse\np = argparse.ArgumentParser()\np.add_argument('--steps', type=int, default=1)\n"
    "print('steps', p.parse_args().steps)\n",
    "syntax.py": "print('one')\ndef broken(:\n    pass\n",
    "leaves.py": "import sys\nsys.exit('the data folder is empty')\n",
    "exits3.py": "import sys\nsys.exit(3)\n",
    "imports.py": "import nowhere_to_be_found\n",
    "saves.py": "import os, pathlib\nd = pathlib.Path(os.environ['CLOUDTRAIN_CHECKPOINT_DIR']) / 'step-1'\nd.mkdir()\n"
    "(d / 'model').write_text('1')\n",
    "my script ü.py": "print('hello')\n",
    "nb.ipynb": '{"cells": [], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}',
    "a.yaml": "run: python train.py\n",
    "job.toml": 'entry_point = "train.py"\n',
    "idle.toml": 'entry_point = "train.py"\n[resources]\nnproc_per_node = 1\n',
    "typo.toml": 'entry_point = "train.py"\nmax_runtme = "1h"\n',
    "type.toml": 'entry_point = "train.py"\n[resources]\ninstance_count = "two"\n',
    "broken.toml": 'entry_point = "train.py\n',
    "region.toml": 'entry_point = "train.py"\nregion = "eu-west-1"\n',
    "provider.toml": 'entry_point = "train.py"\nprovider = "sagemaker"\n',
    "store.toml": 'entry_point = "train.py"\nstore = "s3://b/p"\n',
    "noscript.toml": 'name = "x"\n',
    "spaces.toml": 'metric = "loss"\nsampler = "random"\njob = "job.toml"\n[spaces]\nlr = [1, 2]\n',
    "broken.json": '{"entry_point": "train.py",}',
    "list.json": "[1]",
    "data.csv": "a,b\n1,2\n",
    "pkg/__init__.py": "",
    "pkg/main.py": "print('main')\n",
}


@dataclass(frozen=True)
class Mistake:
    """``argv`` as a shell would split it, and the expected result."""

    argv: str
    code: int
    error: str = ""
    hint: str = ""
    shows: str = ""


M = Mistake

VERBS = [
    M("sumbit train.py", 2, "no verb 'sumbit'", "cloudtrain submit"),
    M("stop twin", 2, "no verb 'stop'", "cloudtrain cancel"),
    M("kill twin", 2, "no verb 'kill'", "cloudtrain cancel"),
    M("run train.py", 2, "no verb 'run'", "cloudtrain submit"),
    M("launch train.py", 2, "no verb 'launch'", "cloudtrain submit"),
    M("rm twin", 2, "no verb 'rm'", "cloudtrain gc"),
    M("delete twin", 2, "no verb 'delete'", "cloudtrain gc"),
    M("ssh twin", 2, "no verb 'ssh'", "did you mean: cloudtrain shell"),
    M("download twin", 2, "no verb 'download'", "cloudtrain pull"),
    M("resume twin", 2, "no verb 'resume'", "--resume-from"),
    M("tail twin", 2, "no verb 'tail'", "cloudtrain logs"),
    M("describe twin", 2, "no verb 'describe'", "cloudtrain status"),
    M("dryrun train.py", 2, "no verb 'dryrun'", "cloudtrain plan"),
    M("xyzzy", 2, "no verb 'xyzzy'", "cloudtrain --help"),
    M("ls", 0, shows="twin"),
    M("ps", 0, shows="twin"),
    M("help", 0, shows="submit"),
    M("help submit", 0, shows="--nodes"),
    M("train.py", 2, "no verb 'train.py'", "cloudtrain submit train.py"),
    M("--nodes 2 submit train.py", 2, "--nodes", ""),
    M("", 0, shows="submit"),
]
FLAGS = [
    M("submit train.py --node 2", 2, "--node\\b", "--nodes"),
    M("submit train.py --gpus 2", 2, "total_gpus: needs the kind of GPU", "--gpu NAME"),
    M("submit train.py --epochs 3", 2, "--epochs", "after '?--"),
    M("submit train.py --region us-east-1", 2, "--region", "--set region=VALUE"),
    M("submit train.py --dry-run", 2, "--dry-run", "cloudtrain plan"),
    M("submit train.py extra", 2, "'extra'", "after '?--"),
    M("submit train.py --nodes", 2, "--nodes", ""),
    M("submit train.py --nodes two", 2, "instance_count.*'two'", ""),
    M("submit train.py --nodes 0", 2, "instance_count", ""),
    M("submit train.py --nproc-per-node 0", 2, "nproc_per_node", ""),
    M("submit train.py --nproc-per-node 1.5", 2, "nproc_per_node", ""),
    M("submit train.py --max-runtime 1hour", 2, "max_runtime.*'1hour'", ""),
    M("submit train.py --max-runtime 0", 2, "max_runtime", ""),
    M("submit train.py --max-cost free", 2, "max_cost", ""),
    M("submit train.py --max-cost 5", 2, "max_cost|price", ""),
    M("submit train.py --retries -1", 2, "retries", ""),
    M("submit train.py --retries many", 2, "retries", ""),
    M("submit train.py --hp lr", 2, "lr", "--hp lr=0.1|--hp NAME=VALUE|lr="),
    M("submit train.py --env FOO", 2, "FOO", "FOO="),
    M("submit train.py --tag x", 2, "'x'", "x="),
    M("submit train.py --input data.csv", 2, "data.csv", "=data.csv"),
    M("submit train.py --input 'my data.csv'", 2, "my data.csv", "'train=my data.csv'"),
    M("submit train.py --input train=nope.csv", 2, "nope.csv", ""),
    M("submit train.py --hp d={inputs.val}", 2, "inputs.val", "--input val=PATH"),
    M("submit train.py --input train=nothing://x/y", 2, "inputs.train.*cannot read nothing: URLs", ""),
    M("submit train.py --set region", 2, "region", "region="),
    M("submit train.py --set regoin=eu-west-1", 2, "regoin", "region"),
    M("submit train.py --env RANK=3", 2, "RANK", ""),
    M("submit train.py --env CLOUDTRAIN_X=3", 2, "CLOUDTRAIN_X", ""),
    M("submit train.py --option local.rules=3", 2, "local", ""),
    M("submit train.py --option sagemker.x=3", 2, "sagemker", "sagemaker"),
    M("submit train.py --secret NOPE", 2, "NOPE", ""),
    M("submit train.py --run-id My_Run", 2, "My_Run", "my-run"),
    M("submit train.py --name My_Job", 2, "My_Job", "my-job"),
    M("submit train.py --launcher mpirun", 2, "mpirun", ""),
    M("submit train.py --checkpoint-path ../x", 2, "checkpoint_paths", ""),
    M("submit train.py --stall-timeout soon", 2, "stall_timeout.*'soon'", ""),
    M("submit train.py --wait-timeout soon", 2, "wait_timeout.*'soon'", ""),
    M("submit train.py --metric loss", 2, "loss", "loss="),
    M("submit train.py --metric 'loss=loss ([0-9'", 2, "loss", ""),
    M("submit train.py --metric 'loss=loss [0-9]+'", 2, "group", ""),
    M("submit train.py --profile nope", 2, "nope", "cloudtrain init"),
]
SCRIPTS = [
    M("submit tarin.py", 2, "tarin.py", "train.py"),
    M("submit .", 2, "folder", "\\.py"),
    M("submit pkg", 2, "folder", "pkg/main.py"),
    M("submit", 2, "script|entry_point", "cloudtrain submit"),
    M("plan nb.ipynb", 2, "nb.ipynb", "nbconvert --to script nb.ipynb"),
    M("plan a.yaml", 2, "a.yaml", "TOML|toml"),
    M("plan syntax.py", 2, "syntax.py.*2", ""),
    M("plan data.csv", 2, "data.csv", ""),
    M("plan -m pkg.nope", 2, "pkg.nope", ""),
    M("plan -m main", 2, "no module main", "--source-dir pkg -m main"),
    M("plan train.py -m pkg.main", 2, "two scripts", ""),
    M("plan typo.toml", 2, "max_runtme", "max_runtime"),
    M("plan type.toml", 2, "instance_count", ""),
    M("plan broken.toml", 2, "broken.toml", ""),
    M("plan broken.json", 2, "broken.json", ""),
    M("plan list.json", 2, "list.json", ""),
    M("plan nope.toml", 2, "nope.toml", ""),
    M("plan noscript.toml", 2, "entry_point|script", ""),
    M("plan region.toml", 2, "region", "setting"),
    M("plan provider.toml", 2, "provider", "setting"),
    M("plan store.toml", 2, "store", "setting"),
    M("plan 'my script ü.py'", 0, shows="my script"),
    M("plan train.py --requirements none.txt", 2, "none.txt", ""),
    M("plan train.py --dependency none", 2, "none", ""),
    M("plan train.py --source-dir none", 2, "none", ""),
    M("plan /etc/hostname.py", 2, "hostname.py", ""),
]
PLACES = [
    M("plan train.py --provider sagmaker", 2, "'sagmaker'", "sagemaker"),
    M("plan train.py --provider aws", 2, "'aws'", "sagemaker"),
    M("plan train.py --provider gcp", 2, "'gcp'", "vertex"),
    M("plan train.py --provider azure", 2, "'azure'", "azureml"),
    M("plan train.py --provider slurmx", 2, "'slurmx'", ""),
    M("plan train.py --store ftp://h/x", 2, "store.*ftp", ""),
    M(
        "plan train.py --store https://acct.blob.core.windows.net/runs/x",
        2,
        "store",
        "abfs://runs@acct.dfs.core.windows.net/x",
    ),
    M("plan train.py --store https://bucket.s3.eu-west-1.amazonaws.com/x", 2, "store", "s3://bucket/x"),
    M("plan train.py --store https://storage.googleapis.com/bucket/x", 2, "store", "gs://bucket/x"),
    M("plan train.py --store s3://", 2, "store", ""),
    M("plan train.py --store s3:/bucket/x", 2, "store: 's3:/bucket/x' names no bucket", "SCHEME://BUCKET/PATH"),
    M("plan spaces.toml", 2, "spaces: is not a field of a sweep", "did you mean 'space'"),
    M(f"plan train.py {KUBERNETES} --set spot=gcp", 2, "kubernetes.spot", "^hint: valid values: gke, "),
    M("plan train.py --provider sagemaker", 0, shows="role"),
    M("submit train.py --provider sagemaker", 2, "(?=.*region)(?=.*role)", r"(?s)\[sagemaker\].*role"),
    M("submit train.py --provider azureml", 2, "(?=.*subscription)(?=.*workspace)", r"(?s)\[azureml\].*workspace"),
    M("submit train.py --provider vertex", 2, "project", r"(?s)\[vertex\].*project"),
    M(f"plan train.py {SAGEMAKER} --instance-type p4d.24xlarge", 2, "p4d.24xlarge", "ml.p4d.24xlarge"),
    M(f"plan train.py {SAGEMAKER} --instance-type ml.g5.xlrage", 2, "ml.g5.xlrage", "ml.g5.xlarge"),
    M(f"plan train.py {SAGEMAKER} --set region=eu-wset-1", 2, "eu-wset-1", "eu-west-1"),
    M(f"plan train.py {SAGEMAKER} --set role=Train", 2, "role.*'Train'", "aws iam get-role"),
    M(f"plan train.py {SAGEMAKER} --gpu H10:8", 2, "H10", "H100"),
    M(f"plan train.py {SAGEMAKER} --gpu A100-80GB:16", 2, "16", "--nodes 2 --gpu A100-80GB:8"),
    M(f"plan idle.toml {SAGEMAKER} --gpu H100:8 --nodes 2", 0, shows="warning: 14 of 16 GPUs"),
    M(
        f"plan train.py {SAGEMAKER} --instance-type ml.g5.xlarge --env WANDB_API_KEY=abc1234567890",
        0,
        shows="warning: .*WANDB_API_KEY",
    ),
    M(f"plan train.py {SAGEMAKER} --instance-type ml.g5.xlarge --input x=gs://b/x", 0, shows="copied|through"),
    M(f"plan train.py {SAGEMAKER} --gpu H100:8 --instance-type ml.g5.xlarge", 2, "gpu|instance_type", ""),
    M(f"plan train.py {VERTEX} --gpu A100-80GB:16 --spot", 2, "16", "--nodes 2 --gpu A100-80GB:8"),
    M(f"plan train.py {VERTEX} --nodes 2 --gpu A100:8 --spot", 0, shows="16"),
    M(f"plan train.py {VERTEX} --instance-type n1-standrd-4", 2, "n1-standrd-4", "n1-standard-4"),
    M(f"plan train.py {VERTEX} --set location=europe-wset4", 2, "europe-wset4", "europe-west4"),
    M(f"plan train.py {AZUREML} --instance-type Standard_NC6_v33", 2, "Standard_NC6_v33", "Standard_NC"),
    M(f"plan train.py {AZUREML} --instance-type NC6s_v3", 2, "NC6s_v3", "Standard_NC"),
    M("submit train.py --gpu H100:8", 2, "H100", ""),
    M("submit train.py --spot", 2, "spot", ""),
    M("submit train.py --image repo/x:1", 2, "image", ""),
    M("submit train.py --provider docker --gpu H100:8 --image x:1", 2, "GPU|H100|gpu|engine", ""),
    M("plan train.py --provider docker", 2, "image: .*needs one", "--image pytorch/pytorch:"),
    M("doctor nope.toml", 2, "nope.toml", ""),
    M("doctor sagmaker", 2, "sagmaker", "sagemaker"),
    M("config nope", 2, "nope", ""),
    M("gpus H10", 2, "H10", "H100"),
    M("schema nope", 2, "nope", ""),
]
RUNS = [
    M("status nope", 2, "no run 'nope'|nope", "cloudtrain list"),
    M("status twon", 2, "twon", "twin"),
    M("wait nope", 2, "nope", ""),
    M("logs nope", 2, "nope", ""),
    M("logs twin --rank 9", 2, "no rank 9", ""),
    M("logs twin --node 7", 2, "no node 7", ""),
    M("logs twin --since soon", 2, "since.*'soon'", ""),
    M("logs twin -n -3", 2, "-3", ""),
    M("status twi", 0, shows="twin"),
    M("status s", 2, "'s'", "saved-1"),
    M("status last", 0, shows="run +"),
    M("status", 0, shows="run +"),
    M("status twin saved-1", 0, shows="saved-1"),
    M("cancel twin", 0, shows="succeeded"),
    M("cancel nope", 2, "nope", ""),
    M("pull twin train.py", 2, "train.py", ""),
    M("pull twin --what checkpoint", 2, "'checkpoint'", "checkpoints"),
    M("pull twin --what step=7", 2, "step=7", "checkpoints:step=7"),
    M("pull nope", 2, "nope", ""),
    M("report twin --out /nonexistent/x", 2, "/nonexistent", ""),
    M("report nope", 2, "nope", ""),
    M("status damaged", 8, "run.json", ""),
    M("submit train.py --run-id twin --hp steps=7", 2, "'twin'", ""),
    M(
        "submit train.py --run-id twin --detach",
        0,
        shows="note: this run was sent before and is over: succeeded",
    ),
    M("submit saves.py --resume-from twon", 2, "no run 'twon'", "twin"),
    M(
        "submit saves.py --resume-from twin",
        2,
        "twin.*no complete checkpoint",
        "cloudtrain pull twin, then name its folder in there",
    ),
    M("submit saves.py --resume-from ./nowhere", 2, "nowhere", ""),
    M("submit saves.py --resume-from ./pkg", 2, "pkg", ""),
    M("submit --plan job.toml", 2, "job.toml.*plan", ""),
    M("reconcile nope", 2, "nope", ""),
    M("gc --older-than soon", 2, "older_than.*'soon'", ""),
    M("list --state done", 2, "done", ""),
    M("list --since yesterday", 2, "yesterday", ""),
    M("submit leaves.py --run-id leaves", 1, shows="the data folder is empty"),
    M("submit exits3.py --run-id exits", 1, shows="code 3"),
    M("submit exits3.py --run-id exits-2 --pull train.py", 1, "train.py is a file", shows="cloudtrain pull exits-2"),
    M("submit imports.py --run-id imports", 1, shows="nowhere_to_be_found", hint="--requirements"),
    M("submit train.py --run-id argparse -- --stepz 3", 1, shows="unrecognized arguments: --stepz 3"),
]
TABLES = {"verbs": VERBS, "flags": FLAGS, "scripts": SCRIPTS, "places": PLACES, "runs": RUNS}
ROWS = [
    pytest.param(row, id=f"{name}-{row.argv[:60]}", marks=[pytest.mark.slow] if row.code == 1 else [])
    for name, rows in TABLES.items()
    for row in rows
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a user's folder with scripts, job files, and a store with two successful runs and a damaged one."""
    home = tmp_path_factory.mktemp("mistakes")
    for name, text in FILES.items():
        (home / name).parent.mkdir(exist_ok=True)
        (home / name).write_text(text, encoding="utf-8")
    before = Path.cwd()
    os.chdir(home)
    try:
        for run_id, script in (("twin", "train.py"), ("saved-1", "saves.py"), ("saved-2", "saves.py")):
            assert cli.main(["submit", script, "--run-id", run_id]) == 0
    finally:
        os.chdir(before)
    damaged = home / ".cloudtrain/runs/damaged"
    damaged.mkdir()
    (damaged / "run.json").write_text('{"protocol": 1')
    return home


def test_there_are_enough_of_them() -> None:
    argv = [row.argv for rows in TABLES.values() for row in rows]
    assert len(set(argv)) == len(argv) >= 127


@pytest.mark.slow
def test_an_input_whose_package_is_missing_is_refused_before_a_run_is_recorded(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert cli.main(["submit", "train.py", "--run-id", "lacks", "--input", "train=hf://datasets/org/name"]) == 2
    err = capsys.readouterr().err
    assert "error: inputs.train: hf:// needs huggingface_hub, which is not installed" in err
    assert "pip install huggingface_hub" in err
    assert not (folder / ".cloudtrain/runs/lacks").exists()


@pytest.mark.costly
def test_a_pull_names_the_other_run_whose_files_it_removes(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    for run_id, former in (("twin", ""), ("twin", ""), ("saved-1", "twin"), ("saved-1", "")):
        assert cli.main(["pull", run_id, str(tmp_path)]) == 0
        note = f"note: the unchanged files of an earlier pull from file://{folder}/.cloudtrain/runs/twin are gone"
        assert (note in capsys.readouterr().err) == bool(former)
    assert (tmp_path / "checkpoints/step-1/model").exists()
    assert cli.main(["pull", "twin", str(tmp_path)]) == 0
    assert not (tmp_path / "checkpoints").exists()


def test_a_pull_into_a_folder_with_the_id_of_another_run_says_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    for second, noted in (("saved-1", True), ("results", False), ("twin", False)):
        assert cli.main(["pull", "twin", second, "--what", "logs"]) == 0
        note = f"note: {second} is the folder here; for both runs: cloudtrain pull twin {second} --out DIR\n"
        assert (note in capsys.readouterr().err) == noted
        shutil.rmtree(second)


@pytest.mark.parametrize("argv", [["status", "none"], ["status"], ["list"], ["reconcile"]])
def test_a_folder_without_runs_names_the_profiles(
    argv: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("cloudtrain.toml").write_text('[profiles.aws]\nstore = "a"\n[profiles.google]\nstore = "b"\n')
    hint = "hint: for the store of a profile, add --profile aws or google\n"
    cli.main(argv)
    assert hint in capsys.readouterr().err
    cli.main([*argv, "--profile", "aws"])
    assert hint not in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["status", "twin"], ["status"], ["list"], ["logs", "twi"]])
def test_a_subfolder_names_the_store_of_the_folder_above(
    argv: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder / "pkg")
    code = cli.main(argv)
    assert code == (0 if argv == ["list"] else 2)
    assert "hint: a folder above has a store: add --store ../.cloudtrain\n" in capsys.readouterr().err
    assert cli.main([*argv, "--store", "../.cloudtrain"]) == 0
    assert cli.main(["cost", "--store", "../.cloudtrain"]) == 0
    assert "cloudtrain list --columns cost --store ../.cloudtrain\n" in capsys.readouterr().err


def test_a_full_disk_leaves_no_settings_file_of_init(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with small_disk(tmp_path / "small", "4k") as disk:
        (disk / "full").write_bytes(b"x" * 4096)
        monkeypatch.chdir(disk)
        assert cli.main(["init", "--provider", "local"]) == 8
        assert os.listdir() == ["full"]
        monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("secret", ["sk-live/1234=5678", "hf_abcdefgh12345678"])
@pytest.mark.parametrize(
    "argv",
    [
        "submit train.py --secret TOKEN={}",
        "submit train.py --secret TOKEN=env:{}",
        f"rehearse train.py {SAGEMAKER} --secret TOKEN={ARN} --secret-value TOKEN={{}}",
        f"rehearse train.py {SAGEMAKER} --secret TOKEN={ARN} --secret-value TOKEN=env:{{}}",
        f"rehearse train.py {SAGEMAKER} --secret TOKEN={ARN} --secret-value {{}}",
        f"rehearse train.py {SAGEMAKER} --secret TOKEN=env:{{}}",
        "submit train.py --secret 'a/{}'",
        "submit train.py --webhook-header '{}'",
        "submit train.py --webhook-header 'Authorization: Bearer {}=='",
        "submit train.py --secret TOKEN={} --epochs 3",
        "submit train.py --secret TOKEN={} extra",
        "submit train.py --secret TOKEN={} --dry-run",
        "train.py --secret TOKEN={}",
    ],
)
def test_a_secret_that_a_shell_has_put_in_is_not_shown(
    argv: str, secret: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.delenv("CLOUDTRAIN_DEBUG", raising=False)
    assert cli.main([*shlex.split(argv.format(secret)), "--run-id", "hidden", "--json"]) == 2
    out, err = capsys.readouterr()
    assert "error: " in err
    assert secret.partition("=")[0] not in out + err
    assert not (folder / ".cloudtrain/runs/hidden").exists()


@pytest.mark.parametrize("argv", ["list", "plan train.py", "schema job", "status twin", "--help", "submit train.py"])
@pytest.mark.slow
def test_a_closed_stdout_or_stderr_is_no_bug(argv: str, folder: Path) -> None:
    words = shlex.join([sys.executable, "-m", "cloudtrain", *shlex.split(argv)])
    for closed in (">&-", "2>&-", ">&- 2>&-"):
        done = subprocess.run(
            ["sh", "-c", f"{words} {closed}"], cwd=folder, capture_output=True, text=True, check=False
        )
        assert (done.returncode, "bug" in done.stderr) == (0, False), done.stderr


@pytest.mark.parametrize("row", ROWS)
def test_a_mistake_ends_with_one_line_that_helps(
    row: Mistake, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in os.environ if name.startswith(("CLOUDTRAIN_", "AWS_", "AZURE_", "GOOGLE_"))]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(folder)
    runs = folder / ".cloudtrain/runs"
    before = {item.name for item in runs.iterdir()}
    code = cli.main(shlex.split(row.argv))
    out, err = capsys.readouterr()
    lines = err.splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    hints = err[err.find("\nhint: ") + 1 :] if "\nhint: " in err else ""
    assert code == row.code, err[-2000:]
    assert "Traceback" not in out or row.code == 1, out
    assert "bug in cloudtrain" not in err
    assert re.search(row.shows, out + err), (out + err)[-3000:]
    if row.error or row.code == 2:
        assert len(errors) == 1, err
        assert re.search(row.error, errors[0]), err
        assert re.search(row.hint, hints), err
        assert row.hint == "" or hints.removeprefix("hint: ").strip() not in errors[0], err
        assert len(errors[0]) <= 400, err
    elif row.hint:
        assert re.search(row.hint, hints), err
    if row.code != 1:
        assert {item.name for item in runs.iterdir()} == before, "a refused command left a run behind"
