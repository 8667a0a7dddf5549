"""``docs/providers.md`` is what the generator makes of the code as it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from cloudtrain.testing import matrix

ROOT = Path(__file__).parents[1]


def test_the_page_is_fresh(capsys: pytest.CaptureFixture[str]) -> None:
    matrix.main()
    made = capsys.readouterr()
    assert made.err == ""
    assert (ROOT / "docs/providers.md").read_text(encoding="utf-8") == made.out, (
        "run: python -m cloudtrain.testing.matrix > docs/providers.md"
    )
    assert "| ignored |" not in made.out
