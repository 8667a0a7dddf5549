"""Refusals of ``POST …/customJobs``: the SDK's protobufs read strictly, and the rules that are in no model.

The limits are those of the pages "Configure compute resources", "Distributed training", "Use Spot VMs" and "Schedule
jobs with Dynamic Workload Scheduler". The accelerators of each machine are from "GPU machine types".
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

__all__ = ["broken_rules", "model_errors", "parsed"]

PLAIN: Mapping[str, Sequence[int]] = {
    "e2-standard": (4, 8, 16, 32),
    "e2-highmem": (2, 4, 8, 16),
    "e2-highcpu": (16, 32),
    **dict.fromkeys(("n4-standard", "n4-highmem", "n4-highcpu"), (2, 4, 8, 16, 32, 48, 64, 80)),
    "n2-standard": (4, 8, 16, 32, 48, 64, 80),
    "n2-highmem": (2, 4, 8, 16, 32, 48, 64, 80),
    "n2-highcpu": (16, 32, 48, 64, 80),
    "n1-standard": (4, 8, 16, 32, 64, 96),
    "n1-highmem": (2, 4, 8, 16, 32, 64, 96),
    "n1-highcpu": (16, 32, 64, 96),
    "c2-standard": (4, 8, 16, 30, 60),
    "m1-ultramem": (40, 80, 160),
    "m1-megamem": (96,),
}
"""Machines without built-in accelerators, by family and cores: the page's list, section "Machine types"."""
_FEW = {"NVIDIA_TESLA_P4": (1, 2, 4), "NVIDIA_TESLA_P100": (1, 2, 4), "NVIDIA_TESLA_T4": (1, 2, 4)}
_SMALL = {**_FEW, "NVIDIA_TESLA_V100": (1, 2, 4, 8)}
_16 = {**_FEW, "NVIDIA_TESLA_V100": (2, 4, 8)}
_32 = {**dict.fromkeys(_FEW, (2, 4)), "NVIDIA_TESLA_V100": (4, 8)}
_LARGE = {"NVIDIA_TESLA_P4": (4,), "NVIDIA_TESLA_T4": (4,), "NVIDIA_TESLA_V100": (8,)}
ATTACHED: Mapping[str, Mapping[str, Sequence[int]]] = {
    **dict.fromkeys(("n1-standard-4", "n1-standard-8", "n1-highmem-2", "n1-highmem-4", "n1-highmem-8"), _SMALL),
    **dict.fromkeys(("n1-standard-16", "n1-highmem-16", "n1-highcpu-16"), _16),
    **dict.fromkeys(("n1-standard-32", "n1-highmem-32", "n1-highcpu-32"), _32),
    **dict.fromkeys(("n1-standard-64", "n1-highmem-64", "n1-standard-96", "n1-highmem-96", "n1-highcpu-96"), _LARGE),
    "n1-highcpu-64": {**_LARGE, "NVIDIA_TESLA_P100": (4,)},
}
"""Accelerators of an N1 machine and their valid numbers: the page's table, line by line.

The page's copy lists a line's numbers without columns. Where a large machine has three of four, the missing one is
P100: the page says that four of them provide 64 cores and 208 GB at most.
"""
BUILT_IN = {
    **{f"g2-standard-{n}": ("NVIDIA_L4", 1) for n in (4, 8, 12, 16, 32)},
    **{f"g2-standard-{n}": ("NVIDIA_L4", n // 12) for n in (24, 48, 96)},
    **{f"a2-highgpu-{n}g": ("NVIDIA_TESLA_A100", n) for n in (1, 2, 4, 8)},
    "a2-megagpu-16g": ("NVIDIA_TESLA_A100", 16),
    **{f"a2-ultragpu-{n}g": ("NVIDIA_A100_80GB", n) for n in (1, 2, 4, 8)},
    **{f"a3-highgpu-{n}g": ("NVIDIA_H100_80GB", n) for n in (1, 2, 4, 8)},
    "a3-megagpu-8g": ("NVIDIA_H100_MEGA_80GB", 8),
    "a3-ultragpu-8g": ("NVIDIA_H200_141GB", 8),
    "a4-highgpu-8g": ("NVIDIA_B200", 8),
    "a4x-highgpu-4g": ("NVIDIA_GB200", 4),
    **{f"g4-standard-{48 * n}": ("NVIDIA_RTX_PRO_6000", n) for n in (1, 2, 4, 8)},
}
"""Machines with built-in accelerators: the kind and the number."""
TPUS = re.compile(r"cloud-tpu|ct5lp-hightpu-[148]t|ct6e-standard-[148]t|tpu7x-standard-4t")
"""Machines with TPUs: the page's section "TPUs". ``cloud-tpu`` names its accelerator, the others a topology."""
SHARED = ("a3-highgpu-1g", "a3-highgpu-2g", "a3-highgpu-4g")
"""Machines for SPOT and FLEX_START only."""
FLEXIBLE = ("NVIDIA_L4", "NVIDIA_TESLA_A100", "NVIDIA_A100_80GB", "NVIDIA_H100_80GB", "NVIDIA_H100_MEGA_80GB",
            "NVIDIA_H200_141GB", "NVIDIA_B200")  # fmt: skip
"""Accelerators of FLEX_START."""
RESERVED = ("NVIDIA_GB200",)
"""Accelerators that need a shared reservation: the page's list of GPUs."""
PREBUILT = re.compile(r"((us|europe|asia)-docker\.pkg\.dev/vertex-ai|gcr\.io/cloud-aiplatform)/training/[a-z0-9.:-]+")
"""Images for ``python_package_spec``: Google's page of prebuilt containers. The newest PyTorch is 2.4. Its support has
ended, but a log of 27 July 2026 shows a pull."""
DISKS = ("pd-ssd", "pd-standard", "hyperdisk-balanced")
WEEK = 7 * 86400
UNSUPPORTED = "Machine type {} is not supported."
"""Message of the service, from its page of troubleshooting."""
STANDARD, SPOT, FLEX_START = 3, 4, 6
OUTPUTS = ("name", "state", "createTime", "startTime", "endTime", "updateTime", "error", "webAccessUris")
_KEY, _VALUE = re.compile(r"[^\W\dA-Z_][\w-]{0,62}"), re.compile(r"[\w-]{0,63}")
_ACCOUNT = re.compile(r"[a-z0-9.-]+@[a-z0-9.-]+\.gserviceaccount\.com")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_NAMES: Mapping[str, re.Pattern[str]] = {
    "network": re.compile(r"projects/\d+/global/networks/[a-z]([-a-z0-9]*[a-z0-9])?"),
    "tensorboard": re.compile(r"projects/[^/]+/locations/[a-z0-9-]+/tensorboards/[^/]+"),
    "persistent_resource_id": re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?"),
}
_IMAGE = re.compile(r"[a-z0-9][a-zA-Z0-9._:/@-]*")
_RESERVATION = re.compile(r"projects/[^/]+/zones/[^/]+/reservations/[^/]+")
_KEY_NAME = re.compile(r"projects/[^/]+/locations/[^/]+/keyRings/[^/]+/cryptoKeys/[^/]+")


def parsed(body: bytes | Mapping[str, Any]) -> Any:
    """Parse a body into a CustomJob message. Raises `ValueError` where the front end would refuse it."""
    from google.cloud.aiplatform_v1 import CustomJob
    from google.protobuf import json_format

    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    try:
        return json_format.Parse(text, CustomJob.pb(CustomJob()))
    except json_format.ParseError as exc:
        raise ValueError(f"Invalid JSON payload received. {exc}") from None


def model_errors(body: Mapping[str, Any]) -> list[str]:
    """Return the errors that the model of a custom job finds in a body, spelled as the API and gcloud's files do."""
    try:
        message = parsed(body)
    except ValueError as exc:
        return [str(exc)]
    given = [f"'{name}' is for the service to say" for name in OUTPUTS if name in body]
    return [*given, *_spelling(message.DESCRIPTOR, body, "")]


def _spelling(kind: Any, value: Any, path: str) -> Iterator[str]:
    """Find names that only protobuf's parser takes: gcloud's files use camel case only."""
    if isinstance(value, list):
        for number, item in enumerate(value):
            yield from _spelling(kind, item, f"{path}[{number}]")
    if not isinstance(value, Mapping) or kind.full_name.startswith("google.protobuf."):
        return
    fields = {field.json_name: field for field in kind.fields}
    for name, item in value.items():
        if name not in fields:
            yield f"'{path}{name}' is not in camel case"
        elif (inner := fields[name].message_type) is not None and not inner.GetOptions().map_entry:
            yield from _spelling(inner, item, f"{path}{name}.")


# ------------------------------------------------------------------------------------------------------------ semantics


def broken_rules(job: Any) -> list[str]:
    """Return the service's refusals of a CustomJob message that its model allows."""
    return [problem for rule in (_names, _pools, _scheduling, _account) for problem in rule(job)]


def _names(job: Any) -> Iterator[str]:
    if not 0 < len(job.display_name) <= 128:
        yield "The display name must have 1 to 128 characters."
    if len(job.labels) > 64:
        yield "A resource has at most 64 labels."
    for key, value in job.labels.items():
        if not _KEY.fullmatch(key) or not _VALUE.fullmatch(value) or (key + value) != (key + value).lower():
            yield f"Invalid label {key}={value}: lowercase letters, digits, '_' and '-', at most 63 of them."
    if job.encryption_spec.kms_key_name and not _KEY_NAME.fullmatch(job.encryption_spec.kms_key_name):
        yield f"Invalid kms_key_name {job.encryption_spec.kms_key_name!r}"


def _pools(job: Any) -> Iterator[str]:
    pools = job.job_spec.worker_pool_specs
    if not 1 <= len(pools) <= 4:
        yield "worker_pool_specs must have 1 to 4 pools."
        return
    if pools[0].replica_count != 1:
        yield "The replica count of the first worker pool must be 1."
    for number, pool in enumerate(pools):
        if pool.replica_count < 0:
            yield f"Pool {number}: replica_count must not be negative."
        if pool.replica_count:
            yield from (f"Pool {number}: {problem}" for problem in _pool(pool, job.job_spec.scheduling.strategy))


def _pool(pool: Any, strategy: int) -> Iterator[str]:
    if not pool.WhichOneof("task"):
        yield "container_spec or python_package_spec is required."
    package, container = pool.python_package_spec, pool.container_spec
    if pool.WhichOneof("task") == "python_package_spec":
        if not PREBUILT.fullmatch(package.executor_image_uri):
            yield f"executor_image_uri must be a prebuilt image, not {package.executor_image_uri!r}"
        if not (package.python_module and 1 <= len(package.package_uris) <= 100):
            yield "python_package_spec needs a python_module and 1 to 100 package_uris."
    elif not _IMAGE.fullmatch(container.image_uri):
        yield f"Invalid image URI {container.image_uri!r}"
    names = [item.name for item in container.env]
    if len(names) > 100 or len(names) != len(set(names)) or not all(map(_VARIABLE.fullmatch, names)):
        yield "env takes at most 100 variables, each once, with names of letters, digits and '_'."
    if pool.disk_spec.boot_disk_type and pool.disk_spec.boot_disk_type not in DISKS:
        yield f"Unsupported boot disk type {pool.disk_spec.boot_disk_type!r}"
    if pool.disk_spec.boot_disk_size_gb and not 100 <= pool.disk_spec.boot_disk_size_gb <= 64000:
        yield "boot_disk_size_gb must be between 100 and 64000."
    yield from _machine(pool.machine_spec, strategy)


def _machine(spec: Any, strategy: int) -> Iterator[str]:
    from google.cloud.aiplatform_v1 import AcceleratorType

    kind, count = AcceleratorType(spec.accelerator_type).name, spec.accelerator_count
    machine, none = spec.machine_type, kind == "ACCELERATOR_TYPE_UNSPECIFIED"
    family, _, size = machine.rpartition("-")
    if TPUS.fullmatch(machine):
        if (machine == "cloud-tpu") != kind.startswith("TPU_") or (machine == "cloud-tpu") == bool(spec.tpu_topology):
            yield f"Machine type {machine} does not go with {kind} and topology {spec.tpu_topology!r}."
    elif none != (count == 0):
        yield "accelerator_type and accelerator_count go together."
    elif machine in BUILT_IN:
        if (kind, count) != BUILT_IN[machine]:
            yield f"Machine type {machine} has {BUILT_IN[machine][1]} {BUILT_IN[machine][0]}, not {count} {kind}."
    elif not size.isdigit() or int(size) not in PLAIN.get(family, ()):
        yield UNSUPPORTED.format(machine)
    elif not none and count not in ATTACHED.get(machine, {}).get(kind, ()):
        yield f"Machine type {machine} does not take {count} {kind}."
    if machine in SHARED and strategy not in (SPOT, FLEX_START):
        yield f"Machine type {machine} is for SPOT and FLEX_START only."
    yield from _reservation(spec.reservation_affinity, kind, strategy)


def _reservation(affinity: Any, kind: str, strategy: int) -> Iterator[str]:
    """Check by the page "Use reservations with training"."""
    specific, reserved = affinity.reservation_affinity_type == 3, affinity.reservation_affinity_type in (2, 3)
    if specific != bool(affinity.values) or not all(map(_RESERVATION.fullmatch, affinity.values)):
        yield "A specific reservation is named by key and values: projects/P/zones/Z/reservations/R."
    if reserved and strategy in (SPOT, FLEX_START):
        yield "A reservation is for strategy STANDARD only."
    if kind in RESERVED and not reserved:
        yield f"{kind} needs a shared reservation."


def _scheduling(job: Any) -> Iterator[str]:
    scheduling = job.job_spec.scheduling
    timeout, wait = (_seconds(scheduling, name) for name in ("timeout", "max_wait_duration"))
    if timeout is not None and timeout <= 0:
        yield "scheduling.timeout must be positive."
    if scheduling.strategy not in (0, STANDARD, SPOT, FLEX_START):
        yield f"scheduling.strategy {scheduling.strategy} is deprecated."
    if scheduling.disable_retries and scheduling.restart_job_on_worker_restart:
        yield "restart_job_on_worker_restart is not for a job with disable_retries."
    if scheduling.strategy != FLEX_START:
        if wait is not None:
            yield "max_wait_duration is for FLEX_START only."
        return
    if wait is not None and wait < 0:
        yield "scheduling.max_wait_duration must not be negative."
    if timeout is not None and timeout > WEEK:
        yield "A job of FLEX_START runs for 7 days at most."
    yield from _same([pool.machine_spec for pool in job.job_spec.worker_pool_specs if pool.replica_count])


def _same(machines: Sequence[Any]) -> Iterator[str]:
    from google.cloud.aiplatform_v1 import AcceleratorType

    if any(spec != machines[0] for spec in machines):
        yield "All worker pools of FLEX_START have the same machines."
    for kind in {AcceleratorType(spec.accelerator_type).name for spec in machines} - set(FLEXIBLE):
        yield f"FLEX_START has no machines with {kind}."


def _seconds(message: Any, name: str) -> float | None:
    return getattr(message, name).ToTimedelta().total_seconds() if message.HasField(name) else None


def _account(job: Any) -> Iterator[str]:
    spec = job.job_spec
    if spec.service_account and not _ACCOUNT.fullmatch(spec.service_account):
        yield f"Invalid service account {spec.service_account!r}"
    for name, form in _NAMES.items():
        if (value := getattr(spec, name)) and not form.fullmatch(value):
            yield f"Invalid {name} {value!r}"
    pools = spec.worker_pool_specs
    if spec.persistent_resource_id and any(
        p.machine_spec.reservation_affinity.reservation_affinity_type > 1 for p in pools
    ):
        yield "A job on a persistent resource cannot consume a reservation."
    if spec.tensorboard and not spec.service_account:
        yield "tensorboard needs a service_account."
    if spec.reserved_ip_ranges and not spec.network:
        yield "reserved_ip_ranges needs a network."
    base = spec.base_output_directory.output_uri_prefix
    if base and not re.fullmatch(r"gs://[a-z0-9][a-z0-9._-]{1,61}[a-z0-9](/.*)?", base):
        yield f"Invalid base_output_directory {base!r}"
