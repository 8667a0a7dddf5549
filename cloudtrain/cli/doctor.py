"""The verb doctor: check the needs of a job before one is sent; with ``--job`` on every node of it."""

from __future__ import annotations

import dataclasses
import difflib
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from ..errors import AuthError, LostContactError, NotFoundError, SpecError
from ..provider_api.checks import gravest
from ..provider_api.registry import provider_names
from . import format
from .common_flags import HERE, At, Where, stoppable, switch
from .flags import given_flags, job_of
from .output import Screen
from .runs import Json, Ours, left, stopped
from .submit import NO_FLAGS, Fallback, Flags, Provider, RunId, Set, say_limits, say_price, settings_pairs

if TYPE_CHECKING:
    from ..doctor.doctor import CheckedPlace, Grace
    from ..provider_api.checks import Check
    from ..runs.run import Run
    from ..runs.submit import Plan
    from ..settings.settings import Settings

Which = Annotated[str | None, Parameter(help="your script or job file, or the name of a provider")]
OnNodes = Annotated[bool, switch("send a job that checks every node", "--job")]
Measure = Annotated[bool, switch("with --job: cancel it, and measure the time from SIGTERM to SIGKILL")]

EXIT_UNLIKE = 1
WIDTH = max(map(len, ("ok", "failed", "skipped", "unknown")))
OURS = ("entry_point", "source_dir", "dependencies", "requirements", "exclude", "hyperparameters")
"""Fields of the job that the doctor itself sets, or that mean nothing to its script."""


def doctor(
    what: Which = None,
    /,
    *,
    provider: Provider = None,
    on_nodes: OnNodes = False,
    measure_grace: Measure = False,
    flags: Flags = NO_FLAGS,
    at: At = HERE,
    fallback: Fallback = None,
    run_id: RunId = None,
    settings: Set = None,
    json: Json = False,
    screen: Ours[Screen],
) -> int:
    """Print a line for each check, with the fix if it failed. Exit with the code of the worst failure."""
    cwd, given = Path.cwd(), settings_pairs(settings)
    fields = given_flags(flags)
    provider, script = _meant(what, provider, cwd)
    job = job_of(script, None, flags, None, cwd=cwd) if script is not None else None
    if job is not None and on_nodes:
        raise SpecError("--job sends its own script", field="job", hint=f"leave out {script}")
    for name in OURS if job is None else ():
        if name in fields:
            raise SpecError("doctor runs its own script", field=name, hint=f"leave out {name}")
    if on_nodes:
        from ..runs.fallback import only_first

        chosen, others = only_first(at.settings(overrides=given, cwd=cwd, provider=provider, fallback=fallback))
        if others:
            screen.talk(others)
        return _on_nodes(chosen, fields, run_id, measure_grace, at, cwd, screen)
    if measure_grace:
        raise SpecError("without --job no node starts", field="measure_grace", hint="add --job")
    if run_id is not None:
        raise SpecError("without --job no run starts", field="run_id", hint="add --job")
    from ..doctor.doctor import checked_places

    where: dict[str, Any] = {"provider": provider, "store": at.store, "profile": at.profile, "settings": given}
    where |= {"fallback": fallback}
    found = looked(checked_places(**where, fields=fields, cwd=cwd, job=job), screen)
    code = gravest(check for _, checks in found for check in checks)
    if screen.json:
        (first, checks), *later = found
        screen.emit({
            "provider": first.provider,
            **({"profile": first.profile or None, "place": first.region} if later else {}),
            "checks": [dataclasses.asdict(check) for check in checks],
            **({"fallbacks": [_as_json(*item) for item in later]} if later else {}), "exit_code": code,
        })  # fmt: skip
    elif code == 0 and not fields and job is None:
        screen.next(["doctor", *([provider] if provider else []), "--job"], where=at.flags)
    return code


def _meant(what: str | None, provider: str | None, cwd: Path) -> tuple[str | None, str | None]:
    """Return the provider and the script or job file to check; ``what`` is either."""
    if what is None:
        return provider, None
    names = provider_names()
    if set(what.split(",")) <= set(names):
        if provider not in (None, what):
            raise SpecError(f"{what!r} and {provider!r} are two providers", field="provider", hint="name one of them")
        return what, None
    if (cwd / what).exists() or os.path.splitext(what)[1] or "/" in what:
        return provider, what
    files = [item.name for item in cwd.iterdir() if item.suffix in (".py", ".toml", ".json", ".sh")]
    near = [f"cloudtrain doctor {name}" for name in difflib.get_close_matches(what, [*names, *files], n=2)]
    hint = " or ".join(near) or f"name one of {', '.join(names)}, or a script or job file"
    raise NotFoundError(f"{what!r} is neither a provider nor a file here", field="provider", hint=hint)


def looked(some: Iterable[CheckedPlace], screen: Screen) -> list[tuple[CheckedPlace, list[Check]]]:
    """Return each place and its checks, printed as they are made. With a fallback, print the name of each. Skip a
    check that an earlier one of the provider had word for word."""
    found: list[tuple[CheckedPlace, list[Check]]] = []
    printed: set[tuple[str | None, Check]] = set()
    places = list(some)
    for place in places:
        if not screen.json and len(places) > 1:
            screen.data(f"{place}:")
        found.append((place, []))
        for check in place.checks:
            found[-1][1].append(check)
            if not screen.json and (place.provider, check) not in printed:
                printed.add((place.provider, check))
                screen.show(f"{check.status:<{WIDTH}}  {check.name}: {check.detail}")
                if check.fix:
                    lines = check.fix.replace("\n", f"\n{'':<{WIDTH}}       ")
                    screen.data(f"{'':<{WIDTH}}  fix: {lines}")
    return found


def _as_json(place: CheckedPlace, checks: Sequence[Check]) -> dict[str, Any]:
    """Return the JSON object of a fallback."""
    rows = [dataclasses.asdict(check) for check in checks]
    name = {"provider": place.provider, "profile": place.profile, "place": place.region}
    return {**name, "checks": rows, "exit_code": gravest(checks)}


def _on_nodes(
    chosen: Settings,
    fields: Mapping[str, Any],
    run_id: str | None,
    measure: bool,
    at: Where,
    cwd: Path,
    screen: Screen,
) -> int:
    """Send the job as any other, wait for it, and print its findings."""
    from ..doctor.doctor import Grace, prepared
    from ..runs.retry import Retry
    from ..runs.submit import send_plan

    with prepared(chosen, fields, run_id=run_id, cwd=cwd, grace=measure) as planned:
        screen.about = {"run": planned.run_url, "run_id": planned.run_id, "provider": planned.provider_name}
        say_limits(planned.job, screen)
        say_price(planned, screen)
        for note in planned.request.notes:
            screen.talk(f"note: {note}")
        with stoppable():
            run = send_plan(planned, environ=os.environ, progress=screen.talk)
            screen.talk(format.sent(planned.run_id, planned.provider_name, run.url, run.staged))
            grace = Grace(run) if measure else None
            try:
                result = run.wait(on_line=grace, on_status=format.Changes(screen.talk), retry=Retry(run, screen.talk))
            except KeyboardInterrupt:
                return stopped(run, run.run_id, at, "detach", screen)
            except (AuthError, LostContactError) as exc:
                raise left(exc, run, run.run_id, at, screen) from None
    code = 0 if grace is not None and grace.asked and result["state"] == "cancelled" else int(result["exit_code"])
    if code:
        screen.talk(format.outcome(result))
    found, wrong = _found(planned, run, grace, must=code == 0)
    code = code or (EXIT_UNLIKE if wrong else 0)
    if screen.json:
        outcome = {name: result[name] for name in ("state", "category", "reason")}
        screen.emit({**screen.about, **outcome, "report": found, "problems": wrong, "exit_code": code})
    elif found is not None:
        from ..runtime.node_check import table

        screen.data(table(found))
    for line in wrong:
        screen.talk(f"error: {line}")
    if code:
        screen.next(["logs", run.run_id], ["status", run.run_id], where=at.flags)
    return code


def _found(planned: Plan, run: Run, grace: Grace | None, *, must: bool) -> tuple[dict[str, Any] | None, list[str]]:
    """Return the job's report and its problems, a line each. Without a report return None, or raise `SpecError` if
    ``must``."""
    from ..doctor.doctor import expected_gpus, judged

    newest = max(run.store.attempts(run.run_id), default=0)  # it may have another GPU of the list
    request = run.store.attempt_request(run.run_id, newest) or planned.request
    nodes = planned.job.resources.instance_count
    with tempfile.TemporaryDirectory(prefix="cloudtrain-doctor-") as folder:
        run.pull(folder, what="artifacts")
        try:
            found, wrong = judged(Path(folder), nodes=nodes, gpus=expected_gpus(planned.job, planned.provider, request))
        except SpecError:
            if must:
                raise
            return None, []
    if grace is not None and not grace.asked:
        wrong.append("the grace was not measured: the job did not report in time that it was ready; see its logs")
    elif grace is not None:
        found["grace"], late = grace.judged(nodes, planned.provider.launch_spec(request).rules.stop_grace)
        wrong += late
    return found, wrong
