"""Cells of the portability matrix: one job on every provider, undisturbed or with a fault. Each really runs.

`CELLS` lists all cells, and `run` runs one in its own folder and returns the result. `portability.py` keeps the record.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import importlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tokenize
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cloudtrain.engine.docker_api import connect, run_label
from cloudtrain.errors import StorageError
from cloudtrain.runtime.checkpoints import complete

ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT / "tests"), str(ROOT / "tests/kit")]

from containers import BUILD, IMAGE, left  # noqa: E402  what the tests have of an engine, jobs and a cluster
from jobs import CLI, Done, Jobs  # noqa: E402
from slurmcluster import GRACE, Cluster, running  # noqa: E402

CLOUDS = ("sagemaker", "azureml", "vertex", "kubernetes", "modelarts")
HERE = ("local", "docker", "slurm")
"""Platforms that run for real on this machine. The cluster of slurm has four nodes (tests/slurm.sh)."""
PROVIDERS = (*HERE, *CLOUDS)
"""The columns of the matrix. Clouds are rehearsed."""
RUN = "r"
SHARED = (Path(tempfile.gettempdir()) / "shared").as_uri()
"""The store of a platform whose nodes share a folder. A rehearsal replaces it by a local one."""
PATIENCE = float(os.environ.get("CLOUDTRAIN_PATIENCE") or 600)
"""Time limit of a cell in seconds, generous for a loaded machine."""
SAMPLES = {name: importlib.import_module(f"cloudtrain.providers.{name}").SAMPLE for name in CLOUDS}

TRAININGS: dict[str, Mapping[str, Any]] = {
    "ddp": {
        "entry_point": "ddp.py",
        "args": ["--task", "held.py", "--of", "digits", "--epochs", "2", "--save-every", "10"],
        "data": "digits.csv.gz",
    },
    "fsdp": {
        "entry_point": "fsdp.py",
        "args": [
            *("--task", "held.py", "--of", "gpt", "--max-steps", "40", "--save-every", "10"),
            *("--layers", "2", "--heads", "2", "--width", "32", "--context", "32"),
        ],
        "data": "persuasion.txt.gz",
    },
}
SHAPE = {"instance_count": 2, "nproc_per_node": 2, "max_runtime": "30m", "retries": 1}
SCENARIOS = {
    "clean": "no fault",
    "preempted": "node 1 gets the stop signal after the first checkpoint, and the platform starts the job again",
    "node lost": "node 1 dies without notice after the first checkpoint",
}
IMAGES = {
    "torch": "Debian 12, Python 3.11 and torch",
    "python": "the interpreter is named `python` only",
    "user": "runs as user 4242, without a name and a home folder",
    "lightning": "PyTorch Lightning, without fsspec's packages for URLs",
    "pip": "has pip, which installs the job's requirements",
    "py313": "Debian 13 and Python 3.13, nothing else",
    "nopython": "busybox without Python: must be refused, and the message names the cause",
    "arm64": "another processor architecture: must be refused, and the message names the cause",
}
REFUSED = {"nopython": "no[- ]python3", "arm64": "is for linux/"}
"""Pattern of the message for each image that must be refused. Platforms with short commands word it briefly."""
FIXTURES = {
    "late start": "node 1 pauses for 15 s before its first instruction",
    "cut off": "node 1 has no network for 20 s after the first checkpoint",
    "no way out": "the nodes reach each other and nothing else",
    "full disk": "the store's disk is full for 8 s after the first checkpoint; a client that cannot record the "
    "result says so, and the next client records it",
    "slow store": "making, renaming, opening or removing a file in the store takes 50 ms longer",
}
NOT = {
    **{f"image {tag}/{provider}": "uses no image" for tag in IMAGES for provider in ("local", "slurm")},
    **{f"cut off/{provider}": "all nodes share this machine's network" for provider in ("local", "slurm")},
    "no way out/slurm": "a node needs to reach Slurm's controller",
}
"""Combinations without a cell, and why."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A cell: ``row`` is a script with a scenario, an image, or another fault (fixture)."""

    kind: str
    row: str
    provider: str

    @property
    def name(self) -> str:
        return f"{self.row}/{self.provider}"

    @property
    def script(self) -> str:
        return self.row.split(" ")[0] if self.kind == "training" else "ddp"


def _all() -> Iterator[Cell]:
    rows = [("training", f"{script} {what}") for script in TRAININGS for what in SCENARIOS]
    rows += [("image", f"image {tag}") for tag in IMAGES] + [("fixture", name) for name in FIXTURES]
    for kind, row in rows:
        for provider in PROVIDERS:
            cell = Cell(kind=kind, row=row, provider=provider)
            if cell.name not in NOT:
                yield cell


CELLS = {cell.name: cell for cell in _all()}


@functools.cache
def _image_digest(tag: str) -> str:
    return subprocess.check_output([BUILD, "--digest", tag], text=True).strip()


def job_digest(cell: Cell) -> str:
    """Return the digest of a cell's job without cloudtrain: script, tasks, data, flags, or the image's recipe."""
    if cell.kind == "image":
        what, paths = [TINY, BACKEND, _image_digest(cell.row.removeprefix("image "))], []
    else:
        job = TRAININGS[cell.script]
        what, paths = [job, SHAPE], [ROOT / "entrypoints" / job["entry_point"], ROOT / "tests/entrypoints/held.py"]
        paths += [*sorted((ROOT / "entrypoints/tasks").glob("*.py")), ROOT / "examples/data" / job["data"]]
    found = hashlib.sha256(json.dumps(what, sort_keys=True).encode())
    for path in paths:
        found.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + content(path))
    return found.hexdigest()[:16]


def content(path: Path) -> bytes:
    """Return the bytes of a file. For Python, leave out docstrings, comments and empty lines: they change no loss."""
    if path.suffix != ".py":
        return path.read_bytes()
    return _without_comments(path.read_text(encoding="utf-8"))


@functools.cache
def _without_comments(text: str) -> bytes:
    lines = text.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            docstring = node.body[0]
            lines[docstring.lineno - 1 : docstring.end_lineno] = [""] * (docstring.end_lineno - docstring.lineno + 1)
    return "\n".join(line.rstrip() for line in lines if line.strip()).encode()


# ---------------------------------------------------------------------------------------------------------- running one

TINY = """
import json, os, pathlib, time
env = os.environ
assert pathlib.Path(env["CLOUDTRAIN_INPUT_DATA"]).read_text() == "some data"
rank = env["RANK"]
checkpoint = pathlib.Path(env["CLOUDTRAIN_CHECKPOINT_DIR"], "step-1")
checkpoint.mkdir(exist_ok=True)
(checkpoint / f"shard-{rank}").write_text(rank)
try:
    import small_thing
    print("the requirement is", small_thing.WORD)
except ImportError:
    assert "--requirement" not in env.get("WANTED", "")
pathlib.Path(env["CLOUDTRAIN_ARTIFACT_DIR"], f"rank-{rank}.json").write_text(json.dumps([int(rank), os.getuid()]))
"""


class Site:
    """The folder of one cell: the job's code and data, a store, and the command that runs the job on the provider."""

    def __init__(self, folder: Path, cell: Cell) -> None:
        self.cell, self.provider = cell, cell.provider
        self.jobs = Jobs(folder)
        self.engine = connect() if cell.provider in ("docker", *CLOUDS) else None
        self.cluster: Cluster | None = None
        self.live = self.jobs.store / "runs" / RUN / "live"
        (folder / "data").mkdir()

    def training(self, script: str, *flags: str) -> None:
        """Write the job of an entry point with its tasks. Every provider gets the same file."""
        job = TRAININGS[script]
        shutil.copytree(ROOT / "entrypoints", self.jobs.code, dirs_exist_ok=True)
        shutil.copy(ROOT / "tests/entrypoints/held.py", self.jobs.code)
        shutil.copy(ROOT / "examples/data" / job["data"], self.jobs.tmp / "data")
        inputs = {"train": f"../data/{job['data']}"}
        self._write({"entry_point": job["entry_point"], "args": [*job["args"], *flags], "inputs": inputs})

    def tiny(self, tag: str) -> None:
        """Write the job of a cell whose image may have no torch."""
        self.jobs.write("train.py", TINY)
        (self.jobs.tmp / "data" / "data.txt").write_text("some data")
        more: dict[str, Any] = {}
        if tag == "pip":
            package = self.jobs.code / "small_thing"
            package.mkdir()
            (package / "pyproject.toml").write_text(
                '[build-system]\nrequires = []\nbuild-backend = "build"\nbackend-path = ["."]\n'
            )
            (package / "build.py").write_text(BACKEND)
            (self.jobs.code / "requirements.txt").write_text("./small_thing\n")
            more = {"requirements": "requirements.txt", "env": {"WANTED": "--requirement"}}
        self._write(
            {"entry_point": "train.py", "launcher": "python", "inputs": {"data": "../data/data.txt"}, **more},
            nproc_per_node=1,
        )

    def _write(self, fields: Mapping[str, Any], **shape: Any) -> None:
        images = {name: {"image": sample["job"]["image"]} for name, sample in SAMPLES.items()}
        images["docker"] = {"image": self.image}
        job = {"name": "portable", **SHAPE, **shape, **fields, "on": images}
        (self.jobs.code / "job.json").write_text(json.dumps(job, indent=2))

    @property
    def image(self) -> str:
        return f"{IMAGE}:{self.cell.row.partition(' ')[2] if self.cell.kind == 'image' else 'torch'}"

    def words(self, *flags: str) -> list[str]:
        """Return the command line: ``submit`` for platforms on this machine, ``rehearse`` for clouds."""
        if self.provider in HERE:
            where = ["submit", "job.json", "--provider", self.provider, "--store", str(self.jobs.store)]
            if self.cluster is not None:
                settings = {"partition": "low", "python": sys.executable, "stop_grace": GRACE}
                where += [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
        else:
            sample = SAMPLES[self.provider]
            where = ["rehearse", "job.json", "--provider", self.provider, "--store", sample.get("store", SHARED)]
            where += ["--local-store", str(self.jobs.store), "--local-image", self.image]
            for name, value in sample["settings"].items():
                where += ["--set", f"{name}={value if isinstance(value, str) else json.dumps(value)}"]
        return [*where, "--run-id", RUN, "--json", *flags]

    def run(self, *flags: str, meanwhile: Callable[[], None] = lambda: None, under: tuple[str, ...] = ()) -> Done:
        """Run the command to its end, and ``meanwhile`` while it runs. The command may end first."""
        words = self.words(*flags)
        process = self.jobs.start(*words, python=[*under, *CLI])
        try:
            meanwhile()
            out, err = process.communicate(timeout=PATIENCE)
        except BaseException:
            self.jobs.cli("cancel", RUN, "--store", str(self.jobs.store), timeout=PATIENCE)
            raise
        return Done(process.returncode, out, err, verb=words[0])

    # ---------------------------------------------------------------------------------------------------------- faults

    def container(self, node: int) -> Mapping[str, Any] | None:
        """Return the running container of a node, or None."""
        assert self.engine is not None
        run = (self.jobs.store / "runs" / RUN).as_uri()
        labels = [f"cloudtrain.run={run}", f"cloudtrain.node={node}"]
        found: list[Mapping[str, Any]] = self.engine.containers(filters={"label": labels, "status": "running"})
        return found[0] if found else None

    def saved(self) -> None:
        """Wait until there is a complete checkpoint."""
        self.jobs.wait_for(lambda: complete(self.live / "checkpoints"), PATIENCE)

    @property
    def slurm_job(self) -> str:
        """Return Slurm's id of the first attempt's job, after its submission."""
        record = self.jobs.store / "runs" / RUN / "attempts/0/submitted.json"
        self.jobs.wait_for(record.exists, PATIENCE)
        return str(json.loads(record.read_text())["native_id"]).partition(":")[0]

    def strike(self, kind: str) -> None:
        """Preempt node 1 or kill it, on platforms that `rehearse` does not cover."""
        self.saved()
        if self.cluster is not None:
            act = self.cluster.preempt if kind == "preempted" else self.cluster.kill_task
            act(self.slurm_job, 1)
            return
        if self.engine is not None:
            found = self.container(1)
            assert found is not None
            self.engine.kill(found["Id"], "SIGTERM" if kind == "preempted" else "SIGKILL")
            return
        first = self.jobs.node(1)
        for pid in [first] if kind == "preempted" else _family(first):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM if kind == "preempted" else signal.SIGKILL)

    def late(self) -> None:
        """Pause node 1 for 15 s as soon as it exists."""
        if self.engine is None:
            pid = self.jobs.node(1) if self.cluster is None else self._slurm_node()
            os.kill(pid, signal.SIGSTOP)
            time.sleep(15)
            os.kill(pid, signal.SIGCONT)
            return
        found = self.jobs.wait_for(lambda: self.container(1), PATIENCE)
        self.engine.pause(found["Id"])
        time.sleep(15)
        self.engine.unpause(found["Id"])

    def _slurm_node(self) -> int:
        """Return the pid of node 1's runtime."""
        assert self.cluster is not None
        cluster, job = self.cluster, self.slurm_job
        self.jobs.wait_for(lambda: cluster.field(job, "JobState") == "RUNNING", PATIENCE)
        found: list[int] = self.jobs.wait_for(lambda: cluster.tasks(job, 1), PATIENCE)
        return found[0]

    def cut_off(self) -> None:
        """Take node 1 off its network for 20 s. It comes back with the same names and address."""
        assert self.engine is not None
        self.saved()
        found = self.container(1)
        assert found is not None
        ((network, endpoint),) = self.engine.inspect_container(found["Id"])["NetworkSettings"]["Networks"].items()
        self.engine.disconnect_container_from_network(found["Id"], network)
        time.sleep(20)
        names = [name for name in endpoint["Aliases"] or () if not found["Id"].startswith(name)]
        self.engine.connect_container_to_network(found["Id"], network, aliases=names)

    def isolate(self) -> None:
        """Make the run's network in advance, without a way out of it."""
        assert self.engine is not None
        label = run_label((self.jobs.store / "runs" / RUN).as_uri())
        labels = {"cloudtrain.id": label, "cloudtrain.run": (self.jobs.store / "runs" / RUN).as_uri()}
        labels["cloudtrain.supervisor"] = f"{os.uname().nodename}:{self.jobs.tmp}"
        self.engine.create_network(f"cloudtrain-{label}", driver="bridge", internal=True, labels=labels)

    @contextlib.contextmanager
    def small_disk(self) -> Iterator[Callable[[], None]]:
        """Put the store on a disk of 64 MiB. Yield a function that fills it for 8 s after the first checkpoint."""
        self.jobs.store.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", self.jobs.store], check=True)

        def fill() -> None:
            self.saved()
            filler = self.jobs.store / "filler"
            with contextlib.suppress(OSError), open(filler, "wb", buffering=0) as stream:
                while True:
                    stream.write(bytes(1 << 16))
            time.sleep(8)
            filler.unlink()

        try:
            yield fill
        finally:
            subprocess.run(["umount", "--lazy", self.jobs.store], check=True)

    @contextlib.contextmanager
    def slow_disk(self) -> Iterator[None]:
        """Put the store behind a slow file system."""
        self.jobs.store.mkdir()
        (self.jobs.tmp / "behind").mkdir()
        command = [sys.executable, ROOT / "tests/kit/slowfs.py", self.jobs.tmp / "behind", self.jobs.store]
        with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
            try:
                self.jobs.wait_for(lambda: os.path.ismount(self.jobs.store) or process.poll() is not None)
                assert process.poll() is None, "it could not be mounted"
                yield
            finally:
                subprocess.run(["umount", "--lazy", self.jobs.store], check=False)
                process.communicate(timeout=60)


def _family(first: int) -> list[int]:
    """Return the pids of a process and its descendants."""
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    family = [first]
    for pid in family:
        family += [child for child, parent in parents.items() if parent == pid]
    return family


BACKEND = """
import zipfile

def get_requires_for_build_wheel(config_settings=None):
    return []

def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    name = "small_thing-1-py3-none-any.whl"
    with zipfile.ZipFile(f"{wheel_directory}/{name}", "w") as wheel:
        wheel.writestr("small_thing.py", "WORD = 'there'\\n")
        wheel.writestr("small_thing-1.dist-info/METADATA", "Metadata-Version: 2.1\\nName: small-thing\\nVersion: 1\\n")
        wheel.writestr(
            "small_thing-1.dist-info/WHEEL",
            "Wheel-Version: 1.0\\nGenerator: x\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n",
        )
        wheel.writestr("small_thing-1.dist-info/RECORD", "")
    return name
"""


# ------------------------------------------------------------------------------------------------------------- results


def run(cell: Cell, folder: Path) -> dict[str, Any]:
    """Run a cell below ``folder``. Return its result, with ``wrong`` empty if nothing is wrong.

    The result has the last loss in bits, and a digest of the losses of all steps for comparing cells.
    """
    if cell.provider != "slurm":
        return _run(Site(folder, cell), folder)
    site = Site(folder, cell)
    with running(Path(tempfile.mkdtemp(prefix="ct-slurm-", dir=folder))) as site.cluster:
        site.jobs.environ["SLURM_CONF"] = str(site.cluster.conf)
        return _run(site, folder)


def _run(site: Site, folder: Path) -> dict[str, Any]:
    cell, began = site.cell, time.monotonic()
    before = left(site.engine, folder) if site.engine is not None else []
    try:
        found = {"image": _image, "training": _training, "fixture": _fixture}[cell.kind](site)
        if not found["wrong"]:
            with contextlib.suppress(AssertionError):
                site.jobs.gone(30)
            if site.jobs.processes():
                found["wrong"] = f"left running: {sorted(site.jobs.processes().values())[0]}"
            elif site.engine is not None and left(site.engine, folder) != before:
                found["wrong"] = "left containers or networks behind"
    except (AssertionError, subprocess.TimeoutExpired, OSError) as exc:
        found = {"wrong": f"{type(exc).__name__}: {' '.join(str(exc).split())[:400]}"}
    finally:
        site.jobs.close()
    return {**found, "seconds": round(time.monotonic() - began)}


def _training(site: Site) -> dict[str, Any]:
    script, _, scenario = site.cell.row.partition(" ")
    if scenario == "clean":
        site.training(script)
        return _losses(site, site.run(), attempts=1)
    site.training(script, "--hold", str(PATIENCE))
    if site.provider in HERE:
        done = site.run(meanwhile=lambda: site.strike(scenario))
    else:
        drill = {"preempted": "--preempt", "node lost": "--kill"}[scenario]
        done = site.run(drill, "node=1,after=checkpoint")
    return _losses(site, done, attempts=2)


def _fixture(site: Site) -> dict[str, Any]:
    name = site.cell.row
    site.training("ddp", *(("--hold", "45") if name == "cut off" else ()))
    if name == "late start":
        return _losses(site, site.run(meanwhile=site.late), attempts=1)
    if name == "cut off":
        return _losses(site, site.run(meanwhile=site.cut_off), attempts=1)
    if name == "no way out":
        if site.engine is None:
            inside = ("unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh")
            return _losses(site, site.run(under=inside), attempts=1)
        site.isolate()
        return _losses(site, site.run(), attempts=1)
    if name == "full disk":
        with site.small_disk() as fill:
            done = site.run(meanwhile=fill)
            if done.code == StorageError.exit_code and "No space left on device" in done.json["error"]:
                done = site.jobs.cli("wait", RUN, "--store", str(site.jobs.store), "--json", timeout=PATIENCE)
            return _losses(site, done, attempts=1)
    with site.slow_disk():
        return _losses(site, site.run(), attempts=1)


def _losses(site: Site, done: Done, *, attempts: int) -> dict[str, Any]:
    """Return the result and the losses of all attempts. A step that two attempts took must have one loss."""
    result = done.json
    if "state" not in result:
        return {"wrong": f"exit {done.code}: {result['error']}"}
    attempted = [{key: a[key] for key in ("number", "category", "resumed_from")} for a in result["attempts"]]
    found: dict[str, Any] = {"attempts": attempted, "wrong": ""}
    losses: dict[int, float] = {}
    for path in sorted((site.live / "metrics").glob("*.jsonl")):
        for row in map(json.loads, path.read_text().splitlines()):
            if losses.setdefault(row["step"], row["loss"]) != row["loss"]:
                found["wrong"] = f"step {row['step']} had two losses"
    if (done.code, result["state"]) != (0, "succeeded"):
        found["wrong"] = f"{result['state']}, {result['category']}: {result['reason']}"
    elif len(attempted) != attempts or any(not a["resumed_from"].startswith("step-") for a in attempted[1:]):
        found["wrong"] = f"attempts: {attempted}"
    elif sorted(losses) != list(range(1, len(losses) + 1)) or not losses:
        found["wrong"] = f"losses of steps {sorted(losses)}"
    if losses:
        last = losses[max(losses)]
        found |= {"steps": len(losses), "loss": last, "bits": last.hex(), "curve": digest_of(losses)}
    return found


def digest_of(losses: Mapping[int, float]) -> str:
    """Return the digest of the bits of each step's loss."""
    return hashlib.sha256("\n".join(losses[step].hex() for step in sorted(losses)).encode()).hexdigest()[:16]


def _image(site: Site) -> dict[str, Any]:
    tag = site.cell.row.partition(" ")[2]
    site.tiny(tag)
    done = site.run()
    result = done.json
    message = result.get("reason") or result.get("error") or ""
    if tag in REFUSED:
        right = done.code == 2 and bool(re.search(REFUSED[tag], message)) and "Traceback" not in done.err
        return {"said": message, "wrong": "" if right else f"exit {done.code}: {message}"}
    if done.code:
        return {"wrong": f"exit {done.code}: {message}"}
    ranks = [json.loads(path.read_text()) for path in sorted((site.live / "artifacts").rglob("rank-*.json"))]
    shards = sorted(path.name for path in (site.live / "checkpoints").rglob("shard-*"))
    wrong = ""
    if [rank for rank, _ in ranks] != [0, 1] or shards != ["shard-0", "shard-1"]:
        wrong = f"left {ranks} and {shards}"
    elif tag == "pip" and done.err.count("the requirement is there") != 2:
        wrong = "the requirement is not there"
    return {"said": f"uid {ranks[0][1]}" if ranks else "", "wrong": wrong}
