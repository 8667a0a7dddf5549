"""Ids of runs. A module of its own: a client that reads a store needs no Job."""

from __future__ import annotations

import secrets
import time

from ..errors import SpecError
from .fields import MAX_ID, is_slug, slug


def check_run_id(run_id: str) -> str:
    """Return ``run_id`` if it is lower-case letters, digits and single inner dashes, at most 40; else `SpecError`."""
    if not is_run_id(run_id):
        why = f"{run_id!r} is not a run id: lower-case letters, digits and single inner dashes, at most {MAX_ID}"
        raise SpecError(why, field="run_id", hint=f"call it {slug(str(run_id))!r}")
    return run_id


def is_run_id(name: str) -> bool:
    """Return whether `check_run_id` accepts ``name``."""
    return is_slug(name)


def new_run_id(name: str, *, now: float | None = None, token: str | None = None) -> str:
    """Return ``<UTC yyyymmdd-hhmmss>-<name>-<4 hex>``; the name is cut so that the id has at most 40 characters."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(now))
    tail = token or secrets.token_hex(2)
    room = MAX_ID - len(stamp) - len(tail) - 2
    return check_run_id(f"{stamp}-{name[:room].rstrip('-')}-{tail}")
