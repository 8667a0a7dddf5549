"""Read the lines of a Job's pods. The API has the newest file of a container's log alone; our own segments have all."""

from __future__ import annotations

from collections import Counter
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
        for moment, text, second, number in _lines(data, since, seen):
            if second >= marks.get(name, ["", 0])[0]:  # lines of stdout and stderr may swap
                marks[name] = [second, number]
            lines.append(
                LogLine(
                    node=str(pod["metadata"]["labels"][POD_INDEX]),
                    text=text,
                    time=time_of(moment),
                    id=f"{name}:{second}:{number}",
                )
            )
    return LogPage(lines=tuple(lines), cursor=marks, more=more and bool(lines))


def _lines(data: bytes, since: str, seen: int) -> list[tuple[str, str, str, int]]:
    """Return (time, text, second, number in that second) of each whole line after the ``seen`` ones of ``since``."""
    found, counts = [], Counter[str]()
    for line in data.split(b"\n")[:-1]:
        moment, _, text = line.decode("utf-8", "replace").partition(" ")
        second = f"{moment[:19]}Z"
        counts[second] += 1
        if second != since or counts[second] > seen:
            found.append((moment, text.rstrip("\r"), second, counts[second]))
    return found
