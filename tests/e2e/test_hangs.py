"""Hanging runs through the console script: found in time, with the blocking rank named, then retried.

About 5 minutes on 2 cores; every test starts at least one whole run.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import pytest
from jobs import Done, Jobs

from cloudtrain.runs.run import Run

pytestmark = pytest.mark.slow
#: Two nodes of one process each, without torch: the runtime, link and supervisor alone.
PLAIN = ("--nodes", "2", "--launcher", "python")
TORCH = ("--nodes", "2", "--nproc-per-node", "2")
LIMIT = 30
"""Seconds, more than torchrun and its ranks need for their imports here, even on a busy machine."""
SHORT = 5
"""Seconds, more than a rank without torch needs to start, even on a busy machine."""
FOUND_WITHIN = 10
"""Seconds after `stall_timeout` within which a stall must be found."""


def stalled(jobs: Jobs, done: Done) -> dict[str, Any]:
    """Return the result object, after the checks that hold for every stall."""
    result = done.json
    assert (result["state"], result["category"], done.code) == ("failed", "stalled", 1), result
    assert "\n" not in result["reason"]
    assert result["reason"] in done.err
    jobs.gone(3)
    return result


def line_of(jobs: Jobs, text: str) -> int:
    """Return the number of the script's line with ``text``, counted from 1."""
    (found,) = [i for i, line in enumerate((jobs.code / "train.py").read_text().splitlines(), 1) if text in line]
    return found


def silent_seconds(jobs: Jobs, run_id: str) -> float:
    """Return the seconds from the last sign of life that a rank recorded to the decision that the run stalled."""
    (since,) = jobs.store.glob(f"runs/{run_id}/live/artifacts/*/silent-since")
    (decided,) = [record for record in jobs.run(run_id).store.exits(run_id) if record["decided"]]
    return float(decided["failure"]["time_ns"]) / 1e9 - float(since.read_text())


# ----------------------------------------------------------------------------------------------------- deadlocks, torch

DEADLOCK = """
import os, pathlib, time
from datetime import timedelta
import torch, torch.distributed as dist

def load_batch():
    print("loading", flush=True)
    pathlib.Path(os.environ["CLOUDTRAIN_ARTIFACT_DIR"], "silent-since").write_text(str(time.time()))
    time.sleep(600)  # the batch that never comes

dist.init_process_group("gloo", timeout=timedelta(minutes=30))
total = torch.ones(1)
dist.all_reduce(total)
hang = os.environ["CLOUDTRAIN_ATTEMPT"] in os.environ["HANGS"].split()
if dist.get_rank() == int(os.environ["CULPRIT"]) and hang:
    load_batch()
dist.all_reduce(total)  # where the others wait
print("total", total.item(), flush=True)
dist.destroy_process_group()
"""


@pytest.mark.proof
@pytest.mark.parametrize("culprit", [0, 3])
def test_a_deadlocked_collective_is_found_and_its_culprit_named(jobs: Jobs, culprit: int) -> None:
    jobs.write("train.py", DEADLOCK)
    env = ("--env", f"CULPRIT={culprit}", "--env", "HANGS=0.0")
    done = jobs.submit("train.py", *TORCH, *env, "--stall-timeout", f"{LIMIT}s", "--run-id", "r")
    result = stalled(jobs, done)
    there, waiting = line_of(jobs, "never comes"), line_of(jobs, "the others wait")
    assert result["reason"] == (
        f"no line, metric or checkpoint from any rank for {LIMIT} s; rank {culprit} on node {culprit // 2} is at"
        f" train.py:{there} (load_batch), the other 3 are at train.py:{waiting} (all_reduce)"
    )
    failure = result["failure"]
    assert (failure["node"], failure["rank"]) == (culprit // 2, culprit)
    assert (failure["file"], failure["line"]) == ("train.py", there)

    assert LIMIT <= silent_seconds(jobs, "r") <= LIMIT + FOUND_WITHIN

    stacks = stacks_of(jobs.run("r"))
    assert f'train.py", line {there} in load_batch' in stacks[culprit]
    others = set(range(4)) - {culprit}
    assert all(f'train.py", line {waiting} in <module>' in stacks[rank] for rank in others)
    assert all("in all_reduce" in stacks[rank] for rank in others)


def stacks_of(run: Run) -> dict[int, str]:
    """Return each rank's output from its first stack on."""
    found: dict[int, list[str]] = {}
    for line in run.logs():
        if line.rank is not None and (line.rank in found or "(most recent call first)" in line.text):
            found.setdefault(line.rank, []).append(line.text)
    return {rank: "\n".join(lines) for rank, lines in found.items()}


@pytest.mark.proof
def test_a_hanging_run_is_tried_again(jobs: Jobs) -> None:
    jobs.write("train.py", DEADLOCK)
    env = ("--env", "CULPRIT=2", "--env", "HANGS=0.0")
    done = jobs.submit("train.py", *TORCH, *env, "--stall-timeout", f"{LIMIT}s", "--retries", "1")
    result = done.json
    assert (done.code, result["state"]) == (0, "succeeded"), result
    first, second = result["attempts"]
    assert (first["number"], second["number"]) == ("0.0", "1.0")
    assert "rank 2 on node 1 is at train.py" in first["reason"]
    assert done.err.count("total 16.0") == 4
    jobs.gone(3)


@pytest.mark.proof
def test_a_rank_that_never_joins_the_others_is_named(jobs: Jobs) -> None:
    """Check before the process group exists: the other ranks wait in torch's rendezvous."""
    jobs.write(
        "train.py",
        """
        import os, time
        import torch.distributed as dist

        def mount():
            time.sleep(600)

        print("up", flush=True)
        if os.environ["RANK"] == "2":
            mount()
        dist.init_process_group("gloo")
        """,
    )
    result = stalled(jobs, jobs.submit("train.py", *TORCH, "--stall-timeout", f"{LIMIT}s"))
    assert f"rank 2 on node 1 is at train.py:{line_of(jobs, '600')} (mount)" in result["reason"]
    assert f"the other 3 are at train.py:{line_of(jobs, 'gloo')} (" in result["reason"]
    assert (result["failure"]["node"], result["failure"]["rank"]) == (1, 2)


# ----------------------------------------------------------------------------------------------------- without torch


def test_a_rank_that_does_not_answer_is_named(jobs: Jobs) -> None:
    jobs.write(
        "train.py",
        """
        import os, signal, time
        print("up", flush=True)
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(600)
        """,
    )
    result = stalled(jobs, jobs.submit("train.py", "--nodes", "3", *PLAIN[2:], "--stall-timeout", f"{SHORT}s"))
    others = f"the other 2 are at train.py:{line_of(jobs, '600')} (<module>)"
    assert f"rank 1 on node 1 did not answer, {others}" in result["reason"]
    assert (result["failure"]["node"], result["failure"]["rank"], result["failure"]["line"]) == (1, 1, None)


def test_two_ranks_at_two_lines_are_both_named_and_none_is_blamed(jobs: Jobs) -> None:
    jobs.write(
        "train.py",
        """
        import os, sys, threading, time
        sys.stdout.write("epoch 1:  30%")  # a progress bar has no end of line
        sys.stdout.flush()
        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
        def stuck_here():
            while True: time.sleep(1)
        if os.environ["RANK"] == "1": stuck_here()
        time.sleep(90)
        """,
    )
    done = jobs.submit("train.py", *PLAIN, "--stall-timeout", f"{SHORT}s")
    result = stalled(jobs, done)
    assert result["reason"] == (
        f"no line, metric or checkpoint from any rank for {SHORT} s;"
        f" rank 0 on node 0 is at train.py:{line_of(jobs, '(90)')} (<module>),"
        f" rank 1 on node 1 is at train.py:{line_of(jobs, 'while True')} (stuck_here) (seen by node 0)"
    )
    assert (result["failure"]["node"], result["failure"]["rank"], result["failure"]["file"]) == (0, None, None)
    assert done.err.count("most recent call first") == 4  # every thread of every rank


@pytest.mark.proof
def test_a_script_keeps_its_own_handler(jobs: Jobs) -> None:
    jobs.write(
        "train.py",
        """
        import signal, time
        signal.signal(signal.SIGUSR1, lambda *args: print("ours", flush=True))
        print("up", flush=True)
        time.sleep(600)
        """,
    )
    done = jobs.submit("train.py", "--stall-timeout", f"{SHORT}s")
    assert stalled(jobs, done)["reason"].endswith("; rank 0 on node 0 did not answer")
    assert "ours" in done.err


def test_a_command_has_no_stack(jobs: Jobs) -> None:
    jobs.write("train.sh", "echo up\nsleep 600\n")
    result = stalled(jobs, jobs.submit("train.sh", "--stall-timeout", f"{SHORT}s"))
    assert result["reason"] == f"no line, metric or checkpoint from any rank for {SHORT} s (seen by node 0)"


@pytest.mark.proof
def test_stacks_by_hand_are_a_sign_of_life(jobs: Jobs) -> None:
    jobs.write("train.py", "import time\nprint('up', flush=True)\ntime.sleep(9)\nprint('done')\n")
    run = jobs.detach("train.py", "--stall-timeout", "6s")
    jobs.printed(run, "up")
    time.sleep(4)
    os.kill(jobs.wait_for(lambda: jobs.pid_of(r"worker\.py train\.py")), signal.SIGUSR1)
    assert run.wait(timeout=60)["state"] == "succeeded"
    assert 'train.py", line 3 in <module>' in stacks_of(run)[0]


def test_the_wait_for_a_late_node_is_no_stall(jobs: Jobs) -> None:
    late = jobs.write(
        "late-python", f'#!/bin/sh\n[ "$CLOUDTRAIN_ENGINE_NODE" = 1 ] && sleep 6\nexec {sys.executable} "$@"\n'
    )
    late.chmod(0o755)
    jobs.write("train.py", "import time\ntime.sleep(1)\nprint('here')")
    done = jobs.submit("train.py", *PLAIN, "--stall-timeout", f"{SHORT}s", "--set", f"python={late}")
    assert done.code == 0, done.err


@pytest.mark.proof
def test_any_activity_on_any_rank_is_a_sign_of_life(jobs: Jobs) -> None:
    """Check lines, then metrics, then checkpoints, each alone for longer than the limit."""
    jobs.write(
        "train.py",
        """
        import os, time
        rank, folder = os.environ["RANK"], os.environ["CLOUDTRAIN_CHECKPOINT_DIR"]
        for i in range(18):
            time.sleep(2)
            if i < 6 and rank == "1":
                print(i, flush=True)
            elif 6 <= i < 12 and rank == "1":
                open(os.environ["CLOUDTRAIN_METRICS_FILE"], "a").write('{"step": 1}\\n')
            elif i >= 12:  # a script's first checkpoint waits for every node: each writes its part
                open(f"{folder}/step-{i}", "w").write("x")
        """,
    )
    done = jobs.submit("train.py", *PLAIN, "--stall-timeout", "8s")
    assert done.code == 0, done.err


# -------------------------------------------------------------------------------------------------- the flight recorder

RECORDER = """
import os, pathlib, pickle, threading, time
rank = os.environ["RANK"]
pipe = os.environ["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] + rank + ".pipe"
assert int(os.environ["TORCH_FR_BUFFER_SIZE"]) > 0 and os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"
os.mkfifo(pipe)
fd = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)

def monitor():  # what ProcessGroupNCCL's own thread does
    while not os.read(fd, 128):
        time.sleep(1)
    with open(os.environ["TORCH_FR_DUMP_TEMP_FILE"] + rank, "wb") as stream:
        pickle.dump({"version": "2.10", "entries": [rank]}, stream)

threading.Thread(target=monitor, daemon=True).start()
print("up", flush=True)
"""


@pytest.mark.proof
def test_a_copied_artifact_is_no_sign_of_life(jobs: Jobs) -> None:
    """Check an artifact that changed just before the hang: its mirror follows within half a minute of the last copy."""
    limit = 14
    jobs.write(
        "train.py",
        """
        import os, pathlib, time
        folder = pathlib.Path(os.environ["CLOUDTRAIN_ARTIFACT_DIR"])
        (folder / "silent-since").write_text("0")
        time.sleep(5)
        print("up", flush=True)
        (folder / "silent-since").write_text(str(time.time()))
        time.sleep(600)
        """,
    )
    stalled(jobs, jobs.submit("train.py", "--stall-timeout", f"{limit}s", "--run-id", "r"))
    assert limit <= silent_seconds(jobs, "r") <= limit + FOUND_WITHIN


@pytest.mark.parametrize(
    ("shape", "limit", "ranks"),
    [(PLAIN, SHORT, [[0], [1]]), pytest.param(TORCH, LIMIT, [[0, 1], [2, 3]], marks=pytest.mark.proof)],
    ids=["one a node", "two a node"],
)
def test_flight_recorders_are_dumped_and_pulled(
    jobs: Jobs, shape: tuple[str, ...], limit: int, ranks: list[list[int]]
) -> None:
    jobs.write("train.py", RECORDER + "time.sleep(600)\n")
    done = jobs.submit(
        "train.py", *shape, "--stall-timeout", f"{limit}s", "--run-id", "r", "--pull", str(jobs.tmp / "out")
    )
    stalled(jobs, done)
    found = {path.name: path.read_bytes() for path in (jobs.tmp / "out/artifacts/flight-recorder/0.0").iterdir()}
    assert set(found) == {f"trace-rank-{rank}" for node in ranks for rank in node}
    assert all(name[-1:].encode() in data for name, data in found.items())
    lines = [line.text for line in jobs.run("r").logs() if "flight-recorder/0.0: " in line.text]
    assert sorted(text.rpartition(": ")[2] for text in lines) == [
        ", ".join(f"trace-rank-{rank}" for rank in node) for node in ranks
    ]


def test_a_dump_by_nccl_itself_is_kept_too(jobs: Jobs) -> None:
    """Check NCCL's own timeout, which has written its file when the rank fails."""
    jobs.write(
        "train.py",
        """
        import os
        with open(os.environ["TORCH_FR_DUMP_TEMP_FILE"] + os.environ["RANK"], "wb") as stream:
            stream.write(b"dump")
        raise RuntimeError("Watchdog caught collective operation timeout")
        """,
    )
    done = jobs.submit("train.py", "--pull", str(jobs.tmp / "out"))
    assert done.json["category"] == "user_error"
    assert (jobs.tmp / "out/artifacts/flight-recorder/0.0/trace-rank-0").read_bytes() == b"dump"


@pytest.mark.proof
def test_a_pipe_without_a_reader_blocks_nothing(jobs: Jobs) -> None:
    jobs.write(
        "train.py",
        """
        import os, pathlib, time
        os.mkfifo(os.environ["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] + "0.pipe")
        print("up", flush=True)
        pathlib.Path(os.environ["CLOUDTRAIN_ARTIFACT_DIR"], "silent-since").write_text(str(time.time()))
        time.sleep(600)
        """,
    )
    result = stalled(jobs, jobs.submit("train.py", "--stall-timeout", f"{SHORT}s", "--run-id", "r"))
    assert SHORT <= silent_seconds(jobs, "r") <= SHORT + FOUND_WITHIN
    assert not list(jobs.store.glob("runs/r/live/artifacts/*/flight-recorder"))
    assert f"rank 0 on node 0 is at train.py:{line_of(jobs, '600')} (<module>)" in result["reason"]
