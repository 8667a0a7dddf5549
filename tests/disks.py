"""Small disks, for tests that fill one, and disks that fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


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


class FaultyDisk:
    """A disk at ``place`` whose operations fail on demand (`faultyfs`). Its files lie in ``behind``."""

    def __init__(self, place: Path, behind: Path) -> None:
        self.place, self.behind, self._faults = place, behind, Path(f"{behind}.faults")
        self.fail()

    def fail(self, *faults: tuple[str, str, int]) -> None:
        """Let these operations fail from now on, and no others: (operation, path, errno)."""
        new = self._faults.with_suffix(".new")
        new.write_text(json.dumps(faults))
        os.replace(new, self._faults)

    def heal_after(self, seconds: float) -> None:
        threading.Timer(seconds, self.fail).start()


@contextmanager
def faulty_disk(place: Path, behind: Path) -> Iterator[FaultyDisk]:
    """Yield a `FaultyDisk` at ``place``."""
    if os.geteuid() != 0 or not os.path.exists("/dev/fuse"):
        pytest.skip("needs root and FUSE, to mount a disk that fails")
    for folder in (place, behind):
        folder.mkdir(parents=True, exist_ok=True)
    disk = FaultyDisk(place, behind)
    command = [sys.executable, Path(__file__).with_name("faultyfs.py"), behind, place]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as mount:
        while not os.path.ismount(place):
            assert mount.poll() is None, "the disk could not be mounted"
            time.sleep(0.05)
        yield disk
        disk.fail()
        mount.communicate(timeout=60)
