"""Files of every URL that is no local folder: which library moves them, retries, creation, whole files on this disk."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import hashlib
import itertools
import os
import secrets
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from ..errors import SpecError, StorageError
from ..validate import url_scheme
from .errors import Retries, TransientError, classify, translate
from .files import PIECE, Entry, Moving, Names, Progress, Storage, Trees
from .fsspec_backend import FsspecMover
from .local_disk import check_promise, disk_errors, parts_of, put, settle, temp_file, verify
from .obstore_config import Unproven, find_access

__all__ = ["Mover", "RemoteFiles"]

R = TypeVar("R")

RENEW_SECONDS = 30.0
"""Age from which a client that is refused is made anew: credentials that have just been read are not read again."""
AHEAD = 3
SMALL = 1 << 20
"""Bytes of a file that comes through memory, and is written by one call."""
#: Back ends whose copy on the server may still be under way when the call returns.
_LAZY_COPY = frozenset({"abfs", "abfss", "az"})


class Mover(Protocol):
    """A client library for the files below one URL. Methods raise whatever it raises; nothing is tried again but by
    ``retries``, the patience that it takes.

    Keys are checked. What is not there is FileNotFoundError.
    """

    name: str
    retries: Retries

    def read(self, key: str) -> bytes:
        """The content."""

    def write(self, key: str, data: bytes) -> None:
        """Replace the content."""

    def create(self, key: str, data: bytes, writer: str) -> None:
        """Write what is not there yet, noting ``writer`` where that can be; FileExistsError and the like, else."""

    def wrote(self, key: str, writer: str) -> bool:
        """Whether ``writer`` is noted to have created it."""

    def entry(self, key: str) -> Entry | None:
        """What is there; None of what is no file. ``size`` is -1 where a server does not say."""

    def entries(self, prefix: str) -> dict[str, Entry]:
        """Every file below ``prefix``, perhaps others too, by key. Only a bucket can be missing."""

    def names(self, prefix: str) -> Names:
        """Keys of files and folders immediately below ``prefix``, perhaps others too. Only a bucket can be missing."""

    def upload(self, path: Path, key: str, size: int, report: Callable[[int], None]) -> None:
        """Store the local file of ``size`` bytes; ``report`` takes how many have moved in all."""

    def content(self, key: str, most: int) -> memoryview | None:
        """The content; None when there is more than ``most``, or might be before that is known."""

    def fetch(self, key: str, temp: Path, size: int | None, report: Callable[[int], None]) -> None:
        """Fill the new file ``temp``; ``size`` is a promise."""

    def piece(self, key: str, start: int, end: int) -> bytes:
        """The bytes from ``start`` up to, not with, ``end``, which both are there."""

    def receive(self, key: str, pieces: Iterator[bytes], size: int) -> None:
        """Store ``pieces``, ``size`` bytes in all. What they raise comes out, and leaves nothing."""

    def copy(self, source: str, target: str) -> None:
        """Copy on the server."""

    def remove(self, prefix: str) -> None:
        """Remove the file or folder."""

    def discard(self, keys: Sequence[str]) -> None:
        """Remove these files, of which some may be gone."""

    def prune(self, prefix: str) -> None:
        """Remove the folder and those below it, or the marks of them, as far as they hold no file."""


class _Opened(NamedTuple):
    pid: int
    mover: Mover
    since: float


class RemoteFiles(Trees):
    """`Files` of any URL but a local folder's. ``storage`` gives fsspec's options.

    It is asked again when access is refused to a client that has some age: what it had to show may have expired, or
    been replaced. ``given`` is used as it is, whatever happens.
    """

    def __init__(
        self,
        *,
        url: str,
        storage: Storage | None = None,
        moving: Moving = Moving(),  # noqa: B008 - it is frozen
        given: Mover | None = None,
        retries: Retries | None = None,
    ) -> None:
        self._url = url
        self._storage = storage
        self._moving = moving
        self._given = given
        self._retries = retries
        self._opened: _Opened | None = None
        #: By process: a child may be forked while another thread holds its parent's.
        self._locks: dict[int, threading.Lock] = {}

    @property
    def url(self) -> str:
        return self._url

    @property
    def mover(self) -> str:
        return self._open().mover.name

    def _lock(self) -> threading.Lock:
        return self._locks.setdefault(os.getpid(), threading.Lock())

    def _open(self) -> _Opened:
        opened = self._opened
        if opened is None or opened.pid != os.getpid():  # a client does not survive a fork
            with self._lock():
                opened = self._opened
                if opened is None or opened.pid != os.getpid():
                    opened = self._opened = _Opened(os.getpid(), self._made(), time.monotonic())
        return opened

    def _made(self) -> Mover:
        if self._given is not None:
            return self._given
        retries = self._retries or Retries()  # a file system may connect when it is made
        try:
            return retries(self._url, lambda: self._choose(self._storage(self._url) if self._storage else {}))
        except (TypeError, AttributeError) as exc:  # which `Retries` takes for ours
            raise translate(exc, self._url) from exc

    def _choose(self, options: Mapping[str, Any]) -> Mover:
        """obstore where it is there and known to be let in by the same credentials as fsspec, else fsspec."""
        moving, scheme = self._moving, url_scheme(self._url)
        if moving.sse and scheme not in ("s3", "s3a"):
            raise SpecError(f"only a store in S3 is told how to encrypt, not {scheme}:", field="sse")
        if moving.mover != "fsspec":
            from .obstore_backend import TRIES, ObstoreMover, check_usable

            try:
                access = find_access(self._url, options, os.environ, moving=moving)
                check_usable()
                return ObstoreMover(url=self._url, access=access, retries=self._retries or Retries(tries=TRIES))
            except Unproven as exc:
                if moving.mover == "obstore" and exc.demanded:
                    raise SpecError(f"obstore does not move {self._url}: {exc}", field="mover") from exc
        return FsspecMover.open(self._url, options, moving=moving, retries=self._retries or Retries())

    def _call(self, key: str, work: Callable[[Mover], R], *, again: bool = True) -> R:
        """``work(mover)`` with its `Retries`; what it raises goes through the table."""
        opened = [self._open()]

        def attempt() -> R:
            opened[:] = [self._open()]
            try:
                return work(opened[0].mover)
            except Unproven:
                if not self._leaves(opened[0]):
                    raise
                opened[:] = [self._open()]
                return work(opened[0].mover)

        return opened[0].mover.retries(
            f"{self._url}/{key}".rstrip("/"), attempt, again=again, renews=lambda exc: self._renews(opened[0], exc)
        )

    def _leaves(self, opened: _Opened) -> bool:
        """Whether fsspec goes on with what the mover of ``opened`` cannot do."""
        if self._given is not None or self._moving.mover == "obstore":
            return False
        with self._lock():
            if self._opened is opened:  # else another thread has been here
                self._moving = self._moving._replace(mover="fsspec")
                self._opened = None
        return True

    def _renews(self, opened: _Opened, exc: Exception) -> bool:
        """Whether a client made anew may do what raised ``exc``: credentials expire."""
        if self._given is not None or classify(exc) != "auth":
            return False
        with self._lock():
            if self._opened is opened:  # else another thread has been here
                if time.monotonic() - opened.since < RENEW_SECONDS:
                    return False
                self._opened = None
        return True

    @contextlib.contextmanager
    def _bucket(self) -> Iterator[None]:
        """Where nothing can be missing but the bucket."""
        try:
            yield
        except FileNotFoundError as exc:
            raise StorageError(f"{self._url}: the bucket or container does not exist") from exc

    def read(self, key: str) -> bytes:
        parts_of(key)
        return self._call(key, lambda mover: mover.read(key))

    def write(self, key: str, data: bytes) -> None:
        parts_of(key)
        with self._bucket():
            self._call(key, lambda mover: mover.write(key, data))

    def create(self, key: str, data: bytes, *, private: bool = False) -> bool:
        parts_of(key)
        writer = secrets.token_hex(16)
        unanswered: TransientError | None = None
        retries = self._open().mover.retries
        for number in range(retries.tries + 1):
            # Also before the first try: some servers ignore the condition, and overwrite.
            if self.exists(key):
                return number > 0 and self._call(key, lambda mover: mover.wrote(key, writer))
            if number == retries.tries:
                break
            try:
                with self._bucket():
                    self._call(key, lambda mover: mover.create(key, data, writer), again=False)
                return True
            except TransientError as exc:  # it may have been created all the same: look, then try again
                unanswered = exc
            except FileExistsError:
                # 412 is an object; 409 is another creator under way, who may yet fail: look, then try again.
                if self.exists(key):
                    return number > 0 and self._call(key, lambda mover: mover.wrote(key, writer))
            retries.pause(number)
        raise unanswered or StorageError(f"{self._url}/{key}: other writers stay in the way")

    def entry(self, key: str) -> Entry | None:
        """The file at ``key``, None when there is none. ``size`` is -1 where the server does not say."""
        parts_of(key)
        try:
            return self._call(key, lambda mover: mover.entry(key))
        except FileNotFoundError:
            return None

    def size(self, key: str) -> int | None:
        entry = self.entry(key)
        return None if entry is None else entry.size

    def entries(self, prefix: str = "") -> dict[str, Entry]:
        parts_of(prefix)
        with self._bucket():
            found = self._call(prefix, lambda mover: mover.entries(prefix))
        below = f"{prefix}/" if prefix else ""
        return {key: found[key] for key in sorted(found) if key.startswith(below) and key != below}

    def names(self, prefix: str = "") -> Names:
        parts_of(prefix)
        with self._bucket():
            found = self._call(prefix, lambda mover: mover.names(prefix))
        below = f"{prefix}/" if prefix else ""
        return sorted({key[len(below) :] for key in found if key.startswith(below)} - {""})

    def upload(self, path: Path, key: str, *, progress: Progress | None = None) -> None:
        parts_of(key)
        with disk_errors(path):
            size = path.stat().st_size
        with self._bucket():
            meter = _Meter(progress, key, size)
            self._call(key, lambda mover: mover.upload(path, key, size, meter))
            meter(size)

    def download(
        self,
        key: str,
        path: Path,
        *,
        sha256: str | None = None,
        size: int | None = None,
        progress: Progress | None = None,
    ) -> None:
        parts_of(key)
        meter = _Meter(progress, key, size)
        self._call(key, lambda mover: self._fetch(mover, key, path, sha256, size, meter))

    def _fetch(
        self, mover: Mover, key: str, path: Path, sha256: str | None, size: int | None, meter: Callable[[int], None]
    ) -> None:
        if size is not None and size <= SMALL and (data := mover.content(key, SMALL)) is not None:
            check_promise(key, len(data), lambda: hashlib.sha256(data).hexdigest(), sha256, size)
            with disk_errors(path):
                put(path, data, name=False)  # what is missing is fetched again
            meter(size)
            return
        # A new temporary file each time: the parallel parts of a try that failed may still be writing to the last one.
        with contextlib.ExitStack() as stack:
            with disk_errors(path):
                temp = stack.enter_context(temp_file(path))
            mover.fetch(key, temp, size, meter)
            with disk_errors(path):
                verify(temp, key, sha256, size)
                meter(temp.stat().st_size)
                settle(temp, path, name=False)

    def pieces(self, key: str, size: int) -> Generator[bytes, None, None]:
        """The content of the file of ``size`` bytes in order, `AHEAD` parts of `PIECE` bytes before its taker.

        Of a web or FTP server one stream, whose failures come out as they are: not all answer ranges.
        """
        parts_of(key)
        mover = self._open().mover
        if isinstance(mover, FsspecMover) and mover.streams:
            yield from self._stream(mover, key, size)
            return

        over = threading.Event()

        def one(mover: Mover, start: int, end: int) -> bytes:
            if over.is_set():
                raise StorageError(f"{self._url}/{key}: nobody waits for it")
            return mover.piece(key, start, end)

        def piece(start: int) -> bytes:
            end = min(start + PIECE, size)
            data = self._call(key, lambda mover: one(mover, start, end))
            if len(data) != end - start:
                raise StorageError(f"{self._url}/{key}: {len(data)} bytes came in place of {end - start}; it changed")
            return data

        starts = iter(range(0, size, PIECE))
        pool = concurrent.futures.ThreadPoolExecutor(max_workers=AHEAD)
        try:
            coming = collections.deque(pool.submit(piece, start) for start in itertools.islice(starts, AHEAD))
            while coming:
                data = coming.popleft().result()
                coming.extend(pool.submit(piece, start) for start in itertools.islice(starts, 1))
                yield data
        finally:
            over.set()
            pool.shutdown(wait=False, cancel_futures=True)

    def _stream(self, mover: FsspecMover, key: str, size: int) -> Generator[bytes, None, None]:
        count = 0
        with contextlib.closing(mover.stream(key, PIECE)) as answer:
            for data in answer:
                count += len(data)
                yield data
                if count > size:
                    break
        if count != size:
            raise ConnectionError(f"{count} bytes came in place of {size}")

    def receive(self, key: str, size: int, pieces: Callable[[], Generator[bytes, None, None]]) -> None:
        """Replace the content by ``size`` bytes, whole or not at all; ``pieces`` is called anew for each try."""
        parts_of(key)
        with self._bucket():
            self._call(key, lambda mover: self._receive(mover, key, size, pieces))

    def _receive(self, mover: Mover, key: str, size: int, pieces: Callable[[], Generator[bytes, None, None]]) -> None:
        with contextlib.closing(pieces()) as source:  # what it holds open is closed now, not by whoever collects it
            mover.receive(key, source, size)

    @property
    def copies(self) -> bool:
        if url_scheme(self._url) in _LAZY_COPY:
            return False
        mover = self._open().mover
        return not isinstance(mover, FsspecMover) or mover.copies

    def copy(self, source: str, target: str) -> None:
        parts_of(source)
        parts_of(target)
        if self.copies:
            self._call(source, lambda mover: mover.copy(source, target))
            return
        with tempfile.TemporaryDirectory(prefix="cloudtrain-") as folder:
            path = Path(folder, "copy")
            self.download(source, path)
            self.upload(path, target)

    def remove(self, prefix: str) -> None:
        if not prefix:
            raise StorageError(f"{self._url}: the whole store is not removed")
        parts_of(prefix)
        with contextlib.suppress(FileNotFoundError):
            self._call(prefix, lambda mover: mover.remove(prefix))

    def discard(self, keys: Sequence[str]) -> None:
        for key in keys:
            if not parts_of(key):
                raise StorageError(f"{self._url}: the whole store is not removed")
        if keys:
            self._call(keys[0], lambda mover: mover.discard(keys))

    def prune(self, prefix: str) -> None:
        if not parts_of(prefix):
            raise StorageError(f"{self._url}: the whole store is not removed")
        with contextlib.suppress(FileNotFoundError):
            self._call(prefix, lambda mover: mover.prune(prefix))


class _Meter:
    """Reports each byte once, whatever is retried. Called with how many have moved in all, from several threads."""

    def __init__(self, progress: Progress | None, key: str, size: int | None) -> None:
        self._progress, self._key, self._size = progress, key, size
        self._told = 0
        self._lock = threading.Lock()

    def __call__(self, total: int) -> None:
        if self._progress is None:
            return
        with self._lock:
            more = (total if self._size is None else min(total, self._size)) - self._told
            if more > 0:
                self._told += more
                self._progress(self._key, more)
