"""Node half of provider ``sagemaker``: read a container's environment. Standard library alone.

The topology comes from resourceconfig.json, never from a host name: SageMaker's own local modes use other names.
"""

from __future__ import annotations

import base64
import json
import os
import re
import urllib.request
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...provider_api.node import NodeEnvironment, SyncAgent, Topology
from ...runtime import gpus
from ...runtime.http_json import ask
from . import IGNORED, UPLOADED, UPLOADING
from .s3 import DNS, Objects, credentials, signed_headers

ROOT = "/opt/ml"
INPUTS = f"{ROOT}/input/data"
LIVE = f"{ROOT}/cloudtrain/live"
"""Not /opt/ml/checkpoints: that folder is the script's own, watched like CLOUDTRAIN_CHECKPOINT_DIR."""
CHANNELS = {"container": "cloudtrain-container", "runtime": "cloudtrain-runtime", "code": "cloudtrain-code"}
"""Our own channels. Their files carry the job's facts: a value of Environment has at most 512 characters."""
RESUME = "cloudtrain-resume"
CONTEXT = f"{INPUTS}/{CHANNELS['container']}/context.json"
FAILURE = f"{ROOT}/output/failure"
"""File whose first 1024 characters become the FailureReason of a job that fails."""
FAILURE_VARIABLE = "CLOUDTRAIN_FAILURE_FILE"
"""Variable with that file's path, for a node that can read nothing else: `cloudtrain.runtime.__main__` reads it."""
GRACE = 120
"""Seconds between SIGTERM and SIGKILL."""
BASE_VARIABLE = "SAGEMAKER_BASE_DIR"
"""Variable with another root; AWS's own training toolkit reads it too."""
PORT = 29500
"""torchrun's own default; AWS's tools have 7777."""
SHUTDOWN = "110"
"""Seconds that torchrun leaves its ranks after SIGTERM. Its own default, 30, would waste most of the grace."""
OWN = frozenset({*CHANNELS.values(), RESUME})
COMPAT = "/usr/local/cuda/compat"
"""Folder that AWS's images use from their own entry point (start_cuda_compat.sh), which our job replaces."""
_LEFT_OUT = "{resume_from?}"
_CREDENTIALS = {"AWS_ACCESS_KEY_ID", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI"}
_TRAINING_ENV = (
    *("current_host", "hosts", "input_config_dir", "input_data_config", "input_dir", "log_level", "model_dir"),
    *("network_interface_name", "num_cpus", "num_gpus", "output_data_dir", "output_dir", "resource_config"),
)
"""Keys of ``SM_TRAINING_ENV``, the toolkit's variables as one JSON object, that have the variable's name."""


def node_environment(environ: Mapping[str, str], argv: Mapping[str, str]) -> NodeEnvironment:
    """Return the facts that SageMaker gave this node; ``argv`` adds to the paths."""
    base = environ.get(BASE_VARIABLE, ROOT)
    resources = _json(f"{base}/input/config/resourceconfig.json")
    channels = _json(f"{base}/input/config/inputdataconfig.json", FileNotFoundError)
    hosts = sorted(resources["hosts"], key=_natural)
    topology = Topology(
        nodes=len(hosts),
        node_rank=hosts.index(resources["current_host"]),
        master_addr=hosts[0],
        master_port=PORT,
    )
    data = _below(base, INPUTS)
    paths = {
        "live": _below(base, LIVE),
        "code": f"{data}/{CHANNELS['code']}/code.tar.gz",
        **{f"input.{name}": f"{data}/{name}" for name in channels if name not in OWN},
        **({"resume": f"{data}/{RESUME}"} if RESUME in channels else {}),
        **argv,
    }
    region = environ.get("AWS_REGION") or environ.get("AWS_DEFAULT_REGION") or ""
    return NodeEnvironment(
        topology=topology,
        paths=paths,
        scratch=("/tmp",),  # on the disk that the job requested, by AWS's table of storage paths
        export_env={
            **_network(environ, str(resources.get("network_interface_name", ""))),
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", SHUTDOWN),
            **_sm(base, resources, channels, topology, hosts),
        },
        stop_grace=GRACE,
        failure_file=_below(base, FAILURE),
        # A stop is no failure: SageMaker itself sets the job's status.
        exit_code={"succeeded": 0, "failed": 1, "preempted": 0},
        secrets=lambda reference: secret(reference.partition(":")[2], environ, region=region),
        folders={f"{base}/checkpoints": "checkpoints"},
        agent=_agent(base, environ, region),
        cuda_compat=COMPAT,
    )


def _agent(base: str, environ: Mapping[str, str], region: str) -> SyncAgent:
    """Return the marks of the agent that syncs ``live``, and the writer past it: the job's role may write.

    A container under network isolation has no credentials of its role, and no way to S3.
    """
    run, agent = str(_context(base).get("run")), SyncAgent(uploading=UPLOADING, uploaded=UPLOADED, ignored=IGNORED)
    if not run.startswith("s3://"):
        return agent
    put = Objects(f"{run}/live", environ, region=region).put
    objects = Objects(run, environ, region=region) if _CREDENTIALS & environ.keys() else None
    return replace(agent, put=put, objects=objects)


def _below(base: str, path: str) -> str:
    return base + path.removeprefix(ROOT)


def _json(path: str, absent: type[Exception] | tuple[type[Exception], ...] = ()) -> dict[str, Any]:
    """Return the object in a JSON file; empty after an error of the kinds ``absent``."""
    try:
        found: dict[str, Any] = json.loads(Path(path).read_bytes())
    except absent:
        return {}
    return found


def _context(base: str) -> dict[str, Any]:
    return _json(_below(base, CONTEXT), (OSError, ValueError))


def _natural(host: str) -> tuple[Any, ...]:
    """Return a sort key that puts ``algo-2`` before ``algo-10``."""
    return tuple((int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", host))


def _network(environ: Mapping[str, str], interface: str) -> dict[str, str]:
    """Return NCCL's, gloo's and libfabric's settings, if the user has not set them and the machine has the device."""
    words = {}
    if interface and os.path.exists(f"/sys/class/net/{interface}"):
        words = {name: interface for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME") if name not in environ}
    if "FI_PROVIDER" not in environ and _has_efa():
        words["FI_PROVIDER"] = "efa"
    return words


def _has_efa(devices: str = "/sys/class/infiniband") -> bool:
    """Return True if there is an EFA device. A list of instance types would miss the next one."""
    try:
        return any(
            os.path.basename(os.path.realpath(f"{devices}/{name}/device/driver")) == "efa"
            for name in os.listdir(devices)
        )
    except OSError:
        return False


# ------------------------------------------------------------------------------------------------- for existing scripts


def _sm(
    base: str, resources: Mapping[str, Any], channels: Mapping[str, Any], topology: Topology, hosts: list[str]
) -> dict[str, str]:
    """Return the ``SM_*`` variables of AWS's training toolkit: the platform itself sets none."""
    data = _below(base, INPUTS)
    users = {name: f"{data}/{name}" for name in channels if name not in OWN}
    # The request holds only the hyperparameters that `options` sets.
    own = _context(base).get("hyperparameters", {}).items()
    hyperparameters = _json(f"{base}/input/config/hyperparameters.json", FileNotFoundError)
    hyperparameters |= {name: value for name, value in own if value != _LEFT_OUT}
    values: dict[str, Any] = {
        "SM_MODEL_DIR": f"{base}/model",
        "SM_INPUT_DIR": f"{base}/input",
        "SM_INPUT_CONFIG_DIR": f"{base}/input/config",
        "SM_INPUT_DATA_DIR": data,
        "SM_OUTPUT_DIR": f"{base}/output",
        "SM_OUTPUT_DATA_DIR": f"{base}/output/data",
        "SM_OUTPUT_FAILURE": _below(base, FAILURE),
        "SM_CURRENT_HOST": resources["current_host"],
        "SM_CURRENT_HOST_RANK": topology.node_rank,
        "SM_CURRENT_INSTANCE_TYPE": resources.get("current_instance_type", ""),
        "SM_HOSTS": hosts,
        "SM_HOST_COUNT": topology.nodes,
        "SM_MASTER_ADDR": topology.master_addr,
        "SM_MASTER_PORT": topology.master_port,
        "SM_NETWORK_INTERFACE_NAME": resources.get("network_interface_name", ""),
        "SM_NUM_CPUS": os.cpu_count() or 1,
        "SM_NUM_GPUS": gpus.count(),
        "SM_LOG_LEVEL": 20,
        "SM_RESOURCE_CONFIG": resources,
        "SM_INPUT_DATA_CONFIG": {name: channels[name] for name in users},
        "SM_CHANNELS": sorted(users),
        "SM_HPS": {name: _decoded(value) for name, value in hyperparameters.items()},
        **{f"SM_CHANNEL_{_upper(name)}": path for name, path in users.items()},
        **{f"SM_HP_{_upper(name)}": value for name, value in hyperparameters.items()},
    }
    values["SM_TRAINING_ENV"] = {
        "channel_input_dirs": users,
        **{name: values[f"SM_{name.upper()}"] for name in _TRAINING_ENV},
        "hyperparameters": values["SM_HPS"],
        "is_master": topology.node_rank == 0,
        "master_hostname": topology.master_addr,
    }
    return {name: value if isinstance(value, str) else json.dumps(value) for name, value in values.items()}


def _upper(name: str) -> str:
    return re.sub(r"\W", "_", name).upper()


def _decoded(value: Any) -> Any:
    """Decode a text that is JSON, as the toolkit reads hyperparameters: ``--hp epochs=3`` is a number."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value


# ------------------------------------------------------------------------------------------------------------- secrets


SERVICES = {
    "secretsmanager": ("secretsmanager.GetSecretValue", "AWS_ENDPOINT_URL_SECRETS_MANAGER"),
    "ssm": ("AmazonSSM.GetParameter", "AWS_ENDPOINT_URL_SSM"),
}
"""Operation of each service, and the variable with another endpoint of it."""


def secret(arn: str, environ: Mapping[str, str], *, region: str) -> str:
    """Return a secret (Secrets Manager) or parameter (SSM). Raises `StorageError`, never with the value."""
    _, partition, service, there, _ = arn.split(":", 4)
    region, (target, endpoint) = there or region, SERVICES[service]
    host = f"https://{service}.{region}.{DNS.get(partition, DNS['aws'])}"
    url = (environ.get(endpoint) or environ.get("AWS_ENDPOINT_URL") or host).rstrip("/") + "/"
    body = {"Name": arn, "WithDecryption": True} if service == "ssm" else {"SecretId": arn}
    data = json.dumps(body).encode()
    headers = {"Content-Type": "application/x-amz-json-1.1", "X-Amz-Target": target}

    def request() -> urllib.request.Request:
        signed = signed_headers(url, headers, data, credentials(environ), region=region, service=service)
        return urllib.request.Request(url, data=data, headers=signed, method="POST")

    silent = f"; a container in a VPC needs an endpoint of {service}"
    answer = ask(request, what=target.rpartition(".")[2], how="allow the job's role to call it", silent=silent)
    if service == "ssm":
        return str(answer["Parameter"]["Value"])
    if "SecretString" in answer:
        return str(answer["SecretString"])
    return base64.b64decode(answer["SecretBinary"]).decode()
