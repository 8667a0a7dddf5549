"""Start the nodes of a LaunchSpec on this machine, as process groups or as containers.

An engine makes each mount appear on its node and hands over secrets by a pipe. It gives the node the facts about its
peers that a platform would give, in ``CLOUDTRAIN_ENGINE_*`` variables. It leaves nothing behind.
`supervisor` restarts and ends nodes by the rules. `supervised` is the base of the providers that use an engine.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from ..errors import PlatformError
from ..provider_api.launch_spec import LaunchSpec, NodeSpec

__all__ = ["ENGINE_PREFIX", "Engine", "NodeError", "NodeHandle", "boot_id", "last_line", "make_engine", "staged"]

ENGINE_PREFIX = "CLOUDTRAIN_ENGINE_"
LINE_BYTES = 65536


class NodeHandle(Protocol):
    """A started node."""

    #: (category, reason) if the engine knows more than an exit code says. None until the node ends.
    trouble: tuple[str, str] | None

    def poll(self) -> int | None:
        """Return the exit code, None while the node runs, or minus the number of the signal that killed it."""

    def signal(self, name: str) -> None:
        """Send the platform's stop signal to the node's first process alone, as a container runtime does."""

    def kill(self) -> None:
        """Kill the whole node now. If it has ended, remove its remains."""


class Engine(Protocol):
    """Starter of nodes. One engine serves every attempt of one run."""

    def prepare(self, launch: LaunchSpec, report: Callable[[str], None], given_up: Callable[[], bool]) -> None:
        """Fetch what the nodes need, until ``given_up()``; ``report`` gets each wait's text. Raises `NodeError`."""

    def start(
        self, launch: LaunchSpec, *, attempt: str, local: Mapping[str, Path], secrets: Mapping[str, str]
    ) -> Sequence[NodeHandle]:
        """Start every node. ``local`` maps each mount's URL to its path on this machine.

        Raises `NodeError`, or `StorageError` for this machine's disk; no node is left running then.
        """

    def take_over(self, folder: Path, given_up: Callable[[], bool]) -> None:
        """Wait, until ``given_up()``, for the nodes of a killed supervisor to end; kill those that stay. ``folder`` is
        that supervisor's."""

    def clean(self) -> None:
        """Remove everything the engine made except the nodes' logs (``out/<attempt>/node-<n>.log``)."""


class NodeError(PlatformError):
    """Error for a node that cannot be started. ``category`` names the cause."""

    def __init__(self, message: str, *, category: str = "infra") -> None:
        self.category = category
        super().__init__(message)


def make_engine(name: str, *, folder: Path, run: str, environ: Mapping[str, str]) -> Engine:
    """Return the engine called ``name`` for the run with the URL ``run``. The engine owns ``folder``.

    ``processes``, ``containers``, or ``bare-containers``, whose nodes learn of each other only what a platform gives
    them. Raises `ValueError` for any other name.
    """
    if name in ("containers", "bare-containers"):
        from .containers import ContainerEngine

        return ContainerEngine(folder=folder, run=run, environ=environ, bare=name == "bare-containers")
    if name == "processes":
        from .processes import ProcessEngine

        return ProcessEngine(folder=folder, environ=environ)
    raise ValueError(f"no engine {name!r}")


def staged(spec: NodeSpec, root: Path, local: Mapping[str, Path]) -> None:
    """Recreate ``root`` with the node's files and every mount of kind ``copy``."""
    import shutil  # a plan starts no node

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
    """Return the last nonempty line in a log's last `LINE_BYTES`, or an empty string."""
    with contextlib.suppress(OSError), open(path, "rb") as stream:
        stream.seek(max(0, os.fstat(stream.fileno()).st_size - LINE_BYTES))
        lines = stream.read().decode("utf-8", "replace").strip().splitlines()
        return lines[-1] if lines else ""
    return ""


def boot_id() -> str:
    """Return an id that changes at each start of this machine. Empty if the system gives none."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    with contextlib.suppress(OSError):
        done = subprocess.run(["sysctl", "-n", "kern.bootsessionuuid"], capture_output=True, text=True, check=False)
        return done.stdout.strip()
    return ""
