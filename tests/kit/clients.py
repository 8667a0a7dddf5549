"""The command line against a fake platform, with a store in its cloud, and the checks of its runs."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
from containers import left
from jobs import Done, Jobs, Once, dying

from cloudtrain.errors import NotFoundError
from cloudtrain.runs.run import Run, open_run
from cloudtrain.storage.files import files
from cloudtrain.testing.platform import FakePlatform

W = TypeVar("W", bound=FakePlatform)

ROOT = Path(__file__).parents[2]
DDP = str(ROOT / "entrypoints/ddp.py")
DIGITS = ROOT / "examples/data/digits.csv.gz"
EPOCHS = 8
STEPS = EPOCHS * ((1797 - 360) // 64)
TRAIN = ("--input", f"train={DIGITS}", "--hp", f"epochs={EPOCHS}")
SHAPE = ("--nodes", "2", "--nproc-per-node", "2")
PLAIN = ("--nodes", "2", "--launcher", "python")
"""For a script without torch: each torchrun imports torch, which takes seconds."""
PATIENCE = 240
"""Seconds to wait for a run's next step while other tests load the machine."""
SHARD = """
    import os, sys, time
    from pathlib import Path
    print("holding", os.environ["RANK"], flush=True)
    while not os.path.exists(os.environ["CLOUDTRAIN_PREEMPT_FILE"]):
        time.sleep(0.05)
    shard = Path(os.environ["CLOUDTRAIN_CHECKPOINT_DIR"], "last", "shard-" + os.environ["RANK"])
    shard.parent.mkdir(exist_ok=True)
    shard.write_text("of " + os.environ["RANK"])
"""
CALLS = {
    "stage": "cloudtrain.store.store:Store.stage",
    "create_run": "cloudtrain.store.store:Store.create_run",
    "write_container": "cloudtrain.store.store:Store.write_container",
    "create_attempt": "cloudtrain.store.store:Store.create_attempt",
    "submit": "cloudtrain.providers.{provider}:Provider.submit",
    "write_submitted": "cloudtrain.store.store:Store.write_submitted",
}
"""The calls of a submit, in order, as in tests/e2e/test_client_crash.py."""
FEW_DEATHS = [("submit", "after")]
DEATHS = [
    pytest.param(step, moment, marks=[] if (step, moment) in FEW_DEATHS else [pytest.mark.proof])
    for step in CALLS
    for moment in ("before", "after")
]
"""The deaths of a client for `check_death`."""


class Client:
    """The command line, with a store in the fake platform's cloud; ``flags`` lead to the platform."""

    def __init__(self, world: FakePlatform, jobs: Jobs, *flags: str) -> None:
        self.world, self.jobs, self.store = world, jobs, world.store
        self.flags = ["--provider", world.provider.name, *flags]
        self.flags += ["--store", self.store, "--json", "--max-runtime", "20m"]

    def words(self, script: str, run_id: str, *flags: str, shape: Sequence[str] = SHAPE) -> list[str]:
        shutil.copytree(Path(script).parent, self.jobs.code, dirs_exist_ok=True)  # an entry point's tasks, too
        return ["submit", Path(script).name, *self.flags, *shape, "--run-id", run_id, *flags]

    def submit(self, script: str, run_id: str, *flags: str, shape: Sequence[str] = SHAPE) -> Done:
        return self.jobs.here(*self.words(script, run_id, *flags, shape=shape))

    def run(self, run_id: str) -> Run:
        return open_run(run_id, store_url=self.store)

    def job(self, run_id: str, attempt: int = 0) -> Any:
        """Return the platform's job of an attempt, once it is submitted."""
        name = f"runs/{run_id}/attempts/{attempt}/submitted.json"
        Jobs.wait_for(lambda: files(self.store).size(name), PATIENCE)
        return self.world.job(self.run(run_id), attempt)  # type: ignore[attr-defined]

    def pulled(self, run_id: str) -> Path:
        folder = self.jobs.tmp / f"pulled-{run_id}"
        done = self.jobs.here("pull", run_id, str(folder), "--store", self.store, "--json")
        assert done.code == 0, done.err
        return folder

    def losses(self, run_id: str) -> dict[int, float]:
        return losses(self.pulled(run_id))


@contextmanager
def at_work(folder: Path, engine: Any, make: Callable[[], W]) -> Iterator[W]:
    """Yield a platform with its environment set. Check that it leaves no container and no network."""
    before = left(engine, folder)
    with pytest.MonkeyPatch.context() as patch:
        world = make()
        for name, value in world.plane.environ().items():  # type: ignore[attr-defined]
            patch.setenv(name, value)
        yield world
        world.close()  # type: ignore[attr-defined]
    assert left(engine, folder) == before


@pytest.fixture(scope="session")
def kubernetes(
    tmp_path_factory: pytest.TempPathFactory, engine: Any, images: Callable[[str], str]
) -> Callable[..., AbstractContextManager[Any]]:
    """Return a function for ``with kubernetes("pip") as world``: a running cluster whose pods have that image of
    tests/images."""
    from worlds.kubernetes.world import BucketWorld, KubernetesWorld

    def cluster(tag: str, *, bucket: bool = False, **settings: Any) -> AbstractContextManager[Any]:
        folder, image = tmp_path_factory.mktemp("world"), images(tag)
        made = BucketWorld if bucket else KubernetesWorld
        return at_work(folder, engine, lambda: made(folder, image=image, **settings))

    return cluster


def losses(folder: Path) -> dict[int, float]:
    """Return the loss of every step of a pulled run."""
    rows = (folder / "metrics.jsonl").read_text().splitlines()
    return {row["step"]: row["loss"] for row in map(json.loads, rows)}


@pytest.fixture(scope="session")
def whole(once: Once, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Return the loss of every step of the digits on provider local: 2 nodes x 2 processes."""

    def train() -> list[tuple[int, float]]:
        jobs = Jobs(tmp_path_factory.mktemp("local"))
        shutil.copytree(Path(DDP).parent, jobs.code, dirs_exist_ok=True)
        done = jobs.submit(
            "ddp.py", *SHAPE, "--max-runtime", "10m", "--pull", str(jobs.tmp / "out"), *TRAIN, timeout=PATIENCE
        )
        assert done.code == 0, done.err
        jobs.close()
        return list(losses(jobs.tmp / "out").items())

    return dict(once("digits", train))


def check_death(client: Client, call: str, moment: str, script: str, natives: Callable[[], list[str]]) -> None:
    """Check that a client that dies ``moment`` a step of `CALLS` leaves no job without a record. The same command then
    resumes with exactly one job. ``natives`` returns the ids of all jobs."""
    name = client.world.provider.name
    words = client.words(script, "the-one", "--detach")
    first = client.jobs.start(*words, python=dying(CALLS[call].format(provider=name), moment))
    out, err = first.communicate(timeout=PATIENCE)
    assert first.returncode == 99, (out, err)
    sent = (call, moment) in (("submit", "after"), ("write_submitted", "before"), ("write_submitted", "after"))
    assert len(natives()) == sent
    if list(CALLS).index(call) > 1 or (call, moment) == ("create_run", "after"):
        run = client.run("the-one")
        assert run.status().state == "pending"
        assert natives() == ([run.result()["native_id"]] if sent else [])
    else:
        with pytest.raises(NotFoundError):
            client.run("the-one")
    again = client.jobs.cli(*words)
    assert again.code == 0, again.err
    assert len(natives()) == 1


def check_cancelled(client: Any) -> None:
    """Check that a cancelled run keeps the checkpoints that all ranks write on the stop signal."""
    script = client.jobs.write("hold/shard.py", SHARD)
    process = client.jobs.start(*client.words(str(script), "stopped"))
    client.until("stopped", "holding 3")
    assert client.jobs.cli("cancel", "stopped", "--store", client.store, "--json").code == 0
    out, err = process.communicate(timeout=PATIENCE)
    done = Done(process.returncode, out, err)
    assert (done.code, done.json["state"]) == (5, "cancelled"), err
    shards = (client.pulled("stopped") / "checkpoints/last").iterdir()
    assert {path.name: path.read_text() for path in shards} == {f"shard-{n}": f"of {n}" for n in range(4)}


def ids_of_a_race(world: FakePlatform) -> set[str]:
    """Let four clients, each with a provider of its own, submit one run at once. Return the jobs that they have."""
    plans = [world.plan(run_id="race") for _ in range(4)]
    again = type(plans[0].provider)
    clients = [dataclasses.replace(p, provider=again(**dataclasses.asdict(p.provider.settings))) for p in plans]
    with ThreadPoolExecutor(4) as pool:
        return {run.result()["native_id"] for run in pool.map(world.send, clients)}
