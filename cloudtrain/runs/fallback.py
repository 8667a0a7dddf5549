"""Try a job with the settings as given, then with each profile of ``fallback``, if there are no machines.

Each of them has a run of its own in its own store, with the same id. `handover` decides when a run may move on, and how
another client continues from the records. `submit_with_fallbacks` loops around sending, `Retry` around waiting.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from ..errors import CapacityError, CloudtrainError, ConflictError, LostContactError, QuotaError, SpecError
from ..job.job import Job
from ..settings.needs import refusal
from ..settings.settings import AUTO, Settings
from ..storage.files import Progress
from ..store.store import in_store, next_of
from ..validate import without_secrets
from . import handover
from .deliver import error_of
from .retry import Retry, check_installed, name_of, refusal_text
from .run import Run
from .submit import Plan, link_fallbacks, make_plan, run_of_plan, send_plan, with_recorded_origin


def plan_with_fallbacks(
    job: Job,
    *,
    settings: Settings,
    run_id: str | None = None,
    cwd: Path,
    preview: bool = False,
) -> Plan:
    """Return the plan of ``job`` with ``settings``, with the plans of the fallback profiles (``further``).

    Works as `runs.submit.make_plan`, and with ``preview`` is as pure. Otherwise the store of a run to resume from
    is asked where that run has moved to. Errors of a fallback are raised now, not when its turn comes. Provider `AUTO`
    takes the fallback profiles alone, in the order of their price, without those that refuse the job.
    """
    if settings.budget and settings.fallback:
        why = f"{settings.budget!r} holds in one store, so a run cannot use {', '.join(settings.fallback)}"
        raise SpecError(why, field="budget", hint="leave the fallback out: --fallback=")
    if settings.provider == AUTO:
        return _cheapest(job, settings=settings, run_id=run_id, cwd=cwd, preview=preview)
    plans: list[Plan] = []
    for number, own in enumerate(settings.candidates()):
        try:
            plans.append(make_plan(job, settings=own, run_id=run_id, cwd=cwd, preview=preview, follows=not preview))
        except SpecError as exc:
            if not number:
                raise
            raise SpecError(f"{exc.message} (fallback {own.profile})", field=exc.field, hint=exc.hint) from None
        run_id = run_id or (None if preview else plans[0].run_id)
        if not number and job.resume_from:
            from .resume import is_bare

            if is_bare(job.resume_from):  # a run of the first store
                job = job.replace(resume_from=f"{plans[0].store.url}/runs/{job.resume_from}")
    return link_fallbacks(plans)


def advice(plan: Plan, kind: Literal["warnings", "notes"]) -> list[str]:
    """Return the warnings or notes of ``plan`` and its fallbacks, each once. One that not all have names its places."""
    plans, found = (plan, *plan.fallbacks.further), dict[str, list[str]]()
    for item in plans:
        for text in getattr(item, kind):
            found.setdefault(text, []).append(item.settings.profile or item.provider_name)
    return [text + f" ({', '.join(names)})" * (len(names) < len(plans)) for text, names in found.items()]


def _cheapest(job: Job, *, settings: Settings, run_id: str | None, cwd: Path, preview: bool) -> Plan:
    """Return the plan of the cheapest of the profile in use and of ``fallback``, with the others to follow.

    Unknown prices come last. Raises `SpecError` if each profile refuses the job.
    """
    from .resume import is_bare

    if not settings.fallback:
        known = ",".join(settings.profiles or ("aws", "azure"))
        raise SpecError("has no profiles to choose from", field="provider", hint=f"list them: --fallback {known}")
    if job.resume_from and is_bare(job.resume_from):
        why = f"{job.resume_from!r} is a run of one store, and auto chooses between stores"
        raise SpecError(why, field="resume_from", hint="give the URL of the run")
    _check_choice(settings)
    plans, refused, made = [], [], run_id
    for own in map(settings.of_profile, dict.fromkeys(filter(None, (settings.profile, *settings.fallback)))):
        row = {"profile": own.profile, "provider": own.provider, "usd_per_hour": None, "reason": None}
        try:
            plan = make_plan(job, settings=own, run_id=made, cwd=cwd, preview=preview, follows=not preview)
            if plan.missing:  # then submit would leave it out
                raise refusal(plan.provider_name, plan.missing, file=own.file, profile=own.profile)
        except SpecError as exc:
            if run_id is not None and not preview and _may_hold(own, run_id):
                raise SpecError(f"{exc.message} (profile {own.profile})", field=exc.field, hint=exc.hint) from None
            refused.append({**row, "reason": str(exc)})
            continue
        if own.budget:
            why = f"profile {own.profile} has one, which holds in one store, and auto chooses between stores"
            raise SpecError(why, field="budget", hint="leave that profile out of fallback, or remove its budget")
        price, made = plan.price(), made or (None if preview else plan.run_id)
        plans.append((plan, {**row, "usd_per_hour": price["usd_per_hour"] if price else None}))
    if not plans:
        why = "; ".join(f"{row['profile']}: {row['reason']}" for row in refused)
        raise SpecError(f"no profile takes the job ({why})", field="provider")
    plans.sort(key=lambda item: (item[1]["usd_per_hour"] is None, item[1]["usd_per_hour"]))
    if run_id is not None and not preview:
        plans = _as_recorded(plans)
    ranking = (*(row for _, row in plans), *refused)
    return dataclasses.replace(link_fallbacks([plan for plan, _ in plans]), ranking=ranking)


def _may_hold(settings: Settings, run_id: str) -> bool:
    """Return whether the store of ``settings`` has the run, or cannot be asked: the run may have a job then."""
    if not settings.store:
        return False
    try:
        return in_store(settings.resolved(), settings, lambda store: store.has_run(run_id))
    except CloudtrainError:
        return True


def _check_choice(settings: Settings) -> None:
    """Raise `SpecError` for a store or setting of the command: each profile brings its own."""
    given = ["store"] if settings.origins.get("store") == "--store" else []
    for field in [*given, *(f"--set {key}" for key in settings.overrides)]:
        hint = "put it into the profiles, or name one of them"
        raise SpecError("is one profile's, and auto chooses between profiles", field=field, hint=hint)


def _as_recorded(plans: list[tuple[Plan, dict[str, Any]]]) -> list[tuple[Plan, dict[str, Any]]]:
    """Return the plans in the order in which this run was recorded, if it was: prices may have changed since.

    Raises `ConflictError` if the run began in the store of another profile, where a client may have started it.
    """
    by_url = {plan.run_url: (plan, row) for plan, row in plans}
    known = next((plan for plan, _ in plans if plan.store.has_run(plan.run_id)), None)
    if known is None:
        return plans
    record = known.store.run(known.run_id)
    first = str(record.get("first") or known.run_url)
    if first not in by_url:
        hint = "list its profile, or choose another --run-id"
        raise ConflictError(f"{known.run_id!r} began at {first}", field="run_id", hint=hint)
    if first != known.run_url:
        record = by_url[first][0].store.run(known.run_id)
    order = [first, *(str(item["run"]) for item in record.get("fallbacks", ()))]
    return [by_url[url] for url in order if url in by_url]


def only_first(settings: Settings) -> tuple[Settings, str]:
    """Return the settings without the fallback, and a line that says so; empty if there is none.

    Raises `SpecError` as `Settings.candidates` does.
    """
    first, *others = settings.candidates()
    if not others:
        return first, ""
    return dataclasses.replace(first, fallback=()), f"the fallback is left out: {', '.join(settings.fallback)}"


def where(settings: Settings) -> str:
    """Return the region of the settings ("" if none is set), or the store if no provider can be made."""
    try:
        return handover.region_of_provider(settings.make_provider())
    except CloudtrainError:
        return without_secrets(settings.store)


def submit_with_fallbacks(
    plan: Plan,
    *,
    environ: Mapping[str, str],
    progress: Callable[[str], None] | None = None,
    moved: Progress | None = None,
    note: Callable[[str], None] | None = None,
) -> Run:
    """Send the plan; if there are no machines, its next GPU or the next fallback. Return the run that was accepted.

    Works as `runs.submit.send_plan`; the same plan again continues where the last client stopped. ``note`` gets each
    refusal. If all refuse, raises the last refusal with the earlier ones in its message and as its ``refusals``. Raises
    `SpecError` before anything is sent if the packages of a fallback's provider are not installed.
    """
    for further in plan.fallbacks.further:
        check_installed(further)
    say = note or progress or (lambda _: None)
    send = partial(send_plan, environ=environ, progress=progress, moved=moved)
    others = len(plan.job.resources.gpu) > 1 or plan.job.resources.min_instance_count
    if not plan.fallbacks.further and not others:
        return send(plan)
    plans = (plan, *plan.fallbacks.further)
    newest = _newest(plans)
    try:
        run = send(newest)
    except (CapacityError, QuotaError) as exc:
        run = run_of_plan(newest)
        refused = _refused(run)
        if refused is None:
            raise  # without a record of the refusal nothing can follow
        over = run.store.result(run.run_id) is not None
        if over and next_of(run.store, run.run_id) is None:  # else another client has moved it on
            raise _nowhere(run, refused, hint=exc.hint) from None
        say(f"{name_of(newest)} refused it: {exc.with_hint()}")
    onward = Retry(run, say, environ=environ, plans=plans, progress=progress, moved=moved)
    while True:
        if (refused := _refused(run)) is not None:
            result = run._current_result()
            if _refused(run) is None:  # it was accepted after all
                continue
            if not handover.may_continue(run, result) or not onward(result):
                raise _nowhere(run, refused)
        elif (unsent := handover.unsent_attempt(run)) is None:
            return run
        else:
            onward.send(unsent)
            if handover.unsent_attempt(run) == unsent:
                again = f"run the same command again with --run-id {run.run_id}"
                raise LostContactError(f"attempt {unsent} has not been sent", hint=again)


def _newest(plans: Sequence[Plan]) -> Plan:
    """Return the plan with which the run continued last. Raises `ConflictError` if another job has the id."""
    for plan, following in itertools.pairwise(plans):
        noted = next_of(plan.store, plan.run_id)
        if noted is None:
            return plan
        with_recorded_origin(plan)
        if noted["run"] != following.run_url:
            why = f"{plan.run_id!r} continued at {noted['run']}"
            raise ConflictError(why, field="run_id", hint="choose another id")
    return plans[-1]


def _refused(run: Run) -> dict[str, Any] | None:
    """Return the refusal of the newest attempt, if it was refused and the run has no other outcome."""
    store, run_id = run.store, run.run_id
    newest, ended = store.newest_attempt(run_id), store.result(run_id)
    if store.submitted(run_id, newest) is not None or store.cancelled(run_id) or (ended and ended["native_id"]):
        return None
    return store.refused(run_id, newest)


def _nowhere(run: Run, refused: Mapping[str, Any], hint: str = "") -> CloudtrainError:
    """Return the error of a job that every region and provider refused."""
    refusals = handover.refusals_of(run)
    before = [refusal_text(item) for item in refusals[:-1]]
    reason = str(refused["reason"]) + (f" (before that, {'; '.join(before)})" if before else "")
    error = error_of(str(refused["category"]))(reason, hint=hint)
    error.refusals = tuple(refusals)
    return error
