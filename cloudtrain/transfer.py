"""Bytes in and out of one URL tree: a local folder, or whatever fsspec can reach.

`files` gives a `Files` for a URL. Keys are ``/``-separated paths below that URL, ``""`` the URL itself. A local tree
never imports fsspec. Retries and the one table that turns a back end's exceptions into cloudtrain's are in `faults`.

Every method raises `AuthError` (missing, expired or refused credentials) and `StorageError` (anything else). Methods
that read one key raise the builtin `FileNotFoundError` when it is not there: often that is an answer, not a failure.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import hashlib
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol, TypeVar

from .errors import DigestError, SpecError, StorageError
from .values import url_scheme

__all__ = [
    "Entry",
    "Files",
    "LocalFiles",
    "Moving",
    "Names",
    "Progress",
    "Storage",
    "files",
    "inside",
    "local_path",
    "normalize",
    "parallel",
    "safe",
    "scan",
    "sha256_file",
    "walk",
]

#: Called with the key and how many more bytes of it have moved; from several threads.
Progress = Callable[[str, int], None]
#: Options with which fsspec opens a URL: whose credentials, which region. None of them: fsspec's own.
Storage = Callable[[str], Mapping[str, Any]]
#: Keys or paths, sorted. (`Files.list` hides the builtin name.)
Names = list[str]

T = TypeVar("T")
R = TypeVar("R")

TEMP = ".cloudtrain-tmp-"
_CHUNK = 1 << 20
_DRIVE = re.compile(r"[A-Za-z]:")
_SLASHED_DRIVE = re.compile(r"/[A-Za-z]:(/|$)")


class Entry(NamedTuple):
    """One stored file: ``size`` in bytes, ``version``, which differs whenever the content was written anew, and when.

    ``modified`` is in Unix seconds of the store's clock; 0 of a store whose listings do not tell.
    """

    size: int
    version: str
    modified: float


class Moving(NamedTuple):
    """How bytes move: by which library, how many files at a time, and how S3 encrypts what is written."""

    mover: str = "auto"
    sse: str = ""
    sse_kms_key_id: str = ""
    concurrency: int = 8


class Files(Protocol):
    """The files below one URL."""

    @property
    def url(self) -> str:
        """The root, as `normalize` gives it."""

    @property
    def mover(self) -> str:
        """What moves the bytes: ``fsspec``, ``obstore``; nothing of a local folder."""

    def read(self, key: str) -> bytes:
        """The content. FileNotFoundError when there is none."""

    def write(self, key: str, data: bytes) -> None:
        """Replace the content: a reader sees the old, the new or none, never a part."""

    def create(self, key: str, data: bytes, *, private: bool = False) -> bool:
        """Write only if there is nothing yet: True for exactly one of any number of callers, who wrote it whole.

        ``private``: readable by this user alone, where the tree is a local one. Over a network the winner's answer can
        be lost, and a retry inside a client library then finds its own object: False, to the one who wrote it. A caller
        to whom that matters puts a word of its own into ``data`` and reads back. (obstore tells them apart.)
        """

    def size(self, key: str) -> int | None:
        """Bytes, or None when there is no such file (a folder is none)."""

    def exists(self, key: str) -> bool:
        """Whether there is such a file."""

    def entries(self, prefix: str = "") -> dict[str, Entry]:
        """Every file below ``prefix``, at any depth, by key; sorted. Without symbolic links and unfinished files."""

    def list(self, prefix: str = "") -> dict[str, int]:
        """`entries`, sizes only."""

    def names(self, prefix: str = "") -> Names:
        """Files and folders immediately below ``prefix``; sorted, empty when there is no such folder."""

    def upload(self, path: Path, key: str, *, progress: Progress | None = None) -> None:
        """Store the local file ``path`` whole. FileNotFoundError when ``path`` does not exist."""

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

        FileNotFoundError when there is no such key, `DigestError` when the bytes are not the promised ones.
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
        """Fetch every file below ``prefix`` into ``folder``; their paths, relative to both, sorted.

        ``select`` says which of them; ``digests`` are SHA-256 by relative path: those are verified, and not fetched
        again when already there. Nothing is fetched when any path would leave ``folder`` (`StorageError`).
        """

    def upload_tree(self, folder: Path, prefix: str, *, jobs: int = 8, progress: Progress | None = None) -> Names:
        """Store every file of ``folder`` below ``prefix``; their keys, sorted. Symbolic links are followed."""

    @property
    def copies(self) -> bool:
        """Whether `copy` moves no bytes through this machine."""

    def copy(self, source: str, target: str) -> None:
        """Copy inside the tree, done when it returns. FileNotFoundError when there is no ``source``."""

    def remove(self, prefix: str) -> None:
        """Remove the file or folder, if it is there. The root itself is refused (`StorageError`)."""


def files(
    url: str,
    *,
    gitignore: bool = False,
    storage: Storage | None = None,
    moving: Moving = Moving(),  # noqa: B008 - it is frozen
) -> Files:
    """The tree at ``url``; opens nothing yet. ``gitignore``: a local root hides itself from git once written to.

    ``storage`` is asked for fsspec's options when a remote tree is opened, and again when its credentials have expired.
    """
    path = local_path(url)
    if path is not None:
        return LocalFiles(root=path, gitignore=gitignore)
    from .remote import RemoteFiles  # it stands on this module, and a local store must not load it

    return RemoteFiles(url=url, storage=storage, moving=moving)


# ------------------------------------------------------------------------------------------------------ URLs and paths


def normalize(url: str, *, cwd: Path) -> str:
    """``url`` in the one form used everywhere: no trailing slash, lower-case scheme, local paths as ``file:///abs/path``.

    A path is made absolute against ``cwd`` but symbolic links stay; characters are kept as they are, not %-coded, which
    is how fsspec reads file URLs. Raises `SpecError` for a remote URL without a bucket, or a file URL with a host.
    """
    scheme = url_scheme(url)
    if scheme in ("", "file"):
        path = os.path.abspath(cwd / os.path.expanduser(_file_part(url))).replace(os.sep, "/")
        return "file://" + (path if path.startswith("/") else f"/{path}")
    rest = url[len(scheme) + 1 :].rstrip("/")
    if rest.strip("/") == "":
        raise SpecError(f"{url!r} names no bucket or folder", field="store")
    return f"{scheme}:{rest}"


def local_path(url: str) -> Path | None:
    """The path of a file URL or plain path; None for any other URL."""
    return Path(_file_part(url)) if url_scheme(url) in ("", "file") else None


def _file_part(url: str) -> str:
    if url_scheme(url) == "":
        return url
    rest = url[len("file:") :]
    if rest.startswith("//"):
        host, slash, tail = rest[2:].partition("/")
        if host not in ("", "localhost"):
            raise SpecError(f"{url!r} names a host; write file:///path", field="store")
        rest = slash + tail
    return rest[1:] if _SLASHED_DRIVE.match(rest) else rest


def parts_of(key: str) -> list[str]:
    """``key`` split; `StorageError` for one that could mean another place on some system."""
    parts = key.split("/") if key else []
    if "\\" in key or "\0" in key or _DRIVE.match(key) or any(part in ("", ".", "..") for part in parts):
        raise StorageError(f"unsafe path {key!r}")
    return parts


def safe(key: str) -> bool:
    """Whether ``key`` is one that `Files` and `inside` take, on every system."""
    try:
        return bool(parts_of(key))
    except StorageError:
        return False


def inside(folder: Path, key: str) -> Path:
    """The path of ``key`` in ``folder``; `StorageError` when it would lie, or lead through a symbolic link, outside."""
    parts = parts_of(key)
    if not parts:
        raise StorageError("unsafe path ''")
    path = folder.joinpath(*parts)
    root, parent = os.path.realpath(folder), os.path.realpath(path.parent)
    if parent != root and not parent.startswith(root.rstrip(os.sep) + os.sep):
        raise StorageError(f"{path} leads outside {folder} through a symbolic link")
    return path


def walk(folder: Path) -> dict[str, Path]:
    """Every file of a local folder by its ``/``-separated relative path, sorted; symbolic links are followed.

    A ``folder`` that is a file is found under its own name. Raises `StorageError` for a link that dangles or leads in a
    circle, a special file, or a name no store can carry."""
    if folder.is_file():
        _check_name(folder.name)
        return {folder.name: folder}
    return {key: Path(item.path) for key, item in scan(folder).items()}


def scan(folder: Path) -> dict[str, os.DirEntry[str]]:
    """`walk` of a folder, as the system lists it: a `Path` of each costs as much as all the rest."""
    found: dict[str, os.DirEntry[str]] = {}
    _walk(folder, "", (), found)
    return dict(sorted(found.items()))


def _walk(folder: Path, prefix: str, above: tuple[tuple[int, int], ...], found: dict[str, os.DirEntry[str]]) -> None:
    with disk_errors(folder):
        status = folder.stat()
        here = (status.st_dev, status.st_ino)
        if here in above and status.st_ino:
            raise StorageError(f"{folder}: symbolic links lead in a circle")
        for item in list(os.scandir(folder)):
            key = prefix + item.name
            if item.is_dir():
                _walk(Path(item.path), key + "/", (*above, here), found)
            elif item.is_file():
                _check_name(key)
                found[key] = item
            else:
                raise StorageError(f"{item.path}: neither a file nor a folder, but a dangling link or a device")


def _check_name(key: str) -> None:
    parts_of(key)
    try:
        key.encode()
    except UnicodeEncodeError:
        raise StorageError(f"{key!r}: the name is not UTF-8") from None


def sha256_file(path: Path) -> str:
    """SHA-256 of a local file, in hex. `StorageError` when it cannot be read."""
    digest = hashlib.sha256()
    with disk_errors(path), open(path, "rb") as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def parallel(work: Callable[[T], R], items: Sequence[T], *, jobs: int = 8) -> list[R]:
    """``work`` of each item, in order, ``jobs`` at a time. A failure stops what has not begun, and is raised."""
    if len(items) < 2:
        return [work(item) for item in items]
    with concurrent.futures.ThreadPoolExecutor(max_workers=jobs) as pool:
        futures = [pool.submit(work, item) for item in items]
        try:
            done, _ = concurrent.futures.wait(futures, return_when=concurrent.futures.FIRST_EXCEPTION)
            for future in done:
                future.result()
            return [future.result() for future in futures]
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


# ----------------------------------------------------------------------------------------- whole files on a local disk


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """A local failure as `StorageError` with path and reason; FileNotFoundError passes."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as exc:
        named = exc.filename if exc.filename and TEMP not in str(exc.filename) else path
        raise StorageError(f"{named}: {exc.strerror or exc}") from exc


@contextlib.contextmanager
def temp_file(path: Path, *, mode: int = 0o666) -> Iterator[Path]:
    """A new empty file beside ``path`` (its folder is made), gone at the end unless renamed."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except FileNotFoundError as exc:  # a place where nothing can be made, /proc for one
        raise StorageError(f"{path.parent}: {exc.strerror}") from None
    temp = path.with_name(TEMP + secrets.token_hex(8))
    os.close(os.open(temp, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode))
    try:
        yield temp
    finally:
        temp.unlink(missing_ok=True)


def settle(temp: Path, path: Path) -> None:
    """Make ``temp`` durable under the name ``path``."""
    _sync(temp)
    os.replace(temp, path)
    _sync_folder(path.parent)


def _sync(path: Path) -> None:
    with open(path, "rb+") as stream:
        os.fsync(stream.fileno())


def _sync_folder(folder: Path) -> None:
    if os.name == "nt":
        return  # a folder cannot be opened there
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as exc:
        if exc.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems know no such thing
            raise
    finally:
        os.close(descriptor)


def _pour(source: BinaryIO, target: BinaryIO, report: Callable[[int], None]) -> None:
    while chunk := source.read(_CHUNK):
        target.write(chunk)
        report(len(chunk))


def _copy_file(source: Path, target: Path, report: Callable[[int], None]) -> None:
    with open(source, "rb") as stream, open(target, "wb") as out:
        _pour(stream, out, report)


def verify(path: Path, key: str, sha256: str | None, size: int | None) -> None:
    got = path.stat().st_size
    if size is not None and got != size:
        raise DigestError(f"{key}: {got} bytes, not the {size} promised")
    if sha256 is not None and (digest := sha256_file(path)) != sha256:
        raise DigestError(f"{key}: sha256 is {digest}, not the {sha256} promised")


def _same(path: Path, size: int, sha256: str | None) -> bool:
    there = sha256 is not None and not path.is_symlink() and path.is_file() and path.stat().st_size == size
    return there and sha256_file(path) == sha256


def report_to(progress: Progress | None, key: str) -> Callable[[int], None]:
    return (lambda n: progress(key, n)) if progress else (lambda _: None)


# --------------------------------------------------------------------------------------------- what both trees do alike


class Trees:
    """The methods of `Files` that are made of its others."""

    def list(self: Files, prefix: str = "") -> dict[str, int]:
        return {key: entry.size for key, entry in self.entries(prefix).items()}

    def exists(self: Files, key: str) -> bool:
        return self.size(key) is not None

    def download_tree(
        self: Files,
        prefix: str,
        folder: Path,
        *,
        jobs: int = 8,
        select: Callable[[str], bool] | None = None,
        digests: Mapping[str, str] | None = None,
        progress: Progress | None = None,
    ) -> Names:
        cut = len(prefix) + 1 if prefix else 0
        sizes = {key[cut:]: size for key, size in self.list(prefix).items()}
        wanted = {name: inside(folder, name) for name in sizes if select is None or select(name)}

        def fetch(name: str) -> None:
            digest = (digests or {}).get(name)
            with disk_errors(wanted[name]):
                if _same(wanted[name], sizes[name], digest):
                    return
            key = f"{prefix}/{name}" if prefix else name
            self.download(key, wanted[name], sha256=digest, size=sizes[name], progress=progress)

        parallel(fetch, list(wanted), jobs=jobs)
        return sorted(wanted)

    def upload_tree(
        self: Files, folder: Path, prefix: str, *, jobs: int = 8, progress: Progress | None = None
    ) -> Names:
        paths = {(f"{prefix}/{name}" if prefix else name): path for name, path in walk(folder).items()}
        parallel(lambda key: self.upload(paths[key], key, progress=progress), list(paths), jobs=jobs)
        return sorted(paths)


# --------------------------------------------------------------------------------------------------------- local folder

#: What ``link`` answers on file systems without hard links.
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV, errno.EACCES}


class LocalFiles(Trees):
    """`Files` of a local folder, which need not exist yet."""

    mover = ""

    def __init__(self, *, root: Path, gitignore: bool = False, link: Callable[[Path, Path], None] = os.link) -> None:
        self.root = Path(os.path.abspath(root))
        self._gitignore = gitignore
        self._link = link

    @property
    def url(self) -> str:
        return normalize(str(self.root), cwd=self.root)

    def _path(self, key: str) -> Path:
        return self.root.joinpath(*parts_of(key))

    def _writable(self, key: str) -> Path:
        if self._gitignore:
            self._gitignore = False
            if not self.exists(".gitignore"):
                self.write(".gitignore", b"*\n")
        return self._path(key)

    def read(self, key: str) -> bytes:
        path = self._path(key)
        with disk_errors(path):
            return path.read_bytes()

    def write(self, key: str, data: bytes) -> None:
        path = self._writable(key)
        with disk_errors(path), temp_file(path) as temp:
            temp.write_bytes(data)
            settle(temp, path)

    def create(self, key: str, data: bytes, *, private: bool = False) -> bool:
        path = self._writable(key)
        mode = 0o600 if private else 0o666
        with disk_errors(path), temp_file(path, mode=mode) as temp:
            temp.write_bytes(data)
            _sync(temp)
            created = self._link_or_open(temp, path, mode)
            _sync_folder(path.parent)
            return created

    def _link_or_open(self, temp: Path, path: Path, mode: int) -> bool:
        """Give ``temp`` the name ``path`` unless it is taken."""
        try:
            self._link(temp, path)
            return True
        except FileExistsError:
            return False
        except OSError as exc:
            if exc.errno not in _NO_LINKS:
                raise
        # Without hard links the name can be taken exclusively, but a crash in these lines leaves it with a part.
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
                    with contextlib.suppress(FileNotFoundError):  # removed while we look
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
                _copy_file(source, temp, report)
                check(temp)
                settle(temp, target)

    def remove(self, prefix: str) -> None:
        if not prefix:
            raise StorageError(f"{self.root}: the whole store is not removed")
        path = self._path(prefix)
        with disk_errors(path), contextlib.suppress(FileNotFoundError, NotADirectoryError):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
