"""The public functions `plan`, `submit` and `attach`, and the Estimator: a Job and its settings as one object."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import CloudtrainError, warn
from .job.fields import path_text
from .job.job import FLAT_FIELDS, Input, Job, Scalar
from .validate import check_functions, sequence_of, table_of, text_of, texts_of

if TYPE_CHECKING:
    from .runs.log_order import Line
    from .runs.run import Run
    from .runs.submit import Plan
    from .settings.settings import Settings

__all__ = ["Estimator", "RunFailedError", "attach", "log_line", "plan", "ranks", "submit"]

DEFAULT_CHANNEL = "train"

Inputs = str | os.PathLike[str] | Input | Mapping[str, str | os.PathLike[str] | Input | Mapping[str, Any]]
Duration = int | str | timedelta
Texts = str | Sequence[str]


class RunFailedError(CloudtrainError):
    """A run that did not succeed while `Estimator.fit` waited. ``result`` is the object of ``result.json``."""

    def __init__(self, result: Mapping[str, Any]) -> None:
        self.result = dict(result)
        self.exit_code = int(result["exit_code"])
        category = f" ({result['category']})" if result.get("category") else ""
        super().__init__(
            f"run {result['run_id']} {result['state']}{category}: {result.get('reason') or 'no reason known'}"
        )


def plan(
    job: Job,
    *,
    provider: str | None = None,
    store: str | os.PathLike[str] | None = None,
    profile: str | None = None,
    fallback: Texts | None = None,
    settings: Mapping[str, Scalar | Sequence[Any]] | None = None,
    run_id: str | None = None,
) -> Plan:
    """Return exactly what `submit` would send. This sends nothing, and needs no network and no credentials.

    The keywords are those of `submit`. Without ``run_id``, the plan has the id ``<name>-plan``. The plan shows a
    placeholder for each missing setting. Raises `SpecError` for a job that the provider cannot run; ``field`` names the
    field.
    """
    chosen = _load_settings(provider, store, profile, fallback, settings)
    return _make_plan(job, chosen, run_id, preview=True)


def submit(
    job: Job,
    *,
    provider: str | None = None,
    store: str | os.PathLike[str] | None = None,
    profile: str | None = None,
    fallback: Texts | None = None,
    settings: Mapping[str, Scalar | Sequence[Any]] | None = None,
    run_id: str | None = None,
) -> Run:
    """Send the job and return its run at once. Call `Run.wait` to follow it, and `Run.cancel` to stop it.

    ``provider``
        name of the platform, such as ``local`` or ``sagemaker``.
    ``store``
        URL or folder below which code, data and runs are kept.
    ``profile``
        profile of the settings file.
    ``fallback``
        profiles to try next, in order, if there are no machines.
    ``settings``
        settings of cloudtrain or of the provider, such as ``{"region": "us-east-1"}``.
    ``run_id``
        id of the run; default: a new one. If you repeat a call with the same job and id, you get the same run.

    These keywords override cloudtrain.toml and the environment variables. Before anything is sent, each warning of the
    plan is a `UserWarning` of Python's ``warnings``, with your own line. Raises `SpecError` for an invalid job, with
    its ``field``, and the errors of store and platform. Raises nothing if the run fails later: look at `Run.result`.
    """
    from .runs.fallback import advice, submit_with_fallbacks

    chosen = _load_settings(provider, store, profile, fallback, settings)
    planned = _make_plan(job, chosen, run_id, preview=False)
    warn(advice(planned, "warnings"))
    return _following(submit_with_fallbacks(planned, environ=os.environ))


def attach(
    run: str | os.PathLike[str], *, store: str | os.PathLike[str] | None = None, profile: str | None = None
) -> Run:
    """Return the run with this URL, or with this id in ``store`` (default: the setting). Works from any machine.

    Raises `NotFoundError` if there is no such run. Its hint names the nearest id.
    """
    from .runs.run import open_run
    from .settings.settings import Settings

    run, settings = text_of(path_text(run), "run"), Settings.load(store=store, profile=profile)
    return _following(open_run(run, settings=settings))


def _load_settings(
    provider: str | None,
    store: str | os.PathLike[str] | None,
    profile: str | None,
    fallback: Texts | None,
    settings: Mapping[str, Any] | None,
) -> Settings:
    from .settings.settings import Settings

    # --set pairs and these settings share one table: this process's command line is not cloudtrain's.
    where: Any = {"provider": provider, "store": store, "fallback": fallback}
    return Settings.load(overrides=settings, profile=profile, **where)


def _make_plan(job: Job, settings: Settings, run_id: str | None, *, preview: bool) -> Plan:
    from .job.job import check_job
    from .runs.fallback import plan_with_fallbacks

    return plan_with_fallbacks(check_job(job), settings=settings, run_id=run_id, cwd=Path.cwd(), preview=preview)


def _following(run: Run) -> Run:
    """Return ``run``, whose `wait` starts the attempts that the job allows."""
    from .runs.retry import Retry

    run._policy = Retry
    return run


class Estimator:
    """A job and its settings as one object, with the methods of an estimator in SageMaker's SDK.

    All keywords but the last six are fields of a Job, where None means the field's default.

    ::

        estimator = Estimator(
            entry_point="train.py",
            source_dir="src",
            instance_count=2,
            gpu="H100:8",
            hyperparameters={"lr": 3e-4, "epochs": 10},
            max_runtime="12h",
            provider="local",
        )
        run = estimator.fit({"train": "s3://bucket/data"})  # logs on stdout until the end
        run.pull("results")
        run = estimator.fit("data/", wait=False)  # one input is the channel `train`
        run = Estimator.attach(run.url)  # later, from any machine

    ``provider``, ``store``, ``profile``, ``fallback`` and ``settings`` are the keywords of `submit`. ``write`` is
    called with the text of each log line. By default, the text goes to stdout.

    Raises `SpecError` for an invalid job, with its ``field``. Nothing is read or sent before you call ``plan`` or
    ``fit``.
    """

    latest_run: Run | None = None

    def __init__(
        self,
        *,
        entry_point: str | os.PathLike[str] | None = None,
        source_dir: str | os.PathLike[str] | None = None,
        dependencies: Sequence[str | os.PathLike[str]] | None = None,
        requirements: str | os.PathLike[str] | None = None,
        exclude: Texts | None = None,
        name: str | None = None,
        image: str | None = None,
        launcher: str | None = None,
        hyperparameters: Mapping[str, Any] | None = None,
        hyperparameter_style: str | None = None,
        args: Sequence[str] | None = None,
        env: Mapping[str, str] | None = None,
        secrets: Mapping[str, str] | None = None,
        inputs: Mapping[str, str | os.PathLike[str] | Input | Mapping[str, Any]] | None = None,
        instance_count: int | str | None = None,
        instance_type: str | None = None,
        gpu: Texts | None = None,
        total_gpus: int | None = None,
        gpu_memory: int | str | None = None,
        nproc_per_node: int | None = None,
        cpus: int | None = None,
        memory_gb: int | None = None,
        disk_gb: int | None = None,
        shm_gb: int | None = None,
        spot: bool | None = None,
        max_runtime: Duration | None = None,
        max_wait: Duration | None = None,
        max_cost: float | None = None,
        max_gpu_hours: float | None = None,
        retries: int | None = None,
        stall_timeout: Duration | None = None,
        keep_warm: Duration | None = None,
        min_gpu_util: str | None = None,
        node_check: bool | None = None,
        interactive: bool | None = None,
        debug_nccl: bool | None = None,
        resume_from: str | None = None,
        checkpoint_paths: Texts | None = None,
        keep_checkpoints: int | None = None,
        metrics: Mapping[str, str] | None = None,
        outputs: bool | None = None,
        max_outputs: int | str | None = None,
        webhook: str | None = None,
        webhook_headers: Mapping[str, str] | None = None,
        tags: Mapping[str, str] | None = None,
        options: Mapping[str, Mapping[str, Any]] | None = None,
        on: Mapping[str, Mapping[str, Any]] | None = None,
        provider: str | None = None,
        store: str | os.PathLike[str] | None = None,
        profile: str | None = None,
        fallback: Texts | None = None,
        settings: Mapping[str, Scalar | Sequence[Any]] | None = None,
        write: Callable[[str], object] | None = None,
    ) -> None:
        self.provider, self.store, self.profile, self.fallback = provider, store, profile, fallback
        self.settings, self._write, given = table_of(settings or {}, "settings"), write, locals()
        self.job = Job.make(**{flat: given[flat] for flat in FLAT_FIELDS if given.get(flat) is not None})

    def plan(self, inputs: Inputs | None = None, *, run_id: str | None = None) -> Plan:
        """Return exactly what ``fit`` would send, without network or credentials, as the function `plan` does."""
        return plan(self._job(inputs), **self._keywords, run_id=run_id)

    def fit(
        self, inputs: Inputs | None = None, *, wait: bool = True, logs: bool = True, run_id: str | None = None
    ) -> Run:
        """Submit the job and return its run: after its end with ``wait``, else at once.

        ``inputs`` replace the job's own inputs of the same channel. A single input is the channel ``train``. If a field
        of the job has ``{inputs.train}``, give this input to the constructor too.

        With ``wait`` and ``logs``, you see the log lines of all ranks as they come. Ctrl-C ends the wait only: the run
        continues, and ``latest_run`` is its handle.

        Raises `RunFailedError` if the run that it waited for did not succeed, and the errors of `submit`.
        """
        return self._finished(submit(self._job(inputs), **self._keywords, run_id=run_id), wait, logs)

    def rehearse(
        self,
        inputs: Inputs | None = None,
        *,
        preempt: Texts = (),
        kill: Texts = (),
        shortage: Texts = (),
        maps: Mapping[str, str] | None = None,
        local_image: str = "",
        local_store: str | os.PathLike[str] = "./.cloudtrain",
        secret_values: Mapping[str, str] | None = None,
        wait: bool = True,
        logs: bool = True,
        run_id: str | None = None,
    ) -> Run:
        """Run the job on this machine, in containers, as the provider's platform would start its exact request.

        ``preempt``, ``kill``, ``shortage``
            faults to inject, such as ``node=1,after=30s``.
        ``maps``
            a local path for each remote URL.
        ``local_image``
            local image to use in place of the job's.
        ``local_store``
            folder for the run and its data.
        ``secret_values``
            ``env:VARIABLE`` for each secret's name.

        All else is as in ``fit``. The ``differences`` in the ``body`` of the run's request name what a rehearsal cannot
        imitate.
        """
        from .engine.rehearse import plan_rehearsal
        from .runs.submit import send_plan

        kinds = {"preempt": preempt, "kill": kill, "shortage": shortage}
        drills = [(kind, text) for kind, given in kinds.items() for text in texts_of(sequence_of(given or ()), kind)]
        rehearsal = plan_rehearsal(
            self._job(inputs),
            settings=_load_settings(**self._keywords),
            run_id=run_id,
            cwd=Path.cwd(),
            store=text_of(path_text(local_store), "local_store"),
            maps=maps,
            image=local_image,
            secrets=secret_values,
            drills=drills,
        )
        warn(rehearsal.warnings)
        return self._finished(_following(send_plan(rehearsal, environ=os.environ)), wait, logs)

    def _finished(self, run: Run, wait: bool, logs: bool) -> Run:
        """Return ``run``, after its end if ``wait``. Raises `RunFailedError`."""
        self.latest_run = run
        if wait:
            result = run.wait(on_line=self._line if logs else None)
            if result["state"] != "succeeded":
                raise RunFailedError(result)
        return run

    @staticmethod
    def attach(
        run: str | os.PathLike[str], *, store: str | os.PathLike[str] | None = None, profile: str | None = None
    ) -> Run:
        """Return the run with this URL or id, as the function `attach` does."""
        return attach(run, store=store, profile=profile)

    @staticmethod
    def reconcile(
        target: str | os.PathLike[str] | None = None,
        *,
        store: str | os.PathLike[str] | None = None,
        profile: str | None = None,
    ) -> list[dict[str, Any]]:
        """Do the work of a waiting client once, for a run or for every unfinished run of a store.

        ``target`` is a run's URL or its id in ``store``, or the URL or path of a store. Without it, the store is
        ``store`` (default: the setting). Return one object for each run, as in ``cloudtrain reconcile --json``. An
        error with one run is its ``error``, and does not stop the others. Raises `NotFoundError` if ``target`` does not
        exist.
        """
        from .runs.reconcile import reconcile
        from .settings.settings import Settings

        settings = Settings.load(store=store, profile=profile)
        target = None if target is None else text_of(path_text(target), "target")
        return reconcile(target, settings=settings, cwd=Path.cwd(), environ=os.environ)

    def _job(self, inputs: Inputs | None) -> Job:
        check_functions(write=self._write)
        return self.job.replace(inputs={**self.job.inputs, **_channels(inputs)})

    @property
    def _keywords(self) -> dict[str, Any]:
        where = {"provider": self.provider, "store": self.store, "fallback": self.fallback}
        return {**where, "profile": self.profile, "settings": self.settings}

    def _line(self, line: Line) -> None:
        write = self._write or sys.stdout.write
        write(log_line(line, many=ranks(self.job) > 1) + "\n")


def _channels(inputs: Inputs | None) -> dict[str, Any]:
    if inputs is None:
        return {}
    if isinstance(inputs, (str, os.PathLike, Input)):
        return {DEFAULT_CHANNEL: inputs}
    return table_of(inputs, "inputs")


def ranks(job: Job) -> int:
    """Return the number of training processes over all nodes."""
    return job.resources.instance_count * (job.resources.processes() if job.launcher == "torchrun" else 1)


def log_line(line: Line, *, many: bool, times: bool = False) -> str:
    """Return a log line for people: ``[n0 r1] text`` if the run has ``many`` ranks, else the text.

    ``times`` puts its UTC time first, or a dash for a line without one.
    """
    from .runs.log_order import line_label
    from .runs.outcome import iso_time

    text = f"{label}{line.text}" if many and (label := line_label(line)) else line.text
    return f"{iso_time(line.time) or '-':24} {text}" if times else text
