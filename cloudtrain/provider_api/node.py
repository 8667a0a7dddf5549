"""The values that a platform gives a node. Standard library alone: nodes import this file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["JOIN_TIMEOUT", "PROTOCOL", "RunObjects", "Site", "SyncAgent", "Topology"]

PROTOCOL = 1
"""Version of context.json; the node refuses one it does not know."""
JOIN_TIMEOUT = 1800.0
"""Seconds that nodes wait for each other: clouds start the nodes of one job many minutes apart."""


@dataclass(frozen=True, kw_only=True)
class Topology:
    """This node among the nodes. Node 0 serves torchrun's store at ``master_port`` and the node link at the port after
    it, unless `Site.link_port` names another."""

    nodes: int
    node_rank: int
    master_addr: str
    master_port: int


class RunObjects(Protocol):
    """A run's folder in the store, as a node reaches it without the platform's agent. Keys are below that folder.

    Each method raises `StorageError`. `read` raises `DigestError` for an object that is not there.
    """

    def copy(self, key: str, target: str, size: int) -> None:
        """Copy an object of ``size`` bytes within the store."""

    def read(self, key: str, path: Path) -> None:
        """Download an object to a file, whose folder is there."""

    def write(self, key: str, data: bytes) -> None:
        """Write an object."""

    def remove(self, key: str) -> None:
        """Remove an object, if it is there."""


@dataclass(frozen=True, kw_only=True)
class SyncAgent:
    """A platform's own program that copies a node's ``live`` folder to the store, and back at the next start.

    Beside a file it puts an empty one whose name ends in ``uploading``, then one that ends in ``uploaded``. It leaves
    files alone whose names end in ``ignored``. ``put`` uploads one file without the agent, given its path below
    ``live``, the file, and what to call after each part; it raises `StorageError`. None: the node has no way there.

    The agent downloads all of ``live`` at a start. With ``objects`` node 0 moves checkpoints that a restart does not
    need out of ``live``, to ``archive`` of the run's folder.
    """

    uploading: str
    uploaded: str
    ignored: str
    put: Callable[[str, Path, Callable[[], None]], None] | None = None
    objects: RunObjects | None = None

    @property
    def marks(self) -> tuple[str, str, str]:
        """The ends of the names that are the agent's, not the user's."""
        return self.uploading, self.uploaded, self.ignored


@dataclass(frozen=True, kw_only=True)
class Site:
    """What the platform gives a node. ``paths`` maps ``live`` and ``input.<channel>`` to folders.

    ``scratch`` lists folders to try, best first. ``stop_grace`` is seconds between the platform's stop signal and its
    kill. ``exit_code`` maps an outcome (succeeded, failed, preempted; and lost, where it should be another one when the
    only failure is that of a node which is gone) to the process exit code that makes the platform do the right thing.
    ``secrets`` fetches the value of one reference. ``supervisor`` is the pid of a parent without which this node must
    not go on. ``groups_file`` is where the node notes the process groups it starts, which must not outlive a killed
    node that is no container. ``cpus`` are this node's cores, where several nodes share a machine. ``attempt`` is
    ``k.r``, where the platform itself counts its starts. ``folders`` are what scripts written for this platform know,
    absolute or below their own folder, each a link to one of ours: ``checkpoints`` or ``artifacts``. Texts of
    ``export_env`` may hold placeholders. ``agent`` copies ``live`` to the store; None: ``live`` is the store's own, or
    the engine's business.

    ``hidden_env`` lists prefixes of the node's variables that ranks do not get. ``notes`` are lines for the node's log.
    ``flush_seconds`` is the time between two writes of metrics, and of log lines, into ``live``. An object store makes
    a whole new object of each, which costs money.

    ``notices`` tell of the end of this node where no signal does. Each is called every second in a thread of its own.
    It returns why the node is about to be taken away, an empty text when the node is not, and None when it cannot say.
    After such a notice a node that has saved stays alive for at most ``hold`` seconds from the notice: a platform that
    takes the node starts the job again, but not a job that has ended.

    ``link_port`` is the port of the node link; None is ``master_port + 1``. ``join_timeout`` is the seconds that nodes
    wait for each other before the first rank starts. ``restarts_in_place`` says that the platform starts a failed
    container again by itself, before it ends the job: such a start must not run the script a second time.
    ``cuda_compat`` is the folder of CUDA's forward compatibility libraries, which the ranks use where the node's driver
    is older than the image's CUDA.
    """

    topology: Topology
    paths: Mapping[str, str]
    scratch: Sequence[str]
    export_env: Mapping[str, str] = field(default_factory=dict)
    hidden_env: Sequence[str] = ()
    notes: Sequence[str] = ()
    flush_seconds: float = 5.0
    stop_grace: float = 30.0
    failure_file: str | None = None
    exit_code: Mapping[str, int] = field(default_factory=lambda: {"succeeded": 0, "failed": 1, "preempted": 75})
    secrets: Callable[[str], str] | None = None
    supervisor: int | None = None
    groups_file: str | None = None
    cpus: int | None = None
    attempt: str = ""
    folders: Mapping[str, str] = field(default_factory=dict)
    notices: Sequence[Callable[[], str | None]] = ()
    hold: float = 0.0
    link_port: int | None = None
    join_timeout: float = JOIN_TIMEOUT
    restarts_in_place: bool = False
    cuda_compat: str = ""
    agent: SyncAgent | None = None
