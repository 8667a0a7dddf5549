"""CloudWatch Logs with events that come late, twice and out of order, and in pages.

moto's FilterLogEvents ignores the prefix of a stream's name, so a job would get the lines of all others.
"""

from __future__ import annotations

import base64
import bisect
import json
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .strict import model_errors
from .wire import Caller, Refusal

__all__ = ["CloudWatch", "Event"]

PAGE_EVENTS, PAGE_BYTES, EVENT_BYTES = 10_000, 1 << 20, 26
STREAMS_PAGE, MOST_STREAMS = 50, 100


@dataclass(frozen=True, order=True)
class Event:
    """One event. ``timestamp`` is its writer's, in milliseconds; readers get it from ``visible`` on."""

    timestamp: int
    number: int
    stream: str = field(compare=False)
    message: str = field(compare=False)
    visible: float = field(compare=False)
    ingestion: int = field(compare=False)

    @property
    def id(self) -> str:
        return f"{self.timestamp:020d}{self.number:036d}"

    def to_json(self) -> dict[str, Any]:
        return {"timestamp": self.timestamp, "message": self.message, "ingestionTime": self.ingestion}


class CloudWatch:
    """One region's log groups.

    - ``delay``: seconds that an event stays hidden;
    - ``repeats``: events that each further page repeats from the page before; ``page_events``: most events of a page;
    - ``empty_every``: every such page has no events, but a token.
    """

    def __init__(self) -> None:
        self.delay: Callable[[str, str], float] = lambda stream, message: 0.0
        self.repeats, self.page_events, self.empty_every = 0, PAGE_EVENTS, 0
        self._lock = threading.RLock()
        self._groups: dict[str, list[Event]] = {}
        self._streams: dict[tuple[str, str], list[Event]] = {}
        self._count = self._pages = 0

    def put(self, group: str, stream: str, lines: Iterable[tuple[int, str]]) -> None:
        """Add events (milliseconds, message). Create the group and the stream if needed."""
        with self._lock:
            events = self._groups.setdefault(group, [])
            one = self._streams.setdefault((group, stream), [])
            for timestamp, message in lines:
                self._count += 1
                visible = time.monotonic() + self.delay(stream, message)
                event = Event(timestamp, self._count, stream, message, visible, int(time.time() * 1000))
                bisect.insort(events, event)
                one.append(event)

    def streams(self, group: str, prefix: str = "") -> list[str]:
        """Return the names of the group's streams."""
        with self._lock:
            return sorted(name for where, name in self._streams if where == group and name.startswith(prefix))

    def messages(self, group: str, prefix: str = "") -> list[str]:
        """Return every message by time, visible or not."""
        with self._lock:
            return [event.message for event in self._groups.get(group, []) if event.stream.startswith(prefix)]

    # -------------------------------------------------------------------------------------------------------- the wire

    def answer(self, operation: str, request: Mapping[str, Any], caller: Caller) -> Mapping[str, Any]:
        """Answer one call of the service."""
        known = {
            "FilterLogEvents": self._filter,
            "GetLogEvents": self._get,
            "DescribeLogStreams": self._describe_streams,
        }
        if operation not in known:
            raise Refusal("UnknownOperationException", operation)
        if problems := model_errors(operation, request, "logs"):
            raise Refusal("InvalidParameterException", "; ".join(problems))
        with self._lock:
            if request.get("logGroupName") not in self._groups:
                raise Refusal("ResourceNotFoundException", "The specified log group does not exist.")
            return known[operation](request)

    def _filter(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        if "logStreamNames" in request and "logStreamNamePrefix" in request:
            raise Refusal("InvalidParameterException", "Use either logStreamNames or logStreamNamePrefix")
        prefix = request.get("logStreamNamePrefix")
        if prefix and len(self.streams(request["logGroupName"], prefix)) > MOST_STREAMS:
            raise Refusal("InvalidParameterException", f"More than {MOST_STREAMS} log streams have the prefix")
        now, names = time.monotonic(), request.get("logStreamNames")
        first, last = request.get("startTime", 0), request.get("endTime", 1 << 62)
        group = self._groups[request["logGroupName"]]
        begin = bisect.bisect_left(group, first, key=lambda event: event.timestamp)
        found = [
            event
            for event in group[begin:]
            if event.timestamp < last
            and event.visible <= now
            and (event.stream in names if names else event.stream.startswith(request.get("logStreamNamePrefix", "")))
        ]
        after = _opened(request["nextToken"]) if "nextToken" in request else None
        start = 0
        if after is not None:
            at = bisect.bisect_right(found, tuple(after), key=lambda event: (event.timestamp, event.number))
            start = max(0, at - (self.repeats if after else 0))
        self._pages += 1
        if self.empty_every and self._pages % self.empty_every == 0 and found[start:]:
            return {"events": [], "searchedLogStreams": [], "nextToken": _sealed(after or [0, 0])}
        page = _fitting(found[start:], min(request.get("limit", PAGE_EVENTS), self.page_events) + self.repeats)
        answer: dict[str, Any] = {
            "events": [{**event.to_json(), "logStreamName": event.stream, "eventId": event.id} for event in page],
            "searchedLogStreams": [],
        }
        if start + len(page) < len(found):
            answer["nextToken"] = _sealed([page[-1].timestamp, page[-1].number])
        return answer

    def _get(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return events in order of arrival. A token is a position in the stream; at the end it stays the same."""
        stream = self._streams.get((request["logGroupName"], request["logStreamName"]))
        if stream is None:
            raise Refusal("ResourceNotFoundException", "The specified log stream does not exist.")
        now = time.monotonic()
        visible = sorted((event for event in stream if event.visible <= now), key=lambda event: event.visible)
        limit = request.get("limit", PAGE_EVENTS)
        if "nextToken" in request:
            way, at = _opened(request["nextToken"])
            start = at if way == "f" else max(0, at - limit)
        else:
            start = 0 if request.get("startFromHead") else max(0, len(visible) - limit)
        page = _fitting(visible[start:], limit)
        return {
            "events": [event.to_json() for event in page],
            "nextForwardToken": _sealed(["f", start + len(page)]),
            "nextBackwardToken": _sealed(["b", start]),
        }

    def _describe_streams(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        group, names = (
            request["logGroupName"],
            self.streams(request["logGroupName"], request.get("logStreamNamePrefix", "")),
        )
        start = _opened(request["nextToken"])[0] if "nextToken" in request else 0
        limit = request.get("limit", STREAMS_PAGE)
        answer: dict[str, Any] = {
            "logStreams": [
                {
                    "logStreamName": name,
                    "firstEventTimestamp": min(event.timestamp for event in events),
                    "lastEventTimestamp": max(event.timestamp for event in events),
                }
                if (events := self._streams[group, name])
                else {"logStreamName": name}
                for name in names[start : start + limit]
            ]
        }
        if start + limit < len(names):
            answer["nextToken"] = _sealed([start + limit])
        return answer


def _fitting(events: list[Event], limit: int) -> list[Event]:
    """Return the first events that fit on a page, and at least one."""
    size = 0
    for number, event in enumerate(events[:limit]):
        size += len(event.message.encode()) + EVENT_BYTES
        if size > PAGE_BYTES and number:
            return events[:number]
    return events[:limit]


def _sealed(value: list[Any]) -> str:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).decode()


def _opened(token: str) -> list[Any]:
    try:
        return list(json.loads(base64.urlsafe_b64decode(token)))
    except (ValueError, TypeError):
        raise Refusal("InvalidParameterException", "The specified nextToken is invalid.") from None
