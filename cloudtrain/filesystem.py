"""Bytes of a store through fsspec: any URL that it reaches. The contract, and what everything falls back on."""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .credential import Credential
from .disk import parts_of
from .errors import AuthError, SpecError, StorageError
from .faults import Retries
from .transfer import MOST_PIECES, PIECE, Entry, Moving, Names
from .values import unix_seconds, url_scheme

__all__ = ["FsspecMover"]

SMALL = 4 << 20
"""Bytes of a file that is taken to come in one answer; a larger one may come in ranges of whatever is there."""
_PATTERN = re.compile(r"[*?\[]")
_VERSION_FIELDS = (
    "ETag", "etag", "md5Hash", "content_md5", "generation", "VersionId", "LastModified", "last_modified", "updated",
    "mtime", "created", "blob_id", "Last-Modified", "modify",
)  # fmt: skip


class FsspecMover:
    """A `Mover` of the file system ``fs``, below its path ``root``."""

    name = "fsspec"

    def __init__(self, *, url: str, fs: Any, root: str, retries: Retries) -> None:
        self.url, self.fs, self.root, self.retries = url, fs, root, retries

    @classmethod
    def open(cls, url: str, options: Mapping[str, Any], *, moving: Moving, retries: Retries) -> FsspecMover:
        """The file system of ``url``. `SpecError` when its package is not installed."""
        fs, root = _open(url, {**_plain(options), **_encryption(url, options, moving)})
        return cls(url=url, fs=fs, root=root, retries=retries)

    def at(self, key: str) -> str:
        """The file system's own path of ``key``."""
        return "/".join([self.root, *parts_of(key)])

    def read(self, key: str) -> bytes:
        return bytes(self.fs.cat_file(self.at(key)))

    def write(self, key: str, data: bytes) -> None:
        self.fs.pipe_file(self.at(key), data)

    def create(self, key: str, data: bytes, writer: str) -> None:
        self.fs.pipe_file(self.at(key), data, mode="create")

    def wrote(self, key: str, writer: str) -> bool:
        """Nobody knows: no file system of fsspec's notes who wrote a file."""
        return False

    def entry(self, key: str) -> Entry | None:
        try:
            info = self.fs.info(self.at(key))
        except FileNotFoundError as exc:
            # Whatever keeps a web server from answering is called so; what it was stands behind it.
            if url_scheme(self.url) in ("http", "https") and isinstance(exc.__cause__, Exception):
                raise exc.__cause__ from None
            raise
        if info.get("type") != "file":
            return None
        return Entry(-1 if info["size"] is None else int(info["size"]), _version(info), _modified(info))

    def entries(self, prefix: str) -> dict[str, Entry]:
        try:
            found = self.fs.find(self.at(prefix), detail=True)
        except FileNotFoundError:
            found = {}
        if not found:
            self._check_bucket()
        if not isinstance(found, Mapping):  # adlfs answers a list when the path is itself a file
            return {}
        return {
            self._key(name): Entry(-1 if info["size"] is None else int(info["size"]), _version(info), _modified(info))
            for name, info in found.items()
            if info.get("type") == "file" and not name.endswith("/") and name != self.root
        }

    def names(self, prefix: str) -> Names:
        try:
            found = self.fs.ls(self.at(prefix), detail=False)
        except (FileNotFoundError, NotADirectoryError):
            self._check_bucket()
            return []
        return [self._key(path).rstrip("/") for path in found]

    def _key(self, path: str) -> str:
        return path[len(self.root) + 1 :] if path.startswith(self.root + "/") else path.lstrip("/")

    def _check_bucket(self) -> None:
        """A folder that is not there is empty; a bucket that is not there is a mistake."""
        if self.root.startswith("/"):
            return  # a file system of paths, without buckets
        bucket = self.root.split("/")[0]
        try:
            with contextlib.suppress(AuthError):  # may list this folder, not the bucket; `exists` says no to that
                self.retries(self.url, lambda: self.fs.info(bucket))
        except FileNotFoundError:
            raise StorageError(f"{self.url}: the bucket or container does not exist") from None

    def upload(self, path: Path, key: str, size: int, report: Callable[[int], None]) -> None:
        self.fs.put_file(str(path), self.at(key), callback=_callback(report))

    def content(self, key: str, most: int) -> None:
        """Nobody knows how much it is before it has all come."""

    def fetch(self, key: str, temp: Path, size: int | None, report: Callable[[int], None]) -> None:
        at, large = self.at(key), size is None or size > SMALL
        before = _version(self.fs.info(at)) if large else ""
        self.fs.get_file(at, str(temp), callback=_callback(report))
        if large and _version(self.fs.info(at)) != before:
            raise ConnectionError("another object has come to the key meanwhile")

    def piece(self, key: str, start: int, end: int) -> bytes:
        return bytes(self.fs.cat_file(self.at(key), start=start, end=end))

    def stream(self, key: str, size: int) -> Generator[bytes, None, None]:
        """All of a web server's file by one request, ``size`` bytes at a time."""
        with self.fs.open(self.at(key), "rb", block_size=0) as answer:
            while data := answer.read(size):
                yield bytes(data)

    def receive(self, key: str, pieces: Iterator[bytes], size: int) -> None:
        if size <= PIECE:
            self.write(key, b"".join(pieces))
            return
        out = self.fs.open(self.at(key), "wb", block_size=PIECE * -(-size // (PIECE * MOST_PIECES)))
        try:
            for piece in pieces:
                out.write(piece)
            out.close()
        except BaseException:
            with contextlib.suppress(Exception):  # not every file system's can
                out.discard()
            with contextlib.suppress(AttributeError):
                out.closed = True  # else what has come is stored when it is collected
            raise

    def copy(self, source: str, target: str) -> None:
        self.fs.cp_file(self.at(source), self.at(target))

    def remove(self, prefix: str) -> None:
        self.fs.rm(self.at(prefix), recursive=True)

    def discard(self, keys: Sequence[str]) -> None:
        odd = [key for key in keys if _PATTERN.search(key)]  # which `rm` takes for a pattern of names
        plain = [key for key in keys if key not in odd]
        try:
            if plain:
                self.fs.rm([self.at(key) for key in plain])
        except FileNotFoundError:  # of all that are gone the first ends it
            odd = [*odd, *plain]
        for key in odd:
            with contextlib.suppress(FileNotFoundError):
                self.fs.rm_file(self.at(key))


def _open(url: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    scheme = url_scheme(url)
    if os.environ.get("STORAGE_EMULATOR_HOST"):
        # gcsfs's probe of the bucket's type speaks gRPC over TLS, which no emulator answers: 60 s an operation.
        os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    try:
        import fsspec.core
        from fsspec.registry import get_filesystem_class, known_implementations
    except ImportError as exc:
        raise SpecError(f"{scheme}: URLs need fsspec; pip install fsspec ({exc})", field="store") from exc
    package = str(known_implementations.get(scheme, {}).get("class", "")).split(".")[0]
    logging.getLogger(package or scheme).addHandler(logging.NullHandler())  # they print tracebacks of what they raise
    try:
        get_filesystem_class(scheme)
    except ImportError as exc:
        raise SpecError(f"{exc}: pip install {package} ({exc.__cause__})", field="store") from exc
    except ValueError as exc:
        raise SpecError(f"no file system is known for {scheme}: URLs", field="store") from exc
    # Another machine writes to the same store: a listing that is remembered is wrong. A remembered instance keeps
    # credentials that have expired.
    fs, root = fsspec.core.url_to_fs(url, use_listings_cache=False, skip_instance_cache=True, **options)
    return fs, str(root).rstrip("/")


def _plain(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.fsspec() if isinstance(value, Credential) else value for name, value in options.items()}


def _encryption(url: str, options: Mapping[str, Any], moving: Moving) -> dict[str, Any]:
    """s3fs's words for how every object that is written is to be encrypted."""
    if not moving.sse:
        return {}
    words = {"ServerSideEncryption": moving.sse}
    if moving.sse_kms_key_id:
        words["SSEKMSKeyId"] = moving.sse_kms_key_id
    from fsspec.config import conf

    name = "s3_additional_kwargs"  # among the options it takes the place of what fsspec is configured with
    return {name: {**conf.get("s3", {}).get(name, {}), **options.get(name, {}), **words}}


def _version(info: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={info[name]}" for name in _VERSION_FIELDS if info.get(name))


def _modified(info: Mapping[str, Any]) -> float:
    """By the names that s3fs, gcsfs, adlfs, the file systems of paths, and memory have for it."""
    found = (info.get(name) for name in ("LastModified", "updated", "last_modified", "mtime", "created"))
    return next((unix_seconds(value) for value in found if value is not None), 0.0)


def _callback(report: Callable[[int], None]) -> Any:
    """fsspec's callback that tells how many bytes have moved in all."""
    from fsspec.callbacks import Callback

    class Told(Callback):  # type: ignore[misc]
        def call(self, hook_name: str | None = None, **_: Any) -> None:
            report(self.value)

    return Told()
