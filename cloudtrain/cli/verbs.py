"""The verbs about a run that exists: status, logs, wait, pull, cancel, list."""

from __future__ import annotations

import dataclasses
import json as json_
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from cyclopts import Parameter

from ..errors import SpecError
from ..estimator import log_line, ranks
from ..provider import FINAL
from ..settings import Settings
from . import show
from .screen import Screen

if TYPE_CHECKING:
    from ..run import Run

__all__ = ["cancel", "list_runs", "logs", "pull", "pull_into", "status", "wait"]

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
Only = Annotated[
    list[str] | None,
    Parameter(negative="", show_default=False, help="checkpoints,artifacts,logs,metrics: some of them"),
]

PARTS = ("checkpoints", "artifacts", "logs", "metrics")
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
    from ..values import parse_duration

    seconds = parse_duration(timeout, field="timeout") if timeout is not None else None
    handle = _open(run, store, screen)
    try:
        result = handle.wait(timeout=seconds, on_status=show.Changes(screen.talk))
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
    only: Only = None,
    store: Store = None,
    json: Json = False,
    screen: Ours[Screen],
) -> int:
    """Complete checkpoints, artifacts, logs and metrics, verified; what is there already is not copied again."""
    what = parts_of(only)
    handle = _open(run, store, screen)
    pulled = pull_into(handle, Path(folder or handle.run_id), what, screen)
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
    from ..run import list_runs as runs_of

    runs = runs_of(Settings.load(store=store).store)
    if json:
        screen.emit({"runs": runs})
    else:
        screen.data(show.table(runs))
    if runs:
        screen.next(["status", str(runs[0]["run_id"])], ["logs", "-f", str(runs[0]["run_id"])], store=store)
    else:
        screen.talk("no runs here yet; to start one: cloudtrain submit train.py")
    return 0


def parts_of(only: Sequence[str] | None) -> tuple[str, ...] | None:
    """The parts that ``--only`` names, None for all."""
    from ..values import nearest

    names = tuple(name.strip() for text in only or () for name in text.split(","))
    for name in names:
        if name not in PARTS:
            raise SpecError(f"{name!r} is none of {', '.join(PARTS)}{nearest(name, PARTS)}", field="only")
    return names or None


def pull_into(run: Run, folder: Path, what: tuple[str, ...] | None, screen: Screen) -> dict[str, Any]:
    """Copy ``what`` (None: all) to ``folder`` and say so; the report as JSON."""
    with screen.progress() as say:
        report = run.pull(folder, what=what or PARTS, progress=show.Moved(say) if screen.interactive else None)
    pulled = {**dataclasses.asdict(report), "folder": str(folder)}
    screen.talk(show.pulled(pulled))
    return pulled


def _open(run: str, store: str | None, screen: Screen) -> Run:
    from ..run import open_run

    handle = open_run(run, store_url=Settings.load(store=store).store, cwd=Path.cwd())
    screen.about = {"run": handle.url, "run_id": handle.run_id}
    return handle
