"""fsspec's file systems: opened, one for each thread where fsspec wants that, and which of them can be a store.

A store needs files that appear whole, and creation that of any number of clients exactly one wins. Object stores have
both. Of the rest, a class that takes ``mode`` in its own ``pipe_file`` says that it has; SFTP comes to both by
renaming, which is tried before anything is written. All others are refused: fsspec's default looks first, and then
writes.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import re
import secrets
import threading
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from typing import Any

from ..errors import SpecError
from ..validate import url_scheme
from .credential import Credential
from .errors import classify
from .files import Moving
from .local_disk import TEMP

__all__ = [
    "BUCKETS",
    "SFTP",
    "STREAMED",
    "WEB",
    "Clients",
    "Placing",
    "encryption",
    "get_range",
    "open_url",
    "placing_of",
    "plain",
    "put_pieces",
    "streamed",
    "tree",
]

BUCKETS = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az"})
"""Schemes of object stores, whose URLs begin with a bucket or container that nothing here creates."""
SFTP = frozenset({"sftp", "ssh"})
_BLOCK = 32_768
"""Bytes of one write over SFTP; servers need not take more."""
_SILENCE = 60.0
"""Seconds that an SFTP server may be silent before its connection counts as lost."""
_ALIVE = 30
"""Seconds between signs of life over an SFTP connection that rests; firewalls drop what has none for some minutes."""
WEB = frozenset({"http", "https"})
STREAMED = WEB | {"ftp"}
"""Schemes of servers whose files come as one stream: not all of them answer ranges, or only by breaking off."""
#: Where the server creates exclusively, as tests have seen; not all of these classes say so by their signature.
_EXCLUSIVE = BUCKETS | {"memory"}
#: Packages that log what they raise, by scheme, where it is not the one of fsspec's class.
_LOGS = dict.fromkeys(SFTP, "paramiko")
#: Gives the file at the first path the name of the second; ``True``: only if no file has it.
Rename = Callable[[Any, str, str, bool], None]


def open_url(url: str, options: Mapping[str, Any], *, most: int) -> Clients:
    """The file systems of ``url``, at most so many. `SpecError` when their package is not installed."""
    scheme = url_scheme(url)
    if os.environ.get("STORAGE_EMULATOR_HOST"):
        # gcsfs's probe of the bucket's type speaks gRPC over TLS, which no emulator answers: 60 s an operation.
        os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    try:
        from fsspec.registry import get_filesystem_class, known_implementations
    except ImportError as exc:
        raise _uninstalled(scheme, "fsspec", exc) from exc
    package = str(known_implementations.get(scheme, {}).get("class", "")).split(".")[0]
    # They print tracebacks of what they raise.
    logging.getLogger(_LOGS.get(scheme, package or scheme)).addHandler(logging.NullHandler())
    try:
        kind = get_filesystem_class(scheme)
    except ImportError as exc:
        raise _uninstalled(scheme, package, exc) from exc
    except ValueError as exc:
        raise SpecError(f"no file system is known for {scheme}: URLs", field="store") from exc

    def make() -> tuple[Any, str]:
        try:
            return opened()
        except TypeError as exc:  # an option that no URL of the kind has, or that is missing in this one
            where = f"FSSPEC_{scheme.upper()}_… or ~/.config/fsspec"
            raise SpecError(f"{url}: {exc}; fsspec reads options from {where}", field="store") from exc

    def opened() -> tuple[Any, str]:
        from fsspec.core import url_to_fs

        # Another machine writes to the same store: a listing that is remembered is wrong. A remembered instance keeps
        # credentials that have expired. Of the rest many hand what they do not know to their client.
        known = {"use_listings_cache": False} if kind.async_impl else {}
        fs, root = url_to_fs(url, skip_instance_cache=True, **known, **options)
        if scheme in SFTP:  # its client waits for ever
            fs.ftp.get_channel().settimeout(_SILENCE)
            fs.client.get_transport().set_keepalive(_ALIVE)
        return fs, str(root).rstrip("/")

    return Clients(make, most=most)


def _uninstalled(scheme: str, package: str, exc: ImportError) -> SpecError:
    """Return the error for a scheme whose ``package`` cannot be imported.

    fsspec's own classes import other packages, whose names stand in quotes in fsspec's message. A module may have
    another name than its package: ``smbclient`` comes with smbprotocol.
    """
    from fsspec.registry import known_implementations

    from .extras import extra_of, not_installed

    cause = exc.__cause__ if isinstance(exc.__cause__, ImportError) else exc
    why = "" if isinstance(cause, ModuleNotFoundError) else str(cause)
    quoted = re.findall(r'"([\w.-]+)"', known_implementations.get(scheme, {}).get("err", ""))
    found = [*([cause.name] if cause.name in quoted else []), *quoted, cause.name or package]
    name = package if package != "fsspec" else found[0]
    return not_installed(f"{scheme}://", extra_of(name), field="store", named=[name], why=why)


def plain(options: Mapping[str, Any]) -> dict[str, Any]:
    """``options`` as fsspec takes them."""
    return {name: value.fsspec() if isinstance(value, Credential) else value for name, value in options.items()}


def encryption(url: str, options: Mapping[str, Any], moving: Moving) -> dict[str, Any]:
    """s3fs's words for how every object that is written is to be encrypted."""
    if not moving.sse:
        return {}
    words = {"ServerSideEncryption": moving.sse}
    if moving.sse_kms_key_id:
        words["SSEKMSKeyId"] = moving.sse_kms_key_id
    from fsspec.config import conf

    name = "s3_additional_kwargs"  # among the options it takes the place of what fsspec is configured with
    return {name: {**conf.get("s3", {}).get(name, {}), **options.get(name, {}), **words}}


class Clients:
    """The file systems of one URL, for any number of threads; ``most`` is how many connections there may be at once.

    ``make`` gives one, and the URL's own path there: ``root``.

    By fsspec's contract one that is not asynchronous belongs to a thread: of two that share the connection of an SFTP
    or FTP client one gets the other's answer, or none.
    """

    def __init__(self, make: Callable[[], tuple[Any, str]], *, most: int) -> None:
        self._make, self._slots, self._lock = make, threading.BoundedSemaphore(most), threading.Lock()
        first, self.root = make()
        self.kind: type[Any] = type(first)
        self.shared: Any = first if getattr(first, "async_impl", False) else None
        self._idle = [] if self.shared is not None else [first]
        self._owner = os.getpid()
        weakref.finalize(self, _close_all, self._idle, self._owner)

    @contextlib.contextmanager
    def one(self) -> Iterator[Any]:
        """A file system that nobody else uses meanwhile, unless any number may."""
        if self.shared is not None:
            yield self.shared
            return
        with self._slots:
            with self._lock:
                fs = self._idle.pop() if self._idle else None
            fs = self._make()[0] if fs is None else fs
            try:
                yield fs
            except (FileNotFoundError, FileExistsError):
                self._keep(fs)
                raise
            except BaseException as exc:
                # In the midst of something: nobody knows what its next answer would be to.
                gone = [fs]
                if isinstance(exc, Exception) and classify(exc) == "transient":
                    with self._lock:
                        gone += self._idle  # they were made when this one was
                        self._idle.clear()
                _close_all(gone, self._owner)
                raise
            self._keep(fs)

    def _keep(self, fs: Any) -> None:
        with self._lock:
            self._idle.append(fs)


def _close_all(clients: list[Any], owner: int) -> None:
    """End their connections, which have threads of their own; a forked child leaves those of its parent alone."""
    if os.getpid() != owner:
        return
    for fs in clients:
        with contextlib.suppress(Exception):  # most have none
            fs.client.close()
    clients.clear()


# -------------------------------------------------------------------------------------------------- what can be a store


class Placing:
    """How a file comes to its name: written there, or by ``rename`` from another one beside it."""

    def __init__(self, rename: Rename | None = None) -> None:
        self.rename = rename

    @contextlib.contextmanager
    def at(self, fs: Any, path: str, *, new: bool = False) -> Iterator[str]:
        """The path to write to. What is there by then has the name ``path`` afterwards; else nothing has changed.

        ``new``: FileExistsError when there is such a file, for all but one of those who try at once.
        """
        if self.rename is None:
            yield path
            return
        folder, _, _ = path.rpartition("/")
        _make_folder(fs, folder)
        temp = f"{folder}/{TEMP}{secrets.token_hex(8)}"
        try:
            yield temp
            self._move(fs, temp, path, new)
        except BaseException:
            with contextlib.suppress(Exception):
                fs.rm_file(temp)
            raise

    def _move(self, fs: Any, temp: str, path: str, new: bool) -> None:
        assert self.rename is not None
        try:
            self.rename(fs, temp, path, new)
        except Exception as exc:
            # What the server says is "failure", whatever it was.
            if new and classify(exc) == "other" and fs.exists(path):
                raise FileExistsError(path) from exc
            raise

    def prove(self, fs: Any, url: str, root: str) -> None:
        """Raise `SpecError` where the server's renaming is not what a store stands on."""
        if self.rename is None:
            return
        path, words = f"{root}/{TEMP}{secrets.token_hex(8)}", []
        try:
            for number, new in enumerate((True, True, False)):
                with contextlib.suppress(FileExistsError), self.at(fs, path, new=new) as temp:
                    fs.pipe_file(temp, b"%d" % number)
                words.append(bytes(fs.cat_file(path)))
        except OSError as exc:
            if classify(exc) != "other":
                raise
            why = f"its server cannot be written to, or does not rename as a store needs it ({exc})"
            raise SpecError(f"{url} cannot be a store: {why}", field="store") from exc
        finally:
            with contextlib.suppress(Exception):
                fs.rm_file(path)
        if words != [b"0", b"0", b"2"]:
            why = "its server renames over a file that is there, so that two clients could start one run"
            raise SpecError(f"{url} cannot be a store: {why}; use another one", field="store")


def placing_of(url: str, kind: type[Any]) -> Placing:
    """How files come to be in a store at ``url``, a file system of ``kind``. `SpecError` where that is no store."""
    scheme = url_scheme(url)
    if scheme in _EXCLUSIVE or (scheme not in WEB and _says_so(kind)):
        return Placing()
    if scheme in _RENAMES:
        return Placing(_RENAMES[scheme])
    why = 'cannot create a file exclusively (it takes no mode="create"), so that two clients could start one run'
    raise SpecError(f"{url} cannot be a store: {kind.__name__} {why}; use another one", field="store")


def _says_so(kind: type[Any]) -> bool:
    """Whether the class itself takes ``mode`` where it writes; fsspec's own default looks first, and then writes."""
    from fsspec import AbstractFileSystem
    from fsspec.asyn import AsyncFileSystem

    base, name = (
        (AsyncFileSystem, "_pipe_file") if issubclass(kind, AsyncFileSystem) else (AbstractFileSystem, "pipe_file")
    )
    found = getattr(kind, name)
    return found is not getattr(base, name) and "mode" in inspect.signature(found).parameters


def _sftp(fs: Any, temp: str, path: str, new: bool) -> None:
    """By the protocol a rename fails where the name is taken; OpenSSH makes a hard link, which is decided at once.

    Its own extension takes the place of what is there.
    """
    (fs.ftp.rename if new else fs.ftp.posix_rename)(temp, path)


_RENAMES: Mapping[str, Rename] = dict.fromkeys(SFTP, _sftp)


# ---------------------------------------------------------------------------------------------- what fsspec leaves open


def tree(fs: Any, path: str) -> Generator[Mapping[str, Any], None, None]:
    """What lies below the folder ``path``, each folder after what it holds; nothing where there is none.

    fsspec's own walk takes a folder for empty when the connection fails while it is listed.
    """
    try:
        found = fs.ls(path, detail=True)
    except (FileNotFoundError, NotADirectoryError):
        return
    for info in found:
        if info["name"].rstrip("/") == path:
            continue
        if info["type"] == "directory":
            yield from tree(fs, info["name"].rstrip("/"))
        yield info


def put_pieces(fs: Any, path: str, pieces: Iterable[bytes], size: int) -> None:
    """Write a file over SFTP without waiting for the answer to each 32 KiB, but at the end for all of them.

    paramiko's own ``putfo`` asks for none of them: a block that the server could not write stays a hole.
    """
    with fs.ftp.open(path, "wb") as out:
        out.set_pipelined(True)
        last = b""
        for piece in pieces:
            for start in range(0, len(piece), _BLOCK):
                out.write(last)
                last = piece[start : start + _BLOCK]
        out.set_pipelined(False)  # the write that follows waits for the answers to those before it, too
        out.write(last)
    if (there := fs.ftp.stat(path).st_size) != size:
        raise OSError(f"{path} has {there} bytes after {size} were written")


def get_range(fs: Any, path: str, start: int, end: int) -> bytes:
    """Bytes of a file over SFTP, asked for at once."""
    with fs.ftp.open(path, "rb") as file:
        return b"".join(file.readv([(start, end - start)]))


def streamed(fs: Any, path: str, size: int) -> Generator[bytes, None, None]:
    """A file by one request, ``size`` bytes at a time."""
    if not hasattr(fs, "ftp"):
        with fs.open(path, "rb", block_size=0) as answer:
            while data := answer.read(size):
                yield bytes(data)
        return
    fs.ftp.voidcmd("TYPE I")
    with fs.ftp.transfercmd(f"RETR {path}") as connection, connection.makefile("rb") as answer:
        while data := answer.read(size):
            yield data
    fs.ftp.voidresp()


def _make_folder(fs: Any, path: str) -> None:
    """Others may make it at the same time."""
    if not path or fs.isdir(path):
        return
    _make_folder(fs, path.rpartition("/")[0])
    try:
        fs.mkdir(path, create_parents=False)
    except Exception:  # by whatever name it says that another was first
        if not fs.isdir(path):
            raise
