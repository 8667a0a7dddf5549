"""The pytest plugin: fixtures to test a user's own submitting code offline (docs/testing.md).

It is loaded wherever cloudtrain is installed, so this module imports next to nothing. Each fixture imports what it
needs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from .fake_cloud import FakeCloud
    from .places import Places

__all__ = ["cloudtrain_offline", "cloudtrain_snapshot", "cloudtrain_store", "fake_cloud"]

_BEFORE = frozenset(name for name in os.environ if name.startswith("CLOUDTRAIN_"))
_KEPT = frozenset({"CLOUDTRAIN_DEBUG", "CLOUDTRAIN_SNAPSHOTS"})


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker of the contract suite."""
    text = "by_runtime: what cloudtrain's own runtime decides on the nodes, alike on every platform"
    config.addinivalue_line("markers", text)


@pytest.fixture
def cloudtrain_offline(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail the test at any connection of this Python beyond this machine, in one line with the address."""
    from .network import Guard

    guard = Guard(request.node)
    guard.install(monkeypatch)
    manager = request.config.pluginmanager
    manager.register(guard)
    yield
    manager.unregister(guard)


@pytest.fixture
def cloudtrain_store(cloudtrain_offline: None, monkeypatch: pytest.MonkeyPatch) -> Places:
    """Return the test's default store, empty and in memory. No file of settings and no earlier ``CLOUDTRAIN_…``
    variable is read. Every bucket that the test names (``s3://…``, ``gs://…``, ``abfs://…``) is in memory too."""
    from .places import Places

    for name in _BEFORE - _KEPT:
        monkeypatch.delenv(name, raising=False)
    return Places(monkeypatch)


@pytest.fixture
def fake_cloud(
    cloudtrain_store: Places, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[FakeCloud]:
    """Replace every provider's platform: plans are the real ones, and sent jobs are scripted or run here."""
    from .fake_cloud import FakeCloud

    cloud = FakeCloud(tmp_path_factory.mktemp("cloudtrain", numbered=True))
    cloud.install(monkeypatch)
    yield cloud
    cloud.close()


@pytest.fixture
def cloudtrain_snapshot(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Return ``check(plan, name=None)``: compare the plan with a golden file, less what changes by itself.

    The file is ``snapshots/<name>.json`` beside the test's own (default: the test's name). If
    ``CLOUDTRAIN_SNAPSHOTS=write`` is set, it is written.
    """
    from .requests import compare

    def check(planned: Any, name: str | None = None) -> None:
        test = "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in request.node.name)
        compare(planned, Path(request.path).parent / "snapshots" / f"{name or test.strip('-')}.json")

    return check
