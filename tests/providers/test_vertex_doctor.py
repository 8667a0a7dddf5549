"""``cloudtrain doctor vertex`` and a project with one fault at a time: its line, its fix, its exit code."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from doctor_runs import Examiner
from worlds.vertex.plane import metrics as taken
from worlds.vertex.strict import parsed
from worlds.vertex.wire import Fault, Refusal, off
from worlds.vertex.world import BUCKET, VertexWorld

pytestmark = [pytest.mark.remote]

OWN = "europe-west4-docker.pkg.dev/contract/team/trainer:1"
PUBLIC = ["--image", "registry.example/team/none:1"]


@pytest.fixture
def world(
    tmp_path_factory: pytest.TempPathFactory, examiner: Examiner, monkeypatch: pytest.MonkeyPatch
) -> Iterator[VertexWorld]:
    """Give a sound project with settings in the examiner's folder. The checks must create nothing."""
    for name in [name for name in os.environ if name.startswith(("GOOGLE_", "GCSFS_", "CLOUDSDK_"))]:
        monkeypatch.delenv(name)
    world = VertexWorld(tmp_path_factory.mktemp("world"), image="team/none:1")
    for name, value in {**world.plane.environ(), **world.plane.questions.environ()}.items():
        monkeypatch.setenv(name, value)
    examiner.settings("vertex", world.store, world.settings)
    world.plane.questions.images.add("contract/europe-west4/team/trainer:1")
    yield world
    world.close()
    assert world.plane.wire.crashes == []
    assert world.plane.jobs == {}
    assert world.plane.gcs.names(BUCKET) == [], "a check left objects behind"


def test_all_is_well(world: VertexWorld, examiner: Examiner) -> None:
    found = examiner("--image", OWN)
    names = ["settings", "plan", "sdk", "credentials", "api", "bucket", "permissions", "service account", "quota"]
    assert {n: row["status"] for n, row in found.rows.items()} == dict.fromkeys([*names, "image", "store"], "ok"), (
        found.rows
    )
    assert found.code == 0
    assert "tester@contract" in found.rows["credentials"]["detail"]
    assert "custom_model_training_cpus: 20, the job takes 4" in found.rows["quota"]["detail"]
    agent = f"service-{world.plane.number}@gcp-sa-aiplatform-cc.iam.gserviceaccount.com"
    assert f"jobs pull it as {agent}" in found.rows["image"]["detail"]


def test_no_credentials(world: VertexWorld, examiner: Examiner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS")
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(examiner.folder))
    found = examiner(*PUBLIC)
    found.failure("credentials", "no Google Cloud credentials", fix="gcloud auth application-default login", code=3)
    assert found.status("store") == "skipped"


def test_a_key_that_was_revoked(world: VertexWorld, examiner: Examiner) -> None:
    world.plane.identity.signed_in = False
    examiner(*PUBLIC).failure("credentials", "refused", fix="sign in again", code=3)


def test_an_api_that_is_off(world: VertexWorld, examiner: Examiner) -> None:
    world.plane.wire.faults.append(Fault.disabled("GET customJobs", world.plane.project))
    examiner(*PUBLIC).failure("api", "it is disabled", fix="gcloud services enable", code=3)


def test_a_service_that_does_not_answer(world: VertexWorld, examiner: Examiner) -> None:
    world.plane.wire.faults.append(Fault.broken("GET customJobs"))
    examiner(*PUBLIC).failure("api", "does not answer", fix="try again", code=7)


def test_facts_that_the_caller_may_not_read_are_unknown(world: VertexWorld, examiner: Examiner) -> None:
    for operation in ("GET bucket", "POST project permissions", "GET account", "GET quotas", "GET image"):
        world.plane.wire.faults.append(Fault(operation, Refusal.denied("any.get", "it")))
    found = examiner("--image", OWN)
    statuses = [found.status(name) for name in ("bucket", "permissions", "service account", "quota", "image")]
    assert statuses == ["unknown"] * 5, found.rows
    assert found.code == 0


def test_every_fault_of_a_project(world: VertexWorld, examiner: Examiner) -> None:
    """Check that each fault has its own line, fix and code; the command exits with the gravest code."""
    world.plane.gcs.make("far-away", "US-WEST1")
    examiner.settings("vertex", "gs://far-away/store", world.settings)
    world.plane.questions.denied |= {"aiplatform.customJobs.cancel", "iam.serviceAccounts.actAs"}
    world.plane.questions.images.clear()
    world.plane.quotas["custom_model_training_nvidia_t4_gpus"] = 0
    found = examiner("--image", OWN, "--gpu", "T4:4")
    found.failed("bucket", "in us-west1, the jobs are in europe-west4", fix="vertex.location to us-west1", code=2)
    found.failed("permissions", "aiplatform.customJobs.cancel", fix="Vertex AI User", code=3)
    found.failed("service account", "may not act as", fix="gcloud iam service-accounts add-iam-policy-binding", code=3)
    found.failed("quota", "custom_model_training_nvidia_t4_gpus: 0, the job takes 4", fix="ask for 4", code=4)
    found.failed("image", "has no", fix="docker push", code=2)
    assert (found.code, found.status("store")) == (3, "ok")
    assert world.plane.gcs.names("far-away") == []


def test_a_persistent_resource_has_the_machines_of_the_job(world: VertexWorld, examiner: Examiner) -> None:
    examiner.settings("vertex", world.store, {**world.settings, "persistent_resource_id": "warm"})
    flags, title = [*PUBLIC, "--nodes", "2", "--keep-warm", "30m"], "persistent resource"
    found = examiner(*flags)
    found.failed(title, "there is no warm in europe-west4", fix="gcloud ai persistent-resources list", code=2)
    pools = [{"machineSpec": {"machineType": "n1-standard-4"}, "replicaCount": "1"}]
    made = world.plane.questions.resources["warm"] = {"state": "PROVISIONING", "resourcePools": pools}
    examiner(*flags).failed(title, "warm is PROVISIONING, not RUNNING", fix="wait, or name another", code=4)
    made["state"] = "RUNNING"
    text = "warm has 1 x n1-standard-4; the job needs 2 x n1-standard-4"
    examiner(*flags).failed(title, text, fix="choose other machines", code=2)
    pools[0]["autoscalingSpec"] = {"minReplicaCount": "1", "maxReplicaCount": "2"}
    found = examiner(*flags)
    assert (found.rows[title]["status"], found.rows[title]["detail"]) == (
        *("ok", "warm is running, with 2 x n1-standard-4"),
    )
    gpus = {"machineType": "n1-standard-4", "acceleratorType": "NVIDIA_TESLA_T4", "acceleratorCount": 1}
    pools[0]["machineSpec"] = gpus
    text = "warm has 2 x n1-standard-4+NVIDIA_TESLA_T4:1; the job needs 2 x n1-standard-4"
    examiner(*flags).failed(title, text, fix="choose other machines", code=2)


def test_an_image_of_another_project_names_the_account_that_pulls_it(world: VertexWorld, examiner: Examiner) -> None:
    """Check that it is never the job's service account, and that the caller's own access to the image proves
    nothing."""
    world.plane.questions.images.add("other/europe-west4/team/trainer:1")
    found = examiner("--image", OWN.replace("contract", "other"))
    assert (found.status("image"), found.code) == ("unknown", 0)
    agent = f"service-{world.plane.number}@gcp-sa-aiplatform-cc.iam.gserviceaccount.com"
    command = "gcloud artifacts repositories add-iam-policy-binding team --project other --location europe-west4"
    assert (
        f"jobs pull images as {agent}; let it: {command} --member serviceAccount:{agent}"
        in found.rows["image"]["detail"]
    )


def test_the_one_api_that_is_off_is_named(world: VertexWorld, examiner: Examiner) -> None:
    refusal = off("Cloud Quotas API", "cloudquotas.googleapis.com", "contract")
    world.plane.wire.faults.append(Fault("GET quotas", refusal))
    found = examiner(*PUBLIC)
    command = "gcloud services enable cloudquotas.googleapis.com --project contract"
    assert found.rows["quota"]["detail"].endswith(command), found.rows["quota"]


def test_a_bucket_of_several_regions_and_a_missing_account(world: VertexWorld, examiner: Examiner) -> None:
    world.plane.gcs.make("wide", "EU", "multi-region")
    world.plane.accounts.clear()
    world.plane.questions.denied.add("logging.logEntries.list")
    examiner.settings("vertex", "gs://wide/store", world.settings)
    found = examiner(*PUBLIC)
    found.failed("bucket", "multi-region", fix="--location=europe-west4", code=2)
    found.failed("service account", "there is no trainer@", fix="service-accounts list", code=3)
    found.failed("permissions", "logging.logEntries.list", fix="Logs Viewer", code=3)


def test_a_missing_bucket(world: VertexWorld, examiner: Examiner) -> None:
    examiner.settings("vertex", "gs://none/store", world.settings)
    found = examiner(*PUBLIC)
    found.failed("bucket", "there is no bucket none", fix="gcloud storage buckets create", code=8)
    assert (found.status("store"), found.code) == ("failed", 8)


@pytest.mark.parametrize("regional", [True, False])
def test_a_quota_of_none_for_spot_machines(world: VertexWorld, examiner: Examiner, regional: bool) -> None:
    world.plane.quotas["custom_model_training_preemptible_nvidia_l4_gpus"] = 1
    world.plane.questions.regional = regional
    found = examiner(*PUBLIC, "--gpu", "L4:1", "--nodes", "2", "--spot")
    found.failure("quota", "preemptible_nvidia_l4_gpus: 1, the job takes 2", fix="ask for 2", code=4)


def test_an_n1_machine_with_a_gpu_takes_cores_as_well(world: VertexWorld, examiner: Examiner) -> None:
    """Check this because a real 429 lists both, and a new project often has neither."""
    world.plane.quotas |= {"custom_model_training_nvidia_t4_gpus": 4, "custom_model_training_cpus": 0}
    found = examiner(*PUBLIC, "--gpu", "T4:1")
    found.failure("quota", "custom_model_training_cpus: 0, the job takes 4", fix="ask for 4", code=4)


def test_a_quota_that_no_source_names(world: VertexWorld, examiner: Examiner) -> None:
    found = examiner(*PUBLIC, "--gpu", "RTXPRO6000:1")
    assert (found.status("quota"), found.code) == ("unknown", 0)
    assert "which quota g4-standard-48 counts against" in found.rows["quota"]["detail"]


QUOTAS: list[tuple[dict[str, Any], dict[str, int]]] = [
    # a user's 429 of aiplatform lists both
    ({"gpu": ("T4:1",)}, {"custom_model_training_nvidia_t4_gpus": 1, "custom_model_training_cpus": 4}),
    ({"gpu": ("V100:8",)}, {"custom_model_training_nvidia_v100_gpus": 8, "custom_model_training_cpus": 32}),
    ({"gpu": ("L4:1",)}, {"custom_model_training_nvidia_l4_gpus": 1, "custom_model_training_g2_cpus": 4}),
    ({"gpu": ("A100-40GB:1",)}, {"custom_model_training_nvidia_a100_gpus": 1, "custom_model_training_a2_cpus": 12}),
    (
        {"gpu": ("A100-80GB:2",), "instance_count": 2},
        {"custom_model_training_nvidia_a100_80gb_gpus": 4, "custom_model_training_a2_cpus": 48},
    ),
    ({"gpu": ("H100:8",)}, {"custom_model_training_nvidia_h100_gpus": 8, "custom_model_training_a3_cpus": 208}),
    (
        {"instance_type": "a3-megagpu-8g"},
        {"custom_model_training_nvidia_h100_mega_gpus": 8, "custom_model_training_a3_cpus": 208},
    ),
    ({"gpu": ("H200:8",)}, {"custom_model_training_nvidia_h200_gpus": 8, "custom_model_training_a3_cpus": 224}),
    ({"gpu": ("B200:8",)}, {"custom_model_training_nvidia_b200_gpus": 8}),
    # the page on the Dynamic Workload Scheduler
    ({"gpu": ("H100:8",), "max_wait": 60}, {"custom_model_training_preemptible_nvidia_h100_gpus": 8}),
    # a user's 429 with a spot T4
    (
        {"gpu": ("T4:1",), "spot": True},
        {"custom_model_training_preemptible_nvidia_t4_gpus": 1, "custom_model_training_preemptible_cpus": 4},
    ),
    ({"instance_count": 3}, {"custom_model_training_cpus": 12}),
    ({"instance_type": "n2-highmem-16"}, {"custom_model_training_n2_cpus": 16}),
    ({"instance_type": "m1-ultramem-40"}, {"custom_model_training_m1_cpus": 40}),
    (
        {"gpu": ("A100-80GB:1",), "image": "us-docker.pkg.dev/vertex-ai-restricted/training/x:1"},
        {"restricted_image_training_nvidia_a100_80gb_gpus": 1, "restricted_image_training_a2_cpus": 12},
    ),
]


@pytest.mark.parametrize(("fields", "wanted"), QUOTAS, ids=lambda value: "-".join(map(str, value.values()))[:40])
def test_the_metrics_are_those_that_refuse_a_job(
    world: VertexWorld, fields: dict[str, Any], wanted: dict[str, int]
) -> None:
    """Compare three readings: doctor's of the request, the fake's of the message, and the names in the sources."""
    from cloudtrain.providers.vertex.doctor import metrics

    request = world.plan(fields).request
    assert metrics(request.body["jobSpec"]) == wanted
    assert taken(parsed(request.body)) == wanted
