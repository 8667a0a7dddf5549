"""Bringing results back: everything of a run that a person wants, in one local folder, verified, and never twice."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import SpecError
from .store import Checkpoint, Store, numbers_of, run_folder, to_json
from .transfer import Progress, files, inside, parallel, safe, sha256_file
from .values import nearest

__all__ = ["PULLED", "PullReport", "merge_metrics", "pull"]

PULLED = ("checkpoints", "artifacts", "logs", "metrics")
"""What `Store.pull` can fetch. What the platform wrote itself comes with artifacts; result.json and run.json always."""

_PLACES = ("artifacts", "checkpoints", "logs", "metrics.jsonl", "native", "result.json", "run.json")
_STATE = ".cloudtrain-pull.json"
_PARTIAL = ".partial-"
_SEGMENT = re.compile(r"(\d+\.\d+)/(node-\d+)/(\d+)\.log")
_METRICS = re.compile(r"(\d+\.\d+)-node-(\d+)\.jsonl")
_NODE = re.compile(r"node-(\d+)/(.+)")


@dataclass(frozen=True, kw_only=True)
class PullReport:
    """What a pull left in ``folder``. ``files`` are relative paths; ``transferred`` is bytes that came over now.

    ``refused`` are keys whose names could mean a place outside the folder here; they stay in the store.
    """

    folder: Path
    files: tuple[str, ...]
    transferred: int
    checkpoints: tuple[str, ...]
    refused: tuple[str, ...] = ()


def pull(
    store: Store,
    run_id: str,
    folder: Path,
    *,
    what: Iterable[str] = PULLED,
    progress: Progress | None = None,
) -> PullReport:
    """Bring the run's results into ``folder``, and nothing that is there already and right.

    Checkpoints are the newest complete one of each name, all nodes' files together, checked against their digests.
    A file that two nodes wrote differently is kept under ``node-<n>/`` for the later one. A checkpoint that is not
    yet here appears whole or not at all. `NotFoundError` for an unknown run; `DigestError` for damaged content,
    which is not kept.
    """
    wanted = tuple(what)
    for word in wanted:
        if word not in PULLED:
            raise SpecError(f"{word!r} is none of {', '.join(PULLED)}{nearest(word, PULLED)}", field="what")
    store.run(run_id)
    work = _Pull(store=store, run_id=run_id, folder=folder, progress=progress)
    try:
        for word in PULLED:
            if word in wanted:
                getattr(work, word)()
        work.records()
    finally:
        work.remember()
    return work.report()


def merge_metrics(attempts: Iterable[Iterable[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """The rows of all attempts, given oldest first, as one history.

    An attempt replaces the earlier rows from its own first step on; rows without a step stay where they are.
    """
    merged: list[dict[str, Any]] = []
    for attempt in attempts:
        rows = [dict(row) for row in attempt]
        steps = [step for row in rows if (step := _step(row)) is not None]
        first = min(steps, default=float("inf"))
        merged = [row for row in merged if (step := _step(row)) is None or step < first] + rows
    return merged


def _step(row: Mapping[str, Any]) -> float | None:
    step = row.get("step")
    return step if isinstance(step, (int, float)) and not isinstance(step, bool) else None


def _rows(data: bytes) -> list[dict[str, Any]]:
    """The JSON objects of JSON Lines; a line that is none (the last of a killed process) is left out."""
    rows: list[dict[str, Any]] = []
    for line in data.splitlines():
        with contextlib.suppress(ValueError):
            row = json.loads(line)
            if isinstance(row, dict):
                rows.append(row)
    return rows


#: What one local file was made of: [key, bytes, version or SHA-256] each. JSON, so a list.
_Sources = list[list[Any]]


@dataclass(frozen=True, kw_only=True)
class _Source:
    key: str
    size: int
    mark: str
    sha256: str | None = None

    @property
    def json(self) -> list[Any]:
        return [self.key, self.size, self.mark]


class _Pull:
    """One pull of one run. What was fetched from where is remembered in the folder, by relative path.

    A remembered file is right when it still has the digest it had then and its sources are still the same.
    """

    def __init__(self, *, store: Store, run_id: str, folder: Path, progress: Progress | None) -> None:
        self.store, self.files, self.progress = store, store.files, progress
        self.run = run_folder(run_id)
        self.folder = Path(os.path.abspath(folder))
        self.out = files(str(self.folder))
        self.lock = threading.Lock()
        self.moved = 0
        self.placed: set[str] = set()
        self.names: list[str] = []
        self.refused: list[str] = []
        self.origin = f"{store.url}/{self.run}"
        self.known: dict[str, dict[str, Any]] = {}
        self._take_over()

    # ---------------------------------------------------------------------------------------------------- what to pull

    def checkpoints(self) -> None:
        newest = {item.name: item for item in self.store.checkpoints(self.run.removeprefix("runs/"))}
        for name, item in newest.items():
            self._checkpoint(name, _merge_nodes(item))
            self.names.append(name)

    def artifacts(self) -> None:
        groups: dict[str, list[tuple[int, _Source]]] = {}
        for name, source in self._below("live/artifacts"):
            match = _NODE.fullmatch(name)
            node, path = (int(match[1]), match[2]) if match else (-1, name)
            groups.setdefault(path, []).append((node, source))
        parallel(lambda path: self._artifact(path, sorted(groups[path], key=lambda pair: pair[0])), list(groups))
        parallel(lambda pair: self._fetch(f"native/{pair[0]}", pair[1]), self._below("native"))

    def logs(self) -> None:
        groups: dict[str, list[tuple[int, _Source]]] = {}
        for name, source in self._below("live/logs"):
            if match := _SEGMENT.fullmatch(name):
                groups.setdefault(f"logs/{match[1]}/{match[2]}.log", []).append((int(match[3]), source))
        for path, segments in groups.items():
            self._log(path, [source for _, source in sorted(segments, key=lambda pair: pair[0])])

    def metrics(self) -> None:
        found = [
            ((*numbers_of(match[1]), int(match[2])), source)
            for name, source in self._below("live/metrics")
            if (match := _METRICS.fullmatch(name))
        ]
        found.sort(key=lambda pair: pair[0])
        sources = [source for _, source in found]
        if not found or self._fresh("metrics.jsonl", sources):
            return
        attempts: dict[tuple[int, ...], list[dict[str, Any]]] = {}
        for (*attempt, _node), source in found:
            attempts.setdefault(tuple(attempt), []).extend(_rows(self._read(source)))
        text = "".join(json.dumps(row) + "\n" for row in merge_metrics(attempts.values()))
        self._write("metrics.jsonl", text.encode(), sources)

    def records(self) -> None:
        for name in ("run.json", "result.json"):
            size = self.files.size(f"{self.run}/{name}")
            if size is None:
                continue
            data = self.files.read(f"{self.run}/{name}")
            source = _Source(key=f"{self.run}/{name}", size=len(data), mark=hashlib.sha256(data).hexdigest())
            if not self._fresh(name, [source]):
                self._count(source.key, len(data))
                self._write(name, data, [source])

    # ------------------------------------------------------------------------------------------------------ how to pull

    def _below(self, prefix: str) -> list[tuple[str, _Source]]:
        root = f"{self.run}/{prefix}"
        found = []
        for key, entry in self.files.entries(root).items():
            name = key[len(root) + 1 :]
            if safe(name):
                found.append((name, _Source(key=key, size=entry.size, mark=entry.version)))
            else:
                self.refused.append(key)
        return found

    def _checkpoint(self, name: str, parts: Mapping[str, _Source]) -> None:
        """Fetch one checkpoint: below a name of its own while it is new, then under its right one."""
        final, folder = f"checkpoints/{name}", f"checkpoints/{_PARTIAL}{name}"
        new = not os.path.lexists(inside(self.folder, final))

        def place(path: str) -> str:
            return folder + path[len(name) :] if new and path.startswith(f"{name}/") else f"checkpoints/{path}"

        for path in parts:
            inside(self.folder, place(path))
        before = {path for path in self.known if path.startswith(final + "/")}
        parallel(lambda path: self._fetch(place(path), parts[path], f"checkpoints/{path}"), list(parts))
        if new and inside(self.folder, folder).is_dir():
            os.replace(inside(self.folder, folder), inside(self.folder, final))
        for stale in before - {f"checkpoints/{path}" for path in parts}:
            self._drop(stale)

    def _artifact(self, path: str, versions: Sequence[tuple[int, _Source]]) -> None:
        """Fetch one path of all nodes; the same content is kept once."""
        first = f"artifacts/{path}"
        same = self.known.get(first, {}).get("same", [])  # sources that were found equal, and to which digest
        self._fetch(first, versions[0][1])
        kept = self.known[first]
        kept["same"] = same
        for node, source in versions[1:]:
            if [*source.json, kept["sha256"]] in same:
                continue
            other = f"artifacts/node-{node}/{path}"
            self._fetch(other, source)
            if self.known[other]["sha256"] == kept["sha256"]:
                self._drop(other)
                same.append([*source.json, kept["sha256"]])

    def _log(self, path: str, segments: Sequence[_Source]) -> None:
        """Join the segments; those that have not changed since the last pull are taken from the local file."""
        if self._fresh(path, segments):
            return
        old: _Sources = self.known.get(path, {}).get("sources", [])
        same = 0
        if self._intact(path):
            while same < min(len(old), len(segments)) and old[same] == segments[same].json:
                same += 1
        head = self.out.read(path)[: sum(source.size for source in segments[:same])] if same else b""
        pieces = parallel(self._read, segments[same:])
        # A segment that grew since it was listed is not cut: its size is what it was read with.
        read = [_Source(key=s.key, size=len(d), mark=s.mark) for s, d in zip(segments[same:], pieces, strict=True)]
        self._write(path, head + b"".join(pieces), [*segments[:same], *read])

    def _fetch(self, place: str, source: _Source, path: str | None = None) -> None:
        """Bring one file to ``place``; it is remembered as ``path``, where it will end up."""
        path = path or place
        target = inside(self.folder, place)
        if place == path and self._fresh(path, [source]):
            return
        if not self._already(target, source):
            self.files.download(source.key, target, sha256=source.sha256, size=source.size, progress=self._count)
        self._remember(path, [source], source.sha256 or sha256_file(target), source.size)

    def _already(self, target: Path, source: _Source) -> bool:
        if source.sha256 is None or target.is_symlink() or not target.is_file():
            return False
        return target.stat().st_size == source.size and sha256_file(target) == source.sha256

    def _read(self, source: _Source) -> bytes:
        data = self.files.read(source.key)
        self._count(source.key, len(data))
        return data

    def _write(self, path: str, data: bytes, sources: Sequence[_Source]) -> None:
        inside(self.folder, path)
        self.out.write(path, data)
        self._remember(path, sources, hashlib.sha256(data).hexdigest(), len(data))

    def _drop(self, path: str) -> None:
        """Remove a file that an earlier pull brought, unless somebody changed it."""
        if self._intact(path):
            self.out.remove(path)
        with self.lock:
            self.known.pop(path, None)
            self.placed.discard(path)

    def _fresh(self, path: str, sources: Sequence[_Source]) -> bool:
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
        return bool(target.stat().st_size == known["size"] and sha256_file(target) == known["sha256"])

    # --------------------------------------------------------------------------------------------------------- memory

    def _count(self, key: str, more: int) -> None:
        with self.lock:
            self.moved += more
        if self.progress:
            self.progress(key, more)

    def _remember(self, path: str, sources: Sequence[_Source], sha256: str, size: int) -> None:
        with self.lock:
            self.known[path] = {"sources": [source.json for source in sources], "sha256": sha256, "size": size}
            self.placed.add(path)

    def _take_over(self) -> None:
        """Make the folder ours. `SpecError` when it holds somebody's own files under the names that we would write.

        What an earlier pull of another run left there, and nobody has touched since, goes: runs do not mix.
        """
        if self.folder.is_file():
            raise SpecError(f"{self.folder} is a file; name a folder", field="folder")
        try:
            state = json.loads(self.out.read(_STATE))
            known, same = dict(state["files"]), state["run"] == self.origin
            known = {path: item for path, item in known.items() if {"sources", "sha256", "size"} <= set(item)}
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            foreign = [name for name in _PLACES if (self.folder / name).exists()]
            if foreign and not self._ours():
                raise SpecError(
                    f"{self.folder} has a {foreign[0]} that no pull has put there; name another folder", field="folder"
                ) from None
            known, same = {}, True
        if known or not self.folder.exists() or not any(self.folder.iterdir()):
            self.out.create(".gitignore", b"*\n")
        self.known = known
        if not same:
            for path in [path for path in known if safe(path) and self._intact(path)]:
                self.out.remove(path)
            self.known = {}
        self.remember()  # from here on the folder is known as a pull's, whenever this one ends

    def _ours(self) -> bool:
        """Whether the folder, without a pull's memory, still shows by its run.json that it was pulled from this run."""
        try:
            return bool(json.loads((self.folder / "run.json").read_bytes())["run"] == self.origin)
        except (OSError, ValueError, KeyError, TypeError):
            return False

    def remember(self) -> None:
        """Write down what is here, also after a failure: what did arrive is not fetched again."""
        self.out.write(_STATE, to_json({"run": self.origin, "files": self.known}))

    def report(self) -> PullReport:
        """What this pull found or made right."""
        return PullReport(
            folder=self.folder,
            files=tuple(sorted(self.placed)),
            transferred=self.moved,
            checkpoints=tuple(self.names),
            refused=tuple(self.refused),
        )


def _merge_nodes(item: Checkpoint) -> dict[str, _Source]:
    """Where each file of a checkpoint goes, relative to the folder of checkpoints; all nodes' files as one tree."""
    placed: dict[str, _Source] = {}
    nodes = {path: _NODE.fullmatch(path) for path in item.files}
    for path in sorted(item.files, key=lambda p: (int(match[1]) if (match := nodes[p]) else -1, p)):
        size, digest = item.files[path]
        match = nodes[path]
        node, rest = (match[1], match[2]) if match else ("0", path)
        source = _Source(key=f"{item.key}/{path}", size=size, mark=digest, sha256=digest)
        target = _in_checkpoint(item.name, rest)
        while target in placed and placed[target].sha256 != digest:
            rest = f"node-{node}/{rest.removeprefix(item.name + '/')}"
            target = _in_checkpoint(item.name, rest) if "/" in target else rest
        placed.setdefault(target, source)
    return placed


def _in_checkpoint(name: str, path: str) -> str:
    """``path`` below the checkpoint ``name``: nodes list their files with the name in front."""
    return path if path == name or path.startswith(f"{name}/") else f"{name}/{path}"
