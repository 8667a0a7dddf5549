"""The verb completion: print what a shell needs to complete verbs and flags."""

from __future__ import annotations

from typing import Annotated, Literal

from cyclopts import Parameter

from .output import Screen
from .runs import Ours

__all__ = ["completion"]

FILES = "complete -o default -F _cloudtrain cloudtrain"
"""Completes file names, such as scripts and job files, where there is no verb and no flag to complete."""


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
