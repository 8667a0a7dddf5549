"""Move checkpoints that a restart does not need out of ``live/``, which some platforms download whole at each start.

They lie in ``archive/checkpoints`` of the run's folder in the store, as they lay in ``live/checkpoints``. A copy of
each commit.json stands in ``live/archive``: a restarted node finds the archive without a look at the store. Only node 0
moves and removes archived checkpoints.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable
from pathlib import Path

from ..provider_api.node import RunObjects
from .checkpoint_model import Checkpoint
from .checkpoints import COMMIT, in_parallel, write_whole
from .mounts import names_in

LIVE, ARCHIVED, INDEX = "live/checkpoints", "archive/checkpoints", "live/archive"


class Archive:
    """The archive of the run whose folder ``live`` is here. A checkpoint's key is ``<name>/<attempt>-<seq>``."""

    def __init__(self, live: Path, objects: RunObjects, *, temporary: str) -> None:
        self._live, self._objects, self._temporary = live, objects, temporary

    def found(self) -> list[Checkpoint]:
        """Return the archived checkpoints that ``live/archive`` lists, oldest first. Raises `OSError`."""
        found, index = [], self._live / "archive"
        entries = (index / name / entry for name in names_in(index) for entry in names_in(index / name))
        for path in (entry for entry in entries if entry.suffix == ".json"):
            with contextlib.suppress(FileNotFoundError, ValueError):
                folder = self._live / "checkpoints" / path.parent.name / path.stem
                item = Checkpoint.of(json.loads(path.read_bytes()), str(folder), archived=True)
                if _files(item):
                    found.append(item)
        return sorted(found, key=lambda item: item.order)

    def add(self, key: str, item: Checkpoint) -> bool:
        """Copy a checkpoint that is complete in the store, then remove it from ``live/`` there. Return True.

        Its commit.json is copied last and removed first. The entry in ``live/archive`` is in the store before anything
        is removed. Raises `StorageError` and `OSError`.
        """
        text = json.dumps(item.commit, sort_keys=True).encode()
        in_parallel(lambda file: self._objects.copy(f"{LIVE}/{key}/{file[0]}", f"{ARCHIVED}/{key}/{file[0]}", file[1]),
             [(path, size) for path, (size, _) in item.files.items()])  # fmt: skip
        self._objects.write(f"{ARCHIVED}/{key}/{COMMIT}", text)
        self._objects.write(f"{INDEX}/{key}.json", text)
        write_whole(self._entry(key), text, temporary=self._temporary)
        with contextlib.suppress(Exception):  # the agent removes them too, after the nodes have removed theirs
            self._remove(f"{LIVE}/{key}", item)
        return True

    def drop(self, key: str, item: Checkpoint) -> None:
        """Remove a checkpoint from the archive, if it is there. Raises `StorageError`."""
        self._remove(f"{ARCHIVED}/{key}", item)
        self._objects.remove(f"{INDEX}/{key}.json")
        self._entry(key).unlink(missing_ok=True)

    def bring(self, key: str, target: Path) -> None:
        """Download an archived checkpoint to ``target``. Raises `DigestError` if it is not whole, `StorageError`,
        `OSError`, and `ValueError` for an entry that is malformed."""
        item = Checkpoint.of(json.loads(self._entry(key).read_bytes()), str(target))

        def read(path: str) -> None:
            (target / path).parent.mkdir(parents=True, exist_ok=True)
            self._objects.read(f"{ARCHIVED}/{key}/{path}", target / path)

        in_parallel(read, _files(item))
        (target / COMMIT).write_bytes(json.dumps(item.commit).encode())

    def _entry(self, key: str) -> Path:
        return self._live / "archive" / f"{key}.json"

    def _remove(self, folder: str, item: Checkpoint) -> None:
        self._objects.remove(f"{folder}/{COMMIT}")
        in_parallel(lambda path: self._objects.remove(f"{folder}/{path}"), _files(item))


def _files(item: Checkpoint) -> Iterable[str]:
    """Return the paths of a checkpoint's files. Raises `ValueError` for one that leads outside of it."""
    if any(".." in path.split("/") or path.startswith("/") for path in item.files):
        raise ValueError("a path outside the checkpoint")
    return item.files
