"""Keep folders in step with a store, like platforms that copy each node's folder instead of mounting one for all."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from ..provider_api.launch_spec import LaunchSpec, Mount
from ..storage.timings import CLIENT_TIMINGS


class Objects(Protocol):
    """Store as a platform moves bytes to and from it. URLs are the platform's own."""

    def fetch(self, url: str, folder: Path) -> list[str]:
        """Download everything below the URL. Return the names below ``folder``."""

    def send(self, url: str, path: Path) -> None:
        """Upload a file as one object. Raises `FileNotFoundError` if the file is gone."""

    def delete(self, url: str) -> None:
        """Remove one object."""


class Sync:
    """One node's folder and its prefix: restored at the start, changes sent up as they are seen.

    A file deleted here is deleted there. A change goes up once it is ``lag`` seconds old. With ``marks`` (``.x``) a
    file gets an empty one beside it: ``<name>.x-uploading``, then ``<name>.x-uploaded``. Files ``*.x-ignore`` stay
    here.
    """

    def __init__(self, store: Objects, url: str, folder: Path, *, lag: float, marks: str = "") -> None:
        self.store, self.url, self.folder, self.lag = store, url.rstrip("/") + "/", folder, lag
        self._marks = marks
        self._marked = re.compile(rf"{re.escape(marks)}-\w+$" if marks else "(?!)")
        self._sent: dict[str, tuple[int, int]] = {}

    def restore(self) -> None:
        """Fill the folder from the store."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.store.fetch(self.url, self.folder)
        self._sent = states_below(self.folder, self._marked)

    def step(self, *, whole: bool = False) -> None:
        """Scan the folder once. ``whole`` sends the last changes too."""
        local, now = states_below(self.folder, self._marked), time.time()
        for name, state in sorted(local.items()):
            old = now - state[1] / 1e9 >= self.lag
            if self._sent.get(name) != state and (whole or old):
                self._put(name)
                self._sent[name] = state
        for name in sorted(self._sent.keys() - local.keys()):
            self.store.delete(self.url + name)
            del self._sent[name]

    def _put(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            if not self._marks:
                self.store.send(self.url + name, self.folder / name)
                return
            begun, done = (self.folder / f"{name}{self._marks}-{word}" for word in ("uploading", "uploaded"))
            begun.touch()
            try:
                self.store.send(self.url + name, self.folder / name)
                os.utime(begun)
            finally:
                begun.replace(done)


def states_below(folder: Path, skipped: re.Pattern[str]) -> dict[str, tuple[int, int]]:
    """Return (size, nanosecond of the last change) of every regular file by its path below ``folder``.

    Leaves out names in which ``skipped`` finds something. Files and folders may vanish meanwhile. Raises `OSError`.
    """
    found = {}
    for root, _, names in os.walk(folder):
        for path in (Path(root, name) for name in names if not skipped.search(name)):
            with contextlib.suppress(FileNotFoundError):
                if path.is_file():
                    stat = path.stat()
                    found[path.relative_to(folder).as_posix()] = (stat.st_size, stat.st_mtime_ns)
    return found


# --------------------------------------------------------------------------------------- a store that is a local folder


_COMING = ".cloudtrain-coming"


class LocalObjects:
    """`Objects` of a folder on this machine; URLs are paths. Objects are replaced atomically, as in a store."""

    def fetch(self, url: str, folder: Path) -> list[str]:
        below = (Path(root, name) for root, _, names in os.walk(url) for name in names)
        found = sorted(path.relative_to(url).as_posix() for path in below if not path.name.endswith(_COMING))
        for name in found:
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):  # deleted since it was listed
                shutil.copyfile(Path(url, name), path)
        return found

    def send(self, url: str, path: Path) -> None:
        target = Path(url)
        target.parent.mkdir(parents=True, exist_ok=True)
        coming = target.with_name(f".{target.name}{_COMING}")
        shutil.copyfile(path, coming)
        coming.rename(target)

    def delete(self, url: str) -> None:
        path = Path(url)
        path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # a store has no empty folders
            for parent in path.parents:
                parent.rmdir()


class NodeFolders:
    """Folders of nodes that each have their own (below ``folder``) instead of one for all.

    ``live`` is the URL of the restored folder. It is kept in step while the nodes run, ``lag`` seconds late, with
    ``marks`` as in `Sync`. Any other folder goes up at the end and never comes down. All nodes write directly to
    ``shared``, a URL. Without ``lag`` all nodes have one folder, and nothing is copied.
    """

    def __init__(self, folder: Path, *, live: str, shared: str, lag: float | None, marks: str = "") -> None:
        self._folder, self._live, self._shared, self._lag, self._marks = folder, live, shared, lag, marks
        self._syncs: list[tuple[int, bool, Sync]] = []
        self._over, self._lost = threading.Event(), set[int]()
        self._thread: threading.Thread | None = None

    def wired(self, launch: LaunchSpec, local: Mapping[str, Path]) -> tuple[LaunchSpec, dict[str, Path]]:
        """Return ``launch`` with each node's own filled folders, and ``local`` with them. Raises `OSError`, as
        `finish` does."""
        lag, here = self._lag, dict(local)
        if lag is None:
            return launch, here
        shutil.rmtree(self._folder, ignore_errors=True)

        def own(number: int, index: int, mount: Mount) -> Mount:
            if mount.kind != "sync" or mount.url == self._shared:
                return mount
            path, live = self._folder / f"node-{number}" / str(index), mount.url == self._live
            sync = Sync(LocalObjects(), str(local[mount.url]), path, lag=lag, marks=self._marks if live else "")
            if live:
                sync.restore()
            path.mkdir(parents=True, exist_ok=True)
            self._syncs.append((number, live, sync))
            here[path.as_uri()] = path
            return dataclasses.replace(mount, url=path.as_uri())

        nodes = [
            dataclasses.replace(spec, mounts=[own(number, index, mount) for index, mount in enumerate(spec.mounts)])
            for number, spec in enumerate(launch.nodes)
        ]
        return dataclasses.replace(launch, nodes=nodes), here

    def start(self) -> None:
        """Start the thread that keeps the folders in step."""
        if self._syncs:
            self._thread = threading.Thread(target=self._keep_in_step, name="folders", daemon=True)
            self._thread.start()

    def _keep_in_step(self) -> None:
        while not self._over.wait(CLIENT_TIMINGS.folder_sync):
            try:
                self._step(whole=False)
            except OSError as exc:  # a full disk may have room again
                sys.stderr.write(f"a node's folder could not be synced: {exc}; trying again\n")

    def _step(self, *, whole: bool, outputs: bool = False) -> None:
        for number, live, sync in self._syncs:
            if number not in self._lost and (live or outputs):
                sync.step(whole=whole)

    def lose(self, number: int) -> None:
        """Drop the node's unsent changes: its machine is gone."""
        self._lost.add(number)

    def finish(self, *, outputs: bool) -> None:
        """Send the last changes, and with ``outputs`` the nodes' outputs; then remove the folders."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()
        self._step(whole=True, outputs=outputs)
        shutil.rmtree(self._folder, ignore_errors=True)
