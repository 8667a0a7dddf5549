"""Vertex AI's machines: the table, the fake's reading of Google's page, and the requests of Google's own notebooks."""

from __future__ import annotations

import csv
import importlib.util
from pathlib import Path
from typing import Any

import pytest
from rows import for_each
from worlds.vertex import strict
from worlds.vertex.strict import broken_rules, parsed

from cloudtrain.provider_api import catalog
from cloudtrain.providers.vertex import machines

ROOT = Path(__file__).parents[2]
TABLE = Path(catalog.__file__).parents[1] / "data" / "instances.csv"
RESERVED = {
    "reservationAffinityType": "SPECIFIC_RESERVATION",
    "key": "compute.googleapis.com/reservation-name",
    "values": ["projects/p/zones/z/reservations/r"],
}
CONTAINER = {"containerSpec": {"imageUri": "us-docker.pkg.dev/p/r/train:1"}}
PACKAGE = {
    "pythonPackageSpec": {
        "executorImageUri": "us-docker.pkg.dev/vertex-ai/training/tf-gpu.2-9:latest",
        "packageUris": ["gs://b/trainer.tar.gz"],
        "pythonModule": "trainer.task",
    }
}


def refusals(machine: dict[str, Any], strategy: str = "STANDARD", **pool: Any) -> list[str]:
    """Return the fake's refusals of a job with one such machine."""
    one = {"machineSpec": machine, "replicaCount": "1", **CONTAINER, **pool}
    if "pythonPackageSpec" in one:
        del one["containerSpec"]
    spec = {"workerPoolSpecs": [one], "scheduling": {"strategy": strategy}}
    return broken_rules(parsed({"displayName": "x", "jobSpec": spec}))


@pytest.mark.slow
def test_every_machine_of_the_table_is_one_of_vertex() -> None:
    for machine in catalog.machines("vertex"):
        spec = machines.machine_spec(machine)
        if machine.accelerator in machines.RESERVED:
            spec["reservationAffinity"] = RESERVED
        assert refusals(spec, "SPOT" if machine.spot_only else "STANDARD") == [], machine


def test_every_gpu_machine_of_vertex_is_in_the_table() -> None:
    """Compare two readings of one page: cloudtrain's rule of cores and memory, and the fake's lines."""
    known = {(m.instance_type, m.accelerator, m.gpu_count) for m in catalog.machines("vertex") if m.gpu}
    page = {(name, *built) for name, built in strict.BUILT_IN.items()}
    page |= {(name, gpu, n) for name, line in strict.ATTACHED.items() for gpu, counts in line.items() for n in counts}
    assert known == page
    bare = {m.instance_type for m in catalog.machines("vertex") if not m.gpu}
    assert bare == {f"{family}-{n}" for family, sizes in strict.PLAIN.items() if family[:2] == "n1" for n in sizes}


def test_the_n1_rows_of_the_table_are_the_tools(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("vertex_machines", ROOT / "tools" / "vertex_machines.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    again = tmp_path / "instances.csv"
    again.write_bytes(TABLE.read_bytes())
    module.main(again)
    assert again.read_bytes() == TABLE.read_bytes()


def test_the_transports_between_gpus_are_those_of_the_page() -> None:
    """Check that a3-highgpu has no transport in serverless training, unlike on Compute Engine."""
    with TABLE.open(newline="", encoding="utf-8") as stream:
        rows = [row for row in csv.DictReader(stream) if row["provider"] == "vertex" and "GPUDirect" in row["network"]]
    transports = {row["instance_type"]: row["network"].partition("GPUDirect-")[2].partition(";")[0] for row in rows}
    rdma = dict.fromkeys(("a3-ultragpu-8g", "a4-highgpu-8g", "a4x-highgpu-4g"), "RDMA")
    assert transports == {"a3-megagpu-8g": "TCPXO", **rdma}


def test_the_table_of_regions_names_every_gpu() -> None:
    assert set(machines.REGIONS) == {m.accelerator for m in catalog.machines("vertex") if m.gpu}
    assert all(list(where) == sorted(where) for where in machines.REGIONS.values())


# ------------------------------------------------------------------------------------------------------------ notebooks

SHAPES: list[tuple[str, str, int, str]] = [
    ("a2-highgpu-1g", "NVIDIA_TESLA_A100", 1, "model_garden_keras_stable_diffusion"),
    ("g2-standard-4", "NVIDIA_L4", 1, "model_garden_tfvision_image_classification"),
    ("g2-standard-8", "NVIDIA_L4", 1, "model_garden_gemma_evaluation"),
    ("g2-standard-12", "NVIDIA_L4", 1, "model_garden_finetuning_tutorial"),
    ("g2-standard-16", "NVIDIA_L4", 1, "model_garden_pytorch_openllama_peft"),
    ("g2-standard-32", "NVIDIA_L4", 1, "model_garden_pytorch_falcon_instruct_peft"),
    ("g2-standard-96", "NVIDIA_L4", 8, "model_garden_pytorch_llama2_quantization"),
    ("a3-highgpu-8g", "NVIDIA_H100_80GB", 8, "model_garden_llama3_2_evaluation"),
    ("n1-highmem-4", "NVIDIA_TESLA_V100", 1, "model_garden_tfvision_image_object_detection"),
    ("n1-highmem-8", "", 0, "model_garden_movinet_action_recognition"),
    ("n1-highmem-16", "NVIDIA_TESLA_T4", 1, "sdk_pytorch_torchrun_custom_container_training_imagenet"),
    ("n1-highmem-16", "NVIDIA_TESLA_V100", 2, "model_garden_keras_yolov8"),
    ("n1-highmem-32", "NVIDIA_TESLA_V100", 8, "model_garden_movinet_action_recognition"),
    ("n1-highmem-64", "NVIDIA_TESLA_V100", 8, "model_garden_camp_zipnerf"),
    ("n1-standard-4", "", 0, "00_persistent_resource_getting_started_sdk"),
    ("n1-standard-4", "NVIDIA_TESLA_T4", 1, "hyperparameter_tuning_tensorflow"),
    ("n1-standard-4", "NVIDIA_TESLA_T4", 2, "distributed-hyperparameter-tuning"),
    ("n1-standard-8", "NVIDIA_TESLA_V100", 1, "model_garden_pytorch_dolly_v2"),
    ("n1-standard-8", "NVIDIA_TESLA_V100", 8, "model_garden_pytorch_falcon_evaluation"),
    ("n1-standard-16", "NVIDIA_TESLA_V100", 2, "model_garden_pytorch_llama2_peft_finetuning"),
    ("n2-highcpu-64", "", 0, "get_started_with_vertex_distributed_training"),
    ("cloud-tpu", "TPU_V2", 8, "google_cloud_pipeline_components_TPU_model_train_upload_deploy"),
]
"""Machines of the ``worker_pool_specs`` in Google's notebooks, each with a notebook that has it.

The notebooks are GoogleCloudPlatform/vertex-ai-samples, commit cc0d791 of August 2026. ``ast`` read 109 literals, which
were sent to the fake. It accepted 78, and 3 compute their machine at run time. Of the 28 refused ones 27 ask for K80,
whose support has ended. One asks for a3-highgpu-1g, which its notebook runs with FLEX_START.
"""


@for_each(("machine", "gpu", "count", "notebook"), SHAPES)
def test_the_machines_of_googles_notebooks_are_accepted(machine: str, gpu: str, count: int, notebook: str) -> None:
    spec = {"machineType": machine, **({"acceleratorType": gpu, "acceleratorCount": count} if gpu else {})}
    assert refusals(spec) == [], notebook
    if gpu.startswith("NVIDIA"):
        assert machines.known_machine(spec) is not None, "the plan must know it too"


def test_other_shapes_of_googles_notebooks() -> None:
    """Check disks, packages on prebuilt images, TPUs by topology, an explicit accelerator of none, and an empty
    pool."""
    small = {"machineType": "n1-standard-4", "acceleratorCount": 0}
    for disk in ({"bootDiskType": "pd-ssd", "bootDiskSizeGb": 200}, {"bootDiskSizeGb": 500}):
        assert refusals(small, diskSpec=disk) == []
    assert refusals(small, **PACKAGE) == []
    assert refusals({**small, "acceleratorType": "ACCELERATOR_TYPE_UNSPECIFIED"}) == []
    for machine, topology in (("ct5lp-hightpu-1t", "1x1"), ("ct5lp-hightpu-4t", "4x4")):
        assert refusals({"machineType": machine, "tpuTopology": topology}) == []
    own = {"pythonPackageSpec": {**PACKAGE["pythonPackageSpec"], "executorImageUri": "gcr.io/p/image:1"}}
    assert "must be a prebuilt image" in " ".join(refusals(small, **own))


def test_the_two_refused_kinds() -> None:
    ended = {"machineType": "n1-standard-4", "acceleratorType": "NVIDIA_TESLA_K80", "acceleratorCount": 1}
    assert refusals(ended) == ["Pool 0: Machine type n1-standard-4 does not take 1 NVIDIA_TESLA_K80."]
    one = {"machineType": "a3-highgpu-1g", "acceleratorType": "NVIDIA_H100_80GB", "acceleratorCount": 1}
    assert refusals(one) == ["Pool 0: Machine type a3-highgpu-1g is for SPOT and FLEX_START only."]
    assert refusals(one, "FLEX_START") == []
