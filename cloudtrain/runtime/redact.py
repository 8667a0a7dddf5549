"""Take a run's secrets out of text before it leaves the node: log lines, segments, exit records, tracebacks.

Only the values of ``secrets`` are taken out, in the forms in which programs show a text: as it is, escaped by Python's
``repr``, by JSON and in a URL, and each line of several. In a JSON value, fields that are named like a secret count
too. Values shorter than `SHORTEST` or changed (base64, a hash, reversed) are not found. Nor are those printed in pieces
on several lines, cut with a long line or traceback, or written to the script's own files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping

_KEY = re.compile(r"pass|secret|token|key(?!_?id)|credential", re.IGNORECASE)
SHORTEST = 8  # characters. Shorter values are part of too many harmless texts


class Redactor:
    """A filter that replaces each learnt value by ``***NAME***``."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        self._pattern: re.Pattern[str] | None = None

    def learn(self, secrets: Mapping[str, str]) -> None:
        """Take out the values of ``secrets``, given by name, from now on."""
        for name, value in secrets.items():
            for part in (value, *_leaves(value)):
                for form in _forms(part):
                    self._names.setdefault(form, name)
        if self._names:  # the longest first: one value may begin with another
            forms = sorted(self._names, key=lambda form: (-len(form), form))
            self._pattern = re.compile("|".join(map(re.escape, forms)))

    def __call__(self, text: str) -> str:
        """Return ``text`` without the learnt values."""
        pattern = self._pattern
        return pattern.sub(lambda match: f"***{self._names[match[0]]}***", text) if pattern is not None else text


def _leaves(value: str) -> Iterator[str]:
    """Yield the texts of a JSON secret, such as a database's, whose names say that they are secret."""
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

    # A log line shows bytes that are not UTF-8 in this form.
    shown = value.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    for text in (value, shown, *shown.splitlines(), shown.strip()):
        plain = text.strip("\r\n")
        forms = (plain, repr(plain)[1:-1], json.dumps(plain)[1:-1], json.dumps(plain, ensure_ascii=False)[1:-1])
        quoted = (quote(shown, safe=""), quote(shown), quote_plus(shown))
        yield from (form for form in (*forms, *quoted) if len(form) >= SHORTEST and len(plain) >= SHORTEST)
