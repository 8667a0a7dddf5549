"""End an attempt that waits too long for machines, if no platform does: one client decides, for all clients.

The decision is a record of the attempt, created before the cancel. If the deciding client dies in between, the next one
cancels. The run then ends by that record, not as cancelled by a user.
"""

from __future__ import annotations

from ..provider_api.protocol import Status
from ..storage.timings import CLIENT_TIMINGS
from ..store.store import Store, StoreClock, attempt_record
from .attempts import AttemptPolicy, Wait
from .outcome import records_within


class MaxWait:
    """The rule for one run, by its ``policy``. Waits are counted by the store's ``clock``."""

    def __init__(self, *, store: Store, run_id: str, policy: AttemptPolicy, clock: StoreClock) -> None:
        self._store, self._run_id, self._policy, self._clock = store, run_id, policy, clock
        self._due: dict[tuple[int, int], float] = {}

    def ends(self, attempt: int, status: Status) -> str:
        """Return the reason to cancel ``attempt`` now, given its ``status``; empty if there is none.

        Reads the store only once an attempt may be due. Raises the store's errors.
        """
        if self._policy.max_wait is None or status.state != "pending":
            return ""
        key, ticks = (attempt, len(status.attempts)), self._clock.ticks
        if ticks() <= self._due.get(key, -1.0):
            return ""
        # Only the newest attempt counts, and one that a user cancelled ends as cancelled.
        if attempt < self._store.newest_attempt(self._run_id) or self._store.cancelled(self._run_id):
            return ""
        decision = self._policy.decide_wait(self._waited(attempt, status))
        if isinstance(decision, Wait):
            self._due[key] = ticks() + decision.seconds
            return ""
        reason = f"{decision.reason}: {status.reason}" if status.reason else decision.reason
        self._store.expire(self._run_id, attempt, reason)
        self._due[key] = ticks() + CLIENT_TIMINGS.cancel_again
        return reason

    def _waited(self, attempt: int, status: Status) -> float:
        """Return the seconds for which the attempt has waited: since its submission, or the loss of its machines."""
        begun = [info for info in status.attempts if info.started is not None]
        known = records_within(attempt, self._store.starts(self._run_id))
        if begun and (lost := begun[-1].ended) is not None:
            return self._clock.since(lost)
        starts, record = max(len(begun), len(known)), attempt_record(self._run_id, attempt, "submitted")
        # Its nodes may have no record yet: use the platform's, or that of a client that saw it running.
        if starts or status.started is not None or self._store.seen_running(self._run_id, attempt) is not None:
            record = self._store.write_wait(self._run_id, attempt, starts, self._clock.now())
        return self._clock.age(record) or 0.0
