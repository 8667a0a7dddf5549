"""A bucket as Mountpoint for S3 mounts it: python bucketfs.py FOLDER PLACE, until its stdin ends.

``FOLDER`` holds the bucket's objects. Source of the rules: doc/SEMANTICS.md of awslabs/mountpoint-s3, with the options
allow-overwrite and allow-delete. There is no rename (ENOSYS, mountpoint-s3-fs/src/fs/error.rs), no link, and no change
of times or owners. A file is written once, from its beginning to its end, and is an object when it is closed.
"""

from __future__ import annotations

import errno
import os
import shutil
import sys
import tempfile
import threading
from typing import Any, NoReturn

import mfusepy
from slowfs import Slow, serve


class Bucket(Slow):
    """The objects of the folder ``root``. A file that is being written lies in another folder until it is closed."""

    def __init__(self, root: str) -> None:
        super().__init__(root, seconds=0)
        self._aside = tempfile.mkdtemp(dir=os.path.dirname(root))
        self._written: dict[int, tuple[str, int]] = {}
        self._open: dict[str, int] = {}
        self._lock = threading.Lock()

    def _refuse(self, *_: object) -> NoReturn:
        raise mfusepy.FuseOSError(errno.ENOSYS)

    rename = link = symlink = chmod = chown = utimens = _refuse

    def open(self, path: str, flags: int) -> int:
        if not flags & os.O_ACCMODE:
            return super().open(path, flags)
        if not flags & os.O_TRUNC and os.path.getsize(self._real(path)):
            raise mfusepy.FuseOSError(errno.EPERM)
        return self.create(path, 0o644)

    def create(self, path: str, mode: int) -> int:
        descriptor, name = tempfile.mkstemp(dir=self._aside)
        with self._lock:
            self._written[descriptor] = (name, 0)
            self._open[path] = descriptor
        return descriptor

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        return super().getattr(path, self._open.get(path, fh))

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        name, size = self._written[fh]
        if offset != size:
            raise mfusepy.FuseOSError(errno.EINVAL)
        with self._lock:
            self._written[fh] = (name, size + len(data))
        return super().write(path, data, offset, fh)

    def truncate(self, path: str, length: int, fh: int | None = None) -> int:
        if length:
            self._refuse()
        return super().truncate(path, length, None)

    def flush(self, path: str, fh: int) -> int:
        if fh in self._written:
            self._publish(path, fh)
        return 0

    def release(self, path: str, fh: int) -> int:
        with self._lock:
            name, _ = self._written.pop(fh, ("", 0))
            if self._open.get(path) == fh:
                del self._open[path]
        if name:
            os.unlink(name)
        return super().release(path, fh)

    def _publish(self, path: str, fh: int) -> None:
        name = self._written[fh][0]
        shutil.copyfile(name, f"{name}.whole")
        os.replace(f"{name}.whole", self._real(path))


if __name__ == "__main__":
    serve(Bucket(sys.argv[1]), sys.argv[2])
