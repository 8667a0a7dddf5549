"""All platforms at once, with faults: see `soak`. No accepted run is lost."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from soak import PATIENCE, Soak, few_places, places

pytestmark = [
    pytest.mark.docker,
    pytest.mark.remote,
    pytest.mark.slow,
    # aiohttp warns of a body above 1 MiB, and gcsfs sends such bodies.
    pytest.mark.filterwarnings("ignore:Sending a large body directly:ResourceWarning"),
]

SEED = os.environ.get("CLOUDTRAIN_SEED") or "0"
MINUTES = float(os.environ.get("CLOUDTRAIN_SOAK_MINUTES") or 30)


@contextmanager
def soaking(soak: Soak, made: Iterator[Callable[[], None]]) -> Iterator[Soak]:
    """Yield the soak with every platform. Check that it leaves nothing behind."""
    shared, before = set(os.listdir("/dev/shm")), soak.left()
    with pytest.MonkeyPatch.context() as patch, ExitStack() as worlds:
        for name in [name for name in os.environ if name.startswith(("AWS_", "AZURE_", "GOOGLE_", "GCSFS_"))]:
            patch.delenv(name)
        for end in made:
            worlds.callback(end)
        for place in soak.places:
            if place.world is not None:  # this process bypasses the proxies
                for name, value in place.world.plane.environ().items():
                    patch.setenv(name, value)
        try:
            yield soak
        finally:
            soak.close()
    assert soak.left() == before
    assert not [name for name in set(os.listdir("/dev/shm")) - shared if "cloudtrain" in name]
    soak.scratch.rmdir()


@pytest.mark.proof
@pytest.mark.timeout(PATIENCE + 300)
def test_one_here_and_one_in_a_cloud(tmp_path: Path, engine: Any, images: Callable[[str], str]) -> None:
    soak = Soak(tmp_path, SEED, engine, short=True)
    with soaking(soak, few_places(soak, image=images("py313"))):
        soak.run(0, least=2)
    assert soak.count["runs"] == 2


@pytest.mark.proof
@pytest.mark.timeout(60 * MINUTES + 1800)
def test_half_an_hour(
    tmp_path: Path,
    s3_server: str,
    azure_server: str,
    engine: Any,
    images: Callable[[str], str],
    record_property: Callable[[str, object], None],
) -> None:
    soak = Soak(tmp_path, SEED, engine)
    with soaking(soak, places(soak, moto=s3_server, azurite=azure_server, image=images("py313"))):
        try:
            soak.run(60 * MINUTES, least=len(soak.places))
        finally:
            record_property("note", report(soak))
            print(report(soak))
    assert soak.count["client killed"] >= MINUTES
    assert soak.count["node killed"] >= MINUTES // 10


def report(soak: Soak) -> str:
    """Return the faults by kind, and their effects."""
    for proxy in soak.proxies:
        soak.count.update(proxy.count)
        proxy.count.clear()
    befell = ", ".join(f"{what} {times}" for what, times in sorted(soak.count.items()) if times)
    lost = len(soak.trials) - soak.count["runs"]
    return f"{MINUTES:g} minutes, seed {soak.seed}, {len(soak.trials)} runs, lost {lost}; {befell}"
