"""The layout of a store: where code, data and runs live below one URL, and what is written there when.

Content (code, runtime, data) lies at an address made of its own digest, so writing it twice, or from two machines at
once, changes nothing. Records (run.json, request.json) are created exclusively and never rewritten: creating one *is*
the decision, and exactly one of any number of clients gets True.

Every method that touches the store raises `AuthError` and `StorageError`, as `transfer` does.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .errors import DigestError, NotFoundError, SpecError, StorageError
from .job import Input, Job, check_run_id, nearest, url_scheme
from .provider import Layout, LayoutInput, Request
from .transfer import Progress, files, inside, local_path, normalize, parallel, safe, sha256_file, walk

__all__ = [
    "PULLED",
    "Checkpoint",
    "LocalTree",
    "PullReport",
    "Staged",
    "Store",
    "TreeFile",
    "merge_metrics",
]

PULLED = ("checkpoints", "artifacts", "logs", "metrics")
"""What `Store.pull` can fetch. What the platform wrote itself comes with artifacts; result.json and run.json always."""

_PROTOCOL = 1
_TOKEN = "created_by"
_STATE = ".cloudtrain-pull.json"
_PARTIAL = ".partial-"
_FILE_SUFFIX = re.compile(r"\.[A-Za-z][A-Za-z0-9]{0,11}$")
_ATTEMPT = re.compile(r"(\d+)\.(\d+)")
_COMMIT = re.compile(r"([^/]+)/(\d+\.\d+)-(\d+)/commit\.json")
_SEGMENT = re.compile(r"(\d+\.\d+)/(node-\d+)/(\d+)\.log")
_METRICS = re.compile(r"(\d+\.\d+)-node-(\d+)\.jsonl")
_NODE = re.compile(r"node-(\d+)/(.+)")


@dataclass(frozen=True, kw_only=True)
class TreeFile:
    """One file of a `LocalTree`: path relative to it, bytes, SHA-256, and the time of its last change when hashed."""

    path: str
    size: int
    sha256: str
    mtime_ns: int = field(default=0, compare=False)


@dataclass(frozen=True, kw_only=True)
class LocalTree:
    """Local data to upload: files below ``path``. ``digest`` covers their relative paths, sizes and contents."""

    path: Path
    digest: str
    files: tuple[TreeFile, ...]

    @property
    def bytes(self) -> int:
        return sum(item.size for item in self.files)


@dataclass(frozen=True, kw_only=True)
class Staged:
    """Bytes that `Store.stage` had to upload; copies inside the store count nothing."""

    code_bytes: int = 0
    runtime_bytes: int = 0
    data_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """One complete checkpoint. ``key`` is its folder in the store, ``files`` maps path to (bytes, SHA-256).

    ``step`` is the last whole number in ``name``, None without one. ``committed`` is Unix seconds.
    """

    name: str
    key: str
    attempt: str
    seq: int
    step: int | None
    committed: float
    files: Mapping[str, tuple[int, str]]
    bytes: int


@dataclass(frozen=True, kw_only=True)
class PullReport:
    """What a pull left in ``folder``. ``files`` are relative paths; ``transferred`` is bytes that came over now.

    ``refused`` are keys whose names could mean a place outside the folder here; they stay in the store.
    """

    folder: Path
    files: tuple[str, ...]
    transferred: int
    checkpoints: tuple[str, ...]
    refused: tuple[str, ...] = ()


class Store:
    """The store at ``url``, a path or any fsspec URL. Opens nothing until asked."""

    def __init__(self, url: str, *, cwd: Path | None = None) -> None:
        self.url = normalize(url, cwd=cwd or Path.cwd())
        self.files = files(self.url, gitignore=True)

    # ------------------------------------------------------------------------------------------------ plan: no network

    def layout(
        self,
        *,
        run_id: str,
        code_digest: str,
        runtime_digest: str,
        inputs: Mapping[str, LayoutInput] | None = None,
        resume: str | None = None,
    ) -> Layout:
        """Every URL of the run. `SpecError` for a bad run id."""
        return Layout(
            store=self.url,
            run_id=check_run_id(run_id),
            code_digest=code_digest,
            runtime_digest=runtime_digest,
            inputs=dict(inputs or {}),
            resume=resume,
        )

    def inputs(self, job: Job, schemes: frozenset[str], *, cwd: Path) -> tuple[dict[str, LayoutInput], list[LocalTree]]:
        """Where the nodes find each channel, and the local trees that must be staged for that. Reads local files only.

        A local path is used in place when nodes can read ``file`` URLs, else it gets a content address in this store.
        A remote URL is passed on verbatim; it counts as one file when its last part ends in something like ``.csv.gz``
        or ``.parquet`` (a dot, a letter, at most eleven more letters or digits) and not in ``/``.
        `SpecError` for a path that does not exist, or that no store can carry.
        """
        placed: dict[str, LayoutInput] = {}
        trees: dict[str, LocalTree] = {}
        for name, item in job.inputs.items():
            path = local_path(item.url)
            if path is None:
                placed[name] = _placed(item, item.url, _remote_file(item.url))
                continue
            path = _existing(local_path(normalize(item.url, cwd=cwd)) or path, f"inputs.{name}")
            file = path.name if path.is_file() else None
            if "file" in schemes:
                placed[name] = _placed(item, normalize(str(path), cwd=cwd), file)
                continue
            tree = _hash_tree(path, f"inputs.{name}")
            trees[tree.digest] = tree
            url = f"{self.url}/data/{tree.digest}" + (f"/{file}" if file else "")
            placed[name] = _placed(item, url, file)
        return placed, list(trees.values())

    # ----------------------------------------------------------------------------------------------------------- stage

    def stage(
        self,
        layout: Layout,
        *,
        archive: Callable[[], bytes | Path],
        pyz: bytes | Callable[[], bytes],
        trees: Sequence[LocalTree] = (),
        progress: Progress | None = None,
    ) -> Staged:
        """Upload what the store lacks; ``archive`` and ``pyz`` are called only then. Any number may do so at once.

        `StorageError` when a data file changed since it was hashed.
        """
        return Staged(
            code_bytes=self._stage(self._key(layout.code), archive, progress),
            runtime_bytes=self._stage(self._key(layout.runtime), pyz if callable(pyz) else lambda: pyz, progress),
            data_bytes=sum(self._stage_tree(tree, progress) for tree in trees),
        )

    def _stage(self, key: str, content: Callable[[], bytes | Path], progress: Progress | None) -> int:
        if self.files.exists(key):
            return 0
        data = content()
        if isinstance(data, Path):
            self.files.upload(data, key, progress=progress)
            return data.stat().st_size
        self.files.write(key, data)
        if progress:
            progress(key, len(data))
        return len(data)

    def _stage_tree(self, tree: LocalTree, progress: Progress | None) -> int:
        # Manifests lie beside the trees: inside one a script would find it, and an address that starts like the
        # tree's own would be taken along by platforms that match prefixes.
        manifest = f"data/manifests/{tree.digest}.json"
        if self.files.exists(manifest):
            return 0
        present = self.files.list(f"data/{tree.digest}")
        known = self._known_files() if self.files.copies else {}
        moved = parallel(lambda item: self._stage_file(tree, item, present, known, progress), tree.files)
        record = {item.path: {"size": item.size, "sha256": item.sha256} for item in tree.files}
        self.files.write(manifest, _dump({"protocol": _PROTOCOL, "files": record}))
        return sum(moved)

    def _stage_file(
        self,
        tree: LocalTree,
        item: TreeFile,
        present: Mapping[str, int],
        known: Mapping[tuple[int, str], str],
        progress: Progress | None,
    ) -> int:
        key = f"data/{tree.digest}/{item.path}"
        if present.get(key) == item.size:
            return 0
        if (item.size, item.sha256) in known:
            with contextlib.suppress(FileNotFoundError):  # someone cleaned up that tree
                self.files.copy(known[item.size, item.sha256], key)
                return 0
        path = tree.path / item.path
        try:
            _check_unchanged(path, item)
            self.files.upload(path, key, progress=progress)
            _check_unchanged(path, item)
        except (FileNotFoundError, DigestError) as exc:
            self.files.remove(key)
            raise StorageError(f"{path} changed while it was being staged; start again") from exc
        return item.size

    def _known_files(self) -> dict[tuple[int, str], str]:
        """Where the store already holds a content, by (bytes, SHA-256), as the manifests of all trees say."""
        known: dict[tuple[int, str], str] = {}
        names = [name for name in self.files.names("data/manifests") if name.endswith(".json")]
        for name, record in zip(names, parallel(lambda n: self._whole_json(f"data/manifests/{n}"), names), strict=True):
            listed = record.get("files") if record else None
            for path, item in listed.items() if isinstance(listed, dict) else ():
                with contextlib.suppress(TypeError, KeyError):
                    known[item["size"], item["sha256"]] = f"data/{name.removesuffix('.json')}/{path}"
        return known

    # --------------------------------------------------------------------------------------------------------- records

    def create_run(self, layout: Layout, record: Mapping[str, Any]) -> bool:
        """Write run.json; False when the run exists already, which leaves it as it is."""
        return self._create(f"{_run(layout.run_id)}/run.json", record)

    def run(self, run_id: str) -> dict[str, Any]:
        """The record given to `create_run`. `NotFoundError` names the store and the nearest run."""
        record = self._json(f"{_run(run_id)}/run.json")
        if record is None:
            raise NotFoundError(f"no run {run_id!r} in {self.url}{nearest(run_id, self.runs())}", field="run")
        record.pop(_TOKEN, None)
        return record

    def runs(self) -> list[str]:
        """Run ids, sorted: those that are dated by default oldest first."""
        return [name for name in self.files.names("runs") if _is_run_id(name)]

    def create_attempt(self, run: Layout | str, k: int, request: Request) -> bool:
        """Write request.json of attempt ``k``; False when somebody else starts, or started, that attempt."""
        run_id = run if isinstance(run, str) else run.run_id
        return self._create(f"{_run(run_id)}/attempts/{int(k)}/request.json", request.to_dict())

    def attempt_request(self, run_id: str, k: int) -> Request | None:
        """The request of attempt ``k``, None when there is no such attempt."""
        record = self._json(f"{_run(run_id)}/attempts/{int(k)}/request.json")
        if record is None:
            return None
        record.pop(_TOKEN, None)
        return Request.from_dict(record)

    def attempts(self, run_id: str) -> list[int]:
        """Numbers of the attempts that have a request, ascending."""
        keys = self.files.list(f"{_run(run_id)}/attempts")
        parts = [key.split("/")[-2:] for key in keys]
        return sorted(int(number) for number, name in parts if name == "request.json" and number.isdigit())

    def write_submitted(self, run_id: str, k: int, native_id: str) -> None:
        """Note what the platform called attempt ``k``."""
        record = {"native_id": native_id, "time": time.time()}
        self.files.write(f"{_run(run_id)}/attempts/{int(k)}/submitted.json", _dump(record))

    def submitted(self, run_id: str, k: int) -> dict[str, Any] | None:
        """``{"native_id": …, "time": …}`` of attempt ``k``, None while the platform has not accepted it."""
        return self._json(f"{_run(run_id)}/attempts/{int(k)}/submitted.json")

    def write_container(self, layout: Layout, context: Mapping[str, Any], key: bytes) -> None:
        """Write what the nodes read: context.json, and the key of the node link unless there is one already."""
        self.files.create(self._key(layout.key), key, private=True)
        self.files.write(self._key(layout.context), _dump(context))

    def cancel(self, run_id: str) -> None:
        """Forbid further attempts. Idempotent."""
        self.files.create(f"{_run(run_id)}/cancelled.json", _dump({"time": time.time()}))

    def cancelled(self, run_id: str) -> bool:
        """Whether further attempts are forbidden."""
        return self.files.exists(f"{_run(run_id)}/cancelled.json")

    def write_result(self, run_id: str, result: Mapping[str, Any]) -> None:
        """Keep how the run ended."""
        self.files.write(f"{_run(run_id)}/result.json", _dump(result))

    def result(self, run_id: str) -> dict[str, Any] | None:
        """How the run ended, None while nobody has written it."""
        return self._json(f"{_run(run_id)}/result.json")

    def exits(self, run_id: str) -> list[dict[str, Any]]:
        """The nodes' exit records in order of attempt and node; one that is not whole is left out."""
        folder = f"{_run(run_id)}/live/exit"
        names = sorted((name for name in self.files.names(folder) if name.endswith(".json")), key=_numbers)
        found = parallel(lambda name: self._whole_json(f"{folder}/{name}"), names)
        return [record for record in found if record is not None]

    def _create(self, key: str, record: Mapping[str, Any]) -> bool:
        # The token settles whose record it is when a reply was lost and a client library tried again.
        token = secrets.token_hex(16)
        if self.files.create(key, _dump({**record, _TOKEN: token})):
            return True
        stored = self._whole_json(key)
        return stored is not None and bool(stored.get(_TOKEN) == token)

    def _json(self, key: str) -> dict[str, Any] | None:
        """The JSON object at ``key``, None when there is none; `StorageError` when it is something else."""
        try:
            value = json.loads(self.files.read(key))
        except FileNotFoundError:
            return None
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise StorageError(f"{self.url}/{key} is not a JSON object")
        return value

    def _whole_json(self, key: str) -> dict[str, Any] | None:
        """The JSON object at ``key``; None too when it is broken, as a writer that was killed leaves it."""
        try:
            value = json.loads(self.files.read(key))
        except (FileNotFoundError, ValueError):
            return None
        return value if isinstance(value, dict) else None

    def _key(self, url: str) -> str:
        if not url.startswith(self.url + "/"):
            raise StorageError(f"{url} is not in the store {self.url}")
        return url[len(self.url) + 1 :]

    # ----------------------------------------------------------------------------------------------------- checkpoints

    def checkpoints(self, run_id: str) -> list[Checkpoint]:
        """The complete checkpoints, oldest first. Complete: every file that commit.json lists is there in its size."""
        root = f"{_run(run_id)}/live/checkpoints"
        sizes = {key[len(root) + 1 :]: size for key, size in self.files.list(root).items()}
        matches = [match for name in sizes if (match := _COMMIT.fullmatch(name))]
        commits = parallel(lambda match: self._whole_json(f"{root}/{match[0]}"), matches)
        found = [_checkpoint(root, match, commit, sizes) for match, commit in zip(matches, commits, strict=True)]
        return sorted((item for item in found if item), key=_age)

    def newest_checkpoint(self, run_id: str) -> Checkpoint | None:
        """The last of `checkpoints`."""
        found = self.checkpoints(run_id)
        return found[-1] if found else None

    # ------------------------------------------------------------------------------------------------------------ pull

    def pull(
        self,
        run_id: str,
        folder: Path,
        *,
        what: Iterable[str] = PULLED,
        progress: Progress | None = None,
    ) -> PullReport:
        """Bring the run's results into ``folder``, and nothing that is there already and right.

        Checkpoints are the newest complete one of each name, all nodes' files together, checked against their digests.
        A file that two nodes wrote differently is kept under ``node-<n>/`` for the later one. A checkpoint that is not
        yet here appears whole or not at all. `NotFoundError` for an unknown run; `DigestError` for damaged content,
        which is not kept.
        """
        wanted = tuple(what)
        for word in wanted:
            if word not in PULLED:
                raise SpecError(f"{word!r} is none of {', '.join(PULLED)}{nearest(word, PULLED)}", field="what")
        self.run(run_id)
        pull = _Pull(store=self, run_id=run_id, folder=folder, progress=progress)
        try:
            for word in PULLED:
                if word in wanted:
                    getattr(pull, word)()
            pull.records()
        finally:
            pull.remember()
        return pull.report()


# ------------------------------------------------------------------------------------------------------ pieces of Store


def _run(run_id: str) -> str:
    return f"runs/{check_run_id(run_id)}"


def _is_run_id(name: str) -> bool:
    try:
        return bool(check_run_id(name))
    except SpecError:
        return False


def _dump(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, sort_keys=True) + "\n").encode()


def _numbers(name: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", name)]


def _placed(item: Input, url: str, file: str | None) -> LayoutInput:
    return LayoutInput(url=url, file=file, mode=item.mode, shard=item.shard)


def _remote_file(url: str) -> str | None:
    if "://" not in url or url.endswith("/") or url_scheme(url) == "":
        return None
    bucket, slash, path = url.split("://", 1)[1].partition("/")
    name = path.partition("?")[0].rsplit("/", 1)[-1]
    return name if slash and bucket and _FILE_SUFFIX.search(name) else None


def _existing(path: Path, where: str) -> Path:
    if path.exists():
        return path
    siblings = os.listdir(path.parent) if path.parent.is_dir() else []
    raise SpecError(f"there is no {path}{nearest(path.name, siblings)}", field=where)


def _hash_tree(path: Path, where: str) -> LocalTree:
    try:
        found = walk(path)
        hashed = tuple(parallel(lambda name: _hash_file(name, found[name]), list(found)))
    except StorageError as exc:
        raise SpecError(str(exc), field=where) from exc
    if not hashed:
        raise SpecError(f"{path} holds no file", field=where)
    lines = json.dumps([[item.path, item.size, item.sha256] for item in hashed], separators=(",", ":"))
    root = path.parent if path.is_file() else path
    return LocalTree(path=root, digest=hashlib.sha256(lines.encode()).hexdigest(), files=hashed)


def _hash_file(name: str, path: Path) -> TreeFile:
    before = path.stat()
    digest = sha256_file(path)
    return TreeFile(path=name, size=before.st_size, sha256=digest, mtime_ns=before.st_mtime_ns)


def _check_unchanged(path: Path, item: TreeFile) -> None:
    status = path.stat()
    if (status.st_size, status.st_mtime_ns) != (item.size, item.mtime_ns):
        raise DigestError(f"{path} changed")


def _checkpoint(
    root: str, match: re.Match[str], commit: Mapping[str, Any] | None, sizes: Mapping[str, int]
) -> Checkpoint | None:
    """The checkpoint of one commit.json, None when it is not complete."""
    folder, name = match[0].rpartition("/")[0], match[1]
    try:
        if commit is None or commit["protocol"] != _PROTOCOL:
            return None
        listed = {path: (int(item["size"]), str(item["sha256"])) for path, item in commit["files"].items()}
        committed = float(commit["time"])
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
    if any(sizes.get(f"{folder}/{path}") != size for path, (size, _) in listed.items()):
        return None
    numbers = _numbers(name)
    return Checkpoint(
        name=name,
        key=f"{root}/{folder}",
        attempt=match[2],
        seq=int(match[3]),
        step=numbers[-1] if numbers else None,
        committed=committed,
        files=listed,
        bytes=sum(size for size, _ in listed.values()),
    )


def _age(item: Checkpoint) -> tuple[list[int], float, int, str]:
    return (_numbers(item.attempt), item.committed, item.seq, item.name)


def merge_metrics(attempts: Iterable[Iterable[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """The rows of all attempts, given oldest first, as one history.

    An attempt replaces the earlier rows from its own first step on; rows without a step stay where they are.
    """
    merged: list[dict[str, Any]] = []
    for attempt in attempts:
        rows = [dict(row) for row in attempt]
        steps = [step for row in rows if (step := _step(row)) is not None]
        first = min(steps, default=float("inf"))
        merged = [row for row in merged if (step := _step(row)) is None or step < first] + rows
    return merged


def _step(row: Mapping[str, Any]) -> float | None:
    step = row.get("step")
    return step if isinstance(step, (int, float)) and not isinstance(step, bool) else None


def _rows(data: bytes) -> list[dict[str, Any]]:
    """The JSON objects of JSON Lines; a line that is none (the last of a killed process) is left out."""
    rows: list[dict[str, Any]] = []
    for line in data.splitlines():
        with contextlib.suppress(ValueError):
            row = json.loads(line)
            if isinstance(row, dict):
                rows.append(row)
    return rows


# ----------------------------------------------------------------------------------------------------------------- pull

#: What one local file was made of: [key, bytes, version or SHA-256] each. JSON, so a list.
_Sources = list[list[Any]]


@dataclass(frozen=True, kw_only=True)
class _Source:
    key: str
    size: int
    mark: str
    sha256: str | None = None

    @property
    def json(self) -> list[Any]:
        return [self.key, self.size, self.mark]


class _Pull:
    """One pull of one run. What was fetched from where is remembered in the folder, by relative path.

    A remembered file is right when it still has the digest it had then and its sources are still the same.
    """

    def __init__(self, *, store: Store, run_id: str, folder: Path, progress: Progress | None) -> None:
        self.store, self.files, self.progress = store, store.files, progress
        self.run = _run(run_id)
        self.folder = Path(os.path.abspath(folder))
        self.out = files(str(self.folder), gitignore=True)
        self.out.create(".gitignore", b"*\n")
        self.lock = threading.Lock()
        self.moved = 0
        self.placed: set[str] = set()
        self.names: list[str] = []
        self.refused: list[str] = []
        self.origin = f"{store.url}/{self.run}"
        self.known: dict[str, dict[str, Any]] = self._remembered()

    # ---------------------------------------------------------------------------------------------------- what to pull

    def checkpoints(self) -> None:
        newest = {item.name: item for item in self.store.checkpoints(self.run.removeprefix("runs/"))}
        for name, item in newest.items():
            self._checkpoint(name, _merge_nodes(item))
            self.names.append(name)

    def artifacts(self) -> None:
        groups: dict[str, list[tuple[int, _Source]]] = {}
        for name, source in self._below("live/artifacts"):
            match = _NODE.fullmatch(name)
            node, path = (int(match[1]), match[2]) if match else (-1, name)
            groups.setdefault(path, []).append((node, source))
        parallel(lambda path: self._artifact(path, sorted(groups[path], key=lambda pair: pair[0])), list(groups))
        parallel(lambda pair: self._fetch(f"native/{pair[0]}", pair[1]), self._below("native"))

    def logs(self) -> None:
        groups: dict[str, list[tuple[int, _Source]]] = {}
        for name, source in self._below("live/logs"):
            if match := _SEGMENT.fullmatch(name):
                groups.setdefault(f"logs/{match[1]}/{match[2]}.log", []).append((int(match[3]), source))
        for path, segments in groups.items():
            self._log(path, [source for _, source in sorted(segments, key=lambda pair: pair[0])])

    def metrics(self) -> None:
        found = [
            ((*_numbers(match[1]), int(match[2])), source)
            for name, source in self._below("live/metrics")
            if (match := _METRICS.fullmatch(name))
        ]
        found.sort(key=lambda pair: pair[0])
        sources = [source for _, source in found]
        if not found or self._fresh("metrics.jsonl", sources):
            return
        attempts: dict[tuple[int, ...], list[dict[str, Any]]] = {}
        for (*attempt, _node), source in found:
            attempts.setdefault(tuple(attempt), []).extend(_rows(self._read(source)))
        text = "".join(json.dumps(row) + "\n" for row in merge_metrics(attempts.values()))
        self._write("metrics.jsonl", text.encode(), sources)

    def records(self) -> None:
        for name in ("run.json", "result.json"):
            size = self.files.size(f"{self.run}/{name}")
            if size is None:
                continue
            data = self.files.read(f"{self.run}/{name}")
            source = _Source(key=f"{self.run}/{name}", size=len(data), mark=hashlib.sha256(data).hexdigest())
            if not self._fresh(name, [source]):
                self._count(source.key, len(data))
                self._write(name, data, [source])

    # ------------------------------------------------------------------------------------------------------ how to pull

    def _below(self, prefix: str) -> list[tuple[str, _Source]]:
        root = f"{self.run}/{prefix}"
        found = []
        for key, entry in self.files.entries(root).items():
            name = key[len(root) + 1 :]
            if safe(name):
                found.append((name, _Source(key=key, size=entry.size, mark=entry.version)))
            else:
                self.refused.append(key)
        return found

    def _checkpoint(self, name: str, parts: Mapping[str, _Source]) -> None:
        """Fetch one checkpoint: below a name of its own while it is new, then under its right one."""
        final, folder = f"checkpoints/{name}", f"checkpoints/{_PARTIAL}{name}"
        new = not os.path.lexists(inside(self.folder, final))

        def place(path: str) -> str:
            return folder + path[len(name) :] if new and path.startswith(f"{name}/") else f"checkpoints/{path}"

        for path in parts:
            inside(self.folder, place(path))
        before = {path for path in self.known if path.startswith(final + "/")}
        parallel(lambda path: self._fetch(place(path), parts[path], f"checkpoints/{path}"), list(parts))
        if new and inside(self.folder, folder).is_dir():
            os.replace(inside(self.folder, folder), inside(self.folder, final))
        for stale in before - {f"checkpoints/{path}" for path in parts}:
            self._drop(stale)

    def _artifact(self, path: str, versions: Sequence[tuple[int, _Source]]) -> None:
        """Fetch one path of all nodes; the same content is kept once."""
        first = f"artifacts/{path}"
        same = self.known.get(first, {}).get("same", [])  # sources that were found equal, and to which digest
        self._fetch(first, versions[0][1])
        kept = self.known[first]
        kept["same"] = same
        for node, source in versions[1:]:
            if [*source.json, kept["sha256"]] in same:
                continue
            other = f"artifacts/node-{node}/{path}"
            self._fetch(other, source)
            if self.known[other]["sha256"] == kept["sha256"]:
                self._drop(other)
                same.append([*source.json, kept["sha256"]])

    def _log(self, path: str, segments: Sequence[_Source]) -> None:
        """Join the segments; those that have not changed since the last pull are taken from the local file."""
        if self._fresh(path, segments):
            return
        old: _Sources = self.known.get(path, {}).get("sources", [])
        same = 0
        if self._intact(path):
            while same < min(len(old), len(segments)) and old[same] == segments[same].json:
                same += 1
        head = self.out.read(path)[: sum(source.size for source in segments[:same])] if same else b""
        pieces = parallel(self._read, segments[same:])
        # A segment that grew since it was listed is not cut: its size is what it was read with.
        read = [_Source(key=s.key, size=len(d), mark=s.mark) for s, d in zip(segments[same:], pieces, strict=True)]
        self._write(path, head + b"".join(pieces), [*segments[:same], *read])

    def _fetch(self, place: str, source: _Source, path: str | None = None) -> None:
        """Bring one file to ``place``; it is remembered as ``path``, where it will end up."""
        path = path or place
        target = inside(self.folder, place)
        if place == path and self._fresh(path, [source]):
            return
        if not self._already(target, source):
            self.files.download(source.key, target, sha256=source.sha256, size=source.size, progress=self._count)
        self._remember(path, [source], source.sha256 or sha256_file(target), source.size)

    def _already(self, target: Path, source: _Source) -> bool:
        if source.sha256 is None or target.is_symlink() or not target.is_file():
            return False
        return target.stat().st_size == source.size and sha256_file(target) == source.sha256

    def _read(self, source: _Source) -> bytes:
        data = self.files.read(source.key)
        self._count(source.key, len(data))
        return data

    def _write(self, path: str, data: bytes, sources: Sequence[_Source]) -> None:
        inside(self.folder, path)
        self.out.write(path, data)
        self._remember(path, sources, hashlib.sha256(data).hexdigest(), len(data))

    def _drop(self, path: str) -> None:
        """Remove a file that an earlier pull brought, unless somebody changed it."""
        if self._intact(path):
            self.out.remove(path)
        with self.lock:
            self.known.pop(path, None)
            self.placed.discard(path)

    def _fresh(self, path: str, sources: Sequence[_Source]) -> bool:
        known = self.known.get(path)
        if known is None or known["sources"] != [source.json for source in sources] or not self._intact(path):
            return False
        with self.lock:
            self.placed.add(path)
        return True

    def _intact(self, path: str) -> bool:
        known, target = self.known.get(path), inside(self.folder, path)
        if known is None or target.is_symlink() or not target.is_file():
            return False
        return bool(target.stat().st_size == known["size"] and sha256_file(target) == known["sha256"])

    # --------------------------------------------------------------------------------------------------------- memory

    def _count(self, key: str, more: int) -> None:
        with self.lock:
            self.moved += more
        if self.progress:
            self.progress(key, more)

    def _remember(self, path: str, sources: Sequence[_Source], sha256: str, size: int) -> None:
        with self.lock:
            self.known[path] = {"sources": [source.json for source in sources], "sha256": sha256, "size": size}
            self.placed.add(path)

    def _remembered(self) -> dict[str, dict[str, Any]]:
        try:
            state = json.loads(self.out.read(_STATE))
            known = dict(state["files"]) if state["run"] == self.origin else {}
            return {path: item for path, item in known.items() if {"sources", "sha256", "size"} <= set(item)}
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return {}

    def remember(self) -> None:
        """Write down what is here, also after a failure: what did arrive is not fetched again."""
        self.out.write(_STATE, _dump({"run": self.origin, "files": self.known}))

    def report(self) -> PullReport:
        """What this pull found or made right."""
        return PullReport(
            folder=self.folder,
            files=tuple(sorted(self.placed)),
            transferred=self.moved,
            checkpoints=tuple(self.names),
            refused=tuple(self.refused),
        )


def _merge_nodes(item: Checkpoint) -> dict[str, _Source]:
    """Where each file of a checkpoint goes, relative to the folder of checkpoints; all nodes' files as one tree."""
    placed: dict[str, _Source] = {}
    nodes = {path: _NODE.fullmatch(path) for path in item.files}
    for path in sorted(item.files, key=lambda p: (int(match[1]) if (match := nodes[p]) else -1, p)):
        size, digest = item.files[path]
        match = nodes[path]
        node, rest = (match[1], match[2]) if match else ("0", path)
        source = _Source(key=f"{item.key}/{path}", size=size, mark=digest, sha256=digest)
        target = _in_checkpoint(item.name, rest)
        while target in placed and placed[target].sha256 != digest:
            rest = f"node-{node}/{rest.removeprefix(item.name + '/')}"
            target = _in_checkpoint(item.name, rest) if "/" in target else rest
        placed.setdefault(target, source)
    return placed


def _in_checkpoint(name: str, path: str) -> str:
    """``path`` below the checkpoint ``name``: nodes list their files with the name in front."""
    return path if path == name or path.startswith(f"{name}/") else f"{name}/{path}"
