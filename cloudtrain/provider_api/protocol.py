"""The border between cloudtrain and a platform: the Provider protocol and the values that cross it.

A provider is one module (or folder) of `cloudtrain.providers` whose name is the provider's, holding a class
``Provider``; third parties register theirs under the entry-point group ``cloudtrain.providers``. Nothing else names it.

`plan`, `nodes` and `site` are pure: no network, no credentials, no SDK. Everything here is the standard library alone,
because the node side runs from the same files inside images that have nothing else.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import pkgutil
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

from ..errors import NotFoundError, SpecError, UnsupportedError
from ..validate import did_you_mean, url_scheme

if TYPE_CHECKING:  # a node compiles all that it imports at each start, and has no use for it
    from pathlib import Path

    from ..job.job import Input, Job

__all__ = [
    "FINAL",
    "PROTOCOL",
    "STATES",
    "AttemptInfo",
    "Layout",
    "LayoutInput",
    "LogLine",
    "LogPage",
    "Mount",
    "Need",
    "NodeSpec",
    "Provider",
    "Request",
    "Rules",
    "Simulation",
    "Site",
    "Status",
    "Topology",
    "check_inputs",
    "check_needs",
    "context_of",
    "find_provider",
    "lacking",
    "needs_of",
    "provider_names",
    "python_command",
    "recorded_settings",
    "suggested_provider",
]

PROTOCOL = 1
"""Version of context.json; the node refuses one it does not know."""
JOIN_TIMEOUT = 1800.0
"""Seconds that nodes wait for each other: clouds start the nodes of one job many minutes apart."""

STATES = ("pending", "running", "succeeded", "failed", "cancelled")
FINAL = ("succeeded", "failed", "cancelled")
ENTRY_POINTS = "cloudtrain.providers"


# --------------------------------------------------------------------------------------------- what a plan is made of


@dataclass(frozen=True, kw_only=True)
class LayoutInput:
    """Where a channel's data is for the nodes. ``file`` is the file's name when the channel is one file, else None.

    ``source`` is the URL that the data is copied from at submission, where nodes cannot read that by themselves.
    """

    url: str
    file: str | None = None
    mode: str = "auto"
    shard: bool = False
    source: str | None = None


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Every URL of one run, computed from hashes and the run id alone. Folders end without a slash. ``origin``
    (`provenance`) is for native tags: who sends the same run from elsewhere sends the same run.

    ``resume_source`` is the URL of the run whose newest checkpoint is copied to ``resume`` at submission, where nodes
    cannot read that by themselves.
    """

    store: str
    run_id: str
    code_digest: str
    runtime_digest: str
    inputs: Mapping[str, LayoutInput] = field(default_factory=dict)
    resume: str | None = None
    resume_source: str | None = None
    origin: Mapping[str, str] = field(default_factory=dict, compare=False)

    @property
    def run(self) -> str:
        return f"{self.store}/runs/{self.run_id}"

    @property
    def live(self) -> str:
        return f"{self.run}/live"

    @property
    def native(self) -> str:
        return f"{self.run}/native"

    @property
    def context(self) -> str:
        return f"{self.run}/container/context.json"

    @property
    def key(self) -> str:
        return f"{self.run}/container/key"

    @property
    def direct(self) -> str:
        """Checkpoints that a script writes to the store by itself."""
        return f"{self.run}/checkpoints"

    @property
    def code(self) -> str:
        return f"{self.store}/code/{self.code_digest}/code.tar.gz"

    @property
    def runtime(self) -> str:
        return f"{self.store}/runtime/{self.runtime_digest}/cloudtrain.pyz"

    def attempt(self, number: int) -> str:
        return f"{self.run}/attempts/{number}"

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Layout:
        """A Layout from its plain form (`dataclasses.asdict`), as plans and run.json hold it."""
        try:
            return cls(**{**data, "inputs": {name: LayoutInput(**item) for name, item in data["inputs"].items()}})
        except (KeyError, TypeError, AttributeError) as exc:
            raise SpecError(f"not a layout: {exc}", field="layout") from None


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a provider is sent. ``body`` is JSON in the vendor CLI's own form, ``context`` is context.json.

    ``instance_types`` are the machines that the platform may choose, best first, in its own names; none where this
    machine starts the nodes. ``notes`` are what the user should know of it before it is sent.
    """

    provider: str
    operation: str
    body: Mapping[str, Any]
    context: Mapping[str, Any]
    run: str
    attempt: int = 0
    choice: int = 0
    instance_types: Sequence[str] = ()
    notes: Sequence[str] = ()

    def to_dict(self) -> dict[str, Any]:
        return json.loads(json.dumps(dataclasses.asdict(self)))  # type: ignore[no-any-return]

    def next_choice(self, category: str) -> int:
        """Index of the GPU to ask for after ``category``: of those the platform could choose from none had capacity."""
        return self.choice + (max(1, len(self.instance_types)) if category == "capacity" else 1)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Request:
        try:
            return cls(**{**data, **{name: tuple(data.get(name, ())) for name in ("instance_types", "notes")}})
        except TypeError as exc:
            raise SpecError(f"not a request: {exc}", field="request") from None


# -------------------------------------------------------------------------------------------- what a platform answers


@dataclass(frozen=True, kw_only=True)
class AttemptInfo:
    """One start of all nodes. ``number`` is ``k.r``; times are Unix seconds.

    ``reason`` and ``category`` say why it ended, ``node`` and ``rank`` where that began, ``resumed_from`` which
    checkpoint it started from; ``lost`` is what the next one had to do again: ``{"seconds": s, "steps": n}``, each None
    when nobody can tell. The last attempt has lost nothing yet: None.
    """

    number: str
    native_id: str = ""
    started: float | None = None
    ended: float | None = None
    reason: str = ""
    resumed_from: str = ""
    category: str = ""
    node: int | None = None
    rank: int | None = None
    lost: Mapping[str, float | None] | None = None


@dataclass(frozen=True, kw_only=True)
class Status:
    """What the platform says of a run. ``native`` is its own word; times are Unix seconds.

    ``billed_s`` is machine time that the platform bills, summed over nodes, ``saved`` the part of the running time (0
    to 1) that preemptible machines did not cost, ``cost_usd`` an estimate; None is what the platform does not tell.
    ``limit_s`` is the job's time limit in seconds. Only a platform sets it that tells neither when a job began to run
    nor whether that limit ended it. `cloudtrain.runs.outcome.with_start` then completes the status by the nodes' records;
    ``started`` of a running job is the time since which it has run at the latest.
    """

    state: str
    native: str = ""
    reason: str = ""
    category: str = ""
    attempts: tuple[AttemptInfo, ...] = ()
    started: float | None = None
    finished: float | None = None
    url: str = ""
    instance_type: str = ""
    billed_s: float | None = None
    saved: float | None = None
    cost_usd: float | None = None
    limit_s: float | None = None

    @property
    def final(self) -> bool:
        return self.state in FINAL


@dataclass(frozen=True, kw_only=True)
class LogLine:
    """One line as the platform keeps it. ``id`` is the platform's own key of it, for text without a number of ours."""

    node: str
    text: str
    time: float | None = None
    id: str = ""


@dataclass(frozen=True, kw_only=True)
class LogPage:
    """Some lines, and the cursor (JSON) that continues after them. ``more``: the next page can be asked for at once."""

    lines: tuple[LogLine, ...]
    cursor: Any
    more: bool = False


# --------------------------------------------------------------------------------------- what a platform gives a node


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


# ------------------------------------------------------------------------------------------ what an engine starts: data


@dataclass(frozen=True, kw_only=True)
class Mount:
    """``url`` appears at ``path`` on the node: ``copy`` once, ``sync`` two-way while it runs, ``mount`` read-only."""

    url: str
    path: str
    kind: str


@dataclass(frozen=True, kw_only=True)
class NodeSpec:
    """One node as the platform would start it. Paths are the node's; relative ones are below its own root folder.

    ``entrypoint`` None is the image's own, ``user`` None too, else ``uid[:gid]``. ``platform`` is like ``linux/amd64``,
    ``hostname`` is how its peers find it, at the ``ports`` that the name forwards (empty: at every port), ``memory``
    and ``shm`` are bytes. ``container`` holds fields of the Docker Engine API's ``ContainerCreate`` that an engine of
    containers merges into what it sends.
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
class Rules:
    """What the platform does with its nodes. Times are seconds.

    ``restart_on``: exit codes after which the platform starts all nodes again by itself, at most ``max_restarts`` times
    an attempt; ``preemptions`` and ``losses`` times after it took machines back, or one was lost. ``retries``: further
    attempts that whoever runs the engine starts. ``time_limit`` is running time, summed over attempts; ``stop_signal``
    then ``stop_grace`` seconds come before a kill. The success of node ``primary`` is the job's. ``sync_lag``: nodes
    have folders of their own, whose changes go up so late; None: what is synced is one folder, mounted on all.
    ``sync_marks`` begins the words that the platform's agent adds to names there: ``.x`` of ``file.x-uploaded``.
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
class Simulation:
    """What a platform starts for one request, and its rules."""

    nodes: Sequence[NodeSpec]
    rules: Rules

    def to_dict(self) -> dict[str, Any]:
        return json.loads(json.dumps(dataclasses.asdict(self)))  # type: ignore[no-any-return]

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Simulation:
        """Inverse of `to_dict`; raises `SpecError` for anything that is not one."""
        try:
            for node in data["nodes"]:
                _check_values(node, NodeSpec, _NODE_VALUES, "nodes.*")
            _check_values(data["rules"], Rules, _RULE_VALUES, "rules")
            nodes = [
                NodeSpec(
                    **{
                        **node,
                        "mounts": tuple(Mount(**mount) for mount in node.get("mounts", ())),
                        "ports": tuple(node.get("ports", ())),
                    }
                )
                for node in data["nodes"]
            ]
            return cls(nodes=tuple(nodes), rules=Rules(**data["rules"]))
        except (KeyError, TypeError, AttributeError) as exc:
            raise SpecError(f"not a simulation: {exc}", field="nodes") from None


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0


def _is_whole(value: Any) -> bool:
    return _is_number(value) and isinstance(value, int)


def _all(test: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, (list, tuple)) and all(map(test, value))


def _is_table_of_texts(value: Any) -> bool:
    return isinstance(value, Mapping) and all(_is_text(item) for pair in value.items() for item in pair)


_Values = Mapping[str, tuple[Callable[[Any], bool], str]]
_TEXT: tuple[Callable[[Any], bool], str] = (_is_text, "text")
_TEXTS: tuple[Callable[[Any], bool], str] = (_all(_is_text), "a list of texts")
_TABLE: tuple[Callable[[Any], bool], str] = (_is_table_of_texts, "a table of texts")
_NUMBER: tuple[Callable[[Any], bool], str] = (_is_number, "a number that is not negative")
_WHOLE: tuple[Callable[[Any], bool], str] = (_is_whole, "a whole number that is not negative")
_NODE_VALUES: _Values = {
    **dict.fromkeys(("workdir", "image", "platform", "user", "hostname"), _TEXT),
    **dict.fromkeys(("command", "entrypoint"), _TEXTS),
    **dict.fromkeys(("env", "files"), _TABLE),
    **dict.fromkeys(("gpus", "cpus", "memory", "shm"), _WHOLE),
    "read_only": (lambda value: isinstance(value, bool), "true or false"),
    "container": (lambda value: isinstance(value, Mapping), "a table"),
    "ports": (_all(_is_whole), "a list of port numbers"),
}
_RULE_VALUES: _Values = {
    **dict.fromkeys(("time_limit", "stop_grace", "sync_lag"), _NUMBER),
    **dict.fromkeys(("retries", "max_restarts", "preemptions", "losses", "primary"), _WHOLE),
    "restart_on": (_all(lambda value: isinstance(value, int) and not isinstance(value, bool)), "a list of exit codes"),
    "sync_marks": _TEXT,
    "stop_signal": (lambda value: _is_text(value) and value in signal.Signals.__members__, "a signal's name (SIGTERM)"),
}


def _check_values(data: Mapping[str, Any], kind: type[Any], values: _Values, where: str) -> None:
    """Raise `SpecError` for a name that ``kind`` has not, or a value that is not of its sort (None: its default)."""
    known = {item.name: item.default for item in dataclasses.fields(kind)}
    for name, value in dict(data).items():
        if name not in known:
            raise SpecError("no such field", field=f"{where}.{name}", hint=did_you_mean(name, known))
        test, what = values.get(name, (lambda value: True, ""))
        if not test(value) and not (value is None and known[name] is None):
            raise SpecError(f"must be {what}, not {value!r}", field=f"{where}.{name}")


# ------------------------------------------------------------------------------------------------------- the protocol


@dataclass(frozen=True, kw_only=True)
class Need:
    """A value without which no job of a provider can be sent: the metadata ``need`` of a field of its ``Settings``.

    ``example`` is a value in the right form. ``find`` is a command that prints the right one, or names a page.
    ``stand_in`` is a valid value with which ``plan`` goes on where there is none; default: ``missing-NAME``. The plan
    shows it as ``shown``; default: ``<NAME>``. A job that has the field ``instead`` does without the value.
    """

    example: str
    find: str
    stand_in: str = ""
    shown: str = ""
    instead: str = ""


@runtime_checkable
class Provider(Protocol):
    """Where to run. Made of its settings; every method is required.

    A provider may have a method ``check(request)``. `cloudtrain.runs.submit` calls it before it records a new run. It raises
    what keeps the request from being sent, as far as this machine can tell, and nothing is recorded then. A method
    ``stuck(native_id)`` gives the checkpoints that nodes cannot copy to the store now, by name, each with the reason.

    A provider may state ``sync_marks``, a tuple of texts: the ends of the names that its platform's agent puts into a
    run's folder (`SyncAgent.marks`). `pull` leaves such files there. It may state ``needs``, a `Need` by ``store`` or
    ``image``: what a job needs that is no setting of its own. It may state ``probe_ports``, a tuple of port numbers of
    node 0: `doctor --job` tries them from the other nodes. It may state ``object_mounts``: the folder below which its
    nodes see an object store as files, and variables that name places in it. A plan warns of appends there.
    """

    name: ClassVar[str]
    Settings: ClassVar[type[Any]]
    #: URL schemes of inputs that its nodes read by themselves; ``file`` means this machine's own files.
    schemes: ClassVar[frozenset[str]]
    #: Who starts attempt 1, 2, …: ``platform``, ``supervisor`` (on this host) or ``client`` (only while one waits).
    retried_by: ClassVar[str]
    #: Who ends a wait for machines that takes longer than ``max_wait``: ``platform``, or ``client`` (as above).
    max_wait_by: ClassVar[str]
    #: Shortest and longest seconds between two looks at a run that is waited for.
    pace: ClassVar[float]
    poll: ClassVar[float]
    #: An instance of ``Settings``, made of the constructor's keywords. A field whose metadata have ``caller`` says who
    #: this machine calls as; it is not recorded: whoever comes back to a run calls as themselves. One with ``place``
    #: says where jobs run, and nothing in it has a comma: so a text of several, with commas between, is a list of them.
    settings: Any

    def plan(self, job: Job, layout: Layout, attempt: int = 0, choice: int = 0) -> Request:
        """The exact request. Pure: equal arguments give equal requests, with no network, credentials or SDK."""

    def submit(self, request: Request, secrets: Mapping[str, str] | None = None) -> str:
        """Send that very request and return the native id; idempotent on (run, attempt, choice).

        ``secrets`` are the values of ``env:`` references, for providers whose nodes this machine starts.
        """

    def find(self, request: Request) -> str | None:
        """The native id if the request was ever accepted. Never creates anything."""

    def status(self, native_id: str) -> Status:
        """What the platform says now. `NotFoundError` for an id it does not know."""

    def logs(self, native_id: str, cursor: Any = None) -> LogPage:
        """One page from ``cursor`` (None: the beginning)."""

    def cancel(self, native_id: str) -> None:
        """Ask the platform to stop it; idempotent, also after the end."""

    def storage(self, url: str) -> Mapping[str, Any]:
        """fsspec's options for a store at ``url``, so that this machine reaches it as the account that it calls as.

        Empty where fsspec's own way to credentials is right. Asked once more when those it led to have expired.
        """

    @staticmethod
    def site(environ: Mapping[str, str], argv: Mapping[str, str]) -> Site:
        """On the node: what the platform gave it. ``argv`` holds the ``--path`` pairs of the command line."""

    def nodes(self, request: Request) -> Simulation:
        """What the platform starts for the request. Pure."""


def recorded_settings(kind: type[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """``values`` of the settings ``kind`` less those that say who calls."""
    callers = {item.name for item in dataclasses.fields(kind) if item.metadata.get("caller")}
    return {name: value for name, value in values.items() if name not in callers}


def provider_names() -> tuple[str, ...]:
    """Names of every provider that can be chosen, the package's own and third parties'."""
    from importlib.metadata import entry_points

    from .. import providers

    own = {module.name for module in pkgutil.iter_modules(providers.__path__) if not module.name.startswith("_")}
    return tuple(sorted(own | {ep.name for ep in entry_points(group=ENTRY_POINTS)}))


def find_provider(name: str) -> type[Provider]:
    """The provider class called ``name``; raises `NotFoundError` naming the nearest one."""
    known = provider_names() if not name.replace("-", "_").isidentifier() else ()
    if known:
        why = f"{name!r} is not the name of a provider; there are {', '.join(known)}"
        raise NotFoundError(why, field="provider", hint=suggested_provider(name))
    for module in (f"{ENTRY_POINTS}.{name}", f"{ENTRY_POINTS}._{name}"):  # _: that nobody chooses
        try:
            return importlib.import_module(module).Provider  # type: ignore[no-any-return]
        except ModuleNotFoundError as exc:
            if exc.name != module:
                raise
    from importlib.metadata import entry_points  # costs more than everything else here, and is rarely needed

    for entry in entry_points(group=ENTRY_POINTS):
        if entry.name == name:
            return entry.load()  # type: ignore[no-any-return]
    known, hint = provider_names(), suggested_provider(name)
    raise NotFoundError(f"no provider {name!r}; there are {', '.join(known)}", field="provider", hint=hint)


def suggested_provider(name: str) -> str:
    """Return a hint for a name that no provider has: the one that it may mean, by its ``ALIASES`` or by a slip.

    ``ALIASES`` of a provider's module are other words for its platform, in lower case.
    """
    known = provider_names()
    for other in known:
        with contextlib.suppress(ImportError, AttributeError):  # a third party's that cannot be loaded has none
            if name.lower() in getattr(sys.modules[find_provider(other).__module__], "ALIASES", ()):
                return f"the provider is called {other!r}"
    return did_you_mean(name, known)


# ----------------------------------------------------------------------------- pure pieces every provider's plan uses


def context_of(provider: str, job: Job, layout: Layout, *, processes: int) -> dict[str, Any]:
    """context.json: all that the script side of a job says, the same for every provider and attempt."""
    return {
        "protocol": PROTOCOL,
        "provider": provider,
        "run_id": layout.run_id,
        "run": layout.run,
        "name": job.name,
        "code_digest": layout.code_digest,
        "nodes": job.resources.instance_count,
        "processes": processes,
        "launcher": job.launcher,
        "entry_point": job.source.entry_point,
        "requirements": job.source.requirements,
        "args": list(job.args),
        # Sorted, as in the recorded job: every attempt gets its flags in one order.
        "hyperparameters": dict(sorted(job.hyperparameters.items())),
        "hyperparameter_style": job.hyperparameter_style,
        "env": dict(job.env),
        "secrets": dict(job.secrets),
        "inputs": {name: {"file": item.file} for name, item in layout.inputs.items()},
        "stall_timeout": job.stall_timeout,
        "debug_nccl": job.debug_nccl,
        "checkpoint_paths": list(job.checkpoint_paths),
        "keep_checkpoints": job.keep_checkpoints or 0,
        "metrics": dict(job.metrics),
        "max_outputs": job.max_outputs if job.outputs else 0,
        "checkpoint_url": layout.direct,
        "resume": layout.resume,
        **({"resume_source": layout.resume_source} if layout.resume_source else {}),
    }


def python_command(arguments: Sequence[str]) -> list[str]:
    """``arguments`` for the Python of an image of which nothing is known but that it has a shell and some Python.

    ``exec``: the node's first process is Python itself, which gets the platform's stop signal. Exit code 127 says that
    there is none.
    """
    find = "python=$(command -v python3 || command -v python)"
    none = "{ echo 'cloudtrain: this image has no python3 and no python' >&2; exit 127; }"
    return ["/bin/sh", "-c", f'{find} || {none}; exec "$python" "$@"', "cloudtrain", *arguments]


def check_inputs(provider: type[Provider], inputs: Mapping[str, Input | LayoutInput]) -> None:
    """Raise `UnsupportedError` for the first input whose URL scheme the provider's nodes cannot read."""
    for name, item in inputs.items():
        scheme = url_scheme(item.url) or "file"
        if scheme not in provider.schemes:
            known = ", ".join(f"{s}:" for s in sorted(provider.schemes))
            raise UnsupportedError(provider.name, f"inputs.{name}", f"it cannot read {scheme}: URLs, only {known}")


def needs_of(kind: type[Provider]) -> dict[str, Need]:
    """Return what the provider ``kind`` needs, by name: ``store``, ``NAME.region`` of its settings, ``image``."""
    stated: Mapping[str, Need] = getattr(kind, "needs", {})
    own = {f"{kind.name}.{spec.name}": spec.metadata.get("need") for spec in dataclasses.fields(kind.Settings)}
    found = {"store": stated.get("store"), **own, "image": stated.get("image")}
    return {name: need for name, need in found.items() if need is not None}


def lacking(kind: type[Provider], settings: Any, job: Job) -> tuple[str, ...]:
    """Return the names of what ``settings`` of the provider ``kind`` and ``job`` lack; the store is not looked at."""

    def has(name: str, need: Need) -> bool:
        own = job if name == "image" else settings
        return bool(getattr(own, name.rpartition(".")[2]) or (need.instead and getattr(job, need.instead)))

    return tuple(name for name, need in needs_of(kind).items() if name != "store" and not has(name, need))


def check_needs(kind: type[Provider], settings: Any, job: Job) -> None:
    """Raise `SpecError` for the first thing that is `lacking`."""
    for name in lacking(kind, settings, job):
        need = needs_of(kind)[name]
        raise SpecError("is not set", field=name, hint=f"for example {json.dumps(need.example)}: {need.find}")
