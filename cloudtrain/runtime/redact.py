"""A run's secrets taken out of text before it leaves the node: log lines, segments, exit records, tracebacks.

Only the values of ``secrets``, in the forms in which programs show a text: as it is, escaped as by Python's ``repr``,
by JSON and in a URL, and each line of one that has several; of one that is JSON, the fields that are named like a
secret. What cannot be found: a value shorter than `SHORTEST`, one that a script has changed (base64, a hash, reversed)
or printed in pieces on several lines, one that stands where a line or a traceback is cut for its length, and whatever a
script writes to files of its own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping

__all__ = ["SHORTEST", "Redactor"]

_KEY = re.compile(r"pass|secret|token|key(?!_?id)|credential", re.IGNORECASE)
SHORTEST = 8
"""Characters; shorter values stand in too much that is no secret."""


class Redactor:
    """Takes out what it has learnt; each value becomes ``***NAME***``."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        self._pattern: re.Pattern[str] | None = None

    def learn(self, secrets: Mapping[str, str]) -> None:
        """Take out the values of ``secrets`` too from now on; by name."""
        for name, value in secrets.items():
            for part in (value, *_leaves(value)):
                for form in _forms(part):
                    self._names.setdefault(form, name)
        if self._names:  # the longest first: one value may begin with another
            forms = sorted(self._names, key=lambda form: (-len(form), form))
            self._pattern = re.compile("|".join(map(re.escape, forms)))

    def __call__(self, text: str) -> str:
        """``text`` without them."""
        pattern = self._pattern
        return pattern.sub(lambda match: f"***{self._names[match[0]]}***", text) if pattern is not None else text


def _leaves(value: str) -> Iterator[str]:
    """Of a secret that is JSON, as a database's is, the texts whose names say that they are one."""
    try:
        todo = [("", json.loads(value))]
    except (ValueError, RecursionError):
        return
    while todo:
        name, item = todo.pop()
        if isinstance(item, dict):
            todo += item.items()
        elif isinstance(item, list):
            todo += [(name, one) for one in item]
        elif isinstance(item, str) and _KEY.search(name):
            yield item


def _forms(value: str) -> Iterator[str]:
    from urllib.parse import quote, quote_plus

    # What is no UTF-8 arrives as a log line would show it.
    shown = value.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    for text in (value, shown, *shown.splitlines(), shown.strip()):
        plain = text.strip("\r\n")
        forms = (plain, repr(plain)[1:-1], json.dumps(plain)[1:-1], json.dumps(plain, ensure_ascii=False)[1:-1])
        quoted = (quote(shown, safe=""), quote(shown), quote_plus(shown))
        yield from (form for form in (*forms, *quoted) if len(form) >= SHORTEST and len(plain) >= SHORTEST)
