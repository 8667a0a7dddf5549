"""The two streams of a verb: data on stdout, messages on stderr."""

from __future__ import annotations

import json
import os
import re
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Protocol, TextIO

from ..errors import StorageError, scrubbed

_RED, _GREEN, _YELLOW, _CYAN = "31", "32", "33", "36"
_LABELS = {"error:": f"1;{_RED}", "warning:": f"1;{_YELLOW}", "note:": _CYAN, "hint:": _CYAN, "next:": _CYAN}
_STATES = {
    "succeeded": _GREEN, "ok": _GREEN, "failed": _RED, "unknown": _YELLOW, "cancelled": _YELLOW, "cancelling": _YELLOW,
    "pending": _YELLOW, "running": _CYAN,
}  # fmt: skip
_COLOURS = _LABELS | _STATES
_WORDS = re.compile(rf"(?m)^(?:{'|'.join(_LABELS)})(?=$| )|(?:^|(?<=  )|(?<=: ))(?:{'|'.join(_STATES)})(?=$|:|  | \()")
"""A label at the beginning of a line; a state there, in a column, or after a name."""


class ReaderGone(Exception):
    """The reader of stdout is gone: in ``cloudtrain logs RUN | head``, head has ended."""


class Say(Protocol):
    """A function that prints one line of progress."""

    def __call__(self, text: str, /) -> None: ...


class Screen:
    """The output of a verb. ``json``: the command line has --json. ``about`` is added to an error: the run, once known.
    ``interrupted`` is Ctrl-C's message."""

    def __init__(self, out: TextIO, err: TextIO) -> None:
        self.out, self.err, self.json = out, err, False
        self.about: dict[str, Any] = {}
        self.interrupted = "interrupted"
        self.emitted = False
        self._later: list[str] | None = None  # lines that must not disturb a moving one
        self._move: Say = self.talk

    def data(self, text: str) -> None:
        """Print a line of data at once: a program may follow the pipe."""
        try:
            self.out.write(text + "\n")
            self.out.flush()
        except BrokenPipeError:
            _silence(self.out)
            raise ReaderGone from None
        except OSError as exc:  # the disk of a file is full
            _silence(self.out)
            raise StorageError(f"cannot write to stdout: {exc.strerror or exc}") from None

    def show(self, text: str) -> None:
        """Print data for a person, with coloured states on a terminal that supports colour."""
        self.data(painted(text) if self.reads and not plain(os.environ) else text)

    def answer(self, value: Mapping[str, Any], text: str = "") -> None:
        """Print the result of a verb: the object ``value`` with --json, else ``text``, if any, for a person."""
        if self.json:
            self.emit(value)
        elif text:
            self.show(text)

    def value(self, word: str, text: str = "") -> None:
        """Print the result of a verb: the bare ``word`` for a program, ``text`` for a person at a terminal.

        With --json, which has an object instead, this prints nothing.
        """
        if self.json:
            return
        if not self.reads:
            self.data(word)
        elif text:
            self.show(text)

    def talk(self, text: str) -> None:
        """Print a message. A closed stderr must not stop the verb: a run may be half submitted."""
        self.relay(painted(text) if self.interactive else text)

    def relay(self, text: str) -> None:
        """Print a line on stderr as it is, as a script's own line."""
        if self._later is not None:
            self._later.append(text)
            return
        try:
            self.err.write(text + "\n")
            self.err.flush()
        except OSError:  # a closed pipe, a full disk
            _silence(self.err)

    def error(self, text: str, hint: str = "") -> None:
        """Print ``error: text`` and, where there is one, ``hint: …`` with its further lines indented below it."""
        self.talk(f"error: {text}")
        self.hint(hint)

    def hint(self, text: str) -> None:
        """Print ``hint: …``; nothing for an empty text."""
        if text:
            self.talk("hint: " + text.replace("\n", "\n      "))

    def refusal(self, text: str, code: int, *, field: str = "", hint: str = "") -> dict[str, Any]:
        """Print an error. Return the object that ``--json`` has instead of a verb's own."""
        line = scrubbed(" ".join(text.split("\n")))
        self.error(line, hint)
        return {**self.about, "error": line, "field": field, "hint": hint, "exit_code": code}

    def refuse(self, text: str, code: int, *, field: str = "", hint: str = "") -> int:
        """Print an error, with --json as the object too. Return ``code``."""
        self.answer(self.refusal(text, code, field=field, hint=hint))
        return code

    def emit(self, value: Mapping[str, Any], *, indent: int | None = None) -> None:
        """Print the one JSON object of ``--json``, indented on a terminal; never a second one. An error names its
        field."""
        if self.emitted:
            return
        self.emitted = True
        if "error" in value and "state" not in value:
            value = {"field": "", "hint": "", **value}
            ends = ("error", "field", "hint", "exit_code", "refusals")
            first = {key: item for key, item in value.items() if key not in ends}
            value = first | {key: value[key] for key in ends if key in value}
        self.data(json.dumps(value, ensure_ascii=False, indent=2 if self.reads else indent))

    def next(self, *commands: list[str], where: Sequence[str] = ()) -> None:
        """Print the next useful commands; ``where`` are the flags that they need to find the same store."""
        for i, words in enumerate(commands):
            self.talk(("next: " if i == 0 else "      ") + shlex.join(["cloudtrain", *words, *where]))

    @property
    def reads(self) -> bool:
        """Return whether a person reads stdout: it is a terminal."""
        return self.out.isatty()

    @property
    def draws(self) -> bool:
        """Return whether stdout is a terminal for a live view, and not for an object."""
        return (
            not self.json
            and self.out.isatty()
            and os.environ.get("TERM", "") not in ("", "unknown")
            and not plain(os.environ)
        )

    @property
    def now(self) -> float | None:
        """Return Unix seconds for times such as ``2 min ago``; None for a program, which gets times as they are."""
        return time.time() if self.reads else None

    @property
    def interactive(self) -> bool:
        """Return whether stderr is a terminal that supports more than text."""
        return self.err.isatty() and not plain(os.environ)

    def passing(self, text: str) -> None:
        """Show a line that matters only now: in place of the moving line, if there is one."""
        self._move(text)

    @contextmanager
    def progress(self) -> Iterator[Say]:
        """Yield a function for lines of progress: one moving line on a terminal (rich), plain lines elsewhere."""
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
                self.relay(text)


def painted(text: str) -> str:
    """Return ``text`` with its labels and states in colour."""
    return _WORDS.sub(lambda match: f"\x1b[{_COLOURS[match[0]]}m{match[0]}\x1b[0m", text)


def plain(environ: Mapping[str, str]) -> bool:
    """Return whether a terminal gets text alone: NO_COLOR is set (no-color.org), or it has no escape sequences."""
    return bool(environ.get("NO_COLOR")) or environ.get("TERM") == "dumb"


def _silence(stream: TextIO) -> None:
    """Discard buffered output, or Python itself complains about it at its exit."""
    with suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
