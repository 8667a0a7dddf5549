"""The shim: a script under it sees what plain ``python`` gives it, and the shim reports its end correctly."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import cloudtrain
from cloudtrain.store import runtime_zip

WORKER = Path(cloudtrain.__file__).parent / "runtime" / "worker.py"
CLEAN = {k: v for k, v in os.environ.items() if not k.startswith(("CLOUDTRAIN_", "PYTHON", "RANK", "LOCAL_", "WORLD_"))}


class Outcome:
    def __init__(self, code: int, out: str, events: list[dict[str, Any]]) -> None:
        self.code, self.out, self.events = code, out, events

    @property
    def error(self) -> dict[str, Any]:
        (found,) = [e for e in self.events if e["event"] == "error"]
        return found

    @property
    def kinds(self) -> list[str]:
        return [e["event"] for e in self.events]

    def json(self) -> Any:
        return json.loads(self.out.strip().splitlines()[-1])


class Stage:
    """A working folder with files, in which a script is started plainly or under the shim."""

    def __init__(self, tmp_path: Path) -> None:
        self.tmp = tmp_path
        # As on a node: the shim is a separate file in scratch, next to the code and never in it.
        (tmp_path / "scratch").mkdir()
        self.worker = tmp_path / "scratch" / "worker.py"
        self.worker.write_bytes(WORKER.read_bytes())
        self.package = tmp_path / "cloudtrain.pyz"
        self.package.write_bytes(runtime_zip.build())
        self.code = tmp_path / "code"
        self.code.mkdir()

    def write(self, **files: str) -> None:
        for name, text in files.items():
            path = self.code / (name.replace("__", "/", 1) if name.startswith("pkg__") else name)
            path = path.with_suffix(".py")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(textwrap.dedent(text), encoding="utf-8")

    def plain(self, *argv: str, env: dict[str, str] | None = None) -> Outcome:
        done = subprocess.run(
            [sys.executable, *argv], cwd=self.code, env={**CLEAN, **(env or {})}, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=90, check=False,
        )  # fmt: skip
        return Outcome(done.returncode, done.stdout, [])

    def bare(self, *argv: str, env: dict[str, str] | None = None) -> Outcome:
        """Run under the shim, with no reader at the pipes."""
        given = {"CLOUDTRAIN_WORKER": f"{self.tmp / 'nowhere'}\n{self.package}", **(env or {})}
        return self.plain(str(self.worker), *argv, env=given)

    def run(
        self, *argv: str, env: dict[str, str] | None = None, act: Any = None, python: tuple[str, ...] = ()
    ) -> Outcome:
        """Run under the shim as the runtime starts it, with ``act(process, lines)`` at the same time."""
        pipes = Path(os.path.realpath(self.tmp)) / "pipes"
        pipes.mkdir(exist_ok=True)
        texts: dict[str, bytes] = {}
        readers = []
        for name in ("out-0", "events-0"):
            (pipes / name).unlink(missing_ok=True)
            os.mkfifo(pipes / name)
            # Open the pipe here first, so that the reader exists before the shim does.
            fd = os.open(pipes / name, os.O_RDONLY | os.O_NONBLOCK)
            keep = os.open(pipes / name, os.O_WRONLY)
            os.set_blocking(fd, True)
            readers.append((name, fd, keep))
        process = subprocess.Popen(
            [sys.executable, *python, str(self.worker), *argv], cwd=self.code, stdin=subprocess.DEVNULL,
            env={**CLEAN, "CLOUDTRAIN_WORKER": f"{pipes}\n{self.package}", **(env or {})},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        lines: list[bytes] = []

        def read(name: str, fd: int) -> None:
            data = b""
            while chunk := os.read(fd, 65536):
                data += chunk
                if name == "out-0":
                    lines.append(chunk)
            texts[name] = data
            os.close(fd)

        threads = [threading.Thread(target=read, args=(name, fd), daemon=True) for name, fd, _ in readers]
        for thread in threads:
            thread.start()
        if act is not None:
            act(process, lines)
        late, _ = process.communicate(timeout=90)
        for _, _, keep in readers:
            os.close(keep)
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive(), "a process still holds the pipe"
        assert late == b"", "printed past the pipe"
        events = [json.loads(line) for line in texts["events-0"].splitlines()]
        return Outcome(process.returncode, texts["out-0"].decode("utf-8", "replace"), events)


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


FACTS = """
import json, os, sys
main = sys.modules["__main__"]
print(json.dumps({
    "argv": sys.argv, "name": __name__, "file": __file__, "path": sys.path, "globals": sorted(globals()),
    "package": __package__, "spec": getattr(__spec__, "name", None), "loader": type(__loader__).__name__,
    "main": main.__dict__ is globals(), "doc": __doc__, "cwd": os.getcwd(), "cached": globals().get("__cached__"),
    "worker": "worker" in sys.modules, "environ": sorted(os.environ), "builtins": type(__builtins__).__name__,
    "early": sorted(m for m in ("json", "traceback", "threading", "subprocess", "logging") if m in BEFORE),
}))
"""
FACTS = '"""Its own docstring."""\nimport sys\nBEFORE = set(sys.modules)\n' + FACTS


# ------------------------------------------------------------------------------------------------- as plain python does


@pytest.mark.slow
@pytest.mark.parametrize(
    "argv",
    [["facts.py"], ["facts.py", "--a", "b c", "", "-m", "é\n{}"], ["pkg/inner.py", "x"], ["./facts.py"],
     ["-m", "facts", "1"], ["-m", "pkg.inner", "--", "-m"], ["-m", "pkg", "x"], ["-m", "pkg.sub"]],
    ids=lambda argv: " ".join(argv).encode("ascii", "replace").decode(),
)  # fmt: skip
@pytest.mark.parametrize("pipes", [True, False], ids=["pipes", "alone"])
def test_a_script_cannot_tell_the_shim_from_python(stage: Stage, argv: list[str], pipes: bool) -> None:
    for name in ("facts", "pkg__inner", "pkg__main"):
        stage.write(**{name: FACTS})
    (stage.code / "pkg" / "main.py").rename(stage.code / "pkg" / "__main__.py")
    (stage.code / "pkg" / "sub").mkdir()
    (stage.code / "pkg" / "sub" / "__main__.py").write_text(FACTS)
    (stage.code / "pkg" / "sub" / "__init__.py").write_text("")
    plain = stage.plain(*argv).json()
    shim = (stage.run if pipes else stage.bare)(*argv)
    assert shim.code == 0, shim.out
    seen = shim.json()
    assert seen["path"] == [*plain["path"], str(stage.package)]  # ours goes last
    for key in plain:
        if key != "path":
            assert seen[key] == plain[key], key


def test_with_a_safe_path_the_folder_stays_off_it(stage: Stage) -> None:
    stage.write(facts=FACTS)
    env = {"PYTHONSAFEPATH": "1"}
    plain, seen = stage.plain("facts.py", env=env).json(), stage.run("facts.py", env=env).json()
    if sys.version_info >= (3, 11):
        assert str(stage.code) not in seen["path"]
    assert [p for p in seen["path"] if p not in plain["path"]] == [str(stage.package)]


def test_source_of_any_encoding_runs(stage: Stage) -> None:
    (stage.code / "latin.py").write_bytes("# -*- coding: latin-1 -*-\nprint(ascii('é'))\n".encode("latin-1"))
    (stage.code / "bom.py").write_bytes(b"\xef\xbb\xbfprint(ascii('\xc3\xa9'))\r\n")
    assert stage.run("latin.py").out == "'\\xe9'\n"
    assert stage.run("bom.py").out == "'\\xe9'\n"


def test_the_working_folder_may_change_and_file_still_leads_home(stage: Stage) -> None:
    stage.write(a="import os, pathlib\nos.chdir('/')\nprint(pathlib.Path(__file__).exists())\nraise ValueError(1)")
    done = stage.run("a.py")
    assert done.out.startswith("True\n")
    assert "raise ValueError(1)" in done.out
    assert (done.error["file"], done.error["line"]) == (str(stage.code / "a.py"), 4)


def test_modules_beside_the_script_win_over_the_standard_librarys(stage: Stage) -> None:
    stage.write(
        json="MINE = 'json'", traceback="MINE = 'traceback'", sysconfig="MINE = 'sysconfig'", queue="MINE = 'queue'",
        ok="import json, traceback, sysconfig, queue\nprint(json.MINE, traceback.MINE, sysconfig.MINE, queue.MINE)",
        bad="import json, traceback, sysconfig\nprint(json.MINE, traceback.MINE)\n\nraise ValueError('with my own')",
    )  # fmt: skip
    assert stage.run("ok.py").out == "json traceback sysconfig queue\n"
    done = stage.run("bad.py")
    assert done.code == 1
    assert done.out.startswith("json traceback\n")
    assert done.error["exception"] == "ValueError: with my own"
    assert (done.error["file"], done.error["line"]) == (str(stage.code / "bad.py"), 4)
    assert "raise ValueError('with my own')" in done.error["traceback"]
    assert stage.run("ok.py").kinds == ["start", "end"]


def test_a_package_called_cloudtrain_beside_the_script_wins_and_ours_is_there_without(stage: Stage) -> None:
    stage.write(ours="import cloudtrain; print(cloudtrain.__file__)")
    assert str(stage.package) in stage.plain(
        "-S", str(stage.worker), "ours.py", env={"CLOUDTRAIN_WORKER": f"{stage.tmp / 'nowhere'}\n{stage.package}"}
    ).out  # fmt: skip
    (stage.code / "cloudtrain").mkdir()
    (stage.code / "cloudtrain" / "__init__.py").write_text("MINE = True\n")
    (stage.code / "own.py").write_text("import cloudtrain; print(cloudtrain.MINE)")
    assert stage.run("own.py").out == "True\n"


def test_an_own_sitecustomize_works(stage: Stage) -> None:
    stage.write(sitecustomize="import builtins\nbuiltins.CUSTOM = 'yes'", a="print(CUSTOM)")
    assert stage.run("a.py", env={"PYTHONPATH": str(stage.code)}).out == "yes\n"


def test_classes_of_the_script_pickle(stage: Stage) -> None:
    stage.write(
        a="""
        import dataclasses, inspect, pickle, sys, typing
        @dataclasses.dataclass
        class Config:
            lr: float
            names: "typing.List[str]"
        c = Config(0.1, ["x"])
        assert pickle.loads(pickle.dumps(c)) == c
        assert typing.get_type_hints(Config)["names"] == typing.List[str]
        assert inspect.getsource(Config).startswith("@dataclasses")
        assert Config.__module__ == "__main__" and sys.modules["__main__"].Config is Config
        import __main__
        assert __main__.Config is Config
        print("fine")
        """
    )
    assert stage.run("a.py").out == "fine\n"


MP = """
import multiprocessing as mp, os, sys
class Thing:
    def __init__(self, n): self.n = n
def work(thing, queue): queue.put((thing.n * 2, __name__, sys.argv))
if __name__ == "__main__":
    context = mp.get_context(sys.argv[1])
    queue = context.Queue()
    children = [context.Process(target=work, args=(Thing(i), queue)) for i in (1, 2)]
    [c.start() for c in children]
    got = sorted(queue.get(timeout=60) for _ in children)
    [c.join() for c in children]
    print([g[0] for g in got], {g[1] for g in got}, got[0][2], [c.exitcode for c in children])
"""


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
@pytest.mark.parametrize("target", [["a.py"], ["-m", "pkg.a"]], ids=["script", "module"])
def test_child_processes_import_the_script_and_not_the_shim(stage: Stage, method: str, target: list[str]) -> None:
    stage.write(a=MP, pkg__a=MP)
    plain, done = stage.plain(*target, method), stage.run(*target, method)
    assert done.out == plain.out
    assert done.out.startswith("[2, 4]")
    assert (done.code, done.kinds) == (0, ["start", "end"])


@pytest.mark.slow
def test_dataloader_workers(stage: Stage) -> None:
    """Each spawned worker imports torch again, so there is one."""
    stage.write(
        a="""
        import torch, warnings
        from torch.utils.data import DataLoader, Dataset
        class Squares(Dataset):
            def __len__(self): return 8
            def __getitem__(self, i): return torch.tensor(i * i)
        if __name__ == "__main__":
            for method, workers in (("fork", 2), ("spawn", 1)):
                loader = DataLoader(Squares(), batch_size=4, num_workers=workers, multiprocessing_context=method)
                print(method, [b.tolist() for b in loader], flush=True)
        """
    )
    done = stage.run("a.py", env={"OMP_NUM_THREADS": "1"})
    for method in ("fork", "spawn"):  # the resource tracker may warn last
        assert f"{method} [[0, 1, 4, 9], [16, 25, 36, 49]]" in done.out.splitlines(), done.out
    assert done.kinds == ["start", "end"]


def test_the_variable_that_leads_to_the_pipes_is_gone(stage: Stage) -> None:
    stage.write(a="import os\nprint([k for k in os.environ if 'CLOUDTRAIN' in k])")
    assert stage.run("a.py").out == "[]\n"


# --------------------------------------------------------------------------------------------------------------- events


ENDINGS = [
    # (script, exit code as plain python gives it, kinds of events, exception of the record)
    ("pass", 0, ["start", "end"], None),
    ("import sys; sys.exit()", 0, ["start", "end"], None),
    ("import sys; sys.exit(0)", 0, ["start", "end"], None),
    ("import sys; sys.exit(42)", 42, ["start", "error"], "SystemExit: 42"),
    ("import sys; sys.exit('no data')", 1, ["start", "error"], "SystemExit: no data"),
    ("import sys; sys.exit(True)", 1, ["start", "error"], "SystemExit: True"),
    ("raise SystemExit([1])", 1, ["start", "error"], "SystemExit: [1]"),
    ("raise ValueError('x')", 1, ["start", "error"], "ValueError: x"),
    ("raise ValueError", 1, ["start", "error"], "ValueError"),
    ("class Mine(Exception): pass\nraise Mine('own')", 1, ["start", "error"], "Mine: own"),
    ("import json\njson.loads('{')", 1, ["start", "error"], "json.decoder.JSONDecodeError: Expecting property name"),
    ("import os; os._exit(3)", 3, ["start"], None),
    ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -9, ["start"], None),
    ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -15, ["start"], None),
    ("x = = 1", 1, ["start", "error"], "SyntaxError: invalid syntax"),
    ("raise KeyboardInterrupt", -2, ["start"], None),
    ("class Odd(Exception):\n    def __str__(self): raise TypeError\nraise Odd()", 1, ["start", "error"], "Odd"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("text", "code", "kinds", "exception"), ENDINGS, ids=[e[0][:30] for e in ENDINGS])
def test_every_ending_is_told_and_exits_as_plain_python_does(
    stage: Stage, text: str, code: int, kinds: list[str], exception: str | None
) -> None:
    stage.write(a=text)
    plain, done = stage.plain("a.py"), stage.run("a.py")
    assert (done.code, done.kinds) == (code, kinds), done.out
    assert plain.code == code
    assert done.out == plain.out
    if exception is not None:
        assert done.error["exception"].startswith(exception)
        assert done.error["code"] == code
        assert done.error["line"] == text.count("\n") + 1 or exception == "SyntaxError: invalid syntax"


def test_the_record_points_into_the_users_code(stage: Stage) -> None:
    stage.write(
        a="import lib\n\n\ndef main():\n    lib.deep()\n\nmain()",
        lib="import json\ndef deep():\n    return json.loads('nonsense')",
    )
    before = time.time_ns()
    error = stage.run("a.py").error
    assert (error["file"], error["line"]) == (str(stage.code / "lib.py"), 3)
    assert error["exception"].startswith("json.decoder.JSONDecodeError: Expecting value")
    assert before < error["time_ns"] < time.time_ns()
    trace = error["traceback"]
    assert trace.startswith("Traceback (most recent call last):\n")
    assert "worker.py" not in trace
    assert trace.index("a.py") < trace.index("lib.py") < trace.index("json")
    assert trace.rstrip().endswith("JSONDecodeError: Expecting value: line 1 column 1 (char 0)")


PARSES = "import argparse\np = argparse.ArgumentParser()\np.add_argument('--steps', type=int)\n"


@pytest.mark.parametrize(
    ("text", "code", "why"),
    [
        (PARSES + "p.parse_args(['--stepz', '3'])", 2, "a.py: error: unrecognized arguments: --stepz 3"),
        (PARSES + "p.parse_args(['--steps', 'x'])", 2, "a.py: error: argument --steps: invalid int value: 'x'"),
        ("def error(message):\n    print(message)\n    raise SystemExit(4)\n\nerror('no data')", 4, "no data"),
        ("import sys\ntry:\n    open('nowhere')\nexcept OSError:\n    sys.exit(5)", 5, "FileNotFoundError: "),
        ("import sys\ntry:\n    1 / 0\nexcept ZeroDivisionError:\n    raise SystemExit(6) from None", 6, "6"),
        ("import sys\ntry:\n    1 / 0\nexcept ZeroDivisionError:\n    pass\nsys.exit(7)", 7, "7"),
    ],
)  # fmt: skip
def test_an_exit_by_code_says_why(stage: Stage, text: str, code: int, why: str) -> None:
    stage.write(a=text)
    plain, done = stage.plain("a.py"), stage.run("a.py")
    assert (done.code, done.out) == (plain.code, plain.out)
    assert (done.error["code"], done.error["file"]) == (code, str(stage.code / "a.py"))
    assert done.error["exception"].startswith(f"SystemExit: {why}")
    assert "argparse.py" not in done.error["traceback"]
    assert done.error["traceback"].rstrip().endswith(f"SystemExit: {code}")


def test_a_syntax_error_is_where_it_is(stage: Stage) -> None:
    stage.write(a="import b", b="x = 1\ny = (\n")
    error = stage.run("a.py").error
    assert error["exception"].startswith("SyntaxError: '(' was never closed")
    assert (error["file"], error["line"]) in (
        (str(stage.code / "b.py"), 2),
        (str(stage.code / "a.py"), 1),
    )
    stage.write(c="x = 1\ny = (\n")
    error = stage.run("c.py").error
    assert (error["file"], error["line"]) == (str(stage.code / "c.py"), 2)


def test_chains_are_in_the_traceback_and_the_last_one_is_the_exception(stage: Stage) -> None:
    stage.write(a="try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise RuntimeError('while') from e")
    error = stage.run("a.py").error
    assert error["exception"] == "RuntimeError: while"
    assert error["line"] == 4
    assert "ZeroDivisionError" in error["traceback"]
    assert "worker.py" not in error["traceback"]


def test_a_giant_traceback_keeps_its_end(stage: Stage) -> None:
    stage.write(a="raise ValueError('x' * 10**6 + 'THE END')")
    done = stage.run("a.py")
    assert done.error["traceback"].rstrip().endswith("THE END")
    assert len(done.error["traceback"]) <= 30000


def test_an_exception_that_is_not_utf8_is_still_told(stage: Stage) -> None:
    stage.write(a="raise ValueError('\\udcff' + 'é\\n\\x00')")
    done = stage.run("a.py")
    assert done.code == 1
    assert done.error["exception"] == "ValueError: \udcffé\n\x00"


def test_missing_scripts_and_modules(stage: Stage) -> None:
    gone = stage.run("gone.py")
    assert (gone.code, gone.kinds) == (1, ["start", "error"])
    assert gone.error["exception"].startswith("FileNotFoundError: ")
    assert "gone.py" in gone.error["exception"]
    module = stage.run("-m", "pkg.gone")
    assert module.code == 1
    assert module.error["exception"].startswith("ModuleNotFoundError: No module named 'pkg")


def test_a_script_that_handles_its_own_excepthook(stage: Stage) -> None:
    stage.write(a="import sys\nsys.excepthook = lambda *a: print('MY HOOK', a[0].__name__)\nraise ValueError(1)")
    done = stage.run("a.py")
    assert (done.code, done.out) == (1, "MY HOOK ValueError\n")
    assert done.error["exception"] == "ValueError: 1"


def test_threads_and_atexit_are_waited_for(stage: Stage) -> None:
    stage.write(
        a="""
        import atexit, threading, time
        atexit.register(lambda: print("atexit"))
        threading.Thread(target=lambda: (time.sleep(0.3), print("thread"))).start()
        print("main")
        """
    )
    plain, done = stage.plain("a.py"), stage.run("a.py")
    assert done.out == plain.out == "main\nthread\natexit\n"


FORK = """
import os, sys, time
print("parent", flush=True)
pid = os.fork()
if pid == 0:
    {child}
_, status = os.waitpid(pid, 0)
print("child", os.waitstatus_to_exitcode(status))
"""


@pytest.mark.parametrize(
    ("child", "code"), [("raise ValueError('child')", 1), ("sys.exit(7)", 7), ("os._exit(3)", 3), ("sys.exit(0)", 0)]
)
def test_a_forked_child_that_fails_is_not_the_rank(stage: Stage, child: str, code: int) -> None:
    stage.write(a=FORK.format(child=child))
    done = stage.run("a.py")
    assert done.out.splitlines()[-1] == f"child {code}"
    assert (done.code, done.kinds) == (0, ["start", "end"])


def test_the_events_pipe_ends_with_the_rank_though_children_live_on(stage: Stage) -> None:
    """Its end of file marks the death, which a daemon that the script leaves must not hide."""
    stage.write(
        a="""
        import os, subprocess, sys, time
        if os.fork() == 0:
            os.dup2(os.open(os.devnull, os.O_RDWR), 1); os.dup2(1, 2)
            if os.fork() == 0:
                time.sleep(20)
            os._exit(0)
        os.wait()
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(20)"], stdout=-3, stderr=-3)
        os._exit(5)
        """
    )
    began = time.monotonic()
    done = stage.run("a.py")  # joins the readers
    assert done.code == 5
    assert time.monotonic() - began < 15


def test_the_start_is_told_first_with_pid_and_rank(stage: Stage) -> None:
    stage.write(a="import os; print(os.getpid())")
    done = stage.run("a.py", env={"RANK": "3", "LOCAL_RANK": "0"})
    assert done.events[0]["event"] == "start"
    assert (done.events[0]["pid"], done.events[0]["rank"]) == (int(done.out), 3)


def test_the_local_rank_chooses_the_pipe_and_without_its_reader_the_script_does_not_run(stage: Stage) -> None:
    """A pipe without a reader means that the runtime has died. No rank may continue without it."""
    stage.write(a="print('still here')")
    pipes = stage.tmp / "pipes"
    pipes.mkdir()
    os.mkfifo(pipes / "out-1")
    env = {"CLOUDTRAIN_WORKER": f"{pipes}\n{stage.package}"}
    other = stage.plain(str(stage.worker), "a.py", env={**env, "LOCAL_RANK": "0"})
    assert (other.code, other.out) == (0, "still here\n")
    done = stage.plain(str(stage.worker), "a.py", env={**env, "LOCAL_RANK": "1"})
    assert done.code == 1
    assert "runtime of this node is gone" in done.out
    assert "still here" not in done.out


def test_stacks_on_request_without_an_end(stage: Stage) -> None:
    stage.write(
        a="""
        import time
        def here_it_waits():
            print("up", flush=True)
            while True:
                time.sleep(0.05)
        here_it_waits()
        """
    )

    def ask(process: subprocess.Popen[bytes], lines: list[bytes]) -> None:
        deadline = time.monotonic() + 30
        while not lines and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(signal.SIGUSR1)
        while b"here_it_waits" not in b"".join(lines) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert process.poll() is None
        process.terminate()

    done = stage.run("a.py", act=ask)
    assert done.code == -signal.SIGTERM
    assert "in here_it_waits" in done.out
    assert done.kinds == ["start"]


def test_a_script_may_handle_sigterm_itself(stage: Stage) -> None:
    stage.write(
        a="""
        import signal, sys, time
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))
        print("up", flush=True)
        time.sleep(60)
        """
    )

    def stop(process: subprocess.Popen[bytes], lines: list[bytes]) -> None:
        while not lines:
            time.sleep(0.02)
        process.terminate()

    done = stage.run("a.py", act=stop)
    assert (done.code, done.error["exception"]) == (9, "SystemExit: 9")
