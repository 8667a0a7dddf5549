"""Run the suite that every provider passes: subclass `ProviderContract` and give it a `FakePlatform`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, ClassVar

import pytest

from .planning import PlanContract
from .platform import FakePlatform
from .running import RunContract

__all__ = ["ProviderContract"]


class ProviderContract(PlanContract, RunContract):
    """One provider's contract. A subclass gives the fixture ``world`` (scope class), and nothing else but ``xfails``.

    ``xfails`` maps a test's name (with its ``[parameter]``, or without for all) to the reason this platform cannot pass
    it. Such a test must fail: once it passes, the suite fails until the entry is gone.
    """

    xfails: ClassVar[Mapping[str, str]] = {}

    def __init_subclass__(cls, **more: Any) -> None:
        """Refuse a class that drops or replaces any part of the suite."""
        super().__init_subclass__(**more)
        suite = {name for part in ProviderContract.__mro__[:-1] for name in vars(part) if not name.startswith("__")}
        suite -= {"world", "xfails"}
        static = inspect.getattr_static
        replaced = sorted(name for name in suite if static(cls, name) is not static(ProviderContract, name))
        if replaced:
            raise TypeError(f"{cls.__name__} replaces {', '.join(replaced)}; use xfails, with the reason")
        for name, reason in cls.xfails.items():
            if name.partition("[")[0] not in suite or not reason.strip():
                raise TypeError(f"{cls.__name__}.xfails[{name!r}] names no test of the suite, or gives no reason")

    @pytest.fixture(scope="class")
    @classmethod
    def world(cls) -> FakePlatform:
        """Return the platform under test, and its provider."""
        raise TypeError(f"{cls.__name__} gives no world")

    @pytest.fixture(autouse=True)
    def _expect_failures(self, request: pytest.FixtureRequest) -> None:
        name = str(request.node.name)
        reason = self.xfails.get(name) or self.xfails.get(name.partition("[")[0])
        if reason:
            request.applymarker(pytest.mark.xfail(reason=reason, strict=True))

    def test_no_test_is_replaced(self) -> None:
        with pytest.raises(TypeError, match="replaces test_plan_is_pure"):
            type("TestLax", (ProviderContract,), {"test_plan_is_pure": None})
        with pytest.raises(TypeError, match="no reason"):
            type("TestLax", (ProviderContract,), {"xfails": {"test_plan_is_pure": " "}})
