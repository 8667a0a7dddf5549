"""The time of change of a store's files, by which all clients judge the age of a record."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from cloudtrain.storage.files import Files, Loaded, LocalFiles
from cloudtrain.storage.local_disk import local_path
from cloudtrain.storage.remote import RemoteFiles


class DatedFiles(LocalFiles):
    """A local folder whose files get their times from ``clock`` (Unix seconds)."""

    def __init__(self, root: Path, clock: Callable[[], float]) -> None:
        super().__init__(root=root)
        self._clock = clock

    def write(self, key: str, data: bytes) -> None:
        super().write(key, data)
        os.utime(self._path(key), (self._clock(),) * 2)

    def create(self, key: str, data: bytes, *, private: bool = False) -> bool:
        created = super().create(key, data, private=private)
        if created:
            os.utime(self._path(key), (self._clock(),) * 2)
        return created


class TimelessFiles(LocalFiles):
    """A local folder as a store without times of change."""

    def load(self, key: str) -> Loaded | None:
        found = super().load(key)
        return found and found._replace(modified=0.0)


def date_back(files: Files, key: str, seconds: float, patch: pytest.MonkeyPatch | None = None) -> None:
    """Let the file at ``key`` be so many seconds older. A remote store needs ``patch``: its times cannot be set."""
    folder = local_path(files.url)
    if folder is not None:
        then = os.stat(folder / key).st_mtime - seconds
        os.utime(folder / key, (then, then))
        return
    assert patch is not None
    load = RemoteFiles.load

    def older(self: RemoteFiles, name: str) -> Loaded | None:
        found = load(self, name)
        is_it = found is not None and (self.url, name) == (files.url, key)
        return found._replace(modified=found.modified - seconds) if found and is_it else found

    patch.setattr(RemoteFiles, "load", older)
