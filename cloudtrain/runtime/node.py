"""One node of a run, from the first byte of context to the exit record.

Node 0 decides for all: the attempt's number, the checkpoint to resume from, when to start, the root cause and when all
may leave. All events arrive in one inbox, handled by one thread.
"""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from ..errors import CloudtrainError, PlatformError, SpecError, StorageError, reason_of
from ..provider_api.node import NodeEnvironment
from ..validate import duration
from . import stall
from .archive import Archive
from .cause import BROKEN_GPU, Failure, category, failure_line, real, root_cause, silent_deaths, with_codes
from .checkpoints import Watch
from .commits import Commits
from .decisions import Notice, conclude, hear, node_outcome, restore_verdict, signal_due, with_reports
from .history import FIRST, Start, restart_of
from .host_facts import Clock, kill_users, machine_name, oom_kills
from .idle import IdleGpus
from .launch import Ranks, reap
from .link import Link
from .logs import LogWriter
from .mirror import KINDS, Mirror, nothing
from .mounts import in_thread
from .notices import watch
from .record import UNMIRRORED, reason_of_end, write_cause, write_record
from .resume import Resume
from .timings import TIMINGS
from .uploads import Uploads
from .usage import UsageSampler
from .workspace import Workspace

T = TypeVar("T")
Message = dict[str, Any]


class Node:
    """One node. ``inbox`` takes ``(node, message)``: -1 is this process (signals), our own number the ranks' events."""

    def __init__(
        self,
        *,
        context: Mapping[str, Any],
        site: NodeEnvironment,
        attempt: int,
        key: bytes,
        inbox: queue.SimpleQueue[tuple[int, Message]],
    ) -> None:
        self.context, self.site, self.k, self.inbox = context, site, attempt, inbox
        self.me, self.nodes, self.topology = site.topology.node_rank, site.topology.nodes, site.topology
        self.live = Path(site.paths["live"]).absolute()
        self.log = LogWriter(node=self.me, flush_seconds=site.flush_seconds)
        self.link = Link(
            node=self.me,
            nodes=self.nodes,
            addr=self.topology.master_addr,
            port=site.link_port or self.topology.master_port + 1,
            key=key,
            inbox=inbox,
            join_timeout=site.join_timeout,
            ended=partial(reason_of_end, self.live, f"{site.attempt}-node-0"),
        )
        self.machine = site.machine or machine_name()
        self.machines = {self.me: self.machine}  # the names of the machines that this node knows: node 0 those of all
        agent = site.agent
        objects = agent.objects if agent is not None else None
        self.archive = Archive(self.live, objects, temporary=site.temporary) if objects is not None else None
        self.uploads = Uploads(self.live, agent, say=self.log.say) if agent is not None else None
        self.resume = self._make_resume()
        self.attempt = self.resumed = ""
        self.notice = Notice()
        self.space: Workspace | None = None
        self.started, self.clock = time.time(), Clock()
        self.failures: list[Failure] = []
        self.seen: dict[int, set[str]] = {}
        self.eof: dict[int, int] = {}
        self.complete = False  # true if the script ended well before any notice
        self.stopping: float | None = None
        self.stopped_ns: int | None = None
        self.signalled = 0
        self.remarks: list[str] = []
        self.ranks: Ranks | None = None
        self.mirror: Mirror | None = None
        self.stall: stall.Stall | None = None
        self.usage: UsageSampler | None = None
        self.code: int | None = None
        self.peers: dict[int, Message] = {}
        self.gone: set[int] = set()
        self.released = self.lost = False
        self.go: Message | None = None
        self.start: Start | None = None
        self._recorder, self._hangs = ThreadPoolExecutor(1, thread_name_prefix="record"), False
        """Thread for the last writes to the store: an earlier record must not come after a later one."""
        self.oom_before = oom_kills()
        self._handlers = self._make_handlers()

    def _make_resume(self) -> Resume:
        planned = self.context.get("planned_nodes")
        return Resume(
            live=self.live,
            given=self.site.paths.get("resume"),
            url=self.context["resume"],
            source=self.context.get("resume_source"),
            say=self.log.say,
            archive=self.archive,
            marks=self.site.marks,
            nodes=(planned, self.nodes) if planned else None,
        )

    # -------------------------------------------------------------------------------------------------- the whole run

    def run(self) -> int:
        """Run the node. Return the exit code for the platform."""
        try:
            try:
                self.link.open()
            except PlatformError as exc:  # the others read it in node 0's record
                self._fail(self._trouble(exc))
            for number, look in enumerate(self.site.notices):
                watch(look, partial(self._heard_of, number))
            if self.me == 0:
                find = partial(restart_of, self.live, self.k, self.site.restart)
                self._begin(self.site.attempt or in_thread(find, [self.live]) or "")
            self._prepare_and_join()
            if self.go is not None and not self._over():
                self._launch()
                self._pump(lambda: self.code is not None)
            outcome = self._finish()
        finally:
            if self.ranks is not None:
                self.ranks.kill()
            if self.mirror is not None:
                self.mirror.stop()
            self.link.close()
            self._in_time(self.log.stop)
            if self.uploads is not None:
                self.uploads.finish(min(TIMINGS.last_uploads, max(0.0, self._grace_end() - time.monotonic())))
                self.uploads.stop()
            if self.space is not None:
                shutil.rmtree(self.space.folder, ignore_errors=True)
            if self._orphaned():  # the supervisor would do it
                kill_users(Path(self.site.scratch[0]))
                shutil.rmtree(self.site.scratch[0], ignore_errors=True)
            reap()
        return self._exit_code(outcome)

    def _exit_code(self, outcome: str) -> int:
        word = outcome if outcome in ("succeeded", "preempted") else "lost" if self.lost else "failed"
        return self.site.exit_code.get(word, self.site.exit_code["failed"])

    def _over(self) -> bool:
        return self._broken() or self.notice.since is not None

    def _broken(self) -> bool:
        return bool(self.failures) or self.stopping is not None

    def _begin(self, attempt: str) -> None:
        if not self.attempt:
            self.log.start()
        self.attempt = attempt
        self.log.begin(attempt, self.live / "logs" / attempt / f"node-{self.me}", temporary=self.site.temporary)

    # ------------------------------------------------------------------------------------------ before the first rank

    def _prepare_and_join(self) -> None:
        try:
            self.space = Workspace(context=self.context, site=self.site, log=self.log, wait=self._pump_unless_over)
            self.space.fill()
            if found := self.space.gpu_trouble():
                self._fail(self._setup(*found))
        except (CloudtrainError, OSError) as exc:
            self._fail(self._trouble(exc))
        if self.me != 0:
            self._pump(lambda: bool(self.attempt) or 0 in self.gone or self._unmet(), self._join_deadline())
        self._answer("ready")
        if self.me == 0:
            everyone = set(range(self.nodes))
            self._pump(lambda: set(self.peers) >= everyone or self._over(), self._join_deadline())
            if not self._over() and set(self.peers) != everyone:
                missing = ", ".join(f"node {n}" for n in sorted(everyone - set(self.peers)))
                waited = duration(self.site.join_timeout)
                why = f"never came in {waited} (missing: {missing} of {self.nodes} nodes)"
                self._fail(self._lost(why, min(everyone - set(self.peers))))
            if self.context.get("node_check") and not self._over():
                self._check_all()
            try:
                if not self._over():
                    self._agree_on_resume()
            except (CloudtrainError, OSError) as exc:
                self._fail(self._trouble(exc))
            self.peers = {n: message for n, message in self.peers.items() if "outcome" in message}  # those have left
        else:
            self._pump(lambda: bool(self.peers) or self._told())
            if self.peers:  # node 0 asks for the check, and for nothing else
                self._check_this_node()
            self._pump(self._told)

    def _told(self) -> bool:
        """Return whether node 0 has decided, or never will."""
        return self.go is not None or self.released or self._over() or 0 in self.gone

    def _check_all(self) -> None:
        """Let every node run `node_check`, and wait for the answers."""
        self.log.say(f"checking {self.nodes} node{'s' if self.nodes > 1 else ''} before the start (node_check)")
        began = time.monotonic()
        self.peers.clear()
        self.link.send_all({"t": "check", "failures": []})
        self._check_this_node()
        self._pump(lambda: len(self.peers) == self.nodes or self._over())
        if not self._over():
            self.log.say(f"the node check passed in {time.monotonic() - began:.0f} s")

    def _check_this_node(self) -> None:
        from .preflight import check_failure

        try:
            found = self._space.check(self.attempt, self._pump, self._over)
            failure = check_failure(found, self.me, self.machines)
        except (OSError, CloudtrainError) as exc:
            found, failure = [], self._setup(f"the node check cannot run: {exc}", "infra")
        if self.notice.since is None:  # else the processes may have ended because of it
            for note in (item.text for item in found if not item.category):
                self.log.say(f"node check: {note}")
            if failure is not None:
                self._fail(failure)
        self._answer("checked")

    def _pump_unless_over(self, until: Callable[[], bool]) -> None:
        self._pump(lambda: until() or self._over())

    def _listening(self, work: Callable[[], T]) -> T | None:
        """Return ``work()``, called in a thread: a store may be slow, and a notice must be heard meanwhile.

        Return None if the node must leave before its end. Raises what ``work`` raises, and `StorageError` if the folder
        of the run or of ``resume_from`` does not answer.
        """
        return in_thread(work, [self.live, *self.resume.given], self._pump_unless_over)

    def _join_deadline(self) -> float:
        return time.monotonic() + self.site.join_timeout

    def _agree_on_resume(self) -> None:
        """Find, on node 0, the newest complete checkpoint that every node can restore, or none; then start all."""
        tried, candidates = 0, self.resume.candidates()
        direct = self._listening(lambda: self.resume.direct(self._space)) if self.attempt != FIRST else None
        for name, saved, message in iter(lambda: self._listening(lambda: next(candidates, None)), None):
            if direct is not None and direct.saved >= saved:
                break
            self.peers.clear()
            self.link.send_all(message)
            self.resume.begin(message, self._space, self._tell)
            self._pump(lambda: self.me in self.peers or self._over())  # the others have it from then on
            self._pump(lambda: len(self.peers) == self.nodes or self._over(), self._join_deadline())
            if self._over():
                return
            verdict, why = restore_verdict(self.peers, self.nodes)
            if verdict == "pass":
                tried += 1
                self.resume.pass_over(message)
                self.log.say(f"{why}; falling back to the checkpoint before")
                continue
            if verdict == "go":
                self._go(resume=name, saved=saved)
            elif verdict == "late":
                waited = duration(self.site.join_timeout)
                self._fail(self._lost(f"has not restored checkpoint {name} in {waited}", why))
            else:
                self._fail(self._setup(why, "infra"))
            return
        if self._over():
            return
        if direct is not None:
            self._go(url=direct.key, saved=direct.saved)
        elif why := self.resume.fallback(tried)[1]:
            self._fail(self._setup(why, "user_error"))
        else:
            self._go()

    def _go(self, *, resume: str = "", url: str = "", saved: float | None = None) -> None:
        self.go = {"t": "go", "resume": resume, "url": url, "saved": saved}
        self.link.send_all(self.go)

    # ------------------------------------------------------------------------------------------------------ the ranks

    def _launch(self) -> None:
        assert self.go is not None
        space = self._space
        if not self.go["resume"]:
            self.resume.clear()
        watch = space.watch()
        self.resume.set_aside(watch)
        name, url = self.go["resume"], self.go["url"]
        resume = str(self.resume.path) if name else url or self.resume.fallback(0)[0]
        self.resumed = url.rpartition("/")[2] or (resume and self.resume.title(name))
        try:  # before anything is mirrored: half of an artifact must not replace the whole one
            self._listening(lambda: space.bring_back(self.live))
            if self.me == 0 and not self._over():
                self._listening(self._note_start)
        except StorageError as exc:
            self._fail(self._trouble(exc))
        if self._over():
            self.code = 1
            return
        self._watch_the_script(space, watch)
        try:
            self.ranks = space.start(
                attempt=self.attempt, resume=resume, emit=lambda message: self.inbox.put((self.me, message))
            )
            space.note_group(self.ranks.pid)
        except (OSError, CloudtrainError) as exc:
            name = self.context["entry_point"] or self.context["args"][0]
            why = space.readable(reason_of(exc)).removesuffix(f": {name}")
            self._fail(self._setup(f"cannot start {name}: {why}", "user_error"))
            self.code = 1

    def _note_start(self) -> None:
        """Record the attempt's start, on node 0."""
        assert self.go is not None
        start = Start(self.live, self.attempt, started=self.started, temporary=self.site.temporary)
        lost = start.begin(resumed=self.resumed, saved=self.go["saved"], direct=bool(self.go["url"]))
        begins = f"resuming from {self.resumed}" if self.resumed else "a fresh start"
        self.log.say(f"attempt {self.attempt}: {begins}{lost}")
        self.start = start

    def _watch_the_script(self, space: Workspace, watch: Watch) -> None:
        """Start the mirror of the script's files and the watch for a silence. Entries of ``watch`` were restored."""
        self.mirror = mirror = Mirror(
            node=self.me,
            attempt=self.attempt,
            live=self.live,
            watch=watch,
            artifacts=space.artifacts,
            metrics=space.metrics,
            usage=space.usage,
            flush_seconds=self.site.flush_seconds,
            send=self.link.send,
            peers=self._live_nodes,
            say=self.log.say,
            links=space.folder / "links",
            outputs=space.outputs,
            commits=self._commits() if self.me == 0 else None,
            skip={name: entry.signature for name, entry in watch.entries().items()},
            shapes=self.resume.shapes,
            uploads=self.uploads,
            clock=self.clock,
        )
        mirror.start()
        rule = self.context.get("min_gpu_util")
        self.usage = UsageSampler(space.usage, disk=space.folder, on_gpu=self._on_gpu if rule else None)
        self.usage.start()
        self.stall = stall.Stall(
            node=self.me,
            processes=space.processes,
            limit=self.context["stall_timeout"],
            send=self.link.send,
            peers=self._live_nodes,
            last=lambda: max(self.log.last, mirror.sign()),
            look=lambda: space.look(self.ranks) if self.ranks is not None else None,
            idle=IdleGpus(rule) if rule else None,
            has_metrics=space.has_metrics,
        )

    def _on_gpu(self, used: float | str) -> None:
        """Tell node 0 of a sample, for ``min_gpu_util``; or say why there will be none."""
        if isinstance(used, str):
            self.log.say(f"min_gpu_util: nothing is known of this node's GPUs: {used}")
        else:
            self._tell({"t": "gpu", "used": used})

    def _commits(self) -> Callable[..., Commits]:
        """Return the maker of the run's commits, on node 0, but for what is the mirror's."""
        return partial(
            Commits,
            nodes=self.nodes,
            attempt=self.attempt,
            live=self.live,
            keep=self.context["keep_checkpoints"],
            damaged=self.resume.damaged,
            send=self.link.send,
            peers=self._live_nodes,
            say=self.log.say,
            temporary=self.site.temporary,
            marks=self.site.marks,
            archive=self.archive,
        )

    def _live_nodes(self) -> set[int]:
        return {self.me, *self.link.connected()}

    # --------------------------------------------------------------------------------------------------- what happens

    def _pump(self, until: Callable[[], bool], deadline: float | None = None) -> None:
        """Handle messages until ``until()``, or ``deadline`` (monotonic seconds)."""
        while not until() and (deadline is None or time.monotonic() < deadline):
            with contextlib.suppress(queue.Empty):
                sender, message = self.inbox.get(timeout=0.1)
                self._handle(sender, message)
            self._tick()

    def _handle(self, sender: int, message: Message) -> None:
        kind = message["t"]
        if "machine" in message:
            self.machines[sender] = message["machine"]
        if kind in KINDS and self.mirror is not None:
            self.mirror.take(sender, message)
        elif kind == "hold?":  # this node has not started its ranks, and may never
            self.link.send(sender, {**message, "t": "hold", **nothing(over=self._over())})
        elif kind in stall.KINDS and self.stall is not None:
            self.stall.take(sender, message)
        elif kind not in (*KINDS, *stall.KINDS):
            self._handlers[kind](sender, message)

    def _make_handlers(self) -> dict[str, Callable[[int, Message], None]]:
        """Return the handler of each kind of message that neither the mirror nor `stall` takes."""
        return {
            "hello": self._on_hello,
            "attempt": lambda sender, message: self._begin(message["attempt"]),
            "check": self._on_answer,
            "ready": self._on_answer,
            "restore": lambda sender, message: self.resume.begin(message, self._space, self._tell),
            "restored": self._on_answer,
            "checked": self._on_answer,
            "go": self._on_go,
            "rank": self._on_rank,
            "ended": self._on_ended,
            "failed": self._on_failed,
            "stop": lambda sender, message: self._stop(),
            "done": self._on_answer,
            "exit": self._on_exit,
            **dict.fromkeys(("signal", "notice", "preempt", "withdraw", "withdrawn"), self._on_notice),
            "lost": self._on_lost,
        }

    def _tell(self, message: Message) -> None:
        self.link.send(0, message)

    def _answer(self, kind: str) -> None:
        self._tell({"t": kind, "machine": self.machine, "failures": [f.to_dict() for f in self.failures]})

    def _on_hello(self, sender: int, message: Message) -> None:
        if self.me == 0:
            self.link.send(sender, {"t": "attempt", "attempt": self.attempt, "machine": self.machine})
            if self.stopping is not None:
                self.link.send(sender, {"t": "stop"})
            if self.notice.since is not None:
                self.link.send(sender, self.notice.for_newcomer())

    def _on_answer(self, sender: int, message: Message) -> None:
        if message["t"] != "restored" or "outcome" not in self.peers.get(sender, {}):  # it has left meanwhile
            self.peers[sender] = message
        self._on_failed(sender, message)

    def _on_go(self, sender: int, message: Message) -> None:
        self.go = message

    def _heard_of(self, source: int, why: str) -> None:
        """Pass on the answer of a source, in its thread."""
        self.inbox.put((-1, {"t": "notice", "source": source, "why": why, "at": time.monotonic()}))

    def _on_notice(self, sender: int, message: Message) -> None:
        leaving = self._broken() or (self._left() and not self.complete)
        self.notice, actions = hear(self.notice, message, me=self.me, now=time.monotonic(), leaving=leaving)
        carry_out: dict[str, Callable[[Any], None]] = {
            "tell": self._tell,
            "tell_all": self.link.send_all,
            "say": self.log.say,
            "warn": self._warn,
            "train_on": self._train_on,
        }
        for action in actions:
            carry_out[action.do](action.what)

    def _warn(self, _: None) -> None:
        """Let the script see that it may save a checkpoint now."""
        if self.uploads is not None and self.code is not None:
            self.uploads.hurry()
        with contextlib.suppress(OSError):
            if self.space is not None:
                self.space.preempt.touch()

    def _train_on(self, _: None) -> None:
        self.stopped_ns = None
        self._space.preempt.unlink(missing_ok=True)
        if self.ranks is not None:
            self.ranks.forget_notice(TIMINGS.withdrawn)

    def _left(self) -> bool:
        """Return whether a rank that this node knows of has ended, or was stopped."""
        ended = self.ranks is None or self.code is not None or any("end" in events for events in self.seen.values())
        return ended or self.signalled > 0 or any(m.get("outcome") == "preempted" for m in self.peers.values())

    def _check_leaving(self) -> None:
        """Let all nodes leave if a rank ended so soon after a withdrawal that it may have seen the notice."""
        if not self._broken():
            self._on_notice(self.me, {"t": "left"})

    def _on_failed(self, sender: int, message: Message) -> None:
        """Add a node's failures on node 0, in our time."""
        if sender == self.me:
            return
        items = message["failures"]
        here = [Failure(**{**item, "time_ns": self.link.here(sender, item["time_ns"])}) for item in items]
        self.failures = with_reports(self.failures, here)
        if items and not all(map(self._comes_of_the_notice, self.failures)):
            self._stop()

    def _on_exit(self, sender: int, message: Message) -> None:
        if self.go is None and message["outcome"] == "preempted":  # it was leaving when this node came
            self._on_notice(0, {"t": "preempt", "why": "node 0 got a stop signal", "node": 0, "of": ""})
        self.released, self.lost = True, message["lost"]

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

    def _trouble(self, exc: CloudtrainError | OSError) -> Failure:
        """Return the failure that ``exc`` is, before the ranks start."""
        why = self.space.readable(reason_of(exc)) if self.space is not None else reason_of(exc)
        return self._setup(why, "user_error" if isinstance(exc, SpecError) else "infra")

    def _lost(self, why: str, node: int) -> Failure:
        machine = self.machines.get(node, "")
        return Failure(kind="lost", node=node, time_ns=time.time_ns(), exception=why, machine=machine)

    def _on_rank(self, sender: int, message: Message) -> None:
        local, event = message["local"], message["event"]
        self.seen.setdefault(local, set()).add(event)
        if event == "start":
            self._space.note_group(message["pid"])
        elif event == "end":
            self._check_leaving()
        elif event == "eof":
            self.eof[local] = message["time_ns"]
            if self.mirror is not None and not self.seen[local] & {"end", "error"}:
                self.mirror.freeze(TIMINGS.frozen)
        elif event == "error":
            assert self.ranks is not None
            self._fail(self._space.failure(message, self.ranks.first_rank + local))

    def _on_ended(self, sender: int, message: Message) -> None:
        self.code = message["code"]
        if self.code == 0:
            self._check_leaving()
            self.complete = self.notice.since is None
        else:
            self._blame_the_silent()

    def _blame_the_silent(self, since_ns: int = 0) -> None:
        """Record ranks that ended badly without a report; or the launcher itself, if no rank ever began."""
        assert self.ranks is not None
        codes, first = self.ranks.codes, self.ranks.first_rank
        self.failures = with_codes(self.failures, self.me, codes, first_rank=first)
        known = {f.rank for f in self.failures if f.node == self.me}
        for failure in silent_deaths(self.me, self.seen, self.eof, codes, first_rank=first, since_ns=since_ns):
            if failure.rank not in known:
                self._fail(failure)
        if self.code is not None and not any(f.node == self.me for f in self.failures):
            for line in self.ranks.unshown:
                self.log.write("-", line)
            self._fail(replace(self._setup(*self.ranks.complaint(self.code)), code=self.code))

    # ------------------------------------------------------------------------------------------- failing and stopping

    def _fail(self, failure: Failure) -> None:
        failure = failure.without_secrets(self.log.redact)
        if self.ranks is not None and failure.rank is not None:
            notified = self.ranks.notified(failure.rank, failure.time_ns)
            last = self.ranks.last_line_of(failure.rank, failure.time_ns)
            failure = replace(failure, notified=notified, last_line=last)
        if failure.node == self.me and BROKEN_GPU.search(failure.exception):
            failure = replace(failure, machine=self.machine)
        if failure.kind in ("died", "error") and not real(failure, self.stopped_ns):
            self._check_leaving()
        self.failures.append(failure)
        if self.me != 0:
            self._tell({"t": "failed", "failures": [failure.to_dict()]})
        if not self._comes_of_the_notice(failure):
            self._stop()
        elif self.mirror is not None and not self._left_well(failure):
            self.mirror.freeze()  # the rank may have been saving, unless it chose its exit

    def _stop(self) -> None:
        """Stop this node's ranks after a failure anywhere. Node 0 stops all nodes."""
        if self.stopping is None:
            self.stopping = time.monotonic()
            if self.mirror is not None:
                self.mirror.freeze()
            if self.me == 0:
                self.link.send_all({"t": "stop"})

    def _tick(self) -> None:
        now = time.monotonic()
        if self.ranks is not None and self.code is None:
            self._blame_the_dead()
            self._escalate(now)
        if self.start is not None:
            self.start.look(self._space.metrics)
        if self._orphaned() and self.stopping is None:
            self._fail(self._setup("the run's supervisor was killed", "infra"))
        if self.stall is not None and not self.released and (failure := self.stall.tick(over=self._over())):
            self._fail(failure)

    def _orphaned(self) -> bool:
        """Return whether the supervisor that started this node is gone."""
        return bool(self.site.supervisor) and os.getppid() != self.site.supervisor

    def _blame_the_dead(self) -> None:
        """Record a dead rank at once. torchrun names it only after the others: half a minute later if they hang."""
        assert self.ranks is not None
        if self.stopping is None and (any(self.ranks.codes.values()) or self.ranks.closing_ns) and not self.ranks.lone:
            time.sleep(0.1)  # its report may still be in its pipe
            with contextlib.suppress(queue.Empty):
                while True:
                    self._handle(*self.inbox.get_nowait())
            if self.code is None and not self.failures:
                self._blame_the_silent(self.ranks.closing_ns - int(TIMINGS.closing * 1e9))

    def _escalate(self, now: float) -> None:
        """Send SIGTERM, then SIGKILL: soon after a failure; near the grace's end after a notice, but see `notify`."""
        assert self.ranks is not None
        since = self.notice.since
        if self.stopping is None and since is not None and not self.signalled and self.ranks.notify():
            self.stopped_ns = self.stopped_ns or time.time_ns()
        grace, signalled = self.site.stop_grace, self.signalled
        due = signal_due(stopping=self.stopping, since=since, stop_grace=grace, signalled=signalled, now=now)
        if due == "all":
            self.ranks.kill()
        elif due == "kill":
            self.signalled = 2
            self.ranks.signal(signal.SIGKILL)
        elif due == "term":
            self.signalled = 1
            self.stopped_ns = self.stopped_ns or time.time_ns()
            self.ranks.signal(signal.SIGTERM)

    # -------------------------------------------------------------------------------------------------------- the end

    def _finish(self) -> str:
        """Mirror, agree, record. Return the outcome of this node."""
        clean = self.code == 0 and not self.failures
        if self.ranks is not None:
            self.ranks.kill()  # any process that the ranks left
            if not clean:
                self._space.keep_dumps(self.attempt)
        if self._held():  # the machine may be gone before all files are mirrored
            self._record(self._outcome(), self._own_cause(), decided=False)
        if self.mirror is not None:
            self._finish_mirror(self.mirror, clean)
        if self.me == 0:
            outcome = self._conclude()
        else:
            outcome = self._outcome()
            self._record(outcome, self._own_cause(), decided=False)
            self._tell({"t": "done", "outcome": outcome, "failures": [f.to_dict() for f in self.failures]})
            patience = float("inf") if clean or outcome == "preempted" else TIMINGS.node_0
            end = time.monotonic() + (patience if self.attempt else 0.0)
            self._pump(lambda: self.released or self._alone(end))
            if not self.released:  # only now may the link know that node 0 is lost
                self.lost = (cause := self._own_cause()) is not None and cause.kind == "lost"
        return outcome

    def _finish_mirror(self, mirror: Mirror, clean: bool) -> None:
        """Wait until all files are mirrored, or nothing has moved for too long."""
        if self.usage is not None:
            self.usage.stop()
        if self.stall is not None:
            self.stall.drop_idle()
        mirror.finish(clean=clean or self._left_by_choice())
        # After a notice, a script that has saved often ends with a code of its own; `_late` keeps the grace.
        quiet = TIMINGS.mirror_clean if clean or self._outcome() == "preempted" else TIMINGS.mirror_failed
        if self.uploads is not None and (self.notice.since is not None or not clean):
            self.uploads.hurry()
        mirror.last = time.monotonic()
        self._pump(lambda: mirror.idle.is_set() or 0 in self.gone or self._late(mirror.last + quiet))
        if not mirror.idle.is_set():
            why = f": {mirror.trouble}" if mirror.trouble else ""
            self.log.say(f"not everything could be mirrored{why}")
            if clean and self.notice.since is not None:  # the grace is over; what was mirrored before is there
                self.remarks.append(f"{UNMIRRORED}{why}")
            elif clean:
                category = "storage" if why else "infra"
                self._fail(self._setup(f"its results could not all be mirrored to the store{why}", category))
        elif clean and self.uploads is not None and (lost := self.uploads.given_up):
            text = f"not known to be in the store: checkpoint {', '.join(lost)}"
            if self.notice.since is not None or self.uploads.blind:
                self.remarks.append(text)
            else:
                self._fail(self._setup(text, "infra"))

    def _alone(self, end: float) -> bool:
        """Return whether a peer waits in vain for node 0. The platform may take that first, and this node after it."""
        if self._held():
            return time.monotonic() > self._grace_end() + TIMINGS.hold_slack
        return 0 in self.gone or self._late(end)

    def _grace_end(self) -> float:
        return self.notice.end(hold=self.site.hold, stop_grace=self.site.stop_grace)

    def _held(self) -> bool:
        return self.notice.held(self.site.hold)

    def _late(self, end: float = float("inf")) -> bool:
        return time.monotonic() > min(end, self._grace_end())

    def _unmet(self) -> bool:
        return self.notice.since is not None and self._late(self.notice.heard + TIMINGS.meet)

    def _conclude(self) -> str:
        """Wait on node 0 for every node, name the root cause, let all go."""
        if self.go is None and self.notice.since is not None:  # a peer that comes now gets the notice, too
            self._pump(lambda: self._met() or self._broken() or self._unmet())
        others = set(range(1, self.nodes)) if self.go is not None else self.link.connected()  # or it never came
        if self.attempt and self.nodes > 1:
            self._pump(lambda: others <= self._accounted() or self._broken() or self._late())
            if self._broken():  # a peer may be copying still
                began = time.monotonic()
                self._pump(lambda: others <= self._accounted() or self._in_vain(began))
        outcome, cause = conclude(
            self._outcome(),
            self.failures,
            others=others,
            outcomes={n: m["outcome"] for n, m in self.peers.items() if "outcome" in m},
            stopped_ns=self.stopped_ns,
            now_ns=time.time_ns(),
        )
        self.lost = cause is not None and cause.kind == "lost"
        if cause is not None and self.lost:
            cause = replace(cause, machine=self.machines.get(cause.node, ""))
        self.log.say(f"failed: {failure_line(cause)}" if cause is not None else outcome)
        if self.go is None and self.notice.since is not None:
            self.link.shut()
        record = self._record(outcome, cause, decided=True)
        posting = self._begin_post(record)
        if outcome == "preempted":
            self._hold()
        self.link.send_all({"t": "exit", "outcome": outcome, "lost": self.lost})
        self.link.let_go(self._grace_end())
        if posting is not None:
            posting.join(max(0.0, min(TIMINGS.webhook, self._grace_end() - time.monotonic())))
        return outcome

    def _begin_post(self, record: Mapping[str, Any]) -> threading.Thread | None:
        """Start to post the record to the job's webhook, if it has one."""
        if not self.context.get("webhook"):
            return None
        from .webhook import begin  # its imports slow the start of a node

        def say(line: str) -> None:  # the record has counted the lines of the run's log
            sys.stderr.write(f"cloudtrain: {line}\n")

        return begin(self.context, record, attempt=self.k, secrets=self.site.secrets, say=say)

    def _hold(self) -> None:
        """Keep all nodes for the platform to take, on node 0."""
        if self._held():
            nodes = ", ".join(f"node {n}" for n in sorted({n for n, _ in self.notice.standing}))
            self.log.say(f"waiting until the platform takes {nodes}, at most {self.site.hold:.0f} s from the notice")
            self._in_time(self.log.flush)
            self._pump(lambda: not self._held(), self._grace_end())

    def _in_vain(self, since: float) -> bool:
        """Return whether no node's copies have moved for so long that waiting for last messages is in vain."""
        return self._late(max(since, self.mirror.last if self.mirror is not None else 0.0) + TIMINGS.peers)

    def _met(self) -> bool:
        return len(self.link.connected() | self._accounted()) >= self.nodes - 1

    def _accounted(self) -> set[int]:
        return {n for n, m in self.peers.items() if "outcome" in m} | self.gone

    def _own_cause(self) -> Failure | None:
        own = [f for f in self.failures if f.node == self.me or f.kind == "lost"]
        return root_cause(own, stopped_ns=self.stopped_ns)

    def _outcome(self) -> str:
        return node_outcome(
            self.failures,
            stopped_ns=self.stopped_ns,
            noticed=self.notice.since is not None,
            complete=self.complete,
            saved=self._is_saved(),
            code=self.code,
            stopping=self.stopping is not None,
        )

    def _comes_of_the_notice(self, failure: Failure) -> bool:
        """Return whether a rank ended because of the notice: the others keep their grace then."""
        noticed = self.notice.since is not None
        return noticed and failure.kind in ("died", "error") and not real(failure, self.stopped_ns)

    def _is_saved(self) -> bool:
        """Return whether all results are mirrored, and no checkpoint is known to have missed the store."""
        missed = self.uploads is not None and bool(self.uploads.given_up) and not self.uploads.blind
        return (self.mirror is None or self.mirror.idle.is_set()) and not missed

    def _left_by_choice(self) -> bool:
        """Return whether all failures here are ranks that got a notice and, in their own time, exited with a code."""
        return bool(self.failures) and all(self._comes_of_the_notice(f) and self._left_well(f) for f in self.failures)

    def _left_well(self, failure: Failure) -> bool:
        """Return whether a rank chose its exit code. A code of the user's own command may come of a child's death."""
        return failure.chosen and self.ranks is not None and not self.ranks.bare

    def _in_time(self, work: Callable[[], object]) -> bool:
        """Call ``work`` in a thread, as the store may hang. Return whether it ended in time, like all work before."""
        left = 0.0 if self._hangs else min(TIMINGS.record, self._grace_end() - time.monotonic())
        done, hanging = wait([self._recorder.submit(work)], max(TIMINGS.record_least, left))
        self._hangs = bool(hanging)
        for each in done:
            each.result()
        return not self._hangs

    def _record(self, outcome: str, cause: Failure | None, *, decided: bool) -> dict[str, Any]:
        oom = oom_kills() > self.oom_before
        line = failure_line(cause) if cause else ""
        record = {
            "attempt": self.attempt or str(self.k),
            "node": self.me,
            "machine": self.machine,
            "outcome": outcome,
            "category": category(cause, oom_kill=oom) if cause else "preempted" if outcome == "preempted" else "",
            "reason": line or (self.notice.why or "a node got a stop signal" if outcome == "preempted" else ""),
            "failure": cause.public() if cause else None,
            "started": self.started,
            "lines": self.log.lines,
            "resumed_from": self.resumed,
            "told": self.notice.node if outcome != "succeeded" else None,
            "remarks": self.remarks,
            "decided": decided,
            "lost": decided and self.lost,
            "exit_code": self._exit_code(outcome) if decided else None,
        }
        if back := self.clock.set_back():
            record["set_back"] = back
        if cause:
            write_cause(self.site.failure_file, line)
        name, temporary = f"{self.attempt or self.k}-node-{self.me}", self.site.temporary or ".part"

        def store() -> None:
            self.log.flush()
            write_record(self.live, name, record, temporary=temporary)

        if not self._in_time(store):
            self.log.say("the store does not answer; the exit record may be missing there")
        return record
