"""Read a job's lines from Cloud Logging, page by page.

Entries come late, twice, and out of order. So each pass reads again from the newest entry less `OVERLAP`, and the
cursor holds the entries already given.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from ...errors import CloudtrainError, LostContactError, SpecError
from ...provider_api.protocol import LogLine, LogPage
from ...validate import unix_seconds
from .._cloud import short_key
from .api import READ, endpoint, job_of

if TYPE_CHECKING:
    from .api import Account

PAGE_SIZE = 1000
"""Most entries of one answer."""
OVERLAP = 60 * 1_000_000_000
"""Nanoseconds that an entry may be late. The store has later lines, if they are numbered."""
LOOK = 6.0
"""Seconds between two reads while a log may still grow after its job's end, and between two checks for that end."""
HELD = 60.0
"""Seconds of retries of a refused log once its job is over: there is no later time."""
SHARED = (
    "Cloud Logging takes 60 reads a minute for a project, and everyone who follows a log of it shares them; "
    "cloudtrain reads on as soon as it may"
)
"""Source: Cloud Logging's page on quotas."""
_REPLICA = re.compile(r"workerpool(\d+)-(\d+)")


def page(account: Account, native_id: str, cursor: Any) -> LogPage:
    """Return the next page. ``cursor``: this pass's start, its token, the newest time (Unix nanoseconds), the ids given
    since then, and the number of waits for the end."""
    state: Mapping[str, Any] = cursor or {
        "from": _nanos(account.describe(native_id)["createTime"]), "token": "", "newest": 0, "given": [], "waits": 0
    }  # fmt: skip
    final = _over(account, native_id)
    try:
        answer = _entries(account, native_id, state, final=final)
    except SpecError:
        if not state["token"]:
            raise
        begin = max(state["from"], state["newest"] - OVERLAP)  # the token has expired
        state = {**state, "from": begin, "token": ""}
        answer = _entries(account, native_id, state, final=final)
    lines, given, newest = [], dict(state["given"]), state["newest"]
    for entry in answer.get("entries") or ():
        own = f"{entry['timestamp']}\0{entry.get('insertId')}\0{entry.get('logName')}"  # Logging's own identity
        key, when = short_key(own), _nanos(entry["timestamp"])
        if key not in given:
            given[key] = when
            newest = max(newest, when)
            lines.append(_line(entry, key, when))
    token, waits = answer.get("nextPageToken") or "", state["waits"]
    left = account.settings.log_drain - (time.monotonic() - account.ended[native_id]) if final else 0.0
    if left > 0 and not token:
        waits += 1
        time.sleep(min(left, LOOK))
    kept = max(state["from"], newest - OVERLAP)
    again = [[key, when] for key, when in given.items() if when >= kept]
    begin = state["from"] if token else kept
    after = {"from": begin, "token": token, "newest": newest, "given": again, "waits": waits}
    return LogPage(lines=tuple(lines), cursor=after, more=bool(token) or left > 0)


def _over(account: Account, native_id: str) -> bool:
    """Return True if the job has ended. This asks too: the run's records may hold the end, so no other call asks."""
    if native_id not in account.ended and time.monotonic() - account.alive.get(native_id, float("-inf")) >= LOOK:
        with contextlib.suppress(CloudtrainError):  # the log may still answer
            account.describe(native_id)
    return native_id in account.ended


def _entries(account: Account, native_id: str, state: Mapping[str, Any], *, final: bool) -> dict[str, Any]:
    """Return one answer. If the job is over (``final``), retry for `HELD` seconds."""
    _, _, number = job_of(native_id)  # its project is a number; Cloud Logging documents the project's id
    clauses = ('resource.type="ml_job"', f'resource.labels.job_id="{number}"', f'timestamp>="{_stamp(state["from"])}"')
    body: dict[str, Any] = {
        "resourceNames": [f"projects/{account.settings.project}"],
        "filter": " AND ".join(clauses),
        "orderBy": "timestamp asc",
        "pageSize": PAGE_SIZE,
        **({"pageToken": state["token"]} if state["token"] else {}),
    }
    url, end = f"{endpoint('logging')}/v2/entries:list", time.monotonic() + HELD
    while True:
        try:
            return account.call("logging", "POST", url, what=READ, body=body)
        except LostContactError as exc:
            held = account.backoff.left("logging")
            wait = max(held, 1.0)
            if not final or time.monotonic() + wait > end:
                raise (LostContactError(f"{exc}: {SHARED}", throttled=True) if held > 0 else exc) from None
            time.sleep(wait)


def _line(entry: Mapping[str, Any], key: str, when: int) -> LogLine:
    labels = (entry.get("resource") or {}).get("labels") or {}
    task = labels.get("task_name") or (entry.get("labels") or {}).get("ml.googleapis.com/task_name") or ""
    payload, text = entry.get("jsonPayload"), entry.get("textPayload")
    if isinstance(payload, Mapping):
        text = payload["message"] if "message" in payload else json.dumps(payload)
    if text is None:
        text = (entry.get("protoPayload") or {}).get("status", {}).get("message", "")
    return LogLine(node=_node(str(task)), text=str(text).rstrip("\r\n"), time=when / 1e9, id=key)


def _node(task: str) -> str:
    """Return a node's rank by its replica's name. Any other text is the service's own and is kept."""
    replica = _REPLICA.search(task)
    return str(int(replica[2]) + (int(replica[1]) > 0)) if replica else task


def _nanos(moment: str) -> int:
    """Return RFC 3339 as Unix nanoseconds."""
    seconds, _, fraction = moment.removesuffix("Z").partition(".")
    digits = re.split(r"\D", fraction)[0][:9]
    return int(unix_seconds(f"{seconds}Z")) * 1_000_000_000 + int(digits.ljust(9, "0"))


def _stamp(nanos: int) -> str:
    seconds, rest = divmod(nanos, 1_000_000_000)
    return f"{datetime.fromtimestamp(seconds, timezone.utc):%Y-%m-%dT%H:%M:%S}.{rest:09d}Z"
