"""Move a store's bytes through obstore: S3 and Azure Blob Storage, by its synchronous calls from threads.

Its asynchronous calls aborted at the interpreter's exit, after success. Memory is bounded for files of any size. At
most `SLOTS` chunks of `CHUNK` come in at a time, and `LARGE` files of `PARTS` parts go out.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import functools
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, TypeVar

from ..errors import CloudtrainError, StorageError
from ..validate import url_scheme
from .errors import Retries
from .files import MOST_PIECES, PIECE, Entry, Loaded, Names, TransferOptions, parallel
from .local_disk import disk_errors, write_back
from .obstore_config import SDKS, ObstoreConfig, find_access
from .timings import CLIENT_TIMINGS

P = ParamSpec("P")
R = TypeVar("R")

CHUNK = 256 << 10
"""Bytes of one read and write: few enough to stay in a core's cache in between."""
AT_ONCE = 1 << 20
"""Largest body sent with the short read timeout, `ClientTimings.http_silence`."""
SLOTS = 16
LARGE = 2
PARTS = 6
TRIES = 7
"""Half a minute in all."""
_STATUS = re.compile(r"status code: (\d{3})[^:]*:?\s*(?P<body>.*)", re.DOTALL)
_OS_WORDS = re.compile(r'message: "([^"]+)"')
_ELSEWHERE = ("Received redirect", "AuthorizationHeaderMalformed")
#: Failures that no other try can change, by obstore's message: the reason, and the way out.
_FINAL = {
    "non-partial response": ("the server does not answer ranges as such", ""),
    "InvalidPath": ("a key has an empty part or a control character", "rename the object"),
    "Could not parse path": ("a key has an empty part or a control character", "rename the file"),
    "InvalidCertificate": (
        "the server's certificate is not trusted",
        "set AWS_CA_BUNDLE, REQUESTS_CA_BUNDLE or SSL_CERT_FILE to the certificate of its authority",
    ),
}
#: Transient errors with status 400: the body took too long.
_PASSING = ("RequestTimeout", "BadDigest", "IncompleteBody")
#: The process with the threads of obstore's runtime. A forked child has none of them and would hang.
_runtime: list[int] = []
#: Thread-local: `gone` is set when the calling thread has stopped waiting.
_caller = threading.local()


class _Replaced(Exception):
    """A new object under the key, written during the download."""


class _FinalError(Exception):
    """A failure that no other try can change, with the way out."""

    def __init__(self, why: str, hint: str = "") -> None:
        self.hint = hint
        super().__init__(why)


class OtherRegionError(_FinalError):
    """A bucket in another region than the configured one."""


class _Refusal(Exception):
    """A server's error. ``bare``: without a body that gives the reason."""

    def __init__(self, text: str, status: int, *, bare: bool) -> None:
        self.status_code, self.bare = status, bare
        super().__init__(text)


def _apart(work: Callable[P, R]) -> Callable[P, R]:
    """Run ``work`` in another thread if called in the main one: there obstore would block Ctrl-C."""

    @functools.wraps(work)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if threading.current_thread() is not threading.main_thread():
            return work(*args, **kwargs)
        done: concurrent.futures.Future[R] = concurrent.futures.Future()
        gone = threading.Event()

        def run() -> None:
            _caller.gone = gone
            try:
                done.set_result(work(*args, **kwargs))
            except BaseException as exc:  # noqa: BLE001 - the waiting thread raises it
                done.set_exception(exc)

        threading.Thread(target=run, name="obstore", daemon=True).start()
        try:
            return done.result()
        finally:
            gone.set()

    return call


class ObstoreMover:
    """A `Mover` with ``access``. It does not survive a fork."""

    swaps = True

    def __init__(self, *, url: str, access: ObstoreConfig, retries: Retries) -> None:
        self.url, self.retries, self._access = url, retries, access
        self._keys = _Keys(access.keys) if access.keys is not None else None
        self._store = _client(access, self._keys, retries=0, silence=CLIENT_TIMINGS.http_silence)
        self._slots = threading.BoundedSemaphore(SLOTS)
        self._large = threading.BoundedSemaphore(LARGE)
        _runtime[:] = [os.getpid()]

    @classmethod
    def open(
        cls, url: str, options: Mapping[str, Any], *, moving: TransferOptions, retries: Retries | None
    ) -> ObstoreMover:
        """Open the bucket of ``url``. Raises `SpecError` without obstore, `StorageError` in a forked process."""
        try:
            import obstore  # noqa: F401
        except ImportError as exc:
            from .extras import extra_of, not_installed

            scheme, extra = url_scheme(url), extra_of(SDKS[url_scheme(url)])
            why = "" if isinstance(exc, ModuleNotFoundError) else str(exc)
            raise not_installed(f"{scheme}://", extra, field="store", named=["obstore"], why=why) from None
        if _runtime and _runtime[0] != os.getpid():
            hint = "start child processes with the method spawn"
            raise StorageError(f"{url}: this process is a fork of one that has used obstore", hint=hint)
        access = find_access(url, options, os.environ, moving=moving)
        return cls(url=url, access=access, retries=retries or Retries(tries=TRIES))

    def region(self) -> str:
        """Return the region of the bucket, as its server says it; "" if it does not, or agrees with the configured."""
        import ssl
        from urllib.error import HTTPError
        from urllib.request import Request, urlopen

        config = self._access.config
        where = config["endpoint"]
        if not config["virtual_hosted_style_request"]:
            where += f"/{self._access.bucket}"
        trusted = ssl.create_default_context()
        if self._access.certificates is not None:
            trusted.load_verify_locations(cadata=self._access.certificates.decode())
        try:
            with urlopen(Request(where, method="HEAD"), timeout=CLIENT_TIMINGS.http_silence, context=trusted) as answer:
                headers = answer.headers
        except HTTPError as exc:  # a refusal, too, names the region
            headers = exc.headers
        except OSError:
            return ""
        found = str(headers.get("x-amz-bucket-region") or "")
        return found if found != config["region"] else ""

    @functools.cached_property
    def _sender(self) -> Any:
        """The client for large bodies: the server is silent while they are sent."""
        return _client(self._access, self._keys, retries=0, silence=CLIENT_TIMINGS.http_sending)

    @functools.cached_property
    def _parts(self) -> Any:
        """The client for large files, whose parts cannot be sent again from here: only this client retries itself."""
        return _client(self._access, self._keys, retries=3, silence=CLIENT_TIMINGS.http_sending)

    def _at(self, key: str) -> str:
        return "/".join(part for part in (self._access.root, key) if part)

    def _key(self, path: str) -> str:
        """Return the key of a path, or "" for a path outside this tree."""
        below = f"{self._access.root}/" if self._access.root else ""
        return path[len(below) :] if path.startswith(below) else ""

    @contextlib.contextmanager
    def _translated(self) -> Iterator[Any]:
        """Yield obstore, with its exceptions translated for the error table."""
        import obstore

        try:
            yield obstore
        except CloudtrainError:
            raise
        except (obstore.exceptions.BaseError, FileNotFoundError, ValueError) as exc:
            if (refusal := _refusal(exc, self._keys.failure if self._keys is not None else None)) is exc:
                raise
            raise refusal from exc

    def _get(self, key: str, **options: Any) -> Any:
        with self._translated() as obs:
            return obs.get(self._store, self._at(key), options=options or None)

    def _head(self, key: str) -> Any:
        try:
            return self._get(key, head=True)
        except _Refusal as exc:
            if exc.bare:
                self._get(key, range=(0, 1))  # a refused HEAD gives no reason
            raise

    @_apart
    def read(self, key: str) -> bytes:
        with self._translated():
            return bytes(self._get(key).bytes())

    @_apart
    def write(self, key: str, data: bytes) -> None:
        with self._translated() as obs:
            client = self._store if len(data) <= AT_ONCE else self._sender
            obs.put(client, self._at(key), data, use_multipart=False)

    @_apart
    def load(self, key: str) -> Loaded:
        with self._translated():
            answer = self._get(key)
            return Loaded(bytes(answer.bytes()), str(answer.meta["e_tag"]), answer.meta["last_modified"].timestamp())

    @_apart
    def swap(self, key: str, version: str | None, data: bytes) -> str:
        with self._translated() as obs:
            mode = "create" if version is None else {"e_tag": version}
            return str(obs.put(self._store, self._at(key), data, mode=mode)["e_tag"])

    @_apart
    def entry(self, key: str) -> Entry | None:
        if not self._at(key):
            return None
        found = self._head(key)
        folder = found.attributes.get("hdi_isfolder") == "true"  # accounts with a hierarchical namespace have these
        return None if folder else _entry(found.meta)

    @_apart
    def entries(self, prefix: str) -> dict[str, Entry]:
        with self._translated() as obs:
            found = obs.list(self._store, self._at(prefix) or None).collect()
        entries = {self._key(meta["path"]): _entry(meta) for meta in found}
        # Folder markers ("name/") are listed as empty files.
        empty = [key for key, entry in entries.items() if entry.size == 0 and key]
        kept = parallel(self._is_file, empty, jobs=SLOTS)
        gone = {"", *[key for key, file in zip(empty, kept, strict=True) if not file]}
        return {key: entry for key, entry in entries.items() if key not in gone}

    def _is_file(self, key: str) -> bool:
        try:
            return self._patiently(key, lambda: self.entry(key)) is not None
        except FileNotFoundError:
            return False

    def _patiently(self, key: str, work: Callable[[], R]) -> R:
        """Retry ``work``, a part of an operation that is too large to repeat whole."""
        return self.retries(f"{self.url}/{key}", work, part=True)

    @_apart
    def names(self, prefix: str) -> Names:
        with self._translated() as obs:
            found = obs.list_with_delimiter(self._store, self._at(prefix) or None)
        return [self._key(path) for path in (*found["common_prefixes"], *(meta["path"] for meta in found["objects"]))]

    @_apart
    def upload(self, path: Path, key: str, size: int, report: Callable[[int], None]) -> None:
        if size <= PIECE:
            with disk_errors(path):
                data = path.read_bytes()
            self.write(key, data)
            return
        part = _part_of(size)
        self._send(key, _chunks(path, part, report, getattr(_caller, "gone", None)), part)

    def _send(self, key: str, chunks: Iterator[bytes], part: int) -> None:
        with self._large, self._translated() as obs:
            obs.put(
                self._parts,
                self._at(key),
                chunks,
                use_multipart=True,
                chunk_size=part,
                max_concurrency=max(1, PARTS * PIECE // part),
            )

    @_apart
    def piece(self, key: str, start: int, end: int) -> bytes:
        with self._slots, self._translated():
            return bytes(self._get(key, range=(start, end)).bytes())

    @_apart
    def receive(self, key: str, pieces: Iterator[bytes], size: int) -> None:
        if size <= PIECE:
            self.write(key, b"".join(pieces))
            return
        self._send(key, pieces, _part_of(size))

    @_apart
    def content(self, key: str, most: int) -> memoryview | None:
        with self._slots, self._translated():
            answer = self._get(key)
            total = int(answer.meta["size"])
            if total > most:
                return None
            data = memoryview(answer.bytes())
            if len(data) != total:
                raise ConnectionError(f"{len(data)} bytes came instead of {total}")
            return data

    @_apart
    def fetch(self, key: str, temp: Path, size: int | None, report: Callable[[int], None]) -> None:
        for _ in range(self.retries.tries):
            with contextlib.suppress(_Replaced):
                self._fetch(key, temp, size, _Sum(report=report))
                return
        raise StorageError(f"{self.url}/{key}: it is replaced faster than it can be read")

    def _fetch(self, key: str, temp: Path, size: int | None, moved: _Sum) -> None:
        """Download one version, by its ETag. Raises `_Replaced` if another replaces it meanwhile."""
        with self._slots:
            first = self._first(key, size)
            total, tag = int(first.meta["size"]), first.meta["e_tag"]
            with disk_errors(temp):
                os.truncate(temp, total)  # drops bytes of an earlier version
            if total <= PIECE and first.range == (0, total):
                with _writing(temp, 0) as out:
                    self._pour(first, temp, out, moved)
                moved.check(total)
                return
        # For a large object of unknown size, drop the rest of the first answer.
        begun = first if first.range == (0, min(PIECE, total)) else None
        del first
        self._ranges(_Version(key, temp, total, tag), [begun] if begun else [], moved)
        moved.check(total)

    def _first(self, key: str, size: int | None) -> Any:
        """Return the first answer: all of a small object, the first range of a large one."""
        if size is None or size <= PIECE:
            return self._get(key)
        try:
            return self._get(key, range=(0, PIECE))
        except _Refusal as exc:
            if exc.status_code != 416:  # the object is empty now
                raise
            return self._get(key)

    def _ranges(self, wanted: _Version, begun: list[Any], moved: _Sum) -> None:
        """Download all ranges, `SLOTS` at a time. They are made on demand, so a file may have any number.

        ``begun`` holds the answer to the first one, if it was requested already.
        """
        starts, failed = iter(range(0, wanted.total, PIECE)), threading.Event()

        def some(_: int) -> None:
            while not failed.is_set() and (at := next(starts, None)) is not None:
                try:
                    self._range(wanted, at, begun if at == 0 else [], moved)
                except BaseException:
                    failed.set()
                    raise

        parallel(some, range(min(SLOTS, -(-wanted.total // PIECE))), jobs=SLOTS)

    def _range(self, wanted: _Version, start: int, begun: list[Any], moved: _Sum) -> None:
        end, done = min(start + PIECE, wanted.total), _Sum(above=moved)
        condition = {"if_match": wanted.tag} if wanted.tag else {}

        def rest() -> None:
            at = start + done.total
            if at == end:
                return
            with self._slots, _writing(wanted.temp, at) as out:
                part = begun.pop() if begun else self._get(wanted.key, range=(at, end), **condition)
                if part.meta["e_tag"] != wanted.tag:
                    raise _Replaced  # the server ignores the condition
                self._pour(part, wanted.temp, out, done, early=True)
            done.check(end - start)

        try:
            self._patiently(wanted.key, rest)
        except _Refusal as exc:
            if exc.status_code == 412:
                raise _Replaced from exc
            raise

    def _pour(self, answer: Any, temp: Path, out: FileIO, moved: _Sum, *, early: bool = False) -> None:
        """Write the answer to ``out``. ``early`` starts writing to disk at once, which is slower for a small file."""
        with self._translated():
            for chunk in answer.stream(CHUNK):
                with disk_errors(temp):
                    rest, at = memoryview(chunk), out.tell()
                    while rest:
                        rest = rest[out.write(rest) :]
                    if early:
                        write_back(out.fileno(), at, out.tell())
                moved.add(len(chunk))

    @_apart
    def copy(self, source: str, target: str) -> None:
        with self._translated() as obs:
            obs.copy(self._store, self._at(source), self._at(target))

    @_apart
    def remove(self, prefix: str) -> None:
        keys = list(self.entries(prefix))
        with contextlib.suppress(FileNotFoundError):
            if self.entry(prefix) is not None:
                keys.append(prefix)
        self.discard(keys)

    @_apart
    def discard(self, keys: Sequence[str]) -> None:
        if self._access.kind == "s3":
            with self._translated() as obs:
                if keys:
                    obs.delete(self._store, [self._at(key) for key in keys])
        else:
            parallel(self._remove, keys, jobs=SLOTS)

    @_apart
    def prune(self, prefix: str) -> None:
        """Delete Azure's folder markers, nested ones first: a real folder must be empty by then."""
        if self._access.kind != "azure":
            return
        with self._translated() as obs:
            found = obs.list(self._store, self._at(prefix)).collect()
        keys = [prefix, *(self._key(meta["path"]) for meta in found if meta["size"] == 0)]
        marks = [key for key, mark in zip(keys, parallel(self._is_mark, keys, jobs=SLOTS), strict=True) if key and mark]
        for key in sorted(set(marks), key=len, reverse=True):
            with contextlib.suppress(_Refusal):
                self._remove(key)

    def _is_mark(self, key: str) -> bool:
        with contextlib.suppress(FileNotFoundError):
            return bool(self._head(key).attributes.get("hdi_isfolder") == "true")
        return False

    def _remove(self, key: str) -> None:
        with contextlib.suppress(FileNotFoundError), self._translated() as obs:
            obs.delete(self._store, self._at(key))


class _Version(NamedTuple):
    """A download of one version of an object, by its ``tag``, into ``temp``."""

    key: str
    temp: Path
    total: int
    tag: str | None


class _Keys:
    """A credential provider for obstore. ``failure`` is the last error that kept a request from being signed."""

    def __init__(self, keys: Callable[[], Mapping[str, Any]]) -> None:
        self._ask = keys
        self.failure: Exception | None = None

    def __call__(self) -> Mapping[str, Any]:
        try:
            return self._ask()
        except Exception as exc:
            self.failure = exc
            raise


class _Sum:
    """A counter of received bytes for several threads; ``report`` gets the total, ``above`` each addition."""

    def __init__(self, *, report: Callable[[int], None] | None = None, above: _Sum | None = None) -> None:
        self.total = 0
        self._report, self._above = report, above
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        with self._lock:
            self.total += count
            total = self.total
        if self._above is not None:
            self._above.add(count)
        if self._report is not None:
            self._report(total)

    def check(self, total: int) -> None:
        """Raise ConnectionError unless ``total`` bytes have come."""
        if self.total != total:
            raise ConnectionError(f"{self.total} bytes came instead of {total}")


def _client(access: ObstoreConfig, keys: _Keys | None, *, retries: int, silence: float) -> Any:
    """Return obstore's client; ``silence`` is its read timeout, which also counts while a body is sent."""
    from obstore.store import AzureStore, S3Store

    options: dict[str, Any] = {"timeout": timedelta(hours=1), "connect_timeout": timedelta(seconds=10)}
    options |= {"read_timeout": timedelta(seconds=silence), "allow_invalid_certificates": False}
    if access.config["endpoint"].startswith("http:"):
        options["allow_http"] = True
    if access.certificates is not None:
        options["root_certificate"] = access.certificates
    make: Any = {"s3": S3Store, "azure": AzureStore}[access.kind]
    return make(
        access.bucket,
        client_options=options,
        retry_config={"max_retries": retries, "retry_timeout": timedelta(minutes=30)},
        credential_provider=keys,
        **access.config,
    )


def _part_of(size: int) -> int:
    return max(PIECE, -(-size // MOST_PIECES))


def _entry(meta: Mapping[str, Any]) -> Entry:
    modified = meta["last_modified"]
    tag = str(meta["e_tag"] or "").strip('"')
    return Entry(int(meta["size"]), f"ETag={tag} LastModified={modified.isoformat()}", modified.timestamp())


@contextlib.contextmanager
def _writing(temp: Path, at: int) -> Iterator[FileIO]:
    """Open ``temp`` at byte ``at``. Raises FileNotFoundError if the waiting caller has deleted it."""
    with disk_errors(temp):
        out = open(temp, "rb+", buffering=0)  # noqa: SIM115 - network errors raised inside are not the disk's
    with out:
        out.seek(at)
        yield out


def _chunks(path: Path, size: int, report: Callable[[int], None], gone: threading.Event | None) -> Iterator[bytes]:
    """Yield the file's chunks. Raises StorageError, which aborts the upload, if the caller has ``gone``."""
    moved = 0
    with disk_errors(path), open(path, "rb") as stream:
        while chunk := stream.read(size):
            if gone is not None and gone.is_set():
                raise StorageError(f"{path}: its caller no longer waits")
            yield chunk
            moved += len(chunk)
            report(moved)


def _refusal(exc: Exception, unsigned: Exception | None) -> Exception:
    """Return obstore's ``exc`` as an error with the server's status, without its debug text."""
    text, _, debug = str(exc).partition("\n\nDebug source")
    found = _STATUS.search(text)
    if unsigned is not None and found is None and "UnauthenticatedError" in type(exc).__name__:
        return unsigned
    whole = text if found else str(exc)
    if any(words in whole for words in _ELSEWHERE):
        hint = "set AWS_DEFAULT_REGION, or the setting region of your provider"
        return OtherRegionError("the bucket is in another region", hint)
    if final := next((final for words, final in _FINAL.items() if words in whole), None):
        return _FinalError(*final)
    if found is not None:
        return _answered(text, int(found[1]), " ".join(found["body"].split()))
    if isinstance(exc, (FileNotFoundError, ValueError)) or type(exc).__name__ not in ("GenericError", "BaseError"):
        return exc
    if "TimedOut" in debug:
        return TimeoutError("no answer in time")
    reason = [*_OS_WORDS.findall(debug), text.rpartition(" - ")[2] or text]
    return ConnectionError(reason[0])


def _answered(text: str, status: int, body: str) -> Exception:
    found = (re.search(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL) for tag in ("Code", "Message"))
    said = [" ".join(match[1].split()) for match in found if match]
    code = said[0] if said else ""
    if code == "NoSuchUpload":  # the upload completed, but its answer was lost
        return ConnectionError(": ".join(said))
    if status == 404:
        return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    if status == 400 and code in _PASSING:
        return ConnectionError(": ".join(said))
    return _Refusal(f"{status} {': '.join(said) or body}".strip(), status, bare=not body)
