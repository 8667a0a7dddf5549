"""Read a job's lines from its log files, page by page: every file of every node, by ranges of bytes.

Azure ML's SDK shows rank 0 alone. The history of runs names each file with its own SAS, which expires. A page starts at
its cursor, ends with a whole line and is small, so eight ranks of gigabytes need little memory.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from ...errors import LostContactError
from ...provider_api.protocol import LogLine, LogPage
from ...validate import unix_seconds
from .api import FINAL, translated

if TYPE_CHECKING:
    from .api import Account

FILES = re.compile(r"(.*/)?user_logs/(retry_\d+/)?std_log.*\.txt")
"""azure-ai-ml's COMMON_RUNTIME_ALL_USER_LOG_PATTERN, and the same of a restarted job (microsoft/hi-ml)."""
MARK_BYTES = 64
"""Bytes at a file's start, and before the cursor, that a page compares with the last page's. If the service restarts a
job, its files may begin again."""
PAGE_BYTES, PAGE_LINES = 512 * 1024, 20_000
LOOK = 5.0
"""Seconds between reads of the history, for new files and the job's end. One second while there are no files, and just
after the end."""
SETTLE = 3.0
"""Seconds after a job's end in which its logs may still grow; unverified. The store has cloudtrain's own later lines.
"""
_NUMBER = re.compile(r"(\d+)(?!.*\d)")


def page(account: Account, native_id: str, cursor: Any) -> LogPage:
    """Return the next page.

    The ``cursor`` holds the file whose turn it is. For each file it holds the restarts, the bytes given, the last of
    these, and the first. If those bytes differ, the file is new and is read from its start.
    """
    state: Mapping[str, Any] = cursor or {"at": {}, "turn": ""}
    details = _details(account, native_id)
    names = sorted(name for name in details.get("logFiles") or {} if FILES.fullmatch(name))
    names = [n for n in names if n > state["turn"]] + [n for n in names if n <= state["turn"]]
    given, lines, turn = dict(state["at"]), list[LogLine](), state["turn"]
    taken, more, left = 0, False, _left(details)
    for name in names:
        if taken >= PAGE_BYTES or len(lines) >= PAGE_LINES:
            more = True
            break
        place = _Place(*given.get(name, ()))
        if (data := _read(account, native_id, name, place)) is None:
            place = _Place(place.generation + 1)
            data = _read(account, native_id, name, place) or b""
        full = len(data) == PAGE_BYTES
        final = not full and left == 0.0
        found, used = _lines(name, data, place, final=final, full=full, most=PAGE_LINES - len(lines))
        lines += found
        given[name], turn, taken = place.after(data[:used]), name, taken + used
        more = more or full or len(lines) >= PAGE_LINES
    if left and not more:
        more = True
        if not lines:
            time.sleep(min(left, 1.0))
    return LogPage(lines=tuple(lines), cursor={"at": given, "turn": turn}, more=more)


def _left(details: Mapping[str, Any]) -> float | None:
    """Return the seconds in which a finished job's logs may still grow; None if it has not finished."""
    if details.get("status") not in FINAL:
        return None
    ended = details.get("endTimeUtc")
    since = time.time() - unix_seconds(ended) if ended else SETTLE
    return min(SETTLE, max(0.0, SETTLE - since))


def _details(account: Account, native_id: str) -> Mapping[str, Any]:
    """Return the history's recent details with the files' addresses. They are final once the job has ended."""
    when, details = account.details.get(native_id, (float("-inf"), {}))
    if time.monotonic() - when < (LOOK if details.get("logFiles") and not _left(details) else 1.0):
        return details
    return account.run_details(native_id)


class _Place(NamedTuple):
    """Cursor of one file. As latin-1, ``last`` are the bytes before ``at``, ``first`` the file's first (older cursors:
    none)."""

    generation: int = 0
    at: int = 0
    last: str = ""
    first: str = ""

    def after(self, data: bytes) -> _Place:
        text = data.decode("latin-1")
        first = self.first + text[: MARK_BYTES - len(self.first)] if self.at == len(self.first) else self.first
        return _Place(self.generation, self.at + len(data), (self.last + text)[-MARK_BYTES:], first)


def _read(account: Account, native_id: str, name: str, place: _Place) -> bytes | None:
    """Return at most `PAGE_BYTES` bytes of a file from ``place``, empty at its end; None if the file was replaced."""
    before, first = place.last.encode("latin-1"), place.first.encode("latin-1")
    data = _bytes(account, native_id, name, place.at - len(before), len(before) + PAGE_BYTES)
    if data is None:
        return b""
    if not data.startswith(before):
        return None
    if first and place.at > len(before) < len(data) and _bytes(account, native_id, name, 0, len(first)) != first:
        return None
    return data[len(before) :]


def _bytes(account: Account, native_id: str, name: str, begin: int, most: int) -> bytes | None:
    """Return at most ``most`` bytes of a file from ``begin``, empty past its end; None without a file. Renews an
    expired SAS."""
    for again in (False, True):
        url = (account.details[native_id][1].get("logFiles") or {}).get(name)
        if url is None:
            return None
        headers = {"Range": f"bytes={begin}-{begin + most - 1}", "x-ms-version": "2021-08-06"}
        answer = account.fetch(url, what=f"read {name}", headers=headers, stream=True)
        try:
            if answer.status_code in (200, 206):
                # A server that ignores the range answers 200 with the whole file.
                return _body(answer, begin if answer.status_code == 200 else 0, most, what=f"read {name}")
            if answer.status_code == 416:  # the file ends earlier; Azurite answers 206 without bytes
                return b""
            if answer.status_code not in (403, 404):
                raise LostContactError(f"read {name}: status {answer.status_code}")
        finally:
            answer.close()
        if not again:
            account.run_details(native_id)
    if answer.status_code == 404:
        return None  # the history names files before they exist
    hint = "let this machine through the firewall of the storage account"
    raise LostContactError(f"read {name}: the storage account refuses its SAS (403)", hint=hint)


def _body(answer: Any, skip: int, most: int, *, what: str) -> bytes:
    """Return at most ``most`` bytes of the answer after the first ``skip``. Raises `LostContactError` if it breaks."""
    found = b""
    with translated(what):
        for chunk in answer.iter_bytes():
            found += chunk[skip : skip + most - len(found)]
            skip = max(0, skip - len(chunk))
            if len(found) >= most:
                break
    return found


def _lines(name: str, data: bytes, place: _Place, *, final: bool, full: bool, most: int) -> tuple[list[LogLine], int]:
    """Return the whole lines of ``data``, at most ``most``, and their bytes.

    The rest after the last line waits for its end, unless the file has ended (``final``) or a line is longer than a
    page (``full``).
    """
    found: list[LogLine] = []
    at = 0
    while at < len(data) and len(found) < most:
        end = data.find(b"\n", at)
        if end < 0:
            if not final and not (full and at == 0):
                break
            end = len(data) if final else _boundary(data)
            found.append(_line(name, data[at:end], place, at))
            at = end
            break
        found.append(_line(name, data[at:end], place, at))
        at = end + 1
    return found, at


def _boundary(data: bytes) -> int:
    """Return the place to cut a line without an end: between two characters."""
    for back in range(1, 4):
        lead = data[-back]
        if lead < 0x80:
            break
        if lead >= 0xC0:
            return len(data) - back
    return len(data)


def _line(name: str, raw: bytes, place: _Place, at: int) -> LogLine:
    file = name.rpartition("user_logs/")[2]
    number = _NUMBER.search(file.rpartition("/")[2])
    again = f"#{place.generation}" if place.generation else ""
    return LogLine(
        node=str(int(number[1])) if number else "0",
        text=raw.decode("utf-8", "replace").rstrip("\r"),
        id=f"{file}{again}@{place.at + at}",
    )
