"""Open fsspec's file systems, one a thread where fsspec requires that, and check which of them can be a store.

A store needs atomic writes and exclusive creation. Object stores have both. Other classes have both if their own
``pipe_file`` takes ``mode``. SFTP gets both by renaming, which is tested before the first write. All others are
refused: fsspec's default checks first and writes afterwards.
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
from .files import TransferOptions
from .local_disk import TEMP

__all__ = [
    "BUCKETS",
    "SFTP",
    "STREAMED",
    "WEB",
    "Clients",
    "Placing",
    "encryption",
    "fsspec_options",
    "get_range",
    "open_url",
    "placing_of",
    "put_pieces",
    "streamed",
    "tree",
]

BUCKETS = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az"})
"""Schemes of object stores. Their URLs begin with a bucket or container, which cloudtrain never creates."""
SFTP = frozenset({"sftp", "ssh"})
_BLOCK = 32_768
"""Bytes of one write over SFTP; servers may refuse more."""
_SILENCE = 60.0
"""Seconds without data from an SFTP server before its connection counts as lost."""
_ALIVE = 30
"""Seconds between keepalives of an idle SFTP connection; firewalls drop idle connections after some minutes."""
WEB = frozenset({"http", "https"})
STREAMED = WEB | {"ftp"}
"""Schemes whose files come as one stream: some servers ignore ranges, or stop only when the connection closes."""
#: Schemes whose servers create exclusively, as tests show; the signatures of some of these classes do not say so.
_EXCLUSIVE = BUCKETS | {"memory"}
#: Logger by scheme, where it is not the package of fsspec's class.
_LOGS = dict.fromkeys(SFTP, "paramiko")

#: Rename the first path to the second; ``True``: only if the second does not exist.
Rename = Callable[[Any, str, str, bool], None]


def open_url(url: str, options: Mapping[str, Any], *, most: int) -> Clients:
    """Return at most ``most`` file systems of ``url``. Raises `SpecError` if their package is not installed."""
    scheme = url_scheme(url)
    if os.environ.get("STORAGE_EMULATOR_HOST"):
        # gcsfs finds the bucket's type by gRPC over TLS. No emulator answers that: 60 s an operation.
        os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    try:
        from fsspec.registry import get_filesystem_class, known_implementations
    except ImportError as exc:
        raise _uninstalled(scheme, "fsspec", exc) from exc
    package = str(known_implementations.get(scheme, {}).get("class", "")).split(".")[0]
    # These packages log tracebacks of the errors that they raise.
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
        except TypeError as exc:  # an option that this kind of URL does not have, or a missing one
            where = f"FSSPEC_{scheme.upper()}_… or ~/.config/fsspec"
            raise SpecError(f"{url}: {exc}; fsspec reads options from {where}", field="store") from exc

    def opened() -> tuple[Any, str]:
        from fsspec.core import url_to_fs

        # Another machine writes to the same store, so a cached listing is wrong. A cached instance keeps expired
        # credentials. Synchronous file systems pass unknown options to their client.
        known = {"use_listings_cache": False} if kind.async_impl else {}
        fs, root = url_to_fs(url, skip_instance_cache=True, **known, **options)
        if scheme in SFTP:  # its client has no timeout
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


def fsspec_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``options`` in the form that fsspec takes."""
    return {name: value.fsspec() if isinstance(value, Credential) else value for name, value in options.items()}


def encryption(url: str, options: Mapping[str, Any], moving: TransferOptions) -> dict[str, Any]:
    """Return s3fs's options for the encryption of every object that is written."""
    if not moving.sse:
        return {}
    words = {"ServerSideEncryption": moving.sse}
    if moving.sse_kms_key_id:
        words["SSEKMSKeyId"] = moving.sse_kms_key_id
    from fsspec.config import conf

    name = "s3_additional_kwargs"  # an option replaces the value in fsspec's configuration, so both are merged
    return {name: {**conf.get("s3", {}).get(name, {}), **options.get(name, {}), **words}}


class Clients:
    """A pool of the file systems of one URL, for any number of threads and at most ``most`` connections.

    ``make`` returns a file system and the URL's path in it: ``root``.

    By fsspec's contract a synchronous file system belongs to one thread. Two threads on one SFTP or FTP connection may
    get each other's answers, or none.
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
        """Yield a file system for this thread's use alone, or the shared one if it is asynchronous."""
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
                # The call was interrupted, so the connection's next answer may belong to it.
                gone = [fs]
                if isinstance(exc, Exception) and classify(exc) == "transient":
                    with self._lock:
                        gone += self._idle  # these connections are as old
                        self._idle.clear()
                _close_all(gone, self._owner)
                raise
            self._keep(fs)

    def _keep(self, fs: Any) -> None:
        with self._lock:
            self._idle.append(fs)


def _close_all(clients: list[Any], owner: int) -> None:
    """Close the connections, which have threads of their own; a forked child does not close its parent's."""
    if os.getpid() != owner:
        return
    for fs in clients:
        with contextlib.suppress(Exception):  # most have no client to close
            fs.client.close()
    clients.clear()


# --------------------------------------------------------------------------------------------------------------- stores


class Placing:
    """The way a file gets its name: written under it, or written beside it and renamed by ``rename``."""

    def __init__(self, rename: Rename | None = None) -> None:
        self.rename = rename

    @contextlib.contextmanager
    def at(self, fs: Any, path: str, *, new: bool = False) -> Iterator[str]:
        """Yield the path to write to. On success the file has the name ``path``; otherwise nothing has changed.

        With ``new``, raises FileExistsError if the file exists. Exactly one of several simultaneous writers succeeds.
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
            # SFTP servers answer "failure" for every cause.
            if new and classify(exc) == "other" and fs.exists(path):
                raise FileExistsError(path) from exc
            raise

    def prove(self, fs: Any, url: str, root: str) -> None:
        """Raise `SpecError` if the server's rename is not atomic and exclusive."""
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
    """Return how files are written to a store at ``url``. Raises `SpecError` if ``kind`` cannot be a store."""
    scheme = url_scheme(url)
    if scheme in _EXCLUSIVE or (scheme not in WEB and _says_so(kind)):
        return Placing()
    if scheme in _RENAMES:
        return Placing(_RENAMES[scheme])
    why = 'cannot create a file exclusively (it takes no mode="create"), so that two clients could start one run'
    raise SpecError(f"{url} cannot be a store: {kind.__name__} {why}; use another one", field="store")


def _says_so(kind: type[Any]) -> bool:
    """Return whether the class itself takes ``mode`` where it writes; fsspec's default is not exclusive."""
    from fsspec import AbstractFileSystem
    from fsspec.asyn import AsyncFileSystem

    base, name = (
        (AsyncFileSystem, "_pipe_file") if issubclass(kind, AsyncFileSystem) else (AbstractFileSystem, "pipe_file")
    )
    found = getattr(kind, name)
    return found is not getattr(base, name) and "mode" in inspect.signature(found).parameters


def _sftp(fs: Any, temp: str, path: str, new: bool) -> None:
    """Rename over SFTP. The protocol's rename fails if the name exists: OpenSSH makes a hard link, which is atomic.

    With ``new`` False, OpenSSH's extension replaces the file.
    """
    (fs.ftp.rename if new else fs.ftp.posix_rename)(temp, path)


_RENAMES: Mapping[str, Rename] = dict.fromkeys(SFTP, _sftp)


# ------------------------------------------------------------------------------------------------------- gaps of fsspec


def tree(fs: Any, path: str) -> Generator[Mapping[str, Any], None, None]:
    """Yield everything below the folder ``path``, each folder after its content; nothing if there is no such folder.

    fsspec's own walk takes a folder for empty if the connection fails during its listing.
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
    """Write a file over SFTP in pipelined 32 KiB blocks, and wait at the end for the answers to all of them.

    paramiko's ``putfo`` ignores the answers: a block that the server could not write stays a hole.
    """
    with fs.ftp.open(path, "wb") as out:
        out.set_pipelined(True)
        last = b""
        for piece in pieces:
            for start in range(0, len(piece), _BLOCK):
                out.write(last)
                last = piece[start : start + _BLOCK]
        out.set_pipelined(False)  # the next write waits for the answers to all earlier ones
        out.write(last)
    if (there := fs.ftp.stat(path).st_size) != size:
        raise OSError(f"{path} has {there} bytes after {size} were written")


def get_range(fs: Any, path: str, start: int, end: int) -> bytes:
    """Return a range of a file over SFTP, with all its reads requested at once."""
    with fs.ftp.open(path, "rb") as file:
        return b"".join(file.readv([(start, end - start)]))


def streamed(fs: Any, path: str, size: int) -> Generator[bytes, None, None]:
    """Yield a file by one request, ``size`` bytes at a time."""
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
    """Create a folder and its parents; another client may create it at the same time."""
    if not path or fs.isdir(path):
        return
    _make_folder(fs, path.rpartition("/")[0])
    try:
        fs.mkdir(path, create_parents=False)
    except Exception:  # no common class: another client was first
        if not fs.isdir(path):
            raise
