"""Sample how busy this node is: GPUs, CPU, memory, disk and the wait for data, every `Timings.usage` seconds.

The numbers are those of the container, by its cgroup (version 2), and else of the whole machine, by /proc. A number
that cannot be read is left out. ``nvidia-smi`` gives those of GPUs: without it, there are none.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from .host_facts import cpu_count
from .timings import TIMINGS

CGROUP, PROC = Path("/sys/fs/cgroup"), Path("/proc")
COMMAND = ("nvidia-smi", "--query-gpu=utilization.gpu,memory.used,memory.total", "--format=csv,noheader,nounits")
GPU_SECONDS = 10.0  # longest wait for nvidia-smi
GPU_TRIES = 3  # calls in a row without a GPU, after which nvidia-smi is not asked again: the driver may be stuck


class UsageSampler:
    """A thread that appends a row to ``file`` every `Timings.usage`; ``disk`` is a folder on the disk to look at.

    A row has ``time`` (Unix seconds), and percentages from 0 to 100: ``cpu`` of the cores, ``memory``, ``disk`` (used),
    ``data_wait`` (time in which a process waited for a disk or mount), ``gpu`` (mean of the GPUs), ``gpu_memory`` (the
    fullest GPU). ``on_gpu`` gets the use of the busiest GPU in percent; or once, why no GPU can be sampled.
    """

    def __init__(self, file: Path, *, disk: Path, on_gpu: Callable[[float | str], None] | None = None) -> None:
        self._file, self._disk, self._tries = file, disk, GPU_TRIES
        self._on_gpu = on_gpu or (lambda used: None)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="usage", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()

    def _loop(self) -> None:
        before, at = _counters(), time.monotonic()
        while not self._stopped.wait(TIMINGS.usage):
            now, counters = time.monotonic(), _counters()
            row = {name: 100 * (counters[name] - before[name]) / (now - at) for name in counters.keys() & before.keys()}
            before, at = counters, now
            row |= self._levels()
            rounded = {name: round(min(100.0, max(0.0, value)), 1) for name, value in sorted(row.items())}
            with contextlib.suppress(OSError), open(self._file, "ab", buffering=0) as stream:  # no sample is worth more
                stream.write((json.dumps({"time": round(time.time(), 1), **rounded}) + "\n").encode())

    def _levels(self) -> dict[str, float]:
        found = {}
        with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
            found["memory"] = 100 * _memory_share()
        with contextlib.suppress(OSError, ZeroDivisionError):
            disk = shutil.disk_usage(self._disk)
            found["disk"] = 100 * disk.used / disk.total
        if self._tries:
            found |= self._gpus()
        return found

    def _gpus(self) -> dict[str, float]:
        gpus, why = [], "nvidia-smi shows the use of no GPU"
        self._tries -= 1
        try:
            gpus = gpu_rows()
        except FileNotFoundError:
            why, self._tries = "there is no nvidia-smi", 0
        except (OSError, subprocess.SubprocessError) as exc:
            why = str(exc)
        if gpus:
            self._tries = GPU_TRIES
            self._on_gpu(max(used for used, _, _ in gpus))
        elif not self._tries:
            self._on_gpu(why)
        return gpu_usage(gpus)


def gpu_rows() -> list[list[float]]:
    """Return the use in percent, and the used and total memory, of each GPU by nvidia-smi.

    Raises `OSError`, `subprocess.SubprocessError`.
    """
    done = subprocess.run(
        COMMAND, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=GPU_SECONDS, check=True
    )
    rows = [[float(part) for part in re.findall(r"\d+(?:\.\d+)?", line)] for line in done.stdout.splitlines()]
    return [row for row in rows if len(row) == 3 and row[2]]  # a GPU in slices (MIG) has no utilisation: [N/A]


def gpu_usage(rows: Sequence[Sequence[float]]) -> dict[str, float]:
    """Return ``gpu`` and ``gpu_memory`` in percent by `gpu_rows`; nothing without any."""
    if not rows:
        return {}
    return {
        "gpu": sum(row[0] for row in rows) / len(rows),
        "gpu_memory": max(100 * used / total for _, used, total in rows),
    }


def _counters() -> dict[str, float]:
    """Return the seconds so far for ``cpu`` (a second of all cores is one) and ``data_wait``."""
    found = {}
    with contextlib.suppress(OSError, ValueError, IndexError):
        found["cpu"] = _cpu_seconds() / cpu_count()
    for path in (CGROUP / "io.pressure", PROC / "pressure/io"):
        with contextlib.suppress(OSError, ValueError):
            if match := re.search(r"^some .*total=(\d+)", path.read_text(), re.MULTILINE):
                return {**found, "data_wait": int(match[1]) / 1e6}
    return found


def _cpu_seconds() -> float:
    with contextlib.suppress(OSError):
        if match := re.search(r"^usage_usec (\d+)", (CGROUP / "cpu.stat").read_text(), re.MULTILINE):
            return int(match[1]) / 1e6
    first = (PROC / "stat").read_text().splitlines()[0].split()[1:]
    user, nice, system, _idle, _iowait, *rest = map(int, first)
    return (user + nice + system + sum(rest[:3])) / os.sysconf("SC_CLK_TCK")


def _memory_share() -> float:
    with contextlib.suppress(OSError, ValueError):  # "max": no limit of its own
        return int((CGROUP / "memory.current").read_text()) / int((CGROUP / "memory.max").read_text())
    found = re.findall(r"^(\w+): +(\d+)", (PROC / "meminfo").read_text(), re.MULTILINE)
    facts = {name: int(size) for name, size in found}
    return 1 - facts.get("MemAvailable", facts.get("MemFree", 0)) / facts.get("MemTotal", 0)
