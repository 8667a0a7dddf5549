"""Read the lines of a Job's pods. The API has the newest file of a container's log alone; our own segments have all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...errors import LostContactError, NotFoundError, SpecError
from ...provider_api.protocol import LogLine, LogPage
from .._cloud import time_of
from .request import CONTAINER, POD_INDEX

if TYPE_CHECKING:
    from .api import Account

PAGE_BYTES = 4 << 20
"""Most bytes of one pod in a page."""


def page(account: Account, native_id: str, cursor: Any) -> LogPage:
    """Return whole lines from ``cursor``: by pod, the second of its last line and the number of lines in that second.

    ``sinceTime`` counts in whole seconds, so the lines of that second come again.
    """
    account.job(native_id)
    namespace = native_id.partition("/")[0]
    marks: dict[str, list[Any]] = {name: list(mark) for name, mark in dict(cursor or {}).items()}
    lines: list[LogLine] = []
    more = False
    for pod in account.pods(native_id):
        name = str(pod["metadata"]["name"])
        since, seen = marks.get(name, ["", 0])
        query = {"sinceTime": since} if since else {}
        query |= {"container": CONTAINER, "timestamps": "true"}
        try:
            data = account.log(namespace, name, limitBytes=str(PAGE_BYTES), **query)
            cut = len(data) >= PAGE_BYTES
            if cut and not _lines(data, since, seen):  # one line, or the lines of one second, fill it
                data, cut = account.log(namespace, name, **query), False
        except (SpecError, NotFoundError, LostContactError):  # it is not created yet, or gone, or its machine is silent
            continue
        more |= cut
        found = _lines(data, since, seen)
        for line, second, number in found:
            if second >= marks.get(name, ["", 0])[0]:  # lines of stdout and stderr may swap
                marks[name] = [second, number]
            lines.append(
                LogLine(
                    node=str(pod["metadata"]["labels"][POD_INDEX]),
                    text=line[1],
                    time=time_of(line[0]),
                    id=f"{name}:{second}:{number}",
                )
            )
    return LogPage(lines=tuple(lines), cursor=marks, more=more and bool(lines))


def _lines(data: bytes, since: str, seen: int) -> list[tuple[tuple[str, str], str, int]]:
    """Return ((time, text), second, number in that second) of each whole line after the ``seen`` ones of ``since``."""
    found = []
    counts: dict[str, int] = {}
    for line in data[: data.rfind(b"\n") + 1].split(b"\n")[:-1]:
        stamp, _, text = line.partition(b" ")
        moment = stamp.decode("utf-8", "replace")
        second = f"{moment[:19]}Z"
        counts[second] = counts.get(second, 0) + 1
        if second == since and counts[second] <= seen:
            continue
        found.append(((moment, text.decode("utf-8", "replace").rstrip("\r")), second, counts[second]))
    return found
