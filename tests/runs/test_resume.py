"""resume.py: the values of --resume-from, and the message if there is no checkpoint."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from earlier import Ran
from rows import for_each

from cloudtrain.errors import NotFoundError, SpecError
from cloudtrain.runs.pull import newest_pulled, pull
from cloudtrain.runs.resume import checkpoints_url, is_bare
from cloudtrain.runtime.resume import Resume
from cloudtrain.settings.settings import Settings
from cloudtrain.store.store import Store


class Here:
    """A folder with a store. Its run ``first`` has saved steps 4 and 12; its run ``empty`` has saved nothing."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.store = folder, Store(f"file://{folder}/store")
        self.ran = Ran(self.store.url)
        self.ran.save(4)
        self.ran.save(12)
        Ran(self.store.url, "empty")
        self.store.write_result("empty", {"state": "succeeded"})
        Ran(self.store.url, "young")

    def url(self, given: str, **how: Any) -> str:
        how = {"ask": True, "follows": True, **how}
        return checkpoints_url(given, store=self.store, settings=Settings(), cwd=self.folder, **how)

    def pull(self, *, what: str = "checkpoints", into: str = "first") -> Path:
        return pull(self.store, "first", self.folder / into, what=what).folder


@pytest.fixture
def here(tmp_path: Path) -> Here:
    return Here(tmp_path)


@pytest.mark.parametrize("given", ["first", "file://{}/store/runs/first", "store/runs/first", "./store/runs/first/"])
def test_a_run_is_its_complete_checkpoints_whatever_folder_has_its_name(here: Here, given: str) -> None:
    (here.folder / "first").mkdir()
    (here.folder / "first" / "model.pt").write_text("")
    assert here.url(given.format(here.folder)) == f"{here.ran.url}/live/checkpoints"


@pytest.mark.parametrize("given", ["./first", "{}/first", "file://{}/first", "./first/checkpoints"])
def test_a_pulled_folder_is_its_newest_checkpoint(here: Here, given: str) -> None:
    assert here.pull() == here.folder / "first"
    assert here.url(given.format(here.folder)) == f"file://{here.folder}/first/checkpoints/step-12"


def test_of_a_pulled_folder_the_newest_that_is_there_counts(here: Here) -> None:
    folder = here.pull(what="checkpoints:step=4")
    assert newest_pulled(folder) == (here.ran.url, folder / "checkpoints/step-4")
    here.ran.save(3, attempt="1.0")
    here.pull(what="logs")
    assert newest_pulled(folder) == (here.ran.url, folder / "checkpoints/step-4")
    here.pull()
    assert newest_pulled(folder) == (here.ran.url, folder / "checkpoints/step-3")
    assert newest_pulled(here.folder) is None


def test_a_folder_of_the_user_s_own_is_taken_as_it_is(here: Here) -> None:
    for name in ("weights/model.safetensors", "runs/exp-1/state.json", "odd/data"):
        (here.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (here.folder / name).write_text("{}")
        given = f"./{name.rpartition('/')[0]}"
        assert here.url(given) == f"file://{here.folder}/{given[2:]}"
    assert here.url("./weights/model.safetensors").endswith("/weights/model.safetensors")
    assert here.url("s3://bucket/runs/earlier", follows=False) == "s3://bucket/runs/earlier/live/checkpoints"
    assert here.url("s3://bucket/my/folder", follows=False) == "s3://bucket/my/folder"


@pytest.mark.parametrize(
    ("given", "message", "hint"),
    [
        ("fisrt", "no run 'fisrt' in file://{}/store", "did you mean 'first'?"),
        ("zzz", "no run 'zzz' in file://{}/store", "to see the runs there: cloudtrain list --store file://{}/store"),
        ("code", "no run 'code' in file://{}/store", "for the folder of that name: ./code"),
        ("My_Run", "'My_Run' is not the id of a run", "give the id of a run; for a file or folder, write ./My_Run"),
        ("empty", "run 'empty' has no complete checkpoint", "name another run, or leave resume_from out to start"),
        ("./store/runs/empty", "run 'empty' has no complete checkpoint", "name another run"),
        ("./nowhere", "there is no ./nowhere", "give the id of a run, or a folder that exists"),
        ("./store/runs/nope", "there is no ./store/runs/nope", "give the id of a run"),
        ("./code", "./code holds no checkpoint, only programs, texts or pictures", "give the id of a run, or"),
        ("./logs-only", "./logs-only was pulled and has no complete checkpoint", "--resume-from file://{}/store/runs"),
    ],
)
@pytest.mark.parametrize("follows", [True, False])
def test_what_holds_nothing_is_refused_in_one_line(
    here: Here, given: str, message: str, hint: str, follows: bool
) -> None:
    (here.folder / "code").mkdir()
    (here.folder / "code" / "train.py").write_text("")
    pull(here.store, "empty", here.folder / "logs-only")
    with pytest.raises(SpecError) as caught:
        here.url(given, follows=follows)
    assert (caught.value.field, caught.value.message) == ("resume_from", message.format(here.folder))
    assert caught.value.hint.startswith(hint.format(here.folder)) or hint.format(here.folder) in caught.value.hint
    assert "live/checkpoints" not in str(caught.value) + caught.value.hint


def test_a_plan_may_name_a_run_that_is_yet_to_save_its_first(here: Here) -> None:
    assert here.url("young", follows=False) == f"{here.store.url}/runs/young/live/checkpoints"
    with pytest.raises(SpecError, match=r"^resume_from: run 'young' has no complete checkpoint") as caught:
        here.url("young")
    assert caught.value.hint == f"wait until it has saved one: cloudtrain status {here.store.url}/runs/young"


def test_of_a_script_that_wrote_to_the_store_itself_the_hint_names_the_url(here: Here) -> None:
    here.store.files.write("runs/empty/checkpoints/dcp-7/.metadata", b"x")
    with pytest.raises(SpecError) as caught:
        here.url("empty")
    assert caught.value.hint.endswith(f"--resume-from {here.store.url}/runs/empty/checkpoints/dcp-7")


def test_a_remote_store_is_asked_when_the_job_is_sent(here: Here, memory: str) -> None:
    here.store = Store(memory)
    assert here.url("first", follows=False) == f"{memory}/runs/first/live/checkpoints"
    with pytest.raises(NotFoundError, match=re.escape(f"no run 'first' in {memory}")):
        here.url("first")
    Ran(memory).save(4)
    assert here.url("first") == f"{memory}/runs/first/live/checkpoints"


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> str:
    from cloudtrain.testing.places import Places

    return Places(monkeypatch).url


@for_each(
    ("given", "bare"),
    [("first", True), ("ckpt.pt", True), (".", False), ("..", False), ("./first", False), ("s3://b", False)],
)
def test_a_word_is_the_id_of_a_run(given: str, bare: bool) -> None:
    assert is_bare(given) is bare


@pytest.mark.parametrize(
    ("url", "source", "root", "name", "title"),
    [
        ("s3://b/runs/slow-1/live/checkpoints", None, "given", "step-200", "slow-1/step-200"),
        ("s3://b/runs/slow-1/live/checkpoints", None, "own", "step-300", "step-300"),
        (
            "gs://b/data/12ab/live/checkpoints",
            "s3://b/runs/slow-1/live/checkpoints",
            "given",
            "step-2",
            "slow-1/step-2",
        ),
        (
            "gs://b/d/1/live/checkpoints",
            "s3://b/runs/slow-1/live/checkpoints/step-2",
            "given",
            "step-2",
            "slow-1/step-2",
        ),
        ("file:///a/runs/slow-1/live/checkpoints/step-2", None, "", "", "slow-1/step-2"),
        ("file:///a/slow-1/checkpoints/step-2", None, "", "", "slow-1/step-2"),
        ("file:///a/bert", None, "", "", "bert"),
        ("s3://bucket", None, "", "", "bucket"),
    ],
)
def test_messages_name_the_run_and_the_checkpoint(
    tmp_path: Path, url: str, source: str | None, root: str, name: str, title: str
) -> None:
    resume = Resume(live=tmp_path, given=str(tmp_path), url=url, say=print, source=source)
    resume._root_of_restored = root
    assert resume.title(name) == title


def test_a_pulled_folder_of_an_earlier_version_is_no_error(here: Here) -> None:
    folder = here.pull()
    state = json.loads((folder / ".cloudtrain-pull.json").read_text())
    (folder / ".cloudtrain-pull.json").write_text(json.dumps({key: state[key] for key in ("run", "files")}))
    with pytest.raises(SpecError, match=r"\./first was pulled and has no complete checkpoint"):
        here.url("./first")
    here.pull()
    assert here.url("./first").endswith("/first/checkpoints/step-12")
