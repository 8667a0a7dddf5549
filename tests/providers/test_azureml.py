"""Provider ``azureml`` over the wire: the contract suite, and whole runs by the command line."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from azureml_client import AzureClient
from clients import DDP, PATIENCE, TRAIN, at_work, check_cancelled
from jobs import Done, Jobs
from worlds.azureml.world import AzureMLWorld

from cloudtrain.testing.contract import ProviderContract
from cloudtrain.testing.platform import FakePlatform

pytestmark = [pytest.mark.docker, pytest.mark.remote, pytest.mark.slow]


@pytest.fixture(scope="class")
def made(
    tmp_path_factory: pytest.TempPathFactory, azure_server: str, engine: Any, images: Callable[[str], str]
) -> Iterator[AzureMLWorld]:
    """Give a FakePlatform for this class alone, with its environment."""
    folder = tmp_path_factory.mktemp("world")
    with at_work(folder, engine, lambda: AzureMLWorld(folder, azurite=azure_server, image=images("pip"))) as world:
        yield world


class TestAzureML(ProviderContract):
    @pytest.fixture(scope="class")
    @classmethod
    def world(cls, made: AzureMLWorld) -> FakePlatform:
        return made


# ----------------------------------------------------------------------------------------------------------- whole runs


@pytest.fixture
def client(made: AzureMLWorld, tmp_path: Path) -> Iterator[AzureClient]:
    jobs = Jobs(tmp_path)
    yield AzureClient(made, jobs)
    jobs.close()


@pytest.mark.timeout(4 * PATIENCE)
class TestWholeRuns:
    @pytest.mark.proof
    def test_a_preempted_job_is_followed_by_another_that_resumes_bit_for_bit(
        self, client: AzureClient, whole: dict[int, float], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Check with mounted folders that lag. The first job fails, as users report."""
        monkeypatch.setattr(client.world.plane, "sync_lag", 1.0)
        epoch = random.Random(7).randrange(1, 3)
        words = client.words(DDP, "spot", *TRAIN, "--spot", "--retries", "1", "--keep-checkpoints", "2")
        process = client.jobs.start(*words)
        client.until("spot", f"step {22 * epoch} epoch {epoch} ")
        client.job("spot").preempt(1)
        out, err = process.communicate(timeout=PATIENCE)
        done = Done(process.returncode, out, err)
        assert (done.code, done.json["state"]) == (0, "succeeded"), err
        first, second = done.json["attempts"]
        assert (first["number"], first["category"], second["number"]) == ("0.0", "preempted", "1.0")
        assert int(second["resumed_from"].removeprefix("step-")) >= 22 * epoch
        assert client.job("spot").status == "Failed"
        assert client.losses("spot") == whole
        assert client.world.plane.wire.leaks == []

    @pytest.mark.proof
    def test_a_cancelled_run_leaves_the_checkpoints_of_all_ranks(self, client: AzureClient) -> None:
        check_cancelled(client)
        assert client.job("stopped").history[-2:] == ["CancelRequested", "Canceled"]
