"""Engines start a Simulation's nodes on this machine. Here: processes, each node with a root folder of its own.

A node's mounts appear below its root: a symbolic link for ``mount`` and ``sync``, a copy for ``copy``. What a platform
would tell a node about its peers comes as ``CLOUDTRAIN_ENGINE_*`` variables; secrets come through a pipe.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from .errors import CapacityError, StorageError
from .provider import NodeSpec

__all__ = ["NodeProcess", "ProcessEngine", "boot_id", "check_gpus", "free_port_pair"]

ENGINE_PREFIX = "CLOUDTRAIN_ENGINE_"


@dataclass
class NodeProcess:
    """A started node."""

    process: subprocess.Popen[bytes]
    groups: Path
    scratch: Path

    def poll(self) -> int | None:
        """The exit code, None while it runs."""
        return self.process.poll()

    def signal(self, name: str) -> None:
        """The platform's stop signal, to the node's first process alone, as a container runtime would."""
        with contextlib.suppress(OSError):
            self.process.send_signal(getattr(signal, name))

    def kill(self) -> None:
        """The node's first process and every process group it has noted, now."""
        with contextlib.suppress(OSError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        with contextlib.suppress(FileNotFoundError):
            for group in self.groups.read_text().split():
                with contextlib.suppress(OSError):
                    os.killpg(int(group), signal.SIGKILL)
            self.groups.unlink()
        shutil.rmtree(self.scratch, ignore_errors=True)


class ProcessEngine:
    """Nodes as process groups. ``folder`` is where their roots and output files go."""

    def __init__(self, *, folder: Path, environ: Mapping[str, str]) -> None:
        self._folder = folder
        self._environ = {k: v for k, v in environ.items() if not k.startswith(ENGINE_PREFIX)}

    def start(
        self, nodes: Sequence[NodeSpec], *, attempt: str, local: Mapping[str, Path], secrets: Mapping[str, str]
    ) -> list[NodeProcess]:
        """Start every node. ``local`` maps each mount's URL to its path on this machine.

        Raises `StorageError` when a root cannot be made; nothing is left running then.
        """
        port = free_port_pair()
        started: list[NodeProcess] = []
        try:
            for number, spec in enumerate(nodes):
                root = self._root(spec, f"node-{number}", local)
                peers = {"NODE": number, "NODES": len(nodes), "PORT": port, "SUPERVISOR": os.getpid()}
                out = self._folder / "out" / attempt
                out.mkdir(parents=True, exist_ok=True)
                with open(out / f"node-{number}.log", "ab") as stream:
                    started.append(
                        self._node(spec, root, peers, stream, _gpus_of(number, spec, self._environ), secrets)
                    )
        except OSError as exc:
            for node in started:
                node.kill()
            raise StorageError(f"cannot start node {len(started)} in {self._folder}: {exc}") from None
        return started

    def _root(self, spec: NodeSpec, name: str, local: Mapping[str, Path]) -> Path:
        root = self._folder / "nodes" / name
        shutil.rmtree(root, ignore_errors=True)
        (root / spec.workdir).mkdir(parents=True)
        for mount in spec.mounts:
            path = root / mount.path
            path.parent.mkdir(parents=True, exist_ok=True)
            source = local[mount.url]
            if mount.kind != "copy":
                path.symlink_to(source)
            elif source.is_dir():
                shutil.copytree(source, path, symlinks=True)
            else:
                shutil.copyfile(source, path)
        for relative, text in spec.files.items():
            (root / relative).parent.mkdir(parents=True, exist_ok=True)
            (root / relative).write_text(text, encoding="utf-8")
        return root

    def _node(
        self,
        spec: NodeSpec,
        root: Path,
        peers: Mapping[str, int],
        out: IO[bytes],
        gpus: Mapping[str, str],
        secrets: Mapping[str, str],
    ) -> NodeProcess:
        env = {**self._environ, **gpus, **spec.env, **{ENGINE_PREFIX + k: str(v) for k, v in peers.items()}}
        groups = root.with_name(f"{root.name}.groups")
        env[ENGINE_PREFIX + "GROUPS"] = str(groups)
        # Made here, so that it goes with the node however the node goes.
        scratch = Path(tempfile.mkdtemp(prefix="cloudtrain-"))
        env[ENGINE_PREFIX + "SCRATCH"] = str(scratch)
        reader, writer = os.pipe()
        try:
            env[ENGINE_PREFIX + "SECRETS_FD"] = str(reader)
            process = subprocess.Popen(
                [*(spec.entrypoint or ()), *spec.command],
                cwd=root / spec.workdir,
                env=env,
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
        return NodeProcess(process, groups, scratch)

    def clean(self) -> None:
        """Remove every node's root; what they printed stays."""
        shutil.rmtree(self._folder / "nodes", ignore_errors=True)


def _gpus_of(number: int, spec: NodeSpec, environ: Mapping[str, str]) -> dict[str, str]:
    """This machine's GPUs, those that the environment leaves us, dealt to the nodes in turn."""
    if not spec.gpus:
        return {}
    first = number * spec.gpus
    given = environ.get("CUDA_VISIBLE_DEVICES")
    ours = given.split(",") if given else [str(i) for i in range(first + spec.gpus)]
    return {"CUDA_VISIBLE_DEVICES": ",".join(ours[first : first + spec.gpus])}


def free_port_pair() -> int:
    """A port of loopback that is free now, as is the one after it: rendezvous and node link.

    From below what systems give to outgoing connections (Linux from 32768, macOS from 49152), or one of those could
    take it in the seconds until it is listened on.
    """
    for _ in range(200):
        port = random.randrange(20000, 32000)
        with socket.socket() as first, socket.socket() as second, contextlib.suppress(OSError):
            first.bind(("127.0.0.1", port))
            second.bind(("127.0.0.1", port + 1))
            return port
    raise CapacityError("no two neighbouring ports of 127.0.0.1 are free")


def check_gpus(wanted: int, name: str) -> None:
    """Raise `CapacityError` unless this machine has ``wanted`` GPUs called ``name`` (as in ``nvidia-smi -L``)."""
    tool = shutil.which("nvidia-smi")
    listing = ""
    if tool:
        listing = subprocess.run([tool, "-L"], capture_output=True, text=True, check=False).stdout
    found = [line for line in listing.splitlines() if line.startswith("GPU ")]
    matching = [line for line in found if name.upper() in line.upper().replace(" ", "-").split("(")[0]]
    if len(matching) < wanted:
        has = f"{len(found)} ({found[0].split(':', 1)[1].split('(')[0].strip()})" if found else "none"
        raise CapacityError(f"the job asks for {wanted} {name} GPUs on this machine, which has {has}")


def boot_id() -> str:
    """Something that changes whenever this machine starts; empty where it cannot be told."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    with contextlib.suppress(OSError):
        done = subprocess.run(["sysctl", "-n", "kern.bootsessionuuid"], capture_output=True, text=True, check=False)
        return done.stdout.strip()
    return ""
