"""What a person reads: text made of results, runs, lines and plans. Pure; nothing here writes."""

from __future__ import annotations

import collections
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..provider import FINAL
from ..values import duration, without_secrets

if TYPE_CHECKING:
    from ..provider import Status
    from ..pull import PullReport
    from ..retention import Collected, Leftover

__all__ = [
    "Changes",
    "Moved", "came", "collected", "collected_line", "duration", "leftovers", "max_runtime", "outcome", "place",
    "plan_text", "price", "pulled", "sent", "size", "stall_timeout", "status_text", "still_pending", "table",
]  # fmt: skip


# ----------------------------------------------------------------------------------------------------------- quantities


def size(count: float) -> str:
    """Bytes as people write them: ``812 B``, ``1.4 MiB``."""
    if count < 1024:
        return f"{int(count)} B"
    for unit in ("KiB", "MiB", "GiB"):
        count /= 1024
        if count < 1024:
            return f"{count:.1f} {unit}"
    return f"{count / 1024:.1f} TiB"


# ---------------------------------------------------------------------------------------------------------------- a run

WINDOW = 5.0
"""Seconds over which a rate is taken."""
LONG = 60.0
"""Seconds of waiting after which one wants to know what for."""


class Changes:
    """Says a status whenever its state, reason or attempt is another one; the end is for `outcome` to tell.

    Once a run has been pending for `LONG`, it says why, in the platform's own words, and where to look: once for each
    time that it waits.
    """

    every = True
    """It is to be told of every look: that nothing changes is what it waits for."""

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._say, self._clock, self._last = say, clock, ""
        self._since: float | None = None
        self._told = False
        self.heard = False
        """Whether there was any status yet."""

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
    """Why a run has been pending for ``waited`` seconds, as far as the platform says: its word, reason (which names the
    quota, where one is short), and link."""
    kind = f" ({status.category})" if status.category else ""
    why = f"{status.native or 'no state of its own'}{kind}: {status.reason or 'the platform gives no reason'}"
    return f"still pending after {duration(waited)}: {why}" + (f"; see {status.url}" if status.url else "")


class Moved:
    """Says files, bytes, rate and time left while bytes move, at most ten times a second; called from several threads.

    ``verb`` is what happens to the files, ``say`` None where nobody watches. Whoever moves them tells `expect` first.
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
        """So many more files, and bytes, are to come."""
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
        """``14 of 40 files, 1.2 GiB of 3.4 GiB uploaded, 85.0 MiB/s, 26s left``."""
        files, total = max(len(self._keys), self._files_expected), max(self._bytes, self._bytes_expected)
        words = [f"{len(self._keys)} of {plural(files, 'file')}", f"{size(self._bytes)} of {size(total)} {self._verb}"]
        (start, before), (end, now) = self._marks[0], self._marks[-1]
        if end > start and now > before:
            rate = (now - before) / (end - start)
            words += [f"{size(rate)}/s", f"{duration((total - now) / rate)} left"]
        return ", ".join(words)

    @property
    def pace(self) -> str:
        """``, in 14s, 85.0 MiB/s``; empty when too little has moved to tell."""
        took = self._last - self._begun
        return f", in {duration(took)}, {size(self._bytes / took)}/s" if took >= 1 else ""


def sent(run_id: str, provider: str, url: str, staged: Any, *, pace: str = "", verbose: bool = False) -> str:
    """What was submitted, and what had to be uploaded for it, with `Moved.pace`; ``verbose``: by what."""
    text = f"submitted {run_id} to {provider}: {url}"
    if staged is not None:
        counts = {"code": staged.code_bytes, "runtime": staged.runtime_bytes, "data": staged.data_bytes}
        words = [f"{size(count)} of {what}" for what, count in counts.items() if count]
        new = ", ".join(words) or "nothing, the store has all of it"
        text += f"\nuploaded {new}{pace}{_by(staged.mover, verbose)}"
    return text


def outcome(result: Mapping[str, Any]) -> str:
    """How the run ended: the reason in one line, its attempts, where it failed and the traceback of that rank."""
    lines = [state_line(result)]
    attempts = result.get("attempts") or []
    lines += [f"  attempt {a['number']}: {_history(a)}" for a in attempts if len(attempts) > 1]
    failure = result.get("failure") or {}
    if place := failure_place(failure):
        lines.append(f"  {place}")
    if failure.get("traceback"):
        lines += ["  " + line for line in str(failure["traceback"]).rstrip().splitlines()]
    return "\n".join(lines)


def state_line(result: Mapping[str, Any]) -> str:
    """``failed (user_error): ValueError: …``."""
    category = result.get("category")
    named = f" ({category})" if category and category != result["state"] else ""
    return f"{result['state']}{named}" + (f": {result['reason']}" if result.get("reason") else "")


def failure_place(failure: Mapping[str, Any]) -> str:
    """``node 1, rank 3, train.py line 12, exit code 1``."""
    words = [f"{name} {failure[name]}" for name in ("node", "rank") if failure.get(name) is not None]
    if failure.get("file"):
        words.append(f"{failure['file']}" + (f" line {failure['line']}" if failure.get("line") else ""))
    if failure.get("process_exit_code") is not None:
        words.append(f"exit code {failure['process_exit_code']}")
    return ", ".join(words)


def status_text(result: Mapping[str, Any]) -> str:
    """The object of ``status --json``, for people."""
    rows = [("run", result["run_id"]), ("state", state_line(result))]
    if place := failure_place(result.get("failure") or {}):
        rows.append(("failed at", place))
    rows.append(("provider", f"{result['provider']} {result.get('native_id') or ''}".strip()))
    attempts = result.get("attempts") or []
    for attempt in attempts:
        rows.append((f"attempt {attempt['number']}", _attempt(attempt)))
    checkpoint = result.get("checkpoint")
    none = "none" if result["state"] in FINAL else "none complete yet"
    rows.append(("checkpoint", _checkpoint(checkpoint) if checkpoint else none))
    if cost := _cost(result.get("cost") or {}):
        rows.append(("cost", cost))
    rows.append(("url", result["run"]))
    return _columns(rows)


def _cost(cost: Mapping[str, Any]) -> str:
    """``1h2m of machine time billed, 0.40 USD, spot saved 63 %``; what nobody tells is left out."""
    words = [f"{duration(cost['billed_s'])} of machine time billed"] if cost.get("billed_s") is not None else []
    if cost.get("estimate_usd") is not None:
        words.append(f"about {cost['estimate_usd']:.2f} USD" + (f" ({cost['priced_on']})" if cost["priced_on"] else ""))
    words += [f"{cost['gpu_hours']:.2f} GPU hours"] if cost.get("gpu_hours") else []
    words += [f"spot saved {cost['saved']:.0%}"] if cost.get("saved") is not None else []
    return ", ".join(words)


def _attempt(attempt: Mapping[str, Any]) -> str:
    """Times are as the result has them: ISO 8601, UTC."""
    words = [f"{name} {attempt[key]}" for name, key in (("started", "started"), ("ended", "ended")) if attempt.get(key)]
    words += [told] if (told := _history(attempt)) else []
    return ", ".join(words) or "not started"


def _history(attempt: Mapping[str, Any]) -> str:
    """What it resumed from, why it ended, what was lost by that."""
    words = [f"resumed from {attempt['resumed_from']}"] if attempt.get("resumed_from") else []
    words += [str(attempt["reason"])] if attempt.get("reason") else []
    words += [f"lost {lost}"] if (lost := _lost(attempt.get("lost") or {})) else []
    return ", ".join(words)


def _lost(lost: Mapping[str, Any]) -> str:
    """``12 steps, 37 s``; what nobody knows is left out."""
    words = [plural(lost["steps"], "step")] if lost.get("steps") is not None else []
    words += [f"{lost['seconds']:.0f} s"] if lost.get("seconds") is not None else []
    return ", ".join(words)


def _checkpoint(checkpoint: Mapping[str, Any]) -> str:
    words = [str(checkpoint["name"])]
    words += [f"step {checkpoint['step']}"] if checkpoint.get("step") is not None else []
    if checkpoint.get("age_s") is not None:
        words.append(f"{duration(checkpoint['age_s'])} ago")
    elif checkpoint.get("committed"):
        words.append(str(checkpoint["committed"]))
    return ", ".join(words)


LISTED = ("run_id", "state", "category", "provider", "created", "name")


def table(runs: Sequence[Mapping[str, Any]], names: Sequence[str] = LISTED) -> str:
    """Runs in plain columns, their names on top."""
    return _columns([names, *[tuple(str(run.get(name) or "-") for name in names) for run in runs]])


def leftovers(found: Collected) -> str:
    """What no run needs, in columns."""
    rows = collected(found)["found"]
    words = [{**row, "size": size(row["bytes"]), "age": duration(row["age_s"])} for row in rows]
    return table(words, ("kind", "size", "files", "age", "key"))


def collected_line(found: Collected) -> str:
    """``12 things, 1.4 GiB, that no run needs; 2 more, younger than 7d, stay``."""
    things = f"{plural(len(found.found), 'thing')}, {size(found.bytes)}," if found.found else "nothing"
    text = f"{'removed ' if found.deleted else ''}{things} that no run needs"
    more = len(found.younger)
    return text + (f"; {more} more, younger than {duration(found.older_than)}, stay" if more else "")


def collected(found: Collected) -> dict[str, Any]:
    """The object of ``gc --json``; ages are seconds, null where the store tells no time."""

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


def pulled(report: Mapping[str, Any], *, pace: str = "", verbose: bool = False) -> str:
    """What a pull brought, with `Moved.pace`; ``verbose``: by what."""
    files = plural(len(report["files"]), "file")
    new = f"{size(report['transferred'])} of it new{pace}{_by(report['mover'], verbose)}"
    return f"pulled {files} to {report['folder']}, {new}"


def came(report: PullReport) -> str:
    """What a pull that follows a run has here by now."""
    newest = f", {plural(len(report.checkpoints), 'checkpoint')}" if report.checkpoints else ""
    return f"pulled: {plural(len(report.files), 'file')}{newest}, {size(report.transferred)} so far"


def _by(mover: str, verbose: bool) -> str:
    return f", by {mover}" if verbose and mover else ""


def plural(count: int, word: str) -> str:
    """``1 file``, ``2 files``."""
    return f"{count} {word}" + ("" if count == 1 else "s")


def _columns(rows: Sequence[Sequence[Any]]) -> str:
    """Left-aligned columns; the last one is as wide as it is."""
    cells = [[" ".join(str(cell).split()) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]) - 1)]
    return "\n".join(
        "  ".join([*[c.ljust(w) for c, w in zip(row, widths, strict=False)], row[-1]]).rstrip() for row in cells
    )


# --------------------------------------------------------------------------------------------------------------- a plan

LARGEST = 20
"""Files, and things left out, that a plan lists unless all are asked for."""
RETRIED_BY = {
    "platform": "the platform itself",
    "supervisor": "a supervisor on this machine, also when no client waits",
    "client": "a waiting client only: keep `submit` or `wait` running, or `reconcile` now and then",
}


def plan_text(document: Mapping[str, Any], *, verbose: bool = False) -> str:
    """The object of ``plan --json``, for people; lists the largest files unless ``verbose``."""
    limit = None if verbose else LARGEST
    parts = [
        _columns(_plan_rows(document)),
        _plan_files(document["code"], limit),
        _plan_excluded(document["code"], limit),
        "request\n" + _json(document["request"]["body"]),
        "context\n" + _json(document["request"]["context"]),
        *(
            f"{place(number, further)}\nrequest\n{_json(further['request']['body'])}"
            for number, further in enumerate(document.get("fallbacks", ()), 2)
        ),
    ]
    return "\n\n".join(part for part in parts if part)


def _plan_rows(document: Mapping[str, Any]) -> list[tuple[str, str]]:
    code, runtime, request = document["code"], document["runtime"], document["request"]
    rows = [
        ("run", f"{document['run_id']} on {document['provider']}"),
        ("url", document["run"]),
        ("script", f"{code['entry_point']} in {code['root']}"),
        ("code", f"{plural(len(code['files']), 'file')}, {size(code['bytes'])}, digest {code['digest']}"),
    ]
    if git := code.get("git"):
        rows.append(("git", f"{git.get('commit') or 'no commit yet'}{', with changes' if git.get('dirty') else ''}"))
    rows.append(("runtime", f"digest {runtime['digest']}"))
    for name, item in document["inputs"].items():
        words = [item["mode"], *(["sharded"] if item["shard"] else [])]
        words += [f"copied from {without_secrets(item['source'])}, through this machine"] if item.get("source") else []
        rows.append((f"input {name}", f"{item['url']} ({', '.join(words)})"))
    if resume := document["layout"]["resume"]:
        source = document["layout"]["resume_source"]
        how = f" (the newest checkpoint copied from {source}, through this machine)" if source else ""
        rows.append(("resumes from", f"{without_secrets(resume)}{how}"))
    rows += [
        ("instance", _plan_instance(document["resources"])),
        *_plan_price(document["resources"]),
        ("limits", _plan_limits(document["limits"])),
        ("retries", _plan_retries(document["retries"])),
        ("disk", _plan_disk(document["disk"])),
        ("sends", f"{request['operation']} (attempt {request['attempt']})"),
    ]
    return rows + [("note", text) for text in document["notes"]]


def place(number: int, document: Mapping[str, Any]) -> str:
    """A place that a job comes to where those before have no machines: its plan in one line."""
    found = f"{document['provider']}: {_plan_instance(document['resources'])}, {document['run']}"
    return f"place {number}: {found}; {price(document['resources']['price'], document['resources']['instance_types'])}"


def _plan_instance(resources: Mapping[str, Any]) -> str:
    count = resources["instance_count"]
    words = [plural(count, "node")]
    types = resources.get("instance_types") or [resources.get("instance_type")]
    words += [" or ".join(types)] if types[0] else []
    total = f" ({resources['gpus']} GPUs)" if resources["gpus"] and count > 1 else ""
    words += [f"GPU {' or '.join(resources['gpu_names'])}{total}"] if resources["gpu_names"] else []
    words.append(f"{plural(resources['ranks'], 'rank')}, {resources['nproc_per_node']} a node")
    return ", ".join(words)


def _plan_price(resources: Mapping[str, Any]) -> list[tuple[str, str]]:
    """None where this machine starts the nodes and nobody gave it a price."""
    types = resources["instance_types"]
    return [("price", price(resources["price"], types))] if types or resources["price"] else []


def price(price: Mapping[str, Any] | None, machines: Sequence[str] = ()) -> str:
    """An estimate, of what, and whose: nobody may take it for a bill."""
    if price is None:
        how = f" (--set prices.{machines[0]}=USD says it)" if machines else ""
        return f"price unknown{how}"
    count, name = price["machines"], price["instance_type"]
    hourly = f"about {price['usd_per_hour']:.2f} USD an hour for {count} x {name}"
    words = f"{hourly}, {price['usd_for_hard_limit']:.2f} USD until the hard limit of {duration(price['hard_limit_s'])}"
    whose = price["source"] + (f", {price['date']}" if price["date"] else "")
    return f"{words}: an estimate by {whose}" + ("" if price["of_service"] else "; not the service's own price")


def _plan_limits(limits: Mapping[str, Any]) -> str:
    words = [max_runtime(limits["max_runtime_s"], is_default=limits["max_runtime_is_default"])]
    if limits.get("max_wait_s") is not None:
        waits = " (ended by a waiting client, or `reconcile`)" if limits["max_wait_by"] == "client" else ""
        words.append(f"max_wait {duration(limits['max_wait_s'])}{waits}")
    if limits.get("max_cost_usd") is not None:
        words.append(f"max_cost {limits['max_cost_usd']:.2f} USD")
    if limits.get("max_gpu_hours") is not None:
        words.append(f"max_gpu_hours {limits['max_gpu_hours']:g}")
    words.append(stall_timeout(limits["stall_timeout_s"], is_default=limits["stall_timeout_is_default"]))
    words.append(f"code {size(limits['max_code_bytes'])}")
    return ", ".join(words)


def max_runtime(seconds: int, *, is_default: bool) -> str:
    """The hard limit, loudly when nobody chose it."""
    return f"max_runtime {duration(seconds)}" + (" (default; --max-runtime)" if is_default else "")


def stall_timeout(seconds: int | None, *, is_default: bool) -> str:
    """How long nothing may stir, loudly when nobody chose it."""
    words = f"stall_timeout {duration(seconds)}" if seconds else "stall_timeout never"
    return words + (" (default; --stall-timeout)" if is_default else "")


def _plan_retries(retries: Mapping[str, Any]) -> str:
    return f"{retries['count'] or 'none'}, started by {RETRIED_BY.get(retries['by'], retries['by'])}"


def _plan_disk(disk: Mapping[str, Any]) -> str:
    known = f"{size(disk['code_bytes'])} of code, {size(disk['input_bytes'])} of inputs staged from here"
    count = disk["checkpoints"]
    room = f"{count} checkpoints at a time" if count else "every checkpoint (--keep-checkpoints)"
    return f"{known}, and {room}"


def _plan_files(code: Mapping[str, Any], limit: int | None) -> str:
    files = sorted(code["files"], key=lambda file: (-file["bytes"], file["path"]))[:limit]
    more = len(code["files"]) - len(files)
    lines = [f"  {size(file['bytes']):>10}  {_plain(file['path'])}" for file in files]
    return "\n".join([f"files ({len(code['files'])})", *lines, *_more(more)])


def _plan_excluded(code: Mapping[str, Any], limit: int | None) -> str:
    rows = [(f"  {_plain(item['path'])}", item["rule"]) for item in code["excluded"][:limit]]
    if not rows:
        return ""
    width = max(len(path) for path, _ in rows)
    lines = [f"{path.ljust(width)}  {_plain(rule)}" for path, rule in rows]
    return "\n".join([f"left out ({len(code['excluded'])})", *lines, *_more(len(code["excluded"]) - len(rows))])


def _more(count: int) -> list[str]:
    return [f"  … and {count} more (--verbose)"] if count > 0 else []


def _plain(text: str) -> str:
    """``text`` on one line, whatever a file is called."""
    return text if text.isprintable() else ascii(text)[1:-1]


def _json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False)
