"""A total of GPUs: the nodes that follow from it, and the contradictions that are refused."""

from __future__ import annotations

from typing import Any

import pytest

from cloudtrain.errors import SpecError, UnsupportedError
from cloudtrain.job.job import Job
from cloudtrain.provider_api.node_count import with_node_count


def found(provider: str, picks: bool = True, /, **fields: Any) -> tuple[int, tuple[str, ...]]:
    job = with_node_count(Job.make(entry_point="t.py", **fields), provider, picks_machine=picks)
    assert job.resources.total_gpus is None
    return job.resources.instance_count, job.resources.gpu


@pytest.mark.parametrize(
    ("provider", "fields", "nodes", "gpu"),
    [
        ("sagemaker", {"total_gpus": 16, "gpu": "A100-80GB"}, 2, ("A100-80GB:8",)),
        ("azureml", {"total_gpus": 12, "gpu": "A100-80GB"}, 3, ("A100-80GB:4",)),
        ("vertex", {"total_gpus": 32, "gpu": "A100"}, 2, ("A100:16",)),
        ("sagemaker", {"total_gpus": 4, "gpu": "T4"}, 1, ("T4:4",)),
        ("sagemaker", {"total_gpus": 4, "gpu": "T4", "instance_count": 4}, 4, ("T4:1",)),
        ("sagemaker", {"total_gpus": 24, "instance_type": "ML.P4D.24xlarge"}, 3, ()),
        ("vertex", {"total_gpus": 8, "gpu": "T4", "instance_type": "n1-standard-4"}, 2, ("T4:4",)),
        # H100:1 exists here, A100 only as 8: the list shares one number.
        ("sagemaker", {"total_gpus": 16, "gpu": ["H100", "A100-80GB"]}, 2, ("H100:8", "A100-80GB:8")),
        # On demand Vertex AI has H100 as 8 only.
        ("vertex", {"total_gpus": 12, "gpu": "H100", "spot": True}, 3, ("H100:4",)),
        ("slurm", {"total_gpus": 16, "gpu": "A100:8"}, 2, ("A100:8",)),
        ("kubernetes", {"total_gpus": 16, "gpu": "A100", "instance_count": 4}, 4, ("A100:4",)),
        ("local", {"total_gpus": 2, "gpu": "A100:2"}, 1, ("A100:2",)),
    ],
)
def test_the_nodes_follow_from_the_machine(
    provider: str, fields: dict[str, Any], nodes: int, gpu: tuple[str, ...]
) -> None:
    assert found(provider, **fields) == (nodes, gpu)


@pytest.mark.parametrize(
    ("provider", "fields", "why", "hint"),
    [
        ("sagemaker", {"gpu": "A100-80GB", "total_gpus": 12}, "12 GPUs do not divide over machines of 8 GPUs",
         "the nearest are --gpus 8 or --gpus 16"),
        ("sagemaker", {"gpu": "A100-80GB", "total_gpus": 4}, "4 GPUs do not divide over machines of 8 GPUs",
         "the nearest are --gpus 8"),
        ("vertex", {"gpu": "H100", "total_gpus": 12}, "12 GPUs do not divide over machines of 8 GPUs", "--gpus 16"),
        ("slurm", {"gpu": "H100:8", "total_gpus": 12}, "12 GPUs do not divide over machines of 8 GPUs", "--gpus 16"),
        ("sagemaker", {"instance_type": "ml.p4d.24xlarge", "total_gpus": 20}, "machines of 8 GPUs", "--gpus 24"),
        ("slurm", {"gpu": "A100", "total_gpus": 16, "instance_count": 3}, "16 GPUs do not divide over 3 nodes",
         "the nearest are --gpus 15 or --gpus 18"),
        ("slurm", {"gpu": "A100:8", "total_gpus": 16, "instance_count": 3}, "3 nodes of 8 GPUs have 24, not 16",
         "leave out --gpus, --nodes or the number in --gpu"),
        ("sagemaker", {"instance_type": "ml.p4d.24xlarge", "total_gpus": 8, "instance_count": 2},
         "2 nodes of ml.p4d.24xlarge do not have 8 GPUs", "leave out --gpus or --nodes"),
        ("sagemaker", {"total_gpus": 8}, "needs the kind of GPU", "--gpu H100"),
    ],
)  # fmt: skip
def test_contradictions_are_refused_in_one_line(provider: str, fields: dict[str, Any], why: str, hint: str) -> None:
    with pytest.raises(SpecError) as caught:
        found(provider, **fields)
    assert (caught.value.field, type(caught.value)) == ("resources.total_gpus", SpecError)
    assert why in caught.value.message
    assert hint in caught.value.hint


def test_different_numbers_a_node_are_refused() -> None:
    with pytest.raises(SpecError, match="different numbers of GPUs a node") as caught:
        found("sagemaker", total_gpus=16, gpu=["T4:4", "H100:8"])
    assert caught.value.field == "resources.gpu"


@pytest.mark.parametrize(
    ("provider", "picks"), [("slurm", True), ("kubernetes", True), ("local", True), ("azureml", False)]
)
def test_an_unknown_machine_needs_the_nodes_or_the_gpus_of_one(provider: str, picks: bool) -> None:
    with pytest.raises(UnsupportedError, match="not known here") as caught:
        found(provider, picks, total_gpus=16, gpu="A100-80GB")
    assert (caught.value.field, caught.value.provider) == ("resources.total_gpus", provider)
    assert found(provider, picks, total_gpus=16, gpu="A100-80GB", instance_count=2) == (2, ("A100-80GB:8",))


@pytest.mark.parametrize(("gpu", "field"), [("H1OO", "resources.gpu"), ("V100", "resources.gpu")])
def test_a_gpu_that_the_provider_lacks_is_refused_as_without_a_total(gpu: str, field: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        found("azureml", total_gpus=8, gpu=gpu)
    assert caught.value.field == field
