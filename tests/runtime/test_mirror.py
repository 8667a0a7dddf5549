"""The mirror: several nodes' mirrors over one live folder, in one process, with the node link's messages in queues."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from disks import faulty_disk

from cloudtrain.runtime import checkpoint_done, checkpoints, mirror, mirror_files
from cloudtrain.runtime.checkpoint_model import Checkpoint, resumable
from cloudtrain.runtime.checkpoints import COMMIT, CheckpointEntry, Watch, complete
from cloudtrain.runtime.commits import Commits
from cloudtrain.runtime.mirror import KINDS, Mirror
from cloudtrain.runtime.timings import TIMINGS

pytestmark = pytest.mark.slow

QUIET = 0.3


class Cluster:
    """``nodes`` mirrors; a message goes from one to the other as JSON text, as it does over the link."""

    def __init__(
        self, tmp_path: Path, nodes: int, *, attempt: str = "0.0", patterns: tuple[str, ...] = (), keep: int = 0,
        damaged: Sequence[Path] = (), shapes: dict[str, Counter[str]] | None = None,
    ) -> None:  # fmt: skip
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
            commits = partial(
                Commits,
                nodes=nodes,
                attempt=attempt,
                live=self.live,
                keep=keep,
                damaged=damaged,
                send=self._sender(node),
                peers=lambda: set(self.alive),
                say=self.said.append,
                temporary="",
                marks=(),
                archive=None,
            )
            if node:  # as after a resume: files that only rank 0 had written
                watch.set_aside("last.pt", {""})
            self.mirrors.append(
                Mirror(
                    node=node, attempt=attempt, live=self.live, watch=watch,
                    artifacts=tmp_path / f"n{node}/artifacts",
                    metrics=tmp_path / f"n{node}/metrics.jsonl", links=tmp_path / f"n{node}/links", flush_seconds=0.2,
                    send=self._sender(node), peers=lambda: set(self.alive),
                    say=self.said.append, shapes=shapes,
                    commits=None if node else commits,
                    skip={name: e.signature for name, e in watch.entries().items()},
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

    def complete(self) -> list[Checkpoint]:
        return complete(self.live / "checkpoints")

    def names(self) -> list[str]:
        return [f"{c.name}/{c.folder.name}" for c in self.complete()]

    def until(self, what: Callable[[], Any], seconds: float = 15) -> None:
        deadline = time.monotonic() + seconds
        while not what():
            assert time.monotonic() < deadline, (self.names(), self.said, self.sent[-8:])
            time.sleep(0.02)

    def settle(self) -> None:
        """Wait long enough for every possible action."""
        time.sleep(QUIET + 0.5)

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
    monkeypatch.setattr(TIMINGS, "scan", 0.05)
    monkeypatch.setattr(TIMINGS, "first_holder", 0.8)
    monkeypatch.setattr(TIMINGS, "quiet", QUIET)
    monkeypatch.setattr(TIMINGS, "copy_pauses", (0.1, 0.1))
    made: list[Cluster] = []

    def make(nodes: int = 2, **rest: Any) -> Cluster:
        made.append(Cluster(tmp_path, nodes, **rest))
        return made[-1]

    yield make
    for one in made:
        one.stop()


# ------------------------------------------------------------------------------------------------------ during training


def test_a_checkpoint_of_two_nodes_is_whole_or_absent(cluster: Callable[..., Cluster]) -> None:
    run = cluster(2)
    run.write(0, "step-1/rank0.pt", "zero")
    run.write(1, "step-1/rank1.pt", "one")
    run.until(run.complete)
    (one,) = run.complete()
    assert one.folder == run.live / "checkpoints" / "step-1" / "0.0-1"
    assert sorted(one.commit["files"]) == ["node-0/step-1/rank0.pt", "node-1/step-1/rank1.pt"]
    assert one.commit["run_nodes"] == 2
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


def test_a_folder_that_cannot_be_listed_is_not_left_out(cluster: Callable[..., Cluster], tmp_path: Path) -> None:
    with faulty_disk(tmp_path / "n0/ck", tmp_path / "behind") as disk:
        disk.fail(("readdir", "/step-1/deep", errno.EIO))
        run = cluster(1)
        for name in ("step-1/a", "step-1/deep/b", "step-2/a"):
            run.write(0, name)
        run.until(run.complete)
        run.settle()
        assert run.names() == ["step-2/0.0-1"]
        trouble = f"cannot read {disk.place}/step-1/deep: Input/output error (EIO)"
        assert run.mirrors[0].trouble == trouble
        assert run.said.count(f"mirror: {trouble}; trying again") == 1
        assert run.mirrors[0].sign() < time.monotonic() - 0.5  # else a script that hangs would seem to write
        run.write(0, "step-3/a")
        deadline = time.monotonic() + 15
        while len(run.names()) < 2:  # a copy that succeeds does not hide the trouble of another checkpoint
            assert run.mirrors[0].trouble == trouble
            assert time.monotonic() < deadline
        disk.fail()
        run.finish()
        assert [sorted(one.files) for one in run.complete() if one.name == "step-1"] == [
            ["node-0/step-1/a", "node-0/step-1/deep/b"]
        ]
        assert run.mirrors[0].trouble == ""


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
    run.hold = lambda sender, node, m: m["t"] == "finished"  # announced, and removed before node 0 asks
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
    """Node 1 begins to write a second after node 0 has finished: a commit without its part would be incomplete."""
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
    """A file is rewritten between node 0's question and the copy. That round commits nothing, and the next one counts.
    Node 0's part may be of the previous version, so the wait for it is limited."""
    monkeypatch.setattr(TIMINGS, "holder", 2.0)
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
    """Writers pause and resume at random on two nodes, 5 s a trial. Each commit is one state of all files."""
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
    run.hold = lambda sender, node, m: sender == 2 and m["t"] == "hold"  # node 2 gets the question and never answers
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
    count = len(run.said)
    run.settle()
    assert len(run.said) == count  # once, not every second
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


def test_a_failure_soon_after_the_first_checkpoint(
    cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of rank 0 is whole. A folder may lack the other node's files."""
    monkeypatch.setattr(TIMINGS, "first_holder", 60.0)
    run = cluster(2)
    run.write(0, "last.pt")
    run.write(0, "step-1/a")
    run.until(lambda: sum(message["t"] == "finished" for _, _, message in run.sent) == 2)
    assert run.names() == []
    run.finish(clean=False)
    assert [c.name for c in run.complete()] == ["last.pt"]
    assert run.said == ["checkpoint step-1 does not count: it may lack files of node 1"]


def test_checkpoints_that_are_one_rank_s_files_are_named_once(cluster: Callable[..., Cluster]) -> None:
    run = cluster(1)
    for step in (1, 2):
        for rank in (0, 1):
            run.write(0, f"step-{step}_rank{rank}.pt")
            run.until(lambda step=step, rank=rank: len(run.complete()) == 2 * step - 1 + rank)  # type: ignore[misc]
    assert run.said == ["step-1_rank1.pt counts as a whole checkpoint: write the files of all ranks into one folder"]


def test_half_a_checkpoint_does_not_become_whole_by_lying_still(cluster: Callable[..., Cluster]) -> None:
    """Its writer was killed. The other ranks take seconds to end, and no process has the file open."""
    run = cluster(2)
    run.write(0, "step-1/rank0.pt")
    run.write(1, "step-1/rank1.pt")
    run.until(run.complete)
    run.write(0, "step-2/rank0.pt")
    run.write(1, "step-2/rank1.pt", "ha")
    for one in run.mirrors:
        one.freeze()
    run.settle()
    assert run.names() == ["step-1/0.0-1"]
    run.finish(clean=False)
    assert run.names() == ["step-1/0.0-1"]


def test_what_was_finished_before_the_kill_is_still_brought_home(cluster: Callable[..., Cluster]) -> None:
    run = cluster(2)
    requests: list[str] = []

    def hold_the_copy(sender: int, node: int, message: dict[str, Any]) -> bool:
        if message["t"] == "copy" and len(requests) < 2:
            requests.append(message["name"])
            return True
        return False

    run.write(0, "step-1/rank0.pt")
    run.write(1, "step-1/rank1.pt")
    run.hold = hold_the_copy
    run.until(lambda: len(requests) == 2)
    for one in run.mirrors:
        one.freeze()
    (work,) = run.mirrors[0]._commits._rounds.values()  # type: ignore[union-attr]
    work.phase, work.retry = "idle", 0.0  # as after a node that did not answer
    run.finish(clean=False)
    assert [c.name for c in run.complete()] == ["step-1"]


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


# ---------------------------------------------------------------------------------------------- forerunners and pauses


def test_a_pause_between_the_files_of_one_checkpoint_does_not_make_it_two(cluster: Callable[..., Cluster]) -> None:
    """A script pauses longer than the quiet time while it saves. From its second checkpoint on, its files are known."""
    run = cluster(2)
    for node in (0, 1):
        run.write(node, "checkpoint-500/model.bin")
        run.write(node, f"checkpoint-500/rng_state_{node}.pth")
    run.until(run.complete)
    for node in (0, 1):
        run.write(node, "checkpoint-1000/model.bin")
    run.settle()
    assert run.names() == ["checkpoint-500/0.0-1"]
    for node in (0, 1):
        run.write(node, f"checkpoint-1000/rng_state_{node}.pth")
    run.until(lambda: len(run.complete()) == 2)
    assert len(run.complete()[1].commit["files"]) == 4


def test_a_rest_of_a_checkpoint_that_node_0_has_deleted_is_nothing_to_resume_from(
    cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check Hugging Face's rotation: it deletes on node 0 alone, which may be before the checkpoint is copied."""
    monkeypatch.setattr(TIMINGS, "holder", 2.0)
    run = cluster(2, keep=1)
    for node in (0, 1):
        run.write(node, f"checkpoint-10/rng_state_{node}.pth")
    run.write(0, "checkpoint-10/model.safetensors")
    run.until(run.complete)
    run.write(1, "checkpoint-20/rng_state_1.pth")
    run.until(lambda: len(run.complete()) == 2)
    run.settle()
    assert [(item.name, len(item.files)) for item in run.complete()] == [("checkpoint-10", 3), ("checkpoint-20", 1)]
    assert [item.name for item in resumable(run.complete())] == ["checkpoint-10"]
    run.write(1, "checkpoint-30/rng_state_1.pth")
    run.settle()
    assert "checkpoint-30" not in {item.name for item in run.complete()}, "node 0 still counts as a writer"
    for name in ("model.safetensors", "rng_state_0.pth"):
        run.write(0, f"checkpoint-30/{name}")
    run.until(lambda: [(c.name, len(c.files)) for c in resumable(run.complete())] == [("checkpoint-30", 3)])
    run.finish()


def test_one_nodes_part_of_a_checkpoint_takes_no_whole_ones_place(
    cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check DeepSpeed's parts: node 0 removes its own before it has reported it, and the older checkpoint is whole."""
    monkeypatch.setattr(TIMINGS, "holder", 2.0)
    run = cluster(2, keep=1)

    def save(name: str, *nodes: int) -> None:
        for node in nodes:
            run.write(node, f"{name}/zero_pp_rank_{node}_mp_rank_00_optim_states.pt")
            run.write(node, f"{name}/rng_state_{node}.pth")

    save("global_step10", 0, 1)
    run.until(run.complete)
    save("global_step20", 1)
    run.until(lambda: len(run.complete()) == 2)
    run.settle()
    assert [item.name for item in run.complete()] == ["global_step10", "global_step20"]
    assert [item.name for item in resumable(run.complete())] == ["global_step10"]
    why = "lacks files that others have, so a restart does not resume from it"
    assert f"checkpoint global_step20 {why}" in run.said
    save("global_step30", 1)
    run.settle()
    assert len(run.complete()) == 2, "node 0 still counts as a writer"
    save("global_step30", 0)
    run.until(lambda: [item.name for item in run.complete()] == ["global_step30"])
    run.stop()

    run = cluster(2, keep=1, attempt="1.0")
    save("global_step40", 1)
    run.settle()
    assert len(run.complete()) == 1, "the earlier attempt shows who writes"
    save("global_step40", 0)
    run.until(lambda: [item.name for item in run.complete()] == ["global_step40"])


def test_a_part_that_a_pointer_names_is_kept(cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TIMINGS, "holder", 1.0)
    run = cluster(2, keep=1)
    for name, nodes in {"step-1": (0, 1), "step-2": (1,), "step-3": (0, 1)}.items():
        for node in nodes:
            run.write(node, f"{name}/rank_{node}.pt")
        if name == "step-2":
            run.write(1, "best", "step-2\n")
            run.until(lambda: any(m["t"] == "pointers" for _, _, m in run.sent))
        run.until(lambda name=name: name in [item.name for item in run.complete()])  # type: ignore[misc]
    run.settle()
    assert [item.name for item in run.complete()] == ["step-2", "step-3"]


def test_a_whole_model_of_one_node_does_not_make_that_node_the_only_writer(
    cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TIMINGS, "forerunner", 0.1)
    monkeypatch.setattr(TIMINGS, "holder", 2.0)
    run = cluster(2, keep=1)
    for node in (0, 1):
        run.write(node, f"step-1/rank_{node}.pt")
    run.until(run.complete)
    for name in ("step-2", "step-3"):
        run.write(0, f"{name}/model.pt")
        run.until(lambda name=name: [item.name for item in run.complete()] == [name])  # type: ignore[misc]
    monkeypatch.setattr(TIMINGS, "holder", 300.0)
    run.write(0, "step-4/rank_0.pt")
    run.until(lambda: any(m.get("name") == "step-4" and m.get("state") == "ready" for _, _, m in run.sent))
    run.settle()
    assert [item.name for item in run.complete()] == ["step-3"], "node 1 still counts as a writer"
    run.write(1, "step-4/rank_1.pt")
    run.until(lambda: [(item.name, len(item.files)) for item in run.complete()] == [("step-4", 2)])


def test_the_log_names_a_folder_from_which_no_restart_resumes(cluster: Callable[..., Cluster]) -> None:
    run = cluster(1)
    for name in ("model.pt", "optimizer.pt"):
        run.write(0, f"step-1/{name}")
    run.until(run.complete)
    for count, version in enumerate(("one", "two"), start=2):
        run.write(0, "final/model.pt", version)
        run.until(lambda count=count: len(run.complete()) == count)  # type: ignore[misc]
    run.write(0, "config.json")
    run.finish()
    assert [text for text in run.said if "resume" in text] == [
        "checkpoint final lacks files that others have, so a restart does not resume from it"
    ]


def test_a_rest_of_an_earlier_attempt_does_not_show_who_writes(
    cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = cluster(2)
    run.write(1, "checkpoint-10/rng_state_1.pth")
    run.until(run.complete)
    run.stop()
    monkeypatch.setattr(TIMINGS, "first_holder", 3.0)
    run = cluster(2, attempt="0.1")
    run.write(1, "checkpoint-20/rng_state_1.pth")
    run.settle()
    assert run.names() == ["checkpoint-10/0.0-1"]
    run.write(0, "checkpoint-20/model.safetensors")
    run.until(lambda: [len(item.files) for item in resumable(run.complete())] == [2])


def test_a_restored_checkpoint_is_a_forerunner_too(cluster: Callable[..., Cluster]) -> None:
    run = cluster(1, attempt="0.1", shapes={"step-#": Counter({"model.bin": 1, "rank#": 2})})
    run.write(0, "step-8/model.bin")
    run.write(0, "step-8/rank0")
    run.settle()
    assert run.names() == []
    run.write(0, "step-8/rank1")
    run.until(run.complete)


def test_a_script_that_leaves_a_file_out_is_believed_in_the_end(
    cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TIMINGS, "forerunner", 2.0)
    run = cluster(1)
    run.write(0, "step-1/model.bin")
    run.write(0, "step-1/optimizer.bin")
    run.until(run.complete)
    for step in (2, 3):
        run.write(0, f"step-{step}/model.bin")
        run.until(lambda step=step: len(run.complete()) == step)  # type: ignore[misc]


def test_the_end_of_a_script_ends_all_waiting(cluster: Callable[..., Cluster]) -> None:
    run = cluster(1)
    run.write(0, "step-1/model.bin")
    run.write(0, "step-1/optimizer.bin")
    run.until(run.complete)
    run.write(0, "step-2/model.bin")
    run.finish()
    assert [c.name for c in run.complete()] == ["step-1", "step-2"]


# ----------------------------------------------------------------------------------- written over the one before


def contents(run: Cluster) -> list[list[str]]:
    """Return the contents of every complete checkpoint, oldest first, without those removed during the read."""
    found = []
    for item in run.complete():
        with contextlib.suppress(FileNotFoundError):
            found.append([(item.folder / key).read_text() for key in sorted(item.commit["files"])])
    return found


def test_a_node_that_is_late_is_waited_for_though_it_has_the_version_before(cluster: Callable[..., Cluster]) -> None:
    run = cluster(2)
    for version in ("one", "two"):
        run.write(0, "last/rank0.pt", version)
        run.settle()
        assert ["two", "one"] not in contents(run)
        run.write(1, "last/rank1.pt", version)
        run.until(lambda version=version: [version, version] in contents(run))  # type: ignore[misc]
    assert contents(run) == [["one", "one"], ["two", "two"]]


def test_a_rank_that_is_late_is_waited_for_too(cluster: Callable[..., Cluster]) -> None:
    run = cluster(1)
    for version in ("one", "two"):
        run.write(0, "last/rank0.pt", version)
        if version == "two":
            run.settle()
        run.write(0, "last/rank1.pt", version)
        run.until(lambda version=version: [version, version] in contents(run))  # type: ignore[misc]
    assert contents(run) == [["one", "one"], ["two", "two"]]


def test_what_is_restored_of_another_node_is_no_part_of_ours(cluster: Callable[..., Cluster]) -> None:
    """After a resume every node has all nodes' files. Node 1's copy of rank 0's own file must not become node
    1's part."""
    first = cluster(2)
    first.write(0, "last.pt", "old")
    first.until(first.complete)
    first.stop()
    for node in (0, 1):
        first.write(node, "last.pt", "old")
    run = cluster(2, attempt="0.1")
    run.write(0, "last.pt", "new")
    run.until(lambda: len(run.complete()) == 2)
    assert list(run.complete()[-1].commit["files"]) == ["node-0/last.pt"]


def test_a_file_that_never_changes_is_learned(cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TIMINGS, "mixed", 2.0)
    run = cluster(1)
    run.write(0, "last/config", "same")
    for version in ("one", "two", "three"):
        run.write(0, "last/model", version)
        run.until(lambda version=version: ["same", version] in contents(run))  # type: ignore[misc]
        monkeypatch.setattr(TIMINGS, "mixed", 2.0 if version == "one" else 600.0)


def test_who_writes_one_kind_says_nothing_of_another(cluster: Callable[..., Cluster]) -> None:
    """Rank 0's own export comes first, then the shards of two nodes, the second node's late."""
    run = cluster(2)
    run.write(0, "export.bin")
    run.until(run.complete)
    run.write(0, "step-1/rank0.pt")
    run.settle()
    assert [c.name for c in run.complete()] == ["export.bin"]
    run.write(1, "step-1/rank1.pt")
    run.until(lambda: len(run.complete()) == 2)
    run.write(0, "export-2.bin")
    run.finish()
    assert len(run.complete()) == 3


@pytest.mark.parametrize("scan", [0.05, 0.7], ids=["often", "seldom"])
def test_a_file_that_is_never_at_rest_is_taken_between_two_writes(
    cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch, scan: float
) -> None:
    monkeypatch.setattr(TIMINGS, "scan", scan)  # seldom: it is another file at each look
    monkeypatch.setattr(TIMINGS, "restless", 1.0)
    monkeypatch.setattr(TIMINGS, "quiet", 2.0)
    run = cluster(1)
    deadline, number, found = time.monotonic() + 60, 0, list[list[str]]()
    while not found and time.monotonic() < deadline:
        number += 1
        run.write(0, ".last.tmp", f"version {number}").replace(run.ck(0) / "last.pt")
        time.sleep(0.5)
        found = contents(run)  # empty if the next one replaces it during the read
    (text,) = found[-1]
    assert text.startswith("version ")


def test_what_a_rank_was_writing_when_it_died_does_not_count_though_it_holds_still(
    cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The report of its death arrives during a check of a file that keeps changing."""
    monkeypatch.setattr(TIMINGS, "restless", 0.3)
    monkeypatch.setattr(TIMINGS, "quiet", 60.0)
    run, looked = cluster(1), threading.Event()

    def dies(entries: list[CheckpointEntry], _: float) -> list[CheckpointEntry]:
        if entries:
            run.mirrors[0].freeze()
            looked.set()
        return entries

    monkeypatch.setattr(checkpoint_done, "_holding_still", dies)
    run.write(0, "half.pt")
    assert looked.wait(10)
    run.settle()
    run.finish(clean=False)
    assert run.complete() == []


def test_a_checkpoint_that_is_deleted_while_it_is_copied_arrives(
    cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, whole = cluster(1), checkpoints.copy_with_digest
    done = threading.Event()

    def copy(source: Path, target: Path, moved: Any) -> Any:
        if not done.is_set():
            done.set()
            shutil.rmtree(run.ck(0) / "step-1")
        return whole(source, target, moved)

    monkeypatch.setattr(checkpoints, "copy_with_digest", copy)
    run.write(0, "step-1/a", "one")
    run.write(0, "step-1/b", "two")
    run.until(run.complete)
    assert contents(run) == [["one", "two"]]


def test_a_link_to_a_folder_is_left_out_and_told_of_once(cluster: Callable[..., Cluster]) -> None:
    run = cluster()
    (run.tmp / "big").mkdir()
    (run.tmp / "big/data").write_text("d")
    for name in ("step-1", "step-2"):
        run.write(0, f"{name}/a")
        (run.ck(0) / name / "dataset").symlink_to(run.tmp / "big")
        run.until(lambda name=name: any(name in folder for folder in run.names()))  # type: ignore[misc]
    assert [list(item.commit["files"]) for item in run.complete()] == [["node-0/step-1/a"], ["node-0/step-2/a"]]
    assert [text for text in run.said if "link" in text] == [
        "checkpoint step-1: dataset is a link to a folder; it is left out"
    ]


def test_one_that_is_deleted_too_soon_is_told_of(cluster: Callable[..., Cluster]) -> None:
    run = cluster(1)
    run.hold = lambda sender, node, m: m["t"] == "finished"
    path = run.write(0, "step-1")
    run.until(lambda: any(m["t"] == "finished" for _, _, m in run.sent))
    path.unlink()
    run.hold = lambda *_: False
    run.mirrors[0].take(0, {"t": "finished", "name": "step-1"})
    run.until(lambda: "checkpoint step-1 was removed before it could be copied" in run.said)


def test_a_checkpoint_that_went_on_after_all_replaces_its_first_half(cluster: Callable[..., Cluster]) -> None:
    run = cluster(1)
    run.write(0, "checkpoint-1/model", "m")
    run.until(run.complete)
    run.write(0, "checkpoint-1/optimizer", "o")
    run.until(lambda: contents(run) == [["m", "o"]])


# ------------------------------------------------------------------------------------------------------------ retention


def test_a_damaged_one_is_not_counted_and_goes(cluster: Callable[..., Cluster]) -> None:
    first = cluster(1)
    for step in (1, 2):
        first.write(0, f"step-{step}")
        first.until(lambda step=step: len(first.complete()) == step)  # type: ignore[misc]
    first.stop()
    run = cluster(1, attempt="0.1", keep=2, damaged=[first.live / "checkpoints/step-2/0.0-2"])
    run.write(0, "step-3")
    run.until(lambda: run.names() == ["step-1/0.0-1", "step-3/0.1-1"])


def test_what_only_lies_beside_checkpoints_takes_no_place(cluster: Callable[..., Cluster]) -> None:
    run = cluster(1, keep=1)
    for step in (1, 2):
        run.write(0, f"checkpoint-{step}/model.bin")
        run.until(lambda step=step: f"checkpoint-{step}" in [c.name for c in run.complete()])  # type: ignore[misc]
    for name in ("config.json", "model.bin"):
        run.write(0, name)
    run.finish()
    assert {c.name for c in run.complete()} == {"checkpoint-2", "config.json", "model.bin"}


def test_a_mount_that_fails_while_something_is_removed_keeps_nobody_from_ending(
    cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    def remove(*args: Any, **rest: Any) -> None:
        raise OSError(107, "Transport endpoint is not connected")

    monkeypatch.setattr(mirror, "remove_parts", remove)
    run = cluster(1, keep=1)
    for step in (1, 2):
        run.write(0, f"step-{step}")
        run.until(lambda step=step: f"step-{step}" in [c.name for c in run.complete()])  # type: ignore[misc]
    run.finish()
    assert any("not connected" in line for line in run.said)


def test_no_agent_means_no_second_look_at_the_store(
    cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would hold up all messages for as long as a slow mount takes to list the files."""
    looks: list[Path] = []
    monkeypatch.setattr(Path, "rglob", lambda path, _: looks.append(path) or iter(()))
    run = cluster(1)
    run.write(0, "step-1/model.pt")
    run.until(run.complete)
    run.finish()
    assert looks == []


def test_a_full_disk_is_no_progress(cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the end would wait for ever, because it waits for progress."""
    monkeypatch.setattr(TIMINGS, "commit_retry_most", 0.2)

    def copy(source: Path, target: Path, moved: Callable[[Path, int], None]) -> Any:
        moved(source, 4096)
        raise OSError(28, "No space left on device", str(target))

    run = cluster(1)
    monkeypatch.setattr(checkpoints, "copy_with_digest", copy)
    run.write(0, "step-1")
    run.mirrors[0].finish(clean=True)
    run.until(lambda: len([m for _, _, m in run.sent if m["t"] == "copy"]) > 3)
    last = run.mirrors[0].last
    tries = len([m for _, _, m in run.sent if m["t"] == "copy"])
    run.until(lambda: len([m for _, _, m in run.sent if m["t"] == "copy"]) > tries + 3)
    assert run.mirrors[0].last == last
    assert not run.mirrors[0].idle.is_set()


def left(run: Cluster) -> list[str]:
    """Return every checkpoint folder that still has a file."""
    root = run.live / "checkpoints"
    return sorted({"/".join(Path(folder).relative_to(root).parts[:2]) for folder, _, names in os.walk(root) if names})


def test_the_newest_are_kept_and_the_others_go_with_all_their_files(cluster: Callable[..., Cluster]) -> None:
    run = cluster(2, keep=2)
    for step in range(1, 5):
        for node in (0, 1):
            run.write(node, f"step-{step}/rank{node}.pt")
        run.until(lambda step=step: f"step-{step}/0.0-{step}" in run.names())  # type: ignore[misc]
    run.until(lambda: left(run) == ["step-3/0.0-3", "step-4/0.0-4"])
    assert run.names() == ["step-3/0.0-3", "step-4/0.0-4"]
    # and, soon after their last files, no empty folder
    run.until(lambda: sorted(p.name for p in (run.live / "checkpoints").iterdir()) == ["step-3", "step-4"])


def test_an_attempt_with_fewer_nodes_removes_the_parts_of_the_others(cluster: Callable[..., Cluster]) -> None:
    first = cluster(3)
    for node in range(3):
        first.write(node, f"step-1/rank{node}.pt")
    first.until(first.complete)
    first.stop()
    for node in range(3):
        shutil.rmtree(first.ck(node) / "step-1")
    run = cluster(2, attempt="1.0", keep=1)
    for node in range(2):
        run.write(node, f"step-2/rank{node}.pt")
    run.until(lambda: left(run) == ["step-2/1.0-1"])


@pytest.mark.parametrize("link", [True, False])
def test_what_a_pointer_names_is_kept(cluster: Callable[..., Cluster], link: bool) -> None:
    run = cluster(1, keep=1)
    run.write(0, "step-1/model.pt")
    run.until(run.complete)
    if link:
        (run.ck(0) / "best").symlink_to("step-1")
    else:
        run.write(0, "best", "step-1\n")
    run.until(lambda: any(m["t"] == "pointers" for _, _, m in run.sent))
    for step in (2, 3):
        run.write(0, f"step-{step}/model.pt")
        run.until(lambda step=step: run.names()[-1].startswith(f"step-{step}/"))  # type: ignore[misc]
    assert run.names() == ["step-1/0.0-1", "step-3/0.0-3"]
    pointers = checkpoints.read_pointers(run.live)
    assert pointers == {0: {"best": checkpoints.Pointer(target="step-1", link=link)}}


def test_what_a_pointer_names_is_kept_after_its_mount_failed(
    cluster: Callable[..., Cluster], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TIMINGS, "mount", 0.1)
    monkeypatch.setattr(TIMINGS, "hold_answer", 0.5)
    with faulty_disk(tmp_path / "live", tmp_path / "behind") as disk:
        first = cluster(1, keep=1)
        first.write(0, "step-1/model.pt")
        first.until(first.complete)
        checkpoints.write_pointers(disk.place, 1, {"best": checkpoints.Pointer(target="step-1", link=False)})
        first.stop()
        disk.fail(("open", "/pointers/node-1.json", errno.EIO))
        run = cluster(1, attempt="0.1", keep=1)
        for step in (2, 3):
            run.write(0, f"step-{step}/model.pt")
            run.until(lambda: any("Input/output error" in line for line in run.said))
            disk.fail()
            run.until(lambda step=step: run.names()[-1].startswith(f"step-{step}/"))  # type: ignore[misc]
        run.settle()
        assert [item.name for item in run.complete()] == ["step-1", "step-3"]


def test_of_what_is_written_again_the_two_newest_stay(cluster: Callable[..., Cluster]) -> None:
    run = cluster(1)
    run.write(0, "step-1/model.pt")
    for count in range(1, 5):
        run.write(0, "last.pt", f"version {count}")
        run.until(lambda count=count: any(f"version {count}" in t for t in texts(run)))  # type: ignore[misc]
    run.until(lambda: texts(run) == ["version 3", "version 4"])
    assert "step-1" in [c.name for c in run.complete()]


def texts(run: Cluster) -> list[str]:
    return [(c.folder / "node-0/last.pt").read_text() for c in run.complete() if c.name == "last.pt"]


def test_what_an_earlier_attempt_left_half_goes_and_what_it_finished_stays(cluster: Callable[..., Cluster]) -> None:
    first = cluster(2)
    for node in (0, 1):
        first.write(node, f"step-1/rank{node}.pt")
    first.until(first.complete)
    first.stop()
    half = first.live / "checkpoints/step-2/0.0-2"
    for node in (0, 1):
        (half / f"node-{node}/step-2").mkdir(parents=True)
        (half / f"node-{node}/step-2/rank{node}.pt").write_text("half")
    run = cluster(2, attempt="0.1")
    for node in (0, 1):
        run.write(node, f"step-3/rank{node}.pt")
    run.until(lambda: not half.exists())
    assert run.names() == ["step-1/0.0-1", "step-3/0.1-1"]


def test_a_removed_one_that_comes_back_is_removed_again(cluster: Callable[..., Cluster], tmp_path: Path) -> None:
    """A platform's two-way sync may restore it. It was never preferred to a newer one."""
    run = cluster(2, keep=1)
    for step in range(1, 4):
        for node in (0, 1):
            run.write(node, f"step-{step}/rank{node}.pt")
        if step == 2:
            shutil.copytree(run.live / "checkpoints/step-1", tmp_path / "stale")
        run.until(lambda step=step: run.names()[-1:] == [f"step-{step}/0.0-{step}"])  # type: ignore[misc]
        if step == 2:
            run.until(lambda: not (run.live / "checkpoints/step-1").exists())
            shutil.copytree(tmp_path / "stale", run.live / "checkpoints/step-1")
            assert run.names() == ["step-1/0.0-1", "step-2/0.0-2"]
    run.until(lambda: left(run) == ["step-3/0.0-3"])


def test_what_cannot_be_removed_is_whole_and_goes_with_the_next(
    cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = cluster(1, keep=1)
    run.write(0, "step-1/model.pt")
    run.until(run.complete)
    stuck = Path.unlink

    def unlink(path: Path, missing_ok: bool = False) -> None:
        if path.name == COMMIT and "step-1" in path.parts:
            raise PermissionError(1, "not permitted", str(path))
        stuck(path, missing_ok=missing_ok)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", unlink)
        run.write(0, "step-2/model.pt")
        run.until(lambda: run.names()[-1] == "step-2/0.0-2")
        run.settle()
        assert run.names() == ["step-1/0.0-1", "step-2/0.0-2"]
    run.write(0, "step-3/model.pt")
    run.until(lambda: run.names() == ["step-3/0.0-3"])


# -------------------------------------------------------------------------------------------------------- growing files


def test_a_slow_artifact_holds_up_no_checkpoint(
    cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, let_go, whole = threading.Event(), threading.Event(), mirror_files.replace_file

    def slow(source: Path, target: Path, moved: Callable[[], None], **more: Any) -> None:
        if source.name == "huge":
            entered.set()
            assert let_go.wait(30)
        whole(source, target, moved, **more)

    monkeypatch.setattr(mirror_files, "replace_file", slow)
    run = cluster(1)
    (run.tmp / "n0/artifacts/huge").write_text("1")
    assert entered.wait(10)
    run.write(0, "step-1/model.pt")
    run.until(run.complete)
    let_go.set()
    run.finish()
    assert (run.live / "artifacts/node-0/huge").read_text() == "1"


def test_artifacts_and_metrics_are_mirrored_whole_now_and_at_the_end(
    cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TIMINGS, "growing", 0.2)
    monkeypatch.setattr(TIMINGS, "file_retry", 0.1)
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


# --------------------------------------------------------------------------------------------------------------- faults


def test_a_part_that_was_never_written_leaves_no_half_checkpoint(cluster: Callable[..., Cluster]) -> None:
    run = cluster(2)
    for node in (0, 1):
        run.write(node, f"step-1/rank{node}.pt")
    run.until(run.complete)
    run.write(0, "step-2/rank0.pt")
    run.settle()  # finished on node 0, and missing from node 1
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


# ------------------------------------------------------------------------------------------ versions, one after another


def slow_copies(monkeypatch: pytest.MonkeyPatch, seconds: float, *, of: str = "", times: int = 99) -> None:
    """Slow down the copies of files below a checkpoint. A slow mount takes data in blocks."""
    copy_file, left = checkpoints.copy_with_digest, [times]

    def copy(source: Path, target: Path, moved: Callable[[Path, int], None] = lambda *_: None) -> Any:
        done = copy_file(source, target, lambda *_: None)
        if "checkpoints" in str(target) and of in str(target) and left[0]:
            left[0] -= 1
            for block in range(1, 11):
                time.sleep(seconds / 10)
                moved(source, block)
        return done

    monkeypatch.setattr(checkpoints, "copy_with_digest", copy)


def being_copied(run: Cluster) -> bool:
    return any(path.is_file() for path in (run.live / "checkpoints").glob("*/*/node-0/**/*"))


def replace(run: Cluster, node: int, name: str, data: str) -> None:
    """Replace the file atomically, as careful scripts save."""
    (run.ck(node) / ".new").write_text(data)
    os.replace(run.ck(node) / ".new", run.ck(node) / name)


@pytest.mark.parametrize("over", [False, True], ids=["while it trains", "as its last act"])
def test_a_version_that_comes_while_the_one_before_is_copied_is_committed_too(
    cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch, over: bool
) -> None:
    slow_copies(monkeypatch, 1.0)
    run = cluster(1)
    run.write(0, "last.pt", "one")
    run.until(lambda: being_copied(run))
    replace(run, 0, "last.pt", "two")
    if not over:
        run.until(lambda: contents(run)[-1:] == [["two"]])
    run.finish()
    assert contents(run) == [["one"], ["two"]]


def test_a_node_that_fails_does_not_give_its_old_part_for_the_new_one(cluster: Callable[..., Cluster]) -> None:
    run = cluster(2)
    for node in (0, 1):
        run.write(node, f"last/rank{node}.pt", "one")
    run.until(run.complete)
    run.settle()
    run.write(0, "last/rank0.pt", "two")
    run.settle()
    run.mirrors[1].freeze()
    run.finish(clean=False)
    assert contents(run) == [["one", "one"]]


def test_what_was_committed_since_the_last_look_is_no_new_part(
    cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With many files a check takes long, and delays the next one."""
    run = cluster(2)
    look = run.mirrors[1]._finished.look

    def slow_look(entries: Any) -> Any:
        time.sleep(0.2)
        return look(entries)

    monkeypatch.setattr(run.mirrors[1]._finished, "look", slow_look)
    for node in (0, 1):
        run.write(node, f"last/rank{node}.pt", "one")
    run.until(run.complete)
    run.write(0, "last/rank0.pt", "two")
    time.sleep(3)
    assert contents(run) == [["one", "one"]]
    run.write(1, "last/rank1.pt", "two")
    run.until(lambda: contents(run)[-1:] == [["two", "two"]], 30)


def test_what_is_left_of_one_that_is_being_removed_is_no_new_version(
    cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TIMINGS, "forerunner", 1.0)
    run = cluster(1, keep=1)
    for file in ("model.pt", "rng.pt"):
        run.write(0, f"last/{file}", "one")
    run.until(run.complete)
    time.sleep(1.5)
    (run.ck(0) / "last/model.pt").unlink()
    run.settle()
    run.finish()
    assert contents(run) == [["one", "one"]]


def test_a_part_that_was_copied_while_another_was_written_over_is_of_an_old_version(
    cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_copies(monkeypatch, 1.0, of="rank0", times=1)
    run = cluster(2)
    for node in (0, 1):
        run.write(node, f"last/rank{node}.pt", "one")
    run.until(lambda: being_copied(run))
    run.write(0, "last/rank0.pt", "two")  # in place: the copy has neither version
    time.sleep(3)
    assert contents(run) == []
    run.write(1, "last/rank1.pt", "two")
    run.until(run.complete)
    assert contents(run) == [["two", "two"]]


def test_a_clock_that_is_set_back_costs_no_checkpoint(cluster: Callable[..., Cluster]) -> None:
    run = cluster(1, keep=1)
    run.write(0, "step-1")
    run.until(run.complete)
    hour_ago = time.time() - 3600
    os.utime(run.write(0, ".step-2"), (hour_ago, hour_ago))
    (run.ck(0) / ".step-2").rename(run.ck(0) / "step-2")
    run.until(lambda: any(m["t"] == "committed" and m["name"] == "step-2" for *_, m in run.sent))
    run.settle()
    assert "step-2/0.0-2" in run.names()


def test_a_checkpoint_after_the_clock_was_set_back_is_the_newest(
    cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, real = cluster(1), time.time
    run.write(0, "step-1")
    run.until(run.complete)
    for number, back in ((2, 3600.0), (3, 0.0), (4, 5400.0)):
        monkeypatch.setattr(time, "time", lambda back=back: real() - back)
        os.utime(run.write(0, f".step-{number}"), (time.time(), time.time()))
        (run.ck(0) / f".step-{number}").rename(run.ck(0) / f"step-{number}")
        run.until(lambda: len(run.complete()) == number)  # noqa: B023
    assert [item.name for item in run.complete()] == ["step-1", "step-2", "step-3", "step-4"]
    assert run.mirrors[0]._clock.set_back() == pytest.approx(9000.0, abs=5.0)


def test_a_time_in_the_future_keeps_nothing_from_being_finished(cluster: Callable[..., Cluster]) -> None:
    run = cluster(1)
    tomorrow = time.time() + 86_400
    os.utime(run.write(0, "step-1"), (tomorrow, tomorrow))
    run.until(run.complete)
    sign = run.mirrors[0].sign()
    run.settle()
    assert run.mirrors[0].sign() == sign < time.monotonic() - 1.0


def test_files_that_come_with_old_times_are_waited_for_like_others(
    cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TIMINGS, "quiet", 1.0)
    run = cluster(1)
    source = run.tmp / "source"
    source.mkdir()
    for name in "abc":
        (source / name).write_text(name)
        os.utime(source / name, (1e9, 1e9))

    def copy(here: str, there: str) -> str:
        time.sleep(0.5)
        return str(shutil.copy2(here, there))

    shutil.copytree(source, run.ck(0) / "best", copy_function=copy)
    run.until(run.complete)
    assert contents(run) == [["a", "b", "c"]]


def test_whoever_waits_for_another_nodes_copy_sees_it_move(
    cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TIMINGS, "progress", 0.2)
    slow_copies(monkeypatch, 4.0, of="node-1")
    run = cluster(3)
    for node in (0, 1, 2):
        run.write(node, f"step-1/rank{node}.pt")
    longest = dict.fromkeys(range(3), 0.0)
    run.until(lambda: being_copied(run))
    time.sleep(1.0)
    while not run.complete():
        for node, one in enumerate(run.mirrors):
            longest[node] = max(longest[node], time.monotonic() - one.last)
        time.sleep(0.05)
    assert max(longest.values()) < 2.0, longest


def test_what_the_script_has_deleted_is_forgotten(cluster: Callable[..., Cluster]) -> None:
    run = cluster(1)
    for number in range(3):
        run.write(0, f"step-{number}")
        run.until(lambda number=number: len(run.complete()) == number + 1)  # type: ignore[misc]
    for number in range(2):
        (run.ck(0) / f"step-{number}").unlink()
    known = run.mirrors[0]
    run.until(lambda: not {"step-0", "step-1"} & (known._finished._items.keys() | known._offered.keys()))
    assert not known._announced.keys() & {"step-0", "step-1"}
    run.finish()
    assert len(run.complete()) == 3
