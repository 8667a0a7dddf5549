"""The start on a node: arguments, command and environment; and the ranks as processes, until the last one ends."""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rows import for_each

from cloudtrain.provider_api.node import Topology
from cloudtrain.runtime.launch import Ranks, command_of, environment_of, fill, script_arguments
from cloudtrain.runtime.logs import LogWriter

VALUES = {
    "checkpoint_dir": "/s/checkpoints",
    "artifact_dir": "/s/artifacts",
    "resume_from": "/s/checkpoints/step-1",
    "run_id": "r-1",
    "inputs.train": "/data/train {run_id}",
}
FRESH = {**VALUES, "resume_from": ""}
TWO = Topology(nodes=2, node_rank=1, master_addr="10.0.0.1", master_port=5000)
ONE = Topology(nodes=1, node_rank=0, master_addr="127.0.0.1", master_port=5000)

#: Text of every kind but NUL, which no argument can hold; with many of the characters that could mean something.
strange = st.text(
    st.one_of(
        st.sampled_from(list("{}?.'\"\\ \n\t$`-=")), st.characters(exclude_categories=["Cs"], exclude_characters="\0")
    ),
    max_size=20,
)


def context(**changes: Any) -> dict[str, Any]:
    return {
        "launcher": "torchrun", "entry_point": "t.py", "processes": 2, "args": [], "hyperparameters": {},
        "hyperparameter_style": "flags", "env": {}, "debug_nccl": False, **changes,
    }  # fmt: skip


def known(text: str) -> bool:
    return any(f"{{{name}}}" in text for name in VALUES)


# ------------------------------------------------------------------------------------------------------- placeholders


@given(strange)
@example("{resume_from?}")
@example("{inputs.other} {Run_id} {run_id } {{}} {inputs.}")
@example('{"a": {"b": "{c}"}}')
def test_text_without_a_placeholder_stays_as_it_is(text: str) -> None:
    if not known(text):
        assert fill(text, VALUES) == text


@given(
    st.lists(
        st.one_of(strange.filter(lambda t: "{" not in t and "}" not in t), st.sampled_from(sorted(VALUES))), max_size=8
    )
)
def test_placeholders_are_filled_in_one_pass(parts: list[str]) -> None:
    text = "".join(f"{{{p}}}" if p in VALUES else p for p in parts)
    assert fill(text, VALUES) == "".join(VALUES.get(p, p) for p in parts)


def test_braces_around_a_placeholder_stay() -> None:
    assert fill('{{run_id}} {"run": "{run_id}"}', VALUES) == '{r-1} {"run": "r-1"}'


@given(st.lists(strange, max_size=6), st.dictionaries(strange.filter(bool), strange, max_size=4))
def test_strange_arguments_arrive_unchanged(args: list[str], pairs: dict[str, str]) -> None:
    if any(known(t) or t == "{resume_from?}" for t in [*args, *pairs.values()]):
        return
    given = context(args=args, hyperparameters=pairs)
    flags = [word for key, value in pairs.items() for word in (f"--{key}", value)]
    assert script_arguments(given, VALUES) == [*flags, *args]
    assert script_arguments({**given, "hyperparameter_style": "hydra"}, VALUES) == [
        *(f"{k}={v}" for k, v in pairs.items()), *args,
    ]  # fmt: skip
    assert script_arguments({**given, "hyperparameter_style": "none"}, VALUES) == args


# ----------------------------------------------------------------------------------------------------------- arguments


@for_each(
    ("args", "resumed", "fresh"),
    [
        (["--resume", "{resume_from?}"], ["--resume", "/s/checkpoints/step-1"], []),
        (["a", "--resume", "{resume_from?}", "b"], ["a", "--resume", "/s/checkpoints/step-1", "b"], ["a", "b"]),
        (["-r", "{resume_from?}", "--x"], ["-r", "/s/checkpoints/step-1", "--x"], ["--x"]),
        (["{resume_from?}"], ["/s/checkpoints/step-1"], []),
        (["load", "{resume_from?}"], ["load", "/s/checkpoints/step-1"], ["load"]),
        (["--resume={resume_from?}"], ["--resume={resume_from?}"], ["--resume={resume_from?}"]),
        (["--resume={resume_from}"], ["--resume=/s/checkpoints/step-1"], ["--resume="]),
        (["--resume", "{resume_from}"], ["--resume", "/s/checkpoints/step-1"], ["--resume", ""]),
    ],
)
def test_resume_from_with_and_without_a_flag(args: list[str], resumed: list[str], fresh: list[str]) -> None:
    assert script_arguments(context(args=args), VALUES) == resumed
    assert script_arguments(context(args=args), FRESH) == fresh


def test_a_hyperparameter_that_is_resume_from_goes_with_its_name() -> None:
    given = context(hyperparameters={"lr": -1, "init": "{resume_from?}"}, args=["{resume_from?}", "x"])
    assert script_arguments(given, FRESH) == ["--lr", "-1", "x"]
    assert script_arguments(given, VALUES) == [
        "--lr",
        "-1",
        "--init",
        VALUES["resume_from"],
        VALUES["resume_from"],
        "x",
    ]
    # A hyperparameter's value before the args is not one of their flags, even if it looks like one.
    given = context(hyperparameters={"lr": "-1"}, args=["{resume_from?}", "x"])
    assert script_arguments(given, FRESH) == ["--lr", "-1", "x"]


def test_values_that_are_no_text_are_json() -> None:
    pairs = {"lr": 0.1, "big": 1e-7, "n": 3, "yes": True, "names": ["a", {"b": None}], "text": "true"}
    words = script_arguments(context(hyperparameters=pairs), VALUES)
    assert words[1::2] == ["0.1", "1e-07", "3", "true", '["a", {"b": null}]', "true"]
    assert [json.loads(w) for w in words[1:-1:2]] == list(pairs.values())[:-1]


# ------------------------------------------------------------------------------------------------------------ commands


def test_torchrun_is_static_never_restarts_and_ends_its_own_flags() -> None:
    command = command_of(context(), TWO, ["--log", "x", "--", "y"], worker=Path("/s/worker.py"), python="py")
    assert command[:3] == ["py", "-m", "torch.distributed.run"]
    assert command[-7:] == ["--", "/s/worker.py", "t.py", "--log", "x", "--", "y"]
    assert {
        "--nnodes=2", "--node-rank=1", "--nproc-per-node=2", "--rdzv-backend=static", "--master-addr=10.0.0.1",
        "--master-port=5000", "--max-restarts=0",
    } <= set(command)  # fmt: skip


@for_each(
    ("changes", "topology", "wanted"),
    [
        ({"processes": 1}, ONE, ["py", "-u", "W", "t.py", "a b"]),
        ({"processes": 1, "entry_point": "-m pkg.mod"}, ONE, ["py", "-u", "W", "-m", "pkg.mod", "a b"]),
        ({"launcher": "python"}, TWO, ["py", "-u", "W", "t.py", "a b"]),
        ({"launcher": "python", "entry_point": "my script.py"}, TWO, ["py", "-u", "W", "my script.py", "a b"]),
        ({"launcher": "command", "entry_point": "x.sh"}, TWO, ["/bin/sh", "x.sh", "a b"]),
        ({"launcher": "command", "entry_point": ""}, TWO, ["a b"]),
        ({"launcher": "command", "entry_point": "./tool"}, ONE, ["./tool", "a b"]),
    ],
)
def test_one_process_needs_no_torchrun(changes: dict[str, Any], topology: Topology, wanted: list[str]) -> None:
    assert command_of(context(**changes), topology, ["a b"], worker=Path("W"), python="py") == wanted


def test_one_process_on_each_of_two_nodes_is_torchruns() -> None:
    command = command_of(context(processes=1, entry_point="-m p.q"), TWO, ["x"], worker=Path("W"), python="py")
    assert "--nproc-per-node=1" in command
    assert command[-5:] == ["--", "W", "-m", "p.q", "x"]


# --------------------------------------------------------------------------------------------------------- environment


def environment(
    base: dict[str, str], *, topology: Topology = TWO, cpus: int = 8, tmp: str = "/s/home", **changes: Any
) -> dict[str, str]:
    rest = {k: changes.pop(k, {}) for k in ("export", "own", "secrets")}
    return environment_of(
        context(**changes), topology, base=base, values=VALUES, home=tmp, dumps=Path("/s/dumps"), cpus=cpus, **rest
    )  # fmt: skip


def test_another_launchers_words_are_cleaned_away() -> None:
    stray = {
        "PET_NNODES": "9", "PET_RDZV_ENDPOINT": "x", "TORCHELASTIC_RUN_ID": "x", "RANK": "7", "LOCAL_RANK": "7",
        "WORLD_SIZE": "99", "LOCAL_WORLD_SIZE": "9", "GROUP_RANK": "1", "ROLE_NAME": "x", "MASTER_ADDR": "evil",
        "MASTER_PORT": "1", "CLOUDTRAIN_ENGINE_SECRETS_FD": "3", "CLOUDTRAIN_RUN_ID": "other",
    }  # fmt: skip
    kept = {"MY_RANK": "1", "RANKS": "2", "WORLD_SIZES": "3", "CARPET_X": "4", "PATH": "/bin", "NCCL_DEBUG": "INFO"}
    env = environment({**stray, **kept})
    assert not set(stray) & set(env)
    assert {k: env[k] for k in kept} == kept


def test_home_and_user_are_there_and_only_what_is_missing_is_made_up(tmp_path: Path) -> None:
    made = environment({})
    assert (made["HOME"], made["USER"], made["LOGNAME"]) == ("/s/home", f"uid{os.getuid()}", f"uid{os.getuid()}")
    assert environment({"HOME": str(tmp_path), "USER": "ann"})["HOME"] == str(tmp_path)
    assert environment({"HOME": "/no/such/folder"})["HOME"] == "/s/home"
    assert environment({"USER": "ann"})["LOGNAME"] == "ann"


@for_each(("cpus", "processes", "threads"), [(8, 2, "4"), (8, 3, "2"), (2, 4, "1"), (1, 1, "1")])
def test_threads_share_the_cores(cpus: int, processes: int, threads: str) -> None:
    assert environment({}, cpus=cpus, processes=processes)["OMP_NUM_THREADS"] == threads
    assert environment({"OMP_NUM_THREADS": "3"}, cpus=cpus)["OMP_NUM_THREADS"] == "3"
    assert environment({}, env={"OMP_NUM_THREADS": "5"})["OMP_NUM_THREADS"] == "5"


def test_who_wins() -> None:
    env = environment(
        dict.fromkeys("ABCD", "node"), export=dict.fromkeys("BCD", "platform"),
        env={"C": "job {run_id}", "D": "job"}, secrets={"D": "secret {run_id}"}, own={"CLOUDTRAIN_RUN_ID": "r-1"},
    )  # fmt: skip
    assert [env[k] for k in "ABCD"] == ["node", "platform", "job r-1", "secret {run_id}"]
    assert env["CLOUDTRAIN_RUN_ID"] == "r-1"


def test_nccl_is_told_what_nobody_has_told_it() -> None:
    base = {"TORCH_DISTRIBUTED_DEBUG": "OFF"}
    env = environment(base, debug_nccl=True, env={"NCCL_DEBUG": "WARN"}, secrets={"TORCH_FR_BUFFER_SIZE": "9"})
    assert (env["NCCL_DEBUG"], env["TORCH_DISTRIBUTED_DEBUG"], env["TORCH_FR_BUFFER_SIZE"]) == ("WARN", "OFF", "9")
    assert env["NCCL_DEBUG_SUBSYS"] == "INIT,NET,GRAPH,ENV"
    assert env["TORCH_FR_DUMP_TEMP_FILE"] == "/s/dumps/trace-rank-"
    assert "NCCL_DEBUG" not in environment({})


def test_all_attempts_are_one_run_of_a_tracker_unless_somebody_chose() -> None:
    ours = {"WANDB_RUN_ID": "r-1", "WANDB_RESUME": "allow"}

    def tracked(**given: Any) -> dict[str, str]:
        return {k: v for k, v in environment(given.pop("base", {}), **given).items() if k in ours}

    assert tracked() == tracked(env={"WANDB_PROJECT": "p"}) == ours
    for chosen in ({"WANDB_RUN_ID": "mine"}, {"WANDB_RESUME": "never"}, {"WANDB_RUN_ID": ""}):
        for who in ("base", "export", "env", "secrets"):
            assert tracked(**{who: chosen}) == chosen
    assert not [name for name in environment({}) if name.startswith("MLFLOW_")]
    mlflow = {"MLFLOW_RUN_ID": "m", "MLFLOW_TRACKING_URI": "http://x"}
    assert environment(mlflow).items() >= mlflow.items()


@given(st.dictionaries(st.from_regex(r"X[A-Z]{1,3}", fullmatch=True), strange, max_size=4))
def test_strange_variables_arrive_unchanged(variables: dict[str, str]) -> None:
    env = environment({}, env=variables)
    assert all(env[k] == v for k, v in variables.items() if not known(v))


@for_each(
    ("changes", "topology", "rank", "world"),
    [({"launcher": "python"}, TWO, "1", "2"), ({"launcher": "command"}, TWO, "1", "2"),
     ({"launcher": "python", "processes": 8}, TWO, "1", "2"), ({"launcher": "command", "processes": 8}, TWO, "1", "2"),
     ({"processes": 1}, ONE, "0", "1")],
)  # fmt: skip
def test_a_lone_process_gets_the_words_torchrun_would_give(
    changes: dict[str, Any], topology: Topology, rank: str, world: str
) -> None:
    env = environment({"RANK": "9"}, topology=topology, **changes)
    assert (env["RANK"], env["WORLD_SIZE"], env["LOCAL_RANK"], env["LOCAL_WORLD_SIZE"]) == (rank, world, "0", "1")
    assert (env["MASTER_ADDR"], env["MASTER_PORT"]) == (topology.master_addr, "5000")


def test_under_torchrun_its_words_are_its_own() -> None:
    assert not {"RANK", "WORLD_SIZE", "MASTER_ADDR"} & set(environment({}))


# ------------------------------------------------------------------------------------------------------ real processes


class Started:
    def __init__(self, tmp_path: Path, command: list[str], *, shim: bool, processes: int = 1) -> None:
        self.read, write = os.pipe()
        os.set_blocking(self.read, False)
        self.log = LogWriter(node=0, out=write)
        self.log.begin("0.0", None)
        self.inbox: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        scratch = tmp_path / "scratch"
        scratch.mkdir()
        self.ranks = Ranks(
            command=command, env=dict(os.environ), cwd=tmp_path, scratch=scratch, package=tmp_path / "p.pyz",
            processes=processes, shim=shim, log=self.log, first_rank=4, emit=self.inbox.put,
        )  # fmt: skip
        self.events: list[dict[str, Any]] = []
        self._write = write

    def close(self) -> None:
        os.close(self.read)
        os.close(self._write)

    def until(self, kind: str, seconds: float = 30) -> dict[str, Any]:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            try:
                self.events.append(self.inbox.get(timeout=0.2))
            except queue.Empty:
                continue
            if kind in (self.events[-1]["t"], self.events[-1].get("event")):
                return self.events[-1]
        raise AssertionError(f"no {kind} in {self.events}")

    @property
    def out(self) -> str:
        try:
            return os.read(self.read, 1 << 20).decode()
        except BlockingIOError:
            return ""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Started]]:
    made: list[Started] = []

    def make(command: list[str], **rest: Any) -> Started:
        made.append(Started(tmp_path, command, **rest))
        return made[-1]

    yield make
    for run in made:
        run.ranks.kill()
        run.close()


WORKER = Path(__file__).parents[2] / "cloudtrain" / "runtime" / "worker.py"


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    with open(f"/proc/{pid}/stat") as stream:
        return stream.read().rpartition(")")[2].split()[0] == "Z"


def test_a_lone_rank_is_numbered_told_of_and_its_code_known(tmp_path: Path, start: Callable[..., Started]) -> None:
    (tmp_path / "a.py").write_text("print('one'); print('two'); import sys; sys.exit(42)")
    run = start([sys.executable, str(WORKER), "a.py"], shim=True)
    assert run.until("ended") == {"t": "ended", "code": 42}
    assert [e.get("event", e["t"]) for e in run.events] == ["start", "error", "eof", "ended"]
    assert run.out == "[a0.0 n0 r4 #1] one\n[a0.0 n0 r4 #2] two\n"
    assert (run.ranks.codes, run.ranks.pids) == ({0: 42}, {0: run.ranks.pid})


def test_a_command_without_shim_is_logged_too(tmp_path: Path, start: Callable[..., Started]) -> None:
    run = start(["/bin/sh", "-c", "echo out; echo err >&2; exit 3"], shim=False)
    assert run.until("ended")["code"] == 3
    assert run.out == "[a0.0 n0 r4 #1] out\n[a0.0 n0 r4 #2] err\n"
    assert run.ranks.codes == {0: 3}
    assert run.ranks.last_line_of(4, time.time_ns()) == "err"


def test_the_last_line_of_a_rank_is_one_of_its_end(tmp_path: Path, start: Callable[..., Started]) -> None:
    (tmp_path / "a.py").write_text(
        "import atexit, sys, time\n"
        "atexit.register(lambda: (time.sleep(0.5), print('a warning of the teardown')))\n"
        "print('token-1234 is refused'); print('======', file=sys.stderr); sys.exit(42)"
    )
    run = start([sys.executable, str(WORKER), "a.py"], shim=True)
    run.log.redact.learn({"TOKEN": "token-1234"})
    end = run.until("error")["time_ns"]
    run.until("ended")
    assert "teardown" in run.out
    assert run.ranks.last_line_of(4, end) == "***TOKEN*** is refused"
    assert run.ranks.last_line_of(4, end + 5_000_000_000) == "", "too long before"


def test_what_torchrun_says_of_a_store_that_is_gone_is_held_back(start: Callable[..., Started]) -> None:
    """Node 0's store ends first in a successful run. The 20 lines of C++ help no reader."""
    said = (
        "[W1122 22:41:04.240865138 TCPStore.cpp:138] [c10d] recvValueWithTimeout failed on SocketImpl(fd=3, addr=[::]"
        ":47646): Failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown or crash?",
        "Exception raised from recvBytes at Utils.hpp:787 (most recent call first):",
        "frame #0: c10::Error::Error(c10::SourceLocation, std::__cxx11::basic_string<char>) + 0x9d",
    )
    lines = [
        "[I1122 TCPStore.cpp:267] [c10d - debug] The server has started on port = 29500.",
        "[W1122 TCPStore.cpp:340] [c10d] TCP client failed to connect/validate to host 10.0.0.1:29500 - retrying",
        *said,
    ]
    run = start(["/bin/sh", "-c", f"cat <<'.'\n{chr(10).join(lines)}\n.", "torch.distributed.run"], shim=False)
    run.until("ended")
    assert run.out == f"[a0.0 n0 r- #1] {lines[0]}\n[a0.0 n0 r- #2] {lines[1]}\n"
    assert run.ranks.unshown == list(said), "kept, for when torchrun itself fails"


def test_a_command_that_is_not_there_raises(tmp_path: Path, start: Callable[..., Started]) -> None:
    with pytest.raises(FileNotFoundError):
        start(["/no/such/program"], shim=False)


@pytest.mark.slow
def test_a_grandchild_that_keeps_the_pipe_open_does_not_hold_the_end(
    tmp_path: Path, start: Callable[..., Started]
) -> None:
    run = start(["/bin/sh", "-c", "sleep 30 & echo $!"], shim=False)
    began = time.monotonic()
    assert run.until("ended")["code"] == 0
    assert time.monotonic() - began < 8
    pid = int(run.out.split("] ")[1])
    run.ranks.kill()
    time.sleep(0.2)
    assert gone(pid)


def test_kill_takes_everything_that_shares_a_ranks_group(tmp_path: Path, start: Callable[..., Started]) -> None:
    (tmp_path / "a.py").write_text(
        "import signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import signal,time; signal.signal(15, 1); time.sleep(60)'])\n"
        "print(child.pid, flush=True)\ntime.sleep(60)"
    )
    run = start([sys.executable, str(WORKER), "a.py"], shim=True)
    run.until("start")
    deadline = time.monotonic() + 20
    out = ""
    while "]" not in out and time.monotonic() < deadline:
        time.sleep(0.05)
        out += run.out
    child = int(out.split("] ")[1])
    run.ranks.signal(signal.SIGTERM)
    time.sleep(0.5)
    assert not gone(run.ranks.pid)
    run.ranks.kill()
    assert run.until("ended")["code"] == -signal.SIGKILL
    time.sleep(0.2)
    assert gone(child)


def test_stacks_are_printed_and_the_rank_lives(tmp_path: Path, start: Callable[..., Started]) -> None:
    (tmp_path / "a.py").write_text(
        "import time\ndef waiting():\n    while True: time.sleep(0.1)\nprint('up', flush=True)\nwaiting()"
    )
    run = start([sys.executable, str(WORKER), "a.py"], shim=True)
    run.until("start")
    out, deadline = "", time.monotonic() + 20
    while "up" not in out and time.monotonic() < deadline:
        time.sleep(0.05)
        out += run.out
    run.ranks.dump_stacks()
    while "in waiting" not in out and time.monotonic() < deadline:
        time.sleep(0.05)
        out += run.out
    assert "in waiting" in out
    assert run.ranks.code is None
    run.ranks.kill()
    run.until("ended")


# ------------------------------------------------------------------------------------------------------- a stop notice


def printed(run: Started, text: str, seconds: float = 20) -> str:
    """Return the output from here on, up to ``text``."""
    out, deadline = "", time.monotonic() + seconds
    while text not in out:
        assert time.monotonic() < deadline, out
        time.sleep(0.02)
        out += run.out
    return out


def test_a_command_with_a_trap_has_the_notice_at_once_and_once(start: Callable[..., Started]) -> None:
    trap = "trap 'echo told; n=$((n+1))' TERM; echo up; while [ -z \"$n\" ]; do sleep 0.1; done; sleep 1; exit 10$n"
    run = start(["/bin/sh", "-c", trap], shim=False)
    printed(run, "up")
    assert not run.ranks.notified(4, time.time_ns())
    before = time.time_ns()
    assert run.ranks.notify()
    assert not run.ranks.notify()
    assert run.ranks.notified(4, time.time_ns())
    assert not run.ranks.notified(4, before)
    printed(run, "told", seconds=3)
    run.ranks.signal(signal.SIGTERM)
    assert run.until("ended", 10)["code"] == 101


def test_a_command_without_a_trap_has_no_notice(start: Callable[..., Started]) -> None:
    run = start(["/bin/sh", "-c", "echo up; sleep 30; exit 1"], shim=False)
    printed(run, "up")
    assert not run.ranks.notify()
    run.ranks.signal(signal.SIGTERM)
    assert run.until("ended", 10)["code"] == -signal.SIGTERM


def test_what_a_told_command_runs_in_its_foreground_is_told_at_the_end(start: Callable[..., Started]) -> None:
    run = start(["/bin/sh", "-c", "trap 'echo told' TERM; echo up; sleep 30; exit 7"], shim=False)
    printed(run, "up")
    time.sleep(0.2)
    assert run.ranks.notify()
    time.sleep(0.5)
    assert run.ranks.code is None  # its trap waits for the sleep
    run.ranks.signal(signal.SIGTERM)
    assert run.until("ended", 10)["code"] == 7
    assert "told" in run.out


def test_a_lone_rank_with_a_handler_has_the_notice_once(tmp_path: Path, start: Callable[..., Started]) -> None:
    (tmp_path / "a.py").write_text(
        "import signal, time\n"
        "signal.signal(signal.SIGTERM, lambda *a: print('told', flush=True))\n"
        "print('up', flush=True)\nend = time.time() + 1.5\nwhile time.time() < end: time.sleep(0.1)"
    )
    run = start([sys.executable, str(WORKER), "a.py"], shim=True)
    out = printed(run, "up")
    run.until("start")
    assert run.ranks.notify()
    assert not run.ranks.notify()
    run.ranks.signal(signal.SIGTERM)
    assert run.until("ended", 10)["code"] == 0
    assert (out + run.out).count("told") == 1


def test_a_rank_has_the_next_notice_when_one_was_withdrawn(start: Callable[..., Started]) -> None:
    """A reaction in the first minute may follow from the first notice. A later one follows from the second."""
    run = start(["/bin/sh", "-c", "trap 'echo told' TERM; echo up; while :; do sleep 0.1; done"], shim=False)
    printed(run, "up")
    assert run.ranks.notify()
    run.ranks.forget_notice(60.0)
    assert run.ranks.notified(4, time.time_ns())
    assert not run.ranks.notified(4, time.time_ns() + 61 * 10**9)
    assert run.ranks.notify()
    assert run.ranks.notified(4, time.time_ns() + 61 * 10**9)


def test_torchrun_itself_has_no_notice(tmp_path: Path, start: Callable[..., Started]) -> None:
    code = "import signal, time; signal.signal(15, lambda *a: print('told', flush=True)); print('up', flush=True)"
    run = start([sys.executable, "-c", f"{code}; time.sleep(30)", "torch.distributed.run"], shim=False)
    printed(run, "up")
    assert not run.ranks.notify()
    assert run.ranks.code is None
