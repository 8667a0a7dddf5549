"""The verbs shell and tensorboard, by the console script. A shell on each real platform: node_shells.py."""

from __future__ import annotations

import os
import pty
import shutil
import subprocess
from pathlib import Path

import pytest
from jobs import CLI, Jobs

pytestmark = pytest.mark.slow

HOLD = """
import os, time
with open(os.path.join(os.environ["CLOUDTRAIN_ARTIFACT_DIR"], "events.out.tfevents.1"), "w") as stream:
    stream.write("events")
print("holding", flush=True)
while not os.path.exists(os.environ["CLOUDTRAIN_PREEMPT_FILE"]):  # one that does not listen has half a minute
    time.sleep(0.1)
"""
BOARD = """#!/bin/sh
echo "board $@ of $(ls "$2")"
[ -z "$STAY" ] || exec sleep 100
"""


def test_a_terminal_reaches_the_node_and_its_end_the_caller(jobs: Jobs) -> None:
    jobs.write("hold.py", HOLD)
    run = jobs.detach("hold.py")
    jobs.printed(run, "holding")
    ours, theirs = pty.openpty()
    words = ["shell", run.run_id, "--store", str(jobs.store), "--", "sh", "-c", "tty; echo $RANK; exit 7"]
    done = subprocess.run(
        [*CLI, *words], cwd=jobs.code, env=jobs.environ, stdin=theirs, stdout=theirs, timeout=60, check=False
    )
    output = os.read(ours, 4096).decode().split()
    assert (done.returncode, output) == (7, [os.ttyname(theirs), "0"])
    done_too = jobs.cli("shell", run.run_id, "--store", str(jobs.store), "--", "no-such-program")
    assert (done_too.code, done_too.err) == (127, "cloudtrain: cannot run no-such-program: No such file or directory\n")
    run.cancel()
    run.wait(timeout=60)
    over = jobs.cli("shell", run.run_id, "--store", str(jobs.store))
    assert over.code == 2
    assert "run: the run is over (cancelled), and its nodes are gone" in over.err
    assert f"hint: its files stay: cloudtrain pull {run.run_id}" in over.err


def test_tensorboard_gets_the_artifacts_of_a_run_and_of_one_that_goes_on(jobs: Jobs, tmp_path: Path) -> None:
    jobs.write("hold.py", HOLD)
    run = jobs.detach("hold.py")
    jobs.printed(run, "holding")
    kept = jobs.store / "runs" / run.run_id / "live" / "artifacts"
    jobs.wait_for(lambda: [*kept.rglob("events.out.tfevents.1")])  # a node copies a new file after some seconds
    words = ["tensorboard", run.run_id, "--store", str(jobs.store), "--port", "7007"]
    none = jobs.cli(*words, PATH=str(tmp_path))
    assert (none.code, none.err) == (2, "error: there is no program tensorboard\nhint: pip install tensorboard\n")
    program = tmp_path / "bin" / "tensorboard"
    program.parent.mkdir()
    program.write_text(BOARD)
    program.chmod(0o755)
    path = f"{program.parent}:{os.environ['PATH']}"
    said = f"board --logdir {run.run_id}/artifacts --port 7007 of events.out.tfevents.1\n"
    live = jobs.start(*words, PATH=path, STAY="1")
    assert live.stdout is not None
    while (line := live.stdout.readline()) and not line.startswith("board"):
        pass
    assert line == said
    run.cancel()
    run.wait(timeout=60)
    live.terminate()
    assert live.wait(timeout=60) == 0
    assert "sleep 100" not in "".join(jobs.processes().values())
    after = jobs.cli(*words, PATH=path)
    assert (after.code, after.out.splitlines()[-1] + "\n") == (0, said), after.err
    assert "event files" not in after.err
    shutil.rmtree(kept)
    bare = jobs.cli(*words[:2], str(tmp_path / "bare"), *words[2:], PATH=path)
    assert "note: the run has no event files among its artifacts" in bare.err
    assert f"cloudtrain pull {run.run_id}" in bare.err
