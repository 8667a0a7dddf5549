"""The number of examples of a property-based test: a few in ``make test-fast``, very many in ``make proof``."""

from __future__ import annotations

import os

PROFILE = os.environ.get("CLOUDTRAIN_TEST_PROFILE", "default")
FEW, EXAMPLES, MOST, PROOF_EXAMPLES = 5, 25, 40, 1000


def examples(count: int) -> int:
    """Return how many examples a test gets that asks for ``count``. Only the proof gives them all; the suite's limit is
    `MOST`."""
    return count if PROFILE == "proof" else min(count, FEW if PROFILE == "fast" else MOST)
