"""Move bytes in and out of one URL tree: a local folder, or any URL that fsspec supports.

`files` gives a `Files` for a URL. Keys are ``/``-separated paths below that URL, ``""`` the URL itself. A local tree
never imports fsspec. Retries, and the table that translates a back end's exceptions, are in `errors`.

Every method raises `AuthError` (missing, expired or refused credentials) and `StorageError` (anything else). Methods
that read one key raise the builtin `FileNotFoundError` if it is missing: often that is an answer, not a failure.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import hashlib
import os
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

from ..errors import StorageError
from .local_disk import (
    TEMP,
    copy_file,
    disk_errors,
    hold_lock,
    inside,
    is_same,
    local_path,
    make_durable,
    normalize,
    parts_of,
    put,
    sync,
    sync_folder,
    temp_file,
    verify,
)

#: Called by several threads with the key and the number of further bytes moved.
Progress = Callable[[str, int], None]
#: Options with which a URL is opened, by fsspec's names: credentials, region. Without any, the SDK's own.
Storage = Callable[[str], Mapping[str, Any]]
#: Keys or paths, sorted. (`Files.list` hides the builtin name.)
Names = list[str]

T = TypeVar("T")
R = TypeVar("R")

PIECE = 8 << 20
"""Bytes of a part in multi-part transfers: S3 requires at least 5 MiB."""
MOST_PIECES = 9_000
"""Most parts of one object: S3 allows 10,000. A larger object has larger parts."""


@runtime_checkable
class ProgressWithTotal(Protocol):
    """A `Progress` that wants to know how much is to come."""

    def __call__(self, key: str, count: int) -> None:
        """Take ``count`` more bytes of ``key``."""

    def expect(self, files: int, count: int) -> None:
        """Take the number of files and bytes to come."""


class Entry(NamedTuple):
    """One stored file: ``size`` in bytes, ``version`` (it changes with every write), and its time of change.

    ``modified`` is in Unix seconds of the store's clock; 0 if the store's listings have no times.
    """

    size: int
    version: str
    modified: float


class Loaded(NamedTuple):
    """The content of a file, with the ``version`` that `Files.swap` takes. ``modified`` is as in `Entry`."""

    data: bytes
    version: str
    modified: float


class TransferOptions(NamedTuple):
    """Transfer options: the files at a time, and S3's encryption of written objects."""

    sse: str = ""
    sse_kms_key_id: str = ""
    concurrency: int = 8


class Files(Protocol):
    """The files below one URL. Both trees inherit `exists`, `list` and `download_tree`, made of the other methods."""

    @property
    def url(self) -> str:
        """The root, as `normalize` gives it."""

    def read(self, key: str) -> bytes:
        """Return the content. Raises FileNotFoundError if there is none."""

    def write(self, key: str, data: bytes) -> None:
        """Replace the content: a reader sees the old, the new or none, never a part."""

    def create(self, key: str, data: bytes, *, private: bool = False) -> bool:
        """Write only if there is nothing yet: of callers with different data, True for exactly one. Its data is whole.

        ``private``: readable by this user alone, in a local tree. Over a network an answer can be lost, and the winner
        is known by its content: callers with the same data may all get True. One that must know who won puts a unique
        word into ``data``.
        """

    def load(self, key: str) -> Loaded | None:
        """Return the content with its version, or None if there is no such file."""

    def swap(self, key: str, version: str | None, data: bytes) -> str:
        """Replace the content only if its version is still ``version`` (None: there is no file); return the new one.

        Raises FileExistsError if another writer was first. No two contents of a key may be equal: S3 makes versions of
        contents, and a lost answer is known by its content. After any other error the content may have been replaced.
        A file system that only creates exclusively raises `CannotSwapError` unless ``version`` is None.
        """

    @property
    def swaps(self) -> bool:
        """True if `swap` replaces contents too. A store without that only creates exclusively."""
        return True

    def size(self, key: str) -> int | None:
        """Return the bytes, or None if there is no such file (a folder is not one)."""

    def exists(self, key: str) -> bool:
        """Return whether there is such a file."""
        return self.size(key) is not None

    def entries(self, prefix: str = "") -> dict[str, Entry]:
        """Return every file below ``prefix``, at any depth, by key; sorted. Leaves out links and unfinished files."""

    def list(self, prefix: str = "") -> dict[str, int]:
        """Return `entries`, sizes only."""
        return {key: entry.size for key, entry in self.entries(prefix).items()}

    def names(self, prefix: str = "") -> Names:
        """Return files and folders directly below ``prefix``; sorted, empty if there is no such folder."""

    def upload(self, path: Path, key: str, *, progress: Progress | None = None) -> None:
        """Store the local file ``path`` whole. Raises FileNotFoundError if ``path`` does not exist."""

    def download(
        self,
        key: str,
        path: Path,
        *,
        sha256: str | None = None,
        size: int | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Fetch into ``path``, whole and checked, or leave ``path`` as it was.

        Raises FileNotFoundError for a missing key, `DigestError` for bytes that differ from the expected ones.
        """

    def download_tree(
        self,
        prefix: str,
        folder: Path,
        *,
        jobs: int = 8,
        select: Callable[[str], bool] | None = None,
        digests: Mapping[str, str] | None = None,
        progress: Progress | None = None,
    ) -> Names:
        """Fetch every file below ``prefix`` into ``folder``; return their paths, relative to both, sorted.

        ``select`` filters them; ``digests`` are SHA-256 by relative path. Files with a digest are verified, and not
        fetched again if present. Nothing is fetched if any path would leave ``folder`` (`StorageError`).
        """
        cut = len(prefix) + 1 if prefix else 0
        sizes = {key[cut:]: size for key, size in self.list(prefix).items()}
        wanted = {name: inside(folder, name) for name in sizes if select is None or select(name)}

        def fetch(name: str) -> None:
            digest = digests.get(name) if digests else None
            if digest is not None:
                with disk_errors(wanted[name]):
                    if is_same(wanted[name], sizes[name], digest):
                        return
            key = f"{prefix}/{name}" if prefix else name
            self.download(key, wanted[name], sha256=digest, size=sizes[name], progress=progress)

        parallel(fetch, list(wanted), jobs=jobs)
        return sorted(wanted)

    def pieces(self, key: str, size: int) -> Generator[bytes, None, None]:
        """Yield the content of the file of ``size`` bytes in order, in bounded memory."""

    def receive(self, key: str, size: int, pieces: Callable[[], Generator[bytes, None, None]]) -> None:
        """Replace the content by ``size`` bytes, whole or not at all; ``pieces`` is called for each try."""

    @property
    def copies(self) -> bool:
        """True if `copy` moves no bytes through this machine."""

    def copy(self, source: str, target: str) -> None:
        """Copy inside the tree, done when it returns. Raises FileNotFoundError if there is no ``source``."""

    def remove(self, prefix: str) -> None:
        """Remove the file or folder, if it is there. The root itself is refused (`StorageError`)."""

    def discard(self, keys: Sequence[str]) -> None:
        """Remove these files, no folders, in as few requests as the store allows; missing files are ignored."""

    def prune(self, prefix: str) -> None:
        """Remove the folder and those below it, or the store's markers of them, if they hold no file."""


def files(
    url: str,
    *,
    gitignore: bool = False,
    storage: Storage | None = None,
    moving: TransferOptions = TransferOptions(),  # noqa: B008 - it is frozen
) -> Files:
    """Return the tree at ``url``, unopened. ``gitignore``: a local root that is new or empty hides itself from git once
    written to. Otherwise git would no longer see your files there.

    ``storage`` gives the options when a remote tree is opened, and again after its credentials expired.
    """
    path = local_path(url)
    if path is not None:
        return LocalFiles(root=path, gitignore=gitignore)
    from .remote import RemoteFiles  # it imports this module, and a local store must not load it

    return RemoteFiles(url=url, storage=storage, moving=moving)


def parallel(work: Callable[[T], R], items: Sequence[T], *, jobs: int = 8) -> list[R]:
    """Return ``work`` of each item, in order, ``jobs`` at a time. Raises the first failure, and starts no more."""
    if len(items) < 2:
        return [work(item) for item in items]
    todo, failures = collections.deque(enumerate(items)), list[BaseException]()
    done: dict[int, R] = {}

    def some(over: threading.Event) -> None:
        while True:
            try:
                number, item = todo.popleft()
            except IndexError:
                over.set()
                return
            try:
                done[number] = work(item)
            except BaseException as exc:  # noqa: BLE001 - the caller raises it
                failures.append(exc)
                todo.clear()

    # Not `concurrent.futures`: importing it takes longer than reading some records.
    # Not `join`: up to Python 3.12, one that Ctrl-C interrupts takes its thread for ended.
    overs = [threading.Event() for _ in range(min(jobs, len(items)))]
    threads = {over: threading.Thread(target=some, args=(over,)) for over in overs}
    try:
        for thread in threads.values():
            thread.start()
        for over in threads:
            over.wait()
    finally:
        todo.clear()  # after Ctrl-C, start no more
        for over in [over for over, thread in threads.items() if thread.ident is not None]:
            over.wait()
    if failures:
        raise failures[0]
    return [done[number] for number in range(len(items))]


def report_to(progress: Progress | None, key: str) -> Callable[[int], None]:
    """Return a function that takes the number of further bytes of ``key``, for ``progress`` or for nothing."""
    return (lambda n: progress(key, n)) if progress else (lambda _: None)


# --------------------------------------------------------------------------------------------------------- local folder

#: Errors of ``link`` on file systems without hard links.
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV, errno.EACCES}


class LocalFiles(Files):
    """A local folder as `Files`; it need not exist yet."""

    def __init__(self, *, root: Path, gitignore: bool = False) -> None:
        self.root = Path(os.path.abspath(root))
        self._gitignore = gitignore

    @property
    def url(self) -> str:
        return normalize(str(self.root), cwd=self.root)

    def _path(self, key: str) -> Path:
        return self.root.joinpath(*parts_of(key))

    def _writable(self, key: str) -> Path:
        if self._gitignore:
            self._gitignore = False
            if not self.root.is_dir() or not any(self.root.iterdir()):
                self.write(".gitignore", b"*\n")
        return self._path(key)

    def read(self, key: str) -> bytes:
        path = self._path(key)
        with disk_errors(path):
            return path.read_bytes()

    def write(self, key: str, data: bytes) -> None:
        path = self._writable(key)
        with disk_errors(path):
            put(path, data)

    def create(self, key: str, data: bytes, *, private: bool = False) -> bool:
        path = self._writable(key)
        mode = 0o600 if private else 0o666
        with disk_errors(path), temp_file(path, mode=mode) as temp:
            temp.write_bytes(data)
            sync(temp)
            created = self._link_or_open(temp, path, mode)
            sync_folder(path.parent)
            return created

    def _link_or_open(self, temp: Path, path: Path, mode: int) -> bool:
        """Give ``temp`` the name ``path`` unless it is taken."""
        try:
            os.link(temp, path)
            return True
        except FileExistsError:
            return False
        except OSError as exc:
            if exc.errno not in _NO_LINKS:
                raise
        # Without hard links the name can be taken exclusively, but a crash in these lines leaves a partial file.
        try:
            descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | getattr(os, "O_BINARY", 0), mode)
        except FileExistsError:
            return False
        try:
            with os.fdopen(descriptor, "wb") as out:
                out.write(temp.read_bytes())
                out.flush()
                os.fsync(out.fileno())
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        return True

    def load(self, key: str) -> Loaded | None:
        path = self._path(key)
        with disk_errors(path):
            try:
                with open(path, "rb") as stream:
                    data, modified = stream.read(), os.fstat(stream.fileno()).st_mtime
            except (FileNotFoundError, NotADirectoryError):
                return None
        return Loaded(data, hashlib.sha256(data).hexdigest(), modified)

    def swap(self, key: str, version: str | None, data: bytes) -> str:
        path = self._writable(key)
        with disk_errors(path), hold_lock(path.with_name(f"{TEMP}lock")):
            found = self.load(key)
            if same := (found.version if found else None) == version:
                put(path, data)
        if not same:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
        return hashlib.sha256(data).hexdigest()

    def size(self, key: str) -> int | None:
        path = self._path(key)
        with disk_errors(path):
            try:
                return path.stat().st_size if path.is_file() else None
            except FileNotFoundError:
                return None

    def entries(self, prefix: str = "") -> dict[str, Entry]:
        found: dict[str, Entry] = {}
        self._scan(self._path(prefix), f"{prefix}/" if prefix else "", found)
        return dict(sorted(found.items()))

    def _scan(self, folder: Path, prefix: str, found: dict[str, Entry]) -> None:
        with (
            disk_errors(folder),
            contextlib.suppress(FileNotFoundError, NotADirectoryError),
            os.scandir(folder) as items,
        ):
            for item in items:
                if item.is_dir(follow_symlinks=False):
                    self._scan(Path(item.path), f"{prefix}{item.name}/", found)
                elif item.is_file(follow_symlinks=False) and not item.name.startswith(TEMP):
                    with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                        status = item.stat(follow_symlinks=False)
                        version = f"{status.st_mtime_ns}-{status.st_ino}"
                        found[prefix + item.name] = Entry(status.st_size, version, status.st_mtime)

    def names(self, prefix: str = "") -> Names:
        path = self._path(prefix)
        with disk_errors(path), contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return sorted(name for name in os.listdir(path) if not name.startswith(TEMP))
        return []

    def upload(self, path: Path, key: str, *, progress: Progress | None = None) -> None:
        self._copy(path, self._writable(key), report_to(progress, key))

    def download(
        self,
        key: str,
        path: Path,
        *,
        sha256: str | None = None,
        size: int | None = None,
        progress: Progress | None = None,
    ) -> None:
        self._copy(self._path(key), path, report_to(progress, key), lambda temp: verify(temp, key, sha256, size))

    def pieces(self, key: str, size: int) -> Generator[bytes, None, None]:
        path, count = self._path(key), 0
        with disk_errors(path), open(path, "rb") as stream:
            while data := stream.read(PIECE):
                count += len(data)
                yield data
        if count != size:
            raise StorageError(f"{path} changed while it was read: {count} bytes instead of {size}")

    def receive(self, key: str, size: int, pieces: Callable[[], Generator[bytes, None, None]]) -> None:
        path = self._writable(key)
        with contextlib.closing(pieces()) as source, disk_errors(path), temp_file(path) as temp:
            with open(temp, "wb") as out:
                for piece in source:
                    out.write(piece)
            verify(temp, key, None, size)
            make_durable(temp, path)

    @property
    def copies(self) -> bool:
        return True

    def copy(self, source: str, target: str) -> None:
        self._copy(self._path(source), self._writable(target), lambda _: None)

    def _copy(
        self,
        source: Path,
        target: Path,
        report: Callable[[int], None],
        check: Callable[[Path], None] = lambda _: None,
    ) -> None:
        with disk_errors(target):
            source.stat()
            with temp_file(target) as temp:
                copy_file(source, temp, report)
                check(temp)
                make_durable(temp, target)

    def remove(self, prefix: str) -> None:
        if not prefix:
            raise StorageError(f"{self.root}: cloudtrain never removes a whole store")
        path = self._path(prefix)
        with disk_errors(path), contextlib.suppress(FileNotFoundError, NotADirectoryError):
            if path.is_dir() and not path.is_symlink():
                import shutil  # it loads every kind of compression

                shutil.rmtree(path)
            else:
                path.unlink()

    def discard(self, keys: Sequence[str]) -> None:
        for key in keys:
            path = self._path(key)
            with disk_errors(path), contextlib.suppress(FileNotFoundError, NotADirectoryError):
                path.unlink()

    def prune(self, prefix: str) -> None:
        top = self._path(prefix)
        if top.is_symlink():
            return
        for folder, _, _ in os.walk(top, topdown=False):
            with contextlib.suppress(OSError):
                os.rmdir(folder)
