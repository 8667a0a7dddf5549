"""Text for people, made of results, runs, lines and plans. Pure: nothing here writes."""

from __future__ import annotations

import collections
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import scrubbed
from ..runs.summary import (
    attempt_history,
    columns,
    failure_place,
    fallback_text,
    max_runtime,
    plural,
    price_text,
    size_text,
    stall_timeout,
    state_line,
    status_text,
    summary,
    when,
)  # fmt: skip
from ..validate import duration

if TYPE_CHECKING:
    from ..provider_api.protocol import Status
    from ..runs.pull import PullReport
    from ..store.gc import Collected, Leftover

__all__ = [
    "Changes",
    "Moved", "came", "collected", "collected_line", "duration", "files_text", "fix", "leftovers", "max_runtime",
    "outcome", "plan_text", "price_text", "pulled", "run_table", "sent", "size_text", "stall_timeout", "state_line",
    "status_text", "still_pending", "table", "when",
]  # fmt: skip


LARGEST = 20
"""Files, and excluded files, that a plan lists by default."""
LONG_TEXT = 400
"""Longest text in a request, in characters, that a terminal shows whole."""
WINDOW = 5.0
"""Seconds over which a rate is measured."""
LONG = 60.0
"""Seconds of waiting after which the reason is printed."""


class Changes:
    """A listener that prints a status when its state, reason or attempt changes. `outcome` prints the end.

    Once a run has been pending for `LONG`, it prints the reason, in the platform's own words, and a link: once for each
    wait.
    """

    every = True
    """Ask for every look at the run, also those without a change: it counts their time."""

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._say, self._clock, self._last = say, clock, ""
        self._since: float | None = None
        self._told = False
        self.heard = False
        """True once there was any status."""

    def __call__(self, status: Status) -> None:
        self.heard = True
        attempt = f" (attempt {status.attempts[-1].number})" if len(status.attempts) > 1 else ""
        text = f"{status.state}{attempt}" + (f": {status.reason}" if status.reason else "")
        if text != self._last and not status.final:
            self._say(text)
        self._last = text
        if status.state != "pending":
            self._since, self._told = None, False
            return
        self._since = self._clock() if self._since is None else self._since
        if not self._told and (waited := self._clock() - self._since) >= LONG:
            self._told = True
            self._say(still_pending(status, waited))


def still_pending(status: Status, waited: float) -> str:
    """Return why a run has been pending for ``waited`` seconds: the platform's state, its reason (which names a quota
    that is too small), and its link."""
    kind = f" ({status.category})" if status.category else ""
    why = f"{status.native or 'no state of its own'}{kind}: {status.reason or 'the platform gives no reason'}"
    return f"still pending after {duration(waited)}: {why}" + (f"; see {status.url}" if status.url else "")


class Moved:
    """A listener that prints files, bytes, rate and time left of a transfer, ten times a second at most. Thread-safe.

    ``verb`` is what happens to the files; ``say`` is None if nothing is printed. Call `expect` before the first bytes.
    """

    def __init__(
        self, verb: str, say: Callable[[str], None] | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._verb, self._say, self._clock = verb, say, clock
        self._lock = threading.Lock()
        self._keys: set[str] = set()
        self._bytes = self._files_expected = self._bytes_expected = 0
        self._due = self._begun = self._last = 0.0
        self._marks: collections.deque[tuple[float, int]] = collections.deque()

    def expect(self, files: int, count: int) -> None:
        """Add so many files and bytes to those that are to come."""
        with self._lock:
            self._files_expected += files
            self._bytes_expected += count

    def __call__(self, key: str, count: int) -> None:
        with self._lock:
            now = self._clock()
            self._begun = self._begun or now
            self._last = now
            self._keys.add(key)
            self._bytes += count
            if self._say is not None and now >= self._due:
                self._due = now + 0.1
                self._marks.append((now, self._bytes))
                while now - self._marks[0][0] > WINDOW and len(self._marks) > 2:
                    self._marks.popleft()
                self._say(self._line())

    def _line(self) -> str:
        """Return ``14 of 40 files, 1.2 GiB of 3.4 GiB uploaded, 85.0 MiB/s, 26s left``."""
        files, total = max(len(self._keys), self._files_expected), max(self._bytes, self._bytes_expected)
        words = [
            f"{len(self._keys)} of {plural(files, 'file')}",
            f"{size_text(self._bytes)} of {size_text(total)} {self._verb}",
        ]
        (start, before), (end, now) = self._marks[0], self._marks[-1]
        if end > start and now > before:
            rate = (now - before) / (end - start)
            words += [f"{size_text(rate)}/s", f"{duration((total - now) / rate)} left"]
        return ", ".join(words)

    @property
    def pace(self) -> str:
        """Return ``, in 14s, 85.0 MiB/s``; empty for less than a second."""
        took = self._last - self._begun
        return f", in {duration(took)}, {size_text(self._bytes / took)}/s" if took >= 1 else ""


def sent(run_id: str, provider: str, url: str, staged: Any, *, pace: str = "") -> str:
    """Return the text about a submitted run and its uploads, with `Moved.pace`."""
    text = f"submitted {run_id} to {provider}: {url}"
    if staged is not None:
        counts = {"code": staged.code_bytes, "runtime": staged.runtime_bytes, "data": staged.data_bytes}
        words = [f"{size_text(count)} of {what}" for what, count in counts.items() if count]
        new = ", ".join(words) or "nothing, the store has all of it"
        text += f"\nuploaded {new}{pace}"
    return text


def outcome(result: Mapping[str, Any]) -> str:
    """Return the end of the run: the reason in one line, its attempts, and the failed rank's place and traceback."""
    lines = [state_line(result)]
    attempts = result.get("attempts") or []
    lines += [f"  attempt {a['number']}: {attempt_history(a, attempts)}" for a in attempts if len(attempts) > 1]
    failure = result.get("failure") or {}
    if place := failure_place(failure):
        lines.append(f"  {place}")
    if failure.get("traceback"):
        lines += ["  " + line for line in str(failure["traceback"]).rstrip().splitlines()]
    return "\n".join(lines)


_FIXES = {
    "ModuleNotFoundError": "list the package in a file and add --requirements FILE, or use an image that has it\n"
    "for a package of your own code, add the folder that has it: --env PYTHONPATH=. or PYTHONPATH=src",
    "FileNotFoundError": "nodes have only your inputs, and the code that cloudtrain plan lists\n"
    "for data, add --input data=PATH, and read $CLOUDTRAIN_INPUT_DATA",
}
_FIXES_BY_CATEGORY = {
    "oom": "use a smaller batch, or a machine or GPU with more memory",
    "stalled": "if the script is silent for longer than that, add a longer --stall-timeout",
}


def fix(result: Mapping[str, Any]) -> str:
    """Return the usual way out of a failed run's error; empty if its traceback must do."""
    failure = result.get("failure") or {}
    exception = str(failure.get("exception") or "")
    if not exception and failure.get("process_exit_code") == -9 and result.get("category") == "user_error":  # SIGKILL
        return "the memory of its machine was probably full: load less at a time, or raise --memory-gb"
    if "(min_gpu_util)" in exception:
        return "see in `cloudtrain report` why the GPUs wait; for a longer pause, raise the time of --min-gpu-util"
    if exception.endswith("No module named 'torch'"):
        return "use an image or a Python with torch; on this machine, cloudtrain doctor prints how to install it"
    kind = exception.partition(":")[0].rpartition(".")[2]
    return _FIXES_BY_CATEGORY.get(str(result.get("category")), "") or _FIXES.get(kind, "")


LISTED = ("run_id", "state", "category", "provider", "created", "name")


def table(runs: Sequence[Mapping[str, Any]], names: Sequence[str] = LISTED) -> str:
    """Return runs in plain columns, with the column names on top."""
    return columns([names, *[tuple(str(run.get(name) or "-") for name in names) for run in runs]])


def run_table(runs: Sequence[Mapping[str, Any]], columns: Sequence[str], now: float | None) -> str:
    """Return the rows of ``list`` as text, with the asked-for columns; times are `when` they were before ``now``."""
    rows = [{**_cells(run.get("columns", {})), **run, "created": when(run["created"], now)} for run in runs]
    return table(rows, (*LISTED, *(name for name in dict.fromkeys(columns) if name not in LISTED)))


def _cells(values: Mapping[str, Any]) -> dict[str, str]:
    """Return values as text: numbers with at most six digits, ``-`` for a missing one."""
    return {
        name: "-" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
        for name, value in values.items()
    }


def leftovers(found: Collected) -> str:
    """Return the files that no run needs, in columns."""
    rows = collected(found)["found"]
    words = [{**row, "size": size_text(row["bytes"]), "age": duration(row["age_s"])} for row in rows]
    return table(words, ("kind", "size", "files", "age", "key"))


def collected_line(found: Collected) -> str:
    """Return ``12 things, 1.4 GiB, that no run needs; 2 more, younger than 7d, stay``."""
    things = f"{plural(len(found.found), 'thing')}, {size_text(found.bytes)}," if found.found else "nothing"
    text = f"{'removed ' if found.deleted else ''}{things} that no run needs"
    more = len(found.younger)
    return text + (f"; {more} more, younger than {duration(found.older_than)}, stay" if more else "")


def collected(found: Collected) -> dict[str, Any]:
    """Return the object of ``gc --json``; ages are seconds, null if the store has no times."""

    def row(item: Leftover) -> dict[str, Any]:
        age = max(0, round(found.now - item.modified)) if found.now and item.modified else None
        return {"kind": item.kind, "key": item.key, "files": item.files, "bytes": item.bytes, "age_s": age}

    return {
        "store": found.store,
        "deleted": found.deleted,
        "older_than_s": found.older_than,
        "found": [row(item) for item in found.found],
        "younger": [row(item) for item in found.younger],
        "bytes": found.bytes,
        "unreadable": list(found.unreadable),
        "exit_code": 0,
    }


def pulled(report: Mapping[str, Any], *, pace: str = "") -> str:
    """Return the text about a pull's files, with `Moved.pace`."""
    files = plural(len(report["files"]), "file")
    new = f"{size_text(report['transferred'])} of it new{pace}"
    return f"pulled {files} to {report['folder']}, {new}"


def came(report: PullReport) -> str:
    """Return the progress of a pull that follows a run."""
    newest = f", {plural(len(report.checkpoints), 'checkpoint')}" if report.checkpoints else ""
    return f"pulled: {plural(len(report.files), 'file')}{newest}, {size_text(report.transferred)} so far"


# -------------------------------------------------------------------------------------------------------- a plan, whole


def plan_text(document: Mapping[str, Any], *, verbose: bool = False, terminal: bool = False) -> str:
    """Return the object of ``plan --json`` for people, `scrubbed`, with only the largest files unless ``verbose``.

    ``terminal`` puts the summary last, where it is visible, and cuts texts of over `LONG_TEXT` characters.
    """
    limit = None if verbose else LARGEST
    files = [_plan_files(document["code"], limit), _plan_excluded(document["code"], limit)]
    requests = ["request\n" + _json(document["request"]["body"], terminal)]
    if not terminal:
        requests.append("context\n" + _json(document["request"]["context"]))
    requests += [
        f"fallback {number}: {fallback_text(further)}\nrequest\n{_json(further['request']['body'], terminal)}"
        for number, further in enumerate(document.get("fallbacks", ()), 1)
    ]
    parts = [*files, *requests, summary(document)] if terminal else [summary(document), *files, *requests]
    return scrubbed("\n\n".join(filter(None, parts)))


def files_text(document: Mapping[str, Any]) -> str:
    """Return every file that ships, and every excluded one."""
    return "\n\n".join(filter(None, [_plan_files(document["code"], None), _plan_excluded(document["code"], None)]))


def _plan_files(code: Mapping[str, Any], limit: int | None) -> str:
    files = sorted(code["files"], key=lambda file: (-file["bytes"], file["path"]))[:limit]
    lines = [f"  {size_text(file['bytes']):>10}  {_plain(file['path'])}" for file in files]
    return _plan_list("files", lines, len(code["files"]))


def _plan_excluded(code: Mapping[str, Any], limit: int | None) -> str:
    rows = [(f"  {_plain(item['path'])}", item["rule"]) for item in code["excluded"][:limit]]
    width = max((len(path) for path, _ in rows), default=0)
    lines = [f"{path.ljust(width)}  {_plain(rule)}" for path, rule in rows]
    return _plan_list("left out", lines, len(code["excluded"])) if rows else ""


def _plan_list(title: str, lines: Sequence[str], count: int) -> str:
    more = [f"  … and {count - len(lines)} more (--verbose)"] if count > len(lines) else []
    return "\n".join([f"{title} ({count})", *lines, *more])


def _plain(text: str) -> str:
    """Return a file's name on one line, with unprintable characters escaped."""
    return text if text.isprintable() else ascii(text)[1:-1]


def _json(value: Any, cut: bool = False) -> str:
    return json.dumps(_cut(value) if cut else value, indent=2, ensure_ascii=False)


def _cut(value: Any) -> Any:
    """Return ``value`` with each long text cut."""
    if isinstance(value, Mapping):
        return {key: _cut(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_cut(item) for item in value]
    if isinstance(value, str) and len(value) > LONG_TEXT:
        return f"{value[:LONG_TEXT]}… (of {len(value):,} characters; --json shows all)"
    return value
