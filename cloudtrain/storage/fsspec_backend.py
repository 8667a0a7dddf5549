"""Move a store's bytes through fsspec: every URL that obstore does not serve."""

from __future__ import annotations

import contextlib
import hashlib
import re
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ..errors import AuthError, StorageError
from ..validate import unix_seconds, url_scheme
from .errors import CannotSwapError, FinalError, Retries, classify
from .files import MOST_PIECES, PIECE, Entry, Loaded, Names
from .fsspec_pool import BUCKETS, GOOGLE, SFTP, STREAMED, WEB, Clients, check_store, get_range, open_url, streamed, tree
from .local_disk import parts_of

_READ = 1 << 20
"""Bytes read at a time from a local file that is sent in pieces."""
SMALL = 4 << 20
"""Largest file, in bytes, taken to come in one answer; a larger one may come in ranges of different versions."""
_PATTERN = re.compile(r"[*?\[]")
_MEMORY = threading.Lock()
"""Makes `FsspecMover.swap` one step in this process's memory."""
_VERSION_FIELDS = (
    "ETag", "etag", "md5Hash", "content_md5", "generation", "VersionId", "LastModified", "last_modified", "updated",
    "mtime", "created", "blob_id", "Last-Modified", "modify", "modified",
)  # fmt: skip


class FsspecMover:
    """A `Mover` for the file systems ``clients``, below their path ``root``."""

    def __init__(self, *, url: str, clients: Clients, retries: Retries) -> None:
        self.url, self.clients, self.root, self.retries = url, clients, clients.root, retries
        self._scheme = url_scheme(url)
        self._is_store = False

    @classmethod
    def open(cls, url: str, options: Mapping[str, Any], *, retries: Retries) -> FsspecMover:
        """Open the file systems of ``url``. Raises `SpecError` if their package is not installed."""
        return cls(url=url, clients=open_url(url, options), retries=retries)

    def at(self, key: str) -> str:
        """Return the file system's own path of ``key``."""
        return "/".join([self.root, *parts_of(key)])

    @contextlib.contextmanager
    def _writing(self) -> Iterator[Any]:
        """Yield a file system to change. Raises `SpecError` if this cannot be a store."""
        if not self._is_store:
            check_store(self.url, self.clients.kind)
            self._is_store = True
        with self.clients.one() as fs:
            yield fs

    @contextlib.contextmanager
    def _looking(self, *, afresh: bool = True) -> Iterator[Any]:
        """Yield a file system; ``afresh`` drops its cache.

        Some raise FileNotFoundError for every failure of a server; its cause then has the real error.
        """
        with self.clients.one() as fs:
            if afresh and self.clients.shared is None:
                fs.invalidate_cache()
            try:
                yield fs
            except FileNotFoundError as exc:
                cause = exc.__cause__
                kind = classify(cause) if isinstance(cause, Exception) and self._scheme not in BUCKETS else "missing"
                if kind in ("transient", "auth") or (kind != "missing" and self._scheme in WEB):
                    raise cause from None  # type: ignore[misc]
                if cause is not None and self._scheme == "hf":  # for a missing file there is no cause
                    raise StorageError(f"{self.url}: {exc}") from exc
                raise

    def read(self, key: str) -> bytes:
        with self._looking() as fs:
            return bytes(fs.cat_file(self.at(key)))

    def write(self, key: str, data: bytes) -> None:
        with self._writing() as fs:
            fs.pipe_file(self.at(key), data)

    def load(self, key: str) -> Loaded:
        if not self._is_google:
            data = self.read(key)
            with self._looking() as fs:
                return Loaded(data, hashlib.sha256(data).hexdigest(), _modified(fs.info(self.at(key))))
        with self._looking() as fs:
            before = fs.info(self.at(key))
            data, after = bytes(fs.cat_file(self.at(key))), fs.info(self.at(key))
        if before["generation"] != after["generation"]:
            raise ConnectionError("another object has come to the key meanwhile")
        return Loaded(data, str(after["generation"]), _modified(after))

    @property
    def swaps(self) -> bool:
        return self._is_google or self._is_memory

    def swap(self, key: str, version: str | None, data: bytes) -> str:
        """Replace the content by the service's own condition; in this process's memory by a lock."""
        with self._writing() as fs:
            if self._is_google:
                bucket, name, _ = fs.split_path(self.at(key))
                where = f"{fs._location}/upload/storage/v1/b/{quote(bucket)}/o"
                named = {"uploadType": "media", "name": name, "ifGenerationMatch": version or "0"}
                return str(fs.call("POST", where, data=data, json_out=True, **named)["generation"])
            if self._is_memory:
                return _swapped_in_memory(fs, self.at(key), version, data)
            if version is not None:
                why = "cannot replace a file only while it is unchanged"
                raise CannotSwapError(f"{self.url}/{key}: {self.clients.kind.__name__} {why}")
            fs.pipe_file(self.at(key), data, mode="create")
        return hashlib.sha256(data).hexdigest()

    @property
    def _is_memory(self) -> bool:
        from fsspec.implementations.memory import MemoryFileSystem

        return issubclass(self.clients.kind, MemoryFileSystem)

    @property
    def _is_google(self) -> bool:
        return self._scheme in GOOGLE and not self._is_memory

    def entry(self, key: str) -> Entry | None:
        with self._looking() as fs:
            info = fs.info(self.at(key))
        return _entry(info) if info.get("type") == "file" else None

    def entries(self, prefix: str) -> dict[str, Entry]:
        found: Mapping[str, Mapping[str, Any]] = {}
        with contextlib.suppress(FileNotFoundError), self._looking() as fs:
            found = self._found(fs, self.at(prefix))
        if not found:
            self._check_bucket()
        return {
            self._key(name): _entry(info)
            for name, info in found.items()
            if info.get("type") == "file" and not name.endswith("/") and name != self.root
        }

    def _found(self, fs: Any, path: str) -> Mapping[str, Mapping[str, Any]]:
        from fsspec import AbstractFileSystem

        if type(fs).find is not AbstractFileSystem.find or self.clients.shared is not None:
            found = fs.find(path, detail=True)
            return found if isinstance(found, Mapping) else {}  # some return a list if the path is itself a file
        if fs.info(path or "/")["type"] != "directory":
            return {}
        return {info["name"]: self._followed(fs, info) for info in tree(fs, path)}

    def _followed(self, fs: Any, info: Mapping[str, Any]) -> Mapping[str, Any]:
        """Resolve a symbolic link to its target file."""
        if info["type"] != "link":
            return info
        try:
            there = fs.info(info["name"])
        except FileNotFoundError:
            there = {}
        if there.get("type") != "file":
            raise StorageError(f"{info['name']}: this symbolic link does not lead to a file")
        return {**there, "name": info["name"]}

    def names(self, prefix: str) -> Names:
        try:
            with self._looking() as fs:
                found = fs.ls(self.at(prefix), detail=self.clients.shared is None)
        except (FileNotFoundError, NotADirectoryError):
            self._check_bucket()
            return []
        paths = [str(item["name"] if isinstance(item, Mapping) else item) for item in found]
        return [self._key(path).rstrip("/") for path in paths]

    def _key(self, path: str) -> str:
        return path[len(self.root) + 1 :] if path.startswith(self.root + "/") else path.lstrip("/")

    def _check_bucket(self) -> None:
        """Raise `FinalError` if the bucket does not exist; a missing folder is empty."""
        if self._scheme not in BUCKETS or self.root.startswith("/"):
            return
        bucket = self.root.split("/")[0]
        try:
            with contextlib.suppress(AuthError), self.clients.one() as fs:  # may list this folder, not the bucket;
                self.retries(self.url, lambda: fs.info(bucket))  # `exists` returns False then
        except FileNotFoundError:
            raise FinalError(f"{self.url}: the bucket or container does not exist") from None

    def upload(self, path: Path, key: str, size: int, report: Callable[[int], None]) -> None:
        from fsspec import AbstractFileSystem

        # fsspec's default closes the target when an upload fails: a partial file looks complete.
        if self.clients.shared is None and self.clients.kind.put_file is AbstractFileSystem.put_file:
            with open(path, "rb") as stream:
                self.receive(key, _metered(iter(partial(stream.read, _READ), b""), report), size)
            return
        with self._writing() as fs:
            fs.put_file(str(path), self.at(key), callback=_callback(report))

    def content(self, key: str, most: int) -> None:
        """Return None: the size is unknown before all bytes have come."""

    def fetch(self, key: str, temp: Path, size: int | None, report: Callable[[int], None]) -> None:
        at, large = self.at(key), size is None or size > SMALL
        with self._looking(afresh=large) as fs:
            before = _version(fs.info(at)) if large else ""
            fs.get_file(at, str(temp), callback=_callback(report))
            if not large:
                return
        with self._looking() as fs:
            if _version(fs.info(at)) != before:
                raise ConnectionError("another object has come to the key meanwhile")

    def piece(self, key: str, start: int, end: int) -> bytes:
        with self.clients.one() as fs:
            if self._scheme in SFTP:
                return get_range(fs, self.at(key), start, end)
            return bytes(fs.cat_file(self.at(key), start=start, end=end))

    @property
    def streams(self) -> bool:
        """True if `stream` must be used in place of `piece`."""
        return self._scheme in STREAMED

    def stream(self, key: str, size: int) -> Generator[bytes, None, None]:
        """Yield a whole file by one request, ``size`` bytes at a time."""
        with self.clients.one() as fs:
            yield from streamed(fs, self.at(key), size)

    def receive(self, key: str, pieces: Iterator[bytes], size: int) -> None:
        if size <= PIECE:
            self.write(key, b"".join(pieces))
            return
        path = self.at(key)
        with self._writing() as fs:
            if self.clients.shared is None:
                fs.mkdirs(path.rpartition("/")[0], exist_ok=True)
            out = fs.open(path, "wb", block_size=PIECE * -(-size // (PIECE * MOST_PIECES)))
            try:
                for piece in pieces:
                    out.write(piece)
                out.close()
            except BaseException:
                with contextlib.suppress(Exception):  # some file systems cannot discard
                    out.discard()
                with contextlib.suppress(AttributeError):
                    out.closed = True  # else garbage collection stores the partial file
                raise

    @property
    def copies(self) -> bool:
        """True if `copy` moves no bytes through this machine."""
        from fsspec import AbstractFileSystem

        return self.clients.shared is not None or self.clients.kind.cp_file is not AbstractFileSystem.cp_file

    def copy(self, source: str, target: str) -> None:
        with self._writing() as fs:
            fs.cp_file(self.at(source), self.at(target))

    def remove(self, prefix: str) -> None:
        with self._writing() as fs:
            fs.rm(self.at(prefix), recursive=True)

    def discard(self, keys: Sequence[str]) -> None:
        odd = [key for key in keys if _PATTERN.search(key)]  # `rm` takes these for patterns
        known = [key for key in keys if key not in odd]
        with self.clients.one() as fs:
            try:
                if known:
                    fs.rm([self.at(key) for key in known])
            except FileNotFoundError:  # the first missing file ends the whole call
                odd = [*odd, *known]
            for key in odd:
                with contextlib.suppress(FileNotFoundError):
                    fs.rm_file(self.at(key))

    def prune(self, prefix: str) -> None:
        """Do nothing: these stores have no folders of their own."""


def _entry(info: Mapping[str, Any]) -> Entry:
    return Entry(-1 if info["size"] is None else int(info["size"]), _version(info), _modified(info))


def _swapped_in_memory(fs: Any, path: str, version: str | None, data: bytes) -> str:
    with _MEMORY:
        there = hashlib.sha256(fs.cat_file(path)).hexdigest() if fs.exists(path) else None
        if there != version:
            raise FileExistsError(path)
        fs.pipe_file(path, data)
    return hashlib.sha256(data).hexdigest()


def _version(info: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={info[name]}" for name in _VERSION_FIELDS if info.get(name))


def _modified(info: Mapping[str, Any]) -> float:
    """Return the change time, by the names of gcsfs, SFTP, WebDAV, memory and other file systems."""
    found = (info.get(name) for name in ("LastModified", "updated", "last_modified", "mtime", "modified", "created"))
    return next((unix_seconds(value) for value in found if value is not None), 0.0)


def _metered(pieces: Iterable[bytes], report: Callable[[int], None]) -> Iterator[bytes]:
    """Yield the pieces, and report the total number of bytes so far."""
    moved = 0
    for piece in pieces:
        yield piece
        moved += len(piece)
        report(moved)


def _callback(report: Callable[[int], None]) -> Any:
    """Return fsspec's callback that reports the total number of bytes so far."""
    from fsspec.callbacks import Callback

    class Told(Callback):  # type: ignore[misc]
        def call(self, hook_name: str | None = None, **_: Any) -> None:
            report(self.value)

    return Told()
