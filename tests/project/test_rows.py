"""`for_each`, by which one test runs many rows."""

from __future__ import annotations

import inspect

import pytest
from rows import for_each


def test_all_rows_run_and_each_that_failed_is_named() -> None:
    seen: list[tuple[int, str]] = []

    @for_each("number", [1, 2])
    @for_each(("text", "good"), [("a", True), ("b", False)])
    def check(number: int, text: str, good: bool, fixture: str) -> None:
        seen.append((number, text + fixture))
        if number == 2:
            assert good
        elif not good:
            with pytest.raises(ValueError, match="never"):
                pass

    assert list(inspect.signature(check).parameters) == ["fixture"]
    with pytest.raises(
        AssertionError, match=r"2 of 2 rows failed:\n1: AssertionError: 1 of 2 rows failed:\n2: "
    ) as caught:
        check(fixture="!")
    assert seen == [(1, "a!"), (1, "b!"), (2, "a!"), (2, "b!")]
    assert "'b', False: Failed: DID NOT RAISE" in str(caught.value.__cause__)
