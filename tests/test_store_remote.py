"""The store on emulated object stores: missing buckets, many files, errors, and a run from stage to pull."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from servers import ATTEMPT_RACER, free_port, race
from worlds.vertex.gcs import Gcs

from cloudtrain.errors import AuthError, StorageError
from cloudtrain.job.job import Job
from cloudtrain.provider_api.protocol import Layout, Request
from cloudtrain.runs.pull import pull
from cloudtrain.storage.errors import Retries, classify
from cloudtrain.storage.files import files, parallel
from cloudtrain.storage.remote import RemoteFiles
from cloudtrain.store.store import Staged, Store

pytestmark = [
    pytest.mark.remote,
    # aiohttp warns of a body above 1 MiB, and gcsfs sends such bodies.
    pytest.mark.filterwarnings("ignore:Sending a large body directly:ResourceWarning"),
]

RUN = "run-1"
REQUEST = Request(provider="p", operation="create", body={}, context={}, run="s3://b/runs/run-1")


@pytest.fixture(params=["s3", "azure", "gcs"])
def url(request: pytest.FixtureRequest) -> str:
    """Return an empty folder of each object store in turn."""
    return str(request.getfixturevalue(f"{request.param}_url"))


@pytest.fixture(params=["s3", "azure"])
def faithful_url(request: pytest.FixtureRequest) -> str:
    """Return an empty folder of each server that is not our own fake."""
    return str(request.getfixturevalue(f"{request.param}_url"))


def layout(store: Store) -> Layout:
    return Layout(store=store.url, run_id=RUN, code_digest="c0de", runtime_digest="f00d")


def elsewhere(url: str) -> str:
    """Return the URL of a bucket that does not exist on the same server."""
    return f"{url.split('://')[0]}://no-such-bucket/store"


# -------------------------------------------------------------------------------------------------- the tree of one URL


def test_a_missing_bucket_is_said_to_be_missing(url: str, tmp_path: Path) -> None:
    tree = files(elsewhere(url))
    (tmp_path / "file").write_bytes(b"x")
    for attempt in (
        tree.list,
        tree.names,
        lambda: tree.write("key", b"x"),
        lambda: tree.create("key", b"x"),
        lambda: tree.upload(tmp_path / "file", "key"),
        lambda: tree.swap("key", None, b"1"),
    ):
        with pytest.raises(StorageError, match=r"no-such-bucket/store: the bucket or container does not exist"):
            attempt()
    assert tree.size("key") is None


def test_more_than_a_thousand_files(faithful_url: str) -> None:
    tree = files(faithful_url)
    parallel(lambda i: tree.write(f"many/{i % 3}/{i}", b"x"), list(range(1100)), jobs=16)
    assert len(tree.list("many")) == 1100
    assert len(tree.names("many/0")) == 367
    assert tree.names("many") == ["0", "1", "2"]


# --------------------------------------------------------------------------------------------------- exclusive creation


def test_what_the_back_ends_raise(url: str) -> None:
    """Test the back ends' own exclusive mode without our check before it: the server refuses, and the table has the
    error."""
    tree = files(url)
    assert isinstance(tree, RemoteFiles)
    mover = tree._open().mover
    mover.swap("key", None, b"1")
    with pytest.raises(Exception, match=r".*") as caught:
        mover.swap("key", None, b"2")
    assert classify(caught.value) == "taken"
    assert tree.read("key") == b"1"


def test_one_of_many_processes_starts_an_attempt(faithful_url: str) -> None:
    won = race(ATTEMPT_RACER, faithful_url, "10", count=3)
    assert sorted(k for ks in won for k in ks) == list(range(10))


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


# --------------------------------------------------------------------------------------------------------------- errors


def test_no_credentials(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    tree = files(s3_url)
    for attempt in (tree.list, lambda: tree.read("key"), lambda: tree.create("key", b"")):
        with pytest.raises(AuthError, match="no access: Unable to locate credentials"):
            attempt()


def test_refused_credentials(azure_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    good = os.environ["AZURE_STORAGE_CONNECTION_STRING"]
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", good.replace("AccountKey=Eby8", "AccountKey=Abcd"))
    tree = files(azure_url)
    for attempt in (tree.list, lambda: tree.write("key", b"")):
        with pytest.raises(AuthError, match="no access") as caught:
            attempt()
        assert "Abcd" not in str(caught.value)


def test_a_server_that_is_gone(s3_environment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    waits: list[float] = []
    tree = RemoteFiles(url="s3://bucket/store", retries=Retries(tries=2, sleep=waits.append))
    with pytest.raises(StorageError, match=r"cannot reach .*: connection refused"):
        tree.read("key")
    assert len(waits) == 1


# --------------------------------------------------------------------------------------------------------- whole stores


def test_a_run_from_stage_to_pull(url: str, tmp_path: Path) -> None:
    store = Store(url)
    (tmp_path / "data" / "sub").mkdir(parents=True)
    (tmp_path / "data" / "sub" / "x").write_bytes(b"1234")
    job = Job.make(entry_point="train.py", inputs={"train": "data", "val": "s3://b/val.csv"})
    placed, trees = store.inputs(job, frozenset({"s3", "gs", "abfs"}), run_id="r", cwd=tmp_path)
    assert placed["train"].url == f"{store.url}/data/{trees[0].digest}"
    staged = store.stage(layout(store), archive=lambda: b"code", pyz=b"pyz", trees=trees)
    assert staged == Staged(code_bytes=4, runtime_bytes=3, data_bytes=4)
    assert store.stage(layout(store), archive=lambda: b"no", pyz=b"no", trees=trees) == Staged()
    (tmp_path / "data" / "y").write_bytes(b"56")
    _, grown = store.inputs(job, frozenset({"s3"}), run_id="r", cwd=tmp_path)
    moved = store.stage(layout(store), archive=lambda: b"no", pyz=b"no", trees=grown).data_bytes
    assert moved == (2 if store.files.copies else 6)
    assert store.files.read(f"data/{grown[0].digest}/sub/x") == b"1234"

    assert store.create_run(layout(store), {"job": {}})
    assert not store.create_run(layout(store), {"job": {}})
    assert store.create_attempt(RUN, 0, REQUEST)
    assert not store.create_attempt(RUN, 0, REQUEST)
    assert store.attempt_request(RUN, 0) == REQUEST
    store.write_container(layout(store), {"protocol": 1}, b"key")
    assert (store.runs(), store.attempts(RUN)) == ([RUN], [0])

    folder = f"runs/{RUN}/live"
    listed = {"node-0/step-3/model.pt": {"size": 3, "sha256": _ABC}}
    commit = {"protocol": 1, "name": "step-3", "attempt": "0.0", "seq": 0, "nodes": 1, "time": 1.0, "files": listed}
    store.files.write(f"{folder}/checkpoints/step-3/0.0-0/node-0/step-3/model.pt", b"abc")
    store.files.write(f"{folder}/checkpoints/step-3/0.0-0/commit.json", json.dumps(commit).encode())
    store.files.write(f"{folder}/artifacts/node-0/a", b"weights")
    store.files.write(f"{folder}/artifacts/node-1/a", b"weights")
    store.files.write(f"{folder}/logs/0.0/node-0/0.log", b"line\n")
    store.files.write(f"{folder}/metrics/0.0-node-0.jsonl", b'{"step": 1}\n')
    newest = store.newest_checkpoint(RUN)
    assert newest is not None
    assert newest.step == 3
    out = tmp_path / "out"
    report = pull(store, RUN, out)
    assert set(report.files) == {
        "artifacts/a",
        "checkpoints/step-3/model.pt",
        "logs/0.0/node-0.log",
        "metrics.jsonl",
        "run.json",
    }
    assert (out / "checkpoints/step-3/model.pt").read_bytes() == b"abc"
    assert pull(store, RUN, out).transferred == 0
    time.sleep(1.1)  # S3's times are whole seconds; times decide where digests are equal
    store.files.write(f"{folder}/artifacts/node-0/a", b"WEIGHTS")
    pull(store, RUN, out)
    assert (out / "artifacts" / "a").read_bytes() == b"WEIGHTS"
    assert (out / "artifacts" / "node-1" / "a").read_bytes() == b"weights"


_ABC = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
