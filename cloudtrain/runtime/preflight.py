"""Run the check of `node_check` on this node before the ranks: one process for each rank, without torchrun."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ..provider_api.node import Topology
from ..validate import duration
from . import node_check
from .cause import BROKEN_GPU, Failure
from .node_check import Finding
from .timings import TIMINGS

__all__ = ["check_failure", "run_check"]

TAIL = 8192
"""Bytes at the end of a process's output in which its error is looked for."""


def run_check(
    commands: Sequence[Sequence[str]],
    env: Mapping[str, str],
    topology: Topology,
    *,
    folder: Path,
    gpus: int | None,
    started: Callable[[int], None],
    wait: Callable[[Callable[[], bool]], None],
    broken: Callable[[], bool],
) -> list[Finding]:
    """Run the command of each of this node's processes. Return their problems; on node 0, also those of all nodes.

    ``gpus`` is the number that each node must have. ``started`` gets each pid. ``wait`` returns once its argument is
    true, or sooner if the attempt is over; ``broken()``: by a failure anywhere. Raises `OSError`.
    """
    node, count, ranks = topology.node_rank, len(commands), list[subprocess.Popen[bytes]]()
    words = {
        "WORLD_SIZE": topology.nodes * count,
        "LOCAL_WORLD_SIZE": count,
        "GROUP_RANK": node,
        "MASTER_ADDR": topology.master_addr,
        "MASTER_PORT": topology.master_port,
        "CLOUDTRAIN_ARTIFACT_DIR": folder,
    }
    try:
        for local, command in enumerate(commands):
            own = {**words, "RANK": node * count + local, "LOCAL_RANK": local}
            with open(folder / str(local), "wb") as output:
                ranks.append(
                    subprocess.Popen(
                        command,
                        cwd=folder,
                        env={**env, **{name: str(value) for name, value in own.items()}},
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )
            started(ranks[-1].pid)
        return _findings(ranks, topology, folder, gpus, wait, broken)
    finally:
        for process in ranks:
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            threading.Thread(target=process.wait, daemon=True).start()  # a stuck driver may hold it for ever


def _findings(
    ranks: Sequence[subprocess.Popen[bytes]],
    topology: Topology,
    folder: Path,
    gpus: int | None,
    wait: Callable[[Callable[[], bool]], None],
    broken: Callable[[], bool],
) -> list[Finding]:
    node, began = topology.node_rank, time.monotonic()

    def ended() -> bool:
        codes = [process.poll() for process in ranks]
        return None not in codes or any(codes)

    def late(seconds: float) -> bool:
        return time.monotonic() - began >= seconds

    wait(lambda: ended() or late(TIMINGS.node_check_begin))
    mute = sum(node_check.BEGUN.encode() not in _tail(folder / str(local)) for local in range(len(ranks)))
    if mute and not ended() and late(TIMINGS.node_check_begin):
        waited = duration(TIMINGS.node_check_begin)
        return [Finding(f"{mute} of its {len(ranks)} processes have not begun in {waited}", node)]
    wait(lambda: ended() or late(TIMINGS.node_check))
    until = time.monotonic() + TIMINGS.stop_kill  # another node's failure may be the consequence of one that ends here
    while broken() and not ended() and time.monotonic() < until:
        time.sleep(0.05)
    if failed := [(local, code) for local, process in enumerate(ranks) if (code := process.poll())]:
        deaths = [_death(node, code, _tail(folder / str(local))) for local, code in failed]
        return [next((death for death in deaths if death.node is not None), deaths[0])]
    if not ended():
        return [Finding(f"it has not ended in {duration(TIMINGS.node_check)}")] if late(TIMINGS.node_check) else []
    if node:
        return []
    report = json.loads((folder / node_check.REPORT).read_bytes())
    return list(node_check.findings(report, nodes=topology.nodes, gpus=gpus))


def _tail(path: Path) -> bytes:
    with open(path, "rb") as stream:
        stream.seek(max(0, stream.seek(0, os.SEEK_END) - TAIL))
        return stream.read()


def _death(node: int, code: int, output: bytes) -> Finding:
    """Return a process's bad end. It names no node if it is the consequence of another node's."""
    lines = [line.strip() for line in output.decode(errors="replace").splitlines() if line.strip()] or ["no output"]

    def is_consequence(line: str) -> bool:
        return Failure(kind="check", node=node, time_ns=0, exception=line).consequence

    telling = next((line for line in lines if BROKEN_GPU.search(line)), None)
    after = next(filter(is_consequence, lines), None)
    text = f"a process ended with code {code}: {telling or after or lines[-1]}"
    return Finding(text, None if after and not telling else node)


def check_failure(found: Sequence[Finding], node: int, machines: Mapping[int, str]) -> Failure | None:
    """Return the failure of an attempt by findings of ``node``, None if ranks may start.

    It has the machine of the first node that a finding names. ``machines`` are the names known, by node.
    """
    grave = [item for item in found if item.category]
    if not grave:
        return None
    first = next((item for item in grave if item.node is not None), grave[0])
    return Failure(
        kind="check",
        node=node if first.node is None else first.node,
        time_ns=time.time_ns(),
        exception="; ".join(item.text for item in grave if item.node == first.node),
        category=first.category,
        machine="" if first.node is None else machines.get(first.node, ""),
    )
