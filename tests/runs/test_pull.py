"""pull.py: the selection of checkpoints, following a run, and a pull that was killed. test_store.py tests what a pull
brings."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from memory_run import RUNNING, SUCCEEDED, T0, ClientRetried, World, failed

from cloudtrain.errors import ConflictError, DigestError, LostContactError, NotFoundError, SpecError, StorageError
from cloudtrain.runs import pull as pull_module
from cloudtrain.runs.pull import PullReport, pull
from cloudtrain.runs.pull_kinds import parse_selection
from cloudtrain.storage.files import files
from cloudtrain.storage.timings import CLIENT_TIMINGS


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(root=tmp_path / "store").recorded().attempt(0, RUNNING)


def point(world: World, **pointers: str) -> None:
    world.write(
        "live/pointers/node-0.json", {name: {"target": target, "link": False} for name, target in pointers.items()}
    )


def pulled(folder: Path) -> set[str]:
    return {path.name for path in (folder / "checkpoints").iterdir()} if (folder / "checkpoints").exists() else set()


def test_words() -> None:
    assert parse_selection("checkpoints:latest,checkpoints:step=4,logs") == {
        "checkpoints": ["latest", "step=4"],
        "logs": ["all"],
    }
    assert parse_selection(["checkpoints", " metrics "])["checkpoints"] == ["all"]
    for bad, says in (
        ("checkpoint", "did you mean"),
        ("checkpoints:", "latest"),
        ("checkpoints:newest", ":step=N"),
        ("checkpoints:step=x", ":step=N"),
        ("logs:latest", "logs:latest"),
        ("", "not a kind of result"),
    ):
        with pytest.raises(SpecError, match=says):
            parse_selection(bad)


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("checkpoints:latest", {"step-30"}),
        ("checkpoints:best", {"step-10", "best"}),
        ("checkpoints:step=20", {"step-20"}),
        ("checkpoints:latest,checkpoints:step=20", {"step-20", "step-30"}),
        ("checkpoints:all", {"step-10", "step-20", "step-30", "best"}),
        ("checkpoints", {"step-10", "step-20", "step-30", "best"}),
    ],
)
def test_which_checkpoints(world: World, tmp_path: Path, choice: str, expected: set[str]) -> None:
    for step in (10, 20, 30):
        world.checkpoint(f"step-{step}", when=T0 + step)
    world.checkpoint("step-40", size=4)  # not complete
    point(world, best="step-10", other="step-40")
    report = pull(world.store, "r1", tmp_path / "out", what=choice)
    assert pulled(tmp_path / "out") == expected
    assert set(report.checkpoints) == expected - {"best"}
    assert not (tmp_path / "out" / "logs").exists()


def test_the_best_without_a_pointer_is_what_is_called_so(world: World, tmp_path: Path) -> None:
    for name, when in (
        ("best-epoch=1.ckpt", 1.0),
        ("best-epoch=2.ckpt", 2.0),
        ("bestiary", 3.0),
        ("epoch=3.ckpt", 4.0),
    ):
        world.checkpoint(name, when=T0 + when)
    assert pull(world.store, "r1", tmp_path, what="checkpoints:best").checkpoints == ("best-epoch=2.ckpt",)


@pytest.mark.parametrize("choice", ["latest", "best", "step=7"])
def test_a_checkpoint_that_is_not_there_is_an_error_that_names_those_that_are(
    world: World, tmp_path: Path, choice: str
) -> None:
    with pytest.raises(NotFoundError, match="what: r1 has no complete checkpoint"):
        pull(world.store, "r1", tmp_path / "out", what=[f"checkpoints:{choice}", "logs"])
    world.checkpoint("step-10")
    if choice != "latest":
        with pytest.raises(NotFoundError, match="there are: step-10"):
            pull(world.store, "r1", tmp_path / "out", what=[f"checkpoints:{choice}"])
    assert pulled(tmp_path / "out") == set()


# ------------------------------------------------------------------------------------------------------------ following


def test_following_brings_what_is_complete_while_the_run_goes_on(world: World, tmp_path: Path) -> None:
    out, seen = tmp_path / "out", list[tuple[float, set[str], str]]()

    def look() -> None:
        model = out / "artifacts" / "model.txt"
        seen.append((world.time.now - T0, pulled(out), model.read_text() if model.exists() else ""))

    def write(text: str) -> None:
        world.write("live/artifacts/node-0/model.txt", text)

    world.time.at = [
        (10, lambda: world.checkpoint("step-1", when=T0 + 10)),
        (20, look),
        (30, lambda: (write("first"), world.checkpoint("step-2", when=T0 + 30, size=4))),
        (40, look),
        (50, lambda: (write("second time"), world.checkpoint("step-2", when=T0 + 50))),
        (60, look),
        (100, lambda: (world.attempt(0, SUCCEEDED), world.checkpoint("step-3", when=T0 + 100))),
    ]
    reports: list[PullReport] = []
    report = world.run().pull(out, follow=True, on_pull=reports.append)
    assert [names for _, names, _ in seen] == [{"step-1"}, {"step-1"}, {"step-1", "step-2"}]
    assert [text for *_, text in seen] == ["", "first", "second time"]
    assert pulled(out) == {"step-1", "step-2", "step-3"}
    assert set(report.checkpoints) == {"step-1", "step-2", "step-3"}
    assert [len(item.checkpoints) for item in reports] == [0, 1, 1, 2], "a report for each time that brought something"
    assert pull(world.store, "r1", out).transferred == 0


@pytest.mark.parametrize("status", [SUCCEEDED, failed()])
def test_following_a_run_that_is_over_is_one_pull(world: World, tmp_path: Path, status: Any) -> None:
    world.attempt(0, status).checkpoint("step-1")
    report = world.run().pull(tmp_path / "out", follow=True, what="checkpoints:best,checkpoints:latest")
    assert pulled(tmp_path / "out") == {"step-1"}
    assert report.missing == ("best",)
    assert world.time.now == T0


def test_the_result_of_a_run_that_was_followed_comes_too(world: World, tmp_path: Path) -> None:
    world.time.at = [(20, lambda: world.attempt(0, SUCCEEDED))]
    world.run().pull(tmp_path / "out", follow=True)
    assert json.loads((tmp_path / "out" / "result.json").read_bytes())["state"] == "succeeded"


def test_following_is_no_waiting_client(tmp_path: Path) -> None:
    """Following starts no further attempt. It does not end a run that may still get one."""
    world = World(root=tmp_path / "store", platform=ClientRetried()).recorded(retries=1).attempt(0, failed())
    world.run().pull(tmp_path / "out", follow=True)
    assert world.result() is None
    assert world.store.attempts("r1") == [0]


def test_a_platform_that_is_silent_for_good_ends_it(world: World, tmp_path: Path) -> None:
    world.checkpoint("step-1")
    world.time.at = [(20, lambda: setattr(world.platform, "status_error", LostContactError("no answer")))]
    with pytest.raises(LostContactError, match="continues"):
        world.run().pull(tmp_path / "out", follow=True)
    assert pulled(tmp_path / "out") == {"step-1"}


def test_a_hiccup_at_the_very_end_loses_nothing(world: World, tmp_path: Path) -> None:
    world.checkpoint("step-1", when=T0 + 1)

    def end() -> None:
        world.attempt(0, SUCCEEDED).checkpoint("step-2", when=T0 + 20)
        answers = [world.platform.status]

        def status(native_id: str) -> Any:
            if not answers:
                raise LostContactError("a hiccup")
            return answers.pop()(native_id)

        world.platform.status = status  # type: ignore[method-assign]

    world.time.at = [(20, end)]
    assert set(world.run().pull(tmp_path / "out", follow=True).checkpoints) == {"step-1", "step-2"}


def test_what_a_store_still_answers_comes_when_the_platform_does_not(world: World, tmp_path: Path) -> None:
    def silent() -> None:
        world.checkpoint("step-1")
        world.platform.status_error = LostContactError("no answer")

    world.time.at = [(20, silent)]
    with pytest.raises(LostContactError):
        world.run().pull(tmp_path / "out", follow=True)
    assert pulled(tmp_path / "out") == {"step-1"}


def test_a_full_disk_is_no_network_that_comes_back(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, tries = world.store, list[str]()
    monkeypatch.setattr(pull_module, "local_path", lambda url: None)
    world.checkpoint("step-1")

    def full(key: str, path: Path, **_: Any) -> None:
        tries.append(key)
        raise StorageError(f"{path}: no space left") from OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(store.files, "download", full)
    with pytest.raises(StorageError, match="no space left"):
        pull(store, "r1", tmp_path / "out", along=[RUNNING] * 3, clock=iter(range(0, 900, 9)).__next__)
    assert len(tries) == 1


def test_damaged_content_ends_it(world: World, tmp_path: Path) -> None:
    world.checkpoint("step-1")
    world.write("live/checkpoints/step-1/0.0-1/node-0/step-1/model.pt", "xyz")
    with pytest.raises(DigestError):
        world.run().pull(tmp_path / "out", follow=True)
    assert pulled(tmp_path / "out") == {".partial-step-1"} or pulled(tmp_path / "out") == set()


def test_a_file_that_is_changed_here_meanwhile_is_brought_again(world: World, tmp_path: Path) -> None:
    world.checkpoint("step-1")
    model = tmp_path / "out" / "checkpoints" / "step-1" / "model.pt"

    def spoil() -> None:
        before = model.stat()
        model.write_text("xyz")
        os.utime(model, ns=(before.st_atime_ns, before.st_mtime_ns))

    world.time.at = [(20, spoil), (60, lambda: world.attempt(0, SUCCEEDED))]
    world.run().pull(tmp_path / "out", follow=True)
    assert model.read_text() == "abc"


def test_an_artifact_that_grows_while_it_is_fetched_comes_whole(world: World, tmp_path: Path) -> None:
    path = world.folder / "live" / "artifacts" / "node-0" / "events"
    world.write("live/artifacts/node-0/events", "0123456789")
    done: list[str] = []

    def grow(key: str, more: int) -> None:
        if key.endswith("events") and not done:
            done.append(key)
            with path.open("a") as out:
                out.write("and more")

    pull(world.store, "r1", tmp_path / "out", progress=grow)
    text = (tmp_path / "out" / "artifacts" / "events").read_text()
    assert done
    assert text in ("0123456789", "0123456789and more")
    pull(world.store, "r1", tmp_path / "out")
    assert (tmp_path / "out" / "artifacts" / "events").read_text() == "0123456789and more"
    assert pull(world.store, "r1", tmp_path / "out").transferred == 0


@pytest.mark.parametrize("word", ["artifacts", "outputs"])
def test_a_file_of_one_node_may_be_a_folder_of_another(world: World, tmp_path: Path, word: str) -> None:
    world.write(f"live/{word}/node-0/x", "file")
    world.write(f"live/{word}/node-1/x/y", "in a folder")
    for _ in range(2):
        assert {path for path in pull(world.store, "r1", tmp_path / "out").files if path.startswith(word)} == {
            f"{word}/node-0/x",
            f"{word}/x/y",
        }


@pytest.mark.parametrize("word", ["artifacts", "outputs"])
def test_a_path_that_is_called_like_a_node_is_no_version_of_another(world: World, tmp_path: Path, word: str) -> None:
    for name, text in (("node-0/x", "0"), ("node-1/x", "1"), ("node-0/node-1/x", "of node 0")):
        world.write(f"live/{word}/{name}", text)
    places = {"x": "0", "node-1/x": "of node 0", "node-1/node-1/x": "1"}
    for _ in range(2):
        pull(world.store, "r1", tmp_path / "out")
        assert {name: (tmp_path / "out" / word / name).read_text() for name in places} == places
    assert pull(world.store, "r1", tmp_path / "out").transferred == 0


@pytest.mark.parametrize("word", ["artifacts", "outputs"])
def test_two_nodes_files_never_get_one_path(world: World, tmp_path: Path, word: str) -> None:
    for node in (0, 1):
        for name in ("x", "node-1/x", "node-2", "y"):
            world.write(f"live/{word}/node-{node}/{name}", f"{name} of node {node}")
    world.write(f"live/{word}/node-2/y", "y of node 2")
    for _ in range(2):
        pull(world.store, "r1", tmp_path / "out")
        files = [path for path in (tmp_path / "out" / word).rglob("*") if path.is_file()]
        assert sorted(path.read_text() for path in files) == sorted(
            path.read_text() for path in (world.folder / "live" / word).rglob("*") if path.is_file()
        )
    assert pull(world.store, "r1", tmp_path / "out").transferred == 0


@pytest.mark.parametrize("word", ["artifacts", "outputs"])
def test_a_node_s_own_copy_takes_the_place_of_a_removed_file(world: World, tmp_path: Path, word: str) -> None:
    world.write(f"live/{word}/node-0/node-1", "called like a node")
    world.write(f"live/{word}/node-0/x", "of node 0")
    pull(world.store, "r1", tmp_path / "out")
    (world.folder / f"live/{word}/node-0/node-1").unlink()
    world.write(f"live/{word}/node-1/x", "of node 1")
    pull(world.store, "r1", tmp_path / "out")
    assert (tmp_path / "out" / word / "node-1/x").read_text() == "of node 1"


def checkpoint_of(world: World, name: str, seq: int, files: dict[str, str]) -> None:
    """Write a checkpoint of these files, by node and path."""
    key, listed = f"live/checkpoints/{name}/0.0-{seq}", {}
    for path, text in files.items():
        world.write(f"{key}/{path}", text)
        listed[path] = {"size": len(text), "sha256": hashlib.sha256(text.encode()).hexdigest()}
    commit = {"protocol": 1, "name": name, "attempt": "0.0", "seq": seq, "files": listed, "time": T0 + seq}
    world.write(f"{key}/commit.json", commit)


def test_no_file_of_a_checkpoint_gets_a_path_in_another(world: World, tmp_path: Path) -> None:
    checkpoint_of(world, "node-1", 1, {"node-1/node-1/last.pt": "of node-1"})
    checkpoint_of(world, "last.pt", 2, {"node-0/last.pt": "0", "node-1/last.pt": "1"})
    checkpoint_of(world, "mixed", 3, {"node-0/mixed": "a file", "node-1/mixed/x": "in a folder"})
    checkpoint_of(world, "other", 4, {"node-0/other/x": "in a folder", "node-1/other": "a file"})
    places = {
        "node-1/last.pt": "of node-1",
        "last.pt": "0",
        "node-1-2/last.pt": "1",
        "mixed": "a file",
        "node-1-2/mixed/x": "in a folder",
        "other/x": "in a folder",
        "node-1-2/other": "a file",
    }
    for _ in range(2):
        pull(world.store, "r1", tmp_path / "out")
        assert {name: (tmp_path / "out/checkpoints" / name).read_text() for name in places} == places
    assert pull(world.store, "r1", tmp_path / "out").transferred == 0


def test_a_node_s_own_copy_goes_when_it_is_no_longer_needed(world: World, tmp_path: Path) -> None:
    world.write("live/outputs/node-0/x", "file")
    world.write("live/outputs/node-1/x/y", "in a folder")
    pull(world.store, "r1", tmp_path / "out")
    shutil.rmtree(world.folder / "live/outputs/node-1")
    pull(world.store, "r1", tmp_path / "out")
    outputs = tmp_path / "out/outputs"
    assert [path for path in outputs.rglob("*") if path.is_file()] == [outputs / "x"]


def test_a_pointer_does_not_replace_a_checkpoint_of_its_name(world: World, tmp_path: Path) -> None:
    world.checkpoint("best")
    world.checkpoint("step-1")
    pull(world.store, "r1", tmp_path / "out")
    point(world, best="step-1")
    pull(world.store, "r1", tmp_path / "out", what="checkpoints:step=1")
    assert (tmp_path / "out/checkpoints/best/model.pt").is_file()


@pytest.mark.parametrize("word", ["artifacts", "outputs"])
@pytest.mark.parametrize("names", [("x", "x/y"), ("x/y", "x"), ("x/a/b", "x/a"), ("x", "x/a/b")])
def test_a_file_may_become_a_folder_between_two_pulls(
    world: World, tmp_path: Path, word: str, names: tuple[str, str]
) -> None:
    for name in names:
        shutil.rmtree(world.folder / "live" / word, ignore_errors=True)
        world.write(f"live/{word}/node-0/{name}", name)
        pull(world.store, "r1", tmp_path / "out")
        assert (tmp_path / "out" / word / name).read_text() == name
    shutil.rmtree(world.folder / "live" / word)
    world.write(f"live/{word}/node-0/{names[0]}", "again")
    (tmp_path / "out" / word / names[1]).write_text("the user's")
    pull(world.store, "r1", tmp_path / "out")
    assert (tmp_path / "out" / word / names[0]).read_text() == "again"
    files = [path for path in (tmp_path / "out" / word).rglob("*") if path.is_file() and ".yours" in str(path)]
    assert [path.read_text() for path in files] == ["the user's"]


@pytest.mark.parametrize("later", ["file", "pointer"])
def test_a_checkpoint_that_was_a_folder_may_become_a_file(world: World, tmp_path: Path, later: str) -> None:
    world.checkpoint("best")
    pull(world.store, "r1", tmp_path / "out")
    world.checkpoint("step-1")
    if later == "file":
        commit = json.loads((world.folder / "live/checkpoints/step-1/0.0-1/commit.json").read_text())
        files = {"node-0/best": commit["files"]["node-0/step-1/model.pt"]}
        world.write("live/checkpoints/best/0.0-2/node-0/best", "abc")
        world.write("live/checkpoints/best/0.0-2/commit.json", {**commit, "name": "best", "seq": 2, "files": files})
    shutil.rmtree(world.folder / "live/checkpoints/best/0.0-1")
    point(world, best="step-1")
    assert "checkpoints/best" in pull(world.store, "r1", tmp_path / "out").files
    assert (tmp_path / "out/checkpoints/best").read_text() == ("abc" if later == "file" else "step-1\n")


def test_the_folder_of_a_checkpoint_stays_until_the_file_that_replaces_it_is_here(world: World, tmp_path: Path) -> None:
    out = tmp_path / "out/checkpoints"
    checkpoint_of(world, "best", 1, {"node-0/best/model.pt": "old"})
    pull(world.store, "r1", tmp_path / "out")
    shutil.rmtree(world.folder / "live/checkpoints/best")
    checkpoint_of(world, "best", 2, {"node-0/best": "new"})
    (out / ".partial-best").mkdir()  # of a pull that was killed
    with pytest.raises(Killed):
        pull(world.store, "r1", tmp_path / "out", progress=killed(0))
    assert (out / "best/model.pt").read_text() == "old"
    pull(world.store, "r1", tmp_path / "out")
    assert (out / "best").read_text() == "new"
    assert pulled(tmp_path / "out") == {"best"}
    (out / ".partial-best").write_text("half")
    checkpoint_of(world, "best", 3, {"node-0/best/model.pt": "newest"})
    pull(world.store, "r1", tmp_path / "out")
    assert (out / "best/model.pt").read_text() == "newest"
    assert pulled(tmp_path / "out") == {"best"}


@pytest.mark.parametrize("later", ["file", "pointer"])
def test_the_user_s_files_in_a_checkpoint_that_becomes_a_file_stay(world: World, tmp_path: Path, later: str) -> None:
    out = tmp_path / "out/checkpoints"
    for number in range(2):
        shutil.rmtree(world.folder / "live/checkpoints", ignore_errors=True)
        checkpoint_of(world, "best", 1, {"node-0/best/model.pt": "old"})
        pull(world.store, "r1", tmp_path / "out")
        (out / "best/mine.txt").write_text(f"the user's {number}")
        shutil.rmtree(world.folder / "live/checkpoints/best")
        name, path = ("best", "node-0/best") if later == "file" else ("step-1", "node-0/step-1/model.pt")
        checkpoint_of(world, name, 2, {path: "new"})
        point(world, best="step-1")
        pull(world.store, "r1", tmp_path / "out")
        assert (out / "best").read_text() == ("new" if later == "file" else "step-1\n")
    kept = {"best.yours/mine.txt": "the user's 0", "best.yours-2/mine.txt": "the user's 1"}
    assert {name: (out / name).read_text() for name in kept} == kept
    assert not (out / "best.yours/model.pt").exists()
    assert pull(world.store, "r1", tmp_path / "out").transferred == 0


def test_the_user_s_file_where_a_checkpoint_needs_a_folder_stays(world: World, tmp_path: Path) -> None:
    out = tmp_path / "out/checkpoints"
    world.checkpoint("step-1")
    pull(world.store, "r1", tmp_path / "out")
    (out / "best").write_text("the user's")
    checkpoint_of(world, "best", 1, {"node-0/best/model.pt": "new"})
    pull(world.store, "r1", tmp_path / "out")
    assert (out / "best/model.pt").read_text() == "new"
    assert (out / "best.yours").read_text() == "the user's"


@pytest.mark.parametrize(("mine", "now"), [("part/mine.txt", "part"), ("part", "part/model.pt")])
def test_the_user_s_file_in_a_checkpoint_makes_way_for_another_one(
    world: World, tmp_path: Path, mine: str, now: str
) -> None:
    out = tmp_path / "out/checkpoints/best"
    checkpoint_of(world, "best", 1, {"node-0/best/model.pt": "old"})
    pull(world.store, "r1", tmp_path / "out")
    (out / mine).parent.mkdir(exist_ok=True)
    (out / mine).write_text("the user's")
    checkpoint_of(world, "best", 2, {"node-0/best/model.pt": "new", f"node-0/best/{now}": "new"})
    pull(world.store, "r1", tmp_path / "out")
    assert (out / now).read_text() == "new"
    assert (out / mine.replace("part", "part.yours")).read_text() == "the user's"


@pytest.mark.parametrize(
    ("now", "mine"),
    [
        ("part/model.pt", {"part": "1", "part.yours": "2"}),
        ("part", {"part/a.txt": "1", "part.yours": "2"}),
        ("part", {"part/a.txt": "1", "part.yours/a.txt": "2"}),
    ],
)
def test_no_file_of_the_user_is_lost_when_the_name_for_it_is_taken(
    world: World, tmp_path: Path, now: str, mine: dict[str, str]
) -> None:
    out = tmp_path / "out/checkpoints/best"
    for number in range(3):
        checkpoint_of(world, "best", 2 * number + 1, {"node-0/best/model.pt": f"old {number}"})
        pull(world.store, "r1", tmp_path / "out")
        for path, text in mine.items():
            (out / path).parent.mkdir(exist_ok=True)
            (out / path).write_text(text)
        before = sorted(path.read_text() for path in out.rglob("*") if path.is_file() and path.name != "model.pt")
        checkpoint_of(world, "best", 2 * number + 2, {"node-0/best/model.pt": "new", f"node-0/best/{now}": "new"})
        pull(world.store, "r1", tmp_path / "out")
        after = sorted(path.read_text() for path in out.rglob("*") if path.is_file())
        assert (out / now).read_text() == "new"
        assert after == sorted([*before, "new", "new"])


def test_the_user_s_file_where_the_folder_of_the_checkpoints_goes_stays(world: World, tmp_path: Path) -> None:
    pull(world.store, "r1", tmp_path / "out")
    (tmp_path / "out/checkpoints").write_text("the user's")
    checkpoint_of(world, "best", 1, {"node-0/best/model.pt": "new"})
    pull(world.store, "r1", tmp_path / "out")
    assert (tmp_path / "out/checkpoints/best/model.pt").read_text() == "new"
    assert (tmp_path / "out/checkpoints.yours").read_text() == "the user's"


def test_a_file_that_the_user_adds_while_a_checkpoint_comes_stays(world: World, tmp_path: Path) -> None:
    mine = tmp_path / "out/checkpoints/best/mine.txt"
    checkpoint_of(world, "best", 1, {"node-0/best/model.pt": "old"})
    pull(world.store, "r1", tmp_path / "out")
    checkpoint_of(world, "best", 2, {"node-0/best/model.pt": "new"})
    pull(world.store, "r1", tmp_path / "out", progress=lambda *_: mine.write_text("the user's") and None)
    assert mine.read_text() == "the user's"
    assert (mine.parent / "model.pt").read_text() == "new"


def test_empty_folders_behind_a_link_stay(world: World, tmp_path: Path) -> None:
    (tmp_path / "mine/empty").mkdir(parents=True)
    checkpoint_of(world, "best", 1, {"node-0/best": "new"})
    pull(world.store, "r1", tmp_path / "out", what="logs")
    (tmp_path / "out/checkpoints").mkdir()
    (tmp_path / "out/checkpoints/best").symlink_to(tmp_path / "mine")
    pull(world.store, "r1", tmp_path / "out")
    assert (tmp_path / "mine/empty").is_dir()
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    files(str(tmp_path)).prune("link")
    assert (tmp_path / "mine/empty").is_dir()


@pytest.mark.parametrize("provider", ["memory", "docker", "sagemaker"])
def test_only_the_marks_of_the_runs_own_platform_stay_in_the_store(tmp_path: Path, provider: str) -> None:
    world = World(root=tmp_path / "store").recorded(provider=provider)
    users = {"model.pt", "model.git-ignore", "data.not-uploaded"}
    marks = {f"model.pt.sagemaker-{word}" for word in ("uploading", "uploaded", "ignore")}
    for name in users | marks:
        world.write(f"live/artifacts/node-0/{name}", "x")
    pull(world.store, "r1", tmp_path / "out", what="artifacts")
    names = {path.name for path in (tmp_path / "out" / "artifacts").iterdir()}
    assert names == (users if provider == "sagemaker" else users | marks)


# --------------------------------------------------------------------------------------------------------------- killed


_KILLED = """
import os, signal, sys
from pathlib import Path
from cloudtrain.runs.pull import pull
from cloudtrain.storage.timings import CLIENT_TIMINGS
from cloudtrain.store.store import Store
CLIENT_TIMINGS.pull_save = 0.0
left = [int(sys.argv[3])]
def progress(key, more):
    left[0] -= more
    if left[0] < 0:
        os.kill(os.getpid(), signal.SIGKILL)
pull(Store(sys.argv[1]), "r1", Path(sys.argv[2]), progress=progress)
"""


@pytest.mark.slow
def test_a_pull_that_was_killed_goes_on_where_it_was(world: World, tmp_path: Path) -> None:
    for number in range(12):
        world.checkpoint(f"step-{number}", when=T0 + number)
    for number in range(60):
        world.write(f"live/artifacts/node-0/a{number:02}", "x" * 1000)
    whole = pull(world.store, "r1", tmp_path / "whole").transferred
    out = tmp_path / "out"
    for budget in (20, 20_000, 30_000):
        words = [sys.executable, "-c", _KILLED, str(world.root), str(out), str(budget)]
        assert subprocess.run(words, check=False).returncode == -signal.SIGKILL
        assert all(
            (out / "checkpoints" / name / "model.pt").read_text() == "abc" for name in pulled(out) if name[0] != "."
        )
    last = pull(world.store, "r1", out).transferred
    assert last < whole - 30_000, "fetched more again than the 8 unfinished files"
    assert {p.relative_to(out) for p in out.rglob("*") if p.is_file() and p.name[0] != "."} == {
        p.relative_to(tmp_path / "whole") for p in (tmp_path / "whole").rglob("*") if p.is_file() and p.name[0] != "."
    }
    assert json.loads((out / "run.json").read_bytes())["run_id"] == "r1"


class Killed(BaseException):
    """As a kill, which no handler meets."""


def killed(after: int) -> Callable[[str, int], None]:
    """Return a progress callback that ends a pull after ``after`` files of checkpoints."""
    left = [after]

    def progress(key: str, more: int) -> None:
        if "/checkpoints/" in key:
            left[0] -= 1
            if left[0] < 0:
                raise Killed

    return progress


def direct(world: World, files: dict[str, str], when: float) -> None:
    """Write a checkpoint as a script writes it to the store itself."""
    shutil.rmtree(world.folder / "checkpoints", ignore_errors=True)
    for number, (name, text) in enumerate({**files, ".metadata": "m"}.items()):
        world.write(f"checkpoints/last/{name}", text)
        os.utime(world.folder / "checkpoints" / "last" / name, (T0 + when + number, T0 + when + number))


def mirrored(world: World, files: dict[str, str], when: float) -> None:
    """Write a checkpoint of several files as the run mirrors it, like `World.checkpoint`."""
    key = f"live/checkpoints/last/0.0-{int(when) + 1}"
    listed = {}
    for name, text in files.items():
        world.write(f"{key}/node-0/last/{name}", text)
        digest = hashlib.sha256(text.encode()).hexdigest()
        listed[f"node-0/last/{name}"] = {"size": len(text), "sha256": digest}
    world.write(f"{key}/commit.json", {"protocol": 1, "files": listed, "time": T0 + when, "saved": T0 + when})


def content(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.rglob("*") if path.is_file() and path.name != ".metadata"}


OLD, NEW = {"a": "v1", "b": "v1", "c": "v1", "same": "=="}, {"a": "v2!", "b": "v2!", "same": "=="}


@pytest.mark.slow
@pytest.mark.parametrize("save", [direct, mirrored])
@pytest.mark.parametrize("after", range(6))
@pytest.mark.parametrize("had", [True, False], ids=["the old one was here", "a part of it"])
def test_a_checkpoint_here_is_of_one_version(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save: Any, after: int, had: bool
) -> None:
    monkeypatch.setattr(pull_module, "parallel", lambda work, items, **_: [work(item) for item in items])
    out, last = tmp_path / "out", tmp_path / "out" / "checkpoints" / "last"
    save(world, OLD, 0)
    with contextlib.nullcontext() if had else pytest.raises(Killed):
        pull(world.store, "r1", out, what="checkpoints", progress=None if had else killed(2))
    save(world, NEW, 10)
    with contextlib.suppress(Killed):
        pull(world.store, "r1", out, what="checkpoints", progress=killed(after))
    assert content(last) in (OLD if had else {}, NEW)
    pull(world.store, "r1", out, what="checkpoints")
    assert content(last) == NEW
    assert pulled(out) == {"last"}
    assert pull(world.store, "r1", out, what="checkpoints").transferred == 0


@pytest.mark.parametrize("at", [0, 1])
def test_a_kill_at_the_swap_is_repaired(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    out, last = tmp_path / "out", tmp_path / "out" / "checkpoints" / "last"
    mirrored(world, OLD, 0)
    pull(world.store, "r1", out, what="checkpoints")
    (last / "theirs").write_text("somebody's own")
    mirrored(world, NEW, 10)
    replace, left = os.replace, [at]

    def renamed(source: Any, target: Any) -> None:
        if Path(source).is_dir():
            left[0] -= 1
            if left[0] < 0:
                raise Killed
        replace(source, target)

    monkeypatch.setattr(os, "replace", renamed)
    with pytest.raises(Killed):
        pull(world.store, "r1", out, what="checkpoints")
    assert content(last) == ({} if at else {**OLD, "theirs": "somebody's own"})
    monkeypatch.setattr(os, "replace", replace)
    before = pull(world.store, "r1", out, what="checkpoints")
    assert before.transferred < 100, "a part of the checkpoint came twice"
    assert content(last) == {**NEW, "theirs": "somebody's own"}
    assert pulled(out) == {"last"}


def test_of_a_checkpoint_that_goes_away_nothing_stays(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pull_module, "parallel", lambda work, items, **_: [work(item) for item in items])
    mirrored(world, OLD, 0)

    def gone(key: str, more: int) -> None:
        shutil.rmtree(world.folder / "live" / "checkpoints" / "last", ignore_errors=True)

    pull(world.store, "r1", tmp_path / "out", what="checkpoints", progress=gone)
    assert pulled(tmp_path / "out") == set()


def test_a_checkpoint_that_moves_to_the_archive_meanwhile_comes_from_there(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pull_module, "parallel", lambda work, items, **_: [work(item) for item in items])
    mirrored(world, OLD, 0)
    whole = world.folder / "live" / "checkpoints" / "last"

    def moved(key: str, more: int) -> None:
        if whole.exists():
            (world.folder / "archive" / "checkpoints").mkdir(parents=True)
            shutil.move(whole, world.folder / "archive" / "checkpoints" / "last")

    pull(world.store, "r1", tmp_path / "moved", what="checkpoints", progress=moved)
    pull(world.store, "r1", tmp_path / "there", what="checkpoints")
    assert pulled(tmp_path / "moved") == pulled(tmp_path / "there") != set()


def test_a_file_that_is_taken_away_meanwhile_is_one_line(world: World, tmp_path: Path) -> None:
    world.write("live/artifacts/node-0/a", "x")
    world.write("live/metrics/0.0-node-0.jsonl", '{"step": 1}\n')
    metrics = world.folder / "live" / "metrics" / "0.0-node-0.jsonl"
    store = world.store
    read = store.files.read

    def taken(key: str) -> bytes:
        if key.endswith(".jsonl"):
            metrics.unlink()
        return read(key)

    store.files.read = taken  # type: ignore[method-assign]
    with pytest.raises(StorageError, match="was deleted during the pull"):
        pull(store, "r1", tmp_path / "out")
    assert (tmp_path / "out" / "artifacts" / "a").read_text() == "x"


def test_one_that_is_asked_for_and_written_over_all_the_time_is_an_error(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pull must not end without any. A pull that follows the run takes the next one."""
    monkeypatch.setattr(pull_module, "parallel", lambda work, items, **_: [work(item) for item in items])
    wrote = [0]

    def writes(key: str, more: int) -> None:
        if "/checkpoints/" in key:
            wrote[0] += 1
            direct(world, {"a": f"version {wrote[0]}", "b": "v"}, 10.0 * wrote[0])

    direct(world, {"a": "version 0", "b": "v"}, 0)
    with pytest.raises(StorageError, match="checkpoint last was overwritten while it was pulled"):
        pull(world.store, "r1", tmp_path / "out", what="checkpoints:latest", progress=writes)
    assert wrote[0] >= pull_module.TRIES
    assert content(tmp_path / "out" / "checkpoints") == {}
    assert pull(world.store, "r1", tmp_path / "out", what="checkpoints:latest").checkpoints == ("last",)


def test_of_two_pulls_into_one_folder_the_second_waits_and_says_so_in_the_end(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CLIENT_TIMINGS, "pull_other", 0.3)
    world.checkpoint("step-1")
    out, refused = tmp_path / "out", []

    def meanwhile(key: str, more: int) -> None:
        with pytest.raises(ConflictError, match="another pull fills"):
            pull(world.store, "r1", out)
        refused.append(key)

    assert pull(world.store, "r1", out, progress=meanwhile).transferred > 0
    assert refused
    assert pull(world.store, "r1", out).transferred == 0
