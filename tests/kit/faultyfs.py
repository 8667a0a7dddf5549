"""A folder behind FUSE whose operations fail on demand: python faultyfs.py FOLDER PLACE, until its stdin ends.

The file FOLDER.faults holds the faults of now, as JSON: [operation, path, errno]. A path ends in * for all below it.
"""

from __future__ import annotations

import json
import sys
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import mfusepy
from slowfs import Slow, serve


class Faulty(Slow):
    """The folder ``root``, with its faults."""

    def __init__(self, root: str) -> None:
        super().__init__(root, seconds=0)
        self._faults = Path(f"{root}.faults")

    def _meet(self, operation: str, path: str) -> None:
        for fails, where, number in json.loads(self._faults.read_bytes()):
            if fails == operation and fnmatchcase(path, where):
                raise mfusepy.FuseOSError(number)

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        self._meet("getattr", path)
        return super().getattr(path, fh)

    def readdir(self, path: str, fh: int) -> list[str]:
        self._meet("readdir", path)
        return super().readdir(path, fh)

    def open(self, path: str, flags: int) -> int:
        self._meet("open", path)
        return super().open(path, flags)

    def create(self, path: str, mode: int) -> int:
        self._meet("create", path)
        return super().create(path, mode)

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        self._meet("read", path)
        return super().read(path, size, offset, fh)


if __name__ == "__main__":
    serve(Faulty(sys.argv[1]), sys.argv[2])
