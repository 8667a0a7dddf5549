"""Cloud Logging with entries that come late, twice and out of order, and in pages."""

from __future__ import annotations

import base64
import bisect
import collections
import datetime
import hashlib
import json
import operator as op
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from .wire import Answer, Call, Refusal, Wire

__all__ = ["Entries", "Entry", "stamp"]

PAGE = 1000
"""Most entries of one page."""
MEMBERS = frozenset({"resourceNames", "projectIds", "filter", "orderBy", "pageSize", "pageToken"})
"""Members of ListLogEntriesRequest (logging v2)."""
READS = "Quota exceeded for quota metric 'Read requests' and limit 'Read requests per minute' of service"
_CLAUSE = re.compile(r'\s*([A-Za-z_][\w.]*|labels\."[^"]+")\s*(>=|<=|!=|=|>|<)\s*("(?:[^"\\]|\\.)*"|[\w.:/-]+)\s*')
_SIGNS = {"=": op.eq, "!=": op.ne, ">=": op.ge, "<=": op.le, ">": op.gt, "<": op.lt}
_MOMENTS = ("timestamp", "receiveTimestamp")
_NANOSECONDS = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?Z")


@dataclass(frozen=True, order=True)
class Entry:
    """One entry. ``timestamp`` is Unix nanoseconds; readers get it from ``visible`` on (monotonic seconds)."""

    timestamp: int
    id: str
    log: str = field(compare=False)
    task: str = field(compare=False)
    job: str = field(compare=False)
    text: str = field(compare=False)
    visible: float = field(compare=False)
    received: int = field(compare=False)

    def to_json(self, project: str) -> dict[str, Any]:
        """Return the LogEntry. A line that is a JSON object becomes the payload, as the real agent makes it."""
        labels = {"job_id": self.job, "task_name": self.task, "project_id": project}
        payload, severity = _payload(self.text)
        return {
            "insertId": self.id,
            "timestamp": stamp(self.timestamp),
            "receiveTimestamp": stamp(self.received),
            "severity": severity,
            "logName": self.log,
            "resource": {"type": "ml_job", "labels": labels},
            "labels": {f"ml.googleapis.com/{name}": labels[name] for name in ("job_id", "task_name")},
            **payload,
        }


_FIELDS: Mapping[str, Callable[[Entry], Any]] = {
    "timestamp": lambda entry: entry.timestamp,
    "receiveTimestamp": lambda entry: entry.received,
    "insertId": lambda entry: entry.id,
    "logName": lambda entry: entry.log,
    "severity": lambda entry: _payload(entry.text)[1],
    "resource.type": lambda entry: "ml_job",
    "resource.labels.job_id": lambda entry: entry.job,
    "resource.labels.task_name": lambda entry: entry.task,
    'labels."ml.googleapis.com/job_id"': lambda entry: entry.job,
    'labels."ml.googleapis.com/task_name"': lambda entry: entry.task,
}
"""Fields that a filter may compare."""


class Entries:
    """The log of one project.

    - ``delay``: seconds that an entry of a task stays hidden;
    - ``repeats``: entries that each further page repeats from the page before;
    - ``twice``: the entry that a page has two of; ``page_entries``: most entries of a page;
    - ``reads``: calls a minute before calls are refused (0: no limit).
    """

    def __init__(self, wire: Wire, *, project: str) -> None:
        self.project = project
        self.delay: Callable[[str, str], float] = lambda task, text: 0.0
        self.twice: Callable[[Entry], bool] = lambda entry: False
        self.repeats, self.page_entries, self.reads = 0, PAGE, 0
        self._lock = threading.Lock()
        self._jobs: dict[str, list[Entry]] = {}
        self._read: collections.deque[float] = collections.deque()
        wire.route("POST", "/v2/entries:list", "POST entries", self._answer)

    def put(self, job: str, task: str, lines: Iterable[str], *, at: int | None = None) -> None:
        """Add lines with one timestamp in Unix nanoseconds (default: now)."""
        now, log = time.time_ns(), f"projects/{self.project}/logs/{task}"
        with self._lock:
            entries = self._jobs.setdefault(job, [])
            for text in lines:
                visible = time.monotonic() + self.delay(task, text)
                bisect.insort(entries, Entry(at or now, secrets.token_hex(8), log, task, job, text, visible, now))

    def messages(self, job: str) -> list[str]:
        """Return every line of a job by time, visible or not."""
        with self._lock:
            return [entry.text for entry in self._jobs.get(job, [])]

    # -------------------------------------------------------------------------------------------------------- the wire

    def _answer(self, call: Call) -> Answer:
        request = call.json()
        if unknown := sorted(set(request) - MEMBERS):
            raise Refusal("INVALID_ARGUMENT", f'Invalid JSON payload received. Unknown name "{unknown[0]}".')
        if request.get("resourceNames") != [f"projects/{self.project}"]:
            raise Refusal.denied("logging.logEntries.list", str(request.get("resourceNames")))
        self._count()
        with self._lock:
            return Answer(self._page(request))

    def _count(self) -> None:
        """Count one read. Raises `Refusal` for one too many."""
        now = time.monotonic()
        while self._read and now - self._read[0] > 60:
            self._read.popleft()
        if self.reads and len(self._read) >= self.reads:
            raise Refusal("RESOURCE_EXHAUSTED", f"{READS} 'logging.googleapis.com'")
        self._read.append(now)

    def _page(self, request: Mapping[str, Any]) -> dict[str, Any]:
        order = request.get("orderBy") or "timestamp asc"
        if order not in ("timestamp", "timestamp asc", "timestamp desc"):
            raise Refusal("INVALID_ARGUMENT", f"Invalid order_by {order!r}")
        size = min(int(request.get("pageSize") or 50), PAGE, self.page_entries)
        wanted, now = _filter(request.get("filter", "")), time.monotonic()
        entries = [entry for job in self._jobs.values() for entry in job if entry.visible <= now and wanted(entry)]
        entries.sort(reverse=order.endswith("desc"))
        signed = hashlib.sha256(json.dumps([request.get("filter"), order]).encode()).hexdigest()
        start = 0
        if token := request.get("pageToken"):
            last, passed = _opened(token, signed), op.ge if order.endswith("desc") else op.le
            start = max(0, sum(passed([entry.timestamp, entry.id], last) for entry in entries) - self.repeats)
        page = entries[start : start + size + (self.repeats if start else 0)]
        answer: dict[str, Any] = {"entries": [e.to_json(self.project) for e in page for _ in range(1 + self.twice(e))]}
        if start + len(page) < len(entries):
            place = json.dumps([page[-1].timestamp, page[-1].id, signed]).encode()
            answer["nextPageToken"] = base64.urlsafe_b64encode(place).decode()
        return {key: value for key, value in answer.items() if value}


def stamp(nanoseconds: int) -> str:
    """Format a time by RFC 3339, as the services do."""
    moment = datetime.datetime.fromtimestamp(nanoseconds // 10**9, datetime.timezone.utc)
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{nanoseconds % 10**9:09}Z"


def _payload(text: str) -> tuple[dict[str, Any], str]:
    try:
        payload = json.loads(text)
    except ValueError:
        payload = None
    if isinstance(payload, dict) and isinstance(payload.get("message"), str):
        severity = str(payload.pop("severity", "DEFAULT"))
        return {"jsonPayload": payload}, severity
    return {"textPayload": text}, "INFO"


def _opened(token: str, signed: str) -> list[Any]:
    try:
        *place, of = json.loads(base64.urlsafe_b64decode(token))
    except (ValueError, TypeError):
        raise Refusal("INVALID_ARGUMENT", "page_token is invalid") from None
    if of != signed:
        raise Refusal("INVALID_ARGUMENT", "page_token doesn't match arguments from the request")
    return list(place)


def _filter(text: str) -> Callable[[Entry], bool]:
    """Parse the Logging query language, but only comparisons joined by AND. Raises `Refusal`."""
    tests = []
    for clause in text.split(" AND ") if text else []:
        found = _CLAUSE.fullmatch(clause)
        if found is None:
            raise Refusal("INVALID_ARGUMENT", f"Unparseable filter: syntax error at {clause!r}")
        path, sign, value = found[1], found[2], found[3]
        if path not in _FIELDS:
            raise Refusal("INVALID_ARGUMENT", f"Field not found: '{path}'.")
        value = json.loads(value) if value.startswith('"') else value
        wanted = _nanoseconds(value) if path in _MOMENTS else value
        tests.append(partial(_holds, _FIELDS[path], _SIGNS[sign], wanted))
    return lambda entry: all(test(entry) for test in tests)


def _holds(field: Callable[[Entry], Any], sign: Callable[[Any, Any], bool], wanted: Any, entry: Entry) -> bool:
    return sign(field(entry), wanted)


def _nanoseconds(text: str) -> int:
    found = _NANOSECONDS.fullmatch(text)
    if found is None:
        raise Refusal("INVALID_ARGUMENT", f"Unparseable filter: timestamp {text!r}")
    moment = datetime.datetime.strptime(found[1], "%Y-%m-%dT%H:%M:%S").replace(tzinfo=datetime.timezone.utc)
    return int(moment.timestamp()) * 10**9 + int((found[2] or "").ljust(9, "0"))
