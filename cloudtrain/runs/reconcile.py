"""Do once what a waiting client would do, for one run or for all unfinished runs of a store.

Nothing is kept between two calls: creating a record in the store is the decision. So any number of clients may
reconcile at once, die anywhere, and begin again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..errors import CloudtrainError, LostContactError, NotFoundError
from ..job.run_id import is_run_id
from ..settings.settings import NO_SETTINGS, Settings, store_elsewhere
from ..storage.local_disk import local_path, normalize
from ..storage.timings import CLIENT_TIMINGS
from ..store.store import in_store
from ..validate import url_scheme
from .listing import recorded_runs
from .log_sources import patiently
from .outcome import one_line
from .retry import Retry
from .run import Run, open_run
from .sweeps.sweep import open_sweep

Row = dict[str, Any]
Say = Callable[[str], None]

_STANDS: Row = {"state": "unknown", "category": None, "reason": ""}


def reconcile(
    target: str | None, *, settings: Settings, cwd: Path, environ: Mapping[str, str], say: Say | None = None
) -> list[Row]:
    """Run `reconcile_run` or `reconcile_store` on ``target``; None: the setting's store.

    A run is an id in the setting's store, or the URL or path of a run folder; any other URL or path is a store.
    ``environ`` has the values of ``env:`` references. Raises `NotFoundError` if there is no such run or folder.
    """
    if target is None:
        places = {normalize(own.resolved(), cwd=cwd): own for own in reversed(settings.candidates())}
        found = [reconcile_store(url, environ=environ, say=say, settings=own) for url, own in reversed(places.items())]
        return list({row["run"]: row for rows in found for row in rows}.values())
    if _is_store(target, cwd):
        url = normalize(settings.resolved(target), cwd=cwd)
        return reconcile_store(url, environ=environ, say=say, settings=settings)
    return [reconcile_run(open_run(target, cwd=cwd, settings=settings), environ=environ, say=say)]


def _is_store(target: str, cwd: Path) -> bool:
    parent, _, name = target.replace(os.sep, "/").rstrip("/").rpartition("/")
    if url_scheme(target) or parent:
        return parent.rpartition("/")[2] not in ("runs", "sweeps")
    return (cwd / name / "runs").is_dir() or not is_run_id(name)


def reconcile_run(run: Run, *, environ: Mapping[str, str], say: Say | None = None) -> Row:
    """Reconcile one run, and return its row: the run, its state, what was ``done``.

    Raises nothing: a failure is ``error``, in one line, with its ``exit_code``, else 0.
    """
    return _row(run, environ, say, CLIENT_TIMINGS.platform)[0]


def _row(run: Run, environ: Mapping[str, str], say: Say | None, patience: float) -> tuple[Row, Exception | None]:
    done: list[str] = []

    def log(text: str) -> None:
        done.append(text)
        if say is not None:
            say(f"{run.run_id}: {text}")

    row = {"run": run.url, "run_id": run.run_id, "provider": None, **_STANDS, "done": done, "error": None}
    try:
        row["provider"] = run.provider_name
        result = patiently(lambda: run.reconcile(retry=Retry(run, log, environ=environ), say=log), seconds=patience)
    except Exception as exc:  # noqa: BLE001 - one unreadable run must not stop the others
        return {**row, "error": one_line(exc), "exit_code": _code(exc)}, exc
    now = {"run": run.url, "provider": run.provider_name}  # it may have moved to another place
    return {**row, **now, **{key: result[key] for key in _STANDS}, "exit_code": 0}, None


def _code(exc: Exception) -> int:
    return exc.exit_code if isinstance(exc, CloudtrainError) else CloudtrainError.exit_code


def reconcile_store(
    url: str, *, environ: Mapping[str, str], say: Say | None = None, settings: Settings = NO_SETTINGS
) -> list[Row]:
    """Run `reconcile_run` on every run without a result of the store at ``url``, in order of ids, then step its sweeps.

    A run that only another machine knows is named in ``error``, but its ``exit_code`` is 0. Raises `NotFoundError` for
    a folder that does not exist, and the errors of listing the store. ``settings`` have this machine's identity.
    """
    url = normalize(url, cwd=Path.cwd())
    path = local_path(url)
    if path is not None and not path.is_dir():
        hint = store_elsewhere(settings.store, settings)
        raise NotFoundError(f"there is no store at {path}", field="store", hint=hint)
    rows: list[Row] = []
    silent: set[int] = set()
    for seen, run in recorded_runs(url, settings):
        if isinstance(run, Exception):
            row = {"run": f"{url}/runs/{seen['run_id']}", "run_id": seen["run_id"], "provider": seen["provider"]}
            rows.append({**row, **_STANDS, "done": [], "error": one_line(run), "exit_code": _code(run)})
        elif run is not None:
            # One pause for a platform that does not answer, not one for each of its runs.
            row, exc = _row(run, environ, say, 0 if id(run.provider) in silent else CLIENT_TIMINGS.platform)
            if isinstance(exc, LostContactError):
                silent |= {id(run.provider)} if exc.passing else set()
                row["exit_code"] = row["exit_code"] if exc.passing else 0
            rows.append(row)
    return rows + _sweep_rows(url, environ, say, settings)


def _sweep_rows(url: str, environ: Mapping[str, str], say: Say | None, settings: Settings) -> list[Row]:
    """Make the steps of each sweep that has not ended, and return its row: ``run`` is the sweep's URL.

    Trials that only another machine knows are an ``error`` with exit code 0, as such runs are.
    """
    rows: list[Row] = []
    store, sweeps = in_store(url, settings, lambda found: (found, found.sweeps()))
    for sweep_id in sweeps:
        if store.sweep_ended(sweep_id):
            continue
        row = {"run": f"{url}/sweeps/{sweep_id}", "run_id": sweep_id, "provider": None, **_STANDS, "done": []}
        try:
            sweep = open_sweep(sweep_id, store_url=url, settings=settings)
            row["provider"] = sweep.provider.name
            result = sweep.step(on_change=row["done"].append, environ=environ)
            row |= {"state": result["state"], "reason": result["reason"], "error": None, "exit_code": 0}
        except Exception as exc:  # noqa: BLE001 - one unreadable sweep must not stop the others
            elsewhere = isinstance(exc, LostContactError) and not exc.passing
            row |= {"error": one_line(exc), "exit_code": 0 if elsewhere else _code(exc)}
        if say is not None:
            for line in row["done"]:
                say(f"{sweep_id}: {line}")
        rows.append(row)
    return rows
