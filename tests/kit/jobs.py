"""Whole runs of provider local by the real console script, and the processes that they leave."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stderr, redirect_stdout, suppress
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from profiles import PROFILE

from cloudtrain import cli, schemas
from cloudtrain.runs.run import Run, open_run
from cloudtrain.runtime.timings import Timings
from cloudtrain.storage.timings import CLIENT_TIMINGS, ClientTimings
from cloudtrain.store import runtime_zip
from cloudtrain.validate import TEST_TIMINGS, timings_of

CLI = [sys.executable, "-m", "cloudtrain"]
Once = Callable[[str, Callable[[], Any]], Any]
MARK = "JOBS_TEST_MARK"
DIES = """
import importlib, os, sys
target, moment = sys.argv.pop(1).split("@")
module, _, path = target.partition(":")
owner, _, name = path.partition(".")
kind = getattr(importlib.import_module(module), owner)
call = getattr(kind, name)
def dying(*args, **kwargs):
    if moment == "before":
        os._exit(99)
    call(*args, **kwargs)
    os._exit(99)
setattr(kind, name, dying)
from cloudtrain.cli import main
sys.exit(main())
"""


def dying(call: str, moment: str) -> list[str]:
    """Return a replacement of `CLI` that exits at once ``before`` or ``after`` the call ``module:Class.method``."""
    return [sys.executable, "-c", DIES, f"{call}@{moment}"]


def called(*argv: str, cwd: Path, environ: Mapping[str, str] | None = None) -> Done:
    """Run the command in this process, with the variables ``environ`` alone. Return its output and exit code."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.chdir(cwd)
        if environ is not None:
            for name in os.environ.keys() - environ.keys():
                patch.delenv(name)
            for name, value in environ.items():
                patch.setenv(name, value)
        code = cli.main(list(argv))
    return Done(code, out.getvalue(), err.getvalue(), verb=argv[0])


class Jobs:
    """A code folder, a store, and a variable in the environment that marks every process of its runs."""

    def __init__(self, tmp_path: Path) -> None:
        self.tmp, self.code, self.store = tmp_path, tmp_path / "code", tmp_path / "store"
        self.code.mkdir()
        self.mark = uuid.uuid4().hex
        self.environ = {k: v for k, v in os.environ.items() if not k.startswith("CLOUDTRAIN_")} | {MARK: self.mark}
        self.started: list[subprocess.Popen[str]] = []
        self.shorten()

    def write(self, name: str, text: str) -> Path:
        path = self.code / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text), encoding="utf-8")
        return path

    def start(self, *argv: str, python: list[str] = CLI, **environ: str) -> subprocess.Popen[str]:
        """Start ``cloudtrain ARGV`` in the code folder, in its own session as a terminal would."""
        process = subprocess.Popen(
            [*python, *argv], cwd=self.code, env={**self.environ, **environ}, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        self.started.append(process)
        return process

    def cli(self, *argv: str, timeout: float = 120, **environ: str) -> Done:
        """Run the command to its end. It runs in this process. In a proof, it runs the console script. `start` always
        runs the script. So do tests of clients that die, and verbs that become another program."""
        if PROFILE != "proof" and argv[0] not in ("shell", "tensorboard"):
            return self.here(*argv, **environ)
        process = self.start(*argv, **environ)
        out, err = process.communicate(timeout=timeout)
        return Done(process.returncode, out, err, verb=argv[0])

    def here(self, *argv: str, **environ: str) -> Done:
        """Run the command in this process: starting a client takes a quarter of a second, and two with an SDK."""
        with pytest.MonkeyPatch.context() as patch:
            for name, value in vars(timings_of(ClientTimings, "client", self.environ[TEST_TIMINGS])).items():
                patch.setattr(CLIENT_TIMINGS, name, value)
            return called(*argv, cwd=self.code, environ={**self.environ, **environ})

    def submit(self, script: str, *flags: str, timeout: float = 120, **environ: str) -> Done:
        """Submit and wait; the script's arguments follow ``--`` in the flags."""
        self._bring_runtime()
        return self.cli("submit", script, "--store", str(self.store), "--json", *flags, timeout=timeout, **environ)

    def _bring_runtime(self) -> None:
        """Put the runtime into the store. Otherwise each submit to an empty store builds it, for a quarter of a
        second."""
        if isinstance(self.store, Path):
            zipped = self.store / "runtime" / runtime_zip.digest() / "cloudtrain.pyz"
            if not zipped.exists():
                zipped.parent.mkdir(parents=True, exist_ok=True)
                zipped.write_bytes(runtime_zip.build())

    def detach(self, script: str, *flags: str) -> Run:
        done = self.submit(script, "--detach", *flags)
        assert done.code == 0, done.err
        return self.run(done.json["run_id"])

    def run(self, run_id: str) -> Run:
        return open_run(run_id, store_url=str(self.store))

    def runs(self) -> list[str]:
        return sorted(p.parent.name for p in (self.store / "runs").glob("*/run.json"))

    def shorten(self, **seconds: float) -> None:
        """Set `Timings` and `ClientTimings` of all later processes. A restart never waits."""
        seconds = {"restart": 0.1, **seconds}
        halves = dict.fromkeys(vars(Timings()), "node") | dict.fromkeys(vars(ClientTimings()), "client")
        self.environ[TEST_TIMINGS] = ",".join(f"{halves[name]}.{name}={value}" for name, value in seconds.items())

    # ---------------------------------------------------------------------------------------------------- processes

    def processes(self) -> dict[int, str]:
        """Return pid and command line of every process with the mark."""
        found = {}
        for folder in Path("/proc").iterdir():
            with suppress(OSError, ValueError):
                if (
                    int(folder.name) != os.getpid()
                    and f"{MARK}={self.mark}".encode() in (folder / "environ").read_bytes()
                ):
                    found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        return found

    def pid_of(self, pattern: str, node: int | None = None) -> int | None:
        for pid, line in sorted(self.processes().items()):
            if re.search(pattern, line) and (node is None or self.variable(pid, "CLOUDTRAIN_ENGINE_NODE") == str(node)):
                return pid
        return None

    @staticmethod
    def variable(pid: int, name: str) -> str | None:
        with suppress(OSError):
            for pair in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                key, _, value = pair.partition(b"=")
                if key.decode() == name:
                    return value.decode()
        return None

    def supervisor(self) -> int:
        return self.wait_for(lambda: self.pid_of(r"cloudtrain\.engine\.supervisor"))

    def node(self, number: int) -> int:
        """Return the pid of a node's runtime, which leads its process group."""
        return self.wait_for(lambda: self.pid_of(r"cloudtrain\.pyz run ", number))

    def gone(self, seconds: float = 10) -> None:
        """Wait until no process of any run is left."""
        deadline = time.monotonic() + seconds
        while left := self.processes():
            assert time.monotonic() < deadline, left
            time.sleep(0.05)

    @staticmethod
    def wait_for(what: Callable[[], Any], seconds: float = 60) -> Any:
        deadline = time.monotonic() + seconds
        while not (found := what()):
            assert time.monotonic() < deadline, "it never came"
            time.sleep(0.05)
        return found

    def printed(self, run: Run, text: str, seconds: float = 60) -> None:
        """Wait until the nodes have printed ``text``."""
        folder = self.store / "runs" / run.run_id / "supervisor" / "out"
        self.wait_for(lambda: any(text in p.read_text(errors="replace") for p in folder.glob("*/*.log")), seconds)

    def close(self) -> None:
        for process in self.started:
            if process.poll() is None:
                process.kill()
            process.communicate()
        for pid in self.processes():
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)


@cache
def schema_of(verb: str) -> jsonschema.Draft202012Validator | None:
    """Return the published schema of the verb's output."""
    return jsonschema.Draft202012Validator(schemas.load(verb)) if verb in schemas.names() else None


class Done:
    """A command that has ended. `json` checks the output of ``verb`` by its schema in every test."""

    def __init__(self, code: int, out: str, err: str, verb: str = "") -> None:
        self.code, self.out, self.err, self.verb = code, out, err, verb

    @property
    def json(self) -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads(self.out)
        except ValueError:
            raise AssertionError(f"exit {self.code}, no JSON: {self.out!r} {self.err}") from None
        if (schema := schema_of(self.verb)) is not None:
            schema.validate(found)
        return found


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Jobs]:
    made = Jobs(tmp_path)
    yield made
    made.close()
