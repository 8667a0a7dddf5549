"""SageMaker's view of a job's instances, read from AWS's pages for tests and independent of cloudtrain's provider.

`reading` returns the LaunchSpec of a CreateTrainingJob; `differences` compares it with another one. `Instance` is one
machine's disk: configuration, channels, checkpoints, and the final upload.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import tarfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cloudtrain.provider_api.launch_spec import LaunchRules, LaunchSpec, Mount, NodeSpec

from ..base import Agent
from .strict import DEFAULT_CHECKPOINTS, DEFAULT_RUNTIME

__all__ = ["GRACE", "Bucket", "Instance", "differences", "reading"]

GRACE = 120.0
"""Seconds between SIGTERM and SIGKILL."""
MARKS = ".sagemaker"
"""Prefix of the agent's own files (``x.sagemaker-uploaded``), from ``checkpointing.py`` of
aws/sagemaker-xgboost-container."""
ML = "/opt/ml"
CONFIG = f"{ML}/input/config"
GROUP = "homogeneousCluster"


# --------------------------------------------------------------------------------------------------- parts of a request


def chosen(body: Mapping[str, Any], choice: int = 0) -> tuple[str, int]:
    """Return (type, count) of the instances; ``choice`` is an index of InstancePreferences."""
    resources = body["ResourceConfig"]
    item = resources["InstancePreferences"][choice] if "InstancePreferences" in resources else resources
    return str(item["InstanceType"]), int(item["InstanceCount"])


def hosts(count: int) -> list[str]:
    """Return the hosts as resourceconfig.json lists them: sorted as text, so algo-10 comes before algo-2."""
    return sorted(f"algo-{number}" for number in range(1, count + 1))


def configuration(body: Mapping[str, Any], host: str, choice: int = 0) -> dict[str, str]:
    """Return the files of /opt/ml/input/config, by path."""
    kind, count = chosen(body, choice)
    names = hosts(count)
    group = {"instance_group_name": GROUP, "instance_type": kind, "hosts": names}
    mode = body["AlgorithmSpecification"]["TrainingInputMode"]
    channels = {
        channel["ChannelName"]: {
            "TrainingInputMode": channel.get("InputMode", mode),
            "S3DistributionType": _s3(channel).get("S3DataDistributionType", "FullyReplicated"),
            "RecordWrapperType": channel.get("RecordWrapperType", "None"),
            **({"ContentType": channel["ContentType"]} if "ContentType" in channel else {}),
        }
        for channel in body.get("InputDataConfig", [])
    }
    resources = {
        "current_host": host,
        "current_instance_type": kind,
        "current_group_name": GROUP,
        "hosts": names,
        "instance_groups": [group],
        "network_interface_name": "eth0",
    }
    files = {
        "hyperparameters.json": body.get("HyperParameters", {}),
        "inputdataconfig.json": channels,
        "resourceconfig.json": resources,
    }
    return {f"{CONFIG}/{name}": json.dumps(value) for name, value in files.items()}


def _s3(channel: Mapping[str, Any]) -> Mapping[str, Any]:
    return channel["DataSource"].get("S3DataSource", {})  # type: ignore[no-any-return]


def mounts(body: Mapping[str, Any]) -> list[Mount]:
    """Return channels and checkpoints. S3OutputPath is no mount: its files go up after the end."""
    mode = body["AlgorithmSpecification"]["TrainingInputMode"]
    found = []
    for channel in body.get("InputDataConfig", []):
        kind = "copy" if channel.get("InputMode", mode) == "File" else "mount"
        url = _s3(channel).get("S3Uri", "")
        found.append(Mount(url=url, path=f"{ML}/input/data/{channel['ChannelName']}", kind=kind))
    if "CheckpointConfig" in body:
        config = body["CheckpointConfig"]
        found.append(Mount(url=config["S3Uri"], path=config.get("LocalPath", DEFAULT_CHECKPOINTS), kind="sync"))
    return found


def launch_mounts(body: Mapping[str, Any]) -> list[Mount]:
    """Return `mounts` in the form of a LaunchSpec: a file's mount has its name, and S3OutputPath is synced."""
    found = []
    for mount in mounts(body):
        file = mount.url.rpartition("/")[2] if mount.kind != "sync" else ""
        found.append(dataclasses.replace(mount, path=f"{mount.path}/{file}" if file else mount.path))
    output = f"{body['OutputDataConfig']['S3OutputPath'].rstrip('/')}/{body['TrainingJobName']}/output"
    found.append(Mount(url=f"{output}/model", path=f"{ML}/model", kind="sync"))
    found.append(Mount(url=f"{output}/data", path=f"{ML}/output/data", kind="sync"))
    return found


def reading(body: Mapping[str, Any], choice: int = 0) -> LaunchSpec:
    """Return what the platform starts for a request."""
    algorithm = body["AlgorithmSpecification"]
    entrypoint = algorithm.get("ContainerEntrypoint")
    arguments = algorithm.get("ContainerArguments", [] if entrypoint else ["train"])
    nodes = [
        NodeSpec(
            image=algorithm["TrainingImage"],
            entrypoint=entrypoint,
            command=arguments,
            env={**body.get("Environment", {}), "TRAINING_JOB_NAME": body["TrainingJobName"]},
            mounts=launch_mounts(body),
            files=configuration(body, host, choice),
            hostname=host,
        )
        for host in sorted(hosts(chosen(body, choice)[1]), key=lambda name: int(name.rpartition("-")[2]))
    ]
    stopping = body.get("StoppingCondition", {})
    return LaunchSpec(
        nodes=nodes,
        rules=LaunchRules(
            time_limit=stopping.get("MaxRuntimeInSeconds", DEFAULT_RUNTIME),
            max_restarts=body.get("RetryStrategy", {}).get("MaximumRetryAttempts", 0),
            stop_grace=GRACE,
        ),
    )


def differences(ours: LaunchSpec, theirs: LaunchSpec) -> list[str]:
    """Return how ``theirs`` differs from ``ours``; empty when they agree.

    ``theirs`` may leave files to the platform and add facts of the machine (memory, GPUs).
    """
    found = []

    def compare(where: str, first: Any, second: Any) -> None:
        if first != second:
            found.append(f"{where}: the platform has {first!r}, not {second!r}")

    compare("number of nodes", len(ours.nodes), len(theirs.nodes))
    for number, (one, other) in enumerate(zip(ours.nodes, theirs.nodes, strict=False)):
        at = f"node {number}: "
        compare(f"{at}image", one.image, other.image)
        compare(f"{at}entrypoint", list(one.entrypoint or ()), list(other.entrypoint or ()))
        compare(f"{at}command", list(one.command), list(other.command))
        compare(f"{at}hostname", one.hostname, other.hostname)
        compare(f"{at}working directory", one.workdir, other.workdir)
        compare(f"{at}user", one.user, other.user)
        platform = {"TRAINING_JOB_NAME", "TRAINING_JOB_ARN", "AWS_REGION"}
        job, other_env = ({k: v for k, v in node.env.items() if k not in platform} for node in (one, other))
        compare(f"{at}env", job, other_env)
        compare(f"{at}mounts", _places(one), _places(other))
        for path, text in other.files.items():
            if path not in one.files:
                found.append(f"{at}{path}: the platform puts no such file there")
            else:
                compare(f"{at}{path}", json.loads(one.files[path]), json.loads(text))
    compare("time limit", ours.rules.time_limit, theirs.rules.time_limit)
    compare("grace", ours.rules.stop_grace, theirs.rules.stop_grace)
    compare("signal", ours.rules.stop_signal, theirs.rules.stop_signal)
    return found


def _places(node: NodeSpec) -> list[tuple[str, str, str]]:
    return sorted((mount.path.rstrip("/"), mount.url.rstrip("/"), mount.kind) for mount in node.mounts)


# ----------------------------------------------------------------------------------------------------------- S3's bytes


class Bucket:
    """Objects of S3, as the platform moves them. Made with a boto3 client."""

    def __init__(self, client: Any) -> None:
        self.client = client

    def keys(self, url: str) -> list[str]:
        """Return every key that begins with the URL's: ``…/run-1`` finds ``…/run-10/x`` too, as on the platform."""
        bucket, prefix = split(url)
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
        return [item["Key"] for page in pages for item in page.get("Contents", [])]

    def fetch(self, url: str, folder: Path, *, shard: int = 0, shards: int = 1) -> list[str]:
        """Download the files that `keys` finds, or one of ``shards`` parts of them. Return their names below
        ``folder``."""
        bucket, prefix = split(url)
        found = [key for key in self.keys(url) if not key.endswith("/")][shard::shards]
        names = []
        for key in found:
            name = key.rpartition("/")[2] if key == prefix else key[len(prefix) :].lstrip("/")
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(self.client.exceptions.NoSuchKey):  # deleted since the listing
                path.write_bytes(self.client.get_object(Bucket=bucket, Key=key)["Body"].read())
                names.append(name)
        return names

    def names(self, url: str) -> set[str]:
        """Return the names below a URL that ends with a slash."""
        return {key[len(split(url)[1]) :] for key in self.keys(url)}

    def put(self, url: str, data: bytes) -> None:
        bucket, key = split(url)
        self.client.put_object(Bucket=bucket, Key=key, Body=data)

    def send(self, url: str, path: Path) -> None:
        self.put(url, path.read_bytes())

    def delete(self, url: str) -> None:
        bucket, key = split(url)
        self.client.delete_object(Bucket=bucket, Key=key)

    def exists(self, url: str) -> bool:
        """Return True if the bucket exists."""
        try:
            self.client.head_bucket(Bucket=split(url)[0])
        except self.client.exceptions.ClientError:
            return False
        return True


def split(url: str) -> tuple[str, str]:
    """Return (bucket, key) of an s3:// URL."""
    bucket, _, key = url.removeprefix("s3://").partition("/")
    return bucket, key


# ------------------------------------------------------------------------------------------------------------ instances


class Instance:
    """One instance's disk at ``folder``: /opt/ml, and the job's own checkpoint folder."""

    def __init__(
        self,
        folder: Path,
        body: Mapping[str, Any],
        host: str,
        bucket: Bucket,
        *,
        choice: int,
        lag: Callable[[], float],
        stale: Callable[[], bool],
        dead: Callable[[], bool] = lambda: False,
    ) -> None:
        self.folder, self.body, self.host, self.bucket = folder, body, host, bucket
        self.choice = choice
        self.sync: Agent | None = None
        for name in ("input/config", "input/data", "model", "output/data", "checkpoints"):
            (folder / "opt" / "ml" / name).mkdir(parents=True)
        if "CheckpointConfig" in body:
            config = body["CheckpointConfig"]
            local = self.here(config.get("LocalPath", DEFAULT_CHECKPOINTS))
            self.sync = Agent(bucket, config["S3Uri"], local, lag=lag, stale=stale, marks=MARKS, dead=dead)

    def here(self, path: str) -> Path:
        """Return the local path for a path of the instance."""
        return self.folder / path.strip("/")

    def fill(self) -> None:
        """Write configuration, channels and checkpoints. Raises `LookupError` for a channel without an object."""
        for path, text in configuration(self.body, self.host, self.choice).items():
            self.here(path).write_text(text)
        names = hosts(chosen(self.body, self.choice)[1])
        for channel in self.body.get("InputDataConfig", []):
            source = _s3(channel)
            sharded = source.get("S3DataDistributionType") == "ShardedByS3Key"
            parts = {"shard": names.index(self.host), "shards": len(names)} if sharded else {}
            folder = self.here(f"{ML}/input/data/{channel['ChannelName']}")
            folder.mkdir(parents=True)
            if not self.bucket.fetch(source["S3Uri"], folder, **parts) and not sharded:
                raise LookupError(f"No S3 objects found under S3 URL {source['S3Uri']!r} given in input data source.")
        if self.sync is not None:
            self.sync.restore()

    def binds(self) -> list[tuple[Path, str, bool]]:
        """Return the container's mounts of the disk as (local path, container path, read-only)."""
        found = [(self.here(ML), ML, False)]
        for mount in mounts(self.body):
            if mount.kind == "mount":
                found.append((self.here(mount.path), mount.path, True))
            elif mount.kind == "sync" and not mount.path.startswith(f"{ML}/"):
                found.append((self.here(mount.path), mount.path, False))
        return found

    def failure(self) -> str:
        """Return the text of /opt/ml/output/failure."""
        with contextlib.suppress(OSError):
            return self.here(f"{ML}/output/failure").read_text(errors="replace")
        return ""


def upload(bucket: Bucket, instances: Sequence[Instance], body: Mapping[str, Any]) -> str:
    """Upload the nodes' files in model and output/data, merged over all nodes. Return the URL of the model."""
    base = f"{body['OutputDataConfig']['S3OutputPath'].rstrip('/')}/{body['TrainingJobName']}/output"
    packed = body["OutputDataConfig"].get("CompressionType", "GZIP") == "GZIP"
    for name, place in (("model", "model"), ("output", "output/data")):
        found: dict[str, bytes] = {}
        for instance in instances:
            root = instance.here(f"{ML}/{place}")
            found |= {p.relative_to(root).as_posix(): p.read_bytes() for p in root.rglob("*") if p.is_file()}
        if not packed:
            for path, data in found.items():
                bucket.put(f"{base}/{'model' if name == 'model' else 'data'}/{path}", data)
        else:
            bucket.put(f"{base}/{name}.tar.gz", _packed(found))
    return f"{base}/model.tar.gz" if packed else f"{base}/model/"


def _packed(files: Mapping[str, bytes]) -> bytes:
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:gz", compresslevel=1) as tar:
        for name, data in sorted(files.items()):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return archive.getvalue()
