"""Keep a test's stores in memory, and its settings where the test says."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ..settings import settings
from ..store.store import Store
from .memory import install

if TYPE_CHECKING:
    import pytest

__all__ = ["Places"]

DEFAULT = "memory://cloudtrain"
_VARIABLE = "CLOUDTRAIN_STORE"


class Places:
    """Stores in memory; ``url`` is the default one's. Made once a test: the stores are empty, and no file of settings
    is read until `read_settings`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self._folder: Path | None = None
        install(monkeypatch)
        self._read = settings._read_file
        monkeypatch.setattr(settings, "_read_file", lambda _: self._settings())
        self.use(DEFAULT)

    @property
    def url(self) -> str:
        """Return the URL of the store that runs use by default."""
        return settings.Settings.load().store

    def use(self, url: str) -> str:
        """Make the store at ``url`` the default one. The provider must read its scheme (``s3://bucket/prefix``)."""
        self._monkeypatch.setenv(_VARIABLE, url)
        return url

    def read_settings(self, path: str | Path) -> None:
        """Read the file of settings in the folder ``path``, or above it; its store too is in memory."""
        self._folder = Path(path).resolve()
        self._monkeypatch.delenv(_VARIABLE, raising=False)

    def _settings(self) -> settings._Read:
        return settings._Read() if self._folder is None else self._read(self._folder)

    def files(self, url: str | None = None) -> list[str]:
        """Return the sorted keys below ``url`` (default: the default store)."""
        return list(Store(url or self.url).files.list())

    def read(self, key: str, url: str | None = None) -> bytes:
        """Return the content of ``key`` below ``url`` (default: the default store). Raises FileNotFoundError."""
        return Store(url or self.url).files.read(key)

    def write(self, key: str, data: bytes | str, url: str | None = None) -> None:
        """Put ``data`` there, such as a job's input."""
        Store(url or self.url).files.write(key, data.encode() if isinstance(data, str) else data)
