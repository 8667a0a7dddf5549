"""How many examples a property-based test gets: a few in ``make test-fast``, very many in ``make proof``."""

from __future__ import annotations

import os

PROFILE = os.environ.get("CLOUDTRAIN_TEST_PROFILE", "default")
FEW, EXAMPLES, MOST, PROOF_EXAMPLES = 5, 25, 40, 1000


def examples(count: int) -> int:
    """For a test that wants ``count`` of them. The proof gives it all; the suite gives `MOST` at most."""
    return count if PROFILE == "proof" else min(count, FEW if PROFILE == "fast" else MOST)
