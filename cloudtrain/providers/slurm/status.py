"""Turn Slurm's view of a job into a Status: `status` makes the calls, the rest is pure."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ...errors import NotFoundError
from ...provider_api.protocol import AttemptInfo, Status
from .._cloud import first_match, hinted, patterns
from . import NAME
from .api import FINAL, HELP, job_of
from .node import AGAIN, LOST, SETUP_FAILED, TIME_UP

if TYPE_CHECKING:
    from .api import Account, Job

PENDING = frozenset(
    ("CONFIGURING", "PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT", "SUSPENDED")
)
"""States in which no script need run. Any other state that is not final counts as running, also COMPLETING."""
HINTS: Mapping[str, str] = {
    "capacity": "choose other machines, or wait",
    "quota": HELP["quota"],
    "oom": "ask for more with --memory-gb",
    "spec": "the partition never allows this: sinfo -o '%P %l %D' lists its limits; cancel the run and change it",
    "infra": "the machines or Slurm itself failed; submit it again",
}
_REASONS = patterns(
    (r"^(Partition(Config|TimeLimit|NodeLimit|Down|Inactive)|BadConstraints|InvalidAccount|InvalidQOS)$", "spec"),
    (r"^(QOS|Assoc|MaxJobs|MaxSubmit|AccountingPolicy|AssociationJobLimit)", "quota"),
    (r"^(Resources|Priority|ReqNodeNotAvail|Nodes_required|Reservation|Licenses)", "capacity"),
)
"""Reasons of a pending job: the man page of squeue."""
_HELD = ("JobHeldAdmin", "job_requeued_in_held_state", "launch_failed_requeued_held")
"""Reasons of a pending job that Slurm itself never starts. The last follows a failed prolog (burrmill #15)."""
_ENDS = {
    "COMPLETED": ("", ""),
    "CANCELLED": ("cancelled", "it was cancelled"),
    "TIMEOUT": ("timeout", "Slurm's own time limit ended it"),
    "OUT_OF_MEMORY": ("oom", "it used more memory than its limit"),
    "NODE_FAIL": ("infra", "a node failed"),
    "BOOT_FAIL": ("infra", "a node did not start"),
    "PREEMPTED": ("preempted", "Slurm took its nodes back"),
    "DEADLINE": ("capacity", "it could not end before its deadline"),
    "REVOKED": ("infra", "another cluster took it"),
    "REQUEUED": ("preempted", "it was requeued"),
    # The ExitCode, code:signal, of a FAILED job.
    f"{TIME_UP}:0": ("timeout", "max_runtime is used up"),
    f"{AGAIN}:0": ("preempted", "its nodes stopped at a notice, and Slurm did not start it again"),
    f"{LOST}:0": ("infra", "a node was lost"),
    f"{SETUP_FAILED}:0": ("image", f"a line of {NAME}.setup failed"),
    "2:0": ("image", f"{NAME}.python did not start on a node, or the node does not see the store: its log says more"),
    "255:0": ("user_error", f"srun or the container did not start: its log says more; check {NAME}.container"),
    "0:53": ("infra", "Slurm could not start the batch script: its log's folder is missing on the node"),
}
"""Category and reason of a job's end."""


def category_of(state: str, exit_code: str = "") -> tuple[str, str]:
    """Return (category, reason) of a job's end, by its state and its ExitCode."""
    unknown = "user_error", f"the batch script ended with {exit_code or 'an unknown code'}; its log says more"
    return _ENDS.get(state) or _ENDS.get(exit_code) or unknown


def status(account: Account, native_id: str) -> Status:
    """Return the job's status. Raises `NotFoundError` for a job that Slurm has forgotten without a mark of its end."""
    return status_of(native_id, account.describe(native_id))


def status_of(native_id: str, job: Job) -> Status:
    """Return the Status of a job."""
    number, base = job_of(native_id)
    k = re.sub(r".*-(\d+)-\d+$", r"\1", base)
    if not job.fields and not job.rows:
        return _forgotten(number, job.marks)
    rows = job.rows
    last = zip(("JobState", "ExitCode", "StartTime", "EndTime", "NodeList"), rows[-1], strict=True) if rows else ()
    fields = {**dict(last), **job.fields}
    native, state, category, reason = _state(fields, job.marks)
    pending, final = state == "pending", state not in ("pending", "running")
    began = None if pending else _time(fields.get("StartTime", ""))
    ended = _time(fields.get("EndTime", "")) if final else None
    restarts = int(fields.get("Restarts") or max(0, len(rows) - 1))
    earlier = itertools.zip_longest(range(restarts), rows[:restarts])
    attempts = [_attempt(f"{k}.{restart}", row) for restart, row in earlier]
    machine = _lost(category, fields.get("NodeList", ""))
    return Status(
        state=state,
        native=native,
        reason=hinted(reason, HINTS.get(category)) if category != "capacity" or final else reason,
        category=category,
        attempts=(*attempts, AttemptInfo(number=f"{k}.{restarts}", started=began, ended=ended, machine=machine)),
        started=attempts[0].started or began if attempts and not pending else began,
        finished=ended,
        instance_type=fields.get("Partition", ""),
    )


def _state(fields: Mapping[str, str], marks: Mapping[str, str]) -> tuple[str, str, str, str]:
    """Return (Slurm's state, ours, category, reason). The mark ``oom``: Slurm's log has a kill for its memory."""
    native, why = fields.get("JobState", "").partition(" ")[0], fields.get("Reason", "").replace("None", "")
    if native in PENDING:
        if why == "JobHeldUser":
            return native, "pending", "", "it is held: submit it again with the same run id, or run scontrol release"
        if native == "REQUEUE_HOLD" or why in _HELD:
            return native, "pending", "", f"Slurm holds it ({why or native}): ask your administrator"
        return native, "pending", first_match(_REASONS, why, ""), f"{native}: {why}" if why else native
    if native not in FINAL and native != "REVOKED":
        return native, "running", "", "stopping" if native in ("COMPLETING", "STOPPED", "SIGNALING") else ""
    end = "OUT_OF_MEMORY" if "oom" in marks and native == "FAILED" else native
    category, reason = category_of(end, fields.get("ExitCode", ""))
    if category == "image" and "setup" in marks:
        reason += f": {marks['setup']}"
    if category == "oom":
        for name, of in (("MinMemoryNode", "node"), ("MinMemoryCPU", "core")):
            reason += f", {fields[name]} a {of}" if name in fields else ""
    return native, {"COMPLETED": "succeeded", "CANCELLED": "cancelled"}.get(native, "failed"), category, reason


def _attempt(number: str, row: Sequence[str] | None) -> AttemptInfo:
    """Return a start before the last one. Its ``row`` is of sacct, if there is one, which knows its end."""
    state, exit_code, began, ended, nodes = row or [""] * 5
    category, reason = category_of(state.partition(" ")[0], exit_code) if row else ("", "")
    start, end, lost = _time(began), _time(ended), _lost(category, nodes)
    return AttemptInfo(number=number, category=category, reason=reason, started=start, ended=end, machine=lost)


def _forgotten(number: str, marks: Mapping[str, str]) -> Status:
    """Return the status of a job that Slurm knows no more, by what its script, or a cancel, wrote at its end."""
    if not {"end", "cancelled"} & marks.keys():
        raise NotFoundError(f"Slurm no longer knows job {number}, and its script has recorded no end")
    end = marks.get("end")
    native = "CANCELLED" if end is None else "COMPLETED" if end == "0" else "FAILED"
    _, state, category, reason = _state({"JobState": native, "ExitCode": f"{end}:0"}, marks)
    return Status(state=state, category=category, native="gone", reason=reason)


def _lost(category: str, nodes: str) -> str:
    """Return the machine of a job that the cluster lost; empty for a NodeList of several, ``n[1-2]``, or of none."""
    return nodes if category == "infra" and re.fullmatch(r"[\w.-]+", nodes) else ""


def _time(text: str) -> float | None:
    """Return Unix seconds of ``SLURM_TIME_FORMAT=%s``; None for Unknown and None."""
    return float(text) if text.isdecimal() else None
