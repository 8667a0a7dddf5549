"""The flags of every verb: store and profile; and the handling of signals."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from ..settings.settings import Settings


def switch(help: str, *names: str) -> Parameter:
    """Return a flag without a value. ``names`` are its flags; default: made of the parameter's name."""
    return Parameter(name=names or None, help=help, negative="", show_default=False)


def many(help: str, form: str, *names: str) -> Parameter:
    """Return a flag that may be repeated, with ``form`` as the text after it; ``names`` as in `switch`."""
    return Parameter(name=names or None, help=help, metavar=form, negative="")


@dataclass(frozen=True, kw_only=True)
class Where:
    """The store of runs and the profile from the command line; None: as the settings say."""

    store: Annotated[
        str | None,
        Parameter(metavar="URL", help="URL under which runs live; default: setting store, ./.cloudtrain"),
    ] = None
    profile: Annotated[
        str | None,
        Parameter(
            metavar="NAME", help="profile of the settings file; default: $CLOUDTRAIN_PROFILE, else the file's own"
        ),
    ] = None

    def settings(self, **given: Any) -> Settings:
        """Return the settings there; ``given`` as `Settings.load` takes them. Raises `SpecError`."""
        return Settings.load(store=self.store, profile=self.profile, **given)

    @property
    def flags(self) -> list[str]:
        """Return the flags with which the next commands find the same store."""
        store = ["--store", self.store] if self.store else []
        return store + (["--profile", self.profile] if self.profile else [])


HERE = Where()
At = Annotated[Where, Parameter(name="*")]
OnSignal = Annotated[
    Literal["detach", "cancel"],
    Parameter(
        show_default=False, help="action on SIGTERM: detach (default; as on Ctrl-C) or cancel (then on Ctrl-C too)"
    ),
]


OnEnd = Annotated[
    str | None,
    Parameter(
        name="--on-end",
        metavar="CMD",
        help="shell command to run once the run, or sweep, has ended; CLOUDTRAIN_STATE and others describe the end",
    ),
]


def run_on_end(command: str | None, result: Mapping[str, Any], say: Callable[[str], object]) -> None:
    """Run the command of ``--on-end`` with the outcome of a run or sweep in its environment.

    Its own end only gives a line. It writes to stderr: stdout is for this verb's results.
    """
    if command is None:
        return
    import subprocess

    values = {name: result.get(name) for name in ("state", "category", "reason", "exit_code")}
    values |= {name: result.get(name, result.get(name.replace("run", "sweep"))) for name in ("run_id", "run")}
    given = {f"CLOUDTRAIN_{name.upper()}": "" if value is None else str(value) for name, value in values.items()}
    try:
        code = subprocess.run(
            command, shell=True, check=False, env={**os.environ, **given}, stdin=subprocess.DEVNULL, stdout=2
        ).returncode
    except (OSError, ValueError) as exc:
        say(f"--on-end cannot run: {exc}")
    else:
        if code:
            say(
                f"--on-end ended with {code}; the exit code here is that of the {'run' if 'run' in result else 'sweep'}"
            )


def stoppable() -> AbstractContextManager[None]:
    """Raise KeyboardInterrupt for SIGTERM and SIGHUP within, as for SIGINT, unless they are handled or ignored."""
    return _handled(_interrupt, ("SIGTERM", "SIGHUP"), only_default=True)


def undisturbed() -> AbstractContextManager[None]:
    """Ignore these signals, and SIGINT, within: a CI runner sends one after the other, and then kills."""
    return _handled(signal.SIG_IGN, ("SIGINT", "SIGTERM", "SIGHUP"), only_default=False)


@contextmanager
def _handled(handler: Any, names: Iterable[str], *, only_default: bool) -> Iterator[None]:
    before = {}
    for name in names:
        number = getattr(signal, name, None)
        if number is not None and (not only_default or signal.getsignal(number) is signal.SIG_DFL):
            with suppress(ValueError):  # only the main thread can set a handler
                before[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt
