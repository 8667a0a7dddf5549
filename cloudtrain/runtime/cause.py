"""Find the root cause of a failed run among the records of all ranks of all nodes.

torchrun names the lowest rank among those that failed within the same second. A consequence of a peer's death (a closed
connection, an aborted collective) comes within milliseconds. So records carry nanosecond stamps of one clock (node
0's), and consequences are ranked behind causes at any time.
"""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

_CONSEQUENCE = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|connectfullmesh|ncclremoteerror|ncclsystemerror"
    r"|nccl (remote|system) error|remote process exited|nccl communicator was aborted|watchdog caught collective"
    r"|disterror|distbackenderror|distnetworkerror|diststoreerror|gloo/transport|socket timeout"
    r"|timed out (waiting|after)"
    r"|recvvalue failed|failed to recv|signalexception|dataloader worker \(pid\(?s?\)? [\d, ]+\) (exited|is killed)",
    re.IGNORECASE,
)
_OOM = re.compile(
    r"outofmemoryerror|out of memory|cannot allocate memory|defaultcpuallocator|memoryerror", re.IGNORECASE
)
BROKEN_GPU = re.compile(
    r"uncorrectable (ecc|nvlink)|system not yet initialized|gpu is lost|fallen off the bus|hardware stack error",
    re.IGNORECASE,
)
"""Errors of CUDA and its driver whose cause is the machine, not the script."""
SHOWN = 300  # most characters of a script's own text in a reason
SLACK_NS = 500_000_000
"""Longest delay before a busy machine reads a silent death, which it sees by its pipe's end of file."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The failure of one rank or one node.

    ``kind`` is error (an exception or non-zero exit that the rank reported), died (ended without a report), lost (the
    node no longer answers), setup (before any rank ran), check (`node_check`) or stalled. ``code`` is the exit code,
    negative for a signal, None when unknown. ``time_ns`` is Unix nanoseconds on node 0's clock. ``notified``: this rank
    had a stop notice by then. Node 0's own ranks may get theirs later. ``machine`` is the name of the node's machine if
    that is at fault. ``last_line`` is the rank's last line before the failure. Only `failure_line` uses it, as it may
    be any text.
    """

    kind: str
    node: int
    time_ns: int
    rank: int | None = None
    exception: str = ""
    file: str | None = None
    line: int | None = None
    traceback: str = ""
    code: int | None = None
    category: str = ""
    notified: bool = False
    machine: str = ""
    last_line: str = ""

    @property
    def about(self) -> tuple[int, int | None, str]:
        """Return the identity of the failure: two records with the same are one failure."""
        return self.node, self.rank, self.kind

    @property
    def chosen(self) -> bool:
        """Return whether the rank itself chose its exit code: by ``sys.exit``, or ``os._exit`` in a signal handler."""
        by_os_exit = self.kind == "died" and not self.exception and (self.code or 0) > 0
        return by_os_exit or self.exception.startswith("SystemExit")

    @property
    def consequence(self) -> bool:
        consequence = self.kind in ("error", "check") and _CONSEQUENCE.search(self.exception)
        return bool(consequence) and not BROKEN_GPU.search(self.exception)

    def without_secrets(self, redact: Callable[[str], str]) -> Failure:
        """Return the same failure with its texts as ``redact`` leaves them."""
        return replace(
            self, exception=redact(self.exception), traceback=redact(self.traceback), last_line=redact(self.last_line)
        )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def public(self) -> dict[str, Any]:
        """Return the ``failure`` object of result.json."""
        return {
            "node": self.node,
            "rank": self.rank,
            "exception": self.exception or None,
            "file": self.file,
            "line": self.line,
            "traceback": self.traceback or None,
            "process_exit_code": self.code,
            "time_ns": self.time_ns,
            **({"machine": self.machine} if self.machine else {}),
        }


def silent_deaths(
    node: int,
    seen: Mapping[int, set[str]],
    eof: Mapping[int, int],
    codes: Mapping[int, int],
    *,
    first_rank: int,
    since_ns: int,
) -> list[Failure]:
    """Return the ranks of ``node`` that ended badly without a report.

    ``seen`` are the events that each local rank sent. ``eof`` is the end of its pipe (Unix nanoseconds), ``codes`` the
    exit codes known. A rank without a code only counts if it ended after ``since_ns``.
    """
    found = []
    for local in sorted({*eof, *codes}):
        code, events = codes.get(local), seen.get(local, set())
        silent = "start" in events and not events & {"end", "error"}
        if code or (code is None and silent and eof.get(local, 0) > since_ns):
            over = "its script had already ended" if "end" in events else ""
            stamp = eof.get(local) or time.time_ns()
            rank = first_rank + local
            found.append(Failure(kind="died", node=node, rank=rank, time_ns=stamp, code=code, exception=over))
    return found


def with_codes(failures: Sequence[Failure], node: int, codes: Mapping[int, int], *, first_rank: int) -> list[Failure]:
    """Fill the exit codes of ``node``'s ranks into ``failures`` that were recorded without one."""
    filled = list(failures)
    for number, failure in enumerate(failures):
        if failure.node == node and failure.kind == "died" and failure.rank is not None and failure.code is None:
            filled[number] = replace(failure, code=codes.get(failure.rank - first_rank))
    return filled


def real(failure: Failure, stopped_ns: int | None) -> bool:
    """Return whether ``failure`` is more than a consequence of the stop notice, given at ``stopped_ns``."""
    late = failure.notified or (stopped_ns is not None and failure.time_ns > stopped_ns)
    return failure.kind in ("error", "setup", "check", "stalled") and not failure.consequence and not late


def root_cause(failures: Sequence[Failure], *, stopped_ns: int | None = None) -> Failure | None:
    """Return the failure that came first in cause, None if none. ``stopped_ns``: when this node began to kill."""
    if not failures:
        return None
    first = min(f.time_ns for f in failures)
    known = {f.node for f in failures if f.kind == "died" and f.code and f.code != -signal.SIGTERM}

    def weight(failure: Failure) -> tuple[int, int]:
        if failure.notified:
            return 3, failure.time_ns
        if failure.kind == "died":
            if failure.code == -signal.SIGTERM or (stopped_ns is not None and failure.time_ns > stopped_ns):
                return 3, failure.time_ns
            # Without an exit code it may be a sibling that torchrun stopped, or one that left well. Then only the very
            # first counts, and only if no rank is known to have ended badly.
            if failure.code is None and failure.node in known:
                return 3, failure.time_ns
            return (0 if failure.code or failure.time_ns <= first + SLACK_NS else 3), failure.time_ns
        if failure.kind == "lost":
            return 1, failure.time_ns
        return (2 if failure.consequence else 0), failure.time_ns

    return min(failures, key=weight)


def category(failure: Failure, *, oom_kill: bool = False) -> str:
    """Return the DESIGN category of a root cause. ``oom_kill``: the kernel killed one of our processes for memory."""
    if failure.category:
        return failure.category
    if _OOM.search(failure.exception) or (oom_kill and failure.code in (-signal.SIGKILL, 128 + signal.SIGKILL)):
        return "oom"
    return "infra" if failure.kind == "lost" or failure.machine else "user_error"


def failure_line(failure: Failure) -> str:
    """Return one line naming rank, node, exception and place."""
    who = f"node {failure.node}" if failure.rank is None else f"rank {failure.rank} on node {failure.node}"
    if failure.kind == "lost":
        return f"{who} {failure.exception}"
    if failure.kind == "check":
        if not failure.machine:
            return f"{who} reports that the node check failed: {failure.exception}"
        return f"{who} failed the node check on machine {failure.machine}: {failure.exception}"
    if failure.kind == "setup":
        return f"{who} could not continue: {failure.exception}"
    if failure.kind == "stalled":
        return failure.exception + (f" (seen by {who})" if failure.rank is None else "")
    last = f"; last line: {_short(failure.last_line)}" if failure.last_line and (failure.code or 0) > 0 else ""
    if failure.kind == "died":
        return f"{who} {_ending(failure.code)}" + (f"; {failure.exception}" if failure.exception else last)
    place = f" ({failure.file}:{failure.line})" if failure.file else ""
    headline = next((part for part in failure.exception.splitlines() if part.strip()), "")
    if headline.startswith("SystemExit") and failure.code is not None:
        text = headline.partition(": ")[2]
        if text and not text.lstrip("-").isdigit():
            return f"{who} exited with code {failure.code}: {_short(text)}{place}"
        return f"{who} exited with code {failure.code}{place}{last}"
    return f"{who} raised {headline}{place}"


def _short(text: str) -> str:
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."


def _ending(code: int | None) -> str:
    if code is None:
        return "died without a message"
    if code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        return f"was killed by {name}"
    return f"exited with code {code}"
