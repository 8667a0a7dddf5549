"""A credential among the options of a store, in the form of whichever library moves its bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["Credential"]


@dataclass(frozen=True, kw_only=True)
class Credential:
    """``own`` is the vendor SDK's credentials, which renew themselves; ``fsspec`` makes of them what the file system
    takes, and is called only for one: it may have much to import."""

    own: Any
    fsspec: Callable[[], Any]
