"""Advice for a wrong command line: the verb or flag that it most likely means."""

from __future__ import annotations

import difflib
import itertools
import shlex
from collections.abc import Iterable, Sequence

from ..settings.settings import is_setting
from . import SCRIPT_VERBS

_MEANT = {
    "cancel": "stop kill abort terminate interrupt down",
    "submit": "run launch start train create fit",
    "sweep": "tune search hpo optimize hyperparameters",
    "stage": "upload push put import",
    "gc": "rm delete remove clean cleanup prune purge del",
    "pull": "download get fetch copy cp sync",
    "logs": "tail log output follow stream",
    "status": "describe show info inspect state",
    "list": "runs jobs history queue ll",
    "plan": "dryrun dry-run preview diff validate",
    "gpus": "gpu machines instances prices catalog accelerators",
    "doctor": "check diagnose test verify",
    "config": "settings configure env profile",
    "watch": "top monitor live attach",
    "shell": "ssh exec bash",
    "report": "html summary",
    "wait": "join block",
    "rehearse": "simulate emulate drill",
    "reconcile": "retry resubmit",
}
_RESUME = "to start a new run from its newest checkpoint: cloudtrain submit SCRIPT --resume-from RUN"
HINTS = {
    **{word: f"did you mean: cloudtrain {verb}" for verb, words in _MEANT.items() for word in words.split()},
    **dict.fromkeys(("resume", "continue", "restart"), _RESUME),
    **dict.fromkeys(("login", "auth"), "did you mean: cloudtrain doctor"),
    "version": "did you mean: cloudtrain --version",
}
"""Word for a verb in other tools -> the hint."""


def about_verb(word: str, verbs: Iterable[str], rest: Sequence[str]) -> str:
    """Return the hint for ``word``, which is no verb; ``rest`` follows it on the command line."""
    if word.endswith((".py", ".sh", ".toml", ".json")):
        return f"to send it, run: cloudtrain submit {joined([word, *rest])}"
    if found := HINTS.get(word.lower()):
        return found
    if near := similar(word.lower(), verbs):
        return f"did you mean: cloudtrain {near}"
    return "to list all verbs, run: cloudtrain --help"


def joined(words: Sequence[str]) -> str:
    """Return ``words`` as a shell reads them, up to the first flag into which a shell may have put a secret."""
    known = [*itertools.takewhile(lambda word: not word.startswith(("--secret", "--webhook-header")), words)]
    return shlex.join(known) + " …" * (len(known) < len(words))


def about_flag(flag: str, verb: str, names: Iterable[str], given: Sequence[str], *, has_args: bool) -> str:
    """Return the hint for ``flag``, which ``verb`` does not have.

    ``names`` are the flags that it has, ``given`` the words after the verb. ``has_args``: the command line has a
    ``--``.
    """
    if flag in ("--dry-run", "--dryrun") and verb == "submit":
        words = [word for word in given if word.partition("=")[0] != flag]
        return f"to see the plan, run: {joined(['cloudtrain', 'plan', *words])}"
    near, setting = similar(flag, names := tuple(names)), flag.lstrip("-").replace("-", "_")
    parts = [f"use {near}"] if near else []
    if "--set" in names and is_setting(setting):
        parts = [f"set the setting of this name: --set {setting}=VALUE"]
    if verb in SCRIPT_VERBS and not has_args and (not near or _ratio(flag, near) < SURE):
        at = next((i for i, word in enumerate(given) if word.partition("=")[0] == flag), len(given))
        words = ["cloudtrain", verb, *given[:at], "--", *given[at:]]
        parts.append(f"write arguments of the script after --: {joined(words)}")
    return "; or ".join(parts) or f"to list its flags, run: cloudtrain {verb} --help"


SURE = 0.8
"""Likeness of two words, 0 to 1, from which one counts as a slip of the other."""
LIKE = 0.65
"""Likeness from which a word is worth a hint."""


def similar(word: str, choices: Iterable[str]) -> str:
    """Return the choice that is most like ``word``, or the empty string if none is."""
    best = max(choices, key=lambda choice: _ratio(word, choice), default="")
    return best if best and _ratio(word, best) >= LIKE else ""


def _ratio(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one.lstrip("-"), other.lstrip("-")).ratio()
