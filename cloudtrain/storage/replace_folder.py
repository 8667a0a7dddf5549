"""A folder that is replaced whole: the next version is put together beside it, and takes its place by two renames.

Folders cannot be exchanged at once everywhere. A kill between the two renames leaves nothing under the right name; what
stood there is beside it then, and `tidy` puts it back.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Collection
from pathlib import Path

from .local_disk import disk_errors

__all__ = ["aside", "below", "discard", "prune", "swap", "take", "tidy"]

_NEXT = ".partial-"
_FORMER = ".former-"


def aside(final: Path) -> Path:
    """Where the next version of ``final`` is put together."""
    return final.with_name(_NEXT + final.name)


def tidy(folder: Path, names: Collection[str]) -> None:
    """Mend in ``folder`` what a kill has left; next versions of what is not among ``names`` any more go."""
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
    """Remove what is not among the files ``wanted``, and folders that are empty."""
    with disk_errors(folder):
        for path in below(folder):
            if path.is_symlink() or path not in wanted:
                path.unlink()
        for top, _, _ in os.walk(folder, topdown=False):
            with contextlib.suppress(OSError):
                os.rmdir(top)


def below(folder: Path) -> list[Path]:
    """All files in ``folder``, and links, which are not followed; none when there is no such folder."""
    found = []
    for top, folders, names in os.walk(folder):
        found += [Path(top, name) for name in names]
        found += [path for path in (Path(top, name) for name in folders) if path.is_symlink()]
    return found


def take(source: Path, target: Path) -> None:
    """Have the file ``source`` as ``target`` too; by a hard link where there are such."""
    with disk_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)
        try:
            if source.is_symlink():
                raise OSError
            os.link(source, target)
        except OSError:
            shutil.copy2(source, target, follow_symlinks=False)


def swap(final: Path) -> None:
    """Put what lies `aside` in the place of ``final``, which need not exist, and remove what stood there."""
    former = final.with_name(_FORMER + final.name)
    with disk_errors(final):
        discard(former)
        if os.path.lexists(final):
            os.replace(final, former)
        os.replace(aside(final), final)
        discard(former)


def discard(path: Path) -> None:
    """Remove a file, or a folder with all that is in it; there need be none."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
