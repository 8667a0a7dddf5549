"""A node's work in the seconds after the platform's stop signal, and its number of writes to ``live/``. The runtime
code is real and the machines are simulated (`fleet`), so the seconds are exact."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fleet import Ranks
from fleet_run import Place

from cloudtrain.provider_api.registry import find_provider
from cloudtrain.runtime import mirror_files
from cloudtrain.runtime.checkpoints import complete

pytestmark = pytest.mark.filterwarnings("error")

MINUTES = 10


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Place]:
    made = Place(tmp_path, 2, monkeypatch, request)
    yield made
    made.close()


def site_of_vertex(grace: str | None) -> Any:
    return find_provider("vertex").node_environment({}, {"grace": grace} if grace else {})


@pytest.mark.parametrize("grace", ["15", None])
@pytest.mark.parametrize("seconds", [0.5, 3.0])
def test_a_spot_node_mirrors_its_checkpoints_and_says_how_it_ended(
    place: Place, grace: str | None, seconds: float
) -> None:
    """One checkpoint is complete at the notice. The script saves another ``seconds`` later and runs until it is killed.
    If the node assumed a grace of 30 s where the platform gives 15, record and checkpoint would be missing."""

    def train(ranks: Ranks) -> None:
        ranks.start()
        ranks.stop.wait(1.0)
        ranks.saves("step-1", b"before")
        ranks.notice.wait(60)
        ranks.stop.wait(seconds)
        ranks.saves("step-2", b"after")
        if not ranks.stop.wait(60):
            ranks.over(0)
        else:
            ranks.stopped()

    fleet = place.fleet(train, handles_notice=True, stop_grace=site_of_vertex(grace).stop_grace)
    fleet.start()
    fleet.until(lambda: any((fleet.live / "checkpoints").glob("step-1/*/node-*")) or fleet.world.now > 1004, 60)
    told = fleet.world.now
    for number in range(2):
        fleet.tell_to_stop(number)
    fleet.until(lambda: fleet.over() or fleet.world.now >= told + 15.0, 60)
    assert fleet.over() is (grace is not None)
    if grace:
        assert {record["outcome"] for record in fleet.exits().values()} == {"preempted"}
        assert {found.name for found in complete(fleet.live / "checkpoints")} == {"step-1", "step-2"}
    fleet.until(fleet.over, 60)


@pytest.mark.slow
@pytest.mark.parametrize(("provider", "most"), [("vertex", 4.1), (None, 24.1)])
def test_how_often_a_node_writes_below_the_mounted_store(
    place: Place, monkeypatch: pytest.MonkeyPatch, provider: str | None, most: float
) -> None:
    """Each of these writes creates a new object there. The script logs, and rank 0 writes metrics, every second."""
    written: Counter[str] = Counter()
    original = mirror_files.replace_file

    def replace(source: Path, target: Path, *more: Any, **named: Any) -> None:
        written["metrics"] += target.parent.name == "metrics"
        original(source, target, *more, **named)

    def segment(path: Path, data: bytes) -> int:
        written["segments"] += path.parent.name == "node-0" and path.match("*.log*")
        return writes(path, data)

    writes = Path.write_bytes
    monkeypatch.setattr(mirror_files, "replace_file", replace)
    monkeypatch.setattr(Path, "write_bytes", segment)

    def train(ranks: Ranks) -> None:
        ranks.start()
        for step in range(60 * MINUTES):
            ranks.stop.wait(1.0)
            ranks.says(f"step {step}")
            if ranks.node == 0:
                ranks.measures(step)
        ranks.over(0)

    seconds = site_of_vertex(None).flush_seconds if provider else 5.0
    fleet = place.fleet(train, flush_seconds=seconds)
    fleet.run(60 * MINUTES + 120)
    a_minute = (written["segments"] + written["metrics"]) / MINUTES
    place.figure("writes of node 0 a minute", f"{a_minute:.1f}")
    assert a_minute == pytest.approx(most, rel=0.1)
    lines = sum(path.read_text().count("\n") for path in (fleet.live / "logs").glob("*/node-0/*.log"))
    assert lines >= 60 * MINUTES, "a line is lost"
    assert (fleet.live / "metrics/0.0-node-0.jsonl").read_text().count("\n") == 60 * MINUTES
