"""The verb ``sweep``, and the other verbs for the id of a sweep in place of a run's."""

from __future__ import annotations

import contextlib
import dataclasses
import json as json_
import math
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from ..errors import EXIT_CODES, AuthError, LostContactError, SpecError
from ..job.job import Job, anchored
from ..runs.submit import Plan, make_plan
from ..runs.summary import columns
from ..runs.sweeps.samplers import propose
from ..runs.sweeps.spec import CURRENCIES, SweepSpec
from ..runs.sweeps.state import State
from ..runs.sweeps.sweep import CAPS, Sweep, make_sweep, open_sweep, plan_of_sweep
from ..runs.sweeps.view import change_lines, limits_text, value_text
from ..settings.settings import Settings
from ..validate import near_or_all, read_table, table_of
from . import format
from .common_flags import HERE, At, OnEnd, OnSignal, Where, run_on_end, stoppable, switch, undisturbed
from .flags import job_of
from .output import Screen
from .runs import EXIT_DETACHED, Json, Ours, WaitTimeout, seconds_of
from .submit import NO_FLAGS, Image, LocalStore, Provider, Set, settings_pairs

WATCH_SECONDS = 2.0
"""Seconds between two looks of ``watch``."""


def sweep(
    target: Annotated[
        str, Parameter(name="FILE|SWEEP", help="tune.toml to start a sweep, or a sweep's id to continue it")
    ],
    /,
    *,
    trials: Annotated[int | None, Parameter(help="limit: trials in all")] = None,
    parallel: Annotated[int | None, Parameter(help="limit: trials at once")] = None,
    max_cost: Annotated[float | None, Parameter(metavar="USD", help="limit: US dollars of all trials")] = None,
    max_gpu_hours: Annotated[float | None, Parameter(metavar="HOURS", help="limit: GPU hours of all trials")] = None,
    max_runtime: Annotated[
        str | None, Parameter(metavar="DURATION", help="limit: time from the first trial on")
    ] = None,
    failures: Annotated[int | None, Parameter(help="limit: failed trials in a row")] = None,
    sweep_id: Annotated[str | None, Parameter(metavar="ID", help="id of a new sweep")] = None,
    rehearse: Annotated[bool, switch("run a new sweep's trials here, as the provider would start them")] = False,
    local_store: LocalStore = "./.cloudtrain",
    local_image: Image = "",
    detach: Annotated[bool, switch("start the first trials and return", "--detach", "-d")] = False,
    wait_timeout: WaitTimeout = None,
    on_signal: OnSignal = "detach",
    on_end: OnEnd = None,
    provider: Provider = None,
    settings: Set = None,
    at: At = HERE,
    json: Json = False,
    screen: Ours[Screen],
) -> int:
    """Search for the best hyperparameters under one budget. Each trial is a run; Ctrl-C leaves the trials alone."""
    given: dict[str, Any] = {
        "trials": trials,
        "parallel": parallel,
        "max_cost": max_cost,
        "max_gpu_hours": max_gpu_hours,
    }
    given |= {"max_runtime": max_runtime, "failures": failures}
    if detach and on_end is not None:
        raise SpecError("needs a client that waits, and --detach leaves", field="on_end", hint="leave --detach out")
    limits = {key: value for key, value in given.items() if value is not None}
    chosen = at.settings(overrides=settings_pairs(settings), cwd=Path.cwd(), provider=provider)
    if target.endswith(".toml"):
        make = _rehearsal(local_store, local_image) if rehearse else None
        handle, warnings = _made(target, limits, chosen, sweep_id, make)
        for text in warnings:
            screen.talk(f"warning: {text}")
        handle.create()
        at = Where(store=local_store, profile=at.profile) if rehearse else at
    else:
        handle = open_sweep(target, settings=chosen)
        handle.change(limits)
    _say_start(handle, screen)
    if detach:
        return _emit(handle.step(on_change=screen.talk), screen, at, code=0)
    seconds = seconds_of(wait_timeout, "wait_timeout")
    return drive_sweep(handle, at, screen, timeout=seconds, on_signal=on_signal, on_end=on_end)


def _rehearsal(store: str, image: str) -> Callable[..., Plan]:
    from ..engine.rehearse import plan_rehearsal

    return partial(plan_rehearsal, store=store, image=image)


def _made(
    file: str, limits: Mapping[str, Any], settings: Settings, sweep_id: str | None, make: Callable[..., Plan] | None
) -> tuple[Sweep, tuple[str, ...]]:
    """Return the sweep that ``file`` describes, and its plan's warnings.

    ``limits`` replace its own. ``make`` plans a rehearsal.
    """
    job, tables = _read(Path(file))
    tables["limits"] = {**table_of(tables.get("limits", {}), "limits"), **limits}
    spec = SweepSpec.from_dict(tables)
    plan = plan_of_sweep(job, settings, sweep_id=sweep_id, cwd=Path.cwd(), make=make)
    return make_sweep(plan, spec), plan.warnings


def _read(path: Path) -> tuple[Job, dict[str, Any]]:
    """Return the job of tune.toml, with the caps of ``[trial]``, and the tables of the sweep. Raises `SpecError`."""
    tables = read_table(path, shown=str(path), field="sweep")
    given, trial = tables.pop("job", None), table_of(tables.pop("trial", {}), "trial")
    for key in trial:
        if key not in CAPS:
            raise SpecError("is not a limit of a trial", field=f"trial.{key}", hint=near_or_all(key, CAPS))
    if isinstance(given, str):
        job = job_of(str(path.parent / given), None, NO_FLAGS, None, cwd=Path.cwd())
    elif isinstance(given, Mapping):
        with _below("job"):
            job = Job.from_dict(anchored(dict(given), path.parent))
    else:
        raise SpecError("must be the path of a job file, or a table of a job's fields", field="job")
    with _below("trial"):
        return job.replace(**trial), tables


@contextlib.contextmanager
def _below(table: str) -> Iterator[None]:
    """Name a wrong field by its path in tune.toml."""
    try:
        yield
    except SpecError as exc:
        raise SpecError(exc.message, field=f"{table}.{exc.field}", hint=exc.hint) from None


def _say_start(handle: Sweep, screen: Screen) -> None:
    """Print the limits, and the most that the trials can cost."""
    screen.about = {"sweep": handle.url, "sweep_id": handle.id}
    limits = handle.limits
    screen.talk(f"sweep {handle.id} on {handle.record['provider']}: {limits_text(limits)}")
    for text in _at_worst(handle.cap, limits):
        screen.talk(text)


def _at_worst(caps: Mapping[str, float], limits: Mapping[str, Any]) -> Iterator[str]:
    for name, unit in CURRENCIES.items():
        cap, limit = caps.get(name), limits.get(name)
        if cap is not None and limits.get("trials"):
            yield f"at worst: {limits['trials']} trials x {cap:g} {unit} = {limits['trials'] * cap:g} {unit}"
        if cap is not None and limit is not None:
            yield f"the limit of {limit:g} {unit} lets at least {math.floor(limit / cap + 1e-9)} trials run"


def plan_sweep(file: str, settings: Settings, screen: Screen) -> int:
    """Print the request of trial 0, the space, the limits and the caps of the sweep in ``file``. Write nothing."""
    job, tables = _read(Path(file))
    spec = SweepSpec.from_dict(tables)
    params = propose(spec, State(limits=spec.limits)) or {}
    first = job.replace(hyperparameters={**job.hyperparameters, **params})
    name = f"{job.name[:20].rstrip('-')}-plan"
    plan = plan_of_sweep(first, settings, sweep_id=name, cwd=Path.cwd(), make=partial(make_plan, preview=True))
    caps, limits = make_sweep(plan, spec).cap, dataclasses.asdict(spec.limits)
    if screen.json:
        screen.emit({**plan.document(), "sweep": {"spec": spec.to_dict(), "cap": caps}}, indent=2)
        return 0
    rows = [("metric", f"{spec.metric}, {spec.goal}"), ("sampler", spec.sampler), ("limits", limits_text(limits))]
    rows += [("one trial", limits_text({**caps, "parallel": 1}).removesuffix(", 1 at once"))]
    rows += [(f"space {key}", json_.dumps(item)) for key, item in spec.to_dict()["space"].items()]
    rows += [(f"trial 0 {key}", value_text(value)) for key, value in params.items()]
    screen.data(f"{format.plan_text(plan.document(), terminal=screen.reads)}\n\nsweep\n{columns(rows)}")
    for text in (*_at_worst(caps, limits), *(f"warning: {text}" for text in plan.warnings)):
        screen.talk(text)
    screen.next(["sweep", file])
    return 0


def drive_sweep(
    handle: Sweep,
    at: Where,
    screen: Screen,
    *,
    timeout: float | None,
    on_signal: str,
    on_end: str | None = None,
) -> int:
    """Drive a sweep to its end, then run ``on_end``. Return the exit code of its outcome, or 7 after a signal."""
    with stoppable():
        try:
            handle.run(timeout=timeout, on_change=screen.talk)
        except KeyboardInterrupt:
            return _stopped(handle, at, screen, on_signal)
        except (AuthError, LostContactError) as exc:
            screen.next(["sweep", handle.id], ["status", handle.id], where=at.flags)
            raise (
                exc if isinstance(exc, LostContactError) else LostContactError(f"{exc}; the trials continue")
            ) from None
    result = handle.result()
    if result["exit_code"] is not None:
        run_on_end(on_end, result, screen.talk)
    return _emit(result, screen, at)


def _stopped(handle: Sweep, at: Where, screen: Screen, on_signal: str) -> int:
    if on_signal == "cancel":
        screen.talk("\nstopping every trial (--on-signal cancel)")
        with undisturbed():
            result = cancel_sweep(handle, screen, wait=False)
        code = EXIT_CODES["cancelled"]
        screen.answer({**result, "exit_code": code})
        return code
    screen.talk("\nno longer driving the sweep; its trials continue, and no new one starts")
    screen.answer({**screen.about, "error": "interrupted; the trials continue", "exit_code": EXIT_DETACHED})
    screen.next(["sweep", handle.id], ["status", handle.id], ["cancel", handle.id], where=at.flags)
    return EXIT_DETACHED


def _emit(result: Mapping[str, Any], screen: Screen, at: Where, code: int | None = None) -> int:
    """Print the summary and the next commands. Return the exit code."""
    screen.answer(result, sweep_text(result))
    name = str(result["sweep_id"])
    more = [["pull", name], ["report", name]] if result["best"] else [["list", name]]
    screen.next(*([["sweep", name], ["cancel", name]] if result["exit_code"] is None else more), where=at.flags)
    return int(result["exit_code"] or 0) if code is None else code


def sweep_text(result: Mapping[str, Any]) -> str:
    """Return the summary of a sweep for people, as ``status`` prints it."""
    counts, best = result["counts"], result["best"]
    state = str(result["state"]) + (f": {result['reason']}" if result["reason"] not in ("", result["state"]) else "")
    rows = [("sweep", str(result["sweep_id"])), ("state", state), ("provider", str(result["provider"]))]
    words = [f"{count} {name}" for name, count in counts.items() if count]
    rows.append(("trials", f"{len(result['trials'])}: {', '.join(words)}" if words else "none yet"))
    if best:
        found = " ".join(f"{name}={value_text(value)}" for name, value in best["params"].items())
        rows += [("best", f"{result['metric']} {value_text(best['value'])} in {best['run_id']}"), ("with", found)]
    for name, label, unit in (("max_cost", "cost", "USD"), ("max_gpu_hours", "GPU hours", "hours")):
        budget = result["budget"][name]
        if budget["limit"] is not None or budget["used"]:
            limit = "" if budget["limit"] is None else f" of {budget['limit']:g}"
            rows.append((label, f"{budget['used']:.2f} used, {budget['reserved']:.2f} reserved{limit} {unit}"))
    return columns(rows)


def trial_table(result: Mapping[str, Any]) -> str:
    """Return the trials as a table, in order."""
    names = list(dict.fromkeys(name for row in result["trials"] for name in row["params"]))
    head = ("run_id", "state", str(result["metric"]), *names)
    rows = [
        (
            row["run_id"],
            row["state"],
            "-" if row["value"] is None else value_text(row["value"]),
            *(value_text(row["params"].get(name, "-")) for name in names),
        )
        for row in result["trials"]
    ]
    return columns([head, *rows])


def list_trials(word: str, at: Where, screen: Screen) -> int:
    """Print one line a trial of the sweep that ``word`` names."""
    handle = open_sweep(word, settings=at.settings())
    result = handle.result()
    screen.answer(result, trial_table(result))
    screen.next(["status", handle.id], ["report", handle.id], where=at.flags)
    return 0


def cancel_sweep(handle: Sweep, screen: Screen, *, wait: bool) -> dict[str, Any]:
    """Stop every trial of a sweep and return the summary; with ``wait`` once they have stopped."""
    handle.cancel()
    if wait:
        handle.run(on_change=screen.talk)
    result = handle.result()
    word = str(result["state"]) if result["exit_code"] is not None else "cancelling"
    screen.value(word, f"{handle.id}: {word}")
    return result


def reconcile_sweep(handle: Sweep, screen: Screen) -> int:
    """Make the steps of a sweep that are possible now. Return 0."""
    result = handle.step(on_change=screen.talk)
    screen.answer(result, sweep_text(result))
    return 0


def watch_sweep(handle: Sweep, at: Where, screen: Screen) -> int:
    """Show a live table of a sweep until it ends; without a terminal, a line for each change. It starts no trial and
    stops none. Return 0."""
    with stoppable():
        try:
            say = screen.talk if screen.json else screen.data
            result = _draw(handle, screen) if screen.draws else _follow(handle, say)
        except KeyboardInterrupt:
            screen.talk("\nno longer watching; the sweep continues")
            screen.next(["watch", handle.id], ["sweep", handle.id], where=at.flags)
            return EXIT_DETACHED
    return _emit(result, screen, at, code=0)


def _follow(handle: Sweep, say: Callable[[str], None]) -> dict[str, Any]:
    before, line = handle.state(), ""
    while True:
        now = handle.state()
        result = handle.summary(now)
        for text in change_lines(handle.spec, before, now):
            say(text)
        if sweep_line(result) != line:
            line = sweep_line(result)
            say(line)
        before = now
        if result["exit_code"] is not None:
            return result
        time.sleep(WATCH_SECONDS)


def _draw(handle: Sweep, screen: Screen) -> dict[str, Any]:
    from rich.console import Console
    from rich.live import Live

    console = Console(file=screen.out)
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            state = handle.state()
            result = handle.summary(state)
            live.update(sweep_screen(result, handle.progress(state), height=console.height), refresh=True)
            if result["exit_code"] is not None:
                return result
            time.sleep(WATCH_SECONDS)


def sweep_screen(result: Mapping[str, Any], progress: Mapping[int, tuple[float, float]], *, height: int) -> Any:
    """Return the live table: the budget and the best so far, the running trials, then the ended ones, best first.

    ``progress`` has the last progress and value of each running trial.
    """
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    sign, metric = 1 if result["goal"] == "minimize" else -1, str(result["metric"])
    names = list(dict.fromkeys(name for row in result["trials"] for name in row["params"]))

    def rank(row: Mapping[str, Any]) -> tuple[bool, bool, float]:
        value = row["value"]
        return row["state"] != "running", value is None, sign * value if value is not None else row["trial"]

    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("trial", "state", metric, "at", *names):
        table.add_column(name, no_wrap=True)
    for row in sorted(result["trials"], key=rank)[: max(1, height - 3)]:
        at, value = progress.get(row["trial"], (None, row["value"]))
        cells = [row["trial"], row["state"], value, at, *(row["params"].get(name) for name in names)]
        table.add_row(*("" if cell is None else value_text(cell) for cell in cells))
    title = f"{result['sweep_id']}  {result['state']}, on {result['provider']}"
    return Group(Text(title, style="bold"), Text(sweep_line(result)), table)


def sweep_line(result: Mapping[str, Any]) -> str:
    """Return a sweep in one line: the running trials, the best value so far, the budget."""
    counts, best, words = result["counts"], result["best"], []
    words.append(f"{len(result['trials'])} trials, {counts['running']} running")
    if best:
        words.append(f"best {result['metric']} {value_text(best['value'])} (trial {best['trial']})")
    for name, unit in CURRENCIES.items():
        budget = result["budget"][name]
        if budget["limit"] is not None:
            words.append(f"{budget['used']:.2f} + {budget['reserved']:.2f} of {budget['limit']:g} {unit}")
    return "; ".join(words)
