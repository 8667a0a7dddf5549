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

FINAL = frozenset(
    ("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT")
)
"""States of a job that Slurm has ended, unless it is to start again: the man page of squeue."""
HELP: Mapping[str, str] = {
    "none": "run this on a login node, or set slurm.host to one that ssh reaches",
    "ssh": "test the connection first: ssh HOST true",
    "auth": "ask your administrator: the daemon munged of this machine does not work",
    "names": "to look up the names, run: sinfo; scontrol show res; sacctmgr show assoc user=$USER",
    "quota": "sacctmgr show assoc user=$USER lists the limits",
}
SQUEUE_S = 5.0
"""Shortest time in seconds between two squeue calls of one client, for all of its runs."""
TIMEOUT = 120.0
"""Seconds for one script."""
LOST = 255
"""Exit code of ssh itself. A login node that is gone, and a refused key, give the same one."""
_ERRORS: Sequence[tuple[int, str, type[errors.CloudtrainError], str, str]] = (
    (LOST, "denied|verification failed", errors.AuthError, "ssh {where}: {text}", "ssh"),
    (LOST, "", errors.LostContactError, "ssh {where}: {text}", "ssh"),
    (127, "command not found", errors.PlatformError, "there are no tools of Slurm on {where}", "none"),
    (66, "", errors.NotFoundError, "no job has ever used this folder on {where}", ""),
    (73, "", errors.StorageError, "", ""),
    (0, r"Protocol authentication error|munge|Invalid user id|Access/permission denied", errors.AuthError, "", "auth"),
    (0, "a configuration source|process configuration file", errors.LostContactError,
     "the tools of Slurm on {where} find no cluster", "none"),
    (75, "", errors.LostContactError, "", ""),  # a look-up or a release failed, not the request
    (0, r"AssocMax|AssocGrp|QOSMax|QOSGrp|accounting/QOS policy|MaxSubmit", errors.QuotaError, "", "quota"),
    (0, r"Unable to contact|Socket timed out|Connection (re|timed)|Zero Bytes|temporarily un|try again|slow down",
     errors.LostContactError, "", ""),
    (0, r"not available|Memory specification|Invalid|Requested (partition|reservation|time)|too (long|large)"
     r"|unrecognized", errors.SpecError, "", "names"),
)  # fmt: skip
"""Rows of (exit code, 0 for any; words of the tools; error; message, empty for the words; key of `HELP`). The first
match counts. Our scripts end with 66, 73 and 75. Words are of Slurm 22.05."""
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
is_held() {  # whether job $1 waits for its release
    local ids
    ids=$(waiting) || exit 75
    case " ${ids//$'\n'/ } " in *" $1 "*) ;; *) return 1 ;; esac
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
    scontrol release "$found" || ! is_held "$found" || exit 75
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
[ -z "$found" ] || is_held "$found" || echo "$found"
exit 0
"""
_TEST = r"""
out=$(printf %s "$batch" | SLURM_TIME_FORMAT=standard sbatch --test-only 2>&1) || { echo "$out" >&2; exit 65; }
echo "$out"
"""
_DESCRIBE = r"""
[ -d "$base" ] || exit 66
for mark in end over cancelled setup; do
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


def error_of(said: str, *, what: str, code: int = 1, where: str = "") -> errors.CloudtrainError:
    """Return the error for what Slurm's tools, or ssh, wrote to stderr. ``where`` is the machine."""
    text = one_line(said) or ("the connection was cut" if code == LOST else f"exit code {code}")
    for only, pattern, kind, message, key in _ERRORS:
        if only in (0, code) and re.search(pattern, text, re.IGNORECASE):
            hint = HELP.get(key, "").replace("HOST", where)
            return kind(f"{what}: {message.format(text=text, where=where) or text}", hint=hint)
    return errors.PlatformError(f"{what}: {text}")


class Cluster:
    """One cluster, as this process reaches it: the transport, and the last answer of squeue for all jobs of the user.

    ``host`` is a login node, or empty for the tools of this machine.
    """

    def __init__(self, host: str) -> None:
        self.host, self.where = host, host or "this machine"
        self._lock, self._at = threading.Lock(), float("-inf")
        self._lines: dict[str, str] = {}
        self.details: dict[str, tuple[str, Job]] = {}

    def run(self, script: str, *, what: str, **values: str) -> bytes:
        """Return the output of ``script``, run with these variables. Raises the error of its exit code and words."""
        given = "".join(f"{name}={shlex.quote(value)}\n" for name, value in values.items())
        # A connection that is cut leaves half of a script: a function that is not complete does nothing.
        text = f"main() {{\n{_PROLOGUE}{given}{script}\n}}\nmain </dev/null\nexit $?\n"
        options = ["-o", "BatchMode=yes", "-o", "ConnectTimeout=20", "-o", "ServerAliveInterval=15"]
        ssh = ["ssh", "-T", *options, "--", self.host, "/bin/bash -s"]
        words = ssh if self.host else ["/bin/bash", "-s"]
        try:
            done = subprocess.run(words, input=text.encode(), capture_output=True, timeout=TIMEOUT, check=False)
        except FileNotFoundError:
            raise errors.PlatformError(f"{what}: there is no {words[0]} on this machine") from None
        except subprocess.TimeoutExpired:
            raise errors.LostContactError(f"{what}: no answer within {TIMEOUT:.0f} s") from None
        if done.returncode:
            code = done.returncode if self.host or done.returncode != LOST else 1
            raise error_of(done.stderr.decode("utf-8", "replace"), what=what, code=code, where=self.where)
        return done.stdout

    def ask(self, script: str, *, what: str, **values: str) -> str:
        """Return the output of `run` as text."""
        return self.run(script, what=what, **values).decode("utf-8", "replace")

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
        own = self.settings.folder and str(request.body["sbatch"]["output"]).startswith(f"{self.settings.folder}/")
        values = {"run": request.run if own else "", "secrets": json.dumps(dict(secrets)) if secrets else ""}
        native, answer = self._job(_SUBMIT, request, what="submit", batch=str(request.body["script"]), **values)
        if native is None:
            raise errors.LostContactError(f"submit: Slurm's answer has no id: {one_line(answer)!r}")
        return native

    def find(self, request: Request) -> str | None:
        """Return the native id of the request's job; None also for a held one, which its next submission releases."""
        return self._job(_FIND, request, what="find the job")[0]

    def _job(self, script: str, request: Request, *, what: str, **values: str) -> tuple[str | None, str]:
        """Return the native id of the job whose number is an answer's last word, None if it is none; and the answer."""
        base = str(request.body["sbatch"]["output"]).rpartition("/")[0]
        answer = self.cluster.ask(script, what=what, name=request.body["sbatch"]["job-name"], base=base, **values)
        return (f"{job}:{base}" if (job := "".join(answer.split()[-1:])).isdecimal() else None), answer

    def test(self, request: Request) -> str:
        """Return Slurm's answer to the request. It starts nothing, but uses up a job's number."""
        answer = self.cluster.ask(_TEST, what="test the request", batch=str(request.body["script"]))
        return one_line(answer).removeprefix("sbatch: ")

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
            for kind, count in re.findall(r"gpu:(?:([^:,()]+):)?(\d+)", gres) or [("", "0")]:
                found[partition, kind, count] = Machine(
                    instance_type=partition,
                    gpu=(kind or "gpu").upper() if count != "0" else "",
                    gpu_count=int(count),
                    memory_gib=int(memory.rstrip("+")) / 1024,
                    vcpus=int(cores.rstrip("+")),
                )
        return list(found.values())

    def objects(self) -> list[NativeObject]:
        """Return the folders of runs in the setting ``folder``, without those of jobs that are not over."""
        if not (folder := self.settings.folder):
            return []
        answer = self.cluster.ask(_OBJECTS, what="list the runs' folders", folder=folder)
        rows = [line.split("\t") for line in answer.splitlines()]
        return [NativeObject(kind="folder", key=key, run=run, created=float(at)) for at, key, run in rows]

    def remove(self, found: NativeObject) -> None:
        """Remove one of `objects`."""
        self.cluster.ask('rm -rf -- "$key"', what="remove the folder", key=found.key)

    def principal(self) -> str:
        """Return ``user@host`` of the machine whose tools submit."""
        return self.cluster.ask('echo "$(id -un)@$(hostname)"', what="ask for the user").split()[-1]


def parsed(text: str) -> Job:
    """Return the job of `_DESCRIBE`'s answer."""
    shown = "".join(re.findall("^job( .*)", text, re.MULTILINE)[:1])
    fields = dict(reversed(re.findall(r" ([\w:]+)=(\S*)", shown)))  # a tag's text comes after the fields that count
    rows = [row.split("|") for row in re.findall(r"^row (.*)", text, re.MULTILINE)]
    marks = dict(re.findall("^mark ([a-z]+)=(.*)", text, re.MULTILINE))
    return Job(fields=fields, rows=[row for row in rows if len(row) == 5], marks=marks)
