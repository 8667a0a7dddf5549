"""Make the CustomJob of a Job, as Vertex AI's API takes it. Pure: no network, no credentials, no SDK."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import SpecError, UnsupportedError
from ...job.job import run_tag
from ...provider_api import catalog
from ...provider_api.protocol import Layout, Request, check_inputs, python_command
from ...validate import url_scheme
from .._cloud import Planned, check_secrets, check_tags, digest_of, path_words
from . import NAME, Provider, machines
from .node import FABRIC_PATH, GCS, GRACE_PATH, NFS, NODES, TRANSPORTS, grace_of
from .validate import check_body

if TYPE_CHECKING:
    from ...job.job import Job
    from ...provider_api.catalog import Machine
    from ...provider_api.protocol import LayoutInput
    from . import Settings

TAGS = tuple(f"cloudtrain-{word}" for word in ("run", "run-id", "attempt", "job", "name"))
TAG_RUN, TAG_JOB = TAGS[0], TAGS[3]
"""TAG_JOB is `job_name` again: a list of jobs can be filtered by a label, and the service chooses its own ids."""
TAG_REVISION, TAG_CI = "cloudtrain-revision", "cloudtrain-ci"
"""Origin of the run: the commit, and the CI service with its number of the run; no label can be a URL."""
TAG_BODY = "cloudtrain-request"
"""Digest of the rest of the body. A run's id may return for another job after its records are gone."""
TAG_COUNT, VALUE_LENGTH = 56, 63
"""Upper limits. TAG_COUNT is the platform's 64 labels less our own eight; VALUE_LENGTH the characters of a value."""
DISK_GB = 100
"""Default boot disk, as by the API itself. Its type is the machine's: not every machine has pd-ssd."""
AFFINITIES: Mapping[str, str] = {"any": "ANY_RESERVATION", "none": "NO_RESERVATION"}
"""The reservationAffinityType of each word that ``reservation`` may be; any other text names one reservation."""
FLEX_SECONDS = 7 * 86400
"""Longest timeout of a job on FLEX_START: Vertex AI's page on the Dynamic Workload Scheduler."""
_PATTERNS: Mapping[str, tuple[str, str]] = {
    "project": (r"[a-z0-9][a-z0-9.:-]{0,62}", "is not the id of a project"),
    "location": (r"[a-z]+-[a-z]+\d+", "is not a region"),
    "service_account": (r"[^@\s/]+@[^@\s/]+", "is not the e-mail address of a service account"),
    "network": (r"projects/\d+/global/networks/[a-z0-9-]+", "is not projects/NUMBER/global/networks/NAME"),
    "tensorboard": (
        r"projects/[^/\s]+/locations/[^/\s]+/tensorboards/\d+",
        "is not projects/P/locations/L/tensorboards/NUMBER",
    ),
    "encryption_key": (
        r"projects/[^/\s]+/locations/[^/\s]+/keyRings/[^/\s]+/cryptoKeys/[^/\s]+",
        "is not projects/P/locations/L/keyRings/R/cryptoKeys/K",
    ),
    "persistent_resource_id": (r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?", "is not the id of a persistent resource"),
    "reservation": (
        r"any|none|projects/[^/\s]+/zones/[^/\s]+/reservations/[^/\s]+",
        "is not any, none or projects/P/zones/Z/reservations/R",
    ),
}  # fmt: skip
SECRET = r"projects/[\w.:-]+/secrets/[\w-]{1,255}(/versions/(latest|[\w-]+))?"
_HOW: Mapping[str, str] = {
    "project": "to list your projects, run: gcloud projects list",
    "location": "write one region, such as europe-west4",
}
OWNED = {
    "": "displayName labels encryptionSpec",
    "jobSpec.": "serviceAccount network baseOutputDirectory tensorboard enableWebAccess persistentResourceId",
    "jobSpec.scheduling.": "timeout restartJobOnWorkerRestart strategy maxWaitDuration",
    "jobSpec.workerPoolSpecs.*.": "replicaCount diskSpec.bootDiskSizeGb",
    "jobSpec.workerPoolSpecs.*.machineSpec.": "machineType acceleratorType acceleratorCount reservationAffinity",
    "jobSpec.workerPoolSpecs.*.containerSpec.": "imageUri command args",
}
"""Fields that `options` cannot change: another field or setting sets them, or the run relies on them."""
_BUCKET = re.compile(r"gs://[a-z0-9]([a-z0-9._-]{0,220}[a-z0-9])?(/.*)?", re.DOTALL)
_AMISS = re.compile(r"[\x00-\x1f\x7f?#*\[\]]|\$\(")
"""Characters that a mounted bucket's path cannot hold, or a command could take for a variable."""


# ------------------------------------------------------------------------------------------------------------- settings


def checked(settings: Settings) -> Settings:
    """Return ``settings``, checked. Raises `SpecError`."""
    for name, (pattern, why) in _PATTERNS.items():
        value = getattr(settings, name)
        if value and not (isinstance(value, str) and re.fullmatch(pattern, value)):
            raise SpecError(f"{value!r} {why}", field=f"{NAME}.{name}", hint=_HOW.get(name, ""))
    catalog.check_region(f"{NAME}.location", settings.location, machines.LOCATIONS)
    if settings.strategy == "FLEX_START" and _reserved(settings):
        why, hint = "FLEX_START cannot use a reservation", "remove strategy or reservation"
        raise SpecError(why, field=f"{NAME}.strategy", hint=hint)
    if settings.persistent_resource_id and _reserved(settings):
        why, hint = "a persistent resource cannot use a reservation", "remove persistent_resource_id or reservation"
        raise SpecError(why, field=f"{NAME}.reservation", hint=hint)
    if settings.tensorboard and not settings.service_account:
        raise SpecError("is not set, and a job with a tensorboard needs it", field=f"{NAME}.service_account")
    return settings


def _reserved(settings: Settings) -> bool:
    """Return True if jobs take machines of a reservation."""
    return settings.reservation not in ("", "none")


def _check_store(store: str) -> None:
    if not _BUCKET.fullmatch(store):
        hint = 'add to cloudtrain.toml: store = "gs://BUCKET/PREFIX", a bucket in the job\'s region'
        raise UnsupportedError(NAME, "store", f"its nodes see Cloud Storage, not {store}", hint=hint)
    _check_url(store, "store")


def _check_url(url: str, field: str) -> None:
    if amiss := _AMISS.search(url):
        raise UnsupportedError(NAME, field, f"its URL holds {amiss[0]!r}", hint="rename the file or folder")


# ------------------------------------------------------------------------------------------------------------- the plan


def plan(planned: Planned) -> Request:
    """Return the request; see `cloudtrain.provider_api.protocol.Provider.plan`."""
    settings, job, layout, notes = planned.settings, planned.job, planned.layout, planned.notes
    _check_store(layout.store)
    check_inputs(Provider, layout.inputs)
    _check_secrets(settings, job)
    if job.resources.shm_gb:
        why = "no field of a custom job sets the size of /dev/shm"
        raise UnsupportedError(NAME, "resources.shm_gb", why, hint="leave shm_gb out, and use fewer DataLoader workers")
    machine = machines.machine_of(job, planned.gpu_index)
    notes += machines.notes_of(machine, job.resources.instance_count)
    if own := settings.persistent_resource_id:
        how = f"gcloud ai persistent-resources delete {own} --region={settings.location}"
        notes.append(f"the machines of persistent resource {own} stay up, paid for, until you run: {how}")
    spec: dict[str, Any] = {
        "workerPoolSpecs": _pools(planned, machine),
        "scheduling": _limits(planned, machine),
        "baseOutputDirectory": {"outputUriPrefix": layout.native},
        **_switches(settings, job),
    }
    body: dict[str, Any] = {"displayName": planned.name, "jobSpec": spec, "labels": _tags(planned)}
    if settings.encryption_key:
        body["encryptionSpec"] = {"kmsKeyName": settings.encryption_key}
    body = planned.with_options(body, OWNED)
    check_body(body)
    if body["jobSpec"]["scheduling"].get("disableRetries"):  # the API forces that, too
        del body["jobSpec"]["scheduling"]["restartJobOnWorkerRestart"]
    body["labels"][TAG_BODY] = digest_of(body)
    operation = f"POST v1/projects/{settings.project}/locations/{settings.location}/customJobs"
    return planned.request(operation, body, machines=[machines.priced(machine)], known=machine)


def _check_secrets(settings: Settings, job: Job) -> None:
    def create(name: str) -> str:
        return f'printf %s "${name}" | gcloud secrets create {name} --data-file=-'

    known, form = "gcp:projects/P/secrets/S only, of Secret Manager", "projects/P/secrets/S"
    wanted = f"{form}, or {form}/versions/V"
    check_secrets(NAME, job, form=SECRET, wanted=wanted, known=known, create=create)
    if job.secrets and not settings.service_account:
        why = f"is not set, and secrets.{next(iter(job.secrets))} needs it: Vertex AI's own account reads no secrets"
        raise SpecError(why, field=f"{NAME}.service_account")


# ------------------------------------------------------------------------------------------------------ parts of a body


def _pools(planned: Planned, machine: Machine) -> list[dict[str, Any]]:
    """Return the pools: one primary, and all others. Source: Vertex AI's page on distributed training."""
    settings, job, layout = planned.settings, planned.job, planned.layout
    count = job.resources.instance_count
    words = python_command(["-c", _bootstrap(), layout.runtime, *_arguments(job, layout, machine, planned.attempt)])
    spec = machines.machine_spec(machine)
    if settings.reservation:
        spec["reservationAffinity"] = _affinity(settings)
    pool: dict[str, Any] = {
        "machineSpec": spec,
        "replicaCount": "1",
        "diskSpec": {"bootDiskSizeGb": _disk_gb(job)},
        "containerSpec": {
            "imageUri": job.image,
            "command": words[:4],
            "args": words[4:],
            "env": [{"name": NODES, "value": str(count)}],
        },
    }
    if mounts := _file_systems(settings, layout):
        pool["nfsMounts"] = mounts
    # The pools share no objects: options change each by itself.
    return [pool] if count == 1 else [pool, {**copy.deepcopy(pool), "replicaCount": str(count - 1)}]


def _affinity(settings: Settings) -> dict[str, Any]:
    """Return the setting's reservationAffinity, in the API's words: Google's page on reservations with training."""
    if settings.reservation in AFFINITIES:
        return {"reservationAffinityType": AFFINITIES[settings.reservation]}
    return {
        "reservationAffinityType": "SPECIFIC_RESERVATION",
        "key": "compute.googleapis.com/reservation-name",
        "values": [settings.reservation],
    }


def _disk_gb(job: Job) -> int:
    size, (least, most) = job.resources.disk_gb or DISK_GB, machines.DISK_LIMITS_GB
    if not least <= size <= most:
        raise UnsupportedError(NAME, "resources.disk_gb", f"a boot disk has {least} to {most} GB, not {size}")
    return size


@cache
def _bootstrap() -> str:
    return Path(__file__).with_name("bootstrap.py").read_text(encoding="utf-8")


def mounted(url: str) -> str:
    """Return a container's path of a gs:// URL."""
    return f"{GCS}/{url.removeprefix('gs://')}"


def unmounted(path: str) -> str:
    """Return the URL of a path that `mounted` made."""
    return f"gs://{path.removeprefix(f'{GCS}/')}"


def _arguments(job: Job, layout: Layout, machine: Machine, attempt: int) -> list[str]:
    """Return the runtime's arguments. `prepare` copies the inputs ``copy`` and ``copyfile`` to local disk first."""
    paths = {"code": mounted(layout.code), "live": mounted(layout.live)}
    if job.resources.spot:
        paths[GRACE_PATH] = str(grace_of("SPOT"))
    if job.resources.instance_count > 1 and (transport := TRANSPORTS.get(machine.accelerator)):
        paths[FABRIC_PATH] = transport
    if layout.resume:
        if url_scheme(layout.resume) != "gs":
            raise UnsupportedError(NAME, "resume_from", f"its nodes see gs:// only, not {layout.resume}")
        _check_url(layout.resume, "resume_from")
        paths["resume"] = mounted(layout.resume)
    for name, item in layout.inputs.items():
        kind, path = _channel(name, item)
        paths[f"{kind}.{name}"] = path
    return ["run", "--context", mounted(layout.context), "--attempt", str(attempt), *path_words(paths)]


def _channel(name: str, item: LayoutInput) -> tuple[str, str]:
    """Return an input's kind, and its path on the node."""
    field = f"inputs.{name}"
    if item.shard:
        why, hint = "every node sees a whole input", "leave shard out, and let each rank pick its files"
        raise UnsupportedError(NAME, f"{field}.shard", why, hint=hint)
    _check_url(item.url, field)
    if url_scheme(item.url) == "nfs":
        if item.mode == "copy":
            why = "a file system is mounted, never copied"
            raise UnsupportedError(NAME, f"{field}.mode", why, hint="leave mode out")
        return "input", f"{NFS}/{name}"
    path = mounted(item.url.rstrip("/"))
    if item.mode == "copy":
        return "copyfile" if item.file else "copy", path
    return "file" if item.file else "input", path


def _file_systems(settings: Settings, layout: Layout) -> list[dict[str, str]]:
    """Return ``nfs://server/path`` inputs as mounts."""
    found = []
    for name, item in layout.inputs.items():
        if url_scheme(item.url) != "nfs":
            continue
        server, _, path = item.url.partition("://")[2].partition("/")
        if not server or not path:
            raise SpecError(f"{item.url!r} is not nfs://SERVER/PATH", field=f"inputs.{name}")
        if not settings.network:
            why = "a file system is reached only in its VPC, and vertex.network is not set"
            raise SpecError(why, field=f"inputs.{name}", hint="set vertex.network to that VPC's network")
        found.append({"server": server, "path": f"/{path.rstrip('/')}", "mountPoint": name})
    return found


def _limits(planned: Planned, machine: Machine) -> dict[str, Any]:
    settings, job, notes = planned.settings, planned.job, planned.notes
    seconds = planned.limit(lambda at: [_priced(settings, job, at)])
    strategy = _strategy(settings, job, machine, notes)
    if strategy == "FLEX_START" and seconds > FLEX_SECONDS:
        why = "a job on FLEX_START runs for at most 7 days"
        raise UnsupportedError(NAME, "max_runtime", why, hint="add --max-runtime 7d, or less")
    machines.check_available(job, machine, strategy=strategy, reserved=_reserved(settings))
    notes += machines.advice(machine, strategy=strategy, reserved=_reserved(settings), location=settings.location)
    scheduling: dict[str, Any] = {"timeout": f"{seconds}s", "restartJobOnWorkerRestart": True}
    if strategy:
        scheduling["strategy"] = strategy
    if strategy == "FLEX_START" and job.max_wait is not None:
        scheduling["maxWaitDuration"] = f"{job.max_wait}s"
    return scheduling


def _strategy(settings: Settings, job: Job, machine: Machine, notes: list[str]) -> str:
    """Return the strategy of the request. Empty is the service's own: STANDARD."""
    if job.resources.spot:
        for name, given in (("strategy", settings.strategy), ("reservation", _reserved(settings))):
            if given:
                hint = f"remove {name} from the settings, or spot from the job"
                raise SpecError("is set, and the job asks for spot machines", field=f"{NAME}.{name}", hint=hint)
        notes.append("spot: Vertex AI itself starts the job again, up to six times, when its machines are taken back")
        return "SPOT"
    flexible = machine.accelerator in machines.FLEXIBLE
    if settings.strategy == "FLEX_START" and not flexible:
        has = f"{machine.instance_type} has {machine.gpus or 'no GPU'}"
        raise SpecError(f"FLEX_START is for L4, A100, H100, H200 and B200; {has}", field=f"{NAME}.strategy")
    if settings.strategy:
        return settings.strategy
    if job.max_wait is not None and flexible and not _reserved(settings) and not settings.persistent_resource_id:
        notes.append(
            "max_wait: asks by FLEX_START, which waits for the machines of all nodes, then runs 7 days at most"
        )
        return "FLEX_START"
    return ""


def _priced(settings: Settings, job: Job, gpu_index: int) -> str:
    """Return the price name of the listed GPU's machine. Raises `SpecError` for a machine that the job cannot have."""
    machine = machines.machine_of(job, gpu_index)
    machines.check_available(job, machine, strategy=_strategy(settings, job, machine, []), reserved=_reserved(settings))
    return machines.priced(machine)


def _switches(settings: Settings, job: Job) -> dict[str, Any]:
    names = {
        "serviceAccount": settings.service_account,
        "network": settings.network,
        "tensorboard": settings.tensorboard,
        "persistentResourceId": settings.persistent_resource_id,
        "enableWebAccess": job.interactive or settings.debug_shell,
    }
    return {name: value for name, value in names.items() if value}


def _tags(planned: Planned) -> dict[str, str]:
    """Return our labels, then the job's tags, which have a smaller alphabet here."""
    job, layout = planned.job, planned.layout
    given = (run_tag(layout.run), layout.run_id, str(planned.attempt), planned.name, job.name)
    check_tags(job.tags, reserved=("cloudtrain-", "goog"), most=TAG_COUNT)
    for key, value in job.tags.items():
        if not re.fullmatch(r"[a-z][a-z0-9_-]{0,62}", key) or not re.fullmatch(r"[a-z0-9_-]{0,63}", value):
            why = "a label holds at most 63 lower-case letters, digits, _ and -, and begins with a letter"
            raise SpecError(why, field=f"tags.{key}")
    return {**dict(zip(TAGS, given, strict=True)), **_origin(layout.origin), **dict(sorted(job.tags.items()))}


def _origin(origin: Mapping[str, str]) -> dict[str, str]:
    """Return the run's origin, in a label's alphabet and length."""
    commit, dash, dirty = origin.get("revision", "").partition("-")
    page = "-".join(filter(None, (origin.get("ci"), origin.get("ci_run"))))
    said = {TAG_REVISION: commit[: VALUE_LENGTH - len(dash + dirty)] + dash + dirty, TAG_CI: page}
    return {key: re.sub(r"[^a-z0-9_-]", "-", text.lower())[:VALUE_LENGTH] for key, text in said.items() if text}
