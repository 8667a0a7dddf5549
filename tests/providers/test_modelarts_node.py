"""Node half of provider ``modelarts``: topology, restarts, secrets, and Ascend up to the import of torch_npu."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from rows import for_each

import cloudtrain
from cloudtrain.errors import SpecError, StorageError
from cloudtrain.providers.modelarts import Provider
from cloudtrain.providers.modelarts.node import SECRETS, TIME_UP, sealed, secret
from cloudtrain.runtime.history import restart_of
from cloudtrain.store import runtime_zip
from cloudtrain.testing.tables import Place, Sample, plan_of

ROOT = Path(__file__).parents[2]
TWO = {"MA_NUM_HOSTS": "2", "VC_TASK_INDEX": "1", "VC_WORKER_HOSTS": "job-worker-0.job,job-worker-1.job"}
IMPORTED = "print('torch_npu is imported')"
NO_NPU = f"""
import types, torch
{IMPORTED}
torch.npu = types.SimpleNamespace(device_count=lambda: 0)
"""


def site(environ: Mapping[str, str], **paths: str) -> Any:
    return Provider.node_environment(environ, {"live": "/mnt/obs/b/live", **paths})


@for_each(
    ("environ", "found"),
    [
        ({"MA_NUM_HOSTS": "1"}, (1, 0, "127.0.0.1")),
        ({"VC_WORKER_NUM": "1", "VC_TASK_INDEX": "0", "VC_WORKER_HOSTS": "job-worker-0.job"}, (1, 0, "127.0.0.1")),
        (TWO, (2, 1, "job-worker-0.job")),
        ({**TWO, "VC_TASK_INDEX": "", "VK_TASK_INDEX": "0"}, (2, 0, "job-worker-0.job")),
    ],
)
def test_the_topology_is_volcano_s(environ: Mapping[str, str], found: tuple[int, int, str]) -> None:
    topology = site(environ).topology
    assert (topology.nodes, topology.node_rank, topology.master_addr) == found
    assert topology.master_port == 6060


@for_each("environ", [{}, {"MA_NUM_HOSTS": "2"}, {**TWO, "VC_WORKER_HOSTS": "one.job"}, {**TWO, "VC_TASK_INDEX": "2"}])
def test_a_node_without_its_number_is_refused(environ: Mapping[str, str]) -> None:
    with pytest.raises(SpecError) as caught:
        site(environ)
    assert caught.value.field in ("MA_NUM_HOSTS", "VC_WORKER_HOSTS")


@for_each(("schedule", "process", "least"), [("1", "1", 0), ("2", "1", 1), ("1", "3", 2), ("3", "2", 3), ("x", "", 0)])
def test_restarts_are_those_that_modelarts_counts(schedule: str, process: str, least: int) -> None:
    environ = {**TWO, "MA_SCHEDULE_CNT": schedule, "MA_PROC_START_CNT": process}
    assert site(environ).restart == least


def test_a_restart_has_a_number_that_no_earlier_one_has(tmp_path: Path) -> None:
    """Check this because a new container may count its own starts from 1 again."""
    assert restart_of(tmp_path, 0) == "0.0"
    assert restart_of(tmp_path, 0, least=1) == "0.1"
    assert restart_of(tmp_path, 0, least=4) == "0.4", "starts without a file count too"
    assert restart_of(tmp_path, 0, least=2) == "0.5"
    assert restart_of(tmp_path, 1, least=0) == "1.0"


def test_the_clock_is_that_of_node_0(tmp_path: Path) -> None:
    paths = {"limit": "0.000001", "clock": str(tmp_path / "used")}
    assert site(TWO, **paths).notices == ()
    (clock,) = site({**TWO, "VC_TASK_INDEX": "0"}, **paths).notices
    clock()
    time.sleep(0.01)
    assert clock() == "the time limit is used up"
    assert (tmp_path / "used").exists()
    assert site(TWO).exit_code["preempted"] != TIME_UP


def test_secrets_open_with_the_run_s_key_alone(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_bytes(os.urandom(32))
    values = {"TOKEN": "s3cret ünïcode", "OTHER": ""}
    text = sealed(values, key.read_bytes())
    assert "s3cret" not in text
    assert text != sealed(values, key.read_bytes()), "each use must have a number of its own"
    assert [secret(name, {SECRETS: text}, str(key)) for name in values] == list(values.values())
    (tmp_path / "other").write_bytes(os.urandom(32))
    changed = text[:-4] + ("AAAA" if text[-4:] != "AAAA" else "BBBB")
    for environ, file in (
        ({SECRETS: text}, "other"),
        ({SECRETS: changed}, "key"),
        ({}, "key"),
        ({SECRETS: text}, "none"),
    ):
        with pytest.raises(StorageError) as caught:
            secret("TOKEN", environ, str(tmp_path / file))
        assert "s3cret" not in str(caught.value)
    with pytest.raises(StorageError):
        secret("NONE", {SECRETS: text}, str(key))
    assert site(TWO).hidden_env == (SECRETS,)


# --------------------------------------------------------------------------------------------------------------- Ascend


def test_a_node_with_npus_imports_torch_npu_and_waits_longer() -> None:
    found = site({**TWO, "HCCL_WHITELIST_DISABLE": "1"}, device="npu").export_env
    assert found["CLOUDTRAIN_BACKEND_MODULES"].split()[0] == "torch_npu"
    assert found["HCCL_CONNECT_TIMEOUT"] == "1800"
    assert site({**TWO, "HCCL_CONNECT_TIMEOUT": "60"}, device="npu").export_env.keys() == {"CLOUDTRAIN_BACKEND_MODULES"}
    assert site(TWO).export_env == {}


def stub(folder: Path, text: str = IMPORTED) -> dict[str, str]:
    """Return an environment with a torch_npu. ``NO_NPU`` has no cards, and imports torch, which takes seconds."""
    (folder / "torch_npu/contrib").mkdir(parents=True)
    (folder / "torch_npu/__init__.py").write_text(text)
    (folder / "torch_npu/contrib/__init__.py").write_text("")
    (folder / "torch_npu/contrib/transfer_to_npu.py").write_text("print('transfer_to_npu is imported')\n")
    clean = {name: text for name, text in os.environ.items() if not name.startswith(("CLOUDTRAIN_", "RANK", "LOCAL_"))}
    return {**clean, "PYTHONPATH": str(folder)}


def rank(folder: Path, script: str, environ: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a rank's process, as torchrun starts it on a node with NPUs."""
    (folder / "cloudtrain.pyz").write_bytes(runtime_zip.build(Provider))
    (folder / "train.py").write_text(script)
    worker = Path(cloudtrain.__file__).parent / "runtime/worker.py"
    own = {**environ, **site(TWO, device="npu").export_env}
    own["CLOUDTRAIN_WORKER"] = f"{folder / 'nowhere'}\n{folder / 'cloudtrain.pyz'}"
    return subprocess.run(
        [sys.executable, str(worker), "train.py"], cwd=folder, env=own, capture_output=True, text=True, check=False
    )


@pytest.mark.slow
def test_a_rank_has_torch_npu_before_its_script(tmp_path: Path) -> None:
    own = "'torch_npu' in sys.modules, 'CLOUDTRAIN_BACKEND_MODULES' in os.environ"
    script = f"import os, sys\nprint('the script', {own})\n"
    done = rank(tmp_path, script, stub(tmp_path / "site"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "torch_npu is imported",
        "transfer_to_npu is imported",
        "the script True False",
    ]


@pytest.mark.costly
def test_an_image_without_torch_npu_fails_by_that_name(tmp_path: Path) -> None:
    environ = stub(tmp_path / "site")
    done = rank(tmp_path, "print('never')\n", {**environ, "PYTHONPATH": ""})
    assert done.returncode == 1
    assert "No module named 'torch_npu'" in done.stderr
    assert "never" not in done.stdout


@pytest.mark.slow
def test_an_example_takes_the_device_npu(tmp_path: Path) -> None:
    words = [sys.executable, str(ROOT / "examples/resnet_cifar10.py"), "--device", "npu", "--train", str(tmp_path)]
    done = subprocess.run(words, env=stub(tmp_path / "site", NO_NPU), capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["torch_npu is imported"]
    assert "holds no data_batch_*.bin" in done.stderr, "it must stop at its data, after the import"


def test_a_plan_for_ascend_needs_the_card_s_name_alone(tmp_path: Path) -> None:
    sample = Sample.of(Provider)
    flavors = {"Ascend-910B:8": "modelarts.bm.npu.arm.8snt9b3.d"}
    provider = Provider(**{**sample.settings, "flavors": flavors})
    place = Place(tmp_path / "place", store=sample.store, provider="modelarts", secret=sample.secret)
    plan = plan_of(provider, place, sample.job, {"gpu": ("Ascend-910B:8",), "instance_count": 2})
    body = plan.request.body
    assert body["spec"]["resource"] == {"node_count": 2, "flavor_id": "modelarts.bm.npu.arm.8snt9b3.d"}
    assert body["algorithm"]["command"].startswith("/bin/bash -c ")
    assert "device=npu" in body["algorithm"]["command"]
    assert plan.request.context["processes"] == 8
    assert any("torch_npu" in note for note in plan.notes)
    assert json.loads(json.dumps(body)) == body
