"""Find the machines on which attempts of a run fail again and again, and leave them out. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ..provider_api.protocol import Provider, extras_of

FAILURES = 2
"""Attempts that end by one machine before it counts as bad: the first may be chance."""


def bad_machines(attempts: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Return the bad machines and the number of attempts that each has ended, by the rows of `attempt_row`.

    A row names a machine after a failed node check, a lost node and an error of a GPU itself. If the platform says
    that the attempt ended for another reason, the machine is not at fault.
    """
    ended = Counter(row["machine"] for row in attempts if row.get("machine") and row["category"] == "infra")
    return {machine: count for machine, count in sorted(ended.items()) if count >= FAILURES}


def without_bad_machines(provider: Provider, attempts: Sequence[Mapping[str, Any]]) -> Provider | None:
    """Return the provider that plans without the bad machines; None if there are none, or the platform cannot."""
    found = bad_machines(attempts)
    return extras_of(provider).without_machines(tuple(found)) if found else None


def bad_machine_rows(provider: Provider, attempts: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return ``bad_machines`` of a result."""
    excluded = without_bad_machines(provider, attempts) is not None
    rows = bad_machines(attempts).items()
    return [{"machine": machine, "attempts": count, "excluded": excluded} for machine, count in rows]
