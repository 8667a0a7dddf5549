"""The runs of a sweep's trials: plan each from the sweep's record, send it, look after it, and read its outcome."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ...errors import SpecError, StorageError
from ...job.job import Job
from ...provider_api.protocol import Layout, Provider
from ...settings.settings import Settings
from ...store.store import Store
from ..attempts import NO_MACHINES, had_no_machines
from ..handover import ANSWERS, cut_off
from ..metrics import MetricsReader
from ..retry import Retry
from ..run import Run
from ..submit import Plan, plan_of_record, send_plan
from .prune import Points, costs_of, value_of
from .spec import RULES, SweepSpec
from .state import Outcome, Trial

TAG = "sweep"
"""Name of the tag by which the platform and `list` know the trials of a sweep."""
Say = Callable[[str], None]


class RunTrials:
    """The trials of a sweep whose sweep.json is ``record``. ``environ`` has the values of ``env:`` references."""

    def __init__(
        self,
        record: Mapping[str, Any],
        spec: SweepSpec,
        *,
        store: Store,
        provider: Provider,
        settings: Settings,
        environ: Mapping[str, str],
        say: Say = lambda text: None,
    ) -> None:
        self._record, self._spec, self._environ, self._say = record, spec, environ, say
        self._store, self._provider, self._settings = store, provider, settings
        self._readers: dict[int, MetricsReader] = {}
        self._final: dict[int, Points] = {}
        self._sent: set[int] = set()

    def run(self, trial: Trial) -> Run:
        """Return the handle of a trial's run."""
        return Run(store=self._store, run_id=trial.run, provider=self._provider, settings=self._settings)

    def advance(self, trial: Trial, stop: str) -> Outcome | None:
        """Send or stop the trial as `Trials.advance` does, and do a waiting client's work once."""
        result = self._store.result(trial.run)
        if result is None:
            run = self.run(trial)
            if stop:
                self._store.cancel(trial.run)  # first of all: a client that is about to send it sees this
            try:
                if not (stop and self._store.has_run(trial.run)):  # to stop a recorded one takes no secret
                    self._send(trial)
            except SpecError as exc:
                if not stop or self._store.has_run(trial.run):
                    raise
                # No client sends it any more: the cancel is older than any run.json.
                return Outcome(trial=trial.n, state="cancelled", max_cost=0.0, max_gpu_hours=0.0, reason=str(exc))
            say = partial(self._line, trial)
            run.reconcile(retry=Retry(run, say, environ=self._environ))
            result = self._store.result(trial.run)
        return None if result is None else self.outcome(trial, result, stop)

    def outcome(self, trial: Trial, result: Mapping[str, Any], stop: str) -> Outcome:
        """Return the outcome of a trial whose run has this ``result``.

        A request without an answer may still arrive at the platform, so the trial's use is unknown.
        """
        found, run = outcome_of(trial, result, self._rows(trial), stop, self._spec), trial.run
        if result.get("native_id") is None and any(cut_off(self._store, run, k) for k in self._store.attempts(run)):
            return dataclasses.replace(found, max_cost=None, max_gpu_hours=None)
        return found

    def points(self, trial: Trial) -> Points:
        """Return the points of the trial's metrics so far. Those of a run with a result are read once."""
        if trial.n in self._final:
            return self._final[trial.n]
        is_final = self._store.result(trial.run) is not None
        points = costs_of(self._rows(trial), self._spec)
        if is_final:
            self._final[trial.n] = points
            self._readers.pop(trial.n, None)
        return points

    def _rows(self, trial: Trial) -> list[dict[str, Any]]:
        return self._readers.setdefault(trial.n, MetricsReader(self._store, trial.run)).history()

    def _send(self, trial: Trial) -> None:
        """Send the trial, unless a client has. A refusal is recorded in the run, and no error here."""
        if trial.n not in self._sent and self._store.submitted(trial.run, 0) is None:
            plan = trial_plan(self._record, trial, store=self._store, provider=self._provider, settings=self._settings)
            try:
                send_plan(plan, environ=self._environ, note=partial(self._line, trial))
            except ANSWERS:
                if self._store.refused(trial.run, 0) is None:
                    raise
        self._sent.add(trial.n)

    def _line(self, trial: Trial, text: str) -> None:
        self._say(f"{trial.run}: {text}")


def outcome_of(
    trial: Trial, result: Mapping[str, Any], rows: list[dict[str, Any]], stop: str, spec: SweepSpec
) -> Outcome:
    """Return the outcome of a trial by its run's result and metrics rows. Pure.

    A trial that succeeded without the metric has failed. A script that ends with an error after the prune rule's stop
    counts as stopped. A run that was never sent, or never had machines by its record, has used nothing.
    """
    state, category, reason = str(result["state"]), result.get("category"), str(result.get("reason") or "")
    value, native, cost = value_of(rows, spec), result.get("native_id"), result.get("cost") or {}
    if stop in RULES and (state == "cancelled" or category == "user_error"):
        # Many scripts end with an error after the stop signal.
        state, reason = "stopped", stop
    elif state == "failed" and (native is None or category in (*NO_MACHINES, "auth")):
        state = "refused"
    elif state == "failed" and category == "timeout":
        state = "capped"
    elif state == "failed" and category in ("preempted", "infra"):
        state = "interrupted"
    elif state == "succeeded" and value is None:
        columns = ", ".join(dict.fromkeys(key for row in rows for key in row)) or "none"
        state, reason = "failed", f"its metrics have no finite {spec.metric}; columns: {columns}"
    points, is_free = costs_of(rows, spec), native is None or (not rows and had_no_machines(result))
    return Outcome(
        trial=trial.n,
        state=state,
        value=value,
        at=points[-1][0] if points else None,
        max_cost=0.0 if is_free else cost.get("estimate_usd"),
        max_gpu_hours=0.0 if is_free else cost.get("gpu_hours"),
        reason=reason if state != "succeeded" else "",
    )


def trial_plan(
    record: Mapping[str, Any], trial: Trial, *, store: Store, provider: Provider, settings: Settings
) -> Plan:
    """Return the plan of a trial, made from sweep.json alone: its code, data and cloudtrain.pyz are in the store.

    Raises the errors of `Provider.plan`.
    """
    base = Layout.from_dict(record["layout"])
    job = Job.from_dict(record["job"])
    job = job.replace(hyperparameters={**job.hyperparameters, **trial.params})
    layout = dataclasses.replace(base, run_id=trial.run)

    def own(url: str) -> str:
        return url.replace(f"{base.run}/", f"{layout.run}/", 1)

    inputs = {name: dataclasses.replace(item, url=own(item.url)) for name, item in base.inputs.items()}
    layout = dataclasses.replace(layout, inputs=inputs, resume=base.resume and own(base.resume))
    return plan_of_record(
        record,
        job,
        layout,
        store=store,
        provider=provider,
        settings=dataclasses.replace(settings, budget=record.get("budget", "")),
        fetch=partial(_held, store),
    )


def _held(store: Store, key: str) -> bytes:
    try:
        return store.files.read(key)
    except FileNotFoundError:
        raise StorageError(f"{store.url}/{key} is missing: the sweep's content was removed") from None
