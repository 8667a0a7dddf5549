"""The contract of `Files`: a folder, memory, S3, Azure Blob, Cloud Storage, and a file system of a third party."""

from __future__ import annotations

import hashlib
import os
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from plain import EXCLUSIVE, PLAIN
from servers import check_swap

from cloudtrain.errors import DigestError, StorageError
from cloudtrain.storage.files import Files, files, parallel
from cloudtrain.storage.local_disk import walk
from cloudtrain.storage.remote import RemoteFiles

# aiohttp warns of a body above 1 MiB, and gcsfs sends such bodies.
pytestmark = pytest.mark.filterwarnings("ignore:Sending a large body directly:ResourceWarning")

HERE = ("folder", "memory")
SERVED = tuple(pytest.param(name, marks=pytest.mark.remote) for name in ("s3", "azure", "gcs"))
LARGE = (9 << 20) + 3
"""Bytes of a file that every client sends and fetches in parts."""


def url_of(kind: str, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the URL of an empty folder of that kind."""
    if kind == "folder":
        return f"file://{tmp_path_factory.mktemp('folder')}/store"
    if kind == "memory":
        return f"memory://{uuid.uuid4().hex}/store"  # one file system for the whole process
    if kind == "plain":
        return str(request.getfixturevalue("plain")(PLAIN + EXCLUSIVE))
    return str(request.getfixturevalue(f"{kind}_url"))


@pytest.fixture(params=[*HERE, *SERVED, pytest.param("plain", marks=pytest.mark.remote)])
def tree(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Files:
    """Return an empty tree of each kind in turn."""
    return files(url_of(request.param, request, tmp_path_factory))


@pytest.fixture(params=[*HERE, *SERVED])
def swapping(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Files:
    """Return an empty tree of each kind that can replace a file only while it is unchanged."""
    return files(url_of(request.param, request, tmp_path_factory))


def fill(folder: Path, data: dict[str, bytes]) -> None:
    for name, content in data.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


# ----------------------------------------------------------------------------------------------------------------- keys


def test_read_write_and_list(tree: Files) -> None:
    assert tree.list() == {}
    assert tree.names() == []
    assert tree.list("no/folder") == {}
    assert tree.names("missing") == []
    data = {"a/b": b"1", "a/c/d": b"22", "ab": b"333", "empty": b"", "ü/x y+z%20#?&": b"odd"}
    for key, content in data.items():
        tree.write(key, content)
        assert (tree.read(key), tree.size(key)) == (content, len(content))
    assert tree.list() == {key: len(content) for key, content in data.items()}
    assert tree.list("a") == {"a/b": 1, "a/c/d": 2}
    assert tree.list("ab") == {}
    assert tree.names() == ["a", "ab", "empty", "ü"]
    assert tree.names("a") == ["b", "c"]
    assert (tree.size("a"), tree.size("nothing")) == (None, None)
    assert tree.exists("a/b")
    assert not tree.exists("a")
    tree.write("a/b", b"other")
    assert tree.read("a/b") == b"other"


def test_copy_remove_and_discard(tree: Files) -> None:
    for key in ("a/b", "a/c/d", "ab", "ü/x y+z%20#?&", "a[1]", "a1"):
        tree.write(key, b"1")
    tree.copy("a/b", "x/y")
    assert tree.read("x/y") == b"1"
    tree.remove("a")
    tree.remove("a")
    tree.remove("x/y")
    assert list(tree.list()) == ["a1", "a[1]", "ab", "ü/x y+z%20#?&"]
    tree.discard([])
    tree.discard(["gone", "ab", "ü/x y+z%20#?&", "gone/too"])
    assert list(tree.list()) == ["a1", "a[1]"]
    tree.discard(["a[1]"])
    assert list(tree.list()) == ["a1"], "a key is no pattern"
    attempts = [lambda: tree.remove(""), lambda: tree.discard(["", "a1"])]
    if not tree.url.startswith("file:"):  # a folder loses the keys before the wrong one
        attempts.append(lambda: tree.discard(["a1", ""]))
    for attempt in attempts:
        with pytest.raises(StorageError):
            attempt()
    assert list(tree.list()) == ["a1"]


def test_a_missing_file_is_file_not_found(tree: Files, tmp_path: Path) -> None:
    for attempt in (
        lambda: tree.read("nothing"),
        lambda: tree.download("nothing", tmp_path / "here" / "file"),
        lambda: tree.copy("nothing", "else"),
        lambda: tree.upload(tmp_path / "nothing", "key"),
    ):
        with pytest.raises(FileNotFoundError):
            attempt()
    assert [path for path in (tmp_path / "here").rglob("*") if path.is_file()] == []
    assert tree.list() == {}


def test_a_rewrite_has_another_version(swapping: Files) -> None:
    swapping.write("key", b"one")
    before = swapping.entries()["key"]
    assert swapping.entries()["key"] == before
    swapping.write("key", b"two")
    after = swapping.entries()["key"]
    assert (after.size, after.version == before.version) == (3, False)
    assert time.time() - 60 < before.modified <= after.modified < time.time() + 60


def test_another_writer_is_seen_at_once(tree: Files) -> None:
    """A tree caches nothing between calls: the nodes write to the same store."""
    theirs = files(tree.url)
    assert tree.names("live") == []
    assert not tree.exists("live/x")
    theirs.write("live/x", b"1")
    assert tree.exists("live/x")
    assert tree.names("live") == ["x"]
    theirs.write("live/x", b"22")
    assert (tree.size("live/x"), tree.read("live/x")) == (2, b"22")
    theirs.remove("live")
    assert tree.list("live") == {}


def test_a_reader_sees_all_of_the_old_or_of_the_new(tree: Files) -> None:
    contents, over = [bytes([n]) * 300_000 for n in range(2)], threading.Event()
    tree.write("record", contents[0])
    found: list[bytes] = []

    def read() -> None:
        while not over.is_set():
            found.append(tree.read("record"))

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for number in range(20):
            tree.write("record", contents[number % 2])
    finally:
        over.set()
        reader.join()
    assert all(data in contents for data in found)
    assert found


# ------------------------------------------------------------------------------------------------------- there and back


def test_a_large_file_there_and_back(tree: Files, tmp_path: Path) -> None:
    data = os.urandom(LARGE)
    fill(tmp_path, {"source": data})
    target, moved = tmp_path / "deep" / "target", dict[str, int]()

    def progress(key: str, more: int) -> None:
        assert more > 0
        moved[key] = moved.get(key, 0) + more

    tree.upload(tmp_path / "source", "data/big", progress=progress)
    assert moved == {"data/big": LARGE}
    tree.download("data/big", target, sha256=hashlib.sha256(data).hexdigest(), size=LARGE, progress=progress)
    assert moved == {"data/big": 2 * LARGE}
    assert target.read_bytes() == data
    assert b"".join(tree.pieces("data/big", LARGE)) == data
    with pytest.raises(DigestError):
        tree.download("data/big", target, sha256="0" * 64)
    assert target.read_bytes() == data
    assert os.listdir(target.parent) == ["target"]


@pytest.mark.parametrize("wrong", [{"size": 4}, {"sha256": "0" * 64}], ids=["size", "digest"])
def test_a_corrupt_download_keeps_the_old_file(tree: Files, tmp_path: Path, wrong: dict[str, Any]) -> None:
    tree.write("key", b"bad")
    target = tmp_path / "out" / "file"
    with pytest.raises(DigestError, match="instead of"):
        tree.download("key", target, **wrong)
    assert list(target.parent.glob("*")) == []
    target.parent.mkdir(exist_ok=True)
    target.write_bytes(b"good")
    with pytest.raises(DigestError):
        tree.download("key", target, **wrong)
    assert os.listdir(target.parent) == ["file"]
    assert target.read_bytes() == b"good"


def test_a_tree_there_and_back(tree: Files, tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    contents = {f"d{i % 7}/f{i}": f"content {i}".encode() * (i % 3) for i in range(40)}
    fill(source, contents)
    for name in contents:
        tree.upload(source / name, f"in/here/{name}")
    assert list(tree.list("in/here")) == sorted(f"in/here/{name}" for name in contents)
    moved: list[str] = []
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in contents.items()}

    def pull(**options: Any) -> set[str]:
        moved.clear()
        names = tree.download_tree("in/here", target, progress=lambda key, _: moved.append(key), **options)
        assert names == sorted(contents)
        assert {str(path.relative_to(target)): path.read_bytes() for path in walk(target).values()} == contents
        return set(moved)

    written = {f"in/here/{name}" for name, data in contents.items() if data}
    assert pull(digests=digests) == written
    assert pull(digests=digests) == set(), "existing files are not fetched again"
    (target / "d1/f1").write_bytes(b"CONTENT 1")
    assert pull(digests=digests) == {"in/here/d1/f1"}
    (target / "d1/f1").write_bytes(b"CONTENT 1")
    assert pull() == written, "without digests everything is fetched"
    some = tree.download_tree("in/here", tmp_path / "some", select=lambda name: name.startswith("d3/f3"))
    assert some == ["d3/f3", "d3/f31", "d3/f38"]


# ----------------------------------------------------------------------------------------------------------- one writer


def at_once(trees: list[Files], call: Callable[[Files, int], Any]) -> list[Any]:
    """Return the results of ``call(tree, number)`` in many threads that start together."""
    barrier = threading.Barrier(len(trees))

    def work(number: int) -> Any:
        barrier.wait()
        return call(trees[number], number)

    return parallel(work, list(range(len(trees))), jobs=len(trees))


def test_create_is_exclusive(tree: Files) -> None:
    assert tree.create("runs/a/run.json", b"mine") is True
    assert tree.create("runs/a/run.json", b"theirs") is False
    assert tree.read("runs/a/run.json") == b"mine"


@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
def test_one_of_many_threads_creates(tree: Files, shared: bool) -> None:
    """Test threads with a tree each, and threads that share one."""
    trees = [tree if shared else files(tree.url) for _ in range(8)]
    parallel(lambda one: one.names(), trees)
    for attempt in range(5):
        key = f"attempts/{attempt}"
        wins = at_once(trees, lambda one, number, key=key: one.create(key, b"%d" % number))
        assert sum(wins) == 1
        assert tree.read(key) == b"%d" % wins.index(True)


def test_swap_replaces_one_version_once(swapping: Files) -> None:
    none = {"s3": '"0"', "abfs": '"0"', "gs": "1"}.get(swapping.url.partition(":")[0], "0")
    check_swap(swapping, "a/key", none=none)
    assert swapping.list() == {"a/key": 1}


def test_a_swap_of_many_threads_is_one_s(swapping: Files) -> None:
    """All contents differ, as `Files.swap` requires."""
    trees = [files(swapping.url) for _ in range(4)]
    version = swapping.swap("key", None, b"0")
    for attempt in range(12):

        def swap(one: Files, number: int, attempt: int = attempt, version: str = version) -> str | None:
            try:
                return one.swap("key", version, f"{attempt} {number}".encode())
            except FileExistsError:
                return None

        made = at_once(trees, swap)
        (version,) = filter(None, made)
        assert swapping.read("key") == f"{attempt} {made.index(version)}".encode()


def test_a_copy_of_a_file_without_a_known_size_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the store itself cannot copy, the client moves the bytes, and must know their number."""
    tree = files("memory://copies")
    tree.write("a", b"content")
    monkeypatch.setattr(RemoteFiles, "copies", False)
    tree.copy("a", "b")
    assert tree.read("b") == b"content"
    monkeypatch.setattr(RemoteFiles, "size", lambda *_: -1)
    with pytest.raises(StorageError, match="does not say how large it is"):
        tree.copy("a", "c")
    assert tree.load("c") is None
