"""Copy what a run's nodes cannot read into the run's folder: remote inputs, and a checkpoint of another store.

A copy is complete before run.json exists, and never changes after that; `gc` collects it with the run. A plan knows its
URL without a network. The bytes pass through this machine's memory. ``listing.json`` next to an input's copy is created
exclusively: it fixes the version of each file, for every client that submits the run. ``digests.json`` lists the files
that have been copied. A run that moves to another store takes its copies from the store that it leaves.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import re
import threading
from collections.abc import Callable, Collection, Generator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ..errors import AuthError, CloudtrainError, ConflictError, DigestError, SpecError, StorageError, scrubbed
from ..job.run_id import is_run_id
from ..provider_api.protocol import Layout, LayoutInput
from ..runtime.checkpoint_model import Checkpoint, resumable
from ..settings.settings import Settings
from ..storage.errors import CannotSwapError, TransientError, translate
from ..storage.files import PIECE, Entry, Progress, parallel
from ..storage.fsspec_pool import STREAMED
from ..storage.local_disk import local_path, safe
from ..storage.timings import CLIENT_TIMINGS
from ..validate import json_loads, url_scheme, without_secrets
from .store import COMMIT, Store, committed_in, copied_input_url, expect, in_store, manifest_key, next_of, to_json

if TYPE_CHECKING:
    from ..storage.remote import RemoteFiles

Say = Callable[[str], None]

FIELD = "resume_from"
TRIES = 4
"""Tries for a streamed file, which starts again; ranges are retried by the client."""
LOOKS = 4
"""Tries to find the newest checkpoint: an unfinished run deletes its older ones."""
_ANOTHER_ID = "send the job again with another --run-id"
_ANOTHER_RUN = f"name another run, or leave {FIELD} out to start from the beginning"
_BELOW = "live/checkpoints"
_WITHIN = re.compile(r"(.+)/runs/([^/]+)(/.*)?")
_TAG = re.compile(r"\bETag=(?:W/)?\"?([^\"\s]+)", re.IGNORECASE)
_RUN = re.compile(rf"(.+)/runs/([^/]+)/({_BELOW}(?:/[^/]+){{0,2}})")


class PreviousPlace(NamedTuple):
    """The place that a run leaves: its store, and the run's layout there."""

    store: Store
    layout: Layout


# ------------------------------------------------------------------------------------------------------ copies of files


class CopySource(Protocol):
    """The source of a copy. Methods raise `CloudtrainError`.

    In messages, ``name`` is its role in the job, ``shown`` its location and ``field`` the job's field that names it.
    """

    name: str
    shown: str
    field: str
    tries: int = 2
    """Tries for each file, whose pieces start again; sources with their own retries have fewer."""
    last: str = ""
    """The file that is copied last because it makes the others valid, or ""."""
    restart: str = "run the same command again"
    """The hint if the source changes during the copy."""

    def entries(self) -> dict[str, Entry]:
        """Return its files by their paths in the copy, from a fresh listing."""

    def pieces(self, path: str, entry: Entry) -> Generator[bytes, None, None]:
        """Yield the content of one file."""

    def check(self, path: str, sha256: str) -> None:
        """Raise `DigestError` if the content differs from its expected digest."""


class _NotNeededError(StorageError):
    """Another client has recorded the run, so its copies are complete."""


class OverwrittenError(StorageError):
    """A copy that lacks files that were written: another client has removed or replaced them."""


class Copy:
    """The files ``found`` of ``source``, on their way to ``folder`` of the store.

    ``digests`` are the SHA-256 of the files there, saved at ``journal`` now and then: a killed client loses little. A
    file that is in ``known`` (default: the journal) and there with its size is not copied again. As often, the copy
    looks for the run ``run_id`` that it is for, if any: it stops if that run is recorded.
    """

    def __init__(
        self,
        store: Store,
        folder: str,
        source: CopySource,
        found: Mapping[str, Entry],
        *,
        journal: str,
        known: Mapping[str, str] | None = None,
        run_id: str = "",
        progress: Progress | None = None,
        say: Say | None = None,
    ) -> None:
        self._store, self._folder, self._source, self._found = store, folder, source, found
        self._known = read_digests(store, journal) if known is None else known
        self._journal, self._run_id, self._progress, self._say = journal, run_id, progress, say
        self._lock = threading.Lock()
        self._over, self._ended = threading.Event(), threading.Event()
        self._wrong: set[str] = set()
        self.digests: dict[str, str] = {}

    def run(self) -> int:
        """Complete the copy; return the bytes that moved.

        Raises `StorageError` if the source changes meanwhile, and `OverwrittenError`. No file is ever partial.
        """
        there = self._store.files.list(self._folder)
        for path, entry in self._found.items():
            # Without a version the source may have changed since.
            if entry.version and path in self._known and there.get(self._at(path)) == entry.size:
                self.digests[path] = self._known[path]
        rest = {path: entry for path, entry in self._found.items() if path not in self.digests}
        if not rest:
            return 0
        if self._say is not None:
            self._say(f"copying {self._source.name} from {self._source.shown}")
        expect(self._progress, [entry.size for entry in rest.values()])
        keeper = threading.Thread(target=self._keep, daemon=True)
        keeper.start()
        try:
            self._copy(rest)
            self._check()
        except _NotNeededError:
            return 0
        except BaseException:
            with contextlib.suppress(CloudtrainError):
                self._save()
            raise
        finally:
            self._ended.set()
            keeper.join()
        self._save()
        return sum(entry.size for entry in rest.values())

    def _copy(self, rest: Mapping[str, Entry]) -> None:
        """Copy small files several at a time, then each large one, which is read and written in parallel pieces."""
        last = [path for path in rest if path == self._source.last]
        small = [path for path in rest if path not in last and rest[path].size <= PIECE]
        large = [path for path in rest if path not in last and path not in small]
        parallel(self._copy_one, small, jobs=self._store.moving.concurrency)
        for path in (*large, *last):
            self._copy_one(path)

    def _copy_one(self, path: str) -> None:
        entry, digest, moved = self._found[path], hashlib.sha256(), 0

        def pieces() -> Generator[bytes, None, None]:
            nonlocal digest, moved
            digest, at = hashlib.sha256(), 0
            with contextlib.closing(self._read(path, entry)) as source:
                for piece in source:
                    self._check_needed()
                    digest.update(piece)
                    if at + len(piece) >= entry.size:  # before the last piece: else the file would exist
                        self._source.check(path, digest.hexdigest())
                    yield piece
                    at += len(piece)
                    if self._progress is not None and at > moved:
                        self._progress(self._at(path), at - moved)
                        moved = at

        self._check_needed()
        for tries in range(1, self._source.tries + 1):
            try:
                self._store.files.receive(self._at(path), entry.size, pieces)
                break
            except (TransientError, DigestError):
                if tries == self._source.tries:
                    raise
        with self._lock:
            self.digests[path] = digest.hexdigest()

    def _read(self, path: str, entry: Entry) -> Generator[bytes, None, None]:
        """Yield the source's pieces; its failures are kept apart from the target's."""
        shown = self._source.shown
        where = shown if shown.endswith(f"/{path}") else f"{shown}/{path}"
        try:
            with contextlib.closing(self._source.pieces(path, entry)) as pieces:
                yield from pieces
        except FileNotFoundError:
            raise StorageError(f"{where} was deleted while it was copied", hint=self._source.restart) from None
        except (CloudtrainError, GeneratorExit):
            raise
        except Exception as exc:  # back ends raise any class; the table sorts them
            raise translate(exc, where) from exc

    def _keep(self) -> None:
        """Save the digests, and look whether the copy is needed, until it has ended."""
        while not self._ended.wait(CLIENT_TIMINGS.copy_save):
            with contextlib.suppress(CloudtrainError):  # the copy itself meets the same failure
                if self._run_id and self._store.has_run(self._run_id):
                    self._over.set()
                    return
                self._save()

    def _check_needed(self) -> None:
        """Raise if another client has recorded the run: its nodes may be reading the copy."""
        if self._over.is_set():
            raise _NotNeededError(f"{self._source.shown} has been copied by another client")

    def _check(self) -> None:
        """Raise `StorageError` if the source has changed or the copy's sizes differ."""
        now, there = list_source(self._source), self._store.files.list(self._folder)
        changed = [path for path in self._found.keys() | now.keys() if not _alike(self._found.get(path), now.get(path))]
        wrong = [path for path, entry in self._found.items() if there.get(self._at(path)) != entry.size]
        self._wrong.update(changed, wrong)
        if changed:
            why = f"{self._source.shown}: {min(changed)} changed while it was copied"
            raise StorageError(why, hint=self._source.restart)
        if wrong:
            raise OverwrittenError(f"{self._at(min(wrong))} has changed: another client writes the same files")

    def _save(self) -> None:
        """Merge the digests into the journal, where other clients of the same copy save theirs."""
        while True:
            found = self._store.files.load(self._journal)
            before = _digests(found.data) if found is not None else {}
            with self._lock:
                merged = before | self.digests
            files = {path: sha256 for path, sha256 in merged.items() if path not in self._wrong}
            if found is not None and files == before:
                return
            data = to_json({"protocol": 1, "source": self._source.shown, "files": files})
            try:
                # Two equal contents are fine here: they have the same digests.
                self._store.files.swap(self._journal, found and found.version, data)
            except FileExistsError:
                continue
            except CannotSwapError:
                self._store.files.write(self._journal, data)
            return

    def _at(self, path: str) -> str:
        return f"{self._folder}/{path}"


def read_digests(store: Store, journal: str) -> dict[str, str]:
    """Return the SHA-256 of copied files by path, as the clients saved them."""
    found = store.files.load(journal)
    return _digests(found.data) if found is not None else {}


def _digests(journal: bytes) -> dict[str, str]:
    try:
        return {str(path): str(sha256) for path, sha256 in json_loads(journal)["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError):  # a killed client left a part of it
        return {}


def list_source(source: CopySource) -> dict[str, Entry]:
    """Return the source's files by path. Raises `SpecError` for a name that not every system takes, `StorageError` for
    a file of unknown size."""
    found = source.entries()
    for path, entry in found.items():
        if not safe(path):
            why = f"{source.shown}: not every system allows the name {path!r}"
            raise SpecError(why, field=source.field, hint="rename that file")
        if entry.size < 0:
            why = f"{source.shown}: the server does not say how large {path} is"
            raise StorageError(why, hint="copy the data to your store, and use that URL")
    return found


def version_of(entry: Entry) -> str:
    """Return a version that changes with the content: the ETag alone, if the server has one."""
    tag = _TAG.search(entry.version)
    return tag[1] if tag else entry.version


def _alike(one: Entry | None, other: Entry | None) -> bool:
    return one is not None and other is not None and (one.size, version_of(one)) == (other.size, version_of(other))


def _decide(store: Store, key: str, record: Mapping[str, Any], part: str, *, run_id: str, field: str) -> None:
    """Create the record of what a run's copy is of. Raises `ConflictError` if another one was first, unless its
    ``part`` is the same."""
    if store.files.create(key, to_json(record)):
        return
    first = store.record(key)
    if first is None:  # a killed client left a part of it
        store.files.write(key, to_json(record))
    elif first.get(part) != record[part]:
        source, before = record["source"], first.get("source")
        changed = f"{source} has changed since its copy for run {run_id} began"
        why = changed if before == source else f"run {run_id} has begun with a copy of {before}, not of {source}"
        raise ConflictError(why, field=field, hint=_ANOTHER_ID)


# --------------------------------------------------------------------------------------------------------------- inputs


class RemoteInput(CopySource):
    """The data at ``url``, read with this machine's own credentials: the folder there, or one file, named ``file``.

    ``restart`` is the hint if the data change during the copy.
    """

    def __init__(self, url: str, file: str | None, *, name: str, field: str, restart: str = CopySource.restart) -> None:
        self.restart = restart
        self.name, self.field, self.shown = name, field, without_secrets(url)
        self._url, self._file = url if file else url.rstrip("/"), file
        self.tries = TRIES if url_scheme(url) in STREAMED else 1
        self._source = self._opened()

    def _opened(self) -> RemoteFiles:
        from ..storage.remote import RemoteFiles  # loaded for remote data only

        return RemoteFiles(url=self._url)

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
                hint = "for a single file, give a URL that ends in a suffix such as .csv" if source.entry("") else ""
                raise SpecError(f"{self.shown} holds no file", field=self.field, hint=hint)
            return found
        entry = source.entry("")
        if entry is None:
            hint = "for a folder, let the URL end in /"
            raise SpecError(f"there is no file {self.shown}", field=self.field, hint=hint)
        return {self._file: entry}

    def pieces(self, path: str, entry: Entry) -> Generator[bytes, None, None]:
        return self._source.pieces("" if self._file else path, entry.size)

    def check(self, path: str, sha256: str) -> None:
        """Accept any content: inputs have no expected digest, so there is nothing to check."""


class _EarlierCopy(CopySource):
    """The run's own copy of an input, in ``folder`` of the store that it leaves. ``digests`` are those of its files."""

    def __init__(self, store: Store, folder: str, files: Mapping[str, Entry], digests: Mapping[str, str], name: str):
        self.name, self.field, self.shown = name, f"inputs.{name}", f"{store.url}/{folder}"
        self._store, self._folder, self._files, self._digests = store, folder, files, digests

    def entries(self) -> dict[str, Entry]:
        return dict(self._files)

    def pieces(self, path: str, entry: Entry) -> Generator[bytes, None, None]:
        yield from self._store.files.pieces(f"{self._folder}/{path}", entry.size)

    def check(self, path: str, sha256: str) -> None:
        if sha256 != self._digests[path]:
            raise DigestError(f"{self.shown}/{path} has changed since it was copied there")


def copy_inputs(
    store: Store,
    layout: Layout,
    *,
    left: PreviousPlace | None = None,
    progress: Progress | None = None,
    say: Say | None = None,
) -> int:
    """Copy the inputs of ``layout`` with a ``source`` into the run's folder; return the bytes that moved.

    This machine's own credentials read the sources. An input that the run has in ``left``, the place before, comes
    from there, if its copy is complete and undamaged. Raises `SpecError` for a source without files, `StorageError` if
    it changes meanwhile, `ConflictError` if it changed since another copy for this run began, and `AuthError`.
    """
    moved = 0
    for name, item in layout.inputs.items():
        if item.source is None:
            continue
        copy = partial(_copy_input, store, layout.run_id, _folder_of(store, item), progress=progress, say=say)
        try:
            earlier = _earlier_copy(left, name, item)
            if earlier is not None:
                moved += copy(earlier)
                continue
        except DigestError as exc:
            if say is not None:
                say(f"{exc}; its source is copied again")
        field = f"inputs.{name}"
        # The listing of this run id names the versions from before a change, so no later copy can match it.
        moved += copy(RemoteInput(item.source, item.file, name=name, field=field, restart=_ANOTHER_ID))
    return moved


def _copy_input(
    store: Store, run_id: str, folder: str, source: CopySource, *, progress: Progress | None, say: Say | None
) -> int:
    found, root = list_source(source), folder.rpartition("/")[0]
    files = {path: {"size": entry.size, "version": version_of(entry)} for path, entry in found.items()}
    listing = {"protocol": 1, "source": source.shown, "files": files}
    _decide(store, f"{root}/listing.json", listing, "files", run_id=run_id, field=source.field)
    journal = f"{root}/digests.json"
    return Copy(store, folder, source, found, journal=journal, run_id=run_id, progress=progress, say=say).run()


def _earlier_copy(left: PreviousPlace | None, name: str, item: LayoutInput) -> _EarlierCopy | None:
    """Return the complete copy of ``item`` that the run has in ``left``; None if there is none. Raises `DigestError` if
    its listing is damaged, or if a file of it is missing or has another size."""
    before = left.layout.inputs.get(name) if left is not None else None
    if left is None or before is None or before.source != item.source:
        return None
    store, folder = left.store, _folder_of(left.store, before)
    root = folder.rpartition("/")[0]
    shared = root == "data"  # an earlier version's, shared between runs
    key = manifest_key(folder[5:]) if shared else f"{root}/listing.json"
    record = store.record(key) or {}
    if shared and record.get("complete") is not True:
        return None
    files = record.get("files") or {}
    try:
        found = {path: Entry(int(entry["size"]), str(entry["version"]), 0.0) for path, entry in files.items()}
        own = {path: str(entry["sha256"]) for path, entry in files.items()} if shared else None
    except (AttributeError, KeyError, TypeError, ValueError):
        raise DigestError(f"{store.url}/{key} is damaged") from None
    digests = read_digests(store, f"{root}/digests.json") if own is None else own
    if not found or not found.keys() <= digests.keys():
        return None
    there = store.files.list(folder)
    for path, entry in found.items():
        if there.get(f"{folder}/{path}") != entry.size:
            raise DigestError(f"{store.url}/{folder}/{path} has changed since it was copied there")
    return _EarlierCopy(store, folder, found, digests, name)


def _folder_of(store: Store, item: LayoutInput) -> str:
    """Return the key of the folder with the input's files."""
    key = item.url[len(store.url) + 1 :]
    return key.rpartition("/")[0] if item.file else key


def with_own_copies(layout: Layout) -> Layout:
    """Return ``layout`` with its copies below the run: earlier versions shared them between runs, below ``data/``."""
    inputs = {
        name: dataclasses.replace(item, url=copied_input_url(layout.run, name, item.file)) if item.source else item
        for name, item in layout.inputs.items()
    }
    resume = f"{layout.run}/resume/{_BELOW}" if layout.resume_source else layout.resume
    return dataclasses.replace(layout, inputs=inputs, resume=resume)


# ---------------------------------------------------------------------------------------------------------- checkpoints


class _Place(NamedTuple):
    """The checkpoints of a run: of its whole folder, of one name, or a single one."""

    store: str
    run_id: str
    below: str

    @property
    def title(self) -> str:
        """The name in messages: ``run 'first'``, or a checkpoint of it."""
        name = self.below.removeprefix(_BELOW).strip("/").partition("/")[0]
        return f"checkpoint {name!r} of run {self.run_id!r}" if name else f"run {self.run_id!r}"


def _place(url: str) -> _Place | None:
    match = _RUN.fullmatch(url)
    return _Place(*match.groups()) if match and is_run_id(match[2]) else None


def followed(url: str, settings: Settings, *, ask: bool) -> str:
    """Return ``url``, of a run or of anything in its folder, at the newest place of the run.

    Without ``ask``, only this machine's own files are read. A store that this client cannot read leaves the URL as it
    is: nodes may read it. Raises `StorageError` if a store does not answer, or if the places form a circle.
    """
    been = {url}
    while (match := _WITHIN.fullmatch(url)) and is_run_id(match[2]) and (ask or local_path(url) is not None):
        try:
            noted = in_store(match[1], settings, partial(next_of, run_id=match[2]))
        except (AuthError, SpecError):
            break
        if noted is None:
            break
        url = f"{noted['run']}{match[3] or ''}"
        if url in been:
            raise StorageError(f"{FIELD}: the run at {url} continued in another store, and from there back in this one")
        been.add(url)
    return url


def resume_copy_url(url: str, store: Store, run_id: str, schemes: Collection[str]) -> str | None:
    """Return where the run's copy of the checkpoints at ``url`` lies, for nodes that read ``schemes``.

    Return None if nodes can read them in place, or ``url`` is not a run's. Nodes on this machine (``file``) read its
    own files; for other stores the client has the credentials. Raises `SpecError` for a URL with a secret in it.
    """
    scheme = url_scheme(url)
    read = scheme == "file" if "file" in schemes else scheme in schemes
    if read or url.startswith(f"{store.url}/") or _place(url) is None:
        return None
    if scrubbed(url) != url:
        why = f"{scrubbed(url)} holds a password, key or signature"
        raise SpecError(why, field=FIELD, hint="leave it out of the URL, and sign in")
    return f"{store.url}/runs/{run_id}/resume/{_BELOW}"


def copy_checkpoint(
    store: Store,
    layout: Layout,
    *,
    settings: Settings,
    left: PreviousPlace | None = None,
    progress: Progress | None = None,
    say: Say | None = None,
) -> int:
    """Copy the newest complete checkpoint of ``layout.resume_source`` unless the run has one; return the bytes that
    moved.

    The source's store is opened with ``settings``. A checkpoint with a damaged file is skipped and reported to ``say``.
    A copy in ``left``, the place that the run leaves, is taken from there: the run keeps its checkpoint. Raises
    `SpecError` if nothing complete is left, `ConflictError` if the run began with a copy of another source,
    `StorageError`, `AuthError`.
    """
    place, say = _place(layout.resume_source or ""), say or (lambda _: None)
    if place is None or layout.resume is None:
        return 0
    folder = layout.resume[len(store.url) + 1 :]
    root = folder.removesuffix(f"/{_BELOW}")
    record = {"protocol": 1, "source": layout.resume_source}
    decide = partial(_decide, store, f"{root}/source.json", record, "source", run_id=layout.run_id, field=FIELD)
    if committed_in(store.files, folder)[0]:
        decide()
        return 0

    def copy(source: CopySource) -> int:
        decide()
        found, journal = source.entries(), f"{root}/digests.json"
        # A file of the same name and size may be of another source, tried before.
        digests = read_digests(store, journal)
        known = {path: entry.version for path, entry in found.items() if digests.get(path) == entry.version}
        run_id = layout.run_id
        return Copy(
            store, folder, source, found, known=known, journal=journal, run_id=run_id, progress=progress, say=say
        ).run()

    if left is not None and left.layout.resume and left.layout.resume_source == layout.resume_source:
        moved = _from_earlier_copy(left.store, left.layout.resume, copy, say)
        if moved is not None:
            return moved
    try:
        source = in_store(place.store, settings, partial(_with_run, place))
    except SpecError as exc:
        if left is None:
            raise
        why = f"{FIELD}: {exc.message}, and {left.store.url} has no complete copy of it"
        hint = f"on a machine that can read that run, submit the same job again with --run-id {layout.run_id}"
        raise StorageError(why, hint=hint) from None
    return _copy_newest(source, place, copy, say)


def _copy_newest(source: Store, place: _Place, copy: Callable[[CopySource], int], say: Say) -> int:
    """Copy the newest checkpoint that is complete and undamaged; return the bytes that moved."""
    for _ in range(LOOKS):
        for checkpoint in _candidates(source, place):
            try:
                return copy(_ChosenCheckpoint(source, checkpoint))
            except _DamagedError as exc:
                say(f"{exc}; the previous checkpoint is used")
            except _GoneError:
                break
        else:
            why = f"{place.title}: nothing complete and undamaged to resume from"
            raise SpecError(why, field=FIELD, hint=_ANOTHER_RUN)
    why = f"{place.title}: its checkpoints were deleted faster than they could be copied"
    raise StorageError(why, hint="run the same command again")


def _from_earlier_copy(store: Store, url: str, copy: Callable[[CopySource], int], say: Say) -> int | None:
    """Copy the checkpoint that the run has at ``url`` of the store that it leaves; return the bytes that moved. Return
    None if it is missing, incomplete or damaged, and report that."""
    why = f"{url} has no complete checkpoint"
    for checkpoint in reversed(committed_in(store.files, url[len(store.url) + 1 :])[0]):
        try:
            return copy(_ChosenCheckpoint(store, checkpoint))
        except (_DamagedError, _GoneError) as exc:
            why = str(exc)
    say(f"{why}; its source is copied again")
    return None


def _with_run(place: _Place, store: Store) -> Store:
    """Return ``store``. Raises `SpecError` if it has no such run."""
    if not store.has_run(place.run_id):
        raise SpecError(f"no run {place.run_id!r} in {place.store}", field=FIELD)
    return store


def _candidates(source: Store, place: _Place) -> list[Checkpoint]:
    """Return the run's checkpoints, best first. Raises `SpecError` if there is none."""
    root = f"runs/{place.run_id}/{place.below}/"
    found = resumable([item for item in source.checkpoints(place.run_id) if f"{item.key}/".startswith(root)])
    if not found:
        raise SpecError(f"{place.title} has no complete checkpoint", field=FIELD, hint=_ANOTHER_RUN)
    return found[::-1]


class _DamagedError(DigestError):
    """A file that differs from its committed digest."""


class _GoneError(StorageError):
    """A checkpoint that the run deleted during the copy."""


class _ChosenCheckpoint(CopySource):
    """One checkpoint. Its files' versions are their digests: they never change."""

    name, field = "the checkpoint", FIELD

    def __init__(self, source: Store, checkpoint: Checkpoint) -> None:
        self._files, self._key = source.files, checkpoint.key
        self._below = "/".join(checkpoint.key.split("/")[-2:])
        self.shown = f"{source.url}/{checkpoint.key}"
        self.last = f"{self._below}/{COMMIT}"
        self._commit = self._read(checkpoint)
        digests = {path: (size, sha256) for path, (size, sha256) in checkpoint.files.items()}
        digests[COMMIT] = (len(self._commit), hashlib.sha256(self._commit).hexdigest())
        self._entries = {f"{self._below}/{path}": Entry(size, sha, 0.0) for path, (size, sha) in digests.items()}

    def _read(self, checkpoint: Checkpoint) -> bytes:
        """Return commit.json. Raises `_GoneError` if it is missing or not that of ``checkpoint``."""
        try:
            data = self._files.read(f"{self._key}/{COMMIT}")
            files = {path: (item["size"], item["sha256"]) for path, item in json_loads(data)["files"].items()}
        except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
            files = None
        if files != dict(checkpoint.files):
            raise _GoneError(f"{self.shown} was deleted")
        return data

    def entries(self) -> dict[str, Entry]:
        return dict(self._entries)

    def pieces(self, path: str, entry: Entry) -> Generator[bytes, None, None]:
        if path == self.last:
            yield self._commit
            return
        try:
            yield from self._files.pieces(f"{self._key}/{path[len(self._below) + 1 :]}", entry.size)
        except FileNotFoundError:
            raise _GoneError(f"{self.shown} was deleted") from None

    def check(self, path: str, sha256: str) -> None:
        if sha256 != self._entries[path].version:
            raise _DamagedError(f"{self.shown}: {path[len(self._below) + 1 :]} has changed since its commit")
