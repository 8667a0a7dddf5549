"""The values that a platform gives a node. Standard library alone: nodes import this file."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from pathlib import Path

PROTOCOL = 1
"""Version of context.json and of a store's records; both halves refuse unknown versions."""
JOIN_TIMEOUT = 1800.0
"""Seconds that nodes wait for each other: clouds start the nodes of one job many minutes apart."""


def attempt_key(name: str) -> tuple[int, ...]:
    """Return the sort key of an attempt's number ``k.r``, or of a name that contains it: ``1.10`` comes after ``1.9``.

    The names of nodes' files continue with the node's number. Text without a number comes first.
    """
    return tuple(int(number) for number in re.findall(r"\d+", name))


@dataclass(frozen=True, kw_only=True)
class Topology:
    """This node among the nodes. Node 0 serves torchrun's store at ``master_port`` and the node link at the port after
    it, unless `NodeEnvironment.link_port` names another."""

    nodes: int
    node_rank: int
    master_addr: str
    master_port: int


class RunObjects(Protocol):
    """A run's folder in the store, reached by a node without the platform's agent. Keys are below that folder.

    Each method raises `StorageError`. `read` raises `DigestError` for a missing object.
    """

    def copy(self, key: str, target: str, size: int) -> None:
        """Copy an object of ``size`` bytes within the store."""

    def read(self, key: str, path: Path) -> None:
        """Download an object to a file in an existing folder."""

    def write(self, key: str, data: bytes) -> None:
        """Write an object."""

    def remove(self, key: str) -> None:
        """Remove an object, if it is there."""


@dataclass(frozen=True, kw_only=True)
class SyncAgent:
    """A platform's own program that copies a node's ``live`` folder to the store, and all of it back at a start.

    For each file it adds an empty one whose name ends in ``uploading``, then one that ends in ``uploaded``. It skips
    files whose names end in ``ignored``. ``put`` uploads one file without the agent, given its path below ``live``, the
    file, and a function to call after each part; it raises `StorageError`. Without ``put`` the node cannot upload.
    With ``objects`` node 0 moves checkpoints that a restart does not need out of ``live``, to ``archive`` of the run's
    folder.
    """

    uploading: str
    uploaded: str
    ignored: str
    put: Callable[[str, Path, Callable[[], None]], None] | None = None
    objects: RunObjects | None = None

    @property
    def marks(self) -> tuple[str, str, str]:
        """The name endings of the agent's files."""
        return self.uploading, self.uploaded, self.ignored

    @property
    def temporary(self) -> str:
        """The name ending of unfinished files: the agent leaves them alone."""
        return f".part{self.ignored}"


@dataclass(frozen=True, kw_only=True)
class NodeEnvironment:
    """A node's environment on its platform. ``paths`` maps ``live`` and ``input.<channel>`` to folders. ``direct`` is
    the folder of checkpoints that a script writes to the store itself, or ``mounted``, if it writes them by a URL.

    ``scratch`` lists folders to try, best first. ``stop_grace`` is seconds between the platform's stop signal and its
    kill. ``exit_code`` maps an outcome (succeeded, failed, preempted, lost) to the process exit code that makes the
    platform act rightly; lost is optional and means that the only failure is a lost node. ``secrets`` fetches the value
    of one reference. ``supervisor`` is the pid of a parent without which this node must stop. ``groups_file`` is where
    the node notes the process groups it starts, which must not outlive a killed node outside a container. ``cpus`` are
    this node's cores, if several nodes share a machine. ``attempt`` is ``k.r``, if the platform itself counts its
    starts; ``restart`` is the least r, if it only counts those that it knows. ``folders`` are those that scripts for
    this platform expect, absolute or below the script's, each a link to ours: ``checkpoints`` or ``artifacts``. Texts
    of ``export_env`` may hold placeholders. ``agent`` copies ``live`` to the store; None: ``live`` is the store's own,
    or the engine copies it.

    ``hidden_env`` lists prefixes of the node's variables that ranks do not get. ``notes`` are lines for the node's log.

    ``flush_seconds`` is the time between two writes of metrics, and of log lines, into ``live``. An object store makes
    a whole new object of each, which costs money.

    ``notices`` report the end of this node on platforms without a signal. Each is called every second in a thread of
    its own. It returns the reason for the node's end, an empty text if it stays, and None if unknown. A node that has
    saved then stays alive for at most ``hold`` seconds from the notice. A platform that takes a node starts the job
    again, but not a job that has ended.

    ``link_port`` is the port of the node link; None is ``master_port + 1``. ``join_timeout`` is the seconds that nodes
    wait for each other before the first rank starts. ``restarts_in_place``: the platform restarts a failed container
    itself before it ends the job. Such a start must not run the script a second time. ``cuda_compat`` is the folder of
    CUDA's forward compatibility libraries, which ranks use if the node's driver is older than the image's CUDA.
    ``machine`` names the machine below the node, as the platform calls it; empty: `host_facts.machine_name` does.
    ``signals_ranks``: the stop signal reaches every process of the node, ranks and their children too.
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
    restart: int = 0
    folders: Mapping[str, str] = field(default_factory=dict)
    notices: Sequence[Callable[[], str | None]] = ()
    hold: float = 0.0
    link_port: int | None = None
    join_timeout: float = JOIN_TIMEOUT
    restarts_in_place: bool = False
    cuda_compat: str = ""
    signals_ranks: bool = False
    agent: SyncAgent | None = None
    machine: str = ""

    @property
    def marks(self) -> tuple[str, ...]:
        """The name endings of the agent's files; none without an agent."""
        return self.agent.marks if self.agent is not None else ()

    @property
    def temporary(self) -> str:
        """The name ending of unfinished files; empty if no agent uploads them."""
        return self.agent.temporary if self.agent is not None else ""
