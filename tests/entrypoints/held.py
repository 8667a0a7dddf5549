"""A task of the entry points, ``--of digits`` or ``--of gpt``; with ``--hold``, one that waits at its first checkpoint.

The first start of a run then reads no more samples after its first checkpoint, for so many seconds or until the stop
notice. So a fault always strikes at that step, however slow the machine is. Samples and their order stay the same.
"""

import argparse
import importlib
import os
import sys
import time
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

_flags = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
_flags.add_argument("--of", choices=["digits", "gpt"], default="digits")
sys.path.insert(0, str(Path(__file__).parent / "tasks"))
_task = importlib.import_module(_flags.parse_known_args()[0].of)
build_model, compute_loss, count = _task.build_model, _task.compute_loss, _task.count
globals().update({name: getattr(_task, name) for name in ("UNIT", "blocks", "flops_per_item") if hasattr(_task, name)})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the task's own flags, and ``--of`` and ``--hold``."""
    _task.add_arguments(parser)
    parser.add_argument("--of", choices=["digits", "gpt"], default="digits", help="the task")
    parser.add_argument("--hold", type=float, default=0.0, help="seconds that the first start waits at its checkpoint")


class Held(Dataset[Any]):
    """The task's samples. Reading one waits while the run holds at its checkpoint."""

    def __init__(self, data: Any, seconds: float) -> None:
        self.seconds, self.since = seconds, 0.0
        self.data, self.saved = data, Path(os.environ.get("CLOUDTRAIN_CHECKPOINT_DIR") or "checkpoints")
        self.notice = os.environ.get("CLOUDTRAIN_PREEMPT_FILE", "")

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        while any(self.saved.glob("step-*")) and not os.path.exists(self.notice):
            self.since = self.since or time.monotonic()
            if time.monotonic() - self.since > self.seconds:
                break
            time.sleep(0.05)
        return self.data[index]


def build_datasets(args: argparse.Namespace) -> tuple[Any, Any, Any]:
    """Return the task's data. The training data waits if the run must hold."""
    train, validation, test = _task.build_datasets(args)
    waits = args.hold > 0 and os.environ.get("CLOUDTRAIN_ATTEMPT", "0.0") == "0.0"
    return (Held(train, args.hold) if waits else train), validation, test
