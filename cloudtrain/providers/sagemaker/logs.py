"""Read a job's lines from CloudWatch Logs, page by page.

Events may come late, twice, or out of order. A stream (one for each start of a node) may begin at any time. So each
pass reads again from the newest event less `OVERLAP`, and the cursor holds the events already given.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ...errors import NotFoundError, SpecError
from ...provider_api.protocol import LogLine, LogPage
from ...validate import unix_seconds
from .._cloud import pages, short_key
from .api import job_of

if TYPE_CHECKING:
    from .api import Account

GROUP = "/aws/sagemaker/TrainingJobs"
OVERLAP = 120_000
"""Milliseconds that an event may be late. The store has later lines, if they are numbered."""
MOST_STREAMS = 100
"""Names of streams that one call takes. A prefix with more streams was refused, too (lucagrulla/cw#13)."""
_HOST = re.compile(r"/algo-(\d+)")


def page(account: Account, native_id: str, cursor: Any) -> LogPage:
    """Return the next page.

    ``cursor`` holds this pass's start, its token, the newest time, and the ids given since then. If a job has more than
    `MOST_STREAMS` streams, it also holds the streams left in this pass, and the ids given before it.
    """
    region, name = job_of(native_id)
    unknown: NotFoundError | None = None
    state: Mapping[str, Any] = cursor or {"from": 0, "token": "", "newest": 0, "given": []}
    if cursor is None:
        try:
            state = {**state, "from": _created(account.describe(native_id))}
        except NotFoundError as exc:  # its lines stay in CloudWatch after the job is deleted
            unknown = exc
    answer, state = _answer(account, region, name, state)
    given, newest, lines = dict(state["given"]), state["newest"], []
    before = given.keys() | dict(state.get("before", ())).keys()
    for event in answer["events"]:
        if not event["logStreamName"].startswith(f"{name}/"):
            continue
        own = event.get("eventId") or f"{event['logStreamName']}\0{event['timestamp']}\0{event['message']}"
        key, when = short_key(own), int(event["timestamp"])
        if key not in before and key not in given:
            given[key] = when
            newest = max(newest, when)
            lines.append(_line(event, key))
    token, streams = answer.get("nextToken") or "", state.get("streams", [])
    if not token:
        streams = streams[MOST_STREAMS:]
    more = bool(token or streams)
    if unknown is not None and not lines and not more:
        raise unknown  # it must not look like a silent job
    kept = max(0, newest - OVERLAP)
    after: dict[str, Any] = {
        "from": state["from"] if more else max(state["from"], kept),
        "token": token,
        "newest": newest,
        "given": [[key, when] for key, when in given.items() if when >= kept],
    }
    if streams:
        after |= {"streams": streams, "before": state["before"]}
    return LogPage(lines=tuple(lines), cursor=after, more=more)


def _created(job: Mapping[str, Any]) -> int:
    """Return a job's creation in Unix milliseconds, less `OVERLAP` for clocks that differ; 0 if unknown.

    Without a start CloudWatch searches all of a group's time, and gives empty pages meanwhile.
    """
    moment = job.get("CreationTime")
    return 0 if moment is None else max(0, int(unix_seconds(moment) * 1000) - OVERLAP)


def _answer(account: Account, region: str, name: str, state: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]]:
    """Return CloudWatch's answer, and the state of the call."""
    try:
        return _filtered(account, region, name, state), state
    except NotFoundError:
        return {"events": []}, state  # the account's first job creates the group
    except SpecError:
        if state["token"]:  # the token is older than a day
            begin = state["from"] if state.get("streams") else max(state["from"], state["newest"] - OVERLAP)
            return _answer(account, region, name, {**state, "token": "", "from": begin})
        if state.get("streams"):
            raise
        streams = _streams(account, region, name)
        if len(streams) <= MOST_STREAMS:
            raise
        state = {**state, "streams": streams, "before": state["given"]}
        return _filtered(account, region, name, state), state


def _filtered(account: Account, region: str, name: str, state: Mapping[str, Any]) -> Any:
    streams = state.get("streams")
    which = {"logStreamNames": streams[:MOST_STREAMS]} if streams else {"logStreamNamePrefix": f"{name}/"}
    more = {"nextToken": state["token"]} if state["token"] else {}
    return account.call(
        "logs", "filter_log_events", region=region, logGroupName=GROUP, startTime=state["from"], **which, **more
    )


def _streams(account: Account, region: str, name: str) -> list[str]:
    """Return the names of a job's streams."""

    def ask(token: str) -> Any:
        given = {"logStreamNamePrefix": f"{name}/", **({"nextToken": token} if token else {})}
        return account.call("logs", "describe_log_streams", region=region, logGroupName=GROUP, **given)

    return [str(stream["logStreamName"]) for page in pages(ask, "nextToken") for stream in page["logStreams"]]


def _line(event: Mapping[str, Any], key: str) -> LogLine:
    host = _HOST.search(event["logStreamName"])
    return LogLine(
        node=str(int(host[1]) - 1) if host else event["logStreamName"].rpartition("/")[2],
        text=event["message"].rstrip("\r\n"),
        time=event["timestamp"] / 1000,
        id=key,
    )
