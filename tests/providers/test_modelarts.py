"""Provider ``modelarts`` over the wire: the contract suite, and whole runs by the command line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from clients import at_work
from worlds.modelarts.world import ModelArtsWorld

from cloudtrain.storage.files import files
from cloudtrain.testing.contract import ProviderContract
from cloudtrain.testing.platform import PATIENCE, FakePlatform

pytestmark = [pytest.mark.docker, pytest.mark.remote, pytest.mark.slow]


@pytest.fixture(scope="class")
def made(
    tmp_path_factory: pytest.TempPathFactory, engine: Any, images: Callable[[str], str]
) -> Iterator[ModelArtsWorld]:
    """Give a FakePlatform for this class alone, with its environment."""
    folder = tmp_path_factory.mktemp("world")
    with at_work(folder, engine, lambda: ModelArtsWorld(folder, image=images("pip"))) as world:
        yield world


class TestModelArts(ProviderContract):
    @pytest.fixture(scope="class")
    @classmethod
    def world(cls, made: ModelArtsWorld) -> FakePlatform:
        return made


HOLD = """
import os, time
from pathlib import Path
assert Path(os.environ["CLOUDTRAIN_INPUT_DATA"], "a.csv").read_text() == "data a"
assert os.environ["CLOUDTRAIN_INPUT_DATA"].startswith("/home/ma-user/")
assert os.getuid() != 0
print("holding", os.environ["CLOUDTRAIN_ATTEMPT"], flush=True)
while os.environ["CLOUDTRAIN_ATTEMPT"] != "0.2" and not os.path.exists(os.environ["CLOUDTRAIN_PREEMPT_FILE"]):
    time.sleep(0.05)
"""


def test_starts_in_place_and_on_new_machines_have_numbers_of_their_own(made: ModelArtsWorld) -> None:
    """Check this because a new container counts its starts from 1 again. The words that ModelArts appends for an input
    have no effect."""
    (made.place.code / "hold.py").write_text(HOLD)
    store = files(made.store, storage=made.provider.storage)
    store.write("given/a.csv", b"data a")
    inputs = {"data": {"url": f"{made.store}/given/", "mode": "copy"}}
    run = made.send(made.plan({"entry_point": "hold.py", "instance_count": 2, "inputs": inputs, "launcher": "python"}))
    job = made.job(run)
    for attempt, fault in (("0.0", (1, "restarted", "proc_restart")), ("0.1", (0, "drained", "job_reschedule"))):
        made.await_line(run, f"holding {attempt}")
        job.fault(*fault)
    result = run.wait(timeout=PATIENCE, poll=0.2)
    assert result["state"] == "succeeded", result["reason"]
    assert [row["number"] for row in result["attempts"]] == ["0.0", "0.1", "0.2"]
    assert [row["start_type"] for row in job.records] == ["init_or_rescheduled", "restarted", "init_or_rescheduled"]
    assert (job.schedule_count, job.process_count) == (2, 1)
