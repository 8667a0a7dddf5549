"""Lay out a bundle's archive in a folder, checked against the manifest whose digest the plan has.

Only the manifest is trusted, and only after its sha256 matches the promised one: the client made it, and refused names
and links that lead out of the code. ``tarfile`` only reads headers here, as every member must be as its manifest says.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import os
import shutil
import struct
import tarfile
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..errors import DigestError, StorageError

MANIFEST = ".cloudtrain-manifest.json"
_MANIFEST_MAX = 64 * 2**20
_CHUNK = 2**20
# Errors of gzip and tarfile for bytes that are no tar.gz; the last ones were seen, though not documented.
_MALFORMED = (
    tarfile.TarError, gzip.BadGzipFile, zlib.error, EOFError, struct.error, ValueError, LookupError, OverflowError,
    RecursionError,
)  # fmt: skip


def unpack(archive: Path, target: Path, *, digest: str) -> None:
    """Lay ``archive``, a bundle's tar.gz, out as the new folder ``target``, whole or not at all.

    ``digest`` is the sha256 (hex) of the bundle's manifest. Raises `DigestError` for an archive that is not exactly
    that bundle. Raises `StorageError` when the archive cannot be read or ``target`` not made (no space, read-only,
    already there and not empty).
    """
    with _one_line(archive, target), gzip.open(archive, "rb") as content, _new_folder(target) as folder:
        with tarfile.open(fileobj=content, mode="r|", bufsize=tarfile.RECORDSIZE) as tar:
            _lay_out(tar, folder, digest)
        while content.read(_CHUNK):  # to the end, where gzip keeps its checksum
            pass


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


def _lay_out(tar: tarfile.TarFile, folder: str, digest: str) -> None:
    rows = _manifest(tar, digest)
    for path in rows:
        for parent in Path(path).parents[-2::-1]:
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder / parent)
                os.chmod(folder / parent, 0o755)
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
    """Return the rows of the archive's first member, by path, once its digest is the promised one."""
    member = tar.next()
    if member is None or member.name != MANIFEST or member.type != tarfile.REGTYPE or member.size > _MANIFEST_MAX:
        raise DigestError(f"is no bundle: it does not start with {MANIFEST}")
    stream = tar.extractfile(member)
    assert stream is not None, "a regular file"
    content = stream.read(member.size)
    actual = hashlib.sha256(content).hexdigest()
    if actual != digest:
        raise DigestError(f"is not the code that was asked for: digest {actual}, not {digest}")
    return {row["path"]: row for row in json.loads(content)}


def _check_member(member: tarfile.TarInfo, row: Mapping[str, Any]) -> None:
    kind = tarfile.SYMTYPE if "link" in row else tarfile.REGTYPE
    same = member.type == kind and member.size == row["size"] and member.mode == int(row["mode"], 8)
    if not same or (kind == tarfile.SYMTYPE and member.linkname != row["link"]):
        raise DigestError(f"holds {member.name!r} with another type, size, mode or target than its manifest lists")
    if kind == tarfile.SYMTYPE and hashlib.sha256(member.linkname.encode()).hexdigest() != row["sha256"]:
        raise DigestError(f"holds other content in {member.name!r} than its manifest lists")


def _write(tar: tarfile.TarFile, member: tarfile.TarInfo, path: str, row: Mapping[str, Any]) -> None:
    content, actual = tar.extractfile(member), hashlib.sha256()
    assert content is not None, "a regular file, by `_check_member`"
    with open(path, "xb") as file:
        while chunk := content.read(_CHUNK):  # raises `tarfile.ReadError` if the archive ends before the member
            actual.update(chunk)
            file.write(chunk)
    if actual.hexdigest() != row["sha256"]:
        raise DigestError(f"holds other content in {member.name!r} than its manifest lists")
    os.chmod(path, int(row["mode"], 8))
