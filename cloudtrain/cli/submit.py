"""The verbs that describe a job: submit, rehearse and plan."""

from __future__ import annotations

import dataclasses
import os
import shlex
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from ..errors import EXIT_CODES, AuthError, CloudtrainError, LostContactError, NotFoundError, SpecError
from ..estimator import log_line, ranks
from ..job.job import DEFAULT_MAX_RUNTIME, DEFAULT_STALL_TIMEOUT, Job
from ..provider_api.protocol import FINAL
from ..runs.summary import fallback_text, ranking_rows, summary
from ..settings.settings import Settings
from ..storage.timings import CLIENT_TIMINGS
from ..validate import toml_loads
from . import format
from .common_flags import HERE, At, OnEnd, OnSignal, Where, many, run_on_end, stoppable, switch
from .flags import JobFlags, given_flags, job_of
from .key_value import pairs
from .output import Screen
from .runs import EXIT_DETACHED, Json, Ours, WaitTimeout, after, left, pull_into, say_end, seconds_of, stopped

if TYPE_CHECKING:
    from ..runs.run import Run
    from ..runs.submit import Plan

Script = Annotated[
    str | None,
    Parameter(name="SCRIPT|JOB", help="script to run, or a job file (.toml, .json) that flags override"),
]
Flags = Annotated[JobFlags, Parameter(name="*")]
Provider = Annotated[
    str | None,
    Parameter(
        name=("--provider", "-p"),
        metavar="NAME",
        help="where to run; auto: the cheapest of the fallback profiles; default: setting provider, local",
    ),
]
Fallback = Annotated[
    str | None,
    Parameter(metavar="PROFILES", help="profiles to try next, in order, if there are no machines; --fallback=: none"),
]
RunId = Annotated[str | None, Parameter(metavar="ID", help="id of the run; default: time, name and 4 hex digits")]
Set = Annotated[list[str] | None, many("a setting; repeatable", "KEY=VALUE", "--set")]
PlanFile = Annotated[str | None, Parameter(name="--plan", metavar="PATH", help="send this saved `plan --json`")]
Request = Annotated[bool, switch("on a terminal: the exact request, before the summary")]
Yes = Annotated[bool, switch("send without a question about the cost", "--yes", "-y")]
Verbose = Annotated[bool, switch("list every file")]
LocalStore = Annotated[
    str, Parameter(metavar="DIR", show_default=False, help="local folder for rehearsals; default: ./.cloudtrain")
]
Maps = Annotated[list[str] | None, many("a local path for a remote URL; repeatable", "URL=PATH", "--map")]
Image = Annotated[str, Parameter(metavar="IMAGE", help="local image to use instead of the job's", show_default=False)]
Values = Annotated[
    list[str] | None, many("a secret's value for the rehearsal; repeatable", "NAME=env:VARIABLE", "--secret-value")
]
Preempt = Annotated[list[str] | None, many("drill: the platform takes a machine back; repeatable", "node=N,after=WHEN")]
Kill = Annotated[list[str] | None, many("drill: a machine is lost without notice; repeatable", "node=N,after=WHEN")]

Shortage = Annotated[
    list[str] | None,
    many(
        "drill: node N is taken back, and the machines are left for the nodes before it; repeatable",
        "node=N,after=WHEN",
    ),
]

NO_FLAGS = JobFlags()
NO_RUN = "interrupted before anything was sent; there is no run"


@dataclass(frozen=True, kw_only=True)
class Description:
    """The flags of a verb that describes a job: the job, and where it runs."""

    module: Annotated[str | None, Parameter(name="-m", metavar="MODULE", help="run a module: -m pkg.mod")] = None
    flags: Flags = NO_FLAGS
    provider: Provider = None
    at: At = HERE
    fallback: Fallback = None
    run_id: RunId = None
    settings: Set = None

    def chosen(self) -> Settings:
        """Return the settings of this folder with these flags."""
        given = {"provider": self.provider, "fallback": self.fallback}
        return self.at.settings(overrides=settings_pairs(self.settings), cwd=Path.cwd(), **given)

    def job(self, script: str | None, args: list[str] | None) -> Job:
        """Return the job that ``script``, these flags and the words after ``--`` describe."""
        return job_of(script, self.module, self.flags, args, cwd=Path.cwd())


@dataclass(frozen=True, kw_only=True)
class Following:
    """The flags of a verb that sends a run and follows it."""

    detach: Annotated[bool, switch("return as soon as the run is submitted", "--detach", "-d")] = False
    wait_timeout: WaitTimeout = None
    on_signal: OnSignal = "detach"
    on_end: OnEnd = None
    pull_to: Annotated[
        str | None, Parameter(name="--pull", metavar="DIR", help="copy the results there at the end")
    ] = None
    json: Json = False


DescriptionFlags = Annotated[Description, Parameter(name="*")]
FollowingFlags = Annotated[Following, Parameter(name="*")]
NO_DESCRIPTION, NO_FOLLOWING = Description(), Following()


def submit(
    script: Script = None,
    /,
    *,
    description: DescriptionFlags = NO_DESCRIPTION,
    plan_file: PlanFile = None,
    yes: Yes = False,
    following: FollowingFlags = NO_FOLLOWING,
    args: Ours[list[str] | None] = None,
    screen: Ours[Screen],
) -> int:
    """Stage, record and send. Unless detached, follow the logs to the end and exit by the outcome."""
    cwd, chosen = Path.cwd(), description.chosen()
    screen.interrupted = NO_RUN
    if plan_file is not None:
        _nothing_but_a_plan(script, description, args)
        from ..runs.submit import load_plan

        planned = load_plan(Path(plan_file), settings=chosen, cwd=cwd)
    else:
        job = description.job(script, args)
        from ..runs.fallback import plan_with_fallbacks

        planned = plan_with_fallbacks(job, settings=chosen, run_id=description.run_id, cwd=cwd)
    at = _found_by(
        planned.store.url, description.at, planned.store.url if plan_file or planned.ranking else chosen.store, cwd
    )
    above = None if yes or screen.json else chosen.confirm_above_usd
    return _send_and_follow(planned, at, following, screen, ask_above=above)


def rehearse(
    script: Script = None,
    /,
    *,
    description: DescriptionFlags = NO_DESCRIPTION,
    local_store: LocalStore = "./.cloudtrain",
    map_to: Maps = None,
    local_image: Image = "",
    secret_values: Values = None,
    preempt: Preempt = None,
    kill: Kill = None,
    shortage: Shortage = None,
    following: FollowingFlags = NO_FOLLOWING,
    args: Ours[list[str] | None] = None,
    screen: Ours[Screen],
) -> int:
    """Plan the provider's real request, then start here what its platform would. Exit by the outcome."""
    chosen = description.chosen()
    job = description.job(script, args)
    from ..engine.rehearse import plan_rehearsal
    from ..runs.fallback import only_first

    _, others = only_first(chosen)
    if others:
        screen.talk(others)
    planned = plan_rehearsal(
        job,
        settings=chosen,
        run_id=description.run_id,
        cwd=Path.cwd(),
        store=local_store,
        maps=pairs("--map", map_to or (), field="map"),
        image=local_image,
        secrets=pairs("--secret-value", secret_values or (), field="secret_value"),
        drills=[
            (kind, text)
            for kind, texts in (("preempt", preempt), ("kill", kill), ("shortage", shortage))
            for text in texts or ()
        ],
    )
    body = planned.request.body
    screen.talk(f"rehearsing what {body['target']} would start for this request; differences:")
    for line in body["differences"]:
        screen.talk(f"  {line}")
    return _send_and_follow(planned, Where(store=local_store, profile=description.at.profile), following, screen)


def _send_and_follow(
    planned: Plan, at: Where, following: Following, screen: Screen, *, ask_above: float | None = None
) -> int:
    """Send the plan and, unless detached, follow it to its end; ``at`` is where the next commands find its store.

    ``ask_above``: ask on a terminal before a run is sent that may cost more US dollars; None: never ask.
    """
    seconds = seconds_of(following.wait_timeout, "wait_timeout")
    if following.detach and following.on_end is not None:
        hint = "leave --detach out, or use --webhook, to which a node posts"
        raise SpecError("needs a client that waits, and --detach leaves", field="on_end", hint=hint)
    screen.about = {"run": planned.run_url, "run_id": planned.run_id, "provider": planned.provider_name}
    say_limits(planned.job, screen)
    say_price(planned, screen)
    for name, text in ranking_rows(planned.ranking):
        screen.talk(f"{name}: {text}")
    for number, further in enumerate(planned.fallbacks.further, 1):
        screen.talk(f"fallback {number}: {fallback_text(further.document())}")
    say_advice(planned, screen)
    if ask_above is not None and _is_declined(planned, ask_above, screen):
        screen.talk("nothing was sent")
        return EXIT_CODES["cancelled"]
    with stoppable():
        try:
            run = _send(planned, screen)
        except CloudtrainError as exc:
            if exc.refusals:
                screen.about["refusals"] = [dict(item) for item in exc.refusals]
            raise
        except KeyboardInterrupt:
            return (_cancel if following.on_signal == "cancel" else _interrupted)(planned, at, screen)
        if following.detach:
            return _detached(run, at, screen)
        try:
            return _follow(run, at, seconds, following, screen)
        except KeyboardInterrupt:
            return stopped(run, run.run_id, at, following.on_signal, screen)


def _is_declined(planned: Plan, above: float, screen: Screen) -> bool:
    """Return whether a person at a terminal declines a run that may cost more than ``above`` US dollars.

    Without a terminal, or without a known price, there is no question.
    """
    prices = [price for item in (planned, *planned.fallbacks.further) if (price := item.price()) is not None]
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


def _send(planned: Plan, screen: Screen) -> Run:
    from ..runs.fallback import submit_with_fallbacks as send

    with screen.progress() as say:
        moved = format.Moved("uploaded", say if screen.interactive else None)
        run = send(planned, environ=os.environ, progress=say, moved=moved, note=screen.talk)
    name = planned.provider_name
    if planned.fallbacks.further:  # it may have been sent to another place
        name = run.provider_name
        screen.about |= {"run": run.url, "provider": name}
    screen.talk(format.sent(planned.run_id, name, run.url, run.staged, pace=moved.pace))
    with suppress(CloudtrainError):  # a note must not fail the verb
        if (ended := run.store.result(run.run_id)) is not None:
            screen.talk(f"note: this run was sent before and is over: {ended['state']}; for a new run, change --run-id")
    return run


def _cancel(planned: Plan, at: Where, screen: Screen) -> int:
    """Stop a job after a signal that came while it was being sent."""
    from ..runs.submit import run_of_plan

    run = run_of_plan(planned)
    try:
        return stopped(run, run.run_id, at, "cancel", screen)
    except NotFoundError:
        return screen.refuse(NO_RUN, EXIT_CODES["cancelled"])


def _interrupted(planned: Plan, at: Where, screen: Screen) -> int:
    """Report the state of a run after an interrupted submission: submitted, only recorded, or missing."""
    from ..runs.submit import run_of_plan

    run = run_of_plan(planned)
    cancel = shlex.join(["cloudtrain", "cancel", run.run_id, *at.flags])
    try:
        is_known = _arrived(run)
        result = run.result()
        sent = result["native_id"] is not None
    except NotFoundError:
        return screen.refuse(NO_RUN, EXIT_DETACHED)
    except CloudtrainError as exc:
        known = shlex.join(["cloudtrain", "status", run.run_id, *at.flags])
        why = f"interrupted; it is unknown if the run was submitted: {exc}"
        return screen.refuse(why, EXIT_DETACHED, hint=f"to look, run: {known}")
    if sent:
        text, hint = "interrupted; the run was submitted and continues", f"to stop it, run: {cancel}"
    elif result["state"] in FINAL:
        text, hint = f"interrupted; {format.state_line(result)}", ""
    elif not is_known:
        look = shlex.join(["cloudtrain", "status", run.run_id, *at.flags])
        text, hint = "interrupted; it is unknown yet if the run was submitted", f"to look, run: {look}"
    else:
        again = f"to send it, run the same command with --run-id {run.run_id}"
        text, hint = "interrupted; the run is recorded and was not sent", f"{again}\nto drop it, run: {cancel}"
    return screen.refuse(text, EXIT_DETACHED, hint=hint)


def _arrived(run: Run) -> bool:
    """Wait a moment for an interrupted request to become a job of the platform. Return whether that is known."""
    from ..runs.handover import cut_off

    until = time.monotonic() + CLIENT_TIMINGS.arrival
    while time.monotonic() < until and cut_off(run.store, run.run_id, 0):
        if run.result()["native_id"] is not None:
            return True
        time.sleep(0.2)
    return not cut_off(run.store, run.run_id, 0)


def plan(
    script: Script = None,
    /,
    *,
    description: DescriptionFlags = NO_DESCRIPTION,
    request: Request = False,
    verbose: Verbose = False,
    json: Json = False,
    args: Ours[list[str] | None] = None,
    screen: Ours[Screen],
) -> int:
    """Show the run's place, limits and price. --request, --json and a pipe have the exact request."""
    chosen = description.chosen()
    if script is not None and _is_sweep(Path(script)):
        from .sweep import plan_sweep

        if given := [*given_flags(description.flags), *(["args"] if args is not None else [])]:
            raise SpecError("a sweep's file has the whole job", field=given[0], hint="write the field below [job]")
        return plan_sweep(script, chosen, screen)
    job = description.job(script, args)
    from ..runs.fallback import advice, plan_with_fallbacks

    planned = plan_with_fallbacks(job, settings=chosen, run_id=description.run_id, cwd=Path.cwd(), preview=True)
    document = planned.document()
    terminal = screen.out.isatty()
    if screen.json:
        screen.emit(document, indent=2)
    elif terminal and not request:
        screen.data("\n\n".join([*([format.files_text(document)] if verbose else []), summary(document)]))
    else:
        screen.data(format.plan_text(document, verbose=verbose, terminal=terminal))
    if description.run_id is None:
        screen.talk(f"run id {planned.run_id} is a stand-in; submit makes a new one (--run-id)")
    if not terminal:
        say_limits(planned.job, screen)
    for text in advice(planned, "warnings"):
        screen.talk(f"warning: {text}")
    incomplete = [item for item in (planned, *planned.fallbacks.further) if item.missing]
    for item in incomplete:
        say_missing(item, chosen.file, screen)
    if not incomplete:
        if terminal and not (request or screen.json):
            screen.talk("to see the exact request: add --request")
        save = "save this output" if screen.json else "add --json > plan.json"
        screen.talk(f"to send exactly this: {save}, then cloudtrain submit --plan plan.json")
    return 0


def _is_sweep(path: Path) -> bool:
    """Return whether the file describes a sweep: a job has neither a search space nor a sampler."""
    if path.suffix != ".toml":
        return False
    try:
        found = toml_loads(path.read_text(encoding="utf-8"), where=str(path))
        return "space" in found or "sampler" in found
    except (OSError, UnicodeDecodeError):  # the reader of job files says what is wrong
        return False


def say_missing(planned: Plan, file: str, screen: Screen) -> None:
    """Warn of the settings that have placeholders in the plan, and print how to set them."""
    from ..settings.needs import refusal

    error = refusal(planned.provider_name, planned.missing, file=file, profile=planned.settings.profile)
    screen.talk(f"warning: {error}; this plan cannot be sent")
    screen.hint(error.hint)


def settings_pairs(texts: list[str] | None) -> dict[str, str]:
    """Return the values of ``--set`` by key. Raises `SpecError` for a text that is not KEY=VALUE."""
    return pairs("--set", texts or (), field="settings")


def _nothing_but_a_plan(script: str | None, description: Description, args: list[str] | None) -> None:
    rest = {"script": script, "-m": description.module, "args": args}
    rest |= {"provider": description.provider, "fallback": description.fallback, "run_id": description.run_id}
    given = [*given_flags(description.flags), *(name for name, value in rest.items() if value is not None)]
    if given:
        raise SpecError("a saved plan is sent unchanged", field="plan", hint=f"leave out {', '.join(given)}")


def say_limits(job: Job, screen: Screen) -> None:
    """Print the default limits that apply, on one line."""
    words = []
    if job.max_runtime == DEFAULT_MAX_RUNTIME:
        words.append(format.max_runtime(job.max_runtime, is_default=True))
    if job.stall_timeout == DEFAULT_STALL_TIMEOUT:
        words.append(format.stall_timeout(job.stall_timeout, is_default=True))
    if words:
        screen.talk(f"limits: {', '.join(words)}")


def say_advice(planned: Plan, screen: Screen) -> None:
    """Print the warnings and notes of a plan and its fallbacks."""
    from ..runs.fallback import advice

    for text in advice(planned, "warnings"):
        screen.talk(f"warning: {text}")
    for text in advice(planned, "notes"):
        screen.talk(f"note: {text}")


def say_price(planned: Plan, screen: Screen) -> None:
    """Print the highest cost; nothing if this machine is the platform and has no price."""
    price, types = planned.price(), planned.request.instance_types
    if price is not None or types:
        screen.talk("price: " + format.price_text(price, types).removeprefix("price "))


def _found_by(store: str, at: Where, meant: str, cwd: Path) -> Where:
    """Return the flags with which the next commands find the store at the URL ``store``; none if they need no flag."""
    from ..storage.local_disk import normalize

    found = Where(profile=at.profile).settings(cwd=cwd).store
    if meant == found or normalize(found, cwd=cwd) == store:
        return dataclasses.replace(at, store=None)
    return dataclasses.replace(at, store=at.store or store)


def _detached(run: Run, at: Where, screen: Screen) -> int:
    if screen.json:
        from ..runs.handover import refusals_of

        ended = run.store.result(run.run_id)  # a run that was sent before
        state = ended["state"] if ended else "cancelled" if run.store.cancelled(run.run_id) else "pending"
        code = ended["exit_code"] if ended else EXIT_CODES.get(state)
        refusals = refusals_of(run, run.store.attempts(run.run_id)[-1:])
        told = {"refusals": refusals} if refusals else {}
        screen.emit({**screen.about, **_uploaded(run), "state": state, "exit_code": code, **told})
    screen.value(run.url)
    screen.next(["logs", "-f", run.run_id], ["wait", run.run_id], ["cancel", run.run_id], where=at.flags)
    return 0


def _follow(run: Run, at: Where, seconds: float | None, following: Following, screen: Screen) -> int:
    """Print log lines until the end, then the outcome, and pull. Ctrl-C leaves the run alone."""
    from ..runs.retry import Retry

    write = screen.relay if screen.json else screen.data
    many_ranks = ranks(run.job.at(run.provider_name)) > 1
    try:
        result = run.wait(
            timeout=seconds,
            on_line=lambda line: write(log_line(line, many=many_ranks)),
            on_status=format.Changes(screen.talk),
            retry=Retry(run, screen.talk),
        )
    except (AuthError, LostContactError) as exc:
        raise left(exc, run, run.run_id, at, screen) from None
    code, extra = int(result["exit_code"]), dict[str, Any]()
    say_end(run, result, screen)
    if following.pull_to is not None:
        try:
            extra["pulled"] = pull_into(run, Path(following.pull_to), screen)
        except CloudtrainError as exc:  # print the outcome of the run all the same
            screen.error(f"pull: {exc}", exc.hint)
            code = code or exc.exit_code
            extra |= {"error": f"pull: {exc}", "exit_code": code}
    run_on_end(following.on_end, result, screen.talk)
    screen.answer({**result, **_uploaded(run), **extra})
    screen.next(*after(result, run.run_id, pulled="pulled" in extra), where=at.flags)
    return code


def _uploaded(run: Run) -> dict[str, Any]:
    """Return the bytes uploaded to a remote store."""
    from ..storage.local_disk import local_path

    if run.staged is None or local_path(run.store.url) is not None:
        return {}
    return {"uploaded": dataclasses.asdict(run.staged)}
