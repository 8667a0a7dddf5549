"""A total of GPUs: the nodes that follow from it, and the contradictions that are refused; a range of nodes."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from rows import for_each

from cloudtrain import cli
from cloudtrain.doctor.doctor import prepared
from cloudtrain.errors import SpecError, UnsupportedError
from cloudtrain.job.job import Job
from cloudtrain.provider_api.node_count import plan_attempt, with_node_count
from cloudtrain.provider_api.registry import find_provider
from cloudtrain.runs.submit import make_plan
from cloudtrain.settings.settings import Settings


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
        ("slurm", {"total_gpus": 1, "gpu": "A100"}, 1, ("A100:1",)),
    ],
)
def test_the_nodes_follow_from_the_machine(
    provider: str, fields: dict[str, Any], nodes: int, gpu: tuple[str, ...]
) -> None:
    assert found(provider, **fields) == (nodes, gpu)


@pytest.mark.parametrize(
    ("provider", "fields", "why", "hint"),
    [
        ("sagemaker", {"gpu": "A100-80GB", "total_gpus": 12}, "cannot divide 12 GPUs over machines of 8 GPUs",
         "write --gpus 8 or --gpus 16"),
        ("sagemaker", {"gpu": "A100-80GB", "total_gpus": 4}, "cannot divide 4 GPUs over machines of 8 GPUs",
         "write --gpus 8"),
        ("vertex", {"gpu": "H100", "total_gpus": 12}, "cannot divide 12 GPUs over machines of 8 GPUs", "--gpus 16"),
        ("slurm", {"gpu": "H100:8", "total_gpus": 12}, "cannot divide 12 GPUs over machines of 8 GPUs", "--gpus 16"),
        ("sagemaker", {"instance_type": "ml.p4d.24xlarge", "total_gpus": 20}, "machines of 8 GPUs", "--gpus 24"),
        ("slurm", {"gpu": "A100", "total_gpus": 16, "instance_count": 3}, "cannot divide 16 GPUs over 3 nodes",
         "write --gpus 15 or --gpus 18 or --nodes 2"),
        ("slurm", {"gpu": "A100:8", "total_gpus": 16, "instance_count": 3}, "3 nodes of 8 GPUs have 24, not 16",
         "write --gpus 24 or --nodes 2"),
        ("sagemaker", {"instance_type": "ml.p4d.24xlarge", "total_gpus": 8, "instance_count": 2},
         "2 nodes of ml.p4d.24xlarge do not have 8 GPUs", "write --gpus 16 or --nodes 1"),
        ("sagemaker", {"total_gpus": 8}, "needs the kind of GPU", "--gpu H100"),
        ("sagemaker", {"gpu": "A100-80GB", "total_gpus": 16, "instance_count": "2:4"},
         "16 GPUs on 4 nodes (the most of 2:4) are 4 a node, but machines have 8 GPUs", "write --gpus 32 or --nodes 2"),
        ("slurm", {"gpu": "A100:8", "total_gpus": 16, "instance_count": "2:4"},
         "4 nodes (the most of 2:4) of 8 GPUs have 32, not 16", "write --gpus 32 or --nodes 2 or --gpu A100:4"),
        ("sagemaker", {"total_gpus": 8, "cpus": 9999}, "needs the kind of GPU", "--gpu H100"),
        ("sagemaker", {"gpu": "T4:3", "total_gpus": 12}, "a node has 3 GPUs, but machines have 1 or 4 GPUs",
         "write --gpu T4:4"),
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
    assert caught.value.hint.endswith("--gpu A100-80GB:8")
    with pytest.raises(UnsupportedError, match="not known here"):  # a choice has more nodes than a job may have
        found(provider, picks, total_gpus=65536, gpu="A100-80GB")
    assert found(provider, picks, total_gpus=16, gpu="A100-80GB:8") == (2, ("A100-80GB:8",))
    assert found(provider, picks, total_gpus=16, gpu="A100-80GB", instance_count=2) == (2, ("A100-80GB:8",))


@pytest.mark.parametrize(
    ("provider", "gpu", "hint"),
    [
        ("azureml", "H1OO", "choose from A10, A100, "),
        ("azureml", "V100", "choose another GPU"),
        ("azureml", "H1O0-80GB", "did you mean --gpu H100-80GB:8?"),
        ("modelarts", "P1O0-80GB", "did you mean --gpu P100:1?"),  # no P100 has 80 GB
        ("modelarts", "A100-80GB", "choose from "),  # a real GPU is no typo of another one
    ],
)
def test_a_gpu_that_the_provider_lacks_is_refused_as_without_a_total(provider: str, gpu: str, hint: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        found(provider, total_gpus=8, gpu=gpu)
    assert caught.value.field == "resources.gpu"
    assert caught.value.hint.startswith(hint)


PROVIDERS = {
    "sagemaker": "--set role=arn:aws:iam::123456789012:role/Train",
    "azureml": "--set environment=azureml:torch:1",
    "vertex": "--image i:1",
    "modelarts": "--image swr.cn-north-4.myhuaweicloud.com/o/i:1 --set region=cn-north-4",
    "slurm": "",
    "kubernetes": "--image i:1",
    "local": "",
    "docker": "--image i:1",
}
GPUS = ([], ["A100-80GB"], ["H100:8"])
NODES = ([], ["2:4"])


@pytest.mark.slow
@pytest.mark.parametrize("provider", PROVIDERS)
def test_each_choice_of_a_hint_ends_in_a_plan(
    provider: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A job without a number of nodes has one mistake; with one, the first hint may leave a second mistake. A GPU that
    the provider lacks is one mistake more."""
    (tmp_path / "train.py").write_text("# runtime.accumulation_steps()\n")
    monkeypatch.chdir(tmp_path)

    def follow(flags: dict[str, list[str]], hints: int) -> None:
        words = [word for name, values in flags.items() for value in values for word in (name, value) if word]
        code = cli.main(["plan", "train.py", "--provider", provider, *PROVIDERS[provider].split(), *words])
        lines = capsys.readouterr().err.splitlines()
        if code == 0:
            return
        assert (code, len(lines), hints > 0) == (2, 2, True), (words, lines)
        choices = re.findall(r"(?:--(?:gpus|nodes|gpu) (?!NAME)[A-Z0-9-]+(?::\d+)? ?)+|--spot", lines[1])
        others = re.findall(r"[A-Z0-9-]+(?=[,;])", lines[1].partition("choose from ")[2])
        assert choices or others, (words, lines)
        for name in others:
            follow({**flags, "--gpu": [name]}, hints)
        for choice in choices:
            changed: dict[str, list[str]] = {}
            for name, value in re.findall(r"(--\w+)(?: (\S+))?", choice):
                changed.setdefault(name, []).append(value)
            follow({**flags, **changed}, hints - 1)

    for total, gpu, nodes in product((1, 3, 8, 16), GPUS, NODES):
        follow({"--gpus": [str(total)], "--gpu": gpu, "--nodes": nodes}, 2 if nodes else 1)


# ----------------------------------------------------------------------------------------------------- a range of nodes


@for_each(("counts", "given"), [
    ((4, 2), "2:4"), ((4, 2, 1), "1:4"), ((6, 3, 2), "2:6"), ((4,), "4:4"), ((4,), 4), ((12, 6, 4, 3), "3:12"),
])  # fmt: skip
def test_the_numbers_of_a_range_divide_its_largest(counts: tuple[int, ...], given: str | int) -> None:
    job = Job.make(entry_point="t.py", instance_count=given)
    assert job.resources.node_counts == counts
    assert Job.from_json(job.to_json()) == job == Job.from_toml(job.to_toml())
    assert job.at("local").resources == job.resources


def test_a_total_of_gpus_keeps_the_range() -> None:
    job = with_node_count(Job.make(entry_point="t.py", instance_count="2:4", total_gpus=16, gpu="A100"), "p")
    assert (job.resources.node_counts, job.resources.gpu) == ((4, 2), ("A100:4",))


@for_each(("text", "fields", "keeps"), [
    ("print(1)", {}, False),
    ("steps = gradient_accumulation_steps(1)", {}, False),
    ("from cloudtrain import runtime; runtime.accumulation_steps()", {}, True),
    ("from cloudtrain import runtime; runtime.batch_size(64)", {}, True),
    ("os.environ['CLOUDTRAIN_PLANNED_WORLD_SIZE']", {}, True),
    ("runtime.context().planned_world_size", {}, True),
    ("flags.add_argument('--global-batch')", {}, True),
    ("global_batch_size = batch * world  # logged", {}, False),
    ("print(1)", {"args": ["--accumulate=$CLOUDTRAIN_PLANNED_WORLD_SIZE"]}, True),
])  # fmt: skip
def test_a_range_needs_a_script_that_keeps_its_batch(
    tmp_path: Path, text: str, fields: dict[str, Any], keeps: bool
) -> None:
    (tmp_path / "train.py").write_text("print('starts the other')\n")
    (tmp_path / "helper.py").write_text(f"# {text}\n")
    (tmp_path / "notes.txt").write_text("CLOUDTRAIN_PLANNED_WORLD_SIZE\n")
    settings = Settings(provider="local", store=str(tmp_path / "store"))
    job = Job.make(entry_point="train.py", source_dir=str(tmp_path), instance_count="2:4", **fields)
    if keeps:
        plan = make_plan(job, settings=settings, cwd=tmp_path, preview=True)
        assert plan.document()["resources"]["node_counts"] == [4, 2]
        assert "4 nodes (2 where there are no machines for 4)" in str(plan)
        request = plan_attempt(plan.provider, plan.job, plan.layout, 1, 0, nodes=2)
        assert (request.context["nodes"], request.context["planned_nodes"], len(request.body["nodes"])) == (2, 4, 2)
        return
    with pytest.raises(SpecError, match="fewer nodes would change the batch") as caught:
        make_plan(job, settings=settings, cwd=tmp_path, preview=True)
    assert (caught.value.field, "accumulation_steps()" in caught.value.hint) == ("resources.min_instance_count", True)
    make_plan(job.replace(min_instance_count=None), settings=settings, cwd=tmp_path, preview=True)


@pytest.mark.parametrize("launcher", ["python", "command"])
def test_a_range_needs_ranks_that_we_start(tmp_path: Path, launcher: str) -> None:
    (tmp_path / "train.py").write_text("# runtime.accumulation_steps()\n")
    job = Job.make(entry_point="train.py", source_dir=str(tmp_path), instance_count="2:4", launcher=launcher)
    with pytest.raises(SpecError, match="need the launcher torchrun") as caught:
        make_plan(job, settings=Settings(provider="local", store=str(tmp_path)), cwd=tmp_path, preview=True)
    assert caught.value.field == "resources.min_instance_count"


def test_a_platform_that_retries_the_same_request_takes_no_range(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text("# PLANNED_WORLD_SIZE\n")
    monkeypatch.setattr(find_provider("local"), "retried_by", "platform")
    job = Job.make(entry_point="train.py", source_dir=str(tmp_path), instance_count="2:4")
    with pytest.raises(UnsupportedError, match="starts further attempts, with the same request") as caught:
        make_plan(job, settings=Settings(provider="local", store=str(tmp_path)), cwd=tmp_path, preview=True)
    assert caught.value.field == "resources.min_instance_count"


def test_the_doctors_own_job_has_all_nodes(tmp_path: Path) -> None:
    settings = Settings(provider="local", store=str(tmp_path / "store"))
    with prepared(settings, {"instance_count": "2:4"}, run_id="d", cwd=tmp_path) as plan:
        assert plan.job.resources.node_counts == (4,)
