"""Lay out a store: the place of code, data and runs below one URL, and the records written there.

Content (code, runtime, data) has an address made of its own digest, so writing it twice, or from two machines at once,
changes nothing. Records (run.json, request.json) are created exclusively and never rewritten: creating one *is* the
decision, and exactly one of any number of clients gets True. Every method that touches the store raises `AuthError` and
`StorageError`, as `Files` does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import re
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ..errors import AuthError, DigestError, NotFoundError, SpecError, StorageError, scrubbed
from ..job.run_id import check_run_id, is_run_id
from ..provider_api.node import PROTOCOL, attempt_key
from ..provider_api.protocol import Layout, LayoutInput, Request
from ..runtime.checkpoint_model import Checkpoint, newest_checkpoint, written_directly
from ..settings.settings import Settings
from ..storage.files import Files, Progress, ProgressWithTotal, Storage, TransferOptions, files, parallel
from ..storage.lease import announce, withdraw
from ..storage.local_disk import local_path, normalize, safe
from ..storage.timings import CLIENT_TIMINGS
from ..validate import URL_FORMS, check_listable, did_you_mean, file_of_url, json_loads, url_scheme

if TYPE_CHECKING:
    from ..job.job import Input, Job
    from ..storage.digest_cache import LocalTree, TreeFile


T = TypeVar("T")

RELAYED = frozenset({"s3", "s3a", "obs", "gs", "gcs", "abfs", "abfss", "az", "http", "https", "hf", "ftp", "sftp"})
"""Schemes of remote data that can be copied into a store if nodes cannot read them."""

NO_STORES = frozenset({"ftp", "http", "https", "hf"})
"""Schemes of data that jobs can read but without exclusive creation."""
STORES = "s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, abfs://CONTAINER@ACCOUNT.dfs.core.windows.net/PREFIX"
_S3 = r"s3(?:[.-][a-z0-9-]+)?\.amazonaws\.com(?:\.cn)?"
_MEANT = (
    (r"https?://([^./]+)\.(?:blob|dfs)\.(core\.[^/]+)/([^/?]+)(/[^?]*)?", r"abfs://\3@\1.dfs.\2\4"),
    (rf"https?://{_S3}/([^?]+)", r"s3://\1"),
    (rf"https?://([^/]+?)\.{_S3}(/[^?]*)?", r"s3://\1\2"),
    (r"https?://([^./]+)\.obs\.[a-z0-9-]+\.myhuaweicloud\.com(/[^?]*)?", r"obs://\1\2"),
    (r"https?://storage\.(?:googleapis|cloud\.google)\.com/([^?]+)", r"gs://\1"),
    (r"https?://([^/]+)\.storage\.googleapis\.com(/[^?]*)?", r"gs://\1\2"),
)
"""URLs of a cloud's web page or API, and the store that each stands for."""

EARLY = frozenset({"cancelled.json", "inputs", "resume"})
"""Names in a run's folder that may exist before its run.json: its copies, and the cancel of a sweep's trial."""
COMMIT = "commit.json"
"""File of a complete checkpoint that lists its files."""
SOURCES = "data/sources"
"""Folder of the records that lead from the listing of a staged source to the digest of its content."""
_STEP = 10.0  # seconds: a larger change between two clocks of a machine is no drift
_STAGING = 5 * 86400.0  # seconds from an announcement to run.json: well below those for which it counts
_TOKEN = "created_by"
_CHECKPOINT = re.compile(r"(?P<name>[^/]+)/(?P<attempt>\d+\.\d+)-(?P<seq>\d+)")


@dataclass(frozen=True, kw_only=True)
class Staged:
    """Bytes that `Store.stage` had to upload; copies inside the store do not count."""

    code_bytes: int = 0
    runtime_bytes: int = 0
    data_bytes: int = 0


class Store:
    """The store at ``url``, a path or any fsspec URL, opened on first use; ``storage`` gives its credentials."""

    def __init__(
        self,
        url: str,
        *,
        cwd: Path | None = None,
        storage: Storage | None = None,
        moving: TransferOptions = TransferOptions(),  # noqa: B008 - it is frozen
    ) -> None:
        self.url, self.moving = _checked(normalize(url, cwd=cwd or Path.cwd())), moving
        self.files = files(self.url, gitignore=True, storage=storage, moving=moving)
        self._announced: dict[str, list[tuple[str, float]]] = {}

    # ------------------------------------------------------------------------------------------------ plan: no network

    def inputs(
        self, job: Job, schemes: frozenset[str], *, run_id: str, cwd: Path
    ) -> tuple[dict[str, LayoutInput], list[LocalTree]]:
        """Return each channel's place for the nodes, and the local trees to stage. Reads local files only.

        A local path is used in place if nodes can read ``file`` URLs, else it gets a content address in this store. A
        remote URL is passed on verbatim if nodes can read it; else it is copied into the folder of the run. It is one
        file if it ends in a suffix like ``.csv.gz`` or ``.parquet``, not in ``/``. A suffix is a dot, a letter, and at
        most eleven more letters or digits. Raises `SpecError` for a missing path, one without a file, or one that no
        store can hold.
        """
        placed: dict[str, LayoutInput] = {}
        trees: dict[str, LocalTree] = {}
        for name, item in job.inputs.items():
            path = local_path(item.url)
            if path is None:
                placed[name] = self._placed_remote(name, item, schemes, run_id)
                continue
            path = existing_path(local_path(normalize(item.url, cwd=cwd)) or path, f"inputs.{name}")
            file = path.name if path.is_file() else None
            if "file" in schemes:
                if file is None and not any(names for _, _, names in os.walk(path, followlinks=True)):
                    raise SpecError(f"{path} holds no file", field=f"inputs.{name}")
                placed[name] = _placed(item, normalize(str(path), cwd=cwd), file)
                continue
            tree = self.local_tree(path, f"inputs.{name}")
            trees[tree.digest] = tree
            placed[name] = _placed(item, self.data_url(tree.digest, file), file)
        return placed, list(trees.values())

    def _placed_remote(self, name: str, item: Input, schemes: frozenset[str], run_id: str) -> LayoutInput:
        file, scheme = file_of_url(item.url), url_scheme(item.url)
        unread = scheme not in schemes and scheme in RELAYED
        if not unread or local_path(self.url) is not None or url_scheme(self.url) not in schemes:
            return _placed(item, item.url, file)
        check_listable(item.url, f"inputs.{name}")
        source = item.url if file else item.url.rstrip("/")
        url = copied_input_url(f"{self.url}/{run_folder(run_id)}", name, file)
        return dataclasses.replace(_placed(item, url, file), source=source)

    def local_tree(self, path: Path, where: str) -> LocalTree:
        """Return the tree at ``path`` to stage. Raises `SpecError` with the field ``where`` if this store is in it."""
        from ..storage.digest_cache import hash_tree

        root = local_path(self.url)
        if root is not None and Path(os.path.realpath(root)).is_relative_to(os.path.realpath(path)):
            hint = "give a folder without the store, or set store to another folder"
            raise SpecError(f"{path} contains the store {root}", field=where, hint=hint)
        return hash_tree(path, where)

    def data_url(self, digest: str, file: str | None) -> str:
        """Return the URL of a tree of this digest: its folder, or its one ``file``."""
        return f"{self.url}/data/{digest}" + (f"/{file}" if file else "")

    # ----------------------------------------------------------------------------------------------------------- stage

    def stage(
        self,
        layout: Layout,
        *,
        archive: Callable[[], bytes | Path],
        pyz: bytes | Callable[[], bytes],
        trees: Sequence[LocalTree] = (),
        progress: Progress | None = None,
        say: Callable[[str], None] | None = None,
    ) -> Staged:
        """Upload what the store lacks, calling ``archive`` and ``pyz`` only then. Many clients may do so at once.

        Until `create_run` it is announced, so that no client deletes it; ``say`` is called if that means to wait.
        ``progress`` may have a method `expect`, called with the expected files and bytes. Raises `StorageError` for a
        data file that changed since it was hashed.
        """
        named = [layout.code_digest, layout.runtime_digest, layout.resume or ""]
        named += [*(tree.digest for tree in trees), *(item.url for item in layout.inputs.values())]
        self.announce(layout.run_id, named, say=say)
        code, runtime = self._key(layout.code), self._key(layout.runtime)
        wanted = [code, runtime, *(manifest_key(tree.digest) for tree in trees)]
        for tree in trees:
            if tree.known is not None:
                tree.known.keep()
        there = {key for key, known in zip(wanted, parallel(self.files.exists, wanted), strict=True) if known}
        lacking = [tree for tree in trees if manifest_key(tree.digest) not in there]
        zipped = pyz if callable(pyz) else lambda: pyz
        return Staged(
            code_bytes=0 if code in there else self._stage(code, archive, progress),
            runtime_bytes=0 if runtime in there else self._stage(runtime, zipped, progress),
            data_bytes=sum(self.stage_tree(tree, progress) for tree in lacking),
        )

    def _stage(self, key: str, content: Callable[[], bytes | Path], progress: Progress | None) -> int:
        data = content()
        size = data.stat().st_size if isinstance(data, Path) else len(data)
        expect(progress, [size])
        if isinstance(data, Path):
            self.files.upload(data, key, progress=progress)
            return size
        self.files.write(key, data)
        if progress:
            progress(key, size)
        return size

    def stage_tree(self, tree: LocalTree, progress: Progress | None = None) -> int:
        """Upload the files of an announced tree that the store lacks, then its manifest; return the bytes uploaded."""
        present = self.files.list(f"data/{tree.digest}")
        here = [item for item in tree.files if present.get(f"data/{tree.digest}/{item.path}") != item.size]
        known = self._known_files() if here and self.files.copies else {}
        expect(progress, [item.size for item in here if (item.size, item.sha256) not in known])
        moved = parallel(
            lambda item: self._stage_file(tree, item, present, known, progress),
            tree.files,
            jobs=self.moving.concurrency,
        )
        self.write_manifest(tree.digest, tree.files)
        return sum(moved)

    def write_manifest(self, digest: str, listed: Iterable[TreeFile]) -> None:
        """Record that the tree with this digest is complete."""
        record = {item.path: {"size": item.size, "sha256": item.sha256} for item in listed}
        self.files.write(manifest_key(digest), to_json({"protocol": PROTOCOL, "files": record}))

    def _stage_file(
        self,
        tree: LocalTree,
        item: TreeFile,
        present: Mapping[str, int],
        known: Mapping[tuple[int, str], str],
        progress: Progress | None,
    ) -> int:
        from ..storage.digest_cache import check_unchanged

        key = f"data/{tree.digest}/{item.path}"
        if present.get(key) == item.size:
            return 0
        if (item.size, item.sha256) in known:
            with contextlib.suppress(FileNotFoundError):  # a client has deleted that tree
                self.files.copy(known[item.size, item.sha256], key)
                return 0
        path = tree.path / item.path
        try:
            check_unchanged(path, item, read=not item.read)
            self.files.upload(path, key, progress=progress)
            check_unchanged(path, item)
        except (FileNotFoundError, DigestError) as exc:
            self.files.remove(key)
            if tree.known is not None:
                tree.known.forget(path)
                tree.known.keep()
            hint = "run the same command again when the file no longer changes"
            raise StorageError(f"{path} changed while it was being staged", hint=hint) from exc
        return item.size

    def _known_files(self) -> dict[tuple[int, str], str]:
        """Return the store's file for each content, by (bytes, SHA-256), from the manifests of all trees."""
        known: dict[tuple[int, str], str] = {}
        names = [name for name in self.files.names("data/manifests") if name.endswith(".json")]
        for name, record in zip(names, parallel(lambda n: self.record(f"data/manifests/{n}"), names), strict=True):
            # With a source: an earlier version's copy of remote data, which changed in place, or half a copy.
            listed = record.get("files") if record and "source" not in record else None
            for path, item in listed.items() if isinstance(listed, dict) else ():
                with contextlib.suppress(TypeError, KeyError):
                    known[item["size"], item["sha256"]] = f"data/{name.removesuffix('.json')}/{path}"
        return known

    # --------------------------------------------------------------------------------------------------------- records

    def create_run(self, layout: Layout, record: Mapping[str, Any]) -> bool:
        """Write run.json; return False, without a change, if the run exists.

        Raises `StorageError` if it was staged so long ago that its announcement may have expired.
        """
        if any(time.time() - since > _STAGING for _, since in self._announced.get(layout.run_id, [])):
            why = "staging took days, so another client may have removed some of the files"
            raise StorageError(why, hint="run the same command again")
        created = self._create(f"{run_folder(layout.run_id)}/run.json", record)
        self.withdraw(layout.run_id)
        return created

    def announce(self, run_id: str, named: Sequence[str], *, say: Callable[[str], None] | None = None) -> None:
        """Announce that ``named`` (digests, URLs) will be staged for the run, so that no client deletes them until
        `create_run`; ``say`` is called if that means to wait."""
        now = time.time()
        self._announced.setdefault(run_id, []).append((announce(self.files, run_id, named, say=say), now))

    def withdraw(self, run_id: str) -> None:
        """Remove the run's announcements: it is recorded, or will not be."""
        for key, _ in self._announced.pop(run_id, []):
            withdraw(self.files, key)

    def run(self, run_id: str, *, needs: Sequence[str] = (), among: Sequence[str] | None = None) -> dict[str, Any]:
        """Return the record of `create_run`, with its ``needs``. Raises `NotFoundError` with the nearest run, of
        ``among`` if given."""
        record = self._read_created(f"{run_folder(run_id)}/run.json")
        if record is None:
            near = did_you_mean(run_id, self.runs() if among is None else among)
            raise NotFoundError(f"no run {run_id!r} in {self.url}", field="run", hint=near)
        return _checked_run(record, needs, f"{self.url}/{run_folder(run_id)}/run.json")

    def has_run(self, run_id: str) -> bool:
        """Return whether the run is recorded: it has a run.json."""
        return self.files.exists(f"{run_folder(run_id)}/run.json")

    def runs(self) -> list[str]:
        """Return run ids, sorted: dated ids (the default) come oldest first."""
        return [name for name in self.files.names("runs") if is_run_id(name)]

    def create_attempt(self, run_id: str, k: int, request: Request) -> bool:
        """Write request.json of attempt ``k``; return False if another client has started that attempt."""
        return self._create(attempt_record(run_id, k, "request"), request.to_dict())

    def attempt_request(self, run_id: str, k: int) -> Request | None:
        """Return the request of attempt ``k``, or None if there is no such attempt."""
        record = self._read_created(attempt_record(run_id, k, "request"))
        return None if record is None else Request.from_dict(record)

    def attempts(self, run_id: str) -> list[int]:
        """Return the numbers of attempts with a request, ascending."""
        keys = self.files.list(f"{run_folder(run_id)}/attempts")
        parts = [key.split("/")[-2:] for key in keys]
        return sorted(int(number) for number, name in parts if name == "request.json" and number.isdigit())

    def newest_attempt(self, run_id: str) -> int:
        """Return the number of the newest of `attempts`; 0 if there is none."""
        return max(self.attempts(run_id), default=0)

    def write_submitted(self, run_id: str, k: int, native_id: str) -> None:
        """Record the platform's id of attempt ``k``. A second call keeps the time: `max_wait` counts from it."""
        key, record = attempt_record(run_id, k, "submitted"), to_json({"native_id": native_id, "time": time.time()})
        if not self.files.create(key, record) and (self._json(key) or {}).get("native_id") != native_id:
            self.files.write(key, record)

    def submitted(self, run_id: str, k: int) -> dict[str, Any] | None:
        """Return ``{"native_id": …, "time": …}`` of attempt ``k``, or None until the platform has accepted it."""
        return self._json(attempt_record(run_id, k, "submitted"))

    def write_refused(self, run_id: str, k: int, *, category: str, reason: str) -> None:
        """Record that the platform refused attempt ``k``."""
        record = {"category": category, "reason": reason, "time": time.time()}
        self.files.write(attempt_record(run_id, k, "refused"), to_json(record))

    def refused(self, run_id: str, k: int) -> dict[str, Any] | None:
        """Return ``{"category": …, "reason": …, "time": …}`` of a refused attempt, else None."""
        return self._json(attempt_record(run_id, k, "refused"))

    def write_ended(self, run_id: str, k: int, record: Mapping[str, Any]) -> dict[str, Any]:
        """Record how attempt ``k`` failed; return the first such record, by which all clients judge."""
        return self._first(attempt_record(run_id, k, "ended"), record)

    def ended(self, run_id: str, k: int) -> dict[str, Any] | None:
        """Return the record of `write_ended`, or None if no client has judged attempt ``k``."""
        return self._json(attempt_record(run_id, k, "ended"))

    def runs_since(self, run_id: str, k: int, now: float) -> float:
        """Record that attempt ``k`` was seen running at ``now``; return its first such time (Unix seconds)."""
        return float(self._first(attempt_record(run_id, k, "running"), {"time": now})["time"])

    def seen_running(self, run_id: str, k: int) -> float | None:
        """Return when a client first saw attempt ``k`` running (Unix seconds), or None."""
        record = self._json(attempt_record(run_id, k, "running"))
        return float(record["time"]) if record is not None else None

    def write_wait(self, run_id: str, k: int, starts: int, now: float) -> str:
        """Record that attempt ``k``, after ``starts`` starts, was seen waiting for machines again, unless that is
        recorded; return the record's key."""
        key = attempt_record(run_id, k, f"waits-{int(starts)}")
        self.files.create(key, to_json({"time": now}))
        return key

    def expire(self, run_id: str, k: int, reason: str) -> bool:
        """Decide that attempt ``k`` has waited for machines too long; return False if another client has."""
        return self._create(attempt_record(run_id, k, "expired"), {"reason": reason})

    def expired(self, run_id: str, k: int) -> dict[str, Any] | None:
        """Return ``{"reason": …}`` of an attempt that waited for machines too long, else None."""
        return self._json(attempt_record(run_id, k, "expired"))

    def context(self, layout: Layout) -> dict[str, Any] | None:
        """Return the nodes' context.json, or None."""
        return self.record(self._key(layout.context))

    def write_container(self, layout: Layout, context: Mapping[str, Any], key: bytes) -> None:
        """Write context.json for the nodes, and the key of the node link unless it exists."""
        self.files.create(self._key(layout.key), key, private=True)
        self.files.write(self._key(layout.context), to_json(context))

    def cancel(self, run_id: str) -> None:
        """Forbid further attempts. Idempotent."""
        self.files.create(cancel_record(run_id), to_json({"time": time.time()}))

    def cancelled(self, run_id: str) -> bool:
        """Return whether further attempts are forbidden."""
        return self.files.exists(cancel_record(run_id))

    def cancelled_since(self, run_id: str) -> float | None:
        """Return when the run was cancelled (Unix seconds), or None."""
        record = self._json(cancel_record(run_id))
        return None if record is None else float(record.get("time") or 0.0)

    def write_result(self, run_id: str, result: Mapping[str, Any]) -> dict[str, Any]:
        """Write result.json if absent and return the stored one. A late client cannot overwrite it."""
        # `--json` prints the keys in the order of the result.
        return self._first(f"{run_folder(run_id)}/result.json", result, sort_keys=False)

    def result(self, run_id: str) -> dict[str, Any] | None:
        """Return result.json, or None while there is none."""
        return self._json(f"{run_folder(run_id)}/result.json")

    def create_sweep(self, sweep_id: str, record: Mapping[str, Any]) -> bool:
        """Write sweep.json; return False, without a change, if the sweep exists."""
        return self._create(f"{sweep_folder(sweep_id)}/sweep.json", record)

    def sweep(self, sweep_id: str) -> dict[str, Any] | None:
        """Return the record of `create_sweep`, or None if there is no such sweep."""
        return self._read_created(f"{sweep_folder(sweep_id)}/sweep.json")

    def sweeps(self) -> list[str]:
        """Return sweep ids, sorted."""
        return [name for name in self.files.names("sweeps") if is_run_id(name)]

    def sweep_ended(self, sweep_id: str) -> bool:
        """Return whether the newest entry of a sweep's log is its end. Reads that entry alone."""
        folder = sweep_folder(sweep_id)
        count = len(self.files.names(f"{folder}/log"))
        newest = self._json(_log_entry(folder, count - 1)) if count else None
        return newest is not None and newest.get("kind") == "end"

    def add_log_entry(self, folder: str, number: int, entry: Mapping[str, Any]) -> bool:
        """Create entry ``number`` of the log of a sweep or budget; return False if another client has. The caller must
        have read all entries before it."""
        return self._create(_log_entry(folder, number), entry)

    def log_entries(self, folder: str, start: int = 0) -> list[dict[str, Any]]:
        """Return the entries of the log below ``folder`` from number ``start`` on, up to the first that is missing."""
        found: list[dict[str, Any] | None] = []
        if not start:
            count = len(self.files.names(f"{folder}/log"))
            found = parallel(lambda number: self._read_created(_log_entry(folder, number)), [*range(count)])
        while not found or found[-1] is not None:
            found.append(self._read_created(_log_entry(folder, start + len(found))))
        return [entry for entry in found[: found.index(None)] if entry is not None]

    def exits(self, run_id: str) -> list[dict[str, Any]]:
        """Return the nodes' exit records in order of attempt and node, without incomplete ones."""
        return self._records(f"{run_folder(run_id)}/live/exit")

    def starts(self, run_id: str) -> list[dict[str, Any]]:
        """Return node 0's start record of each attempt, in order: its checkpoint, and the work lost before it."""
        return self._records(f"{run_folder(run_id)}/live/attempts")

    def _records(self, folder: str) -> list[dict[str, Any]]:
        names = sorted((name for name in self.files.names(folder) if name.endswith(".json")), key=attempt_key)
        found = dict(zip(names, parallel(lambda name: self.record(f"{folder}/{name}"), names), strict=True))
        if half := [name for name, record in found.items() if record is None]:
            time.sleep(CLIENT_TIMINGS.half_record)
            found.update({name: self.record(f"{folder}/{name}") for name in half})
        return [record for record in found.values() if record is not None]

    def _first(self, key: str, record: Mapping[str, Any], *, sort_keys: bool = True) -> dict[str, Any]:
        """Write ``record`` if there is none; return the stored one, which every client then goes by."""
        self.files.create(key, to_json(record, sort_keys=sort_keys))
        return self._json(key) or dict(record)

    def _create(self, key: str, record: Mapping[str, Any]) -> bool:
        # The token shows whose record it is if a reply was lost and a client library retried.
        token = secrets.token_hex(16)
        if self.files.create(key, to_json({**record, _TOKEN: token})):
            return True
        stored = self.record(key) or {}
        return bool(stored.get(_TOKEN) == token)

    def _read_created(self, key: str) -> dict[str, Any] | None:
        """Return the record that `_create` wrote, or None."""
        record = self._json(key)
        if record is not None:
            record.pop(_TOKEN, None)
        return record

    def record(self, key: str) -> dict[str, Any] | None:
        """Return the JSON object at ``key``; None if it is missing, or broken as a killed writer leaves it."""
        try:
            value = json_loads(self.files.read(key))
        except (FileNotFoundError, ValueError):
            return None
        return value if isinstance(value, dict) else None

    def _json(self, key: str) -> dict[str, Any] | None:
        """Return the JSON object at ``key``, or None if it is missing. Raises `StorageError` for other content."""
        try:
            value = json_loads(self.files.read(key))
        except FileNotFoundError:
            return None
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise StorageError(f"{self.url}/{key} is not a JSON object")
        return value

    def _key(self, url: str) -> str:
        if not url.startswith(self.url + "/"):
            raise StorageError(f"{url} is not in the store {self.url}")
        return url[len(self.url) + 1 :]

    # ----------------------------------------------------------------------------------------------------- checkpoints

    def checkpoints(self, run_id: str) -> list[Checkpoint]:
        """Return the complete checkpoints, oldest first: every file in commit.json exists with its size."""
        found: dict[tuple[str, str, int], Checkpoint] = {}
        for folder in ("live/checkpoints", "archive/checkpoints"):  # a checkpoint that moves meanwhile is in the second
            for item in committed_in(self.files, f"{run_folder(run_id)}/{folder}")[0]:
                found.setdefault((item.name, item.attempt, item.seq), item)
        return sorted(found.values(), key=lambda item: item.order)

    def direct(self, run_id: str) -> list[Checkpoint]:
        """Return the checkpoints that a script wrote to the store itself, oldest first.

        Complete: ``.metadata`` exists, and no file is newer. They have no digests.
        """
        root = f"{run_folder(run_id)}/checkpoints"
        trees: dict[str, dict[str, tuple[int, float]]] = {}
        for key, entry in self.files.entries(root).items():
            name, _, path = key[len(root) + 1 :].partition("/")
            trees.setdefault(name, {})[path] = (entry.size, entry.modified)
        found = [written_directly(root, name, files) for name, files in trees.items() if safe(name)]
        return sorted((item for item in found if isinstance(item, Checkpoint)), key=lambda item: item.order)

    def newest_checkpoint(self, run_id: str) -> Checkpoint | None:
        """Return the newest of `checkpoints` and `direct` from which a training can resume."""
        return newest_checkpoint(self.checkpoints(run_id), self.direct(run_id))

    def pointers(self, run_id: str) -> dict[str, str]:
        """Return the targets of the script's pointers (best, latest) by name; the first node's, if several differ."""
        found: dict[str, str] = {}
        for record in self._records(f"{run_folder(run_id)}/live/pointers"):
            for name, pointer in record.items():
                found.setdefault(name, str(pointer["target"]))
        return found


class StoreClock:
    """The present time of a store for the clients of a run, whose own clocks may differ.

    ``now`` gives this client's Unix seconds, and ``ticks`` the seconds of its waits. The first call writes a mark into
    the run's folder: its time of change is the store's present time. So does the first call after ``now`` and
    ``ticks`` went apart: ``ticks`` may stand still while the machine is suspended. This client's time counts if the
    store has no times, or if this client may not write there.
    """

    def __init__(self, store: Store, run_id: str, *, now: Callable[[], float], ticks: Callable[[], float]) -> None:
        self._store, self._run_id, self.now, self.ticks = store, run_id, now, ticks
        self._ahead: float | None = None
        self._apart = math.inf

    def since(self, moment: float) -> float:
        """Return the seconds since ``moment``, Unix seconds of the store or of its platform."""
        known = self._learn()
        return (self.now() if known is None else self.ticks() + known) - moment

    def age(self, key: str) -> float | None:
        """Return the seconds since the record at ``key``, with its ``time``, was written; None if there is none."""
        found = self._store.files.load(key)
        if found is None:
            return None
        if found.modified and self._learn() is not None:
            return self.since(found.modified)
        return self.now() - float((self._store.record(key) or {}).get("time") or 0.0)

    def _learn(self) -> float | None:
        """Return the seconds by which the store's clock is ahead of `ticks`; None if unknown."""
        apart = self.now() - self.ticks()
        if abs(apart - self._apart) > _STEP:
            self._ahead, mark = None, f"{run_folder(self._run_id)}/awaited.json"
            with contextlib.suppress(StorageError):  # the next call asks again
                with contextlib.suppress(AuthError):  # no later call may write, either
                    self._store.files.write(mark, to_json({"time": self.now()}))
                    found = self._store.files.load(mark)
                    if found is not None and found.modified:
                        self._ahead = found.modified - self.ticks()
                self._apart = apart
        return self._ahead


# ------------------------------------------------------------------------------------------------------ pieces of Store


def _checked(url: str) -> str:
    """Return ``url``. Raises `SpecError` for a URL with a credential, which every record would quote, and for one that
    cannot be a store. For a URL of a cloud's web page or API, the hint is the store that it stands for."""
    if local_path(url) is None and scrubbed(url) != url:
        why = "holds a password, key or signature, which every record of a run would quote"
        hint = "leave it out of the URL, and sign in as docs/storage.md says"
        raise SpecError(f"{scrubbed(url)} {why}", field="store", hint=hint)
    if url_scheme(url) in NO_STORES:
        meant = (match.expand(store) for pattern, store in _MEANT if (match := re.match(pattern, url, re.IGNORECASE)))
        how = next((f"use {store}" for store in meant), f"use {STORES} or a folder")
        why = f"{url_scheme(url)} cannot create a file exclusively, so two clients could start one run"
        raise SpecError(f"{url!r} cannot be a store: {why}", field="store", hint=how)
    if (form := URL_FORMS.get(url_scheme(url))) and not re.match("[^:]+://[^/]", url):
        raise SpecError(f"{url!r} names no bucket or host", field="store", hint=f"write {form}")
    return url


def in_store(url: str, settings: Settings, use: Callable[[Store], T]) -> T:
    """Return the result of ``use`` for the store at ``url``, opened with the first identity of ``settings`` that may.

    Raises the errors of ``use``, and `AuthError` if no identity has access.
    """
    return settings.let_in(url, lambda caller: use(Store(url, storage=caller, moving=settings.moving)))


def split_ref(ref: str, folder: str, store_url: str | None, settings: Settings) -> tuple[str, str]:
    """Return the store and the id of ``ref``: the URL or path of a folder in ``folder`` of a store, or an id in
    ``store_url`` (default: the setting). The id is not checked. The store is "" if ``ref`` is anything else."""
    if store_url is None:
        store_url = settings.store if url_scheme(ref) else settings.resolved()
        ref = settings.resolved(ref)
    ref = (ref if url_scheme(ref) else ref.replace(os.sep, "/")).rstrip("/") or ref
    if not url_scheme(ref) and "/" not in ref:
        return store_url, ref
    parent, _, name = ref.rpartition("/")
    place, _, found = parent.rpartition("/")
    where = place or ("." if parent == folder else "/")
    return where if found == folder else "", name


def run_folder(run_id: str) -> str:
    """Return the key of the run's folder. Raises `SpecError` for an invalid run id."""
    return f"runs/{check_run_id(run_id)}"


def cancel_record(run_id: str) -> str:
    """Return the key of the record that the run was cancelled."""
    return f"{run_folder(run_id)}/cancelled.json"


def sweep_folder(sweep_id: str) -> str:
    """Return the key of the sweep's folder. Raises `SpecError` for an invalid id."""
    return f"sweeps/{check_run_id(sweep_id)}"


def _log_entry(folder: str, number: int) -> str:
    return f"{folder}/log/{number:06d}.json"


def manifest_key(digest: str) -> str:
    """Return the key of the record that the data tree of this digest is complete: not inside the tree, where a script
    would find it, and platforms that match prefixes would copy it."""
    return f"data/manifests/{digest}.json"


def attempt_record(run_id: str, k: int, name: str) -> str:
    """Return the key of the record ``name`` of attempt ``k``."""
    return f"{run_folder(run_id)}/attempts/{int(k)}/{name}.json"


def expect(progress: Progress | None, sizes: Sequence[int]) -> None:
    """Report the files to come, by size, to ``progress`` if it has a method ``expect``."""
    if isinstance(progress, ProgressWithTotal) and sizes:
        progress.expect(len(sizes), sum(sizes))


def to_json(value: Mapping[str, Any], *, sort_keys: bool = True) -> bytes:
    """Return the bytes of a record."""
    return (json.dumps(value, indent=2, sort_keys=sort_keys) + "\n").encode()


def committed_in(there: Files, root: str) -> tuple[list[Checkpoint], dict[str, int]]:
    """Return the complete checkpoints at most two folders below the folder ``root``, oldest first, and the size of each
    file there."""
    sizes = {key[len(f"{root}/".lstrip("/")) :]: size for key, size in there.list(root).items()}

    def look(folder: str) -> Checkpoint | None:
        key, match = f"{root}/{folder}".strip("/"), _CHECKPOINT.fullmatch(folder)
        with contextlib.suppress(FileNotFoundError, ValueError, TypeError):
            commit = json_loads(there.read(f"{key}/{COMMIT}"))
            # The name of the folder counts, also if the file has another one.
            item = Checkpoint.of({**commit, **match.groupdict()} if match else commit, key)
            if item.missing(lambda path: sizes.get(f"{folder}/{path}".lstrip("/"))) is None:
                return item
        return None

    pairs = (name.rpartition("/") for name in sizes)
    folders = [folder for folder, _, name in pairs if name == COMMIT and folder.count("/") < 2]
    return sorted(filter(None, parallel(look, folders)), key=lambda item: item.order), sizes


def _placed(item: Input, url: str, file: str | None) -> LayoutInput:
    return LayoutInput(url=url, file=file, mode=item.mode, shard=item.shard)


def copied_input_url(run: str, name: str, file: str | None) -> str:
    """Return the URL of the copy of input ``name`` in the folder ``run``. No other key begins like its folder's."""
    return f"{run}/inputs/{name}/data" + (f"/{file}" if file else "")


def existing_path(path: Path, where: str) -> Path:
    """Return ``path``. Raises `SpecError` with the field ``where`` if nothing is there."""
    if os.path.exists(path):  # also False for an impossible name
        return path
    siblings = os.listdir(path.parent) if os.path.isdir(path.parent) else []
    raise SpecError(f"there is no {path}", field=where, hint=did_you_mean(path.name, siblings))


_RUN_RECORD: dict[str, tuple[type, ...]] = {"created": (int, float)}
_RUN_RECORD |= dict.fromkeys(("settings", "job", "layout", "code"), (dict,))
_RUN_RECORD |= dict.fromkeys(("run_id", "run", "provider", "job_digest", "runtime", "version"), (str,))


def _checked_run(record: dict[str, Any], needed: Iterable[str], where: str) -> dict[str, Any]:
    """Return ``record``, a run.json, if it has all of ``needed``; else `StorageError`: ``where`` is damaged."""
    lacks = next((f"it has no {name}" for name in needed if name not in record), "")
    wrong = (name for name, kinds in _RUN_RECORD.items() if name in record and type(record[name]) not in kinds)
    if why := lacks or next((f"its {name} is a {type(record[name]).__name__}" for name in wrong), ""):
        raise StorageError(f"{where} is damaged: {why}")
    return record


def next_of(store: Store, run_id: str) -> dict[str, Any] | None:
    """Return the handover record: ``run``, the URL of the following run, and the ``result`` of this one; else None.

    Raises `StorageError` for a malformed record.
    """
    key = f"{run_folder(run_id)}/next.json"
    noted = store.record(key)
    if noted is not None and not (isinstance(noted.get("run"), str) and isinstance(noted.get("result"), dict)):
        raise StorageError(f"{store.url}/{key} is malformed: it names no run")
    return noted
