"""Long waits of nodes and of their supervisor, which the tests of cloudtrain shorten.

``CLOUDTRAIN_TEST_TIMINGS="silence=12,stop_grace=6"`` sets them for one process and all that it starts on this machine.
It is for the tests alone, and reaches no node of a cloud. No limit of a job is among them.
"""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass

__all__ = ["TIMINGS", "Timings", "timings_of"]

VARIABLE = "CLOUDTRAIN_TEST_TIMINGS"


@dataclass(frozen=True, kw_only=True)
class Timings:
    """Seconds of each wait."""

    silence: float = 90.0
    """Without even a ping, before a peer counts as lost; a cut network often heals sooner."""
    stop_grace: float = 40.0
    """Between SIGTERM and SIGKILL of a node on this machine: 30 for the script, as Kubernetes and Azure give, the rest
    to mirror its work."""
    restart: float = 1.0
    """Between the end of all nodes and their next start."""


def timings_of(text: str) -> Timings:
    """Return the timings with the changes of ``text``, as ``name=seconds,…``. Raises `ValueError`, `TypeError`."""
    changes = dict(pair.split("=", 1) for pair in text.split(",") if pair)
    return dataclasses.replace(Timings(), **{name: float(value) for name, value in changes.items()})


TIMINGS = timings_of(os.environ.get(VARIABLE, ""))
