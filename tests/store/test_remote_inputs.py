"""copies.py: inputs of one store copied into a run of another, as a stream, with changes and interruptions."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import foldercloud
import pytest
from faulty_s3 import FaultyS3
from fsspec.implementations.memory import MemoryFileSystem
from servers import Web, point_aws_at
from trials import SEED, TRIALS

from cloudtrain import Estimator
from cloudtrain.errors import AuthError, ConflictError, SpecError, StorageError
from cloudtrain.job.job import Job
from cloudtrain.provider_api.protocol import Layout
from cloudtrain.runs.listing import list_page
from cloudtrain.storage import remote
from cloudtrain.storage.errors import CannotSwapError
from cloudtrain.storage.files import TransferOptions, files, parallel
from cloudtrain.storage.remote import RemoteFiles
from cloudtrain.storage.timings import CLIENT_TIMINGS
from cloudtrain.store.copies import PreviousPlace, copy_inputs
from cloudtrain.store.store import Store
from cloudtrain.validate import without_secrets

pytestmark = [
    pytest.mark.remote,
    pytest.mark.filterwarnings("ignore:Sending a large body directly:ResourceWarning"),
]

MIB = 1 << 20
FILES = {"a.bin": 20 * MIB + 3, "sub/b.bin": 8 * MIB, "sub/c d+%.txt": 5, "empty": 0}
PAIRS = [
    *(("s3", "azure"), ("azure", "gcs"), ("gcs", "s3")),  # each once as source and as target
    *(pytest.param(pair, marks=pytest.mark.proof) for pair in (("s3", "gcs"), ("azure", "s3"))),
]
#: By which scheme nodes read each kind of store.
SCHEMES = {"s3": "s3", "gcs": "gs", "azure": "abfs"}


class Place:
    """Data at ``source``, which no node reads, and the store that has a copy of it."""

    def __init__(self, source: str, store: str) -> None:
        self.source, self.schemes = source, frozenset({store.partition(":")[0]})
        self.store = Store(store)

    def layout(self, run_id: str = "run-1", url: str = "") -> Layout:
        job = Job.from_dict({"entry_point": "train.py", "inputs": {"train": url or self.source}})
        placed, trees = self.store.inputs(job, self.schemes, run_id=run_id, cwd=Path.cwd())
        assert trees == []
        return Layout(store=self.store.url, run_id=run_id, code_digest="c0de", runtime_digest="f00d", inputs=placed)

    def bring(self, run_id: str = "run-1", **given: Any) -> int:
        return copy_inputs(self.store, self.layout(run_id), **given)

    def copied(self, run_id: str = "run-1") -> dict[str, bytes]:
        tree = files(self.layout(run_id).inputs["train"].url)
        return {key: tree.read(key) for key in tree.list()}

    def record(self, name: str, run_id: str = "run-1") -> Any:
        return json.loads(self.store.files.read(f"runs/{run_id}/inputs/train/{name}.json"))["files"]


@pytest.fixture(params=PAIRS, ids="-to-".join)
def place(request: pytest.FixtureRequest) -> Place:
    source, target = request.param
    return Place(request.getfixturevalue(f"{source}_url") + "/set", request.getfixturevalue(f"{target}_url"))


def fill(url: str) -> dict[str, bytes]:
    tree, data = files(url), {name: os.urandom(size) for name, size in FILES.items()}
    for name, content in data.items():
        tree.write(name, content)
    return data


def test_a_tree_is_copied_into_its_run_and_no_other(place: Place) -> None:
    data, tree = fill(place.source), files(place.source)
    messages: list[str] = []
    moved: dict[str, int] = {}

    def progress(key: str, count: int) -> None:
        moved[key] = moved.get(key, 0) + count

    assert place.bring(progress=progress, say=messages.append) == sum(FILES.values())
    assert messages == [f"copying train from {place.source}"]
    assert sorted(moved.values()) == sorted(size for size in FILES.values() if size)
    assert place.copied() == data
    assert place.layout().inputs["train"].url == f"{place.store.url}/runs/run-1/inputs/train/data"
    assert place.record("digests") == {name: hashlib.sha256(content).hexdigest() for name, content in data.items()}
    assert {name: item["size"] for name, item in place.record("listing").items()} == FILES
    assert place.bring(say=messages.append) == 0, "again, after a crash"
    assert len(messages) == 1
    tree.write("sub/b.bin", b"other")
    tree.remove("empty")
    with pytest.raises(
        ConflictError, match=r"inputs.train: .*/set has changed since its copy for run run-1 began"
    ) as no:
        place.bring()
    assert no.value.hint == "send the job again with another --run-id"
    assert place.copied() == data
    assert place.bring("run-2") == FILES["a.bin"] + 5 + 5
    assert place.copied("run-2") == {**{k: v for k, v in data.items() if k != "empty"}, "sub/b.bin": b"other"}


def test_one_file_of_a_web_server(s3_url: str, web: Web) -> None:
    """Python's server has no ranges."""
    for run_id, name, size in (("run-1", "x.csv.gz", 1000), ("run-2", "large.bin", 9 * MIB + 7)):
        web.write(f"data/{name}", data := os.urandom(size))
        place = Place(f"{web.url}/data/{name}?signature=s%2F//3cret", s3_url)
        item = place.layout(run_id).inputs["train"]
        assert (item.file, item.source) == (name, place.source)
        assert item.url == f"{place.store.url}/runs/{run_id}/inputs/train/data/{name}"
        assert place.bring(run_id) == size
        assert place.bring(run_id) == 0
        assert files(item.url.rpartition("/")[0]).read(name) == data
        assert "s3cret" not in place.store.files.read(f"runs/{run_id}/inputs/train/listing.json").decode()
    with pytest.raises(SpecError, match="names no file"):
        Place(f"{web.url}/data", s3_url).layout()
    with pytest.raises(SpecError, match=r"inputs.train: there is no file http.*nothing.csv"):
        Place(f"{web.url}/data/nothing.csv", s3_url).bring()
    with pytest.raises(StorageError, match=r"refused|[Cc]onnect"):
        Place("http://127.0.0.1:9/x.csv", s3_url).bring()


def test_what_is_no_tree_or_no_file_is_said(gcs_url: str, s3_url: str) -> None:
    tree = files(gcs_url)
    tree.write("set/LICENSE", b"1")
    tree.write("odd.v2/a", b"1")
    with pytest.raises(SpecError, match=r"inputs.train: .*/LICENSE holds no file\nhint: for a single file, give"):
        Place(f"{gcs_url}/set/LICENSE", s3_url).bring()
    with pytest.raises(SpecError, match=r"there is no file .*/odd.v2\nhint: for a folder, let the URL end in /"):
        Place(f"{gcs_url}/odd.v2", s3_url).bring()
    assert Place(f"{gcs_url}/odd.v2/", s3_url).bring() == 1
    one, other = (Place(f"{gcs_url}/set{end}", s3_url).layout().inputs["train"].url for end in ("", "/"))
    assert one == other


def test_no_secret_of_a_url_is_shown() -> None:
    assert without_secrets("https://user:pass@host/a@b/c.csv?sig=1") == "https://host/a@b/c.csv"
    assert without_secrets("abfs://container@account.dfs.core.windows.net/x") == (
        "abfs://container@account.dfs.core.windows.net/x"
    )


def test_what_nodes_read_by_themselves_stays_where_it_is(s3_url: str) -> None:
    place = Place("s3://elsewhere/set", s3_url)
    assert place.layout().inputs["train"].url == "s3://elsewhere/set"
    assert place.layout().inputs["train"].source is None
    assert place.layout(url="azureml:data:1").inputs["train"].url == "azureml:data:1"  # refused, by the provider


@pytest.mark.parametrize("fault", ["gone", "short", "spoiled"])
def test_a_copy_that_is_damaged_in_the_place_before_comes_from_its_source(
    gcs_url: str, s3_url: str, azure_url: str, fault: str
) -> None:
    place, after = Place(f"{gcs_url}/set", s3_url), Place(f"{gcs_url}/set", azure_url)
    files(place.source).write("x", b"first")
    files(place.source).write("y", b"other")
    place.bring()
    left, key = PreviousPlace(place.store, place.layout()), "runs/run-1/inputs/train/data/x"
    if fault == "gone":
        place.store.files.remove(key)
    else:
        place.store.files.write(key, b"" if fault == "short" else b"tsrif")
    messages: list[str] = []
    assert after.bring(left=left, say=messages.append) > 0
    assert after.copied() == {"x": b"first", "y": b"other"}
    assert [text for text in messages if text.endswith("; its source is copied again")]


def test_a_copy_in_the_place_before_needs_no_source(gcs_url: str, s3_url: str, azure_url: str) -> None:
    place, after = Place(f"{gcs_url}/set", s3_url), Place(f"{gcs_url}/set", azure_url)
    files(place.source).write("x", b"first")
    place.bring()
    left = PreviousPlace(place.store, place.layout())
    files(place.source).write("x", b"newer")
    unlike = PreviousPlace(
        place.store, Layout(store=place.store.url, run_id="r", code_digest="c", runtime_digest="f", inputs={})
    )
    assert after.bring(left=left) == 5
    assert after.copied() == {"x": b"first"}
    assert after.bring("run-2", left=unlike) == 5, "it had read the source"
    assert after.copied("run-2") == {"x": b"newer"}


def test_clients_with_one_run_id_make_one_copy(gcs_url: str, s3_url: str) -> None:
    place = Place(f"{s3_url}/set", gcs_url)  # its creation is exclusive, unlike moto's
    data = fill(place.source)
    assert all(parallel(lambda _: Place(place.source, gcs_url).bring(), range(4), jobs=4))
    assert place.copied() == data
    assert place.record("digests").keys() == data.keys()


def test_a_client_that_comes_late_leaves_the_copy_of_a_recorded_run_alone(
    gcs_url: str, s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was suspended. The other client has copied everything and recorded the run, whose nodes read the copy."""
    place, late = Place(f"{gcs_url}/set", s3_url), Place(f"{gcs_url}/set", s3_url)
    data = fill(place.source)
    monkeypatch.setattr(CLIENT_TIMINGS, "copy_save", 0.01)
    begun, goes_on, moved = threading.Event(), threading.Event(), list[int]()

    def progress(key: str, count: int) -> None:
        begun.set()
        assert goes_on.wait(60)
        time.sleep(0.5)

    late.store.moving = TransferOptions(concurrency=1)
    client = threading.Thread(target=lambda: moved.append(late.bring(progress=progress)))
    client.start()
    assert begun.wait(60)
    place.bring()
    assert place.store.create_run(place.layout(), {"protocol": 1})
    before = place.store.files.entries("runs/run-1/inputs")
    goes_on.set()
    client.join(60)
    assert moved == [0]
    assert place.copied() == data
    after = place.store.files.entries("runs/run-1/inputs")
    assert sum(before.get(key) != entry for key, entry in after.items()) <= 1, "the file that was on its way"


# -------------------------------------------------------------------------------------------------------- interruptions


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FaultyS3]:
    with FaultyS3() as wire:
        point_aws_at(wire.url, monkeypatch, tmp_path, MAX_ATTEMPTS="1")
        monkeypatch.setattr(remote, "PIECE", MIB)
        yield wire
        wire.shutdown()


def test_what_was_broken_off_goes_on(s3: FaultyS3, gcs_url: str) -> None:
    place = Place("s3://bucket/set", gcs_url)
    place.store.moving = TransferOptions(concurrency=1)
    s3.put("set/a", b"a" * MIB)
    s3.put("set/b", b"b" * (2 * MIB + 1))
    pieces, count = RemoteFiles.pieces, 0

    def breaking(self: RemoteFiles, key: str, size: int) -> Generator[bytes, None, None]:
        nonlocal count
        with contextlib.closing(pieces(self, key, size)) as source:
            for piece in source:
                count += 1
                if count == 3:  # the second of b's
                    raise KeyboardInterrupt
                yield piece

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RemoteFiles, "pieces", breaking)
        with pytest.raises(KeyboardInterrupt):
            place.bring()
    assert place.copied().keys() == place.record("digests").keys() == {"a"}
    s3.requests.clear()
    assert place.bring() == 2 * MIB + 1
    assert not any(path.endswith("/a") for _, path, _ in s3.requests)
    assert place.copied() == {key[4:]: item.data for key, item in s3.objects.items()}


def test_when_it_is_over_nothing_goes_on(s3: FaultyS3, gcs_url: str) -> None:
    """One of several copies fails. The slow others stop before the error is raised, and write nothing later."""
    place = Place("s3://bucket/set", gcs_url)
    for name in "abc":
        s3.put(f"set/{name}", os.urandom(6 * MIB))
    writes: list[str] = []

    def progress(key: str, count: int) -> None:
        writes.append(key)
        time.sleep(0.05)
        if len(writes) >= 4:
            raise KeyboardInterrupt

    before = set(threading.enumerate())
    with pytest.raises(KeyboardInterrupt):
        place.bring(progress=progress)
    for thread in set(threading.enumerate()) - before:
        if thread.name == "obstore":  # finished, but its thread may still exist
            thread.join(10)
            assert not thread.is_alive()
    told = len(writes)
    assert told <= 12  # of 18: each of the others finishes its current part
    there = place.store.files.list("runs")
    time.sleep(1)
    assert len(writes) == told
    assert place.store.files.list("runs") == there


def test_a_source_that_goes_away_is_said_to_have(s3: FaultyS3, gcs_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place("s3://bucket/set", gcs_url)
    for name in "ab":
        s3.put(f"set/{name}", os.urandom(3 * MIB))
    pieces = RemoteFiles.pieces

    def leaving(self: RemoteFiles, key: str, size: int) -> Generator[bytes, None, None]:
        s3.objects.pop("set/b", None)
        return pieces(self, key, size)

    monkeypatch.setattr(RemoteFiles, "pieces", leaving)
    with pytest.raises(StorageError, match=r"s3://bucket/set/b was deleted while it was copied") as no:
        place.bring()
    assert no.value.hint == "send the job again with another --run-id"


@pytest.mark.parametrize("swaps", [True, False])
def test_a_slow_client_keeps_the_digests_of_a_faster_one(
    s3: FaultyS3, monkeypatch: pytest.MonkeyPatch, swaps: bool
) -> None:
    place = Place("s3://bucket/set", "memory://bucket/slow")
    place.store.moving = TransferOptions(concurrency=1)
    for name in "abc":
        s3.put(f"set/{name}", name.encode())

    def progress(key: str, count: int) -> None:
        Place(place.source, place.store.url).bring()
        raise KeyboardInterrupt

    swap = RemoteFiles.swap

    def only_create(files: RemoteFiles, key: str, version: str | None, data: bytes) -> str:
        if version is not None:
            raise CannotSwapError("cannot replace a file only while it is unchanged")
        return swap(files, key, version, data)

    if not swaps:
        monkeypatch.setattr(RemoteFiles, "swap", only_create)
    try:
        with pytest.raises(KeyboardInterrupt):
            place.bring(progress=progress)
        assert place.record("digests") == {name: hashlib.sha256(name.encode()).hexdigest() for name in "abc"}
        assert place.bring() == 0
    finally:
        MemoryFileSystem.store.clear()


@pytest.mark.parametrize("listed", [[1], "abc", {"x": 1}, {"x": {}}, {"x": {"size": None, "version": "1"}}])
def test_a_copy_with_a_damaged_listing_comes_from_its_source(s3: FaultyS3, listed: Any) -> None:
    place, after = Place("s3://bucket/set", "memory://bucket/left"), Place("s3://bucket/set", "memory://bucket/next")
    s3.put("set/x", b"first")
    messages: list[str] = []
    try:
        place.bring()
        key = "runs/run-1/inputs/train/listing.json"
        place.store.files.write(key, json.dumps({"protocol": 1, "files": listed}).encode())
        assert after.bring(left=PreviousPlace(place.store, place.layout()), say=messages.append) == 5
        assert after.copied() == {"x": b"first"}
    finally:
        MemoryFileSystem.store.clear()
    damaged = f"{place.store.url}/{key} is damaged; its source is copied again"
    assert messages == [damaged, "copying train from s3://bucket/set"]


@pytest.mark.parametrize("target", ["gcs", "azure"])
def test_a_source_that_fails_leaves_no_part(request: pytest.FixtureRequest, s3: FaultyS3, target: str) -> None:
    place = Place("s3://bucket/set/x.bin", request.getfixturevalue(f"{target}_url"))
    s3.put("set/x.bin", data := os.urandom(12 * MIB))
    taken = iter(range(99))
    s3.fault = lambda: "403 AccessDenied" if next(taken) > 8 else None  # type: ignore[method-assign]
    with pytest.raises(AuthError):
        place.bring()
    assert "x.bin" not in "".join(place.store.files.list("runs/run-1/inputs/train"))
    s3.fault = lambda: None  # type: ignore[method-assign]
    assert place.bring() == len(data)
    assert files(place.layout().inputs["train"].url.rpartition("/")[0]).read("x.bin") == data


@pytest.mark.parametrize("fault", ["refuse", "reset", "truncate", "slow"])
def test_a_network_that_breaks_is_tried_again(s3: FaultyS3, gcs_url: str, fault: str) -> None:
    place = Place("s3://bucket/set/x.bin", gcs_url)
    s3.put("set/x.bin", data := os.urandom(3 * MIB))
    s3.faults = [None, fault, None, fault]
    assert place.bring() == len(data)
    assert files(place.layout().inputs["train"].url.rpartition("/")[0]).read("x.bin") == data


def test_a_source_that_changes_meanwhile_is_told(s3: FaultyS3, gcs_url: str) -> None:
    place = Place("s3://bucket/set/x.bin", gcs_url)
    s3.put("set/x.bin", os.urandom(3 * MIB))
    s3.faults = [None, None, "replace"]
    faster = {"x.bin": hashlib.sha256(s3.objects["set/x.bin"].data).hexdigest()}
    place.store.files.write("runs/run-1/inputs/train/digests.json", json.dumps({"files": faster}).encode())
    with pytest.raises(StorageError, match=r"x\.bin changed while it was copied") as no:
        place.bring()
    assert no.value.hint == "send the job again with another --run-id"
    assert place.record("digests") == {}, "another client's digest of the changed file still counts"
    with pytest.raises(ConflictError, match=r"x\.bin has changed since its copy for run run-1 began"):
        place.bring()
    assert place.bring("run-2") == 3 * MIB
    copied = files(place.layout("run-2").inputs["train"].url.rpartition("/")[0]).read("x.bin")
    assert copied == s3.objects["set/x.bin"].data == s3.versions["set/x.bin"][-1]


#: A slow client that copies and prints how many bytes it has moved.
CLIENT = """
import json, sys, time
from cloudtrain.runs.listing import list_page
from cloudtrain.storage import remote
from cloudtrain.provider_api.protocol import Layout
from cloudtrain.storage.timings import CLIENT_TIMINGS
from cloudtrain.store.copies import copy_inputs
from cloudtrain.store.store import Store
from cloudtrain.storage.files import TransferOptions
remote.PIECE, CLIENT_TIMINGS.copy_save = 65536, 0.02
given = json.loads(sys.argv[1])
store = Store(given["store"], moving=TransferOptions(concurrency=2))
print("begins", flush=True)
def progress(key, count):
    print(count, flush=True)
    time.sleep(0.01)
copy_inputs(store, Layout.from_dict(given), progress=progress)
"""


@pytest.mark.parametrize("trials", [2, pytest.param(max(2, TRIALS // 20), marks=pytest.mark.proof)])
def test_a_client_that_was_killed_leaves_right_bytes_or_nothing_and_the_next_one_goes_on(
    s3: FaultyS3, gcs_url: str, trials: int
) -> None:
    """kill -9 at any moment: a part is never taken for a file, and complete files are not copied again."""
    place = Place("s3://bucket/set", gcs_url)
    whole = {
        f"{name}.bin": os.urandom(size) for name, size in (("a", 5 << 16), ("b", 65537), ("c", 10), ("d", 9 << 16))
    }
    for name, content in whole.items():
        s3.put(f"set/{name}", content)
    given = json.dumps(dataclasses.asdict(place.layout()))
    for trial in range(trials):
        dice = random.Random(f"{SEED} {trial}")
        after = dice.randrange(16)  # of 17 pieces
        with subprocess.Popen([sys.executable, "-c", CLIENT, given], stdout=subprocess.PIPE, text=True) as client:
            assert client.stdout is not None
            lines = [client.stdout.readline() for _ in range(1 + after)]
            client.kill()
        assert all(lines), "it was at work"
        copied = place.copied()
        assert copied.items() <= whole.items(), "wrong bytes"
        there = place.store.files.exists("runs/run-1/inputs/train/digests.json")
        known = place.record("digests").keys() if there else set()
        assert place.bring() == sum(len(data) for name, data in whole.items() if name not in known)
        assert place.copied() == whole
        assert place.bring() == 0
        place.store.files.remove("runs")


def test_a_submit_that_was_broken_off_continues_under_its_run_id(
    s3: FaultyS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    foldercloud.install(tmp_path / "site")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setattr(foldercloud.Provider, "schemes", frozenset({"memory"}))
    for name in ("code", "cloud"):
        (tmp_path / name).mkdir()
    (tmp_path / "code/train.py").write_text("")
    for name in "abc":
        s3.put(f"set/{name}", os.urandom(1000))
    estimator = Estimator(
        entry_point="train.py", source_dir=tmp_path / "code", provider=foldercloud.NAME, store="memory://bucket/store",
        settings={"folder": str(tmp_path / "cloud")}, max_runtime=600, inputs={"train": "s3://bucket/set"},
    )  # fmt: skip
    store, pieces, copied = Store("memory://bucket/store"), RemoteFiles.pieces, list[str]()

    def breaking(self: RemoteFiles, key: str, size: int) -> Generator[bytes, None, None]:
        if key in "abc":
            copied.append(key)
            if len(copied) == 3:
                raise KeyboardInterrupt
        return pieces(self, key, size)

    monkeypatch.setattr(RemoteFiles, "pieces", breaking)
    with pytest.raises(KeyboardInterrupt):
        estimator.fit(wait=False, run_id="r")
    assert not store.files.exists("runs/r/run.json")
    assert list_page(store).rows == []
    assert store.files.names("staging") == []
    run = estimator.fit(wait=False, run_id="r")
    assert len(copied) == 4, "only the unfinished one is copied again"
    url = run.record["layout"]["inputs"]["train"]["url"]
    assert url == "memory://bucket/store/runs/r/inputs/train/data"
    assert {key: files(url).read(key) for key in files(url).list()} == {
        name: s3.objects[f"set/{name}"].data for name in "abc"
    }
    s3.put("set/a", b"changed")
    assert estimator.fit(wait=False, run_id="r").url == run.url, "a recorded run lost its copy"
    assert len(copied) == 4
    MemoryFileSystem.store.clear()
