"""The exit record: how a node ended and why. The client and the supervisor read it."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .checkpoints import write_whole

UNMIRRORED = "not everything could be mirrored"  # start of the remark about files that are in no store


def write_cause(file: str | None, text: str) -> None:
    """Write ``text`` where the platform looks for the cause of a failure. For an empty text, remove the file."""
    if file is None:
        return
    with contextlib.suppress(OSError):
        if text:
            Path(file).write_bytes(text.encode("utf-8", "replace"))
        else:
            os.remove(file)


def write_record(live: Path, name: str, record: Mapping[str, Any], *, temporary: str = ".part") -> None:
    """Write ``live/exit/<name>.json``.

    A node may write its record twice. So the record's name ends in ``temporary`` until it is whole. A reader sees the
    old record or the new one. A disk that fails is only reported.
    """
    try:
        whole = {"protocol": 1, **record, "ended": time.time()}
        path, data = live / "exit" / f"{name}.json", json.dumps(whole).encode()
        try:
            write_whole(path, data, temporary=temporary)
        except OSError:  # a mount that cannot rename
            write_whole(path, data, temporary="")
    except OSError as exc:
        sys.stderr.write(f"cloudtrain: cannot write the exit record: {exc}\n")


def reason_of_end(live: Path, name: str) -> str:
    """Return the reason in ``live/exit/<name>.json``; empty without such a record."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return str(json.loads((live / "exit" / f"{name}.json").read_bytes())["reason"])
    return ""
