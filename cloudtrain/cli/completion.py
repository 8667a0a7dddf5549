"""The verb that prints what a shell needs to complete our verbs and flags."""

from __future__ import annotations

from typing import Annotated, Literal

from cyclopts import Parameter

from .output import Screen
from .runs import Ours

__all__ = ["completion"]

FILES = "complete -o default -F _cloudtrain cloudtrain"
"""Where there is no verb and no flag to complete, the names of files, as anywhere: scripts and job files."""


def completion(
    shell: Annotated[Literal["bash", "zsh", "fish"], Parameter(help="bash, zsh or fish")],
    /,
    *,
    screen: Ours[Screen],
) -> int:
    """A script for the shell, made of the verbs and flags of this version; a file of an older one lacks the newest."""
    from . import make_app

    script = make_app().generate_completion(shell=shell).rstrip("\n")
    screen.data(f"{script}\n{FILES}" if shell == "bash" else script)
    return 0
