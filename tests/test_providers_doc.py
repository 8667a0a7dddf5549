"""``docs/providers.md`` is what the generator makes of the code as it is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_page_is_fresh() -> None:
    command = [sys.executable, "-m", "cloudtrain.testing.matrix"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=120)
    assert done.stderr == ""
    assert (ROOT / "docs/providers.md").read_text(encoding="utf-8") == done.stdout, (
        "run: python -m cloudtrain.testing.matrix > docs/providers.md"
    )


def test_no_field_is_ignored() -> None:
    assert "| ignored |" not in (ROOT / "docs/providers.md").read_text(encoding="utf-8")
