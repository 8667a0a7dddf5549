"""Replace a folder whole: build the next version next to it, then move it into place by two renames.

Not every system can exchange folders atomically. After a kill between the two renames the folder is missing and its
former version is next to it; `tidy` puts it back.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path

from .local_disk import disk_errors

_FORMER = ".former-"
_NEXT = ".partial-"


def aside(final: Path) -> Path:
    """Return the path at which the next version of ``final`` is built."""
    return final.with_name(_NEXT + final.name)


def tidy(folder: Path, names: Collection[str]) -> None:
    """Repair ``folder`` after a kill; delete next versions of folders not in ``names``."""
    if not folder.is_dir():
        return
    with disk_errors(folder):
        for path in list(folder.iterdir()):
            if path.name.startswith(_FORMER):
                final = folder / path.name.removeprefix(_FORMER)
                if os.path.lexists(final):
                    discard(path)
                else:
                    os.replace(path, final)
            elif path.name.startswith(_NEXT) and path.name.removeprefix(_NEXT) not in names:
                discard(path)


def prune(folder: Path, wanted: Collection[Path]) -> None:
    """Remove files that are not ``wanted``, and empty folders. If ``folder`` is a file or link, remove that."""
    with disk_errors(folder):
        if folder.is_symlink() or not folder.is_dir():
            folder.unlink(missing_ok=True)
        for path in files_below(folder):
            if path.is_symlink() or path not in wanted:
                path.unlink()
        for top, _, _ in os.walk(folder, topdown=False):
            with contextlib.suppress(OSError):
                os.rmdir(top)


def files_below(folder: Path) -> list[Path]:
    """Return all files and links in ``folder``, without following links; none if there is no such folder."""
    found = []
    for top, folders, names in os.walk(folder):
        found += [Path(top, name) for name in names]
        found += [path for path in (Path(top, name) for name in folders) if path.is_symlink()]
    return found


def take(source: Path, target: Path) -> None:
    """Make the file ``source`` available as ``target`` too, by a hard link if possible."""
    with disk_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)
        try:
            if source.is_symlink():
                raise OSError
            os.link(source, target)
        except OSError:
            shutil.copy2(source, target, follow_symlinks=False)


def keep(path: Path) -> None:
    """Rename the user's own file or folder, which is in the way, to ``<name>.yours``, or ``.yours-2`` and so on."""
    with disk_errors(path):
        os.replace(path, next(free for free in names_for(path) if not os.path.lexists(free)))


def names_for(path: Path) -> Iterator[Path]:
    """Yield the places for the user's own file or folder at ``path``, which is in the way of another one."""
    for number in itertools.count(1):
        yield path.with_name(f"{path.name}.yours{f'-{number}' if number > 1 else ''}")


def swap(final: Path) -> None:
    """Put the folder at `aside` in the place of ``final``, which may be missing, and remove the old one."""
    former = final.with_name(_FORMER + final.name)
    with disk_errors(final):
        discard(former)
        if os.path.lexists(final):
            os.replace(final, former)
        os.replace(aside(final), final)
        discard(former)


def discard(path: Path) -> None:
    """Remove a file or a whole folder, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
