"""The verbs that start another program: shell, on a node, and tensorboard, here."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, NoReturn

from cyclopts import Parameter

from ..errors import SpecError
from ..provider_api.protocol import FINAL
from .common_flags import HERE, At, stoppable
from .output import Screen
from .runs import Ours, Ref, open_one, pull_into


def shell(
    run: Ref,
    /,
    *,
    node: Annotated[int, Parameter(show_default=False, help="number of the node; default: 0")] = 0,
    at: At = HERE,
    args: Ours[list[str] | None] = None,
    screen: Ours[Screen],
) -> int:
    """Run COMMAND, by default a shell, on a node: with the environment of its first rank, in that rank's folder.

    The exit code is the command's own. Where the platform's shell is a page, print the page's URL.
    """
    way = open_one(run, at, screen).shell(node, args or (), tty=sys.stdin.isatty() and sys.stdout.isatty())
    if way.url:
        screen.value(way.url, "to use the shell, open this page")
        return 0
    return start(way.argv[0], way.argv[1:], env=way.env, install=way.install)


def start(program: str, arguments: Sequence[str], *, env: Mapping[str, str], install: str) -> NoReturn:
    """Become ``program``. Raises `SpecError`, with the hint ``install``, if this machine does not have it."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    try:
        os.execvpe(program, [program, *arguments], {**os.environ, **env})
    except OSError as exc:
        raise SpecError(f"cannot start {program}: {exc.strerror}", hint=install) from None


def tensorboard(
    run: Ref,
    folder: Annotated[str | None, Parameter(name="DIR", help="folder for the results; default: ./<run id>")] = None,
    /,
    *,
    port: Annotated[int, Parameter(show_default=False, help="port of TensorBoard; default: 6006")] = 6006,
    at: At = HERE,
    screen: Ours[Screen],
) -> int:
    """Pull the artifacts of a run and start TensorBoard on them. New ones come until the run ends or you stop it."""
    program, install = shutil.which("tensorboard"), "pip install tensorboard"
    if program is None:
        raise SpecError("there is no program tensorboard", hint=install)
    handle = open_one(run, at, screen)
    place = Path(folder or handle.run_id)
    pull_into(handle, place, screen, what=["artifacts"])
    if not any((place / "artifacts").rglob("*tfevents*")):
        screen.talk("note: the run has no event files among its artifacts; the script must write them there")
        screen.hint(f"let it log below {{artifact_dir}}; for files elsewhere: cloudtrain pull {handle.run_id}")
    words = ["--logdir", str(place / "artifacts"), "--port", str(port)]
    if handle.result()["state"] in FINAL:
        start(program, words, env={}, install=install)
    with stoppable(), subprocess.Popen([program, *words]) as child:
        try:
            pull_into(handle, place, screen, what=["artifacts"], follow=True)
            return child.wait()
        except KeyboardInterrupt:
            return 0
        finally:
            child.terminate()
