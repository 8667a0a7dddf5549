"""Bring a run's results into one local folder: verified, and never twice."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import ConflictError, DigestError, LostContactError, NotFoundError, SpecError, StorageError
from ..job.own_files import PULL_STATE
from ..provider_api.node import attempt_key
from ..provider_api.protocol import Status, extras_of_type
from ..provider_api.registry import find_provider
from ..runtime.checkpoint_model import Checkpoint, newest_checkpoint, resumable, written_directly
from ..storage.digest_cache import DigestCache, stat_key
from ..storage.files import Progress, files, parallel
from ..storage.local_disk import disk_errors, inside, local_path, safe
from ..storage.replace_folder import aside, discard, files_below, keep, names_for, prune, swap, take, tidy
from ..storage.timings import CLIENT_TIMINGS
from ..store.store import Store, expect, run_folder, to_json
from ..validate import json_loads
from .log_sources import Contact, index_segments
from .metrics import json_rows, merge_metrics
from .pull_kinds import PULL_KINDS, parse_selection

_PLACES = ("artifacts", "checkpoints", "logs", "metrics.jsonl", "native", "outputs", "result.json", "run.json")
_OURS = {errno.ENOSPC, errno.EROFS, errno.EFBIG, errno.EACCES, errno.EPERM, getattr(errno, "EDQUOT", errno.ENOSPC)}
"""Errors of this machine's disk, which waiting for a remote store does not cure."""
TRIES = 3  # for a checkpoint, or a log, that changes while it is fetched
_METRICS = re.compile(r"(\d+\.\d+)-node-(\d+)\.jsonl")
_NODE = re.compile(r"node-(\d+)/(.+)")
_BEST = re.compile(r"(?:.*[-_.])?best(?:[-_.=].*)?")


@dataclass(frozen=True, kw_only=True)
class PullReport:
    """The outcome of a pull into ``folder``. ``files`` are relative paths, and ``transferred`` is in bytes.

    ``refused`` are keys whose names could lead outside the folder. These files stay in the store. ``missing`` are the
    requested checkpoints that do not exist, by the words of the request: ``best``.
    """

    folder: Path
    files: tuple[str, ...]
    transferred: int
    checkpoints: tuple[str, ...]
    refused: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()


def pull(
    store: Store,
    run_id: str,
    folder: Path,
    *,
    what: str | Iterable[str] = PULL_KINDS,
    along: Iterable[Status] | None = None,
    on_pull: Callable[[PullReport], None] | None = None,
    clock: Callable[[], float] = time.monotonic,
    progress: Progress | None = None,
) -> PullReport:
    """Bring the run's results into ``folder``, except files that are there already and right.

    Checkpoints are the newest complete one of each name and those that a script wrote to the store itself. All nodes'
    files come together, checked against their digests. A pointer to one (``best``) is a file with its name. If two
    nodes wrote a file differently, the later one's is kept under ``node-<n>/``. Checkpoints appear whole or not at all.
    If the user has put a folder in the place of a file, or a file in that of a folder, it becomes ``<name>.yours``.

    ``along`` are the statuses of an unfinished run: new results are brought while they come, and once more after the
    last. ``on_pull`` gets the report each time that something came. Without ``along``, a checkpoint requested by
    ``latest``, ``best`` or ``step=N`` must exist. Raises `NotFoundError` for an unknown run or checkpoint,
    `DigestError` for damaged content, which is not kept.
    """
    wanted, provider = parse_selection(what), str(store.run(run_id).get("provider"))
    marks: tuple[str, ...] = ()  # the name endings of the platform's own files
    with contextlib.suppress(NotFoundError, ImportError):  # the provider may not be installed here
        marks = extras_of_type(find_provider(provider)).sync_marks
    with _alone(folder):
        work = _Pull(store=store, run_id=run_id, folder=folder, wanted=wanted, progress=progress, marks=marks)
        if along is None:
            return work.once(strict=True)
        try:
            _follow(work, along, on_pull, clock)
        except LostContactError:
            with contextlib.suppress(StorageError):  # the store may still answer
                work.once()
            raise
        return work.once()


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Wait until no other pull of this machine fills ``folder``, and keep others out; where locks are to be had.

    `ConflictError` when it has waited for `ClientTimings.pull_other`: the other one may follow a run.
    """
    with contextlib.ExitStack() as stack:
        deadline = time.monotonic() + CLIENT_TIMINGS.pull_other
        with contextlib.suppress(ImportError, OSError):
            import fcntl

            folder.mkdir(parents=True, exist_ok=True)
            number = os.open(folder, os.O_RDONLY)
            stack.callback(os.close, number)
            while True:
                try:
                    fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() >= deadline:
                        hint = "wait for its end, or name another folder with --out"
                        raise ConflictError(f"another pull fills {folder}", hint=hint) from None
                    time.sleep(0.1)
        yield


def _follow(
    work: _Pull, along: Iterable[Status], on_pull: Callable[[PullReport], None] | None, clock: Callable[[], float]
) -> None:
    """Bring new results every `ClientTimings.pull_look` until the run has ended.

    A remote store may be silent for `ClientTimings.pull_silence`.
    """
    contact, looked = Contact(clock=clock, patience=CLIENT_TIMINGS.pull_silence), float("-inf")
    for status in along:
        if status.final or abs(clock() - looked) < CLIENT_TIMINGS.pull_look:
            continue
        before = work.moved
        try:
            report = work.once()
            contact.heard(None)
            if on_pull is not None and work.moved > before:
                on_pull(report)
        except StorageError as exc:
            contact.heard(exc)
            gone = isinstance(exc.__cause__, FileNotFoundError)
            ours = isinstance(exc, DigestError) or getattr(exc.__cause__, "errno", None) in _OURS
            passing = gone or (not ours and local_path(work.store.url) is None)
            if not passing or contact.lost:
                raise
        looked = clock()


@dataclass(frozen=True, kw_only=True)
class _Source:
    """A file of the store. ``mark`` is its version or SHA-256, as the folder's record has it."""

    key: str
    size: int
    mark: str
    sha256: str | None = None
    modified: float = 0.0

    @property
    def json(self) -> list[Any]:
        return [self.key, self.size, self.mark]


class _Pull:
    """One pull of one run. The folder records the source of each file, by relative path.

    A recorded file is right if it still has its digest and its sources are unchanged.
    """

    def __init__(
        self,
        *,
        store: Store,
        run_id: str,
        folder: Path,
        wanted: Mapping[str, Sequence[str]],
        progress: Progress | None,
        marks: tuple[str, ...],
    ) -> None:
        self.store, self.files, self.progress = store, store.files, progress
        self.jobs = store.moving.concurrency
        self.run_id, self.run, self.wanted, self.marks = run_id, run_folder(run_id), wanted, marks
        self.folder = Path(os.path.abspath(folder))
        self.out = files(str(self.folder))
        self.lock, self.room = threading.Lock(), threading.Lock()
        self.moved = 0
        self.placed: set[str] = set()
        self.names: list[str] = []
        self.refused: list[str] = []
        self.missing: list[str] = []
        self.origin = f"{store.url}/{self.run}"
        self.known: dict[str, dict[str, Any]] = {}
        self.states: list[str] = []  # names of the checkpoints that a training can resume from, newest first
        self.digests = DigestCache(folder)
        self.sure: dict[str, list[int]] = {}  # stat values of files that this process wrote or read
        self.saved = time.monotonic()
        self._take_over()

    def once(self, *, strict: bool = False) -> PullReport:
        """Bring new results once. ``strict``: if a requested checkpoint is missing, nothing comes."""
        self.placed, self.names, self.refused, self.missing = set(), [], [], []
        steps: list[tuple[str, Callable[[], None]]] = [
            ("checkpoints", partial(self.checkpoints, strict=strict)),
            ("artifacts", partial(self.written, "artifacts")),
            ("outputs", partial(self.written, "outputs")),
            ("artifacts", self.native),
            ("logs", self.logs),
            ("metrics", self.metrics),
        ]
        try:
            for word, bring in steps:
                if word in self.wanted:
                    bring()
            self.records()
        except FileNotFoundError as exc:
            raise StorageError(f"{exc.filename or exc} was deleted during the pull", hint="pull again") from exc
        finally:  # also after a failure: files that came are not fetched again
            self.remember()
        return PullReport(
            folder=self.folder,
            files=tuple(sorted(self.placed)),
            transferred=self.moved,
            checkpoints=tuple(self.names),
            refused=tuple(self.refused),
            missing=tuple(self.missing),
        )

    # ------------------------------------------------------------------------------------------------------- selection

    def checkpoints(self, *, strict: bool) -> None:
        mirrored, written = self.store.checkpoints(self.run_id), self.store.direct(self.run_id)
        pointers, names = self.store.pointers(self.run_id), [item.name for item in [*mirrored, *written]]
        states = resumable(mirrored)
        if written:  # each kind is sorted already, oldest first
            states = sorted([*states, *written], key=lambda item: item.saved)
        self.states = [*dict.fromkeys([*(item.name for item in reversed(states)), *self.states])]
        tidy(self.folder / "checkpoints", set(names))
        wanted = self._wanted(mirrored, written, pointers)
        if strict and self.missing:
            why = f"no checkpoint is {' or '.join(self.missing)}; there are: {', '.join(dict.fromkeys(names))}"
            raise NotFoundError(why if names else f"{self.run_id} has no complete checkpoint", field="what")
        newest = {item.name: item for item in mirrored if item.name in wanted}
        direct = {item.name: item for item in written if item.name in wanted}
        entries = {*names, *pointers}
        merged = {name: _merge_nodes(item, entries) for name, item in newest.items()}
        self._expect(*[(f"checkpoints/{path}", source) for some in merged.values() for path, source in some.items()])
        for name, item in newest.items():
            if name in direct and direct[name].saved > item.saved:
                continue
            try:
                self._checkpoint(name, merged[name])
            except FileNotFoundError:
                now = {other.name: other for other in self.store.checkpoints(self.run_id)}
                if now.get(name) == item:
                    raise
                if name in now and now[name].files == item.files:  # the run has moved it meanwhile
                    self._checkpoint(name, _merge_nodes(now[name], entries))
                else:
                    tidy(self.folder / "checkpoints", set(now))
                    continue  # the run has removed it meanwhile: it keeps newer ones
            self.names.append(name)
        for name in sorted(direct.keys() - set(self.names)):
            if self._direct(name):
                self.names.append(name)
            elif strict:
                why = f"checkpoint {name} was overwritten while it was pulled, {TRIES} times"
                raise StorageError(why, hint="pull again")
        for name, target in pointers.items():
            if target in self.names and name not in {*names, *self.names} and safe(name):
                text = f"{target}\n".encode()
                mark = hashlib.sha256(text).hexdigest()
                source = _Source(key=f"{self.run}/live/pointers", size=len(text), mark=mark, sha256=mark)
                if not self._fresh(f"checkpoints/{name}", [source]):
                    self._write(f"checkpoints/{name}", text, [source])

    def _wanted(
        self, mirrored: Sequence[Checkpoint], direct: Sequence[Checkpoint], pointers: Mapping[str, str]
    ) -> set[str]:
        """Return the names of the selected checkpoints."""
        there = {item.name: item for item in sorted([*mirrored, *direct], key=lambda item: item.saved)}
        wanted: set[str] = set()
        for choice in dict.fromkeys(self.wanted["checkpoints"]):
            if choice == "all":
                found = [*there]
            elif choice == "latest":
                found = [item.name for item in [newest_checkpoint(mirrored, direct)] if item is not None]
            elif choice == "best":
                pointed = [pointers[name] for name in pointers if _BEST.fullmatch(name) and pointers[name] in there]
                found = pointed or [name for name in there if _BEST.fullmatch(name)][-1:]
            else:
                found = [name for name, item in there.items() if item.step == int(choice.partition("=")[2])]
            wanted |= set(found)
            self.missing += [] if found or choice == "all" else [choice]
        return wanted

    def _direct(self, name: str) -> bool:
        """Fetch a checkpoint that the script wrote to the store itself, whole and of one version; False: none.

        The script may overwrite it at any time, and it has no digests: it counts if it is the same before and after.
        """
        for _ in range(TRIES):
            found = self._below(f"checkpoints/{name}")
            files = {path: (source.size, source.modified) for path, source in found}
            if not isinstance(written_directly("", name, files), Checkpoint):
                return False
            parts = {f"{name}/{path}": source for path, source in found}
            with contextlib.suppress(FileNotFoundError, DigestError):  # it is gone, or of another size
                self._checkpoint(name, parts, still=lambda: self._below(f"checkpoints/{name}") == found)  # noqa: B023
                return True
        return False

    def written(self, word: str) -> None:
        """Bring the files of all nodes below ``live/<word>``, and remove local files that the script has removed."""
        groups: dict[str, list[tuple[int, _Source]]] = {}
        for name, source in self._below(f"live/{word}"):
            match = _NODE.fullmatch(name)
            node, path = (int(match[1]), match[2]) if match else (-1, name)
            groups.setdefault(f"{word}/{path}", []).append((node, source))
        places = _Places(groups)
        for path in sorted(groups.keys() & places.folders):  # a file here, and a folder on another node
            places.files.discard(path)
            for node, source in groups.pop(path):
                groups[places.of_node(path, node, f"{word}/")] = [(node, source)]
        versions: dict[str, dict[str, _Source]] = {}
        for path, some in sorted(groups.items()):
            first, *others = sorted(some, key=lambda pair: pair[0])
            own = {places.of_node(path, node, f"{word}/"): source for node, source in others}
            versions[path] = {path: first[1], **own}
        self._remove_old(word, versions)
        self._expect(*[(path, some[path]) for path, some in versions.items()])
        parallel(lambda path: self._written(path, versions[path]), [*versions], jobs=self.jobs)

    def _remove_old(self, word: str, groups: Mapping[str, Mapping[str, _Source]]) -> None:
        """Remove local files of an earlier pull that are no longer in the store.

        All such outputs go. An artifact goes if its path is now a folder, or is in a folder that is now a file.
        """
        kept = {path for some in groups.values() for path in some}
        folders = {folder for path in kept for folder in _folders_of(path)}
        for path in [path for path in self.known if path.startswith(f"{word}/")]:
            over = kept & _folders_of(path)
            if path not in kept and (word == "outputs" or path in folders or over):
                self._drop(path)
                for file in over:
                    self.out.prune(file)

    def native(self) -> None:
        found = [(f"native/{name}", source) for name, source in self._below("native")]
        self._expect(*found)
        parallel(lambda pair: self._fetch_growing(*pair), found, jobs=self.jobs)

    def logs(self) -> None:
        for path, segments in self._segments().items():
            for tries in range(1, TRIES + 1):
                try:
                    self._log(path, segments)
                    break
                except FileNotFoundError:  # merged into another segment since the listing
                    if tries == TRIES:
                        raise
                    node = path.removeprefix("logs").removesuffix(".log")
                    segments = self._segments(node).get(path) or segments

    def _segments(self, below: str = "") -> dict[str, list[_Source]]:
        """Return the log segments in order, by the file that they make."""
        index = index_segments(self._below("live/logs", below))
        return {f"logs/{attempt}/node-{n}.log": [s for _, s in found] for (attempt, n), found in index.items()}

    def metrics(self) -> None:
        found = [
            ((*attempt_key(match[1]), int(match[2])), source)
            for name, source in self._below("live/metrics")
            if (match := _METRICS.fullmatch(name))
        ]
        found.sort(key=lambda pair: pair[0])
        sources = [source for _, source in found]
        if not found or self._fresh("metrics.jsonl", sources):
            return
        attempts: dict[tuple[int, ...], list[dict[str, Any]]] = {}
        for (*attempt, _node), source in found:
            attempts.setdefault(tuple(attempt), []).extend(json_rows(self._read(source)))
        text = "".join(json.dumps(row) + "\n" for row in merge_metrics(attempts.values()))
        self._write("metrics.jsonl", text.encode(), sources)

    def records(self) -> None:
        for name in ("run.json", "result.json"):
            key = f"{self.run}/{name}"
            if not self.files.exists(key):
                continue
            data = self.files.read(key)
            source = _Source(key=key, size=len(data), mark=hashlib.sha256(data).hexdigest())
            if not self._fresh(name, [source]):
                self._count(key, len(data))
                self._write(name, data, [source])

    # --------------------------------------------------------------------------------------------------------- transfer

    def _below(self, prefix: str, below: str = "") -> list[tuple[str, _Source]]:
        """Return all files below ``prefix``, or its part ``below``, by their paths below ``prefix``."""
        root = f"{self.run}/{prefix}"
        found = []
        for key, entry in self.files.entries(root + below).items():
            name = key[len(root) + 1 :]
            if name.endswith(self.marks):
                continue
            if safe(name):
                found.append((name, _Source(key=key, size=entry.size, mark=entry.version, modified=entry.modified)))
            else:
                self.refused.append(key)
        return found

    def _checkpoint(self, name: str, parts: Mapping[str, _Source], still: Callable[[], bool] = lambda: True) -> None:
        """Fetch one checkpoint; a folder is built beside its place and moved there when complete (`swap`).

        Right files are reused, and files that no pull wrote are kept. Raises `FileNotFoundError` if the checkpoint is
        gone; ``still`` checks at the end that it is unchanged.
        """
        final = f"checkpoints/{name}"
        targets = {path: inside(self.folder, f"checkpoints/{path}") for path in parts}
        tree = [path for path in parts if path.startswith(f"{name}/")]
        here = {path for path in tree if self._right(f"checkpoints/{path}", parts[path])}
        before = {
            path for path in self.known if path.startswith(f"{final}/") and path[len("checkpoints/") :] not in parts
        }
        stale = {path for path in before if self._intact(path)}
        if tree and (len(here) < len(tree) or stale):
            place = self._entered(final)
            beside = {path: aside(place) / path[len(name) + 1 :] for path in tree}
            ours = {targets[path] for path in tree} | {inside(self.folder, path) for path in stale}
            # A file without a digest may be of any version.
            prune(aside(place), {beside[path] for path in tree if parts[path].sha256 is not None})
            for path in here:
                take(targets[path], beside[path])
            bring = [path for path in tree if path not in here]
            took = parallel(lambda path: (path, self._bring(beside[path], parts[path])), bring, jobs=self.jobs)
            if not still():
                discard(aside(place))
                raise FileNotFoundError(name)
            theirs = [path for path in files_below(place) if path not in ours]
            for item in sorted(theirs, reverse=True):  # one that was renamed before, then one of its former name
                take(item, _free_place(aside(place), item.relative_to(place)))
            if place.is_file() and not self._intact(final):
                keep(place)
            swap(place)
            for path, digest in took:
                self._remember(f"checkpoints/{path}", [parts[path]], digest, parts[path].size)
        rest = [path for path in parts if path not in tree]
        parallel(lambda path: self._fetch(f"checkpoints/{path}", parts[path]), rest, jobs=self.jobs)
        for path in here:
            self._trust(f"checkpoints/{path}")  # a new link has changed its stat values
        for path in before:
            self._forget(path)

    def _right(self, path: str, source: _Source) -> bool:
        """Return whether the file is here with the content of ``source``, and record it."""
        if self._fresh(path, [source]):
            return True
        if source.sha256 is None or not self._already(inside(self.folder, path), source):
            return False
        self._remember(path, [source], source.sha256, source.size)
        return True

    def _written(self, first: str, versions: Mapping[str, _Source]) -> None:
        """Fetch the ``versions`` of the file at ``first``, by path. Equal content is kept once."""
        same = self.known.get(first, {}).get("same", [])  # sources found equal, and their digest
        if not self._fetch_growing(first, versions[first]):
            return
        kept = self.known[first]
        with self.lock:
            kept["same"] = same
        for other, source in versions.items():
            if other == first or [*source.json, kept["sha256"]] in same:
                continue
            if self._fetch_growing(other, source) and self.known[other]["sha256"] == kept["sha256"]:
                self._drop(other)
                with self.lock:
                    same.append([*source.json, kept["sha256"]])

    def _log(self, path: str, segments: Sequence[_Source]) -> None:
        """Join the segments; unchanged ones are taken from the local file."""
        if self._fresh(path, segments):
            return
        old = self.known.get(path, {}).get("sources", [])
        same = 0
        if self._intact(path):
            while same < min(len(old), len(segments)) and old[same] == segments[same].json:
                same += 1
        head = self.out.read(path)[: sum(source.size for source in segments[:same])] if same else b""
        pieces = parallel(self._read, segments[same:], jobs=self.jobs)
        # A segment that has grown since the listing is kept whole: its size is the size read.
        read = [_Source(key=s.key, size=len(d), mark=s.mark) for s, d in zip(segments[same:], pieces, strict=True)]
        self._write(path, head + b"".join(pieces), [*segments[:same], *read])

    def _fetch(self, path: str, source: _Source, *, as_is: bool = False) -> None:
        """Fetch one file. ``as_is``: with any content, which later pulls check again."""
        if self._fresh(path, [source]):
            return
        place = self._entered(path)
        # A folder in its place goes only when the file is here.
        target = aside(place) if _is_folder(place) else place
        if target != place:
            discard(target)
        digest = self._bring(target, source, as_is=as_is)
        if target != place:
            self._make_room(path)
            with disk_errors(place):
                os.replace(target, place)
        if as_is:
            source = _Source(key=source.key, size=place.stat().st_size, mark="")
        self._remember(path, [source], digest, source.size)

    def _bring(self, target: Path, source: _Source, *, as_is: bool = False) -> str:
        """Fetch one file, unless it is here already; return its digest."""
        if not self._already(target, source):
            sha256, size = (None, None) if as_is else (source.sha256, source.size)
            self.files.download(source.key, target, sha256=sha256, size=size, progress=self._count)
        return source.sha256 or self.digests.of(target)

    def _fetch_growing(self, path: str, source: _Source) -> bool:
        """Fetch a file that may be rewritten at any time: then its current content. Return False if it is gone."""
        try:
            try:
                self._fetch(path, source)
            except DigestError:
                self._fetch(path, source, as_is=True)
        except FileNotFoundError:
            return False
        return True

    def _already(self, target: Path, source: _Source) -> bool:
        if source.sha256 is None or target.is_symlink() or not target.is_file():
            return False
        return target.stat().st_size == source.size and self.digests.of(target) == source.sha256

    def _read(self, source: _Source) -> bytes:
        data = self.files.read(source.key)
        self._count(source.key, len(data))
        return data

    def _write(self, path: str, data: bytes, sources: Sequence[_Source]) -> None:
        if _is_folder(self._entered(path)):
            self._make_room(path)
        self.out.write(path, data)
        self._remember(path, sources, hashlib.sha256(data).hexdigest(), len(data))

    def _drop(self, path: str) -> None:
        """Remove a file that an earlier pull brought, unless it was changed since."""
        if self._intact(path):
            self.out.remove(path)
        self._forget(path)

    def _entered(self, path: str) -> Path:
        """Return the place of a file, after making room for the folders that it is in."""
        place = inside(self.folder, path)
        for folder in _folders_of(path):
            if (self.folder / folder).is_file():
                with self.room:
                    if (self.folder / folder).is_file():  # no other thread has made it
                        self._make_room(folder)
        return place

    def _make_room(self, path: str) -> None:
        """Remove what an earlier pull brought to ``path`` or below it, and rename what the user has there."""
        with self.lock:
            ours = [known for known in self.known if known == path or known.startswith(f"{path}/")]
        for known in ours:
            self._drop(known)
        self.out.prune(path)
        place = inside(self.folder, path)
        if os.path.lexists(place):
            keep(place)

    def _forget(self, path: str) -> None:
        with self.lock:
            self.known.pop(path, None)
            self.placed.discard(path)

    def _fresh(self, path: str, sources: Sequence[_Source]) -> bool:
        """Return whether the file is here as it was brought from ``sources``, and count it as placed."""
        known = self.known.get(path)
        if known is None or known["sources"] != [source.json for source in sources] or not self._intact(path):
            return False
        with self.lock:
            self.placed.add(path)
        return True

    def _intact(self, path: str) -> bool:
        known, target = self.known.get(path), inside(self.folder, path)
        if known is None or target.is_symlink() or not target.is_file():
            return False
        status = target.stat()
        if self.sure.get(path) == stat_key(status):
            return True
        if status.st_size != known["size"] or self.digests.of(target) != known["sha256"]:
            return False
        self.sure[path] = stat_key(status)
        return True

    def _trust(self, path: str) -> None:
        """Trust a new file while its stat values stay the same."""
        target = inside(self.folder, path)
        if target.is_file() and not target.is_symlink():
            self.sure[path] = stat_key(target.stat())

    # --------------------------------------------------------------------------------------------------------- memory

    def _expect(self, *found: tuple[str, _Source]) -> None:
        """Report the expected downloads to the progress: files that are not recorded with these sources."""
        known = {path: item["sources"] for path, item in self.known.items()}
        expect(self.progress, [source.size for path, source in found if known.get(path) != [source.json]])

    def _count(self, key: str, more: int) -> None:
        with self.lock:
            self.moved += more
        if self.progress:
            self.progress(key, more)

    def _remember(self, path: str, sources: Sequence[_Source], sha256: str, size: int) -> None:
        self._trust(path)
        with self.lock:
            self.known[path] = {"sources": [source.json for source in sources], "sha256": sha256, "size": size}
            self.placed.add(path)
            due = time.monotonic() - self.saved >= CLIENT_TIMINGS.pull_save
        if due:
            self.remember(digests=False)

    def _take_over(self) -> None:
        """Claim the folder for this run. Raises `SpecError` if other files have the names that we would write.

        Unchanged files of an earlier pull of another run are removed: runs do not mix.
        """
        if self.folder.is_file():
            raise SpecError(f"{self.folder} is a file", field="folder", hint="name a folder")
        try:
            state = json_loads(self.out.read(PULL_STATE))
            known, same = dict(state["files"]), state["run"] == self.origin
            known = {path: item for path, item in known.items() if {"sources", "sha256", "size"} <= set(item)}
            states = [str(name) for name in state.get("states", ())] if same else []
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            foreign = [name for name in _PLACES if (self.folder / name).exists()]
            if foreign and not self._ours():
                why = f"{self.folder} has a {foreign[0]} that no pull wrote"
                raise SpecError(why, field="folder", hint="name another folder") from None
            known, states, same = {}, [], True
        if not self.folder.exists() or not any(self.folder.iterdir()):
            self.out.create(".gitignore", b"*\n")
        self.known, self.states = known, states
        if not same:
            for path in [path for path in known if safe(path) and self._intact(path)]:
                self.out.remove(path)
            for place in {path.partition("/")[0] for path in known if safe(path)}:
                self.out.prune(place)  # an empty folder would look like a checkpoint of this run
            self.known = {}
        self.remember()  # from here on the folder is marked as a pull's

    def _ours(self) -> bool:
        """Return whether run.json shows that the folder, without a pull's record, was pulled from this run."""
        try:
            return bool(json_loads((self.folder / "run.json").read_bytes())["run"] == self.origin)
        except (OSError, ValueError, KeyError, TypeError):
            return False

    def remember(self, *, digests: bool = True) -> None:
        """Save the folder's record, and the ``digests`` for the next process."""
        with self.lock:
            self.out.write(PULL_STATE, to_json({"run": self.origin, "files": self.known, "states": self.states}))
            self.saved = time.monotonic()
        if digests:
            self.digests.keep()


def newest_pulled(folder: Path) -> tuple[str, Path | None] | None:
    """Return the URL of the run that `pull` brought into ``folder``, and its newest checkpoint there, or None.

    Return None for a folder that no pull has filled.
    """
    try:
        state = json.loads((folder / PULL_STATE).read_bytes())
        names = [str(name) for name in state.get("states", ())]
        found = [path for name in names if safe(name) and (path := folder / "checkpoints" / name).exists()]
        return str(state["run"]), next(iter(found), None)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


class _Places:
    """Local paths that do not meet: none is taken twice, and no file lies where another one's folder is."""

    def __init__(self, files: Iterable[str]) -> None:
        self.files, self.folders = set[str](), set[str]()
        for path in files:
            self.take(path)

    def take(self, path: str) -> None:
        self.files.add(path)
        self.folders |= _folders_of(path)

    def free(self, path: str) -> bool:
        return path not in self.files and path not in self.folders and not self.files & _folders_of(path)

    def of_node(self, path: str, node: int | str, top: str) -> str:
        """Take a path for ``node``'s own version of the file at ``path``, in ``node-<n>/`` below ``top``; return it."""
        numbered = (f"node-{node}-{number}" for number in itertools.count(2))
        names = itertools.chain((f"node-{node}", f"node-{node}/node-{node}"), numbered)
        place = next(filter(self.free, (f"{top}{name}/{path.removeprefix(top)}" for name in names)))
        self.take(place)
        return place


def _free_place(folder: Path, path: Path) -> Path:
    """Return the place in ``folder`` for the user's file at ``path``: not of another file, nor below one."""
    for depth, part in enumerate(path.parts, 1):
        leads_on, wanted = depth < len(path.parts), folder / part
        places = itertools.chain([wanted], names_for(wanted))
        folder = next(place for place in places if not os.path.lexists(place) or (leads_on and _is_folder(place)))
    return folder


def _is_folder(place: Path) -> bool:
    return place.is_dir() and not place.is_symlink()


def _folders_of(path: str) -> set[str]:
    """Return the folders that the relative path leads through."""
    return {path[:at] for at, letter in enumerate(path) if letter == "/"}


def _merge_nodes(item: Checkpoint, names: Iterable[str]) -> dict[str, _Source]:
    """Return the sources of a checkpoint by path relative to the checkpoint folder, all nodes' files as one tree.

    ``names`` are those of all entries of that folder: no path leads into another one.
    """
    placed: dict[str, _Source] = {}
    places = _Places({*names} - {item.name})
    nodes = {path: _NODE.fullmatch(path) for path in item.files}
    for path in sorted(item.files, key=lambda p: (int(match[1]) if (match := nodes[p]) else -1, p)):
        size, digest = item.files[path]
        match = nodes[path]
        node, rest = (match[1], match[2]) if match else ("0", path)
        # Nodes list their files with the checkpoint's name in front.
        target = rest if rest == item.name or rest.startswith(f"{item.name}/") else f"{item.name}/{rest}"
        if target in placed and placed[target].sha256 == digest:
            continue
        if places.free(target):
            places.take(target)
        else:
            inner = target != item.name and item.name not in placed
            target = places.of_node(target, node, f"{item.name}/" if inner else "")
        placed[target] = _Source(key=f"{item.key}/{path}", size=size, mark=digest, sha256=digest)
    return placed
