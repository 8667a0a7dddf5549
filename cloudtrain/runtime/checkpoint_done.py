"""Find the finished checkpoints of a node's script: no process works on them, and no file of them is missing."""

from __future__ import annotations

import os
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field

from . import checkpoints
from .checkpoint_names import family
from .checkpoints import CheckpointEntry, Signature
from .timings import TIMINGS


@dataclass
class _Item:
    """State of an entry: its signature when ``done``, and when last ``seen``, ``since`` when (monotonic seconds). Unix
    seconds since it ``changed``, was last ``opened`` for writing, and is ``mixed``. ``steady``: its files that never
    change."""

    done: Signature = ()
    seen: Signature = ()
    since: float = 0.0
    changed: float = 0.0
    opened: float = 0.0
    mixed: float = 0.0
    steady: set[str] = field(default_factory=set)


class Finished:
    """Finder of finished checkpoints. ``skip`` are restored ones, ``shapes`` this node's files of them by `family`."""

    def __init__(self, *, skip: Mapping[str, Signature], shapes: Mapping[str, Counter[str]]) -> None:
        self._items: defaultdict[str, _Item] = defaultdict(_Item)
        self._shapes = dict(shapes)
        self.slept = 0.0  # seconds of the last look that were spent asleep
        for name, signature in skip.items():
            self._items[name].done = signature

    def is_done(self, entry: CheckpointEntry) -> bool:
        """Return whether it is as `done` or `skip` had it, or a rest of that, because it is being removed."""
        done = self._items[entry.name].done if entry.name in self._items else ()
        return done == entry.signature or set(entry.signature) < set(done)

    def done(self, entry: CheckpointEntry) -> None:
        """Note that the entry is in ``live/``."""
        item = self._items[entry.name]
        item.steady = {file[0] for file in set(entry.signature) & set(item.done)}
        item.done, item.changed, item.mixed = entry.signature, 0.0, 0.0
        self._shapes[family(entry.name)] = entry.shape

    def forget(self, names: Set[str]) -> None:
        """Drop the state of all other entries: they are gone."""
        for name in self._items.keys() - names:
            del self._items[name]

    def drop(self, entry: CheckpointEntry) -> None:
        """Count an entry as done that no node will finish."""
        self._items[entry.name].done = entry.signature

    def look(self, entries: Iterable[CheckpointEntry]) -> list[CheckpointEntry]:
        """Return the finished entries not yet done. Call it a few times a second: it remembers open files."""
        fresh = [entry for entry in entries if not self.is_done(entry)]
        busy = checkpoints.open_for_writing(fresh) if fresh else set()
        now = time.time()
        found: list[CheckpointEntry] = []
        restless: list[CheckpointEntry] = []
        for entry in fresh:
            item = self._items[entry.name]
            item.changed = item.changed or now
            item.opened = now if entry.name in busy else item.opened
            if item.seen != entry.signature:
                item.since = time.monotonic()
            item.seen = entry.signature
            still = self._still(entry, item, now)
            if entry.name not in busy and (still or self.restless(entry)) and self._whole(entry, item, now):
                (found if still else restless).append(entry)
        self.slept = (TIMINGS.breath if os.path.isdir("/proc/self/fd") else TIMINGS.breath_unseen) if restless else 0.0
        return found + _holding_still(restless, self.slept)

    def restless(self, entry: CheckpointEntry) -> bool:
        """Return whether it is a file that is written again and again, so long that it is taken between two writes."""
        changed = self._items[entry.name].changed if entry.name in self._items else 0.0
        return entry.single and bool(changed) and time.time() - changed >= TIMINGS.restless

    def _still(self, entry: CheckpointEntry, item: _Item, now: float) -> bool:
        """Return whether no process works on it: a writer may also wait, with a file open.

        The files' own times may be older than their coming (``copytree``), or lie in the future (a server's clock).
        """
        unchanged = time.monotonic() - item.since >= TIMINGS.quiet
        return unchanged and (entry.newest > now or now - max(entry.newest, item.opened) >= TIMINGS.quiet)

    def _whole(self, entry: CheckpointEntry, item: _Item, now: float) -> bool:
        """Return whether it has all files of the one before: some scripts pause for long between two files.

        If it is written over the one before, a file that has not changed yet is missing, unless it never changes.
        """
        lacks = self._shapes.get(family(entry.name), Counter()) - entry.shape
        if lacks and now - entry.newest < TIMINGS.forerunner:
            return False
        before = {file[0]: file for file in item.done}
        same = [before[f[0]] == f for f in entry.signature if f[0] in before and f[0] not in item.steady]
        if all(same) or not any(same):
            item.mixed = 0.0
            return True
        item.mixed = item.mixed or now
        return now - item.mixed >= TIMINGS.mixed


def _holding_still(entries: list[CheckpointEntry], seconds: float) -> list[CheckpointEntry]:
    """Return the entries unchanged and closed after ``seconds``: other looks may be further apart than writes."""
    if not entries:
        return []
    time.sleep(seconds)
    same = [entry for entry in entries if entry.again().signature == entry.signature]
    busy = checkpoints.open_for_writing(same)
    return [entry for entry in same if entry.name not in busy]
