"""Checkpoint folders: watch what a script writes, find complete checkpoints in ``live/``, copy and restore them.

In ``live/checkpoints`` one checkpoint is ``<name>/<attempt>-<seq>/``: ``node-<n>/<entry>`` from each node that held a
part, and ``commit.json``, written last by node 0. It is complete if commit.json parses and every file it lists is there
with its size. Restoring checks the digests. ``live/pointers/node-<n>.json`` names the checkpoints that the node's
script points to (its best, its latest).
"""

from __future__ import annotations

import contextlib
import errno
import glob
import hashlib
import json
import os
import re
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from stat import S_ISDIR, S_ISLNK, S_ISREG
from typing import Any, NamedTuple, TypeVar

from ..errors import DigestError, SpecError, StorageError
from ..provider_api.node import attempt_key
from .checkpoint_model import METADATA, Checkpoint, resumable
from .checkpoint_names import family, is_earlier
from .mounts import ABSENT, CLOSED, ask_again, describe_fault, is_fault, names_in, raise_fault
from .timings import TIMINGS

T = TypeVar("T")

COMMIT = "commit.json"
POINTER_BYTES = 512  # a longer file names no checkpoint
BLOCK = 4 << 20
COPIERS = 4  # files that are copied at the same moment. A mounted object store needs several; a disk does not suffer

Moved = Callable[[Path, int], None]  # called with a file that is being copied, and the bytes of it so far
Item = tuple[str, int, int]  # a file below an entry: its path, bytes, and the nanosecond of its last change
Signature = tuple[Item, ...]
FileState = tuple[int, int]  # bytes, and the nanosecond of the last change

_FOLDER = re.compile(r"(\d+\.\d+)-(\d+)")
_NODE = re.compile(r"node-\d+")
_VANISHED = "\0"  # signature of an entry that changed while it was read: never equal to another


@dataclass(frozen=True, kw_only=True)
class CheckpointEntry:
    """One finished or growing checkpoint of this node. ``place`` is its path below the working folder, else None.

    ``aside`` are files in its folder that belong to other nodes, as a resume put them here. With a ``fault`` of the
    disk or mount it is not finished.
    """

    name: str
    path: Path
    signature: Signature
    place: str | None = None
    aside: frozenset[Item] = frozenset()
    fault: OSError | None = None

    @property
    def newest(self) -> float:
        """Return the Unix seconds of the last change."""
        return max((mtime for _, _, mtime in self.signature), default=0) / 1e9

    @property
    def single(self) -> bool:
        """Return whether it is a file, not a folder."""
        return [rel for rel, _, _ in self.signature] == [""]

    @property
    def sharded(self) -> bool:
        """Return whether it is a DCP checkpoint, whose ``.metadata`` is written last, on one node."""
        return any(rel.endswith(".distcp") for rel, _, _ in self.signature)

    @property
    def metadata(self) -> bool:
        return any(rel.rpartition("/")[2] == METADATA for rel, _, _ in self.signature)

    @property
    def shape(self) -> Counter[str]:
        return shape_of(rel for rel, _, _ in self.signature)

    def again(self) -> CheckpointEntry:
        """Return the same entry as it is now."""
        return _entry(self.name, self.path, self.place, self.aside)


def shape_of(paths: Iterable[str]) -> Counter[str]:
    """Count the files of each kind: paths that differ in their numbers alone are of one kind."""
    return Counter(family(path) for path in paths)


@dataclass(frozen=True, kw_only=True)
class Pointer:
    """An entry that only names another one, ``target``: a link to it (``link``), or a small file with its name."""

    target: str
    link: bool


class Watch:
    """The checkpoints that a node's script writes: entries of one folder, and globs below its working folder."""

    def __init__(self, *, folder: Path, workdir: Path, patterns: tuple[str, ...] = ()) -> None:
        self._folder, self._workdir, self._patterns = folder, workdir, patterns
        self._names: set[str] = set()
        self._aside: dict[str, frozenset[Item]] = {}

    def set_aside(self, name: str, relatives: Set[str]) -> None:
        """Count these files of an entry as other nodes' until the script writes them again here."""
        entry = self.entries().get(name)
        items = entry.signature if entry is not None else ()
        self._aside[name] = frozenset(item for item in items if item[0] in relatives)

    def _paths(self) -> dict[str, Path]:
        """Return the folder's files by name, without hidden ones and ``*.tmp``, which are the script's own."""
        found = sorted(self._folder.iterdir()) if self._folder.is_dir() else ()
        named = {path.name: path for path in found if _is_visible(path)}
        self._names |= named.keys()
        return named

    def pointers(self) -> dict[str, Pointer]:
        """Return every pointer by name. Its target is an entry, or was one in this Watch's time."""
        return {name: pointer for name, path in self._paths().items() if (pointer := self._pointer(path)) is not None}

    def _pointer(self, path: Path) -> Pointer | None:
        try:
            stat = path.lstat()
            if S_ISLNK(stat.st_mode):
                target = Path(os.path.normpath(self._folder / os.readlink(path)))
                named, link = target.name if target.parent == self._folder else "", True
            elif S_ISREG(stat.st_mode) and 0 < stat.st_size <= POINTER_BYTES:
                named, link = path.read_text(encoding="utf-8").strip(), False
            else:
                return None
        except (OSError, ValueError):  # gone again, or no text
            return None
        return Pointer(target=named, link=link) if named in self._names - {path.name} else None

    def point(self, name: str, pointer: Pointer) -> None:
        """Create a pointer as the script had it. Raises `OSError`."""
        path = self._folder / name
        remove_path(path)
        if pointer.link:
            path.symlink_to(pointer.target)
        else:
            path.write_text(pointer.target, encoding="utf-8")

    def entries(self) -> dict[str, CheckpointEntry]:
        """Return every entry by name, without pointers."""
        found = {name: self._entry(name, *place) for name, place in self._places().items()}
        return {name: entry for name, entry in found.items() if entry is not None}

    def entry(self, name: str) -> CheckpointEntry | None:
        """Return one of `entries`, without reading the others."""
        if self._patterns:
            place = self._places().get(name)
            return self._entry(name, *place) if place else None
        path = self._folder / name
        return self._entry(name, path, None) if _is_visible(path) and self._pointer(path) is None else None

    def _entry(self, name: str, path: Path, place: str | None) -> CheckpointEntry | None:
        entry = _entry(name, path, place, self._aside.get(name, frozenset()))
        return entry if entry.signature else None

    def _places(self) -> dict[str, tuple[Path, str | None]]:
        """Return the path of each entry, and its place below the working folder if it is there."""
        found: dict[str, tuple[Path, str | None]]
        found = {name: (path, None) for name, path in self._paths().items() if self._pointer(path) is None}
        for pattern in self._patterns:
            for text in sorted(glob.glob(pattern, root_dir=self._workdir, recursive=True)):
                place = Path(text).as_posix()
                name = re.sub(r"^\.", "_.", place.replace("/", "--"))  # no pattern finds a hidden name
                found[name] = self._workdir / text, place
        return found

    def place(self, name: str, place: str | None) -> Path:
        """Return where the script keeps the checkpoint ``name``. Raises `DigestError` for a place outside."""
        if place and (os.path.isabs(place) or ".." in place.split("/")):
            raise DigestError(f"checkpoint {name}: {place!r} is outside the working folder")
        return self._workdir / place if place else self._folder / name


def _is_visible(path: Path) -> bool:
    return not path.name.startswith(".") and path.suffix != ".tmp"


def _entry(name: str, path: Path, place: str | None, aside: frozenset[Item]) -> CheckpointEntry:
    signature: list[Item] = []
    fault = None
    try:
        for file in _files(path):
            try:
                stat = file.stat()
            except OSError as exc:
                if not is_fault(exc) and file.is_symlink():
                    continue  # a link to nothing, or to itself
                raise
            if S_ISREG(stat.st_mode):
                relative = file.relative_to(path).as_posix() if file != path else ""
                signature.append((relative, stat.st_size, stat.st_mtime_ns))
    except OSError as exc:
        signature = [(_VANISHED, 0, time.time_ns())]
        fault = exc if is_fault(exc) else None
    own = tuple(sorted(item for item in signature if item not in aside))
    return CheckpointEntry(name=name, path=path, signature=own, place=place, aside=aside, fault=fault)


def _files(path: Path) -> Iterator[Path]:
    """Yield the file ``path``, or all files in it. Raises `OSError` if the disk or mount fails."""
    try:
        is_folder = S_ISDIR(path.stat().st_mode)
    except OSError as exc:
        raise_fault(exc)
        return
    if not is_folder:
        yield path
        return
    for folder, _, names in os.walk(path, onerror=raise_fault):
        yield from (Path(folder, name) for name in names)


def linked_folders(path: Path) -> list[str]:
    """Return the links to folders below an entry, relative to it. The copy does not follow them."""
    links = (Path(folder, name) for folder, names, _ in os.walk(path) for name in names)
    return [link.relative_to(path).as_posix() for link in links if link.is_symlink()]


def open_for_writing(entries: list[CheckpointEntry]) -> set[str]:
    """Return the names of ``entries`` that a process has open for writing; without /proc, none.

    An entry that cannot be read counts as open.
    """
    files: dict[str, str] = {}
    busy: set[str] = set()
    for entry in entries:
        try:
            files |= {os.path.realpath(file): entry.name for file in _files(entry.path)}
        except OSError:
            busy.add(entry.name)
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


def in_parallel(work: Callable[[T], object], items: Iterable[T]) -> None:
    """Call ``work`` on every item, `COPIERS` at a time, at low priority. Raise the first error and stop there."""
    items = list(items)
    if len(items) == 1:
        work(items[0])
        return
    with ThreadPoolExecutor(COPIERS, thread_name_prefix="copy", initializer=modest) as pool:
        try:
            for done in [pool.submit(work, item) for item in items]:
                done.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def modest() -> None:
    """Lower this thread's priority, for the training on the same cores. Only Linux has priorities of threads."""
    with contextlib.suppress(AttributeError, OSError):
        if os.uname().sysname == "Linux":
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)


def copy_patiently(source: Path, target: Path, moved: Moved = lambda source, done: None) -> tuple[int, str]:
    """Call `copy_with_digest`, again after `Timings.copy_pauses`, if there are source and room. Raises `OSError`."""
    for pause in (*TIMINGS.copy_pauses, None):
        try:
            return copy_with_digest(source, target, moved)
        except OSError as exc:
            if pause is None or _is_gone(source, exc) or exc.errno in (errno.ENOSPC, errno.EDQUOT):
                raise
        time.sleep(pause)
    raise AssertionError


def _is_gone(source: Path, exc: OSError) -> bool:
    """Return whether ``exc`` shows that ``source`` is gone. `Path.exists` cannot tell while a mount fails."""
    return exc.errno in ABSENT and str(exc.filename) == str(source)


def copy_with_digest(source: Path, target: Path, moved: Moved = lambda source, done: None) -> tuple[int, str]:
    """Copy bytes and return ``(size, sha256)`` of them. Call ``moved`` with each block's progress. Raises `OSError`."""
    target.parent.mkdir(parents=True, exist_ok=True)
    digest, size = hashlib.sha256(), 0
    with open(source, "rb") as reader, open(target, "wb") as writer:
        while block := reader.read(BLOCK):
            digest.update(block)
            size += len(block)
            writer.write(block)
            moved(source, size)
    if (arrived := target.stat().st_size) != size:  # a mount may take bytes and lose them when it is closed
        raise OSError(errno.EIO, f"{arrived} of {size} bytes arrived", str(target))
    return size, digest.hexdigest()


def replace_file(source: Path, target: Path, moved: Moved, *, temporary: str = ".part") -> None:
    """Copy over ``target``, which stays as it was until the copy is whole, if the folder can rename."""
    put_whole(target, lambda path: copy_with_digest(source, path, moved), temporary=temporary)


def put_whole(target: Path, write: Callable[[Path], object], *, temporary: str) -> None:
    """Write a temporary file with ``write(path)``, then rename it to ``target``. Without rename, write in place.

    The temporary name ends in ``temporary``. Raises `OSError`.
    """
    beside = target.with_name(f".{target.name}{temporary}")
    try:
        write(beside)
        os.replace(beside, target)
    except OSError as exc:
        with contextlib.suppress(OSError):
            beside.unlink()
        if exc.errno not in (errno.EPERM, errno.ENOSYS, errno.ENOTSUP):
            raise
        write(target)


def write_whole(path: Path, data: bytes, *, temporary: str) -> None:
    """Write a file. With ``temporary``, the ending of names that an agent skips, it appears whole or not at all.

    A mounted object store shows a file once it is closed, and may not be able to rename. Raises `OSError`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if temporary:
        put_whole(path, lambda target: target.write_bytes(data), temporary=temporary)
    else:
        path.write_bytes(data)


def file_state(path: Path) -> FileState | None:
    """Return the state of a regular file; None if it is gone, or no such file."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return (stat.st_size, stat.st_mtime_ns) if S_ISREG(stat.st_mode) else None


class _ChangedError(Exception):
    """The script changed or removed a file during the copy."""


def copy_entry(
    entry: CheckpointEntry,
    target: Path,
    moved: Moved = lambda source, done: None,
    *,
    links: Path | None = None,
    temporary: str = "",
) -> dict[str, dict[str, Any]] | None:
    """Copy ``entry`` below ``target`` and describe its files; return None when it changed meanwhile.

    A file's name ends in ``temporary`` until it is whole: an agent would upload half of it. If the folder ``links`` can
    hold hard links, the script may delete or replace its files meanwhile. Then the copy has them as they were at the
    beginning. The folder is removed again.
    """
    files = {}
    paths = {item: entry.path / item[0] if item[0] else entry.path for item in entry.signature}
    try:
        sources = (_linked(paths, links) if links else {}) or paths

        def copy(item: Item) -> None:
            relative, size, _ = item
            source, key = sources[item], f"{entry.name}/{relative}" if relative else entry.name
            coming = target / f"{key}{temporary}"
            try:
                copied, digest = copy_patiently(source, coming, lambda _, done: moved(paths[item], done))
                if temporary:
                    os.replace(coming, target / key)
            except OSError as exc:
                if not _is_gone(source, exc):
                    raise
                raise _ChangedError from None
            if copied != size:
                raise _ChangedError
            files[key] = {"size": size, "sha256": digest}

        in_parallel(copy, entry.signature)
        _check_unchanged(sources)
    except _ChangedError:
        return None
    finally:
        if links:
            shutil.rmtree(links, ignore_errors=True)
    grown = set(entry.signature) < set(entry.again().signature)
    return None if grown else files


def _linked(paths: Mapping[Item, Path], links: Path) -> dict[Item, Path]:
    """Create a hard link to every file. Return none if the file system cannot. Raises `_ChangedError`."""
    found = {}
    try:
        links.mkdir(parents=True, exist_ok=True)
        for number, (item, path) in enumerate(paths.items()):
            found[item] = links / str(number)
            os.link(os.path.realpath(path), found[item])
    except FileNotFoundError:
        raise _ChangedError from None
    except OSError:
        return {}
    _check_unchanged(found)
    return found


def _check_unchanged(sources: Mapping[Item, Path]) -> None:
    if any(file_state(path) != (size, changed) for (_, size, changed), path in sources.items()):
        raise _ChangedError


# ----------------------------------------------------------------------------------------------------------- pointers


def write_pointers(live: Path, node: int, pointers: Mapping[str, Pointer], *, temporary: str = "") -> None:
    """Write the pointers of this node's script, for later starts and readers of the run. Raises `OSError`."""
    text = json.dumps({name: asdict(pointer) for name, pointer in sorted(pointers.items())})
    write_whole(live / "pointers" / f"node-{node}.json", text.encode(), temporary=temporary)


def read_pointers(live: Path) -> dict[int, dict[str, Pointer]]:
    """Return every pointer by node and name. A damaged file is left out. Raises `OSError` if the disk or mount fails:
    a checkpoint that a pointer names must not be removed."""
    folder = live / "pointers"

    def read() -> dict[int, dict[str, Pointer]]:
        found = {}
        for match in filter(None, map(re.compile(r"node-(\d+)\.json").fullmatch, names_in(folder))):
            try:
                items = json.loads((folder / match[0]).read_bytes()).items()
                named = {str(n): Pointer(target=str(p["target"]), link=bool(p["link"])) for n, p in items}
                found[int(match[1])] = named
            except OSError as exc:
                raise_fault(exc)
            except (ValueError, KeyError, TypeError, AttributeError):
                pass
        return found

    return ask_again(read)


# --------------------------------------------------------------------------------------- complete ones, and restoring


def complete(
    root: Path, *, url: str = "", say: Callable[[str], None] | None = None, marks: tuple[str, ...] = ()
) -> list[Checkpoint]:
    """Return the complete checkpoints below ``root``, oldest first. Call ``say`` for each of the others.

    Files whose names end in one of ``marks`` are those of a platform's agent. A disk or mount that fails is asked again
    for `Timings.mount`. Raises `StorageError` if it still fails then, unless only older checkpoints cannot be read.

    With ``url``, ``root`` is the folder of the user with that URL. A part of it that is closed to us stays so: then
    this raises `SpecError` at once.
    """

    def patience(survey: _Survey) -> float:
        if url and all(exc.errno in CLOSED for exc in survey.unread.values()):
            return 0.0
        return TIMINGS.mount if survey.maybe_newer else TIMINGS.mount_older if survey.unread else 0.0

    survey = ask_again(lambda: _survey(root, time.monotonic() + TIMINGS.mount), patience)
    if folder := next(iter(survey.maybe_newer), None):
        exc, place, hint = survey.unread[folder], str(folder), ""
        why = f"cannot read {place.replace(str(root), url, 1) if url else place}: {describe_fault(exc)}"
        if folder != root and survey.newest is not None:
            hint = f"to resume from checkpoint {survey.newest.name}, rename that folder to .{folder.name}"
        if url and exc.errno in CLOSED:
            raise SpecError(why, field="resume_from", hint=hint)
        raise StorageError(why, hint=hint)
    if say is not None:
        others = [(folder, f"is not complete ({missing})") for folder, missing in survey.half.items()]
        others += [(folder, f"is not complete (no {COMMIT})") for folder in uncommitted(root, marks=marks)]
        others += [(folder, f"cannot be read ({describe_fault(exc)})") for folder, exc in survey.unread.items()]
        for folder, state in others:
            say(f"checkpoint {folder.parent.name}/{folder.name} {state}; skipped")
    return survey.found


class _Survey(NamedTuple):
    """The complete checkpoints below a folder, oldest first; and the folders of the others: those that are ``half``
    there, with the first missing file, and those that cannot be read, with the error."""

    found: list[Checkpoint]
    half: dict[Path, str]
    unread: dict[Path, OSError]

    @property
    def newest(self) -> Checkpoint | None:
        return next(iter(resumable(self.found)[-1:]), None)

    @property
    def maybe_newer(self) -> list[Path]:
        """Return the folders that cannot be read and may hold a newer checkpoint than all others."""
        newest = self.newest
        return [folder for folder in self.unread if newest is None or not _is_older(folder, newest)]


def _survey(root: Path, end: float) -> _Survey:
    """Return the survey of the folder ``root``.

    A folder that is closed to us cannot be read if it is ``root`` or has the name of a checkpoint; any other is left
    out. Raises `StorageError` at a fault after ``end`` (monotonic seconds): each call to a mount may take half a minute
    to fail.
    """
    found, half, unread = list[Checkpoint](), dict[Path, str](), dict[Path, OSError]()

    @contextlib.contextmanager
    def noting(folder: Path) -> Iterator[None]:
        try:
            yield
        except OSError as exc:
            ours = folder == root or _FOLDER.fullmatch(folder.name)
            if is_fault(exc) or (ours and exc.errno in CLOSED):
                unread[folder] = exc
                if time.monotonic() >= end:
                    raise StorageError(f"cannot read {folder}: {describe_fault(exc)}") from None

    def folders(above: Path) -> list[Path]:
        below = []
        with noting(above), os.scandir(above) as items:
            for item in items:
                with noting(Path(item.path)):
                    if not item.name.startswith(".") and item.is_dir():
                        below.append(Path(item.path))
        return sorted(below)

    names = folders(root)
    for folder in (root, *names, *(folder for name in names for folder in folders(name))):
        with noting(folder):
            missing: str | None = COMMIT
            try:
                item = Checkpoint.of(json.loads((folder / COMMIT).read_bytes()), str(folder))
                missing = item.missing(lambda file: _size(folder / file))  # noqa: B023
            except (FileNotFoundError, NotADirectoryError):
                continue
            except (IsADirectoryError, ValueError):
                pass
            if missing is None:
                found.append(item)
            else:
                half[folder] = missing
    return _Survey(sorted(found, key=lambda item: item.order), half, unread)


def _is_older(folder: Path, newest: Checkpoint) -> bool:
    """Return whether the checkpoint in ``folder``, which cannot be read, is certainly older than ``newest``.

    ``folder`` may also hold all checkpoints of one name.
    """
    match = _FOLDER.fullmatch(folder.name)
    if match is None:
        return is_earlier(folder.name, newest.name)
    if match[1] != newest.attempt:
        return attempt_key(match[1]) < attempt_key(newest.attempt)
    return int(match[2]) < newest.seq and not is_earlier(newest.name, folder.parent.name)


def uncommitted(root: Path, *, marks: tuple[str, ...] = ()) -> list[Path]:
    """Return the checkpoints of a run's own folder that lack their commit. ``marks``: see `complete`.

    A checkpoint that cannot be read is not among them: the caller removes them.
    """
    folders = sorted(map(Path, glob.glob(f"{glob.escape(str(root))}/*/*")))
    return [path for path in folders if _FOLDER.fullmatch(path.name) and _lacks_commit(path, marks)]


def _lacks_commit(folder: Path, marks: tuple[str, ...]) -> bool:
    """Return whether ``folder`` holds files of nodes, and certainly no commit.json."""
    try:
        (folder / COMMIT).lstat()
    except FileNotFoundError:
        with contextlib.suppress(OSError):
            return any(not file.name.endswith(marks) for part in folder.glob("node-*") for file in _files(part))
    except OSError:
        pass
    return False


def _size(path: Path) -> int:
    """Return the bytes of a file, or -1 without one. Raises `OSError` if that cannot be known."""
    try:
        return path.stat().st_size
    except OSError as exc:
        if exc.errno not in ABSENT:
            raise
        return -1


def restore(checkpoint: Checkpoint, target: Path, *, node: int) -> None:
    """Put all nodes' files of ``checkpoint`` at ``target``, whole or not at all, digests checked.

    If two nodes wrote one path, each node gets its own. Raises `DigestError` if a file is not as committed,
    `StorageError` when the disk, or the mount it lies on, fails.
    """
    if "/" in checkpoint.name or checkpoint.name in ("", ".", "..") or not checkpoint.files:
        raise DigestError(f"checkpoint {checkpoint.name!r} has no name or no files of its own")
    building = target.with_name(".restoring")  # a longer name might not fit
    chosen: dict[Path, str] = {}
    for key in sorted(checkpoint.files, key=lambda k: k.startswith(f"node-{node}/")):
        parts = key.split("/")
        if ".." in parts or len(parts) < 2 or not _NODE.fullmatch(parts[0]) or parts[1] != checkpoint.name:
            raise DigestError(f"checkpoint {checkpoint.name} names the file {key!r} outside itself")
        chosen[building.joinpath(*parts[2:])] = key

    def bring(item: tuple[Path, str]) -> None:
        place, key = item
        try:
            _, digest = copy_patiently(checkpoint.folder / key, place)
        except OSError as exc:
            if not _is_gone(checkpoint.folder / key, exc):
                raise
            raise DigestError(f"checkpoint {checkpoint.name}: {key} is gone") from None
        if digest != checkpoint.files[key][1]:
            raise DigestError(f"checkpoint {checkpoint.name}: {key} is not what was committed")

    remove_path(building)
    try:
        in_parallel(bring, chosen.items())
        remove_path(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(building, target)
    except OSError as exc:
        raise StorageError(f"cannot restore checkpoint {checkpoint.name} to {target}: {exc.strerror}") from None
    finally:
        remove_path(building)


def remove_path(path: Path) -> None:
    """Remove the file or folder at ``path``, as far as possible."""
    with contextlib.suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()


def date(path: Path, seconds: float) -> None:
    """Set the time of change of all files at ``path`` (Unix seconds), as far as the file system lets us."""
    for item in (path, *_files(path)):
        with contextlib.suppress(OSError):
            os.utime(item, (seconds, seconds))
