"""Facts of a node's machine: a folder with room, cores, signal handlers, out-of-memory kills."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterable
from pathlib import Path

from ..errors import StorageError

CLOCK_STEP = 1.0
"""Seconds. A clock that moved by more against the monotonic one was set. A time service moves it by less at a time."""
DMI = Path("/sys/class/dmi/id")
PROC_CGROUP, CGROUP, VMSTAT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"), Path("/proc/vmstat")


class Clock:
    """This machine's clock, as it was when this object was made."""

    def __init__(self) -> None:
        self._ahead, self._set_back = time.time() - time.monotonic(), 0.0

    def set_back(self) -> float:
        """Return the seconds by which the clock has been set back since."""
        ahead = time.time() - time.monotonic()
        if abs(ahead - self._ahead) > CLOCK_STEP:
            self._set_back += max(0.0, self._ahead - ahead)
            self._ahead = ahead
        return self._set_back


def scratch_folder(wanted: Iterable[str], prefix: str) -> Path:
    """Make a new private folder in the first place that takes one. Raises `StorageError` naming all failed places."""
    places = [*wanted, os.environ.get("TMPDIR"), "/tmp", os.getcwd(), "/dev/shm"]
    tried = []
    for place in dict.fromkeys(p for p in places if p):
        try:
            os.makedirs(place, exist_ok=True)
            return Path(tempfile.mkdtemp(prefix=prefix, dir=place)).resolve()
        except OSError as exc:
            tried.append(f"{place} ({exc.strerror})")
    raise StorageError("no writable folder for scratch: " + ", ".join(tried))


def cpu_count() -> int:
    """Return the cores that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # macOS
        return os.cpu_count() or 1


def machine_name() -> str:
    """Return the name of this machine: its instance id by the firmware (AWS, Google, Azure), else the host name.

    Sources: the EC2 user guide, "Identify EC2 instances"; cloud-init's data sources of Google and Azure. Two of the
    files are for root only.
    """
    known = (
        ("board_asset_tag", "i-[0-9a-f]+", "board_asset_tag"),
        ("product_serial", "GoogleCloud-.+", "product_serial"),
        ("chassis_asset_tag", "7783-7084-3265-9085-8269-3286-77", "product_uuid"),
    )
    for mark, text, name in known:
        with contextlib.suppress(OSError):
            if re.fullmatch(text, (DMI / mark).read_text().strip()):
                return (DMI / name).read_text().strip()
    return socket.gethostname()


def handles_sigterm(pid: int) -> bool:
    """Return whether the process has a handler for SIGTERM; False if that cannot be read (no /proc)."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (signal.SIGTERM - 1) & 1)
    return False


def users(folder: Path) -> set[int]:
    """Return the other processes whose environment names a place below ``folder``; none where there is no /proc."""
    mark = f"={folder}/".encode()
    found = {int(path.name) for path in Path("/proc").glob("[0-9]*") if mark in _environ(path)}
    return found - {os.getpid()}


def kill_users(folder: Path) -> None:
    """Kill every other process whose environment names a place below ``folder``, by /proc: also those that detached.

    A process that clears its environment is not found.
    """
    killed: set[int] = set()
    while found := users(folder) - killed:
        killed |= found
        for pid in found:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)


def end_child(process: subprocess.Popen[bytes]) -> threading.Thread:
    """Kill a child's process group. Return the thread that waits for its end: a driver or mount may hold it for ever.

    The child has a session of its own.
    """
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    waiter = threading.Thread(target=process.wait, name="end-child", daemon=True)
    waiter.start()
    return waiter


def _environ(process: Path) -> bytes:
    try:
        return (process / "environ").read_bytes()
    except OSError:  # it has ended, or is another user's
        return b""


def oom_kills() -> int:
    """Return the kernel's kills for memory in this process's cgroup, else on this machine; 0 if neither can be read.

    A container sees its own cgroup as the root. Sources: the kernel's cgroup-v2.rst (memory.events) and
    cgroup-v1/memory.rst (memory.oom_control).
    """
    mine = {"": "", "memory": ""}
    with contextlib.suppress(OSError, ValueError):
        mine |= {names: path for _, names, path in (x.split(":", 2) for x in PROC_CGROUP.read_text().splitlines())}
    v2 = [CGROUP / mine[""].strip("/") / "memory.events", CGROUP / "memory.events"]
    v1 = [CGROUP / "memory" / mine["memory"].strip("/") / "memory.oom_control", CGROUP / "memory/memory.oom_control"]
    for file in (*v2, *v1, VMSTAT):
        with contextlib.suppress(OSError, ValueError):
            for line in file.read_text().splitlines():
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
    return 0
