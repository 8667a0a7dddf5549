"""Check the options of sbatch in a request, without Slurm."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import SpecError

UNUSABLE = (
    *("array", "clusters", "hold", "no-requeue", "parsable", "quiet"),
    *("test-only", "uid", "verbose", "wait", "wrap"),
)
"""Options with which the job would not be one job of this script, or the answer of sbatch would differ."""


def check_body(body: Mapping[str, Any]) -> None:
    """Raise `SpecError` for options that sbatch does not know, named by their place in a job's ``options``."""
    for name in body.keys() - {"sbatch", "limit_s", "command", "image"}:
        raise SpecError("no such field; options of sbatch belong into sbatch", field=f"options.slurm.{name}")
    check_options(body["sbatch"], "options.slurm.sbatch")


def check_options(options: Any, where: str, *, owned: Sequence[str] = ()) -> None:
    """Raise `SpecError` for an option that is unknown or ``owned``, that cloudtrain cannot do with, or is no text."""
    if not isinstance(options, Mapping):
        raise SpecError(f"must be a table of options of sbatch, not {options!r}", field=where)
    for name, value in options.items():
        if not re.fullmatch("[a-z][a-z-]+", name):
            raise SpecError("is not the long name of an option of sbatch", field=f"{where}.{name}")
        if name in UNUSABLE:
            raise SpecError("would make another job than the run's", field=f"{where}.{name}")
        if name in owned:
            raise SpecError("a job's field or another setting sets it", field=f"{where}.{name}")
        if value is False or not isinstance(value, (int, str)) or re.search(r"[\x00-\x1f\x7f]", str(value)):
            raise SpecError(f"must be text, a number or true, not {value!r}", field=f"{where}.{name}")
