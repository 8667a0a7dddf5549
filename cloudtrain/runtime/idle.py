"""Detect a run that leaves all its GPUs idle (``min_gpu_util``). Pure: samples and times in, a reason out.

Every node sends node 0 the use of its busiest GPU with each sample of `usage`. Node 0 ends the run if no GPU of any
node has reached the rule's percentage for the rule's whole time. The time begins with the attempt's first metrics row,
or once `STEADY` samples of one node have reached the percentage. So imports, downloads, a restore and a first compile
do not count.
"""

from __future__ import annotations

from collections import Counter

from ..validate import duration, parse_duration
from .timings import TIMINGS

STEADY = 4
"""Samples, a minute of one node, that show enough: at or above the percentage, that training has begun without a
metrics row; below it, that the GPUs are idle."""
MISSED = 3  # samples that a node may miss. Later nothing is known of its GPUs, and the time begins again


class IdleGpus:
    """The rule ``5% for 30m`` and the samples of all nodes. Times are monotonic seconds."""

    def __init__(self, rule: str) -> None:
        percent, _, time = rule.partition("% for ")
        self._percent, self._seconds = float(percent), parse_duration(time, field="min_gpu_util")
        self._last: dict[int, float] = {}
        self._since: float | None = None
        self._steady: Counter[int] = Counter()
        self._count = 0
        self._sum = self._most = 0.0

    def take(self, node: int, used: float, now: float) -> None:
        """Take a sample: the use of a node's busiest GPU in percent."""
        self._last[node] = now
        if used >= self._percent:
            self._steady[node] += 1
            self._restart(now)
        else:
            self._count, self._sum, self._most = self._count + 1, self._sum + used, max(self._most, used)

    def reason(self, now: float, *, has_metrics: bool) -> str:
        """Return why the run counts as stalled; empty while it does not."""
        if self._since is None and (has_metrics or max(self._steady.values(), default=0) >= STEADY):
            self._since = now
            self._restart(now)
        if self._since is None or not self._last:
            return ""
        if now - min(self._last.values()) > MISSED * TIMINGS.usage:
            self._restart(now)
        if now - self._since < self._seconds or self._count < STEADY * len(self._last):
            return ""
        average = self._sum / self._count
        return (
            f"no GPU was used for {self._percent:g} % in the last {duration(now - self._since)} (min_gpu_util): "
            f"{average:.1f} % on average, {self._most:g} % at most"
        )

    def _restart(self, now: float) -> None:
        self._since = None if self._since is None else now
        self._count, self._sum, self._most = 0, 0.0, 0.0
