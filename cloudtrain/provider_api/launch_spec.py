"""The nodes that a platform starts for one request, and its rules, as data that an engine on this machine can start."""

from __future__ import annotations

import dataclasses
import json
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import SpecError
from ..validate import did_you_mean


@dataclass(frozen=True, kw_only=True)
class Mount:
    """``url`` at ``path`` on the node: copied once (``copy``), synced both ways (``sync``) or read-only (``mount``)."""

    url: str
    path: str
    kind: str


@dataclass(frozen=True, kw_only=True)
class NodeSpec:
    """One node as the platform would start it. Paths are the node's; relative ones are below its own root folder.

    ``entrypoint`` None and ``user`` None are the image's own; else ``user`` is ``uid[:gid]``. ``platform`` is like
    ``linux/amd64``. Peers find the node by ``hostname``, at the ``ports`` that the name forwards (empty: every port).
    ``memory`` and ``shm`` are bytes. ``container`` holds fields of the Docker Engine API's ``ContainerCreate``, which
    an engine of containers merges into its request.
    """

    command: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    mounts: Sequence[Mount] = ()
    workdir: str = "."
    image: str | None = None
    platform: str | None = None
    entrypoint: Sequence[str] | None = None
    user: str | None = None
    read_only: bool = False
    files: Mapping[str, str] = field(default_factory=dict)
    hostname: str | None = None
    ports: Sequence[int] = ()
    gpus: int = 0
    cpus: int | None = None
    memory: int | None = None
    shm: int | None = None
    container: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class LaunchRules:
    """The platform's rules for its nodes. Times are seconds.

    ``restart_on``: exit codes after which the platform restarts all nodes itself, at most ``max_restarts`` times an
    attempt; ``preemptions`` and ``losses`` times after it took machines back, or lost one. ``retries``: further
    attempts started by the engine's caller. ``time_limit`` is running time, summed over attempts; ``stop_signal`` then
    ``stop_grace`` seconds come before a kill. The success of node ``primary`` is the job's. ``sync_lag``: nodes have
    folders of their own, whose changes go up after this time; None: one folder is mounted on all. ``sync_marks`` begins
    the suffixes of the platform's agent there: ``.x`` of ``file.x-uploaded``.
    """

    time_limit: float
    retries: int = 0
    restart_on: Sequence[int] = ()
    max_restarts: int = 0
    preemptions: int = 0
    losses: int = 0
    primary: int | None = None
    sync_lag: float | None = None
    sync_marks: str = ""
    stop_signal: str = "SIGTERM"
    stop_grace: float = 30.0


@dataclass(frozen=True, kw_only=True)
class LaunchSpec:
    """The nodes that a platform starts for one request, and its rules."""

    nodes: Sequence[NodeSpec]
    rules: LaunchRules

    def to_dict(self) -> dict[str, Any]:
        return json.loads(json.dumps(dataclasses.asdict(self)))  # type: ignore[no-any-return]

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> LaunchSpec:
        """Return the LaunchSpec of `to_dict`'s data. Raises `SpecError` for other data."""
        try:
            for node in data["nodes"]:
                _check_values(node, NodeSpec, _NODE_VALUES, "nodes.*")
            _check_values(data["rules"], LaunchRules, _RULE_VALUES, "rules")
            nodes = []
            for node in data["nodes"]:
                mounts = tuple(Mount(**mount) for mount in node.get("mounts", ()))
                nodes.append(NodeSpec(**{**node, "mounts": mounts, "ports": tuple(node.get("ports", ()))}))
            return cls(nodes=tuple(nodes), rules=LaunchRules(**data["rules"]))
        except (KeyError, TypeError, AttributeError) as exc:
            raise SpecError(f"not a launch spec: {exc}", field="nodes") from None


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_whole(value: Any) -> bool:
    return _is_integer(value) and value >= 0


def _all(test: _Test) -> _Test:
    return lambda value: isinstance(value, (list, tuple)) and all(map(test, value))


def _is_table_of_texts(value: Any) -> bool:
    return isinstance(value, Mapping) and all(_is_text(item) for pair in value.items() for item in pair)


_Test = Callable[[Any], bool]
_Values = Mapping[str, tuple[_Test, str]]
_TEXT = (_is_text, "text")
_WHOLE = (_is_whole, "a whole number that is not negative")
_NUMBER = (
    lambda value: _is_whole(value) or (isinstance(value, float) and value >= 0),
    "a number that is not negative",
)
_NODE_VALUES: _Values = {
    **dict.fromkeys(("workdir", "image", "platform", "user", "hostname"), _TEXT),
    **dict.fromkeys(("command", "entrypoint"), (_all(_is_text), "a list of texts")),
    **dict.fromkeys(("env", "files"), (_is_table_of_texts, "a table of texts")),
    **dict.fromkeys(("gpus", "cpus", "memory", "shm"), _WHOLE),
    "read_only": (lambda value: isinstance(value, bool), "true or false"),
    "container": (lambda value: isinstance(value, Mapping), "a table"),
    "ports": (_all(_is_whole), "a list of port numbers"),
}
_RULE_VALUES: _Values = {
    **dict.fromkeys(("time_limit", "stop_grace", "sync_lag"), _NUMBER),
    **dict.fromkeys(("retries", "max_restarts", "preemptions", "losses", "primary"), _WHOLE),
    "restart_on": (_all(_is_integer), "a list of exit codes"),
    "sync_marks": _TEXT,
    "stop_signal": (lambda value: _is_text(value) and value in signal.Signals.__members__, "a signal's name (SIGTERM)"),
}


def _check_values(data: Mapping[str, Any], kind: type[Any], values: _Values, where: str) -> None:
    """Raise `SpecError` for a name that ``kind`` lacks, or a value of the wrong type (None: its default)."""
    known = {item.name: item.default for item in dataclasses.fields(kind)}
    for name, value in dict(data).items():
        if name not in known:
            raise SpecError("no such field", field=f"{where}.{name}", hint=did_you_mean(name, known))
        test, what = values.get(name, (lambda value: True, ""))
        if not test(value) and not (value is None and known[name] is None):
            raise SpecError(f"must be {what}, not {value!r}", field=f"{where}.{name}")
