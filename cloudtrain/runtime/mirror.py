"""The mirror: a thread of a node that copies finished files from fast scratch into ``live/``, beside training.

Every node watches its own checkpoints and announces a finished one to node 0. Node 0 lets all holders copy it and
commits it (`commits`). Threads of low priority copy the bytes: messages are answered at once even if the disk or mount
is slow. `mirror_files` copies files that grow. Each file has one writer, its node.
"""

from __future__ import annotations

import contextlib
import queue
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Set
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from . import checkpoints
from .checkpoint_done import Finished
from .checkpoint_names import family
from .checkpoints import CheckpointEntry, Pointer, Signature, Watch
from .commits import Commits, remove_parts
from .host_facts import Clock
from .mirror_files import Growing
from .mounts import describe_fault
from .outputs import GrowingOutputs, Outputs
from .timings import TIMINGS
from .uploads import Uploads

KINDS = (
    "finished", "hold?", "hold", "copy", "copied", "committed", "dropped", "pointers", "remove", "moving", "stored",
)  # fmt: skip
"""Messages of the node link that belong to the mirror."""
SCAN_SHARE = 20  # after a look at all entries that took a second, the mirror makes none for so many seconds
ENTRIES = 2  # checkpoints that a node copies at the same moment

T = TypeVar("T")
Message = dict[str, Any]


def nothing(*, over: bool) -> Message:
    """Return the answer of a node that has no part of a checkpoint; ``over``: and will never have one."""
    state = "over" if over else "none"
    return {"state": state, "single": False, "sharded": False, "metadata": False, "place": None, "saved": 0.0}


class Mirror:
    """The mirror of one node. ``send(node, message)`` reaches a node's mirror, our own too; `take` gets our messages.

    ``outputs`` are the script's files below its working folder; None keeps none of them. ``say`` prints a line.
    ``peers()`` are the live nodes, with this one. ``skip`` are the restored checkpoints, ``shapes`` this node's files
    of them, by `family`. ``links`` is a folder on the script's disk, for running copies. Metrics are written every
    ``flush_seconds``. On node 0, ``commits(complain=…, aside=…)`` makes the run's `Commits`.
    """

    def __init__(
        self,
        *,
        node: int,
        attempt: str,
        live: Path,
        watch: Watch,
        artifacts: Path,
        metrics: Path,
        send: Callable[[int, Message], None],
        peers: Callable[[], set[int]],
        say: Callable[[str], None],
        links: Path,
        usage: Path | None = None,
        outputs: Outputs | None = None,
        flush_seconds: float = 5.0,
        commits: Callable[..., Commits] | None = None,
        skip: Mapping[str, Signature] | None = None,
        shapes: Mapping[str, Counter[str]] | None = None,
        uploads: Uploads | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._uploads, self._temporary = uploads, uploads.agent.temporary if uploads is not None else ""
        self._node, self._live, self._watch, self._send, self._say = node, live, watch, send, say
        self._metrics, self._links, self._peers = metrics, links, peers
        self._inbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._finished = Finished(skip=skip or {}, shapes=shapes or {})
        self._announced: dict[str, Signature] = {}
        self._copied: dict[str, tuple[CheckpointEntry, Path]] = {}
        self._ready: dict[str, CheckpointEntry] = {}
        self._offered: dict[str, Signature] = {}
        self._pointers: dict[str, Pointer] = {}
        self._pointers_seen: dict[str, Pointer] = {}
        self._marks: dict[Path, int] = {}
        self._work = ThreadPoolExecutor(ENTRIES, thread_name_prefix="mirror", initializer=checkpoints.modest)
        self._working = 0
        self._slow = ThreadPoolExecutor(1, thread_name_prefix="archive", initializer=checkpoints.modest)
        """Thread for moves to the archive. They may take minutes, and must not delay copies."""
        self._slow_working, self._slow_until, self._usage = 0, float("inf"), usage
        name, rows = f"node-{node}", f"{attempt}-node-{node}.jsonl"
        places = {artifacts: live / "artifacts" / name, metrics: live / "metrics" / rows}
        places |= {usage: live / "usage" / rows} if usage is not None else {}
        how: dict[str, Any] = {"moved": self._moved, "complain": self._complain}
        how["temporary"] = self._temporary or ".part"
        self._growing = [Growing(places, small=metrics, small_seconds=flush_seconds, **how)]
        if outputs is not None:
            self._growing.append(GrowingOutputs(outputs, live / "outputs" / name, **how))
        slow = partial(self._aside, slow=True)
        self._commits = commits(complain=self._complain, aside=slow) if commits is not None else None
        self._finishing: str | None = None
        self._frozen = 0.0
        self._logged: set[str] = set()
        self.idle = threading.Event()
        self.last = time.monotonic()
        """Time at which bytes were last copied, here or on another node, or a checkpoint was committed."""
        self._progress_logged = self._passed_on = 0.0
        self._newest = self._stirred = 0.0
        self._clock = clock or Clock()
        self._unreadable = self._not_copied = ""
        self._thread = threading.Thread(target=self._loop, name="mirror", daemon=True)

    @property
    def trouble(self) -> str:
        """Return why a checkpoint cannot be read, or why the last one was not copied to the store; empty if neither.

        A copy of another checkpoint that succeeds does not make one readable.
        """
        return self._unreadable or self._not_copied

    def start(self) -> None:
        for growing in self._growing:
            growing.start()
        self._thread.start()
        if self._uploads is not None:
            self._uploads.start(self._progress)

    def take(self, sender: int, message: Message) -> None:
        """Take a mirror message from node ``sender``."""
        self._inbox.put({**message, "from": sender})

    def sign(self) -> float:
        """Return the time of the script's last write to a checkpoint or its metrics (monotonic seconds).

        While the script's end is being mirrored this is now: that has a limit of its own.
        """
        if self._finishing is None:
            return self._stirred
        return 0.0 if self.idle.is_set() else time.monotonic()

    def freeze(self, seconds: float = float("inf")) -> None:
        """Count nothing new as finished for ``seconds``: a rank has died, or is about to be stopped.

        A half checkpoint of a dead rank would look whole: no process has it open any more, and it does not change.
        """
        self._frozen = max(self._frozen, time.monotonic() + seconds)  # at once: a look may be under way

    def finish(self, *, clean: bool) -> None:
        """Mirror the rest after the script's end, then set `idle`. After an unclean end, as with `freeze`."""
        for growing in self._growing:
            growing.finish()
        self._inbox.put({"t": "finish", "clean": clean})

    def stop(self) -> None:
        """Stop serving messages, after the end barrier."""
        for growing in self._growing:
            growing.stop()
        self._inbox.put(None)
        self._thread.join(10)
        self._work.shutdown(wait=False, cancel_futures=True)
        self._slow.shutdown(wait=False)

    # ----------------------------------------------------------------------------------------------------- the thread

    def _loop(self) -> None:
        due = 0.0
        while True:
            try:
                message = self._inbox.get(timeout=0.2)
            except queue.Empty:
                message = {}
            if message is None:
                return
            try:
                if message:
                    self._handle(message)
                began = time.monotonic()
                if began >= due or message.get("t") == "finish":
                    self._scan()
                    worked = time.monotonic() - began - self._finished.slept
                    due = began + max(TIMINGS.scan, SCAN_SHARE * worked)
                if self._inbox.empty():  # each of these looks at all checkpoints: not for each of thousands of messages
                    if self._commits is not None:
                        self._commits.advance()
                    self._tell_of_uploads()
                    self._settle()
            except OSError as exc:
                self._complain(f"{exc.filename or self._live}: {exc.strerror}")
            except Exception as exc:  # noqa: BLE001  the thread must outlive any one checkpoint's trouble
                self._complain(f"{type(exc).__name__}: {exc}")

    def _complain(self, what: str) -> None:
        self._once(f"mirror: {what}; trying again")

    def _once(self, text: str, of: str = "") -> None:
        """Say ``text``, unless it was said before; with ``of``, unless anything was said of that."""
        if (of or text) not in self._logged:
            self._logged.add(of or text)
            self._say(text)

    def _handle(self, message: Message) -> None:
        kind = message["t"]
        if kind == "finish":
            self._finishing = "clean" if message["clean"] else "failed"
            patience = TIMINGS.archive_clean if message["clean"] else TIMINGS.archive_failed
            self._slow_until = time.monotonic() + patience
            self._marks.clear()
            if self._uploads is not None:
                self._uploads.end()
            if self._commits is not None:
                self._commits.finishing = self._finishing
        elif kind == "worked":
            self._working -= not message["slow"]
            self._slow_working -= message["slow"]
            message["then"]()
        elif kind == "hold?":
            about = {"round": message["round"], "name": message["name"]}
            self._send(message["from"], {"t": "hold", **about, **self._hold(message["name"])})
        elif kind == "moving":
            self.last = time.monotonic()
            self._pass_on(message["from"])
        elif kind == "copy":
            self._copy(message)
        elif kind == "committed":
            self._committed(message["name"], message["folder"])
        elif kind == "dropped":
            ready, announced = self._ready.get(message["name"]), self._announced.pop(message["name"], None)
            if ready is not None and ready.signature == announced:
                self._finished.drop(ready)
        elif kind == "remove":
            root, own = self._live / "checkpoints", self._uploads is not None
            what = message["folders"]
            self._aside(lambda: remove_parts(root, what, node=self._node, nodes=message["nodes"], own=own))
        elif self._commits is None:
            raise ValueError(f"{kind} is for node 0")
        elif kind == "finished":
            self._commits.finished(message["name"], message["from"])
        elif kind == "stored":
            self._commits.stored(message["folder"], message["from"], there=message["there"])
        elif kind == "pointers":
            self._commits.pointers(message["from"], set(message["targets"]))
        else:
            self._commits.answer(message)

    def _aside(
        self, work: Callable[[], T], then: Callable[[T | None], None] = lambda _: None, *, slow: bool = False
    ) -> None:
        """Call ``work()`` in another thread, then ``then`` in ours with its result, None if it failed."""

        def both() -> None:
            found = None
            try:
                found = work()
            except Exception as exc:  # noqa: BLE001  in any case the mirror must hear of the end
                self._complain(f"{type(exc).__name__}: {exc}")
            self._inbox.put({"t": "worked", "then": lambda: then(found), "slow": slow})

        self._working += not slow
        self._slow_working += slow
        (self._slow if slow else self._work).submit(both)

    # ------------------------------------------------------------------------------------------- this node's own part

    def _scan(self) -> None:
        entries = self._watch.entries()
        self._look_for_life(entries.values())
        unreadable = ""
        for entry in entries.values():
            if entry.fault is not None:
                why = describe_fault(entry.fault)
                unreadable = f"cannot read {entry.fault.filename or entry.path}: {why}"
                self._complain(unreadable)
        self._unreadable = unreadable
        self._tell_pointers()
        fresh = [entry for entry in entries.values() if not self._finished.is_done(entry)]
        if self._finishing is None and not self._is_frozen():
            fresh = self._finished.look(fresh)
        if self._finishing == "failed" or (self._finishing is None and self._is_frozen()):  # perhaps since it looked
            before = {name: entry.signature for name, entry in self._ready.items()}
            fresh = [entry for entry in fresh if before.get(entry.name) == entry.signature]
        self._ready = {e.name: e for e in fresh}
        for entry in sorted(fresh, key=lambda e: e.newest):
            if self._announced.get(entry.name) != entry.signature:
                self._announced[entry.name] = entry.signature
                self._send(0, {"t": "finished", "name": entry.name})

        self._forget(entries.keys())

    def _look_for_life(self, entries: Iterable[CheckpointEntry]) -> None:
        """Note a change of the newest time of all files, by any clock. An entry that cannot be read shows none."""
        times = [entry.newest for entry in entries if entry.fault is None]
        with contextlib.suppress(OSError):
            times.append(self._metrics.stat().st_mtime)
        if (newest := max(times, default=0.0)) != self._newest:
            self._newest, self._stirred = newest, time.monotonic()

    def _forget(self, names: Set[str]) -> None:
        """Drop what is known of entries that the script has deleted, except copied ones until the commit."""
        kept = names | self._copied.keys()
        self._finished.forget(kept)
        for known in (self._announced, self._offered):
            for name in known.keys() - kept:
                del known[name]

    def _tell_pointers(self) -> None:
        """Send changed pointers once they look the same twice: one may be half written."""
        found = self._watch.pointers()
        if found != self._pointers and found == self._pointers_seen:
            self._pointers = found
            self._send(0, {"t": "pointers", "targets": sorted({pointer.target for pointer in found.values()})})
            self._aside(lambda: checkpoints.write_pointers(self._live, self._node, found, temporary=self._temporary))
        self._pointers_seen = found

    def _hold(self, name: str) -> Message:
        """Return this node's answer for ``name``: nothing, a growing part, a finished one, or the one it had before."""
        entry, final = self._watch.entry(name), self._finishing == "clean"
        if entry is None:
            return nothing(over=final)
        known = self._ready.get(name)
        done = self._finished.is_done(entry)  # it may have become done since the last look
        same = not done and ((known is not None and known.signature == entry.signature) or self._between_writes(entry))
        if same or done:
            self._offered[name] = entry.signature
        return {
            "state": "ready" if same or (done and final) else "old" if done else "busy",
            "final": final,
            "single": entry.single,
            "sharded": entry.sharded,
            "metadata": entry.metadata,
            "place": entry.place,
            "saved": entry.newest,
            "when": self._when(entry),
        }

    def _when(self, entry: CheckpointEntry) -> float:
        """Return the Unix seconds of its last change, as if this machine's clock had never been set back."""
        return min(entry.newest, time.time()) + self._clock.set_back()

    def _between_writes(self, entry: CheckpointEntry) -> bool:
        """Return whether it is finished now: a file that never rests may have changed since the last look."""
        if self._finishing is not None or self._is_frozen() or not self._finished.restless(entry):
            return False
        if not self._finished.look([entry]) or self._is_frozen():
            return False
        self._ready[entry.name] = entry
        return True

    def _is_frozen(self) -> bool:
        return time.monotonic() < self._frozen

    def _copy(self, message: Message) -> None:
        """Copy this node's part into live/ and answer, without files if it differs from the offer or did not arrive."""
        name, head = message["name"], message["from"]
        target = self._live / "checkpoints" / name / message["folder"] / f"node-{self._node}"
        answer = {"t": "copied", "round": message["round"], "name": name}
        entry = self._watch.entry(name)
        if entry is None or self._offered.get(name) != entry.signature or self._written_to(entry):
            self._send(head, {**answer, "files": None, "rewritten": entry is not None})
            return
        offered = entry
        answer["saved"] = entry.newest

        def then(files: dict[str, Any] | None) -> None:
            if files is not None:
                if name in self._copied:
                    old = self._copied[name][1]  # of a round that failed
                    self._aside(lambda: shutil.rmtree(old, ignore_errors=True))
                self._copied[name] = offered, target
                files = {f"node-{self._node}/{key}": value for key, value in files.items()}
            now = self._watch.entry(name) if files is None else None
            rewritten = now is not None and now.signature != offered.signature
            self._send(head, {**answer, "files": files, "rewritten": rewritten})

        self._aside(lambda: self._copy_entry(offered, target), then)

    def _copy_entry(self, entry: CheckpointEntry, target: Path) -> dict[str, Any] | None:
        """Copy an entry, in a thread of its own. Return its files, None if it changed or the copy failed."""
        try:
            links = self._links / target.parent.name
            files = checkpoints.copy_entry(entry, target, self._moved, links=links, temporary=self._temporary)
        except OSError as exc:
            self._complain(f"cannot copy checkpoint {entry.name} to {self._live}: {exc.strerror}")
            self._not_copied = exc.strerror or type(exc).__name__
            files = None
        else:
            self._not_copied = ""
        if files is None or self._written_to(entry):
            shutil.rmtree(target, ignore_errors=True)
            return None
        for link in checkpoints.linked_folders(entry.path):
            self._once(f"checkpoint {entry.name}: {link} is a link to a folder; it is left out", of=family(entry.name))
        return files

    def _committed(self, name: str, folder: str) -> None:
        whole = self._live / "checkpoints" / folder
        files = [whole / checkpoints.COMMIT] if self._node == 0 else []
        if name in self._copied:
            entry, target = self._copied.pop(name)
            self._finished.done(entry)
            if self._uploads is not None:
                files += (file for file in target.rglob("*") if file.is_file())
        if self._uploads is not None and files:
            self._uploads.expect(folder, [file for file in files if not file.name.endswith(self._uploads.agent.marks)])
        self._announced.pop(name, None)  # a version that came meanwhile was announced to a finished round
        self._marks.clear()
        self._progress()

    def _tell_of_uploads(self) -> None:
        for folder, there in self._uploads.arrived().items() if self._uploads is not None else ():
            self._send(0, {"t": "stored", "folder": folder, "there": there})

    def _moved(self, source: Path, done: int) -> None:
        """Count progress only beyond earlier tries: a full disk takes the same bytes again and again.

        The samples of usage are none: they also grow on a node that hangs.
        """
        if source != self._usage and done > self._marks.get(source, 0):
            self._marks[source] = done
            self._progress()

    def _progress(self) -> None:
        """Note progress here, and by way of node 0 for all other nodes, which may wait for this part."""
        self.last = time.monotonic()
        if self.last - self._progress_logged >= TIMINGS.progress:
            self._progress_logged = self.last
            self._send(0, {"t": "moving"})

    def _pass_on(self, sender: int) -> None:
        """Pass on from node 0 that ``sender``'s copies move, but not each of hundreds of such messages."""
        if self._node == 0 and self.last - self._passed_on >= TIMINGS.progress / 2:
            self._passed_on = self.last
            for node in self._peers() - {self._node, sender}:
                self._send(node, {"t": "moving"})

    def _written_to(self, entry: CheckpointEntry) -> bool:
        """Return whether the script has it open; after its end, no process has."""
        return self._finishing is None and bool(checkpoints.open_for_writing([entry]))

    def _settle(self) -> None:
        """Set `idle` after the end, once all finished entries are in live/ (node 0: and no round is open)."""
        if self._finishing is not None:
            left = [entry for entry in self._ready.values() if not self._finished.is_done(entry)]
            at_work = self._working or (self._commits is not None and self._commits.open)
            at_work = at_work or (self._uploads is not None and not self._uploads.idle)
            at_work = at_work or (self._slow_working > 0 and time.monotonic() < self._slow_until)
            arrived = all(growing.done.is_set() for growing in self._growing)
            if not left and not at_work and arrived and self._inbox.empty():
                self.idle.set()
