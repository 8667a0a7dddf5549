"""Make the batch script of a Job. Pure: no network, no credentials, no Slurm."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ...errors import SpecError, UnsupportedError
from ...job.job import job_name
from ...job.options import merge_options
from ...provider_api.limits import checked_prices, hard_limit
from ...provider_api.protocol import Layout, Request, check_inputs, check_needs, context_of
from ...validate import choice_of, url_scheme
from .._cloud import check_env_secrets, digest_of
from . import NAME, Provider
from .node import GRACE_PATH, SECRETS_PATH
from .script import Batch, script_of
from .validate import check_body, check_options

if TYPE_CHECKING:
    from ...job.job import Gpu, Job
    from . import Settings

__all__ = ["OWNED", "checked", "plan"]

CONTAINERS = ("none", "pyxis", "apptainer")
_TEXTS = ("host", "partition", "account", "qos", "constraint", "reservation", "nodelist", "exclude", "mem", "python")
_PASSED = ("partition", "account", "qos", "reservation", "nodelist", "exclude")
"""Settings that are options of sbatch as they are."""
_OURS = (
    *("job-name", "output", "error", "open-mode", "input", "chdir", "export", "export-file", "comment", "constraint"),
    *("nodes", "ntasks", "ntasks-per-node", "time", "time-min", "requeue", "signal", "gpus", "gpus-per-node"),
    *("gpus-per-task", "gres", "cpus-per-task", "mem", "tmp", *_PASSED),
)
OWNED = ("command", "script", "limit_s", "image", *(f"sbatch.{name}" for name in _OURS))
"""Fields that `options` cannot change: another field or setting sets them, or the run relies on them."""
COMMENT_BYTES = 1024
"""Most bytes of a job's comment: the man page of sbatch."""
LEAST_PART, NOTICE = 180, 60
"""Shortest ``max_time``, and seconds before the end of a part at which Slurm signals; it may signal 60 s early."""
_BAD_PATH = re.compile(r'[\x00-\x1f\x7f"\\%]')
"""Characters that a ``#SBATCH`` line, or Slurm's pattern of a log's name, would change."""


def checked(settings: Settings) -> Settings:
    """Return ``settings``, checked. Raises `SpecError`."""
    for name in _TEXTS:
        value = getattr(settings, name)
        if not isinstance(value, str) or re.search(r"[\x00-\x1f\x7f]", value):
            raise SpecError(f"must be one line of text, not {value!r}", field=f"{NAME}.{name}")
    if settings.host.startswith("-"):
        raise SpecError(f"{settings.host!r} is not a host's name", field=f"{NAME}.host")
    if not settings.python:
        raise SpecError("is empty", field=f"{NAME}.python")
    choice_of(settings.container, CONTAINERS, f"{NAME}.container")
    for name, least in (("cpus_per_task", 0), ("max_time", 0), ("stop_grace", 2)):
        number = getattr(settings, name)
        if isinstance(number, bool) or not isinstance(number, int) or number < least:
            raise SpecError(f"must be a whole number, at least {least}", field=f"{NAME}.{name}")
    if 0 < settings.max_time < LEAST_PART:
        raise SpecError(f"must be at least {LEAST_PART} s, or 0", field=f"{NAME}.max_time")
    types = settings.gres_type
    if not isinstance(types, Mapping) or not all(isinstance(item, str) for pair in types.items() for item in pair):
        raise SpecError("must be a table of types by the GPU's name", field=f"{NAME}.gres_type")
    if isinstance(settings.setup, str) or not all(isinstance(line, str) for line in settings.setup):
        raise SpecError("must be a list of lines", field=f"{NAME}.setup")
    check_options(settings.extra, f"{NAME}.extra")
    for name in settings.extra:
        if name in _OURS:
            raise SpecError("a job's field or another setting sets it", field=f"{NAME}.extra.{name}")
    return dataclasses.replace(
        settings,
        setup=tuple(settings.setup),
        extra=dict(settings.extra),
        gres_type=dict(types),
        prices=checked_prices(settings.prices, NAME),
    )


def _path(url: str, field: str) -> str:
    """Return the path of a ``file`` URL. Raises `UnsupportedError` for any other."""
    if url_scheme(url) != "file":
        hint = "choose a folder that every node and this machine see, like /shared/cloudtrain"
        raise UnsupportedError(NAME, field, f"its nodes see shared folders, not {url}", hint=hint)
    path = url.removeprefix("file://")
    if bad := _BAD_PATH.search(path):
        raise UnsupportedError(NAME, field, f"its path holds {bad[0]!r}: rename it")
    return path


# ------------------------------------------------------------------------------------------------------------- the plan


def plan(settings: Settings, job: Job, layout: Layout, *, attempt: int, gpu_index: int) -> Request:
    """Return the request; see `cloudtrain.provider_api.protocol.Provider.plan`."""
    check_needs(Provider, settings, job)
    store = _path(layout.store, "store")
    check_inputs(Provider, layout.inputs)
    _refuse(settings, job)
    gpu = job.resources.gpus[gpu_index] if job.resources.gpu else None
    name = settings.partition or "node"
    seconds, notes = hard_limit(job, NAME, lambda _: [name], gpu_index=gpu_index, own=settings.prices)
    base = f"{_path(layout.native, 'store')}/{NAME}-{attempt}-{gpu_index}"
    words, folders = _arguments(settings, job, layout, attempt, base)
    minutes, limit = _times(settings, seconds)
    options = _options(settings, job, layout, gpu, minutes=minutes, base=base)
    if minutes * 60 < seconds:
        options["signal"] = f"TERM@{max(NOTICE, settings.stop_grace)}"
        notes.append(f"a job has {minutes} min here (slurm.max_time), so Slurm runs this one in parts")
    if not (job.resources.cpus or settings.cpus_per_task or "exclusive" in settings.extra):
        notes.append("the job asks for no cores, so Slurm's default holds, often 1 a node: set --cpus")
    body: dict[str, Any] = {"sbatch": options, "limit_s": seconds, "command": [settings.python, *words]}
    if job.image:
        body["image"] = job.image
    body = merge_options(body, job.options.get(NAME, {}), owned=OWNED, provider=NAME)
    check_body(body)
    # A run's id may return for another job after its records are gone, so the name has a digest of the request.
    unique = f"{job_name(layout.run, attempt, gpu_index)}-{digest_of(body)[:16]}"
    body["sbatch"] = {"job-name": unique, **body["sbatch"]}
    srun, front = _container(settings, job, {store, *folders})
    batch = Batch(
        sbatch=body["sbatch"],
        srun=["--kill-on-bad-exit=0", "--wait=600", "--mpi=none", "--export=ALL", "--open-mode=append", *srun],
        command=[*front, *body["command"]],
        base=base,
        live=_path(layout.live, "store"),
        attempt=attempt,
        limit=limit,
        grace=settings.stop_grace,
        setup=settings.setup,
    )
    return Request(
        provider=NAME,
        operation="sbatch",
        body={**body, "script": script_of(batch)},
        context=context_of(NAME, job, layout, processes=job.resources.processes(gpu_index)),
        run=layout.run,
        attempt=attempt,
        gpu_index=gpu_index,
        instance_types=(name,) if settings.prices else (),
        notes=tuple(notes),
    )


def _refuse(settings: Settings, job: Job) -> None:
    if job.resources.shm_gb:
        raise UnsupportedError(NAME, "resources.shm_gb", "a step of Slurm uses the machine's own /dev/shm")
    if job.resources.spot:
        why = "a cluster sells no spot machines; set slurm.partition or slurm.qos to one that can be preempted"
        raise UnsupportedError(NAME, "resources.spot", why)
    if job.image and settings.container == "none":
        why = "its nodes run their own Python; set slurm.container to pyxis or apptainer"
        raise UnsupportedError(NAME, "image", why)
    if settings.container != "none" and not job.image:
        raise SpecError(f"is not set, and slurm.container is {settings.container}", field="image")
    for name, item in job.inputs.items():
        if item.shard:
            raise UnsupportedError(NAME, f"inputs.{name}.shard", "every node sees a whole input")
        if item.mode == "copy":
            raise UnsupportedError(NAME, f"inputs.{name}.mode", "nodes read inputs where they are, in shared folders")
    check_env_secrets(
        NAME, job, known="env:NAME only: the value travels in a file that only you can read, in the run's folder"
    )


def _times(settings: Settings, seconds: int) -> tuple[int, int]:
    """Return the minutes of one start in Slurm, and the seconds of running time after which the script ends the job.

    Slurm counts each start by itself, so the script adds them up. It ends the job early enough for the grace.
    """
    minutes, grace = -(-seconds // 60), settings.stop_grace
    if settings.max_time and seconds > settings.max_time:
        return settings.max_time // 60, seconds
    if seconds < 3600:  # a partition's limit is hours, and may be exactly the job's
        minutes = -(-(seconds + grace) // 60)
    return minutes, max(1, min(seconds, minutes * 60 - grace))


def _options(
    settings: Settings, job: Job, layout: Layout, gpu: Gpu | None, *, minutes: int, base: str
) -> dict[str, Any]:
    """Return the options of sbatch, by their long names."""
    wanted = job.resources
    features = "&".join(filter(None, (settings.constraint, wanted.instance_type)))
    cores = wanted.cpus or settings.cpus_per_task
    options: dict[str, Any] = {
        "output": f"{base}/batch.log",
        "open-mode": "append",
        "export": "NONE",
        "requeue": True,
        "nodes": wanted.instance_count,
        "ntasks-per-node": 1,
        "time": minutes,
        "comment": _comment(job, layout),
        **{name: getattr(settings, name) for name in _PASSED},
        "constraint": features,
        "gpus-per-node": _gpus(settings, gpu) if gpu is not None else "",
        "cpus-per-task": cores,
        "mem": f"{wanted.memory_gb}G" if wanted.memory_gb else settings.mem,
        "tmp": f"{wanted.disk_gb}G" if wanted.disk_gb else "",
        **settings.extra,
    }
    return {name: value for name, value in options.items() if value not in ("", 0)}


def _gpus(settings: Settings, gpu: Gpu) -> str:
    """Return ``type:count``. The type is the setting's, else the GPU's name in lower case."""
    name = str(gpu).rpartition(":")[0] or str(gpu)
    known = settings.gres_type.get(name, settings.gres_type.get(gpu.name, name.lower()))
    return f"{known}:{gpu.count}" if known else str(gpu.count)


def _comment(job: Job, layout: Layout) -> str:
    """Return the tags, the run and its origin as JSON, which ``squeue -o %k`` shows."""
    for key in job.tags:
        if key.startswith("cloudtrain."):
            raise SpecError("tags that begin with cloudtrain. are not yours to set", field=f"tags.{key}")
    page = layout.origin.get("ci_url") or layout.origin.get("ci_run", "")
    own = {"run": layout.run_id, "name": job.name, "revision": layout.origin.get("revision", ""), "ci": page}
    said = {f"cloudtrain.{name}": text for name, text in own.items() if text}
    text = json.dumps({**said, **dict(sorted(job.tags.items()))}, separators=(",", ":"))
    if len(text) > COMMENT_BYTES:
        raise SpecError(f"are {len(text)} bytes in a comment of Slurm, at most {COMMENT_BYTES}", field="tags")
    return text


def _arguments(settings: Settings, job: Job, layout: Layout, attempt: int, base: str) -> tuple[list[str], list[str]]:
    """Return the runtime's arguments, and the folders outside of the store that they name."""
    paths = {"code": layout.code, "live": layout.live, "direct": layout.direct}
    paths = {name: _path(url, "store") for name, url in paths.items()}
    outside = []
    if layout.resume:
        paths["resume"] = _path(layout.resume, "resume_from")
        outside.append(paths["resume"])
    for name, item in sorted(layout.inputs.items()):
        path = _path(item.url, f"inputs.{name}")
        paths[f"file.{name}" if item.file else f"input.{name}"] = path
        outside.append(path)
    paths[GRACE_PATH] = str(settings.stop_grace)
    if job.secrets:
        paths[SECRETS_PATH] = f"{base}/secrets"
    words = [_path(layout.runtime, "store"), "run", "--context", _path(layout.context, "store")]
    words += ["--attempt", str(attempt)]
    return words + [word for name, path in paths.items() for word in ("--path", f"{name}={path}")], outside


def _container(settings: Settings, job: Job, folders: set[str]) -> tuple[list[str], list[str]]:
    """Return the options of srun and the words before the command that start the job's image, with ``folders`` in it.

    Sources: NVIDIA's page on pyxis, and Apptainer's user guide. Neither was run with a real cluster.
    """
    if settings.container == "none":
        return [], []
    for folder in sorted(folders):
        if re.search("[,:]", folder):
            raise UnsupportedError(NAME, "image", f"a container's mounts cannot name {folder}: rename it")
    mounts = ",".join(f"{folder}:{folder}" for folder in sorted(folders))
    if settings.container == "pyxis":
        return [f"--container-image={job.image}", f"--container-mounts={mounts}", "--no-container-mount-home"], []
    gpu = ["--nv"] if job.resources.gpu else []
    return [], ["apptainer", "exec", *gpu, "--bind", mounts, str(job.image)]
