"""Predict SageMaker's containers for a request, as data for an engine, a FakePlatform and the contract suite. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ...provider_api import catalog
from ...provider_api.launch_spec import LaunchRules, LaunchSpec, Mount, NodeSpec
from ...provider_api.protocol import Request
from .._cloud import size_of
from . import MARK, NAME
from .node import GRACE, INPUTS, ROOT

if TYPE_CHECKING:
    from . import Settings

GROUP = "homogeneousCluster"
INTERFACE = "eth0"
PREEMPTIONS = 1000
"""Restarts of managed spot training: it restarts until max_wait ends, which a LaunchSpec lacks."""
SYNC_LAG = 2.0
"""Seconds that a file of the checkpoint folder must be old before it is sent; unverified: no document gives them."""


def launch_spec(settings: Settings, request: Request) -> LaunchSpec:
    """Return one container an instance, named ``algo-1``, ``algo-2``, …"""
    body = request.body
    config, job = body["ResourceConfig"], body["TrainingJobName"]
    first = (config.get("InstancePreferences") or [config])[0]
    hosts = [f"algo-{number}" for number in range(1, first["InstanceCount"] + 1)]
    machine = catalog.machine(NAME, first["InstanceType"])
    specification = body["AlgorithmSpecification"]
    account = body["RoleArn"].split(":")[4]
    environment = {
        **body.get("Environment", {}),
        "TRAINING_JOB_NAME": job,
        "TRAINING_JOB_ARN": f"arn:aws:sagemaker:{settings.region}:{account}:training-job/{job}",
        "AWS_REGION": settings.region,
    }
    specs = [
        NodeSpec(
            image=specification["TrainingImage"],
            entrypoint=specification["ContainerEntrypoint"],
            command=specification["ContainerArguments"],
            env=environment,
            mounts=_mounts(body),
            files=_files(body, host, hosts, first["InstanceType"]),
            hostname=host,
            **size_of(machine),
        )
        for host in hosts
    ]
    stopping = body["StoppingCondition"]
    rules = LaunchRules(
        time_limit=stopping["MaxRuntimeInSeconds"],
        max_restarts=body.get("RetryStrategy", {}).get("MaximumRetryAttempts", 0),
        preemptions=PREEMPTIONS,
        losses=body.get("RetryStrategy", {}).get("MaximumRetryAttempts", 0),
        sync_lag=SYNC_LAG,
        sync_marks=MARK,
        stop_grace=GRACE,
    )
    return LaunchSpec(nodes=specs, rules=rules)


def _mounts(body: Mapping[str, Any]) -> list[Mount]:
    checkpoints, output = body["CheckpointConfig"], body["OutputDataConfig"]["S3OutputPath"].rstrip("/")
    found = [Mount(url=checkpoints["S3Uri"].rstrip("/"), path=checkpoints["LocalPath"], kind="sync")]
    for channel in body["InputDataConfig"]:
        path, source = f"{INPUTS}/{channel['ChannelName']}", channel["DataSource"]
        if "FileSystemDataSource" in source:
            system = source["FileSystemDataSource"]
            scheme = "efs" if system["FileSystemType"] == "EFS" else "fsx"
            url = f"{scheme}://{system['FileSystemId']}{system['DirectoryPath']}"
            found.append(Mount(url=url.rstrip("/"), path=path, kind="mount"))
            continue
        url = source["S3DataSource"]["S3Uri"]
        kind = "mount" if channel["InputMode"] == "FastFile" else "copy"
        if url.endswith("/"):
            found.append(Mount(url=url.rstrip("/"), path=path, kind=kind))
        else:
            found.append(Mount(url=url, path=f"{path}/{url.rpartition('/')[2]}", kind=kind))
    job = body["TrainingJobName"]
    found.append(Mount(url=f"{output}/{job}/output/model", path=f"{ROOT}/model", kind="sync"))
    found.append(Mount(url=f"{output}/{job}/output/data", path=f"{ROOT}/output/data", kind="sync"))
    return found


def _files(body: Mapping[str, Any], host: str, hosts: list[str], instance_type: str) -> dict[str, str]:
    """Return the three files that every container has. Their ``hosts`` are sorted as text (algo-1, algo-10, algo-2)."""
    inputs = {}
    for channel in body["InputDataConfig"]:
        fields = {
            "TrainingInputMode": channel["InputMode"],
            "RecordWrapperType": "None",
            "ContentType": channel.get("ContentType"),
            "S3DistributionType": channel["DataSource"].get("S3DataSource", {}).get("S3DataDistributionType"),
        }
        inputs[channel["ChannelName"]] = {key: value for key, value in fields.items() if value is not None}
    group = {"instance_group_name": GROUP, "instance_type": instance_type, "hosts": sorted(hosts)}
    resources = {
        "current_host": host,
        "current_instance_type": instance_type,
        "current_group_name": GROUP,
        "hosts": sorted(hosts),
        "instance_groups": [group],
        "network_interface_name": INTERFACE,
    }
    tables = {
        "hyperparameters": body.get("HyperParameters", {}),
        "inputdataconfig": inputs,
        "resourceconfig": resources,
    }
    return {f"{ROOT}/input/config/{name}.json": json.dumps(table) for name, table in tables.items()}
