"""Open fsspec's file systems, and check which of them can be a store.

A store needs atomic writes and exclusive creation. Object stores have both. Other classes have both if their own
``pipe_file`` takes ``mode``. All others are refused: fsspec's default checks first and writes afterwards.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import re
import threading
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any

from ..errors import SpecError
from ..validate import url_scheme, without_secrets
from .errors import report_wait
from .timings import CLIENT_TIMINGS

BUCKETS = frozenset({"s3", "s3a", "obs", "gs", "gcs", "abfs", "abfss", "az"})
"""Schemes of object stores. Their URLs begin with a bucket or container, which cloudtrain never creates."""
GOOGLE = frozenset({"gs", "gcs"})
SFTP = frozenset({"sftp", "ssh"})
WEB = frozenset({"http", "https"})
STREAMED = WEB | {"ftp"}
"""Schemes whose files come as one stream: some servers ignore ranges, or stop only when the connection closes."""
_ALONE = SFTP | {"ftp", "hf"}
"""Schemes of inputs alone, for which one connection at a time is enough."""
#: Schemes that create exclusively, as tests show; the signatures of some of these classes do not say so.
_EXCLUSIVE = BUCKETS | {"memory"}
#: Logger by scheme, where it is not the package of fsspec's class.
_LOGS = dict.fromkeys(SFTP, "paramiko")


def open_url(url: str, options: Mapping[str, Any]) -> Clients:
    """Return the file systems of ``url``. Raises `SpecError` if their package is not installed."""
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
        hint = "check the scheme, or install the package that adds it to fsspec"
        raise SpecError(f"fsspec knows no file system for {scheme}: URLs", field="store", hint=hint) from exc

    def make() -> tuple[Any, str]:
        try:
            return opened()
        except TypeError as exc:  # an option that this kind of URL does not have, or a missing one
            hint = f"correct fsspec's options in FSSPEC_{scheme.upper()}_… or ~/.config/fsspec"
            raise SpecError(f"{url}: {exc}", field="store", hint=hint) from exc

    def opened() -> tuple[Any, str]:
        from fsspec.core import url_to_fs

        # Another machine writes to the same store, so a cached listing is wrong. A cached instance keeps expired
        # credentials. Synchronous file systems pass unknown options to their client.
        known = {"use_listings_cache": False} if kind.async_impl else {}
        fs, root = url_to_fs(url, skip_instance_cache=True, **known, **options)
        if scheme in SFTP:  # its client has no timeout
            fs.ftp.get_channel().settimeout(CLIENT_TIMINGS.sftp_silence)
            fs.client.get_transport().set_keepalive(CLIENT_TIMINGS.sftp_keepalive)
        return fs, str(root).rstrip("/")

    signing = "no credentials found yet; to sign in, run: gcloud auth application-default login"
    with report_wait(f"{without_secrets(url)}: {signing if scheme in GOOGLE else 'no connection yet'}"):
        return Clients(make, alone=scheme in _ALONE)


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


class Clients:
    """The file systems of one URL, for any number of threads: ``alone``, one for all of them, in turn.

    ``make`` returns a file system and the URL's path in it: ``root``. By fsspec's contract a synchronous file system
    belongs to one thread: two threads on one connection may get each other's answers, or none.
    """

    def __init__(self, make: Callable[[], tuple[Any, str]], *, alone: bool = False) -> None:
        self._make = make
        self._turn = threading.Lock() if alone else contextlib.nullcontext()
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
        with self._turn:
            try:
                fs = self._idle.pop()
            except IndexError:
                fs = self._make()[0]
            try:
                yield fs
            except (FileNotFoundError, FileExistsError):
                raise
            except BaseException:
                # The call was interrupted, so the connection's next answer may belong to it. The others are as old.
                _close_all(self._idle, self._owner)
                _close_all([fs], self._owner)
                fs = None
                raise
            finally:
                if fs is not None:
                    self._idle.append(fs)


def _close_all(clients: list[Any], owner: int) -> None:
    """Close the connections, which have threads of their own; a forked child does not close its parent's."""
    while clients and os.getpid() == owner:
        with contextlib.suppress(Exception):  # most have no client to close; another thread may take the last one
            clients.pop().client.close()


# --------------------------------------------------------------------------------------------------------------- stores


def check_store(url: str, kind: type[Any]) -> None:
    """Raise `SpecError` if ``kind``, the file system's class, cannot be a store."""
    scheme = url_scheme(url)
    if scheme in _EXCLUSIVE or (scheme not in WEB and _says_so(kind)):
        return
    why = "cannot create a file exclusively, so two clients could start one run"
    hint = "use s3://…, abfs://…, gs://… or a folder"
    raise SpecError(f"{url} cannot be a store: {kind.__name__} {why}", field="store", hint=hint)


def _says_so(kind: type[Any]) -> bool:
    """Return whether the class itself takes ``mode`` where it writes; fsspec's default is not exclusive."""
    from fsspec import AbstractFileSystem
    from fsspec.asyn import AsyncFileSystem

    base, name = (
        (AsyncFileSystem, "_pipe_file") if issubclass(kind, AsyncFileSystem) else (AbstractFileSystem, "pipe_file")
    )
    found = getattr(kind, name)
    return found is not getattr(base, name) and "mode" in inspect.signature(found).parameters


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
