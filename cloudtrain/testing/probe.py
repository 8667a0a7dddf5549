"""Script that the contract suite submits: it writes its view as an artifact, then does what ``PROBE`` names.

It runs on the node, on its own: the standard library, and torch only for ``gloo``. ``PROBE`` holds words with commas.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HOLD_SECONDS = 90.0
LINES = 20
SECRET = "CONTRACT_SECRET"
SHOWN = re.compile(r"(CLOUDTRAIN|CONTRACT|PET|TORCHELASTIC|OMP|MASTER|NCCL|TORCH)_|(LOCAL_|GROUP_)?(RANK|WORLD_SIZE)$")
"""Variables that are recorded; the others are outside the contract, and may be secrets."""


def tree(path: str) -> dict[str, str]:
    """Return the text of every file below ``path``, by relative name; a file's own under its name."""
    root = Path(path)
    if root.is_file():
        return {root.name: root.read_text()}
    return {p.relative_to(root).as_posix(): p.read_text() for p in sorted(root.rglob("*")) if p.is_file()}


def sight(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return everything of the script contract, as this rank sees it. A secret is only its digest."""
    words = {}
    for name in ("contract_dependency", "contract_wheel"):
        try:
            words[name] = importlib.import_module(name).WORD
        except ImportError:
            words[name] = None
    prefix = "CLOUDTRAIN_INPUT_"
    return {
        "rank": int(environ["RANK"]),
        "argv": sys.argv,
        "env": {key: value for key, value in environ.items() if SHOWN.match(key) and key != SECRET},
        "secret": hashlib.sha256(environ.get(SECRET, "").encode()).hexdigest(),
        "cwd": os.getcwd(),
        "path": sys.path,
        "files": sorted(p.relative_to(".").as_posix() for p in Path(".").rglob("*")),
        "words": words,
        "inputs": {k.removeprefix(prefix): tree(v) for k, v in environ.items() if k.startswith(prefix)},
        "resume": tree(environ["CLOUDTRAIN_RESUME_FROM"]) if environ["CLOUDTRAIN_RESUME_FROM"] else {},
        "has_torch": "torch" in sys.modules,
    }


def all_reduce(rank: int) -> float:
    """Return the sum of rank + 1 over all ranks."""
    import torch
    import torch.distributed

    torch.distributed.init_process_group("gloo")
    total = torch.tensor([rank + 1.0])
    torch.distributed.all_reduce(total)
    torch.distributed.destroy_process_group()
    return float(total.item())


def checkpoint(environ: Mapping[str, str]) -> None:
    """Write a checkpoint with a shard of each node."""
    if environ["LOCAL_RANK"] == "0":
        node = int(environ["RANK"]) // int(environ["LOCAL_WORLD_SIZE"])
        shard = Path(environ["CLOUDTRAIN_CHECKPOINT_DIR"], "step-3", f"shard-{node}.txt")
        shard.parent.mkdir(exist_ok=True)
        shard.write_text(f"shard {node}")


def own_checkpoint() -> None:
    """Write three checkpoints in the script's own folder, each newer than the one before."""
    for step in (5, 6, 7):
        weights = Path(f"out/ckpt-{step}/weights.txt")
        weights.parent.mkdir(parents=True, exist_ok=True)
        weights.write_text(f"weights {step}")
        time.sleep(0.1)


def outputs() -> None:
    """Write a small and a large file in the working folder, and one in a new folder below it."""
    Path("made").mkdir(exist_ok=True)
    Path("made/small.txt").write_text("small")
    Path("made/large.txt").write_text("large" * 1000)
    Path("small.txt").write_text("small")


def metrics(environ: Mapping[str, str], steps: range) -> None:
    """Write a row for each step, from rank 0."""
    if environ["RANK"] == "0":
        with open(environ["CLOUDTRAIN_METRICS_FILE"], "a") as stream:
            for step in steps:
                row = {"step": step, "epoch": 0, "time": time.time(), "loss": 1.0}
                stream.write(json.dumps({**row, "attempt": environ["CLOUDTRAIN_ATTEMPT"]}) + "\n")


def hold(environ: Mapping[str, str]) -> None:
    """Wait until the platform announces the stop of this node."""
    say("holding")
    end = time.monotonic() + HOLD_SECONDS
    while time.monotonic() < end:
        if os.path.exists(environ["CLOUDTRAIN_PREEMPT_FILE"]):
            say("got the notice")
            sys.exit(0)
        time.sleep(0.05)
    sys.exit("the probe got no notice")


def say(text: str) -> None:
    """Print one line of this rank."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main(environ: Mapping[str, str]) -> None:
    """Record this rank's view, then do what ``PROBE`` names."""
    words = environ.get("PROBE", "").split(",")
    seen = sight(environ)
    rank, world = seen["rank"], int(environ["WORLD_SIZE"])
    for number in range(LINES):
        say(f"probe {rank} line {number}")
    secret = environ.get(SECRET, "")
    if secret:  # a script should not do this, and cloudtrain must mask it
        say(f"secret {secret} {secret!r} https://user:{secret}@example.org/")
    if "gloo" in words:
        seen["sum"] = all_reduce(rank)
    artifacts = Path(environ["CLOUDTRAIN_ARTIFACT_DIR"])
    (artifacts / f"rank-{rank}.json").write_text(json.dumps(seen))
    if "checkpoint" in words:
        checkpoint(environ)
    if "own-checkpoint" in words:
        own_checkpoint()
    if "outputs" in words:
        outputs()
    resumed = bool(environ["CLOUDTRAIN_RESUME_FROM"])
    if "metrics" in words:
        metrics(environ, range(2, 5) if resumed else range(3))
    if "memory" in words:
        raise MemoryError("the probe wants more than there is")
    if "fail-first" in words and environ["CLOUDTRAIN_ATTEMPT"].startswith("0."):
        raise RuntimeError("the first attempt fails")
    if "fail-last" in words:
        if rank == world - 1:
            raise ValueError("the last rank fails", secret)
        time.sleep(HOLD_SECONDS)
    if "silent" in words:
        time.sleep(HOLD_SECONDS)
    if "hold" in words or ("hold-once" in words and not resumed):
        hold(environ)


if __name__ == "__main__":
    main(os.environ)
