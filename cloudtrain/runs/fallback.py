"""Try a job with the settings as given, then with each profile of ``fallback``, if there are no machines.

Each of them has a run of its own in its own store, with the same id. `handover` decides when a run may move on, and how
another client continues from the records. `submit_with_fallbacks` loops around sending,
`FallbackPolicy` around waiting.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import (
    CapacityError,
    CloudtrainError,
    ConflictError,
    LostContactError,
    QuotaError,
    SpecError,
    StorageError,
)
from ..job.job import Job
from ..provider_api.protocol import Layout, extras_of
from ..settings.needs import refusal
from ..settings.settings import AUTO, Settings
from ..storage.files import Progress
from ..store.store import Store, in_store, next_of
from ..validate import without_secrets
from . import handover
from .attempts import NO_MACHINES
from .retry import Retry, error_of
from .run import Run
from .submit import Fallbacks, Plan, link_fallbacks, plan_of_record, run_of_plan, with_recorded_origin
from .submit import make_plan as plan_of
from .submit import send_plan as send

__all__ = [
    "FallbackPolicy",
    "name_of",
    "only_first",
    "plan_with_fallbacks",
    "submit_with_fallbacks",
    "where",
]


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
        raise SpecError(
            f"{settings.budget!r} holds in one store, so a run cannot use {', '.join(settings.fallback)}",
            field="budget",
            hint="leave the fallback out: --fallback=",
        )
    if settings.provider == AUTO:
        return _cheapest(job, settings=settings, run_id=run_id, cwd=cwd, preview=preview)
    plans: list[Plan] = []
    for number, own in enumerate(settings.candidates()):
        try:
            plans.append(plan_of(job, settings=own, run_id=run_id, cwd=cwd, preview=preview, follows=not preview))
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
            plan = plan_of(job, settings=own, run_id=made, cwd=cwd, preview=preview, follows=not preview)
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


def name_of(plan: Plan) -> str:
    """Return the provider and region of a plan, for people."""
    return " ".join(filter(None, [plan.provider_name, handover.region_of_provider(plan.provider)]))


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
        _check_installed(further)
    say = note or progress or (lambda _: None)
    deliver = partial(send, environ=environ, progress=progress, moved=moved)
    others = len(plan.job.resources.gpu) > 1 or plan.job.resources.min_instance_count
    if not plan.fallbacks.further and not others:
        return deliver(plan)
    plans = (plan, *plan.fallbacks.further)
    newest = _newest(plans)
    try:
        run = deliver(newest)
    except (CapacityError, QuotaError) as exc:
        run = run_of_plan(newest)
        refused = _refused(run)
        if refused is None:
            raise  # without a record of the refusal nothing can follow
        over = run.store.result(run.run_id) is not None
        if over and next_of(run.store, run.run_id) is None:  # else another client has moved it on
            raise _nowhere(run, refused, hint=exc.hint) from None
        say(f"{name_of(newest)} refused it: {exc.with_hint()}")
    onward = FallbackPolicy(run, say, environ=environ, plans=plans, progress=progress, moved=moved)
    while True:
        if (refused := _refused(run)) is not None:
            result = run.result()
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


def _check_installed(plan: Plan) -> None:
    """Raise `SpecError` if the packages of a cloud's plan are not installed here, so this client could not send it."""
    if "file" in plan.provider.schemes:
        return
    check = next(extras_of(plan.provider).checks("", None), None)
    if check is not None and check.name == "sdk" and check.status == "failed":
        raise SpecError(check.detail, field=f"fallback {plan.settings.profile}".strip(), hint=check.fix)


def _newest(plans: Sequence[Plan]) -> Plan:
    """Return the plan with which the run continued last. Raises `ConflictError` if another job has the id."""
    for plan, following in itertools.pairwise(plans):
        noted = next_of(plan.store, plan.run_id)
        if noted is None:
            return plan
        with_recorded_origin(plan)
        if noted["run"] != following.run_url:
            raise ConflictError(
                f"{plan.run_id!r} continued at {noted['run']}", field="run_id", hint="choose another id"
            )
    return plans[-1]


def _refused(run: Run) -> dict[str, Any] | None:
    """Return the refusal of the newest attempt, if it was refused and the run has no other outcome."""
    store, run_id = run.store, run.run_id
    newest, ended = max(store.attempts(run_id), default=0), store.result(run_id)
    if store.submitted(run_id, newest) is not None or store.cancelled(run_id) or (ended and ended["native_id"]):
        return None
    return store.refused(run_id, newest)


def _nowhere(run: Run, refused: Mapping[str, Any], hint: str = "") -> CloudtrainError:
    """Return the error of a job that every region and provider refused."""
    refusals = handover.refusals_of(run)
    before = [_refusal_text(item) for item in refusals[:-1]]
    reason = str(refused["reason"]) + (f" (before that, {'; '.join(before)})" if before else "")
    error = error_of(str(refused["category"]))(reason, hint=hint)
    error.refusals = tuple(refusals)
    return error


def _refusal_text(refusal: Mapping[str, Any]) -> str:
    where = " ".join(filter(None, [refusal["provider"], refusal["place"], refusal["gpu"]]))
    return f"{where}: {refusal['reason']}"


class FallbackPolicy(Retry):
    """A `Retry` that moves the run, and its handle, to the next place if no further attempt can have machines.

    ``plans`` are those of the submitting client. Any other client makes the next plan from the records, and copies code
    and data from the store that is left. ``progress`` and ``moved`` are called as files are staged.
    """

    def __init__(
        self,
        run: Run,
        say: Callable[[str], None] | None = None,
        *,
        environ: Mapping[str, str] | None = None,
        plans: Sequence[Plan] = (),
        progress: Callable[[str], None] | None = None,
        moved: Progress | None = None,
    ) -> None:
        self._plans, self._progress, self._moved = {plan.run_url: plan for plan in plans}, progress, moved
        run._follow_handover()
        super().__init__(run, say, environ=environ)
        self.begin()

    def move(self, result: Mapping[str, Any]) -> bool:
        """Move the run to its next place, which ended here with ``result``. Return True."""
        run = self._run
        refusals = list(result.get("refusals") or ())
        for row in result["attempts"]:  # accepted, but ended without machines
            request = run.store.attempt_request(run.run_id, int(str(row["number"]).partition(".")[0]))
            if row["category"] in NO_MACHINES and request is not None:
                refusals.append(handover.refusal_of(run, row, request.gpu_index))
        if not refusals:
            request = run.store.attempt_request(run.run_id, max(run.store.attempts(run.run_id)))
            refusals.append(handover.refusal_of(run, result, request.gpu_index if request is not None else 0))
        from ..store.copies import PreviousPlace

        left = PreviousPlace(run.store, Layout.from_dict(run.record["layout"]))
        (record, *rest) = handover.fallbacks_of(run)
        following = self._plans.get(str(record["run"])) or self._recorded(record, rest)
        chain = dataclasses.replace(following.fallbacks, refusals=tuple(refusals), left=left)
        plan = dataclasses.replace(following, fallbacks=chain)
        self._say(f"{_refusal_text(refusals[-1])}; continuing on {name_of(plan)}")

        def leave() -> None:
            reason = f"{result['reason']}; it continued at {plan.run_url}"
            if not handover.decide(run.store, run.run_id, plan.run_url, run._kept({**result, "reason": reason})):
                raise ConflictError(f"{run.url} was moved elsewhere by another client", field="run_id")
            if run.store.cancelled(run.run_id):  # the cancelling client looks here next, so one of the two acts
                plan.store.cancel(plan.run_id)

        try:
            with handover.moving(run.store, run.run_id):  # it may copy data for hours
                self._send_plan(plan, decide=leave)
        finally:
            run._follow_handover()
        return True

    def begin(self) -> None:
        """Start the run in its new place if the client that moved it there has died."""
        run = self._run
        if run._handed_over and not run.store.attempts(run.run_id) and not run.store.cancelled(run.run_id):
            self._say(f"starting it in {run.store.url}, to which it had come")
            self._send_plan(self._recorded(run.record, handover.fallbacks_of(run)))
            run._follow_handover()

    def _send_plan(self, plan: Plan, decide: Callable[[], object] | None = None) -> None:
        """Send the plan; report a refusal for lack of machines."""
        _check_installed(plan)  # before anything is decided: another client may have the packages
        try:
            send(plan, environ=self._environ, progress=self._progress, moved=self._moved, decide=decide)
        except (CapacityError, QuotaError) as exc:
            self._say(f"{name_of(plan)} refused it: {exc.with_hint()}")

    # -------------------------------------------------------------------------------------- the next place, as recorded

    def _recorded(self, record: Mapping[str, Any], rest: Sequence[Mapping[str, Any]]) -> Plan:
        """Return the plan of a place made from its record alone; ``rest`` are the places after it."""
        from ..store.copies import with_own_copies

        settings = self._run._settings
        provider = settings.provider_of(record)
        layout, job = Layout.from_dict(record["layout"]), Job.from_dict(record["job"])
        store = Store(layout.store, storage=provider.storage, moving=settings.moving_of(record))
        own = with_own_copies(layout)  # else planned by an earlier version
        if own != layout and not store.has_run(layout.run_id):
            layout = own
        fallbacks = Fallbacks(
            rest=tuple(rest),
            first=str(self._run.record.get("first") or self._run.url),
            refusals=tuple(record.get("refusals") or ()),
        )
        plan = plan_of_record(
            record,
            job,
            layout,
            store=store,
            provider=provider,
            settings=settings,
            fetch=self._held,
            fallbacks=fallbacks,
        )
        try:
            for name, item in layout.inputs.items():
                if item.source is None and item.url.startswith(f"{layout.store}/data/"):
                    self._bring(item.url.removeprefix(f"{layout.store}/data/").partition("/")[0], store, name)
        except BaseException:
            store.withdraw(plan.run_id)
            raise
        return plan

    def _held(self, key: str) -> bytes:
        """Return the previous place's content of ``key``. Raises `StorageError` if missing: this cloudtrain differs
        from the submitter's, and a third-party provider needs a runtime of its own."""
        run = self._run
        try:
            return run.store.files.read(key)
        except FileNotFoundError:
            again = f"submit the same job again with --run-id {run.run_id}, by the same version of cloudtrain"
            raise StorageError(
                f"{run.store.url}/{key} is missing, so the next store cannot get it", hint=again
            ) from None

    def _bring(self, digest: str, store: Store, name: str) -> None:
        """Copy a data tree from this run's store into ``store`` and check each digest, unless it is complete there."""
        old, manifest = self._run.store, f"data/manifests/{digest}.json"
        store.announce(self._run.run_id, [digest], say=self._say)  # from here on no client deletes the tree
        if store.files.exists(manifest):
            return
        listed = old.record(manifest)
        if listed is None:
            again = f"submit the same job again with --run-id {self._run.run_id} on a machine that has the data"
            raise StorageError(f"inputs.{name}: {old.url} has no copy of it for {store.url}", hint=again)
        import tempfile

        self._say(f"copying {name} to {store.url}")
        with tempfile.TemporaryDirectory(prefix="cloudtrain-") as folder:
            for path, item in sorted(listed["files"].items()):
                here = Path(folder, hashlib.sha256(path.encode()).hexdigest())
                old.files.download(f"data/{digest}/{path}", here, sha256=item["sha256"], size=item["size"])
                store.files.upload(here, f"data/{digest}/{path}", progress=self._moved)
                os.unlink(here)
        store.files.write(manifest, old.files.read(manifest))
