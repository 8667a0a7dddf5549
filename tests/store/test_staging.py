"""staging.py and ``cloudtrain stage``: data that many runs read is stored once, in spite of faults."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from faulty_s3 import FaultyS3
from servers import Web, point_aws_at
from trials import SEED

from cloudtrain.cli import main
from cloudtrain.errors import AuthError, SpecError, StorageError
from cloudtrain.job.job import Job
from cloudtrain.provider_api.protocol import Layout
from cloudtrain.storage.files import TransferOptions, files, parallel
from cloudtrain.storage.remote import RemoteFiles
from cloudtrain.store import staging
from cloudtrain.store.gc import collect
from cloudtrain.store.staging import StagedInput, stage_input
from cloudtrain.store.store import SOURCES, Store

FILES = {"a.bin": os.urandom(300_000), "sub/b c+%.txt": b"hello", "empty": b""}
SIZE = sum(map(len, FILES.values()))
pytestmark = pytest.mark.filterwarnings("ignore:Sending a large body directly:ResourceWarning")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(f"file://{tmp_path}/store")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, data in FILES.items():
        path = tmp_path / "set" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return tmp_path / "set"


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FaultyS3]:
    with FaultyS3() as wire:
        point_aws_at(wire.url, monkeypatch, tmp_path, MAX_ATTEMPTS="1")
        for name, data in FILES.items():
            wire.put(f"set/{name}", data)
        yield wire
        wire.shutdown()


def staged(store: Store, url: str, **given: Any) -> StagedInput:
    return stage_input(store, url, cwd=Path("/"), **given)


def content(found: StagedInput) -> dict[str, bytes]:
    tree = files(found.url)
    return {key: tree.read(key) for key in tree.list()}


def rest(store: Store) -> set[str]:
    """Return the keys other than the content, its manifest and the records of its sources."""
    found = {key for key in store.files.list("data") if not key.startswith(f"{SOURCES}/")} | set(
        store.files.list("staging")
    )
    digests = {key.split("/")[2].removesuffix(".json") for key in found if key.startswith("data/manifests/")}
    return {key for key in found if not digests & set(key.replace(".json", "").split("/"))}


def age(store: Store, days: float) -> None:
    """Date all data back by ``days``."""
    for path in Path(store.url.removeprefix("file://"), "data").rglob("*"):
        os.utime(path, (time.time() - days * 86400,) * 2)


def test_a_folder_has_the_address_of_a_run_s_input(store: Store, folder: Path) -> None:
    job = Job.from_dict({"entry_point": "train.py", "inputs": {"train": str(folder)}})
    placed, _ = store.inputs(job, frozenset({"none"}), run_id="r", cwd=folder)
    found = staged(store, str(folder))
    assert (found.url, found.files, found.bytes, found.copied) == (placed["train"].url, 3, SIZE, SIZE)
    assert content(found) == FILES
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "record", lambda key: pytest.fail(f"{key} is read, and no file is missing"))
        assert staged(store, str(folder)) == StagedInput(**{**vars(found), "copied": 0})
    one = staged(store, str(folder / "sub/b c+%.txt"))
    assert one.url.endswith("/b c+%.txt")
    assert files(one.url.rpartition("/")[0]).read("b c+%.txt") == b"hello"
    plain = staged(store, str(folder / "empty"))
    assert (plain.url.rpartition("/")[2], list(content(plain))) == (plain.digest, ["empty"])


def test_a_folder_with_the_store_in_it_is_refused(store: Store, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    job = Job.from_dict({"entry_point": "train.py", "inputs": {"train": "."}})
    with pytest.raises(SpecError, match=rf"^inputs.train: {tmp_path} contains the store {tmp_path}/store"):
        store.inputs(job, frozenset({"none"}), run_id="r", cwd=tmp_path)
    for path in (tmp_path, tmp_path / "link", tmp_path / "store"):
        path.mkdir(exist_ok=True)
        with pytest.raises(SpecError, match=rf"^url: {path} contains the store {tmp_path}/store"):
            staged(store, str(path))
    assert store.files.list() == {}
    assert staged(store, staged(store, str(folder)).url).copied == 0, "a folder in the store"


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["s3a", "gcs"])
def test_each_name_of_a_bucket_s_scheme_is_copied(
    s3: FaultyS3, store: Store, request: pytest.FixtureRequest, scheme: str
) -> None:
    url = f"{scheme}://bucket/set"
    if scheme == "gcs":
        url = f"{request.getfixturevalue('gcs_url')}/set".replace("gs:", "gcs:")
        for name, data in FILES.items():
            files(url).write(name, data)
    assert content(staged(store, url)) == FILES
    job = Job.from_dict({"entry_point": "train.py", "inputs": {"train": url}})
    placed, _ = Store("abfs://c@a.dfs.core.windows.net/x").inputs(job, frozenset({"abfs"}), run_id="r", cwd=Path("/"))
    assert placed["train"].source == url


def test_a_remote_folder_is_read_once_and_has_the_address_of_its_content(
    s3: FaultyS3, store: Store, folder: Path
) -> None:
    messages: list[str] = []
    found = staged(store, "s3://bucket/set", say=messages.append)
    assert (found.copied, content(found), messages) == (SIZE, FILES, ["copying data from s3://bucket/set"])
    assert rest(store) == set()
    s3.requests.clear()
    assert staged(store, "s3://bucket/set").copied == 0
    assert not [path for method, path, _ in s3.requests if method == "GET" and "a.bin" in path]
    assert staged(store, str(folder)) == StagedInput(**{**vars(found), "copied": 0, "source": str(folder)})
    s3.put("set/sub/b c+%.txt", b"hello")
    assert staged(store, "s3://bucket/set").copied == 0, "written again with the same content"
    s3.put("set/sub/b c+%.txt", b"HELLO")
    other = staged(store, "s3://bucket/set")
    assert other.url != found.url
    assert content(other) == FILES | {"sub/b c+%.txt": b"HELLO"}
    assert content(found) == FILES, "it never changes"
    one = staged(store, "s3://bucket/set/a.bin")
    assert one.url.endswith("/a.bin")


@pytest.mark.remote
def test_a_bucket_copies_within_itself(s3_url: str, gcs_url: str) -> None:
    for name, data in FILES.items():
        files(f"{gcs_url}/set").write(name, data)
    store = Store(s3_url)
    found = staged(store, f"{gcs_url}/set")
    assert (found.copied, content(found), rest(store)) == (SIZE, FILES, set())
    assert staged(store, f"{gcs_url}/set").copied == 0


@pytest.mark.remote
def test_a_web_server_without_versions_is_read_again(web: Web, store: Store) -> None:
    web.write("x.csv.gz", b"data")
    first, second = (staged(store, f"{web.url}/x.csv.gz?sig=s3cret") for _ in range(2))
    assert first.url == second.url
    assert first.source == f"{web.url}/x.csv.gz"
    assert rest(store) == set()
    assert not [key for key in store.files.list() if b"s3cret" in store.files.read(key)]


def test_two_clients_at_once_make_one_input(s3: FaultyS3, tmp_path: Path) -> None:
    found = parallel(lambda _: staged(Store(f"file://{tmp_path}/store"), "s3://bucket/set"), range(4), jobs=4)
    assert len({item.url for item in found}) == 1
    assert content(found[0]) == FILES
    assert rest(Store(f"file://{tmp_path}/store")) == set()


def test_a_slow_client_finds_what_a_faster_one_has_staged(s3: FaultyS3, store: Store) -> None:
    """The faster one has removed the first copy while the slow one used it."""
    faster: list[StagedInput] = []

    def progress(key: str, count: int) -> None:
        if not faster and key.endswith(".txt"):  # the last
            faster.append(staged(Store(store.url), "s3://bucket/set"))

    store.moving = TransferOptions(concurrency=1)
    slow = staged(store, "s3://bucket/set", progress=progress)
    assert slow.url == faster[0].url
    assert content(slow) == FILES
    assert rest(store) == set()


@pytest.mark.costly
def test_a_first_copy_that_goes_while_it_is_placed_is_made_again(s3: FaultyS3, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test a store that cannot copy by itself, such as Azure's."""
    monkeypatch.setattr(RemoteFiles, "copies", False)
    place, calls = staging._place, list[str]()

    def removed_first(store: Store, first: str, folder: str, listed: Any) -> None:
        calls.append(first)
        if len(calls) == 1:
            staging._clear(store, first.removeprefix("data/"))
        place(store, first, folder, listed)

    monkeypatch.setattr(staging, "_place", removed_first)
    found = staged(Store("s3://bucket/store"), "s3://bucket/set")
    assert len(calls) == 2
    assert content(found) == FILES


#: A slow client that stages and prints how many bytes it has moved.
CLIENT = """
import sys, time
from pathlib import Path
from cloudtrain.storage import remote
from cloudtrain.storage.timings import CLIENT_TIMINGS
from cloudtrain.store.staging import stage_input
from cloudtrain.store.store import Store
remote.PIECE, CLIENT_TIMINGS.copy_save = 16384, 0.01
def progress(key, count):
    print(count, flush=True)
    time.sleep(0.01)
print("begins", flush=True)
stage_input(Store(sys.argv[1]), "s3://bucket/set", cwd=Path("/"), progress=progress)
"""


@pytest.mark.slow
def test_the_next_client_continues_what_a_killed_one_left(s3: FaultyS3, store: Store, tmp_path: Path) -> None:
    s3.put("set/small", b"s" * 1000)  # copied first
    whole = FILES | {"small": b"s" * 1000}
    for trial in range(3):
        after = random.Random(f"{SEED} {trial}").randrange(3, 20)
        with subprocess.Popen([sys.executable, "-c", CLIENT, store.url], stdout=subprocess.PIPE, text=True) as client:
            assert client.stdout is not None
            lines = [client.stdout.readline() for _ in range(1 + after)]
            client.kill()
        assert all(lines), "it was at work"
        assert not store.files.list(SOURCES), "nothing is staged yet"
        found = staged(store, "s3://bucket/set")
        assert found.copied <= SIZE + 1000
        assert content(found) == whole
        assert staged(store, "s3://bucket/set").copied == 0
        shutil.rmtree(tmp_path / "store")


def test_gc_keeps_what_a_run_names_and_removes_the_rest_when_it_is_told_to(s3: FaultyS3, store: Store) -> None:
    found = staged(store, "s3://bucket/set")
    layout = Layout(store=store.url, run_id="r", code_digest="c", runtime_digest="d")
    record = {"protocol": 1, "layout": {"code_digest": "c", "inputs": {"train": {"url": found.url}}}}
    assert store.create_run(layout, record)
    assert collect(store, older_than=0, delete=True).found == ()
    assert staged(store, "s3://bucket/set").copied == 0
    store.files.remove("runs")
    age(store, 30)
    assert len(collect(store).found) == 1
    assert staged(store, "s3://bucket/set").copied == 0
    assert collect(store).found == (), "it is young again: its next run is not recorded yet"
    (thing,) = collect(store, older_than=0, delete=True).found
    assert (thing.kind, thing.key, thing.files) == ("data", f"data/{found.digest}", 5)
    assert thing.keys[0] == f"data/manifests/{found.digest}.json", "else a half-removed tree would count as complete"
    assert store.files.list("data") == {}
    assert staged(store, "s3://bucket/set").copied == SIZE


def test_damaged_content_is_repaired(s3: FaultyS3, store: Store) -> None:
    found = staged(store, "s3://bucket/set")
    store.files.write(f"data/{found.digest}/a.bin", b"short")
    assert content(staged(store, "s3://bucket/set")) == FILES


def test_a_source_that_changes_meanwhile_is_an_error(
    s3: FaultyS3, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces = RemoteFiles.pieces

    def changing(self: RemoteFiles, key: str, size: int) -> Any:
        s3.put("set/empty", b"no more")
        return pieces(self, key, size)

    monkeypatch.setattr(RemoteFiles, "pieces", changing)
    with pytest.raises(StorageError, match=r"s3://bucket/set: empty changed while it was copied") as no:
        staged(store, "s3://bucket/set")
    assert no.value.hint == "run the same command again"
    monkeypatch.undo()
    assert not store.files.list(SOURCES)


@pytest.mark.parametrize(
    ("url", "words", "kind"),
    [
        ("", "is empty", SpecError),
        ("nowhere", "there is no /nowhere", SpecError),
        ("hollow", "hollow holds no file", SpecError),
        ("s3://bucket/none", "s3://bucket/none holds no file", SpecError),
        ("s3://bucket/none.csv", "there is no file s3://bucket/none.csv", SpecError),
        ("http://127.0.0.1:9/folder", "names no file, and HTTP cannot list a folder", SpecError),
        ("azureml:data:1", "cloudtrain cannot copy from this scheme", SpecError),
    ],
)
def test_what_cannot_be_staged_is_one_line_and_leaves_nothing(
    s3: FaultyS3, store: Store, tmp_path: Path, url: str, words: str, kind: type[Exception]
) -> None:
    (tmp_path / "hollow").mkdir()
    with pytest.raises(kind, match=rf"^url: .*{words}"):
        staged(store, str(tmp_path / url) if url == "hollow" else url)
    assert store.files.list("data") == {}


def test_a_source_without_access_is_an_error_of_access(s3: FaultyS3, store: Store) -> None:
    s3.fault = lambda: "403 AccessDenied"  # type: ignore[method-assign]
    with pytest.raises(AuthError):
        staged(store, "s3://bucket/set")


def test_the_verb_prints_the_url_and_the_next_command(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["stage", "set", "--store", "runs"]) == 0
    out, err = capsys.readouterr()
    url = out.strip()
    assert url.startswith(f"file://{tmp_path}/runs/data/")
    assert f"next: cloudtrain submit train.py --input data={url} --store runs" in err
    assert main(["stage", "set", "--store", "runs", "--json"]) == 0
    out, err = capsys.readouterr()
    assert (json.loads(out)["url"], json.loads(out)["copied"]) == (url, 0)
    assert "nothing copied" in err
    assert main(["stage", "nothing", "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["field"] == "url"
    assert main(["stage"]) == 2
