"""The files that a script creates or changes below its working folder, and copies of them in ``live/``.

The working folder holds the job's code. A file counts as an output if it was not there before the ranks started. So
does one with another size or time of change. A copy in ``live/`` follows its file: it is replaced when the file
changes, and removed when the script removes the file.
"""

from __future__ import annotations

import collections
import contextlib
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from stat import S_ISREG

from .checkpoints import FileState
from .mirror_files import Growing
from .timings import TIMINGS

IGNORE = ".cloudtrainignore"
MOST_FILES = 10_000
TRIES = 5  # tries of a file that cannot be copied, the last ones after the script's end. Then it is left out
NAMED = 5  # most names in the line about files that are left out
_FOLDERS = frozenset(("__pycache__", ".git"))
_TEMPORARY = re.compile(r".*\.pyc|\..*\.part", re.DOTALL)


class Outputs:
    """The outputs below ``folder``, as it is now: make this object after the code was unpacked, before ranks start.

    ``limit`` is the most bytes that `look` returns together. ``skip`` are glob patterns, relative to ``folder``, of
    files that are kept as checkpoints already. ``say`` prints one line.
    """

    def __init__(self, folder: Path, *, limit: int, skip: Iterable[str], say: Callable[[str], None]) -> None:
        self.folder, self._limit, self._say = folder, limit, say
        self._skip = [_regex("/" + os.path.normpath(pattern)) for pattern in skip]
        self._rules: list[tuple[str, bool, bool, re.Pattern[str]]] = []
        self._source: dict[str, FileState] = {}
        self._source = dict(self._walk())
        for path in sorted(self._source, key=lambda path: path.count("/")):
            if path.rpartition("/")[2] == IGNORE:
                self._rules += _rules(folder / path, path[: -len(IGNORE)])
        self._young: set[str] = set()
        self._crowded: set[str] = set()
        self._named: set[str] = set()

    def look(self, *, final: bool = False) -> dict[str, FileState]:
        """Return the outputs that are to be in ``live/`` now, by path below the folder.

        If files exceed the limit together, the largest ones are left out; one line names these. Unless ``final``, a new
        or changed file that is younger than `Timings.output_young` is missing from the first look that finds it.
        """
        found = {path: state for path, state in self._walk() if self._source.get(path) != state}
        kept = self._within_the_limits(found)
        if final:
            return kept
        edge = time.time_ns() - int(TIMINGS.output_young * 1e9)
        young = {path for path, (_, changed) in kept.items() if changed > edge}
        late, self._young = young & self._young, young - self._young
        return {path: state for path, state in kept.items() if path not in young or path in late}

    def present(self, path: str) -> bool:
        """Return whether the script still has the file."""
        return os.path.isfile(self.folder / path) and path not in self._named

    def _within_the_limits(self, found: dict[str, FileState]) -> dict[str, FileState]:
        """Return the files without the largest folders and files, so that `MOST_FILES` and the limit hold."""
        tops = collections.Counter(path.partition("/")[0] for path in found)
        crowded = _surplus(tops, MOST_FILES)
        if set(crowded) - self._crowded:
            names = ", ".join(f"{top} ({tops[top]:,} files)" for top in sorted(crowded)[:NAMED])
            self._say(f"outputs are limited to {MOST_FILES:,} files a node; left out: {names}")
        self._crowded = set(crowded)
        sizes = {path: size for path, (size, _) in found.items() if path.partition("/")[0] not in self._crowded}
        left = _surplus(sizes, self._limit)
        if set(left) - self._named:
            names = ", ".join(f"{path} ({_gb(sizes[path])})" for path in left[:NAMED])
            more = f" and {len(left) - NAMED} more" if len(left) > NAMED else ""
            self._say(f"outputs are limited to {_gb(self._limit)} (max_outputs); left out: {names}{more}")
        self._named = set(left)
        return {path: found[path] for path in sizes if path not in self._named}

    def _walk(self) -> Iterator[tuple[str, FileState]]:
        """Yield each regular file by its path, and each link to a regular file inside the folder."""
        folders = [""]
        while folders:
            base = folders.pop()
            try:
                with os.scandir(self.folder / base) as listed:
                    entries = list(listed)
            except OSError:  # the script has removed it meanwhile, or it cannot be read
                continue
            for entry in entries:
                name, path = entry.name, base + entry.name
                with contextlib.suppress(OSError):  # it is gone, or a link to nothing
                    if entry.is_dir(follow_symlinks=False):
                        if name not in _FOLDERS and not self._is_left_out(path, folder=True):
                            folders.append(path + "/")
                    elif not _TEMPORARY.fullmatch(name) and not self._is_left_out(path, folder=False):
                        stat = entry.stat()
                        if S_ISREG(stat.st_mode) and not (entry.is_symlink() and not self._is_inside(entry.path)):
                            yield path, (stat.st_size, stat.st_mtime_ns)

    def _is_inside(self, link: str) -> bool:
        return os.path.realpath(link).startswith(os.path.realpath(self.folder) + os.sep)

    def _is_left_out(self, path: str, *, folder: bool) -> bool:
        if any(pattern.match(path) for pattern in self._skip):
            return True
        found = False
        for base, negated, folders_only, regex in self._rules:
            if path.startswith(base) and (folder or not folders_only) and regex.match(path[len(base) :]):
                found = not negated
        return found


def _surplus(sizes: Mapping[str, int], limit: int) -> list[str]:
    """Return the largest items, as many as must go until the others fit ``limit`` together."""
    total, surplus = sum(sizes.values()), list[str]()
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        if total <= limit:
            break
        total -= sizes[name]
        surplus.append(name)
    return surplus


class GrowingOutputs(Growing):
    """The thread that copies `Outputs` below ``target``, every `Timings.output_look` and at the end. Keywords: see
    `Growing`."""

    def __init__(
        self,
        outputs: Outputs,
        target: Path,
        *,
        moved: Callable[[Path, int], None],
        complain: Callable[[str], None],
        temporary: str = ".part",
    ) -> None:
        super().__init__({outputs.folder: target}, moved=moved, complain=complain, temporary=temporary)
        self._outputs, self._target = outputs, target
        self._known: set[str] = set()
        self._tries: dict[Path, int] = {}
        self._end = float("inf")

    def _all(self, *, finishing: bool) -> Iterator[tuple[Path, Path]]:
        found = self._outputs.look(final=finishing)
        for path in [path for path in self._known if path not in found and not self._outputs.present(path)]:
            if self._stopped:  # the node removes the folder now, not the script
                return
            self._known.discard(path)
            self._copied.pop(self._outputs.folder / path, None)
            with contextlib.suppress(OSError):
                (self._target / path).unlink()
                for parent in list((self._target / path).parents)[: path.count("/")]:
                    parent.rmdir()  # a file may take its name now; one that is not empty stays
        self._known.update(found)
        for path in found:
            yield self._outputs.folder / path, self._target / path

    def finish(self) -> None:
        self._end = time.monotonic() + TIMINGS.outputs_end
        super().finish()

    def _copy(self, file: Path, place: Path) -> bool:
        if time.monotonic() >= self._end:
            return False
        if super()._copy(file, place):
            return True
        self._tries[file] = self._tries.get(file, 0) + 1
        return self._finishing and self._tries[file] >= TRIES  # an output is not worth a failed run

    def _once(self, finishing: bool) -> bool:
        arrived = super()._once(finishing)
        if finishing and not arrived and time.monotonic() >= self._end:
            self._complain("not all outputs could be copied")
            return True
        return arrived

    def _period(self, file: Path, size: int) -> float:
        return TIMINGS.output_look

    def _pause(self) -> float:
        return TIMINGS.output_look


def _rules(file: Path, base: str) -> list[tuple[str, bool, bool, re.Pattern[str]]]:
    """Return the patterns of one ignore file: base folder, negated, for folders only, and regular expression.

    These are gitignore(5)'s patterns without escapes by a backslash: names, paths, ``*``, ``?``, ``[…]``, ``**``.
    """
    rules = []
    with contextlib.suppress(OSError, UnicodeDecodeError):
        for line in file.read_text(encoding="utf-8").splitlines():
            text = line.strip()
            if not text or text.startswith("#"):
                continue
            negated, text = text.startswith("!"), text.removeprefix("!")
            rules.append((base, negated, text.endswith("/"), _regex(text.rstrip("/"))))
    return rules


def _regex(pattern: str) -> re.Pattern[str]:
    """Return the regular expression of a path below the pattern's base. A name without a slash fits in every folder."""
    parts = pattern.lstrip("/").split("/") if "/" in pattern else ["**", pattern]
    inner = "".join("(?:.*/)?" if part == "**" else _segment(part) + "/" for part in parts[:-1])
    with contextlib.suppress(re.error):
        return re.compile(f"(?s:{inner}{'.*' if parts[-1] == '**' else _segment(parts[-1])})\\Z")
    return re.compile("(?!)")  # such as [z-a]


def _segment(part: str) -> str:
    """Return the regular expression of one name in a path: its ``*`` and ``?`` match no slash."""
    out, i = "", 0
    while i < len(part):
        if part[i] == "*":
            out += "[^/]*"
        elif part[i] == "?":
            out += "[^/]"
        elif part[i] == "[" and (end := part.find("]", i + 2)) > 0:
            body = part[i + 1 : end].replace("\\", r"\\")
            out += f"[^{body[1:]}]" if body[0] in "!^" else f"[{body}]"
            i = end
        else:
            out += re.escape(part[i])
        i += 1
    return out


def _gb(count: int) -> str:
    """Return bytes as text, with 10^9 bytes a GB as in the job's limit."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.1f} {unit}".replace(".0 ", " ")
    return f"{count} B"
