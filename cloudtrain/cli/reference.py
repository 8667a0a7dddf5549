"""Find the run that a word on the command line means: an id or its beginning, ``last`` or ``-``, or a URL."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import NotFoundError, SpecError
from ..settings.settings import Settings
from ..validate import url_scheme
from . import NEWEST
from .common_flags import Where

if TYPE_CHECKING:
    from ..runs.run import Run

__all__ = ["LAST", "find_run", "is_place"]

LAST = "last"
"""Word for the newest run, unless a run has this name."""
SHOWN = 10
"""Most runs that an error names."""


def find_run(word: str, at: Where) -> Run:
    """Return the run that ``word`` means. Raises `NotFoundError` for none, `SpecError` for several.

    An id or a URL is opened as it is. The runs of the store are listed only if there is no such run.
    """
    settings = at.settings()
    if word == NEWEST:
        return _open(_newest(settings), settings)
    try:
        return _open(word, settings)
    except NotFoundError:
        found = "" if is_place(word) else _meant(word, settings)
        if not found:
            raise
    return _open(found, settings)


def is_place(word: str) -> bool:
    """Return whether ``word`` is the URL or path of a run folder, and not an id."""
    return bool(url_scheme(word)) or "/" in word.replace("\\", "/")


def _open(word: str, settings: Settings) -> Run:
    from ..runs.run import open_run

    place = settings.store if url_scheme(word) else settings.resolved()
    return open_run(settings.resolved(word), store_url=place, cwd=Path.cwd(), settings=settings)


def _meant(word: str, settings: Settings) -> str:
    """Return the id of the run that ``word``, which is not an id itself, stands for; empty if there is none."""
    from ..runs.listing import run_ids

    if word == LAST:
        return _newest(settings)
    found = [run_id for run_id in run_ids(settings.resolved(), settings) if run_id.startswith(word)]
    if len(found) > 1:
        names = ", ".join(repr(run_id) for run_id in found[:SHOWN])
        more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
        raise SpecError(f"{word!r} is the beginning of {len(found)} run ids", field="run", hint=f"one of {names}{more}")
    return found[0] if found else ""


def _newest(settings: Settings) -> str:
    from ..runs.listing import newest_run

    place = settings.resolved()
    found = newest_run(place, settings)
    if found is None:
        raise NotFoundError(f"no run in {place}", field="run", hint="to start one: cloudtrain submit train.py")
    return found
