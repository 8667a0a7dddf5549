"""A platform whose agent copies each node's folder to the store: when a checkpoint is there, and when nothing comes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.engine.sync import Sync, _Folder
from cloudtrain.errors import StorageError
from cloudtrain.provider import SyncAgent
from cloudtrain.runtime.checkpoints import Watch, complete, uncommitted
from cloudtrain.runtime.mirror import Mirror
from cloudtrain.runtime.uploads import DEAD_SECONDS, Uploads
from cloudtrain.values import is_mark

SCALE = 200.0
"""Seconds of a node's clock in one of ours."""
AGENT = {"uploading": ".sagemaker-uploading", "uploaded": ".sagemaker-uploaded", "ignored": ".sagemaker-ignore"}


class Fleet:
    """Nodes with a folder ``live`` each, an agent each, and a store that is a folder."""

    def __init__(self, tmp: Path, nodes: int = 2, *, keep: int = 0, attempt: str = "0.0", put: bool = True) -> None:
        self.tmp, self.store, self.keep = tmp, tmp / "store", keep
        self.said: list[tuple[float, str]] = []
        self.dead = False
        self.over = threading.Event()
        self.uploads, self.mirrors, self.syncs = [], [], []
        for node in range(nodes):
            root = tmp / f"{attempt}-n{node}"
            for folder in ("ck", "work", "artifacts", "live"):
                (root / folder).mkdir(parents=True)
            sync = Sync(
                _Folder(), str(self.store), root / "live", lag=lambda: 0.0, marks=".sagemaker", dead=lambda: self.dead
            )
            sync.restore()
            self.syncs.append(sync)
            agent = SyncAgent(**AGENT, put=self.put if put else None)
            uploads = Uploads(root / "live", agent, say=self.say, clock=lambda: time.monotonic() * SCALE)
            self.uploads.append(uploads)
            watch = Watch(folder=root / "ck", workdir=root / "work")
            self.mirrors.append(
                Mirror(
                    node=node, nodes=nodes, attempt=attempt, live=root / "live", watch=watch,
                    artifacts=root / "artifacts", metrics=root / "metrics.jsonl", links=root / "links",
                    send=self._sender(node), peers=lambda: set(range(nodes)), say=self.say, keep=keep, uploads=uploads,
                )
            )  # fmt: skip
        self.attempt = attempt
        for mirror in self.mirrors:
            mirror.start()
        threading.Thread(target=self._keep_in_step, daemon=True).start()

    def say(self, text: str) -> None:
        self.said.append((time.monotonic(), text))

    def put(self, name: str, path: Path, moved: Callable[[], None]) -> None:
        _Folder().send(str(self.store / name), path)

    def _sender(self, sender: int) -> Callable[[int, dict[str, Any]], None]:
        return lambda node, message: self.mirrors[node].take(sender, message)

    def _keep_in_step(self) -> None:
        while not self.over.wait(0.05):
            for sync in self.syncs:
                sync.step()

    def save(self, name: str) -> None:
        for node in range(len(self.mirrors)):
            path = self.tmp / f"{self.attempt}-n{node}" / "ck" / name / f"rank-{node}.pt"
            path.parent.mkdir(parents=True)
            path.write_text(f"{name} of {node}")

    def lines(self) -> list[str]:
        return [text for _, text in self.said]

    def stored(self) -> list[str]:
        """The complete checkpoints in the store."""
        return [item.name for item in complete(self.store / "checkpoints")]

    def local(self, node: int) -> Path:
        return self.tmp / f"{self.attempt}-n{node}" / "live"

    def stop(self) -> None:
        self.over.set()
        for mirror in self.mirrors:
            mirror.stop()
        for uploads in self.uploads:
            uploads.stop()


@pytest.fixture
def fleets(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Fleet]]:
    monkeypatch.setattr("cloudtrain.runtime.uploads.LOOK_SECONDS", 0.05)
    made: list[Fleet] = []
    yield made
    for fleet in made:
        fleet.stop()


@pytest.fixture
def fleet(tmp_path: Path, fleets: list[Fleet]) -> Callable[..., Fleet]:
    def make(**more: Any) -> Fleet:
        fleets.append(Fleet(tmp_path, **more))
        return fleets[-1]

    return make


def until(what: Callable[[], Any], seconds: float = 30) -> float:
    """Wait for it; when it was so."""
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end
        time.sleep(0.02)
    return time.monotonic()


def test_a_checkpoint_counts_once_all_nodes_files_are_in_the_store(fleet: Callable[..., Fleet]) -> None:
    run = fleet(keep=1)
    run.save("step-1")
    until(lambda: any("checkpoint step-1 has left all nodes" in text for text in run.lines()))
    assert run.stored() == ["step-1"]
    run.save("step-2")
    until(lambda: run.stored() == ["step-2"])
    assert sum("has left all nodes" in text for text in run.lines()) == 1  # once is enough
    assert not any("stopped" in text for text in run.lines())


def test_an_older_checkpoint_stays_until_the_newer_one_is_in_the_store(fleet: Callable[..., Fleet]) -> None:
    """Else a machine that goes in between leaves a store with none."""
    run = fleet(keep=1, put=False)
    run.save("step-1")
    until(lambda: "has left" in "".join(run.lines()))
    run.dead = True
    run.save("step-2")
    until(lambda: len(complete(run.local(0) / "checkpoints")) == 0 and (run.local(0) / "checkpoints/step-2").is_dir())
    until(lambda: list((run.local(0) / "checkpoints/step-2").glob("*/commit.json")))
    assert list((run.local(0) / "checkpoints/step-1").glob("*/commit.json"))
    assert run.stored() == ["step-1"]
    run.dead = False
    until(lambda: run.stored() == ["step-2"])


def test_a_node_that_ends_waits_for_the_agent(fleet: Callable[..., Fleet]) -> None:
    run = fleet()
    run.dead = True
    run.save("step-1")
    for mirror in run.mirrors:
        mirror.finish(clean=True)
    until(lambda: list(run.local(0).glob("checkpoints/*/*/commit.json")))
    time.sleep(0.3)
    assert not any(mirror.idle.is_set() for mirror in run.mirrors)
    run.dead = False
    until(lambda: all(mirror.idle.is_set() for mirror in run.mirrors))
    assert run.stored() == ["step-1"]


def test_a_dead_sync_is_named_within_5_minutes_and_the_checkpoint_is_in_the_store_anyway(
    fleet: Callable[..., Fleet],
) -> None:
    run = fleet()
    run.dead = True
    run.save("step-1")
    committed = until(lambda: list(run.local(0).glob("checkpoints/*/*/commit.json")))
    until(lambda: run.stored() == ["step-1"])
    named = next(at for at, text in run.said if text.startswith("the platform's sync has stopped"))
    assert DEAD_SECONDS - 10 <= (named - committed) * SCALE <= 300
    run.save("step-2")  # at once: nobody waits another four minutes
    assert (until(lambda: "step-2" in run.stored()) - committed) * SCALE < 4000
    (run.local(1) / "logs").mkdir()
    (run.local(1) / "logs" / "1.log").write_text("a line")
    for uploads in run.uploads:
        uploads.finish(10)
    assert (run.store / "logs" / "1.log").read_text() == "a line"
    assert not any(is_mark(path.name) for path in run.store.rglob("*"))


def test_a_sync_that_comes_back_is_left_to_its_work(fleet: Callable[..., Fleet]) -> None:
    run = fleet(nodes=1)
    run.dead = True
    run.save("step-1")
    until(lambda: run.uploads[0].dead)
    run.dead = False
    run.uploads[0]._agent = SyncAgent(**AGENT)  # its own way is gone: what comes now, the agent brings
    run.save("step-2")
    until(lambda: "step-2" in run.stored())


def test_a_node_without_a_way_to_the_store_says_so_and_goes_on(fleet: Callable[..., Fleet]) -> None:
    run = fleet(put=False)
    run.dead = True
    run.save("step-1")
    for mirror in run.mirrors:
        mirror.finish(clean=True)
    until(lambda: all(mirror.idle.is_set() for mirror in run.mirrors))
    assert "nothing else can upload them from here" in "".join(run.lines())


def test_an_upload_that_is_refused_is_said_once(fleet: Callable[..., Fleet], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Fleet, name: str, path: Path, moved: Callable[[], None]) -> None:
        raise StorageError("S3 refused PUT (AccessDenied)")

    monkeypatch.setattr(Fleet, "put", refuse)
    run = fleet(nodes=1)
    run.dead = True
    run.save("step-1")
    run.mirrors[0].finish(clean=True)
    until(run.mirrors[0].idle.is_set)
    assert sum("AccessDenied" in text for text in run.lines()) == 1


def test_a_large_file_that_is_on_its_way_has_more_time(tmp_path: Path) -> None:
    now, said = [0.0], list[str]()
    uploads = Uploads(tmp_path, SyncAgent(**AGENT, put=lambda *_: None), say=said.append, clock=lambda: now[0])
    large = tmp_path / "large.pt"
    with open(large, "wb") as stream:
        stream.truncate(10_000_000_000)
    uploads.expect("a", [large])
    (tmp_path / "large.pt.sagemaker-uploading").touch()
    now[0] = DEAD_SECONDS + 400
    uploads.step()
    assert not uploads.dead
    now[0] += 200
    uploads.step()
    assert uploads.dead
    assert uploads.arrived() == ["a"]


def test_restored_parts_of_other_nodes_go_with_their_checkpoint(fleet: Callable[..., Fleet], tmp_path: Path) -> None:
    """Each node restores all of it. What the run drops goes from every disk, and from the store; nothing else does."""
    first = fleet()
    first.save("step-1")
    until(lambda: first.stored() == ["step-1"] and "has left" in "".join(first.lines()))
    first.stop()
    again = fleet(keep=1, attempt="0.1")
    assert (again.local(0) / "checkpoints/step-1/0.0-1/node-1").is_dir()
    again.save("step-2")
    until(lambda: again.stored() == ["step-2"])
    until(lambda: all(not (again.local(node) / "checkpoints/step-1").exists() for node in range(2)))
    until(lambda: [path.name for path in (again.store / "checkpoints").iterdir()] == ["step-2"])


def test_temporary_files_and_marks_never_reach_the_store(fleet: Callable[..., Fleet]) -> None:
    run = fleet(nodes=1)
    seen = set[str]()
    send = run.syncs[0].store.send
    run.syncs[0].store.send = lambda url, path: (seen.add(path.name), send(url, path))[1]  # type: ignore[method-assign]
    (run.tmp / "0.0-n0" / "artifacts" / "model.bin").write_text("x" * 1000)
    run.save("step-1")
    until(lambda: {"model.bin", "rank-0.pt", "commit.json"} <= seen)
    assert not [name for name in seen if name.endswith(".part") or is_mark(name)]


def test_marks_that_were_restored_are_no_checkpoint(tmp_path: Path) -> None:
    part = tmp_path / "step-1" / "0.0-1" / "node-0"
    part.mkdir(parents=True)
    (part / "model.pt.sagemaker-uploaded").touch()
    assert uncommitted(tmp_path) == []
    (part / "model.pt").write_text("x")
    assert uncommitted(tmp_path) == [part.parent]
