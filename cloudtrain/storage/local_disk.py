"""Handle URLs, paths and names, and write whole files to a local disk. Standard library only; knows no stores."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import os
import re
import secrets
import stat
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from ..errors import DigestError, SpecError, StorageError
from ..validate import text_of, url_scheme

SHOWN = 300
"""Characters of a path in a message; the middle of a longer path is left out."""
TEMP = ".cloudtrain-tmp-"
#: Parts of a temporary file's name after `TEMP`; the process id stands between them, as many may share a folder.
_HERE, _NUMBERS = secrets.token_hex(8), itertools.count()
_CHUNK = 1 << 20
_DRIVE = re.compile(r"[A-Za-z]:")
_PLAIN = re.compile(r"\w[\w. -]*(/\w[\w. -]*)*", re.ASCII)
"""Paths that `parts_of` accepts and UTF-8 can encode: a quick test for most paths."""
_LONGEST_NAME = 255
"""Bytes, on most file systems."""
_DEVICE = re.compile(r"(con|prn|aux|nul|conin\$|conout\$|(com|lpt)[0-9\u00b9\u00b2\u00b3])( *\..*)?", re.IGNORECASE)
_FORBIDDEN = re.compile(r'[<>:"|?*\x00-\x1f]')
"""Windows' reserved names, which open a device in any folder, and forbidden characters (":" opens a stream)."""
_SLASHED_DRIVE = re.compile(r"/[A-Za-z]:(/|$)")


# ------------------------------------------------------------------------------------------------------ URLs and paths


def normalize(url: str, *, cwd: Path) -> str:
    """Return ``url`` in canonical form: no trailing slash, lower-case scheme, local paths as ``file:///abs/path``.

    A path is made absolute against ``cwd``; its symbolic links stay. Characters are not %-coded, as fsspec reads file
    URLs. Raises `SpecError` for a remote URL without a bucket, or a file URL with a host.
    """
    scheme = url_scheme(text_of(url, "store", empty=True))
    if "://" in url and not scheme:
        raise SpecError(f"{url!r} is not a URL", field="store", hint="write SCHEME://BUCKET/PATH, or a folder")
    if scheme in ("", "file"):
        path = os.path.abspath(cwd / os.path.expanduser(_file_part(url))).replace(os.sep, "/")
        return "file://" + (path if path.startswith("/") else f"/{path}")
    rest = url[len(scheme) + 1 :].rstrip("/")
    if rest.strip("/") == "":
        raise SpecError(f"{url!r} names no bucket or folder", field="store", hint=f"add it: {scheme}://BUCKET/PREFIX")
    return f"{scheme}:{rest}"


def local_path(url: str) -> Path | None:
    """Return the path of a file URL or plain path; None for any other URL."""
    return Path(_file_part(url)) if url_scheme(url) in ("", "file") else None


def cache_home(environ: Mapping[str, str], platform: str = sys.platform) -> Path:
    """Return cloudtrain's folder in this user's cache folder."""
    home = os.path.expanduser("~")
    if platform == "win32":
        place = environ.get("LOCALAPPDATA") or os.path.join(home, "AppData", "Local")
    elif platform == "darwin":
        place = os.path.join(home, "Library", "Caches")
    else:
        place = environ.get("XDG_CACHE_HOME", "")
        if not os.path.isabs(place):
            place = os.path.join(home, ".cache")
    return Path(place, "cloudtrain")


def _file_part(url: str) -> str:
    if url_scheme(url) == "":
        return url
    rest = url[len("file:") :]
    if rest.startswith("//"):
        host, slash, tail = rest[2:].partition("/")
        if host not in ("", "localhost"):
            raise SpecError(f"{url!r} names a host", field="store", hint="write file:///PATH")
        rest = slash + tail
    return rest[1:] if _SLASHED_DRIVE.match(rest) else rest


def parts_of(key: str) -> list[str]:
    """Split ``key``. Raises `StorageError` for a key that could mean another path on some system."""
    parts = key.split("/") if key else []
    if "\\" in key or "\0" in key or _DRIVE.match(key) or any(part in ("", ".", "..") for part in parts):
        raise StorageError(f"unsafe path {key!r}")
    return parts


def safe(key: str) -> bool:
    """Return whether `Files` and `inside` accept ``key`` on every system."""
    try:
        parts = parts_of(key)
    except StorageError:
        return False
    return bool(parts) and not any(_unnameable(part, os.name) for part in parts)


def _unnameable(part: str, system: str) -> bool:
    """Return whether ``system`` (`os.name`) allows no file of this name: too long, or reserved by Windows."""
    if len(part.encode("utf-8", "surrogatepass")) > _LONGEST_NAME:
        return True
    return system == "nt" and bool(_DEVICE.fullmatch(part) or part[-1:] in (" ", ".") or _FORBIDDEN.search(part))


def inside(folder: Path, key: str) -> Path:
    """Return the path of ``key`` in ``folder``. Raises `StorageError` if it is outside, even through a link."""
    parts = parts_of(key)
    if not parts:
        raise StorageError("unsafe path ''")
    if not safe(key):
        raise StorageError(f"unsafe path {key[:80]!r}: this system allows no such name")
    path = folder.joinpath(*parts)
    if _through_link(folder, parts[:-1]):
        root, parent = os.path.realpath(folder), os.path.realpath(path.parent)
        if parent != root and not parent.startswith(root.rstrip(os.sep) + os.sep):
            raise StorageError(f"{path} leads outside {folder} through a symbolic link")
    return path


def _through_link(folder: Path, parts: Sequence[str]) -> bool:
    """Return whether one of the nested folders ``parts`` may be a link; without links all paths are inside."""
    if os.name == "nt":
        return True  # folders there can lead elsewhere by other means than symbolic links
    at = os.fspath(folder)
    for part in parts:
        at = f"{at}/{part}"
        try:
            if stat.S_ISLNK(os.lstat(at).st_mode):
                return True
        except (FileNotFoundError, NotADirectoryError):
            return False  # nothing exists here or below
        except OSError:
            return True
    return False


def walk(folder: Path) -> dict[str, Path]:
    """Return all files of a local folder (or one file) by ``/``-separated relative path, sorted. Links are followed.

    Raises `StorageError` for a dangling or circular link, a special file, or a name no store can hold.
    """
    if folder.is_file():
        _check_name(folder.name)
        return {folder.name: folder}
    return {key: Path(item.path) for key, item in scan(folder).items()}


def scan(folder: Path) -> dict[str, os.DirEntry[str]]:
    """Return `walk` of a folder as directory entries: a `Path` for each costs as much as all the rest."""
    found: dict[str, os.DirEntry[str]] = {}
    _walk(folder, "", (), found)
    return dict(sorted(found.items()))


def _walk(folder: Path, prefix: str, above: tuple[tuple[int, int], ...], found: dict[str, os.DirEntry[str]]) -> None:
    with disk_errors(folder):
        status = folder.stat()
        here = (status.st_dev, status.st_ino)
        if here in above and status.st_ino:
            raise StorageError(f"{folder}: symbolic links lead in a circle")
        with os.scandir(folder) as listing:
            items = list(listing)  # close the listing before the next level
        for item in items:
            key = prefix + item.name
            if item.is_dir():
                _walk(Path(item.path), key + "/", (*above, here), found)
            elif item.is_file():
                _check_name(key)
                found[key] = item
            else:
                raise StorageError(f"{item.path} is a broken link or a device, not a file or folder")


def _check_name(key: str) -> None:
    if _PLAIN.fullmatch(key):
        return
    parts_of(key)
    try:
        key.encode()
    except UnicodeEncodeError:
        raise StorageError(f"{key!r}: the name is not UTF-8") from None


def sha256_file(path: Path) -> str:
    """Return the SHA-256 of a local file, in hex. Raises `StorageError` if it cannot be read."""
    digest = hashlib.sha256()
    with disk_errors(path), open(path, "rb") as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


# ----------------------------------------------------------------------------------------- whole files on a local disk


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Raise a local failure as `StorageError` with path and reason; FileNotFoundError passes."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as exc:
        named = exc.filename if exc.filename and TEMP not in str(exc.filename) else path
        text = str(named)
        shown = text if len(text) <= SHOWN else f"{text[: SHOWN // 3]}…{text[-SHOWN // 2 :]}"
        raise StorageError(f"{shown}: {exc.strerror or exc}") from exc


@contextlib.contextmanager
def temp_file(path: Path, *, mode: int = 0o666) -> Iterator[Path]:
    """Yield a new empty file in ``path``'s folder, which is created; the file is deleted at the end unless renamed."""
    temp, descriptor = _open_temp(path, mode)
    os.close(descriptor)
    try:
        yield temp
    finally:
        temp.unlink(missing_ok=True)


def _open_temp(path: Path, mode: int) -> tuple[Path, int]:
    temp = path.with_name(f"{TEMP}{_HERE}-{os.getpid():x}-{next(_NUMBERS):x}")
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | getattr(os, "O_BINARY", 0)
    try:
        return temp, os.open(temp, flags, mode)
    except FileExistsError:  # a forked process was killed, and its process id is in use again
        temp = path.with_name(TEMP + secrets.token_hex(16))
    except (FileNotFoundError, NotADirectoryError):
        pass  # mostly the folder exists, and this costs nothing then
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return temp, os.open(temp, flags, mode)
    except FileNotFoundError:  # a folder such as /proc, which takes no files
        raise StorageError(f"{path.parent}: cannot create a file there", hint="choose another folder") from None


def put(path: Path, data: bytes | memoryview, *, name: bool = True) -> None:
    """Write ``data`` durably and atomically to ``path``; ``name`` as in `make_durable`.

    Uses a third of the system calls of `temp_file` and `make_durable`: they are the main cost of small files.
    """
    temp, descriptor = _open_temp(path, 0o666)
    try:
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(descriptor, rest) :]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(temp, path)
    except BaseException:
        temp.unlink(missing_ok=True)
        raise
    if name:
        sync_folder(path.parent)


def make_durable(temp: Path, path: Path, *, name: bool = True) -> None:
    """Make ``temp`` durable under the name ``path``. Without ``name``, a crash may restore the earlier file."""
    sync(temp)
    os.replace(temp, path)
    if name:
        sync_folder(path.parent)


@contextlib.contextmanager
def hold_lock(path: Path, *, seconds: float = 60.0) -> Iterator[None]:
    """Hold a lock for a moment, by the file ``path``, which is removed again. It ends with the process that holds it.

    Raises `StorageError` if it is not free within ``seconds``, or if the file system has no locks.
    """
    until = time.monotonic() + seconds
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as opened:
            if _is_locked(path, opened):
                try:
                    yield
                finally:
                    with contextlib.suppress(OSError):  # Windows removes no open file
                        path.unlink()
                return
        if time.monotonic() > until:
            raise StorageError(f"{path.parent}: another process has locked it for {seconds:.0f} s")
        time.sleep(0.01)


def _is_locked(path: Path, opened: contextlib.ExitStack) -> bool:
    """Open and lock the file, which ``opened`` closes; return False if another holder has locked or removed it."""
    with contextlib.suppress(FileNotFoundError):
        descriptor = opened.enter_context(open(path, "ab")).fileno()  # noqa: SIM115 - the caller closes it
        # The last holder has removed its file, so the file that we locked may have no name any more.
        return _lock(descriptor, path.parent) and os.path.samestat(os.fstat(descriptor), path.stat())
    return False


def _lock(descriptor: int, folder: Path) -> bool:
    """Lock an open file; return False if another holder has locked it."""
    try:
        if sys.platform == "win32":
            import msvcrt

            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError as exc:
        hint = "choose a folder on another file system, or mount it with locks"
        raise StorageError(f"{folder}: the file system has no locks: {exc.strerror}", hint=hint) from exc
    return True


def sync(path: Path) -> None:
    """Wait until the content of a file is on the disk."""
    with open(path, "rb+") as stream:
        os.fsync(stream.fileno())


def write_back(descriptor: int, start: int, end: int) -> None:
    """Start writing these bytes to the disk, so that `sync` waits less. Best effort."""
    if sys.platform == "linux" and end > start:
        with contextlib.suppress(OSError):
            # The advice drops no bytes that are still to be written.
            os.posix_fadvise(descriptor, start, end - start, os.POSIX_FADV_DONTNEED)


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    if os.name == "nt":
        return  # Windows cannot open a folder
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as exc:
        if exc.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems lack it
            raise
    finally:
        os.close(descriptor)


def copy_file(source: Path, target: Path, report: Callable[[int], None]) -> None:
    """Copy the bytes of a file. ``report`` takes the number of each part."""
    with open(source, "rb") as stream, open(target, "wb") as out:
        while chunk := stream.read(_CHUNK):
            out.write(chunk)
            report(len(chunk))


def verify(path: Path, key: str, sha256: str | None, size: int | None) -> None:
    """Raise `DigestError` unless the file has the expected ``size`` and ``sha256``, where given."""
    check_promise(key, path.stat().st_size, lambda: sha256_file(path), sha256, size)


def check_promise(key: str, got: int, digest: Callable[[], str], sha256: str | None, size: int | None) -> None:
    """Check a size and a digest as `verify` does; ``digest`` is called only if one is expected."""
    if size is not None and got != size:
        raise DigestError(f"{key} has {got} bytes instead of {size}")
    if sha256 is not None and (found := digest()) != sha256:
        raise DigestError(f"{key} has SHA-256 {found} instead of {sha256}")


def is_same(path: Path, size: int, sha256: str | None) -> bool:
    """Return whether ``path`` is a regular file with this size and digest. False without a digest."""
    there = sha256 is not None and not path.is_symlink() and path.is_file() and path.stat().st_size == size
    return there and sha256_file(path) == sha256
