"""The contract of `Files`: a folder, memory, S3, Azure Blob, Cloud Storage, OBS, and a file system of a third party."""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rows import for_each
from servers import race
from third_party_fs import EXCLUSIVE, PLAIN
from worlds.vertex.gcs import Gcs

from cloudtrain.errors import DigestError, StorageError
from cloudtrain.job.job import Job
from cloudtrain.provider_api.protocol import Layout, Request
from cloudtrain.runs.pull import pull
from cloudtrain.storage.errors import CannotSwapError, FinalError, classify
from cloudtrain.storage.files import Files, LocalFiles, files, parallel
from cloudtrain.storage.local_disk import inside, safe, walk
from cloudtrain.storage.remote import RemoteFiles
from cloudtrain.store.store import Staged, Store

# aiohttp warns of a body above 1 MiB, and gcsfs sends such bodies.
pytestmark = pytest.mark.filterwarnings("ignore:Sending a large body directly:ResourceWarning")

SERVED = ("s3", "azure", "gcs", "obs")
SWAPPING = ("folder", "memory", "s3", "azure", "gcs")
"""Kinds that replace a file only while it is unchanged. The others only create exclusively."""
LARGE = (9 << 20) + 3
"""Bytes of a file that every client sends and fetches in parts."""


def params(*kinds: str) -> list[Any]:
    here = ("folder", "memory")
    return [kind if kind in here else pytest.param(kind, marks=pytest.mark.remote) for kind in kinds]


def on(*kinds: str) -> pytest.MarkDecorator:
    """Run a test on trees of these kinds alone."""
    return pytest.mark.parametrize("tree", params(*kinds), indirect=True)


@pytest.fixture(params=params("folder", "memory", *SERVED, "plain"))
def tree(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Files:
    """Return an empty tree of each kind in turn."""
    if request.param == "folder":
        return files(f"file://{tmp_path_factory.mktemp('folder')}/store")
    if request.param == "memory":
        return files(f"memory://{uuid.uuid4().hex}/store")  # one file system for the whole process
    if request.param == "plain":
        return files(request.getfixturevalue("plain")(PLAIN + EXCLUSIVE))
    return files(request.getfixturevalue(f"{request.param}_url"))


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


HOSTILE = [
    "..", "../x", "a/../../x", "/etc/x", "a//b", "a/./b", "a/", ".", "C:/x", "c:x", "a\\b", "..\\x", "a\0b",
    "\\\\h\\s",
]  # fmt: skip


@for_each("key", HOSTILE)
def test_hostile_keys_are_refused(tree: Files, tmp_path: Path, key: str) -> None:
    assert not safe(key)
    for attempt in (
        tree.read,
        tree.size,
        tree.names,
        tree.remove,
        lambda k: tree.write(k, b""),
        lambda k: tree.create(k, b""),
        lambda k: tree.copy("a", k),
        lambda k: tree.discard([k]),
        lambda k: inside(tmp_path, k),
    ):
        with pytest.raises(StorageError, match="unsafe path"):
            attempt(key)


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


@on(*SWAPPING, "obs")
def test_a_rewrite_has_another_version(tree: Files) -> None:
    tree.write("key", b"one")
    before = tree.entries()["key"]
    assert tree.entries()["key"] == before
    tree.write("key", b"two")
    after = tree.entries()["key"]
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
    """Test the store's own refusal too, without our check before it: the table of errors knows it."""
    assert tree.create("runs/a/run.json", b"mine") is True
    assert tree.create("runs/a/run.json", b"theirs") is False
    assert tree.read("runs/a/run.json") == b"mine"
    swap = tree._open().mover.swap if isinstance(tree, RemoteFiles) else tree.swap
    with pytest.raises(Exception, match=r".*") as caught:
        swap("runs/a/run.json", None, b"theirs")
    assert classify(caught.value) == "taken"
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


def content(tree: Files, key: str) -> tuple[bytes, str]:
    loaded = tree.load(key)
    assert loaded is not None
    if not tree.url.startswith("plain:"):  # its listings have no times
        assert abs(loaded.modified - time.time()) < 60
    return loaded.data, loaded.version


def test_swap_replaces_one_version_once(tree: Files) -> None:
    kind, why = FileExistsError, "File exists"
    if not tree.swaps:
        kind, why = CannotSwapError, "a/key: (OBS|PlainFileSystem) cannot replace a file only while it is unchanged"
    refused = pytest.raises(kind, match=why)
    assert tree.load("a/key") is None
    none = {"s3": '"0"', "abfs": '"0"', "gs": "1"}.get(tree.url.partition(":")[0], "0")  # a version that never was
    with refused:
        tree.swap("a/key", none, b"0")
    first = tree.swap("a/key", None, b"1")
    with pytest.raises(FileExistsError):
        tree.swap("a/key", None, b"2")
    assert content(tree, "a/key")[0] == b"1"
    if tree.swaps:
        assert content(tree, "a/key") == (b"1", first)
        second = tree.swap("a/key", first, b"2")
        with pytest.raises(FileExistsError):
            tree.swap("a/key", None, b"3")
        assert content(tree, "a/key") == (b"2", second)
    with refused:
        tree.swap("a/key", first, b"3")
    assert tree.list() == {"a/key": 1}
    assert tree.read("a/key") == (b"2" if tree.swaps else b"1")


@on(*SWAPPING)
def test_a_swap_of_many_threads_is_one_s(tree: Files) -> None:
    """All contents differ, as `Files.swap` requires."""
    trees = [files(tree.url) for _ in range(4)]
    version = tree.swap("key", None, b"0")
    for attempt in range(12):

        def swap(one: Files, number: int, attempt: int = attempt, version: str = version) -> str | None:
            try:
                return one.swap("key", version, f"{attempt} {number}".encode())
            except FileExistsError:
                return None

        made = at_once(trees, swap)
        (version,) = filter(None, made)
        assert tree.read("key") == f"{attempt} {made.index(version)}".encode()


#: For `race`: create ``argv[2]`` files in the store ``argv[1]``, and print which ones succeed. Then count to
#: ``argv[3]`` in the file ``n`` by swaps alone, and print how often this process was first.
RACER = """
import errno, os
from cloudtrain.storage.files import files

def no_links(source, target):
    raise OSError(errno.EPERM, "no hard links here")

url, keys, most, linkless, number = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] != "", sys.argv[5]
if linkless:
    os.link = no_links
tree, made, won = files(url), [], 0
tree.load("n")
ready()
for key in range(keys):
    if tree.create(f"attempts/{key}/request.json", f"{number} ".encode() * 50_000):
        made.append(key)
    content = tree.read(f"attempts/{key}/request.json")
    # Without hard links, a reader may meet the winner still writing; never a mixture.
    assert linkless or len(content) >= 100_000
    assert len(set(content.split())) <= 1
while True:
    found = tree.load("n")
    count = int(found.data) if found else 0
    if count >= most:
        break
    try:
        tree.swap("n", found and found.version, str(count + 1).encode())
        won += 1
    except FileExistsError:
        pass
print(json.dumps([made, won]))
"""


@pytest.mark.parametrize(
    ("tree", "linkless", "count", "keys", "most"),
    [
        ("folder", "", 6, 30, 0),
        ("folder", "linkless", 6, 30, 0),
        ("folder", "", 4, 0, 300),
    ],
    indirect=["tree"],
)
@pytest.mark.slow
def test_one_of_many_processes_creates_and_swaps(tree: Files, linkless: str, count: int, keys: int, most: int) -> None:
    made, won = zip(*race(RACER, tree.url, str(keys), str(most), linkless, count=count), strict=True)
    assert sorted(key for own in made for key in own) == list(range(keys))
    for number, own in enumerate(made):
        for key in own:
            assert tree.read(f"attempts/{key}/request.json") == f"{number} ".encode() * 50_000
    assert sum(won) == most
    assert not most or tree.read("n") == str(most).encode()
    if isinstance(tree, LocalFiles):
        left = {path.relative_to(tree.root).as_posix() for path in tree.root.rglob("*") if path.is_file()}
        assert left == set(tree.list()), "no lock and no unfinished file"
    assert len(tree.list()) == keys + bool(most)


@pytest.mark.remote
def test_gcs_sends_the_precondition_and_believes_the_answer(gcs_server: Gcs, gcs_url: str) -> None:
    """The other creator comes between our check and our write: only the server's 412 reveals it."""
    tree = files(gcs_url)
    gcs_server.before = lambda bucket, name: gcs_server.put(bucket, name, b"theirs")
    assert tree.create("run.json", b"mine") is False
    uploads = lambda: [call.query for call in gcs_server.wire.calls if call.operation == "POST object"]  # noqa: E731
    assert [query["ifGenerationMatch"] for query in uploads()] == ["0"]
    assert tree.read("run.json") == b"theirs"
    gcs_server.before = lambda bucket, name: None
    tree.write("run.json", b"plain")
    assert "ifGenerationMatch" not in uploads()[-1]


# -------------------------------------------------------------------------------------------------------------- servers


@on(*SERVED)
def test_a_missing_bucket_is_said_to_be_missing(tree: Files, tmp_path: Path) -> None:
    tree = files(f"{tree.url.split('://')[0]}://no-such-bucket/store")
    (tmp_path / "file").write_bytes(b"x")
    for attempt in (
        tree.list,
        tree.names,
        lambda: tree.write("key", b"x"),
        lambda: tree.create("key", b"x"),
        lambda: tree.upload(tmp_path / "file", "key"),
        lambda: tree.swap("key", None, b"1"),
    ):
        with pytest.raises(FinalError, match=r"no-such-bucket/store: the bucket or container does not exist"):
            attempt()
    assert tree.size("key") is None


@on("s3", "azure")
def test_more_than_a_thousand_files(tree: Files) -> None:
    parallel(lambda i: tree.write(f"many/{i % 3}/{i}", b"x"), list(range(1100)), jobs=16)
    assert len(tree.list("many")) == 1100
    assert len(tree.names("many/0")) == 367
    assert tree.names("many") == ["0", "1", "2"]


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


# -------------------------------------------------------------------------------------------------- a store and its run


@on("s3", "azure", "gcs", "plain")
def test_a_run_from_stage_to_pull(tree: Files, tmp_path: Path) -> None:
    (tmp_path / "data" / "sub").mkdir(parents=True)
    data = os.urandom(1 << 20)
    for name in ("sub/x", "copy"):
        (tmp_path / "data" / name).write_bytes(data)
    job = Job.make(entry_point="train.py", inputs={"train": "data", "val": "s3://b/val.csv"})
    schemes = frozenset({"s3", "gs", "abfs"})
    uploaded = []
    for name in ("one", "two", "one"):  # each is another client
        store = Store(tree.url)
        placed, trees = store.inputs(job, schemes, run_id="r", cwd=tmp_path)
        assert placed["train"].url == f"{store.url}/data/{trees[0].digest}"
        layout = Layout(store=store.url, run_id=name, code_digest="c0de", runtime_digest="f00d", inputs=placed)
        staged = store.stage(layout, archive=lambda: b"code", pyz=b"pyz", trees=trees)
        uploaded.append((staged, store.create_run(layout, {"job": {}})))
    whole = Staged(code_bytes=4, runtime_bytes=3, data_bytes=2 << 20)
    assert uploaded == [(whole, True), (Staged(), True), (Staged(), False)]
    assert store.files.names("staging") == []
    (tmp_path / "data" / "y").write_bytes(b"56")
    _, grown = store.inputs(job, schemes, run_id="r", cwd=tmp_path)
    moved = store.stage(layout, archive=lambda: b"no", pyz=b"no", trees=grown).data_bytes
    assert moved == (2 if store.files.copies else (2 << 20) + 2)
    assert store.files.read(f"data/{grown[0].digest}/sub/x") == data
    assert store.create_attempt("one", 0, REQUEST)
    assert not store.create_attempt("one", 0, REQUEST)
    assert store.attempt_request("one", 0) == REQUEST
    store.write_container(layout, {"protocol": 1}, b"key")
    assert (store.runs(), store.attempts("one")) == (["one", "two"], [0])
    _check_pull(store, "one", tmp_path / "out")


REQUEST = Request(provider="p", operation="create", body={}, context={}, run="s3://b/runs/one")


def _check_pull(store: Store, run_id: str, out: Path) -> None:
    folder, sha256 = f"runs/{run_id}/live", hashlib.sha256(b"abc").hexdigest()
    listed = {"node-0/step-3/model.pt": {"size": 3, "sha256": sha256}}
    commit = {"protocol": 1, "name": "step-3", "attempt": "0.0", "seq": 0, "nodes": 1, "time": 1.0, "files": listed}
    for key, data in {
        "checkpoints/step-3/0.0-0/node-0/step-3/model.pt": b"abc",
        "checkpoints/step-3/0.0-0/commit.json": json.dumps(commit).encode(),
        "artifacts/node-0/a": b"weights",
        "artifacts/node-1/a": b"weights",
        "logs/0.0/node-0/0.log": b"line\n",
        "metrics/0.0-node-0.jsonl": b'{"step": 1}\n',
    }.items():
        store.files.write(f"{folder}/{key}", data)
    newest = store.newest_checkpoint(run_id)
    assert newest is not None
    assert newest.step == 3
    pulled = {"artifacts/a", "checkpoints/step-3/model.pt", "logs/0.0/node-0.log", "metrics.jsonl", "run.json"}
    assert set(pull(store, run_id, out).files) == pulled
    assert (out / "checkpoints/step-3/model.pt").read_bytes() == b"abc"
    assert pull(store, run_id, out).transferred == 0
    time.sleep(1.1)  # S3's times are whole seconds; times decide where digests are equal
    # Without versions and times, only the size shows a change.
    newer = b"WEIGHTS" if store.files.entries()[f"{folder}/artifacts/node-0/a"].version else b"more weights"
    store.files.write(f"{folder}/artifacts/node-0/a", newer)
    pull(store, run_id, out)
    assert (out / "artifacts" / "a").read_bytes() == newer
    assert (out / "artifacts" / "node-1" / "a").read_bytes() == b"weights"
