"""Everything that is not a local folder, by fsspec: retries, and the one table of what back ends raise."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from .errors import AuthError, CloudtrainError, SpecError, StorageError
from .transfer import (
    Entry,
    Names,
    Progress,
    Trees,
    disk_errors,
    parts_of,
    settle,
    temp_file,
    verify,
)
from .values import url_scheme

__all__ = ["FsspecFiles", "classify"]

R = TypeVar("R")

#: The one error table: a kind, the HTTP statuses and the exception names (of any base class) that mean it. By name,
#: because the back ends' packages may not be installed and must not be imported to find out.
_TABLE: tuple[tuple[str, frozenset[int], frozenset[str]], ...] = (
    ("missing", frozenset({404, 410}), frozenset({"FileNotFoundError", "ResourceNotFoundError"})),
    ("taken", frozenset({409, 412}), frozenset({"FileExistsError", "ResourceExistsError", "ResourceModifiedError"})),
    (
        "transient",
        frozenset({408, 425, 429, 500, 502, 503, 504}),
        frozenset(
            {
                # the standard library, fsspec, requests
                "ConnectionError", "TimeoutError", "FSTimeoutError", "IncompleteRead", "Timeout",
                "ChunkedEncodingError",
                # botocore
                "HTTPClientError", "IncompleteReadError", "ResponseParserError", "ResponseStreamingError",
                # aiohttp
                "ClientConnectionError", "ClientPayloadError",
                # azure-core
                "ServiceRequestError", "ServiceResponseError",
                # google-auth, gcsfs
                "TransportError", "ChecksumError",
            }
        ),
    ),
    (
        "auth",
        frozenset({401, 403, 407}),
        frozenset(
            {
                "PermissionError",
                # botocore
                "NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "TokenRetrievalError",
                "SSOError", "ProfileNotFound", "NoAuthTokenError",
                # azure-core, azure-identity
                "ClientAuthenticationError", "CredentialUnavailableError",
                # google-auth
                "GoogleAuthError",
            }
        ),
    ),
)  # fmt: skip
_DISK_ERRNOS = {errno.ENOSPC, errno.EROFS, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC)}
_AUTH_WORDS = ("forbidden", "credential", "expiredtoken", "accessdenied", "unauthorized", "not authorized")
#: Back ends whose copy on the server may still be under way when the call returns.
_LAZY_COPY = frozenset({"abfs", "abfss", "az"})
_VERSION_FIELDS = (
    "ETag", "etag", "md5Hash", "content_md5", "generation", "VersionId", "LastModified", "last_modified", "updated",
    "mtime", "created",
)  # fmt: skip


def _chain(exc: BaseException) -> Iterator[BaseException]:
    seen: list[BaseException] = []
    link: BaseException | None = exc
    while link is not None and link not in seen:
        seen.append(link)
        yield link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)


def _status(exc: BaseException) -> int | None:
    """The HTTP status that an exception of any of the client libraries carries."""
    response = getattr(exc, "response", None)
    if isinstance(response, Mapping):
        status: Any = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        return status if isinstance(status, int) else None
    for name in ("status_code", "status", "code"):
        value = getattr(exc, name, None)
        if str(value).isdigit() and 100 <= int(str(value)) < 600:
            return int(str(value))
    return None


def classify(exc: BaseException) -> str:
    """What an exception of any back end means: missing, taken, transient, auth, disk or other."""
    for link in _chain(exc):
        if isinstance(link, OSError) and (
            link.errno in _DISK_ERRNOS or (isinstance(link, PermissionError) and link.filename)
        ):
            return "disk"
        names = {base.__name__ for base in type(link).__mro__}
        status = _status(link)
        for kind, statuses, classes in _TABLE:
            if status in statuses or names & classes:
                return kind
    text = str(exc).lower()
    return "auth" if any(word in text for word in _AUTH_WORDS) else "other"


def _translate(exc: BaseException, where: str) -> Exception:
    """The exception to raise for ``exc``: one line, of cloudtrain's tree, or builtin for what is an answer."""
    reason = " ".join(str(exc).split())[:400] or type(exc).__name__
    kind = classify(exc)
    if kind == "missing":
        return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), where)
    if kind == "taken":
        return FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), where)
    if kind == "auth":
        return AuthError(f"{where}: no access: {reason}")
    if kind == "disk" and isinstance(exc, OSError):
        return StorageError(f"{exc.filename or where}: {exc.strerror or reason}")
    return StorageError(f"{where}: {reason}")


def _open(url: str) -> tuple[Any, str]:
    """The fsspec file system of ``url`` and the root path in it. `SpecError` when its package is not installed."""
    scheme = url_scheme(url)
    if os.environ.get("STORAGE_EMULATOR_HOST"):
        # gcsfs's probe of the bucket's type speaks gRPC over TLS, which no emulator answers: 60 s an operation.
        os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    try:
        import fsspec.core
        from fsspec.registry import get_filesystem_class, known_implementations
    except ImportError as exc:
        raise SpecError(f"{scheme}: URLs need fsspec; pip install fsspec ({exc})", field="store") from exc
    package = str(known_implementations.get(scheme, {}).get("class", "")).split(".")[0]
    logging.getLogger(package or scheme).addHandler(logging.NullHandler())  # they print tracebacks of what they raise
    try:
        get_filesystem_class(scheme)
    except ImportError as exc:
        raise SpecError(f"{exc}: pip install {package} ({exc.__cause__})", field="store") from exc
    except ValueError as exc:
        raise SpecError(f"no file system is known for {scheme}: URLs", field="store") from exc
    # Another machine writes to the same store: a listing that is remembered is wrong. A remembered instance keeps
    # credentials that have expired.
    fs, root = fsspec.core.url_to_fs(url, use_listings_cache=False, skip_instance_cache=True)
    return fs, str(root).rstrip("/")


class FsspecFiles(Trees):
    """`Files` of any URL that fsspec reaches. ``tries`` counts the first; ``sleep`` takes seconds."""

    def __init__(
        self, *, url: str, fs: Any = None, tries: int = 4, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._url = url
        self._tries = tries
        self._sleep = sleep
        self._given = fs
        self._opened: tuple[int, Any, str] | None = None

    @property
    def url(self) -> str:
        return self._url

    def _fs(self) -> Any:
        return self._open()[1]

    def _open(self) -> tuple[int, Any, str]:
        if self._opened is None or self._opened[0] != os.getpid():  # a client does not survive a fork
            try:
                if self._given is not None:
                    fs, root = self._given, str(self._given._strip_protocol(self._url)).rstrip("/")
                else:
                    fs, root = _open(self._url)
            except CloudtrainError:
                raise
            except Exception as exc:  # back ends raise anything; the table sorts it
                raise _translate(exc, self._url) from exc
            self._opened = (os.getpid(), fs, root)
        return self._opened

    def _at(self, key: str) -> str:
        return "/".join([self._open()[2], *parts_of(key)])

    def _call(self, key: str, work: Callable[..., R], *args: Any, **options: Any) -> R:
        """``work(...)``, again after a transient failure; what it raises goes through the table."""
        for left in range(self._tries - 1, -1, -1):
            try:
                return work(*args, **options)
            except (CloudtrainError, TypeError, AttributeError):
                raise
            except Exception as exc:  # back ends raise anything; the table sorts it
                if classify(exc) != "transient" or not left:
                    raise _translate(exc, f"{self._url}/{key}".rstrip("/")) from exc
                self._pause(self._tries - 1 - left)
        raise AssertionError("unreachable")

    def _pause(self, number: int) -> None:
        self._sleep(min(10.0, 0.5 * 2**number) * random.uniform(0.5, 1.5))

    @contextlib.contextmanager
    def _bucket(self) -> Iterator[None]:
        """While writing, nothing is missing but the bucket."""
        try:
            yield
        except FileNotFoundError as exc:
            raise StorageError(f"{self._url}: the bucket or container does not exist") from exc

    def read(self, key: str) -> bytes:
        return bytes(self._call(key, self._fs().cat_file, self._at(key)))

    def write(self, key: str, data: bytes) -> None:
        with self._bucket():
            self._call(key, self._fs().pipe_file, self._at(key), data)

    def create(self, key: str, data: bytes, *, private: bool = False) -> bool:
        for number in range(self._tries):
            # Also before the first try: some servers ignore the condition, and overwrite.
            if self.exists(key):
                return False
            try:
                with self._bucket():
                    self._call(key, self._fs().pipe_file, self._at(key), data, mode="create")
                return True
            except FileExistsError:
                # 412 is an object; 409 is another creator under way, who may yet fail: look, then try again.
                if self.exists(key):
                    return False
                self._pause(number)
        raise StorageError(f"{self._url}/{key}: other writers stay in the way")

    def size(self, key: str) -> int | None:
        try:
            info = self._call(key, self._fs().info, self._at(key))
        except FileNotFoundError:
            return None
        return int(info["size"]) if info.get("type") == "file" else None

    def entries(self, prefix: str = "") -> dict[str, Entry]:
        try:
            found = self._call(prefix, self._fs().find, self._at(prefix), detail=True)
        except FileNotFoundError:
            found = {}
        if not found:
            self._check_bucket()
        if not isinstance(found, Mapping):  # adlfs answers a list when the path is itself a file
            return {}
        below = f"{prefix}/" if prefix else ""
        entries = {
            self._key(name): Entry(int(info["size"] or 0), _version(info))
            for name, info in found.items()
            if info.get("type") == "file" and not name.endswith("/")
        }
        return {key: entries[key] for key in sorted(entries) if key.startswith(below) and key != below}

    def _key(self, path: str) -> str:
        root = self._open()[2]
        return path[len(root) + 1 :] if path.startswith(root + "/") else path.lstrip("/")

    def names(self, prefix: str = "") -> Names:
        try:
            found = self._call(prefix, self._fs().ls, self._at(prefix), detail=False)
        except (FileNotFoundError, NotADirectoryError):
            self._check_bucket()
            return []
        below = f"{prefix}/" if prefix else ""
        keys = [self._key(path).rstrip("/") for path in found]
        return sorted({key[len(below) :] for key in keys if key.startswith(below)} - {""})

    def _check_bucket(self) -> None:
        """A folder that is not there is empty; a bucket that is not there is a mistake."""
        root = self._open()[2]
        if root.startswith("/"):
            return  # a file system of paths, without buckets
        bucket = root.split("/")[0]
        with contextlib.suppress(AuthError):  # may list this folder, not the bucket
            if not self._call("", self._fs().exists, bucket):
                raise StorageError(f"{self._url}: the bucket or container does not exist")

    def upload(self, path: Path, key: str, *, progress: Progress | None = None) -> None:
        with disk_errors(path):
            size = path.stat().st_size
        with self._bucket():
            meter = _meter(progress, key, size)
            self._call(key, self._fs().put_file, str(path), self._at(key), callback=meter)
            meter.finish()

    def download(
        self,
        key: str,
        path: Path,
        *,
        sha256: str | None = None,
        size: int | None = None,
        progress: Progress | None = None,
    ) -> None:
        meter = _meter(progress, key, size)
        self._call(key, self._fetch, key, path, sha256, size, meter)

    def _fetch(self, key: str, path: Path, sha256: str | None, size: int | None, meter: Any) -> None:
        # A new temporary file each time: the parallel parts of a try that failed may still be writing to the last one.
        with contextlib.ExitStack() as stack:
            with disk_errors(path):
                temp = stack.enter_context(temp_file(path))
            self._fs().get_file(self._at(key), str(temp), callback=meter)
            with disk_errors(path):
                verify(temp, key, sha256, size)
                meter.finish(temp.stat().st_size)
                settle(temp, path)

    @property
    def copies(self) -> bool:
        return url_scheme(self._url) not in _LAZY_COPY

    def copy(self, source: str, target: str) -> None:
        if self.copies:
            self._call(source, self._fs().cp_file, self._at(source), self._at(target))
            return
        with tempfile.TemporaryDirectory(prefix="cloudtrain-") as folder:
            path = Path(folder, "copy")
            self.download(source, path)
            self.upload(path, target)

    def remove(self, prefix: str) -> None:
        if not prefix:
            raise StorageError(f"{self._url}: the whole store is not removed")
        with contextlib.suppress(FileNotFoundError):
            self._call(prefix, self._fs().rm, self._at(prefix), recursive=True)


def _version(info: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={info[name]}" for name in _VERSION_FIELDS if info.get(name))


def _meter(progress: Progress | None, key: str, size: int | None) -> Any:
    """An fsspec callback that reports each byte once, whatever is retried; ``finish`` reports the rest."""
    from fsspec.callbacks import Callback

    class Meter(Callback):  # type: ignore[misc]
        told = 0

        def call(self, hook_name: str | None = None, **_: Any) -> None:
            self._tell(self.value)

        def finish(self, total: int | None = None) -> None:
            self._tell(total if total is not None else size or 0)

        def _tell(self, value: int) -> None:
            more = (value if size is None else min(value, size)) - self.told
            if progress and more > 0:
                self.told += more
                progress(key, more)

    return Meter()
