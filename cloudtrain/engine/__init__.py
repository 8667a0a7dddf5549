"""Engines start a Simulation's nodes on this machine, as process groups or as containers.

An engine makes each mount appear on its node, tells the node what a platform would tell it about its peers (the
``CLOUDTRAIN_ENGINE_*`` variables), hands over secrets by a pipe, and leaves nothing behind. What becomes of the nodes
is for `cloudtrain.engine.supervisor` to decide, by the Simulation's rules. `supervised` is what
providers share whose nodes this machine starts.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from ..errors import PlatformError
from ..provider_api.launch_spec import NodeSpec, Simulation

__all__ = ["ENGINE_PREFIX", "Engine", "NodeError", "NodeHandle", "boot_id", "last_line", "make_engine", "staged"]

ENGINE_PREFIX = "CLOUDTRAIN_ENGINE_"
LINE_BYTES = 65536


class NodeHandle(Protocol):
    """A started node."""

    #: (category, reason) where the engine knows more than an exit code tells; None before the end too.
    trouble: tuple[str, str] | None

    def poll(self) -> int | None:
        """The exit code, minus the signal's number for a node that one killed; None while it runs."""

    def signal(self, name: str) -> None:
        """The platform's stop signal, to the node's first process alone, as a container runtime would."""

    def kill(self) -> None:
        """The whole node, now; of one that has ended, what is left of it."""


class Engine(Protocol):
    """Starts nodes. One engine serves every attempt of one run."""

    def prepare(self, simulation: Simulation, tell: Callable[[str], None], given_up: Callable[[], bool]) -> None:
        """Bring here what the nodes need and may be slow to come; ``tell`` says what is being waited for.

        ``given_up`` says that nobody wants it any more. Raises `NodeError`.
        """

    def start(
        self, simulation: Simulation, *, attempt: str, local: Mapping[str, Path], secrets: Mapping[str, str]
    ) -> Sequence[NodeHandle]:
        """Start every node. ``local`` maps each mount's URL to its path on this machine.

        Raises `NodeError`, or `StorageError` for this machine's disk; nothing is left running then.
        """

    def remarks(self) -> str:
        """What befell the engine itself since it was last asked, for the reason of an attempt that failed."""

    def clean(self) -> None:
        """Remove all that it made but what the nodes printed (``out/<attempt>/node-<n>.log``)."""


class NodeError(PlatformError):
    """A node cannot be started; ``category`` says whose fault that is."""

    def __init__(self, message: str, *, category: str = "infra") -> None:
        self.category = category
        super().__init__(message)


def make_engine(name: str, *, folder: Path, run: str, environ: Mapping[str, str]) -> Engine:
    """The engine called ``name``, for the run with the URL ``run``; ``folder`` is its.

    ``processes``, ``containers``, or ``bare-containers``, which learn nothing of each other that no platform tells.
    Raises `ValueError` for any other name.
    """
    if name in ("containers", "bare-containers"):
        from .containers import ContainerEngine

        return ContainerEngine(folder=folder, run=run, environ=environ, bare=name == "bare-containers")
    if name == "processes":
        from .processes import ProcessEngine

        return ProcessEngine(folder=folder, environ=environ)
    raise ValueError(f"no engine {name!r}")


def staged(spec: NodeSpec, root: Path, local: Mapping[str, Path]) -> None:
    """Make ``root`` anew and put in it the node's files and every mount of kind ``copy``."""
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    for mount in spec.mounts:
        if mount.kind == "copy":
            path, source = root / mount.path.lstrip("/"), local[mount.url]
            path.parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir():
                shutil.copytree(source, path, symlinks=True)
            else:
                shutil.copyfile(source, path)
    for relative, text in spec.files.items():
        path = root / relative.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def last_line(path: Path) -> str:
    """The last line of a log that has anything on it, of its last `LINE_BYTES`; empty when there is none."""
    with contextlib.suppress(OSError), open(path, "rb") as stream:
        stream.seek(max(0, os.fstat(stream.fileno()).st_size - LINE_BYTES))
        lines = stream.read().decode("utf-8", "replace").strip().splitlines()
        return lines[-1] if lines else ""
    return ""


def boot_id() -> str:
    """Something that changes whenever this machine starts; empty where it cannot be told."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    with contextlib.suppress(OSError):
        done = subprocess.run(["sysctl", "-n", "kern.bootsessionuuid"], capture_output=True, text=True, check=False)
        return done.stdout.strip()
    return ""
