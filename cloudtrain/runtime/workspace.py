"""A node's workspace: the folders in scratch, the unpacked and checked code, and the start of its ranks."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import CloudtrainError, SpecError, StorageError
from ..provider_api.node import NodeEnvironment
from . import gpus, launch
from .cause import Failure
from .checkpoint_model import Checkpoint
from .checkpoints import Watch
from .host_facts import cpu_count, end_child, scratch_folder
from .launch import Ranks
from .logs import LogWriter
from .metrics import PrintedMetrics
from .mounts import in_thread
from .nccl import Recorder
from .outputs import Outputs
from .stall import Look
from .store_checkpoints import find_newest
from .timings import TIMINGS
from .unpack import unpack

if TYPE_CHECKING:
    from . import preflight
    from .node_check import Finding


class Workspace:
    """The folders of a node in scratch, made before the first rank. Raises `CloudtrainError` on any failure.

    ``wait`` returns once its argument is true, or sooner if the node must leave.
    """

    def __init__(self, *, context: Mapping[str, Any], site: NodeEnvironment, log: LogWriter, wait: gpus.Wait) -> None:
        self.context, self._site, self._log, self._wait = context, site, log, wait
        self.node, self.nodes = site.topology.node_rank, site.topology.nodes
        self.folder = scratch_folder(site.scratch, f"{context['run_id']}-n{self.node}-")
        self.checkpoints, self.artifacts = self.folder / "checkpoints", self.folder / "artifacts"
        self.metrics, self.preempt = self.folder / "metrics.jsonl", self.folder / "preempt"
        self.usage = self.folder / "usage.jsonl"
        self.code, self._home = self.folder / "code", self.folder / "home"
        self.recorder = Recorder(self.folder / "flight-recorder")
        self._worker = self.folder / "worker.py"
        self.outputs: Outputs | None = None  # the script's files below its working folder, if they are kept
        self._python = sys.executable
        if site.cuda_compat and (words := gpus.compat_library_path(site.cuda_compat, self._environ())):
            self.context = {**context, "env": {**context.get("env", {}), **words}}  # before the job's own folders, too
            log.say(f"driver {gpus.driver_version()} is older than the image's CUDA; the ranks use {site.cuda_compat}")

    def fill(self) -> None:
        """Unpack code, find inputs, install requirements and write the shim."""
        for note in self._site.notes:
            self._log.say(note)
        for folder in (self.checkpoints, self.artifacts, self._home, self.recorder.folder):
            folder.mkdir()
        self._lead_folders(below_code=False)
        archive = Path(self._site.paths["code"])
        in_thread(lambda: unpack(archive, self.code, digest=self.context["code_digest"]), [archive.parent], self._wait)
        if not self.code.is_dir():  # the node must leave
            return
        self._lead_folders(below_code=True)
        for name, path in self.inputs().items():
            if in_thread(partial(os.path.exists, path), [Path(path)], self._wait) is False:
                raise StorageError(f"input {name} is not at {path}")
        if self.context["requirements"]:
            self._install(self.code / self.context["requirements"])
        if limit := self.context["max_outputs"]:
            skip = self.context["checkpoint_paths"]
            self.outputs = Outputs(self.code, limit=limit, skip=skip, say=self._log.say)
        # The started path may be a link; the ranks append exactly this file to sys.path.
        self._package = Path(sys.argv[0]).resolve()
        self._worker.write_bytes(_source_of("worker.py"))

    def gpu_trouble(self) -> tuple[str, str] | None:
        """Return the reason why no rank can use this node's GPUs, and its failure category; None if ranks may.

        A node that is no container shares its machine's GPUs, which its job need not want. A command need not use
        PyTorch.
        """
        if not gpus.count() or self._site.groups_file or self.context["launcher"] == "command":
            return None
        needed = self.context["launcher"] == "torchrun"  # a script of JAX may load its data with a PyTorch for CPUs
        environ = self._environ()
        return gpus.trouble(self._python, environ, folder=self._home, say=self._log.say, wait=self._wait, needed=needed)

    def _environ(self) -> dict[str, str]:
        """Return the node's environment with the platform's and the job's variables."""
        return {**os.environ, **self._site.export_env, **self.context.get("env", {})}

    def note_group(self, pid: int) -> None:
        """Record a process group that was started here, for an engine whose nodes are no containers."""
        if self._site.groups_file:
            with open(self._site.groups_file, "a", encoding="ascii") as stream:
                stream.write(f"{pid}\n")

    def _lead_folders(self, *, below_code: bool) -> None:
        for known, ours in self._site.folders.items():
            if below_code is not os.path.isabs(known) and not (below_code and self._has_checkpoints(known)):
                self._lead(self.code / known, {"checkpoints": self.checkpoints, "artifacts": self.artifacts}[ours])

    def _has_checkpoints(self, known: str) -> bool:
        """Return whether the job has checkpoints there: as artifacts too, a torn one could replace a whole one."""
        for pattern in self.context["checkpoint_paths"]:
            if fnmatchcase(known, os.path.normpath(pattern).split("/")[0]):
                why = f"checkpoint_paths has {pattern}; write artifacts to $CLOUDTRAIN_ARTIFACT_DIR"
                self._log.say(f"./{known} is not kept as artifacts: {why}")
                return True
        return False

    def _lead(self, known: Path, ours: Path) -> None:
        """Replace a folder that this platform's scripts know by a link to one of ours, so that its files are kept."""
        try:
            if known.is_symlink():  # of an earlier start in the same container
                known.unlink()
            elif known.is_dir():
                known.rmdir()
            known.parent.mkdir(parents=True, exist_ok=True)
            known.symlink_to(ours)
        except OSError as exc:
            self._log.say(f"{known} cannot lead to {ours} ({exc.strerror}); what is written there is not kept")

    def inputs(self) -> dict[str, str]:
        """Return the path of each channel's folder, or of its file if it is a single one."""
        inputs = self.context["inputs"].items()
        return {
            name: os.path.abspath(Path(self._site.paths[f"input.{name}"], item["file"] or "")) for name, item in inputs
        }

    def _install(self, requirements: Path) -> None:
        """Install requirements into an environment in scratch that sees all installed packages, torch above all."""
        self._log.say(f"installing {requirements.name} into scratch")
        home = self.folder / "site"
        venv.EnvBuilder(system_site_packages=True, symlinks=True).create(home)
        self._python = str(home / "bin" / "python")
        packages = next((home / "lib").glob("python*/site-packages"))
        # In a virtual environment, "system" would be the Python below it: name our own folders.
        (packages / "cloudtrain.pth").write_text("".join(f"{path}\n" for path in sys.path if "-packages" in path))
        command = [self._python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input"]
        with open(self.folder / "pip.log", "w+", encoding="utf-8", errors="replace") as output:
            with launch.without_sigterm():  # a platform may signal every process of a node
                pip = subprocess.Popen(
                    [*command, "-r", str(requirements)],
                    cwd=self.code,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
            self.note_group(pip.pid)
            self._wait(lambda: pip.poll() is not None)
            if pip.poll() is None:  # a notice came, or another node failed
                end_child(pip).join(TIMINGS.launcher)
                return
            output.seek(0)
            lines = output.read().splitlines()
        if pip.returncode:
            last = next((line for line in reversed(lines) if line.strip()), "no output")
            raise SpecError(f"pip install -r {requirements.name} failed: {last.strip()}", field="source.requirements")

    def has_metrics(self) -> bool:
        """Return whether this attempt has a metrics row here."""
        try:
            return self.metrics.stat().st_size > 0
        except OSError:
            return False

    def watch(self) -> Watch:
        """Return a watch of the checkpoints that the script writes."""
        patterns = tuple(self.context["checkpoint_paths"])
        return Watch(folder=self.checkpoints, workdir=self.code, patterns=patterns)

    @property
    def checkpoint_url(self) -> str:
        """Return the URL below which a script may write checkpoints to the store by itself."""
        mounted = self._site.paths.get("direct")
        return f"file://{Path(mounted).resolve()}" if mounted else str(self.context["checkpoint_url"])

    def direct(self) -> Checkpoint | None:
        """Return the newest complete checkpoint below `checkpoint_url`. Raises `CloudtrainError`."""
        environ = {**self._environ(), **self._secrets()}
        mounted, say = self._site.paths.get("mounted", ""), self._log.say
        return find_newest(self.checkpoint_url, python=self._python, environ=environ, say=say, mounted=mounted)

    def readable(self, text: str) -> str:
        """Return ``text`` without this node's own folders: the same on every attempt, and as the user knows it."""
        return text.replace(f"{self.code}{os.sep}", "").replace(str(self.folder), "<scratch>")

    def bring_back(self, live: Path) -> None:
        """Copy an earlier start's artifacts and outputs to where the script left them. Raises `StorageError`."""
        kinds = {"artifact": self.artifacts, **({"output": self.code} if self.outputs is not None else {})}
        for kind, folder in kinds.items():
            source = live / f"{kind}s" / f"node-{self.node}"
            try:
                if source.is_dir():
                    shutil.copytree(source, folder, ignore=self._leftovers, dirs_exist_ok=True)
            except shutil.Error as exc:
                (file, _, why), *more = exc.args[0]
                and_more = f", and {len(more)} more" if more else ""
                raise StorageError(f"cannot bring back the {kind} {file}: {why}{and_more}") from None
            except OSError as exc:
                raise StorageError(f"cannot bring back the {kind}s from {source}: {exc.strerror}") from None

    def _leftovers(self, folder: str, names: list[str]) -> list[str]:
        """Return the names that a cut-off mirror, or the platform's agent, has left."""
        return [name for name in names if name.endswith(self._site.marks) or fnmatchcase(name, ".*.part")]

    def failure(self, event: Mapping[str, Any], rank: int) -> Failure:
        """Return a rank's error as a failure."""
        return Failure(
            kind="error",
            node=self.node,
            rank=rank,
            time_ns=event["time_ns"],
            exception=self.readable(event["exception"]),
            file=(event["file"] or "").removeprefix(f"{self.code}{os.sep}") or None,
            line=event["line"],
            traceback=self.readable(event["traceback"]),
            code=event["code"],
        )

    # --------------------------------------------------------------------------------------------- starting the ranks

    def start(self, *, attempt: str, resume: str, emit: Callable[[dict[str, Any]], None]) -> Ranks:
        """Start this node's ranks. Raises `OSError` when the command cannot be run."""
        context, topology = self.context, self._site.topology
        values = self._values(resume)
        environment = self._rank_environment(values, attempt, self._secrets())
        if context["launcher"] == "command" or context["requirements"]:
            # Let a shell script use the python, torchrun and pip that would have run the ranks.
            path = environment.get("PATH", os.defpath)
            environment["PATH"] = os.pathsep.join([os.path.dirname(self._python), path])
        arguments = launch.script_arguments(context, values)
        printed = context["metrics"]
        return Ranks(
            command=launch.command_of(context, topology, arguments, worker=self._worker, python=self._python),
            env=environment,
            cwd=self.code,
            scratch=self.folder,
            package=self._package,
            processes=self.processes,
            shim=context["launcher"] != "command",
            signals_ranks=self._site.signals_ranks,
            log=self._log,
            first_rank=self.node * self.processes,
            emit=emit,
            read=PrintedMetrics(printed, self.metrics, say=self._log.say).read if printed else None,
        )

    def check(self, attempt: str, wait: preflight.Wait, over: Callable[[], bool]) -> list[Finding]:
        """Run `node_check` with the environment of the ranks, but no secret. Artifacts keep its files; see
        `run_check`."""
        from .preflight import run_check  # most jobs need none of it

        script, folder = self.folder / "node_check.py", self.artifacts / "node-check" / attempt
        folder.mkdir(parents=True, exist_ok=True)
        script.write_bytes(_source_of(script.name))
        expected = self.context["node_check"]["gpus"]
        return run_check(
            [self._python, str(script)],
            max(self.processes, expected or 0),
            self._rank_environment(self._values(""), attempt, {}),
            self._site.topology,
            folder=folder,
            gpus=expected,
            started=self.note_group,
            wait=wait,
            over=over,
        )

    def _values(self, resume: str) -> dict[str, str]:
        """Return the values of the placeholders."""
        return {
            "checkpoint_dir": str(self.checkpoints),
            "artifact_dir": str(self.artifacts),
            "resume_from": resume,
            "run_id": self.context["run_id"],
            **{f"inputs.{name}": path for name, path in self.inputs().items()},
        }

    def _rank_environment(self, values: Mapping[str, str], attempt: str, secrets: Mapping[str, str]) -> dict[str, str]:
        return launch.environment_of(
            self.context,
            self._site.topology,
            base={name: os.environ[name] for name in os.environ if not name.startswith(tuple(self._site.hidden_env))},
            export=self._site.export_env,
            own=self._own(values, attempt),
            secrets=secrets,
            values=values,
            home=str(self._home),
            dumps=self.recorder.folder,
            cpus=self._site.cpus or cpu_count(),
        )

    @property
    def processes(self) -> int:
        """Return the number of ranks on each node."""
        return int(self.context["processes"]) if self.context["launcher"] == "torchrun" else 1

    def look(self, ranks: Ranks) -> Look:
        """Ask this node's ranks where they are."""
        return Look(ranks, self.recorder, node=self.node, code=self.code, bottom=self._worker)

    def keep_dumps(self, attempt: str) -> None:
        """Keep the flight recorders' files as artifacts, and log that in one line."""
        target = self.artifacts / "flight-recorder" / attempt
        try:
            names = self.recorder.keep(target)
        except OSError as exc:
            self._log.say(f"the flight recorder's files cannot be kept: {exc.strerror}")
        else:
            if names:
                self._log.say(f"kept as artifacts in flight-recorder/{attempt}: {', '.join(names)}")

    def _own(self, values: Mapping[str, str], attempt: str) -> dict[str, str]:
        planned = {}
        if self.context["launcher"] == "torchrun":  # the ranks of other launchers are unknown
            nodes = int(self.context.get("planned_nodes") or self.nodes)  # this attempt may have fewer
            planned = {"CLOUDTRAIN_PLANNED_WORLD_SIZE": str(nodes * self.processes)}
        return {
            "CLOUDTRAIN_RUN_ID": self.context["run_id"],
            "CLOUDTRAIN_ATTEMPT": attempt,
            "CLOUDTRAIN_PROVIDER": self.context["provider"],
            **planned,
            **{f"CLOUDTRAIN_INPUT_{name.upper().replace('-', '_')}": path for name, path in self.inputs().items()},
            "CLOUDTRAIN_CHECKPOINT_DIR": values["checkpoint_dir"],
            "CLOUDTRAIN_CHECKPOINT_URL": self.checkpoint_url,
            "CLOUDTRAIN_RESUME_FROM": values["resume_from"],
            "CLOUDTRAIN_ARTIFACT_DIR": values["artifact_dir"],
            "CLOUDTRAIN_METRICS_FILE": str(self.metrics),
            "CLOUDTRAIN_PREEMPT_FILE": str(self.preempt),
            "CLOUDTRAIN_HYPERPARAMETERS": json.dumps(launch.hyperparameters_of(self.context, values)),
        }

    def _secrets(self) -> dict[str, str]:
        out = {}
        for name, reference in self.context["secrets"].items():
            if self._site.secrets is None:
                raise StorageError(f"secret {name}: {reference.partition(':')[0]}: secrets cannot be read here")
            try:
                out[name] = self._site.secrets(reference)
            except CloudtrainError:
                raise
            except Exception as exc:  # noqa: BLE001  a provider's own client may raise anything
                raise StorageError(f"secret {name} cannot be read: {type(exc).__name__}: {exc}") from None
        # A rehearsal has put values of this machine in their place, which are here already.
        there = {name: os.environ[name] for name in self.context.get("masked", ()) if name in os.environ}
        self._log.redact.learn({**out, **there})
        return out


def _source_of(name: str) -> bytes:
    """Return a file of this package, also out of the zip."""
    loader = globals()["__loader__"]
    data: bytes = loader.get_data(os.path.join(os.path.dirname(__file__), name))
    return data
