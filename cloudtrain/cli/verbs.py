"""The verbs about runs that exist: status, logs, wait, pull, cancel, list, reconcile, gc."""

from __future__ import annotations

import dataclasses
import json as json_
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from cyclopts import Parameter

from ..errors import EXIT_CODES, AuthError, LostContactError
from ..estimator import log_line, ranks
from ..provider import FINAL
from ..values import url_scheme
from ..verdict import CANCELLING
from . import show
from .screen import Screen
from .where import HERE, At, OnSignal, Where, stoppable, undisturbed

if TYPE_CHECKING:
    from ..run import Run

__all__ = [
    "after", "cancel", "gc", "left", "list_runs", "logs", "pull", "pull_into", "reconcile", "status", "stopped", "wait",
]  # fmt: skip

T = TypeVar("T")
#: A parameter that `cloudtrain.cli.parse` fills, no flag.
Ours = Annotated[T, Parameter(parse=False)]
Ref = Annotated[str, Parameter(help="URL of a run folder, or a run id in the store")]
Json = Annotated[bool, Parameter(negative="", show_default=False, help="one JSON object on stdout, all talk on stderr")]
JsonLines = Annotated[bool, Parameter(negative="", show_default=False, help="a JSON object for each line")]
Follow = Annotated[
    bool, Parameter(name=("--follow", "-f"), negative="", show_default=False, help="go on until the run ends")
]
What = Annotated[
    list[str] | None,
    Parameter(
        name=("--what", "--only"),
        negative="",
        show_default=False,
        help="some of checkpoints,artifacts,logs,metrics; checkpoints:latest, :best, :step=N or :all",
    ),
]
Verbose = Annotated[
    bool, Parameter(name=("--verbose", "-v"), negative="", show_default=False, help="say what moved the bytes")
]

WaitTimeout = Annotated[
    str | None,
    Parameter(name=("--wait-timeout", "--timeout"), help="wait no longer than that, then exit code 7: '2h'"),
]

EXIT_DETACHED = 7


def after(result: Mapping[str, Any], run: str, *, pulled: bool = False) -> list[list[str]]:
    """The next commands for a run that is over: its results first; of one that ended badly, the page about why."""
    pull, report = [] if pulled else [["pull", run]], [["report", run]]
    return [*(report + pull if result["exit_code"] else pull + report), ["logs", run]]


def status(run: Ref, /, *, at: At = HERE, json: Json = False, screen: Ours[Screen]) -> int:
    """State, reason, attempts and the newest complete checkpoint."""
    handle = _open(run, at, screen)
    result = handle.result()
    if json:
        screen.emit(result)
    else:
        screen.data(show.status_text(result))
    if result["state"] in FINAL:
        screen.next(*after(result, run), where=at.flags)
    else:
        cancel = [] if str(result["reason"]).startswith(CANCELLING) else [["cancel", run]]
        screen.next(["logs", "-f", run], ["wait", run], *cancel, where=at.flags)
    return 0


def logs(
    run: Ref,
    /,
    *,
    follow: Follow = False,
    node: Annotated[int | None, Parameter(help="lines of this node only")] = None,
    rank: Annotated[int | None, Parameter(help="lines of this global rank only")] = None,
    at: At = HERE,
    json: JsonLines = False,
    screen: Ours[Screen],
) -> int:
    """Every line of every node, each once, in order for each node."""
    handle = _open(run, at, screen)
    many = ranks(handle.job) > 1
    for line in handle.logs(follow=follow):
        if (node is None or line.node == node) and (rank is None or line.rank == rank):
            screen.data(
                json_.dumps(dataclasses.asdict(line), ensure_ascii=False) if json else log_line(line, many=many)
            )
    if not follow:
        screen.next(["logs", "-f", run], ["status", run], where=at.flags)
    return 0


def wait(
    run: Ref,
    /,
    *,
    timeout: WaitTimeout = None,
    on_signal: OnSignal = "detach",
    at: At = HERE,
    json: Json = False,
    screen: Ours[Screen],
) -> int:
    """Until the run has ended; its outcome is the exit code."""
    from ..fallback import Onward
    from ..values import parse_duration

    seconds = parse_duration(timeout, field="timeout") if timeout is not None else None
    with stoppable():
        handle: Run | None = None
        changes = show.Changes(screen.talk)
        try:
            handle = _open(run, at, screen)
            retry = Onward(handle, screen.talk)
            result = handle.wait(timeout=seconds, on_status=changes, retry=retry)
        except KeyboardInterrupt:
            if handle is None and on_signal != "cancel":
                raise
            with undisturbed():
                handle = handle or _open(run, at, screen)
            return stopped(handle, run, at, on_signal, json, screen)
        except (AuthError, LostContactError) as exc:
            if handle is None or not changes.heard:  # nothing was waited for: what is wrong was wrong before
                raise
            raise left(exc, handle, run, at, screen) from None
    screen.talk(show.outcome(result))
    screen.next(*after(result, run), where=at.flags)
    if json:
        screen.emit(result)
    else:
        screen.data(str(result["state"]))
    return int(result["exit_code"])


def stopped(run: Run, name: str, at: Where, on_signal: str, json: bool, screen: Screen) -> int:
    """A signal has ended the waiting for ``run``, called ``name``: leave it alone, or stop it too."""
    if on_signal == "cancel":
        screen.talk("\nstopping the run (--on-signal cancel)")
        with undisturbed():
            run.cancel()
            result = run.result()
        screen.next(["status", name], ["pull", name], where=at.flags)
        code = int(result["exit_code"]) if result["exit_code"] is not None else EXIT_CODES["cancelled"]
        if json:
            screen.emit({**result, "exit_code": code})
        return code
    screen.talk("\nno longer waiting; the run goes on")
    screen.next(["wait", name], ["logs", "-f", name], ["cancel", name], where=at.flags)
    if json:
        screen.emit({**screen.about, "error": "interrupted; the run goes on", "exit_code": EXIT_DETACHED})
    return EXIT_DETACHED


def left(exc: AuthError | LostContactError, run: Run, name: str, at: Where, screen: Screen) -> LostContactError:
    """The error of a client that can wait for ``run``, called ``name``, no longer: how to come back is said.

    Credentials that expire meanwhile are no failure of the run: it goes on.
    """
    screen.next(["wait", name], ["logs", "-f", name], ["status", name], where=at.flags)
    return exc if isinstance(exc, LostContactError) else LostContactError(f"{exc}; the run goes on: {run.url}")


def pull(
    run: Ref,
    folder: Annotated[str | None, Parameter(help="where to; default: ./<run id>")] = None,
    /,
    *,
    what: What = None,
    follow: Follow = False,
    at: At = HERE,
    verbose: Verbose = False,
    json: Json = False,
    screen: Ours[Screen],
) -> int:
    """Complete checkpoints, artifacts, logs and metrics, verified; what is there already is not copied again."""
    from ..pull import PULLED, parts

    parts(what or PULLED)
    handle = _open(run, at, screen)
    pulled = pull_into(handle, Path(folder or handle.run_id), screen, what=what, follow=follow, verbose=verbose)
    screen.next(["status", run], ["logs", run], where=at.flags)
    if json:
        screen.emit({**screen.about, **pulled, "exit_code": 0})
    else:
        screen.data(pulled["folder"])
    return 0


def cancel(
    run: Ref,
    /,
    *,
    wait: Annotated[bool, Parameter(negative="", show_default=False, help="until it has stopped")] = False,
    at: At = HERE,
    json: Json = False,
    screen: Ours[Screen],
) -> int:
    """Stop a run and forbid further attempts; also after the end, when it changes nothing."""
    handle = _open(run, at, screen)
    handle.cancel()
    if wait:
        handle.wait(on_status=show.Changes(screen.talk))
    result = handle.result()
    screen.next(["status", run], ["pull", run], where=at.flags)
    if json:
        screen.emit(result)
    else:
        screen.data(str(result["state"]) if wait or result["state"] != "running" else "cancelling")
    return 0


def list_runs(
    *,
    limit: Annotated[int, Parameter(show_default=False, help="runs on a page; default: 50")] = 50,
    everything: Annotated[
        bool, Parameter(name="--all", negative="", show_default=False, help="every run, on one page")
    ] = False,
    before: Annotated[str | None, Parameter(help="the page after this run, the last one of the page before")] = None,
    state: Annotated[
        list[str] | None, Parameter(negative="", help="runs in this state only, however many are read; repeatable")
    ] = None,
    since: Annotated[str | None, Parameter(help="runs of so long ago at most: '7d'")] = None,
    at: At = HERE,
    json: Json = False,
    screen: Ours[Screen],
) -> int:
    """One line a run, the newest first, a page at a time."""
    from ..listing import list_page
    from ..provider import STATES
    from ..values import choice_of, parse_duration

    for word in state or ():
        choice_of(word, (*STATES, "unknown"), "state")
    age = parse_duration(since, field="since") if since is not None else None
    settings = at.settings()
    page = list_page(
        settings.resolved(),
        settings,
        limit=None if everything else limit,
        before=before,
        states=state or (),
        since=None if age is None else time.time() - age,
    )
    runs = page.rows
    if json:
        screen.emit({"runs": runs, "next": page.next, "order": page.order})
    else:
        screen.data(show.table(runs))
    words = [*(["--limit", str(limit)] if limit != 50 else []), *[f"--state={word}" for word in state or ()]]
    words += [f"--since={since}"] if since is not None else []
    more = [["list", *words, "--before", page.next]] if page.next is not None else []
    if runs:
        newest = str(runs[0]["run_id"])
        screen.next(["status", newest], ["logs", "-f", newest], *more, where=at.flags)
    elif not (state or since or before):
        screen.talk("no runs here yet; to start one: cloudtrain submit train.py")
    return 0


def reconcile(
    target: Annotated[str | None, Parameter(help="a run, or the URL or path of a store; default: the store")] = None,
    /,
    *,
    at: At = HERE,
    json: Json = False,
    screen: Ours[Screen],
) -> int:
    """Once what a waiting client does all the time, for a run or for every run of a store that is not over."""
    from ..reconcile import reconcile as do

    settings = at.settings()
    rows = do(target, settings=settings, cwd=Path.cwd(), environ=os.environ, say=screen.talk)
    code = max((int(row["exit_code"]) for row in rows), default=0)
    for row in rows:
        if row["error"]:
            screen.talk(f"{'error' if row['exit_code'] else 'note'}: {row['run_id']}: {row['error']}")
    if json:
        screen.emit({"runs": rows, "exit_code": code})
    elif rows:
        screen.data(show.table(rows, ("run_id", "state", "category", "provider", "reason")))
    else:
        screen.talk("no run here that is not over")
    return code


def gc(
    target: Annotated[str | None, Parameter(help="URL or path of a store; default: the store")] = None,
    /,
    *,
    older_than: Annotated[str, Parameter(show_default=False, help="last written so long ago; default: 7d")] = "7d",
    delete: Annotated[
        bool, Parameter(negative="", show_default=False, help="remove it; else nothing is written")
    ] = False,
    at: At = HERE,
    json: Json = False,
    screen: Ours[Screen],
) -> int:
    """What no run.json of a store names (code, runtime, data) and what crashes left there, with sizes and ages."""
    from ..retention import collect_at
    from ..values import parse_duration

    seconds = parse_duration(older_than, field="older_than")
    settings = at.settings()
    found = collect_at(
        target or settings.store, older_than=seconds, delete=delete, settings=settings, cwd=Path.cwd(), say=screen.talk
    )
    if json:
        screen.emit(show.collected(found))
    elif found.found:
        screen.data(show.leftovers(found))
    screen.talk(show.collected_line(found))
    if found.unreadable:
        screen.talk(f"note: nothing would be removed: run.json of {', '.join(found.unreadable)} cannot be read")
    elif found.found and not delete:
        screen.next(["gc", *([target] if target else []), "--older-than", older_than, "--delete"], where=at.flags)
    return 0


def pull_into(
    run: Run,
    folder: Path,
    screen: Screen,
    *,
    what: list[str] | None = None,
    follow: bool = False,
    verbose: bool = False,
) -> dict[str, Any]:
    """Copy ``what`` (None: all) to ``folder`` and say so; the report as JSON."""
    from ..pull import PULLED

    with screen.progress() as say:
        moved = show.Moved("pulled", say if screen.interactive else None)
        report = run.pull(
            folder,
            what=what or PULLED,
            follow=follow,
            on_pull=lambda report: screen.talk(show.came(report)),
            progress=moved,
        )
    pulled = {**dataclasses.asdict(report), "folder": str(folder)}
    screen.talk(show.pulled(pulled, pace="" if follow else moved.pace, verbose=verbose))
    if report.missing:
        screen.talk(f"note: no checkpoint was {' or '.join(report.missing)}")
    return pulled


def _open(run: str, at: Where, screen: Screen) -> Run:
    from ..run import open_run

    settings = at.settings()
    place = settings.store if url_scheme(run) else settings.resolved()
    handle = open_run(settings.resolved(run), store_url=place, cwd=Path.cwd(), settings=settings)
    screen.about = {"run": handle.url, "run_id": handle.run_id}
    return handle
