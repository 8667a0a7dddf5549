"""Transfers over broken networks, on S3, Azure Blob and Cloud Storage. Our own S3 fails by itself. Azurite and our own
Cloud Storage run behind a `proxy`, which the checks bypass."""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from faulty_proxy import PLANNED, Proxy
from faulty_s3 import FAULTS, FaultyS3
from hypothesis import given, settings
from hypothesis import strategies as st
from profiles import PROFILE, examples
from servers import AZURITE_ACCOUNT, point_aws_at
from trials import SEED, TRIALS

from cloudtrain.errors import DigestError, StorageError
from cloudtrain.storage import fsspec_backend, obstore_backend, remote
from cloudtrain.storage.errors import Retries
from cloudtrain.storage.files import parallel
from cloudtrain.storage.remote import RemoteFiles

pytestmark = [
    pytest.mark.remote,
    # aiohttp, of connections that were cut while fsspec's loop did not look.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

PIECE, S3_PIECE, SMALL = 1 << 18, 1 << 15, 1 << 12
"""Bytes of one part of obstore's requests, of one on S3, and of a single answer."""
S3_SIZES = st.sampled_from([0, 1, 1000, S3_PIECE - 1, S3_PIECE, S3_PIECE + 1, 200_000])
SIZES = st.sampled_from([0, 1, 1000, SMALL, SMALL + 1, PIECE, PIECE + 1, 3 * PIECE + 7])
SENT = SIZES | st.just((5 << 20) + 1)
"""gcsfs sends more than 5 MiB in parts."""
Plans = st.SearchStrategy[list[str | None]]


def plans(*faults: str | None, most: int) -> Plans:
    return st.lists(st.sampled_from(faults), max_size=most)


@dataclass
class Broken:
    """A tree whose requests get planned faults, and the same without faults.

    - ``moving``, ``creating``: the faults of a transfer and of a creation.
    - ``versions``: what ``key`` held in this trial. Only our own S3 knows what a client has replaced.
    """

    tree: RemoteFiles
    there: RemoteFiles
    server: Proxy | FaultyS3
    moving: Plans
    creating: Plans
    sizes: st.SearchStrategy[int] = SIZES
    sent: st.SearchStrategy[int] = SENT
    trials: int = settings().max_examples if PROFILE == "proof" else examples(15)
    environ: dict[str, str] = field(default_factory=dict)
    versions: list[bytes] = field(default_factory=list)

    def begin(self, data: bytes | None = None) -> None:
        """Begin a trial, with ``data`` as the one content of ``key``."""
        self.there.discard(["key"])
        self.versions = []
        if isinstance(self.server, FaultyS3):
            self.server.clear()
            self.versions = self.server.versions["store/key"] = []
        if data is not None:
            self.write(data)

    def write(self, data: bytes) -> None:
        if isinstance(self.server, Proxy):
            self.versions.append(data)
        self.there.write("key", data)

    def contents(self) -> list[bytes]:
        """Return the versions, with that of a client."""
        now = None if isinstance(self.server, FaultyS3) else self.there.load("key")
        return [*self.versions, *([now.data] if now else [])]

    @contextmanager
    def planned(self, faults: list[str | None], replace: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Give the next requests these faults."""
        name = "faults" if isinstance(self.server, FaultyS3) else "planned"
        setattr(self.server, name, faults)
        if isinstance(self.server, Proxy):
            self.server.replace = replace
        try:
            yield
        finally:
            setattr(self.server, name, [])
            self.server.settle()


@pytest.fixture(params=["s3", "abfs", "gs"])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Broken]:
    of_s3 = request.param == "s3"
    for module, what, value in (
        (obstore_backend, "PIECE", S3_PIECE if of_s3 else PIECE),
        *((obstore_backend, what, 1 << 13) for what in ("CHUNK", "AT_ONCE") if of_s3),
        (remote, "SMALL", SMALL),
        (fsspec_backend, "SMALL", SMALL),
    ):
        monkeypatch.setattr(module, what, value)
    if of_s3:
        with FaultyS3() as server:
            point_aws_at(server.url, monkeypatch, tmp_path / "aws", MAX_ATTEMPTS="1")
            tree = reach("s3://bucket/store")
            moving = plans(*FAULTS, None, most=7)
            creating = plans("refuse", "reset", "lost", "slow", None, most=12)
            yield Broken(tree, tree, server, moving, creating, S3_SIZES, S3_SIZES, settings().max_examples)
            server.shutdown()
        return
    url = request.getfixturevalue("azure_url" if request.param == "abfs" else "gcs_url")
    name = "AZURE_STORAGE_CONNECTION_STRING" if request.param == "abfs" else "STORAGE_EMULATOR_HOST"
    word = os.environ[name]
    target = word if request.param == "gs" else word.partition("BlobEndpoint=")[2].partition(f"/{AZURITE_ACCOUNT}")[0]
    there = reach(url)
    assert there.list() == {}  # opened now, by the environment as set so far
    proxy = Proxy(target, random.Random(SEED), 0, slow=(0.0, 0.05))
    monkeypatch.setenv(name, word.replace(target, proxy.url))
    sleep = asyncio.sleep
    # The clients of the clouds wait for seconds before they try again.
    monkeypatch.setattr(asyncio, "sleep", lambda seconds, *rest: sleep(min(seconds, 0.001), *rest))
    moving = plans(*PLANNED, None, None, most=8)
    creating = plans("refused", "cut before", "answer lost", "slow", None, most=12)
    yield Broken(reach(url), there, proxy, moving, creating, environ={name: os.environ[name]})
    proxy.close()


proxied = pytest.mark.parametrize("place", ["abfs", "gs"], indirect=True)


def reach(url: str, tries: int = 4) -> RemoteFiles:
    return RemoteFiles(url=url, retries=Retries(tries=tries, sleep=lambda _: None))


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def trial(check: Callable[[Broken, Path, st.DataObject], None]) -> Callable[[Broken, Path], None]:
    """Draw values for ``check`` `Broken.trials` times. Behind a proxy these are few, except in the proof."""

    def test(place: Broken, tmp_path: Path) -> None:
        @settings(max_examples=place.trials)
        @given(st.data())
        def attempt(drawn: st.DataObject) -> None:
            check(place, tmp_path, drawn)

        attempt()

    return pytest.mark.proof(test) if PROFILE == "proof" else test


@trial
def test_a_target_holds_the_right_bytes_or_what_it_held(place: Broken, tmp_path: Path, drawn: st.DataObject) -> None:
    faults, size, seed = drawn.draw(place.moving), drawn.draw(place.sizes), drawn.draw(st.integers(0, 99))
    gives_digest, gives_size = drawn.draw(st.booleans()), drawn.draw(st.booleans())
    draw, one_at_a_time = random.Random(seed), threading.Lock()
    place.begin(data := draw.randbytes(size))
    target = tmp_path / "target"
    target.write_bytes(b"old")

    def replace() -> None:
        with one_at_a_time:  # gcsfs sends two requests at once
            place.write(draw.randbytes(size))

    if not gives_digest:  # only a digest shows a changed byte
        faults = [None if fault == "corrupt" else fault for fault in faults]
    with place.planned(faults, replace):
        try:
            place.tree.download(
                "key", target, sha256=digest(data) if gives_digest else None, size=size if gives_size else None
            )
        except (StorageError, DigestError):
            assert target.read_bytes() == b"old"
        else:
            assert target.read_bytes() in ([data] if gives_digest else place.versions)
    assert os.listdir(tmp_path) == ["target"]
    place.tree.download("key", target, sha256=digest(place.versions[-1]))
    assert target.read_bytes() == place.versions[-1]


@trial
def test_a_key_holds_the_whole_file_or_what_it_held(place: Broken, tmp_path: Path, drawn: st.DataObject) -> None:
    faults, size, seed = drawn.draw(place.moving), drawn.draw(place.sent), drawn.draw(st.integers(0, 99))
    place.begin(b"old")
    source = tmp_path / "source"
    source.write_bytes(data := random.Random(seed).randbytes(size))
    with place.planned(faults), suppress(StorageError):
        place.tree.upload(source, "key")
    assert set(place.contents()) <= {b"old", data}
    place.tree.upload(source, "key")
    assert place.there.read("key") == data


@trial
def test_a_creation_has_one_winner_at_most(place: Broken, tmp_path: Path, drawn: st.DataObject) -> None:
    """The creator knows that it has won, also if the answer was lost."""
    faults = drawn.draw(place.creating)
    place.begin()
    won: dict[int, bool | None] = {}

    def create(number: int) -> None:
        tree = reach(place.tree.url, tries=3) if isinstance(place.server, FaultyS3) else place.tree
        try:
            won[number] = tree.create("key", b"content of client %d" % number)
        except StorageError:
            won[number] = None

    with place.planned(list(faults)):
        parallel(create, list(range(3)), jobs=3)
    contents, winners = place.contents(), [number for number, own in won.items() if own]
    assert contents == [b"content of client %d" % number for number in winners] or not winners
    assert len(winners) <= len(contents) <= 1
    assert winners or (None in won.values() and any(faults))
    assert place.there.create("key", b"another") is not bool(contents)


@proxied
@trial
def test_clients_that_push_and_pull_the_same_object_at_once(
    place: Broken, tmp_path: Path, drawn: st.DataObject
) -> None:
    """Two clients push the same file, as they do for one digest, and two pull it. One request in five fails."""
    size, seed = drawn.draw(place.sizes), drawn.draw(st.integers(0, 999))
    place.begin(data := random.Random(seed).randbytes(size))
    (tmp_path / "source").write_bytes(data)
    assert isinstance(place.server, Proxy)
    place.server.draw, place.server.one_in = random.Random(seed), 5

    def move(number: int) -> None:
        with suppress(StorageError, DigestError):
            if number < 2:
                place.tree.upload(tmp_path / "source", "key")
                return
            place.tree.download("key", tmp_path / f"target{number}", size=size if number == 2 else None)

    try:
        parallel(move, list(range(4)), jobs=4)
    finally:
        place.server.one_in = 0
        place.server.settle()
    assert place.there.read("key") == data
    for path in tmp_path.iterdir():
        assert path.read_bytes() == data
        if path.name != "source":
            path.unlink()


KILLED = f"""
import sys
from pathlib import Path
from cloudtrain.storage import obstore_backend
from cloudtrain.storage.files import files
obstore_backend.PIECE = {PIECE}
url, folder = sys.argv[1:]
tree = files(url)
tree.list()
print("begun", flush=True)
for number in range(1000):
    tree.upload(Path(folder, "source"), f"pushed/{{number}}")
    tree.download("key", Path(folder, f"pulled-{{number}}"), size=Path(folder, "source").stat().st_size)
"""


@proxied
@pytest.mark.parametrize(
    "trials", [1, pytest.param(max(2, TRIALS // 20), marks=pytest.mark.proof)], ids=["few", "proof"]
)
def test_kill_nine_at_any_byte(place: Broken, tmp_path: Path, trials: int) -> None:
    draw = random.Random(SEED)
    data = draw.randbytes((6 << 20) + 1)
    came = 0
    place.there.write("key", data)
    (tmp_path / "source").write_bytes(data)
    command = [sys.executable, "-c", KILLED, place.there.url, str(tmp_path)]
    for _ in range(trials):
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env={**os.environ, **place.environ}
        ) as client:
            assert client.stdout is not None
            assert client.stdout.readline() == "begun\n"
            time.sleep(draw.uniform(0, 0.8))
            client.send_signal(signal.SIGKILL)
        pulled = list(tmp_path.glob("pulled-*"))
        for key in place.there.list("pushed"):
            assert place.there.read(key) == data
        for path in pulled:
            assert path.read_bytes() == data
        came += len(pulled)
        # A second run finishes the job.
        place.tree.upload(tmp_path / "source", "pushed/0")
        place.tree.download("key", tmp_path / "pulled-0", size=len(data))
        assert place.there.read("pushed/0") == (tmp_path / "pulled-0").read_bytes() == data
        place.there.remove("pushed")
        for path in tmp_path.iterdir():
            if path.name != "source":
                path.unlink()
    assert came or trials == 1
