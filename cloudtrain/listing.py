"""The runs of a store: how each stands, and which are not over."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from .job import Job
from .provider import Provider
from .run import NO_SETTINGS, Run
from .settings import Caller, Settings
from .store import Store
from .transfer import Moving, parallel
from .verdict import first_line, iso_time, one_line

__all__ = ["list_runs", "recorded"]

Record = Mapping[str, Any]


def list_runs(store: Store | str, settings: Settings = NO_SETTINGS) -> list[dict[str, Any]]:
    """Every run of the store, newest first: run_id, provider, state, category, reason, name, created (ISO 8601, UTC).

    A run that has a result.json costs one read; of the others the platform is asked. What cannot be read or does not
    answer has the state ``unknown``, with the reason.
    """
    rows = [
        {**row, **_asked(run)} if isinstance(run, Run) else {**row, **_unknown(run)} if run is not None else row
        for row, run in recorded(store, settings)
    ]
    rows.sort(key=lambda row: (row["created"] or "", row["run_id"]), reverse=True)
    return rows


def _row(run_id: str, data: Record, **said: Any) -> dict[str, Any]:
    created = data.get("created")
    row = {
        "run_id": run_id,
        "provider": data.get("provider"),
        "state": data.get("state"),
        "category": data.get("category"),
        "reason": data.get("reason", ""),
        "name": data.get("name"),
        "created": iso_time(created) if isinstance(created, (int, float)) else None,
    }
    return {**row, **said}


def recorded(
    store: Store | str, settings: Settings = NO_SETTINGS
) -> Iterator[tuple[dict[str, Any], Run | Exception | None]]:
    """Every run's row of what the store says, oldest id first; and the run when it has no result yet.

    Or why there is no telling. Runs with the same settings share one provider and so its connections. The store at a
    URL is opened as ``settings`` say, and for each run as its own provider says; a `Store` serves as it is.
    """
    asked: Caller | None = None
    if isinstance(store, str):
        store, asked, ids = settings.let_in(store, partial(_opened, store, settings.moving))
    else:
        ids = store.runs()
    shared: dict[str, tuple[Provider, Store]] = {}
    for run_id, (row, record) in zip(ids, parallel(lambda run_id: _read(store, run_id), ids), strict=True):
        if isinstance(record, Exception) or record is None:
            yield row, record
            continue
        try:
            key = json.dumps([record["provider"], record["settings"]], sort_keys=True)
            if key not in shared:
                provider = settings.provider_of(record)
                own = asked.own(store.url, provider) if asked is not None else None
                shared[key] = provider, store if own is None else Store(store.url, storage=own, moving=store.moving)
            yield row, Run(store=shared[key][1], run_id=run_id, provider=shared[key][0], settings=settings)
        except Exception as exc:  # noqa: BLE001 - nor must one whose provider's SDK is missing
            yield row, exc


def _opened(url: str, moving: Moving, caller: Caller) -> tuple[Store, Caller, list[str]]:
    store = Store(url, storage=caller, moving=moving)
    return store, caller, store.runs()


def _read(store: Store, run_id: str) -> tuple[dict[str, Any], dict[str, Any] | Exception | None]:
    """A run's row; and, when it is not final, its run.json."""
    try:
        result = store.result(run_id)
        if result is not None and "created" in result:
            return _row(run_id, result), None
        record = store.run(run_id)
        row = _row(run_id, {**record, **(result or {})}, name=Job.from_dict(record["job"]).name)
        return row, record if result is None else None
    except Exception as exc:  # noqa: BLE001 - one broken record must not hide the other runs
        return _row(run_id, {}), exc


def _asked(run: Run) -> dict[str, Any]:
    """What the platform says of the run."""
    try:
        status = run.status()
    except Exception as exc:  # noqa: BLE001 - nor must one platform that fails
        return _unknown(exc)
    return {"state": status.state, "category": status.category or None, "reason": first_line(status.reason)}


def _unknown(exc: Exception) -> dict[str, Any]:
    return {"state": "unknown", "reason": one_line(exc)}
