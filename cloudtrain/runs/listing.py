"""The runs of a store: how each stands, a page at a time, and which are not over."""

from __future__ import annotations

import contextlib
import fnmatch
import json
import math
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

from ..errors import CloudtrainError, NotFoundError, SpecError, StorageError
from ..job.job import Job
from ..provider_api.protocol import Provider
from ..settings.settings import NO_SETTINGS, Caller, Settings
from ..storage.files import Moving, parallel
from ..storage.local_disk import local_path
from ..store.store import Store, checked_run, run_folder
from .live_data import Seen
from .metrics import merge_metrics
from .outcome import first_line, iso_time, one_line
from .run import Run

__all__ = ["PAGE", "Listed", "Wanted", "list_page", "list_runs", "newest_run", "recorded", "run_ids"]

PAGE = 50
"""Runs on a page."""
ASKED = 1_000
"""Runs of a store over a network whose ids tell no date and whose run.json is read for it: one request each."""
CHUNK = 200
"""Runs that are read at a time: what bounds the memory, however many there are."""
_STAMP = re.compile(r"(\d{4})(\d\d)(\d\d)-(\d\d)(\d\d)(\d\d)-.+")

Record = Mapping[str, Any]
Row = dict[str, Any]


class Listed(NamedTuple):
    """A page: ``rows``, newest first. ``next`` is the run id that the next page comes after, None on the last.

    ``order`` says what newest means: ``created``, or ``id`` where there are more undated runs than are looked at.
    """

    rows: list[Row]
    next: str | None
    order: str


class Wanted(NamedTuple):
    """The runs that a page is for, and what it tells of them in addition to their rows.

    ``name`` is a shell pattern of the job's name. ``tags`` are names and values. ``columns`` are ``hp.NAME``,
    ``tag.NAME``, ``cost`` (US dollars) or the name of a metric, whose last value counts.
    """

    states: Collection[str] = ()
    provider: str | None = None
    name: str | None = None
    tags: Mapping[str, str] = MappingProxyType({})
    columns: Sequence[str] = ()

    @property
    def reads_job(self) -> bool:
        """Return whether a row needs more than the run's result."""
        return bool(self.tags) or any(column.startswith(("hp.", "tag.")) for column in self.columns)

    def takes(self, row: Row) -> bool:
        """Return whether ``row`` is of a run that is wanted, as far as its records say."""
        tags = row["tags"]
        return (
            self.provider in (None, row["provider"])
            and (self.name is None or fnmatch.fnmatchcase(row["name"] or "", self.name))
            and all(tags.get(key) == value for key, value in self.tags.items())
        )


class _Opened(NamedTuple):
    store: Store
    asked: Caller | None
    ids: list[str]


class _Place(NamedTuple):
    """Where a run stands among all: by ``time`` in Unix seconds (-inf: nobody knows), then by the numbers in its id."""

    time: float
    name: list[Any]
    run_id: str


class _Gone(NotFoundError):
    """A run's folder that holds no file: what `gc` has left of one, or a mount's marks of folders."""


def list_runs(store: Store | str, settings: Settings = NO_SETTINGS) -> list[Row]:
    """Every run of the store, newest first: run_id, provider, state, category, reason, name, created (ISO 8601, UTC).

    A run that has a result.json costs one read; of the others the platform is asked. What cannot be read or does not
    answer has the state ``unknown``, with the reason.
    """
    found = [_stands(row, run) for row, run in recorded(store, settings) if not isinstance(run, _Gone)]
    rows = [{key: row[key] for key in ROW} for row in found]
    rows.sort(key=lambda row: (row["created"] or "", row["run_id"]), reverse=True)
    return rows


def list_page(
    store: Store | str,
    settings: Settings = NO_SETTINGS,
    *,
    limit: int | None = PAGE,
    before: str | None = None,
    since: float | None = None,
    wanted: Wanted = Wanted(),  # noqa: B008 - it never changes
) -> Listed:
    """Return at most ``limit`` rows of `list_runs` (None: all), newest first, that come after the run ``before``.

    ``wanted`` and ``since`` (Unix seconds) leave out other runs, and older ones. With ``wanted.columns`` each row has
    ``columns``, their values by name; None where the run has no such value. Only the runs of the page are read, and
    those that are left out on the way to it: see `_places` for what orders them. Raises `SpecError` for a limit that is
    none, `NotFoundError` for a ``before`` that is no run of the store.
    """
    if limit is not None and limit < 1:
        raise SpecError(f"must be at least 1, not {limit}", field="limit")
    opened = _open(store, settings)
    places, order = _places(opened.store, opened.ids)
    if before is not None:
        places = places[_after(places, before, opened.store) :]
    if since is not None:
        places = [place for place in places if place.time >= since or place.time == -math.inf]
    ids, following = [place.run_id for place in places], None
    rows: list[Row] = []
    takes_all = wanted._replace(columns=()) == Wanted()
    size = min(limit, CHUNK) if limit is not None and takes_all else CHUNK
    records = _records(opened._replace(ids=ids), settings, size, reads_job=wanted.reads_job)
    for number, (row, run) in enumerate(records):
        if isinstance(run, _Gone) or not wanted.takes(row):
            continue
        row = _stands(row, run, cost="cost" in wanted.columns)
        undated = since is not None and places[number].time == -math.inf
        if (not wanted.states or row["state"] in wanted.states) and not (undated and _is_before(row, since)):
            rows.append(row)
        if len(rows) == limit:
            following = ids[number] if number + 1 < len(ids) else None
            break
    found = parallel(partial(_shown, opened.store, wanted.columns), rows)
    return Listed(found, following, order)


def _shown(store: Store, columns: Sequence[str], row: Row) -> Row:
    """The public part of ``row``, and its ``columns`` if there are any."""
    public = {key: row[key] for key in ROW}
    if not columns:
        return public
    plain = [column for column in columns if column != "cost" and not column.startswith(("hp.", "tag."))]
    known: Row = {"cost": (row["cost"] or {}).get("estimate_usd")}
    known |= {f"hp.{name}": value for name, value in row["hyperparameters"].items()}
    known |= {f"tag.{name}": value for name, value in row["tags"].items()}
    if plain:
        with contextlib.suppress(CloudtrainError):  # one run that cannot be read must not hide the others
            known |= _last_metrics(store, row["run_id"])
    return {**public, "columns": {column: known.get(column) for column in columns}}


def _last_metrics(store: Store, run_id: str) -> Row:
    """The last value of each metric, over all attempts."""
    last: Row = {}
    for row in merge_metrics(Seen(store, run_id).metrics().values()):
        last |= {name: value for name, value in row.items() if value is not None}
    return last


def run_ids(store: str, settings: Settings = NO_SETTINGS) -> list[str]:
    """Return the ids of the runs of the store at a URL, sorted; their records are not read."""
    return _open(store, settings).ids


def newest_run(store: str, settings: Settings = NO_SETTINGS) -> str | None:
    """Return the id of the run of the store at a URL that was made last, as `list_page` orders them; None: no run.

    A run whose run.json cannot be read is passed over.
    """
    opened = _open(store, settings)
    places, _ = _places(opened.store, opened.ids)
    keys = ((place.run_id, f"{run_folder(place.run_id)}/run.json") for place in places)
    return next((run_id for run_id, key in keys if opened.store.record(key) is not None), None)


def _is_before(row: Row, since: float | None) -> bool:
    return row["created"] is None or row["created"] < (iso_time(since) or "")


def _places(store: Store, ids: Sequence[str]) -> tuple[list[_Place], str]:
    """The runs, newest first, and what orders them: as far as can be without reading any.

    An id that begins as ours do tells when it was made. Of any other, in a local folder the time of its run.json tells,
    which is written once; over a network its ``created``, when there are at most `ASKED` of them. Where there are more,
    all of these come after the dated ones, by the numbers in their ids.
    """
    times = {run_id: _stamped(run_id) for run_id in ids}
    undated = [run_id for run_id, when in times.items() if when is None]
    home, order = local_path(store.url), "created"
    if home is not None:
        times |= {run_id: _written(str(home / "runs" / run_id / "run.json")) for run_id in undated}
    elif len(undated) <= ASKED:
        found = parallel(partial(_created, store), undated, jobs=store.moving.concurrency)
        times |= dict(zip(undated, found, strict=True))
    else:
        order = "id"
    places = [_Place(-math.inf if when is None else when, _natural(run_id), run_id) for run_id, when in times.items()]
    return sorted(places, reverse=True), order


def _stamped(run_id: str) -> float | None:
    """The time that an id begins with, to the second."""
    match = _STAMP.fullmatch(run_id)
    if match is None:
        return None
    year, month, day, hour, minute, second = (int(part) for part in match.groups())
    with contextlib.suppress(ValueError):  # there is no 31st of February
        return datetime(year, month, day, hour, minute, second, tzinfo=timezone.utc).timestamp()
    return None


def _written(path: str) -> float | None:
    with contextlib.suppress(OSError):
        return os.stat(path).st_mtime
    return None


def _created(store: Store, run_id: str) -> float | None:
    with contextlib.suppress(
        CloudtrainError, OverflowError, ValueError
    ):  # its row says why it cannot be read, where it is on the page
        created = (store.record(f"{run_folder(run_id)}/run.json") or {}).get("created")
        if isinstance(created, (int, float)) and iso_time(created):  # which knows no time that is none
            return float(created)
    return None


def _natural(run_id: str) -> list[Any]:
    """``ci-10`` after ``ci-9``."""
    return [int(part) if number % 2 else part for number, part in enumerate(re.split(r"(\d+)", run_id))]


def _after(places: Sequence[_Place], before: str, store: Store) -> int:
    """How many stand up to and with the run ``before``; one that was removed meanwhile tells by its id."""
    when = _stamped(before)
    for number, place in enumerate(places):
        if place.run_id == before:
            return number + 1
        if when is not None and place < _Place(when, _natural(before), before):
            return number
    if when is None:
        raise NotFoundError(f"no run {before!r} in {store.url}", field="before")
    return len(places)


ROW = ("run_id", "provider", "state", "category", "reason", "name", "created")
"""What a row tells; the rest is for `Wanted`."""


def _row(run_id: str, data: Record, **said: Any) -> Row:
    job = data.get("job") or {}
    created = data.get("created")
    row = {
        "run_id": run_id,
        "provider": data.get("provider"),
        "state": data.get("state"),
        "category": data.get("category"),
        "reason": data.get("reason", ""),
        "name": data.get("name"),
        "created": iso_time(created) if isinstance(created, (int, float)) else None,
        "tags": job.get("tags") or {},
        "hyperparameters": job.get("hyperparameters") or {},
        "cost": data.get("cost"),
    }
    return {**row, **said}


def recorded(store: Store | str, settings: Settings = NO_SETTINGS) -> Iterator[tuple[Row, Run | Exception | None]]:
    """Every run's row of what the store says, oldest id first; and the run when it has no result yet.

    Or why there is no telling. Runs with the same settings share one provider and so its connections. The store at a
    URL is opened as ``settings`` say, and for each run as its own provider says; a `Store` serves as it is.
    """
    yield from _records(_open(store, settings), settings, CHUNK)


def _open(store: Store | str, settings: Settings) -> _Opened:
    if isinstance(store, str):
        return settings.let_in(store, partial(_opened, store, settings.moving))
    return _Opened(store, None, store.runs())


def _opened(url: str, moving: Moving, caller: Caller) -> _Opened:
    store = Store(url, storage=caller, moving=moving)
    return _Opened(store, caller, store.runs())


def _records(
    opened: _Opened, settings: Settings, size: int, *, reads_job: bool = False
) -> Iterator[tuple[Row, Run | Exception | None]]:
    """`recorded` of ``opened.ids``, in their order, ``size`` of them read at a time, with their jobs if asked for."""
    store, asked, ids = opened
    shared: dict[str, tuple[Provider, Store]] = {}
    for start in range(0, len(ids), size):
        some = ids[start : start + size]
        for run_id, (row, record) in zip(some, parallel(partial(_read, store, reads_job), some), strict=True):
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


def _read(store: Store, reads_job: bool, run_id: str) -> tuple[Row, dict[str, Any] | Exception | None]:
    """A run's row; and, when it is not final, its run.json."""
    try:
        result = store.result(run_id)
        if result is not None and "created" in result and not reads_job:
            return _row(run_id, result), None
        record = _run_record(store, run_id)
        row = _row(run_id, {**record, **(result or {})}, name=Job.from_dict(record["job"]).name)
        return row, record if result is None else None
    except Exception as exc:  # noqa: BLE001 - one broken record must not hide the other runs
        return _row(run_id, {}), exc


def _run_record(store: Store, run_id: str) -> dict[str, Any]:
    """`Store.run`, which looks for a like name among all runs when there is none: here one is known to be there."""
    key = f"{run_folder(run_id)}/run.json"
    record = store.record(key)
    if record is None and not store.files.exists(key):
        kind = NotFoundError if store.files.entries(run_folder(run_id)) else _Gone
        raise kind(f"{store.url}/{run_folder(run_id)} has no run.json", field="run")
    if record is None:
        raise StorageError(f"{store.url}/{key} is not a JSON object")
    return checked_run(record, ("provider", "settings", "job"), f"{store.url}/{key}")


def _stands(row: Row, run: Run | Exception | None, *, cost: bool = False) -> Row:
    if run is None:
        return row
    return {**row, **(_asked(run, cost) if isinstance(run, Run) else _unknown(run))}


def _asked(run: Run, cost: bool) -> Row:
    """What the platform says of the run; its cost so far too, if asked for, which takes more questions."""
    try:
        if cost:
            result = run.result()
            return {key: result[key] for key in ("state", "category", "reason", "cost")}
        status = run.status()
    except Exception as exc:  # noqa: BLE001 - nor must one platform that fails
        return _unknown(exc)
    return {"state": status.state, "category": status.category or None, "reason": first_line(status.reason)}


def _unknown(exc: Exception) -> Row:
    return {"state": "unknown", "reason": one_line(exc)}
