"""The verb ``stage``: put data into a store once, for many runs."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from ..runs.summary import plural
from . import format
from .common_flags import HERE, At
from .output import Screen
from .runs import Json, Ours


def stage(
    url: Annotated[str, Parameter(help="a file or folder: a path, or a URL that an input may have")],
    /,
    *,
    at: At = HERE,
    json: Json = False,
    screen: Ours[Screen],
) -> int:
    """Put data into the store unless it is there, and print its URL for --input. Equal data has one URL."""
    from ..store.staging import stage_at

    settings = at.settings()
    screen.interrupted = "interrupted; the same command continues"
    with screen.progress() as say:
        moved = format.Moved("copied", say if screen.interactive else None)
        found = stage_at(url, settings=settings, cwd=Path.cwd(), progress=moved, say=say)
    screen.answer({**dataclasses.asdict(found), "exit_code": 0}, found.url)
    size = f"{plural(found.files, 'file')}, {format.size_text(found.bytes)}"
    new = f"{format.size_text(found.copied)} copied{moved.pace}" if found.copied else "nothing copied: the store has it"
    screen.talk(f"staged {size}; {new}")
    screen.next(["submit", "train.py", "--input", f"data={found.url}"], where=at.flags)
    return 0
