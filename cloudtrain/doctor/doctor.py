"""Checks run by `cloudtrain doctor`: settings, a trial plan, the provider's checks, and a round trip of the store.

They create one small object in each store and delete it. The all-nodes job of ``doctor --job``: `prepared` plans it,
`judged` reads its findings, and `Grace` measures how long its nodes live after the stop signal.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import AuthError, CloudtrainError, NotFoundError, SpecError, StorageError
from ..job.job import Job
from ..provider_api import catalog
from ..provider_api.checks import Check, failed, failure, ok, skipped
from ..provider_api.protocol import Provider, Request, extras_of, needs_of
from ..runs.fallback import where
from ..runs.log_order import Line
from ..runs.run import Run
from ..runs.submit import Plan, make_plan
from ..runs.summary import plural
from ..runtime import node_check
from ..settings.needs import find_missing, missing_line, refusal
from ..settings.settings import Settings
from ..storage.errors import CannotSwapError
from ..storage.files import Files, files
from ..storage.local_disk import local_path, normalize
from ..validate import without_secrets

SCRIPT = "doctor.py"
MAX_RUNTIME = 900
_NO_IMAGE = skipped("plan", "no image is set; with --image the doctor checks it")
_KMS = re.compile(r"kms|encrypt", re.IGNORECASE)
_UNKNOWN_CALLER = re.compile(r"expired|(no|locate|find).{0,20} credentials", re.IGNORECASE)
_ABSENT = re.compile(r"no ?such ?bucket|bucket( or container)? does not exist|container ?not ?found|there is no ", re.I)


@dataclass(frozen=True, kw_only=True)
class CheckedPlace:
    """A provider (None if not set) and region where a job may run. Each check runs when it is taken."""

    provider: str | None
    profile: str = ""
    region: str = ""
    checks: Iterator[Check]

    def __str__(self) -> str:
        return " ".join(filter(None, [self.profile, self.provider, self.region]))


def checked_places(
    *,
    provider: str | None,
    store: str | None,
    settings: Mapping[str, str],
    fields: Mapping[str, Any],
    cwd: Path,
    profile: str | None = None,
    fallback: str | None = None,
    job: Job | None = None,
) -> Iterator[CheckedPlace]:
    """Yield the settings and each fallback that a job tries, in order. Unreadable settings give one failed check.

    The job is ``job``, or a small job of the doctor with ``fields`` (flat Job fields: machine and image).
    """
    try:
        given: dict[str, Any] = {"provider": provider, "store": store, "fallback": fallback}
        chosen = Settings.load(overrides=settings, cwd=cwd, profile=profile, **given)
        found = chosen.candidates()
    except CloudtrainError as exc:
        yield CheckedPlace(provider=provider, checks=iter([failure("settings", exc)]))
        return
    for own in found:
        checks = _checks(own, fields, job, cwd)
        yield CheckedPlace(provider=own.provider, profile=own.profile, region=where(own), checks=checks)


def _checks(settings: Settings, fields: Mapping[str, Any], job: Job | None, cwd: Path) -> Iterator[Check]:
    try:
        made, moving = settings.make_provider(), settings.moving
    except CloudtrainError as exc:
        yield failure("settings", exc)
        return
    missing, imageless = _missing(settings, made, fields.get("image"), job)
    if missing:
        yield failure("settings", refusal(made.name, missing, file=settings.file, profile=settings.profile))
        yield skipped("plan", missing_line(missing))
        yield from itertools.islice(_own(made, "", None), 1)  # only the package check runs without the settings
        return
    yield ok("settings", f"provider {made.name}, store {without_secrets(settings.store)}")
    store, planned = "", None
    try:
        store = normalize(settings.resolved(ask=True), cwd=cwd)
    except CloudtrainError as exc:
        yield failure("store", exc)
        yield skipped("plan", "the location of the store is unknown")
    else:
        check = _NO_IMAGE
        if not imageless:
            planned, check = _planned(dataclasses.replace(settings, store=store), fields, job, cwd)
        yield check
    stopped = False
    for check in _own(made, store, planned):
        yield check
        stopped = stopped or (check.status == "failed" and check.name in ("sdk", "credentials"))
    if store and stopped and local_path(store) is None:
        yield skipped("store", "the failed check above comes first")
    elif store:
        yield round_trip(files(store, storage=made.storage, moving=moving))


def _missing(settings: Settings, made: Provider, image: Any, job: Job | None) -> tuple[tuple[str, ...], bool]:
    """Return the names of the missing settings, and whether the doctor's own job lacks only an image."""
    checked = job or Job.make(entry_point=SCRIPT, **({"image": image} if image else {}))
    names = find_missing(settings, made, checked.at(made.name))
    needs = needs_of(type(made))
    of_job = () if job else [name for name in names if "image" in (name, needs[name].instead)]
    return tuple(name for name in names if name not in of_job), bool(of_job)


def _planned(settings: Settings, fields: Mapping[str, Any], job: Job | None, cwd: Path) -> tuple[Plan | None, Check]:
    """Return the plan of the job, by default one with one node, and the check of planning it."""
    with tempfile.TemporaryDirectory(prefix="cloudtrain-doctor-") as folder:
        Path(folder, SCRIPT).write_text("print('well')\n", encoding="utf-8")
        try:
            own = {"name": "doctor", **fields, "entry_point": SCRIPT, "source_dir": folder}
            own_job = Job.from_dict(own).replace(min_instance_count=None)  # its script has no batch
            planned = make_plan(job or own_job, settings=settings, cwd=cwd, preview=True)
        except CloudtrainError as exc:
            imageless = job is None and getattr(exc, "field", "") == "image"
            return None, _NO_IMAGE if imageless else failure("plan", exc)
    where = "this machine" if planned.provider.retried_by == "supervisor" else planned.provider_name
    kinds = ", ".join(planned.request.instance_types) or where
    return planned, ok("plan", f"{plural(planned.job.resources.instance_count, 'node')} on {kinds}")


def _own(provider: Provider, store: str, planned: Plan | None) -> Iterator[Check]:
    """Yield the provider's own checks, if it has any. ``store`` is empty if unknown."""
    try:
        yield from extras_of(provider).checks(store, planned.request if planned is not None else None)
    except CloudtrainError as exc:
        yield failure("provider", exc)


# ------------------------------------------------------------------------------------------------------------ the store


def round_trip(tree: Files) -> Check:
    """Create an object exclusively, twice, and replace one version of it, twice; then read, list and delete it.

    Nothing is left behind.

    The object is directly below the store, and only the store's prefix is listed, so a List policy for that prefix is
    enough.
    """
    key, data = f"doctor-{secrets.token_hex(8)}.json", secrets.token_hex(16).encode()
    step, left, url = "create", False, without_secrets(tree.url)
    try:
        with _as_it_was(tree.url):
            try:
                tree.create(key, data)  # False too may mean success: the first answer may have been lost
                step, left = "read", True
                if tree.read(key) != data:
                    raise StorageError("the content that was read is not the content that was written")
                step = "replace"
                if tree.create(key, data + b"2") or tree.read(key) != data:
                    raise StorageError("a second creation was not refused: this store has no exclusive creation")
                _replace_once(tree, key, data)
                step = "list"
                if key not in tree.names(""):
                    raise StorageError("the written object is not in the list")
                step = "delete"
                tree.discard([key])  # does not list
                if tree.exists(key):
                    raise StorageError("it is still there")
            finally:
                if step != "delete":  # also after a failed creation: it may have been carried out
                    with contextlib.suppress(CloudtrainError, OSError):
                        tree.discard([key])
                        left = False
    except (FileNotFoundError, CloudtrainError) as caught:
        exc = caught if isinstance(caught, CloudtrainError) else StorageError(f"there is no {caught.filename or url}")
        rest = f" ({url}/{key} is left there)" if left else ""
        return failed("store", f"{step}: {exc}{rest}", fix=_store_fix(tree, step, exc), code=exc.exit_code)
    return ok("store", f"{url}: created, read, listed and deleted an object")


def _replace_once(tree: Files, key: str, data: bytes) -> None:
    """Replace the object, where a store can do so. Raises `StorageError` if it writes against its condition."""
    first = tree.load(key)
    conditions = [(None, "exclusive creation"), (first and first.version, "conditional writes")]
    try:
        tree.swap(key, first and first.version, data + b"3")
    except CannotSwapError:  # it only creates, which is enough for a store
        conditions.pop()
    for version, lacks in conditions:
        with contextlib.suppress(FileExistsError):
            tree.swap(key, version, data + lacks.encode())
            why = f"an object that exists was replaced: this store does not keep {lacks}"
            raise StorageError(f"{why}, and two clients could start one run twice")


def _store_fix(tree: Files, step: str, exc: CloudtrainError) -> str:
    text, url, refused = str(exc), without_secrets(tree.url), isinstance(exc, AuthError)
    page = "(see the provider's page in docs/)"
    fixes = [
        (
            "exclusive" in text or "conditional" in text or "unchanged" in text,
            "set store to one with conditional writes: S3, Azure Blob Storage, Cloud Storage, a local folder",
        ),
        (
            local_path(tree.url) is not None,
            "free space there, let this user write to it, or set store to another URL",
        ),
        (_ABSENT.search(text), "make the bucket or container, or set store to one that is there"),
        (isinstance(exc, SpecError), failure("store", exc).fix),
        (
            _KMS.search(text),
            "let the caller use the key (to encrypt and decrypt), and set sse and sse_kms_key_id as the store demands",
        ),
        (refused and _UNKNOWN_CALLER.search(text), "sign in again, or give this machine credentials for it"),
        (
            refused and step.startswith(("create", "replace")),
            f"let the caller write below {url} {page}; if the store refuses unencrypted objects, set sse and"
            " sse_kms_key_id",
        ),
        (refused, f"let the caller {step} below {url} {page}"),
        (True, f"check that this machine can reach {url}, and try again"),
    ]
    return next(fix for holds, fix in fixes if holds)


@contextmanager
def _as_it_was(url: str) -> Iterator[None]:
    """Remove the folders of a local store that did not exist before."""
    path = local_path(url)
    new = [] if path is None else [place for place in (path, *path.parents) if not place.exists()]
    try:
        yield
    finally:
        for place in new:
            with contextlib.suppress(OSError):
                place.rmdir()


# -------------------------------------------------------------------------------------------------- the all-nodes job


@contextmanager
def prepared(
    settings: Settings, fields: Mapping[str, Any], *, run_id: str | None, cwd: Path, grace: bool = False
) -> Iterator[Plan]:
    """Yield the plan of the job that checks every node; its source exists until the block ends.

    With ``grace`` the nodes then wait for a stop signal. A provider's attribute ``probe_ports`` may name ports to try.
    """
    ports = extras_of(settings.make_provider()).probe_ports
    args = [*(["--ports", ",".join(map(str, ports))] if ports else []), *(["--grace"] if grace else [])]
    with tempfile.TemporaryDirectory(prefix="cloudtrain-doctor-") as folder:
        script = Path(shutil.copy(node_check.__file__, folder))
        given = {"name": "doctor", "max_runtime": MAX_RUNTIME, **fields, "entry_point": script.name}
        job = Job.from_dict({**given, "source_dir": folder, "args": args})
        yield make_plan(job.replace(min_instance_count=None), settings=settings, run_id=run_id, cwd=cwd)


def expected_gpus(job: Job, provider: Provider, request: Request) -> int | None:
    """Return the GPUs that a node must have; None if neither the job nor the table of machines says."""
    if job.resources.gpu:
        return job.resources.gpus[request.gpu_index].count
    named = request.instance_types[:1]
    counts = {machine.gpu_count for machine in catalog.machines(provider.name) if machine.instance_type in named}
    return counts.pop() if len(counts) == 1 else None  # one name may stand for machines with and without GPUs


def judged(folder: Path, *, nodes: int, gpus: int | None) -> tuple[dict[str, Any], list[str]]:
    """Return the job's findings, as pulled into ``folder``, and a line for each problem."""
    try:
        found = json.loads((folder / "artifacts" / node_check.REPORT).read_bytes())
        node_check.table(found)
        return found, node_check.problems(found, nodes=nodes, gpus=gpus)
    except OSError as exc:
        raise NotFoundError(f"the job has left no {node_check.REPORT} ({exc}); see its logs") from None
    except (KeyError, TypeError, AttributeError, ValueError) as exc:
        what = f"the job's {node_check.REPORT} is damaged ({type(exc).__name__}: {exc}); see its logs"
        raise NotFoundError(what) from None


class Grace:
    """A measurement of the time between the stop signal and the kill; it is called with each log line of ``run``.

    Once the job has written its report, the run is cancelled. Then each node repeatedly prints the seconds since the
    signal. ``seconds`` has the last such time of each node.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self.asked, self._attempt = False, ""
        self.seconds: dict[int, float] = {}

    def __call__(self, line: Line) -> None:
        if not self.asked and node_check.READY in line.text:
            self._run.cancel()
            self.asked, self._attempt = True, line.attempt
        elif line.attempt and line.attempt == self._attempt and (found := node_check.SINCE.search(line.text)):
            self.seconds[int(line.node)] = max(float(found[1]), self.seconds.get(int(line.node), 0.0))

    def judged(self, nodes: int, reckoned: float) -> tuple[dict[str, Any], list[str]]:
        """Return the measurements by node, and a line for each problem.

        ``reckoned`` is the seconds that cloudtrain needs to mirror the rest and record the node's end.
        """
        exits = self._run.store.exits(self._run.run_id)
        recorded = {int(record["node"]) for record in exits if record["attempt"] == self._attempt}
        rows, wrong = {}, []
        for node in range(nodes):
            seconds = self.seconds.get(node)
            rows[str(node)] = {"seconds": seconds, "recorded": node in recorded}
            if seconds is None:
                wrong.append(f"node {node} did not report a stop signal; see its log")
            elif node not in recorded:
                lost = "its last checkpoint and the record of its end are lost"
                wrong.append(
                    f"node {node} was killed {seconds:.1f} s after SIGTERM, of {reckoned:g} s reckoned: {lost}"
                )
        return {"reckoned": reckoned, "nodes": rows}, wrong
