"""The mirror: several nodes' mirrors over one live folder, in one process, with the node link's messages in queues."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.runtime import checkpoints, mirror
from cloudtrain.runtime.checkpoints import COMMIT, Complete, Watch, complete
from cloudtrain.runtime.mirror import KINDS, Mirror

QUIET = 0.3


class Cluster:
    """``nodes`` mirrors; a message goes from one to the other as JSON text, as it does over the link."""

    def __init__(self, tmp_path: Path, nodes: int, *, attempt: str = "0.0", patterns: tuple[str, ...] = ()) -> None:
        self.tmp, self.live = tmp_path, tmp_path / "live"
        self.alive = set(range(nodes))
        self.said: list[str] = []
        self.sent: list[tuple[int, int, dict[str, Any]]] = []
        self.hold: Callable[[int, int, dict[str, Any]], bool] = lambda *_: False
        self.mirrors = []
        for node in range(nodes):
            for folder in ("ck", "work", "artifacts"):
                (tmp_path / f"n{node}" / folder).mkdir(parents=True, exist_ok=True)
            watch = Watch(folder=self.ck(node), workdir=self.work(node), patterns=patterns)
            self.mirrors.append(
                Mirror(
                    node=node, nodes=nodes, attempt=attempt, live=self.live, watch=watch,
                    artifacts=tmp_path / f"n{node}/artifacts",
                    metrics=tmp_path / f"n{node}/metrics.jsonl", send=self._sender(node), peers=lambda: set(self.alive),
                    say=self.said.append, skip={name: e.signature for name, e in watch.entries().items()},
                )
            )  # fmt: skip
        for one in self.mirrors:
            one.start()

    def ck(self, node: int) -> Path:
        return self.tmp / f"n{node}" / "ck"

    def work(self, node: int) -> Path:
        return self.tmp / f"n{node}" / "work"

    def _sender(self, sender: int) -> Callable[[int, dict[str, Any]], None]:
        def send(node: int, message: dict[str, Any]) -> None:
            assert message["t"] in KINDS
            text = json.loads(json.dumps(message))
            self.sent.append((sender, node, text))
            if not self.hold(sender, node, text) and {sender, node} <= self.alive:
                self.mirrors[node].take(sender, text)

        return send

    def write(self, node: int, name: str, data: str = "x") -> Path:
        path = self.ck(node) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(data)
        return path

    def complete(self) -> list[Complete]:
        return complete(self.live / "checkpoints")

    def names(self) -> list[str]:
        return [f"{c.name}/{c.folder.name}" for c in self.complete()]

    def until(self, what: Callable[[], Any], seconds: float = 15) -> None:
        deadline = time.monotonic() + seconds
        while not what():
            assert time.monotonic() < deadline, (self.names(), self.said, self.sent[-8:])
            time.sleep(0.02)

    def settle(self) -> None:
        """Long enough for anything that were to happen to have happened."""
        time.sleep(QUIET + 1.0)

    def finish(self, *, clean: bool = True, seconds: float = 15) -> None:
        for node in sorted(self.alive):
            self.mirrors[node].finish(clean=clean)
        for node in sorted(self.alive):
            assert self.mirrors[node].idle.wait(seconds), (node, self.names(), self.sent[-8:])

    def stop(self) -> None:
        for one in self.mirrors:
            one.stop()


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Cluster]]:
    monkeypatch.setattr(mirror, "SCAN_SECONDS", 0.05)
    monkeypatch.setattr(mirror, "FIRST_SECONDS", 1.5)
    monkeypatch.setattr(checkpoints, "QUIET_SECONDS", QUIET)
    made: list[Cluster] = []

    def make(nodes: int = 2, **rest: Any) -> Cluster:
        made.append(Cluster(tmp_path, nodes, **rest))
        return made[-1]

    yield make
    for one in made:
        one.stop()


# ----------------------------------------------------------------------------------------------- while training goes on


def test_a_checkpoint_of_two_nodes_is_whole_or_absent(cluster: Callable[..., Cluster]) -> None:
    run = cluster(2)
    run.write(0, "step-1/rank0.pt", "zero")
    run.write(1, "step-1/rank1.pt", "one")
    run.until(run.complete)
    (one,) = run.complete()
    assert one.folder == run.live / "checkpoints" / "step-1" / "0.0-1"
    assert sorted(one.commit["files"]) == ["node-0/step-1/rank0.pt", "node-1/step-1/rank1.pt"]
    assert (one.commit["nodes"], one.commit["attempt"], one.commit["seq"], one.commit["protocol"]) == (2, "0.0", 1, 1)
    assert abs(one.commit["time"] - time.time()) < 30
    run.settle()
    assert run.names() == ["step-1/0.0-1"]  # once
    assert sum(m["t"] == "committed" for _, node, m in run.sent if node == 0) == 1


def test_a_writer_on_one_node_alone_is_enough(cluster: Callable[..., Cluster]) -> None:
    run = cluster(3)
    run.write(2, "last.pt", "weights")
    run.until(run.complete)
    assert sorted(run.complete()[0].commit["files"]) == ["node-2/last.pt"]


def test_nothing_is_copied_while_it_changes(cluster: Callable[..., Cluster]) -> None:
    run = cluster(2)
    end = time.monotonic() + 1.2
    while time.monotonic() < end:
        run.write(0, "step-1/a", str(time.monotonic_ns()))
        time.sleep(0.05)
    assert not any(m["t"] == "copy" for _, _, m in run.sent)
    assert run.names() == []
    run.until(run.complete)


def test_a_node_that_still_writes_its_part_is_waited_for(cluster: Callable[..., Cluster]) -> None:
    run = cluster(2)
    run.write(0, "step-1/a")
    for _ in range(12):
        run.write(1, "step-1/b", str(time.monotonic_ns()))
        time.sleep(0.1)
    assert run.names() == []
    run.until(run.complete)
    assert sorted(run.complete()[0].commit["files"]) == ["node-0/step-1/a", "node-1/step-1/b"]


def test_a_file_that_is_open_for_writing_waits(cluster: Callable[..., Cluster]) -> None:
    run = cluster(1)
    path = run.write(0, "step-1/a")
    code = "import sys; f = open(sys.argv[1], 'ab'); print(1, flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        run.settle()
        assert run.names() == []
        child.communicate(b"\n", timeout=20)
    run.until(run.complete)


def test_dcp_without_metadata_is_not_committed_until_it_appears(cluster: Callable[..., Cluster]) -> None:
    run = cluster(2)
    run.write(0, "step-1/__0_0.distcp")
    run.write(1, "step-1/__1_0.distcp")
    run.settle()
    assert run.names() == []
    run.write(0, "step-1/.metadata")
    run.until(run.complete)
    assert sorted(run.complete()[0].commit["files"]) == [
        "node-0/step-1/.metadata", "node-0/step-1/__0_0.distcp", "node-1/step-1/__1_0.distcp",
    ]  # fmt: skip


def test_dcps_metadata_may_lie_on_the_other_node(cluster: Callable[..., Cluster]) -> None:
    run = cluster(2)
    run.write(0, "step-1/__0_0.distcp")
    run.write(1, "step-1/.metadata")
    run.until(run.complete)
    assert len(run.complete()[0].commit["files"]) == 2


def test_a_rewritten_file_is_a_new_number(cluster: Callable[..., Cluster]) -> None:
    run = cluster(2)
    run.write(0, "last.pt", "first")
    run.until(lambda: len(run.names()) == 1)
    run.write(0, "last.pt", "second")
    run.until(lambda: len(run.names()) == 2)
    assert run.names() == ["last.pt/0.0-1", "last.pt/0.0-2"]
    assert [(c.folder / "node-0/last.pt").read_text() for c in run.complete()] == ["first", "second"]


def test_several_at_once_each_get_their_own(cluster: Callable[..., Cluster]) -> None:
    run = cluster(2)
    for step in range(5):
        run.write(0, f"step-{step}/a")
        run.write(1, f"step-{step}/b")
    run.until(lambda: len(run.names()) == 5)
    assert len({c.seq for c in run.complete()}) == 5
    assert all(c.commit["nodes"] == 2 for c in run.complete())


def test_a_checkpoint_the_script_deletes_again_is_dropped(cluster: Callable[..., Cluster]) -> None:
    run = cluster(2)
    run.hold = lambda sender, node, m: m["t"] == "finished"  # it is announced, and gone before node 0 asks
    path = run.write(1, "step-1/a")
    run.until(lambda: any(m["t"] == "finished" for _, _, m in run.sent))
    path.unlink()
    path.parent.rmdir()
    run.hold = lambda *_: False
    run.mirrors[0].take(1, {"t": "finished", "name": "step-1"})
    run.until(lambda: any(m["t"] == "dropped" for _, _, m in run.sent))
    run.write(1, "step-2/a")
    run.until(run.complete)
    assert run.names()[0].startswith("step-2/")


def test_a_holder_of_the_last_one_may_be_behind_with_the_next(cluster: Callable[..., Cluster]) -> None:
    """Node 1 begins to write a second after node 0 has finished: a commit without its part would be half."""
    run = cluster(2)
    run.write(0, "step-1/a")
    run.write(1, "step-1/b")
    run.until(run.complete)
    run.write(0, "step-2/a")
    run.settle()
    assert len(run.names()) == 1
    run.write(1, "step-2/b")
    run.until(lambda: len(run.names()) == 2)
    assert len(run.complete()[-1].commit["files"]) == 2


def test_a_race_with_the_copy_commits_only_what_stayed_the_same(
    cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file is rewritten after node 0 asked and before it is copied: the round comes to nothing, the next counts."""
    run = cluster(2)
    changed = threading.Event()

    def rewrite(sender: int, node: int, message: dict[str, Any]) -> bool:
        if message["t"] == "copy" and node == 1 and not changed.is_set():
            changed.set()
            run.write(1, "step-1/b", "changed while being copied")
        return False

    run.hold = rewrite
    run.write(0, "step-1/a")
    run.write(1, "step-1/b")
    run.until(run.complete)
    run.settle()
    for one in run.complete():
        assert complete(one.folder)
        data = (one.folder / "node-1/step-1/b").read_bytes()
        assert one.commit["files"]["node-1/step-1/b"]["size"] == len(data)
    assert (run.complete()[-1].folder / "node-1/step-1/b").read_text() == "changed while being copied"


@pytest.mark.proof
@pytest.mark.parametrize("seed", range(max(3, int(os.environ.get("CLOUDTRAIN_TRIALS") or 0) // 10)))
def test_every_commit_is_whole_whatever_the_timing(cluster: Callable[..., Cluster], seed: int) -> None:
    """Writers that stop and go on at random, on two nodes; 5 s a trial. What is committed is one state of all files."""
    import random

    run = cluster(2)
    random = random.Random(seed)
    for step in range(3):
        for _ in range(random.randint(1, 4)):
            for node in random.sample([0, 1], 2):
                for part in range(random.randint(1, 3)):
                    run.write(node, f"step-{step}/n{node}-{part}", f"{random.random()}" * random.randint(1, 2000))
                time.sleep(random.choice([0, 0.05, QUIET, QUIET * 1.5]))
    run.finish()
    newest = {c.name: c for c in run.complete()}
    assert sorted(newest) == ["step-0", "step-1", "step-2"]
    for name, one in newest.items():
        checkpoints.restore(one, run.tmp / "restored" / name, node=0)
        wanted = {p.name: p.read_bytes() for node in (0, 1) for p in (run.ck(node) / name).iterdir()}
        assert {p.name: p.read_bytes() for p in (run.tmp / "restored" / name).iterdir()} == wanted
    for one in run.complete():
        checkpoints.restore(one, run.tmp / "any" / one.name, node=0)  # digests hold, of old ones too


def test_a_node_that_goes_away_in_the_middle_stops_nothing(cluster: Callable[..., Cluster]) -> None:
    run = cluster(3)
    run.write(0, "step-1/a")
    run.until(run.complete)
    run.hold = lambda sender, node, m: sender == 2 and m["t"] == "hold"  # it is asked and never answers
    run.write(0, "step-2/a")
    run.until(lambda: any(m["t"] == "hold?" and m["name"] == "step-2" and node == 2 for _, node, m in run.sent))
    run.settle()
    assert len(run.names()) == 1
    run.alive.discard(2)
    run.until(lambda: len(run.names()) == 2)
    assert run.complete()[1].commit["nodes"] == 1


def test_without_a_node_that_held_a_part_there_is_no_half_checkpoint(cluster: Callable[..., Cluster]) -> None:
    run = cluster(2)
    run.write(0, "step-1/a")
    run.write(1, "step-1/b")
    run.until(run.complete)
    run.alive.discard(1)
    run.write(0, "step-2/a")
    run.settle()
    run.finish(clean=False)
    assert [c.name for c in run.complete()] == ["step-1"]


def test_a_live_folder_that_does_not_take_it_is_tried_again(cluster: Callable[..., Cluster]) -> None:
    run = cluster(1)
    (run.live / "checkpoints").parent.mkdir(parents=True, exist_ok=True)
    (run.live / "checkpoints").write_text("a file where the folder should be")
    run.write(0, "step-1/a")
    run.until(lambda: run.said)
    assert "step-1" in run.said[0] or "checkpoints" in run.said[0]
    told = len(run.said)
    run.settle()
    assert len(run.said) == told  # said once, not every second
    (run.live / "checkpoints").unlink()
    run.until(run.complete)


def test_what_was_restored_is_not_mirrored_again(cluster: Callable[..., Cluster], tmp_path: Path) -> None:
    (tmp_path / "n0/ck/step-9").mkdir(parents=True)
    (tmp_path / "n0/ck/step-9/a").write_text("restored")
    run = cluster(1, attempt="0.1")
    run.settle()
    assert run.names() == []
    run.write(0, "step-9/a", "trained on")
    run.until(run.complete)
    assert run.names() == ["step-9/0.1-1"]


def test_checkpoints_of_the_scripts_own_place_keep_it(cluster: Callable[..., Cluster]) -> None:
    run = cluster(2, patterns=("out/checkpoint-*",))
    path = run.work(0) / "out" / "checkpoint-10"
    path.mkdir(parents=True)
    (path / "model.safetensors").write_text("m")
    run.until(run.complete)
    (one,) = run.complete()
    assert (one.name, one.commit["place"]) == ("out--checkpoint-10", "out/checkpoint-10")
    watch = Watch(folder=run.ck(1), workdir=run.work(1))
    checkpoints.restore(one, watch.place(one.name, one.commit["place"]), node=1)
    assert (run.work(1) / "out/checkpoint-10/model.safetensors").read_text() == "m"


# -------------------------------------------------------------------------------------------------------------- the end


def test_a_clean_end_takes_everything_at_once(cluster: Callable[..., Cluster]) -> None:
    run = cluster(2)
    began = time.monotonic()
    run.write(0, "step-1/a")
    run.write(1, "step-1/b")
    run.write(1, "last.pt")
    run.finish()
    assert time.monotonic() - began < 5
    assert sorted(c.name for c in run.complete()) == ["last.pt", "step-1"]
    assert {len(c.commit["files"]) for c in run.complete()} == {1, 2}


def test_one_node_may_be_done_long_before_the_other(cluster: Callable[..., Cluster]) -> None:
    run = cluster(2)
    run.write(1, "step-1/b")
    run.mirrors[1].finish(clean=True)
    run.write(0, "step-1/a")
    time.sleep(1.0)
    run.write(0, "step-2/a")
    run.write(1, "step-2/b")
    run.finish()
    newest = {c.name: c for c in run.complete()}
    assert sorted(newest) == ["step-1", "step-2"]
    assert len(newest["step-2"].commit["files"]) == 2


def test_after_an_unclean_end_a_half_written_one_is_not_committed(cluster: Callable[..., Cluster]) -> None:
    run = cluster(2)
    run.write(0, "step-1/a")
    run.write(1, "step-1/b")
    run.until(run.complete)
    run.write(0, "step-2/half", "the process was killed here")
    run.finish(clean=False)
    assert [c.name for c in run.complete()] == ["step-1"]


def test_after_an_unclean_end_what_was_finished_before_still_counts(cluster: Callable[..., Cluster]) -> None:
    run = cluster(2)
    run.hold = lambda sender, node, m: m["t"] == "copy" and not run.mirrors[0]._finishing
    run.write(0, "step-1/a")
    run.write(1, "step-1/b")
    run.until(lambda: any(m["t"] == "copy" for _, _, m in run.sent))
    for one in run.mirrors:
        one.finish(clean=False)
    for sender, node, message in [s for s in run.sent if s[2]["t"] == "copy"]:  # late, not lost
        run.mirrors[node].take(sender, message)
    run.until(run.complete)
    assert sorted(run.complete()[0].commit["files"]) == ["node-0/step-1/a", "node-1/step-1/b"]


def test_dcp_that_never_got_its_metadata_holds_nobody_up(cluster: Callable[..., Cluster]) -> None:
    run = cluster(2)
    run.write(0, "step-1/__0_0.distcp")
    run.until(lambda: any(m["t"] == "finished" for _, _, m in run.sent))
    began = time.monotonic()
    run.finish()
    assert time.monotonic() - began < 5
    assert run.names() == []


def test_nothing_to_mirror_is_done_at_once(cluster: Callable[..., Cluster]) -> None:
    run = cluster(3)
    began = time.monotonic()
    run.finish()
    assert time.monotonic() - began < 3
    assert list((run.live / "checkpoints").glob("*")) == []


# ---------------------------------------------------------------------------------------------- what grows: whole files


def test_artifacts_and_metrics_are_mirrored_whole_now_and_at_the_end(
    cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirror, "GROWING_SECONDS", 0.2)
    run = cluster(2)
    (run.tmp / "n1/artifacts/tensorboard").mkdir()
    events = run.tmp / "n1/artifacts/tensorboard/events"
    there = run.live / "artifacts/node-1/tensorboard/events"
    for text in ("one", "one two"):
        events.write_text(text)
        run.until(lambda text=text: there.exists() and there.read_text() == text)  # type: ignore[misc]
    (run.tmp / "n0/metrics.jsonl").write_text('{"step": 1}\n')
    run.until((run.live / "metrics/0.0-node-0.jsonl").exists)
    with open(run.tmp / "n0/metrics.jsonl", "a") as stream:
        stream.write('{"step": 2}\n')
    events.write_text("one two three")
    run.finish(clean=False)
    assert (run.live / "metrics/0.0-node-0.jsonl").read_text().count("\n") == 2
    assert there.read_text() == "one two three"
    assert not (run.live / "metrics/0.0-node-1.jsonl").exists()


def test_an_artifact_that_is_not_readable_does_not_stop_the_others(cluster: Callable[..., Cluster]) -> None:
    run = cluster(1)
    (run.tmp / "n0/artifacts/a-link").symlink_to("/no/such/file")
    with contextlib.suppress(OSError):
        os.mkfifo(run.tmp / "n0/artifacts/b-pipe")
    (run.tmp / "n0/artifacts/c").write_text("fine")
    run.write(0, "step-1/a")
    run.finish()
    assert (run.live / "artifacts/node-0/c").read_text() == "fine"
    assert run.names() == ["step-1/0.0-1"]
    assert not (run.live / "checkpoints/step-1/0.0-1/node-0" / COMMIT).exists()


# ------------------------------------------------------------------------------------------------- what may go wrong


def test_a_part_that_was_never_written_leaves_no_half_checkpoint(cluster: Callable[..., Cluster]) -> None:
    run = cluster(2)
    for node in (0, 1):
        run.write(node, f"step-1/rank{node}.pt")
    run.until(run.complete)
    run.write(0, "step-2/rank0.pt")
    run.settle()  # seen as finished on node 0, and owed by node 1
    run.finish(clean=False)
    assert run.names() == ["step-1/0.0-1"]


def test_what_is_copied_is_what_was_offered(cluster: Callable[..., Cluster]) -> None:
    run = cluster(1)
    path = run.write(0, "last/model.pt", "epoch 1")
    writers: list[Any] = []

    def rewrite_before_the_copy(sender: int, node: int, message: dict[str, Any]) -> bool:
        if message["t"] == "copy" and not writers:
            writers.append(path.open("w"))
            writers[0].write("half of epoch 2")
            writers[0].flush()
        return False

    run.hold = rewrite_before_the_copy
    run.until(lambda: writers)
    run.settle()
    assert run.complete() == []
    writers[0].write(", and the rest")
    writers[0].close()
    run.until(run.complete)
    (one,) = run.complete()
    assert (one.folder / "node-0/last/model.pt").read_text() == "half of epoch 2, and the rest"


def test_a_commit_that_cannot_be_written_is_tried_again(cluster: Callable[..., Cluster]) -> None:
    run = cluster(1)
    (run.live / "checkpoints/step-1/0.0-1" / COMMIT).mkdir(parents=True)
    run.write(0, "step-1/a")
    run.until(run.complete)
    assert run.names() == ["step-1/0.0-2"]
    assert any("cannot commit" in line for line in run.said)


def test_an_artifact_that_did_not_arrive_is_tried_again_at_the_end(cluster: Callable[..., Cluster]) -> None:
    run = cluster(1)
    run.live.mkdir(parents=True)
    (run.live / "artifacts").write_text("a file where the folder should be")
    (run.tmp / "n0/artifacts/model.pt").write_text("weights")
    run.mirrors[0].finish(clean=True)
    assert not run.mirrors[0].idle.wait(1.5)
    (run.live / "artifacts").unlink()
    assert run.mirrors[0].idle.wait(10)
    assert (run.live / "artifacts/node-0/model.pt").read_text() == "weights"
