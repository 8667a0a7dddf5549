"""Measurements against a peer: the cost of a command, interleaved pairs of two commands, and figures against targets.

A shared machine slows both commands of a pair alike. So a figure is the median over pairs of cloudtrain / peer, never a
quotient of two numbers from different moments. CPU seconds accompany wall time, because other jobs change them far
less.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import itertools
import json
import os
import pty
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

__all__ = [
    "CLOUDTRAIN",
    "TORCHRUN",
    "Cost",
    "Figure",
    "Pair",
    "adopt_orphans",
    "alone",
    "cache",
    "cost_of",
    "cpu_of",
    "environ",
    "first_line",
    "median_ratio",
    "options",
    "pairs",
    "parser",
    "peer",
    "reap_orphans",
    "report",
    "scratch",
    "sides",
    "stamps",
    "steps",
    "tree",
]

BIN = Path(sys.executable).parent
CLOUDTRAIN = str(BIN / "cloudtrain")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--"]
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Wall seconds of a command, and CPU seconds (user + system) of it and of every process that it left behind.

    ``rss`` is the peak memory in bytes of it or of a child that it waited for; 0 if not measured.
    """

    wall: float
    cpu: float
    rss: int = 0


@dataclass(frozen=True, kw_only=True)
class Pair:
    ours: Cost
    peer: Cost


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One result. Without a ``target`` it is only reported. ``value`` is the median over ``pairs``."""

    name: str
    value: float
    target: float | None = None
    unit: str = ""
    note: str = ""
    pairs: Sequence[Any] = field(default=())

    @property
    def passed(self) -> bool:
        return self.target is None or self.value <= self.target

    def line(self) -> str:
        unit = f" {self.unit}" if self.unit else ""
        digits = 3 if self.target is not None and self.target < 1.1 else 2
        against = "(report only)" if self.target is None else f"(<= {self.target:.{digits}f}{unit})"
        verdict = "" if self.target is None else "pass" if self.passed else "FAIL"
        note = f"  [{self.note}]" if self.note else ""
        return f"{self.name}: {self.value:.{digits}f}{unit} {against} {verdict}".rstrip() + note

    def document(self) -> dict[str, Any]:
        rows = [row if isinstance(row, dict) else asdict(row) for row in self.pairs]
        return {
            "name": self.name,
            "value": self.value,
            "target": self.target,
            "unit": self.unit or "ratio",
            "passed": self.passed,
            "note": self.note,
            "pairs": rows,
        }


def parser(about: str | None, *, count: int, quick: int) -> argparse.ArgumentParser:
    """Return a parser with ``--json``, ``--quick`` and ``--pairs``."""
    flags = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--json", action="store_true", help="one JSON object on stdout, with every pair")
    flags.add_argument("--quick", action="store_true", help="give a rough answer soon")
    flags.add_argument("--pairs", type=int, help=f"default {count}, with --quick {quick}")
    flags.set_defaults(counts=(count, quick))
    return flags


def options(flags: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the command line by ``flags``, and set ``pairs``."""
    chosen = flags.parse_args()
    if chosen.pairs is None:
        chosen.pairs = chosen.counts[chosen.quick]
    return chosen


def report(figures: Sequence[Figure], *, as_json: bool) -> int:
    """Print a line for each figure (on stderr with ``--json``). Return 1 if one missed its target."""
    for figure in figures:
        print(figure.line(), file=sys.stderr if as_json else sys.stdout, flush=True)
    if as_json:
        machine = {"cpus": os.cpu_count(), "load": os.getloadavg()[0], "python": sys.version.split()[0]}
        print(json.dumps({"machine": machine, "figures": [f.document() for f in figures]}, indent=2))
    return 0 if all(figure.passed for figure in figures) else 1


# --------------------------------------------------------------------------------------------------------- measuring


def environ(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return this environment without variables that configure only one of cloudtrain and torchrun.

    Both get the loopback for gloo, as provider local would set it: a slow host name look-up must not favour cloudtrain.
    Both may keep bytecode: a peer that pip installed already has it, and a checkout only if Python may write it.
    """
    drop = (
        "PYTHONDONTWRITEBYTECODE",
        "CLOUDTRAIN_",
        "PET_",
        "TORCHELASTIC_",
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "MASTER_",
        "OMP_NUM_THREADS",
    )
    loopback = {"GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo"}
    return {**{k: v for k, v in os.environ.items() if not k.startswith(drop)}, **loopback, **(extra or {})}


def adopt_orphans() -> None:
    """Become the parent of processes that commands leave running (the supervisor), so that their CPU counts. Linux
    only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def cost_of(
    command: Sequence[str], *, cwd: Path | None = None, env: Mapping[str, str] | None = None, alone: bool = False
) -> Cost:
    """Run ``command`` and the processes that it leaves behind (not with ``alone``) to their end.

    Raises `RuntimeError` with its last lines if it fails. ``wall`` ends with the command itself; outside Linux ``cpu``
    does too. ``rss`` includes this process at the start, so a benchmark of memory must stay small.
    """
    adopt_orphans()
    with tempfile.TemporaryFile() as out:
        began = time.perf_counter()
        process = subprocess.Popen(
            list(command), cwd=cwd, env=env or environ(), stdin=subprocess.DEVNULL, stdout=out, stderr=out
        )
        _, status, usage = os.wait4(process.pid, 0)
        wall = time.perf_counter() - began
        process.returncode = os.waitstatus_to_exitcode(status)
        cpu = usage.ru_utime + usage.ru_stime + (0.0 if alone else sum(reap_orphans()))
        if process.returncode:
            out.seek(0)
            words = out.read().decode(errors="replace")[-2000:]
            raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}:\n{words}")
    return Cost(wall=wall, cpu=cpu, rss=usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024))


def reap_orphans() -> Iterator[float]:
    """Yield the CPU seconds of each adopted process, once it has ended."""
    with contextlib.suppress(ChildProcessError):
        while True:
            usage = os.wait4(-1, 0)[2]
            yield usage.ru_utime + usage.ru_stime


def first_line(command: Sequence[str], *, cwd: Path, mark: bytes) -> tuple[Cost, bytes]:
    """Run ``command`` on a pseudo-terminal, to its end; ``wall`` ends with the line that contains ``mark``.

    Returns the cost and the text after the mark. Raises `RuntimeError` with the last lines if it fails, or never prints
    the mark.
    """
    adopt_orphans()
    ours, theirs = pty.openpty()
    began = time.perf_counter()
    process = subprocess.Popen(
        list(command), cwd=cwd, env=environ({"TERM": "xterm"}), stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    output, wall = b"", 0.0
    with contextlib.suppress(OSError):  # EIO: no process has the terminal open any more
        while chunk := os.read(ours, 65536):
            output += chunk
            if not wall and b"\n" in output.partition(mark)[2]:
                wall = time.perf_counter() - began
    os.close(ours)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode or not wall:
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}:\n{output.decode()[-2000:]}")
    cpu = usage.ru_utime + usage.ru_stime + sum(reap_orphans())
    return Cost(wall=wall, cpu=cpu), output.partition(mark)[2].partition(b"\n")[0].strip()


def cpu_of(command: Sequence[str], *, cwd: Path | None = None) -> float:
    """Return the CPU seconds of ``command``."""
    return cost_of(command, cwd=cwd).cpu


def pairs(ours: Callable[[], Cost], other: Callable[[], Cost], *, count: int, warm: bool = True) -> list[Pair]:
    """Run ``count`` pairs in alternating order; with ``warm``, one unmeasured round first."""
    if warm:
        other()
        ours()
    found = []
    for i in range(count):
        if i % 2:
            second, first = other(), ours()
        else:
            first, second = ours(), other()
        found.append(Pair(ours=first, peer=second))
    return found


def median_ratio(found: Sequence[Pair], what: str) -> float:
    """Return the median over pairs of cloudtrain / peer, in ``wall`` or ``cpu``."""
    ratios: list[float] = [getattr(pair.ours, what) / getattr(pair.peer, what) for pair in found]
    return statistics.median(ratios)


def sides(found: Sequence[Pair], what: str) -> str:
    """Return the medians behind a ratio, for a figure's note."""
    ours, other = (statistics.median(getattr(getattr(p, side), what) for p in found) for side in ("ours", "peer"))
    spread = sorted(getattr(p.ours, what) / getattr(p.peer, what) for p in found)
    shown = f"{ours / 1e6:.0f} MB / {other / 1e6:.0f} MB" if what == "rss" else f"{ours:.3f} s / {other:.3f} s"
    return f"{shown}, {len(found)} pairs {spread[0]:.3f}..{spread[-1]:.3f}"


def stamps(run: Path) -> dict[str, float]:
    """Return the Unix seconds of a run's stages, from the records in its folder."""

    def read(name: str) -> dict[str, float]:
        found: dict[str, float] = json.loads((run / name).read_bytes())
        return found

    return {
        "planned and staged": read("run.json")["created"],
        "supervisor up": read("supervisor/status.json")["started"],
        "node up": read("live/exit/0.0-node-0.json")["started"],
    }


def steps(rows: Sequence[Mapping[str, float]]) -> str:
    """Return the median milliseconds from each stage to the next. A row has each stage's Unix seconds, in order."""
    return ", ".join(
        f"{after} +{1000 * statistics.median(row[after] - row[before] for row in rows):.0f}"
        for before, after in itertools.pairwise(rows[0])
    )


# ---------------------------------------------------------------------------------------------------- peers and trees


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """Give a new folder, outside any git work tree."""
    with tempfile.TemporaryDirectory(prefix="cloudtrain-bench-", ignore_cleanup_errors=True) as folder:
        yield Path(folder).resolve()


def cache() -> Path:
    """Return ``$CLOUDTRAIN_BENCHMARK_CACHE``, else ``cloudtrain-benchmarks`` in the user's cache folder."""
    own = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(os.environ.get("CLOUDTRAIN_BENCHMARK_CACHE") or os.path.join(own, "cloudtrain-benchmarks"))


def alone(command: Sequence[str], *, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> Cost:
    """Measure a command from its start, without processes that it leaves behind or calls. Raises `RuntimeError` if it
    fails."""
    began = time.perf_counter()
    process = subprocess.Popen(command, cwd=cwd, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    assert process.stderr is not None
    output = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    wall = time.perf_counter() - began
    if process.returncode:
        what = " ".join(command)[:200]
        raise RuntimeError(f"{what} ended with {process.returncode}: {output.decode()[-2000:]}")
    return Cost(wall=wall, cpu=usage.ru_utime + usage.ru_stime, rss=usage.ru_maxrss * 1024)


def peer(name: str, version: str) -> Path:
    """Return the venv with the package ``name``; make it with pip if the cache folder lacks it."""
    venv = cache() / f"{name}-{version}"
    if not (venv / "installed").exists():
        print(f"installing {name} {version} into {venv}", file=sys.stderr)
        pip = [str(venv / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        for command in ([sys.executable, "-m", "venv", "--clear", str(venv)], [*pip, f"{name}=={version}"]):
            done = subprocess.run(command, check=False, capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(f"cannot install {name} {version}: {done.stderr.strip()[-500:]}")
        (venv / "installed").touch()
    return venv


def tree(folder: Path, *, files: int, size: int, script: str) -> Path:
    """Make a committed git tree of ``files`` files with ``size`` bytes in total, half compressible, and with
    ``train.py``."""
    folder.mkdir(parents=True)
    (folder / "train.py").write_text(script)
    rest, number = size - len(script), files - 1
    for i in range(number):
        length = rest // number + (1 if i < rest % number else 0)
        path = folder / f"package{i % 20:02d}" / f"part{i % 7}" / f"module{i:04d}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        random = os.urandom(length // 2).hex().encode()
        path.write_bytes((random + b"\n" * length)[:length] if i % 2 else b"x = 1  # the same line again\n" * 2000)
        os.truncate(path, length)
    git = ["git", "-C", str(folder), "-c", "user.name=benchmark", "-c", "user.email=benchmark@localhost"]
    for words in (["init", "--quiet"], ["add", "--all"], ["commit", "--quiet", "--message", "a tree"]):
        subprocess.run([*git, *words], check=True, stdout=subprocess.DEVNULL)
    return folder
