"""Write the batch script of a request. Pure.

The script runs on the first node and starts one task a node. It counts the running time of all starts, ends the job at
its limit, and lets Slurm start it again after a node stopped at a notice. Its files are in one folder of the run.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import Any

from .node import AGAIN, ATTEMPT, PORT, SETUP_FAILED, TIME_UP

SRUN = ("--kill-on-bad-exit=0", "--wait=600", "--mpi=none", "--export=ALL", "--open-mode=append")

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
rm -f "$base/over" "$base/end" "$base/setup"
used=$(cat "$base/used" 2>/dev/null); used=${used:-0}
mkdir -p "$live"

# Two ports without a listener, for node 0.
port=$((20000 + (job * 2 + restart * 5002) % 12000))
while (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null || (exec 3<>"/dev/tcp/127.0.0.1/$((port + 1))") 2>/dev/null; do
    port=$((port < 31998 ? port + 2 : 20000))
done
export @port=$port @attempt=@k.$restart
# Only a job that Slurm calls RUNNING is ours to start again: a cancelled one would be raised from the dead. One that is
# to start again, by Slurm or by us, keeps its secrets.
leave() {
    trap - EXIT
    for _ in {1..60}; do
        state=$(squeue -h -j "$job" -o %T 2>/dev/null) || { sleep 5; continue; }
        [ "$state" = RUNNING ] || break
        if [ "$code" != @again ]; then
            rm -f "$base/secrets"; echo "$code" >"$base/end"; break
        fi
        scontrol requeue "$job" && { sleep 600; break; }
        sleep 5
    done
    exit "$code"
}
refuse() {
    echo "$1" >"$base/setup"
    echo "cloudtrain: a line of slurm.setup failed: $1"
    code=@setup_failed; leave
}
failed() {  # by a line of slurm.setup; a command in a condition may fail, and so may those of a file that a line reads
    [ ${#BASH_SOURCE[@]} = 2 ] || return 0
    [[ ! $2 =~ ^(source|\.)\ ([^ ]+) ]] || ! eval "[ -r ${BASH_REMATCH[2]} ]" 2>/dev/null || return 0
    refuse "$(sed -n "$3p" "$0") (exit code $1)"
}
trap 'failed "$?" "$BASH_COMMAND" "$LINENO"' ERR; trap 'refuse "it ended the job script (exit code $?)"' EXIT
@setup
trap - ERR EXIT; set +e
srun @srun --output="$base/node-%n.log" @command &
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

leave
"""


def script_of(sbatch: Mapping[str, Any], parts: Mapping[str, str], values: Mapping[str, object]) -> str:
    """Return the text of the script, which ``sbatch`` takes as a file or on its standard input.

    ``sbatch`` are options, ``parts`` are lines and words of bash, and ``values`` fill in the first lines.
    """
    head = "\n".join(["#!/bin/bash", *(_option(name, value) for name, value in sbatch.items())])
    words = {**parts, **{name: shlex.quote(str(value)) for name, value in values.items()}}
    words |= {"port": PORT, "attempt": ATTEMPT}
    words |= {"again": str(AGAIN), "time_up": str(TIME_UP), "setup_failed": str(SETUP_FAILED)}
    return head + re.sub(r"@([a-z_]+)\b", lambda match: words[match[1]], _SCRIPT)


def _option(name: str, value: Any) -> str:
    """Return a line of sbatch. In double quotes, a backslash protects the next character."""
    if value is True:
        return f"#SBATCH --{name}"
    text = str(value)
    if not _PLAIN.fullmatch(text):
        text = '"' + re.sub(r'(["\\])', r"\\\1", text) + '"'
    return f"#SBATCH --{name}={text}"
