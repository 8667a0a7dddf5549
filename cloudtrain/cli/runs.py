"""The verbs about runs that exist: status, logs, wait, pull, cancel, list, reconcile, gc; and what names a run."""

from __future__ import annotations

import dataclasses
import json as json_
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from cyclopts import Parameter

from ..errors import EXIT_CODES, AuthError, CloudtrainError, LostContactError, NotFoundError, SpecError
from ..job.run_id import is_run_id
from ..provider_api.protocol import FINAL, NativeObject, ProviderExtras, extras_of, extras_of_type
from ..provider_api.registry import find_provider
from ..runs.outcome import CANCELLING
from ..settings.settings import AUTO, Settings, store_elsewhere
from ..validate import choice_of, parse_duration, url_scheme
from . import NEWEST, format
from .common_flags import HERE, At, OnEnd, OnSignal, Where, many, run_on_end, stoppable, switch, undisturbed
from .key_value import pairs
from .output import Screen

if TYPE_CHECKING:
    from ..runs.listing import Wanted
    from ..runs.run import Run
    from ..runs.sweeps.sweep import Sweep

T = TypeVar("T")
#: A parameter that `cloudtrain.cli.parse` fills, not a flag.
Ours = Annotated[T, Parameter(parse=False)]
Ref = Annotated[
    str, Parameter(name="RUN", help="run id, its beginning, `last` for the newest run, or the URL of a run folder")
]
More = Annotated[str, Parameter(show=False)]
#: `cloudtrain.cli.parse` gives its value to `Screen.json`, which the verbs use.
Json = Annotated[bool, switch("one JSON object on stdout, messages on stderr")]
JsonLines = Annotated[bool, switch("a JSON object for each line")]
Follow = Annotated[bool, switch("continue until the run ends", "--follow", "-f")]
What = Annotated[
    list[str] | None,
    Parameter(
        metavar="PART",
        negative="",
        show_default=False,
        help="some of checkpoints,artifacts,outputs,logs,metrics; checkpoints:latest, :best, :step=N or :all",
    ),
]
OutDir = Annotated[
    str | None,
    Parameter(
        name=("--out", "-o"), metavar="DIR", help="for several runs, instead of DIR: it gets a folder for each run"
    ),
]

WaitTimeout = Annotated[
    str | None,
    Parameter(name="--wait-timeout", metavar="DURATION", help="longest wait, then exit code 7: '2h'"),
]

LAST = "last"
"""Word for the newest run, unless a run has this name."""
SHOWN = 10
"""Most runs that an error names."""
EXIT_DETACHED = 7
RESULTS = ("live/checkpoints", "live/artifacts", "live/outputs", "archive/checkpoints", "checkpoints", "native")
"""Folders of a run that hold what its script and its platform wrote."""


def seconds_of(text: str | None, field: str) -> int | None:
    """Return the seconds of a flag's duration; None if it was not given."""
    return None if text is None else parse_duration(text, field=field)


def after(result: Mapping[str, Any], run: str, *, pulled: bool = False) -> list[list[str]]:
    """Return the next commands for a run that is over: pull first, or report first if it ended badly."""
    pull, report = [] if pulled else [["pull", run]], [["report", run]]
    return [*(report + pull if result["exit_code"] else pull + report), ["logs", run]]


def say_end(run: Run, result: Mapping[str, Any], screen: Screen) -> None:
    """Print the outcome, and a note with a hint for a run that succeeded and left nothing to pull.

    For that, it lists the run's folder once.
    """
    screen.talk(format.outcome(result))
    screen.hint(format.fix(result))
    if result["state"] != "succeeded" or result["checkpoint"] is not None:
        return
    from ..store.store import run_folder

    root = run_folder(run.run_id)
    try:
        left = any(key.startswith(tuple(f"{root}/{place}/" for place in RESULTS)) for key in run.store.files.list(root))
    except CloudtrainError:  # a note must not fail the verb
        return
    if left:
        return
    off = not run.job.at(run.provider_name).outputs
    below = "run without --no-outputs" if off else "let the script write below its working folder"
    screen.talk("note: the run left no checkpoints, artifacts or outputs" + (" (outputs are off)" if off else ""))
    screen.hint(f"{below}, or to CLOUDTRAIN_CHECKPOINT_DIR or CLOUDTRAIN_ARTIFACT_DIR")


def each_run(
    words: Sequence[str],
    one: Callable[[str], dict[str, Any]],
    then: Callable[[str, dict[str, Any]], list[list[str]]],
    at: Where,
    screen: Screen,
    *,
    also: Callable[[], dict[str, Any]] = dict,
) -> int:
    """Call ``one`` for each run and return the exit code. With --json, print the objects that it made.

    ``also`` is called after several runs, and gives further fields.

    One run is one object, and ``then`` gives the next commands by its name and object. Several are ``runs`` in one
    object. If one of several fails, it is reported and the next one follows; the exit code is the largest.
    """
    if len(words) == 1:
        row = one(words[0])
        screen.answer(row)
        screen.next(*then(_called(words[0], row), row), where=at.flags)
        return 0
    rows, code = [], 0
    for word in words:
        screen.about = {}
        try:
            rows.append(one(word))
        except CloudtrainError as exc:
            refusal = screen.refusal(str(exc), exc.exit_code, field=getattr(exc, "field", ""), hint=exc.hint)
            rows.append(refusal)
            code = max(code, exc.exit_code)
    screen.about = {}
    screen.answer({"runs": rows, **also(), "exit_code": code})
    return code


def status(*runs: Ref, at: At = HERE, json: Json = False, screen: Ours[Screen]) -> int:
    """Print state, reason, attempts and the newest complete checkpoint."""
    from ..runs.run import Run

    texts: list[str] = []

    def one(word: str) -> dict[str, Any]:
        handle = _open_any(word, at, screen, names=False)
        result = handle.result()
        if isinstance(handle, Run):
            texts.append(format.status_text(result, screen.now))
        else:
            from .sweep import sweep_text

            texts.append(sweep_text(result))
        if not screen.json:
            screen.show(texts[-1] if len(texts) == 1 else "\n" + texts[-1])
        return result

    def then(run: str, result: dict[str, Any]) -> list[list[str]]:
        if "sweep" in result:
            return [["sweep", run], ["list", run], ["report", run]]
        if result["state"] in FINAL:
            return after(result, run)
        cancel = [] if str(result["reason"]).startswith(CANCELLING) else [["cancel", run]]
        return [["logs", "-f", run], ["wait", run], *cancel]

    return each_run(runs or (LAST,), one, then, at, screen)


def logs(
    run: Ref,
    /,
    *,
    follow: Follow = False,
    newest: Annotated[
        int | None, Parameter(name=("--tail", "-n"), help="the last N lines only; with --follow, of the lines so far")
    ] = None,
    since: Annotated[
        str | None, Parameter(help="lines of the last '10m', or since a time, '2026-11-24T03:00:00Z'")
    ] = None,
    timestamps: Annotated[bool, switch("begin each line with its time, in UTC")] = False,
    node: Annotated[int | None, Parameter(help="lines of this node only")] = None,
    rank: Annotated[int | None, Parameter(help="lines of this global rank only")] = None,
    at: At = HERE,
    json: JsonLines = False,
    screen: Ours[Screen],
) -> int:
    """Print every line of every node, each once, in order for each node."""
    from ..estimator import log_line, ranks

    handle = open_one(run, at, screen)
    run = _called(run, screen.about)
    if newest is not None and newest < 0:
        raise SpecError(
            f"{newest} is below zero", field="tail", hint="write how many of the last lines to print: -n 20"
        )
    many = ranks(handle.job.at(handle.provider_name)) > 1
    some = untimed = False
    lines = handle.logs(follow=follow, n=newest, since=since, node=node, rank=rank, times=timestamps or json)
    for line in lines:
        untimed = line.time is None and (untimed or not some)
        some = True
        text = log_line(line, many=many, times=timestamps)
        screen.data(json_.dumps(dataclasses.asdict(line), ensure_ascii=False) if json else text)
    if untimed and since is not None:
        screen.talk("note: no line has a time, so --since has left none out")
    if not follow:
        screen.next(["logs", "-f", run], ["status", run], where=at.flags)
    return 0


def wait(
    run: Ref,
    /,
    *,
    timeout: WaitTimeout = None,
    on_signal: OnSignal = "detach",
    on_end: OnEnd = None,
    at: At = HERE,
    json: Json = False,
    screen: Ours[Screen],
) -> int:
    """Wait until the run has ended. Exit by its outcome."""
    from ..runs.retry import Retry
    from ..runs.run import Run

    seconds = seconds_of(timeout, "wait_timeout")
    with stoppable():
        handle: Run | None = None
        changes = format.Changes(screen.talk)
        try:
            opened = _open_any(run, at, screen)
            if isinstance(opened, Run):
                handle, run = opened, _called(run, screen.about)
                retry = Retry(handle, screen.talk)
                result = handle.wait(timeout=seconds, on_status=changes, retry=retry)
        except KeyboardInterrupt:
            if handle is None and on_signal != "cancel":
                raise
            with undisturbed():
                handle = handle or open_one(run, at, screen)
            return stopped(handle, run, at, on_signal, screen)
        except (AuthError, LostContactError) as exc:
            if handle is None or not changes.heard:  # no wait began: the error was there before
                raise
            raise left(exc, handle, run, at, screen) from None
    if not isinstance(opened, Run):
        from .sweep import drive_sweep

        return drive_sweep(opened, at, screen, timeout=seconds, on_signal=on_signal, on_end=on_end)
    say_end(opened, result, screen)
    run_on_end(on_end, result, screen.talk)
    screen.answer(result)
    screen.value(str(result["state"]))
    screen.next(*after(result, run), where=at.flags)
    return int(result["exit_code"])


def stopped(run: Run, name: str, at: Where, on_signal: str, screen: Screen) -> int:
    """Leave ``run``, called ``name``, alone after a signal ended the waiting for it, or stop it too."""
    if on_signal == "cancel":
        screen.talk("\nstopping the run (--on-signal cancel)")
        with undisturbed():
            run.cancel()
            result = run.result()
        code = int(result["exit_code"]) if result["exit_code"] is not None else EXIT_CODES["cancelled"]
        screen.answer({**result, "exit_code": code})
        screen.next(*_after_cancel(name, result), where=at.flags)
        return code
    screen.talk("\nno longer waiting; the run continues")
    screen.answer({**screen.about, "error": "interrupted; the run continues", "exit_code": EXIT_DETACHED})
    screen.next(["wait", name], ["logs", "-f", name], ["cancel", name], where=at.flags)
    return EXIT_DETACHED


def left(exc: AuthError | LostContactError, run: Run, name: str, at: Where, screen: Screen) -> LostContactError:
    """Return the error of a client that can wait for ``run``, called ``name``, no longer; print the next commands.

    Credentials that expire meanwhile are no failure of the run: it goes on.
    """
    screen.next(["wait", name], ["logs", "-f", name], ["status", name], where=at.flags)
    return exc if isinstance(exc, LostContactError) else LostContactError(f"{exc}; the run continues: {run.url}")


def pull(
    run: Ref,
    folder: Annotated[str | None, Parameter(name="DIR", help="folder for the results; default: ./<run id>")] = None,
    /,
    *more: More,
    out: OutDir = None,
    what: What = None,
    follow: Follow = False,
    at: At = HERE,
    json: Json = False,
    screen: Ours[Screen],
) -> int:
    """Copy complete checkpoints, artifacts, outputs, logs and metrics, verified. Files already here are skipped."""
    from ..runs.pull_kinds import PULL_KINDS, parse_selection
    from ..runs.run import Run

    parse_selection(what or PULL_KINDS)
    runs = [run] if out is None or folder is None else [run, folder, *more]
    if more and out is None:
        words = " ".join([run, *([folder] if folder else []), *more])
        raise SpecError("several runs need --out", field="out", hint=f"cloudtrain pull {words} --out DIR")

    def one(word: str) -> dict[str, Any]:
        opened = _open_any(word, at, screen)
        handle, parts = (opened, what) if isinstance(opened, Run) else _best_run(opened, what, screen)
        if out is None and folder and folder != handle.run_id and is_run_id(folder) and handle.store.has_run(folder):
            screen.talk(f"note: {folder} is the folder here; for both runs: cloudtrain pull {word} {folder} --out DIR")
        place = Path(out or folder or handle.run_id)
        to = place / handle.run_id if len(runs) > 1 else place
        pulled = pull_into(handle, to, screen, what=parts, follow=follow)
        screen.value(pulled["folder"])
        return {**screen.about, **pulled, "exit_code": 0}

    return each_run(runs, one, lambda run, _: [["status", run], ["logs", run]], at, screen)


def cancel(
    run: Ref,
    /,
    *more: More,
    wait: Annotated[bool, switch("until it has stopped")] = False,
    at: At = HERE,
    json: Json = False,
    screen: Ours[Screen],
) -> int:
    """Stop a run and forbid further attempts. A run that has ended stays as it is."""
    from ..runs.run import Run

    runs = [run, *more]

    def one(word: str) -> dict[str, Any]:
        handle = _open_any(word, at, screen)
        if not isinstance(handle, Run):
            from .sweep import cancel_sweep

            return cancel_sweep(handle, screen, wait=wait)
        handle.cancel()
        if wait:
            handle.wait(on_status=format.Changes(screen.talk))
        result = handle.result()
        state = str(result["state"]) if result["state"] in FINAL else "cancelling"
        if result["state"] == "pending":  # it may say for which job to wait
            screen.talk(f"{handle.run_id}: {result['reason']}")
        text = f"{handle.run_id}: {state}"
        screen.value(state if len(runs) == 1 else text, text)
        return result

    return each_run(runs, one, _after_cancel, at, screen)


def _after_cancel(run: str, result: Mapping[str, Any]) -> list[list[str]]:
    """Return the next commands after a cancel. A waiting client stops a job that begins later."""
    return [*([["wait", run]] if result["state"] == "pending" else []), ["status", run], ["pull", run]]


Limit = Annotated[
    int, Parameter(name=("--limit", "-n"), metavar="INT", show_default=False, help="runs on a page; default: 50")
]
States = Annotated[list[str] | None, many("runs in this state only, however many are read; repeatable", "STATE")]
Since = Annotated[str | None, Parameter(metavar="DURATION", help="runs of the last '7d' only")]
Tags = Annotated[list[str] | None, many("runs with this tag only; repeatable: with all", "NAME=VALUE", "--tag")]
Columns = Annotated[
    list[str] | None,
    many(
        "further columns: hp.NAME, tag.NAME, cost, gpu_hours, attempts, or a metric's name for its last value", "NAME,…"
    ),
]


def list_runs(
    sweep: Annotated[str | None, Parameter(name="SWEEP", help="list the trials of this sweep only")] = None,
    /,
    *,
    limit: Limit = 50,
    everything: Annotated[bool, switch("every run, on one page", "--all")] = False,
    before: Annotated[
        str | None, Parameter(metavar="RUN", help="list the runs after this one, the last of the page before")
    ] = None,
    state: States = None,
    since: Since = None,
    tag: Tags = None,
    name: Annotated[
        str | None, Parameter(metavar="PATTERN", help="runs of jobs with this name only: 'sweep-*'")
    ] = None,
    provider: Annotated[
        str | None, Parameter(name=("--provider", "-p"), metavar="NAME", help="runs of this provider only")
    ] = None,
    columns: Columns = None,
    at: At = HERE,
    json: Json = False,
    screen: Ours[Screen],
) -> int:
    """Print one line a run, the newest first, a page at a time."""
    from ..provider_api.protocol import STATES
    from ..runs.listing import Wanted, list_page

    if sweep is not None:
        from .sweep import list_trials

        return list_trials(sweep, at, screen)
    for word in state or ():
        choice_of(word, (*STATES, "unknown"), "state")
    age = seconds_of(since, "since")
    names = [word for text in columns or () for word in text.split(",") if word]
    tags = pairs("--tag", tag or (), field="tag")
    wanted = Wanted(states=tuple(state or ()), provider=provider, name=name, tags=tags, columns=names)
    settings = at.settings()
    page = list_page(
        settings.resolved(),
        settings,
        limit=None if everything else limit,
        before=before,
        since=None if age is None else time.time() - age,
        wanted=wanted,
    )
    runs = page.rows
    found = {"runs": runs, "next": page.next, "order": page.order}
    screen.answer(found, format.run_table(runs, names, screen.now))
    for reason in dict.fromkeys(str(row["reason"]) for row in runs if row["state"] == "unknown"):
        ids = [str(row["run_id"]) for row in runs if row["state"] == "unknown" and row["reason"] == reason]
        screen.talk(f"{', '.join(ids[:3])}{f' and {len(ids) - 3} more' if ids[3:] else ''}: {reason}")
    if runs:
        newest = str(runs[0]["run_id"])
        more = [_next_page(page.next, limit, since, wanted)] if page.next is not None else []
        screen.next(["status", newest], ["logs", "-f", newest], *more, where=at.flags)
    elif not before and age is None and wanted._replace(columns=()) == Wanted():
        screen.talk("no runs here yet; to start one: cloudtrain submit train.py")
        screen.hint(store_elsewhere(settings.store, settings))
    return 0


def _next_page(before: str, limit: int, since: str | None, wanted: Wanted) -> list[str]:
    """Return the words of the command that prints the page after the run ``before``."""
    words = ["list", *(["--limit", str(limit)] if limit != 50 else []), *(f"--state={word}" for word in wanted.states)]
    given = {"since": since, "provider": wanted.provider, "name": wanted.name, "columns": ",".join(wanted.columns)}
    words += [f"--{flag}={value}" for flag, value in given.items() if value]
    return [*words, *(f"--tag={key}={value}" for key, value in wanted.tags.items()), "--before", before]


def reconcile(
    target: Annotated[str | None, Parameter(name="RUN", help="one run; default: every run of the store")] = None,
    /,
    *,
    at: At = HERE,
    json: Json = False,
    screen: Ours[Screen],
) -> int:
    """Do the work of a waiting client once, for one run or for every open run of a store."""
    from ..runs.reconcile import reconcile as do
    from ..runs.run import Run

    settings = at.settings()
    act = partial(do, settings=settings, cwd=Path.cwd(), environ=os.environ, say=screen.talk)
    try:
        rows = act(target)
    except NotFoundError:
        if target is None:
            raise
        found = _find(target, at)
        if not isinstance(found, Run):
            from .sweep import reconcile_sweep

            return reconcile_sweep(found, screen)
        rows = act(found.run_id)
    code = max((int(row["exit_code"]) for row in rows), default=0)
    for row in rows:
        if row["error"]:
            screen.talk(f"{'error' if row['exit_code'] else 'note'}: {row['run_id']}: {row['error']}")
    text = format.table(rows, ("run_id", "state", "category", "provider", "reason")) if rows else ""
    screen.answer({"runs": rows, "exit_code": code}, text)
    if not (rows or screen.json):
        screen.talk("no unfinished run here")
    return code


def gc(
    target: Annotated[str | None, Parameter(show=False)] = None,
    /,
    *,
    older_than: Annotated[
        str,
        Parameter(metavar="DURATION", show_default=False, help="only data last written so long ago; default: 7d"),
    ] = "7d",
    delete: Annotated[bool, switch("remove the data; without this flag nothing is written")] = False,
    at: At = HERE,
    json: Json = False,
    screen: Ours[Screen],
) -> int:
    """Find what no run of a store needs: files, rests of crashes, the platform's objects; with sizes and ages."""
    from ..store.gc import collect_at

    seconds = parse_duration(older_than, field="older_than")
    if target is not None and at.store is not None:
        raise SpecError(f"two stores: {at.store!r} and {target!r}", field="store", hint="name one of them")
    settings = at.settings()
    found = collect_at(
        target or settings.store,
        older_than=seconds,
        delete=delete,
        settings=settings,
        cwd=Path.cwd(),
        say=screen.talk,
        objects=partial(_objects, settings, screen, own=target is None and at.store is None),
    )
    screen.answer(format.collected(found), format.leftovers(found) if found.found else "")
    screen.talk(format.collected_line(found))
    if found.unreadable:
        screen.talk(f"note: nothing would be removed: run.json of {', '.join(found.unreadable)} cannot be read")
    elif found.found and not delete:
        screen.next(["gc", *([target] if target else []), "--older-than", older_than, "--delete"], where=at.flags)
    return 0


def _objects(
    settings: Settings, screen: Screen, records: Iterable[Mapping[str, Any]], *, own: bool
) -> dict[NativeObject, ProviderExtras]:
    """Return the objects on the platforms of ``records``, which are run.json files, each object with its provider.

    ``own``: also those on the platform of the settings. Where objects cannot be listed, this says so.
    """
    found: dict[NativeObject, ProviderExtras] = {}
    asked: set[tuple[str, ...]] = set()
    chosen = [{"provider": settings.provider}] if own and settings.provider != AUTO else []
    for record in (*chosen, *records):
        name = str(record.get("provider") or Settings.provider)
        try:
            if extras_of_type(find_provider(name)).objects is ProviderExtras.objects:
                continue
            made = settings.provider_of(record) if "settings" in record else settings.make_provider(name)
            fields = dataclasses.fields(made.settings)
            places = [item for item in fields if any(map(item.metadata.get, ("place", "caller")))] or fields
            place = (name, *(str(getattr(made.settings, item.name)) for item in places))
            if place not in asked:
                asked.add(place)
                found |= dict.fromkeys(extras_of(made).objects(), extras_of(made))
        except CloudtrainError as exc:
            screen.talk(f"note: objects on {name} are left out: {exc}")
    return found


def pull_into(
    run: Run,
    folder: Path,
    screen: Screen,
    *,
    what: list[str] | None = None,
    follow: bool = False,
) -> dict[str, Any]:
    """Copy ``what`` (None: all) to ``folder`` and print the result. Return the report as JSON."""
    from ..runs.pull import newest_pulled
    from ..runs.pull_kinds import PULL_KINDS

    before = newest_pulled(folder)
    with screen.progress() as say:
        moved = format.Moved("pulled", say if screen.interactive else None)
        report = run.pull(
            folder,
            what=what or PULL_KINDS,
            follow=follow,
            on_pull=lambda report: screen.talk(format.came(report)),
            progress=moved,
        )
    pulled = {**dataclasses.asdict(report), "folder": str(folder)}
    screen.talk(format.pulled(pulled, pace="" if follow else moved.pace))
    if before is not None and before[0] != run.url:
        screen.talk(f"note: the unchanged files of an earlier pull from {before[0]} are gone")
    if report.missing:
        screen.talk(f"note: no checkpoint was {' or '.join(report.missing)}")
    return pulled


def _find(word: str, at: Where) -> Run | Sweep:
    """Return the run or the sweep that ``word`` means. Raises `NotFoundError` for none, `SpecError` for several.

    An id or a URL is opened as it is, as a run and then as a sweep. Only if there is neither, the runs of the store are
    listed.
    """
    from ..runs.run import open_run

    settings = at.settings()
    if word == NEWEST:
        return open_run(_newest(settings), settings=settings)
    try:
        return open_run(word, settings=settings)
    except NotFoundError as exc:
        from ..runs.sweeps.sweep import open_sweep

        if word != LAST:
            with suppress(NotFoundError):
                return open_sweep(word, settings=settings)
        found = "" if _is_place(word) else _meant(word, settings)
        if not found:
            raise exc from None
    return open_run(found, settings=settings)


def _is_place(word: str) -> bool:
    """Return whether ``word`` is the URL or path of a run folder, and not an id."""
    return bool(url_scheme(word)) or "/" in word.replace("\\", "/")


def _meant(word: str, settings: Settings) -> str:
    """Return the id of the run that ``word``, which is not an id itself, stands for; empty if there is none."""
    from ..runs.listing import run_ids

    if word == LAST:
        return _newest(settings)
    found = [run_id for run_id in run_ids(settings.resolved(), settings) if run_id.startswith(word)]
    if len(found) > 1:
        names = ", ".join(repr(run_id) for run_id in found[:SHOWN])
        more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
        raise SpecError(f"{word!r} is the beginning of {len(found)} run ids", field="run", hint=f"one of {names}{more}")
    return found[0] if found else ""


def _newest(settings: Settings) -> str:
    from ..runs.listing import newest_run

    place = settings.resolved()
    found = newest_run(place, settings)
    if found is None:
        hint = store_elsewhere(place, settings) or "to start one: cloudtrain submit train.py"
        raise NotFoundError(f"no run in {place}", field="run", hint=hint)
    return found


def _open_any(word: str, at: Where, screen: Screen, *, names: bool = True) -> Run | Sweep:
    """Open the run or sweep that ``word`` means. Print its id if ``word`` is another word, unless ``names`` is
    false."""
    from ..runs.run import Run

    handle = _find(word, at)
    if not isinstance(handle, Run):
        screen.about = {"sweep": handle.url, "sweep_id": handle.id}
        return handle
    screen.about = {"run": handle.url, "run_id": handle.run_id}
    if names and word != handle.run_id and not _is_place(word):
        screen.talk(f"run: {handle.run_id}")
    return handle


def open_one(word: str, at: Where, screen: Screen) -> Run:
    """Open the run that ``word`` means, as `_open_any`. Raises `SpecError` for a sweep."""
    from ..runs.run import Run

    handle = _open_any(word, at, screen)
    if isinstance(handle, Run):
        return handle
    hint = f"to list its trials, run: cloudtrain list {handle.id}"
    raise SpecError(f"{word!r} is a sweep, and this verb needs one run", field="run", hint=hint)


def _best_run(sweep: Sweep, what: list[str] | None, screen: Screen) -> tuple[Run, list[str] | None]:
    """Return the run of the sweep's best trial, and the parts to pull. Raises `NotFoundError` for a sweep without one.

    If the script has no pointer to its best checkpoint, ``checkpoints:best`` stands for the latest one.
    """
    best = sweep.best
    if best is None:
        raise NotFoundError(f"no trial of {sweep.id} has succeeded yet", field="run")
    run = best.run
    screen.about = {"run": run.url, "run_id": run.run_id}
    screen.talk(f"best trial: {run.run_id}, {sweep.spec.metric} {best.value:.6g}")
    if what is None or "best" in run.store.pointers(run.run_id):
        return run, what
    return run, [word.replace("checkpoints:best", "checkpoints:latest") for word in what]


def _called(word: str, about: Mapping[str, Any]) -> str:
    """Return the name of a run for the next commands: its id, or its URL if ``word`` is one."""
    return word if _is_place(word) else str(about.get("run_id") or about["sweep_id"])
