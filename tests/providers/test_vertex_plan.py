"""Requests of provider ``vertex`` before it sends them."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from plans import Plans
from profiles import examples
from rows import for_each
from trials import TRIALS

from cloudtrain.errors import SpecError, UnsupportedError
from cloudtrain.provider_api import catalog
from cloudtrain.provider_api.protocol import Request
from cloudtrain.providers._cloud import digest_of, problems
from cloudtrain.providers.vertex import SAMPLE, Provider
from cloudtrain.providers.vertex import machines as own_machines
from cloudtrain.providers.vertex.validate import _shapes, check_body
from cloudtrain.providers.vertex.validate import fields as known_fields

ROOT = Path(__file__).parents[2]
SETTINGS: dict[str, Any] = SAMPLE["settings"]  # type: ignore[assignment]
STORE = "gs://contract-bucket/store"
RESERVATION = "projects/p/zones/europe-west4-a/reservations/mine"
NETWORK = "projects/123456789/global/networks/vpc"

PLANS = Plans(Provider, SETTINGS, STORE, {"image": "team/trainer:1"})
layout, planned, refused = PLANS.layout, PLANS.planned, PLANS.refused


def pools(request: Request) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = request.body["jobSpec"]["workerPoolSpecs"]
    return found


def paths(request: Request) -> dict[str, str]:
    """Return the ``--path`` pairs of the command line."""
    words = pools(request)[0]["containerSpec"]["args"]
    return dict(after.split("=", 1) for before, after in pairwise(words) if before == "--path")


# ---------------------------------------------------------------------------------------------------------- the request


def test_the_request_of_a_plain_job() -> None:
    request = planned()
    body, spec = request.body, request.body["jobSpec"]
    assert set(body) == {"displayName", "jobSpec", "labels"}
    assert set(spec) == {"workerPoolSpecs", "scheduling", "baseOutputDirectory", "serviceAccount"}
    assert spec["scheduling"] == {"timeout": "86400s", "restartJobOnWorkerRestart": True}
    assert spec["baseOutputDirectory"] == {"outputUriPrefix": f"{STORE}/runs/r/native"}
    (pool,) = pools(request)
    assert set(pool) == {"machineSpec", "replicaCount", "diskSpec", "containerSpec"}
    assert pool["diskSpec"] == {"bootDiskSizeGb": 100}, "no type of disk unless the job names one"
    assert pool["machineSpec"] == {"machineType": "n1-standard-4"}
    assert pool["replicaCount"] == "1"
    assert request.operation == "POST v1/projects/contract/locations/europe-west4/customJobs"
    assert request.instance_types == ("n1-standard-4",)
    assert {key for key in body["labels"] if key.startswith("cloudtrain-")} == set(body["labels"])
    assert body["labels"]["cloudtrain-job"] == body["displayName"]


@pytest.mark.parametrize(("count", "replicas"), [(1, ["1"]), (2, ["1", "1"]), (5, ["1", "4"])])
def test_the_primary_is_a_pool_of_one(count: int, replicas: list[str]) -> None:
    found = pools(planned(instance_count=count, gpu="L4:1", disk_gb=300))
    assert [pool["replicaCount"] for pool in found] == replicas
    assert all({**pool, "replicaCount": ""} == {**found[0], "replicaCount": ""} for pool in found)
    assert found[0]["diskSpec"] == {"bootDiskSizeGb": 300}
    assert found[0]["containerSpec"]["env"] == [{"name": "CLOUDTRAIN_NODES", "value": str(count)}]


def test_the_command_starts_the_bootstrap_and_names_every_path() -> None:
    inputs = {
        "a": "gs://data/a/", "one": "gs://data/b/x.csv", "c": {"url": "gs://data/c", "mode": "copy"},
        "d": {"url": "gs://data/d.csv", "mode": "copy"}, "n": "nfs://10.0.0.5/vol/X/",
    }  # fmt: skip
    request = planned({"network": NETWORK}, attempt=3, inputs=inputs, resume_from=f"{STORE}/runs/q/live/checkpoints")
    container = pools(request)[0]["containerSpec"]
    assert container["command"][:2] == ["/bin/sh", "-c"], (
        "a string instead of a list is a StartError (vertex-ai-samples #1898)"
    )
    assert container["command"][2].endswith('exec "$python" "$@"')
    words = container["args"]
    assert words[0] == "-c"
    compile(words[1], "bootstrap", "exec")
    assert len(words[1]) < 8192
    assert words[2] == f"{STORE}/runtime/{'d' * 64}/cloudtrain.pyz"
    assert words[3:8] == [
        "run",
        "--context",
        "/gcs/contract-bucket/store/runs/r/container/context.json",
        "--attempt",
        "3",
    ]
    assert paths(request) == {
        "code": f"/gcs/contract-bucket/store/code/{'c' * 64}/code.tar.gz",
        "live": "/gcs/contract-bucket/store/runs/r/live",
        "resume": "/gcs/contract-bucket/store/runs/q/live/checkpoints",
        "input.a": "/gcs/data/a",
        "file.one": "/gcs/data/b/x.csv",
        "copy.c": "/gcs/data/c",
        "copyfile.d": "/gcs/data/d.csv",
        "input.n": "/mnt/nfs/n",
    }
    assert pools(request)[0]["nfsMounts"] == [{"server": "10.0.0.5", "path": "/vol/X", "mountPoint": "n"}]


def test_settings_reach_the_request() -> None:
    given = {
        "network": NETWORK,
        "tensorboard": "projects/1/locations/europe-west4/tensorboards/7",
        "encryption_key": "projects/p/locations/europe-west4/keyRings/r/cryptoKeys/k",
        "persistent_resource_id": "mine",
        "debug_shell": True,
    }
    body = planned(given).body
    assert body["encryptionSpec"] == {"kmsKeyName": given["encryption_key"]}
    assert {key: body["jobSpec"][key] for key in ("network", "tensorboard", "persistentResourceId")} == {
        "network": NETWORK,
        "tensorboard": given["tensorboard"],
        "persistentResourceId": "mine",
    }
    assert body["jobSpec"]["enableWebAccess"] is True
    command = "gcloud ai persistent-resources delete mine --region=europe-west4"
    for warm in ({}, {"keep_warm": "1h"}):
        assert planned(given, **warm).notes[-1].endswith(f"paid for, until you run: {command}")
    with pytest.raises(UnsupportedError, match="do not wait for a job") as caught:
        planned(keep_warm="1h")
    assert "gcloud ai persistent-resources create" in caught.value.hint
    affinity = pools(planned({"reservation": RESERVATION}, gpu="H100:8"))[0]["machineSpec"]["reservationAffinity"]
    assert affinity["values"] == [RESERVATION]
    assert affinity["reservationAffinityType"] == "SPECIFIC_RESERVATION"
    for word, kind in (("any", "ANY_RESERVATION"), ("none", "NO_RESERVATION")):
        spec = pools(planned({"reservation": word}, gpu="H100:8"))[0]["machineSpec"]
        assert spec["reservationAffinity"] == {"reservationAffinityType": kind}


@for_each(
    ("fields", "machine", "accelerator", "processes"),
    [
        ({}, "n1-standard-4", None, 1),
        ({"cpus": 30}, "n1-highcpu-32", None, 1),
        ({"memory_gb": 300}, "n1-highmem-64", None, 1),
        ({"gpu": "T4:1"}, "n1-standard-4", ("NVIDIA_TESLA_T4", 1), 1),
        ({"gpu": "T4:4"}, "n1-standard-16", ("NVIDIA_TESLA_T4", 4), 4),
        ({"gpu": "T4:1", "cpus": 16}, "n1-standard-16", ("NVIDIA_TESLA_T4", 1), 1),
        ({"gpu": "T4:1", "instance_type": "n1-highmem-2"}, "n1-highmem-2", ("NVIDIA_TESLA_T4", 1), 1),
        ({"gpu": "T4:4", "cpus": 64, "memory_gb": 50}, "n1-highcpu-64", ("NVIDIA_TESLA_T4", 4), 4),
        ({"gpu": "P4:2"}, "n1-standard-8", ("NVIDIA_TESLA_P4", 2), 2),
        ({"gpu": "P100:1", "memory_gb": 100}, "n1-highmem-16", ("NVIDIA_TESLA_P100", 1), 1),
        ({"gpu": "V100:8"}, "n1-standard-32", ("NVIDIA_TESLA_V100", 8), 8),
        ({"gpu": "L4:1", "cpus": 10}, "g2-standard-12", ("NVIDIA_L4", 1), 1),
        ({"gpu": "A100-40GB:16"}, "a2-megagpu-16g", ("NVIDIA_TESLA_A100", 16), 16),
        ({"gpu": "A100-80GB:2"}, "a2-ultragpu-2g", ("NVIDIA_A100_80GB", 2), 2),
        ({"gpu": "H100:8", "nproc_per_node": 4}, "a3-highgpu-8g", ("NVIDIA_H100_80GB", 8), 4),
        ({"gpu": "H100:1", "spot": True}, "a3-highgpu-1g", ("NVIDIA_H100_80GB", 1), 1),
        ({"instance_type": "a3-megagpu-8g"}, "a3-megagpu-8g", ("NVIDIA_H100_MEGA_80GB", 8), 8),
        ({"gpu": "H200:8"}, "a3-ultragpu-8g", ("NVIDIA_H200_141GB", 8), 8),
        ({"gpu": "B200:8"}, "a4-highgpu-8g", ("NVIDIA_B200", 8), 8),
        ({"gpu": "RTXPRO6000:1"}, "g4-standard-48", ("NVIDIA_RTX_PRO_6000", 1), 1),
        ({"instance_type": "n1-highmem-8"}, "n1-highmem-8", None, 1),
        ({"instance_type": "n1-highmem-8", "gpu": "T4:2"}, "n1-highmem-8", ("NVIDIA_TESLA_T4", 2), 2),
        ({"instance_type": "c2-standard-60"}, "c2-standard-60", None, 1),
    ],
)
def test_machines(fields: dict[str, Any], machine: str, accelerator: tuple[str, int] | None, processes: int) -> None:
    request = planned(**fields)
    spec = pools(request)[0]["machineSpec"]
    assert spec["machineType"] == machine
    assert (spec.get("acceleratorType"), spec.get("acceleratorCount")) == (accelerator or (None, None))
    assert request.context["processes"] == processes


def test_every_accelerator_of_the_table_is_one_of_the_api() -> None:
    """Check also that it has every GPU of the API, without retired ones and those that are no GPUs."""
    ours = {machine.accelerator for machine in catalog.machines("vertex") if machine.gpu}
    theirs = {name for name in known_fields()["enums"]["AcceleratorType"] if name.startswith("NVIDIA_")}
    assert ours == theirs - {"NVIDIA_TESLA_K80"}
    assert ours > own_machines.FLEXIBLE
    assert all(bool(machine.gpu) == bool(machine.accelerator) for machine in catalog.machines("vertex"))


def test_the_client_tries_gpus_in_order_of_preference() -> None:
    two = ["H100:8", "T4:1"]
    first, second = planned(gpu=two), planned(gpu=two, gpu_index=1)
    assert [pools(request)[0]["machineSpec"]["acceleratorType"] for request in (first, second)] == [
        "NVIDIA_H100_80GB",
        "NVIDIA_TESLA_T4",
    ]
    assert second.context["processes"] == 1
    assert first.body["displayName"] != second.body["displayName"]
    assert first.next_gpu_index("capacity") == 1


def scheduling(given: Mapping[str, Any] | None = None, /, **fields: Any) -> dict[str, Any]:
    found: dict[str, Any] = planned(given, **fields).body["jobSpec"]["scheduling"]
    return {key: value for key, value in found.items() if key != "restartJobOnWorkerRestart"}


def test_requests_for_machines() -> None:
    day = "86400s"
    assert scheduling(spot=True) == {"timeout": day, "strategy": "SPOT"}
    assert scheduling(spot=True, max_wait=60) == {"timeout": day, "strategy": "SPOT"}
    flexible = {"timeout": day, "strategy": "FLEX_START", "maxWaitDuration": "7200s"}
    assert scheduling(gpu="L4:1", max_wait="2h") == flexible
    assert scheduling({"strategy": "FLEX_START"}, gpu="L4:1") == {"timeout": day, "strategy": "FLEX_START"}
    assert scheduling({"strategy": "STANDARD"}, gpu="L4:1", max_wait=60) == {"timeout": day, "strategy": "STANDARD"}
    for own, fields in (({}, {"gpu": "T4:1"}), ({}, {}), ({"reservation": RESERVATION}, {"gpu": "L4:1"})):
        assert scheduling(own, max_wait=60, **fields) == {"timeout": day}, "the waiting client ends that wait"
    assert "FLEX_START" in " ".join(planned(gpu="L4:1", max_wait=60).notes)
    for fields in ({}, {"max_cost": 1e6}):  # the price of the machine gives no notes of its own
        assert sum("six times" in note for note in planned(spot=True, **fields).notes) == 1


def test_a_plan_s_advice_on_its_machine() -> None:
    """Check advice instead of refusals, because the facts of Google's pages age."""

    def notes(given: Mapping[str, Any] | None = None, /, **fields: Any) -> str:
        return " ".join(planned(given, **fields).notes)

    assert "recommends a reservation, spot or FLEX_START (a max_wait) for H200" in notes(gpu="H200:8")
    for own, fields in (({"reservation": "any"}, {}), ({}, {"spot": True}), ({}, {"max_wait": 60})):
        assert "recommends" not in notes(own, gpu="H200:8", **fields)
    assert "support of P100 ended on 15 September 2026" in notes(gpu="P100:1")
    assert "lists no L4 in europe-west1, but in asia-northeast3," in notes({"location": "europe-west1"}, gpu="L4:1")
    assert notes(gpu="L4:1") == notes({"location": "europe-west1"}) == ""


def test_reservation_none_goes_with_every_way_to_get_machines() -> None:
    own = {"reservation": "none"}
    assert scheduling(own, spot=True)["strategy"] == "SPOT"
    assert scheduling(own, gpu="L4:1", max_wait=60)["strategy"] == "FLEX_START"
    assert scheduling({**own, "persistent_resource_id": "mine"}) == {"timeout": "86400s"}


def test_a_node_gets_its_grace_by_a_path_that_options_cannot_change() -> None:
    assert paths(planned(spot=True))["grace"] == "15"
    assert "grace" not in paths(planned())
    for spot, seconds in ((True, 15), (False, 30)):
        request = planned(spot=spot)
        assert Provider().launch_spec(request).rules.stop_grace == seconds
        assert Provider.node_environment({}, paths(request)).stop_grace == seconds
        assert all(mount.path.startswith("/gcs/") for mount in Provider().launch_spec(request).nodes[0].mounts)


@for_each(
    ("gpu", "transport"),
    [("H200:8", "RDMA: "), ("B200:8", "RDMA: "), ("H100:8", ""), ("A100-80GB:8", ""), ("T4:4", "")],
)
def test_the_transport_between_nodes_is_named(gpu: str, transport: str) -> None:
    two = " ".join(planned(gpu=gpu, instance_count=2).notes)
    assert ("GPUDirect-RDMA between nodes: each node sources /usr/local/gib/" in two) is bool(transport)
    assert "GPUDirect" not in " ".join(planned(gpu=gpu).notes)


def test_the_transport_of_mega_machines_is_tcpxo() -> None:
    notes = planned(instance_type="a3-megagpu-8g", instance_count=2).notes
    assert "GPUDirect-TCPXO between nodes: each node sources /usr/local/nvidia/lib64/" in " ".join(notes)


@for_each(
    ("fields", "warned"),
    [
        ({"gpu": "T4:1"}, True),
        ({"gpu": "T4:1", "cpus": 8}, False),
        ({"gpu": "L4:1"}, False),
        ({}, False),
    ],
)
def test_a_machine_on_which_the_log_may_stop_is_named(fields: dict[str, Any], warned: bool) -> None:
    assert ("logging agent" in " ".join(planned(**fields).notes)) is warned


def test_limits() -> None:
    assert scheduling(max_runtime="2h") == {"timeout": "7200s"}
    # 0.75 USD an hour, two nodes
    bought = planned(gpu="T4:1", instance_count=2, max_cost=3)
    assert bought.body["jobSpec"]["scheduling"]["timeout"] == "7200s"
    assert "max_cost" in " ".join(bought.notes)
    assert scheduling(max_cost=1e6) == {"timeout": "86400s"}


REFUSED: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("vertex.project", {"project": ""}, {}, "gcloud config get project"),
    ("vertex.project", {"project": "a b"}, {}, "gcloud projects list"),
    ("vertex.location", {"location": ""}, {}, "store's bucket"),
    ("vertex.location", {"location": "europe-west4-a"}, {}, "one region"),
    ("vertex.location", {"location": "us"}, {}, "one region"),
    ("vertex.location", {"location": "europe-west4,us-central1"}, {}, "one region"),
    ("vertex.location", {"location": ["europe-west4", "us-central1"]}, {}, "one region"),
    ("vertex.service_account", {"service_account": "trainer"}, {}, "e-mail"),
    ("vertex.network", {"network": "projects/my-project/global/networks/vpc"}, {}, "NUMBER"),
    ("vertex.reservation", {"reservation": "mine"}, {}, "projects/P/zones/Z"),
    ("vertex.reservation", {"reservation": RESERVATION, "persistent_resource_id": "mine"}, {}, "persistent resource"),
    ("vertex.reservation", {"reservation": "any", "persistent_resource_id": "mine"}, {}, "persistent resource"),
    ("vertex.strategy", {"strategy": "FLEX_START", "reservation": "any"}, {}, "cannot use a reservation"),
    ("resources.disk_gb", {}, {"disk_gb": 50}, "100 to 64000 GB, not 50"),
    ("resources.disk_gb", {}, {"disk_gb": 70_000}, "100 to 64000 GB, not 70000"),
    ("resources.gpu", {}, {"gpu": "GB200:4"}, "set vertex.reservation"),
    ("resources.gpu", {"reservation": "none"}, {"gpu": "GB200:4"}, "set vertex.reservation"),
    ("resources.instance_type", {}, {"instance_type": "a4x-highgpu-4g", "max_wait": 60}, "shared reservation"),
    ("resources.gpu", {}, {"gpu": "T4:1", "cpus": 32}, "n1-highmem-16, has 16 cores"),
    ("resources.gpu", {}, {"gpu": "T4:1", "instance_type": "n1-highmem-32"}, "T4:2, T4:4"),
    ("resources.instance_type", {}, {"instance_type": "a3-edgegpu-8g"}, "does not know which GPUs"),
    ("vertex.encryption_key", {"encryption_key": "k"}, {}, "keyRings"),
    ("vertex.persistent_resource_id", {"persistent_resource_id": "A"}, {}, "persistent resource"),
    ("vertex.tensorboard", {"tensorboard": "7"}, {}, "tensorboards/NUMBER"),
    (
        "vertex.service_account",
        {"tensorboard": "projects/1/locations/l/tensorboards/7", "service_account": ""},
        {},
        "vertex.service_account: is not set, and a job with a tensorboard needs it; ",
    ),
    ("vertex.strategy", {"strategy": "SPOT"}, {}, "STANDARD"),
    ("vertex.strategy", {"strategy": "FLEX_START"}, {"gpu": "T4:1"}, "H200 and B200; n1-standard-4 has T4:1"),
    ("vertex.strategy", {"strategy": "FLEX_START"}, {}, "H200 and B200; n1-standard-4 has no GPU"),
    ("vertex.strategy", {"strategy": "FLEX_START", "reservation": RESERVATION}, {}, "cannot use a reservation"),
    ("vertex.strategy", {"strategy": "STANDARD"}, {"spot": True}, "spot machines"),
    ("vertex.reservation", {"reservation": RESERVATION}, {"spot": True}, "spot machines"),
    ("vertex.log_drain", {"log_drain": -1}, {}, "0 or more"),
    ("vertex.prices", {"prices": {"n1-standard-4": 0}}, {}, "dollars"),
    ("store", {"store": "s3://bucket/x"}, {}, "gs://BUCKET"),
    ("store", {"store": "gs://contract-bucket/a#b"}, {}, "rename the file"),
    ("image", {}, {"image": None}, "stopped at 2.4"),
    ("resources.shm_gb", {}, {"shm_gb": 4}, ": no field of a custom job sets the size of /dev/shm; "),
    ("resources.gpu", {}, {"gpu": "T4:3"}, "T4:4"),
    ("resources.gpu", {}, {"gpu": "H100:1"}, "only as spot or by FLEX_START"),
    ("resources.instance_type", {}, {"instance_type": "a3-highgpu-2g"}, "only as spot or by FLEX_START"),
    ("resources.gpu", {}, {"instance_type": "a2-highgpu-1g", "gpu": "A100-40GB:2"}, "has A100-40GB:1"),
    ("resources.gpu", {}, {"instance_type": "n1-standard-64", "gpu": "V100:1"}, "V100-16GB:8"),
    ("resources.cpus", {}, {"instance_type": "n1-standard-4", "cpus": 8}, "has 4 cores"),
    ("resources.instance_type", {}, {"instance_type": "a5-highgpu-8g"}, "does not know which GPUs"),
    ("resources.instance_type", {}, {"instance_type": "n2-standard-8", "gpu": "T4:1"}, "does not know which GPUs"),
    ("resources.instance_type", {}, {"instance_type": "n1-standard-2"}, "n1-standard-4"),
    ("resources.instance_type", {}, {"instance_type": "ct5lp-hightpu-4t"}, "TPU"),
    ("resources.instance_type", {}, {"instance_type": "Big One"}, "machine type"),
    ("max_runtime", {}, {"gpu": "L4:1", "max_wait": 60, "max_runtime": "8d"}, "7 days"),
    ("max_cost", {"prices": {}}, {"max_cost": 5}, "[vertex.prices]"),
    ("max_cost", {}, {"max_cost": 0.00001}, "does not pay"),
    ("inputs.a", {}, {"inputs": {"a": "s3://b/x"}}, "gs:, nfs:"),
    ("inputs.a", {}, {"inputs": {"a": "gs://b/x?y"}}, "rename the file"),
    ("inputs.a.shard", {}, {"inputs": {"a": {"url": "gs://b/x", "shard": True}}}, "whole input"),
    ("inputs.a.mode", {}, {"inputs": {"a": {"url": "nfs://h/x", "mode": "copy"}}}, "never copied"),
    ("inputs.a", {}, {"inputs": {"a": "nfs://h/x"}}, "vertex.network"),
    ("inputs.a", {"network": NETWORK}, {"inputs": {"a": "nfs://h"}}, "nfs://SERVER/PATH"),
    ("resume_from", {}, {"resume_from": "s3://b/x"}, "gs:// only"),
    ("secrets.T", {}, {"secrets": {"T": "env:PATH"}}, "gcloud secrets create PATH"),
    ("secrets.T", {}, {"secrets": {"T": "aws:arn:aws:ssm:eu-west-1:123456789012:parameter/x"}}, "gcp:projects/"),
    ("secrets.T", {}, {"secrets": {"T": "gcp:mine"}}, "projects/P/secrets/S"),
    ("vertex.service_account", {"service_account": ""}, {"secrets": {"T": "gcp:projects/p/secrets/s"}}, "secrets.T"),
    ("tags.Team", {}, {"tags": {"Team": "x"}}, "lower-case"),
    ("tags.team", {}, {"tags": {"team": "Vision"}}, "lower-case"),
    ("tags.goog-x", {}, {"tags": {"goog-x": "y"}}, "reserved"),
    ("tags.cloudtrain-run", {}, {"tags": {"cloudtrain-run": "y"}}, "reserved"),
    ("tags", {}, {"tags": {f"t{n}": "" for n in range(59)}}, "at most 56"),
]
_SPEC = "options.vertex.jobSpec"
OPTIONS: list[tuple[str, dict[str, Any], str]] = [
    ("options.vertex.nothing", {"nothing": 1}, "no such field"),
    (f"{_SPEC}.experimentrun", {"jobSpec": {"experimentrun": "x"}}, "experimentRun"),
    (f"{_SPEC}.enableDashboardAccess", {"jobSpec": {"enableDashboardAccess": "yes"}}, "true or false"),
    (f"{_SPEC}.reservedIpRanges", {"jobSpec": {"reservedIpRanges": "r"}}, "a list"),
    (f"{_SPEC}.scheduling.timeout", {"jobSpec": {"scheduling": {"timeout": "1s"}}}, "itself sets"),
    (f"{_SPEC}.scheduling", {"jobSpec": {"scheduling": None}}, "itself sets"),
    (
        f"{_SPEC}.workerPoolSpecs.*.containerSpec.args",
        {"jobSpec": {"workerPoolSpecs": {"*": {"containerSpec": {"args": ["x"]}}}}},
        "itself sets",
    ),
    (
        f"{_SPEC}.workerPoolSpecs.*.containerSpec.env.1.name",
        {"jobSpec": {"workerPoolSpecs": {"0": {"containerSpec": {"env": {"1": {"name": "CLOUDTRAIN_X"}}}}}}},
        "is set already",
    ),
    (
        f"{_SPEC}.workerPoolSpecs.*.containerSpec.env",
        {"jobSpec": {"workerPoolSpecs": {"0": {"containerSpec": {"env": {"0": {"value": "x"}}}}}}},
        "itself sets",
    ),
    (
        f"{_SPEC}.workerPoolSpecs.*.containerSpec.env.1.name",
        {"jobSpec": {"workerPoolSpecs": {"0": {"containerSpec": {"env": {"1": {"name": "A B"}}}}}}},
        "not a name",
    ),
    (
        f"{_SPEC}.workerPoolSpecs.*.pythonPackageSpec",
        {"jobSpec": {"workerPoolSpecs": {"0": {"pythonPackageSpec": {"pythonModule": "x"}}}}},
        "cloudtrain's container",
    ),
]


@pytest.mark.costly
@for_each(("field", "given", "fields", "says"), REFUSED)
def test_refused(field: str, given: dict[str, Any], fields: dict[str, Any], says: str) -> None:
    error = refused(given, **fields)
    assert error.field == field, error
    assert says in f"{error}; {error.hint}"
    assert not isinstance(error, UnsupportedError) or error.provider == "vertex"


@for_each(("field", "options", "says"), OPTIONS)
def test_options_that_the_api_refuses(field: str, options: dict[str, Any], says: str) -> None:
    error = refused(options={"vertex": options})
    assert error.field.startswith(field.rpartition(".")[0]), error
    assert says in f"{error}; {error.hint}"


def test_no_whole_number_and_one_with_too_many_digits_are_named() -> None:
    for value, shown in ((10**18, "1000000000000000000"), ([1], "[1]")):
        assert list(problems(_shapes(), "int64", value)) == [((), f"must be a whole number, not {shown}", "")]


def test_the_number_of_nodes_is_that_of_the_pools() -> None:
    body = json.loads(json.dumps(planned(instance_count=3).body))
    check_body(body)
    for pool in body["jobSpec"]["workerPoolSpecs"]:
        pool["containerSpec"]["env"][0]["value"] = "2"
    with pytest.raises(SpecError, match="CLOUDTRAIN_NODES"):
        check_body(body)


def test_options_reach_every_pool() -> None:
    disk = {"workerPoolSpecs": {"*": {"diskSpec": {"bootDiskType": "pd-ssd"}}}, "scheduling": {"disableRetries": True}}
    request = planned(instance_count=2, options={"vertex": {"jobSpec": disk}})
    assert [pool["diskSpec"] for pool in pools(request)] == [{"bootDiskSizeGb": 100, "bootDiskType": "pd-ssd"}] * 2
    scheduling = request.body["jobSpec"]["scheduling"]
    assert scheduling == {"timeout": "86400s", "disableRetries": True}
    assert Provider(**SETTINGS).launch_spec(request).rules.max_restarts == 0
    error = refused(spot=True, options={"vertex": {"jobSpec": {"scheduling": {"disableRetries": True}}}})
    assert "spot machines" in str(error)


def test_a_request_has_a_digest_of_itself() -> None:
    first, again = planned(), planned()
    assert first.body == again.body
    others = [planned(image="team/other:1"), planned(max_runtime=600), planned(disk_gb=200)]
    assert len({request.body["labels"]["cloudtrain-request"] for request in (first, *others)}) == 4
    assert digest_of({"a": 1, "b": {"c": 2, "d": 3}}) == digest_of({"b": {"d": 3, "c": 2}, "a": 1})


# ----------------------------------------------------------------------------------------------- against the SDK itself


def parsed(body: Mapping[str, Any]) -> dict[str, Any]:
    """Parse a body strictly by Google's own protobufs, and return it as they print it."""
    from google.cloud.aiplatform_v1.types import CustomJob
    from google.protobuf import json_format

    message = json_format.ParseDict(dict(body), CustomJob.pb(CustomJob()))
    document: dict[str, Any] = json_format.MessageToDict(message)
    return document


def test_the_table_of_fields_is_the_installed_sdks() -> None:
    spec = importlib.util.spec_from_file_location("vertex_tables", ROOT / "tools" / "vertex_tables.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    installed = module.fields()
    assert {**installed, "source": ""} == {**known_fields(), "source": ""}


@pytest.mark.slow
def test_a_plan_loads_nothing_of_googles() -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]);"
        "import test_vertex_plan as t; before = set(sys.modules); t.planned(gpu='L4:1', max_wait=60);"
        "print(sorted(m for m in set(sys.modules) - before if m.partition('.')[0] in ('google', 'gcsfs', 'requests')))"
    )
    here = str(Path(__file__).parent)
    done = subprocess.run(
        [sys.executable, "-c", code, here],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": f"{ROOT}/tests:{ROOT}/tests/kit", "PATH": "/usr/bin:/bin"},
    )
    assert done.stdout.strip() == "[]"


TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=30)
ODD = st.one_of(st.none(), st.booleans(), st.integers(-5, 2**40), TEXT, st.lists(TEXT, max_size=2))
URLS = st.one_of(
    st.sampled_from(["gs://b-1/x", "gs://b-1/x.csv", "nfs://10.0.0.1/v", "nfs://h", "gs://B/x", "s3://b/x"]),
    st.builds("gs://bucket/{}".format, st.text("abc/é ?#&={}$()%'\"\\", max_size=40)),
)
GPUS = st.lists(
    st.sampled_from(["T4:1", "T4:4", "P4:2", "P100:4", "V100:8", "L4:2", "A100-80GB:8", "H100:1", "H200:8", "GB200:4"]),
    max_size=3,
)
SPEC_OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "experiment": TEXT,
        "enableDashboardAccess": ODD,
        "reservedIpRanges": ODD,
        "models": st.lists(TEXT, max_size=2),
        "pscInterfaceConfig": st.one_of(
            ODD, st.just({"networkAttachment": "n", "dnsPeeringConfigs": [{"domain": "d"}]})
        ),
        "protectedArtifactLocationId": ODD,
        "scheduling": st.fixed_dictionaries({}, optional={"disableRetries": ODD, "maxWaitDuration": ODD}),
        "workerPoolSpecs": st.dictionaries(
            st.sampled_from(["*", "0", "1"]),
            st.fixed_dictionaries(
                {},
                optional={
                    "diskSpec": st.one_of(ODD, st.just({"bootDiskType": "pd-ssd"})),
                    "machineSpec": st.one_of(ODD, st.just({"gpuPartitionSize": "1g.5gb"})),
                    "lustreMounts": st.lists(st.fixed_dictionaries({"instanceIp": ODD}), max_size=1),
                    "containerSpec": st.fixed_dictionaries(
                        {}, optional={"env": st.dictionaries(st.sampled_from(["1"]), ODD, max_size=1)}
                    ),
                },
            ),
            max_size=2,
        ),
        "nosuch": ODD,
    },
)
JOBS = st.fixed_dictionaries(
    {},
    optional={
        "name": st.from_regex(r"[a-z0-9](-?[a-z0-9]){0,30}", fullmatch=True),
        "image": st.one_of(st.none(), st.text("ab:/@.-{}$", min_size=1, max_size=30)),
        "instance_count": st.integers(1, 4096),
        "instance_type": st.sampled_from(["n1-standard-8", "a2-highgpu-1g", "c2-standard-8", "a9-x", "a b", "ü"]),
        "gpu": GPUS,
        "nproc_per_node": st.integers(1, 8),
        "cpus": st.integers(1, 100),
        "memory_gb": st.integers(1, 700),
        "disk_gb": st.integers(1, 100_000),
        "spot": st.booleans(),
        "max_runtime": st.integers(1, 100_000_000),
        "max_wait": st.integers(1, 3_000_000),
        "max_cost": st.floats(0.0001, 1e9),
        "retries": st.integers(0, 100),
        "tags": st.dictionaries(
            st.one_of(TEXT.filter(bool), st.just("team")), st.one_of(TEXT, st.just("a-1")), max_size=3
        ),
        "inputs": st.dictionaries(
            st.from_regex(r"[A-Za-z][A-Za-z0-9_-]{0,62}", fullmatch=True),
            st.fixed_dictionaries({"url": URLS}, optional={"mode": st.sampled_from(["auto", "copy", "mount"])}),
            max_size=3,
        ),
        "args": st.lists(TEXT, max_size=2),
        "resume_from": st.just(f"{STORE}/runs/q/live/checkpoints"),
        "options": st.fixed_dictionaries({"vertex": st.fixed_dictionaries({}, optional={"jobSpec": SPEC_OPTIONS})}),
    },
)
GIVEN = st.fixed_dictionaries(
    {},
    optional={
        "service_account": st.sampled_from(["", "a@p.iam.gserviceaccount.com"]),
        "network": st.sampled_from(["", NETWORK]),
        "tensorboard": st.sampled_from(["", "projects/1/locations/l/tensorboards/7"]),
        "encryption_key": st.sampled_from(["", "projects/p/locations/l/keyRings/r/cryptoKeys/k"]),
        "persistent_resource_id": st.sampled_from(["", "mine"]),
        "strategy": st.sampled_from(["", "STANDARD", "FLEX_START"]),
        "reservation": st.sampled_from(["", RESERVATION, "any", "none"]),
        "debug_shell": st.booleans(),
    },
)


def _planned(given: dict[str, Any], fields: dict[str, Any]) -> Request | SpecError:
    try:
        return planned(given, **fields)
    except SpecError as exc:
        return exc


def _without_defaults(value: Any) -> Any:
    """Drop the values that JSON of protobufs omits: false, 0, empty. Numbers of 64 bits become text."""
    if isinstance(value, dict):
        return {
            key: kept
            for key, item in value.items()
            if (kept := _without_defaults(item)) not in ({}, [], "", False, 0, None)
        }
    return [_without_defaults(item) for item in value] if isinstance(value, list) else value


@pytest.mark.costly
@settings(max_examples=examples(3 * TRIALS or 300), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(GIVEN, JOBS)
def test_what_is_planned_is_what_the_sdk_sends(given: dict[str, Any], fields: dict[str, Any]) -> None:
    """Check that the SDK sends every field of the body and nothing else, or that the plan names a refused field."""
    request = _planned(given, fields)
    event("refused" if isinstance(request, SpecError) else "planned")
    if isinstance(request, SpecError):
        assert request.field
        assert "\n" not in str(request)
        return
    assert _without_defaults(parsed(request.body)) == _without_defaults(request.body)
    body = request.body
    assert re.fullmatch(r"[a-z0-9-]{1,63}", body["displayName"])
    assert all(re.fullmatch(r"[a-z][a-z0-9_-]{0,62}", key) for key in body["labels"])
    assert all(re.fullmatch(r"[a-z0-9_-]{0,63}", value) for value in body["labels"].values())
    counts = [int(pool["replicaCount"]) for pool in pools(request)]
    assert counts[0] == 1
    assert sum(counts) == fields.get("instance_count", 1)
    Provider(**{**SETTINGS, **given}).launch_spec(request)


# -------------------------------------------------------------------------------------------------------- started nodes


def test_nodes_of_a_request() -> None:
    inputs = {"train": "gs://data/x", "one": "gs://data/y.csv", "c": {"url": "gs://data/z", "mode": "copy"}}
    request = planned(gpu="T4:4", instance_count=3, inputs=inputs)
    simulation = Provider(**SETTINGS).launch_spec(request)
    assert len(simulation.nodes) == 3
    node = simulation.nodes[2]
    assert (node.gpus, node.cpus, node.platform) == (4, 16, "linux/amd64")
    spec = json.loads(node.env["CLUSTER_SPEC"])
    assert spec["task"] == {"type": "workerpool1", "index": 1}
    assert spec["cluster"]["workerpool1"][1] == f"{node.hostname}:2222"
    assert node.env["AIP_MODEL_DIR"] == f"{STORE}/runs/r/native/model/"
    assert {(mount.url, mount.path, mount.kind) for mount in node.mounts} == {
        (url, f"/gcs/{url.removeprefix('gs://')}", kind)
        for url, kind in (
            (f"{STORE}/runs/r/container/context.json", "mount"),
            (f"{STORE}/runs/r/container/key", "mount"),
            (f"{STORE}/runtime/{'d' * 64}", "mount"),
            (f"{STORE}/code/{'c' * 64}", "mount"),
            (f"{STORE}/runs/r/live", "sync"),
            (f"{STORE}/runs/r/native", "sync"),
            ("gs://data/x", "mount"),
            ("gs://data/y.csv", "mount"),
            ("gs://data/z", "mount"),
        )
    }
    assert (simulation.rules.time_limit, simulation.rules.stop_signal) == (86400, "SIGTERM")
    assert simulation.rules.restart_on == (6, 11, 134, 139)
    arm = Provider(**SETTINGS).launch_spec(planned({"reservation": RESERVATION}, gpu="GB200:4")).nodes[0]
    assert arm.platform == "linux/arm64"


def test_a_file_system_is_mounted() -> None:
    node = (
        Provider(**SETTINGS).launch_spec(planned({"network": NETWORK}, inputs={"n": "nfs://10.0.0.5/vol/x"})).nodes[0]
    )
    assert ("nfs://10.0.0.5/vol/x", "/mnt/nfs/n", "mount") in {(m.url, m.path, m.kind) for m in node.mounts}


def test_unsupported_calls_name_the_provider() -> None:
    with pytest.raises(UnsupportedError, match="provider vertex"):
        planned(shm_gb=1)
