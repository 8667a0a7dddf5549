"""Find and remove the content of a store that no run refers to, and the platform's objects of runs that are gone.

A run refers to its own folder and everything that its run.json names. A sweep refers to everything in its sweep.json.
A client that is staging refers to everything that it announces (`lease`). In doubt a thing is kept: an unreadable
run.json stops all deletion, and without file times nothing is old enough.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import NotFoundError, StorageError
from ..job.run_id import is_run_id
from ..provider_api.protocol import NativeObject, ProviderExtras
from ..settings.settings import NO_SETTINGS, Settings
from ..storage.files import Entry, parallel
from ..storage.lease import DELETES, FOLDER, MARK, Lease, is_mark, load_lease
from ..storage.local_disk import TEMP, local_path, normalize
from ..storage.timings import CLIENT_TIMINGS
from ..validate import json_loads
from .store import SOURCES, Store, in_store, manifest_key

OLDER_THAN = 7 * 86400
"""Seconds in the store before an unused thing is removed."""
ANNOUNCED = 7 * 86400.0
"""Seconds for which an announcement counts: longer than any upload takes."""
WRITTEN = 86400.0
"""Seconds in which a client may still be writing a temporary file."""

AT_ONCE = 100
"""Files in one request, if the store takes as many."""
_DIGEST = re.compile(r"[0-9a-f]{64}")
_WORD = re.compile(r"[A-Za-z0-9._-]+")

Say = Callable[[str], None]
Listed = Callable[[Iterable[Mapping[str, Any]]], Mapping[NativeObject, ProviderExtras]]
"""Function that returns the platforms' objects, each with its provider, by one run.json of each place."""


@dataclass(frozen=True, kw_only=True)
class Leftover:
    """A thing that no run refers to: ``key`` in the store, its files and bytes; or ``native``, an object outside of it.

    ``kind`` is that of the object, or code, runtime, data, upload (data without a manifest; half-written files of a
    local folder), run (a run's folder without run.json) or staging (an announcement). ``modified`` is that of its
    newest file, in Unix seconds of the store's clock, or 0 if unknown. ``keys`` are removed for it, in that order.
    """

    kind: str
    key: str
    files: int
    bytes: int
    modified: float
    keys: tuple[str, ...] = field(repr=False)
    native: NativeObject | None = field(default=None, repr=False)


@dataclass(frozen=True, kw_only=True)
class Collected:
    """The result of `collect`: ``found`` is old enough and, if ``deleted``, gone; ``younger`` stays.

    ``unreadable`` are runs whose run.json cannot be read. While there are any, nothing is removed, and ``found`` may
    hold their files. Ages refer to ``now``, in Unix seconds.
    """

    store: str
    deleted: bool
    older_than: int
    now: float
    found: tuple[Leftover, ...]
    younger: tuple[Leftover, ...]
    unreadable: tuple[str, ...] = ()

    @property
    def bytes(self) -> int:
        return sum(item.bytes for item in self.found)


def collect_at(
    url: str,
    *,
    older_than: int = OLDER_THAN,
    delete: bool = False,
    settings: Settings = NO_SETTINGS,
    cwd: Path | None = None,
    say: Say | None = None,
    objects: Listed = lambda records: {},
) -> Collected:
    """Run `collect` on the store at ``url``, opened with ``settings``. Raises `NotFoundError` for a missing folder."""
    url = normalize(settings.resolved(url), cwd=cwd or Path.cwd())
    path = local_path(url)
    if path is not None and not path.is_dir():
        raise NotFoundError(f"there is no store at {path}", field="store")
    store, _ = in_store(url, settings, lambda store: (store, store.files.names("runs")))
    return collect(store, older_than=older_than, delete=delete, say=say, objects=objects)


def collect(
    store: Store,
    *,
    older_than: int = OLDER_THAN,
    delete: bool = False,
    lease: float = CLIENT_TIMINGS.lease,
    say: Say | None = None,
    objects: Listed = lambda records: {},
) -> Collected:
    """Return the things that no run refers to, largest first; ``delete`` removes those older than ``older_than`` s.

    Without it nothing is written, and ages are by this machine's clock. While one client deletes, others wait to stage,
    at most ``lease`` seconds longer than it lives. If a run.json cannot be read, raises `StorageError` and removes
    nothing.

    ``objects`` lists those of the platforms. A run's record is older than its objects, so the records are read again
    afterwards. An object counts if its run was in this store, and the store has another one: else it may be the empty
    folder of a volume that is not mounted.
    """
    named = _Named(store)
    named.read(time.time())
    natives = objects(named.places.values())
    if not delete:
        if natives:
            named.read(time.time())
        return _collected(store, named, older_than, time.time(), natives, deleted=False)
    _refuse_unreadable(named)
    with Lease(store.files, MARK, seconds=lease, say=say, waits=DELETES) as deleting:
        mark = load_lease(store.files, MARK)
        now = mark.modified if mark is not None else 0.0  # by the store's clock
        named.read(now)  # includes clients that began to stage before the mark was set
        _refuse_unreadable(named)
        done = _collected(store, named, older_than, now, natives, deleted=True)
        for item in done.found:
            deleting.check()
            if item.native is None:
                _remove(store, item, deleting)
            else:
                natives[item.native].remove(item.native)
            if say:
                say(f"removed {item.key}")
        for name in named.without:
            if is_run_id(name) and name not in named and not store.files.entries(f"runs/{name}"):
                store.files.prune(f"runs/{name}")
        deleting.check()
    return done


def _remove(store: Store, item: Leftover, deleting: Lease) -> None:
    """Remove in batches: a delayed client that has lost its lease removes at most the current batch."""
    root = local_path(store.url)
    if root is not None and (root / item.key).is_symlink():
        for key in item.keys:
            store.files.remove(key)
        return
    store.files.discard(item.keys[:1])
    for start in range(1, len(item.keys), AT_ONCE):
        deleting.check()
        store.files.discard(item.keys[start : start + AT_ONCE])
    store.files.prune(item.key)


def _collected(
    store: Store, named: _Named, older_than: int, now: float, objects: Iterable[NativeObject], *, deleted: bool
) -> Collected:
    found: list[Leftover] = []
    younger: list[Leftover] = []
    things = [*_leftovers(store, named), *_abandoned(store, named, objects)]
    for item in sorted(things, key=lambda item: (-item.bytes, item.key)):
        least = max(older_than, ANNOUNCED) if item.kind == "staging" else older_than
        if any(key.rpartition("/")[2].startswith(TEMP) for key in item.keys):
            least = max(least, WRITTEN)
        due = bool(item.modified) and bool(now) and now - item.modified >= least
        (found if due else younger).append(item)
    return Collected(
        store=store.url,
        deleted=deleted,
        older_than=older_than,
        now=now,
        found=tuple(found),
        younger=tuple(younger),
        unreadable=tuple(sorted(named.unreadable)),
    )


def _refuse_unreadable(named: _Named) -> None:
    if named.unreadable:
        names = ", ".join(sorted(named.unreadable)[:3])
        why = f"nothing is removed: run.json of {names} cannot be read, so the files that it needs are unknown"
        raise StorageError(why, hint="delete the folders of these runs in the store, if you do not need them")


class _Named:
    """All names in a store's run.json files and announcements; each further `read` adds the new ones."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._words: set[str] = set()
        self.runs: set[str] = set()
        self.places: dict[str, Mapping[str, Any]] = {}
        """One run.json of each provider and settings."""
        self._sweeps: set[str] = set()
        self.unreadable: set[str] = set()
        self.without: set[str] = set()

    def read(self, now: float) -> None:
        """Read announcements first: if one is gone by then, its run.json exists."""
        files = self._store.files
        for key, entry in files.entries(FOLDER).items():
            if not is_mark(key) and not (now and entry.modified and now - entry.modified >= ANNOUNCED):
                self._take(files.read, key)
        for sweep_id in self._store.sweeps():  # the next trial needs the sweep's code, data and runtime
            if sweep_id not in self._sweeps and self._take(files.read, f"sweeps/{sweep_id}/sweep.json") is not None:
                self._sweeps.add(sweep_id)
        runs = [name for name in files.names("runs") if name not in self.runs]
        found = parallel(lambda name: self._take(files.read, f"runs/{name}/run.json"), runs)
        # A client that continued another's run may have used other content, which only its request names.
        parallel(lambda name: self._take(files.read, f"runs/{name}/attempts/0/request.json"), runs)
        for name, data in zip(runs, found, strict=True):
            self.unreadable.discard(name)
            (self.without.add if data is None else self.without.discard)(name)
            if data is not None:
                record = _record(data)
                (self.runs if record else self.unreadable).add(name)
                self.places.setdefault(json.dumps([record.get("provider"), record.get("settings")]), record)

    def _take(self, read: Callable[[str], bytes], key: str) -> bytes | None:
        try:
            data = read(key)
        except FileNotFoundError:
            return None
        except StorageError as exc:
            if not isinstance(exc.__cause__, NotADirectoryError):  # a plain file among the runs of a local store
                raise
            return None
        text = data.decode(errors="replace")
        self._words.update(_WORD.findall(text), _DIGEST.findall(text))
        return data

    def __contains__(self, word: str) -> bool:
        return word in self._words


def _record(data: bytes) -> Mapping[str, Any]:
    """Return a run.json whose references are all known, else an empty one."""
    try:
        record: Mapping[str, Any] = json_loads(data)
        known = record["protocol"] == 1 and record["layout"]["code_digest"]
    except (ValueError, KeyError, TypeError):
        return {}
    return record if known else {}


def _leftovers(store: Store, named: _Named) -> Iterator[Leftover]:
    files, half, root = store.files, _half_written(store), local_path(store.url)
    manifests, sources = files.entries("data/manifests"), _sources(store)
    folders = [(kind, name) for kind in ("code", "runtime", "data") for name in files.names(kind)]
    folders += [("data", key.split("/")[2].removesuffix(".json")) for key in manifests]
    folders += [("data", digest) for digest in sources]
    folders = [(kind, name) for kind, name in dict.fromkeys(folders) if _DIGEST.fullmatch(name)]
    folders += [("runs", name) for name in sorted(named.without) if is_run_id(name)]
    for top, name in folders:
        if name in named:
            continue
        folder, manifest = f"{top}/{name}", manifest_key(name) if top == "data" else ""
        # The manifest goes first, alone: a tree without one is half an upload, and no client takes it for complete.
        first = (manifest,) if manifest in manifests else ()
        found = sources.get(name, {}) if top == "data" else {}
        whole = {key: manifests[key] for key in first} | found | files.entries(folder)
        parts = {key: half.pop(key) for key in list(half) if key.startswith(f"{folder}/")}
        kind = "upload" if not whole or (manifest and not first) else "run" if top == "runs" else top
        if whole or parts:
            link = root is not None and (root / folder).is_symlink()
            files_of = (*first, *found, folder) if link else (*whole, *parts)
            yield _leftover(kind, folder, {**whole, **parts}, files_of)
    for key, entry in files.entries(FOLDER).items():
        if not is_mark(key):
            yield _leftover("staging", key, {key: entry}, (key,))
    for key, entry in half.items():
        yield _leftover("upload", key, {key: entry}, (key,))


def _abandoned(store: Store, named: _Named, objects: Iterable[NativeObject]) -> Iterator[Leftover]:
    """Yield the objects of runs that were in this store and have no run.json any more."""
    for item in objects if named.runs else ():
        folder, _, run_id = item.run.rpartition("/")
        if folder == f"{store.url}/runs" and is_run_id(run_id) and run_id not in named.runs | named.unreadable:
            yield Leftover(kind=item.kind, key=item.key, files=0, bytes=0, modified=item.created, keys=(), native=item)


def _sources(store: Store) -> dict[str, dict[str, Entry]]:
    """Return the records of staged sources, by the digest of the content that they lead to."""
    found: dict[str, dict[str, Entry]] = {}
    entries = store.files.entries(SOURCES)
    for key, record in zip(entries, parallel(store.record, [*entries]), strict=True):
        found.setdefault(str((record or {}).get("digest")), {})[key] = entries[key]
    return found


def _leftover(kind: str, key: str, entries: Mapping[str, Entry], keys: tuple[str, ...]) -> Leftover:
    times = [entry.modified for entry in entries.values()]
    return Leftover(
        kind=kind,
        key=key,
        files=len(entries),
        bytes=sum(entry.size for entry in entries.values()),
        modified=max(times) if all(times) else 0.0,
        keys=keys,
    )


def _half_written(store: Store) -> dict[str, Entry]:
    """Return the temporary files of killed clients, which no listing shows; only for a local folder."""
    root = local_path(store.url)
    found: dict[str, Entry] = {}
    if root is None:
        return found
    for top in ("code", "runtime", "data", "runs", "sweeps", FOLDER):
        for folder, _, names in os.walk(root / top):
            for path in (Path(folder, name) for name in names if name.startswith(TEMP)):
                with contextlib.suppress(FileNotFoundError):
                    status = path.lstat()
                    found[path.relative_to(root).as_posix()] = Entry(status.st_size, "", status.st_mtime)
    return found
