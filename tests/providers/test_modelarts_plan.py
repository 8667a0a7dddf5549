"""Plans of provider ``modelarts``: the parts of a request, and refusals in one line each."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from rows import for_each

from cloudtrain.errors import SpecError, UnsupportedError
from cloudtrain.provider_api.protocol import Request
from cloudtrain.providers.modelarts import Provider
from cloudtrain.testing.tables import Place, Sample, plan_of

SAMPLE = Sample.of(Provider)
POOL = {"pool_id": "pool-1"}


def place_in(folder: Path) -> Place:
    """Return a new place for each row of a test."""
    own = folder / str(len(list(folder.iterdir())))
    return Place(own, store=SAMPLE.store, provider="modelarts", secret=SAMPLE.secret)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return place_in(tmp_path)


def planned(place: Place, settings: Mapping[str, Any] | None = None, **fields: Any) -> Request:
    return plan_of(Provider(**{**SAMPLE.settings, **(settings or {})}), place, SAMPLE.job, fields).request


def spec(request: Request) -> Any:
    return request.body["spec"]


# ------------------------------------------------------------------------------------------------------------- machines


@for_each(
    ("settings", "fields", "resource"),
    [
        ({}, {}, {"flavor_id": "modelarts.vm.cpu.2u"}),
        ({}, {"cpus": 4}, {"flavor_id": "modelarts.vm.cpu.8u"}),
        ({}, {"gpu": ("V100:1",)}, {"flavor_id": "modelarts.p3.large.public"}),
        ({}, {"gpu": ("ascend-910:8",)}, {"flavor_id": "modelarts.kat1.8xlarge.public"}),
        ({}, {"instance_type": "modelarts.vm.gpu.v100NV32"}, {"flavor_id": "modelarts.vm.gpu.v100NV32"}),
        ({"flavors": {"A100-80GB:8": "modelarts.x.y"}}, {"gpu": ("A100-80GB:8",)}, {"flavor_id": "modelarts.x.y"}),
        (POOL, {"gpu": ("Ascend-910B:4",)}, {"pool_id": "pool-1", "flavor_id": "modelarts.pool.visual.4xlarge"}),
        (POOL, {}, {"pool_id": "pool-1"}),
        (
            POOL,
            {"cpus": 4, "memory_gb": 16},
            {"pool_id": "pool-1", "main_container_customized_flavor": {"cpu_core_num": 4, "mem_size": 16}},
        ),
    ],
)
def test_the_resource_of_a_job(
    settings: dict[str, Any], fields: dict[str, Any], resource: dict[str, Any], tmp_path: Path
) -> None:
    place = place_in(tmp_path)
    assert spec(planned(place, settings, **fields))["resource"] == {"node_count": 1, **resource}


def test_the_cards_of_a_flavor_that_only_the_settings_know(place: Place) -> None:
    own = {"flavors": {"Ascend-910B:8": "modelarts.bm.x"}}
    provider = Provider(**{**SAMPLE.settings, **own})
    request = planned(place, own, gpu=("Ascend-910B:8",), node_check=True)
    assert request.context["node_check"] == {"gpus": None}  # torch shows them as other devices than CUDA's
    assert [node.gpus for node in provider.launch_spec(request).nodes] == [8]
    request = planned(place, POOL, gpu=("V100:2",))
    assert Provider(**{**SAMPLE.settings, **POOL}).launch_spec(request).nodes[0].gpus == 2


@for_each(
    ("settings", "fields", "field", "words"),
    [
        ({}, {"gpu": ("H100:8",)}, "resources.gpu", "no known machine has H100:8"),
        (POOL, {"gpu": ("V100:3",)}, "resources.gpu", "a node of a pool has 1, 2, 4, 8, 16 cards, not 3"),
        ({}, {"instance_type": "p3.large"}, "resources.instance_type", "is not the name of a machine type"),
        (POOL, {"gpu": ("Ascend-910B:8",), "min_gpu_util": "5% for 30m"}, "min_gpu_util", "nvidia-smi does not know"),
        (
            {},
            {"instance_type": "modelarts.kat1.xlarge.public", "min_gpu_util": "5% for 30m"},
            "min_gpu_util",
            "nvidia-smi does not know Ascend",
        ),
        ({}, {"spot": True}, "resources.spot", "its public pool has no spot machines"),
        ({}, {"disk_gb": 100}, "resources.disk_gb", "a flavor decides the size of its local disk, /cache"),
        ({}, {"shm_gb": 8}, "resources.shm_gb", "no field of a training job sets the size of /dev/shm"),
        ({"ssh_key_pairs": ()}, {"interactive": True}, "interactive", "modelarts.ssh_key_pairs is not set"),
        ({}, {"image": "docker.io/team/x:1"}, "image", "it pulls ORGANIZATION/NAME:TAG of SWR only"),
        ({}, {"image": "swr.ap-southeast-1.myhuaweicloud.com/a/b:1"}, "image", "it is in ap-southeast-1"),
        (
            {},
            {"secrets": {"A": "aws:arn:aws:secretsmanager:e:1:secret:x"}},
            "secrets.A",
            "its nodes fetch env:NAME only",
        ),
        ({}, {"inputs": {"a": "nfs://server/path"}}, "inputs.a", "SFS Turbo is reached from a dedicated pool only"),
        ({}, {"inputs": {"a": {"url": "obs://b/x", "shard": True}}}, "inputs.a.shard", "every node sees a whole input"),
        ({}, {"inputs": {"a": {"url": "obs://b/x.csv", "mode": "copy"}}}, "inputs.a.mode", "only a folder of OBS"),
        ({}, {"inputs": {"a": "obs://b/x[1]/"}}, "inputs.a", "its URL contains '['"),
    ],
)
def test_unsupported_jobs_are_refused(
    settings: dict[str, Any], fields: dict[str, Any], field: str, words: str, tmp_path: Path
) -> None:
    place = place_in(tmp_path)
    with pytest.raises(UnsupportedError) as caught:
        planned(place, settings, **fields)
    assert caught.value.field == field
    assert words in caught.value.why


@for_each(
    ("settings", "field"),
    [
        ({"region": "CN"}, "region"),
        ({"project_id": "my-project"}, "project_id"),
        ({"priority": 2}, "priority"),
        ({"priority": 4, **POOL}, "priority"),
        ({"job_retry_num": 129}, "job_retry_num"),
        ({"log_drain": -1}, "log_drain"),
        ({"flavors": {"V100:1": 3}}, "flavors"),
        ({"flavors": {"no gpu": "x"}}, "flavors"),
        ({"prices": {"a": 0}}, "prices"),
    ],
)
def test_wrong_settings_are_named(settings: dict[str, Any], field: str) -> None:
    with pytest.raises(SpecError) as caught:
        Provider(**{**SAMPLE.settings, **settings})
    assert caught.value.field == f"modelarts.{field}"


# ------------------------------------------------------------------------------------------------------------- the body


def test_a_name_is_the_run_s_and_the_request_s(place: Place) -> None:
    """Check that two requests of one attempt have different names, with the same mark before their digest."""
    first, other = planned(place), planned(place, max_runtime=7200)
    names = [request.body["metadata"]["name"] for request in (first, other)]
    assert names[0] != names[1]
    assert names[0].rpartition("-")[0] == names[1].rpartition("-")[0]
    assert all(len(name) <= 64 for name in names)
    long = planned(place, name="x" * 40)
    assert len(long.body["metadata"]["name"]) <= 64


def test_tags_and_origin_stand_in_the_description(place: Place) -> None:
    provider = Provider(**SAMPLE.settings)
    plan = plan_of(provider, place, SAMPLE.job, {"tags": {"team": "vision", "a": "b"}})
    layout = dataclasses.replace(
        plan.layout, origin={"revision": "0123456789abcdef-dirty", "ci": "github", "ci_run": "7"}
    )
    description = provider.plan(plan.job, layout).body["metadata"]["description"]
    assert (
        " name=contract cloudtrain-revision=0123456789abcdef-di cloudtrain-ci=github-7 a=b team=vision request="
        in description
    )
    for tags, words in (({"run": "x"}, "uses this name"), ({"a": "x" * 250}, "256 characters")):
        with pytest.raises(SpecError) as caught:
            planned(place, tags=tags)
        assert words in str(caught.value)


def test_volumes_are_the_folders_that_nodes_need(place: Place) -> None:
    inputs = {
        "inside": f"{SAMPLE.store}/data/x",
        "file": "obs://other/a/b/c.csv",
        "same": "obs://other/a/b/",
        "copied": {"url": "obs://third/d/", "mode": "copy"},
        "nfs": "nfs://sfs.internal/export",
    }
    body = planned(place, POOL, inputs=inputs).body
    assert body["spec"]["volumes"] == [
        {
            "nfs": {
                "nfs_server_path": "sfs.internal:/export",
                "local_path": "/mnt/nfs/nfs",
                "read_only": True,
            }
        },
        {"obs": {"obs_path": "/contract-bucket/store", "local_path": "/mnt/obs/contract-bucket/store"}},
        {"obs": {"obs_path": "/other/a/b", "local_path": "/mnt/obs/other/a/b"}},
    ]
    assert body["algorithm"]["inputs"] == [
        {
            "name": "copied",
            "access_method": "env",
            "local_dir": "/home/ma-user/modelarts/inputs/copied",
            "remote": {"obs": {"obs_url": "/third/d/"}},
        }
    ]
    words = shlex.split(body["algorithm"]["command"])
    assert "file.file=/mnt/obs/other/a/b/c.csv" in words
    assert "input.copied=/home/ma-user/modelarts/inputs/copied" in words
    assert words[-1] == "--", "words that ModelArts appends must have no effect"


def test_without_inputs_modelarts_appends_nothing(place: Place) -> None:
    algorithm = planned(place).body["algorithm"]
    assert not {"inputs", "outputs", "parameters"} & algorithm.keys()


@for_each(("runtime", "hours"), [(60, 2), (3600, 2), (3601, 3), (86400, 25)])
def test_auto_stop_comes_after_cloudtrain_s_limit(runtime: int, hours: int, tmp_path: Path) -> None:
    place = place_in(tmp_path)
    request = planned(place, max_runtime=runtime)
    assert spec(request)["auto_stop"] == {"time_unit": "HOURS", "duration": hours}
    assert f"limit={runtime}" in shlex.split(request.body["algorithm"]["command"])


def test_a_pool_has_priorities_and_preemptible_jobs(place: Place) -> None:
    own = spec(planned(place, {**POOL, "priority": 3}, spot=True))
    assert own["schedule_policy"] == {"priority": 3, "preemptible": True}
    assert "schedule_policy" not in spec(planned(place))


def test_an_image_of_swr_goes_without_its_host(place: Place) -> None:
    request = planned(place, {"image_repo_id": "r-1"}, image="swr.cn-north-4.myhuaweicloud.com/team/train:2")
    assert request.body["algorithm"]["engine"] == {"image_url": "team/train:2", "image_repo_id": "r-1"}


def test_a_secret_s_value_is_in_no_plan(place: Place) -> None:
    request = planned(place, secrets={"TOKEN": "env:MY_TOKEN"})
    assert request.body["algorithm"]["environments"] == {"CLOUDTRAIN_SECRETS": ""}
    assert any("sealed" in note for note in request.notes)
    with pytest.raises(SpecError):
        planned(
            place,
            secrets={"TOKEN": "env:A"},
            options={"modelarts": {"algorithm": {"environments": {"CLOUDTRAIN_SECRETS": "x"}}}},
        )


@for_each(
    ("options", "field"),
    [
        ({"spec": {"resource": {"node_count": 3}}}, "spec.resource"),
        ({"algorithm": {"inputs": []}}, "algorithm.inputs"),
        ({"algorithm": {"outputs": []}}, "algorithm.outputs"),
        ({"metadata": {"annotations": {"fault-tolerance/job-unconditional-retry": "true"}}}, "metadata.annotations"),
        ({"spec": {"notification": {"topic": "x"}}}, "spec.notification.topic"),
        ({"spec": {"log_export_config": {"rotation_enabled": "yes"}}}, "spec.log_export_config.rotation_enabled"),
        ({"algorithm": {"environments": {"MA_X": "1"}}}, "algorithm.environments.MA_X"),
        ({"algorithm": {"environments": {"A": "$B"}}}, "algorithm.environments.A"),
        ({"algorithm": {"environments": {"CLOUDTRAIN_X": "1"}}}, "algorithm.environments.CLOUDTRAIN_X"),
        ({"algorithm": {"environments": {f"A{n}": "" for n in range(101)}}}, "algorithm"),
    ],
)
def test_invalid_options_are_named(options: dict[str, Any], field: str, tmp_path: Path) -> None:
    place = place_in(tmp_path)
    with pytest.raises(SpecError) as caught:
        planned(place, options={"modelarts": options})
    assert caught.value.field.startswith(f"options.modelarts.{field}")
