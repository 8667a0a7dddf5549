"""Supervise a run on this host: a process that starts a job's nodes, applies its rules, and outlives the client.

It owns one folder (``request.json``, ``lock``, ``status.json``, ``out/<attempt>/node-<n>.log``); the process with the
lock is the supervisor. It writes the store's records there, and the client's information to ``status.json``. If the
store is remote, it keeps ``live/`` in step with it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path, PurePosixPath
from stat import S_ISDIR
from typing import Any, TextIO, TypeVar

from ..errors import EXIT_CODES, AuthError, CapacityError, CloudtrainError, PlatformError, SpecError, StorageError
from ..job.job import Job
from ..provider_api.launch_spec import LaunchRules, LaunchSpec, Mount
from ..provider_api.node_count import plan_attempt
from ..provider_api.protocol import FINAL, AttemptInfo, Layout, Provider, Request
from ..provider_api.registry import find_provider
from ..runs.attempts import AttemptPolicy, Ending, History, Next, Usage, exception_of
from ..runs.handover import nodes_of
from ..runs.outcome import records_of, was_lost
from ..runs.resume_nodes import nodes_that_restore
from ..runs.run import Run
from ..runtime.checkpoint_model import Checkpoint, newest_checkpoint, resumable
from ..runtime.checkpoints import COMMIT, complete
from ..runtime.record import UNMIRRORED
from ..settings.settings import NO_SETTINGS
from ..storage.errors import FinalError
from ..storage.files import Files, TransferOptions, files
from ..storage.local_disk import local_path
from ..storage.timings import CLIENT_TIMINGS
from ..store.store import Store
from ..validate import without_secrets
from . import Engine, NodeError, NodeHandle, boot_id, last_line, make_engine
from .fault_injection import Injection, InjectionPlan
from .node_folders import NodeFolders, states_below
from .supervised import SupervisedProvider, all_succeeded, exit_records, last_sign, locked, refuse, write_json
from .url_map import stand_in_for

T = TypeVar("T")

KILLED = (137, 143)  # exit codes of nodes that a platform itself ended, by SIGKILL or SIGTERM
_UNFINISHED = re.compile(r"^\..*\.part$", re.DOTALL)
CHECKPOINTS, OUTPUTS = "checkpoints/", "outputs/"
CANCELLED = ("cancelled", "cancelled", "cancelled by the user")


def main(folder: str, engine: str) -> None:
    """Run the supervisor of ``folder``, unless another one does already. Secrets come as JSON on stdin."""
    secrets = json.load(sys.stdin)
    sys.stderr = SupervisorLog(sys.stderr)
    place = Path(folder)
    # Another supervisor holds the lock for good, and will write its status; a reader holds it for a moment.
    with locked(place / "lock", float("inf"), (place / "status.json").exists) as free:
        if not free:
            return
        supervisor = Supervisor(folder=place, engine=engine, secrets=secrets, environ=os.environ)
        try:
            supervisor.check()
        except CloudtrainError as exc:
            refuse(place / "refused.json", exc)
        else:
            supervisor.run()


class SupervisorLog:
    """A log on the store's disk: if that is full, lines come later or are lost, and no thread ends for it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()


class Supervisor:
    """The supervisor of one run: every attempt, from ``request.json`` in ``folder`` to the final ``status.json``."""

    def __init__(self, *, folder: Path, engine: str, secrets: Mapping[str, str], environ: Mapping[str, str]) -> None:
        self.folder, self.secrets = folder, dict(secrets)
        self.request = Request.from_dict(json.loads((folder / "request.json").read_bytes()))
        self.engine: Engine = make_engine(engine, folder=folder, run=self.request.run, environ=environ)
        store, _, self.run_id = self.request.run.rpartition("/runs/")
        self.store = Store(store)
        self.native_id = f"{socket.gethostname()}:{folder}"
        self.attempts: list[dict[str, Any]] = []
        self.spent = self._before = 0.0  # seconds of running: of all attempts, and of those of killed supervisors
        self._waited = 0.0  # seconds of waiting for the store or the disk
        self._limit = CLIENT_TIMINGS.store_silence  # the attempt's time limit, once it is known
        self.drills = InjectionPlan(self.request.body.get("drills", ()))
        self._machines = 0  # that a drill has left; 0: any number
        self._lost: set[int] = set()
        self._idle: list[Injection] = []
        self._had: tuple[str, ...] = ()
        """The newest checkpoints as the nodes started, or at a drill that waited for one."""
        self._again = ""
        self.state: dict[str, Any] = {
            "state": "running" if engine == "processes" else "pending",  # it may have to pull an image
            "reason": "",
            "category": "",
            "started": time.time(),
            "finished": None,
            "host": socket.gethostname(),
            "boot": boot_id(),
            "pid": os.getpid(),
            "ran": 0.0,  # seconds of running under this supervisor
        }

    @cached_property
    def record(self) -> dict[str, Any]:
        """The record run.json, which never changes. Raises the store's errors."""
        return self.store.run(self.run_id, needs=("provider", "settings", "job"))

    @cached_property
    def provider(self) -> Provider:
        """The provider in run.json."""
        return find_provider(self.record["provider"])(**self.record["settings"])

    def check(self) -> None:
        """Raise the error that keeps the run from starting at all: it then leaves no status."""
        moving = {key: value for key, value in self.record.get("moving", {}).items() if key in TransferOptions._fields}
        self.store = Store(self.store.url, moving=TransferOptions(**moving))
        if isinstance(self.provider, SupervisedProvider) and not (self.folder / "status.json").exists():
            self.provider.check(self.request)

    def run(self) -> None:
        """Run to the end. Never raises: an error becomes the run's reason."""
        if (self.folder / "status.json").exists():
            return  # a run is supervised once; its end, or its supervisor's, is on record
        self._write_status()
        mounts = _Mounts(folder=self.folder, store=self.store, run_id=self.run_id)
        try:
            succeeded = self._patiently(lambda: self._take_over(mounts))
            mounts.start_syncing()
            state, category, reason = ("succeeded", "", "") if succeeded else self._all_attempts(mounts)
        except CloudtrainError as exc:
            state, category, reason = "failed", "infra", exc.with_hint()
        except Exception as exc:  # noqa: BLE001  the last line of defence of an unattended process
            state, category, reason = "failed", "infra", f"the supervisor failed: {type(exc).__name__}: {exc}"
            sys.stderr.write(reason + "\n")
        reasons = [reason] if reason else []
        if late := ", ".join(drill.words for drill in self.drills.left):
            reasons.append(f"it had ended before {late}")
        if idle := ", ".join(drill.words for drill in self._idle):
            reasons.append(f"that node had ended before {idle}")
        self.engine.clean()
        try:
            mounts.stop_syncing(self._patiently)
        except CloudtrainError as exc:
            reasons.append(f"its files are still in {mounts.live} on {socket.gethostname()}: {exc}")
        self.state.update(state=state, category=category, reason="; ".join(reasons), finished=time.time())
        try:
            self._patiently(self._write_final)
        except StorageError as exc:  # clients see that this process has ended without a final status
            sys.stderr.write(f"{exc}; the run ended as {state}: {self.state['reason']}\n")
            return
        with contextlib.suppress(CloudtrainError):
            Run(store=self.store, run_id=self.run_id).result()

    def _write_status(self) -> None:
        """Write the clients' status. If the disk fails now, the next write replaces it: no reason to end a run."""
        with contextlib.suppress(StorageError):
            self._write_final()

    def _write_final(self) -> None:
        self.state.update(attempts=self.attempts, seen=time.time())
        write_json(self.folder / "status.json", self.state)

    def _patiently(self, work: Callable[[], T], *, final: bool = False) -> T:
        """Retry ``work()`` while the store or the disk fails, for `ClientTimings.store_silence` or until cancelled.

        With ``final``, not after a `FinalError`. Without: work may be lost, and a bucket that was there comes back.

        A store on this machine does not come back like a network: it may not make the run outlast its time limit.
        """
        patience = CLIENT_TIMINGS.store_silence
        if local_path(self.store.url) is not None:
            patience = min(patience, max(CLIENT_TIMINGS.local_store_silence, self._limit - self.spent - self._waited))
        deadline, pause = time.monotonic() + patience, 1.0
        while True:
            try:
                return work()
            except StorageError as exc:
                over = time.monotonic() > deadline or (self.folder / "cancel").exists()
                if over or (final and isinstance(exc, FinalError)):
                    raise
                sys.stderr.write(f"{exc}; trying again\n")
                if self.state["finished"] is None:  # else the reason is that of the end
                    self.state["reason"] = f"{exc}; trying again"
                    self._write_status()
                pause = min(pause, max(0.0, deadline - time.monotonic()))
                time.sleep(pause)
                self._waited += pause
                pause = min(max(pause, 1.0) * 2, 60.0)

    def _take_over(self, mounts: _Mounts) -> bool:
        """Close what killed supervisors of earlier attempts left: wait for their nodes to end, and keep the files.

        Return True if the nodes had all succeeded after all. Raises `PlatformError` if such a supervisor lives.
        """
        self._before, earlier = 0.0, dict[Path, int]()
        for attempt in reversed(range(self.request.attempt)):
            native = self.store.submitted(self.run_id, attempt)
            host, _, path = str(native["native_id"] if native else "").partition(":")
            if host == socket.gethostname() and (Path(path) / "status.json").exists():
                earlier.setdefault(Path(path), attempt)
        succeeded = False
        for folder, attempt in earlier.items():
            self._pending(f"waiting for the nodes of attempt {attempt}, whose supervisor was killed")
            with locked(folder / "lock", CLIENT_TIMINGS.lock) as free:
                if not free:
                    raise PlatformError(f"attempt {self.request.attempt} cannot start: attempt {attempt} still runs")
            # A client may be removing containers.
            with locked(folder / "clearing", CLIENT_TIMINGS.store_silence, lambda: self._cancelled(mounts)) as free:
                if not free:
                    raise StorageError(f"a client still clears up after attempt {attempt}")
                succeeded = self._close(folder, mounts) or succeeded
        self.spent = self._before
        self.drills.skip(self.spent)
        return succeeded

    def _close(self, earlier: Path, mounts: _Mounts) -> bool:
        """End the nodes of a killed supervisor, and record that end in its folder. Keep the files of a remote run.

        Return True if all nodes of its last start had succeeded.
        """
        state = json.loads((earlier / "status.json").read_bytes())
        self._before += state.get("ran", 0.0)
        if state["state"] in FINAL:
            return bool(state.get("nodes_succeeded"))
        self.engine.take_over(earlier, lambda: self._cancelled(mounts))
        rows, ended = state["attempts"], last_sign(earlier, state["seen"])
        for row in rows:
            row["ended"] = row["ended"] or ended
        succeeded = bool(rows) and all_succeeded(earlier, AttemptInfo(**rows[-1]))
        mounts.take_over(earlier)
        for name in ("mounts", "folders"):
            shutil.rmtree(earlier / name, ignore_errors=True)
        killed = "the run's supervisor was killed"
        state.update(state="failed", category="infra", reason=killed, finished=ended)
        state.update(taken_over=self.request.attempt, nodes_succeeded=succeeded)
        write_json(earlier / "status.json", state)
        return succeeded

    # ------------------------------------------------------------------------------------------------------- attempts

    def _all_attempts(self, mounts: _Mounts) -> tuple[str, str, str]:
        """Return (state, category, reason) of the run."""
        request, before = self.request, None
        while True:
            launch = self._patiently(partial(self._launch, request))
            self._limit = launch.rules.time_limit
            state, category, reason = self._attempt(request, launch, mounts)
            policy = AttemptPolicy(max_runtime=self._limit, retries=launch.rules.retries)
            history = self._patiently(partial(self._history, mounts, state, category, request))
            if not policy.retries_here(history):
                bound = history.bound if policy.is_bound(history) else ""
                return state, category, "; no further attempt: ".join(filter(None, [reason, bound]))
            ending = self._patiently(partial(self._ending, mounts))
            decision = policy.decide(history, ending=ending, before=before, used=Usage(seconds=self.spent))
            if not isinstance(decision, Next):
                return state, category, f"{reason}; no further attempt: {decision.reason}"
            if self._cancelled(mounts):
                return CANCELLED
            request, before = self._patiently(partial(self._next, request, decision)), ending

    def _launch(self, request: Request) -> LaunchSpec:
        """Return the nodes of an attempt. Fewer nodes may run longer for the same money, but the seconds of all
        attempts are one sum. So the first attempt, with the most nodes, sets the limit."""
        launch, first = self.provider.launch_spec(request), self.store.attempt_request(self.run_id, 0) or request
        most = min(launch.rules.time_limit, self.provider.launch_spec(first).rules.time_limit)
        return replace(launch, rules=replace(launch.rules, time_limit=most))

    def _history(self, mounts: _Mounts, state: str, category: str, request: Request) -> History:
        """Return the facts about the attempts so far."""
        wanted = self._job.resources
        history = History(state=state, category=category, newest=request.attempt, node_counts=wanted.node_counts)
        if not wanted.min_instance_count or state != "failed":
            return history
        requests = [self.store.attempt_request(self.run_id, k) for k in range(request.attempt + 1)]
        nodes, choices = tuple(nodes_of(item, wanted) for item in requests), (request.gpu_index,) * len(requests)
        history = replace(history, nodes=nodes, choices=choices)
        own = newest_checkpoint(mounts.complete(), self.store.direct(self.run_id))
        resume, stand_ins = Layout.from_dict(self.record["layout"]).resume, self.record["settings"].get("maps") or {}
        there = stand_in_for(resume, stand_ins, or_same=True) if resume else None
        counts, bound = nodes_that_restore(own, there, wanted.node_counts, store=self.store, settings=NO_SETTINGS)
        return replace(history, node_counts=counts, bound=bound)

    def _cancelled(self, mounts: _Mounts) -> bool:
        return (self.folder / "cancel").exists() or mounts.cancelled()

    def _next(self, request: Request, decision: Next) -> Request:
        """Return the request of the next attempt, recorded before any node starts."""
        number, layout = decision.number, Layout.from_dict(self.record["layout"])
        following = plan_attempt(self.provider, self._job, layout, number, request.gpu_index, nodes=decision.nodes)
        created = self.store.create_attempt(self.run_id, number, following)
        if not created and following != self.store.attempt_request(self.run_id, number):
            raise CloudtrainError(f"attempt {number} was started by another client")
        self.store.write_submitted(self.run_id, number, self.native_id)
        return following

    def _attempt(self, request: Request, launch: LaunchSpec, mounts: _Mounts) -> tuple[str, str, str]:
        """Run one attempt, with the platform's own restarts."""
        rules, restart = launch.rules, 0
        left = {"codes": rules.max_restarts, "preempted": rules.preemptions, "lost": rules.losses}
        most = dict(left)
        while True:
            if self._cancelled(mounts):
                return CANCELLED
            name = f"{request.attempt}.{restart}"
            entry = {"number": name, "native_id": self.native_id, "started": time.time(), "ended": None, "reason": ""}
            entry["nodes"] = len(launch.nodes)
            self.attempts.append(entry)
            self._again, resumed = "", ""
            try:
                state, category, reason, resumed = self._start(name, launch, mounts)
            except (NodeError, SpecError, AuthError, CapacityError, StorageError) as exc:
                # The nodes cannot start: the attempt's end, like any other.
                state, category, reason = "failed", _category_of(exc), exc.with_hint()
                if self._cancelled(mounts):
                    state, category, reason = CANCELLED
            entry.update(ended=time.time(), reason=reason or state, category=category, resumed_from=resumed)
            self._write_status()
            if not self._again:
                return state, category, reason
            left[self._again] -= 1
            if left[self._again] < 0:
                used = f"; {most[self._again]} restarts are used up" if most[self._again] else ""
                return "failed", category, f"{reason}{used}"
            restart += 1
            time.sleep(CLIENT_TIMINGS.restart)

    def _start(self, name: str, launch: LaunchSpec, mounts: _Mounts) -> tuple[str, str, str, str]:
        """Run one start of all nodes to its end; return (state, category, reason, resumed checkpoint)."""
        if self._machines and len(launch.nodes) > self._machines:
            raise CapacityError(f"drill: of machines for {len(launch.nodes)} nodes, {self._machines} are left")
        self.engine.prepare(launch, self._pending, lambda: self._cancelled(mounts))
        wanted = [mount for node in launch.nodes for mount in node.mounts]
        local = self._patiently(lambda: mounts.fetch(wanted), final=not self.spent)
        self.state.update(state="running", reason="")
        self._write_status()
        self._lost.clear()
        self._had = self._newest_checkpoint(mounts) if self.drills.left else ()
        stopped = "preempted"  # nodes that never started leave nothing
        run, lag, marks = self.request.run, launch.rules.sync_lag, launch.rules.sync_marks
        place, live, shared = self.folder / "folders", f"{run}/live", f"{run}/checkpoints"
        folders = NodeFolders(place, live=live, shared=shared, lag=lag, marks=marks)
        with self._on_disk():
            launch, local = folders.wired(launch, local)
        try:
            nodes = self.engine.start(launch, attempt=name, local=local, secrets=self.secrets)
            folders.start()
            try:
                stopped = self._watch(nodes, launch.rules, mounts, folders)
            finally:
                with contextlib.ExitStack() as ends:  # kills all of them, also if one kill raises
                    for node in nodes:
                        ends.callback(node.kill)
        finally:
            with self._on_disk():
                folders.finish(outputs=stopped != "preempted" and not self._lost)
        exits = self._exits(mounts)
        resumed = next((r["resumed_from"] for r in exits if r["resumed_from"]), "")
        return *self._judge(nodes, launch.rules, stopped, exits), resumed

    @contextlib.contextmanager
    def _on_disk(self) -> Iterator[None]:
        """Raise `StorageError` for a full or broken disk of the nodes' folders."""
        try:
            yield
        except OSError as exc:
            raise StorageError(f"cannot keep the nodes' folders in {self.folder}: {exc}") from None

    def _pending(self, reason: str) -> None:
        """Set the run pending, with the reason for the wait."""
        self.state.update(state="pending", reason=reason)
        self._write_status()

    def _watch(self, nodes: Sequence[NodeHandle], rules: LaunchRules, mounts: _Mounts, folders: NodeFolders) -> str:
        """Wait for all nodes to end; return why we ended them (``cancelled``, ``timeout``, ``peers``, or ``preempted``,
        by a drill), else ""."""
        began = time.monotonic()
        stopped, stop_at, failed_at, signalled_at, beat = "", 0.0, 0.0, 0.0, began
        patience, missed = CLIENT_TIMINGS.finish_unmet, False
        first: int | None = None  # the node that gets the stop signal before the others are
        while any(node.poll() is None for node in nodes):
            now = time.monotonic()
            if not stopped:
                late = self.spent + now - began > rules.time_limit
                stopped = "cancelled" if self._cancelled(mounts) else "timeout" if late else ""
                if not stopped and (first := self._drill(self.spent + now - began, nodes, mounts, folders)) is not None:
                    stopped = "preempted"
                if rules.primary is not None and nodes[rules.primary].poll() == 0:
                    for node in nodes:
                        node.kill()
                if not stopped and not failed_at and any(node.poll() not in (None, 0) for node in nodes):
                    failed_at = now
                if not stopped and failed_at and now - failed_at > patience:
                    if patience == CLIENT_TIMINGS.finish_unmet and self._met():
                        patience = CLIENT_TIMINGS.finish
                    else:
                        stopped = "peers"
                if failed_at and not missed and now - failed_at > CLIENT_TIMINGS.finish_lost:
                    # A node that has ended says that another one was lost: that one may stand still.
                    missed = any(was_lost(record["failure"]) for record in self._exits(mounts))
                    for node in nodes if missed else ():
                        node.kill()
                stop_at = now + rules.stop_grace
            if stopped and now > stop_at:
                for node in nodes:
                    node.kill()
            elif stopped and now - signalled_at > CLIENT_TIMINGS.stop_again:
                signalled_at = now
                for number, node in enumerate(nodes):
                    if first in (None, number) or nodes[first or 0].poll() is not None:
                        node.signal(rules.stop_signal)
            if now - beat > CLIENT_TIMINGS.heartbeat:
                beat = now
                self.state["ran"] = self.spent - self._before + now - began
                self._write_status()
            time.sleep(CLIENT_TIMINGS.node_look)
        self.spent += time.monotonic() - began
        self.state["ran"] = self.spent - self._before
        return stopped

    def _drill(self, seconds: float, nodes: Sequence[NodeHandle], mounts: _Mounts, folders: NodeFolders) -> int | None:
        """Run the drill due after ``seconds`` of running; return the node whose machine it takes back, if any."""
        drill = self.drills.due(seconds, lambda: self._newest_checkpoint(mounts) not in ((), self._had))
        if drill is None:
            return None
        if drill.after is None:
            self._had = self._newest_checkpoint(mounts)
        sys.stderr.write(f"drill: {drill.words}\n")
        if drill.node >= len(nodes):  # this attempt has fewer
            self._idle.append(drill)
            return None
        if drill.kind != "kill":
            self._machines = drill.node if drill.kind == "shortage" else self._machines
            return drill.node
        if nodes[drill.node].poll() is not None:
            self._idle.append(drill)
        else:
            self._lost.add(drill.node)
            folders.lose(drill.node)
            nodes[drill.node].kill()
        return None

    def _met(self) -> bool:
        """Return whether node 0 has started all nodes, which it prints before any rank's line."""
        name = self.attempts[-1]["number"]
        with contextlib.suppress(OSError), open(self.folder / "out" / name / "node-0.log", "rb") as stream:
            return re.search(rb"cloudtrain: attempt \d+\.\d+:", stream.read(1 << 16)) is not None
        return False

    def _exits(self, mounts: _Mounts) -> list[Mapping[str, Any]]:
        """Return the exit records of the newest attempt so far.

        Nodes number an attempt by what they find in live/, where a start that was cut short has left nothing.
        """
        last = self.attempts[-1]
        return list(records_of(AttemptInfo(number=last["number"], started=last["started"]), exit_records(mounts.live)))

    def _judge(
        self, nodes: Sequence[NodeHandle], rules: LaunchRules, stopped: str, exits: Sequence[Mapping[str, Any]]
    ) -> tuple[str, str, str]:
        """Return (state, category, reason) of one start of all nodes."""
        codes = [node.poll() or 0 for node in nodes]
        decided = next((r for r in exits if r["decided"]), None)
        done = decided is not None and decided["outcome"] == "succeeded"
        primary = rules.primary is not None and codes[rules.primary] == 0
        # On some platforms, nodes exit with 0 after a stop signal.
        if (done and not any(codes)) or (stopped in ("", "peers") and (primary or not any(codes))):
            return "succeeded", "", ""
        if stopped == "cancelled":
            return CANCELLED
        if stopped == "timeout":
            remarks = (remark for record in exits for remark in record["remarks"])
            if unkept := next((remark for remark in remarks if remark.startswith(f"{UNMIRRORED}: ")), ""):
                return "failed", "storage", f"{unkept}; max_runtime is used up"  # only its store kept the node
            if rules.time_limit == self._job.max_runtime:
                return "failed", "timeout", f"max_runtime of {rules.time_limit:.0f} s is used up"
            return "failed", "timeout", f"the limit of {rules.time_limit:.0f} s, less than max_runtime, is used up"
        notice = next((r["reason"] for r in exits if r["decided"] and r["outcome"] == "preempted"), "")
        if stopped == "preempted":
            self._again = "preempted"
            return "failed", "preempted", notice or "the platform took its machines back"
        # A node's exit code, or a shell's code for a killed node.
        ends = {n: 128 - code if code < 0 else code for n, code in enumerate(codes) if n not in self._lost}
        if self._lost and not (rules.restart_on and set(ends.values()) - {0, *rules.restart_on, *KILLED}):
            self._again = "lost"
            return "failed", "infra", f"node {min(self._lost)} was lost"
        if not set(ends.values()) - {0, *rules.restart_on}:
            self._again = "codes"
            if notice or decided is None or decided["outcome"] != "failed":
                return "failed", "preempted", notice or "a node got a stop signal"
        silent = self._silent(nodes, exits)
        bad = [r for r in exits if r["outcome"] == "failed"]
        record = next((r for r in bad if r["decided"]), next(iter(bad), None))
        if record is not None and not (silent and was_lost(record["failure"])):
            category = record["category"] if record["category"] in EXIT_CODES else "infra"
            return "failed", category, record["reason"]
        # Its peers report that it was lost; its own end is known here.
        category, reason = silent or ("infra", "the nodes ended without a message")
        return "failed", category, reason

    def _silent(self, nodes: Sequence[NodeHandle], exits: Sequence[Mapping[str, Any]]) -> tuple[str, str] | None:
        """Return (category, reason) of the first node that was killed whole: it left no record."""
        reporting = {record["node"] for record in exits}
        number = next((n for n, node in enumerate(nodes) if node.poll() and n not in reporting), None)
        if number is None:
            return None
        node, code = nodes[number], nodes[number].poll() or 0
        if node.trouble is not None:
            return node.trouble[0], f"node {number}: {node.trouble[1]}"
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        last = last_line(self.folder / "out" / self.attempts[-1]["number"] / f"node-{number}.log")
        return "infra", f"node {number} {how}" + (f": {last}" if last else "")

    def _ending(self, mounts: _Mounts) -> Ending:
        """Return how the newest attempt ended, by its nodes' decision; without one, nothing is known of the script."""
        exits = self._exits(mounts) if self.attempts else []
        root = next((r for r in exits if r["decided"]), None)
        exception = exception_of(root["category"], root["reason"], root["failure"]) if root is not None else ""
        return Ending(exception=exception, checkpoint=self._newest_checkpoint(mounts))

    @property
    def _job(self) -> Job:
        """The job, as its provider runs it. A limit of money or GPU hours may be shorter than its ``max_runtime``."""
        return Job.from_dict(self.record["job"]).at(self.record["provider"])

    def _newest_checkpoint(self, mounts: _Mounts) -> tuple[str, ...]:
        """Return the newest of each kind: mirrored, and written to the store by the script itself."""
        mirrored = resumable(mounts.complete())[-1:]
        return (*(str(item.folder) for item in mirrored), *(item.key for item in self.store.direct(self.run_id)[-1:]))


class _Mounts:
    """The local path of every mount's URL: its own or a copy's; ``live`` is kept in step."""

    def __init__(self, *, folder: Path, store: Store, run_id: str) -> None:
        self._folder, self._store, self._run_id = folder, store, run_id
        self._url = f"{store.url}/runs/{run_id}/live"
        self.live = local_path(self._url) or folder / "live"
        self._sent: dict[str, tuple[int, int]] = {}
        self._stop, self._cancelled = threading.Event(), False
        self._thread: threading.Thread | None = None

    def take_over(self, earlier: Path) -> None:
        """Keep the files that a killed supervisor has left in its folder, unless ``live`` is the store's own.

        Not all of them may be in the store. Files that the nodes have removed since are still there.
        """
        if (earlier / "live").is_dir() and self.live.parent == self._folder and not self.live.exists():
            shutil.move(earlier / "live", self.live)
            with contextlib.suppress(OSError, ValueError):
                sent = json.loads((earlier / "sent.json").read_bytes())
                self._sent = {key: (size, changed) for key, (size, changed) in sent.items()}

    def fetch(self, mounts: Iterable[Mount]) -> dict[str, Path]:
        """Return local paths by URL. Remote ones are downloaded once; folders that nodes write to are created."""
        out: dict[str, Path] = {}
        for url, kind in {mount.url: mount.kind for mount in mounts}.items():
            is_live = url.endswith(f"/runs/{self._run_id}/live")
            out[url] = self.live if is_live else local_path(url) or self._download(url)
            if kind == "sync":
                out[url].mkdir(parents=True, exist_ok=True)
        return out

    def _download(self, url: str) -> Path:
        """Return the path of a copy of the file or folder at ``url``. Raises `NodeError` if nothing is there."""
        place = self._folder / "mounts" / hashlib.sha256(url.encode()).hexdigest()[:16]
        target, whole, source = place / "content", place / "whole", files(url.rstrip("/"))
        if not whole.exists():
            if not url.endswith("/") and source.size("") is not None:
                source.download("", target)
            elif not source.download_tree("", target):
                raise NodeError(f"there is no file at {without_secrets(url)}", category="spec")
            whole.touch()
        return target

    def complete(self) -> list[Checkpoint]:
        """Return the complete checkpoints. If the disk or mount fails, return none: the next nodes report why."""
        try:
            return complete(self.live / "checkpoints")
        except StorageError as exc:
            sys.stderr.write(f"{exc}\n")
            return []

    def cancelled(self) -> bool:
        """Return whether the store forbids further attempts; for a remote store, as last read by the sync thread."""
        return self._cancelled if self._thread is not None else self._store.cancelled(self._run_id)

    def start_syncing(self) -> None:
        """Keep a remote store's ``live`` in step."""
        if local_path(self._url) is None:
            self._thread = threading.Thread(target=self._keep_in_step, name="sync", daemon=True)
            self._thread.start()

    def _keep_in_step(self) -> None:
        target = files(self._url, moving=self._store.moving)
        while not self._stop.wait(CLIENT_TIMINGS.store_sync):
            try:
                self._cancelled = self._store.cancelled(self._run_id)
                self._sync(target)
            except Exception as exc:  # noqa: BLE001  a store may fail in many ways, and may be back in a minute
                sys.stderr.write(f"live/ could not be synced: {exc}; trying again\n")

    def stop_syncing(self, patiently: Callable[[Callable[[], None]], None]) -> None:
        """Sync the store a last time. Raises `StorageError` if it stays away; ``live`` is then kept here."""
        if self._thread is None:
            return
        self._stop.set()
        self._thread.join()
        target = files(self._url, moving=self._store.moving)
        patiently(lambda: self._sync(target))
        # All of it is in the store now; only the nodes' output stays here. If this process is killed meanwhile, the
        # next supervisor must not take the files that are gone here for files that the nodes have removed.
        (self._folder / "sent.json").unlink(missing_ok=True)
        shutil.rmtree(self.live, ignore_errors=True)
        shutil.rmtree(self._folder / "mounts", ignore_errors=True)

    def _sync(self, target: Files) -> None:
        """Upload new and changed files; those that make others valid (commit.json) come last.

        A checkpoint deleted here is deleted there, commit.json first, but never the last one, even after a disk
        failure. So is an output.
        """
        before, states = dict(self._sent), states_below(self.live, _UNFINISHED)
        found = states.keys()
        try:
            if found:
                self._remove_outputs(target, found)
            changed = [key for key, state in states.items() if self._sent.get(key) != state]
            for key in sorted(changed, key=lambda key: (key.rpartition("/")[2] == COMMIT, key)):
                with contextlib.suppress(FileNotFoundError):
                    target.upload(self.live / key, key)
                    self._sent[key] = states[key]
            gone = [key for key in self._sent.keys() - found if key.startswith(CHECKPOINTS)]
            if any(key.startswith(CHECKPOINTS) and key.endswith(f"/{COMMIT}") for key in found):
                for key in sorted(gone, key=lambda key: (not key.endswith(f"/{COMMIT}"), key)):
                    target.remove(key)
                    del self._sent[key]
        finally:  # a later supervisor must know what was sent before a failure
            if self._sent != before:
                with contextlib.suppress(StorageError):  # then it sends more than it must
                    write_json(self._folder / "sent.json", self._sent)

    def _remove_outputs(self, target: Files, found: Set[str]) -> None:
        """Remove the outputs that the script has removed. Call it before new ones take their paths."""
        gone = [key for key in self._sent.keys() - found if key.startswith(OUTPUTS) and _is_gone(self.live / key)]
        target.discard(gone)
        folders = {str(folder) for key in gone for folder in PurePosixPath(key).parents}
        for key in found & folders:  # files now
            target.remove(key)
        for key in gone:  # not before: after a failure of the store, all of this comes again
            del self._sent[key]


def _is_gone(path: Path) -> bool:
    """Return whether there is certainly no file at ``path``."""
    try:
        return S_ISDIR(path.lstat().st_mode)
    except OSError as exc:
        return isinstance(exc, (FileNotFoundError, NotADirectoryError))


def _category_of(exc: CloudtrainError) -> str:
    """Return the category of a run whose nodes could not start."""
    if isinstance(exc, NodeError):
        return exc.category
    kinds = {SpecError: "image", FinalError: "spec", AuthError: "auth", CapacityError: "capacity"}
    return next((category for kind, category in kinds.items() if isinstance(exc, kind)), "infra")
