"""One HTML page about one run, that opens offline: curves, attempts, cost, configuration, the failure, the last lines.

Everything on it comes from the run's records and what its nodes have left in the store; the platform is asked for the
state of a run that is not over, and once for the address of its own page.
"""

from __future__ import annotations

import contextlib
import json
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import SpecError, scrubbed
from ..job.job import Job
from ..provider_api.protocol import FINAL
from ..runs.live_data import Seen, plain
from ..runs.log_order import line_label
from ..runs.outcome import iso_time, unix_time
from ..runs.run import Run
from ..runs.warnings import is_secret_name
from ..storage.local_disk import disk_errors, settle, temp_file
from ..store.checkpoint import Checkpoint
from ..validate import duration, without_secrets
from .curves import Curve, curves
from .markup import Html, figure, page, quantity, size, table, tag

__all__ = ["report", "write"]

LINES = 40
"""Last lines of the failing rank, and of each node."""
UNTOLD = "the platform does not tell it"
OPEN = 5
"""Checkpoints that are listed at once, the newest; the others are folded away."""
CURVES = 24
"""Curves that are drawn, at most; those beyond are named."""
PAGE_SECONDS = 10.0
"""How long the platform may take to say where its own page is: the report does not hang on that."""
HIDDEN = "(hidden: its name is that of a secret)"
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s\"'<>]+")
_USER = re.compile(r"(?<=https://)[^/@]+@|(?<=http://)[^/@]+@", re.IGNORECASE)
"""Who calls, which may be a token: elsewhere (``abfs://container@account``) it is a part of the place."""

Result = Mapping[str, Any]


def report(run: Run, result: Result, *, clock: Callable[[], float] = time.time) -> Html:
    """The page of a run whose `Run.result` is ``result``. Raises `StorageError`; ``clock`` gives Unix seconds."""
    record, seen = run.record, Seen(run.store, run.run_id)
    rows = seen.metrics()
    now = clock()
    drawn = curves(rows)
    request = run.store.attempt_request(run.run_id, 0)
    rehearsal = request.body if request is not None and "differences" in request.body else {}
    free = request is not None and not request.instance_types
    body = [
        _head(result, record, str(rehearsal.get("target", "")), now),
        _section("Summary", _facts("Summary", _summary(result, drawn, free, now))),
        _differences(rehearsal),
        _failure(result, seen),
        _curves(drawn, {attempt: len(some) for attempt, some in rows.items()}, result),
        _attempts(result, now),
        _checkpoints(run.store.checkpoints(run.run_id) + run.store.direct(run.run_id), result, now),
        _last_lines(seen),
        _configuration(run, record),
        _links(run, _own_page(run, result)),
    ]
    return page(f"{result['state']}: {run.run_id}", tag("main", *[part for part in body if part is not None]))


def write(run: Run, path: Path) -> tuple[Path, dict[str, Any]]:
    """Write the page to ``path``, a file or a folder. Return the file, and the run's result.

    Raises `SpecError` when there is no folder to write it to, and `StorageError`.
    """
    if path.is_dir():
        path /= f"{run.run_id}.html"
    if not path.parent.is_dir():
        raise SpecError(f"there is no folder {path.parent} to write {path.name} to", field="out")
    result = run.result()
    text = report(run, result)
    with disk_errors(path), temp_file(path) as temp:
        temp.write_text(text, encoding="utf-8")
        settle(temp, path)
    return path, result


# ------------------------------------------------------------------------------------------------------------- the head


def _head(result: Result, record: Mapping[str, Any], rehearsal: str, now: float) -> Html:
    state, category = str(result["state"]), result.get("category")
    named = f"{state} ({category})" if category and category != state else state
    created = record.get("created")
    when = f"submitted {_when(created)}, " if isinstance(created, (int, float)) else ""
    known = state if state in (*FINAL, "running") else "waiting"
    reason = [tag("p", plain(str(result["reason"])), class_="reason")] if result.get("reason") else []
    where = f"rehearsal of {rehearsal} on this machine" if rehearsal else result["provider"]
    return tag(
        "header",
        tag("h1", tag("span", named, class_=f"state {known}"), " ", str(result["run_id"])),
        *reason,
        tag("p", f"{where}, {when}this page written {_when(now)}", class_="faint"),
        *([] if state in FINAL else [tag("p", "The run goes on: this page shows it as it was then.", class_="faint")]),
    )


def _when(seconds: float) -> str:
    """Unix seconds as people write them: ``2026-11-22 18:05:09 UTC``."""
    return f"{(iso_time(seconds) or '').partition('.')[0].replace('T', ' ')} UTC"


def _section(title: str, *children: Html) -> Html:
    name = title.lower().replace(" ", "-")
    return tag("section", tag("h2", title, id=name), *children, aria_labelledby=name)


def _facts(caption: str, rows: Sequence[tuple[str, str]]) -> Html:
    inner = table(caption, ("what", "value"), rows, hide=True)
    return tag("div", inner, class_="facts")


def _summary(result: Result, drawn: Sequence[Curve], free: bool, now: float) -> list[tuple[str, str]]:
    attempts = result.get("attempts") or []
    code = result.get("exit_code")
    rows = [("state", str(result["state"]) + (f", exit code {code}" if code is not None else ""))]
    if took := _took(attempts, result, now):
        rows.append(("time", took))
    rows.append(("attempts", _lost_in_all(attempts)))
    if steps := [max(x for x, _ in curve.points) for curve in drawn if curve.axis == "step" and curve.points]:
        rows.append(("last step", quantity(max(steps))))
    for curve in drawn:
        if curve.name == "loss" and curve.history:
            low = min(curve.history, key=lambda point: point[1])
            last = curve.history[-1][1]
            rows.append(
                ("loss", f"{quantity(last)} at the end, lowest {quantity(low[1])} at {curve.axis} {quantity(low[0])}")
            )
    found = result.get("checkpoint")
    rows.append(("newest checkpoint", _newest(found) if found else "none complete"))
    rows.append(("cost", _cost(result.get("cost") or {}) or ("free, this machine" if free else UNTOLD)))
    return rows


def _differences(rehearsal: Mapping[str, Any]) -> Html | None:
    """Return what a rehearsal did otherwise than the platform would; nothing for any other run."""
    if not rehearsal:
        return None
    said = [tag("li", plain(str(text))) for text in rehearsal["differences"]]
    return _section(f"Other than on {rehearsal['target']}", tag("ul", *said))


def _took(attempts: Sequence[Mapping[str, Any]], result: Result, now: float) -> str:
    begins = [at for row in attempts if (at := unix_time(row.get("started"))) is not None]
    ends = [at for row in attempts if (at := unix_time(row.get("ended"))) is not None]
    if not begins:
        return ""
    over = result["state"] in FINAL
    if over and not ends:
        return f"started {_when(min(begins))}"
    end = max(ends) if over else now
    since = _when(min(begins))
    return (
        f"{duration(end - min(begins))}, {since} to {_when(end)}"
        if over
        else (f"{duration(end - min(begins))} so far, from {since}")
    )


def _lost_in_all(attempts: Sequence[Mapping[str, Any]]) -> str:
    lost = [row["lost"] for row in attempts if row.get("lost")]
    text = str(len(attempts)) if attempts else "none has started"
    steps = [float(item["steps"]) for item in lost if item.get("steps") is not None]
    seconds = [float(item["seconds"]) for item in lost if item.get("seconds") is not None]
    words = [f"{quantity(sum(steps))} steps"] if steps else []
    words += [duration(sum(seconds))] if seconds else []
    return f"{text}, {' and '.join(words)} done again" if words else text


def _newest(found: Mapping[str, Any]) -> str:
    words = [str(found["name"])]
    step = found.get("step")
    words += [f"step {step}"] if step is not None and not re.search(rf"(?<!\d){step}(?!\d)", words[0]) else []
    words += [f"{duration(found['age_s'])} old"] if found.get("age_s") is not None else []
    committed = unix_time(found.get("committed"))
    words += [f"complete since {_when(committed)}"] if committed is not None else []
    return ", ".join(words)


def _cost(cost: Mapping[str, Any]) -> str:
    words = [f"about {cost['estimate_usd']:.2f} USD"] if cost.get("estimate_usd") is not None else []
    words += [f"prices of {cost['priced_on']}"] if cost.get("priced_on") else []
    words += [f"{cost['gpu_hours']:.2f} GPU hours"] if cost.get("gpu_hours") else []
    words += [f"{duration(cost['billed_s'])} of machine time billed"] if cost.get("billed_s") is not None else []
    words += [f"preemptible machines saved {cost['saved']:.0%}"] if cost.get("saved") is not None else []
    words += [f"limit {cost['limit_usd']:.2f} USD"] if cost.get("limit_usd") is not None else []
    words += [f"limit {cost['limit_gpu_hours']:g} GPU hours"] if cost.get("limit_gpu_hours") is not None else []
    return ", ".join(words)


# ---------------------------------------------------------------------------------------------------------- the failure


def _failure(result: Result, seen: Seen) -> Html | None:
    failure = result.get("failure")
    if not failure:
        return None
    attempts = result.get("attempts") or []
    rank, node = failure.get("rank"), failure.get("node")
    rows = [("attempt", str(attempts[-1]["number"]))] if attempts else []
    rows += [(name, str(failure[name])) for name in ("node", "rank") if failure.get(name) is not None]
    if failure.get("exception"):
        rows.append(("exception", plain(str(failure["exception"]).strip().replace("\n", " "))))
    if failure.get("file"):
        line = f":{failure['line']}" if failure.get("line") else ""
        rows.append(("place", plain(f"{failure['file']}{line}")))
    if failure.get("process_exit_code") is not None:
        rows.append(("exit code of the process", str(failure["process_exit_code"])))
    parts = [_facts("Where it failed", rows)]
    if failure.get("traceback"):
        parts += [tag("h4", "Traceback"), _pre(str(failure["traceback"]).rstrip().split("\n"))]
    if attempts and rank is not None:
        said = seen.lines(str(attempts[-1]["number"]), LINES, keep=lambda line: line.rank == rank)
        lines = [line for at, some in said.items() if node in (None, at) for line in some]
        if lines:
            parts += [tag("h4", f"Last lines of rank {rank}"), _pre([line.text for line in lines], tall=True)]
    return _section("Failure", *parts)


def _pre(lines: Sequence[str], *, tall: bool = False) -> Html:
    return tag("pre", "\n".join(map(plain, lines)), class_="tall" if tall else None, tabindex=0)


# ---------------------------------------------------------------------------------------- curves, attempts, checkpoints


def _curves(drawn: Sequence[Curve], counts: Mapping[str, int], result: Result) -> Html:
    if not counts:
        over = result["state"] in FINAL
        why = "No node has written any metrics" + ("." if over else " yet.")
        how = "A script does so with cloudtrain.runtime.log_metrics; submit --metric reads them from what it prints."
        return _section("Curves", tag("p", f"{why} {how}"))
    if not drawn:
        return _section("Curves", tag("p", f"The metrics have {sum(counts.values()):,} rows, and no number in them."))
    told = ", ".join(f"{count:,} of attempt {attempt}" for attempt, count in counts.items())
    words = f"{sum(counts.values()):,} rows of metrics"
    words += "." if len(counts) == 1 else f": {told}." if len(counts) <= 3 else f" of {len(counts)} attempts."
    if len(counts) > 1:
        words += " Each attempt begins at an upright line; what a later one did again is shaded."
    parts = [tag("p", words, class_="faint")]
    parts.append(
        tag("div", *[figure(curve, of_memory=curve.kind == "memory") for curve in drawn[:CURVES]], class_="charts")
    )
    if len(drawn) > CURVES:
        parts.append(tag("p", f"Not drawn: {', '.join(plain(curve.name) for curve in drawn[CURVES:])}."))
    return _section("Curves", *parts)


def _attempts(result: Result, now: float) -> Html:
    attempts = result.get("attempts") or []
    if not attempts:
        return _section("Attempts", tag("p", "None has started."))
    over = result["state"] in FINAL
    rows = []
    for row in attempts:
        start, end = unix_time(row.get("started")), unix_time(row.get("ended"))
        last = row is attempts[-1]
        took = duration(end - start) if start and end else ""
        if start and not end and last and not over:
            took = f"{duration(now - start)} so far"
        why = plain(str(row.get("reason") or ""))
        if not why and last:
            why = str(result["state"])
        rows.append(
            [
                str(row["number"]),
                _when(start) if start else "",
                took,
                plain(str(row.get("resumed_from") or "the beginning")),
                f"{row['category']}: {why}" if row.get("category") and row["category"] not in why else why,
                ", ".join(f"{name} {row[name]}" for name in ("node", "rank") if row.get(name) is not None),
                _lost(row.get("lost") or {}),
            ]
        )
    head = ("attempt", "started", "took", "started from", "how it ended", "where", "lost, done again")
    kept = [i for i in range(len(head)) if i < 5 or any(row[i] for row in rows)]  # of a good run there is no more
    shown = [[row[i] for i in kept] for row in rows]
    return _section("Attempts", table("Attempts, and what each one lost", [head[i] for i in kept], shown, hide=True))


def _lost(lost: Mapping[str, Any]) -> str:
    words = [f"{quantity(lost['steps'])} steps"] if lost.get("steps") is not None else []
    words += [f"{lost['seconds']:.0f} s"] if lost.get("seconds") is not None else []
    return ", ".join(words)


def _checkpoints(found: Sequence[Checkpoint], result: Result, now: float) -> Html:
    if not found:
        return _section("Checkpoints", tag("p", "None is complete."))
    rows = [
        [
            plain(item.name),
            quantity(item.step) if item.step is not None else "",
            item.attempt or "written by the script itself",
            f"{len(item.files):,}",
            size(item.bytes),
            _when(item.saved),
            duration(now - item.saved),
        ]
        for item in sorted(found, key=lambda item: item.saved, reverse=True)
    ]
    head = ("name", "step", "attempt", "files", "size", "saved", "age")
    newest = (result.get("checkpoint") or {}).get("name")
    words = (
        f"Complete ones, the newest first; a training would go on from {plain(newest)}." if newest else "Complete ones."
    )
    numbers = (1, 3, 4, 6)
    parts = [table(words, head, rows[:OPEN], numeric=numbers)]
    if len(rows) > OPEN:
        older = f"{len(rows) - OPEN} older ones"
        parts.append(tag("details", tag("summary", older), table(older, head, rows[OPEN:], numeric=numbers, hide=True)))
    return _section("Checkpoints", *parts)


def _last_lines(seen: Seen) -> Html:
    for attempt in reversed(seen.attempts()):
        if said := seen.lines(attempt, LINES):
            break
    else:
        return _section("Last lines", tag("p", "No node has written a line to the store."))
    parts = [
        tag(
            "details",
            tag("summary", f"Node {node}, the last {len(lines)} of {lines[-1].seq:,} lines"),
            _pre([f"{line_label(line)}{line.text}" for line in lines], tall=True),
            open="open" if len(said) <= 2 else None,
        )
        for node, lines in said.items()
    ]
    return _section("Last lines", tag("p", f"Of attempt {attempt}, by node.", class_="faint"), *parts)


# -------------------------------------------------------------------------------------------------------- configuration


def _configuration(run: Run, record: Mapping[str, Any]) -> Html:
    code, job = record.get("code") or {}, run.job
    wanted = job.at(run.provider_name).resources
    git = code.get("git") or {}
    origin = {**((record.get("layout") or {}).get("origin") or {}), **(record.get("origin") or {})}
    machine = [f"{wanted.instance_count} node{'s' if wanted.instance_count > 1 else ''}"]
    machine += [wanted.instance_type] if wanted.instance_type else []
    machine += [f"GPU {' or '.join(wanted.gpu)}"] if wanted.gpu else []
    rows = [
        ("job", job.name or ""),
        ("script", str(code.get("entry_point") or job.source.entry_point)),
        ("machines", ", ".join(machine)),
        ("provider", run.provider_name),
        ("limits", _limits(job.at(run.provider_name))),
        ("code", f"digest {code['digest']}" if code.get("digest") else ""),
        ("git", f"{git.get('commit') or 'no commit yet'}{', with changes' if git.get('dirty') else ''}" if git else ""),
        ("CI run", str(origin.get("ci_url") or origin.get("ci_run") or "")),
        ("submitted by", str(origin.get("principal") or "")),
        ("image digest", str(origin.get("image_digest") or "")),
        ("job digest", str(record.get("job_digest") or "")),
        ("cloudtrain", str(record.get("version") or "")),
    ]
    parts = [_facts("Configuration", [(name, plain(text)) for name, text in rows if text])]
    for name, value in (("The job", record.get("job")), ("Settings of the provider", record.get("settings"))):
        if value:
            parts.append(tag("details", tag("summary", name), _json(shareable(value))))
    return _section("Configuration", *parts)


def _limits(job: Job) -> str:
    words = [f"max_runtime {duration(job.max_runtime)}"]
    words += [f"max_wait {duration(job.max_wait)}"] if job.max_wait else []
    words += [f"max_cost {job.max_cost:.2f} USD"] if job.max_cost is not None else []
    words += [f"max_gpu_hours {job.max_gpu_hours:g}"] if job.max_gpu_hours is not None else []
    words.append(f"stall_timeout {duration(job.stall_timeout)}" if job.stall_timeout else "stall_timeout never")
    words.append(f"{job.retries} retr{'y' if job.retries == 1 else 'ies'}")
    return ", ".join(words)


def _json(value: Any) -> Html:
    return tag("pre", json.dumps(value, indent=2, ensure_ascii=False), class_="tall", tabindex=0)


def shareable(value: Any, name: str = "") -> Any:
    """A plain value as others may see it: without what is named like a secret, and what URLs carry of them.

    References (``env:TOKEN``) are no secrets, and stay.
    """
    if isinstance(value, Mapping):
        inside = name == "secrets"
        return {key: shareable(item, "" if inside else str(key)) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        flags = ["", *value[:-1]]  # a value may follow its flag: --token abc
        return [
            HIDDEN if isinstance(item, str) and _is_secret_flag(flag) else shareable(item, name)
            for flag, item in zip(flags, value, strict=True)
        ]
    if isinstance(value, str):
        if value and is_secret_name(name):
            return HIDDEN
        flag, equals, _ = value.partition("=")
        if equals and (_is_secret_flag(flag) or (name == "args" and is_secret_name(flag.lstrip("+~")))):
            return f"{flag}={HIDDEN}"
        return _URL.sub(lambda match: _USER.sub("", without_secrets(match[0])), scrubbed(value))
    return value


def _is_secret_flag(text: Any) -> bool:
    flag = isinstance(text, str) and re.fullmatch(r"--?[A-Za-z][A-Za-z0-9_.-]*", text)
    return bool(flag and is_secret_name(text))


# ---------------------------------------------------------------------------------------------------------------- links


def _links(run: Run, own: str) -> Html:
    rows: list[tuple[str, str]] = [
        ("run", _place(without_secrets(run.url))),
        ("store", _place(without_secrets(run.store.url))),
    ]
    if own:
        rows.append(("the platform's page" if own.startswith("http") else "the platform's files", _place(own)))
    commands = [f"cloudtrain {verb} {without_secrets(run.url)}" for verb in ("status", "logs", "pull")]
    return _section("Links", _facts("Links", rows), _pre(commands))


def _place(url: str) -> Html:
    """A link, where a browser could follow it; else the text. The platform's page names its account by its query."""
    if re.fullmatch(r"https?://[^\s]+", url):
        return tag("a", url, href=url, rel="noreferrer noopener")
    return tag("code", plain(url))


def _own_page(run: Run, result: Result) -> str:
    """Where the platform shows the run itself; empty when it does not, or does not say so soon."""
    native = result.get("native_id")
    if not native:
        return ""
    told: list[str] = []

    def ask() -> None:
        with contextlib.suppress(Exception):  # whatever it is, an address is all that is missing then
            told.append(run.provider.status(str(native)).url)

    asking = threading.Thread(target=ask, name="page", daemon=True)
    asking.start()
    asking.join(PAGE_SECONDS)
    return told[0] if told else ""
