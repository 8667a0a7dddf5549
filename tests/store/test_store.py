"""store.py: the layout of a store, staging once, records that one client writes, checkpoints and pulls."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given
from hypothesis import strategies as st
from rows import for_each
from servers import race

from cloudtrain.errors import DigestError, NotFoundError, SpecError, StorageError
from cloudtrain.job.job import Job
from cloudtrain.provider_api.protocol import Layout, Request
from cloudtrain.runs.metrics import merge_metrics
from cloudtrain.runs.pull import pull
from cloudtrain.store.store import Staged, Store

RUN = "20250101-000000-train-abcd"
REQUEST = Request(provider="p", operation="create", body={"a": [1]}, context={"protocol": 1}, run="file:///s/runs/r")


@pytest.fixture(params=["local", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    """Yield a store with one run."""
    made = Store(str(tmp_path / "store") if request.param == "local" else "memory://bucket/store")
    made.create_run(layout(made), {"name": "train"})
    yield made
    MemoryFileSystem.store.clear()


@pytest.fixture
def local(tmp_path: Path) -> Store:
    return Store("store", cwd=tmp_path)


def layout(store: Store, *, run_id: str = RUN, code: str = "c0de") -> Layout:
    return Layout(store=store.url, run_id=run_id, code_digest=code, runtime_digest="f00d")


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def commit(
    store: Store, name: str, contents: dict[str, bytes], *, attempt: str = "0.0", seq: int = 0, time: float = 1000.0
) -> str:
    """Write a checkpoint as nodes do, and return its folder's key."""
    key = f"runs/{RUN}/live/checkpoints/{name}/{attempt}-{seq}"
    listed = {}
    for path, data in contents.items():
        store.files.write(f"{key}/{path}", data)
        listed[path] = {"size": len(data), "sha256": digest(data)}
    record = {"protocol": 1, "name": name, "attempt": attempt, "seq": seq, "nodes": 2, "time": time, "files": listed}
    store.files.write(f"{key}/commit.json", json.dumps(record).encode())
    return key


def live(store: Store, path: str, data: bytes | str) -> None:
    store.files.write(f"runs/{RUN}/live/{path}", data if isinstance(data, bytes) else data.encode())


def below(folder: Path) -> dict[str, bytes]:
    """Return every file of a pulled folder but the two that a pull keeps for itself."""
    found = {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    assert found.pop(".gitignore") == b"*\n"
    assert found.pop(".cloudtrain-pull.json")
    return found


# --------------------------------------------------------------------------------------------------------------- layout


def test_urls(tmp_path: Path) -> None:
    store = Store("./.cloudtrain/", cwd=tmp_path)
    assert store.url == f"file://{tmp_path}/.cloudtrain"
    made = layout(store)
    assert made.code == f"{store.url}/code/c0de/code.tar.gz"
    assert made.run == f"{store.url}/runs/{RUN}"
    assert Store("S3://bucket/x/").url == "s3://bucket/x"
    with pytest.raises(SpecError, match="run_id"):
        store.create_run(layout(store, run_id="../x"), {})
    assert not (tmp_path / ".cloudtrain").exists()


# --------------------------------------------------------------------------------------------------------------- inputs


def job(**inputs: str | dict[str, Any]) -> Job:
    return Job.make(entry_point="train.py", inputs=inputs)


def test_local_inputs_in_place(local: Store, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "x").touch()
    (tmp_path / "val.csv").write_bytes(b"1")
    given_ = job(train="data", val=f"file://{tmp_path}/val.csv")
    placed, trees = local.inputs(given_, frozenset({"file"}), run_id="r", cwd=tmp_path)
    assert (placed["train"].url, placed["train"].file) == (f"file://{tmp_path}/data", None)
    assert (placed["val"].url, placed["val"].file) == (f"file://{tmp_path}/val.csv", "val.csv")
    assert trees == []


def test_local_inputs_by_content(local: Store, tmp_path: Path) -> None:
    (tmp_path / "data" / "sub").mkdir(parents=True)
    (tmp_path / "data" / "sub" / "a").write_bytes(b"1")
    (tmp_path / "data" / "b").write_bytes(b"22")
    (tmp_path / "val.csv").write_bytes(b"333")
    wanted = job(train={"url": "data", "mode": "mount", "shard": True}, again="data", val="val.csv")
    placed, trees = local.inputs(wanted, frozenset({"s3"}), run_id="r", cwd=tmp_path)
    folder, file = trees
    assert [item.path for item in folder.files] == ["b", "sub/a"]
    assert folder.bytes == 3
    assert placed["train"].url == placed["again"].url == f"{local.url}/data/{folder.digest}"
    assert (placed["train"].mode, placed["train"].shard, placed["train"].file) == ("mount", True, None)
    assert (placed["val"].url, placed["val"].file) == (f"{local.url}/data/{file.digest}/val.csv", "val.csv")
    (tmp_path / "data" / "b").write_bytes(b"2X")
    assert local.inputs(wanted, frozenset({"s3"}), run_id="r", cwd=tmp_path)[1][0].digest != folder.digest
    (tmp_path / "data" / "b").write_bytes(b"22")
    os.utime(tmp_path / "data" / "b", (1, 1))
    assert local.inputs(wanted, frozenset({"s3"}), run_id="r", cwd=tmp_path)[1][0].digest == folder.digest


def test_missing_and_impossible_inputs(local: Store, tmp_path: Path) -> None:
    (tmp_path / "train-data").mkdir()
    with pytest.raises(SpecError, match=r"no .*/traindata\nhint: did you mean 'train-data'") as caught:
        local.inputs(job(train="traindata"), frozenset({"file"}), run_id="r", cwd=tmp_path)
    assert caught.value.field == "inputs.train"
    with pytest.raises(SpecError, match="holds no file"):
        local.inputs(job(train="train-data"), frozenset({"s3"}), run_id="r", cwd=tmp_path)
    (tmp_path / "train-data" / "gone").symlink_to("nowhere")
    with pytest.raises(SpecError, match=r"inputs\.train: .*broken link"):
        local.inputs(job(train="train-data"), frozenset({"s3"}), run_id="r", cwd=tmp_path)


@pytest.mark.parametrize(
    ("url", "file"),
    [
        ("s3://b/train.csv.gz", "train.csv.gz"),
        ("gs://b/x/y.parquet", "y.parquet"),
        ("https://h/x.tar?sig=a.b/c", "x.tar"),
        ("s3://b/train", None),
        ("s3://b/train.d/", None),
        ("s3://b/imagenet.2012", None),
        ("s3://bucket.name", None),
        ("s3://b/v1.2", None),
        ("azureml:cifar:1", None),
    ],
)
def test_remote_inputs_are_verbatim(local: Store, tmp_path: Path, url: str, file: str | None) -> None:
    placed, trees = local.inputs(job(train=url), frozenset({"s3"}), run_id="r", cwd=tmp_path)
    assert (placed["train"].url, placed["train"].file) == (url, file)
    assert trees == []


# -------------------------------------------------------------------------------------------------------------- staging


def never() -> bytes:
    raise AssertionError("the store has it")


def test_code_and_runtime_are_uploaded_once(store: Store, tmp_path: Path) -> None:
    (tmp_path / "code").write_bytes(b"archive")
    first = store.stage(layout(store), archive=lambda: tmp_path / "code", pyz=b"pyz")
    assert first == Staged(code_bytes=7, runtime_bytes=3, data_bytes=0)
    assert store.files.read("code/c0de/code.tar.gz") == b"archive"
    assert store.files.read("runtime/f00d/cloudtrain.pyz") == b"pyz"
    assert store.stage(layout(store), archive=never, pyz=never) == Staged()
    moved: list[tuple[str, int]] = []
    other = layout(store, code="other")
    store.stage(other, archive=lambda: b"1234", pyz=never, progress=lambda *pair: moved.append(pair))
    assert moved == [("code/other/code.tar.gz", 4)]


def stage(store: Store, folder: Path) -> int:
    _, trees = store.inputs(job(train=str(folder)), frozenset({"none"}), run_id="r", cwd=folder)
    return store.stage(layout(store), archive=lambda: b"", pyz=b"", trees=trees).data_bytes


def test_data_is_uploaded_once_and_copied_from_earlier_trees(store: Store, tmp_path: Path) -> None:
    data = tmp_path / "data"
    (data / "sub").mkdir(parents=True)
    (data / "a").write_bytes(b"aaaa")
    (data / "sub" / "manifest.json").write_bytes(b"bb")
    _, (tree,) = store.inputs(job(train="data"), frozenset({"none"}), run_id="r", cwd=tmp_path)
    assert stage(store, data) == 6
    assert stage(store, data) == 0
    assert store.files.list(f"data/{tree.digest}") == {
        f"data/{tree.digest}/a": 4,
        f"data/{tree.digest}/sub/manifest.json": 2,
    }
    (data / "c").write_bytes(b"ccc")
    (data / "a").rename(data / "z")
    _, (second,) = store.inputs(job(train="data"), frozenset({"none"}), run_id="r", cwd=tmp_path)
    assert stage(store, data) == 3  # z and sub/manifest.json are copies
    assert store.files.read(f"data/{second.digest}/z") == b"aaaa"
    assert set(store.files.names("data")) == {tree.digest, second.digest, "manifests"}


class Watch:
    """A receiver of progress: the expected and the finished bytes."""

    def __init__(self) -> None:
        self.expected, self.moved = [0, 0], dict[str, int]()

    def expect(self, files: int, count: int) -> None:
        self.expected = [self.expected[0] + files, self.expected[1] + count]

    def __call__(self, key: str, count: int) -> None:
        self.moved[key] = self.moved.get(key, 0) + count


def test_what_is_to_come_is_told_before_it_does(full: Store, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    for name in "abc":
        (data / name).write_bytes(name.encode() * 1000)
    watch = Watch()
    for more in (b"", b"new"):
        (data / "more").write_bytes(more)
        _, trees = full.inputs(job(train=str(data)), frozenset({"none"}), run_id="r", cwd=data)
        full.stage(layout(full), archive=lambda: b"code", pyz=b"pyz", trees=trees, progress=watch)
    assert watch.expected == [2 + 4 + 1, 4 + 3 + 3000 + 3]
    assert sum(watch.moved.values()) == watch.expected[1]
    first, again = Watch(), Watch()
    pull(full, RUN, tmp_path / "out", what=["checkpoints", "artifacts"], progress=first)
    names = {key for key in first.moved if "/checkpoints/" in key or "/artifacts/" in key or "/native/" in key}
    assert 0 < first.expected[0] <= len(names)
    pull(full, RUN, tmp_path / "out", what=["checkpoints", "artifacts"], progress=again)
    assert again.expected == [0, 0]


def test_an_interrupted_upload_goes_on_and_is_no_source(store: Store, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "a").write_bytes(b"aaaa")
    (data / "b").write_bytes(b"bb")
    _, (tree,) = store.inputs(job(train="data"), frozenset({"none"}), run_id="r", cwd=tmp_path)
    store.files.write(f"data/{tree.digest}/a", b"aaaa")
    assert stage(store, data) == 2
    store.files.remove(f"data/{tree.digest}/a")  # a manifest that promises too much
    (data / "b").unlink()
    assert stage(store, data) == 4


def test_data_that_changes_meanwhile_is_refused(store: Store, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a").write_bytes(b"aaaa")
    _, trees = store.inputs(job(train="data"), frozenset({"none"}), run_id="r", cwd=tmp_path)
    (tmp_path / "data" / "a").write_bytes(b"AAAA")
    os.utime(tmp_path / "data" / "a", (1, 1))
    with pytest.raises(StorageError, match="changed while"):
        store.stage(layout(store), archive=lambda: b"", pyz=b"", trees=trees)
    assert store.files.list("data") == {}


_STAGER = """
from pathlib import Path
from cloudtrain.job.job import Job
from cloudtrain.provider_api.protocol import Layout
from cloudtrain.store.store import Store
store, folder = Store(sys.argv[1]), Path(sys.argv[2])
job = Job.make(entry_point="t.py", inputs={"x": str(folder)})
_, trees = store.inputs(job, frozenset({"none"}), run_id="r", cwd=folder)
layout = Layout(store=store.url, run_id="run", code_digest="c0de", runtime_digest="f00d")
ready()
print(json.dumps(store.stage(layout, archive=lambda: b"code", pyz=b"pyz", trees=trees).data_bytes))
"""


@pytest.mark.slow
def test_concurrent_stagers_are_harmless(local: Store, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for number in range(40):
        (tmp_path / "data" / str(number)).write_bytes(os.urandom(1000))
    race(_STAGER, local.url, str(tmp_path / "data"), count=4)
    _, (tree,) = local.inputs(job(train="data"), frozenset({"none"}), run_id="r", cwd=tmp_path)
    for item in tree.files:
        assert digest(local.files.read(f"data/{tree.digest}/{item.path}")) == item.sha256
    assert stage(local, tmp_path / "data") == 0


def test_the_store_hides_itself_from_git(local: Store, tmp_path: Path) -> None:
    local.cancel(RUN)
    assert (tmp_path / "store" / ".gitignore").read_bytes() == b"*\n"


def test_a_store_among_your_files_does_not_hide_them_from_git(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    (tmp_path / "train.py").write_text("print()")
    Store(".", cwd=tmp_path).cancel(RUN)
    command = ["git", "-C", tmp_path, "status", "--short", "--untracked-files=all"]
    assert "?? train.py" in subprocess.run(command, check=True, capture_output=True, text=True).stdout


# -------------------------------------------------------------------------------------------------------------- records


def test_a_run_is_created_once(store: Store) -> None:
    assert not store.create_run(layout(store), {"name": "other"})
    assert store.run(RUN) == {"name": "train"}
    assert store.runs() == [RUN]
    store.files.write("runs/Not-A-Run/x", b"")
    assert store.runs() == [RUN]
    with pytest.raises(
        NotFoundError, match=rf"no run '20250101-000000-train-abce' in {store.url}\nhint: did you mean '{RUN}"
    ):
        store.run("20250101-000000-train-abce")
    with pytest.raises(SpecError):
        store.run("../..")
    store.files.write(f"runs/{RUN}/run.json", b"{")
    with pytest.raises(StorageError, match=r"run\.json is not a JSON object"):
        store.run(RUN)


def test_a_lost_reply_is_no_lost_creation(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The object was written and the answer was lost. The client library's own retry then found the object."""
    create = store.files.create
    monkeypatch.setattr(store.files, "create", lambda *args, **options: create(*args, **options) and False)
    assert store.create_run(layout(store, run_id="new"), {"a": 1})
    assert not store.create_run(layout(store, run_id="new"), {"a": 1})
    assert store.run("new") == {"a": 1}


def test_attempts(store: Store) -> None:
    assert store.attempts(RUN) == []
    assert store.attempt_request(RUN, 0) is None
    assert store.create_attempt(RUN, 0, REQUEST)
    assert store.create_attempt(RUN, 10, REQUEST)
    assert store.create_attempt(RUN, 2, REQUEST)
    assert not store.create_attempt(RUN, 2, REQUEST)
    assert store.attempts(RUN) == [0, 2, 10]
    assert store.attempt_request(RUN, 2) == REQUEST
    assert store.submitted(RUN, 0) is None
    store.write_submitted(RUN, 0, "arn:job")
    submitted = store.submitted(RUN, 0)
    assert submitted is not None
    assert submitted["native_id"] == "arn:job"
    assert store.attempts(RUN) == [0, 2, 10]


#: For `race`: create the first ``argv[2]`` attempts of a run in the store ``argv[1]``, and print which ones succeed.
ATTEMPT_RACER = """
from cloudtrain.provider_api.protocol import Request
from cloudtrain.store.store import Store
store = Store(sys.argv[1])
store.runs()
request = Request(provider="p", operation="create", body={}, context={}, run="r")
ready()
print(json.dumps([k for k in range(int(sys.argv[2])) if store.create_attempt("run-1", k, request)]))
"""


@pytest.mark.parametrize(
    ("kind", "keys", "count"),
    [
        pytest.param("folder", 20, 5, marks=pytest.mark.slow),
        pytest.param("s3", 10, 3, marks=pytest.mark.remote),
        pytest.param("azure", 10, 3, marks=pytest.mark.remote),
    ],
)
def test_one_of_many_processes_starts_an_attempt(
    request: pytest.FixtureRequest, tmp_path: Path, kind: str, keys: int, count: int
) -> None:
    """The requests are identical, so their content does not tell the creators apart."""
    url = f"file://{tmp_path}/store" if kind == "folder" else request.getfixturevalue(f"{kind}_url")
    won = race(ATTEMPT_RACER, url, str(keys), count=count)
    assert sorted(itertools.chain(*won)) == list(range(keys))


def test_container(store: Store, tmp_path: Path) -> None:
    made = layout(store)
    store.write_container(made, {"protocol": 1}, b"first key")
    store.write_container(made, {"protocol": 1, "b": 2}, b"second key")
    assert store.files.read(f"runs/{RUN}/container/key") == b"first key"
    assert json.loads(store.files.read(f"runs/{RUN}/container/context.json")) == {"protocol": 1, "b": 2}
    if store.url.startswith("file:"):
        assert (tmp_path / "store" / "runs" / RUN / "container" / "key").stat().st_mode & 0o777 == 0o600


def test_cancel_and_result(store: Store) -> None:
    assert not store.cancelled(RUN)
    store.cancel(RUN)
    store.cancel(RUN)
    assert store.cancelled(RUN)
    assert store.result(RUN) is None
    assert store.write_result(RUN, {"state": "succeeded"}) == {"state": "succeeded"}
    assert store.write_result(RUN, {"state": "failed"}) == {"state": "succeeded"}
    assert store.result(RUN) == {"state": "succeeded"}


def test_an_exit_record_that_is_being_written_is_read_again(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    live(store, "exit/0.0-node-0.json", '{"at": ')
    monkeypatch.setattr("time.sleep", lambda seconds: live(store, "exit/0.0-node-0.json", '{"at": 1}'))
    assert store.exits(RUN) == [{"at": 1}]


def test_exits_skip_what_is_broken(store: Store) -> None:
    assert store.exits(RUN) == []
    for attempt, node in (("0.0", 0), ("0.0", 10), ("0.0", 2), ("0.10", 0), ("0.9", 0)):
        live(store, f"exit/{attempt}-node-{node}.json", json.dumps({"at": [attempt, node]}))
    live(store, "exit/0.0-node-3.json", '{"at": ')
    live(store, "exit/0.0-node-4.json", "[]")
    live(store, "exit/0.0-node-5.txt", "{}")
    assert [record["at"] for record in store.exits(RUN)] == [
        ["0.0", 0],
        ["0.0", 2],
        ["0.0", 10],
        ["0.9", 0],
        ["0.10", 0],
    ]


# ---------------------------------------------------------------------------------------------------------- checkpoints


def test_only_complete_checkpoints_count(store: Store) -> None:
    assert store.checkpoints(RUN) == []
    assert store.newest_checkpoint(RUN) is None
    whole = commit(store, "step-120", {"node-0/step-120/model.pt": b"abc", "node-1/step-120/optim.pt": b"de"}, seq=3)
    short = commit(store, "step-130", {"node-0/step-130/model.pt": b"abc"})
    store.files.write(f"{short}/node-0/step-130/model.pt", b"ab")
    gone = commit(store, "step-140", {"node-0/step-140/model.pt": b"abc"})
    store.files.remove(f"{gone}/node-0/step-140/model.pt")
    torn = commit(store, "step-150", {"node-0/step-150/model.pt": b"abc"})
    store.files.write(f"{torn}/commit.json", b'{"protocol": 1, "na')
    odd = commit(store, "step-160", {"node-0/step-160/model.pt": b"abc"})
    store.files.write(f"{odd}/commit.json", b'{"protocol": 1, "files": {"x": 3}, "time": 1}')
    live(store, "checkpoints/step-170/0.0-0/node-0/step-170/model.pt", b"uncommitted")
    (found,) = store.checkpoints(RUN)
    assert found.key == whole
    assert (found.name, found.attempt, found.seq, found.step, found.bytes) == ("step-120", "0.0", 3, 120, 5)
    assert found.committed == 1000.0
    assert found.files["node-1/step-120/optim.pt"] == (2, digest(b"de"))
    assert store.newest_checkpoint(RUN) == found


def test_archived_checkpoints_count_and_one_that_is_moving_counts_once(store: Store) -> None:
    old = commit(store, "step-1", {"node-0/step-1": b"abc"}, seq=1)
    new = commit(store, "step-2", {"node-0/step-2": b"abc"}, seq=2)
    for key in store.files.list(old):
        store.files.write(key.replace("/live/", "/archive/"), store.files.read(key))
    assert [item.key for item in store.checkpoints(RUN)] == [old, new]
    store.files.remove(f"{old}/commit.json")
    assert [item.key for item in store.checkpoints(RUN)] == [old.replace("/live/", "/archive/"), new]
    assert [item.name for item in store.checkpoints(RUN)] == ["step-1", "step-2"]


@pytest.mark.parametrize(
    ("name", "step"),
    [("step-120", 120), ("checkpoint-500", 500), ("epoch=3-step=96", 96), ("epoch=3-step=96.ckpt", 96), ("last", None)],
)
def test_the_step_is_in_the_name(local: Store, name: str, step: int | None) -> None:
    commit(local, name, {f"node-0/{name}": b"x"})
    (found,) = local.checkpoints(RUN)
    assert (found.name, found.step) == (name, step)


def test_newest_is_by_attempt_then_time_then_seq(local: Store) -> None:
    for name, attempt, seq, when in [
        ("a", "0.10", 0, 50.0),
        ("b", "0.9", 0, 90.0),
        ("c", "1.0", 0, 10.0),
        ("d", "1.0", 10, 20.0),
        ("e", "1.0", 9, 20.0),
        ("f", "0.9", 5, 80.0),
    ]:
        commit(local, name, {f"node-0/{name}": b"x"}, attempt=attempt, seq=seq, time=when)
    assert [item.name for item in local.checkpoints(RUN)] == ["f", "b", "a", "c", "e", "d"]


def direct(store: Store, name: str, *files: str) -> None:
    """Write a checkpoint as a script does that writes to the store itself, a file at a time."""
    for file in files:
        store.files.write(f"runs/{RUN}/checkpoints/{name}/{file}", f"direct {file}".encode())
        time.sleep(0.02)


def test_what_a_script_wrote_to_the_store_is_whole_by_its_metadata(store: Store) -> None:
    direct(store, "step-1", "__0_0.distcp", ".metadata")
    direct(store, "step-2", "__0_0.distcp")
    direct(store, "step-3", ".metadata", "__0_0.distcp")  # being written over
    (found,) = store.direct(RUN)
    assert (found.name, found.step, found.bytes) == ("step-1", 1, len("direct __0_0.distcpdirect .metadata"))
    assert abs(found.saved - time.time()) < 60
    assert store.newest_checkpoint(RUN) == found


def test_pull_takes_the_newer_of_two_with_one_name(store: Store, tmp_path: Path) -> None:
    commit(store, "step-1", {"node-0/step-1/a": b"mirrored"}, time=1000.0)
    commit(store, "step-2", {"node-0/step-2/a": b"mirrored"}, time=time.time() + 600)
    for name in ("step-1", "step-2"):
        direct(store, name, "a", ".metadata")
    direct(store, "step-3", ".metadata", "a")
    report = pull(store, RUN, tmp_path / "out", what=["checkpoints"])
    assert sorted(report.checkpoints) == ["step-1", "step-2"]
    found = below(tmp_path / "out")
    assert found.pop("run.json")
    assert found == {
        "checkpoints/step-1/a": b"direct a",
        "checkpoints/step-1/.metadata": b"direct .metadata",
        "checkpoints/step-2/a": b"mirrored",
    }


@pytest.mark.parametrize("before", [False, True], ids=["new", "again"])
def test_pull_mixes_no_versions_of_what_a_script_writes_over(store: Store, tmp_path: Path, before: bool) -> None:
    """The script saves again while the first file is fetched, twice."""
    files = ["__0_0.distcp", "__1_0.distcp", ".metadata"]
    versions = iter([b"two", b"three"])

    def save(data: bytes) -> None:
        for file in files:
            store.files.write(f"runs/{RUN}/checkpoints/last/{file}", data)
            time.sleep(0.02)

    def progress(key: str, more: int) -> None:
        if key.endswith(files[0]) and (data := next(versions, None)):
            save(data)

    save(b"one")
    if before:
        pull(store, RUN, tmp_path / "out", what=["checkpoints"])
        save(b"another")
    report = pull(store, RUN, tmp_path / "out", what=["checkpoints"], progress=progress)
    assert report.checkpoints == ("last",)
    found = below(tmp_path / "out")
    assert found.pop("run.json")
    assert found == {f"checkpoints/last/{file}": b"three" for file in files}
    assert pull(store, RUN, tmp_path / "out", what=["checkpoints"]).transferred == 0


# -------------------------------------------------------------------------------------------------------------- metrics


def test_metrics_of_one_attempt_are_kept_in_order() -> None:
    rows = [{"epoch": 0}, {"step": 1, "loss": 3}, {"step": 1, "val": 2}, {"step": 2, "loss": 1}, {"done": True}]
    assert merge_metrics([rows]) == rows


def test_a_resumed_attempt_replaces_from_its_first_step() -> None:
    first = [{"note": "a"}, *({"step": n, "a": 0} for n in range(1, 6)), {"note": "b"}]
    second = [{"step": n, "a": 1} for n in (4, 5, 6)]
    third = [{"note": "died at once"}]
    merged = merge_metrics([first, second, third])
    assert [(row["step"], row["a"]) for row in merged if "step" in row] == [
        (1, 0),
        (2, 0),
        (3, 0),
        (4, 1),
        (5, 1),
        (6, 1),
    ]
    assert [row["note"] for row in merged if "note" in row] == ["a", "b", "died at once"]


@given(st.lists(st.integers(1, 30).flatmap(lambda first: st.tuples(st.just(first), st.integers(0, 20))), max_size=6))
def test_each_step_comes_from_the_last_attempt_that_took_it(spans: list[tuple[int, int]]) -> None:
    spans = [(1, 40), *spans]
    attempts = [[{"step": n, "from": k} for n in range(first, first + count)] for k, (first, count) in enumerate(spans)]
    merged = merge_metrics(attempts)
    steps = [row["step"] for row in merged]
    assert steps == sorted(set(steps))
    for row in merged:
        assert row["from"] == max(k for k, rows in enumerate(attempts) if row["step"] in [r["step"] for r in rows])


# ----------------------------------------------------------------------------------------------------------------- pull


@pytest.fixture
def full(store: Store) -> Store:
    """Return a store whose run has left files of every kind."""
    commit(store, "step-1", {"node-0/step-1/model.pt": b"old"}, seq=0)
    commit(
        store,
        "step-1",
        {
            "node-0/step-1/model.pt": b"new",
            "node-0/step-1/config": b"same",
            "node-1/step-1/config": b"same",
            "node-0/step-1/rank": b"zero",
            "node-1/step-1/rank": b"one",
            "node-1/step-1/d/only": b"1",
        },
        seq=1,
        time=2000.0,
    )
    commit(store, "last.ckpt", {"node-0/last.ckpt": b"file"})
    broken = commit(store, "step-2", {"node-0/step-2/model.pt": b"half"})
    store.files.remove(f"{broken}/node-0/step-2/model.pt")
    live(store, "artifacts/node-0/model.bin", b"weights")
    live(store, "artifacts/node-1/model.bin", b"weights")
    live(store, "artifacts/node-0/tb/events", b"node 0")
    live(store, "artifacts/node-1/tb/events", b"node 1")
    for seq in range(12):
        live(store, f"logs/0.0/node-0/{seq}.log", f"line {seq}\n")
    live(store, "logs/1.0/node-1/0.log", "second\n")
    live(store, "metrics/0.0-node-0.jsonl", '{"step": 1, "loss": 3}\n{"step": 2, "loss": 2}\n{"step": 3, "lo')
    live(store, "metrics/1.0-node-0.jsonl", '{"step": 2, "loss": 1}\n')
    store.files.write(f"runs/{RUN}/native/output/model.tar.gz", b"native")
    store.write_result(RUN, {"state": "succeeded"})
    return store


EVERYTHING = {
    "checkpoints/step-1/model.pt": b"new",
    "checkpoints/step-1/config": b"same",
    "checkpoints/step-1/rank": b"zero",
    "checkpoints/step-1/node-1/rank": b"one",
    "checkpoints/step-1/d/only": b"1",
    "checkpoints/last.ckpt": b"file",
    "artifacts/model.bin": b"weights",
    "artifacts/tb/events": b"node 0",
    "artifacts/node-1/tb/events": b"node 1",
    "logs/0.0/node-0.log": "".join(f"line {seq}\n" for seq in range(12)).encode(),
    "logs/1.0/node-1.log": b"second\n",
    "metrics.jsonl": b'{"step": 1, "loss": 3}\n{"step": 2, "loss": 1}\n',
    "native/output/model.tar.gz": b"native",
}


def test_pull(full: Store, tmp_path: Path) -> None:
    moved: list[int] = []
    report = pull(full, RUN, tmp_path / "out", progress=lambda _, more: moved.append(more))
    found = below(tmp_path / "out")
    assert json.loads(found.pop("result.json")) == {"state": "succeeded"}
    assert json.loads(found.pop("run.json"))["name"] == "train"
    assert found == EVERYTHING
    assert set(report.files) == {*EVERYTHING, "result.json", "run.json"}
    assert report.transferred == sum(moved) > sum(map(len, EVERYTHING.values()))
    assert sorted(report.checkpoints) == ["last.ckpt", "step-1"]
    assert report.refused == ()


def test_a_second_pull_transfers_nothing(full: Store, tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = pull(full, RUN, out)
    second = pull(full, RUN, out)
    assert second.transferred == 0
    assert second.files == first.files
    before = below(out)
    (out / "artifacts" / "model.bin").write_bytes(b"WEIGHTS")
    (out / "checkpoints" / "step-1" / "model.pt").write_bytes(b"NEW")
    (out / "metrics.jsonl").unlink()
    metrics = full.files.list(f"runs/{RUN}/live/metrics")
    assert pull(full, RUN, out).transferred == len(b"weights") + len(b"new") + sum(metrics.values())
    assert below(out) == before
    origin = json.loads((out / ".cloudtrain-pull.json").read_bytes())["run"]
    (out / ".cloudtrain-pull.json").write_text(
        json.dumps({"run": origin, "files": {}})
    )  # digests alone are enough for checkpoints
    assert pull(full, RUN, out, what=["checkpoints"]).transferred < 1000
    assert pull(full, RUN, out, what=["checkpoints"]).transferred == 0


def test_pull_follows_what_is_rewritten(full: Store, tmp_path: Path) -> None:
    out = tmp_path / "out"
    pull(full, RUN, out)
    commit(full, "step-1", {"node-0/step-1/model.pt": b"newer", "node-0/step-1/config": b"same"}, seq=2, time=3000.0)
    (out / "checkpoints" / "step-1" / "mine.txt").write_bytes(b"the user's")
    live(full, "artifacts/node-0/model.bin", b"WEIGHTS")  # as long as before
    live(full, "logs/0.0/node-0/11.log", "line 11, and more\n")
    live(full, "logs/0.0/node-0/12.log", "line 12\n")
    report = pull(full, RUN, out)
    found = below(out)
    assert {path: data for path, data in found.items() if path.startswith("checkpoints/step-1/")} == {
        "checkpoints/step-1/model.pt": b"newer",
        "checkpoints/step-1/config": b"same",
        "checkpoints/step-1/mine.txt": b"the user's",
    }
    assert found["artifacts/model.bin"] == b"WEIGHTS"
    assert found["artifacts/node-1/model.bin"] == b"weights"
    assert found["logs/0.0/node-0.log"].endswith(b"line 10\nline 11, and more\nline 12\n")
    # Of the log, only the segments that changed came over.
    assert report.transferred == len(b"newer" + b"WEIGHTS" + b"weights" + b"line 11, and more\nline 12\n")
    assert pull(full, RUN, out).transferred == 0


def test_damaged_content_is_not_kept(store: Store, tmp_path: Path) -> None:
    key = commit(store, "step-1", {"node-0/step-1/a": b"good", "node-0/step-1/b": b"fine"})
    store.files.write(f"{key}/node-0/step-1/b", b"evil")
    with pytest.raises(DigestError, match="instead of"):
        pull(store, RUN, tmp_path / "out")
    assert not (tmp_path / "out" / "checkpoints" / "step-1").exists()
    store.files.write(f"{key}/node-0/step-1/b", b"fine")
    pull(store, RUN, tmp_path / "out")
    assert sorted(os.listdir(tmp_path / "out" / "checkpoints" / "step-1")) == ["a", "b"]
    assert os.listdir(tmp_path / "out" / "checkpoints") == ["step-1"]


def test_hostile_names_stay_in_the_store(store: Store, tmp_path: Path) -> None:
    live(store, "artifacts/node-0/good", b"1")
    if store.url.startswith("file:"):
        bad = tmp_path / "store" / "runs" / RUN / "live" / "artifacts" / "node-0" / "..\\evil"
        bad.write_bytes(b"2")
    else:
        MemoryFileSystem().pipe_file(f"/bucket/store/runs/{RUN}/live/artifacts/node-0/..\\evil", b"2")
    report = pull(store, RUN, tmp_path / "out")
    assert report.refused == (f"runs/{RUN}/live/artifacts/node-0/..\\evil",)
    assert {p for p in report.files if p.startswith("artifacts")} == {"artifacts/good"}
    for hostile in ("node-0/../../../x", "/etc/x", "node-0/c/..\\x"):
        key = f"runs/{RUN}/live/checkpoints/c/0.0-0"
        listed = {hostile: {"size": 1, "sha256": digest(b"1")}}
        record = {"protocol": 1, "name": "c", "attempt": "0.0", "seq": 0, "nodes": 1, "time": 1.0, "files": listed}
        store.files.write(f"{key}/commit.json", json.dumps(record).encode())
        assert store.checkpoints(RUN) == []


def test_pull_does_not_write_through_a_link(full: Store, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "out").mkdir()
    pull(full, RUN, tmp_path / "out", what=["logs"])
    (tmp_path / "out" / "artifacts").symlink_to(tmp_path / "outside")
    with pytest.raises(StorageError, match="symbolic link"):
        pull(full, RUN, tmp_path / "out")
    assert os.listdir(tmp_path / "outside") == []


def test_a_folder_with_files_of_its_own_is_left_alone(full: Store, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print()")
    pull(full, RUN, tmp_path / "new")
    assert (tmp_path / "new" / ".gitignore").exists()
    (tmp_path / "result.json").write_text("precious")
    with pytest.raises(SpecError, match=r"has a result\.json that no pull wrote"):
        pull(full, RUN, tmp_path)
    assert (tmp_path / "result.json").read_text() == "precious"
    assert not (tmp_path / ".gitignore").exists()
    (tmp_path / "result.json").unlink()
    for _ in range(2):
        pull(full, RUN, tmp_path)
        assert not (tmp_path / ".gitignore").exists()  # or git would no longer see the user's files


def test_runs_pulled_into_one_folder_do_not_mix(full: Store, tmp_path: Path) -> None:
    pull(full, RUN, tmp_path / "out")
    (tmp_path / "out" / "artifacts" / "model.bin").write_bytes(b"touched by the user")
    full.create_run(layout(full, run_id="other"), {"name": "other"})
    full.files.write("runs/other/live/artifacts/node-0/mine.bin", b"of the other")
    pull(full, "other", tmp_path / "out")
    files = below(tmp_path / "out")
    assert "artifacts/mine.bin" in files
    assert "artifacts/model.bin" in files
    assert not [path for path in files if path.startswith("checkpoints/")]


def test_another_run_in_the_same_folder_is_no_memory(full: Store, tmp_path: Path) -> None:
    pull(full, RUN, tmp_path)
    full.create_run(layout(full, run_id="other"), {"name": "other"})
    full.files.write("runs/other/live/artifacts/node-0/model.bin", b"weights of the other")
    pull(full, "other", tmp_path)
    assert (tmp_path / "artifacts" / "model.bin").read_bytes() == b"weights of the other"
    assert json.loads((tmp_path / "run.json").read_bytes())["name"] == "other"


def test_pull_knows_its_words(full: Store, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="did you mean 'artifacts'"):
        pull(full, RUN, tmp_path, what=["artefacts"])
    with pytest.raises(NotFoundError):
        pull(full, "none", tmp_path)
    pull(full, RUN, tmp_path / "logs-only", what=["logs"])
    assert {path.split("/")[0] for path in below(tmp_path / "logs-only")} == {"logs", "run.json", "result.json"}


def test_a_submission_that_is_noted_again_keeps_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(str(tmp_path))
    for now, native in ((1.0, "job-a"), (2.0, "job-a"), (3.0, "job-b")):
        monkeypatch.setattr("cloudtrain.store.store.time.time", lambda now=now: now)
        store.write_submitted("r", 0, native)
        expected = {"native_id": native, "time": 3.0 if native == "job-b" else 1.0}
        assert store.submitted("r", 0) == expected


@for_each(
    ("url", "hint"),
    [
        ("https://acct.blob.core.windows.net/runs/x", "use abfs://runs@acct.dfs.core.windows.net/x"),
        ("https://acct.dfs.core.usgovcloudapi.net/runs", "use abfs://runs@acct.dfs.core.usgovcloudapi.net"),
        ("https://bucket.s3.eu-west-1.amazonaws.com/x", "use s3://bucket/x"),
        ("https://my.bucket.s3.amazonaws.com/x/y", "use s3://my.bucket/x/y"),
        ("https://s3.eu-west-1.amazonaws.com/bucket/x", "use s3://bucket/x"),
        ("https://s3-eu-west-1.amazonaws.com/bucket/x", "use s3://bucket/x"),
        ("https://bucket.s3.cn-north-1.amazonaws.com.cn/x", "use s3://bucket/x"),
        ("https://storage.googleapis.com/bucket/x", "use gs://bucket/x"),
        ("https://storage.cloud.google.com/bucket/x", "use gs://bucket/x"),
        ("https://bucket.storage.googleapis.com/x", "use gs://bucket/x"),
        ("https://example.org/x", "use s3://BUCKET/PREFIX"),
        ("ftp://h/x", "use s3://BUCKET/PREFIX"),
        ("hf://datasets/o/n", "use s3://BUCKET/PREFIX"),
    ],
)
def test_what_cannot_be_a_store_names_the_one_that_it_means(url: str, hint: str) -> None:
    with pytest.raises(SpecError, match="cannot be a store") as caught:
        Store(url)
    assert caught.value.field == "store"
    assert caught.value.hint.startswith(hint)
