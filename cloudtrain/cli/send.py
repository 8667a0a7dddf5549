"""The verbs that describe a job: submit and plan."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from ..errors import CloudtrainError, LostContactError, SpecError
from ..estimator import log_line, ranks
from ..job import DEFAULT_MAX_RUNTIME, DEFAULT_STALL_TIMEOUT, Job
from ..settings import Settings
from . import show
from .flags import JobFlags, given_flags, job_of
from .screen import Screen
from .tables import pairs
from .verbs import Json, Ours, Store, pull_into
from .verbs import Verbose as SayMover

if TYPE_CHECKING:
    from ..run import Run

__all__ = ["plan", "submit"]

Script = Annotated[str | None, Parameter(help="script to run, or a job file (.toml, .json) that flags override")]
Module = Annotated[str | None, Parameter(name="-m", help="run a module: -m pkg.mod")]
Flags = Annotated[JobFlags, Parameter(name="*")]
Provider = Annotated[str | None, Parameter(help="where to run; default: setting provider, local")]
RunId = Annotated[str | None, Parameter(help="id of the run; default: time, name and 4 hex digits")]
Set = Annotated[list[str] | None, Parameter(name="--set", help="a setting: KEY=VALUE; repeatable", negative="")]
Detach = Annotated[bool, Parameter(negative="", show_default=False, help="return as soon as the run is submitted")]
PullTo = Annotated[str | None, Parameter(name="--pull", help="folder to copy the results to at the end")]
PlanFile = Annotated[str | None, Parameter(name="--plan", help="send this saved `plan --json`")]
Verbose = Annotated[bool, Parameter(negative="", show_default=False, help="list every file")]

_NO_FLAGS = JobFlags()
EXIT_DETACHED = 7


def submit(
    script: Script = None,
    /,
    *,
    module: Module = None,
    flags: Flags = _NO_FLAGS,
    provider: Provider = None,
    store: Store = None,
    run_id: RunId = None,
    settings: Set = None,
    plan_file: PlanFile = None,
    detach: Detach = False,
    pull_to: PullTo = None,
    verbose: SayMover = False,
    json: Json = False,
    args: Ours[list[str] | None] = None,
    screen: Ours[Screen],
) -> int:
    """Stage, record and send; unless detached, follow the logs to the end and exit by the outcome."""
    cwd = Path.cwd()
    chosen = Settings.load(overrides=_settings(settings), cwd=cwd, provider=provider, store=store)
    if plan_file is not None:
        _nothing_but_a_plan(script, module, flags, args, provider, run_id)
        from ..submit import load_plan

        planned = load_plan(Path(plan_file), settings=chosen, cwd=cwd)
    else:
        job = job_of(script, module, flags, args, cwd=cwd)
        from ..submit import make_plan

        planned = make_plan(job, settings=chosen, provider=provider, run_id=run_id, cwd=cwd)
    from ..submit import submit as send

    screen.about = {"run": planned.run_url, "run_id": planned.run_id, "provider": planned.provider_name}
    _say_limits(planned.job, screen)
    for note in planned.request.notes:
        screen.talk(f"note: {note}")
    with screen.progress() as say:
        moved = show.Moved("uploaded", say if screen.interactive else None)
        run = send(planned, environ=os.environ, progress=say, moved=moved)
    screen.talk(show.sent(planned.run_id, planned.provider_name, run.url, run.staged, pace=moved.pace, verbose=verbose))
    store = _store_flag(run, store, chosen.store if plan_file is None else run.store.url, cwd)
    if detach:
        return _detached(run, store, json, screen)
    return _follow(run, store, pull_to, json, screen)


def plan(
    script: Script = None,
    /,
    *,
    module: Module = None,
    flags: Flags = _NO_FLAGS,
    provider: Provider = None,
    store: Store = None,
    run_id: RunId = None,
    settings: Set = None,
    verbose: Verbose = False,
    json: Json = False,
    args: Ours[list[str] | None] = None,
    screen: Ours[Screen],
) -> int:
    """The files that would ship and why others not, sizes, digest, instance, limits, and the exact request."""
    cwd = Path.cwd()
    chosen = Settings.load(overrides=_settings(settings), cwd=cwd, provider=provider, store=store)
    job = job_of(script, module, flags, args, cwd=cwd)
    from ..submit import make_plan

    planned = make_plan(job, settings=chosen, provider=provider, run_id=run_id, cwd=cwd, preview=True)
    document = planned.document()
    if json:
        screen.emit(document, indent=2)
    else:
        screen.data(show.plan_text(document, verbose=verbose))
    if run_id is None:
        screen.talk(f"run id {planned.run_id} stands in for the one that submit makes (--run-id)")
    _say_limits(planned.job, screen)
    screen.talk("to send exactly this: add --json > plan.json, then cloudtrain submit --plan plan.json")
    return 0


def _settings(texts: list[str] | None) -> dict[str, str]:
    return pairs("--set", texts or (), field="settings")


def _nothing_but_a_plan(
    script: str | None,
    module: str | None,
    flags: JobFlags,
    args: list[str] | None,
    provider: str | None,
    run_id: str | None,
) -> None:
    given = [*given_flags(flags)]
    given += [name for name, value in (("script", script), ("-m", module), ("args", args)) if value is not None]
    given += [name for name, value in (("provider", provider), ("run_id", run_id)) if value is not None]
    if given:
        raise SpecError(f"a saved plan is sent as it is; leave out {', '.join(given)}", field="plan")


def _say_limits(job: Job, screen: Screen) -> None:
    """The limits that nobody chose."""
    if job.max_runtime == DEFAULT_MAX_RUNTIME:
        screen.talk(show.max_runtime(job.max_runtime, is_default=True))
    if job.stall_timeout == DEFAULT_STALL_TIMEOUT:
        screen.talk(show.stall_timeout(job.stall_timeout, is_default=True))


def _store_flag(run: Run, given: str | None, meant: str, cwd: Path) -> str | None:
    """What ``--store`` the next commands need: none when they would find the run's store by themselves."""
    from ..disk import normalize

    found = Settings.load(cwd=cwd).store
    if meant == found or normalize(found, cwd=cwd) == run.store.url:
        return None
    return given or run.store.url


def _detached(run: Run, store: str | None, json: bool, screen: Screen) -> int:
    screen.next(["logs", "-f", run.run_id], ["wait", run.run_id], ["cancel", run.run_id], store=store)
    if json:
        screen.emit({**screen.about, **_uploaded(run), "state": "pending", "exit_code": 0})
    else:
        screen.data(run.url)
    return 0


def _follow(run: Run, store: str | None, pull_to: str | None, json: bool, screen: Screen) -> int:
    """Log lines until the end, then the outcome; Ctrl-C leaves the run alone."""
    from ..submit import Retry

    write = screen.talk if json else screen.data
    many = ranks(run.job) > 1
    try:
        result = run.wait(
            on_line=lambda line: write(log_line(line, many=many)),
            on_status=show.Changes(screen.talk),
            retry=Retry(run, screen.talk),
        )
    except KeyboardInterrupt:
        screen.talk("\ndetached; the run goes on")
        screen.next(["logs", "-f", run.run_id], ["wait", run.run_id], ["cancel", run.run_id], store=store)
        if json:
            screen.emit({**screen.about, "error": "interrupted; the run goes on", "exit_code": EXIT_DETACHED})
        return EXIT_DETACHED
    except LostContactError:
        screen.next(["status", run.run_id], ["logs", "-f", run.run_id], ["wait", run.run_id], store=store)
        raise
    return _finish(run, result, store, pull_to, json, screen)


def _finish(
    run: Run, result: Mapping[str, Any], store: str | None, pull_to: str | None, json: bool, screen: Screen
) -> int:
    code = int(result["exit_code"])
    extra: dict[str, Any] = {}
    screen.talk(show.outcome(result))
    if pull_to is not None:
        try:
            extra["pulled"] = pull_into(run, Path(pull_to), screen)
        except CloudtrainError as exc:  # the outcome of the run must still be told
            screen.talk(f"error: pull: {exc}")
            code = code or exc.exit_code
            extra |= {"error": f"pull: {exc}", "exit_code": code}
    first = [] if pull_to is not None else [["pull", run.run_id]]
    screen.next(*first, ["status", run.run_id], ["logs", run.run_id], store=store)
    if json:
        screen.emit({**result, **_uploaded(run), **extra})
    return code


def _uploaded(run: Run) -> dict[str, Any]:
    """What had to be uploaded to a remote store, in bytes, and by what."""
    return {"uploaded": dataclasses.asdict(run.staged)} if run.staged is not None and run.staged.mover else {}
