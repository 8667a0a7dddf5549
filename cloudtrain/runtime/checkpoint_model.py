"""A complete checkpoint, and the rules of both halves: which are complete, which is newest, which come back. Pure.

A node finds them in ``live/``, the client in a list of the store's files.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..provider_api.node import PROTOCOL, attempt_key
from .checkpoint_names import family, is_beside, is_random, last_part, step_of, training_states, unversioned

_NODE = re.compile(r"node-\d+/")
_RANK = re.compile(r"rank[-_.]?0*[01](?!\d)", re.IGNORECASE)
"""Ranks that have a file if each rank has one. Another number alone is a size: ``lora_rank16``."""
METADATA = ".metadata"  # file that ``torch.distributed.checkpoint`` writes last


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """One complete checkpoint. ``key`` is its folder: in the store, or on the node.

    ``files`` maps each path to (bytes, SHA-256). ``place`` is its path below the script's working folder, else None.
    ``saved`` (the script wrote it) and ``committed`` (it was complete in the store) are Unix seconds. ``commit`` is its
    commit.json. A script that writes to the store itself leaves none, and no digests.
    """

    name: str
    key: str
    attempt: str = ""
    seq: int = 0
    committed: float
    saved: float
    files: Mapping[str, tuple[int, str]] = field(hash=False)
    place: str | None = None
    archived: bool = False
    commit: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(cls, commit: Any, key: str, *, archived: bool = False) -> Checkpoint:
        """Return the checkpoint in the folder ``key`` by its commit.json. Raises `ValueError` for a malformed one."""
        try:
            if commit["protocol"] != PROTOCOL:
                raise ValueError(f"protocol {commit['protocol']!r}")
            return cls(
                name=str(commit["name"]),
                key=key,
                attempt=str(commit["attempt"]),
                seq=int(commit["seq"]),
                committed=float(commit["time"]),
                saved=float(commit.get("saved") or commit["time"]),
                files={path: (int(item["size"]), str(item["sha256"])) for path, item in commit["files"].items()},
                place=commit.get("place"),
                archived=archived,
                commit=commit,
            )
        except (KeyError, TypeError, AttributeError) as exc:
            raise ValueError(f"{type(exc).__name__}: {exc}") from None

    @property
    def folder(self) -> Path:
        """Return its folder on a node."""
        return Path(self.key)

    @property
    def step(self) -> int | None:
        """Return the step in its name, if there is one."""
        return step_of(self.name)

    @property
    def bytes(self) -> int:
        return sum(size for size, _ in self.files.values())

    @property
    def order(self) -> tuple[tuple[int, ...], float, int, int, str]:
        """Return a key that sorts oldest to newest: by attempt, then the script's time of writing, then seq.

        Of those that a script wrote to the store itself at one moment, the one with the highest step is the newest.
        """
        step = self.step
        return attempt_key(self.attempt), self.saved, self.seq, -1 if step is None else step, self.name

    @property
    def below(self) -> list[str]:
        """Return the paths below the entry: ``model.pt`` for ``node-0/step-8/model.pt``; "" for one of one file."""
        return [path.partition("/")[2][len(self.name) + 1 :] for path in self.files]

    @property
    def writers(self) -> set[str]:
        """Return the folders of the nodes that held a part of the state. Random numbers and logs are no part of it."""
        return {path.partition("/")[0] for path in self.files if not (is_random(path) or is_beside(path))}

    @property
    def ranks_own(self) -> str:
        """Return a file that only the rank that wrote it can restore, so another number of nodes cannot; "" for none.

        Its path has the rank 0 or 1, or it is not on node 0. ``torch.distributed.checkpoint`` reshards the files beside
        its `METADATA`. States of random numbers count for nothing, and neither do logs and settings.
        """
        paths = [_NODE.sub("", path) for path in self.files]
        first = {path.removeprefix("node-0/") for path in self.files if path.startswith("node-0/")}
        resharded = {path.rpartition("/")[0] for path in paths if path.rpartition("/")[2] == METADATA}
        for path in paths:
            missing = bool(first) and path not in first and path.rpartition("/")[0] not in resharded
            if (missing or _RANK.search(path)) and not is_random(path) and not is_beside(path):
                return path
        return ""

    def node_counts(self, wanted: tuple[int, ...]) -> tuple[tuple[int, ...], str]:
        """Return those of ``wanted`` (the most first) that can restore it, and why no others can; "" if all can.

        The ``nodes`` of a commit are those that held a part, ``run_nodes`` all of the attempt. Commits of earlier
        versions, and files without a commit, do not say how many those were. Then only the most nodes may try.
        """
        file, nodes = self.ranks_own, int(self.commit.get("run_nodes") or 0)
        if not file:
            return wanted, ""
        why = f"checkpoint {self.name} has files of single ranks ({file}), "
        if not nodes:
            return wanted[:1], f"{why}and does not say how many nodes wrote it, so it needs {wanted[0]} nodes"
        return tuple(n for n in wanted if n == nodes), f"{why}so it needs {nodes} nodes again"

    def missing(self, size_of: Callable[[str], int | None]) -> str | None:
        """Return the first file that is not there with its size; None if the checkpoint is complete."""
        return next((path for path, (size, _) in self.files.items() if size_of(path) != size), None)


def written_directly(root: str, name: str, files: Mapping[str, tuple[int, float]]) -> Checkpoint | str | None:
    """Return a checkpoint that a script wrote to the store itself; ``files`` maps each path to bytes and time.

    Return None for another folder. While a checkpoint is overwritten, its old `METADATA` stays until the new one comes:
    return the file that is newer then.
    """
    if METADATA not in files:
        return None
    newest, written = max(files, key=lambda path: files[path][1]), files[METADATA][1]
    if files[newest][1] > written:
        return newest
    sizes = {path: (size, "") for path, (size, _) in files.items()}
    return Checkpoint(name=name, key=f"{root}/{name}", committed=written, saved=written, files=sizes)


def newest_checkpoint(mirrored: Sequence[Checkpoint], direct: Sequence[Checkpoint]) -> Checkpoint | None:
    """Return the newest one to resume from; both are oldest first. Scripts wrote the ``direct`` ones to the store."""
    found = [*resumable(mirrored)[-1:], *direct[-1:]]
    return max(found, key=lambda item: item.saved, default=None)


def resumable(found: Sequence[Checkpoint]) -> list[Checkpoint]:
    """Return those to resume from, in the same order: without what a script writes beside its training states, and
    without a part: fewer nodes wrote it than another checkpoint of its `family`, in an attempt of as many nodes, and it
    has no other kind of file. So the whole model that node 0 writes between sharded ones counts."""
    names = {item.key: last_part(item.place or item.name) for item in found}  # exp1/final has no number
    if not any(re.search(r"\d", name) for name in names.values()):
        names = {item.key: item.name for item in found}  # epoch-8/state has one
    chosen = training_states({item.key: (names[item.key], item.below) for item in found})
    kinds = {item.key: (family(item.name), item.commit.get("run_nodes")) for item in found}
    files = {item.key: {family(path) for path in item.below if not is_beside(path)} for item in found}
    most = {kinds[item.key]: item for item in sorted(found, key=lambda item: len(item.writers))}

    def is_part(item: Checkpoint) -> bool:
        other = most[kinds[item.key]]
        return len(item.writers) < len(other.writers) and files[item.key] <= files[other.key]

    return [item for item in found if item.key in chosen and not is_part(item)]


def companions(
    item: Checkpoint, found: Sequence[Checkpoint], states: Sequence[Checkpoint], named: Set[str]
) -> list[Checkpoint]:
    """Return the checkpoints that come back beside ``item``, newest first: pointers' targets (``named``), other states.

    ``found`` and ``states``, its `resumable` ones, are oldest first. Among versions of a state without a number in its
    name, the newest comes back: a script looks for its ``last.ckpt``.
    """
    by_name = {other.name: other for other in found}  # the newest of each
    newest = {unversioned(other.name): other.name for other in states}
    newest.pop(unversioned(item.name), None)
    wanted = named | {name for kind, name in newest.items() if not re.search(r"\d", kind)}
    also = [by_name[name] for name in wanted & by_name.keys() - {item.name}]
    return sorted(also, key=lambda other: other.order, reverse=True)
