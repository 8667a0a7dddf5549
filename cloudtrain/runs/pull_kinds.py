"""Kinds of a run's results, and the words that select some of them."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ..errors import SpecError
from ..validate import near_or_all, sequence_of, texts_of

PULL_KINDS = ("checkpoints", "artifacts", "outputs", "logs", "metrics")
"""Kinds that `Run.pull` can fetch. Artifacts include the platform's own files; result.json and run.json always come.
For checkpoints also ``checkpoints:latest``, ``checkpoints:best``, ``checkpoints:step=N``, and ``checkpoints:all``. The
last is the same as ``checkpoints``: the newest of each name."""

_CHOICE = re.compile(r"latest|best|all|step=\d+")


def parse_selection(what: str | Iterable[str]) -> dict[str, list[str]]:
    """Return the kinds of `PULL_KINDS` to pull, with the choices of checkpoints. Raises `SpecError`."""
    found: dict[str, list[str]] = {}
    for text in texts_of([*sequence_of(what)], "what", empty=True):
        for part in text.split(","):
            part = part.strip()
            word, colon, choice = part.partition(":")
            if _CHOICE.fullmatch(part):
                raise SpecError(f"{part!r} names no kind of result", field="what", hint=f"write checkpoints:{part}")
            if word not in PULL_KINDS:
                hint = near_or_all(word, PULL_KINDS)
                raise SpecError(f"{word!r} is not a kind of result", field="what", hint=hint)
            if colon and (word != "checkpoints" or not _CHOICE.fullmatch(choice)):
                hint = "write checkpoints:latest, :best, :step=N or :all"
                raise SpecError(f"{part!r} names no checkpoints", field="what", hint=hint)
            found.setdefault(word, []).append(choice or "all")
    return found
