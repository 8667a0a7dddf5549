"""One test for all rows of a rule, in place of a test for each row. pytest needs some milliseconds for each test."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

__all__ = ["for_each"]


def for_each(names: str | Sequence[str], rows: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run the test's body for each row, as ``pytest.mark.parametrize`` does, in one test.

    Use it for bodies without fixtures of their own. All rows run. The failure names each row that failed, and shows
    the first of them. Two of these decorators run all pairs.
    """
    fields = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    table = [row if len(fields) > 1 else (row,) for row in rows]
    assert table, "no rows"

    def decorate(check: Callable[..., None]) -> Callable[..., None]:
        def test(*of_class: Any, **more: Any) -> None:
            failed: list[tuple[str, BaseException]] = []
            for row in table:
                given = dict(zip(fields, row, strict=True))
                try:
                    check(*of_class, **given, **more)
                except (Exception, pytest.fail.Exception) as exc:  # noqa: BLE001 - reported with its row
                    shown = ", ".join(repr(value)[:100] for value in row)
                    failed.append((f"{shown}: {type(exc).__name__}: {str(exc).partition(chr(10))[0]}", exc))
            if failed:
                told = "\n".join(text for text, _ in failed)
                raise AssertionError(f"{len(failed)} of {len(table)} rows failed:\n{told}") from failed[0][1]

        signature = inspect.signature(check)
        left = [item for name, item in signature.parameters.items() if name not in fields]
        test.__name__, test.__qualname__, test.__doc__ = check.__name__, check.__qualname__, check.__doc__
        test.__module__, test.__signature__ = check.__module__, signature.replace(parameters=left)  # type: ignore[attr-defined]
        return test

    return decorate
