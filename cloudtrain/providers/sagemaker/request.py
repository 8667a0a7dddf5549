"""Make the CreateTrainingJob request of a Job. Pure: no network, no credentials, no SDK."""

from __future__ import annotations

import configparser
import dataclasses
import itertools
import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...errors import SpecError, UnsupportedError
from ...job.job import run_tag
from ...provider_api import catalog
from ...provider_api.protocol import Layout, Request, check_inputs
from ...validate import duration, url_scheme
from .._cloud import Planned, check_secrets, check_tags, machine_of
from . import NAME, Provider
from .images import check_image, default_image, images
from .node import CHANNELS, CONTEXT, FAILURE, FAILURE_VARIABLE, INPUTS, LIVE, RESUME
from .validate import check_body

if TYPE_CHECKING:
    from ...job.job import Job
    from ...provider_api.catalog import Machine
    from . import Settings

OPERATION = "CreateTrainingJob"
TAGS = tuple(f"cloudtrain:{word}" for word in ("run", "run-id", "attempt", "name"))
TAG_RUN = TAGS[0]
TAG_REVISION, TAG_CI = "cloudtrain:revision", "cloudtrain:ci"
"""Origin of the run: the commit, and the CI run as its URL, or as its number if the URL is no legal value."""
CHANNEL_COUNT, TAG_COUNT, PREFERENCES = 20, 44, 5
"""Upper limits. TAG_COUNT is the platform's 50 less cloudtrain's six, some of which may be absent."""
MAX_RUNTIME = 28 * 86400
DEFAULT_RUNTIME, DEFAULT_NODES, DEFAULT_VOLUME_GB = 5 * 86400, 20, 1024
"""Default quotas of an account: Service Quotas, applied values of a new account, January 2026."""
PENDING = (1800, 28 * 86400)
"""Least and most seconds of MaxPendingTimeInSeconds."""
SPOT_WAIT = 86400
"""Default wait of a spot job for machines, in seconds, in sum."""
VOLUME_GB, MOST_VOLUME_GB = 30, 1024
"""Least and most default disk: the value of SageMaker's own SDK, and the quota of a new account."""
COPIES = 4
"""Checkpoints that fit on the default volume: `KEPT` in live/, and the one that the script writes."""
KEPT = 3
"""Checkpoints that a spot job keeps by default. Isolated nodes download all of them at each restart."""
PLATFORM_RETRIES = 3
"""Restarts by SageMaker itself after a failure of its own. Our ``retries`` are attempts."""
NEVER_STARTED = "never started: no python 3.10"
FIRST = "ml.m5.xlarge"
FAMILIES = ("ml.m5.", "ml.c5.", "ml.r5.")
"""Families searched for cores and memory: they are in every region."""
ACCELERATED = re.compile(r"ml\.(p|g|trn)\d")
FORM = re.compile(r"ml\.[a-z]+\d+[a-z]*(-[a-z0-9]+)?\.(nano|micro|small|medium|large|metal|\d*xlarge)(-\w+)?")
"""Family and size, as in every TrainingInstanceType of botocore's model."""
ROLE = re.compile(r"arn:aws[a-z-]*:iam::\d{12}:role/.+")
SECRET = r"arn:aws[a-z-]*:(secretsmanager|ssm):[a-z0-9-]+:\d{12}:(secret:|parameter/).+"
VALUE = re.compile(r"[\w .:/=+@-]{1,256}")
"""Legal values of a tag; the model allows other kinds of spaces too."""
OWNED = {
    "": "TrainingJobName RoleArn Tags StoppingCondition CheckpointConfig EnableManagedSpotTraining VpcConfig"
    " EnableNetworkIsolation EnableInterContainerTrafficEncryption ServerlessJobConfig",
    "Environment.": FAILURE_VARIABLE,
    "AlgorithmSpecification.": "TrainingImage AlgorithmName TrainingInputMode ContainerEntrypoint ContainerArguments",
    "InputDataConfig.*.": "ChannelName DataSource InputMode CompressionType RecordWrapperType",
    "OutputDataConfig.": "S3OutputPath KmsKeyId",
    "ResourceConfig.": "InstanceType InstanceCount InstanceGroups InstancePreferences VolumeSizeInGB VolumeKmsKeyId"
    " KeepAlivePeriodInSeconds",
}
"""Fields that `options` cannot change: another field or setting sets them, or the run relies on them."""


# ------------------------------------------------------------------------------------------------------------- settings


def checked(settings: Settings) -> Settings:
    """Return ``settings`` with their region, checked. Raises `SpecError`."""
    if bool(settings.subnets) != bool(settings.security_group_ids):
        missing = "security_group_ids" if settings.subnets else "subnets"
        why = "is not set, and a VPC needs both subnets and security_group_ids"
        raise SpecError(why, field=f"sagemaker.{missing}")
    region = settings.region or _region(settings.profile, os.environ)
    catalog.check_region("sagemaker.region", region, tuple(images()["registries"]))
    return dataclasses.replace(
        settings,
        region=region,
        subnets=tuple(settings.subnets),
        security_group_ids=tuple(settings.security_group_ids),
    )


def _region(profile: str, environ: Mapping[str, str]) -> str:
    """Return the profile's region, else the environment's (boto3 ignores AWS_REGION), else the default profile's."""
    there = environ.get("AWS_REGION") or environ.get("AWS_DEFAULT_REGION") or ""
    if there and not profile:
        return there
    name = profile or environ.get("AWS_PROFILE") or "default"
    parser = configparser.RawConfigParser()
    try:
        parser.read(os.path.expanduser(environ.get("AWS_CONFIG_FILE") or "~/.aws/config"), encoding="utf-8")
    except (configparser.Error, UnicodeDecodeError):
        return there  # the SDK reports the error if it needs the file
    section = name if name == "default" else f"profile {name}"
    return parser.get(section, "region", fallback="").strip() or there


def _check_account(settings: Settings, store: str) -> None:
    if url_scheme(store) != "s3":
        hint = 'add to cloudtrain.toml: store = "s3://BUCKET/PREFIX"'
        raise UnsupportedError(NAME, "store", f"its nodes read s3:// only, not {store}", hint=hint)
    if not ROLE.fullmatch(settings.role):
        name = settings.role.rpartition("/")[2]
        how = f"to look up the ARN, run: aws iam get-role --role-name {name} --query Role.Arn --output text"
        raise SpecError(f"{settings.role!r} is not an ARN", field="sagemaker.role", hint=how)


# ------------------------------------------------------------------------------------------------------------- the plan


def plan(planned: Planned) -> Request:
    """Return the request; see `cloudtrain.provider_api.protocol.Provider.plan`."""
    settings, job, layout, notes = planned.settings, planned.job, planned.layout, planned.notes
    _check_account(settings, layout.store)
    check_inputs(Provider, layout.inputs)
    _check_secrets(settings, job)
    if job.resources.shm_gb:
        why, hint = "SageMaker itself sets the size of /dev/shm", "leave shm_gb out, and use fewer DataLoader workers"
        raise UnsupportedError(NAME, "resources.shm_gb", why, hint=hint)
    found = _machines(job, planned.gpu_index)
    types, known = list(found), [machine for machine in found.values() if machine is not None]
    arch = known[0].arch if known else "x86_64"
    _check_unknown(job, [name for name in types if found[name] is None])
    image = job.image or _image(settings, job, types, known, arch)
    stopping = _limits(planned, types)
    tags = _tags(job, layout, planned.attempt)
    specification: dict[str, Any] = {"TrainingImage": image, "TrainingInputMode": "File", **_command(planned.attempt)}
    if not check_image(image, region=settings.region, arch=arch, in_vpc=bool(settings.subnets), provider=NAME):
        specification["TrainingImageConfig"] = {"TrainingRepositoryAccessMode": "Vpc"}
    body: dict[str, Any] = {
        "TrainingJobName": planned.name,
        "RoleArn": settings.role,
        "AlgorithmSpecification": specification,
        "InputDataConfig": _inputs(layout),
        "OutputDataConfig": {"S3OutputPath": f"{layout.native}/", "CompressionType": "NONE"},
        "ResourceConfig": _resources(settings, job, types, known),
        "StoppingCondition": stopping,
        "CheckpointConfig": {"S3Uri": f"{layout.live}/", "LocalPath": LIVE},
        "RetryStrategy": {"MaximumRetryAttempts": PLATFORM_RETRIES},
        "Environment": {FAILURE_VARIABLE: FAILURE},
        "Tags": [{"Key": key, "Value": value} for key, value in tags.items()],
        **_switches(settings, job),
    }
    if settings.output_kms_key:
        body["OutputDataConfig"]["KmsKeyId"] = settings.output_kms_key
    body = planned.with_options(body, OWNED)
    kept = job.keep_checkpoints
    if kept is None:
        kept = KEPT if job.resources.spot else 0
    notes += _restart_notes(job, kept, isolated=settings.enable_network_isolation)
    check_body(body, _fields(body, job, tags), job.options.get(NAME, {}))
    _check_rules(settings, job, layout, body, known)
    notes += _warm_notes(settings, job, types) + _warnings(body)
    first = known[0] if known else None
    return planned.request(OPERATION, body, machines=types, known=first, keep_checkpoints=kept)


def _check_secrets(settings: Settings, job: Job) -> None:
    def create(name: str) -> str:
        where = f"--region {settings.region} --name {name}"
        return f'aws secretsmanager create-secret {where} --secret-string "${name}"'

    known, wanted = "aws:ARN only, a secret of Secrets Manager or SSM", "the ARN of a secret or parameter"
    check_secrets(NAME, job, form=SECRET, wanted=wanted, known=known, create=create)
    if job.secrets and settings.enable_network_isolation:
        why, hint = "under network isolation a container reaches no secret", "turn enable_network_isolation off"
        raise UnsupportedError(NAME, f"secrets.{next(iter(job.secrets))}", why, hint=hint)


# ------------------------------------------------------------------------------------------------------------- machines


def _machines(job: Job, gpu_index: int) -> dict[str, Machine | None]:
    """Return the job's machines, best first; several only if SageMaker itself can choose between them.

    All of them share one image and context: as many ranks, and no spot, which has no preferences.
    """
    first, known = _machine(job, gpu_index)
    found = {first: known}
    gpus = () if job.resources.spot or job.resources.instance_type else job.resources.gpus[gpu_index + 1 :]
    for at, gpu in enumerate(gpus, gpu_index + 1):
        if gpu.count != job.resources.gpus[gpu_index].count:
            break
        name, machine = _machine(job, at)
        if machine is None or known is None or machine.arch != known.arch:
            break
        found[name] = machine
    return dict(itertools.islice(found.items(), PREFERENCES))


def _machine(job: Job, gpu_index: int) -> tuple[str, Machine | None]:
    return machine_of(NAME, job, gpu_index, form=FORM, prefix="ml.", families=FAMILIES, first=FIRST)


def _check_unknown(job: Job, types: Sequence[str]) -> None:
    """Raise `SpecError` if a machine is not in the catalogue and the job does not give its facts."""
    name = next(filter(ACCELERATED.match, types), None)
    if name is None:
        return
    if not (job.resources.nproc_per_node or job.resources.gpu):
        why = f"is not set, and cloudtrain does not know how many accelerators {name} has"
        raise SpecError(why, field="resources.nproc_per_node", hint="add --nproc-per-node N")
    if not job.image and name.startswith("ml.trn"):
        raise SpecError(f"{name} needs an image with AWS Neuron", field="image", hint="name one with --image")


def _resources(settings: Settings, job: Job, types: Sequence[str], known: Sequence[Machine]) -> dict[str, Any]:
    count = job.resources.instance_count
    wanted = [{"InstanceType": name, "InstanceCount": count} for name in types]
    config: dict[str, Any] = wanted[0] if len(wanted) == 1 else {"InstancePreferences": wanted}
    config["VolumeSizeInGB"] = job.resources.disk_gb or max(map(_volume, known), default=VOLUME_GB)
    if settings.volume_kms_key:
        config["VolumeKmsKeyId"] = settings.volume_kms_key
    if held := _warm_seconds(settings, job):
        config["KeepAlivePeriodInSeconds"] = held
    return config


def _warm_seconds(settings: Settings, job: Job) -> int:
    return settings.keep_alive_period if job.keep_warm is None else job.keep_warm


def _warm_field(job: Job) -> str:
    return "sagemaker.keep_alive_period" if job.keep_warm is None else "keep_warm"


def _volume(machine: Machine) -> int:
    """Return the GB of disk for the machine's checkpoints. A machine with its own disks needs no more.

    The state of a training is at most as large as the memory of the GPUs. Without GPUs it is a part of the memory.
    """
    if machine.disk_gb is not None:
        return VOLUME_GB
    gpus = COPIES * machine.gpu_count * (machine.gpu_memory_gib or 0)
    return min(VOLUME_GB + math.ceil(gpus or machine.memory_gib or 0), MOST_VOLUME_GB)


def _restart_notes(job: Job, kept: int, *, isolated: bool) -> list[str]:
    """Return a note on the downloads of each restart. ``isolated`` nodes cannot archive checkpoints."""
    if not job.resources.spot and not job.retries:
        return []
    which = "the newest checkpoint and what pointers name"
    if isolated:
        default = " (default; keep_checkpoints)" if job.keep_checkpoints is None else " (keep_checkpoints)"
        which = (f"{kept} kept checkpoints" if kept else "every checkpoint so far") + default
    return [f"each restart downloads to every node: {which}, artifacts, outputs, metrics and logs of all nodes"]


def _image(settings: Settings, job: Job, types: Sequence[str], known: Sequence[Machine], arch: str) -> str:
    if arch != "x86_64":
        hint = "name an image for linux/arm64 with --image"
        raise SpecError("AWS's PyTorch images are for x86-64", field="image", hint=hint)
    gpus, version = [m.gpu for m in known if m.gpu], settings.framework_version
    accelerated = bool(gpus or job.resources.gpu) or any(map(ACCELERATED.match, types))
    return default_image(settings.region, gpus=gpus, accelerated=accelerated, version=version)


# ------------------------------------------------------------------------------------------------------ parts of a body


def _command(attempt: int) -> dict[str, list[str]]:
    """Return the container's command. Python becomes its first process, which gets SIGTERM.

    The line writes the failure file first: it gives the cause if there is no Python. Python removes it before all else.
    Its path comes in the environment, for want of room here. Backquotes, not ``$(…)``: SageMaker's own local mode puts
    this into a compose file, where ``$`` means something. Terse: an argument has at most 256 characters.
    """
    python = "`command -v python3||command -v python||echo no-python3`"
    pyz = f"{INPUTS}/{CHANNELS['runtime']}/cloudtrain.pyz"
    line = f"echo {NEVER_STARTED} >{FAILURE};exec {python} {pyz} run --context {CONTEXT} --attempt {attempt}"
    return {"ContainerEntrypoint": ["/bin/sh", "-c"], "ContainerArguments": [line]}


def _inputs(layout: Layout) -> list[dict[str, Any]]:
    folders = {
        "container": layout.context.rpartition("/")[0],
        "runtime": layout.runtime.rpartition("/")[0],
        "code": layout.code.rpartition("/")[0],
    }
    channels = [_s3(CHANNELS[word], f"{url}/") for word, url in folders.items()]
    if layout.resume:
        if url_scheme(layout.resume) != "s3":
            raise UnsupportedError(NAME, "resume_from", f"its nodes read s3:// only, not {layout.resume}")
        channels.append(_s3(RESUME, f"{layout.resume}/", mode="FastFile"))  # a node reads one of the checkpoints there
    for name, item in layout.inputs.items():
        field = f"inputs.{name}"
        if name in (*CHANNELS.values(), RESUME):
            why = "cloudtrain itself has a channel of that name"
            raise UnsupportedError(NAME, field, why, hint="choose another name")
        if url_scheme(item.url) in ("fsx", "efs"):
            channels.append(_file_system(name, item.url, mode=item.mode, shard=item.shard))
            continue
        if item.file and item.mode == "mount":
            folder = item.url.rpartition("/")[0]
            why, hint = "FastFile mounts folders, not one object", f"use mode copy, or name the folder {folder}/"
            raise UnsupportedError(NAME, f"{field}.mode", why, hint=hint)
        # Without the closing slash the prefix would match neighbouring folders too.
        uri = item.url if item.file else f"{item.url.rstrip('/')}/"
        mode = {"mount": "FastFile"}.get(item.mode, "File")
        channels.append(_s3(name, uri, mode=mode, shard=item.shard))
    if len(channels) > CHANNEL_COUNT:
        most = CHANNEL_COUNT - (len(channels) - len(layout.inputs))
        raise UnsupportedError(NAME, "inputs", f"a job has at most {most} channels besides cloudtrain's own")
    return channels


def _s3(name: str, uri: str, *, mode: str = "File", shard: bool = False) -> dict[str, Any]:
    source = {
        "S3DataType": "S3Prefix",
        "S3Uri": uri,
        "S3DataDistributionType": "ShardedByS3Key" if shard else "FullyReplicated",
    }
    return {"ChannelName": name, "InputMode": mode, "DataSource": {"S3DataSource": source}}


def _file_system(name: str, url: str, *, mode: str, shard: bool) -> dict[str, Any]:
    """Return the channel of ``efs://fs-0123abcd/folder`` or ``fsx://fs-0123abcd/mount-name/folder``, read-only."""
    if shard:
        why, hint = "every node sees a whole file system", "leave shard out, and let each rank pick its files"
        raise UnsupportedError(NAME, f"inputs.{name}.shard", why, hint=hint)
    if mode == "copy":
        why = "a file system is mounted, never copied"
        raise UnsupportedError(NAME, f"inputs.{name}.mode", why, hint="leave mode out")
    system, _, path = url.partition("://")[2].partition("/")
    source = {
        "FileSystemId": system,
        "FileSystemType": "EFS" if url_scheme(url) == "efs" else "FSxLustre",
        "FileSystemAccessMode": "ro",
        "DirectoryPath": f"/{path.rstrip('/')}",
    }
    return {"ChannelName": name, "InputMode": "File", "DataSource": {"FileSystemDataSource": source}}


def _limits(planned: Planned, types: Sequence[str]) -> dict[str, int]:
    """Return the hard limits, and add notes on them. A warm pool is paid for too."""
    job = planned.job
    if job.max_runtime > MAX_RUNTIME:
        why = "a training job runs for at most 28 days"
        raise UnsupportedError(NAME, "max_runtime", why, hint="add --max-runtime 28d, or less")
    held = _warm_seconds(planned.settings, job)
    runtime = planned.limit(lambda at: list(_machines(job, at)), held=held)
    condition = {"MaxRuntimeInSeconds": runtime}
    if job.resources.spot:
        if job.max_wait is None:
            planned.notes.append(f"spot: waits for machines for at most {SPOT_WAIT // 3600} h in sum (max_wait)")
        condition["MaxWaitTimeInSeconds"] = runtime + (job.max_wait or SPOT_WAIT)
    elif job.max_wait is not None:
        if not all(ACCELERATED.match(name) for name in types):
            why = "SageMaker can limit the wait only for spot machines and for machines with GPUs"
            raise UnsupportedError(NAME, "max_wait", why, hint="leave max_wait out")
        if not PENDING[0] <= job.max_wait <= PENDING[1]:
            raise UnsupportedError(NAME, "max_wait", "it must be between 30 minutes and 28 days")
        condition["MaxPendingTimeInSeconds"] = job.max_wait
    return condition


def _warnings(body: Mapping[str, Any]) -> list[str]:
    """Return a note for each part of ``body`` that an account's quotas, or its warm pools, may not serve."""
    resources = body["ResourceConfig"]
    count = int(resources.get("InstancePreferences", [resources])[0]["InstanceCount"])
    runtime = body["StoppingCondition"]["MaxRuntimeInSeconds"]
    asked = {
        f"max_runtime is above {DEFAULT_RUNTIME // 86400} days": runtime > DEFAULT_RUNTIME,
        f"{count} nodes are above {DEFAULT_NODES} a job": count > DEFAULT_NODES,
        f"disk_gb is above {DEFAULT_VOLUME_GB} GB": resources["VolumeSizeInGB"] > DEFAULT_VOLUME_GB,
    }
    why = "an account's quota until you ask for more; cloudtrain doctor looks it up"
    notes = [f"{what}, {why}" for what, above in asked.items() if above]
    if "KeepAlivePeriodInSeconds" in resources and "InstancePreferences" in resources:
        why = "AWS does not say whether a warm pool serves a list of machines"
        notes.append(f"warm pool: {why}; name one GPU to have the next job find it")
    return notes


def _warm_notes(settings: Settings, job: Job, types: Sequence[str]) -> list[str]:
    """Return a note with the price of the machines while they wait for the next job."""
    held = _warm_seconds(settings, job)
    if not held:
        return []
    prices = [catalog.price(NAME, name, settings.prices, region=settings.region) for name in types]
    known = [found.usd_per_hour for found in prices if found is not None]
    most = max(known, default=0.0) * job.resources.instance_count * held / 3600
    cost = f"up to {most:.2f} USD" if len(known) == len(types) else "their price is unknown"
    return [f"{_warm_field(job)}: after the job its machines wait {duration(held)} for the next one, paid for: {cost}"]


def _tags(job: Job, layout: Layout, attempt: int) -> dict[str, str]:
    """Return the job's tags, and those of its origin whose value is a legal one: no URL with a query."""
    check_tags(job.tags, reserved=("aws:", "cloudtrain:"), most=TAG_COUNT)
    own = zip(TAGS, (run_tag(layout.run), layout.run_id, str(attempt), job.name), strict=True)
    origin = ((TAG_REVISION, "revision"), (TAG_CI, "ci_run"), (TAG_CI, "ci_url"))  # the page, if both fit
    fitting = {tag: text for tag, key in origin if VALUE.fullmatch(text := layout.origin.get(key, ""))}
    return {**dict(own), **fitting, **dict(sorted(job.tags.items()))}


def _switches(settings: Settings, job: Job) -> dict[str, Any]:
    vpc = {"SecurityGroupIds": list(settings.security_group_ids), "Subnets": list(settings.subnets)}
    switches = {
        "VpcConfig": settings.subnets and vpc,
        "EnableNetworkIsolation": settings.enable_network_isolation,
        "EnableInterContainerTrafficEncryption": settings.encrypt_inter_container_traffic,
        "EnableManagedSpotTraining": job.resources.spot,
        "RemoteDebugConfig": (job.interactive or settings.debug_shell) and {"EnableRemoteDebug": True},
    }
    return {name: value for name, value in switches.items() if value}


# ----------------------------------------------------------------------------------------------------- fields and rules


_WARM = "ResourceConfig.KeepAlivePeriodInSeconds"
FIELDS = {
    _WARM: "sagemaker.keep_alive_period",
    "TrainingJobName": "run_id",
    "RoleArn": "sagemaker.role",
    "AlgorithmSpecification.TrainingImage": "image",
    "InputDataConfig": "store",
    "OutputDataConfig.S3OutputPath": "store",
    "OutputDataConfig.KmsKeyId": "sagemaker.output_kms_key",
    "CheckpointConfig": "store",
    "ResourceConfig.InstanceType": "resources.instance_type",
    "ResourceConfig.InstanceCount": "resources.instance_count",
    "ResourceConfig.InstancePreferences": "resources.gpu",
    "ResourceConfig.VolumeSizeInGB": "resources.disk_gb",
    "ResourceConfig.VolumeKmsKeyId": "sagemaker.volume_kms_key",
    "StoppingCondition.MaxRuntimeInSeconds": "max_runtime",
    "StoppingCondition.MaxWaitTimeInSeconds": "max_wait",
    "StoppingCondition.MaxPendingTimeInSeconds": "max_wait",
    "VpcConfig.Subnets": "sagemaker.subnets",
    "VpcConfig.SecurityGroupIds": "sagemaker.security_group_ids",
}
"""The user's field of each part of a request, by its path."""


def _fields(body: Mapping[str, Any], job: Job, tags: Mapping[str, str]) -> dict[str, str]:
    fields = {**FIELDS, _WARM: _warm_field(job)}
    for number, channel in enumerate(body["InputDataConfig"]):
        name = channel["ChannelName"]
        if name in job.inputs:
            fields[f"InputDataConfig.{number}"] = f"inputs.{name}"
        elif name == RESUME:
            fields[f"InputDataConfig.{number}"] = "resume_from"
    for number, key in enumerate(tags):
        if key in job.tags:
            fields[f"Tags.{number}"] = f"tags.{key}"
    return fields


_IN_VPC = "set sagemaker.subnets and sagemaker.security_group_ids"


def _check_rules(
    settings: Settings, job: Job, layout: Layout, body: Mapping[str, Any], known: Sequence[Machine]
) -> None:
    """Check the rules that botocore's model lacks."""
    if _warm_seconds(settings, job) and job.resources.spot:
        field = _warm_field(job)
        hint = f"remove {field}, or spot"
        raise SpecError("SageMaker has no warm pools of spot machines", field=field, hint=hint)
    if (job.interactive or settings.debug_shell) and settings.enable_network_isolation:
        why = "no shell reaches a container under network isolation"
        field = "interactive" if job.interactive else "sagemaker.debug_shell"
        raise SpecError(why, field=field, hint="turn enable_network_isolation off")
    for name, item in layout.inputs.items():
        if url_scheme(item.url) in ("fsx", "efs") and not settings.subnets:
            why = "a file system is reached only in its VPC, and the settings name none"
            raise SpecError(why, field=f"inputs.{name}", hint=_IN_VPC)
        if item.shard and item.file:
            why, hint = "one file cannot be split between nodes", "leave shard out, or name a folder"
            raise UnsupportedError(NAME, f"inputs.{name}.shard", why, hint=hint)
    for machine in known:
        if machine.disk_gb is None:
            continue
        if settings.volume_kms_key:
            why = f"{machine.instance_type} encrypts its own disks"
            raise SpecError(why, field="sagemaker.volume_kms_key", hint="remove volume_kms_key")
        if (job.resources.disk_gb or 0) > machine.disk_gb:
            why = f"{machine.instance_type} has {machine.disk_gb} GB of its own, and no more can be added"
            raise UnsupportedError(NAME, "resources.disk_gb", why, hint="leave disk_gb out, or name another machine")
    resources, spot = body["ResourceConfig"], job.resources.spot
    for name in ("TrainingPlanArn", "InstancePlacementConfig"):
        if name in resources and (spot or "InstancePreferences" in resources):
            why, hint = "is neither for spot machines nor for a list of GPUs", "set instance_type, without spot"
            raise SpecError(why, field=f"options.{NAME}.ResourceConfig.{name}", hint=hint)
    config = body["AlgorithmSpecification"].get("TrainingImageConfig", {})
    in_vpc = config.get("TrainingRepositoryAccessMode") == "Vpc"
    if config and not (in_vpc and settings.subnets):
        why = "is only for an image that is reached in a VPC"
        raise SpecError(why, field=f"options.{NAME}.AlgorithmSpecification.TrainingImageConfig", hint=_IN_VPC)
    for key in body["Environment"]:
        if key.startswith("CLOUDTRAIN_") and key != FAILURE_VARIABLE:
            raise SpecError("is set by cloudtrain itself", field=f"options.{NAME}.Environment.{key}")
