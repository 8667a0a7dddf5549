"""Submit, find, describe and cancel jobs by Slurm's command line tools, here or on a login node by ``ssh``.

Each call is one script of bash. Submission needs no id of a request: a job is first held, then looked up by its name.
The lowest id of that name is the run's job, and only that one is released. One controller gives the ids in order, so no
client can see another lowest one.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from ... import errors
from ...provider_api.protocol import NativeObject, Request, Shell, shell_arguments
from .._cloud import one_line
from . import NAME

if TYPE_CHECKING:
    from ...provider_api.catalog import Machine
    from . import Settings

__all__ = ["FINAL", "HELP", "Account", "Job", "cluster_of", "error_of", "job_of"]

FINAL = frozenset(
    ("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT")
)
"""States of a job that Slurm has ended, unless it is to start again: the man page of squeue."""
HELP: Mapping[str, str] = {
    "none": "run this on a login node, or set slurm.host to one that ssh reaches",
    "ssh": "test the connection first: ssh HOST true",
    "auth": "ask your administrator: the daemon munged of this machine does not work",
    "quota": "sacctmgr show assoc user=$USER lists the limits",
}
SQUEUE_S = 5.0
"""Shortest time in seconds between two squeue calls of one client, for all of its runs."""
TIMEOUT = 120.0
"""Seconds for one script."""
LOST = 255
"""Exit code of ssh itself. A login node that is gone, and a refused key, give the same one."""
_REFUSALS: Sequence[tuple[str, type[errors.CloudtrainError], str]] = (
    (r"Protocol authentication error|munge|Invalid user id|Access/permission denied", errors.AuthError, "auth"),
    (r"AssocMax|AssocGrp|QOSMax|QOSGrp|accounting/QOS policy|MaxSubmit", errors.QuotaError, "quota"),
    (r"Unable to contact|Socket timed out|Connection (re|timed)|Zero Bytes|temporarily un|try again|slow down",
     errors.LostContactError, ""),
    (r"not available|Memory specification|Invalid|Requested (partition|reservation|time)|too (long|large)|unrecognized",
     errors.SpecError, ""),
)  # fmt: skip
"""Rows of (words of sbatch, error, key of `HELP`); the first match counts. Seen with Slurm 22.05."""
OOM = "StepId=[^ ]* exceeded memory limit|Detected [0-9]+ oom.kill event|Exceeded (job|step) memory limit"
"""Words of slurmstepd about a kill for memory, by JobAcctGather and by cgroups. Seen with Slurm 22.05."""
_PROLOGUE = r"""
command -v squeue >/dev/null || . /etc/profile >/dev/null 2>&1
for name in $(compgen -v | grep -E '^(S?BATCH|SLURM|SQUEUE|SACCT|SALLOC|SCANCEL|SRUN)_'); do
    [ "$name" = SLURM_CONF ] || unset "$name"
done
export SLURM_TIME_FORMAT=%s LC_ALL=C.UTF-8
command -v squeue >/dev/null || { echo "squeue: command not found" >&2; exit 127; }
ids() {  # the ids of all jobs of this name, the lowest first; also of jobs that Slurm has forgotten
    squeue -h --me -t all --name "$name" -o %A || return 1
    sacct -n -P -X -S now-30days --name "$name" -o jobidraw 2>/dev/null
    cat "$base/job" 2>/dev/null
    return 0
}
lowest() ( set -o pipefail; ids | sed -n '/^[0-9][0-9]*$/p' | sort -n | sed -n 1p )
waiting() (  # the ids of the jobs of this name that wait for their release
    set -o pipefail
    squeue -h --me -t PENDING --name "$name" -o "%A %r" | sed -n 's/ JobHeldUser$//p'
)
held() {  # whether job $1 waits for its release: "yes", or nothing
    local ids
    ids=$(waiting) || exit 75
    case " ${ids//$'\n'/ } " in *" $1 "*) echo yes ;; esac
}
"""
_SUBMIT = r"""
umask 077
mkdir -p "$base" || exit 73
[ -z "$run" ] || echo "$run" >"${base%/*}/run" || exit 73
found=$(lowest) || exit 75
if [ -z "$found" ]; then
    mine=$(printf %s "$batch" | sbatch --parsable --hold) || exit 65
    mine=${mine%%;*}
    found=$(lowest) && [ "$found" ] || exit 75
fi
# Only the lowest is ever released. Another one is ours, or of a client that died before it could cancel it.
held=$(waiting) || exit 75
is=
for id in $held; do
    if [ "$id" = "$found" ]; then is=yes; else scancel "$id"; fi
done
if [ "$is" ]; then
    if [ -n "$secrets" ]; then
        printf %s "$secrets" >"$base/secrets.$$" && mv "$base/secrets.$$" "$base/secrets" || exit 73
    fi
    if ! scontrol release "$found"; then
        is=$(held "$found") && [ -z "$is" ] || exit 75
    fi
fi
echo "$found"
"""
_OBJECTS = r"""
names=$(squeue -h --me -o %j) || exit 75
for mark in "$folder"/*/run; do
    [ -f "$mark" ] || continue
    base=${mark%/run}
    case $names in *"-${base##*-}-"*) continue ;; esac
    printf '%s\t%s\t%s\n' "$(stat -c %Y "$mark")" "$base" "$(cat "$mark")"
done
"""
_FIND = r"""
[ -d "$base" ] || exit 0
found=$(lowest) || exit 75
[ "$found" ] || exit 0
is=$(held "$found") || exit 75
[ "$is" ] || echo "$found"
"""
_DESCRIBE = r"""
[ -d "$base" ] || exit 66
for mark in end over cancelled; do
    [ ! -e "$base/$mark" ] || echo "mark $mark=$(cat "$base/$mark")"
done
if shown=$(scontrol -o show job "$job" 2>&1); then
    echo "job $shown"
else
    case $shown in *"Invalid job id"*) ;; *) echo "$shown" >&2; exit 75 ;; esac
fi
case $shown in *JobState=FAILED*|*"Invalid job id"*)  # its steps' kills for memory are in its log alone
    tail -qc 9999 "$base"/*.log 2>/dev/null | grep -aqE "^slurmstepd.*($oom)" && echo "mark oom=" ;;
esac
sacct -n -D -P -X -j "$job" -o state,exitcode,start,end,nodelist 2>/dev/null | sed 's/^/row /'
exit 0
"""
_CANCEL = r"""
[ -d "$base" ] || exit 66
if squeue -h -j "$job" -o %T >/dev/null 2>&1 || ! squeue -h >/dev/null; then
    scontrol update jobid="$job" requeue=0 2>/dev/null
    scancel "$job" || exit 75
    [ -e "$base/end" ] || touch "$base/cancelled"
fi
rm -f "$base/secrets"
"""


class Job(NamedTuple):
    """A job as Slurm knows it: the fields of ``scontrol show job``, the rows of sacct, and the script's own marks."""

    fields: Mapping[str, str]
    rows: Sequence[Sequence[str]]
    marks: Mapping[str, str]


def job_of(native_id: str) -> tuple[str, str]:
    """Return (id, folder of the job's files) of a native id. Raises `NotFoundError`."""
    job, _, base = native_id.partition(":")
    if not job.isdecimal() or not base.startswith("/"):
        raise errors.NotFoundError(f"{native_id!r} is not an id of {NAME}, JOB:FOLDER")
    return job, base


def error_of(said: str, *, what: str, code: int = 1) -> errors.CloudtrainError:
    """Return the error for what Slurm's tools, or ssh, wrote to stderr."""
    text = one_line(said) or f"exit code {code}"
    message = f"{what}: {text}"
    for pattern, kind, key in _REFUSALS:
        if re.search(pattern, text, re.IGNORECASE):
            return kind(message, hint=HELP.get(key, ""))
    return errors.PlatformError(message)


class Cluster:
    """One cluster, as this process reaches it: the transport, and the last answer of squeue for all jobs of the user.

    ``host`` is a login node, or empty for the tools of this machine.
    """

    def __init__(self, host: str) -> None:
        self.host = host
        self._lock, self._at = threading.Lock(), float("-inf")
        self._lines: dict[str, str] = {}
        self.details: dict[str, tuple[str, Job]] = {}

    def run(self, script: str, *, what: str, **values: str) -> bytes:
        """Return the output of ``script``, run with these variables. Raises the error of its exit code and words."""
        given = "".join(f"{name}={shlex.quote(value)}\n" for name, value in values.items())
        # A connection that is cut leaves half of a script: a function that is not complete does nothing.
        text = f"main() {{\n{_PROLOGUE}{given}{script}\n}}\nmain </dev/null\nexit $?\n"
        words = ["/bin/bash", "-s"]
        if self.host:
            options = ["-o", "BatchMode=yes", "-o", "ConnectTimeout=20", "-o", "ServerAliveInterval=15"]
            words = ["ssh", "-T", *options, "--", self.host, "/bin/bash -s"]
        try:
            done = subprocess.run(words, input=text.encode(), capture_output=True, timeout=TIMEOUT, check=False)
        except FileNotFoundError:
            raise errors.PlatformError(f"{what}: there is no {words[0]} on this machine") from None
        except subprocess.TimeoutExpired:
            raise errors.LostContactError(f"{what}: no answer within {TIMEOUT:.0f} s") from None
        if done.returncode:
            raise self._error(done.returncode, one_line(done.stderr.decode("utf-8", "replace")), what)
        return done.stdout

    def ask(self, script: str, *, what: str, **values: str) -> str:
        """Return the output of `run` as text."""
        return self.run(script, what=what, **values).decode("utf-8", "replace")

    def _error(self, code: int, said: str, what: str) -> errors.CloudtrainError:
        where = self.host or "this machine"
        if self.host and code == LOST:
            refused = "denied" in said or "verification failed" in said
            kind = errors.AuthError if refused else errors.LostContactError
            hint = HELP["ssh"].replace("HOST", self.host)
            return kind(f"{what}: ssh {self.host}: {said or 'the connection was cut'}", hint=hint)
        if code == 127 and "command not found" in said:
            return errors.PlatformError(f"{what}: there are no tools of Slurm on {where}", hint=HELP["none"])
        if code == 66:
            return errors.NotFoundError(f"{what}: no job has ever used this folder on {where}")
        if code == 73:
            return errors.StorageError(f"{what}: {said}")
        error = error_of(said, what=what, code=code)
        # 75: a look-up or a release failed, not the request.
        lost = code == 75 and not isinstance(error, (errors.AuthError, errors.LostContactError))
        return errors.LostContactError(str(error)) if lost else error

    def line(self, job: str) -> str:
        """Return the job's line of squeue, at most `SQUEUE_S` old; empty for a job that squeue does not list.

        All runs share the answer: a busy slurmctld is asked once, whatever their number.
        """
        with self._lock:
            if time.monotonic() - self._at >= SQUEUE_S:
                lines = self.ask('squeue -h --me -t all -o "%A|%T|%r|%S"', what="ask squeue").splitlines()
                self._lines, self._at = {line.partition("|")[0]: line for line in lines}, time.monotonic()
            return self._lines.get(job, "")


@cache
def cluster_of(host: str, conf: str) -> Cluster:
    """Return the one `Cluster` of this process for a login node, or for a configuration of this machine's tools."""
    return Cluster(host)


class Account:
    """The user's jobs on one cluster."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.cluster = cluster_of(settings.host, os.environ.get("SLURM_CONF", ""))

    def create(self, request: Request, secrets: Mapping[str, str] | None = None) -> str:
        """Submit the request, unless it has a job already; return the native id."""
        known = _names(request)
        own = self.settings.folder and known["base"].startswith(f"{self.settings.folder}/")
        values = {"run": request.run if own else "", "secrets": json.dumps(dict(secrets)) if secrets else ""}
        said = self.cluster.ask(_SUBMIT, what="submit", batch=str(request.body["script"]), **known, **values)
        if (native := _native(said, known["base"])) is None:
            raise errors.LostContactError(f"submit: Slurm's answer has no id: {one_line(said)!r}")
        return native

    def find(self, request: Request) -> str | None:
        """Return the native id of the request's job; None also for a held one, which its next submission releases."""
        known = _names(request)
        return _native(self.cluster.ask(_FIND, what="find the job", **known), known["base"])

    def describe(self, native_id: str) -> Job:
        """Return the job's details as they were when its line of squeue was new."""
        job, base = job_of(native_id)
        line = self.cluster.line(job)
        known = self.cluster.details.get(native_id)
        if known is None or known[0] != line or not line or "|COMPLETING|" in line:
            text = self.cluster.ask(_DESCRIBE, what="ask for the job", job=job, base=base, oom=OOM)
            known = self.cluster.details[native_id] = line, parsed(text)
        return known[1]

    def cancel(self, native_id: str) -> None:
        """Cancel the job, so that no requeue can start it again."""
        job, base = job_of(native_id)
        self.cluster.ask(_CANCEL, what="cancel", job=job, base=base)

    def shell(self, request: Request, native_id: str, node: int, command: Sequence[str], *, tty: bool) -> Shell:
        """Return the command of a further step on a node of the job (``--overlap``), in a container of its own."""
        python, pyz = request.body["command"][:2]
        srun, front = request.body.get("container") or ([], [])  # a request of an earlier version has none
        words = [*front, python, *shell_arguments(pyz, request, node, command)]
        if setup := self.settings.setup:
            words = ["/bin/bash", "-c", "\n".join([*setup, 'exec "$@"']), "cloudtrain", *words]
        step = ["srun", f"--jobid={job_of(native_id)[0]}", "--overlap", "--nodes=1", "--ntasks=1"]
        step += [f"--relative={node}", "--mpi=none", *srun, *(["--pty"] if tty else []), *words]
        if not (host := self.settings.host):
            return Shell(argv=step, install=HELP["none"])
        find = "command -v srun >/dev/null || . /etc/profile >/dev/null 2>&1"
        return Shell(argv=["ssh", "-t" if tty else "-T", "--", host, f"{find}; exec {shlex.join(step)}"])

    def machines(self) -> list[Machine]:
        """Return the kinds of nodes of each partition, which is their ``instance_type``."""
        from ...provider_api.catalog import Machine

        found = {}
        for line in self.cluster.ask("sinfo -h -o '%R|%c|%m|%G'", what="ask for the nodes").splitlines():
            partition, cores, memory, gres = line.split("|", 3)
            vcpus, size = int(cores.rstrip("+")), int(memory.rstrip("+")) / 1024
            for kind, count in re.findall(r"gpu:(?:([^:,()]+):)?(\d+)", gres) or [("", "0")]:
                gpu = (kind or "gpu").upper() if count != "0" else ""
                found[(partition, gpu, count)] = Machine(
                    instance_type=partition, gpu=gpu, gpu_count=int(count), memory_gib=size, vcpus=vcpus
                )
        return list(found.values())

    def objects(self) -> list[NativeObject]:
        """Return the folders of runs in the setting ``folder``, without those of jobs that are not over."""
        if not (folder := self.settings.folder):
            return []
        lines = self.cluster.ask(_OBJECTS, what="list the runs' folders", folder=folder).splitlines()
        rows = [line.split("\t") for line in lines]
        return [NativeObject(kind="folder", key=key, run=run, created=float(at)) for at, key, run in rows]

    def remove(self, found: NativeObject) -> None:
        """Remove one of `objects`."""
        self.cluster.ask('rm -rf -- "$key"', what="remove the folder", key=found.key)

    def principal(self) -> str:
        """Return ``user@host`` of the machine whose tools submit."""
        return self.cluster.ask('echo "$(id -un)@$(hostname)"', what="ask for the user").split()[-1]


def parsed(text: str) -> Job:
    """Return the job of `_DESCRIBE`'s answer."""
    fields: dict[str, str] = {}
    for key, value in re.findall(r" ([\w:]+)=(\S*)", "".join(re.findall("^job( .*)", text, re.MULTILINE)[:1])):
        fields.setdefault(key, value)  # a tag's text comes after the fields that count
    rows = [row.split("|") for row in re.findall(r"^row (.*)", text, re.MULTILINE)]
    marks = dict(re.findall("^mark ([a-z]+)=(.*)", text, re.MULTILINE))
    return Job(fields=fields, rows=[row for row in rows if len(row) == 5], marks=marks)


def _names(request: Request) -> dict[str, str]:
    options = request.body["sbatch"]
    return {"name": str(options["job-name"]), "base": str(options["output"]).rpartition("/")[0]}


def _native(said: str, base: str) -> str | None:
    """Return the native id of the job whose number is the last word of an answer; None if that is no number."""
    last = "".join(said.split()[-1:])
    return f"{last}:{base}" if last.isdecimal() else None
