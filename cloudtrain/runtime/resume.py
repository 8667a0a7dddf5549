"""What a run starts from: complete checkpoints, best first, and putting one where the script finds it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ..errors import CloudtrainError
from . import checkpoints
from .checkpoints import Complete
from .workspace import Workspace

__all__ = ["Resume"]

RUN_FOLDER = "/live/checkpoints"
"""How the URL of another run's checkpoints ends; any other folder is the user's own."""


class Resume:
    """Of one node. ``live`` is this run's own folder; ``given`` is where ``resume_from``, a ``url``, appears here."""

    def __init__(self, *, live: Path, given: str | None, url: str | None, say: Callable[[str], None]) -> None:
        self._own, self._given = live / "checkpoints", Path(given).absolute() if given and url else None
        self._of_run = bool(url) and str(url).endswith(RUN_FOLDER)
        self._say = say

    def candidates(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Name and message for every node, best first: this run's own, then what was given."""
        for root in ("own", "given"):
            folder = self._root(root)
            for found in reversed(checkpoints.complete(folder, say=self._say) if folder else []):
                place = found.folder.relative_to(folder).as_posix() if folder else ""
                yield found.name, {"t": "restore", "root": root, "folder": place}

    def _root(self, root: str) -> Path | None:
        return self._own if root == "own" else self._given

    def restore(self, message: Mapping[str, Any], space: Workspace) -> str:
        """Why the checkpoint of ``message`` could not be put in place here; empty when it was."""
        try:
            folder = (self._root(message["root"]) or self._own) / message["folder"]
            commit = json.loads((folder / checkpoints.COMMIT).read_bytes())
            checkpoint = Complete(name=str(commit["name"]), folder=folder, commit=commit)
            target = space.watch().place(checkpoint.name, commit["place"])
            checkpoints.restore(checkpoint, target, node=space.node)
        except (OSError, ValueError, KeyError, TypeError, CloudtrainError) as exc:
            return str(exc) or type(exc).__name__
        return ""

    def fallback(self, tried: int) -> tuple[str, str]:
        """(folder, why not): what to start from when no checkpoint could be restored, after ``tried`` of them.

        A folder of the user's own is used as it is. A run that was named, but has nothing complete, is a mistake.
        """
        if self._given is None:
            return "", ""
        if self._of_run or tried:
            return "", "resume_from: nothing complete and undamaged to resume from"
        if not os.path.exists(self._given):
            return "", f"resume_from: nothing at {self._given}"
        return str(self._given), ""
