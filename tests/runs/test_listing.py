"""The runs of a store, a page at a time: their order, the reads of a page, and the memory for ten thousand runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import pytest

from cloudtrain import cli
from cloudtrain.errors import NotFoundError, SpecError, StorageError
from cloudtrain.job.job import Job
from cloudtrain.runs import listing
from cloudtrain.runs.listing import Wanted, list_page, recorded_runs
from cloudtrain.runs.outcome import iso_time
from cloudtrain.storage.files import parallel
from cloudtrain.store.store import Store

T0 = 1_700_000_000.0
RUNS = 10_000
JOB = Job.make(entry_point="train.py").to_dict()


def stamped(seconds: float, name: str = "train") -> str:
    return time.strftime("%Y%m%d-%H%M%S", time.gmtime(seconds)) + f"-{name}"


def result_of(run_id: str, created: float, state: str = "succeeded") -> dict[str, Any]:
    row = {"run_id": run_id, "provider": "local", "state": state, "category": None, "reason": "", "name": "train"}
    return {**row, "created": created}


def over(store: Store, run_id: str, created: float, state: str = "succeeded") -> None:
    """Record a run created at ``created`` that has ended."""
    record = {"run_id": run_id, "created": created, "provider": "local", "settings": {}, "job": JOB}
    texts = {"run.json": json.dumps(record), "result.json": json.dumps(result_of(run_id, created, state))}
    if not store.url.startswith("file:"):
        for name, text in texts.items():
            store.files.write(f"runs/{run_id}/{name}", text.encode())
        return
    home = Path(store.url.removeprefix("file://"), "runs", run_id)
    home.mkdir(parents=True)
    for name, text in texts.items():  # not through the store: it flushes each to the disk
        (home / name).write_text(text)
    os.utime(home / "run.json", (created, created))


def ids(page: listing.Listed) -> list[str]:
    return [row["run_id"] for row in page.rows]


def pages(store: Store | str, **words: Any) -> list[str]:
    """Return every run, page by page."""
    found: list[str] = []
    before = None
    while True:
        page = list_page(store, before=before, **words)
        found += ids(page)
        if page.next is None:
            return found
        before = page.next


@pytest.fixture
def folder(tmp_path: Path) -> Store:
    return Store(str(tmp_path / "store"))


@pytest.fixture
def bucket() -> Store:
    """Return a store whose listing has no times of run folders, like an object store."""
    return Store(f"memory://{uuid.uuid4().hex}")


@pytest.mark.costly
@pytest.mark.parametrize("place", ["folder", "bucket"])
def test_the_newest_come_first_whoever_chose_their_ids(place: str, request: pytest.FixtureRequest) -> None:
    store: Store = request.getfixturevalue(place)
    wanted = []
    for number in range(300):
        when = T0 + 60 * number
        run_id = stamped(when) if number % 2 else f"ci-{997 + number}" if number % 4 else f"z{400 - number}"
        over(store, run_id, when)
        wanted.insert(0, run_id)
    first = list_page(store)
    assert (ids(first), first.next, first.order) == (wanted[:50], wanted[49], "created")
    assert first.rows[0]["created"] == iso_time(T0 + 60 * 299)
    assert pages(store) == pages(store, limit=7) == ids(list_page(store, limit=None)) == wanted
    assert list_page(store, limit=300).next is None
    assert list_page(store, limit=299).next == wanted[298]


def test_a_page_reads_its_own_runs_and_no_other(folder: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(300):
        over(folder, stamped(T0 + number) if number % 2 else f"mine-{number}", T0 + number)
    read: list[str] = []
    of = folder.files.read
    monkeypatch.setattr(folder.files, "read", lambda key: read.append(key) or of(key))  # type: ignore[func-returns-value]
    page = list_page(folder, limit=20)
    assert sorted(read) == sorted(f"runs/{run_id}/result.json" for run_id in ids(page))


def test_a_bucket_of_too_many_undated_runs_is_told_to_be_in_another_order(
    bucket: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listing, "ASKED", 3)
    for number in (9, 10, 2, 100):
        over(bucket, f"ci-{number}", T0 - number)
    over(bucket, stamped(T0), T0)
    page = list_page(bucket)
    assert (ids(page), page.order) == ([stamped(T0), "ci-100", "ci-10", "ci-9", "ci-2"], "id")
    assert pages(bucket, limit=1) == ids(page)
    assert ids(list_page(bucket, since=T0 - 9.5)) == [stamped(T0), "ci-9", "ci-2"]
    bucket.files.remove("runs/ci-100")
    bucket.files.remove("runs/ci-10")
    assert list_page(bucket).order == "created"


def test_runs_come_and_go_between_two_pages(folder: Store) -> None:
    for number in range(10):
        over(folder, stamped(T0 + number), T0 + number)
    first = list_page(folder, limit=4)
    over(folder, stamped(T0 + 99), T0 + 99)
    folder.files.remove(f"runs/{first.next}")
    assert ids(list_page(folder, before=first.next)) == [stamped(T0 + n) for n in (5, 4, 3, 2, 1, 0)]
    with pytest.raises(NotFoundError, match="ci-1"):
        list_page(folder, before="ci-1")
    with pytest.raises(SpecError, match="at least 1"):
        list_page(folder, limit=0)
    assert ids(list_page(folder, before="20000101-000000-older")) == []


def test_filters(folder: Store) -> None:
    for number in range(30):
        over(folder, stamped(T0 + number), T0 + number, "failed" if number % 10 == 0 else "succeeded")
    page = list_page(folder, wanted=Wanted(states=["failed"]), limit=2)
    assert ids(page) == [stamped(T0 + 20), stamped(T0 + 10)]
    assert ids(list_page(folder, wanted=Wanted(states=["failed"]), before=page.next)) == [stamped(T0)]
    assert ids(list_page(folder, since=T0 + 28)) == [stamped(T0 + 29), stamped(T0 + 28)]


def test_what_is_no_date_is_none_and_what_is_no_run_is_told(folder: Store) -> None:
    over(folder, "20239931-000000-no-such-day", T0)
    over(folder, "20230101-000000-early", T0)
    folder.files.write("runs/empty/live/x", b"")
    folder.files.write("runs/about-to-be/inputs/train/data/x", b"")
    folder.files.write("runs/broken/run.json", b"{")
    rows = list_page(folder).rows
    assert [row["run_id"] for row in rows] == [
        "broken",
        "20239931-000000-no-such-day",
        "20230101-000000-early",
        "empty",
    ]
    assert "not a JSON object" in rows[0]["reason"]
    assert (rows[3]["state"], "no run.json" in rows[3]["reason"]) == ("unknown", True)
    assert "about-to-be" not in [row["run_id"] for row, _ in recorded_runs(folder)], "its client is still copying"


def test_a_run_that_cannot_be_read_hides_no_other(bucket: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    over(bucket, "ci-1", T0)
    over(bucket, "ci-2", T0 + 1)
    of = bucket.files.read

    def read(key: str) -> bytes:
        if "ci-2" in key:
            raise StorageError("the disk has failed")
        return of(key)

    monkeypatch.setattr(bucket.files, "read", read)
    found = [(row["run_id"], row["state"], row["reason"]) for row in list_page(bucket).rows]
    assert found == [("ci-1", "succeeded", ""), ("ci-2", "unknown", "the disk has failed")]


def test_the_command_line_goes_from_page_to_page(
    folder: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for number in range(60):
        over(folder, f"ci-{number}", T0 + number, "failed" if number == 3 else "succeeded")

    def of(*words: str) -> tuple[dict[str, Any], str]:
        assert cli.main(["list", "--store", "store", "--json", *words]) == 0
        out, err = capsys.readouterr()
        return json.loads(out), err

    found, err = of("--limit", "9", "--state", "succeeded")
    assert [row["run_id"] for row in found["runs"]] == [f"ci-{n}" for n in range(59, 50, -1)]
    assert (found["next"], found["order"]) == ("ci-51", "created")
    assert "cloudtrain list --limit 9 --state=succeeded --before ci-51 --store store" in err
    found, err = of("--all")
    assert (len(found["runs"]), found["next"], "--before" in err) == (60, None, False)
    assert len(of()[0]["runs"]) == listing.PAGE
    assert of("--state", "failed")[0]["runs"][0]["run_id"] == "ci-3"
    assert of("--since", "1h")[0]["runs"] == []
    assert cli.main(["list", "--state", "faild"]) == 2
    assert "did you mean 'failed'" in capsys.readouterr().err
    assert cli.main(["list", "--limit", "0", "--store", "store"]) == 2
    assert capsys.readouterr().err.startswith("error: limit: ")


@pytest.mark.remote
@pytest.mark.proof
def test_a_bucket_that_lists_in_more_than_one_answer(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """S3 lists 1,000 folders at a time. A page reads its own runs and no other."""
    store = Store(s3_url)
    names = [stamped(T0 + number) for number in range(1100)]
    texts = [json.dumps(result_of(name, T0 + number)).encode() for number, name in enumerate(names)]
    parallel(lambda n: store.files.write(f"runs/{names[n]}/result.json", texts[n]), range(len(names)))
    read: list[str] = []
    of = store.files.read
    monkeypatch.setattr(store.files, "read", lambda key: read.append(key) or of(key))  # type: ignore[func-returns-value]
    page = list_page(store, limit=5)
    assert (ids(page), page.next) == (names[:-6:-1], names[-5])
    assert len(read) == 5
    assert ids(list_page(store, before=names[2])) == names[1::-1]


MEASURED = """
import contextlib, io, json, sys
from cloudtrain import cli
out = io.StringIO()
with contextlib.redirect_stdout(out):
    code = cli.main(["list", "--json", "--store", sys.argv[1]])
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(json.dumps({"code": code, "peak": int(peak.split()[1]) << 10, "out": json.loads(out.getvalue())}))
"""


@pytest.mark.proof
@pytest.mark.parametrize("ours", [True, False])
def test_the_first_page_of_ten_thousand_runs_takes_little_memory(folder: Store, tmp_path: Path, ours: bool) -> None:
    """Test ids with a time and ids without. `benchmarks/list.py` measures the time."""
    for number in range(RUNS):
        over(folder, stamped(T0 + number) if ours else f"ci-{number}", T0 + number)
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, str(tmp_path / "store")], capture_output=True, text=True, check=True
    )
    output = json.loads(done.stdout)
    assert output["code"] == 0, (output, done.stderr)
    newest = stamped(T0 + RUNS - 1) if ours else f"ci-{RUNS - 1}"
    assert (output["out"]["runs"][0]["run_id"], len(output["out"]["runs"])) == (newest, listing.PAGE)
    assert output["peak"] <= 150 << 20, output["peak"]
