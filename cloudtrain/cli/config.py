"""The verbs about settings, files and the shell: config, schema and completion."""

from __future__ import annotations

import json as json_
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from ..errors import NotFoundError
from ..validate import near_or_all
from . import format
from .common_flags import HERE, At
from .output import Screen
from .runs import Json, Ours
from .submit import Provider, Set, settings_pairs

FILES = "complete -o default -F _cloudtrain cloudtrain"
"""Completes file names, such as scripts and job files, where there is no verb and no flag to complete."""


def config(
    key: Annotated[str | None, Parameter(help="print this setting's value alone, and its meaning on stderr")] = None,
    /,
    *,
    provider: Provider = None,
    settings: Set = None,
    at: At = HERE,
    json: Json = False,
    screen: Ours[Screen],
) -> int:
    """Print every setting of this folder, with its value and source."""
    found = at.settings(overrides=settings_pairs(settings), cwd=Path.cwd(), provider=provider)
    rows = found.shown()
    if key is not None:
        known = {row["key"]: row for row in rows}
        if key not in known:
            raise NotFoundError("no such setting", field=key, hint=near_or_all(key, known))
        rows = [known[key]]
    if screen.json:
        about = {"file": found.file or None, "profile": found.profile or None, "profiles": list(found.profiles)}
        screen.emit({**about, "provider": found.provider, "settings": rows})
        return 0
    if key is not None:
        screen.data(_text(rows[0]["value"]))
        if rows[0]["description"]:  # a third party's setting may have none
            screen.talk(rows[0]["description"])
        return 0
    screen.data(format.table([{**row, "value": _text(row["value"])} for row in rows], ("key", "value", "source")))
    of = f", profile {found.profile}" if found.profile else ""
    others = [name for name in found.profiles if name != found.profile]
    screen.talk(f"read {found.file}{of}" if found.file else "no settings file in this folder or above")
    if others:
        screen.talk(f"other profiles: {', '.join(others)}")
    return 0


def schema(
    name: Annotated[str | None, Parameter(help="job, settings, or a verb: of what its --json prints")] = None,
    /,
    *,
    screen: Ours[Screen],
) -> int:
    """Print the JSON schema of a job file, of the settings, or of a verb's output; without a name, list the names."""
    from ..settings.schema import schema as schema_of
    from ..settings.schema import schema_names

    if name is None:
        for known in schema_names():
            screen.data(known)
    else:
        screen.emit(schema_of(name), indent=2)
    return 0


def completion(
    shell: Annotated[Literal["bash", "zsh", "fish"], Parameter(help="bash, zsh or fish")],
    /,
    *,
    screen: Ours[Screen],
) -> int:
    """Print a shell's completion script, made of this version's verbs and flags; an older file lacks the newest."""
    from . import make_app

    script = make_app().generate_completion(shell=shell).rstrip("\n")
    screen.data(f"{script}\n{FILES}" if shell == "bash" else script)
    return 0


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json_.dumps(value, ensure_ascii=False)
