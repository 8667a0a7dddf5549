"""The layout of the help: groups of verbs and flags, an example for each verb."""

from __future__ import annotations

from cyclopts import Group

__all__ = ["CLIENT", "EXAMPLES", "EXIT_CODES_URL", "GROUP", "OPTIONS", "OTHER", "VERB_GROUP", "epilogue"]

EXIT_CODES_URL = "docs/exit-codes.md"
_VERBS = {
    "Run": ("submit", "plan", "rehearse", "wait", "pull", "cancel"),
    "Look": ("status", "logs", "watch", "report", "list"),
    "Check": ("init", "doctor", "gpus", "config", "schema", "completion"),
    "Tidy": ("reconcile", "gc"),
}
_GROUPS = {name: Group(name, sort_key=number) for number, name in enumerate(_VERBS)}
#: Verb -> its group in ``cloudtrain --help``.
VERB_GROUP = {verb: _GROUPS[name] for name, verbs in _VERBS.items() for verb in verbs}
#: Groups of the flags of a job, in the order of the help.
GROUP = {
    name: Group(name, sort_key=number)
    for number, name in enumerate(("Job", "Machines", "Data", "Limits", "Resume"), start=1)
}
CLIENT = Group("Client", sort_key=9)
"""Flags of a verb that describes a job, without the fields of the job."""
OPTIONS = Group("Options", sort_key=9)
"""Flags of every other verb."""
OTHER = Group("Other", sort_key=99)
"""Entries of ``cloudtrain --help`` that are not verbs."""
EXAMPLES = {
    "submit": "cloudtrain submit train.py --nodes 2 --gpu H100:8 --input train=./data -- --epochs 3",
    "plan": "cloudtrain plan train.py --nodes 2 --gpu H100:8",
    "rehearse": "cloudtrain rehearse train.py --profile prod --nodes 2 --preempt node=1,after=30s",
    "status": "cloudtrain status last",
    "logs": "cloudtrain logs -f last",
    "watch": "cloudtrain watch last",
    "report": "cloudtrain report run-1 run-2 -o reports",
    "wait": "cloudtrain wait run-1 --wait-timeout 2h",
    "pull": "cloudtrain pull run-1 results --what checkpoints:latest,artifacts",
    "cancel": "cloudtrain cancel run-1 run-2 --wait",
    "reconcile": "cloudtrain reconcile --store s3://bucket/runs",
    "list": "cloudtrain list --tag team=vision --columns hp.lr,loss,cost",
    "init": "cloudtrain init",
    "gpus": "cloudtrain gpus H100:8",
    "gc": "cloudtrain gc --older-than 30d --delete",
    "doctor": "cloudtrain doctor --job --nodes 2",
    "config": "cloudtrain config store",
    "schema": "cloudtrain schema job",
    "completion": "cloudtrain completion bash > ~/.local/share/bash-completion/completions/cloudtrain",
}


def epilogue(verb: str) -> str:
    """Return the text at the end of a verb's help."""
    return f"Example: {EXAMPLES[verb]}\n\nExit codes: {EXIT_CODES_URL}"
