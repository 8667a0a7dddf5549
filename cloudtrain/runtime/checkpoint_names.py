"""Names of checkpoints and of the files in them: the step, the version, and which entries a training can resume from.

Both halves use these rules: the node that commits a checkpoint, and the client that looks for the newest one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath

__all__ = ["METADATA", "family", "newer_than_metadata", "step_of", "training_states", "unversioned"]

_BESIDE = frozenset(
    [
        ".json",
        ".jsonl",
        ".txt",
        ".md",
        ".rst",
        ".yaml",
        ".yml",
        ".toml",
        ".ini",
        ".cfg",
        ".csv",
        ".tsv",
        ".log",
        ".py",
        ".sh",
        ".html",
        ".png",
        ".jpg",
        ".jpeg",
        ".gif",
        ".svg",
        ".pdf",
        ".mp4",
        ".wav",
    ]
)
"""Suffixes of what scripts write beside their checkpoints: settings, logs, pictures, programs."""
_STEP = re.compile(r"(?:step|iter|iteration|checkpoint|ckpt)[-_=]*(\d+)", re.IGNORECASE)
_VERSION = re.compile(r"[-_.]?(?<![a-z0-9])v\d+", re.IGNORECASE)
_NO_STEP = re.compile(r"(?<![a-z0-9])v\d+|epochs?[-_=]*\d+", re.IGNORECASE)
METADATA = ".metadata"
"""What ``torch.distributed.checkpoint`` writes last."""


def newer_than_metadata(times: Mapping[str, float]) -> str:
    """The file of a checkpoint, of paths and when each changed, that was written after its `METADATA`; else empty.

    There is one while a checkpoint is written over: the old ``.metadata`` stays until the new one comes.
    """
    last = max(times, key=lambda path: times[path])
    return last if times[last] > times[METADATA] else ""


def family(name: str) -> str:
    """``name`` with its numbers left out: that of every checkpoint, or file, that a script writes in the same place."""
    return re.sub(r"\d+", "#", name)


def unversioned(name: str) -> str:
    """``name`` with its version left out: ``last.ckpt`` of ``last-v1.ckpt``, which is written beside an older one."""
    return _VERSION.sub("", name)


def step_of(name: str) -> int | None:
    """The step that a checkpoint's name tells: the number after step, iter or checkpoint, else the last one.

    That of an epoch is none, nor is a version (``last-v1.ckpt``). Of ``RUN/NAME`` only ``NAME`` counts.
    """
    name = name.rpartition("/")[2]
    found = _STEP.findall(name) or re.findall(r"\d+", _NO_STEP.sub("", name))
    return int(found[-1]) if found else None


def training_states(entries: Mapping[str, tuple[str, Sequence[str]]]) -> set[str]:
    """Which of ``entries`` (key to name, and paths below it: one empty path for a file) a training can go on from.

    Trainers leave more in the folder of their checkpoints: HF's has the final model and the settings beside
    ``checkpoint-500/``, DeepSpeed's a script. So, of the first of these kinds that there is: numbered folders, and
    other folders that share a file with them (``last.ckpt/``); numbered files, and others of the same suffix
    (``last.ckpt``); whatever is no text, log or picture; everything.
    """
    states = {key: item for key, item in entries.items() if not all(map(_beside, _files_of(*item)))} or dict(entries)
    folders = {key for key, (_, paths) in states.items() if list(paths) != [""]}
    files = states.keys() - folders
    if numbered := {key for key in folders if re.search(r"\d", states[key][0])}:
        known = {family(path) for key in numbered for path in states[key][1] if not _beside(path)}
        return numbered | {key for key in folders if known & {family(path) for path in states[key][1]}}
    if numbered := {key for key in files if re.search(r"\d", unversioned(states[key][0]))}:
        suffixes = {PurePosixPath(states[key][0]).suffix for key in numbered}
        return {key for key in files if PurePosixPath(states[key][0]).suffix in suffixes}
    return set(states)


def _files_of(name: str, paths: Sequence[str]) -> list[str]:
    return [path or name for path in paths]


def _beside(path: str) -> bool:
    return PurePosixPath(path).suffix.lower() in _BESIDE or "tfevents" in path
