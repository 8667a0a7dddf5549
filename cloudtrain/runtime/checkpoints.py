"""Checkpoints as folders: what a script has finished, what is complete in ``live/``, and copies that are proved.

In ``live/checkpoints`` one checkpoint is ``<name>/<attempt>-<seq>/``: ``node-<n>/<entry>`` from each node that held a
part, and ``commit.json``, written last by node 0. Complete means: commit.json parses and every file it lists is there
with its size. Digests are checked when it is restored.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG
from typing import Any

from ..errors import DigestError, StorageError

__all__ = ["COMMIT", "Complete", "Entry", "Watch", "complete", "copy_file", "open_for_writing", "restore", "sort_key"]

COMMIT = "commit.json"
QUIET_SECONDS = 2.0
"""A checkpoint is finished when nothing of it changed for so long and nobody has it open for writing."""
BLOCK = 4 << 20

Signature = tuple[tuple[str, int, int], ...]

_VANISHED = "\0"
"""Stands in the signature of an entry that changed under our eyes: never equal to another."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One finished or growing checkpoint of this node. ``place`` is its path below the working folder, else None."""

    name: str
    path: Path
    signature: Signature
    place: str | None = None

    @property
    def newest(self) -> float:
        """Unix seconds of the last change."""
        return max((mtime for _, _, mtime in self.signature), default=0) / 1e9

    @property
    def sharded(self) -> bool:
        """Whether it is a DCP checkpoint, whose ``.metadata`` is written last, on one node."""
        return any(rel.endswith(".distcp") for rel, _, _ in self.signature)

    @property
    def metadata(self) -> bool:
        return any(rel == ".metadata" or rel.endswith("/.metadata") for rel, _, _ in self.signature)


class Watch:
    """The checkpoints a node's script writes: entries of one folder, and globs below its working folder."""

    def __init__(self, *, folder: Path, workdir: Path, patterns: tuple[str, ...] = ()) -> None:
        self._folder, self._workdir, self._patterns = folder, workdir, patterns

    def entries(self) -> dict[str, Entry]:
        """Every entry by name; hidden ones and ``*.tmp`` are a script's own business."""
        found = {}
        for path in sorted(self._folder.iterdir()) if self._folder.is_dir() else ():
            if not path.name.startswith(".") and not path.name.endswith(".tmp"):
                found[path.name] = _entry(path.name, path)
        for pattern in self._patterns:
            for text in sorted(glob.glob(pattern, root_dir=self._workdir, recursive=True)):
                place = Path(text).as_posix()
                found[place.replace("/", "--")] = _entry(place.replace("/", "--"), self._workdir / text, place)
        return {name: entry for name, entry in found.items() if entry.signature}

    def place(self, name: str, place: str | None) -> Path:
        """Where the script keeps the checkpoint called ``name``. `DigestError` for a place outside."""
        if place and (os.path.isabs(place) or ".." in place.split("/")):
            raise DigestError(f"checkpoint {name}: {place!r} is outside the working folder")
        return self._workdir / place if place else self._folder / name


def _entry(name: str, path: Path, place: str | None = None) -> Entry:
    signature = []
    for file in _files(path):
        try:
            stat = file.stat()
        except FileNotFoundError:
            if file.is_symlink():
                continue  # a dangling link is nobody's data
            return Entry(name=name, path=path, signature=((_VANISHED, 0, time.time_ns()),), place=place)
        if S_ISREG(stat.st_mode):
            signature.append((_relative(file, path), stat.st_size, stat.st_mtime_ns))
    return Entry(name=name, path=path, signature=tuple(sorted(signature)), place=place)


def _files(path: Path) -> Iterator[Path]:
    if path.is_dir():
        for folder, _, names in os.walk(path):
            yield from (Path(folder, name) for name in names)
    elif path.exists():
        yield path


def _relative(file: Path, entry: Path) -> str:
    """Path of ``file`` below ``entry``; empty when the entry is a file itself."""
    return "" if file == entry else file.relative_to(entry).as_posix()


def open_for_writing(entries: list[Entry]) -> set[str]:
    """Names of ``entries`` of which some process has a file open for writing; empty where there is no /proc."""
    files = {str(file.resolve()): e.name for e in entries for file in _files(e.path)}
    busy: set[str] = set()
    for folder in glob.iglob("/proc/[0-9]*/fd"):
        with contextlib.suppress(OSError):
            for fd in os.listdir(folder):
                with contextlib.suppress(OSError):
                    name = files.get(os.readlink(f"{folder}/{fd}"))
                    if name and name not in busy and _writes(f"{folder}info/{fd}"):
                        busy.add(name)
    return busy


def _writes(fdinfo: str) -> bool:
    with open(fdinfo) as stream:
        flags = next((line.split()[1] for line in stream if line.startswith("flags:")), "0")
    return int(flags, 8) & os.O_ACCMODE != os.O_RDONLY


def copy_file(source: Path, target: Path, moved: Callable[[], None] = lambda: None) -> tuple[int, str]:
    """Copy bytes and return ``(size, sha256)`` of what was read; ``moved`` is told of each block. Raises `OSError`."""
    target.parent.mkdir(parents=True, exist_ok=True)
    digest, size = hashlib.sha256(), 0
    with open(source, "rb") as reader, open(target, "wb") as writer:
        while block := reader.read(BLOCK):
            digest.update(block)
            size += len(block)
            writer.write(block)
            moved()
    return size, digest.hexdigest()


def replace_file(source: Path, target: Path, moved: Callable[[], None] = lambda: None) -> None:
    """Copy over ``target``, which stays as it was until the copy is whole (where the folder can rename)."""
    beside = target.with_name(f".{target.name}.part")
    try:
        copy_file(source, beside, moved)
        os.replace(beside, target)
    except OSError as exc:
        with contextlib.suppress(OSError):
            beside.unlink()
        if exc.errno not in (errno.EPERM, errno.ENOSYS, errno.ENOTSUP):
            raise
        copy_file(source, target, moved)


def copy_entry(
    entry: Entry, target: Path, moved: Callable[[], None] = lambda: None
) -> dict[str, dict[str, Any]] | None:
    """Copy ``entry`` below ``target`` and describe its files; None when it changed meanwhile."""
    files = {}
    for relative, size, _ in entry.signature:
        source = entry.path / relative if relative else entry.path
        key = f"{entry.name}/{relative}" if relative else entry.name
        try:
            copied, digest = copy_file(source, target / key, moved)
        except FileNotFoundError:
            return None
        if copied != size:
            return None
        files[key] = {"size": size, "sha256": digest}
    if _entry(entry.name, entry.path).signature != entry.signature:
        return None
    return files


# --------------------------------------------------------------------------------------- complete ones, and restoring


@dataclass(frozen=True, kw_only=True)
class Complete:
    """A complete checkpoint: its folder, and what commit.json says."""

    name: str
    folder: Path
    commit: Mapping[str, Any]

    @property
    def seq(self) -> int:
        return int(self.commit["seq"])


def sort_key(commit: Mapping[str, Any]) -> tuple[int, int, float, int]:
    """Oldest to newest: by attempt, then time, then seq."""
    k, _, r = str(commit["attempt"]).partition(".")
    return int(k), int(r or 0), float(commit["time"]), int(commit["seq"])


def complete(root: Path, *, say: Any = None) -> list[Complete]:
    """Complete checkpoints below ``root``, oldest first. ``say`` is told of each that is not."""
    found = []
    commits = [c for depth in ("", "*/", "*/*/") for c in glob.glob(f"{glob.escape(str(root))}/{depth}{COMMIT}")]
    for path in sorted(commits):
        folder = Path(path).parent
        try:
            commit = json.loads(Path(path).read_bytes())
            sort_key(commit)
            name = str(commit["name"])
            missing = next((k for k, f in commit["files"].items() if _size(folder / k) != f["size"]), None)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            commit, name, missing = None, "", COMMIT
        if commit is not None and missing is None:
            found.append(Complete(name=name, folder=folder, commit=commit))
        elif say is not None:
            say(f"checkpoint {folder.parent.name}/{folder.name} is not complete ({missing}); skipped")
    return sorted(found, key=lambda c: sort_key(c.commit))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1


def restore(checkpoint: Complete, target: Path, *, node: int) -> None:
    """Put all nodes' files of ``checkpoint`` at ``target``, whole or not at all, digests checked.

    Where two nodes wrote one path, each node gets its own. Raises `DigestError`, or `StorageError` when the disk fails.
    """
    if "/" in checkpoint.name or checkpoint.name in ("", ".", "..") or not checkpoint.commit["files"]:
        raise DigestError(f"checkpoint {checkpoint.name!r} has no name or no files of its own")
    building = target.with_name(f".{target.name}.restoring")
    _remove(building)
    own = f"node-{node}/"
    try:
        for key in sorted(checkpoint.commit["files"], key=lambda k: k.startswith(own)):
            parts = key.split("/")
            if ".." in parts or len(parts) < 2 or parts[1] != checkpoint.name:
                raise DigestError(f"checkpoint {checkpoint.name} names the file {key!r} outside itself")
            _, digest = copy_file(checkpoint.folder / key, building.joinpath(*parts[2:]))
            if digest != checkpoint.commit["files"][key]["sha256"]:
                raise DigestError(f"checkpoint {checkpoint.name}: {key} is not what was committed")
        _remove(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(building, target)
    except OSError as exc:
        raise StorageError(f"cannot restore checkpoint {checkpoint.name} to {target}: {exc.strerror}") from None
    finally:
        _remove(building)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def write_commit(folder: Path, commit: Mapping[str, Any]) -> None:
    """commit.json, last of all; raises `OSError`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / COMMIT).write_text(json.dumps(commit, sort_keys=True), encoding="utf-8")


def quiet(entry: Entry, now: float | None = None) -> bool:
    """Whether nothing of ``entry`` changed for `QUIET_SECONDS`."""
    return (time.time() if now is None else now) - entry.newest >= QUIET_SECONDS
