"""Format the objects of ``plan --json`` and ``status --json`` for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..provider_api.protocol import FINAL
from ..validate import duration, without_secrets
from .outcome import unix_time

RETRIED_BY = {
    "platform": "the platform itself",
    "supervisor": "a supervisor on this machine, also when no client waits",
    "client": "a waiting client only: keep `submit` or `wait` running, or `reconcile` now and then",
}


def summary(document: Mapping[str, Any]) -> str:
    """Return the object of ``plan --json`` in a few lines: the machines, limits, price and notes."""
    return columns(plan_rows(document))


def plan_rows(document: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the rows of `summary`: a name and its text."""
    code, runtime, request = document["code"], document["runtime"], document["request"]
    rows = [
        ("run", f"{document['run_id']} on {document['provider']}"),
        ("url", document["run"]),
        ("script", f"{code['entry_point']} in {code['root']}"),
        ("code", f"{plural(len(code['files']), 'file')}, {size_text(code['bytes'])}, digest {code['digest']}"),
    ]
    if git := code.get("git"):
        rows.append(("git", f"{git.get('commit') or 'no commit yet'}{', with changes' if git.get('dirty') else ''}"))
    rows.append(("runtime", f"digest {runtime['digest']}"))
    for name, item in document["inputs"].items():
        words = [item["mode"], *(["sharded"] if item["shard"] else [])]
        words += [f"copied from {without_secrets(item['source'])}, through this machine"] if item.get("source") else []
        rows.append((f"input {name}", f"{without_secrets(item['url'])} ({', '.join(words)})"))
    if resume := document["layout"]["resume"]:
        source = document["layout"]["resume_source"]
        how = f" (the newest checkpoint copied from {without_secrets(source)}, through this machine)" if source else ""
        rows.append(("resumes from", f"{without_secrets(resume)}{how}"))
    wanted, retries = document["resources"], document["retries"]
    rows.append(("instance", _plan_instance(wanted)))
    if wanted["instance_types"] or wanted["price"]:  # else this machine starts the nodes and has no price
        rows.append(("price", price_text(wanted["price"], wanted["instance_types"]).removeprefix("price ")))
    starter = f"{retries['count']}, started by {RETRIED_BY.get(retries['by'], retries['by'])}"
    return [
        *rows,
        ("limits", _plan_limits(document["limits"])),
        ("retries", starter if retries["count"] else "none (--retries)"),
        ("disk", _plan_disk(document["disk"])),
        ("sends", f"{request['operation']} (attempt {request['attempt']})"),
        *(("note", text) for text in document["notes"]),
        *ranking_rows(document.get("ranking", ())),
        *((f"fallback {number}", fallback_text(item)) for number, item in enumerate(document.get("fallbacks", ()), 1)),
    ]


def ranking_rows(ranking: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Return the rows of profiles in the order of their price, and of those that refuse the job."""
    rows = []
    for number, row in enumerate(ranking, 1):
        price = "price unknown" if row["usd_per_hour"] is None else f"about {row['usd_per_hour']:.2f} USD an hour"
        name = f"{row['profile']} {row['provider']}"
        refused = row["reason"] is not None
        rows.append(("left out", f"{name}: {row['reason']}") if refused else (f"choice {number}", f"{name}: {price}"))
    return rows


def fallback_text(document: Mapping[str, Any]) -> str:
    """Return a fallback's plan in one line, with its profile and provider."""
    name = " ".join(filter(None, [document.get("profile"), document["provider"]]))
    wanted = document["resources"]
    price = price_text(wanted["price"], wanted["instance_types"])
    return f"{name}: {_plan_instance(wanted)}, {document['run']}; {price}"


def _plan_instance(resources: Mapping[str, Any]) -> str:
    words = [nodes_text(resources.get("node_counts") or [resources["instance_count"]])]
    types = resources.get("instance_types") or [resources.get("instance_type")]
    words += [" or ".join(types)] if types[0] else []
    words += [f"GPU {' or '.join(resources['gpu_names'])}{_gpu_totals(resources)}"] if resources["gpu_names"] else []
    words.append(f"{plural(resources['ranks'], 'rank')}, {resources['nproc_per_node']} a node")
    return ", ".join(words)


def _gpu_totals(resources: Mapping[str, Any]) -> str:
    """Return `` (16 GPUs, 80 GiB each, 1280 GiB in all)``; unknown values are left out."""
    gpus, each = resources["gpus"], resources["gpu_memory_gib"]
    words = [f"{gpus} GPUs"] if gpus and resources["instance_count"] > 1 else []
    if each:
        words.append(f"{each:g} GiB" + (" each" if gpus != 1 else ""))
    if each and gpus and gpus > 1:
        words.append(f"{resources['total_gpu_memory_gib']:g} GiB in all")
    return f" ({', '.join(words)})" if words else ""


def price_text(price: Mapping[str, Any] | None, machines: Sequence[str] = ()) -> str:
    """Return a price as an estimate, with its basis and source, so that it is not taken for a bill."""
    if price is None:
        how = f" (--set prices.{machines[0]}=USD sets it)" if machines else ""
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
    words.append(f"code {size_text(limits['max_code_bytes'])}")
    return ", ".join(words)


def max_runtime(seconds: int, *, is_default: bool) -> str:
    """Return the hard limit, marked if it is the default."""
    return f"max_runtime {duration(seconds)}" + (" (default; --max-runtime)" if is_default else "")


def stall_timeout(seconds: int | None, *, is_default: bool) -> str:
    """Return the stall timeout, marked if it is the default."""
    words = f"stall_timeout {duration(seconds)}" if seconds else "stall_timeout never"
    return words + (" (default; --stall-timeout)" if is_default else "")


def _plan_disk(disk: Mapping[str, Any]) -> str:
    known = f"{size_text(disk['code_bytes'])} of code, {size_text(disk['input_bytes'])} of inputs staged from here"
    count = disk["checkpoints"]
    room = f"{count} checkpoints at a time" if count else "every checkpoint (--keep-checkpoints)"
    return f"{known}, and {room}"


def nodes_text(counts: Sequence[int]) -> str:
    """Return ``4 nodes``, or ``4 nodes (2 or 1 where there are no machines for 4)`` of the counts of a range."""
    most, *fewer = counts
    words = f" ({' or '.join(map(str, fewer))} where there are no machines for {most})" if fewer else ""
    return plural(most, "node") + words


def plural(count: int, word: str) -> str:
    """Return ``1 file``, ``2 files``."""
    return f"{count} {word}" + ("" if count == 1 else "s")


def columns(rows: Sequence[Sequence[Any]]) -> str:
    """Return left-aligned columns; the last one is not padded."""
    cells = [[" ".join(str(cell).split()) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]) - 1)]
    padded = ([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]] for row in cells)
    return "\n".join("  ".join(row).rstrip() for row in padded)


def size_text(count: float) -> str:
    """Return bytes as people write them: ``812 B``, ``1.4 MiB``."""
    if count < 1024:
        return f"{int(count)} B"
    for unit in ("KiB", "MiB", "GiB"):
        count /= 1024
        if count < 1024:
            return f"{count:.1f} {unit}"
    return f"{count / 1024:.1f} TiB"


def state_line(result: Mapping[str, Any]) -> str:
    """Return ``failed (user_error): ValueError: …``."""
    category = result.get("category")
    named = f" ({category})" if category and category != result["state"] else ""
    return f"{result['state']}{named}" + (f": {result['reason']}" if result.get("reason") else "")


def failure_place(failure: Mapping[str, Any]) -> str:
    """Return ``node 1, rank 3, train.py line 12, exit code 1``."""
    words = [f"{name} {failure[name]}" for name in ("node", "rank") if failure.get(name) is not None]
    if failure.get("machine"):
        words.insert(1, f"machine {failure['machine']}")
    if failure.get("file"):
        words.append(f"{failure['file']}" + (f" line {failure['line']}" if failure.get("line") else ""))
    if failure.get("process_exit_code") is not None:
        words.append(f"exit code {failure['process_exit_code']}")
    return ", ".join(words)


def when(time_: str | None, now: float | None) -> str:
    """Return an ISO time as it is, or how long before ``now`` (Unix seconds): ``2 min ago``."""
    seconds = now - (unix_time(time_) or now) if now is not None else None
    if time_ is None or seconds is None or seconds < 0:
        return time_ or ""
    for name, length in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= (2 if name == "days" else 1) * length:
            return f"{seconds // length:.0f} {name} ago"
    return f"{seconds:.0f} s ago"


def status_text(result: Mapping[str, Any], now: float | None = None) -> str:
    """Return the object of ``status --json`` as text; times are `when` they were before ``now``."""
    return columns(run_rows(result, now))


def run_rows(result: Mapping[str, Any], now: float | None = None) -> list[tuple[str, str]]:
    """Return the rows of `status_text`: a name and its text."""
    rows = [("run", result["run_id"]), ("state", state_line(result))]
    if place := failure_place(result.get("failure") or {}):
        rows.append(("failed at", place))
    rows.append(("provider", f"{result['provider']} {result.get('native_id') or ''}".strip()))
    attempts = result.get("attempts") or []
    for attempt in attempts:
        rows.append((f"attempt {attempt['number']}", _attempt(attempt, now, attempts)))
    rows += [("bad machine", _bad_machine(row, result)) for row in result.get("bad_machines") or ()]
    checkpoint = result.get("checkpoint")
    none = "none" if result["state"] in FINAL else "none complete yet"
    rows.append(("checkpoint", _checkpoint(checkpoint, now) if checkpoint else none))
    if cost := cost_text(result.get("cost") or {}):
        rows.append(("cost", cost))
    rows.append(("url", result["run"]))
    return rows


def _bad_machine(row: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    then = "" if result["state"] in FINAL else "; retries leave it out, the platform's own restarts do not"
    then = then if row["excluded"] else f"; {result['provider']} cannot leave out a machine"
    return f"{row['machine']}: {row['attempts']} attempts failed on it{then}"


def cost_text(cost: Mapping[str, Any]) -> str:
    """Return ``1h2m of machine time billed, 0.40 USD, spot saved 63 %``; unknown values are left out."""
    words = [f"{duration(cost['billed_s'])} of machine time billed"] if cost.get("billed_s") is not None else []
    if cost.get("estimate_usd") is not None:
        words.append(f"about {cost['estimate_usd']:.2f} USD" + (f" ({cost['priced_on']})" if cost["priced_on"] else ""))
    words += [f"{cost['gpu_hours']:.2f} GPU hours"] if cost.get("gpu_hours") else []
    words += [f"spot saved {cost['saved']:.0%}"] if cost.get("saved") is not None else []
    return ", ".join(words)


def _attempt(attempt: Mapping[str, Any], now: float | None, attempts: Sequence[Mapping[str, Any]]) -> str:
    words = [f"{name} {when(attempt[name], now)}" for name in ("started", "ended") if attempt.get(name)]
    words += [history] if (history := attempt_history(attempt, attempts)) else []
    return ", ".join(words) or "not started"


def attempt_history(attempt: Mapping[str, Any], attempts: Sequence[Mapping[str, Any]] = ()) -> str:
    """Return the checkpoint that an attempt resumed from, why it ended, its loss, and its nodes if others had more."""
    nodes = attempt.get("nodes") or 0
    words = [plural(nodes, "node")] if 0 < nodes < max((a.get("nodes") or 0 for a in attempts), default=0) else []
    words += [f"resumed from {attempt['resumed_from']}"] if attempt.get("resumed_from") else []
    words += [str(attempt["reason"])] if attempt.get("reason") else []
    words += [f"lost {lost}"] if (lost := _lost(attempt.get("lost") or {})) else []
    return ", ".join(words)


def _lost(lost: Mapping[str, Any]) -> str:
    """Return ``12 steps, 37 s``; unknown values are left out."""
    words = [plural(lost["steps"], "step")] if lost.get("steps") is not None else []
    words += [f"{lost['seconds']:.0f} s"] if lost.get("seconds") is not None else []
    return ", ".join(words)


def _checkpoint(checkpoint: Mapping[str, Any], now: float | None) -> str:
    words = [str(checkpoint["name"])]
    words += [f"step {checkpoint['step']}"] if checkpoint.get("step") is not None else []
    if checkpoint.get("age_s") is not None:
        words.append(f"{duration(checkpoint['age_s'])} ago")
    elif checkpoint.get("committed"):
        words.append(when(checkpoint["committed"], now))
    return ", ".join(words)


def table_html(rows: Sequence[tuple[str, str]]) -> str:
    """Return rows as a small HTML table, for a notebook; every text is escaped."""
    import html

    cells = (f"<tr><th>{html.escape(name)}</th><td>{html.escape(text)}</td></tr>" for name, text in rows)
    return f"<table>{''.join(cells)}</table>"
