"""The verbs that describe a job: submit and plan."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from ..errors import EXIT_CODES, AuthError, CloudtrainError, LostContactError, NotFoundError, SpecError
from ..estimator import log_line, ranks
from ..job import DEFAULT_MAX_RUNTIME, DEFAULT_STALL_TIMEOUT, Job
from ..values import parse_duration
from . import show
from .flags import JobFlags, given_flags, job_of
from .screen import Screen
from .tables import pairs
from .verbs import Json, Ours, WaitTimeout, after, left, pull_into, stopped
from .verbs import Verbose as SayMover
from .where import HERE, At, OnSignal, Where, stoppable

if TYPE_CHECKING:
    from ..run import Run
    from ..submit import Plan

__all__ = [
    "NO_FLAGS", "Detach", "Flags", "Module", "Provider", "PullTo", "RunId", "Script", "Set", "carry_out", "plan",
    "say_limits", "say_price", "settings_pairs", "submit",
]  # fmt: skip

Script = Annotated[str | None, Parameter(help="script to run, or a job file (.toml, .json) that flags override")]
Module = Annotated[str | None, Parameter(name="-m", help="run a module: -m pkg.mod")]
Flags = Annotated[JobFlags, Parameter(name="*")]
Provider = Annotated[
    str | None, Parameter(help="where to run; a list: in order, docs/fallback.md; default: setting provider, local")
]
RunId = Annotated[str | None, Parameter(help="id of the run; default: time, name and 4 hex digits")]
Set = Annotated[list[str] | None, Parameter(name="--set", help="a setting: KEY=VALUE; repeatable", negative="")]
Detach = Annotated[bool, Parameter(negative="", show_default=False, help="return as soon as the run is submitted")]
PullTo = Annotated[str | None, Parameter(name="--pull", help="folder to copy the results to at the end")]
PlanFile = Annotated[str | None, Parameter(name="--plan", help="send this saved `plan --json`")]
Yes = Annotated[
    bool,
    Parameter(
        name=("--yes", "-y"), negative="", show_default=False, help="send without a question, whatever it may cost"
    ),
]
Verbose = Annotated[bool, Parameter(negative="", show_default=False, help="list every file")]

NO_FLAGS = JobFlags()


def submit(
    script: Script = None,
    /,
    *,
    module: Module = None,
    flags: Flags = NO_FLAGS,
    provider: Provider = None,
    at: At = HERE,
    run_id: RunId = None,
    settings: Set = None,
    plan_file: PlanFile = None,
    yes: Yes = False,
    detach: Detach = False,
    wait_timeout: WaitTimeout = None,
    on_signal: OnSignal = "detach",
    pull_to: PullTo = None,
    verbose: SayMover = False,
    json: Json = False,
    args: Ours[list[str] | None] = None,
    screen: Ours[Screen],
) -> int:
    """Stage, record and send; unless detached, follow the logs to the end and exit by the outcome."""
    cwd = Path.cwd()
    chosen = at.settings(overrides=settings_pairs(settings), cwd=cwd, provider=provider)
    seconds = parse_duration(wait_timeout, field="wait_timeout") if wait_timeout is not None else None
    if plan_file is not None:
        _nothing_but_a_plan(script, module, flags, args, provider, run_id)
        from ..submit import load_plan

        planned = load_plan(Path(plan_file), settings=chosen, cwd=cwd)
    else:
        job = job_of(script, module, flags, args, cwd=cwd)
        from ..fallback import make_plan

        planned = make_plan(job, settings=chosen, run_id=run_id, cwd=cwd)
    at = _found_by(planned.store.url, at, chosen.store if plan_file is None else planned.store.url, cwd)
    above = None if yes or json else chosen.confirm_above_usd
    return carry_out(planned, at, seconds, on_signal, detach, pull_to, verbose, json, screen, ask_above=above)


def carry_out(
    planned: Plan,
    at: Where,
    timeout: float | None,
    on_signal: str,
    detach: bool,
    pull_to: str | None,
    verbose: bool,
    json: bool,
    screen: Screen,
    *,
    ask_above: float | None = None,
) -> int:
    """Send the plan and, unless detached, follow it to its end; ``at`` is where the next commands find its store.

    ``ask_above``: ask on a terminal before a run is sent that may cost more US dollars; None: never ask.
    """
    screen.about = {"run": planned.run_url, "run_id": planned.run_id, "provider": planned.provider_name}
    say_limits(planned.job, screen)
    say_price(planned, screen)
    say_advice(planned, screen)
    for number, further in enumerate(planned.further, 2):
        screen.talk(show.place(number, further.document()))
        say_advice(further, screen)
    if ask_above is not None and _is_declined(planned, ask_above, screen):
        screen.talk("nothing was sent")
        return EXIT_CODES["cancelled"]
    with stoppable():
        try:
            run = _send(planned, verbose, screen)
        except CloudtrainError as exc:
            if exc.refusals:
                screen.about["refusals"] = [dict(item) for item in exc.refusals]
            raise
        except KeyboardInterrupt:
            if on_signal != "cancel":
                raise
            return _cancel(planned, at, json, screen)
        if detach:
            return _detached(run, at, json, screen)
        try:
            return _follow(run, at, timeout, on_signal, pull_to, json, screen)
        except KeyboardInterrupt:  # it came between two steps of waiting
            return stopped(run, run.run_id, at, on_signal, json, screen)


def _is_declined(planned: Plan, above: float, screen: Screen) -> bool:
    """Return whether a person at a terminal does not want a run that may cost more than ``above`` US dollars.

    Without a terminal, or without a known price, there is no question.
    """
    prices = [price for item in (planned, *planned.further) if (price := item.price()) is not None]
    most = max((price["usd_for_hard_limit"] for price in prices), default=0.0)
    if most <= above or not (sys.stdin is not None and sys.stdin.isatty() and screen.err.isatty()):
        return False
    screen.err.write(f"{planned.run_id} costs at most {most:,.0f} USD. Submit? [y/N] ")
    screen.err.flush()
    try:
        return sys.stdin.readline().strip().lower() not in ("y", "yes")
    except KeyboardInterrupt:
        screen.talk("")
        return True


def _send(planned: Plan, verbose: bool, screen: Screen) -> Run:
    from ..fallback import submit as send

    with screen.progress() as say:
        moved = show.Moved("uploaded", say if screen.interactive else None)
        run = send(planned, environ=os.environ, progress=say, moved=moved, note=screen.talk)
    name = planned.provider_name
    if planned.further:  # it may have come to another place
        name = run.provider_name
        screen.about |= {"run": run.url, "provider": name}
    screen.talk(show.sent(planned.run_id, name, run.url, run.staged, pace=moved.pace, verbose=verbose))
    return run


def _cancel(planned: Plan, at: Where, json: bool, screen: Screen) -> int:
    """A signal came while the job was being sent: stop what there is of it."""
    from ..submit import handle

    run = handle(planned)
    try:
        return stopped(run, run.run_id, at, "cancel", json, screen)
    except NotFoundError:
        code = EXIT_CODES["cancelled"]
        screen.talk("nothing was sent")
        if json:
            screen.emit({**screen.about, "error": "interrupted; nothing was sent", "exit_code": code})
        return code


def plan(
    script: Script = None,
    /,
    *,
    module: Module = None,
    flags: Flags = NO_FLAGS,
    provider: Provider = None,
    at: At = HERE,
    run_id: RunId = None,
    settings: Set = None,
    verbose: Verbose = False,
    json: Json = False,
    args: Ours[list[str] | None] = None,
    screen: Ours[Screen],
) -> int:
    """The files that would ship and why others not, sizes, digest, instance, limits, and the exact request."""
    cwd = Path.cwd()
    chosen = at.settings(overrides=settings_pairs(settings), cwd=cwd, provider=provider)
    job = job_of(script, module, flags, args, cwd=cwd)
    from ..fallback import make_plan

    planned = make_plan(job, settings=chosen, run_id=run_id, cwd=cwd, preview=True)
    document = planned.document()
    if json:
        screen.emit(document, indent=2)
    else:
        screen.data(show.plan_text(document, verbose=verbose))
    if run_id is None:
        screen.talk(f"run id {planned.run_id} stands in for the one that submit makes (--run-id)")
    say_limits(planned.job, screen)
    for text in (text for item in (planned, *planned.further) for text in item.warnings):
        screen.talk(f"warning: {text}")
    screen.talk("to send exactly this: add --json > plan.json, then cloudtrain submit --plan plan.json")
    return 0


def settings_pairs(texts: list[str] | None) -> dict[str, str]:
    """What ``--set`` was given, by key. Raises `SpecError` for what is not KEY=VALUE."""
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


def say_limits(job: Job, screen: Screen) -> None:
    """The limits that nobody chose, on one line."""
    words = []
    if job.max_runtime == DEFAULT_MAX_RUNTIME:
        words.append(show.max_runtime(job.max_runtime, is_default=True))
    if job.stall_timeout == DEFAULT_STALL_TIMEOUT:
        words.append(show.stall_timeout(job.stall_timeout, is_default=True))
    if words:
        screen.talk(f"limits: {', '.join(words)}")


def say_advice(planned: Plan, screen: Screen) -> None:
    """What a plan warns of, and what is good to know."""
    for text in planned.warnings:
        screen.talk(f"warning: {text}")
    for text in planned.notes:
        screen.talk(f"note: {text}")


def say_price(planned: Plan, screen: Screen) -> None:
    """The most that it may cost; nothing where this machine is the platform and has no price."""
    price, types = planned.price(), planned.request.instance_types
    if price is not None or types:
        screen.talk("price: " + show.price(price, types).removeprefix("price "))


def _found_by(store: str, at: Where, meant: str, cwd: Path) -> Where:
    """What the next commands need to find the store at the URL ``store``: none where they find it by themselves."""
    from ..disk import normalize

    found = Where(profile=at.profile).settings(cwd=cwd).store
    if meant == found or normalize(found, cwd=cwd) == store:
        return dataclasses.replace(at, store=None)
    return dataclasses.replace(at, store=at.store or store)


def _detached(run: Run, at: Where, json: bool, screen: Screen) -> int:
    screen.next(["logs", "-f", run.run_id], ["wait", run.run_id], ["cancel", run.run_id], where=at.flags)
    if json:
        ended = run.store.result(run.run_id)  # a run that was sent before
        state = ended["state"] if ended else "cancelled" if run.store.cancelled(run.run_id) else "pending"
        refusals = run.refusals(run.store.attempts(run.run_id)[-1:])
        told = {"refusals": refusals} if refusals else {}
        screen.emit({**screen.about, **_uploaded(run), **told, "state": state, "exit_code": 0})
    else:
        screen.data(run.url)
    return 0


def _follow(
    run: Run, at: Where, timeout: float | None, on_signal: str, pull_to: str | None, json: bool, screen: Screen
) -> int:
    """Log lines until the end, then the outcome; Ctrl-C leaves the run alone."""
    from ..fallback import Onward

    write = screen.talk if json else screen.data
    many = ranks(run.job) > 1
    try:
        result = run.wait(
            timeout=timeout,
            on_line=lambda line: write(log_line(line, many=many)),
            on_status=show.Changes(screen.talk),
            retry=Onward(run, screen.talk),
        )
    except KeyboardInterrupt:
        return stopped(run, run.run_id, at, on_signal, json, screen)
    except (AuthError, LostContactError) as exc:
        raise left(exc, run, run.run_id, at, screen) from None
    return _finish(run, result, at, pull_to, json, screen)


def _finish(run: Run, result: Mapping[str, Any], at: Where, pull_to: str | None, json: bool, screen: Screen) -> int:
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
    screen.next(*after(result, run.run_id, pulled=pull_to is not None), where=at.flags)
    if json:
        screen.emit({**result, **_uploaded(run), **extra})
    return code


def _uploaded(run: Run) -> dict[str, Any]:
    """What had to be uploaded to a remote store, in bytes, and by what."""
    return {"uploaded": dataclasses.asdict(run.staged)} if run.staged is not None and run.staged.mover else {}
