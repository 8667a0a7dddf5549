"""The border between cloudtrain and a platform: the Provider protocol and the values that cross it.

A provider is one module (or folder) of `cloudtrain.providers` with the provider's name and a class ``Provider``. Third
parties register theirs under the entry-point group ``cloudtrain.providers``. Everything here uses the standard library
alone, because nodes run it in images that have nothing else.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

from ..errors import SpecError, UnsupportedError
from ..validate import choice_of, url_scheme, whole_number
from .launch_spec import LaunchSpec
from .node import PROTOCOL, NodeEnvironment

if TYPE_CHECKING:  # a node compiles all imports at each start, and does not need these
    from ..job.job import Input, Job
    from .catalog import Machine
    from .checks import Check

STATES = ("pending", "running", "succeeded", "failed", "cancelled")
FINAL = ("succeeded", "failed", "cancelled")
ABANDONED = "abandoned"
"""`Status.native` of a run whose supervisor was killed. Its nodes then end, so a lost node is not the cause."""
NPU = "ASCEND"
"""The names of devices without CUDA and nvidia-smi begin so."""
NO_SMI = "nvidia-smi does not know Ascend"


# ---------------------------------------------------------------------------------------------------- parts of a plan


@dataclass(frozen=True, kw_only=True)
class LayoutInput:
    """A channel's data. ``file`` is the name of a channel that is one file. Nodes read ``url``.

    ``source`` is the URL from which submission copies the data to ``url``, if nodes cannot read that.
    """

    url: str
    file: str | None = None
    mode: str = "auto"
    shard: bool = False
    source: str | None = None


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Every URL of one run, computed from hashes and the run id alone. Folders end without a slash.

    ``origin`` (`provenance`) is for native tags and does not change the run. ``resume_source`` is the URL of the run
    whose newest checkpoint submission copies to ``resume``, if nodes cannot read that.
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
        """Checkpoints that a script writes to the store itself."""
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
        """Return a Layout from its plain form (`dataclasses.asdict`), as plans and run.json hold it."""
        try:
            return cls(**{**data, "inputs": {name: LayoutInput(**item) for name, item in data["inputs"].items()}})
        except (KeyError, TypeError, AttributeError) as exc:
            raise SpecError(f"not a layout: {exc}", field="layout") from None


@dataclass(frozen=True, kw_only=True)
class Request:
    """A request to a provider. ``body`` is JSON in the vendor CLI's own form, ``context`` is context.json.

    ``instance_types`` are the platform's names of the machines that it may choose, best first; none if this machine
    starts the nodes. ``notes`` are for the user, before it is sent.
    """

    provider: str
    operation: str
    body: Mapping[str, Any]
    context: Mapping[str, Any]
    run: str
    attempt: int = 0
    gpu_index: int = 0
    instance_types: Sequence[str] = ()
    notes: Sequence[str] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the request's plain form, as plans and records hold it. Its key of ``gpu_index`` is ``choice``."""
        plain = {"choice" if name == "gpu_index" else name: value for name, value in dataclasses.asdict(self).items()}
        return json.loads(json.dumps(plain))  # type: ignore[no-any-return]

    def next_gpu_index(self, category: str) -> int:
        """Return the index of the GPU to request next; lack of capacity rules out all machines of the request."""
        return self.gpu_index + (max(1, len(self.instance_types)) if category == "capacity" else 1)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Request:
        try:
            fields = {"gpu_index" if name == "choice" else name: value for name, value in data.items()}
            return cls(**{**fields, **{name: tuple(data.get(name, ())) for name in ("instance_types", "notes")}})
        except (TypeError, AttributeError) as exc:
            raise SpecError(f"not a request: {exc}", field="request") from None


# ---------------------------------------------------------------------------------------------- answers of a platform


@dataclass(frozen=True, kw_only=True)
class AttemptInfo:
    """One start of all nodes. ``number`` is ``k.r``; times are Unix seconds.

    ``reason`` and ``category`` say why it ended, ``node`` and ``rank`` where that began. ``machine`` is that node's, if
    the machine was at fault. A platform may name the only node's, which counts if the node left no record.
    ``resumed_from`` is its checkpoint. ``lost`` is the work that the next attempt repeated:
    ``{"seconds": s, "steps": n}``, each None if unknown. The last attempt has lost nothing yet: None. ``nodes`` is the
    number that its request asks for.
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
    machine: str = ""
    lost: Mapping[str, float | None] | None = None
    nodes: int | None = None


@dataclass(frozen=True, kw_only=True)
class Status:
    """The platform's status of a run. ``native`` is the platform's own word for it. Times are in Unix seconds.

    ``billed_s`` is the billed machine time, summed over nodes. ``saved`` is the part of the running time (0 to 1) that
    preemptible machines did not cost. ``cost_usd`` is an estimate. Each is None if the platform does not report it.

    ``limit_s`` is the job's time limit in seconds. Only a platform that reports no start of a job and no timeout sets
    it. ``started`` of a running job is then the latest possible start, and `cloudtrain.runs.outcome.with_start` takes
    the real one from the nodes' records.
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
    """One line of the platform's log. ``id`` is the platform's own key of it, for text without a number of ours."""

    node: str
    text: str
    time: float | None = None
    id: str = ""


@dataclass(frozen=True, kw_only=True)
class LogPage:
    """Some lines, and the cursor (JSON) to continue after them. ``more``: the next page is available now."""

    lines: tuple[LogLine, ...]
    cursor: Any
    more: bool = False


@dataclass(frozen=True, kw_only=True)
class Shell:
    """A way into a node: the command ``argv``, to run on this machine with ``env`` added, or the page ``url``.

    ``install`` is the hint if this machine lacks the command's program.
    """

    argv: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    url: str = ""
    install: str = ""


# ------------------------------------------------------------------------------------------------------- the protocol


@dataclass(frozen=True, kw_only=True)
class Need:
    """A value that a provider needs to send any job: ``need`` of a `setting`, or one of ``ProviderExtras.needs``.

    ``example`` is a value in the right form. ``find`` is a command that prints the right one, or names a page.
    ``stand_in`` is a valid value for ``plan`` if there is none; default: ``missing-NAME``. The plan shows it as
    ``shown``; default: ``<NAME>``. A job or settings with the field ``instead`` do not need the value.
    """

    example: str
    find: str
    stand_in: str = ""
    shown: str = ""
    instead: str = ""


def setting(
    help: str,
    default: Any = "",
    *,
    choices: Sequence[str] = (),
    least: int | None = None,
    most: int | None = None,
    need: Need | None = None,
    place: bool = False,
    caller: bool = False,
) -> Any:
    """Return a field of a provider's ``Settings``, with ``help`` for the schema, ``cloudtrain config`` and the docs.

    A ``default`` that can be called makes the value. A text is the default or one of ``choices``, which ``help`` gets.
    A number is from ``least`` to ``most``. `check_settings` checks choices, and whole numbers that have a ``least``.

    A ``caller`` setting is the caller's identity. It is not recorded: each client uses its own. A ``place`` setting
    says where jobs run. Its values hold no comma, so a text with commas is a list of them.
    """
    limits = {"enum": [*dict.fromkeys([default, *choices])] if choices else None, "minimum": least, "maximum": most}
    schema = {word: limit for word, limit in limits.items() if limit is not None}
    text = f"{help}: {', '.join(choices)}" if choices else help
    metadata = {"help": text, "schema": schema, "need": need, "place": place, "caller": caller}
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class NativeObject:
    """An object on the platform that was created for the run at the URL ``run``. ``created`` is in Unix seconds."""

    kind: str
    key: str
    run: str
    created: float


class ProviderExtras:
    """Optional members of a provider, each with a default that does nothing. A provider inherits from it to have some.

    * ``needs``: a `Need` by ``store`` or ``image`` that is no setting of the provider.
    * ``sync_marks``: name endings of the files that the platform's agent puts into a run's folder (`SyncAgent.marks`).
      `pull` skips such files.
    * ``probe_ports``: ports of node 0 that ``doctor --job`` tries from the other nodes.
    * ``arrival_s``: seconds after which a request is a job that `find` finds, or will never be one, if its client was
      killed. Another client on that client's machine sends it then. After a cancel, the run is pending until then.
    * ``always_interactive``: `shell` works for every job, so that the field ``interactive`` changes no request.
    * ``object_mounts``: the folder below which nodes see an object store as files, and variables that name places in
      it. A plan warns of appends there.
    * ``shares_gpus``: a job may ask for a part of a GPU (``gpu_memory``).
    * ``keeps_warm``: machines may wait for the next job (``keep_warm``), if the setting ``warm_setting`` is set.
      ``warm_hint`` is what a user does otherwise.
    """

    needs: ClassVar[Mapping[str, Need]] = {}
    sync_marks: ClassVar[tuple[str, ...]] = ()
    probe_ports: ClassVar[tuple[int, ...]] = ()
    always_interactive: ClassVar[bool] = False
    object_mounts: ClassVar[tuple[str, ...]] = ()
    shares_gpus: ClassVar[bool] = False
    keeps_warm: ClassVar[bool] = False
    warm_setting: ClassVar[str] = ""
    warm_hint: ClassVar[str] = "leave keep_warm out, or choose a provider with warm machines"
    arrival_s: ClassVar[float] = 1.0

    def warm_seconds(self, request: Request) -> int:
        """Return the seconds after the job for which its machines wait for the next one, and are paid for."""
        return 0

    def check(self, request: Request) -> None:
        """Raise an error if this machine can see that the request cannot be sent; then nothing is recorded."""

    def checks(self, store: str, request: Request | None) -> Iterator[Check]:
        """Yield the provider's checks of ``doctor``, which create nothing. ``store`` is empty if unknown."""
        return iter(())

    def store_url(self, url: str, *, ask: bool) -> str:
        """Return the URL that ``url``, whose scheme is the provider's name, stands for. ``ask``: use the network."""
        return url

    def principal(self) -> str | None:
        """Return the identity that this machine calls as; None if it cannot be known."""
        return None

    def image_digest(self, request: Request) -> str | None:
        """Return the digest of the image that nodes will run; None if it cannot be known."""
        return None

    def machines(self) -> Sequence[Machine]:
        """Return the machines that the account itself has, with the network; empty if `catalog` lists them."""
        return ()

    def objects(self) -> Sequence[NativeObject]:
        """Return all objects of cloudtrain's runs that stay on the platform until they are removed."""
        return ()

    def remove(self, found: NativeObject) -> None:
        """Remove one of `objects`, with all that belongs to it; idempotent."""

    def picks_machine(self) -> bool:
        """Return False if jobs get the machines of a cluster, whose GPUs a plan cannot know."""
        return True

    def stuck(self, native_id: str) -> Mapping[str, str]:
        """Return the checkpoints that nodes cannot copy to the store now, by name, each with the reason."""
        return {}

    def shell(self, request: Request, native_id: str, node: int, command: Sequence[str], *, tty: bool) -> Shell | None:
        """Return the way into a node of a running job; None for a platform without one. ``tty``: for a terminal.

        ``command`` is what runs there, empty for a shell. Raises `SpecError` if the job does not let one in.
        """
        return None

    def without_machines(self, names: Sequence[str]) -> Provider | None:
        """Return this provider with settings that keep jobs off these machines; None if the platform cannot do that.

        ``names`` are those of `NodeEnvironment.machine`.
        """
        return None

    def may_have_sent(self, request: Request) -> bool:
        """Return False if `submit` has raised a `LostContactError`, but never got as far as to create the job."""
        return True

    def abandoned(self, native_id: str) -> bool:
        """Return True if the process that would start further attempts has died: clients then start them."""
        return False


def extras_of(provider: Provider) -> ProviderExtras:
    """Return the provider's optional members; defaults for a provider without `ProviderExtras`."""
    return provider if isinstance(provider, ProviderExtras) else ProviderExtras()


def extras_of_type(kind: type[Provider]) -> type[ProviderExtras]:
    """Return the class-level members of `extras_of` for a provider's class."""
    return kind if issubclass(kind, ProviderExtras) else ProviderExtras


@runtime_checkable
class Provider(Protocol):
    """A platform to run on. It is made of its settings; every method is required. `ProviderExtras` has more members."""

    name: ClassVar[str]
    Settings: ClassVar[type[Any]]
    #: URL schemes of inputs that its nodes read themselves; ``file`` means this machine's own files.
    schemes: ClassVar[frozenset[str]]
    #: Starter of attempt 1, 2, …: ``platform``, ``supervisor`` (on this host) or ``client`` (only while one waits).
    retried_by: ClassVar[str]
    #: The part that ends a wait for machines beyond ``max_wait``: ``platform``, or ``client`` (as above).
    max_wait_by: ClassVar[str]
    #: Shortest and longest seconds between two polls of a run.
    min_poll_s: ClassVar[float]
    max_poll_s: ClassVar[float]
    #: An instance of ``Settings``, made of the constructor's keywords.
    settings: Any

    def plan(self, job: Job, layout: Layout, attempt: int = 0, gpu_index: int = 0) -> Request:
        """Return the exact request. Pure: equal arguments give equal requests, with no network, credentials or SDK."""

    def submit(self, request: Request, secrets: Mapping[str, str] | None = None) -> str:
        """Send that very request and return the native id; idempotent on (run, attempt, gpu_index).

        ``secrets`` are the values of ``env:`` references, for providers whose nodes this machine starts.
        """

    def find(self, request: Request) -> str | None:
        """Return the native id if the request was ever accepted. Never creates anything."""

    def status(self, native_id: str) -> Status:
        """Return the platform's current status. Raises `NotFoundError` for an unknown id."""

    def logs(self, native_id: str, cursor: Any = None) -> LogPage:
        """Return one page from ``cursor`` (None: the beginning)."""

    def cancel(self, native_id: str) -> None:
        """Ask the platform to stop the job; idempotent, also after its end."""

    def storage(self, url: str) -> Mapping[str, Any]:
        """Return the options of a store at ``url``, by fsspec's names, with the account that this machine uses.

        Empty if the store finds the credentials itself. Called once more after they have expired.
        """

    @staticmethod
    def node_environment(environ: Mapping[str, str], argv: Mapping[str, str]) -> NodeEnvironment:
        """Return the node's environment, on the node. ``argv`` holds the ``--path`` pairs of the command line."""

    def launch_spec(self, request: Request) -> LaunchSpec:
        """Return the nodes that the platform starts for the request. Pure."""


def recorded_settings(kind: type[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``values`` of the settings ``kind`` without those of the caller's identity."""
    callers = {item.name for item in dataclasses.fields(kind) if item.metadata.get("caller")}
    return {name: value for name, value in values.items() if name not in callers}


# -------------------------------------------------------------------------------- pure parts of every provider's plan


def context_of(provider: str, job: Job, layout: Layout, *, processes: int) -> dict[str, Any]:
    """Return context.json: the script side of a job, the same for every provider and attempt."""
    return {
        "protocol": PROTOCOL,
        "provider": provider,
        "run_id": layout.run_id,
        "run": layout.run,
        "name": job.name,
        "code_digest": layout.code_digest,
        "nodes": job.resources.instance_count,
        **({"planned_nodes": job.resources.instance_count} if job.resources.min_instance_count else {}),
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
        **(_webhook(job) if job.webhook else {}),
        **({"node_check": {"gpus": _gpus_of_all(job)}} if job.node_check else {}),
        **({"min_gpu_util": job.min_gpu_util} if job.min_gpu_util else {}),
    }


def _gpus_of_all(job: Job) -> int | None:
    """Return the GPUs of each node; None if the job does not say, its choices differ, or CUDA does not see them."""
    counts = {None if gpu.name.startswith(NPU) else gpu.count for gpu in job.resources.gpus}
    return counts.pop() if len(counts) == 1 else None


def _webhook(job: Job) -> dict[str, Any]:
    return {"webhook": {"url": job.webhook, "headers": dict(job.webhook_headers), "retries": job.retries}}


def python_command(arguments: Sequence[str]) -> list[str]:
    """Return the command that runs Python with ``arguments`` in an image with a shell and some Python.

    ``exec``: the node's first process is Python itself, which gets the platform's stop signal. Exit code 127 means that
    the image has no Python.
    """
    find = "python=$(command -v python3 || command -v python)"
    none = "{ echo 'cloudtrain: this image has no python3 and no python' >&2; exit 127; }"
    return ["/bin/sh", "-c", f'{find} || {none}; exec "$python" "$@"', "cloudtrain", *arguments]


def shell_arguments(pyz: str, request: Request, node: int, command: Sequence[str], *, scratch: str = "") -> list[str]:
    """Return the arguments of Python on a node that run ``command``, or a shell, in its first rank's environment.

    ``pyz`` is the node's path of the runtime. ``scratch`` is the node's folder, if other nodes run beside it.
    """
    words = [pyz, "shell", "--run-id", str(request.context["run_id"]), "--node", str(node), "--scratch", scratch]
    return [*words, "--", *command]


def check_inputs(provider: type[Provider], inputs: Mapping[str, Input | LayoutInput]) -> None:
    """Raise `UnsupportedError` for the first input whose URL scheme the provider's nodes cannot read."""
    for name, item in inputs.items():
        scheme = url_scheme(item.url) or "file"
        if scheme not in provider.schemes:
            known = ", ".join(f"{s}:" for s in sorted(provider.schemes))
            raise UnsupportedError(provider.name, f"inputs.{name}", f"it cannot read {scheme}: URLs, only {known}")


def needs_of(kind: type[Provider]) -> dict[str, Need]:
    """Return the needs of the provider ``kind`` by name: ``store``, ``NAME.region`` of its settings, ``image``."""
    stated = extras_of_type(kind).needs
    own = {f"{kind.name}.{spec.name}": spec.metadata.get("need") for spec in dataclasses.fields(kind.Settings)}
    found = {"store": stated.get("store"), **own, "image": stated.get("image")}
    return {name: need for name, need in found.items() if need is not None}


def lacking(kind: type[Provider], settings: Any, job: Job) -> tuple[str, ...]:
    """Return the names of needs that ``settings`` of provider ``kind`` and ``job`` lack, except the store."""

    def has(name: str, need: Need) -> bool:
        own = job if name == "image" else settings
        instead = [getattr(one, need.instead, None) for one in (job, settings) if need.instead]
        return bool(getattr(own, name.rpartition(".")[2]) or any(instead))

    return tuple(name for name, need in needs_of(kind).items() if name != "store" and not has(name, need))


def check_settings(settings: Any, prefix: str) -> None:
    """Raise `SpecError` for a value outside the limits of its `setting`. ``prefix`` begins the field of the error."""
    for spec in dataclasses.fields(settings):
        value, limits = getattr(settings, spec.name), spec.metadata.get("schema", {})
        is_unset = value is None and not spec.default
        if "enum" in limits and value not in limits["enum"] and not is_unset:
            choice_of(value, tuple(filter(None, limits["enum"])), prefix + spec.name)
        if "minimum" in limits and isinstance(spec.default, int):
            whole_number(value, prefix + spec.name, least=limits["minimum"], most=limits.get("maximum"))


def check_needs(kind: type[Provider], settings: Any, job: Job) -> None:
    """Raise `SpecError` for the first `lacking` need, `UnsupportedError` for a field that needs other machines."""
    extras = extras_of_type(kind)
    unset = bool(extras.warm_setting) and not getattr(settings, extras.warm_setting)
    if job.keep_warm and (unset or not extras.keeps_warm):
        raise UnsupportedError(kind.name, "keep_warm", "its machines do not wait for a job", hint=extras.warm_hint)
    if job.resources.gpu_memory and not extras.shares_gpus:
        hint = "leave gpu_memory out: only clusters with HAMi share a GPU"
        raise UnsupportedError(kind.name, "resources.gpu_memory", "its nodes have whole GPUs", hint=hint)
    if job.min_gpu_util and any(gpu.name.startswith(NPU) for gpu in job.resources.gpus):
        raise UnsupportedError(kind.name, "min_gpu_util", NO_SMI, hint="leave min_gpu_util out")
    for name in lacking(kind, settings, job):
        need = needs_of(kind)[name]
        raise SpecError("is not set", field=name, hint=f"for example {json.dumps(need.example)}: {need.find}")
