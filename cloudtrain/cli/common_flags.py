"""The flags of every verb: store and profile; and the handling of signals."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from ..settings.settings import Settings

__all__ = ["HERE", "At", "OnSignal", "Where", "stoppable", "undisturbed"]


@dataclass(frozen=True, kw_only=True)
class Where:
    """The store of runs and the profile from the command line; None: as the settings say."""

    store: Annotated[
        str | None,
        Parameter(
            metavar="URL", help="URL under which runs live; a list: in order; default: setting store, ./.cloudtrain"
        ),
    ] = None
    profile: Annotated[
        str | None,
        Parameter(
            metavar="NAME", help="profile of the settings file that counts; default: $CLOUDTRAIN_PROFILE, its own"
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
    Parameter(show_default=False, help="what SIGTERM means: detach (default; as Ctrl-C) or cancel, then Ctrl-C too"),
]


@contextmanager
def stoppable() -> Iterator[None]:
    """Raise KeyboardInterrupt for SIGTERM and SIGHUP within, as for SIGINT, unless they are handled or ignored."""
    before = {}
    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is signal.SIG_DFL:
            with suppress(ValueError):  # only the main thread can set a handler
                before[number] = signal.signal(number, _interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Ignore these signals, and SIGINT, within: a CI runner sends one after the other, and then kills."""
    before = {}
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        if (number := getattr(signal, name, None)) is not None:
            with suppress(ValueError):  # as in `stoppable`
                before[number] = signal.signal(number, signal.SIG_IGN)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt
