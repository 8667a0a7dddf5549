"""Cache SHA-256 digests of local files between processes, keyed by stat.

A cached digest counts while size, times, inode and device are the same. The file must also have been read long after
its last change, or long after these times were first seen. Then no later change can have the same times. On a file
system whose times may miss a change, it never counts. In any doubt the file is read.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from ..errors import DigestError, SpecError, StorageError
from .files import parallel
from .local_disk import cache_home, disk_errors, put, scan, sha256_file, walk
from .timings import CLIENT_TIMINGS

KEPT = 64
"""Number of cached trees."""
_TELLING = frozenset({"bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "xfs", "zfs"})
"""Linux file systems whose times, kept by this machine, differ after each change."""
_VERSION = 1


def cache_folder(environ: Mapping[str, str], platform: str = sys.platform) -> Path:
    """Return the folder of cached digests."""
    return cache_home(environ, platform) / "digests"


class DigestCache:
    """A cache of digests of the files below ``root``, kept in ``folder``; ``clock`` gives Unix seconds."""

    def __init__(self, root: Path, *, folder: Path | None = None, clock: Callable[[], float] = time.time) -> None:
        self._root, self._clock = os.path.abspath(root), clock
        self._above = self._root.rstrip(os.sep) + os.sep
        name = hashlib.sha256(os.fsencode(self._root)).hexdigest()[:32]
        self._file = (cache_folder(os.environ) if folder is None else folder) / f"{name}.json"
        self._known: dict[str, Any] = self._read()
        self._used: set[str] = set()
        self._changed = False

    def find(self, path: str, status: os.stat_result) -> str | None:
        """Return the cached digest of a file with this status, or None if the file must be read."""
        key = self._key(path)
        self._used.add(key)
        known = self._known.get(key)
        if not isinstance(known, list) or not _tells(status.st_dev):
            return None
        try:
            seemed, digest, seen, read = known
            changed = max(seemed[1], seemed[2]) / 1e9
            if (
                seemed == stat_key(status)
                and len(digest) == 64
                and (read - changed >= CLIENT_TIMINGS.digest_settled or read - seen >= CLIENT_TIMINGS.digest_unchanged)
            ):
                return str(digest)
        except (TypeError, ValueError, IndexError):
            pass
        return None

    def of(self, path: str | Path, status: os.stat_result | None = None) -> str:
        """Return the digest of ``path``. Raises `StorageError` if unreadable, FileNotFoundError if missing."""
        text, path = os.fspath(path), Path(path)
        with disk_errors(path):
            status = status or os.stat(path)
        found = self.find(text, status)
        if found is not None:
            return found
        now = self._clock()
        digest = sha256_file(path)
        with disk_errors(path):
            if stat_key(status) == stat_key(os.stat(path)):
                self._take(self._key(text), stat_key(status), digest, now)
        return digest

    def forget(self, path: Path) -> None:
        """Drop the cached digest of ``path``."""
        self._changed |= self._known.pop(self._key(os.fspath(path)), None) is not None

    def keep(self) -> None:
        """Save the digests for the next process. If saving fails, the next process reads all files."""
        if not self._changed:
            with contextlib.suppress(OSError):
                os.utime(self._file)
            return
        if not self._file.parents[min(3, len(self._file.parents) - 1)].is_dir():
            return  # no home, no cache
        if len(self._known) > 2 * len(self._used) + 1000:  # drop deleted files
            self._known = {key: self._known[key] for key in self._used if key in self._known}
        text = json.dumps({"version": _VERSION, "root": self._root, "files": dict(self._known)}, separators=(",", ":"))
        with contextlib.suppress(OSError, StorageError):
            self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            put(self._file, text.encode(), name=False)
            self._changed = False
            self._make_room()

    def _take(self, key: str, seems: list[int], digest: str, now: float) -> None:
        known = self._known.get(key)
        seen = now
        if isinstance(known, list) and len(known) == 4 and known[0] == seems and isinstance(known[2], (int, float)):
            seen = min(now, known[2])
        self._known[key] = [seems, digest, seen, now]
        self._changed = True

    def _key(self, path: str) -> str:
        return path[len(self._above) :] if path.startswith(self._above) else path

    def _read(self) -> dict[str, Any]:
        try:
            data = json.loads(self._file.read_bytes())
            if data["version"] == _VERSION and data["root"] == self._root:
                return dict(data["files"])
        except (OSError, ValueError, KeyError, TypeError):
            pass
        return {}

    def _make_room(self) -> None:
        """Delete the trees that were saved longest ago. Another process may do the same."""
        files = []
        with os.scandir(self._file.parent) as items:
            for item in items:
                with contextlib.suppress(FileNotFoundError):
                    if item.is_file():
                        files.append((item.stat().st_mtime, item.path))
        for _, path in sorted(files)[:-KEPT]:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)


def _tells(device: int) -> bool:
    """Return whether file times on this device show each change. Windows times do not."""
    if os.name == "nt":
        return False
    return not sys.platform.startswith("linux") or _types().get(device) in _TELLING


@cache
def _types() -> dict[int, str]:
    """Return the types of the mounted file systems by device."""
    found: dict[int, str] = {}
    with contextlib.suppress(OSError, ValueError), open("/proc/self/mountinfo", encoding="utf-8") as lines:
        for row in map(str.split, lines):
            major, _, minor = row[2].partition(":")
            found[os.makedev(int(major), int(minor))] = row[row.index("-") + 1]
    return found


def stat_key(status: os.stat_result) -> list[int]:
    """Return stat values that change with a file's content, unless it changed twice within a tick of the clock."""
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_dev]


@dataclass(frozen=True, kw_only=True)
class TreeFile:
    """One file of a `LocalTree`: relative path, bytes, SHA-256, and the time of its last change when hashed.

    ``read`` is False if its digest came from the cache.
    """

    path: str
    size: int
    sha256: str
    mtime_ns: int = field(default=0, compare=False)
    read: bool = field(default=True, compare=False)


@dataclass(frozen=True, kw_only=True)
class LocalTree:
    """Local data to upload: files below ``path``. ``digest`` covers their relative paths, sizes and contents.

    ``known`` are the digests to save once the files are staged.
    """

    path: Path
    digest: str
    files: tuple[TreeFile, ...]
    known: DigestCache | None = field(default=None, repr=False, compare=False)

    @property
    def bytes(self) -> int:
        return sum(item.size for item in self.files)


def hash_tree(path: Path, where: str) -> LocalTree:
    """Return the tree at ``path``, a folder or a file. Raises `SpecError` with the field ``where``."""
    known = DigestCache(path)
    seen: dict[str, tuple[str, os.stat_result, str | None]] = {}
    try:
        for name, item in (walk if path.is_file() else scan)(path).items():
            file = os.fspath(item)
            status = os.stat(file)
            seen[name] = (file, status, known.find(file, status))
        unread = [name for name, (_, _, digest) in seen.items() if digest is None]
        read = dict(zip(unread, parallel(lambda name: known.of(*seen[name][:2]), unread), strict=True))
    except (StorageError, OSError) as exc:
        raise SpecError(f"{path}: {exc}" if isinstance(exc, OSError) else str(exc), field=where) from exc
    if not seen:
        raise SpecError(f"{path} holds no file", field=where)
    hashed = tuple(
        TreeFile(
            path=name,
            size=status.st_size,
            sha256=digest or read[name],
            mtime_ns=status.st_mtime_ns,
            read=digest is None,
        )
        for name, (_, status, digest) in seen.items()
    )
    root = path.parent if path.is_file() else path
    return LocalTree(path=root, digest=tree_digest(hashed), files=hashed, known=known)


def tree_digest(files: Sequence[TreeFile]) -> str:
    """Return the digest of a tree's paths, sizes and contents; ``files`` are sorted by path."""
    lines = json.dumps([[item.path, item.size, item.sha256] for item in files], separators=(",", ":"))
    return hashlib.sha256(lines.encode()).hexdigest()


def check_unchanged(path: Path, item: TreeFile, *, read: bool = False) -> None:
    """Raise `DigestError` if the file's size or time changed; with ``read``, also if its digest changed."""
    status = path.stat()
    same = (status.st_size, status.st_mtime_ns) == (item.size, item.mtime_ns)
    if not same or (read and sha256_file(path) != item.sha256):
        raise DigestError(f"{path} changed")
