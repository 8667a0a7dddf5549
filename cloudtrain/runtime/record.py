"""The exit record: how a node ended, and its word on why, as the client and the supervisor read it."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["write_record"]


def write_record(live: Path, name: str, record: Mapping[str, Any], *, failure_file: str | None) -> None:
    """``live/exit/<name>.json``, and the reason where the platform looks for one. A disk that fails is only said."""
    try:
        folder = live / "exit"
        folder.mkdir(parents=True, exist_ok=True)
        whole = {"protocol": 1, **record, "ended": time.time()}
        (folder / f"{name}.json").write_text(json.dumps(whole), encoding="utf-8")
        if failure_file and record["failure"]:
            Path(failure_file).write_text(record["reason"], encoding="utf-8")
    except OSError as exc:
        sys.stderr.write(f"cloudtrain: cannot write the exit record: {exc}\n")
