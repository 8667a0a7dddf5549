"""Files of an earlier start of a node: they return to its workspace, or a clear error is raised."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.errors import StorageError
from cloudtrain.provider_api.node import NodeEnvironment, SyncAgent, Topology
from cloudtrain.runtime.logs import LogWriter
from cloudtrain.runtime.outputs import Outputs
from cloudtrain.runtime.timings import TIMINGS
from cloudtrain.runtime.workspace import Workspace


@pytest.fixture
def space(tmp_path: Path) -> Workspace:
    return workspace(tmp_path)


def workspace(scratch: Path, **more: Any) -> Workspace:
    topology = Topology(nodes=1, node_rank=0, master_addr="127.0.0.1", master_port=5000)
    site = NodeEnvironment(topology=topology, paths={}, scratch=[str(scratch)], **more)
    made = Workspace(context={"run_id": "r"}, site=site, log=LogWriter(node=0), wait=print)
    made.artifacts.mkdir()
    return made


KEPT = "live/artifacts/node-0"


def put(path: Path, text: str = "x") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def here(space: Workspace) -> set[str]:
    return {p.relative_to(space.artifacts).as_posix() for p in space.artifacts.rglob("*") if p.is_file()}


def test_all_comes_back_but_what_a_cut_off_mirror_left(space: Workspace, tmp_path: Path) -> None:
    for name in ("model.pt", "sub/log.csv", ".model.pt.part", "sub/.log.csv.part", "sub/x.part", ".hidden"):
        put(tmp_path / KEPT / name)
    space.bring_back(tmp_path / "live")
    assert here(space) == {"model.pt", "sub/log.csv", "sub/x.part", ".hidden"}


def test_only_the_marks_of_the_nodes_own_agent_stay_behind(tmp_path: Path) -> None:
    marks = {"uploading": ".x-uploading", "uploaded": ".x-uploaded", "ignored": ".x-ignore"}
    names = {"model.pt", "model.git-ignore", "data.not-uploaded", "model.pt.x-uploaded", ".model.pt.part.x-ignore"}
    for name in names:
        put(tmp_path / KEPT / name)
    for agent, left in ((None, set()), (SyncAgent(**marks), {"model.pt.x-uploaded", ".model.pt.part.x-ignore"})):
        space = workspace(tmp_path, agent=agent)
        space.bring_back(tmp_path / "live")
        assert here(space) == names - left


def test_outputs_come_back_to_the_working_folder(tmp_path: Path) -> None:
    space = workspace(tmp_path)
    space.code.mkdir()
    (space.code / "train.py").write_text("shipped")
    put(tmp_path / "live/outputs/node-0/out/a.txt")
    put(tmp_path / "live/outputs/node-1/b.txt")
    space.bring_back(tmp_path / "live")
    assert not (space.code / "out").exists(), "this job keeps no outputs"
    space.outputs = Outputs(space.code, limit=100, skip=(), say=lambda line: None)
    space.bring_back(tmp_path / "live")
    assert {p.relative_to(space.code).as_posix() for p in space.code.rglob("*.*")} == {"train.py", "out/a.txt"}
    assert set(space.outputs.look(final=True)) == {"out/a.txt"}


def test_nothing_there_is_nothing_to_bring(space: Workspace, tmp_path: Path) -> None:
    space.bring_back(tmp_path / "none")
    assert here(space) == set()


def test_files_that_cannot_be_read_are_one_clear_error(space: Workspace, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / KEPT).mkdir(parents=True, exist_ok=True)
        (tmp_path / KEPT / name).symlink_to("/no/such/file")
    put(tmp_path / KEPT / "c")
    with pytest.raises(StorageError) as caught:
        space.bring_back(tmp_path / "live")
    text = str(caught.value)
    assert text.startswith("cannot bring back the artifact /no/such/file: ") or f"{tmp_path}/{KEPT}/" in text
    assert "No such file or directory" in text
    assert text.endswith(", and 1 more")
    assert "\n" not in text


def test_a_mount_that_fails_is_one_clear_error(
    space: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path / KEPT / "a")

    def stale(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(tmp_path / "live"))

    monkeypatch.setattr(shutil, "copytree", stale)
    with pytest.raises(StorageError, match=r"cannot bring back the artifacts from .*: Stale file handle"):
        space.bring_back(tmp_path / "live")


# -------------------------------------------------------------------------------------- folders of a platform's scripts


def known(tmp_path: Path, capfd: pytest.CaptureFixture[str], *, made: str = "") -> tuple[Path, Workspace, str]:
    """Return a platform's folder, the workspace that it should lead to, and the log lines."""
    folder = tmp_path / "opt" / "checkpoints"
    if made:
        put(folder / made)
    topology = Topology(nodes=1, node_rank=0, master_addr="127.0.0.1", master_port=5000)
    paths = {"code": str(tmp_path / "none")}
    site = NodeEnvironment(
        topology=topology, paths=paths, scratch=[str(tmp_path)], folders={str(folder): "checkpoints"}
    )
    log = LogWriter(node=0)
    log.begin("0.0", tmp_path / "logs")
    space = Workspace(context={"run_id": "r", "code_digest": "", "inputs": {}}, site=site, log=log, wait=print)
    with pytest.raises(StorageError):  # there is no code: only the steps before it count here
        space.fill()
    return folder, space, capfd.readouterr().out


@pytest.mark.parametrize("of", ["the code", "an input"])
@pytest.mark.parametrize("left", [False, True])
def test_a_mount_that_dies_while_the_workspace_is_filled_does_not_keep_the_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of: str, left: bool
) -> None:
    """The node leaves after a notice, and fails without one."""
    healed, mount = threading.Event(), tmp_path / "mount"
    mount.mkdir()

    def ask(real: Callable[..., Any], path: Any, *rest: Any, **more: Any) -> Any:
        if mount in (Path(path), Path(path).parent):
            healed.wait(20)
        return real(path, *rest, **more)

    def until(over: Callable[[], bool]) -> None:
        while not (left or over()):
            time.sleep(0.02)

    monkeypatch.setattr(TIMINGS, "mount", 0.5)
    monkeypatch.setattr(os, "scandir", partial(ask, os.scandir))
    monkeypatch.setattr(os.path, "exists", partial(ask, os.path.exists))
    monkeypatch.setattr("cloudtrain.runtime.workspace.unpack", partial(ask, lambda _, code, **more: code.mkdir()))
    topology = Topology(nodes=1, node_rank=0, master_addr="127.0.0.1", master_port=5000)
    paths = {"code": str((mount if of == "the code" else tmp_path) / "code.tar.gz"), "input.data": str(mount)}
    site = NodeEnvironment(topology=topology, paths=paths, scratch=[str(tmp_path)])
    context = {"run_id": "r", "code_digest": "", "inputs": {"data": {"file": None}}, "requirements": ""}
    space = Workspace(context={**context, "max_outputs": 0}, site=site, log=LogWriter(node=0), wait=until)
    try:
        with contextlib.nullcontext() if left else pytest.raises(StorageError, match=f"^{mount} has not answered"):
            space.fill()
    finally:
        healed.set()


@pytest.mark.parametrize("held", [False, True])
def test_pip_is_killed_when_the_node_leaves_and_not_waited_for_in_vain(
    space: Workspace, monkeypatch: pytest.MonkeyPatch, held: bool
) -> None:
    """A process that hangs in a mount outlives its SIGKILL."""
    monkeypatch.setattr(TIMINGS, "launcher", 0.2 if held else 10.0)
    kill, groups = os.killpg, list[int]()
    monkeypatch.setattr(os, "killpg", lambda group, number: groups.append(group) if held else kill(group, number))
    for name, text in (("pip.py", "import time; time.sleep(30)"), ("requirements.txt", "")):
        put(space.code / name, text)
    began = time.monotonic()
    space._install(space.code / "requirements.txt")  # `wait` returns at once, as after a notice
    assert time.monotonic() - began < 10
    for group in groups:
        kill(group, signal.SIGKILL)


def test_a_folder_that_scripts_know_leads_to_ours(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):  # a container's second start too
        folder, space, lines = known(tmp_path, capfd)
        put(folder / "step-1.pt")
        assert (space.checkpoints / "step-1.pt").read_text() == "x"
        assert lines == ""


def test_what_the_provider_notes_is_said_first(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    topology = Topology(nodes=1, node_rank=0, master_addr="127.0.0.1", master_port=5000)
    site = NodeEnvironment(
        topology=topology, paths={"code": str(tmp_path / "none")}, scratch=[str(tmp_path)], notes=["a note"]
    )
    log = LogWriter(node=0)
    log.begin("0.0", tmp_path / "logs")
    with pytest.raises(StorageError):
        Workspace(context={"run_id": "r", "code_digest": "", "inputs": {}}, site=site, log=log, wait=print).fill()
    assert capfd.readouterr().out == "[a0.0 n0 r- #1] cloudtrain: a note\n"


def test_a_folder_that_cannot_be_led_is_told_of(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder, space, lines = known(tmp_path, capfd, made="there/already")
    assert f"{folder} cannot lead to {space.checkpoints}" in lines
    assert (folder / "there" / "already").exists()


@pytest.mark.parametrize(
    ("pattern", "leads"),
    [
        ("outputs/checkpoint-*", False),
        ("./outputs/checkpoint-*", False),
        ("**/checkpoint-*", False),
        ("*/checkpoint-*", False),
        ("runs/outputs/checkpoint-*", True),
        ("checkpoint-*", True),
    ],
)
def test_checkpoints_are_no_artifacts_too(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], pattern: str, leads: bool
) -> None:
    """As an artifact, a torn checkpoint would overwrite the complete one that was restored."""
    topology = Topology(nodes=1, node_rank=0, master_addr="127.0.0.1", master_port=5000)
    site = NodeEnvironment(topology=topology, paths={}, scratch=[str(tmp_path)], folders={"outputs": "artifacts"})
    log = LogWriter(node=0)
    log.begin("0.0", tmp_path / "logs")
    space = Workspace(context={"run_id": "r", "checkpoint_paths": [pattern]}, site=site, log=log, wait=print)
    space.artifacts.mkdir()
    put(space.code / "train.py")
    space._lead_folders(below_code=True)
    put(space.code / "outputs" / "checkpoint-6" / "weights")
    assert (space.artifacts / "checkpoint-6").exists() is leads
    assert (f"checkpoint_paths has {pattern}" in capfd.readouterr().out) is not leads
