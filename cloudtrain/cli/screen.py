"""The two streams of a verb: data on stdout, talk on stderr."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Protocol, TextIO

__all__ = ["ReaderGone", "Say", "Screen", "plain"]


class ReaderGone(Exception):
    """Nobody reads stdout any more: ``cloudtrain logs RUN | head`` has had enough."""


class Say(Protocol):
    """Says one line of progress."""

    def __call__(self, text: str, /) -> None: ...


class Screen:
    """Where a verb writes. ``about`` is what an error object should say too: the run, once there is one.

    ``interrupted`` is what Ctrl-C means to a verb that does not know of a run.
    """

    def __init__(self, out: TextIO, err: TextIO) -> None:
        self.out, self.err = out, err
        self.about: dict[str, Any] = {}
        self.interrupted = "interrupted"
        self.emitted = False
        self._later: list[str] | None = None  # lines that must not disturb a moving one
        self._move: Say = self.talk

    def data(self, text: str) -> None:
        """A line of data, at once: whoever reads the pipe is following."""
        try:
            self.out.write(text + "\n")
            self.out.flush()
        except BrokenPipeError:
            _silence(self.out)
            raise ReaderGone from None

    def talk(self, text: str) -> None:
        """A line for the person. Nobody reading it is no reason to stop: a run may be half submitted."""
        if self._later is not None:
            self._later.append(text)
            return
        try:
            self.err.write(text + "\n")
            self.err.flush()
        except BrokenPipeError:
            _silence(self.err)

    def error(self, text: str, hint: str = "") -> None:
        """Print ``error: text`` and, where there is one, ``hint: …`` with its further lines indented below it."""
        self.talk(f"error: {text}")
        if hint:
            self.talk("hint: " + hint.replace("\n", "\n      "))

    def emit(self, value: Mapping[str, Any], *, indent: int | None = None) -> None:
        """The one JSON object of ``--json``: what would be a second one is not printed. An error names its field."""
        if self.emitted:
            return
        self.emitted = True
        if "error" in value and "state" not in value:
            value = {**value, "field": value.get("field", ""), "hint": value.get("hint", "")}
        self.data(json.dumps(value, ensure_ascii=False, indent=indent))

    def next(self, *commands: list[str], where: Sequence[str] = ()) -> None:
        """The next useful commands; ``where`` are the flags that all of them need to find the same place."""
        for i, words in enumerate(commands):
            self.talk(("next: " if i == 0 else "      ") + shlex.join(["cloudtrain", *words, *where]))

    @property
    def interactive(self) -> bool:
        """Whether somebody watches: stderr is a terminal, and one that may be sent more than text."""
        return self.err.isatty() and not plain(os.environ)

    def passing(self, text: str) -> None:
        """Show a line that counts now alone: in place of the moving line, if there is one."""
        self._move(text)

    @contextmanager
    def progress(self) -> Iterator[Say]:
        """Says lines of progress: one moving line on a terminal (rich), plain lines elsewhere."""
        if not self.interactive:
            yield self.talk
            return
        from rich.console import Console
        from rich.markup import escape

        self._later = []
        try:
            with Console(file=self.err).status("") as status:
                self._move = lambda text: status.update(escape(text))
                yield self._move
        finally:
            later, self._later, self._move = self._later, None, self.talk
            for text in later:
                self.talk(text)


def plain(environ: Mapping[str, str]) -> bool:
    """Whether a terminal is to get text alone: NO_COLOR is set (no-color.org), or it knows no escape sequences."""
    return bool(environ.get("NO_COLOR")) or environ.get("TERM") == "dumb"


def _silence(stream: TextIO) -> None:
    """Let what is still buffered go nowhere, or Python itself complains about it on its way out."""
    with suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
