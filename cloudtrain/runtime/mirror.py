"""The mirror: one thread of a node that carries finished files from fast scratch into ``live/``, beside training.

Every node watches its own checkpoints. A finished one is announced to node 0, which asks all nodes what they hold of
it, tells the holders to copy, and writes ``commit.json`` once every holder has: a checkpoint in ``live/`` is whole or
absent, also when its shards lie on many nodes. Artifacts and metrics grow: they are mirrored whole, now and then and at
the end. Each file has one writer, its node.
"""

from __future__ import annotations

import queue
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import checkpoints
from .checkpoints import Entry, Signature, Watch

__all__ = ["KINDS", "Mirror"]

KINDS = ("finished", "hold?", "hold", "copy", "copied", "committed", "dropped")
"""Messages of the node link that belong to the mirror."""
SCAN_SECONDS = 1.0
GROWING_SECONDS = 30.0
HOLDER_SECONDS = 300.0
"""How long a node that held a part of the last checkpoint may be behind with its part of the next."""
FIRST_SECONDS = 10.0
"""The same for the first checkpoint of a script, when nobody knows yet which nodes write."""
RETRY_SECONDS = 1.0

Message = dict[str, Any]


@dataclass
class _Round:
    """Node 0's work on one checkpoint: asking, then copying."""

    name: str
    since: float
    number: int = 0
    phase: str = "idle"
    retry: float = 0.0
    seq: int = 0
    place: str | None = None
    seen: set[int] = field(default_factory=set)
    answers: dict[int, Message] = field(default_factory=dict)
    waiting: set[int] = field(default_factory=set)


class Mirror:
    """``send(node, message)`` reaches a node's mirror, our own too; `take` is given what arrives for this one.

    ``say`` prints a line; ``peers()`` are the nodes now alive, this one included.
    """

    def __init__(
        self,
        *,
        node: int,
        nodes: int,
        attempt: str,
        live: Path,
        watch: Watch,
        artifacts: Path,
        metrics: Path,
        send: Callable[[int, Message], None],
        peers: Callable[[], set[int]],
        say: Callable[[str], None],
        skip: dict[str, Signature] | None = None,
    ) -> None:
        self._node, self._nodes, self._attempt = node, set(range(nodes)), attempt
        self._live, self._watch = live, watch
        self._artifacts, self._metrics = artifacts, metrics
        self._send, self._peers, self._say = send, peers, say
        self._inbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._done: dict[str, Signature] = dict(skip or {})
        self._announced: dict[str, Signature] = {}
        self._copied: dict[str, tuple[Signature, Path]] = {}
        self._ready: dict[str, Entry] = {}
        self._offered: dict[str, Signature] = {}
        self._growing: dict[Path, tuple[int, int]] = {}
        self._grown = True
        self._rounds: dict[str, _Round] = {}
        self._numbers, self._seq = 0, 0
        self._holders: set[int] | None = None
        self._finishing: str | None = None
        self._told: set[str] = set()
        self.idle = threading.Event()
        self.last = time.monotonic()
        self._thread = threading.Thread(target=self._loop, name="mirror", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def take(self, sender: int, message: Message) -> None:
        """A mirror message from node ``sender``."""
        self._inbox.put({**message, "from": sender})

    def finish(self, *, clean: bool) -> None:
        """The script has ended: mirror what is left, then set `idle`.

        After an unclean end only what was seen finished before counts: a kill leaves half a checkpoint closed.
        """
        self._inbox.put({"t": "finish", "clean": clean})

    def stop(self) -> None:
        """No more messages are served after the end barrier."""
        self._inbox.put(None)
        self._thread.join(10)

    # ----------------------------------------------------------------------------------------------------- the thread

    def _loop(self) -> None:
        scan = grow = 0.0
        while True:
            try:
                message = self._inbox.get(timeout=0.2)
            except queue.Empty:
                message = {}
            if message is None:
                return
            try:
                now = time.monotonic()
                if message:
                    self._handle(message)
                if now - scan >= SCAN_SECONDS or message.get("t") == "finish":
                    scan = now
                    self._scan()
                every = GROWING_SECONDS if self._grown else RETRY_SECONDS
                if now - grow >= every or message.get("t") == "finish":
                    grow = now
                    self._grown = self._mirror_growing()
                self._advance()
                self._settle()
            except OSError as exc:
                self._complain(f"{exc.filename or self._live}: {exc.strerror}")
            except Exception as exc:  # noqa: BLE001  the thread must outlive any one checkpoint's trouble
                self._complain(f"{type(exc).__name__}: {exc}")

    def _complain(self, what: str) -> None:
        if what not in self._told:
            self._told.add(what)
            self._say(f"mirror: {what}; trying again")

    def _handle(self, message: Message) -> None:
        kind = message["t"]
        if kind == "finish":
            self._finishing = "clean" if message["clean"] else "failed"
        elif kind == "finished":
            work = self._rounds.setdefault(message["name"], _Round(message["name"], time.monotonic()))
            work.seen.add(message["from"])
        elif kind == "hold?":
            about = {"round": message["round"], "name": message["name"]}
            self._send(message["from"], {"t": "hold", **about, **self._hold(message["name"])})
        elif kind == "copy":
            about = {"round": message["round"], "name": message["name"]}
            self._send(message["from"], {"t": "copied", **about, "files": self._copy(message)})
        elif kind in ("hold", "copied"):
            self._answer(message)
        elif kind == "committed":
            name = message["name"]
            if name in self._copied:
                self._done[name], _ = self._copied.pop(name)
            self.last = time.monotonic()
        elif kind == "dropped" and message["name"] in self._ready:
            self._done[message["name"]] = self._ready[message["name"]].signature

    # ------------------------------------------------------------------------------------------- this node's own part

    def _scan(self) -> None:
        entries = self._watch.entries()
        fresh = [e for e in entries.values() if self._done.get(e.name) != e.signature]
        if self._finishing == "failed":
            fresh = [e for e in fresh if e.name in self._ready and self._ready[e.name].signature == e.signature]
        elif self._finishing is None:
            fresh = [e for e in fresh if checkpoints.quiet(e)]
            busy = checkpoints.open_for_writing(fresh) if fresh else set()
            fresh = [e for e in fresh if e.name not in busy]
        self._ready = {e.name: e for e in fresh}
        for entry in sorted(fresh, key=lambda e: e.newest):
            if self._announced.get(entry.name) != entry.signature:
                self._announced[entry.name] = entry.signature
                self._send(0, {"t": "finished", "name": entry.name})

    def _hold(self, name: str) -> Message:
        """What this node holds of ``name``: nothing, something still growing, or something finished."""
        entry = self._watch.entries().get(name)
        if entry is None:
            over = self._finishing == "clean"
            return {"state": "over" if over else "none", "sharded": False, "metadata": False, "place": None}
        known = self._ready.get(name)
        same = known is not None and known.signature == entry.signature
        done = self._done.get(name) == entry.signature
        if same or done:
            self._offered[name] = entry.signature
        state = "ready" if same or done else "busy"
        return {"state": state, "sharded": entry.sharded, "metadata": entry.metadata, "place": entry.place}

    def _copy(self, message: Message) -> dict[str, Any] | None:
        """Copy this node's part into live/; None when it is not what was offered, or live/ would not take it."""
        entry = self._watch.entries().get(message["name"])
        if entry is None or self._offered.get(entry.name) != entry.signature or self._written_to(entry):
            return None
        target = self._live / "checkpoints" / entry.name / message["folder"] / f"node-{self._node}"
        if entry.name in self._copied:
            shutil.rmtree(self._copied.pop(entry.name)[1], ignore_errors=True)  # of a round that came to nothing
        try:
            files = checkpoints.copy_entry(entry, target, self._moved)
        except OSError as exc:
            self._complain(f"cannot copy checkpoint {entry.name} to {self._live}: {exc.strerror}")
            files = None
        if files is None or self._written_to(entry):
            shutil.rmtree(target, ignore_errors=True)
            return None
        self._copied[entry.name] = entry.signature, target
        return {f"node-{self._node}/{key}": value for key, value in files.items()}

    def _moved(self) -> None:
        self.last = time.monotonic()

    def _written_to(self, entry: Entry) -> bool:
        """Whether the script has it open; after its end, nobody has."""
        return self._finishing is None and bool(checkpoints.open_for_writing([entry]))

    def _mirror_growing(self) -> bool:
        """Mirror what has changed of artifacts and metrics; whether all of it arrived."""
        arrived = True
        for root, target in (
            (self._artifacts, self._live / "artifacts" / f"node-{self._node}"),
            (self._metrics, self._live / "metrics" / f"{self._attempt}-node-{self._node}.jsonl"),
        ):
            for file in sorted(p for p in ([root] if root.is_file() else root.rglob("*")) if p.is_file()):
                try:
                    stat = file.stat()
                    state = stat.st_size, stat.st_mtime_ns
                    if self._growing.get(file) != state:
                        place = target / file.relative_to(root) if file != root else target
                        checkpoints.replace_file(file, place, self._moved)
                        self._growing[file] = state
                except FileNotFoundError:
                    pass  # the script has removed it meanwhile
                except OSError as exc:
                    arrived = False
                    self._complain(f"cannot mirror {file.name}: {exc.strerror}")
        return arrived

    # -------------------------------------------------------------------------------------- node 0: ask, copy, commit

    def _advance(self) -> None:
        now = time.monotonic()
        alive = self._peers()
        for work in list(self._rounds.values()):
            if work.phase == "idle" and now >= work.retry:
                self._numbers += 1
                work.number, work.phase, work.answers, work.waiting = self._numbers, "ask", {}, set(alive)
                for node in sorted(alive):
                    self._send(node, {"t": "hold?", "round": work.number, "name": work.name})
            elif work.phase != "idle" and work.waiting - alive:
                work.phase, work.retry = "idle", now + RETRY_SECONDS  # a node went away in the middle

    def _answer(self, message: Message) -> None:
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
        held = {node: a for node, a in work.answers.items() if a["state"] in ("ready", "busy")}
        work.seen.update(held)
        growing = any(a["state"] == "busy" for a in held.values())
        sharded = any(a["sharded"] for a in held.values())
        headless = sharded and not any(a["metadata"] for a in held.values())
        missing = self._missing(work, set(held), sharded and not headless)
        if not held:
            self._drop(work)
        elif growing or headless or missing:
            # A script that is over, or a node that is gone, will never finish its part.
            if self._finishing == "failed" or (self._finishing and headless) or missing - self._peers():
                self._drop(work)
            else:
                work.phase, work.retry = "idle", time.monotonic() + 0.5
        else:
            self._seq += 1
            work.seq, work.phase, work.waiting, work.answers = self._seq, "copy", set(held), {}
            work.place = next((a["place"] for a in held.values() if a["place"]), None)
            for node in sorted(held):
                self._send(node, {"t": "copy", "round": work.number, "name": work.name, "folder": self._folder(work)})

    def _missing(self, work: _Round, held: set[int], headed: bool) -> set[int]:
        """Nodes whose part may still be on its way: better late than half.

        Those that held a part of the checkpoint before, or once of this one. Of a script's first, any may hold one:
        those alive are waited for a little (a DCP checkpoint with its ``.metadata`` is finished), one that is gone for
        ever. A node whose script has ended well without writing a part owes none.
        """
        age = time.monotonic() - work.since
        owed = self._nodes if self._holders is None else self._holders | work.seen
        patience = FIRST_SECONDS if self._holders is None else HOLDER_SECONDS
        done = {node for node, answer in work.answers.items() if answer["state"] == "over"}
        if (headed and self._holders is None) or age > patience:
            done |= set(work.answers) - work.seen
        return owed - held - done

    def _drop(self, work: _Round) -> None:
        """The script has deleted it again, or is over and will never finish it."""
        del self._rounds[work.name]
        for node in sorted(self._peers()):
            self._send(node, {"t": "dropped", "name": work.name})

    def _folder(self, work: _Round) -> str:
        return f"{self._attempt}-{work.seq}"

    def _commit(self, work: _Round) -> None:
        if any(a["files"] is None for a in work.answers.values()):
            work.phase, work.retry = "idle", time.monotonic() + RETRY_SECONDS
            return
        files = {key: value for a in work.answers.values() for key, value in a["files"].items()}
        commit = {
            "protocol": 1,
            "name": work.name,
            "place": work.place,
            "attempt": self._attempt,
            "seq": work.seq,
            "nodes": len(work.answers),
            "time": time.time(),
            "files": files,
        }
        try:
            checkpoints.write_commit(self._live / "checkpoints" / work.name / self._folder(work), commit)
        except OSError as exc:
            self._complain(f"cannot commit checkpoint {work.name}: {exc.strerror}")
            work.phase, work.retry = "idle", time.monotonic() + RETRY_SECONDS
            return
        self._holders = set(work.answers)
        self.last = time.monotonic()
        del self._rounds[work.name]
        for node in sorted(self._peers()):
            self._send(node, {"t": "committed", "name": work.name})

    def _settle(self) -> None:
        """After the end: idle once all that is finished of ours is in live/ (node 0: and no round is open)."""
        if self._finishing is not None:
            left = [n for n, e in self._ready.items() if self._done.get(n) != e.signature]
            if not left and not self._rounds and self._grown and self._inbox.empty():
                self.idle.set()
