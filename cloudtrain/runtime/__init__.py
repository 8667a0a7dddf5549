"""The side of cloudtrain that runs on a node, from ``cloudtrain.pyz``: the standard library alone, no torch import.

Training scripts may import this module: ``from cloudtrain import runtime``. Off the platform, under bare torchrun or
plain python, each function does what such a script would do anyway. `docs/runtime.md` shows them.
"""

from __future__ import annotations

import contextlib
import json
import math
import operator
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = [
    "Context", "accumulation_steps", "batch_size", "context", "log_metrics", "mark_best", "preempted", "resume_path",
    "saving",
]  # fmt: skip


def resume_path() -> Path | str | None:
    """Return the start of every rank: a path, or a URL below `Context.checkpoint_url`; None on a fresh start."""
    found = os.environ.get("CLOUDTRAIN_RESUME_FROM")
    return None if not found else found if "://" in found else Path(found)


def _inputs() -> dict[str, Path]:
    prefix = "CLOUDTRAIN_INPUT_"
    return {key[len(prefix) :].lower(): Path(path) for key, path in os.environ.items() if key.startswith(prefix)}


def _group() -> Any:
    """Return torch.distributed once it is initialised, without an import: a script without it must not pay."""
    dist = sys.modules.get("torch.distributed")
    return dist if dist is not None and dist.is_available() and dist.is_initialized() else None


def _rank() -> int:
    return int(os.environ.get("RANK", 0)) if (dist := _group()) is None else int(dist.get_rank())


def _world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", 1)) if (dist := _group()) is None else int(dist.get_world_size())


def _planned_world_size() -> int:
    """Return the planned number of processes, where the group may have several for each rank that torchrun counts."""
    here = int(os.environ.get("WORLD_SIZE", 1))
    return _world_size() * int(os.environ.get("CLOUDTRAIN_PLANNED_WORLD_SIZE") or here) // here


def _read(name: str, otherwise: Any = "", kind: Callable[[str], Any] = str) -> Callable[[], Any]:
    return lambda: kind(text) if (text := os.environ.get(name) or otherwise) else otherwise


@dataclass(frozen=True, kw_only=True)
class Context:
    """The run as this process sees it. Off the platform: no names, no inputs, and folders in the working folder.

    ``attempt`` is ``k.r``: cloudtrain's k-th start, the platform's r-th restart of it. Rank and world size are those of
    the process group once there is one. ``planned_world_size`` is larger in an attempt with fewer nodes. The channels
    of ``inputs`` are in lower case, with ``_`` for ``-``. Each is a folder, or a file if it is a single one. Below
    ``checkpoint_url`` a script may write to the store itself.
    """

    on_platform: bool = field(default_factory=_read("CLOUDTRAIN_RUN_ID", False, bool))
    run_id: str = field(default_factory=_read("CLOUDTRAIN_RUN_ID"))
    attempt: str = field(default_factory=_read("CLOUDTRAIN_ATTEMPT"))
    provider: str = field(default_factory=_read("CLOUDTRAIN_PROVIDER"))
    rank: int = field(default_factory=_rank)
    local_rank: int = field(default_factory=_read("LOCAL_RANK", 0, int))
    world_size: int = field(default_factory=_world_size)
    planned_world_size: int = field(default_factory=_planned_world_size)
    local_world_size: int = field(default_factory=_read("LOCAL_WORLD_SIZE", 1, int))
    node_rank: int = field(default_factory=_read("GROUP_RANK", 0, int))
    inputs: dict[str, Path] = field(default_factory=_inputs)
    checkpoint_dir: Path = field(default_factory=_read("CLOUDTRAIN_CHECKPOINT_DIR", "checkpoints", Path))
    artifact_dir: Path = field(default_factory=_read("CLOUDTRAIN_ARTIFACT_DIR", "artifacts", Path))
    metrics_file: Path | None = field(default_factory=_read("CLOUDTRAIN_METRICS_FILE", None, Path))
    resume_from: Path | str | None = field(default_factory=resume_path)
    checkpoint_url: str | None = field(default_factory=_read("CLOUDTRAIN_CHECKPOINT_URL", None))
    hyperparameters: dict[str, Any] = field(default_factory=_read("CLOUDTRAIN_HYPERPARAMETERS", "{}", json.loads))


def context() -> Context:
    """Return the `Context`, read from the environment at each call. Create the folders of checkpoints and artifacts."""
    found = Context()
    for folder in (found.checkpoint_dir, found.artifact_dir):
        with contextlib.suppress(OSError):  # a script that writes there gets the error
            folder.mkdir(parents=True, exist_ok=True)
    return found


def preempted(*, agree: bool = True) -> bool:
    """Return True once the run must stop: save a checkpoint, then exit 0. False off the platform.

    With torch.distributed initialised this is a collective, an all-reduce of one number. Every rank calls it at the
    same step and gets the same answer. A group of nccl alone waits for the device: if steps take milliseconds, call it
    at every tenth. ``agree=False`` looks on this rank only, without communication.
    """
    file = os.environ.get("CLOUDTRAIN_PREEMPT_FILE", "")
    return bool(file) and bool(_highest(os.path.exists(file)) if agree else os.path.exists(file))


def log_metrics(step: int, *, epoch: float = 0, **values: Any) -> None:
    """Append a row of metrics, flat JSON: ``step``, ``epoch``, ``time`` (Unix seconds) and ``values``.

    Rank 0 writes if a metrics file is named; other ranks do nothing. A value is a number, text, bool, None, or a tensor
    or array of one element, already reduced over the ranks. NaN and infinity, which JSON lacks, become null. Raises
    TypeError for any other value, ValueError for more elements or a value called ``time``.
    """
    if _rank() != 0:
        return
    if "time" in values:
        raise ValueError("log_metrics: time is that of the row itself; give the value another name")
    row = {"step": operator.index(step), "epoch": _scalar("epoch", epoch), "time": time.time()}
    line = json.dumps(row | {name: _scalar(name, value) for name, value in values.items()}, allow_nan=False)
    if file := os.environ.get("CLOUDTRAIN_METRICS_FILE"):
        with open(file, "a", encoding="utf-8") as stream:
            stream.write(line + "\n")


def _scalar(name: str, value: Any) -> str | float | None:
    if hasattr(value, "item"):
        if math.prod(getattr(value, "shape", ())) != 1:
            raise ValueError(f"log_metrics: {name} has the shape {tuple(value.shape)}; a row holds single numbers")
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is not None and not isinstance(value, (str, int, float)):
        raise TypeError(f"log_metrics: {name} is a {type(value).__name__}; a row holds numbers, text, bool and None")
    return value


@contextlib.contextmanager
def saving(name: str, *, every_rank: bool = False) -> Iterator[Path]:
    """Yield a hidden folder for the checkpoint ``name``. At the end the checkpoint appears whole or not at all.

    One rank saves alone (rank 0, or the first of each node). ``every_rank=True`` is a collective: all ranks enter,
    write their parts, and leave once the checkpoint is in place. It replaces one of that name. Raises ValueError for an
    invalid name, and for a further rank of a node that saves alone; RuntimeError for many ranks without a group.
    """
    import shutil  # it loads every kind of compression, and only this function needs it

    if not name or name != os.path.basename(name) or name.startswith(".") or name.endswith(".tmp"):
        raise ValueError(f"saving: {name!r} is no checkpoint: no slash, no dot in front, no .tmp at the end")
    if not every_rank and os.environ.get("LOCAL_RANK", "0") != "0":
        raise ValueError(f"saving: rank {_rank()} is not the first of its node; save there, or with every_rank=True")
    if every_rank and _group() is None and _world_size() > 1:
        raise RuntimeError("saving: every_rank=True needs an initialised process group")
    wait = _highest if every_rank else bool
    final, partial = (Context().checkpoint_dir / entry for entry in (name, f".{name}.tmp"))
    shutil.rmtree(_claim(partial), ignore_errors=True)  # left by a process that was killed
    wait(0)
    partial.mkdir(parents=True, exist_ok=True)
    try:
        yield partial
    except BaseException:
        if not every_rank:  # other ranks may still write there: their errors would hide this one
            shutil.rmtree(_claim(partial), ignore_errors=True)
        raise
    wait(0)
    if (whole := _claim(partial)).exists():
        before = _claim(final)
        whole.rename(final)
        shutil.rmtree(before, ignore_errors=True)
    wait(0)


def _claim(path: Path) -> Path:
    """Move ``path`` to a new hidden name and return that. It is missing if ``path`` was or another rank was faster."""
    mine = path.with_name(f".{path.name}.{os.urandom(4).hex()}.tmp")
    with contextlib.suppress(FileNotFoundError):
        path.rename(mine)
    return mine


def mark_best(name: str) -> None:
    """Write the checkpoint's name to the file ``best``, which keeps it. Rank 0 writes. ValueError if there is none."""
    folder = Context().checkpoint_dir
    if _rank() == 0:
        if (folder / name).parent != folder or not (folder / name).exists():
            raise ValueError(f"mark_best: no checkpoint {name!r} in {folder}")
        (folder / ".best.tmp").write_text(f"{name}\n", encoding="utf-8")
        os.replace(folder / ".best.tmp", folder / "best")


def batch_size(global_batch: int, *, accumulate: int = 1) -> int:
    """Return the samples of one forward pass of a rank, ``accumulate`` passes a step. ValueError for a remainder."""
    parts = _world_size() * accumulate
    if accumulate < 1 or global_batch < 1 or global_batch % parts:
        raise ValueError(f"a batch of {global_batch} does not split over {_world_size()} ranks x {accumulate} passes")
    return global_batch // parts


def accumulation_steps(planned: int = 1) -> int:
    """Return the passes of a step that keep the global batch: ``planned`` ones, or more in an attempt with fewer nodes.

    Each pass then has as many samples of a rank as planned. ValueError if the planned ranks are no multiple of these.
    """
    here, all_planned = _world_size(), _planned_world_size()
    if all_planned % here:
        raise ValueError(f"the steps of {all_planned} planned ranks do not split over {here}")
    return planned * all_planned // here


def _highest(value: int) -> int:
    """Return the highest ``value`` of any rank, on every rank; our own without a process group."""
    if (dist := _group()) is None:
        return int(value)
    torch, devices = sys.modules["torch"], str(dist.get_backend_config())  # such as cpu:gloo,cuda:nccl
    # Use the CPU if the group can: that does not wait for a device's queue.
    device = "cpu" if "cpu:" in devices else dist.group.WORLD.bound_device_id or devices.partition(":")[0]
    highest = torch.full((), int(value), dtype=torch.int32, device=device)
    dist.all_reduce(highest, op=dist.ReduceOp.MAX)
    return int(highest.item())
