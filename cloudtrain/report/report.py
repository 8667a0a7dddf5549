"""One HTML page about one run, that opens offline: curves, attempts, cost, configuration, the failure, the last lines.

Everything on it comes from the run's records and from what its nodes have left in the store. The report asks the
platform for the state of a run that is not over, and once for the address of its own page.
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

from ..errors import scrubbed
from ..provider_api.protocol import FINAL
from ..runs.log_order import line_label
from ..runs.outcome import iso_time, unix_time
from ..runs.run import Run
from ..runs.summary import cost_text, nodes_text, size_text
from ..runs.warnings import is_secret_name
from ..runtime.checkpoint_model import Checkpoint
from ..storage.timings import CLIENT_TIMINGS
from ..validate import duration, without_secrets
from .curves import Curve, curves
from .live_data import LiveRunReader, printable
from .markup import Html, figure, html_table, page, quantity, save_page, tag
from .usage import usage_curves

LINES = 40  # last lines of the failing rank, and of each node
OPEN = 5  # checkpoints that are listed at once, the newest; the others are folded away
CURVES = 24  # curves that are drawn, at most; the others are named
HIDDEN = "(hidden: its name is that of a secret)"
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s\"'<>]+")
_USER = re.compile(r"(?<=https://)[^/@]+@|(?<=http://)[^/@]+@", re.IGNORECASE)
"""The user of a URL, which may be a token. Elsewhere (``abfs://container@account``) it is a part of the address."""

Result = Mapping[str, Any]
Facts = Sequence[tuple[str, str]]


def report(run: Run, result: Result, *, clock: Callable[[], float] = time.time) -> Html:
    """Return the page of a run whose `Run.result` is ``result``. Raises `StorageError`."""
    record, seen, now = run.record, LiveRunReader(run.store, run.run_id), clock()
    rows = seen.metrics()
    drawn, busy = curves(rows), usage_curves(seen.usage())
    request = run.store.attempt_request(run.run_id, 0)
    rehearsal = request.body if request is not None and "differences" in request.body else {}
    free = request is not None and not request.instance_types
    found = run.store.checkpoints(run.run_id) + run.store.direct(run.run_id)
    different = [tag("li", printable(str(text))) for text in rehearsal.get("differences", ())]
    target = str(rehearsal.get("target", ""))
    body = [
        _head(result, record, target, now),
        _section("Summary", _facts("Summary", _summary(result, drawn, free, now))),
        _section(f"Other than on {target}", tag("ul", *different)) if rehearsal else None,
        _failure(result, seen),
        _section("Curves", *_curves(drawn, {attempt: len(some) for attempt, some in rows.items()}, result)),
        _section("Busy or idle", tag("div", *map(figure, busy), class_="charts")) if busy else None,
        _section("Attempts", _attempts(result, now)),
        _section("Checkpoints", *_checkpoints(found, (result.get("checkpoint") or {}).get("name"), now)),
        _section("Last lines", *_last_lines(seen)),
        _section("Configuration", *_configuration(run, record)),
        _section("Links", *_links(run, _own_page(run, result))),
    ]
    return page(f"{result['state']}: {run.run_id}", tag("main", *body))


def write(run: Run, path: Path) -> tuple[Path, dict[str, Any]]:
    """Write the page to ``path``, a file or a folder. Return the file, and the run's result.

    Raises `SpecError` when there is no folder to write it to, and `StorageError`.
    """
    result = run.result()
    return save_page(report(run, result), path, run.run_id), result


# ---------------------------------------------------------------------------------------------------------------- parts


def _section(title: str, *children: Html) -> Html:
    name = title.lower().replace(" ", "-")
    return tag("section", tag("h2", title, id=name), *children, aria_labelledby=name)


def _facts(caption: str, rows: Facts) -> Html:
    shown = [(name, printable(text)) for name, text in rows if text]
    return tag("div", html_table(caption, ("what", "value"), shown, hide=True), class_="facts")


def _pre(text: str, *, tall: bool = False) -> Html:
    return tag("pre", text, class_="tall" if tall else None, tabindex=0)


def _lines(lines: Sequence[str]) -> Html:
    return _pre("\n".join(map(printable, lines)), tall=True)


def _faint(text: str) -> Html:
    return tag("p", text, class_="faint")


def _words(row: Mapping[str, Any], **forms: str | Callable[[Any], str]) -> str:
    """Join what a row says: by name the format of its value; a name that is missing or null is left out."""
    made = [
        form.format(row[name]) if isinstance(form, str) else form(row[name])
        for name, form in forms.items()
        if row.get(name) is not None
    ]
    return ", ".join(filter(None, made))


def _when(seconds: float) -> str:
    """Return Unix seconds as people write them: ``2026-11-22 18:05:09 UTC``."""
    return f"{(iso_time(seconds) or '').partition('.')[0].replace('T', ' ')} UTC"


def _head(result: Result, record: Mapping[str, Any], rehearsal: str, now: float) -> Html:
    state, category, created = str(result["state"]), result.get("category"), record.get("created")
    named = f"{state} ({category})" if category and category != state else state
    when = f"submitted {_when(created)}, " if isinstance(created, (int, float)) else ""
    known = state if state in (*FINAL, "running") else "waiting"
    where = f"rehearsal of {rehearsal} on this machine" if rehearsal else result["provider"]
    return tag(
        "header",
        tag("h1", tag("span", named, class_=f"state {known}"), " ", str(result["run_id"])),
        tag("p", printable(str(result["reason"])), class_="reason") if result.get("reason") else None,
        _faint(f"{where}, {when}this page written {_when(now)}"),
        None if state in FINAL else _faint("The run continues: this page shows its state at that time."),
    )


def _summary(result: Result, drawn: Sequence[Curve], free: bool, now: float) -> Facts:
    attempts = result.get("attempts") or []
    rows = [("state", _words(result, state="{}", exit_code="exit code {}")), ("time", _took(attempts, result, now))]
    again = []
    for key, form in (("steps", lambda steps: f"{quantity(steps)} steps"), ("seconds", duration)):
        lost = [float(row["lost"][key]) for row in attempts if (row.get("lost") or {}).get(key) is not None]
        again += [form(sum(lost))] if lost else []
    count = str(len(attempts) or "none has started")
    rows.append(("attempts", f"{count}, {' and '.join(again)} done again" if again else count))
    if steps := [x for curve in drawn if curve.axis == "step" for x, _ in curve.points]:
        rows.append(("last step", quantity(max(steps))))
    for curve in drawn:
        if curve.name == "loss" and curve.history:
            x, low = min(curve.history, key=lambda point: point[1])
            last = quantity(curve.history[-1][1])
            rows.append(("loss", f"{last} at the end, lowest {quantity(low)} at {curve.axis} {quantity(x)}"))
    found = result.get("checkpoint")
    rows.append(("newest checkpoint", _newest(found) if found else "none complete"))
    cost = cost_text(result.get("cost") or {})
    return [*rows, ("cost", cost or ("free, this machine" if free else "the platform does not report it"))]


def _took(attempts: Sequence[Mapping[str, Any]], result: Result, now: float) -> str:
    begins, ends = (
        [at for row in attempts if (at := unix_time(row.get(name))) is not None] for name in ("started", "ended")
    )
    if not begins:
        return ""
    begin = min(begins)
    if result["state"] not in FINAL:
        return f"{duration(now - begin)} so far, from {_when(begin)}"
    return f"{duration(max(ends) - begin)}, {_when(begin)} to {_when(max(ends))}" if ends else f"started {_when(begin)}"


def _newest(found: Mapping[str, Any]) -> str:
    return _words(
        found,
        name="{}",
        step=lambda step: "" if re.search(rf"(?<!\d){step}(?!\d)", str(found["name"])) else f"step {step}",
        age_s=lambda seconds: f"{duration(seconds)} old",
        committed=lambda text: f"complete since {_when(at)}" if (at := unix_time(text)) is not None else "",
    )


def _failure(result: Result, seen: LiveRunReader) -> Html | None:
    failure, attempts = result.get("failure"), result.get("attempts") or []
    if not failure:
        return None
    rank, node = failure.get("rank"), failure.get("node")
    rows = [
        ("attempt", str(attempts[-1]["number"]) if attempts else ""),
        ("node", _words(failure, node="{}")),
        ("rank", _words(failure, rank="{}")),
        ("exception", str(failure.get("exception") or "").strip().replace("\n", " ")),
        ("place", f"{failure['file']}{_words(failure, line=':{}')}" if failure.get("file") else ""),
        ("exit code of the process", _words(failure, process_exit_code="{}")),
    ]
    parts = [_facts("Where it failed", rows)]
    if failure.get("traceback"):
        trace = map(printable, str(failure["traceback"]).rstrip().split("\n"))
        parts += [tag("h4", "Traceback"), _pre("\n".join(trace))]
    if attempts and rank is not None:
        ranks = seen.lines(str(attempts[-1]["number"]), LINES, keep=lambda line: line.rank == rank)
        if lines := [line.text for at, some in ranks.items() if node in (None, at) for line in some]:
            parts += [tag("h4", f"Last lines of rank {rank}"), _lines(lines)]
    return _section("Failure", *parts)


def _curves(drawn: Sequence[Curve], counts: Mapping[str, int], result: Result) -> list[Html]:
    total = f"{sum(counts.values()):,}"
    if not counts:
        why = "No node has written any metrics" + ("." if result["state"] in FINAL else " yet.")
        how = "A script does so with cloudtrain.runtime.log_metrics; submit --metric reads them from what it prints."
        return [tag("p", f"{why} {how}")]
    if not drawn:
        return [tag("p", f"The metrics have {total} rows, and no number in them.")]
    words = f"{total} rows of metrics."
    if len(counts) > 1:
        each = ", ".join(f"{count:,} of attempt {attempt}" for attempt, count in counts.items())
        words = f"{total} rows of metrics" + (f": {each}." if len(counts) <= 3 else f" of {len(counts)} attempts.")
        words += " Each attempt begins at an upright line; what a later one did again is shaded."
    parts = [_faint(words), tag("div", *map(figure, drawn[:CURVES]), class_="charts")]
    rest = ", ".join(printable(curve.name) for curve in drawn[CURVES:])
    return [*parts, *([tag("p", f"Not drawn: {rest}.")] if rest else [])]


def _attempts(result: Result, now: float) -> Html:
    attempts, rows = result.get("attempts") or [], []
    if not attempts:
        return tag("p", "None has started.")
    for row in attempts:
        start, end, last = unix_time(row.get("started")), unix_time(row.get("ended")), row is attempts[-1]
        so_far = start and last and result["state"] not in FINAL
        took = duration(end - start) if start and end else f"{duration(now - start)} so far" if start and so_far else ""
        why = printable(str(row.get("reason") or (result["state"] if last else "")))
        rows.append(
            [
                str(row["number"]),
                _when(start) if start else "",
                took,
                printable(str(row.get("resumed_from") or "the beginning")),
                f"{row['category']}: {why}" if row.get("category") and row["category"] not in why else why,
                _words(row, node="node {}", rank="rank {}"),
                _words(row.get("lost") or {}, steps=lambda steps: f"{quantity(steps)} steps", seconds="{:.0f} s"),
            ]
        )
    head = ("attempt", "started", "took", "started from", "how it ended", "where", "lost, done again")
    kept = [i for i in range(len(head)) if i < 5 or any(row[i] for row in rows)]  # a good run has no more
    shown = [[row[i] for i in kept] for row in rows]
    return html_table("Attempts, and what each one lost", [head[i] for i in kept], shown, hide=True)


def _checkpoints(found: Sequence[Checkpoint], newest: str | None, now: float) -> list[Html]:
    if not found:
        return [tag("p", "None is complete.")]
    rows = [
        [
            printable(item.name),
            quantity(item.step) if item.step is not None else "",
            item.attempt or "written by the script itself",
            f"{len(item.files):,}",
            size_text(item.bytes),
            _when(item.saved),
            duration(now - item.saved),
        ]
        for item in sorted(found, key=lambda item: item.saved, reverse=True)
    ]
    head, numbers = ("name", "step", "attempt", "files", "size", "saved", "age"), (1, 3, 4, 6)
    words = f"Complete ones, the newest first; a training would resume from {printable(newest)}." if newest else ""
    parts = [html_table(words or "Complete ones.", head, rows[:OPEN], numeric=numbers)]
    if len(rows) > OPEN:
        older = f"{len(rows) - OPEN} older ones"
        parts.append(
            tag("details", tag("summary", older), html_table(older, head, rows[OPEN:], numeric=numbers, hide=True))
        )
    return parts


def _last_lines(seen: LiveRunReader) -> list[Html]:
    for attempt in reversed(seen.attempts()):
        if found := seen.lines(attempt, LINES):
            break
    else:
        return [tag("p", "No node has written a line to the store.")]
    parts = [
        tag(
            "details",
            tag("summary", f"Node {node}, the last {len(lines)} of {lines[-1].seq:,} lines"),
            _lines([f"{line_label(line)}{line.text}" for line in lines]),
            open="open" if len(found) <= 2 else None,
        )
        for node, lines in found.items()
    ]
    return [_faint(f"Of attempt {attempt}, by node."), *parts]


# -------------------------------------------------------------------------------------------------------- configuration


def _configuration(run: Run, record: Mapping[str, Any]) -> list[Html]:
    code, job = record.get("code") or {}, run.job.at(run.provider_name)
    git, wanted = code.get("git") or {}, job.resources
    origin = {**((record.get("layout") or {}).get("origin") or {}), **(record.get("origin") or {})}
    machine = [nodes_text(wanted.node_counts), wanted.instance_type or ""]
    machine += [f"GPU {' or '.join(wanted.gpu)}"] if wanted.gpu else []
    limits = _words(
        vars(job),
        max_runtime=lambda seconds: f"max_runtime {duration(seconds)}",
        max_wait=lambda seconds: f"max_wait {duration(seconds)}" if seconds else "",
        max_cost="max_cost {:.2f} USD",
        max_gpu_hours="max_gpu_hours {:g}",
    )
    stall = f"stall_timeout {duration(job.stall_timeout) if job.stall_timeout else 'never'}"
    retries = f"{job.retries} retr{'y' if job.retries == 1 else 'ies'}"
    rows = [
        ("job", job.name or ""),
        ("script", str(code.get("entry_point") or job.source.entry_point)),
        ("machines", ", ".join(filter(None, machine))),
        ("provider", run.provider_name),
        ("limits", f"{limits}, {stall}, {retries}"),
        ("code", f"digest {code['digest']}" if code.get("digest") else ""),
        ("git", f"{git.get('commit') or 'no commit yet'}{', with changes' if git.get('dirty') else ''}" if git else ""),
        ("CI run", str(origin.get("ci_url") or origin.get("ci_run") or "")),
        ("submitted by", str(origin.get("principal") or "")),
        ("image digest", str(origin.get("image_digest") or "")),
        ("job digest", str(record.get("job_digest") or "")),
        ("cloudtrain", str(record.get("version") or "")),
    ]
    folded = [
        tag(
            "details", tag("summary", name), _pre(json.dumps(shareable(value), indent=2, ensure_ascii=False), tall=True)
        )
        for name, value in (("The job", record.get("job")), ("Settings of the provider", record.get("settings")))
        if value
    ]
    return [_facts("Configuration", rows), *folded]


def shareable(value: Any, name: str = "") -> Any:
    """Return a plain value without the secrets that names and URLs give away. References (``env:TOKEN``) stay."""
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


def _links(run: Run, own: str) -> list[Html]:
    url, store = without_secrets(run.url), without_secrets(run.store.url)
    rows = [("run", _link(url)), ("store", _link(store))]
    if own:
        rows.append(("the platform's page" if own.startswith("http") else "the platform's files", _link(own)))
    commands = "\n".join(printable(f"cloudtrain {verb} {url}") for verb in ("status", "logs", "pull"))
    return [tag("div", html_table("Links", ("what", "value"), rows, hide=True), class_="facts"), _pre(commands)]


def _link(url: str) -> Html:
    """Return a link that a browser can follow, else the text. A platform's page may name its account in the query."""
    if re.fullmatch(r"https?://[^\s]+", url):
        return tag("a", url, href=url, rel="noreferrer noopener")
    return tag("code", printable(url))


def _own_page(run: Run, result: Result) -> str:
    """Return the address of the platform's page of the run; empty when it has none, or does not answer soon."""
    native = result.get("native_id")
    if not native:
        return ""
    found: list[str] = []

    def ask() -> None:
        with contextlib.suppress(Exception):  # any failure costs no more than the address
            found.append(run.provider.status(str(native)).url)

    asking = threading.Thread(target=ask, name="page", daemon=True)
    asking.start()
    asking.join(CLIENT_TIMINGS.native_page)
    return found[0] if found else ""
