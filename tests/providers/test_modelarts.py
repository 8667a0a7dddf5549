"""Provider ``modelarts`` over the wire: the contract suite, and whole runs by the command line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from clients import at_work
from worlds.modelarts.world import ModelArtsWorld

from cloudtrain.testing.contract import ProviderContract
from cloudtrain.testing.platform import FakePlatform

pytestmark = [pytest.mark.docker, pytest.mark.remote, pytest.mark.slow]


@pytest.fixture(scope="class")
def made(
    tmp_path_factory: pytest.TempPathFactory, engine: Any, images: Callable[[str], str]
) -> Iterator[ModelArtsWorld]:
    """A world of this class's own, with the environment that leads to it."""
    folder = tmp_path_factory.mktemp("world")
    with at_work(folder, engine, lambda: ModelArtsWorld(folder, image=images("pip"))) as world:
        yield world


class TestModelArts(ProviderContract):
    @pytest.fixture(scope="class")
    @classmethod
    def world(cls, made: ModelArtsWorld) -> FakePlatform:
        return made
