"""Transfers over broken networks, on Azure Blob and Cloud Storage; `test_objects` covers S3. Azurite and our own Cloud
Storage run behind a `proxy`. The checks bypass the proxy."""

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
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from profiles import PROFILE, examples
from proxy import PLANNED, Proxy
from servers import AZURITE_ACCOUNT
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

PIECE, SMALL = 1 << 18, 1 << 12
"""Bytes of one part of obstore's requests, and of a single answer."""

plans = st.lists(st.sampled_from([*PLANNED, None, None]), max_size=8)
sizes = st.sampled_from([0, 1, 1000, SMALL, SMALL + 1, PIECE, PIECE + 1, 3 * PIECE + 7])
sent = sizes | st.just((5 << 20) + 1)
"""gcsfs sends more than 5 MiB in parts."""
trial = settings(
    max_examples=settings().max_examples if PROFILE == "proof" else examples(15),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
"""Each is some round trips through a proxy that breaks them: few in the suite, all in the proof."""


@dataclass
class Broken:
    """A tree behind a proxy, and the same past it."""

    scheme: str
    tree: RemoteFiles
    there: RemoteFiles
    proxy: Proxy
    environ: dict[str, str] = field(default_factory=dict)


@pytest.fixture(params=["abfs", "gs"])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Broken]:
    scheme = request.param
    url = request.getfixturevalue("azure_url" if scheme == "abfs" else "gcs_url")
    name = "AZURE_STORAGE_CONNECTION_STRING" if scheme == "abfs" else "STORAGE_EMULATOR_HOST"
    word = os.environ[name]
    server = word if scheme == "gs" else word.partition("BlobEndpoint=")[2].partition(f"/{AZURITE_ACCOUNT}")[0]
    for module, what, value in (
        (obstore_backend, "PIECE", PIECE),
        (remote, "SMALL", SMALL),
        (fsspec_backend, "SMALL", SMALL),
    ):
        monkeypatch.setattr(module, what, value)
    there = reach(url)
    assert there.list() == {}  # opened now, by the environment as set so far
    proxy = Proxy(server, random.Random(SEED), 0, slow=(0.0, 0.05))
    monkeypatch.setenv(name, word.replace(server, proxy.url))
    sleep = asyncio.sleep
    # The clients of the clouds wait for seconds before they try again.
    monkeypatch.setattr(asyncio, "sleep", lambda seconds, *rest: sleep(min(seconds, 0.001), *rest))
    yield Broken(scheme, reach(url), there, proxy, {name: os.environ[name]})
    proxy.close()


def reach(url: str) -> RemoteFiles:
    return RemoteFiles(url=url, retries=Retries(sleep=lambda _: None))


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@contextmanager
def planned(proxy: Proxy, faults: list[str | None]) -> Iterator[None]:
    proxy.planned = list(faults)
    try:
        yield
    finally:
        proxy.planned = []
        proxy.settle()
        proxy.replace = lambda: None


@trial
@given(faults=plans, size=sizes, promised=st.booleans(), told=st.booleans(), seed=st.integers(0, 99))
def test_a_target_holds_the_right_bytes_or_what_it_held(
    place: Broken, tmp_path: Path, faults: list[str | None], size: int, promised: bool, told: bool, seed: int
) -> None:
    if not promised:  # a changed byte is known by a digest alone
        faults = [None if fault == "corrupt" else fault for fault in faults]
    draw = random.Random(seed)
    versions = [draw.randbytes(size)]
    place.there.write("key", versions[0])
    target = tmp_path / "target"
    target.write_bytes(b"old")

    one_at_a_time = threading.Lock()

    def replace() -> None:
        with one_at_a_time:  # gcsfs sends two requests at once
            versions.append(draw.randbytes(size))
            place.there.write("key", versions[-1])

    place.proxy.replace = replace
    sha256, length = (digest(versions[0]) if promised else None), (size if told else None)
    with planned(place.proxy, faults):
        try:
            place.tree.download("key", target, sha256=sha256, size=length)
        except (StorageError, DigestError):
            assert target.read_bytes() == b"old"
        else:
            assert target.read_bytes() in (versions[:1] if promised else versions)
    assert os.listdir(tmp_path) == ["target"]
    place.tree.download("key", target, sha256=digest(versions[-1]))
    assert target.read_bytes() == versions[-1]


@trial
@given(faults=plans, size=sent, seed=st.integers(0, 99))
def test_a_key_holds_the_whole_file_or_what_it_held(
    place: Broken, tmp_path: Path, faults: list[str | None], size: int, seed: int
) -> None:
    place.there.write("key", b"old")
    source = tmp_path / "source"
    source.write_bytes(data := random.Random(seed).randbytes(size))
    with planned(place.proxy, faults), suppress(StorageError):
        place.tree.upload(source, "key")
    assert place.there.read("key") in (b"old", data)
    place.tree.upload(source, "key")
    assert place.there.read("key") == data


@trial
@given(faults=st.lists(st.sampled_from(["refused", "cut before", "answer lost", "slow", None]), max_size=12))
def test_a_creation_has_one_winner_at_most(place: Broken, faults: list[str | None]) -> None:
    place.there.remove("run.json")
    told: dict[int, bool | None] = {}

    def create(number: int) -> None:
        try:
            told[number] = place.tree.create("run.json", b"%d" % number)
        except StorageError:
            told[number] = None

    with planned(place.proxy, faults):
        parallel(create, list(range(3)), jobs=3)
    winners = [number for number, won in told.items() if won]
    assert len(winners) <= 1
    assert winners or any(faults)
    if winners:
        assert place.there.read("run.json") == b"%d" % winners[0]


@trial
@given(size=sizes, seed=st.integers(0, 999))
def test_clients_that_push_and_pull_the_same_object_at_once(
    place: Broken, tmp_path: Path, size: int, seed: int
) -> None:
    """Two clients push the same file, as they do for one digest, and two pull it. One request in five fails."""
    data = random.Random(seed).randbytes(size)
    place.there.write("key", data)
    (tmp_path / "source").write_bytes(data)
    place.proxy.draw, place.proxy.one_in = random.Random(seed), 5

    def move(number: int) -> None:
        with suppress(StorageError, DigestError):
            if number < 2:
                place.tree.upload(tmp_path / "source", "key")
                return
            place.tree.download("key", tmp_path / f"target{number}", size=size if number == 2 else None)

    try:
        parallel(move, list(range(4)), jobs=4)
    finally:
        place.proxy.one_in = 0
        place.proxy.settle()
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
