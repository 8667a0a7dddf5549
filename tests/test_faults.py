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
from faulty import FAULTS, FaultyS3
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from profiles import PROFILE, examples
from proxy import PLANNED, Proxy
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

PIECE, SMALL, CHUNK = 1 << 16, 1 << 12, 1 << 13
"""Bytes of one part of obstore's requests, of a single answer, and of one read."""

plans = st.lists(st.integers(0, 10), max_size=8)
"""Numbers of faults of a place. A number without a fault is no fault."""
LARGE = 6 * PIECE + 7
sizes = st.sampled_from([0, 1, 1000, SMALL, SMALL + 1, PIECE - 1, PIECE, PIECE + 1, LARGE])
sent = sizes | st.just((5 << 20) + 1)
"""gcsfs sends more than 5 MiB in parts. The other clients do so above `PIECE`: they get `LARGE` instead."""
trial = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
long_trial = settings(trial, max_examples=trial.max_examples if PROFILE == "proof" else examples(15))


@dataclass
class Broken:
    """A tree whose requests get planned faults, and the same without faults.

    ``faults`` and ``creating`` name the faults of a transfer and of a creation.
    """

    tree: RemoteFiles
    there: RemoteFiles
    server: Proxy | FaultyS3
    faults: tuple[str, ...]
    creating: tuple[str, ...]
    environ: dict[str, str] = field(default_factory=dict)
    written: list[bytes] = field(default_factory=list)

    def begin(self, data: bytes | None = None) -> None:
        """Begin a trial, with ``data`` as the one content of ``key``."""
        self.there.discard(["key"])
        if isinstance(self.server, FaultyS3):
            self.server.clear()
        self.written = []
        if data is not None:
            self.write(data)

    def write(self, data: bytes) -> None:
        self.written.append(data)
        self.there.write("key", data)

    def contents(self) -> list[bytes]:
        """Return the contents of ``key`` in this trial. Only our own S3 knows those that a client has replaced."""
        if isinstance(self.server, FaultyS3):
            return self.server.versions.get("store/key", [])
        now = self.there.load("key")
        return [*self.written, *([now.data] if now else [])]

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
    for module, what, value in (
        (obstore_backend, "PIECE", PIECE),
        (obstore_backend, "CHUNK", CHUNK),
        (obstore_backend, "AT_ONCE", CHUNK),
        (remote, "SMALL", SMALL),
        (fsspec_backend, "SMALL", SMALL),
    ):
        monkeypatch.setattr(module, what, value)
    if request.param == "s3":
        with FaultyS3() as server:
            point_aws_at(server.url, monkeypatch, tmp_path / "aws", MAX_ATTEMPTS="1")
            tree = reach("s3://bucket/store")
            yield Broken(tree, tree, server, FAULTS, ("refuse", "reset", "lost", "slow"))
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
    creating = ("refused", "cut before", "answer lost", "slow")
    yield Broken(reach(url), there, proxy, PLANNED, creating, {name: os.environ[name]})
    proxy.close()


proxied = pytest.mark.parametrize("place", ["abfs", "gs"], indirect=True)


def reach(url: str) -> RemoteFiles:
    return RemoteFiles(url=url, retries=Retries(sleep=lambda _: None))


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def named(numbers: list[int], faults: tuple[str, ...]) -> list[str | None]:
    return [faults[number] if number < len(faults) else None for number in numbers]


@trial
@given(numbers=plans, size=sizes, promised=st.booleans(), told=st.booleans(), seed=st.integers(0, 99))
def test_a_target_holds_the_right_bytes_or_what_it_held(
    place: Broken, tmp_path: Path, numbers: list[int], size: int, promised: bool, told: bool, seed: int
) -> None:
    draw, one_at_a_time = random.Random(seed), threading.Lock()
    place.begin(data := draw.randbytes(size))
    target = tmp_path / "target"
    target.write_bytes(b"old")

    def replace() -> None:
        with one_at_a_time:  # gcsfs sends two requests at once
            place.write(draw.randbytes(size))

    faults = named(numbers, place.faults)
    if not promised:  # only a digest shows a changed byte
        faults = [None if fault == "corrupt" else fault for fault in faults]
    with place.planned(faults, replace):
        try:
            place.tree.download("key", target, sha256=digest(data) if promised else None, size=size if told else None)
        except (StorageError, DigestError):
            assert target.read_bytes() == b"old"
        else:
            assert target.read_bytes() in ([data] if promised else place.contents())
    assert os.listdir(tmp_path) == ["target"]
    now = place.there.read("key")
    place.tree.download("key", target, sha256=digest(now))
    assert target.read_bytes() == now


@trial
@given(numbers=plans, size=sent, seed=st.integers(0, 99))
def test_a_key_holds_the_whole_file_or_what_it_held(
    place: Broken, tmp_path: Path, numbers: list[int], size: int, seed: int
) -> None:
    place.begin(b"old")
    source = tmp_path / "source"
    size = size if place.tree.url.startswith("gs:") else min(size, LARGE)
    source.write_bytes(data := random.Random(seed).randbytes(size))
    with place.planned(named(numbers, place.faults)), suppress(StorageError):
        place.tree.upload(source, "key")
    assert set(place.contents()) <= {b"old", data}
    place.tree.upload(source, "key")
    assert place.there.read("key") == data


@trial
@given(numbers=st.lists(st.integers(0, 4), max_size=12))
def test_a_creation_has_one_winner_at_most(place: Broken, numbers: list[int]) -> None:
    """The creator knows that it has won, also if the answer was lost."""
    place.begin()
    won: dict[int, bool | None] = {}

    def create(number: int) -> None:
        try:
            won[number] = place.tree.create("key", b"content of client %d" % number)
        except StorageError:
            won[number] = None

    faults = named(numbers, place.creating)
    with place.planned(list(faults)):
        parallel(create, list(range(3)), jobs=3)
    contents, winners = place.contents(), [number for number, own in won.items() if own]
    assert contents == [b"content of client %d" % number for number in winners] or not winners
    assert len(winners) <= len(contents) <= 1
    assert winners or (None in won.values() and any(faults))
    assert place.there.create("key", b"another") is not bool(contents)


@proxied
@long_trial
@given(size=sizes, seed=st.integers(0, 999))
def test_clients_that_push_and_pull_the_same_object_at_once(
    place: Broken, tmp_path: Path, size: int, seed: int
) -> None:
    """Two clients push the same file, as they do for one digest, and two pull it. One request in five fails."""
    data = random.Random(seed).randbytes(size)
    place.begin(data)
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


KILLED = """
import sys
from pathlib import Path
from cloudtrain.storage import obstore_backend
from cloudtrain.storage.files import files
obstore_backend.PIECE = 1 << 18
url, folder = sys.argv[1:]
tree = files(url)
tree.list()
print("begun", flush=True)
for number in range(1000):
    tree.upload(Path(folder, "source"), f"pushed/{number}")
    tree.download("key", Path(folder, f"pulled-{number}"), size=Path(folder, "source").stat().st_size)
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
