"""The verbs about runs that exist: status, logs, wait, pull, cancel, list, reconcile, gc."""

from __future__ import annotations

import dataclasses
import json as json_
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from cyclopts import Parameter

from ..estimator import log_line, ranks
from ..provider import FINAL
from ..settings import Settings
from ..values import url_scheme
from . import show
from .screen import Screen

if TYPE_CHECKING:
    from ..run import Run

__all__ = ["cancel", "gc", "list_runs", "logs", "pull", "pull_into", "reconcile", "status", "wait"]

T = TypeVar("T")
#: A parameter that `cloudtrain.cli.parse` fills, no flag.
Ours = Annotated[T, Parameter(parse=False)]
Ref = Annotated[str, Parameter(help="URL of a run folder, or a run id in the store")]
Store = Annotated[str | None, Parameter(help="URL under which runs live; default: setting store, ./.cloudtrain")]
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

EXIT_DETACHED = 7


def status(run: Ref, /, *, store: Store = None, json: Json = False, screen: Ours[Screen]) -> int:
    """State, reason, attempts and the newest complete checkpoint."""
    handle = _open(run, store, screen)
    result = handle.result()
    if json:
        screen.emit(result)
    else:
        screen.data(show.status_text(result))
    if result["state"] in FINAL:
        screen.next(["logs", run], ["pull", run], store=store)
    else:
        screen.next(["logs", "-f", run], ["wait", run], ["cancel", run], store=store)
    return 0


def logs(
    run: Ref,
    /,
    *,
    follow: Follow = False,
    node: Annotated[int | None, Parameter(help="lines of this node only")] = None,
    rank: Annotated[int | None, Parameter(help="lines of this global rank only")] = None,
    store: Store = None,
    json: JsonLines = False,
    screen: Ours[Screen],
) -> int:
    """Every line of every node, each once, in order for each node."""
    handle = _open(run, store, screen)
    many = ranks(handle.job) > 1
    for line in handle.logs(follow=follow):
        if (node is None or line.node == node) and (rank is None or line.rank == rank):
            screen.data(
                json_.dumps(dataclasses.asdict(line), ensure_ascii=False) if json else log_line(line, many=many)
            )
    if not follow:
        screen.next(["logs", "-f", run], ["status", run], store=store)
    return 0


def wait(
    run: Ref,
    /,
    *,
    timeout: Annotated[str | None, Parameter(help="give up after so long, with exit code 7: '2h'")] = None,
    store: Store = None,
    json: Json = False,
    screen: Ours[Screen],
) -> int:
    """Until the run has ended; its outcome is the exit code."""
    from ..submit import Retry
    from ..values import parse_duration

    seconds = parse_duration(timeout, field="timeout") if timeout is not None else None
    handle = _open(run, store, screen)
    try:
        result = handle.wait(timeout=seconds, on_status=show.Changes(screen.talk), retry=Retry(handle, screen.talk))
    except KeyboardInterrupt:
        screen.talk("\nno longer waiting; the run goes on")
        screen.next(["wait", run], ["logs", "-f", run], ["cancel", run], store=store)
        if json:
            screen.emit({**screen.about, "error": "interrupted; the run goes on", "exit_code": EXIT_DETACHED})
        return EXIT_DETACHED
    screen.talk(show.outcome(result))
    screen.next(["pull", run], ["logs", run], store=store)
    if json:
        screen.emit(result)
    else:
        screen.data(str(result["state"]))
    return int(result["exit_code"])


def pull(
    run: Ref,
    folder: Annotated[str | None, Parameter(help="where to; default: ./<run id>")] = None,
    /,
    *,
    what: What = None,
    follow: Follow = False,
    store: Store = None,
    verbose: Verbose = False,
    json: Json = False,
    screen: Ours[Screen],
) -> int:
    """Complete checkpoints, artifacts, logs and metrics, verified; what is there already is not copied again."""
    from ..pull import PULLED, parts

    parts(what or PULLED)
    handle = _open(run, store, screen)
    pulled = pull_into(handle, Path(folder or handle.run_id), screen, what=what, follow=follow, verbose=verbose)
    screen.next(["status", run], ["logs", run], store=store)
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
    store: Store = None,
    json: Json = False,
    screen: Ours[Screen],
) -> int:
    """Stop a run and forbid further attempts; also after the end, when it changes nothing."""
    handle = _open(run, store, screen)
    handle.cancel()
    if wait:
        handle.wait(on_status=show.Changes(screen.talk))
    result = handle.result()
    screen.next(["status", run], ["pull", run], store=store)
    if json:
        screen.emit(result)
    else:
        screen.data(str(result["state"]) if wait or result["state"] != "running" else "cancelling")
    return 0


def list_runs(*, store: Store = None, json: Json = False, screen: Ours[Screen]) -> int:
    """One line a run, the newest first."""
    from ..listing import list_runs as runs_of

    settings = Settings.load(store=store)
    runs = runs_of(settings.resolved(), settings)
    if json:
        screen.emit({"runs": runs})
    else:
        screen.data(show.table(runs))
    if runs:
        screen.next(["status", str(runs[0]["run_id"])], ["logs", "-f", str(runs[0]["run_id"])], store=store)
    else:
        screen.talk("no runs here yet; to start one: cloudtrain submit train.py")
    return 0


def reconcile(
    target: Annotated[str | None, Parameter(help="a run, or the URL or path of a store; default: the store")] = None,
    /,
    *,
    store: Store = None,
    json: Json = False,
    screen: Ours[Screen],
) -> int:
    """Once what a waiting client does all the time, for a run or for every run of a store that is not over."""
    from ..reconcile import reconcile as do

    settings = Settings.load(store=store)
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
    store: Store = None,
    json: Json = False,
    screen: Ours[Screen],
) -> int:
    """What no run.json of a store names (code, runtime, data) and what crashes left there, with sizes and ages."""
    from ..retention import collect_at
    from ..values import parse_duration

    seconds = parse_duration(older_than, field="older_than")
    settings = Settings.load(store=store)
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
        screen.next(["gc", *([target] if target else []), "--older-than", older_than, "--delete"], store=store)
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


def _open(run: str, store: str | None, screen: Screen) -> Run:
    from ..run import open_run

    settings = Settings.load(store=store)
    place = settings.store if url_scheme(run) else settings.resolved()
    handle = open_run(settings.resolved(run), store_url=place, cwd=Path.cwd(), settings=settings)
    screen.about = {"run": handle.url, "run_id": handle.run_id}
    return handle
