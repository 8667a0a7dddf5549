"""A bucket of a fake Cloud Storage, mounted on this machine with the rules of `bucketfs`."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from .vertex.plane import Plane

__all__ = ["MountedBucket"]

BUCKET = "training"
FILES = Path(__file__).parents[1] / "kit" / "bucketfs.py"


class MountedBucket:
    """The bucket ``url``, mounted at ``place`` below ``folder``. Clients reach it with the variables of ``google``."""

    def __init__(self, folder: Path) -> None:
        self.google, self.place, self.url = Plane(folder / "google"), folder / "mounted", f"gs://{BUCKET}"
        self.place.mkdir()
        command = [sys.executable, FILES, self.google.gcs.make(BUCKET), self.place]
        self._mount = subprocess.Popen(command, stdin=subprocess.PIPE)
        while not os.path.ismount(self.place):
            assert self._mount.poll() is None, "the bucket could not be mounted"
            time.sleep(0.05)

    def close(self) -> None:
        self._mount.communicate(timeout=60)
        self.google.close()
