"""List the runs of a store with their states, a page at a time, and find the unfinished ones."""

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
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import CloudtrainError, NotFoundError, SpecError
from ..settings.settings import NO_SETTINGS, Settings, StoreCredentials
from ..storage.files import parallel
from ..storage.local_disk import local_path
from ..store.store import EARLY, Store, run_folder
from .metrics import MetricsReader
from .outcome import first_line, iso_time, one_line

if TYPE_CHECKING:
    from ..provider_api.protocol import Provider
    from .run import Run

PAGE = 50
"""Runs on a page."""
ASKED = 1_000
"""Most runs of a remote store without a date in their ids whose run.json is read for it: one request each."""
USES = frozenset({"cost", "gpu_hours", "attempts"})
"""Columns of a run's use so far."""
CHUNK = 200
"""Runs read at a time, which bounds the memory."""
_STAMP = re.compile(r"(\d{4})(\d\d)(\d\d)-(\d\d)(\d\d)(\d\d)-.+")

Record = Mapping[str, Any]
Row = dict[str, Any]


class Listed(NamedTuple):
    """A page: ``rows``, newest first. ``next`` is the run id before the next page, None on the last.

    ``order`` is ``created``, or ``id`` if there are too many undated runs to look at.
    """

    rows: list[Row]
    next: str | None
    order: str


class Wanted(NamedTuple):
    """A filter of a page's runs, and the columns shown in addition to their rows.

    ``name`` is a shell pattern of the job's name. ``tags`` are names and values. ``columns`` are ``hp.NAME``,
    ``tag.NAME``, `USES` (US dollars, hours, a number) or the name of a metric, whose last value counts.
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
        """Return whether ``row`` passes the filter, as far as its records say."""
        tags = row["tags"]
        return (
            self.provider in (None, row["provider"])
            and (self.name is None or fnmatch.fnmatchcase(row["name"] or "", self.name))
            and all(tags.get(key) == value for key, value in self.tags.items())
        )


class _Opened(NamedTuple):
    store: Store
    asked: StoreCredentials | None
    ids: list[str]


class _Place(NamedTuple):
    """The position of a run: by ``time`` in Unix seconds (-inf: unknown), then by the numbers in its id."""

    time: float
    name: list[Any]
    run_id: str


class _Gone(NotFoundError):
    """A folder that is no run yet, or no more: it has no files (left by `gc`, or a mount's marks), or only `EARLY`."""


def list_page(
    store: Store | str,
    settings: Settings = NO_SETTINGS,
    *,
    limit: int | None = PAGE,
    before: str | None = None,
    since: float | None = None,
    wanted: Wanted = Wanted(),  # noqa: B008 - it never changes
) -> Listed:
    """Return at most ``limit`` rows (None: all), newest first, after the run ``before``; each has the fields of `ROW`.

    A run with a result.json costs one read; for others the platform is asked. A run that cannot be read, or whose
    platform does not answer, has the state ``unknown``, with the reason. ``wanted`` and ``since`` (Unix seconds) leave
    out other runs, and older ones. With ``wanted.columns`` each row has ``columns``, their values by name, or None.
    Only the page's runs and those left out before it are read; `_places` orders them. Raises `SpecError` for an
    invalid limit, `NotFoundError` if the store has no run ``before``.
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
        row = _with_status(row, run, cost=not USES.isdisjoint(wanted.columns))
        # A run of an unknown time is dated by its row.
        undated = since is not None and places[number].time == -math.inf
        early = undated and (row["created"] or "") < (iso_time(since) or "")
        if (not wanted.states or row["state"] in wanted.states) and not early:
            rows.append(row)
        if len(rows) == limit:
            following = ids[number] if number + 1 < len(ids) else None
            break
    found = parallel(partial(_shown, opened.store, wanted.columns), rows)
    return Listed(found, following, order)


def _shown(store: Store, columns: Sequence[str], row: Row) -> Row:
    """Return the public part of ``row``, with its ``columns`` if there are any."""
    public = {key: row[key] for key in ROW}
    if not columns:
        return public
    plain = [column for column in columns if column not in USES and not column.startswith(("hp.", "tag."))]
    cost = row["cost"] or {}
    known: Row = {"cost": cost.get("estimate_usd"), "gpu_hours": cost.get("gpu_hours"), "attempts": row["attempts"]}
    known |= {f"hp.{name}": value for name, value in row["hyperparameters"].items()}
    known |= {f"tag.{name}": value for name, value in row["tags"].items()}
    if plain:
        try:
            known |= _last_metrics(store, row["run_id"])
        except CloudtrainError as exc:  # one unreadable run must not hide the others
            public["reason"] = public["reason"] or f"its metrics cannot be read: {one_line(exc)}"
    return {**public, "columns": {column: known.get(column) for column in columns}}


def _last_metrics(store: Store, run_id: str) -> Row:
    """Return the last value of each metric, over all attempts."""
    last: Row = {}
    for row in MetricsReader(store, run_id).history():
        last |= {name: value for name, value in row.items() if value is not None}
    return last


def run_ids(store: str, settings: Settings = NO_SETTINGS) -> list[str]:
    """Return the ids of the runs of the store at a URL, sorted; their records are not read."""
    return _open(store, settings).ids


def newest_run(store: str, settings: Settings = NO_SETTINGS) -> str | None:
    """Return the id of the newest run of the store at a URL, in the order of `list_page`; None if it has no run.

    A run whose run.json cannot be read is skipped.
    """
    opened = _open(store, settings)
    places, _ = _places(opened.store, opened.ids)
    keys = ((place.run_id, f"{run_folder(place.run_id)}/run.json") for place in places)
    return next((run_id for run_id, key in keys if opened.store.record(key) is not None), None)


def _places(store: Store, ids: Sequence[str]) -> tuple[list[_Place], str]:
    """Return the runs, newest first, and the order's name, as far as possible without reading them.

    An id of our own form has its date. For others, the time of run.json in a local folder counts, which is written
    once. Over a network their ``created`` counts, if there are at most `ASKED` of them. If there are more, they all
    come after the dated ones, by the numbers in their ids.
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
    """Return the time at the beginning of an id, to the second."""
    match = _STAMP.fullmatch(run_id)
    if match is None:
        return None
    year, month, day, hour, minute, second = (int(part) for part in match.groups())
    with contextlib.suppress(ValueError):  # such as the 31st of February
        return datetime(year, month, day, hour, minute, second, tzinfo=timezone.utc).timestamp()
    return None


def _written(path: str) -> float | None:
    with contextlib.suppress(OSError):
        return os.stat(path).st_mtime
    return None


def _created(store: Store, run_id: str) -> float | None:
    # The run's row gives the reason of an error, if it is on the page.
    with contextlib.suppress(CloudtrainError, OverflowError, ValueError):
        created = (store.record(f"{run_folder(run_id)}/run.json") or {}).get("created")
        if isinstance(created, (int, float)) and iso_time(created):  # None for an invalid time
            return float(created)
    return None


def _natural(run_id: str) -> list[Any]:
    """Return a sort key that puts ``ci-10`` after ``ci-9``."""
    return [int(part) if number % 2 else part for number, part in enumerate(re.split(r"(\d+)", run_id))]


def _after(places: Sequence[_Place], before: str, store: Store) -> int:
    """Return the number of runs up to and including ``before``; the id of a deleted run gives its position."""
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
"""Fields of a row; the rest is for `Wanted`."""


def _row(run_id: str, data: Record) -> Row:
    job, created = data.get("job") or {}, data.get("created")
    return {
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
        "attempts": len(data.get("attempts") or ()),
    }


def recorded_runs(store: Store | str, settings: Settings = NO_SETTINGS) -> Iterator[tuple[Row, Run | Exception | None]]:
    """Yield every run's row from the store's records, oldest id first, with its Run if it has no result yet.

    An unreadable run has its error in place of the Run. Runs with equal settings share one provider. A store's URL is
    opened with ``settings``, and each run with its own provider's; a `Store` is used as it is.
    """
    found = _records(_open(store, settings), settings, CHUNK)
    yield from ((row, run) for row, run in found if not isinstance(run, _Gone))


def _open(store: Store | str, settings: Settings) -> _Opened:
    def opened(caller: StoreCredentials | None) -> _Opened:
        found = Store(store, storage=caller, moving=settings.moving) if isinstance(store, str) else store
        return _Opened(found, caller, found.runs())

    return settings.let_in(store, opened) if isinstance(store, str) else opened(None)


def _records(
    opened: _Opened, settings: Settings, size: int, *, reads_job: bool = False
) -> Iterator[tuple[Row, Run | Exception | None]]:
    """Yield `recorded_runs` of ``opened.ids``, in order, ``size`` at a time; ``reads_job`` reads their jobs too."""
    store, asked, ids = opened
    shared: dict[str, tuple[Provider, Store]] = {}
    for start in range(0, len(ids), size):
        some = ids[start : start + size]
        for run_id, (row, record) in zip(some, parallel(partial(_read, store, reads_job), some), strict=True):
            if isinstance(record, Exception) or record is None:
                yield row, record
                continue
            from .run import Run  # finished runs need none

            try:
                key = json.dumps([record["provider"], record["settings"]], sort_keys=True)
                if key not in shared:
                    provider = settings.provider_of(record)
                    own = asked.own(store.url, provider) if asked is not None else None
                    shared[key] = provider, store if own is None else Store(store.url, storage=own, moving=store.moving)
                yield row, Run(store=shared[key][1], run_id=run_id, provider=shared[key][0], settings=settings)
            except Exception as exc:  # noqa: BLE001 - a missing SDK must not hide the other runs either
                yield row, exc


def _read(store: Store, reads_job: bool, run_id: str) -> tuple[Row, dict[str, Any] | Exception | None]:
    """Return a run's row and, if it is not final, its run.json."""
    try:
        result = store.result(run_id)
        if result is not None and "created" in result and not reads_job:
            return _row(run_id, result), None
        from ..job.job import Job

        record = _run_record(store, run_id)
        row = _row(run_id, {**record, **(result or {}), "name": Job.from_dict(record["job"]).name})
        return row, record if result is None else None
    except Exception as exc:  # noqa: BLE001 - one broken record must not hide the other runs
        return _row(run_id, {}), exc


def _run_record(store: Store, run_id: str) -> dict[str, Any]:
    try:
        return store.run(run_id, needs=("provider", "settings", "job"), among=())
    except NotFoundError:
        found = {key.split("/")[2] for key in store.files.entries(run_folder(run_id))}
        kind = NotFoundError if found - EARLY else _Gone
        raise kind(f"{store.url}/{run_folder(run_id)} has no run.json", field="run") from None


def _with_status(row: Row, run: Run | Exception | None, *, cost: bool) -> Row:
    """Return ``row`` with the platform's status of the run, if it has no result yet; ``cost`` takes more requests."""
    if run is None:
        return row
    if isinstance(run, Exception):
        return {**row, "state": "unknown", "reason": one_line(run)}
    try:
        if cost:
            result = run.result()
            used = {key: result[key] for key in ("state", "category", "reason", "cost")}
            return {**row, **used, "attempts": len(result["attempts"])}
        status = run.status()
    except Exception as exc:  # noqa: BLE001 - nor must one platform that fails
        return _with_status(row, exc, cost=cost)
    return {**row, "state": status.state, "category": status.category or None, "reason": first_line(status.reason)}
