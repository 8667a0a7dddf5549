"""Small disks, disks that fail and disks that hang."""

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
def mounted(script: str, behind: Path, place: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Mount the folder ``behind`` at ``place`` by the FUSE program ``script``. Yield its process."""
    if os.geteuid() != 0 or not os.path.exists("/dev/fuse"):
        pytest.skip("needs root and FUSE, to mount a disk that fails or hangs")
    for folder in (behind, place):
        folder.mkdir(parents=True, exist_ok=True)
    with subprocess.Popen([sys.executable, script, behind, place], stdin=subprocess.PIPE) as process:
        try:
            while not os.path.ismount(place):
                assert process.poll() is None, "it could not be mounted"
                time.sleep(0.05)
            yield process
        finally:
            subprocess.run(["umount", "--lazy", place], check=False)
            process.communicate(timeout=60)


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
    disk = FaultyDisk(place, behind)
    with mounted(str(Path(__file__).with_name("faultyfs.py")), behind, place):
        try:
            yield disk
        finally:
            disk.fail()


@contextmanager
def slow_disk(behind: Path, place: Path) -> Iterator[Path]:
    """Yield ``place``, which shows the folder ``behind`` by `slowfs`. It hangs while ``behind`` has `slowfs.HANGS`."""
    with mounted(slowfs.__file__, behind, place):
        try:
            yield place
        finally:
            (behind / slowfs.HANGS).unlink(missing_ok=True)
