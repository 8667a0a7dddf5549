"""GPUs that PyTorch cannot use are named before a rank starts; an older driver gets CUDA's own libraries."""

from __future__ import annotations

import json
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.provider_api.node import NodeEnvironment, Topology
from cloudtrain.provider_api.protocol import Status
from cloudtrain.runs.outcome import verdict_of
from cloudtrain.runtime import gpus
from cloudtrain.runtime.cause import category, failure_line
from cloudtrain.runtime.launch import environment_of
from cloudtrain.runtime.logs import LogWriter
from cloudtrain.runtime.node import Node
from cloudtrain.runtime.timings import TIMINGS
from cloudtrain.runtime.workspace import Workspace

NVRM = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}  Tue Mar  5 22:23:56 UTC 2024\nGCC version: 12.3\n"
OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {}  Release Build  (builder@x)  Wed\nGCC version: 12\n"
TOO_OLD = "The NVIDIA driver on your system is too old (found version 12020). Please update your GPU driver."


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Prepare a node with two GPUs, driver 535.161.08 and compatibility libraries of 580.65.06."""
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "dev" / name).touch()
    (tmp_path / "version").write_text(NVRM.format("535.161.08"))
    (tmp_path / "compat").mkdir()
    (tmp_path / "compat" / "libcuda.so.580.65.06").touch()
    (tmp_path / "compat" / "libcuda.so.1").symlink_to("libcuda.so.580.65.06")
    monkeypatch.setattr(gpus, "DEVICES", tmp_path / "dev")
    monkeypatch.setattr(gpus, "VERSION", tmp_path / "version")
    return tmp_path


def torch(machine: Path, *, error: str = "", cuda: str = "'13.3'") -> dict[str, str]:
    """Return an environment in which ``import torch`` finds a PyTorch whose first kernel ends with ``error``."""
    lines = [
        "from types import SimpleNamespace as N",
        f"version = N(cuda={cuda})",
        "class Tensor:",
        "    def __add__(self, other): return self",
        "    def cpu(self): return self",
        "def zeros(size, device):",
        f"    if {error!r}: raise RuntimeError({error!r})",
        "    return Tensor()",
    ]
    (machine / "modules").mkdir(exist_ok=True)
    (machine / "modules" / "torch.py").write_text("\n".join(lines))
    return {"PYTHONPATH": str(machine / "modules")}


def patiently(over: Callable[[], bool]) -> None:
    while not over():
        time.sleep(0.01)


def trouble(
    machine: Path, environ: dict[str, str], *, say: Callable[[str], None] = print, needed: bool = True
) -> tuple[str, str] | None:
    return gpus.trouble(sys.executable, environ, folder=machine, say=say, wait=patiently, needed=needed)


def node_of(machine: Path, monkeypatch: pytest.MonkeyPatch, *, launcher: str, groups: str | None = None) -> Node:
    """Return the only node of a run, about to prepare its workspace."""
    monkeypatch.setattr(Workspace, "fill", lambda self: self._home.mkdir())
    monkeypatch.setattr(Node, "_agree_on_resume", lambda self: None)
    topology = Topology(nodes=1, node_rank=0, master_addr="127.0.0.1", master_port=5000)
    site = NodeEnvironment(topology=topology, paths={"live": str(machine)}, scratch=[str(machine)], groups_file=groups)
    context: dict[str, Any] = {"resume": None, "run_id": "r", "launcher": launcher, "env": {}}
    node = Node(context=context, site=site, attempt=0, key=b"k", inbox=queue.SimpleQueue())
    node._begin("0.0")
    return node


@pytest.mark.parametrize("text", [NVRM, OPEN])
@pytest.mark.parametrize("version", ["535.161.08", "470.57.02", "580.65"])
def test_the_version_of_the_driver(text: str, version: str, machine: Path) -> None:
    (machine / "version").write_text(text.format(version))
    assert gpus.driver_version() == version


def test_a_node_without_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "DEVICES", tmp_path / "none")
    monkeypatch.setattr(gpus, "VERSION", tmp_path / "none")
    assert (gpus.count(), gpus.driver_version()) == (0, "")


@pytest.mark.parametrize(
    ("driver", "used"), [("535.161.08", True), ("579.99.99", True), ("580.65.06", False), ("590.1", False)]
)
def test_an_older_driver_gets_the_compatibility_libraries(driver: str, used: bool, machine: Path) -> None:
    (machine / "version").write_text(NVRM.format(driver))
    compat = str(machine / "compat")
    found = gpus.compat_library_path(compat, {"LD_LIBRARY_PATH": "/opt/lib"})
    assert found == ({"LD_LIBRARY_PATH": f"{compat}:/opt/lib"} if used else {})
    assert gpus.compat_library_path(compat, {}) == ({"LD_LIBRARY_PATH": compat} if used else {})
    assert gpus.compat_library_path(str(machine / "none"), {}) == {}


def test_gpus_that_work_are_no_trouble(machine: Path) -> None:
    assert trouble(machine, torch(machine)) is None


@pytest.mark.parametrize(
    ("error", "cuda", "category", "says"),
    [
        (TOO_OLD, "'13.3'", "image", "is built for CUDA 13.3"),
        ("CUDA error: no kernel image is available for execution on the device\nmore", "'13.0'", "image", "CUDA 13.0"),
        ("Torch not compiled with CUDA enabled", "None", "image", "is built without CUDA"),
        ("CUDA error: forward compatibility was attempted on non supported HW", "'13.0'", "image", "CUDA 13.0"),
        ("CUDA error: CUDA driver version is insufficient for CUDA runtime version", "'13.0'", "image", "CUDA 13.0"),
        ("CUDA error: system not yet initialized", "'12.6'", "infra", "driver 535.161.08"),
        ("CUDA error: uncorrectable ECC error encountered", "'12.6'", "infra", "ECC"),
    ],
)
def test_gpus_that_pytorch_cannot_use(machine: Path, error: str, cuda: str, category: str, says: str) -> None:
    found = trouble(machine, torch(machine, error=error, cuda=cuda))
    assert found is not None
    assert found[1] == category
    assert says in found[0]
    assert error.splitlines()[0] in found[0]
    assert "driver 535.161.08" in found[0]
    assert "\n" not in found[0]


def test_a_pytorch_for_cpus_may_be_there_for_the_data(machine: Path) -> None:
    """A JAX script with ``launcher = "python"`` may have one. A driver that is too old is an error all the same."""
    messages: list[str] = []
    environ = torch(machine, error="Torch not compiled with CUDA enabled", cuda="None")
    assert trouble(machine, environ, say=messages.append, needed=False) is None
    assert "built without CUDA" in messages[0]
    environ = torch(machine, error=TOO_OLD)
    assert trouble(machine, environ, say=messages.append, needed=False) is not None


@pytest.mark.parametrize(
    "error",
    [
        "CUDA out of memory. Tried to allocate 2.00 MiB. GPU 0 has a total capacity of 79.11 GiB",
        "CUDA error: CUDA-capable device(s) is/are busy or unavailable\nmore",
        "CUDA unknown error - this may be due to an incorrectly set up environment",
        "No CUDA GPUs are available",
    ],
)
def test_an_error_that_the_ranks_need_not_meet_is_only_said(machine: Path, error: str) -> None:
    """GPUs may be shared or in exclusive use for now, and the job would still run."""
    messages: list[str] = []
    assert trouble(machine, torch(machine, error=error), say=messages.append) is None
    assert error.splitlines()[0] in messages[0]
    assert "the ranks start all the same" in messages[0]
    assert "\n" not in messages[0]


@pytest.mark.slow
@pytest.mark.parametrize("hidden", ["", "-1", "none", "NoDevFiles", "void"])
def test_a_job_that_hides_all_gpus_needs_none(machine: Path, hidden: str) -> None:
    broken = torch(machine, error="Torch not compiled with CUDA enabled", cuda="None")
    assert trouble(machine, {**broken, "CUDA_VISIBLE_DEVICES": hidden}) is None
    for shown in ("0", "1,0", "GPU-8932f937", "MIG-GPU-1/2/3"):
        assert trouble(machine, {**broken, "CUDA_VISIBLE_DEVICES": shown}) is not None


def test_a_check_that_no_signal_ends_is_left_behind(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver may hold the check in state D, where SIGKILL waits too."""
    slow = torch(machine)
    (machine / "modules" / "torch.py").write_text("import time\ntime.sleep(60)")
    killed: list[int] = []
    monkeypatch.setattr(gpus.os, "killpg", lambda pid, number: killed.append(pid))
    monkeypatch.setattr(subprocess.Popen, "kill", lambda process: killed.append(process.pid))
    monkeypatch.setattr(TIMINGS, "gpu_check", 0.5)
    messages: list[str] = []
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(trouble(machine, slow, say=messages.append)), daemon=True)
    thread.start()
    thread.join(20)
    monkeypatch.undo()
    gpus.os.kill(killed[0], signal.SIGKILL)
    assert found == [None]
    assert "within 0 s; the ranks start" in messages[0]


def test_a_node_hears_its_stop_signal_while_pytorch_begins(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch(machine)
    (machine / "modules" / "torch.py").write_text("import time\ntime.sleep(60)")
    monkeypatch.setenv("PYTHONPATH", str(machine / "modules"))
    node = node_of(machine, monkeypatch, launcher="torchrun")
    threading.Timer(
        1.0, node.inbox.put, [(-1, {"t": "signal", "number": signal.SIGTERM, "at": time.monotonic()})]
    ).start()
    began = time.monotonic()
    node._prepare_and_join()
    assert time.monotonic() - began < 30
    assert node.notice.since is not None
    assert node.failures == []


def test_what_tells_nothing_is_no_trouble(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = torch(machine, error=TOO_OLD)
    assert trouble(machine, {**broken, "CUDA_VISIBLE_DEVICES": ""}) is None
    (machine / "modules" / "torch.py").write_text("raise ImportError('libcudart.so.13')")
    assert trouble(machine, broken) is None
    (machine / "modules" / "torch.py").write_text("import time\ntime.sleep(60)")
    monkeypatch.setattr(TIMINGS, "gpu_check", 0.5)
    assert trouble(machine, broken) is None


@pytest.mark.parametrize(
    ("launcher", "groups", "failed"),
    [("torchrun", None, True), ("torchrun", "groups", False), ("command", None, False)],
)
def test_a_node_ends_before_its_ranks_start(
    machine: Path, monkeypatch: pytest.MonkeyPatch, launcher: str, groups: str | None, failed: bool
) -> None:
    """The category is image, which no attempt follows. Only a container's GPUs surely belong to the job."""
    monkeypatch.setenv("PYTHONPATH", torch(machine, error=TOO_OLD)["PYTHONPATH"])
    node = node_of(machine, monkeypatch, launcher=launcher, groups=groups)
    node._prepare_and_join()
    assert [category(failure) for failure in node.failures] == (["image"] if failed else [])
    assert node._over() == failed
    if failed:
        assert "too old" in failure_line(node.failures[0])
        node._record("failed", node.failures[0], decided=True)
        record = json.loads((machine / "exit" / "0.0-node-0.json").read_text())
        verdict = verdict_of(Status(state="failed", category="user_error", reason="exit code: 1"), [record])
        assert (verdict.category, verdict.exit_code) == ("image", 2)


@pytest.mark.parametrize("env", [{}, {"LD_LIBRARY_PATH": "/job/lib"}])
def test_the_ranks_get_the_compatibility_libraries_and_the_log_says_so(
    machine: Path, capfd: pytest.CaptureFixture[str], env: dict[str, str]
) -> None:
    topology = Topology(nodes=1, node_rank=0, master_addr="127.0.0.1", master_port=5000)
    site = NodeEnvironment(topology=topology, paths={}, scratch=[str(machine)], cuda_compat=str(machine / "compat"))
    log = LogWriter(node=0)
    log.begin("0.0", None)
    context = {"run_id": "r", "env": env, "launcher": "torchrun", "processes": 1, "debug_nccl": False}
    space = Workspace(context=context, site=site, log=log, wait=print)
    environ = environment_of(
        space.context, topology, base={}, export=space._site.export_env, own={}, secrets={}, values={"run_id": "r"},
        home=str(machine), dumps=machine, cpus=1,
    )  # fmt: skip
    assert environ["LD_LIBRARY_PATH"].split(":")[0] == str(machine / "compat")
    assert environ["LD_LIBRARY_PATH"].split(":")[1:] == list(env.values()) or not env
    assert "driver 535.161.08 is older than the image's CUDA" in capfd.readouterr().out
