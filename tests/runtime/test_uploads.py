"""A platform whose agent copies each node's folder to the store: when a checkpoint is stored, and when nothing
arrives."""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from disks import faulty_disk

from cloudtrain.engine.node_folders import LocalObjects, Sync
from cloudtrain.errors import DigestError, StorageError
from cloudtrain.provider_api.node import NodeEnvironment, SyncAgent, Topology
from cloudtrain.runtime.archive import Archive
from cloudtrain.runtime.checkpoints import Watch, complete, uncommitted, write_whole
from cloudtrain.runtime.commits import Commits
from cloudtrain.runtime.history import Start
from cloudtrain.runtime.logs import LogWriter
from cloudtrain.runtime.mirror import Mirror
from cloudtrain.runtime.record import write_record
from cloudtrain.runtime.resume import Resume
from cloudtrain.runtime.timings import TIMINGS
from cloudtrain.runtime.uploads import Uploads
from cloudtrain.runtime.workspace import Workspace

pytestmark = pytest.mark.slow

SCALE = 200.0
"""Seconds of a node's clock in one of ours."""
AGENT = {"uploading": ".sagemaker-uploading", "uploaded": ".sagemaker-uploaded", "ignored": ".sagemaker-ignore"}
MARKS = tuple(AGENT.values())


class FolderObjects:
    """A run's folder in the store, which is a folder. ``refuse`` names a method that the store refuses."""

    def __init__(self, root: Path) -> None:
        self.root, self.refuse = root, ""
        self.calls: list[str] = []

    def _path(self, method: str, key: str) -> Path:
        self.calls.append(f"{method} {key}")
        if method == self.refuse:
            raise StorageError(f"refused: {method}")
        assert ".." not in key
        path = self.root / key
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def copy(self, key: str, target: str, size: int) -> None:
        path = self._path("copy", target)
        assert (self.root / key).stat().st_size == size
        shutil.copyfile(self.root / key, path)

    def read(self, key: str, path: Path) -> None:
        try:
            shutil.copyfile(self._path("read", key), path)
        except FileNotFoundError:
            raise DigestError(f"there is no {key}") from None

    def write(self, key: str, data: bytes) -> None:
        self._path("write", key).write_bytes(data)

    def remove(self, key: str) -> None:
        self._path("remove", key).unlink(missing_ok=True)


class Fleet:
    """Nodes with a folder ``live`` each, an agent each, and a store that is a folder."""

    def __init__(
        self,
        tmp: Path,
        nodes: int = 2,
        *,
        keep: int = 0,
        attempt: str = "0.0",
        put: bool = True,
        objects: FolderObjects | None = None,
        damaged: Sequence[Path] = (),
    ) -> None:
        self.tmp, self.store, self.keep = tmp, tmp / "run" / "live", keep
        self.said: list[tuple[float, str]] = []
        self.dead = False
        self.over = threading.Event()
        self.uploads, self.mirrors, self.syncs = [], [], []
        for node in range(nodes):
            root = tmp / f"{attempt}-n{node}"
            for folder in ("ck", "work", "artifacts", "live"):
                (root / folder).mkdir(parents=True)
            sync = Sync(LocalObjects(), str(self.store), root / "live", lag=0.0, marks=".sagemaker")
            sync.restore()
            self.syncs.append(sync)
            agent = SyncAgent(**AGENT, put=self.put if put else None)
            uploads = Uploads(root / "live", agent, say=self.say, clock=lambda: time.monotonic() * SCALE)
            self.uploads.append(uploads)
            watch = Watch(folder=root / "ck", workdir=root / "work")
            commits = partial(
                Commits,
                nodes=nodes,
                attempt=attempt,
                live=root / "live",
                keep=keep,
                damaged=damaged,
                send=self._sender(node),
                peers=lambda: set(range(nodes)),
                say=self.say,
                temporary=agent.temporary,
                marks=agent.marks,
                archive=Archive(root / "live", objects, temporary=agent.temporary) if objects else None,
            )
            self.mirrors.append(
                Mirror(
                    node=node, attempt=attempt, live=root / "live", watch=watch,
                    artifacts=root / "artifacts", metrics=root / "metrics.jsonl", links=root / "links",
                    send=self._sender(node), peers=lambda: set(range(nodes)), say=self.say, uploads=uploads,
                    commits=None if node else commits,
                )
            )  # fmt: skip
        self.attempt = attempt
        for mirror in self.mirrors:
            mirror.start()
        threading.Thread(target=self._keep_in_step, daemon=True).start()

    def say(self, text: str) -> None:
        self.said.append((time.monotonic(), text))

    def put(self, name: str, path: Path, moved: Callable[[], None]) -> None:
        LocalObjects().send(str(self.store / name), path)

    def _sender(self, sender: int) -> Callable[[int, dict[str, Any]], None]:
        return lambda node, message: self.mirrors[node].take(sender, message)

    def _keep_in_step(self) -> None:
        while not self.over.wait(0.05):
            for sync in () if self.dead else self.syncs:
                sync.step()

    def save(self, name: str) -> None:
        for node in range(len(self.mirrors)):
            path = self.tmp / f"{self.attempt}-n{node}" / "ck" / name / f"rank-{node}.pt"
            path.parent.mkdir(parents=True)
            path.write_text(f"{name} of {node}")

    def lines(self) -> list[str]:
        return [text for _, text in self.said]

    def stored(self) -> list[str]:
        """Return the complete checkpoints in the store."""
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
    monkeypatch.setattr(TIMINGS, "agent_look", 0.05)
    monkeypatch.setattr(TIMINGS, "scan", 0.05)
    monkeypatch.setattr(TIMINGS, "first_holder", 0.8)
    monkeypatch.setattr(TIMINGS, "quiet", 0.3)
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
    until(lambda: any("checkpoint step-1 is in the store" in text for text in run.lines()))
    assert run.stored() == ["step-1"]
    run.save("step-2")
    until(lambda: run.stored() == ["step-2"])
    assert sum("is in the store" in text for text in run.lines()) == 1  # once is enough
    assert not any("stopped" in text for text in run.lines())


def test_an_older_checkpoint_stays_until_the_newer_one_is_in_the_store(fleet: Callable[..., Fleet]) -> None:
    """Otherwise a machine that dies in between leaves a store without any."""
    run = fleet(keep=1, put=False)
    run.save("step-1")
    until(lambda: "is in the store" in "".join(run.lines()))
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
    assert TIMINGS.agent_dead - 10 <= (named - committed) * SCALE <= 300
    run.save("step-2")  # at once: no node waits another four minutes
    assert (until(lambda: "step-2" in run.stored()) - committed) * SCALE < 4000
    (run.local(1) / "logs").mkdir()
    (run.local(1) / "logs" / "1.log").write_text("a line")
    for uploads in run.uploads:
        uploads.finish(10)
    assert (run.store / "logs" / "1.log").read_text() == "a line"
    assert not any(path.name.endswith(MARKS) for path in run.store.rglob("*"))


def test_a_sync_that_comes_back_is_left_to_its_work(fleet: Callable[..., Fleet]) -> None:
    run = fleet(nodes=1)
    run.dead = True
    run.save("step-1")
    until(lambda: run.uploads[0].dead)
    run.dead = False
    run.uploads[0].agent = SyncAgent(**AGENT)  # its own upload has failed: only the agent brings files now
    run.save("step-2")
    until(lambda: "step-2" in run.stored())


def refuse(self: Fleet, name: str, path: Path, moved: Callable[[], None]) -> None:
    raise StorageError("S3 refused PUT (AccessDenied)")


def test_a_node_without_a_way_to_the_store_gives_up_and_claims_nothing(fleet: Callable[..., Fleet]) -> None:
    """It once counted the checkpoint as stored, logged that, and removed the older one."""
    run = fleet(put=False, keep=1)
    run.save("step-1")
    until(lambda: run.stored() == ["step-1"] and "is in the store" in "".join(run.lines()))
    run.dead = True
    run.save("step-2")
    for mirror in run.mirrors:
        mirror.finish(clean=True)
    until(lambda: all(mirror.idle.is_set() for mirror in run.mirrors))
    assert "nothing else can upload them from here" in "".join(run.lines())
    assert run.uploads[0].given_up == ["step-2/0.0-2"]
    assert not run.uploads[0].blind, "it found marks"
    assert sum("is in the store" in text for text in run.lines()) == 1
    assert "not known to be in the store: checkpoint step-2/0.0-2" in run.lines()
    assert run.stored() == ["step-1"]
    assert [item.name for item in complete(run.local(0) / "checkpoints")] == []
    assert (run.local(0) / "checkpoints/step-1/0.0-1/commit.json").exists()


def test_a_node_that_never_saw_a_mark_and_cannot_upload_is_blind(fleet: Callable[..., Fleet]) -> None:
    run = fleet(put=False, nodes=1)
    run.dead = True
    run.save("step-1")
    run.mirrors[0].finish(clean=True)
    until(run.mirrors[0].idle.is_set)
    assert run.uploads[0].blind
    assert run.uploads[0].given_up


def test_an_upload_that_is_refused_is_said_once_and_never_counts(
    fleet: Callable[..., Fleet], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Fleet, "put", refuse)
    run = fleet(nodes=1)
    run.dead = True
    run.save("step-1")
    run.mirrors[0].finish(clean=True)
    until(run.mirrors[0].idle.is_set)
    assert sum("AccessDenied" in text for text in run.lines()) == 1
    assert run.uploads[0].given_up == ["step-1/0.0-1"]
    assert not run.uploads[0].blind
    assert not any("is in the store" in text for text in run.lines())


def test_an_older_checkpoint_stays_while_uploads_are_refused(
    fleet: Callable[..., Fleet], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = fleet(nodes=1, keep=1)
    run.save("step-1")
    until(lambda: "is in the store" in "".join(run.lines()))
    agent = run.uploads[0].agent
    run.uploads[0].agent = SyncAgent(**AGENT, put=lambda name, path, moved: refuse(run, name, path, moved))
    run.dead = True
    run.save("step-2")
    until(lambda: "AccessDenied" in "".join(run.lines()))
    time.sleep(0.5)
    assert (run.local(0) / "checkpoints/step-1/0.0-1/commit.json").exists()
    assert run.stored() == ["step-1"]
    run.uploads[0].agent = agent  # the next try succeeds
    until(lambda: "step-2" in run.stored())
    until(lambda: not (run.local(0) / "checkpoints/step-1").exists())


def test_a_node_in_a_hurry_does_not_wait_for_the_agent(tmp_path: Path) -> None:
    """The grace after a notice is too short to find out that an agent has stopped."""
    put: list[str] = []
    uploads = Uploads(tmp_path, SyncAgent(**AGENT, put=lambda name, *_: put.append(name)), say=print)
    for name in ("a", "b"):
        (tmp_path / name).write_text(name)
        uploads.expect(name, [tmp_path / name])
    uploads.step()
    assert not put
    uploads.hurry()
    uploads.step()
    assert sorted(put) == ["a", "b"]
    assert uploads.arrived() == {"a": True, "b": True}
    assert not uploads.dead


def test_a_newer_checkpoint_goes_before_the_rest_of_an_older_one(tmp_path: Path) -> None:
    order: list[str] = []
    new = tmp_path / "new"
    new.write_text("x")

    def put(name: str, path: Path, moved: Callable[[], None]) -> None:
        order.append(name)
        time.sleep(0.01)  # else one thread may do all of the work while another one waits for Python's lock
        uploads.expect("newer", [new])

    uploads = Uploads(tmp_path, SyncAgent(**AGENT, put=put), say=print)
    old = [tmp_path / f"old-{number:02}" for number in range(20)]
    for path in old:
        path.write_text("x")
    uploads.expect("older", old)
    uploads.hurry()
    uploads.step()
    uploads.step()
    assert order.index("new") <= 8
    assert len(order) == 21


def test_a_sweep_of_large_files_does_not_hold_up_a_checkpoint(tmp_path: Path) -> None:
    now, go, put = [0.0], threading.Event(), list[str]()

    def send(name: str, path: Path, moved: Callable[[], None]) -> None:
        if name.startswith("artifact"):
            go.wait(20)
        put.append(name)

    uploads = Uploads(tmp_path, SyncAgent(**AGENT, put=send), say=print, clock=lambda: now[0])
    time.sleep(0.05)  # a file's time may be a little early
    for number in range(20):  # the last one has a name that the script chose, like any other
        (tmp_path / f"artifact-{number}{'.part' if number == 19 else ''}").write_text("large")
    uploads.dead = True
    now[0] = 100.0
    began = time.monotonic()
    uploads.step()
    (tmp_path / "saved").write_text("a checkpoint")
    uploads.expect("saved", [tmp_path / "saved"])
    uploads.agent = SyncAgent(**AGENT, put=send)
    uploads.step()
    assert put == ["saved"]
    assert uploads.arrived() == {"saved": True}
    assert time.monotonic() - began < 10
    uploads.expect("next", [tmp_path / "next"])
    (tmp_path / "next").write_text("pending")
    go.set()
    assert uploads._sweeper is not None
    uploads._sweeper.join(20)
    assert len([name for name in put if name.startswith("artifact")]) <= 4, "the rest waits for the checkpoint"
    uploads.finish(20)
    assert len([name for name in put if name.startswith("artifact")]) == 20


def test_a_large_file_that_is_on_its_way_has_more_time(tmp_path: Path) -> None:
    now, said = [0.0], list[str]()
    uploads = Uploads(tmp_path, SyncAgent(**AGENT, put=lambda *_: None), say=said.append, clock=lambda: now[0])
    large = tmp_path / "large.pt"
    with open(large, "wb") as stream:
        stream.truncate(10_000_000_000)
    uploads.expect("a", [large])
    (tmp_path / "large.pt.sagemaker-uploading").touch()
    now[0] = TIMINGS.agent_dead + 400
    uploads.step()
    assert not uploads.dead
    now[0] += 200
    uploads.step()
    assert uploads.dead
    assert uploads.arrived() == {"a": True}


def test_restored_parts_of_other_nodes_go_with_their_checkpoint(fleet: Callable[..., Fleet], tmp_path: Path) -> None:
    """Each node restores the whole checkpoint. A checkpoint that the run drops leaves every disk and the store; nothing
    else does."""
    first = fleet()
    first.save("step-1")
    until(lambda: first.stored() == ["step-1"] and "is in the store" in "".join(first.lines()))
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
    assert not [name for name in seen if name.endswith(".part") or name.endswith(MARKS)]


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the names of the files that are written from here on, instead of copying."""
    names: list[str] = []
    for method in ("write_bytes", "write_text"):
        whole = getattr(Path, method)

        def write(path: Path, *data: Any, whole: Any = whole, **more: Any) -> int:
            names.append(path.name)
            return int(whole(path, *data, **more))

        monkeypatch.setattr(Path, method, write)
    return names


def test_the_agent_sees_no_half_of_a_commit_or_a_pointer(fleet: Callable[..., Fleet], writes: list[str]) -> None:
    run = fleet(nodes=1)
    run.save("step-1")
    until(lambda: run.stored() == ["step-1"])
    (run.tmp / "0.0-n0" / "ck" / "best").write_text("step-1")
    until(lambda: (run.store / "pointers/node-0.json").exists())
    ours = [name for name in writes if name not in ("rank-0.pt", "best")]
    assert sorted(ours) == [".commit.json.part.sagemaker-ignore", ".node-0.json.part.sagemaker-ignore"]


def test_the_agent_sees_no_half_of_a_log_segment_or_a_record(tmp_path: Path, writes: list[str]) -> None:
    log = LogWriter(node=0, out=os.open(os.devnull, os.O_WRONLY))
    log.begin("0.0", tmp_path / "logs", temporary=".part.x-ignore")
    log.say("hello")
    log.flush()
    Start(tmp_path, "0.0", started=5.0, temporary=".part.x-ignore").begin(resumed="", saved=None)
    write_record(tmp_path, "0.0-node-0", {}, temporary=".part.x-ignore")
    ours = [".000000001.log.part.x-ignore", ".0.0.json.part.x-ignore", ".0.0-node-0.json.part.x-ignore"]
    assert writes == ours
    assert sorted(path.name for path in tmp_path.rglob("*.*")) == ["0.0-node-0.json", "0.0.json", "000000001.log"]


def test_where_a_folder_cannot_rename_files_are_written_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_rename(*names: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("cloudtrain.runtime.checkpoints.os.replace", no_rename)
    write_whole(tmp_path / "new" / "commit.json", b"{}", temporary=".part.x-ignore")
    assert [(path.name, path.read_bytes()) for path in (tmp_path / "new").iterdir()] == [("commit.json", b"{}")]
    write_record(tmp_path, "0.0-node-0", {"outcome": "failed"})
    assert [path.name for path in (tmp_path / "exit").iterdir()] == ["0.0-node-0.json"]
    assert json.loads((tmp_path / "exit/0.0-node-0.json").read_bytes())["outcome"] == "failed"


def test_marks_that_were_restored_are_no_checkpoint(tmp_path: Path) -> None:
    part = tmp_path / "step-1" / "0.0-1" / "node-0"
    part.mkdir(parents=True)
    (part / "model.pt.sagemaker-uploaded").touch()
    assert uncommitted(tmp_path, marks=MARKS) == []
    (part / "model.pt").write_text("x")
    assert uncommitted(tmp_path, marks=MARKS) == [part.parent]


# -------------------------------------------------------------------------------------------------------- the archive


def archived(tmp: Path) -> list[str]:
    """Return the complete checkpoints in the archive."""
    return [item.name for item in complete(tmp / "run" / "archive" / "checkpoints")]


@pytest.fixture
def objects(tmp_path: Path) -> FolderObjects:
    return FolderObjects(tmp_path / "run")


def test_only_what_a_restart_needs_stays_in_live(
    fleet: Callable[..., Fleet], objects: FolderObjects, tmp_path: Path
) -> None:
    run = fleet(keep=2, objects=objects)
    for number in range(1, 5):
        run.save(f"step-{number}")
        until(lambda number=number: run.stored() == [f"step-{number}"])
        until(lambda number=number: archived(tmp_path) == [f"step-{number - 1}"][: number - 1])
    until(lambda: sorted(path.name for path in (run.store / "archive").rglob("*.json")) == ["0.0-3.json"])
    for node in range(2):  # a checkpoint that left live/ leaves its disks too
        until(lambda node=node: [path.name for path in (run.local(node) / "checkpoints").iterdir()] == ["step-4"])
    steps = [call for call in objects.calls if "step-1" in call]
    assert [call.rpartition("/")[2] for call in steps if call.startswith("write")] == ["commit.json", "0.0-1.json"]
    first_removal = min(index for index, call in enumerate(steps) if call.startswith("remove live/checkpoints"))
    assert max(index for index, call in enumerate(steps) if call.startswith(("copy", "write"))) < first_removal
    assert steps[first_removal].endswith("/commit.json")


def test_where_the_store_refuses_checkpoints_stay_in_live(
    fleet: Callable[..., Fleet], objects: FolderObjects, tmp_path: Path
) -> None:
    objects.refuse = "write"
    run = fleet(keep=2, objects=objects)
    for number in range(1, 4):
        run.save(f"step-{number}")
        until(lambda number=number: run.stored()[-1:] == [f"step-{number}"])
    until(lambda: run.stored() == ["step-2", "step-3"])
    assert archived(tmp_path) == []
    assert "mirror: StorageError: refused: write; trying again" in run.lines()
    objects.refuse = ""
    run.save("step-4")
    until(lambda: run.stored() == ["step-4"])
    assert archived(tmp_path) == ["step-3"]


def test_a_pointer_keeps_its_checkpoint_in_live(fleet: Callable[..., Fleet], objects: FolderObjects) -> None:
    run = fleet(nodes=1, keep=2, objects=objects)
    run.save("step-1")
    until(lambda: run.stored() == ["step-1"])
    (run.tmp / "0.0-n0" / "ck" / "best").write_text("step-1")
    until(lambda: (run.store / "pointers/node-0.json").exists())
    for number in (2, 3):
        run.save(f"step-{number}")
        until(lambda number=number: f"step-{number}" in run.stored())
    until(lambda: run.stored() == ["step-1", "step-3"])
    assert archived(run.tmp) == ["step-2"]


def test_a_restart_takes_over_the_archive(fleet: Callable[..., Fleet], objects: FolderObjects, tmp_path: Path) -> None:
    first = fleet(keep=3, objects=objects)
    for number in range(1, 4):
        first.save(f"step-{number}")
        until(lambda number=number: first.stored() == [f"step-{number}"])
    until(lambda: archived(tmp_path) == ["step-1", "step-2"])
    first.stop()
    (first.local(0) / "archive" / "notes").write_text("not ours")
    second = fleet(keep=3, attempt="0.1", objects=objects)
    second.save("step-4")
    until(lambda: second.stored() == ["step-4"])
    until(lambda: archived(tmp_path) == ["step-2", "step-3"])
    assert len(list((second.store / "archive").rglob("*.json"))) == 2


def test_a_disk_that_fails_does_not_make_the_archive_empty(objects: FolderObjects, tmp_path: Path) -> None:
    commit: dict[str, Any] = {"protocol": 1, "name": "step-1", "attempt": "0.0", "seq": 1, "time": 1.0}
    commit["files"] = {"node-0/step-1/a": {"size": 1, "sha256": ""}}
    with faulty_disk(tmp_path / "live", tmp_path / "behind") as disk:
        archive = Archive(disk.place, objects, temporary="")
        assert archive.found() == []
        write_whole(disk.behind / "archive/step-1/0.0-1.json", json.dumps(commit).encode(), temporary="")
        assert [item.name for item in archive.found()] == ["step-1"]
        for operation, path in (("readdir", "/archive"), ("open", "/archive/step-1/0.0-1.json")):
            disk.fail((operation, path, errno.EIO))
            with pytest.raises(OSError, match="Input/output error"):
                archive.found()


def test_a_damaged_checkpoint_falls_back_to_the_archive(
    fleet: Callable[..., Fleet], objects: FolderObjects, tmp_path: Path
) -> None:
    first = fleet(nodes=1, keep=3, objects=objects)
    for number in range(1, 4):
        first.save(f"step-{number}")
        until(lambda number=number: first.stored() == [f"step-{number}"])
    until(lambda: archived(tmp_path) == ["step-1", "step-2"])
    live, said = first.local(0), list[str]()
    until(lambda: [path.name for path in (live / "checkpoints").iterdir()] == ["step-3"])
    first.stop()
    (part,) = (live / "checkpoints/step-3").rglob("rank-0.pt")
    part.write_text("step-3 of X")  # of the same size
    resume = Resume(live=live, given=None, url=None, say=said.append, archive=Archive(live, objects, temporary=""))
    site = NodeEnvironment(
        topology=Topology(nodes=1, node_rank=0, master_addr="localhost", master_port=1),
        paths={"live": str(live)},
        scratch=(str(tmp_path),),
    )
    space = Workspace(context={"run_id": "r", "checkpoint_paths": []}, site=site, log=LogWriter(node=0), wait=print)
    tried = []
    for name, _, message in resume.candidates():
        why, damaged = resume.restore(message, space)
        tried.append((name, message["root"], damaged))
        if not why:
            break
        resume.pass_over(message)
        if name == "step-2":
            break
    assert tried == [("step-3", "own", True), ("step-2", "archive", False)]
    assert (space.checkpoints / "step-2" / "rank-0.pt").read_text() == "step-2 of 0"
    assert not (space.folder / "archive").exists()
    objects.refuse = "read"
    message = next(message for name, _, message in resume.candidates() if name == "step-2")
    assert resume.restore(message, space) == ("refused: read", False), "whole, though it cannot be had now"
    objects.refuse = ""
    next((tmp_path / "run/archive/checkpoints/step-2").rglob("rank-0.pt")).unlink()
    why, damaged = resume.restore(message, space)
    assert damaged
    resume.pass_over(message)
    assert resume.damaged == [live / "checkpoints/step-3/0.0-3", live / "archive/step-2/0.0-2"]
    second = fleet(
        nodes=1,
        keep=3,
        attempt="0.1",
        objects=objects,
        damaged=[live.parent.parent / "0.1-n0/live/archive/step-2/0.0-2"],
    )
    second.save("step-4")
    until(lambda: archived(tmp_path) == ["step-1", "step-3"])
