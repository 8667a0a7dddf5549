"""URLs, paths and names; whole files on a local disk. Standard library alone, and nothing of stores."""

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from ..errors import DigestError, SpecError, StorageError
from ..validate import url_scheme

__all__ = [
    "TEMP",
    "cache_home",
    "disk_errors",
    "inside",
    "local_path",
    "normalize",
    "parts_of",
    "put",
    "safe",
    "scan",
    "settle",
    "sha256_file",
    "temp_file",
    "verify",
    "walk",
    "write_back",
]

SHOWN = 300
"""Characters of a path in a message; of a longer one the middle is left out."""
TEMP = ".cloudtrain-tmp-"
#: What a temporary file is called behind that, with the process in between: a folder may be shared by many.
_HERE, _NUMBERS = secrets.token_hex(8), itertools.count()
_CHUNK = 1 << 20
_DRIVE = re.compile(r"[A-Za-z]:")
_PLAIN = re.compile(r"\w[\w. -]*(/\w[\w. -]*)*", re.ASCII)
"""Most paths: those that `parts_of` takes and UTF-8 can write, told by one look."""
_LONGEST_NAME = 255
"""Bytes, of most file systems."""
_DEVICE = re.compile(r"(con|prn|aux|nul|conin\$|conout\$|(com|lpt)[0-9\u00b9\u00b2\u00b3])( *\..*)?", re.IGNORECASE)
_FORBIDDEN = re.compile(r'[<>:"|?*\x00-\x1f]')
"""Windows' own words: what opens a device in whatever folder, and what no name there may hold (":" is a stream)."""
_SLASHED_DRIVE = re.compile(r"/[A-Za-z]:(/|$)")


# ------------------------------------------------------------------------------------------------------ URLs and paths


def normalize(url: str, *, cwd: Path) -> str:
    """``url`` in the one form used everywhere: no trailing slash, lower-case scheme, local paths as ``file:///abs/path``.

    A path is made absolute against ``cwd`` but symbolic links stay; characters are kept as they are, not %-coded, which
    is how fsspec reads file URLs. Raises `SpecError` for a remote URL without a bucket, or a file URL with a host.
    """
    scheme = url_scheme(url)
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
    """The path of a file URL or plain path; None for any other URL."""
    return Path(_file_part(url)) if url_scheme(url) in ("", "file") else None


def cache_home(environ: Mapping[str, str], platform: str = sys.platform) -> Path:
    """Where this user's programs keep what can be made again; ours."""
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
        parts = parts_of(key)
    except StorageError:
        return False
    return bool(parts) and not any(_unnameable(part, os.name) for part in parts)


def _unnameable(part: str, system: str) -> bool:
    """Whether no file of a ``system`` (`os.name`) can be called so: too long, or Windows means something else by it."""
    if len(part.encode("utf-8", "surrogatepass")) > _LONGEST_NAME:
        return True
    return system == "nt" and bool(_DEVICE.fullmatch(part) or part[-1:] in (" ", ".") or _FORBIDDEN.search(part))


def inside(folder: Path, key: str) -> Path:
    """The path of ``key`` in ``folder``; `StorageError` when it would lie, or lead through a symbolic link, outside."""
    parts = parts_of(key)
    if not parts:
        raise StorageError("unsafe path ''")
    if not safe(key):
        raise StorageError(f"unsafe path {key[:80]!r}: no file here can be called so")
    path = folder.joinpath(*parts)
    if _through_link(folder, parts[:-1]):
        root, parent = os.path.realpath(folder), os.path.realpath(path.parent)
        if parent != root and not parent.startswith(root.rstrip(os.sep) + os.sep):
            raise StorageError(f"{path} leads outside {folder} through a symbolic link")
    return path


def _through_link(folder: Path, parts: Sequence[str]) -> bool:
    """Whether one of the folders ``parts``, each in the one before, may be a link: where none is, all lie inside."""
    if os.name == "nt":
        return True  # where a folder leads elsewhere in more ways than by a symbolic link
    at = os.fspath(folder)
    for part in parts:
        at = f"{at}/{part}"
        try:
            if stat.S_ISLNK(os.lstat(at).st_mode):
                return True
        except (FileNotFoundError, NotADirectoryError):
            return False  # nothing is there, and nothing below
        except OSError:
            return True
    return False


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
        with os.scandir(folder) as listing:
            items = list(listing)  # not one open listing for each level
        for item in items:
            key = prefix + item.name
            if item.is_dir():
                _walk(Path(item.path), key + "/", (*above, here), found)
            elif item.is_file():
                _check_name(key)
                found[key] = item
            else:
                raise StorageError(f"{item.path}: neither a file nor a folder, but a dangling link or a device")


def _check_name(key: str) -> None:
    if _PLAIN.fullmatch(key):
        return
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
        text = str(named)
        shown = text if len(text) <= SHOWN else f"{text[: SHOWN // 3]}…{text[-SHOWN // 2 :]}"
        raise StorageError(f"{shown}: {exc.strerror or exc}") from exc


@contextlib.contextmanager
def temp_file(path: Path, *, mode: int = 0o666) -> Iterator[Path]:
    """A new empty file beside ``path`` (its folder is made), gone at the end unless renamed."""
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
    except FileExistsError:  # one that was forked off and killed, under a number that comes again
        temp = path.with_name(TEMP + secrets.token_hex(16))
    except (FileNotFoundError, NotADirectoryError):
        pass  # its folder is there most often, and costs nothing then
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return temp, os.open(temp, flags, mode)
    except FileNotFoundError:  # a folder where no file can be made, such as /proc
        raise StorageError(f"{path.parent}: cannot create a file there", hint="choose another folder") from None


def put(path: Path, data: bytes | memoryview, *, name: bool = True) -> None:
    """Have ``data`` durable under the name ``path``, whole or not at all; ``name`` as `settle` has it.

    As `temp_file` and `settle`, by a third of their calls to the system: thousands of small files cost little else.
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


def settle(temp: Path, path: Path, *, name: bool = True) -> None:
    """Make ``temp`` durable under the name ``path``. Without ``name`` a crash may undo that: what was there is back."""
    sync(temp)
    os.replace(temp, path)
    if name:
        sync_folder(path.parent)


def sync(path: Path) -> None:
    with open(path, "rb+") as stream:
        os.fsync(stream.fileno())


def write_back(descriptor: int, start: int, end: int) -> None:
    """Have the system begin to write these bytes to the disk, so that `sync` has less to wait for. Promises nothing."""
    if sys.platform == "linux" and end > start:
        with contextlib.suppress(OSError):
            # Of what is still to be written it drops nothing.
            os.posix_fadvise(descriptor, start, end - start, os.POSIX_FADV_DONTNEED)


def sync_folder(folder: Path) -> None:
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


def copy_file(source: Path, target: Path, report: Callable[[int], None]) -> None:
    with open(source, "rb") as stream, open(target, "wb") as out:
        _pour(stream, out, report)


def verify(path: Path, key: str, sha256: str | None, size: int | None) -> None:
    """Raise `DigestError` unless the file has the ``size`` and ``sha256`` that were promised, where they were."""
    check_promise(key, path.stat().st_size, lambda: sha256_file(path), sha256, size)


def check_promise(key: str, got: int, digest: Callable[[], str], sha256: str | None, size: int | None) -> None:
    """`verify` of what has ``got`` bytes and a ``digest``, which is only asked for where one was promised."""
    if size is not None and got != size:
        raise DigestError(f"{key}: {got} bytes, not the {size} promised")
    if sha256 is not None and (found := digest()) != sha256:
        raise DigestError(f"{key}: sha256 is {found}, not the {sha256} promised")


def is_same(path: Path, size: int, sha256: str | None) -> bool:
    there = sha256 is not None and not path.is_symlink() and path.is_file() and path.stat().st_size == size
    return there and sha256_file(path) == sha256
