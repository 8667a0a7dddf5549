"""Read the tasks' logs: the API answers with the newest 5 MB of each, and the cursor counts the bytes already given.

Between two reads of a fast log more than that may pass. The store then has the lines that are missing here.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ...errors import NotFoundError
from ...provider_api.protocol import LogLine, LogPage

if TYPE_CHECKING:
    from .api import Account

LOOK = 3.0
"""Seconds between two reads while a log may still grow after its job's end."""


def page(account: Account, native_id: str, cursor: Any) -> LogPage:
    """Return the next lines. ``cursor`` holds the bytes given of each task, and the number of waits for the end."""
    state: dict[str, Any] = {"given": {}, "waits": 0, **(cursor or {})}
    job = account.describe(native_id)
    tasks = [str(task) for task in (job.get("status") or {}).get("tasks") or ()]
    given, lines = dict(state["given"]), list[LogLine]()
    final = native_id in account.ended
    left = account.settings.log_drain - (time.monotonic() - account.ended[native_id]) if final else 0.0
    for task in tasks:
        try:
            answer = account.log(native_id, task)
        except NotFoundError:  # no line yet
            continue
        given[task] = _take(answer, task, int(given.get(task, 0)), lines, whole=final and left <= 0)
    waits = state["waits"]
    if left > 0 and not lines:
        waits += 1
        time.sleep(min(left, LOOK))
    return LogPage(lines=tuple(lines), cursor={"given": given, "waits": waits}, more=left > 0)


def _take(answer: Mapping[str, Any], task: str, given: int, lines: list[LogLine], *, whole: bool) -> int:
    """Append a task's new lines, and return the bytes given now. A last line without an end waits until ``whole``."""
    data = str(answer.get("content") or "").encode()
    full = int(answer.get("full_size") or len(data))
    start = full - len(data)
    if full < given:  # the log of a new placement
        given = 0
    at = max(given, start)
    new = data[at - start :]
    if at > given and b"\n" in new:  # the part begins within a line
        at += new.index(b"\n") + 1
        new = new[new.index(b"\n") + 1 :]
    kept = new if whole else new[: new.rfind(b"\n") + 1]
    for line in kept.splitlines(keepends=True):
        text = line.decode("utf-8", "replace").rstrip("\r\n")
        lines.append(LogLine(node=task.removeprefix("worker-"), text=text, id=f"{task}:{at}"))
        at += len(line)
    return at
