"""How many examples a property-based test gets: a few in ``make test-fast``, very many in ``make proof``."""

from __future__ import annotations

import os

PROFILE = os.environ.get("CLOUDTRAIN_TEST_PROFILE", "default")
FEW, EXAMPLES, PROOF_EXAMPLES = 5, 50, 1000


def examples(count: int) -> int:
    """For a test that wants ``count`` of them."""
    return min(count, FEW) if PROFILE == "fast" else count
