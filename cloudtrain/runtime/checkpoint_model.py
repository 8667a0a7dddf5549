"""Find a run's complete checkpoints in a list of its files, and the newest from which a training can resume. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..provider_api.node import attempt_key
from .checkpoint_names import METADATA, newer_than_metadata, step_of, training_states
from ..storage.files import Entry

__all__ = ["PROTOCOL", "Checkpoint", "age", "direct", "mirrored", "newest_checkpoint", "resumable"]

PROTOCOL = 1
"""Protocol of a store's records; records of other protocols are not read."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """One complete checkpoint. ``key`` is its folder in the store, ``files`` maps path to (bytes, SHA-256).

    ``step`` is read from ``name``, or None. ``saved`` (the script wrote it) and ``committed`` (it was complete in the
    store) are Unix seconds.
    """

    name: str
    key: str
    attempt: str
    seq: int
    step: int | None
    committed: float
    saved: float
    files: Mapping[str, tuple[int, str]]
    bytes: int


def mirrored(
    root: str, match: re.Match[str], commit: Mapping[str, Any] | None, sizes: Mapping[str, int]
) -> Checkpoint | None:
    """Return the checkpoint of one commit.json, or None if it is incomplete."""
    folder, name = match[0].rpartition("/")[0], match[1]
    try:
        if commit is None or commit["protocol"] != PROTOCOL:
            return None
        listed = {path: (int(item["size"]), str(item["sha256"])) for path, item in commit["files"].items()}
        committed, saved = float(commit["time"]), float(commit.get("saved") or commit["time"])
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
    if any(sizes.get(f"{folder}/{path}") != size for path, (size, _) in listed.items()):
        return None
    return Checkpoint(
        name=name,
        key=f"{root}/{folder}",
        attempt=match[2],
        seq=int(match[3]),
        step=step_of(name),
        committed=committed,
        saved=saved,
        files=listed,
        bytes=sum(size for size, _ in listed.values()),
    )


def newest_checkpoint(mirrored: Sequence[Checkpoint], direct: Sequence[Checkpoint]) -> Checkpoint | None:
    """Return the newest checkpoint to resume from, of those of `Store.checkpoints` and `Store.direct`."""
    found = [*resumable(mirrored)[-1:], *direct[-1:]]
    return max(found, key=lambda item: item.saved, default=None)


def resumable(found: Sequence[Checkpoint]) -> list[Checkpoint]:
    """Return the checkpoints from which a training can resume, in the same order."""
    # ``node-0/step-8/model.pt`` in ``step-8`` is ``model.pt``; "" for a checkpoint of one file
    below = {i.key: (i.name, [path.partition("/")[2][len(i.name) + 1 :] for path in i.files]) for i in found}
    chosen = training_states(below)
    return [item for item in found if item.key in chosen]


def direct(root: str, name: str, files: Mapping[str, Entry]) -> Checkpoint | None:
    """Return a checkpoint that a script wrote to the store itself, or None while the script may be writing it."""
    if newer_than_metadata({path: entry.modified for path, entry in files.items()}):
        return None
    written = files[METADATA].modified
    return Checkpoint(
        name=name,
        key=f"{root}/{name}",
        attempt="",
        seq=0,
        step=step_of(name),
        committed=written,
        saved=written,
        files={path: (entry.size, "") for path, entry in files.items()},
        bytes=sum(entry.size for entry in files.values()),
    )


def age(item: Checkpoint) -> tuple[tuple[int, ...], float, int, str]:
    """Return the sort key of checkpoints, oldest first."""
    return (attempt_key(item.attempt), item.saved, item.seq, item.name)
