"""``cloudtrain gc`` and objects of a Kubernetes cluster whose run was deleted."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from doctor_runs import Examiner
from worlds.base import Fault
from worlds.kubernetes.cluster import Refusal
from worlds.kubernetes.pods import stamp
from worlds.kubernetes.world import KubernetesWorld, idle

from cloudtrain import cli
from cloudtrain.store.store import Store

pytestmark = [pytest.mark.remote]

VALUES = {"TOKEN": "geheim"}
FIELDS = {"instance_count": 2, "secrets": {"TOKEN": "env:TOKEN"}}
OLD = "2020-01-01T00:00:00Z"


@pytest.fixture(params=["job", "jobset"])
def world(
    tmp_path_factory: pytest.TempPathFactory,
    examiner: Examiner,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> Iterator[KubernetesWorld]:
    """Give a cluster with the jobs of two runs, ``kept`` and ``dropped``. The record of ``dropped`` is deleted."""
    with idle(tmp_path_factory.mktemp("world"), monkeypatch, kind=request.param) as found:
        examiner.settings("kubernetes", found.store, found.settings)
        for run_id in ("kept", "dropped"):
            plan = found.plan(FIELDS, run_id=run_id)
            store = Store(found.store)
            store.create_run(plan.layout, {"protocol": 1, **plan.document()})
            native = found.provider.submit(plan.request, VALUES)
            while found.key(native) not in found.plane.jobs:
                found.provider.status(native)
        for run_id in ("dropped", "earlier"):  # ``earlier`` is the contract suite's incomplete run
            shutil.rmtree(folder(found) / "runs" / run_id)
        for meta in found.plane.metas(f"{request.param}s").values():
            meta["creationTimestamp"] = OLD
        for job in found.plane.jobs.values():
            job.made["status"] = {**job.made["status"], "conditions": [{"type": "Complete", "status": "True"}]}
        yield found


def folder(world: KubernetesWorld) -> Path:
    return Path(world.store.removeprefix("file://"))


@pytest.fixture
def gc(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, dict[str, Any], str]]:
    def run(*argv: str) -> tuple[int, dict[str, Any], str]:
        capsys.readouterr()
        code = cli.main(["gc", "--json", *argv])
        out, err = capsys.readouterr()
        return code, json.loads(out), err

    return run


def names(world: KubernetesWorld, kind: str) -> list[str]:
    known = [name for at, name in world.plane.jobs if at == "team"] if kind == "jobs" else []
    return known + [name for at, _, name in world.plane.objects if at == kind]


def test_the_job_of_a_deleted_run_goes_with_all_that_it_owns(world: KubernetesWorld, gc: Any) -> None:
    kind = world.settings.get("kind", "job")
    code, found, _ = gc()
    assert code == 0, found
    (item,) = found["found"]
    assert (code, item["kind"]) == (0, kind)
    assert "dropped" in item["key"]
    assert len(names(world, f"{kind}s")) == 2, "gc removed objects without --delete"
    code, found, err = gc("--delete")
    assert f"removed {item['key']}" in err
    for at in {"jobs", f"{kind}s", "services", "secrets"}:
        assert len(names(world, at)) == 1, at
    assert gc()[1]["found"] == []


def test_a_young_job_stays(world: KubernetesWorld, gc: Any) -> None:
    for meta in world.plane.metas(f"{world.settings.get('kind', 'job')}s").values():
        meta["creationTimestamp"] = stamp()
    code, found, _ = gc("--delete")
    assert (code, found["found"], len(found["younger"])) == (0, [], 1)
    assert len(names(world, "jobs")) == 2


def test_a_job_that_may_still_run_stays(world: KubernetesWorld, gc: Any) -> None:
    """Check this because it may belong to a store with the same path on another volume."""
    for job in world.plane.jobs.values():
        job.made["status"] = {**job.made["status"], "conditions": []}
    assert gc("--delete")[1]["found"] == []
    assert len(names(world, "jobs")) == 2


def test_without_the_right_to_list_jobsets_gc_finds_jobs(world: KubernetesWorld, gc: Any) -> None:
    world.plane.wire.faults.append(Fault("GET jobsets", error=Refusal(403, "Forbidden", "you may not list jobsets")))
    _, found, err = gc()
    assert [item["kind"] for item in found["found"]] == ([] if world.settings.get("kind") == "jobset" else ["job"])
    assert ("left out" in err) is (world.settings.get("kind") == "jobset")


@pytest.mark.parametrize("flags", [[], ["--store"]], ids=["named", "flag"])
def test_another_store_uses_the_clusters_of_its_own_runs(
    world: KubernetesWorld, gc: Any, examiner: Examiner, tmp_path: Path, flags: list[str]
) -> None:
    """Check that neither the cluster nor the namespace of the settings counts."""
    other, calls = Store((tmp_path / "other").as_uri()), world.plane.wire.calls
    record = json.loads((folder(world) / "runs/kept/run.json").read_text())
    other.files.write("runs/one/run.json", json.dumps({**record, "provider": "local", "settings": {}}).encode())
    del calls[:]
    assert gc(*flags, other.url, "--delete")[1]["found"] == []
    assert (calls, len(names(world, "jobs"))) == ([], 2)
    other.files.write("runs/two/run.json", json.dumps(record).encode())
    assert gc(*flags, other.url, "--delete")[1]["found"] == []
    assert calls.count("GET jobs") == 1
    examiner.settings("kubernetes", world.store, {**world.settings, "namespace": "elsewhere"})
    assert ["dropped" in item["key"] for item in gc(*flags, world.store, "--delete")[1]["found"]] == [True]
    assert len(names(world, "jobs")) == 1


def test_the_empty_folder_of_a_volume_that_is_not_mounted_removes_nothing(world: KubernetesWorld, gc: Any) -> None:
    shutil.rmtree(folder(world))
    folder(world).mkdir()
    assert gc("--delete")[1]["found"] == []
    assert len(names(world, "jobs")) == 2


def test_a_refused_listing_is_skipped(world: KubernetesWorld, gc: Any) -> None:
    """Check that gc still collects files."""
    (folder(world) / "code" / ("a" * 64)).mkdir(parents=True)
    (folder(world) / "code" / ("a" * 64) / "code.tar.gz").write_bytes(b"x")
    os.utime(folder(world) / "code" / ("a" * 64) / "code.tar.gz", (0, 1.0))
    world.plane.wire.faults.append(Fault("GET jobs", error=Refusal(403, "Forbidden", "you may not list jobs")))
    code, found, err = gc()
    assert (code, [item["kind"] for item in found["found"]]) == (0, ["code"])
    assert "objects on kubernetes are left out: list jobs: you may not list jobs" in err


def test_a_service_without_an_owner_is_found(world: KubernetesWorld, gc: Any) -> None:
    """Check the Service that ``kubectl create`` makes from a plan's manifest."""
    plain = type(world.provider)(**{**world.settings, "kind": "job"})
    plan = world.plan(FIELDS, run_id="by-hand")
    service = plain.plan(plan.job, plan.layout).body["items"][1]
    made = {**service, "metadata": {**service["metadata"], "creationTimestamp": OLD}}
    world.plane.objects["services", "team", service["metadata"]["name"]] = made
    found = [item for item in gc()[1]["found"] if item["kind"] == "service"]
    assert [item["key"].rpartition("/")[2] for item in found] == [service["metadata"]["name"]]
