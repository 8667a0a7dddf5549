"""The handle of a sweep: create it, open it from any machine, drive it, and read its results."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from ... import _version
from ...errors import CloudtrainError, ConflictError, LostContactError, NotFoundError, SpecError, StorageError, warn
from ...job.fields import path_of, path_text
from ...job.job import Job, check_job
from ...job.run_id import new_run_id
from ...provider_api.protocol import Provider
from ...settings.settings import NO_SETTINGS, Settings, StoreCredentials
from ...storage.local_disk import local_path
from ...storage.timings import CLIENT_TIMINGS
from ...store.store import Store, split_ref, sweep_folder
from ...validate import check_functions, did_you_mean, json_value, parse_seconds, table_of, text_of
from ..log_sources import Contact
from ..run import Run
from ..submit import Plan, make_plan, plan_record, stage_content
from .decide import run_of_trial
from .drive import Driver, Log, writer
from .samplers import check_sampler, propose, study_of
from .spec import CURRENCIES, DIGITS, LONGEST_ID, SweepSpec, check_caps, check_sweep_id
from .state import State, Trial, fold
from .trials import TAG, RunTrials, trial_plan
from .view import best_of, change_lines, sweep_summary

if TYPE_CHECKING:
    from optuna import Study

FIRST_PAUSE = 0.5
"""Seconds between two looks at first; they grow to the provider's longest."""
CAPS = (*CURRENCIES, "max_runtime")
NEEDS = ("sweep_id", "spec", "cap", "run", "provider", "settings", "job", "layout", "code")
"""Keys of sweep.json without which a sweep cannot continue."""
Say = Callable[[str], None]


@runtime_checkable
class JobHolder(Protocol):
    """An object with a job and the keywords of `cloudtrain.submit`, such as an Estimator."""

    job: Job
    provider: str | None
    store: str | os.PathLike[str] | None
    profile: str | None
    settings: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Best:
    """The best trial so far: its number, its run, its parameters and the value of the metric."""

    trial: int
    run: Run
    params: dict[str, Any]
    value: float


class Sweep:
    """A search over hyperparameters under one budget. Each trial is an ordinary run.

    ::

        sweep = Sweep(
            Job.make(entry_point="train.py", max_runtime="10m"),
            space={"lr": {"low": 1e-5, "high": 1e-1, "log": True}, "width": [64, 128]},
            metric="val_loss",
            trials=12,
            parallel=2,
        )
        sweep.run()
        sweep.best.params
        sweep = Sweep.attach(sweep.url)  # later, from any machine

    ``job``
        a Job or an Estimator. Its ``max_cost``, ``max_gpu_hours`` and ``max_runtime`` limit one trial.
    ``space``, ``metric``, ``goal``, ``value``, ``sampler``, ``seed``, ``first``, ``prune``
        the fields of tune.toml.
    ``trials``, ``parallel``, ``max_cost``, ``max_gpu_hours``, ``max_runtime``, ``failures``
        the limits of tune.toml.
    ``sweep_id``
        id of the sweep; default: a new one.
    ``provider``, ``store``, ``profile``, ``settings``
        the keywords of `cloudtrain.submit`.

    Raises `SpecError` for an invalid value, with its ``field``. Nothing is written or sent before you call `run`,
    `step` or `create`.
    """

    def __init__(
        self,
        job: Job | JobHolder,
        *,
        space: Mapping[str, Any],
        metric: str,
        goal: str = "minimize",
        value: str = "best",
        sampler: str = "random",
        seed: int = 0,
        first: Sequence[Mapping[str, Any]] = (),
        prune: str | Mapping[str, Any] | None = None,
        trials: int | None = None,
        parallel: int = 1,
        max_cost: float | None = None,
        max_gpu_hours: float | None = None,
        max_runtime: int | str | None = None,
        failures: int = 5,
        sweep_id: str | None = None,
        provider: str | None = None,
        store: str | os.PathLike[str] | None = None,
        profile: str | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        limits: dict[str, Any] = {"trials": trials, "parallel": parallel, "max_cost": max_cost}
        limits |= {"max_gpu_hours": max_gpu_hours, "max_runtime": max_runtime, "failures": failures}
        tables: dict[str, Any] = {"metric": metric, "goal": goal, "value": value, "sampler": sampler, "seed": seed}
        tables["prune"] = prune
        tables["space"] = table_of(space, "space")
        points = enumerate(first if isinstance(first, Iterable) else [first])
        tables["first"] = [table_of(point, f"first[{number}]") for number, point in points]
        tables["limits"] = {key: item for key, item in limits.items() if item is not None}
        spec = SweepSpec.from_dict({key: item for key, item in tables.items() if item is not None})
        if isinstance(job, JobHolder):
            provider, store, profile = provider or job.provider, store or job.store, profile or job.profile
            settings, job = settings or job.settings, job.job
        where: Any = {"provider": provider, "store": store}
        chosen = Settings.load(overrides=settings, profile=profile, **where)
        plan = plan_of_sweep(check_job(job), chosen, sweep_id=sweep_id, cwd=Path.cwd())
        self._fill(_record_of(plan, spec), plan.store, plan.provider, plan.settings, plan)
        warn(plan.warnings)

    def _fill(
        self,
        record: dict[str, Any],
        store: Store,
        provider: Provider | None,
        settings: Settings,
        plan: Plan | None = None,
    ) -> Sweep:
        """Make this the handle of the sweep with sweep.json ``record``; ``plan`` is trial 0's, until it is recorded."""
        self.record, self.store, self._provider, self._settings, self._plan = record, store, provider, settings, plan
        self.spec, self.id = SweepSpec.from_dict(record["spec"]), str(record["sweep_id"])
        self._live: RunTrials | None = None
        self._log = Log(store, sweep_folder(self.id))
        return self

    @classmethod
    def attach(
        cls, sweep: str | os.PathLike[str], *, store: str | os.PathLike[str] | None = None, profile: str | None = None
    ) -> Sweep:
        """Return the sweep with this URL, or with this id in ``store`` (default: the setting).

        Raises `NotFoundError` if there is no such sweep.
        """
        sweep, settings = text_of(path_text(sweep), "sweep"), Settings.load(store=store, profile=profile)
        return open_sweep(sweep, settings=settings)

    def __repr__(self) -> str:
        return f"Sweep({self.url!r})"

    @property
    def url(self) -> str:
        """The URL of the sweep's folder, with which `attach` finds the sweep from any machine."""
        return f"{self.store.url}/sweeps/{self.id}"

    @property
    def cap(self) -> dict[str, float]:
        """The limits of one trial, by the names of the job's fields."""
        return dict(self.record["cap"])

    @property
    def limits(self) -> dict[str, Any]:
        """The limits of the sweep, by name, after all changes. Reads the store."""
        return dataclasses.asdict(fold(self.spec, self._log.read()).limits)

    @property
    def provider(self) -> Provider:
        """The provider, with the settings of the sweep's creator."""
        if self._provider is None:
            self._provider = self._settings.provider_of(self.record)
        return self._provider

    # ------------------------------------------------------------------------------------------------------- the drive

    def create(self) -> bool:
        """Upload the code and record the sweep, unless it is recorded. Return True if this call recorded it.

        Raises `ConflictError` if another sweep has the id, and the errors of the store.
        """
        if self._plan is None:
            return False
        check_sampler(self.spec)
        params = propose(self.spec, State(limits=self.spec.limits)) or {}
        first = Trial(n=0, run=run_of_trial(self.id, 0), params=params, cap=self.cap)
        trial_plan(self.record, first, store=self.store, provider=self.provider, settings=self._settings)
        try:
            stage_content(self._plan)
            created = self.store.create_sweep(self.id, self.record)
        finally:
            self.store.withdraw(self._plan.run_id)
        stored = self.store.sweep(self.id) or {}
        if not created and _identity(stored) != _identity(self.record):
            text = f"{self.id!r} is already the id of another sweep in {self.store.url}"
            raise ConflictError(text, field="sweep_id", hint=f"to continue that one: cloudtrain sweep {self.id}")
        self.record, self._plan = stored, None
        return created

    def run(
        self,
        *,
        timeout: float | str | timedelta | None = None,
        on_change: Say | None = print,
        patience: float = CLIENT_TIMINGS.pull_silence,
    ) -> Best | None:
        """Create the sweep if it does not exist, and run it to its end. Return the best trial.

        ``timeout``
            raise `LostContactError` after this time, in seconds or as text (``"2h"``).
        ``on_change``
            called with a line of text for each change.
        ``patience``
            raise `LostContactError` if the platform or store has not answered for so many seconds.

        After Ctrl-C or an error, running trials continue. Call `run` again to continue the sweep, from any machine.
        """
        check_functions(on_change=on_change)
        patience = parse_seconds(patience, field="patience")
        seconds = None if timeout is None else parse_seconds(timeout, field="timeout")
        self.create()
        deadline = None if seconds is None else time.monotonic() + seconds
        say = on_change or (lambda _: None)
        driver, contact = self._driver(say), Contact(clock=time.monotonic, patience=patience)
        before, pause = driver.state(), FIRST_PAUSE
        while True:
            again = self._step(driver, contact)
            now = driver.known
            for line in change_lines(self.spec, before, now):
                say(line)
            if now.ended and not now.live:
                return self.best
            pause = FIRST_PAUSE if again or now != before else pause
            before = now
            if contact.lost:
                raise LostContactError(f"{contact.error} (for {patience:.0f} s now; the sweep's trials continue)")
            if deadline is not None and time.monotonic() >= deadline:
                raise LostContactError(f"sweep {self.id} has not ended within the timeout; its trials continue")
            if not again:
                time.sleep(pause if deadline is None else max(0.0, min(pause, deadline - time.monotonic())))
                pause = min(max(self.provider.max_poll_s, FIRST_PAUSE), pause * 1.5)

    def _step(self, driver: Driver, contact: Contact) -> bool:
        """Make one step. Report a platform or remote store that does not answer to ``contact``; raise other errors."""
        again = False
        try:
            again = driver.step()
            driver.raise_first()
        except LostContactError as exc:
            if not exc.passing:
                raise
            contact.heard(exc)
        except StorageError as exc:
            if local_path(self.store.url) is not None:
                raise
            contact.heard(exc)
        else:
            contact.heard(None)
        return again

    def step(self, *, on_change: Say | None = None, environ: Mapping[str, str] | None = None) -> dict[str, Any]:
        """Start and stop every trial that can be started or stopped now. Return the object of `result`.

        ``environ`` has the values of ``env:`` references (default: the variables of this process). Raises the errors of
        store and platform.
        """
        check_functions(on_change=on_change)
        self.create()
        say = on_change or (lambda _: None)
        driver = self._driver(say, environ)
        before = driver.state()
        while driver.step():
            pass
        for line in change_lines(self.spec, before, driver.known):
            say(line)
        driver.raise_first()
        return self.summary(driver.known)

    def _driver(self, say: Say, environ: Mapping[str, str] | None = None) -> Driver:
        return Driver(
            spec=self.spec,
            sweep_id=self.id,
            cap=self.cap,
            log=self._log,
            trials=self._trials(say, environ),
            by=writer(),
            fresh=self.provider.min_poll_s,
        )

    def _trials(self, say: Say = lambda _: None, environ: Mapping[str, str] | None = None) -> RunTrials:
        return RunTrials(
            self.record,
            self.spec,
            store=self.store,
            provider=self.provider,
            settings=self._settings,
            environ=os.environ if environ is None else environ,
            say=say,
        )

    def change(self, limits: Mapping[str, Any]) -> None:
        """Replace these limits. This opens an ended sweep again. Raises `SpecError` for an invalid limit."""
        limits = table_of(limits, "limits")
        while limits:
            state = fold(self.spec, self._log.read())
            changed = state.limits.changed(limits)
            self.spec.check(changed)
            check_caps(changed, self.cap)
            if self._add({"kind": "limits", "limits": dict(limits)}):
                return

    def cancel(self) -> None:
        """Stop every trial and start no further one. This does not wait for the end. A second call changes nothing.

        Raises the errors of store and platform.
        """
        while not ((state := fold(self.spec, self._log.read())).ended or state.closing):
            self._add({"kind": "stop", "trial": None, "why": "cancelled"})
        self.step()

    def _add(self, entry: Mapping[str, Any]) -> bool:
        return self._log.add({**entry, "ended": [], "by": writer(), "at": time.time()})

    # ----------------------------------------------------------------------------------------------------- the results

    def state(self) -> State:
        """Return the current state of the sweep and its trials. Asks the platform about the trials that still run."""
        state, trials = fold(self.spec, self._log.read()), self._trials()
        found = []
        for trial in state.live:
            with contextlib.suppress(CloudtrainError):  # not sent yet, or a platform that does not answer
                trials.run(trial).result()
                if (kept := self.store.result(trial.run)) is not None:
                    found.append(trials.outcome(trial, kept, state.stop_of(trial.n)))
        return state.with_outcomes(found)

    def progress(self, state: State) -> dict[int, tuple[float, float]]:
        """Return the last progress and value of running trials with metrics, by trial number. Reads the store."""
        _check_state(state)
        self._live = self._live or self._trials()
        last = {trial.n: self._live.points(trial)[-1:] for trial in state.live}
        return {n: (points[0][0], self.spec.sign * points[0][1]) for n, points in last.items() if points}

    def result(self) -> dict[str, Any]:
        """Return the object that ``cloudtrain status --json`` prints for a sweep."""
        return self.summary(self.state())

    def summary(self, state: State) -> dict[str, Any]:
        """Return the object of `result` for a state that `state` returned."""
        _check_state(state)
        return sweep_summary(self.spec, state, url=self.url, sweep_id=self.id, provider=str(self.record["provider"]))

    @property
    def best(self) -> Best | None:
        """The best trial that has succeeded, or None. Reads the store."""
        state = self.state()
        found = best_of(self.spec, state)
        if found is None or found.value is None:
            return None
        trial = state.trials[found.trial]
        return Best(trial=trial.n, run=self._trials().run(trial), params=dict(trial.params), value=found.value)

    def study(self) -> Study:
        """Return an `optuna.Study` in memory with every trial. All of Optuna's plots work with it.

        Raises `SpecError` if Optuna is not installed.
        """
        return study_of(self.spec, self.state())

    def report(self, path: str | os.PathLike[str] = ".") -> Path:
        """Write one HTML page about the sweep and return its path. The page opens without a network.

        ``path`` is a file or a folder. In a folder, the file is ``<sweep id>.html``.
        """
        page: Path = import_module("cloudtrain.report.sweep").write_sweep(self, path_of(path, "path"))
        return page


def _check_state(state: Any) -> None:
    if not isinstance(state, State):
        raise SpecError(f"must be a State, not {type(state).__name__}", field="state", hint="call sweep.state()")


def plan_of_sweep(
    job: Job,
    settings: Settings,
    *,
    sweep_id: str | None,
    cwd: Path,
    make: Callable[..., Plan] | None = None,
) -> Plan:
    """Return the plan of a sweep's job, with the id of its first trial. Reads files only.

    ``make`` makes the plan in place of `make_plan`, with the same keywords. Raises the errors of `make_plan`, and
    `SpecError` for a fallback: the budget holds in one store.
    """
    chosen = sweep_id or new_run_id(job.name)[:LONGEST_ID].rstrip("-")
    first = run_of_trial(check_sweep_id(chosen), 0)
    if settings.fallback:
        names = ", ".join(settings.fallback)
        raise SpecError(f"a sweep cannot use {names}", field="fallback", hint="run the sweep with --set fallback=")
    job = job.replace(tags={**job.tags, TAG: chosen}, env={"WANDB_RUN_GROUP": chosen, **job.env})
    return (make or make_plan)(job, settings=settings, run_id=first, cwd=cwd)


def make_sweep(plan: Plan, spec: SweepSpec) -> Sweep:
    """Return the sweep over the job of ``plan``, which `plan_of_sweep` made. Nothing is written yet.

    Raises `SpecError` if a trial has no cap in the currency of a limit.
    """
    record = _record_of(plan, spec)
    return Sweep.__new__(Sweep)._fill(record, plan.store, plan.provider, plan.settings, plan)


def _record_of(plan: Plan, spec: SweepSpec) -> dict[str, Any]:
    """Return sweep.json of a new sweep. Raises `SpecError` as `make_sweep` does."""
    cap = {name: value for name in CAPS if (value := getattr(plan.job, name)) is not None}
    check_caps(spec.limits, cap)
    head = {"protocol": 1, "version": _version.__version__, "created": time.time()}
    head |= {"sweep_id": plan.run_id[:-DIGITS], "spec": json_value(spec.to_dict(), "sweep"), "cap": cap}
    return {**head, **plan_record(plan)} | ({"budget": plan.settings.budget} if plan.settings.budget else {})


def _identity(record: Mapping[str, Any]) -> list[Any]:
    """Return the facts that two clients of one new sweep must share."""
    return [*(record.get(key) for key in ("spec", "job_digest", "provider")), record.get("code", {}).get("digest")]


def open_sweep(ref: str, *, store_url: str | None = None, settings: Settings = NO_SETTINGS) -> Sweep:
    """Return the sweep ``ref``: the URL or path of its folder, or its id in ``store_url`` (default: the setting).

    Raises `NotFoundError` with the nearest id if there is none.
    """
    where, sweep_id = split_ref(ref, "sweeps", store_url, settings)
    if not where:
        raise NotFoundError(f"{ref!r} is not the URL of a sweep, <store>/sweeps/<sweep id>", field="sweep")

    def read(caller: StoreCredentials) -> tuple[Store, dict[str, Any], StoreCredentials]:
        store = Store(where, storage=caller, moving=settings.moving)
        record = None
        with contextlib.suppress(SpecError):  # no id of a sweep
            record = store.sweep(check_sweep_id(sweep_id))
        if record is None:
            near = did_you_mean(sweep_id, store.sweeps())
            raise NotFoundError(f"no sweep {sweep_id!r} in {store.url}", field="sweep", hint=near)
        if missing := [key for key in NEEDS if key not in record]:
            raise StorageError(f"{store.url}/sweeps/{sweep_id}/sweep.json is damaged: it has no {missing[0]}")
        return store, record, caller

    store, record, caller = settings.let_in(where, read)
    provider = None
    with contextlib.suppress(CloudtrainError):  # the records can be read without the provider too
        provider = settings.provider_of(record)
        if local_path(store.url) is None and (own := caller.own(store.url, provider)) is not None:
            store = Store(store.url, storage=own, moving=settings.moving_of(record))
    return Sweep.__new__(Sweep)._fill(record, store, provider, settings)
