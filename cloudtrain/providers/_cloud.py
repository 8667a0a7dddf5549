"""Shared parts of the clouds' providers: methods that call a provider's modules, and pure parts of plans and statuses.

Nothing here names a platform. Nodes import this module too, so imports that a node does not need stand in functions.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import itertools
import json
import os
import posixpath
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from ..errors import (
    CloudtrainError,
    ConflictError,
    LostContactError,
    NotFoundError,
    PlatformError,
    SpecError,
    StorageError,
    UnsupportedError,
)
from ..provider_api.launch_spec import LaunchRules, LaunchSpec, Mount, NodeSpec
from ..provider_api.node import NodeEnvironment, Topology
from ..provider_api.protocol import (
    Layout,
    LogPage,
    NativeObject,
    Need,
    ProviderExtras,
    Request,
    Shell,
    Status,
    check_needs,
    context_of,
)
from ..validate import did_you_mean, unix_seconds, url_scheme

if TYPE_CHECKING:
    from ..job.job import Gpu, Job
    from ..provider_api.catalog import Machine
    from ..provider_api.checks import Check

BUCKETS = ("s3", "gs", "abfs", "abfss", "az")
"""Schemes of buckets that nodes of a cluster can mount."""
GIB = 1 << 30
ANOTHER_ID = "choose another run id (--run-id)"
"""The hint if the platform has a job of the run id already."""
STAND_IN = "/SHARED-VOLUME/folder"
"""The nodes' folder of a plan without a store."""
GRACE_PATH, FLUSH_PATH = "grace", "flush"
"""The ``--path`` with the grace, and the one with the seconds between two writes of a file on a mounted bucket."""
FLUSH_SECONDS = 30
"""Seconds between flushes into a mounted bucket: each is a whole new object, which costs money."""
_LINE = r"[^\x00-\x1f\x7f]*"
_SYNCED = ("live", "direct", "mounted")
RESTARTS = 1000
"""Restarts of a job by a cluster: only the time limit of the run ends them."""
CALLED = 1.0
"""Seconds between two calls of a notice."""
SETTLE = 5.0
"""Seconds after a creation whose answer was lost, in which the job may not be in the list yet; unverified."""
LONGEST_HOLD = 300.0
"""Longest pause in seconds that a service can ask for."""
REASON = 1024
"""Characters of a platform's message that a status holds."""


class CloudProvider(ProviderExtras):
    """Methods of a provider whose folder has the modules request, api, status, logs, doctor, node and launch_spec.

    Each module is imported when a method first needs it: most of them need the platform's SDK, or slow a node's start.
    """

    name: ClassVar[str]
    Settings: ClassVar[type[Any]]

    def __init__(self, **settings: Any) -> None:
        from ..provider_api.limits import checked_settings

        made = checked_settings(self.Settings(**settings), self.name)
        # Recorded with the run: every client that attaches asks the same account.
        self.settings: Any = self._module("request").checked(made)

    @classmethod
    def _module(cls, name: str) -> Any:
        return importlib.import_module(f"{__package__}.{cls.name}.{name}")

    @cached_property
    def account(self) -> Any:
        """The account, created when first needed."""
        return self._module("api").Account(self.settings)

    def plan(self, job: Job, layout: Layout, attempt: int = 0, gpu_index: int = 0) -> Request:
        kind: Any = type(self)
        check_needs(kind, self.settings, job)
        planned = Planned(self.name, self.settings, job, layout, attempt, gpu_index, [])
        made: Request = self._module("request").plan(planned)
        return made

    def submit(self, request: Request, secrets: Mapping[str, str] | None = None) -> str:
        return str(self.account.create(request))

    def find(self, request: Request) -> str | None:
        with suppress(ConflictError):  # the platform has another request's job of that name
            found: str | None = self.account.find(request)
            return found
        return None

    def status(self, native_id: str) -> Status:
        found: Status = self._module("status").status(self.account, native_id)
        return found

    def logs(self, native_id: str, cursor: Any = None) -> LogPage:
        found: LogPage = self._module("logs").page(self.account, native_id, cursor)
        return found

    def cancel(self, native_id: str) -> None:
        self.account.cancel(native_id)

    def storage(self, url: str) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.account.storage(url)
        return found

    def principal(self) -> str | None:
        """Return the identity that calls, in the platform's own form; None if it cannot be known."""
        found: str | None = self.account.principal()
        return found

    def shell(self, request: Request, native_id: str, node: int, command: Sequence[str], *, tty: bool) -> Shell | None:
        found: Shell | None = self.account.shell(request, native_id, node, command, tty=tty)
        return found

    def checks(self, store: str, request: Request | None) -> Iterator[Check]:
        """Yield the checks of `doctor`."""
        yield from self._module("doctor").checks(self.account, store, request)

    @classmethod
    def node_environment(cls, environ: Mapping[str, str], argv: Mapping[str, str]) -> NodeEnvironment:
        found: NodeEnvironment = cls._module("node").node_environment(environ, argv)
        return found

    def launch_spec(self, request: Request) -> LaunchSpec:
        found: LaunchSpec = self._module("launch_spec").launch_spec(self.settings, request)
        return found


class ClusterProvider(CloudProvider):
    """Methods of a provider of the user's own cluster: it knows its machines, and takes the values of secrets.

    Its nodes see folders and mounted buckets as files. Clients start further attempts, and let users into every job.
    The function ``mounts`` of module request returns their folders by the URL that they show.
    """

    schemes: ClassVar[frozenset[str]] = frozenset({"file", *BUCKETS})
    retried_by: ClassVar[str] = "client"
    max_wait_by: ClassVar[str] = "client"
    min_poll_s: ClassVar[float] = 0.5
    always_interactive: ClassVar[bool] = True

    def __init__(self, **settings: Any) -> None:
        for item in dataclasses.fields(self.Settings):
            value = settings.get(item.name, "")
            if isinstance(item.default, str) and not (isinstance(value, str) and re.fullmatch(_LINE, value)):
                raise SpecError(f"must be one line of text, not {value!r}", field=f"{self.name}.{item.name}")
        super().__init__(**settings)
        mounts = self._module("request").mounts(self.settings)
        self.schemes = frozenset(map(url_scheme, mounts))  # type: ignore[misc]

    def without_machines(self, names: Sequence[str]) -> Any:
        """Return this provider with the nodes ``names`` added to its setting ``exclude``, a list or a text."""
        own, text = dataclasses.asdict(self.settings), isinstance(self.settings.exclude, str)
        known = [own["exclude"]] if text else own["exclude"]
        found = [*dict.fromkeys(filter(None, [*known, *names]))]
        return type(self)(**{**own, "exclude": ",".join(found) if text else found})

    def submit(self, request: Request, secrets: Mapping[str, str] | None = None) -> str:
        return str(self.account.create(request, secrets))

    def machines(self) -> Sequence[Machine]:
        found: list[Machine] = self.account.machines()
        return found

    def objects(self) -> Sequence[NativeObject]:
        found: list[NativeObject] = self.account.objects()
        return found

    def remove(self, found: NativeObject) -> None:
        self.account.remove(found)

    def storage(self, url: str) -> Mapping[str, Any]:
        return {}


class Planned(NamedTuple):
    """The arguments of a plan, and the notes for the user so far.

    `on` adds a cluster's machines by their names in the setting ``prices``, and the time limit in seconds.
    """

    provider: str
    settings: Any
    job: Job
    layout: Layout
    attempt: int
    gpu_index: int
    notes: list[str]
    machines: tuple[str, ...] = ()
    seconds: int = 0

    @property
    def gpu(self) -> Gpu | None:
        return self.job.resources.gpus[self.gpu_index] if self.job.resources.gpu else None

    @property
    def name(self) -> str:
        from ..job.job import job_name

        return job_name(self.layout.run, self.attempt, self.gpu_index)

    def limit(self, names: Callable[[int], Sequence[str]], **bounds: int) -> int:
        """Return the hard limit in seconds, and add its notes; see `limits.hard_limit`."""
        from ..provider_api.limits import hard_limit

        own: dict[str, Any] = {"gpu_index": self.gpu_index, "own": self.settings.prices, **bounds}
        seconds, notes = hard_limit(self.job, self.provider, names, **own)
        self.notes.extend(notes)
        return seconds

    def on(self, machine: str) -> Planned:
        """Return the facts of a cluster's plan, with ``machine`` for its nodes."""
        own = (machine,) if self.settings.prices else ()
        return self._replace(machines=own, seconds=self.limit(lambda _: [machine]))

    def with_options(self, body: Mapping[str, Any], owned: Mapping[str, str]) -> dict[str, Any]:
        """Return ``body`` with the job's options for this provider. Raises `SpecError` for an ``owned`` field.

        ``owned`` are names, divided by spaces, by the path before them.
        """
        from ..job.options import merge_options

        paths = [place + name for place, names in owned.items() for name in names.split()]
        return merge_options(body, self.job.options.get(self.provider, {}), owned=paths, provider=self.provider)

    def request(
        self,
        operation: str,
        body: Mapping[str, Any],
        *,
        machines: Iterable[str] = (),
        known: Machine | None = None,
        **context: Any,
    ) -> Request:
        """Return the request that holds ``body``, and the notes so far.

        ``machines`` are the platform's names of the machines that it may choose, and ``known`` is the catalogue's entry
        of the first. ``context`` are values in place of the usual ones.
        """
        processes = processes_of(self.job, self.gpu_index, known)
        return Request(
            provider=self.provider,
            operation=operation,
            body=body,
            context={**context_of(self.provider, self.job, self.layout, processes=processes), **context},
            run=self.layout.run,
            attempt=self.attempt,
            gpu_index=self.gpu_index,
            instance_types=tuple(machines) or self.machines,
            notes=tuple(self.notes),
        )


# ------------------------------------------------------------------------------------------------------------ on a node


class Clock:
    """The running time of all starts of a job, on node 0, where the platform has no such limit of its own.

    At the limit it reports the end as a notice, so that every node saves, and changes this node's exit code to
    ``time_up``. ``file`` is written every ``pause`` seconds, at most a tenth of the limit. It always holds the time up
    to the next write, so that a start that ends before then is counted whole.
    """

    def __init__(self, file: Path, limit: float, codes: dict[str, int], time_up: int, pause: float) -> None:
        self._file, self._limit, self._codes, self._time_up = file, limit, codes, time_up
        self._pause = min(pause, limit / 10)
        self._began = time.monotonic()
        self._before: float | None = None
        self._counted = 0.0

    def __call__(self) -> str:
        """Return the reason for the node's end; empty before the limit."""
        if self._before is None:
            if (before := self._read()) is None:
                return ""
            self._before = self._counted = before
        used = self._before + time.monotonic() - self._began
        if self._counted < min(used + CALLED, self._limit):
            self._write(min(used + self._pause, self._limit))
        if used < self._limit:
            return ""
        self._codes.update(preempted=self._time_up, lost=self._time_up)
        return "the time limit is used up"

    def _read(self) -> float | None:
        """Return the time of earlier starts; None if the volume does not answer now."""
        try:
            return float(self._file.read_text())
        except (FileNotFoundError, ValueError):
            return 0.0
        except OSError:
            return None

    def _write(self, counted: float) -> None:
        from ..runtime.checkpoints import write_whole

        try:
            write_whole(self._file, f"{counted:.1f}".encode(), temporary=".part")
            self._counted = counted
        except OSError:  # the volume does not answer now
            return


# ------------------------------------------------------------------------------------------------------ parts of a plan


def check_secrets(provider: str, job: Job, *, form: str, wanted: str, known: str, create: Callable[[str], str]) -> None:
    """Raise `UnsupportedError` for a secret of another scheme than ``known`` begins with, `SpecError` for its form.

    ``known`` describes the references that nodes can fetch, and ``wanted`` their ``form``. ``create(NAME)`` is the
    command that makes a secret of this machine's variable.
    """
    for name, reference in job.secrets.items():
        field, (given, _, rest) = f"secrets.{name}", reference.partition(":")
        if given == "env":
            variable = rest if rest in os.environ else "NAME"  # else it may be the secret: env:$TOKEN
            hint = f"to create the secret there, run: {create(variable)}\n"
            hint += f"then refer to it as {known.partition(' only')[0]}"
            raise UnsupportedError(provider, field, "its nodes cannot read this machine's variables", hint=hint)
        if given != known.partition(":")[0]:
            raise UnsupportedError(provider, field, f"its nodes fetch {known}")
        if not re.fullmatch(form, rest, re.ASCII):
            raise SpecError(f"{rest!r} is not {wanted}", field=field)


def check_shared(provider: str, job: Job, *, where: str, secrets: str) -> None:
    """Raise `UnsupportedError` for parts of a job that a cluster cannot honour, whose nodes see inputs as files.

    ``where`` is the inputs' place, and ``secrets`` says how the value of an ``env:NAME`` reaches a node.
    """
    for name, item in job.inputs.items():
        if item.shard:
            raise UnsupportedError(provider, f"inputs.{name}.shard", "every node sees a whole input")
        if item.mode == "copy":
            raise UnsupportedError(provider, f"inputs.{name}.mode", f"nodes read inputs where they are, {where}")
    for name, reference in job.secrets.items():
        if not reference.startswith("env:"):
            raise UnsupportedError(provider, f"secrets.{name}", f"its nodes fetch env:NAME only: {secrets}")


def bucket_url(url: str, field: str) -> str:
    """Return the URL of a bucket, or of a folder in it, without a slash at its end. Raises `SpecError`."""
    if not re.fullmatch(rf"({'|'.join(BUCKETS)})://[^/?#\s]+(/[^/?#\s]+)*/?", url):
        hint = "for example s3://my-bucket, or gs://my-bucket/team"
        raise SpecError(f"{url!r} is not the URL of a bucket", field=field, hint=hint)
    return url.rstrip("/")


def machine_of(
    provider: str,
    job: Job,
    gpu_index: int,
    *,
    form: re.Pattern[str],
    prefix: str = "",
    families: Sequence[str],
    first: str,
) -> tuple[str, Machine | None]:
    """Return the job's instance type, and its entry in the catalogue, or None for a new machine.

    It is the job's own, else the cheapest with what the job asks for, else ``first``. ``families`` are those without
    GPUs. Raises `UnsupportedError`; see `pinned_machine`.
    """
    from ..provider_api import catalog

    wanted = job.resources
    if wanted.instance_type:
        return pinned_machine(provider, job, gpu_index, form=form, prefix=prefix)
    if wanted.gpu:
        found = catalog.for_gpu(provider, wanted.gpus[gpu_index], cpus=wanted.cpus, memory_gb=wanted.memory_gb)
    elif wanted.cpus or wanted.memory_gb:
        found = catalog.for_cpus(provider, families, cpus=wanted.cpus, memory_gb=wanted.memory_gb)
    else:
        found = next(m for m in catalog.machines(provider) if m.instance_type == first and not m.gpu)
    return found.instance_type, found


def pinned_machine(
    provider: str, job: Job, gpu_index: int, *, form: re.Pattern[str], prefix: str = ""
) -> tuple[str, Machine | None]:
    """Return the job's own instance type, and its entry in the catalogue, or None for a new machine.

    Raises `UnsupportedError` for a name that does not have the platform's ``form``, which also decides if case counts,
    and for a machine that lacks what the job asks for. A name may stand for a machine with any of several GPUs.
    """
    from ..provider_api import catalog

    wanted = job.resources
    name = str(wanted.instance_type)
    same = re.compile(re.escape(name), form.flags)
    known = [m for m in catalog.machines(provider) if same.fullmatch(m.instance_type)]
    if not known:
        catalog.check_name(provider, name, form, prefix=prefix)
        return name, None
    gpu, name = wanted.gpus[gpu_index] if wanted.gpu else None, known[0].instance_type
    fitting = [m for m in known if gpu is None or (m.is_for(gpu) and m.gpu_count == gpu.count)]
    if not fitting:
        why = f"{name} has {', '.join(m.gpus for m in known if m.gpu) or 'no GPU'}, not {gpu}"
        raise UnsupportedError(provider, "resources.gpu", why, hint="leave out gpu or instance_type")
    machine = min(fitting, key=lambda m: m.gpu_count)  # without GPUs if it can be
    for field in ("cpus", "memory_gb"):
        if not machine.has(**{"cpus": None, "memory_gb": None, field: getattr(wanted, field)}):
            why = f"{name} has {machine.vcpus} cores and {machine.memory_gib or 0:g} GiB"
            raise UnsupportedError(provider, f"resources.{field}", why, hint=f"leave out {field} or instance_type")
    return name, machine


def processes_of(job: Job, gpu_index: int, machine: Machine | None) -> int:
    """Return the ranks a node. The catalogue has the GPUs of a pinned instance type.

    Raises `SpecError` for ``min_gpu_util`` on a pinned one that certainly has no GPU.
    """
    pinned = machine if machine is not None and job.resources.instance_type else None
    if job.min_gpu_util and pinned is not None and pinned.vcpus and not pinned.gpu_count:
        why, hint = f"{pinned.instance_type} has no GPU", "leave min_gpu_util out, or ask for a gpu"
        raise SpecError(why, field="min_gpu_util", hint=hint)
    if job.resources.nproc_per_node or job.resources.gpu or machine is None:
        return job.resources.processes(gpu_index)
    return machine.gpu_count or 1


def check_tags(tags: Mapping[str, str], *, reserved: Sequence[str], most: int) -> None:
    """Raise `SpecError` for tags that begin with a ``reserved`` prefix, and for more than ``most``."""
    for key in tags:
        if key.lower().startswith(tuple(reserved)):
            why = f"names that begin with {' or '.join(reserved)} are reserved"
            raise SpecError(why, field=f"tags.{key}", hint="choose another name for the tag")
    if len(tags) > most:
        raise SpecError(f"has {len(tags)} entries, at most {most}", field="tags")


def digest_of(body: Mapping[str, Any]) -> str:
    """Return 16 hex digits of a request's body. A run's id may return for another job after its records are gone."""
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()[:16]


def size_of(machine: Machine | None) -> dict[str, Any]:
    """Return the fields of a `NodeSpec` that its machine decides."""
    if machine is None:
        return {"platform": "linux/amd64", "gpus": 0, "cpus": None, "memory": None}
    return {
        "platform": "linux/arm64" if machine.arch == "arm64" else "linux/amd64",
        "gpus": machine.gpu_count,
        "cpus": machine.vcpus,
        "memory": int(machine.memory_gib * GIB) if machine.memory_gib else None,
    }


def paths_of(argv: Mapping[str, str]) -> dict[str, str]:
    """Return a node's paths by name. ``file.X`` is the path of a one-file input; the runtime needs its folder."""
    paths = {}
    for name, path in argv.items():
        kind, _, channel = name.partition(".")
        if kind in ("file", "copyfile"):
            path = posixpath.dirname(path)
        paths[f"input.{channel}" if kind in ("file", "copy", "copyfile") else name] = path
    return paths


def path_words(paths: Mapping[str, str]) -> list[str]:
    """Return the words ``--path NAME=PATH`` of a command line."""
    return [word for name, path in paths.items() for word in ("--path", f"{name}={path}")]


def pairs_of(words: Sequence[str]) -> dict[str, str]:
    """Return the paths by name in a command line: the inverse of `path_words`."""
    pairs = (word.partition("=") for before, word in itertools.pairwise(words) if before == "--path")
    return {name: path for name, _, path in pairs}


# -------------------------------------------------------------------------------------------------- fields of a request

_FORMS: Mapping[str, tuple[type[Any] | tuple[type[Any], ...], str]] = {
    **dict.fromkeys(("structure", "map"), (Mapping, "a table")),
    **dict.fromkeys(("integer", "long"), (int, "a whole number")),
    "int64": ((int, str), "a whole number"),  # as JSON sends it
    "number": ((int, float), "a number"),
    "list": (list, "a list"),
    "string": (str, "text"),
    "boolean": (bool, "true or false"),
    "any": (object, "any value"),
}
"""The types of each form of a value, and the words for it."""


def problems(
    shapes: Mapping[str, Any], name: str, value: Any, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], str, str]]:
    """Yield (path, reason, hint) of each part of ``value`` that breaks the shape ``name`` of ``shapes``.

    A shape has a ``type`` of `_FORMS`; ``X[]`` is a list of X. It may have ``members`` and ``required`` (structure),
    ``member`` (list), ``key`` and ``value`` (map), ``min``, ``max``, ``enum`` and ``pattern`` (``python``: the same for
    `re`). If it has ``words`` for its legal values, they are the reason for every limit.
    """
    shape = {"type": "list", "member": name[:-2]} if name.endswith("[]") else shapes[name]
    form = shape["type"]
    types, words = _FORMS[form]
    if not isinstance(value, types) or (isinstance(value, bool) and form not in ("boolean", "any")):
        yield path, f"must be {shape.get('words', words)}, not {value!r}", ""
        return
    for why, hint in _limits_broken(shape, value):
        yield path, f"must be {shape['words']}, not {value!r}" if "words" in shape else why, hint
    if form == "structure":
        for missing in (key for key in shape.get("required", ()) if key not in value):
            yield (*path, missing), "is missing", ""
        for key, item in value.items():
            if key in shape["members"]:
                yield from problems(shapes, shape["members"][key], item, (*path, key))
            else:
                yield (*path, key), shape.get("unknown", "no such field"), did_you_mean(key, shape["members"])
    elif form == "list":
        for number, item in enumerate(value):
            yield from problems(shapes, shape["member"], item, (*path, str(number)))
    elif form == "map":
        for key, item in value.items():
            yield from problems(shapes, shape["key"], key, (*path, key))
            yield from problems(shapes, shape["value"], item, (*path, key))


def _limits_broken(shape: Mapping[str, Any], value: Any) -> Iterator[tuple[str, str]]:
    """Yield (reason, hint) of each limit of a shape that a value of its type breaks."""
    sized = isinstance(value, (str, list, Mapping))
    size = len(value) if sized else value
    said = f"has {size} {'characters' if isinstance(value, str) else 'entries'}" if sized else f"is {size}"
    if "max" in shape and size > shape["max"]:
        yield f"{said}, at most {shape['max']}", ""
    if "min" in shape and size < shape["min"]:
        yield f"{said}, at least {shape['min']}", ""
    if isinstance(value, str) and value not in shape.get("enum", (value,)):
        yield f"{value!r} is none of {', '.join(shape['enum'])}", did_you_mean(value, shape["enum"])
    if "pattern" in shape and not re.fullmatch(shape.get("python", shape["pattern"]), str(value)):
        shown = value if len(str(value)) <= 80 else str(value)[:77] + "..."
        yield f"{shown!r} does not match {shape['pattern']}", ""


# ------------------------------------------------------------------------- nodes that see the store and inputs as files


def shared_store(example: str, find: str) -> Need:
    """Return what users are asked for if they name no store."""
    return Need(example=example, find=find, stand_in=STAND_IN, shown="/<shared>/<folder>")


def shared_path(mounts: Mapping[str, str], url: str) -> str | None:
    """Return the nodes' path of ``url``; None if it is on none of their ``mounts``, folders by the URL they show."""
    return _with_other_start(url, {**mounts, f"file://{STAND_IN}": STAND_IN}.items())


def shared_url(mounts: Mapping[str, str], path: str) -> str:
    """Return the URL that nodes see at ``path``: the inverse of `shared_path`."""
    folders = [(folder, shown) for shown, folder in {**mounts, f"file://{STAND_IN}": STAND_IN}.items()]
    return _with_other_start(path, folders) or f"file://{path}"


def _with_other_start(text: str, pairs: Iterable[tuple[str, str]]) -> str | None:
    """Return ``text`` with the second of a pair in place of the first, the longest that it begins with."""
    fitting = [pair for pair in pairs if f"{text}/".startswith(f"{pair[0]}/")]
    old, new = max(fitting, key=lambda pair: (len(pair[0]), len(pair[1])), default=("", None))
    return None if new is None else new + text.removeprefix(old)


def shared_arguments(planned: Planned, path: Callable[[str, str], str], own: Mapping[str, str]) -> list[str]:
    """Return the runtime's command line, without Python, with the ``--path`` pairs ``own``.

    ``path(url, field)`` returns the nodes' path. If the store is a bucket, a script writes its own checkpoints by their
    URL: a mount cannot rename.
    """
    layout = planned.layout
    in_folder = url_scheme(layout.store) == "file"
    urls = {"code": layout.code, "live": layout.live, "direct" if in_folder else "mounted": layout.direct}
    paths = {name: path(url, "store") for name, url in urls.items()}
    if layout.resume:
        paths["resume"] = path(layout.resume, "resume_from")
    for name, item in sorted(layout.inputs.items()):
        paths[f"file.{name}" if item.file else f"input.{name}"] = path(item.url, f"inputs.{name}")
    paths |= {GRACE_PATH: str(planned.settings.stop_grace), **own}
    paths |= {} if in_folder else {FLUSH_PATH: str(FLUSH_SECONDS)}
    words = [path(layout.runtime, "store"), "run", "--context", path(layout.context, "store")]
    return [*words, "--attempt", str(planned.attempt), *path_words(paths)]


def shared_launch_spec(
    settings: Any,
    words: Sequence[str],
    mounts: Mapping[str, str],
    own: Iterable[str],
    *,
    hosts: Sequence[str],
    rank: str,
    time_limit: float,
    again: int,
    **node: Any,
) -> LaunchSpec:
    """Return one node for each of ``hosts``, which has its number in the variable ``rank``, and the cluster's rules.

    A node sees each file and folder of `shared_arguments`, the ``words`` with Python; ``own`` are names of pairs that
    are neither. ``node`` are further fields of each node. The cluster starts a job again after exit code ``again``, and
    after each loss of a node.
    """
    context = words[words.index("--context") + 1]
    kinds = dict.fromkeys((words[1], context, f"{context.rpartition('/')[0]}/key"), "mount")
    for name, path in pairs_of(words).items():
        if name not in (GRACE_PATH, FLUSH_PATH, *own):
            kinds[path] = "sync" if name in _SYNCED else "mount"
    seen = [Mount(url=shared_url(mounts, path), path=path, kind=kind) for path, kind in kinds.items()]
    counts: dict[str, Any] = dict.fromkeys(("max_restarts", "preemptions", "losses"), RESTARTS)
    rules = LaunchRules(time_limit=time_limit, restart_on=(again,), stop_grace=settings.stop_grace, **counts)
    nodes = []
    for number, host in enumerate(hosts):
        given = {**node, "env": {**node["env"], rank: str(number)}, "hostname": host if len(hosts) > 1 else None}
        nodes.append(NodeSpec(command=list(words), mounts=list(seen), **given))
    return LaunchSpec(nodes=nodes, rules=rules)


def shared_environment(
    environ: Mapping[str, str],
    argv: Mapping[str, str],
    *,
    names: tuple[str, str],
    what: str,
    grace: float,
    **peers: Any,
) -> dict[str, Any]:
    """Return the fields of a node's environment that clusters share. ``peers`` are further fields of its topology.

    ``names`` are the variables with the number of nodes and the node's own, and ``grace`` is the default. Raises
    `SpecError` outside of ``what``.
    """
    paths = paths_of(argv)
    times = {"stop_grace": float(paths.pop(GRACE_PATH, grace))}
    if FLUSH_PATH in paths:
        times["flush_seconds"] = float(paths.pop(FLUSH_PATH))
    try:
        topology = Topology(nodes=int(environ[names[0]]), node_rank=int(environ[names[1]]), **peers)
    except (KeyError, ValueError):
        raise SpecError(f"is not set: this is no {what}", field=names[1]) from None
    return {"topology": topology, "paths": paths, **times}


def shared_secret(name: str, file: Path, read: Callable[[bytes], str], *, lacks: str) -> str:
    """Return the value of the submitter's variable ``name``. Raises `StorageError`, never with a value.

    ``read`` finds it in the bytes of ``file``; ``lacks`` describes a file without it.
    """
    try:
        return read(file.read_bytes())
    except (OSError, ValueError, KeyError, TypeError) as exc:
        why = os.strerror(exc.errno) if isinstance(exc, OSError) and exc.errno else lacks
        raise StorageError(f"secret env:{name} cannot be read from {file}: {why}") from None


def check_gpus(account: Any, *, none: str) -> Check:
    """Return the check of `doctor` that lists the machines' GPUs. ``none`` is the text if there are none."""
    from ..provider_api.checks import ok

    found = [f"{item.instance_type}: {item.gpus} a node" for item in account.machines() if item.gpu]
    return ok("gpus", ", ".join(found) or none)


def check_request(request: Request | None, test: Callable[[Request], str]) -> Check:
    """Return the check of `doctor` that lets the cluster judge the request: ``test`` returns its answer, or raises."""
    from ..provider_api.checks import ok, skipped

    return skipped("request", "there is no plan") if request is None else ok("request", test(request))


# ------------------------------------------------------------------------------------------------------------- of jobs


class Creations:
    """Creations of jobs on a platform that takes no id from its caller, so that two clients may create one each.

    One client at a time creates a job (`handover.sending`), but one that slept for longer than its lease may come
    second. The oldest job counts.
    """

    def __init__(self, cancel: Callable[[str], None]) -> None:
        self._cancel = cancel
        self._lost_at: dict[str, float] = {}
        """Time of a creation whose answer was lost, by the job's name, on the clock of `time.monotonic`."""

    def note_lost(self, name: str) -> None:
        """Note that a call to create the job ``name`` got no answer."""
        self._lost_at[name] = time.monotonic()

    def is_lost(self, name: str) -> bool:
        """Return whether a call to create the job ``name`` got no answer."""
        return name in self._lost_at

    def one_job(self, name: str, find: Callable[[], list[str]], send: Callable[[], str]) -> str:
        """Return the id of the job ``name``: the oldest that ``find`` returns, or the one that ``send`` creates.

        Cancels all others. Raises `LostContactError`, which lets the caller ask again, if one cannot be cancelled.
        """
        settled = self._lost_at.get(name, float("-inf")) + SETTLE
        while not (found := find()) and time.monotonic() <= settled:
            time.sleep(0.5)
        if not found:
            ours = send()
            with suppress(CloudtrainError):  # ours exists even if the search fails
                found = find()
            found = list({job.rpartition("/")[2]: job for job in (*found, ours)}.values())
        for job in found[1:]:
            try:
                self._cancel(job)
            except CloudtrainError as exc:
                why = f"create job: {job} is a second job of this request, and it cannot be stopped: {exc}"
                raise LostContactError(why, hint="stop it on the platform") from None
        return found[0]


@contextmanager
def unless_over(is_over: Callable[[], bool]) -> Iterator[None]:
    """Ignore the refusal of a cancel if the job is over, or stops already. An unknown job stays an error."""
    try:
        yield
    except SpecError as exc:
        if isinstance(exc, NotFoundError) or not is_over():
            raise


# ----------------------------------------------------------------------------------------------------------- of answers


def pages(ask: Callable[[str], Mapping[str, Any]], token: str) -> Iterator[Mapping[str, Any]]:
    """Yield all pages of a list. ``ask(TOKEN)`` returns one, whose field ``token`` names the next."""
    at: str | None = ""
    while at is not None:
        yield (page := ask(at))
        at = page.get(token) or None


@cache
def table_in(module: str, name: str) -> dict[str, Any]:
    """Return the JSON table ``name`` in the folder of a module's file."""
    found: dict[str, Any] = json.loads(Path(module).with_name(name).read_bytes())
    return found


def object_of(body: bytes | str) -> dict[str, Any] | None:
    """Return the JSON object of an answer; None if it has none: a proxy may answer with a page."""
    try:
        found = json.loads(body)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def decoded(body: bytes, *, what: str) -> dict[str, Any]:
    """Return the JSON object of an answer. Raises `PlatformError` if it has none."""
    if (found := object_of(body)) is None:
        raise PlatformError(f"{what}: the answer is not JSON")
    return found


def one_line(text: Any) -> str:
    """Return a platform's message as one line of at most `REASON` characters; empty for None."""
    return " ".join(str(text or "").split())[:REASON]


def patterns(*rows: tuple[str, str]) -> tuple[tuple[re.Pattern[str], str], ...]:
    """Return rows for `first_match` of (pattern, category); a pattern ignores case, and its dot fits a line break."""
    return tuple((re.compile(pattern, re.IGNORECASE | re.DOTALL), category) for pattern, category in rows)


def first_match(rows: Iterable[tuple[re.Pattern[str], str]], text: str, default: str) -> str:
    """Return the category of the first of ``rows`` whose pattern is in ``text``."""
    return next((category for pattern, category in rows if pattern.search(text)), default)


def hinted(reason: str, hint: str | None) -> str:
    """Return a status's reason with the hint behind it."""
    return f"{reason.rstrip('.')}; {hint}" if hint else reason


def short_key(text: str) -> str:
    """Return a short digest of a log event's identity, as a cursor holds many."""
    return hashlib.blake2s(text.encode(), digest_size=8).hexdigest()


def time_of(moment: Any) -> float | None:
    """Return a moment of an answer in Unix seconds; None if the answer has none."""
    return None if moment in (None, "") else unix_seconds(moment)


class Backoff:
    """Pauses that services ask for by Retry-After. No call goes to a host before its pause ends.

    ``first`` is the pause in seconds if a service throttles and gives no time.
    """

    def __init__(self, first: float = 0.0) -> None:
        self._first = first
        self._until: dict[str, float] = {}

    def left(self, host: str) -> float:
        """Return the seconds for which ``host`` is held; 0 or less if it is not."""
        return self._until.get(host, 0.0) - time.monotonic()

    def check(self, host: str, *, name: str, what: str) -> None:
        """Raise `LostContactError` if ``host``, which a user calls ``name``, is held."""
        if (left := self.left(host)) > 0:
            raise LostContactError(f"{what}: {name} asks for a pause of {left:.0f} s before the next call")

    def note(self, host: str, status: int, headers: Any) -> None:
        """Hold ``host`` if it answers with status 429, or 503 with a time."""
        asked = re.fullmatch(r"\d+(\.\d+)?", str(headers.get("Retry-After") or ""))
        if status == 429 or (status == 503 and asked):
            wait = float(asked[0]) if asked else self._first
            self._until[host] = time.monotonic() + min(wait, LONGEST_HOLD)
