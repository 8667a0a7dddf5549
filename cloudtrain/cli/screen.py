"""The two streams of a verb: data on stdout, talk on stderr."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Protocol, TextIO

__all__ = ["ReaderGone", "Say", "Screen"]


class ReaderGone(Exception):
    """Nobody reads stdout any more: ``cloudtrain logs RUN | head`` has had enough."""


class Say(Protocol):
    """Says one line of progress."""

    def __call__(self, text: str, /) -> None: ...


class Screen:
    """Where a verb writes. ``about`` is what an error object should say too: the run, once there is one."""

    def __init__(self, out: TextIO, err: TextIO) -> None:
        self.out, self.err = out, err
        self.about: dict[str, Any] = {}

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
        try:
            self.err.write(text + "\n")
            self.err.flush()
        except BrokenPipeError:
            _silence(self.err)

    def emit(self, value: Mapping[str, Any], *, indent: int | None = None) -> None:
        """The one JSON object of ``--json``."""
        self.data(json.dumps(value, ensure_ascii=False, indent=indent))

    def next(self, *commands: list[str], store: str | None = None) -> None:
        """The next useful commands; ``store`` when it was given, since they need it too."""
        tail = ["--store", store] if store else []
        for i, words in enumerate(commands):
            self.talk(("next: " if i == 0 else "      ") + shlex.join(["cloudtrain", *words, *tail]))

    @property
    def interactive(self) -> bool:
        """Whether somebody watches: stderr is a terminal."""
        return self.err.isatty()

    @contextmanager
    def progress(self) -> Iterator[Say]:
        """Says lines of progress: one moving line on a terminal (rich), plain lines elsewhere."""
        if not self.interactive:
            yield self.talk
            return
        from rich.console import Console
        from rich.markup import escape

        with Console(file=self.err).status("") as status:
            yield lambda text: status.update(escape(text))


def _silence(stream: TextIO) -> None:
    """Let what is still buffered go nowhere, or Python itself complains about it on its way out."""
    with suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
