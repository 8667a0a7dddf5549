"""Start the ranks of one node, read their output and events, and stop all of their processes.

`command_of` and `environment_of` make the command and its environment (pure). `Ranks` starts it and emits events.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from ..provider_api.node import Topology
from . import nccl
from .host_facts import handles_sigterm
from .logs import LogWriter, lines_of
from .timings import TIMINGS

_TOKEN = re.compile(r"\{(inputs\.[A-Za-z][A-Za-z0-9_-]*|checkpoint_dir|artifact_dir|resume_from|run_id)\}")
_MAYBE = "{resume_from?}"
_NODE_WORDS = re.compile(
    r"PET_|TORCHELASTIC_|(RANK|LOCAL_RANK|GROUP_RANK|ROLE_RANK|ROLE_NAME|WORLD_SIZE|LOCAL_WORLD_SIZE|GROUP_WORLD_SIZE"
    r"|ROLE_WORLD_SIZE|MASTER_ADDR|MASTER_PORT)$|CLOUDTRAIN_"
)
_EXITED = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+) \(pid: \d+\)")
_CLOSING = re.compile(r"Sending process \d+ closing signal ")
LAST_LINES = 20
LAST_NS, LATE_NS = 2_000_000_000, 50_000_000
"""A rank's line is its last if it was read this much before its end, or this much after: pipes have no common order."""
STACK_LINES = 20_000
"""Most lines that are kept after a rank was asked for its stacks; faulthandler prints half of it at most."""
_TORCHRUN_NOISE = re.compile(
    r"^[EWI]\d{4} .*torch/distributed/|^Traceback \(most recent call last\)|elastic.*ERROR"
    # Node 0's torchrun has the store. If it ends first, each other one prints a stack in C++.
    r"|^\[[EW]\d{4} .*\bTCPStore\.cpp:.*(?i:(recv|send)\w* failed|closed)"
)


# ---------------------------------------------------------------------------------------------------- what is started


def fill(text: str, values: Mapping[str, str]) -> str:
    """Return ``text`` with exactly the known placeholders filled, in one pass; every other brace stays."""
    return _TOKEN.sub(lambda match: values.get(match[1], match[0]), text)


def script_arguments(context: Mapping[str, Any], values: Mapping[str, str]) -> list[str]:
    """Return hyperparameters in their style, then ``args``. A fresh start drops ``{resume_from?}`` and its flag."""
    pairs: list[str] = []
    for key, value in hyperparameters_of(context, values).items():
        if context["hyperparameter_style"] == "flags":
            pairs += [f"--{key}", _text(value)]
        elif context["hyperparameter_style"] == "hydra":
            pairs.append(f"{key}={_text(value)}")
    args: list[str] = []
    for arg in context["args"]:
        if arg != _MAYBE or values["resume_from"]:
            args.append(_filled(arg, values))
        elif args and args[-1].startswith("-"):
            args.pop()
    return pairs + args


def hyperparameters_of(context: Mapping[str, Any], values: Mapping[str, str]) -> dict[str, Any]:
    """Return the pairs for the script: texts filled, and ``{resume_from?}`` dropped on a fresh start."""
    pairs = context["hyperparameters"].items()
    return {key: _filled(value, values) for key, value in pairs if value != _MAYBE or values["resume_from"]}


def _filled(value: Any, values: Mapping[str, str]) -> Any:
    if value == _MAYBE:
        return values["resume_from"]
    return fill(value, values) if isinstance(value, str) else value


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def command_of(
    context: Mapping[str, Any], topology: Topology, arguments: Sequence[str], *, worker: Path, python: str
) -> list[str]:
    """Return the command of the node's one child: torchrun, python for a single process, or the user's own command."""
    entry = context["entry_point"]
    if context["launcher"] == "command":
        return [*(["/bin/sh", entry] if entry.endswith(".sh") else [entry] if entry else []), *arguments]
    script = [str(worker), *(entry.split() if entry.startswith("-m ") else [entry]), *arguments]
    if context["launcher"] == "python" or (topology.nodes == 1 and context["processes"] == 1):
        return [python, "-u", *script]
    return [
        python,
        "-m",
        "torch.distributed.run",
        f"--nnodes={topology.nodes}",
        f"--node-rank={topology.node_rank}",
        f"--nproc-per-node={context['processes']}",
        "--rdzv-backend=static",
        f"--master-addr={topology.master_addr}",
        f"--master-port={topology.master_port}",
        "--max-restarts=0",
        "--monitor-interval=0.1",
        f"--log-dir={worker.with_name('torchrun')}",  # else a folder in the temporary one stays after each attempt
        "--",
        *script,
    ]


def environment_of(
    context: Mapping[str, Any],
    topology: Topology,
    *,
    base: Mapping[str, str],
    export: Mapping[str, str],
    own: Mapping[str, str],
    secrets: Mapping[str, str],
    values: Mapping[str, str],
    home: str,
    dumps: Path,
    cpus: int,
) -> dict[str, str]:
    """Return the child's environment: the node's without another launcher's words, the platform's, the job's, ours.

    ``home`` is for a user without one, ``dumps`` the folder of NCCL's flight recorders.
    """
    env = {key: value for key, value in base.items() if not _NODE_WORDS.match(key)}
    if not os.access(env.get("HOME", ""), os.W_OK):  # an engine makes it / for a uid that the image does not know
        env["HOME"] = home
    env.setdefault("USER", f"uid{os.getuid()}")
    env.setdefault("LOGNAME", env["USER"])
    env.setdefault("OMP_NUM_THREADS", str(max(1, cpus // context["processes"])))
    env.setdefault("PYTHONUNBUFFERED", "1")
    env.update({key: fill(value, values) for key, value in export.items()})
    env.update({key: fill(value, values) for key, value in context["env"].items()})
    env.update(secrets)
    if not {"WANDB_RUN_ID", "WANDB_RESUME"} & env.keys():  # all attempts are one run there, unless the user chose
        env.update(WANDB_RUN_ID=values["run_id"], WANDB_RESUME="allow")
    env.update(own)
    env.update(nccl.words(env, dumps, debug=context["debug_nccl"]))
    if context["launcher"] != "torchrun" or (topology.nodes == 1 and context["processes"] == 1):
        # One process a node: it gets the words that torchrun would give to the only rank of each node.
        env.update(
            RANK=str(topology.node_rank),
            LOCAL_RANK="0",
            WORLD_SIZE=str(topology.nodes),
            LOCAL_WORLD_SIZE="1",
            GROUP_RANK=str(topology.node_rank),
            NODE_RANK=str(topology.node_rank),
            MASTER_ADDR=topology.master_addr,
            MASTER_PORT=str(topology.master_port),
        )
    return env


# ------------------------------------------------------------------------------------------------------- starting it


class Ranks:
    """The running ranks of this node. They emit events in the form of the node link's messages:

    ``{"t": "rank", "local": i, "event": start|error|end|eof, "time_ns": …}`` and ``{"t": "ended", "code": n}``.
    """

    def __init__(
        self,
        *,
        command: Sequence[str],
        env: Mapping[str, str],
        cwd: Path,
        scratch: Path,
        package: Path,
        processes: int,
        shim: bool,
        log: LogWriter,
        first_rank: int,
        emit: Callable[[dict[str, Any]], None],
        read: Callable[[str], None] | None = None,
        signals_ranks: bool = False,
    ) -> None:
        self._log, self._emit, self.first_rank = log, emit, first_rank
        self._read = read if first_rank == 0 else None
        self._pipes = scratch / "pipes"
        self._processes = processes if shim else 0
        self.lone = "torch.distributed.run" not in command
        self.pids: dict[int, int] = {}
        self.bare = self.lone and not shim  # the user's own command, whose children may be the ranks
        self._signalled_by_platform = signals_ranks
        self._notified: dict[int, int] = {}
        self._former, self._former_end = set[int](), 0
        self.codes: dict[int, int] = {}
        self._over: set[int] = set()
        self._stacks: dict[int, list[str]] = {}
        self._lines: dict[int, deque[tuple[int, str]]] = defaultdict(lambda: deque(maxlen=LAST_LINES))
        self.unshown: list[str] = []
        self.closing_ns = 0  # time at which torchrun began to stop the ranks because one had ended badly; 0 until then
        self.last_line = ""
        self.code: int | None = None
        shutil.rmtree(self._pipes, ignore_errors=True)
        self._pipes.mkdir(parents=True)
        self._readers: list[threading.Thread] = []
        self._keepers = []
        for local in range(self._processes):
            for kind, target in (("out", self._read_output), ("events", self._read_events)):
                os.mkfifo(self._pipes / f"{kind}-{local}", 0o600)
                # Open a reader first: without one, a rank takes its runtime for dead.
                self._keepers.append(os.open(self._pipes / f"{kind}-{local}", os.O_RDONLY | os.O_NONBLOCK))
                self._thread(target, local)
        with without_sigterm() if signals_ranks and shim else contextlib.nullcontext():
            self._process = subprocess.Popen(
                list(command),
                env={**env, "CLOUDTRAIN_WORKER": f"{self._pipes}\n{package}"} if shim else dict(env),
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.pid = self._process.pid
        self._thread(self._read_launcher)
        threading.Thread(target=self._wait, name="wait", daemon=True).start()

    def _thread(self, target: Callable[..., None], *args: int) -> None:
        thread = threading.Thread(target=target, args=args, name=target.__name__, daemon=True)
        thread.start()
        self._readers.append(thread)

    def _read_output(self, local: int) -> None:
        with open(self._pipes / f"out-{local}", "rb", buffering=0) as stream:
            for text in lines_of(stream):
                self._write(local, text)
                stacks = self._stacks.get(local)
                if stacks is not None and len(stacks) < STACK_LINES:
                    stacks.append(text)

    def _write(self, local: int, text: str) -> None:
        """Log a line of a rank and keep it as one of its last. Call ``read`` with it if it is rank 0's."""
        text = self._log.write(str(self.first_rank + local), text)
        self._lines[local].append((time.time_ns(), text))
        if self._read is not None and local == 0:
            try:
                self._read(text)
            except Exception as exc:  # noqa: BLE001  a bad metric expression must not stop the rank's lines
                self._read = None
                self._log.say(f"metrics are not read from lines any more: {type(exc).__name__}: {exc}")

    def last_line_of(self, rank: int, end_ns: int) -> str:
        """Return the last line with a word in it that this rank (of the whole run) wrote before its end."""
        lines = reversed(self._lines[rank - self.first_rank].copy())
        near = (text.strip() for at, text in lines if end_ns - LAST_NS < at < end_ns + LATE_NS)
        return next((text for text in near if text.strip("=-_*#")), "")

    def _read_events(self, local: int) -> None:
        with open(self._pipes / f"events-{local}", "rb") as stream:
            for line in stream:
                with contextlib.suppress(ValueError):
                    event = json.loads(line)
                    if event["event"] == "start":
                        self.pids[local] = event["pid"]
                    elif event.get("exception", "").startswith("SystemExit"):
                        time.sleep(LATE_NS / 1e9)  # its last lines may still be in the other pipe
                    self._emit({"t": "rank", "local": local, **event})
        self._over.add(local)
        self._emit({"t": "rank", "local": local, "event": "eof", "time_ns": time.time_ns()})

    def _read_launcher(self) -> None:
        """Log the child's own output. Torchrun's complaints are held back: they name wrong ranks."""
        stream: BinaryIO = self._process.stdout  # type: ignore[assignment]
        with stream:
            for text in lines_of(stream):
                self.last_line = text if text.strip() else self.last_line
                if match := _EXITED.search(text):
                    self.codes[int(match[2])] = int(match[1])
                if not self.lone and not self.closing_ns and _CLOSING.search(text):
                    self.closing_ns = time.time_ns()
                if not self.lone and (self.unshown or _TORCHRUN_NOISE.search(text)):
                    self.unshown.append(text)
                elif self.lone:
                    self._write(0, text)
                else:
                    self._log.write("-", text)

    def _wait(self) -> None:
        code = self._process.wait()
        with contextlib.suppress(OSError):  # the script may have removed the folder
            for pipe in self._pipes.iterdir():  # a rank that never started leaves its reader waiting for a writer
                with contextlib.suppress(OSError):
                    os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))
        deadline = time.monotonic() + TIMINGS.pipes
        for thread in self._readers:
            thread.join(max(0.0, deadline - time.monotonic()))
        for keeper in self._keepers:
            os.close(keeper)
        if self.lone:
            self.codes[0] = code
        self.code = code
        self._emit({"t": "ended", "code": code})

    def complaint(self, code: int | None) -> tuple[str, str]:
        """Return the reason and category of a launcher's end with ``code`` before any rank began."""
        last = self.last_line.strip() or f"exit code {code}"
        if "No module named 'torch'" in last or "No module named torch" in last:
            return f"{sys.executable} has no torch", "image"
        taken = any("EADDRINUSE" in line or "ddress already in use" in line for line in self.unshown)
        return f"torchrun failed: {last}", "infra" if taken else "user_error"

    # ------------------------------------------------------------------------------------------------------ stopping

    def notify(self) -> bool:
        """Send SIGTERM, once, to the ranks that handle it, not to their children. Return whether any got it now.

        So a handler has the platform's whole grace. A rank without one would die, and lose its time to see the preempt
        file. DataLoader workers must not end before the rank that they serve. If the platform signals the ranks itself,
        their handlers are at work already.
        """
        pids = list(self._pids_of_ranks().values())  # a rank may report its start meanwhile
        found = [pid for pid in pids if pid not in self._notified and handles_sigterm(pid)]
        for pid in found:
            self._notified[pid] = time.time_ns()  # before the signal: its consequences are later
            if not self._signalled_by_platform:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGTERM)
        return bool(found)

    def forget_notice(self, seconds: float) -> None:
        """Let the next notice reach every rank again. For ``seconds`` a rank may still leave because of this one."""
        self._former = set(self._notified)
        self._former_end = time.time_ns() + int(seconds * 1e9)
        self._notified.clear()

    def notified(self, rank: int, time_ns: int) -> bool:
        """Return whether `notify` had signalled this rank (of the whole run) by then."""
        pid = self._pids_of_ranks().get(rank - self.first_rank, 0)
        signalled = self._notified.get(pid)
        return (signalled is not None and signalled <= time_ns) or (pid in self._former and time_ns < self._former_end)

    def _pids_of_ranks(self) -> dict[int, int]:
        """Return pids by local rank. The user's own command, which reports no rank, is the only one of its node."""
        return {0: self.pid} if self.bare else self.pids

    def signal(self, number: int) -> None:
        """Send a signal to every rank's process group, and to a lone child. torchrun itself is left to notice.

        A rank that `notify` has signalled gets no second SIGTERM: its handler is at work. The children of such a
        command get it: a shell runs its trap only once the program in its foreground has ended.
        """
        signalled = self._notified.keys() if number == signal.SIGTERM else set()
        for pid in {*self.pids.values(), *([self.pid] if self.lone else [])} - signalled:
            with contextlib.suppress(OSError):
                os.killpg(pid, number)
        for pid in _others_in_group(self.pid) if self.bare and self.pid in signalled else ():
            with contextlib.suppress(OSError):
                os.kill(pid, number)

    def kill(self) -> None:
        """Kill all processes of this node now."""
        self.signal(signal.SIGKILL)
        with contextlib.suppress(OSError):
            os.killpg(self.pid, signal.SIGKILL)

    def dump_stacks(self) -> dict[int, list[str]]:
        """Let each rank print the stacks of all its threads (faulthandler on SIGUSR1).

        Returns the lines printed since, by local rank, as they come. They stay empty for a rank that has not started or
        does not answer. A rank that has ended has no item.
        """
        self._stacks = {local: [] for local in range(self._processes) if local not in self._over}
        for local in self._stacks.keys() & self.pids.keys():
            with contextlib.suppress(OSError):
                os.kill(self.pids[local], signal.SIGUSR1)
        return self._stacks


@contextlib.contextmanager
def without_sigterm() -> Iterator[None]:
    """Block SIGTERM in this thread, for a child that inherits that.

    torchrun takes a SIGTERM for its own end, and would stop its ranks. The worker of each rank unblocks the signal.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _others_in_group(leader: int) -> list[int]:
    """Return the processes that share the leader's group, by /proc."""
    found = []
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError, ValueError):
            if int(name) != leader and os.getpgid(int(name)) == leader:
                found.append(int(name))
    return found


def reap() -> None:
    """Reap every child that has ended."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
