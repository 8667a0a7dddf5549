"""A credential among a store's options, in the form of either library that moves its bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["Credential"]


@dataclass(frozen=True, kw_only=True)
class Credential:
    """The vendor SDK's credentials (``own``), which renew themselves. ``fsspec`` converts them for a file system; it
    runs only for one because its imports may be slow."""

    own: Any
    fsspec: Callable[[], Any]
