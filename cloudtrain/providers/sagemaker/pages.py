"""A job's lines out of CloudWatch Logs, page by page.

Events may come late, twice, or out of order, and a stream (one for each start of a node) may begin at any time. So each
pass reads again what is younger than the newest event less `OVERLAP`, and the cursor knows which of those were given.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ...errors import NotFoundError, SpecError
from ...provider import LogLine, LogPage
from .account import job_of

if TYPE_CHECKING:
    from .account import Account

__all__ = ["page"]

GROUP = "/aws/sagemaker/TrainingJobs"
OVERLAP = 120_000
"""Milliseconds: how late an event may come and still be found. Of later ones, numbered lines are found in the store."""
_HOST = re.compile(r"/algo-(\d+)")


def page(account: Account, native_id: str, cursor: Any) -> LogPage:
    """The next page. ``cursor``: where this pass began, its token, the newest time, and the ids given since then."""
    region, name = job_of(native_id)
    state: Mapping[str, Any] = cursor or {"from": 0, "token": "", "newest": 0, "given": []}
    arguments: dict[str, Any] = {"nextToken": state["token"]} if state["token"] else {}
    try:
        answer = _filtered(account, region, name, state["from"], arguments)
    except NotFoundError:
        answer = {"events": []}  # the group comes with the account's first job
    except SpecError:
        if not arguments:
            raise
        state = {**state, "from": max(state["from"], state["newest"] - OVERLAP)}  # the token is older than a day
        answer = _filtered(account, region, name, state["from"], {})
    lines, given, newest = [], dict(state["given"]), state["newest"]
    for event in answer["events"]:
        if not event["logStreamName"].startswith(f"{name}/"):
            continue
        key, when = _key(event), int(event["timestamp"])
        if key not in given:
            given[key] = when
            newest = max(newest, when)
            lines.append(_line(event, key))
    token = answer.get("nextToken") or ""
    if cursor is None and not lines and not token:
        account.describe(native_id)  # an unknown job has no lines either, and must not look like one that is silent
    kept = max(0, newest - OVERLAP)
    again = [[key, when] for key, when in given.items() if when >= kept]
    after = {"from": state["from"] if token else kept, "token": token, "newest": newest, "given": again}
    return LogPage(lines=tuple(lines), cursor=after, more=bool(token))


def _filtered(account: Account, region: str, name: str, begin: int, more: Mapping[str, Any]) -> Any:
    return account.call(
        "logs",
        "filter_log_events",
        region=region,
        logGroupName=GROUP,
        logStreamNamePrefix=f"{name}/",
        startTime=begin,
        **more,
    )


def _key(event: Mapping[str, Any]) -> str:
    """Short, since a cursor holds many."""
    own = event.get("eventId") or f"{event['logStreamName']}\0{event['timestamp']}\0{event['message']}"
    return hashlib.blake2s(str(own).encode(), digest_size=8).hexdigest()


def _line(event: Mapping[str, Any], key: str) -> LogLine:
    host = _HOST.search(event["logStreamName"])
    return LogLine(
        node=str(int(host[1]) - 1) if host else event["logStreamName"].rpartition("/")[2],
        text=event["message"].rstrip("\r\n"),
        time=event["timestamp"] / 1000,
        id=key,
    )
