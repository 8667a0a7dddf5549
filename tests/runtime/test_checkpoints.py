"""Checkpoints as folders: which ones are finished or complete, and restored copies whose digests are checked."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from disks import FaultyDisk, faulty_disk, small_disk
from hypothesis import given
from hypothesis import strategies as st
from rows import for_each

from cloudtrain.errors import DigestError, SpecError, StorageError
from cloudtrain.provider_api.node import NodeEnvironment, Topology
from cloudtrain.runtime import checkpoints
from cloudtrain.runtime.checkpoint_done import Finished, _Item
from cloudtrain.runtime.checkpoint_model import Checkpoint, resumable
from cloudtrain.runtime.checkpoint_names import family
from cloudtrain.runtime.checkpoints import (
    COMMIT,
    Pointer,
    Watch,
    complete,
    copy_entry,
    copy_with_digest,
    in_parallel,
    open_for_writing,
    read_pointers,
    restore,
    shape_of,
    write_pointers,
)
from cloudtrain.runtime.logs import LogWriter
from cloudtrain.runtime.resume import Resume
from cloudtrain.runtime.timings import TIMINGS
from cloudtrain.runtime.workspace import Workspace


def write(path: Path, data: bytes | str = b"x") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def watch(tmp_path: Path, *patterns: str) -> Watch:
    (tmp_path / "ck").mkdir(exist_ok=True)
    (tmp_path / "work").mkdir(exist_ok=True)
    return Watch(folder=tmp_path / "ck", workdir=tmp_path / "work", patterns=patterns)


def committed(
    live: Path, name: str = "step-1", folder: str = "0.0-1", files: dict[str, bytes] | None = None, **changes: Any
) -> Checkpoint:
    """Write a checkpoint as the mirror commits it."""
    files = {f"node-0/{name}/a.pt": b"A" * 10, f"node-1/{name}/b.pt": b"B" * 20} if files is None else files
    where = live / name / folder
    for key, data in files.items():
        write(where / key, data)
    commit = {
        "protocol": 1, "name": name, "place": None, "attempt": folder.split("-")[0], "seq": int(folder.split("-")[1]),
        "nodes": 2, "time": 1000.0,
        "files": {k: {"size": len(d), "sha256": hashlib.sha256(d).hexdigest()} for k, d in files.items()}, **changes,
    }  # fmt: skip
    write(where / COMMIT, json.dumps(commit))
    return Checkpoint.of(commit, str(where))


def tree(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


# ---------------------------------------------------------------------------------------------------- files of a script


def test_top_level_entries_are_checkpoints_and_hidden_ones_are_not(tmp_path: Path) -> None:
    write(tmp_path / "ck/last.pt", b"12345")
    write(tmp_path / "ck/step-1/model.pt")
    write(tmp_path / "ck/step-1/deep/opt.pt")
    write(tmp_path / "ck/.hidden")
    write(tmp_path / "ck/half.tmp")
    write(tmp_path / "ck/dir.tmp/x")
    (tmp_path / "ck/empty").mkdir()
    found = watch(tmp_path).entries()
    assert sorted(found) == ["last.pt", "step-1"]
    assert found["last.pt"].signature[0][:2] == ("", 5)
    assert [rel for rel, _, _ in found["step-1"].signature] == ["deep/opt.pt", "model.pt"]


def test_a_folder_that_is_not_there_holds_nothing(tmp_path: Path) -> None:
    assert Watch(folder=tmp_path / "no", workdir=tmp_path, patterns=("*.pt",)).entries() == {}


def test_globs_below_the_working_folder_keep_their_place(tmp_path: Path) -> None:
    found = watch(tmp_path, "out/checkpoint-*", "weights/**/*.pt")
    write(tmp_path / "work/out/checkpoint-10/model.safetensors")
    write(tmp_path / "work/out/log.txt")
    write(tmp_path / "work/weights/a/b/last.pt")
    entries = found.entries()
    assert {name: entry.place for name, entry in entries.items()} == {
        "out--checkpoint-10": "out/checkpoint-10", "weights--a--b--last.pt": "weights/a/b/last.pt",
    }  # fmt: skip
    for name, entry in entries.items():
        assert found.place(name, entry.place) == tmp_path / "work" / (entry.place or "")
    assert found.place("step-1", None) == tmp_path / "ck" / "step-1"


@pytest.mark.parametrize(
    ("names", "sharded", "metadata"),
    [(["model.pt"], False, False), (["__0_0.distcp"], True, False), (["__0_0.distcp", ".metadata"], True, True),
     (["model/__0_0.distcp", "model/.metadata"], True, True), ([".metadata"], False, True)],
)  # fmt: skip
def test_dcp_is_known_by_its_files(tmp_path: Path, names: list[str], sharded: bool, metadata: bool) -> None:
    for name in names:
        write(tmp_path / "ck/s" / name)
    entry = watch(tmp_path).entries()["s"]
    assert (entry.sharded, entry.metadata) == (sharded, metadata)


def test_quiet_means_two_seconds_without_a_change(tmp_path: Path) -> None:
    file = write(tmp_path / "ck/a/x")
    write(tmp_path / "ck/a/y")
    now = time.time()
    os.utime(file, (now - 1, now - 1))
    os.utime(tmp_path / "ck/a/y", (now - 100, now - 100))
    entry = watch(tmp_path).entries()["a"]
    finished, item = Finished(skip={}, shapes={}), _Item(since=time.monotonic() - TIMINGS.quiet)
    assert not finished._still(entry, item, now)
    assert finished._still(entry, item, now - 1 + TIMINGS.quiet)


def test_a_file_another_process_is_writing_is_seen(tmp_path: Path) -> None:
    write(tmp_path / "ck/a/x")
    write(tmp_path / "ck/b/x")
    entries = list(watch(tmp_path).entries().values())
    assert open_for_writing(entries) == set()
    code = "import sys; w = open(sys.argv[1], 'ab'); r = open(sys.argv[2], 'rb'); print(1, flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "ck/a/x"), str(tmp_path / "ck/b/x")],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        process.stdout.readline()
        assert open_for_writing(entries) == {"a"}  # b is only read
        process.communicate(b"\n", timeout=20)
    assert open_for_writing(entries) == set()


def test_a_mapped_or_linked_path_is_the_same_file(tmp_path: Path) -> None:
    write(tmp_path / "elsewhere/x")
    (tmp_path / "ck").mkdir()
    (tmp_path / "ck/a").symlink_to(tmp_path / "elsewhere")
    entries = list(watch(tmp_path).entries().values())
    assert [e.name for e in entries] == ["a"]
    with open(tmp_path / "elsewhere/x", "ab"):
        assert open_for_writing(entries) == {"a"}


# --------------------------------------------------------------------------------------------------------------- copies


@given(st.binary(max_size=2000))
def test_a_copy_is_described_by_what_was_read(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    folder = tmp_path_factory.mktemp("copy")
    source = write(folder / "s", data)
    assert copy_with_digest(source, folder / "deep/t") == (len(data), hashlib.sha256(data).hexdigest())
    assert (folder / "deep/t").read_bytes() == data


def test_an_entry_that_changes_while_it_is_copied_is_not_taken(tmp_path: Path) -> None:
    write(tmp_path / "ck/a/1", b"1" * 10)
    write(tmp_path / "ck/a/2", b"2" * 10)
    found = watch(tmp_path)
    entry = found.entries()["a"]
    files = copy_entry(entry, tmp_path / "t")
    assert files is not None
    assert sorted(files) == ["a/1", "a/2"]
    assert tree(tmp_path / "t") == {"a/1": b"1" * 10, "a/2": b"2" * 10}
    write(tmp_path / "ck/a/2", b"2" * 11)
    assert copy_entry(entry, tmp_path / "t2") is None  # size
    entry = found.entries()["a"]
    write(tmp_path / "ck/a/3")
    assert copy_entry(entry, tmp_path / "t3") is None  # a file more
    entry = found.entries()["a"]
    (tmp_path / "ck/a/1").unlink()
    assert copy_entry(entry, tmp_path / "t4") is None  # a file less
    entry = found.entries()["a"]
    os.utime(tmp_path / "ck/a/2", ns=(1, 1))
    assert copy_entry(entry, tmp_path / "t5") is None  # rewritten with the same size


# ------------------------------------------------------------------------------------------------------ complete or not


def test_complete_ones_in_order_of_attempt_time_and_number(tmp_path: Path) -> None:
    committed(tmp_path, "c", "0.10-1", time=5.0)
    committed(tmp_path, "a", "0.2-7", time=9.0)
    committed(tmp_path, "b", "1.0-1", time=1.0)
    committed(tmp_path, "a", "0.2-8", time=9.0)
    assert [(c.name, c.folder.name) for c in complete(tmp_path)] == [
        ("a", "0.2-7"), ("a", "0.2-8"), ("c", "0.10-1"), ("b", "1.0-1"),
    ]  # fmt: skip
    assert committed(tmp_path, "a", "2-1", time=1.0).order < committed(tmp_path, "a", "2.1-0", time=0.5).order


@pytest.mark.parametrize(
    "spoil",
    [
        lambda c: (c.folder / COMMIT).unlink(),
        lambda c: (c.folder / COMMIT).write_text("{"),
        lambda c: (c.folder / COMMIT).write_text("[]"),
        lambda c: (c.folder / COMMIT).write_text("{}"),
        lambda c: (c.folder / COMMIT).write_text('{"attempt": "x"}'),
        lambda c: (c.folder / COMMIT).write_text(json.dumps({**c.commit, "files": None})),
        lambda c: (c.folder / COMMIT).write_text(json.dumps({k: v for k, v in c.commit.items() if k != "name"})),
        lambda c: (c.folder / COMMIT).write_bytes(b"\xff"),
        lambda c: (c.folder / "node-1/step-1/b.pt").unlink(),
        lambda c: (c.folder / "node-1/step-1/b.pt").write_bytes(b"B" * 19),
        lambda c: (c.folder / "node-1/step-1/b.pt").write_bytes(b""),
    ],
    ids=["no commit", "half", "list", "empty", "attempt", "files", "name", "no text", "missing", "truncated", "zero"],
)
def test_what_is_not_whole_is_not_complete_and_said_so(tmp_path: Path, spoil: Any) -> None:
    good = committed(tmp_path, "step-0")
    spoil(committed(tmp_path))
    messages: list[str] = []
    assert [c.folder for c in complete(tmp_path, say=messages.append)] == [good.folder]
    assert len(messages) <= 1
    if (tmp_path / "step-1/0.0-1" / COMMIT).exists():
        assert messages[0].startswith("checkpoint step-1/0.0-1 is not complete (")


def test_a_checkpoint_is_found_from_itself_its_name_and_all(tmp_path: Path) -> None:
    one = committed(tmp_path / "checkpoints")
    for root in (tmp_path / "checkpoints", tmp_path / "checkpoints/step-1", one.folder):
        assert [c.folder for c in complete(root)] == [one.folder]
    assert complete(tmp_path / "none") == []


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyDisk]:
    """A disk with step-1/0.0-1 and step-2/0.0-2, which a node asks for a second. Path.exists is that of Python 3.14."""
    monkeypatch.setattr(TIMINGS, "copy_pauses", (0.01,))
    monkeypatch.setattr(TIMINGS, "mount", 1.0)
    monkeypatch.setattr(TIMINGS, "mount_older", 0.1)
    monkeypatch.setattr(TIMINGS, "mount_pauses", (0.05, 0.1))
    monkeypatch.setattr(Path, "exists", os.path.exists)
    with faulty_disk(tmp_path / "disk", tmp_path / "behind") as found:
        for step in (1, 2):
            committed(found.place, f"step-{step}", f"0.0-{step}", files={f"node-0/step-{step}/a.pt": b"A"})
        yield found


FAULTS = [
    ("readdir", "/", errno.EIO),
    ("readdir", "/step-2", errno.ESTALE),
    ("open", "/step-2/0.0-2/commit.json", errno.ETIMEDOUT),
    ("read", "/step-2/0.0-2/commit.json", errno.EIO),
    ("getattr", "/step-2/0.0-2/node-0/step-2/a.pt", errno.ENOTCONN),
    ("readdir", "/", errno.EACCES),  # a store that does not know this node yet
    ("open", "/step-2/0.0-2/commit.json", errno.EPERM),
    ("open", "/step-2/0.0-2/commit.json", errno.EMFILE),
]


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_mount_that_fails_for_a_moment_makes_no_checkpoint_missing(
    disk: FaultyDisk, fault: tuple[str, str, int]
) -> None:
    disk.fail(fault)
    disk.heal_after(0.3)
    assert [item.name for item in complete(disk.place)] == ["step-1", "step-2"]


@pytest.mark.costly
@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_mount_that_fails_for_long_fails_the_attempt(disk: FaultyDisk, fault: tuple[str, str, int]) -> None:
    before = tree(disk.behind)
    disk.fail(fault)
    with pytest.raises(StorageError) as error:
        complete(disk.place)
    folder = "/step-2/0.0-2" if "0.0-2" in fault[1] else fault[1].rstrip("/")
    assert (
        str(error.value) == f"cannot read {disk.place}{folder}: {os.strerror(fault[2])} ({errno.errorcode[fault[2]]})"
    )
    name = folder.rpartition("/")[2]
    assert error.value.hint == (fault[1] != "/") * f"to resume from checkpoint step-1, rename that folder to .{name}"
    assert checkpoints.uncommitted(disk.place) == []
    assert tree(disk.behind) == before
    if name:
        unread = disk.behind / folder.strip("/")
        unread.rename(unread.with_name(f".{name}"))
        assert [item.name for item in complete(disk.place)] == ["step-1"]


@pytest.mark.costly
@for_each("fault", [
    ("readdir", "/", errno.EACCES),
    ("open", "/step-2/0.0-2/commit.json", errno.EPERM),
])  # fmt: skip
def test_a_closed_folder_of_the_user_is_named_at_once(disk: FaultyDisk, fault: tuple[str, str, int]) -> None:
    """No wait opens it. The run's own folder may only be waiting for a role of its node."""
    disk.fail(fault)
    url = "s3://bucket/mine"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "sleep", lambda _: pytest.fail("it waits"))
        with pytest.raises(SpecError) as error:
            complete(disk.place, url=url)
    folder = "/step-2/0.0-2" if "0.0-2" in fault[1] else ""
    why = f"{os.strerror(fault[2])} ({errno.errorcode[fault[2]]})"
    assert str(error.value) == f"resume_from: cannot read {url}{folder}: {why}"
    assert error.value.hint == bool(folder) * "to resume from checkpoint step-1, rename that folder to .0.0-2"
    disk.fail(("readdir", "/", errno.EIO))
    disk.heal_after(0.3)
    assert [item.name for item in complete(disk.place, url=url)] == ["step-1", "step-2"]
    disk.fail(("readdir", "/step-1", errno.EIO), ("readdir", "/", errno.EIO))
    with pytest.raises(StorageError, match=f"^cannot read {url}: Input/output error"):
        complete(disk.place, url=url)


@pytest.mark.costly
def test_a_mount_whose_calls_take_long_to_fail_is_not_asked_for_each_checkpoint(
    disk: FaultyDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An NFS mount may take 30 s for each error, and a run may have a thousand checkpoints."""
    asked: list[str] = []

    def listing(folder: Path) -> Iterator[os.DirEntry[str]]:
        if folder == disk.place:
            return real(folder)
        asked.append(folder.name)
        time.sleep(0.6)
        raise OSError(errno.ETIMEDOUT, "Connection timed out")

    real = os.scandir
    for step in range(3, 100):
        (disk.behind / f"step-{step}").mkdir()
    monkeypatch.setattr(os, "scandir", listing)
    with pytest.raises(StorageError, match=r"cannot read \S+/step-\d+: Connection timed out \(ETIMEDOUT\)"):
        complete(disk.place)
    assert len(asked) == 2


@pytest.mark.costly
@for_each("fault", [
    ("readdir", "/step-1", errno.EIO),
    ("read", "/step-1/0.0-1/commit.json", errno.EIO),
    ("getattr", "/step-1/*", errno.EIO),
])  # fmt: skip
def test_an_older_checkpoint_that_cannot_be_read_is_skipped(disk: FaultyDisk, fault: tuple[str, str, int]) -> None:
    messages: list[str] = []
    disk.fail(fault)
    assert [item.name for item in complete(disk.place, say=messages.append)] == ["step-2"]
    assert messages[0].startswith("checkpoint ")
    assert messages[0].endswith(" cannot be read (Input/output error (EIO)); skipped")
    assert checkpoints.uncommitted(disk.place) == []


@for_each(("folder", "newest", "older"), [
    ("step-3/0.0-9", "step-2/0.1-1", True),  # of an earlier attempt
    ("step-1/0.2-1", "step-2/0.1-9", False),
    ("step-2/0.1-1", "last/0.1-2", True),
    ("step-2/0.1-1", "step-1/0.1-2", False),  # the newer one was committed first
    ("step-2", "step-10/0.1-2", True),
    ("step-10", "step-2/0.1-2", False),
    ("last", "step-2/0.1-2", False),
    ("loss=0.3", "loss=0.4/0.1-2", False),
])  # fmt: skip
def test_which_checkpoints_are_certainly_older(tmp_path: Path, folder: str, newest: str, older: bool) -> None:
    assert checkpoints._is_older(Path(folder), committed(tmp_path, *newest.split("/"))) is older


@pytest.mark.costly
@for_each("fault", [
    ("readdir", "/lost+found", errno.EACCES),
    ("open", "/lost+found/commit.json", errno.EACCES),
    ("getattr", "/lost+found/commit.json", errno.EACCES),
    ("getattr", "/lost+found", errno.ENOENT),
])  # fmt: skip
def test_a_closed_folder_fails_no_attempt(disk: FaultyDisk, fault: tuple[str, str, int]) -> None:
    write(disk.behind / "lost+found" / COMMIT)
    disk.fail(fault)
    assert [item.name for item in complete(disk.place)] == ["step-1", "step-2"]


@pytest.mark.slow
def test_pointers_are_not_forgotten_while_a_mount_fails(disk: FaultyDisk) -> None:
    """Without its pointer, retention would remove a script's best checkpoint."""
    best = {"best": Pointer(target="step-1", link=False)}
    checkpoints.write_pointers(disk.behind, 0, best)
    write(disk.behind / "pointers" / "node-1.json", "damaged")
    disk.fail(("readdir", "/pointers", errno.EIO))
    disk.heal_after(0.3)
    assert read_pointers(disk.place) == {0: best}
    for fault in (("readdir", "/pointers", errno.EIO), ("open", "/pointers/node-0.json", errno.ESTALE)):
        disk.fail(fault)
        with pytest.raises(OSError, match=os.strerror(fault[2])):
            read_pointers(disk.place)
    disk.fail(("open", "/pointers/node-0.json", errno.ENOENT))  # it was removed meanwhile
    assert read_pointers(disk.place) == {}


def test_no_checkpoint_of_another_version_is_removed(tmp_path: Path) -> None:
    one = committed(tmp_path)
    (one.folder / COMMIT).write_text(json.dumps({**one.commit, "protocol": 2}))
    assert complete(tmp_path) == []
    assert checkpoints.uncommitted(tmp_path) == []


def test_a_mount_that_fails_damages_no_checkpoint(disk: FaultyDisk, tmp_path: Path) -> None:
    one = complete(disk.place)[0]
    file = "/step-1/0.0-1/node-0/step-1/a.pt"
    disk.fail(("open", file, errno.ENOTCONN), ("getattr", file, errno.ENOTCONN))
    with pytest.raises(StorageError, match="not connected") as error:
        restore(one, tmp_path / "out", node=0)
    assert not isinstance(error.value, DigestError)
    disk.fail(("create", "/*", errno.ENOENT))  # the target's folder is gone, not the checkpoint
    with pytest.raises(StorageError, match="No such file") as error:
        restore(one, disk.place / "out", node=0)
    assert not isinstance(error.value, DigestError)
    disk.fail()
    restore(one, tmp_path / "out", node=0)


@pytest.mark.costly
def test_a_checkpoint_with_a_folder_that_cannot_be_listed_is_not_finished(disk: FaultyDisk, tmp_path: Path) -> None:
    for name in ("step-3/a.pt", "step-3/deep/b.pt"):
        write(disk.place / name)
    watcher = Watch(folder=disk.place, workdir=tmp_path)
    whole = watcher.entries()["step-3"]
    disk.fail(("readdir", "/step-3/deep", errno.EIO))
    torn = watcher.entries()["step-3"]
    assert torn.fault is not None
    assert torn.fault.filename == str(disk.place / "step-3/deep")
    assert torn.signature != watcher.entries()["step-3"].signature  # it never holds still
    assert open_for_writing([torn]) == {"step-3"}
    disk.fail()
    assert watcher.entries()["step-3"].signature == whole.signature


def test_names_with_glob_characters(tmp_path: Path) -> None:
    one = committed(tmp_path / "a[1]*", "epoch=1-loss[0.5]")
    assert [c.folder for c in complete(tmp_path / "a[1]*")] == [one.folder]


def test_the_longest_name_comes_back(tmp_path: Path) -> None:
    one = committed(tmp_path, "é" * 126 + ".pt", files={f"node-0/{'é' * 126}.pt": b"weights"})
    restore(one, tmp_path / "ck" / one.name, node=0)
    assert (tmp_path / "ck" / one.name).read_bytes() == b"weights"


# ------------------------------------------------------------------------------------------------------------ restoring


def test_every_node_gets_all_files_and_its_own_where_two_wrote_one(tmp_path: Path) -> None:
    files = {
        "node-0/s/rng.pt": b"zero", "node-1/s/rng.pt": b"one", "node-0/s/model.pt": b"M", "node-1/s/sub/shard": b"S",
    }  # fmt: skip
    one = committed(tmp_path / "live", "s", files=files)
    for node, own in ((0, b"zero"), (1, b"one")):
        target = tmp_path / f"n{node}" / "s"
        restore(one, target, node=node)
        assert tree(target) == {"model.pt": b"M", "rng.pt": own, "sub/shard": b"S"}
        assert sorted(p.name for p in target.parent.iterdir()) == ["s"]


def test_a_checkpoint_that_is_one_file(tmp_path: Path) -> None:
    one = committed(tmp_path / "live", "last.pt", files={"node-0/last.pt": b"weights"})
    restore(one, tmp_path / "ck" / "last.pt", node=1)
    assert (tmp_path / "ck/last.pt").read_bytes() == b"weights"


def test_what_was_there_before_is_replaced_whole(tmp_path: Path) -> None:
    one = committed(tmp_path / "live", "s", files={"node-0/s/new": b"n"})
    write(tmp_path / "ck/s/old")
    restore(one, tmp_path / "ck/s", node=0)
    assert tree(tmp_path / "ck") == {"s/new": b"n"}


@pytest.mark.parametrize(
    "spoil",
    [
        lambda p: p.write_bytes(b"C" * 20),  # the same size, other bytes
        lambda p: p.write_bytes(b"B" * 19 + b"\0"),
        lambda p: p.write_bytes(b"B" * 5),
        lambda p: p.unlink(),
    ],
    ids=["tampered", "one byte", "truncated", "gone"],
)
def test_bytes_that_are_not_the_committed_ones_are_never_restored(tmp_path: Path, spoil: Any) -> None:
    one = committed(tmp_path / "live")
    write(tmp_path / "ck/step-1/old", b"keep me")
    spoil(one.folder / "node-1/step-1/b.pt")
    with pytest.raises((DigestError, StorageError), match="step-1"):
        restore(one, tmp_path / "ck/step-1", node=0)
    assert tree(tmp_path / "ck") == {"step-1/old": b"keep me"}


@pytest.mark.parametrize("key", ["node-0/../../evil", "node-0/other/x", "node-0", "node-0/step-1/../../evil", "evil",
                                 "/step-1/evil", "../step-1/evil", "x/step-1/evil"])  # fmt: skip
def test_a_commit_cannot_name_what_is_outside_it(tmp_path: Path, key: str) -> None:
    one = committed(tmp_path / "live")
    commit = {
        **one.commit,
        "files": {**one.commit["files"], key: {"size": 1, "sha256": hashlib.sha256(b"x").hexdigest()}},
    }
    write(tmp_path / "evil", b"x")
    forged = Checkpoint.of(commit, one.key)
    with pytest.raises(DigestError, match="outside itself"):
        restore(forged, tmp_path / "ck" / "step-1", node=0)
    assert not (tmp_path / "ck").exists() or tree(tmp_path / "ck") == {}


@pytest.mark.slow
def test_a_disk_that_takes_nothing_is_a_storage_error(tmp_path: Path) -> None:
    one = committed(tmp_path / "live")
    write(tmp_path / "ck", b"a file where the folder should be")
    with pytest.raises(StorageError, match="cannot restore checkpoint step-1"):
        restore(one, tmp_path / "ck" / "step-1", node=0)


def test_a_dangling_link_hides_no_file(tmp_path: Path) -> None:
    folder = tmp_path / "step-1"
    folder.mkdir()
    for name in "abcdefgh":
        (folder / name).write_text(name)
    (folder / "c-link").symlink_to("nothing")
    (folder / "d-link").symlink_to("d-link")
    os.mkfifo(folder / "d-pipe")
    (entry,) = Watch(folder=tmp_path, workdir=tmp_path).entries().values()
    assert [name for name, _, _ in entry.signature] == list("abcdefgh")
    with open(folder / "a", "ab"):
        assert open_for_writing([entry]) == {"step-1"}


# ------------------------------------------------------------------------------------------------------------- pointers


@pytest.mark.parametrize("kind", ["text", "newline", "link", "absolute link"])
def test_a_pointer_is_no_checkpoint(tmp_path: Path, kind: str) -> None:
    (tmp_path / "step-1").mkdir()
    (tmp_path / "step-1/a").write_text("x")
    if "link" in kind:
        (tmp_path / "latest").symlink_to(tmp_path / "step-1" if "absolute" in kind else "step-1")
    else:
        (tmp_path / "latest").write_text("step-1" + ("\n" if kind == "newline" else ""))
    watch = Watch(folder=tmp_path, workdir=tmp_path)
    assert list(watch.entries()) == ["step-1"]
    assert watch.pointers() == {"latest": Pointer(target="step-1", link="link" in kind)}


@pytest.mark.parametrize("text", ["step-2", "", "step-1 and more", "../step-1", "latest", "\udcff", "step-1" * 200])
def test_any_other_text_is_a_file_of_its_own(tmp_path: Path, text: str) -> None:
    (tmp_path / "step-1").mkdir()
    (tmp_path / "step-1/a").write_text("x")
    (tmp_path / "latest").write_bytes(text.encode("utf-8", "surrogateescape") or b"x")
    watch = Watch(folder=tmp_path, workdir=tmp_path)
    assert list(watch.entries()) == ["latest", "step-1"]
    assert watch.pointers() == {}


def test_a_link_to_somewhere_else_is_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "big").mkdir()
    (tmp_path / "big/a").write_text("x")
    (tmp_path / "ck").mkdir()
    (tmp_path / "ck/step-1").symlink_to(tmp_path / "big")
    watch = Watch(folder=tmp_path / "ck", workdir=tmp_path)
    assert [e.shape for e in watch.entries().values()] == [{"a": 1}]
    assert watch.pointers() == {}


def test_a_pointer_stays_one_when_its_target_is_deleted(tmp_path: Path) -> None:
    (tmp_path / "step-1").write_text("weights")
    (tmp_path / "best").write_text("step-1")
    watch = Watch(folder=tmp_path, workdir=tmp_path)
    assert list(watch.entries()) == ["step-1"]
    (tmp_path / "step-1").unlink()
    assert watch.entries() == {}
    assert watch.pointers()["best"].target == "step-1"


@pytest.mark.parametrize("link", [True, False])
def test_a_pointer_is_made_again_as_it_was(tmp_path: Path, link: bool) -> None:
    (tmp_path / "step-1").write_text("weights")
    watch = Watch(folder=tmp_path, workdir=tmp_path)
    watch.entries()
    pointer = Pointer(target="step-1", link=link)
    for _ in range(2):
        watch.point("best", pointer)
        assert watch.pointers() == {"best": pointer}


def test_pointers_that_cannot_be_read_name_nothing(tmp_path: Path) -> None:
    write_pointers(tmp_path, 0, {"best": Pointer(target="step-1", link=False)})
    for node, text in enumerate(["", "[]", '{"best": 1}', '{"best": {"target": "x"}}', "{"], start=1):
        (tmp_path / f"pointers/node-{node}.json").write_text(text)
    (tmp_path / "pointers/node-x.json").write_text("{}")
    assert read_pointers(tmp_path) == {0: {"best": Pointer(target="step-1", link=False)}}


# --------------------------------------------------------------------------------------------------- restored on resume


def workspace(scratch: Path) -> Workspace:
    scratch.mkdir(parents=True, exist_ok=True)
    topology = Topology(nodes=1, node_rank=0, master_addr="127.0.0.1", master_port=5000)
    site = NodeEnvironment(topology=topology, paths={}, scratch=[str(scratch)])
    return Workspace(context={"run_id": "r", "checkpoint_paths": []}, site=site, log=LogWriter(node=0), wait=print)


def resuming(live: Path, *saved: str) -> Resume:
    """Return a run with these checkpoints of one file each, oldest first: name, folder and content."""
    for time_, (name, folder, data) in enumerate(map(str.split, saved), start=1):
        committed(live / "checkpoints", name, folder, {f"node-0/{name}": data.encode()}, saved=float(time_))
    return Resume(live=live, given=None, url=None, say=print)


@pytest.mark.parametrize("name", ["last.ckpt", "last"])
def test_a_checkpoint_without_a_number_comes_back_beside_the_newest(tmp_path: Path, name: str) -> None:
    """Lightning's ``last.ckpt`` was being written when the run ended. The previous version is restored."""
    below = "/model.ckpt" if name == "last" else ""
    kinds = [("epoch=1", 1, 1.0), (name, 2, 2.0), (name, 3, 3.0), ("epoch=2", 4, 4.0)]
    for kind, seq, saved in kinds:
        entry = kind if kind == name else f"{kind}{'' if below else '.ckpt'}"
        committed(tmp_path / "checkpoints", entry, f"0.0-{seq}", {f"node-0/{entry}{below}": b"A"}, saved=saved)
    resume = Resume(live=tmp_path, given=None, url=None, say=print)
    first, second, *_ = resume.candidates()
    assert (first[0].partition(".")[0], first[2]["also"]) == ("epoch=2", [f"{name}/0.0-3"])
    assert (second[0], second[2]["folder"], second[2]["also"]) == (name, f"{name}/0.0-3", [])


def test_the_newest_of_a_checkpoint_s_versions_comes_back(tmp_path: Path) -> None:
    """Lightning was resumed twice. Each time it writes a new ``last-v1.ckpt`` and looks for the newest ``last*``."""

    def last(space: Workspace) -> str:
        found = [path for path in space.checkpoints.iterdir() if path.name.startswith("last")]
        return max(found, key=lambda path: path.stat().st_mtime_ns).read_text()

    resume = resuming(tmp_path, "epoch=0.ckpt 0.0-1 0", "last.ckpt 0.0-2 0")
    name, _, message = next(resume.candidates())
    space = workspace(tmp_path / "first")
    assert (name, resume.restore(message, space), last(space)) == ("last.ckpt", ("", False), "0")

    more = ("epoch=1.ckpt 1.0-1 1", "last-v1.ckpt 1.0-2 1", "epoch=2.ckpt 1.0-3 2")
    resume = resuming(tmp_path, "epoch=0.ckpt 0.0-1 0", "last.ckpt 0.0-2 0", *more)
    name, _, message = next(resume.candidates())
    space = workspace(tmp_path / "second")
    assert (name, resume.restore(message, space), last(space)) == ("epoch=2.ckpt", ("", False), "1")
    assert tree(space.checkpoints) == {"epoch=2.ckpt": b"2", "last-v1.ckpt": b"1"}

    resume = resuming(tmp_path / "more", *more, "last.ckpt 2.0-1 2", "epoch=3.ckpt 2.0-2 3")
    assert next(resume.candidates())[2]["also"] == ["last.ckpt/2.0-1"]
    resume = resuming(tmp_path / "none", *more[:2])
    assert next(resume.candidates())[2]["also"] == []


@pytest.mark.parametrize("below", ["", "/model.pt"])
def test_what_comes_back_is_as_old_as_its_kind_by_its_time(tmp_path: Path, below: str) -> None:
    """A script that takes the newest file, or the newest of a kind, finds the right one however small the files are."""
    names = ["z-last", "step-1", "a-last", "step-2"]
    for seq, name in enumerate(names, start=1):
        committed(tmp_path / "checkpoints", name, f"0.0-{seq}", {f"node-0/{name}{below}": b"A"}, saved=float(seq))
    write_pointers(tmp_path, 0, {"best": Pointer(target="step-1", link=True)})
    resume, space = resuming(tmp_path), workspace(tmp_path / "scratch")
    message = next(resume.candidates())[2]
    assert message["also"] == [
        "a-last/0.0-3",
        "step-1/0.0-2",
        "z-last/0.0-1",
    ]  # without room, older ones are left
    assert resume.restore(message, space) == ("", False)
    assert os.readlink(space.checkpoints / "best") == "step-1"
    for kind in {"", below}:
        paths = [Path(f"{space.checkpoints / name}{kind}") for name in names]
        times = [int(path.stat().st_mtime) for path in paths]  # also on a file system with times in whole seconds
        assert times == sorted(set(times)), kind
        assert times[-1] <= time.time()


def test_what_cannot_come_back_beside_the_newest_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    resume = resuming(tmp_path, "last.ckpt 0.0-1 0", "final.ckpt 0.0-2 1", "step-1.ckpt 0.0-3 2")
    write(tmp_path / "checkpoints/last.ckpt/0.0-1/node-0/last.ckpt", b"X")
    space = workspace(tmp_path / "scratch")
    assert resume.restore(next(resume.candidates())[2], space) == ("", False)
    assert tree(space.checkpoints) == {"final.ckpt": b"1", "step-1.ckpt": b"2"}
    said = "checkpoint last.ckpt: node-0/last.ckpt is not what was committed; left out\n"
    assert capsys.readouterr().out == said


def test_what_was_found_damaged_does_not_come_back_beside_an_older_one(tmp_path: Path) -> None:
    saved = ("last.ckpt 0.0-1 0", "last-v1.ckpt 1.0-1 1", "step-1.ckpt 1.0-2 2", "last-v1.ckpt 1.0-3 3")
    resume = resuming(tmp_path, *saved)
    also = {}
    for name, _, message in resume.candidates():
        also[message["folder"]] = message["also"]
        if name != "last.ckpt":
            resume.pass_over(message)
    assert also == {
        "last-v1.ckpt/1.0-3": [],
        "step-1.ckpt/1.0-2": ["last-v1.ckpt/1.0-1"],
        "last-v1.ckpt/1.0-1": [],
        "last.ckpt/0.0-1": [],
    }


def test_the_newest_has_the_room_that_there_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    size = 300_000
    for seq, name in enumerate(["last.ckpt", "step-1.ckpt"], start=1):
        committed(tmp_path / "checkpoints", name, f"0.0-{seq}", {f"node-0/{name}": bytes(size)}, saved=float(seq))
    with small_disk(tmp_path / "larger", f"{3 * size // 2}") as disk:
        resume, space = resuming(tmp_path), workspace(disk)
        assert resume.restore(next(resume.candidates())[2], space) == ("", False)
        assert tree(space.checkpoints) == {"step-1.ckpt": bytes(size)}
    assert capsys.readouterr().out.endswith("last.ckpt: No space left on device; left out\n")
    with small_disk(tmp_path / "smaller", f"{size // 2}") as disk:
        why, damaged = resume.restore(next(resume.candidates())[2], workspace(disk))
    assert (damaged, why.endswith("step-1.ckpt: No space left on device")) == (False, True)
    assert capsys.readouterr().out == ""


def test_of_one_kind_the_shape_is_the_newest_s(tmp_path: Path) -> None:
    """Another checkpoint of the kind, restored as the script's best, had more files."""
    for seq, files in enumerate((["a", "b"], ["a"]), start=1):
        name = f"step-{seq}"
        committed(tmp_path / "checkpoints", name, f"0.0-{seq}", {f"node-0/{name}/{f}": b"A" for f in files})
    write_pointers(tmp_path, 0, {"best": Pointer(target="step-1", link=False)})
    resume, space = resuming(tmp_path), workspace(tmp_path / "scratch")
    assert resume.restore(next(resume.candidates())[2], space) == ("", False)
    assert tree(space.checkpoints).keys() == {"best", "step-1/a", "step-1/b", "step-2/a"}
    assert resume.shapes == {"step-#": {"a": 1}}


# ---------------------------------------------------------------------------------------------- many files, and trouble


def test_the_first_of_many_copies_that_fails_is_told(tmp_path: Path) -> None:
    def work(number: int) -> None:
        if number == 7:
            raise ValueError("seven")

    with pytest.raises(ValueError, match="seven"):
        in_parallel(work, range(20))
    done: list[int] = []
    in_parallel(done.append, range(20))
    assert sorted(done) == list(range(20))
    in_parallel(done.append, [])


def test_a_hiccup_of_a_mount_costs_a_try(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TIMINGS, "copy_pauses", (0.01, 0.01))
    (tmp_path / "source").write_text("weights")
    fails, whole = [1, 1], checkpoints.copy_with_digest

    def copy(source: Path, target: Path, moved: Any) -> Any:
        if fails:
            raise OSError(fails.pop(), "hiccup")
        return whole(source, target, moved)

    monkeypatch.setattr(checkpoints, "copy_with_digest", copy)
    assert checkpoints.copy_patiently(tmp_path / "source", tmp_path / "target")[0] == 7
    fails += [1, 1, 1]
    with pytest.raises(OSError, match="hiccup"):
        checkpoints.copy_patiently(tmp_path / "source", tmp_path / "target")
    fails[:] = [1, errno.ENOSPC]
    with pytest.raises(OSError, match="hiccup"):  # a full disk is not made empty by trying
        checkpoints.copy_patiently(tmp_path / "source", tmp_path / "target")
    assert len(fails) == 1


def test_shapes_tell_kinds_and_how_many() -> None:
    one = shape_of(["model.bin", "rng_state_0.pth", "rng_state_1.pth"])
    assert one == {"model.bin": 1, "rng_state_#.pth": 2}
    assert family("checkpoint-500") == family("checkpoint-1000") != family("last.ckpt")


# ---------------------------------------------------------------------------------------------- another number of nodes


@for_each(("files", "own"), [
    (["node-0/a/model.pt"], ""),
    (["node-0/a/model.pt", "node-1/a/model.pt"], ""),
    (["node-0/a/.metadata", "node-0/a/__0_0.distcp", "node-1/a/__1_0.distcp"], ""),
    ([".metadata", "__0_0.distcp", "__1_0.distcp"], ""),  # a script wrote it to the store itself
    (["node-0/a/m/.metadata", "node-0/a/m/__0_0.distcp", "node-1/a/m/__1_0.distcp", "node-1/a/data_1.pt"],
     "a/data_1.pt"),
    (["node-0/a/model.pt", "node-0/a/rng_state_0.pth", "node-1/a/rng_state_1.pth"], ""),
    (["node-0/a/model.bin", "node-0/a/random_states_0.pkl", "node-1/a/random_states_1.pkl"], ""),
    (["node-0/a/model.pt", "node-1/a/train.log"], ""),
    (["node-0/a/0.pt", "node-1/a/1.pt"], "a/1.pt"),
    (["node-0/a/zero_pp_rank_0_mp_rank_00_optim_states.pt"], "a/zero_pp_rank_0_mp_rank_00_optim_states.pt"),
    (["node-1/rank1-last.pt"], "rank1-last.pt"),
    (["node-0/a/rank-3/state.pt", "node-0/a/rank-0/state.pt"], "a/rank-0/state.pt"),
    (["node-0/a/rank_00_of_16.pt"], "a/rank_00_of_16.pt"),
    (["node-1/a/rank_9.pt", "node-0/a/model.pt"], "a/rank_9.pt"),
    # A size is no rank.
    (["node-0/lora_rank16/adapter.pt"], ""),
    (["node-0/a/adapter_rank-8.safetensors", "node-1/a/adapter_rank-8.safetensors"], ""),
    (["node-0/a/lora_rank16.pt", "node-0/a/lora_rank32.pt"], ""),
    (["node-0/a/lora_rank10.pt"], ""),
    (["node-1/last.pt"], ""),
])  # fmt: skip
def test_files_of_single_ranks_need_their_number_of_nodes(files: list[str], own: str) -> None:
    item = Checkpoint(
        name="a", key="k", committed=1.0, saved=1.0, files=dict.fromkeys(files, (1, "")), commit={"run_nodes": 2}
    )
    assert item.ranks_own == own
    assert item.node_counts((4, 2))[0] == ((2,) if own else (4, 2))


def test_a_numbered_folder_above_makes_no_state_of_final_weights() -> None:
    def of(place: str, *files: str) -> Checkpoint:
        name = place.replace("/", "--")
        sizes = {f"node-0/{name}/{file}": (1, "") for file in files}
        return Checkpoint(name=name, key=name, committed=1.0, saved=1.0, files=sizes, place=place)

    found = [of("runs/exp1/checkpoint-5", "model.pt", "optimizer.pt"), of("runs/exp1/final", "model.pt")]
    assert [item.place for item in resumable(found)] == ["runs/exp1/checkpoint-5"]
    found = [of("out/step-8/state", "model.pt", "optimizer.pt"), of("out/final", "model.pt")]
    assert [item.place for item in resumable(found)] == ["out/step-8/state"]
    found += [of("out/weights_fp16", "weights.pt"), of("out/zero_to_fp32.py", "")]
    assert [item.place for item in resumable(found)] == ["out/step-8/state", "out/weights_fp16"]


def test_a_part_counts_if_no_other_checkpoint_has_more_nodes() -> None:
    def of(step: int, *nodes: int, run_nodes: int = 2, also: tuple[str, ...] = ()) -> Checkpoint:
        files = dict.fromkeys([*(f"node-{node}/step-{step}/rank_{node}.pt" for node in nodes), *also], (1, ""))
        commit = {"run_nodes": run_nodes}
        return Checkpoint(
            name=f"step-{step}", key=str(step), committed=1.0, saved=1.0, files=files, place=None, commit=commit
        )

    whole, part = of(1, 0, 1), of(2, 1)
    assert resumable([part]) == [part]
    assert resumable([whole, part]) == resumable([part, whole]) == [whole]
    fewer = of(3, 0, run_nodes=1)  # an attempt of fewer nodes
    assert resumable([whole, part, fewer]) == [whole, fewer]
    alone = of(4, 0, run_nodes=3)  # rank 0 alone writes; the others left their random numbers and a log once
    also = of(5, 0, run_nodes=3, also=("node-1/step-5/rng_state_1.pth", "node-1/step-5/train.log"))
    assert resumable([also, alone]) == [also, alone]
    model = of(6, also=("node-0/step-6/model.pt", "node-0/step-6/optimizer.pt"))  # all of it, from node 0 alone
    assert resumable([whole, model, part]) == [whole, model]


def test_files_of_single_ranks_of_an_unknown_number_of_nodes_need_the_most() -> None:
    """Commits of earlier versions, and a folder without a commit, do not record the number of nodes."""
    item = Checkpoint(name="a", key="k", committed=1.0, saved=1.0, files={"node-0/a/rank_0.pt": (1, "")})
    why = "checkpoint a has files of single ranks (a/rank_0.pt), and does not say how many nodes wrote it"
    assert item.node_counts((4, 2)) == ((4,), f"{why}, so it needs 4 nodes")
    whole = Checkpoint(name="a", key="k", committed=1.0, saved=1.0, files={"node-0/a/model.pt": (1, "")})
    assert whole.node_counts((4, 2)) == ((4, 2), "")


def test_a_node_does_not_resume_from_files_of_ranks_that_are_gone(tmp_path: Path) -> None:
    """Check the run's own checkpoints and another run's."""
    files = {f"node-{node}/step-1/rank_{node}.pt": b"x" for node in range(4)}
    committed(tmp_path / "own/checkpoints", files=files, run_nodes=4)
    committed(tmp_path / "other/checkpoints", files=files)  # of an earlier version

    def names(nodes: tuple[int, int] | None, *, own: bool = True) -> list[str]:
        given = {"live": tmp_path / ("own" if own else "none"), "url": "u/live/checkpoints", "say": print}
        given["given"] = None if own else str(tmp_path / "other/checkpoints")
        return [name for name, _, _ in Resume(**given, nodes=nodes).candidates()]

    assert names((4, 4)) == names(None) == names((4, 4), own=False) == names((8, 8), own=False) == ["step-1"]
    with pytest.raises(SpecError, match=r"files of single ranks \(step-1/rank_0.pt\), so it needs 4 nodes again"):
        names((4, 2))
    with pytest.raises(SpecError, match=r"so it needs 4 nodes again"):
        names((8, 8))
    with pytest.raises(SpecError, match=r"does not say how many nodes wrote it, so it needs 4 nodes"):
        names((4, 2), own=False)
