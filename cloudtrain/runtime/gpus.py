"""Check that PyTorch can use the GPUs of a node, and find the libraries that an older driver needs."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from .cause import BROKEN_GPU
from .host_facts import end_child
from .timings import TIMINGS

VERSION = Path("/proc/driver/nvidia/version")
DEVICES = Path("/dev")
CHECK = """
import json, sys
try:
    import torch
except Exception:
    sys.exit()
error = ""
try:
    (torch.zeros(1, device="cuda") + 1).cpu()
except Exception as exc:
    error = str(exc).strip() or type(exc).__name__
print(json.dumps([getattr(torch.version, "cuda", None), error]))
"""
"""The sum runs a kernel: `torch.cuda.is_available` is also true where the image has no code for the GPU."""
_IMAGE = re.compile(
    r"no kernel image|driver.* (?:insufficient|too old)|not compiled with CUDA|forward compatibility", re.I
)
"""Errors that every rank on this node would meet: the image's CUDA serves neither the driver nor the GPU."""
_VISIBLE = re.compile(r"\s*(?:\d|GPU-|MIG-)")
"""Beginning of a CUDA_VISIBLE_DEVICES that names a GPU; CUDA hides all GPUs behind any other word (``none``)."""

Wait = Callable[[Callable[[], bool]], None]


def count() -> int:
    """Return how many GPUs of NVIDIA this node has, by their device files."""
    with contextlib.suppress(OSError):
        return sum(1 for name in os.listdir(DEVICES) if re.fullmatch(r"nvidia\d+", name))
    return 0


def driver_version() -> str:
    """Return the version of NVIDIA's driver, such as ``580.65.06``; empty if there is none."""
    with contextlib.suppress(OSError):
        if found := re.search(r"^NVRM version:.*?\s(\d+(?:\.\d+)+)\s", VERSION.read_text(), re.MULTILINE):
            return found[1]
    return ""


def compat_library_path(folder: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the LD_LIBRARY_PATH that begins with ``folder``, if the node's driver is older than the image's CUDA.

    ``folder`` has CUDA's forward compatibility libraries. The version in the name of its libcuda is that of the driver
    that the image's CUDA came with. Returns an empty dict if the driver is as new, or one of them is unknown.
    """
    driver = driver_version()
    library = os.path.basename(os.path.realpath(f"{folder}/libcuda.so.1"))
    needed = library.removeprefix("libcuda.so.")
    if not driver or not re.fullmatch(r"\d+(\.\d+)+", needed) or _number(driver) >= _number(needed):
        return {}
    known = environ.get("LD_LIBRARY_PATH", "")
    return {"LD_LIBRARY_PATH": f"{folder}:{known}" if known else folder}


def _number(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")))


def trouble(
    python: str,
    environ: Mapping[str, str],
    *,
    folder: Path,
    say: Callable[[str], None],
    wait: Wait,
    needed: bool = True,
) -> tuple[str, str] | None:
    """Return the reason why no rank can use this node's GPUs by PyTorch, and its category; None if ranks may.

    ``environ`` is the environment of the ranks and ``folder`` a folder without modules. ``wait`` returns once its
    argument is true, or sooner if the node has to go on. Also returns None if ``python`` has no PyTorch, if the job
    hides all GPUs, and after `Timings.gpu_check`. An error that the ranks need not meet is only printed: another
    process may hold this GPU for now. So is a PyTorch without CUDA if ``needed`` is False.
    """
    if not _VISIBLE.match(environ.get("CUDA_VISIBLE_DEVICES", "0")):
        return None
    try:
        cuda, error = json.loads(_answer([python, "-c", CHECK], environ, folder, say, wait).splitlines()[-1])
    except (OSError, TypeError, ValueError, IndexError):  # no PyTorch, or the ranks meet the same error and show it
        return None
    if not error:
        return None
    first = error.splitlines()[0]
    built = f"PyTorch in the image is built for CUDA {cuda}" if cuda else "PyTorch in the image is built without CUDA"
    if not cuda and not needed:
        say(f"{built}, and this node has {count()} GPUs; the script must use them by other means")
        return None
    facts = f"driver {driver_version() or 'unknown'}; {built}"
    category = "image" if _IMAGE.search(error) else "infra" if BROKEN_GPU.search(error) else ""
    if not category:
        say(f"PyTorch could not use a GPU of this node: {first} ({facts}); the ranks start all the same")
        return None
    return f"PyTorch cannot use the {count()} GPUs of this node: {first} ({facts})", category


def _answer(
    command: list[str], environ: Mapping[str, str], folder: Path, say: Callable[[str], None], wait: Wait
) -> bytes:
    """Return the command's output; nothing if it takes too long. Raises `OSError`."""
    end = time.monotonic() + TIMINGS.gpu_check
    with tempfile.TemporaryFile(dir=folder) as output:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        wait(lambda: process.poll() is not None or time.monotonic() >= end)
        if process.poll() is None:
            if time.monotonic() >= end:
                waited = f"{TIMINGS.gpu_check:.0f} s"
                say(f"PyTorch has not begun to use the GPUs within {waited}; the ranks start all the same")
            end_child(process)
            return b""
        output.seek(0)
        return output.read()
