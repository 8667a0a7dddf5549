"""Folders of this machine as nodes see an object store that their platform mounts: by FUSE, on Linux.

As Cloud Storage's own mount has it: an object is there whole once it is closed, or not at all; a rename is a copy and
a removal; a folder that holds something cannot be renamed; there are no hard links, no owners and no modes. Appending
to an object is refused: that mount would fetch it and write it anew, whole, each time. Its caches are not shown.

The file system is a process of its own, `serve`, which unmounts it when the supervisor is gone, however that ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import errno
import hashlib
import json
import os
import re
import shutil
import stat as modes
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..provider_api.launch_spec import Mount, NodeSpec, Simulation
from . import NodeError

__all__ = ["MountedFolders", "Objects", "clear_mounts", "serve", "why_not"]

OFF = "CLOUDTRAIN_FUSE"
"""The variable that, as ``off``, keeps folders what they are; for an engine that does not see this machine's mounts."""
NAME = "cloudtrain-rehearsal"
"""By which a mount is known as one of ours; behind it comes whose, see `_name_of`."""
MOUNT_SECONDS = 20.0
KILLED_SECONDS = 5.0
CHUNK = 1 << 20
ENDED = (errno.ENOTCONN, errno.ECONNABORTED, errno.ESTALE)
"""What a mount says whose process is gone."""


def why_not(environ: Mapping[str, str] = os.environ) -> str:
    """Why this machine cannot show folders in this way; empty where it can."""
    if environ.get(OFF) == "off":
        return f"{OFF} is off"
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "there is no /dev/fuse that may be used"
    if not environ.get("DOCKER_HOST", "unix:").startswith("unix:"):
        return "the engine of containers is not on this machine"
    if os.geteuid() and not _lets_others():
        return "/etc/fuse.conf has no user_allow_other, without which the engine of containers may not look in"
    try:
        import mfusepy  # noqa: F401  it looks for libfuse as it is imported
    except ImportError:
        from ..storage.extras import install_command

        return f"mfusepy is not installed: {install_command('rehearse')}"
    except Exception:  # noqa: BLE001  whatever it finds, or does not
        return "libfuse cannot be loaded: install Debian's libfuse3-3, or what your system calls it"
    return ""


def _lets_others() -> bool:
    with contextlib.suppress(OSError):
        return "user_allow_other" in (line.strip() for line in Path("/etc/fuse.conf").read_text().splitlines())
    return False


# ------------------------------------------------------------------------------------------------------ the file system


Roots = Mapping[str, tuple[str, bool]]
"""Of one node: what is at which path, and whether it may be changed."""


@dataclasses.dataclass
class _Draft:
    """An object that is being written: ``path`` is where it belongs, None once that was removed."""

    path: str | None
    fd: int
    handles: int = 0
    dirty: bool = False


class Objects:
    """The operations of the file system: ``/<node>/<path>`` is the folder or file of `roots[node][path]`, and True
    where it may be changed. A file is there alone, without its neighbours; what may not be changed says EROFS.

    What a node has not closed yet it alone sees. Errors are `OSError`s, as the callbacks of libfuse want them.
    """

    use_ns = True
    flag_nopath = flag_nullpath_ok = True  # what is open and removed has none

    def __init__(self, roots: Sequence[Roots], aside: Path) -> None:
        told = {f"/{n}/{at}": root for n, there in enumerate(roots) for at, root in there.items()}
        self._roots = {at: Path(path) for at, (path, _) in told.items()}
        self._writable = {at for at, (_, writable) in told.items() if writable}
        self._aside = aside
        self._lock = threading.RLock()
        self._drafts: dict[str, _Draft] = {}
        self._handles: dict[int, _Draft | int] = {}
        self._listed: dict[int, str] = {}
        self._next = 0

    def _root(self, path: str) -> str:
        """What it lies in; empty for the levels that are none of any store."""
        at = path if path in self._roots else "/".join(path.split("/", 3)[:3])
        if at in self._roots:
            return at
        if path != "/" and not any(known.startswith(f"{path}/") for known in self._roots):
            raise FileNotFoundError(errno.ENOENT, path)
        return ""

    def _real(self, path: str) -> Path | None:
        """On this machine; None for those levels."""
        at = self._root(path)
        return self._roots[at] / path[len(at) + 1 :] if at else None

    def _there(self, path: str) -> Path:
        """The same, of what may be opened."""
        if (real := self._real(path)) is None:
            raise PermissionError(errno.EACCES, path)
        return real

    def _place(self, path: str) -> Path:
        """The same, of what may be changed."""
        self._may_change(path)
        if path in self._roots:
            raise PermissionError(errno.EACCES, path)
        return self._there(path)

    def _may_change(self, path: str) -> None:
        if self._root(path) not in self._writable:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)

    # --------------------------------------------------------------------------------------------------------- looking

    def getattr(self, path: str | None, fh: int | None = None) -> dict[str, Any]:
        with self._lock:
            held = self._handles.get(fh) if fh is not None else None
            held = held if held is not None or path is None else self._drafts.get(path)
            if held is not None or path is None:
                return _told(os.fstat(held.fd if isinstance(held, _Draft) else held or -1))
            real = self._real(path)
            return _told(os.stat("/") if real is None else os.lstat(real))

    def opendir(self, path: str) -> int:
        self._real(path)
        with self._lock:
            self._next += 1
            self._listed[self._next] = path
            return self._next

    def releasedir(self, path: str | None, fh: int) -> int:
        self._listed.pop(fh, None)
        return 0

    def readdir(self, path: str | None, fh: int) -> list[str]:
        with self._lock:
            path = self._listed[fh]
            real, above = self._real(path), path.rstrip("/") + "/"
            if real is None:
                names = {known[len(above) :].split("/")[0] for known in self._roots if known.startswith(above)}
            else:
                drafts = (known[len(above) :] for known in self._drafts if known.startswith(above))
                names = {*os.listdir(real), *(name for name in drafts if "/" not in name)}
            return [".", "..", *sorted(names)]

    def readlink(self, path: str) -> str:
        return os.readlink(self._there(path))

    def statfs(self, path: str) -> dict[str, int]:
        real = self._real(path) or self._aside
        found = os.statvfs(real if real.exists() else self._aside)
        names = (
            "f_bavail",
            "f_bfree",
            "f_blocks",
            "f_bsize",
            "f_favail",
            "f_ffree",
            "f_files",
            "f_frsize",
            "f_namemax",
        )
        return {name: getattr(found, name) for name in names}

    # ---------------------------------------------------------------------------------------------- reading and writing

    def open(self, path: str, flags: int) -> int:
        with self._lock:
            draft = self._drafts.get(path)
            if flags & os.O_ACCMODE == os.O_RDONLY:
                return self._handle(draft if draft is not None else os.open(self._there(path), os.O_RDONLY))
            real = self._place(path)
            size = os.fstat(draft.fd).st_size if draft is not None else real.stat().st_size
            if flags & os.O_APPEND and not flags & os.O_TRUNC and size:
                raise OSError(errno.EOPNOTSUPP, "objects cannot be appended to", path)
            draft = draft or self._draft(path)
            if flags & os.O_TRUNC:
                os.ftruncate(draft.fd, 0)
                draft.dirty = True
            return self._handle(draft)

    def create(self, path: str, mode: int) -> int:
        with self._lock:
            if not self._place(path).parent.is_dir():
                raise FileNotFoundError(errno.ENOENT, path)
            draft = self._drafts.get(path) or self._draft(path, fresh=True)
            draft.dirty = True
            return self._handle(draft)

    def read(self, path: str | None, size: int, offset: int, fh: int) -> bytes:
        held = self._handles[fh]
        return os.pread(held.fd if isinstance(held, _Draft) else held, size, offset)

    def write(self, path: str | None, data: bytes, offset: int, fh: int) -> int:
        with self._lock:
            draft = self._handles[fh]
            if not isinstance(draft, _Draft):
                raise OSError(errno.EBADF, "opened for reading")
            draft.dirty = True
            return os.pwrite(draft.fd, data, offset)

    def truncate(self, path: str | None, length: int, fh: int | None = None) -> int:
        with self._lock:
            own = self.open(path or "", os.O_WRONLY) if fh is None else fh
            draft = self._handles[own]
            if isinstance(draft, _Draft) and os.fstat(draft.fd).st_size != length:
                os.ftruncate(draft.fd, length)
                draft.dirty = True
            if fh is not None:
                return 0
            try:
                return self.flush(path, own)  # nobody else will tell whether it is there
            finally:
                self.release(path, own)

    def flush(self, path: str | None, fh: int) -> int:
        """At each close, which waits for it: then the object is there."""
        with self._lock:
            held = self._handles[fh]
            if isinstance(held, _Draft) and held.dirty and held.path is not None:
                self._put(held.fd, self._place(held.path))
                held.dirty = False
        return 0

    def fsync(self, path: str | None, datasync: int, fh: int) -> int:
        return self.flush(path, fh)

    def release(self, path: str | None, fh: int) -> int:
        with self._lock:
            with contextlib.suppress(OSError):  # whoever closed it was told already
                self.flush(path, fh)
            held = self._handles.pop(fh)
            if not isinstance(held, _Draft):
                os.close(held)
                return 0
            held.handles -= 1
            if not held.handles:
                os.close(held.fd)
                if held.path is not None:
                    self._drafts.pop(held.path, None)
        return 0

    def _handle(self, held: _Draft | int) -> int:
        if isinstance(held, _Draft):
            held.handles += 1
        self._next += 1
        self._handles[self._next] = held
        return self._next

    def _draft(self, path: str, *, fresh: bool = False) -> _Draft:
        """A copy of what is there, if anything is."""
        with tempfile.TemporaryFile(dir=self._aside) as stream:
            draft = _Draft(path, os.dup(stream.fileno()))
        try:
            with contextlib.ExitStack() as opened:
                source = None if fresh else opened.enter_context(open(self._place(path), "rb"))
                while source is not None and (data := source.read(CHUNK)):
                    os.write(draft.fd, data)
        except OSError:  # as of a full disk
            os.close(draft.fd)
            raise
        self._drafts[path] = draft
        return draft

    def _put(self, fd: int, target: Path) -> None:
        """The object whole, at once. `OSError`, as of a full disk: then the one that was there before stays."""
        near = self._aside.stat().st_dev == target.parent.stat().st_dev  # or it could not be moved there
        number, coming = tempfile.mkstemp(prefix=".cloudtrain-coming-", dir=self._aside if near else target.parent)
        try:
            with open(number, "wb") as out:
                offset = 0
                while data := os.pread(fd, CHUNK, offset):
                    out.write(data)
                    offset += len(data)
            os.chmod(coming, 0o644)
            os.replace(coming, target)
        except OSError:
            Path(coming).unlink(missing_ok=True)
            raise

    # --------------------------------------------------------------------------------------------------------- changing

    def rename(self, old: str, new: str) -> int:
        source, target = self._place(old), self._place(new)
        with self._lock:
            draft = self._drafts.pop(old, None)
            if draft is not None:  # what is still open goes on under the new name
                self._put(draft.fd, source)
                draft.path, draft.dirty = new, False
                self._drafts[new] = draft
        if source.is_dir() and not source.is_symlink():
            if os.listdir(source):
                raise OSError(errno.EOPNOTSUPP, "a folder of objects cannot be renamed", old)
            os.replace(source, target)
            return 0
        if source.is_symlink():
            os.replace(source, target)
            return 0
        with open(source, "rb") as stream:  # without the lock: whoever looks meanwhile sees both
            self._put(stream.fileno(), target)
        source.unlink()
        return 0

    def unlink(self, path: str) -> int:
        with self._lock:
            draft = self._drafts.pop(path, None)
            if draft is not None:
                draft.path = None
            self._place(path).unlink(missing_ok=draft is not None)
        return 0

    def mkdir(self, path: str, mode: int) -> int:
        self._place(path).mkdir()
        return 0

    def rmdir(self, path: str) -> int:
        self._place(path).rmdir()
        return 0

    def symlink(self, target: str, source: str) -> int:
        os.symlink(source, self._place(target))
        return 0

    def link(self, target: str, source: str) -> int:
        raise OSError(errno.EOPNOTSUPP, "objects have one name", target)

    def chmod(self, path: str | None, mode: int) -> int:
        if path is not None:
            self._may_change(path)
        return 0

    def chown(self, path: str | None, uid: int, gid: int) -> int:
        if path is not None:
            self._may_change(path)
        return 0

    def utimens(self, path: str | None, times: tuple[int, int] | None = None) -> int:
        with self._lock:
            if path is not None:
                draft = self._drafts.get(path)
                os.utime(draft.fd if draft is not None else self._place(path), ns=times or (time.time_ns(),) * 2)
        return 0


def _told(found: os.stat_result) -> dict[str, Any]:
    """Everybody may do everything, and nobody owns anything."""
    mode = found.st_mode if modes.S_ISLNK(found.st_mode) else modes.S_IFMT(found.st_mode) | 0o777
    times = {"st_atime": found.st_atime_ns, "st_mtime": found.st_mtime_ns, "st_ctime": found.st_ctime_ns}
    return {"st_mode": mode, "st_size": found.st_size, "st_nlink": 1, "st_uid": 0, "st_gid": 0, **times}


def serve(place: str, aside: str, name: str) -> None:
    """Be the file system at ``place``, of the roots that come as JSON in the first line of stdin, until that ends."""
    import mfusepy

    roots = json.loads(sys.stdin.readline())

    class Fuse(mfusepy.FUSE):  # type: ignore[misc]
        def truncate_fuse_3(self, path: bytes | None, length: int, info: Any) -> int:
            """With what is open, which mfusepy 3.1 leaves out: then there would be neither that nor a path."""
            return int(self.ftruncate(path, length, info))

    def watch() -> None:
        sys.stdin.read()  # the supervisor's end, too
        unmount(place)

    threading.Thread(target=watch, daemon=True).start()
    Fuse(
        Objects(roots, Path(aside)),
        place,
        foreground=True,
        fsname=name,
        allow_other=True,
        hard_remove=True,
        attr_timeout=0,
        entry_timeout=0,
        negative_timeout=0,
    )
    _remove(place)


# ------------------------------------------------------------------------------------------------------- mounts of ours


class MountedFolders:
    """The folders of one start's nodes behind the file system; ``folder`` is its supervisor's.

    It is mounted among the temporary files, where none but its user gets to: what is mounted below the store's folder
    would go with that, were it removed while it is mounted, and so would the user's own data that it shows.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._aside = folder, folder / "mounted-aside"
        self._place: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def wired(
        self, simulation: Simulation, local: Mapping[str, Path], below: str
    ) -> tuple[Simulation, dict[str, Path]]:
        """``simulation`` with each node's mounts below the path ``below`` there; and ``local`` with where those are.

        Raises `NodeError` where it cannot be mounted.
        """
        roots: list[dict[str, tuple[str, bool]]] = []
        here = dict(local)
        self._clear()
        self._place = Path(tempfile.mkdtemp(prefix=f"{NAME}-"), "mounted")
        place = self._place

        def own(number: int, mount: Mount) -> Mount:
            if not f"{mount.path}/".startswith(f"{below}/"):
                return mount
            path = local[mount.url].resolve()
            if place.resolve().is_relative_to(path):
                raise NodeError(f"{mount.url} is {path}, which holds the temporary files too: set TMPDIR to elsewhere")
            at = str(len(roots[number])) + (f"/{local[mount.url].name}" if path.is_file() else "")
            roots[number][at] = (str(path), mount.kind == "sync")
            there = place / str(number) / at
            here[there.as_uri()] = there
            return dataclasses.replace(mount, url=there.as_uri())

        def wired(number: int, spec: NodeSpec) -> NodeSpec:
            roots.append({})
            return dataclasses.replace(spec, mounts=[own(number, mount) for mount in spec.mounts])

        clear_mounts()
        try:
            nodes = [wired(number, spec) for number, spec in enumerate(simulation.nodes)]
            self._mount(place, roots)
        except BaseException:
            self.finish()
            raise
        return dataclasses.replace(simulation, nodes=nodes), here

    def _mount(self, place: Path, roots: Sequence[Roots]) -> None:
        for folder in (place, self._aside):
            folder.mkdir(parents=True, exist_ok=True)
        code = "import sys; sys.path.append(sys.argv[4]); "
        code += "from cloudtrain.engine.fuse import serve; serve(*sys.argv[1:4])"
        package = str(Path(__file__).resolve().parents[2])
        words = [sys.executable, "-c", code, str(place), str(self._aside), _name_of(self._folder), package]
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, start_new_session=True)
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(roots).encode() + b"\n")
            self._process.stdin.flush()
        deadline = time.monotonic() + MOUNT_SECONDS
        while not os.path.ismount(place):
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise NodeError(f"{place} cannot be mounted by FUSE; without it: set {OFF}=off, and rehearse anew")
            time.sleep(0.02)

    def finish(self) -> None:
        """Unmount it. What was closed is where it belongs."""
        if self._process is not None:
            assert self._process.stdin is not None
            with contextlib.suppress(OSError):
                self._process.stdin.close()
            try:
                self._process.wait(MOUNT_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                with contextlib.suppress(subprocess.TimeoutExpired):  # it may hang in a disk that does
                    self._process.wait(KILLED_SECONDS)
        self._clear()

    def _clear(self) -> None:
        clear_mounts(self._folder)
        shutil.rmtree(self._aside, ignore_errors=True)
        if self._place is not None:
            _remove(str(self._place))


def clear_mounts(folder: Path | None = None) -> None:
    """Unmount what is ours for the supervisor's ``folder``; without one, wherever its process is gone."""
    for place, name in _mounts():
        if folder is None:
            try:
                os.stat(place)
            except OSError as exc:
                if exc.errno not in ENDED:
                    continue
            else:
                continue
        elif name != _name_of(folder):
            continue
        unmount(place)
        _remove(place)


def _name_of(folder: Path) -> str:
    """The mount's name in this machine's table of mounts; one, whatever links the folder is reached by."""
    return f"{NAME}-{hashlib.sha256(os.fsencode(os.path.realpath(folder))).hexdigest()[:12]}"


def _mounts() -> list[tuple[str, str]]:
    """Where ours are, and their names."""
    found = []
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_bytes().splitlines():
            before, _, after = line.partition(b" - ")
            kind, source = after.split()[:2]
            if kind.startswith(b"fuse") and source.startswith(f"{NAME}-".encode()):
                place = re.sub(rb"\\([0-7]{3})", lambda octal: bytes([int(octal[1], 8)]), before.split()[4])
                found.append((os.fsdecode(place), os.fsdecode(source)))
    return found


def _remove(place: str) -> None:
    """The folder that it was mounted at, and the one around that; neither holds anything."""
    for folder in (place, os.path.dirname(place)):
        with contextlib.suppress(OSError):
            os.rmdir(folder)


def unmount(place: str) -> None:
    """Now, whoever is still looking; one that is not mounted any more is no error."""
    if os.geteuid() == 0:
        ctypes.CDLL(None).umount2(os.fsencode(place), 2)  # MNT_DETACH
        return
    tool = shutil.which("fusermount3") or shutil.which("fusermount")
    if tool:
        subprocess.run([tool, "-u", "-z", "-q", place], check=False, capture_output=True)
