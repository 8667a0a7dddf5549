"""Handle files of every remote URL: open their mover, retry, create exclusively, download whole files."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import errno
import hashlib
import itertools
import os
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from ..errors import SpecError, StorageError
from ..validate import url_scheme
from .errors import FinalError, Retries, TransientError, classify, translate
from .files import PIECE, Entry, Files, Loaded, Names, Progress, Storage, TransferOptions
from .fsspec_backend import FsspecMover
from .local_disk import check_promise, disk_errors, make_durable, parts_of, put, temp_file, verify
from .obstore_backend import ObstoreMover, OtherRegionError
from .obstore_config import SDKS
from .timings import CLIENT_TIMINGS

R = TypeVar("R")

OBSTORE = frozenset(SDKS)
"""The schemes that obstore serves; fsspec serves all others."""
AHEAD = 3
SMALL = 1 << 20
"""Bytes of a file that passes through memory and is written by one call."""
COPY_BYTES = 5 << 30
"""Most bytes of one copy on the server (Amazon S3 User Guide, "Copying, moving, and renaming objects")."""
#: Back ends whose copy on the server may still be running when the call returns.
_LAZY_COPY = frozenset({"abfs", "abfss", "az"})


Mover = ObstoreMover | FsspecMover
"""A client library for the files below one URL, whose keys are checked. A missing file is FileNotFoundError.

Its methods raise the library's errors, and retry only by ``retries``. They may list more than was asked for. ``report``
gets the number of bytes moved so far. A size is -1 if the server does not say it.
"""


class _Opened(NamedTuple):
    pid: int
    mover: Mover
    since: float


class RemoteFiles(Files):
    """`Files` of a remote URL. ``storage`` gives the options with which it is opened.

    It is called again if access is refused to a client of some age, because credentials expire or are replaced.
    """

    def __init__(
        self,
        *,
        url: str,
        storage: Storage | None = None,
        moving: TransferOptions = TransferOptions(),  # noqa: B008 - it is frozen
        retries: Retries | None = None,
    ) -> None:
        self._url = url
        self._storage = storage
        self._moving = moving
        self._retries = retries
        self._opened: _Opened | None = None
        self._region = ""
        #: By process: a child may be forked while another thread holds its parent's.
        self._locks: dict[int, threading.Lock] = {}

    @property
    def url(self) -> str:
        return self._url

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
        retries = self._retries or Retries()  # a file system may connect when it is made
        try:
            return retries(self._url, self._connect)
        except (TypeError, AttributeError) as exc:  # `Retries` takes these for ours
            raise translate(exc, self._url) from exc

    def _connect(self) -> Mover:
        """Return the mover of the URL's scheme."""
        options, scheme = dict(self._storage(self._url) if self._storage else {}), url_scheme(self._url)
        if self._region:
            options["client_kwargs"] = {**options.get("client_kwargs", {}), "region_name": self._region}
        if self._moving.sse and scheme not in ("s3", "s3a"):
            why = f"encryption can be set only for a store in S3, not for {scheme}:"
            raise SpecError(why, field="sse", hint="remove sse and sse_kms_key_id from the settings")
        if scheme in OBSTORE:
            kind: type[ObstoreMover] = ObstoreMover
            if scheme == "obs":
                from .obs import ObsMover as kind  # its imports are those of a client
            return kind.open(self._url, options, moving=self._moving, retries=self._retries)
        return FsspecMover.open(self._url, options, retries=self._retries or Retries())

    def _call(self, key: str, work: Callable[[Mover], R], *, again: bool = True) -> R:
        """Check ``key``, and call ``work(mover)`` with its `Retries`; its errors go through the table."""
        parts_of(key)
        opened = [self._open()]

        def attempt() -> R:
            opened[:] = [self._open()]
            try:
                return work(opened[0].mover)
            except OtherRegionError:
                if not self._relocates(opened[0]):
                    raise
                opened[:] = [self._open()]
                return work(opened[0].mover)

        return opened[0].mover.retries(
            f"{self._url}/{key}".rstrip("/"), attempt, again=again, renews=lambda exc: self._renews(opened[0], exc)
        )

    def _relocates(self, opened: _Opened) -> bool:
        """Open the bucket in its own region, and return True, if its server names another than the configured one."""
        with self._lock():
            if self._opened is opened:  # else another thread did this
                region = opened.mover.region() if isinstance(opened.mover, ObstoreMover) else ""
                if self._region or not region:
                    return False
                self._region, self._opened = region, None
        return True

    def _renews(self, opened: _Opened, exc: Exception) -> bool:
        """Return whether a new client may succeed after ``exc``: credentials expire."""
        if classify(exc) != "auth":
            return False
        with self._lock():
            if self._opened is opened:  # else another thread did this
                if time.monotonic() - opened.since < CLIENT_TIMINGS.credentials_age:
                    return False
                self._opened = None
        return True

    @contextlib.contextmanager
    def _bucket(self) -> Iterator[None]:
        """Raise `FinalError` for a missing bucket, as nothing else can be missing here."""
        try:
            yield
        except FileNotFoundError as exc:
            raise FinalError(f"{self._url}: the bucket or container does not exist") from exc

    def read(self, key: str) -> bytes:
        return self._call(key, lambda mover: mover.read(key))

    def write(self, key: str, data: bytes) -> None:
        with self._bucket():
            self._call(key, lambda mover: mover.write(key, data))

    def create(self, key: str, data: bytes, *, private: bool = False) -> bool:
        if self.exists(key):  # some servers ignore the condition, and overwrite
            return False
        try:
            self.swap(key, None, data)
        except FileExistsError:
            return False
        return True

    def load(self, key: str) -> Loaded | None:
        try:
            return self._call(key, lambda mover: mover.load(key))
        except FileNotFoundError:
            return None

    @property
    def swaps(self) -> bool:
        return self._open().mover.swaps

    def swap(self, key: str, version: str | None, data: bytes) -> str:
        parts_of(key)
        retries = self._open().mover.retries
        unanswered: Exception | None = None
        for number in range(retries.tries):
            try:
                return self._call(key, lambda mover: mover.swap(key, version, data), again=False)
            except (TransientError, FileExistsError, FileNotFoundError) as exc:
                unanswered = exc
            found = self.load(key)
            if found is not None and found.data == data:  # the answer was lost
                return found.version
            if (found.version if found else None) != version:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), f"{self._url}/{key}")
            if version is None and isinstance(unanswered, FileNotFoundError):
                raise FinalError(f"{self._url}: the bucket or container does not exist") from unanswered
            retries.pause(number)  # a 409 is another writer, which may still fail
            if version is None and (found := self.load(key)):  # some servers ignore the condition, and overwrite
                if found.data == data:
                    return found.version
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), f"{self._url}/{key}")
        if isinstance(unanswered, TransientError):
            raise unanswered
        why = f"{self._url}/{key}: other clients change it all the time"
        raise StorageError(why, hint="run the same command again") from unanswered

    def entry(self, key: str) -> Entry | None:
        """Return the file at ``key``, None if there is none. ``size`` is -1 if the server does not say."""
        try:
            return self._call(key, lambda mover: mover.entry(key))
        except FileNotFoundError:
            return None

    def size(self, key: str) -> int | None:
        entry = self.entry(key)
        return None if entry is None else entry.size

    def entries(self, prefix: str = "") -> dict[str, Entry]:
        with self._bucket():
            found = self._call(prefix, lambda mover: mover.entries(prefix))
        below = f"{prefix}/" if prefix else ""
        return {key: found[key] for key in sorted(found) if key.startswith(below) and key != below}

    def names(self, prefix: str = "") -> Names:
        with self._bucket():
            found = self._call(prefix, lambda mover: mover.names(prefix))
        below = f"{prefix}/" if prefix else ""
        return sorted({key[len(below) :] for key in found if key.startswith(below)} - {""})

    def upload(self, path: Path, key: str, *, progress: Progress | None = None) -> None:
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
        meter = _Meter(progress, key, size)
        self._call(key, lambda mover: self._fetch(mover, key, path, sha256, size, meter))

    def _fetch(
        self, mover: Mover, key: str, path: Path, sha256: str | None, size: int | None, meter: Callable[[int], None]
    ) -> None:
        if size is not None and size <= SMALL and (data := mover.content(key, SMALL)) is not None:
            check_promise(key, len(data), lambda: hashlib.sha256(data).hexdigest(), sha256, size)
            with disk_errors(path):
                put(path, data, name=False)  # a missing file is fetched again
            meter(size)
            return
        # A new temporary file each time: parallel parts of a failed try may still be writing to the last one.
        with contextlib.ExitStack() as stack:
            with disk_errors(path):
                temp = stack.enter_context(temp_file(path))
            mover.fetch(key, temp, size, meter)
            with disk_errors(path):
                verify(temp, key, sha256, size)
                meter(temp.stat().st_size)
                make_durable(temp, path, name=False)

    def pieces(self, key: str, size: int) -> Generator[bytes, None, None]:
        """Yield the content of the file of ``size`` bytes in order, up to `AHEAD` parts of `PIECE` bytes in advance.

        A web or FTP server gives one stream, with its errors unchanged: not all servers answer ranges.
        """
        parts_of(key)
        mover = self._open().mover
        if isinstance(mover, FsspecMover) and mover.streams:
            yield from self._stream(mover, key, size)
            return

        over = threading.Event()

        def one(mover: Mover, start: int, end: int) -> bytes:
            if over.is_set():
                raise StorageError(f"{self._url}/{key}: its caller no longer waits")
            return mover.piece(key, start, end)

        def piece(start: int) -> bytes:
            end = min(start + PIECE, size)
            data = self._call(key, lambda mover: one(mover, start, end))
            if len(data) != end - start:
                came = f"{len(data)} bytes instead of {end - start}"
                raise StorageError(f"{self._url}/{key} changed while it was read: {came}")
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
            raise ConnectionError(f"{count} bytes came instead of {size}")

    def receive(self, key: str, size: int, pieces: Callable[[], Generator[bytes, None, None]]) -> None:
        """Replace the content by ``size`` bytes, whole or not at all; ``pieces`` is called for each try."""
        with self._bucket():
            self._call(key, lambda mover: self._receive(mover, key, size, pieces))

    def _receive(self, mover: Mover, key: str, size: int, pieces: Callable[[], Generator[bytes, None, None]]) -> None:
        with contextlib.closing(pieces()) as source:  # close its resources now, not at garbage collection
            mover.receive(key, source, size)

    @property
    def copies(self) -> bool:
        if url_scheme(self._url) in _LAZY_COPY:
            return False
        mover = self._open().mover
        return not isinstance(mover, FsspecMover) or mover.copies

    def copy(self, source: str, target: str) -> None:
        parts_of(target)
        refused: StorageError | None = None
        if self.copies:
            try:
                self._call(source, lambda mover: mover.copy(source, target))
            except StorageError as exc:
                refused = exc
            else:
                return
        size = self.size(source)
        if refused is not None and (size is None or size <= COPY_BYTES):
            raise refused
        if size is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), f"{self._url}/{source}")
        if size < 0:
            raise StorageError(f"{self._url}/{source}: its file system does not say how large it is")
        # Not by `receive`: here a missing file is the source, not the bucket.
        self._call(target, lambda mover: self._receive(mover, target, size, lambda: self.pieces(source, size)))

    def remove(self, prefix: str) -> None:
        if not prefix:
            raise StorageError(f"{self._url}: cloudtrain never removes a whole store")
        with contextlib.suppress(FileNotFoundError):
            self._call(prefix, lambda mover: mover.remove(prefix))

    def discard(self, keys: Sequence[str]) -> None:
        for key in keys:
            if not parts_of(key):
                raise StorageError(f"{self._url}: cloudtrain never removes a whole store")
        if keys:
            self._call(keys[0], lambda mover: mover.discard(keys))

    def prune(self, prefix: str) -> None:
        if not parts_of(prefix):
            raise StorageError(f"{self._url}: cloudtrain never removes a whole store")
        with contextlib.suppress(FileNotFoundError):
            self._call(prefix, lambda mover: mover.prune(prefix))


def check_openable(url: str) -> None:
    """Raise `SpecError` if a package or a word is missing to open ``url``, `AuthError` without credentials."""
    RemoteFiles(url=url)._open()


class _Meter:
    """A counter that reports each byte once, even after retries. Several threads call it with the total so far."""

    def __init__(self, progress: Progress | None, key: str, size: int | None) -> None:
        self._progress, self._key, self._size = progress, key, size
        self._reported = 0
        self._lock = threading.Lock()

    def __call__(self, total: int) -> None:
        if self._progress is None:
            return
        with self._lock:
            more = (total if self._size is None else min(total, self._size)) - self._reported
            if more > 0:
                self._reported += more
                self._progress(self._key, more)
