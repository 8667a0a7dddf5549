"""The exit record: how a node ended and why. The client and the supervisor read it."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .checkpoints import write_whole

__all__ = ["write_record"]


def write_record(
    live: Path, name: str, record: Mapping[str, Any], *, failure_file: str | None, temporary: str = ".part"
) -> None:
    """Write ``live/exit/<name>.json``, and the reason to ``failure_file``, which the platform reads.

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
        if failure_file and record["failure"]:
            Path(failure_file).write_bytes(record["reason"].encode("utf-8", "replace"))
    except OSError as exc:
        sys.stderr.write(f"cloudtrain: cannot write the exit record: {exc}\n")
