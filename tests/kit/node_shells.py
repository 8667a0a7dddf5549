"""A shell on the nodes of a real platform, entered by the command that the CLI would execute."""

from __future__ import annotations

import os
import subprocess

import pytest

from cloudtrain.errors import SpecError
from cloudtrain.runs.run import Run
from cloudtrain.testing.platform import FakePlatform
from cloudtrain.testing.tables import CASES

LOOK = 'echo "$RANK of $CLOUDTRAIN_RUN_ID by $WHO"; test -e train.py; cat; exit 3'


def check_shell(world: FakePlatform) -> None:
    """Enter both nodes of a running job. Check the rank's environment, its folder, standard input and the exit code."""
    case = CASES["cancelled"]
    more = {"instance_count": 2, "launcher": "python", "env": {"PROBE": case.probe, "WHO": "a b"}}
    run = world.send(world.plan(case.job, more, run_id="shell"))
    try:
        world.await_line(run, "holding")
        for node in (0, 1):
            done = enter(run, node, ["sh", "-c", LOOK], b"typed")
            assert (done.returncode, done.stdout.decode()) == (3, f"{node} of shell by a b\ntyped"), done.stderr
        # Without a command it is a shell that reads commands from standard input.
        assert enter(run, 1, [], b'echo "rank $RANK"; exit 4\n').stdout == b"rank 1\n"
        with pytest.raises(SpecError, match="no node 2; nodes are 0 to 1"):
            run.shell(2)
    finally:
        run.cancel()
        run.wait(timeout=120, poll=0.2)
    with pytest.raises(SpecError, match=r"the run is over \(cancelled\)"):
        run.shell()


def enter(run: Run, node: int, command: list[str], text: bytes) -> subprocess.CompletedProcess[bytes]:
    way = run.shell(node, command)
    env = {**os.environ, **way.env}
    return subprocess.run(list(way.argv), input=text, capture_output=True, env=env, timeout=120, check=False)
