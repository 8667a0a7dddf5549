"""digest_cache.py: an unchanged file is not read again. A changed one always is, even with old times."""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rows import for_each

from cloudtrain.errors import StorageError
from cloudtrain.job.job import Job
from cloudtrain.provider_api.protocol import Layout
from cloudtrain.storage import digest_cache
from cloudtrain.storage.digest_cache import KEPT, DigestCache, cache_folder
from cloudtrain.storage.timings import CLIENT_TIMINGS
from cloudtrain.store.store import Store


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture(autouse=True)
def on_a_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Treat the tests' file system as one whose times show each change."""
    monkeypatch.setattr(digest_cache, "_types", lambda: {os.stat(tmp_path).st_dev: "ext4"})


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    folder = tmp_path / "tree"
    folder.mkdir()
    (folder / "a").write_bytes(b"aaaa")
    return folder


def later(tree: Path, cache: Path, seconds: float = 0.0) -> DigestCache:
    """Return the cache as another process sees it, ``seconds`` from now."""
    return DigestCache(tree, folder=cache, clock=lambda: time.time() + seconds)


def found(known: DigestCache, path: Path) -> str | None:
    return known.find(str(path), os.stat(path))


def test_a_file_that_was_read_long_after_its_change_is_known_at_once(tree: Path, tmp_path: Path) -> None:
    first = later(tree, tmp_path / "cache", CLIENT_TIMINGS.digest_settled + 1)
    assert first.of(tree / "a") == digest(b"aaaa")
    first.keep()
    again = later(tree, tmp_path / "cache")
    assert found(again, tree / "a") == digest(b"aaaa")
    assert again.of(tree / "a") == digest(b"aaaa")


def test_a_file_that_was_just_written_is_read_until_its_times_have_settled(tree: Path, tmp_path: Path) -> None:
    """A file system's clock has coarse ticks: a second change may leave the same times."""
    unchanged = CLIENT_TIMINGS.digest_unchanged
    for seconds, expected in ((0.0, None), (0.5, None), (unchanged + 1, None), (unchanged + 2, digest(b"aaaa"))):
        known = later(tree, tmp_path / "cache", seconds)
        assert found(known, tree / "a") == expected
        known.of(tree / "a")
        known.keep()


@pytest.mark.parametrize("how", ["content", "same size and time", "another file"])
def test_a_changed_file_is_read(tree: Path, tmp_path: Path, how: str) -> None:
    known = later(tree, tmp_path / "cache", CLIENT_TIMINGS.digest_settled + 1)
    known.of(tree / "a")
    known.keep()
    before = os.stat(tree / "a")
    time.sleep(0.02)
    if how == "another file":
        (tree / "new").write_bytes(b"bbbb")
        os.replace(tree / "new", tree / "a")
    else:
        (tree / "a").write_bytes(b"bbb" if how == "content" else b"bbbb")
    if how == "same size and time":
        os.utime(tree / "a", ns=(before.st_atime_ns, before.st_mtime_ns))
    known = later(tree, tmp_path / "cache")
    assert found(known, tree / "a") is None
    assert known.of(tree / "a") == digest((tree / "a").read_bytes())


def test_what_is_written_through_a_mapping_is_read(tree: Path, tmp_path: Path) -> None:
    """The first write through a mapping changes the times. Later ones do not until the page is written back."""
    with open(tree / "a", "r+b") as stream, mmap.mmap(stream.fileno(), 0) as mapped:
        for number, seconds in enumerate((0.0, 5.0, 10.0)):
            mapped[0] = 98 + number
            known = later(tree, tmp_path / "cache", seconds)
            assert known.of(tree / "a") == digest((tree / "a").read_bytes())
            known.keep()


@pytest.mark.parametrize(("kind", "expected"), [("ext4", True), ("tmpfs", False), ("nfs4", False), (None, False)])
def test_where_times_do_not_tell_it_is_read(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str | None, expected: bool
) -> None:
    known = later(tree, tmp_path / "cache", CLIENT_TIMINGS.digest_settled + 1)
    known.of(tree / "a")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(digest_cache, "_types", lambda: {os.stat(tree).st_dev: kind} if kind else {})
    assert (found(known, tree / "a") is not None) == expected


def test_no_folder_above_the_cache(tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    known = later(tree, Path("cache"), CLIENT_TIMINGS.digest_settled + 1)
    known.of(tree / "a")
    known.keep()
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_a_file_that_changes_while_it_is_read_is_not_remembered(tree: Path, tmp_path: Path) -> None:
    known = later(tree, tmp_path / "cache", CLIENT_TIMINGS.digest_settled + 1)
    old = os.stat(tree / "a")
    time.sleep(0.02)
    (tree / "a").write_bytes(b"bbbb")
    assert known.of(tree / "a", old) == digest(b"bbbb")
    assert found(known, tree / "a") is None


@given(st.data())
def test_whatever_stands_in_the_cache_a_wrong_shape_is_no_answer(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    base = tmp_path_factory.mktemp("shape")
    (base / "a").write_bytes(b"aaaa")
    known = later(base, base / "x" / "cache", CLIENT_TIMINGS.digest_settled + 1)
    (base / "x").mkdir()
    known.of(base / "a")
    known.keep()
    (file,) = (base / "x" / "cache").iterdir()
    value = data.draw(st.recursive(st.none() | st.integers() | st.text(max_size=3), st.lists, max_leaves=6))
    where = data.draw(st.sampled_from(["all", "files", "entry", "looks", "cut"]))
    content = json.loads(file.read_bytes())
    if where == "files":
        content["files"] = value
    elif where == "entry":
        content["files"]["a"] = value
    elif where == "looks":
        content["files"]["a"][0] = value
    text = json.dumps(value if where == "all" else content)
    file.write_text(text[: len(text) // 2] if where == "cut" else text)
    again = later(base, base / "x" / "cache")
    assert found(again, base / "a") is None
    assert again.of(base / "a") == digest(b"aaaa")


def test_no_cache_can_be_written(tree: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for folder in (tmp_path / "file" / "cache", tmp_path / "no" / "home" / ".cache" / "cloudtrain" / "digests"):
        known = DigestCache(tree, folder=folder)
        assert known.of(tree / "a") == digest(b"aaaa")
        known.keep()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "tree"]
    with pytest.raises(FileNotFoundError):
        DigestCache(tree, folder=tmp_path).of(tree / "none")
    with pytest.raises(StorageError):
        DigestCache(tree, folder=tmp_path).of(tree)


def test_files_that_are_gone_and_old_trees_are_forgotten(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    for number in range(KEPT + 5):
        tree = tmp_path / f"tree-{number}"
        tree.mkdir()
        (tree / "a").write_bytes(b"a")
        known = DigestCache(tree, folder=cache)
        known.of(tree / "a")
        known.keep()
    assert len(list(cache.iterdir())) == KEPT


def test_two_may_make_room_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that another process has just removed is skipped. The listing is closed, not left to the garbage
    collector."""
    cache, tree = tmp_path / "cache", tmp_path / "tree"
    cache.mkdir()
    tree.mkdir()
    (tree / "a").write_bytes(b"a")
    for number in range(KEPT + 5):
        (cache / f"{number:032}.json").write_text("{}")
        os.utime(cache / f"{number:032}.json", (number, number))
    real = os.scandir

    @contextlib.contextmanager
    def meanwhile(folder: Path) -> Iterator[list[os.DirEntry[str]]]:
        with real(folder) as items:
            found = sorted(items, key=lambda item: item.name)
        for item in found[1:4]:
            os.unlink(item.path)
        yield found

    known = DigestCache(tree, folder=cache)
    known.of(tree / "a")
    monkeypatch.setattr("cloudtrain.storage.digest_cache.os.scandir", meanwhile)
    known.keep()
    monkeypatch.undo()
    assert len(list(cache.iterdir())) == KEPT


_WRITER = """
import sys
from pathlib import Path
from cloudtrain.storage.digest_cache import DigestCache
for _ in range(20):
    known = DigestCache(Path(sys.argv[1]), folder=Path(sys.argv[2]), clock=lambda: 4e9)
    known._changed = True
    print(known.of(Path(sys.argv[1], "a")))
    known.keep()
"""


@pytest.mark.costly
def test_processes_that_write_at_once_leave_a_whole_file(tree: Path, tmp_path: Path) -> None:
    words = [sys.executable, "-c", _WRITER, str(tree), str(tmp_path / "cache")]
    started = [subprocess.Popen(words, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate(timeout=60)[0].split() for process in started]
    assert said == [[digest(b"aaaa")] * 20] * 2
    assert len(list((tmp_path / "cache").iterdir())) == 1
    assert found(later(tree, tmp_path / "cache"), tree / "a") == digest(b"aaaa")


@for_each(
    ("environ", "platform", "tail"),
    [
        ({"XDG_CACHE_HOME": "/x"}, "linux", "/x/cloudtrain/digests"),
        ({}, "linux", "/.cache/cloudtrain/digests"),
        ({"XDG_CACHE_HOME": "."}, "linux", "/.cache/cloudtrain/digests"),
        ({}, "darwin", "/Library/Caches/cloudtrain/digests"),
        ({"LOCALAPPDATA": "/l"}, "win32", "/l/cloudtrain/digests"),
    ],
)
def test_where_it_lies(environ: dict[str, str], platform: str, tail: str) -> None:
    assert cache_folder(environ, platform).as_posix().endswith(tail)


def test_an_unchanged_tree_is_staged_again_without_being_read(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a client that trusts the cache believes a wrong digest. It finds out before it uploads anything."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    old = time.time() - 10 * CLIENT_TIMINGS.digest_settled
    os.utime(tree / "a", (old, old))
    job, store = Job.make(entry_point="t.py", inputs={"x": str(tree)}), Store(str(tmp_path / "store"))

    def submit() -> tuple[str, int]:
        _, (found,) = store.inputs(job, frozenset({"none"}), run_id="r", cwd=tree)
        layout = Layout(store=store.url, run_id="r", code_digest="c", runtime_digest="d")
        moved = store.stage(layout, archive=lambda: b"", pyz=b"", trees=[found]).data_bytes
        return found.digest, moved

    store.inputs(job, frozenset({"none"}), run_id="r", cwd=tree)
    assert not (tmp_path / "cache").exists(), "a plan writes nothing"
    first = submit()
    assert first[1] == 4
    (cached,) = (tmp_path / "cache" / "cloudtrain" / "digests").iterdir()
    content = json.loads(cached.read_bytes())
    looks, sha256, _, read = content["files"]["a"]
    since = read - CLIENT_TIMINGS.digest_unchanged  # its change time is of now, and cannot be set back
    content["files"]["a"] = [looks, sha256, since, read]
    cached.write_text(json.dumps(content))
    assert submit() == (first[0], 0)
    content["files"]["a"][1] = "f" * 64
    cached.write_text(json.dumps(content))
    with pytest.raises(StorageError, match="a changed while it was being staged"):
        submit()
    assert store.files.names("data/manifests") == [f"{first[0]}.json"]
    assert submit() == (first[0], 0), "it is read again"
