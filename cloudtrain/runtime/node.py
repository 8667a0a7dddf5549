"""One node of a run, from the first byte of context to the exit record.

Node 0 decides for all: the attempt's number, the checkpoint to resume from, when to start, what the root cause was and
when everyone may leave. Everything that happens arrives in one inbox, handled by one thread.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..errors import CloudtrainError, SpecError
from ..provider import Site
from . import checkpoints
from .cause import Failure, category, root_cause, summary
from .launch import Ranks
from .link import JOIN_TIMEOUT, Link
from .logs import LogWriter
from .machine import oom_kills
from .mirror import KINDS, Mirror
from .resume import Resume
from .workspace import Workspace

__all__ = ["Node"]

STOP_TERM_SECONDS = 0.5
STOP_KILL_SECONDS = 3.0
"""After a failure anywhere, a healthy rank gets SIGTERM, then SIGKILL, this long after it."""
GRACE_RESERVE = 0.3
"""The part of the platform's grace kept for stopping ranks and mirroring, at most `RESERVE_SECONDS`."""
RESERVE_SECONDS = 15.0
ALIVE_SECONDS = 5.0
FAILED_WAIT_SECONDS = 15.0
CLEAN_WAIT_SECONDS = 900.0
"""How long nothing may move while what is left is mirrored, after a failure and after a clean end."""
PEERS_SECONDS = 60.0
NODE_0_SECONDS = 120.0
"""After a failure: how long node 0 waits for its peers' last words, and they for its."""

Message = dict[str, Any]


class Node:
    """``inbox`` takes ``(node, message)``; -1 is this process itself (signals), our own number the ranks' events."""

    def __init__(
        self,
        *,
        context: Mapping[str, Any],
        site: Site,
        attempt: int,
        key: bytes,
        inbox: queue.SimpleQueue[tuple[int, Message]],
    ) -> None:
        self.context, self.site, self.k, self.inbox = context, site, attempt, inbox
        self.topology = site.topology
        self.me, self.nodes = site.topology.node_rank, site.topology.nodes
        self.live = Path(site.paths["live"]).absolute()
        self.log = LogWriter(node=self.me)
        self.link = Link(
            node=self.me,
            nodes=self.nodes,
            addr=self.topology.master_addr,
            port=self.topology.master_port + 1,
            key=key,
            inbox=inbox,
        )
        self.resume = Resume(live=self.live, given=site.paths.get("resume"), url=context["resume"], say=self.log.say)
        self.attempt = ""
        self.space: Workspace | None = None
        self.started = time.time()
        self.failures: list[Failure] = []
        self.seen: dict[int, set[str]] = {}
        self.eof: dict[int, int] = {}
        self.preempted: float | None = None
        self.stopping: float | None = None
        self.stopped_ns: int | None = None
        self.signalled = 0
        self.ranks: Ranks | None = None
        self.mirror: Mirror | None = None
        self.code: int | None = None
        self.peers: dict[int, Message] = {}
        self.gone: set[int] = set()
        self.released = False
        self.go: Message | None = None
        self.resumed = ""
        self.last_alive = self.sent_alive = time.monotonic()
        self.oom_before = oom_kills()

    # -------------------------------------------------------------------------------------------------- the whole run

    def run(self) -> int:
        """The exit code for the platform."""
        try:
            self.link.open()
            if self.me == 0:
                self._begin(f"{self.k}.{self._restarts()}")
            self._prepare_and_join()
            if self.go is not None and not self._over():
                self._launch()
                self._pump(lambda: self.code is not None)
            outcome = self._finish()
        finally:
            if self.ranks is not None:
                self.ranks.kill()
            self.link.close()
            self.log.flush()
            if self.space is not None:
                shutil.rmtree(self.space.folder, ignore_errors=True)
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
        return self.site.exit_code[outcome if outcome in ("succeeded", "preempted") else "failed"]

    def _over(self) -> bool:
        return bool(self.failures) or self.stopping is not None or self.preempted is not None

    def _broken(self) -> bool:
        return bool(self.failures) or self.stopping is not None

    def _begin(self, attempt: str) -> None:
        self.attempt = attempt
        self.log.begin(attempt, self.live / "logs" / attempt / f"node-{self.me}")

    def _restarts(self) -> int:
        """The platform's own restarts of this attempt so far, by the logs and exits they left."""
        names = [p.name for p in (self.live / "logs").glob(f"{self.k}.*")]
        names += [p.name for p in (self.live / "exit").glob(f"{self.k}.*")]
        numbers = [int(m[1]) for name in names if (m := re.match(rf"{self.k}\.(\d+)(?:-|$)", name))]
        restart = max(numbers, default=-1) + 1
        # Claimed at once, so that a restart that dies before its first line is counted too.
        (self.live / "logs" / f"{self.k}.{restart}" / "node-0").mkdir(parents=True, exist_ok=True)
        return restart

    # ------------------------------------------------------------------------------------------ before the first rank

    def _prepare_and_join(self) -> None:
        try:
            self.space = Workspace(context=self.context, site=self.site, log=self.log)
            self.space.fill()
        except CloudtrainError as exc:
            whose = "user_error" if isinstance(exc, SpecError) else "infra"
            self._fail(self._setup(str(exc), whose))
        if self.me != 0:
            self._pump(lambda: bool(self.attempt) or 0 in self.gone, time.monotonic() + JOIN_TIMEOUT)
        self._tell({"t": "ready", "failures": [f.to_dict() for f in self.failures]})
        if self.me == 0:
            everyone = set(range(self.nodes))
            self._pump(lambda: set(self.peers) >= everyone or self._over(), time.monotonic() + JOIN_TIMEOUT)
            if not self._over() and set(self.peers) != everyone:
                missing = ", ".join(f"node {n}" for n in sorted(everyone - set(self.peers)))
                self._fail(self._lost(f"never came (missing: {missing})", min(everyone - set(self.peers))))
            if not self._over():
                self._agree_on_resume()
            self.peers.clear()
        else:
            self._pump(lambda: self.go is not None or self.released or self._over() or 0 in self.gone)

    def _agree_on_resume(self) -> None:
        """Node 0: the newest complete checkpoint that every node can restore, or none; then go."""
        tried = 0
        for name, message in self.resume.candidates():
            self.peers.clear()
            self.link.send_all(message)
            self._on_restore(self.me, message)
            self._pump(lambda: len(self.peers) == self.nodes or self._over(), time.monotonic() + JOIN_TIMEOUT)
            if self._over():
                return
            bad = next((m["why"] for _, m in sorted(self.peers.items()) if m["why"]), None)
            if bad is None:
                self._go({"t": "go", "resume": name})
                return
            tried += 1
            self.log.say(f"{bad}; falling back to the checkpoint before")
        _, why = self.resume.fallback(tried)
        if why:
            self._fail(self._setup(why, "user_error"))
        else:
            self._go({"t": "go", "resume": ""})

    def _go(self, message: Message) -> None:
        self.link.send_all(message)
        self.go = message

    # ------------------------------------------------------------------------------------------------------ the ranks

    def _launch(self) -> None:
        assert self.go is not None
        space = self._space
        watch = space.watch()
        restored = watch.entries()
        space.bring_back(self.live / "artifacts" / f"node-{self.me}")
        resume = self._resume_path(self.go["resume"], restored)
        self.resumed = self.go["resume"] or (Path(resume).name if resume else "")
        if self.me == 0:
            self.log.say(f"attempt {self.attempt}: " + (f"resuming from {self.resumed}" if resume else "a fresh start"))
        self.mirror = Mirror(
            node=self.me,
            nodes=self.nodes,
            attempt=self.attempt,
            live=self.live,
            watch=watch,
            artifacts=space.artifacts,
            metrics=space.metrics,
            send=self.link.send,
            peers=lambda: {self.me, *self.link.connected()},
            say=self.log.say,
            skip={name: entry.signature for name, entry in restored.items()},
        )
        self.mirror.start()
        self.last_alive = time.monotonic()  # the wait for peers is no stall
        try:
            self.ranks = space.start(
                attempt=self.attempt, resume=resume, emit=lambda message: self.inbox.put((self.me, message))
            )
            self._note_group(self.ranks.pid)
        except (OSError, CloudtrainError) as exc:
            text = f"cannot start {self.context['entry_point'] or self.context['args'][0]}: {exc}"
            self._fail(self._setup(text, "user_error"))
            self.code = 1

    def _resume_path(self, name: str, restored: Mapping[str, checkpoints.Entry]) -> str:
        if name:
            return str(restored[name].path) if name in restored else str(self._space.checkpoints / name)
        return self.resume.fallback(0)[0]

    # --------------------------------------------------------------------------------------------------- what happens

    def _pump(self, until: Callable[[], bool], deadline: float | None = None) -> None:
        """Handle what comes until ``until()``, or ``deadline`` (monotonic seconds)."""
        while not until() and (deadline is None or time.monotonic() < deadline):
            with contextlib.suppress(queue.Empty):
                sender, message = self.inbox.get(timeout=0.1)
                self._handle(sender, message)
            self._tick()

    def _handle(self, sender: int, message: Message) -> None:
        kind = message["t"]
        if kind in KINDS:
            if self.mirror is not None:
                self.mirror.take(sender, message)
        else:
            handler: Callable[[int, Message], None] = getattr(self, f"_on_{kind}")
            handler(sender, message)

    def _tell(self, message: Message) -> None:
        """To node 0."""
        self.link.send(0, message)

    def _on_hello(self, sender: int, message: Message) -> None:
        if self.me == 0:
            self.link.send(sender, {"t": "attempt", "attempt": self.attempt})
            if self.stopping is not None:
                self.link.send(sender, {"t": "stop"})
            if self.preempted is not None:
                self.link.send(sender, {"t": "preempt", "why": "the run was told to stop"})

    def _on_attempt(self, sender: int, message: Message) -> None:
        self._begin(message["attempt"])

    def _on_ready(self, sender: int, message: Message) -> None:
        self.peers[sender] = message
        self._take_failures(sender, message)

    _on_done = _on_restored = _on_ready

    def _on_restore(self, sender: int, message: Message) -> None:
        self._tell({"t": "restored", "why": self.resume.restore(message, self._space), "failures": []})

    def _on_go(self, sender: int, message: Message) -> None:
        self.go = message

    def _on_signal(self, sender: int, message: Message) -> None:
        self._preempt(f"node {self.me} was told to stop ({signal.Signals(message['number']).name})")
        self._tell({"t": "preempt", "why": f"node {self.me} was told to stop"})

    def _on_preempt(self, sender: int, message: Message) -> None:
        if self.me == 0:
            self.link.send_all({"t": "preempt", "why": message["why"]})
        self._preempt(message["why"])

    def _preempt(self, why: str) -> None:
        if self.preempted is None:
            self.preempted = time.monotonic()
            self.log.say(f"{why}; the script may save a checkpoint now")
            with contextlib.suppress(OSError):
                if self.space is not None:
                    self.space.preempt.touch()

    def _on_failed(self, sender: int, message: Message) -> None:
        self._take_failures(sender, message)

    def _take_failures(self, sender: int, message: Message) -> None:
        """Node 0: what a node says its ranks died of, on our clock."""
        if sender == self.me:
            return
        known = {(f.node, f.rank, f.kind) for f in self.failures}
        for item in message["failures"]:
            failure = Failure(**{**item, "time_ns": self.link.here(sender, item["time_ns"])})
            if (failure.node, failure.rank, failure.kind) not in known:
                self.failures.append(failure)
        if message["failures"]:
            self._stop()

    def _on_stop(self, sender: int, message: Message) -> None:
        self._stop()

    def _on_alive(self, sender: int, message: Message) -> None:
        self.last_alive = time.monotonic()

    def _on_stacks(self, sender: int, message: Message) -> None:
        if self.ranks is not None:
            self.ranks.dump_stacks()

    def _on_exit(self, sender: int, message: Message) -> None:
        self.released = True

    def _on_lost(self, sender: int, message: Message) -> None:
        self.gone.add(sender)
        if self.released or "outcome" in self.peers.get(sender, {}):
            return
        self._fail(self._lost(f"was lost: {message['why']}", sender))

    @property
    def _space(self) -> Workspace:
        assert self.space is not None
        return self.space

    def _setup(self, why: str, category: str) -> Failure:
        return Failure(kind="setup", node=self.me, time_ns=time.time_ns(), exception=why, category=category)

    def _lost(self, why: str, node: int) -> Failure:
        return Failure(kind="lost", node=node, time_ns=time.time_ns(), exception=why)

    def _on_rank(self, sender: int, message: Message) -> None:
        local, event = message["local"], message["event"]
        self.seen.setdefault(local, set()).add(event)
        if event == "start":
            self._note_group(message["pid"])
        elif event == "eof":
            self.eof[local] = message["time_ns"]
        elif event == "error":
            self._fail(
                Failure(
                    kind="error",
                    node=self.me,
                    rank=self._rank(local),
                    time_ns=message["time_ns"],
                    exception=self._space.readable(message["exception"]),
                    file=self._space.relative(message["file"]),
                    line=message["line"],
                    traceback=self._space.readable(message["traceback"]),
                    code=message["code"],
                )
            )

    def _note_group(self, pid: int) -> None:
        if self.site.groups_file:
            with open(self.site.groups_file, "a", encoding="ascii") as stream:
                stream.write(f"{pid}\n")

    def _rank(self, local: int) -> int:
        assert self.ranks is not None
        return self.ranks.first_rank + local

    def _on_ended(self, sender: int, message: Message) -> None:
        self.code = message["code"]
        if self.code != 0:
            self._blame_the_silent()

    def _blame_the_silent(self) -> None:
        """Ranks that ended badly without telling us why; or the launcher itself, when no rank ever began."""
        assert self.ranks is not None
        told = {f.rank for f in self.failures if f.node == self.me}
        for local in sorted({*self.eof, *self.ranks.codes}):
            code = self.ranks.codes.get(local)
            silent = not self.seen.get(local, set()) & {"end", "error"}
            if self._rank(local) in told or not (code or (silent and "start" in self.seen.get(local, set()))):
                continue
            self._fail(
                Failure(
                    kind="died",
                    node=self.me,
                    rank=self._rank(local),
                    time_ns=self.eof.get(local) or time.time_ns(),
                    code=code,
                    exception="its script had already ended" if "end" in self.seen.get(local, set()) else "",
                )
            )
        if not any(f.node == self.me for f in self.failures):
            self._blame_the_launcher()

    def _blame_the_launcher(self) -> None:
        assert self.ranks is not None
        for line in self.ranks.unshown:
            self.log.write("-", line)
        last = self.ranks.last_line.strip() or f"exit code {self.code}"
        missing = "No module named 'torch'" in last or "No module named torch" in last
        text = f"{sys.executable} has no torch" if missing else f"torchrun failed: {last}"
        taken = any("EADDRINUSE" in line or "ddress already in use" in line for line in self.ranks.unshown)
        kind = "image" if missing else "infra" if taken else "user_error"
        self._fail(
            Failure(kind="setup", node=self.me, time_ns=time.time_ns(), exception=text, code=self.code, category=kind)
        )

    # ------------------------------------------------------------------------------------------- failing and stopping

    def _fail(self, failure: Failure) -> None:
        self.failures.append(failure)
        if self.me != 0:
            self._tell({"t": "failed", "failures": [failure.to_dict()]})
        self._stop()

    def _stop(self) -> None:
        """Something failed somewhere: this node's ranks are stopped, and node 0 stops everyone."""
        if self.stopping is None:
            self.stopping = time.monotonic()
            if self.me == 0:
                self.link.send_all({"t": "stop"})

    def _tick(self) -> None:
        self.log.tick()
        now = time.monotonic()
        running = self.ranks is not None and self.code is None
        if running:
            self._blame_known_codes()
            self._escalate(now)
        if self.site.supervisor and os.getppid() != self.site.supervisor and self.stopping is None:
            text = "the run's supervisor was killed"
            self._fail(self._setup(text, "infra"))
        if self.go is not None and self.mirror is not None and not self.released:
            self._watch_for_stall(now)

    def _blame_known_codes(self) -> None:
        """torchrun has said that a rank ended badly, but may wait half a minute for the ones that hang."""
        assert self.ranks is not None
        if self.stopping is None and any(self.ranks.codes.values()) and not self.ranks.lone:
            time.sleep(0.1)  # the rank's own word may still be in its pipe
            with contextlib.suppress(queue.Empty):
                while True:
                    self._handle(*self.inbox.get_nowait())
            if self.code is None and not self.failures:
                self._blame_the_silent()

    def _escalate(self, now: float) -> None:
        """SIGTERM, then SIGKILL: soon after a failure; near the end of the grace after a notice."""
        assert self.ranks is not None
        term = kill = float("inf")
        if self.stopping is not None:
            term, kill = self.stopping + STOP_TERM_SECONDS, self.stopping + STOP_KILL_SECONDS
        elif self.preempted is not None:
            reserve = min(RESERVE_SECONDS, self.site.stop_grace * GRACE_RESERVE)
            term = self.preempted + self.site.stop_grace - reserve
            kill = term + reserve / 3
        if now >= kill and self.signalled < 2:
            self.signalled = 2
            self.ranks.kill()
        elif now >= term and self.signalled < 1:
            self.signalled = 1
            self.stopped_ns = time.time_ns()
            self.ranks.signal(signal.SIGTERM)

    def _watch_for_stall(self, now: float) -> None:
        limit = self.context["stall_timeout"]
        active = max(self.log.last, self.mirror.last if self.mirror else 0.0, self._metrics_changed(now))
        if active > self.sent_alive and now - self.sent_alive >= min(ALIVE_SECONDS, limit / 4 or ALIVE_SECONDS):
            self.sent_alive = now
            self._tell({"t": "alive"})
        if self.me == 0 and limit and not self._over() and now - self.last_alive > limit:
            self._stalled(limit)

    def _metrics_changed(self, now: float) -> float:
        try:
            return now - (time.time() - self._space.metrics.stat().st_mtime)
        except OSError:
            return 0.0

    def _stalled(self, limit: int) -> None:
        """Node 0: no rank of any node has shown a sign of life; every rank shows its stacks first."""
        self.link.send_all({"t": "stacks"})
        self._on_stacks(0, {})
        time.sleep(1.0)
        text = f"no line, metric or checkpoint from any rank for {limit} s"
        self._fail(Failure(kind="stalled", node=0, time_ns=time.time_ns(), exception=text, category="stalled"))

    # -------------------------------------------------------------------------------------------------------- the end

    def _finish(self) -> str:
        """Mirror, agree, record. The outcome of this node."""
        clean = self.code == 0 and not self.failures
        if self.ranks is not None:
            self.ranks.kill()  # whatever the ranks left running
        if self.mirror is not None:
            self._finish_mirror(self.mirror, clean)
        if self.me == 0:
            outcome = self._conclude()
        else:
            outcome = self._outcome()
            self._record(outcome, root_cause(self._own_failures(), stopped_ns=self.stopped_ns), decided=False)
            done = {"t": "done", "outcome": outcome, "failures": [f.to_dict() for f in self.failures]}
            self._tell(done)
            self._pump(lambda: self.released or 0 in self.gone, None if clean else time.monotonic() + NODE_0_SECONDS)
        if self.mirror is not None:
            self.mirror.stop()
        return outcome

    def _finish_mirror(self, mirror: Mirror, clean: bool) -> None:
        """Until all is mirrored, or nothing has moved for too long."""
        mirror.finish(clean=clean)
        quiet = CLEAN_WAIT_SECONDS if clean else FAILED_WAIT_SECONDS
        end = self._grace_end()
        mirror.last = time.monotonic()
        self._pump(lambda: mirror.idle.is_set() or 0 in self.gone or time.monotonic() > min(end, mirror.last + quiet))
        if not mirror.idle.is_set():
            self.log.say("not everything could be mirrored")
            if clean:
                self._fail(self._setup("its results could not all be mirrored to the store", "infra"))

    def _grace_end(self) -> float:
        """When the platform will kill this node (monotonic seconds), a little early; never, unless it was told so."""
        return float("inf") if self.preempted is None else self.preempted + self.site.stop_grace - 2.0

    def _conclude(self) -> str:
        """Node 0: wait for every node, name the root cause, let all go."""
        others = set(range(1, self.nodes))
        if self.attempt and self.nodes > 1:
            self._pump(lambda: others <= self._accounted() or self._broken() or time.monotonic() > self._grace_end())
            if self._broken():
                self._pump(lambda: others <= self._accounted(), time.monotonic() + PEERS_SECONDS)
        outcome = self._outcome()
        if outcome == "succeeded" and any(m.get("outcome") == "preempted" for m in self.peers.values()):
            outcome = "preempted"
        cause = root_cause(self.failures, stopped_ns=self.stopped_ns) if outcome == "failed" else None
        if cause is not None:
            self.log.say(f"failed: {summary(cause)}")
        else:
            self.log.say(outcome)
        self._record(outcome, cause, decided=True)
        self.link.send_all({"t": "exit", "outcome": outcome})
        time.sleep(0.2 if self.nodes > 1 else 0)
        return outcome

    def _accounted(self) -> set[int]:
        return {n for n, m in self.peers.items() if "outcome" in m} | self.gone

    def _own_failures(self) -> list[Failure]:
        return [f for f in self.failures if f.node == self.me or f.kind == "lost"]

    def _outcome(self) -> str:
        if self.preempted is not None and not any(self._real(f) for f in self.failures):
            return "preempted"
        if self.failures:
            return "failed"
        if self.stopping is not None:
            return "stopped"
        return "succeeded" if self.code == 0 else "preempted" if self.preempted is not None else "stopped"

    def _real(self, failure: Failure) -> bool:
        """A failure that was not merely the way a node told to stop came down."""
        late = self.stopped_ns is not None and failure.time_ns > self.stopped_ns
        return failure.kind in ("error", "setup", "stalled") and not failure.consequence and not late

    def _record(self, outcome: str, cause: Failure | None, *, decided: bool) -> None:
        oom = oom_kills() > self.oom_before
        line = summary(cause) if cause else ""
        record = {
            "protocol": 1,
            "attempt": self.attempt,
            "node": self.me,
            "outcome": outcome,
            "category": category(cause, oom_kill=oom) if cause else "preempted" if outcome == "preempted" else "",
            "reason": line or ("the platform stopped this node" if outcome == "preempted" else ""),
            "failure": cause.public() if cause else None,
            "started": self.started,
            "ended": time.time(),
            "lines": self.log.lines,
            "resumed_from": self.resumed,
            "decided": decided,
        }
        self.log.flush()
        try:
            folder = self.live / "exit"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{self.attempt or self.k}-node-{self.me}.json").write_text(json.dumps(record), encoding="utf-8")
            if self.site.failure_file and line:
                Path(self.site.failure_file).write_text(line, encoding="utf-8")
        except OSError as exc:
            sys.stderr.write(f"cloudtrain: cannot write the exit record: {exc}\n")
