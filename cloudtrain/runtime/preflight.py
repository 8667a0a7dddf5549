"""Run the check of `node_check` on this node before the ranks: one process for each rank, without torchrun."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ..provider_api.node import Topology
from ..validate import duration
from . import node_check
from .cause import BROKEN_GPU, Failure
from .host_facts import end_child
from .launch import without_sigterm
from .node_check import Finding
from .timings import TIMINGS

Wait = Callable[[Callable[[], bool], float | None], None]


def run_check(
    command: Sequence[str], count: int, env: Mapping[str, str], topology: Topology, *, folder: Path, gpus: int | None,
    started: Callable[[int], None], wait: Wait, over: Callable[[], bool],
) -> list[Finding]:  # fmt: skip
    """Run ``command`` as ``count`` processes. Return this node's problems; on node 0, also those of all nodes.

    ``folder`` keeps their output and the report. ``gpus`` is the number that each node must have. ``started`` gets each
    pid. ``wait`` returns once its argument is true, or at a time (monotonic seconds). ``over``: the attempt has ended.
    Raises `OSError`.
    """
    node = topology.node_rank
    words: dict[str, object] = {"WORLD_SIZE": topology.nodes * count, "LOCAL_WORLD_SIZE": count, "GROUP_RANK": node}
    words |= {"MASTER_ADDR": topology.master_addr, "MASTER_PORT": topology.master_port}
    words["CLOUDTRAIN_ARTIFACT_DIR"] = folder
    outputs = {folder / f"rank-{node * count + local}.log": local for local in range(count)}
    ranks: dict[Path, subprocess.Popen[bytes]] = {}
    try:
        for path, local in outputs.items():
            own = {**words, "RANK": node * count + local, "LOCAL_RANK": local}
            given = {**env, **{name: str(value) for name, value in own.items()}}
            with open(path, "wb") as file, without_sigterm():  # a platform may signal every process of a node
                ranks[path] = subprocess.Popen(
                    command, cwd=folder, env=given, stdin=subprocess.DEVNULL, stdout=file, stderr=file,
                    start_new_session=True,
                )  # fmt: skip
            started(ranks[path].pid)
        return _findings(ranks, topology, folder, gpus, wait, over)
    finally:
        for process in ranks.values():
            end_child(process)


def _findings(
    ranks: Mapping[Path, subprocess.Popen[bytes]], topology: Topology, folder: Path, gpus: int | None, wait: Wait,
    over: Callable[[], bool],
) -> list[Finding]:  # fmt: skip
    began = time.monotonic()

    def ended() -> bool:
        codes = [process.poll() for process in ranks.values()]
        return None not in codes or any(codes)

    def late() -> list[Finding]:
        waited = time.monotonic() - began
        mute = [path for path in ranks if node_check.BEGUN not in path.read_text(errors="replace")]
        if waited >= TIMINGS.node_check_begin and mute:
            text = f"{len(mute)} of its {len(ranks)} processes have not begun in {duration(waited)}"
            return [Finding(text, topology.node_rank)]
        return [Finding(f"it has not ended in {duration(waited)}")] if waited >= TIMINGS.node_check else []

    wait(lambda: over() or ended() or bool(late()), None)
    # Another node's failure may be the consequence of one that ends here. And after a notice all nodes hear of it.
    wait(lambda: ended() or bool(late()), time.monotonic() + TIMINGS.stop_kill)
    codes = {path: process.poll() for path, process in ranks.items()}
    ended_badly = {path: code for path, code in codes.items() if code and code != -signal.SIGTERM}
    if deaths := [_death(topology.node_rank, code, path) for path, code in ended_badly.items()]:
        return [next((death for death in deaths if death.node is not None), deaths[0])]
    if topology.node_rank or any(codes.values()) or not ended():
        return late() if not ended() else []
    report = json.loads((folder / node_check.REPORT).read_bytes())
    return list(node_check.findings(report, nodes=topology.nodes, gpus=gpus))


def _death(node: int, code: int, output: Path) -> Finding:
    """Return a process's bad end. It names no node if it is the consequence of another node's."""
    lines = [line.strip() for line in output.read_text(errors="replace").splitlines() if line.strip()] or ["no output"]
    broken = next(filter(BROKEN_GPU.search, lines), None)
    parts = (line for line in lines if Failure(kind="check", node=node, time_ns=0, exception=line).consequence)
    after = None if broken else next(parts, None)
    return Finding(f"a process ended with code {code}: {broken or after or lines[-1]}", None if after else node)


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
