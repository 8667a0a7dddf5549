"""Inputs that a provider's nodes cannot read where they are: copied into the store, through this machine's memory.

The address of a copy is made of its source's URL, so that a plan knows it without a network. Its manifest,
``data/manifests/<address>.json``, says of each file which version was copied; what is still that version is not copied
again, also not after a copy that was broken off. A source that has changed brings its copy up to date in place, unless
a run that is not over was given it.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from .errors import CloudtrainError, ConflictError, SpecError, StorageError
from .provider import Layout, LayoutInput
from .remote import RemoteFiles
from .store import Store, expect, to_json
from .transfer import Entry, Moving, Progress, parallel

__all__ = ["bring"]

SAVED_SECONDS = 30.0
"""How often what has been copied is written down."""
LARGE = 2
"""Files of more than `SMALL` bytes that are copied at a time: each is in memory in a few parts."""
SMALL = 8 << 20
_TAG = re.compile(r"\bETag=(?:W/)?\"?([^\"\s]+)", re.IGNORECASE)


def bring(
    store: Store,
    layout: Layout,
    *,
    progress: Progress | None = None,
    say: Callable[[str], None] | None = None,
) -> int:
    """Copy what the store lacks of the inputs of ``layout`` that have a ``source``; bytes that had to move.

    Sources are reached as fsspec does by itself. `SpecError` for one that holds no file, `ConflictError` for one that
    changed since a run that goes on was given its copy, `StorageError` for one that changes meanwhile; `AuthError`.
    """
    wanted = {item.url: (name, item) for name, item in layout.inputs.items() if item.source is not None}
    return sum(_Copy(store, layout.run_id, name, item, progress, say).run() for name, item in wanted.values())


class _Copy:
    def __init__(
        self,
        store: Store,
        run_id: str,
        name: str,
        item: LayoutInput,
        progress: Progress | None,
        say: Callable[[str], None] | None,
    ) -> None:
        self._store, self._run_id, self._name, self._item, self._progress = store, run_id, name, item, progress
        self._say = say or (lambda _: None)
        self._address = item.url[len(store.url) + 1 :].split("/")[1]
        self._manifest = f"data/manifests/{self._address}.json"
        assert item.source is not None
        self._url = item.source.rstrip("/")
        parent = self._url.partition("?")[0].rpartition("/")[0]
        self._key = self._url[len(parent) + 1 :] if item.file else ""
        self._source = _remote(parent if item.file else self._url, store.moving.mover)
        self._lock, self._large = threading.Lock(), threading.BoundedSemaphore(LARGE)
        self._done: dict[str, dict[str, Any]] = {}
        self._saved = time.monotonic()

    def run(self) -> int:
        found = self._list()
        record = self._store.record(self._manifest)
        known: Mapping[str, Any] = (record or {}).get("files", {})
        self._done = {path: dict(known[path]) for path, entry in found.items() if _is_copy(known.get(path), entry)}
        if record and record.get("complete") and len(self._done) == len(found) == len(known):
            return 0
        if record and record.get("complete"):
            self._refuse_while_used()
        there = self._store.files.list(f"data/{self._address}")
        for path in [path for path in self._done if there.get(self._at(path)) != found[path].size]:
            del self._done[path]
        rest = {path: entry for path, entry in found.items() if path not in self._done}
        self._say(f"copying {self._name} from {self._url}")
        expect(self._progress, [entry.size for entry in rest.values()])
        self._save(complete=False)  # from here on nobody takes it for whole
        try:
            self._store.files.discard(sorted(set(there) - set(map(self._at, found))))
            parallel(lambda path: self._one(path, rest[path]), list(rest), jobs=self._store.moving.concurrency)
            self._check(found)
        except BaseException:
            with contextlib.suppress(CloudtrainError):
                self._save(complete=False)
            raise
        self._save(complete=True)
        return sum(entry.size for entry in rest.values())

    def _list(self) -> dict[str, Entry]:
        """The source's files by their paths in the copy."""
        if self._item.file is None:
            found = self._source.entries()
        else:
            entry = self._source.entry(self._key)
            found = {self._item.file: entry} if entry is not None else {}
        if not found:
            raise SpecError(f"{self._url} holds no file", field=f"inputs.{self._name}")
        for path, entry in found.items():
            if entry.size < 0:
                raise StorageError(f"{self._url}: the server does not say how large {path} is; copy it to a store")
        return found

    def _refuse_while_used(self) -> None:
        for run_id in self._store.runs():
            if run_id == self._run_id or self._store.result(run_id) is not None:
                continue
            inputs = (self._store.record(f"runs/{run_id}/run.json") or {}).get("layout", {}).get("inputs", {})
            if any(self._address in str(item.get("url")) for item in inputs.values()):
                raise ConflictError(
                    f"{self._url} has changed since {run_id}, which is not over, was given a copy of it; wait for that"
                    f" run, or cancel it (where it ended unseen: cloudtrain reconcile {run_id})",
                    field=f"inputs.{self._name}",
                )

    def _one(self, path: str, entry: Entry) -> None:
        key = self._key if self._item.file else path
        digest = hashlib.sha256()
        moved = 0

        def pieces() -> Iterator[bytes]:
            nonlocal digest, moved
            digest, at = hashlib.sha256(), 0
            for piece in self._source.pieces(key, entry.size):
                digest.update(piece)
                yield piece
                at += len(piece)
                if self._progress is not None and at > moved:
                    self._progress(self._at(path), at - moved)
                    moved = at

        with self._large if entry.size > SMALL else contextlib.nullcontext():
            _target(self._store).receive(self._at(path), entry.size, pieces)
        with self._lock:
            self._done[path] = {"size": entry.size, "sha256": digest.hexdigest(), "version": _version(entry)}
            due = time.monotonic() - self._saved > SAVED_SECONDS
            if due:
                self._saved = time.monotonic()
        if due:
            self._save(complete=False)

    def _check(self, found: Mapping[str, Entry]) -> None:
        """Raise `StorageError` unless the source is as it was, and the copy as large."""
        now = self._list()
        changed = [path for path in found.keys() | now.keys() if not _alike(found.get(path), now.get(path))]
        for path in changed:
            self._done.pop(path, None)
        if changed:
            raise StorageError(f"{self._url}: {min(changed)} changed while it was copied; start again")
        there = self._store.files.list(f"data/{self._address}")
        if wrong := [path for path, entry in found.items() if there.get(self._at(path)) != entry.size]:
            for path in wrong:
                self._done.pop(path, None)
            raise StorageError(f"{self._at(min(wrong))} is not what was written; somebody else writes there")

    def _save(self, *, complete: bool) -> None:
        with self._lock:
            record = {"protocol": 1, "source": self._url, "complete": complete, "files": dict(self._done)}
        self._store.files.write(self._manifest, to_json(record))

    def _at(self, path: str) -> str:
        return f"data/{self._address}/{path}"


def _remote(url: str, mover: str) -> RemoteFiles:
    return RemoteFiles(url=url, moving=Moving(mover=mover))


def _target(store: Store) -> RemoteFiles:
    assert isinstance(store.files, RemoteFiles)  # whoever cannot read a remote source cannot read this machine either
    return store.files


def _version(entry: Entry) -> str:
    """What is another one when the content is, by either library's listing."""
    tag = _TAG.search(entry.version)
    return tag[1] if tag else entry.version


def _alike(one: Entry | None, other: Entry | None) -> bool:
    return one is not None and other is not None and (one.size, _version(one)) == (other.size, _version(other))


def _is_copy(record: Any, entry: Entry) -> bool:
    """Whether ``record`` is of that very version; of a source that tells none, nobody knows."""
    if not isinstance(record, Mapping) or not entry.version:
        return False
    return bool(record.get("size") == entry.size and record.get("version") == _version(entry))
