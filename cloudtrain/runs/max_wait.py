"""An attempt that waits for machines for too long, where no platform ends that: a client decides, once for all clients.

The decision is a record of the attempt, created before anything is cancelled: whoever comes after a client that died in
between cancels, and the run ends by that record, not as cancelled by a user.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ..provider_api.protocol import Status
from ..store.store import Store
from ..validate import duration
from .log_order import attempt_key

__all__ = ["MaxWait"]

AGAIN_SECONDS = 60.0
"""How long an attempt that was cancelled has to end, until it is cancelled again."""


class MaxWait:
    """The rule of one run; ``limit`` is seconds, None for as long as it takes. ``clock`` gives Unix seconds."""

    def __init__(self, *, store: Store, run_id: str, limit: int | None, clock: Callable[[], float] = time.time) -> None:
        self._store, self._run_id, self._limit, self._clock = store, run_id, limit, clock
        self._due: dict[tuple[int, int], float] = {}

    def ends(self, attempt: int, status: Status) -> str:
        """Why ``attempt``, which the platform says stands so, is to be cancelled now; empty when it is not.

        Looks into the store only once an attempt may be due. Raises what the store raises.
        """
        if self._limit is None or status.state != "pending":
            return ""
        key = (attempt, len(status.attempts))
        if self._clock() <= self._due.get(key, 0.0):
            return ""
        # Only the newest attempt can be meant, and what a user has cancelled ends as that.
        if attempt < max(self._store.attempts(self._run_id)) or self._store.cancelled(self._run_id):
            return ""
        self._due[key] = self._since(attempt, status) + self._limit
        if self._clock() <= self._due[key]:
            return ""
        reason = f"no machines within max_wait ({duration(self._limit)})"
        self._store.expire(self._run_id, attempt, reason)
        self._due[key] = self._clock() + AGAIN_SECONDS
        return reason

    def _since(self, attempt: int, status: Status) -> float:
        """Unix seconds: since it was submitted, or, of one that has had its machines, since it lost them."""
        begun = [info for info in status.attempts if info.started is not None]
        known = [r for r in self._store.starts(self._run_id) if attempt_key(str(r["attempt"]))[:1] == (attempt,)]
        starts = max(len(begun), len(known))
        # Its nodes may not have left a word yet: the platform's, or that of a client that saw it running.
        seen = status.started is not None or self._store.seen_running(self._run_id, attempt) is not None
        if starts or seen:
            lost = begun[-1].ended if begun else None
            return self._store.waits_since(self._run_id, attempt, starts, self._clock()) if lost is None else lost
        submitted = self._store.submitted(self._run_id, attempt)
        return float(submitted["time"]) if submitted else self._clock()
