"""The verb rehearse: run a job on this machine, as another platform would start it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from ..validate import parse_duration
from .common_flags import HERE, At, OnSignal, Where
from .flags import job_of
from .key_value import pairs
from .output import Screen
from .runs import Json, Ours, WaitTimeout
from .runs import Verbose as SayMover
from .submit import NO_FLAGS, Detach, Flags, Module, Provider, PullTo, RunId, Script, Set, carry_out, settings_pairs

__all__ = ["rehearse"]

LocalStore = Annotated[
    str,
    Parameter(
        metavar="DIR",
        show_default=False,
        help="folder of this machine in which rehearsals live; default: ./.cloudtrain",
    ),
]
Maps = Annotated[
    list[str] | None,
    Parameter(name="--map", metavar="URL=PATH", help="what stands for remote data; repeatable", negative=""),
]
Image = Annotated[
    str, Parameter(metavar="IMAGE", help="image of this machine in place of the job's", show_default=False)
]
Values = Annotated[
    list[str] | None,
    Parameter(
        name="--secret-value", metavar="NAME=env:VARIABLE", help="a secret's value here; repeatable", negative=""
    ),
]
Preempt = Annotated[
    list[str] | None,
    Parameter(metavar="node=N,after=WHEN", help="drill: the platform takes a machine back; repeatable", negative=""),
]
Kill = Annotated[
    list[str] | None,
    Parameter(metavar="node=N,after=WHEN", help="drill: a machine is gone without a word; repeatable", negative=""),
]


def rehearse(
    script: Script = None,
    /,
    *,
    module: Module = None,
    flags: Flags = NO_FLAGS,
    provider: Provider = None,
    at: At = HERE,
    run_id: RunId = None,
    settings: Set = None,
    local_store: LocalStore = "./.cloudtrain",
    map_to: Maps = None,
    local_image: Image = "",
    secret_values: Values = None,
    preempt: Preempt = None,
    kill: Kill = None,
    detach: Detach = False,
    wait_timeout: WaitTimeout = None,
    on_signal: OnSignal = "detach",
    pull_to: PullTo = None,
    verbose: SayMover = False,
    json: Json = False,
    args: Ours[list[str] | None] = None,
    screen: Ours[Screen],
) -> int:
    """Plan the provider's real request, then start here what its platform would. Exit by the outcome."""
    cwd = Path.cwd()
    chosen = at.settings(overrides=settings_pairs(settings), cwd=cwd, provider=provider)
    seconds = parse_duration(wait_timeout, field="wait_timeout") if wait_timeout is not None else None
    job = job_of(script, module, flags, args, cwd=cwd)
    from ..engine.rehearse import plan_rehearsal
    from ..runs.fallback import only_first

    _, others = only_first(chosen)
    if others:
        screen.talk(others)
    planned = plan_rehearsal(
        job,
        settings=chosen,
        run_id=run_id,
        cwd=cwd,
        store=local_store,
        maps=pairs("--map", map_to or (), field="map"),
        image=local_image,
        secrets=pairs("--secret-value", secret_values or (), field="secret_value"),
        drills=[*(("preempt", text) for text in preempt or ()), *(("kill", text) for text in kill or ())],
    )
    body = planned.request.body
    screen.talk(f"rehearsing what {body['target']} would start for this request; other than there:")
    for line in body["differences"]:
        screen.talk(f"  {line}")
    back = Where(store=local_store, profile=at.profile)
    return carry_out(planned, back, seconds, on_signal, detach, pull_to, verbose, json, screen)
