"""Recognise files that cloudtrain wrote, or that only the client reads: they are no part of the code.

Content decides, not the name: a user's own ``result.json`` is code like any other file.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from typing import Any

from ..errors import SpecError
from ..validate import toml_loads

PULL_STATE = ".cloudtrain-pull.json"
"""Name of the file that marks a folder as filled by `pull`."""
GENERATOR = '<meta name="generator" content="cloudtrain">'
"""Element that marks a page of `report`."""

_SETTINGS = "cloudtrain.toml"  # settings.FILE, which stands above this module
_HEAD = 4096
"""First bytes of a page, which hold `GENERATOR`."""
_MOST = 32 * 2**20
"""Bytes of the longest file that is parsed; a plan lists every file that ships."""
_PRINTED = (
    frozenset({"error", "field", "hint", "exit_code"}),
    frozenset({"runs", "next", "order"}),
    frozenset({"file", "profile", "profiles", "provider", "settings"}),
    frozenset({"store", "deleted", "older_than_s", "found"}),
    frozenset({"provider", "checks", "exit_code"}),
    frozenset({"url", "source", "store", "digest", "copied"}),
)
"""Keys of ``--json`` output that is not about one run: any verb, list, config, gc, doctor, stage."""
_OF_JOBS = frozenset({
    "checkpoint_paths", "entry_point", "hyperparameter_style", "instance_count", "instance_type", "keep_checkpoints",
    "launcher", "max_cost", "max_gpu_hours", "max_runtime", "max_wait", "nproc_per_node", "resources", "source",
    "stall_timeout",
})  # fmt: skip
"""Fields of a Job of which a job file has at least one; other files may use the remaining names."""

_TELLING = re.compile("|".join({"run_id", "exit_code", "order", "profiles", "older_than_s", *_OF_JOBS}).encode())
"""A file without one of these words is not parsed: users' data may be large."""


def reason(path: str, size: int) -> str:
    """Return why the file at ``path``, of ``size`` bytes, is cloudtrain's; an empty text for a user's file.

    Raises OSError if it cannot be read.
    """
    name = os.path.basename(path)
    suffix = os.path.splitext(name)[1].lower()
    if name == _SETTINGS:
        return "settings of cloudtrain"
    if suffix in (".html", ".htm"):
        return "page of cloudtrain report" if GENERATOR.encode() in _read(path, _HEAD) else ""
    if suffix not in (".json", ".toml") or size > _MOST:
        return ""
    text = _read(path, _MOST)
    data = _parsed(text, suffix) if _TELLING.search(text) else None
    if not isinstance(data, dict):
        return ""
    if suffix == ".json" and _is_printed(data):
        return "cloudtrain wrote it (--json)"
    return "job file" if _is_job(data, toml=suffix == ".toml") else ""


def pulled_files(state: str) -> frozenset[str]:
    """Return the paths that `pull` wrote into the folder of the file ``state`` (`PULL_STATE`), relative to it."""
    data = _parsed(_read(state, -1), ".json")
    files = data.get("files") if isinstance(data, dict) else None
    return frozenset(files) if isinstance(files, dict) else frozenset()


def _read(path: str, most: int) -> bytes:
    with open(path, "rb") as file:
        return file.read(most)


def _parsed(data: bytes, suffix: str) -> Any:
    try:
        return json.loads(data) if suffix == ".json" else toml_loads(data.decode(), where="file")
    except (ValueError, RecursionError, SpecError):
        return None


def _is_printed(data: Mapping[str, Any]) -> bool:
    run, run_id = data.get("run"), data.get("run_id")
    of_run = isinstance(run, str) and isinstance(run_id, str) and run.endswith(f"/runs/{run_id}")
    of_run = of_run and "provider" in data and not {"layout", "state", "exit_code", "report", "folder"}.isdisjoint(data)
    return of_run or any(keys <= data.keys() for keys in _PRINTED)


def _is_job(data: Mapping[str, Any], *, toml: bool) -> bool:
    """Return whether this is a job file. A JSON file with only a script's name may be anything."""
    from .job import Job

    source = data.get("source")
    names = {*data, *(source if isinstance(source, dict) else ())}
    if "entry_point" not in names or (not toml and len(_OF_JOBS & names) < 2):
        return False
    try:
        Job.from_dict({"entry_point": "train.py", **data})
    except SpecError:
        return False
    return True
