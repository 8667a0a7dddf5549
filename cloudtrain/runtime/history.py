"""Record an attempt's beginning, and the work of the one before that it repeats: ``live/attempts/<attempt>.json``.

Node 0 writes it, whole, when the ranks start. If the checkpoint's name shows no step, or an impossible one, it writes
again at the first metrics row. Only this record has the cost of a preemption or a failure: the attempt before cannot
know the next one's checkpoint.
"""

from __future__ import annotations

import contextlib
import fnmatch
import json
import math
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..provider_api.node import attempt_key
from .checkpoint_names import step_of
from .checkpoints import write_whole
from .mounts import ask_again, names_in, raise_fault
from .timings import TIMINGS

FIRST = "0.0"

_ATTEMPT = re.compile(r"(\d+\.\d+)(?:-node-\d+\.jsonl?|\.json)?")
HEAD_BYTES = 1 << 16
CLOCKS = 5.0
"""Seconds by which two clocks, or the times of a file system, may differ. More shows that a clock was set back."""

Record = dict[str, Any]


def restart_of(live: Path, k: int, least: int = 0) -> str:
    """Return the number of this start of attempt ``k``: ``least``, and after all restarts that left files.

    Claims it at once: a restart that dies before its first line is counted too. Raises `OSError` if the disk or mount
    fails: two restarts of one number would replace each other's files.
    """
    earlier = ask_again(lambda: _attempts(live))
    restart = max([least, *(r + 1 for attempt, r in map(attempt_key, earlier) if attempt == k)])
    (live / "logs" / f"{k}.{restart}" / "node-0").mkdir(parents=True, exist_ok=True)
    return f"{k}.{restart}"


def failed_for_good(live: Path, k: int, code: int) -> Record | None:
    """Return node 0's newest exit record of attempt ``k`` if it says that the attempt failed and ended with ``code``.

    If a platform starts a failed container again in place, the script must not run a second time. Returns None if the
    newest record says anything else: a preemption, a lost node, a success. Raises `OSError` if the disk or mount fails.
    """
    found = ask_again(lambda: list(_json(live / "exit", f"{k}.*-node-0.json")))
    records = [record for record in found if isinstance(record.get("attempt"), str)]
    newest = max(records, key=lambda record: attempt_key(record["attempt"]), default=None)
    if newest is None or not newest.get("decided") or newest.get("outcome") != "failed":
        return None
    return newest if newest.get("exit_code") == code else None


def was_direct(live: Path) -> bool:
    """Return whether any attempt so far resumed from a checkpoint that the script wrote to the store by itself.

    Raises `OSError` if the disk or mount fails.
    """
    return any(record.get("direct") is True for record in ask_again(lambda: list(_json(live / "attempts", "*.json"))))


class Start:
    """The record of an attempt of the run at ``live``; ``after`` is the one before. A store that fails ends no run."""

    def __init__(self, live: Path, attempt: str, *, started: float, temporary: str = "") -> None:
        self._temporary = temporary
        self._live, self._path = live, live / "attempts" / f"{attempt}.json"
        earlier = set[str]()
        with contextlib.suppress(OSError):
            earlier = {a for a in _attempts(live) if attempt_key(a) < attempt_key(attempt)}
        self.after = max(earlier, key=attempt_key, default=None)
        self._record: Record = {"protocol": 1, "attempt": attempt, "started": started, "after": self.after}
        self._resumed_step: int | None = None
        self._reached: _Reached | None = None
        """The progress of the attempt before, kept until the first row of this one shows its first step."""
        self._due = 0.0

    def begin(self, *, resumed: str, saved: float | None, direct: bool = False) -> str:
        """Write the record. Return the text for the log, empty on the very first start.

        ``resumed`` is the checkpoint's name, empty on a fresh start. ``saved`` is its time of writing (Unix seconds,
        None if unknown). ``direct``: the script wrote it in the store itself.
        """
        lost = None
        with contextlib.suppress(OSError):
            if self.after is not None:
                reached = _reached(self._live, self.after)
                lost = {"seconds": self._seconds(reached, saved), "steps": self._steps(reached, resumed)}
        self._record.update(resumed_from=resumed, direct=direct, lost=lost)
        self._write()
        if lost is None or lost["seconds"] is None:
            return ""
        return f"; {lost['seconds']:.0f} s of attempt {self.after} {'came after that' if resumed else 'are lost'}"

    def _steps(self, reached: _Reached, resumed: str) -> int | None:
        """Return the steps to repeat; None until `look` can tell."""
        if reached.first is None or reached.last is None:
            return None
        if not resumed:
            return reached.last - reached.first + 1
        self._resumed_step, self._reached = step_of(resumed), reached
        step = self._resumed_step
        return reached.last - step if step is not None and step <= reached.last else None

    def look(self, metrics: Path) -> None:
        """Complete the record by the first step of ``metrics``, this attempt's own, as soon as there is one."""
        now = time.monotonic()
        if self._reached is None or now < self._due:
            return
        self._due = now + TIMINGS.first_step_look
        try:
            with open(metrics, "rb") as stream:
                rows = _parsed(stream.read(HEAD_BYTES).splitlines())
        except OSError:
            return
        first = next((step for row in rows if (step := _step(row)) is not None), None)
        if first is None:
            return
        reached, self._reached = self._reached, None
        step = self._resumed_step
        if step is None or not 0 <= first - step <= reached.every:  # the number may be an epoch's
            self._record["lost"]["steps"] = max(0, (reached.last or 0) - first + 1)
            self._write()

    def _write(self) -> None:
        with contextlib.suppress(OSError):
            write_whole(self._path, json.dumps(self._record).encode(), temporary=self._temporary)

    def _seconds(self, reached: _Reached, saved: float | None) -> float | None:
        """Return the seconds from the save, or the attempt's start if later, to the attempt's last sign of life.

        ``saved`` is a time as if no clock had been set back, so the times of each node's own clock are made such too.
        Returns None if that cannot be done, as the end would lie before the save.
        """
        exits = list(_json(self._live / "exit", f"{self.after}-node-*.json"))
        failed = [ns / 1e9 + _set_back(r) for r in exits
                  if isinstance(f := r.get("failure"), dict) and (ns := _number(f, "time_ns"))]  # fmt: skip
        ended = [at + _set_back(r) for r in exits if (at := _number(r, "ended"))] or ([] if failed else reached.times)
        segments = [] if failed or ended else list((self._live / "logs" / str(self.after)).rglob("*.log"))
        with contextlib.suppress(OSError):
            ended += [path.stat().st_mtime for path in segments]
        began = [at for r in _json(self._live / "attempts", f"{self.after}.json") if (at := _number(r, "started"))]
        since = max([*began, *([saved] if saved else [])], default=None)
        if since is None or not (failed or ended) or max(*failed, *ended, 0.0) < since - CLOCKS:
            return None
        return round(max(0.0, max(failed or ended) - since), 1)


def _attempts(live: Path) -> set[str]:
    """Return every attempt that has left a file. Raises `OSError`."""
    names = [name for folder in ("attempts", "exit", "logs", "metrics") for name in names_in(live / folder)]
    return {match[1] for name in names if (match := _ATTEMPT.fullmatch(name))}


@dataclass
class _Reached:
    """The progress in an attempt's metrics: the first and the last step, the most steps between two rows, and the last
    time (Unix seconds), if any."""

    first: int | None = None
    last: int | None = None
    every: int = 1
    times: list[float] = field(default_factory=list)


def _reached(live: Path, attempt: str) -> _Reached:
    """Return the attempt's progress, read a row at a time: a long run's metrics are large."""
    found = _Reached()
    for path in sorted((live / "metrics").glob(f"{attempt}-node-*.jsonl")):
        with contextlib.suppress(OSError), open(path, "rb") as stream:
            for row in _parsed(stream):
                if (step := _step(row)) is not None:
                    if found.first is None or found.last is None:
                        found.first = found.last = step
                    found.every, found.last = max(found.every, step - found.last), max(found.last, step)
                if when := _number(row, "time"):
                    found.times = [max([when, *found.times])]
    return found


def _parsed(lines: Iterable[bytes]) -> Iterator[Record]:
    for line in lines:
        with contextlib.suppress(ValueError, RecursionError):
            row = json.loads(line)
            if isinstance(row, dict):
                yield row


def _json(folder: Path, pattern: str) -> Iterator[Record]:
    """Yield the records in files that match ``pattern``. Raises `OSError` if the disk or mount fails."""
    for name in fnmatch.filter(names_in(folder), pattern):
        try:
            yield from _parsed([(folder / name).read_bytes()])
        except OSError as exc:
            raise_fault(exc)


def _step(row: Record) -> int | None:
    step = _number(row, "step")
    return None if step is None else int(step)


def _set_back(record: Record) -> float:
    return _number(record, "set_back") or 0.0


def _number(record: Record, key: str) -> float | None:
    """Return a finite number of the record, else None: a script may write any value."""
    value = record.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    with contextlib.suppress(OverflowError):
        return value if math.isfinite(value) else None
    return None
