"""The scheduler of torchx: its own command sends, follows, lists and cancels runs of the provider local."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from built_wheel import environment_with

SCRIPT = """
import os, sys, time
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], *sys.argv[1:], os.environ["COLOUR"], flush=True)
while "--hold" in sys.argv and not os.path.exists(os.environ["CLOUDTRAIN_PREEMPT_FILE"]):
    time.sleep(0.1)
"""
JOBS = """
import json, sys
from torchx.components import dist, utils
from torchx.specs import named_resources
from cloudtrain.compat.torchx import job_of
from cloudtrain.errors import CloudtrainError

def said(app, provider="local", **cfg):
    try:
        return job_of(app, cfg, provider).to_dict()
    except CloudtrainError as exc:
        return [exc.field, str(exc), exc.hint]

two = dist.ddp(script="a.py", j="1x2"); two.roles *= 2
print(json.dumps({
    "script": said(dist.ddp("--lr", "0.1", "--id", "${app_id}", script="src/train.py", j="2x8", name="/digits",
                            env={"A": "b"}, max_retries=2, image="i:1", gpu=8, cpu=96), gpu="A100-80GB"),
    "module": said(dist.ddp(m="pkg.train", j="1x2"), job="base.toml"),
    "aws": said(dist.ddp(script="a.py", h="aws_p4d.24xlarge", j="2x8"), "sagemaker"),
    "aws elsewhere": said(dist.ddp(script="a.py", h="aws_p4d.24xlarge", j="2x8"), "vertex"),
    "typed": said(dist.ddp(script="a.py", gpu=1, j="1x1"), "vertex", gpu="T4", instance_type="n1-standard-8"),
    "kind alone": said(dist.ddp(script="a.py", j="2x8"), "vertex", gpu="A100-80GB"),
    "python": said(utils.python(m="pkg.tool", cpu=1, memMB=2048), "docker"),
    "command": said(utils.echo("hello")),
    "elastic": said(dist.ddp(script="a.py", j="1:2x2")),
    "mount": said(dist.ddp(script="a.py", j="1x2", mounts=["type=bind", "src=/a", "dst=/b"])),
    "macro": said(dist.ddp("${replica_id}", script="a.py", j="1x2")),
    "roles": said(two),
    "no job file": said(dist.ddp(script="a.py", j="1x2"), job="missing.toml"),
}))
"""
Call = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def home(built: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Mapping[str, str]]:
    """Return a folder with a script, and an environment with torchx and the wheel, whose entry points torchx reads."""
    folder = os.environ.get("TORCHX_FOLDER", "")
    if not folder:
        pytest.skip("no folder with torchx in TORCHX_FOLDER; make test sets it")
    base = tmp_path_factory.mktemp("torchx")
    environ = {**environment_with(base / "venv", built[1]), "PYTHONPATH": folder}
    (base / "home").mkdir()
    (base / "home/train.py").write_text(SCRIPT)
    return base / "home", environ


@pytest.fixture(scope="module")
def torchx(home: tuple[Path, Mapping[str, str]]) -> Call:
    def call(*words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        python = str(shutil.which("python", path=home[1]["PATH"]))
        start = [python, "-c", "from torchx.cli.main import main; main()"]
        done = subprocess.run([*start, *words], cwd=home[0], env=home[1], capture_output=True, text=True, check=False)
        assert done.returncode == code, done.stdout + done.stderr
        return done

    return call


def plain(text: str) -> str:
    return re.sub(r"\x1b\[\d+m", "", text)


@pytest.mark.slow
def test_torchx_sends_follows_and_lists_a_run(torchx: Call, home: tuple[Path, Mapping[str, str]]) -> None:
    options = ["--name", "digits", "--env", "COLOUR=blue", "--", "--lr", "0.1"]
    run = ["run", "-s", "cloudtrain", "--wait", "--log"]
    done = torchx(*run, "dist.ddp", "-j", "2x2", "--script", "train.py", *options)
    [handle] = re.findall(r"^(cloudtrain://torchx/\d{8}-\d{6}-digits-[0-9a-f]{4})$", done.stdout, re.MULTILINE)
    ranks = [f"train/{rank // 2} rank {rank} of 4 --lr 0.1 blue" for rank in range(4)]
    assert all(line in plain(done.stderr).splitlines() for line in ranks), done.stderr
    assert "SUCCEEDED" in torchx("status", handle).stdout
    log = plain(torchx("log", f"{handle}/train", "--regex", "^rank").stdout)
    assert sorted(log.splitlines()) == ranks
    listed = torchx("list", "-s", "cloudtrain").stdout
    assert re.search(rf"{handle}\s+SUCCEEDED", listed), listed
    own = subprocess.run(
        ["cloudtrain", "status", handle.rpartition("/")[2], "--json"],
        cwd=home[0], env=home[1], capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert json.loads(own.stdout)["state"] == "succeeded"


@pytest.mark.slow
def test_torchx_cancels_a_run(torchx: Call) -> None:
    words = ["dist.ddp", "-j", "1x1", "--script", "train.py", "--env", "COLOUR=red", "--", "--hold"]
    handle = torchx("run", "-s", "cloudtrain", *words).stdout.split()[-1]
    torchx("cancel", handle)
    torchx("cancel", handle)
    end = time.monotonic() + 60
    while "CANCELLED" not in (said := torchx("status", handle).stdout):
        assert time.monotonic() < end, said
        time.sleep(0.5)  # each look is a start of torchx
    torchx("status", "cloudtrain://torchx/no-such-run", code=1)


@pytest.mark.slow
def test_a_dry_run_shows_the_plan_and_sends_nothing(torchx: Call) -> None:
    before = torchx("list", "-s", "cloudtrain").stdout
    output = torchx("run", "-s", "cloudtrain", "--dryrun", "dist.ddp", "-j", "2x2", "--script", "train.py").stdout
    assert re.search(r"=== SCHEDULER REQUEST ===\nrun +\S+ on local\n", output), output
    assert torchx("list", "-s", "cloudtrain").stdout == before


@pytest.mark.slow
def test_torchx_keeps_its_own_schedulers(torchx: Call, home: tuple[Path, Mapping[str, str]]) -> None:
    """torchx 0.7 forgets them once any package names a scheduler, and uses the first one as its default."""
    python = str(shutil.which("python", path=home[1]["PATH"]))
    code = (
        "import torchx.schedulers as them;print(them.get_default_scheduler_name(), "
        "*{*them.DEFAULT_SCHEDULER_MODULES} ^ {*them.get_scheduler_factories()})"
    )
    done = subprocess.run([python, "-c", code], cwd=home[0], env=home[1], capture_output=True, text=True, check=True)
    assert done.stdout == "local_docker cloudtrain\n"
    output = torchx("run", "-s", "local_cwd", "--dryrun", "utils.echo", "--msg", "hello").stdout
    assert "hello" in output


@pytest.fixture(scope="module")
def jobs(home: tuple[Path, Mapping[str, str]]) -> dict[str, Any]:
    (home[0] / "base.toml").write_text('max_runtime = "2h"\n[inputs]\ntrain = "s3://b/d"\n[env]\nB = "c"\n')
    python = str(shutil.which("python", path=home[1]["PATH"]))
    done = subprocess.run([python, "-c", JOBS], cwd=home[0], env=home[1], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.slow
def test_a_role_becomes_a_job(jobs: dict[str, Any]) -> None:
    script = jobs["script"]
    assert script["source"] == {"entry_point": "src/train.py"}
    assert script["args"] == ["--lr", "0.1", "--id", "{run_id}"]
    assert script["resources"] == {"instance_count": 2, "nproc_per_node": 8, "gpu": ["A100-80GB:8"]}
    assert (script["name"], script["image"], script["retries"], script["env"]["A"]) == ("digits", "i:1", 2, "b")
    module = jobs["module"]
    assert (module["source"], module["max_runtime"]) == ({"path": ".", "entry_point": "-m pkg.train"}, 7200)
    assert module["inputs"] == {"train": {"url": "s3://b/d"}}
    assert module["env"]["B"] == "c"
    assert jobs["aws"]["resources"] == {"instance_count": 2, "nproc_per_node": 8, "instance_type": "ml.p4d.24xlarge"}
    assert jobs["typed"]["resources"]["gpu"] == ["T4:1"]
    assert jobs["typed"]["resources"]["instance_type"] == "n1-standard-8"
    assert (jobs["python"]["launcher"], jobs["python"]["source"]) == ("python", {"entry_point": "-m pkg.tool"})
    assert jobs["python"]["resources"] == {"cpus": 1, "memory_gb": 3}
    assert jobs["elastic"]["resources"] == {"instance_count": 2, "min_instance_count": 1, "nproc_per_node": 2}
    assert (jobs["command"]["launcher"], jobs["command"]["args"]) == ("command", ["echo", "hello"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "field", "hint"),
    [
        ("aws elsewhere", "gpu", "name it: -cfg gpu=A100-80GB"),
        ("kind alone", "gpu", "give the number to the component: --gpu 8"),
        ("mount", "mounts", "put inputs into a job file: -cfg job=job.toml"),
        ("macro", "args", "read torchrun's own variables, such as GROUP_RANK, in the script"),
        ("roles", "roles", ""),
        ("no job file", "job", ""),
    ],
)
def test_what_a_run_cannot_be_is_refused(name: str, field: str, hint: str, jobs: dict[str, Any]) -> None:
    assert (jobs[name][0], jobs[name][2]) == (field, hint)
