"""What a person reads: text made of results, runs, lines and plans. Pure; nothing here writes."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..provider import Status

__all__ = [
    "Changes",
    "Moved", "duration", "max_runtime", "outcome", "plan_text", "pulled", "sent", "size", "status_text", "table",
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


def duration(seconds: float) -> str:
    """Seconds as a Job reads them: ``45s``, ``1h30m``, ``24h``; the two largest units, days only from the third."""
    left = max(0, round(seconds))
    units = (("d", 86400), ("h", 3600), ("m", 60), ("s", 1))[0 if left >= 3 * 86400 else 1 :]
    words = []
    for name, length in units:
        if left >= length:
            words.append(f"{left // length}{name}")
            left %= length
    return "".join(words[:2]) or "0s"


# ---------------------------------------------------------------------------------------------------------------- a run


class Changes:
    """Says a status whenever its state, reason or attempt is another one; the end is for `outcome` to tell."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say, self._last = say, ""

    def __call__(self, status: Status) -> None:
        attempt = f" (attempt {status.attempts[-1].number})" if len(status.attempts) > 1 else ""
        text = f"{status.state}{attempt}" + (f": {status.reason}" if status.reason else "")
        if text != self._last and not status.final:
            self._say(text)
        self._last = text


class Moved:
    """Says how many bytes have moved, at most ten times a second; called from several threads."""

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._say, self._clock = say, clock
        self._lock = threading.Lock()
        self._bytes, self._due = 0, 0.0

    def __call__(self, key: str, count: int) -> None:
        with self._lock:
            self._bytes += count
            if self._clock() >= self._due:
                self._due = self._clock() + 0.1
                self._say(f"{size(self._bytes)} pulled")


def sent(run_id: str, provider: str, url: str, staged: Any) -> str:
    """What was submitted, and what had to be uploaded for it."""
    text = f"submitted {run_id} to {provider}: {url}"
    if staged is not None:
        text += (
            f"\nuploaded {size(staged.code_bytes)} of code, {size(staged.runtime_bytes)} of runtime,"
            f" {size(staged.data_bytes)} of data"
        )
    return text


def outcome(result: Mapping[str, Any]) -> str:
    """How the run ended: the reason in one line, then where it failed and the traceback of that rank."""
    lines = [state_line(result)]
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
    rows.append(("checkpoint", _checkpoint(checkpoint) if checkpoint else "none complete yet"))
    rows.append(("url", result["run"]))
    return _columns(rows)


def _attempt(attempt: Mapping[str, Any]) -> str:
    """Times are as the result has them: ISO 8601, UTC."""
    words = [f"{name} {attempt[key]}" for name, key in (("started", "started"), ("ended", "ended")) if attempt.get(key)]
    words += [f"resumed from {attempt['resumed_from']}"] if attempt.get("resumed_from") else []
    words += [str(attempt["reason"])] if attempt.get("reason") else []
    return ", ".join(words) or "not started"


def _checkpoint(checkpoint: Mapping[str, Any]) -> str:
    words = [str(checkpoint["name"])]
    words += [f"step {checkpoint['step']}"] if checkpoint.get("step") is not None else []
    if checkpoint.get("age_s") is not None:
        words.append(f"{duration(checkpoint['age_s'])} ago")
    elif checkpoint.get("committed"):
        words.append(str(checkpoint["committed"]))
    return ", ".join(words)


def table(runs: Sequence[Mapping[str, Any]]) -> str:
    """Runs in plain columns, their names on top."""
    names = ("run_id", "state", "category", "provider", "created", "name")
    return _columns([names, *[tuple(str(run.get(name) or "-") for name in names) for run in runs]])


def pulled(report: Mapping[str, Any]) -> str:
    """What a pull brought."""
    files = plural(len(report["files"]), "file")
    return f"pulled {files} to {report['folder']}, {size(report['transferred'])} of it new"


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
    "client": "a waiting client only: keep `submit` or `wait` running",
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
        rows.append((f"input {name}", f"{item['url']} ({item['mode']}{', sharded' if item['shard'] else ''})"))
    rows += [
        ("instance", _plan_instance(document["resources"])),
        ("limits", _plan_limits(document["limits"])),
        ("retries", _plan_retries(document["retries"])),
        ("disk", _plan_disk(document["disk"])),
        ("sends", f"{request['operation']} (attempt {request['attempt']})"),
    ]
    return rows + [("warning", text) for text in code["warnings"]]


def _plan_instance(resources: Mapping[str, Any]) -> str:
    count = resources["instance_count"]
    words = [plural(count, "node")]
    words += [str(resources["instance_type"])] if resources.get("instance_type") else []
    words += ["GPU " + " or ".join(resources["gpu"])] if resources.get("gpu") else []
    words.append(f"{plural(resources['ranks'], 'rank')}, {resources['nproc_per_node']} a node")
    if resources.get("price") is not None:
        words.append(f"price {resources['price']}")
    return ", ".join(words)


def _plan_limits(limits: Mapping[str, Any]) -> str:
    words = [max_runtime(limits["max_runtime_s"], is_default=limits["max_runtime_is_default"])]
    if limits.get("max_wait_s") is not None:
        words.append(f"max_wait {duration(limits['max_wait_s'])}")
    if limits.get("max_cost_usd") is not None:
        words.append(f"max_cost {limits['max_cost_usd']:.2f} USD")
    stall = limits.get("stall_timeout_s")
    words.append(f"stall_timeout {duration(stall)}" if stall else "stall_timeout never")
    words.append(f"code {size(limits['max_code_bytes'])}")
    return ", ".join(words)


def max_runtime(seconds: int, *, is_default: bool) -> str:
    """The hard limit, loudly when nobody chose it."""
    return f"max_runtime {duration(seconds)}" + (" (default; --max-runtime)" if is_default else "")


def _plan_retries(retries: Mapping[str, Any]) -> str:
    return f"{retries['count'] or 'none'}, started by {RETRIED_BY.get(retries['by'], retries['by'])}"


def _plan_disk(disk: Mapping[str, Any]) -> str:
    checkpoint = disk.get("checkpoint_bytes")
    known = f"{size(disk['code_bytes'])} of code, {size(disk['input_bytes'])} of inputs staged from here"
    return (
        f"{known}, {size(checkpoint)} of checkpoints" if checkpoint is not None else f"{known}; checkpoints unknown yet"
    )


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
