"""Names of checkpoints and of the files in them: the step, the version, and which entries a training can resume from.

Both halves use these rules: the node that commits a checkpoint, and the client that looks for the newest one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath

_BESIDE = re.compile(
    r"[^/]\.(jsonl?|txt|md|rst|ya?ml|toml|ini|cfg|csv|tsv|log|py|sh|html|png|jpe?g|gif|svg|pdf|mp4|wav)\Z|(?-i:tfevents)",
    re.IGNORECASE,
)
"""Other files that scripts write with their checkpoints: settings, logs, pictures, programs."""
_RANDOM = re.compile(r"(?:/|^)(?:rng|random)[-_]?state", re.IGNORECASE)
_LATER_RANK = re.compile(r"(?:rng|random)[-_]?states?[-_.]?(?:rank[-_]?)?0*[1-9]\d*\.\w+", re.IGNORECASE)
"""Random numbers of a rank above 0, as HF's Trainer and Accelerate name them."""
_STEP = re.compile(r"(?:step|iter|iteration|checkpoint|ckpt)[-_=]*(\d+)", re.IGNORECASE)
_VERSION = re.compile(r"[-_.]?(?<![a-z0-9])v\d+", re.IGNORECASE)
_DAY = r"(?:0[1-9]|1[0-2]){0}(?:0[1-9]|[12]\d|3[01])"
_TIME = r"[-_T](?:[01]\d|2[0-3]){0}[0-5]\d(?:{0}[0-5]\d)?"
_LAST = _TIME.format("") + r"(?=(?:[-_.]v\d+)?$)"
"""A time without signs in it. Only at the end of a name, as ``model-2025-06-01_1000.pt`` may be of step 1000."""
_NO_STEP = re.compile(
    r"(?<![a-z0-9])v\d+|epochs?[-_=]*\d+"
    rf"|(?<!\d)20\d\d(?:[-_.]{_DAY.format('[-_.]')}(?!\d)(?:{_TIME.format('[-_.:]')}(?!\d)|{_LAST})?"
    rf"|{_DAY.format('')}{_LAST})",
    re.IGNORECASE,
)
"""Versions, epochs and dates: ``2025-06-01_15-30``, ``20250601-153059``."""


def family(name: str) -> str:
    """Return ``name`` without its numbers: equal for all checkpoints, or files, that a script writes in one place."""
    return re.sub(r"\d+", "#", name)


def unversioned(name: str) -> str:
    """Return ``name`` without its version: ``last.ckpt`` of ``last-v1.ckpt``, which is written next to an older one."""
    return _VERSION.sub("", name)


def step_of(name: str) -> int | None:
    """Return the step in a checkpoint's name: the number after step, iter or checkpoint, else the last one.

    Epochs, versions (``last-v1.ckpt``) and dates do not count. Of ``RUN/NAME`` only ``NAME`` counts.
    """
    name = name.rpartition("/")[2]
    found = _STEP.findall(name) or re.findall(r"\d+", _NO_STEP.sub("", name))
    return int(found[-1]) if found else None


def is_earlier(name: str, other: str) -> bool:
    """Return whether ``name`` has certainly a lower step: it differs from ``other`` in its numbers alone, and names
    its step (``step-8``). Other numbers may be losses."""
    step, most = _STEP.findall(name), _STEP.findall(other)
    return family(name) == family(other) and bool(step) and int(step[-1]) < int(most[-1])


def training_states(entries: Mapping[str, tuple[str, Sequence[str]]]) -> set[str]:
    """Return the ``entries`` (key to name and paths below it; one empty path for a file) to resume a training from.

    Trainers leave more in their checkpoint folder: HF's has the final model and the settings beside
    ``checkpoint-500/``, DeepSpeed's a script. So the first of these kinds that exists counts: numbered folders, and
    other folders with all files of one of them (``last.ckpt/``, but no ``final/`` without an optimizer); numbered
    files, and others of the same suffix (``last.ckpt``); any file but text, log or picture; everything.

    A numbered folder with random numbers of later ranks alone never counts. HF's Trainer removes old checkpoints on
    node 0 alone, so another node's part may be committed without it.
    """
    entries = {key: entry for key, entry in entries.items() if not _is_rest(*entry)}
    states = {
        key: (name, paths)
        for key, (name, paths) in entries.items()
        if not all(is_beside(path or name) for path in paths)
    } or dict(entries)
    folders = {key for key, (_, paths) in states.items() if list(paths) != [""]}
    files = states.keys() - folders
    if numbered := {key for key in folders if re.search(r"\d", states[key][0])}:
        kinds = {key: {family(path) for path in states[key][1] if not is_beside(path)} for key in folders}
        whole = [kinds[key] for key in numbered if kinds[key]]
        return numbered | {key for key in folders if any(kind <= kinds[key] for kind in whole)}
    if numbered := {key for key in files if re.search(r"\d", unversioned(states[key][0]))}:
        suffixes = {PurePosixPath(states[key][0]).suffix for key in numbered}
        return {key for key in files if PurePosixPath(states[key][0]).suffix in suffixes}
    return set(states)


def _is_rest(name: str, paths: Sequence[str]) -> bool:
    """Return whether the entry is a numbered folder with random numbers of ranks above 0, and no other state."""
    states = [path for path in paths if not is_beside(path)]
    return bool(states) and all(map(_LATER_RANK.fullmatch, states)) and re.search(r"\d", name) is not None


def last_part(place: str) -> str:
    """Return the last part of a path, or two if the one above is a step: ``step-8/state``, but ``final`` of a run."""
    above, _, last = place.rpartition("/")
    step = above.rpartition("/")[2]
    return f"{step}/{last}" if _STEP.search(step) else last


def rank_of(name: str) -> str:
    """Return the number of the rank or shard in a name, ``1`` of ``step8_rank1.pt``; an empty text without one."""
    found = re.findall(r"(?:rank|shard)[-_=]?(\d+)", name, re.IGNORECASE)
    return found[-1] if found else ""


def is_random(path: str) -> bool:
    """Return whether the file has a rank's state of random numbers: ``rng_state_1.pth``, ``random_states_1.pkl``."""
    return _RANDOM.search(path) is not None


def is_beside(path: str) -> bool:
    """Return whether the file is a text, log or picture that a script writes with its checkpoints."""
    return _BESIDE.search(path) is not None
