"""Commit checkpoints on node 0: ask the nodes for their parts, let the holders copy, write commit.json, remove old
ones.

A checkpoint is whole or absent, also when its shards lie on many nodes. Everything here runs in the mirror's thread.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import StorageError
from . import checkpoints
from .archive import Archive
from .checkpoint_model import Checkpoint, companions, resumable
from .checkpoint_names import family, rank_of
from .timings import TIMINGS

MOST_ROUNDS = 16  # checkpoints that are worked on at once: with many more, no answer comes in `Timings.hold_answer`
VERSIONS = 2  # versions kept of a checkpoint that the script writes again under its name: a resume may need the older
RETAIN_SHARE = 10  # after a retention that took a second, open rounds wait so many seconds for the next one
REMEMBERED = 50  # removed checkpoints that each commit removes again: a platform's sync may bring them back

Message = dict[str, Any]
Aside = Callable[[Callable[[], Any], Callable[[Any], None]], None]


@dataclass
class _Round:
    """The work on one checkpoint: asking, then copying."""

    name: str
    since: float
    number: int = 0
    phase: str = "idle"
    retry: float = 0.0
    failed: int = 0
    seq: int = 0
    place: str | None = None
    saved: float = 0.0
    seen: set[int] = field(default_factory=set)
    answers: dict[int, Message] = field(default_factory=dict)
    waiting: set[int] = field(default_factory=set)
    passed: dict[int, float] = field(default_factory=dict)
    """Nodes whose part was copied while another node's changed, with that part's time of saving: it is old now."""


class Commits:
    """The commits of a run. ``send``, ``peers`` and ``say`` are those of `Mirror`.

    ``keep`` checkpoints stay (0: all). The targets of pointers stay in addition to the newest. ``damaged`` are the
    folders that look complete and are not. Checkpoints that stay, and that a restart does not need, move to
    ``archive``. With ``temporary`` the platform's agent copies all files to the store, except those whose names end so;
    its own files end in ``marks``. Then a checkpoint counts, and older ones go, only after `stored` was called for all
    of its files. ``aside(work, then)`` calls ``work()`` in another thread, then ``then`` in this one with the result,
    None if it failed.
    """

    def __init__(
        self,
        *,
        nodes: int,
        attempt: str,
        live: Path,
        keep: int,
        damaged: Sequence[Path],
        send: Callable[[int, Message], None],
        peers: Callable[[], set[int]],
        say: Callable[[str], None],
        complain: Callable[[str], None],
        temporary: str,
        marks: tuple[str, ...],
        archive: Archive | None,
        aside: Aside,
    ) -> None:
        self._marks, self._temporary, self._archive, self._aside = marks, temporary, archive, aside
        self._archived: dict[str, Checkpoint] = {}  # by key: checkpoints in the archive that are no longer in ``live``
        self._archiving: set[str] = set()
        self._unstored: dict[str, tuple[Checkpoint, set[int]]] = {}
        """By folder: complete checkpoints, and the nodes whose files are not in the store yet."""
        self._reported = False
        self._ranks: dict[str, set[str]] = {}  # by family: ranks in the names of checkpoints
        self._nodes, self._attempt, self._root, self._keep = set(range(nodes)), attempt, live / "checkpoints", keep
        self._send, self._peers, self._say, self._complain = send, peers, say, complain
        self._damaged = set(damaged)
        self._rounds: dict[str, _Round] = {}
        self._numbers, self._seq = 0, 0
        self._holders: dict[str, set[int]] = {}
        self._most: dict[tuple[str, object], int] = {}  # by family and number of nodes: most writers of a checkpoint
        self._unused: set[str] = set()  # names of checkpoints of which the log says that no restart resumes from them
        self._complete: list[Checkpoint] = []
        self._taken_over = False
        """True once ``_complete`` has the checkpoints of earlier attempts: the first decision reads them."""
        self._fresh: list[Checkpoint] = []  # complete checkpoints since the last retention
        self._retain_due = 0.0
        self._removed: list[str] = []
        self._pointers: dict[int, set[str]] = {}
        self.finishing: str | None = None  # the end of node 0's own script: ``clean`` or ``failed``; None while it runs

    @property
    def open(self) -> bool:
        """Return whether some checkpoint is being worked on, or is not in the store yet."""
        return bool(self._rounds or self._unstored or self._fresh)

    def finished(self, name: str, node: int) -> None:
        """Note that a node's part is finished."""
        self._rounds.setdefault(name, _Round(name, time.monotonic())).seen.add(node)

    def pointers(self, node: int, targets: set[str]) -> None:
        """Note the names that the pointers of a node's script hold."""
        self._pointers[node] = targets

    def advance(self) -> None:
        """Begin the rounds that are due, and begin again those in which a node went away."""
        self._retain()
        now = time.monotonic()
        alive = self._peers()
        room = MOST_ROUNDS - sum(work.phase != "idle" for work in self._rounds.values())
        for work in sorted(self._rounds.values(), key=lambda work: work.retry):
            if work.phase == "idle" and now >= work.retry and room > 0:
                room -= 1
                self._numbers += 1
                work.number, work.phase, work.answers, work.waiting = self._numbers, "ask", {}, set(alive)
                work.retry = now + TIMINGS.hold_answer
                self._send_all(alive, {"t": "hold?", "round": work.number, "name": work.name})
            elif (work.phase == "ask" and now >= work.retry) or (work.phase != "idle" and work.waiting - alive):
                work.phase, work.retry = "idle", now + TIMINGS.commit_retry

    def answer(self, message: Message) -> None:
        """Take a node's answer: the part it holds, or has copied."""
        work = self._rounds.get(message["name"])
        if work is None or message["round"] != work.number:
            return
        work.answers[message["from"]] = message
        work.waiting.discard(message["from"])
        if work.waiting:
            return
        if work.phase == "ask":
            self._decide(work)
        elif work.phase == "copy":
            self._commit(work)

    def _decide(self, work: _Round) -> None:
        held = {node: a for node, a in work.answers.items() if a["state"] in ("ready", "busy", "old")}
        work.seen.update(held)
        for node, answer in held.items():
            if answer["state"] == "ready" and not answer["final"] and answer["saved"] == work.passed.get(node):
                answer["state"] = "old"
        # A part that a node has not written again may still change, or belong to this checkpoint as it is.
        fresh = {node: a for node, a in held.items() if a["state"] != "old"}
        if not fresh or time.monotonic() - work.since < TIMINGS.holder:
            held = fresh
        growing = any(a["state"] == "busy" for a in held.values())
        sharded = any(a["sharded"] for a in held.values())
        headless = sharded and not any(a["metadata"] for a in held.values())
        single = self.finishing == "failed" and all(a["single"] for a in held.values())
        missing = self._missing(work, set(held), (sharded and not headless) or single)
        if not held:
            if self.finishing is None and not any(a["state"] == "old" for a in work.answers.values()):
                self._say(f"checkpoint {work.name} was removed before it could be copied")
            self._drop(work)
        elif growing or headless or missing:
            # A script that is over, or a node that is gone, will never finish its part.
            if self.finishing == "failed" or (self.finishing and headless) or missing - self._peers():
                if not growing and not headless:
                    nodes = ", ".join(map(str, sorted(missing)))
                    self._say(f"checkpoint {work.name} does not count: it may lack files of node {nodes}")
                self._drop(work)
            else:
                work.phase, work.retry = "idle", time.monotonic() + 0.5
        else:
            self._seq += 1
            work.seq, work.phase, work.waiting, work.answers = self._seq, "copy", set(held), {}
            work.place = next((a["place"] for a in held.values() if a["place"]), None)
            work.saved = max(a["when"] for a in held.values())
            folder = self._folder(work)
            self._send_all(held, {"t": "copy", "round": work.number, "name": work.name, "folder": folder})

    def _missing(self, work: _Round, held: set[int], headed: bool) -> set[int]:
        """Return the nodes whose part may still be on its way.

        These held a part of the checkpoint before, or once of this one. Any node may hold a part of a script's first:
        live ones get a short wait (none if it is ``headed``: a DCP checkpoint with its ``.metadata``, or one file as a
        script has failed), lost ones an endless one. A node whose script ended well without writing a part owes none.
        """
        if not self._taken_over:
            self._take_over()
        age = time.monotonic() - work.since
        holders = self._holders.get(family(work.name))
        owed = self._nodes if holders is None else holders | work.seen
        patience = TIMINGS.first_holder if holders is None else TIMINGS.holder
        done = {node for node, answer in work.answers.items() if answer["state"] == "over"}
        if (headed and holders is None) or age > patience:
            done |= set(work.answers) - work.seen
        return owed - held - done

    def _drop(self, work: _Round) -> None:
        """Give up a checkpoint that the script has deleted, or will never finish."""
        del self._rounds[work.name]
        self._send_all(self._peers(), {"t": "dropped", "name": work.name})

    def _send_all(self, nodes: Iterable[int], message: Message) -> None:
        for node in sorted(nodes):
            self._send(node, message)

    def _folder(self, work: _Round) -> str:
        return f"{self._attempt}-{work.seq}"

    def _commit(self, work: _Round) -> None:
        if any(a["files"] is None for a in work.answers.values()):
            if any(a["rewritten"] for a in work.answers.values()):
                held = {node: a for node, a in work.answers.items() if "saved" in a and not a["rewritten"]}
                work.passed.update({node: answer["saved"] for node, answer in held.items()})
            self._again(work)
            return
        folder = self._root / work.name / self._folder(work)
        commit = {
            "protocol": 1,
            "name": work.name,
            "place": work.place,
            "attempt": self._attempt,
            "seq": work.seq,
            "nodes": len(work.answers),
            "run_nodes": len(self._nodes),
            "saved": work.saved,
            "time": time.time(),
            "files": {key: value for a in work.answers.values() for key, value in a["files"].items()},
        }
        text = json.dumps(commit, sort_keys=True).encode()
        try:
            checkpoints.write_whole(folder / checkpoints.COMMIT, text, temporary=self._temporary)
        except OSError as exc:
            self._complain(f"cannot commit checkpoint {work.name}: {exc.strerror}")
            self._again(work)
            return
        whole = Checkpoint.of(commit, str(folder))
        coming = [item for item, _ in self._unstored.values()]
        self._learn(whole, resumable([*self._complete, *self._fresh, *coming, whole]), set(work.answers))
        self._check_ranks(work.name)
        del self._rounds[work.name]
        self._send_all(self._peers(), {"t": "committed", "name": work.name, "folder": self._key(folder)})
        if self._temporary:
            self._unstored[self._key(folder)] = whole, {0, *work.answers}
        else:
            self._fresh.append(whole)
            self._retain()

    def _learn(self, whole: Checkpoint, states: list[Checkpoint], holders: set[int]) -> None:
        """Note the holders of a checkpoint's family, unless it is a part, or one node's whole model between sharded
        ones; the ``states`` are all to resume from."""
        kind, writers = family(whole.name), len(whole.writers)
        like = kind, whole.commit.get("run_nodes")
        most = self._most[like] = max(self._most.get(like, 0), writers)
        is_state = whole in states or (resumable([whole]) and kind not in {family(item.name) for item in states})
        if is_state and writers == most:
            self._holders[kind] = holders
        if whole not in states and whole.below != [""] and whole.name not in self._unused:
            self._unused.add(whole.name)
            self._say(f"checkpoint {whole.name} lacks files that others have, so a restart does not resume from it")

    def _check_ranks(self, name: str) -> None:
        """Warn once if ranks write checkpoints of their own: a resume restores one, and ``keep`` counts each."""
        ranks, rank = self._ranks.setdefault(family(name), set()), rank_of(name)
        if rank and rank not in ranks:
            ranks.add(rank)
            if len(ranks) == 2:
                self._say(f"{name} counts as a whole checkpoint: write the files of all ranks into one folder")

    def stored(self, key: str, node: int, *, there: bool = True) -> None:
        """Note that a node's files of the checkpoint ``key`` are in the store or, if not ``there``, are given up.

        A checkpoint that is given up takes no older one's place.
        """
        if not there:
            self._unstored.pop(key, None)
        if key not in self._unstored:
            return
        whole, missing = self._unstored[key]
        missing.discard(node)
        if missing:
            return
        del self._unstored[key]
        if not self._reported:
            self._reported = True
            later = time.time() - whole.committed
            self._say(f"checkpoint {whole.name} is in the store, {later:.0f} s after its commit")
        self._fresh.append(whole)
        self._retain()

    def _again(self, work: _Round) -> None:
        pause = min(TIMINGS.commit_retry * 2**work.failed, TIMINGS.commit_retry_most)
        work.phase, work.retry, work.failed = "idle", time.monotonic() + pause, work.failed + 1

    # ------------------------------------------------------------------------------------------------------ retention

    def _retain(self) -> None:
        """Tell all nodes which checkpoints to remove: those not kept, and unfinished ones of earlier attempts.

        While rounds are open, calls are `RETAIN_SHARE` times as far apart as the last one took. commit.json goes before
        the files: a checkpoint that is losing files must not look complete.
        """
        began = time.monotonic()
        if not self._fresh or (self._rounds and began < self._retain_due):
            return
        fresh, self._fresh = self._fresh, []
        newest, named = max(fresh, key=lambda item: item.seq), dict[str, list[Checkpoint]]()
        for item in fresh:
            named.setdefault(item.name, []).append(item)
        self._complete = sorted([*self._complete, *fresh], key=lambda item: item.order)
        kept = self._kept(self._complete)
        kept = [item for item in kept if not any(_continued(item, after) for after in named.get(item.name, ()))]
        later = [c for c in self._complete if c.attempt == self._attempt and c.seq > newest.seq]
        if not later and newest not in kept:  # the script's clock has been set back
            kept.append(newest)
        stays = set(kept)
        for item in [item for item in self._complete if item not in stays]:
            try:
                (item.folder / checkpoints.COMMIT).unlink(missing_ok=True)
            except OSError:
                kept.append(item)  # still whole; goes with the next commit
            else:
                self._removed.append(self._key(item.folder))
                self._drop_archived(item)
        self._complete = sorted(kept, key=lambda item: item.order)
        self._tell_removed()
        self._archive_others()
        now = time.monotonic()
        self._retain_due = now + RETAIN_SHARE * (now - began)

    def _tell_removed(self) -> None:
        if self._removed:
            self._send_all(self._peers(), {"t": "remove", "folders": self._removed, "nodes": len(self._nodes)})
        self._removed = self._removed[-REMEMBERED:]

    def _archive_others(self) -> None:
        """Move to the archive the checkpoints in the store that no restart needs while the newest is whole."""
        if self._archive is None:
            return
        states = resumable(self._complete)
        if not states:
            return
        newest, named = states[-1], set[str]().union(*self._pointers.values())
        needed = [newest, *companions(newest, self._complete, states, named)]
        for older in reversed(states):  # the remaining ones alone must show which is the newest state
            stay = [item for item in self._complete if item not in states or item in needed]
            if resumable(stay)[-1:] == [newest]:
                break
            needed += [older] if older not in needed else []
        for item in states:
            key = self._key(item.folder)
            if item not in needed and key not in self._archived and key not in self._archiving:
                self._archiving.add(key)
                self._aside(partial(self._add, self._archive, key, item), partial(self._archived_now, key, item))

    def _add(self, archive: Archive, key: str, item: Checkpoint) -> bool:
        """Archive a checkpoint, in another thread, unless the run drops it before or meanwhile."""
        try:
            return item in self._complete and archive.add(key, item)
        except StorageError:
            if item in self._complete:
                raise
            return False

    def _archived_now(self, key: str, item: Checkpoint, done: bool | None) -> None:
        """Let all nodes remove from ``live`` a checkpoint that is in the archive."""
        self._archiving.discard(key)
        if item not in self._complete:
            self._drop_archived(item)
        elif done:
            self._archived[key] = item
            self._removed.append(key)
            self._tell_removed()

    def _drop_archived(self, item: Checkpoint) -> None:
        """Remove a checkpoint that is not kept from the archive, also half of one, as a killed node leaves it."""
        key = self._key(item.folder)
        if self._archive is not None and key not in self._archiving:
            self._archived.pop(key, None)
            self._aside(partial(self._archive.drop, key, item), lambda _: None)

    def _take_over(self) -> None:
        """Read the earlier attempts' checkpoints: complete ones, half or damaged ones (to go), and their writers.

        Raises `StorageError` and `OSError` before anything is changed.
        """
        found = checkpoints.complete(self._root)
        pointers = checkpoints.read_pointers(self._root.parent)
        archived = self._archive.found() if self._archive is not None else []
        for node, named in pointers.items():
            self._pointers.setdefault(node, {pointer.target for pointer in named.values()})
        self._complete, self._taken_over = [item for item in found if item.folder not in self._damaged], True
        states = resumable(found)
        for item in found:
            if item.folder in self._damaged:
                checkpoints.remove_path(item.folder / checkpoints.COMMIT)
            parts = {key.partition("/")[0].removeprefix("node-") for key in item.files}
            self._learn(item, states, {int(part) for part in parts if part.isdigit()} & self._nodes)
        self._removed = [self._key(folder) for folder in checkpoints.uncommitted(self._root, marks=self._marks)]
        here = {self._key(item.folder) for item in self._complete}
        for item in archived:
            key = self._key(item.folder)
            if self._root.parent / "archive" / key in self._damaged:
                self._drop_archived(item)
            elif key not in here:
                self._archived[key] = item
        self._complete = sorted([*self._complete, *self._archived.values()], key=lambda item: item.order)

    def _key(self, folder: Path) -> str:
        return folder.relative_to(self._root).as_posix()

    def _kept(self, found: list[Checkpoint]) -> list[Checkpoint]:
        """Return the complete checkpoints that stay; ``found`` is oldest first. Only training states are counted."""
        named = set().union(*self._pointers.values())
        counted = resumable(found) if self._keep else []
        states, newest = set(counted), set(counted[-self._keep :])
        kinds = {family(item.name) for item in counted}
        kept: list[Checkpoint] = []
        versions: dict[str, int] = {}
        for item in reversed(found):
            versions[item.name] = versions.get(item.name, 0) + 1
            if item in states:
                stays = item in newest or (item.name in named and versions[item.name] == 1)
            else:  # a part goes once a whole one is newer
                used = item.name in named or family(item.name) not in kinds
                stays = versions[item.name] <= VERSIONS and (used or newest.isdisjoint(kept))
            if stays:
                kept.append(item)
        return kept


def _continued(item: Checkpoint, newest: Checkpoint) -> bool:
    """Return whether ``item`` is a half-written ``newest``, which has all of its files unchanged, and more."""
    before, after = item.files, newest.files
    same = item.name == newest.name and item.attempt == newest.attempt
    return same and len(before) < len(after) and all(after.get(key) == value for key, value in before.items())


def remove_parts(root: Path, folders: Iterable[str], *, node: int, nodes: int, own: bool = False) -> None:
    """Remove the part of node ``node`` of each of ``folders``.

    Node 0 also removes the shared files, and the parts of nodes that this attempt of ``nodes`` does not have.

    With ``own`` the folder is this node's own copy, restored by a platform's agent. Then all of it goes: the agent
    passes the removals on, and the other nodes remove the same files.
    """
    for folder in (root / name for name in folders):
        if own:
            shutil.rmtree(folder, ignore_errors=True)
        parts = [folder / f"node-{node}"]
        if node == 0:
            checkpoints.remove_path(folder / checkpoints.COMMIT)
            others = ((part, part.name.removeprefix("node-")) for part in folder.glob("node-*"))
            parts += [part for part, number in others if number.isdigit() and int(number) >= nodes]
        for part in parts:
            shutil.rmtree(part, ignore_errors=True)
        for empty in (folder, folder.parent):
            try:
                empty.rmdir()
            except FileNotFoundError:
                continue
            except OSError:
                break  # another node's part is there still
