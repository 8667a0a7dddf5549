"""The newest complete checkpoint of a run in another store, copied into this one for a run that goes on from it.

A plan knows the copy's address, which is made of the URL that was given, and asks nobody which checkpoint it will be:
that `carry` finds out when the plan is sent, proving each file by ``commit.json``. The copy is laid out as the run's
own ``live/checkpoints``, so that nodes read it as they read any run's. It holds one checkpoint at a time, and is
brought up to date as a remote input's is (`relay`): never while a run that is not over was given it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

from ..errors import AuthError, DigestError, SpecError, StorageError, scrubbed
from ..job.job import is_run_id
from ..provider_api.protocol import Layout
from ..settings.settings import Caller, Settings
from ..storage.files import Entry, Moving, Progress
from ..storage.local_disk import local_path
from ..validate import json_loads, url_scheme
from .checkpoint import Checkpoint, resumable
from .remote_inputs import Copy, Left, address_of, from_left, version_of
from .store import Store, next_of

__all__ = ["carry", "followed", "place_for"]

FIELD = "resume_from"
COMMIT = "commit.json"
LOOKS = 4
"""How often the newest is looked for anew: a run that goes on takes its older checkpoints away."""
_ORIGIN = "resumed from "
"""Put before a URL to make an address of it, so that no input has the same."""
_BELOW = "live/checkpoints"
_WITHIN = re.compile(r"(.+)/runs/([^/]+)(/.*)?")
_RUN = re.compile(rf"(.+)/runs/([^/]+)/({_BELOW}(?:/[^/]+){{0,2}})")


class _Place(NamedTuple):
    """The checkpoints of a run: of all its folder, of one name, or a single one."""

    store: str
    run_id: str
    below: str

    @property
    def title(self) -> str:
        """What messages call it: ``run 'first'``, or a checkpoint of that."""
        name = self.below.removeprefix(_BELOW).strip("/").partition("/")[0]
        return f"checkpoint {name!r} of run {self.run_id!r}" if name else f"run {self.run_id!r}"


def _place(url: str) -> _Place | None:
    match = _RUN.fullmatch(url)
    return _Place(*match.groups()) if match and is_run_id(match[2]) else None


def followed(url: str, settings: Settings, *, ask: bool) -> str:
    """``url``, of a run or of what lies in its folder, in the place that the run has come to.

    Without ``ask`` as far as this machine's own files tell. A store that this client may not read, or that is none,
    tells nothing: nodes may read what it cannot. `StorageError` where one does not answer, or leads in a circle.
    """
    been = {url}
    while (match := _WITHIN.fullmatch(url)) and is_run_id(match[2]) and (ask or local_path(url) is not None):
        look = partial(_next, match[1], match[2], settings.mover)
        try:
            noted = settings.let_in(match[1], look)
        except (AuthError, SpecError):
            break
        if noted is None:
            break
        url = f"{noted['run']}{match[3] or ''}"
        if url in been:
            raise StorageError(f"{FIELD}: the run at {url} went on to another place, and that one back to it")
        been.add(url)
    return url


def _next(store: str, run_id: str, mover: str, caller: Caller) -> dict[str, Any] | None:
    return next_of(Store(store, storage=caller, moving=Moving(mover=mover)), run_id)


def place_for(url: str, store: Store, schemes: Collection[str]) -> str | None:
    """Where in ``store`` a run's checkpoints at ``url`` are to be copied for nodes that read ``schemes``.

    None where nodes read them in place, and for what is no run's. Nodes of this machine (``file``) read its own files;
    of what lies elsewhere the client knows the credentials. `SpecError` for a URL with a secret in it.
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
    left: Left | None = None,
    progress: Progress | None = None,
    say: Callable[[str], None] | None = None,
) -> int:
    """Copy what ``layout.resume_source`` means, unless the store has it; bytes that had to move.

    The source's store is opened as ``settings`` say. One whose file is not what was committed is passed over, and
    ``say`` is told. What a run was given a copy of in ``left``, the place that it leaves, comes from there, whoever
    moves it: the run goes on from the checkpoint that it was given. Raises `SpecError` where nothing complete is left,
    `ConflictError`, `StorageError`, `AuthError`.
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
        source = settings.let_in(place.store, partial(_opened, place, settings.mover))
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
    raise StorageError(f"{place.title}: checkpoints go away faster than they can be copied; start again")


def _opened(place: _Place, mover: str, caller: Caller) -> Store:
    """The source's store, which lets ``caller`` in. `SpecError` when it has no such run."""
    found = Store(place.store, storage=caller, moving=Moving(mover=mover))
    if not found.files.exists(f"runs/{place.run_id}/run.json"):
        raise SpecError(f"no run {place.run_id!r} in {place.store}", field=FIELD)
    return found


def _candidates(source: Store, place: _Place) -> Iterator[Checkpoint]:
    """Best first. `SpecError` where there is none."""
    root = f"runs/{place.run_id}/{place.below}/"
    found = resumable([item for item in source.checkpoints(place.run_id) if f"{item.key}/".startswith(root)])
    if not found:
        hint = f"name another run, or leave {FIELD} out to start from the beginning"
        raise SpecError(f"{place.title} has no complete checkpoint", field=FIELD, hint=hint)
    return reversed(found)


class _DamagedError(DigestError):
    """A file is not what was committed."""


class _GoneError(StorageError):
    """The run took the checkpoint away meanwhile."""


class _Chosen:
    """One checkpoint as a `relay.Source`. Its files' versions are their digests: they never change."""

    name, field, tries, given = "the checkpoint", FIELD, 2, False

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
        """Another one once any of its files was written anew, as by who mends a damaged one."""
        self.facts: Mapping[str, Any] = {"damaged": sorted(damaged)}

    def _read(self, checkpoint: Checkpoint) -> bytes:
        """commit.json as it is. `_GoneError` when it is not, or no longer, that of ``checkpoint``."""
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
