"""Copy the newest complete checkpoint of a run in another store into this store, for a run that resumes from it.

The copy's address is made of the given URL, so a plan knows it without any request. `carry` chooses the checkpoint when
the plan is sent and checks each file against ``commit.json``. The copy has the layout of ``live/checkpoints``, so nodes
read it like any run's. It holds one checkpoint at a time and is updated like a remote input (`relay`): never while an
unfinished run uses it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from functools import partial
from typing import NamedTuple

from ..errors import AuthError, DigestError, SpecError, StorageError, scrubbed
from ..job.job import is_run_id
from ..provider_api.protocol import Layout
from ..settings.settings import Settings
from ..storage.files import Entry, Progress
from ..storage.local_disk import local_path
from ..validate import json_loads, url_scheme
from .checkpoint import Checkpoint, resumable
from .remote_inputs import Copy, PreviousPlace, RemoteSource, address_of, from_left, version_of
from .store import Store, in_store, next_of

__all__ = ["carry", "followed", "place_for"]

FIELD = "resume_from"
COMMIT = "commit.json"
LOOKS = 4
"""Tries to find the newest checkpoint: an unfinished run deletes its older ones."""
_ORIGIN = "resumed from "
"""Prefix of the URL in the text that makes the address, so that no input has the same one."""
_BELOW = "live/checkpoints"
_WITHIN = re.compile(r"(.+)/runs/([^/]+)(/.*)?")
_RUN = re.compile(rf"(.+)/runs/([^/]+)/({_BELOW}(?:/[^/]+){{0,2}})")


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
            raise StorageError(f"{FIELD}: the run at {url} went on to another place, and that one back to it")
        been.add(url)
    return url


def place_for(url: str, store: Store, schemes: Collection[str]) -> str | None:
    """Return where in ``store`` to copy the checkpoints at ``url`` for nodes that read ``schemes``.

    Return None if nodes can read them in place, or ``url`` is not a run's. Nodes on this machine (``file``) read its
    own files; for other stores the client has the credentials. Raises `SpecError` for a URL with a secret in it.
    """
    scheme = url_scheme(url)
    read = scheme == "file" if "file" in schemes else scheme in schemes
    if read or url.startswith(f"{store.url}/") or _place(url) is None:
        return None
    if scrubbed(url) != url:
        raise SpecError(f"{scrubbed(url)} holds a password, key or signature; leave it out, and sign in", field=FIELD)
    return f"{store.url}/data/{hashlib.sha256(f'{_ORIGIN}{url}'.encode()).hexdigest()}/{_BELOW}"


def carry(
    store: Store,
    layout: Layout,
    *,
    settings: Settings,
    left: PreviousPlace | None = None,
    progress: Progress | None = None,
    say: Callable[[str], None] | None = None,
) -> int:
    """Copy the checkpoint of ``layout.resume_source`` unless the store has it; return the bytes that moved.

    The source's store is opened with ``settings``. A checkpoint with a damaged file is skipped and reported to ``say``.
    A copy in ``left``, the place that the run leaves, is taken from there: the run keeps its checkpoint. Raises
    `SpecError` if nothing complete is left, `ConflictError`, `StorageError`, `AuthError`.
    """
    place = _place(layout.resume_source or "")
    if place is None or layout.resume is None:
        return 0
    say = say or (lambda _: None)
    address = address_of(store.url, layout.resume)
    copy = partial(Copy, store, layout.run_id, address, progress=progress, say=say)
    moved = from_left(left, address, copy, name=_Chosen.name, field=FIELD, say=say)
    if moved is not None:
        return moved
    try:
        source = in_store(place.store, settings, partial(_with_run, place))
    except SpecError as exc:
        if left is None:
            raise
        why = f"{exc.message}, and {left.store.url} has no copy of it that is whole; submit the same job again"
        raise StorageError(f"{FIELD}: {why} with --run-id {layout.run_id} where the run can be read") from None
    known = (store.record(f"data/manifests/{address}.json") or {}).get("damaged")
    damaged = {str(mark) for mark in known} if isinstance(known, list) else set()
    for _ in range(LOOKS):
        for checkpoint in _candidates(source, place):
            try:
                found = _Chosen(source, place, checkpoint, damaged)
                if found.mark in damaged:
                    say(f"{found.shown} was not what was committed when it was copied last; the one before it is taken")
                    continue
                return copy(found).run()
            except _DamagedError as exc:
                say(f"{exc}; the one before it is taken")
                damaged.add(found.mark)
            except _GoneError:
                break
        else:
            raise SpecError(f"{place.title}: nothing complete and undamaged to resume from", field=FIELD)
    raise StorageError(f"{place.title}: its checkpoints were deleted faster than they could be copied; start again")


def _with_run(place: _Place, store: Store) -> Store:
    """Return ``store``. Raises `SpecError` if it has no such run."""
    if not store.files.exists(f"runs/{place.run_id}/run.json"):
        raise SpecError(f"no run {place.run_id!r} in {place.store}", field=FIELD)
    return store


def _candidates(source: Store, place: _Place) -> Iterator[Checkpoint]:
    """Yield the run's checkpoints, best first. Raises `SpecError` if there is none."""
    root = f"runs/{place.run_id}/{place.below}/"
    found = resumable([item for item in source.checkpoints(place.run_id) if f"{item.key}/".startswith(root)])
    if not found:
        hint = f"name another run, or leave {FIELD} out to start from the beginning"
        raise SpecError(f"{place.title} has no complete checkpoint", field=FIELD, hint=hint)
    return reversed(found)


class _DamagedError(DigestError):
    """A file that differs from its committed digest."""


class _GoneError(StorageError):
    """A checkpoint that the run deleted during the copy."""


class _Chosen(RemoteSource):
    """One checkpoint. Its files' versions are their digests: they never change."""

    name, field = "the checkpoint", FIELD

    def __init__(self, source: Store, place: _Place, checkpoint: Checkpoint, damaged: Iterable[str]) -> None:
        self._files, self._key = source.files, checkpoint.key
        self._below = checkpoint.key.removeprefix(f"runs/{place.run_id}/")
        self.shown = f"{source.url}/{checkpoint.key}"
        self.last = f"{self._below}/{COMMIT}"
        self.instead = f"; or name this checkpoint: --resume-from {self.shown}"
        self._commit = self._read(checkpoint)
        digests = {path: (size, sha256) for path, (size, sha256) in checkpoint.files.items()}
        digests[COMMIT] = (len(self._commit), hashlib.sha256(self._commit).hexdigest())
        self._entries = {f"{self._below}/{path}": Entry(size, sha, 0.0) for path, (size, sha) in digests.items()}
        versions = {path: version_of(entry) for path, entry in self._files.entries(self._key).items()}
        self.mark = hashlib.sha256(self._commit + json.dumps(versions, sort_keys=True).encode()).hexdigest()
        """Digest that changes when any file is rewritten, for example to repair a damaged one."""
        self.facts = {"damaged": sorted(damaged)}

    def _read(self, checkpoint: Checkpoint) -> bytes:
        """Return commit.json. Raises `_GoneError` if it is missing or not that of ``checkpoint``."""
        try:
            data = self._files.read(f"{self._key}/{COMMIT}")
            files = {path: (item["size"], item["sha256"]) for path, item in json_loads(data)["files"].items()}
        except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
            files = None
        if files != dict(checkpoint.files):
            raise _GoneError(f"{self.shown} has gone")
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
            raise _GoneError(f"{self.shown} has gone") from None

    def check(self, path: str, sha256: str) -> None:
        if sha256 != self._entries[path].version:
            raise _DamagedError(f"{self.shown}: {path[len(self._below) + 1 :]} is not what was committed")
