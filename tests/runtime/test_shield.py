"""A rank on a platform that signals every process of a node: SIGTERM ends neither it nor a DataLoader's worker."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from cloudtrain.runtime import worker

SCRIPTS = {
    "a rank without a handler lives": """
        os.kill(os.getpid(), signal.SIGTERM)
        print("lived")
    """,
    "a handler of its own works": """
        signal.signal(signal.SIGTERM, lambda number, frame: print("told"))
        os.kill(os.getpid(), signal.SIGTERM)
        print("lived")
    """,
    "a program that it starts can be terminated": """
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        child.terminate()
        print(child.wait())
    """,
    "a child that it forks can be terminated": """
        child = os.fork()
        if not child:
            time.sleep(60)
        os.kill(child, signal.SIGTERM)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """,
    "a DataLoader's worker lives": """
        import torch
        loader = iter(torch.utils.data.DataLoader(range(4), batch_size=None, num_workers=1))
        next(loader)
        os.kill(loader._workers[0].pid, signal.SIGTERM)
        print(len(list(loader)), loader._workers[0].is_alive() or loader._workers[0].exitcode)
    """,
    "its end is shielded, too": """
        import atexit
        atexit.register(lambda: print(signal.getsignal(signal.SIGTERM) == signal.SIG_IGN))
        sys.exit(0)
    """,
}
PRINTED = ["lived", "told\nlived", "-15", "-15", "3 0", "True"]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "printed"), list(zip(SCRIPTS, PRINTED, strict=True)), ids=list(SCRIPTS))
def test_a_shielded_rank(tmp_path: Path, name: str, printed: str) -> None:
    script = tmp_path / "train.py"
    script.write_text("import os, signal, subprocess, sys, time\n" + textwrap.dedent(SCRIPTS[name]))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # as the runtime does
    try:
        process = subprocess.Popen(
            [sys.executable, "-u", str(worker.__file__), str(script)],
            env={**os.environ, "CLOUDTRAIN_WORKER": f"{tmp_path}\n{tmp_path}"},
            stdout=subprocess.PIPE,
            text=True,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    out, _ = process.communicate(timeout=60)
    assert (out.strip(), process.returncode) == (printed, 0)
