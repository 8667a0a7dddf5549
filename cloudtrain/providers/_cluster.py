"""Shared parts of the providers of users' own clusters, whose nodes see the store and inputs as files.

Nothing here names a platform. Nodes import this module too, so imports that a node does not need stand in functions.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from ..errors import SpecError, UnsupportedError
from ..provider_api.launch_spec import LaunchRules, Mount
from ..provider_api.protocol import Layout, NativeObject, Request
from ..validate import url_scheme
from ._cloud import CloudProvider

if TYPE_CHECKING:
    from ..job.job import Job
    from ..provider_api.catalog import Machine

__all__ = [
    "FLUSH_PATH",
    "GRACE_PATH",
    "ClusterProvider",
    "bucket_url",
    "check_lines",
    "check_shared",
    "shared_arguments",
    "shared_mounts",
    "shared_rules",
]

BUCKETS = ("s3", "gs", "abfs", "abfss", "az")
"""Schemes of buckets that nodes of a cluster can mount."""
GRACE_PATH, FLUSH_PATH = "grace", "flush"
"""The ``--path`` with the grace, and the one with the seconds between two writes of a file on a mounted bucket."""
FLUSH_SECONDS = 30
"""Seconds between flushes into a mounted bucket: each is a whole new object, which costs money."""
_SYNCED = ("live", "direct", "mounted")
RESTARTS = 1000
"""Restarts of a job by a cluster: only the time limit of the run ends them."""


class ClusterProvider(CloudProvider):
    """Methods of a provider of the user's own cluster: it knows its machines, and takes the values of secrets.

    Its nodes see folders and mounted buckets as files. Clients start further attempts, and let users into every job.
    """

    schemes: ClassVar[frozenset[str]] = frozenset({"file", *BUCKETS})
    retried_by: ClassVar[str] = "client"
    max_wait_by: ClassVar[str] = "client"
    min_poll_s: ClassVar[float] = 0.5
    always_interactive: ClassVar[bool] = True

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

    def principal(self) -> str | None:
        """Return the user as the cluster knows it."""
        return str(self.account.principal())

    def storage(self, url: str) -> Mapping[str, Any]:
        return {}


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


def check_lines(settings: Any, names: Iterable[str], provider: str) -> None:
    """Raise `SpecError` for the first of the settings ``names`` that is not one line of text."""
    for name in names:
        value = getattr(settings, name)
        if not isinstance(value, str) or re.search(r"[\x00-\x1f\x7f]", value):
            raise SpecError(f"must be one line of text, not {value!r}", field=f"{provider}.{name}")


def bucket_url(url: str, field: str) -> str:
    """Return the URL of a bucket, or of a folder in it, without a slash at its end. Raises `SpecError`."""
    if not re.fullmatch(rf"({'|'.join(BUCKETS)})://[^/?#\s]+(/[^/?#\s]+)*/?", url):
        hint = "for example s3://my-bucket, or gs://my-bucket/team"
        raise SpecError(f"{url!r} is not the URL of a bucket", field=field, hint=hint)
    return url.rstrip("/")


def shared_arguments(
    layout: Layout, attempt: int, path: Callable[[str, str], str], own: Mapping[str, str]
) -> list[str]:
    """Return the runtime's command line, without Python, with the ``--path`` pairs ``own``.

    ``path(url, field)`` returns the nodes' path. If the store is a bucket, a script writes its own checkpoints by their
    URL: a mount cannot rename.
    """
    in_folder = url_scheme(layout.store) == "file"
    urls = {"code": layout.code, "live": layout.live, "direct" if in_folder else "mounted": layout.direct}
    paths = {name: path(url, "store") for name, url in urls.items()}
    if layout.resume:
        paths["resume"] = path(layout.resume, "resume_from")
    for name, item in sorted(layout.inputs.items()):
        paths[f"file.{name}" if item.file else f"input.{name}"] = path(item.url, f"inputs.{name}")
    paths |= own if in_folder else {**own, FLUSH_PATH: str(FLUSH_SECONDS)}
    words = [path(layout.runtime, "store"), "run", "--context", path(layout.context, "store")]
    words += ["--attempt", str(attempt)]
    return words + [word for name, path in paths.items() for word in ("--path", f"{name}={path}")]


def shared_mounts(words: Sequence[str], url: Callable[[str], str], own: Iterable[str]) -> Iterator[Mount]:
    """Yield each file and folder of `shared_arguments` by itself. ``own`` are names of pairs that are neither.

    ``url(path)`` returns the URL that nodes see at a path.
    """
    context = words[words.index("--context") + 1]
    for path in (words[0], context, f"{context.rpartition('/')[0]}/key"):
        yield Mount(url=url(path), path=path, kind="mount")
    for before, word in itertools.pairwise(words):
        name, _, path = word.partition("=")
        if before == "--path" and name not in (GRACE_PATH, FLUSH_PATH, *own):
            yield Mount(url=url(path), path=path, kind="sync" if name in _SYNCED else "mount")


def shared_rules(*, time_limit: float, again: int, stop_grace: float) -> LaunchRules:
    """Return the rules of a cluster that starts a job again after exit code ``again`` and after each loss of a node."""
    return LaunchRules(
        time_limit=time_limit,
        restart_on=(again,),
        max_restarts=RESTARTS,
        preemptions=RESTARTS,
        losses=RESTARTS,
        stop_grace=stop_grace,
    )
