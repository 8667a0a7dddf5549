"""The command line: ``cloudtrain VERB …``. stdout has data, stderr messages; exit codes are those of errors.py.

Everything after the first ``--`` belongs to the script and is taken out before any parsing. Verbs are plain functions
that are imported when they are called, so a cheap verb starts as fast as its own imports.
"""

from __future__ import annotations

import gc
import os
import re
import shlex
import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from .output import ReaderGone, Screen, plain

if TYPE_CHECKING:
    from cyclopts import App

__all__ = ["main", "make_app", "parse"]

#: Verb -> (module and function, help text, usage).
VERBS: dict[str, tuple[str, str, str]] = {
    "submit": (
        "submit:submit",
        "Send a job, follow its logs and exit by its outcome.",
        "SCRIPT|JOB [OPTIONS] [-- SCRIPT ARGS]",
    ),
    "plan": (
        "submit:plan",
        "Show exactly what submit would send; no network.",
        "SCRIPT|JOB [OPTIONS] [-- SCRIPT ARGS]",
    ),
    "rehearse": (
        "rehearse:rehearse",
        "Run a job here as another platform would start it, with drills.",
        "SCRIPT|JOB [OPTIONS] [-- SCRIPT ARGS]",
    ),
    "status": ("runs:status", "Say how a run is doing.", "[RUN...] [OPTIONS]"),
    "logs": ("runs:logs", "Print a run's log lines; -f follows them.", "RUN [OPTIONS]"),
    "watch": ("report:watch", "Watch a run live: state, nodes, loss, last lines.", "RUN [OPTIONS]"),
    "report": ("report:report", "Write one HTML page about a run, that opens offline.", "RUN... [OPTIONS]"),
    "wait": ("runs:wait", "Wait for a run and exit by its outcome.", "RUN [OPTIONS]"),
    "pull": ("runs:pull", "Copy a run's results to this machine.", "RUN [DIR] [OPTIONS]"),
    "cancel": ("runs:cancel", "Stop a run.", "RUN... [OPTIONS]"),
    "reconcile": (
        "runs:reconcile",
        "Do once what a waiting client does: retry, act on max_wait, close.",
        "[RUN] [OPTIONS]",
    ),
    "list": ("runs:list_runs", "List the runs of a store.", "[OPTIONS]"),
    "gpus": ("gpus:gpus", "Find machines with GPUs, and what they cost.", "[PATTERN] [OPTIONS]"),
    "gc": ("runs:gc", "Find, and remove, what no run of a store needs.", "[OPTIONS]"),
    "init": (
        "init:init",
        "Write cloudtrain.toml, job.toml and .cloudtrainignore, and check them.",
        "[SCRIPT] [OPTIONS]",
    ),
    "doctor": (
        "doctor:doctor",
        "Look whether a job could be sent; --job: on every node.",
        "[SCRIPT|JOB|PROVIDER] [OPTIONS]",
    ),
    "config": ("config:config", "Show every setting and where it comes from.", "[KEY] [OPTIONS]"),
    "schema": ("config:schema", "Print the JSON schema of a file, or of what a verb prints.", "[NAME]"),
    "completion": ("completion:completion", "Print a shell's completion: bash, zsh or fish.", "SHELL"),
}
ALSO = {"ls": "list", "ps": "list"}
"""Second names of verbs; no help shows them."""
NEWEST = "@newest"
"""Stands for ``-`` in a call of `cloudtrain.cli.reference`: the parser takes ``-`` for a flag."""
EXIT_USAGE, EXIT_DETACHED, EXIT_BUG = 2, 7, 9
GARBAGE = 300_000
"""New objects between two garbage collections; Python's default is 700. Importing a cloud's client makes so many, none
of them garbage, and collecting takes a quarter of that time."""


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
    """Return cloudtrain's own tokens, and the script's or None when there is no ``--``."""
    argv = list(argv)
    if "--" not in argv:
        return argv, None
    at = argv.index("--")
    return argv[:at], argv[at + 1 :]


def make_app(*, formatter: Literal["plain"] | None = None) -> App:
    """Return the application: names and one line each. A verb's module is imported when the verb is called.

    ``formatter`` is that of the help, None for boxes. Naming one imports rich at once, so only help itself does.
    """
    from cyclopts import App

    from .._version import __version__
    from .advice import SCRIPT_VERBS
    from .layout import CLIENT, OPTIONS, OTHER, VERB_GROUP, epilogue

    app = App(
        name="cloudtrain",
        help="One description of a PyTorch training job; the same run on every platform.",
        version=__version__,
        version_flags=("--version", "-V"),
        help_format="plaintext",
        help_formatter=formatter,
        end_of_options_delimiter="",
        group_commands=OTHER,
        help_epilogue="The flags of a verb: cloudtrain help VERB",
    )
    for order, (name, (where, text, usage)) in enumerate(VERBS.items()):
        app.command(
            f"{__name__}.{where}",
            name=name,
            help=text,
            sort_key=order,
            usage=f"Usage: cloudtrain {name} {usage}",
            group=VERB_GROUP[name],
            group_parameters=CLIENT if name in SCRIPT_VERBS else OPTIONS,
            help_epilogue=epilogue(name),
        )
    return app


def parse(tokens: Sequence[str], args: list[str] | None, screen: Screen) -> partial[Any]:
    """Return the call of the verb on the command line, without making it. Raises `SpecError` for an invalid line."""
    from cyclopts import CycloptsError

    from ..errors import SpecError
    from .key_value import undot

    tokens = _verb_first(list(tokens))
    asks = bool({"--help", "-h"} & set(tokens))
    app = make_app(formatter="plain" if not tokens or tokens[0].startswith("-") else None)
    try:
        if asks and plain(os.environ):
            from rich.console import Console

            app.console = Console(color_system=None)  # by itself NO_COLOR leaves rich its bold
        words = [NEWEST if token == "-" else token for token in undot(tokens)]
        verb, bound, ours = app.parse_args(
            words, exit_on_error=False, print_error=False, help_on_error=False, verbose=False
        )
    except CycloptsError as exc:
        raise _usage_error(exc, app, tokens, args) from None
    given = {"screen": screen, "args": args}
    if args is not None and "args" not in ours and "screen" in ours:
        raise SpecError(f"cloudtrain {tokens[0]} takes nothing after '--'", hint=_help_of(tokens[0]))
    kwargs = {**bound.kwargs, **{name: given[name] for name in ours}}
    return partial(verb, *bound.args, **kwargs)


def _verb_first(tokens: list[str]) -> list[str]:
    """Return ``tokens`` with a verb of `VERBS` in front, or help. Raises `SpecError` for any other word there."""
    if tokens[:1] == ["help"]:
        tokens = [*tokens[1:2], "--help"]
    if not tokens:
        return tokens
    first = tokens[0] = ALSO.get(tokens[0], tokens[0])
    if first in VERBS or first in ("--help", "-h", "--version", "-V"):
        return tokens
    from ..errors import SpecError

    if first.startswith("-"):
        verb = next((token for token in tokens if token in VERBS), "VERB")
        raise SpecError(f"{first} stands before the verb", hint=f"the verb comes first: cloudtrain {verb} {first} …")
    from .advice import about_verb

    raise SpecError(f"no verb {first!r}", hint=about_verb(first, VERBS, tokens[1:]))


def _help_of(verb: str) -> str:
    return f"how it is called: cloudtrain {verb} --help"


def _usage_error(exc: Exception, app: App, tokens: list[str], args: list[str] | None) -> Exception:
    """Return the error, with a hint, for a command line whose verb cyclopts cannot call."""
    from cyclopts import UnknownOptionError, UnusedCliTokensError

    from ..errors import SpecError
    from .advice import SCRIPT_VERBS, about_flag
    from .key_value import first_spelling

    verb = tokens[0]
    if isinstance(exc, UnknownOptionError):
        flag = str(exc.token.keyword or exc.token.value).partition("=")[0]
        flag = next((word for token in tokens if first_spelling(word := token.partition("=")[0]) == flag), flag)
        names = [name for item in app[verb].assemble_argument_collection() if item.parse for name in item.names]
        flags = [name for name in names if name.startswith("--")]
        hint = about_flag(flag, verb, flags, tokens[1:], has_args=args is not None)
        return SpecError(f"cloudtrain {verb} has no flag {flag}", hint=hint)
    if isinstance(exc, UnusedCliTokensError):
        words = [str(token) for token in exc.unused_tokens or ()]
        text, hint = f"unexpected {' '.join(map(repr, words))}", _help_of(verb)
        if verb in SCRIPT_VERBS and args is None:
            before = [token for token in tokens if token not in words]
            line = shlex.join(["cloudtrain", *before, "--", *words])
            hint = f"write arguments of the script after --: {line}"
        return SpecError(text, hint=hint)
    text = " ".join(str(exc).split()).rstrip(".")
    text = re.sub(r'^Command "[^"]*" parameter ', "", text)
    return SpecError(text[:1].lower() + text[1:] if text[1:2].islower() else text, hint=_help_of(verb))


def _guarded(tokens: list[str], args: list[str] | None, screen: Screen) -> int:
    """Run the verb. Every failure becomes one line on stderr and, with --json, the one object on stdout."""
    wants_json = any(t == "--json" or t.startswith("--json=") for t in tokens)
    try:
        from ..storage.errors import report_retries

        with report_retries(screen.passing):
            code = parse(tokens, args, screen)()
        return code if isinstance(code, int) else 0
    except ReaderGone:
        raise
    except KeyboardInterrupt:
        known = screen.about.get("run")
        text = f"interrupted; how the run is doing: cloudtrain status {known}" if known else screen.interrupted
        return _refuse(screen, text, EXIT_DETACHED, wants_json)
    except Exception as exc:  # noqa: BLE001 - the last resort of a command line: one line instead of a traceback
        if os.environ.get("CLOUDTRAIN_DEBUG") == "1":
            import traceback

            traceback.print_exc(file=screen.err)
        from ..errors import CloudtrainError

        if isinstance(exc, CloudtrainError):
            field = getattr(exc, "field", "")
            return _refuse(screen, str(exc), exc.exit_code, wants_json, field=field, hint=exc.hint)
        text = f"{type(exc).__name__}: {exc} (this is a bug in cloudtrain; CLOUDTRAIN_DEBUG=1 shows where)"
        return _refuse(screen, text, EXIT_BUG, wants_json)


def _refuse(screen: Screen, text: str, code: int, wants_json: bool, **words: str) -> int:
    value = screen.refusal(text, code, **words)
    if wants_json:
        screen.emit(value)
    return code
