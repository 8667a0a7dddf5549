"""gc.py: data without a run is found and removed. Data of a run never is, even while other clients stage."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from servers import race

from cloudtrain import cli
from cloudtrain.errors import ConflictError, NotFoundError, StorageError
from cloudtrain.job.job import Job
from cloudtrain.provider_api.protocol import Layout
from cloudtrain.runs import submit as submit_module
from cloudtrain.runs.listing import list_page
from cloudtrain.runs.submit import Plan, make_plan, send_plan
from cloudtrain.settings.settings import Settings
from cloudtrain.storage.files import files
from cloudtrain.storage.lease import FOLDER, MARK
from cloudtrain.storage.local_disk import TEMP
from cloudtrain.store.gc import ANNOUNCED, Collected, collect, collect_at
from cloudtrain.store.store import Store

CODE, OLD_CODE, RUNTIME, OLD_RUNTIME, DATA, OLD_DATA, HALF = (f"{number:064x}" for number in range(7))
DAY = 86400


@pytest.fixture(params=["local", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    made = Store(str(tmp_path / "store") if request.param == "local" else "memory://bucket/store")
    fill(made)
    yield made
    MemoryFileSystem.store.clear()


@pytest.fixture
def local(tmp_path: Path) -> Store:
    made = Store("store", cwd=tmp_path)
    fill(made)
    return made


def fill(store: Store) -> None:
    """Write a run, the data that it names, and data that no run names."""
    run(store, "kept", code=CODE, runtime=RUNTIME, data=DATA)
    for digest in (CODE, OLD_CODE):
        store.files.write(f"code/{digest}/code.tar.gz", b"code")
    for digest in (RUNTIME, OLD_RUNTIME):
        store.files.write(f"runtime/{digest}/cloudtrain.pyz", b"runtime")
    for digest in (DATA, OLD_DATA, HALF):
        store.files.write(f"data/{digest}/a.csv", b"12345")
        store.files.write(f"data/{digest}/sub/b.csv", b"1234567")
    for digest in (DATA, OLD_DATA):
        store.files.write(f"data/manifests/{digest}.json", b"{}")
    store.files.write("runs/crashed/live/logs/0.0/node-0/0.log", b"line")
    store.files.write("runs/kept/live/artifacts/node-0/model", b"weights")
    store.files.write("code/notes.txt", b"somebody's own")


def run(store: Store, run_id: str, **digests: str) -> None:
    layout = Layout(store=store.url, run_id=run_id, code_digest=digests["code"], runtime_digest=digests["runtime"])
    inputs = {"train": {"url": f"{store.url}/data/{digests.get('data', DATA)}"}}
    record = {"code_digest": layout.code_digest, "runtime_digest": layout.runtime_digest, "inputs": inputs}
    assert store.create_run(layout, {"protocol": 1, "layout": record})


LEFT = {
    ("code", f"code/{OLD_CODE}", 1, 4),
    ("runtime", f"runtime/{OLD_RUNTIME}", 1, 7),
    ("data", f"data/{OLD_DATA}", 3, 14),
    ("upload", f"data/{HALF}", 2, 12),
    ("run", "runs/crashed", 1, 4),
}


def rows_of(found: Collected) -> set[tuple[str, str, int, int]]:
    return {(item.kind, item.key, item.files, item.bytes) for item in found.found}


def age(store: Store, key: str, days: float) -> None:
    """Date all files below ``key`` back by ``days``."""
    root = Path(store.url.removeprefix("file://"))
    when = time.time() - days * DAY
    for path in [root / key, *(root / key).rglob("*")]:
        if path.is_file():
            os.utime(path, (when, when))


def listed(store: Store, folder: str = "") -> set[str]:
    """Return all files but the mark of `gc`, which stays there as released."""
    return set(store.files.list(folder)) - {MARK}


def test_a_dry_run_tells_what_no_run_names_and_writes_nothing(store: Store) -> None:
    before = store.files.entries()
    found = collect(store, older_than=0)
    assert rows_of(found) == LEFT
    assert found.bytes == sum(size for *_, size in LEFT)
    assert [item.bytes for item in found.found] == sorted((item.bytes for item in found.found), reverse=True)
    assert not found.deleted
    assert store.files.entries() == before


def test_what_is_removed_is_gone_and_the_rest_is_as_it_was(store: Store) -> None:
    before = listed(store)
    messages: list[str] = []
    found = collect(store, older_than=0, delete=True, say=messages.append)
    assert rows_of(found) == LEFT
    assert found.deleted
    gone = {key for key in before if any(key.startswith(f"{folder}/") for _, folder, *_ in LEFT)}
    assert listed(store) == before - gone - {f"data/manifests/{OLD_DATA}.json"}
    assert sorted(messages) == sorted(f"removed {folder}" for _, folder, *_ in LEFT)
    assert collect(store, older_than=0, delete=True).found == ()


def test_what_is_young_stays(local: Store) -> None:
    age(local, "code", days=8)
    age(local, f"data/{OLD_DATA}", days=8)
    found = collect(local, delete=True)
    assert [item.key for item in found.found] == [f"code/{OLD_CODE}"]
    assert f"data/{OLD_DATA}" in {item.key for item in found.younger}, "its manifest is young"
    age(local, f"data/manifests/{OLD_DATA}.json", days=8)
    assert [item.key for item in collect(local, delete=True).found] == [f"data/{OLD_DATA}"]
    assert [item.key for item in collect(local, older_than=1, delete=False).found] == []


@pytest.mark.parametrize(
    "broken", [b"{", b"[]", b'{"protocol": 2, "layout": {"code_digest": "x"}}', b'{"protocol": 1}']
)
def test_a_run_that_cannot_be_read_stops_all_deletion(store: Store, broken: bytes) -> None:
    store.files.write("runs/broken/run.json", broken)
    before = listed(store)
    assert collect(store, older_than=0).unreadable == ("broken",)
    with pytest.raises(StorageError, match=r"nothing is removed: run\.json of broken"):
        collect(store, older_than=0, delete=True)
    assert listed(store) == before


def test_a_run_that_a_newer_version_names_counts_too(store: Store) -> None:
    """Test a run.json with another spelling of the store's URL, and one in a folder that is not a run id."""
    record = {"protocol": 1, "layout": {"code_digest": OLD_CODE}, "job": {"inputs": f"s3a://B/s/data/{OLD_DATA}/a.csv"}}
    store.files.write("runs/Other_Name/run.json", json.dumps(record).encode())
    store.files.write("runs/resumed/run.json", json.dumps({**record, "resume": "x://y/runs/crashed/live"}).encode())
    assert rows_of(collect(store, older_than=0, delete=True)) == {
        row for row in LEFT if row[1] in (f"runtime/{OLD_RUNTIME}", f"data/{HALF}")
    }


def test_what_is_being_staged_stays(store: Store) -> None:
    layout = Layout(store=store.url, run_id="crashed", code_digest=OLD_CODE, runtime_digest=OLD_RUNTIME)
    assert store.stage(layout, archive=lambda: b"never", pyz=b"never").code_bytes == 0
    assert rows_of(collect(store, older_than=0, delete=True)) == {row for row in LEFT if row[0] in ("data", "upload")}
    store.create_run(layout, {"protocol": 1, "layout": {"code_digest": OLD_CODE, "runtime_digest": OLD_RUNTIME}})
    assert not listed(store, FOLDER)
    assert collect(store, older_than=0, delete=True).found == ()


def test_an_announcement_of_a_client_that_died_runs_out(local: Store) -> None:
    layout = Layout(store=local.url, run_id="dead", code_digest=OLD_CODE, runtime_digest=OLD_RUNTIME)
    local.stage(layout, archive=lambda: b"", pyz=b"")
    assert f"code/{OLD_CODE}" not in {item.key for item in collect(local, older_than=0).found}
    age(local, FOLDER, days=ANNOUNCED / DAY + 1)
    found = collect(local, older_than=0, delete=True)
    assert {item.kind for item in found.found} == {"code", "runtime", "data", "upload", "run", "staging"}
    assert not listed(local, FOLDER)


def test_half_written_files_of_a_local_store(local: Store) -> None:
    root = Path(local.url.removeprefix("file://"))
    for folder in (f"code/{CODE}", "code/" + "f" * 64, "runs/empty", "runs/kept/attempts/0"):
        (root / folder).mkdir(parents=True, exist_ok=True)
        (root / folder / f"{TEMP}0").write_bytes(b"half")
    assert rows_of(collect(local, older_than=0)) == LEFT, "another client may be writing them"
    for path in root.rglob(f"{TEMP}*"):
        os.utime(path, (time.time() - 2 * DAY,) * 2)
    found = rows_of(collect(local, older_than=0, delete=True))
    assert found - LEFT == {
        ("upload", f"code/{CODE}/{TEMP}0", 1, 4),
        ("upload", "code/" + "f" * 64, 1, 4),
        ("upload", "runs/empty", 1, 4),
        ("upload", f"runs/kept/attempts/0/{TEMP}0", 1, 4),
    }
    assert list(root.rglob(f"{TEMP}*")) == []
    assert local.files.read(f"code/{CODE}/code.tar.gz") == b"code"
    assert "empty" not in local.runs()


def test_empty_folders_of_runs_go_but_not_one_that_is_being_staged(local: Store) -> None:
    runs = Path(local.url.removeprefix("file://")) / "runs"
    local.stage(
        Layout(store=local.url, run_id="next", code_digest=CODE, runtime_digest=RUNTIME), archive=lambda: b"", pyz=b""
    )
    for name in ("next/live", "empty/live/logs", "Not_A_Run/live", "kept/live/checkpoints"):
        (runs / name).mkdir(parents=True, exist_ok=True)
    before = {path.name for path in runs.iterdir()}
    collect(local, older_than=0)
    assert {path.name for path in runs.iterdir()} == before
    collect(local, older_than=0, delete=True)
    assert {path.name for path in runs.iterdir()} == before - {"empty", "crashed"}
    assert (runs / "next" / "live").is_dir()
    assert (runs / "kept" / "live" / "checkpoints").is_dir()


def test_what_only_the_request_of_a_run_names_stays(store: Store) -> None:
    """The client resumed another's run and used other data."""
    request = {"inputs": {"x": {"url": f"{store.url}/data/{OLD_DATA}"}}}
    store.files.write("runs/kept/attempts/0/request.json", json.dumps(request).encode())
    assert f"data/{OLD_DATA}" not in {item.key for item in collect(store, older_than=0, delete=True).found}
    assert store.files.exists(f"data/{OLD_DATA}/a.csv")


def test_a_run_that_is_recorded_with_other_data_is_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client died between run.json and its request. No client continues with data that run.json does not name."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "train.py").write_text("print(1)")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a").write_text("one")
    role = "arn:aws:iam::123456789012:role/r"
    image = "123456789012.dkr.ecr.eu-west-1.amazonaws.com/team/trainer:1"
    settings = Settings(
        provider="sagemaker", store="s3://b/s", tables={"sagemaker": {"region": "eu-west-1", "role": role}}
    )
    job = Job.make(entry_point="train.py", image=image, max_runtime="1h", inputs={"x": str(tmp_path / "data")})
    bucket = files("memory://bucket/other")

    def planned() -> Plan:
        plan = make_plan(job, settings=settings, run_id="r", cwd=tmp_path / "code")
        plan.store.files = bucket
        return plan

    first = planned()
    first.store.stage(first.layout, archive=lambda: b"", pyz=b"", trees=first.upload.trees)
    assert first.store.create_run(first.layout, submit_module._record(first))
    submit_module.with_recorded_origin(planned())
    (tmp_path / "data" / "a").write_text("two and more")
    with pytest.raises(ConflictError, match="different: inputs"):
        send_plan(planned(), environ={})
    MemoryFileSystem.store.clear()


def test_staging_that_took_days_is_not_recorded(local: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = Layout(store=local.url, run_id="slow", code_digest=OLD_CODE, runtime_digest=OLD_RUNTIME)
    local.stage(layout, archive=lambda: b"", pyz=b"")
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 6 * DAY)
    with pytest.raises(StorageError, match="run the same command again"):
        local.create_run(layout, {"protocol": 1, "layout": {"code_digest": OLD_CODE}})
    assert "slow" not in local.runs()


def test_a_plain_file_among_the_runs_is_none(local: Store) -> None:
    local.files.write("runs/.DS_Store", b"of a file manager")
    assert rows_of(collect(local, older_than=0, delete=True)) == LEFT
    assert local.files.exists("runs/.DS_Store")


def test_who_lost_its_right_meanwhile_removes_no_more(local: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client is suspended between two files, and wakes up when others stage again."""
    discard, gone = local.files.discard, list[str]()

    def suspended(keys: Sequence[str]) -> None:
        discard(keys)
        gone.extend(keys)
        until = time.monotonic() + 1.5
        while time.monotonic() < until:  # the mark is renewed every 0.4 s, perhaps just now
            local.files.write(MARK, b"another's")
            time.sleep(0.02)

    monkeypatch.setattr(local.files, "discard", suspended)
    with pytest.raises(StorageError, match="run the same command again"):
        collect(local, older_than=0, delete=True, lease=4.0)
    assert len(gone) == 1


@pytest.mark.skipif(os.name == "nt", reason="links need a right there")
def test_of_a_link_the_link_goes(local: Store, tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "a").write_text("precious")
    link = tmp_path / "store" / "code" / ("e" * 64)
    link.symlink_to(tmp_path / "theirs")
    collect(local, older_than=0, delete=True)
    assert not link.is_symlink()
    assert (tmp_path / "theirs" / "a").read_text() == "precious"


@pytest.mark.remote
@pytest.mark.filterwarnings("ignore:Sending a large body directly:ResourceWarning")
@pytest.mark.parametrize("place", ["s3", "azure", "gcs"])
def test_an_object_store(place: str, request: pytest.FixtureRequest) -> None:
    store = Store(request.getfixturevalue(f"{place}_url"))
    fill(store)
    before = listed(store)
    found = collect(store)
    assert (found.found, {item.key for item in found.younger}) == ((), {folder for _, folder, *_ in LEFT})
    assert all(abs(found.now - item.modified) < 3600 for item in found.younger), "the store lists other times"
    assert listed(store) == before
    layout = Layout(store=store.url, run_id="next", code_digest=OLD_CODE, runtime_digest=RUNTIME)
    store.stage(layout, archive=lambda: b"never", pyz=b"never")
    assert rows_of(collect(store, older_than=0, delete=True)) == {row for row in LEFT if row[0] != "code"}
    store.create_run(layout, {"protocol": 1, "layout": {"code_digest": OLD_CODE, "runtime_digest": RUNTIME}})
    assert collect(store, older_than=0, delete=True).found == ()
    assert not listed(store, FOLDER)
    assert store.files.exists(f"code/{OLD_CODE}/code.tar.gz")


@pytest.mark.remote
@pytest.mark.filterwarnings("ignore:Sending a large body directly:ResourceWarning")
def test_a_run_that_was_collected_leaves_the_list_with_its_marks_of_folders(
    request: pytest.FixtureRequest,
) -> None:
    """Azure ML's mount makes an empty blob for each folder (seen with azureml-dataprep-rslex)."""
    from azure.storage.blob import BlobServiceClient

    store = Store(request.getfixturevalue("azure_url"))
    run(store, "kept", code=CODE, runtime=RUNTIME)
    store.files.write("runs/dead/live/logs/0.0/node-0/0.log", b"line")
    container, _, path = store.url.removeprefix("abfs://").partition("/")
    service = BlobServiceClient.from_connection_string(os.environ["AZURE_STORAGE_CONNECTION_STRING"])
    with service, service.get_container_client(container.partition("@")[0]) as blobs:
        dead = ["dead", "dead/live", "dead/live/logs", "dead/live/logs/0.0"]
        for mark in (*dead, "kept", "kept/live", "empty", "empty/live"):
            blobs.upload_blob(f"{path}/runs/{mark}", b"", metadata={"hdi_isfolder": "true"})
        assert [row["run_id"] for row in list_page(store, limit=None).rows] == ["kept", "dead"]
        (found,) = (item for item in collect(store, older_than=0, delete=True).found if item.kind == "run")
        assert (found.key, found.files) == ("runs/dead", 1)
        assert [row["run_id"] for row in list_page(store, limit=None).rows] == ["kept"]
        left = {name.removeprefix(f"{path}/runs/") for name in blobs.list_blob_names(name_starts_with=f"{path}/runs/")}
    assert left == {"kept", "kept/live", "kept/run.json"}


_RACER = """
import random, time
from cloudtrain.errors import StorageError
from cloudtrain.store.gc import collect
from cloudtrain.provider_api.protocol import Layout
from cloudtrain.store.store import Store
store, number = Store(sys.argv[1]), int(sys.argv[2])
dice, missing = random.Random(number), []
ready()
if number == 0:
    for _ in range(12):
        collect(store, older_than=0, delete=True)
else:
    for turn in range(10):
        code, runtime = (f"{dice.randrange(4):064x}" for _ in "ab")
        layout = Layout(store=store.url, run_id=f"r{number}-{turn}", code_digest=code, runtime_digest=runtime)
        store.stage(layout, archive=lambda: b"code", pyz=b"pyz")
        time.sleep(dice.random() / 50)
        store.create_run(layout, {"protocol": 1, "layout": {"code_digest": code, "runtime_digest": runtime}})
        missing += [url for url in (layout.code, layout.runtime) if not store.files.exists(store._key(url))]
        if turn % 2:
            store.files.remove(f"runs/{layout.run_id}")
print(json.dumps(missing))
"""


@pytest.mark.slow
def test_clients_that_stage_while_another_deletes_lose_nothing(tmp_path: Path) -> None:
    url = Store("store", cwd=tmp_path).url
    assert race(_RACER, url, count=4) == [[], [], [], []]
    store = Store(url)
    for run_id in store.runs():
        layout = store.run(run_id)["layout"]
        assert store.files.exists(f"code/{layout['code_digest']}/code.tar.gz")
        assert store.files.exists(f"runtime/{layout['runtime_digest']}/cloudtrain.pyz")


def gc(*argv: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = cli.main(["gc", *argv])
    out = capsys.readouterr()
    return code, out.out, out.err


def test_the_verb(local: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = str(tmp_path / "store")
    code, out, err = gc(place, capsys=capsys)
    assert (code, out) == (0, "")
    assert "nothing that no run needs; 5 more, younger than 7d, stay" in err
    age(local, ".", days=30)
    code, out, err = gc(place, "--older-than", "20d", capsys=capsys)
    assert code == 0
    assert out.splitlines()[0].split() == ["kind", "size", "files", "age", "key"]
    assert ["data", "14", "B", "3", "30d", f"data/{OLD_DATA}"] in [line.split() for line in out.splitlines()]
    assert f"next: cloudtrain gc {place} --older-than 20d --delete" in err
    answer: dict[str, Any] = json.loads(gc(place, "--delete", "--json", capsys=capsys)[1])
    assert (answer["deleted"], answer["exit_code"], len(answer["found"])) == (True, 0, 5)
    assert {"kind": "code", "key": f"code/{OLD_CODE}", "files": 1, "bytes": 4, "age_s": 30 * DAY} in [
        {**item, "age_s": round(item["age_s"], -3)} for item in answer["found"]
    ]
    local.files.write("runs/broken/run.json", b"{")
    assert "run.json of broken cannot be read" in gc(place, capsys=capsys)[2]
    code, _, err = gc(place, "--delete", capsys=capsys)
    assert (code, err.count("\n")) == (8, 2)


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="there is no store at"):
        collect_at("none", cwd=tmp_path)
    assert list(tmp_path.iterdir()) == []
