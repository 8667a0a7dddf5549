"""Run a command on a node that trains, as a rank of it would: with the rank's environment, in the rank's folder.

``cloudtrain.pyz shell --run-id ID --node N [--scratch DIR] -- COMMAND…``. Without a command, it opens a shell.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

_PROC = Path("/proc")
NOT_FOUND = 127  # exit code for a command that the node does not have, as a shell's


def run_command(argv: list[str]) -> int:
    """Become the command of ``argv``. Return an exit code only if the node does not have it."""
    parser = argparse.ArgumentParser(prog="cloudtrain.pyz shell", allow_abbrev=False)
    parser.add_argument("--run-id", required=True)
    parser.add_argument("--node", required=True)
    parser.add_argument("--scratch", default="")
    parser.add_argument("command", nargs="*")
    options = parser.parse_args(argv)
    env, folder = dict(os.environ), ""
    found = min(_ranks(options.run_id, options.node, options.scratch), default=None)
    if found is None:
        sys.stderr.write("cloudtrain: no rank runs on this node now, so this is the node's own environment\n")
    else:
        _, pid, env = found
        env.pop("CLOUDTRAIN_WORKER", None)  # the pipes of that rank
        with contextlib.suppress(OSError):
            folder = os.readlink(_PROC / str(pid) / "cwd")
        env["TERM"] = os.environ.get("TERM", "dumb")
    command = options.command or [shutil.which("bash") or "/bin/sh"]
    try:
        os.chdir(folder or ".")
        os.execvpe(command[0], command, env)
    except OSError as exc:
        sys.stderr.write(f"cloudtrain: cannot run {command[0]}: {exc.strerror}\n")
    return NOT_FOUND


def _ranks(run_id: str, node: str, scratch: str) -> Iterator[tuple[int, int, dict[str, str]]]:
    """Yield local rank, pid and environment of the processes of a node's ranks, by /proc.

    The folder of checkpoints lies in the node's scratch.
    """
    for place in _PROC.glob("[0-9]*"):
        try:
            pairs = (place / "environ").read_bytes().decode(errors="surrogateescape").split("\0")
        except OSError:  # of another user, or over
            continue
        env = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
        ours = env.get("CLOUDTRAIN_RUN_ID") == run_id and env.get("GROUP_RANK") == node
        if ours and env.get("CLOUDTRAIN_CHECKPOINT_DIR", "").startswith(scratch):
            yield int(env.get("LOCAL_RANK", 0)), int(place.name), env
