"""Script a job of `cloudtrain.testing.fake_cloud` instead of running it: its outcome, and its nodes' files.

The files are written where nodes write them and in their form (docs/internals.md, the run folder). So every reader of a
run reads this one: status, result, logs, pull, a further attempt's checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import CloudtrainError, SpecError
from ..provider_api.protocol import AttemptInfo, LogLine
from ..runtime.cause import Failure, category, failure_line
from ..runtime.checkpoint_names import step_of
from ..store.store import Store

__all__ = ["Checkpoints", "Files", "Left", "Outcome", "failed", "write"]

Bytes = bytes | str
Files = Mapping[str, Bytes]
"""Content by path."""
Checkpoints = Mapping[str, Files | Bytes]
"""The files of each checkpoint by its name, or the content of its one file."""


@dataclass(frozen=True)
class Left:
    """Files of an attempt: lines of node 0's rank 0, rows of metrics, artifacts and checkpoints."""

    logs: Sequence[str] = ()
    metrics: Sequence[Mapping[str, Any]] = ()
    artifacts: Files | None = None
    checkpoints: Checkpoints | None = None

    def __post_init__(self) -> None:
        if isinstance(self.logs, (str, bytes)) or any("\n" in line for line in self.logs):
            raise SpecError("must be a list of lines, each without its end", field="logs")
        if isinstance(self.metrics, Mapping):
            raise SpecError("must be a list of rows, not one row", field="metrics")
        for name in (*(self.checkpoints or ()), *(self.artifacts or ())):
            if not name or name.startswith("/") or ".." in name.split("/"):
                raise SpecError(f"must be a name or a relative path, not {name!r}", field="checkpoints or artifacts")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """End of one attempt. ``kind``: succeeded, failed, preempted, refused (sending raises ``error``), or held: it stays
    in ``state`` until the test cancels or releases it.

    ``failure`` is a rank's failure. Without it the platform itself reports ``category`` and ``reason``.
    """

    kind: str = "succeeded"
    category: str = ""
    reason: str = ""
    failure: Failure | None = None
    error: CloudtrainError | None = None
    state: str = "running"
    left: Left = Left()


def failed(exception: BaseException | str, *, node: int, rank: int, kind: str, left: Left) -> Outcome:
    """Return the outcome of an attempt whose rank raised ``exception``, or failed with that text. ``kind`` is its
    category; if it is empty, the runtime's own."""
    text, trace, file, line = str(exception), "", None, None
    if isinstance(exception, BaseException):
        text = f"{type(exception).__name__}: {exception}"
        trace = "".join(traceback.format_exception(exception))
        if frames := traceback.extract_tb(exception.__traceback__):
            file, line = frames[-1].filename.replace("\\", "/").rpartition("/")[2], frames[-1].lineno
    failure = Failure(
        kind="error",
        node=node,
        rank=rank,
        time_ns=time.time_ns(),
        exception=text,
        file=file,
        line=line,
        traceback=trace or text,
        code=1,
        category=kind,
    )
    return Outcome(kind="failed", category=category(failure), reason=failure_line(failure), failure=failure, left=left)


def write(
    store: Store, run_id: str, number: str, outcome: Outcome, *, nodes: int, before: str, started: float
) -> tuple[AttemptInfo, list[LogLine]]:
    """Write the files of attempt ``number`` (``k.r``) of ``nodes`` nodes. Return the attempt, and the platform's log.

    ``before`` is the attempt that it follows, empty for the first; ``started`` is in Unix seconds.
    """
    live, left, now = f"runs/{run_id}/live", outcome.left, time.time()
    newest = store.newest_checkpoint(run_id)
    resumed = newest.name if newest is not None else ""
    lost = _lost(store, run_id, before, resumed) if before else None
    start = {"protocol": 1, "attempt": number, "started": started, "after": before or None}
    _json(store, f"{live}/attempts/{number}.json", {**start, "resumed_from": resumed, "direct": False, "lost": lost})
    for path, data in (left.artifacts or {}).items():
        store.files.write(f"{live}/artifacts/node-0/{path}", _bytes(data))
    for seq, (name, content) in enumerate((left.checkpoints or {}).items(), 1):
        _checkpoint(store, f"{live}/checkpoints/{name}/{number}-{seq}", name, content, number, seq)
    if left.metrics:
        rows = "".join(json.dumps({"time": now, **row}) + "\n" for row in left.metrics)
        store.files.write(f"{live}/metrics/{number}-node-0.jsonl", rows.encode())
    lines = [f"[a{number} n0 r0 #{count}] {text}" for count, text in enumerate(left.logs, 1)]
    if lines:
        store.files.write(f"{live}/logs/{number}/node-0/1.log", "".join(f"{line}\n" for line in lines).encode())
    if outcome.kind != "held" and (outcome.kind != "failed" or outcome.failure is not None):
        # If the platform decides (no capacity, say), no node ever writes one.
        for node in range(nodes):
            record = _exit_record(outcome, number, node, started, resumed, len(lines))
            _json(store, f"{live}/exit/{number}-node-{node}.json", record)
    info = AttemptInfo(
        number=number,
        started=started,
        ended=None if outcome.kind == "held" else now,
        reason=outcome.reason,
        category=outcome.category,
        resumed_from=resumed,
    )
    return info, [LogLine(node="0", text=text, time=now, id=f"{number}:{i}") for i, text in enumerate(lines)]


def _exit_record(outcome: Outcome, number: str, node: int, started: float, resumed: str, lines: int) -> dict[str, Any]:
    """Return one node's record. Node 0 decides, so its record says how all ended."""
    record = {
        "protocol": 1,
        "attempt": number,
        "node": node,
        "outcome": outcome.kind if node == 0 or outcome.kind != "failed" else "stopped",
        "category": "",
        "reason": "",
        "failure": None,
        "started": started,
        "ended": time.time(),
        "lines": lines if node == 0 else 0,
        "resumed_from": resumed,
        "told": 0 if outcome.kind == "preempted" else None,
        "remarks": [],
        "decided": node == 0,
    }
    if node == 0:
        failure = outcome.failure.public() if outcome.failure is not None else None
        record.update(category=outcome.category, reason=outcome.reason, failure=failure)
    return record


def _checkpoint(store: Store, folder: str, name: str, content: Files | Bytes, attempt: str, seq: int) -> None:
    files = {f"{name}/{p}": d for p, d in content.items()} if isinstance(content, Mapping) else {name: content}
    listed = {}
    for path, data in files.items():
        store.files.write(f"{folder}/node-0/{path}", _bytes(data))
        listed[f"node-0/{path}"] = {"size": len(_bytes(data)), "sha256": hashlib.sha256(_bytes(data)).hexdigest()}
    now = time.time()
    commit = {"protocol": 1, "name": name, "place": None, "attempt": attempt, "seq": seq, "nodes": 1}
    _json(store, f"{folder}/commit.json", {**commit, "saved": now, "time": now, "files": listed})


def _lost(store: Store, run_id: str, before: str, resumed: str) -> dict[str, float | None]:
    """Return the work of the attempt ``before`` to be redone, by its metrics and the checkpoint's name. No seconds: a
    scripted attempt takes none."""
    try:
        text = store.files.read(f"runs/{run_id}/live/metrics/{before}-node-0.jsonl").decode()
    except FileNotFoundError:
        text = ""
    steps = [row["step"] for row in map(json.loads, text.splitlines()) if isinstance(row.get("step"), int)]
    step = step_of(resumed)
    if not steps or (resumed and step is None):
        return {"seconds": None, "steps": None}
    return {"seconds": None, "steps": max(0, steps[-1] - (step if step is not None else steps[0] - 1))}


def _bytes(data: Bytes) -> bytes:
    return data.encode() if isinstance(data, str) else bytes(data)


def _json(store: Store, key: str, record: Mapping[str, Any]) -> None:
    store.files.write(key, json.dumps(record).encode())
