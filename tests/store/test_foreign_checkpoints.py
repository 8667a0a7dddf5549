"""copies.py: a run resumes from the newest checkpoint of another provider's run, in another store."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from earlier import Ran
from jobs import Jobs
from trials import SEED, TRIALS

from cloudtrain.cli.format import plan_text
from cloudtrain.engine.rehearse import plan_rehearsal
from cloudtrain.errors import ConflictError, SpecError, StorageError
from cloudtrain.job.job import Job
from cloudtrain.provider_api.protocol import Layout
from cloudtrain.runs.submit import load_plan, make_plan
from cloudtrain.runtime import checkpoints
from cloudtrain.settings.settings import Settings
from cloudtrain.storage import remote
from cloudtrain.storage.files import TransferOptions
from cloudtrain.storage.local_disk import local_path
from cloudtrain.store.copies import PreviousPlace, copy_checkpoint, followed, resume_copy_url
from cloudtrain.store.gc import collect
from cloudtrain.store.store import Store

MIB = 1 << 20
NONE = Settings()
PAIRS = [("local", "s3"), ("s3", "gcs"), ("gcs", "azure"), ("azure", "local")]
#: The schemes that nodes read, by the kind of their store.
SCHEMES = {"local": {"file"}, "s3": {"s3"}, "gcs": {"gs"}, "azure": {"abfs"}}


class Target:
    """The store of the runs that resume."""

    def __init__(self, url: str, schemes: set[str]) -> None:
        self.store, self.schemes, self.said = Store(url), schemes, list[str]()

    def layout(self, source: str, run_id: str = "second") -> Layout:
        url = source if "/live/" in source else f"{source}/live/checkpoints"
        resume = resume_copy_url(url, self.store, run_id, self.schemes)
        assert resume is not None
        return Layout(
            store=self.store.url, run_id=run_id, code_digest="c", runtime_digest="d", resume=resume, resume_source=url
        )

    def carry(self, source: str, run_id: str = "second", **given: Any) -> int:
        return copy_checkpoint(self.store, self.layout(source, run_id), settings=NONE, say=self.said.append, **given)

    def restored(self, source: str, tmp_path: Path, run_id: str = "second") -> dict[str, dict[str, bytes]]:
        """Return the files that a node restores, by the checkpoint's name. The runtime's own code checks their
        digests."""
        folder = tmp_path / "mounted"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(tmp_path / "restored", ignore_errors=True)
        resume = self.layout(source, run_id).resume or ""
        key = resume.removeprefix(f"{self.store.url}/")
        self.store.files.download_tree(key, folder)
        found = {}
        for item in checkpoints.complete(folder):
            checkpoints.restore(item, tmp_path / "restored" / item.name, node=0)
            root = tmp_path / "restored" / item.name
            found[item.name] = {p.relative_to(root).as_posix(): p.read_bytes() for p in root.rglob("*") if p.is_file()}
        return found


@pytest.fixture
def here(tmp_path: Path) -> tuple[Ran, Target]:
    """Return two folders; one stands for a store that nodes reach by another scheme."""
    return Ran(f"file://{tmp_path}/theirs"), Target(f"file://{tmp_path}/ours", {"s3"})


# ------------------------------------------------------------------------------------------------------------ the copy


@pytest.mark.remote
@pytest.mark.parametrize("pair", PAIRS, ids="-to-".join)
def test_the_newest_is_copied_from_store_to_store(
    request: pytest.FixtureRequest, pair: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    urls = {name: request.getfixturevalue(f"{name}_url") for name in pair if name != "local"}
    urls["local"] = f"file://{tmp_path}/store"
    monkeypatch.setattr(remote, "PIECE", MIB)
    ran, target = Ran(urls[pair[0]]), Target(urls[pair[1]], SCHEMES[pair[1]])
    ran.save(8)
    ran.save(4, attempt="1.0", size=MIB + 1)  # the later attempt counts, whatever the step
    whole = ran.save(6, attempt="1.0", size=MIB + 1)
    moved: dict[str, int] = {}

    def progress(key: str, count: int) -> None:
        moved[key] = moved.get(key, 0) + count

    size = sum(map(len, whole.values()))
    assert size < target.carry(ran.url, progress=progress) < size + 2000  # with commit.json
    assert sum(moved.values()) >= size
    assert target.restored(ran.url, tmp_path) == {"step-6": whole}
    assert target.layout(ran.url).resume == f"{target.store.url}/runs/second/resume/live/checkpoints"
    assert [text.rpartition("/runs/")[2] for text in target.said] == ["first/live/checkpoints/step-6/1.0-6"]


def test_one_that_is_damaged_is_passed_over_aloud(here: tuple[Ran, Target], tmp_path: Path) -> None:
    ran, target = here
    before = ran.save(4)
    ran.save(6)
    ran.spoil(6)
    assert target.carry(ran.url) > 0
    assert target.restored(ran.url, tmp_path) == {"step-4": before}
    told = "step-6/0.0-6: node-1/step-6/shard-1.pt has changed since its commit; the previous checkpoint is used"
    assert [text for text in target.said if told in text], target.said
    ran.spoil(4)
    with pytest.raises(SpecError, match=r"resume_from: .*: nothing complete and undamaged to resume from"):
        target.carry(ran.url, "third")
    assert checkpoints.complete(Path(str(local_path(target.layout(ran.url, "third").resume or "")))) == []


def test_a_whole_copy_stays_and_a_later_run_has_a_newer_one(here: tuple[Ran, Target], tmp_path: Path) -> None:
    ran, target = here
    older = ran.save(4)
    target.carry(ran.url)
    newer = ran.save(6)
    assert target.carry(ran.url) == 0, "the client died before run.json"
    assert target.carry(ran.url, "third") > 0
    assert target.restored(ran.url, tmp_path) == {"step-4": older}
    assert target.restored(ran.url, tmp_path, "third") == {"step-6": newer}


@pytest.fixture
def moving(here: tuple[Ran, Target], tmp_path: Path) -> tuple[Ran, Target, Target]:
    """Return a run with step 6, a store with a copy of it, and the store to which the run moves from there."""
    ran, before = here
    ran.save(6)
    before.carry(ran.url)
    return ran, before, Target(f"file://{tmp_path}/next", {"s3"})


def test_who_moves_from_where_nodes_read_the_run_itself_has_the_newest(
    moving: tuple[Ran, Target, Target], tmp_path: Path
) -> None:
    ran, before, after = moving
    newest = ran.save(12)
    in_place = dataclasses.replace(before.layout(ran.url), resume=f"{ran.url}/live/checkpoints", resume_source=None)
    assert after.carry(ran.url, left=PreviousPlace(before.store, in_place)) > 0
    assert after.restored(ran.url, tmp_path) == {"step-12": newest}


def test_who_moves_takes_along_what_that_run_was_given_though_there_is_a_newer_one(
    moving: tuple[Ran, Target, Target], tmp_path: Path
) -> None:
    ran, before, after = moving
    ran.save(12)
    assert after.carry(ran.url, left=PreviousPlace(before.store, before.layout(ran.url))) > 0
    assert list(after.restored(ran.url, tmp_path)) == ["step-6"]


@pytest.mark.parametrize("fault", ["gone", "short", "spoiled"])
def test_a_copy_that_is_damaged_in_the_place_before_comes_from_the_run_itself(
    moving: tuple[Ran, Target, Target], tmp_path: Path, fault: str
) -> None:
    ran, before, after = moving
    (shard,) = [key for key in before.store.files.list("runs") if key.endswith("shard-1.pt")]
    data = before.store.files.read(shard)
    if fault == "gone":
        before.store.files.remove(shard)
    else:
        before.store.files.write(shard, data[:-1] if fault == "short" else bytes(len(data)))
    newest = ran.save(12)
    left = PreviousPlace(before.store, before.layout(ran.url))
    assert after.carry(ran.url, left=left) > 0
    assert after.restored(ran.url, tmp_path) == {"step-12": newest}
    assert [text for text in after.said if "; its source is copied again" in text]


def test_a_file_of_another_checkpoint_of_that_name_is_not_taken_for_its_own(
    here: tuple[Ran, Target], tmp_path: Path
) -> None:
    """The first client failed at a damaged file. The run was then repeated under its own name."""
    ran, target = here
    ran.save(6)
    ran.spoil(6)
    with pytest.raises(SpecError, match="nothing complete and undamaged"):
        target.carry(ran.url)
    again = ran.save(6)
    assert target.carry(ran.url) > 0
    assert target.restored(ran.url, tmp_path) == {"step-6": again}


def test_an_id_that_began_with_another_run_s_checkpoint_is_not_used_for_this_one(here: tuple[Ran, Target]) -> None:
    """The first client was stopped before run.json. The user then named the right run."""
    ran, target = here
    ran.save(6)
    Ran(ran.url.removesuffix("/runs/first"), "right").save(8)
    target.carry(ran.url)
    right = ran.url.replace("first", "right")
    words = (
        "resume_from: run second has begun with a copy of .*/first/live/checkpoints, not of .*/right/live/checkpoints"
    )
    with pytest.raises(ConflictError, match=words):
        target.carry(right)
    assert target.carry(right, "third") > 0


def test_one_that_its_run_takes_away_meanwhile_gives_way_to_the_next(here: tuple[Ran, Target], tmp_path: Path) -> None:
    """A running run keeps only its newest checkpoints."""
    ran, target = here
    ran.save(4)
    newer: list[dict[str, bytes]] = []

    def progress(key: str, count: int) -> None:
        if not newer:
            newer.append(ran.save(6))
            ran.files.remove("runs/first/live/checkpoints/step-4")

    target.store.moving = TransferOptions(concurrency=1)
    target.carry(ran.url, progress=progress)
    assert target.restored(ran.url, tmp_path) == {"step-6": newer[0]}


def test_refusals_are_one_line_and_leave_nothing(here: tuple[Ran, Target]) -> None:
    ran, target = here
    with pytest.raises(SpecError, match=r"^resume_from: run 'first' has no complete checkpoint"):
        target.carry(ran.url)
    ran.save(4)
    ran.files.remove("runs/first/live/checkpoints/step-4/0.0-4/node-1")
    with pytest.raises(SpecError, match="no complete checkpoint"):
        target.carry(ran.url)
    with pytest.raises(SpecError, match=r"^resume_from: no run 'other' in \S+$"):
        target.carry(ran.url.replace("first", "other"))
    assert target.store.files.list() == {}


def test_one_that_is_named_is_copied_whatever_else_the_run_holds(here: tuple[Ran, Target]) -> None:
    """A run resumes from its steps and not from its best, unless the user names the best."""
    ran, target = here
    ran.save(4)
    key = "runs/first/live/checkpoints/best/0.0-9"
    ran.files.write(f"{key}/node-0/best/model.safetensors", b"best")
    listed = {"node-0/best/model.safetensors": {"size": 4, "sha256": hashlib.sha256(b"best").hexdigest()}}
    commit = {"protocol": 1, "name": "best", "attempt": "0.0", "seq": 9, "nodes": 1, "files": listed}
    ran.files.write(f"{key}/commit.json", json.dumps({**commit, "saved": 109.0, "time": 110.0}).encode())
    assert target.carry(f"{ran.url}/live/checkpoints/best") > 4
    target.carry(ran.url, "third")
    copied = [text.rpartition("/live/checkpoints/")[2] for text in target.said]
    assert copied == ["best/0.0-9", "step-4/0.0-4"]


def test_gc_removes_a_copy_with_its_run(here: tuple[Ran, Target]) -> None:
    ran, target = here
    ran.save(4)
    target.carry(ran.url)
    found = collect(target.store, older_than=0).found
    assert [(item.kind, item.key, item.files) for item in found] == [("run", "runs/second", 6)]
    record = {"protocol": 1, "layout": {"code_digest": "c"}}
    assert target.store.create_run(target.layout(ran.url), record)
    assert collect(target.store, older_than=0, delete=True).found == ()
    target.store.files.remove("runs/second/run.json")
    assert len(collect(target.store, older_than=0, delete=True).found) == 1
    assert target.store.files.list("runs") == {}


#: A slow client that prints how many bytes it has copied.
CLIENT = """
import sys, time
from cloudtrain.storage import files as transfer
from cloudtrain.store.copies import copy_checkpoint
from cloudtrain.provider_api.protocol import Layout
from cloudtrain.settings.settings import Settings
from cloudtrain.store.store import Store
import json
given = json.loads(sys.argv[1])
transfer.PIECE = 4096
def progress(key, count):
    print(count, flush=True)
    time.sleep(0.005)
copy_checkpoint(Store(given["store"]), Layout.from_dict(given), settings=Settings(), progress=progress)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "trials", [pytest.param(2), pytest.param(max(1, TRIALS // 10), marks=pytest.mark.proof)], ids=["few", "proof"]
)
def test_a_client_that_is_killed_leaves_right_bytes_or_nothing_and_the_next_one_goes_on(
    here: tuple[Ran, Target], tmp_path: Path, trials: int
) -> None:
    ran, target = here
    ran.save(2)
    whole = ran.save(6, size=64 * 1024)
    layout = target.layout(ran.url)
    folder = Path(str(local_path(layout.resume or "")))
    given = json.dumps({**vars(layout), "inputs": {}, "origin": {}})
    for trial in range(trials):
        after = random.Random(f"{SEED} {trial}").randrange(48)
        client = subprocess.Popen([sys.executable, "-c", CLIENT, given], stdout=subprocess.PIPE, text=True)
        assert client.stdout is not None
        for _ in range(after):
            client.stdout.readline()
        client.send_signal(signal.SIGKILL)
        client.communicate()
        assert all(item.name == "step-6" for item in checkpoints.complete(folder)), "whole, or none"
        for path in folder.rglob("node-*/**/*"):
            assert not path.is_file() or path.name.startswith(".") or path.read_bytes() in whole.values()
        assert target.carry(ran.url) >= 0
        assert target.restored(ran.url, tmp_path) == {"step-6": whole}
        assert target.carry(ran.url) == 0
        shutil.rmtree(tmp_path / "ours")


# ------------------------------------------------------------------------------------------------------------- the plan


def left_for(folder: Path, following: str) -> str:
    """Return the URL of a run in that store that moved to the run at ``following``."""
    store = Store(f"file://{folder}")
    assert store.files.create("runs/old/next.json", json.dumps({"run": following, "result": {}}).encode())
    return f"{store.url}/runs/old"


@pytest.mark.parametrize("ask", [True, False])
def test_where_a_run_went_is_followed_to_its_end_and_nothing_else_is_taken_for_it(tmp_path: Path, ask: bool) -> None:
    first = left_for(tmp_path / "a", left_for(tmp_path / "b", f"file://{tmp_path}/c/runs/old"))
    assert followed(first, NONE, ask=ask) == f"file://{tmp_path}/c/runs/old"
    assert followed(f"{first}/live/x", NONE, ask=ask) == f"file://{tmp_path}/c/runs/old/live/x"
    around = f"file://{tmp_path}/d/runs/old"
    assert left_for(tmp_path / "d", left_for(tmp_path / "e", around)) == around
    with pytest.raises(StorageError, match=rf"^resume_from: the run at {around} continued in another store, and from"):
        followed(around, NONE, ask=ask)
    foreign = tmp_path / "f/runs/old/next.json"
    foreign.parent.mkdir(parents=True)
    for text in ('{"x": 1}', '{"run": 7, "result": {}}', '{"run": "s3://b/runs/old"}'):
        foreign.write_text(text)
        with pytest.raises(StorageError, match=r"/f/runs/old/next.json is malformed: it names no run"):
            followed(f"file://{tmp_path}/f/runs/old", NONE, ask=ask)


@pytest.mark.parametrize("ask", [True, False])
def test_a_store_that_fails_is_not_one_that_says_nothing(tmp_path: Path, ask: bool) -> None:
    (tmp_path / "a/runs/old/next.json").mkdir(parents=True)  # no read returns it
    with pytest.raises(StorageError, match=r"a/runs/old/next.json"):
        followed(f"file://{tmp_path}/a/runs/old", NONE, ask=ask)
    for nowhere in (f"file://{tmp_path}/b/runs/old", "nosuch://b/runs/old"):
        assert followed(nowhere, NONE, ask=True) == nowhere


def planned(tmp_path: Path, resume_from: str, provider: str = "vertex", **settings: Any) -> Any:
    (tmp_path / "code").mkdir(exist_ok=True)
    (tmp_path / "code" / "train.py").write_text("")
    sample = sample_of(provider) if provider != "local" else {"store": "file:///nowhere", "settings": {}, "job": {}}
    set_ = {"provider": provider, "store": sample["store"], **settings}
    loaded = Settings.load(cwd=tmp_path, environ={}, overrides={**sample["settings"]}, **set_)
    job = Job.make(entry_point="train.py", resume_from=resume_from, **sample["job"])
    return make_plan(job, settings=loaded, cwd=tmp_path / "code", run_id="second"), loaded


def sample_of(provider: str) -> dict[str, Any]:
    import importlib

    found: dict[str, Any] = importlib.import_module(f"cloudtrain.providers.{provider}").SAMPLE
    return found


@pytest.mark.parametrize("provider", ["azureml", "sagemaker", "vertex"])
def test_a_plan_says_what_will_be_copied_and_from_where_and_is_sent_as_it_is(provider: str, tmp_path: Path) -> None:
    ran = Ran(f"file://{tmp_path}/theirs")
    ran.save(4)
    plan, settings = planned(tmp_path, str(tmp_path / "theirs/runs/first"), provider)
    source, layout = f"{ran.url}/live/checkpoints", plan.layout
    assert layout.resume_source == source
    assert layout.resume == f"{layout.run}/resume/live/checkpoints"
    assert "runs/second/resume/live/checkpoints" in json.dumps(plan.request.body)
    assert "theirs" not in json.dumps(plan.request.body)
    text = plan_text(plan.document())
    assert f"resumes from  {layout.resume} (the newest checkpoint copied from {source}, through this machine)" in text
    assert any("anyone can run code in this job" in note for note in plan.request.notes)
    assert f"its newest complete checkpoint is copied to {layout.resume}" in text
    saved = tmp_path / "plan.json"
    saved.write_text(json.dumps(plan.document()))
    again = load_plan(saved, settings=settings, cwd=tmp_path / "code")
    assert (again.layout, again.request) == (layout, plan.request)


def test_what_nodes_read_by_themselves_stays_where_it_is(tmp_path: Path) -> None:
    Ran(f"file://{tmp_path}/theirs").save(4)
    for provider, resume_from in (
        ("vertex", "earlier"),
        ("vertex", "gs://other/runs/earlier"),
        ("vertex", "gs://other/folder/of/mine"),
        ("local", str(tmp_path / "theirs/runs/first")),
        ("local", "s3://other/folder/of/mine"),
    ):
        plan, _ = planned(tmp_path, resume_from, provider)
        assert plan.layout.resume_source is None
        assert not plan.layout.resume.startswith(plan.layout.run)
    plan, _ = planned(tmp_path, "s3://other/store/runs/earlier", "local")
    assert plan.layout.resume_source == "s3://other/store/runs/earlier/live/checkpoints"
    with pytest.raises(SpecError, match=r"resume_from: .*holds a password, key or signature") as caught:
        planned(tmp_path, "s3://key:pass@other/store/runs/earlier", "local")
    assert "pass@" not in str(caught.value)
    with pytest.raises(SpecError, match="nodes see gs:// only"):
        planned(tmp_path, "s3://other/folder/of/mine", "vertex")


def test_a_rehearsal_copies_into_the_folder_that_stands_for_the_store(tmp_path: Path) -> None:
    ran = Ran(f"file://{tmp_path}/theirs")
    ran.save(4)
    for given, maps in ((ran.url, {}), ("s3://b/x/runs/first", {"s3://b/x": str(tmp_path / "theirs")})):
        real, settings = planned(tmp_path, given)
        plan = plan_rehearsal(
            real.job.replace(entry_point="train.py", resume_from=given),
            settings=settings, run_id=f"r{len(maps)}", cwd=tmp_path / "code", store=str(tmp_path / "here"), maps=maps,
        )  # fmt: skip
        assert plan.layout.resume_source == f"{ran.url}/live/checkpoints"
        mounts = [mount["url"] for mount in plan.request.body["nodes"][0]["mounts"]]
        assert plan.layout.resume in mounts
        assert copy_checkpoint(plan.store, plan.layout, settings=plan.settings) > 0
        assert [item.name for item in checkpoints.complete(Path(str(local_path(plan.layout.resume or ""))))] == [
            "step-4"
        ]


# ----------------------------------------------------------------------------------------------------------- whole runs

#: Descent with momentum in plain Python, without imports. A bit that is not restored changes the loss.
TRAIN = """
import os, pickle, random, sys
from pathlib import Path

state = {"weights": [0.0] * 8, "moments": [0.0] * 8, "step": 0}
if resume := os.environ.get("CLOUDTRAIN_RESUME_FROM"):
    state = pickle.loads(Path(resume, "state.pt").read_bytes())
    print("resumed from", Path(resume).name, flush=True)
weights, moments = state["weights"], state["moments"]
for step in range(state["step"], int(sys.argv[1])):
    draw = random.Random(step)
    rows = [[draw.gauss(0, 1) for _ in weights] for _ in range(16)]
    errors = [sum(w * x for w, x in zip(weights, row)) - sum(row) ** 2 for row in rows]
    loss = sum(error * error for error in errors)
    for i in range(len(weights)):
        moments[i] = 0.9 * moments[i] + sum(error * row[i] for error, row in zip(errors, rows)) / 16
        weights[i] -= 0.01 * moments[i]
print("final loss", loss.hex(), flush=True)
if folder := os.environ.get("CLOUDTRAIN_CHECKPOINT_DIR"):
    state["step"] = step + 1
    Path(folder, f"step-{step + 1}").mkdir()
    Path(folder, f"step-{step + 1}", "state.pt").write_bytes(pickle.dumps(state))
"""
HALF, ALL = "6", "12"


def final_loss(text: str) -> str:
    (line,) = [line for line in text.splitlines() if "final loss" in line]
    return line.rpartition(" ")[2]


@pytest.fixture
def jobs(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Jobs]:
    if "s3_url" in request.fixturenames:
        request.getfixturevalue("s3_url")  # before the environment is taken
    made = Jobs(tmp_path)
    made.write("train.py", TRAIN)
    yield made
    made.close()


@pytest.fixture
def expected(jobs: Jobs) -> str:
    """Return the last loss of a run without an interruption and without cloudtrain."""
    script = jobs.code / "train.py"
    done = subprocess.run([sys.executable, str(script), ALL], capture_output=True, text=True, check=True)
    return final_loss(done.stdout)


@pytest.mark.remote
@pytest.mark.slow
def test_a_run_in_s3_goes_on_in_a_folder_to_the_same_bits(s3_url: str, jobs: Jobs, expected: str) -> None:
    flags = ("--max-runtime", "10m", "--launcher", "python")
    first = jobs.cli("submit", "train.py", *flags, "--json", "--store", s3_url, "--run-id", "first", "--", HALF)
    assert first.code == 0, first.err
    url = f"{s3_url}/runs/first"
    done = jobs.submit("train.py", *flags, "--run-id", "second", "--resume-from", url, "--", ALL)
    assert done.code == 0, done.err
    assert f"copying the checkpoint from {url}" in done.err
    assert done.json["attempts"][0]["resumed_from"] == "first/step-6"
    assert final_loss(done.err) == expected != final_loss(first.err)


@pytest.mark.docker
@pytest.mark.proof
def test_a_local_run_goes_on_as_a_cloud_would_run_it(
    tmp_path: Path, images: Any, nothing_left: None, jobs: Jobs, expected: str
) -> None:
    first = jobs.submit("train.py", "--max-runtime", "10m", "--launcher", "python", "--run-id", "first", "--", HALF)
    assert first.code == 0, first.err
    sample = sample_of("sagemaker")
    words = ["--provider", "sagemaker", "--store", sample["store"], "--image", sample["job"]["image"]]
    words += ["--local-image", images("torch"), "--local-store", str(jobs.tmp / "there"), "--run-id", "second"]
    for name, value in sample["settings"].items():
        words += ["--set", f"{name}={value if isinstance(value, str) else json.dumps(value)}"]
    words += ["--launcher", "python", "--max-runtime", "10m", "--json", "--resume-from", str(jobs.store / "runs/first")]
    done = jobs.cli("rehearse", "train.py", *words, "--", ALL, timeout=240)
    assert done.code == 0, done.err
    assert done.json["attempts"][0]["resumed_from"] == "first/step-6"
    assert final_loss(done.err) == expected
