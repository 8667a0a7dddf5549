"""Write the batch script of a request. Pure.

The script runs on the first node and starts one task a node. It counts the running time of all starts, ends the job at
its limit, and lets Slurm start it again after a node stopped at a notice. Its files are in one folder of the run.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...provider_api.protocol import Shell, shell_arguments
from .node import AGAIN, ATTEMPT, PORT, TIME_UP

if TYPE_CHECKING:
    from ...provider_api.protocol import Request
    from . import Settings

__all__ = ["Batch", "script_of", "shell_of"]

_PLAIN = re.compile(r"[A-Za-z0-9_./:=,@%+-]+")
_SCRIPT = r"""
# A batch script of cloudtrain. Its log, and those of the nodes, are in the folder $base.
base=@base live=@live limit=@limit grace=@grace
job=$SLURM_JOB_ID restart=${SLURM_RESTART_COUNT:-0}
trap hit=1 TERM CONT INT  # Slurm sends them to the nodes, too, which then save and leave

# The first job of this attempt is the only one. A hard link is created once, with its content.
echo "$job" >"$base/job.$job" && ln "$base/job.$job" "$base/job" 2>/dev/null
rm -f "$base/job.$job"
owner=$job; [ ! -e "$base/job" ] || read -r owner <"$base/job"
if [ "$owner" != "$job" ]; then
    echo "cloudtrain: job $owner has this attempt already, so job $job ends"; exit 0
fi
echo "$restart" >"$base/start"
rm -f "$base/over" "$base/end"
used=$(cat "$base/used" 2>/dev/null); used=${used:-0}
mkdir -p "$live"

# Two ports without a listener, for node 0.
port=$((20000 + (job * 2 + restart * 34) % 12000))
while (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null || (exec 3<>"/dev/tcp/127.0.0.1/$((port + 1))") 2>/dev/null; do
    port=$((port < 31998 ? port + 2 : 20000))
done
export @port=$port @attempt=@k.$restart
@setup
srun @srun @command &
step=$!

keep_time() {
    trap : TERM CONT INT
    local rest
    while rest=$((limit - used - SECONDS)); [ "$rest" -gt 0 ]; do
        sleep $((rest < 10 ? rest : 10)) &
        wait $!
        echo $((used + SECONDS)) >"$base/used.new" && mv "$base/used.new" "$base/used"
    done
    echo "$job" >"$base/over"
    echo "cloudtrain: the time limit is used up"
    scancel --signal=TERM "$job"
    sleep "$grace"
    kill -KILL "$step"
}
keep_time &
timer=$!

# A trap interrupts wait. A second wait for a task that has ended returns 127.
while hit=; wait "$step"; now=$?; [ "$now" = 127 ] || code=$now; [ -n "$hit" ]; do :; done
{ kill -KILL "$timer"; wait "$timer"; } 2>/dev/null
echo $((used + SECONDS)) >"$base/used"
[ ! -e "$base/over" ] || code=@time_up

# Only a job that Slurm calls RUNNING is ours to start again: a cancelled one would be raised from the dead.
for _ in {1..60}; do
    state=$(squeue -h -j "$job" -o %T 2>/dev/null) || { sleep 5; continue; }
    [ "$state" = RUNNING ] || break
    if [ "$code" != @again ]; then
        rm -f "$base/secrets"
        echo "$code" >"$base/end"
        break
    fi
    scontrol requeue "$job" && { sleep 600; break; }
    sleep 5
done
exit "$code"
"""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The parts of a batch script: options of sbatch, options of srun, and what each node runs.

    ``base`` and ``live`` are folders, ``limit`` and ``grace`` seconds, ``setup`` lines of bash.
    """

    sbatch: Mapping[str, Any]
    srun: Sequence[str]
    command: Sequence[str]
    base: str
    live: str
    attempt: int
    limit: int
    grace: int
    setup: Sequence[str] = ()


def script_of(batch: Batch) -> str:
    """Return the text of the script, which ``sbatch`` takes as a file or on its standard input."""
    head = "\n".join(["#!/bin/bash", *(_option(name, value) for name, value in batch.sbatch.items())])
    values = {
        "base": shlex.quote(batch.base),
        "live": shlex.quote(batch.live),
        "limit": str(batch.limit),
        "grace": str(batch.grace),
        "k": str(batch.attempt),
        "port": PORT,
        "attempt": ATTEMPT,
        "again": str(AGAIN),
        "time_up": str(TIME_UP),
        "setup": "\n".join(batch.setup),
        "srun": " ".join([*map(shlex.quote, batch.srun), '--output="$base/node-%n.log"']),
        "command": shlex.join(batch.command),
    }
    return head + re.sub(r"@([a-z_]+)\b", lambda match: values[match[1]], _SCRIPT)


def shell_of(settings: Settings, request: Request, job: str, node: int, command: Sequence[str], *, tty: bool) -> Shell:
    """Return the command that starts a further step on a node of a running job (``--overlap``).

    A job with an image starts its nodes in containers. The step starts another one, of the same image and folders.
    """
    own = [str(word) for word in request.body["command"]]
    line = next(line for line in str(request.body["script"]).splitlines() if line.startswith("srun "))
    started = shlex.split(line)[1 : -len(own) - 1]  # without srun, the node's command and the ampersand
    at = next(number for number, word in enumerate(started) if word.startswith("--output="))
    inside = [word for word in started[:at] if word.startswith(("--container-", "--no-container-"))]
    words = [*started[at + 1 :], own[0], *shell_arguments(own[1], request, node, command)]
    if settings.setup:
        words = ["/bin/bash", "-c", "\n".join([*settings.setup, 'exec "$@"']), "cloudtrain", *words]
    step = ["srun", f"--jobid={job}", "--overlap", "--nodes=1", "--ntasks=1", f"--relative={node}", "--mpi=none"]
    step += [*inside, *(["--pty"] if tty else []), *words]
    if not settings.host:
        return Shell(argv=step, install="run this on a login node, or set slurm.host to one that ssh reaches")
    find = "command -v srun >/dev/null || . /etc/profile >/dev/null 2>&1"
    return Shell(argv=["ssh", "-t" if tty else "-T", "--", settings.host, f"{find}; exec {shlex.join(step)}"])


def _option(name: str, value: Any) -> str:
    """Return a line of sbatch. In double quotes, a backslash protects the next character."""
    if value is True:
        return f"#SBATCH --{name}"
    text = str(value)
    if not _PLAIN.fullmatch(text):
        text = '"' + re.sub(r'(["\\])', r"\\\1", text) + '"'
    return f"#SBATCH --{name}={text}"
