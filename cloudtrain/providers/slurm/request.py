"""Make the batch script of a Job. Pure: no network, no credentials, no Slurm."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from ...errors import SpecError, UnsupportedError
from ...job.job import run_tag
from ...provider_api.protocol import Layout, Request, check_inputs
from ...validate import table_of, text_of, texts_of, url_scheme
from .._cloud import Planned, bucket_url, check_shared, check_tags, digest_of, shared_arguments, shared_path
from . import NAME, STORE, Provider
from .node import SECRETS_PATH
from .script import SRUN, script_of
from .validate import check_body, check_options

if TYPE_CHECKING:
    from ...job.job import Gpu, Job
    from . import Settings

_PASSED = ("partition", "account", "qos", "reservation", "nodelist", "exclude")
"""Settings that are options of sbatch as they are."""
_OURS = (
    *("job-name", "output", "error", "open-mode", "input", "chdir", "export", "export-file", "comment", "constraint"),
    *("nodes", "ntasks", "ntasks-per-node", "time", "time-min", "requeue", "signal", "gpus", "gpus-per-node"),
    *("gpus-per-task", "gres", "cpus-per-task", "mem", "tmp", *_PASSED),
)
OWNED = {"": "command script limit_s image container", "sbatch.": " ".join(_OURS)}
"""Fields that `options` cannot change: another field or setting sets them, or the run relies on them."""
COMMENT_BYTES = 1024
"""Most bytes of a job's comment: the man page of sbatch."""
LEAST_PART, NOTICE = 180, 60
"""Shortest ``max_time``, and seconds before the end of a part at which Slurm signals; it may signal 60 s early."""
_BAD_PATH = re.compile(r'[\x00-\x1f\x7f"\\%]')
"""Characters that a ``#SBATCH`` line, or Slurm's pattern of a log's name, would change."""


def checked(settings: Settings) -> Settings:
    """Return ``settings``, checked. Raises `SpecError`."""
    if settings.host.startswith("-"):
        raise SpecError(f"{settings.host!r} is not a host's name", field=f"{NAME}.host")
    text_of(settings.python, f"{NAME}.python")
    if 0 < settings.max_time < LEAST_PART:
        raise SpecError(f"must be at least {LEAST_PART} s, or 0", field=f"{NAME}.max_time")
    types = table_of(settings.gres_type, f"{NAME}.gres_type")
    texts_of(tuple(types.values()), f"{NAME}.gres_type", empty=True)
    check_options(settings.extra, f"{NAME}.extra", owned=_OURS)
    return dataclasses.replace(
        settings,
        setup=texts_of(settings.setup, f"{NAME}.setup", empty=True),
        extra=dict(settings.extra),
        gres_type=types,
        folder=settings.folder and _folder(settings.folder, f"{NAME}.folder"),
        mounts=dict(_mount(*pair, f"{NAME}.mounts") for pair in table_of(settings.mounts, f"{NAME}.mounts").items()),
    )


def _mount(url: str, folder: Any, table: str) -> tuple[str, str]:
    """Return a bucket's URL, or a folder's, and the nodes' folder that shows it, without slashes at their ends."""
    path, field = url.removeprefix("file://"), f"{table}.{url}"
    return f"file://{_folder(path, field)}" if path.startswith("/") else bucket_url(url, field), _folder(folder, field)


def _folder(path: Any, field: str) -> str:
    """Return an absolute path without a slash at its end; the root is empty."""
    if not isinstance(path, str) or not path.startswith("/") or _BAD_PATH.search(path):
        raise SpecError(f"{path!r} is not the path of a folder that Slurm can name", field=field)
    return path.rstrip("/")


def mounts(settings: Settings) -> Mapping[str, str]:
    """Return the nodes' folders by the URL that they show. Without the setting, nodes see this machine's paths."""
    return settings.mounts or {"file://": ""}


def node_path(settings: Settings, url: str, field: str) -> str:
    """Return the nodes' path of ``url``. Raises `UnsupportedError` for a URL that is on none of their mounts."""
    if (path := shared_path(mounts(settings), url)) is not None:
        if bad := _BAD_PATH.search(path):
            raise UnsupportedError(NAME, field, f"its path holds {bad[0]!r}: rename it")
        return path
    hint = f"choose {STORE.find}"
    if url_scheme(url) in Provider.schemes:
        place = url.removeprefix("file://") if url.startswith("file:") else "/".join(url.split("/")[:3])
        there = place if place.startswith("/") else "/mnt/bucket"
        hint = f'if the nodes have it mounted, say where: [{NAME}.mounts] "{place}" = "{there}"'
    raise UnsupportedError(NAME, field, f"its nodes do not see {url}", hint=hint)


def files_folder(settings: Settings, store: str, native: str) -> str:
    """Return the folder of a run's jobs for the files that Slurm itself writes: logs, secrets, marks.

    A mounted bucket cannot have it: files there are written once, and not appended to. ``native`` is that of a
    `Layout`.
    """
    if settings.folder:
        run = native.rpartition("/")[0]
        return f"{settings.folder}/{run.rpartition('/')[2]}-{run_tag(run)}"
    if url_scheme(store) == "file":
        return node_path(settings, native, "store")
    why = f"is not set: Slurm's logs cannot be in a bucket like {store}"
    raise SpecError(why, field=f"{NAME}.folder", hint='for example "/home/me/.cloudtrain": a folder that nodes share')


# ------------------------------------------------------------------------------------------------------------- the plan


def plan(planned: Planned) -> Request:
    """Return the request; see `cloudtrain.provider_api.protocol.Provider.plan`."""
    settings, job, layout = planned.settings, planned.job, planned.layout
    path = partial(node_path, settings)
    path(layout.store, "store")
    check_inputs(Provider, layout.inputs)
    _refuse(settings, job)
    planned = planned.on(settings.partition or "node")
    base = f"{files_folder(settings, layout.store, layout.native)}/{NAME}-{planned.attempt}-{planned.gpu_index}"
    words = shared_arguments(planned, path, {SECRETS_PATH: f"{base}/secrets"} if job.secrets else {})
    minutes, limit = _times(settings, planned.seconds)
    options = _options(planned, minutes=minutes, base=base)
    if minutes * 60 < planned.seconds:
        options["signal"] = f"TERM@{max(NOTICE, settings.stop_grace)}"
        planned.notes.append(f"a job has {minutes} min here (slurm.max_time), so Slurm runs this one in parts")
    if not (job.resources.cpus or settings.cpus_per_task or "exclusive" in settings.extra):
        planned.notes.append("the job asks for no cores, so Slurm's default holds, often 1 a node: set --cpus")
    body: dict[str, Any] = {"sbatch": options, "limit_s": planned.seconds, "command": [settings.python, *words]}
    body |= {"image": job.image} if job.image else {}
    body = planned.with_options(body, OWNED)
    check_body(body)
    # A run's id may return for another job after its records are gone, so the name has a digest of the request.
    body["sbatch"] = {"job-name": f"{planned.name}-{digest_of(body)}", **body["sbatch"]}
    srun, front = body["container"] = _container(settings, job, layout)
    parts = {"srun": shlex.join([*SRUN, *srun]), "command": shlex.join([*front, *body["command"]])}
    values = {
        "base": base,
        "live": path(layout.live, "store"),
        "limit": limit,
        "grace": settings.stop_grace,
        "k": planned.attempt,
    }
    script = script_of(body["sbatch"], {**parts, "setup": "\n".join(settings.setup)}, values)
    return planned.request("sbatch", {**body, "script": script})


def _refuse(settings: Settings, job: Job) -> None:
    spot = "a cluster sells no spot machines; set slurm.partition or slurm.qos to one that can be preempted"
    image = "its nodes run their own Python; set slurm.container to pyxis or apptainer"
    for field, given, why in (
        ("resources.shm_gb", job.resources.shm_gb, "a step of Slurm uses the machine's own /dev/shm"),
        ("resources.spot", job.resources.spot, spot),
        ("image", job.image and settings.container == "none", image),
    ):
        if given:
            raise UnsupportedError(NAME, field, why)
    if settings.container != "none" and not job.image:
        raise SpecError(f"is not set, and slurm.container is {settings.container}", field="image")
    how = "the value travels in a file that only you can read, in the run's folder"
    check_shared(NAME, job, where="in shared folders", secrets=how)


def _times(settings: Settings, seconds: int) -> tuple[int, int]:
    """Return the minutes of one start in Slurm, and the seconds of running time after which the script ends the job.

    Slurm counts each start by itself, so the script adds them up. It ends the job early enough for the grace.
    """
    if settings.max_time and seconds > settings.max_time:
        return settings.max_time // 60, seconds
    # A partition's limit is hours, and may be exactly the job's: only short jobs get the grace in addition.
    minutes = -(-(seconds + (settings.stop_grace if seconds < 3600 else 0)) // 60)
    return minutes, max(1, min(seconds, minutes * 60 - settings.stop_grace))


def _options(planned: Planned, *, minutes: int, base: str) -> dict[str, Any]:
    """Return the options of sbatch, by their long names."""
    settings, wanted = planned.settings, planned.job.resources
    options: dict[str, Any] = {
        "output": f"{base}/batch.log",
        "open-mode": "append",
        "export": "NONE",
        "requeue": True,
        "nodes": wanted.instance_count,
        "ntasks-per-node": 1,
        "time": minutes,
        "comment": _comment(planned.job, planned.layout),
        **{name: getattr(settings, name) for name in _PASSED},
        "constraint": "&".join(filter(None, (settings.constraint, wanted.instance_type))),
        "gpus-per-node": _gpus(settings, planned.gpu) if planned.gpu is not None else "",
        "cpus-per-task": wanted.cpus or settings.cpus_per_task,
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
    check_tags(job.tags, reserved=("cloudtrain.",), most=COMMENT_BYTES)
    page = layout.origin.get("ci_url") or layout.origin.get("ci_run", "")
    own = {"run": layout.run_id, "name": job.name, "revision": layout.origin.get("revision", ""), "ci": page}
    said = {f"cloudtrain.{name}": text for name, text in own.items() if text}
    text = json.dumps({**said, **dict(sorted(job.tags.items()))}, separators=(",", ":"))
    if len(text) > COMMENT_BYTES:
        raise SpecError(f"are {len(text)} bytes in a comment of Slurm, at most {COMMENT_BYTES}", field="tags")
    return text


def _container(settings: Settings, job: Job, layout: Layout) -> list[list[str]]:
    """Return the options of srun, and the words before the command, that start the job's image with the run's folders.

    Sources: NVIDIA's page on pyxis, and Apptainer's user guide. Neither was run with a real cluster.
    """
    if settings.container == "none":
        return [[], []]
    urls = [layout.store, *([layout.resume] if layout.resume else []), *(item.url for item in layout.inputs.values())]
    folders = {node_path(settings, url, "image") for url in urls} | ({settings.folder} - {""})
    for folder in sorted(folders):
        if re.search("[,:]", folder):
            raise UnsupportedError(NAME, "image", f"a container's mounts cannot name {folder}: rename it")
    bound = ",".join(f"{folder}:{folder}" for folder in sorted(folders))
    if settings.container == "pyxis":
        return [[f"--container-image={job.image}", f"--container-mounts={bound}", "--no-container-mount-home"], []]
    return [[], ["apptainer", "exec", *(["--nv"] if job.resources.gpu else []), "--bind", bound, str(job.image)]]
