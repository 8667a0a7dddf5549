"""Run nodes as process groups of this machine, each with its own root folder.

A node's mounts appear below its root: a symbolic link for ``mount`` and ``sync``, a copy for ``copy``.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from ..errors import CapacityError, SpecError, StorageError
from ..provider_api.launch_spec import LaunchSpec, NodeSpec
from ..runtime.host_facts import kill_users, users
from ..storage.local_disk import put
from ..storage.timings import CLIENT_TIMINGS
from . import ENGINE_PREFIX, boot_id, staged

VISIBLE = "CUDA_VISIBLE_DEVICES"
_PROC = Path("/proc/self")


@dataclass
class NodeProcess:
    """Started node."""

    process: subprocess.Popen[bytes]
    groups: Path
    scratch: Path
    trouble: tuple[str, str] | None = None

    def poll(self) -> int | None:
        return self.process.poll()

    def signal(self, name: str) -> None:
        with contextlib.suppress(OSError):
            self.process.send_signal(getattr(signal, name))

    def kill(self) -> None:
        """Kill the node's first process, every process group it has noted, and what its script has detached."""
        with contextlib.suppress(OSError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        _kill_groups(self.groups)
        with contextlib.suppress(OSError):  # a disk may take no change
            self.groups.unlink()
        kill_users(self.scratch)
        shutil.rmtree(self.scratch, ignore_errors=True)


class ProcessEngine:
    """Engine that runs nodes as process groups. ``folder`` holds their roots and output files."""

    def __init__(self, *, folder: Path, environ: Mapping[str, str]) -> None:
        self._folder = folder
        self._environ = {k: v for k, v in environ.items() if not k.startswith(ENGINE_PREFIX)}

    def prepare(self, launch: LaunchSpec, report: Callable[[str], None], given_up: Callable[[], bool]) -> None:
        """Do nothing: processes need nothing that is not here."""

    def take_over(self, folder: Path, given_up: Callable[[], bool]) -> None:
        nodes, deadline = folder / "nodes", time.monotonic() + CLIENT_TIMINGS.stop_grace + CLIENT_TIMINGS.orphans
        started = dict(_started(nodes))
        places = [nodes, *(Path(each["scratch"]) for each in started.values())]

        def running() -> bool:
            return bool(users(nodes)) if _PROC.is_dir() else any(_exists(each["pid"]) for each in started.values())

        # Each node sees that its supervisor is gone, saves its work and ends its ranks.
        while running() and time.monotonic() < deadline and not given_up():
            time.sleep(0.1)
        for place in places:
            kill_users(place)
        for name, each in started.items() if not _PROC.is_dir() else ():
            with contextlib.suppress(OSError):
                os.killpg(each["pid"], signal.SIGKILL)
            _kill_groups(nodes / f"{name}.groups")
        for place in places:
            shutil.rmtree(place, ignore_errors=True)

    def start(
        self, launch: LaunchSpec, *, attempt: str, local: Mapping[str, Path], secrets: Mapping[str, str]
    ) -> list[NodeProcess]:
        nodes, port = launch.nodes, free_port_pair()
        gpus = [share_of_gpus(number, spec, self._environ) for number, spec in enumerate(nodes)]
        started: list[NodeProcess] = []
        try:
            out = self._folder / "out" / attempt
            out.mkdir(parents=True, exist_ok=True)
            for number, spec in enumerate(nodes):
                facts = {"NODE": number, "NODES": len(nodes), "PORT": port, "ATTEMPT": attempt}
                facts["SUPERVISOR"] = os.getpid()
                env = {**self._environ, VISIBLE: ",".join(gpus[number])} if spec.gpus else dict(self._environ)
                env |= {**spec.env, **{ENGINE_PREFIX + key: str(value) for key, value in facts.items()}}
                root = self._root(spec, f"node-{number}", local)
                with open(out / f"node-{number}.log", "ab") as stream:
                    started.append(_start(spec, root, env, stream, secrets))
        except OSError as exc:
            for node in started:
                node.kill()
            raise StorageError(f"cannot start node {len(started)} in {self._folder}: {exc}") from None
        return started

    def _root(self, spec: NodeSpec, name: str, local: Mapping[str, Path]) -> Path:
        root = self._folder / "nodes" / name
        staged(spec, root, local)
        (root / spec.workdir).mkdir(parents=True, exist_ok=True)
        for mount in spec.mounts:
            if mount.kind != "copy":
                path = root / mount.path
                path.parent.mkdir(parents=True, exist_ok=True)
                path.symlink_to(local[mount.url])
        return root

    def clean(self) -> None:
        shutil.rmtree(self._folder / "nodes", ignore_errors=True)


def _start(spec: NodeSpec, root: Path, env: dict[str, str], out: IO[bytes], secrets: Mapping[str, str]) -> NodeProcess:
    groups = root.with_name(f"{root.name}.groups")
    # Made here, so that it is removed however the node ends.
    scratch = Path(tempfile.mkdtemp(prefix="cloudtrain-")).resolve()  # as the node names it
    reader, writer = os.pipe()
    paths = {"GROUPS": groups, "SCRATCH": scratch, "SECRETS_FD": reader}
    try:
        process = subprocess.Popen(
            [*(spec.entrypoint or ()), *spec.command],
            cwd=root / spec.workdir,
            env=env | {ENGINE_PREFIX + key: str(value) for key, value in paths.items()},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=(reader,),
        )
        os.write(writer, json.dumps(dict(secrets)).encode())
    except OSError:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    finally:
        os.close(reader)
        os.close(writer)
    node = NodeProcess(process, groups, scratch)
    record = {"pid": process.pid, "scratch": str(scratch), "boot": boot_id()}
    try:
        put(root.with_name(f"{root.name}.started"), json.dumps(record).encode())
    except OSError:
        node.kill()
        raise
    return node


def _started(nodes: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name and record of each node that was started since this machine's boot."""
    for path in nodes.glob("*.started"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            record = json.loads(path.read_bytes())
            if record["boot"] == boot_id() and record["pid"] and record["scratch"]:
                yield path.stem, record


def _exists(pid: int) -> bool:
    with contextlib.suppress(OSError):
        os.kill(pid, 0)
        return True
    return False


def _kill_groups(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        for group in path.read_text().split():
            with contextlib.suppress(OSError):
                os.killpg(int(group), signal.SIGKILL)


def share_of_gpus(number: int, spec: NodeSpec, environ: Mapping[str, str]) -> list[str]:
    """Return a node's share of the GPUs that the environment leaves, in turn. Raises `CapacityError` for too few."""
    first = number * spec.gpus
    left = _left(environ)
    ours = [str(i) for i in range(first + spec.gpus)] if left is None else left
    if len(ours) < first + spec.gpus:
        raise CapacityError(f"node {number} has no {spec.gpus} of the {len(ours)} GPUs that {VISIBLE} names")
    return ours[first : first + spec.gpus]


def _left(environ: Mapping[str, str]) -> list[str] | None:
    """Return the GPUs in CUDA_VISIBLE_DEVICES up to the first invalid one, as CUDA does. None if it is not set."""
    given = environ.get(VISIBLE)
    if given is None:
        return None
    words = (word.strip() for word in given.split(","))
    return list(dict.fromkeys(itertools.takewhile(re.compile(r"\d+|(GPU|MIG)-\S+").fullmatch, words)))


def free_port_pair() -> int:
    """Return a free loopback port whose successor is free too: rendezvous and node link.

    It is below the ports of outgoing connections (Linux from 32768, macOS from 49152). Such a connection could take the
    port before it is listened on.
    """
    for _ in range(200):
        port = random.randrange(20000, 32000)
        with socket.socket() as first, socket.socket() as second, contextlib.suppress(OSError):
            first.bind(("127.0.0.1", port))
            second.bind(("127.0.0.1", port + 1))
            return port
    raise CapacityError("no two neighbouring ports of 127.0.0.1 are free")


def check_gpus(wanted: int, name: str) -> None:
    """Raise `SpecError` unless `share_of_gpus` deals ``wanted`` GPUs that ``nvidia-smi -L`` calls ``name``."""
    found = _found_gpus()
    whole = [(word, kind) for word, kind in found if word.isdigit()]
    left = _left(os.environ)
    ours = [kind for _, kind in whole]
    if left is not None:  # a GPU's UUID may be cut short
        kinds = (next((kind for key, kind in found if key == word or _is_start(word, key)), "") for word in left)
        ours = list(itertools.takewhile(bool, kinds))
    matching = [name.upper() in kind.upper().replace(" ", "-") for kind in ours]
    if sum(matching) < wanted:
        has = f"{len(whole)} ({whole[0][1]})" if whole else "none"
        has += f", and {VISIBLE}={os.environ[VISIBLE]} leaves {len(ours)} of them" if left is not None else ""
        raise SpecError(
            f"the job asks for {wanted} {name} GPUs on this machine, which has {has}",
            field="resources.gpu",
            hint="ask for what this machine has, or choose another provider with --provider",
        )
    if not all(matching[:wanted]):
        why = f"other GPUs come before this machine's {wanted} {name}"
        raise SpecError(why, field="resources.gpu", hint=f"name these alone in {VISIBLE}")


def has_torch(python: str) -> bool:
    """Return False if the program ``python`` reports that it has no torch."""
    if python == sys.executable:
        return importlib.util.find_spec("torch") is not None
    code = "import importlib.util, sys; sys.exit(0 if importlib.util.find_spec('torch') else 66)"
    return subprocess.run([python, "-c", code], check=False, capture_output=True).returncode != 66


def _is_start(word: str, key: str) -> bool:
    return not word.isdigit() and key.startswith(word)


def _found_gpus() -> list[tuple[str, str]]:
    """Return (index or UUID, model) of each GPU of this machine, an entry for each, and the UUIDs of its MIG slices."""
    tool = shutil.which("nvidia-smi")
    listing = subprocess.run([tool, "-L"], capture_output=True, text=True, check=False).stdout if tool else ""
    found, model = [], ""
    for line in listing.splitlines():
        if gpu := re.match(r"GPU (\d+): ([^(]*)", line):
            model = gpu[2].strip()
            found.append((gpu[1], model))
        if uuid := re.search(r"\(UUID: ([^)]*)\)", line):
            found.append((uuid[1], model))
    return found
