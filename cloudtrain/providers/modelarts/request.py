"""Make the body of a training job, as ModelArts' API takes it. Pure: no network, no credentials, no SDK."""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ...errors import SpecError, UnsupportedError
from ...job.job import run_tag
from ...provider_api import catalog
from ...provider_api.protocol import NO_SMI, Layout, Request, check_inputs, python_command
from ...validate import texts_of, url_scheme
from .._cloud import Planned, digest_of, path_words, pinned_machine
from . import NAME, Provider
from .node import CLOCK_PATH, DEVICE_PATH, JOIN_TIMEOUT, KEY_PATH, LIMIT_PATH, MOUNT, NFS, SECRETS
from .validate import DESCRIPTION, check_body

if TYPE_CHECKING:
    from ...job.job import Gpu, Job
    from ...provider_api.catalog import Machine
    from ...provider_api.protocol import LayoutInput
    from . import Settings

NAME_LENGTH = 64
RETRY_NUM = "fault-tolerance/job-retry-num"
"""The annotation with the number of ModelArts' own restarts after a fault of machines."""
OWNED = {
    "": "kind tasks train_type ftjob_config endpoints",
    "metadata.": "name workspace_id description",
    "metadata.annotations.": f"{RETRY_NUM} fault-tolerance/job-unconditional-retry fault-tolerance/pod-retry-num"
    " fault-tolerance/hang-retry",
    "algorithm.": "id subscription_id item_version_id code_dir boot_file command parameters inputs outputs working_dir"
    " local_code_dir",
    "algorithm.engine.": "engine_id engine_name engine_version image_url image_repo_id",
    "spec.": "resource volumes log_export_path auto_stop schedule_policy",
}
"""Fields that `options` cannot change: another field or setting sets them, or the run relies on them."""
POOL_FLAVORS: Mapping[int, str] = {
    1: "modelarts.pool.visual.xlarge",
    2: "modelarts.pool.visual.2xlarge",
    4: "modelarts.pool.visual.4xlarge",
    8: "modelarts.pool.visual.8xlarge",
    16: "modelarts.pool.visual.16xlarge",
}
"""Flavors of a dedicated pool, by the cards of a node: the SDK's remark on flavor_id. The pool decides which card."""
POOL = "pool"
"""Name in ``prices`` of a node of a dedicated pool without cards, which has no flavor."""
FIRST = "modelarts.vm.cpu.2u"
CPU_FAMILIES = ("modelarts.vm.cpu.",)
FORM = re.compile(r"modelarts\.[a-z0-9]+(\.[A-Za-z0-9_-]+)+")
NPU = re.compile(r"ASCEND|NPU|SNT", re.IGNORECASE)
TOOLKIT = "/usr/local/Ascend/ascend-toolkit/set_env.sh"
"""Script of an image for Ascend that sets the paths of its libraries; Huawei's own images have run it already."""
_HOST = re.compile(r"swr\.(?P<region>[a-z0-9-]+)\.myhuaweicloud\.(com|cn)/")
_IMAGE = re.compile(r"[a-z0-9][a-z0-9_-]*/[a-z0-9][a-z0-9_./-]*(:[\w.-]+|@sha256:[0-9a-f]{64})?")
_FORBIDDEN = re.compile(r"[\x00-\x1f\x7f?#*\[\]$]")
"""Characters that the path of a mounted bucket cannot contain, or that ModelArts refuses."""
_BUCKET = re.compile(r"obs://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/.*)?", re.DOTALL)


# ------------------------------------------------------------------------------------------------------------- settings


def checked(settings: Settings) -> Settings:
    """Return ``settings``, checked. Raises `SpecError`."""
    forms = {"region": r"[a-z]+-[a-z]+-\d+", "project_id": r"[0-9a-f]{32}", "workspace_id": r"0|[\w-]{1,64}"}
    forms |= {"pool_id": r"[\w-]*", "image_repo_id": r"[\w-]*"}
    hints = {"region": "write one region, such as cn-north-4", "project_id": "write its 32 hex digits"}
    for name, form in forms.items():
        value = getattr(settings, name)
        if not isinstance(value, str) or (value and not re.fullmatch(form, value)):
            raise SpecError(f"{value!r} is not in the right form", field=f"{NAME}.{name}", hint=hints.get(name, ""))
    if settings.priority and not settings.pool_id:
        hint = "set pool_id, or remove priority"
        raise SpecError("is for jobs in a dedicated pool", field=f"{NAME}.priority", hint=hint)
    flavors = settings.flavors
    if not isinstance(flavors, Mapping) or not all(isinstance(text, str) and text for text in flavors.values()):
        raise SpecError("must be a table of flavors by GPU", field=f"{NAME}.flavors", hint='"Ascend-910B:8" = "FLAVOR"')
    return dataclasses.replace(
        settings,
        flavors={_gpu_key(name): text for name, text in sorted(flavors.items())},
        ssh_key_pairs=texts_of(settings.ssh_key_pairs, f"{NAME}.ssh_key_pairs"),
    )


def _gpu_key(text: str) -> str:
    from ...job.job import Gpu

    return str(Gpu.parse(text, field=f"{NAME}.flavors"))


# ------------------------------------------------------------------------------------------------------------- the plan


def plan(planned: Planned) -> Request:
    """Return the request; see `cloudtrain.provider_api.protocol.Provider.plan`."""
    settings, job, layout, gpu = planned.settings, planned.job, planned.layout, planned.gpu
    _check_store(layout.store)
    check_inputs(Provider, layout.inputs)
    _refuse(settings, job)
    machine = _machine(settings, job, planned.gpu_index)
    seconds = planned.limit(lambda at: [_machine(settings, job, at).instance_type])
    npu = bool(NPU.search(gpu.name if gpu else f"{machine.gpu} {machine.instance_type}"))
    if npu and job.min_gpu_util:
        raise UnsupportedError(NAME, "min_gpu_util", NO_SMI, hint="leave min_gpu_util out")
    words = _words(planned, seconds=seconds, npu=npu)
    retries = {RETRY_NUM: str(settings.job_retry_num)} if settings.job_retry_num else {}
    body: dict[str, Any] = {
        "kind": "job",
        "metadata": {
            "name": "",
            "workspace_id": settings.workspace_id,
            "description": _description(job, layout),
            "annotations": retries,
        },
        "algorithm": {
            "engine": _engine(settings, str(job.image)),
            "command": shlex.join(_command(words, npu=npu)),
            **({"inputs": copies} if (copies := list(_copies(layout))) else {}),
            **({"environments": {SECRETS: ""}} if job.secrets else {}),
        },
        "spec": {
            "resource": _resource(settings, job, machine),
            "volumes": [*_volumes(settings, layout)],
            "log_export_path": {"obs_url": f"{layout.native}/"},
            "auto_stop": {"time_unit": "HOURS", "duration": auto_stop_hours(seconds)},
            **_policy(settings, job),
        },
        **({"endpoints": {"ssh": {"key_pair_names": [*settings.ssh_key_pairs]}}} if job.interactive else {}),
    }
    body = planned.with_options(body, OWNED)
    check_body(body)
    _mark(body, planned)
    if job.secrets:
        planned.notes.append(f"submit also puts the values of the secrets into {SECRETS}, sealed with the run's key")
    if npu:
        how = "the image needs torch_npu, and the script its device (--device npu of the entry points)"
        planned.notes.append(f"Ascend: {how}")
    operation = f"POST {settings.region} v2/{settings.project_id}/training-jobs"
    return planned.request(operation, body, machines=[machine.instance_type], known=machine)


def _mark(body: dict[str, Any], planned: Planned) -> None:
    """Set the job's name, and end its description with the digest of all else. A name need not be unique."""
    digest, tag, meta = digest_of(body), run_tag(planned.layout.run), body["metadata"]
    meta["description"] += f" request={digest}"
    tail = f"-{tag}-{planned.attempt}-{planned.gpu_index}-{digest}"
    meta["name"] = planned.name.partition(f"-{tag}")[0][: NAME_LENGTH - len(tail)].rstrip("-") + tail


def auto_stop_hours(seconds: float) -> int:
    """Return the hours after which ModelArts ends a job: behind the run's own limit, and its wait for all nodes."""
    return int(-(-(seconds + JOIN_TIMEOUT) // 3600))


def mark_of(name: str) -> str:
    """Return the part of a job's name that all requests of its run, attempt and GPU have in common."""
    return name.rpartition("-")[0]


def _description(job: Job, layout: Layout) -> str:
    """Return the description less its digest: the one place for tags, because a creation takes none."""
    origin = layout.origin
    own = {"run": run_tag(layout.run), "name": job.name, "cloudtrain-revision": origin.get("revision", "")[:19]}
    own |= {"cloudtrain-ci": "-".join(filter(None, (origin.get("ci"), origin.get("ci_run"))))[:40]}
    for key in job.tags:
        if key in own or key == "request":
            raise SpecError("cloudtrain itself uses this name", field=f"tags.{key}", hint="choose another name")
    own |= dict(sorted(job.tags.items()))
    text = " ".join(["cloudtrain", *(f"{key}={value}" for key, value in own.items() if value)])
    if len(text) > DESCRIPTION - 25:
        why = f"are part of the job's description, which holds {DESCRIPTION} characters"
        raise SpecError(why, field="tags", hint="use fewer or shorter tags")
    return text


def _check_store(store: str) -> None:
    if not _BUCKET.fullmatch(store):
        hint = 'add to cloudtrain.toml: store = "obs://BUCKET/PREFIX", a bucket in the job\'s region'
        raise UnsupportedError(NAME, "store", f"its nodes see OBS, not {store}", hint=hint)
    _check_url(store, "store")


def _check_url(url: str, field: str) -> None:
    if character := _FORBIDDEN.search(url):
        raise UnsupportedError(NAME, field, f"its URL contains {character[0]!r}", hint="rename the file or folder")


def _refuse(settings: Settings, job: Job) -> None:
    wanted = job.resources
    for field, value, why in (
        ("disk_gb", wanted.disk_gb, "a flavor decides the size of its local disk, /cache"),
        ("shm_gb", wanted.shm_gb, "no field of a training job sets the size of /dev/shm"),
    ):
        if value:
            raise UnsupportedError(NAME, f"resources.{field}", why, hint=f"leave {field} out")
    if wanted.spot and not settings.pool_id:
        hint = "leave spot out, or set pool_id: a job in a dedicated pool may be preemptible"
        raise UnsupportedError(NAME, "resources.spot", "its public pool has no spot machines", hint=hint)
    if job.interactive and not settings.ssh_key_pairs:
        hint = "set it to the names of key pairs: console, Elastic Cloud Server, Key Pairs"
        raise UnsupportedError(NAME, "interactive", f"{NAME}.ssh_key_pairs is not set", hint=hint)
    for name, item in job.inputs.items():
        if item.shard:
            why, hint = "every node sees a whole input", "leave shard out, and let each rank pick its files"
            raise UnsupportedError(NAME, f"inputs.{name}.shard", why, hint=hint)
    for name, reference in job.secrets.items():
        if not reference.startswith("env:"):
            why = "its nodes fetch env:NAME only: they have no key for Huawei's own store of secrets"
            raise UnsupportedError(NAME, f"secrets.{name}", why)


# ------------------------------------------------------------------------------------------------------ parts of a body


def _machine(settings: Settings, job: Job, gpu_index: int) -> Machine:
    """Return the machine whose name is the flavor, or `POOL` for nodes of a pool without cards."""
    wanted = job.resources
    gpu = wanted.gpus[gpu_index] if wanted.gpu else None
    if wanted.instance_type:
        name, known = pinned_machine(NAME, job, gpu_index, form=FORM)
        return known or catalog.Machine(instance_type=name)
    if gpu is not None:
        name = settings.flavors.get(str(gpu), "")
        if not name and settings.pool_id:
            name = _pool_flavor(gpu)
        if name:
            return catalog.Machine(instance_type=name, gpu=gpu.name, gpu_count=gpu.count)
        return catalog.for_gpu(NAME, gpu, cpus=wanted.cpus, memory_gb=wanted.memory_gb)
    if settings.pool_id:
        return catalog.Machine(instance_type=POOL, vcpus=wanted.cpus)
    if wanted.cpus or wanted.memory_gb:
        return catalog.for_cpus(NAME, CPU_FAMILIES, cpus=wanted.cpus, memory_gb=wanted.memory_gb)
    return catalog.machine(NAME, FIRST) or catalog.Machine(instance_type=FIRST)


def _pool_flavor(gpu: Gpu) -> str:
    if gpu.count not in POOL_FLAVORS:
        known = ", ".join(map(str, POOL_FLAVORS))
        raise UnsupportedError(NAME, "resources.gpu", f"a node of a pool has {known} cards, not {gpu.count}")
    return POOL_FLAVORS[gpu.count]


def _resource(settings: Settings, job: Job, machine: Machine) -> dict[str, Any]:
    found: dict[str, Any] = {"node_count": job.resources.instance_count}
    if settings.pool_id:
        found["pool_id"] = settings.pool_id
    if machine.instance_type != POOL:
        return {**found, "flavor_id": machine.instance_type}
    own = {"cpu_core_num": job.resources.cpus, "mem_size": job.resources.memory_gb}
    if any(own.values()):
        found["main_container_customized_flavor"] = {name: value for name, value in own.items() if value}
    return found


def _policy(settings: Settings, job: Job) -> dict[str, Any]:
    own = {"priority": settings.priority or None, "preemptible": job.resources.spot or None}
    found = {name: value for name, value in own.items() if value is not None}
    return {"schedule_policy": found} if found else {}


def _engine(settings: Settings, image: str) -> dict[str, str]:
    """Return the engine: an image of SWR in the job's region, named without its host."""
    host = _HOST.match(image)
    if host and host["region"] != settings.region:
        why = f"it is in {host['region']}, and the jobs are in {settings.region}"
        raise UnsupportedError(NAME, "image", why, hint="push it to SWR in the region of the jobs")
    name = image[host.end() :] if host else image
    if not _IMAGE.fullmatch(name):
        hint = f"push it: docker push swr.{settings.region}.myhuaweicloud.com/ORGANIZATION/{image.rpartition('/')[2]}"
        raise UnsupportedError(NAME, "image", f"it pulls ORGANIZATION/NAME:TAG of SWR only, not {image}", hint=hint)
    return {"image_url": name, **({"image_repo_id": settings.image_repo_id} if settings.image_repo_id else {})}


def mounted(url: str) -> str:
    """Return a container's path of an obs:// URL."""
    return f"{MOUNT}/{url.removeprefix('obs://').rstrip('/')}"


def unmounted(path: str) -> str:
    """Return the URL of a path that `mounted` made."""
    return f"obs://{path.removeprefix(f'{MOUNT}/')}"


def _volumes(settings: Settings, layout: Layout) -> Iterator[dict[str, Any]]:
    """Yield the volumes: OBS folders, none of them inside another, and file systems."""
    wanted = {layout.store.rstrip("/"): "store"}
    for name, item in layout.inputs.items():
        if url_scheme(item.url) == "nfs":
            yield {"nfs": _file_system(settings, name, item.url)}
        elif item.mode != "copy":
            wanted.setdefault(item.url.rpartition("/")[0] if item.file else item.url.rstrip("/"), f"inputs.{name}")
    if layout.resume:
        if url_scheme(layout.resume) != "obs":
            raise UnsupportedError(NAME, "resume_from", f"its nodes see obs:// only, not {layout.resume}")
        wanted.setdefault(layout.resume.rstrip("/"), "resume_from")
    for url, field in wanted.items():
        _check_url(url, field)
        if not any(url.startswith(f"{other}/") for other in wanted):
            yield {"obs": {"obs_path": f"/{url.removeprefix('obs://')}", "local_path": mounted(url)}}


def _file_system(settings: Settings, name: str, url: str) -> dict[str, Any]:
    server, _, path = url.partition("://")[2].partition("/")
    if not server or not path:
        raise SpecError(f"{url!r} is not nfs://SERVER/PATH", field=f"inputs.{name}")
    if not settings.pool_id:
        why, hint = "is reached from a dedicated pool only", "set pool_id to a pool in the VPC of that file system"
        raise UnsupportedError(NAME, f"inputs.{name}", f"SFS Turbo {why}", hint=hint)
    return {"nfs_server_path": f"{server}:/{path.rstrip('/')}", "local_path": f"{NFS}/{name}", "read_only": True}


def _copies(layout: Layout) -> Iterator[dict[str, Any]]:
    """Yield the inputs that ModelArts downloads before a start, by a channel of its own."""
    for name, item in layout.inputs.items():
        if item.mode == "copy":
            if item.file or url_scheme(item.url) != "obs":
                why, hint = "only a folder of OBS is copied", "leave mode out: nodes read it where it is"
                raise UnsupportedError(NAME, f"inputs.{name}.mode", why, hint=hint)
            _check_url(item.url, f"inputs.{name}")
            remote = {"obs": {"obs_url": f"/{item.url.removeprefix('obs://').rstrip('/')}/"}}
            yield {"name": name, "access_method": "env", "local_dir": _copy_path(name), "remote": remote}


def _copy_path(name: str) -> str:
    return f"/home/ma-user/modelarts/inputs/{name}"


def _words(planned: Planned, *, seconds: int, npu: bool) -> list[str]:
    """Return the runtime's command line, without Python. ModelArts may append words, which ``--`` makes harmless."""
    layout, attempt = planned.layout, str(planned.attempt)
    paths = {"code": mounted(layout.code), "live": mounted(layout.live)}
    if layout.resume:
        paths["resume"] = mounted(layout.resume)
    for name, item in sorted(layout.inputs.items()):
        paths[f"file.{name}" if item.file else f"input.{name}"] = _input_path(name, item)
    paths[LIMIT_PATH] = str(seconds)
    paths[CLOCK_PATH] = f"{mounted(layout.native)}/{NAME}-{attempt}-{planned.gpu_index}/used"
    if npu:
        paths[DEVICE_PATH] = "npu"
    if planned.job.secrets:
        paths[KEY_PATH] = mounted(layout.key)
    words = [mounted(layout.runtime), "run", "--context", mounted(layout.context), "--attempt", attempt]
    return [*words, *path_words(paths), "--"]


def _input_path(name: str, item: LayoutInput) -> str:
    if url_scheme(item.url) == "nfs":
        return f"{NFS}/{name}"
    return _copy_path(name) if item.mode == "copy" else mounted(item.url)


def _command(words: list[str], *, npu: bool) -> list[str]:
    """Return the container's command, which ModelArts starts without a shell of its own."""
    shell, flag, script, *rest = python_command(words)
    if npu:  # the toolkit's script is one of bash
        shell, script = "/bin/bash", f"[ ! -f {TOOLKIT} ] || . {TOOLKIT}; {script}"
    return [shell, flag, script, *rest]


def words_of(body: Mapping[str, Any]) -> list[str]:
    """Return the words of a job's command, as ModelArts splits it; from an answer, too."""
    try:
        return shlex.split(str(body["algorithm"]["command"]))
    except (KeyError, TypeError, ValueError):
        return []
