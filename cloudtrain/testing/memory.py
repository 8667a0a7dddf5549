"""Object stores in memory, for tests of a user's own code: one for each scheme that a store or an input may have.

They replace the real ones in fsspec's registry, so reads and writes at ``s3://…`` stay in memory. The rest of the
store's code is the real one.
"""

from __future__ import annotations

import io
import threading
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

__all__ = ["SCHEMES", "install"]

SCHEMES = ("memory", "s3", "s3a", "obs", "gs", "gcs", "abfs", "abfss", "az")


def install(monkeypatch: pytest.MonkeyPatch) -> dict[str, MutableMapping[str, Any]]:
    """Put an empty store in the place of each of `SCHEMES`, until the test is over. Return their contents by scheme."""
    from fsspec.registry import _registry

    from ..storage import remote

    monkeypatch.setattr(remote, "OBSTORE", frozenset())  # obstore would reach the real store
    held: dict[str, MutableMapping[str, Any]] = {}
    for scheme in SCHEMES:
        kind = _kind(scheme)
        held[scheme] = kind.store
        monkeypatch.setitem(_registry, scheme, kind)
    return held


def _kind(scheme: str) -> Any:
    """Return a new class. fsspec makes instances at will, so the class holds the contents."""
    from fsspec.implementations.memory import MemoryFileSystem

    class Bucket(MemoryFileSystem):  # type: ignore[misc]
        protocol = scheme
        store: dict[str, Any] = {}  # noqa: RUF012 - fsspec's own way
        pseudo_dirs = [""]  # noqa: RUF012
        cachable = False
        creating = threading.Lock()

        @classmethod
        def _strip_protocol(cls, path: Any) -> Any:
            """Return the path without the account in Azure's URLs: tests' stores never differ by that alone."""
            if isinstance(path, list):
                return [cls._strip_protocol(item) for item in path]
            bucket, slash, rest = str(path).removeprefix(f"{scheme}://").strip("/").partition("/")
            return f"/{bucket.partition('@')[0]}{slash}{rest}" if bucket else ""

        def _open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
            """Return a reader with its own position: several may read at once."""
            found = super()._open(path, mode=mode, **kwargs)
            return io.BytesIO(found.getvalue()) if mode == "rb" else found

        def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
            """Create the file; of several concurrent creations one succeeds."""
            with self.creating:
                super().pipe_file(path, value, mode=mode, **kwargs)

    return Bucket
