"""Check a bundle's archive against the manifest's digest, and lay it out in a folder.

Only the manifest is trusted, and only after its sha256 matches the promised one. Standard library alone; ``tarfile``
only reads headers here, since its ``extract(filter=)`` is not in every 3.10 and 3.11.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import os
import posixpath
import re
import shutil
import struct
import tarfile
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from ..errors import DigestError, StorageError

__all__ = ["MANIFEST", "unpack"]

MANIFEST = ".cloudtrain-manifest.json"
_MANIFEST_MAX = 64 * 2**20
_CHUNK = 2**20
_LINKS_MAX = 40  # as Linux: a longer chain of links leads nowhere
_SHA256 = re.compile(r"[0-9a-f]{64}")
_MODES = ("0644", "0755")
# Errors of gzip and tarfile for bytes that are no tar.gz; the last ones were seen, though not documented.
_MALFORMED = (
    tarfile.TarError,
    gzip.BadGzipFile,
    zlib.error,
    EOFError,
    struct.error,
    ValueError,
    LookupError,
    OverflowError,
    RecursionError,
)


def unpack(archive: Path, target: Path, *, digest: str) -> None:
    """Lay ``archive``, a bundle's tar.gz, out as the new folder ``target``, whole or not at all.

    ``digest`` is the sha256 (hex) of the bundle's manifest. Raises `DigestError` for an archive that is not exactly
    that bundle, or one whose names or links lead out of ``target``. Raises `StorageError` when the archive cannot be
    read or ``target`` not made (no space, read-only, already there and not empty).
    """
    with _one_line(archive, target), gzip.open(archive, "rb") as content, _new_folder(target) as folder:
        bounded = _Bounded(content)
        _lay_out(bounded, folder, digest)
        bounded.finish()


@contextlib.contextmanager
def _one_line(archive: Path, target: Path) -> Iterator[None]:
    try:
        yield
    except DigestError as exc:
        raise DigestError(f"{archive}: {exc}") from None
    except _MALFORMED as exc:
        raise DigestError(f"{archive}: corrupted or cut short ({str(exc) or type(exc).__name__})") from None
    except OSError as exc:
        where = f" ({exc.filename})" if exc.filename else ""
        raise StorageError(f"cannot unpack {archive} into {target}: {exc.strerror or exc}{where}") from None


@contextlib.contextmanager
def _new_folder(target: Path) -> Iterator[str]:
    """Yield a folder beside ``target``. Rename it to ``target`` on success, else remove it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        os.chmod(folder, 0o755)
        yield folder
        os.replace(folder, target)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


class _Bounded:
    """A decompressed stream that yields no more bytes than allowed, so that no archive can swell."""

    def __init__(self, content: IO[bytes] | gzip.GzipFile) -> None:
        self._content = content
        self._left = _MANIFEST_MAX + 2**16

    def allow(self, size: int) -> None:
        """Expect ``size`` bytes from here on."""
        self._left = size

    def read(self, size: int) -> bytes:
        chunk = self._content.read(min(size, self._left + 1))
        self._left -= len(chunk)
        if self._left < 0:
            raise DigestError("holds more than its manifest lists")
        return chunk

    def finish(self) -> None:
        """Read to the end, where gzip keeps its checksum."""
        while self.read(_CHUNK):
            pass


def _lay_out(content: _Bounded, folder: str, digest: str) -> None:
    with tarfile.open(fileobj=content, mode="r|", bufsize=tarfile.RECORDSIZE) as tar:  # type: ignore[call-overload]
        rows = _manifest(tar, digest)
        # Each member: its padded content, its header, and the extended headers a long or unicode name needs.
        names = sum(len(path.encode()) + len(row.get("link", "").encode()) for path, row in rows.items())
        content.allow(sum(row["size"] for row in rows.values()) + 4096 * len(rows) + 2 * names + 2 * tarfile.RECORDSIZE)
        for name in sorted({parent for path in rows for parent in _parents(path)}):
            os.mkdir(os.path.join(folder, name))
            os.chmod(os.path.join(folder, name), 0o755)
        left = dict(rows)
        while (member := tar.next()) is not None:
            row = left.pop(member.name, None)
            if row is None:
                known = "twice" if member.name in rows else "but its manifest does not list it"
                raise DigestError(f"holds {member.name!r} {known}")
            _check_member(member, row)
            if "link" not in row:
                _write(tar, member, os.path.join(folder, member.name), row)
    if left:
        raise DigestError(f"lacks {min(left)!r}, which its manifest lists")
    for path, row in rows.items():  # after all files, so that none is written through a link
        if "link" in row:
            os.symlink(row["link"], os.path.join(folder, path))


def _manifest(tar: tarfile.TarFile, digest: str) -> dict[str, dict[str, Any]]:
    """Return the checked rows of the archive's first member, by path."""
    member = tar.next()
    if member is None or member.name != MANIFEST or member.type != tarfile.REGTYPE or member.size > _MANIFEST_MAX:
        raise DigestError(f"is no bundle: it does not start with {MANIFEST}")
    content = _content(tar, member).read(member.size)
    actual = hashlib.sha256(content).hexdigest()
    if actual != digest:
        raise DigestError(f"is not the code that was asked for: digest {actual}, not {digest}")
    listed, rows = json.loads(content), dict[str, dict[str, Any]]()
    for row in listed if isinstance(listed, list) else [listed]:
        _check_row(row)
        if rows.setdefault(row["path"], row) is not row:
            raise DigestError(f"its manifest lists {row['path']!r} twice")
    for path in rows:
        _check_place(path, rows)
    return rows


def _check_row(row: Any) -> None:
    if not isinstance(row, dict) or not isinstance(row.get("path"), str) or not isinstance(row.get("link", ""), str):
        raise DigestError("its manifest is malformed")
    path, size = row["path"], row.get("size")
    if any(part in ("", ".", "..") for part in path.split("/")) or "\0" in path:
        raise DigestError(f"its manifest lists {path!r}, which is not a name below a folder")
    if path == MANIFEST or not isinstance(size, int) or size < 0 or row.get("mode") not in _MODES:
        raise DigestError(f"its manifest is malformed at {path!r}")
    if not _SHA256.fullmatch(str(row.get("sha256"))) or ("link" in row and size):
        raise DigestError(f"its manifest is malformed at {path!r}")


def _check_place(path: str, rows: Mapping[str, Mapping[str, Any]]) -> None:
    for parent in _parents(path):
        if parent in rows:
            kind = "link" if "link" in rows[parent] else "file"
            raise DigestError(f"its manifest puts {path!r} inside the {kind} {parent!r}")
    link = rows[path].get("link")
    if link is not None and _leaves(posixpath.dirname(path), link, rows):
        raise DigestError(f"its link {path!r} leads out of the folder, to {link!r}")


def _parents(path: str) -> Iterator[str]:
    """Yield ``a`` and ``a/b`` for ``a/b/c``."""
    for i, char in enumerate(path):
        if char == "/":
            yield path[:i]


def _leaves(folder: str, link: str, rows: Mapping[str, Mapping[str, Any]]) -> bool:
    """Return whether ``link`` in ``folder``, with every further link on its way followed, leads out of the tree."""
    here = folder.split("/") if folder else []
    todo = link.split("/")[::-1]
    followed = 0
    if link.startswith("/") or not link or "\0" in link:
        return True
    while todo:
        part = todo.pop()
        if part == "..":
            if not here:
                return True
            here.pop()
        elif part not in ("", "."):
            further = rows.get("/".join((*here, part)), {}).get("link")
            if further is None:
                here.append(part)
            elif further.startswith("/"):
                return True
            elif (followed := followed + 1) > _LINKS_MAX:
                return False
            else:
                todo.extend(further.split("/")[::-1])
    return False


def _check_member(member: tarfile.TarInfo, row: Mapping[str, Any]) -> None:
    kind = tarfile.SYMTYPE if "link" in row else tarfile.REGTYPE
    same = member.type == kind and member.size == row["size"] and member.mode == int(row["mode"], 8)
    if not same or (kind == tarfile.SYMTYPE and member.linkname != row["link"]):
        raise DigestError(f"holds {member.name!r} with another type, size, mode or target than its manifest lists")
    if kind == tarfile.SYMTYPE and hashlib.sha256(member.linkname.encode()).hexdigest() != row["sha256"]:
        raise DigestError(f"holds other content in {member.name!r} than its manifest lists")


def _write(tar: tarfile.TarFile, member: tarfile.TarInfo, path: str, row: Mapping[str, Any]) -> None:
    content, actual, left = _content(tar, member), hashlib.sha256(), member.size
    with open(path, "xb") as file:
        while left:
            chunk = content.read(min(left, _CHUNK))
            if not chunk:
                raise DigestError(f"ends inside {member.name!r}")
            actual.update(chunk)
            file.write(chunk)
            left -= len(chunk)
    if actual.hexdigest() != row["sha256"]:
        raise DigestError(f"holds other content in {member.name!r} than its manifest lists")
    os.chmod(path, int(row["mode"], 8))


def _content(tar: tarfile.TarFile, member: tarfile.TarInfo) -> IO[bytes]:
    content = tar.extractfile(member)
    if content is None:
        raise DigestError(f"holds no content for {member.name!r}")
    return content
