"""Copy remote inputs that the nodes cannot read into the store, through this machine's memory.

A copy's address is made of its source's URL, so a plan knows it without a network. Its manifest,
``data/manifests/<address>.json``, has the copied version of each file; an unchanged file is not copied again, also
after an interrupted copy. A changed source updates its copy in place, unless an unfinished run uses it. One client at a
time copies to an address, by a lease; others wait, and find it. `bring` copies remote inputs; `carry` copies another
run's checkpoint, as another `RemoteSource`. A run that moves to another place takes its files from the store that
it leaves (`PreviousPlace`): the moving client needs no source.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import json
import re
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from ..errors import CloudtrainError, ConflictError, DigestError, SpecError, StorageError
from ..provider_api.protocol import Layout, LayoutInput
from ..storage.errors import TransientError, translate
from ..storage.files import PIECE, Entry, Progress, TransferOptions, parallel
from ..storage.fsspec_pool import STREAMED
from ..storage.lease import FOLDER, Lease
from ..storage.local_disk import safe
from ..storage.remote import AHEAD, RemoteFiles
from ..validate import url_scheme, without_secrets
from .store import Store, expect, to_json

__all__ = ["Copy", "PreviousPlace", "RemoteSource", "address_of", "bring", "from_left", "version_of"]

LEASE = 60.0
"""Seconds after which another client may continue the copy of a dead client."""
SAVED_SECONDS = 30.0
"""Seconds between two saves of the manifest."""
MEMORY = 160 << 20
"""Bytes in memory at once: whole small files, and parts of large ones with a client library's own buffers."""
ANNOUNCED = 86400.0
"""Seconds in which a client that staged a copy may still record the run that needs it."""
TRIES = 4
"""Tries for a streamed file, which starts again; ranges are retried by the client."""
_TAG = re.compile(r"\bETag=(?:W/)?\"?([^\"\s]+)", re.IGNORECASE)


class PreviousPlace(NamedTuple):
    """The place that a run leaves: its store, and the run's layout there."""

    store: Store
    layout: Layout

    def gave(self, address: str) -> bool:
        """Return whether the run was given the copy at ``address``. Other copies may be of another version."""
        resume = self.layout.resume if self.layout.resume_source is not None else None
        inputs = [item.url for item in self.layout.inputs.values() if item.source is not None]
        return address in {address_of(self.layout.store, url) for url in (resume, *inputs) if url is not None}


def bring(
    store: Store,
    layout: Layout,
    *,
    left: PreviousPlace | None = None,
    progress: Progress | None = None,
    say: Callable[[str], None] | None = None,
) -> int:
    """Copy the inputs of ``layout`` with a ``source`` that the store lacks; return the bytes that moved.

    Sources are read with fsspec's own credentials. Inputs that the run was given in ``left``, the place before, come
    from their copies there, if complete and undamaged. Raises `SpecError` for a source without files, `StorageError` if
    it changes meanwhile, and `AuthError`. Raises `ConflictError` if it changed since an unfinished run was given its
    copy.
    """
    wanted = {item.url: (name, item) for name, item in layout.inputs.items() if item.source is not None}
    moved = 0
    for name, item in wanted.values():
        address = address_of(store.url, item.url)
        copy = partial(Copy, store, layout.run_id, address, progress=progress, say=say)
        there = from_left(left, address, copy, name=name, field=f"inputs.{name}", say=say)
        moved += copy(_Input(name, item, store.moving.mover)).run() if there is None else there
    return moved


def from_left(
    left: PreviousPlace | None,
    address: str,
    copy: Callable[[RemoteSource], Copy],
    *,
    name: str,
    field: str,
    say: Callable[[str], None] | None,
) -> int | None:
    """Copy what the run was given at ``address`` of ``left``; return the bytes that moved. Return None if the copy
    there is missing, incomplete or damaged (reported to ``say``): the source is needed."""
    if left is None or not left.gave(address) or (manifest := _manifest(left.store, address)) is None:
        return None
    try:
        return copy(_Held(left.store, address, manifest, name=name, field=field)).run()
    except DigestError as exc:
        if say is not None:
            say(f"{exc}; it is copied from where it came from")
        return None


def address_of(store: str, url: str) -> str:
    """Return the name below ``data/`` of ``url``'s content in the store at ``store``."""
    return url[len(store) + 1 :].split("/")[1]


class RemoteSource(Protocol):
    """The source of a copy. Methods raise `CloudtrainError`.

    In messages, ``name`` is its role in the job, ``shown`` its location and ``field`` the job's field that names it.
    """

    name: str
    shown: str
    field: str
    tries: int = 2
    """Tries for each file, whose pieces start again; sources with their own retries have fewer."""
    instead: str = ""
    """Ends the message that it changed and another run has the copy, with the alternative."""
    last: str = ""
    """The file that is copied last because it makes the others valid, or ""."""
    facts: Mapping[str, Any] = MappingProxyType({})
    """Further entries of the manifest."""
    given: bool = False
    """True if it is a copy that a run was given, which stays as it is while its source may change."""

    def entries(self) -> dict[str, Entry]:
        """Return its files by their paths in the copy, from a fresh listing."""

    def pieces(self, path: str, entry: Entry) -> Generator[bytes, None, None]:
        """Yield the content of one file."""

    def check(self, path: str, sha256: str) -> None:
        """Raise `DigestError` if the content differs from its expected digest."""


class _Input(RemoteSource):
    """A channel's data, read with fsspec's own credentials."""

    def __init__(self, name: str, item: LayoutInput, mover: str) -> None:
        assert item.source is not None
        self.name, self._file, self._url, self._mover = name, item.file, item.source, mover
        self.shown, self.field = without_secrets(item.source), f"inputs.{name}"
        self.tries = TRIES if url_scheme(item.source) in STREAMED else 1
        self._source = self._opened()

    def _opened(self) -> RemoteFiles:
        url = self._url if self._file else self._url.rstrip("/")
        return RemoteFiles(url=url, moving=TransferOptions(mover=self._mover))

    def entries(self) -> dict[str, Entry]:
        try:
            return self._entries(self._opened())
        except SpecError as exc:
            if exc.field != "store":  # the field of every URL that cannot be opened
                raise
            raise SpecError(exc.message, field=self.field, hint=exc.hint) from exc

    def _entries(self, source: RemoteFiles) -> dict[str, Entry]:
        if self._file is None:
            found = source.entries()
            if not found:
                why = "; of a single file, give a URL that ends in something like .csv" if source.entry("") else ""
                raise SpecError(f"{self.shown} holds no file{why}", field=self.field)
            return found
        entry = source.entry("")
        if entry is None:
            raise SpecError(f"there is no file {self.shown}; of a folder, let the URL end in /", field=self.field)
        return {self._file: entry}

    def pieces(self, path: str, entry: Entry) -> Generator[bytes, None, None]:
        return self._source.pieces("" if self._file else path, entry.size)

    def check(self, path: str, sha256: str) -> None:
        """Accept any content: inputs have no expected digest, so there is nothing to check."""


class _Held(RemoteSource):
    """The complete copy at the same address of another store, each file checked against the manifest there."""

    given = True

    def __init__(self, store: Store, address: str, manifest: Mapping[str, Any], *, name: str, field: str) -> None:
        self.name, self.field, self.shown = name, field, f"{store.url}/data/{address}"
        self._store, self._address, self._files = store, address, manifest["files"]
        self.last = str(manifest.get("last") or "")
        own = ("protocol", "source", "complete", "files")
        self.facts = {key: value for key, value in manifest.items() if key not in own}

    def entries(self) -> dict[str, Entry]:
        manifest = _manifest(self._store, self._address)
        if manifest is None or manifest["files"] != self._files:
            raise StorageError(f"{self.shown} is no longer what it was; start again")
        return {path: Entry(item["size"], item["version"] or item["sha256"], 0.0) for path, item in self._files.items()}

    def pieces(self, path: str, entry: Entry) -> Generator[bytes, None, None]:
        key = f"data/{self._address}/{path}"
        if (size := self._store.files.size(key)) != entry.size:  # an interrupted removal can cause this
            raise DigestError(f"{self.shown}/{path} {'has gone' if size is None else 'is not what was copied there'}")
        yield from self._store.files.pieces(key, entry.size)

    def check(self, path: str, sha256: str) -> None:
        if sha256 != self._files[path]["sha256"]:
            raise DigestError(f"{self.shown}/{path} is not what was copied there")


def _manifest(store: Store, address: str) -> dict[str, Any] | None:
    """Return the manifest of a complete copy, else None."""
    record = store.record(f"data/manifests/{address}.json")
    return record if record is not None and record.get("complete") is True else None


class Copy:
    """One copy, at ``data/<address>`` of the store, for the run; ``say`` and ``progress`` as in `bring`."""

    def __init__(
        self,
        store: Store,
        run_id: str,
        address: str,
        source: RemoteSource,
        progress: Progress | None,
        say: Callable[[str], None] | None,
    ) -> None:
        self._store, self._run_id, self._address, self._source = store, run_id, address, source
        self._progress, self._say, self._shown = progress, say or (lambda _: None), source.shown
        self._manifest = f"data/manifests/{address}.json"
        self._lock, self._stop, self._room = threading.Lock(), threading.Event(), _Room(MEMORY)
        self._done: dict[str, dict[str, Any]] = {}
        self._failed: list[BaseException] = []
        self._saved = time.monotonic()

    def run(self) -> int:
        """Complete the copy; return the bytes that moved."""
        found = self._list()
        self._store.announce_copy(self._run_id, self._address)  # before the check: other clients look later
        if self._is_whole(found, self._store.record(self._manifest)):
            return 0
        mark = f"{FOLDER}/copying-{self._address}"
        waits = f"waiting: another client copies {self._shown}"
        with Lease(self._store.files, mark, seconds=LEASE, after=LEASE, say=self._say, waits=waits) as sole:
            found = self._list()  # the wait may have been long
            record = self._store.record(self._manifest)
            if self._is_whole(found, record):
                return 0
            there = self._store.files.list(f"data/{self._address}")
            if record is not None:
                # A copy may be whole and unmarked: the client that was about to change it has died.
                whole = self._is_whole(found, {**record, "complete": True})
                if not whole or there != {self._at(path): entry.size for path, entry in found.items()}:
                    self._refuse_while_used(found, record)
            return self._copy(found, record or {}, there, sole)

    def _is_whole(self, found: Mapping[str, Entry], record: Mapping[str, Any] | None) -> bool:
        """Return whether ``record`` is of a complete copy of exactly these versions."""
        files = (record or {}).get("files") or {}
        whole = record is not None and record.get("complete") is True and len(files) == len(found)
        return whole and all(_is_copy(files.get(path), entry) for path, entry in found.items())

    def _copy(
        self, found: Mapping[str, Entry], record: Mapping[str, Any], there: Mapping[str, int], sole: Lease
    ) -> int:
        """Copy what is not there already in these versions; return the bytes that moved."""
        known = record.get("files") or {}
        self._done = {
            path: dict(known[path])
            for path, entry in found.items()
            if _is_copy(known.get(path), entry) and there.get(self._at(path)) == entry.size
        }
        rest = {path: entry for path, entry in found.items() if path not in self._done}
        self._say(f"copying {self._source.name} from {self._shown}")
        expect(self._progress, [entry.size for entry in rest.values()])
        self._save(sole, complete=False)  # from here on no client takes it for complete
        try:
            self._store.files.discard(sorted(set(there) - set(map(self._at, found))))
            last = {path: rest.pop(path) for path in [*rest] if path == self._source.last}
            self._all(rest, sole)
            self._all(last, sole)
            self._check(found)
        except BaseException:
            with contextlib.suppress(CloudtrainError):
                self._save(sole, complete=False)
            raise
        self._save(sole, complete=True)
        return sum(entry.size for entry in [*rest.values(), *last.values()])

    def _list(self) -> dict[str, Entry]:
        """Return the source's files by their paths in the copy."""
        found = self._source.entries()
        for path, entry in found.items():
            if not safe(path):
                raise SpecError(f"{self._shown}: {path!r} is no name that every system takes", field=self._source.field)
            if entry.size < 0:
                raise StorageError(f"{self._shown}: the server does not say how large {path} is; copy it to a store")
        return found

    def _refuse_while_used(self, found: Mapping[str, Entry], record: Mapping[str, Any]) -> None:
        """Raise `ConflictError` while a run uses the copy. A client that starts now finds it incomplete, and waits."""
        self._store.files.write(self._manifest, to_json({**record, "complete": False}))
        runs = [run_id for run_id in self._store.runs() if run_id != self._run_id]
        users = [run_id for run_id, used in zip(runs, parallel(self._uses, runs), strict=True) if used]
        then = "which is not over, was given {}; wait, or cancel it (ended unseen: cloudtrain reconcile {})"
        if not users and record.get("complete") is True:
            users, then = self._announced(), "which is being submitted, or was given up, counts on {}; try later"
        if not users:
            return
        self._store.files.write(self._manifest, to_json(record))
        what = "has changed" if all(entry.version for entry in found.values()) else "may have changed (it has no ETag)"
        what, copy = f"{what} since", "a copy of it"
        if self._source.given:
            what, copy = f"is another version than {self._store.url} has:", "that one"
        raise ConflictError(
            f"{self._shown} {what} {users[0]}, {then.format(copy, users[0])}{self._source.instead}",
            field=self._source.field,
        )

    def _uses(self, run_id: str) -> bool:
        """Return whether the run is unfinished and was given this copy; True if its record cannot be read."""
        if self._store.result(run_id) is not None:
            return False
        key = f"runs/{run_id}/run.json"
        record = self._store.record(key)
        return self._address in json.dumps(record) if record else self._store.files.exists(key)

    def _announced(self) -> list[str]:
        """Return the runs that have announced this copy but have no record yet."""
        found = self._store.files.entries(FOLDER)
        now = max((entry.modified for entry in found.values()), default=0.0)
        users = []
        for key, entry in found.items():
            record = self._store.record(key) if key.endswith(".json") and now - entry.modified < ANNOUNCED else None
            user = str((record or {}).get("for"))
            if self._address in (record or {}).get("copied", ()) and user != self._run_id:
                users += [] if self._store.files.exists(f"runs/{user}/run.json") else [user]
        return users

    # ------------------------------------------------------------------------------------------------------------ bytes

    def _all(self, rest: Mapping[str, Entry], sole: Lease) -> None:
        """Copy small files first: the large ones take most of the memory."""
        order = sorted(rest, key=lambda path: rest[path].size)
        with concurrent.futures.ThreadPoolExecutor(self._store.moving.concurrency) as pool:
            futures = [pool.submit(self._one, path, rest[path], sole) for path in order]
            try:
                for future in concurrent.futures.as_completed(futures):
                    future.result()
            except BaseException:
                # Running copies end at their next piece. Wait for them: they must not write later.
                self._stop.set()
                pool.shutdown(wait=False, cancel_futures=True)
                if self._failed:  # the first failure: others may have stopped because of it
                    raise self._failed[0] from None
                raise

    def _one(self, path: str, entry: Entry, sole: Lease) -> None:
        try:
            self._copy_one(path, entry, sole)
        except BaseException as exc:
            self._failed.append(exc)
            self._stop.set()
            raise

    def _copy_one(self, path: str, entry: Entry, sole: Lease) -> None:
        digest, moved = hashlib.sha256(), 0

        def pieces() -> Generator[bytes, None, None]:
            nonlocal digest, moved
            digest, at = hashlib.sha256(), 0
            with contextlib.closing(self._read(path, entry)) as source:
                for piece in source:
                    self._go_on()
                    sole.check()  # before the last piece: else it would reach another client's finished copy
                    digest.update(piece)
                    if at + len(piece) >= entry.size:  # before the last piece: else the file would exist
                        self._source.check(path, digest.hexdigest())
                    yield piece
                    at += len(piece)
                    if self._progress is not None and at > moved:
                        self._progress(self._at(path), at - moved)
                        moved = at

        with self._room.taken(_weight(entry.size)):
            self._go_on()
            for tries in range(1, self._source.tries + 1):
                sole.check()
                try:
                    self._store.files.receive(self._at(path), entry.size, pieces)
                    break
                except (TransientError, DigestError):
                    if tries == self._source.tries or self._stop.is_set():
                        raise
        with self._lock:
            self._done[path] = {"size": entry.size, "sha256": digest.hexdigest(), "version": version_of(entry)}
            due = time.monotonic() - self._saved > SAVED_SECONDS
            if due:
                self._saved = time.monotonic()
        if due:
            self._save(sole, complete=False)

    def _go_on(self) -> None:
        if self._stop.is_set():
            raise StorageError(f"{self._shown}: the copy was broken off")

    def _read(self, path: str, entry: Entry) -> Generator[bytes, None, None]:
        """Yield the source's pieces; its failures are kept apart from the target's."""
        where = self._shown if self._shown.endswith(f"/{path}") else f"{self._shown}/{path}"
        try:
            with contextlib.closing(self._source.pieces(path, entry)) as pieces:
                yield from pieces
        except FileNotFoundError:
            raise StorageError(f"{where} went away while it was copied; start again") from None
        except (CloudtrainError, GeneratorExit):
            raise
        except Exception as exc:  # back ends raise any class; the table sorts them
            raise translate(exc, where) from exc

    def _check(self, found: Mapping[str, Entry]) -> None:
        """Raise `StorageError` if the source has changed or the copy's sizes differ."""
        now = self._list()
        changed = [path for path in found.keys() | now.keys() if not _alike(found.get(path), now.get(path))]
        there = self._store.files.list(f"data/{self._address}")
        wrong = [path for path, entry in found.items() if there.get(self._at(path)) != entry.size]
        for path in (*changed, *wrong):
            self._done.pop(path, None)
        if changed:
            raise StorageError(f"{self._shown}: {min(changed)} changed while it was copied; start again")
        if wrong:
            raise StorageError(f"{self._at(min(wrong))} is not what was written: another client writes there")

    def _save(self, sole: Lease, *, complete: bool) -> None:
        with self._lock:
            record = {"protocol": 1, "source": self._shown, "complete": complete, "files": dict(self._done)}
            record |= {"last": self._source.last} if self._source.last else {}
            record |= self._source.facts
            sole.check()
            self._store.files.write(self._manifest, to_json(record))

    def _at(self, path: str) -> str:
        return f"data/{self._address}/{path}"


class _Room:
    """A memory budget in bytes; a larger request gets all of it."""

    def __init__(self, size: int) -> None:
        self._size = self._free = size
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def taken(self, size: int) -> Iterator[None]:
        size = min(size, self._size)
        with self._changed:
            self._changed.wait_for(lambda: self._free >= size)
            self._free -= size
        try:
            yield
        finally:
            with self._changed:
                self._free += size
                self._changed.notify_all()


def _weight(size: int) -> int:
    """Return the bytes of memory for a copy. A small file needs its pieces and their sum; a large one the pieces ahead
    and those that a client library sends at once."""
    return 3 * size if size <= PIECE else PIECE * (AHEAD + 9)


def version_of(entry: Entry) -> str:
    """Return a version that changes with the content, equal in either library's listing."""
    tag = _TAG.search(entry.version)
    return tag[1] if tag else entry.version


def _alike(one: Entry | None, other: Entry | None) -> bool:
    return one is not None and other is not None and (one.size, version_of(one)) == (other.size, version_of(other))


def _is_copy(record: Any, entry: Entry) -> bool:
    """Return whether ``record`` is of this version; False if the source has no versions."""
    if not isinstance(record, Mapping) or not entry.version:
        return False
    return bool(record.get("size") == entry.size and record.get("version") == version_of(entry))
