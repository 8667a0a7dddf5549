"""What a provider's nodes cannot read where it is: copied into the store, through this machine's memory.

The address of a copy is made of its source's URL, so that a plan knows it without a network. Its manifest,
``data/manifests/<address>.json``, says of each file which version was copied; what is still that version is not copied
again, also not after a copy that was broken off. A source that has changed brings its copy up to date in place, unless
a run that is not over was given it. One client at a time copies to an address, by a lease; others wait, and find it.

`bring` does so for remote inputs; a `Source` says what else there may be (`carry`: the checkpoint of another run). A
run that goes on to another place brings what the store that it leaves has (`Left`): who moves it needs no source.
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
from typing import Any, NamedTuple, Protocol

from ..errors import CloudtrainError, ConflictError, DigestError, SpecError, StorageError
from ..provider_api.protocol import Layout, LayoutInput
from ..storage.errors import TransientError, translate
from ..storage.files import PIECE, Entry, Moving, Progress, parallel
from ..storage.fsspec_pool import STREAMED
from ..storage.lease import FOLDER, Sole
from ..storage.local_disk import safe
from ..storage.remote import AHEAD, RemoteFiles
from ..validate import url_scheme, without_secrets
from .store import Store, expect, to_json

__all__ = ["Copy", "Left", "Source", "address_of", "bring", "from_left", "version_of"]

LEASE = 60.0
"""Seconds after which another client may go on with a copy whose maker has gone."""
SAVED_SECONDS = 30.0
"""How often what has been copied is written down."""
MEMORY = 160 << 20
"""Bytes that may be under way: whole small files, and parts of large ones with what a client library holds of them."""
ANNOUNCED = 86400.0
"""Seconds for which somebody who has staged a copy may still be about to record the run that needs it."""
TRIES = 4
"""Of a file that comes as a stream, which begins anew; a range is tried again where it is asked for."""
_TAG = re.compile(r"\bETag=(?:W/)?\"?([^\"\s]+)", re.IGNORECASE)


class Left(NamedTuple):
    """The place that a run leaves for another one: its store, and where that run was told to find what it needs."""

    store: Store
    layout: Layout

    def gave(self, address: str) -> bool:
        """Whether the run was given the copy at ``address``. Any other there is of whatever its source was once."""
        resume = self.layout.resume if self.layout.resume_source is not None else None
        inputs = [item.url for item in self.layout.inputs.values() if item.source is not None]
        return address in {address_of(self.layout.store, url) for url in (resume, *inputs) if url is not None}


def bring(
    store: Store,
    layout: Layout,
    *,
    left: Left | None = None,
    progress: Progress | None = None,
    say: Callable[[str], None] | None = None,
) -> int:
    """Copy what the store lacks of the inputs of ``layout`` that have a ``source``; bytes that had to move.

    Sources are reached as fsspec does by itself; what the run was given in ``left``, the place before, comes from its
    copy there, unless that is not whole or damaged. `SpecError` for one that holds no file, `ConflictError` for one
    that changed since a run that goes on was given its copy, `StorageError` for one that changes meanwhile;
    `AuthError`.
    """
    wanted = {item.url: (name, item) for name, item in layout.inputs.items() if item.source is not None}
    return sum(_brought(store, layout, name, item, left, progress, say) for name, item in wanted.values())


def _brought(
    store: Store,
    layout: Layout,
    name: str,
    item: LayoutInput,
    left: Left | None,
    progress: Progress | None,
    say: Callable[[str], None] | None,
) -> int:
    address = address_of(store.url, item.url)
    copy = partial(Copy, store, layout.run_id, address, progress=progress, say=say)
    moved = from_left(left, address, copy, name=name, field=f"inputs.{name}", say=say)
    return copy(_Input(name, item, store.moving.mover)).run() if moved is None else moved


def from_left(
    left: Left | None,
    address: str,
    copy: Callable[[Source], Copy],
    *,
    name: str,
    field: str,
    say: Callable[[str], None] | None,
) -> int | None:
    """Copy what the run was given at ``address`` of ``left``; bytes that had to move. None where it is to come from
    its source: it was given nothing there, or that is not whole, or damaged, of which ``say`` is told."""
    if (held := _Held.of(left, address, name=name, field=field)) is None:
        return None
    try:
        return copy(held).run()
    except DigestError as exc:
        if say is not None:
            say(f"{exc}; it is copied from where it came from")
        return None


def address_of(store: str, url: str) -> str:
    """The name below ``data/`` of what the store at ``store`` has at ``url``."""
    return url[len(store) + 1 :].split("/")[1]


class Source(Protocol):
    """What is copied. Methods raise `CloudtrainError`."""

    name: str
    """In messages: what it is to the job."""
    shown: str
    """In messages and in the manifest: where it is."""
    field: str
    """Of the job, which named it."""
    tries: int
    """Of a file, whose pieces begin anew; what has its own patience is tried again where it is asked for."""
    instead: str
    """Ends the sentence that it has changed and another run has the copy: what else one may do."""
    last: str
    """The file that makes the others count, if one does."""
    facts: Mapping[str, Any]
    """What the manifest is to say beside the files."""
    given: bool
    """Whether it is a copy that a run was given: it stays as it is, while what it was made of may have gone on."""

    def entries(self) -> dict[str, Entry]:
        """Its files by their paths in the copy, with nothing remembered of what was there."""

    def pieces(self, path: str, entry: Entry) -> Generator[bytes, None, None]:
        """The content of one of them."""

    def check(self, path: str, sha256: str) -> None:
        """Raise `DigestError` for content that is not what was promised."""


class _Input:
    """A channel's data, reached as fsspec does by itself."""

    instead = last = ""
    given = False
    facts: Mapping[str, Any] = {}

    def __init__(self, name: str, item: LayoutInput, mover: str) -> None:
        assert item.source is not None
        self.name, self._file, self._url, self._mover = name, item.file, item.source, mover
        self.shown, self.field = without_secrets(item.source), f"inputs.{name}"
        self.tries = TRIES if url_scheme(item.source) in STREAMED else 1
        self._source = self._opened()

    def _opened(self) -> RemoteFiles:
        return RemoteFiles(url=self._url if self._file else self._url.rstrip("/"), moving=Moving(mover=self._mover))

    def entries(self) -> dict[str, Entry]:
        try:
            return self._entries(self._opened())
        except SpecError as exc:
            if exc.field != "store":  # as it is called of any URL that cannot be opened
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
        """Nobody promised anything."""


class _Held:
    """The whole copy that another store has at the same address, each file proved by the manifest there."""

    instead, tries, given = "", 2, True

    def __init__(self, store: Store, address: str, manifest: Mapping[str, Any], *, name: str, field: str) -> None:
        self.name, self.field, self.shown = name, field, f"{store.url}/data/{address}"
        self._store, self._address, self._files = store, address, manifest["files"]
        self.last = str(manifest.get("last") or "")
        own = ("protocol", "source", "complete", "files")
        self.facts: Mapping[str, Any] = {key: value for key, value in manifest.items() if key not in own}

    @classmethod
    def of(cls, left: Left | None, address: str, *, name: str, field: str) -> _Held | None:
        """What the run was given there; None where that is not whole, nothing was given, or no place is left."""
        if left is None or not left.gave(address):
            return None
        manifest = _manifest(left.store, address)
        return cls(left.store, address, manifest, name=name, field=field) if manifest else None

    def entries(self) -> dict[str, Entry]:
        manifest = _manifest(self._store, self._address)
        if manifest is None or manifest["files"] != self._files:
            raise StorageError(f"{self.shown} is no longer what it was; start again")
        return {path: Entry(item["size"], item["version"] or item["sha256"], 0.0) for path, item in self._files.items()}

    def pieces(self, path: str, entry: Entry) -> Generator[bytes, None, None]:
        key = f"data/{self._address}/{path}"
        if (size := self._store.files.size(key)) != entry.size:  # as whoever breaks off a removal leaves it
            raise DigestError(f"{self.shown}/{path} {'has gone' if size is None else 'is not what was copied there'}")
        yield from self._store.files.pieces(key, entry.size)

    def check(self, path: str, sha256: str) -> None:
        if sha256 != self._files[path]["sha256"]:
            raise DigestError(f"{self.shown}/{path} is not what was copied there")


def _manifest(store: Store, address: str) -> dict[str, Any] | None:
    """Of a whole copy, else None."""
    record = store.record(f"data/manifests/{address}.json")
    return record if record is not None and record.get("complete") is True else None


class Copy:
    """One copy, at ``data/<address>`` of the store, for the run; ``say`` and ``progress`` as in `bring`."""

    def __init__(
        self,
        store: Store,
        run_id: str,
        address: str,
        source: Source,
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
        """Make it whole; bytes that had to move."""
        found = self._list()
        self._store.announce_copy(self._run_id, self._address)  # before the look: who changes it looks after its mark
        if self._is_whole(found, self._store.record(self._manifest)):
            return 0
        mark = f"{FOLDER}/copying-{self._address}"
        waits = f"waiting: somebody else copies {self._shown}"
        with Sole(self._store.files, mark, seconds=LEASE, say=self._say, waits=waits) as sole:
            found = self._list()  # it may have taken long to come to this
            record = self._store.record(self._manifest)
            if self._is_whole(found, record):
                return 0
            there = self._store.files.list(f"data/{self._address}")
            if record is not None and not self._is_there(found, record, there):
                self._refuse_while_used(found, record)
            return self._copy(found, record or {}, there, sole)

    def _is_whole(self, found: Mapping[str, Entry], record: Mapping[str, Any] | None) -> bool:
        """Whether ``record`` is that of a whole copy of these very versions, and of nothing else."""
        files = (record or {}).get("files") or {}
        whole = record is not None and record.get("complete") is True and len(files) == len(found)
        return whole and all(_is_copy(files.get(path), entry) for path, entry in found.items())

    def _is_there(self, found: Mapping[str, Entry], record: Mapping[str, Any], there: Mapping[str, int]) -> bool:
        """Whether a copy that nobody has called whole is: whoever was about to change it has gone."""
        return self._is_whole(found, {**record, "complete": True}) and there == {
            self._at(path): entry.size for path, entry in found.items()
        }

    def _copy(self, found: Mapping[str, Entry], record: Mapping[str, Any], there: Mapping[str, int], sole: Sole) -> int:
        known = record.get("files") or {}
        self._done = {
            path: dict(known[path])
            for path, entry in found.items()
            if _is_copy(known.get(path), entry) and there.get(self._at(path)) == entry.size
        }
        rest = {path: entry for path, entry in found.items() if path not in self._done}
        self._say(f"copying {self._source.name} from {self._shown}")
        expect(self._progress, [entry.size for entry in rest.values()])
        self._save(sole, complete=False)  # from here on nobody takes it for whole
        try:
            self._store.files.discard(sorted(set(there) - set(map(self._at, found))))
            last = self._source.last
            self._all({path: entry for path, entry in rest.items() if path != last}, sole)
            self._all({path: entry for path, entry in rest.items() if path == last}, sole)
            self._check(found)
        except BaseException:
            with contextlib.suppress(CloudtrainError):
                self._save(sole, complete=False)
            raise
        self._save(sole, complete=True)
        return sum(entry.size for entry in rest.values())

    def _list(self) -> dict[str, Entry]:
        """The source's files by their paths in the copy."""
        found = self._source.entries()
        for path, entry in found.items():
            if not safe(path):
                raise SpecError(f"{self._shown}: {path!r} is no name that every system takes", field=self._source.field)
            if entry.size < 0:
                raise StorageError(f"{self._shown}: the server does not say how large {path} is; copy it to a store")
        return found

    def _refuse_while_used(self, found: Mapping[str, Entry], record: Mapping[str, Any]) -> None:
        """Raise `ConflictError` while somebody counts on the copy as it is; who begins to meanwhile finds it not whole,
        and waits."""
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
        """Whether the run is not over and was given this copy; of one whose record cannot be read nobody knows."""
        if self._store.result(run_id) is not None:
            return False
        key = f"runs/{run_id}/run.json"
        record = self._store.record(key)
        return self._address in json.dumps(record) if record else self._store.files.exists(key)

    def _announced(self) -> list[str]:
        """Whoever counts on this copy, and has not yet recorded a run."""
        found = self._store.files.entries(FOLDER)
        now = max((entry.modified for entry in found.values()), default=0.0)
        users = []
        for key, entry in found.items():
            record = self._store.record(key) if key.endswith(".json") and now - entry.modified < ANNOUNCED else None
            who = str((record or {}).get("for"))
            if self._address in (record or {}).get("copied", ()) and who != self._run_id:
                users += [] if self._store.files.exists(f"runs/{who}/run.json") else [who]
        return users

    # ------------------------------------------------------------------------------------------------------------ bytes

    def _all(self, rest: Mapping[str, Entry], sole: Sole) -> None:
        """Small files first: they would wait behind the large ones, which have most of the memory."""
        order = sorted(rest, key=lambda path: rest[path].size)
        with concurrent.futures.ThreadPoolExecutor(self._store.moving.concurrency) as pool:
            futures = [pool.submit(self._one, path, rest[path], sole) for path in order]
            try:
                for future in concurrent.futures.as_completed(futures):
                    future.result()
            except BaseException:
                # What is under way ends at its next piece, and is waited for: it must not land later.
                self._stop.set()
                pool.shutdown(wait=False, cancel_futures=True)
                if self._failed:  # the first: others may have stopped for it, and come out before it
                    raise self._failed[0] from None
                raise

    def _one(self, path: str, entry: Entry, sole: Sole) -> None:
        try:
            self._copy_one(path, entry, sole)
        except BaseException as exc:
            self._failed.append(exc)
            self._stop.set()
            raise

    def _copy_one(self, path: str, entry: Entry, sole: Sole) -> None:
        digest, moved = hashlib.sha256(), 0

        def pieces() -> Generator[bytes, None, None]:
            nonlocal digest, moved
            digest, at = hashlib.sha256(), 0
            with contextlib.closing(self._read(path, entry)) as source:
                for piece in source:
                    self._go_on()
                    sole.check()  # before the last has gone: else it would land in another client's finished copy
                    digest.update(piece)
                    if at + len(piece) >= entry.size:  # before the last has gone: else it would be there
                        self._source.check(path, digest.hexdigest())
                    yield piece
                    at += len(piece)
                    if self._progress is not None and at > moved:
                        self._progress(self._at(path), at - moved)
                        moved = at

        with self._room.taken(_weight(entry.size)):
            self._go_on()
            for left in range(self._source.tries - 1, -1, -1):
                sole.check()
                try:
                    self._store.files.receive(self._at(path), entry.size, pieces)
                    break
                except (TransientError, DigestError):
                    if not left or self._stop.is_set():
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
        """The source's pieces; what fails there is not taken for the target's failure."""
        where = self._shown if self._shown.endswith(f"/{path}") else f"{self._shown}/{path}"
        try:
            with contextlib.closing(self._source.pieces(path, entry)) as pieces:
                yield from pieces
        except FileNotFoundError:
            raise StorageError(f"{where} went away while it was copied; start again") from None
        except (CloudtrainError, GeneratorExit):
            raise
        except Exception as exc:  # back ends raise anything; the table sorts it
            raise translate(exc, where) from exc

    def _check(self, found: Mapping[str, Entry]) -> None:
        """Raise `StorageError` unless the source is as it was, and the copy as large."""
        now = self._list()
        changed = [path for path in found.keys() | now.keys() if not _alike(found.get(path), now.get(path))]
        there = self._store.files.list(f"data/{self._address}")
        wrong = [path for path, entry in found.items() if there.get(self._at(path)) != entry.size]
        for path in (*changed, *wrong):
            self._done.pop(path, None)
        if changed:
            raise StorageError(f"{self._shown}: {min(changed)} changed while it was copied; start again")
        if wrong:
            raise StorageError(f"{self._at(min(wrong))} is not what was written; somebody else writes there")

    def _save(self, sole: Sole, *, complete: bool) -> None:
        with self._lock:
            record = {"protocol": 1, "source": self._shown, "complete": complete, "files": dict(self._done)}
            record |= {"last": self._source.last} if self._source.last else {}
            record |= self._source.facts
            sole.check()
            self._store.files.write(self._manifest, to_json(record))

    def _at(self, path: str) -> str:
        return f"data/{self._address}/{path}"


class _Room:
    """So many bytes of memory; what is larger than all of it has all of it."""

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
    """Bytes of memory that a copy of a file takes: of a small one the pieces and their sum, of a large one the pieces
    ahead and what a client library sends at once."""
    return 3 * size if size <= PIECE else PIECE * (AHEAD + 9)


def version_of(entry: Entry) -> str:
    """What is another one when the content is, by either library's listing."""
    tag = _TAG.search(entry.version)
    return tag[1] if tag else entry.version


def _alike(one: Entry | None, other: Entry | None) -> bool:
    return one is not None and other is not None and (one.size, version_of(one)) == (other.size, version_of(other))


def _is_copy(record: Any, entry: Entry) -> bool:
    """Whether ``record`` is of that very version; of a source that tells none, nobody knows."""
    if not isinstance(record, Mapping) or not entry.version:
        return False
    return bool(record.get("size") == entry.size and record.get("version") == version_of(entry))
