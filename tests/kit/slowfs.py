"""A folder behind FUSE with slow operations: python slowfs.py FOLDER PLACE, until its stdin ends."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from typing import Any

import mfusepy

HANGS = ".hangs"
"""While the folder has this file, no file there can be made or opened."""
SECONDS = 0.05
"""Seconds to make, open, rename or remove a file, as in a distant object store."""

UTIME_NOW = (1 << 30) - 1
"""Nanoseconds by which libfuse 3 asks for the present time (sys/stat.h)."""


class Slow:
    """The folder itself, with its real owners and modes."""

    use_ns = True

    def __init__(self, root: str, seconds: float = SECONDS) -> None:
        self._root, self._seconds = root, seconds

    def _real(self, path: str) -> str:
        return self._root + path

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        found = os.fstat(fh) if fh is not None else os.lstat(self._real(path))
        names = ("st_mode", "st_size", "st_nlink", "st_uid", "st_gid")
        times = {"st_atime": found.st_atime_ns, "st_mtime": found.st_mtime_ns, "st_ctime": found.st_ctime_ns}
        return {**{name: getattr(found, name) for name in names}, **times}

    def readdir(self, path: str, fh: int) -> list[str]:
        return [".", "..", *os.listdir(self._real(path))]

    def _wait(self) -> None:
        time.sleep(self._seconds)
        while os.path.exists(self._real(f"/{HANGS}")):
            time.sleep(0.1)

    def readlink(self, path: str) -> str:
        return os.readlink(self._real(path))

    def open(self, path: str, flags: int) -> int:
        self._wait()
        return os.open(self._real(path), flags & ~os.O_APPEND)  # the kernel tracks the end

    def create(self, path: str, mode: int) -> int:
        self._wait()
        return os.open(self._real(path), os.O_RDWR | os.O_CREAT, mode)

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        return os.pread(fh, size, offset)

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        return os.pwrite(fh, data, offset)

    def truncate(self, path: str, length: int, fh: int | None = None) -> int:
        os.truncate(fh if fh is not None else self._real(path), length)
        return 0

    def release(self, path: str, fh: int) -> int:
        os.close(fh)
        return 0

    def rename(self, old: str, new: str) -> int:
        time.sleep(self._seconds)
        os.replace(self._real(old), self._real(new))
        return 0

    def unlink(self, path: str) -> int:
        time.sleep(self._seconds)
        os.unlink(self._real(path))
        return 0

    def mkdir(self, path: str, mode: int) -> int:
        time.sleep(self._seconds)
        os.mkdir(self._real(path), mode)
        return 0

    def rmdir(self, path: str) -> int:
        os.rmdir(self._real(path))
        return 0

    def symlink(self, target: str, source: str) -> int:
        os.symlink(source, self._real(target))
        return 0

    def link(self, target: str, source: str) -> int:
        os.link(self._real(source), self._real(target))
        return 0

    def chmod(self, path: str, mode: int) -> int:
        os.chmod(self._real(path), mode)
        return 0

    def chown(self, path: str, uid: int, gid: int) -> int:
        os.chown(self._real(path), uid, gid, follow_symlinks=False)
        return 0

    def utimens(self, path: str, times: tuple[int, int] | None = None) -> int:
        now = time.time_ns()
        accessed, modified = (now if given == UTIME_NOW else given for given in times or (now, now))
        os.utime(self._real(path), ns=(accessed, modified))
        return 0


def serve(files: Slow, place: str) -> None:
    """Mount ``files`` at the folder ``place``."""

    def watch() -> None:
        sys.stdin.read()
        subprocess.run(["umount", "--lazy", place], check=False, capture_output=True)

    threading.Thread(target=watch, daemon=True).start()
    whole: Any = files
    mfusepy.FUSE(whole, place, foreground=True, allow_other=True, attr_timeout=0, entry_timeout=0, negative_timeout=0)


if __name__ == "__main__":
    serve(Slow(sys.argv[1]), sys.argv[2])
