"""The command line: ``cloudtrain VERB …``. stdout is data, stderr is talk, exit codes are those of errors.py.

Everything after the first ``--`` belongs to the script and is taken out before any parsing. Verbs are plain functions
that are imported when they are called, so a cheap verb starts as fast as its own imports.
"""

from __future__ import annotations

import gc
import os
import shlex
import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from .screen import ReaderGone, Screen, plain

if TYPE_CHECKING:
    from cyclopts import App, UnknownOptionError

__all__ = ["main", "make_app", "parse"]

#: Verb -> (module and function, what it does, how it is called).
VERBS: dict[str, tuple[str, str, str]] = {
    "submit": (
        "send:submit",
        "Send a job, follow its logs and exit by its outcome.",
        "SCRIPT|JOB.toml [OPTIONS] [-- SCRIPT ARGS]",
    ),
    "plan": (
        "send:plan",
        "Show exactly what submit would send; no network.",
        "SCRIPT|JOB.toml [OPTIONS] [-- SCRIPT ARGS]",
    ),
    "rehearse": (
        "rehearse:rehearse",
        "Run a job here as another platform would start it, with drills.",
        "SCRIPT|JOB.toml [OPTIONS] [-- SCRIPT ARGS]",
    ),
    "status": ("verbs:status", "Say how a run is doing.", "RUN [OPTIONS]"),
    "logs": ("verbs:logs", "Print a run's log lines; -f follows them.", "RUN [OPTIONS]"),
    "watch": ("views:watch", "Watch a run live: state, nodes, loss, last lines.", "RUN [OPTIONS]"),
    "report": ("views:report", "Write one HTML page about a run, that opens offline.", "RUN [OPTIONS]"),
    "wait": ("verbs:wait", "Wait for a run and exit by its outcome.", "RUN [OPTIONS]"),
    "pull": ("verbs:pull", "Copy a run's results to this machine.", "RUN [DIR] [OPTIONS]"),
    "cancel": ("verbs:cancel", "Stop a run.", "RUN [OPTIONS]"),
    "reconcile": (
        "verbs:reconcile",
        "Do once what a waiting client does: retry, act on max_wait, close.",
        "[RUN|STORE] [OPTIONS]",
    ),
    "list": ("verbs:list_runs", "List the runs of a store.", "[OPTIONS]"),
    "gpus": ("gpus:gpus", "Find machines with GPUs, and what they cost.", "[PATTERN] [OPTIONS]"),
    "gc": ("verbs:gc", "Find, and remove, what no run of a store needs.", "[STORE] [OPTIONS]"),
    "doctor": ("doctor:doctor", "Look whether a job could be sent; --job: on every node.", "[PROVIDER] [OPTIONS]"),
    "config": ("config:config", "Show every setting and where it comes from.", "[KEY] [OPTIONS]"),
    "schema": ("config:schema", "Print the JSON schema of a file, or of what a verb prints.", "[NAME]"),
    "completion": ("complete:completion", "Print a shell's completion: bash, zsh or fish.", "SHELL"),
}
EXIT_USAGE, EXIT_DETACHED, EXIT_BUG = 2, 7, 9
GARBAGE = 300_000
"""New objects between two looks for garbage, of Python's own 700: a cloud's client makes as many when it is imported,
none of them garbage, and looking takes a quarter of that time."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (default: the process's own) and return its exit code. Never raises."""
    if argv is None:
        gc.set_threshold(GARBAGE)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a terminal of another encoding must not end the following of a run
            stream.reconfigure(errors="backslashreplace")
    tokens, args = split(sys.argv[1:] if argv is None else argv)
    screen = Screen(sys.stdout, sys.stderr)
    try:
        return _guarded(tokens, args, screen)
    except ReaderGone:
        return EXIT_DETACHED if tokens[:1] in (["submit"], ["rehearse"], ["wait"]) else 0


def split(argv: Sequence[str]) -> tuple[list[str], list[str] | None]:
    """(cloudtrain's own tokens, the script's or None when there is no ``--``)."""
    argv = list(argv)
    if "--" not in argv:
        return argv, None
    at = argv.index("--")
    return argv[:at], argv[at + 1 :]


def make_app(*, formatter: Literal["plain"] | None = None) -> App:
    """The application: names and one line each; a verb's module is imported when the verb is called.

    ``formatter`` is that of the help, None for boxes; naming one imports rich at once, so only help itself does.
    """
    from cyclopts import App

    from .._version import __version__

    app = App(
        name="cloudtrain",
        help="One description of a PyTorch training job; the same run on every platform.",
        version=__version__,
        help_format="plaintext",
        help_formatter=formatter,
        end_of_options_delimiter="",
    )
    for order, (name, (where, text, usage)) in enumerate(VERBS.items()):
        app.command(
            f"{__name__}.{where}",
            name=name,
            help=text,
            sort_key=order,
            usage=f"Usage: cloudtrain {name} {usage}",
        )
    return app


def parse(tokens: Sequence[str], args: list[str] | None, screen: Screen) -> partial[Any]:
    """The call of a verb that the command line asks for; nothing is done yet. Raises `SpecError` for any other line."""
    from cyclopts import CycloptsError

    from .tables import undot

    try:
        app = make_app(formatter="plain" if {"--help", "-h"} & set(tokens[:1]) or not tokens else None)
        if {"--help", "-h"} & set(tokens) and plain(os.environ):
            from rich.console import Console

            app.console = Console(color_system=None)  # by itself NO_COLOR leaves rich its bold
        verb, bound, ours = app.parse_args(
            undot(tokens), exit_on_error=False, print_error=False, help_on_error=False, verbose=False
        )
    except CycloptsError as exc:
        raise _usage_error(exc, list(tokens), args) from None
    given = {"screen": screen, "args": args}
    if args is not None and "args" not in ours and "screen" in ours:
        from ..errors import SpecError

        raise SpecError(f"cloudtrain {tokens[0]} takes nothing after '--'")
    kwargs = {**bound.kwargs, **{name: given[name] for name in ours}}
    return partial(verb, *bound.args, **kwargs)


def _usage_error(exc: Exception, tokens: list[str], args: list[str] | None) -> Exception:
    from cyclopts import UnknownOptionError, UnusedCliTokensError

    from ..errors import SpecError

    verb = tokens[0] if tokens and tokens[0] in VERBS else ""
    usage = f"see: cloudtrain {verb + ' ' if verb else ''}--help"
    takes_script = verb in ("submit", "plan", "rehearse") and args is None
    if isinstance(exc, UnusedCliTokensError):
        words = list(exc.unused_tokens or ())
        text = f"unexpected {' '.join(map(repr, words))}"
        return SpecError(text, hint=_after_dashes(words) if takes_script else usage)
    if isinstance(exc, UnknownOptionError):
        flag = str(exc.token.keyword or exc.token.value).partition("=")[0]
        return SpecError(f"no flag {flag}", hint=_instead_of(flag, exc, tokens, takes_script=takes_script) or usage)
    text = " ".join(str(exc).split()).rstrip(".")
    return SpecError(text[:1].lower() + text[1:], hint=usage)


def _instead_of(flag: str, exc: UnknownOptionError, tokens: list[str], *, takes_script: bool) -> str:
    """Return what to write in place of an unknown flag: another verb, a similar flag, or an argument of the script."""
    from ..values import similar

    if flag == "--dry-run" and takes_script:
        rest = [token for token in tokens[1:] if token != flag]
        return f"plan shows what submit would send: {shlex.join(['cloudtrain', 'plan', *rest])}"
    names = {name.lstrip("-"): name for argument in exc.argument_collection or () for name in argument.names}
    near = names.get(similar(flag.lstrip("-"), names))
    how = [f"did you mean {near}?"] if near else []
    return "; ".join([*how, *([_after_dashes([flag])] if takes_script else [])])


def _after_dashes(words: list[str]) -> str:
    return f"arguments of the script go after '--' at the end of the line: -- {shlex.join(words)}"


def _guarded(tokens: list[str], args: list[str] | None, screen: Screen) -> int:
    """Run it; every failure becomes one line on stderr and, with --json, the one object on stdout."""
    wants_json = any(t == "--json" or t.startswith("--json=") for t in tokens)
    try:
        code = parse(tokens, args, screen)()
        return code if isinstance(code, int) else 0
    except ReaderGone:
        raise
    except KeyboardInterrupt:
        known = screen.about.get("run")
        text = f"interrupted; how the run is doing: cloudtrain status {known}" if known else "interrupted"
        return _report(screen, text, EXIT_DETACHED, wants_json)
    except Exception as exc:  # noqa: BLE001 - the last resort of a command line: one line instead of a traceback
        if os.environ.get("CLOUDTRAIN_DEBUG") == "1":
            import traceback

            traceback.print_exc(file=screen.err)
        from ..errors import CloudtrainError

        if isinstance(exc, CloudtrainError):
            field = getattr(exc, "field", "")
            return _report(screen, str(exc), exc.exit_code, wants_json, field=field, hint=exc.hint)
        text = f"{type(exc).__name__}: {exc} (this is a bug in cloudtrain; CLOUDTRAIN_DEBUG=1 shows where)"
        return _report(screen, text, EXIT_BUG, wants_json)


def _report(screen: Screen, text: str, code: int, wants_json: bool, *, field: str = "", hint: str = "") -> int:
    from ..errors import scrubbed

    line = scrubbed(" ".join(text.split("\n")))
    screen.error(line, hint)
    if wants_json:
        screen.emit({**screen.about, "error": line, "field": field, "hint": hint, "exit_code": code})
    return code
