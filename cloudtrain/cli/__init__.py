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
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from .output import ReaderGone, Screen, plain

if TYPE_CHECKING:
    from cyclopts import App

__all__ = ["main", "make_app", "parse"]


class Verb(NamedTuple):
    """A verb: its group in the help, its module and function, its usage, its help text, and an example of its words."""

    group: Literal["Run", "Look", "Check", "Tidy"]
    where: str
    usage: str
    help: str
    example: str


VERBS: dict[str, Verb] = {
    "submit": Verb("Run", "submit:submit", "SCRIPT|JOB [OPTIONS] [-- SCRIPT ARGS]",
        "Send a job, follow its logs and exit by its outcome.",
        "submit train.py --nodes 2 --gpu H100:8 --input train=./data -- --epochs 3"),
    "plan": Verb("Run", "submit:plan", "SCRIPT|JOB [OPTIONS] [-- SCRIPT ARGS]",
        "Show exactly what submit would send; no network.",
        "plan train.py --nodes 2 --gpu H100:8"),
    "rehearse": Verb("Run", "submit:rehearse", "SCRIPT|JOB [OPTIONS] [-- SCRIPT ARGS]",
        "Run a job here as another platform would start it, with drills.",
        "rehearse train.py --profile prod --nodes 2 --preempt node=1,after=30s"),
    "sweep": Verb("Run", "sweep:sweep", "FILE|SWEEP [OPTIONS]",
        "Search for the best hyperparameters under one budget.",
        "sweep tune.toml --trials 12 --parallel 2"),
    "stage": Verb("Run", "stage:stage", "URL [OPTIONS]",
        "Put data into the store once, for many runs; print its URL for --input.",
        "stage hf://datasets/ORG/NAME@v1/train --store s3://bucket/runs"),
    "status": Verb("Look", "runs:status", "[RUN...] [OPTIONS]",
        "Show the state of a run.",
        "status last"),
    "logs": Verb("Look", "runs:logs", "RUN [OPTIONS]",
        "Print a run's log lines; -f follows them.",
        "logs -f last"),
    "watch": Verb("Look", "report:watch", "RUN [OPTIONS]",
        "Watch a run live: state, nodes, loss, last lines.",
        "watch last"),
    "report": Verb("Look", "report:report", "RUN... [OPTIONS]",
        "Write an HTML page about a run. It opens offline.",
        "report run-1 run-2 -o reports"),
    "shell": Verb("Look", "shell:shell", "RUN [OPTIONS] [-- COMMAND]",
        "Open a shell on a node of a running job, or run a command there.",
        "shell last --node 1 -- nvidia-smi"),
    "tensorboard": Verb("Look", "shell:tensorboard", "RUN [DIR] [OPTIONS]",
        "Pull a run's artifacts and show them in TensorBoard, also while it runs.",
        "tensorboard last"),
    "wait": Verb("Run", "runs:wait", "RUN [OPTIONS]",
        "Wait for a run and exit by its outcome.",
        "wait run-1 --wait-timeout 2h"),
    "pull": Verb("Run", "runs:pull", "RUN [DIR] [OPTIONS]",
        "Copy a run's results to this machine.",
        "pull run-1 results --what checkpoints:latest,artifacts"),
    "cancel": Verb("Run", "runs:cancel", "RUN... [OPTIONS]",
        "Stop a run.",
        "cancel run-1 run-2 --wait"),
    "reconcile": Verb("Tidy", "runs:reconcile", "[RUN] [OPTIONS]",
        "Do once what a waiting client does: retry, act on max_wait, close.",
        "reconcile --store s3://bucket/runs"),
    "list": Verb("Look", "runs:list_runs", "[SWEEP] [OPTIONS]",
        "List the runs of a store, or the trials of a sweep.",
        "list --tag team=vision --columns hp.lr,loss,cost"),
    "gpus": Verb("Check", "gpus:gpus", "[PATTERN] [OPTIONS]",
        "Find machines with GPUs, and what they cost.",
        "gpus H100:8"),
    "cost": Verb("Look", "cost:cost", "[OPTIONS]",
        "Sum what runs have cost.",
        "cost --since 30d --by team"),
    "budget": Verb("Tidy", "cost:budget", "NAME [OPTIONS]",
        "Show or limit what all runs of a store may cost.",
        "budget team --max-cost 500"),
    "gc": Verb("Tidy", "runs:gc", "[OPTIONS]",
        "Find data that no run of a store needs, and remove it.",
        "gc --older-than 30d --delete"),
    "init": Verb("Check", "init:init", "[SCRIPT] [OPTIONS]",
        "Write cloudtrain.toml, job.toml and .cloudtrainignore, and check them.",
        "init"),
    "doctor": Verb("Check", "doctor:doctor", "[SCRIPT|JOB|PROVIDER] [OPTIONS]",
        "Check if a job can be sent; --job checks every node.",
        "doctor --job --nodes 2"),
    "config": Verb("Check", "config:config", "[KEY] [OPTIONS]",
        "Show every setting and where it comes from.",
        "config store"),
    "schema": Verb("Check", "config:schema", "[NAME]",
        "Print the JSON schema of a file, or of what a verb prints.",
        "schema job"),
    "completion": Verb("Check", "config:completion", "SHELL",
        "Print a shell's completion: bash, zsh or fish.",
        "completion bash > ~/.local/share/bash-completion/completions/cloudtrain"),
}  # fmt: skip
SCRIPT_VERBS = ("submit", "plan", "rehearse")
"""Verbs that take a script, and its arguments after ``--``."""
ALSO = {"ls": "list", "ps": "list"}
"""Second names of verbs; no help shows them."""
NEWEST = "@newest"
"""Stands for ``-`` in the call of a verb: the parser takes ``-`` for a flag."""
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
        return EXIT_DETACHED if tokens[:1] in (["submit"], ["rehearse"], ["sweep"], ["wait"]) else 0


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
    from cyclopts import App, Group

    from .._version import __version__

    app = App(
        name="cloudtrain",
        help="One description of a PyTorch training job; the same run on every platform.",
        version=__version__,
        version_flags=("--version", "-V"),
        help_format="plaintext",
        help_formatter=formatter,
        end_of_options_delimiter="",
        group_commands=Group("Other", sort_key=99),
        help_epilogue="The flags of a verb: cloudtrain help VERB",
    )
    groups = {name: Group(name, sort_key=order) for order, name in enumerate(("Run", "Look", "Check", "Tidy"))}
    for order, (name, verb) in enumerate(VERBS.items()):
        app.command(
            f"{__name__}.{verb.where}",
            name=name,
            help=verb.help,
            sort_key=order,
            usage=f"Usage: cloudtrain {name} {verb.usage}",
            group=groups[verb.group],
            group_parameters=Group("Client" if name in SCRIPT_VERBS else "Options", sort_key=9),
            help_epilogue=f"Example: cloudtrain {verb.example}\n\nExit codes: docs/exit-codes.md",
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
    screen.json = bool(getattr(kwargs.get("following"), "json", kwargs.get("json")))
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
        raise SpecError(f"{first} stands before the verb", hint=f"put the verb first: cloudtrain {verb} {first} …")
    from .advice import about_verb

    raise SpecError(f"no verb {first!r}", hint=about_verb(first, VERBS, tokens[1:]))


def _help_of(verb: str) -> str:
    return f"for its usage, run: cloudtrain {verb} --help"


def _usage_error(exc: Exception, app: App, tokens: list[str], args: list[str] | None) -> Exception:
    """Return the error, with a hint, for a command line whose verb cyclopts cannot call."""
    from cyclopts import UnknownOptionError, UnusedCliTokensError

    from ..errors import SpecError
    from .advice import about_flag
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
    screen.json = any(token.partition("=")[0] == "--json" for token in tokens)  # also if the line cannot be parsed
    try:
        from ..storage.errors import report_retries

        with report_retries(screen.passing):
            call = parse(tokens, args, screen)
            if settings := sys.modules.get("cloudtrain.settings.settings"):  # the verb reads settings
                for text in settings.misspelt_variables(os.environ):
                    screen.talk(f"warning: {text}")
            code = call()
        return code if isinstance(code, int) else 0
    except ReaderGone:
        raise
    except KeyboardInterrupt:
        known = screen.about.get("run")
        hint = f"to see the state of the run, run: cloudtrain status {known}" if known else ""
        return screen.refuse("interrupted" if known else screen.interrupted, EXIT_DETACHED, hint=hint)
    except Exception as exc:  # noqa: BLE001 - the last resort of a command line: one line instead of a traceback
        if os.environ.get("CLOUDTRAIN_DEBUG") == "1":
            import traceback

            traceback.print_exc(file=screen.err)
        from ..errors import CloudtrainError

        if isinstance(exc, CloudtrainError):
            field = getattr(exc, "field", "")
            return screen.refuse(str(exc), exc.exit_code, field=field, hint=exc.hint)
        from ..provider_api.registry import installed_names

        text = f"{type(exc).__name__}: {exc}; this is a bug in cloudtrain"
        text += "".join(f" or your provider {name}" for name in sorted(installed_names()))
        return screen.refuse(text, EXIT_BUG, hint="to see the traceback, set CLOUDTRAIN_DEBUG=1")
