"""Make the command job of a Job, as ``az ml job create -f`` takes it. Pure: no network, no credentials, no SDK."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import SpecError, UnsupportedError
from ...job.job import run_tag
from ...provider_api.protocol import Layout, Request, check_inputs
from ...validate import choice_of, duration, url_scheme
from .._cloud import Planned, check_secrets, check_tags, digest_of, machine_of, path_words
from . import KEEP_WARM, NAME, Provider
from .node import LIVE, NODES, OWN_INPUTS, RESUME
from .urls import FSSPEC, Blob, check_url, cloud_of, datastore_uri, for_job, storage
from .validate import check_body, check_options

if TYPE_CHECKING:
    from ...job.job import Job
    from ...provider_api.catalog import Machine
    from ...provider_api.protocol import LayoutInput
    from . import Settings

OPERATION = "az ml job create"
TAGS = tuple(f"cloudtrain.{word}" for word in ("run", "run_id", "attempt", "name"))
TAG_RUN = TAGS[0]
TAG_REVISION, TAG_CI = "cloudtrain.revision", "cloudtrain.ci"
"""Origin of the run: the commit, and the page of the CI run."""
TAG_BODY = "cloudtrain.request"
"""Digest of the rest of the body. A run's id may return for another job after its records are gone."""
TAG_GPU = "cloudtrain.gpu"
"""GPU that a job for a cluster requests. The request has no other place for it; `sdk` compares it with the cluster."""
SCHEMA = "https://azuremlschemas.azureedge.net/latest/commandJob.schema.json"
SSH = "cloudtrain_ssh"
"""Name of the ssh service of a job that is interactive."""
TAG_COUNT = 42
"""Azure allows a resource 50 tags, eight of ours among them; unverified for jobs."""
TAG_KEY, TAG_VALUE = re.compile(r"[^<>%&\\?/\x00-\x1f]{1,512}"), 256
"""A resource's limits again: the pattern of a tag's name, and the characters of its value."""
TIMEOUT = 60
"""Shortest time limit: by azure-ai-ml, a sweep's limit below 60 becomes 60 days (``job_limits.py``)."""
LONGEST, LONGEST_LOW = 21 * 86400, 7 * 86400
"""Longest run of a job in seconds, and on low-priority machines (Azure's page how-to-manage-quotas)."""
MOST_NODES = 100
"""Nodes of one MPI job and of a cluster with RDMA, by the same page. More need one placement group."""
SHM_GIB = 16
"""Shared memory on a cluster (its machines are unknown); else half of the memory. Azure ML's own default is 2g."""
FIRST = "Standard_DS3_v2"
FAMILIES = ("Standard_D", "Standard_E", "Standard_F")
ACCELERATED = re.compile(r"standard_n[cdgpv]", re.IGNORECASE)
FORM = re.compile(
    r"(standard|basic)_[a-z]+\d+(-\d+)?[a-z0-9]*(_(?!v\d{1,2}(_|$))[a-z0-9]+)*(_v1?\d)?(_promo)?", re.IGNORECASE
)
"""Series, cores, features and version: Azure's page of conventions for names of virtual machines."""
ENVIRONMENT = r"azureml:(//registries/[^/\s]+/environments/\S+|[^/\s]\S*|/subscriptions/\S+)"
_HOW_ENVIRONMENT = "write azureml:NAME:VERSION, azureml:NAME@latest or azureml://…"
PATTERNS = {
    "identity": (r"\w*|managed_identity:[\w-]+", "is not an identity", "write managed_identity:CLIENT-ID"),
    "environment": (f"({ENVIRONMENT})?", "is not an environment", _HOW_ENVIRONMENT),
    "compute": (r"([A-Za-z][A-Za-z0-9-]{1,31})?", "is not the name of a cluster", ""),
    "datastore": (r"[A-Za-z0-9_]+", "is not the name of a datastore", ""),
}
"""Form of each setting, and the message and hint for another one."""
SECRET = r"[A-Za-z0-9.:-]+/[A-Za-z0-9-]{1,127}(/[0-9a-f]{32})?"
IDENTITIES = ("aml_token", "user_identity", "managed_identity")
_REGISTERED = re.compile(r"azureml:(?!//)|azureml://.+/data/[^/]+/(versions|labels)/[^/]+$")
"""A data asset of the workspace or a registry; no path."""
_SCOPE = re.compile(r"/subscriptions/([^/]+)/resourceGroups/([^/]+)/providers/[^/]+/workspaces/([^/]+)/?", re.I)
CONFIGS = tuple(f"{folder}{name}.json" for folder in (".azureml/", "aml_config/", "") for name in ("config", "project"))
"""Files where Azure ML's own SDK looks for its settings, here and in every folder above."""
WORKSPACE = ("subscription_id", "resource_group", "workspace_name")
OWNED = {
    "": "$schema type name command code environment compute distribution inputs outputs limits queue_settings identity"
    " tags experiment_name",
    "services.": SSH,
    "environment_variables.": NODES,
    "resources.": "instance_type instance_count shm_size",
}
"""Fields that `options` cannot change: another field or setting sets them, or the run relies on them."""


# ------------------------------------------------------------------------------------------------------------- settings


def checked(settings: Settings) -> Settings:
    """Return ``settings`` with their workspace, checked. Raises `SpecError`."""
    if settings.identity:
        choice_of(settings.identity.partition(":")[0], IDENTITIES, "azureml.identity")
    for name, (pattern, why, how) in PATTERNS.items():
        value = getattr(settings, name)
        if not re.fullmatch(pattern, value):
            raise SpecError(f"{value!r} {why}", field=f"azureml.{name}", hint=how)
    if settings.compute and settings.job_tier:
        why, how = f"is for serverless compute, and compute is {settings.compute!r}", "remove job_tier or compute"
        raise SpecError(why, field="azureml.job_tier", hint=how)
    cloud_of(settings)
    found = {} if any(getattr(settings, name) for name in WORKSPACE) else _config(Path.cwd())
    return dataclasses.replace(settings, cloud_metadata=dict(sorted(settings.cloud_metadata.items())), **found)


def _config(folder: Path) -> dict[str, Any]:
    """Return the workspace in Azure ML's own file, empty without one. A file that names no workspace is skipped."""
    for place in (folder, *folder.parents):
        for name in CONFIGS:
            try:
                config = json.loads((place / name).read_bytes())
            except (OSError, ValueError):
                continue
            scope = _SCOPE.fullmatch(str(config.get("Scope"))) if isinstance(config, dict) else None
            if scope is not None:  # the SDK too prefers it
                return dict(zip(WORKSPACE, scope.groups(), strict=True))
            if isinstance(config, dict) and all(isinstance(config.get(key), str) for key in WORKSPACE):
                return {key: config[key] for key in WORKSPACE}
    return {}


def _check_account(settings: Settings, store: str) -> None:
    check_url(store, "store")
    if url_scheme(store) not in FSSPEC or not Blob.parse(store).container:
        hint = 'add to cloudtrain.toml: store = "abfs://CONTAINER@ACCOUNT.dfs.core.windows.net/PREFIX"'
        raise UnsupportedError(NAME, "store", f"its nodes read a container of Azure Storage, not {store}", hint=hint)
    storage(store, cloud_of(settings), {})
    for name in WORKSPACE:
        if not re.fullmatch(r"[\w().-]{1,90}", getattr(settings, name)):
            raise SpecError(f"{getattr(settings, name)!r} is not a valid name", field=f"azureml.{name}")


# ------------------------------------------------------------------------------------------------------------- the plan


def plan(planned: Planned) -> Request:
    """Return the request; see `cloudtrain.provider_api.protocol.Provider.plan`."""
    settings, job, layout, notes = planned.settings, planned.job, planned.layout, planned.notes
    _check_account(settings, layout.store)
    check_inputs(Provider, layout.inputs)
    _check_secrets(job)
    instance_type, known = _machine(settings, job, planned.gpu_index)
    if known and known.retired:
        notes.append(f"{instance_type} was retired on {known.retired}: no machine may ever come")
    priced = instance_type or settings.compute  # a cluster has a price under its own name
    timeout = _limits(planned)
    inputs, paths = _inputs(settings, layout)
    shm = max(1, int(known.memory_gib / 2)) if known is not None and known.memory_gib else SHM_GIB
    count = job.resources.instance_count
    body: dict[str, Any] = {
        "$schema": SCHEMA,
        "type": "command",
        "name": planned.name,
        "display_name": layout.run_id,
        "experiment_name": settings.experiment_name or job.name,
        "command": _command(planned.attempt, paths),
        "environment": _environment(settings, job),
        "environment_variables": _variables(settings, count),
        "inputs": inputs,
        "outputs": {LIVE: _folder(settings, layout.live, mode="rw_mount")},
        "resources": {
            **({"instance_type": instance_type} if instance_type else {}),
            "instance_count": count,
            "shm_size": f"{job.resources.shm_gb or shm}g",
        },
        "limits": {"timeout": timeout},
        "tags": _tags(settings, job, layout, planned.attempt),
        **dict(_switches(settings, job, notes)),
    }
    check_options(job.options.get(NAME, {}), body)
    body = planned.with_options(body, OWNED)
    check_body(body, serverless=not settings.compute)
    body["tags"][TAG_BODY] = digest_of(body)
    return planned.request(OPERATION, body, machines=[priced], known=known)


def _check_secrets(job: Job) -> None:
    def create(name: str) -> str:
        return f'az keyvault secret set --vault-name VAULT --name {name.replace("_", "-")} --value "${name}"'

    known, wanted = "azure:VAULT/NAME only, a secret of Key Vault", "VAULT/NAME, or VAULT/NAME/VERSION"
    check_secrets(NAME, job, form=SECRET, wanted=wanted, known=known, create=create)


# ------------------------------------------------------------------------------------------------------------- machines


def _machine(settings: Settings, job: Job, gpu_index: int) -> tuple[str, Machine | None]:
    """Return the instance type, empty on a cluster, and its entry in the catalogue."""
    wanted = job.resources
    if wanted.disk_gb:
        why, hint = "its machines have disks of a fixed size", "leave disk_gb out, or name a larger instance_type"
        raise UnsupportedError(NAME, "resources.disk_gb", why, hint=hint)
    if settings.compute:
        _check_cluster(settings, job)
        return "", None
    name, known = machine_of(NAME, job, gpu_index, form=FORM, prefix="Standard_", families=FAMILIES, first=FIRST)
    if known is None and ACCELERATED.match(name) and not (wanted.nproc_per_node or wanted.gpu):
        why = f"is not set, and cloudtrain does not know how many GPUs {name} has"
        raise SpecError(why, field="resources.nproc_per_node", hint="add --nproc-per-node N")
    return name, known


def _check_cluster(settings: Settings, job: Job) -> None:
    """Raise `UnsupportedError` for fields that a cluster fixes already. ``gpu`` sets the ranks a node."""
    wanted, own = job.resources, f"cluster {settings.compute} has one size of machine"
    for name in ("instance_type", "spot", "cpus", "memory_gb"):
        if getattr(wanted, name):
            hint = f"remove {name} from the job, or the setting azureml.compute"
            raise UnsupportedError(NAME, f"resources.{name}", own, hint=hint)
    if len(wanted.gpu) > 1:
        why = f"cluster {settings.compute} has one kind of GPU"
        raise UnsupportedError(NAME, "resources.gpu", why, hint="name only that GPU")


def _variables(settings: Settings, count: int) -> dict[str, str]:
    """Return the node's variables. Azure's SDKs find a user's managed identity by AZURE_CLIENT_ID alone
    (azure-sdk-for-python #31071)."""
    client = settings.identity.partition(":")[2]
    return {NODES: str(count), **({"AZURE_CLIENT_ID": client} if client else {})}


def _environment(settings: Settings, job: Job) -> str | dict[str, str]:
    if job.image and not job.image.startswith("azureml:"):
        return {"image": job.image}
    if job.image and not re.fullmatch(ENVIRONMENT, job.image):
        raise UnsupportedError(NAME, "image", f"{job.image!r} is not an environment", hint=_HOW_ENVIRONMENT)
    return job.image or settings.environment


# ------------------------------------------------------------------------------------------------------ parts of a body


def _command(attempt: int, paths: Mapping[str, str]) -> str:
    """Return one shell line of words that starts the runtime. Paths are filled in only here.

    Each ``exec`` is needed: a shell that forwards no signals (dash) would get the stop signal. Backquotes, not
    ``$(…)``: clusters of Kubernetes fill that in themselves.
    """
    find = 'exec `command -v python3 || command -v python || echo this-image-has-no-python3` "$@"'
    pyz, context = (_placeholder("inputs", OWN_INPUTS[word]) for word in ("runtime", "container"))
    words = ["exec", "/bin/sh", "-c", find, "cloudtrain", f"{pyz}/cloudtrain.pyz", "run"]
    words += ["--context", f"{context}/context.json", "--attempt", str(attempt)]
    return shlex.join([*words, *path_words(paths)])


def _inputs(settings: Settings, layout: Layout) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the job's inputs, and the runtime's paths to them: ``file.x`` is the path of a channel's one file."""
    files = {"container": layout.context, "runtime": layout.runtime, "code": layout.code}
    inputs = {
        OWN_INPUTS[word]: _folder(settings, url.rpartition("/")[0], mode="download") for word, url in files.items()
    }
    code = _placeholder("inputs", OWN_INPUTS["code"])
    paths = {"code": f"{code}/code.tar.gz", "live": _placeholder("outputs", LIVE)}
    if layout.resume:
        if url_scheme(layout.resume) not in FSSPEC:
            raise UnsupportedError(NAME, "resume_from", f"its nodes read a container of Azure, not {layout.resume}")
        path = for_job(layout.resume, store=layout.store, datastore=settings.datastore, field="resume_from")
        inputs[RESUME] = {"type": "uri_folder", "mode": "ro_mount", "path": f"{path}/"}
        paths["resume"] = _placeholder("inputs", RESUME)
    for channel, item in layout.inputs.items():
        name, field = channel.replace("-", "_"), f"inputs.{channel}"  # names never differ by this alone
        if name.lower() in (*OWN_INPUTS.values(), RESUME, LIVE):
            why = "cloudtrain itself has an input of that name"
            raise UnsupportedError(NAME, field, why, hint="choose another name")
        inputs[name] = _channel(settings, layout, item, field)
        paths[f"{'file' if item.file else 'input'}.{channel}"] = _placeholder("inputs", name)
    return inputs, paths


def _placeholder(kind: str, name: str) -> str:
    return f"${{{{{kind}.{name}}}}}"


def _folder(settings: Settings, url: str, *, mode: str) -> dict[str, str]:
    """Return the input or output of a folder of the store."""
    path = datastore_uri(settings.datastore, Blob.parse(url).path)
    return {"type": "uri_folder", "mode": mode, "path": f"{path}/"}


def _channel(settings: Settings, layout: Layout, item: LayoutInput, field: str) -> dict[str, str]:
    if item.shard:
        why, hint = "every node of a job sees a whole input", "leave shard out, and let each rank pick its files"
        raise UnsupportedError(NAME, f"{field}.shard", why, hint=hint)
    path = for_job(item.url, store=layout.store, datastore=settings.datastore, field=field)
    # A mount gains nothing for one file. A folder is mounted unless asked, as by Azure ML itself.
    mode = {"copy": "download", "mount": "ro_mount"}.get(item.mode, "download" if item.file else "ro_mount")
    registered = _REGISTERED.match(path)
    kind = "uri_file" if item.file else "uri_folder"
    return {"type": kind, "mode": mode, "path": path if item.file or registered else f"{path}/"}


def _limits(planned: Planned) -> int:
    """Return the hard limit in seconds of running time."""
    settings, job = planned.settings, planned.job
    if job.max_runtime < TIMEOUT:
        raise UnsupportedError(NAME, "max_runtime", f"a job's time limit is at least {TIMEOUT} s")
    low = _tier(settings, job) == "spot"
    if job.max_runtime > (longest := LONGEST_LOW if low else LONGEST):
        where, days = " on low-priority machines" if low else "", longest // 86400
        why = f"Azure ML ends a job{where} after {days} days"
        raise UnsupportedError(NAME, "max_runtime", why, hint=f"add --max-runtime {days}d, or less")

    def names(at: int) -> list[str]:
        return [_machine(settings, job, at)[0] or settings.compute]

    return planned.limit(names, least=TIMEOUT, held=job.keep_warm or 0)


def _tags(settings: Settings, job: Job, layout: Layout, attempt: int) -> dict[str, str]:
    check_tags(job.tags, reserved=("cloudtrain.",), most=TAG_COUNT)
    for key, value in job.tags.items():
        if not TAG_KEY.fullmatch(key):
            raise SpecError("a tag's name has 512 characters at most, and none of < > % & \\ ? /", field=f"tags.{key}")
        if len(value) > TAG_VALUE:
            raise SpecError(f"has {len(value)} characters, at most {TAG_VALUE}", field=f"tags.{key}")
    own = zip(TAGS, (run_tag(layout.run), layout.run_id, str(attempt), job.name), strict=True)
    origin = {TAG_REVISION: layout.origin.get("revision", "")[:TAG_VALUE], TAG_CI: _page(layout.origin)}
    gpu = {TAG_GPU: job.resources.gpu[0]} if settings.compute and job.resources.gpu else {}
    return {**dict(own), **{key: text for key, text in origin.items() if text}, **dict(sorted(job.tags.items())), **gpu}


def _page(origin: Mapping[str, str]) -> str:
    """Return the CI run's page, or its number if the page is too long for a tag's value."""
    page = origin.get("ci_url", "")
    return page if page and len(page) <= TAG_VALUE else origin.get("ci_run", "")[:TAG_VALUE]


def _switches(settings: Settings, job: Job, notes: list[str]) -> Iterator[tuple[str, Any]]:
    if settings.compute:
        yield "compute", f"azureml:{settings.compute}"
        if job.resources.gpu:
            notes.append(f"resources.gpu: cluster {settings.compute} decides on the machine; it says the ranks a node")
        elif not job.resources.nproc_per_node:
            how = "say gpu, or nproc_per_node, for one a GPU"
            notes.append(f"each node of cluster {settings.compute} gets one rank, also if it has several GPUs; {how}")
    if job.resources.instance_count > 1:
        yield "distribution", {"type": "pytorch", "process_count_per_instance": 1}
        if job.resources.instance_count > MOST_NODES:
            notes.append(f"Azure ML limits a job of several nodes to {MOST_NODES} nodes; ask its support for more")
    tier = _tier(settings, job)
    if tier == "spot":
        who = "a waiting client or cloudtrain reconcile starts the next attempt" if job.retries else "set retries"
        notes.append(f"spot: a machine that is taken back may fail the job rather than restart it; {who}")
    queue = {name: value for name, value in (("job_tier", tier), ("priority", settings.priority)) if value}
    if queue:
        yield "queue_settings", queue
    if job.secrets and not settings.identity and not settings.compute:
        why = 'the workspace\'s own, such as identity = "managed_identity"'
        notes.append(f"secrets: a serverless job has no managed identity unless azureml.identity names one; {why}")
    if job.keep_warm:
        yield "properties", {KEEP_WARM: str(job.keep_warm)}
        what = f"cluster {settings.compute} must keep idle machines for {duration(job.keep_warm)}, paid for"
        notes.append(f"keep_warm: {what}; submit and doctor check that")
    if job.interactive:
        if not settings.ssh_public_key:
            hint = "set it to the text of your public key: cat ~/.ssh/id_ed25519.pub"
            raise SpecError("is not set, and interactive needs it", field=f"{NAME}.ssh_public_key", hint=hint)
        every = {"nodes": "all"} if job.resources.instance_count > 1 else {}
        yield "services", {SSH: {"type": "ssh", **every, "ssh_public_keys": settings.ssh_public_key}}
    if settings.identity:
        kind, _, client = settings.identity.partition(":")
        yield "identity", {"type": kind, **({"client_id": client} if client else {})}


def _tier(settings: Settings, job: Job) -> str:
    """Return the tier of serverless machines, empty for Azure ML's own default."""
    if job.resources.spot and settings.job_tier not in ("", "spot"):
        why = f"is {settings.job_tier}, and the job asks for spot machines"
        raise SpecError(why, field="azureml.job_tier", hint="remove job_tier from the settings, or spot from the job")
    return "spot" if job.resources.spot else settings.job_tier
