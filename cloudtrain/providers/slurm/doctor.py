"""Check a cluster for ``doctor``: tools, partition, GPUs, the store's folder, the container runtime, the request.

Nothing is created. ``doctor --job`` looks at the store from a node.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ...errors import SpecError
from ...provider_api.checks import Check, ok, passed, skipped, tried
from .._cloud import check_gpus, check_request
from . import NAME
from .request import files_folder

if TYPE_CHECKING:
    from ...provider_api.protocol import Request
    from .api import Account

_SHOWN = ("KillWait", "MinJobAge", "PreemptMode", "PreemptType", "JobRequeue", "EnforcePartLimits", "SlurmdTimeout")
"""Values of ``scontrol show config`` that decide what a preempted or lost job has."""
_TOOLS = "sbatch --version; sacct -X -S now &>/dev/null && echo sacct answers || echo no sacct; scontrol show config"
_FOLDER = 'while [ ! -e "$folder" ]; do folder=$(dirname "$folder"); done; [ ! -w "$folder" ] || stat -fc %T "$folder"'
_RUNTIMES = {"pyxis": "srun --help | grep -e --container-image || true", "apptainer": "apptainer --version || true"}


def checks(account: Account, store: str, request: Request | None) -> Iterator[Check]:
    """Yield the checks of `doctor`."""
    if not (yield from passed(tried("slurm", lambda: _tools(account)))):
        return
    yield from tried("partition", lambda: _partition(account, request))
    yield from tried("gpus", lambda: check_gpus(account, none="there are none"))
    yield from tried("shared folder", lambda: _folder(account, store))
    yield from tried("container", lambda: _container(account))
    yield from tried("request", lambda: check_request(request, account.test))


def _tools(account: Account) -> Check:
    text = account.cluster.ask(_TOOLS, what="ask for Slurm's configuration")
    version, sacct, *_ = text.splitlines()
    known = dict(re.findall(r"^(\w+)\s*= (.*)$", text, re.MULTILINE))
    has = ", ".join(f"{name}={known[name].strip()}" for name in _SHOWN if name in known)
    return ok("slurm", f"{version} on {account.cluster.where}, as {account.principal()}; {sacct}; {has}")


def _partition(account: Account, request: Request | None) -> Check:
    """Check that the partition exists, or that the cluster has a default, and that the job's time limit fits."""
    text = account.cluster.ask("sinfo -h -o '%P|%a|%l|%D'", what="ask for the partitions")
    given = [line.split("|") for line in text.splitlines()]
    rows = {row[0].rstrip("*"): row for row in given}
    default = next((row[0].rstrip("*") for row in given if row[0].endswith("*")), "")
    chosen = [name for name in account.settings.partition.split(",") if name] or [default]
    if wrong := [name for name in chosen if name not in rows]:
        why = f"{wrong[0]!r} is no partition" if wrong[0] else "is not set, and there is no default"
        raise SpecError(why, field=f"{NAME}.partition", hint=f"choose one of: {', '.join(sorted(rows))}")
    is_sure = account.settings.partition and not account.settings.qos  # a QOS may allow more
    minutes = request.body["sbatch"]["time"] if request is not None and is_sure else 0
    if all(minutes > _minutes(rows[name][2]) for name in chosen):  # sbatch takes such a job, which then never starts
        limits = ", ".join(f"{name} allows {rows[name][2]}" for name in chosen)
        hint = f"lower --max-runtime, or set {NAME}.max_time to the partition's limit in seconds"
        raise SpecError(f"the job asks for {minutes} minutes, but {limits}", field=f"{NAME}.partition", hint=hint)
    said = [f"{name}: {rows[name][1]}, at most {rows[name][2]}, {rows[name][3]} nodes" for name in chosen]
    return ok("partition", "; ".join(said))


def _minutes(limit: str) -> float:
    """Return the minutes of sinfo's ``[[days-]hours:]minutes:seconds``; infinity for other words."""
    if not (found := re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", limit)):
        return float("inf")
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return (days * 24 + hours) * 60 + minutes + seconds / 60


def _folder(account: Account, store: str) -> Check:
    """Check that the folder for Slurm's files of a run can be made, where Slurm's tools run."""
    if not store:
        return skipped("shared folder", "there is no store")
    own, where = account.settings.folder, account.cluster.where
    path = own or files_folder(account.settings, store, store)
    if not (found := account.cluster.ask(_FOLDER, what="look at the folder", folder=path).strip()):
        field, hint = f"{NAME}.folder" if own else "store", "choose another folder"
        raise SpecError(f"{path} cannot be written on {where}", field=field, hint=hint)
    return ok("shared folder", f"{path} ({found}); doctor --job looks at the store from a node")


def _container(account: Account) -> Check:
    kind, where = account.settings.container, account.cluster.where
    if kind == "none":
        return skipped("container", "nodes run their own Python")
    if not account.cluster.ask(_RUNTIMES[kind], what="look for the container runtime"):
        raise SpecError(f"{where} has no {kind}", field=f"{NAME}.container", hint="ask your administrator")
    return ok("container", f"{where} has {kind}")
