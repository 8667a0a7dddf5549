"""Small disks and slow ones, for tests that fill one or let it hang."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import slowfs


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """Yield ``folder`` as a disk of its own that holds at most ``size``."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to mount a small disk")
    folder.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextmanager
def slow_disk(behind: Path, place: Path) -> Iterator[Path]:
    """Yield ``place``, which shows the folder ``behind`` by `slowfs`. It hangs while ``behind`` has `slowfs.HANGS`."""
    if os.geteuid() != 0 or not os.path.exists("/dev/fuse"):
        pytest.skip("needs root and FUSE, to mount a slow disk")
    for folder in (behind, place):
        folder.mkdir()
    with subprocess.Popen([sys.executable, slowfs.__file__, behind, place], stdin=subprocess.PIPE) as process:
        try:
            while not os.path.ismount(place):
                assert process.poll() is None, "it could not be mounted"
                time.sleep(0.05)
            yield place
        finally:
            (behind / slowfs.HANGS).unlink(missing_ok=True)
            subprocess.run(["umount", "--lazy", place], check=False)
            process.communicate(timeout=60)
