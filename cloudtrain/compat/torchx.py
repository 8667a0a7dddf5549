"""The torchx scheduler ``cloudtrain``: ``torchx run -s cloudtrain`` sends an AppDef of one role as a cloudtrain job.

torchx finds `create_scheduler` by the entry point in the group ``torchx.schedulers``. Written for torchx 0.7. Its
status, log, cancel and list read the run, so that ``cloudtrain status`` and all other verbs work on it too.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from string import Template
from typing import Any
from urllib.parse import quote, unquote

from ..errors import CloudtrainError, NotFoundError, SpecError
from ..estimator import attach
from ..job.fields import slug
from ..job.job import Job, anchored
from ..runs.fallback import plan_with_fallbacks, submit_with_fallbacks
from ..runs.listing import list_page
from ..settings.settings import Settings
from ..validate import read_table

OPTIONS = {
    "provider": "where to run, such as sagemaker (default: the setting provider)",
    "profile": "profile of cloudtrain.toml",
    "gpu": "kind of GPU, such as A100-80GB; the role has the number",
    "instance_type": "the platform's own name of a machine",
    "job": "job.toml with fields that torchx lacks: inputs, max_runtime, max_cost, checkpoint_paths",
}
"""The options of ``-cfg`` and their help."""
_IGNORED = {"rdzv_backend", "rdzv_endpoint", "rdzv_id", "nnodes", "nproc_per_node", "tee", "role", "node_rank"}
"""Options of torchrun that cloudtrain sets itself, or that the role has too."""
_INSTANCE_TYPE = "node.kubernetes.io/instance-type"
"""Capability in which torchx's named resources have the type of an AWS machine."""


def create_scheduler(session_name: str, **parameters: object) -> Any:
    """Return the scheduler of this session. torchx calls this; ``parameters`` are those of its other schedulers."""
    from torchx.schedulers.api import Scheduler

    # The class is made here: nothing in this package imports torchx where it is not installed.
    return type("CloudtrainScheduler", (_Scheduler, Scheduler), {})("cloudtrain", session_name)


def job_of(app: Any, cfg: Mapping[str, Any], provider: str) -> Job:
    """Return the Job of the AppDef ``app`` for ``provider``; ``cfg`` has values of `OPTIONS`.

    Raises `SpecError` for what one script on equal nodes cannot be: several roles, mounts.
    """
    import torchx

    if len(app.roles) != 1:
        raise SpecError(f"{len(app.roles)} roles; a job is one script on equal nodes", field="roles")
    role = app.roles[0]
    if role.mounts:
        raise SpecError("no counterpart", field="mounts", hint="put inputs into a job file: -cfg job=job.toml")
    file = cfg.get("job")
    base = anchored(read_table(Path(file), shown=file, field="job"), Path(file).parent) if file else {}
    fields = {
        "name": slug(app.name),
        "instance_count": f"{role.min_replicas or role.num_replicas}:{role.num_replicas}",
        "retries": role.max_retries,
        "env": {**base.get("env", {}), **{name: _filled(text) for name, text in role.env.items()}},
        **_program(role),
        **_machine(role.resource, cfg, provider),
    }
    if role.image not in ("", torchx.IMAGE):  # torchx's components name their own image if the user names none
        fields["image"] = role.image
    return Job.from_dict({**base, **fields})


def _program(role: Any) -> dict[str, Any]:
    """Return the fields of the role's program: of torchrun in ``sh -c`` (``dist.ddp``), of Python, or any command."""
    words = [role.entrypoint, *role.args]
    if words[:2] in (["bash", "-c"], ["sh", "-c"]) and len(words) == 3 and words[2].startswith("torchrun "):
        words = shlex.split(words[2])
    if words[0] == "torchrun":
        options, rest = dict[str, str](), words[1:]
        while rest and rest[0].startswith("--"):
            name, equals, value = rest[0][2:].partition("=")
            options[name.replace("-", "_")] = value if equals else "".join(rest[1:2])
            rest = rest[1 if equals else 2 :]
        if unknown := sorted(set(options) - _IGNORED):
            raise SpecError(f"torchrun's --{unknown[0]} has no counterpart", field="args")
        return {"launcher": "torchrun", "nproc_per_node": int(options.get("nproc_per_node", 1)), **_script(rest)}
    if words[0] in ("python", "python3") and (words[1:2] == ["-m"] or "".join(words[1:2]).endswith(".py")):
        return {"launcher": "python", **_script(words[1:])}
    return {"launcher": "command", "args": [_filled(word) for word in words]}


def _script(words: list[str]) -> dict[str, Any]:
    count = 2 if words[:1] == ["-m"] else 1
    return {"entry_point": " ".join(words[:count]), "args": [_filled(word) for word in words[count:]]}


def _filled(text: str) -> str:
    """Return ``text`` with torchx's macro of the id as cloudtrain's placeholder. Raises `SpecError` for others."""
    filled = Template(text).safe_substitute(app_id="{run_id}")
    if found := re.search(r"\$\{(replica_id|img_root|base_img_root|rank0_env)\}", text):
        how = "read torchrun's own variables, such as GROUP_RANK, in the script"
        raise SpecError(f"the macro {found[0]} has no counterpart", field="args", hint=how)
    return filled


def _machine(resource: Any, cfg: Mapping[str, Any], provider: str) -> dict[str, Any]:
    """Return the fields of the machine. A role has a number of GPUs and no kind; AWS's named resources have a type."""
    kind, own, named = cfg.get("gpu"), cfg.get("instance_type"), resource.capabilities.get(_INSTANCE_TYPE)
    if named and provider == "sagemaker" and not kind:
        own = own or f"ml.{named}"
    if kind and resource.gpu < 1:
        raise SpecError("the role asks for no GPU", field="gpu", hint="give the number to the component: --gpu 8")
    if resource.gpu > 0 and not kind and not own:
        how = "name it: -cfg gpu=A100-80GB"
        raise SpecError(f"the role asks for {resource.gpu} GPUs of no kind", field="gpu", hint=how)
    machine = {"instance_type": own} if own else {}
    if kind:
        machine["gpu"] = f"{kind}:{resource.gpu}"
    if machine or provider == "local":  # torchx's components always name a size, and processes here share the machine
        return machine
    size = {"cpus": resource.cpu, "memory_gb": -(-resource.memMB * 2**20 // 10**9)}
    return {name: count for name, count in size.items() if count > 0}


class _Scheduler:
    """The methods of torchx's Scheduler, on the runs of the settings of the current folder."""

    def _run_opts(self) -> Any:
        from torchx.specs import runopts

        found = runopts()
        for name, text in OPTIONS.items():
            found.add(name, type_=str, default=None, help=text)
        return found

    def _submit_dryrun(self, app: Any, cfg: Mapping[str, Any]) -> Any:
        from torchx.specs import AppDryRunInfo

        settings = Settings.load(provider=cfg.get("provider"), profile=cfg.get("profile"))
        job = job_of(app, cfg, settings.provider)
        return AppDryRunInfo(plan_with_fallbacks(job, settings=settings, cwd=Path.cwd()), str)

    def schedule(self, dryrun_info: Any) -> str:
        """Send the plan, and return the run id, or the run's URL, quoted, if it is not in the default store."""
        run = submit_with_fallbacks(dryrun_info.request, environ=os.environ)
        with contextlib.suppress(CloudtrainError):
            if attach(run.run_id).url == run.url:
                return run.run_id
        return quote(run.url, safe="")

    def describe(self, app_id: str) -> Any:
        """Return the state of the run, its reason and its nodes; None if there is no such run."""
        from torchx.schedulers.api import DescribeAppResponse
        from torchx.specs import ReplicaStatus, Role, RoleStatus

        try:
            run = attach(unquote(app_id))
            result, job = run.result(), run.job
        except NotFoundError:
            return None
        state, count = _state(result["state"]), job.resources.instance_count
        # torchx's components name a role after the script, the module or the program.
        name = (job.source.module or "").rpartition(".")[2] or Path(job.source.entry_point or job.args[0]).stem
        nodes = [ReplicaStatus(id=node, state=state, role=name, hostname="") for node in range(count)]
        return DescribeAppResponse(
            app_id=app_id,
            state=state,
            num_restarts=max(0, len(result["attempts"]) - 1),
            msg=result.get("reason") or "",
            roles=[Role(name=name, image=job.image or "", num_replicas=count)],
            roles_statuses=[RoleStatus(role=name, replicas=nodes)],
        )

    def list(self) -> Any:
        """Return the newest runs of the default store."""
        from torchx.schedulers.api import ListAppResponse

        settings = Settings.load()
        rows = list_page(settings.resolved(), settings).rows
        return [ListAppResponse(app_id=row["run_id"], state=_state(row["state"])) for row in rows]

    def _cancel_existing(self, app_id: str) -> None:
        attach(unquote(app_id)).cancel()

    def log_iter(
        self,
        app_id: str,
        role_name: str,
        k: int = 0,
        regex: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        should_tail: bool = False,
        streams: Any = None,
    ) -> Iterator[str]:
        """Return the lines of node ``k``. Raises `ValueError` for one of the streams: a run has them combined."""
        if streams not in (None, "combined"):
            raise ValueError("a run has the streams combined")
        pattern, end = re.compile(regex or ""), until.timestamp() if until else float("inf")
        lines = attach(unquote(app_id)).logs(follow=should_tail, node=k, since=since)
        return (f"{line.text}\n" for line in lines if pattern.search(line.text) and (line.time or 0) <= end)


def _state(state: str) -> Any:
    from torchx.specs import AppState

    return AppState.__members__.get(state.upper(), AppState.UNKNOWN)
