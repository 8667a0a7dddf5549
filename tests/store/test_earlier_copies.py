"""A run of an earlier version that shared copies between runs: it is read, retried, moved and collected."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from earlier import recorded_with_shared_copies
from foldercloud import Provider, install
from fsspec.implementations.memory import MemoryFileSystem

from cloudtrain import Estimator
from cloudtrain.provider_api.protocol import Layout
from cloudtrain.runs.retry import Retry
from cloudtrain.runs.run import Run
from cloudtrain.store.gc import collect
from cloudtrain.store.store import Store, committed_in

NO_MACHINES = {"state": "failed", "category": "capacity", "reason": "no machines came"}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    (tmp_path / "site").mkdir()
    install(tmp_path / "site")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setattr(Provider, "schemes", frozenset({"memory"}))
    for place in range(2):
        (tmp_path / f"cloud-{place}").mkdir()
    recorded_with_shared_copies(tmp_path)
    yield Estimator.attach("memory://bucket/store-0/runs/r")
    MemoryFileSystem.store.clear()


def copies(store: Store) -> dict[str, bytes]:
    """Return the files that the nodes get, by the path in their copy."""
    layout = Layout.from_dict(store.run("r")["layout"])
    assert layout.resume is not None
    tree = {f"resume{key[len(layout.resume) :]}": data for key, data in below(store, layout.resume).items()}
    return {**tree, "train": store.files.read(layout.inputs["train"].url[len(store.url) + 1 :])}


def below(store: Store, url: str) -> dict[str, bytes]:
    return {f"{store.url}/{key}": store.files.read(key) for key in store.files.list(url[len(store.url) + 1 :])}


def test_it_is_read_and_its_next_attempt_has_the_same_copies(run: Run) -> None:
    assert run.status().state == "pending"
    request, layout = run.store.attempt_request("r", 0), Layout.from_dict(run.record["layout"])
    assert request is not None
    assert request.context["resume"] == layout.resume
    assert layout.resume is not None
    assert layout.resume.startswith("memory://bucket/store-0/data/")
    committed, _ = committed_in(run.store.files, layout.resume[len(run.store.url) + 1 :])
    assert [item.name for item in committed] == ["step-6"]


def test_it_moves_with_its_copies_and_has_them_for_itself(run: Run, tmp_path: Path) -> None:
    before = copies(run.store)
    assert before["train"] == b"1,2\n"
    Provider(folder=str(tmp_path / "cloud-0")).stand("r.0", **NO_MACHINES)
    run.reconcile(retry=Retry(run))
    assert run.url == "memory://bucket/store-1/runs/r"
    layout = Layout.from_dict(run.record["layout"])
    assert layout.inputs["train"].url == f"{run.url}/inputs/train/data/x.csv"
    assert layout.resume == f"{run.url}/resume/live/checkpoints"
    assert copies(run.store) == before
    assert Provider(folder=str(tmp_path / "cloud-1")).jobs() == ["r.0"]


def test_its_copies_are_kept_as_long_as_it_names_them(run: Run) -> None:
    assert collect(run.store, older_than=0, delete=True).found == ()
    assert copies(run.store)["train"] == b"1,2\n"
    run.store.files.remove("runs/r")
    assert sorted(item.kind for item in collect(run.store, older_than=0, delete=True).found) == [
        "code", "data", "data", "runtime",
    ]  # fmt: skip
    assert list(run.store.files.list()) == ["staging/deleting"], "the lease, released"
